//! A tenant goes to another device of the node while it works: with the same contents, addresses and handles, or not at all.

mod killed;
mod several;

use std::{collections::BTreeMap, fs, path::PathBuf};

use gpumux_tests::{Finished, Node, Options, PATIENCE, Process, Run, binary, real, wait_for};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::memory::python;

/// Works step by step, and checks every byte of its memory in each: what it wrote in the step before, by copies, sets and a graph.
/// Prints a line per step. `children N`: so many processes do so.
const WORK: &str = r#"
import os, sys, time
MIB = 1 << 20
if sys.argv[1:2] == ["children"]:
    import subprocess
    all = [subprocess.Popen([sys.executable, __file__, "child"]) for _ in range(int(sys.argv[2]))]
    sys.exit(max(it.wait() for it in all))
use_device()
def alloc(size):
    at = ctypes.c_uint64()
    call("cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(size))
    return at
SIZE = 4 * MIB
chunks, copy, small = [alloc(SIZE) for _ in range(4)], alloc(SIZE), alloc(512)
back = ctypes.create_string_buffer(SIZE)
stream, event, graph, executable = (ctypes.c_void_p() for _ in range(4))
call("cuStreamCreate", ctypes.byref(stream), 1)
call("cuEventCreate", ctypes.byref(event), 0)
call("cuStreamBeginCapture_v2", stream, 0)
call("cuMemcpyDtoDAsync_v2", copy, chunks[0], ctypes.c_size_t(SIZE), stream)
call("cuStreamEndCapture", stream, ctypes.byref(graph))
call("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, ctypes.c_uint64(0))
# Memory of the program's own making, of a pool, and of the host.
prop = (ctypes.c_uint64 * 8)()
handle, mapped, pooled, host = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_void_p()
prop[0], prop[1] = 1, 1  # pinned, on device 0
call("cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(SIZE), prop, ctypes.c_uint64(0))
call("cuMemAddressReserve", ctypes.byref(mapped), ctypes.c_size_t(SIZE), ctypes.c_size_t(0), ctypes.c_uint64(0), ctypes.c_uint64(0))
call("cuMemMap", mapped, ctypes.c_size_t(SIZE), ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
access = (ctypes.c_int * 3)(1, 0, 3)
call("cuMemSetAccess", mapped, ctypes.c_size_t(SIZE), access, ctypes.c_size_t(1))
call("cuMemAllocAsync", ctypes.byref(pooled), ctypes.c_size_t(SIZE), stream)
call("cuMemHostAlloc", ctypes.byref(host), ctypes.c_size_t(512), 0)
chunks += [mapped, pooled]
def value(n, step):
    return (n * 2654435761 + step) & 0xffffffff
def fill(step):
    for n, at in enumerate(chunks):
        call("cuMemsetD32Async", at, value(n, step), ctypes.c_size_t(SIZE // 4), stream)
    call("cuMemsetD32Async", small, step, ctypes.c_size_t(128), stream)
    call("cuGraphLaunch", executable, stream)
    call("cuMemcpyDtoHAsync_v2", host, small, ctypes.c_size_t(512), stream)
    call("cuEventRecord", event, stream)
    call("cuEventSynchronize", event)
def check(at, size, expected):
    call("cuMemcpyDtoH_v2", back, at, ctypes.c_size_t(size))
    right = expected.to_bytes(4, "little") * (size // 4)
    assert memoryview(back).cast("B")[:size] == right, f"{at.value:#x} is wrong"
step = 0
fill(step)
while True:
    for n, at in enumerate(chunks):
        check(at, SIZE, value(n, step))
    check(copy, SIZE, value(0, step))
    check(small, 512, step)
    assert ctypes.string_at(host, 512) == step.to_bytes(4, "little") * 128
    step += 1
    fill(step)
    print(step, flush=True)
    time.sleep(0.005)
"#;

fn devices(daemon: &[(&str, String)]) -> Option<Node> {
    if real() {
        eprintln!("SKIPPED: moves are measured on GPUs by bench/move.py");
        return None;
    }
    let mut node = Node::with(Options {
        devices: 2,
        without_daemon: true,
        ..Options::default()
    });
    for (name, value) in daemon {
        node.set_variable(name, value);
    }
    node.start_daemon();
    Some(node)
}

/// The numbers of the devices on which a tenant is.
fn numbers(node: &Node, name: &str) -> Vec<u64> {
    let devices = node.get("/v1/devices");
    let devices = devices.as_array().expect("devices").iter();
    let number: BTreeMap<String, u64> = devices
        .map(|it| {
            (
                text(&it["uuid"]),
                it["index"].as_u64().expect("NVML knows it"),
            )
        })
        .collect();
    let tenant = node.find_tenant(name).expect("it lives");
    let of = tenant["devices"].as_array().expect("a list").iter();
    of.map(|it| number[&text(it)]).collect()
}

fn text(value: &Value) -> String {
    value.as_str().expect("text").to_owned()
}

/// The driver's calls themselves, from another process, without gpumux.
#[test]
fn checkpoint_calls_follow_the_probe_on_h100s() {
    const CALLER: &str = r#"
import subprocess, sys
if len(sys.argv) > 1:
    use_device()
    at, word = ctypes.c_uint64(), ctypes.c_uint32()
    allocate = "cuMemAllocManaged" if sys.argv[1] == "managed" else "cuMemAlloc_v2"
    call(allocate, ctypes.byref(at), ctypes.c_size_t(4096), *([1] if sys.argv[1] == "managed" else []))
    call("cuMemsetD32_v2", at, 7, ctypes.c_size_t(1024))
    call("cuCtxSynchronize")
    for line in sys.stdin:
        uuid = (ctypes.c_ubyte * 16)()
        call("cuDeviceGetUuid_v2", uuid, 0)
        call("cuMemcpyDtoH_v2", ctypes.byref(word), at, ctypes.c_size_t(4))
        print(word.value, bytes(uuid).hex(), flush=True)
    sys.exit()
def start(kind):
    return subprocess.Popen([sys.executable, __file__, kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
def ask(process):
    process.stdin.write("\n")
    process.stdin.flush()
    return process.stdout.readline().split()
def result(name, pid, args=None):
    return getattr(cuda, "cuCheckpointProcess" + name)(pid, args)
def state(pid):
    found = ctypes.c_int(-1)
    assert cuda.cuCheckpointProcessGetState(pid, ctypes.byref(found)) == 0
    return found.value
def args(*words):
    return (ctypes.c_uint64 * 8)(*words)
def restore(pid, pairs):
    listed = b"".join(old + new for old, new in pairs)
    memory = ctypes.create_string_buffer(listed, max(len(listed), 1))
    return result("Restore", pid, args(ctypes.addressof(memory), len(pairs)))
uuids = []
for device in range(2):
    uuid = (ctypes.c_ubyte * 16)()
    call("cuDeviceGetUuid_v2", uuid, device)
    uuids.append(bytes(uuid))
a, b = uuids
assert result("Lock", 1) == 1, "it does not use CUDA"

process = start("plain")
assert ask(process) == ["7", a.hex()]
pid = process.pid
assert (state(pid), result("Checkpoint", pid), result("Unlock", pid)) == (0, 401, 401)
assert (result("Lock", pid, args(5000)), state(pid), result("Lock", pid)) == (0, 1, 401)
process.stdin.write("\n")
process.stdin.flush()
assert (result("Checkpoint", pid, args()), state(pid)) == (0, 2)
# Every visible device must be in the list; what fails changes nothing.
assert restore(pid, [(a, b)]) == 1 and state(pid) == 2
assert restore(pid, [(a, b), (b, b)]) == 1 and state(pid) == 2
assert restore(pid, [(b, a), (a, b)]) == 0 and state(pid) == 1
assert (result("Unlock", pid), state(pid)) == (0, 0)
# The call that waited is made now, on the other device.
assert process.stdout.readline().split() == ["7", b.hex()]
for expected in (b, a):
    assert result("Lock", pid) == result("Checkpoint", pid) == 0
    assert restore(pid, [] if expected == b else [(a, b), (b, a)]) == result("Unlock", pid) == 0
    assert ask(process) == ["7", expected.hex()]
process.kill()
process.wait()
assert result("Lock", pid) == 1, "it has ended"

process = start("managed")
ask(process)
assert (result("Lock", process.pid), result("Checkpoint", process.pid), state(process.pid)) == (0, 801, 1)
assert result("Unlock", process.pid) == 0 and ask(process)[0] == "7"
process.kill()

# A kernel that goes on for longer.
import os, time
process = subprocess.Popen([os.environ["BINARY"], "workload", "check", "--seconds", "600"])
found, patience = 1, time.monotonic() + 60
# It does not use CUDA yet, or its kernel has not begun.
while found in (0, 1) and time.monotonic() < patience:
    found = result("Lock", process.pid, args(300))
    if found == 0:
        assert result("Unlock", process.pid) == 0
    time.sleep(0.01)
assert (found, state(process.pid)) == (600, 0)
process.kill()
print("right")
"#;
    if real() {
        eprintln!("SKIPPED: bench/move.py measures a real driver");
        return;
    }
    let node = Node::with(Options {
        devices: 2,
        without_daemon: true,
        ..Options::default()
    });
    let Some(program) = python(&node, CALLER) else {
        return;
    };
    let words = program.split(' ').map(str::to_owned);
    let mut command = node.on_device(words);
    let finished = command.env("BINARY", binary()).run().ok();
    assert_eq!(finished.out, "right\n", "{finished:#?}");
}

/// Starts it, and waits until it works.
#[track_caller]
fn start(node: &Node, options: &str, program: &str) -> Process {
    let mut process = Process::start(&mut node.tenant(options, program));
    process.wait_lines(3);
    process
}

/// It goes on: checks more steps, and has found nothing wrong.
#[track_caller]
fn goes_on(process: &mut Process) {
    let lines = process.lines();
    process.wait_lines(lines + 3);
    assert!(process.poll().is_none(), "it ended: {}", process.err());
}

fn go(node: &Node, name: &str, gpu: &str) -> Finished {
    node.gpumux(["move", name, "--gpu", gpu]).run()
}

/// A move is refused for this reason, and the tenant goes on.
#[track_caller]
fn refused(node: &Node, process: &mut Process, name: &str, gpu: &str, why: &str) {
    let moved = go(node, name, gpu);
    assert_eq!(moved.code(), 1, "{moved:#?}");
    assert!(moved.err.contains(why), "{moved:#?}");
    goes_on(process);
}

/// What each device has of each tenant, and what is free there.
fn accounts(node: &Node) -> Vec<Value> {
    let memory = node.gpumux(["memory", "--json"]).run().ok().json();
    let all = memory["devices"].as_array().expect("a list").clone();
    all.into_iter()
        .map(|it| serde_json::json!([it["free"], it["tenants"], it["occupied"]]))
        .collect()
}

#[test]
fn program_moves_to_and_fro_with_right_contents() {
    let Some(node) = devices(&[]) else { return };
    let Some(program) = python(&node, WORK) else {
        return;
    };
    let mut process = start(&node, "--name work", &program);
    assert_eq!(numbers(&node, "work"), [0]);
    for round in 0..8 {
        let to = 1 - round % 2;
        let moved = go(&node, "work", &to.to_string()).ok();
        assert!(moved.out.starts_with("work: on GPU-"), "{moved:#?}");
        assert_eq!(numbers(&node, "work"), [to], "round {round}");
        goes_on(&mut process);
    }
    let moved = node.gpumux(["events", "--past"]).run().ok();
    let moved = moved.out.lines().filter(|it| it.contains("  moved "));
    assert_eq!(moved.count(), 8);
    let tenant = node.find_tenant("work").expect("it lives");
    assert_eq!(tenant["asleep"], false, "{tenant:#}");
    assert_eq!(
        tenant["domains"].as_array().map(Vec::len),
        Some(1),
        "{tenant:#}"
    );
}

/// A program that allocates, writes, captures, launches and frees at random, and verifies every byte, is moved at any moment of that.
#[test]
fn random_program_moves_and_every_byte_is_right() {
    let Some(node) = devices(&[]) else { return };
    let mut process = Process::start(
        &mut node.tenant("--name work", "gpumux workload memory --json --seconds 600"),
    );
    node.wait_tenant("work", |it| it["work"].as_u64() > Some(0));
    for round in 0..20 {
        let to = 1 - round % 2;
        go(&node, "work", &to.to_string()).ok();
        assert_eq!(numbers(&node, "work"), [to], "round {round}");
        assert!(process.poll().is_none(), "{}", process.err());
    }
    process.signal(Signal::TERM);
    let finished = process.finish().ok();
    assert_eq!(finished.json()["mismatches"], 0, "{finished:#?}");
}

/// Kernels that follow each other without a pause: the driver moves a process when those that are queued have ended.
#[test]
fn busy_program_moves_and_its_work_is_seen() {
    let Some(node) = devices(&[]) else { return };
    let mut process =
        Process::start(&mut node.tenant("--name work", "gpumux workload batch --seconds 600"));
    for to in [1, 0, 1] {
        node.wait_tenant("work", |it| it["state"] == "running");
        go(&node, "work", &to.to_string()).ok();
        assert_eq!(numbers(&node, "work"), [to]);
    }
    node.wait_tenant("work", |it| it["state"] == "running");
    let work = |it: &Value| it["work"].as_u64();
    let before = node.find_tenant("work").as_ref().and_then(work);
    node.wait_tenant("work", |it| work(it) > before);
    assert!(process.poll().is_none(), "{}", process.err());
}

#[test]
fn accounts_are_equal_after_moves_to_and_fro() {
    let Some(node) = devices(&[]) else { return };
    let Some(program) = python(&node, WORK) else {
        return;
    };
    let context = node.get("/v1/devices")[0]["context_bytes"]
        .as_u64()
        .expect("bytes");
    let occupied = |it: &Value| it[2].as_u64().expect("bytes");
    let empty = occupied(&accounts(&node)[0]);
    let mut process = start(&node, "--name work", &program);
    // What the tenant has there, once nothing of it is left elsewhere, and one context is all besides.
    let on = |device: usize| {
        wait_for("the accounts to be as expected", PATIENCE, || {
            let all = accounts(&node);
            let (own, other) = (&all[device], &all[1 - device]);
            let elsewhere = other[1].as_array().into_iter().flatten();
            let left = elsewhere
                .map(|it| it["in_use"].as_u64().unwrap_or(1))
                .sum::<u64>();
            let settled = occupied(own) == empty + context && occupied(other) == empty && left == 0;
            settled.then(|| {
                (
                    own[0].clone(),
                    own[1][0]["in_use"].clone(),
                    own[1][0]["pinned"].clone(),
                )
            })
        })
    };
    // What the library keeps for moves is there after the first.
    for to in ["1", "0"] {
        go(&node, "work", to).ok();
    }
    let before = on(0);
    for (device, to) in [(1, "1"), (0, "0")] {
        go(&node, "work", to).ok();
        assert_eq!(on(device), before);
    }
    goes_on(&mut process);
}

/// Its new channel group is known by its work, as the one before: a group of which nothing is known would count as busy.
#[test]
fn idle_program_is_idle_after_a_move() {
    let Some(node) = devices(&[]) else { return };
    let program = "gpumux workload latency --kernels 1 --period-us 50000 --seconds 600";
    let _process = Process::start(&mut node.tenant("--name work", program));
    node.wait_tenant("work", |it| {
        it["state"] == "idle" && it["work"].as_u64() > Some(0)
    });
    for to in ["1", "0"] {
        go(&node, "work", to).ok();
        node.wait_tenant("work", |it| it["state"] == "idle");
    }
}

#[test]
fn refused_moves_name_the_reason_and_change_nothing() {
    let Some(node) = devices(&[]) else { return };
    let Some(program) = python(&node, WORK) else {
        return;
    };
    let mut process = start(&node, "--name work", &program);
    refused(&node, &mut process, "work", "0", "is on GPU 0 already");
    refused(&node, &mut process, "work", "7", "7");
    let mut bound = start(&node, "--name bound --gpu 0", &program);
    refused(&node, &mut bound, "bound", "1", "does not see GPU 1");
    // No room there.
    let idle = "env CUDA_VISIBLE_DEVICES=1 gpumux workload idle --memory 78GiB --seconds 600";
    let full = Process::start(&mut node.tenant("--name full --gpu 1", idle));
    node.wait_tenant("full", |it| {
        it["memory"][0]["in_use"].as_u64() > Some(78 << 30)
    });
    // A tenant of 16 MiB fits; one of 4 GiB does not.
    let idle = "gpumux workload idle --memory 4GiB --seconds 600";
    let large = Process::start(&mut node.tenant("--name large", idle));
    node.wait_tenant("large", |it| {
        it["memory"][0]["in_use"].as_u64() >= Some(4 << 30)
    });
    let moved = go(&node, "large", "1");
    assert!(
        moved.err.contains("free, and the tenant needs"),
        "{moved:#?}"
    );
    full.kill();
    large.kill();
    assert_eq!(numbers(&node, "work"), [0]);
}

/// A guarantee holds on every device that its tenant sees: a tenant that could be moved to where it does not fit is not admitted.
#[test]
fn guarantee_that_does_not_fit_there_is_refused() {
    let Some(node) = devices(&[]) else { return };
    let Some(program) = python(&node, WORK) else {
        return;
    };
    let other = start(
        &node,
        "--name other --gpu 1 --memory-guaranteed 60GiB",
        &program,
    );
    let both = "--name work --gpu 0,1 --memory-guaranteed 40GiB";
    let run = node.tenant(both, &program).run();
    assert!(run.err.contains("guaranteed to other"), "{run:#?}");
    let mut one = start(
        &node,
        "--name work --gpu 0 --memory-guaranteed 40GiB",
        &program,
    );
    refused(&node, &mut one, "work", "1", "does not see GPU 1");
    other.kill();
}

#[test]
fn memory_that_the_driver_does_not_move_keeps_a_tenant() {
    const PROGRAM: &str = r#"
import time
use_device()
at = ctypes.c_uint64()
call("cuMemAllocManaged", ctypes.byref(at), ctypes.c_size_t(1 << 20), 1)
step = 0
while True:
    call("cuMemsetD32_v2", at, step, ctypes.c_size_t(1 << 18))
    value = ctypes.c_uint32()
    call("cuMemcpyDtoH_v2", ctypes.byref(value), at, ctypes.c_size_t(4))
    assert value.value == step
    step += 1
    print(step, flush=True)
    time.sleep(0.01)
"#;
    let Some(node) = devices(&[]) else { return };
    let Some(program) = python(&node, PROGRAM) else {
        return;
    };
    let mut process = start(&node, "--name work", &program);
    refused(&node, &mut process, "work", "1", "CUDA_ERROR_NOT_SUPPORTED");
    assert_eq!(numbers(&node, "work"), [0]);
    assert!(
        !node.find_tenant("work").expect("it lives")["asleep"]
            .as_bool()
            .unwrap_or(true)
    );
}
