//! `gpumux profile`: measures a program's scaling profile, for its next runs in a group.

use std::{
    ffi::OsString,
    os::unix::process::CommandExt,
    path::Path,
    process::{Child, Command, ExitCode, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, bail, ensure};
use gpumux_core::{
    Class,
    space::{Bandwidth, BesideProbe, Curve, Sharing, Way, throughput},
};
use gpumux_daemon::{
    api::types::{NewCurve, NewTenant, Program, SpecChange},
    client::ClientError,
};
use rustix::process::{Pid, Signal, kill_process_group};
use serde::Serialize;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use super::{
    client,
    run::{self, Failure},
};
use crate::{fingerprint, libraries, output, units};

const EXAMPLES: &str = "\
Examples:
  gpumux profile -- python train.py
  gpumux profile --fingerprint train --points 10,25,50,100 --warmup 30 -- python train.py
  gpumux profile --list
  gpumux profile --forget train

The program runs once for every point, alone in a group, confined to so many percent of the SMs, and is ended \
(SIGTERM) when it was measured. A last run is beside the probe, a program of gpumux's that takes the memory's bandwidth. It measures how much \
of the bandwidth the program takes from others (demand), and how much time it loses without it (sensitivity). Throughput is what it reports as done (gpumux_progress: tokens, samples), else the work (kernels, graphs) \
that it gives to the device, per second in which no other tenant kept it waiting. Its standard output is discarded.

The daemon keeps all that by the program's fingerprint: `gpumux run --trust NAME` of the same program shares in space where that is predicted to gain, \
and divides the SMs of its group by the profiles of its members, as with --utility. A fingerprint is made from the executable and the arguments, where the first that is a file counts with its whole path; \
with --fingerprint it is any name.";

/// Measure a program's scaling profile: its throughput by SM share, and what it needs of the memory's bandwidth
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// The tenants' name; without it, the program's
    #[arg(long)]
    name: Option<String>,
    /// Under what name to keep the curve; without it, one that is made from the command
    #[arg(long, value_name = "NAME")]
    fingerprint: Option<String>,
    /// Percentages of the SMs to measure at
    #[arg(long, value_name = "PERCENT,…", value_delimiter = ',', default_value = "25,50,75,100", value_parser = units::whole(1..=100), allow_negative_numbers = true)]
    points: Vec<u32>,
    /// Seconds to wait at each point after the program's first work
    #[arg(long, value_name = "S", default_value = "5", value_parser = seconds)]
    warmup: Duration,
    /// Seconds to measure at each point
    #[arg(long, value_name = "S", default_value = "5", value_parser = seconds)]
    seconds: Duration,
    /// Measure and print, but keep nothing
    #[arg(long)]
    dry_run: bool,
    /// Show what is known of programs, by `gpumux profile` or from their runs
    #[arg(long, conflicts_with_all = ["command", "forget"])]
    list: bool,
    /// Forget what is known of a program
    #[arg(long, value_name = "FINGERPRINT", conflicts_with = "command")]
    forget: Option<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// The program and its arguments
    #[arg(trailing_var_arg = true, required_unless_present_any = ["list", "forget"], value_name = "CMD")]
    command: Vec<OsString>,
}

/// How long a program may take until it has work for the device.
const START: Duration = Duration::from_secs(600);
/// How long it may take to end when asked to, and until the daemon has noticed.
const END: Duration = Duration::from_secs(10);
/// How often the daemon is asked.
const LOOK: Duration = Duration::from_millis(20);
/// Parts of a measurement that are compared with each other.
const PARTS: u32 = 4;
/// Percentage of the SMs of the probe. The program has the rest. An H100 needs 20 for all of the bandwidth, an H200 more than 30.
const PROBE: u32 = 50;
/// How long the probe warms up.
const PROBE_WARMUP: Duration = Duration::from_secs(1);

/// What was measured.
#[derive(Debug, Serialize)]
struct Profile {
    fingerprint: String,
    points: Vec<Point>,
    /// What `gpumux run --utility` takes.
    utility: String,
    /// Whether rates are of progress that the program reports; else of pieces of work.
    reported: bool,
    bandwidth: Option<Bandwidth>,
    /// Whether the daemon keeps it.
    kept: bool,
}

#[derive(Clone, Copy, Debug, Serialize)]
struct Point {
    percent: u32,
    /// Pieces of work, or units of reported progress, per second.
    rate: f64,
    /// Of the rate at the largest percentage.
    relative: f64,
    /// Between the quarters of the measurement, relative to the rate: how steady it was.
    spread: f64,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    if args.list {
        let programs = client::block(async |client| client.programs().await)?;
        match (args.json, programs.is_empty()) {
            (true, _) => output::json(&serde_json::json!({ "programs": programs }))?,
            (false, true) => output::print("no program is known\n")?,
            (false, false) => output::print(&table(&programs))?,
        }
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(fingerprint) = &args.forget {
        client::block(async |client| client.unlearn(fingerprint).await)?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut percents = args.points.clone();
    percents.sort_unstable();
    percents.dedup();
    if percents.len() < 2 {
        let message =
            "one percentage is no scaling profile: name at least two with --points, such as 25,100";
        return Err(units::Usage(message.to_owned()).into());
    }
    units::program(&args.command[0])?;
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGINT, SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(&stop))?;
    }
    let (mut points, mut unit) = (Vec::new(), None);
    for percent in percents {
        let (rate, spread, reported) = measure(args, percent, &stop)
            .with_context(|| format!("cannot measure at {percent}% of the SMs"))?;
        ensure!(
            *unit.get_or_insert(reported) == reported,
            "at {percent}% of the SMs the program {} progress, at the points before it was otherwise: use a longer --warmup",
            if reported { "reports" } else { "reports no" },
        );
        eprintln!(
            "{percent}% of the SMs: {rate:.1} {} per second (± {:.0}%)",
            if reported {
                "units of progress"
            } else {
                "pieces of work"
            },
            spread * 50.0
        );
        points.push(Point {
            percent,
            rate,
            relative: 0.0,
            spread,
        });
    }
    let curve = Curve::of_percents(points.iter().map(|it| (it.percent, it.rate)));
    // The points took long: what fails now does not make them useless.
    let bandwidth = beside_probe(args, curve.rate(100), &stop).inspect_err(|error| {
        eprintln!("what it needs of the memory's bandwidth is not known: {error:#}");
    });
    ensure!(!stop.load(Ordering::Acquire), "interrupted");
    let profile = profile(args, points, unit.unwrap_or(false), bandwidth.ok())?;
    match args.json {
        true => output::json(&profile)?,
        false => output::print(&shown(&profile))?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Puts the points in relation and has the daemon keep them.
fn profile(
    args: &Args,
    mut points: Vec<Point>,
    reported: bool,
    bandwidth: Option<Bandwidth>,
) -> anyhow::Result<Profile> {
    let most = points.last().map_or(0.0, |point| point.rate);
    ensure!(most > 0.0, "the program gave no work to the device");
    for point in &mut points {
        point.relative = point.rate / most;
    }
    let fingerprint = (args.fingerprint.clone()).unwrap_or_else(|| fingerprint::of(&args.command));
    if !args.dry_run {
        let curve = points.iter().map(|point| (point.percent, point.rate));
        let curve = NewCurve {
            curve: curve.collect(),
            reported,
            bandwidth,
        };
        client::block(async |client| client.teach(&fingerprint, &curve).await)?;
    }
    let utility = points.iter().map(|it| (it.percent, it.relative));
    Ok(Profile {
        utility: listed(utility),
        fingerprint,
        points,
        reported,
        bandwidth,
        kept: !args.dry_run,
    })
}

/// Throughput at so many percent of the SMs, how much it differed, and whether it is of reported progress.
fn measure(args: &Args, percent: u32, stop: &AtomicBool) -> anyhow::Result<(f64, f64, bool)> {
    // Each point in a group of its own: what is ended in the middle of its work may leave a server in a bad state.
    let trust = format!("profile-{}-{percent}", std::process::id());
    let mut running = Running::start(&args.command, args.name.as_deref(), &trust, percent)?;
    running.warm_up(args.warmup, stop)?;
    let first = look(&running.name)?;
    let (mut last, mut rates) = (first, Vec::new());
    for _ in 0..PARTS {
        running.pause(args.seconds / PARTS, stop)?;
        let next = look(&running.name)?;
        // One that was kept waiting all the time says nothing.
        rates.extend(rate(last, next).ok());
        last = next;
    }
    running.end_and_forget()?;
    let rate = rate(first, last)?;
    let most = rates.iter().copied().fold(0.0, f64::max);
    let least = rates
        .iter()
        .copied()
        .fold(f64::INFINITY, f64::min)
        .min(most);
    let spread = if rate > 0.0 {
        (most - least) / rate
    } else {
        0.0
    };
    Ok((rate, spread, first.progress > 0))
}

/// What the program needs of the memory's bandwidth, when `whole` is its throughput with all SMs: it and the probe run in one
/// group, and each is measured alone, too.
fn beside_probe(args: &Args, whole: f64, stop: &AtomicBool) -> anyhow::Result<Bandwidth> {
    let own = std::env::current_exe().context("cannot find gpumux's own program")?;
    let mut command = vec![own.into_os_string()];
    let options = "workload batch --read 64 --memory 256MiB --seconds 3600";
    command.extend(options.split(' ').map(Into::into));
    let trust = format!("profile-{}-probe", std::process::id());
    let mut probe = Running::start(&command, Some("probe"), &trust, PROBE)?;
    probe.warm_up(PROBE_WARMUP, stop)?;
    let [fast] = together([&mut probe], args.seconds, stop)?;
    let name = args.name.as_deref();
    let mut running = Running::start(&args.command, name, &trust, 100 - PROBE)?;
    running.warm_up(args.warmup, stop)?;
    let [beside, slow] = together([&mut running, &mut probe], args.seconds, stop)?;
    probe.end_and_forget()?;
    running.pause(PROBE_WARMUP, stop)?;
    let [alone] = together([&mut running], args.seconds, stop)?;
    running.end_and_forget()?;
    eprintln!(
        "{}% of the SMs: {alone:.1} per second, {beside:.1} beside the probe, which runs at {:.0}% of its rate",
        100 - PROBE,
        slow / fast * 100.0
    );
    let seen = BesideProbe {
        whole,
        alone,
        beside,
        probe: (fast, slow),
    };
    Bandwidth::measured(&seen).context("the program or the probe did nothing")
}

/// The throughput of each while all run.
fn together<const N: usize>(
    all: [&mut Running; N],
    seconds: Duration,
    stop: &AtomicBool,
) -> anyhow::Result<[f64; N]> {
    let looks = |all: &[&mut Running; N]| -> anyhow::Result<Vec<Look>> {
        all.iter().map(|it| look(&it.name)).collect()
    };
    let before = looks(&all)?;
    all[0].pause(seconds, stop)?;
    let after = looks(&all)?;
    let mut rates = [0.0; N];
    for (at, it) in rates.iter_mut().enumerate() {
        *it = rate(before[at], after[at])?;
    }
    Ok(rates)
}

/// What a tenant had done at one moment.
#[derive(Clone, Copy, Debug)]
struct Look {
    at: Instant,
    work: u64,
    /// 0: it reports none.
    progress: u64,
    /// Of its processes' domains, that which was kept waiting most.
    waited_us: u64,
}

fn look(name: &str) -> anyhow::Result<Look> {
    let tenant = client::block(async |client| client.tenant(name).await)?;
    let waited = tenant.domains.iter().map(|domain| domain.waited_us);
    Ok(Look {
        at: Instant::now(),
        work: tenant.work,
        progress: tenant.progress,
        waited_us: waited.max().unwrap_or(0),
    })
}

/// Progress, if there was some before, else pieces of work per second that it was not kept waiting.
fn rate(from: Look, to: Look) -> anyhow::Result<f64> {
    let seconds = to.at.duration_since(from.at).as_secs_f64();
    let waited = to.waited_us.saturating_sub(from.waited_us) as f64 / 1e6;
    let work = match from.progress {
        0 => to.work.saturating_sub(from.work),
        before => to.progress.saturating_sub(before),
    };
    throughput(work, seconds, waited).with_context(|| {
        format!(
            "other tenants kept it waiting for {:.0}% of the time: try again when they need less",
            waited / seconds * 100.0
        )
    })
}

/// Waits until the daemon has noticed that the program has ended.
fn forget(name: &str) -> anyhow::Result<()> {
    let begun = Instant::now();
    loop {
        match client::block(async |client| client.delete(name).await) {
            Err(ClientError::Refused { status: 409, .. }) if begun.elapsed() < END => {
                std::thread::sleep(LOOK);
            }
            Err(ClientError::Refused { status: 404, .. }) => return Ok(()),
            answer => return Ok(answer?),
        }
    }
}

/// A tenant's program and all that it started; ended when dropped.
struct Running {
    child: Child,
    name: String,
}

impl Running {
    /// Runs a program in a group of this trust domain, with so many percent of the SMs.
    fn start(
        command: &[OsString],
        name: Option<&str>,
        trust: &str,
        percent: u32,
    ) -> anyhow::Result<Self> {
        let shim = libraries::find(libraries::SHIM)?;
        let program = Path::new(&command[0]).file_name().unwrap_or_default();
        let tenant = NewTenant {
            name: name.map(|name| format!("{name}-{percent}")),
            program: Some(program.to_string_lossy().into_owned()),
            spec: SpecChange {
                // What others have to do comes first: waiting for them does not count.
                class: Some(Class::Batch),
                ..SpecChange::default()
            },
            trust: Some(trust.to_owned()),
            sharing: Sharing::Space,
            sm_percent: Some(percent),
            visible: std::env::var("CUDA_VISIBLE_DEVICES").ok(),
            ..NewTenant::default()
        };
        let tenant = run::make(tenant).map_err(|failure| match failure {
            Failure::Refused(error) => error.into(),
            Failure::Unmanaged(error) => error,
        })?;
        let name = tenant.name.clone();
        let placement = client::block(async |client| client.tenant(&name).await)?.placement;
        ensure!(
            placement.way == Way::Space,
            "shares of SMs need a group, and there is none: {}",
            placement.reason
        );
        let mut start = Command::new(&command[0]);
        start
            .args(&command[1..])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .process_group(0);
        run::equip(&mut start, tenant, &shim);
        let child = start.spawn().with_context(|| {
            let program = command[0].to_string_lossy();
            format!("cannot run {program}")
        })?;
        Ok(Self { child, name })
    }

    /// Waits until it has had work for so long.
    fn warm_up(&mut self, time: Duration, stop: &AtomicBool) -> anyhow::Result<()> {
        let begun = Instant::now();
        while look(&self.name)?.work == 0 {
            ensure!(
                begun.elapsed() < START,
                "the program has had no work for the device after {} s",
                START.as_secs()
            );
            self.pause(LOOK, stop)?;
        }
        self.pause(time, stop)
    }

    /// Lets time pass, unless it ends or this is to stop.
    fn pause(&mut self, time: Duration, stop: &AtomicBool) -> anyhow::Result<()> {
        let begun = Instant::now();
        loop {
            ensure!(!stop.load(Ordering::Acquire), "interrupted");
            if let Some(status) = self.child.try_wait()? {
                bail!(
                    "the program ended before it was measured ({status}): let it run longer, or use a shorter --warmup \
                     and --seconds"
                );
            }
            match time.checked_sub(begun.elapsed()) {
                Some(left) if !left.is_zero() => std::thread::sleep(left.min(LOOK)),
                _ => return Ok(()),
            }
        }
    }

    fn end(&mut self) {
        let group = Pid::from_child(&self.child);
        let _ = kill_process_group(group, Signal::TERM);
        let begun = Instant::now();
        while begun.elapsed() < END && matches!(self.child.try_wait(), Ok(None)) {
            std::thread::sleep(LOOK);
        }
        // Also what it started and left.
        let _ = kill_process_group(group, Signal::KILL);
        let _ = self.child.wait();
    }

    /// Returns once the daemon has noticed its end: so that the next one is alone.
    fn end_and_forget(mut self) -> anyhow::Result<()> {
        self.end();
        forget(&self.name)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            self.end();
        }
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    let wrong = || format!("`{text}` is no time: use seconds, more than 0 and up to 3600");
    let seconds: f64 = text.parse().map_err(|_| wrong())?;
    match seconds > 0.0 && seconds <= 3600.0 {
        true => Ok(Duration::from_secs_f64(seconds)),
        false => Err(wrong()),
    }
}

/// A curve as `--utility` takes it.
fn listed(points: impl Iterator<Item = (u32, f64)>) -> String {
    let points = points.map(|(percent, relative)| format!("{percent}:{relative:.4}"));
    points.collect::<Vec<_>>().join(",")
}

fn shown(profile: &Profile) -> String {
    let mut rows = output::head("SMS|WORK/S|RELATIVE|SPREAD");
    for point in &profile.points {
        rows.push(vec![
            format!("{}%", point.percent),
            format!("{:.1}", point.rate),
            format!("{:.3}", point.relative),
            format!("{:.1}%", point.spread * 100.0),
        ]);
    }
    let bandwidth = profile.bandwidth.map(|it| {
        let (demand, sensitivity) = (it.demand, it.sensitivity);
        format!("\nMemory bandwidth: demand {demand:.2}, sensitivity {sensitivity:.2}\n")
    });
    let kept = match profile.kept {
        true => format!(
            "\nKept as {}: `gpumux run --trust NAME` of this program uses it from now on.\n",
            profile.fingerprint
        ),
        false => format!("\n--utility {}\n", profile.utility),
    };
    output::table(&rows) + &bandwidth.unwrap_or_default() + &kept
}

fn or_dash(text: String) -> String {
    match text.is_empty() {
        true => "-".to_owned(),
        false => text,
    }
}

fn table(programs: &[Program]) -> String {
    let mut rows = output::head("FINGERPRINT|USER|FROM|SMS:RELATIVE|DEMAND|SENSITIVITY");
    let part = |it: Option<f64>| it.map_or("-".to_owned(), |it| format!("{it:.2}"));
    for program in programs {
        let most = program.curve.last().map_or(1.0, |(_, rate)| *rate);
        let curve = (program.curve.iter()).map(|(percent, rate)| (*percent, rate / most));
        rows.push(vec![
            program.fingerprint.clone(),
            gpumux_daemon::user_name(program.uid),
            if program.profiled { "profile" } else { "runs" }.to_owned(),
            or_dash(listed(curve)),
            part(program.bandwidth.map(|it| it.demand)),
            part(program.bandwidth.map(|it| it.sensitivity)),
        ]);
    }
    output::table(&rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn profile_leaves_out_time_of_other_tenants() {
        let from = Look {
            at: Instant::now(),
            work: 100,
            progress: 0,
            waited_us: 5_000_000,
        };
        let to = |work, waited_us| Look {
            at: from.at + Duration::from_secs(4),
            work,
            progress: 0,
            waited_us,
        };
        assert_eq!(rate(from, to(300, 5_000_000)).unwrap(), 50.0);
        assert_eq!(rate(from, to(300, 7_000_000)).unwrap(), 100.0);
        let error = rate(from, to(300, 8_900_000)).unwrap_err().to_string();
        assert!(error.contains("98% of the time"), "{error}");
        let tokens = |progress, look| Look { progress, ..look };
        let (from, to) = (tokens(40, from), tokens(140, to(300, 5_000_000)));
        assert_eq!(rate(from, to).unwrap(), 25.0);
    }

    #[test]
    fn profile_prints_what_run_takes() {
        let point = |percent, relative| Point {
            percent,
            rate: relative * 1000.0,
            relative,
            spread: 0.02,
        };
        let points = vec![point(25, 0.7), point(100, 1.0)];
        let utility = listed(points.iter().map(|it| (it.percent, it.relative)));
        assert_eq!(utility, "25:0.7000,100:1.0000");
        let profile = Profile {
            fingerprint: "train.py-1".into(),
            points,
            utility,
            reported: false,
            bandwidth: Some(Bandwidth {
                demand: 0.25,
                sensitivity: 0.5,
            }),
            kept: true,
        };
        let text = shown(&profile);
        assert!(text.contains("25%   700.0   0.700     2.0%"), "{text}");
        assert!(text.contains("demand 0.25, sensitivity 0.50"), "{text}");
        assert!(text.contains("Kept as train.py-1"), "{text}");
    }

    #[test]
    fn program_without_a_profile_has_dashes() {
        let program = Program {
            fingerprint: "python-1".into(),
            uid: 0,
            curve: Vec::new(),
            reported: false,
            bandwidth: None,
            profiled: false,
            learnt: 0,
        };
        let text = table(&[program]);
        assert!(
            text.ends_with("python-1     root  runs  -             -       -\n"),
            "{text}"
        );
    }

    #[test]
    fn profile_times_out_of_range_are_refused() {
        assert_eq!(seconds("0.5"), Ok(Duration::from_millis(500)));
        for wrong in ["0", "-1", "NaN", "3601", "x"] {
            assert!(seconds(wrong).is_err(), "{wrong}");
        }
    }
}
