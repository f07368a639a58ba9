//! All that the scheduling thread has, and what changes it: tenants with their specs, processes, and their groups.

use std::{
    collections::{BTreeMap, BTreeSet},
    os::fd::OwnedFd,
    sync::Arc,
};

use gpumux_core::{
    Demand, DomainId, Micros, RunState, TenantId, TenantSpec,
    admission::{Most, Refusal, UserPolicy},
    broker::{Event, ProcessId},
    controller::{self, NewDomain},
    recording::Line,
};
use gpumux_rm::layout::engine::GR0;
use gpumux_wire::{Daemon, message::RECEIPTS};

use super::{
    admission::Admission,
    crashes::Crashes,
    device::Device,
    domain::{Domain, Member, NewGroup},
    expiry::{self, Due, Expiry},
    held::Left,
    memory::{self, MemoryMoves},
    model::{Clock, Happening, Owner, Reaper, Relocation, Withheld},
    process::Met,
    record::{Counted, Durations, Now, What},
    recording::Recording,
    renewal::{Renewal, Renewing},
    state::State,
    tamper::Tampers,
};
use crate::{api::types, config::Config, failure::Crash, link::SessionId};

/// The scheduling thread's own.
pub(crate) struct Engine {
    pub(super) config: Arc<Config>,
    pub(super) renewal: Arc<Renewal>,
    pub(super) state: State,
    pub(super) admission: Admission,
    pub(super) expiry: Expiry,
    pub(super) moves: MemoryMoves,
    pub(super) tampers: Tampers,
    pub(super) crashes: Crashes,
    /// Tenants on their way to another device.
    pub(super) relocations: BTreeMap<TenantId, Relocation>,
    /// Driver calls of a tenant's processes that their library does not know.
    pub(super) unlisted: BTreeMap<TenantId, BTreeSet<String>>,
    /// The devices that other daemons have, and which.
    pub(super) others: BTreeMap<String, String>,
    /// What processes that are gone counted, of tenants that live.
    pub(super) ended: BTreeMap<TenantId, Counted>,
    domains_made: u64,
    /// What of tenants' specs does not hold, as it was reported.
    withheld: BTreeMap<TenantId, Withheld>,
    /// What a step cost lately, controls apart.
    pub(super) cost: Micros,
    /// What it cost lately to wake up for a step.
    pub(super) waking: Micros,
    pub(super) stats: types::Scheduler,
    pub(super) steps: Durations,
    pub(super) stopped: bool,
    pub(super) recording: Option<Recording>,
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
    #[error("it names device {0:?}, which NVML does not list on this machine")]
    NoDevice(String),
    #[error("its tenant may not use device {0}: run it on {1}")]
    Elsewhere(String, String),
    #[error("{0}")]
    OtherDaemon(String),
}

impl Engine {
    pub(super) fn new(
        config: Arc<Config>,
        clock: Clock,
        reaper: Reaper,
        renewal: Arc<Renewal>,
    ) -> Self {
        Self {
            state: State::new(clock, reaper),
            admission: Admission::new(config.reserve),
            expiry: Expiry::default(),
            moves: MemoryMoves::new(&config.host_memory, config.when_stopped),
            tampers: Tampers::new(config.tampering),
            crashes: Crashes::default(),
            config,
            renewal,
            relocations: BTreeMap::new(),
            unlisted: BTreeMap::new(),
            others: BTreeMap::new(),
            ended: BTreeMap::new(),
            domains_made: 0,
            withheld: BTreeMap::new(),
            cost: Micros::ZERO,
            waking: Micros::ZERO,
            stats: types::Scheduler::default(),
            steps: Durations::default(),
            stopped: false,
            recording: None,
        }
    }

    /// Records what the planners are given and decide. Before anything else.
    pub(super) fn record(&mut self, recording: Recording) {
        self.moves.record(recording.clone());
        self.state.controller.record();
        self.recording = Some(recording);
    }

    /// Passes on what the controller has recorded.
    pub(super) fn write_recording(&mut self) {
        if let Some(recording) = &mut self.recording {
            let calls = self.state.controller.take_calls().into_iter();
            calls.for_each(|(at, call)| recording.add(Line::Compute(at, call)));
        }
    }

    /// Something happened that concerns memory.
    pub(super) fn memory_event(&mut self, event: Event) {
        self.moves.handle(&mut self.state, event);
    }

    // ---- Tenants

    /// A new tenant may use these devices only; none named: all. Comes before its spec.
    pub(super) fn confine(&mut self, tenant: TenantId, devices: &[String]) {
        if devices.is_empty() {
            return;
        }
        let devices: BTreeSet<String> = devices.iter().cloned().collect();
        self.memory_event(Event::Confined(tenant, devices.clone()));
        self.state.confined.insert(tenant, devices);
    }

    /// Gives a new tenant of this owner this spec.
    ///
    /// # Errors
    /// As [`Self::set_spec`]; then the tenant is not known.
    pub(super) fn admit(
        &mut self,
        tenant: TenantId,
        owner: Owner,
        spec: TenantSpec,
    ) -> Result<(), Refusal> {
        self.state.own(tenant, owner);
        self.set_spec(tenant, spec)
            .inspect_err(|_| self.forget(tenant))
    }

    /// Gives a tenant that the last daemon had admitted its spec again, but for what did not hold then, although its user's policy may be
    /// stricter by now. If the devices cannot keep its guarantees, it goes on without. Returns the spec that it has, and why it is not the
    /// one that it had.
    pub(super) fn admit_again(
        &mut self,
        tenant: TenantId,
        owner: Owner,
        devices: &[String],
        spec: TenantSpec,
        withheld: Withheld,
    ) -> (TenantSpec, Option<Refusal>) {
        let again = |engine: &mut Self, spec: &TenantSpec| {
            let own = Owner {
                policy: UserPolicy::unlimited().into(),
                ..owner.clone()
            };
            engine.confine(tenant, devices);
            if withheld.lowered {
                engine.tampers.lower(tenant);
            }
            engine.admit(tenant, own, spec.clone())?;
            engine.state.own(tenant, owner.clone());
            engine.memory_event(Event::Restored(tenant));
            Ok(())
        };
        let without = expiry::without_guarantees(&spec);
        if withheld.lapsed && again(self, &without).is_ok() {
            self.expiry.lapse(tenant, spec.clone());
            return (spec, None);
        }
        let Err(error) = again(self, &spec) else {
            return (spec, None);
        };
        // Without guarantees nothing stands in its way.
        if let Err(error) = again(self, &without) {
            // It makes no sense to this daemon.
            let least = TenantSpec {
                class: spec.class,
                ..TenantSpec::default()
            };
            let refused: Result<(), Refusal> = again(self, &least);
            return (least, Some(refused.err().unwrap_or(error)));
        }
        // Others may have them because they had lapsed: they hold again with its work, once they fit.
        if owner.policy.guarantee_expires_s.is_some() {
            self.expiry.lapse(tenant, spec.clone());
            return (spec, Some(error));
        }
        (without, Some(error))
    }

    /// Gives a tenant this spec.
    ///
    /// # Errors
    /// When the spec makes no sense, its user may not have it, or its guarantees do not fit; then nothing changes.
    pub(super) fn set_spec(&mut self, tenant: TenantId, spec: TenantSpec) -> Result<(), Refusal> {
        self.expire_guarantees();
        let refused = match self.put_spec(tenant, spec.clone()) {
            Err(refused) if self.expiry.covers(tenant, &spec) => refused,
            done => return done,
        };
        // What has lapsed, and does not fit now, need not for a change of something else.
        let without = expiry::without_guarantees(&spec);
        self.put_spec(tenant, without).map_err(|_| refused)?;
        self.expiry.lapse(tenant, spec);
        Ok(())
    }

    fn put_spec(&mut self, tenant: TenantId, spec: TenantSpec) -> Result<(), Refusal> {
        let spec = self.tampers.permitted(tenant, spec);
        let owner = self.state.owners.get(&tenant);
        let devices = self.state.confined.get(&tenant);
        self.admits(tenant, owner, devices, &spec)?;
        self.expiry.holds(tenant);
        self.take_spec(tenant, spec);
        Ok(())
    }

    fn take_spec(&mut self, tenant: TenantId, spec: TenantSpec) {
        let terms = memory::terms(&spec);
        self.state.set_spec(tenant, spec);
        self.memory_event(Event::Tenant(tenant, terms));
    }

    /// Changes a tenant's spec, by what its user may have now; `by_root`: whatever that is.
    ///
    /// # Errors
    /// As [`Self::set_spec`].
    pub(super) fn change(
        &mut self,
        tenant: TenantId,
        policy: Arc<UserPolicy>,
        spec: TenantSpec,
        by_root: bool,
    ) -> Result<(), Refusal> {
        let Some(owner) = self.state.owners.get(&tenant).cloned() else {
            return self.set_spec(tenant, spec);
        };
        let own = Owner { policy, ..owner };
        if !by_root {
            self.state.own(tenant, own);
            return self.set_spec(tenant, spec);
        }
        let pardon = self.tampers.pardon(tenant);
        let granted = Owner {
            policy: UserPolicy::unlimited().into(),
            ..own.clone()
        };
        self.state.own(tenant, granted);
        let set = self.set_spec(tenant, spec);
        self.state.own(tenant, own);
        set.inspect_err(|_| self.tampers.undo(pardon))
    }

    /// Whether a new or old tenant of this owner, on these devices only or, if none are named, on all, could have this spec.
    ///
    /// # Errors
    /// As [`Self::set_spec`].
    pub(super) fn admits(
        &self,
        tenant: TenantId,
        owner: Option<&Owner>,
        devices: Option<&BTreeSet<String>>,
        spec: &TenantSpec,
    ) -> Result<(), Refusal> {
        let broker = &self.moves.broker;
        (self.admission).admits(&self.state, broker, tenant, owner, devices, spec)
    }

    pub(super) fn most(&self, tenant: TenantId) -> Option<Most> {
        (self.admission).most(&self.state, &self.moves.broker, tenant)
    }

    /// Lets guarantees lapse that are not used, and gives those back that are needed again, see [`Expiry`].
    pub(super) fn expire_guarantees(&mut self) {
        for (tenant, due) in self.expiry.due(&mut self.state) {
            match due {
                Due::Lapse(spec) => {
                    self.take_spec(tenant, spec);
                    tracing::info!(
                        tenant = tenant.0,
                        "its guarantees lapse, since it has no work"
                    );
                }
                // What does not fit now may fit later.
                Due::Return(spec) => drop(self.put_spec(tenant, spec)),
            }
        }
    }

    /// Counts what was found of processes that undo controls, and does what follows.
    pub(super) fn judge(&mut self) {
        for tenant in self.tampers.judge(&mut self.state) {
            self.lower(tenant);
        }
    }

    /// Reports for each tenant what of its spec holds no longer, or again.
    pub(super) fn report_withheld(&mut self) {
        let mut withheld = BTreeMap::<TenantId, Withheld>::new();
        for tenant in self.expiry.lapsed() {
            withheld.entry(tenant).or_default().lapsed = true;
        }
        for tenant in self.tampers.lowered() {
            withheld.entry(tenant).or_default().lowered = true;
        }
        let before = std::mem::replace(&mut self.withheld, withheld);
        let known: BTreeSet<&TenantId> = before.keys().chain(self.withheld.keys()).collect();
        for tenant in known {
            let what = self.withheld.get(tenant).copied();
            if before.get(tenant).copied() != what {
                let (tenant, what) = (*tenant, what.unwrap_or_default());
                self.state.report(Happening::Withheld { tenant, what });
            }
        }
    }

    /// A tenant's settings hold no longer.
    fn lower(&mut self, tenant: TenantId) {
        let spec = self.state.tenants.get(&tenant).cloned().unwrap_or_default();
        let spec = self.tampers.permitted(tenant, spec);
        // Whatever its user may have: it is no wish.
        self.take_spec(tenant, spec);
    }

    /// The tenant's processes share the group of this name, as far as they use its MPS server.
    pub(super) fn place(&mut self, tenant: TenantId, group: Arc<str>) {
        self.state.placed.insert(tenant, group);
    }

    /// The tenant has ended.
    pub(super) fn forget(&mut self, tenant: TenantId) {
        self.state.forget(tenant);
        self.expiry.forget(tenant);
        self.tampers.pardon(tenant);
        self.forget_relocation(tenant);
        self.memory_event(Event::TenantGone(tenant));
        self.moves.forget(tenant);
        self.unlisted.remove(&tenant);
        self.ended.remove(&tenant);
    }

    /// A group has failed: all processes in it, and those that had left it just before. What becomes of them is reported no more.
    pub(super) fn give_up(&mut self, group: &str) -> Vec<Crash> {
        self.crashes.give_up(&mut self.state, group)
    }

    /// Whether some process still waits for the device although its group has failed, and has not received its error.
    pub(super) fn has_unaware(&self, group: &str) -> bool {
        Crashes::has_unaware(&self.state, group)
    }

    // ---- Processes and their groups

    /// A process has connected.
    pub(super) fn meet(&mut self, mut met: Met) {
        let session = met.session;
        met.began = self.state.ago(met.made);
        let process = ProcessId(session.0);
        let joined = Event::Joined(process, met.tenant);
        let confirms = met.page.revision() >= RECEIPTS;
        self.crashes.watch(&met.link);
        self.state.sessions.insert(session, met);
        self.moves.greet(&self.state, session);
        self.memory_event(joined);
        if confirms {
            self.memory_event(Event::Confirms(process));
        }
    }

    /// Manages a group from now on.
    ///
    /// # Errors
    /// When its tenant is gone or may not use the device, or another process manages the same group.
    pub(super) fn add(&mut self, mut group: NewGroup) -> Result<(), GroupError> {
        if !self.state.tenants.contains_key(&group.tenant) {
            return Err(GroupError::NoTenant);
        }
        if (self.state.sessions.get(&group.member.session)).is_some_and(Met::has_expired) {
            return Err(GroupError::Expired);
        }
        // The driver has not named it, but the process.
        if group.launches.is_some() && !self.state.devices.contains_key(&group.device) {
            return Err(GroupError::NoDevice(group.device));
        }
        if let Some(which) = self.others.get(&group.device) {
            return Err(GroupError::OtherDaemon(which.clone()));
        }
        if let Some(devices) = self.state.confined.get(&group.tenant)
            && !devices.contains(&group.device)
        {
            let own: Vec<&str> = devices.iter().map(String::as_str).collect();
            return Err(GroupError::Elsewhere(group.device, own.join(", ")));
        }
        let old = self.announced(&group.device, group.member.handles);
        if let Some(old) = &old {
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
            // Copies are not scheduled: one cannot be frozen in its middle.
            let _ = self.state.reaper.send(Box::new(group.controls));
            return Ok(());
        }
        // Since it was examined, controls of the process's last session may have come.
        if old.is_some() || group.run == RunState::Frozen {
            group.confirm();
        }
        let policy = self.config.policy_of(&group.device);
        self.state.device(group.device.clone(), policy);
        let shared = self
            .state
            .placed
            .get(&group.tenant)
            .filter(|_| group.shared);
        let shared = shared.cloned();
        // A group that is made now has a number of its own.
        self.domains_made += 2;
        let id = DomainId(self.domains_made);
        let now = self.state.now();
        let session = group.member.session;
        if let Some(met) = self.state.sessions.get_mut(&session) {
            met.shared = Some(shared.is_some());
        }
        let Some(device) = self.state.devices.get_mut(&group.device) else {
            return Err(GroupError::NoTenant);
        };
        device.emulated |= group.emulated;
        let (tenant, name) = (group.tenant, group.device.clone());
        let (timeslice, default, run) = (group.timeslice, group.default, group.run);
        let mut domain = Domain::new(id, group, now);
        if let Some(met) = self.state.sessions.get(&session) {
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
            run,
        };
        self.state
            .controller
            .handle(now, controller::Event::Came(new));
        let came = Now {
            frozen: run == RunState::Frozen,
            timeslice_us: timeslice.0,
            demand: domain.demand(),
            reason: domain.reason,
        };
        device.record.push(now, &domain.who, What::Came(came));
        device.domains.insert(id, domain);
        (self.admission).warn(&self.state, &self.moves.broker, tenant, &name);
        self.count_contexts(session);
        self.moves.park_domains(&mut self.state);
        Ok(())
    }

    /// Writes which groups may launch now, where that is how they are scheduled. Returns when to do so again.
    pub(super) fn schedule_launches(&mut self) -> Option<Micros> {
        if self.stopped {
            return None;
        }
        let (now, controller) = (self.state.now(), &self.state.controller);
        let devices = self.state.devices.values_mut();
        devices.filter_map(|it| it.admit(now, controller)).min()
    }

    /// The group of these handles on a device, if some process has announced it.
    fn announced(&self, device: &str, handles: (u32, u32)) -> Option<Member> {
        let domains = self.state.devices.get(device)?.domains.values();
        let mut members = domains.map(|it| &it.member);
        members.find(|it| it.handles == handles).cloned()
    }

    /// The channels of a group are now these.
    pub(super) fn set_channels(&mut self, session: SessionId, key: u32, channels: Vec<u32>) {
        let now = self.state.now();
        if let Some((device, id)) = self.state.find(session, key)
            && let Some(device) = self.state.devices.get_mut(&device)
        {
            device.set_channels(now, id, channels, &mut self.state.controller);
        }
    }

    /// A process of this tenant has called a function of the driver that its library does not know.
    pub(super) fn called_unlisted(&mut self, tenant: TenantId, name: String) {
        /// Most names that are kept of one tenant.
        const MOST: usize = 8;
        let known = self.unlisted.entry(tenant).or_default();
        if known.len() < MOST {
            known.insert(name);
        }
    }

    /// A group of the process cannot be managed. With the key of one that it has from an MPS server, and that the driver refuses: it may
    /// have ended with its server, before this session began.
    pub(super) fn leave_unmanaged(&mut self, session: SessionId, lost: Option<u32>) {
        if let Some(met) = self.state.sessions.get_mut(&session) {
            met.unmanaged = true;
            met.lost.extend(lost.map(|key| (key, 0)));
        }
    }

    /// The process's library reports that the timeslice of a group was set.
    pub(super) fn touched(&mut self, session: SessionId, key: u32) {
        if let Some((device, id)) = self.state.find(session, key)
            && let Some(device) = self.state.devices.get_mut(&device)
        {
            device.check(id, &mut self.state.controller, &self.state.clock);
            self.tampers.excuse(&mut self.state, id);
        }
        self.judge();
    }

    /// The process freed a group.
    pub(super) fn gone(&mut self, session: SessionId, key: u32) {
        let now = self.state.now();
        let at_work = self.state.domains().any(|it| {
            let is = it.member.is_of(session, Some(key));
            is && it.group.is_some() && it.demand() == Demand::Busy
        });
        // The process may give another group its key, of which no limit is known.
        let is_limited = self
            .state
            .domains()
            .any(|it| it.member.is_of(session, Some(key)) && it.copies.limits != [None; 2]);
        if is_limited {
            let rates = [None; 2];
            let free = Daemon::CopyRates { key, rates };
            self.state.send_or_end(session, &free);
        }
        if let Some(met) = self.state.sessions.get_mut(&session) {
            met.lost.remove(&key);
            met.freed = at_work.then_some(now).or(met.freed);
        }
        self.remove(session, Some(key), false);
    }

    /// A session has ended. Its files are closed; if its process lives on, its groups are given
    /// back as they were made. Returns whether its memory counts as taken until the process ends.
    pub(super) fn leave(&mut self, session: SessionId, alive: bool) -> bool {
        // The last words of a process that crashed, and whether it had freed itself.
        self.crashes.report(&mut self.state);
        self.leave_expired();
        self.crashes.remember(&mut self.state, session);
        self.crashes.forget(session);
        if let Some(met) = self.state.sessions.remove(&session)
            && self.state.tenants.contains_key(&met.tenant)
        {
            let ended = self.ended.entry(met.tenant).or_default();
            *ended = met.counted().ended().plus(ended);
        }
        self.remove(session, None, alive);
        let process = ProcessId(session.0);
        self.memory_event(match alive {
            true => Event::Lost(process),
            false => Event::Left(process),
        });
        self.moves.broker.awaits(process)
    }

    /// A process left work behind in a group: its files are held until the group had time to end that. Returns them if
    /// nothing is known of such a group, or too much is held for it.
    pub(super) fn hold(&mut self, of: &Left, files: Vec<OwnedFd>) -> Option<Arc<[OwnedFd]>> {
        let (now, files) = (self.state.now(), Arc::from(files));
        // A process that exits frees its part of the group first.
        let freed = |id: &SessionId| {
            let met = self
                .state
                .sessions
                .get(id)
                .filter(|met| met.freed.is_some())?;
            self.state.placed.get(&met.tenant).cloned()
        };
        let (session, name) = match of {
            Left::Session(id) => (Some(*id), freed(id)),
            Left::Group(name) => (None, Some(Arc::clone(name))),
        };
        let mut held = false;
        for device in self.state.devices.values_mut() {
            let own = (device.domains.values()).filter(|it| Some(it.member.session) == session);
            let mut groups: BTreeSet<DomainId> = own.filter_map(|it| it.group).collect();
            groups.extend(name.as_deref().and_then(|name| device.group_named(name)));
            for group in groups {
                held |= device.hold(now, group, &files, &mut self.state.controller);
            }
        }
        (!held).then_some(files)
    }

    /// Reports how many contexts a process has on each device.
    fn count_contexts(&mut self, session: SessionId) {
        // One that comes to a new daemon has worked before.
        let before = (self.state.sessions.get(&session)).is_some_and(|met| met.before.work > 0);
        let count = |(uuid, device): (&String, &Device)| {
            let own = |domain: &&Domain| domain.member.is_of(session, None);
            let count = device.domains.values().filter(own).count();
            (uuid.clone(), count as u32)
        };
        let counts: Vec<(String, u32)> = self.state.devices.iter().map(count).collect();
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

    pub(super) fn remove(&mut self, session: SessionId, key: Option<u32>, alive: bool) {
        let now = self.state.now();
        for device in self.state.devices.values_mut() {
            let (controller, reaper) = (&mut self.state.controller, &self.state.reaper);
            device.remove(now, session, key, alive, controller, reaper);
            // A tenant may have ended before its last process did.
            device
                .ended
                .retain(|id, _| self.state.tenants.contains_key(id));
        }
        self.count_contexts(session);
    }

    /// Lets go of the groups of processes that have freed themselves. One that was frozen meanwhile, by a control that was
    /// already under way, is given back: its process comes again, with a new session, before it is controlled again.
    pub(super) fn leave_expired(&mut self) {
        let expired = |(_, met): &(&SessionId, &Met)| met.has_expired() && !met.left;
        let expired = self.state.sessions.iter().filter(expired);
        let expired = expired.map(|(id, met)| (*id, met.began));
        for (id, began) in expired.collect::<Vec<_>>() {
            if !self.renewal.may_have_expired(began) {
                let lowered = self.tampers.disbelieve(&mut self.state, id);
                lowered.into_iter().for_each(|tenant| self.lower(tenant));
                continue;
            }
            self.remove(id, None, true);
            if let Some(met) = self.state.sessions.get_mut(&id) {
                met.left = true;
                self.stats.lease_expiries += 1;
                tracing::warn!(pid = met.pid, "its lease expired: it has freed itself");
            }
        }
    }

    /// Gives every channel group its own timeslice back, and does nothing more.
    pub(super) fn restore(&mut self) {
        self.stopped = true;
        for device in self.state.devices.values_mut() {
            for (domain, known) in
                (device.domains.values()).zip(self.state.controller.domains(device.index))
            {
                domain.restore(known);
            }
        }
    }
}
