//! Memory in virtual time: how long it takes to move, and how processes answer.
//!
//! Which tenant has its memory on the device, which waits, and which gives way is decided by `gpumux-core`'s broker, unchanged. A move
//! takes what its bytes take on the host link, and its tenant cannot run meanwhile. Tenants in groups are never moved, as with
//! the real daemon.

use std::collections::BTreeMap;

use gpumux_core::{
    Class, MemoryPolicy, Micros, TenantId,
    broker::{self, Activity, Ask, Command, Event, Order, ProcessId, Reply, Terms},
    ledger::{Holding, Kind, Share},
};

use serde::{Deserialize, Serialize};

use crate::gpu::Nanos;
use crate::report::Moves;

/// A device's memory, and the way to the host.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MemoryModel {
    /// What tenants can have together, in GiB.
    pub device_gib: f64,
    /// What the link moves in either direction, in GB/s; moves at the same time share it.
    pub link_gbps: f64,
    /// What a move takes beside its copies, in ms: closing the gate, freezing, unmapping.
    pub fixed_ms: f64,
}

impl Default for MemoryModel {
    /// An H100 80GB on PCIe 5, as measured (`docs/memory.md`).
    fn default() -> Self {
        Self {
            device_gib: 78.0,
            link_gbps: 51.0,
            fixed_ms: 10.0,
        }
    }
}

/// What is known of a tenant when it comes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Newcomer {
    pub(crate) tenant: TenantId,
    pub(crate) class: Class,
    pub(crate) share: Share,
    pub(crate) bytes: u64,
}

/// A tenant with one process.
struct Line {
    bytes: u64,
    /// It was granted all that it needs.
    granted: bool,
    holding: Holding,
    moves: Moves,
}

/// The memory of one device.
pub(crate) struct Memory {
    model: MemoryModel,
    broker: broker::Broker,
    lines: BTreeMap<TenantId, Line>,
    activity: BTreeMap<TenantId, Activity>,
    /// Answers under way, by when they come.
    answers: BTreeMap<(Nanos, u64), Event>,
    answered: u64,
    /// The link is busy until then, out and in.
    link: (Nanos, Nanos),
}

/// The one device's name: every device has a broker of its own here.
const DEVICE: &str = "device";

fn micros(now: Nanos) -> Micros {
    Micros(now / 1000)
}

impl Memory {
    pub(crate) fn new(model: MemoryModel) -> Self {
        let mut broker = broker::Broker::new(u64::MAX);
        let tenants = gib(model.device_gib);
        // What is never handed out depends on the capacity a little.
        let more = |capacity| tenants + broker::overhead(capacity);
        let capacity = more(more(more(tenants)));
        broker.handle(
            Micros::ZERO,
            Event::Device {
                uuid: DEVICE.to_owned(),
                capacity,
                used: 0,
            },
        );
        Self {
            model,
            broker,
            lines: BTreeMap::new(),
            activity: BTreeMap::new(),
            answers: BTreeMap::new(),
            answered: 0,
            link: (0, 0),
        }
    }

    pub(crate) fn join(&mut self, now: Nanos, new: Newcomer) {
        let terms = Terms {
            class: new.class,
            share: new.share,
            policy: MemoryPolicy::SwapOthers,
            sleep_after: None,
        };
        let line = Line {
            bytes: new.bytes,
            granted: false,
            holding: Holding::default(),
            moves: Moves::default(),
        };
        self.lines.insert(new.tenant, line);
        self.handle(now, Event::Tenant(new.tenant, terms));
        self.handle(now, Event::Joined(process(new.tenant), new.tenant));
        self.ask(now, new.tenant);
    }

    /// A tenant asks for all that it needs.
    fn ask(&mut self, now: Nanos, tenant: TenantId) {
        let Some(line) = self.lines.get(&tenant) else {
            return;
        };
        let ask = Ask {
            device: DEVICE.to_owned(),
            total: 0,
            need: line.bytes,
            want: line.bytes,
            kind: Kind::Movable,
            part: None,
        };
        self.later(
            now,
            Event::Ask {
                process: process(tenant),
                ticket: 0,
                ask,
            },
        );
    }

    /// It is gone, with all its memory. How it was moved.
    pub(crate) fn leave(&mut self, now: Nanos, tenant: TenantId) -> Option<Moves> {
        let line = self.lines.remove(&tenant)?;
        self.activity.remove(&tenant);
        self.handle(now, Event::TenantGone(tenant));
        Some(line.moves)
    }

    /// Whether it has all its memory where it can work.
    pub(crate) fn is_home(&self, tenant: TenantId) -> bool {
        let Some(line) = self.lines.get(&tenant) else {
            return true;
        };
        let mut all = self.broker.standings();
        let standing = all.find(|(id, _)| *id == tenant);
        line.granted && standing.is_none_or(|(_, it)| !it.swapped_out)
    }

    /// Moves what has to move now, given which tenants are idle. When to look again at the latest.
    pub(crate) fn step(&mut self, now: Nanos, idle: impl Fn(TenantId) -> bool) -> Option<Nanos> {
        let mut changed = Vec::new();
        for (id, line) in &self.lines {
            let busy = line.granted && !idle(*id);
            let before = self.activity.get(id).copied();
            if before.is_none_or(|before| before.busy != busy) {
                let activity = Activity {
                    busy,
                    idle_since: micros(now),
                    ..Activity::default()
                };
                changed.push((*id, activity));
            }
        }
        if !changed.is_empty() {
            self.activity.extend(changed.iter().copied());
            self.handle(now, Event::Activity(changed));
        }
        while let Some(due) = self.answers.first_entry().filter(|it| it.key().0 <= now) {
            let event = due.remove();
            if let Event::Holds {
                process, holding, ..
            } = &event
                && let Some(line) = self.lines.get_mut(&TenantId(process.0))
            {
                line.holding = *holding;
            }
            self.handle(now, event);
        }
        if (self.broker.next_wakeup()).is_some_and(|at| at.0 * 1000 <= now) {
            self.handle(now, Event::Tick);
        }
        let answer = self.answers.keys().next().map(|(at, _)| *at);
        // The broker counts in whole microseconds.
        let wakeup = (self.broker.next_wakeup()).map(|at| (at.0 * 1000).max(now + 1000));
        answer.into_iter().chain(wakeup).min()
    }

    fn handle(&mut self, now: Nanos, event: Event) {
        for command in self.broker.handle(micros(now), event) {
            self.carry_out(now, command);
        }
    }

    fn later(&mut self, at: Nanos, event: Event) {
        self.answered += 1;
        self.answers.insert((at, self.answered), event);
    }

    fn carry_out(&mut self, now: Nanos, command: Command) {
        match command {
            Command::Order(process, op, order) => self.obey(now, process, op, order),
            Command::Grant { process, bytes, .. } => {
                let tenant = TenantId(process.0);
                match self.lines.get_mut(&tenant) {
                    Some(line) if bytes > 0 => {
                        line.granted = true;
                        line.holding.movable += bytes;
                    }
                    // A program would end here; this one tries again.
                    _ => self.ask(now, tenant),
                }
            }
            Command::Freeze(tenant) => self.later(now, Event::Frozen(tenant, Ok(()))),
            Command::Moved {
                tenant,
                out,
                bytes,
                took,
            } => {
                if let Some(line) = self.lines.get_mut(&tenant) {
                    let moves = &mut line.moves;
                    moves.moving_s += took.as_secs_f64();
                    match out {
                        true => {
                            moves.outs += 1;
                            moves.out_gib += bytes as f64 / gib(1.0) as f64;
                        }
                        false => moves.backs += 1,
                    }
                }
            }
            Command::Thaw(_)
            | Command::Answer(..)
            | Command::Shown { .. }
            | Command::Failed(..)
            | Command::Silent(_)
            | Command::NotKept(..) => {}
        }
    }

    fn obey(&mut self, now: Nanos, id: ProcessId, op: u64, order: Order) {
        let Some(line) = self.lines.get(&TenantId(id.0)) else {
            return;
        };
        let (holding, reply) = (line.holding, |reply| Event::Reply(id, op, reply));
        let (bytes, after, out) = match order {
            Order::Quiesce { .. } => {
                let busy = self.activity.get(&TenantId(id.0)).is_some_and(|it| it.busy);
                return self.later(now, reply(Reply::Quiet(!busy)));
            }
            Order::Out { least, .. } => {
                let bytes = holding.movable.min(least);
                let after = Holding {
                    movable: holding.movable - bytes,
                    swapped: holding.swapped + bytes,
                    ..holding
                };
                (bytes, after, true)
            }
            Order::In => {
                let after = Holding {
                    movable: holding.movable + holding.swapped,
                    swapped: 0,
                    ..holding
                };
                (holding.swapped, after, false)
            }
            Order::Trim => return self.later(now, holds(id, holding)),
            Order::Resume | Order::DropHost | Order::Reclaim { .. } | Order::Take { .. } => return,
        };
        let until = self.until(now, bytes, out);
        self.later(until, holds(id, after));
        self.later(until, reply(Reply::Done));
    }

    /// When so much has moved that begins to do so now, after what is under way.
    fn until(&mut self, now: Nanos, bytes: u64, out: bool) -> Nanos {
        let busy = match out {
            true => &mut self.link.0,
            false => &mut self.link.1,
        };
        let copy = bytes as f64 / self.model.link_gbps;
        *busy = now.max(*busy) + (copy + self.model.fixed_ms * 1e6) as Nanos;
        *busy
    }
}

/// Every tenant has one process.
const fn process(tenant: TenantId) -> ProcessId {
    ProcessId(tenant.0)
}

/// Bytes.
pub(crate) fn gib(gib: f64) -> u64 {
    (gib * (1u64 << 30) as f64) as u64
}

fn holds(process: ProcessId, holding: Holding) -> Event {
    Event::Holds {
        process,
        device: DEVICE.to_owned(),
        total: 0,
        holding,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: Nanos = 1_000_000_000;

    fn broker(all: &[(u64, Class, f64)]) -> Memory {
        let mut broker = Memory::new(MemoryModel {
            device_gib: 80.0,
            link_gbps: 50.0,
            fixed_ms: 0.0,
        });
        for (id, class, size) in all {
            broker.join(
                0,
                Newcomer {
                    tenant: TenantId(*id),
                    class: *class,
                    share: Share::default(),
                    bytes: gib(*size),
                },
            );
        }
        broker
    }

    #[test]
    fn two_that_do_not_fit_take_turns_and_only_what_lacks_moves() {
        let mut broker = broker(&[(1, Class::Batch, 48.0), (2, Class::Batch, 48.0)]);
        let home = |broker: &Memory| [1, 2].map(|id| broker.is_home(TenantId(id)));
        let (mut now, mut turns) = (0, 0);
        let mut last = [false; 2];
        while now < 120 * S {
            broker.step(now, |_| false);
            let now_home = home(&broker);
            assert_ne!(now_home, [true, true], "they do not fit");
            if now_home != last && now_home != [false, false] {
                turns += 1;
            }
            last = now_home;
            now += S / 100;
        }
        // 16 GiB take 0.34 s each way: a turn of 40 times as long, and the two moves.
        assert!((7..=11).contains(&turns), "{turns} turns");
        let moves = broker.leave(now, TenantId(1)).expect("it is there");
        let each = moves.out_gib / moves.outs as f64;
        assert!((15.9..18.0).contains(&each), "{each} GiB at a time");
        assert!(moves.moving_s / 120.0 < 0.06, "{moves:?}");
    }

    #[test]
    fn the_idle_give_way_at_once_and_come_back_with_work() {
        let mut broker = broker(&[(1, Class::Latency, 48.0)]);
        broker.step(0, |_| true);
        assert!(broker.is_home(TenantId(1)));
        broker.join(
            0,
            Newcomer {
                tenant: TenantId(2),
                class: Class::Batch,
                share: Share::default(),
                bytes: gib(48.0),
            },
        );
        let run = |broker: &mut Memory, from: Nanos, to: Nanos, busy: bool| {
            let mut now = from;
            while now < to {
                let next = broker.step(now, |id| !busy && id == TenantId(1));
                now = next.unwrap_or(to).min(to);
            }
        };
        // Its pause must have lasted a moment; 17 GiB take 0.35 s.
        run(&mut broker, 0, S, false);
        assert!(!broker.is_home(TenantId(1)) && broker.is_home(TenantId(2)));
        // A latency tenant's work waits for the other's turn, which is 40 times as long as the move.
        run(&mut broker, S, 10 * S, true);
        assert!(broker.is_home(TenantId(2)));
        run(&mut broker, 10 * S, 20 * S, true);
        assert!(broker.is_home(TenantId(1)));
    }
}
