//! Device memory that processes of a tenant share by CUDA IPC, while gpumux moves what is not shared.

mod events;
mod restarts;

use std::process::Command;

use gpumux_tests::{Node, PATIENCE, Process, Run, real, wait_for};
use serde_json::Value;

use crate::memory::python;

const MIB: u64 = 1 << 20;

/// What the programs of this file have in common. A process prints what it has done, and goes on when it reads a line.
const COMMON: &str = r#"
import subprocess, sys
class Handle(ctypes.Structure):
    _fields_ = [("words", ctypes.c_uint64 * 8)]
MIB = 1 << 20
context = use_device()
def alloc(size):
    at = ctypes.c_uint64()
    call("cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(size))
    return at.value
def free(at):
    call("cuMemFree_v2", ctypes.c_uint64(at))
def export(at):
    handle = Handle()
    call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(at))
    return bytes(handle).hex()
def try_open(text, flags=1):
    at = ctypes.c_uint64()
    handle = Handle.from_buffer_copy(bytes.fromhex(text))
    return cuda.cuIpcOpenMemHandle_v2(ctypes.byref(at), handle, flags), at.value
def open_memory(text):
    error, at = try_open(text)
    assert error == 0, f"cuIpcOpenMemHandle answers {error}"
    return at
def close_memory(at):
    call("cuIpcCloseMemHandle", ctypes.c_uint64(at))
def write(at, value):
    call("cuMemsetD32_v2", ctypes.c_uint64(at), value, ctypes.c_size_t(1))
def read(at):
    value = ctypes.c_uint32()
    call("cuMemcpyDtoH_v2", ctypes.byref(value), ctypes.c_uint64(at), ctypes.c_size_t(4))
    return value.value
def say(*words):
    print(*words, flush=True)
def hear():
    line = sys.stdin.readline()
    assert line, "the other side has ended"
    return line.split()
class Child:
    def __init__(self, *arguments):
        pipe = subprocess.PIPE
        command = [sys.executable, __file__, *map(str, arguments)]
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    def say(self, *words):
        print(*words, file=self.process.stdin, flush=True)
    def hear(self):
        line = self.process.stdout.readline()
        assert line, "the child has ended"
        return line.split()
    def end(self):
        self.process.stdin.close()
        assert self.process.wait() == 0
"#;

/// A tenant with this program, of which each process has [`COMMON`]; `None` where there is no Python.
fn start(node: &Node, name: &str, program: &str) -> Option<Process> {
    let command = python(node, &[COMMON, program].concat())?;
    // Every program has a file of its own.
    let script = node.dir().join(format!("{name}.py"));
    std::fs::rename(node.dir().join("program.py"), &script).expect("the script");
    let command = command.replace("program.py", &format!("{name}.py"));
    let options = format!("--name {name} --class batch");
    Some(Process::start(&mut node.tenant(&options, &command)))
}

fn bytes(tenant: &Value, field: &str) -> u64 {
    let memory = tenant["memory"].as_array().expect("an array");
    memory.iter().filter_map(|it| it[field].as_u64()).sum()
}

/// Waits until a tenant has so much pinned memory, rounded to MiB; what it has in all then.
#[track_caller]
fn wait_pinned(node: &Node, name: &str, mib: u64) -> u64 {
    let tenant = node.wait_tenant(name, |it| bytes(it, "pinned") / MIB == mib);
    bytes(&tenant, "in_use") + bytes(&tenant, "swapped")
}

#[track_caller]
fn sleep(node: &Node, name: &str) -> u64 {
    wait_for("it is moved", PATIENCE, || {
        let slept = node.gpumux(["sleep", name]).run();
        slept.status.success().then_some(())
    });
    let tenant = node.wait_tenant(name, |it| it["asleep"] == true);
    bytes(&tenant, "swapped")
}

/// The parent exports memory, of 150 MiB and of a few bytes; its child opens both, reads, writes, and closes them.
const PARENT_AND_CHILD: &str = r#"
def child(large, small):
    opened = open_memory(large)
    assert open_memory(large) == opened, "the same handle"
    little = open_memory(small)
    assert try_open(large, flags=0)[0] == 1
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(opened + 140 * MIB))
    assert (base.value, size.value) == (opened, 150 * MIB)
    assert cuda.cuMemFree_v2(ctypes.c_uint64(opened)) != 0, "another's"
    assert (read(opened), read(opened + 140 * MIB), read(little)) == (1, 2, 3)
    write(opened + 140 * MIB, 20)
    write(little, 30)
    call("cuCtxSynchronize")
    say("opened")
    hear()
    close_memory(opened)
    assert read(opened + 140 * MIB) == 20, "it was opened twice"
    close_memory(opened)
    assert cuda.cuIpcCloseMemHandle(ctypes.c_uint64(opened)) != 0
    close_memory(little)
    say("closed")
    hear()
    # All memory of the tenant is on the host.
    opened = open_memory(large)
    assert read(opened) == 1
    say("opened again")

if len(sys.argv) > 1:
    child(*sys.argv[1:])
    sys.exit()
large, small, other = alloc(150 * MIB), alloc(64), alloc(20 * MIB)
for at, value in (large, 1), (large + 140 * MIB, 2), (small, 3), (other, 4):
    write(at, value)
call("cuCtxSynchronize")
handle = export(large + 5)
assert export(large) == handle, "both are of the same allocation"
assert try_open(handle)[0] == 201, "in the process whose it is"
say("exported")
hear()
it = Child(handle, export(small))
assert it.hear() == ["opened"]
assert (read(large + 140 * MIB), read(small)) == (20, 30)
say("open")
hear()
assert (read(large), read(other)) == (1, 4)
it.say("close")
assert it.hear() == ["closed"]
say("closed")
hear()
it.say("open")
assert it.hear() == ["opened", "again"]
it.end()
assert (read(large), read(large + 140 * MIB), read(small), read(other)) == (1, 20, 30, 4)
say("ended")
hear()
"#;

#[test]
fn shared_memory_stays_while_open_and_is_counted_once() {
    let node = Node::start();
    let Some(mut program) = start(&node, "family", PARENT_AND_CHILD) else {
        return;
    };
    program.wait_lines(1);
    // What it was granted and does not use is given back then.
    let before = sleep(&node, "family");
    assert_eq!(before, 172 * MIB);
    program.write("open it\n");
    program.wait_lines(2);
    assert_eq!(wait_pinned(&node, "family", 152), before);
    // The rest moves, and comes back for the parent's next call.
    let swapped = sleep(&node, "family");
    assert!((20 * MIB..100 * MIB).contains(&swapped), "{swapped}");
    program.write("close it\n");
    program.wait_lines(3);
    assert_eq!(wait_pinned(&node, "family", 0), before);
    let swapped = sleep(&node, "family");
    assert!(swapped >= 172 * MIB, "{swapped}");
    program.write("open it\n");
    program.wait_lines(4);
    assert_eq!(
        wait_pinned(&node, "family", 0),
        before,
        "its child has ended"
    );
    program.write("end\n");
    let ended = program.finish().ok();
    assert!(ended.err.contains("same tenant"), "{}", ended.err);
}

/// Prints whether memory is fit for handles of processes, and the kinds of handles that it was made for, by both calls.
const ATTRIBUTES: &str = r#"
def attributes(at, *which):
    values = [ctypes.c_uint64() for _ in which]
    for value, one in zip(values, which):
        call("cuPointerGetAttribute", ctypes.byref(value), one, ctypes.c_uint64(at))
    singly = [it.value for it in values]
    count = len(which)
    together = [ctypes.c_uint64() for _ in which]
    places = (ctypes.c_void_p * count)(*map(ctypes.addressof, together))
    call("cuPointerGetAttributes", count, (ctypes.c_int * count)(*which), places, ctypes.c_uint64(at))
    assert singly == [it.value for it in together], singly
    return singly
at = alloc(4 * MIB)
export(at)
say(*attributes(at + MIB, 10, 14))
"#;

/// Libraries ask that before they make a handle, and send by another way otherwise.
#[test]
fn memory_of_ours_is_fit_for_handles_as_without_gpumux() {
    let node = Node::start();
    let Some(mut process) = start(&node, "asks", ATTRIBUTES) else {
        return;
    };
    assert_eq!(process.next_line(), "1 0");
    process.finish_within(PATIENCE).ok();
}

#[test]
fn token_of_another_tenant_opens_nothing() {
    const EXPORTER: &str = r#"
at = alloc(4 * MIB)
write(at, 7)
call("cuCtxSynchronize")
say(export(at))
hear()
assert read(at) == 7
"#;
    const THIEF: &str = r#"
alloc(MIB)
say(try_open(hear()[0])[0])
"#;
    let node = Node::start();
    let Some(mut exporter) = start(&node, "exporter", EXPORTER) else {
        return;
    };
    let mut thief = start(&node, "thief", THIEF).expect("Python is there");
    exporter.wait_lines(1);
    thief.write(&exporter.out());
    let thief = thief.finish().ok();
    assert_eq!(thief.out, "400\n");
    assert!(
        thief.err.contains("no process of this tenant"),
        "{}",
        thief.err
    );
    assert_eq!(bytes(&node.find_tenant("exporter").unwrap(), "pinned"), 0);
    exporter.write("end\n");
    exporter.finish().ok();
}

/// Each of two processes waits for what the other one writes into its memory, and a third tenant always has work.
#[test]
fn ranks_that_share_memory_go_on_beside_a_neighbour() {
    const RANKS: &str = r#"
ROUNDS = 150
def rank(own, other, first):
    for n in range(1, ROUNDS + 1):
        if first:
            write(other, n)
        while read(own) != n:
            pass
        if not first:
            write(other, n)
    # Work of a process that ends is lost.
    call("cuCtxSynchronize")
own = alloc(3 * MIB)
write(own, 0)
call("cuCtxSynchronize")
if len(sys.argv) > 1:
    say(export(own))
    rank(own, open_memory(sys.argv[1]), False)
    sys.exit()
hear()
it = Child(export(own))
rank(own, open_memory(it.hear()[0]), True)
it.end()
say("done")
"#;
    let node = Node::start();
    let Some(mut ranks) = start(&node, "ranks", RANKS) else {
        return;
    };
    let load = "gpumux workload batch --kernel-us 2000 --seconds 600";
    let _neighbour = Process::start(&mut node.tenant("--name neighbour --class batch", load));
    node.wait_tenant("neighbour", crate::is_well);
    ranks.write("begin\n");
    let ended = ranks.finish_within(PATIENCE * 6).ok();
    assert_eq!(ended.out, "done\n");
}

/// Opens memory of a process that it kills then, reads it, and goes on as the lines behind this do.
const KILLS_EXPORTER: &str = r#"
if len(sys.argv) > 1:
    at = alloc(40 * MIB)
    write(at + 39 * MIB, 5)
    call("cuCtxSynchronize")
    say(export(at))
    hear()
    sys.exit("it was to be killed")
alloc(MIB)
it = Child("exporter")
at = open_memory(it.hear()[0])
say("open")
hear()
it.process.kill()
it.process.wait()
say("killed")
hear()
assert read(at + 39 * MIB) == 5
"#;
const CLOSES: &str = "close_memory(at)\nsay('closed')\nhear()\n";

#[test]
fn memory_of_a_killed_exporter_is_its_opener_s() {
    let node = Node::start();
    let Some(mut opener) = start(&node, "opener", &[KILLS_EXPORTER, CLOSES].concat()) else {
        return;
    };
    opener.wait_lines(1);
    wait_pinned(&node, "opener", 40);
    opener.write("kill it\n");
    opener.wait_lines(2);
    let alone = |it: &Value| it["pids"].as_array().is_some_and(|pids| pids.len() == 1);
    node.wait_tenant("opener", |it| alone(it) && bytes(it, "pinned") == 40 * MIB);
    opener.write("close it\n");
    opener.wait_lines(3);
    wait_pinned(&node, "opener", 0);
    opener.write("end\n");
    opener.finish().ok();
}

#[test]
fn freed_memory_is_accounted_until_it_is_closed() {
    const EXPORTER: &str = r#"
if len(sys.argv) > 1:
    at = open_memory(sys.argv[1])
    say("open")
    hear()
    assert read(at) == 6
    close_memory(at)
    say("closed")
    hear()
    assert try_open(sys.argv[1])[0] == 400, "it is no more"
    say("refused")
    sys.exit()
at = alloc(200 * MIB)
write(at, 6)
handle = export(at)
it = Child(handle)
assert it.hear() == ["open"]
free(at)
# What others have open is not given out again, though its address may be.
again = alloc(200 * MIB)
write(again, 0)
call("cuCtxSynchronize")
free(again)
say("freed")
hear()
it.say("close")
assert it.hear() == ["closed"]
say("closed")
hear()
it.say("open")
assert it.hear() == ["refused"]
it.end()
say("done")
"#;
    let node = Node::start();
    let Some(mut exporter) = start(&node, "exporter", EXPORTER) else {
        return;
    };
    exporter.wait_lines(1);
    wait_pinned(&node, "exporter", 200);
    exporter.write("close it\n");
    exporter.wait_lines(2);
    wait_pinned(&node, "exporter", 0);
    node.wait_tenant("exporter", |it| bytes(it, "in_use") < 200 * MIB);
    exporter.write("open it\n");
    exporter.wait_lines(3);
    exporter.finish().ok();
}

#[test]
fn new_daemon_learns_what_is_shared() {
    const EXPORTER: &str = r#"
if len(sys.argv) > 1:
    first = open_memory(sys.argv[1])
    say("open")
    second = open_memory(hear()[0])
    assert (read(first), read(second)) == (1, 2)
    say("open")
    hear()
    close_memory(first)
    close_memory(second)
    say("closed")
    hear()
    sys.exit()
first, second = alloc(10 * MIB), alloc(30 * MIB)
write(first, 1)
write(second, 2)
call("cuCtxSynchronize")
handle = export(second)
it = Child(export(first))
assert it.hear() == ["open"]
say("open")
hear()
it.say(handle)
assert it.hear() == ["open"]
say("both")
hear()
it.say("close")
assert it.hear() == ["closed"]
say("closed")
hear()
it.say("end")
it.end()
"#;
    let mut node = Node::start();
    let Some(mut exporter) = start(&node, "exporter", EXPORTER) else {
        return;
    };
    exporter.wait_lines(1);
    wait_pinned(&node, "exporter", 10);
    node.kill_daemon();
    node.start_daemon();
    let both = |it: &Value| it["pids"].as_array().is_some_and(|pids| pids.len() == 2);
    node.wait_tenant("exporter", |it| both(it) && bytes(it, "pinned") == 10 * MIB);
    exporter.write("open the other\n");
    exporter.wait_lines(2);
    wait_pinned(&node, "exporter", 40);
    exporter.write("close both\n");
    exporter.wait_lines(3);
    // What was open when the daemon began might be open in a process that it does not see.
    wait_pinned(&node, "exporter", 10);
    exporter.write("end\n");
    exporter.finish().ok();
}

/// PyTorch sends tensors to other processes by CUDA IPC: handles of whole segments of its cache, and events.
#[test]
fn torch_tensor_is_changed_in_a_child() {
    const PROGRAM: &str = r#"
import torch, torch.multiprocessing as mp

ROUNDS = 50

def child(tensors, done):
    large, small = tensors.get()
    for n in range(ROUNDS):
        large += 1
        small *= 2
        torch.cuda.synchronize()
        done.put(n)
        tensors.get()
    del large, small

if __name__ == "__main__":
    context = mp.get_context("spawn")
    tensors, done = context.Queue(), context.Queue()
    large = torch.zeros(64 << 20, device="cuda")
    small = torch.ones(16, dtype=torch.float64, device="cuda")
    unshared = torch.arange(32 << 20, device="cuda")
    process = context.Process(target=child, args=(tensors, done))
    process.start()
    tensors.put((large, small))
    for n in range(ROUNDS):
        assert done.get(timeout=120) == n
        assert torch.all(large == n + 1) and torch.all(small == 2.0 ** (n + 1))
        assert int(unshared.sum()) == (32 << 20) * ((32 << 20) - 1) // 2
        tensors.put(None)
    process.join()
    assert process.exitcode == 0
    print("done")
"#;
    let torch = || Command::new("python3").args(["-c", "import torch"]).run();
    if !real() || !torch().status.success() {
        eprintln!("SKIPPED: it needs a GPU and PyTorch");
        return;
    }
    let node = Node::start();
    let script = node.dir().join("tensors.py");
    std::fs::write(&script, PROGRAM).expect("room");
    let load = "gpumux workload batch --kernel-us 2000 --seconds 600";
    let _neighbour = Process::start(&mut node.tenant("--name neighbour --class batch", load));
    node.wait_tenant("neighbour", crate::is_well);
    let program = format!("python3 {}", script.display());
    let torch = Process::start(&mut node.tenant("--name torch --class batch", &program));
    let ended = torch.finish_within(PATIENCE * 9).ok();
    assert_eq!(ended.out, "done\n", "{}", ended.err);
}
