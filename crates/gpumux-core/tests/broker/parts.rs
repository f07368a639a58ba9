//! Requests of several parts: ranks of one engine, each on a device of its own, have memory together or not at all.

use std::collections::BTreeMap;

use gpumux_core::{
    Class, MemoryPolicy, Micros, TenantId,
    broker::{
        Activity, Ask, Broker, Command, Droppable, Event, MEET, Order, Part, ProcessId, Reply,
        Terms,
    },
    ledger::{Holding, Kind, Share},
};
use proptest::prelude::*;

use super::world::{GIB, MUTATION};

const DEVICES: [&str; 2] = ["GPU-1", "GPU-2"];
const CAPACITY: u64 = 20 * GIB;
const RANKS: u64 = 2;

/// Tenants that wait for room, and move no other. Rank *r* of tenant *t* is process 2*t* + *r*, on device *r*.
struct Node {
    now: Micros,
    broker: Broker,
    /// What each process was answered, by its name for the part.
    answers: BTreeMap<(u64, u32), u64>,
    holds: BTreeMap<u64, u64>,
    /// Grants that are on their way.
    granted: Vec<(ProcessId, u32)>,
    /// Leases are not given back at once.
    delayed: bool,
    /// Processes that were to give leases back and have not answered that order.
    trims: Vec<(ProcessId, u64)>,
    /// Processes that were to close their gates.
    closed: Vec<u64>,
    /// Processes whose programs were to give caches back.
    reclaimed: Vec<u64>,
}

impl Node {
    fn new(tenants: u64, policy: MemoryPolicy) -> Self {
        Self::with_host(tenants, policy, u64::MAX)
    }

    fn with_host(tenants: u64, policy: MemoryPolicy, host: u64) -> Self {
        let broker = Broker::new(host);
        let mut node = Self {
            now: Micros::from_secs(1000),
            broker: match MUTATION.get() {
                Some(mutation) => broker.mutated(mutation),
                None => broker,
            },
            answers: BTreeMap::new(),
            holds: BTreeMap::new(),
            granted: Vec::new(),
            delayed: false,
            trims: Vec::new(),
            closed: Vec::new(),
            reclaimed: Vec::new(),
        };
        for uuid in DEVICES {
            node.event(Event::Device {
                uuid: uuid.into(),
                capacity: CAPACITY,
                used: 0,
            });
        }
        for t in 0..tenants {
            let terms = Terms {
                class: Class::Standard,
                share: Share {
                    guaranteed: 0,
                    limit: u64::MAX,
                },
                policy,
                sleep_after: None,
            };
            node.event(Event::Tenant(TenantId(t), terms));
            (0..RANKS).for_each(|rank| node.join(t * RANKS + rank));
        }
        node
    }

    fn join(&mut self, process: u64) {
        self.holds.insert(process, 0);
        self.event(Event::Joined(ProcessId(process), TenantId(process / RANKS)));
        self.event(Event::Confirms(ProcessId(process)));
    }

    fn event(&mut self, event: Event) {
        for command in self.broker.handle(self.now, event) {
            match command {
                Command::Grant {
                    process,
                    ticket,
                    bytes,
                } => {
                    let other = self.answers.insert((process.0, ticket), bytes);
                    assert_eq!(other, None, "answered twice");
                    if let Some(holds) = self.holds.get_mut(&process.0) {
                        *holds += bytes;
                    }
                    self.granted.push((process, ticket));
                }
                Command::Order(process, op, Order::Trim) => {
                    self.trims.push((process, op));
                    if !self.delayed {
                        self.answer_trims();
                    }
                }
                Command::Order(process, _, Order::Quiesce { .. }) => self.closed.push(process.0),
                Command::Order(process, _, Order::Reclaim { .. }) => self.reclaimed.push(process.0),
                _ => {}
            }
        }
        for (uuid, rank) in DEVICES.iter().zip(0..) {
            let own = self.holds.iter().filter(|(id, _)| *id % RANKS == rank);
            let held: u64 = own.map(|(_, bytes)| bytes).sum();
            let lines = self.broker.lines();
            let line = lines.iter().find(|it| it.uuid == *uuid);
            let room = line.map_or(u64::MAX, |it| it.capacity - it.occupied);
            assert!(held <= room, "{held} bytes of {room} on {uuid}");
        }
    }

    fn answer_trims(&mut self) {
        for (process, op) in std::mem::take(&mut self.trims) {
            self.report(process.0);
            self.event(Event::Reply(process, op, Reply::Done));
        }
    }

    /// All grants have come, and it reports what it has.
    fn report(&mut self, process: u64) {
        for (process, ticket) in std::mem::take(&mut self.granted) {
            self.event(Event::Received(process, ticket));
        }
        let movable = self.holds.get(&process).copied().unwrap_or(0);
        self.reports(process, movable);
    }

    fn reports(&mut self, process: u64, movable: u64) {
        self.event(Event::Holds {
            process: ProcessId(process),
            device: DEVICES[(process % RANKS) as usize].into(),
            total: CAPACITY,
            holding: Holding {
                movable,
                ..Holding::default()
            },
        });
    }

    /// A rank asks for its part of the request of this name, which is its name for the part, too.
    fn ask(&mut self, process: u64, of: u32, gib: u64) {
        let part = Part {
            of: of.into(),
            parts: RANKS as u32,
        };
        self.ask_part(process, of, part, gib);
    }

    /// A process asks under this name for one of so many parts of a request.
    fn part(&mut self, process: u64, ticket: u32, parts: u32, gib: u64) {
        self.ask_part(process, ticket, Part { of: 1, parts }, gib);
    }

    fn ask_part(&mut self, process: u64, ticket: u32, part: Part, gib: u64) {
        self.ask_kind(process, ticket, part, gib, Kind::Movable);
    }

    fn ask_kind(&mut self, process: u64, ticket: u32, part: Part, gib: u64, kind: Kind) {
        let ask = Ask {
            device: DEVICES[(process % RANKS) as usize].into(),
            total: CAPACITY,
            need: gib * GIB,
            want: (gib + 1) * GIB,
            kind,
            part: Some(part),
        };
        self.event(Event::Ask {
            process: ProcessId(process),
            ticket,
            ask,
        });
    }

    /// It gets so much without the others.
    fn has(&mut self, process: u64, gib: u64) {
        self.ask_part(process, 1, Part { of: 1, parts: 1 }, gib);
        self.keep(process, gib);
    }

    /// The memory of this tenant is not moved: it shares a group.
    fn stays(&mut self, tenant: u64) {
        let member = Activity {
            in_group: true,
            ..Activity::default()
        };
        self.event(Event::Activity(vec![(TenantId(tenant), member)]));
    }

    fn both(&mut self, tenant: u64, of: u32, gib: u64) {
        (0..RANKS).for_each(|rank| self.ask(tenant * RANKS + rank, of, gib));
    }

    /// It has only so much from now on.
    fn keep(&mut self, process: u64, gib: u64) {
        self.holds.insert(process, gib * GIB);
        self.report(process);
    }

    fn end(&mut self, process: u64) {
        self.holds.remove(&process);
        self.event(Event::Left(ProcessId(process)));
    }

    fn run_for(&mut self, time: Micros) {
        let end = self.now + time;
        while let Some(at) = self.broker.next_wakeup().filter(|at| *at <= end) {
            self.now = self.now.max(at);
            self.event(Event::Tick);
        }
        self.now = end;
    }

    fn answered(&self, tenant: u64, of: u32) -> [Option<u64>; RANKS as usize] {
        [0, 1].map(|rank| {
            let answer = self.answers.get(&(tenant * RANKS + rank, of));
            answer.map(|bytes| bytes / GIB)
        })
    }
}

/// The second device has no room: the rank on the first one gets nothing either, and both get it when there is.
#[test]
pub(crate) fn ranks_have_memory_together_or_not_at_all() {
    let mut node = Node::new(2, MemoryPolicy::Wait);
    node.both(1, 1, 1);
    node.ask(2, 2, 1);
    node.ask(3, 2, 15);
    node.both(0, 1, 10);
    node.run_for(Micros::from_secs(1));
    assert_eq!(node.answered(0, 1), [None, None]);
    assert_eq!(node.answered(1, 2), [Some(1), Some(15)]);
    node.keep(3, 1);
    node.run_for(Micros::from_secs(1));
    assert_eq!(node.answered(0, 1), [Some(10), Some(10)], "no more either");
}

/// Two engines ask for most of both devices, in orders in which each would have a half and wait for the other.
#[test]
fn two_requests_do_not_wait_for_each_other() {
    let mut node = Node::new(2, MemoryPolicy::Wait);
    for process in [0, 3, 1, 2] {
        node.ask(process, 1, 12);
    }
    node.run_for(Micros::from_secs(1));
    assert_eq!(
        node.answered(0, 1),
        [Some(12), Some(12)],
        "it was whole first"
    );
    assert_eq!(node.answered(1, 1), [None, None]);
    node.keep(0, 0);
    node.keep(1, 0);
    node.run_for(Micros::from_secs(1));
    assert_eq!(node.answered(1, 1), [Some(12), Some(12)]);
}

/// A process frees memory again and again before it receives the order to give back leases that it does not use.
#[test]
fn report_that_crosses_an_order_to_give_leases_back_is_no_answer_to_it() {
    let mut node = Node::new(2, MemoryPolicy::Fail);
    node.part(0, 1, 1, 12);
    assert!(node.answers.get(&(0, 1)) > Some(&0));
    node.report(0);
    node.run_for(Micros::from_secs(2));
    // Its answers are on their way from now on.
    node.delayed = true;
    node.part(RANKS, 1, 1, 10);
    for _ in 0..3 {
        node.keep(0, 11);
        assert_eq!(node.answers.get(&(RANKS, 1)), None);
    }
    node.holds.insert(0, 4 * GIB);
    node.answer_trims();
    assert!(node.answers.get(&(RANKS, 1)) > Some(&0));
}

/// Leases that are not used are asked back for another while a grant is on its way: what the process reports then is without it.
#[test]
pub(crate) fn report_that_crosses_a_grant_leaves_no_room_to_others() {
    for parts in [RANKS, 1] {
        let mut node = Node::new(2, MemoryPolicy::Wait);
        let ask = |node: &mut Node, tenant: u64| match parts {
            1 => node.part(tenant * RANKS, 1, 1, 12),
            _ => node.both(tenant, 1, 12),
        };
        let answered = |node: &Node, tenant: u64| node.answers.get(&(tenant * RANKS, 1)).copied();
        ask(&mut node, 0);
        node.reports(0, 0);
        ask(&mut node, 1);
        node.run_for(Micros::from_secs(1));
        assert!(answered(&node, 0) > Some(0));
        assert_eq!(answered(&node, 1), None, "{parts} parts");
        (0..parts).for_each(|process| node.keep(process, 0));
        node.run_for(Micros::from_secs(1));
        assert!(answered(&node, 1) > Some(0), "{parts} parts");
    }
}

#[test]
fn request_is_refused_to_all_when_a_rank_ends_or_withdraws() {
    for withdraws in [false, true] {
        let mut node = Node::new(2, MemoryPolicy::Wait);
        node.both(1, 1, 15);
        node.both(0, 1, 10);
        assert_eq!(node.answered(0, 1), [None, None], "it waits");
        match withdraws {
            true => node.event(Event::Cancel(ProcessId(1), 1)),
            false => node.end(1),
        }
        assert_eq!(node.answered(0, 1), [Some(0), None]);
    }
}

#[test]
fn part_is_refused_when_the_others_do_not_come() {
    let mut node = Node::new(1, MemoryPolicy::Fail);
    node.ask(0, 1, 1);
    node.run_for(MEET.saturating_sub(Micros(1)));
    assert_eq!(node.answered(0, 1), [None, None]);
    node.run_for(Micros(1));
    assert_eq!(node.answered(0, 1), [Some(0), None]);
    // The other is late, and has a partner only in the next request.
    node.ask(1, 1, 1);
    node.both(0, 2, 1);
    assert_eq!(node.answered(0, 2), [Some(1), Some(1)]);
    node.run_for(MEET);
    assert_eq!(node.answered(0, 1), [Some(0), Some(0)]);
}

/// The time is counted from the first part on, whichever come meanwhile.
#[test]
fn parts_wait_no_longer_when_some_of_the_others_come() {
    let mut node = Node::new(1, MemoryPolicy::Wait);
    for ticket in [1, 2] {
        node.part(0, ticket, 3, 1);
        node.run_for(MEET.saturating_sub(Micros::from_secs(1)));
    }
    assert_eq!(node.answers, BTreeMap::from([((0, 1), 0), ((0, 2), 0)]));
}

/// A tenant whose connection was lost while it waited has a claim as old as that. Its parts still wait for each other.
#[test]
fn part_waits_for_the_others_after_a_connection_was_lost() {
    let mut node = Node::new(2, MemoryPolicy::Wait);
    node.both(1, 1, 15);
    node.both(0, 1, 10);
    node.run_for(MEET + Micros::from_secs(1));
    node.event(Event::Lost(ProcessId(0)));
    node.join(0);
    node.keep(2, 0);
    node.keep(3, 0);
    node.both(0, 2, 10);
    assert_eq!(node.answered(0, 2), [Some(10), Some(10)]);
}

/// A program that waits in slices, so that its other threads come to their turns, is as old as one that waits at a stretch.
#[test]
fn request_that_is_made_anew_right_after_it_was_withdrawn_is_as_old() {
    for pause in [Micros::from_millis(1), Micros::from_secs(2)] {
        let mut node = Node::new(3, MemoryPolicy::Wait);
        node.part(0, 1, 1, 15);
        let (slicer, other) = (RANKS, 2 * RANKS);
        for ticket in 1..20 {
            node.part(slicer, ticket, 1, 10);
            node.run_for(Micros::from_millis(250));
            if ticket == 1 {
                node.part(other, 1, 1, 10);
            }
            node.event(Event::Cancel(ProcessId(slicer), ticket));
            node.run_for(pause);
        }
        node.part(slicer, 20, 1, 10);
        node.keep(0, 0);
        node.run_for(Micros::from_millis(1));
        let first = node.answers.contains_key(&(slicer, 20));
        assert_eq!(first, pause < Micros::from_secs(1), "{pause}");
        assert_ne!(first, node.answers.contains_key(&(other, 1)), "{pause}");
    }
}

/// Parts of one process on one device count together, and the one that is left is answered when the other is withdrawn.
#[test]
fn parts_on_one_device_are_added() {
    for taken in [1, 10] {
        let mut node = Node::new(2, MemoryPolicy::Wait);
        node.both(1, 1, taken);
        for ticket in [1, 2] {
            node.part(0, ticket, 2, 8);
        }
        node.run_for(Micros::from_secs(2));
        node.event(Event::Cancel(ProcessId(0), 1));
        let own = node.answers.range((0, 0)..(1, 0));
        let own: Vec<(u32, u64)> = own.map(|((_, of), bytes)| (*of, *bytes)).collect();
        match taken {
            1 => assert_eq!(own, [(1, 8 * GIB), (2, 8 * GIB)]),
            _ => assert_eq!(own, [(2, 0)]),
        }
    }
}

/// Each would fit alone, but not both, whatever others free.
#[test]
fn parts_of_both_kinds_on_one_device_are_added() {
    for (gib, answers) in [(8, [8, 8]), (12, [0, 0])] {
        let mut node = Node::new(1, MemoryPolicy::Wait);
        for (ticket, kind) in [(1, Kind::Movable), (2, Kind::Pinned)] {
            node.ask_kind(0, ticket, Part { of: 1, parts: 2 }, gib, kind);
        }
        node.run_for(Micros::from_secs(2));
        let given: Vec<u64> = node.answers.values().map(|it| it / GIB).collect();
        assert_eq!(given, answers);
    }
}

/// A process reports so much that it can free without a copy.
fn free(process: u64, gib: u64) -> Event {
    Event::Droppable {
        process: ProcessId(process),
        device: DEVICES[(process % RANKS) as usize].into(),
        droppable: Droppable {
            free: gib * GIB,
            cached: 0,
        },
    }
}

/// Free granules of one device are left where they are while those of the other do not suffice.
#[test]
fn nothing_is_freed_on_one_device_in_vain() {
    let mut node = Node::new(2, MemoryPolicy::SwapOthers);
    node.both(1, 1, 15);
    node.stays(1);
    node.event(free(2, 10));
    node.both(0, 1, 10);
    node.run_for(Micros::from_secs(1));
    assert!(node.closed.is_empty(), "the other has none");
    node.event(free(3, 10));
    node.run_for(Micros::from_secs(1));
    assert_eq!(node.closed, [2], "one after the other");
}

/// A tenant that is to sleep has memory of the other device only.
#[test]
fn sleeper_frees_no_more_of_a_device_than_it_has() {
    let mut node = Node::new(3, MemoryPolicy::SwapOthers);
    node.has(2, 15);
    node.has(5, 4);
    node.run_for(Micros::from_secs(60));
    node.event(Event::Sleep(TenantId(2), 1));
    assert_eq!(node.closed, [4, 5]);
    node.both(0, 1, 10);
    node.run_for(Micros::from_millis(500));
    assert_eq!(node.closed, [4, 5, 2, 3]);
}

/// Of the other device some comes free, but the host has no room for the rest.
#[test]
pub(crate) fn nothing_is_freed_on_one_device_when_the_host_is_full() {
    let mut node = Node::with_host(4, MemoryPolicy::SwapOthers, 5 * GIB);
    for (process, gib) in [(2, 15), (5, 4), (7, 11)] {
        node.has(process, gib);
    }
    node.stays(1);
    node.event(free(2, 10));
    node.run_for(Micros::from_secs(60));
    node.event(Event::Sleep(TenantId(2), 1));
    node.both(0, 1, 10);
    node.run_for(Micros::from_millis(500));
    assert_eq!(node.closed, [4, 5], "of these some comes free");
}

/// Programs give caches back on one device only if the other can have enough, too.
#[test]
fn no_program_is_asked_for_caches_in_vain() {
    for host in [u64::MAX, GIB] {
        let mut node = Node::with_host(3, MemoryPolicy::SwapOthers, host);
        node.has(2, 15);
        node.has(5, 15);
        node.event(Event::Reclaims(ProcessId(2)));
        if host > GIB {
            node.stays(2);
        }
        node.run_for(Micros::from_secs(60));
        node.both(0, 1, 10);
        node.run_for(Micros::from_secs(1));
        assert!(node.reclaimed.is_empty(), "the other cannot be moved");
        node.event(free(5, 10));
        node.run_for(Micros::from_secs(1));
        assert_eq!(node.reclaimed, [2]);
    }
}

/// What others could move does not suffice on the first device, unless a program gives more back than that.
#[test]
fn nothing_is_moved_while_a_device_depends_on_caches() {
    let mut node = Node::new(4, MemoryPolicy::SwapOthers);
    for (process, gib) in [(2, 3), (6, 12), (5, 15)] {
        node.has(process, gib);
    }
    node.event(Event::Reclaims(ProcessId(2)));
    node.stays(3);
    node.run_for(Micros::from_secs(60));
    node.both(0, 1, 10);
    node.run_for(Micros::from_secs(2));
    assert_eq!((&node.reclaimed[..], &node.closed[..]), (&[2][..], &[][..]));
    node.keep(6, 7);
    node.run_for(Micros::from_secs(1));
    assert_eq!(node.closed, [2, 3, 4, 5]);
}

/// A tenant frees what it does not use on one device, and then on the other: no third one is moved meanwhile.
#[test]
fn nothing_is_copied_while_one_frees_memory_of_each_device() {
    let mut node = Node::new(3, MemoryPolicy::SwapOthers);
    node.both(1, 1, 8);
    node.both(2, 1, 9);
    node.run_for(Micros::from_secs(60));
    node.event(free(2, 8));
    node.event(free(3, 8));
    node.both(0, 1, 9);
    node.run_for(Micros::from_millis(500));
    assert_eq!(node.closed, [2]);
    // It answers nothing: others are moved.
    node.run_for(Micros::from_secs(1));
    assert_eq!(node.closed, [2, 4, 5]);
}

/// Ranks have pages that they do not need: these go, and no neighbour's.
#[test]
fn parts_are_served_by_what_their_tenant_does_not_need() {
    let mut node = Node::new(2, MemoryPolicy::SwapOthers);
    node.both(0, 1, 10);
    node.both(1, 1, 6);
    node.run_for(Micros::from_secs(60));
    node.event(free(0, 10));
    node.event(free(1, 10));
    node.both(0, 2, 9);
    node.run_for(Micros::from_millis(500));
    assert_eq!(node.closed, [0]);
}

#[derive(Clone, Debug)]
enum Step {
    /// A rank asks for its part of the tenant's next request that it has not asked for.
    Ask(u64),
    Cancel(u64),
    Keep(u64, u64),
    /// It ends, and another begins in its place.
    Kill(u64),
    Pass(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let process = 0..3 * RANKS;
    prop_oneof![
        6 => process.clone().prop_map(Step::Ask),
        1 => process.clone().prop_map(Step::Cancel),
        3 => (process.clone(), 0..8u64).prop_map(|(id, gib)| Step::Keep(id, gib)),
        1 => process.prop_map(Step::Kill),
        3 => (1..3_000u64).prop_map(Step::Pass),
    ]
}

proptest! {
    /// Whatever ranks do, both parts of a request are granted or none, and each is answered.
    #[test]
    fn parts_are_granted_together_whatever_happens(
        sizes in proptest::collection::vec(1..14u64, 6),
        steps in proptest::collection::vec(step(), 1..60),
    ) {
        let mut node = Node::new(3, MemoryPolicy::Wait);
        let mut next = [1u32; 6];
        // Whose answers do not count: they were withdrawn, or the process has ended.
        let mut gone = BTreeMap::new();
        for step in steps {
            match step {
                Step::Ask(id) => {
                    let of = next[id as usize];
                    next[id as usize] += 1;
                    node.ask(id, of, sizes[id as usize]);
                }
                Step::Cancel(id) => {
                    let of = next[id as usize] - 1;
                    if !node.answers.contains_key(&(id, of)) {
                        gone.insert((id, of), ());
                        node.event(Event::Cancel(ProcessId(id), of));
                    }
                }
                Step::Keep(id, gib) => {
                    let has = node.holds[&id] / GIB;
                    node.keep(id, has.min(gib));
                }
                Step::Kill(id) => {
                    for of in 1..next[id as usize] {
                        if !node.answers.contains_key(&(id, of)) {
                            gone.insert((id, of), ());
                        }
                    }
                    node.end(id);
                    node.join(id);
                }
                Step::Pass(ms) => node.run_for(Micros::from_millis(ms)),
            }
            for t in 0..3 {
                for of in 1..60 {
                    let both = node.answered(t, of);
                    let granted = |it: &Option<u64>| it.is_some_and(|gib| gib > 0);
                    let some = both.iter().any(granted);
                    prop_assert!(!some || both.iter().all(granted), "{both:?} of {t}'s {of}");
                }
            }
        }
        node.run_for(Micros::from_secs(70));
        for id in 0..6 {
            for of in 1..next[id as usize] {
                let answered = node.answers.contains_key(&(id, of));
                let withdrawn = gone.contains_key(&(id, of));
                prop_assert!(answered != withdrawn, "request {of} of process {id}");
            }
        }
    }
}
