//! `gpumux memory`: what each tenant has of each device's memory. `gpumux sleep` and `gpumux wake` move it.

use std::process::ExitCode;

use gpumux_daemon::api::types::{DeviceMemory, HostMemory, MemoryShare, Tenant};
use serde::Serialize;

use super::client;
use crate::output;

const EXAMPLES: &str = "\
Examples:
  gpumux memory
  gpumux memory --json | jq '.devices[].tenants[] | {tenant, in_use, swapped}'

OCCUPIED is what contexts and programs that are no tenants take. ABOVE is what a tenant has beyond its \
guarantee: it is taken back when others are entitled to it. PINNED cannot be moved to the host.";

/// Show what each tenant has of each device's memory
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Listing {
    devices: Vec<DeviceMemory>,
    host: HostMemory,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let (devices, host) = client::block(async |client| {
        Ok((client.memory().await?, client.status().await?.host_memory))
    })?;
    if args.json {
        output::json(&Listing { devices, host })?;
        return Ok(ExitCode::SUCCESS);
    }
    for device in &devices {
        output::print(&table(device))?;
    }
    output::print(&kept(&host))?;
    Ok(ExitCode::SUCCESS)
}

/// What moved memory takes on the host.
fn kept(host: &HostMemory) -> String {
    let limit = host
        .limit
        .map(|it| format!(" of at most {}", output::bytes(it)));
    let place = host.location.as_ref().map(|it| format!(" in {it}"));
    format!(
        "host: {}{}{} kept for memory that is moved there\n",
        output::bytes(host.used),
        limit.unwrap_or_default(),
        place.unwrap_or_default()
    )
}

fn table(device: &DeviceMemory) -> String {
    let bytes = output::bytes;
    let title = format!(
        "{}: {} in all, {} occupied, {} free\n",
        device.device,
        bytes(device.total),
        bytes(device.occupied),
        bytes(device.free)
    );
    let mut rows = output::head("TENANT|IN USE|GUARANTEED|LIMIT|ABOVE|PINNED|SWAPPED");
    let is_here = |it: &&MemoryShare| it.in_use + it.swapped + it.guaranteed > 0;
    let (here, none): (Vec<_>, Vec<_>) = device.tenants.iter().partition(is_here);
    for tenant in &here {
        rows.push(vec![
            tenant.tenant.clone(),
            bytes(tenant.in_use),
            bytes(tenant.guaranteed),
            tenant.limit.map_or_else(|| "-".to_owned(), bytes),
            bytes(tenant.above_guarantee),
            bytes(tenant.pinned),
            bytes(tenant.swapped),
        ]);
    }
    let none: Vec<&str> = none.iter().map(|it| it.tenant.as_str()).collect();
    let none = match none.is_empty() {
        true => String::new(),
        false => format!("without memory here: {}\n", none.join(", ")),
    };
    let table = match here.is_empty() {
        true => String::new(),
        false => output::table(&rows),
    };
    title + &table + &none
}

/// The help of `gpumux sleep`.
pub(crate) const SLEEP: &str = "\
Examples:
  gpumux sleep serve
  gpumux wake serve

The tenant is frozen, maybe in the middle of a kernel, and its memory is moved to the host. It comes back with \
its next CUDA call, or with `gpumux wake`. Returns when the move is done.";

/// The help of `gpumux wake`.
pub(crate) const WAKE: &str = "\
Examples:
  gpumux sleep serve
  gpumux wake serve

Brings back what `gpumux sleep`, `--sleep-after` or other tenants' need moved to the host, so that the next CUDA call need not wait \
for it. Returns when the memory is on the device; where that has no room, the command waits or reports it.";

/// Which tenant
#[derive(clap::Args)]
pub(crate) struct Move {
    /// The tenant, as `gpumux ps` names it
    name: String,
    #[command(flatten)]
    printed: output::Printed,
}

pub(crate) fn sleep(args: &Move) -> anyhow::Result<ExitCode> {
    let name = &args.name;
    client::about(name, async |client| client.sleep(name).await)?;
    report(args, true)
}

pub(crate) fn wake(args: &Move) -> anyhow::Result<ExitCode> {
    let name = &args.name;
    client::about(name, async |client| client.wake(name).await)?;
    report(args, false)
}

fn report(args: &Move, asleep: bool) -> anyhow::Result<ExitCode> {
    if args.printed.quiet {
        return Ok(ExitCode::SUCCESS);
    }
    let tenant = client::block(async |client| client.tenant(&args.name).await)?;
    (args.printed).print(&tenant, || located(&tenant, asleep))?;
    Ok(ExitCode::SUCCESS)
}

/// Where a tenant's memory is after a request to move it, and what stays on a device.
fn located(tenant: &Tenant, asleep: bool) -> String {
    let sum = |of: fn(&MemoryShare) -> u64| tenant.memory.iter().map(of).sum::<u64>();
    let (here, away) = (sum(|it| it.in_use), sum(|it| it.swapped));
    let place = match (asleep, away) {
        (true, 0) if here == sum(|it| it.pinned) => "on the GPU: none of it can be moved",
        (true, 0) => "on the GPU: its next work has brought it back",
        (true, _) => "on the host",
        (false, _) => "back on the GPU",
    };
    let name = &tenant.name;
    let (here, away) = (output::bytes(here), output::bytes(away));
    let place = format!("{name}: its memory is {place} ({here} on the GPU, {away} on the host)\n");
    let stays = tenant.memory.iter().filter(|_| asleep);
    let stays = stays.filter_map(|it| Some(format!("{name}: {}\n", it.stays(&it.device)?)));
    [place].into_iter().chain(stays).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tenants_without_memory_on_a_device_have_no_rows() {
        let share = |tenant: &str, in_use, guaranteed, swapped| MemoryShare {
            tenant: tenant.into(),
            in_use,
            guaranteed,
            swapped,
            ..MemoryShare::default()
        };
        let all = [
            share("a", 1, 0, 0),
            share("b", 0, 0, 0),
            share("c", 0, 1, 0),
            share("d", 0, 0, 1),
            share("e", 0, 0, 0),
        ];
        let device = |tenants: &[MemoryShare]| {
            table(&DeviceMemory {
                tenants: tenants.into(),
                ..DeviceMemory::default()
            })
        };
        let text = device(&all);
        let first = |line: &str| line.split(' ').next().unwrap_or_default().to_owned();
        let lines: Vec<String> = text.lines().skip(1).map(first).collect();
        assert_eq!(lines, ["TENANT", "a", "c", "d", "without"], "{text}");
        assert!(text.ends_with("without memory here: b, e\n"), "{text}");
        assert_eq!(device(&all[1..2]).lines().count(), 2, "no head alone");
        assert_eq!(device(&[]).lines().count(), 1);
    }

    #[test]
    fn memory_that_stays_on_a_device_is_named_with_its_reason() {
        let asleep = |in_use: u64, pinned: u64, swapped: u64| {
            let tenant = Tenant {
                name: "a".into(),
                memory: vec![MemoryShare {
                    device: "GPU-0".into(),
                    tenant: "a".into(),
                    guaranteed: 0,
                    limit: None,
                    in_use: in_use << 20,
                    above_guarantee: 0,
                    pinned: pinned << 20,
                    swapped: swapped << 20,
                    above_limit: 0,
                }],
                ..Tenant::default()
            };
            located(&tenant, true)
        };
        let stays = "\na: 2 MiB of its memory stays on GPU-0: managed or";
        let all = asleep(2, 2, 0);
        assert!(
            all.starts_with("a: its memory is on the GPU: none"),
            "{all}"
        );
        assert!(all.contains(stays), "{all}");
        let part = asleep(2, 2, 64);
        assert!(
            part.starts_with("a: its memory is on the host (2 MiB"),
            "{part}"
        );
        assert!(part.contains(stays), "{part}");
        let back = asleep(66, 2, 0);
        assert!(back.contains("its next work has brought it back"), "{back}");
        assert!(!asleep(0, 0, 64).contains("stays"));
    }
}
