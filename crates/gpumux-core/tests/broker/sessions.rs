//! Sessions that end while their processes live: the daemon was killed, or a lease expired on a busy machine.

use std::collections::{BTreeMap, btree_map::Entry};

use gpumux_core::{
    Class, Micros, TenantId,
    broker::{Event, PATIENCE_FOR_TURNS, ProcessId, RETURN, Reply, TRIM},
};

use super::{
    programs::Random,
    world::{GIB, Manner, Puppet, World},
};

const MS: fn(u64) -> Micros = Micros::from_millis;
const S: Micros = Micros::from_secs(1);

/// Tenants that need 6 of 10 GiB each and always have work: the last one has its memory.
fn that_do_not_fit(tenants: u64) -> World {
    let mut world = World::new(10 * GIB);
    for id in 1..=tenants {
        world.tenant(id, Class::Batch, 0);
        world.set_busy(id, true);
        assert_eq!(world.allocate(id, 6 * GIB), 6 * GIB);
    }
    world
}

/// Time passes until this is so.
#[track_caller]
fn run_until(world: &mut World, is_so: impl Fn(&World) -> bool) {
    for _ in 0..10_000 {
        if is_so(world) {
            return;
        }
        world.run_for(MS(10));
    }
    panic!("not within 100 s");
}

/// Its session ends and begins anew. That it has work is seen a moment later.
fn begin_anew(world: &mut World, id: u64) {
    let puppet = world.lose(id);
    world.run_for(MS(100));
    world.begin_session(id, puppet);
    world.run_for(MS(20));
    world.set_busy(id, true);
}

#[test]
pub(crate) fn tenant_that_waits_keeps_its_place_over_a_new_session() {
    let mut world = that_do_not_fit(3);
    // Since its first part was moved.
    let waits_since = |id| {
        let own = world.moves.iter().rev().filter(|it| it.1 == TenantId(id));
        own.take_while(|it| it.2).last().expect("it gave way").0
    };
    let (older, younger) = match waits_since(1) < waits_since(2) {
        true => (1, 2),
        false => (2, 1),
    };
    begin_anew(&mut world, older);
    run_until(&mut world, |it| it.is_home(older) || it.is_home(younger));
    assert!(world.is_home(older), "the other waits since later");
    // That was its turn: what it waits for from now on is no older than it is.
    begin_anew(&mut world, older);
    run_until(&mut world, |it| !it.is_home(older));
    begin_anew(&mut world, older);
    run_until(&mut world, |it| it.is_home(older) || it.is_home(3));
    assert!(world.is_home(3), "it waits since earlier");
}

#[test]
pub(crate) fn request_keeps_its_place_over_a_new_session() {
    let mut world = World::new(10 * GIB);
    world.tenant(1, Class::Batch, 0);
    world.set_busy(1, true);
    assert_eq!(world.allocate(1, 8 * GIB), 8 * GIB);
    for id in [2, 3] {
        world.tenant(id, Class::Batch, 0);
        world.ask(ProcessId(id), 1, 5 * GIB);
        world.run_for(MS(100));
    }
    let puppet = world.lose(2);
    world.run_for(MS(100));
    world.begin_session(2, puppet);
    world.ask(ProcessId(2), 2, 5 * GIB);
    let granted = |world: &World, id, ticket| world.grants.contains_key(&(ProcessId(id), ticket));
    run_until(&mut world, |it| granted(it, 2, 2) || granted(it, 3, 1));
    assert!(granted(&world, 2, 2), "the other was asked later");
}

/// A request waits no longer for new sessions, and after its answer the next one is a new one.
#[test]
fn request_is_refused_after_its_time_over_new_sessions() {
    let mut world = World::new(10 * GIB);
    world.tenant(1, Class::Latency, 6 * GIB);
    assert_eq!(world.allocate(1, 6 * GIB), 6 * GIB);
    world.set_busy(1, true);
    world.tenant(2, Class::Batch, 0);
    let asked = world.now;
    for ticket in 1..=20 {
        world.ask(ProcessId(2), ticket, 6 * GIB);
        world.run_for(Micros::from_secs(20));
        if let Some(bytes) = world.grants.get(&(ProcessId(2), ticket)) {
            assert_eq!(*bytes, 0);
            break;
        }
        begin_anew(&mut world, 2);
    }
    let waited = world.now.saturating_sub(asked);
    assert!(waited >= PATIENCE_FOR_TURNS, "{waited}");
    assert!(
        waited <= PATIENCE_FOR_TURNS + Micros::from_secs(21),
        "{waited}"
    );
    world.ask(ProcessId(2), 1000, 6 * GIB);
    world.run_for(Micros::from_secs(20));
    assert!(!world.grants.contains_key(&(ProcessId(2), 1000)));
}

#[test]
pub(crate) fn turn_is_no_longer_for_new_sessions() {
    let mut world = that_do_not_fit(2);
    let began = world.now;
    while !world.is_home(1) {
        begin_anew(&mut world, 2);
        world.run_for(MS(500));
        // Forty times the move of 3 GiB.
        assert!(world.now.saturating_sub(began) < Micros::from_secs(6));
    }
}

#[test]
fn tenant_is_not_idle_because_its_session_has_only_begun() {
    let mut world = that_do_not_fit(2);
    world.run_for(S);
    begin_anew(&mut world, 2);
    world.run_for(S);
    assert!(world.is_home(2));
}

/// So much time passes, and the driver reports each second.
fn pass(world: &mut World, seconds: u64) {
    for _ in 0..seconds {
        world.run_for(S);
        world.measure();
    }
}

/// A process with 6 of 10 GiB has had no session for so long.
fn without_session(seconds: u64) -> (World, Puppet) {
    let mut world = World::new(10 * GIB);
    world.tenant(2, Class::Batch, 0);
    world.tenant(1, Class::Batch, 0);
    assert_eq!(world.allocate(1, 6 * GIB), 6 * GIB);
    world.measure();
    let puppet = world.lose(1);
    pass(&mut world, seconds);
    (world, puppet)
}

#[test]
pub(crate) fn request_waits_for_a_neighbour_without_session() {
    for seconds in [0, 8] {
        let (mut world, puppet) = without_session(seconds);
        let line = world.broker.lines().remove(0);
        assert!(line.free < 4 * GIB, "it is not free: {line:?}");
        world.ask(ProcessId(2), 1, 8 * GIB);
        pass(&mut world, 5);
        assert!(!world.grants.contains_key(&(ProcessId(2), 1)));
        world.begin_session(1, puppet);
        pass(&mut world, 5);
        assert_eq!(world.grants.get(&(ProcessId(2), 1)), Some(&(8 * GIB)));
    }
}

#[test]
fn memory_of_a_process_without_session_is_foreign_at_last() {
    let (mut world, _) = without_session(0);
    world.run_for(RETURN.1);
    pass(&mut world, 2);
    world.ask(ProcessId(2), 1, 8 * GIB);
    world.run_for(TRIM + TRIM);
    assert_eq!(world.grants.get(&(ProcessId(2), 1)), Some(&0));
}

/// The connection of a process that ends closes a moment before it ends.
#[test]
fn memory_of_a_process_without_session_is_free_once_it_ends() {
    for seconds in [0, 8] {
        let (mut world, _) = without_session(seconds);
        world.event(Event::Left(ProcessId(1)));
        assert_eq!(world.allocate(2, 8 * GIB), 8 * GIB);
        assert_eq!(world.missing(2), 2, "the driver has not freed it");
    }
}

/// The process has ended after all, or has freed its memory.
#[test]
fn memory_of_a_process_without_session_is_free_once_it_is_freed() {
    let (mut world, _) = without_session(1);
    world.unfreed = 0;
    world.measure();
    assert_eq!(world.allocate(2, 8 * GIB), 8 * GIB);
    let (mut world, _) = without_session(1);
    world.event(Event::TenantGone(TenantId(1)));
    assert_eq!(world.allocate(2, 8 * GIB), 8 * GIB);
    assert_eq!(world.missing(2), 2, "the driver has not freed it");
}

/// Three that do not fit together, whose sessions end at random moments, of all at once where the daemon begins anew: the longest that
/// one stood still, and the moves. With a `horizon`, the broker's time begins anew again and again.
fn play(seed: u64, horizon: Option<Micros>) -> (Micros, Vec<(Micros, TenantId, bool, u64)>) {
    let mut world = World::new(10 * GIB);
    let tenants = [1, 2, 3];
    for id in tenants {
        world.tenant(id, Class::Batch, 0);
        world.set_busy(id, true);
        assert_eq!(world.allocate(id, 9 * GIB / 2), 9 * GIB / 2);
    }
    let mut random = Random(seed);
    let mut apart: BTreeMap<u64, (Micros, Puppet)> = BTreeMap::new();
    let mut seen = tenants.map(|id| (id, world.now));
    let (end, mut longest) = (world.now + Micros::from_secs(400), Micros::ZERO);
    while world.now < end {
        let until = |world: &World, random: &mut Random| world.now + MS(50 + random.next(1500));
        if random.next(150) == 0 {
            let lost = 1 + random.next(3);
            if let Entry::Vacant(place) = apart.entry(lost) {
                let puppet = world.lose(lost);
                place.insert((until(&world, &mut random), puppet));
            }
        }
        if random.next(3000) == 0 {
            for puppet in world.restart(&tenants) {
                apart.insert(puppet.tenant.0, (until(&world, &mut random), puppet));
            }
        }
        if let Some(horizon) = horizon {
            world.rebase(horizon);
        }
        world.run_for(MS(10));
        if world.now.0 % S.0 < 10_000 {
            world.measure();
        }
        let now = world.now;
        for (id, (_, puppet)) in apart.extract_if(.., |_, (at, _)| *at <= now) {
            world.begin_session(id, puppet);
        }
        for (id, seen) in &mut seen {
            let there = !apart.contains_key(id);
            world.set_busy(*id, there && world.is_home(*id));
            if there && world.is_home(*id) {
                *seen = now;
            }
            longest = longest.max(now.saturating_sub(*seen));
        }
    }
    (longest, world.moves)
}

/// A turn of 4 s for each of the others, and the time without sessions.
#[test]
fn all_go_on_whenever_sessions_end() {
    for seed in 1..=20 {
        let (longest, _) = play(seed * 0x9E37_79B9, None);
        assert!(
            longest < Micros::from_secs(25),
            "{seed}: one stood still for {longest}"
        );
    }
}

/// The model in which every order of events is tried counts on it.
#[test]
fn broker_decides_alike_whenever_its_time_begins() {
    for seed in 1..=5 {
        let horizon = Some(Micros::from_secs(500));
        assert_eq!(play(seed, horizon).1, play(seed, None).1, "{seed}");
    }
}

/// A process whose memory went to the host before has its next session in the middle of a move.
#[test]
fn process_with_memory_on_the_host_joins_a_move_and_stays_frozen() {
    for unfreezable in [false, true] {
        let mut world = World::new(10 * GIB);
        world.tenant(1, Class::Batch, 0);
        world.process(11, 1);
        for process in [1, 11] {
            assert_eq!(world.allocate(process, 2 * GIB), 2 * GIB);
        }
        world.event(Event::Sleep(TenantId(1), 1));
        world.run_for(S);
        let lost = world.lose(11);
        world.event(Event::Wake(TenantId(1), 2));
        world.run_for(S);
        assert!(world.is_home(1) && lost.holding.swapped > 0);
        let other = world.puppets.get_mut(&ProcessId(1)).expect("there");
        match unfreezable {
            false => other.manner = Manner::Slow(Micros::from_secs(5)),
            true => drop(world.unfreezable.insert(TenantId(1), Micros::from_secs(2))),
        }
        world.event(Event::Sleep(TenantId(1), 3));
        world.run_for(S);
        world.unfreezable.clear();
        world.begin_session(11, lost);
        assert!(world.frozen.contains(&TenantId(1)), "{unfreezable}");
        world.run_for(Micros::from_secs(20));
        assert!(world.answers.contains_key(&3), "{unfreezable}");
        world.event(Event::Wake(TenantId(1), 4));
        world.run_for(Micros::from_secs(10));
        assert!(world.is_home(1), "{unfreezable}");
        let left = (world.swapped(1), world.frozen.len());
        assert_eq!(left, (0, 0), "{unfreezable}");
    }
}

/// A program that gives caches back may take its time: its answer comes to the next daemon, which has named another order like that.
#[test]
fn answer_to_an_order_of_another_kind_ends_no_step() {
    let mut world = World::new(10 * GIB);
    let process = world.tenant(1, Class::Batch, 0);
    assert_eq!(world.allocate(1, 4 * GIB), 4 * GIB);
    world.puppets.get_mut(&process).expect("there").manner = Manner::Stopped;
    world.event(Event::Sleep(TenantId(1), 1));
    (1..100).for_each(|op| world.event(Event::Reply(process, op, Reply::Freed(0))));
    world.run_for(MS(10));
    assert!(!world.frozen.contains(&TenantId(1)), "its gate is open");
}

/// Its gate is open, and it has nothing that could move.
#[test]
fn process_that_joined_a_moved_tenant_refuses_no_sleep() {
    let mut world = World::new(60 * GIB);
    for (id, gib) in [(1, 20), (2, 45)] {
        world.tenant(id, Class::Batch, 0);
        world.allocate(id, gib * GIB);
    }
    assert!((1..20 * GIB).contains(&world.swapped(1)), "a part is away");
    world.set_busy(2, true);
    world.process(11, 1);
    world.event(Event::Sleep(TenantId(1), 7));
    world.run_for(Micros::from_secs(5));
    assert_eq!(world.answers.get(&7), Some(&Ok(())));
    assert_eq!(world.swapped(1), 20 * GIB);
}
