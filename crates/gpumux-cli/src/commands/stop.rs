//! `gpumux stop`: ends tenants' programs, in good order if they can.

use std::{process::ExitCode, time::Duration};

use gpumux_daemon::client::ClientError;

use super::client::{self, until_ended};
use crate::{output, units};

const EXAMPLES: &str = "\
Examples:
  gpumux stop train
  gpumux stop --time 1min serve web

The program is sent SIGTERM; what has not ended after the grace time is sent SIGKILL, and so are all \
of its processes that have used a GPU. Others that it has started are not. Only the tenant's owner and root may stop it.";

/// How long the end may take after SIGKILL.
const KILLED: Duration = Duration::from_secs(30);

/// Stop tenants
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// The tenants, as `gpumux ps` names them
    #[arg(required = true, value_name = "NAME")]
    names: Vec<String>,
    /// Grace time between SIGTERM and SIGKILL, such as 10s
    #[arg(short, long, value_name = "TIME", value_parser = units::seconds, default_value = "10s")]
    time: u64,
    /// Print the ended tenants as JSON
    #[arg(long)]
    json: bool,
    /// Print nothing
    #[arg(short, long, conflicts_with = "json")]
    quiet: bool,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let mut all = Vec::new();
    for name in &args.names {
        let ended = client::about(name, async |client| {
            client.signal(name, libc::SIGTERM).await?;
            let grace = Duration::from_secs(args.time);
            if let Ok(ended) = tokio::time::timeout(grace, until_ended(&client, name)).await {
                return ended;
            }
            match client.signal(name, libc::SIGKILL).await {
                // It has ended just now.
                Err(ClientError::Refused {
                    status: 404 | 409, ..
                })
                | Ok(_) => {}
                Err(error) => return Err(error),
            }
            let ended = tokio::time::timeout(KILLED, until_ended(&client, name)).await;
            ended.unwrap_or_else(|_| {
                let message = format!(
                    "`{name}` has not ended within {KILLED:?} of SIGKILL: a driver call may hang"
                );
                Err(ClientError::Refused {
                    status: 504,
                    message,
                })
            })
        })?;
        if !args.quiet && !args.json {
            output::print(&format!("{name}: {}\n", ended.reason))?;
        }
        all.push(ended);
    }
    if args.json {
        output::json(&all)?;
    }
    Ok(ExitCode::SUCCESS)
}
