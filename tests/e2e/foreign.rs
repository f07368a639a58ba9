//! Processes that use a device without gpumux: where they are shown, and what they take from what can be guaranteed.

use gpumux_tests::{Node, PATIENCE, Process, Run, binary, drawn, library, real, wait_for};
use serde_json::Value;

use crate::TICKS;

/// A program without the library.
fn foreign(node: &Node, args: &str) -> Process {
    let words = args.split_whitespace().map(Into::into);
    let program = std::iter::once(binary().into_os_string()).chain(words);
    Process::start(&mut node.on_device(program))
}

const IDLE: &str = "gpumux workload idle --seconds 600";
/// One that always has work.
const WORK: &str = "workload batch --seconds 600";

/// The foreign processes that `gpumux ps` lists on all devices.
fn listed(node: &Node) -> Vec<Value> {
    let listing = node.gpumux(["ps", "--json"]).run().ok().json();
    let devices = listing["foreign"].as_object().unwrap().values();
    devices
        .flat_map(|it| it.as_array().unwrap().clone())
        .collect()
}

/// Waits until these are the foreign processes and `accept` takes each.
#[track_caller]
fn wait_listed(node: &Node, pids: &[u32], accept: impl Fn(&Value) -> bool) -> Vec<Value> {
    wait_for("the foreign processes", PATIENCE, || {
        let all = listed(node);
        let found = all.iter().map(|it| it["pid"].as_u64());
        let same = found.eq(pids.iter().map(|pid| Some(u64::from(*pid))));
        (same && all.iter().all(&accept)).then_some(all)
    })
}

/// The value of a metric of the only device.
#[track_caller]
fn metric(node: &Node, name: &str) -> f64 {
    let (_, text) = node.request("GET", "/metrics", "").unwrap();
    let line = text.lines().find(|it| it.starts_with(&format!("{name}{{")));
    let value = line.and_then(|it| it.rsplit(' ').next()?.parse().ok());
    value.unwrap_or_else(|| panic!("{text}"))
}

/// The shortest timeslice gets nothing done between two of the driver's.
#[test]
fn batch_tenant_progresses_beside_a_foreign_process_and_a_latency_tenant() {
    let node = Node::start();
    let _latency = Process::start(&mut node.tenant("--class latency --name web", IDLE));
    let mut batch = Process::start(&mut node.tenant("--class batch --name night", TICKS));
    batch.wait_lines(2);
    let _foreign = foreign(&node, WORK);
    node.wait_tenant("night", |it| {
        it["domains"][0]["timeslice_us"].as_u64() == Some(2000)
    });
    let lines = batch.lines();
    batch.wait_lines(lines + 5);
}

#[test]
fn program_without_the_library_is_shown_and_counted() {
    let node = Node::with_memory(1 << 30);
    let _own = Process::start(&mut node.tenant("--name own", IDLE));
    let tenant = node.wait_tenant("own", |it| !it["domains"][0].is_null());
    let guarantee = |options: &str| node.tenant(options, "true").run();
    let free = || -> u64 {
        let memory = node.gpumux(["memory", "--json"]).run().ok().json();
        memory["devices"][0]["free"].as_u64().unwrap()
    };
    let before = free();
    let part = before / 2;
    let memory = format!("--memory-guaranteed {}", before - part / 4);
    guarantee("--guaranteed 70%").ok();
    guarantee(&memory).ok();
    let foreign = foreign(&node, &format!("{WORK} --memory {part}"));
    let pid = foreign.pid();
    let all = wait_listed(&node, &[pid], |it| {
        it["used_share"].as_f64() > Some(0.6) && it["memory_bytes"].as_u64() > Some(part)
    });
    assert_eq!(all[0]["name"], "gpumux", "{all:?}");
    assert_eq!(all[0]["tenant"], Value::Null, "{all:?}");
    let name = format!("gpumux (pid {pid}");
    let shown = node.gpumux(["ps"]).run().ok().out;
    assert!(
        shown.contains(&format!("without gpumux: {name}")),
        "{shown}"
    );
    let explained = node.gpumux(["explain", "own"]).run().ok().out;
    assert!(explained.contains(&name), "{explained}");
    let top = drawn(node.gpumux(["top"]), "q");
    assert!(top.contains("  1 foreign ("), "{top}");
    let gpus = drawn(node.gpumux(["top"]), "\tq");
    assert!(gpus.contains(&format!("foreign       {name}")), "{gpus}");
    assert_eq!(metric(&node, "gpumux_device_foreign_processes"), 1.0);
    assert!(metric(&node, "gpumux_device_foreign_used_ratio") > 0.3);
    assert!(metric(&node, "gpumux_device_foreign_memory_bytes") > part as f64);
    // What it uses cannot be guaranteed, nor its memory.
    let refused = guarantee("--guaranteed 70%");
    assert_eq!(refused.code(), 125, "{refused:#?}");
    let by = format!("used without gpumux by {name})");
    assert!(refused.err.contains(&by), "{refused:#?}");
    wait_for("its memory", PATIENCE, || {
        (free() + part / 2 < before).then_some(())
    });
    let refused = guarantee(&memory);
    assert_eq!(refused.code(), 125, "{refused:#?}");
    assert!(refused.err.contains(&by), "{refused:#?}");
    let device = tenant["domains"][0]["device"].as_str().unwrap();
    assert!(refused.err.contains(&device[..8]), "{refused:#?}");
    foreign.kill();
    wait_listed(&node, &[], |_| true);
    guarantee("--guaranteed 70%").ok();
    wait_for("its memory", PATIENCE, || {
        (free() + part / 4 > before).then_some(())
    });
    guarantee(&memory).ok();
    assert_eq!(metric(&node, "gpumux_device_foreign_processes"), 0.0);
}

/// A child of a tenant's program without the library in its environment.
#[test]
fn child_without_the_library_is_foreign_and_names_its_tenant() {
    let node = Node::start();
    // The emulated driver is preloaded, too.
    let driver = match real() {
        true => String::new(),
        false => library("libgpumux_emu.so").display().to_string(),
    };
    let script = format!(
        "{0} scratch & LD_PRELOAD={driver} exec {0} {WORK}",
        binary().display()
    );
    let mut command = node.tenant("--name job", "sh -c");
    let mut job = Process::start(command.arg(script));
    job.wait_lines(2);
    let tenant = node.wait_tenant("job", |it| !it["domains"][0].is_null());
    let all = wait_for("the foreign process", PATIENCE, || {
        let all = listed(&node);
        (!all.is_empty()).then_some(all)
    });
    assert_eq!(all.len(), 1, "{all:?}");
    let pid = all[0]["pid"].as_u64().unwrap();
    assert_ne!(tenant["domains"][0]["pid"].as_u64(), Some(pid));
    assert_eq!(all[0]["started_by"], "job", "{all:?}");
    let shown = node.gpumux(["ps"]).run().ok().out;
    let expected = format!("(pid {pid}, started by tenant job and not connected to the daemon");
    assert!(shown.contains(&expected), "{shown}");
    node.gpumux(["kill", "job"]).run().ok();
    wait_listed(&node, &[], |_| true);
}
