//! A pseudoterminal, for what programs print only where a person reads it.

use std::{
    fs::File,
    io::Read,
    os::fd::{FromRawFd, OwnedFd},
    process::{Command, ExitStatus, Stdio},
    ptr,
};

/// Runs a command whose standard error is a terminal. Returns its status, and all that was printed there until the last process closed
/// the terminal.
pub fn at_terminal(mut command: Command) -> (ExitStatus, String) {
    let (mut ours, mut theirs) = (-1, -1);
    // SAFETY: both places are valid, and the other arguments may be null.
    let made = unsafe {
        libc::openpty(
            &raw mut ours,
            &raw mut theirs,
            ptr::null_mut(),
            ptr::null_mut(),
            ptr::null_mut(),
        )
    };
    assert_eq!(made, 0, "no terminal can be made");
    // SAFETY: both were opened just now, and belong to these owners alone.
    let (mut ours, theirs) = unsafe { (File::from_raw_fd(ours), OwnedFd::from_raw_fd(theirs)) };
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(theirs);
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
