//! `gpumux set`: changes a running tenant's promise.

use std::process::ExitCode;

use super::{client, spec::SpecArgs};
use crate::output;

const EXAMPLES: &str = "\
Examples:
  gpumux set train --class batch
  gpumux set serve --guaranteed 0.5 --limit 0.9
  gpumux set a --weight 3 --json
  gpumux set serve --hints off

What is not named stays as it is. A change that cannot be kept together with the promises to \
others is refused and changes nothing.";

/// Change what a running tenant is promised
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
#[command(group(clap::ArgGroup::new("change").args(["class", "guaranteed", "limit", "weight", "hints", "latency_objective"]).required(true).multiple(true)))]
pub(crate) struct Args {
    /// The tenant, as `gpumux ps` names it
    name: String,
    #[command(flatten)]
    spec: SpecArgs,
    /// Print the tenant as JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let tenant =
        client::block(async |client| client.change(&args.name, &args.spec.change()).await)?;
    if args.json {
        output::json(&tenant)?;
    }
    Ok(ExitCode::SUCCESS)
}
