//! `gpumux explain`: why a tenant gets what it gets.

use std::process::ExitCode;

use super::client;
use crate::output;

const EXAMPLES: &str = "\
Examples:
  gpumux explain train
  watch -n 1 gpumux explain train";

/// Say why a tenant gets what it gets now
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// The tenant, as `gpumux ps` names it
    name: String,
    /// Print JSON: `name` and `text`
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let explanation = client::block(async |client| client.explanation(&args.name).await)?;
    match args.json {
        true => output::json(&explanation)?,
        false => output::print(&(explanation.text + "\n"))?,
    }
    Ok(ExitCode::SUCCESS)
}
