//! Programs that are scheduled at launch, because the driver refuses the controls.

use gpumux_tests::{Node, Options, PATIENCE, Process, Run, real, wait_for};
use rustix::process::Signal;
use serde_json::Value;

use crate::{REQUESTS, TICKS, gangs::sleep_in_a_collective, is_well, memory::python};

/// A node whose driver has no controls; on a real one, whose daemon uses none.
fn node() -> Node {
    let (profile, daemon) = match real() {
        true => ("", vec!["--mechanism".into(), "launches".into()]),
        false => ("controls = { own_process_only = true }", vec![]),
    };
    Node::with(Options {
        profile,
        daemon,
        ..Options::default()
    })
}

fn is_at_launch(tenant: &Value) -> bool {
    tenant["domains"][0]["mechanism"] == "launches"
}

fn held(node: &Node, name: &str) -> Option<u64> {
    node.find_tenant(name)?["domains"][0]["held_launches"].as_u64()
}

#[test]
fn refused_controls_are_replaced_and_explained() {
    let node = node();
    let mut serve = Process::start(&mut node.tenant("--name serve --class latency", REQUESTS));
    let mut train = Process::start(&mut node.tenant("--name train --class batch", TICKS));
    for name in ["serve", "train"] {
        node.wait_tenant(name, |it| is_at_launch(it) && is_well(it));
    }
    let explained = node.gpumux(["explain", "train"]).run().ok().out;
    let why = "Its launches are scheduled";
    assert!(explained.contains(why), "{explained}");
    assert!(explained.contains("not interrupted"), "{explained}");
    let listed = node.gpumux(["ps"]).run().ok().out;
    assert!(listed.contains("scheduled at launch"), "{listed}");
    let lines = train.lines();
    train.wait_lines(lines + 20);
    // Requests hold its launches, again and again.
    let before = held(&node, "train");
    wait_for("launches to be held", PATIENCE, || {
        (held(&node, "train") > before).then_some(())
    });
    assert!(serve.poll().is_none(), "{}", serve.err());
    assert_eq!(train.err().matches("unmanaged").count(), 0);
}

#[test]
fn batch_tenants_take_turns_at_launch() {
    let node = node();
    let _serve = Process::start(&mut node.tenant("--class latency", REQUESTS));
    let start = |_| Process::start(&mut node.tenant("--class batch", TICKS));
    let mut both: Vec<_> = (0..2).map(start).collect();
    for tenant in &mut both {
        tenant.wait_lines(1);
    }
    for tenant in &mut both {
        let lines = tenant.lines();
        tenant.wait_lines(lines + 50);
    }
}

/// Two programs that do the same work from the same moment on, in kernels of 20 ms, which are longer than their timeslices.
#[test]
fn guarantees_divide_work_at_launch() {
    let node = node();
    let barrier = node.dir().join("barrier");
    let work = format!(
        "gpumux workload batch --json --iterations 800000 --seconds 4 --barrier 2:{}",
        barrier.display()
    );
    let start = |options| Process::start(&mut node.tenant(options, &work));
    let (much, little) = (
        start("--guaranteed 70%"),
        start("--guaranteed 10% --weight 0.5"),
    );
    let calls = |process: Process| process.finish().ok().json()["calls"].as_u64();
    let (much, little) = (calls(much), calls(little));
    assert!(little > Some(0) && much > little, "{much:?} and {little:?}");
}

#[test]
fn lost_daemon_lets_all_launch() {
    let mut node = node();
    let _serve = Process::start(&mut node.tenant("--name serve --class latency", REQUESTS));
    let mut train = Process::start(&mut node.tenant("--name train --class batch", TICKS));
    node.wait_tenant("train", is_at_launch);
    let before = held(&node, "train");
    wait_for("launches to be held", PATIENCE, || {
        (held(&node, "train") > before).then_some(())
    });
    // One that stands still renews no lease.
    node.daemon().signal(Signal::STOP);
    let lines = train.lines();
    train.wait_lines(lines + 50);
    node.kill_daemon();
    let lines = train.lines();
    train.wait_lines(lines + 50);
    node.start_daemon();
    node.wait_tenant("train", is_at_launch);
    let lines = train.lines();
    train.wait_lines(lines + 20);
}

#[test]
fn memory_moves_after_the_last_kernel() {
    let node = node();
    let work = "gpumux workload batch --iterations 20000 --memory 64MiB --seconds 600";
    let _train = Process::start(&mut node.tenant("--name train --class batch", work));
    node.wait_tenant("train", |it| {
        is_at_launch(it) && it["work"].as_u64() > Some(20)
    });
    node.gpumux(["sleep", "train"]).run().ok();
    let asleep = node.wait_tenant("train", |it| it["moves"]["outs"].as_u64() >= Some(1));
    assert!(
        asleep["moves"]["out_bytes"].as_u64() >= Some(64 << 20),
        "{asleep:#}"
    );
    node.gpumux(["wake", "train"]).run().ok();
    let work = |it: &Value| it["work"].as_u64();
    let woken = node.wait_tenant("train", |it| it["moves"]["backs"].as_u64() >= Some(1));
    node.wait_tenant("train", |it| work(it) > work(&woken));
}

/// The kernel of one cannot end before the other has launched, which it cannot once its gate is closed.
#[test]
fn ranks_that_wait_for_each_other_can_be_moved() {
    sleep_in_a_collective(&node(), |program, page| {
        format!("{program} {page} kernel 0 & {program} {page} kernel 1 & wait")
    });
}

/// Launches graphs once each. Prints a line when one was launched while another was not done.
const NEW_GRAPHS: &str = r#"
import time
use_device()
address, stream, size = ctypes.c_uint64(), ctypes.c_void_p(), ctypes.c_size_t(64 << 20)
call("cuMemAlloc_v2", ctypes.byref(address), size)
call("cuStreamCreate", ctypes.byref(stream), 1)
def new():
    graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
    call("cuStreamBeginCapture_v2", stream, 2)
    for _ in range(4): call("cuMemsetD8Async", address, ctypes.c_ubyte(1), size, stream)
    call("cuStreamEndCapture", stream, ctypes.byref(graph))
    call("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, ctypes.c_ulonglong(0))
    call("cuGraphDestroy", graph)
    return executable
events = [ctypes.c_void_p(), ctypes.c_void_p()]
for event in events: call("cuEventCreate", ctypes.byref(event), 2)
call("cuMemsetD8Async", address, ctypes.c_ubyte(1), size, stream)
call("cuStreamSynchronize", stream)
print("ready", flush=True)
input()
while True:
    graphs = [new() for _ in events]
    for graph, event in zip(graphs, events):
        call("cuGraphLaunch", graph, stream)
        call("cuEventRecord", event, stream)
    if cuda.cuEventQuery(events[0]) == 600: print("two", flush=True)
    call("cuStreamSynchronize", stream)
    for graph in graphs: call("cuGraphExecDestroy", graph)
"#;

/// None of them was measured. By their nodes two fit in the budget; of what is not known at all one is launched at a time.
#[test]
fn new_graphs_are_launched_by_their_nodes() {
    let node = node();
    let Some(program) = python(&node, NEW_GRAPHS) else {
        return;
    };
    let _serve = Process::start(&mut node.tenant("--name serve --class latency", REQUESTS));
    node.wait_tenant("serve", is_at_launch);
    let mut train = Process::start(&mut node.tenant("--name train --class batch", &program));
    train.wait_lines(1);
    node.wait_tenant("train", is_at_launch);
    train.write("\n");
    train.wait_lines(2);
}
