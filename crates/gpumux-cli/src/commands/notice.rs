//! A line at a terminal, after a foreground program was killed for memory or reached its memory limit.
//!
//! `gpumux run` has become the program by then. So a process beside it waits for its end, where standard error is a terminal; elsewhere
//! `gpumux ps -a` has the reason.

use std::{
    io::IsTerminal,
    process::{self, ExitCode},
    thread,
    time::Duration,
};

use gpumux_daemon::{api::types::Ended, clock};
use rustix::{
    event::{PollFd, PollFlags, poll},
    io::Errno,
    process::{Pid, PidfdFlags, getuid, pidfd_open},
};

use super::client;
use crate::background;

/// How often the daemon is asked for the end, and the pause between: other processes of the tenant may end after the program.
const ASKED: (u32, Duration) = (40, Duration::from_millis(50));

/// Print a line if a program ended for want of memory (used by gpumux itself)
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The program's process.
    #[arg(long)]
    pid: i32,
    /// When it began, in seconds since 1970.
    #[arg(long)]
    since: u64,
    /// Its tenant.
    tenant: String,
}

/// Has a line printed at the end of the program that this process turns into, if there is a reason and a terminal.
pub(super) fn follow(tenant: &str) {
    if std::io::stderr().is_terminal() {
        // The program runs without the line, too.
        let pid = process::id().to_string();
        // The helper may run only after the program's end.
        let since = clock::since_1970().as_secs().to_string();
        let args = ["notice", "--pid", &pid, "--since", &since, tenant];
        let _ = background::spawn(&args, None);
    }
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    if let Some(pid) = Pid::from_raw(args.pid)
        && let Ok(program) = pidfd_open(pid, PidfdFlags::empty())
    {
        while poll(&mut [PollFd::new(&program, PollFlags::IN)], None) == Err(Errno::INTR) {}
    }
    let own = getuid().as_raw();
    // A user has one tenant of a name at a time: the first that ended since then is this one.
    let is_it = |end: &&Ended| end.uid == own && end.name == args.tenant && end.at >= args.since;
    for _ in 0..ASKED.0 {
        let ends = client::block(async |client| client.ended().await)?;
        if let Some(end) = ends.iter().find(is_it) {
            if end.noteworthy {
                eprintln!("gpumux: {}: {}", end.name, end.reason);
            }
            break;
        }
        thread::sleep(ASKED.1);
    }
    Ok(ExitCode::SUCCESS)
}
