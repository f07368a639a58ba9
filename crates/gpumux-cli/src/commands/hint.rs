//! `gpumux hint`: says from outside that a tenant's work is coming.

use std::process::ExitCode;

use gpumux_daemon::api::types::NewHint;

use super::client;
use crate::output;

const EXAMPLES: &str = "\
Examples:
  gpumux hint serve
  gpumux hint serve --expected-us 300

The tenant's processes take their GPU ahead of the work, where others compete for it. A router that \
has just received a request does better to keep a connection open and POST to \
/v1/tenants/NAME/hint itself: starting a program takes longer than what a hint gains.";

/// Say that a tenant's work is coming
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// The tenant, as `gpumux ps` names it
    name: String,
    /// In how many µs the work is expected, at most a second
    #[arg(long, value_name = "US", value_parser = clap::value_parser!(u32).range(..=i64::from(NewHint::FARTHEST_US)))]
    expected_us: Option<u32>,
    /// Print the answer as JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let hint = NewHint {
        expected_us: args.expected_us,
    };
    let hinted = client::block(async |client| client.hint(&args.name, &hint).await)?;
    if args.json {
        output::json(&hinted)?;
    }
    Ok(ExitCode::SUCCESS)
}
