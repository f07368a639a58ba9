//! One device: its domains, what they have and got, and the pulling of levers.

use std::{
    collections::{BTreeMap, BTreeSet},
    os::fd::OwnedFd,
    sync::Arc,
};

use gpumux_core::{
    Account, Accounts, Calm, Costs, Demand, DomainId, DomainState, Lever, Memory, Micros, Plan,
    Policy, RunState, Snapshot, TenantId, TenantSpec, TenantState, Timeslice, UserId, space,
};
use gpumux_rm::{LeverError, RmStatus};
use gpumux_wire::page::SLOTS;

use super::{
    Clock, Reaper, SessionId,
    domain::Domain,
    held::Held,
    record::{Durations, Record, Totals, What},
};
use crate::api::types::LeverCost;

/// How often slices are read back, and shares are counted anew.
const CHECK: Micros = Micros::from_secs(1);

/// How often demand is looked at while it decides who may run: see [`Device::tick`].
const TICK: Micros = Micros::from_millis(1);

/// Looking costs at most this part of one CPU (as its reciprocal), and a part of that once nothing has changed in so many looks: what
/// is found a few ms later then costs little, as it comes seldom.
const TICK_COST: f64 = 64.0;
const CALM: f64 = 4.0;
const QUIET: u32 = 16;

/// As many as an MPS server has clients.
const MAX_HELD: usize = 48;

/// Why a parked domain is frozen, whatever the policy says.
pub(crate) const AWAY: &str = "its memory is away";

pub(super) struct Device {
    pub(super) policy: Box<dyn Policy>,
    pub(super) memory: Memory,
    pub(super) accounts: Accounts,
    pub(super) domains: BTreeMap<DomainId, Domain>,
    /// Groups that have members, by name.
    groups: BTreeMap<Arc<str>, DomainId>,
    /// What was left behind in groups.
    held: Vec<Held>,
    pub(super) costs: LeverCosts,
    pub(super) record: Record,
    /// What domains that ended had, of tenants that live.
    pub(super) ended: BTreeMap<TenantId, Totals>,
    /// Something changed since the last plan.
    pub(super) dirty: bool,
    /// Looks in a row that found nobody who makes way with other work than before.
    quiet: u32,
    /// Whether a tenant came with it through an emulated driver.
    pub(super) emulated: bool,
    /// What is wrong with the device.
    pub(super) lost: Option<String>,
    /// What the driver measured of processes, by pid, if it does.
    pub(super) used_by: Option<BTreeMap<u32, f64>>,
    /// When the policy wants to be asked again.
    next: Option<Micros>,
    calm: Calm,
    sampled: Micros,
    checked: Micros,
}

/// Whether a domain runs only when others let it.
fn gives_way(domain: &Domain) -> bool {
    domain.state.run == RunState::Frozen || domain.state.timeslice < Timeslice::DEFAULT
}

impl Device {
    pub(super) fn new(policy: Box<dyn Policy>, now: Micros) -> Self {
        Self {
            policy,
            memory: Memory::default(),
            accounts: Accounts::default(),
            domains: BTreeMap::new(),
            groups: BTreeMap::new(),
            held: Vec::new(),
            costs: LeverCosts::default(),
            record: Record::default(),
            ended: BTreeMap::new(),
            dirty: false,
            quiet: 0,
            emulated: false,
            lost: None,
            used_by: None,
            next: None,
            calm: Calm::default(),
            sampled: now,
            checked: now,
        }
    }

    /// Looks at what happened by itself: demand, slices that others set, faults that are over.
    pub(super) fn observe(&mut self, now: Micros, clock: &Clock, cost: Micros) {
        // A little early is better than to wake up once more: devices come to share their moments.
        let planned = self.next.is_some_and(|next| next <= now);
        if planned || self.sampled + Micros(self.tick(cost).0 / 2) <= now {
            self.sample(now);
        }
        let due = |it: &&mut Domain| it.fault.as_ref().is_some_and(|fault| fault.until <= now);
        let mut well = Vec::new();
        for domain in self.domains.values_mut().filter(due) {
            domain.try_again(clock());
            self.dirty = true;
            well.extend(domain.fault.is_none().then_some(domain.state.id));
        }
        for id in well {
            self.conform(id, clock);
        }
        if self.checked + CHECK <= now {
            self.checked = now;
            self.account(now);
            let ids: Vec<DomainId> = self.domains.keys().copied().collect();
            for id in ids {
                self.check(id, clock);
                if let Some(domain) = self.domains.get(&id) {
                    let received = self.account_of(domain).received_us;
                    if let Some(domain) = self.domains.get_mut(&id) {
                        domain.turn_window(now, received);
                    }
                }
            }
        }
    }

    /// Holds the memory of a process that left work behind in a group, unless that of too many is.
    pub(super) fn hold(&mut self, now: Micros, group: DomainId, files: &Arc<[OwnedFd]>) -> bool {
        let of_group = |held: &&Held| held.group() == group;
        if self.held.iter().filter(of_group).count() >= MAX_HELD {
            return false;
        }
        self.account(now);
        self.dirty = true;
        let before = self.accounts.get(group).received_us;
        let files = Arc::clone(files);
        self.held.push(Held::new(group, now, before, files));
        true
    }

    /// Whether memory is held for the group of this name.
    pub(super) fn holds(&self, name: &str) -> bool {
        let group = self.group_named(name);
        self.held.iter().any(|it| Some(it.group()) == group)
    }

    /// What need not be held any longer.
    pub(super) fn release(&mut self, now: Micros) -> Vec<Held> {
        let (domains, accounts) = (&self.domains, &self.accounts);
        let received = |group: DomainId| {
            let lives = domains.values().any(|it| it.group == Some(group));
            lives.then(|| accounts.get(group).received_us)
        };
        let over = |held: &mut Held| held.is_over(now, received(held.group()));
        let over: Vec<Held> = self.held.extract_if(.., over).collect();
        if !over.is_empty() {
            self.dirty = true;
            self.forget_groups();
        }
        over
    }

    /// The share of the device that a process used in the last second, as the driver measured it.
    pub(super) fn measured(&self, pid: u32) -> Option<f64> {
        let used_by = self.used_by.as_ref()?;
        Some(used_by.get(&pid).copied().unwrap_or(0.0))
    }

    /// Who uses it.
    pub(super) fn tenants(&self) -> BTreeSet<TenantId> {
        let domains = self.domains.values();
        domains.map(|domain| domain.state.tenant).collect()
    }

    /// When [`Self::observe`] or the policy has something to do although nothing happens.
    pub(super) fn due(&self, cost: Micros) -> Option<Micros> {
        if self.domains.is_empty() && self.held.is_empty() {
            return None;
        }
        let faults = self
            .domains
            .values()
            .filter_map(|domain| Some(domain.fault.as_ref()?.until));
        let own = [self.sampled + self.tick(cost), self.checked + CHECK];
        own.into_iter().chain(self.next).chain(faults).min()
    }

    /// The compute groups of a session, by their slots, that compete with somebody for this device; none while its memory is away: who
    /// competes gets ready to hold the device, and must not call the driver then.
    pub(super) fn contended(&self, session: SessionId, now: Micros) -> u64 {
        let mut slots = 0;
        for (id, domain) in &self.domains {
            if domain.member.session == session
                && domain.member.key < SLOTS as u32
                && !domain.is_parked()
                && self.domains.iter().any(|(other, it)| {
                    let together = it.group.is_some() && it.group == domain.group;
                    other != id && !together && it.competes(now)
                })
            {
                slots |= 1 << domain.member.key;
            }
        }
        slots
    }

    /// Whether it needs a plan now.
    pub(super) fn needs_plan(&self, now: Micros) -> bool {
        self.dirty || self.next.is_some_and(|next| next <= now)
    }

    /// How often to look at demand: soon while somebody's work may let another run or stop, seldom
    /// while it only matters for the accounts; and never so often that looking, which
    /// takes `cost`, takes more than a small part of a CPU.
    fn tick(&self, cost: Micros) -> Micros {
        let contended = self.next.is_some() || self.domains.values().any(gives_way);
        let calm = 1.0 + f64::from(self.quiet) / f64::from(QUIET) * (CALM - 1.0);
        match self.domains.len() {
            0 | 1 => Micros(TICK.0 * 20),
            _ if contended => TICK.max(Micros((cost.0 as f64 * TICK_COST * calm) as u64)),
            _ => Micros(TICK.0 * 10),
        }
    }

    /// Takes over what the processes say of their work.
    pub(super) fn sample(&mut self, now: Micros) {
        self.sampled = now;
        self.quiet = QUIET.min(self.quiet + 1);
        for domain in self.domains.values_mut() {
            domain.follow_rhythm(now);
            if let Some(times) = domain.new_holds() {
                self.record.push(now, &domain.who, What::Held(times));
            }
        }
        if self
            .domains
            .values()
            .all(|domain| domain.demand() == domain.state.demand)
        {
            return;
        }
        self.account(now);
        for domain in self.domains.values_mut() {
            let demand = domain.demand();
            if demand != domain.state.demand {
                if gives_way(domain) {
                    self.quiet = 0;
                }
                domain.set_demand(demand, now);
                self.record.push(now, &domain.who, What::Demand(demand));
                self.dirty = true;
            }
        }
    }

    /// Reads a domain's slice back; one that somebody else set is set again by the next plan.
    pub(super) fn check(&mut self, id: DomainId, clock: &Clock) {
        let Some(domain) = self
            .domains
            .get(&id)
            .filter(|domain| domain.fault.is_none())
        else {
            return;
        };
        let before = clock();
        let found = domain.levers.timeslice();
        let now = clock();
        self.costs.read.record(&found, now.saturating_sub(before));
        match found {
            Ok(us) if Timeslice(us) != domain.state.timeslice => {
                self.account(now);
                self.dirty = true;
                if let Some(domain) = self.domains.get_mut(&id) {
                    tracing::warn!(pid = domain.member.pid, expected = %domain.state.timeslice,
                        found = us, "somebody else set a timeslice");
                    domain.state.timeslice = Timeslice(us);
                    domain.tampered += 1;
                    self.record.push(now, &domain.who, What::Tampered(us));
                }
            }
            Ok(_) => self.lost = None,
            Err(error) => self.fail(id, &error, now),
        }
    }

    /// What the policy may know. Faulty domains are nobody's business until they move again.
    pub(super) fn snapshot(
        &mut self,
        now: Micros,
        specs: &BTreeMap<TenantId, TenantSpec>,
        users: &BTreeMap<TenantId, UserId>,
    ) -> Snapshot {
        // The newest that can be known: also for a domain that is new.
        self.sample(now);
        self.account(now);
        let managed = || {
            self.domains
                .values()
                .filter(|domain| domain.fault.is_none())
        };
        let mut domains = together(managed().map(|domain| (domain.group, domain.state.clone())));
        self.held.iter().for_each(|it| it.count_in(&mut domains));
        let user_of = |id: &TenantId| users.get(id).copied().unwrap_or_default();
        let present = |id: &TenantId| domains.iter().any(|domain| domain.tenant == *id);
        let own = specs
            .iter()
            .filter(|(id, _)| present(id))
            .map(|(id, spec)| TenantState {
                id: *id,
                user: user_of(id),
                spec: spec.clone(),
            });
        let shared = self.groups.values().map(|group| {
            let members = managed().filter(|domain| domain.group == Some(*group));
            let members: BTreeMap<TenantId, &TenantSpec> = members
                .filter_map(|domain| Some((domain.state.tenant, specs.get(&domain.state.tenant)?)))
                .collect();
            // All members of a group are one user's.
            let user = members.keys().next().map(&user_of);
            TenantState {
                id: tenant_of(*group),
                user: user.unwrap_or_default(),
                spec: space::combine(members.into_values()),
            }
        });
        let shared = shared.filter(|tenant| present(&tenant.id));
        let mut tenants: Vec<TenantState> = own.chain(shared).collect();
        tenants.sort_by_key(|tenant| tenant.id);
        Snapshot {
            now,
            tenants,
            domains,
            costs: self.costs.costs(),
            ..Snapshot::default()
        }
    }

    /// Pulls the levers between what is and what the plan wants. At a lever that does not move, or has to wait, it
    /// stops, since the rest relies on it, and the device needs another plan.
    pub(super) fn apply(&mut self, plan: &Plan, snapshot: &Snapshot, clock: &Clock) {
        self.dirty = false;
        // Whatever the policy thinks of it.
        let mut plan = plan.clone();
        for want in &mut plan.domains {
            if self.domains.get(&want.id).is_some_and(Domain::is_parked) {
                want.run = RunState::Frozen;
                want.reason = AWAY;
            }
        }
        // Even a policy that is always in a hurry must not keep the thread from everything else.
        self.next = plan.next.map(|next| next.max(snapshot.now + Micros(100)));
        for want in &plan.domains {
            for id in self.members(want.id) {
                if let Some(domain) = self.domains.get_mut(&id)
                    && domain.reason != want.reason
                {
                    domain.reason = want.reason;
                    let reason = What::Reason(want.reason);
                    self.record.push(snapshot.now, &domain.who, reason);
                }
            }
        }
        let levers = plan.levers(snapshot);
        for (n, lever) in levers.iter().copied().enumerate() {
            // The newest that can be known: other levers take longer than a request.
            let domains = &self.domains;
            let at_work = |id| {
                domains.values().any(|domain| {
                    domain.planned_as() == id
                        && domain.state.run == RunState::Enabled
                        && domain.at_work()
                })
            };
            if self.calm.awaits(&levers[n..], snapshot, clock(), at_work) {
                self.next = Some(snapshot.now + TICK);
                return;
            }
            // What the driver shares of a group is not relied on: every member gets the same.
            for id in self.members(lever.domain()) {
                let lever = match lever {
                    Lever::Freeze(_) => Lever::Freeze(id),
                    Lever::Thaw(_) => Lever::Thaw(id),
                    Lever::SetTimeslice(_, slice) => Lever::SetTimeslice(id, slice),
                };
                if let Err(error) = self.pull(lever, clock) {
                    self.fail(id, &error, clock());
                    return;
                }
            }
        }
        self.calm = Calm::default();
    }

    /// The group of this name, if it has members, or something is held for it.
    pub(super) fn group_named(&self, name: &str) -> Option<DomainId> {
        self.groups.get(name).copied()
    }

    /// The group of this name; made under the given number if it has no member yet.
    pub(super) fn group(&mut self, name: Arc<str>, number: DomainId) -> DomainId {
        *self.groups.entry(name).or_insert(number)
    }

    /// The domains that the policy knows by this name, as far as they can be managed.
    fn members(&self, id: DomainId) -> Vec<DomainId> {
        let planned = self.domains.values().filter(|it| it.planned_as() == id);
        let managed = planned.filter(|domain| domain.fault.is_none());
        managed.map(|domain| domain.state.id).collect()
    }

    /// A new member of a group gets what the group has.
    pub(super) fn conform(&mut self, id: DomainId, clock: &Clock) {
        let Some(group) = self.domains.get(&id).and_then(|domain| domain.group) else {
            return;
        };
        let others = self.members(group).into_iter().filter(|other| *other != id);
        let Some((slice, run)) = others
            .filter_map(|other| self.domains.get(&other))
            .map(|other| (other.state.timeslice, other.state.run))
            .next()
        else {
            return;
        };
        let mut levers = vec![Lever::SetTimeslice(id, slice)];
        if run == RunState::Frozen {
            levers.insert(0, Lever::Freeze(id));
        }
        for lever in levers {
            if let Err(error) = self.pull(lever, clock) {
                return self.fail(id, &error, clock());
            }
        }
    }

    /// What a domain had so far: of a group's member, what the group had since it came.
    pub(super) fn account_of(&self, domain: &Domain) -> Account {
        let mut account = self.accounts.get(domain.planned_as());
        account.received_us = (account.received_us - domain.before.received_us).max(0.0);
        account.runnable_us = (account.runnable_us - domain.before.runnable_us).max(0.0);
        account.waited_us = (account.waited_us - domain.before.waited_us).max(0.0);
        account.preemptions = account
            .preemptions
            .saturating_sub(domain.before.preemptions);
        account
    }

    fn pull(&mut self, lever: Lever, clock: &Clock) -> Result<(), LeverError> {
        let Some(domain) = self.domains.get(&lever.domain()).filter(|it| !it.is_free()) else {
            return Ok(());
        };
        let before = clock();
        let (result, cost) = match lever {
            Lever::Freeze(_) => (domain.levers.freeze(), &mut self.costs.freeze),
            Lever::Thaw(_) => (domain.levers.thaw(), &mut self.costs.thaw),
            Lever::SetTimeslice(_, slice) => (
                domain.levers.set_timeslice(slice.0),
                &mut self.costs.set_timeslice,
            ),
        };
        let now = clock();
        cost.record(&result, now.saturating_sub(before));
        result?;
        self.lost = None;
        // Until now everybody had what they had.
        self.account(now);
        let Some(domain) = self.domains.get_mut(&lever.domain()) else {
            return Ok(());
        };
        let what = match lever {
            Lever::Freeze(_) => {
                domain.set_run(RunState::Frozen, now);
                domain.freezes += 1;
                What::Frozen
            }
            Lever::Thaw(_) => {
                domain.set_run(RunState::Enabled, now);
                domain.thaws += 1;
                What::Thawed
            }
            Lever::SetTimeslice(_, slice) => {
                domain.state.timeslice = slice;
                domain.slice_changes += 1;
                What::Slice(slice.0)
            }
        };
        self.record.push(now, &domain.who, what);
        Ok(())
    }

    /// A lever of this domain does not move.
    fn fail(&mut self, id: DomainId, error: &LeverError, now: Micros) {
        self.account(now);
        self.dirty = true;
        if let Some(
            RmStatus::GPU_IS_LOST | RmStatus::GPU_IN_FULLCHIP_RESET | RmStatus::RESET_REQUIRED,
        ) = error.status()
        {
            self.lost = Some(error.to_string());
        }
        if let Some(domain) = self.domains.get_mut(&id) {
            tracing::warn!(pid = domain.member.pid, %error, "a lever does not move");
            domain.give_up(error.to_string(), now);
            self.record.push(now, &domain.who, What::Fault);
            // A slice is all members'.
            let (group, default) = (domain.group, domain.state.timeslice);
            for other in self.domains.values_mut() {
                if group.is_some() && other.group == group {
                    other.state.timeslice = default;
                }
            }
        }
    }

    /// The channels of a group changed.
    pub(super) fn set_channels(&mut self, id: DomainId, channels: Vec<u32>, clock: &Clock) {
        let Some(domain) = self.domains.get_mut(&id) else {
            return;
        };
        domain.levers.set_channels(channels);
        // The new ones are not frozen yet.
        if !domain.is_free()
            && domain.state.run == RunState::Frozen
            && let Err(error) = domain.levers.freeze()
        {
            self.fail(id, &error, clock());
        }
    }

    /// Drops the domains of a session, or one of them. If its process lives on, they are given back as
    /// they were made.
    pub(super) fn remove(
        &mut self,
        now: Micros,
        session: SessionId,
        key: Option<u32>,
        alive: bool,
        reaper: &Reaper,
    ) {
        let leaves = |domain: &Domain| {
            domain.member.session == session && key.is_none_or(|key| key == domain.member.key)
        };
        if !self.domains.values().any(leaves) {
            return;
        }
        self.account(now);
        self.dirty = true;
        let ids: Vec<DomainId> = self
            .domains
            .iter()
            .filter_map(|(id, domain)| leaves(domain).then_some(*id))
            .collect();
        for id in ids {
            let Some(mut domain) = self.domains.remove(&id) else {
                continue;
            };
            let totals = domain.totals(now, &self.account_of(&domain));
            *self.ended.entry(domain.state.tenant).or_default() += totals;
            self.record.push(now, &domain.who, What::Left);
            match domain
                .group
                .filter(|group| !self.members(*group).is_empty())
            {
                // The slice is the others' too; its own library thaws its channels.
                Some(_) if alive => {}
                // What it left behind shall end, while its memory is held; frozen, it would hold up the others, too.
                Some(_) if domain.state.run == RunState::Frozen => {
                    let _ = domain.levers.thaw();
                }
                Some(_) => {}
                None if alive => domain.restore(),
                _ => {}
            }
            // Without a reaper it is dropped here and now.
            let _ = reaper.send(Box::new(domain.levers));
        }
        self.forget_groups();
    }

    /// Forgets groups that have no members, unless something is held: for those who come meanwhile it is held, too.
    fn forget_groups(&mut self) {
        let (domains, held) = (&self.domains, &self.held);
        let lives = |group| domains.values().any(|it| it.group == Some(group));
        let is_held = |group| held.iter().any(|it| it.group() == group);
        self.groups
            .retain(|_, group| lives(*group) || is_held(*group));
    }

    /// Accounts for the time in which everything was as it is.
    pub(super) fn account(&mut self, now: Micros) {
        // What a faulty domain has is not known; the others are planned as if it had nothing.
        let state = |domain: &Domain| match domain.fault {
            None => domain.state.clone(),
            Some(_) => DomainState {
                demand: Demand::Idle,
                ..domain.state.clone()
            },
        };
        let mut states = together(self.domains.values().map(|it| (it.group, state(it))));
        self.held.iter().for_each(|it| it.count_in(&mut states));
        self.accounts.advance(now, &states, &self.costs.costs());
        for domain in self.domains.values_mut() {
            domain.state.received = self.accounts.get(domain.planned_as()).received();
        }
    }
}

/// Who stands for a group's members before the policy. No tenant has such a high number.
fn tenant_of(group: DomainId) -> TenantId {
    TenantId(u64::MAX - group.0)
}

/// The domains as the policy sees them, by rising ids: those of one group are one domain, which has work if any of
/// them has and runs if any does.
fn together(domains: impl Iterator<Item = (Option<DomainId>, DomainState)>) -> Vec<DomainState> {
    let rank = |demand: Demand| match demand {
        Demand::Idle => 0,
        Demand::Unknown => 1,
        Demand::Busy => 2,
    };
    let mut seen: BTreeMap<DomainId, DomainState> = BTreeMap::new();
    for (group, mut state) in domains {
        if let Some(group) = group {
            (state.id, state.tenant) = (group, tenant_of(group));
        }
        let Some(all) = seen.get_mut(&state.id) else {
            seen.insert(state.id, state);
            continue;
        };
        if state.run == RunState::Enabled {
            all.run = RunState::Enabled;
        }
        all.expected = all.expected.into_iter().chain(state.expected).min();
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
    seen.into_values().collect()
}

/// What the levers of a device cost, as measured.
#[derive(Default)]
pub(super) struct LeverCosts {
    freeze: Cost,
    thaw: Cost,
    set_timeslice: Cost,
    read: Cost,
}

#[derive(Default)]
struct Cost {
    pulls: Durations,
    failures: u64,
    min: Micros,
    max: Micros,
    /// The recent ones count most.
    recent: f64,
}

impl Cost {
    fn record<T>(&mut self, result: &Result<T, LeverError>, took: Micros) {
        if result.is_err() {
            self.failures += 1;
            return;
        }
        self.pulls.record(took);
        self.max = self.max.max(took);
        if self.pulls.count == 1 {
            (self.min, self.recent) = (took, took.0 as f64);
        }
        self.min = self.min.min(took);
        self.recent += (took.0 as f64 - self.recent) / 8.0;
    }

    fn or(&self, assumed: Micros) -> Micros {
        match self.pulls.count {
            0 => assumed,
            _ => Micros((self.recent as u64).max(1)),
        }
    }
}

impl LeverCosts {
    /// For the policy: measured where there is a measurement.
    fn costs(&self) -> Costs {
        let assumed = Costs::default();
        Costs {
            switch: assumed.switch,
            freeze: self.freeze.or(assumed.freeze),
            thaw: self.thaw.or(assumed.thaw),
            set_timeslice: self.set_timeslice.or(assumed.set_timeslice),
        }
    }

    /// For people.
    pub(super) fn list(&self) -> Vec<LeverCost> {
        let all = [
            ("freeze", &self.freeze),
            ("thaw", &self.thaw),
            ("set_timeslice", &self.set_timeslice),
            ("read_timeslice", &self.read),
        ];
        all.map(|(lever, cost)| LeverCost {
            lever: lever.into(),
            pulls: cost.pulls.count,
            failures: cost.failures,
            min_us: cost.min.0,
            mean_us: cost.pulls.total.0 / cost.pulls.count.max(1),
            max_us: cost.max.0,
            total_us: cost.pulls.total.0,
            histogram: cost.pulls.histogram.into(),
        })
        .into()
    }
}
