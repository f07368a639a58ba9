//! One device: its domains, and how what the controller decides is carried out.

use std::{
    collections::{BTreeMap, BTreeSet},
    os::fd::OwnedFd,
    sync::Arc,
};

use gpumux_core::{
    Control, Demand, DomainId, Micros, TenantId, Timeslice,
    controller::{Command, Controller, Event, Outcome},
    link::Link,
    runlist::Runlist,
    tamper,
};
use gpumux_rm::{Cause, ControlFailure};

use super::{
    domain::{self, Domain},
    held::Held,
    model::{Clock, Reaper},
    record::{Durations, Record, Totals, What},
};
use crate::{api::types::ControlCost, link::SessionId};

/// How often slices are read back, and shares are counted anew.
const CHECK: Micros = Micros::from_secs(1);

/// As many as an MPS server has clients.
const MAX_HELD: usize = 48;

pub(super) struct Device {
    /// Its number to the controller.
    pub(super) index: usize,
    pub(super) domains: BTreeMap<DomainId, Domain>,
    /// Groups that have members, by name.
    groups: BTreeMap<Arc<str>, DomainId>,
    /// What was left behind in groups.
    held: Vec<Held>,
    pub(super) costs: ControlCosts,
    pub(super) record: Record,
    /// What domains that ended had, of tenants that live.
    pub(super) ended: BTreeMap<TenantId, Totals>,
    /// Whether a tenant came with it through an emulated driver.
    pub(super) emulated: bool,
    /// What is wrong with the device.
    pub(super) lost: Option<String>,
    /// Groups whose timeslices were not as they should be, which is not explained yet.
    pub(super) changed: Vec<DomainId>,
    /// What the driver measured of processes, by pid, if it does.
    pub(super) used_by: Option<BTreeMap<u32, f64>>,
    checked: Micros,
    /// How often it looked at what processes write.
    #[cfg(test)]
    pub(super) looks: u64,
    /// Whose time it is, among groups that are scheduled at launch.
    pub(super) runlist: Runlist,
    /// Its link to the host, by [`gpumux_wire::page::Direction`].
    pub(super) links: [Link; 2],
    /// What that can carry in one direction, in bytes a second, if known.
    pub(super) link: Option<u64>,
}

impl Device {
    pub(super) fn new(index: usize, now: Micros) -> Self {
        Self {
            index,
            domains: BTreeMap::new(),
            groups: BTreeMap::new(),
            held: Vec::new(),
            costs: ControlCosts::default(),
            record: Record::default(),
            ended: BTreeMap::new(),
            emulated: false,
            lost: None,
            changed: Vec::new(),
            used_by: None,
            checked: now,
            #[cfg(test)]
            looks: 0,
            runlist: Runlist::default(),
            links: Default::default(),
            link: None,
        }
    }

    /// Whether nothing of a process is on it.
    pub(super) fn is_empty(&self) -> bool {
        self.domains.is_empty() && self.held.is_empty()
    }

    /// Looks at what happened by itself: demand, and slices that others set. Returns whether it sampled demand.
    pub(super) fn observe(
        &mut self,
        now: Micros,
        controller: &mut Controller,
        clock: &Clock,
        cost: Micros,
    ) -> bool {
        let looks = controller.should_look(self.index, now, cost);
        if looks {
            controller.looked(self.index, now);
            self.sample(now, controller);
        }
        if self.checked + CHECK <= now {
            self.checked = now;
            controller.account_until(self.index, now);
            let ids: Vec<DomainId> = self.domains.keys().copied().collect();
            for id in ids {
                self.check(id, controller, clock);
                if let Some(domain) = self.domains.get_mut(&id) {
                    let account = controller.account(id);
                    domain.turn_window(now, account.received_us, account.waited_us);
                }
            }
        }
        looks
    }

    /// Reports what the processes write of their work.
    pub(super) fn sample(&mut self, now: Micros, controller: &mut Controller) {
        #[cfg(test)]
        {
            self.looks += 1;
        }
        // What the driver measures of a process is the work of those of its groups of which it is known.
        let known = self
            .domains
            .values()
            .filter(|it| it.demand() != Demand::Unknown);
        let reporting: BTreeSet<u32> = match known.clone().count() == self.domains.len() {
            true => BTreeSet::new(),
            false => known.map(|it| it.member.pid).collect(),
        };
        for (id, domain) in &mut self.domains {
            domain.note_work(now);
            if let Some(at) = domain.arrival(now) {
                controller.handle(now, Event::Arrival(*id, at));
            }
            if let Some(progress) = domain.progress() {
                controller.handle(now, Event::Progress(*id, progress));
            }
            if let Some(times) = domain.new_holds() {
                self.record.push(now, &domain.who, What::Held(times));
            }
            let state = controller.domain(*id).map(|it| &it.state);
            let received = state.map_or(Micros::ZERO, |it| it.received);
            let used = (self.used_by.as_ref()).and_then(|all| all.get(&domain.member.pid));
            let silent = !reporting.contains(&domain.member.pid);
            let demand = domain.counted_demand(received, used.copied(), silent);
            let before = state.map(|it| it.demand);
            if before.is_some_and(|before| before != demand) {
                controller.handle(now, Event::Demand(*id, demand));
                self.record.push(now, &domain.who, What::Demand(demand));
            }
            if let Some(at_work) = domain.new_at_work(demand) {
                controller.handle(now, Event::AtWork(*id, at_work));
            }
        }
    }

    /// Processes that may be stopped: they have work, and have submitted none for a second.
    pub(super) fn standing(&self, now: Micros) -> impl Iterator<Item = u32> {
        let domains = self.domains.values();
        let standing = domains.filter(move |it| it.member.pid != 0 && it.stands(now, CHECK));
        standing.map(|it| it.member.pid)
    }

    /// Of all processes, these are stopped.
    pub(super) fn set_stopped(
        &mut self,
        now: Micros,
        stopped: &BTreeSet<u32>,
        controller: &mut Controller,
    ) {
        controller.account_until(self.index, now);
        for (id, domain) in &mut self.domains {
            let received = (controller.domain(*id)).map_or(Micros::ZERO, |it| it.state.received);
            domain.set_stopped(stopped.contains(&domain.member.pid), received);
        }
    }

    /// Carries a command out and reports how it ended.
    pub(super) fn carry_out(
        &mut self,
        command: &Command,
        controller: &mut Controller,
        clock: &Clock,
    ) {
        let before = clock();
        let id = command.control.domain();
        let Some(domain) = self.domains.get_mut(&id).filter(|it| !it.is_free()) else {
            return controller.handle(before, Event::Ended(command.id, Outcome::Failed));
        };
        let (result, cost) = match command.control {
            Control::Freeze(_) => (domain.controls.freeze(), &mut self.costs.freeze),
            Control::Thaw(_) => (domain.controls.thaw(), &mut self.costs.thaw),
            Control::SetTimeslice(_, slice) => (
                domain.controls.set_timeslice(slice.0),
                &mut self.costs.set_timeslice,
            ),
        };
        let now = clock();
        let took = now.saturating_sub(before);
        if command.is_planned() {
            cost.record(&result, took);
        }
        let outcome = match &result {
            Ok(()) => {
                self.lost = None;
                if matches!(command.control, Control::SetTimeslice(..)) {
                    domain.verified = now;
                }
                let (count, what) = match command.control {
                    Control::Freeze(_) => (&mut domain.freezes, What::Frozen),
                    Control::Thaw(_) => (&mut domain.thaws, What::Thawed),
                    Control::SetTimeslice(_, slice) => {
                        (&mut domain.slice_changes, What::Slice(slice.0))
                    }
                };
                *count += u64::from(command.is_planned());
                self.record.push(now, &domain.who, what);
                Outcome::Done(took)
            }
            Err(error) if command.is_planned() => {
                self.failed(id, error, now);
                Outcome::Failed
            }
            Err(error) => {
                domain.error = Some(error.to_string());
                Outcome::Failed
            }
        };
        controller.handle(now, Event::Ended(command.id, outcome));
    }

    /// Records the reasons that plans gave since they were recorded last.
    pub(super) fn record_reasons(&mut self, now: Micros, controller: &Controller) {
        for (domain, known) in (self.domains.values_mut()).zip(controller.domains(self.index)) {
            if domain.reason != known.reason {
                domain.reason = known.reason;
                let reason = What::Reason(known.reason);
                self.record.push(now, &domain.who, reason);
            }
        }
    }

    /// Holds the memory of a process that left work behind in a group, unless that of too many is.
    pub(super) fn hold(
        &mut self,
        now: Micros,
        group: DomainId,
        files: &Arc<[OwnedFd]>,
        controller: &mut Controller,
    ) -> bool {
        let of_group = |held: &&Held| held.group() == group;
        if self.held.iter().filter(of_group).count() >= MAX_HELD {
            return false;
        }
        controller.account_until(self.index, now);
        let before = controller.group_account(self.index, group).received_us;
        let files = Arc::clone(files);
        self.held.push(Held::new(group, now, before, files));
        self.report_held(now, group, controller);
        true
    }

    /// Whether memory is held for the group of this name.
    pub(super) fn holds(&self, name: &str) -> bool {
        let group = self.group_named(name);
        self.held.iter().any(|it| Some(it.group()) == group)
    }

    /// A group has work as long as something is held for it.
    fn report_held(&self, now: Micros, group: DomainId, controller: &mut Controller) {
        let first = self.held.iter().find(|it| it.group() == group);
        let since = first.map(Held::since);
        controller.handle(now, Event::LeftBehind(self.index, group, since));
    }

    /// What need not be held any longer.
    pub(super) fn release(&mut self, now: Micros, controller: &mut Controller) -> Vec<Held> {
        if self.held.is_empty() {
            return Vec::new();
        }
        let (domains, index) = (&self.domains, self.index);
        let received = |group: DomainId| {
            let lives = domains.values().any(|it| it.group == Some(group));
            lives.then(|| controller.group_account(index, group).received_us)
        };
        let over = |held: &mut Held| held.is_over(now, received(held.group()));
        let over: Vec<Held> = self.held.extract_if(.., over).collect();
        for held in &over {
            self.report_held(now, held.group(), controller);
        }
        if !over.is_empty() {
            self.forget_groups();
        }
        over
    }

    /// The share of the device that a process used in the last second, as the driver measured it.
    pub(super) fn measured(&self, pid: u32) -> Option<f64> {
        let used_by = self.used_by.as_ref()?;
        Some(used_by.get(&pid).copied().unwrap_or(0.0))
    }

    /// Its users: tenants and other processes.
    pub(super) fn tenants(&self) -> BTreeSet<TenantId> {
        let domains = self.domains.values();
        domains.map(|domain| domain.who.tenant).collect()
    }

    /// When [`Self::observe`] has something to do although nothing happens.
    pub(super) fn due(&self, controller: &Controller, cost: Micros) -> Option<Micros> {
        if self.domains.is_empty() && self.held.is_empty() {
            return None;
        }
        let look = controller.look_at(self.index, cost);
        Some(look.min(self.checked + CHECK))
    }

    /// Reads a domain's timeslice back; one that another process set is set again by the next plan.
    pub(super) fn check(&mut self, id: DomainId, controller: &mut Controller, clock: &Clock) {
        let known = controller.domain(id).filter(|it| !it.is_faulty());
        let Some((domain, known)) = self.domains.get_mut(&id).zip(known) else {
            return;
        };
        let expected = known.state.timeslice;
        let before = clock();
        let found = domain.controls.timeslice();
        let now = clock();
        self.costs.read.record(&found, now.saturating_sub(before));
        match found {
            // Its process set it when the lease expired, and said so before.
            Ok(_) if domain.is_free() => {}
            Ok(us) if Timeslice(us) != expected => {
                tracing::debug!(pid = domain.member.pid, %expected, found = us, "its timeslice was changed");
                // An MPS group's is set by the driver library of each process that joins. Since the last look: what is found now
                // may have been done before.
                let settled = domain.verified >= domain.came_at + tamper::SETTLES;
                if domain.group.is_none() && settled {
                    self.changed.push(id);
                }
                self.record.push(now, &domain.who, What::Tampered(us));
                controller.handle(now, Event::Found(id, Timeslice(us)));
            }
            Ok(_) => {
                domain.verified = now;
                self.lost = None;
            }
            Err(error) => {
                self.failed(id, &error, now);
                controller.handle(now, Event::Unreadable(id));
            }
        }
    }

    /// A control of this domain does not move.
    fn failed(&mut self, id: DomainId, error: &ControlFailure, now: Micros) {
        if error.cause == Cause::DeviceLost {
            self.lost = Some(error.to_string());
        }
        if let Some(domain) = self.domains.get_mut(&id) {
            tracing::warn!(pid = domain.member.pid, %error, "a control fails");
            domain.error = Some(error.to_string());
            self.record.push(now, &domain.who, What::Fault);
        }
    }

    /// The channels of a group changed.
    pub(super) fn set_channels(
        &mut self,
        now: Micros,
        id: DomainId,
        channels: Vec<u32>,
        controller: &mut Controller,
    ) {
        if let Some(domain) = self.domains.get_mut(&id) {
            domain.controls.set_channels(channels);
            controller.handle(now, Event::Channels(id));
        }
    }

    /// The group of this name, if it has members, or something is held for it.
    pub(super) fn group_named(&self, name: &str) -> Option<DomainId> {
        self.groups.get(name).copied()
    }

    /// The group of this name, which a process joins; made under the given number if it has no member yet.
    pub(super) fn group(&mut self, name: Arc<str>, number: DomainId) -> DomainId {
        let group = *self.groups.entry(name).or_insert(number);
        let left = self.held.iter_mut().filter(|it| it.group() == group);
        left.for_each(Held::thaw);
        group
    }

    /// Drops the domains of a session, or one of them. If its process lives on, they are given back as
    /// they were made.
    pub(super) fn remove(
        &mut self,
        now: Micros,
        session: SessionId,
        key: Option<u32>,
        alive: bool,
        controller: &mut Controller,
        reaper: &Reaper,
    ) {
        let leaves = |domain: &Domain| {
            domain.member.session == session && key.is_none_or(|key| key == domain.member.key)
        };
        if !self.domains.values().any(leaves) {
            return;
        }
        controller.account_until(self.index, now);
        let ids: Vec<DomainId> = self
            .domains
            .iter()
            .filter_map(|(id, domain)| leaves(domain).then_some(*id))
            .collect();
        for id in ids {
            let known = controller.domain(id).cloned();
            let Some((domain, known)) = self.domains.remove(&id).zip(known) else {
                continue;
            };
            let totals = domain.totals(now, &known, &controller.account(id));
            *self.ended.entry(domain.who.tenant).or_default() += totals;
            self.record.push(now, &domain.who, What::Left);
            controller.handle(now, Event::Gone(id));
            let mut others = controller.domains(self.index);
            match domain
                .group
                .filter(|group| others.any(|it| it.group == Some(*group) && !it.is_faulty()))
            {
                // The slice is the others' too; its own library thaws its channels.
                Some(_) if alive => {}
                // What it left behind shall end, while its memory is held; frozen, it would hold up the others, too.
                Some(_) if domain::now(&known).frozen => {
                    let _ = domain.controls.thaw();
                }
                Some(_) => {}
                None if alive => domain.restore(&known),
                // What the last member left may run, and no plan counts it: at the shortest timeslice, neither it nor the owner of the turn
                // would run until its files are closed.
                None if domain.group.is_some() && !domain::now(&known).frozen => {
                    domain.restore(&known);
                }
                // What is frozen stays so, until another process joins.
                None => {
                    // Its own is the last: those of members before it end earlier.
                    let mut left = self.held.iter_mut().rev();
                    if let Some(held) = left.find(|it| Some(it.group()) == domain.group) {
                        let _ = domain.controls.set_timeslice(domain.default.0);
                        held.keep_frozen(domain.controls);
                        continue;
                    }
                }
            }
            // Without a reaper it is dropped here and now.
            let _ = reaper.send(Box::new(domain.controls));
        }
        self.forget_groups();
    }

    /// Forgets groups that have no members, unless something is held: for members that join meanwhile it is held, too.
    fn forget_groups(&mut self) {
        let (domains, held) = (&self.domains, &self.held);
        let lives = |group| domains.values().any(|it| it.group == Some(group));
        let is_held = |group| held.iter().any(|it| it.group() == group);
        self.groups
            .retain(|_, group| lives(*group) || is_held(*group));
    }
}

/// What the controls of a device cost, as measured.
#[derive(Default)]
pub(super) struct ControlCosts {
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
}

impl Cost {
    fn record<T>(&mut self, result: &Result<T, ControlFailure>, took: Micros) {
        if result.is_err() {
            self.failures += 1;
            return;
        }
        self.pulls.record(took);
        self.max = self.max.max(took);
        if self.pulls.count == 1 {
            self.min = took;
        }
        self.min = self.min.min(took);
    }
}

impl ControlCosts {
    /// For people.
    pub(super) fn list(&self) -> Vec<ControlCost> {
        let all = [
            ("freeze", &self.freeze),
            ("thaw", &self.thaw),
            ("set_timeslice", &self.set_timeslice),
            ("read_timeslice", &self.read),
        ];
        all.map(|(control, cost)| ControlCost {
            control: control.into(),
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
