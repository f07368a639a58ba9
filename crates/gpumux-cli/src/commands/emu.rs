//! `gpumux emu`: programs on the emulated device.

use std::{
    ffi::OsString,
    fs::{self, File, Permissions},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
    time::{Duration, Instant},
};

use anyhow::Context;
use clap::builder::{PathBufValueParser, TypedValueParser};
use gpumux_emu::{
    Profile,
    fault::{Fault, FaultError},
    profile::ProfileError,
};
use rustix::{
    event::{PollFd, PollFlags, poll},
    fs::{FlockOperation, flock},
    io::Errno,
    process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open},
};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::oneshot,
};

use super::become_program;
use crate::{
    emulated::{self, Server},
    units,
};

/// How long a daemon may take to end with the device.
const DAEMON_END: Duration = Duration::from_secs(5);

const EXAMPLES: &str = "\
Examples:
  gpumux emu -- ./cuda-program                 with a device of its own
  gpumux emu --devices 2 -- gpumux doctor
  gpumux emu --fault out-of-memory@3 -- ./cuda-program
  gpumux emu -- bash                           a shell in which all programs share one device
  gpumux emu serve --socket /tmp/emu.sock &    a device for several shells:
  GPUMUX_EMU_SOCKET=/tmp/emu.sock gpumux emu -- ./cuda-program

The device lives as long as the program. Daemon and tenants started inside are apart from those \
of the machine (GPUMUX_RUNTIME_DIR is set to a folder of the device's own, unless it is set already).

Exit codes:
  125  the device could not be started
  126  the program cannot be executed
  127  the program was not found
  else the program's own";

/// Run a CUDA program on the emulated device
#[derive(clap::Args)]
#[command(after_help = EXAMPLES, args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(crate) struct Args {
    #[command(subcommand)]
    action: Option<Action>,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    fault: FaultArgs,
    /// The program and its arguments
    #[arg(last = true, required = true, value_name = "CMD")]
    command: Vec<OsString>,
}

#[derive(clap::Subcommand)]
enum Action {
    /// The same as without `run`
    Run(RunArgs),
    Serve(ServeArgs),
    Mps(MpsArgs),
}

#[derive(clap::Args)]
struct RunArgs {
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    fault: FaultArgs,
    /// The program and its arguments
    #[arg(last = true, required = true, value_name = "CMD")]
    command: Vec<OsString>,
}

/// Serve an emulated device until SIGTERM or SIGINT
#[derive(clap::Args)]
struct ServeArgs {
    #[command(flatten)]
    device: DeviceArgs,
    /// Where the programs find it (GPUMUX_EMU_SOCKET)
    #[arg(long)]
    socket: PathBuf,
    /// End with this process, and remove the socket's folder
    #[arg(long = "while", value_name = "PID", hide = true)]
    owner: Option<i32>,
}

/// Play nvidia-cuda-mps-control for programs on the emulated device
#[derive(clap::Args)]
struct MpsArgs {
    /// Serve in the foreground, in the folder that CUDA_MPS_PIPE_DIRECTORY names; without it: pass the lines of the standard input on to the process that does
    #[arg(short = 'f')]
    foreground: bool,
}

#[derive(clap::Args)]
struct DeviceArgs {
    /// Profile of the device (TOML) [default: an H100]
    #[arg(long, value_name = "FILE", value_parser = PathBufValueParser::new().try_map(profile))]
    profile: Option<PathBuf>,
    /// How many devices [default: as the profile says]
    #[arg(long, value_name = "N", value_parser = units::whole(1..=16), allow_negative_numbers = true)]
    devices: Option<u32>,
}

#[derive(clap::Args)]
struct FaultArgs {
    /// What shall go wrong, at which of the program's calls, such as trap@3: out-of-memory, illegal-address, trap, endless, device-lost,
    /// stalled-copy, control, kill, stop or fail
    #[arg(long = "fault", value_name = "KIND@N", value_delimiter = ',', value_parser = fault)]
    faults: Vec<String>,
}

/// A profile that can be read: a wrong one starts nothing.
fn profile(file: PathBuf) -> Result<PathBuf, ProfileError> {
    Profile::load(&file).map(|_| file)
}

/// A fault as the program's library reads it.
fn fault(text: &str) -> Result<String, FaultError> {
    text.parse::<Fault>().map(|_| text.to_owned())
}

pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    match args.action {
        Some(Action::Serve(args)) => serve(&args),
        Some(Action::Mps(args)) => mps(&args),
        Some(Action::Run(args)) => start(&args.device, &args.fault, &args.command),
        None => start(&args.device, &args.fault, &args.command),
    }
}

fn start(device: &DeviceArgs, fault: &FaultArgs, command: &[OsString]) -> anyhow::Result<ExitCode> {
    let [program, arguments @ ..] = command else {
        anyhow::bail!("no program was named");
    };
    let mut program = Command::new(program);
    program.args(arguments);
    if !fault.faults.is_empty() {
        program.env("GPUMUX_EMU_FAULT", fault.faults.join(","));
    }
    let server = match Server::here() {
        Some(_) if !device.options().is_empty() => {
            let message = "--devices and --profile are of a new device, and GPUMUX_EMU_SOCKET names one that runs: unset it, or leave them out";
            return Err(units::Usage(message.to_owned()).into());
        }
        Some(server) => server,
        None => {
            let dir = tempfile::Builder::new().prefix("gpumux-emu-").tempdir()?;
            let server = Server::start(dir.path(), device.options())?;
            // From now on the server sees to its removal: this process will be the program.
            let dir = dir.keep();
            if std::env::var_os("GPUMUX_RUNTIME_DIR").is_none() {
                program.env("GPUMUX_RUNTIME_DIR", dir);
            }
            server
        }
    };
    server.enter(&mut program)?;
    Ok(become_program(program))
}

impl DeviceArgs {
    /// The same for `emu serve`.
    fn options(&self) -> Vec<OsString> {
        let profile = self
            .profile
            .iter()
            .flat_map(|file| ["--profile".into(), file.into()]);
        let devices = self
            .devices
            .iter()
            .flat_map(|n| ["--devices".into(), n.to_string().into()]);
        profile.chain(devices).collect()
    }
}

fn serve(args: &ServeArgs) -> anyhow::Result<ExitCode> {
    let mut profile = match &args.device.profile {
        Some(file) => Profile::load(file)?,
        None => Profile::default(),
    };
    profile.devices = args.device.devices.unwrap_or(profile.devices);
    emulated::make_links(&args.socket)?;
    let server = gpumux_emu::server::Server::bind(profile, &args.socket)?;
    // A process that may enter the folder may use the device, as with the files of a real one.
    fs::set_permissions(&args.socket, Permissions::from_mode(0o666))
        .with_context(|| format!("cannot open {} to all", args.socket.display()))?;
    let server = server.spawn()?;
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?
        .block_on(end(args.owner))?;
    server.stop()?;
    emulated::remove_links(&args.socket);
    if let (Some(_), Some(dir)) = (args.owner, args.socket.parent()) {
        end_daemon(dir);
        let _ = fs::remove_dir_all(dir);
    }
    Ok(ExitCode::SUCCESS)
}

fn mps(args: &MpsArgs) -> anyhow::Result<ExitCode> {
    if args.foreground {
        let socket = std::env::var_os(gpumux_emu::SOCKET_VARIABLE);
        let socket = socket.context("GPUMUX_EMU_SOCKET is not set")?;
        gpumux_emu::mps::serve(Path::new(&socket))?;
        return Ok(ExitCode::SUCCESS);
    }
    for line in std::io::stdin().lines() {
        print!("{}", gpumux_emu::mps::ask(&line?)?);
    }
    Ok(ExitCode::SUCCESS)
}

/// Ends the daemon that a `run` inside has started, and waits a moment for it. The process that holds the lock is the one
/// whose pid is in it.
fn end_daemon(dir: &Path) {
    let Ok(lock) = File::open(dir.join("lock")) else {
        return;
    };
    let gone = || flock(&lock, FlockOperation::NonBlockingLockShared).is_ok();
    if gone() {
        return;
    }
    let pid = fs::read_to_string(dir.join("lock")).unwrap_or_default();
    if let Some(pid) = pid.trim().parse().ok().and_then(Pid::from_raw) {
        let _ = kill_process(pid, Signal::TERM);
    }
    let asked = Instant::now();
    while !gone() && asked.elapsed() < DAEMON_END {
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Waits for SIGTERM, SIGINT, or the end of the process that the device is for.
async fn end(owner: Option<i32>) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let (owned, gone) = oneshot::channel();
    let _unowned = match owner {
        Some(pid) => tell_end(pid, owned).map(|()| None)?,
        None => Some(owned),
    };
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
        _ = gone => {}
    }
    Ok(())
}

/// Drops `sender` when the process has ended.
fn tell_end(pid: i32, sender: oneshot::Sender<()>) -> anyhow::Result<()> {
    let pid = Pid::from_raw(pid).context("0 is no process")?;
    let process = match pidfd_open(pid, PidfdFlags::empty()) {
        // It was killed before we came this far.
        Err(Errno::SRCH) => return Ok(()),
        opened => opened.with_context(|| format!("cannot watch process {pid}"))?,
    };
    std::thread::spawn(move || {
        while poll(&mut [PollFd::new(&process, PollFlags::IN)], None) == Err(Errno::INTR) {}
        drop(sender);
    });
    Ok(())
}
