//! Carries out what the memory broker decides (`gpumux-core`: `broker`), on the scheduling thread: sends its orders to the
//! processes, freezes and thaws tenants, and reports back what came of it.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use gpumux_core::{
    Demand, Micros, TenantId, TenantSpec,
    broker::{Activity, Broker, Command, Event, MoveError, Order, ProcessId, Reply, Terms},
    controller,
    tamper::{Tampering, Then},
};
use gpumux_wire::Daemon;
use tokio::sync::{mpsc::UnboundedSender, oneshot};

use super::{Engine, SessionId, record::What};
use crate::{api::types, config::HostMemory};

/// The log says not more often than this that the host is full.
const HOST_FULL_PAUSE: Micros = Micros::from_secs(60);
/// How often groups that are to be frozen are looked at.
const FREEZING: Micros = Micros::from_millis(1);

/// The broker, and what is under way for it.
pub(super) struct MemoryMoves {
    pub(super) broker: Broker,
    rules: Option<Daemon>,
    /// What the broker was last told that tenants do.
    activity: BTreeMap<TenantId, Activity>,
    /// Tenants that stay frozen: their memory is on its way or away.
    pub(super) swapped_out: BTreeSet<TenantId>,
    /// Those of them whose groups are not known to be frozen yet.
    freezing: BTreeSet<TenantId>,
    /// Users' requests that are not answered yet.
    requests: BTreeMap<u64, oneshot::Sender<Result<(), MoveError>>>,
    requested: u64,
    pub(super) figures: BTreeMap<TenantId, types::MoveFigures>,
    told_full: Option<Micros>,
    /// Where happenings are reported.
    tell: Option<UnboundedSender<Happening>>,
    /// Each process's last request for memory that has no answer yet: its ticket, device and bytes.
    asked: BTreeMap<ProcessId, (u32, String, u64)>,
}

/// Something that happened to a tenant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Happening {
    /// Its memory has moved.
    Moved {
        tenant: TenantId,
        /// To the host, or back.
        out: bool,
        bytes: u64,
        took: Micros,
    },
    /// A request was denied, because the tenant would have exceeded its limit.
    AtLimit { tenant: TenantId, limit: u64 },
    /// A process of it undid a control.
    Tampered {
        tenant: TenantId,
        pid: u32,
        what: Tampering,
        /// What is done about it now.
        then: Option<Then>,
    },
}

impl MemoryMoves {
    pub(super) fn new(rules: &HostMemory) -> Self {
        let limit = rules.limit.map_or(u64::MAX, |limit| limit.0);
        let differ = *rules != HostMemory::default();
        Self {
            broker: Broker::new(limit),
            rules: differ.then(|| Daemon::HostMemory {
                location: (rules.location.as_ref()).map(|it| it.display().to_string()),
                scrub: rules.scrub,
            }),
            activity: BTreeMap::new(),
            swapped_out: BTreeSet::new(),
            freezing: BTreeSet::new(),
            requests: BTreeMap::new(),
            requested: 0,
            figures: BTreeMap::new(),
            told_full: None,
            tell: None,
            asked: BTreeMap::new(),
        }
    }

    pub(super) fn forget(&mut self, tenant: TenantId) {
        self.activity.remove(&tenant);
        self.swapped_out.remove(&tenant);
        self.freezing.remove(&tenant);
        self.figures.remove(&tenant);
    }

    /// When [`Engine::step_memory`] has something to do although nothing happens.
    pub(super) fn due(&self, now: Micros) -> Option<Micros> {
        let freezing = (!self.freezing.is_empty()).then(|| now + FREEZING);
        self.broker.next_wakeup().into_iter().chain(freezing).min()
    }
}

/// What the broker must know of a spec.
pub(super) fn terms(spec: &TenantSpec) -> Terms {
    Terms {
        class: spec.class,
        share: spec.memory(),
        policy: spec.memory_policy,
        sleep_after: spec.sleep_after_s.map(Micros::from_secs),
    }
}

impl Engine {
    /// Something happened that concerns memory.
    pub(crate) fn memory_event(&mut self, event: Event) {
        let now = self.now();
        if self.moves.broker.settles(now) {
            let changed = self.changed_activity(now);
            if !changed.is_empty() {
                self.handle(now, Event::Activity(changed));
            }
        }
        self.handle(now, event);
    }

    /// Has a user's request carried out; the answer comes when that is done.
    pub(crate) fn request(
        &mut self,
        event: impl FnOnce(u64) -> Event,
        answer: oneshot::Sender<Result<(), MoveError>>,
    ) {
        self.moves.requested += 1;
        let request = self.moves.requested;
        self.moves.requests.insert(request, answer);
        self.memory_event(event(request));
    }

    /// The capacity that a tenant's programs are shown before they have a session, where that is less than the device's.
    pub(crate) fn shown_memory(&mut self, tenant: TenantId) -> Option<u64> {
        self.moves.broker.shown(tenant)
    }

    /// Answers what a process is shown of a device's memory.
    pub(crate) fn answer_view(&mut self, session: SessionId, ticket: u32, uuid: &str, total: u64) {
        let process = ProcessId(session.0);
        let (free, total) = self.moves.broker.view(process, uuid, total);
        let seen = Daemon::Seen {
            ticket,
            free,
            total,
        };
        self.send(process, &seen);
    }

    /// A process has connected: it hears where moved memory is kept.
    pub(super) fn greet(&self, session: SessionId) {
        if let Some((rules, met)) = self.moves.rules.as_ref().zip(self.sessions.get(&session)) {
            met.say(rules);
        }
    }

    /// Lets the broker go on where time has passed or groups were frozen.
    pub(super) fn step_memory(&mut self) {
        let now = self.now();
        if (self.moves.broker.next_wakeup()).is_some_and(|at| at <= now) {
            self.memory_event(Event::Tick);
        }
        for tenant in self.moves.freezing.clone() {
            let result = match self.is_frozen(tenant) {
                Ok(false) => continue,
                Ok(true) => Ok(()),
                Err(why) => Err(why),
            };
            self.moves.freezing.remove(&tenant);
            self.memory_event(Event::Frozen(tenant, result));
        }
    }

    fn handle(&mut self, now: Micros, event: Event) {
        if let Event::Ask {
            process,
            ticket,
            ask,
        } = &event
        {
            let asked = (*ticket, ask.device.clone(), ask.need);
            self.moves.asked.insert(*process, asked);
        }
        if let Event::Left(process) = &event {
            self.moves.asked.remove(process);
        }
        let mut commands = self.moves.broker.handle(now, event);
        while !commands.is_empty() {
            let mut next = Vec::new();
            for command in commands {
                if let Some(failed) = self.carry_out(now, command) {
                    next.extend(self.moves.broker.handle(now, failed));
                }
            }
            commands = next;
        }
    }

    /// Does what the broker says; what failed at once is an event again.
    fn carry_out(&mut self, now: Micros, command: Command) -> Option<Event> {
        match command {
            Command::Order(process, op, order) => {
                let asks = !matches!(order, Order::Resume | Order::Trim);
                let sent = self.send(process, &message(op, order));
                let why = || Reply::Refused("it does not listen".into());
                return (asks && !sent).then(|| Event::Reply(process, op, why()));
            }
            Command::Grant {
                process,
                ticket,
                bytes,
            } => {
                self.send(process, &Daemon::Granted { ticket, bytes });
                self.granted(process, ticket, bytes);
            }
            Command::Freeze(tenant) => {
                self.park(tenant, true);
                self.moves.freezing.insert(tenant);
            }
            Command::Thaw(tenant) => {
                self.moves.freezing.remove(&tenant);
                self.park(tenant, false);
            }
            Command::Answer(request, result) => {
                if let Some(answer) = self.moves.requests.remove(&request) {
                    // The process that asked may have gone.
                    let _ = answer.send(result);
                }
            }
            Command::Moved {
                tenant,
                out,
                bytes,
                took,
            } => self.moved(tenant, out, bytes, took),
            Command::Failed(tenant, error) => {
                let lately = (self.moves.told_full).is_some_and(|at| now < at + HOST_FULL_PAUSE);
                match error {
                    MoveError::HostFull(_) if lately => {}
                    MoveError::HostFull(_) => {
                        self.moves.told_full = Some(now);
                        tracing::warn!(tenant = tenant.0, %error, "memory is not moved");
                    }
                    MoveError::Stuck => {
                        tracing::warn!(tenant = tenant.0, %error, "a move does not end");
                    }
                    error => tracing::info!(tenant = tenant.0, %error, "memory is not moved now"),
                }
            }
            Command::NotKept(tenant, device, error) => {
                tracing::warn!(tenant = tenant.0, device, %error, "a guarantee of memory is not kept here");
            }
        }
        None
    }

    /// Happenings are reported there from now on.
    pub(crate) fn tell_happenings(&mut self, to: UnboundedSender<Happening>) {
        self.moves.tell = Some(to);
    }

    pub(super) fn tell(&self, happening: Happening) {
        if let Some(to) = &self.moves.tell {
            let _ = to.send(happening);
        }
    }

    /// Reports a request that was denied because of the tenant's limit.
    fn granted(&mut self, process: ProcessId, ticket: u32, bytes: u64) {
        let asked = self.moves.asked.get(&process);
        if asked.is_none_or(|(of, ..)| *of != ticket) {
            return;
        }
        let Some((_, device, need)) = self.moves.asked.remove(&process) else {
            return;
        };
        let met = self.sessions.get(&SessionId(process.0));
        let Some(tenant) = met.map(|met| met.tenant).filter(|_| bytes == 0) else {
            return;
        };
        let lines = self.moves.broker.lines();
        let mut entries = (lines.iter().filter(|line| line.uuid == device))
            .flat_map(|line| line.entries.iter().filter(|(id, _)| *id == tenant));
        let exceeds = entries.find_map(|(_, entry)| {
            let limit = entry.share.limit;
            (need > limit.saturating_sub(entry.holding.all())).then_some(limit)
        });
        if let Some(limit) = exceeds {
            self.tell(Happening::AtLimit { tenant, limit });
        }
    }

    fn send(&self, process: ProcessId, message: &Daemon) -> bool {
        let session = self.sessions.get(&SessionId(process.0));
        session.is_some_and(|met| met.say(message))
    }

    /// Freezes a tenant until told otherwise, or lets it go on.
    pub(super) fn park(&mut self, tenant: TenantId, swapped_out: bool) {
        match swapped_out {
            true => self.moves.swapped_out.insert(tenant),
            false => self.moves.swapped_out.remove(&tenant),
        };
        self.park_domains();
    }

    pub(super) fn park_domains(&mut self) {
        let now = self.now();
        for domain in self.devices.values().flat_map(|it| it.domains.values()) {
            let swapped_out = self.moves.swapped_out.contains(&domain.who.tenant);
            let event = controller::Event::SwappedOut(domain.who.id, swapped_out);
            self.controller.handle(now, event);
        }
    }

    /// Whether every group of a tenant is frozen. An error names the control that failed.
    fn is_frozen(&self, tenant: TenantId) -> Result<bool, String> {
        let all = self.devices.values().flat_map(|it| it.domains.values());
        let mut frozen = true;
        for domain in all.filter(|it| it.who.tenant == tenant) {
            let Some(known) = self.controller.domain(domain.who.id) else {
                continue;
            };
            if known.is_faulty() {
                return Err(domain.error.clone().unwrap_or_default());
            }
            frozen &= known.is_frozen();
        }
        Ok(frozen)
    }

    /// What tenants do, of those of whom that has changed.
    fn changed_activity(&mut self, now: Micros) -> Vec<(TenantId, Activity)> {
        let mut all: BTreeMap<TenantId, Activity> = (self.tenants.keys())
            .map(|id| (*id, Activity::default()))
            .collect();
        for domain in self.devices.values().flat_map(|it| it.domains.values()) {
            let known = self.controller.domain(domain.who.id);
            let Some((activity, known)) = all.get_mut(&domain.who.tenant).zip(known) else {
                continue;
            };
            // As they are now, not as they were when last sampled.
            let busy = domain.demand() != Demand::Idle;
            let since = match known.state.demand {
                Demand::Idle => known.state.demand_since,
                _ => now,
            };
            activity.busy |= busy;
            activity.idle_since = activity.idle_since.max(since);
            activity.in_group |= domain.group.is_some();
        }
        all.retain(|id, activity| self.moves.activity.get(id) != Some(activity));
        self.moves
            .activity
            .extend(all.iter().map(|(id, it)| (*id, *it)));
        all.into_iter().collect()
    }

    /// For the records: memory of a tenant has moved.
    pub(super) fn moved(&mut self, tenant: TenantId, out: bool, bytes: u64, took: Micros) {
        let took_us = took.0;
        let figures = self.moves.figures.entry(tenant).or_default();
        let what = match out {
            true => {
                figures.outs += 1;
                figures.out_bytes += bytes;
                figures.out_us += took_us;
                What::WentAway { bytes, took_us }
            }
            false => {
                figures.backs += 1;
                figures.back_bytes += bytes;
                figures.back_us += took_us;
                What::CameBack { bytes, took_us }
            }
        };
        self.tell(Happening::Moved {
            tenant,
            out,
            bytes,
            took,
        });
        let took = Duration::from_micros(took_us);
        tracing::info!(tenant = tenant.0, out, bytes, ?took, "memory has moved");
        let now = self.now();
        // Wherever it has domains: once per device.
        for device in self.devices.values_mut() {
            let mut domains = device.domains.values();
            if let Some(domain) = domains.find(|it| it.who.tenant == tenant) {
                device.record.push(now, &Arc::clone(&domain.who), what);
            }
        }
    }
}

/// An order as the session's packet.
fn message(op: u64, order: Order) -> Daemon {
    match order {
        Order::Quiesce { least, host } => Daemon::Quiesce { op, least, host },
        Order::Resume => Daemon::Resume { op },
        Order::Out { least, host } => Daemon::SwapOut { op, least, host },
        Order::In => Daemon::SwapIn { op },
        Order::DropHost => Daemon::DropHost { op },
        Order::Reclaim { device, bytes } => Daemon::Reclaim { op, device, bytes },
        Order::Trim => Daemon::Trim,
    }
}
