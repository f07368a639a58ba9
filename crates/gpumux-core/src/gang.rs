//! Gangs: a tenant's domains on several devices run and freeze together.
//!
//! Such a tenant's domains wait for each other (collectives spin), so device time without the others is wasted.
//! A plan knows only its own device; here the plans of all devices are made to agree:
//! plan each device alone, look for a tenant that runs on one and is frozen on another, decide for it, pin
//! that, and plan again until none is left. The device on which most gangs compete, and then most domains, decides for the tenant,
//! because there its turn costs others most and is hardest to get. On a gang's devices the tenant that runs, runs alone: shares by slices would let its domains meet
//! only now and then. If two gangs need the same device, the one that is owed more comes first and
//! the other waits everywhere, so that another tenant may use its devices. But no gang breaks up one that runs whole: of three in a
//! ring each would push out the next without end. It waits until the other's turn is over where they meet, unless it is owed far more.
//! A tenant that was made to wait for a gang that must then wait itself runs after all, where that takes the device from none.
//! A gang that has begun to run goes on for [`LEAST`], and through all plans of one moment: plans made one after the other could
//! else let two gangs run by turns, each of which is owed the device where the other one holds it.
//!
//! None of that bounds how long a gang waits: turns may never fit together. So a gang that has waited for [`OVERDUE`] and is owed more than
//! may be put off, and has not had more than its share of another of its devices, comes before all that, the longest first, and runs for [`UNDISTURBED`] then.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use crate::policy::Wait;
use crate::{DomainState, Memory, Micros, Plan, Policy, RunState, Snapshot, TenantId};

/// What may be put off so that turns on several devices agree, in µs of device time; some turns. A gang that is owed so much
/// more than another, on each of its devices, may break up that one's turn, or it might wait without end for turns that end at
/// the same time. And a gang waits where others of its device are owed so much more.
const PATIENCE_US: f64 = 200_000.0;

/// How long a gang may wait for turns that fit together.
const OVERDUE: Micros = Micros::from_secs(1);

/// How long one that has waited so long then runs, even if another is owed more: some turns.
const UNDISTURBED: Micros = Micros::from_millis(50);

/// How long a gang that has begun to run is not broken up: a short turn.
const LEAST: Micros = Micros::from_millis(10);

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
    if gangs.is_empty() {
        return devices.iter_mut().map(plan_alone).collect();
    }
    let again = (devices.iter()).any(|it| it.memory.planned_at() == Some(it.snapshot.now));
    // Once, not in every draft.
    for device in devices.iter_mut() {
        device.memory.charge(device.snapshot);
    }
    let mut plans = plan_once(devices, &gangs, again);
    // Turns that were handed out may let another gang take one: until none more does.
    for _ in 0..gangs.len() {
        let before = std::mem::replace(&mut plans, plan_once(devices, &gangs, true));
        let mut pairs = before.iter().zip(&plans);
        if pairs.all(|(before, after)| before.domains == after.domains) {
            break;
        }
    }
    plans
}

/// The plan that the policy makes of a device on which no gang has work.
fn plan_alone(device: &mut Device) -> Plan {
    let plan = device.policy.plan(device.snapshot, device.memory);
    let none = BTreeSet::new();
    (device.memory).note_gangs(device.snapshot.now, &none, &none, OVERDUE);
    plan
}

/// Plans all devices once. `again`: not for the first time at this moment.
fn plan_once(devices: &mut [Device], gangs: &[TenantId], again: bool) -> Vec<Plan> {
    let (away, present): (BTreeSet<TenantId>, BTreeSet<TenantId>) =
        gangs.iter().partition(|gang| swapped_out(**gang, devices));
    let mut drafts: Drafts = devices
        .iter()
        .map(|device| Rc::new(Draft::new(device, &present)))
        .collect();
    let mut decided: BTreeMap<TenantId, RunState> = BTreeMap::new();
    // A tenant without memory on one device runs on none, and is owed nothing meanwhile.
    for gang in away {
        drafts = pin(&drafts, devices, gang, RunState::Frozen);
        decided.insert(gang, RunState::Frozen);
    }
    let whole = |gang: TenantId, drafts: &[Rc<Draft>]| runs(gang, drafts) && !split(gang, drafts);
    let overdue = overdue(devices, gangs);
    let kept = running(devices, gangs).into_iter();
    let kept = kept.filter(|(since, gang)| {
        let now = devices[0].snapshot.now;
        (again || now < *since + LEAST) && !overdue.contains(gang) && !decided.contains_key(gang)
    });
    let kept: Vec<TenantId> = kept.map(|(_, gang)| gang).collect();
    for gang in overdue.into_iter().chain(kept) {
        let tried = pin(&drafts, devices, gang, RunState::Enabled);
        if whole(gang, &tried) && decided.keys().all(|other| whole(*other, &tried)) {
            drafts = tried;
            decided.insert(gang, RunState::Enabled);
        }
    }
    // Every round decides for one gang more.
    for _ in 0..gangs.len() {
        let undecided = |gang: TenantId| !decided.contains_key(&gang) && split(gang, &drafts);
        let owed = |gang: TenantId| owed(gang, &drafts);
        // Of equals the lowest id: `max_by` takes the last.
        let mut open = gangs.iter().rev().copied().filter(|gang| undecided(*gang));
        let most = |a: TenantId, b: TenantId| if owed(b) < owed(a) { a } else { b };
        let Some(gang) = open.next().map(|first| open.fold(first, most)) else {
            break;
        };
        let gang = first_of_queue(gang, &drafts, undecided);
        let leads = leader(gang, &drafts).and_then(|draft| draft.runs(gang));
        let may_run = leads == Some(RunState::Enabled)
            && !drafts.iter().any(|draft| draft.is_taken_from_others(gang));
        let tried = may_run.then(|| pin(&drafts, devices, gang, RunState::Enabled));
        // Whether no tenant pays for it that should not.
        let sound = |tried: &Drafts| {
            let mut others = gangs.iter().filter(|other| **other != gang);
            !split(gang, tried)
                && others.all(|other| match decided.get(other) {
                    Some(RunState::Enabled) => whole(*other, tried),
                    _ => {
                        let broken = whole(*other, &drafts) && !whole(*other, tried);
                        !broken || owed(gang) > owed(*other) + PATIENCE_US
                    }
                })
        };
        let (fate, planned) = match tried.filter(sound) {
            Some(tried) => (RunState::Enabled, tried),
            None => {
                let fate = RunState::Frozen;
                (fate, pin(&drafts, devices, gang, fate))
            }
        };
        drafts = planned;
        decided.insert(gang, fate);
    }
    for &gang in gangs {
        if decided.get(&gang) == Some(&RunState::Frozen) && !swapped_out(gang, devices) {
            let tried = pin(&drafts, devices, gang, RunState::Enabled);
            let mut own = drafts.iter().filter(|draft| draft.runs(gang).is_some());
            if !split(gang, &tried) && own.all(|draft| draft.is_free()) {
                drafts = tried;
            }
        }
    }
    let waiting: BTreeSet<TenantId> = (gangs.iter().copied())
        .filter(|gang| !runs(*gang, &drafts) && !swapped_out(*gang, devices))
        .collect();
    let running: BTreeSet<TenantId> = (gangs.iter().copied())
        .filter(|gang| whole(*gang, &drafts))
        .collect();
    let commit = |(device, draft): (&mut Device, Rc<Draft>)| {
        let mut draft = Rc::unwrap_or_clone(draft);
        let now = draft.snapshot.now;
        let waiting = waiting.iter().flat_map(|gang| draft.domains(*gang));
        let waiting = waiting.map(|(domain, _)| domain.id).collect();
        let running = running.iter().flat_map(|gang| draft.domains(*gang));
        let running = running.map(|(domain, _)| domain.id).collect();
        draft.memory.note_gangs(now, &waiting, &running, OVERDUE);
        let waits = draft.snapshot.domains.iter();
        let waits = waits.filter_map(|domain| match draft.memory.wait(domain.id)? {
            Wait::Since(at) => Some(at + OVERDUE),
            Wait::Over(at) => Some(at + UNDISTURBED),
        });
        let next = draft.plan.next.into_iter();
        draft.plan.next = next.chain(waits.filter(|at| *at > now)).min();
        *device.memory = draft.memory;
        draft.plan
    };
    devices.iter_mut().zip(drafts).map(commit).collect()
}

/// The gangs that must run now because they are owed much and had waited too long: first those that have begun to run, then those that still
/// wait, the one that has waited longest first.
fn overdue(devices: &[Device], gangs: &[TenantId]) -> Vec<TenantId> {
    // What it is owed on one device is no reason to take more than its share of another.
    let ahead = |gang: TenantId| {
        let mut lags = with_work(gang, devices).map(|(device, it)| device.memory.lag(it.id));
        lags.any(|lag| lag < -PATIENCE_US)
    };
    let since = |gang: TenantId| {
        let overdue = with_work(gang, devices).filter_map(|(device, domain)| {
            let now = device.snapshot.now;
            match device.memory.wait(domain.id)? {
                Wait::Over(at) => (now < at + UNDISTURBED).then_some((false, at)),
                Wait::Since(at) => {
                    let owed = device.memory.lag(domain.id) > PATIENCE_US;
                    (owed && !ahead(gang) && at + OVERDUE <= now).then_some((true, at))
                }
            }
        });
        overdue.min()
    };
    let gangs = gangs.iter().filter(|gang| !swapped_out(**gang, devices));
    let mut overdue: Vec<_> = gangs
        .filter_map(|gang| Some((since(*gang)?, *gang)))
        .collect();
    overdue.sort_unstable();
    overdue.into_iter().map(|(_, gang)| gang).collect()
}

/// The gangs that run since an earlier plan, and since when, the first to begin first.
fn running(devices: &[Device], gangs: &[TenantId]) -> Vec<(Micros, TenantId)> {
    let since = |gang: TenantId| {
        let mut parts = with_work(gang, devices);
        let since = parts.try_fold(Micros::ZERO, |since, (device, domain)| {
            Some(since.max(device.memory.runs_since(domain.id)?))
        });
        since.map(|since| (since, gang))
    };
    let mut running: Vec<_> = gangs.iter().filter_map(|gang| since(*gang)).collect();
    running.sort_unstable();
    running
}

/// The plans of all devices while they aren't final. Many share those of the devices that they leave as they are.
type Drafts = Vec<Rc<Draft>>;

/// A device's plan while it isn't final.
#[derive(Clone)]
struct Draft {
    snapshot: Snapshot,
    memory: Memory,
    plan: Plan,
}

impl Draft {
    fn new(device: &Device, gangs: &BTreeSet<TenantId>) -> Self {
        let mut snapshot = device.snapshot.clone();
        // Slices would let one device's part of a gang run while the other's waits.
        let domains = snapshot.domains.iter();
        let gangs = domains
            .map(|domain| domain.tenant)
            .filter(|tenant| gangs.contains(tenant));
        snapshot.gangs = gangs.collect();
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

    /// How many compete here: gangs, and domains.
    fn contenders(&self) -> (usize, usize) {
        let domains = self.snapshot.domains.iter();
        let domains = domains.filter(|domain| domain.demand.may_run());
        let tenants: BTreeSet<TenantId> = domains.clone().map(|domain| domain.tenant).collect();
        let gangs = tenants.intersection(&self.snapshot.gangs);
        (gangs.count(), domains.count())
    }

    /// Whether the tenant, whose turn it isn't here, had so much more than another that could run at once.
    fn is_taken_from_others(&self, tenant: TenantId) -> bool {
        let mut domains = self.snapshot.domains.iter();
        let limit = self.owed(tenant) + PATIENCE_US;
        self.runs(tenant) == Some(RunState::Frozen)
            && domains.any(|other| {
                let single = !self.snapshot.gangs.contains(&other.tenant);
                single
                    && other.demand.may_run()
                    && other.pinned.is_none()
                    && self.memory.lag(other.id) > limit
            })
    }

    /// Whether no tenant runs here.
    fn is_free(&self) -> bool {
        let mut domains = self.snapshot.domains.iter().zip(&self.plan.domains);
        domains.all(|(domain, plan)| !(domain.demand.may_run() && plan.run == RunState::Enabled))
    }

    /// The plan anew with the tenant's fate decided. Of several domains here, the one enabled runs, else the one that runs already, else
    /// the one owed most.
    fn pin(&self, device: &Device, tenant: TenantId, fate: RunState) -> Self {
        let runner = self
            .domains(tenant)
            .max_by(|(a, a_runs), (b, b_runs)| {
                let enabled = |run: &RunState| *run == RunState::Enabled;
                let lag = |domain: &DomainState| self.memory.lag(domain.id);
                (enabled(a_runs).cmp(&enabled(b_runs)))
                    .then(enabled(&a.run).cmp(&enabled(&b.run)))
                    .then(lag(a).total_cmp(&lag(b)))
                    .then(b.id.cmp(&a.id))
            })
            .map(|(domain, _)| domain.id);
        let mut snapshot = self.snapshot.clone();
        for domain in &mut snapshot.domains {
            if domain.tenant == tenant && domain.demand.may_run() {
                let pinned = fate == RunState::Frozen || Some(domain.id) == runner;
                domain.pinned = pinned.then_some(fate);
            }
        }
        let mut draft = Self::with(device, snapshot);
        // The turn for which the tenant waits ends although it contends with none while it is pinned.
        draft.plan.next = [self.plan.next, draft.plan.next]
            .into_iter()
            .flatten()
            .min();
        draft
    }
}

/// The tenants that have work on more than one device.
fn gangs(devices: &[Device]) -> Vec<TenantId> {
    let mut counts: BTreeMap<TenantId, usize> = BTreeMap::new();
    if devices.len() < 2 {
        return Vec::new();
    }
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

/// The draft that decides for a tenant.
fn leader(tenant: TenantId, drafts: &[Rc<Draft>]) -> Option<&Rc<Draft>> {
    let drafts = drafts.iter().rev();
    let concerned = drafts.filter(|draft| draft.runs(tenant).is_some());
    concerned.max_by_key(|draft| draft.contenders())
}

/// Of a gang, the one for which it waits, the one for which that one waits, and so on, the last that is open: whether it runs
/// decides about the others.
fn first_of_queue(
    mut gang: TenantId,
    drafts: &[Rc<Draft>],
    open: impl Fn(TenantId) -> bool,
) -> TenantId {
    let mut queue = BTreeSet::from([gang]);
    while let Some(leader) = leader(gang, drafts) {
        let mut tenants = leader.snapshot.domains.iter().map(|domain| domain.tenant);
        let runs = |tenant: &TenantId| leader.runs(*tenant) == Some(RunState::Enabled);
        let before = tenants.find(|tenant| open(*tenant) && runs(tenant));
        match before {
            Some(before) if queue.insert(before) => gang = before,
            _ => break,
        }
    }
    gang
}

/// All drafts with the tenant's fate decided.
fn pin(drafts: &[Rc<Draft>], devices: &[Device], tenant: TenantId, fate: RunState) -> Drafts {
    let pin = |(draft, device): (&Rc<Draft>, &Device)| match draft.runs(tenant) {
        Some(_) => Rc::new(draft.pin(device, tenant, fate)),
        None => draft.clone(),
    };
    drafts.iter().zip(devices).map(pin).collect()
}

/// Whether the tenant must not run, even in its turn: its memory is not there.
fn swapped_out(tenant: TenantId, devices: &[Device]) -> bool {
    with_work(tenant, devices).any(|(_, domain)| domain.pinned == Some(RunState::Frozen))
}

/// A tenant's domains that have work, each with its device.
fn with_work<'a, 'b>(
    tenant: TenantId,
    devices: &'a [Device<'b>],
) -> impl Iterator<Item = (&'a Device<'b>, &'a DomainState)> {
    let all = devices.iter().flat_map(|device| {
        let domains = device.snapshot.domains.iter();
        domains.map(move |domain| (device, domain))
    });
    all.filter(move |(_, domain)| domain.tenant == tenant && domain.demand.may_run())
}

/// The device time that the tenant is owed, per device.
fn owed(tenant: TenantId, drafts: &[Rc<Draft>]) -> f64 {
    let own = || drafts.iter().filter(|draft| draft.runs(tenant).is_some());
    let sum: f64 = own().map(|draft| draft.owed(tenant)).sum();
    sum / own().count().max(1) as f64
}

/// Whether the tenant runs anywhere.
fn runs(tenant: TenantId, drafts: &[Rc<Draft>]) -> bool {
    let mut states = drafts.iter().filter_map(|draft| draft.runs(tenant));
    states.any(|state| state == RunState::Enabled)
}

/// Whether the tenant runs on one device and is frozen on another.
fn split(tenant: TenantId, drafts: &[Rc<Draft>]) -> bool {
    let mut states = drafts.iter().filter_map(|draft| draft.runs(tenant));
    let first = states.next();
    states.any(|state| Some(state) != first)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{domain, snapshot};
    use crate::{Class, DomainId, policy};

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
    fn gang_is_frozen_where_its_contender_runs_elsewhere() {
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
    fn a_turn_for_which_a_gang_waits_ends() {
        let classes = [Class::Latency, Class::Batch, Class::Batch];
        let first = snapshot(&classes, vec![domain(10, 0), domain(11, 1), domain(12, 2)]);
        let second = snapshot(&classes, vec![domain(20, 0), domain(22, 2)]);
        let plans = plan_all(&[first, second]);
        assert_eq!(states(&plans)[1][1], RunState::Frozen);
        assert!(plans[0].next.is_some(), "{plans:?}");
    }

    #[test]
    fn a_gang_waits_while_its_memory_is_away() {
        let classes = [Class::Batch, Class::Batch];
        let mut first = snapshot(&classes, vec![domain(10, 0), domain(11, 1)]);
        let second = snapshot(&classes, vec![domain(20, 0)]);
        let running = [RunState::Enabled, RunState::Frozen];
        let both = [first.clone(), second.clone()];
        assert_eq!(
            states(&plan_all(&both)),
            [running.to_vec(), running[..1].to_vec()]
        );
        first.domains[0].pinned = Some(RunState::Frozen);
        let waiting = [RunState::Frozen, RunState::Enabled];
        let plans = plan_all(&[first, second]);
        assert_eq!(states(&plans), [waiting.to_vec(), waiting[..1].to_vec()]);
    }

    #[test]
    fn a_gang_is_owed_nothing_while_its_memory_is_away() {
        let classes = [Class::Batch, Class::Batch];
        let mut first = snapshot(&classes, vec![domain(10, 0), domain(11, 1)]);
        let mut second = snapshot(&classes, vec![domain(20, 0), domain(21, 1)]);
        first.domains[0].pinned = Some(RunState::Frozen);
        let policy = policy::by_name("priority").expect("known");
        let mut memories = [Memory::default(), Memory::default()];
        for step in 0..100 {
            for snapshot in [&mut first, &mut second] {
                snapshot.now = Micros::from_millis(10 * step);
                snapshot.domains[1].received = snapshot.now;
            }
            let both = [&first, &second].into_iter().zip(&mut memories);
            let mut devices: Vec<Device> = both
                .map(|(snapshot, memory)| Device {
                    policy: &*policy,
                    snapshot,
                    memory,
                })
                .collect();
            plan(&mut devices);
        }
        let owed = [memories[0].lag(DomainId(10)), memories[1].lag(DomainId(20))];
        assert!(owed.iter().all(|owed| *owed <= 0.0), "{owed:?}");
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

    /// Each plan would else choose the other one, which is owed more since this one runs.
    #[test]
    fn of_two_processes_of_a_gang_the_one_that_runs_goes_on() {
        use RunState::{Enabled, Frozen};
        let classes = [Class::Batch, Class::Batch];
        let mut first = snapshot(&classes, vec![domain(1, 1), domain(10, 0), domain(11, 0)]);
        let gangs = BTreeSet::from([TenantId(0)]);
        for runs in [1, 2] {
            for (place, domain) in first.domains.iter_mut().enumerate() {
                domain.run = if place == runs { Enabled } else { Frozen };
            }
            let policy = policy::by_name("priority").expect("known");
            let device = Device {
                policy: &*policy,
                snapshot: &first,
                memory: &mut Memory::default(),
            };
            let draft = Draft::new(&device, &gangs);
            let other_s = states(std::slice::from_ref(&draft.plan));
            assert_eq!(other_s, [[Enabled, Frozen, Frozen]], "it is another's turn");
            let plan = draft.pin(&device, TenantId(0), Enabled).plan;
            let mut expected = [Frozen; 3];
            expected[runs] = Enabled;
            assert_eq!(states(&[plan]), [expected]);
        }
    }
}
