//! The tenants' memory and their processes, as the broker commands them.

use std::collections::VecDeque;

use gpumux_core::{
    broker::{Order, Reply},
    ledger::Holding,
};

use super::*;

/// A tenant's process, its page, and its memory as its library has it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Process {
    pub(super) tenant: u64,
    pub(super) busy: bool,
    pub(super) idle_since: Micros,
    /// When its work came, after a pause.
    pub(super) came: Option<Micros>,
    pub(super) progress: Progress,
    /// What it has of each device.
    pub(super) holding: BTreeMap<usize, Holding>,
    /// Of that, what came while its gate was closed: no thread uses it yet, so that it stays.
    fresh: BTreeMap<usize, u64>,
    /// How often it has said what it has of each device.
    told: BTreeMap<usize, u64>,
    /// By name, what it has asked for: of which device, and how often it had said what it has there.
    asked: BTreeMap<u32, (usize, u64)>,
    kept: u64,
    /// Its gate is.
    closed: bool,
    /// Orders, carried out one after the other. The first is under way, and called off if it is not wanted any more.
    orders: VecDeque<(u64, Order)>,
    called_off: bool,
    /// What that moves, of each device.
    moves: BTreeMap<usize, u64>,
    /// It answers nothing, until it goes on.
    pub(super) stopped: bool,
    pub(super) mailbox: Vec<Happens>,
    pub(super) ended: bool,
    /// It has said nothing yet of what it has.
    pub(super) silent: bool,
    /// When the last packets arrive that were sent to it and by it.
    last: [Micros; 2],
}

/// What happens to a process.
#[derive(Clone, Debug)]
pub(super) enum Happens {
    Ordered(u64, Order),
    Granted(u32, u64),
    /// Its first order is carried out.
    Done,
}

impl Process {
    pub(super) fn new(tenant: u64, now: Micros) -> Self {
        Self {
            tenant,
            idle_since: now,
            ..Self::default()
        }
    }

    pub(super) fn swapped(&self) -> u64 {
        self.holding.values().map(|it| it.swapped).sum()
    }

    /// Host memory that it has.
    pub(super) fn kept(&self) -> u64 {
        self.kept
    }

    /// Without its session. No work of it is seen, and none of its threads waits for a daemon.
    pub(super) fn parted(self, now: Micros) -> Self {
        Self {
            holding: self.holding,
            kept: self.kept,
            silent: true,
            ..Self::new(self.tenant, now)
        }
    }

    /// What it would move, of each device.
    fn movable(&self, least: u64) -> BTreeMap<usize, u64> {
        let moves = |(device, it): (&usize, &Holding)| {
            let fresh = self.fresh.get(device).copied().unwrap_or(0);
            (*device, (it.movable - fresh).min(least))
        };
        self.holding.iter().map(moves).collect()
    }

    fn open(&mut self) {
        self.closed = false;
        self.fresh.clear();
    }
}

impl World {
    pub(super) fn report_frozen(&mut self) {
        for tenant in self.freezing.clone() {
            let all = self.groups_of(tenant.0).map(|(id, _)| *id);
            let known: Vec<_> = all.filter_map(|id| self.controller.domain(id)).collect();
            let result = if known.iter().any(|it| it.is_faulty()) {
                Err("a control failed".into())
            } else if known.iter().all(|it| it.is_frozen()) {
                Ok(())
            } else {
                continue;
            };
            self.freezing.remove(&tenant);
            self.memory(broker::Event::Frozen(tenant, result));
        }
    }

    /// A tenant's process asks for memory of the n-th of its devices.
    pub(crate) fn ask(&mut self, id: u64, n: usize, bytes: u64) {
        let devices = self.tenants.get(&id).map(|it| it.devices.clone());
        let device = devices.map_or(0, |all| all[n % all.len()]);
        self.tickets += 1;
        let ticket = self.tickets;
        let Some((name, process)) = self.process(id).filter(|it| !it.1.stopped) else {
            return;
        };
        let told = process.told.get(&device).copied().unwrap_or(0);
        process.asked.insert(ticket, (device, told));
        let ask = Ask {
            device: uuid(device),
            total: CAPACITY,
            need: bytes,
            want: bytes,
            kind: Kind::Movable,
            part: None,
        };
        let ask = broker::Event::Ask {
            process: name,
            ticket,
            ask,
        };
        self.send(name, ask);
    }

    /// A tenant's process frees half of what it has on its devices.
    pub(crate) fn free(&mut self, id: u64) {
        let able = |it: &Process| !it.stopped && !it.closed;
        if let Some((id, process)) = self.process(id).filter(|it| able(it.1)) {
            (process.holding.values_mut()).for_each(|it| it.movable /= 2);
            self.say_all(id);
        }
    }

    /// Something happened that concerns memory.
    pub(super) fn memory(&mut self, event: broker::Event) {
        let all = self.tenants.iter().map(|(id, it)| {
            let own = || self.processes.values().filter(|it| it.tenant == *id);
            let activity = Activity {
                busy: own().any(|it| it.busy),
                idle_since: own().map(|it| it.idle_since).max().unwrap_or_default(),
                in_group: it.shared.is_some(),
                ..Activity::default()
            };
            (TenantId(*id), activity)
        });
        let all = broker::Event::Activity(all.collect());
        for event in [all, event] {
            for command in self.broker.handle(self.now, event) {
                self.carry_out(command);
            }
        }
        self.check_memory();
    }

    pub(super) fn carry_out(&mut self, command: broker::Command) {
        match command {
            broker::Command::Order(process, op, order) => {
                self.travels(process, Due::Process(process, Happens::Ordered(op, order)));
            }
            broker::Command::Grant {
                process,
                ticket,
                bytes,
            } => self.travels(
                process,
                Due::Process(process, Happens::Granted(ticket, bytes)),
            ),
            broker::Command::Freeze(tenant) => {
                self.swapped_out.insert(tenant);
                self.park();
                self.freezing.insert(tenant);
            }
            broker::Command::Thaw(tenant) => {
                self.freezing.remove(&tenant);
                self.swapped_out.remove(&tenant);
                self.park();
            }
            broker::Command::Moved { .. } => self.seen.moves += 1,
            broker::Command::Answer(..)
            | broker::Command::Shown { .. }
            | broker::Command::Failed(..)
            | broker::Command::Silent(_)
            | broker::Command::NotKept(..) => {}
        }
    }

    pub(super) fn park(&mut self) {
        for (id, group) in &self.groups {
            let away = self.swapped_out.contains(&TenantId(group.tenant));
            self.controller
                .handle(self.now, Event::SwappedOut(*id, away));
        }
    }

    /// A packet to a process, or by it, arrives after a while, and after those before it.
    fn travels(&mut self, process: ProcessId, packet: Due) {
        self.sequence += 1;
        // Each takes another time.
        let scattered = self.sequence.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        let delay = Micros(scattered % (self.late.packets.0 + 1));
        if let Some(process) = self.processes.get_mut(&process) {
            let by_it = matches!(packet, Due::Packet(..));
            let last = &mut process.last[usize::from(by_it)];
            *last = (self.now + delay).max(*last);
            self.queue.insert((*last, self.sequence), packet);
        }
    }

    fn send(&mut self, process: ProcessId, event: broker::Event) {
        self.travels(process, Due::Packet(process, event));
    }

    /// A process reports what it has of a device.
    fn say(&mut self, process: ProcessId, device: usize) {
        let own = self.processes.get_mut(&process).expect("it is there");
        *own.told.entry(device).or_default() += 1;
        let holding = own.holding[&device];
        let holds = broker::Event::Holds {
            process,
            device: uuid(device),
            total: CAPACITY,
            holding,
        };
        self.send(process, holds);
    }

    /// What a process has is the first that its session says.
    pub(super) fn introduce(&mut self, process: ProcessId) {
        let all = self.processes[&process].holding.clone();
        for (device, holding) in all {
            self.memory(broker::Event::Holds {
                process,
                device: uuid(device),
                total: CAPACITY,
                holding,
            });
        }
        let own = self.processes.get_mut(&process).expect("it is there");
        own.silent = false;
    }

    fn say_all(&mut self, process: ProcessId) {
        let devices = self.processes[&process].holding.keys();
        for device in devices.copied().collect::<Vec<_>>() {
            self.say(process, device);
        }
    }

    /// Something happens to a process, unless it has ended; once it goes on, if it is stopped.
    pub(super) fn happens(&mut self, id: ProcessId, what: Happens) {
        let process = self.processes.get_mut(&id);
        let Some(process) = process.filter(|it| !it.ended) else {
            return;
        };
        if process.stopped {
            return process.mailbox.push(what);
        }
        match what {
            Happens::Granted(ticket, bytes) => self.granted(id, ticket, bytes),
            Happens::Ordered(op, Order::Trim) => {
                self.say_all(id);
                self.send(id, broker::Event::Reply(id, op, Reply::Done));
            }
            Happens::Ordered(op, order) => {
                let closes = |it: &Order| matches!(it, Order::Quiesce { .. });
                if order == Order::Resume || closes(&order) {
                    // A gate that is not closed yet needs not be, or is closed by the later order.
                    let under_way = process.orders.pop_front();
                    process.called_off |= order == Order::Resume
                        && under_way.as_ref().is_some_and(|it| closes(&it.1));
                    process.orders.retain(|it| !closes(&it.1));
                    under_way
                        .into_iter()
                        .for_each(|it| process.orders.push_front(it));
                }
                process.orders.push_back((op, order));
                if process.orders.len() == 1 {
                    self.begin(id);
                }
            }
            Happens::Done => self.done(id),
        }
    }

    /// What a process has asked for by this name has come, or not.
    fn granted(&mut self, id: ProcessId, ticket: u32, bytes: u64) {
        let process = self.processes.get_mut(&id).expect("it is there");
        let (device, told) = process.asked.remove(&ticket).expect("it has asked");
        process.holding.entry(device).or_default().movable += bytes;
        if process.closed {
            *process.fresh.entry(device).or_default() += bytes;
        }
        let said = process.told.get(&device).copied().unwrap_or(0) != told;
        self.send(id, broker::Event::Received(id, ticket));
        // What it said meanwhile was without this.
        if bytes > 0 && said {
            self.say(id, device);
        }
    }

    /// A process begins its first order, if there is one.
    fn begin(&mut self, id: ProcessId) {
        let process = self.processes.get_mut(&id).expect("it is there");
        let Some((_, order)) = process.orders.front() else {
            return;
        };
        process.called_off = false;
        process.moves = match order {
            Order::Out { least, .. } if process.closed => process.movable(*least),
            Order::In => process
                .holding
                .iter()
                .map(|(at, it)| (*at, it.swapped))
                .collect(),
            _ => BTreeMap::new(),
        };
        let bytes: u64 = process.moves.values().sum();
        let took = match order {
            Order::Resume => Micros::ZERO,
            Order::Quiesce { .. } => Micros(300),
            _ => Micros(bytes / LINK + 1000),
        };
        if matches!(order, Order::Out { .. }) && process.closed {
            let mut own = self.groups.values().filter(|it| it.process == id);
            let frozen = own.all(|it| it.frozen);
            assert!(frozen, "moved while it runs: {id:?}");
        }
        self.due(took, Due::Process(id, Happens::Done));
    }

    /// It has carried out its first order.
    fn done(&mut self, id: ProcessId) {
        let process = self.processes.get_mut(&id).expect("it is there");
        let idle = !process.busy;
        let (op, order) = process.orders.pop_front().expect("one is under way");
        let no = |why: &str| Reply::Refused(why.into());
        let reply = match order {
            Order::Resume => {
                if process.swapped() == 0 {
                    process.open();
                }
                return self.begin(id);
            }
            Order::Quiesce { .. } if process.called_off => no("it was called off"),
            Order::Quiesce { .. } if process.swapped() > 0 => no("its memory is on the host"),
            Order::Quiesce { least, host } => {
                let needs = process.movable(least).values().sum();
                if needs <= host {
                    process.closed = true;
                    process.kept = process.kept.max(needs);
                }
                match needs <= host {
                    true => Reply::Quiet(idle),
                    false => no("it may not keep what is to be moved"),
                }
            }
            Order::Out { .. } if !process.closed => no("it was not asked to be quiet"),
            Order::Out { host, .. } => {
                for (device, bytes) in std::mem::take(&mut process.moves) {
                    let holding = process.holding.entry(device).or_default();
                    holding.movable -= bytes;
                    holding.swapped += bytes;
                }
                let swapped = process.swapped();
                assert!(swapped <= host, "{swapped} bytes of {host} on the host");
                process.kept = process.kept.max(swapped);
                Reply::Done
            }
            Order::In => {
                for (device, bytes) in std::mem::take(&mut process.moves) {
                    let holding = process.holding.entry(device).or_default();
                    holding.movable += bytes;
                    holding.swapped -= bytes;
                }
                process.open();
                Reply::Done
            }
            Order::DropHost => {
                if !process.closed {
                    process.kept = 0;
                }
                Reply::Done
            }
            Order::Reclaim { .. } => Reply::Freed(0),
            Order::Take { .. } | Order::Trim => Reply::Done,
        };
        let kept = process.kept;
        if !matches!(order, Order::Quiesce { .. }) {
            self.say_all(id);
        }
        self.send(id, broker::Event::Keeps(id, kept));
        self.send(id, broker::Event::Reply(id, op, reply));
        self.check_memory();
        self.begin(id);
    }
}
