//! Memory of elastic ranges that needs no copy.

use gpumux_core::{
    Class, MemoryPolicy, Micros, TenantId,
    broker::{Event, FREEZE, HEDGE, ProcessId, Terms},
    ledger::Share,
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

/// A tenant of two processes, of which the first has 100 GiB that need no copy, on a device of 110.
fn idle_cache(free: u64, cached: u64) -> World {
    let mut world = World::new(110 * GIB);
    world.tenant(1, Class::Standard, 0);
    world.process(11, 1);
    assert_eq!(world.allocate(1, 100 * GIB), 100 * GIB);
    world.offer(1, free * GIB, cached * GIB);
    world.run_for(S);
    world
}

/// What a process gets within a second.
fn soon(world: &mut World, process: u64, gib: u64) -> Option<u64> {
    let process = ProcessId(process);
    world.ask(process, 1, gib * GIB);
    world.run_for(S);
    world.grants.get(&(process, 1)).map(|it| it / GIB)
}

#[test]
fn own_free_and_cached_pages_serve_each_process_of_a_tenant() {
    for asker in [1, 11] {
        for (free, cached) in [(100, 0), (0, 100), (30, 70)] {
            let mut world = idle_cache(free, cached);
            assert_eq!(soon(&mut world, asker, 60), Some(60), "{asker} {free}");
            let all: u64 = world.drops.iter().map(|it| it.2).sum();
            assert_eq!(all / GIB, 50, "no more than is lacking");
            let free_left = world.puppets[&ProcessId(1)].droppable.free / GIB;
            assert_eq!(free_left, u64::saturating_sub(free, 51));
            assert!(world.is_home(1) && !world.frozen.contains(&TenantId(1)));
            world.ask(ProcessId(asker), 2, 60 * GIB);
            world.run_for(S);
            assert_eq!(world.grants.get(&(ProcessId(asker), 2)), Some(&0));
        }
    }
}

#[test]
fn own_free_pages_serve_a_tenant_at_its_limit() {
    let mut world = idle_cache(40, 0);
    let terms = Terms {
        class: Class::Standard,
        share: Share {
            guaranteed: 0,
            limit: 100 * GIB,
        },
        policy: MemoryPolicy::Fail,
        sleep_after: None,
    };
    world.event(Event::Tenant(TenantId(1), terms));
    assert_eq!(soon(&mut world, 11, 41), Some(0));
    assert_eq!(world.drops, [], "it would not do");
    assert_eq!(soon(&mut world, 11, 30), Some(30));
    let held: u64 = world.puppets.values().map(|it| it.holding.all()).sum();
    assert_eq!(held, 100 * GIB);
}

#[test]
fn own_free_pages_are_there_at_once_also_in_a_group() {
    for in_group in [false, true] {
        let mut world = idle_cache(100, 0);
        if in_group {
            world.in_group.insert(TenantId(1));
        }
        world.ask(ProcessId(11), 1, 5 * GIB);
        world.ask(ProcessId(1), 2, 60 * GIB);
        world.run_for(Micros::from_millis(250));
        assert_eq!(world.grants.get(&(ProcessId(11), 1)), Some(&(5 * GIB)));
        assert_eq!(world.grants.get(&(ProcessId(1), 2)), Some(&(60 * GIB)));
    }
}

#[test]
fn own_pages_go_before_memory_of_others_moves() {
    let mut world = World::new(110 * GIB);
    world.tenant(1, Class::Standard, 0);
    world.tenant(2, Class::Batch, 0);
    world.process(11, 1);
    assert_eq!(world.allocate(1, 60 * GIB), 60 * GIB);
    assert_eq!(world.allocate(2, 40 * GIB), 40 * GIB);
    world.offer(1, 20 * GIB, 20 * GIB);
    world.run_for(Micros::from_secs(10));
    assert_eq!(soon(&mut world, 11, 45), Some(45));
    assert_eq!(world.moves, []);
    // What its own do not suffice for moves.
    world.run_for(Micros::from_secs(10));
    world.ask(ProcessId(11), 2, 20 * GIB);
    world.run_for(Micros::from_secs(5));
    assert_eq!(world.grants[&(ProcessId(11), 2)], 20 * GIB);
    let dropped: u64 = world.drops.iter().map(|it| it.2).sum();
    assert_eq!(dropped, 40 * GIB, "all of its own");
    let moved: u64 = world.moves.iter().filter(|it| it.2).map(|it| it.3).sum();
    assert!((15..20).contains(&(moved / GIB)), "{moved}");
}

/// Its gates close late, and what another tenant gives is there before.
#[test]
fn memory_of_others_is_kept_for_a_request_while_its_tenant_frees_the_rest() {
    let mut world = World::new(110 * GIB);
    for (tenant, gib) in [(1, 50), (2, 10), (4, 40)] {
        world.tenant(tenant, Class::Standard, 0);
        assert_eq!(world.allocate(tenant, gib * GIB), gib * GIB);
    }
    world.in_group.insert(TenantId(4));
    world.offer(1, 10 * GIB, 0);
    world.run_for(Micros::from_secs(10));
    world.set_busy(1, true);
    world.puppets.get_mut(&ProcessId(1)).expect("there").manner = Manner::Slow(S);
    world.ask(ProcessId(1), 1, 26 * GIB);
    world.run_for(Micros::from_millis(300));
    assert_eq!(world.moves.len(), 1, "{:?}", world.moves);
    world.tenant(3, Class::Standard, 0);
    world.ask(ProcessId(3), 1, 5 * GIB);
    world.run_for(S);
    assert_eq!(world.grants.get(&(ProcessId(1), 1)), Some(&(26 * GIB)));
    assert_eq!(world.grants.get(&(ProcessId(3), 1)), None);
}

#[test]
fn caches_of_borrowers_go_before_the_own_ones_of_a_guarantee() {
    for (guaranteed, own) in [(100, 30), (0, 9)] {
        let mut world = World::new(110 * GIB);
        world.tenant(1, Class::Standard, guaranteed * GIB);
        world.tenant(2, Class::Standard, 0);
        assert_eq!(world.allocate(1, 50 * GIB), 50 * GIB);
        assert_eq!(world.allocate(2, 50 * GIB), 50 * GIB);
        world.offer(1, 0, 30 * GIB);
        world.offer(2, 0, 30 * GIB);
        world.run_for(Micros::from_secs(10));
        assert_eq!(soon(&mut world, 1, 30), Some(30));
        let cached = world.puppets[&ProcessId(1)].droppable.cached;
        assert_eq!((cached / GIB, &world.moves[..]), (own, &[][..]));
    }
}

/// A program looks for what it has itself once it is refused.
#[test]
fn own_pages_stay_for_a_request_that_is_withdrawn_soon() {
    let mut world = idle_cache(100, 0);
    world.ask(ProcessId(1), 1, 60 * GIB);
    world.run_for(Micros::from_millis(20));
    world.event(Event::Cancel(ProcessId(1), 1));
    world.run_for(S);
    assert_eq!((&world.drops[..], &world.failed[..]), (&[][..], &[][..]));
}

#[test]
fn own_caches_are_for_the_own_request_also_while_others_wait_longer() {
    let mut world = idle_cache(0, 60);
    world.set_busy(1, true);
    world.tenant(2, Class::Latency, 0);
    world.ask(ProcessId(2), 1, 20 * GIB);
    world.run_for(Micros::from_millis(200));
    assert_eq!(world.drops, []);
    world.ask(ProcessId(11), 1, 40 * GIB);
    world.run_for(Micros::from_millis(300));
    assert_eq!(world.grants.get(&(ProcessId(11), 1)), Some(&(40 * GIB)));
    assert_eq!(world.grants.get(&(ProcessId(2), 1)), None);
}

#[test]
fn stopped_process_that_has_its_tenant_s_free_pages_delays_a_request_for_a_while() {
    let mut world = idle_cache(100, 0);
    world.puppets.get_mut(&ProcessId(1)).expect("there").manner = Manner::Stopped;
    world.ask(ProcessId(11), 1, 60 * GIB);
    world.run_for(Micros::from_secs(7));
    assert_eq!(world.grants.get(&(ProcessId(11), 1)), Some(&0));
    assert!(world.is_home(1) && !world.frozen.contains(&TenantId(1)));
}

#[test]
fn program_that_gives_pages_is_asked_each_time_and_one_that_gives_none_is_not() {
    for (gives, asked) in [(true, 3), (false, 1)] {
        let mut world = World::new(110 * GIB);
        world.tenant(1, Class::Batch, 0);
        world.tenant(2, Class::Standard, 100 * GIB);
        assert_eq!(world.allocate(1, 100 * GIB), 100 * GIB);
        world.event(Event::Reclaims(ProcessId(1)));
        world.puppets.get_mut(&ProcessId(1)).expect("there").gives = gives;
        world.run_for(S);
        for ticket in 1..=3 {
            world.ask(ProcessId(2), ticket, 20 * GIB);
            world.run_for(S);
            assert_eq!(world.grants.get(&(ProcessId(2), ticket)), Some(&(20 * GIB)));
        }
        let orders = &world.reclaims;
        assert_eq!(orders.len(), asked, "{orders:?}");
        assert_eq!(world.moves.is_empty(), gives);
    }
}

/// Each of them is asked, also soon after another.
#[test]
fn program_is_asked_although_another_was_asked_lately() {
    let mut world = World::new(110 * GIB);
    for (tenant, class) in [(1, Class::Batch), (3, Class::Standard)] {
        world.tenant(tenant, class, 0);
        assert_eq!(world.allocate(tenant, 40 * GIB), 40 * GIB);
        world.event(Event::Reclaims(ProcessId(tenant)));
    }
    world.tenant(2, Class::Standard, 100 * GIB);
    world.puppets.get_mut(&ProcessId(3)).expect("there").gives = true;
    world.run_for(S);
    for ticket in 1..=2 {
        world.ask(ProcessId(2), ticket, 45 * GIB);
        world.run_for(Micros::from_secs(3));
        assert_eq!(world.grants.get(&(ProcessId(2), ticket)), Some(&(45 * GIB)));
    }
    let of = |id| {
        world
            .reclaims
            .iter()
            .filter(|it| it.1 == ProcessId(id))
            .count()
    };
    assert_eq!((of(1), of(3)), (1, 2));
}
