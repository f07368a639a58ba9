//! What happens when a part dies, or is not what the others expect.

use std::{
    fs,
    path::Path,
    time::{Duration, Instant},
};

use gpumux_tests::{
    Finished, Listener, Node, Options, PATIENCE, Process, Run, real, wait_for, wait_settled,
};
use gpumux_wire::{Daemon, PROTOCOL};
use rustix::process::Signal;
use serde_json::Value;

use crate::{REQUESTS, TICKS, a_second, at_once, is_well};

/// Memory that a tenant holds in these tests.
const HELD: u64 = 1 << 30;

fn free_memory(node: &Node) -> u64 {
    let mut probe = node.shimmed("gpumux scratch --memory", "/dev/null".as_ref());
    let probe = probe.env_remove("LD_PRELOAD").run().ok();
    probe.out.trim().parse().unwrap()
}

#[test]
fn killed_daemon_leaves_all_tenants_running() {
    let mut node = Node::start();
    let start = |name: &str| {
        let options = format!("--class batch --name {name}");
        Process::start(&mut node.tenant(&options, TICKS))
    };
    let mut tenants = [start("a"), start("b")];
    for tenant in &mut tenants {
        tenant.wait_lines(10);
    }
    let _serve = Process::start(&mut node.tenant("--class latency", REQUESTS));
    // They take turns, so at any moment one of them is frozen.
    let frozen = |tenant: &Value| tenant["domains"][0]["freezes"].as_u64() > Some(0);
    node.wait_tenant("a", frozen);
    node.wait_tenant("b", frozen);
    node.kill_daemon();
    let killed = Instant::now();
    let before = tenants.each_ref().map(Process::lines);
    for (tenant, before) in tenants.iter().zip(before) {
        let left = a_second().saturating_sub(killed.elapsed());
        wait_for("progress without a daemon", left, || {
            (tenant.lines() > before + 3).then_some(())
        });
    }
    for tenant in &mut tenants {
        assert!(tenant.poll().is_none(), "{}", tenant.err());
    }
}

#[test]
fn a_new_daemon_takes_the_tenants_over() {
    let mut node = Node::start();
    let mut serve =
        Process::start(&mut node.tenant("--class latency --name serve --weight 2", TICKS));
    let mut train = Process::start(&mut node.tenant("--class batch --name train", TICKS));
    serve.wait_lines(1);
    train.wait_lines(1);
    let slice = |tenant: &Value| tenant["domains"][0]["timeslice_us"].as_u64();
    let before = node.wait_tenant("serve", |tenant| slice(tenant) == Some(1_000_000));
    node.kill_daemon();
    node.start_daemon();
    let after = node.wait_tenant("serve", |tenant| slice(tenant) == Some(1_000_000));
    for field in ["name", "class", "spec", "pids", "devices", "since"] {
        assert_eq!(before[field], after[field], "{field}");
    }
    let train_after = node.wait_tenant("train", |tenant| slice(tenant) == Some(1));
    assert_eq!(train_after["class"], "batch");
    let lines = serve.lines();
    serve.wait_lines(lines + 3);
    // A new tenant joins as if nothing had been.
    let _new = Process::start(&mut node.tenant("--class batch --name new", TICKS));
    node.wait_tenant("new", |tenant| slice(tenant) == Some(1));
    assert!(serve.err().lines().count() <= 1, "{}", serve.err());
}

#[test]
fn a_daemon_that_ends_in_good_order_restores_what_it_found() {
    let mut node = Node::start();
    // The last one leaves the others next to nothing as long as there is a daemon.
    let mut tenants = Vec::new();
    for class in ["batch", "batch", "latency"] {
        let options = format!("--class {class}");
        tenants.push(Process::start(&mut node.tenant(&options, TICKS)));
        tenants.last_mut().expect("it was pushed").wait_lines(5);
    }
    node.stop_daemon().ok();
    for tenant in &mut tenants {
        let lines = tenant.lines();
        tenant.wait_lines(lines + 20);
    }
    assert!(!node.api_socket().exists() && !node.session_socket().exists());
}

#[test]
fn a_killed_tenants_memory_is_back_within_a_second() {
    let node = Node::start();
    let before = free_memory(&node);
    let program = format!("gpumux scratch --hold {HELD}");
    let mut tenant = Process::start(&mut node.tenant("--name victim --class batch", &program));
    tenant.wait_lines(1);
    node.wait_tenant("victim", |tenant| !tenant["domains"][0].is_null());
    assert!(
        free_memory(&node) + HELD <= before,
        "the tenant holds its memory"
    );
    tenant.signal(Signal::KILL);
    let killed = Instant::now();
    tenant.finish();
    let asked = wait_for("its memory", PATIENCE, || {
        let asked = killed.elapsed();
        (free_memory(&node) >= before - HELD / 16).then_some(asked)
    });
    assert!(asked < a_second(), "it took until {asked:?}");
    wait_for("the tenant's end", PATIENCE, || {
        node.find_tenant("victim").is_none().then_some(())
    });
}

#[test]
fn the_daemon_holds_no_file_of_a_tenant_that_is_gone() {
    let node = Node::start();
    let files = || {
        let mut files = node.daemon_files();
        // The numbers of sockets, pipes and the like tell nothing.
        files
            .iter_mut()
            .for_each(|file| file.truncate(file.find(":[").unwrap_or(file.len())));
        files.sort();
        files
    };
    // It closes a process's connection a moment after that process has ended.
    let a_while = Duration::from_millis(100);
    let before = wait_settled("no files come or go", PATIENCE, a_while, files);
    for signal in [Signal::TERM, Signal::KILL] {
        let mut tenant = Process::start(&mut node.tenant("--name gone", TICKS));
        tenant.wait_lines(1);
        node.wait_tenant("gone", |tenant| !tenant["domains"][0].is_null());
        let held = files();
        assert!(
            held.len() > before.len(),
            "the daemon holds the tenant's control file"
        );
        assert_eq!(
            real(),
            held.iter().any(|file| file == "/dev/nvidiactl"),
            "{held:?}"
        );
        tenant.signal(signal);
        tenant.finish();
        wait_for("the files to be closed", a_second(), || {
            (files() == before).then_some(())
        });
    }
}

#[test]
fn faulting_tenant_harms_no_other() {
    let node = Node::start();
    let mut other = Process::start(&mut node.tenant("--name other --class standard", TICKS));
    other.wait_lines(1);
    let fault = node
        .tenant(
            "--name fault --class batch",
            "gpumux workload fault --json --seconds 1",
        )
        .run();
    assert_ne!(fault.code(), 0, "{fault:#?}");
    let lines = other.lines();
    other.wait_lines(lines + 20);
    assert!(is_well(&node.find_tenant("other").unwrap()));
}

/// A program under the shim that finds no daemon it can work with.
fn alone(node: &Node, strict: bool, socket: &Path) -> Finished {
    // It works once it was warned.
    let dir = tempfile::tempdir().unwrap();
    let go = dir.path().join("go");
    let program = format!(
        "gpumux workload check --json --seconds 0.2 --start-file {}",
        go.display()
    );
    let mut command = node.shimmed(&program, socket);
    if strict {
        command.env("GPUMUX_STRICT", "1");
    }
    let mut program = Process::start(&mut command);
    wait_for("its end or its warning", PATIENCE, || {
        (program.poll().is_some() || !program.err().is_empty()).then_some(())
    });
    fs::write(&go, "").unwrap();
    program.finish()
}

#[track_caller]
fn runs_with_one_warning(finished: Finished) {
    let finished = finished.ok();
    assert_eq!(finished.json()["mismatches"], 0, "{finished:#?}");
    assert_eq!(finished.err.lines().count(), 1, "{finished:#?}");
    assert!(finished.err.contains("gpumux"), "{finished:#?}");
}

#[track_caller]
fn is_refused(finished: Finished) {
    assert_ne!(finished.code(), 0, "{finished:#?}");
    assert_eq!(finished.out, "", "{finished:#?}");
    assert!(finished.err.contains("gpumux"), "{finished:#?}");
}

#[track_caller]
fn is_as_asked(strict: bool, finished: Finished) {
    match strict {
        false => runs_with_one_warning(finished),
        true => is_refused(finished),
    }
}

#[track_caller]
fn warns_or_refuses(node: &Node, socket: &Path) {
    at_once([false, true], |strict| {
        is_as_asked(strict, alone(node, strict, socket));
    });
}

fn no_daemon() -> Node {
    Node::with(Options {
        without_daemon: true,
        ..Options::default()
    })
}

#[test]
fn without_a_daemon_programs_run_with_one_warning() {
    let node = no_daemon();
    warns_or_refuses(&node, &node.session_socket());
}

#[test]
fn with_a_wrong_socket_programs_run_with_one_warning() {
    let node = Node::start();
    // The API's socket: the daemon listens there, but not for sessions.
    let wrong = [node.api_socket(), "/dev/null".into(), node.dir().to_owned()];
    at_once(wrong, |wrong| warns_or_refuses(&node, &wrong));
}

/// A daemon of another version: it refuses, or welcomes in a protocol of its own.
#[test]
fn with_another_protocol_programs_run_with_one_warning() {
    let node = no_daemon();
    let other = PROTOCOL + 1;
    let answers = [
        Daemon::Refused {
            reason: format!("this daemon speaks protocol {other}"),
        },
        Daemon::Welcome {
            protocol: other,
            tenant: "x".into(),
            memory: false,
        },
    ];
    let both = answers
        .iter()
        .flat_map(|it| [false, true].map(|strict| (it, strict)));
    at_once(both.enumerate(), |(n, (answer, strict))| {
        let path = node.dir().join(format!("other{n}"));
        let listener = Listener::new(path.clone());
        let finished = std::thread::scope(|scope| {
            let program = scope.spawn(|| alone(&node, strict, &path));
            let _session = listener.accept(answer);
            program.join().unwrap()
        });
        is_as_asked(strict, finished);
    });
}

/// A daemon that accepts and then says nothing must not hold the program up.
#[test]
fn a_silent_daemon_is_not_waited_for() {
    let node = no_daemon();
    let path = node.dir().join("silent");
    let _listener = Listener::new(path.clone());
    let started = Instant::now();
    runs_with_one_warning(alone(&node, false, &path));
    assert!(started.elapsed() < PATIENCE, "{:?}", started.elapsed());
}

#[test]
fn daemon_finds_programs_that_started_without_it() {
    let mut node = Node::start();
    let mut tenant = node.tenant("--name late --class batch", "sh -c");
    let script = format!(
        "echo shell; read line; exec {} scratch",
        gpumux_tests::binary().display()
    );
    let mut tenant = Process::start(tenant.arg(script));
    tenant.wait_lines(1);
    node.kill_daemon();
    tenant.write("go\n");
    tenant.wait_lines(10);
    node.start_daemon();
    node.wait_tenant("late", |tenant| !tenant["domains"][0].is_null());
}
