//! `gpumux kill`: sends a signal to tenants' programs.

use std::process::ExitCode;

use super::client;
use crate::{output, signals};

const EXAMPLES: &str = "\
Examples:
  gpumux kill -s CONT train serve
  gpumux kill a

SIGKILL, SIGSTOP and SIGCONT are sent to the program and to the tenant's processes that have used a GPU, any other signal to the program that `gpumux run` started, or, if \
that has ended, to the tenant's connected processes. Only the tenant's owner and root may do so.";

/// Send a signal to tenants
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// The tenants, as `gpumux ps` names them
    #[arg(required = true, value_name = "NAME")]
    names: Vec<String>,
    /// The signal: a name or a number
    #[arg(short, long, value_name = "SIGNAL", value_parser = signals::parse, default_value = "KILL")]
    signal: i32,
    /// Print nothing
    #[arg(short, long)]
    quiet: bool,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    for name in &args.names {
        let sent = client::about(name, async |client| client.signal(name, args.signal).await)?;
        if !args.quiet {
            let (signal, count) = (signals::name(args.signal), sent.processes);
            let processes = if count == 1 { "process" } else { "processes" };
            output::print(&format!("{name}: {signal} sent to {count} {processes}\n"))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
