//! `gpumux ps`: the tenants of the GPUs, what each is guaranteed and what it receives.

mod table;

use std::{collections::BTreeMap, io::IsTerminal, process::ExitCode, time::SystemTime};

use gpumux_daemon::api::types::{Device, Ended, Fault, ForeignProcess, Tenant};
use serde::Serialize;

use super::client;
use crate::output;
use table::Sort;

const EXAMPLES: &str = "\
Examples:
  gpumux ps
  gpumux ps -a                      also those that have ended, with exit code and reason
  gpumux ps --sort wait train serve
  gpumux ps -q                      names only
  gpumux ps --json | jq '.tenants[] | {name, class, pids}'

Columns:
  STATE       see below
  GPU         indices of the GPUs that it uses
  SHARE       part of them that it, or its group, received in the last second
  GUARANTEED  part that it always receives when it has work
  WAIT        part of its time with work that it waited for the GPU, since it started; waits for memory do not count
  MEMORY      on its GPUs, and what is swapped out to the host
Of several GPUs, SHARE is the least and the most. `-o wide` has a row for each GPU.

States:
  starting    no process of it has used a GPU yet
  idle        has no work for a GPU
  running     has work, and may run
  queued      has work, and is frozen until its quantum comes
  stopped     its process is stopped (SIGSTOP, Ctrl-Z, a debugger)
  swapped     some or all of its memory is on the host
  blocked     waits for room in a GPU's memory
  faulty      gpumux cannot control it: `gpumux explain NAME` names the error
  tampers     its processes undo what gpumux sets: `gpumux explain NAME` has the details

Guarantees that do not hold yet, tenants that are scheduled at launch, faults in groups, and processes that use a GPU without gpumux are \
listed below the tenants.";

/// List the tenants
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Only tenants of these names
    #[arg(value_name = "NAME")]
    names: Vec<String>,
    /// Also those that have ended (the last 256)
    #[arg(short, long)]
    all: bool,
    /// Print names only, as -o name
    #[arg(short, long, conflicts_with_all = ["output", "json"])]
    quiet: bool,
    /// How to print: a table that fits the terminal, a wide one, JSON, or names
    #[arg(short, long, value_enum, default_value_t, conflicts_with = "json")]
    output: Output,
    /// Order of the rows: by name, user, class, state, share, guaranteed, wait, memory (most first), or age (oldest first)
    #[arg(long, value_enum, default_value_t)]
    sort: Sort,
    /// Print JSON, as -o json: `tenants`, `faults` in groups, `foreign` processes by GPU and, with -a, `ended`
    #[arg(long)]
    json: bool,
}

/// How tenants are printed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
enum Output {
    #[default]
    Table,
    Wide,
    Json,
    Name,
}

#[derive(Serialize)]
struct Listing {
    tenants: Vec<Tenant>,
    faults: Vec<Fault>,
    /// Processes that gpumux does not control, by device.
    foreign: BTreeMap<String, Vec<ForeignProcess>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ended: Option<Vec<Ended>>,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let (mut tenants, status, mut ended) = client::block(async |client| {
        let ended = match args.all {
            true => Some(client.ended().await?),
            false => None,
        };
        Ok((client.tenants().await?, client.status().await?, ended))
    })?;
    // A tenant of another user may be meant by `user/name`.
    let is = |asked: &String, name: &str, user: &str| {
        let (of, own) = asked.split_once('/').unwrap_or((user, asked));
        of == user && own == name
    };
    let named = |name: &str, user: &str| {
        args.names.is_empty() || args.names.iter().any(|asked| is(asked, name, user))
    };
    let everyone = tenants.clone();
    tenants.retain(|tenant| named(&tenant.name, &tenant.user));
    if let Some(ended) = &mut ended {
        ended.retain(|end| named(&end.name, &end.user));
    }
    let is_there = |asked: &&String| {
        let mut ended = ended.iter().flatten();
        ended.any(|end| is(asked, &end.name, &end.user))
            || (tenants.iter()).any(|it| is(asked, &it.name, &it.user))
    };
    for missing in args.names.iter().filter(|name| !is_there(name)) {
        // Has the daemon say so, with the suggestion of another name.
        client::about(missing, async |client| client.tenant(missing).await)?;
    }
    table::sort(&mut tenants, args.sort);
    let output = match (args.json, args.quiet) {
        (true, _) => Output::Json,
        (_, true) => Output::Name,
        _ => args.output,
    };
    let now = SystemTime::now();
    match output {
        Output::Json => output::json(&Listing {
            tenants,
            faults: status.faults,
            foreign: (status.devices.into_iter())
                .filter(|device| !device.foreign.is_empty())
                .map(|device| (device.uuid, device.foreign))
                .collect(),
            ended,
        })?,
        Output::Name => {
            let living = tenants.iter().map(|it| (&*it.user, &*it.name));
            let ended = (ended.iter().flatten()).map(|it| (&*it.user, &*it.name));
            output::print(&names(&living.chain(ended).collect::<Vec<_>>()))?;
        }
        Output::Table | Output::Wide => {
            let devices: &[Device] = &status.devices;
            let text = match output {
                Output::Wide => table::wide(&tenants, devices, now),
                _ => table::narrow(&tenants, devices, columns()),
            };
            output::print(&text)?;
            if let Some(ended) = ended.filter(|ended| !ended.is_empty()) {
                output::print(&("\n".to_owned() + &table::ended(&ended, now, columns())))?;
            }
            for tenant in &tenants {
                output::print(&table::hindered(tenant, &everyone))?;
            }
            output::print(&table::groups(&tenants))?;
            output::print(&table::at_launch(&tenants))?;
            for fault in &status.faults {
                output::print(&table::told(fault, now))?;
            }
            for device in devices {
                output::print(&table::foreign(device, devices))?;
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// One name in each line, with the user where several users have tenants of that name.
fn names(all: &[(&str, &str)]) -> String {
    let line = |(user, name): &(&str, &str)| {
        let elsewhere = |(other, same): &(&str, &str)| same == name && other != user;
        match all.iter().any(elsewhere) {
            true => format!("{user}/{name}\n"),
            false => format!("{name}\n"),
        }
    };
    all.iter().map(line).collect()
}

/// Columns of the terminal; none: the output goes elsewhere, and is not cut.
fn columns() -> Option<usize> {
    let out = std::io::stdout();
    let size = rustix::termios::tcgetwinsize(&out).ok();
    let wide = size
        .map(|size| usize::from(size.ws_col))
        .filter(|it| *it > 0);
    wide.filter(|_| out.is_terminal())
}

#[cfg(test)]
mod tests {
    use gpumux_daemon::api::types::TenantState;

    use super::*;

    #[test]
    fn names_of_several_users_are_told_apart() {
        let all = [("ada", "train"), ("bob", "train"), ("bob", "serve")];
        assert_eq!(names(&all), "ada/train\nbob/train\nserve\n");
        let again = [("ada", "train"), ("ada", "train")];
        assert_eq!(names(&again), "train\ntrain\n");
    }

    #[test]
    fn help_describes_every_state() {
        for state in TenantState::ALL {
            let line = format!("\n  {:10}  ", state.name());
            assert!(EXAMPLES.contains(&line), "{line}");
        }
    }
}
