//! `gpumux set`: changes a running tenant's settings; lists and clears those that are remembered for names.

use std::process::ExitCode;

use gpumux_daemon::api::types::{Setting, SpecChange};

use super::{
    client,
    spec::{self, SpecArgs},
};
use crate::{output, units::Usage};

const EXAMPLES: &str = "\
Examples:
  gpumux set train --class batch
  gpumux set serve --guaranteed 50% --limit 90%
  gpumux set a --weight 3 --json
  gpumux set serve --hints off
  gpumux set train --memory-limit 40GiB --sleep-after 5min
  gpumux set train --memory-limit none --memory-guaranteed 0 --sleep-after never
  gpumux set --list                   what is remembered for names
  gpumux set --forget train           its next run has the defaults again

What is not named stays as it is. A change that the guarantees of \
others leave no room for is refused and changes nothing. What was set for a tenant that was started with --name is \
remembered, also when the daemon restarts: your next tenant of this name has it, unless `gpumux \
run` names another value. `gpumux run` prints a line about it.";

/// Its own: the one that clap makes has all settings in one line.
const USAGE: &str = "\
gpumux set [OPTIONS] <NAME>
       gpumux set --forget <NAME>
       gpumux set --list [NAME]";

/// Change the settings of a running tenant
#[derive(clap::Args)]
#[command(after_help = EXAMPLES, override_usage = USAGE)]
pub(crate) struct Args {
    /// The tenant, as `gpumux ps` names it
    #[arg(required_unless_present = "list")]
    name: Option<String>,
    #[command(flatten)]
    spec: SpecArgs,
    /// Clear what is remembered for this name; a tenant that runs keeps it
    #[arg(long, conflicts_with_all = [spec::GROUP, "json"])]
    forget: bool,
    /// List what is remembered for names: yours, for root all users'
    #[arg(long, conflicts_with_all = [spec::GROUP, "forget"])]
    list: bool,
    /// Print JSON: the tenant, or the list
    #[arg(long)]
    json: bool,
    /// Print nothing
    #[arg(short, long, conflicts_with_all = ["json", "list"])]
    quiet: bool,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let Some(name) = args.name.as_ref().filter(|_| !args.list) else {
        let mut settings = client::block(async |client| client.settings().await)?;
        settings.retain(|set| args.name.as_ref().is_none_or(|name| *name == set.name));
        match (args.json, settings.is_empty()) {
            (true, _) => output::json(&settings)?,
            (false, true) => output::print("nothing is remembered\n")?,
            (false, false) => output::print(&table(&settings))?,
        }
        return Ok(ExitCode::SUCCESS);
    };
    if args.forget {
        client::block(async |client| client.forget(name).await)?;
        if !args.quiet {
            output::print(&format!("{name}: its next run has the defaults again\n"))?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    let change = args.spec.change()?;
    if change == SpecChange::default() {
        let nothing =
            "nothing to change is named: use a setting such as --class, --forget or --list";
        return Err(Usage(nothing.into()).into());
    }
    let tenant = client::about(name, async |client| client.change(name, &change).await)?;
    if args.json {
        output::json(&tenant)?;
    } else if !args.quiet {
        output::print(&format!("{name}: {change}\n"))?;
        let excess = tenant.memory.iter().filter_map(|it| it.excess(&it.device));
        let excess = excess.filter(|_| change.memory_limit.is_some());
        for note in excess.chain(change.without_effect(&tenant.spec)) {
            eprintln!("gpumux: {note}");
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn table(settings: &[Setting]) -> String {
    let mut rows = output::head("NAME|USER|REMEMBERED");
    let row = |set: &Setting| {
        vec![
            set.name.clone(),
            gpumux_daemon::user_name(set.uid),
            set.change.to_string(),
        ]
    };
    rows.extend(settings.iter().map(row));
    output::table(&rows)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::Cli;

    #[test]
    fn name_without_a_setting_is_wrong_usage() {
        let line = Cli::try_parse_from(["gpumux", "set", "web"]).unwrap();
        let crate::Command::Set(args) = line.command else {
            panic!("it is `set`");
        };
        let error = run(&args).unwrap_err();
        assert!(error.is::<Usage>(), "{error}");
    }
}
