//! Processes that end: the driver frees their memory only some time later.

use gpumux_core::{Class, MemoryPolicy, Micros, broker::LEAVE};

use super::world::{GIB, Manner, World};

const MS: fn(u64) -> Micros = Micros::from_millis;

/// One that has 8 of 10 GiB ends, and the driver frees nothing of it yet.
fn ended(world: &mut World) {
    world.tenant(1, Class::Standard, 0);
    assert_eq!(world.allocate(1, 8 * GIB), 8 * GIB);
    world.measure();
    world.kill(1);
    world.unfreed = 8 * GIB;
}

#[test]
pub(crate) fn memory_of_an_ended_process_is_waited_for() {
    let mut world = World::new(10 * GIB);
    let owner = world.tenant(2, Class::Standard, 8 * GIB);
    ended(&mut world);
    let free = world.broker.lines()[0].free;
    assert_eq!(world.allocate(2, 6 * GIB), 6 * GIB, "accounted as free");
    world.puppets.get_mut(&owner).expect("there").unused = 6 * GIB;
    assert_eq!(world.missing(2), 2, "the driver has not freed it");
    // Looks that still find it do not make it foreign.
    for _ in 0..3 {
        world.run_for(MS(1000));
        world.measure();
        assert_eq!(world.broker.lines()[0].free, free - 6 * GIB);
    }
    assert_eq!(world.missing(2), 2);
    world.unfreed = GIB;
    world.measure();
    assert_eq!(world.missing(2), 2, "not all of it");
    world.unfreed = 0;
    world.measure();
    assert_eq!(world.missing(2), 1, "the driver's answer has another cause");
}

#[test]
fn memory_that_is_never_freed_is_waited_for_within_a_bound() {
    let mut world = World::new(10 * GIB);
    world.tenant(2, Class::Standard, 0);
    ended(&mut world);
    assert_eq!(world.allocate(2, GIB), GIB);
    world.run_for(LEAVE.saturating_sub(MS(100)));
    assert_eq!(world.missing(2), 2);
    world.run_for(MS(100));
    assert_eq!(world.missing(2), 1);
    // From then on it counts as foreign.
    world.measure();
    world.measure();
    assert!(world.broker.lines()[0].free < 2 * GIB);
}

#[test]
fn ends_on_a_device_do_not_hide_what_foreign_processes_use() {
    let mut world = World::new(16 * GIB);
    world.tenant(2, Class::Standard, 0);
    ended(&mut world);
    let free = world.broker.lines()[0].free;
    // Of 11 GiB more than is accounted for, 8 are of the one that has ended.
    world.unfreed = 11 * GIB;
    world.measure();
    world.run_for(MS(1000));
    world.measure();
    assert_eq!(world.broker.lines()[0].free, free - 3 * GIB);
}

#[test]
fn process_that_connects_again_is_counted_once() {
    let mut world = World::new(10 * GIB);
    let process = world.tenant(1, Class::Standard, 0);
    assert_eq!(world.allocate(1, 8 * GIB), 8 * GIB);
    let holding = world.puppets[&process].holding;
    let free = world.broker.lines()[0].free;
    world.kill(1);
    world.unfreed = 8 * GIB;
    world.measure();
    world.process(1, 1);
    world.report(process, holding, Micros::ZERO);
    world.unfreed = 0;
    world.run_for(MS(1));
    world.measure();
    world.measure();
    assert_eq!(world.broker.lines()[0].free, free);
    assert_eq!(world.missing(1), 1, "nothing leaves");
}

#[test]
fn policy_fail_does_not_wait_for_an_ended_process() {
    let mut world = World::new(10 * GIB);
    world.tenant(2, Class::Standard, 0);
    world.set_policy(2, MemoryPolicy::Fail);
    ended(&mut world);
    assert_eq!(world.allocate(2, GIB), GIB);
    assert_eq!(world.missing(2), 0);
}

#[test]
pub(crate) fn tenant_returns_when_an_ended_process_is_freed_and_moves_no_other() {
    let mut world = World::new(14 * GIB);
    let first = world.tenant(1, Class::Standard, 0);
    assert_eq!(world.allocate(1, 6 * GIB), 6 * GIB);
    world.tenant(2, Class::Standard, 0);
    assert_eq!(world.allocate(2, 4 * GIB), 4 * GIB);
    world.run_for(MS(3000));
    world.set_busy(2, true);
    world.tenant(3, Class::Standard, 0);
    assert_eq!(world.allocate(3, 6 * GIB), 6 * GIB);
    assert!(!world.is_home(1) && world.is_home(2));
    let moves = world.moves.len();
    world.kill(3);
    world.unfreed = 6 * GIB;
    let freed = world.now + MS(1500);
    world.puppets.get_mut(&first).expect("there").manner = Manner::CannotReturnBefore(freed);
    world.set_busy(1, true);
    world.run_for(MS(1500));
    assert!(!world.is_home(1));
    world.unfreed = 0;
    world.run_for(MS(500));
    assert!(world.is_home(1), "{:?}", world.standing(1));
    assert_eq!(world.moves.len(), moves + 1, "{:?}", world.moves);
}
