//! Starting `gpumux` itself in the background: in a session of its own, with a log file, and no
//! child of this process, so that the program that `run` turns into has no child that it did not make. And the reverse: a child
//! that does not outlive its parent.

use std::{
    ffi::{OsStr, OsString},
    fs::OpenOptions,
    io::{Read, Write},
    os::{fd::OwnedFd, unix::process::CommandExt},
    path::{Path, PathBuf},
    process::{Command, ExitCode, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, ensure};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    process::{
        Pid, PidfdFlags, Signal, getpid, getppid, pidfd_open, set_parent_process_death_signal,
    },
};

/// How long a background process may take to be ready.
const READY: Duration = Duration::from_secs(10);
/// Between two looks.
const MOMENT: Duration = Duration::from_millis(2);
/// Length in bytes at which a log begins anew.
const LOG_MAX: u64 = 1 << 20;

/// Start gpumux in the background and print its pid (used by gpumux itself)
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Where its output goes; without it, errors go where the caller's do.
    #[arg(long)]
    log: Option<PathBuf>,
    /// Its arguments.
    #[arg(last = true)]
    args: Vec<OsString>,
}

/// The middle process: starts the real one, prints its pid, and ends.
pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    let mut command = Command::new(std::env::current_exe()?);
    command
        .args(&args.args)
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    if let Some(path) = &args.log {
        let log = OpenOptions::new()
            .append(true)
            .create(true)
            .open(path)
            .with_context(|| format!("cannot write the log {}", path.display()))?;
        if log.metadata()?.len() > LOG_MAX {
            log.set_len(0)?;
        }
        command.stdout(log.try_clone()?).stderr(log);
    }
    // SAFETY: between fork and exec only two system calls are made, which is async-signal-safe.
    unsafe {
        command.pre_exec(|| {
            rustix::process::setsid()?;
            // What the caller's shell left open (locks, pipes) must not stay open with us. An old
            // kernel without this call is no reason to fail.
            libc::syscall(
                libc::SYS_close_range,
                3,
                u32::MAX,
                libc::CLOSE_RANGE_CLOEXEC,
            );
            Ok(())
        })
    };
    crate::output::print(&format!("{}\n", command.spawn()?.id()))?;
    Ok(ExitCode::SUCCESS)
}

/// Starts a child in a session of its own: no terminal's signals reach it.
pub(crate) fn in_own_session(command: &mut Command) {
    // SAFETY: between fork and exec only one system call is made, which is async-signal-safe.
    unsafe {
        command.pre_exec(|| {
            rustix::process::setsid()?;
            Ok(())
        })
    };
}

/// Has a child killed when this process ends, however that comes. It must be started by the first thread.
pub(crate) fn end_with_this(command: &mut Command) {
    let this = getpid();
    // SAFETY: between fork and exec only two system calls are made, which is async-signal-safe.
    unsafe {
        command.pre_exec(move || {
            set_parent_process_death_signal(Some(Signal::KILL))?;
            // It may have ended before that.
            match getppid() == Some(this) {
                true => Ok(()),
                false => Err(Errno::SRCH.into()),
            }
        })
    };
}

/// Starts `gpumux ARGS…` in the background and waits, within bounds, until `ready` says so.
///
/// # Errors
/// When it ends before it is ready (with the end of its log), or is not ready in time.
pub(crate) fn start(
    args: &[impl AsRef<OsStr>],
    log: &Path,
    ready: impl Fn() -> bool,
) -> anyhow::Result<()> {
    let before = std::fs::metadata(log).map_or(0, |log| log.len());
    let process = pidfd_open(spawn(args, Some(log))?, PidfdFlags::empty()).ok();
    let started = Instant::now();
    while !ready() {
        ensure!(!ended(process.as_ref())?, "{}", last_words(log, before));
        ensure!(
            started.elapsed() < READY,
            "it was not ready within {READY:?}; see {}",
            log.display()
        );
    }
    Ok(())
}

/// Starts `gpumux ARGS…` in the background, and returns its process. Without a log its errors go where this process's do.
///
/// # Errors
/// The process or the log cannot be made.
pub(crate) fn spawn(args: &[impl AsRef<OsStr>], log: Option<&Path>) -> anyhow::Result<Pid> {
    let mut middle = Command::new(std::env::current_exe()?);
    middle.arg("background");
    if let Some(log) = log {
        middle.arg("--log").arg(log);
    }
    let mut middle = middle
        .arg("--")
        .args(args)
        // A tenant's libraries do not belong into the daemon or the emulated device's server.
        .env_remove("LD_PRELOAD")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot start gpumux in the background")?;
    let mut pid = String::new();
    if let Some(out) = &mut middle.stdout {
        out.read_to_string(&mut pid)?;
    }
    ensure!(
        middle.wait()?.success(),
        "cannot start gpumux in the background"
    );
    let pid = pid.trim().parse().ok().and_then(Pid::from_raw);
    pid.context("the process in the background did not report its pid")
}

/// Waits a moment for the process to end. (No pidfd: it was gone before we looked.)
fn ended(process: Option<&OwnedFd>) -> anyhow::Result<bool> {
    let Some(process) = process else {
        return Ok(true);
    };
    let moment = Timespec {
        tv_sec: 0,
        tv_nsec: MOMENT.subsec_nanos().into(),
    };
    match poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&moment)) {
        Ok(events) => Ok(events > 0),
        Err(Errno::INTR) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// What a process that failed said last, in a log that had so many bytes before; else, what keeps it from being written.
fn last_words(log: &Path, before: u64) -> String {
    let text = std::fs::read(log).unwrap_or_default();
    // A long one began anew.
    let new = usize::try_from(before).ok().and_then(|at| text.get(at..));
    let text = String::from_utf8_lossy(new.unwrap_or(&text));
    if let Some(line) = text.lines().rfind(|line| !line.trim().is_empty()) {
        return line.trim_start_matches("gpumux: ").to_owned();
    }
    let probe = || {
        let mut log = OpenOptions::new().append(true).open(log)?;
        log.write_all(b"gpumux: it ended without a word\n")
    };
    match probe() {
        Ok(()) => format!("it ended at once; see {}", log.display()),
        Err(error) => format!(
            "it ended at once, and {} cannot be written ({error}): make room there, or set GPUMUX_RUNTIME_DIR to another folder",
            log.display()
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_words_are_those_of_the_last_start() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("daemon.log");
        std::fs::write(&log, "gpumux: an old error\n").unwrap();
        let before = std::fs::metadata(&log).unwrap().len();
        assert!(last_words(&log, before).starts_with("it ended at once; see "));
        std::fs::write(&log, "gpumux: an old error\n\ngpumux: a new one\n\n").unwrap();
        assert_eq!(last_words(&log, before), "a new one");
        assert_eq!(last_words(&log, LOG_MAX), "a new one", "it began anew");
    }
}
