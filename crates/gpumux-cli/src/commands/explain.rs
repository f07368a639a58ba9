//! `gpumux explain`: why a tenant receives what it receives.

use std::process::ExitCode;

use super::client;
use crate::output;

const EXAMPLES: &str = "\
Examples:
  gpumux explain train
  watch -n 1 gpumux explain train
  gpumux explain train --json | jq '.neighbours[] | {name, received}'

The lines: what it is entitled to (with the bound on its wait), what it received, why it runs or waits now, which tenants \
have the rest (three at most, then a count), and what can be done.";

/// Show in five lines why a tenant receives what it receives
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// The tenant, as `gpumux ps` names it
    name: String,
    /// Print JSON: `text`, its parts `entitlement`, `received`, `why` and `advice`, and all `neighbours`
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let name = &args.name;
    let explanation = client::about(name, async |client| client.explanation(name).await)?;
    match args.json {
        true => output::json(&explanation)?,
        false => output::print(&(explanation.text + "\n"))?,
    }
    Ok(ExitCode::SUCCESS)
}
