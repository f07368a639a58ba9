//! Memory: limits that hold, tenants that sleep and wake with every byte in place, and more tenants than
//! memory.

mod failures;
mod host;
mod kept;
mod moves;
mod random;
mod shown;
mod turns;

use gpumux_tests::{Finished, Node, Options, PATIENCE, Patience, Process, Run, real, wait_for};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::{
    fs::File,
    os::unix::fs::FileExt,
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

/// A random program: it ends by itself and says whether every byte was right.
fn program(seed: u32, memory: &str, steps: u32) -> String {
    format!("gpumux workload memory --json --seed {seed} --memory {memory} --steps {steps}")
}

/// The same without an end of its own.
fn endless(seed: u32, memory: &str) -> String {
    format!("gpumux workload memory --json --seed {seed} --memory {memory} --seconds 86400")
}

/// Ends one of these, which verifies all that it has.
#[track_caller]
fn end_verified(process: Process) -> Value {
    process.signal(Signal::TERM);
    verified(&process.finish_within(PATIENCE * 3))
}

#[track_caller]
fn verified(finished: &Finished) -> Value {
    assert!(
        finished.status.success(),
        "{}{}",
        finished.out,
        finished.err
    );
    let report = finished.json();
    assert_eq!(report["mismatches"], 0, "{report:#}");
    assert_eq!(report["sum_matches"], true, "{report:#}");
    assert_ne!(report["elements"], 0, "{report:#}");
    report
}

pub(crate) fn bytes(tenant: &Value, field: &str) -> u64 {
    let memory = tenant["memory"].as_array().expect("an array");
    memory.iter().filter_map(|it| it[field].as_u64()).sum()
}

/// A program `name` that asks for so many MiB once all else of it is ready, and whether it had them in a second. Then no memory of others
/// may have been moved for it: programs have that time to give caches back.
pub(crate) fn takes(node: &Node, name: &str, mib: u64) -> (Process, bool) {
    let start = node.dir().join(name);
    let sweep = format!(
        "gpumux workload sweep --memory {mib}MiB --seconds 600 --start-file {}",
        start.display()
    );
    let process = Process::start(&mut node.tenant(&format!("--name {name}"), &sweep));
    node.wait_tenant(name, |it| {
        !it["domains"][0].is_null() && bytes(it, "in_use") > 0
    });
    let began = Instant::now();
    File::create(start).expect("room");
    node.wait_tenant(name, |it| bytes(it, "in_use") >= mib << 20);
    (process, began.elapsed() < Duration::from_secs(1))
}

/// Free memory of the only device.
pub(crate) fn free(node: &Node) -> u64 {
    let memory = node.gpumux(["memory", "--json"]).run().ok().json();
    memory["devices"][0]["free"].as_u64().expect("a number")
}

/// So often are programs moved, whenever they work.
const MOVES: u32 = 20;

fn sleeps(node: &Node, name: &str) -> bool {
    node.gpumux(["sleep", name]).run().status.success()
}

#[test]
fn a_limit_is_cuda_s_own_error_and_the_tenant_lives() {
    let node = Node::start();
    let run = "--name small --memory-limit 16MiB";
    let finished = node.tenant(run, &program(7, "48MiB", 500)).run();
    let report = verified(&finished);
    assert_ne!(report["late"], 0, "it never met its limit: {report:#}");
    assert!(
        report["late"].as_u64().is_some(),
        "it never met its limit: {report:#}"
    );
    // The same without a limit is refused nothing.
    let free = node.tenant("--name free", &program(7, "48MiB", 500)).run();
    assert_eq!(verified(&free)["late"], Value::Null);
}

/// The command of a Python program that calls the driver; `None` where there is no Python.
pub(crate) fn python(node: &Node, program: &str) -> Option<String> {
    const DRIVER: &str = r#"
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
def call(name, *args):
    error = getattr(cuda, name)(*args)
    assert error == 0, f"{name} answers {error}"
def use_device():
    context = ctypes.c_void_p()
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
    call("cuCtxSetCurrent", context)
    return context
call("cuInit", 0)
"#;
    if Command::new("python3").arg("--version").output().is_err() {
        eprintln!("SKIPPED: no python3");
        return None;
    }
    let script = node.dir().join("program.py");
    std::fs::write(&script, [DRIVER, program].concat()).expect("room");
    Some(format!("python3 {}", script.display()))
}

/// Starts tenant `late`, whose program waits for the line `begin`, and has it begin while there is no daemon. The next
/// daemon starts once the program has printed a line.
#[track_caller]
pub(crate) fn begin_between_daemons(node: &mut Node, command: &str) -> Process {
    let mut late = Process::start(&mut node.tenant("--name late", command));
    wait_for("its tenant", PATIENCE, || node.find_tenant("late"));
    node.kill_daemon();
    late.write("begin\n");
    late.wait_lines(1);
    node.start_daemon();
    late
}

/// PyTorch asks before it has a context, and remembers the answer.
#[test]
fn a_limit_is_all_that_a_program_sees_of_the_device() {
    const PROGRAM: &str = r#"
def total():
    size = ctypes.c_size_t()
    call("cuDeviceTotalMem_v2", ctypes.byref(size), 0)
    return size.value >> 20
before = total()
use_device()
with_context = total()
free, all = ctypes.c_size_t(), ctypes.c_size_t()
call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(all))
print(before, with_context, all.value >> 20, total())
"#;
    let node = Node::start();
    let Some(program) = python(&node, PROGRAM) else {
        return;
    };
    let run = |options: &str| node.tenant(options, &program).run().ok().out;
    assert_eq!(run("--memory-limit 2GiB"), "2048 2048 2048 2048\n");
    let whole = run("");
    let seen: Vec<&str> = whole.split_whitespace().collect();
    assert!(
        seen.len() == 4 && seen[0] != "2048" && seen.iter().all(|it| *it == seen[0]),
        "{whole}"
    );
}

/// A Python program ends well within this limit, whether this library or the driver keeps its memory.
fn runs_within_64_mib(program: &str) {
    let node = Node::start();
    let Some(command) = python(&node, program) else {
        return;
    };
    for kind in ["", "native"] {
        let mut tenant = node.tenant("--memory-limit 64MiB", &command);
        tenant.env("GPUMUX_MEMORY", kind).run().ok();
    }
}

#[test]
fn a_context_that_ends_gives_all_its_memory_back() {
    const PROGRAM: &str = r#"
import sys
size = ctypes.c_size_t(40 << 20)
for alloc in [
    lambda at: call("cuMemAllocManaged", at, size, 1),
    lambda at: call("cuMemAlloc_v2", at, size),
] * 2:
    use_device()
    alloc(ctypes.byref(ctypes.c_uint64()))
    call("cuDevicePrimaryCtxReset_v2", 0)
"#;
    runs_within_64_mib(PROGRAM);
}

/// As long as it is not freed, it is there, and the program can free it in another context.
#[test]
fn memory_of_a_pool_outlives_the_context() {
    const PROGRAM: &str = r#"
OUT_OF_MEMORY, size = 2, ctypes.c_size_t(40 << 20)
use_device()
pooled, other = ctypes.c_uint64(), ctypes.c_uint64()
call("cuMemAllocAsync", ctypes.byref(pooled), size, None)
call("cuDevicePrimaryCtxReset_v2", 0)
use_device()
assert cuda.cuMemAlloc_v2(ctypes.byref(other), size) == OUT_OF_MEMORY, "while it is allocated"
call("cuMemFreeAsync", pooled, None)
call("cuCtxSynchronize")
call("cuMemAlloc_v2", ctypes.byref(other), size)
"#;
    runs_within_64_mib(PROGRAM);
}

#[test]
fn physical_memory_counts_as_long_as_it_is_held_or_mapped() {
    const PROGRAM: &str = r#"
OUT_OF_MEMORY, size, none = 2, ctypes.c_size_t(40 << 20), ctypes.c_uint64(0)
# Pinned memory of device 0.
prop = (ctypes.c_int32 * 8)(1, 0, 1, 0)
def create():
    handle = ctypes.c_uint64()
    error = cuda.cuMemCreate(ctypes.byref(handle), size, prop, none)
    return error or handle
context, at, again = use_device(), ctypes.c_uint64(), ctypes.c_uint64()
call("cuMemAddressReserve", ctypes.byref(at), size, none, none, none)
# Also without a context.
for current in context, None:
    call("cuCtxSetCurrent", current)
    handle = create()
    assert create() == OUT_OF_MEMORY, "while it is held"
    call("cuMemMap", at, size, none, handle, none)
    call("cuMemRelease", handle)
    assert create() == OUT_OF_MEMORY, "while it is mapped"
    call("cuMemRetainAllocationHandle", ctypes.byref(again), at)
    call("cuMemUnmap", at, size)
    assert create() == OUT_OF_MEMORY, "while it is held again"
    call("cuMemRelease", again)
    assert cuda.cuMemRelease(again) != 0
    call("cuMemRelease", create())
"#;
    runs_within_64_mib(PROGRAM);
}

#[test]
fn what_was_set_for_memory_can_be_cleared() {
    let node = Node::start();
    let idle = "gpumux workload idle --seconds 600 --memory 32MiB";
    let options = "--name holder --memory-guaranteed 16MiB --memory-limit 64MiB --sleep-after 1h";
    let holder = Process::start(&mut node.tenant(options, idle));
    let tenant = node.wait_tenant("holder", |it| bytes(it, "in_use") >= 32 << 20);
    assert_eq!(tenant["spec"]["sleep_after_s"], 3600, "{tenant:#}");
    let clear = "holder --memory-guaranteed 0 --memory-limit none --sleep-after never";
    let spec = crate::contracts::set(&node, clear)["spec"].clone();
    assert_eq!(spec["memory_guaranteed"], 0, "{spec:#}");
    assert!(spec["memory_limit"].is_null() && spec["sleep_after_s"].is_null());
    let tenant = node.wait_tenant("holder", |it| it["memory"][0]["limit"].is_null());
    assert_eq!(bytes(&tenant, "guaranteed"), 0, "{tenant:#}");
    let wrong = node
        .gpumux(["set", "holder", "--sleep-after", "none"])
        .run();
    assert_eq!(wrong.status.code(), Some(2), "{}", wrong.err);
    assert!(wrong.err.contains("or never"), "{}", wrong.err);
    // A name's setting does not hold for a run that says otherwise.
    crate::contracts::set(&node, "holder --memory-limit 48MiB");
    holder.kill();
    wait_for("the end of it", PATIENCE, || {
        node.find_tenant("holder").is_none().then_some(())
    });
    let _again = Process::start(&mut node.tenant("--name holder --memory-limit none", idle));
    let tenant = node.wait_tenant("holder", |it| bytes(it, "in_use") >= 32 << 20);
    assert!(tenant["spec"]["memory_limit"].is_null(), "{tenant:#}");
}

#[test]
fn limit_below_what_is_in_use_is_set_and_named() {
    let node = Node::start();
    let program = "gpumux workload idle --seconds 600 --memory 32MiB";
    let _holder = Process::start(&mut node.tenant("--name holder", program));
    node.wait_tenant("holder", |it| bytes(it, "in_use") >= 32 << 20);
    let set = |limit: &str| {
        let options = ["set", "holder", "--memory-limit", limit];
        node.gpumux(options).run().ok()
    };
    let fits = set("64GiB");
    assert_eq!(fits.err, "");
    let set = set("8MiB");
    assert_eq!(set.out, "holder: memory limit 8 MiB\n");
    let named = "above its limit of 8 MiB: it keeps that, and its allocations fail";
    assert!(set.err.contains(named), "{set:?}");
    let tenant = node.find_tenant("holder").unwrap();
    let above = bytes(&tenant, "in_use") - (8 << 20);
    assert_eq!(bytes(&tenant, "above_limit"), above, "{tenant:#}");
    let text = node.gpumux(["explain", "holder"]).run().ok().out;
    assert!(text.contains("above its limit of 8 MiB"), "{text}");
}

#[test]
fn what_is_used_is_seen_and_given_back() {
    let node = Node::start();
    let before = wait_for("the device's books", PATIENCE, || Some(free(&node)));
    let idle = "gpumux workload idle --seconds 600 --memory 300MiB";
    let options = "--name holder --memory-guaranteed 100MiB --memory-limit 2GiB";
    let holder = Process::start(&mut node.tenant(options, idle));
    let tenant = node.wait_tenant("holder", |it| bytes(it, "in_use") >= 300 << 20);
    assert!(bytes(&tenant, "above_guarantee") >= 200 << 20, "{tenant:#}");
    assert_eq!(bytes(&tenant, "limit"), 2 << 30, "{tenant:#}");
    holder.kill();
    wait_for("the memory of a dead tenant", PATIENCE, || {
        (free(&node) >= before).then_some(())
    });
    let beyond = node.tenant("--memory-guaranteed 1000GiB", "true").run();
    assert_eq!(beyond.status.code(), Some(125), "{}", beyond.err);
    assert!(
        beyond.err.contains("cannot guarantee 1000.0 GiB"),
        "{}",
        beyond.err
    );
}

/// One thread gets memory while another gives some back: the daemon receives both.
#[test]
fn what_threads_take_and_give_at_the_same_time_is_known() {
    const PROGRAM: &str = r#"
import random, sys, threading, time
context = use_device()
MIB = 1 << 20
def work(seed):
    call("cuCtxSetCurrent", context)
    numbers = random.Random(seed)
    blocks = []
    for _ in range(150):
        block = ctypes.c_uint64()
        call("cuMemAlloc_v2", ctypes.byref(block), ctypes.c_size_t(numbers.randint(2, 300) * MIB))
        blocks.append(block)
        while len(blocks) > 3 or (blocks and numbers.random() < 0.4):
            call("cuMemFree_v2", blocks.pop(numbers.randrange(len(blocks))))
    for block in blocks:
        call("cuMemFree_v2", block)
    call("cuMemAlloc_v2", ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(1024 * MIB))
threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
for it in threads: it.start()
for it in threads: it.join()
print("done", flush=True)
sys.stdin.read()
"#;
    let node = Node::start();
    let Some(program) = python(&node, PROGRAM) else {
        return;
    };
    for _ in 0..2 {
        let mut holder = Process::start(&mut node.tenant("--name threads", &program));
        holder.wait_lines(1);
        // What the last of them holds is reported a moment later.
        node.wait_tenant("threads", |it| bytes(it, "in_use") >= 4 << 30);
        holder.finish();
        wait_for("its end", PATIENCE, || {
            node.find_tenant("threads").is_none().then_some(())
        });
    }
}

/// A tenant `worker` in the middle of a kernel that takes an H100 so long. It asks the driver for nothing more until that ends, so that it
/// wakes on request.
fn checks(node: &Node, mib: u32, seconds: u32) -> Process {
    let running = node.dir().join("running");
    // As many as were measured by `--seconds` would be fewer on a machine that is late.
    let rounds = seconds * 1_600_000 / mib;
    let check = format!(
        "gpumux workload check --json --memory {mib}MiB --rounds {rounds} --ready-file {}",
        running.display()
    );
    let worker = Process::start(&mut node.tenant("--name worker", &check));
    wait_for("the kernel to run", PATIENCE, || {
        running.exists().then_some(())
    });
    worker
}

#[test]
fn memory_refused_by_the_driver_is_awaited_unless_policy_fail() {
    if real() {
        return;
    }
    let node = Node::start();
    let idle = |policy: &str, kind: &str| {
        let options = format!("--memory-policy {policy}");
        let program = "gpumux workload idle --seconds 0 --memory 32MiB";
        let mut command = node.tenant(&options, program);
        command.env("GPUMUX_EMU_FAULT", "out-of-memory@1");
        command.env("GPUMUX_MEMORY", kind).run()
    };
    for kind in ["", "native"] {
        idle("wait", kind).ok();
        let failed = idle("fail", kind);
        assert_eq!(failed.status.code(), Some(1), "{}", failed.err);
        assert!(failed.err.contains("OUT_OF_MEMORY"), "{}", failed.err);
    }
}

#[test]
fn a_context_that_has_failed_hands_out_nothing_that_was_kept() {
    let node = Node::start();
    for kind in ["trap", "illegal-address"] {
        let program =
            format!("gpumux workload fault --json --kind {kind} --seconds 0.1 --memory 3MiB");
        let report = node.tenant("", &program).run().json();
        assert_eq!(report["errors"], 1, "{report:#}");
    }
}

/// What `bench/overhead.py` measures: every call answers under gpumux, from several threads at once, and leaves nothing behind.
#[test]
fn single_calls_are_measured_from_several_threads() {
    let node = Node::start();
    let workload = "gpumux workload calls --threads 3";
    let mut caller = Process::start(&mut node.tenant("--name caller", workload));
    caller.wait_lines(1);
    for lines in 2..4 {
        caller.write("{\"batches\":2}\n");
        caller.wait_lines(lines);
    }
    let out = caller.out();
    let answer: Value = serde_json::from_str(out.lines().last().expect("an answer")).expect("JSON");
    let times = answer["batches"].as_object().expect("an object");
    assert_eq!(times.len(), 6, "{answer:#}");
    for batches in times.values() {
        let batches = batches.as_array().expect("an array");
        assert!(batches.len() == 2 && batches.iter().all(|it| it.as_f64() > Some(0.0)));
    }
    // Thousands of allocations of 2 MiB: what each thread has, and leases.
    node.wait_tenant("caller", |it| {
        let memory = it["memory"][0]["in_use"].as_u64();
        memory.is_some_and(|it| it < 512 << 20)
    });
    caller.close_input();
    caller.finish_within(PATIENCE).ok();
}
