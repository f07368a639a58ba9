//! A small world for the broker: processes that answer promptly, late, never or with a refusal, in virtual time.
//!
//! It checks after every event what must always hold (see [`World::check`]).

mod orders;
mod sessions;

use std::{
    cell::Cell,
    collections::{BTreeMap, BTreeSet},
};

use gpumux_core::{
    Class, MemoryPolicy, Micros, TenantId,
    broker::{
        Activity, Ask, Broker, Command, Droppable, Event, MoveError, Mutation, Order, ProcessId,
        Reply, Standing, Terms,
    },
    ledger::{Holding, Kind, Share},
};

use orders::holds;

pub(crate) const DEVICE: &str = "GPU-1";
pub(crate) const GIB: u64 = 1 << 30;
thread_local! {
    /// The fault that brokers of this thread have.
    pub(crate) static MUTATION: Cell<Option<Mutation>> = const { Cell::new(None) };
}

/// Bytes per µs: 50 GB/s.
pub(crate) const LINK: u64 = 50_000;

/// How a process answers orders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Manner {
    Prompt,
    /// Its gate closes only after so long, since it makes host memory: what it has made stays when the order is given again.
    Slow(Micros),
    /// Its gate never closes, and it says so after so long.
    Refuses(Micros),
    /// It is stopped: nothing is answered.
    Stopped,
    /// A copy of it waits for a peer: its gate closes once all were open again.
    Behind,
    /// It answers that it moved, but moves nothing.
    MovesNothing,
    /// It refuses to move once it is frozen.
    RefusesToMove,
    /// The driver has no memory for it this often when it comes back.
    CannotReturn(u32),
    /// The driver has no memory for it until then.
    CannotReturnBefore(Micros),
}

#[derive(Clone, Debug)]
pub(crate) struct Puppet {
    pub(crate) tenant: TenantId,
    pub(crate) holding: Holding,
    /// Of what it was granted, what it does not use: it cannot be moved, only given back.
    pub(crate) unused: u64,
    /// How long it takes to give that back.
    pub(crate) trim: Micros,
    /// Of what moves, what needs no copy.
    pub(crate) droppable: Droppable,
    pub(crate) manner: Manner,
    /// Its program gives what it is asked for.
    pub(crate) gives: bool,
    /// Orders that came while it was stopped.
    mailbox: Vec<(u64, Order)>,
    /// When one that is slow is ready.
    ready: Option<Micros>,
    pub(crate) closed: bool,
    kept: u64,
    /// How often it has said what it has.
    told: u64,
}

enum Due {
    Event(Event),
    /// A process's packet comes.
    Arrival(Event),
    /// A process receives an order, or what it was granted.
    Order(ProcessId, u64, Order),
    Grant(ProcessId, u32, u64),
    /// So much of it has moved, or was freed: what is movable, and what is on the host.
    Moved(ProcessId, i64, i64),
    /// A process gives back what it does not use, and says what it has.
    Trim(ProcessId, u64),
    /// It closes its gate for the order of this name, and whether it has no work; so much is to be moved, and so much may be kept.
    Close(ProcessId, (u64, bool), (u64, u64)),
}

pub(crate) struct World {
    pub(crate) now: Micros,
    /// By so much less is the broker's time.
    earlier: Micros,
    /// How long packets are on their way, in both directions. Set before there are processes.
    pub(crate) latency: Micros,
    pub(crate) broker: Broker,
    pub(crate) puppets: BTreeMap<ProcessId, Puppet>,
    pub(crate) busy: BTreeMap<TenantId, bool>,
    idle_since: BTreeMap<TenantId, Micros>,
    pub(crate) in_group: BTreeSet<TenantId>,
    pub(crate) frozen: BTreeSet<TenantId>,
    /// Tenants that cannot be frozen: that is known only after so long.
    pub(crate) unfreezable: BTreeMap<TenantId, Micros>,
    queue: BTreeMap<(Micros, u64), Due>,
    sequence: u64,
    pub(crate) capacity: u64,
    /// What the driver has not freed of processes that have ended.
    pub(crate) unfreed: u64,
    pub(crate) answers: BTreeMap<u64, Result<(), MoveError>>,
    pub(crate) grants: BTreeMap<(ProcessId, u32), u64>,
    shown: Option<(u64, u64)>,
    asked: BTreeMap<(ProcessId, u32), u64>,
    /// How often the process had said what it has when it asked.
    told: BTreeMap<(ProcessId, u32), u64>,
    pub(crate) moves: Vec<(Micros, TenantId, bool, u64)>,
    /// Whose moves failed.
    pub(crate) failed: Vec<TenantId>,
    /// Processes that did not answer although others were guaranteed what they have, and when that was reported.
    pub(crate) silent: Vec<(Micros, ProcessId)>,
    pub(crate) orders: u64,
    /// Bytes that were freed without a copy, and when.
    pub(crate) drops: Vec<(Micros, TenantId, u64)>,
    /// Which programs were asked to give memory, and when.
    pub(crate) reclaims: Vec<(Micros, ProcessId)>,
    /// Since when a tenant waits although there is room for it.
    starved: BTreeMap<TenantId, Micros>,
    pub(crate) longest_starved: Micros,
    /// Since when it waits, room or not.
    waits: BTreeMap<TenantId, Micros>,
    pub(crate) longest_wait: BTreeMap<TenantId, Micros>,
}

impl World {
    pub(crate) fn new(capacity: u64) -> Self {
        Self::with_host(capacity, u64::MAX)
    }

    pub(crate) fn with_host(capacity: u64, host: u64) -> Self {
        let mut world = Self::before_a_look(capacity, host);
        world.measure();
        world
    }

    /// The driver has reported no device yet.
    pub(crate) fn before_a_look(capacity: u64, host: u64) -> Self {
        Self {
            now: Micros::from_secs(1000),
            earlier: Micros::ZERO,
            latency: Micros::ZERO,
            broker: new_broker(host),
            puppets: BTreeMap::new(),
            busy: BTreeMap::new(),
            idle_since: BTreeMap::new(),
            in_group: BTreeSet::new(),
            frozen: BTreeSet::new(),
            unfreezable: BTreeMap::new(),
            queue: BTreeMap::new(),
            sequence: 0,
            capacity,
            unfreed: 0,
            answers: BTreeMap::new(),
            grants: BTreeMap::new(),
            shown: None,
            asked: BTreeMap::new(),
            told: BTreeMap::new(),
            moves: Vec::new(),
            failed: Vec::new(),
            silent: Vec::new(),
            orders: 0,
            drops: Vec::new(),
            reclaims: Vec::new(),
            starved: BTreeMap::new(),
            longest_starved: Micros::ZERO,
            waits: BTreeMap::new(),
            longest_wait: BTreeMap::new(),
        }
    }

    /// What the driver would report.
    pub(crate) fn measure(&mut self) {
        let held = self.puppets.values();
        let held: u64 = held.map(|it| it.holding.resident() - it.unused).sum();
        let used = held + self.unfreed;
        let (uuid, capacity) = (DEVICE.to_owned(), self.capacity);
        self.event(Event::Device {
            uuid,
            capacity,
            used,
        });
    }

    /// A tenant with one process that has the tenant's number.
    pub(crate) fn tenant(&mut self, id: u64, class: Class, guaranteed: u64) -> ProcessId {
        self.terms(id, class, guaranteed);
        self.process(id, id)
    }

    /// A tenant without a process.
    pub(crate) fn terms(&mut self, id: u64, class: Class, guaranteed: u64) {
        let terms = Terms {
            class,
            share: Share {
                guaranteed,
                limit: u64::MAX,
            },
            policy: MemoryPolicy::SwapOthers,
            sleep_after: None,
        };
        self.event(Event::Tenant(TenantId(id), terms));
        self.set_busy(id, false);
    }

    pub(crate) fn process(&mut self, process: u64, tenant: u64) -> ProcessId {
        let (process, tenant) = (ProcessId(process), TenantId(tenant));
        let puppet = Puppet {
            tenant,
            holding: Holding::default(),
            unused: 0,
            trim: Micros(100),
            droppable: Droppable::default(),
            manner: Manner::Prompt,
            gives: false,
            mailbox: Vec::new(),
            ready: None,
            closed: false,
            kept: 0,
            told: 0,
        };
        self.puppets.insert(process, puppet);
        self.event(Event::Joined(process, tenant));
        if self.latency > Micros::ZERO {
            self.event(Event::Confirms(process));
        }
        process
    }

    pub(crate) fn set_policy(&mut self, tenant: u64, policy: MemoryPolicy) {
        let terms = Terms {
            class: Class::Standard,
            share: Share::default(),
            policy,
            sleep_after: None,
        };
        self.event(Event::Tenant(TenantId(tenant), terms));
    }

    pub(crate) fn set_busy(&mut self, tenant: u64, busy: bool) {
        let tenant = TenantId(tenant);
        if self.busy.insert(tenant, busy) != Some(busy) {
            self.idle_since.insert(tenant, self.now);
            self.event(Event::Activity(vec![(tenant, self.activity(tenant))]));
        }
    }

    fn activity(&self, tenant: TenantId) -> Activity {
        let since = self.idle_since.get(&tenant).copied().unwrap_or(self.now);
        Activity {
            busy: self.busy.get(&tenant).copied().unwrap_or(false),
            idle_since: since.saturating_sub(self.earlier),
            in_group: self.in_group.contains(&tenant),
            stopped: (self.puppets.values())
                .any(|it| it.tenant == tenant && it.manner == Manner::Stopped),
        }
    }

    pub(crate) fn ask(&mut self, process: ProcessId, ticket: u32, bytes: u64) {
        self.asked.insert((process, ticket), bytes);
        let told = self.puppets.get(&process).map_or(0, |it| it.told);
        self.told.insert((process, ticket), told);
        let ask = Ask {
            device: DEVICE.to_owned(),
            total: self.capacity,
            need: bytes,
            want: bytes,
            kind: Kind::Movable,
            part: None,
        };
        self.send(Event::Ask {
            process,
            ticket,
            ask,
        });
    }

    /// Asks for so much and waits until that is answered. What was granted.
    pub(crate) fn allocate(&mut self, process: u64, bytes: u64) -> u64 {
        let process = ProcessId(process);
        let ticket = self.grants.len() as u32 + 1000;
        self.ask(process, ticket, bytes);
        let patience = self.now + Micros::from_secs(400);
        while !self.grants.contains_key(&(process, ticket)) && self.now < patience {
            self.run_for(Micros::from_millis(10));
        }
        self.grants.get(&(process, ticket)).copied().unwrap_or(0)
    }

    /// A process frees so much, if it has that on the device and may touch it.
    pub(crate) fn free(&mut self, process: u64, bytes: u64) {
        let process = ProcessId(process);
        let frees = |it: &Puppet| !it.closed && it.holding.movable - it.unused >= bytes;
        if self.puppets.get(&process).is_some_and(frees) {
            self.moved(process, -(bytes as i64), 0);
        }
    }

    /// It uses so much less of what it was granted, until leases are asked back.
    pub(crate) fn leave_unused(&mut self, process: u64, bytes: u64) {
        let puppet = self.puppets.get_mut(&ProcessId(process));
        if let Some(it) = puppet.filter(|it| !it.closed && it.holding.movable - it.unused >= bytes)
        {
            it.unused += bytes;
        }
    }

    /// Whether it has asked for memory and has no answer.
    pub(crate) fn waits_for_answer(&self, process: u64) -> bool {
        self.asked.keys().any(|(it, _)| it.0 == process)
    }

    /// A process reports what of its memory needs no copy.
    pub(crate) fn offer(&mut self, process: u64, free: u64, cached: u64) {
        let (process, droppable) = (ProcessId(process), Droppable { free, cached });
        if let Some(puppet) = self.puppets.get_mut(&process) {
            puppet.droppable = droppable;
        }
        self.event(Event::Droppable {
            process,
            device: DEVICE.to_owned(),
            droppable,
        });
    }

    /// The driver has no memory for a process although it was granted: what the broker answers.
    pub(crate) fn missing(&mut self, process: u64) -> u64 {
        let (process, ticket) = (ProcessId(process), u32::MAX);
        self.event(Event::Missing { process, ticket });
        self.grants.remove(&(process, ticket)).expect("an answer")
    }

    /// What a program of a tenant is shown: free memory and capacity.
    pub(crate) fn view(&mut self, tenant: u64) -> (u64, u64) {
        self.event(Event::View {
            tenant: TenantId(tenant),
            device: DEVICE.to_owned(),
            total: self.capacity,
        });
        self.shown.take().expect("an answer")
    }

    pub(crate) fn run_for(&mut self, time: Micros) {
        let end = self.now + time;
        loop {
            let next = self.queue.first_key_value().map(|((at, _), _)| *at);
            let wakeup = self.broker.next_wakeup().map(|at| at + self.earlier);
            let Some(at) = next.into_iter().chain(wakeup).min().filter(|at| *at <= end) else {
                break;
            };
            self.now = self.now.max(at);
            // As the daemon does, pages are looked at whenever the broker is.
            let tenants = self.busy.keys();
            let all = tenants.map(|id| (*id, self.activity(*id))).collect();
            let commands = self.handle(Event::Activity(all));
            self.carry_out(commands);
            let due = self
                .queue
                .first_key_value()
                .map(|(key, _)| *key)
                .filter(|key| key.0 <= at);
            match due.and_then(|key| self.queue.remove(&key)) {
                Some(Due::Event(event @ Event::Frozen(..))) => self.event(event),
                Some(Due::Event(event)) => self.send(event),
                Some(Due::Arrival(event)) => self.arrive(event),
                Some(Due::Order(process, op, order)) => self.deliver(process, op, order),
                Some(Due::Grant(process, ticket, bytes)) => self.granted(process, ticket, bytes),
                Some(Due::Moved(process, movable, swapped)) => {
                    self.moved(process, movable, swapped);
                }
                Some(Due::Trim(process, op)) => self.trim(process, op),
                Some(Due::Close(process, op, bytes)) => self.close(process, op, bytes),
                None => self.event(Event::Tick),
            }
        }
        self.now = end;
    }

    fn handle(&mut self, event: Event) -> Vec<Command> {
        let now = self.now.saturating_sub(self.earlier);
        self.broker.handle(now, event)
    }

    /// From now on all that the broker remembers is at most `horizon` after its origin of time.
    pub(crate) fn rebase(&mut self, horizon: Micros) {
        let now = self.now.saturating_sub(self.earlier);
        self.broker.rebase(now, horizon);
        self.earlier = self.now.saturating_sub(horizon);
    }

    pub(crate) fn event(&mut self, event: Event) {
        if let Event::Reply(process, ..) | Event::Holds { process, .. } = &event
            && !self.puppets.contains_key(process)
        {
            return;
        }
        self.note(&event);
        self.arrive(event);
    }

    /// A move happens when it is reported.
    fn note(&mut self, event: &Event) {
        if let Event::Holds {
            process, holding, ..
        } = event
            && let Some(puppet) = self.puppets.get_mut(process)
        {
            puppet.holding = *holding;
            puppet.told += 1;
        }
    }

    fn arrive(&mut self, event: Event) {
        let commands = self.handle(event);
        self.carry_out(commands);
        self.check();
    }

    /// A process sends a packet.
    fn send(&mut self, event: Event) {
        if self.latency == Micros::ZERO {
            return self.event(event);
        }
        self.note(&event);
        self.due(self.latency, Due::Arrival(event));
    }

    /// What a process has changes by this, and it reports that.
    fn moved(&mut self, process: ProcessId, movable: i64, swapped: i64) {
        let Some(puppet) = self.puppets.get_mut(&process) else {
            return;
        };
        let holding = &mut puppet.holding;
        holding.movable = (holding.movable.checked_add_signed(movable)).expect("so much was there");
        holding.swapped = (holding.swapped.checked_add_signed(swapped)).expect("so much was there");
        let holding = *holding;
        self.send(holds(process, self.capacity, holding));
    }

    /// What a process asked for has come.
    fn granted(&mut self, process: ProcessId, ticket: u32, bytes: u64) {
        let told = self.told.remove(&(process, ticket));
        let Some(puppet) = self.puppets.get_mut(&process) else {
            return;
        };
        if ticket != u32::MAX {
            puppet.holding.movable += bytes;
        }
        let (holding, lacked) = (puppet.holding, told != Some(puppet.told));
        self.grants.insert((process, ticket), bytes);
        self.asked.remove(&(process, ticket));
        if self.latency > Micros::ZERO {
            self.send(Event::Received(process, ticket));
            // What it said meanwhile was without this.
            if bytes > 0 && lacked {
                self.send(holds(process, self.capacity, holding));
            }
        }
    }

    fn later(&mut self, delay: Micros, event: Event) {
        self.due(delay, Due::Event(event));
    }

    fn due(&mut self, delay: Micros, due: Due) {
        self.sequence += 1;
        self.queue.insert((self.now + delay, self.sequence), due);
    }

    pub(crate) fn report(&mut self, process: ProcessId, holding: Holding, delay: Micros) {
        self.later(delay, holds(process, self.capacity, holding));
    }

    pub(crate) fn standing(&self, tenant: u64) -> Standing {
        let mut all = self.broker.standings();
        all.find(|(id, _)| *id == TenantId(tenant))
            .expect("it is there")
            .1
    }

    pub(crate) fn is_home(&self, tenant: u64) -> bool {
        !self.standing(tenant).swapped_out
    }

    pub(crate) fn swapped(&self, tenant: u64) -> u64 {
        let own = self
            .puppets
            .values()
            .filter(|it| it.tenant == TenantId(tenant));
        own.map(|it| it.holding.swapped).sum()
    }

    /// What must always hold.
    fn check(&mut self) {
        let Some(line) = self.broker.lines().into_iter().next() else {
            return;
        };
        let resident: u64 = self.puppets.values().map(|it| it.holding.resident()).sum();
        assert!(
            resident <= self.capacity - line.occupied,
            "more than there is: {resident} of {} at {}",
            self.capacity - line.occupied,
            self.now
        );
        let accounted: u64 = line
            .entries
            .iter()
            .map(|(_, it)| it.holding.resident())
            .sum();
        assert!(
            accounted >= resident,
            "{accounted} accounted for, {resident} in use"
        );
        let standings: Vec<(TenantId, Standing)> = self.broker.standings().collect();
        for (id, standing) in standings {
            let entry = line.entries.iter().find(|(it, _)| *it == id);
            let lacks = entry.map_or(0, |(_, it)| it.holding.swapped);
            let waits = standing.waits && standing.swapped_out && !standing.stuck;
            let since = |map: &mut BTreeMap<TenantId, Micros>, so: bool, now: Micros| match so {
                true => now.saturating_sub(*map.entry(id).or_insert(now)),
                false => {
                    map.remove(&id);
                    Micros::ZERO
                }
            };
            let starved = since(
                &mut self.starved,
                waits && lacks > 0 && lacks <= line.free,
                self.now,
            );
            self.longest_starved = self.longest_starved.max(starved);
            let waited = since(&mut self.waits, waits, self.now);
            let longest = self.longest_wait.entry(id).or_default();
            *longest = (*longest).max(waited);
        }
    }
}

fn new_broker(host: u64) -> Broker {
    let broker = Broker::new(host);
    match MUTATION.get() {
        Some(mutation) => broker.mutated(mutation),
        None => broker,
    }
}
