//! `gpumux man`: manual pages of all commands.

use std::{path::PathBuf, process::ExitCode};

use anyhow::Context;

const EXAMPLES: &str = "\
Examples:
  gpumux man /usr/local/share/man/man1
  gpumux man . && man ./gpumux-run.1";

/// Write the manual pages into a folder
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// The folder; it is made if need be
    dir: PathBuf,
}

pub(crate) fn run(args: &Args, command: clap::Command) -> anyhow::Result<ExitCode> {
    let cannot = || format!("cannot write manual pages to {}", args.dir.display());
    std::fs::create_dir_all(&args.dir).with_context(cannot)?;
    clap_mangen::generate_to(command, &args.dir).with_context(cannot)?;
    Ok(ExitCode::SUCCESS)
}
