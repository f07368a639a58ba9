//! `gpumux set`: changes a running tenant's promise, or forgets what was set.

use std::process::ExitCode;

use super::{client, spec::SpecArgs};
use crate::output;

const EXAMPLES: &str = "\
Examples:
  gpumux set train --class batch
  gpumux set serve --guaranteed 0.5 --limit 0.9
  gpumux set a --weight 3 --json
  gpumux set serve --hints off
  gpumux set train --memory-limit 40GiB --sleep-after 30s
  gpumux set train --memory-limit none --memory-guaranteed 0 --sleep-after never
  gpumux set train --forget           its next run has the defaults again

What is not named stays as it is. A change that cannot be kept together with the promises to \
others is refused and changes nothing. What was set for a tenant that was started with --name is \
remembered, also when the daemon restarts: your next tenant of this name has it, unless `gpumux \
run` says otherwise.";

/// Change what a running tenant is promised
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
#[command(group(clap::ArgGroup::new("change").args(["class", "guaranteed", "limit", "weight", "hints", "latency_objective", "memory_guaranteed", "memory_limit", "memory_policy", "sleep_after", "forget"]).required(true).multiple(true)))]
pub(crate) struct Args {
    /// The tenant, as `gpumux ps` names it
    name: String,
    #[command(flatten)]
    spec: SpecArgs,
    /// Forget what was set for this name; a tenant that runs keeps it
    #[arg(long, conflicts_with_all = ["class", "guaranteed", "limit", "weight", "hints", "latency_objective", "memory_guaranteed", "memory_limit", "memory_policy", "sleep_after", "json"])]
    forget: bool,
    /// Print the tenant as JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    if args.forget {
        client::block(async |client| client.forget(&args.name).await)?;
        return Ok(ExitCode::SUCCESS);
    }
    let tenant =
        client::block(async |client| client.change(&args.name, &args.spec.change()).await)?;
    if args.json {
        output::json(&tenant)?;
    }
    Ok(ExitCode::SUCCESS)
}
