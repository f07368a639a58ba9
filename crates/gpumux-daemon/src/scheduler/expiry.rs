//! Guarantees that lapse while their tenants have no work, where the user's policy says so, and hold again with the next work.

use std::collections::{BTreeMap, BTreeSet};

use gpumux_core::{Micros, TenantId, TenantSpec};

use super::{
    domain::{self, Domain},
    state::State,
};

/// What is known of guarantees that may lapse.
#[derive(Debug, Default)]
pub(super) struct Expiry {
    /// Since when tenants have had no work.
    idle: BTreeMap<TenantId, Micros>,
    /// The specs of tenants whose guarantees have lapsed.
    lapsed: BTreeMap<TenantId, TenantSpec>,
}

/// What becomes of a tenant's guarantees.
pub(super) enum Due {
    /// They lapse: until it has work, this is its spec.
    Lapse(TenantSpec),
    /// They hold again, as far as they still fit: this is its full spec.
    Return(TenantSpec),
}

/// All of a spec but its guarantees.
pub(super) fn without_guarantees(spec: &TenantSpec) -> TenantSpec {
    TenantSpec {
        guaranteed: 0.0,
        memory_guaranteed: 0,
        ..spec.clone()
    }
}

impl Expiry {
    pub(super) fn forget(&mut self, tenant: TenantId) {
        self.idle.remove(&tenant);
        self.lapsed.remove(&tenant);
    }

    /// A tenant's guarantees hold.
    pub(super) fn holds(&mut self, tenant: TenantId) {
        self.lapsed.remove(&tenant);
    }

    /// A tenant's guarantees do not hold until it has work and they fit: this is its full spec.
    pub(super) fn lapse(&mut self, tenant: TenantId, full: TenantSpec) {
        self.lapsed.insert(tenant, full);
    }

    /// Whether a tenant's guarantees have lapsed, and were no lower than these.
    pub(super) fn covers(&self, tenant: TenantId, spec: &TenantSpec) -> bool {
        self.lapsed.get(&tenant).is_some_and(|full| {
            spec.guaranteed <= full.guaranteed && spec.memory_guaranteed <= full.memory_guaranteed
        })
    }

    /// The tenants whose guarantees have lapsed.
    pub(super) fn lapsed(&self) -> impl Iterator<Item = TenantId> {
        self.lapsed.keys().copied()
    }

    /// Which guarantees lapse now, because their tenants have had no work for as long as their users' policies say, and which are
    /// due again, because their tenants have work.
    pub(super) fn due(&mut self, state: &mut State) -> Vec<(TenantId, Due)> {
        let limit = |tenant: &TenantId| state.owners.get(tenant)?.policy.guarantee_expires_s;
        let subject = |(id, spec): (&TenantId, &TenantSpec)| {
            let guaranteed = spec.guaranteed > 0.0 || spec.memory_guaranteed > 0;
            let limit = limit(id).map(Micros::from_secs);
            let is = self.lapsed.contains_key(id) || guaranteed && limit.is_some();
            is.then_some((*id, limit))
        };
        let subjects: Vec<(TenantId, Option<Micros>)> =
            state.tenants.iter().filter_map(subject).collect();
        if subjects.is_empty() {
            return Vec::new();
        }
        let now = state.now();
        let mut working = BTreeSet::new();
        state.sample(now);
        for device in state.devices.values() {
            let known = state.controller.domains(device.index);
            let all = device.domains.values().zip(known);
            let worked = |domain: &Domain| {
                let idle = self.idle.get(&domain.who.tenant);
                idle.is_some_and(|since| domain.worked > *since)
            };
            let at_work =
                all.filter(|(domain, known)| domain::now(known).demand.may_run() || worked(domain));
            working.extend(at_work.map(|(domain, _)| domain.who.tenant));
        }
        let mut due = Vec::new();
        for (id, limit) in subjects {
            // Where guarantees lapse no longer, none has.
            let Some(limit) = limit.filter(|_| !working.contains(&id)) else {
                self.idle.remove(&id);
                let full = self.lapsed.get(&id).cloned();
                due.extend(full.map(|spec| (id, Due::Return(spec))));
                continue;
            };
            let since = *self.idle.entry(id).or_insert(now);
            if now.saturating_sub(since) < limit || self.lapsed.contains_key(&id) {
                continue;
            }
            let Some(full) = state.tenants.get(&id).cloned() else {
                continue;
            };
            due.push((id, Due::Lapse(without_guarantees(&full))));
            self.lapsed.insert(id, full);
        }
        due
    }
}
