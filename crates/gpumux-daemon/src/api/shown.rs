//! What clients are shown of what the daemon has.

use std::collections::BTreeMap;

use gpumux_core::{
    TenantId,
    broker::Line,
    ledger::{Entry, HostFull},
};

use super::{
    state::{Facts, state},
    types::{self, CollectiveFigures, DeviceMemory, MemoryShare},
};
use crate::{scheduler::View, tenants::Tenant};

/// A tenant with its domains.
pub(super) fn show(tenant: Tenant, view: &View) -> types::Tenant {
    let own = view.domains.iter().filter(|(id, _)| *id == tenant.id);
    let domains: Vec<types::Domain> = own.map(|(_, domain)| domain.clone()).collect();
    let mut devices: Vec<String> = domains.iter().map(|domain| domain.device.clone()).collect();
    devices.sort_unstable();
    devices.dedup();
    let standing = view.standings.get(&tenant.id);
    let needs_memory = standing.is_some_and(|it| it.waits);
    let host_full = standing.and_then(|it| it.host_full);
    let state = state(Facts {
        domains: &domains,
        used: (view.totals.keys()).any(|(id, _)| *id == tenant.id),
        swapped: view.swapped_out.contains(&tenant.id),
        needs_memory,
        tampers: view.tampering.contains_key(&tenant.id),
        uncontrolled: tenant.uncontrolled.is_some(),
    });
    let counted = view.counted.get(&tenant.id);
    let lines = view.memory.iter().flat_map(|line| {
        let own = line.entries.iter().filter(|(id, _)| *id == tenant.id);
        own.map(|(_, entry)| memory_share(&line.uuid, tenant.name.clone(), entry))
    });
    let memory: Vec<MemoryShare> = lines.collect();
    types::Tenant {
        asleep: view.swapped_out.contains(&tenant.id),
        swap_reason: view.swap_reasons.get(&tenant.id).copied(),
        waits_for_memory: needs_memory,
        lacks_on_host: host_full.map(HostFull::lacks),
        moves: view.moves.get(&tenant.id).copied().unwrap_or_default(),
        unlisted_calls: (view.unlisted.get(&tenant.id).into_iter().flatten())
            .cloned()
            .collect(),
        uncontrolled: tenant.uncontrolled,
        memory,
        name: tenant.name,
        class: tenant.spec.class,
        spec: tenant.spec,
        uid: tenant.uid,
        user: tenant.user,
        may_use: tenant.devices,
        lapsed: view.lapsed.contains(&tenant.id),
        tampering: view.tampering.get(&tenant.id).copied(),
        pids: tenant.pids,
        command: tenant.life.command,
        log: tenant.life.log,
        lost_output: tenant.life.lost_output,
        devices,
        domains,
        since: tenant.since,
        state,
        placement: tenant.placement,
        work: counted.map_or(0, |all| all.work),
        progress: counted.map_or(0, |all| all.progress),
        collectives: counted.map_or_else(Default::default, |all| CollectiveFigures {
            calls: all.collectives.calls,
            bytes: all.collectives.bytes,
            in_progress: all.collectives.in_progress,
        }),
        hints: counted.map(|all| all.hints.into()).unwrap_or_default(),
        requests: counted
            .map(|all| (&all.requests).into())
            .unwrap_or_default(),
    }
}

pub(super) fn memory_map(view: &View, names: &BTreeMap<TenantId, String>) -> Vec<DeviceMemory> {
    let device = |line: &Line| DeviceMemory {
        device: line.uuid.clone(),
        total: line.capacity,
        occupied: line.occupied,
        free: line.free,
        tenants: (line.entries.iter())
            .map(|(id, entry)| {
                let name = names.get(id).cloned().unwrap_or_default();
                memory_share(&line.uuid, name, entry)
            })
            .collect(),
    };
    view.memory.iter().map(device).collect()
}

fn memory_share(device: &str, tenant: String, entry: &Entry) -> MemoryShare {
    MemoryShare {
        device: device.to_owned(),
        tenant,
        guaranteed: entry.share.guaranteed,
        limit: Some(entry.share.limit).filter(|limit| *limit != u64::MAX),
        in_use: entry.holding.resident(),
        above_guarantee: entry.borrowed(),
        pinned: entry.holding.pinned,
        swapped: entry.holding.swapped,
        above_limit: (entry.holding.all()).saturating_sub(entry.share.limit),
    }
}

/// What others than local users may see of a tenant: its command may name secrets.
pub(super) fn outward(mut tenant: types::Tenant, local: bool) -> types::Tenant {
    if !local {
        (tenant.command, tenant.log) = (program_only(&tenant.command), None);
    }
    tenant
}

/// Of a command, the program's name.
pub(super) fn program_only(command: &str) -> String {
    let program = command.split(' ').next().unwrap_or_default();
    program.rsplit('/').next().unwrap_or_default().to_owned()
}
