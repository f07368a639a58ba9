//! All devices, and the step that brings them from what is to what shall be.

use std::{
    collections::{BTreeMap, BTreeSet},
    os::fd::OwnedFd,
    sync::Arc,
};

use gpumux_core::{
    Class, Costs, Demand, DomainId, Hints, Micros, Policy, Snapshot, TenantId, TenantSpec,
    TenantState, Timeslice, UserId,
    broker::{Event, Line, ProcessId, Standing},
    controller::{self, Controller, NewDomain},
    policy::{self, Bound},
};
use gpumux_rm::{Controls, layout::engine::GR0};
use gpumux_wire::{
    Daemon,
    page::{Page, SLOTS},
};
use tokio::sync::mpsc::UnboundedSender;

use super::{
    Clock, Crash, Reaper, SessionId,
    admission::Owner,
    alarm::Alarm,
    device::Device,
    domain::{self, Domain, Member, NewGroup},
    expiry::Expiry,
    foreign::Foreigners,
    memory::MemoryMoves,
    record::{Counted, Durations, History, Now, Totals, What},
    renewal::{Renewal, Renewing},
    tamper::Tampers,
};
use crate::{
    api::types, config::Config, devices::Known, groups::Failure, hold::STAY, tenants::Numbers,
};

/// How long after a process left a group a fault there may be of its making: this much longer than its memory is held.
const AFTERMATH: Micros = Micros::from_secs(1);
/// How long a process may wait for a device that it has lost: NVIDIA's driver does so without end where a server is gone (580.159.04).
const STUCK: Micros = Micros::from_secs(2);
const LATELY: Micros = Micros(STAY.as_micros() as u64 + AFTERMATH.0);
/// Processes that ended in groups that are remembered.
const MAX_ENDED: usize = 256;

/// Whom memory is held of.
pub(crate) enum Left {
    /// A process with a session.
    Session(SessionId),
    /// One without, in the group of this name.
    Group(Arc<str>),
}

/// A process in a group that has ended.
struct Ended {
    at: Micros,
    /// Until then a fault of the group may be of its making.
    matters_until: Micros,
    crash: Crash,
}

/// The state of the scheduling thread.
pub(crate) struct Engine {
    pub(super) config: Arc<Config>,
    clock: Clock,
    renewal: Arc<Renewal>,
    reaper: Reaper,
    pub(super) tenants: BTreeMap<TenantId, TenantSpec>,
    /// Whose tenants are; root's if unknown.
    pub(super) users: BTreeMap<TenantId, UserId>,
    pub(super) owners: BTreeMap<TenantId, Owner>,
    /// Weights of users that are not 1.
    pub(super) weights: BTreeMap<UserId, f64>,
    pub(super) expiry: Expiry,
    /// Processes that are not controlled, by device.
    pub(super) foreign: BTreeMap<String, Foreigners>,
    /// The numbers of the devices that NVML has reported.
    pub(crate) numbers: Numbers,
    pub(super) moves: MemoryMoves,
    pub(super) tampers: Tampers,
    /// Driver calls of a tenant's processes that their library does not know.
    unlisted: BTreeMap<TenantId, BTreeSet<String>>,
    pub(super) controller: Controller,
    pub(super) devices: BTreeMap<String, Device>,
    copies: Vec<CopyGroup>,
    pub(super) sessions: BTreeMap<SessionId, Met>,
    alarm: Alarm,
    /// Tenants that may use some devices only, and these.
    pub(super) confined: BTreeMap<TenantId, BTreeSet<String>>,
    /// Tenants that were placed in a group, and its name.
    pub(super) placed: BTreeMap<TenantId, Arc<str>>,
    /// Processes in groups that ended lately: others of their groups may fail by it.
    ended_in_groups: Vec<Ended>,
    /// Receives notices of crashes in groups.
    crashes: Option<UnboundedSender<Failure>>,
    /// What processes that are gone counted, of tenants that live.
    ended: BTreeMap<TenantId, Counted>,
    domains_made: u64,
    /// What a step cost lately, controls apart.
    cost: Micros,
    /// What it cost lately to wake up for a step.
    waking: Micros,
    stats: types::Scheduler,
    steps: Durations,
    stopped: bool,
}

/// A group of a copy engine.
struct CopyGroup {
    tenant: TenantId,
    member: Member,
    device: String,
    controls: Box<dyn Controls>,
    timeslice: Timeslice,
    default: Timeslice,
}

/// A process that is connected.
pub(crate) struct Met {
    pub(super) tenant: TenantId,
    pub(super) page: Arc<Page>,
    /// How often the lease had expired for the process when its session began: at any other number it is over.
    pub(super) epoch: u64,
    /// What the page had counted when the process came: one that comes again brings it along.
    before: Counted,
    /// Tells it something, without waiting. Whether that was possible.
    speak: Box<dyn Fn(&Daemon) -> bool + Send>,
    /// What it knows of [`Daemon::Hints`].
    told: (u64, bool),
    pub(super) pid: u32,
    /// Whether the last compute group that it announced was one of its tenant's group.
    shared: Option<bool>,
    /// Its groups were let go, since its lease had expired.
    left: bool,
    /// Its group has failed, and what becomes of it is reported no more.
    given_up: bool,
    /// Since when it has waited for the device nevertheless.
    waits_since: Option<Micros>,
    /// When it last freed a part of a group in which it had work: what a process does that exits.
    freed: Option<Micros>,
}

impl Met {
    /// The process's pid.
    pub(crate) fn with_pid(self, pid: u32) -> Self {
        Self { pid, ..self }
    }

    pub(crate) fn new(
        tenant: TenantId,
        page: Arc<Page>,
        speak: Box<dyn Fn(&Daemon) -> bool + Send>,
    ) -> Self {
        Self {
            tenant,
            epoch: page.expired(),
            before: Counted::of(&page),
            page,
            speak,
            told: (0, false),
            pid: 0,
            shared: None,
            left: false,
            given_up: false,
            waits_since: None,
            freed: None,
        }
    }

    /// Tells the process something, without waiting. Whether that was possible.
    pub(super) fn say(&self, message: &Daemon) -> bool {
        (self.speak)(message)
    }

    fn counted(&self) -> Counted {
        Counted::of(&self.page).since(&self.before)
    }

    /// Whether the process has freed its groups, since its lease had expired.
    fn has_expired(&self) -> bool {
        self.page.expired() != self.epoch
    }
}

/// What the scheduling thread knows, for people.
#[derive(Debug)]
pub(crate) struct View {
    pub(crate) domains: Vec<(TenantId, types::Domain)>,
    /// How long each domain had work itself, whatever the others of its group had, in µs.
    pub(crate) busy_us: BTreeMap<u64, u64>,
    /// What each tenant had on each device so far, its ended domains too.
    pub(crate) totals: BTreeMap<(TenantId, String), Totals>,
    /// Without what only NVML knows.
    pub(crate) devices: Vec<types::Device>,
    pub(crate) scheduler: types::Scheduler,
    /// What each tenant's processes counted so far, those that are gone too.
    pub(crate) counted: BTreeMap<TenantId, Counted>,
    pub(crate) memory: Vec<Line>,
    /// Tenants whose memory is on its way or away.
    pub(crate) swapped_out: BTreeSet<TenantId>,
    pub(crate) standings: BTreeMap<TenantId, Standing>,
    /// Bytes of host memory that moved memory takes, and may take.
    pub(crate) on_host: (u64, u64),
    pub(crate) moves: BTreeMap<TenantId, types::MoveFigures>,
    /// Driver calls of a tenant's processes that their library does not know.
    pub(crate) unlisted: BTreeMap<TenantId, BTreeSet<String>>,
    /// Tenants whose guarantees have lapsed.
    pub(crate) lapsed: BTreeSet<TenantId>,
    /// Tenants whose processes undo controls.
    pub(crate) tampering: BTreeMap<TenantId, types::Tampering>,
}

/// A group that cannot be managed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum GroupError {
    #[error("its tenant has ended")]
    NoTenant,
    #[error("process {0} has announced the same channel group")]
    Claimed(u32),
    #[error("its lease has expired: the process must begin a new session")]
    Expired,
    #[error("its tenant may not use device {0}: run it on {1}")]
    Elsewhere(String, String),
}

impl Engine {
    pub(crate) fn new(
        config: Arc<Config>,
        clock: Clock,
        reaper: Reaper,
        renewal: Arc<Renewal>,
    ) -> Self {
        let moves = MemoryMoves::new(&config.host_memory);
        Self {
            config,
            clock,
            renewal,
            reaper,
            tenants: BTreeMap::new(),
            users: BTreeMap::new(),
            owners: BTreeMap::new(),
            weights: BTreeMap::new(),
            expiry: Expiry::default(),
            foreign: BTreeMap::new(),
            numbers: Numbers::new(),
            moves,
            tampers: Tampers::default(),
            unlisted: BTreeMap::new(),
            controller: Controller::new(BTreeMap::new()),
            devices: BTreeMap::new(),
            copies: Vec::new(),
            sessions: BTreeMap::new(),
            confined: BTreeMap::new(),
            placed: BTreeMap::new(),
            ended_in_groups: Vec::new(),
            crashes: None,
            alarm: Alarm::default(),
            ended: BTreeMap::new(),
            domains_made: 0,
            cost: Micros::ZERO,
            waking: Micros::ZERO,
            stats: types::Scheduler::default(),
            steps: Durations::default(),
            stopped: false,
        }
    }

    pub(crate) fn now(&self) -> Micros {
        (self.clock)()
    }

    /// Renews the lease of all sessions.
    pub(super) fn renew(&self) {
        if let Some(stalled) = self.renewal.renew()
            && self.has_sessions()
        {
            tracing::warn!(
                ms = stalled.0 / 1000,
                "the scheduling thread stood still: the processes may have freed themselves"
            );
        }
    }

    /// Devices that exist although no tenant has shown them yet.
    pub(crate) fn know_devices(&mut self, devices: impl IntoIterator<Item = Known>) {
        for known in devices {
            self.memory_event(Event::Device {
                uuid: known.uuid.clone(),
                capacity: known.memory_bytes,
                used: known.memory_used,
            });
            self.numbers.insert(known.uuid.clone(), known.gpu);
            self.see_processes(&known.uuid, known.processes, known.used_by.as_ref());
            let uuid = known.uuid.clone();
            self.device(known.uuid).used_by = known.used_by;
            self.watch_frozen(&uuid);
        }
        self.expire_guarantees();
    }

    fn device(&mut self, uuid: String) -> &mut Device {
        let now = self.now();
        let name = self.config.policy_of(&uuid);
        let controller = &mut self.controller;
        self.devices.entry(uuid).or_insert_with(|| {
            let policy = policy::by_name(name).unwrap_or_else(|| {
                // The configuration was checked.
                unreachable!("policy {name}")
            });
            let index = controller.add_device(policy.into(), Costs::default(), now);
            Device::new(index, now)
        })
    }

    /// The tenant's processes share the group of this name, as far as they use its MPS server.
    pub(crate) fn place(&mut self, tenant: TenantId, group: Arc<str>) {
        self.placed.insert(tenant, group);
    }

    /// Notices errors of programs by a thread of its own from now on.
    ///
    /// # Errors
    /// When no thread can be made.
    pub(crate) fn start_alarm(&self) -> std::io::Result<()> {
        self.alarm.start()
    }

    /// Crashes in groups are reported here from now on.
    pub(crate) fn tell_crashes(&mut self, to: UnboundedSender<Failure>) {
        self.crashes = Some(to);
    }

    fn pass_crashes_on(&mut self) {
        let Some(to) = self.crashes.clone() else {
            return;
        };
        for crash in self.crashed(|_, met| Crash::ends_others(met.page.fault())) {
            let _ = to.send(Failure::Process(crash));
        }
    }

    /// Whether some process still waits for the device although its group has failed, and knows nothing of that.
    pub(crate) fn has_unaware(&self, group: &str) -> bool {
        let mut members = self.sessions.iter().filter(|(_, met)| {
            let placed = self.placed.get(&met.tenant);
            placed.is_some_and(|name| **name == *group)
        });
        members.any(|(id, met)| !met.page.has_received_fault() && self.waits_in_vain(*id))
    }

    /// Whether it waits for work in a group that has failed.
    fn waits_in_vain(&self, session: SessionId) -> bool {
        let mut domains = (self.devices.values()).flat_map(|device| device.domains.values());
        domains.any(|domain| domain.member.session == session && domain.waits_in_vain())
    }

    /// Tells of processes that have waited too long for a device that they lost with their group.
    fn pass_stuck_on(&mut self, now: Micros) {
        let Some(to) = self.crashes.clone() else {
            return;
        };
        let lost = self.sessions.iter().filter(|(_, met)| met.given_up);
        for id in lost.map(|(id, _)| *id).collect::<Vec<_>>() {
            let waits = self.waits_in_vain(id);
            let Some(met) = self.sessions.get_mut(&id) else {
                continue;
            };
            let waits = waits && !met.page.has_received_fault();
            let since = waits.then(|| met.waits_since.unwrap_or(now));
            met.waits_since = since;
            if since.is_some_and(|since| now.saturating_sub(since) >= STUCK) {
                met.waits_since = Some(now);
                let _ = to.send(Failure::Stuck {
                    tenant: met.tenant,
                    pid: met.pid,
                });
            }
        }
    }

    /// All processes in a group that has failed, and those that had left it just before. What happens to them is reported no more.
    pub(crate) fn give_up(&mut self, group: &str) -> Vec<Crash> {
        let placed = self.placed.clone();
        let mut all =
            self.crashed(|_, met| placed.get(&met.tenant).is_some_and(|it| **it == *group));
        let now = self.now();
        let held = self.devices.values().any(|device| device.holds(group));
        let left = self
            .ended_in_groups
            .extract_if(.., |it| *it.crash.group == *group);
        let left = left.filter(|it| held || now < it.matters_until);
        all.extend(left.map(|it| Crash {
            ended_ms: Some(now.saturating_sub(it.at).0 / 1000),
            ..it.crash
        }));
        all
    }

    /// Remembers a process in a group that ends before its group has failed.
    fn remember(&mut self, session: SessionId) {
        let tenant = self.sessions.get(&session).map(|met| met.tenant);
        if !tenant.is_some_and(|it| self.placed.contains_key(&it)) {
            return;
        }
        let now = self.now();
        // The work that it had at its end.
        for device in self.devices.values_mut() {
            device.sample(now, &mut self.controller);
        }
        let left = self.crashed(|id, _| id == session);
        self.ended_in_groups
            .extend(left.into_iter().map(|crash| Ended {
                at: now,
                matters_until: now + LATELY,
                crash,
            }));
        let surplus = self.ended_in_groups.len().saturating_sub(MAX_ENDED);
        self.ended_in_groups.drain(..surplus);
    }

    /// Processes in groups that are `so`, each once. They want the device no more.
    fn crashed(&mut self, so: impl Fn(SessionId, &Met) -> bool) -> Vec<Crash> {
        let now = self.now();
        let (mut found, mut lost) = (Vec::new(), BTreeSet::new());
        for (id, met) in self
            .sessions
            .iter_mut()
            .filter(|(id, met)| !met.given_up && so(**id, met))
        {
            let Some(group) = self.placed.get(&met.tenant) else {
                continue;
            };
            let domains = self
                .devices
                .values()
                .flat_map(|device| device.domains.values());
            let mut own = domains
                .filter(|domain| domain.member.session == *id)
                .peekable();
            // One with a context of its own does not use the group's server, also when that context is gone. Of one that
            // never had any nothing is known.
            let lately = |at: Micros| now.saturating_sub(at) < LATELY;
            let mut shares = own.peek().is_none() && met.shared.unwrap_or(true);
            let mut busy = met.freed.is_some_and(lately);
            for domain in own {
                shares |= domain.group.is_some();
                let known = self.controller.domain(domain.who.id);
                busy |= known.is_some_and(|it| it.state.demand == Demand::Busy);
            }
            if shares {
                met.given_up = true;
                found.push(Crash {
                    group: Arc::clone(group),
                    tenant: met.tenant,
                    pid: met.pid,
                    error: met.page.fault(),
                    busy,
                    age_ms: (self.alarm.noticed_after_ms(*id)).or_else(|| met.page.fault_age_ms()),
                    ended_ms: None,
                });
                lost.insert(*id);
            }
        }
        let domains = (self.devices.values_mut()).flat_map(|device| device.domains.values_mut());
        domains
            .filter(|domain| lost.contains(&domain.member.session))
            .for_each(Domain::lose_context);
        found
    }

    /// The tenant has ended.
    pub(crate) fn forget(&mut self, tenant: TenantId) {
        self.tenants.remove(&tenant);
        let gone = controller::Event::TenantGone(tenant);
        self.controller.handle(self.now(), gone);
        self.confined.remove(&tenant);
        self.users.remove(&tenant);
        self.owners.remove(&tenant);
        self.expiry.forget(tenant);
        self.tampers.pardon(tenant);
        self.placed.remove(&tenant);
        self.memory_event(Event::TenantGone(tenant));
        self.moves.forget(tenant);
        self.unlisted.remove(&tenant);
        self.ended.remove(&tenant);
        for device in self.devices.values_mut() {
            device.ended.remove(&tenant);
        }
    }

    /// Manages a group from now on.
    ///
    /// # Errors
    /// When its tenant is gone or may not use the device, or another process manages the same group.
    pub(crate) fn add(&mut self, mut group: NewGroup) -> Result<(), GroupError> {
        if !self.tenants.contains_key(&group.tenant) {
            return Err(GroupError::NoTenant);
        }
        if (self.sessions.get(&group.member.session)).is_some_and(Met::has_expired) {
            return Err(GroupError::Expired);
        }
        if let Some(devices) = self.confined.get(&group.tenant)
            && !devices.contains(&group.device)
        {
            let own: Vec<&str> = devices.iter().map(String::as_str).collect();
            return Err(GroupError::Elsewhere(group.device, own.join(", ")));
        }
        let same = |member: &Member| member.handles == group.member.handles;
        let domains = self
            .devices
            .get(&group.device)
            .into_iter()
            .flat_map(|d| d.domains.values());
        let copies = self
            .copies
            .iter()
            .filter(|copy| copy.device == group.device);
        let mut members = domains.map(|d| &d.member).chain(copies.map(|c| &c.member));
        if let Some(old) = members.find(|member| same(member)).cloned() {
            // A process that lost its session may be back before that was noticed.
            if old.pid != group.member.pid || old.pid == 0 {
                return Err(GroupError::Claimed(old.pid));
            }
            self.gone(old.session, old.key);
        }
        group.controls = Box::new(Renewing {
            controls: group.controls,
            renewal: Arc::clone(&self.renewal),
        });
        if group.engine != GR0 {
            self.copies.push(CopyGroup {
                tenant: group.tenant,
                member: group.member,
                device: group.device,
                controls: group.controls,
                timeslice: group.timeslice,
                default: group.default,
            });
            self.set_copy_slices();
            return Ok(());
        }
        self.device(group.device.clone());
        let shared = self.placed.get(&group.tenant).filter(|_| group.shared);
        let shared = shared.cloned();
        // A group that is made now has a number of its own.
        self.domains_made += 2;
        let id = DomainId(self.domains_made);
        let now = self.now();
        let session = group.member.session;
        if let Some(met) = self.sessions.get_mut(&session) {
            met.shared = Some(shared.is_some());
        }
        let Some(device) = self.devices.get_mut(&group.device) else {
            return Err(GroupError::NoTenant);
        };
        device.emulated |= group.emulated;
        let (tenant, name) = (group.tenant, group.device.clone());
        let (timeslice, default) = (group.timeslice, group.default);
        let mut domain = Domain::new(id, group, now);
        if let Some(met) = self.sessions.get(&session) {
            domain.epoch = met.epoch;
        }
        domain.group = shared.map(|name| device.group(name, DomainId(id.0 - 1)));
        let new = NewDomain {
            device: device.index,
            id,
            tenant,
            group: domain.group,
            demand: domain.demand(),
            timeslice,
            default,
        };
        self.controller.handle(now, controller::Event::Came(new));
        let came = Now {
            frozen: false,
            timeslice_us: timeslice.0,
            demand: domain.demand(),
            reason: domain.reason,
        };
        device.record.push(now, &domain.who, What::Came(came));
        device.domains.insert(id, domain);
        self.warn_of_guarantees(tenant, &name);
        self.count_contexts(session);
        self.park_domains();
        Ok(())
    }

    /// The channels of a group are now these.
    pub(crate) fn set_channels(&mut self, session: SessionId, key: u32, channels: Vec<u32>) {
        let is = |member: &Member| member.session == session && member.key == key;
        if let Some(copy) = self.copies.iter_mut().find(|copy| is(&copy.member)) {
            copy.controls.set_channels(channels);
        } else if let Some((device, id)) = self.find(session, key) {
            let now = self.now();
            if let Some(device) = self.devices.get_mut(&device) {
                device.set_channels(now, id, channels, &mut self.controller);
            }
        }
    }

    /// A process of this tenant has called a function of the driver that its library does not know.
    pub(crate) fn called_unlisted(&mut self, tenant: TenantId, name: String) {
        /// Most names that are kept of one tenant.
        const MOST: usize = 8;
        let known = self.unlisted.entry(tenant).or_default();
        if known.len() < MOST {
            known.insert(name);
        }
    }

    /// The process itself set the slice of a group.
    pub(crate) fn touched(&mut self, session: SessionId, key: u32) {
        if let Some((device, id)) = self.find(session, key)
            && let Some(device) = self.devices.get_mut(&device)
        {
            device.check(id, &mut self.controller, &self.clock);
        }
        self.judge();
    }

    fn find(&self, session: SessionId, key: u32) -> Option<(String, DomainId)> {
        self.devices.iter().find_map(|(uuid, device)| {
            let is =
                |domain: &&Domain| domain.member.session == session && domain.member.key == key;
            Some((uuid.clone(), device.domains.values().find(is)?.who.id))
        })
    }

    /// The process freed a group.
    pub(crate) fn gone(&mut self, session: SessionId, key: u32) {
        let now = self.now();
        let mut domains = self.devices.values().flat_map(|it| it.domains.values());
        let at_work = domains.any(|it| {
            let member = (it.member.session, it.member.key);
            member == (session, key) && it.group.is_some() && it.demand() == Demand::Busy
        });
        if let Some(met) = self.sessions.get_mut(&session).filter(|_| at_work) {
            met.freed = Some(now);
        }
        self.remove(session, Some(key), false);
    }

    /// A session has ended. Its files are closed; if its process lives on, its groups are given
    /// back as they were made.
    pub(crate) fn leave(&mut self, session: SessionId, alive: bool) {
        // The last words of a process that crashed, and whether it had freed itself.
        self.pass_crashes_on();
        self.leave_expired();
        self.remember(session);
        self.alarm.forget(session);
        if let Some(met) = self.sessions.remove(&session)
            && self.tenants.contains_key(&met.tenant)
        {
            let ended = self.ended.entry(met.tenant).or_default();
            *ended = met.counted().plus(ended);
        }
        self.remove(session, None, alive);
        self.memory_event(Event::Left(ProcessId(session.0)));
    }

    /// A process left work behind in a group: its files are held until the group had time to end that. Returns them if
    /// nothing is known of such a group, or too much is held for it.
    pub(crate) fn hold(&mut self, of: &Left, files: Vec<OwnedFd>) -> Option<Arc<[OwnedFd]>> {
        let (now, files) = (self.now(), Arc::from(files));
        // A process that exits frees its part of the group first.
        let freed = |id: &SessionId| {
            let met = self.sessions.get(id).filter(|met| met.freed.is_some())?;
            self.placed.get(&met.tenant).cloned()
        };
        let (session, name) = match of {
            Left::Session(id) => (Some(*id), freed(id)),
            Left::Group(name) => (None, Some(Arc::clone(name))),
        };
        let mut held = false;
        for device in self.devices.values_mut() {
            let own = (device.domains.values()).filter(|it| Some(it.member.session) == session);
            let mut groups: BTreeSet<DomainId> = own.filter_map(|it| it.group).collect();
            groups.extend(name.as_deref().and_then(|name| device.group_named(name)));
            for group in groups {
                held |= device.hold(now, group, &files, &mut self.controller);
            }
        }
        (!held).then_some(files)
    }

    /// Reports how many contexts a process has on each device.
    fn count_contexts(&mut self, session: SessionId) {
        // One that comes to a new daemon has worked before.
        let before = (self.sessions.get(&session)).is_some_and(|met| met.before.work > 0);
        let count = |(uuid, device): (&String, &Device)| {
            let own = |domain: &&Domain| domain.member.session == session;
            let count = device.domains.values().filter(own).count();
            (uuid.clone(), count as u32)
        };
        let counts: Vec<(String, u32)> = self.devices.iter().map(count).collect();
        for (device, count) in counts {
            let process = ProcessId(session.0);
            self.memory_event(Event::Contexts {
                process,
                device,
                count,
                before,
            });
        }
    }

    /// A process has connected.
    pub(crate) fn meet(&mut self, session: SessionId, met: Met) {
        let joined = Event::Joined(ProcessId(session.0), met.tenant);
        (self.alarm).watch(session, Arc::clone(&met.page), met.pid);
        self.sessions.insert(session, met);
        self.greet(session);
        self.memory_event(joined);
    }

    /// Tells processes where taking the device ahead of their work may pay, when that has changed.
    fn tell_hints(&mut self, now: Micros) {
        for (id, met) in &mut self.sessions {
            let spec = self.tenants.get(&met.tenant);
            let wanted =
                spec.filter(|spec| spec.class == Class::Latency && spec.hints != Hints::Off);
            let mut contended = 0;
            let domains = self.devices.values().flat_map(|it| it.domains.values());
            for domain in domains.filter(|it| wanted.is_some() && it.member.session == *id) {
                let key = domain.member.key;
                if key < SLOTS as u32 && self.controller.contended(domain.who.id, now) {
                    contended |= 1 << key;
                }
            }
            let automatic = wanted.is_some_and(|spec| spec.hints == Hints::Auto);
            let tell = (contended, contended != 0 && automatic);
            let (contended, automatic) = tell;
            let message = Daemon::Hints {
                contended,
                automatic,
            };
            if met.told != tell && (met.speak)(&message) {
                met.told = tell;
            }
        }
    }

    fn remove(&mut self, session: SessionId, key: Option<u32>, alive: bool) {
        let now = self.now();
        for device in self.devices.values_mut() {
            device.remove(now, session, key, alive, &mut self.controller, &self.reaper);
            // A tenant may have ended before its last process did.
            device.ended.retain(|id, _| self.tenants.contains_key(id));
        }
        let leaves =
            |member: &Member| member.session == session && key.is_none_or(|key| key == member.key);
        for mut copy in self.copies.extract_if(.., |copy| leaves(&copy.member)) {
            if alive {
                copy.set(copy.default);
            }
            let _ = self.reaper.send(Box::new(copy.controls));
        }
        self.count_contexts(session);
    }

    /// Brings every device to what its policy wants now. Returns when to do so again at the
    /// latest; none: when something happens.
    pub(crate) fn step(&mut self) -> Option<Micros> {
        if self.stopped {
            return None;
        }
        self.step_memory();
        let start = self.now();
        self.leave_expired();
        let cost = self.cost + self.waking;
        for device in self.devices.values_mut() {
            device.observe(start, &mut self.controller, &self.clock, cost);
            for held in device.release(start, &mut self.controller) {
                for it in &mut self.ended_in_groups {
                    if device.group_named(&it.crash.group) == Some(held.group()) {
                        it.matters_until = it.matters_until.max(start + AFTERMATH);
                    }
                }
                let _ = self.reaper.send(Box::new(held));
            }
        }
        self.judge();
        self.pass_crashes_on();
        self.pass_stuck_on(start);
        if !self.expiry.lapsed.is_empty() {
            self.expire_guarantees();
        }
        let observed = self.now();
        let planning = self.control();
        self.tell_hints(observed);
        let took = observed.saturating_sub(start) + planning;
        self.cost = smooth(self.cost, took);
        self.stats.busy_s += took.as_secs_f64();
        let now = self.now();
        self.steps.record(now.saturating_sub(start));
        self.step_memory();
        let cost = self.cost + self.waking;
        (self.devices.values())
            .filter_map(|device| device.due(&self.controller, cost))
            .chain(self.controller.next_wakeup())
            .chain(self.moves.due(now))
            .min()
    }

    /// Carries out what the controller decides, until it has no more to do now. Returns how long the planning took.
    fn control(&mut self) -> Micros {
        let domains = self.devices.values().map(|it| it.domains.len());
        // Even a policy that always changes its mind must not keep the thread from everything else.
        let most = 4 * (1 + domains.sum::<usize>());
        let mut planning = Micros::ZERO;
        let plans = self.controller.plans();
        for _ in 0..most {
            let now = self.now();
            if (self.controller.next_wakeup()).is_none_or(|at| at > now) {
                break;
            }
            // The newest that can be known: controls take longer than a request, and a process may have freed itself.
            self.leave_expired();
            for device in self.devices.values_mut() {
                device.sample(now, &mut self.controller);
            }
            let command = self.controller.poll(now);
            let took = self.now().saturating_sub(now);
            planning += took;
            self.stats.plan_max_us = self.stats.plan_max_us.max(took.0);
            let Some(command) = command else {
                continue;
            };
            let mut devices = self.devices.values_mut();
            if let Some(device) = devices.find(|it| it.index == command.device) {
                device.carry_out(&command, &mut self.controller, &self.clock);
            }
        }
        let made = self.controller.plans() - plans;
        if made > 0 {
            let now = self.now();
            self.stats.plans += made;
            for device in self.devices.values_mut() {
                device.record_reasons(now, &self.controller);
            }
        }
        planning
    }

    /// Lets go of the groups of processes that have freed themselves. One that was frozen meanwhile, by a control that was
    /// already under way, is given back: its process comes again, with a new session, before it is controlled again.
    fn leave_expired(&mut self) {
        let expired = |(_, met): &(&SessionId, &Met)| met.has_expired() && !met.left;
        let expired = self.sessions.iter().filter(expired);
        for id in expired.map(|(id, _)| *id).collect::<Vec<_>>() {
            if !self.renewal.may_have_expired() {
                self.disbelieve(id);
                continue;
            }
            self.remove(id, None, true);
            if let Some(met) = self.sessions.get_mut(&id) {
                met.left = true;
                self.stats.lease_expiries += 1;
                tracing::warn!(pid = met.pid, "its lease expired: it has freed itself");
            }
        }
    }

    /// Whether there is a process to control.
    pub(crate) fn has_sessions(&self) -> bool {
        !self.sessions.is_empty()
    }

    /// Takes note of the CPU time that waking up for a step took.
    pub(crate) fn woke(&mut self, took: Micros) {
        self.waking = smooth(self.waking, took);
    }

    /// Lets the slices of copy groups follow their tenants' classes, if that is wanted.
    pub(super) fn set_copy_slices(&mut self) {
        if !self.config.copy_engines {
            return;
        }
        for copy in &mut self.copies {
            let class = self.tenants.get(&copy.tenant).map(|spec| spec.class);
            copy.set(match class {
                // A copy cannot be frozen in its middle: only how often turns change is decided.
                Some(Class::Latency) => Timeslice(10_000),
                Some(Class::Batch) => Timeslice(200),
                Some(Class::Standard) | None => copy.default,
            });
        }
    }

    /// Gives every channel group its own timeslice back, and does nothing more.
    pub(crate) fn restore(&mut self) {
        self.stopped = true;
        for device in self.devices.values_mut() {
            for (domain, known) in
                (device.domains.values()).zip(self.controller.domains(device.index))
            {
                domain.restore(known);
            }
        }
        for copy in &mut self.copies {
            copy.set(copy.default);
        }
    }

    /// What happened on every device in the last `time`, as far as it is remembered.
    pub(crate) fn history(&mut self, time: Micros) -> Vec<History> {
        let to = self.now();
        let from = to.saturating_sub(time);
        let devices = self.devices.iter();
        let history = |(uuid, device): (&String, &Device)| History {
            device: uuid.clone(),
            from,
            to,
            events: device.record.since(from),
            present: (device.domains.values())
                .zip(self.controller.domains(device.index))
                .map(|(domain, known)| (Arc::clone(&domain.who), domain::now(known)))
                .collect(),
        };
        devices.map(history).collect()
    }

    /// What there is, for people.
    pub(crate) fn view(&mut self) -> View {
        let now = self.now();
        let mut view = View {
            domains: Vec::new(),
            busy_us: BTreeMap::new(),
            totals: BTreeMap::new(),
            devices: Vec::new(),
            scheduler: types::Scheduler {
                steps: self.steps.count,
                steps_total_us: self.steps.total.0,
                steps_histogram: self.steps.histogram.into(),
                ..self.stats.clone()
            },
            counted: self.ended.clone(),
            memory: self.moves.broker.lines(),
            swapped_out: self.moves.swapped_out.clone(),
            standings: self.moves.broker.standings().collect(),
            on_host: self.moves.broker.on_host(),
            moves: self.moves.figures.clone(),
            unlisted: self.unlisted.clone(),
            lapsed: self.expiry.lapsed.keys().copied().collect(),
            tampering: self.tampers.list(now),
        };
        for met in self.sessions.values() {
            let all = view.counted.entry(met.tenant).or_default();
            *all = met.counted().plus(all);
        }
        for (uuid, device) in &mut self.devices {
            device.sample(now, &mut self.controller);
            self.controller.account_until(device.index, now);
            let policy = self.controller.policy(device.index);
            let entitled = entitled(policy, device, &self.tenants, &self.users, &self.weights);
            view.devices.push(types::Device {
                uuid: uuid.clone(),
                index: None,
                name: String::new(),
                emulated: device.emulated,
                driver: String::new(),
                memory_bytes: 0,
                memory_guaranteeable: self.moves.broker.guaranteeable(uuid),
                context_bytes: self.moves.broker.context(uuid),
                hardware: types::Hardware::default(),
                readings: types::Readings::default(),
                policy: policy.name().into(),
                state: device.lost.clone().unwrap_or_else(|| "ok".into()),
                domains: device.domains.len(),
                foreign: (self.foreign.get(uuid))
                    .map(|all| all.list(|id| Some(self.owners.get(&id)?.name.clone())))
                    .unwrap_or_default(),
                controls: device.costs.list(),
            });
            for (tenant, totals) in &device.ended {
                *view.totals.entry((*tenant, uuid.clone())).or_default() += *totals;
            }
            for (domain, known) in
                (device.domains.values()).zip(self.controller.domains(device.index))
            {
                let account = self.controller.account(domain.who.id);
                let (tenant, has) = (domain.who.tenant, domain::now(known));
                let totals = domain.totals(now, known, &account);
                *view.totals.entry((tenant, uuid.clone())).or_default() += totals;
                let shown = types::Domain {
                    id: domain.who.id.0,
                    group: domain.group.map(|group| group.0),
                    device: uuid.clone(),
                    pid: domain.member.pid,
                    timeslice_us: has.timeslice_us,
                    frozen: has.frozen,
                    demand: has.demand,
                    entitled_share: entitled.get(&tenant).map_or(0.0, |bound| bound.share),
                    wait_bound_us: entitled.get(&tenant).map_or(0, |bound| bound.wait.0),
                    received_share: domain.share(now, account.received_us),
                    measured_share: device.measured(domain.member.pid),
                    received_us: account.received_us as u64,
                    runnable_us: account.runnable_us as u64,
                    waited_us: account.waited_us as u64,
                    preemptions: account.preemptions,
                    freezes: domain.freezes,
                    thaws: domain.thaws,
                    slice_changes: domain.slice_changes,
                    tampered: domain.tampered,
                    reason: has.reason.into(),
                    error: (domain.error.clone()).filter(|_| known.is_faulty()),
                };
                view.busy_us.insert(shown.id, known.busy(now).0);
                view.domains.push((tenant, shown));
            }
        }
        view
    }
}

impl CopyGroup {
    fn set(&mut self, slice: Timeslice) {
        if self.timeslice != slice && self.controls.set_timeslice(slice.0).is_ok() {
            self.timeslice = slice;
        }
    }
}

/// An average over some eight values.
fn smooth(average: Micros, value: Micros) -> Micros {
    Micros((average.0 * 7 + value.0).div_ceil(8))
}

/// What each tenant of a device is sure of if all of them have work: its share, and its longest wait.
fn entitled(
    policy: &dyn Policy,
    device: &Device,
    specs: &BTreeMap<TenantId, TenantSpec>,
    users: &BTreeMap<TenantId, UserId>,
    weights: &BTreeMap<UserId, f64>,
) -> BTreeMap<TenantId, Bound> {
    let here = device.tenants();
    let present = specs.iter().filter(|(id, _)| here.contains(id));
    let tenants = present.map(|(id, spec)| TenantState {
        id: *id,
        user: users.get(id).copied().unwrap_or_default(),
        spec: spec.clone(),
    });
    let snapshot = Snapshot {
        users: weights.clone(),
        ..Snapshot::of_tenants(tenants.collect())
    };
    let bounds = policy.bounds(&snapshot).into_iter();
    bounds.map(|bound| (bound.tenant, bound)).collect()
}
