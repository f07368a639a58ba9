//! Processes that undo controls: what is looked at, and how [`gpumux_core::tamper`]'s decisions are carried out.

use std::collections::{BTreeMap, BTreeSet};

use gpumux_core::{
    DomainId, Micros, TenantId, TenantSpec, controller,
    tamper::{self, Conduct, Sample, TamperRule, Tampering, Then, Watch},
};

use super::{domain::Domain, model::Happening, record::What, state::State};
use crate::{api::types, devices::Used, link::SessionId};

/// The longest time between two looks at suspicions that counts: they are looked at with every step.
const LONGEST: Micros = Micros::from_secs(1);

/// What a process may have done, unless it is explained before [`tamper::CONFIRMED`].
#[derive(Debug)]
struct Suspicion {
    /// How long it may still be explained.
    left: Micros,
    what: Tampering,
    session: SessionId,
    /// All groups that the process had on the device; for a timeslice, the one.
    groups: BTreeSet<DomainId>,
    device: String,
}

/// What is known of processes that undo controls.
#[derive(Debug)]
pub(super) struct Tampers {
    /// What follows.
    rule: TamperRule,
    /// Processes with groups of their own, by device and pid.
    watches: BTreeMap<(String, u32), Watch>,
    suspicions: Vec<Suspicion>,
    /// When they were looked at last.
    judged: Micros,
    conducts: BTreeMap<TenantId, Conduct>,
    /// Tenants whose settings do not hold.
    lowered: BTreeSet<TenantId>,
}

/// What was known of a tenant before it was pardoned.
pub(super) struct Pardon {
    tenant: TenantId,
    lowered: bool,
    conduct: Option<Conduct>,
}

impl Tampers {
    pub(super) fn new(rule: TamperRule) -> Self {
        Self {
            rule,
            watches: BTreeMap::new(),
            suspicions: Vec::new(),
            judged: Micros::ZERO,
            conducts: BTreeMap::new(),
            lowered: BTreeSet::new(),
        }
    }

    /// For people.
    pub(super) fn list(&self, now: Micros) -> BTreeMap<TenantId, types::Tampering> {
        let recent = self.conducts.iter().filter(|(_, it)| it.is_recent(now));
        let ids: BTreeSet<&TenantId> = recent.map(|(id, _)| id).chain(&self.lowered).collect();
        let shown = |id: &TenantId| types::Tampering {
            findings: self.conducts.get(id).map_or(0, |it| it.findings),
            lowered: self.lowered.contains(id),
        };
        ids.into_iter().map(|id| (*id, shown(id))).collect()
    }

    /// What a tenant may have of this spec.
    pub(super) fn permitted(&self, tenant: TenantId, spec: TenantSpec) -> TenantSpec {
        match self.lowered.contains(&tenant) {
            true => tamper::lowered(&spec),
            false => spec,
        }
    }

    /// One of the same kind that is not explained yet covers it.
    fn suspect(&mut self, of: Suspicion) {
        let same = |it: &Suspicion| it.what == of.what && it.groups == of.groups;
        if !self.suspicions.iter().any(same) {
            self.suspicions.push(of);
        }
    }

    /// The tenants whose settings do not hold.
    pub(super) fn lowered(&self) -> impl Iterator<Item = TenantId> {
        self.lowered.iter().copied()
    }

    /// A tenant's settings do not hold, as the last daemon had found.
    pub(super) fn lower(&mut self, tenant: TenantId) {
        self.lowered.insert(tenant);
    }

    /// A tenant's settings hold again, and what was found of it is forgotten: until it is undone.
    pub(super) fn pardon(&mut self, tenant: TenantId) -> Pardon {
        Pardon {
            tenant,
            lowered: self.lowered.remove(&tenant),
            conduct: self.conducts.remove(&tenant),
        }
    }

    /// What was pardoned counts as before.
    pub(super) fn undo(&mut self, pardon: Pardon) {
        self.lowered.extend(pardon.lowered.then_some(pardon.tenant));
        let conduct = pardon.conduct.map(|conduct| (pardon.tenant, conduct));
        self.conducts.extend(conduct);
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

    /// NVML has measured processes on this device: suspects those that ran while they were frozen, and freezes them again.
    pub(super) fn watch_frozen(&mut self, state: &mut State, uuid: &str, used: Option<Used>) {
        let now = state.now();
        let of = |(pid, (end, used)): (&u32, &(_, _))| {
            let end = state.ago(*end);
            (*pid, Sample { end, used: *used })
        };
        let measured: Option<BTreeMap<u32, Sample>> = used
            .as_ref()
            .map(|used| used.samples.iter().map(of).collect());
        let Some(device) = state.devices.get_mut(uuid) else {
            return;
        };
        device.used_by = used.map(|it| it.parts);
        let Some((used, measured)) = device.used_by.as_ref().zip(measured) else {
            return;
        };
        let plausible = tamper::is_plausible(used.values().copied());
        let mut processes: BTreeMap<u32, Vec<(DomainId, &Domain)>> = BTreeMap::new();
        for (id, domain) in &device.domains {
            let own = processes.entry(domain.member.pid).or_default();
            own.push((*id, domain));
        }
        let (controller, sessions) = (&state.controller, &state.sessions);
        // NVML measures all groups of a process together: what one of them has must be known, and one session have them all.
        // What members of an MPS group use is not told apart.
        let is_known = |(id, domain): &(DomainId, &Domain)| {
            domain.group.is_none()
                && domain.launches.is_none()
                && !domain.is_free()
                && controller.domain(*id).is_some_and(|it| !it.is_faulty())
        };
        processes.retain(|pid, own| {
            let mut met = sessions.values().filter(|met| met.pid == *pid);
            let alone = met.next().is_none_or(|met| !met.unmanaged) && met.next().is_none();
            *pid != 0 && alone && own.iter().all(is_known)
        });
        let watches = &mut self.watches;
        watches.retain(|(on, pid), _| on != uuid || processes.contains_key(pid));
        let mut found = Vec::new();
        for (pid, own) in processes {
            let watch = watches.entry((uuid.to_owned(), pid)).or_default();
            let sample = measured.get(&pid).copied().filter(|_| plausible);
            let courses =
                (own.iter()).filter_map(|(id, _)| Some((*id, &controller.domain(*id)?.course)));
            if watch.look(now, courses, sample) {
                let session = own.first().map(|(_, domain)| domain.member.session);
                let groups: BTreeSet<DomainId> = own.iter().map(|(id, _)| *id).collect();
                found.extend(session.map(|session| (session, groups)));
            }
        }
        for (session, groups) in found {
            for id in &groups {
                state.controller.handle(now, controller::Event::Ran(*id));
            }
            self.suspect(Suspicion {
                left: tamper::CONFIRMED,
                what: Tampering::Thaw,
                session,
                groups,
                device: uuid.to_owned(),
            });
        }
    }

    /// The process's library reports that this group's timeslice was set: by the driver library, unless it reports that too often.
    pub(super) fn excuse(&mut self, state: &mut State, id: DomainId) {
        let mut domains = state.devices.values_mut();
        let Some(domain) = domains.find_map(|device| device.domains.get_mut(&id)) else {
            return;
        };
        domain.own_sets = domain.own_sets.saturating_add(1);
        if domain.own_sets > tamper::OWN_SETS {
            return;
        }
        self.suspect_changed(state);
        self.suspicions
            .retain(|it| it.what != Tampering::Timeslice || !it.groups.contains(&id));
    }

    /// Groups whose timeslices were changed are under suspicion.
    fn suspect_changed(&mut self, state: &mut State) {
        for (uuid, device) in &mut state.devices {
            for id in device.changed.drain(..) {
                if let Some(domain) = device.domains.get(&id) {
                    self.suspect(Suspicion {
                        left: tamper::CONFIRMED,
                        what: Tampering::Timeslice,
                        session: domain.member.session,
                        groups: BTreeSet::from([id]),
                        device: uuid.clone(),
                    });
                }
            }
        }
    }

    /// Counts what was suspected and not explained. Returns the tenants whose settings hold no longer.
    pub(super) fn judge(&mut self, state: &mut State) -> Vec<TenantId> {
        self.suspect_changed(state);
        let now = state.now();
        let passed = now.saturating_sub(std::mem::replace(&mut self.judged, now));
        // In a time in which this thread stood still, no explanation could arrive.
        let passed = passed.min(LONGEST);
        let due = |it: &mut Suspicion| {
            it.left = it.left.saturating_sub(passed);
            it.left == Micros::ZERO
        };
        let due: Vec<_> = self.suspicions.extract_if(.., due).collect();
        let mut lowered = Vec::new();
        for Suspicion {
            what,
            session,
            groups,
            device,
            ..
        } in due
        {
            let Some(device) = state.devices.get_mut(&device) else {
                continue;
            };
            let all = device.domains.iter();
            let own = all.filter(|(_, it)| it.member.session == session && !it.is_free());
            let own: BTreeSet<DomainId> = own.map(|(id, _)| *id).collect();
            // With a group that came or ended there may be an explanation.
            let same = match what {
                Tampering::Thaw => own == groups,
                Tampering::Timeslice | Tampering::Lease => groups.is_subset(&own),
            };
            let first = groups.first().and_then(|id| device.domains.get_mut(id));
            let Some(domain) = first.filter(|_| same) else {
                continue;
            };
            domain.tampered += 1;
            let (tenant, pid) = (domain.who.tenant, domain.member.pid);
            if what == Tampering::Thaw {
                device.record.push(now, &domain.who, What::Ran);
            }
            lowered.extend(self.convict(state, tenant, pid, what));
        }
        lowered
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
