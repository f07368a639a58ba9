//! Random programs that are moved meanwhile.

use super::*;
use proptest::{
    prelude::*,
    test_runner::{Config, TestCaseError, TestRunner},
};
use std::cell::Cell;

#[test]
fn random_programs_keep_every_byte_whenever_they_are_moved() {
    let node = Node::start();
    let names = ["p0", "p1", "p2"];
    let programs = [0, 1, 2].map(|seed| {
        let program = endless(seed, "24MiB");
        Process::start(&mut node.tenant(&format!("--name p{seed}"), &program))
    });
    let (mut left, mut moves) = (Patience::new(PATIENCE * 6), 0);
    while moves < MOVES {
        // They wake by themselves, with their next call.
        moves += names
            .map(|name| u32::from(sleeps(&node, name)))
            .iter()
            .sum::<u32>();
        assert!(left.lasts(), "only {moves} moves");
    }
    for program in programs {
        end_verified(program);
    }
}

/// A program of numbers (`gpumux workload memory --script`), which can be made shorter: each line is a step.
fn scripts() -> impl Strategy<Value = Vec<[u64; 6]>> {
    // Which buffer, what to do, and with which numbers.
    let step = (0..24u64, 0..12u64, any::<[u32; 4]>())
        .prop_map(|(at, what, [a, b, c, d])| [at, what, a.into(), b.into(), c.into(), d.into()]);
    proptest::collection::vec(step, 1..60)
}

/// Runs a program of numbers, which is moved whenever it pauses. How often it was.
fn run_script(node: &Node, steps: &[[u64; 6]]) -> Result<u32, TestCaseError> {
    let lines = steps
        .iter()
        .map(|step| step.map(|it| it.to_string()).join(" ") + "\n");
    let path = node.dir().join("script");
    std::fs::write(&path, lines.collect::<String>()).expect("room");
    let text = format!(
        "gpumux workload memory --json --memory 32MiB --mapped --script {}",
        path.display()
    );
    let mut program = Process::start(&mut node.tenant("--name script", &text));
    let (mut pauses, mut moves) = (0, 0);
    let mut left = Patience::new(PATIENCE * 2);
    while program.poll().is_none() {
        prop_assert!(left.lasts(), "it does not end");
        if program.lines() > pauses && !program.out().contains('{') {
            pauses += 1;
            moves += u32::from(sleeps(node, "script"));
            program.write("\n");
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    let finished = program.finish();
    let (out, err) = (&finished.out, &finished.err);
    let report = out
        .find('{')
        .and_then(|at| serde_json::from_str(&out[at..]).ok());
    let report: Value = report.unwrap_or_default();
    prop_assert!(finished.status.success(), "{out}{err}");
    prop_assert_eq!(&report["mismatches"], 0, "{:#}", report);
    prop_assert_eq!(&report["sum_matches"], true, "{:#}", report);
    wait_for("its end", PATIENCE, || {
        node.find_tenant("script").is_none().then_some(())
    });
    Ok(moves)
}

/// `PROPTEST_CASES=500` tries more programs; one that goes wrong is made as short as can be.
#[test]
fn whatever_a_program_does_between_moves_keeps_every_byte() {
    let node = Node::start();
    let cases = std::env::var("PROPTEST_CASES").ok();
    let mut runner = TestRunner::new(Config {
        cases: cases.map_or(6, |text| text.parse().expect("a number of cases")),
        max_shrink_iters: 200,
        failure_persistence: None,
        ..Config::default()
    });
    let moves = Cell::new(0);
    let run = runner.run(&scripts(), |steps| {
        moves.set(moves.get() + run_script(&node, &steps)?);
        Ok(())
    });
    if let Err(error) = run {
        panic!("{error}");
    }
    // A fixed one, so that it is known that some are moved: memory of both kinds, work on it, a pause, a look.
    let moved = [
        [0, 0, 2, 999_999, 1, 7],
        [0, 0, 1, 200_000, 0, 9],
        [0, 8, 3, 0, 0, 0],
        [0, 11, 0, 0, 0, 0],
        [0, 4, 0, 0, 0, 0],
    ];
    assert_eq!(run_script(&node, &moved).expect("every byte"), 1);
}
