//! The host's memory for moved memory: which process takes how much of it.

use gpumux_core::{
    Class, Micros, TenantId,
    broker::{Event, HOST_PIECE, MoveError, ProcessId},
    ledger::Holding,
};

use super::world::{DEVICE, GIB, Manner, World};

const S: Micros = Micros::from_secs(1);

#[test]
pub(crate) fn a_full_host_lets_others_give_way_and_nothing_is_kept_for_a_failed_move() {
    let mut world = World::with_host(10 * GIB, 5 * GIB);
    world.tenant(1, Class::Batch, 0);
    world.tenant(2, Class::Batch, 0);
    assert_eq!(world.allocate(1, 6 * GIB), 6 * GIB);
    assert_eq!(world.allocate(2, 2 * GIB), 2 * GIB);
    world.run_for(S);
    // It never closes its gate: what it was allowed to keep on the host is free again.
    world.puppets.get_mut(&ProcessId(1)).expect("there").manner = Manner::Refuses(S);
    let process = world.tenant(3, Class::Batch, 0);
    world.ask(process, 1, 2 * GIB);
    world.run_for(Micros::from_secs(10));
    let granted = world.grants.get(&(process, 1)).copied();
    assert_eq!(granted, Some(2 * GIB));
    assert!(
        world.broker.on_host().0 <= 2 * GIB + HOST_PIECE,
        "{:?}",
        world.broker.on_host()
    );
    // More than the host may keep is asked for: refused, with the reason.
    world.event(Event::Sleep(TenantId(1), 77));
    world.run_for(Micros::from_secs(20));
    assert!(matches!(
        world.answers.get(&77),
        Some(Err(MoveError::HostFull(_)))
    ));
}

/// Others would have to let go of host memory first, which takes as long as their calls of the driver.
#[test]
pub(crate) fn victim_for_which_the_host_has_room_is_moved_before_another() {
    let mut world = World::with_host(14 * GIB, 7 * GIB);
    for id in [1, 2] {
        world.tenant(id, Class::Batch, 0);
        assert_eq!(world.allocate(id, 6 * GIB), 6 * GIB);
    }
    world.event(Event::Sleep(TenantId(2), 1));
    world.run_for(S);
    world.event(Event::Wake(TenantId(2), 2));
    world.run_for(Micros::from_secs(10));
    assert_eq!(world.answers.get(&2), Some(&Ok(())));
    world.moves.clear();
    world.tenant(3, Class::Batch, 0);
    assert_eq!(world.allocate(3, 4 * GIB), 4 * GIB);
    let moved: Vec<_> = world.moves.iter().map(|it| (it.1, it.2)).collect();
    assert_eq!(moved, [(TenantId(2), true)], "it has kept host memory");
    assert_eq!(world.failed, []);
}

#[test]
fn host_memory_that_a_process_says_it_keeps_is_not_all_counted() {
    let mut world = World::with_host(10 * GIB, 8 * GIB);
    for id in [1, 2] {
        world.tenant(id, Class::Batch, 0);
        assert_eq!(world.allocate(id, 2 * GIB), 2 * GIB);
    }
    let holding = Holding {
        movable: 2 * GIB,
        swapped: 10 * GIB,
        ..Holding::default()
    };
    let says = |holding| Event::Holds {
        process: ProcessId(1),
        device: DEVICE.to_owned(),
        total: 10 * GIB,
        holding,
    };
    world.event(says(holding));
    world.event(Event::Keeps(ProcessId(1), u64::MAX));
    assert_eq!(world.broker.on_host().0, 0);
    let swapped = 0;
    world.event(says(Holding { swapped, ..holding }));
    world.run_for(Micros::from_secs(1));
    // Also not after a move that fails.
    world.puppets.get_mut(&ProcessId(1)).expect("there").manner = Manner::Refuses(S);
    world.event(Event::Sleep(TenantId(1), 1));
    world.run_for(Micros::from_secs(5));
    assert!(matches!(world.answers.get(&1), Some(Err(_))));
    assert_eq!(world.broker.on_host().0, 0);
    world.event(Event::Sleep(TenantId(2), 2));
    world.run_for(Micros::from_secs(5));
    assert_eq!(world.answers.get(&2), Some(&Ok(())));
}

#[test]
fn memory_that_is_on_the_host_counts_for_the_next_daemon() {
    let mut world = World::with_host(10 * GIB, 8 * GIB);
    world.tenant(2, Class::Batch, 0);
    assert_eq!(world.allocate(2, 9 * GIB), 9 * GIB);
    let process = world.tenant(1, Class::Batch, 0);
    world.event(Event::Restored(TenantId(1)));
    let holding = Holding {
        swapped: 6 * GIB,
        ..Holding::default()
    };
    world.event(Event::Holds {
        process,
        device: DEVICE.to_owned(),
        total: 10 * GIB,
        holding,
    });
    world.event(Event::Keeps(process, 6 * GIB));
    assert_eq!(world.broker.on_host().0, 6 * GIB);
    world.event(Event::Sleep(TenantId(2), 1));
    world.run_for(Micros::from_secs(20));
    let answer = world.answers.get(&1);
    assert!(
        matches!(answer, Some(Err(MoveError::HostFull(_)))),
        "{answer:?}"
    );
}

/// For 200 s, threads of so many tenants that are away ask for their memory.
fn threads_come_to_the_gate(world: &mut World, tenants: u64) {
    for _ in 0..2000 {
        world.run_for(Micros::from_millis(100));
        for id in 1..=tenants {
            if !world.is_home(id) {
                world.event(Event::Waits(ProcessId(id)));
            }
        }
    }
}

/// Of four programs with work 19 GiB do not fit the device. One waits: its return needs more room on the host than is left beside that.
fn full_host() -> World {
    let mut world = World::with_host(60 * GIB, 28 * GIB);
    for (id, all) in [(3, 26), (4, 20), (1, 17), (2, 14)] {
        world.tenant(id, Class::Latency, 0);
        assert_eq!(world.allocate(id, all * GIB), all * GIB);
    }
    (1..=4).for_each(|id| world.set_busy(id, true));
    world.run_for(Micros::from_secs(60));
    world
}

#[test]
pub(crate) fn full_host_moves_no_tenant_for_a_claim() {
    let mut world = full_host();
    world.moves.clear();
    threads_come_to_the_gate(&mut world, 4);
    assert_eq!(world.moves, []);
    let waits = (1..=4).find(|id| !world.is_home(*id)).expect("not all fit");
    let full = world.standing(waits).host_full.expect("it is known why");
    assert!(full.kept + full.need > full.limit);
    // Others end.
    (1..=4)
        .filter(|id| *id != waits)
        .for_each(|id| world.kill(id));
    world.run_for(S);
    assert!(world.is_home(waits));
    assert_eq!(world.standing(waits).host_full, None);
}

#[test]
fn request_is_granted_without_host_room_for_more() {
    let usable = World::new(10 * GIB).broker.lines()[0].free;
    let mut world = World::with_host(10 * GIB, 16 * GIB - usable + HOST_PIECE);
    for id in [1, 2] {
        world.tenant(id, Class::Standard, 0);
        assert_eq!(world.allocate(id, 8 * GIB), 8 * GIB);
    }
}

/// The first needs what both others have, for which the host has no room; the last needs a part of one's.
#[test]
fn claim_that_the_host_cannot_serve_keeps_no_victim_from_others() {
    let mut world = World::with_host(60 * GIB, 70 * GIB);
    for (id, all) in [(1, 40), (2, 28), (3, 28)] {
        world.tenant(id, Class::Latency, 0);
        assert_eq!(world.allocate(id, all * GIB), all * GIB);
        world.set_busy(id, true);
    }
    world.event(Event::Waits(ProcessId(1)));
    world.run_for(Micros::from_secs(60));
    assert!(world.standing(1).host_full.is_some());
    let process = world.tenant(4, Class::Latency, 0);
    world.ask(process, 1, 10 * GIB);
    world.run_for(Micros::from_secs(60));
    assert_eq!(world.grants.get(&(process, 1)), Some(&(10 * GIB)));
}

/// Three of 30 GiB on 80, as the documentation says.
#[test]
fn limit_as_large_as_asked_for_lets_all_go_on() {
    let usable = World::new(80 * GIB).broker.lines()[0].free;
    let limit = 90 * GIB - usable + 30 * GIB + 80 * GIB / 64 + 3 * 2 * HOST_PIECE;
    let mut world = World::with_host(80 * GIB, limit);
    for id in 1..=3 {
        world.tenant(id, Class::Batch, 0);
        assert_eq!(world.allocate(id, 30 * GIB), 30 * GIB);
        world.set_busy(id, true);
    }
    world.run_for(S);
    world.moves.clear();
    threads_come_to_the_gate(&mut world, 3);
    for id in 1..=3 {
        let returns = (world.moves.iter()).filter(|it| it.1 == TenantId(id) && !it.2);
        assert!(returns.count() > 1, "{id} waits");
    }
}

/// A tenant of 2 GiB that is to move, and closes its gate a second later.
fn closing(world: &mut World) -> ProcessId {
    let process = world.tenant(1, Class::Batch, 0);
    assert_eq!(world.allocate(1, 2 * GIB), 2 * GIB);
    world.puppets.get_mut(&process).expect("there").manner = Manner::Slow(S);
    world.event(Event::Sleep(TenantId(1), 1));
    process
}

#[test]
fn memory_granted_while_gates_close_moves_too() {
    let mut world = World::with_host(10 * GIB, 8 * GIB);
    let process = closing(&mut world);
    world.ask(process, 1, GIB);
    assert_eq!(world.grants.get(&(process, 1)), Some(&GIB));
    world.run_for(S + S);
    assert_eq!(world.answers.get(&1), Some(&Ok(())));
    assert_eq!(world.swapped(1), 3 * GIB);
}

/// Another process has closed what it had open of this one's: the process sends no request for that.
#[test]
fn memory_that_is_movable_while_gates_close_moves_too() {
    let mut world = World::with_host(10 * GIB, 8 * GIB);
    let process = closing(&mut world);
    let holding = Holding {
        movable: 3 * GIB,
        ..Holding::default()
    };
    world.report(process, holding, Micros(100));
    world.run_for(S + S);
    assert_eq!(world.answers.get(&1), Some(&Ok(())));
    assert_eq!(world.swapped(1), 3 * GIB);
}

#[test]
fn host_memory_that_an_order_allows_stays_reserved() {
    let mut world = World::with_host(10 * GIB, 8 * GIB);
    let process = closing(&mut world);
    // It has made a part, and the order is still under way.
    world.event(Event::Keeps(process, GIB));
    assert_eq!(world.broker.on_host().0, 2 * GIB);
    world.run_for(S + S);
    assert_eq!(world.answers.get(&1), Some(&Ok(())));
    assert_eq!(world.broker.on_host().0, 2 * GIB);
}

/// What it says was sent before it received the order to move more.
#[test]
fn report_that_crosses_an_order_leaves_its_host_memory_reserved() {
    let mut world = World::with_host(10 * GIB, 8 * GIB);
    let process = world.tenant(1, Class::Batch, 0);
    assert_eq!(world.allocate(1, 8 * GIB), 8 * GIB);
    world.run_for(S);
    for id in [2, 3] {
        world.tenant(id, Class::Standard, 0);
    }
    assert_eq!(world.allocate(2, 3 * GIB), 3 * GIB);
    let kept = world.broker.on_host().0;
    world.ask(ProcessId(3), 1, 2 * GIB);
    // More is under way.
    while world.broker.on_host().0 == kept {
        world.run_for(Micros(100));
    }
    let allowed = world.broker.on_host().0;
    world.event(Event::Keeps(process, kept));
    assert_eq!(world.broker.on_host().0, allowed);
    world.run_for(S);
    assert!(world.grants.contains_key(&(ProcessId(3), 1)));
    assert!(world.swapped(1) > kept);
}
