//! Memory in virtual time: who has its memory on the device, who waits for room, and how long it takes to move.
//!
//! The ledger, who gives way, and when somebody has had its turn are `gpumux-core`'s, unchanged. A move takes what its bytes
//! take on the host link, and its tenant cannot run meanwhile. Tenants in groups are never moved, as with the real daemon.

use std::collections::BTreeMap;

use gpumux_core::{
    Class, Micros, TenantId,
    ledger::{self, Candidate, Denied, Holding, Kind, Ledger, Share},
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

/// What is told of a tenant when it comes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Newcomer {
    pub(crate) tenant: TenantId,
    pub(crate) class: Class,
    pub(crate) share: Share,
    pub(crate) bytes: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// It has asked for all that it needs, and lacks it.
    New,
    Home,
    Leaving(Nanos, u64),
    /// It lacks a part.
    Away,
    Coming(Nanos),
}

struct Line {
    class: Class,
    bytes: u64,
    state: State,
    /// Since when it has its memory, and how long it took to bring it.
    awake: (Nanos, Nanos),
    /// When it began to lack room.
    lacks: Nanos,
    moves: Moves,
}

/// The memory of one device.
pub(crate) struct Broker {
    model: MemoryModel,
    ledger: Ledger,
    lines: BTreeMap<TenantId, Line>,
    /// The link is busy until then, out and in.
    link: (Nanos, Nanos),
}

impl Broker {
    pub(crate) fn new(model: MemoryModel) -> Self {
        Self {
            model,
            ledger: Ledger::new(gib(model.device_gib)),
            lines: BTreeMap::new(),
            link: (0, 0),
        }
    }

    pub(crate) fn join(&mut self, now: Nanos, new: Newcomer) {
        let kept = self.ledger.promise(new.tenant, new.share);
        debug_assert!(kept.is_ok(), "the scenario was checked: {kept:?}");
        let line = Line {
            class: new.class,
            bytes: new.bytes,
            state: State::New,
            awake: (now, 0),
            lacks: now,
            moves: Moves::default(),
        };
        self.lines.insert(new.tenant, line);
    }

    /// It is gone, with all its memory. How it was moved.
    pub(crate) fn leave(&mut self, tenant: TenantId) -> Option<Moves> {
        self.ledger.forget(tenant);
        self.lines.remove(&tenant).map(|line| line.moves)
    }

    /// Whether it has all its memory where it can work.
    pub(crate) fn is_home(&self, tenant: TenantId) -> bool {
        let line = self.lines.get(&tenant);
        line.is_none_or(|line| line.state == State::Home)
    }

    /// Moves what has to move now, given who is idle. When to look again at the latest.
    pub(crate) fn step(&mut self, now: Nanos, idle: impl Fn(TenantId) -> bool) -> Option<Nanos> {
        self.finish(now);
        let mut queue: Vec<(bool, Class, Nanos, TenantId)> = Vec::new();
        for (id, line) in &self.lines {
            let wants = match line.state {
                State::New => true,
                State::Away => !idle(*id),
                _ => false,
            };
            if wants {
                queue.push((!self.is_entitled(*id), line.class, line.lacks, *id));
            }
        }
        queue.sort_unstable();
        for (_, _, _, id) in queue {
            self.serve(now, id, &idle);
        }
        let moving = self.lines.values().filter_map(|line| match line.state {
            State::Leaving(until, _) | State::Coming(until) => Some(until),
            _ => None,
        });
        moving.min()
    }

    /// Ends moves that are done.
    fn finish(&mut self, now: Nanos) {
        for (id, line) in &mut self.lines {
            match line.state {
                State::Leaving(until, bytes) if until <= now => {
                    let holding = self.ledger.entry(*id).holding;
                    let left = Holding {
                        movable: holding.movable - bytes,
                        swapped: holding.swapped + bytes,
                        ..holding
                    };
                    self.ledger.set(*id, left);
                    line.state = State::Away;
                    line.lacks = now;
                }
                State::Coming(until) if until <= now => {
                    line.state = State::Home;
                    line.awake.0 = until;
                }
                _ => {}
            }
        }
    }

    /// Gives somebody what it lacks, or has others make room.
    fn serve(&mut self, now: Nanos, id: TenantId, idle: &impl Fn(TenantId) -> bool) {
        let (new, bytes) = match self.lines.get(&id) {
            Some(line) => (line.state == State::New, line.bytes),
            None => return,
        };
        let swapped = self.ledger.entry(id).holding.swapped;
        let granted = match new {
            true => self.ledger.ask(id, bytes, bytes, Kind::Movable),
            false => self.ledger.bring_back(id),
        };
        match granted {
            // What is new is empty: nothing is copied.
            Ok(_) if new => self.change(id, |line| {
                (line.state, line.awake) = (State::Home, (now, 0));
            }),
            Ok(_) => {
                let until = self.until(now, swapped, false);
                self.change(id, |line| {
                    line.state = State::Coming(until);
                    line.awake.1 = until - now;
                    line.moves.backs += 1;
                    line.moves.moving_s += (until - now) as f64 / 1e9;
                });
            }
            Err(Denied::Full { missing }) => self.make_room(now, id, missing, new, idle),
            // It never will be: a scenario that says so was refused.
            Err(_) => {}
        }
    }

    fn make_room(
        &mut self,
        now: Nanos,
        id: TenantId,
        missing: u64,
        new: bool,
        idle: &impl Fn(TenantId) -> bool,
    ) {
        // What is on its way out comes free by itself.
        let leaving = self.lines.values().map(|line| match line.state {
            State::Leaving(_, bytes) => bytes,
            _ => 0,
        });
        let missing = missing.saturating_sub(leaving.sum());
        if missing == 0 {
            return;
        }
        let entitled = self.is_entitled(id);
        let class = self.lines.get(&id).map_or(Class::Batch, |line| line.class);
        let mut candidates = Vec::new();
        for (other, line) in self.lines.iter().filter(|(other, _)| **other != id) {
            let (since, took) = line.awake;
            let asleep = line.state == State::Away;
            if !asleep && line.state != State::Home {
                continue;
            }
            let turn = ledger::turn(Micros(took / 1000));
            let standing = ledger::Standing {
                idle: idle(*other),
                asleep,
                had_its_turn: now.saturating_sub(since) / 1000 >= turn.0,
            };
            if !standing.may_give_way(line.class, class, entitled) {
                continue;
            }
            let entry = self.ledger.entry(*other);
            candidates.push(Candidate {
                tenant: *other,
                class: line.class,
                asleep,
                idle: standing.idle,
                movable: entry.holding.movable,
                borrowed: entry.borrowed(),
                since,
            });
        }
        let extra = match new {
            true => self.ledger.usable() / ledger::EXTRA,
            false => 0,
        };
        let chosen = ledger::victims(missing + extra, &candidates)
            .or_else(|| ledger::victims(missing, &candidates));
        for (victim, part) in chosen.unwrap_or_default() {
            let until = self.until(now, part, true);
            self.change(victim, |line| {
                line.state = State::Leaving(until, part);
                line.moves.outs += 1;
                line.moves.out_gib += part as f64 / gib(1.0) as f64;
                line.moves.moving_s += (until - now) as f64 / 1e9;
            });
        }
    }

    fn change(&mut self, id: TenantId, change: impl FnOnce(&mut Line)) {
        if let Some(line) = self.lines.get_mut(&id) {
            change(line);
        }
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

    fn is_entitled(&self, id: TenantId) -> bool {
        let wants = self.lines.get(&id).map_or(0, |line| line.bytes);
        wants <= self.ledger.entry(id).share.guaranteed
    }
}

/// Bytes.
pub(crate) fn gib(gib: f64) -> u64 {
    (gib * (1u64 << 30) as f64) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: Nanos = 1_000_000_000;

    fn broker(all: &[(u64, Class, f64)]) -> Broker {
        let mut broker = Broker::new(MemoryModel {
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
        let home = |broker: &Broker| [1, 2].map(|id| broker.is_home(TenantId(id)));
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
        let moves = broker.leave(TenantId(1)).expect("it is there");
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
        let idle = |id| id == TenantId(1);
        let done = broker.step(0, idle).expect("a move");
        assert!(!broker.is_home(TenantId(1)) && !broker.is_home(TenantId(2)));
        broker.step(done, idle);
        assert!(broker.is_home(TenantId(2)));
        // A latency tenant's work does not wait for the other's turn to end but for its least turn.
        broker.step(done + S / 2, |_| false);
        assert!(broker.is_home(TenantId(2)));
        let begun = broker.step(done + 2 * S, |_| false).expect("a move");
        broker.step(begun, |_| false);
        let back = broker.step(begun, |_| false).expect("a move");
        broker.step(back, |_| false);
        assert!(broker.is_home(TenantId(1)));
    }
}
