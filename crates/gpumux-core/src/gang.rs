//! Gangs: a tenant's domains on several devices run and freeze together.
//!
//! Such a tenant's domains wait for each other (collectives spin), so device time without the others is wasted.
//! A plan knows only its own device; here the plans of all devices are made to agree:
//! plan each device alone, look for a tenant that runs on one and is frozen on another, decide for it, pin
//! that, and plan again until none is left. The device on which most domains compete decides for the tenant, because there
//! its turn costs others most. On a gang's devices who runs, runs alone: shares by slices would let its domains meet
//! only now and then. If two gangs need the same device, the one that is owed more comes first and
//! the other waits everywhere, so that another tenant may use its devices.

use std::collections::{BTreeMap, BTreeSet};

use crate::{DomainState, Memory, Plan, Policy, RunState, Snapshot, TenantId};

/// One of the devices to plan together.
pub struct Device<'a> {
    /// Its policy.
    pub policy: &'a dyn Policy,
    /// Its state.
    pub snapshot: &'a Snapshot,
    /// What its policy remembers.
    pub memory: &'a mut Memory,
}

/// Plans several devices so that every tenant that has work on more than one is enabled on all of those or frozen
/// on all. Without such a tenant, the plans are those that the policies make alone.
pub fn plan(devices: &mut [Device]) -> Vec<Plan> {
    let gangs = gangs(devices);
    let mut drafts: Vec<Draft> = devices
        .iter()
        .map(|device| Draft::new(device, &gangs))
        .collect();
    let mut decided: BTreeMap<TenantId, RunState> = BTreeMap::new();
    // Every round decides for one gang more.
    for _ in 0..gangs.len() {
        let undecided = gangs
            .iter()
            .filter(|gang| !decided.contains_key(gang) && split(**gang, &drafts));
        let owed = |gang: TenantId| drafts.iter().map(|draft| draft.owed(gang)).sum::<f64>();
        // Of equals the lowest id: `max_by` takes the last.
        let Some(gang) = undecided
            .rev()
            .copied()
            .max_by(|a, b| owed(*a).total_cmp(&owed(*b)))
        else {
            break;
        };
        let leader = drafts
            .iter()
            .rev()
            .filter(|draft| draft.runs(gang).is_some());
        let leads = leader
            .max_by_key(|draft| draft.contenders())
            .and_then(|draft| draft.runs(gang));
        let mut fate = leads.unwrap_or(RunState::Frozen);
        if fate == RunState::Enabled {
            let tried: Vec<Draft> = drafts
                .iter()
                .zip(&*devices)
                .map(|(draft, device)| draft.pin(device, gang, fate))
                .collect();
            let agreed = |gang: &TenantId| !split(*gang, &tried);
            let kept =
                |(gang, fate): (&TenantId, &RunState)| *fate == RunState::Frozen || agreed(gang);
            match agreed(&gang) && decided.iter().all(kept) {
                true => drafts = tried,
                false => fate = RunState::Frozen,
            }
        }
        if fate == RunState::Frozen {
            for (draft, device) in drafts.iter_mut().zip(&*devices) {
                *draft = draft.pin(device, gang, fate);
            }
        }
        decided.insert(gang, fate);
    }
    let commit = |(device, draft): (&mut Device, Draft)| {
        *device.memory = draft.memory;
        draft.plan
    };
    devices.iter_mut().zip(drafts).map(commit).collect()
}

/// A device's plan while it isn't final.
struct Draft {
    snapshot: Snapshot,
    memory: Memory,
    plan: Plan,
}

impl Draft {
    fn new(device: &Device, gangs: &[TenantId]) -> Self {
        let mut snapshot = device.snapshot.clone();
        // Slices would let one device's part of a gang run while the other's waits.
        let gang = |domain: &DomainState| gangs.contains(&domain.tenant);
        snapshot.rotate = snapshot.domains.iter().any(gang);
        Self::with(device, snapshot)
    }

    fn with(device: &Device, snapshot: Snapshot) -> Self {
        let mut memory = device.memory.clone();
        let plan = device.policy.plan(&snapshot, &mut memory);
        Self {
            snapshot,
            memory,
            plan,
        }
    }

    /// The tenant's domains that have work here, and what the plan says.
    fn domains(&self, tenant: TenantId) -> impl Iterator<Item = (&DomainState, RunState)> {
        let domains = self.snapshot.domains.iter().zip(&self.plan.domains);
        domains
            .filter(move |(domain, _)| domain.tenant == tenant && domain.demand.may_run())
            .map(|(domain, plan)| (domain, plan.run))
    }

    /// Whether the tenant runs here; none if it has no work here.
    fn runs(&self, tenant: TenantId) -> Option<RunState> {
        self.domains(tenant)
            .map(|(_, run)| run)
            .min_by_key(|run| *run == RunState::Frozen)
    }

    /// The device time that the tenant is owed here.
    fn owed(&self, tenant: TenantId) -> f64 {
        let domains = self.domains(tenant);
        domains.map(|(domain, _)| self.memory.lag(domain.id)).sum()
    }

    fn contenders(&self) -> usize {
        let domains = &self.snapshot.domains;
        domains
            .iter()
            .filter(|domain| domain.demand.may_run())
            .count()
    }

    /// The plan anew with the tenant's fate decided. Of several domains here, the one enabled or else
    /// owed most runs.
    fn pin(&self, device: &Device, tenant: TenantId, fate: RunState) -> Self {
        let runner = self
            .domains(tenant)
            .max_by(|(a, a_runs), (b, b_runs)| {
                let enabled = |run: &RunState| *run == RunState::Enabled;
                let lag = |domain: &DomainState| self.memory.lag(domain.id);
                (enabled(a_runs).cmp(&enabled(b_runs)))
                    .then(lag(a).total_cmp(&lag(b)))
                    .then(b.id.cmp(&a.id))
            })
            .map(|(domain, _)| domain.id);
        let mut snapshot = self.snapshot.clone();
        for domain in &mut snapshot.domains {
            let pinned = domain.tenant == tenant
                && domain.demand.may_run()
                && (fate == RunState::Frozen || Some(domain.id) == runner);
            if pinned {
                domain.pinned = Some(fate);
            }
        }
        Self::with(device, snapshot)
    }
}

/// The tenants that have work on more than one device.
fn gangs(devices: &[Device]) -> Vec<TenantId> {
    let mut counts: BTreeMap<TenantId, usize> = BTreeMap::new();
    for device in devices {
        let domains = device.snapshot.domains.iter();
        let busy: BTreeSet<TenantId> = domains
            .filter(|domain| domain.demand.may_run())
            .map(|domain| domain.tenant)
            .collect();
        for tenant in busy {
            *counts.entry(tenant).or_default() += 1;
        }
    }
    counts.retain(|_, count| *count > 1);
    counts.into_keys().collect()
}

/// Whether the tenant runs on one device and is frozen on another.
fn split(tenant: TenantId, drafts: &[Draft]) -> bool {
    let mut states = drafts.iter().filter_map(|draft| draft.runs(tenant));
    let first = states.next();
    states.any(|state| Some(state) != first)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{domain, snapshot};
    use crate::{Class, policy};

    fn states(plans: &[Plan]) -> Vec<Vec<RunState>> {
        let run = |plan: &Plan| plan.domains.iter().map(|domain| domain.run).collect();
        plans.iter().map(run).collect()
    }

    /// Plans the devices once with fresh memory.
    fn plan_all(snapshots: &[Snapshot]) -> Vec<Plan> {
        let policy = policy::by_name("priority").expect("known");
        let mut memories = vec![Memory::default(); snapshots.len()];
        let mut devices: Vec<Device> = snapshots
            .iter()
            .zip(&mut memories)
            .map(|(snapshot, memory)| Device {
                policy: &*policy,
                snapshot,
                memory,
            })
            .collect();
        plan(&mut devices)
    }

    #[test]
    fn a_gang_is_frozen_where_its_rival_runs_elsewhere() {
        use RunState::{Enabled, Frozen};
        let classes = [Class::Latency, Class::Batch, Class::Batch, Class::Batch];
        let first = snapshot(&classes, vec![domain(10, 0), domain(11, 1), domain(12, 2)]);
        let second = snapshot(&classes, vec![domain(20, 0), domain(22, 2), domain(23, 3)]);
        let alone = plan_all(std::slice::from_ref(&second));
        assert_eq!(states(&alone), [[Enabled, Enabled, Frozen]]);
        // Tenant 2 is a gang and it is not its turn on the first device: the second goes to tenant 3.
        assert_eq!(
            states(&plan_all(&[first, second])),
            [[Enabled, Enabled, Frozen], [Enabled, Frozen, Enabled]]
        );
    }

    #[test]
    fn a_gang_takes_its_turn_on_all_its_devices() {
        use RunState::{Enabled, Frozen};
        let classes = [Class::Latency, Class::Batch, Class::Batch];
        let first = snapshot(&classes, vec![domain(10, 0), domain(12, 2)]);
        let second = snapshot(&classes, vec![domain(20, 0), domain(21, 1), domain(22, 2)]);
        let mut owed = second.clone();
        // Make the gang's domain the first of its device by id.
        owed.domains[1] = domain(21, 2);
        owed.domains[2] = domain(22, 1);
        let together = plan_all(&[first.clone(), owed]);
        assert_eq!(
            states(&together),
            [vec![Enabled, Enabled], vec![Enabled, Enabled, Frozen]]
        );
        let waiting = plan_all(&[first, second]);
        assert_eq!(
            states(&waiting),
            [vec![Enabled, Frozen], vec![Enabled, Enabled, Frozen]]
        );
    }
}
