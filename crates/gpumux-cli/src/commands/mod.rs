//! The commands, one file each.

pub(crate) mod cdi;
pub(crate) mod completions;
pub(crate) mod daemon;
pub(crate) mod demo;
pub(crate) mod doctor;
pub(crate) mod dra;
pub(crate) mod emu;
pub(crate) mod events;
pub(crate) mod explain;
pub(crate) mod fleet;
pub(crate) mod hint;
pub(crate) mod inspect;
pub(crate) mod kill;
pub(crate) mod logs;
pub(crate) mod man;
pub(crate) mod memory;
pub(crate) mod notice;
pub(crate) mod page;
pub(crate) mod profile;
pub(crate) mod ps;
pub(crate) mod relocate;
pub(crate) mod run;
pub(crate) mod set;
pub(crate) mod sim;
pub(crate) mod stop;
pub(crate) mod top;
pub(crate) mod trace;
pub(crate) mod wait;
pub(crate) mod workload;

pub(crate) mod client;
mod collect;
mod spec;
mod supervise;

use std::{
    io,
    os::unix::process::CommandExt,
    process::{Command, ExitCode},
};

/// Exit code of `run` and `emu` when they could not start the program for a reason of their own.
pub(crate) const CANNOT_START: u8 = 125;

/// Turns this process into the program, so that its pid, signals, terminal and exit status are the
/// program's own. Comes back only when that failed: with 127 when there is no such program, 126 when
/// it cannot be executed.
pub(crate) fn become_program(mut program: Command) -> ExitCode {
    let error = program.exec();
    cannot_run(&program, &error)
}

/// Says why a program did not start: 127 when there is no such program, 126 when it cannot be executed.
fn cannot_run(program: &Command, error: &io::Error) -> ExitCode {
    let name = program.get_program().to_string_lossy();
    eprintln!("gpumux: cannot run {name}: {error}");
    match error.kind() {
        io::ErrorKind::NotFound => 127.into(),
        _ => 126.into(),
    }
}
