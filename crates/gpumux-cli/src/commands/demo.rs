//! `gpumux demo`: one program that answers requests and one batch job share a device; how long the requests take
//! when they are alone, under the driver's time slicing, and under gpumux.
//!
//! The same programs do the same work in all three rows, one row after the other. Without a GPU the device is the
//! emulated one, and the result says so.

use std::{
    env,
    io::Read,
    path::Path,
    process::{Child, Command, ExitCode, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, bail, ensure};
use gpumux_core::Class;
use gpumux_daemon::paths;
use indicatif::{ProgressBar, ProgressStyle};
use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};

use super::client;
use crate::{emulated::Server, output, units};

const EXAMPLES: &str = "\
Examples:
  gpumux demo                         needs no GPU
  gpumux demo --seconds 40            longer, for steadier numbers
  gpumux demo --json | jq '.rows[] | {mode, latency_p99_us}'

Its device, daemon and programs are its own and are gone when it ends.";

/// Show what gpumux does, on the GPU or without one on the emulated device
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// How long the demonstration may take, 10 to 600
    #[arg(long, default_value_t = 25, value_parser = units::whole(10..=600), allow_negative_numbers = true)]
    seconds: u32,
    /// Use the emulated device even where there is a GPU
    #[arg(long)]
    emulated: bool,
    /// Print one JSON object: `device` (name, emulated) and `rows` (mode, latency_p50_us, latency_p99_us, batch_rate, batch_rate_alone)
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Demo {
    device: Device,
    rows: Vec<Row>,
}

#[derive(Serialize)]
struct Device {
    name: String,
    emulated: bool,
}

#[derive(Serialize)]
struct Row {
    mode: &'static str,
    latency_p50_us: f64,
    latency_p99_us: f64,
    /// Kernels of the batch job per second.
    batch_rate: f64,
    batch_rate_alone: f64,
}

/// What the demo reads from a workload's report.
#[derive(Deserialize)]
struct Report {
    device: String,
    rate: f64,
    #[serde(default)]
    iterations: u32,
    #[serde(default)]
    p50_us: f64,
    #[serde(default)]
    p99_us: f64,
}

/// One of a request's kernels, in µs.
const REQUEST_KERNEL_US: u32 = 500;
/// Kernels in a request: so many that a busy machine's own delays count little.
const REQUEST_KERNELS: u32 = 32;
/// Time between requests in µs.
const PERIOD_US: u32 = 40_000;
/// One of the batch job's kernels in µs. It fills the device.
const BATCH_KERNEL_US: u32 = 15_000;

/// A workload may take so much longer than asked: making contexts, measuring its kernel.
const SLACK: Duration = Duration::from_secs(30);
/// How long what we started may take to be ready or to end.
const PATIENCE: Duration = Duration::from_secs(10);

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let shared = !args.emulated && Server::here().is_some();
    let emulated = args.emulated
        || Server::here().is_some()
        || !gpumux_cuda::Device::count().is_ok_and(|count| count > 0);
    if shared || !emulated {
        refuse_company()?;
    }
    // Where this is allowed, a busy machine's other programs then disturb all three rows less.
    let _ = rustix::process::setpriority_process(None, -10);
    let bar = progress(args.seconds);
    let demo = play(args.seconds, emulated, shared, &bar);
    bar.finish_and_clear();
    let demo = demo?;
    match args.json {
        true => output::json(&demo)?,
        false => output::print(&text(&demo))?,
    }
    Ok(ExitCode::SUCCESS)
}

/// A device has one daemon, and each round of a demo has its own.
fn refuse_company() -> anyhow::Result<()> {
    let Ok(status) = client::block(async |client| client.status().await) else {
        return Ok(());
    };
    bail!(
        "the daemon in {} (pid {}) has the GPU, and a demo has a daemon of its own: end that one with `kill {}`, or use --emulated",
        status.runtime_dir,
        status.pid,
        status.pid
    );
}

fn progress(seconds: u32) -> ProgressBar {
    if !output::watched() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{bar:30} {msg}").expect("a template");
    let bar = ProgressBar::new(u64::from(seconds) * 1000).with_style(style);
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}

/// Rounds of all modes, one after the other. What disturbs the machine for a moment then disturbs one round, and
/// the median of the rounds does not show it.
const ROUNDS: u32 = 3;

/// What one round found: of the requests and of the batch job.
struct Round {
    alone: (Report, Report),
    sliced: (Report, Report),
    managed: (Report, Report),
}

fn play(seconds: u32, emulated: bool, shared: bool, bar: &ProgressBar) -> anyhow::Result<Demo> {
    // A round has three long measurements and one half as long. The rest is what starting everything takes.
    let long = (f64::from(seconds) - 4.0) / f64::from(ROUNDS) / 3.5;
    let mut done = 0.0;
    let mut next = |seconds: f64, message: &'static str| {
        bar.set_message(message);
        if !output::watched() {
            // In a pipe or in CI there is no bar.
            eprintln!("gpumux: {message}");
        }
        bar.set_position((done * 1000.0) as u64);
        done += seconds;
    };

    next(1.0, "measuring the kernels");
    let stage = Stage::set(emulated, shared)?;
    let load = format!("latency --kernels {REQUEST_KERNELS} --period-us {PERIOD_US} --jitter 0.5");
    let requests = Program::new(&stage, Class::Latency, &load, REQUEST_KERNEL_US)?;
    let batch = Program::new(&stage, Class::Batch, "batch --in-flight 2", BATCH_KERNEL_US)?;
    let _daemon = stage.start_daemon()?;
    let mut rounds = Vec::new();
    for n in 0..ROUNDS {
        next(long, "requests alone");
        let alone = stage.start(&requests, long, None, None)?.finish()?;
        next(long / 2.0, "batch job alone");
        let batch_alone = stage.start(&batch, long / 2.0, None, None)?.finish()?;
        let both = |class: fn(&Program) -> Option<Class>, mode: &str| {
            let barrier = format!(
                "2:{}",
                stage.dir.path().join(format!("{mode}{n}")).display()
            );
            let start = |program| stage.start(program, long, class(program), Some(&barrier));
            let (requests, batch) = (start(&requests)?, start(&batch)?);
            anyhow::Ok((requests.finish()?, batch.finish()?))
        };
        next(long, "together, under the driver's time slicing");
        let sliced = both(|_| None, "sliced")?;
        next(long, "together, under gpumux");
        let managed = both(|program| Some(program.class), "managed")?;
        rounds.push(Round {
            alone: (alone, batch_alone),
            sliced,
            managed,
        });
        next(1.0 / f64::from(ROUNDS), "");
    }

    let device = Device {
        name: requests.device,
        emulated,
    };
    let row = |mode, of: fn(&Round) -> &(Report, Report)| Row {
        mode,
        latency_p50_us: median(&rounds, |round| of(round).0.p50_us),
        latency_p99_us: median(&rounds, |round| of(round).0.p99_us),
        batch_rate: median(&rounds, |round| of(round).1.rate),
        batch_rate_alone: median(&rounds, |round| round.alone.1.rate),
    };
    let rows = vec![
        row("alone", |round| &round.alone),
        row("time-slicing", |round| &round.sliced),
        row("gpumux", |round| &round.managed),
    ];
    Ok(Demo { device, rows })
}

fn median(rounds: &[Round], value: impl Fn(&Round) -> f64) -> f64 {
    let mut values: Vec<f64> = rounds.iter().map(value).collect();
    values.sort_unstable_by(f64::total_cmp);
    values[values.len() / 2]
}

/// One of the two programs, with its kernel's work measured once so that it does the same in all modes.
struct Program {
    arguments: Vec<String>,
    class: Class,
    device: String,
}

impl Program {
    fn new(stage: &Stage, class: Class, load: &str, kernel_us: u32) -> anyhow::Result<Self> {
        let mut arguments: Vec<String> = load.split(' ').map(str::to_owned).collect();
        let mut command = stage.gpumux()?;
        command.args(["workload", "--json"]).args(&arguments);
        command.args(["--calibrate", "--kernel-us", &kernel_us.to_string()]);
        let report = Background::start(command)?.report(SLACK)?;
        arguments.extend(["--iterations".into(), report.iterations.to_string()]);
        Ok(Self {
            arguments,
            class,
            device: report.device,
        })
    }
}

/// A folder, and the emulated device in it if that is what is used.
struct Stage {
    dir: tempfile::TempDir,
    device: Option<Server>,
}

impl Stage {
    fn set(emulated: bool, shared: bool) -> anyhow::Result<Self> {
        let dir = tempfile::Builder::new().prefix("gpumux-demo-").tempdir()?;
        let device = match (emulated, Server::here().filter(|_| shared)) {
            (false, _) => None,
            (true, Some(server)) => Some(server),
            (true, None) => Some(Server::start(dir.path(), Vec::new())?),
        };
        Ok(Self { dir, device })
    }

    /// `gpumux` with this stage's device as its GPU.
    fn gpumux(&self) -> anyhow::Result<Command> {
        let mut command = Command::new(env::current_exe()?);
        command
            .env("GPUMUX_RUNTIME_DIR", self.dir.path())
            .stdin(Stdio::null());
        if let Some(device) = &self.device {
            device.enter(&mut command)?;
        }
        Ok(command)
    }

    fn start_daemon(&self) -> anyhow::Result<Background> {
        let mut command = self.gpumux()?;
        // The limit is for the case that the demo is killed.
        command
            .args(["daemon", "--idle-exit", "60"])
            .env("GPUMUX_LOG", "warn");
        let mut daemon = Background::start(command)?;
        daemon.wait_for(&paths::api_socket(self.dir.path()))?;
        Ok(daemon)
    }

    /// Starts a program: as a tenant if it has a class, and at the barrier if there is one.
    fn start(
        &self,
        program: &Program,
        seconds: f64,
        class: Option<Class>,
        barrier: Option<&str>,
    ) -> anyhow::Result<Running> {
        let mut command = self.gpumux()?;
        if let Some(class) = class {
            command.args(["run", "--strict", "--class", class.name(), "--"]);
            command.arg(env::current_exe()?);
        }
        command
            .args(["workload", "--json"])
            .args(&program.arguments);
        command.args(["--seconds", &seconds.to_string()]);
        command.args(
            barrier
                .into_iter()
                .flat_map(|barrier| ["--barrier", barrier]),
        );
        let limit = Duration::from_secs_f64(seconds) + SLACK;
        Ok(Running {
            process: Background::start(command)?,
            limit,
        })
    }
}

/// A workload that will end by itself.
struct Running {
    process: Background,
    limit: Duration,
}

impl Running {
    fn finish(self) -> anyhow::Result<Report> {
        self.process.report(self.limit)
    }
}

/// A process that is gone when this is dropped.
struct Background(Child);

impl Background {
    fn start(mut command: Command) -> anyhow::Result<Self> {
        let child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn();
        Ok(Self(child.context("cannot start gpumux")?))
    }

    fn wait_for(&mut self, socket: &Path) -> anyhow::Result<()> {
        let started = Instant::now();
        while std::os::unix::net::UnixStream::connect(socket).is_err() {
            if self.0.try_wait()?.is_some() {
                bail!("it ended: {}", self.errors());
            }
            ensure!(
                started.elapsed() < PATIENCE,
                "it was not ready within {PATIENCE:?}"
            );
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// Waits for its end and reads its report. (The report fits into the pipe.)
    fn report(mut self, limit: Duration) -> anyhow::Result<Report> {
        let started = Instant::now();
        let status = loop {
            if let Some(status) = self.0.try_wait()? {
                break status;
            }
            ensure!(
                started.elapsed() < limit,
                "a workload did not end within {limit:?}"
            );
            std::thread::sleep(Duration::from_millis(5));
        };
        let mut text = String::new();
        if let Some(out) = &mut self.0.stdout {
            out.read_to_string(&mut text)?;
        }
        if !status.success() {
            bail!(
                "a workload failed ({status}): {}{}",
                self.errors(),
                text.trim()
            );
        }
        serde_json::from_str(&text).with_context(|| format!("a workload's report: {text}"))
    }

    fn errors(&mut self) -> String {
        let mut text = String::new();
        if let Some(err) = &mut self.0.stderr {
            let _ = err.read_to_string(&mut text);
        }
        text
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        if matches!(self.0.try_wait(), Ok(Some(_))) {
            return;
        }
        // In good order if it can: the daemon thaws all tenants.
        let _ = kill_process(Pid::from_child(&self.0), Signal::TERM);
        let asked = Instant::now();
        while matches!(self.0.try_wait(), Ok(None)) && asked.elapsed() < PATIENCE {
            std::thread::sleep(Duration::from_millis(5));
        }
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn text(demo: &Demo) -> String {
    let Device { name, emulated } = &demo.device;
    let mut rows = output::head("|p50|p99|p99 / alone|batch job");
    let alone = demo.rows[0].latency_p99_us;
    for row in &demo.rows {
        rows.push(vec![
            row.mode.to_owned(),
            format!("{:.2} ms", row.latency_p50_us / 1e3),
            format!("{:.2} ms", row.latency_p99_us / 1e3),
            format!("{:.2}", row.latency_p99_us / alone),
            format!("{:.0}%", 100.0 * row.batch_rate / row.batch_rate_alone),
        ]);
    }
    let request_us = REQUEST_KERNEL_US * REQUEST_KERNELS;
    let mut text = format!("{name}\n");
    if *emulated {
        text += "This is the emulated device: its times come from a model, not from a GPU.\n";
    }
    text += &format!(
        "Requests of {} ms of work every {} ms; beside them a batch job of {} ms kernels that never stops,\n\
         for which the requests leave {:.0}% of the device.\n\n",
        request_us / 1000,
        PERIOD_US / 1000,
        BATCH_KERNEL_US / 1000,
        100.0 * (1.0 - f64::from(request_us) / f64::from(PERIOD_US)),
    );
    text + &output::table(&rows)
}
