//! `gpumux run`: makes a tenant and becomes its first process.
//!
//! `run` asks the daemon for a tenant, and then turns into the program: pid, signals,
//! terminal, job control and exit status are the program's own. Detached, or with
//! `--restart`, it stays the program's parent (`supervise`); at a terminal, a process beside it waits for its end (`notice`).

use std::{
    env,
    ffi::OsString,
    fs::File,
    io::Read,
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::{Command, ExitCode, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use clap::builder::{PossibleValuesParser, TypedValueParser};
use gpumux_core::space::{Sharing, Way, is_point};
use gpumux_daemon::{
    api::types::{Created, NewTenant, Placement, SpecChange},
    client::ClientError,
    paths,
};
use gpumux_wire::{FRAMEWORKS_VARIABLE, MEMORY_LIMIT_VARIABLE, RANKS_VARIABLE, keeper};

use super::{
    become_program, client, notice,
    spec::SpecArgs,
    supervise::{Order, supervise},
};
use crate::{
    background, elf, fingerprint,
    frameworks::{self, Frameworks},
    keeper::Keeper,
    libraries,
    logs::{self, Log},
    names, output, units,
};

/// The variable that tells CUDA programs which devices to use.
const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";
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
  gpumux run --guaranteed 70% -- ./solver
  gpumux run --gpu 0 --guaranteed 70% -- ./solver
  gpumux run --memory-guaranteed 8GiB --memory-limit 40GiB -- python train.py
  gpumux run --sleep-after 30s -- python serve.py
  gpumux run -d -- python train.py    in the background: see `gpumux logs train`
  gpumux run --strict -- ./job        refuse to run unmanaged
  gpumux run --trust team --class batch -- python train.py     beside others of team, at the same time
  gpumux run --trust team --ranks-per-gpu 2 -- torchrun --nproc-per-node 4 train.py     4 on 2 GPUs
  gpumux run --trust team --restart on-collateral --keep-memory -- python train.py

The program and all that it starts are one tenant. If no daemon runs, one is started in the \
background; it ends by itself when it has had no tenants for a minute. If none can be started, \
the program runs unmanaged, with one line of warning; with --strict it does not run.

Exit codes:
  125  admission rejected (guarantees exceed a GPU), a name in use; with --strict also: no daemon
  126  the program cannot be executed
  127  the program was not found
  else the program's own (a shell shows 128 + N for signal N)

Environment given to the program: LD_PRELOAD (libgpumux.so is put first), GPUMUX_SOCKET, \
GPUMUX_TENANT and, with --strict, GPUMUX_STRICT=1; in a group also CUDA_MPS_PIPE_DIRECTORY and \
CUDA_MPS_LOG_DIRECTORY, CUDA_MPS_CLIENT_PRIORITY (0 in class latency, else 1), and \
CUDA_MPS_ACTIVE_THREAD_PERCENTAGE if it has a limit there; with \
--memory-limit GPUMUX_MEMORY_LIMIT, by which programs see it before they use the device; with --keep-memory \
GPUMUX_KEEPER; with --gpu \
CUDA_VISIBLE_DEVICES and, where these are numbers, CUDA_DEVICE_ORDER=PCI_BUS_ID. For Python, its launchers \
and scripts also XLA_PYTHON_CLIENT_PREALLOCATE=false (JAX), TF_FORCE_GPU_ALLOW_GROWTH=true (TensorFlow) and \
NCCL_PROFILER_PLUGIN (libgpumux.so); in a group NCCL_MAX_CTAS, if others leave less than NCCL's own; with --ranks-per-gpu \
GPUMUX_RANKS_PER_GPU, CUDA_VISIBLE_DEVICES, NCCL_MAX_CTAS, NCCL_MULTI_RANK_GPU_ENABLE=1 and NCCL_NVLS_ENABLE=0. What the user has set for the same stays, but for CUDA_MPS_* in a group; \
one line names what was set.";

/// Run a program as a tenant
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// The tenant's name; without it, that of the script, module or program, numbered where it is in use
    #[arg(long, value_parser = units::name)]
    name: Option<String>,
    /// Run in the background: prints the tenant's name; `gpumux logs` shows the output
    #[arg(short, long)]
    detach: bool,
    #[command(flatten)]
    spec: SpecArgs,
    /// GPUs that it may use, and that its guarantees hold on: numbers as nvidia-smi has them, UUIDs, or all [default: those of CUDA_VISIBLE_DEVICES, else all]
    #[arg(long, value_name = "GPU,…", value_delimiter = ',', value_parser = units::device)]
    gpu: Vec<String>,
    /// Trust domain: tenants of yours that name the same one may share the SMs at the same time; a crash of one then ends all of them
    #[arg(long, value_name = "NAME", value_parser = units::name)]
    trust: Option<String>,
    /// time: a context of its own, which shares the GPU in time; space: the group of its trust domain; auto: what serves it best, without a trust domain always time
    #[arg(long, value_parser = sharing(), default_value = Sharing::default().name())]
    sharing: Sharing,
    /// The program's scaling profile: throughput (in any unit) by percentage of the SMs, such as 25:0.7,50:0.9,100:1. An MPS group's SMs are divided for the largest sum of throughputs
    #[arg(long, value_name = "PERCENT:RATE,…", value_delimiter = ',', value_parser = point)]
    utility: Vec<(u32, f64)>,
    /// The name under which the daemon keeps the program's scaling profile; without it, with --trust, one that is made from the command (see `gpumux profile`)
    #[arg(long, value_name = "NAME", value_parser = units::name)]
    fingerprint: Option<String>,
    /// Run the program again when another member's fault has ended it; `gpumux run` then stays its parent
    #[arg(long, value_enum, default_value_t)]
    restart: Restart,
    /// With --restart on-collateral: keep the device memory that the program names (`gpumux.kept`), so that it goes on with it when it runs again
    #[arg(long)]
    keep_memory: bool,
    /// Ranks of a job that share each GPU, where torchrun is to start more than there are GPUs: each has one of these and a part of its SMs and memory. Needs --trust and NCCL 2.30.3 or newer
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=8), requires = "trust")]
    ranks_per_gpu: u32,
    /// Whether settings of JAX, TensorFlow and NCCL are set by which programs share a GPU well, where the user has set none
    #[arg(long, value_enum, default_value_t)]
    frameworks: Frameworks,
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

/// Set for the process that stays the parent of a detached program.
const DETACHED: &str = "GPUMUX_DETACHED";
/// Ranks of a communicator on one GPU that NCCL supports (2.30.3).
const RANKS_OF_NCCL: u32 = 2;
/// Between two looks.
const MOMENT: Duration = Duration::from_millis(20);

pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    let change = args.spec.change()?;
    consistent(&args)?;
    if args.detach && env::var_os(DETACHED).is_none() {
        return detach();
    }
    let mut words = args.command.iter();
    let name = words.next().context("no program was named")?;
    if args.strict && elf::is_static_program(name) {
        bail!(
            "{} is statically linked, so that libgpumux.so cannot be loaded into it: with --strict it does not run",
            name.display()
        );
    }
    let mut program = Command::new(name);
    program.args(words).env_remove(DETACHED);
    let (tenant, shim) = match enter(&args, change, &mut program) {
        Ok(entered) => entered,
        Err(Failure::Refused(error)) => return Err(error.into()),
        Err(Failure::Unmanaged(error)) if args.strict || args.detach || args.ranks_per_gpu > 1 => {
            let flag = match (args.strict, args.detach) {
                (true, _) => "--strict",
                (_, true) => "--detach",
                // Its ranks would ask for GPUs that are not there.
                _ => "--ranks-per-gpu",
            };
            return Err(error.context(flag));
        }
        Err(Failure::Unmanaged(error)) => {
            let why = output::with_causes(&error);
            eprintln!("gpumux: {why}; the program runs unmanaged");
            return Ok(become_program(program));
        }
    };
    if args.ranks_per_gpu > 1 && tenant.placement.way == Way::Time {
        bail!(
            "{} ranks on each GPU must run at the same time, in the group of a trust domain, but {} gets a context of its own: {}",
            args.ranks_per_gpu,
            tenant.name,
            tenant.placement.reason
        );
    }
    let frameworks = match args.frameworks {
        Frameworks::Adapt => {
            let python = names::may_run_python(&args.command) || elf::is_script(name);
            frameworks::set(&mut program, python, &shim, &tenant.placement)
        }
        Frameworks::Leave => {
            program.env(FRAMEWORKS_VARIABLE, "leave");
            None
        }
    };
    for line in notes(&args, &tenant).into_iter().chain(frameworks) {
        eprintln!("gpumux: {line}");
    }
    // Only a member of a group can be ended by another member's fault.
    let in_group = tenant.placement.way == Way::Space;
    let again = args.restart == Restart::OnCollateral && in_group;
    if !again && !args.detach {
        notice::follow(&tenant.name);
        return Ok(become_program(program));
    }
    let keeper = match again && args.keep_memory {
        true => {
            let keeper = Keeper::start(&mut program, tenant.token.clone());
            Some(keeper.context("cannot keep the program's memory over a fault")?)
        }
        false => None,
    };
    let log = match args.detach {
        true => {
            let file = logs::file(&logs::folder()?, &tenant.name);
            let why = format!(
                "cannot keep the output of the program in {}: set XDG_STATE_HOME to a folder that takes files",
                file.display()
            );
            Some(Log::begin(file).context(why)?)
        }
        false => None,
    };
    let started: Option<Box<dyn FnOnce()>> = match &log {
        None => None,
        Some(log) => {
            let (file, name) = (log.try_clone_file()?, tenant.name.clone());
            Some(Box::new(move || leave_terminal(&name, &file)))
        }
    };
    Ok(supervise(Order {
        program,
        tenant: &tenant.name,
        again,
        keeper,
        log,
        started,
    }))
}

/// Refuses flags that cannot go together, whatever the daemon decides.
fn consistent(args: &Args) -> Result<(), units::Usage> {
    let wrong = if args.keep_memory && args.restart == Restart::Never {
        "--keep-memory needs --restart on-collateral: without it no program runs again"
    } else if args.ranks_per_gpu > 1 && args.sharing == Sharing::Time {
        "--ranks-per-gpu needs the group of --trust, but --sharing time gives a context of its own"
    } else {
        return Ok(());
    };
    Err(units::Usage(wrong.to_owned()))
}

/// Starts this command once more, in a session of its own, and waits until its program runs, or cannot.
fn detach() -> anyhow::Result<ExitCode> {
    logs::folder()?;
    let mut command = Command::new(env::current_exe()?);
    command
        .args(env::args_os().skip(1))
        .env(DETACHED, "1")
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    background::in_own_session(&mut command);
    let mut parent = command.spawn().context("cannot start in the background")?;
    let mut name = String::new();
    if let Some(out) = &mut parent.stdout {
        out.read_to_string(&mut name)?;
    }
    if name.is_empty() {
        // It has reported why.
        let code = parent
            .wait()?
            .code()
            .and_then(|code| u8::try_from(code).ok());
        return Ok(code.unwrap_or(super::CANNOT_START).into());
    }
    if let Err(error) = output::print(&name) {
        eprintln!(
            "gpumux: {} runs, but its name cannot be written to standard output: {error}",
            name.trim_end()
        );
    }
    Ok(ExitCode::SUCCESS)
}

/// Reports the tenant's name to the process that waits for it, and then has nothing to do with its terminal any more.
fn leave_terminal(name: &str, log: &File) {
    let _ = output::print(&format!("{name}\n"));
    let _ = rustix::stdio::dup2_stderr(log);
    let _ = rustix::stdio::dup2_stdout(log);
}

/// What a user should know of a new tenant.
fn notes(args: &Args, tenant: &Created) -> Vec<String> {
    let name = &tenant.name;
    let remembered = tenant.remembered.as_ref().map(|set| {
        format!("{name} has settings of an earlier `gpumux set`: {set}; `gpumux set --forget {name}` clears them")
    });
    let Placement { way, reason, .. } = &tenant.placement;
    let in_time = (args.sharing == Sharing::Space && *way == Way::Time)
        .then(|| format!("{name} shares the GPU in time, not in space: {reason}"));
    let needless = (args.keep_memory && *way == Way::Time).then(|| {
        format!("{name} is in no group, so no other program's fault ends it: --keep-memory keeps nothing")
    });
    // docs.nvidia.com, NCCL, "Environment Variables": NCCL_MULTI_RANK_GPU_ENABLE.
    let many = (args.ranks_per_gpu > RANKS_OF_NCCL).then(|| {
        format!(
            "NCCL supports {RANKS_OF_NCCL} ranks on a GPU, as an experiment: with {} it may come to a stop; --ranks-per-gpu {RANKS_OF_NCCL} on more GPUs is what it supports",
            args.ranks_per_gpu
        )
    });
    let spec = args.spec.change().ok().zip(tenant.spec.as_ref());
    let idle = spec.map(|(change, spec)| change.without_effect(spec));
    let all = [remembered, in_time, needless, many].into_iter().flatten();
    all.chain(idle.into_iter().flatten()).collect()
}

/// Why the program does not become a tenant.
pub(super) enum Failure {
    /// The daemon will not have it so.
    Refused(ClientError),
    /// There is no daemon to be had, or no library to preload.
    Unmanaged(anyhow::Error),
}

/// Makes the tenant and puts what its processes need into the program's environment. Also the library that is preloaded.
fn enter(
    args: &Args,
    change: SpecChange,
    program: &mut Command,
) -> Result<(Created, PathBuf), Failure> {
    let shim = libraries::find(libraries::SHIM).map_err(Failure::Unmanaged)?;
    let tenant = create(args, change)?;
    if args.gpu.iter().any(|gpu| gpu == "all") {
        program.env_remove(VISIBLE);
    }
    equip(program, tenant.clone(), &shim);
    if args.strict {
        program.env("GPUMUX_STRICT", "1");
    }
    if args.ranks_per_gpu > 1 {
        // One of the caller's would make the job's own process a rank.
        program.env_remove("LOCAL_RANK");
        program.env(RANKS_VARIABLE, args.ranks_per_gpu.to_string());
    }
    Ok((tenant, shim))
}

/// Puts what a tenant's processes need into a program's environment.
pub(super) fn equip(program: &mut Command, tenant: Created, shim: &Path) {
    let [pipes, _, percentage, _] = paths::MPS_VARIABLES;
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
    // Of a tenant that starts another one.
    frameworks::clear(program);
    program
        .env_remove(MEMORY_LIMIT_VARIABLE)
        .env_remove(RANKS_VARIABLE)
        .env_remove(keeper::VARIABLE)
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
    PossibleValuesParser::new(Sharing::NAMES).map(|name| Sharing::named(&name).unwrap_or_default())
}

/// Characters of a command that are shown.
const SHOWN: usize = 4096;

fn create(args: &Args, spec: SpecChange) -> Result<Created, Failure> {
    let command: Vec<_> = (args.command.iter())
        .map(|word| word.to_string_lossy())
        .collect();
    // It is only shown, and the daemon takes no request of more than 64 KiB.
    let command: String = command.join(" ").chars().take(SHOWN).collect();
    let log = match args.detach {
        true => Some(logs::folder().map_err(Failure::Unmanaged)?),
        false => None,
    };
    // Without a trust domain nothing is decided by it.
    let own = args.trust.as_ref().map(|_| fingerprint::of(&args.command));
    make(NewTenant {
        name: args.name.clone(),
        program: Some(names::of(&args.command)),
        command: Some(command),
        log: log.map(|folder| folder.display().to_string()),
        spec,
        trust: args.trust.clone(),
        sharing: match args.ranks_per_gpu > 1 && args.sharing == Sharing::Auto {
            true => Sharing::Space,
            false => args.sharing,
        },
        // Daemons before this field refuse it.
        ranks_per_gpu: Some(args.ranks_per_gpu).filter(|it| *it > 1).unwrap_or(0),
        max_ctas: frameworks::blocks_given(),
        limits_collectives: args.frameworks == Frameworks::Adapt,
        utility: args.utility.clone(),
        fingerprint: args.fingerprint.clone().or(own),
        devices: args.gpu.clone(),
        visible: env::var(VISIBLE).ok(),
        leaves: env::var("GPUMUX_TENANT").ok(),
        ..NewTenant::default()
    })
}

/// Has the daemon make a tenant that lives as long as this process; starts one if there is none.
pub(super) fn make(tenant: NewTenant) -> Result<Created, Failure> {
    // The same each time that it asks, so that it has one tenant although an answer was lost.
    let token = tenant.token.or_else(|| Some(gpumux_daemon::secret()));
    let tenant = &NewTenant { token, ..tenant };
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

/// Asks until it is clear whether there is a daemon: one that starts, ends or has just ended is waited for, and so is its successor. A
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
    use clap::Parser;

    use super::*;
    use crate::Cli;

    #[test]
    fn flags_that_cannot_go_together_are_wrong_usage() {
        for (flags, is_right) in [
            ("--keep-memory", false),
            ("--keep-memory --restart never", false),
            ("--keep-memory --restart on-collateral", true),
            ("--trust a --ranks-per-gpu 2 --sharing time", false),
            ("--trust a --ranks-per-gpu 2", true),
            ("--trust a --ranks-per-gpu 1 --sharing time", true),
        ] {
            let words = ["gpumux", "run"].into_iter();
            let words = words.chain(flags.split(' ')).chain(["true"]);
            let crate::Command::Run(args) = Cli::try_parse_from(words).unwrap().command else {
                panic!("it is `run`");
            };
            assert_eq!(consistent(&args).is_ok(), is_right, "{flags}");
        }
    }
}
