//! The workloads' command line.

use std::{
    path::PathBuf,
    str::FromStr,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use clap::Subcommand;

use crate::{gate::Gate, report::Report};

/// The workloads' command line.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "Examples:
  gpumux workload latency --period-us 5000 --kernels 10 --kernel-us 10
  gpumux workload latency --rate 200 --poisson --graph --json
  gpumux workload batch --kernel-us 10000 --in-flight 2 --memory 1GiB
  gpumux workload batch --kernel-us 10000 --calibrate
  gpumux workload batch --read 16 --memory 256MiB
  gpumux workload check --memory 256MiB --seconds 2
  gpumux workload sweep --memory 64MiB --passes 3 --churn 4MiB

SIGTERM or SIGINT ends a workload with its report, a second one at once.
The exit code is 1 after a driver error or a wrong result.")]
pub struct Args {
    /// Which workload.
    #[command(subcommand)]
    pub command: Command,
    /// Print the result as one JSON object
    #[arg(long, global = true)]
    pub json: bool,
}

/// One workload.
#[derive(Clone, Debug, Subcommand)]
pub enum Command {
    /// Requests of a few kernels each, at given times; measures each request
    Latency(Latency),
    /// Fixed-work kernels back to back; measures their rate
    Batch(Batch),
    /// One long kernel over much memory; verifies every element
    Check(Check),
    /// A random program that allocates, writes, launches, captures and frees; verifies every byte
    Memory(Memory),
    /// Passes over much memory, one after another, that change and verify every element; measures each pass
    Sweep(Sweep),
    /// Empty kernels as fast as they can be launched; measures the launch call
    Launch(Launch),
    /// Holds a context and memory, and does nothing
    #[command(alias = "sleep")]
    Idle(Idle),
    /// Works for a while, then faults: traps, writes to no memory, exits at work, or takes all memory
    Fault(Fault),
    /// Hints that no work follows: from many threads, during captures, after forks; counts those that took the device
    Hints(Hints),
    /// Batches of single driver calls, at orders on standard input; measures the calls
    Calls(Calls),
    /// Several tasks in one process, in one context or in two, that take orders on standard input and answer each
    Tasks(Tasks),
    /// What a switch between two programs consists of: requests, or a neighbour that fills the device, with the device's stamps of both
    Switch(Switch),
}

/// What all workloads have in common.
#[derive(Clone, Debug, clap::Args)]
pub struct Common {
    /// Name in the report [default: the workload's]
    #[arg(long)]
    pub name: Option<String>,
    /// Ordinal of the CUDA device
    #[arg(long, default_value_t = 0)]
    pub device: u32,
    /// Length of the measurement in seconds
    #[arg(long, value_name = "S", default_value = "5", value_parser = seconds)]
    pub seconds: Duration,
    /// Device memory to hold, such as 512MiB
    #[arg(long, value_name = "BYTES", value_parser = bytes)]
    pub memory: Option<usize>,
    #[command(flatten)]
    /// When to begin.
    pub gate: Gate,
}

/// The fixed-work kernel.
#[derive(Clone, Debug, clap::Args)]
pub struct Work {
    /// Duration of one kernel alone in µs, measured at the start [default: 10 for latency, 10000 for batch]
    #[arg(long, value_name = "US", value_parser = microseconds)]
    pub kernel_us: Option<Duration>,
    /// Work per thread instead of a duration: no measurement, the same for several processes
    #[arg(long, conflicts_with = "kernel_us")]
    pub iterations: Option<u32>,
    /// Blocks in the grid [default: one per multiprocessor for latency, two for batch]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub blocks: Option<u32>,
    /// Threads in a block [default: 256 for latency, 1024 for batch]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub threads: Option<u32>,
    /// Only measure and report the iterations for --kernel-us
    #[arg(long, conflicts_with = "iterations")]
    pub calibrate: bool,
    /// How to wait for the device
    #[arg(long, value_enum, default_value_t)]
    pub wait: Wait,
    /// End after so many requests or kernels
    #[arg(long, visible_alias = "requests", value_name = "N")]
    pub calls: Option<u64>,
}

/// How to wait for the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Wait {
    /// Poll: precise, keeps a core busy
    Spin,
    /// Sleep until the device's interrupt
    #[default]
    Block,
}

impl From<Wait> for gpumux_cuda::Wait {
    fn from(wait: Wait) -> Self {
        match wait {
            Wait::Spin => Self::Spin,
            Wait::Block => Self::Block,
        }
    }
}

/// `latency`.
#[derive(Clone, Debug, clap::Args)]
pub struct Latency {
    /// What all have.
    #[command(flatten)]
    pub common: Common,
    /// The kernel.
    #[command(flatten)]
    pub work: Work,
    /// Kernels in a request
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    pub kernels: u32,
    /// Mean time between arrivals in µs
    #[arg(long, value_name = "US", default_value = "5000", value_parser = microseconds)]
    pub period_us: Duration,
    /// Mean arrivals per second, instead of --period-us
    #[arg(long, value_name = "HZ", conflicts_with = "period_us", value_parser = rate)]
    pub rate: Option<Duration>,
    /// Poisson arrivals instead of periodic ones
    #[arg(long)]
    pub poisson: bool,
    /// Spread periodic gaps by up to this fraction of the period (0 to 1)
    #[arg(long, default_value_t = 0.0, value_parser = fraction, conflicts_with = "poisson")]
    pub jitter: f64,
    /// Seed of the arrivals
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Measure from the arrival, not from the first launch (or the end of the preparation): includes waiting for the request before
    #[arg(long)]
    pub from_arrival: bool,
    /// Submit each request as one CUDA graph
    #[arg(long)]
    pub graph: bool,
    /// Copy so many bytes of input to the device at the start of each request
    #[arg(long, value_name = "BYTES", value_parser = bytes)]
    pub copy: Option<usize>,
    /// Prepare each request on the CPU for so long before its copy and launches; not part of its latency
    #[arg(long, value_name = "US", value_parser = microseconds)]
    pub prepare_us: Option<Duration>,
    /// Tell gpumux at the start of each preparation that work is coming
    #[arg(long, value_enum)]
    pub hint: Option<Hint>,
    /// The tenant to name in hints from outside
    #[arg(long, value_name = "NAME", required_if_eq("hint", "outside"))]
    pub hint_tenant: Option<String>,
    /// gpumux's API socket, for hints from outside
    #[arg(long, value_name = "PATH", required_if_eq("hint", "outside"))]
    pub hint_api: Option<PathBuf>,
}

/// How a program says that its work is coming.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Hint {
    /// By the function of the preloaded library
    Manual,
    /// Through the daemon's API, as another program would
    Outside,
}

/// `batch`.
#[derive(Clone, Debug, clap::Args)]
pub struct Batch {
    /// What all have.
    #[command(flatten)]
    pub common: Common,
    /// The kernel.
    #[command(flatten)]
    pub work: Work,
    /// Kernels submitted and not yet done, at most
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub in_flight: u32,
    /// Read all of --memory so often with each kernel, instead of computing
    #[arg(long, value_name = "TIMES", requires = "memory", conflicts_with_all = ["kernel_us", "iterations", "blocks", "threads", "calibrate"])]
    pub read: Option<u32>,
    /// Undo what gpumux sets for the program's channel groups: what a hostile tenant can do. Under `gpumux run` only
    #[arg(long, value_enum, value_delimiter = ',')]
    pub tamper: Vec<Tamper>,
    /// Time between two rounds of --tamper in µs
    #[arg(long, value_name = "US", default_value = "5000", value_parser = microseconds)]
    pub tamper_every_us: Duration,
}

/// What a program undoes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Tamper {
    /// It sets its timeslice to 1 s
    Timeslice,
    /// It thaws itself
    Thaw,
}

/// `check`.
#[derive(Clone, Debug, clap::Args)]
pub struct Check {
    /// What all have.
    #[command(flatten)]
    pub common: Common,
    /// Rounds over the memory instead of --seconds
    #[arg(long)]
    pub rounds: Option<u32>,
}

/// `memory`.
#[derive(Clone, Debug, clap::Args)]
pub struct Memory {
    /// What all have.
    #[command(flatten)]
    pub common: Common,
    /// Which program
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Steps of the program instead of --seconds
    #[arg(long)]
    pub steps: Option<u64>,
    /// Take the numbers that decide from this file instead: one step a line. At some steps it writes a line and goes on when it has read one
    #[arg(long, value_name = "FILE", conflicts_with = "steps")]
    pub script: Option<PathBuf>,
    /// Reserve addresses and map physical memory for most of it, as PyTorch's expandable segments do
    #[arg(long)]
    pub mapped: bool,
}

/// `sweep`.
#[derive(Clone, Debug, clap::Args)]
pub struct Sweep {
    /// What all have.
    #[command(flatten)]
    pub common: Common,
    /// Passes instead of --seconds
    #[arg(long, value_name = "N")]
    pub passes: Option<u64>,
    /// Take the memory in allocations of this size instead of one
    #[arg(long, value_name = "BYTES", value_parser = bytes)]
    pub piece: Option<usize>,
    /// Besides, allocate so much in each pass, write and verify it, and free it
    #[arg(long, value_name = "BYTES", value_parser = bytes)]
    pub churn: Option<usize>,
}

/// `launch`.
#[derive(Clone, Debug, clap::Args)]
pub struct Launch {
    /// What all have.
    #[command(flatten)]
    pub common: Common,
}

/// `idle`.
#[derive(Clone, Debug, clap::Args)]
pub struct Idle {
    /// What all have.
    #[command(flatten)]
    pub common: Common,
    /// Device memory to hold besides, which is given back when gpumux asks for it
    #[arg(long, value_name = "BYTES", value_parser = bytes)]
    pub cache: Option<usize>,
    /// Map the memory from physical memory of so many bytes each (cuMemCreate) instead of one allocation
    #[arg(long, value_name = "BYTES", value_parser = bytes, requires = "memory")]
    pub chunk: Option<usize>,
}

/// `fault`.
#[derive(Clone, Debug, clap::Args)]
pub struct Fault {
    /// What all have.
    #[command(flatten)]
    pub common: Common,
    /// What it does
    #[arg(long, value_enum, default_value_t)]
    pub kind: FaultKind,
}

/// What a program should not do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum FaultKind {
    /// A kernel traps
    #[default]
    Trap,
    /// A kernel asserts what is false
    Assert,
    /// A kernel writes to an address without memory
    IllegalAddress,
    /// A kernel runs for an hour
    Endless,
    /// It exits while a kernel runs
    Exit,
    /// It takes memory until there is no more
    OutOfMemory,
}

/// `hints`.
#[derive(Clone, Debug, clap::Args)]
pub struct Hints {
    /// What all have.
    #[command(flatten)]
    pub common: Common,
    /// Threads that hint at once
    #[arg(long, default_value_t = 100)]
    pub threads: u32,
}

/// `calls`.
#[derive(Clone, Debug, clap::Args)]
pub struct Calls {
    /// Ordinal of the CUDA device
    #[arg(long, default_value_t = 0)]
    pub device: u32,
    /// Threads that call at the same time
    #[arg(long, default_value = "1", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub threads: u32,
}

/// `switch`.
#[derive(Clone, Debug, clap::Args)]
pub struct Switch {
    /// What all have.
    #[command(flatten)]
    pub common: Common,
    /// Be the neighbour: kernels back to back
    #[arg(long)]
    pub neighbour: bool,
    /// How long a kernel of the neighbour runs, in µs
    #[arg(long, value_name = "US", default_value = "1000", value_parser = microseconds)]
    pub kernel_us: Duration,
    /// Registers that each of its threads has in use besides a dozen
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u32).range(..=200))]
    pub registers: u32,
    /// Its blocks on each multiprocessor, of 256 threads each
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=8))]
    pub blocks: u32,
    /// Shared memory of each of its blocks, 48KiB at most
    #[arg(long, value_name = "BYTES", value_parser = bytes)]
    pub shared: Option<usize>,
    /// When its kernels may be interrupted [default: as the driver set it]. Under `gpumux run` only
    #[arg(long, value_enum)]
    pub preemption: Option<Preemption>,
    /// How long a request takes alone, in µs
    #[arg(long, value_name = "US", default_value = "300", value_parser = microseconds)]
    pub request_us: Duration,
    /// Memory that a request reads, again and again
    #[arg(long, value_name = "BYTES", default_value = "8MiB", value_parser = bytes)]
    pub touch: usize,
    /// Mean time from the end of a request to the next, in µs
    #[arg(long, value_name = "US", default_value = "3000", value_parser = microseconds)]
    pub period_us: Duration,
    /// How to wait for the device
    #[arg(long, value_enum, default_value_t)]
    pub wait: Wait,
}

/// When a running kernel may be interrupted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Preemption {
    /// Between any two instructions
    Instruction,
    /// After the running thread blocks
    ThreadBlock,
    /// After the kernel
    WaitForIdle,
}

impl From<Preemption> for gpumux_rm::PreemptionMode {
    fn from(mode: Preemption) -> Self {
        match mode {
            Preemption::Instruction => Self::Instruction,
            Preemption::ThreadBlock => Self::ThreadBlock,
            Preemption::WaitForIdle => Self::WaitForIdle,
        }
    }
}

/// `tasks`.
#[derive(Clone, Debug, clap::Args)]
pub struct Tasks {
    /// The tasks: name, kernels in a request, µs of a kernel alone, and whether it is latency-critical
    #[arg(required = true, value_name = "NAME=KERNELSxUS=high|low")]
    pub tasks: Vec<Task>,
    /// Ordinal of the CUDA device
    #[arg(long, default_value_t = 0)]
    pub device: u32,
    /// Two contexts, as GPreempt has: high tasks are streams of the first, low ones of the second
    #[arg(long)]
    pub two_contexts: bool,
    /// What one more iteration of a kernel takes, instead of a measurement at the start: the same for several processes
    #[arg(long, value_name = "US")]
    pub us_per_iteration: Option<f64>,
}

/// `NAME=KERNELSxUS=high` or `…=low`: one task, whose requests are so many kernels of so many µs.
#[derive(Clone, Debug, PartialEq)]
pub struct Task {
    /// What orders call it.
    pub name: String,
    /// Kernels in a request.
    pub kernels: u32,
    /// What one takes alone, in µs.
    pub kernel_us: f64,
    /// Whether it is latency-critical.
    pub high: bool,
}

impl FromStr for Task {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong =
            || format!("`{text}` is not a task: use NAME=KERNELSxUS=high or NAME=KERNELSxUS=low");
        let [name, work, priority] = text.split('=').collect::<Vec<_>>()[..] else {
            return Err(wrong());
        };
        let (kernels, us) = work.split_once('x').ok_or_else(wrong)?;
        Ok(Self {
            name: name.to_owned(),
            kernels: kernels
                .parse()
                .ok()
                .filter(|it| *it > 0)
                .ok_or_else(wrong)?,
            kernel_us: us
                .parse()
                .ok()
                .filter(|it| *it > 0.0 && *it < 1e6)
                .ok_or_else(wrong)?,
            high: match priority {
                "high" => true,
                "low" => false,
                _ => return Err(wrong()),
            },
        })
    }
}

pub(crate) fn stopped(stop: &AtomicBool) -> bool {
    stop.load(Ordering::Relaxed)
}

impl Common {
    pub(crate) fn report(&self, workload: &'static str, device: &str) -> Report {
        Report {
            workload,
            name: self.name.clone().unwrap_or_else(|| workload.to_owned()),
            device: device.to_owned(),
            ..Report::default()
        }
    }
}

fn positive(text: &str, unit_s: f64) -> Result<Duration, String> {
    text.parse()
        .ok()
        .map(|value: f64| value * unit_s)
        .and_then(|s| Duration::try_from_secs_f64(s).ok())
        .ok_or_else(|| format!("`{text}` is not a duration: use a number such as 10"))
}

fn seconds(text: &str) -> Result<Duration, String> {
    positive(text, 1.0)
}

fn microseconds(text: &str) -> Result<Duration, String> {
    positive(text, 1e-6).and_then(|it| {
        (!it.is_zero())
            .then_some(it)
            .ok_or_else(|| "must be more than 0".to_owned())
    })
}

fn rate(text: &str) -> Result<Duration, String> {
    text.parse()
        .ok()
        .filter(|hz: &f64| *hz > 0.0)
        .and_then(|hz| Duration::try_from_secs_f64(1.0 / hz).ok())
        .ok_or_else(|| format!("`{text}` is not a rate: use a number above 0, such as 200"))
}

fn fraction(text: &str) -> Result<f64, String> {
    text.parse()
        .ok()
        .filter(|it| (0.0..=1.0).contains(it))
        .ok_or_else(|| format!("`{text}` is not a fraction: use a number from 0 to 1"))
}

/// Bytes, with an optional suffix KiB, MiB or GiB (or K, M, G for the same).
fn bytes(text: &str) -> Result<usize, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let factor = match &text[digits.len()..] {
        "" | "B" => 1,
        "K" | "KiB" => 1 << 10,
        "M" | "MiB" => 1 << 20,
        "G" | "GiB" => 1 << 30,
        _ => 0,
    };
    digits
        .trim()
        .parse()
        .ok()
        .and_then(|number: usize| number.checked_mul(factor))
        .filter(|bytes| *bytes > 0)
        .ok_or_else(|| format!("`{text}` is not an amount of memory: use such as 512MiB"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: Args,
    }

    fn parse(line: &str) -> Result<Command, clap::Error> {
        Cli::try_parse_from(["workload"].into_iter().chain(line.split_whitespace()))
            .map(|cli| cli.args.command)
    }

    #[test]
    fn command_line_is_consistent() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }

    #[test]
    fn quantities_are_read_with_their_units() {
        let Command::Latency(latency) =
            parse("latency --rate 200 --kernel-us 12.5 --memory 3MiB --seconds 0.5").unwrap()
        else {
            panic!("not latency");
        };
        assert_eq!(latency.rate, Some(Duration::from_millis(5)));
        assert_eq!(latency.work.kernel_us, Some(Duration::from_nanos(12_500)));
        assert_eq!(latency.common.memory, Some(3 << 20));
        assert_eq!(latency.common.seconds, Duration::from_millis(500));
    }

    #[test]
    fn wrong_arguments_are_refused() {
        for line in [
            "latency --rate 0",
            "latency --rate -1",
            "latency --period-us 0",
            "latency --period-us nan",
            "latency --jitter 1.5",
            "latency --poisson --jitter 0.5",
            "latency --kernels 0",
            "latency --seconds -1",
            "latency --memory 5parsecs",
            "latency --memory 99999999999999G",
            "batch --threads 2048",
            "batch --in-flight 0",
            "batch --iterations 5 --kernel-us 10",
            "batch --iterations 5 --calibrate",
            "check --barrier 3",
        ] {
            assert!(parse(line).is_err(), "{line}");
        }
    }
}
