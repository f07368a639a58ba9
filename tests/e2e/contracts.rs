//! What scripts rely on: the JSON of `ps`, `set`, `doctor` and `demo`, the API's document, and the help.

use std::process::Command;

use gpumux_tests::{Node, Options, Process, Run, binary, real};
use serde_json::Value;

use crate::TICKS;

/// `gpumux set ARGS… --json`.
#[track_caller]
pub(crate) fn set(node: &Node, args: &str) -> Value {
    let line = ["set", "--json"].into_iter().chain(args.split(' '));
    node.gpumux(line).run().ok().json()
}

/// All names in one JSON object.
fn keys(value: &Value) -> Vec<&str> {
    value
        .as_object()
        .map(|object| object.keys().map(String::as_str).collect())
        .unwrap_or_default()
}

#[test]
fn ps_lists_living_tenants() {
    let node = Node::start();
    assert_eq!(node.ps()["tenants"], Value::Array(Vec::new()));
    let _tenant = Process::start(&mut node.tenant("--name a --class batch --weight 2", TICKS));
    let tenant = node.wait_tenant("a", |tenant| !tenant["domains"][0].is_null());
    assert_eq!(tenant["class"], "batch");
    assert_eq!(tenant["spec"]["weight"], 2.0);
    assert_eq!(tenant["pids"].as_array().map(Vec::len), Some(1));
    let device = tenant["devices"][0].as_str().unwrap();
    assert!(device.starts_with("GPU-"), "{device}");
    assert!(tenant["since"].as_u64() > Some(1_600_000_000));
    let domain = &tenant["domains"][0];
    assert!(
        domain["timeslice_us"].is_u64() && domain["frozen"].is_boolean(),
        "{domain:#}"
    );
    let table = node.gpumux(["ps"]).run().ok();
    let mut lines = table.out.lines();
    assert!(lines.next().unwrap().starts_with("NAME"), "{table:#?}");
    assert!(lines.next().unwrap().starts_with("a "), "{table:#?}");
}

#[test]
fn commands_without_a_daemon_say_what_to_do() {
    let node = Node::with(Options {
        without_daemon: true,
        ..Options::default()
    });
    for line in [
        &["ps"][..],
        &["ps", "--json"],
        &["set", "a", "--class", "batch"],
    ] {
        let finished = node.gpumux(line).run();
        assert_eq!(
            (finished.code(), finished.out.as_str()),
            (1, ""),
            "{finished:#?}"
        );
        assert_eq!(finished.err.lines().count(), 1, "{finished:#?}");
        assert!(
            finished.err.contains("gpumux daemon") || finished.err.contains("gpumux run"),
            "{finished:#?}"
        );
    }
}

#[test]
fn set_changes_what_is_named_and_refuses_nonsense() {
    let node = Node::start();
    let _a = Process::start(&mut node.tenant("--name a --class batch --weight 2", TICKS));
    let _b = Process::start(&mut node.tenant("--name b --guaranteed 0.6", TICKS));
    node.wait_tenant("a", |tenant| !tenant["domains"][0].is_null());
    node.wait_tenant("b", |tenant| !tenant["domains"][0].is_null());
    let a = set(&node, "a --guaranteed 0.25 --limit 0.5");
    assert_eq!(a["class"], "batch");
    assert_eq!(a["spec"]["guaranteed"], 0.25);
    assert_eq!(a["spec"]["limit"], 0.5);
    assert_eq!(a["spec"]["weight"], 2.0);
    let before = node.find_tenant("a").unwrap()["spec"].clone();
    for (args, code, word) in [
        ("a --guaranteed 0.45", 1, "b (60%)"),
        ("a --weight -1", 2, "-1"),
        ("a --limit 2", 2, "2"),
        ("a --limit 0.1", 1, "0.1"),
        ("nobody --class batch", 1, "nobody"),
    ] {
        let line = ["set"].into_iter().chain(args.split(' '));
        let refused = node.gpumux(line).run();
        assert_eq!(refused.code(), code, "{args}: {refused:#?}");
        assert!(refused.err.contains(word), "{args}: {refused:#?}");
    }
    assert_eq!(
        node.gpumux(["set", "a"]).run().code(),
        2,
        "nothing to change"
    );
    assert_eq!(node.find_tenant("a").unwrap()["spec"], before);
}

#[test]
fn doctor_tries_every_control_on_every_device() {
    let devices = if real() { 0 } else { 2 };
    let node = Node::with(Options {
        devices,
        ..Options::default()
    });
    let doctor = node
        .on_device([binary().into_os_string(), "doctor".into(), "--json".into()])
        .run()
        .ok();
    assert_eq!(doctor.err, "");
    let report = doctor.json();
    let devices = report["devices"].as_array().unwrap();
    assert!(!devices.is_empty());
    assert!(real() || devices.len() == 2, "{report:#}");
    for device in devices {
        assert_eq!(device["emulated"], !real());
        assert!(
            device["uuid"]
                .as_str()
                .is_some_and(|uuid| uuid.starts_with("GPU-")),
            "{device:#}"
        );
        // The record says what this device shows.
        let evidence = &device["evidence"];
        if real() {
            assert_ne!(*evidence, "unknown", "{device:#}");
        } else {
            assert_eq!(*evidence, Value::Null);
        }
        let controls = device["controls"].as_array().unwrap();
        for name in ["timeslice", "freeze", "thaw", "preemption mode"] {
            let control = controls
                .iter()
                .find(|control| control["name"] == name)
                .unwrap();
            assert_eq!(control["works"], true, "{control:#}");
            assert!(
                control["reason"]
                    .as_str()
                    .is_some_and(|reason| !reason.is_empty()),
                "{control:#}"
            );
        }
        // Of the one that runs here, and so of the emulated one: RM counts.
        let twice = "frozen twice, it is thawed twice";
        assert!(device["controls"].to_string().contains(twice), "{device:#}");
    }
    let module = report["driver"]["module"].as_str().unwrap();
    assert!(
        if real() {
            module == "open"
        } else {
            module == "emulated"
        },
        "{module}"
    );
    // It leaves no tenant behind, and the daemon has no record of it.
    assert_eq!(node.ps()["tenants"], Value::Array(Vec::new()));
}

#[test]
fn doctor_without_a_device_says_so() {
    if real() {
        eprintln!("SKIPPED: it needs the emulated device");
        return;
    }
    let node = Node::with(Options {
        without_daemon: true,
        ..Options::default()
    });
    let mut doctor = Command::new(binary());
    doctor
        .args(["doctor", "--json"])
        .env("GPUMUX_RUNTIME_DIR", node.dir());
    let doctor = doctor
        .env("CUDA_VISIBLE_DEVICES", "")
        .env_remove("GPUMUX_EMU_SOCKET")
        .run();
    assert_eq!(doctor.code(), 1, "{doctor:#?}");
    let report = doctor.json();
    assert_eq!(report["devices"], Value::Array(Vec::new()));
}

#[test]
fn demo_shows_what_gpumux_does() {
    let node = Node::with(Options {
        without_daemon: true,
        ..Options::default()
    });
    let mut demo = node.gpumux(["demo", "--seconds", "10", "--json"]);
    // Its own device, as a user has it.
    demo.env_remove("GPUMUX_EMU_SOCKET")
        .env_remove("GPUMUX_RUNTIME_DIR");
    let report = demo.run().ok().json();
    assert_eq!(keys(&report), ["device", "rows"]);
    assert_eq!(report["device"]["emulated"], !real());
    assert!(
        report["device"]["name"]
            .as_str()
            .is_some_and(|name| !name.is_empty())
    );
    let rows = report["rows"].as_array().unwrap();
    let modes: Vec<_> = rows
        .iter()
        .map(|row| row["mode"].as_str().unwrap())
        .collect();
    assert_eq!(modes, ["alone", "time-slicing", "gpumux"]);
    let value = |row: usize, name: &str| rows[row][name].as_f64().unwrap();
    for row in 0..3 {
        assert!(value(row, "latency_p50_us") > 0.0);
        assert!(value(row, "latency_p99_us") >= value(row, "latency_p50_us"));
        assert!(value(row, "batch_rate") > 0.0 && value(row, "batch_rate_alone") > 0.0);
    }
    let p50 = |row| value(row, "latency_p50_us");
    assert!(p50(2) < p50(1), "better than time slicing: {report:#}");
}

#[test]
fn the_api_describes_itself() {
    let node = Node::start();
    let document = node.get("/openapi.json");
    assert!(
        document["openapi"]
            .as_str()
            .is_some_and(|version| version.starts_with("3."))
    );
    assert!(!keys(&document["paths"]).is_empty());
}

#[test]
fn sim_predicts_the_same_every_time_and_names_what_is_wrong() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let sim = |path: &std::path::Path, more: &[&str]| {
        Command::new(binary()).arg("sim").arg(path).args(more).run()
    };
    let tenant = |name: &str, class: &str, guaranteed: &str| {
        format!(
            "[[tenant]]\nname = \"{name}\"\nclass = \"{class}\"\nguaranteed = {guaranteed}\n\
             arrival = {{ kind = \"poisson\", rate = 50 }}\n\
             work = {{ kind = \"kernels\", kernel_us = 10_000 }}\n"
        )
    };
    let pair = |guaranteed| {
        let (a, b) = (
            tenant("a", "latency", guaranteed),
            tenant("b", "batch", "0.5"),
        );
        format!("name = \"pair\"\nseconds = 5\nseed = 3\n{a}{b}")
    };
    let good = file("good.toml", &pair("0.5"));
    let trace = dir.path().join("trace.json");
    let first = sim(&good, &["--json", "--trace", trace.to_str().unwrap()]).ok();
    assert_eq!(first.out, sim(&good, &["--json"]).ok().out);
    assert_ne!(first.out, sim(&good, &["--json", "--seed", "4"]).ok().out);
    let modes = first.json()["modes"].as_array().unwrap().clone();
    let gpumux = modes.iter().find(|mode| mode["mode"] == "gpumux").unwrap();
    assert!(
        gpumux["tenants"][0]["received"].as_f64() > Some(0.3),
        "{gpumux:#}"
    );
    let trace: Value = serde_json::from_str(&std::fs::read_to_string(trace).unwrap()).unwrap();
    assert!(trace.is_array() || trace["traceEvents"].is_array());
    for (name, text, word) in [
        ("over.toml", pair("0.6"), "60%"),
        (
            "class.toml",
            pair("0.5").replace("latency", "urgent"),
            "urgent",
        ),
        ("field.toml", pair("0.5").replace("seed", "sead"), "sead"),
    ] {
        let refused = sim(&file(name, &text), &[]);
        assert_eq!(refused.code(), 1, "{refused:#?}");
        assert!(refused.err.contains(word), "{refused:#?}");
    }
    let missing = sim(&dir.path().join("missing.toml"), &[]);
    assert!(missing.err.contains("missing.toml"), "{missing:#?}");
}

#[test]
fn every_command_has_help_with_examples() {
    let help = |line: &[&str]| Command::new(binary()).args(line).run().ok().out;
    assert!(help(&["--help"]).contains("Examples:"));
    for command in [
        "run",
        "ps",
        "set",
        "doctor",
        "demo",
        "daemon",
        "emu",
        "sim",
        "workload",
        "completions",
        "man",
    ] {
        let text = help(&[command, "--help"]);
        assert!(
            text.to_lowercase().contains("examples:"),
            "{command}: {text}"
        );
    }
    assert!(help(&["completions", "bash"]).contains("_gpumux"));
    let dir = tempfile::tempdir().unwrap();
    help(&["man", dir.path().to_str().unwrap()]);
    let run = std::fs::read_to_string(dir.path().join("gpumux-run.1")).unwrap();
    assert!(run.contains("tenant"));
}
