//! The controls, and what the daemon does with them.

use std::time::Duration;

use gpumux_tests::{Node, Options, PATIENCE, Process, Puppet, Run, real, wait_for};
use rustix::process::Signal;
use serde_json::Value;

use crate::{REQUESTS, TICKS, a_second, wait_still};

#[test]
fn timeslices_read_back_as_they_were_set() {
    let puppet = Puppet::new();
    let (mut process, _session, controls) = puppet.start(TICKS);
    process.wait_lines(1);
    assert_eq!(controls.timeslice().unwrap(), 2048, "libcuda's own");
    for slice in [1, 2048, 50_000, 1_000_000, 1] {
        controls.set_timeslice(slice).unwrap();
        assert_eq!(controls.timeslice().unwrap(), slice);
    }
}

#[test]
fn a_frozen_kernel_stops_in_the_middle_and_finishes_correctly() {
    let puppet = Puppet::new();
    let running = puppet.node.dir().join("running");
    // It takes 3 s.
    let check = format!(
        "gpumux workload check --json --rounds 75000 --ready-file {}",
        running.display()
    );
    let (mut process, _session, controls) = puppet.start(&check);
    wait_for("the kernel to run", PATIENCE, || {
        running.exists().then_some(())
    });
    controls.freeze().unwrap();
    // Longer than it takes when it is left alone.
    std::thread::sleep(Duration::from_secs(4));
    assert!(
        process.poll().is_none(),
        "a frozen kernel went on: {}",
        process.out()
    );
    controls.thaw().unwrap();
    let report = process.finish().ok().json();
    assert_eq!(report["mismatches"], 0, "{report:#}");
    assert_eq!(report["sum_matches"], true, "{report:#}");
    assert!(report["elements"].as_u64() > Some(0), "{report:#}");
}

#[test]
fn freezing_one_leaves_others_alone() {
    let puppet = Puppet::new();
    let (mut a, _a_session, a_controls) = puppet.start(TICKS);
    let (mut b, _b_session, _b_controls) = puppet.start(TICKS);
    a.wait_lines(3);
    b.wait_lines(3);
    a_controls.freeze().unwrap();
    wait_still(&a);
    let lines = b.lines();
    b.wait_lines(lines + 20);
    a_controls.thaw().unwrap();
    let lines = a.lines();
    a.wait_lines(lines + 3);
}

#[test]
fn a_lost_daemon_thaws_what_it_froze() {
    let puppet = Puppet::new();
    let (mut process, session, controls) = puppet.start(TICKS);
    process.wait_lines(3);
    controls.set_timeslice(1).unwrap();
    controls.freeze().unwrap();
    wait_still(&process);
    let lines = process.lines();
    drop(session);
    wait_for("the shim to thaw its own process", a_second(), || {
        (process.lines() > lines).then_some(())
    });
    // Its file still works in our hands, so we can see what the shim left behind.
    wait_for("the slice that libcuda had set", a_second(), || {
        (controls.timeslice().unwrap() == 2048).then_some(())
    });
}

/// Alone, alone of its kind: the slices that the classes stand for.
#[test]
fn classes_become_timeslices() {
    let node = Node::start();
    let slice = |tenant: &Value| tenant["domains"][0]["timeslice_us"].as_u64();
    let _serve = Process::start(&mut node.tenant("--class latency --name serve", TICKS));
    let _train = Process::start(&mut node.tenant("--class batch --name train", TICKS));
    node.wait_tenant("serve", |tenant| slice(tenant) == Some(1_000_000));
    node.wait_tenant("train", |tenant| slice(tenant) == Some(1));
}

#[test]
fn a_batch_tenant_alone_keeps_libcudas_slice() {
    let node = Node::start();
    let mut train = Process::start(&mut node.tenant("--class batch --name train", TICKS));
    train.wait_lines(20);
    let tenant = node.wait_tenant("train", |tenant| !tenant["domains"][0].is_null());
    assert_ne!(tenant["domains"][0]["timeslice_us"], 1, "{tenant:#}");
    assert_eq!(tenant["domains"][0]["frozen"], false, "{tenant:#}");
}

/// Two (or more) runnable groups with 1 µs would only switch: the daemon must take turns with them.
fn all_progress(batch: usize, latency: bool) {
    let node = Node::start();
    let _serve = latency.then(|| Process::start(&mut node.tenant("--class latency", REQUESTS)));
    let start = |_| Process::start(&mut node.tenant("--class batch", TICKS));
    let mut tenants: Vec<_> = (0..batch).map(start).collect();
    for tenant in &mut tenants {
        tenant.wait_lines(1);
    }
    // From here on all of them run at the same time.
    let before: Vec<usize> = tenants.iter().map(Process::lines).collect();
    for (tenant, before) in tenants.iter_mut().zip(before) {
        tenant.wait_lines(before + 50);
    }
}

#[test]
fn two_batch_tenants_both_progress() {
    all_progress(2, false);
}

#[test]
fn three_batch_tenants_all_progress() {
    all_progress(3, false);
}

#[test]
fn batch_tenants_progress_beside_a_latency_tenant() {
    all_progress(2, true);
    all_progress(3, true);
}

/// Small copies from the host, copies in the device and cleared memory are work of the compute group.
#[test]
fn tenant_that_only_copies_shares_the_device() {
    const PROGRAM: &str = r#"
import time
use_device()
memory = ctypes.c_uint64()
call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(8192))
size = ctypes.c_size_t(4096)
other = ctypes.c_uint64(memory.value + 4096)
while True:
    call("cuMemcpyHtoD_v2", memory, bytes(4096), size)
    call("cuMemcpyDtoD_v2", other, memory, size)
    call("cuMemsetD8_v2", memory, ctypes.c_ubyte(1), size)
    call("cuCtxSynchronize")
    print("done", flush=True)
    time.sleep(0.02)
"#;
    let node = Node::start();
    let Some(program) = crate::memory::python(&node, PROGRAM) else {
        return;
    };
    let _serve = Process::start(&mut node.tenant("--class latency", REQUESTS));
    let mut train = Process::start(&mut node.tenant("--class batch", TICKS));
    train.wait_lines(1);
    let mut copies = Process::start(&mut node.tenant("--class batch", &program));
    copies.wait_lines(30);
    let lines = train.lines();
    train.wait_lines(lines + 5);
}

#[test]
fn rotation_interrupts_kernels_and_keeps_them_correct() {
    let node = Node::start();
    let _serve = Process::start(&mut node.tenant("--class latency", REQUESTS));
    let _other = Process::start(&mut node.tenant("--class batch --name other", TICKS));
    let running = node.dir().join("running");
    let check = format!(
        "gpumux workload check --json --rounds 125000 --ready-file {}",
        running.display()
    );
    let check = Process::start(&mut node.tenant("--class batch --name check", &check));
    wait_for("the kernel to run", PATIENCE, || {
        running.exists().then_some(())
    });
    node.wait_tenant("check", |tenant| {
        tenant["domains"][0]["freezes"].as_u64() >= Some(3)
    });
    let report = check.finish().ok().json();
    assert_eq!(report["mismatches"], 0, "{report:#}");
    assert_eq!(report["sum_matches"], true, "{report:#}");
}

#[test]
fn set_is_in_force_at_once() {
    let node = Node::start();
    let _serve = Process::start(&mut node.tenant("--class latency --name serve", TICKS));
    let _train = Process::start(&mut node.tenant("--class batch --name train", TICKS));
    let slice = |tenant: &Value| tenant["domains"][0]["timeslice_us"].as_u64();
    node.wait_tenant("train", |tenant| slice(tenant) == Some(1));
    let patient = crate::contracts::set(&node, "serve --latency-objective 8");
    assert_eq!(patient["spec"]["latency_objective_us"], 8_000);
    node.wait_tenant("train", |tenant| slice(tenant) == Some(800));
    // They change places.
    let serve = crate::contracts::set(&node, "serve --class batch --weight 2");
    assert_eq!(serve["class"], "batch");
    assert_eq!(serve["spec"]["weight"], 2.0);
    crate::contracts::set(&node, "train --class latency");
    node.wait_tenant("train", |tenant| slice(tenant) == Some(1_000_000));
    node.wait_tenant("serve", |tenant| slice(tenant) == Some(1));
}

/// Two programs that do the same work from the same moment on.
#[test]
fn a_larger_weight_gets_more_done() {
    let node = Node::start();
    let barrier = node.dir().join("barrier");
    let work = format!(
        "gpumux workload batch --json --iterations 200000 --seconds 3 --barrier 2:{}",
        barrier.display()
    );
    let start = |options| Process::start(&mut node.tenant(options, &work));
    let (much, little) = (start("--weight 4"), start("--weight 1"));
    let calls = |process: Process| process.finish().ok().json()["calls"].as_u64();
    let (much, little) = (calls(much), calls(little));
    assert!(little > Some(0) && much > little, "{much:?} and {little:?}");
}

#[test]
fn idle_contender_is_frozen_and_goes_on_afterwards() {
    let node = Node::start();
    let _serve = Process::start(&mut node.tenant("--class latency", REQUESTS));
    // Together they want more than there is, and each pauses between its kernels.
    let batch = |name: &str| {
        let options = format!("--class batch --name {name}");
        let program =
            "gpumux workload latency --kernels 1 --kernel-us 20000 --period-us 35000 --seconds 600";
        Process::start(&mut node.tenant(&options, program))
    };
    let _both = ["one", "two"].map(batch);
    let file = node.dir().join("trace.json");
    wait_for("both frozen in pauses, and back", 3 * PATIENCE, || {
        let mut trace = node.gpumux(["trace", "--seconds", "60", "-o"]);
        trace.arg(&file).run().ok();
        let trace: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        let events = trace["traceEvents"].as_array().unwrap();
        let seen = |what: &str, why: &str| {
            let so = events
                .iter()
                .filter(|it| it["name"] == what && it["args"]["reason"] == why);
            let threads: std::collections::BTreeSet<_> = so.map(|it| it["tid"].as_u64()).collect();
            threads.len() == 2
        };
        let paused = seen("frozen, no work", "idle contender");
        (paused && seen("may run", "has its quantum")).then_some(())
    });
    let received = |name: &str| {
        let tenant = node.find_tenant(name).expect("it runs");
        tenant["domains"][0]["received_us"].as_u64()
    };
    let before = ["one", "two"].map(received);
    wait_for("both go on", PATIENCE, || {
        let now = ["one", "two"].map(received);
        (now[0] > before[0] && now[1] > before[1]).then_some(())
    });
}

/// A driver, or a sandbox in front of it, without what gpumux needs, and a daemon that may use nothing else.
#[test]
fn program_that_cannot_be_controlled_runs_unmanaged_and_says_so() {
    if real() {
        eprintln!("SKIPPED: it needs the emulated device");
        return;
    }
    let node = Node::with(Options {
        profile: "controls = { own_process_only = true }",
        daemon: ["--mechanism", "controls"].map(str::to_owned).into(),
        ..Options::default()
    });
    let mut process = Process::start(&mut node.tenant("--name a --class latency", TICKS));
    process.wait_lines(3);
    let state = || (node.find_tenant("a")?["state"] == "faulty").then_some(());
    wait_for("the state", PATIENCE, state);
    let explained = node.gpumux(["explain", "a"]).run().ok().out;
    let why = "Processes of it run unmanaged: the driver does not let gpumux control this process";
    assert!(explained.contains(why), "{explained}");
    assert!(explained.contains("run `gpumux doctor`"), "{explained}");
    // It goes on as if there were no daemon, and prints that once.
    let lines = process.lines();
    process.wait_lines(lines + 10);
    let says = || process.err().contains("running unmanaged").then_some(());
    wait_for("the line", PATIENCE, says);
    process.signal(Signal::TERM);
    let finished = process.finish();
    let printed = finished.err.matches("insufficient permissions").count();
    assert_eq!(printed, 1, "{}", finished.err);
    assert!(
        finished.err.contains("running unmanaged"),
        "{}",
        finished.err
    );
}
