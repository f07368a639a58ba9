//! Memory: limits that hold, tenants that sleep and wake with every byte in place, and more tenants than
//! memory.

use std::{
    cell::Cell,
    fs::File,
    os::unix::fs::FileExt,
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use gpumux_tests::{Finished, Node, Options, PATIENCE, Process, Run, real, wait_for};
use proptest::{
    prelude::*,
    test_runner::{Config, TestCaseError, TestRunner},
};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// A random program: it ends by itself and says whether every byte was right.
fn program(seed: u32, memory: &str, steps: u32) -> String {
    format!("gpumux workload memory --json --seed {seed} --memory {memory} --steps {steps}")
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

/// Free memory of the only device.
pub(crate) fn free(node: &Node) -> u64 {
    let memory = node.gpumux(["memory", "--json"]).run().ok().json();
    memory["devices"][0]["free"].as_u64().expect("a number")
}

/// So often programs are moved whenever they work: one that sleeps at every call would take minutes.
const MOVES: u32 = 60;

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

#[test]
fn a_kernel_that_is_moved_away_in_its_middle_ends_right() {
    let node = Node::start();
    let worker = checks(&node, "96MiB", 4);
    let mut moves = 0;
    for _ in 0..3 {
        assert!(sleeps(&node, "worker"));
        moves += 1;
        node.gpumux(["wake", "worker"]).run().ok();
        let awake = node.wait_tenant("worker", |it| it["asleep"] == false);
        assert_eq!(bytes(&awake, "swapped"), 0, "{awake:#}");
        let told = &awake["moves"];
        let moved = |field: &str| told[field].as_u64().expect("a number");
        assert!(moved("outs") >= moves && moved("backs") >= moves, "{told}");
        assert!(moved("out_bytes") >= moves * (96 << 20), "{told}");
    }
    verified(&worker.finish_within(PATIENCE * 3));
}

/// A tenant `worker` in the middle of a kernel that takes so long. It asks the driver for nothing more until that ends, so that it
/// wakes on request.
fn checks(node: &Node, memory: &str, seconds: u32) -> Process {
    let running = node.dir().join("running");
    let check = format!(
        "gpumux workload check --json --memory {memory} --seconds {seconds} --ready-file {}",
        running.display()
    );
    let worker = Process::start(&mut node.tenant("--name worker", &check));
    wait_for("the kernel to run", PATIENCE, || {
        running.exists().then_some(())
    });
    worker
}

#[test]
fn client_that_asked_for_a_move_may_go_away_in_its_middle() {
    let node = Node::start();
    let worker = checks(&node, "96MiB", 8);
    for _ in 0..5 {
        let mover = Process::start(&mut node.gpumux(["sleep", "worker"]));
        // Frozen, and its memory still to be moved.
        node.wait_tenant("worker", |it| it["asleep"] == true);
        mover.kill();
        node.gpumux(["wake", "worker"]).run().ok();
        node.wait_tenant("worker", |it| it["asleep"] == false);
    }
    verified(&worker.finish_within(PATIENCE * 3));
}

#[test]
fn random_programs_keep_every_byte_whenever_they_are_moved() {
    let node = Node::start();
    let mut programs: Vec<(String, Process)> = (0..3)
        .map(|seed| {
            let name = format!("p{seed}");
            let program = program(seed, "24MiB", 300);
            let process = Process::start(&mut node.tenant(&format!("--name {name}"), &program));
            (name, process)
        })
        .collect();
    let started = Instant::now();
    let mut moves = 0;
    while programs
        .iter_mut()
        .any(|(_, process)| process.poll().is_none())
    {
        for (name, _) in &programs {
            // They wake by themselves, with their next call.
            moves += u32::from(moves < MOVES && sleeps(&node, name));
        }
        std::thread::sleep(Duration::from_millis(1));
        assert!(started.elapsed() < PATIENCE * 6, "they do not end");
    }
    assert!(moves >= 1, "nobody was ever moved");
    for (_, process) in programs {
        verified(&process.finish());
    }
}

/// A program of numbers (`gpumux workload memory --script`), which can be made shorter: each line is a step.
fn scripts() -> impl Strategy<Value = Vec<[u64; 6]>> {
    // Which buffer, what to do, and with which numbers.
    let step = (0..24u64, 0..12u64, any::<[u32; 4]>())
        .prop_map(|(at, what, [a, b, c, d])| [at, what, a.into(), b.into(), c.into(), d.into()]);
    proptest::collection::vec(step, 1..60)
}

/// Runs a program of numbers, which is moved whenever it pauses. How often it was.
fn run_script(node: &Node, steps: &[[u64; 6]]) -> Result<u32, TestCaseError> {
    let lines = steps
        .iter()
        .map(|step| step.map(|it| it.to_string()).join(" ") + "\n");
    let path = node.dir().join("script");
    std::fs::write(&path, lines.collect::<String>()).expect("room");
    let text = format!(
        "gpumux workload memory --json --memory 32MiB --mapped --script {}",
        path.display()
    );
    let mut program = Process::start(&mut node.tenant("--name script", &text));
    let (mut pauses, mut moves) = (0, 0);
    let started = Instant::now();
    while program.poll().is_none() {
        prop_assert!(started.elapsed() < PATIENCE * 2, "it does not end");
        if program.lines() > pauses && !program.out().contains('{') {
            pauses += 1;
            moves += u32::from(sleeps(node, "script"));
            program.write("\n");
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    let finished = program.finish();
    let (out, err) = (&finished.out, &finished.err);
    let report = out
        .find('{')
        .and_then(|at| serde_json::from_str(&out[at..]).ok());
    let report: Value = report.unwrap_or_default();
    prop_assert!(finished.status.success(), "{out}{err}");
    prop_assert_eq!(&report["mismatches"], 0, "{:#}", report);
    prop_assert_eq!(&report["sum_matches"], true, "{:#}", report);
    wait_for("its end", PATIENCE, || {
        node.find_tenant("script").is_none().then_some(())
    });
    Ok(moves)
}

/// `PROPTEST_CASES=500` tries more programs; one that goes wrong is made as short as can be.
#[test]
fn whatever_a_program_does_between_moves_keeps_every_byte() {
    let node = Node::start();
    let cases = std::env::var("PROPTEST_CASES").ok();
    let mut runner = TestRunner::new(Config {
        cases: cases.map_or(6, |text| text.parse().expect("a number of cases")),
        max_shrink_iters: 200,
        failure_persistence: None,
        ..Config::default()
    });
    let moves = Cell::new(0);
    let run = runner.run(&scripts(), |steps| {
        moves.set(moves.get() + run_script(&node, &steps)?);
        Ok(())
    });
    if let Err(error) = run {
        panic!("{error}");
    }
    // A fixed one, so that it is known that some are moved: memory of both kinds, work on it, a pause, a look.
    let moved = [
        [0, 0, 2, 999_999, 1, 7],
        [0, 0, 1, 200_000, 0, 9],
        [0, 8, 3, 0, 0, 0],
        [0, 11, 0, 0, 0, 0],
        [0, 4, 0, 0, 0, 0],
    ];
    assert_eq!(run_script(&node, &moved).expect("every byte"), 1);
}

/// What PyTorch's expandable segments do: addresses reserved and physical memory mapped by the program itself.
#[test]
fn memory_that_a_program_maps_itself_moves_too() {
    let node = Node::start();
    let before = free(&node);
    let mut programs: Vec<(String, Process)> = (0..2)
        .map(|seed| {
            let name = format!("m{seed}");
            let program = program(seed, "64MiB", 300) + " --mapped";
            let process = Process::start(&mut node.tenant(&format!("--name {name}"), &program));
            (name, process)
        })
        .collect();
    let started = Instant::now();
    let (mut moves, mut pinned, mut least) = (0, 0, u64::MAX);
    while programs
        .iter_mut()
        .any(|(_, process)| process.poll().is_none())
    {
        for (name, _) in &programs {
            moves += u32::from(moves < MOVES && sleeps(&node, name));
            if let Some(tenant) = node.find_tenant(name) {
                pinned += bytes(&tenant, "pinned");
                // On the way back it still counts as asleep, with nothing away.
                let away = bytes(&tenant, "swapped") > 0 && tenant["waits_for_memory"] == false;
                if away && tenant["asleep"] == true {
                    least = least.min(bytes(&tenant, "in_use"));
                }
            }
        }
        assert!(started.elapsed() < PATIENCE * 6, "they do not end");
    }
    assert!(moves >= 1, "nobody was ever moved");
    assert_eq!(pinned, 0, "some of it was not movable");
    // If ever it was seen asleep.
    assert!(matches!(least, 0 | u64::MAX), "{least} bytes stayed");
    for (_, process) in programs {
        verified(&process.finish());
    }
    wait_for("the memory of all", PATIENCE, || {
        (free(&node) >= before).then_some(())
    });
}

#[test]
fn an_idle_tenant_sleeps_and_wakes_with_its_next_work() {
    let node = Node::start();
    let latency = "gpumux workload latency --kernels 1 --kernel-us 10 --period-us 4000000 --seconds 9 --memory 64MiB --json";
    let serve = Process::start(&mut node.tenant("--name serve --sleep-after 1s", latency));
    node.wait_tenant("serve", |it| {
        it["asleep"] == true && bytes(it, "swapped") >= 64 << 20
    });
    node.wait_tenant("serve", |it| {
        it["asleep"] == false && bytes(it, "in_use") >= 64 << 20
    });
    let finished = serve.finish_within(PATIENCE * 2);
    assert!(finished.status.success(), "{}", finished.err);
    assert_eq!(finished.json()["errors"], 0);
}

#[test]
fn sleep_and_want_of_room_are_explained_and_traced() {
    if real() {
        eprintln!("SKIPPED: the device is too large to fill in a test");
        return;
    }
    let node = Node::with_memory(256 << 20);
    let idle = |name: &str, policy: &str| {
        let options = format!("--name {name} --memory-policy {policy}");
        let program = "gpumux workload idle --seconds 600 --memory 150MiB";
        Process::start(&mut node.tenant(&options, program))
    };
    let _first = idle("first", "wait");
    node.wait_tenant("first", |it| bytes(it, "in_use") >= 150 << 20);
    let explain = |name: &str| node.gpumux(["explain", name]).run().ok().out;
    // There is no room for a second one, and it does not take any.
    let _second = idle("second", "wait");
    node.wait_tenant("second", |it| it["waits_for_memory"] == true);
    let why = explain("second");
    assert!(why.contains("(memory policy wait)"), "{why}");
    assert!(sleeps(&node, "first"));
    let asleep = node.wait_tenant("first", |it| it["asleep"] == true);
    assert_eq!(asleep["waits_for_memory"], false, "{asleep:#}");
    let why = explain("first");
    assert!(why.contains("It is swapped out: "), "{why}");
    node.wait_tenant("second", |it| {
        it["waits_for_memory"] == false && bytes(it, "in_use") >= 150 << 20
    });
    node.gpumux(["wake", "first"]).run().ok();
    let file = node.dir().join("moves.json");
    let words = ["trace", "--seconds", "100", "-o", file.to_str().unwrap()];
    node.gpumux(words).run().ok();
    let trace: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    for name in ["memory goes to the host", "memory comes back"] {
        let has = |phase| {
            events
                .iter()
                .any(|it| it["name"] == name && it["ph"] == phase)
        };
        assert!(has("b") && has("e"), "{name}: {trace:#}");
    }
}

/// A node whose daemon has this configuration.
fn configured(memory: u64, text: &str) -> (Node, tempfile::NamedTempFile) {
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), text).expect("room");
    let path = file.path().display().to_string();
    let node = Node::with(Options {
        memory,
        daemon: vec!["--config".into(), path],
        ..Options::default()
    });
    (node, file)
}

/// What moved memory takes on the host.
fn on_host(node: &Node) -> u64 {
    let memory = node.gpumux(["memory", "--json"]).run().ok().json();
    memory["host"]["used"].as_u64().expect("a number")
}

#[test]
fn moved_memory_never_takes_more_of_the_host_than_it_may() {
    const LIMIT: u64 = 200 << 20;
    let (mut node, _file) = configured(0, "[host_memory]\nlimit = '200MiB'");
    let idle = |node: &Node, name: &str| {
        let program = "gpumux workload idle --seconds 600 --memory 128MiB";
        let tenant = Process::start(&mut node.tenant(&format!("--name {name}"), program));
        node.wait_tenant(name, |it| bytes(it, "in_use") >= 128 << 20);
        tenant
    };
    let (first, second) = (idle(&node, "first"), idle(&node, "second"));
    assert_eq!(on_host(&node), 0);
    node.gpumux(["sleep", "first"]).run().ok();
    assert!((128 << 20..=LIMIT).contains(&on_host(&node)));
    let refused = node.gpumux(["sleep", "second"]).run();
    assert!(!refused.status.success(), "{}", refused.out);
    for word in ["209715200 bytes on the host", "`limit` of `[host_memory]`"] {
        assert!(refused.err.contains(word), "{}", refused.err);
    }
    let awake = node.wait_tenant("second", |it| it["asleep"] == false);
    assert_eq!(bytes(&awake, "swapped"), 0, "nothing of it was moved");
    // Awake, the first needs it no more, and lets go of it for the other.
    node.gpumux(["wake", "first"]).run().ok();
    node.gpumux(["sleep", "second"]).run().ok();
    assert!((128 << 20..=LIMIT).contains(&on_host(&node)));
    // What the next daemon did not allow is not kept.
    node.kill_daemon();
    node.start_daemon();
    for name in ["first", "second"] {
        node.wait_tenant(name, |it| bytes(it, "in_use") >= 128 << 20);
    }
    wait_for("host memory of before", PATIENCE, || {
        (on_host(&node) == 0).then_some(())
    });
    // What ends keeps nothing.
    node.gpumux(["sleep", "first"]).run().ok();
    assert!((128 << 20..=LIMIT).contains(&on_host(&node)));
    drop(second);
    first.kill();
    wait_for("the host memory of the dead", PATIENCE, || {
        (on_host(&node) == 0).then_some(())
    });
}

/// What a process has mapped of files in a folder, where it may be looked at.
fn mapped(pid: u64, folder: &Path) -> Option<Vec<u8>> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).ok()?;
    let memory = File::open(format!("/proc/{pid}/mem")).ok()?;
    let mut all = Vec::new();
    for line in maps.lines() {
        let mut words = line.split_whitespace();
        let (range, path) = (words.next()?, words.nth(4));
        if path.is_none_or(|path| !Path::new(path).starts_with(folder)) {
            continue;
        }
        let (from, to) = range.split_once('-')?;
        let [from, to] = [from, to].map(|text| u64::from_str_radix(text, 16).expect("hex"));
        let mut contents = vec![1; (to - from) as usize];
        memory.read_exact_at(&mut contents, from).ok()?;
        all.append(&mut contents);
    }
    Some(all)
}

#[test]
fn moved_memory_is_where_the_configuration_says_and_zero_after_use() {
    let Ok(folder) = tempfile::Builder::new().tempdir_in("/dev/shm") else {
        eprintln!("SKIPPED: there is no /dev/shm");
        return;
    };
    // The tests' user may run their tenants as another user.
    let all = std::os::unix::fs::PermissionsExt::from_mode(0o1777);
    std::fs::set_permissions(folder.path(), all).expect("it is ours");
    let text = format!(
        "[host_memory]\nlimit = '32MiB'\nscrub = true\nlocation = '{}'",
        folder.path().display()
    );
    let (node, _file) = configured(0, &text);
    let worker = checks(&node, "24MiB", 3);
    let pid = u64::from(worker.pid());
    node.gpumux(["sleep", "worker"]).run().ok();
    assert_eq!(on_host(&node), 32 << 20);
    if let Some(contents) = mapped(pid, folder.path()) {
        assert_eq!(contents.len(), 32 << 20);
        let used = contents.iter().filter(|it| **it != 0).count();
        assert!(used > 1 << 20, "{used} bytes are not zero");
    }
    // It wakes by itself, or so.
    node.gpumux(["wake", "worker"]).run().ok();
    wait_for("zeros", PATIENCE, || {
        let contents = mapped(pid, folder.path()).unwrap_or_default();
        contents.iter().all(|it| *it == 0).then_some(())
    });
    verified(&worker.finish_within(PATIENCE * 3));
    // Its files had no names.
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn caches_are_given_back_before_anything_is_moved() {
    if real() {
        eprintln!("SKIPPED: the device is too large to fill in a test");
        return;
    }
    let node = Node::with_memory(256 << 20);
    let program = "gpumux workload idle --seconds 600 --memory 16MiB --cache 160MiB --json";
    let first = Process::start(&mut node.tenant("--name first", program));
    node.wait_tenant("first", |it| bytes(it, "in_use") >= 176 << 20);
    let idle = "gpumux workload idle --seconds 600 --memory 128MiB";
    let second = Process::start(&mut node.tenant("--name second", idle));
    node.wait_tenant("second", |it| bytes(it, "in_use") >= 128 << 20);
    let tenant = node.wait_tenant("first", |it| bytes(it, "in_use") < 128 << 20);
    assert!(bytes(&tenant, "in_use") >= 16 << 20, "{tenant:#}");
    assert_eq!(tenant["asleep"], false, "{tenant:#}");
    assert_eq!(tenant["moves"]["outs"], 0, "{tenant:#}");
    // When they do not suffice, the rest is moved as ever.
    let _third = Process::start(&mut node.tenant("--name third", idle));
    node.wait_tenant("third", |it| bytes(it, "in_use") >= 128 << 20);
    drop(second);
    first.signal(Signal::TERM);
    let report = first.finish_within(PATIENCE).json();
    assert_ne!(report["calls"], 0, "{report:#}");
}

/// `python/gpumux.py` with nothing but the driver: a cache that is given back.
#[test]
fn a_python_program_gives_its_cache_back() {
    const PROGRAM: &str = r#"
import sys, time
sys.path.insert(0, sys.argv[1])
import gpumux
context, cache = use_device(), []
for _ in range(10):
    address = ctypes.c_uint64()
    call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(16 << 20))
    cache.append(address)
def free(device, missing):
    call("cuCtxSetCurrent", context)
    freed = len(cache)
    while cache:
        call("cuMemFree_v2", cache.pop())
    return freed * (16 << 20)
def broken(device, missing):
    raise ValueError("of mine")
assert gpumux.on_reclaim(broken) and gpumux.on_reclaim(free)
while cache:
    time.sleep(0.01)
print("given back", flush=True)
"#;
    if real() {
        eprintln!("SKIPPED: the device is too large to fill in a test");
        return;
    }
    let node = Node::with_memory(256 << 20);
    let Some(program) = python(&node, PROGRAM) else {
        return;
    };
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../python");
    let text = format!("{program} {folder}");
    let cache = Process::start(&mut node.tenant("--name cache", &text));
    node.wait_tenant("cache", |it| bytes(it, "in_use") >= 160 << 20);
    let idle = "gpumux workload idle --seconds 600 --memory 128MiB";
    let _second = Process::start(&mut node.tenant("--name second", idle));
    node.wait_tenant("second", |it| bytes(it, "in_use") >= 128 << 20);
    let finished = cache.finish_within(PATIENCE).ok();
    assert_eq!(finished.out, "given back\n", "{}", finished.err);
    // The other one failed, and was reported.
    assert!(
        finished.err.contains("ValueError('of mine')"),
        "{}",
        finished.err
    );
}

/// A default stream of the thread's own can be asked about by that thread alone, and it waits for the device only.
#[test]
fn tenant_that_waits_for_the_device_can_be_moved() {
    const PROGRAM: &str = r#"
import sys
use_device()
address, size = ctypes.c_uint64(), 4 << 20
call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
sent, back = ctypes.create_string_buffer(b"gpumux " * (size // 7), size), ctypes.create_string_buffer(size)
def copy(name, *args):
    call(name, *args, ctypes.c_size_t(size), None)
    call("cuCtxSynchronize")
copy("cuMemcpyHtoDAsync_v2_ptsz", address, sent)
print("sent", flush=True)
sys.stdin.readline()
copy("cuMemcpyDtoHAsync_v2_ptsz", back, address)
print("right" if back.raw == sent.raw else "wrong", flush=True)
"#;
    let node = Node::start();
    let Some(program) = python(&node, PROGRAM) else {
        return;
    };
    let mut own = Process::start(&mut node.tenant("--name own", &program));
    own.wait_lines(1);
    node.gpumux(["sleep", "own"]).run().ok();
    node.wait_tenant("own", |it| it["asleep"] == true);
    own.write("\n");
    let finished = own.finish_within(PATIENCE).ok();
    assert!(finished.out.ends_with("right\n"), "{}", finished.out);
}

/// No other thread can ask about a thread's own default stream: every call that has seen the end of its copies counts, whatever it was
/// seen by. And a copy that fails for want of a context leaves nothing to wait for.
#[test]
fn copies_in_a_threads_own_stream_are_seen_to_end() {
    const PROGRAM: &str = r#"
import sys, threading
OWN, size = ctypes.c_void_p(2), ctypes.c_size_t(4 << 20)
sent = ctypes.create_string_buffer(b"gpumux " * (size.value // 7), size.value)
context, address = use_device(), ctypes.c_uint64()
call("cuMemAlloc_v2", ctypes.byref(address), size)
def by_name():
    call("cuMemcpyHtoDAsync_v2", address, sent, size, OWN)
    call("cuStreamSynchronize", OWN)
def by_event():
    event = ctypes.c_void_p()
    call("cuCtxSetCurrent", context)
    call("cuEventCreate", ctypes.byref(event), 0)
    call("cuMemcpyHtoDAsync_v2_ptsz", address, sent, size, None)
    call("cuEventRecord_ptsz", event, None)
    call("cuEventSynchronize", event)
def from_another_thread():
    call("cuCtxSetCurrent", context)
    call("cuMemcpyHtoDAsync_v2_ptsz", address, sent, size, None)
def in_a_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
def by_event_in_a_thread():
    in_a_thread(by_event)
def by_waiting_for_all():
    in_a_thread(from_another_thread)
    call("cuCtxSynchronize")
def without_context():
    assert cuda.cuMemcpyHtoDAsync_v2(address, sent, size, None) != 0
def by_its_failure():
    in_a_thread(without_context)
for how in by_its_failure, by_name, by_event_in_a_thread, by_waiting_for_all:
    how()
    print(how.__name__, flush=True)
    sys.stdin.readline()
    # Back again.
    call("cuMemcpyDtoH_v2", ctypes.create_string_buffer(8), address, ctypes.c_size_t(8))
"#;
    let node = Node::start();
    let Some(program) = python(&node, PROGRAM) else {
        return;
    };
    let mut own = Process::start(&mut node.tenant("--name own", &program));
    for n in 1..=4 {
        own.wait_lines(n);
        node.gpumux(["sleep", "own"]).run().ok();
        node.wait_tenant("own", |it| it["asleep"] == true);
        own.write("\n");
    }
    own.finish_within(PATIENCE).ok();
}

/// Its stream is destroyed while the copy has not even begun: a move of the memory waits for it all the same.
#[test]
fn a_copy_that_outlives_its_stream_arrives() {
    const PROGRAM: &str = r#"
import sys, threading
use_device()
address, host, stream, size = ctypes.c_uint64(), ctypes.c_void_p(), ctypes.c_void_p(), 4 << 20
call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
call("cuMemHostAlloc", ctypes.byref(host), ctypes.c_size_t(size), 0)
ctypes.memset(host, 7, size)
call("cuStreamCreate", ctypes.byref(stream), 1)
go, done = threading.Event(), threading.Event()
function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
wait, tell = function(lambda _: go.wait()), function(lambda _: done.set())
call("cuLaunchHostFunc", stream, wait, None)
call("cuMemcpyHtoDAsync_v2", address, host, ctypes.c_size_t(size), stream)
call("cuLaunchHostFunc", stream, tell, None)
call("cuStreamDestroy_v2", stream)
print("destroyed", flush=True)
sys.stdin.readline()
go.set()
done.wait()
print("arrived", flush=True)
sys.stdin.readline()
back = ctypes.create_string_buffer(size)
call("cuMemcpyDtoH_v2", back, address, ctypes.c_size_t(size))
print("right" if back.raw == bytes([7]) * size else "wrong", flush=True)
"#;
    let node = Node::start();
    let Some(program) = python(&node, PROGRAM) else {
        return;
    };
    let mut tenant = Process::start(&mut node.tenant("--name copier", &program));
    tenant.wait_lines(1);
    let mover = Process::start(&mut node.gpumux(["sleep", "copier"]));
    // A daemon that does not wait has moved it by then.
    std::thread::sleep(Duration::from_secs(1));
    tenant.write("\n");
    tenant.wait_lines(2);
    mover.finish_within(PATIENCE).ok();
    tenant.write("\n");
    let finished = tenant.finish_within(PATIENCE).ok();
    assert!(finished.out.ends_with("right\n"), "{}", finished.out);
}

#[test]
fn memory_that_the_driver_refuses_is_awaited_unless_the_policy_is_to_fail() {
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

#[test]
fn a_daemon_that_dies_leaves_no_tenant_asleep() {
    let mut node = Node::start();
    let worker = Process::start(&mut node.tenant("--name worker", &program(3, "24MiB", 400)));
    node.wait_tenant("worker", |it| bytes(it, "in_use") > 0);
    let idle = "gpumux workload idle --seconds 20 --memory 64MiB";
    let idler = Process::start(&mut node.tenant("--name idler", idle));
    node.wait_tenant("idler", |it| bytes(it, "in_use") >= 64 << 20);
    assert!(sleeps(&node, "idler"));
    let _ = sleeps(&node, "worker");
    node.kill_daemon();
    verified(&worker.finish_within(PATIENCE * 3));
    idler.finish_within(PATIENCE * 3).ok();
}

/// A tenant of more than half of the device, over restarts of the daemon.
#[test]
fn daemon_restart_keeps_memory_accounting() {
    if real() {
        eprintln!("SKIPPED: the device is too large to fill in a test");
        return;
    }
    let mut node = Node::with_memory(1 << 30);
    let idle = "gpumux workload idle --seconds 600 --memory 600MiB";
    let idler = Process::start(&mut node.tenant("--name idler", idle));
    node.wait_tenant("idler", |it| bytes(it, "in_use") >= 600 << 20);
    let before = free(&node);
    assert!(before > 100 << 20, "{before}");
    for _ in 0..3 {
        node.kill_daemon();
        node.start_daemon();
        node.wait_tenant("idler", |it| bytes(it, "in_use") >= 600 << 20);
        // Its context is known a moment after its memory.
        wait_for("the same accounting", PATIENCE, || {
            (free(&node) == before).then_some(())
        });
        // What was free is: it needs no other's memory.
        let next = "gpumux workload idle --seconds 0 --memory 100MiB";
        node.tenant("--memory-policy fail", next).run().ok();
        assert_eq!(
            node.find_tenant("idler").map(|it| bytes(&it, "swapped")),
            Some(0)
        );
    }
    idler.kill();
}

/// A pool keeps freed memory, as PyTorch's and CuPy's do: it is the tenant's until another tenant lacks it.
#[test]
fn pool_keeps_its_memory_until_others_lack_it() {
    const PROGRAM: &str = r#"
import sys
use_device()
pool = ctypes.c_void_p()
call("cuDeviceGetDefaultMemPool", ctypes.byref(pool), 0)
call("cuMemPoolSetAttribute", pool, 4, ctypes.byref(ctypes.c_uint64(2**64 - 1)))
def use(value):
    memory, size = ctypes.c_uint64(), 600 << 20
    call("cuMemAllocAsync", ctypes.byref(memory), ctypes.c_size_t(size), None)
    call("cuMemsetD8Async", memory, value, ctypes.c_size_t(size), None)
    last = ctypes.c_ubyte()
    call("cuMemcpyDtoH_v2", ctypes.byref(last), ctypes.c_uint64(memory.value + size - 1), ctypes.c_size_t(1))
    assert last.value == value
    call("cuMemFreeAsync", memory, None)
    call("cuStreamSynchronize", None)
for value in range(1, 20):
    use(value)
    print(value, flush=True)
    if not sys.stdin.readline():
        break
"#;
    if real() {
        eprintln!("SKIPPED: the device is too large to fill in a test");
        return;
    }
    const KEPT: u64 = 600 << 20;
    let node = Node::with_memory(1 << 30);
    let Some(command) = python(&node, PROGRAM) else {
        return;
    };
    let mut keeper = Process::start(&mut node.tenant("--name keeper", &command));
    node.wait_tenant("keeper", |it| bytes(it, "in_use") >= KEPT);
    keeper.wait_lines(1);
    // Longer than pools are counted anew: it still has all of it.
    std::thread::sleep(Duration::from_millis(2500));
    let kept = node.find_tenant("keeper").expect("it runs");
    assert!(bytes(&kept, "in_use") >= KEPT, "{kept:#}");
    assert!(bytes(&kept, "pinned") < KEPT, "{kept:#}");
    // There is room for the next, at once: nothing has to be moved for it.
    let next = "gpumux workload idle --seconds 1 --memory 700MiB";
    node.tenant("--name next", next).run().ok();
    let left = node.find_tenant("keeper").expect("it runs");
    assert!(bytes(&left, "in_use") < 100 << 20, "{left:#}");
    assert_eq!(left["moves"]["outs"], 0, "{left:#}");
    // It takes from the device again what it needs.
    keeper.write("\n");
    keeper.wait_lines(2);
    // A tenant that sleeps leaves nothing in its pools.
    assert!(sleeps(&node, "keeper"));
    let asleep = node.find_tenant("keeper").expect("it runs");
    assert!(bytes(&asleep, "in_use") < 100 << 20, "{asleep:#}");
    keeper.kill();
}

/// The driver's default: a pool gives back what is free when the program waits next.
#[test]
fn pool_that_keeps_nothing_is_not_counted() {
    const PROGRAM: &str = r#"
import time
use_device()
memory, size = ctypes.c_uint64(), ctypes.c_size_t(256 << 20)
call("cuMemAllocAsync", ctypes.byref(memory), size, None)
call("cuStreamSynchronize", None)
print("there", flush=True)
time.sleep(1.5)
call("cuMemFreeAsync", memory, None)
call("cuStreamSynchronize", None)
time.sleep(600)
"#;
    let node = Node::start();
    let Some(command) = python(&node, PROGRAM) else {
        return;
    };
    let program = Process::start(&mut node.tenant("--name pool", &command));
    node.wait_tenant("pool", |it| bytes(it, "in_use") >= 256 << 20);
    // Not more than what is kept of a lease.
    node.wait_tenant("pool", |it| bytes(it, "in_use") <= 128 << 20);
    program.kill();
}

/// What a program allocates while the daemon is away is its next daemon's to move.
#[test]
fn memory_allocated_without_daemon_moves_after_its_return() {
    const SIZE: u64 = 64 << 20;
    let mut node = Node::start();
    let (start, ready) = (node.dir().join("start"), node.dir().join("ready"));
    let job = format!(
        "gpumux workload sweep --json --memory 64MiB --seconds 600 --start-file {} --ready-file {}",
        start.display(),
        ready.display()
    );
    let job = Process::start(&mut node.tenant("--name job", &job));
    // Its session has begun.
    node.wait_tenant("job", |it| bytes(it, "in_use") > 0);
    node.kill_daemon();
    wait_for("the loss of the daemon", PATIENCE, || {
        job.err().contains("lost the daemon").then_some(())
    });
    File::create(&start).expect("room");
    wait_for("its first pass", PATIENCE, || ready.exists().then_some(()));
    node.start_daemon();
    let back = node.wait_tenant("job", |it| bytes(it, "in_use") >= SIZE);
    assert!(bytes(&back, "pinned") < SIZE, "{back:#}");
    wait_for("it is moved", PATIENCE, || {
        sleeps(&node, "job").then_some(())
    });
    // Its next pass wakes it.
    node.wait_tenant("job", |it| it["moves"]["out_bytes"].as_u64() >= Some(SIZE));
    job.signal(Signal::TERM);
    verified(&job.finish());
}

#[test]
fn a_sleeper_that_is_killed_leaves_nothing() {
    let node = Node::start();
    let before = free(&node);
    let idle = "gpumux workload idle --seconds 600 --memory 64MiB";
    let idler = Process::start(&mut node.tenant("--name idler", idle));
    node.wait_tenant("idler", |it| bytes(it, "in_use") >= 64 << 20);
    assert!(sleeps(&node, "idler"));
    idler.kill();
    wait_for("the end of a sleeper", PATIENCE, || {
        (node.find_tenant("idler").is_none() && free(&node) >= before).then_some(())
    });
    verified(&node.tenant("--name next", &program(5, "32MiB", 300)).run());
}

/// What the library calls while it moves memory: all steps of a way out and back. (The first copy each way is a trial.)
const STEPS: [(&str, u32); 14] = [
    ("cuMemHostRegister_v2", 1),
    ("cuStreamCreate", 1),
    ("cuMemAlloc_v2", 1),
    ("cuStreamSynchronize", 1),
    ("cuMemcpyDtoHAsync_v2", 2),
    ("cuMemcpyDtoHAsync_v2", 3),
    ("cuStreamSynchronize", 2),
    ("cuMemUnmap", 1),
    ("cuMemRelease", 2),
    ("cuMemCreate", 1),
    ("cuMemMap", 2),
    ("cuMemSetAccess", 1),
    ("cuMemcpyHtoDAsync_v2", 2),
    ("cuStreamSynchronize", 3),
];

/// A random program in which something happens at a step of a move.
fn broken(
    node: &Node,
    name: &str,
    seed: u32,
    steps: u32,
    what: &str,
    (function, call): (&str, u32),
) -> Process {
    let mut program = program(seed, "24MiB", steps);
    if seed % 2 == 1 {
        program += " --mapped";
    }
    let mut command = node.tenant(&format!("--name {name}"), &program);
    command.env(
        "GPUMUX_EMU_FAULT",
        format!("{what}@{call}:{function}:gpumux-mover"),
    );
    let process = Process::start(&mut command);
    node.wait_tenant(name, |it| bytes(it, "swapped") + bytes(it, "in_use") > 0);
    process
}

#[test]
fn kill_at_any_step_of_a_move_harms_no_other_tenant() {
    if real() {
        return;
    }
    let node = Node::start();
    let before = free(&node);
    let survivor = Process::start(&mut node.tenant("--name survivor", &program(11, "24MiB", 600)));
    for (n, step) in STEPS.into_iter().enumerate() {
        let name = format!("victim{n}");
        let mut victim = broken(&node, &name, n as u32, 100_000, "kill", step);
        let (started, mut moved) = (Instant::now(), 0);
        while victim.poll().is_none() {
            assert!(started.elapsed() < PATIENCE * 3, "{step:?} never comes");
            moved += u32::from(sleeps(&node, &name));
            let _ = sleeps(&node, "survivor");
        }
        let ended = victim.finish();
        assert_eq!(
            ended.code(),
            137,
            "{step:?}, moved {moved} times: {ended:?}"
        );
    }
    verified(&survivor.finish_within(PATIENCE * 4));
    wait_for("the memory of the dead", PATIENCE, || {
        (free(&node) >= before).then_some(())
    });
}

#[test]
fn daemon_death_at_any_step_of_a_move_loses_no_byte() {
    if real() {
        return;
    }
    let mut node = Node::start();
    for (n, step) in STEPS.into_iter().enumerate() {
        let name = format!("t{n}");
        let tenant = broken(&node, &name, n as u32, 1000, "stop", step);
        let pid = node.wait_tenant(&name, |it| it["pids"][0].is_u64())["pids"][0].clone();
        let stopped = || {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            stat.rsplit(')')
                .next()
                .is_some_and(|rest| rest.trim_start().starts_with('T'))
        };
        let mut mover = Process::start(&mut node.gpumux(["sleep", &name]));
        wait_for(&format!("{step:?}"), PATIENCE, || {
            if mover.poll().is_some() && !stopped() {
                // It is not on the way out: the way back then, which the program begins itself.
                mover = Process::start(&mut node.gpumux(["sleep", &name]));
            }
            stopped().then_some(())
        });
        node.kill_daemon();
        let pid = pid.as_i64().and_then(|pid| Pid::from_raw(pid as i32));
        kill_process(pid.expect("a pid"), Signal::CONT).expect("it is there");
        node.start_daemon();
        verified(&tenant.finish_within(PATIENCE * 2));
    }
}

#[test]
fn failed_step_of_a_move_loses_no_byte() {
    if real() {
        return;
    }
    let node = Node::start();
    let before = free(&node);
    // Letting go of memory cannot fail.
    let may_fail = |(name, _): &(&str, u32)| !["cuMemUnmap", "cuMemRelease"].contains(name);
    for (n, step) in STEPS.into_iter().filter(may_fail).enumerate() {
        let name = format!("t{n}");
        let mut tenant = broken(&node, &name, n as u32, 250, "fail", step);
        // Both ways, and once more after the step.
        for _ in 0..5 {
            if tenant.poll().is_none() {
                let _ = sleeps(&node, &name);
            }
        }
        verified(&tenant.finish_within(PATIENCE * 2));
    }
    wait_for("the memory of all", PATIENCE, || {
        (free(&node) >= before).then_some(())
    });
}

/// Killed at any moment of a move: nothing is lost, and a survivor has every byte. `GPUMUX_TEST_ROUNDS=200` is a longer storm.
#[test]
fn storm_of_kills_harms_no_other_tenant() {
    let node = Node::start();
    let before = free(&node);
    let rounds = std::env::var("GPUMUX_TEST_ROUNDS").ok();
    let rounds = rounds.map_or(6, |text| text.parse().expect("a number of rounds"));
    let long = program(11, "24MiB", 50 * rounds);
    let survivor = Process::start(&mut node.tenant("--name survivor", &long));
    for round in 0..rounds {
        let name = format!("victim{round}");
        let work = program(round, "24MiB", 100_000);
        let victim = Process::start(&mut node.tenant(&format!("--name {name}"), &work));
        node.wait_tenant(&name, |it| bytes(it, "in_use") > 0);
        // The answer comes when the move is done, or the tenant gone.
        let mover = Process::start(&mut node.gpumux(["sleep", &name]));
        let _ = sleeps(&node, "survivor");
        std::thread::sleep(Duration::from_millis(u64::from(round % 10) * 15));
        victim.kill();
        let ended = mover.finish_within(PATIENCE * 2);
        assert!(ended.status.code().is_some(), "{ended:?}");
    }
    verified(&survivor.finish_within(PATIENCE * 4));
    wait_for("the memory of the dead", PATIENCE, || {
        (free(&node) >= before).then_some(())
    });
}

#[test]
fn more_tenants_than_memory_take_turns() {
    if real() {
        // The device there is too large to fill in a test: `bench/memory.py oversubscribe` does so.
        return;
    }
    let node = Node::with_memory(256 << 20);
    let check = "gpumux workload check --json --memory 100MiB --seconds 1";
    let mut workers: Vec<Process> = (0..3)
        .map(|n| Process::start(&mut node.tenant(&format!("--name w{n}"), check)))
        .collect();
    // These have memory in many pieces, so that a part of it may stay.
    workers.extend((0..2).map(|n| {
        let program = program(n, "100MiB", 200);
        Process::start(&mut node.tenant(&format!("--name r{n}"), &program))
    }));
    for worker in workers {
        verified(&worker.finish_within(Duration::from_secs(240)));
    }
}

/// A single allocation each, of 60% and 50% of the device: what is lacking moves in each turn, not all of it.
#[test]
fn single_allocations_move_by_what_is_lacking() {
    const CHUNK: u64 = 64 << 20;
    if real() {
        eprintln!("SKIPPED: `bench/residency.py arena` fills the device");
        return;
    }
    let node = Node::with_memory(512 << 20);
    let mut jobs = [("large", "307MiB"), ("small", "256MiB")].map(|(name, memory)| {
        let sweep = format!("gpumux workload sweep --json --memory {memory} --seconds 600");
        let job = Process::start(&mut node.tenant(&format!("--name {name}"), &sweep));
        (name, job)
    });
    let moves = |name: &str, field: &str| {
        let tenant = node.find_tenant(name)?;
        tenant["moves"][field].as_u64()
    };
    for (name, job) in &mut jobs {
        wait_for("both to have moved", PATIENCE * 6, || {
            assert!(job.poll().is_none(), "{name} has ended: {}", job.err());
            (moves(name, "outs")? > 0).then_some(())
        });
    }
    let memory = node.gpumux(["memory", "--json"]).run().ok().json();
    let device = &memory["devices"][0];
    let number = |it: &Value, field: &str| it[field].as_u64().expect("a number");
    let tenants = device["tenants"].as_array().expect("an array");
    let wanted = |it| number(it, "in_use") + number(it, "swapped");
    let room = number(device, "total") - number(device, "occupied");
    let lacking = tenants.iter().map(wanted).sum::<u64>() - room;
    assert!(lacking < 180 << 20, "{lacking} of {memory:#}");
    for (name, job) in jobs {
        let (outs, bytes) = (moves(name, "outs"), moves(name, "out_bytes"));
        let (outs, bytes) = outs.zip(bytes).expect("it runs");
        assert!(
            bytes <= outs * (lacking + CHUNK),
            "{name}: {bytes} bytes in {outs} moves, lacking {lacking} bytes"
        );
        job.signal(Signal::TERM);
        verified(&job.finish_within(PATIENCE * 2));
    }
}

#[test]
fn ten_tenants_that_start_together_never_exceed_the_device() {
    if real() {
        return;
    }
    let node = Node::with_memory(1 << 30);
    let idle = "gpumux workload idle --seconds 2 --memory 200MiB";
    let tenants: Vec<Process> = (0..10)
        .map(|n| {
            let options = format!("--name t{n} --memory-policy fail");
            Process::start(&mut node.tenant(&options, idle))
        })
        .collect();
    let (mut served, mut refused) = (0, 0);
    for tenant in tenants {
        let finished = tenant.finish_within(PATIENCE * 3);
        match finished.status.success() {
            true => served += 1,
            false => {
                // Its own error, not a crash.
                assert_eq!(finished.status.code(), Some(1), "{}", finished.err);
                assert!(
                    finished.err.contains("OUT_OF_MEMORY")
                        || finished.err.contains("out of memory"),
                    "{}",
                    finished.err
                );
                refused += 1;
            }
        }
    }
    assert!(
        served >= 1 && served + refused == 10,
        "{served} served, {refused} refused"
    );
}
