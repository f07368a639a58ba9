//! What the planners of a daemon are given and decide, in a file.

use std::time::Duration;

use gpumux_core::{
    broker::Command,
    controller::Call,
    recording::{Line, Replay},
};
use gpumux_tests::{Node, Process, Run, real};

#[test]
fn planners_decide_again_what_a_daemon_recorded() {
    if real() {
        eprintln!("SKIPPED: the device is too large to fill in a test");
        return;
    }
    let mut node = Node::with_memory(512 << 20);
    node.stop_daemon();
    let file = node.dir().join("recording.jsonl");
    node.configure(["--record".into(), file.display().to_string()]);
    node.start_daemon();
    // 60% of the device each. One is of a higher class, and works in bursts.
    let barrier = node.dir().join("barrier");
    let both = format!("--json --memory 307MiB --barrier 2:{}", barrier.display());
    let jobs = [
        ("sweep", "batch", "--seconds 2"),
        ("check", "standard", "--rounds 10000"),
    ];
    let jobs = jobs.map(|(kind, class, length)| {
        let run = format!("--name {kind} --class {class}");
        let job = format!("gpumux workload {kind} {both} {length}");
        Process::start(&mut node.tenant(&run, &job))
    });
    for job in jobs {
        job.finish_within(Duration::from_secs(120)).ok();
    }
    node.stop_daemon();
    let text = std::fs::read_to_string(&file).expect("it was recorded");
    let mut replay = Replay::default();
    let (mut moves, mut controls) = ((0, 0), 0);
    for (number, line) in text.lines().enumerate() {
        let line: Line = serde_json::from_str(line).expect("a line of a recording");
        let again = replay.again(&line).expect("its policy is known");
        assert_eq!(again, line, "line {}", number + 1);
        match &line {
            Line::Memory(_, _, commands) => {
                for command in commands {
                    moves.0 += u32::from(matches!(command, Command::Moved { out: true, .. }));
                    moves.1 += u32::from(matches!(command, Command::Moved { out: false, .. }));
                }
            }
            Line::Compute(_, call) => controls += u32::from(matches!(call, Call::Poll(Some(_)))),
            Line::Broker(_) => {}
        }
    }
    assert!(
        moves.0 > 0 && moves.1 > 0 && controls > 0,
        "{moves:?} and {controls}"
    );
    if let Some(to) = std::env::var_os("GPUMUX_TEST_RECORDING") {
        std::fs::copy(&file, to).expect("room");
    }
}

#[test]
fn file_that_cannot_be_made_keeps_the_daemon_from_starting() {
    let mut node = Node::start();
    node.stop_daemon();
    let file = node.dir().join("missing/recording.jsonl");
    let refused = node
        .gpumux(["daemon", "--record", &file.display().to_string()])
        .run();
    assert!(!refused.status.success());
    assert!(
        refused.err.contains("missing/recording.jsonl"),
        "{}",
        refused.err
    );
}
