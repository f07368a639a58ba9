//! `gpumux run`: makes a tenant and becomes its first process.
//!
//! `run` asks the daemon for a tenant, and then turns into the program: pid, signals,
//! terminal, job control and exit status are the program's own, and nothing of gpumux stays around it.

use std::{
    env,
    ffi::OsString,
    fs::{self, File},
    os::unix::{net::UnixStream, process::ExitStatusExt},
    path::Path,
    process::{Command, ExitCode},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::Context;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use gpumux_core::space::{Sharing, is_point};
use gpumux_daemon::{
    api::types::{Created, Fault, NewTenant},
    client::ClientError,
    paths,
};
use gpumux_wire::MEMORY_LIMIT_VARIABLE;
use rustix::{
    process::{Pid, Signal, getpgrp, kill_process},
    termios::tcgetpgrp,
};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};

use super::{become_program, cannot_run, client, spec::SpecArgs};
use crate::{background, fingerprint, libraries, output};

/// How long a daemon may take to end or to start.
const LEAVES: Duration = Duration::from_secs(10);
/// How long after one has ended the next may begin to start: systemd waits for 0.2 s.
const FOLLOWS: Duration = Duration::from_secs(2);
/// A daemon that `run` started ends after so many seconds without tenants.
const IDLE_EXIT_S: &str = "60";

const EXAMPLES: &str = "\
Examples:
  gpumux run --class latency -- python serve.py
  gpumux run --class batch --name train -- python train.py
  gpumux run --guaranteed 0.7 -- ./solver
  gpumux run --memory-guaranteed 8GiB --memory-limit 40GiB -- python train.py
  gpumux run --sleep-after 30s -- python serve.py
  gpumux run --strict -- ./job        refuse to run unmanaged
  gpumux run --trust team --class batch -- python train.py     beside others of team, at the same time

The program and all that it starts are one tenant. If no daemon runs, one is started in the \
background; it ends by itself when it has had no tenants for a minute. If none can be started, \
the program runs unmanaged, with one line of warning; with --strict it does not run.

Exit codes:
  125  a promise that cannot be kept, a name in use; with --strict also: no daemon
  126  the program cannot be executed
  127  the program was not found
  else the program's own (a shell shows 128 + N for signal N)

Environment given to the program: LD_PRELOAD (libgpumux.so is put first), GPUMUX_SOCKET, \
GPUMUX_TENANT and, with --strict, GPUMUX_STRICT=1; in a group also CUDA_MPS_PIPE_DIRECTORY and \
CUDA_MPS_LOG_DIRECTORY, and CUDA_MPS_ACTIVE_THREAD_PERCENTAGE if it has a limit there; with \
--memory-limit GPUMUX_MEMORY_LIMIT, by which programs see it before they use the device.";

/// Run a program as a tenant
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// The tenant's name; without it, the program's, numbered where it is in use
    #[arg(long)]
    name: Option<String>,
    #[command(flatten)]
    spec: SpecArgs,
    /// Trust domain: tenants of yours that name the same one may share the SMs at the same time; a crash of one then ends all of them
    #[arg(long, value_name = "NAME")]
    trust: Option<String>,
    /// time: a context of its own, in turns with others; space: the group of its trust domain; auto: what serves it best, without a trust domain always time
    #[arg(long, value_parser = sharing(), default_value = Sharing::default().name())]
    sharing: Sharing,
    /// What the program makes of so many percent of the SMs, such as 25:0.7,50:0.9,100:1 (throughput in any unit): in a group, SMs go to who makes most of them
    #[arg(long, value_name = "PERCENT:RATE,…", value_delimiter = ',', value_parser = point)]
    utility: Vec<(u32, f64)>,
    /// Under what name the daemon remembers what the program makes of SMs; without it, with --trust, one that is made from the command (see `gpumux profile`)
    #[arg(long, value_name = "NAME")]
    fingerprint: Option<String>,
    /// Run the program again when another member's fault has ended it; `gpumux run` then stays its parent
    #[arg(long, value_enum, default_value_t)]
    restart: Restart,
    /// Do not run the program unmanaged: without daemon it does not start
    #[arg(long)]
    strict: bool,
    /// The program and its arguments
    #[arg(trailing_var_arg = true, required = true, value_name = "CMD")]
    command: Vec<OsString>,
}

/// When a program is run again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
enum Restart {
    #[default]
    Never,
    /// After a fault of another member of its group
    OnCollateral,
}

/// How often the daemon is asked for a fault after the program has ended, and the pause between: two seconds, or more on a machine that
/// is so slow that the daemon needs them.
const ASKED: (u32, Duration) = (40, Duration::from_millis(50));
/// Faults of which nobody knows who caused them, after which a program is run again.
const UNEXPLAINED: u32 = 2;
/// The first pause before a program runs again, and the longest: each is twice as long as the one before.
const PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));
/// After so long a run what was before does not count any more.
const HEALTHY: Duration = Duration::from_secs(600);
/// A program that ends so soon after it was told a signal has ended because of that.
const ENDING: Duration = Duration::from_secs(10);
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

pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    let mut words = args.command.iter();
    let mut program = Command::new(words.next().context("no program was named")?);
    program.args(words);
    let mut tenant = None;
    match enter(&args, &mut program) {
        Ok(name) => tenant = Some(name),
        Err(Failure::Refused(error)) => return Err(error.into()),
        Err(Failure::Unmanaged(error)) if args.strict => {
            return Err(error.context("--strict"));
        }
        Err(Failure::Unmanaged(error)) => {
            let why = output::with_causes(&error);
            eprintln!("gpumux: {why}; the program runs unmanaged");
        }
    }
    match (args.restart, tenant) {
        (Restart::OnCollateral, Some(tenant)) => Ok(run_again_and_again(program, &tenant)),
        _ => Ok(become_program(program)),
    }
}

/// Runs the program until it ends by itself: success, or a failure that no other member of its group has caused.
fn run_again_and_again(mut program: Command, tenant: &str) -> ExitCode {
    let mut signals = Signals::listen();
    let mut patience = Patience::default();
    background::end_with_this(&mut program);
    let mut last = None;
    loop {
        last = last_fault().or(last);
        let began = Instant::now();
        let mut child = match program.spawn() {
            Ok(child) => child,
            Err(error) => return cannot_run(&program, &error),
        };
        let status = loop {
            signals.pass(Some(Pid::from_child(&child)));
            match child.try_wait() {
                Ok(Some(status)) => break status,
                Ok(None) => std::thread::sleep(MOMENT),
                Err(_) => return ExitCode::FAILURE,
            }
        };
        let fault = match status.success() || signals.lately().is_some() {
            true => None,
            false => fault_that_ended(tenant, last),
        };
        let pause = fault.and_then(|fault| patience.pause(began.elapsed(), &fault));
        let Some(pause) = pause else {
            let code = status.code().or(status.signal().map(|signal| 128 + signal));
            return ExitCode::from(code.unwrap_or(1) as u8);
        };
        eprintln!(
            "gpumux: a fault of another member of the group ended the program; it runs again"
        );
        let ended = Instant::now();
        while ended.elapsed() < pause {
            signals.pass(None);
            if let Some(signal) = signals.lately() {
                return ExitCode::from(128 + signal.as_raw() as u8);
            }
            std::thread::sleep(MOMENT);
        }
    }
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
    fn pause(&mut self, ran: Duration, fault: &Fault) -> Option<Duration> {
        if ran >= HEALTHY {
            *self = Self::default();
        }
        // Perhaps it was its own.
        self.unexplained += u32::from(fault.culprit.is_none());
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
        let ignored = ignored();
        let heard = SIGNALS.into_iter().filter_map(|(number, signal)| {
            let told = Arc::new(AtomicBool::new(false));
            let heard = ignored & 1 << (number - 1) == 0
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

/// The signals that this process ignores, as bits.
fn ignored() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    ignored.map_or(0, |bits| u64::from_str_radix(bits.trim(), 16).unwrap_or(0))
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

/// The fault of another tenant that ended this one's processes, after the `last` one that was known before. The daemon may need a
/// moment to know.
fn fault_that_ended(tenant: &str, last: Option<(u64, u64)>) -> Option<Fault> {
    for _ in 0..ASKED.0 {
        let status = client::block(async |client| client.status().await).ok()?;
        let mut faults = status.faults.into_iter();
        let ended_it = |fault: &Fault| {
            is_newer(fault, last) && fault.others.iter().any(|other| other == tenant)
        };
        if let Some(fault) = faults.find(ended_it) {
            return Some(fault);
        }
        std::thread::sleep(ASKED.1);
    }
    None
}

/// Whether a fault came after another one. A daemon that restarts counts anew.
fn is_newer(fault: &Fault, last: Option<(u64, u64)>) -> bool {
    last.is_none_or(|(at, number)| fault.number > number || fault.at > at)
}

/// Why the program does not become a tenant.
pub(super) enum Failure {
    /// The daemon will not have it so.
    Refused(ClientError),
    /// There is no daemon to be had, or no library to preload.
    Unmanaged(anyhow::Error),
}

/// Makes the tenant and puts what its processes need into the program's environment.
/// Returns the tenant's name.
fn enter(args: &Args, program: &mut Command) -> Result<String, Failure> {
    let shim = libraries::find(libraries::SHIM).map_err(Failure::Unmanaged)?;
    let tenant = create(args)?;
    let name = tenant.name.clone();
    equip(program, tenant, &shim);
    if args.strict {
        program.env("GPUMUX_STRICT", "1");
    }
    Ok(name)
}

/// Puts what a tenant's processes need into a program's environment.
pub(super) fn equip(program: &mut Command, tenant: Created, shim: &Path) {
    let [pipes, _, percentage] = paths::MPS_VARIABLES;
    // A part of the SMs is what the daemon gives in its groups; that of the caller's shell is for another server.
    if tenant.environment.contains_key(pipes) {
        program.env_remove(percentage);
    }
    // A tenant in a group may start one that shall not be in it.
    let ours = Path::new(&tenant.socket).with_file_name("groups");
    for variable in paths::MPS_VARIABLES {
        if env::var_os(pipes).is_some_and(|at| Path::new(&at).starts_with(&ours)) {
            program.env_remove(variable);
        }
    }
    program
        // Of a tenant that starts another one.
        .env_remove(MEMORY_LIMIT_VARIABLE)
        .envs(tenant.environment)
        .env("LD_PRELOAD", libraries::first("LD_PRELOAD", shim))
        .env("GPUMUX_SOCKET", tenant.socket)
        .env("GPUMUX_TENANT", tenant.token);
}

fn point(text: &str) -> Result<(u32, f64), String> {
    let wrong = || format!("`{text}` is no point of a curve: use PERCENT:RATE, such as 50:0.9");
    let (percent, rate) = text.split_once(':').ok_or_else(wrong)?;
    match (percent.parse(), rate.parse::<f64>()) {
        (Ok(percent), Ok(rate)) if is_point(percent, rate) => Ok((percent, rate)),
        _ => Err(wrong()),
    }
}

fn sharing() -> impl TypedValueParser<Value = Sharing> {
    PossibleValuesParser::new(Sharing::ALL.map(Sharing::name))
        .try_map(|name| name.parse::<Sharing>())
}

fn create(args: &Args) -> Result<Created, Failure> {
    let program = Path::new(&args.command[0]).file_name();
    // Without a trust domain nothing is decided by it.
    let own = args.trust.as_ref().map(|_| fingerprint::of(&args.command));
    make(&NewTenant {
        name: args.name.clone(),
        program: program.map(|name| name.to_string_lossy().into_owned()),
        spec: args.spec.change(),
        trust: args.trust.clone(),
        sharing: args.sharing,
        utility: args.utility.clone(),
        fingerprint: args.fingerprint.clone().or(own),
        ..NewTenant::default()
    })
}

/// Has the daemon make a tenant that lives as long as this process; starts one if there is none.
pub(super) fn make(tenant: &NewTenant) -> Result<Created, Failure> {
    let ask = || client::block(async |client| client.create(tenant).await);
    let mut answer = settled(ask);
    if let Err(ClientError::NoDaemon { .. }) = answer {
        let started = start_daemon().context("cannot start the daemon");
        // Another one, started at the same moment, may have been the first.
        answer = settled(ask);
        if let (Err(ClientError::NoDaemon { .. }), Err(error)) = (&answer, started) {
            return Err(Failure::Unmanaged(error));
        }
    }
    answer.map_err(|error| match error {
        ClientError::Refused { .. } if !error.is_leaving() => Failure::Refused(error),
        error => Failure::Unmanaged(error.into()),
    })
}

/// Asks until it is clear whether there is a daemon: one that starts, ends or has just ended is waited for, and for who follows it. A
/// second daemon beside that would do harm.
fn settled<T>(ask: impl Fn() -> Result<T, ClientError>) -> Result<T, ClientError> {
    let asked = Instant::now();
    let mut there = None;
    loop {
        let answer = ask();
        let dir = paths::find();
        let is_there = match &answer {
            Err(ClientError::NoDaemon { .. }) => paths::taken(&dir),
            Err(error) if error.is_leaving() => true,
            _ => return answer,
        };
        if is_there {
            there = Some(Instant::now());
        } else if paths::api_socket(&dir).exists() {
            // It was killed.
            there.get_or_insert(asked);
        }
        let follows = there.is_some_and(|there| there.elapsed() < FOLLOWS);
        if !follows || asked.elapsed() > LEAVES {
            return answer;
        }
        std::thread::sleep(MOMENT);
    }
}

/// Starts a daemon of this user in the background.
fn start_daemon() -> anyhow::Result<()> {
    let dir = paths::runtime_dir();
    let socket = paths::api_socket(&dir);
    // The daemon makes its folder itself; this one only lets its log begin before that.
    paths::make(&dir)?;
    background::start(
        &["daemon", "--idle-exit", IDLE_EXIT_S],
        &dir.join("daemon.log"),
        || UnixStream::connect(&socket).is_ok(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(at: u64, number: u64, culprit: Option<&str>) -> Fault {
        Fault {
            number,
            at,
            group: "0/team".into(),
            error: 700,
            culprit: culprit.map(Into::into),
            evidence: String::new(),
            others: Vec::new(),
            noticed_after_ms: None,
            restarted_ms: None,
        }
    }

    #[test]
    fn pauses_grow_and_faults_without_culprit_end_patience_until_a_long_run() {
        let (known, unknown) = (fault(0, 1, Some("bad")), fault(0, 1, None));
        let short = Duration::from_secs(1);
        let mut patience = Patience::default();
        let pauses: Vec<_> = (0..8)
            .map(|_| patience.pause(short, &known).unwrap().as_millis())
            .collect();
        assert_eq!(pauses, [100, 200, 400, 800, 1600, 3200, 5000, 5000]);
        let mut unexplained = || patience.pause(short, &unknown).is_some();
        assert_eq!(
            [unexplained(), unexplained(), unexplained()],
            [true, true, false]
        );
        assert_eq!(patience.pause(HEALTHY, &unknown), Some(PAUSES.0));
    }

    #[test]
    fn a_fault_counts_once_also_within_a_second_and_after_the_daemons_restart() {
        let last = Some((100, 7));
        for (at, number, newer) in [
            (100, 7, false),
            (99, 6, false),
            (100, 8, true),
            (101, 1, true),
        ] {
            assert_eq!(
                is_newer(&fault(at, number, None), last),
                newer,
                "{at} {number}"
            );
        }
        assert!(is_newer(&fault(1, 1, None), None));
    }
}
