//! Memory of elastic ranges that needs no copy.

use gpumux_core::{
    Class, Micros, TenantId,
    broker::{Event, FREEZE, HEDGE, ProcessId},
};

use super::world::{GIB, Manner, World};

const S: Micros = Micros::from_secs(1);

/// A borrower of 100 GiB that works all the time, and a tenant with a guarantee of 20 GiB, on a device of 110.
fn borrower(free: u64, cached: u64) -> World {
    let mut world = World::new(110 * GIB);
    world.tenant(1, Class::Batch, 0);
    world.tenant(2, Class::Standard, 20 * GIB);
    assert_eq!(world.allocate(1, 100 * GIB), 100 * GIB);
    world.offer(1, free * GIB, cached * GIB);
    world.set_busy(1, true);
    world.run_for(S);
    world
}

/// How long the guarantee took to be there.
fn claim(world: &mut World) -> Micros {
    let began = world.now;
    assert_eq!(world.allocate(2, 20 * GIB), 20 * GIB);
    world.now.saturating_sub(began)
}

#[test]
pub(crate) fn guaranteed_memory_comes_of_free_pages_first() {
    let mut world = borrower(30, 30);
    let took = claim(&mut world);
    assert!(took <= Micros::from_millis(200), "{took}");
    assert_eq!(world.moves, [], "nothing was copied");
    let droppable = world.puppets[&ProcessId(1)].droppable;
    assert_eq!(
        droppable.cached,
        30 * GIB,
        "caches stay while pages are free"
    );
    assert!(!world.frozen.contains(&TenantId(1)), "it goes on");
}

#[test]
fn caches_go_before_anything_is_copied() {
    let mut world = borrower(2, 30);
    claim(&mut world);
    assert_eq!(world.moves, []);
    assert_eq!(world.puppets[&ProcessId(1)].droppable.free, 0);
    // Too little is free: memory in use moves, with what needs no copy.
    let mut world = borrower(2, 2);
    claim(&mut world);
    assert!(world.drops.is_empty() && !world.moves.is_empty());
}

#[test]
fn member_of_a_group_gives_what_needs_no_copy_and_no_more() {
    let mut world = borrower(10, 15);
    world.in_group.extend([1, 2].map(TenantId));
    claim(&mut world);
    assert!(!world.drops.is_empty() && !world.frozen.contains(&TenantId(1)));
    world.tenant(3, Class::Standard, 20 * GIB);
    world.ask(ProcessId(3), 1, 20 * GIB);
    world.run_for(Micros::from_secs(60));
    assert_eq!(
        (world.moves.len(), world.grants.get(&(ProcessId(3), 1))),
        (0, None)
    );
}

#[test]
fn caches_stay_while_a_claim_exceeds_its_guarantee() {
    let mut world = borrower(0, 50);
    // Its turn has not ended, and the request is no guarantee.
    world.tenant(3, Class::Batch, 0);
    world.ask(ProcessId(3), 1, 20 * GIB);
    world.run_for(Micros::from_millis(500));
    assert!(world.drops.is_empty(), "{:?}", world.drops);
    // What is free goes at once.
    world.offer(1, 30 * GIB, 20 * GIB);
    world.run_for(Micros::from_millis(500));
    assert_eq!(world.grants.get(&(ProcessId(3), 1)), Some(&(20 * GIB)));
}

#[test]
fn stopped_holder_of_free_pages_delays_a_guarantee_once() {
    let mut world = borrower(30, 0);
    world.puppets.get_mut(&ProcessId(1)).expect("there").manner = Manner::Stopped;
    world.ask(ProcessId(2), 1, 20 * GIB);
    world.run_for(Micros::from_secs(60));
    assert!(!world.frozen.contains(&TenantId(1)), "nothing has begun");
    world.wake_up(1);
    world.run_for(Micros::from_secs(61));
    assert_eq!(world.grants.get(&(ProcessId(2), 1)), Some(&(20 * GIB)));
    assert!(!world.frozen.contains(&TenantId(1)) && world.is_home(1));
}

#[test]
fn stopped_holder_is_reported_once_others_are_guaranteed_what_it_has() {
    let mut world = borrower(30, 0);
    world.puppets.get_mut(&ProcessId(1)).expect("there").manner = Manner::Stopped;
    // Not for what no tenant is guaranteed.
    world.tenant(3, Class::Standard, 0);
    world.ask(ProcessId(3), 1, 20 * GIB);
    world.run_for(HEDGE + S);
    assert_eq!(world.silent, []);
    world.event(Event::Cancel(ProcessId(3), 1));
    world.wake_up(1);
    world.run_for(Micros::from_secs(70));
    world.puppets.get_mut(&ProcessId(1)).expect("there").manner = Manner::Stopped;
    let asked = world.now;
    world.ask(ProcessId(2), 1, 20 * GIB);
    world.run_for(HEDGE + S);
    let [(at, ProcessId(1))] = world.silent[..] else {
        panic!("{:?}", world.silent);
    };
    assert!(at <= asked + HEDGE + Micros::from_millis(200), "{at}");
    world.wake_up(1);
    world.run_for(S);
    assert_eq!(world.grants.get(&(ProcessId(2), 1)), Some(&(20 * GIB)));
    assert_eq!(world.silent.len(), 1);
}

/// A holder of free pages that stops after it was frozen for them, until that must have been noticed.
fn stopped_in_the_middle() -> World {
    let mut world = borrower(30, 0);
    world.ask(ProcessId(2), 1, 20 * GIB);
    while !world.frozen.contains(&TenantId(1)) {
        world.run_for(Micros(50));
    }
    world.puppets.get_mut(&ProcessId(1)).expect("there").manner = Manner::Stopped;
    world.run_for(FREEZE + HEDGE + S);
    world
}

#[test]
fn holder_that_stops_in_the_middle_is_reported() {
    let world = stopped_in_the_middle();
    assert!(world.standing(1).stuck && !world.silent.is_empty());
}

/// It may map memory anew at any moment.
#[test]
fn holder_that_stops_while_it_frees_pages_stays_frozen() {
    let mut world = stopped_in_the_middle();
    assert!(world.standing(1).stuck && world.frozen.contains(&TenantId(1)));
    world.wake_up(1);
    world.run_for(S);
    assert_eq!(world.grants.get(&(ProcessId(2), 1)), Some(&(20 * GIB)));
    assert!(!world.frozen.contains(&TenantId(1)) && world.is_home(1));
}

#[test]
fn wrong_report_of_free_pages_delays_a_guarantee_once() {
    let mut world = borrower(30, 0);
    world.puppets.get_mut(&ProcessId(1)).expect("there").manner = Manner::MovesNothing;
    world.ask(ProcessId(2), 1, 20 * GIB);
    world.run_for(S);
    assert_eq!(world.drops.len(), 1, "it is not asked again at once");
    world.puppets.get_mut(&ProcessId(1)).expect("there").manner = Manner::Prompt;
    world.run_for(Micros::from_secs(70));
    assert_eq!(world.grants.get(&(ProcessId(2), 1)), Some(&(20 * GIB)));
}

#[test]
fn holder_that_ends_in_the_middle_is_no_delay() {
    let mut world = borrower(30, 0);
    world.puppets.get_mut(&ProcessId(1)).expect("there").manner = Manner::Stopped;
    world.ask(ProcessId(2), 1, 20 * GIB);
    world.run_for(Micros::from_millis(100));
    world.kill(1);
    world.run_for(Micros::from_millis(200));
    assert_eq!(world.grants.get(&(ProcessId(2), 1)), Some(&(20 * GIB)));
}

#[test]
fn withdrawn_request_moves_nothing() {
    let mut world = borrower(0, 0);
    world.ask(ProcessId(2), 1, 20 * GIB);
    world.event(Event::Cancel(ProcessId(2), 1));
    world.run_for(Micros::from_secs(5));
    assert_eq!(world.moves, []);
    assert!(!world.standing(2).waits);
}
