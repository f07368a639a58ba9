//! The daemon begins again: the driver reports the tenants' memory before they do.

use gpumux_core::{
    Class, Micros, TenantId,
    broker::{CONTEXT, Event, ProcessId, RETURN, TRIM},
    ledger::Holding,
};

use super::world::{DEVICE, GIB, World};

const S: Micros = Micros::from_secs(1);
const CAPACITY: u64 = 100 * GIB;

/// A daemon that began anew with tenants 1 and 2, of which the second has this guarantee. The driver reports 60 GiB and a context.
fn world(guaranteed: u64) -> World {
    let mut world = World::before_a_look(CAPACITY, u64::MAX);
    for (id, guaranteed) in [(1, 0), (2, guaranteed)] {
        world.terms(id, Class::Batch, guaranteed);
        world.event(Event::Restored(TenantId(id)));
    }
    look(&mut world);
    look(&mut world);
    world
}

fn look(world: &mut World) {
    world.event(Event::Device {
        uuid: DEVICE.to_owned(),
        capacity: CAPACITY,
        used: 60 * GIB + CONTEXT,
    });
}

/// A process with the tenant's number has its session, and reports this.
fn comes_back(world: &mut World, id: u64, movable: u64) {
    let process = world.process(id, id);
    let device = DEVICE.to_owned();
    world.event(Event::Contexts {
        process,
        device: device.clone(),
        count: u32::from(movable > 0),
        before: true,
    });
    let holding = Holding {
        movable,
        ..Holding::default()
    };
    world.event(Event::Holds {
        process,
        device,
        total: CAPACITY,
        holding,
    });
}

fn answer(world: &World) -> Option<u64> {
    world.grants.get(&(ProcessId(2), 7)).copied()
}

#[test]
pub(crate) fn request_waits_for_neighbours_that_return() {
    let mut world = world(0);
    world.run_for(S);
    comes_back(&mut world, 2, 0);
    world.ask(ProcessId(2), 7, 90 * GIB);
    world.run_for(RETURN.0.saturating_sub(S));
    assert_eq!(
        answer(&world),
        None,
        "answered before the neighbour returned"
    );
    comes_back(&mut world, 1, 60 * GIB);
    world.run_for(Micros::from_secs(30));
    assert_eq!(answer(&world), Some(90 * GIB));
    assert!(!world.is_home(1));
}

#[test]
fn request_is_refused_when_no_neighbour_returns() {
    let mut world = world(0);
    comes_back(&mut world, 2, 0);
    world.ask(ProcessId(2), 7, 90 * GIB);
    world.run_for(RETURN.0.saturating_sub(S));
    assert_eq!(answer(&world), None);
    world.run_for(S + TRIM + TRIM);
    assert_eq!(answer(&world), Some(0));
}

#[test]
fn unclaimed_memory_is_never_handed_out() {
    let mut world = world(0);
    let line = world.broker.lines().remove(0);
    assert!(line.free <= CAPACITY - 60 * GIB - CONTEXT, "{line:?}");
    comes_back(&mut world, 2, 0);
    world.ask(ProcessId(2), 7, 50 * GIB);
    world.run_for(S);
    assert_eq!(answer(&world), None);
}

#[test]
fn daemon_that_restored_nothing_refuses_at_once() {
    let mut world = World::new(CAPACITY);
    look(&mut world);
    look(&mut world);
    world.terms(2, Class::Batch, 0);
    comes_back(&mut world, 2, 0);
    world.ask(ProcessId(2), 7, 90 * GIB);
    world.run_for(TRIM + TRIM);
    assert_eq!(answer(&world), Some(0));
}

#[test]
fn memory_of_a_tenant_that_never_has_a_session_is_foreign_at_last() {
    let mut world = world(0);
    world.run_for(RETURN.1);
    comes_back(&mut world, 2, 0);
    world.ask(ProcessId(2), 7, 90 * GIB);
    world.run_for(TRIM + TRIM);
    assert_eq!(answer(&world), Some(0));
}

#[test]
pub(crate) fn guarantee_is_kept_while_a_borrower_has_not_returned() {
    let known_before = world(50 * GIB);
    let mut known_after = world(0);
    known_after.terms(2, Class::Batch, 50 * GIB);
    for mut world in [known_before, known_after] {
        comes_back(&mut world, 2, 0);
        let (_, booked) = world
            .broker
            .booked(DEVICE, TenantId(9))
            .expect("the device");
        assert_eq!(booked[&TenantId(2)], 50 * GIB);
        let guaranteed = |world: &World| {
            let line = world.broker.lines().remove(0);
            let mut entries = line.entries.into_iter();
            entries
                .find(|it| it.0 == TenantId(2))
                .map(|it| it.1.share.guaranteed)
        };
        assert_eq!(guaranteed(&world), Some(50 * GIB));
        comes_back(&mut world, 1, 60 * GIB);
        world.run_for(Micros::from_secs(10));
        assert_eq!(guaranteed(&world), Some(50 * GIB));
        world.ask(ProcessId(2), 7, 50 * GIB);
        world.run_for(Micros::from_secs(30));
        assert_eq!(answer(&world), Some(50 * GIB));
    }
}

#[test]
pub(crate) fn a_restart_counts_memory_once() {
    // A new broker: the driver's report comes before the tenants are back.
    let mut world = World::new(100 * GIB);
    let occupied = |world: &World| world.broker.lines()[0].occupied;
    let empty = occupied(&world);
    let (uuid, capacity) = (DEVICE.to_owned(), 100 * GIB);
    let look = |used| Event::Device {
        uuid: uuid.clone(),
        capacity,
        used,
    };
    // 60 GiB and a context of a tenant, 3 GiB of another program.
    let context = gpumux_core::broker::CONTEXT;
    let used = 63 * GIB + context;
    world.event(look(used));
    world.event(look(used));
    assert_eq!(occupied(&world), empty + used);
    let process = world.tenant(1, Class::Batch, 0);
    let holding = Holding {
        movable: 60 * GIB,
        ..Holding::default()
    };
    let (device, total) = (uuid.clone(), capacity);
    let before = true;
    world.event(Event::Contexts {
        process,
        device: device.clone(),
        count: 1,
        before,
    });
    world.event(Event::Holds {
        process,
        device,
        total,
        holding,
    });
    assert_eq!(
        occupied(&world),
        empty + 3 * GIB + context,
        "not counted twice, not for a moment"
    );
    world.event(look(used));
    assert_eq!(occupied(&world), empty + 3 * GIB + context);
    assert_eq!(world.allocate(1, 20 * GIB), 20 * GIB);
    world.event(look(used + 20 * GIB));
    assert_eq!(occupied(&world), empty + 3 * GIB + context);
    // The other program ends, which two looks show.
    world.event(look(80 * GIB + context));
    assert_eq!(occupied(&world), empty + context);
}

/// The driver reports the devices after the tenants are known: a guarantee holds also where its tenant has nothing yet.
#[test]
fn guarantee_holds_on_a_device_that_is_reported_later() {
    let mut world = World::before_a_look(CAPACITY, u64::MAX);
    let (owner, borrower) = (world.tenant(1, Class::Latency, 60 * GIB), 2);
    world.measure();
    world.measure();
    let guaranteed = |world: &World| {
        let line = &world.broker.lines()[0];
        let own = line.entries.iter().find(|(id, _)| *id == TenantId(1));
        own.map(|(_, entry)| entry.share.guaranteed)
    };
    assert_eq!(guaranteed(&world), Some(60 * GIB));
    world.tenant(borrower, Class::Batch, 0);
    world.set_busy(borrower, true);
    assert_eq!(world.allocate(borrower, 90 * GIB), 90 * GIB);
    // The borrower has only come, and always has work.
    world.ask(owner, 7, 60 * GIB);
    world.run_for(Micros::from_secs(4));
    assert_eq!(world.grants.get(&(owner, 7)), Some(&(60 * GIB)));
}

/// A MIG instance that was removed while a process still reports memory there: that stays accounted for until the process has ended.
#[test]
fn device_that_is_gone_is_accounted_for_while_it_is_used() {
    let mut world = World::new(CAPACITY);
    world.tenant(1, Class::Batch, 0);
    world.allocate(1, 10 * GIB);
    let gone = || Event::DeviceGone(DEVICE.to_owned());
    world.event(gone());
    let resident = |world: &World| {
        let lines = world.broker.lines();
        let line = lines.first()?;
        line.entries
            .iter()
            .map(|(_, entry)| entry.holding.resident())
            .next()
    };
    assert_eq!(resident(&world), Some(10 * GIB));
    world.kill(1);
    world.event(gone());
    assert!(world.broker.lines().is_empty());
    // It comes back as any new one.
    world.measure();
    assert_eq!(
        world.broker.lines()[0].free,
        CAPACITY - world.broker.lines()[0].occupied
    );
}

/// Tenants that are admitted at one moment, before any of them has a context.
#[test]
fn guarantee_of_a_tenant_that_has_not_come_is_booked_with_its_context() {
    let mut world = World::new(CAPACITY);
    look(&mut world);
    let to = |world: &World, asking| {
        let booked = world.broker.booked(DEVICE, TenantId(asking));
        booked.expect("the device").0
    };
    let usable = |world: &World| to(world, 9);
    let all = usable(&world);
    let line = world.broker.lines().remove(0);
    assert_eq!(
        all,
        line.free - CONTEXT,
        "the one that asks has a context, too"
    );
    world.terms(1, Class::Batch, 0);
    assert_eq!(usable(&world), all, "nothing is guaranteed to it");
    for id in 2..5 {
        world.terms(id, Class::Batch, GIB);
        assert_eq!(usable(&world), all - (id - 1) * CONTEXT, "{id}");
        assert_eq!(
            to(&world, id),
            all - (id - 2) * CONTEXT,
            "it is booked once"
        );
    }
}
