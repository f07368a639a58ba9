//! Which devices a tenant may use, and what is admitted and seen there.

use gpumux_tests::{Node, PATIENCE, Process, Run, binary, wait_for};
use serde_json::Value;

use crate::TICKS;

fn listing(node: &Node) -> Value {
    let listed = node.gpumux(["ps", "--json"]).run().ok();
    serde_json::from_str(&listed.out).unwrap()
}

#[test]
fn guarantee_is_booked_on_the_devices_that_are_named() {
    let Some(node) = Node::with_two_devices() else {
        return;
    };
    let start = |name: &str, options: &str| {
        let options = format!("--name {name} --guaranteed 0.7 {options}");
        Process::start(&mut node.tenant(&options, TICKS))
    };
    let _a = start("a", "--gpu 0");
    let _b = start("b", "--gpu 1");
    let device = |name: &str| {
        let used = |tenant: &Value| !tenant["devices"].as_array().unwrap().is_empty();
        let tenant = node.wait_tenant(name, used);
        assert_eq!(tenant["devices"], tenant["may_use"], "{tenant:#}");
        tenant["devices"][0].as_str().unwrap().to_owned()
    };
    assert_ne!(device("a"), device("b"));
    // By what the program sees, too.
    let mut third = node.tenant("--name c --guaranteed 0.7", "true");
    let third = third.env("CUDA_VISIBLE_DEVICES", "1").run();
    assert_eq!(third.status.code(), Some(125), "{}", third.err);
    let expected = format!("of GPU 1 ({}", &device("b")[..8]);
    assert!(third.err.contains(&expected), "{}", third.err);
    assert!(third.err.contains("b (70%)"), "{}", third.err);
    let all = node.tenant("--name d --guaranteed 0.4", "true").run();
    assert_eq!(all.status.code(), Some(125), "{}", all.err);
}

/// A program without the library that always has work.
fn foreign(node: &Node) -> Process {
    let program = ["workload", "batch", "--seconds", "600"].map(Into::into);
    let program = std::iter::once(binary().into_os_string()).chain(program);
    Process::start(&mut node.on_device(program))
}

/// The shortest timeslice gets nothing done between two of the driver's.
#[test]
fn batch_tenant_progresses_beside_a_foreign_process_and_a_latency_tenant() {
    let node = Node::start();
    let _latency = Process::start(&mut node.tenant(
        "--class latency --name web",
        "gpumux workload idle --seconds 600",
    ));
    let mut batch = Process::start(&mut node.tenant("--class batch --name night", TICKS));
    batch.wait_lines(2);
    let _foreign = foreign(&node);
    node.wait_tenant("night", |it| {
        it["domains"][0]["timeslice_us"].as_u64() == Some(2000)
    });
    let lines = batch.lines();
    batch.wait_lines(lines + 5);
}

#[test]
fn program_without_the_library_is_shown_as_foreign() {
    let node = Node::start();
    let foreign = foreign(&node);
    let _own = Process::start(&mut node.tenant("--name own", TICKS));
    let found = wait_for("the foreign process", PATIENCE, || {
        let listing = listing(&node);
        let devices = listing["foreign"].as_object()?.clone();
        let all: Vec<Value> = (devices.values())
            .flat_map(|it| it.as_array().unwrap().clone())
            .collect();
        (!all.is_empty()).then_some(all)
    });
    let pids: Vec<u64> = found.iter().map(|it| it["pid"].as_u64().unwrap()).collect();
    assert_eq!(pids, [u64::from(foreign.pid())], "{found:?}");
    let shown = node.gpumux(["ps"]).run().ok().out;
    let line = format!("without gpumux: gpumux (pid {}", foreign.pid());
    assert!(shown.contains(&line), "{shown}");
    foreign.kill();
    wait_for("its end", PATIENCE, || {
        let listing = listing(&node);
        listing["foreign"].as_object()?.is_empty().then_some(())
    });
}
