//! Carries out what the memory broker decides (`gpumux-core`: `broker`), on the scheduling thread: sends its orders to the
//! processes, freezes and thaws tenants, and reports back what came of it.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use gpumux_core::{
    Demand, Micros, TenantId, TenantSpec,
    broker::{self, Activity, Broker, Command, Event, MoveError, Order, ProcessId, Reply, Terms},
    controller,
    recording::Line,
};
use gpumux_wire::{
    Daemon,
    message::{self, RECEIPTS},
};

use super::{
    model::{Answer, Happening},
    process::Met,
    record::What,
    recording::Recording,
    state::State,
};
use crate::{
    api::types::{self, SwapReason},
    config::{HostMemory, WhenStopped},
    link::SessionId,
};

/// The log says not more often than this that the host is full.
const HOST_FULL_PAUSE: Micros = Micros::from_secs(60);
// What the broker plans with is what the processes do.
const _: () = assert!(broker::HOST_PIECE == message::HOST_PIECE);
/// How often groups that are to be frozen are looked at.
const FREEZING: Micros = Micros::from_millis(1);

/// The broker, and what is under way for it.
pub(super) struct MemoryMoves {
    pub(super) broker: Broker,
    rules: Option<Daemon>,
    when_stopped: WhenStopped,
    /// What the broker was last told that tenants do.
    activity: BTreeMap<TenantId, Activity>,
    /// Tenants that stay frozen: their memory is on its way or away.
    pub(super) swapped_out: BTreeSet<TenantId>,
    /// Those of them whose groups are not known to be frozen yet.
    freezing: BTreeSet<TenantId>,
    /// Why tenants are there, as far as it is known.
    pub(super) reasons: BTreeMap<TenantId, SwapReason>,
    /// Users' requests that are not answered yet.
    requests: BTreeMap<u64, Answer<Result<(), MoveError>>>,
    /// The tenants that some of these are to move to the host.
    leaving: BTreeMap<u64, TenantId>,
    requested: u64,
    pub(super) figures: BTreeMap<TenantId, types::MoveFigures>,
    told_full: Option<Micros>,
    /// Each process's last request for memory that has no answer yet: its ticket, device and bytes.
    asked: BTreeMap<ProcessId, (u32, String, u64)>,
    /// The broker's last answer to what a program is shown: free memory and capacity.
    shown: (u64, u64),
    recording: Option<Recording>,
}

impl MemoryMoves {
    pub(super) fn new(rules: &HostMemory, when_stopped: WhenStopped) -> Self {
        let half = || half_of_memory(&std::fs::read_to_string("/proc/meminfo").unwrap_or_default());
        let limit = rules.limit.map_or_else(half, |limit| limit.0);
        let differ = *rules != HostMemory::default();
        Self {
            broker: Broker::new(limit),
            rules: differ.then(|| Daemon::HostMemory {
                location: (rules.location.as_ref()).map(|it| it.display().to_string()),
                scrub: rules.scrub,
            }),
            when_stopped,
            activity: BTreeMap::new(),
            swapped_out: BTreeSet::new(),
            freezing: BTreeSet::new(),
            reasons: BTreeMap::new(),
            requests: BTreeMap::new(),
            leaving: BTreeMap::new(),
            requested: 0,
            figures: BTreeMap::new(),
            told_full: None,
            asked: BTreeMap::new(),
            shown: (0, 0),
            recording: None,
        }
    }

    /// Records what the broker is given and decides. Before its first event.
    pub(super) fn record(&mut self, mut recording: Recording) {
        recording.add(Line::Broker(self.broker.on_host().1));
        self.recording = Some(recording);
    }

    fn decide(&mut self, now: Micros, event: Event) -> Vec<Command> {
        let Some(recording) = &mut self.recording else {
            return self.broker.handle(now, event);
        };
        let commands = self.broker.handle(now, event.clone());
        recording.add(Line::Memory(now, event, commands.clone()));
        commands
    }

    pub(super) fn forget(&mut self, tenant: TenantId) {
        self.activity.remove(&tenant);
        self.swapped_out.remove(&tenant);
        self.reasons.remove(&tenant);
        self.freezing.remove(&tenant);
        self.figures.remove(&tenant);
    }

    /// When [`Self::step`] has something to do although nothing happens.
    pub(super) fn due(&self, now: Micros) -> Option<Micros> {
        let freezing = (!self.freezing.is_empty()).then(|| now + FREEZING);
        self.broker.next_wakeup().into_iter().chain(freezing).min()
    }

    /// Something happened that concerns memory.
    pub(super) fn handle(&mut self, state: &mut State, event: Event) {
        let now = state.now();
        if self.broker.settles(now) {
            let changed = self.changed_activity(state, now);
            if !changed.is_empty() {
                self.pass(state, now, Event::Activity(changed));
            }
        }
        self.pass(state, now, event);
    }

    /// Has a user's request carried out; the answer comes when that is done.
    pub(super) fn request(
        &mut self,
        state: &mut State,
        event: impl FnOnce(u64) -> Event,
        answer: Answer<Result<(), MoveError>>,
    ) {
        self.requested += 1;
        let event = event(self.requested);
        if let Event::Sleep(tenant, request) | Event::Detain(tenant, request) = event {
            self.leaving.insert(request, tenant);
        }
        self.requests.insert(self.requested, answer);
        self.handle(state, event);
    }

    /// What a tenant's programs are shown of a device: free memory and capacity.
    pub(super) fn view(
        &mut self,
        state: &mut State,
        tenant: TenantId,
        device: String,
        total: u64,
    ) -> (u64, u64) {
        let view = Event::View {
            tenant,
            device,
            total,
        };
        self.handle(state, view);
        self.shown
    }

    /// Answers what a process is shown of a device's memory.
    pub(super) fn answer_view(
        &mut self,
        state: &mut State,
        session: SessionId,
        ticket: u32,
        device: String,
        total: u64,
    ) {
        let tenant = state.sessions.get(&session).map(|met| met.tenant);
        let (free, total) = tenant.map_or((0, 0), |tenant| self.view(state, tenant, device, total));
        let seen = Daemon::Seen {
            ticket,
            free,
            total,
        };
        state.send(session, &seen);
    }

    /// A process has connected: it hears where moved memory is kept.
    pub(super) fn greet(&self, state: &State, session: SessionId) {
        if let Some(rules) = &self.rules {
            state.send(session, rules);
        }
    }

    /// Lets the broker go on where time has passed or groups were frozen.
    pub(super) fn step(&mut self, state: &mut State) {
        let now = state.now();
        if (self.broker.next_wakeup()).is_some_and(|at| at <= now) {
            self.handle(state, Event::Tick);
        }
        for tenant in self.freezing.clone() {
            let result = match is_frozen(state, tenant) {
                Ok(false) => continue,
                Ok(true) => Ok(()),
                Err(why) => Err(why),
            };
            self.freezing.remove(&tenant);
            self.handle(state, Event::Frozen(tenant, result));
        }
    }

    fn pass(&mut self, state: &mut State, now: Micros, event: Event) {
        if let Event::Ask {
            process,
            ticket,
            ask,
        } = &event
        {
            let asked = (*ticket, ask.device.clone(), ask.need);
            self.asked.insert(*process, asked);
        }
        if let Event::Left(process) | Event::Lost(process) = &event {
            self.asked.remove(process);
        }
        let mut commands = self.decide(now, event);
        while !commands.is_empty() {
            let mut next = Vec::new();
            for command in commands {
                if let Some(failed) = self.carry_out(state, now, command) {
                    next.extend(self.decide(now, failed));
                }
            }
            commands = next;
        }
    }

    /// Does what the broker says; what failed at once is an event again.
    pub(super) fn carry_out(
        &mut self,
        state: &mut State,
        now: Micros,
        command: Command,
    ) -> Option<Event> {
        match command {
            Command::Order(process, op, order) => {
                let session = SessionId(process.0);
                // A gate that has been ordered to close must be ordered to open.
                if order == Order::Resume {
                    state.send_or_end(session, &message(op, order));
                    return None;
                }
                let early = |it: &Met| it.page.revision() < RECEIPTS;
                let message = match order {
                    Order::Trim if state.sessions.get(&session).is_some_and(early) => Daemon::Trim,
                    order => message(op, order),
                };
                let why = || Reply::Refused("it does not listen".into());
                let sent = state.send(session, &message);
                return (!sent).then(|| Event::Reply(process, op, why()));
            }
            Command::Grant {
                process,
                ticket,
                bytes,
            } => {
                let granted = Daemon::Granted { ticket, bytes };
                state.send_or_end(SessionId(process.0), &granted);
                self.granted(state, process, ticket, bytes);
            }
            Command::Shown { free, total, .. } => self.shown = (free, total),
            Command::Freeze(tenant) => {
                if let Some(reason) = self.reason(state, now, tenant) {
                    self.reasons.insert(tenant, reason);
                }
                self.park(state, tenant, true);
                self.freezing.insert(tenant);
            }
            Command::Thaw(tenant) => {
                self.freezing.remove(&tenant);
                self.reasons.remove(&tenant);
                self.park(state, tenant, false);
            }
            Command::Answer(request, result) => {
                let left = self.leaving.remove(&request).filter(|_| result.is_ok());
                // Its memory may have been there already.
                if let Some(tenant) = left.filter(|it| self.swapped_out.contains(it)) {
                    self.reasons.insert(tenant, SwapReason::Requested);
                }
                if let Some(answer) = self.requests.remove(&request) {
                    // The process that asked may have gone.
                    let _ = answer.send(result);
                }
            }
            Command::Moved {
                tenant,
                out,
                bytes,
                took,
            } => self.moved(state, tenant, out, bytes, took),
            Command::Failed(tenant, error) => {
                let lately = (self.told_full).is_some_and(|at| now < at + HOST_FULL_PAUSE);
                match error {
                    MoveError::HostFull(_) if lately => {}
                    MoveError::HostFull(_) => {
                        self.told_full = Some(now);
                        tracing::warn!(tenant = tenant.0, %error, "memory is not moved");
                    }
                    MoveError::Stuck => {
                        tracing::warn!(tenant = tenant.0, %error, "a move does not end");
                    }
                    error => tracing::info!(tenant = tenant.0, %error, "memory is not moved now"),
                }
            }
            Command::Silent(process) => {
                if let Some(met) = state.sessions.get(&SessionId(process.0)) {
                    state.report(Happening::Silent {
                        tenant: met.tenant,
                        pid: met.pid,
                        then: self.when_stopped,
                    });
                }
            }
            Command::NotKept(tenant, device, error) => {
                tracing::warn!(tenant = tenant.0, device, %error, "a guarantee of memory is not kept here");
            }
        }
        None
    }

    /// Why the broker has a tenant frozen, and then its memory moved to the host: the reason that is new, if it is known.
    fn reason(&self, state: &State, now: Micros, tenant: TenantId) -> Option<SwapReason> {
        if self.leaving.values().any(|it| *it == tenant) {
            return Some(SwapReason::Requested);
        }
        let lines = self.broker.lines();
        let mut entries = lines.iter().flat_map(|line| &line.entries);
        // More of it follows, or a daemon before this one has moved it.
        if entries.any(|(id, entry)| *id == tenant && entry.holding.swapped > 0) {
            return None;
        }
        let after = state.tenants.get(&tenant)?.sleep_after_s;
        let rests = self.activity.get(&tenant).filter(|it| !it.busy);
        let is_idle = rests.zip(after).is_some_and(|(rests, after)| {
            now.saturating_sub(rests.idle_since) >= Micros::from_secs(after)
        });
        Some(match is_idle {
            true => SwapReason::Idle,
            false => SwapReason::Needed,
        })
    }

    /// Reports a request that was denied because of the tenant's limit.
    fn granted(&mut self, state: &State, process: ProcessId, ticket: u32, bytes: u64) {
        let asked = self.asked.get(&process);
        if asked.is_none_or(|(of, ..)| *of != ticket) {
            return;
        }
        let Some((_, device, need)) = self.asked.remove(&process) else {
            return;
        };
        let met = state.sessions.get(&SessionId(process.0));
        let Some(tenant) = met.map(|met| met.tenant).filter(|_| bytes == 0) else {
            return;
        };
        let lines = self.broker.lines();
        let mut entries = (lines.iter().filter(|line| line.uuid == device))
            .flat_map(|line| line.entries.iter().filter(|(id, _)| *id == tenant));
        let exceeds = entries.find_map(|(_, entry)| {
            let limit = entry.share.limit;
            (need > limit.saturating_sub(entry.holding.all())).then_some(limit)
        });
        if let Some(limit) = exceeds {
            state.report(Happening::AtLimit { tenant, limit });
        }
    }

    /// Freezes a tenant until told otherwise, or lets it go on.
    pub(super) fn park(&mut self, state: &mut State, tenant: TenantId, swapped_out: bool) {
        match swapped_out {
            true => self.swapped_out.insert(tenant),
            false => self.swapped_out.remove(&tenant),
        };
        self.park_domains(state);
    }

    pub(super) fn park_domains(&self, state: &mut State) {
        let now = state.now();
        for domain in state.devices.values().flat_map(|it| it.domains.values()) {
            let swapped_out = self.swapped_out.contains(&domain.who.tenant);
            let event = controller::Event::SwappedOut(domain.who.id, swapped_out);
            state.controller.handle(now, event);
        }
    }

    /// What tenants do, of those of whom that has changed.
    fn changed_activity(&mut self, state: &State, now: Micros) -> Vec<(TenantId, Activity)> {
        let rests = |id: &TenantId| Activity {
            in_group: state.is_in_group(*id),
            ..Activity::default()
        };
        let mut all: BTreeMap<TenantId, Activity> =
            (state.tenants.keys()).map(|id| (*id, rests(id))).collect();
        for domain in state.domains() {
            let known = state.controller.domain(domain.who.id);
            let Some((activity, known)) = all.get_mut(&domain.who.tenant).zip(known) else {
                continue;
            };
            // As they are now, not as they were when last sampled.
            let busy = domain.demand() != Demand::Idle;
            let since = match known.state.demand {
                Demand::Idle => known.state.demand_since.max(domain.worked),
                _ => now,
            };
            activity.busy |= busy;
            activity.stopped |= domain.is_stopped();
            activity.idle_since = activity.idle_since.max(since);
        }
        all.retain(|id, activity| self.activity.get(id) != Some(activity));
        self.activity.extend(all.iter().map(|(id, it)| (*id, *it)));
        all.into_iter().collect()
    }

    /// For the records: memory of a tenant has moved.
    pub(super) fn moved(
        &mut self,
        state: &mut State,
        tenant: TenantId,
        out: bool,
        bytes: u64,
        took: Micros,
    ) {
        let took_us = took.0;
        let figures = self.figures.entry(tenant).or_default();
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
        state.report(Happening::Moved {
            tenant,
            out,
            bytes,
            took,
        });
        let took = Duration::from_micros(took_us);
        tracing::info!(tenant = tenant.0, out, bytes, ?took, "memory has moved");
        let now = state.now();
        // Wherever it has domains: once per device.
        for device in state.devices.values_mut() {
            let mut domains = device.domains.values();
            if let Some(domain) = domains.find(|it| it.who.tenant == tenant) {
                device.record.push(now, &Arc::clone(&domain.who), what);
            }
        }
    }
}

/// Half of the machine's memory in bytes, by `/proc/meminfo`; no bound where the kernel does not report it.
fn half_of_memory(text: &str) -> u64 {
    let line = text.lines().find_map(|it| it.strip_prefix("MemTotal:"));
    let number = line.and_then(|it| it.split_whitespace().next());
    let kib: Option<u64> = number.and_then(|it| it.parse().ok());
    kib.map_or(u64::MAX, |kib| kib * 1024 / 2)
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

/// Whether every group of a tenant is frozen, with all its members. An error names the control that failed.
fn is_frozen(state: &State, tenant: TenantId) -> Result<bool, String> {
    let mut own = state
        .domains()
        .filter(|it| it.who.tenant == tenant)
        .peekable();
    if own.peek().is_none() && state.is_in_group(tenant) {
        return Err("it has not joined its MPS group yet".into());
    }
    let mut frozen = true;
    for known in own.flat_map(|it| state.controller.together(it.who.id)) {
        if known.is_faulty() {
            let failed = state.domains().find(|it| it.who.id == known.state.id);
            let error = failed.and_then(|it| it.error.clone());
            return Err(error.unwrap_or_default());
        }
        frozen &= known.is_frozen();
    }
    Ok(frozen)
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
        Order::Trim => Daemon::GiveBack { op },
        Order::Take { device, bytes } => Daemon::Take { op, device, bytes },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Bytes;

    #[test]
    fn limit_is_half_of_the_machines_memory_unless_it_is_set() {
        let limit = |limit| {
            let rules = HostMemory {
                limit,
                ..HostMemory::default()
            };
            MemoryMoves::new(&rules, WhenStopped::Report)
                .broker
                .on_host()
                .1
        };
        let own = std::fs::read_to_string("/proc/meminfo").unwrap();
        assert_eq!(limit(None), half_of_memory(&own));
        assert_eq!(
            half_of_memory("MemTotal:       24 kB\nMemFree: 8 kB\n"),
            12 << 10
        );
        assert_eq!(half_of_memory(""), u64::MAX);
        assert_eq!(limit(Some(Bytes(4096))), 4096);
    }
}
