//! `--restart on-collateral`: a program that would be run again.

use super::*;

/// A program that `gpumux run` stays the parent of.
fn watched(node: &Node, options: &str, script: &str) -> Process {
    let line = format!("--trust team --restart on-collateral {options}");
    let mut tenant = node.tenant(&line, "sh -c");
    tenant.arg(script);
    // The parent of the tests may have had signals ignored.
    let mut command = Command::new("env");
    command.arg("--default-signal").arg(tenant.get_program());
    command.args(tenant.get_args());
    for (name, value) in tenant.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    Process::start(&mut command)
}

#[test]
fn signalled_program_is_not_run_again() {
    let node = Node::start();
    let script =
        "trap 'echo caught; exit 3' TERM INT HUP; echo ready; while :; do sleep 0.01; done";
    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        let mut process = watched(&node, "", script);
        process.wait_lines(1);
        process.signal(signal);
        let finished = process.finish();
        assert_eq!(finished.out, "ready\ncaught\n", "{signal:?}");
        assert_eq!(finished.code(), 3, "{signal:?}");
    }
    let script = "trap 'echo saved' USR1; trap 'echo told' USR2; trap 'echo ended; exit 3' QUIT; echo ready; while :; do sleep 0.01; done";
    let mut process = watched(&node, "", script);
    for (lines, signal) in [Signal::USR1, Signal::USR2, Signal::QUIT]
        .into_iter()
        .enumerate()
    {
        process.wait_lines(lines + 1);
        process.signal(signal);
    }
    let finished = process.finish();
    assert_eq!(finished.out, "ready\nsaved\ntold\nended\n");
    assert_eq!(finished.code(), 3);
}

#[test]
fn ignored_signals_stay_ignored_under_run_again() {
    let node = Node::start();
    let script = format!(
        "trap '' HUP; {} run --trust team --restart on-collateral -- sh -c 'kill -HUP $$; echo alive'",
        binary().display()
    );
    let finished = node.on_device(["sh", "-c", &script]).run().ok();
    assert_eq!(finished.out, "alive\n");
}

#[test]
fn program_under_run_again_does_not_outlive_its_supervisor() {
    let node = Node::start();
    let mut process = watched(&node, "", "echo $$; while :; do sleep 0.01; done");
    process.wait_lines(1);
    let program = format!("/proc/{}/cmdline", process.out().trim());
    // Nothing is left of one that has ended but was not waited for, nor,
    // for a moment, of one that becomes another program.
    let lives = || fs::read(&program).is_ok_and(|words| !words.is_empty());
    assert!(lives());
    process.signal(Signal::KILL);
    wait_for("the program's end", PATIENCE, || (!lives()).then_some(()));
}

#[test]
fn memory_is_kept_only_for_a_program_that_may_run_again() {
    let node = Node::start();
    let alone = node.tenant("--keep-memory --trust team", "true").run();
    assert_ne!(alone.code(), 0, "{alone:#?}");
    assert!(
        alone.err.contains("needs --restart on-collateral"),
        "{alone:#?}"
    );
    let says = |options: &str| {
        let options = format!("--restart on-collateral --keep-memory {options}");
        let ended = node.tenant(&options, "true").run().ok();
        ended.err.contains("keeps nothing")
    };
    assert!(says("--sharing time") && !says("--trust team"));
}
