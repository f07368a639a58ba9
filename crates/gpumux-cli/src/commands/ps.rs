//! `gpumux ps`: who shares the devices, what each was promised and what it gets.

use std::{
    process::ExitCode,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use gpumux_core::space::Way;
use gpumux_daemon::api::types::{Domain, Fault, MemoryShare, Placement, Tenant, TenantState};
use serde::Serialize;

use super::client;
use crate::output;

const EXAMPLES: &str = "\
Examples:
  gpumux ps
  gpumux ps --json | jq '.tenants[] | {name, class, pids}'

PROMISED and RECEIVED are shares of the device; RECEIVED is that of the last second. \
MEMORY is what it has on the device, SWAPPED what it \
has on the host. A tenant without a device has not used one yet. SHARING is `time`, or `space` and the trust domain \
of the group, and the part of the SMs that it is confined to: `gpumux explain NAME` says why. Guarantees that do not hold yet, and faults in groups, are listed below the tenants.";

/// List the tenants
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Print JSON: `faults` in groups, and `tenants` with name, class, pids, devices, domains (timeslice_us, frozen, …) and since
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Listing {
    tenants: Vec<Tenant>,
    faults: Vec<Fault>,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let tenants = client::block(async |client| client.tenants().await)?;
    let faults = client::block(async |client| client.status().await)?.faults;
    if args.json {
        output::json(&Listing { tenants, faults })?;
    } else {
        let now = SystemTime::now();
        output::print(&table(&tenants, now))?;
        for tenant in &tenants {
            output::print(&hindered(tenant, &tenants))?;
        }
        for fault in &faults {
            output::print(&told(fault, now))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// One row per tenant and domain; a tenant without domains has one row.
fn table(tenants: &[Tenant], now: SystemTime) -> String {
    let head = [
        "NAME", "CLASS", "STATE", "SHARING", "PIDS", "DEVICE", "SLICE", "PROMISED", "RECEIVED",
        "MEMORY", "LIMIT", "SWAPPED", "AGE",
    ];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    for tenant in tenants {
        let domains = tenant.domains.iter().map(Some);
        let none = tenant.domains.is_empty().then_some(None);
        for (n, domain) in domains.chain(none).enumerate() {
            let mut row = match n {
                0 => vec![
                    tenant.name.clone(),
                    tenant.class.to_string(),
                    if tenant.asleep {
                        "asleep"
                    } else {
                        state(tenant.state)
                    }
                    .to_owned(),
                    sharing(&tenant.placement),
                    join(&tenant.pids),
                ],
                _ => vec![String::new(); 5],
            };
            row.extend(domain.map_or_else(|| vec!["-".to_owned(); 4], columns));
            // Once per device, however many processes use it.
            let device = domain.map(|domain| &domain.device);
            let shown = tenant.domains[..n.min(tenant.domains.len())]
                .iter()
                .any(|before| Some(&before.device) == device);
            let memory = tenant.memory.iter();
            let memory = memory.filter(|it| Some(&it.device) == device && !shown);
            row.extend(
                memory
                    .map(memory_columns)
                    .next()
                    .unwrap_or_else(|| vec!["-".to_owned(); 3]),
            );
            row.push(if n == 0 {
                age(tenant.since, now)
            } else {
                String::new()
            });
            rows.push(row);
        }
    }
    output::table(&rows)
}

fn columns(domain: &Domain) -> Vec<String> {
    let slice = match domain.frozen {
        true => "frozen".to_owned(),
        false => format!("{} µs", domain.timeslice_us),
    };
    vec![
        short(&domain.device),
        slice,
        share(domain.promised_share),
        share(domain.received_share),
    ]
}

fn sharing(placement: &Placement) -> String {
    match (placement.way, &placement.trust, placement.sm_percent) {
        (Way::Space, Some(trust), Some(percent)) => format!("space {trust} {percent}%"),
        (Way::Space, Some(trust), None) => format!("space {trust}"),
        (Way::Time | Way::Space, _, _) => "time".into(),
    }
}

/// A line about a guarantee that does not hold inside a group, if it does not.
fn hindered(tenant: &Tenant, all: &[Tenant]) -> String {
    let by = tenant.hindered_by(all);
    match by.is_empty() {
        true => String::new(),
        false => format!(
            "{}: its guarantee of {} holds only once these start anew: {}\n",
            tenant.name,
            share(tenant.spec.guaranteed),
            by.join(", ")
        ),
    }
}

/// A line about a fault in a group.
fn told(fault: &Fault, now: SystemTime) -> String {
    let culprit = fault.culprit.as_deref().unwrap_or("an unknown member");
    let others = match fault.others.is_empty() {
        true => "nobody else".into(),
        false => fault.others.join(", "),
    };
    let after = match fault.restarted_ms {
        Some(ms) => format!("new members start again since {ms} ms later"),
        None => "the group could not be started again".into(),
    };
    format!(
        "{} ago in group {}: a fault (error {}) of {culprit} ended {others}; {after} ({})\n",
        age(fault.at, now),
        fault.group,
        fault.error,
        fault.evidence
    )
}

fn memory_columns(memory: &MemoryShare) -> Vec<String> {
    vec![
        output::bytes(memory.in_use),
        memory.limit.map_or_else(|| "-".to_owned(), output::bytes),
        output::bytes(memory.swapped),
    ]
}

fn state(state: TenantState) -> &'static str {
    match state {
        TenantState::Waiting => "waiting",
        TenantState::Running => "running",
        TenantState::Idle => "idle",
        TenantState::Faulty => "FAULTY",
    }
}

fn share(share: f64) -> String {
    format!("{:.0}%", share * 100.0)
}

/// As much of a UUID as tells devices apart: `GPU-5efc3a7e`.
fn short(uuid: &str) -> String {
    uuid.match_indices('-')
        .nth(1)
        .map_or(uuid, |(end, _)| &uuid[..end])
        .to_owned()
}

fn join(pids: &[u32]) -> String {
    pids.iter()
        .map(u32::to_string)
        .collect::<Vec<_>>()
        .join(",")
}

fn age(since: u64, now: SystemTime) -> String {
    let seconds = now
        .duration_since(UNIX_EPOCH + Duration::from_secs(since))
        .unwrap_or_default()
        .as_secs();
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m{:02}s", seconds / 60, seconds % 60),
        3600..86400 => format!("{}h{:02}m", seconds / 3600, seconds % 3600 / 60),
        _ => format!("{}d{:02}h", seconds / 86400, seconds % 86400 / 3600),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_and_names_are_short() {
        let now = UNIX_EPOCH + Duration::from_secs(100_000);
        assert_eq!(age(99_995, now), "5s");
        assert_eq!(age(99_000, now), "16m40s");
        assert_eq!(age(0, now), "1d03h");
        assert_eq!(age(100_001, now), "0s", "the clock was set back");
        assert_eq!(short("GPU-5efc3a7e-70d7-750a"), "GPU-5efc3a7e");
        assert_eq!(short("odd"), "odd");
    }
}
