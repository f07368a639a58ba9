//! A program that `gpumux run` stays the parent of: one that runs detached, and one that runs again after another tenant's fault.

use std::{
    fs::{self, File},
    os::unix::process::ExitStatusExt,
    process::{Command, ExitCode, ExitStatus},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use gpumux_daemon::{
    api::types::{Exit, Fault},
    client::ClientError,
    signals::is_ignored,
};
use rustix::{
    process::{Pid, Signal, getpgrp, kill_process},
    termios::tcgetpgrp,
};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};

use super::{cannot_run, client, collect::Collector};
use crate::{
    background,
    keeper::Keeper,
    logs::{self, Log},
};

/// How often the daemon is asked for a fault after the program has ended, and the pause between: two seconds, or more on a machine that
/// is so slow that the daemon needs them.
const ASKED: (u32, Duration) = (40, Duration::from_millis(50));
/// How long the end of a program waits for a daemon that is away, in the background and in the foreground: an upgrade takes less.
const AWAY: [Duration; 2] = [Duration::from_secs(600), Duration::from_secs(10)];
/// Faults without a known cause, after which a program is run again.
const UNEXPLAINED: u32 = 2;
/// The first pause before a program runs again, and the longest: each is twice as long as the one before.
const PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));
/// After so long a run what was before does not count any more.
const HEALTHY: Duration = Duration::from_secs(600);
/// A program that ends so soon after a signal has ended because of it.
const ENDING: Duration = Duration::from_secs(10);
/// How often the daemon is asked whether another member's fault has ended a program that still runs.
const ASK_AGAIN: Duration = Duration::from_secs(1);
/// How long such a program may take to end by itself: NVIDIA's driver may keep it waiting without end for a server that is gone (H200,
/// driver 580.159.04).
const LINGERS: Duration = Duration::from_secs(10);
/// Between two looks at the program.
const MOMENT: Duration = Duration::from_millis(20);
/// What is passed on to the program.
const SIGNALS: [(i32, Signal); 6] = [
    (SIGTERM, Signal::TERM),
    (SIGINT, Signal::INT),
    (SIGHUP, Signal::HUP),
    (SIGQUIT, Signal::QUIT),
    (SIGUSR1, Signal::USR1),
    (SIGUSR2, Signal::USR2),
];
/// Of these, what a terminal sends to all that run in it.
const TYPED: [Signal; 3] = [Signal::INT, Signal::HUP, Signal::QUIT];
/// Of these, what asks a program for something else than to end: batch systems announce its end so.
const WORDS: [Signal; 2] = [Signal::USR1, Signal::USR2];

/// A program to be supervised.
pub(super) struct Order<'a> {
    pub(super) program: Command,
    /// Its tenant.
    pub(super) tenant: &'a str,
    /// It runs again when another member's fault has ended it.
    pub(super) again: bool,
    /// What keeps memory that the program finds when it runs again.
    pub(super) keeper: Option<Keeper>,
    /// Where its output goes, if not where the caller's does.
    pub(super) log: Option<Log>,
    /// Called once when it has started.
    pub(super) started: Option<Box<dyn FnOnce()>>,
}

/// Runs the program until it ends by itself, reports its end to the daemon, and ends as it did.
pub(super) fn supervise(mut order: Order<'_>) -> ExitCode {
    let mut signals = Signals::listen();
    background::end_with_this(&mut order.program);
    let log = order.log.take();
    let noted = log.as_ref().map(|log| logs::exit(log.path()));
    let patience = AWAY[usize::from(log.is_none())];
    let output = match log.map(|log| Collector::start(log, order.tenant, &mut order.program)) {
        None => None,
        Some(Ok(output)) => Some(output),
        Some(Err(error)) => {
            eprintln!("gpumux: the program's output cannot be collected: {error}");
            return super::CANNOT_START.into();
        }
    };
    let status = match until_it_ends(&mut order, &mut signals, patience) {
        Ok(status) => status,
        Err(code) => return code,
    };
    drop(order.keeper);
    let exit = Exit::of_status(status.into_raw());
    if let Some(path) = noted
        && let Ok(text) = serde_json::to_string(&exit)
    {
        // On a full disk only the daemon has it.
        let _ = fs::write(path, text);
    }
    let report = || client::block(async |client| client.report_exit(order.tenant, exit).await);
    // At a terminal it is seen: no daemon needs to know it.
    let told = match output.is_some() {
        true => once_there(patience, &mut signals, report).0,
        false => report(),
    };
    if let Ok(told) = told.as_ref()
        && told.noteworthy
    {
        eprintln!("gpumux: {}: {}", order.tenant, told.reason);
    }
    // With it goes this process's end of the pipe. What the program has started may write on.
    drop(order.program);
    while let Some(output) = &output
        && !output.is_finished()
        && signals.lately().is_none()
    {
        signals.pass(None);
        thread::sleep(MOMENT);
    }
    exit.shell_code().unwrap_or(1).into()
}

/// Runs the program again as long as other members' faults end it; its last status, or the exit code where it cannot run.
fn until_it_ends(
    order: &mut Order<'_>,
    signals: &mut Signals,
    away: Duration,
) -> Result<ExitStatus, ExitCode> {
    let mut patience = Patience::default();
    let mut last = None;
    loop {
        if order.again {
            last = last_fault().or(last);
        }
        let began = Instant::now();
        let spawned = order.program.spawn();
        let mut child = spawned.map_err(|error| cannot_run(&order.program, &error))?;
        if let Some(started) = order.started.take() {
            started();
        }
        let (mut asked, mut struck) = (Instant::now(), None);
        let status = loop {
            signals.pass(Some(Pid::from_child(&child)));
            match child.try_wait() {
                Ok(Some(status)) => break status,
                Ok(None) => thread::sleep(MOMENT),
                Err(_) => return Err(ExitCode::FAILURE),
            }
            if order.again && struck.is_none() && asked.elapsed() >= ASK_AGAIN {
                let known = known_fault(order.tenant, last).ok().flatten();
                struck = known.map(|_| Instant::now());
                asked = Instant::now();
            }
            if struck.is_some_and(|at| at.elapsed() >= LINGERS) {
                // It is there still: it has not been waited for.
                let _ = child.kill();
            }
        };
        let fault = match !order.again || status.success() || signals.lately().is_some() {
            true => None,
            false => fault_that_ended(order.tenant, last, signals, away),
        };
        let pause = fault.and_then(|cause| Some((cause, patience.pause(began.elapsed(), cause)?)));
        let Some((cause, pause)) = pause else {
            return Ok(status);
        };
        eprintln!(
            "gpumux: {}; it runs again",
            match cause {
                Cause::Unseen =>
                    "the program ended while there was no daemon, perhaps by a fault of another member of the group",
                Cause::Known | Cause::Unknown => {
                    "a fault of another member of the group ended the program"
                }
            }
        );
        let ended = Instant::now();
        while ended.elapsed() < pause {
            signals.pass(None);
            if let Some(signal) = signals.lately() {
                return Err(ExitCode::from(128 + signal.as_raw() as u8));
            }
            thread::sleep(MOMENT);
        }
    }
}

/// What is known of the fault that ended a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cause {
    /// Whose it was.
    Known,
    /// That there was one.
    Unknown,
    /// Nothing: there was no daemon.
    Unseen,
}

/// How often a program is run again, and when.
struct Patience {
    unexplained: u32,
    next: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self {
            unexplained: 0,
            next: PAUSES.0,
        }
    }
}

impl Patience {
    /// How long to wait before a program runs again that a fault has ended after it ran for so long; none: it does not.
    fn pause(&mut self, ran: Duration, cause: Cause) -> Option<Duration> {
        if ran >= HEALTHY {
            *self = Self::default();
        }
        // Perhaps it was its own.
        self.unexplained += u32::from(cause != Cause::Known);
        let pause = self.next;
        self.next = (pause * 2).min(PAUSES.1);
        (self.unexplained <= UNEXPLAINED).then_some(pause)
    }
}

/// Signals that this process is sent.
struct Signals {
    told: Vec<(Signal, Arc<AtomicBool>)>,
    last: Option<(Signal, Instant)>,
}

impl Signals {
    /// From now on. What is ignored (`nohup`) stays so, for the program too.
    fn listen() -> Self {
        let heard = SIGNALS.into_iter().filter_map(|(number, signal)| {
            let told = Arc::new(AtomicBool::new(false));
            let heard = !is_ignored(number)
                && signal_hook::flag::register(number, Arc::clone(&told)).is_ok();
            heard.then_some((signal, told))
        });
        Self {
            told: heard.collect(),
            last: None,
        }
    }

    /// Passes on what has come since the last time.
    fn pass(&mut self, to: Option<Pid>) {
        for (signal, told) in &self.told {
            if !told.swap(false, Ordering::AcqRel) {
                continue;
            }
            if !WORDS.contains(signal) {
                self.last = Some((*signal, Instant::now()));
            }
            // What a terminal sends reaches the program too.
            let has_it = TYPED.contains(signal) && in_foreground();
            if let Some(to) = to.filter(|_| !has_it) {
                let _ = kill_process(to, *signal);
            }
        }
    }

    /// The last one, if the program may be about to end because of it.
    fn lately(&self) -> Option<Signal> {
        let (signal, at) = self.last?;
        (at.elapsed() < ENDING).then_some(signal)
    }
}

/// Whether what is typed at the terminal (Ctrl-C) becomes signals to this process and its children.
fn in_foreground() -> bool {
    File::open("/dev/tty")
        .is_ok_and(|terminal| tcgetpgrp(terminal).is_ok_and(|group| group == getpgrp()))
}

/// When the last fault in a group was, and its number.
fn last_fault() -> Option<(u64, u64)> {
    let status = client::block(async |client| client.status().await).ok()?;
    status.faults.last().map(|fault| (fault.at, fault.number))
}

/// Asks the daemon, and waits for one that is away, unless its folder has gone too; whether one was away.
fn once_there<T>(
    patience: Duration,
    signals: &mut Signals,
    ask: impl Fn() -> Result<T, ClientError>,
) -> (Result<T, ClientError>, bool) {
    let (began, mut away) = (Instant::now(), false);
    loop {
        let answer = ask();
        let waits = answer.as_ref().is_err_and(client::is_away);
        if !waits || began.elapsed() >= patience || signals.lately().is_some() {
            return (answer, away);
        }
        away = true;
        signals.pass(None);
        thread::sleep(client::AWAY_PAUSE);
    }
}

/// The fault of another tenant that ended this one's processes, after the `last` one that was known before. The daemon may need a
/// moment to know. One that was away for less than `patience` has not seen it.
fn fault_that_ended(
    tenant: &str,
    last: Option<(u64, u64)>,
    signals: &mut Signals,
    patience: Duration,
) -> Option<Cause> {
    let mut unseen = None;
    for _ in 0..ASKED.0 {
        let (known, away) = once_there(patience, signals, || known_fault(tenant, last));
        match known {
            Ok(Some(fault)) if fault.faulting_client.is_some() => return Some(Cause::Known),
            Ok(Some(_)) => return Some(Cause::Unknown),
            Ok(None) => unseen = unseen.or(away.then_some(Cause::Unseen)),
            Err(error) if client::is_away(&error) => return None,
            // It may be slow.
            Err(_) => {}
        }
        thread::sleep(ASKED.1);
    }
    unseen
}

/// The first fault of another tenant, after the `last` one, by which this one lost its context, as far as is known.
fn known_fault(tenant: &str, last: Option<(u64, u64)>) -> Result<Option<Fault>, ClientError> {
    let status = client::block(async |client| client.status().await)?;
    let mut faults = status.faults.into_iter();
    let by_it =
        |fault: &Fault| is_newer(fault, last) && fault.others.iter().any(|other| other == tenant);
    Ok(faults.find(by_it))
}

/// Whether a fault came after another one. A daemon that restarts counts anew.
fn is_newer(fault: &Fault, last: Option<(u64, u64)>) -> bool {
    last.is_none_or(|(at, number)| fault.number > number || fault.at > at)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(at: u64, number: u64) -> Fault {
        Fault {
            number,
            at,
            group: "0/team".into(),
            error: 700,
            faulting_client: None,
            evidence: String::new(),
            others: Vec::new(),
            noticed_after_ms: None,
            restarted_ms: None,
        }
    }

    #[test]
    fn faults_without_a_known_client_pause_longer_until_a_long_run() {
        let short = Duration::from_secs(1);
        let mut patience = Patience::default();
        let pauses: Vec<_> = (0..8)
            .map(|_| patience.pause(short, Cause::Known).unwrap().as_millis())
            .collect();
        assert_eq!(pauses, [100, 200, 400, 800, 1600, 3200, 5000, 5000]);
        let mut unexplained = || patience.pause(short, Cause::Unknown).is_some();
        assert_eq!(
            [unexplained(), unexplained(), unexplained()],
            [true, true, false]
        );
        assert_eq!(patience.pause(HEALTHY, Cause::Unseen), Some(PAUSES.0));
    }

    #[test]
    fn fault_counts_once_within_a_second_and_over_a_daemon_restart() {
        let last = Some((100, 7));
        for (at, number, newer) in [
            (100, 7, false),
            (99, 6, false),
            (100, 8, true),
            (101, 1, true),
        ] {
            assert_eq!(is_newer(&fault(at, number), last), newer, "{at} {number}");
        }
        assert!(is_newer(&fault(1, 1), None));
    }
}
