//! A small machine: devices whose controls work, fail or never end, and processes that move their memory promptly or are stopped.
//!
//! It checks after every step what must always hold (see [`World::check`]), and how long it takes until what must come comes.

mod checks;
mod memory;
mod settling;

use std::{
    cell::Cell,
    collections::{BTreeMap, BTreeSet},
};

use gpumux_core::{
    Class, Control, Costs, Demand, DomainId, DomainState, Micros, Progress, RunState, Snapshot,
    TenantId, TenantSpec, TenantState, Timeslice, UserId,
    broker::{self, Activity, Ask, Broker, ProcessId, Terms},
    controller::{BACKOFF, Command, Controller, DEADLINE, Event, Mutation, NewDomain, Outcome},
    fractions,
    ledger::Kind,
    policy, space,
};

use memory::{Happens, Process};

thread_local! {
    /// The fault that controllers of this thread have.
    pub(crate) static MUTATION: Cell<Option<Mutation>> = const { Cell::new(None) };
}

pub(crate) const GIB: u64 = 1 << 30;
/// Of each device.
pub(crate) const CAPACITY: u64 = 80 * GIB;
/// Bytes per µs: 50 GB/s.
const LINK: u64 = 50_000;
/// How often timeslices are read back.
const CHECK: Micros = Micros::from_secs(1);
/// Shorter timeslices are about as short as a switch.
const SHORT: Timeslice = Timeslice(500);
/// How long something may take to be put right where controls work: some of them, deferred, one after the other.
const SOON: Micros = Micros::from_millis(100);

/// How long it may take until a group runs again that should, and was frozen behind the controller's back.
pub(crate) const STANDS: Micros = Micros::from_millis(2_050);

/// How long the control of one group may take that latency work defers.
const DEFERRED: Micros = Micros::from_millis(5);

/// How long a gang may run on one of its devices only: while the controls of a handover are issued.
const PART: Micros = Micros::from_millis(20);

/// How late things are noticed. As in the simulator, also while a control is under way.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Late {
    /// Each packet between the daemon and a process takes up to so long, and none overtakes another.
    pub(crate) packets: Micros,
    /// Pages are looked at so long after they have changed, or before a control.
    pub(crate) looks: Micros,
    /// A process's end is noticed after so long, and its tenant's after as long again.
    pub(crate) ends: Micros,
}

impl Late {
    /// In µs.
    pub(crate) const fn of(packets: u64, looks: u64, ends: u64) -> Self {
        let (packets, looks, ends) = (Micros(packets), Micros(looks), Micros(ends));
        Self {
            packets,
            looks,
            ends,
        }
    }
}

/// How a group's controls behave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Manner {
    Works,
    Fails,
    /// They never end.
    Hangs,
}

/// A channel group as the hardware has it.
#[derive(Clone, Debug)]
pub(crate) struct Group {
    pub(crate) device: usize,
    pub(crate) tenant: u64,
    process: ProcessId,
    /// The MPS group whose channel group this handle leads to, if it is one of several.
    pub(crate) shared: Option<DomainId>,
    pub(crate) frozen: bool,
    pub(crate) timeslice: Timeslice,
    pub(crate) manner: Manner,
    /// Since when its controls work.
    mended: Micros,
    /// When a control that was under way no longer hung.
    hung: Option<Micros>,
    /// When another program last set its timeslice.
    tampered: Micros,
    /// Since when it has waited with work, its memory there and its controls working.
    waits: Option<Micros>,
    /// What its program had done, and when its work had come, at the last look.
    seen: (Progress, Option<Micros>),
}

#[derive(Clone, Debug)]
struct Tenant {
    user: UserId,
    spec: TenantSpec,
    /// What its processes have groups on, and as members of which.
    devices: Vec<usize>,
    shared: Option<DomainId>,
    /// Since when it has work and its memory is away.
    away: Option<Micros>,
}

#[derive(Clone, Debug)]
enum Due {
    Ended(Command),
    /// A process's packet comes.
    Packet(ProcessId, broker::Event),
    Process(ProcessId, Happens),
    Look,
    /// The end of a process, or of a tenant, is noticed.
    Left(ProcessId),
    Forgotten(u64),
    /// A process without a session has another one.
    Returns(ProcessId),
}

/// What a world has seen.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Seen {
    pub(crate) commands: u64,
    pub(crate) failed: u64,
    pub(crate) late: u64,
    pub(crate) moves: u64,
    pub(crate) plans: u64,
}

pub(crate) struct World {
    pub(crate) now: Micros,
    /// Set before there are tenants.
    pub(crate) late: Late,
    pub(crate) controller: Controller,
    broker: Broker,
    pub(crate) groups: BTreeMap<DomainId, Group>,
    tenants: BTreeMap<u64, Tenant>,
    processes: BTreeMap<ProcessId, Process>,
    /// Processes without a session, with their groups.
    absent: BTreeMap<ProcessId, (Process, Vec<Group>)>,
    freezing: BTreeSet<TenantId>,
    /// Tenants that stay frozen.
    swapped_out: BTreeSet<TenantId>,
    queue: BTreeMap<(Micros, u64), Due>,
    sequence: u64,
    tickets: u32,
    /// Processes and groups so far: each has a name of its own.
    made: u64,
    checked: Micros,
    devices: usize,
    /// Until then a control of a group that is gone may hang.
    hung: Micros,
    /// Until then a group may be otherwise than any event says.
    unseen: Micros,
    /// Since when something has been as it must not be for long: what, and of which group, tenant or device.
    wrong: BTreeMap<(&'static str, u64), Micros>,
    pub(crate) seen: Seen,
    pub(crate) longest_wait: Micros,
}

fn uuid(device: usize) -> String {
    format!("GPU-{device}")
}

impl World {
    pub(crate) fn new(policy: &str, devices: usize) -> Self {
        let now = Micros::from_secs(1000);
        let mut controller = Controller::new(BTreeMap::new());
        if let Some(mutation) = MUTATION.get() {
            controller = controller.mutated(mutation);
        }
        let mut broker = Broker::new(u64::MAX);
        for device in 0..devices {
            let policy = policy::by_name(policy).expect("known");
            controller.add_device(policy.into(), Costs::default(), now);
            let event = broker::Event::Device {
                uuid: uuid(device),
                capacity: CAPACITY,
                used: 0,
            };
            assert_eq!(broker.handle(now, event), []);
        }
        Self {
            now,
            late: Late::default(),
            controller,
            broker,
            groups: BTreeMap::new(),
            tenants: BTreeMap::new(),
            processes: BTreeMap::new(),
            absent: BTreeMap::new(),
            freezing: BTreeSet::new(),
            swapped_out: BTreeSet::new(),
            queue: BTreeMap::new(),
            sequence: 0,
            tickets: 0,
            made: 0,
            checked: now,
            devices,
            hung: Micros::ZERO,
            unseen: Micros::ZERO,
            wrong: BTreeMap::new(),
            seen: Seen::default(),
            longest_wait: Micros::ZERO,
        }
    }

    /// A tenant whose process has a group on each of these devices.
    pub(crate) fn tenant(&mut self, id: u64, spec: TenantSpec, devices: &[usize]) {
        self.member(id, UserId::default(), spec, devices, None);
    }

    /// The same of this user, as a member of this MPS group.
    pub(crate) fn member(
        &mut self,
        id: u64,
        user: UserId,
        spec: TenantSpec,
        devices: &[usize],
        shared: Option<DomainId>,
    ) {
        self.declare(id, user, spec.clone());
        let known = Tenant {
            user,
            spec,
            devices: devices.to_vec(),
            shared,
            away: None,
        };
        self.tenants.insert(id, known);
        self.join(id);
    }

    fn name(&mut self) -> u64 {
        self.made += 1;
        self.made
    }

    /// A process of a tenant begins.
    pub(crate) fn join(&mut self, id: u64) {
        let process = ProcessId(self.name());
        let known = &self.tenants[&id];
        let (devices, shared) = (known.devices.clone(), known.shared);
        // The driver library of each process that joins sets the timeslice, of all.
        for other in self.groups.values_mut() {
            if shared.is_some() && other.shared == shared {
                (other.timeslice, other.tampered) = (Timeslice::DEFAULT, self.now);
            }
        }
        let groups = devices.into_iter().map(|device| Group {
            device,
            tenant: id,
            process,
            shared,
            frozen: false,
            timeslice: Timeslice::DEFAULT,
            manner: Manner::Works,
            mended: self.now,
            hung: None,
            tampered: Micros::ZERO,
            waits: None,
            seen: Default::default(),
        });
        let groups = groups.collect();
        self.connect(process, Process::new(id, self.now), groups);
    }

    /// A session of a process begins: it says what it has, and then which groups.
    fn connect(&mut self, name: ProcessId, process: Process, groups: Vec<Group>) {
        let (tenant, kept) = (TenantId(process.tenant), process.kept());
        let away = process.swapped() > 0;
        self.processes.insert(name, process);
        self.memory(broker::Event::Joined(name, tenant));
        self.memory(broker::Event::Confirms(name));
        self.introduce(name);
        if kept > 0 {
            self.memory(broker::Event::Keeps(name, kept));
        }
        for mut group in groups {
            let id = DomainId(self.name());
            // What it computes on is not there.
            group.frozen |= away;
            let new = NewDomain {
                device: group.device,
                id,
                tenant,
                group: group.shared,
                demand: Demand::Idle,
                timeslice: group.timeslice,
                default: Timeslice::DEFAULT,
                run: match group.frozen {
                    true => RunState::Frozen,
                    false => RunState::Enabled,
                },
            };
            group.process = name;
            self.groups.insert(id, group);
            self.controller.handle(self.now, Event::Came(new));
        }
        self.park();
        self.settle();
    }

    pub(crate) fn has(&self, id: u64) -> bool {
        self.tenants.contains_key(&id)
    }

    /// How many processes of a tenant are not known to have ended.
    pub(crate) fn processes(&self, id: u64) -> usize {
        let absent = self.absent.values().map(|(it, _)| it);
        let all = self.processes.values().chain(absent);
        all.filter(|it| it.tenant == id).count()
    }

    /// The last process of a tenant that lives: what happens to the tenant happens to this.
    fn process(&mut self, id: u64) -> Option<(ProcessId, &mut Process)> {
        let mut all = self.processes.iter_mut().rev();
        let (id, it) = all.find(|(_, it)| it.tenant == id && !it.ended)?;
        Some((*id, it))
    }

    pub(crate) fn set_busy(&mut self, id: u64, busy: bool) {
        if let Some((id, _)) = self.process(id) {
            self.works(id, busy);
        }
    }

    fn works(&mut self, id: ProcessId, busy: bool) {
        let now = self.now;
        let process = self.processes.get_mut(&id);
        if let Some(process) = process.filter(|it| !it.ended && it.busy != busy) {
            if busy && process.idle_since + Progress::GAP <= now {
                process.came = Some(now);
            }
            (process.busy, process.idle_since) = (busy, now);
            self.due(self.late.looks, Due::Look);
        }
    }

    /// Its program has waited for so many pieces of work, which took so long.
    pub(crate) fn waited(&mut self, id: u64, pieces: u64, time: Micros, waits: Micros) {
        if let Some((_, process)) = self.process(id) {
            process.progress.waits += 1;
            process.progress.pieces += pieces;
            process.progress.busy += time;
            self.submitted(id, pieces, waits);
        }
    }

    /// Its program has submitted so many pieces of work, waited for so long, and not for all of them.
    pub(crate) fn submitted(&mut self, id: u64, pieces: u64, waits: Micros) {
        if let Some((_, process)) = self.process(id) {
            process.progress.submitted += pieces;
            process.progress.waited_us += waits.0 as u32;
            self.due(self.late.looks, Due::Look);
        }
    }

    /// Pages are looked at.
    fn look(&mut self) {
        for (id, group) in &mut self.groups {
            let process = &self.processes[&group.process];
            let (progress, came) = (process.progress, process.came);
            let before = std::mem::replace(&mut group.seen, (progress, came));
            let arrival = came.filter(|_| came != before.1);
            let progress = Some(progress).filter(|it| *it != before.0);
            let demand = if process.busy {
                Demand::Busy
            } else {
                Demand::Idle
            };
            let at_work = process.busy && !group.frozen;
            let news = arrival.map(|at| Event::Arrival(*id, at)).into_iter();
            let news = news.chain(progress.map(|it| Event::Progress(*id, it)));
            for event in news.chain([Event::Demand(*id, demand), Event::AtWork(*id, at_work)]) {
                self.controller.handle(self.now, event);
            }
        }
    }

    /// The groups of a tenant.
    fn groups_of(&self, id: u64) -> impl Iterator<Item = (&DomainId, &Group)> {
        self.groups.iter().filter(move |(_, it)| it.tenant == id)
    }

    /// A tenant's group on its first device.
    pub(crate) fn group(&self, id: u64) -> DomainId {
        *self.groups_of(id).next().expect("it has one").0
    }

    /// The timeslice of that group.
    pub(crate) fn timeslice(&self, id: u64) -> u64 {
        self.groups[&self.group(id)].timeslice.0
    }

    pub(crate) fn set_manner(&mut self, id: u64, manner: Manner) {
        let now = self.now;
        for group in self.groups.values_mut().filter(|it| it.tenant == id) {
            if group.manner == Manner::Hangs {
                group.hung = Some(now);
            }
            (group.manner, group.mended) = (manner, now);
        }
    }

    pub(crate) fn stop(&mut self, id: u64) {
        if let Some((_, process)) = self.process(id) {
            process.stopped = true;
        }
    }

    /// A process goes on, if it was stopped: what came meanwhile happens to it.
    fn go_on(&mut self, id: ProcessId) {
        if let Some(process) = self.processes.get_mut(&id) {
            process.stopped = false;
            let waiting = std::mem::take(&mut process.mailbox);
            waiting.into_iter().for_each(|it| self.happens(id, it));
        }
    }

    /// A tenant's spec becomes this one.
    pub(crate) fn set(&mut self, id: u64, change: impl FnOnce(&mut TenantSpec)) {
        let Some(tenant) = self.tenants.get_mut(&id) else {
            return;
        };
        change(&mut tenant.spec);
        let (user, spec) = (tenant.user, tenant.spec.clone());
        self.declare(id, user, spec);
        self.settle();
    }

    fn declare(&mut self, id: u64, user: UserId, spec: TenantSpec) {
        let terms = Terms {
            class: spec.class,
            share: spec.memory(),
            policy: spec.memory_policy,
            sleep_after: None,
        };
        let event = Event::Tenant(TenantId(id), user, spec);
        self.controller.handle(self.now, event);
        self.memory(broker::Event::Tenant(TenantId(id), terms));
    }

    /// Another program sets the timeslice of a tenant's groups.
    pub(crate) fn tamper(&mut self, id: u64, timeslice: Timeslice) {
        let now = self.now;
        let own = self.groups.values().filter(|it| it.tenant == id);
        let shared: Vec<_> = own.filter_map(|it| it.shared).collect();
        let meant =
            |it: &Group| it.tenant == id || it.shared.is_some_and(|it| shared.contains(&it));
        for group in self.groups.values_mut().filter(|it| meant(it)) {
            (group.timeslice, group.tampered) = (timeslice, now);
        }
    }

    /// Something freezes a tenant's groups, and no event says so.
    pub(crate) fn freeze_unseen(&mut self, id: u64) {
        self.unseen = self.now + STANDS;
        let groups = self.groups.values_mut().filter(|it| it.tenant == id);
        groups.for_each(|it| it.frozen = true);
    }

    /// A tenant says that its groups have new channels, which run whatever the others may.
    pub(crate) fn says_channels(&mut self, id: u64) {
        let groups = self.groups.iter().filter(|(_, it)| it.tenant == id);
        for (group, _) in groups {
            self.controller.handle(self.now, Event::Channels(*group));
        }
        self.settle();
    }

    /// A tenant's process ends. The daemon keeps its files, and so its groups, until it notices.
    pub(crate) fn kill(&mut self, id: u64) {
        if let Some((process, it)) = self.process(id) {
            it.ended = true;
            self.due(self.late.ends, Due::Left(process));
        }
    }

    /// A process has no session any more, and its groups have no names: what it sent before, and was not read, is read no more.
    fn part(&mut self, name: ProcessId) -> (Process, Vec<(Group, bool)>) {
        (self.queue).retain(
            |_, due| !matches!(due, Due::Packet(of, _) | Due::Process(of, _) if *of == name),
        );
        let process = self.processes.remove(&name).expect("it was there");
        let mut groups = Vec::new();
        for (id, group) in self.groups.extract_if(.., |_, it| it.process == name) {
            if group.manner == Manner::Hangs || group.hung.is_some() {
                self.hung = self.now + DEADLINE + SOON;
            }
            let away = self.controller.domain(id).is_some_and(|it| it.swapped_out);
            groups.push((group, away));
            self.controller.handle(self.now, Event::Gone(id));
        }
        (process, groups)
    }

    /// The end of a process is noticed.
    fn leave(&mut self, process: ProcessId) {
        let (it, _) = self.part(process);
        self.memory(broker::Event::Left(process));
        self.due(self.late.ends, Due::Forgotten(it.tenant));
    }

    /// The connection of a tenant's process ends, and the process lives. Its groups are given back as they were made, but one whose memory
    /// is away stays frozen.
    pub(crate) fn lose(&mut self, id: u64) {
        let Some((name, _)) = self.process(id).filter(|it| !it.1.stopped) else {
            return;
        };
        let (process, groups) = self.part(name);
        let groups = groups.into_iter().map(|(group, away)| Group {
            frozen: group.frozen && away,
            timeslice: Timeslice::DEFAULT,
            waits: None,
            seen: Default::default(),
            ..group
        });
        let parted = process.parted(self.now);
        self.absent.insert(name, (parted, groups.collect()));
        self.memory(broker::Event::Lost(name));
        self.due(self.late.ends, Due::Returns(name));
    }

    /// Its next session begins, which has another name.
    fn return_from(&mut self, before: ProcessId) {
        let (process, groups) = self.absent.remove(&before).expect("it is absent");
        let name = ProcessId(self.name());
        self.connect(name, process, groups);
    }

    /// A tenant ends with its last process.
    fn forget(&mut self, id: u64) {
        if self.processes(id) == 0 && self.has(id) {
            let tenant = TenantId(id);
            self.tenants.remove(&id);
            self.controller.handle(self.now, Event::TenantGone(tenant));
            self.memory(broker::Event::TenantGone(tenant));
            self.freezing.remove(&tenant);
            self.swapped_out.remove(&tenant);
        }
    }

    fn due(&mut self, delay: Micros, due: Due) {
        self.sequence += 1;
        self.queue.insert((self.now + delay, self.sequence), due);
    }

    pub(crate) fn run_for(&mut self, time: Micros) {
        let end = self.now + time;
        for steps in 0.. {
            assert!(steps < 2_000_000, "time stands still at {}", self.now);
            let queued = self.queue.first_key_value().map(|((at, _), _)| *at);
            let wakeups = [self.controller.next_wakeup(), self.broker.next_wakeup()];
            let wakeups = wakeups.into_iter().flatten().chain(queued);
            let at = wakeups.chain([self.checked + CHECK]).min();
            let Some(at) = at.filter(|at| *at <= end) else {
                break;
            };
            self.pass(at.max(self.now));
            if self.checked + CHECK <= self.now {
                self.check_timeslices();
            }
            let due = self.queue.first_entry().filter(|it| it.key().0 <= self.now);
            match due.map(|it| it.remove()) {
                Some(Due::Ended(command)) => self.end(command),
                Some(Due::Packet(_, event)) => self.memory(event),
                Some(Due::Process(process, what)) => self.happens(process, what),
                Some(Due::Look) => self.look(),
                Some(Due::Left(id)) => self.leave(id),
                Some(Due::Forgotten(id)) => self.forget(id),
                Some(Due::Returns(process)) => self.return_from(process),
                None if self.broker.next_wakeup().is_some_and(|at| at <= self.now) => {
                    self.memory(broker::Event::Tick);
                }
                None => {}
            }
            self.settle();
        }
        self.pass(end);
        self.check();
    }

    fn pass(&mut self, to: Micros) {
        self.now = to;
    }

    /// A control has ended.
    fn end(&mut self, command: Command) {
        let Some(group) = self.groups.get_mut(&command.control.domain()) else {
            let gone = Event::Ended(command.id, Outcome::Failed);
            return self.controller.handle(self.now, gone);
        };
        let shared = group.shared;
        let was_short = !group.frozen && group.timeslice < SHORT;
        let outcome = match group.manner {
            Manner::Works => {
                match command.control {
                    Control::Freeze(_) => group.frozen = true,
                    Control::Thaw(_) => group.frozen = false,
                    Control::SetTimeslice(_, timeslice) => {
                        group.timeslice = timeslice;
                        let others = self.groups.values_mut();
                        let members = others.filter(|it| shared.is_some() && it.shared == shared);
                        members.for_each(|it| it.timeslice = timeslice);
                    }
                }
                Outcome::Done(Costs::default().of(command.control))
            }
            Manner::Fails | Manner::Hangs => {
                self.seen.failed += 1;
                Outcome::Failed
            }
        };
        let group = &self.groups[&command.control.domain()];
        let (device, issued) = (group.device, command.deadline.saturating_sub(DEADLINE));
        let short = !group.frozen && group.timeslice < SHORT;
        let others = self.processes.values().all(|it| it.idle_since < issued);
        let event = Event::Ended(command.id, outcome);
        self.controller.handle(self.now, event);
        // Two that were enabled without work may begin at once; but no control lets them meet.
        let meet = short && !was_short && others && self.livelocked(device) > 1;
        assert!(!meet, "{command:?}: {:?}", self.groups);
    }
}

/// A spec of this class with this guarantee of compute.
pub(crate) fn spec(class: Class, guaranteed: f64) -> TenantSpec {
    TenantSpec {
        class,
        guaranteed,
        ..TenantSpec::default()
    }
}

/// The same with this guarantee of memory.
pub(crate) fn with_memory(spec: TenantSpec, bytes: u64) -> TenantSpec {
    TenantSpec {
        memory_guaranteed: bytes,
        ..spec
    }
}
