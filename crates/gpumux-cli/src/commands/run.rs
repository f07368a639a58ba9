//! `gpumux run`: makes a tenant and becomes its first process.
//!
//! `run` asks the daemon for a tenant, and then turns into the program: pid, signals,
//! terminal, job control and exit status are the program's own, and nothing of gpumux stays around it.

use std::{
    ffi::OsString,
    fs::DirBuilder,
    os::unix::{fs::DirBuilderExt, net::UnixStream},
    path::Path,
    process::{Command, ExitCode},
};

use anyhow::Context;
use gpumux_daemon::{
    api::types::{Created, NewTenant},
    client::ClientError,
    paths,
};

use super::{become_program, client, spec::SpecArgs};
use crate::{background, libraries, output};

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

The program and all that it starts are one tenant. If no daemon runs, one is started in the \
background; it ends by itself when it has had no tenants for a minute. If none can be started, \
the program runs unmanaged, with one line of warning; with --strict it does not run.

Exit codes:
  125  a promise that cannot be kept, a name in use; with --strict also: no daemon
  126  the program cannot be executed
  127  the program was not found
  else the program's own (a shell shows 128 + N for signal N)

Environment given to the program: LD_PRELOAD (libgpumux.so is put first), GPUMUX_SOCKET, \
GPUMUX_TENANT and, with --strict, GPUMUX_STRICT=1.";

/// Run a program as a tenant
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// The tenant's name; without it, the program's, numbered where it is in use
    #[arg(long)]
    name: Option<String>,
    #[command(flatten)]
    spec: SpecArgs,
    /// Do not run the program unmanaged: without daemon it does not start
    #[arg(long)]
    strict: bool,
    /// The program and its arguments
    #[arg(trailing_var_arg = true, required = true, value_name = "CMD")]
    command: Vec<OsString>,
}

pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    let mut words = args.command.iter();
    let mut program = Command::new(words.next().context("no program was named")?);
    program.args(words);
    match enter(&args, &mut program) {
        Ok(()) => {}
        Err(Failure::Refused(error)) => return Err(error.into()),
        Err(Failure::Unmanaged(error)) if args.strict => {
            return Err(error.context("--strict"));
        }
        Err(Failure::Unmanaged(error)) => {
            let why = output::with_causes(&error);
            eprintln!("gpumux: {why}; the program runs unmanaged");
        }
    }
    Ok(become_program(program))
}

/// Why the program does not become a tenant.
enum Failure {
    /// The daemon will not have it so.
    Refused(ClientError),
    /// There is no daemon to be had, or no library to preload.
    Unmanaged(anyhow::Error),
}

/// Makes the tenant and puts what its processes need into the program's environment.
fn enter(args: &Args, program: &mut Command) -> Result<(), Failure> {
    let shim = libraries::find(libraries::SHIM).map_err(Failure::Unmanaged)?;
    let tenant = create(args)?;
    program
        .env("LD_PRELOAD", libraries::first("LD_PRELOAD", &shim))
        .env("GPUMUX_SOCKET", tenant.socket)
        .env("GPUMUX_TENANT", tenant.token);
    if args.strict {
        program.env("GPUMUX_STRICT", "1");
    }
    Ok(())
}

fn create(args: &Args) -> Result<Created, Failure> {
    let program = Path::new(&args.command[0]).file_name();
    let tenant = NewTenant {
        name: args.name.clone(),
        program: program.map(|name| name.to_string_lossy().into_owned()),
        spec: args.spec.change(),
        ..NewTenant::default()
    };
    let ask = || client::block(async |client| client.create(&tenant).await);
    let answer = match ask() {
        Err(ClientError::NoDaemon { .. }) => {
            start_daemon()
                .context("cannot start the daemon")
                .map_err(Failure::Unmanaged)?;
            ask()
        }
        answer => answer,
    };
    answer.map_err(|error| match error {
        ClientError::Refused { .. } => Failure::Refused(error),
        error => Failure::Unmanaged(error.into()),
    })
}

/// Starts a daemon of this user in the background.
fn start_daemon() -> anyhow::Result<()> {
    let dir = paths::runtime_dir();
    let socket = paths::api_socket(&dir);
    // The daemon makes its folder itself; this one only lets its log begin before that.
    let mode = if rustix::process::geteuid().is_root() {
        0o755
    } else {
        0o700
    };
    DirBuilder::new()
        .recursive(true)
        .mode(mode)
        .create(&dir)
        .with_context(|| format!("cannot make {}", dir.display()))?;
    background::start(
        &["daemon", "--idle-exit", IDLE_EXIT_S],
        &dir.join("daemon.log"),
        || UnixStream::connect(&socket).is_ok(),
    )
}
