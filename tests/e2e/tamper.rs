//! Programs that undo what the daemon sets: found by what they cannot forge, reported, and stopped where the configuration says so.

use std::fs;

use gpumux_tests::{Node, Options, PATIENCE, Process, Run, wait_for};
use serde_json::Value;

use crate::REQUESTS;

/// Kernels of 2 ms without a pause.
const BATCH: &str = "gpumux workload batch --json --kernel-us 2000 --seconds";

fn tampers(tenant: &Value) -> bool {
    tenant["state"] == "tampers"
}

/// A node whose daemon does this with processes that tamper.
fn node(then: &str) -> Node {
    let mut node = Node::with(Options {
        without_daemon: true,
        ..Options::default()
    });
    let file = node.dir().join("gpumux.toml");
    fs::write(&file, format!("[tampering]\nthen = '{then}'\n")).unwrap();
    node.configure(["--config".into(), file.display().to_string()]);
    node.start_daemon();
    node
}

/// The texts of the events of this kind.
fn events(node: &Node, kind: &str) -> Vec<String> {
    let events = node.gpumux(["events", "--past", "--json"]).run().ok();
    let events = events.out.lines().map(|line| {
        let event: Value = serde_json::from_str(line).unwrap();
        event
    });
    let texts = events.filter(|it| it["kind"] == kind);
    texts
        .map(|it| it["text"].as_str().unwrap_or_default().to_owned())
        .collect()
}

#[test]
fn tenant_that_raises_its_timeslice_is_reported_and_lowered() {
    let node = node("lower");
    let program = format!("{BATCH} 60 --tamper timeslice");
    let _thief = Process::start(
        &mut node.tenant("--name thief --class standard --guaranteed 70%", &program),
    );
    let _honest =
        Process::start(&mut node.tenant("--name honest --class batch", &format!("{BATCH} 60")));
    node.wait_tenant("thief", tampers);
    let thief = node.wait_tenant("thief", |it| it["tampering"]["lowered"] == true);
    let share = |it: &Value| it["domains"][0]["entitled_share"].as_f64();
    assert!(share(&thief) < Some(0.7), "{thief:#}");
    // Its settings stay as they were; what follows from them does not.
    assert_eq!(thief["class"], "standard", "{thief:#}");
    assert!(node.find_tenant("honest").unwrap()["tampering"].is_null());
    let told = events(&node, "tampered");
    assert!(
        told.iter().any(|it| it.contains("changed its timeslice"))
            && told.iter().any(|it| it.contains("class batch")),
        "{told:?}"
    );
    let explained = node.gpumux(["explain", "thief"]).run().ok().out;
    assert!(
        explained.contains("undoing what gpumux sets"),
        "{explained}"
    );
}

#[test]
fn process_that_raises_its_timeslice_is_ended_if_so_configured() {
    let node = node("end");
    let program = format!("{BATCH} 60 --tamper timeslice");
    let thief = Process::start(&mut node.tenant("--name thief --class batch", &program));
    let _honest =
        Process::start(&mut node.tenant("--name honest --class batch", &format!("{BATCH} 60")));
    let ended = thief.finish();
    assert_eq!(ended.code(), 128 + 9, "{ended:#?}");
    let told = events(&node, "tampered");
    assert!(told.iter().any(|it| it.contains("was ended")), "{told:?}");
    node.wait_tenant("honest", |it| it["state"] == "running");
}

#[test]
fn process_that_thaws_itself_is_found_by_the_time_it_used() {
    let node = node("report");
    let start = |name: &str, options: &str| {
        let tenant = format!("--name {name} --class batch");
        Process::start(&mut node.tenant(&tenant, &format!("{BATCH} 60 {options}")))
    };
    // Beside a latency tenant, those of class batch are frozen in turn.
    let _serve = Process::start(&mut node.tenant("--name serve --class latency", REQUESTS));
    let _honest = [start("one", ""), start("two", "")];
    let _thief = start("thief", "--tamper thaw,timeslice");
    node.wait_tenant("thief", tampers);
    wait_for("what the trace shows", PATIENCE, || {
        // The daemon answers with an error while a control of a slow device does not return.
        let trace = node.gpumux(["trace", "--seconds", "30"]).run().out;
        trace.contains("it ran while it was frozen").then_some(())
    });
    for name in ["serve", "one", "two"] {
        let honest = node.find_tenant(name).unwrap();
        assert!(honest["tampering"].is_null(), "{honest:#}");
    }
}
