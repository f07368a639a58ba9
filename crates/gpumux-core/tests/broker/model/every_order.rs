//! Small worlds in every order of their events.

use super::*;

const EQUAL: [(Class, u64, u64); 2] = [(Class::Batch, 0, 60), (Class::Batch, 0, 60)];

fn two(tenants: &[(Class, u64, u64)]) -> World {
    World {
        room: 100,
        tenants: tenants.to_vec(),
        ranks: 1,
        droppable: (0, 0),
        crosses: false,
        refusals: 0,
        lateness: 0,
        deaths: 0,
        toggles: 0,
        patience: Micros::from_secs(20),
    }
}

#[test]
pub(crate) fn two_equal_tenants_take_turns() {
    let (states, wrong) = check(two(&EQUAL));
    assert_eq!(wrong, None);
    println!("covered: two equal tenants: {states} states");
}

/// A change of activity, and each failure by itself.
const ONE: [(u8, u8, u8, u8); 4] = [(0, 0, 0, 1), (1, 0, 0, 0), (0, 0, 1, 0), (0, 1, 0, 0)];

/// Checks a world with these failures and changes, and returns how many states it has.
#[track_caller]
fn with_failures(
    world: &World,
    (refusals, lateness, deaths, toggles): (u8, u8, u8, u8),
    patience: u64,
) -> usize {
    let world = World {
        refusals,
        lateness,
        deaths,
        toggles,
        // A late process may take its whole deadline, and a failure its pause.
        patience: Micros::from_secs(patience + 60 * u64::from(lateness + refusals)),
        ..world.clone()
    };
    let (states, wrong) = check(world.clone());
    assert_eq!(wrong, None, "{world:?}");
    states
}

#[test]
fn two_tenants_in_every_order_with_failures() {
    let classes = [
        EQUAL.to_vec(),
        vec![(Class::Latency, 0, 60), (Class::Batch, 0, 60)],
        vec![(Class::Latency, 50, 50), (Class::Batch, 0, 79)],
        vec![(Class::Standard, 30, 60), (Class::Batch, 40, 69)],
    ];
    let mut all = 0;
    for tenants in classes {
        for failures in ONE {
            all += with_failures(&two(&tenants), failures, 20);
        }
    }
    println!("covered: two tenants, 16 worlds: {all} states");
    assert!(all > 1000);
}

/// The second tenant has memory that needs no copy: enough for what the first lacks of its guarantee, and too little.
#[test]
fn memory_that_needs_no_copy_in_every_order_with_failures() {
    let mut all = 0;
    for droppable in [(20, 10), (5, 5)] {
        let world = World {
            droppable,
            ..two(&[(Class::Latency, 50, 50), (Class::Batch, 0, 79)])
        };
        for failures in ONE {
            all += with_failures(&world, failures, 20);
        }
    }
    println!("covered: memory that needs no copy, 8 worlds: {all} states");
    assert!(all > 100);
}

/// Any two failures, the same or different ones.
#[test]
fn two_tenants_in_every_order_with_two_failures() {
    let classes = [
        EQUAL.to_vec(),
        vec![(Class::Latency, 0, 60), (Class::Batch, 0, 60)],
        vec![(Class::Standard, 30, 60), (Class::Batch, 40, 69)],
    ];
    let failures = [
        (2, 0, 0, 0),
        (0, 2, 0, 0),
        (0, 0, 2, 0),
        (1, 1, 0, 0),
        (1, 0, 1, 0),
        (0, 1, 1, 0),
    ];
    let mut all = 0;
    for tenants in classes {
        for failures in failures {
            all += with_failures(&two(&tenants), failures, 20);
        }
    }
    println!("covered: two tenants with two failures, 18 worlds: {all} states");
}

#[test]
fn three_tenants_in_every_order_with_a_failure() {
    let world = two(&[
        (Class::Batch, 0, 60),
        (Class::Batch, 0, 50),
        (Class::Latency, 30, 30),
    ]);
    let worlds = ONE.map(|failures| with_failures(&world, failures, 40));
    let all: usize = worlds.iter().sum();
    println!("covered: three tenants, 4 worlds: {all} states");
}

/// Two ranks of each tenant, on two devices. They ask in every order, and end before, between and after.
#[test]
pub(crate) fn ranks_have_their_parts_together_in_every_order() {
    let both = vec![(Class::Batch, 0, 40), (Class::Batch, 0, 40)];
    let owner = vec![(Class::Latency, 50, 50), (Class::Batch, 0, 79)];
    let worlds = [(&EQUAL.to_vec(), 0), (&both, 1), (&owner, 0)];
    let mut all = 0;
    for (tenants, deaths) in worlds {
        let world = World {
            ranks: 2,
            ..two(tenants)
        };
        let states = with_failures(&world, (0, 0, deaths, 0), 20);
        all += states;
    }
    println!("covered: two ranks of two tenants, 3 worlds: {all} states");
    assert!(all > 1000);
}

/// Packets between the broker and two tenants that take turns, in every order in which they may arrive.
#[test]
pub(crate) fn packets_that_cross_in_every_order() {
    let classes = [
        EQUAL.to_vec(),
        vec![(Class::Latency, 50, 50), (Class::Batch, 0, 79)],
        vec![(Class::Standard, 30, 60), (Class::Batch, 40, 69)],
    ];
    let mut all = 0;
    for tenants in classes {
        let world = World {
            crosses: true,
            ..two(&tenants)
        };
        // With changes of activity, one world has a million states.
        for failures in &ONE[1..] {
            all += with_failures(&world, *failures, 20);
        }
    }
    let ranks = World {
        ranks: 2,
        crosses: true,
        ..two(&[(Class::Batch, 0, 40), (Class::Batch, 0, 40)])
    };
    all += with_failures(&ranks, (0, 0, 1, 0), 20);
    println!("covered: packets that cross, 10 worlds: {all} states");
}
