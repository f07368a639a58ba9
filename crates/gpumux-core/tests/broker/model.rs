//! Every order of events in small worlds, with failures up to a budget.
//!
//! Time moves only where the broker wants to be woken; everything older than [`HORIZON`] counts as equally old, so that the
//! worlds are finite. What must happen is stated as what must not be true for longer than a bound: a checker's "eventually" would
//! miss that two tenants chase each other without end.

pub(crate) mod every_order;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use gpumux_core::{
    Class, MemoryPolicy, Micros, TenantId,
    broker::{
        Activity, Ask, Broker, Command, Droppable, Event, LOOK, MEET, Order, Part, ProcessId,
        Reply, Terms, overhead,
    },
    ledger::{Holding, Kind, Share},
};
use stateright::{Checker, Model, Property};

use super::world::MUTATION;

/// All that the broker looks back to: ten turns, and the patience of a class.
const HORIZON: Micros = Micros::from_secs(60);
/// Rank *n* of a tenant is on device *n*.
const DEVICES: [&str; 2] = ["GPU-1", "GPU-2"];
const MIB: u64 = 1 << 20;

/// One small world.
#[derive(Clone, Debug)]
struct World {
    /// What tenants can have together, in MiB.
    room: u64,
    /// Their classes, guarantees and sizes in MiB, of each device.
    tenants: Vec<(Class, u64, u64)>,
    /// Processes of each tenant, on a device each. Of several each asks for its part when it likes.
    ranks: u64,
    /// Of the last one, what is free and what is cached in MiB: it needs no copy.
    droppable: (u64, u64),
    /// Packets may cross: each is on its way until an action has it arrive.
    crosses: bool,
    /// How often processes may refuse, be late, end, or change whether they work.
    refusals: u8,
    lateness: u8,
    deaths: u8,
    toggles: u8,
    /// No tenant with work waits longer, without failures.
    patience: Micros,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Process {
    tenant: TenantId,
    device: &'static str,
    /// What it asks for yet.
    asks: u64,
    /// Since when it waits for the answer.
    asked: Option<Micros>,
    holding: Holding,
    droppable: u64,
    /// What was freed without a copy.
    dropped: u64,
    busy: bool,
    idle_since: Micros,
    pending: Option<(u64, Order)>,
    /// It has said what it has since it asked.
    said: bool,
    /// Packets to it, and by it, that are on their way.
    inbox: VecDeque<Command>,
    outbox: VecDeque<Event>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct State {
    broker: Broker,
    processes: BTreeMap<u64, Process>,
    frozen: BTreeSet<TenantId>,
    freezing: BTreeSet<TenantId>,
    /// Since when each waits to come back, and since when although there is room.
    waits: BTreeMap<TenantId, Micros>,
    starves: BTreeMap<TenantId, Micros>,
    refusals: u8,
    lateness: u8,
    deaths: u8,
    toggles: u8,
    broken: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Action {
    /// Nothing happens until the broker wants to be woken.
    Wait,
    Ask(u64),
    /// A process receives its oldest packet, or the broker the oldest of it.
    Receive(u64),
    Arrive(u64),
    Answer(u64),
    Refuse(u64),
    Freeze(TenantId),
    Toggle(u64),
    Die(u64),
}

/// Time in every state: events are since then.
const NOW: Micros = HORIZON;

impl World {
    /// Whether the others' guarantees leave enough for a tenant. Else it waits while their owners work.
    fn fits(&self, n: u64) -> bool {
        let others = (0..).zip(&self.tenants).filter(|(other, _)| *other != n);
        let kept: u64 = others.map(|(_, (_, guaranteed, _))| guaranteed).sum();
        kept + self.tenants[n as usize].2 <= self.room
    }

    fn capacity(&self) -> u64 {
        (0..4).fold(self.room * MIB, |all, _| self.room * MIB + overhead(all))
    }

    fn devices(&self) -> &[&'static str] {
        &DEVICES[..self.ranks as usize]
    }

    fn terms(&self, n: u64) -> Terms {
        let (class, guaranteed, _) = self.tenants[n as usize];
        Terms {
            class,
            share: Share {
                guaranteed: guaranteed * MIB,
                limit: u64::MAX,
            },
            policy: MemoryPolicy::SwapOthers,
            sleep_after: None,
        }
    }
}

impl Process {
    /// A packet of it is on its way.
    fn travels(&self) -> bool {
        !(self.inbox.is_empty() && self.outbox.is_empty())
    }

    /// All that it has, with what is on its way to it.
    fn has(&self) -> u64 {
        let comes = |it: &Command| match it {
            Command::Grant { bytes, .. } => *bytes,
            _ => 0,
        };
        let comes: u64 = self.inbox.iter().map(comes).sum();
        self.holding.all() + self.dropped + comes
    }

    /// It reports what it has.
    fn say(&mut self, id: u64) {
        self.said = self.asked.is_some();
        self.outbox.push_back(Event::Holds {
            process: ProcessId(id),
            device: self.device.to_owned(),
            total: 0,
            holding: self.holding,
        });
    }
}

impl State {
    fn event(&mut self, event: Event) {
        for command in self.broker.handle(NOW, event) {
            self.carry_out(command);
        }
    }

    fn carry_out(&mut self, command: Command) {
        match command {
            Command::Order(process, ..) | Command::Grant { process, .. } => {
                if let Some(it) = self.processes.get_mut(&process.0) {
                    it.inbox.push_back(command);
                }
            }
            Command::Freeze(tenant) => {
                self.frozen.insert(tenant);
                self.freezing.insert(tenant);
            }
            Command::Thaw(tenant) => {
                self.frozen.remove(&tenant);
                self.freezing.remove(&tenant);
                let mut own = self.processes.values().filter(|it| it.tenant == tenant);
                if own.any(|it| it.holding.swapped > 0) {
                    self.broken = Some(format!("{tenant:?} runs while its memory is away"));
                }
            }
            Command::Answer(..)
            | Command::Moved { .. }
            | Command::Shown { .. }
            | Command::Failed(..)
            | Command::Silent(_)
            | Command::NotKept(..) => {}
        }
    }

    /// A process receives a packet.
    fn receive(&mut self, id: u64) {
        let Some(it) = self.processes.get_mut(&id) else {
            return;
        };
        match it.inbox.pop_front() {
            Some(Command::Grant { bytes, ticket, .. }) => {
                it.holding.movable += bytes;
                it.asked = None;
                it.outbox.push_back(Event::Received(ProcessId(id), ticket));
                // What it said meanwhile was without this.
                if std::mem::take(&mut it.said) && bytes > 0 {
                    it.say(id);
                }
            }
            Some(Command::Order(_, op, Order::Trim)) => {
                it.say(id);
                let done = Event::Reply(ProcessId(id), op, Reply::Done);
                it.outbox.push_back(done);
            }
            Some(Command::Order(_, _, Order::DropHost | Order::Resume)) => {}
            Some(Command::Order(_, op, order)) => {
                let moves = matches!(order, Order::Out { .. } | Order::Take { .. });
                if moves && !self.frozen.contains(&it.tenant) {
                    self.broken = Some(format!("{:?} is moved while it runs", it.tenant));
                }
                it.pending = Some((op, order));
            }
            _ => {}
        }
    }

    /// The broker receives a packet of this process.
    fn arrive(&mut self, id: u64) {
        let process = self.processes.get_mut(&id);
        if let Some(event) = process.and_then(|it| it.outbox.pop_front()) {
            self.event(event);
        }
    }

    /// All packets arrive.
    fn settle(&mut self) {
        while let Some((id, it)) = self.processes.iter().find(|(_, it)| it.travels()) {
            match (*id, it.outbox.is_empty()) {
                (id, true) => self.receive(id),
                (id, false) => self.arrive(id),
            }
        }
    }

    fn activity(&self) -> Event {
        let mut all: BTreeMap<TenantId, Activity> = BTreeMap::new();
        for it in self.processes.values() {
            let activity = all.entry(it.tenant).or_default();
            activity.busy |= it.busy;
            activity.idle_since = activity.idle_since.max(it.idle_since);
        }
        Event::Activity(all.into_iter().collect())
    }

    /// A process does what it was ordered to.
    fn answer(&mut self, id: u64) {
        let Some(process) = self.processes.get_mut(&id) else {
            return;
        };
        let Some((op, order)) = process.pending.take() else {
            return;
        };
        let idle = !process.busy;
        let before = process.holding;
        match order {
            Order::Out { least, .. } => {
                let bytes = before.movable.min(least);
                process.holding.movable -= bytes;
                process.holding.swapped += bytes;
            }
            Order::Take { bytes, .. } => {
                let bytes = bytes.min(process.droppable);
                process.holding.movable -= bytes;
                process.droppable -= bytes;
                process.dropped += bytes;
            }
            Order::In => {
                process.holding.movable += before.swapped;
                process.holding.swapped = 0;
            }
            _ => {}
        }
        let reply = match order {
            Order::Quiesce { .. } => Reply::Quiet(idle),
            _ => Reply::Done,
        };
        if process.holding != before {
            let (free, cached) = (process.droppable, 0);
            process.outbox.push_back(Event::Droppable {
                process: ProcessId(id),
                device: process.device.to_owned(),
                droppable: Droppable { free, cached },
            });
            process.say(id);
        }
        let reply = Event::Reply(ProcessId(id), op, reply);
        process.outbox.push_back(reply);
    }

    /// A process asks for all that it needs.
    fn ask(&mut self, world: &World, id: u64) {
        let Some(process) = self.processes.get_mut(&id) else {
            return;
        };
        let need = std::mem::take(&mut process.asks);
        process.asked = Some(NOW);
        let ask = Ask {
            device: process.device.to_owned(),
            total: world.capacity(),
            need,
            want: need,
            kind: Kind::Movable,
            part: (world.ranks > 1).then_some(Part {
                of: 1,
                parts: world.ranks as u32,
            }),
        };
        process.outbox.push_back(Event::Ask {
            process: ProcessId(id),
            ticket: 1,
            ask,
        });
    }

    /// Everything is so much longer ago.
    fn pass(&mut self, time: Micros) {
        self.broker.rebase(NOW + time, HORIZON);
        for process in self.processes.values_mut() {
            process.idle_since = process.idle_since.saturating_sub(time);
            process.asked = process.asked.map(|it| it.saturating_sub(time));
        }
        for since in self.waits.values_mut().chain(self.starves.values_mut()) {
            *since = since.saturating_sub(time);
        }
    }

    /// Notes which tenants wait, and what is wrong.
    fn look(&mut self, world: &World) {
        let lines = self.broker.lines();
        for line in &lines {
            let own = self.processes.values().filter(|it| it.device == line.uuid);
            let resident: u64 = own.map(|it| it.holding.resident()).sum();
            if resident > line.capacity - line.occupied {
                self.broken = Some(format!(
                    "{resident} bytes of {}",
                    line.capacity - line.occupied
                ));
            }
        }
        self.look_at_parts(world);
        let standings: Vec<_> = self.broker.standings().collect();
        for (id, standing) in standings {
            let returns = lines.iter().all(|line| {
                let entry = line.entries.iter().find(|(it, _)| *it == id);
                entry.map_or(0, |(_, entry)| entry.holding.swapped) <= line.free
            });
            // By what the process does, not by what the broker takes it to want.
            let busy = (self.processes.values()).any(|it| it.tenant == id && it.busy);
            let waits = busy && standing.swapped_out && !standing.stuck;
            let note = |map: &mut BTreeMap<TenantId, Micros>, so: bool| match so {
                true => *map.entry(id).or_insert(NOW),
                false => {
                    map.remove(&id);
                    NOW
                }
            };
            let starves = note(&mut self.starves, waits && returns);
            if NOW.saturating_sub(starves) > Micros::from_secs(2) {
                self.broken = Some(format!("{id:?} waits although there is room"));
            }
            let waits = note(&mut self.waits, waits);
            if NOW.saturating_sub(waits) > world.patience && world.fits(id.0) {
                self.broken = Some(format!("{id:?} waits without end"));
            }
        }
    }

    /// The ranks of a tenant have their parts together, and none waits for one that has ended.
    fn look_at_parts(&mut self, world: &World) {
        for n in 0..world.tenants.len() as u64 {
            let own = (self.processes.values()).filter(|it| it.tenant == TenantId(n));
            let own: Vec<&Process> = own.collect();
            let all = own.iter().map(|it| it.has());
            let (least, most) = (all.clone().min(), all.max());
            let whole = own.len() as u64 == world.ranks;
            if least != most && whole {
                self.broken = Some(format!("one rank has {least:?}, another {most:?}"));
            }
            let asked = own.iter().filter_map(|it| it.asked).min();
            let all_ask = own.iter().all(|it| it.asks == 0);
            let waited = asked.map_or(Micros::ZERO, |since| NOW.saturating_sub(since));
            if waited > MEET + LOOK && !whole {
                self.broken = Some("a rank waits for one that has ended".into());
            }
            if waited > world.patience && all_ask && world.fits(n) {
                self.broken = Some(format!("the request of {n} waits without end"));
            }
        }
    }
}

impl Model for World {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let mut state = State {
            broker: match MUTATION.get() {
                Some(mutation) => Broker::new(u64::MAX).mutated(mutation),
                None => Broker::new(u64::MAX),
            },
            processes: BTreeMap::new(),
            frozen: BTreeSet::new(),
            freezing: BTreeSet::new(),
            waits: BTreeMap::new(),
            starves: BTreeMap::new(),
            refusals: self.refusals,
            lateness: self.lateness,
            deaths: self.deaths,
            toggles: self.toggles,
            broken: None,
        };
        for uuid in self.devices() {
            state.event(Event::Device {
                uuid: (*uuid).to_owned(),
                capacity: self.capacity(),
                used: 0,
            });
        }
        for n in 0..self.tenants.len() as u64 {
            state.event(Event::Tenant(TenantId(n), self.terms(n)));
        }
        for id in 0..self.tenants.len() as u64 * self.ranks {
            let n = id / self.ranks;
            let process = Process {
                tenant: TenantId(n),
                device: DEVICES[(id % self.ranks) as usize],
                asks: self.tenants[n as usize].2 * MIB,
                asked: None,
                holding: Holding::default(),
                droppable: 0,
                dropped: 0,
                busy: true,
                idle_since: NOW,
                pending: None,
                said: false,
                inbox: VecDeque::new(),
                outbox: VecDeque::new(),
            };
            state.processes.insert(id, process);
            state.event(Event::Joined(ProcessId(id), TenantId(n)));
            state.event(Event::Confirms(ProcessId(id)));
        }
        let activity = state.activity();
        state.event(activity);
        let (free, cached) = (self.droppable.0 * MIB, self.droppable.1 * MIB);
        let last = self.tenants.len() as u64 - 1;
        for (rank, device) in self.devices().iter().enumerate() {
            let last = last * self.ranks + rank as u64;
            if let Some(process) = state.processes.get_mut(&last) {
                process.droppable = free + cached;
            }
            state.event(Event::Droppable {
                process: ProcessId(last),
                device: (*device).to_owned(),
                droppable: Droppable { free, cached },
            });
        }
        // All at the same moment; an owner of a guarantee after the tenants that borrow from it.
        if self.ranks == 1 {
            for id in (0..self.tenants.len() as u64).rev() {
                state.ask(self, id);
                if !self.crosses {
                    state.settle();
                }
            }
        }
        vec![state]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        let mut prompt = false;
        for (id, process) in &state.processes {
            if !process.inbox.is_empty() {
                prompt = true;
                actions.push(Action::Receive(*id));
            }
            if !process.outbox.is_empty() {
                prompt = true;
                actions.push(Action::Arrive(*id));
            }
            if process.pending.is_some() {
                prompt = true;
                actions.push(Action::Answer(*id));
                if state.refusals > 0 {
                    actions.push(Action::Refuse(*id));
                }
            }
            if process.asks > 0 {
                prompt = true;
                actions.push(Action::Ask(*id));
            }
            if state.toggles > 0 {
                actions.push(Action::Toggle(*id));
            }
            if state.deaths > 0 {
                actions.push(Action::Die(*id));
            }
        }
        for tenant in &state.freezing {
            prompt = true;
            actions.push(Action::Freeze(*tenant));
        }
        // Answers come at once, but for those that are late.
        if !prompt || state.lateness > 0 {
            actions.push(Action::Wait);
        }
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut state = last.clone();
        match action {
            Action::Wait => {
                let at = state.broker.next_wakeup()?;
                let late = |it: &Process| it.pending.is_some() || it.asks > 0 || it.travels();
                if state.processes.values().any(late) || !state.freezing.is_empty() {
                    state.lateness -= 1;
                }
                state.pass(at.saturating_sub(NOW).max(Micros(1000)));
                let activity = state.activity();
                state.event(activity);
                state.event(Event::Tick);
            }
            Action::Receive(id) => state.receive(id),
            Action::Arrive(id) => state.arrive(id),
            Action::Ask(id) => state.ask(self, id),
            Action::Answer(id) => state.answer(id),
            Action::Refuse(id) => {
                state.refusals -= 1;
                let (op, _) = state.processes.get_mut(&id)?.pending.take()?;
                let reply = Reply::Refused("not now".into());
                let process = state.processes.get_mut(&id)?;
                let reply = Event::Reply(ProcessId(id), op, reply);
                process.outbox.push_back(reply);
            }
            Action::Freeze(tenant) => {
                state.freezing.remove(&tenant);
                state.event(Event::Frozen(tenant, Ok(())));
            }
            Action::Toggle(id) => {
                state.toggles -= 1;
                let process = state.processes.get_mut(&id)?;
                process.busy = !process.busy;
                process.idle_since = NOW;
                let activity = state.activity();
                state.event(activity);
            }
            Action::Die(id) => {
                state.deaths -= 1;
                let tenant = state.processes.remove(&id)?.tenant;
                if !state.processes.values().any(|it| it.tenant == tenant) {
                    state.waits.remove(&tenant);
                    state.starves.remove(&tenant);
                }
                state.event(Event::Left(ProcessId(id)));
            }
        }
        if !self.crosses {
            state.settle();
        }
        // Names of orders do not matter, and would make every state another.
        state.rename();
        state.look(self);
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("nothing is wrong", |_, state: &State| {
                state.broken.is_none()
            }),
            Property::sometimes("all that may fail has failed", |_, state: &State| {
                (state.refusals, state.lateness, state.deaths) == (0, 0, 0)
            }),
            Property::sometimes("all were home", |world, state: &State| {
                let has = |it: &Process| it.has() == world.tenants[it.tenant.0 as usize].2 * MIB;
                let all = world.tenants.len() * world.ranks as usize;
                state.processes.len() == all && state.processes.values().all(has)
            }),
        ]
    }
}

impl State {
    fn rename(&mut self) {
        let names = self.broker.rename_ops();
        for process in self.processes.values_mut() {
            let pending = process.pending.iter_mut().map(|(op, _)| op);
            let sent = process.inbox.iter_mut().filter_map(|it| match it {
                Command::Order(_, op, _) => Some(op),
                _ => None,
            });
            let answered = process.outbox.iter_mut().filter_map(|it| match it {
                Event::Reply(_, op, _) => Some(op),
                _ => None,
            });
            for op in pending.chain(sent).chain(answered) {
                // An order that the broker has forgotten keeps a name that nothing has.
                *op = names.get(op).copied().unwrap_or(0);
            }
        }
    }
}

/// Checks a world as a whole, and says how large it is.
fn check(world: World) -> (usize, Option<String>) {
    // On this thread, whose mutation counts.
    let checker = world.clone().checker().threads(1).spawn_bfs().join();
    let wrong = checker.discovery("nothing is wrong");
    let why = wrong.and_then(|path| path.last_state().broken.clone());
    if why.is_none() && (0..world.tenants.len() as u64).all(|n| world.fits(n)) {
        let all = checker.discovery("all were home");
        assert!(all.is_some(), "it never got that far: {world:?}");
    }
    if why.is_none() {
        let failed = checker.discovery("all that may fail has failed");
        assert!(failed.is_some(), "there is nothing to fail: {world:?}");
    }
    (checker.unique_state_count(), why)
}
