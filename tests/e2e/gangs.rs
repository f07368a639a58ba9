//! Tenants on several devices: their domains run and freeze together.

use std::fs;

use gpumux_tests::{Node, PATIENCE, Process, Run, binary, wait_for};
use serde_json::Value;

use crate::{TICKS, memory::python};

/// Starts a batch tenant that always has work on these devices, in a process for each.
fn batch(node: &Node, name: &str, devices: &[usize]) -> Process {
    let mut tenant = node.tenant(&format!("--name {name} --class batch"), "sh -c");
    let each = devices.iter().map(|device| {
        let gpumux = binary();
        format!(
            "{} workload batch --device {device} --kernel-us 2000 --seconds 600",
            gpumux.display()
        )
    });
    Process::start(tenant.arg(each.collect::<Vec<_>>().join(" & ")))
}

/// The time in µs for which a tenant could run in the last seconds: on each of two devices, and on both together.
fn enabled(node: &Node, name: &str) -> ([f64; 2], f64) {
    let file = node.dir().join("trace.json");
    let mut command = node.gpumux(["trace", "--seconds", "10", "-o"]);
    command.arg(&file).run().ok();
    let trace: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let named = |event: &&Value| {
        let thread = event["args"]["name"].as_str();
        thread.is_some_and(|it| it.starts_with(&format!("{name} (")))
    };
    let own: Vec<&Value> = events.iter().filter(named).collect();
    let mine = |event: &&Value| own.iter().any(|it| it["tid"] == event["tid"]);
    let spans = events.iter().filter(|it| it["cat"] == "state").filter(mine);
    let spans = spans.filter(|it| it["name"] == "may run");
    let mut times: [Vec<(f64, f64)>; 2] = Default::default();
    for it in spans {
        let from = it["ts"].as_f64().unwrap();
        let device = it["pid"].as_u64().unwrap() as usize;
        times[device].push((from, from + it["dur"].as_f64().unwrap()));
    }
    let [first, second] = &times;
    let pairs = (first.iter()).flat_map(|a| second.iter().map(move |b| (a, b)));
    let both = pairs.map(|(a, b)| (a.1.min(b.1) - a.0.max(b.0)).max(0.0));
    let both = both.sum();
    (
        times.map(|all| all.iter().map(|it| it.1 - it.0).sum()),
        both,
    )
}

/// Waits until a tenant could run for seconds in which others could not, nearly always on both devices at once.
fn wait_together(node: &Node, name: &str) {
    let mut last = ([0.0; 2], 0.0);
    wait_for("both devices together", 3 * PATIENCE, || {
        last = enabled(node, name);
        let ([first, second], both) = last;
        // The first seconds, before all were there, are forgotten in the end. Without gangs, turns of equal parts would meet half of the time.
        (first.min(second) > 2e6 && both > 0.8 * first.max(second)).then_some(())
    });
    eprintln!("{name} could run on each device and on both for µs: {last:?}");
}

fn share(node: &Node, name: &str) -> Vec<f64> {
    let tenant = node.find_tenant(name).expect("it runs");
    let domains = tenant["domains"].as_array().unwrap();
    let received = |it: &Value| it["received_share"].as_f64().unwrap();
    domains.iter().map(received).collect()
}

#[test]
fn a_tenant_on_two_devices_has_a_domain_on_each() {
    let Some(node) = Node::with_two_devices() else {
        return;
    };
    let _wide = batch(&node, "wide", &[0, 1]);
    let found = node.wait_tenant("wide", |tenant| {
        tenant["domains"].as_array().map(Vec::len) == Some(2)
    });
    assert_eq!(
        found["devices"].as_array().map(Vec::len),
        Some(2),
        "{found:#}"
    );
    assert_ne!(found["domains"][0]["device"], found["domains"][1]["device"]);
    // Each device has a latency tenant of its own, and the wide tenant goes behind both.
    let serve = |name: &str, device: u32| {
        let options = format!("--class latency --name {name}");
        Process::start(&mut node.tenant(&options, &format!("{TICKS} --device {device}")))
    };
    let _serve = [serve("left", 0), serve("right", 1)];
    node.wait_tenant("wide", |tenant| {
        let mut domains = tenant["domains"].as_array().into_iter().flatten();
        domains.all(|domain| domain["timeslice_us"] == 1 || domain["frozen"] == true)
    });
}

#[test]
fn gangs_take_turns_as_a_whole() {
    let Some(node) = Node::with_two_devices() else {
        return;
    };
    let _gangs = ["one", "two"].map(|name| batch(&node, name, &[0, 1]));
    for name in ["one", "two"] {
        wait_together(&node, name);
    }
    wait_for("equal parts of both devices", PATIENCE, || {
        let all = ["one", "two"].map(|name| share(&node, name)).concat();
        (all.len() == 4 && all.iter().all(|it| (0.4..0.6).contains(it))).then_some(())
    });
}

#[test]
fn a_gang_and_its_neighbours_on_single_devices_share() {
    let Some(node) = Node::with_two_devices() else {
        return;
    };
    let gang = batch(&node, "gang", &[0, 1]);
    let _singles = [("left", 0), ("right", 1)].map(|(name, device)| batch(&node, name, &[device]));
    wait_together(&node, "gang");
    wait_for("equal parts of both devices", PATIENCE, || {
        let all = ["gang", "left", "right"].map(|name| share(&node, name));
        let all = all.concat();
        (all.len() == 4 && all.iter().all(|it| (0.4..0.6).contains(it))).then_some(())
    });
    // A tenant that stays has all of its device.
    gang.kill();
    wait_for("the devices for themselves", PATIENCE, || {
        let all = ["left", "right"].map(|name| share(&node, name)).concat();
        all.iter().all(|it| *it > 0.9).then_some(())
    });
}

/// Two ranks. Work of rank 0 waits for what rank 1 launches a second later, as collectives do, and has a copy or a kernel behind it.
const RANKS: &str = r#"
import mmap, os, sys, threading, time
page = mmap.mmap(os.open(sys.argv[1], os.O_RDWR), 3)
def rank(number):
    use_device()
    address, host, stream, size = ctypes.c_uint64(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_size_t(4 << 20)
    call("cuMemAlloc_v2", ctypes.byref(address), size)
    call("cuMemHostAlloc", ctypes.byref(host), size, 0)
    call("cuStreamCreate", ctypes.byref(stream), 1)
    def wait(_):
        while page[0] == 0: time.sleep(0.001)
    collective = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(wait)
    page[1 + number] = 1
    while 0 in page[1:]: time.sleep(0.001)
    time.sleep(number)
    if number == 0: call("cuLaunchHostFunc", stream, collective, None)
    if sys.argv[2] == "copy": call("cuMemcpyDtoHAsync_v2", host, address, size, stream)
    else: call("cuMemsetD8Async", address, ctypes.c_ubyte(1), size, stream)
    if number == 0: print("ahead", flush=True)
    else: page[0] = 1
    call("cuStreamSynchronize", stream)
    print("met", flush=True)
    time.sleep(600)
ranks = [threading.Thread(target=rank, args=(int(number),)) for number in sys.argv[3:]]
for it in ranks: it.start()
"#;

/// Puts a tenant of such ranks to sleep while rank 0 waits for rank 1, which has not launched its part yet.
pub(crate) fn sleep_in_a_collective(node: &Node, command: impl Fn(&str, &str) -> String) {
    let Some(program) = python(node, RANKS) else {
        return;
    };
    let page = node.dir().join("page");
    fs::write(&page, [0; 3]).unwrap();
    let command = command(&program, page.to_str().expect("a plain path"));
    let mut ranks = Process::start(node.tenant("--name ranks", "sh -c").arg(command));
    ranks.wait_lines(1);
    // Neither refused nor undone.
    node.gpumux(["sleep", "ranks"]).run().ok();
    ranks.wait_lines(3);
}

#[test]
fn sleep_between_the_launches_of_two_ranks_succeeds() {
    sleep_in_a_collective(&Node::start(), |program, page| {
        format!("{program} {page} copy 0 & {program} {page} copy 1 & wait")
    });
}

#[test]
fn sleep_between_the_launches_of_two_threads_succeeds() {
    sleep_in_a_collective(&Node::start(), |program, page| {
        format!("{program} {page} copy 0 1")
    });
}
