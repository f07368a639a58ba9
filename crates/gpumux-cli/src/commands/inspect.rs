//! `gpumux inspect`: all that is known of a tenant.

use std::process::ExitCode;

use gpumux_daemon::{
    api::types::{Ended, Explanation, Tenant},
    client::ClientError,
};
use serde::Serialize;

use super::client;
use crate::output;

const EXAMPLES: &str = "\
Examples:
  gpumux inspect train
  gpumux inspect train | jq '.tenant.domains[].waited_us'

Prints JSON: `tenant` and `explanation` of one that runs; `ended` of the last one of this name that has ended. The \
fields are described in the daemon's /openapi.json.";

/// Show all that is known of a tenant, as JSON
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// The tenant, as `gpumux ps -a` names it
    name: String,
    /// Print JSON, as without it
    #[arg(long, hide = true)]
    json: bool,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Known {
    Lives {
        tenant: Box<Tenant>,
        explanation: Box<Explanation>,
    },
    Ended {
        ended: Ended,
    },
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let name = &args.name;
    let known = client::about(name, async |client| {
        match client.tenant(name).await {
            Ok(tenant) => {
                let explanation = client.explanation(name).await?;
                return Ok(Known::Lives {
                    tenant: tenant.into(),
                    explanation: explanation.into(),
                });
            }
            Err(ClientError::Refused { status: 404, .. }) => {}
            Err(error) => return Err(error),
        }
        let ends = client.ended().await?;
        let ended = client::last_end(ends, name, |_| true);
        ended
            .map(|ended| Known::Ended { ended })
            .ok_or_else(|| client::unknown(name))
    })?;
    output::json(&known)?;
    Ok(ExitCode::SUCCESS)
}
