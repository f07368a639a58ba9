//! Each fault that was met or predicted, one by one.

use gpumux_core::{
    Class, MemoryPolicy, Micros, TenantId,
    broker::{CLOSED, Event, FREEZE, HEDGE, LOOK, MoveError, ProcessId, TRIM, Terms},
    ledger::{Holding, Share},
};

use super::world::{DEVICE, GIB, Manner, World};

const S: Micros = Micros::from_secs(1);

/// Two tenants of 85 GiB each on a device of 140 that grow at the same time, in steps of 5 GiB, and then work.
fn grown_together(manner: Manner) -> World {
    let mut world = World::new(140 * GIB);
    for id in [1, 2] {
        let process = world.tenant(id, Class::Batch, 0);
        world.puppets.get_mut(&process).expect("it is there").manner = manner;
        world.set_busy(id, true);
    }
    let mut has = [0, 0];
    let mut pending = [None, None];
    let mut ticket = 0;
    for _ in 0..60_000 {
        for (n, id) in [1u64, 2].into_iter().enumerate() {
            if let Some(open) = pending[n]
                && let Some(granted) = world.grants.get(&(ProcessId(id), open)).copied()
            {
                has[n] += granted;
                pending[n] = None;
            }
            if pending[n].is_none() && has[n] < 85 * GIB && world.is_home(id) {
                ticket += 1;
                pending[n] = Some(ticket);
                world.ask(ProcessId(id), ticket, 5 * GIB);
            }
        }
        world.run_for(Micros::from_millis(10));
        if has == [85 * GIB; 2] {
            return world;
        }
    }
    panic!("they have {has:?} after ten minutes");
}

#[test]
pub(crate) fn two_that_do_not_fit_and_start_together_take_turns() {
    let mut world = grown_together(Manner::Prompt);
    world.moves.clear();
    let mut home = [0, 0];
    for _ in 0..30_000 {
        world.run_for(Micros::from_millis(10));
        for (n, id) in [1, 2].into_iter().enumerate() {
            home[n] += u32::from(world.is_home(id));
        }
    }
    // Both never fit; nearly always one runs, each about as long.
    let (all, least) = (home[0] + home[1], home[0].min(home[1]));
    assert!(all > 28_000, "{home:?} of 30000");
    assert!(least > 12_000, "{home:?}");
    assert!(world.moves.len() >= 10, "{:?}", world.moves.len());
    assert!(world.longest_starved <= S, "{:?}", world.longest_starved);
}

#[test]
pub(crate) fn a_tenant_whose_threads_poll_comes_back_without_a_request() {
    // No thread of it ever comes to the gate: only its page shows that it has work.
    let mut world = World::new(10 * GIB);
    world.tenant(1, Class::Batch, 0);
    assert_eq!(world.allocate(1, 6 * GIB), 6 * GIB);
    world.set_busy(1, true);
    world.run_for(Micros::from_secs(2));
    world.tenant(2, Class::Batch, 0);
    assert_eq!(world.allocate(2, 6 * GIB), 6 * GIB);
    assert!(!world.is_home(1));
    world.kill(2);
    world.run_for(S);
    assert!(world.is_home(1), "{:?}", world.standing(1));
}

#[test]
pub(crate) fn a_stopped_victim_delays_others_only_once() {
    for manner in [
        Manner::Stopped,
        Manner::Slow(Micros::from_secs(15)),
        Manner::Refuses(Micros::from_millis(300)),
    ] {
        let mut world = World::new(10 * GIB);
        // The first is asked first.
        world.tenant(1, Class::Batch, 0);
        world.tenant(2, Class::Batch, 0);
        assert_eq!(world.allocate(1, 4 * GIB), 4 * GIB);
        assert_eq!(world.allocate(2, 4 * GIB), 4 * GIB);
        world.run_for(S);
        world.puppets.get_mut(&ProcessId(1)).expect("there").manner = manner;
        world.tenant(3, Class::Batch, 0);
        let asked = world.now;
        assert_eq!(world.allocate(3, 4 * GIB), 4 * GIB);
        let waited = world.now.saturating_sub(asked);
        assert!(waited <= HEDGE + S, "{manner:?}: {waited}");
        // It is not asked again and again: its failures double the pause.
        let orders = world.orders;
        world.run_for(Micros::from_secs(60));
        assert!(
            world.orders - orders < 60,
            "{manner:?}: {}",
            world.orders - orders
        );
        world.wake_up(1);
        world.run_for(Micros::from_secs(2));
        assert!(
            world.is_home(1) && !world.frozen.contains(&TenantId(1)),
            "{manner:?}"
        );
    }
}

/// What it reports to be movable may be in use again, or in a pool that the driver cannot divide.
#[test]
fn victim_that_has_nothing_to_move_is_asked_less_and_less() {
    let mut world = World::new(10 * GIB);
    for id in 1..=2 {
        world.tenant(id, Class::Batch, 0);
        assert_eq!(world.allocate(id, 4 * GIB), 4 * GIB);
    }
    world.puppets.get_mut(&ProcessId(1)).expect("there").manner = Manner::MovesNothing;
    // Only with what both have is there room for it, and both rest now and then.
    let third = world.tenant(3, Class::Batch, 0);
    world.ask(third, 1, 8 * GIB);
    for _ in 0..150 {
        for (busy, time) in [(false, 300), (true, 100)] {
            (1..=2).for_each(|id| world.set_busy(id, busy));
            world.run_for(Micros::from_millis(time));
        }
    }
    for id in [1, 2] {
        let outs = world.moves.iter();
        let outs = outs.filter(|it| it.1 == TenantId(id) && it.2).count();
        assert!((1..16).contains(&outs), "{id} was moved {outs} times");
    }
}

#[test]
pub(crate) fn an_order_does_not_outlive_its_asker() {
    let mut world = World::new(10 * GIB);
    world.tenant(1, Class::Batch, 0);
    assert_eq!(world.allocate(1, 8 * GIB), 8 * GIB);
    world.set_busy(1, true);
    world.puppets.get_mut(&ProcessId(1)).expect("there").manner = Manner::Slow(S);
    world.run_for(Micros::from_secs(10));
    let process = world.tenant(2, Class::Batch, 0);
    world.ask(process, 1, 6 * GIB);
    world.run_for(Micros::from_millis(200));
    world.kill(2);
    world.run_for(Micros::from_secs(5));
    assert!(world.is_home(1), "{:?}", world.standing(1));
    let orders = world.orders;
    world.run_for(Micros::from_secs(60));
    assert_eq!(world.orders, orders, "nobody asks for anything");
    assert!(world.moves.is_empty(), "{:?}", world.moves);
}

#[test]
pub(crate) fn a_victim_that_moves_nothing_is_brought_back() {
    for manner in [Manner::MovesNothing, Manner::RefusesToMove] {
        let mut world = World::new(10 * GIB);
        world.tenant(1, Class::Batch, 0);
        assert_eq!(world.allocate(1, 8 * GIB), 8 * GIB);
        world.set_busy(1, true);
        world.run_for(Micros::from_secs(2));
        world.puppets.get_mut(&ProcessId(1)).expect("there").manner = manner;
        let process = world.tenant(2, Class::Batch, 0);
        world.ask(process, 1, 6 * GIB);
        world.run_for(Micros::from_secs(120));
        let tries = world.moves.iter().filter(|it| it.2).count();
        assert!((1..40).contains(&tries), "{manner:?}: {tries} tries");
        assert!(
            world.longest_starved <= S,
            "{manner:?}: {}",
            world.longest_starved
        );
        world.kill(2);
        world.run_for(Micros::from_secs(2));
        assert!(world.is_home(1), "{manner:?}");
    }
}

#[test]
pub(crate) fn leases_that_are_not_used_are_given_back_before_the_victim_is_asked_again() {
    let mut world = World::new(10 * GIB);
    world.tenant(1, Class::Batch, 0);
    assert_eq!(world.allocate(1, 8 * GIB), 8 * GIB);
    // It was granted 8 GiB and has taken 2: only these can be moved.
    world.puppets.get_mut(&ProcessId(1)).expect("there").unused = 6 * GIB;
    world.tenant(2, Class::Batch, 0);
    let asked = world.now;
    assert_eq!(world.allocate(2, 7 * GIB), 7 * GIB);
    assert!(world.now.saturating_sub(asked) < Micros::from_secs(2));
    assert_eq!(world.moves.len(), 0, "what is not used is not moved");
}

/// Others keep what they are granted while a program tries again and again.
#[test]
fn refused_requests_ask_leases_of_others_back_seldom() {
    for limit in [u64::MAX, 5 * GIB] {
        let mut world = World::new(20 * GIB);
        for tenant in 1..=4 {
            world.tenant(tenant, Class::Standard, 0);
            assert_eq!(world.allocate(tenant, 4 * GIB), 4 * GIB);
        }
        world.event(Event::Tenant(TenantId(4), fails_at(limit)));
        world.run_for(Micros::from_secs(1));
        let (asked, before) = (world.now, world.orders);
        let mut refused = 0;
        while world.now < asked + Micros::from_secs(1) {
            assert_eq!(world.allocate(4, 6 * GIB), 0);
            world.run_for(Micros::from_millis(10));
            refused += 1;
        }
        let orders = world.orders - before;
        assert!(refused > 40, "{refused}");
        // At its limit it is asked itself, each time.
        let most = if limit == u64::MAX { 2 * 4 } else { refused };
        assert!(orders <= most, "{orders} for {refused} at {limit}");
    }
}

/// The terms of a tenant that waits for no room.
fn fails_at(limit: u64) -> Terms {
    Terms {
        class: Class::Standard,
        share: Share {
            guaranteed: 0,
            limit,
        },
        policy: MemoryPolicy::Fail,
        sleep_after: None,
    }
}

#[test]
pub(crate) fn a_request_waits_for_leases_that_come_back_late() {
    let mut world = World::new(10 * GIB);
    let of_one = || {
        let mut world = World::new(10 * GIB);
        world.tenant(1, Class::Standard, 0);
        world.event(Event::Tenant(TenantId(1), fails_at(5 * GIB)));
        world.process(2, 1);
        assert_eq!(world.allocate(1, 3 * GIB), 3 * GIB);
        let one = world.puppets.get_mut(&ProcessId(1)).expect("there");
        (one.unused, one.trim) = (2 * GIB, Micros::from_millis(400));
        world
    };
    // At the tenant's limit, of which its other process does not use all: that one's host is slow.
    let mut own = of_one();
    assert_eq!(own.allocate(2, 3 * GIB), 3 * GIB);
    // Where the driver has less room than is accounted for.
    world.tenant(1, Class::Standard, 0);
    assert_eq!(world.allocate(1, 8 * GIB), 8 * GIB);
    let one = world.puppets.get_mut(&ProcessId(1)).expect("there");
    (one.unused, one.trim) = (6 * GIB, Micros::from_millis(400));
    world.tenant(2, Class::Standard, 0);
    world.event(Event::Tenant(TenantId(2), fails_at(5 * GIB)));
    assert_eq!(world.allocate(2, 4 * GIB), 4 * GIB);
    // One that is stopped holds others up once, not each time.
    let mut stopped = of_one();
    stopped
        .puppets
        .get_mut(&ProcessId(1))
        .expect("there")
        .manner = Manner::Stopped;
    for (at_most, round) in [TRIM + LOOK, LOOK, LOOK].into_iter().zip(0..) {
        let asked = stopped.now;
        assert_eq!(stopped.allocate(2, 3 * GIB), 0, "{round}");
        let waited = stopped.now.saturating_sub(asked);
        assert!(
            waited <= at_most + Micros::from_millis(10),
            "{round}: {waited}"
        );
        stopped.run_for(Micros::from_secs(3));
    }
}

#[test]
pub(crate) fn only_what_is_lacking_moves() {
    let mut world = World::new(100 * GIB);
    world.tenant(1, Class::Batch, 0);
    assert_eq!(world.allocate(1, 80 * GIB), 80 * GIB);
    world.run_for(Micros::from_secs(5));
    world.tenant(2, Class::Batch, 0);
    assert_eq!(world.allocate(2, 30 * GIB), 30 * GIB);
    let moved = world.swapped(1);
    // The reserve, a context, and a 64th ahead of further requests.
    assert!((10 * GIB..15 * GIB).contains(&moved), "{moved}");
}

#[test]
pub(crate) fn a_tenant_may_end_at_any_moment_of_a_move() {
    // A move out and back takes some 250 ms here.
    for ms in 0..400 {
        for dies in [1, 2] {
            let mut world = World::new(10 * GIB);
            for id in [1, 2] {
                world.tenant(id, Class::Batch, 0);
                world.set_busy(id, true);
            }
            assert_eq!(world.allocate(1, 6 * GIB), 6 * GIB);
            world.run_for(Micros::from_secs(2));
            world.ask(ProcessId(2), 1, 6 * GIB);
            world.run_for(Micros::from_millis(ms));
            world.kill(dies);
            world.run_for(Micros::from_secs(2));
            let other = 3 - dies;
            assert!(
                world.is_home(other),
                "{ms} ms, {dies} dies: {:?}",
                world.standing(other)
            );
            assert!(world.frozen.is_empty(), "{ms} ms: {:?}", world.frozen);
            if other == 2 {
                assert_eq!(world.grants.get(&(ProcessId(2), 1)), Some(&(6 * GIB)));
            }
        }
    }
}

#[test]
pub(crate) fn a_driver_with_less_room_than_accounted_for_gets_more() {
    let mut world = World::new(20 * GIB);
    world.tenant(1, Class::Batch, 0);
    world.tenant(2, Class::Batch, 0);
    assert_eq!(world.allocate(1, 8 * GIB), 8 * GIB);
    assert_eq!(world.allocate(2, 8 * GIB), 8 * GIB);
    world.event(Event::Sleep(TenantId(1), 1));
    world.run_for(S);
    assert_eq!(world.answers.get(&1), Some(&Ok(())));
    world.puppets.get_mut(&ProcessId(1)).expect("there").manner = Manner::CannotReturn(3);
    world.event(Event::Wake(TenantId(1), 2));
    world.run_for(Micros::from_secs(10));
    assert_eq!(world.answers.get(&2), Some(&Ok(())));
    assert!(
        world.moves.iter().any(|it| it.1 == TenantId(2)),
        "{:?}",
        world.moves
    );
}

/// One process refuses while another still makes host memory: the other is not waited for.
#[test]
pub(crate) fn refusal_of_one_process_ends_the_move_of_all() {
    let mut world = World::new(10 * GIB);
    world.tenant(1, Class::Batch, 0);
    world.process(11, 1);
    for process in [1, 11] {
        assert_eq!(world.allocate(process, 2 * GIB), 2 * GIB);
    }
    let manner = |world: &mut World, process, manner| {
        world
            .puppets
            .get_mut(&ProcessId(process))
            .expect("there")
            .manner = manner;
    };
    manner(&mut world, 1, Manner::Slow(Micros::from_secs(15)));
    manner(&mut world, 11, Manner::Refuses(Micros::from_millis(10)));
    world.event(Event::Sleep(TenantId(1), 1));
    world.run_for(Micros::from_millis(20));
    assert!(matches!(
        world.answers.get(&1),
        Some(Err(MoveError::Busy(_)))
    ));
    assert!(world.is_home(1));
    // The late answer of the other belongs to no move.
    manner(&mut world, 11, Manner::Prompt);
    world.event(Event::Sleep(TenantId(1), 2));
    world.run_for(Micros::from_secs(14));
    assert!(!world.answers.contains_key(&2));
    world.run_for(Micros::from_secs(4));
    assert_eq!(world.answers.get(&2), Some(&Ok(())));
}

/// A process whose session is replaced in the middle of a move joins before its old session has left.
#[test]
pub(crate) fn move_begins_anew_with_a_process_that_joined_meanwhile() {
    for moment in [500, 5_000_200, 5_020_000] {
        let mut world = World::new(10 * GIB);
        world.tenant(1, Class::Batch, 0);
        assert_eq!(world.allocate(1, 2 * GIB), 2 * GIB);
        let puppet = world.puppets.get_mut(&ProcessId(1)).expect("there");
        puppet.manner = Manner::Slow(Micros::from_secs(5));
        world.event(Event::Sleep(TenantId(1), 1));
        world.run_for(Micros(moment));
        world.process(11, 1);
        world.kill(1);
        assert_eq!(world.allocate(11, 3 * GIB), 3 * GIB);
        world.run_for(S);
        assert_eq!(world.answers.get(&1), Some(&Ok(())), "{moment}");
        assert_eq!(world.swapped(1), 3 * GIB, "{moment}");
    }
}

#[test]
pub(crate) fn wake_ends_a_move_that_has_not_begun_to_copy() {
    let mut world = World::new(10 * GIB);
    world.tenant(1, Class::Batch, 0);
    assert_eq!(world.allocate(1, 2 * GIB), 2 * GIB);
    let puppet = world.puppets.get_mut(&ProcessId(1)).expect("there");
    puppet.manner = Manner::Slow(Micros::from_secs(5));
    world.event(Event::Sleep(TenantId(1), 1));
    world.run_for(S);
    world.event(Event::Wake(TenantId(1), 2));
    assert!(matches!(
        world.answers.get(&1),
        Some(Err(MoveError::Busy(_)))
    ));
    assert_eq!(world.answers.get(&2), Some(&Ok(())));
    assert!(world.is_home(1) && world.frozen.is_empty());
    world.run_for(Micros::from_secs(10));
    assert!(world.moves.is_empty());
    // A move for which others wait goes on.
    world.tenant(2, Class::Batch, 0);
    world.ask(ProcessId(2), 1, 9 * GIB);
    world.run_for(S);
    world.event(Event::Wake(TenantId(1), 3));
    world.run_for(Micros::from_secs(10));
    assert!(world.grants.contains_key(&(ProcessId(2), 1)));
}

/// Its host memory is being made, which takes as long as there is much: it still runs.
#[test]
pub(crate) fn leaving_tenant_gets_free_memory_until_it_is_frozen() {
    let mut world = World::new(10 * GIB);
    for tenant in [1, 2] {
        world.tenant(tenant, Class::Batch, 0);
    }
    assert_eq!(world.allocate(1, 2 * GIB), 2 * GIB);
    assert_eq!(world.allocate(2, 6 * GIB), 6 * GIB);
    let puppet = world.puppets.get_mut(&ProcessId(1)).expect("there");
    puppet.manner = Manner::Slow(Micros::from_secs(5));
    world.event(Event::Sleep(TenantId(1), 1));
    world.run_for(S);
    world.ask(ProcessId(1), 1, GIB);
    assert!(world.grants.contains_key(&(ProcessId(1), 1)));
    // No other tenant is moved for it.
    world.ask(ProcessId(1), 2, 6 * GIB);
    world.run_for(S);
    assert!(!world.grants.contains_key(&(ProcessId(1), 2)) && world.is_home(2));
}

#[test]
pub(crate) fn device_size_is_what_the_driver_reports() {
    let mut world = World::new(10 * GIB);
    let process = world.tenant(1, Class::Batch, 0);
    for (device, total) in [(DEVICE, 4096), ("GPU-invented", 1 << 43)] {
        let (device, holding) = (device.to_owned(), Holding::default());
        world.event(Event::Holds {
            process,
            device,
            total,
            holding,
        });
    }
    let lines = world.broker.lines();
    assert_eq!(lines.len(), 1);
    assert_eq!(lines[0].capacity, 10 * GIB);
}

#[test]
pub(crate) fn a_late_freeze_is_undone() {
    let mut world = World::new(10 * GIB);
    world.tenant(1, Class::Batch, 0);
    assert_eq!(world.allocate(1, 8 * GIB), 8 * GIB);
    let process = world.tenant(2, Class::Batch, 0);
    world.run_for(S);
    world.event(Event::Sleep(TenantId(1), 5));
    world.run_for(Micros(400));
    world.event(Event::Frozen(TenantId(1), Err("no such channel".into())));
    world.run_for(FREEZE);
    assert!(matches!(
        world.answers.get(&5),
        Some(Err(MoveError::Freeze(_)))
    ));
    assert!(world.is_home(1) && world.frozen.is_empty());
    let _ = process;
}

#[test]
pub(crate) fn copy_behind_a_collective_of_a_peer_delays_a_move() {
    let mut world = World::new(10 * GIB);
    world.tenant(1, Class::Batch, 0);
    let behind = world.process(2, 1);
    assert_eq!(world.allocate(1, 2 * GIB), 2 * GIB);
    world.puppets.get_mut(&behind).expect("there").manner = Manner::Behind;
    world.event(Event::Sleep(TenantId(1), 1));
    world.run_for(CLOSED);
    assert_eq!(world.answers.get(&1), None);
    world.run_for(S);
    assert_eq!(world.answers.get(&1), Some(&Ok(())));
    assert!(!world.is_home(1) && world.frozen.contains(&TenantId(1)));
}

/// A look at the device may come at any moment of a return.
#[test]
fn memory_that_comes_back_is_not_foreign() {
    let mut world = World::new(10 * GIB);
    world.tenant(1, Class::Batch, 0);
    world.tenant(2, Class::Batch, 5 * GIB);
    assert_eq!(world.allocate(1, 6 * GIB), 6 * GIB);
    world.measure();
    world.event(Event::Sleep(TenantId(1), 1));
    world.run_for(S);
    world.puppets.get_mut(&ProcessId(1)).expect("there").manner = Manner::Stopped;
    world.event(Event::Wake(TenantId(1), 2));
    let mut free = |there: u64| {
        // Of what is there, 6 GiB are the tenant's, and not reported yet.
        world.unfreed = there;
        for _ in 0..2 {
            world.run_for(S);
            world.measure();
        }
        world.broker.lines().remove(0).free
    };
    let all = free(0);
    assert_eq!((free(3 * GIB), free(6 * GIB)), (all, all));
    assert_eq!(free(7 * GIB), all - GIB, "the rest is foreign");
    // What is guaranteed is not refused meanwhile: it comes later.
    world.ask(ProcessId(2), 1, 5 * GIB);
    world.run_for(TRIM + TRIM);
    assert_eq!(world.grants.get(&(ProcessId(2), 1)), None);
    world.unfreed = 0;
    world.wake_up(1);
    world.run_for(Micros::from_secs(10));
    assert_eq!(world.grants.get(&(ProcessId(2), 1)), Some(&(5 * GIB)));
}
