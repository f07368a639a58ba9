//! What programs are shown of a device's memory.

use std::collections::BTreeSet;

use gpumux_core::{
    Class, MemoryPolicy, Micros, TenantId,
    broker::{Event, Terms, overhead},
    ledger::Share,
};
use proptest::prelude::*;

use super::world::{DEVICE, GIB, World};

const S: Micros = Micros::from_secs(1);
const ALL: u64 = 80 * GIB;

fn start(world: &mut World, tenant: u64) {
    world.tenant(tenant, Class::Batch, 0);
}

fn limit(world: &mut World, tenant: u64, limit: u64) {
    let terms = Terms {
        class: Class::Batch,
        share: Share {
            guaranteed: 0,
            limit,
        },
        policy: MemoryPolicy::SwapOthers,
        sleep_after: None,
    };
    world.event(Event::Tenant(TenantId(tenant), terms));
}

fn context(world: &mut World, tenant: u64) {
    world.event(Event::Contexts {
        process: gpumux_core::broker::ProcessId(tenant),
        device: DEVICE.to_owned(),
        count: 1,
        before: false,
    });
}

#[test]
fn servers_that_start_together_are_shown_equal_parts() {
    let mut world = World::new(ALL);
    for n in 1..=6 {
        start(&mut world, n);
        world.run_for(S);
    }
    let mut sum = 0;
    for n in 1..=6 {
        world.run_for(Micros::from_secs(2));
        context(&mut world, n);
        let (free, total) = world.view(n);
        assert!(total <= ALL / 6 && total > ALL / 7, "{n}: {total}");
        assert_eq!(free, total);
        assert_eq!(world.allocate(n, total), total, "{n}");
        sum += total;
        assert_eq!(world.view(n), (0, total));
    }
    let line = &world.broker.lines()[0];
    assert!(sum <= line.capacity - line.occupied);
    assert!((1..=6).all(|n| world.is_home(n)), "nothing had to move");
}

#[test]
fn server_alone_is_shown_the_whole_device() {
    let mut world = World::new(ALL);
    start(&mut world, 1);
    assert_eq!(world.view(1), (ALL - overhead(ALL), ALL));
    assert_eq!(world.allocate(1, 60 * GIB), 60 * GIB);
    assert_eq!(world.view(1), (20 * GIB - overhead(ALL), ALL));
}

/// Such as by NVML, before its process has a session with the new daemon.
#[test]
fn capacity_stays_where_a_program_asks_before_its_process_reports() {
    let mut world = World::new(ALL);
    start(&mut world, 1);
    assert_eq!(world.view(1).1, ALL);
    let shown = |bytes| Event::WasShown(TenantId(1), DEVICE.to_owned(), bytes);
    world.event(shown(30 * GIB));
    assert_eq!(world.view(1).1, 30 * GIB);
}

#[test]
fn idle_shell_takes_no_part_of_what_a_server_is_shown() {
    let mut world = World::new(ALL);
    start(&mut world, 1);
    world.run_for(Micros::from_secs(61));
    start(&mut world, 2);
    assert_eq!(world.view(2).1, ALL);
}

#[test]
fn server_that_asked_long_ago_and_took_nothing_counts_no_more() {
    let mut world = World::new(ALL);
    start(&mut world, 1);
    world.run_for(Micros::from_secs(50));
    assert_eq!(world.view(1).1, ALL);
    world.run_for(Micros::from_secs(50));
    start(&mut world, 2);
    let part = world.view(2).1;
    assert!(part <= ALL / 2, "it may still be loading: {part}");
    world.run_for(Micros::from_secs(61));
    start(&mut world, 3);
    assert_eq!(world.view(3).1, ALL);
    assert_eq!((world.view(1).1, world.view(2).1), (ALL, part));
}

#[test]
fn capacity_does_not_move_with_neighbours() {
    let mut world = World::new(ALL);
    start(&mut world, 1);
    let shown = world.view(1).1;
    assert_eq!(world.allocate(1, 60 * GIB), 60 * GIB);
    start(&mut world, 2);
    let second = world.view(2);
    assert!(second.1 <= (ALL - overhead(ALL)) / 2);
    assert_eq!(world.view(1).1, shown);
    world.kill(1);
    world.event(Event::TenantGone(TenantId(1)));
    assert_eq!(world.view(2), second);
}

#[test]
fn capacity_does_not_move_with_the_next_daemon() {
    let mut world = World::new(ALL);
    start(&mut world, 1);
    start(&mut world, 2);
    let shown = DEVICE.to_owned();
    world.event(Event::WasShown(TenantId(1), shown.clone(), 30 * GIB));
    assert_eq!(world.view(1).1, 30 * GIB);
    world.event(Event::WasShown(TenantId(1), shown.clone(), 50 * GIB));
    assert_eq!(world.view(1).1, 30 * GIB, "another process reports more");
    // What was a limit is none any more when that is lifted.
    limit(&mut world, 2, 10 * GIB);
    world.event(Event::WasShown(TenantId(2), shown, 10 * GIB));
    limit(&mut world, 2, u64::MAX);
    assert!(world.view(2).1 > 30 * GIB);
}

#[test]
fn tenant_of_another_device_is_not_expected_here() {
    let mut world = World::new(ALL);
    let other = BTreeSet::from(["GPU-2".to_owned()]);
    world.event(Event::Confined(TenantId(1), other));
    start(&mut world, 1);
    start(&mut world, 2);
    assert_eq!(world.view(2).1, ALL);
}

#[test]
fn sharer_with_a_limit_leaves_the_rest_of_its_part() {
    let mut world = World::new(ALL);
    for n in 1..=3 {
        start(&mut world, n);
    }
    limit(&mut world, 1, 10 * GIB);
    let part = world.view(2).1;
    assert!(part > ALL / 3 && part < 35 * GIB, "{part}");
    assert_eq!(world.view(3).1, part);
    assert_eq!(world.view(1).1, 10 * GIB);
}

#[test]
fn guarantees_of_others_are_left_to_them() {
    let mut world = World::new(ALL);
    world.terms(1, Class::Latency, 40 * GIB);
    for n in 2..=3 {
        start(&mut world, n);
    }
    let part = world.view(2).1;
    assert!(part <= 20 * GIB && part > 18 * GIB, "{part}");
    assert!(world.view(1).1 >= 40 * GIB);
}

proptest! {
    /// However they start and ask within a minute, as long as all have started before the first asks: all fit together.
    #[test]
    fn all_that_start_together_fit(
        starts in proptest::collection::vec(0u64..10, 2..9),
        asks in proptest::collection::vec(10u64..50, 9),
        takes in proptest::collection::vec(0u64..=100, 9),
    ) {
        let mut world = World::new(ALL);
        let all = starts.len() as u64;
        let mut plan: Vec<(u64, usize, bool)> = Vec::new();
        for (n, at) in starts.iter().enumerate() {
            plan.extend([(*at, n, false), (asks[n], n, true)]);
        }
        plan.sort_unstable();
        let (begin, mut sum) = (world.now, 0);
        for (at, n, asked) in plan {
            let wait = (begin + Micros::from_secs(at)).saturating_sub(world.now);
            world.run_for(wait);
            let tenant = n as u64 + 1;
            if !asked {
                start(&mut world, tenant);
                continue;
            }
            context(&mut world, tenant);
            let (_, total) = world.view(tenant);
            prop_assert!(total <= ALL / all);
            sum += total;
            let takes = total / 100 * takes[n];
            if takes > 0 {
                prop_assert_eq!(world.allocate(tenant, takes), takes);
            }
            prop_assert_eq!(world.view(tenant).1, total);
        }
        let line = &world.broker.lines()[0];
        prop_assert!(sum <= line.capacity - line.occupied);
    }
}
