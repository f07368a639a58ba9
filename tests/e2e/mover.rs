//! Moves that take long: the process answers meanwhile, whatever happens to it, to its daemon, or to the move.

use std::path::PathBuf;

use gpumux_tests::{Node, PATIENCE, Process, Run, real, wait_for};
use rustix::process::Signal;
use serde_json::Value;

use crate::memory::python;

const MIB: u64 = 1 << 20;

/// A program with so many MiB of memory, which it fills. It does what it reads, and prints each line when it is done.
const PROGRAM: &str = r#"
import os, sys
MIB = 1 << 20
context, size = use_device(), int(sys.argv[1]) * MIB
def alloc(size):
    at = ctypes.c_uint64()
    call("cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(size))
    return at
def free():
    left, total = ctypes.c_size_t(), ctypes.c_size_t()
    call("cuMemGetInfo_v2", ctypes.byref(left), ctypes.byref(total))
    assert left.value <= total.value
    return left.value
if size:
    at = alloc(size)
    call("cuMemsetD32_v2", at, 7, ctypes.c_size_t(size // 4))
    call("cuCtxSynchronize")
print("ready", flush=True)
for line in sys.stdin:
    what = line.strip()
    if what == "take":
        # More than the process was granted: the daemon is asked.
        call("cuMemFree_v2", alloc(300 * MIB))
    elif what == "look":
        assert free() > 0
    elif what.startswith("keep "):
        alloc(int(what.removeprefix("keep ")) * MIB)
    elif what == "fill":
        while free() >= 2 * MIB:
            alloc(2 * MIB)
    elif what == "read":
        value = ctypes.c_uint32()
        call("cuMemcpyDtoH_v2", ctypes.byref(value), ctypes.c_uint64(at.value + size - MIB), ctypes.c_size_t(4))
        assert value.value == 7, value.value
    elif what == "fork":
        child = os.fork()
        if child == 0:
            os._exit(3)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    elif what == "exit":
        break
    print(what, flush=True)
"#;

/// The library makes host memory for a move, or copies to it.
const MAKES: &str = "cuMemHostRegister_v2";
const COPIES: &str = "cuMemcpyDtoHAsync_v2";

/// The command of the program. `None` where there is no Python.
fn program(node: &Node, mib: u32) -> Option<String> {
    Some(format!("{} {mib}", python(node, PROGRAM)?))
}

/// A tenant whose next move to the host takes until it is let go on.
struct Mover {
    process: Process,
    /// It is there while the move is held up.
    file: PathBuf,
    sleep: Option<Process>,
}

impl Mover {
    /// `None` where there is no Python, or no emulated device.
    fn start(node: &Node, function: &str) -> Option<Self> {
        if real() {
            eprintln!("SKIPPED: calls of a real driver cannot be held up");
            return None;
        }
        let command = program(node, 48)?;
        let file = node.dir().join("delay");
        let mut tenant = node.tenant("--name mover --class batch", &command);
        tenant
            .env(
                "GPUMUX_EMU_FAULT",
                format!("delay@1:{function}:gpumux-mover"),
            )
            .env("GPUMUX_EMU_DELAY_FILE", &file);
        let mut mover = Self {
            process: Process::start(&mut tenant),
            file,
            sleep: None,
        };
        mover.wait("ready");
        node.wait_tenant("mover", |it| bytes(it, "in_use") >= 48 * MIB);
        Some(mover)
    }

    #[track_caller]
    fn wait(&mut self, answer: &str) {
        assert_eq!(self.process.next_line(), answer);
    }

    #[track_caller]
    fn order(&mut self, what: &str) {
        self.process.write(&format!("{what}\n"));
        self.wait(what);
    }

    /// Begins to move it, until it is held up.
    #[track_caller]
    fn begin(&mut self, node: &Node) {
        self.sleep = Some(Process::start(&mut node.gpumux(["sleep", "mover"])));
        wait_for("the move to be held up", PATIENCE, || {
            self.file.exists().then_some(())
        });
    }

    /// It is still held up, and no request was answered.
    #[track_caller]
    fn is_held_up(&mut self) {
        assert!(self.file.exists());
        let answer = self.sleep.as_mut().and_then(Process::poll);
        assert!(answer.is_none(), "the move has ended: {answer:?}");
    }

    /// Lets the move go on.
    fn release(&self) {
        std::fs::remove_file(&self.file).expect("it is there");
    }

    /// What the user who asked for the move was answered.
    #[track_caller]
    fn answer(&mut self) -> gpumux_tests::Finished {
        let sleep = self.sleep.take().expect("a move was begun");
        sleep.finish_within(PATIENCE * 2)
    }

    /// It has its memory and every byte of it, can be moved, and ends well.
    #[track_caller]
    fn ends_well(mut self, node: &Node) {
        self.order("read");
        wait_for("it is moved", PATIENCE, || {
            let slept = node.gpumux(["sleep", "mover"]).run();
            slept.status.success().then_some(())
        });
        self.order("read");
        self.process.close_input();
        self.process.finish_within(PATIENCE).ok();
    }
}

fn bytes(tenant: &Value, field: &str) -> u64 {
    let memory = tenant["memory"].as_array().expect("an array");
    memory.iter().filter_map(|it| it[field].as_u64()).sum()
}

#[test]
fn process_asks_and_is_set_while_host_memory_is_made() {
    let node = Node::start();
    let Some(mut mover) = Mover::start(&node, MAKES) else {
        return;
    };
    mover.begin(&node);
    for what in ["take", "look", "read", "take"] {
        mover.order(what);
        mover.is_held_up();
    }
    crate::contracts::set(&node, "mover --class latency --weight 3");
    node.wait_tenant("mover", |it| {
        it["spec"]["weight"] == 3.0 && it["domains"][0]["timeslice_us"] == 1_000_000
    });
    mover.is_held_up();
    mover.release();
    mover.answer().ok();
    mover.ends_well(&node);
}

/// The process runs when the daemon ends: it must not wait for a daemon that is not there.
#[test]
fn daemon_death_while_host_memory_is_made_stops_nothing() {
    let mut node = Node::start();
    let Some(mut mover) = Mover::start(&node, MAKES) else {
        return;
    };
    mover.begin(&node);
    node.kill_daemon();
    mover.order("take");
    assert!(mover.file.exists());
    mover.release();
    node.start_daemon();
    node.wait_tenant("mover", |it| bytes(it, "in_use") >= 48 * MIB);
    mover.ends_well(&node);
}

/// The process is frozen when the daemon ends: it runs again with its memory.
#[test]
fn daemon_death_while_memory_is_copied_loses_no_byte() {
    let mut node = Node::start();
    let Some(mut mover) = Mover::start(&node, COPIES) else {
        return;
    };
    mover.begin(&node);
    node.kill_daemon();
    mover.release();
    mover.order("read");
    node.start_daemon();
    node.wait_tenant("mover", |it| bytes(it, "in_use") >= 48 * MIB);
    mover.ends_well(&node);
}

/// The daemon stands still for longer than its lease, and goes on.
#[test]
fn daemon_stop_while_host_memory_is_made_calls_the_move_off() {
    let node = Node::start();
    let Some(mut mover) = Mover::start(&node, MAKES) else {
        return;
    };
    mover.begin(&node);
    node.daemon().signal(Signal::STOP);
    // Without an answer of the daemon: its lease has expired.
    mover.order("take");
    mover.release();
    node.daemon().signal(Signal::CONT);
    // The user's request may be carried out yet.
    node.wait_tenant("mover", |it| {
        bytes(it, "in_use") + bytes(it, "swapped") >= 48 * MIB
    });
    mover.ends_well(&node);
}

/// A program that needs the memory of others waits for the daemon that was killed: only that can move it.
#[test]
fn allocation_waits_for_a_daemon_that_was_killed() {
    if real() {
        return eprintln!("SKIPPED: calls of a real driver cannot be held up");
    }
    let mut node = Node::with_memory(256 * MIB);
    let Some(command) = program(&node, 0) else {
        return;
    };
    let idle = "gpumux workload idle --seconds 600 --memory 150MiB";
    let _holder = Process::start(&mut node.tenant("--name holder", idle));
    node.wait_tenant("holder", |it| bytes(it, "in_use") >= 150 * MIB);
    let file = node.dir().join("delay");
    let mut tenant = node.tenant("--name late", &command);
    tenant
        .env("GPUMUX_EMU_FAULT", "delay@1:cuMemCreate")
        .env("GPUMUX_EMU_DELAY_FILE", &file);
    let mut late = Process::start(&mut tenant);
    late.wait_lines(1);
    // Its session begins beside it. A process that never had one waits for no daemon.
    node.wait_tenant("late", |it| !it["domains"][0].is_null());
    node.kill_daemon();
    late.write("keep 150\n");
    late.close_input();
    wait_for("the allocation", PATIENCE, || {
        assert!(
            late.poll().is_none(),
            "it ended: {}{}",
            late.out(),
            late.err()
        );
        file.exists().then_some(())
    });
    std::fs::remove_file(&file).expect("it is there");
    node.start_daemon();
    late.finish_within(PATIENCE * 2).ok();
}

/// What a killed daemon granted and was not used is no promise of the next one: another program has taken the device meanwhile.
#[test]
fn grant_of_a_daemon_that_was_killed_is_asked_for_again() {
    if real() {
        return eprintln!("SKIPPED: a real device is not filled in pieces in time");
    }
    // A grant is up to 2 MiB more than is needed here.
    let mut node = Node::with_memory(256 * MIB);
    let Some(command) = program(&node, 100) else {
        return;
    };
    let start = |name: &str| Process::start(&mut node.tenant(&format!("--name {name}"), &command));
    let (mut small, mut large) = (start("small"), start("large"));
    for name in ["small", "large"] {
        node.wait_tenant(name, |it| bytes(it, "in_use") >= 100 * MIB);
    }
    node.kill_daemon();
    large.write("fill\n");
    large.wait_lines(2);
    // It is about to allocate.
    small.write("now\nkeep 2\n");
    small.close_input();
    small.wait_lines(2);
    node.start_daemon();
    small.finish_within(PATIENCE * 2).ok();
    drop(large);
}

/// Memory that finds no room when its daemon is gone: the next daemon makes room for it.
#[test]
fn sleeper_without_room_has_a_session_with_the_next_daemon() {
    if real() {
        return eprintln!("SKIPPED: two programs do not fill a real device in time");
    }
    let mut node = Node::with_memory(256 * MIB);
    let Some(command) = program(&node, 120) else {
        return;
    };
    let mut sleeper = Process::start(&mut node.tenant("--name sleeper", &command));
    sleeper.wait_lines(1);
    node.wait_tenant("sleeper", |it| !it["domains"][0].is_null());
    node.gpumux(["sleep", "sleeper"]).run().ok();
    let idle = "gpumux workload idle --seconds 600 --memory 150MiB";
    let _holder = Process::start(&mut node.tenant("--name holder", idle));
    node.wait_tenant("holder", |it| bytes(it, "in_use") >= 150 * MIB);
    node.kill_daemon();
    // The library reports it after its first try.
    wait_for("the sleeper's line", PATIENCE, || {
        sleeper.err().contains("trying on").then_some(())
    });
    node.start_daemon();
    sleeper.write("read\n");
    sleeper.wait_lines(2);
    assert_eq!(sleeper.out().lines().last(), Some("read"));
}

#[test]
fn kill_while_host_memory_is_made_leaves_nothing() {
    let node = Node::start();
    let free = || {
        let memory = node.gpumux(["memory", "--json"]).run().ok().json();
        memory["devices"][0]["free"].as_u64().expect("a number")
    };
    let before = wait_for("the device's books", PATIENCE, || Some(free()));
    let Some(mut mover) = Mover::start(&node, MAKES) else {
        return;
    };
    mover.begin(&node);
    mover.process.signal(Signal::KILL);
    let answer = mover.answer();
    assert!(!answer.status.success(), "{answer:?}");
    assert_eq!(mover.process.finish_within(PATIENCE).code(), 137);
    wait_for("the memory of the dead", PATIENCE, || {
        (node.find_tenant("mover").is_none() && free() >= before).then_some(())
    });
}

#[test]
fn process_forks_and_ends_while_host_memory_is_made() {
    let node = Node::start();
    let Some(mut mover) = Mover::start(&node, MAKES) else {
        return;
    };
    mover.begin(&node);
    mover.order("fork");
    mover.order("take");
    mover.is_held_up();
    mover.process.write("exit\n");
    // The call never returns: the end of the process does not wait for it.
    let Mover { process, file, .. } = mover;
    process.finish_within(PATIENCE).ok();
    assert!(file.exists());
}

#[test]
fn wake_calls_a_move_off_before_anything_moved() {
    let node = Node::start();
    let Some(mut mover) = Mover::start(&node, MAKES) else {
        return;
    };
    mover.begin(&node);
    node.gpumux(["wake", "mover"]).run().ok();
    let answer = mover.answer();
    assert!(answer.err.contains("it was woken"), "{answer:?}");
    assert!(mover.file.exists());
    mover.order("take");
    mover.release();
    let tenant = node.find_tenant("mover").expect("it runs");
    assert_eq!(tenant["moves"]["outs"], 0, "{tenant:#}");
    mover.ends_well(&node);
}
