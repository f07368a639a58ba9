//! The compute controller: which channel groups may run, with which timeslices, and when that is decided anew.
//!
//! A pure state machine: [`Controller::handle`] takes note of an [`Event`], [`Controller::poll`] returns the next [`Command`], and
//! [`Controller::next_wakeup`] tells when to poll although nothing happens. The daemon and the simulator only carry
//! commands out and report how each ended. `tests/controller` checks it together with the memory broker.
//!
//! # One control at a time
//! The driver takes controls one after the other, and each takes longer than a request of a latency tenant. So the next one is
//! chosen when the last has ended, by the newest that is known: the controls of a plan are issued in its order
//! ([`crate::Plan::controls`]) until something changes; then the device is planned anew, and also when the last has ended: the turn that
//! they hand over begins only then.
//!
//! # A control that fails
//! or has not ended at its deadline leaves the channel group in an unknown state. The group is given back as the driver made it, as
//! far as its controls work; it is planned no more; and it is taken up again after 20 ms, then 40, … up to 5 s.
//!
//! # Demand
//! is looked at by the driver of the controller, as often as [`Controller::look_at`] tells.

mod device;
mod domain;

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
};

use serde::{Deserialize, Serialize};

use crate::{
    Account, Calm, Class, Control, Costs, Demand, DomainId, Micros, Policy, Progress, RunState,
    TenantId, TenantSpec, Timeslice, UserId, gang,
};

use device::Device;
pub use domain::{AWAY, BACKOFF, Domain, NewDomain, TICK};

/// How long a control may take before its domain counts as failed.
pub const DEADLINE: Micros = Micros::from_secs(5);

/// What happened.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Event {
    /// A tenant of this user has this spec now.
    Tenant(TenantId, UserId, TenantSpec),
    /// A tenant has ended.
    TenantGone(TenantId),
    /// A channel group is there to be controlled; enabled.
    Came(NewDomain),
    /// It is gone.
    Gone(DomainId),
    /// Whether it has work.
    Demand(DomainId, Demand),
    /// Whether it has work at this moment or holds the device ahead of some. Only controls wait for this.
    AtWork(DomainId, bool),
    /// What its program has done so far, if that has changed.
    Progress(DomainId, Progress),
    /// Work came at this moment, after a pause.
    Arrival(DomainId, Micros),
    /// It must not run, because its memory is away; or may again.
    SwappedOut(DomainId, bool),
    /// Since when a group has work that none of its members knows of; none: it has no such work any more.
    LeftBehind(usize, DomainId, Option<Micros>),
    /// Its timeslice was read back.
    Found(DomainId, Timeslice),
    /// Its timeslice could not be read back.
    Unreadable(DomainId),
    /// It has new channels, which are enabled.
    Channels(DomainId),
    /// It ran although it was frozen: its freeze was undone.
    Ran(DomainId),
    /// The command with this number has ended.
    Ended(u64, Outcome),
}

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome {
    /// It was carried out, and took so long.
    Done(Micros),
    /// It was not.
    Failed,
}

/// A control to issue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Command {
    /// Its number: rising.
    pub id: u64,
    /// On which device.
    pub device: usize,
    /// What to do.
    pub control: Control,
    /// When it counts as failed.
    pub deadline: Micros,
    /// What for.
    aim: Aim,
}

impl Command {
    /// Whether it brings a plan about; else it mends what failed before.
    pub fn is_planned(&self) -> bool {
        self.aim == Aim::Plan
    }
}

/// What a control is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Aim {
    /// A plan.
    Plan,
    /// To give a domain that failed back as the driver made it.
    GiveUp,
    /// To take it up again.
    Retry,
}

/// All that changes a controller, as it was called: the same calls of a new controller give the same commands.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Call {
    /// [`Controller::add_device`] with this policy, as [`crate::policy::by_name`] makes it; or, in the place of another,
    /// [`Controller::replace_device`].
    Device(Option<usize>, String, Costs),
    /// [`Controller::set_weight`]
    Weight(UserId, f64),
    /// [`Controller::see_foreign`]
    Foreign(usize, f64),
    /// [`Controller::looked`]
    Looked(usize),
    /// [`Controller::account_until`]
    Account(usize),
    /// [`Controller::handle`]
    Handle(Event),
    /// [`Controller::poll`], and what it returned.
    Poll(Option<Command>),
}

/// A control that comes before those of plans. What it does is decided when it is issued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Urgent {
    device: usize,
    id: DomainId,
    sets: Sets,
    aim: Aim,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sets {
    /// The timeslice that the driver library gave it.
    Timeslice,
    /// Whether it runs.
    Run,
    /// That it is frozen, if it is.
    Frozen,
    /// That it runs, if it does.
    Running,
}

/// Known faults, for tests that must find them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutation {
    /// A plan's controls are issued in the reverse order.
    ThawFirst,
    /// A control that fails counts as done.
    TrustFailures,
    /// A domain that failed is never taken up again.
    NoRetry,
    /// A domain that failed is taken up again at once, each time.
    NoBackoff,
    /// A late control is waited for.
    NoDeadline,
    /// That memory is away is left to the policy's plans of the future.
    ForgetSwapped,
    /// Each device is planned alone.
    NoGangs,
    /// Controls wait for latency work as long as there is some.
    DeferForEver,
    /// Controls of domains that are gone are issued.
    ControlTheGone,
    /// A slice that another program set is not set again.
    IgnoreFound,
    /// Neighbours of a program that was launch-bound keep the longer timeslice.
    TolerateForEver,
    /// What was let run is believed to run.
    TrustThaws,
}

/// See the module's description.
#[derive(Clone)]
pub struct Controller {
    devices: Vec<Device>,
    tenants: BTreeMap<TenantId, (UserId, TenantSpec)>,
    weights: BTreeMap<UserId, f64>,
    issued: Option<Command>,
    /// Controls that come before those of plans.
    urgent: VecDeque<Urgent>,
    commands: u64,
    plans: u64,
    mutation: Option<Mutation>,
    /// Calls and when they came, if they are recorded.
    calls: Option<Vec<(Micros, Call)>>,
}

impl Controller {
    /// A controller of no device, for users with these weights; others weigh 1.
    pub fn new(weights: BTreeMap<UserId, f64>) -> Self {
        Self {
            devices: Vec::new(),
            tenants: BTreeMap::new(),
            weights,
            issued: None,
            urgent: VecDeque::new(),
            commands: 0,
            plans: 0,
            mutation: None,
            calls: None,
        }
    }

    /// Records all calls from now on. They have to be taken regularly.
    pub fn record(&mut self) {
        self.calls.get_or_insert_default();
    }

    /// What was recorded since the last time.
    pub fn take_calls(&mut self) -> Vec<(Micros, Call)> {
        self.calls.as_mut().map(std::mem::take).unwrap_or_default()
    }

    fn note(&mut self, now: Micros, call: impl FnOnce() -> Call) {
        if let Some(calls) = &mut self.calls {
            calls.push((now, call()));
        }
    }

    /// With a known fault, for tests.
    #[must_use]
    pub fn mutated(mut self, mutation: Mutation) -> Self {
        self.mutation = Some(mutation);
        self
    }

    /// One device more. Returns its number: how many there were. `costs` are assumed until controls were measured.
    pub fn add_device(&mut self, policy: Arc<dyn Policy>, costs: Costs, now: Micros) -> usize {
        self.note(now, || Call::Device(None, policy.name().to_owned(), costs));
        self.devices.push(Device::new(policy, costs, now));
        self.devices.len() - 1
    }

    /// A new device gets the number of one without domains that exists no more.
    pub fn replace_device(
        &mut self,
        at: usize,
        policy: Arc<dyn Policy>,
        costs: Costs,
        now: Micros,
    ) {
        self.note(now, || {
            Call::Device(Some(at), policy.name().to_owned(), costs)
        });
        self.devices[at] = Device::new(policy, costs, now);
    }

    /// Its policy.
    pub fn policy(&self, device: usize) -> &dyn Policy {
        self.devices[device].policy()
    }

    /// The domains on a device, by rising ids.
    pub fn domains(&self, device: usize) -> impl Iterator<Item = &Domain> {
        self.devices[device].domains.values()
    }

    /// A domain.
    pub fn domain(&self, id: DomainId) -> Option<&Domain> {
        let mut devices = self.devices.iter();
        devices.find_map(|device| device.domains.get(&id))
    }

    /// A domain, and the other members of its group: they are frozen together.
    pub fn together(&self, id: DomainId) -> impl Iterator<Item = &Domain> {
        let own = self.domain(id);
        let at = own.and_then(|_| self.device_of(id));
        let all = at.into_iter().flat_map(|at| self.domains(at));
        all.filter(move |it| own.is_some_and(|own| own.planned_as() == it.planned_as()))
    }

    /// A tenant's class.
    pub fn class_of(&self, tenant: TenantId) -> Class {
        let known = self.tenants.get(&tenant);
        known.map_or(Class::Standard, |(_, spec)| spec.class)
    }

    /// A user's weight from now on.
    pub fn set_weight(&mut self, user: UserId, weight: f64) {
        self.note(Micros::ZERO, || Call::Weight(user, weight));
        let before = self.weights.insert(user, weight).unwrap_or(1.0);
        if before != weight {
            self.devices.iter_mut().for_each(|it| it.dirty = true);
        }
    }

    /// The part of a device that processes which are not controlled used since this was called last.
    pub fn see_foreign(&mut self, device: usize, now: Micros, used: f64) {
        self.note(now, || Call::Foreign(device, used));
        self.devices[device].see_foreign(now, used);
    }

    /// What a domain had so far: of a group's member, what the group had since it came. Of several of one tenant in a group, all of
    /// which run when the group does, only the first counts.
    pub fn account(&self, id: DomainId) -> Account {
        let mut devices = self.devices.iter();
        let account = devices.find_map(|device| {
            let domain = device.domains.get(&id)?;
            let first = domain.group.and_then(|group| {
                let mut all = device.domains.iter();
                let is =
                    |it: &Domain| it.group == Some(group) && it.state.tenant == domain.state.tenant;
                all.find(|(_, it)| is(it)).map(|(first, _)| *first)
            });
            if first.is_some_and(|first| first != id) {
                return None;
            }
            let account = device.accounts.get(domain.planned_as());
            Some(account.since(&domain.before))
        });
        account.unwrap_or_default()
    }

    /// What a group had so far.
    pub fn group_account(&self, device: usize, group: DomainId) -> Account {
        self.devices[device].accounts.get(group)
    }

    /// Whether a domain competes with another for its device: then its process prepares to hold the device ahead of its work, and must
    /// not call the driver, so its memory must be there.
    pub fn contended(&self, id: DomainId, now: Micros) -> bool {
        let device = self.device_of(id).map(|at| &self.devices[at]);
        device.is_some_and(|device| device.contended(id, now))
    }

    /// How many plans were made.
    pub fn plans(&self) -> u64 {
        self.plans
    }

    /// What controls of a device cost, as far as that was measured.
    pub fn costs(&self, device: usize) -> Costs {
        self.devices[device].costs()
    }

    /// When to look at the demand of a device's domains again, if looking takes `cost`: soon while the work of one may let another run
    /// or stop, seldom while it only matters for the accounts; and never so often that it takes more than a small part of a CPU.
    pub fn look_at(&self, device: usize, cost: Micros) -> Micros {
        self.devices[device].looked + self.devices[device].tick(cost)
    }

    /// Whether to look now: a little early is better than to wake up once more, and plans shall know the newest.
    pub fn should_look(&self, device: usize, now: Micros, cost: Micros) -> bool {
        let device = &self.devices[device];
        device.needs_plan(now) || device.looked + Micros(device.tick(cost).0 / 2) <= now
    }

    /// The demand of a device's domains was looked at; changes come as events after this.
    pub fn looked(&mut self, device: usize, now: Micros) {
        self.note(now, || Call::Looked(device));
        self.devices[device].looked(now);
    }

    /// Accounts for the time until now. Every event and plan does.
    pub fn account_until(&mut self, device: usize, now: Micros) {
        self.note(now, || Call::Account(device));
        self.devices[device].account(now);
    }

    fn device_of(&self, id: DomainId) -> Option<usize> {
        let mut devices = self.devices.iter();
        devices.position(|device| device.domains.contains_key(&id))
    }

    /// Takes note of what happened.
    pub fn handle(&mut self, now: Micros, event: Event) {
        self.note(now, || Call::Handle(event.clone()));
        let id = match event {
            Event::Tenant(tenant, user, spec) => {
                self.tenants.insert(tenant, (user, spec));
                self.devices.iter_mut().for_each(|it| it.dirty = true);
                return;
            }
            Event::TenantGone(tenant) => {
                self.tenants.remove(&tenant);
                return;
            }
            Event::Came(new) => return self.came(now, &new),
            Event::LeftBehind(device, group, since) => {
                return self.devices[device].left_behind(now, group, since);
            }
            Event::Ended(command, outcome) => return self.ended(now, command, outcome),
            Event::Gone(id)
            | Event::Demand(id, _)
            | Event::AtWork(id, _)
            | Event::Arrival(id, _)
            | Event::Progress(id, _)
            | Event::SwappedOut(id, _)
            | Event::Found(id, _)
            | Event::Unreadable(id)
            | Event::Channels(id)
            | Event::Ran(id) => id,
        };
        let Some(at) = self.device_of(id) else {
            return;
        };
        let device = &mut self.devices[at];
        let Some(domain) = device.domains.get_mut(&id) else {
            return;
        };
        match event {
            Event::AtWork(_, at_work) => domain.at_work = at_work,
            Event::Arrival(_, at) => domain.rhythm.came(at),
            Event::Progress(_, progress) => {
                domain.stir(now);
                domain.note(now, progress);
                let keeps = self.mutation == Some(Mutation::TolerateForEver);
                if keeps && domain.state.tolerated.is_some() {
                    return;
                }
                let tenant = self.tenants.get(&domain.state.tenant);
                let slowdown = tenant.map_or(0.0, |(_, spec)| spec.slowdown());
                if slowdown <= 0.0 && domain.state.tolerated.is_none() {
                    return;
                }
                device.progress(now, id, progress, slowdown);
            }
            Event::Demand(_, demand) if domain.state.demand != demand => {
                if domain.gives_way() {
                    device.quiet = 0;
                }
                let domain = device.change(now, id);
                domain.into_iter().for_each(|it| it.set_demand(demand, now));
            }
            Event::SwappedOut(_, away) if domain.away != away => {
                let forgets = self.mutation == Some(Mutation::ForgetSwapped);
                if let Some(domain) = device.change(now, id).filter(|_| !forgets) {
                    domain.away = away;
                    let name = domain.planned_as();
                    device.park(name);
                }
            }
            Event::Found(_, found) if domain.state.timeslice != found && !domain.is_faulty() => {
                let ignores = self.mutation == Some(Mutation::IgnoreFound);
                let domain = device.change(now, id).filter(|_| !ignores);
                domain.into_iter().for_each(|it| it.state.timeslice = found);
            }
            Event::Unreadable(_) if !domain.is_faulty() => self.fail(now, at, id),
            Event::Channels(_) if domain.state.run == RunState::Frozen => {
                domain.course.may_run(now);
                device.has_channels(now, id);
            }
            Event::Ran(_) if domain.state.run == RunState::Frozen => {
                domain.course.may_run(now);
                self.hurry(at, id, Sets::Frozen);
            }
            Event::Gone(_) => {
                let dirty = device.dirty;
                let gone = device
                    .domains
                    .get(&id)
                    .map(|it| (it.group, it.state.tenant));
                device.remove(now, id);
                // What it had so far is counted with it.
                if let Some((Some(group), tenant)) = gone
                    && let Some((next, other)) = device
                        .domains
                        .iter_mut()
                        .find(|(_, it)| it.group == Some(group) && it.state.tenant == tenant)
                    && *next > id
                {
                    other.before = device.accounts.get(other.planned_as());
                }
                match self.mutation {
                    Some(Mutation::ControlTheGone) => device.dirty = dirty,
                    _ => self.urgent.retain(|it| it.id != id),
                }
            }
            _ => {}
        }
    }

    fn came(&mut self, now: Micros, new: &NewDomain) {
        let device = &mut self.devices[new.device];
        device.account(now);
        device.dirty = true;
        let before = device.accounts.get(new.group.unwrap_or(new.id));
        device.domains.insert(new.id, Domain::new(new, now, before));
        device.park(new.group.unwrap_or(new.id));
    }

    fn ended(&mut self, now: Micros, command: u64, outcome: Outcome) {
        // A late one: its domain has failed.
        let Some(command) = self.issued.take_if(|it| it.id == command) else {
            return;
        };
        let (at, control) = (command.device, command.control);
        let trusted = match outcome {
            Outcome::Failed if self.mutation == Some(Mutation::TrustFailures) => {
                Outcome::Done(Micros::ZERO)
            }
            outcome => outcome,
        };
        if let Outcome::Done(took) = outcome {
            self.devices[at].costs.record(control, took);
        }
        let id = control.domain();
        if let Some(domain) = self.devices[at].domains.get_mut(&id) {
            domain.under_way = false;
        }
        match (command.aim, trusted) {
            (Aim::GiveUp, Outcome::Done(_)) => {
                if let Control::SetTimeslice(id, timeslice) = control {
                    self.devices[at].left_with(now, id, timeslice);
                }
            }
            (Aim::GiveUp, Outcome::Failed) => {}
            (_, Outcome::Failed) => self.fail(now, at, id),
            (aim, Outcome::Done(_)) => {
                let device = &mut self.devices[at];
                device.obey(now, control);
                device.plan_from(now);
                let Some(domain) = device.domains.get_mut(&id) else {
                    return;
                };
                if matches!(control, Control::Freeze(_)) {
                    domain.course.froze(now);
                }
                if aim == Aim::Retry && !matches!(control, Control::SetTimeslice(..)) {
                    domain.fault = None;
                    device.dirty = true;
                }
            }
        }
    }

    /// A control of this domain failed.
    fn fail(&mut self, now: Micros, device: usize, id: DomainId) {
        self.urgent.retain(|it| it.id != id);
        let Some(domain) = self.devices[device].fail(now, id) else {
            return;
        };
        if self.mutation == Some(Mutation::NoBackoff)
            && let Some(fault) = &mut domain.fault
        {
            fault.until = now;
        }
        self.urge(device, id, Aim::GiveUp);
    }

    fn urge(&mut self, device: usize, id: DomainId, aim: Aim) {
        self.urgent
            .extend([Sets::Timeslice, Sets::Run].map(|sets| Urgent {
                device,
                id,
                sets,
                aim,
            }));
    }

    /// Takes domains that failed up again, where it is time.
    fn retry(&mut self, now: Micros) {
        for device in 0..self.devices.len() {
            while let Some(id) = self.devices[device].due_fault(now) {
                if self.mutation != Some(Mutation::NoRetry) {
                    self.urge(device, id, Aim::Retry);
                }
            }
            while let Some(id) = self.devices[device].due_refreeze(now) {
                self.hurry(device, id, Sets::Frozen);
            }
            let trusts = self.mutation == Some(Mutation::TrustThaws);
            while let Some(id) = self.devices[device].due_run(now) {
                if !trusts {
                    self.hurry(device, id, Sets::Running);
                }
            }
        }
    }

    /// Makes a domain once more what it is planned to be, before anything else.
    fn hurry(&mut self, device: usize, id: DomainId, sets: Sets) {
        self.urgent.push_back(Urgent {
            device,
            id,
            sets,
            aim: Aim::Plan,
        });
    }

    fn next_urgent(&mut self) -> Option<(usize, Control, Aim)> {
        while let Some(next) = self.urgent.pop_front() {
            let Urgent { device, id, .. } = next;
            let Some(domain) = self.devices[device].domains.get(&id) else {
                continue;
            };
            let control = match (next.sets, domain.swapped_out) {
                (Sets::Timeslice, _) => Control::SetTimeslice(id, domain.default),
                (Sets::Run, false) => Control::Thaw(id),
                (Sets::Run, true) if next.aim == Aim::Retry => Control::Freeze(id),
                (Sets::Frozen, _) if domain.state.run == RunState::Frozen => Control::Freeze(id),
                (Sets::Running, false) if domain.state.run == RunState::Enabled => {
                    Control::Thaw(id)
                }
                // Its memory is away, and it must not run; or its state is another by now.
                (Sets::Run | Sets::Frozen | Sets::Running, _) => continue,
            };
            return Some((device, control, next.aim));
        }
        None
    }

    /// The next control to issue, if there is one now; plans before, if need be. None while one is under way.
    pub fn poll(&mut self, now: Micros) -> Option<Command> {
        let command = self.decide(now);
        self.note(now, || Call::Poll(command));
        command
    }

    fn decide(&mut self, now: Micros) -> Option<Command> {
        if let Some(command) = self.issued {
            if now < command.deadline || self.mutation == Some(Mutation::NoDeadline) {
                return None;
            }
            self.issued = None;
            self.fail(now, command.device, command.control.domain());
        }
        self.retry(now);
        if let Some((at, control, aim)) = self.next_urgent() {
            return Some(self.issue(now, at, control, aim));
        }
        if self.devices.iter().any(|device| device.needs_plan(now)) {
            self.plan(now);
        }
        let most = match self.mutation {
            Some(Mutation::DeferForEver) => Micros::from_secs(3600),
            _ => Calm::MOST,
        };
        let mut devices = self.devices.iter_mut().enumerate();
        let next = devices.find_map(|(at, device)| Some((at, device.next_control(now, most)?)));
        next.map(|(at, control)| self.issue(now, at, control, Aim::Plan))
    }

    fn issue(&mut self, now: Micros, device: usize, control: Control, aim: Aim) -> Command {
        // It takes its domain off the device when it begins.
        if matches!(control, Control::Freeze(_)) {
            self.devices[device].obey(now, control);
        }
        if let Some(domain) = self.devices[device].domains.get_mut(&control.domain()) {
            domain.under_way = true;
            if matches!(control, Control::Thaw(_)) {
                domain.course.may_run(now);
            }
        }
        self.commands += 1;
        let command = Command {
            id: self.commands,
            device,
            control,
            deadline: now + DEADLINE,
            aim,
        };
        self.issued = Some(command);
        command
    }

    /// When to poll although nothing happens; a moment in the past: now.
    pub fn next_wakeup(&self) -> Option<Micros> {
        if let Some(command) = &self.issued {
            return Some(command.deadline);
        }
        if !self.urgent.is_empty() || self.devices.iter().any(Device::is_at_it) {
            return Some(Micros::ZERO);
        }
        self.devices.iter().filter_map(Device::due).min()
    }

    /// Whether a tenant has domains on several devices.
    fn has_gangs(&self) -> bool {
        let tenants = |device: &'_ Device| {
            let domains = device.domains.values();
            domains.map(|it| it.state.tenant).collect::<Vec<_>>()
        };
        (1..self.devices.len()).any(|at| {
            let here = tenants(&self.devices[at]);
            let mut before = self.devices[..at].iter().flat_map(|it| it.domains.values());
            before.any(|it| here.contains(&it.state.tenant))
        })
    }

    fn plan(&mut self, now: Micros) {
        let gangs = self.has_gangs();
        let reverse = self.mutation == Some(Mutation::ThawFirst);
        let mut devices: Vec<&mut Device> = (self.devices.iter_mut())
            .filter(|device| match gangs {
                true => !device.domains.is_empty() || device.dirty,
                false => device.needs_plan(now),
            })
            .collect();
        for device in &mut devices {
            device.refresh(now, &self.tenants, &self.weights);
        }
        let mut together: Vec<gang::Device<'_>> =
            devices.iter_mut().map(|it| it.as_planned()).collect();
        let plans = match self.mutation {
            Some(Mutation::NoGangs) => (together.iter_mut())
                .flat_map(|it| gang::plan(std::slice::from_mut(it)))
                .collect(),
            _ => gang::plan(&mut together),
        };
        self.plans += plans.len() as u64;
        for (device, plan) in devices.into_iter().zip(plans) {
            device.adopt(now, plan, reverse);
        }
    }
}
