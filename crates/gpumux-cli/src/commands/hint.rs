//! `gpumux hint`: announces a tenant's work from outside.

use std::process::ExitCode;

use gpumux_daemon::api::types::NewHint;

use super::client;
use crate::{output, units};

const EXAMPLES: &str = "\
Examples:
  gpumux hint serve
  gpumux hint serve --expected-us 300

The tenant's processes take their GPU ahead of the work, where others compete for it. A router that \
has just received a request does better to keep a connection open and POST to \
/v1/tenants/NAME/hint itself: starting a program takes longer than what a hint gains.";

/// Announce work, so that a latency tenant takes its GPU ahead of it
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// The tenant, as `gpumux ps` names it
    name: String,
    /// When the work is expected, such as 300us (a number alone is in µs), at most a second ahead
    #[arg(long, value_name = "TIME", value_parser = units::ahead)]
    expected_us: Option<u32>,
    #[command(flatten)]
    printed: output::Printed,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let hint = NewHint {
        expected_us: args.expected_us,
    };
    let name = &args.name;
    let hinted = client::about(name, async |client| client.hint(name, &hint).await)?;
    args.printed.print(&hinted, || {
        let processes = match hinted.processes {
            0 => "no process is connected yet, so the hint has no effect".to_owned(),
            1 => "1 process takes its GPU ahead of the work".to_owned(),
            n => format!("{n} processes take their GPUs ahead of the work"),
        };
        format!("{name}: {processes}\n")
    })?;
    Ok(ExitCode::SUCCESS)
}
