//! Taking the device before the work arrives.

use std::time::Duration;

use gpumux_tests::{Node, Options, PATIENCE, Process, Run, real, wait_for};
use rustix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};

use crate::memory::python;

/// A tenant to compete with.
const BATCH: &str = "gpumux workload batch --kernel-us 5000 --seconds 60";

fn batch(node: &Node) -> Process {
    let batch = Process::start(&mut node.tenant("--class batch --name batch", BATCH));
    node.wait_tenant("batch", |tenant| tenant["domains"][0]["demand"] == "busy");
    batch
}

fn hints(tenant: &Value, what: &str) -> u64 {
    tenant["hints"][what].as_u64().expect("a number")
}

/// Work meets most of the reservations that the library makes for a program beside a batch tenant. Both go on.
fn beside_batch_most_are_useful(node: &Node, program: &str) -> [Process; 2] {
    let batch = batch(node);
    let auto = Process::start(&mut node.tenant("--class latency --name auto", program));
    let tenant = node.wait_tenant("auto", |tenant| hints(tenant, "useful") >= 30);
    assert!(
        hints(&tenant, "wasted") < hints(&tenant, "useful"),
        "{tenant:#}"
    );
    [batch, auto]
}

/// Requests that hint 300 µs ahead.
const HINTING: &str =
    "gpumux workload latency --hint manual --prepare-us 300 --period-us 10000 --seconds 60";

#[test]
fn work_meets_the_device_held_for_it() {
    let node = Node::start();
    let _batch = batch(&node);
    let _serve = Process::start(&mut node.tenant("--class latency --name serve", HINTING));
    node.wait_tenant("serve", |tenant| hints(tenant, "useful") >= 20);
}

/// GPreempt's arrangement: one process with two contexts, latency work in the one with 1 s, all batch work in the other
/// with 1 µs. With a context for each batch task neither would ever end a request.
#[test]
fn two_contexts_by_priority_batch_streams_progress() {
    let node = Node::with(Options {
        daemon: ["--policy", "fixed"].map(str::to_owned).into(),
        ..Options::default()
    });
    let program = "gpumux workload tasks --two-contexts --us-per-iteration 0.0046 \
                   rt=5x20=high be1=4x1000=low be2=4x1000=low";
    let mut tasks = Process::start(&mut node.tenant("--class latency --name both", program));
    tasks.wait_lines(1);
    node.wait_tenant("both", |tenant| {
        let domains = tenant["domains"].as_array().expect("a list");
        let slices: Vec<_> = domains.iter().map(|it| &it["timeslice_us"]).collect();
        slices == [1_000_000, 1]
    });
    let start = clock_gettime(ClockId::Monotonic).tv_sec as f64 + 1.0;
    let each = |count: u32, hint: bool| {
        let arrivals: Vec<_> = (0..count).map(|n| f64::from(n) * 0.05).collect();
        json!({"arrivals": arrivals, "prepare_us": 200, "hint": hint})
    };
    let order = json!({
        "start": start,
        "stop": start + 2.0,
        "tasks": {"rt": each(30, true), "be1": each(30, false), "be2": each(30, false)},
    });
    tasks.write(&format!("{order}\n"));
    tasks.wait_lines(2);
    let out = tasks.finish().ok().out;
    let answer: Value = serde_json::from_str(out.lines().nth(1).expect("two lines")).unwrap();
    for task in ["rt", "be1", "be2"] {
        let served = answer["tasks"][task]["latencies_ms"].as_array();
        assert!(served.is_some_and(|it| !it.is_empty()), "{task}: {answer}");
    }
}

/// Work that is 40 ms away: the device is not held so long.
#[test]
fn a_hint_far_ahead_holds_shortly_before_its_work() {
    let node = Node::start();
    let _batch = batch(&node);
    let far =
        "gpumux workload latency --hint manual --prepare-us 40000 --period-us 60000 --seconds 60";
    let _serve = Process::start(&mut node.tenant("--class latency --name serve", far));
    let tenant = node.wait_tenant("serve", |tenant| hints(tenant, "given") >= 20);
    assert!(
        hints(&tenant, "held_us") <= 20_000 * hints(&tenant, "given"),
        "{tenant:#}"
    );
}

/// From many threads, during captures, after forks, at exit; and nothing hangs or gets wrong.
#[test]
fn hints_without_work_are_bounded_and_safe() {
    let node = Node::start();
    let mut batch = batch(&node);
    let ready = node.dir().join("ready");
    let program = format!(
        "gpumux workload hints --json --seconds 3 --ready-file {}",
        ready.display()
    );
    let serve = Process::start(&mut node.tenant("--class latency --name serve", &program));
    let tenant = node.wait_tenant("serve", |tenant| {
        hints(tenant, "wasted") >= 5 && tenant["requests"]["count"].as_u64() > Some(0)
    });
    // One may be under way.
    let ended = hints(&tenant, "useful") + hints(&tenant, "wasted");
    assert!(
        (ended..=ended + 1).contains(&hints(&tenant, "given")),
        "{tenant:#}"
    );
    assert!(hints(&tenant, "held_us") <= 1000 * ended, "{tenant:#}");
    let requests = &tenant["requests"];
    assert!(requests["p50_us"].as_f64() >= Some(1.0), "{tenant:#}");
    let report = serve.finish().ok().json();
    assert!(report["calls"].as_u64() >= Some(5), "{report:#}");
    assert!(batch.poll().is_none(), "{}", batch.err());
}

#[test]
fn without_a_daemon_hints_do_nothing() {
    let mut node = Node::start();
    let _batch = batch(&node);
    let program = "gpumux workload hints --json --seconds 4";
    let serve = Process::start(&mut node.tenant("--class latency --name serve", program));
    node.wait_tenant("serve", |tenant| hints(tenant, "given") > 0);
    node.kill_daemon();
    serve.finish().ok();
}

#[test]
fn no_reservation_where_it_gains_nothing() {
    let node = Node::start();
    let ok = |options: &str| {
        let program = "gpumux workload hints --json --seconds 1";
        let report = node.tenant(options, program).run().ok().json();
        report["calls"].as_u64()
    };
    assert_eq!(ok("--class latency --name alone"), Some(0));
    let _batch = batch(&node);
    assert_eq!(ok("--class latency --hints off --name off"), Some(0));
    assert_eq!(ok("--class standard --name standard"), Some(0));
    let mut disabled = node.tenant(
        "--class latency",
        "gpumux workload hints --json --seconds 1",
    );
    let report = disabled.env("GPUMUX_HINTS", "0").run().ok().json();
    assert_eq!(report["calls"], 0);
}

#[test]
fn hints_come_from_outside_if_their_owner_allows_them() {
    let node = Node::start();
    let _batch = batch(&node);
    let serve = "gpumux workload latency --period-us 50000 --seconds 60";
    let _serve =
        Process::start(&mut node.tenant("--class latency --hints manual --name serve", serve));
    node.wait_tenant("serve", |tenant| !tenant["domains"][0].is_null());
    wait_for("a hint from outside to be taken", PATIENCE, || {
        let hinted = node.gpumux(["hint", "serve", "--json"]).run().ok().json();
        assert_eq!(hinted["processes"], 1);
        let tenant = node.find_tenant("serve")?;
        (hints(&tenant, "given") >= 3).then_some(())
    });
    crate::contracts::set(&node, "serve --hints off");
    let refused = node.gpumux(["hint", "serve"]).run();
    assert_eq!(refused.code(), 1);
    assert!(refused.err.contains("--hints auto"), "{}", refused.err);
    assert_eq!(node.gpumux(["hint", "nobody"]).run().code(), 1);
}

/// Loading code into a frozen context would not end, and keep the driver's lock: it waits until the tenant is awake.
#[test]
fn nothing_is_made_ready_in_a_tenant_that_sleeps() {
    const PROGRAM: &str = r#"
import sys, time
use_device()
address = ctypes.c_uint64()
call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(4 << 20))
def work():
    call("cuMemsetD8_v2", address, 7, ctypes.c_size_t(4 << 20))
    call("cuCtxSynchronize")
work()
print("idle", flush=True)
sys.stdin.readline()
while True:
    work()
    time.sleep(0.1)
"#;
    if real() {
        eprintln!("SKIPPED: it needs the emulated device");
        return;
    }
    let node = Node::start();
    let Some(program) = python(&node, PROGRAM) else {
        return;
    };
    let mut serve = node.tenant("--class latency --name serve", &program);
    serve.env("GPUMUX_EMU_FAULT", "kill@1:cuModuleLoadData:gpumux-poll");
    let mut serve = Process::start(&mut serve);
    serve.wait_lines(1);
    node.gpumux(["sleep", "serve"]).run().ok();
    node.wait_tenant("serve", |tenant| tenant["asleep"] == true);
    let _batch = batch(&node);
    // The poller looks every 32 ms.
    std::thread::sleep(Duration::from_millis(500));
    assert!(serve.poll().is_none(), "{}", serve.err());
    serve.write("\n");
    assert_eq!(serve.finish_within(PATIENCE).code(), 137);
}

/// A long copy before every request, which the program does not announce.
#[test]
fn copies_predict_work() {
    let node = Node::start();
    let _batch = batch(&node);
    let serve = "gpumux workload latency --copy 16MiB --period-us 20000 --seconds 60";
    let _auto = Process::start(&mut node.tenant("--class latency --name auto", serve));
    node.wait_tenant("auto", |tenant| hints(tenant, "useful") >= 10);
    let manual = "--class latency --hints manual --name manual";
    let _manual = Process::start(&mut node.tenant(manual, serve));
    let busy = |tenant: &Value| tenant["domains"][0]["runnable_us"].as_u64() > Some(100_000);
    let tenant = node.wait_tenant("manual", busy);
    assert_eq!(hints(&tenant, "given"), 0, "{tenant:#}");
}

/// A program that waits, submits a little and waits again, as a language model for each token: the device is kept from one wait to the next, and
/// not while nothing follows.
#[test]
fn device_is_kept_from_one_wait_to_the_next() {
    const PROGRAM: &str = r#"
import time
use_device()
address, word = ctypes.c_uint64(), ctypes.c_uint32()
call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(1 << 20))
def work(times):
    for _ in range(times):
        call("cuMemsetD8Async", address, 7, ctypes.c_size_t(1 << 20), None)
while True:
    time.sleep(0.005)
    work(40)
    call("cuMemcpyDtoHAsync_v2", ctypes.byref(word), address, ctypes.c_size_t(4), None)
    call("cuStreamSynchronize", None)
    work(2)
    call("cuStreamSynchronize", None)
"#;
    let node = Node::start();
    let Some(program) = python(&node, PROGRAM) else {
        return;
    };
    let _tenants = beside_batch_most_are_useful(&node, &program);
    let manual = "--class latency --hints manual --name manual";
    let _manual = Process::start(&mut node.tenant(manual, &program));
    let busy = |tenant: &Value| tenant["domains"][0]["runnable_us"].as_u64() > Some(100_000);
    let tenant = node.wait_tenant("manual", busy);
    assert_eq!(hints(&tenant, "given"), 0, "{tenant:#}");
}

/// A program that submits many pieces and only then waits, as a language model that is launched kernel by kernel: the device is taken before the wait, so
/// that no neighbour has it then.
#[test]
fn device_is_taken_before_a_long_request_is_waited_for() {
    const PROGRAM: &str = r#"
import time
use_device()
address = ctypes.c_uint64()
call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(1 << 20))
def spin(us):
    end = time.perf_counter() + us * 1e-6
    while time.perf_counter() < end:
        pass
while True:
    for _ in range(400):
        call("cuMemsetD8Async", address, 7, ctypes.c_size_t(4096), None)
        spin(40)
    call(WAIT)
"#;
    for wait in ["\"cuStreamSynchronize\", None", "\"cuCtxSynchronize\""] {
        let node = Node::start();
        let Some(program) = python(&node, &PROGRAM.replace("WAIT", wait)) else {
            return;
        };
        beside_batch_most_are_useful(&node, &program);
    }
}

/// Loading code may wait for all work of the context: not to be done at a wait for a part of it.
#[test]
fn nothing_is_made_ready_while_work_goes_on() {
    const PROGRAM: &str = r#"
import threading
context = use_device()
address, side = ctypes.c_uint64(), ctypes.c_void_p()
call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(1 << 20))
call("cuStreamCreate", ctypes.byref(side), 1)
main = ctypes.c_void_p()
call("cuStreamCreate", ctypes.byref(main), 1)
def work(stream, times, size):
    for _ in range(times):
        call("cuMemsetD8Async", address, 7, ctypes.c_size_t(size), stream)
def run():
    call("cuCtxSetCurrent", context)
    work(side, 2000, 1 << 20)
    for _ in range(15):
        for times in 40, 2:
            work(main, times, 4096)
            call("cuStreamSynchronize", main)
thread = threading.Thread(target=run)
thread.start()
thread.join()
"#;
    if real() {
        eprintln!("SKIPPED: it needs the emulated device");
        return;
    }
    // What the side stream has to do takes seconds.
    let node = Node::with(Options {
        profile: "memory_bandwidth = 1_000_000_000",
        ..Options::default()
    });
    let Some(program) = python(&node, PROGRAM) else {
        return;
    };
    let _batch = batch(&node);
    let mut serve = node.tenant("--class latency --name serve", &program);
    serve.env("GPUMUX_EMU_FAULT", "kill@1:cuModuleLoadData:python3");
    Process::start(&mut serve).finish().ok();
}

/// A context that goes takes long, and the device must not be taken there meanwhile.
#[test]
fn hints_reach_programs_that_end() {
    let node = Node::start();
    let _batch = batch(&node);
    for _ in 0..4 {
        let serve = "gpumux workload latency --period-us 2000 --seconds 0.5 --json";
        let options = "--class latency --hints manual --name serve";
        let mut serve = Process::start(&mut node.tenant(options, serve));
        while serve.poll().is_none() {
            // As soon as it is there, and until it has gone.
            node.gpumux(["hint", "serve"]).run();
        }
        assert!(serve.finish().ok().json()["calls"].as_u64() >= Some(1));
    }
}
