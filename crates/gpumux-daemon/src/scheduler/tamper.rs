//! Processes that undo controls: what is looked at, and how [`gpumux_core::tamper`]'s decisions are carried out.

use std::collections::{BTreeMap, BTreeSet};

use gpumux_core::{
    DomainId, Micros, TenantId, TenantSpec, controller,
    tamper::{self, Conduct, TamperRule, Tampering, Then, Watch},
};

use super::{
    domain::Domain,
    model::{Happening, SessionId},
    record::What,
    state::State,
};
use crate::api::types;

/// What is known of processes that undo controls.
#[derive(Debug)]
pub(super) struct Tampers {
    /// What follows.
    rule: TamperRule,
    /// Processes with groups of their own, by device and pid.
    watches: BTreeMap<(String, u32), Watch>,
    conducts: BTreeMap<TenantId, Conduct>,
    /// Tenants whose settings do not hold.
    lowered: BTreeSet<TenantId>,
}

impl Tampers {
    pub(super) fn new(rule: TamperRule) -> Self {
        Self {
            rule,
            watches: BTreeMap::new(),
            conducts: BTreeMap::new(),
            lowered: BTreeSet::new(),
        }
    }

    /// For people.
    pub(super) fn list(&self, now: Micros) -> BTreeMap<TenantId, types::Tampering> {
        let shown = |(id, conduct): (&TenantId, &Conduct)| {
            let lowered = self.lowered.contains(id);
            let tampering = types::Tampering {
                findings: conduct.findings,
                lowered,
            };
            (lowered || conduct.is_recent(now)).then_some((*id, tampering))
        };
        self.conducts.iter().filter_map(shown).collect()
    }

    /// What a tenant may have of this spec.
    pub(super) fn permitted(&self, tenant: TenantId, spec: TenantSpec) -> TenantSpec {
        match self.lowered.contains(&tenant) {
            true => tamper::lowered(&spec),
            false => spec,
        }
    }

    /// Its settings hold again.
    pub(super) fn pardon(&mut self, tenant: TenantId) {
        self.lowered.remove(&tenant);
        self.conducts.remove(&tenant);
    }

    /// A process reports that its lease has expired although it was renewed in time: that is counted, and it stays under control.
    /// Returns its tenant if that has no settings any more.
    pub(super) fn disbelieve(&mut self, state: &mut State, session: SessionId) -> Option<TenantId> {
        let met = state.sessions.get_mut(&session)?;
        met.epoch = met.page.expired();
        let (epoch, tenant, pid) = (met.epoch, met.tenant, met.pid);
        for device in state.devices.values_mut() {
            let own = device.domains.values_mut();
            own.filter(|it| it.member.session == session)
                .for_each(|it| it.epoch = epoch);
        }
        self.convict(state, tenant, pid, Tampering::Lease)
    }

    /// NVML has measured processes on this device: finds those that ran while they were frozen.
    pub(super) fn watch_frozen(&mut self, state: &mut State, uuid: &str) {
        let now = state.now();
        let Some(device) = state.devices.get_mut(uuid) else {
            return;
        };
        state.controller.account_until(device.index, now);
        let used = device.used_by.as_ref();
        let used = used.filter(|all| tamper::is_plausible(all.values().copied()));
        let mut processes: BTreeMap<u32, BTreeMap<DomainId, Micros>> = BTreeMap::new();
        // What members of an MPS group use is not told apart.
        let own = |(_, domain): &(&DomainId, &Domain)| {
            domain.group.is_none() && domain.member.pid != 0 && !domain.is_free()
        };
        for (id, domain) in device.domains.iter().filter(own) {
            let known = state.controller.domain(*id).filter(|it| !it.is_faulty());
            if let Some(known) = known {
                let groups = processes.entry(domain.member.pid).or_default();
                groups.insert(*id, known.frozen(now));
            }
        }
        self.watches
            .retain(|(on, pid), _| on != uuid || processes.contains_key(pid));
        let mut found = Vec::new();
        for (pid, frozen) in processes {
            let groups: Vec<DomainId> = frozen.keys().copied().collect();
            let watch = self.watches.entry((uuid.to_owned(), pid));
            let used = used.map(|all| all.get(&pid).copied().unwrap_or(0.0));
            if watch.or_default().look(now, frozen, used) {
                found.push(groups);
            }
        }
        for groups in found {
            let first = groups.first().and_then(|id| device.domains.get_mut(id));
            let Some(domain) = first else {
                continue;
            };
            domain.tampered += 1;
            let (tenant, pid) = (domain.who.tenant, domain.member.pid);
            device.record.push(now, &domain.who, What::Ran);
            for id in groups {
                state.controller.handle(now, controller::Event::Ran(id));
            }
            device.tampered.push((tenant, pid, Tampering::Thaw));
        }
    }

    /// Counts what was found. Returns the tenants whose settings hold no longer.
    pub(super) fn judge(&mut self, state: &mut State) -> Vec<TenantId> {
        let found = state.devices.values_mut();
        let found: Vec<_> = found.flat_map(|it| it.tampered.drain(..)).collect();
        let convict = |(tenant, pid, what)| self.convict(state, tenant, pid, what);
        found.into_iter().filter_map(convict).collect()
    }

    /// A process was found tampering. Returns its tenant if that has no settings any more.
    fn convict(
        &mut self,
        state: &State,
        tenant: TenantId,
        pid: u32,
        what: Tampering,
    ) -> Option<TenantId> {
        if !state.tenants.contains_key(&tenant) {
            return None;
        }
        let now = state.now();
        let conduct = self.conducts.entry(tenant).or_default();
        let verdict = conduct.found(now, &self.rule);
        let then = match verdict.then {
            Some(Then::Lower) => (self.lowered.insert(tenant)).then_some(Then::Lower),
            Some(Then::End) => Some(Then::End),
            Some(Then::Report) | None => None,
        };
        if verdict.is_news || then.is_some() {
            tracing::warn!(tenant = tenant.0, pid, ?then, "it {}", what.deed());
            state.report(Happening::Tampered {
                tenant,
                pid,
                what,
                then,
            });
        }
        (then == Some(Then::Lower)).then_some(tenant)
    }
}
