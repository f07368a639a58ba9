//! What an operator sees: explanations, traces, metrics, and the web page in a real browser.

mod page;

use std::{fs, process::Command};

use gpumux_tests::{Node, Options, PATIENCE, Process, Run, binary, wait_for};
use rustix::process::Signal;
use serde_json::Value;

use crate::REQUESTS;

/// A node with a latency and a batch tenant that run.
pub(crate) fn busy() -> (Node, [Process; 2]) {
    let node = Node::with(Options {
        daemon: ["--listen", "127.0.0.1:0"].map(Into::into).into(),
        ..Options::default()
    });
    let start = |name: &str, class: &str, program: &str| {
        let options = format!("--name {name} --class {class}");
        Process::start(&mut node.tenant(&options, program))
    };
    let processes = [
        start("web", "latency", REQUESTS),
        // Few kernels, so that it is not the machine that is busy.
        start(
            "night",
            "batch",
            "gpumux workload batch --kernel-us 50000 --seconds 600",
        ),
    ];
    for name in ["web", "night"] {
        node.wait_tenant(name, |tenant| {
            tenant["domains"]
                .as_array()
                .is_some_and(|domains| !domains.is_empty())
        });
    }
    (node, processes)
}

#[test]
fn a_tenant_is_explained_and_traced() {
    let (node, _processes) = busy();
    let text = node.gpumux(["explain", "night"]).run().ok().out;
    assert!(
        text.starts_with("entitled: a batch tenant") && text.contains(" (latency, "),
        "{text}"
    );
    let file = node.dir().join("out.json");
    // Its next request is on its way.
    wait_for("a request in the trace", PATIENCE, || {
        node.gpumux(["trace", "--seconds", "60", "-o"])
            .arg(&file)
            .run()
            .ok();
        let trace: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
        let mut events = trace["traceEvents"].as_array().unwrap().iter();
        events
            .any(|e| e["args"]["reason"] == "takes the device at once")
            .then_some(())
    });
    let top = node.gpumux(["top"]).run();
    assert!(
        top.code() == 1 && top.err.contains("needs a terminal"),
        "{top:?}"
    );
}

#[test]
fn device_readings_and_history_follow_the_work() {
    let node = Node::start();
    let job = Process::start(&mut node.tenant("--name job", "gpumux workload batch --seconds 600"));
    let device = wait_for("a used, warm device", PATIENCE, || {
        let device = node.get("/v1/devices")[0].clone();
        let warm = device["readings"]["temperature_c"].as_u64()? > 40;
        let used = device["readings"]["utilization"].as_f64()? > 0.5;
        (warm && used).then_some(device)
    });
    assert_eq!(device["index"], 0);
    assert!(
        device["readings"]["power_limit_w"].as_f64() > Some(100.0),
        "{device}"
    );
    let last = |values: &Value| values.as_array()?.last()?.as_f64();
    wait_for("the same in the history", PATIENCE, || {
        let history = node.get("/v1/history");
        let received = last(&history["tenants"][0]["received"])?;
        let power = last(&history["devices"][0]["power_w"])?;
        (received > 0.5 && power > 100.0).then_some(())
    });
    job.kill();
    // What it had is still there, by the second and by ten seconds.
    for span in ["5m", "1h"] {
        let ended = wait_for("an ended tenant", PATIENCE, || {
            let tenant = node.get(&format!("/v1/history?span={span}"))["tenants"][0].clone();
            tenant["ended_s_ago"].is_u64().then_some(tenant)
        });
        assert_eq!(ended["name"], "job");
        let had = ended["received"]
            .as_array()
            .unwrap()
            .iter()
            .filter_map(Value::as_f64);
        assert!(had.sum::<f64>() > 0.5, "{ended}");
    }
}

#[test]
fn the_accounts_are_what_the_driver_measures() {
    let node = Node::start();
    let _tenants = [("large", 0.7), ("small", 0.3)].map(|(name, guaranteed)| {
        let options = format!("--name {name} --class standard --guaranteed {guaranteed}");
        // So long that a slow machine doesn't let the device wait for the next.
        let program = "gpumux workload batch --kernel-us 20000 --seconds 600";
        Process::start(&mut node.tenant(&options, program))
    });
    wait_for("the same shares from both", PATIENCE * 2, || {
        let shares = ["large", "small"].map(|name| {
            let tenant = node.find_tenant(name)?;
            let share = |what: &str| tenant["domains"][0][what].as_f64();
            Some((share("received_share")?, share("measured_share")?))
        });
        let [large, small] = [shares[0]?, shares[1]?];
        let alike = |(received, measured): (f64, f64)| (received - measured).abs() < 0.15;
        (alike(large) && alike(small) && large.1 > 1.5 * small.1).then_some(())
    });
}

#[test]
fn doctor_and_demo_disturb_no_tenant() {
    let (node, mut processes) = busy();
    let gpumux = binary();
    let on_device = |command: &str| node.on_device([gpumux.as_os_str(), command.as_ref()]).run();
    for _ in 0..3 {
        on_device("doctor").ok();
        // The next client is served.
        let load = "gpumux workload batch --seconds 0.2";
        node.tenant("--name first --class standard", load)
            .run()
            .ok();
    }
    // A daemon of its own, beside this one's tenants, would bring the device to a stop.
    let demo = on_device("demo");
    assert!(demo.code() == 1, "{demo:?}");
    assert!(demo.err.contains("has the GPU"), "{demo:?}");
    let received = |tenant: &Value| tenant["domains"][0]["received_us"].as_u64().unwrap();
    let before = received(&node.find_tenant("night").unwrap());
    node.wait_tenant("night", |tenant| received(tenant) > before + 100_000);
    for process in &mut processes {
        assert!(process.poll().is_none(), "{}", process.err());
    }
}

#[test]
fn progress_that_a_program_reports_is_shown() {
    const PROGRAM: &str = r#"
import sys
sys.path.insert(0, sys.argv[1])
import gpumux
print("begins", flush=True)
sys.stdin.readline()
use_device()
for tokens in (40, 0, -3):
    gpumux.progress(tokens)
print("reported", flush=True)
sys.stdin.readline()
gpumux.progress(2)
sys.stdin.readline()
"#;
    let node = Node::start();
    let Some(program) = crate::memory::python(&node, PROGRAM) else {
        return;
    };
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../python");
    let words = format!("{program} {folder}");
    let mut serve = Process::start(&mut node.tenant("--name serve", &words));
    serve.wait_lines(1);
    // It reports before its session begins.
    node.daemon().signal(Signal::STOP);
    serve.write("\n");
    serve.wait_lines(2);
    node.daemon().signal(Signal::CONT);
    node.wait_tenant("serve", |it| it["progress"] == 40);
    serve.write("\n");
    node.wait_tenant("serve", |it| it["progress"] == 42);
}
