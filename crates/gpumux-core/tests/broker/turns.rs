//! Tenants that wait for memory: how long, and whose turn comes first.

use std::collections::BTreeMap;

use gpumux_core::{
    Class, MemoryPolicy, Micros, TenantId,
    broker::{Event, LOOK, PATIENCE, PATIENCE_FOR_TURNS, ProcessId, Terms},
    ledger::Share,
};

use super::world::{GIB, Manner, World};

const S: Micros = Micros::from_secs(1);

/// A latency tenant with a guarantee of 30 GiB beside two batch tenants that do not fit into the rest of 100.
fn owner_beside_two_borrowers() -> World {
    let mut world = World::new(100 * GIB);
    world.tenant(1, Class::Latency, 30 * GIB);
    assert_eq!(world.allocate(1, 30 * GIB), 30 * GIB);
    for id in [2, 3] {
        world.tenant(id, Class::Batch, 0);
        world.set_busy(id, true);
    }
    world.ask(ProcessId(2), 1, 45 * GIB);
    world.ask(ProcessId(3), 1, 45 * GIB);
    world
}

#[test]
pub(crate) fn an_owner_that_worked_lately_keeps_its_guarantee() {
    // The owner has 20 requests a second.
    let mut world = owner_beside_two_borrowers();
    for _ in 0..6000 {
        for busy in [true, false] {
            world.set_busy(1, busy);
            world.run_for(Micros::from_millis(25));
            assert!(world.is_home(1));
        }
    }
    assert!(world.moves.iter().all(|it| it.1 != TenantId(1)));
    assert!(
        world.moves.len() >= 20,
        "the others alternate: {}",
        world.moves.len()
    );
}

#[test]
pub(crate) fn guaranteed_memory_comes_back_at_once_after_a_long_pause() {
    let mut world = owner_beside_two_borrowers();
    // Its guarantee is lent while it is idle.
    world.run_for(Micros::from_secs(100));
    assert!(!world.is_home(1));
    for _ in 0..20 {
        world.run_for(Micros::from_secs(60));
        let began = world.now;
        world.set_busy(1, true);
        world.event(Event::Waits(ProcessId(1)));
        while !world.is_home(1) {
            world.run_for(Micros::from_millis(10));
            // 30 GiB take 0.65 s each way; borrowers have no turn against it.
            assert!(world.now.saturating_sub(began) < Micros::from_secs(2));
        }
        world.run_for(S);
        world.set_busy(1, false);
    }
}

#[test]
pub(crate) fn idle_for_a_moment_is_not_idle() {
    let mut world = World::new(10 * GIB);
    world.tenant(1, Class::Batch, 0);
    assert_eq!(world.allocate(1, 8 * GIB), 8 * GIB);
    let process = world.tenant(2, Class::Batch, 0);
    world.set_busy(1, true);
    world.run_for(Micros::from_millis(200));
    world.set_busy(1, false);
    world.ask(process, 1, 6 * GIB);
    world.run_for(Micros::from_millis(150));
    assert!(world.moves.is_empty() && !world.frozen.contains(&TenantId(1)));
    world.run_for(S);
    assert_eq!(world.grants.get(&(process, 1)), Some(&(6 * GIB)));
}

#[test]
pub(crate) fn guaranteed_memory_does_not_wait_for_a_turn() {
    let mut world = World::new(100 * GIB);
    world.tenant(1, Class::Latency, 30 * GIB);
    assert_eq!(world.allocate(1, 30 * GIB), 30 * GIB);
    world.tenant(2, Class::Batch, 0);
    world.set_busy(2, true);
    assert_eq!(world.allocate(2, 80 * GIB), 80 * GIB);
    assert!(!world.is_home(1));
    // The borrower has only come.
    world.set_busy(1, true);
    let began = world.now;
    while !world.is_home(1) {
        world.run_for(Micros::from_millis(10));
        assert!(world.now.saturating_sub(began) < Micros::from_secs(2));
    }
}

/// A large request before small ones: what comes free for it is not given to these.
#[test]
pub(crate) fn a_large_request_is_not_passed_without_end() {
    let mut world = World::new(20 * GIB);
    for id in [1, 2, 3] {
        world.tenant(id, Class::Batch, 0);
        world.set_busy(id, true);
    }
    for id in [1, 2] {
        assert_eq!(world.allocate(id, 9 * GIB), 9 * GIB);
    }
    world.ask(ProcessId(3), 1, 17 * GIB);
    let began = world.now;
    world.run_for(S);
    // Each ends half a second after it has got its memory, and another comes.
    let small = |world: &mut World, id| {
        world.tenant(id, Class::Batch, 0);
        world.set_busy(id, true);
        world.ask(ProcessId(id), 1, 4 * GIB);
    };
    let mut others: Vec<(u64, Option<Micros>)> = (4..8).map(|id| (id, None)).collect();
    let mut next = 8;
    for (id, _) in &others {
        small(&mut world, *id);
    }
    while !world.grants.contains_key(&(ProcessId(3), 1)) {
        world.run_for(Micros::from_millis(10));
        for (id, got) in &mut others {
            if got.is_none() && world.grants.contains_key(&(ProcessId(*id), 1)) {
                *got = Some(world.now);
            }
            if got.is_some_and(|at| world.now >= at + Micros::from_millis(500)) {
                world.kill(*id);
                (*id, *got) = (next, None);
                next += 1;
                small(&mut world, *id);
            }
        }
        // One turn: forty times the move of 17 GiB.
        assert!(world.now.saturating_sub(began) < Micros::from_secs(20));
    }
}

/// Five latency tenants that always have work, the second with 10 GiB guaranteed: each that can come back does so. `asks` are tenants and GiB, and
/// how many ms pass then.
fn all_come_back(asks: [(&[(u64, u64)], u64); 2], fits: &[u64]) {
    let mut world = World::new(60 * GIB);
    for id in 1..=5 {
        world.tenant(id, Class::Latency, if id == 2 { 10 * GIB } else { 0 });
    }
    let mut ticket = 0;
    for (asks, pause) in asks {
        for (id, gib) in asks {
            ticket += 1;
            world.ask(ProcessId(*id), ticket, gib * GIB);
        }
        world.measure();
        world.run_for(Micros::from_millis(pause));
    }
    for id in 1..=5 {
        world.set_busy(id, true);
    }
    let mut home = BTreeMap::new();
    let end = world.now + Micros::from_secs(600);
    while world.now < end {
        world.run_for(Micros::from_millis(100));
        for id in fits {
            let home = home.entry(*id).or_insert(world.now);
            if world.is_home(*id) {
                *home = world.now;
            }
            let stood = world.now.saturating_sub(*home);
            assert!(stood < Micros::from_secs(180), "{id} has stood for {stood}");
        }
    }
}

/// One that needs nearly all of the device is the oldest that waits, and others change places: memory that is free already is no reason
/// to move more for it in vain.
#[test]
fn large_tenant_and_small_ones_all_come_back() {
    let first = [(2, 10), (5, 29), (4, 21), (4, 29), (2, 10)];
    all_come_back([(&first, 0), (&[(1, 25), (3, 11)], 0)], &[1, 2, 3, 4, 5]);
}

/// The oldest that waits can never be served beside a guarantee: what comes free is for the next.
#[test]
pub(crate) fn one_that_can_never_be_served_keeps_nothing_from_others() {
    let first = [(3, 10), (5, 29), (4, 21), (4, 29), (2, 10)];
    all_come_back([(&first, 2512), (&[(1, 25), (3, 11)], 2515)], &[1, 2, 3, 5]);
}

/// A tenant of two processes comes back, one of which is slower: its place is not given away in between.
#[test]
pub(crate) fn a_return_keeps_its_place_until_all_are_back() {
    let mut world = World::new(10 * GIB);
    world.tenant(1, Class::Batch, 0);
    world.process(11, 1);
    assert_eq!(world.allocate(1, GIB), GIB);
    assert_eq!(world.allocate(11, 6 * GIB), 6 * GIB);
    world.event(Event::Sleep(TenantId(1), 1));
    world.run_for(S);
    world.event(Event::Wake(TenantId(1), 2));
    // The small one is back, the large one is not.
    world.run_for(Micros::from_millis(60));
    assert_eq!(world.swapped(1), 6 * GIB);
    world.tenant(2, Class::Latency, 0);
    world.ask(ProcessId(2), 1, 5 * GIB);
    world.run_for(Micros::from_millis(20));
    assert!(!world.grants.contains_key(&(ProcessId(2), 1)));
    world.run_for(S);
    assert!(world.is_home(1) || !world.frozen.is_empty());
}

#[test]
pub(crate) fn memory_that_was_waited_for_is_not_taken_at_once() {
    let mut world = World::new(10 * GIB);
    world.tenant(1, Class::Batch, 0);
    world.set_busy(1, true);
    assert_eq!(world.allocate(1, 8 * GIB), 8 * GIB);
    // A program that waits in an allocation has no work meanwhile.
    world.tenant(2, Class::Batch, 0);
    assert_eq!(world.allocate(2, 6 * GIB), 6 * GIB);
    world.run_for(Micros::from_millis(100));
    assert!(world.is_home(2) && !world.frozen.contains(&TenantId(2)));
    world.set_busy(2, true);
    world.run_for(S);
    assert!(world.is_home(2));
}

#[test]
pub(crate) fn waiting_requests_of_a_process_and_tenant_are_bounded() {
    let mut world = World::new(10 * GIB);
    world.tenant(1, Class::Latency, 0);
    assert_eq!(world.allocate(1, 8 * GIB), 8 * GIB);
    world.set_busy(1, true);
    world.tenant(2, Class::Batch, 0);
    for process in 21..=29 {
        world.process(process, 2);
    }
    let mut waiting = Vec::new();
    for process in [2].into_iter().chain(21..=29) {
        for ticket in 1..=500 {
            world.ask(ProcessId(process), ticket, 4 * GIB);
        }
        let refused = (1..=500)
            .filter(|ticket| world.grants.get(&(ProcessId(process), *ticket)) == Some(&0))
            .count();
        waiting.push(500 - refused);
    }
    assert_eq!(waiting, [256, 256, 256, 256, 0, 0, 0, 0, 0, 0]);
    // The end of one makes room for another's.
    world.kill(2);
    world.ask(ProcessId(29), 501, 4 * GIB);
    world.run_for(Micros::from_millis(1));
    assert!(!world.grants.contains_key(&(ProcessId(29), 501)));
}

/// A request for more memory ends, whatever others are entitled to: their memory quanta do not lengthen it.
#[test]
pub(crate) fn request_without_room_fails_after_the_time_of_its_policy() {
    for (policy, bound) in [
        (MemoryPolicy::SwapOthers, PATIENCE_FOR_TURNS),
        (MemoryPolicy::Wait, PATIENCE),
        (MemoryPolicy::Fail, Micros::ZERO),
    ] {
        let mut world = World::new(10 * GIB);
        // It always has work with memory that is guaranteed to it.
        world.tenant(1, Class::Latency, 6 * GIB);
        assert_eq!(world.allocate(1, 6 * GIB), 6 * GIB);
        world.set_busy(1, true);
        let process = world.tenant(2, Class::Batch, 0);
        let terms = Terms {
            class: Class::Batch,
            share: Share {
                guaranteed: 0,
                limit: u64::MAX,
            },
            policy,
            sleep_after: None,
        };
        world.event(Event::Tenant(TenantId(2), terms));
        let asked = world.now;
        world.ask(process, 1, 6 * GIB);
        while !world.grants.contains_key(&(process, 1)) {
            world.run_for(Micros::from_millis(10));
            assert!(world.now < asked + bound + S, "{policy:?}");
        }
        assert_eq!(world.grants[&(process, 1)], 0, "{policy:?}");
        assert!(world.now >= asked + bound, "{policy:?}");
    }
}

#[test]
pub(crate) fn a_flood_of_requests_does_not_delay_others_beyond_a_look() {
    let mut world = World::new(10 * GIB);
    world.tenant(1, Class::Latency, 0);
    assert_eq!(world.allocate(1, 6 * GIB), 6 * GIB);
    world.set_busy(1, true);
    let hostile = world.tenant(2, Class::Batch, 0);
    for ticket in 1..=200 {
        world.ask(hostile, ticket, 6 * GIB);
    }
    world.run_for(S);
    world.tenant(3, Class::Batch, 0);
    // Each event of the flood costs little: all is looked at once in 2 ms.
    let began = world.now;
    assert!(!world.broker.settles(began));
    for ticket in 201..=300 {
        world.ask(hostile, ticket, 6 * GIB);
    }
    world.ask(ProcessId(3), 1, GIB);
    assert!(!world.grants.contains_key(&(ProcessId(3), 1)));
    while !world.grants.contains_key(&(ProcessId(3), 1)) {
        world.run_for(Micros(100));
    }
    let waited = world.now.saturating_sub(began);
    assert!(waited <= LOOK, "{waited}");
    assert_eq!(world.grants.get(&(ProcessId(3), 1)), Some(&GIB));
}

/// Both requests need what a third holds, and its freeze hangs. Neither can run with what it takes from the other.
#[test]
pub(crate) fn two_that_wait_for_a_third_do_not_exchange_their_memory_without_end() {
    let mut world = World::new(100 * GIB);
    for (id, have) in [(1, 33), (2, 46), (3, 21)] {
        world.tenant(id, Class::Batch, 0);
        assert_eq!(world.allocate(id, have * GIB), have * GIB);
        world.set_busy(id, true);
    }
    world.unfreezable.insert(TenantId(3), Micros::from_secs(5));
    world.run_for(Micros::from_secs(10));
    for (id, more) in [(1, 59), (2, 48)] {
        world.set_busy(id, false);
        world.ask(ProcessId(id), 1, more * GIB);
    }
    world.set_busy(3, false);
    let before = world.moves.len();
    for _ in 0..600 {
        world.run_for(Micros::from_millis(50));
        for id in [1, 2] {
            if !world.is_home(id) {
                world.event(Event::Waits(ProcessId(id)));
            }
        }
    }
    let moves = world.moves.len() - before;
    assert!(moves <= 120, "{moves} moves in 30 s");
}

/// A tenant that sleeps after so long without work.
fn sleeper(guaranteed: u64, after: Micros) -> Terms {
    Terms {
        class: Class::Standard,
        share: Share {
            guaranteed,
            limit: u64::MAX,
        },
        policy: MemoryPolicy::SwapOthers,
        sleep_after: Some(after),
    }
}

/// With no time, as soon as it has no work, and not before.
#[test]
fn tenant_that_sleeps_at_once_is_moved_without_work_only() {
    let mut world = World::new(10 * GIB);
    world.tenant(1, Class::Standard, 0);
    assert_eq!(world.allocate(1, 4 * GIB), 4 * GIB);
    world.set_busy(1, true);
    let orders = world.orders;
    world.event(Event::Tenant(TenantId(1), sleeper(0, Micros::ZERO)));
    world.run_for(Micros::from_secs(10));
    assert_eq!((world.swapped(1), world.orders), (0, orders), "at work");
    world.set_busy(1, false);
    world.run_for(Micros::from_secs(10));
    assert_eq!(world.swapped(1), 4 * GIB);
}

/// It has no work while it waits, and would have none as long as it is moved each time.
#[test]
fn tenant_that_sleeps_at_once_gets_the_memory_that_is_guaranteed_to_it() {
    for after in [Micros::ZERO, Micros::from_millis(500)] {
        let mut world = World::new(10 * GIB);
        world.tenant(2, Class::Standard, 0);
        assert_eq!(world.allocate(2, 8 * GIB), 8 * GIB);
        world.set_busy(2, true);
        world.tenant(1, Class::Standard, 0);
        world.event(Event::Tenant(TenantId(1), sleeper(4 * GIB, after)));
        assert_eq!(world.allocate(1, GIB), GIB);
        world.ask(ProcessId(1), 77, 3 * GIB);
        world.run_for(Micros::from_secs(5));
        let granted = world.grants.get(&(ProcessId(1), 77));
        assert_eq!(granted, Some(&(3 * GIB)), "{after:?}");
    }
}

/// More of it may move later than when its user had it moved: what it was granted and had not used then.
#[test]
fn sleeper_that_gives_more_room_still_sleeps() {
    for unused in [GIB, 0] {
        let mut world = World::new(10 * GIB);
        world.tenant(1, Class::Batch, 0);
        world.set_busy(1, true);
        assert_eq!(world.allocate(1, 6 * GIB), 6 * GIB);
        let puppet = world.puppets.get_mut(&ProcessId(1)).expect("there");
        (puppet.unused, puppet.trim) = (GIB, Micros::from_secs(3600));
        world.event(Event::Sleep(TenantId(1), 1));
        world.run_for(Micros::from_secs(5));
        assert_eq!(world.answers.get(&1), Some(&Ok(())));
        let puppet = world.puppets.get_mut(&ProcessId(1)).expect("there");
        puppet.unused = unused;
        let process = world.tenant(2, Class::Batch, 0);
        world.ask(process, 1, 9 * GIB);
        world.run_for(Micros::from_secs(20));
        world.kill(2);
        world.run_for(Micros::from_secs(60));
        assert!(!world.is_home(1), "{unused}");
        world.event(Event::Wake(TenantId(1), 2));
        world.run_for(Micros::from_secs(10));
        assert!(world.is_home(1), "{unused}");
    }
}

/// It could not use its memory, and would not answer the order to bring it back.
#[test]
fn stopped_tenant_gets_no_room_until_it_goes_on() {
    let mut world = World::new(10 * GIB);
    for id in [1, 2] {
        world.tenant(id, Class::Batch, 0);
        world.set_busy(id, true);
    }
    assert_eq!(world.allocate(1, 8 * GIB), 8 * GIB);
    world.run_for(Micros::from_secs(5));
    assert_eq!(world.allocate(2, 8 * GIB), 8 * GIB);
    assert!(!world.is_home(1));
    world.puppets.get_mut(&ProcessId(1)).expect("there").manner = Manner::Stopped;
    world.run_for(S);
    world.kill(2);
    world.run_for(Micros::from_secs(60));
    let process = world.tenant(3, Class::Batch, 0);
    world.ask(process, 1, 8 * GIB);
    world.run_for(Micros::from_secs(1));
    assert_eq!(world.grants.get(&(process, 1)), Some(&(8 * GIB)));
    world.wake_up(1);
    world.run_for(Micros::from_secs(60));
    assert!(world.is_home(1));
}

/// A latency tenant gives way after ten turns of a batch tenant that waits. That has its own turn then, although the other's claim counts as older
/// by its class as soon as it is moved.
#[test]
fn batch_tenant_for_which_one_of_a_higher_class_gave_way_has_a_turn() {
    let mut world = World::new(60 * GIB);
    let classes = [Class::Batch, Class::Batch, Class::Batch, Class::Latency];
    for (id, class) in (1..).zip(classes) {
        world.tenant(id, class, 0);
    }
    for (ticket, (id, gib)) in (1..).zip([(1, 20), (4, 11), (3, 27), (2, 27), (4, 2)]) {
        world.ask(ProcessId(id), ticket, gib * GIB);
    }
    (1..=4).for_each(|id| world.set_busy(id, true));
    let mut home = [0; 4];
    for _ in 0..3_000 {
        world.run_for(Micros::from_millis(100));
        for id in 1..=4 {
            home[id as usize - 1] += i32::from(world.is_home(id));
        }
    }
    // In tenths of a second, of five minutes.
    assert!(home[0] > 100, "{home:?}");
}

/// The little that it lacks comes free before what two others need that have waited for longer, and it gives way to them at once.
#[test]
fn one_that_comes_back_without_a_turn_keeps_its_age() {
    let mut world = World::new(60 * GIB);
    let (latency, standard, batch) = (Class::Latency, Class::Standard, Class::Batch);
    for (id, class) in (1..).zip([latency, latency, batch, standard, batch]) {
        world.tenant(id, class, 0);
    }
    for (id, gib) in [(5, 8), (3, 25), (1, 16), (2, 13), (4, 28)] {
        world.ask(ProcessId(id), 1, gib * GIB);
    }
    (1..=5).for_each(|id| world.set_busy(id, true));
    world.run_for(Micros(300 * S.0));
    let mut home = 0;
    for _ in 0..300 {
        world.run_for(S);
        home += u64::from(world.is_home(5));
    }
    assert!(home > 20, "{home} s");
}

/// A tenant on the host may still have memory on the device, which an older claim takes. There is room for both at that moment if a third
/// tenant has just failed to come back.
#[test]
fn tenant_chosen_for_an_older_claim_does_not_return_at_once() {
    let mut world = World::new(60 * GIB);
    for id in 1..=5 {
        let class = if id < 4 {
            Class::Standard
        } else {
            Class::Latency
        };
        world.tenant(id, class, if id == 3 { 7 * GIB } else { 0 });
    }
    for (id, gib) in [(3, 7), (5, 3), (2, 20), (1, 24)] {
        world.ask(ProcessId(id), 1, gib * GIB);
    }
    world.run_for(Micros::from_millis(1678));
    world.ask(ProcessId(5), 2, 6 * GIB);
    world.set_busy(1, true);
    world.puppets.get_mut(&ProcessId(3)).expect("there").manner = Manner::CannotReturn(1);
    world.run_for(Micros::from_millis(148));
    (1..=5).for_each(|id| world.set_busy(id, true));
    // The world looks at the orders.
    world.run_for(Micros::from_secs(60));
}
