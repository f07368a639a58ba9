//! Memory that is kept over the end of its process, for the tenant's next one.

use gpumux_core::{
    Class, Micros, TenantId,
    broker::{Event, Kept, ProcessId},
    ledger::Holding,
};

use super::world::{DEVICE, GIB, World};

/// In GiB.
fn holding(movable: u64, pinned: u64) -> Holding {
    Holding {
        movable: movable * GIB,
        pinned: pinned * GIB,
        swapped: 0,
    }
}

fn kept(world: &mut World, process: ProcessId, bytes: u64, inherited: u64) {
    world.event(Event::Kept {
        process,
        device: DEVICE.to_owned(),
        kept: Kept {
            bytes: bytes * GIB,
            inherited: inherited * GIB,
        },
    });
}

fn reports(world: &mut World, process: ProcessId, holding: Holding) {
    world.report(process, holding, Micros::ZERO);
    world.run_for(Micros(1));
}

/// What tenant 1 has, and what is free, in GiB.
fn counted(world: &World) -> (u64, u64) {
    let line = &world.broker.lines()[0];
    let own = line.entries.iter().find(|(id, _)| *id == TenantId(1));
    (
        own.map_or(0, |(_, it)| it.holding.resident() / GIB),
        line.free / GIB,
    )
}

/// A process that had 2 GiB that move and 4 that do not, of which 3 are kept, has ended.
fn ended() -> World {
    let mut world = World::new(21 * GIB);
    let first = world.tenant(1, Class::Standard, 0);
    world.tenant(2, Class::Standard, 0);
    reports(&mut world, first, holding(2, 3));
    kept(&mut world, first, 3, 0);
    reports(&mut world, first, holding(2, 4));
    assert_eq!(counted(&world), (6, 14));
    world.kill(1);
    world.unfreed = 3 * GIB;
    world
}

#[test]
fn kept_memory_is_counted_once_before_and_after_an_end() {
    let mut world = ended();
    for _ in 0..3 {
        assert_eq!(counted(&world), (3, 17));
        assert_eq!(world.missing(2), 1, "nothing of it will be freed");
        world.measure();
        world.run_for(Micros::from_secs(6));
    }
    let next = world.process(3, 1);
    kept(&mut world, next, 3, 3);
    assert_eq!(counted(&world), (3, 17));
    world.unfreed = 0;
    reports(&mut world, next, holding(0, 3));
    assert_eq!(counted(&world), (3, 17));
    world.kill(3);
    assert_eq!(counted(&world), (3, 17), "and once more");
}

/// Its connection closes a moment before it ends.
#[test]
fn process_that_was_without_connection_leaves_what_it_kept() {
    let mut world = World::new(21 * GIB);
    let first = world.tenant(1, Class::Standard, 0);
    reports(&mut world, first, holding(2, 4));
    kept(&mut world, first, 3, 0);
    world.lose(1);
    assert_eq!(counted(&world), (0, 14));
    world.event(Event::Left(first));
    assert_eq!(counted(&world), (3, 17));
    world.unfreed = 3 * GIB;
    world.measure();
    assert_eq!(counted(&world), (3, 17));
}

#[test]
fn inherited_memory_is_told_apart_from_what_is_new() {
    let mut world = ended();
    let next = world.process(3, 1);
    reports(&mut world, next, holding(1, 2));
    kept(&mut world, next, 2, 0);
    assert_eq!(counted(&world).0, 6);
    // A part of what was left.
    world.unfreed = 2 * GIB;
    kept(&mut world, next, 3, 1);
    assert_eq!(counted(&world).0, 6);
    reports(&mut world, next, holding(1, 3));
    kept(&mut world, next, 3, 1);
    assert_eq!(counted(&world).0, 6);
    // More than was left is of no effect.
    kept(&mut world, next, 9, 9);
    reports(&mut world, next, holding(1, 5));
    assert_eq!(counted(&world).0, 6);
}

#[test]
fn process_that_connects_again_has_what_it_kept() {
    let mut world = World::new(21 * GIB);
    let first = world.tenant(1, Class::Standard, 0);
    reports(&mut world, first, holding(2, 4));
    kept(&mut world, first, 3, 0);
    world.kill(1);
    world.unfreed = 6 * GIB;
    world.measure();
    let again = world.process(1, 1);
    kept(&mut world, again, 3, 3);
    reports(&mut world, again, holding(2, 4));
    world.unfreed = 0;
    for _ in 0..2 {
        world.measure();
        assert_eq!(counted(&world), (6, 14));
    }
    assert_eq!(world.missing(1), 1, "nothing leaves");
}

#[test]
fn kept_memory_ends_with_its_tenant() {
    let mut world = ended();
    world.event(Event::TenantGone(TenantId(1)));
    world.unfreed = 0;
    assert_eq!(counted(&world), (0, 20));
}

#[test]
fn process_keeps_no_more_than_it_has() {
    let mut world = World::new(21 * GIB);
    let first = world.tenant(1, Class::Standard, 0);
    reports(&mut world, first, holding(2, 4));
    kept(&mut world, first, 100, 100);
    world.kill(1);
    assert_eq!(counted(&world).0, 4);
}

/// The end of a process is noticed after the next one reports what it has inherited of it.
#[test]
fn memory_is_inherited_before_the_end_is_noticed() {
    for lives in [false, true] {
        let mut world = World::new(21 * GIB);
        let first = world.tenant(1, Class::Standard, 0);
        reports(&mut world, first, holding(2, 4));
        kept(&mut world, first, 3, 0);
        if lives {
            // Its connection closes a moment before it ends.
            world.lose(1);
        }
        let next = world.process(3, 1);
        reports(&mut world, next, holding(1, 0));
        kept(&mut world, next, 3, 3);
        reports(&mut world, next, holding(1, 3));
        match lives {
            true => world.event(Event::Left(first)),
            false => world.kill(1),
        }
        world.unfreed = 0;
        world.measure();
        assert_eq!(counted(&world).0, 4);
        // What it leaves is counted once, too.
        world.kill(3);
        assert_eq!(counted(&world).0, 3);
    }
}
