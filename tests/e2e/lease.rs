//! A daemon that is there and does nothing: the processes free themselves, and are managed again when it goes on.

use std::{
    io::{Read, Write},
    os::unix::net::UnixStream,
};

use gpumux_tests::{Node, PATIENCE, Process, Run, wait_for};
use rustix::process::Signal;
use serde_json::Value;

use crate::{REQUESTS, TICKS};

fn freezes(tenant: &Value) -> Option<u64> {
    tenant["domains"][0]["freezes"].as_u64()
}

#[test]
fn stopped_daemon_leaves_no_tenant_frozen_and_controls_again() {
    let node = Node::start();
    let _serve = Process::start(&mut node.tenant("--name serve --class latency", REQUESTS));
    let names = ["b0", "b1", "b2"];
    let start = |name: &&str| {
        Process::start(&mut node.tenant(&format!("--name {name} --class batch"), TICKS))
    };
    let batch: Vec<Process> = names.iter().map(start).collect();
    // They take turns: when the daemon stops, all but one of them are frozen.
    for name in names {
        node.wait_tenant(name, |tenant| freezes(tenant) > Some(2));
    }
    node.daemon().signal(Signal::STOP);
    let before: Vec<usize> = batch.iter().map(Process::lines).collect();
    for (process, before) in batch.iter().zip(before) {
        wait_for("a tenant of a stopped daemon to run", PATIENCE, || {
            (process.lines() > before + 50).then_some(())
        });
    }
    node.daemon().signal(Signal::CONT);
    for name in names {
        node.wait_tenant(name, |tenant| freezes(tenant) > Some(2));
    }
    node.wait_tenant("serve", |tenant| {
        tenant["domains"][0]["timeslice_us"] == 1_000_000
    });
    assert_eq!(expiries(&node), 4);
}

/// How often processes have freed themselves.
fn expiries(node: &Node) -> u64 {
    let mut api = UnixStream::connect(node.api_socket()).unwrap();
    api.write_all(b"GET /v1/status HTTP/1.0\r\nhost: gpumux\r\n\r\n")
        .unwrap();
    let mut answer = String::new();
    api.read_to_string(&mut answer).unwrap();
    let (_, body) = answer.split_once("\r\n\r\n").unwrap();
    let status: Value = serde_json::from_str(body).unwrap();
    status["scheduler"]["lease_expiries"].as_u64().unwrap()
}

#[test]
fn stopped_daemon_leaves_a_sleeping_tenant_frozen_until_its_memory_is_back() {
    let node = Node::start();
    // Until it is asked to end: however fast the device is, it is asleep before.
    let program = "gpumux workload memory --json --seed 5 --memory 48MiB --seconds 86400";
    let check = Process::start(&mut node.tenant("--name sleeper", program));
    node.wait_tenant("sleeper", |tenant| !tenant["domains"][0].is_null());
    wait_for("memory that is moved away", PATIENCE, || {
        node.gpumux(["sleep", "sleeper"]).run().ok();
        let moved = node.find_tenant("sleeper")?["memory"][0]["swapped"].as_u64() > Some(0);
        // It has allocated none yet.
        (!moved).then(|| node.gpumux(["wake", "sleeper"]).run().ok());
        moved.then_some(())
    });
    node.daemon().signal(Signal::STOP);
    check.signal(Signal::TERM);
    // It brings its memory back itself, and only then runs and ends: every element is as it should be.
    let report = check.finish().ok().json();
    assert_eq!(report["mismatches"], 0, "{report:#}");
    assert_eq!(report["sum_matches"], true, "{report:#}");
    assert_ne!(report["elements"], 0, "{report:#}");
    node.daemon().signal(Signal::CONT);
    wait_for("the end of its tenant", PATIENCE, || {
        node.find_tenant("sleeper").is_none().then_some(())
    });
}
