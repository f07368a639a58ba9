//! Shared memory over restarts and pauses of the daemon.

use gpumux_tests::{Node, PATIENCE, wait_for};
use rustix::process::{Pid, Signal, kill_process};

use super::{CLOSES, COMMON, KILLS_EXPORTER, MIB, bytes, sleep, start, wait_pinned};
use crate::memory::{begin_between_daemons, free, python};

/// A parent exports 10 MiB, which two children open. It does what it reads: with the memory, or to a child.
const FAMILY: &str = r#"
import os, signal
if len(sys.argv) > 1:
    at = open_memory(sys.argv[1])
    say("open")
    for line in sys.stdin:
        if line == "close\n":
            close_memory(at)
            say("closed")
        else:
            say(read(at))
    sys.exit()
at, other = alloc(10 * MIB), alloc(20 * MIB)
write(at, 1)
write(other, 1)
call("cuCtxSynchronize")
handle = export(at)
children = [Child(handle), Child(handle)]
for child in children:
    assert child.hear() == ["open"]
say("open")
for line in sys.stdin:
    what, n = line.split()
    if what == "write":
        write(at, int(n))
        call("cuCtxSynchronize")
        say("written")
    elif what == "free":
        free(at)
        say("freed")
    elif what.startswith("SIG"):
        os.kill(children[int(n)].process.pid, getattr(signal, what))
        say(what)
    else:
        children[int(n)].say(what)
        say(*children[int(n)].hear())
"#;

/// The family, which takes orders.
struct Family {
    process: gpumux_tests::Process,
}

impl Family {
    fn start(node: &Node) -> Option<Self> {
        let process = start(node, "family", FAMILY)?;
        let mut family = Self { process };
        family.wait("open");
        Some(family)
    }

    #[track_caller]
    fn wait(&mut self, answer: &str) {
        assert_eq!(self.process.next_line(), answer);
    }

    #[track_caller]
    fn order(&mut self, what: &str, answer: &str) {
        self.process.write(&format!("{what}\n"));
        self.wait(answer);
    }
}

/// A process that begins and opens memory while there is no daemon: it waits for the next ones, and these for the exporter.
#[test]
fn memory_is_opened_over_restarts() {
    const PROGRAM: &str = r#"
if len(sys.argv) > 1:
    say("asks")
    at = open_memory(sys.argv[1])
    say(read(at))
    sys.exit()
at = alloc(10 * MIB)
write(at, 7)
handle = export(at)
say("exported")
hear()
child = Child(handle)
say(*child.hear())
hear()
say(*child.hear())
"#;
    let mut node = Node::start();
    let Some(mut program) = start(&node, "family", PROGRAM) else {
        return;
    };
    program.wait_lines(1);
    node.kill_daemon();
    program.write("go\n");
    program.wait_lines(2);
    // Its exporter comes late to the next daemon, which is lost, too.
    program.signal(Signal::STOP);
    for is_last in [false, true] {
        node.start_daemon();
        node.wait_tenant("family", |it| {
            it["pids"].as_array().is_some_and(|it| !it.is_empty())
        });
        if !is_last {
            node.kill_daemon();
        }
    }
    program.signal(Signal::CONT);
    program.write("go\n");
    program.wait_lines(3);
    let out = program.out();
    assert_eq!(out.lines().last(), Some("7"), "{}", program.err());
}

#[test]
fn memory_of_a_stopped_opener_stays_after_a_restart() {
    let mut node = Node::start();
    let Some(mut family) = Family::start(&node) else {
        return;
    };
    wait_pinned(&node, "family", 10);
    family.order("SIGSTOP 0", "SIGSTOP");
    node.kill_daemon();
    node.start_daemon();
    let both = |it: &serde_json::Value| it["pids"].as_array().is_some_and(|it| it.len() >= 2);
    node.wait_tenant("family", |it| both(it) && bytes(it, "pinned") == 10 * MIB);
    family.order("close 1", "closed");
    // The daemon has received of no process that has it open; the stopped one has.
    assert!(sleep(&node, "family") >= 20 * MIB);
    family.order("write 7", "written");
    family.order("SIGCONT 0", "SIGCONT");
    family.order("read 0", "7");
    family.order("close 0", "closed");
    wait_pinned(&node, "family", 10);
    // It is given back with the memory.
    family.order("free 0", "freed");
    wait_pinned(&node, "family", 0);
    family.process.close_input();
    family.process.finish().ok();
}

#[test]
fn memory_closed_while_the_daemon_stands_still_moves_again() {
    let node = Node::start();
    let Some(mut family) = Family::start(&node) else {
        return;
    };
    wait_pinned(&node, "family", 10);
    node.daemon().signal(Signal::STOP);
    wait_for("three processes to lose the daemon", PATIENCE, || {
        let lost = family.process.err().matches("it stands still").count();
        (lost == 3).then_some(())
    });
    family.order("close 0", "closed");
    family.order("close 1", "closed");
    node.daemon().signal(Signal::CONT);
    wait_pinned(&node, "family", 0);
    family.process.close_input();
    family.process.finish().ok();
}

/// A process opens the same memory for two devices: each reaches it.
#[test]
fn memory_is_opened_for_each_device() {
    const PROGRAM: &str = r#"
if len(sys.argv) > 1:
    first = open_memory(sys.argv[1])
    other = ctypes.c_void_p()
    call("cuDevicePrimaryCtxRetain", ctypes.byref(other), 1)
    call("cuCtxSetCurrent", other)
    second = open_memory(sys.argv[1])
    assert second != first, "each device has a mapping of its own"
    assert open_memory(sys.argv[1]) == second
    assert read(second) == 1
    write(second, 2)
    call("cuCtxSynchronize")
    # The first stays open while the other one's goes with its context.
    call("cuDevicePrimaryCtxRelease_v2", 1)
    call("cuCtxSetCurrent", context)
    assert cuda.cuIpcCloseMemHandle(ctypes.c_uint64(second)) != 0
    assert read(first) == 2
    say("one")
    hear()
    close_memory(first)
    sys.exit()
at = alloc(70 * MIB)
write(at, 1)
call("cuCtxSynchronize")
it = Child(export(at))
assert it.hear() == ["one"]
say("one")
hear()
it.say("close")
it.end()
assert read(at) == 2
say("closed")
hear()
"#;
    let Some(node) = Node::with_two_devices() else {
        return;
    };
    let Some(mut program) = start(&node, "family", PROGRAM) else {
        return;
    };
    program.wait_lines(1);
    wait_pinned(&node, "family", 70);
    program.write("close\n");
    program.wait_lines(2);
    wait_pinned(&node, "family", 0);
    program.write("end\n");
    program.finish().ok();
}

/// A process that is stopped answers nothing: the one that opens its memory gets an error, and can open it later.
#[test]
fn open_fails_in_time_while_the_exporter_is_stopped() {
    const PROGRAM: &str = r#"
import os, time
flag = os.path.join(os.path.dirname(__file__), "open")
if len(sys.argv) > 1:
    say("ready")
    while not os.path.exists(flag):
        time.sleep(0.01)
    say(try_open(sys.argv[1])[0])
    while os.path.exists(flag):
        time.sleep(0.01)
    say(read(open_memory(sys.argv[1])))
    sys.exit()
at = alloc(10 * MIB)
write(at, 5)
call("cuCtxSynchronize")
say(os.getpid())
child = subprocess.Popen([sys.executable, __file__, export(at)])
sys.exit(child.wait())
"#;
    let node = Node::start();
    let Some(mut process) = start(&node, "stopped", PROGRAM) else {
        return;
    };
    process.wait_lines(2);
    let exporter = process.out().lines().next().and_then(|it| it.parse().ok());
    let exporter = Pid::from_raw(exporter.expect("its number")).expect("a process");
    kill_process(exporter, Signal::STOP).expect("it runs");
    let flag = node.dir().join("open");
    std::fs::write(&flag, "").expect("room");
    let line = |n: usize| process.out().lines().nth(n).map(str::to_owned);
    // The daemon waits for 30 s.
    let error = wait_for("the answer", PATIENCE * 3, || line(2));
    assert_eq!(error, "205", "{}", process.err());
    kill_process(exporter, Signal::CONT).expect("it is there");
    std::fs::remove_file(&flag).expect("it is there");
    assert_eq!(wait_for("the memory", PATIENCE, || line(3)), "5");
    process.finish_within(PATIENCE).ok();
}

/// What is open of it stays readable, is accounted to no tenant, and comes free with the opener.
#[test]
fn memory_of_an_exporter_that_ends_without_a_daemon_stays_open() {
    const WRITES: &str = "write(at + 39 * MIB, 6)\nassert read(at + 39 * MIB) == 6\n";
    let program = [KILLS_EXPORTER, WRITES, CLOSES].concat();
    let mut node = Node::start();
    let before = free(&node);
    let Some(mut opener) = start(&node, "opener", &program) else {
        return;
    };
    opener.wait_lines(1);
    wait_pinned(&node, "opener", 40);
    node.kill_daemon();
    opener.write("kill it\n");
    opener.wait_lines(2);
    node.start_daemon();
    let alone = |it: &serde_json::Value| it["pids"].as_array().is_some_and(|it| it.len() == 1);
    let tenant = node.wait_tenant("opener", |it| alone(it) && bytes(it, "in_use") > 0);
    assert_eq!(bytes(&tenant, "pinned"), 0, "{tenant:#}");
    opener.write("read it\n");
    opener.wait_lines(3);
    opener.write("end\n");
    opener.finish().ok();
    wait_for("the memory of all", PATIENCE, || {
        (free(&node) >= before).then_some(())
    });
}

/// It has its memory before its first daemon is there, and passes it on once there is one.
#[test]
fn memory_of_a_program_begun_between_daemons_is_opened() {
    const WAITS: &str =
        "import sys\nif len(sys.argv) == 1:\n    assert sys.stdin.readline() == 'begin\\n'\n";
    const PROGRAM: &str = r#"
if len(sys.argv) > 1:
    say(read(open_memory(sys.argv[1])))
    sys.exit()
at = alloc(10 * MIB)
write(at, 5)
call("cuCtxSynchronize")
say("has it")
child = Child(export(at))
assert child.hear() == ["5"]
child.end()
"#;
    let mut node = Node::start();
    let Some(command) = python(&node, &[WAITS, COMMON, PROGRAM].concat()) else {
        return;
    };
    begin_between_daemons(&mut node, &command).finish().ok();
}
