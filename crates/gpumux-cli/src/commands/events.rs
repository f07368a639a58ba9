//! `gpumux events`: what happens to tenants, as it happens.

use std::process::ExitCode;

use gpumux_daemon::api::types::Event;

use super::client;
use crate::output;

const EXAMPLES: &str = "\
Examples:
  gpumux events --past
  gpumux events --past --json | jq 'select(.kind == \"ended\")'

Without --past it prints what happens from now on, until the daemon ends: a tenant started, ended, was refused or \
resized (`gpumux set`), its memory was swapped to the host or returned, it moved to another GPU, it reached its memory limit, a process of it undid a control; a fault in a \
group, and its restart. Times are in UTC. With --json, each line is one object.";

/// Follow what happens to tenants
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Only tenants of these names
    #[arg(value_name = "NAME")]
    names: Vec<String>,
    /// Print the last events that the daemon keeps (up to 1024), and end
    #[arg(long)]
    past: bool,
    /// Print JSON: number, at_ms, kind, tenant, uid and text, an object in each line
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let mut failed = None;
    let concerns = |event: &Event| {
        let own = |tenant: &String| args.names.contains(tenant);
        args.names.is_empty() || event.tenant.as_ref().is_some_and(own)
    };
    let mut show = |event: &Event| {
        if concerns(event)
            && let Err(error) = output::print(&(line(event, args.json) + "\n"))
        {
            failed = Some(error);
        }
        failed.is_none()
    };
    client::block(async |client| match args.past {
        true => {
            client.past_events().await?.iter().all(&mut show);
            Ok(())
        }
        false => client.events(None, |event| show(&event)).await,
    })?;
    failed.map_or(Ok(ExitCode::SUCCESS), Err)
}

fn line(event: &Event, json: bool) -> String {
    if json {
        // No map with odd keys is in it.
        return output::json_text(&serde_json::to_string(event).unwrap_or_default());
    }
    let at = jiff::Timestamp::from_millisecond(event.at_ms as i64).unwrap_or_default();
    let tenant = event.tenant.as_deref().unwrap_or("-");
    let line = format!(
        "{at:.0}  {:8}  {tenant:12}  {}",
        event.kind.name(),
        event.text
    );
    line.trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use gpumux_daemon::api::types::EventKind;

    use super::*;

    #[test]
    fn event_is_one_line() {
        let event = Event {
            number: 7,
            at_ms: 1_790_000_000_250,
            kind: EventKind::Ended,
            tenant: Some("train".into()),
            uid: Some(0),
            text: "completed".into(),
        };
        let text = line(&event, false);
        assert_eq!(
            text,
            "2026-09-21T14:13:20Z  ended     train         completed"
        );
        assert!(line(&event, true).starts_with(r#"{"number":7,"#));
    }
}
