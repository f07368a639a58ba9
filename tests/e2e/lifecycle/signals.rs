//! Signals to programs, and programs that are stopped by one.

use super::*;

#[test]
fn stop_asks_first_and_then_kills() {
    let node = Node::start();
    let polite = "trap 'echo bye; exit 3' TERM; echo ready; while :; do sleep 0.01; done";
    let stubborn = "trap '' TERM; echo ready; while :; do sleep 0.01; done";
    for (name, script) in [("polite", polite), ("stubborn", stubborn)] {
        detached(&node, name, script).ok();
        wait_for("the script", PATIENCE, || {
            let logs = gpumux(&node, &format!("logs {name}")).run();
            logs.out.contains("ready").then_some(())
        });
    }
    let stopped = gpumux(&node, "stop polite").run().ok();
    assert_eq!(
        stopped.out,
        "polite: exit code 3 after SIGTERM on request\n"
    );
    assert_eq!(gpumux(&node, "logs polite").run().ok().out, "ready\nbye\n");
    let killed = gpumux(&node, "stop --time 0s stubborn --json")
        .run()
        .ok()
        .json();
    assert_eq!(killed[0]["exit"]["signal"], 9, "{killed:#}");
    assert!(node.find_tenant("stubborn").is_none());
    let missing = gpumux(&node, "stop polit").run();
    assert_eq!(missing.code(), 1, "{missing:?}");
}

#[test]
fn signal_reaches_the_program_of_a_tenant() {
    let node = Node::start();
    let mut tenant = node.tenant("--name shell", "env --default-signal sh -c");
    tenant.arg("trap 'echo usr1' USR1; echo ready; while :; do sleep 0.01; done");
    let mut tenant = Process::start(&mut tenant);
    tenant.wait_lines(1);
    let sent = gpumux(&node, "kill -s USR1 shell").run().ok();
    assert_eq!(sent.out, "shell: SIGUSR1 sent to 1 process\n");
    tenant.wait_lines(2);
    gpumux(&node, "kill shell --quiet").run().ok();
    assert_eq!(tenant.finish().code(), 137);
    let wrong = gpumux(&node, "kill -s DIE shell").run();
    assert_eq!(wrong.code(), 2, "{wrong:?}");
}

#[test]
fn stop_signal_stops_a_detached_program_itself() {
    let node = Node::start();
    let mut command = node.tenant("-d --name worker", TICKS);
    at_home(&node, &mut command);
    command.run().ok();
    let tenant = node.wait_tenant("worker", |it| it["domains"][0].is_object());
    let stat = format!("/proc/{}/stat", tenant["domains"][0]["pid"]);
    gpumux(&node, "kill -s STOP worker").run().ok();
    wait_for("the program to be stopped", PATIENCE, || {
        is_stopped(&stat).then_some(())
    });
    gpumux(&node, "kill -s CONT worker").run().ok();
    wait_for("the program to go on", PATIENCE, || {
        (!is_stopped(&stat)).then_some(())
    });
    gpumux(&node, "stop worker").run().ok();
}

#[test]
fn stopped_latency_tenant_leaves_the_gpu_to_others() {
    let node = Node::start();
    let start = |name: &str| {
        let load = "gpumux workload batch --seconds 600";
        Process::start(&mut node.tenant(&format!("--name {name} --class {name}"), load))
    };
    let first = start("latency");
    let _night = start("batch");
    let works = |name: &str| {
        node.wait_tenant(name, |it| {
            it["state"] == "running" || it["state"] == "queued"
        })
    };
    works("latency");
    works("batch");
    first.signal(Signal::STOP);
    node.wait_tenant("latency", |it| it["domains"][0]["demand"] == "idle");
    let stopped = node.wait_tenant("latency", |it| it["state"] == "stopped");
    assert_eq!(stopped["domains"][0]["stopped"], true, "{stopped:#}");
    let received = |it: &Value| it["domains"][0]["received_share"].as_f64().unwrap();
    node.wait_tenant("batch", |it| received(it) > 0.95);
    node.wait_tenant("latency", |it| received(it) < 0.005);
    let explain = |name: &str| gpumux(&node, &format!("explain {name}")).run().ok().out;
    let text = explain("latency");
    assert!(text.contains("is stopped (SIGSTOP"), "{text}");
    assert!(text.contains("gpumux kill -s CONT latency"), "{text}");
    let text = explain("batch");
    assert!(text.contains("latency 0% (latency, stopped)"), "{text}");
    assert!(!text.contains("--class standard"), "{text}");
    let refused = gpumux(&node, "sleep latency").run();
    assert_eq!(refused.code(), 1, "{refused:?}");
    assert!(refused.err.contains("is stopped (SIGSTOP"), "{refused:?}");
    gpumux(&node, "kill -s CONT latency").run().ok();
    works("latency");
}

/// Stopping a program whose memory is on the host is the way to keep it from the CPUs, too.
#[test]
fn sleeping_tenant_that_is_stopped_wakes_once_it_goes_on() {
    let node = Node::start();
    let load = "gpumux workload idle --memory 64MiB --seconds 600";
    let program = Process::start(&mut node.tenant("--name job", load));
    node.wait_tenant("job", |it| {
        it["memory"][0]["in_use"].as_u64() > Some(64 << 20)
    });
    gpumux(&node, "sleep job").run().ok();
    program.signal(Signal::STOP);
    gpumux(&node, "sleep job").run().ok();
    let refused = gpumux(&node, "wake job").run();
    assert!(
        refused.err.contains("gpumux kill -s CONT job"),
        "{refused:?}"
    );
    gpumux(&node, "kill -s CONT job").run().ok();
    gpumux(&node, "wake job").run().ok();
    node.wait_tenant("job", |it| it["asleep"] == false);
}

/// Whether a process is stopped by a signal, by its file of `/proc`.
fn is_stopped(stat: &str) -> bool {
    let stat = fs::read_to_string(stat).unwrap();
    stat.rsplit_once(") ")
        .is_some_and(|(_, rest)| rest.starts_with('T'))
}
