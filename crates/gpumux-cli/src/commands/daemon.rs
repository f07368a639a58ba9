//! `gpumux daemon`: the daemon in the foreground.

use std::{path::PathBuf, process::ExitCode};

use clap::builder::{PossibleValue, PossibleValuesParser};
use gpumux_core::{policy, runlist::Mechanism};
use gpumux_daemon::{Config, Listen, receiver::Place};

use crate::{libraries, units};

const EXAMPLES: &str = "\
Examples:
  gpumux daemon                          of this user, in $XDG_RUNTIME_DIR/gpumux
  sudo gpumux daemon                     of the machine, in /run/gpumux
  gpumux daemon --config gpumux.toml --policy weighted
  gpumux daemon --listen 127.0.0.1:9440  with a web page, and /metrics for Prometheus
  gpumux daemon --check                  find mistakes in the configuration, and start nothing
  GPUMUX_LOG=debug gpumux daemon         log in more detail

SIGTERM and SIGINT end it in good order: all tenants are thawed and get back the timeslices that were \
found.
Its API speaks HTTP and JSON on the socket `api.sock` in the runtime folder:
  curl --unix-socket $XDG_RUNTIME_DIR/gpumux/api.sock http://gpumux/openapi.json";

/// Run the daemon
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Configuration file [default: /etc/gpumux/gpumux.toml for root, else $XDG_CONFIG_HOME/gpumux/gpumux.toml, where there is one]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Folder of the sockets [default: GPUMUX_RUNTIME_DIR, /run/gpumux for root, else $XDG_RUNTIME_DIR/gpumux]
    #[arg(long, value_name = "DIR")]
    runtime_dir: Option<PathBuf>,
    /// Scheduling policy: priority, max-min or weighted
    #[arg(long, value_name = "NAME", value_parser = policies(), hide_possible_values = true)]
    policy: Option<String>,
    /// How programs are scheduled: by the driver's `controls`, at their `launches`, or `auto`: at launches where the controls are refused
    #[arg(long, value_name = "NAME")]
    mechanism: Option<Mechanism>,
    /// TCP address where the web page and metrics can be read (not changed) by all that reach it
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: Option<Listen>,
    /// End after so long without tenants, such as 60s or 5min
    #[arg(long, value_name = "TIME", value_parser = units::seconds)]
    idle_exit: Option<u64>,
    /// File to record in what the planners are given and decide, for tests; at most 64 MiB
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
    /// Run no daemon, but name what is wrong with the configuration: exit code 1 if there is something
    #[arg(long, conflicts_with = "end_groups")]
    check: bool,
    /// Run no daemon, but end the groups (see `--trust` of `gpumux run`) that the last one left to the next, and all programs in them
    #[arg(long, conflicts_with_all = ["policy", "mechanism", "listen", "idle_exit", "record"])]
    end_groups: bool,
}

pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    crate::bounded_log::start();
    if let Some(file) = &args.config {
        units::text_of(file)?;
    }
    let mut config = Config::load(args.config.as_deref())?;
    config.runtime_dir = args.runtime_dir.or(config.runtime_dir);
    config.listen = args.listen.or(config.listen);
    config.mechanism = args.mechanism.unwrap_or(config.mechanism);
    config.idle_exit_s = args.idle_exit.or(config.idle_exit_s);
    config.record = args.record.or(config.record);
    if let Some(policy) = args.policy {
        config.policy = policy;
    }
    if config.emulated.is_some() && config.nvml.is_none() {
        config.nvml = Some(libraries::find(libraries::EMULATED)?);
    }
    if args.check {
        return Ok(check(&config));
    }
    match args.end_groups {
        true => gpumux_daemon::end_groups(&config)?,
        false => gpumux_daemon::run(config, Place::Process)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// The process that receives users' connections for a daemon.
pub(crate) fn receive() -> anyhow::Result<ExitCode> {
    gpumux_daemon::receiver::main()?;
    Ok(ExitCode::SUCCESS)
}

/// The process that looks into one of a user for a daemon.
pub(crate) fn examine() -> anyhow::Result<ExitCode> {
    gpumux_daemon::examine::main()?;
    Ok(ExitCode::SUCCESS)
}

/// The policies by name; the baseline, which is for measurements, is not shown.
fn policies() -> PossibleValuesParser {
    let names = policy::NAMES.map(PossibleValue::new).into_iter();
    names
        .chain([PossibleValue::new("fixed").hide(true)])
        .collect::<Vec<_>>()
        .into()
}

/// Names all mistakes of a configuration.
fn check(config: &Config) -> ExitCode {
    let devices = gpumux_daemon::known_devices(config);
    let mut mistakes = gpumux_daemon::mistakes(config);
    mistakes.extend(gpumux_daemon::absences(config, devices.as_ref()));
    for mistake in &mistakes {
        eprintln!("gpumux: {mistake}");
    }
    if !mistakes.is_empty() {
        return ExitCode::FAILURE;
    }
    println!("the configuration is in order");
    let sections = config.devices.keys().map(|it| format!("[devices.{it}]"));
    let declared = (config.tenants.iter())
        .filter(|(_, it)| !it.gpu.is_empty())
        .map(|(name, _)| format!("gpu of [tenants.\"{name}\"]"));
    let named: Vec<String> = sections.chain(declared).collect();
    if devices.is_none() && !named.is_empty() {
        println!(
            "not checked: {}: NVML lists no device here (`gpumux doctor` tells why)",
            named.join(", ")
        );
    }
    ExitCode::SUCCESS
}
