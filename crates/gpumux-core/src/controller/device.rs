//! One device under control: its domains, their accounts, and the plan that is being carried out.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::Arc,
};

use super::domain::{AWAY, Domain, Fault, TICK};
use crate::{
    Accounts, Calm, Control, Costs, Demand, DomainId, DomainState, Memory, Micros, Plan, Policy,
    Progress, RunState, Snapshot, TenantId, TenantSpec, TenantState, Timeslice, UserId, gang,
    plan::controls, space,
};

/// Looking costs at most this part of one CPU (as its reciprocal), and a part of that once nothing has changed in so many looks: what
/// is found a few ms later then costs little, as it comes seldom.
const LOOK_COST: f64 = 64.0;
const QUIETER: f64 = 4.0;
const QUIET: u32 = 16;

/// Processes that are not controlled and use more of the device than this leave a domain with the shortest timeslice less than half of it, as gaps,
/// while it has work all the time. With the driver's timeslice it takes its part from them, so that ends only where they use next to nothing.
const CROWDED: f64 = 0.5;
const CALM: f64 = 0.05;

/// A plan is not asked for sooner than this, whatever the policy's next decision time is.
const HURRY: Micros = Micros(100);

/// Frozen domains with new channels are frozen again at once, but on average no more often than this, and so many in a row: a freeze costs the running
/// program a switch, and a program may say as often as it likes that it has new channels.
const REFREEZES: (Micros, u64) = (Micros::from_millis(20), 32);

#[derive(Clone)]
pub(super) struct Device {
    policy: Arc<dyn Policy>,
    memory: Memory,
    pub(super) accounts: Accounts,
    pub(super) costs: Measured,
    pub(super) domains: BTreeMap<DomainId, Domain>,
    /// Groups with work that no member knows of, and since when.
    left_behind: BTreeMap<DomainId, Micros>,
    /// What is planned for; kept so that its vectors need not be made anew.
    snapshot: Snapshot,
    states: Vec<DomainState>,
    /// Processes that are not controlled leave others too little, as of this look.
    crowded: bool,
    foreign_seen: Micros,
    /// Something changed since the last plan.
    pub(super) dirty: bool,
    /// The policy's next decision time.
    next: Option<Micros>,
    /// What is left to do of the plan.
    controls: VecDeque<Control>,
    deferral: Calm,
    /// Frozen domains with new channels, which run until they are frozen too: since when.
    unfrozen: BTreeMap<DomainId, Micros>,
    /// When all that were frozen again so would have been, one in each [`REFREEZES`].
    refrozen: Micros,
    /// Looks in a row that found no domain that gives way with other demand than before.
    pub(super) quiet: u32,
    pub(super) looked: Micros,
}

impl Device {
    pub(super) fn new(policy: Arc<dyn Policy>, costs: Costs, now: Micros) -> Self {
        Self {
            policy,
            memory: Memory::default(),
            accounts: Accounts::default(),
            costs: Measured::new(costs),
            domains: BTreeMap::new(),
            left_behind: BTreeMap::new(),
            snapshot: Snapshot::default(),
            states: Vec::new(),
            crowded: false,
            foreign_seen: now,
            dirty: false,
            next: None,
            controls: VecDeque::new(),
            deferral: Calm::default(),
            unfrozen: BTreeMap::new(),
            refrozen: now,
            quiet: 0,
            looked: now,
        }
    }

    pub(super) fn policy(&self) -> &dyn Policy {
        &*self.policy
    }

    pub(super) fn see_foreign(&mut self, now: Micros, used: f64) {
        let before = std::mem::replace(&mut self.foreign_seen, now);
        let waits = |it: &DomainState| it.demand == Demand::Busy && it.demand_since <= before;
        let crowded = match self.crowded {
            true => used > CALM,
            false => used > CROWDED && self.domains.values().any(|it| waits(&it.state)),
        };
        self.dirty |= crowded != self.crowded;
        self.crowded = crowded;
    }

    pub(super) fn needs_plan(&self, now: Micros) -> bool {
        self.dirty || self.next.is_some_and(|next| next <= now)
    }

    /// Whether there is something to do at once.
    pub(super) fn is_at_it(&self) -> bool {
        self.dirty || !self.controls.is_empty()
    }

    pub(super) fn due(&self) -> Option<Micros> {
        let faults = self.domains.values().filter_map(|it| it.fault);
        let faults = faults.filter(|it| !it.trying).map(|it| it.until);
        let stand = self.domains.values().filter_map(Domain::again_at);
        (faults
            .chain(self.next)
            .chain(self.refreeze_at())
            .chain(stand))
        .min()
    }

    /// The domain that is to be let run again now, because it stands still: that is begun.
    pub(super) fn due_run(&mut self, now: Micros) -> Option<DomainId> {
        let mut domains = self.domains.values_mut();
        let due = |it: &&mut Domain| it.again_at().is_some_and(|at| at <= now);
        let domain = domains.find(due)?;
        domain.run_again(now);
        Some(domain.state.id)
    }

    /// A frozen domain has new channels.
    pub(super) fn has_channels(&mut self, now: Micros, id: DomainId) {
        self.unfrozen.entry(id).or_insert(now);
    }

    /// When to freeze one of those.
    fn refreeze_at(&self) -> Option<Micros> {
        let since = self.unfrozen.values().min()?;
        let (each, most) = REFREEZES;
        Some(
            self.refrozen
                .saturating_sub(Micros(each.0 * most))
                .max(*since),
        )
    }

    /// The domain that is to be frozen again now, because it has new channels: that is begun.
    pub(super) fn due_refreeze(&mut self, now: Micros) -> Option<DomainId> {
        self.refreeze_at().filter(|due| *due <= now)?;
        let first = self.unfrozen.iter().min_by_key(|(_, since)| **since);
        let id = *first?.0;
        self.unfrozen.remove(&id);
        self.refrozen = self.refrozen.max(now) + REFREEZES.0;
        Some(id)
    }

    /// A domain that failed and is to be taken up again: that is begun now.
    pub(super) fn due_fault(&mut self, now: Micros) -> Option<DomainId> {
        let mut domains = self.domains.values_mut();
        domains.find_map(|domain| {
            let due = |it: &&mut Fault| !it.trying && it.until <= now;
            domain.fault.as_mut().filter(due)?.trying = true;
            Some(domain.state.id)
        })
    }

    pub(super) fn tick(&self, cost: Micros) -> Micros {
        let contended = self.next.is_some() || self.domains.values().any(Domain::gives_way);
        let quiet = 1.0 + f64::from(self.quiet) / f64::from(QUIET) * (QUIETER - 1.0);
        let all_busy = || (self.domains.values()).all(|it| it.state.demand != Demand::Idle);
        match self.domains.len() {
            0 | 1 => Micros(TICK.0 * 20),
            _ if contended => TICK.max(Micros((cost.0 as f64 * LOOK_COST * quiet) as u64)),
            // Nothing waits for it, and no work can come where there is none.
            _ if all_busy() => Micros((TICK.0 as f64 * 10.0 * quiet) as u64),
            _ => Micros(TICK.0 * 10),
        }
    }

    pub(super) fn looked(&mut self, now: Micros) {
        self.looked = now;
        self.quiet = QUIET.min(self.quiet + 1);
    }

    pub(super) fn contended(&self, id: DomainId, now: Micros) -> bool {
        self.domains.get(&id).is_some_and(|own| {
            let mut others = self.domains.values();
            !own.swapped_out
                && others.any(|it| {
                    let together = it.group.is_some() && it.group == own.group;
                    it.state.id != id && !together && it.competes(now)
                })
        })
    }

    /// What a program has done by now; its requests may take longer by the part `slowdown` for the sake of others.
    pub(super) fn progress(
        &mut self,
        now: Micros,
        id: DomainId,
        progress: Progress,
        slowdown: f64,
    ) {
        let taken = self.domains.get_mut(&id).map(|domain| {
            let frozen = domain.frozen(now);
            let before = std::mem::replace(&mut domain.frozen_before, frozen);
            (std::mem::take(&mut domain.launches), frozen != before)
        });
        let Some((mut launches, frozen)) = taken else {
            return;
        };
        if frozen {
            launches.leave_out();
        }
        let changed = launches.progress(now, progress, slowdown);
        if let Some(domain) = self.domains.get_mut(&id) {
            domain.state.tolerated = launches.tolerated();
            domain.launches = launches;
        }
        self.dirty |= changed;
    }

    /// A domain that is about to change: it is accounted for, and planned for anew.
    pub(super) fn change(&mut self, now: Micros, id: DomainId) -> Option<&mut Domain> {
        self.account(now);
        self.dirty = true;
        self.domains.get_mut(&id)
    }

    /// A group is one channel group on the device: while the memory of one member is away, none runs.
    pub(super) fn park(&mut self, name: DomainId) {
        let all = self.domains.values_mut();
        let mut members: Vec<_> = all.filter(|it| it.planned_as() == name).collect();
        let is_away = members.iter().any(|it| it.away);
        for domain in &mut members {
            domain.swapped_out = is_away;
            domain.state.pinned = is_away.then_some(RunState::Frozen);
        }
    }

    pub(super) fn left_behind(&mut self, now: Micros, group: DomainId, since: Option<Micros>) {
        self.account(now);
        self.dirty = true;
        match since {
            Some(since) => self.left_behind.insert(group, since),
            None => self.left_behind.remove(&group),
        };
    }

    pub(super) fn remove(&mut self, now: Micros, id: DomainId) {
        self.account(now);
        self.dirty = true;
        let gone = self.domains.remove(&id);
        self.unfrozen.remove(&id);
        gone.into_iter().for_each(|it| self.park(it.planned_as()));
    }

    /// A control of this domain failed.
    pub(super) fn fail(&mut self, now: Micros, id: DomainId) -> Option<&mut Domain> {
        self.account(now);
        self.dirty = true;
        self.controls.clear();
        let domain = self.domains.get_mut(&id)?;
        domain.give_up(now);
        domain.course.may_run(now);
        Some(domain)
    }

    /// A domain that is left alone has this timeslice, which is that of all members of its group.
    pub(super) fn left_with(&mut self, now: Micros, id: DomainId, timeslice: Timeslice) {
        self.account(now);
        self.dirty = true;
        let group = self.domains.get(&id).and_then(|it| it.group);
        let others = self.domains.values_mut();
        for other in others.filter(|it| group.is_some() && it.group == group) {
            other.state.timeslice = timeslice;
        }
    }

    /// A control acts from now on.
    pub(super) fn obey(&mut self, now: Micros, control: Control) {
        // Until now it was as before.
        self.account(now);
        let Some(domain) = self.domains.get_mut(&control.domain()) else {
            return;
        };
        match control {
            Control::Freeze(_) => domain.set_run(RunState::Frozen, now),
            Control::Thaw(_) => domain.set_run(RunState::Enabled, now),
            Control::SetTimeslice(_, timeslice) => domain.state.timeslice = timeslice,
        }
    }

    pub(super) fn costs(&self) -> Costs {
        self.costs.costs()
    }

    /// Where a plan has been carried out, the policy's decision times count from now.
    pub(super) fn plan_from(&mut self, now: Micros) {
        if self.controls.is_empty() {
            self.next = Some(now);
        }
    }

    /// Accounts for the time in which everything was as it is.
    pub(super) fn account(&mut self, now: Micros) {
        // What a faulty domain has is not known; the others are planned as if it had nothing.
        let known = |domain: &Domain| {
            let mut state = domain.state.clone();
            if domain.is_faulty() {
                (state.demand, state.run) = (Demand::Idle, RunState::Frozen);
            }
            (domain.group, state)
        };
        let all = || self.domains.values();
        // Of a group, what the others have counts.
        let managed = all().filter(|it| !it.is_faulty());
        let all = managed.chain(all().filter(|it| it.is_faulty()));
        merge(&mut self.states, all.map(known));
        count_in(&mut self.states, &self.left_behind);
        (self.accounts).advance(now, &self.states, &self.costs.costs());
        for domain in self.domains.values_mut() {
            domain.state.received = self.accounts.get(domain.planned_as()).received();
        }
    }

    /// Brings up to date what is planned for. Faulty domains are not planned until their controls work again.
    pub(super) fn refresh(
        &mut self,
        now: Micros,
        tenants: &BTreeMap<TenantId, (UserId, TenantSpec)>,
        weights: &BTreeMap<UserId, f64>,
    ) {
        self.account(now);
        for domain in self.domains.values_mut() {
            domain.state.expected = domain.rhythm.next(now);
        }
        let managed = || self.domains.values().filter(|it| !it.is_faulty());
        let snapshot = &mut self.snapshot;
        (snapshot.now, snapshot.costs) = (now, self.costs.costs());
        snapshot.users.clone_from(weights);
        // A faulty domain has the driver's timeslice, too.
        let faulty = |it: &Domain| it.is_faulty() && it.state.demand.may_run();
        snapshot.crowded = self.crowded || self.domains.values().any(faulty);
        let states = managed().map(|it| (it.group, it.state.clone()));
        merge(&mut snapshot.domains, states);
        count_in(&mut snapshot.domains, &self.left_behind);
        snapshot.tenants.clear();
        for domain in &snapshot.domains {
            let known = match self.domains.contains_key(&domain.id) {
                true => tenants.get(&domain.tenant).cloned(),
                false => {
                    let members = managed().filter(|it| it.group == Some(domain.id));
                    let members: BTreeMap<TenantId, &(UserId, TenantSpec)> = members
                        .filter_map(|it| Some((it.state.tenant, tenants.get(&it.state.tenant)?)))
                        .collect();
                    let specs = members.values().map(|(_, spec)| spec);
                    // All members of a group are one user's.
                    let first = members.values().next();
                    first.map(|(user, _)| (*user, space::combine(specs)))
                }
            };
            snapshot
                .tenants
                .extend(known.map(|(user, spec)| TenantState {
                    id: domain.tenant,
                    user,
                    spec,
                }));
        }
        snapshot.tenants.sort_unstable_by_key(|tenant| tenant.id);
        snapshot.tenants.dedup_by_key(|tenant| tenant.id);
    }

    /// What is planned together with the other devices.
    pub(super) fn as_planned(&mut self) -> gang::Device<'_> {
        gang::Device {
            policy: &*self.policy,
            snapshot: &self.snapshot,
            memory: &mut self.memory,
        }
    }

    /// Begins to carry out a plan.
    pub(super) fn adopt(&mut self, now: Micros, mut plan: Plan, reverse: bool) {
        self.dirty = false;
        self.next = plan.next.map(|next| next.max(now + HURRY));
        let away = self.domains.values().filter(|it| it.swapped_out);
        let away: BTreeSet<DomainId> = away.map(Domain::planned_as).collect();
        for want in &mut plan.domains {
            // Whatever the policy made of it.
            if away.contains(&want.id) {
                (want.run, want.reason) = (RunState::Frozen, AWAY);
            }
        }
        let planned = |id: DomainId| {
            let at = (plan.domains).binary_search_by_key(&id, |want| want.id);
            plan.domains.get(at.ok()?)
        };
        for domain in self.domains.values_mut() {
            if let Some(want) = planned(domain.planned_as()) {
                domain.reason = want.reason;
            }
        }
        // What the driver shares of a group is not relied on: every member gets the same.
        let managed = self.domains.values().filter(|it| !it.is_faulty());
        let pairs = managed.filter_map(|it| Some((planned(it.planned_as())?, &it.state)));
        self.controls = controls(pairs).into();
        if reverse {
            self.controls.make_contiguous().reverse();
        }
        if self.controls.is_empty() {
            self.deferral = Calm::default();
        }
    }

    /// The next control of the plan, unless it waits; then the device is planned anew soon.
    pub(super) fn next_control(&mut self, now: Micros, most: Micros) -> Option<Control> {
        let domains = &self.domains;
        let planned = |control: &Control| {
            let id = control.domain();
            control.of_domain(domains.get(&id).map_or(id, Domain::planned_as))
        };
        let at_work = |id| {
            let mut members = domains.values().filter(|it| it.planned_as() == id);
            members.any(|it| it.state.run == RunState::Enabled && it.at_work)
        };
        let controls = self.controls.iter().map(planned);
        if (self.deferral).awaits(controls, &self.snapshot, now, most, at_work) {
            self.next = Some(now + TICK);
            self.controls.clear();
            return None;
        }
        // None is left also while they wait for the next plan: the wait goes on.
        let control = self.controls.pop_front()?;
        if self.controls.is_empty() {
            self.deferral = Calm::default();
        }
        Some(control)
    }
}

/// Which tenant stands for a group's members before the policy. No tenant has such a high number.
fn tenant_of(group: DomainId) -> TenantId {
    TenantId(u64::MAX - group.0)
}

/// The domains as the policy sees them, by rising ids: those of one group are one domain, which has work if any of
/// them has and runs if any does.
fn merge(into: &mut Vec<DomainState>, from: impl Iterator<Item = (Option<DomainId>, DomainState)>) {
    let rank = |demand: Demand| match demand {
        Demand::Idle => 0,
        Demand::Unknown => 1,
        Demand::Busy => 2,
    };
    into.clear();
    for (group, mut state) in from {
        let Some(group) = group else {
            into.push(state);
            continue;
        };
        (state.id, state.tenant) = (group, tenant_of(group));
        let Some(all) = into.iter_mut().find(|it| it.id == group) else {
            into.push(state);
            continue;
        };
        if state.run == RunState::Enabled {
            all.run = RunState::Enabled;
        }
        all.expected = all.expected.into_iter().chain(state.expected).min();
        // Only what every member tolerates.
        all.tolerated = all.tolerated.min(state.tolerated);
        all.request = all.request.into_iter().chain(state.request).min();
        // That of one member says nothing of the others.
        all.worked = None;
        all.demand_since = match rank(state.demand).cmp(&rank(all.demand)) {
            std::cmp::Ordering::Greater => state.demand_since,
            std::cmp::Ordering::Less => all.demand_since,
            std::cmp::Ordering::Equal if state.demand == Demand::Idle => {
                all.demand_since.max(state.demand_since)
            }
            std::cmp::Ordering::Equal => all.demand_since.min(state.demand_since),
        };
        if rank(state.demand) > rank(all.demand) {
            all.demand = state.demand;
        }
    }
    into.sort_unstable_by_key(|it| it.id);
}

/// A group has work as long as something was left behind in it.
fn count_in(states: &mut [DomainState], left_behind: &BTreeMap<DomainId, Micros>) {
    for state in states.iter_mut().filter(|it| it.demand != Demand::Busy) {
        if let Some(since) = left_behind.get(&state.id) {
            (state.demand, state.demand_since) = (Demand::Busy, *since);
        }
    }
}

/// What controls cost, in µs: assumed, until measured. Of what was measured the newest counts most, but one that was held up
/// (the driver may be busy for 0.7 s) says little of the next.
#[derive(Clone, Debug)]
pub(super) struct Measured {
    assumed: Costs,
    freeze: f64,
    thaw: f64,
    set_timeslice: f64,
}

impl Measured {
    fn new(assumed: Costs) -> Self {
        Self {
            assumed,
            freeze: assumed.freeze.0 as f64,
            thaw: assumed.thaw.0 as f64,
            set_timeslice: assumed.set_timeslice.0 as f64,
        }
    }

    pub(super) fn record(&mut self, control: Control, took: Micros) {
        let (cost, assumed) = match control {
            Control::Freeze(_) => (&mut self.freeze, self.assumed.freeze),
            Control::Thaw(_) => (&mut self.thaw, self.assumed.thaw),
            Control::SetTimeslice(..) => (&mut self.set_timeslice, self.assumed.set_timeslice),
        };
        let most = 4.0 * cost.max(assumed.0 as f64);
        *cost += ((took.0 as f64).min(most) - *cost) / 8.0;
    }

    fn costs(&self) -> Costs {
        let whole = |cost: f64| Micros((cost as u64).max(1));
        Costs {
            switch: self.assumed.switch,
            freeze: whole(self.freeze),
            thaw: whole(self.thaw),
            set_timeslice: whole(self.set_timeslice),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_follow_controls_and_not_one_that_was_held_up() {
        let mut measured = Measured::new(Costs::default());
        let mut take = |took: u64, times: usize| {
            for _ in 0..times {
                measured.record(Control::Freeze(DomainId(1)), Micros(took));
            }
            measured.costs().freeze
        };
        let assumed = Costs::default().freeze;
        assert!(take(690_000, 1) < Micros(2 * assumed.0));
        let slow = take(4_000, 40);
        assert!((Micros(3_900)..=Micros(4_000)).contains(&slow), "{slow}");
        assert!(
            take(0, 10_000) < Micros(2),
            "launches are permitted in no time"
        );
        assert!(take(600, 20) > Micros(500));
    }
}
