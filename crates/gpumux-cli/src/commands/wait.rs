//! `gpumux wait`: waits until tenants have ended, and ends as the last one did.

use std::{fs, process::ExitCode};

use gpumux_daemon::api::types::Exit;

use super::client::{self, until_ended};
use crate::{logs, output};

const EXAMPLES: &str = "\
Examples:
  gpumux run -d --name quick -- python train.py; gpumux wait quick
  gpumux run -d --name short -- true; gpumux wait short --json

The exit code is that of the last tenant's program (128 + N for signal N). It is known of programs that run \
detached (`gpumux run -d`) or with `--restart`, and of all programs from Linux 6.15 on; where it is not known, `wait` \
reports that and ends with 1. The last 256 tenants that ended can be waited for, too, as long as their daemon lives; \
those that ran detached until another gets the name, without --json.";

/// Wait until tenants have ended
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// The tenants, as `gpumux ps -a` names them
    #[arg(required = true, value_name = "NAME")]
    names: Vec<String>,
    /// Print the ended tenants as JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let (mut all, mut exit) = (Vec::new(), Exit::default());
    for name in &args.names {
        let ended = client::about(name, async |client| until_ended(&client, name).await);
        exit = match (ended, noted(name)) {
            (Ok(end), _) => {
                all.push(end);
                all[all.len() - 1].exit
            }
            (Err(_), Some(exit)) if !args.json => exit,
            (Err(error), _) => return Err(error.into()),
        };
    }
    let code = exit.shell_code();
    if args.json {
        output::json(&all)?;
    }
    let last = all.len().saturating_sub(1);
    for (n, end) in all.iter().enumerate() {
        if end.noteworthy || n == last && code.is_none() {
            eprintln!("gpumux: {}: {}", end.name, end.reason);
        }
    }
    Ok(code.map_or(ExitCode::FAILURE, ExitCode::from))
}

/// How a program of this user ended that ran detached, if no other has had its name since. The daemon need not know.
fn noted(name: &str) -> Option<Exit> {
    let path = logs::exit(&logs::file(&logs::folder().ok()?, name));
    serde_json::from_slice(&fs::read(path).ok()?).ok()
}
