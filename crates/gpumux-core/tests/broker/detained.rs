//! A tenant that goes to another device: away once its work has ended, until it may come back; with its room kept there.

use gpumux_core::{
    Class, Micros, TenantId,
    broker::{CLOSED, Event, MoveError, ProcessId, QUIET},
};

use super::world::{DEVICE, GIB, World};

const S: Micros = Micros::from_secs(1);

/// A tenant with memory, and with work or not.
fn tenant(busy: bool) -> World {
    let mut world = World::new(10 * GIB);
    world.tenant(1, Class::Batch, 0);
    assert_eq!(world.allocate(1, 2 * GIB), 2 * GIB);
    world.set_busy(1, busy);
    world
}

#[test]
fn detained_tenant_stays_away_until_released() {
    let mut world = tenant(false);
    world.event(Event::Detain(TenantId(1), 1));
    world.run_for(S);
    assert_eq!(world.answers.get(&1), Some(&Ok(())));
    // Whatever wants it back.
    world.event(Event::Waits(ProcessId(1)));
    world.event(Event::Wake(TenantId(1), 2));
    world.set_busy(1, true);
    world.run_for(S);
    assert_eq!((world.swapped(1), world.answers.get(&2)), (2 * GIB, None));
    world.event(Event::Release(TenantId(1)));
    world.run_for(S);
    assert!(world.is_home(1));
    assert_eq!(world.answers.get(&2), Some(&Ok(())));
}

#[test]
fn detained_tenant_is_moved_once_its_work_has_ended() {
    let mut world = tenant(true);
    world.event(Event::Detain(TenantId(1), 1));
    world.run_for(Micros(CLOSED.0 / 2));
    assert_eq!(world.answers.get(&1), None);
    assert!(!world.frozen.contains(&TenantId(1)), "its work must end");
    world.set_busy(1, false);
    world.run_for(Micros::from_millis(100));
    assert_eq!(world.answers.get(&1), Some(&Ok(())));
    assert_eq!(world.swapped(1), 2 * GIB);
}

#[test]
fn detained_tenant_whose_work_never_ends_goes_on() {
    let mut world = tenant(true);
    world.event(Event::Detain(TenantId(1), 1));
    // And a second for each GiB of host memory.
    world.run_for(QUIET + Micros::from_secs(4));
    let why = MoveError::Busy("its work does not end".into());
    assert_eq!(world.answers.get(&1), Some(&Err(why)));
    assert!(world.is_home(1) && !world.frozen.contains(&TenantId(1)));
    assert!(!world.puppets[&ProcessId(1)].closed, "its gate is open");
}

#[test]
fn tenant_with_interrupted_kernels_is_not_detained() {
    let mut world = tenant(true);
    world.event(Event::Sleep(TenantId(1), 1));
    world.run_for(S);
    assert_eq!(world.answers.get(&1), Some(&Ok(())));
    world.event(Event::Detain(TenantId(1), 2));
    assert!(matches!(
        world.answers.get(&2),
        Some(Err(MoveError::Busy(_)))
    ));
    world.event(Event::Wake(TenantId(1), 3));
    world.run_for(S);
    assert!(world.is_home(1));
}

#[test]
fn room_for_one_that_arrives_is_kept() {
    let mut world = World::new(10 * GIB);
    let free = |world: &World| world.broker.lines()[0].free;
    let before = free(&world);
    world.terms(7, Class::Batch, 0);
    world.event(Event::Arrives(TenantId(7), DEVICE.into(), Some(6 * GIB)));
    assert_eq!(free(&world), before - 6 * GIB);
    world.tenant(1, Class::Batch, 0);
    assert_eq!(world.allocate(1, 5 * GIB), 0);
    world.event(Event::Arrives(TenantId(7), DEVICE.into(), None));
    assert_eq!(world.allocate(1, 5 * GIB), 5 * GIB);
    // It may end on its way.
    world.event(Event::Arrives(TenantId(7), DEVICE.into(), Some(GIB)));
    let kept = free(&world);
    world.event(Event::TenantGone(TenantId(7)));
    assert_eq!(free(&world), kept + GIB);
}
