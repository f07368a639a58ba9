//! A pseudoterminal, for what programs print only where a person reads it.

use std::{
    fs::File,
    io::{Read, Write},
    os::fd::{FromRawFd, OwnedFd},
    process::{Command, ExitStatus, Stdio},
    ptr,
};

const COLUMNS: u16 = 160;
const LINES: u16 = 50;

/// A terminal: the test's side and the program's.
fn terminal() -> (File, OwnedFd) {
    let (mut ours, mut theirs) = (-1, -1);
    let size = libc::winsize {
        ws_row: LINES,
        ws_col: COLUMNS,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    // SAFETY: all places are valid, and the other arguments may be null.
    let made = unsafe {
        libc::openpty(
            &raw mut ours,
            &raw mut theirs,
            ptr::null_mut(),
            ptr::null_mut(),
            &raw const size,
        )
    };
    assert_eq!(made, 0, "no terminal can be made");
    // SAFETY: both were opened just now, and belong to these owners alone.
    unsafe { (File::from_raw_fd(ours), OwnedFd::from_raw_fd(theirs)) }
}

/// Runs a command that draws on a terminal with these keys typed ahead, the last of which ends it. Returns the lines of its last picture.
pub fn drawn(mut command: Command, keys: &str) -> String {
    let (mut ours, theirs) = terminal();
    ours.write_all(keys.as_bytes()).expect("a terminal");
    let copy = || theirs.try_clone().expect("a file");
    command.stdin(copy()).stdout(copy()).stderr(theirs);
    let (status, printed) = printed(command, ours);
    assert!(status.success(), "{printed}");
    picture(&printed)
}

/// What stands on the terminal after this was printed.
fn picture(printed: &str) -> String {
    let empty = || vec![vec![' '; COLUMNS.into()]; LINES.into()];
    let (mut lines, mut at) = (empty(), (0, 0));
    let mut letters = printed.chars();
    while let Some(letter) = letters.next() {
        if letter != '\x1b' {
            if let Some(place) = lines.get_mut(at.0).and_then(|line| line.get_mut(at.1)) {
                *place = letter;
            }
            at.1 += 1;
            continue;
        }
        // A sequence ends with a letter.
        let mut sequence = String::new();
        while !sequence.ends_with(|it: char| it.is_ascii_alphabetic()) {
            match letters.next() {
                Some(letter) => sequence.push(letter),
                None => break,
            }
        }
        let place = sequence
            .strip_prefix('[')
            .and_then(|it| it.strip_suffix('H'));
        if let Some((line, column)) = place.and_then(|it| it.split_once(';')) {
            let number = |text: &str| text.parse::<usize>().expect("a place") - 1;
            at = (number(line), number(column));
        }
        // The screen is cleared, or another one begins.
        if ["[2J", "[?1049h"].contains(&sequence.as_str()) {
            lines = empty();
        }
    }
    let lines = lines.iter().map(|line| line.iter().collect::<String>());
    lines
        .map(|line| line.trim_end().to_owned() + "\n")
        .collect()
}

/// Runs a command whose standard error is a terminal. Returns its status, and all that was printed there until the last process closed
/// the terminal.
pub fn at_terminal(mut command: Command) -> (ExitStatus, String) {
    let (ours, theirs) = terminal();
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(theirs);
    printed(command, ours)
}

/// All that a command prints on its terminal.
fn printed(mut command: Command, mut ours: File) -> (ExitStatus, String) {
    let mut child = command.spawn().expect("it starts");
    // It holds this side's copy.
    drop(command);
    let mut printed = Vec::new();
    let mut buffer = [0; 4096];
    // The end of a terminal is an error.
    while let Ok(count @ 1..) = ours.read(&mut buffer) {
        printed.extend_from_slice(&buffer[..count]);
    }
    let status = child.wait().expect("it is a child");
    (status, String::from_utf8_lossy(&printed).into_owned())
}
