//! Guarantees that lapse while their tenants have no work, where the user's policy says so, and hold again with the next work.

use std::collections::{BTreeMap, BTreeSet};

use gpumux_core::{Micros, TenantId, TenantSpec, broker::Event, controller};

use super::{domain, engine::Engine, memory};

/// What is known of guarantees that may lapse.
#[derive(Debug, Default)]
pub(super) struct Expiry {
    /// Since when tenants have had no work.
    idle: BTreeMap<TenantId, Micros>,
    /// The specs of tenants whose guarantees have lapsed.
    pub(super) lapsed: BTreeMap<TenantId, TenantSpec>,
}

impl Expiry {
    pub(super) fn forget(&mut self, tenant: TenantId) {
        self.idle.remove(&tenant);
        self.lapsed.remove(&tenant);
    }
}

impl Engine {
    /// Lets guarantees lapse whose tenants have had no work for as long as their users' policies say, and gives those back whose
    /// tenants have work, as far as they still fit.
    pub(super) fn expire_guarantees(&mut self) {
        let limit = |tenant: &TenantId| self.owners.get(tenant)?.policy.guarantee_expires_s;
        let subject = |(id, spec): (&TenantId, &TenantSpec)| {
            let guaranteed = spec.guaranteed > 0.0 || spec.memory_guaranteed > 0;
            let seconds =
                limit(id).filter(|_| guaranteed || self.expiry.lapsed.contains_key(id))?;
            Some((*id, Micros::from_secs(seconds)))
        };
        let subjects: Vec<(TenantId, Micros)> = self.tenants.iter().filter_map(subject).collect();
        if subjects.is_empty() {
            return;
        }
        let now = self.now();
        let mut working = BTreeSet::new();
        for device in self.devices.values_mut() {
            device.sample(now, &mut self.controller);
            let known = self.controller.domains(device.index);
            let all = device.domains.values().zip(known);
            let at_work = all.filter(|(_, known)| domain::now(known).demand.may_run());
            working.extend(at_work.map(|(domain, _)| domain.who.tenant));
        }
        for (id, limit) in subjects {
            if working.contains(&id) {
                self.expiry.idle.remove(&id);
                if let Some(spec) = self.expiry.lapsed.get(&id).cloned() {
                    // What does not fit now may fit later.
                    let _ = self.put_spec(id, spec);
                }
                continue;
            }
            let since = *self.expiry.idle.entry(id).or_insert(now);
            if now.saturating_sub(since) >= limit && !self.expiry.lapsed.contains_key(&id) {
                self.lapse(id);
            }
        }
    }

    fn lapse(&mut self, id: TenantId) {
        let Some(spec) = self.tenants.get_mut(&id) else {
            return;
        };
        let full = spec.clone();
        (spec.guaranteed, spec.memory_guaranteed) = (0.0, 0);
        let terms = memory::terms(spec);
        let user = self.users.get(&id).copied().unwrap_or_default();
        let changed = controller::Event::Tenant(id, user, spec.clone());
        self.expiry.lapsed.insert(id, full);
        self.controller.handle(self.now(), changed);
        self.memory_event(Event::Tenant(id, terms));
        tracing::info!(tenant = id.0, "its guarantees lapse, since it has no work");
    }
}
