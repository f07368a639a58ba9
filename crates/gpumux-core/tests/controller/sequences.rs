//! Every sequence of so many things that may happen, in two small worlds. After each everything works again, and must come right.

use gpumux_core::{Class, DomainId, Micros, Timeslice, UserId};

use super::{
    properties::Step::{self, Asks, Busy, Ends, Fails, Hangs, Idle, Pass, Stopped, Tampered},
    world::{GIB, Late, Manner, Seen, World, spec, with_memory},
};

/// How late things are known, in turn.
const LATE: [Late; 3] = [
    Late::of(0, 0, 0),
    Late::of(500, 1_000, 1_000),
    Late::of(5_000, 10_000, 50_000),
];

fn play(world: impl Fn(Late) -> World, steps: &[Step], length: u32) {
    let count = (steps.len() as u64).pow(length);
    let mut seen = Seen::default();
    for n in 0..count {
        let mut world = world(LATE[n as usize % LATE.len()]);
        let mut left = n;
        for _ in 0..length {
            steps[(left % steps.len() as u64) as usize].apply(&mut world);
            world.run_for(Micros::from_millis(2));
            left /= steps.len() as u64;
        }
        world.recover();
        seen.commands += world.seen.commands;
        seen.failed += world.seen.failed;
        seen.late += world.seen.late;
        seen.moves += world.seen.moves;
        seen.plans += world.seen.plans;
    }
    println!("covered: {count} sequences of {length}: {seen:?}");
    assert!(
        seen.failed > 0 && seen.late > 0 && seen.moves > 0,
        "{seen:?}"
    );
}

#[test]
pub(crate) fn latency_beside_batch_survives_every_sequence() {
    let world = |late| {
        let mut world = World::new("priority", 1);
        world.late = late;
        world.tenant(1, with_memory(spec(Class::Latency, 0.3), GIB), &[0]);
        world.tenant(2, spec(Class::Batch, 0.2), &[0]);
        world.tenant(3, spec(Class::Batch, 0.0), &[0]);
        (2..=3).for_each(|id| world.set_busy(id, true));
        world.ask(3, 0, 45 * GIB);
        world
    };
    let steps = [
        Busy(1),
        Fails(2),
        Hangs(3),
        Tampered(2),
        Ends(3),
        Asks(2, 0, 45),
        Stopped(3),
        Pass(Micros::from_secs(2)),
    ];
    play(world, &steps, 3);
}

#[test]
pub(crate) fn a_gang_beside_others_survives_every_sequence() {
    let world = |late| {
        let mut world = World::new("priority", 2);
        world.late = late;
        world.tenant(1, spec(Class::Batch, 0.3), &[0, 1]);
        world.tenant(2, spec(Class::Latency, 0.0), &[0]);
        world.tenant(3, spec(Class::Batch, 0.0), &[1]);
        world.tenant(4, spec(Class::Latency, 0.0), &[1]);
        (1..=3).for_each(|id| world.set_busy(id, true));
        world.ask(1, 0, 45 * GIB);
        world
    };
    let steps = [
        Idle(1),
        Busy(4),
        Fails(1),
        Hangs(3),
        Tampered(1),
        Ends(2),
        Asks(2, 0, 45),
        Pass(Micros::from_secs(2)),
    ];
    play(world, &steps, 3);
}

/// It has the driver's timeslice, between two of which the shortest gets nothing done.
#[test]
fn a_domain_that_cannot_be_controlled_leaves_others_time() {
    let mut world = World::new("priority", 1);
    world.tenant(1, spec(Class::Latency, 0.0), &[0]);
    for id in [2, 3] {
        world.tenant(id, spec(Class::Batch, 0.0), &[0]);
        world.set_busy(id, true);
    }
    world.run_for(Micros::from_millis(10));
    assert_eq!([2, 3].map(|id| world.timeslice(id)), [1, 1]);
    world.set_manner(3, Manner::Fails);
    world.run_for(Micros::from_secs(2));
    assert!(world.seen.failed > 0, "{:?}", world.seen);
    assert!(world.timeslice(2) > Timeslice::DEFAULT.0 / 2);
    world.recover();
    assert_eq!([2, 3].map(|id| world.timeslice(id)), [1, 1]);
}

#[test]
fn member_that_cannot_be_controlled_stops_no_rotation() {
    for failing in [3, 4] {
        let mut world = World::new("priority", 1);
        world.tenant(1, spec(Class::Latency, 0.0), &[0]);
        for id in [3, 4] {
            world.member(
                id,
                UserId::default(),
                spec(Class::Batch, 0.0),
                &[0],
                Some(DomainId(1000)),
            );
        }
        for id in [5, 6] {
            world.tenant(id, spec(Class::Batch, 0.0), &[0]);
        }
        let busy = [7 - failing, 5, 6];
        busy.iter().for_each(|id| world.set_busy(*id, true));
        world.run_for(Micros::from_millis(10));
        world.set_manner(failing, Manner::Fails);
        let received = |world: &World, id: u64| {
            let domain = world.controller.domain(world.group(id));
            domain.expect("it is there").state.received
        };
        let before = busy.map(|id| received(&world, id));
        world.run_for(Micros::from_secs(3));
        assert!(world.seen.failed > 0, "{:?}", world.seen);
        let parts = busy.map(|id| received(&world, id));
        let parts: Vec<_> = (parts.into_iter().zip(before))
            .map(|(now, before)| now.saturating_sub(before))
            .collect();
        let least = Micros::from_millis(700);
        assert!(parts.iter().all(|it| *it > least), "{failing}: {parts:?}");
    }
}

#[test]
fn processes_that_are_not_controlled_leave_others_time() {
    let mut world = World::new("priority", 1);
    world.tenant(1, spec(Class::Latency, 0.0), &[0]);
    world.tenant(2, spec(Class::Batch, 0.0), &[0]);
    let look = |world: &mut World, used: f64| {
        world.run_for(Micros::from_secs(1));
        world.controller.see_foreign(0, world.now, used);
        world.run_for(Micros::from_millis(10));
        world.timeslice(2)
    };
    assert_eq!(look(&mut world, 1.0), 1, "no work");
    world.set_busy(2, true);
    assert_eq!(look(&mut world, 1.0), 1, "not all the time");
    assert_eq!(look(&mut world, 0.4), 1, "enough is left");
    assert_eq!(look(&mut world, 0.9), 2_000);
    assert_eq!(look(&mut world, 0.4), 2_000, "it takes its part");
    assert_eq!(look(&mut world, 0.0), 1);
}

/// Not even the driver's timeslice could be set: that of the other member is as it was, and is put right by its own control.
#[test]
fn timeslice_of_a_member_that_fails_is_not_thought_to_be_the_others() {
    let mut world = World::new("priority", 1);
    world.tenant(1, spec(Class::Latency, 0.0), &[0]);
    for id in [2, 3] {
        let (user, group) = (UserId::default(), DomainId(1000));
        world.member(id, user, spec(Class::Standard, 0.0), &[0], Some(group));
    }
    world.run_for(Micros::from_millis(65));
    assert_eq!(world.timeslice(3), 1);
    world.set_manner(2, Manner::Fails);
    world.kill(1);
    world.run_for(Micros::from_millis(100));
    assert_eq!(world.timeslice(3), Timeslice::DEFAULT.0);
}
