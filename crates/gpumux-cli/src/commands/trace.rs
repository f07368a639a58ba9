//! `gpumux trace`: what the scheduler did in the last seconds, for Perfetto.

use std::{path::PathBuf, process::ExitCode};

use anyhow::Context;

use super::client;
use crate::{output, units};

const EXAMPLES: &str = "\
Examples:
  gpumux trace -o out.json                 the last 10 seconds
  gpumux trace --seconds 2 | jq '.traceEvents | length'

The daemon always remembers the last events of each device, so a trace shows what has already \
happened. Open it at https://ui.perfetto.dev or in chrome://tracing: a \
process for each device, and in it a row for each channel group with its states, its timeslices and the policy's reasons.";

/// Write what the scheduler did lately as a Chrome trace
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// How much of the past
    #[arg(long, default_value_t = 10.0, value_parser = units::past, allow_negative_numbers = true)]
    seconds: f64,
    /// The file; without it the trace is printed
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let trace = client::block(async |client| client.trace(args.seconds).await)?;
    match &args.output {
        Some(file) => std::fs::write(file, trace)
            .with_context(|| format!("cannot write {}", file.display()))?,
        None => output::print(&(trace + "\n"))?,
    }
    Ok(ExitCode::SUCCESS)
}
