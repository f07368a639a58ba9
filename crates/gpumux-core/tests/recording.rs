//! A recording of a daemon is replayed: a changed decision shows as another line.
//!
//! `UPDATE_RECORDING=1 cargo test -p gpumux-core --test recording` writes what the planners decide now. Where that no longer fits what the
//! daemon's processes answered then, make a new one: see "Record what the planners decide" in CONTRIBUTING.md.

#![allow(clippy::disallowed_methods)] // the test's data is a file

use std::{fs, path::Path};

use gpumux_core::recording::{Line, Replay};

fn replay(text: &str) -> Vec<Line> {
    let mut replay = Replay::default();
    text.lines()
        .map(|line| {
            let line: Line = serde_json::from_str(line).expect("a line of a recording");
            replay.again(&line).expect("its policy is known")
        })
        .collect()
}

#[test]
fn recorded_decisions_are_made_again() {
    let file =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/recordings/two-that-do-not-fit.jsonl");
    let text = fs::read_to_string(&file).expect("it is there");
    let again: String = replay(&text)
        .iter()
        .map(|line| serde_json::to_string(line).expect("it can be written") + "\n")
        .collect();
    if std::env::var_os("UPDATE_RECORDING").is_some() {
        fs::write(&file, &again).expect("room");
        return;
    }
    for (number, (then, now)) in text.lines().zip(again.lines()).enumerate() {
        assert_eq!(now, then, "line {}", number + 1);
    }
    let moved = |out: bool| text.contains(&format!("\"out\":{out}"));
    assert!(
        moved(true) && moved(false),
        "it has moves to the host and back"
    );
    assert!(text.contains("{\"Poll\":{"), "it has controls");
}
