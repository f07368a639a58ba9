//! Programs that work for a request now and then, more than fit: each has its memory soon, where others rest.

use gpumux_core::{
    Class, Micros,
    broker::{Event, IDLE, ProcessId},
    ledger::Holding,
};
use proptest::prelude::*;

use super::{
    programs::Random,
    world::{GIB, LINK, World},
};

/// Bytes of each, and how many of them fit. Something is left, but not enough for another.
const EACH: u64 = 17 * GIB;
const FIT: usize = 4;
const CAPACITY: u64 = 74 * GIB;

/// How long bytes of one are on the way.
fn one_move() -> Micros {
    Micros(EACH / LINK)
}

/// So many programs that have been on the device, each with one process of its number.
fn programs(count: u64) -> World {
    let mut world = World::new(CAPACITY);
    for number in 1..=count {
        world.tenant(number, Class::Latency, 0);
        assert_eq!(world.allocate(number, EACH), EACH);
    }
    world
}

/// A program wants to work. How long it waits for its memory.
fn request(world: &mut World, number: u64) -> Micros {
    let came = world.now;
    while !world.is_home(number) {
        world.event(Event::Waits(ProcessId(number)));
        world.run_for(Micros::from_millis(10));
    }
    world.set_busy(number, true);
    world.now.saturating_sub(came)
}

#[test]
fn idle_program_that_was_moved_soon_has_its_memory_for_the_next_request() {
    let mut world = programs(5);
    let away = (1..=5).find(|it| !world.is_home(*it)).expect("four fit");
    let others: Vec<u64> = (1..=5).filter(|it| *it != away).collect();
    // All others work. One gets a request, and rests then: within its turn it is moved for the next.
    others.iter().for_each(|it| world.set_busy(*it, true));
    world.run_for(Micros::from_secs(60));
    request(&mut world, away);
    let moved = (others.iter().copied()).find(|it| !world.is_home(*it));
    world.run_for(Micros::from_secs(1));
    world.set_busy(away, false);
    world.run_for(Micros::from_secs(1));
    request(&mut world, moved.expect("one has made room"));
    assert!(!world.is_home(away), "it was the only one at rest");
    let rest = || (1..=5).filter(|it| *it != away);
    rest().for_each(|it| world.set_busy(it, false));
    world.run_for(Micros::from_secs(1));
    // While one of them makes room, another gives a little back, which a third takes: what the second had counts as what it may have again.
    world.event(Event::Waits(ProcessId(away)));
    world.run_for(Micros::from_millis(10));
    let at_home: Vec<u64> = rest().filter(|it| world.is_home(*it)).collect();
    assert_eq!(at_home.len(), 3, "one makes room");
    let holding = world.puppets[&ProcessId(at_home[0])].holding;
    let less = Holding {
        movable: holding.movable - (64 << 20),
        ..holding
    };
    world.report(ProcessId(at_home[0]), less, Micros::ZERO);
    world.run_for(Micros::from_millis(1));
    world.ask(ProcessId(at_home[1]), 1, 64 << 20);
    let waited = request(&mut world, away);
    assert!(waited <= Micros(3 * one_move().0), "it waited for {waited}");
}

struct Program {
    number: u64,
    next: Micros,
    /// When its request came.
    came: Option<Micros>,
    /// How long it works for that yet; none: not begun.
    work: Option<Micros>,
}

/// The longest that a request had no memory, of six programs with requests now and then.
fn play(seed: u64) -> Micros {
    const STEP: Micros = Micros::from_millis(10);
    let mut world = programs(6);
    let mut random = Random(seed | 1);
    let start = |number| Program {
        number,
        next: world.now,
        came: None,
        work: None,
    };
    let mut programs: Vec<Program> = (1..=6).map(start).collect();
    let end = world.now + Micros::from_secs(120);
    let mut longest = Micros::ZERO;
    while world.now < end {
        world.run_for(STEP);
        let mut active = programs.iter().filter(|it| it.came.is_some()).count();
        for it in &mut programs {
            let Some(lacks) = it.came else {
                if world.now >= it.next && active < FIT {
                    active += 1;
                    it.came = Some(world.now);
                    world.event(Event::Waits(ProcessId(it.number)));
                }
                continue;
            };
            if !world.is_home(it.number) {
                world.set_busy(it.number, false);
                world.event(Event::Waits(ProcessId(it.number)));
                longest = longest.max(world.now.saturating_sub(lacks));
                continue;
            }
            it.came = Some(world.now);
            world.set_busy(it.number, true);
            let work = *it.work.get_or_insert_with(|| {
                // It gives a little back: what it had counts as what it may have again.
                let holding = world.puppets[&ProcessId(it.number)].holding;
                let less = Holding {
                    movable: holding.movable - random.next(8) * (1 << 20),
                    ..holding
                };
                world.report(ProcessId(it.number), less, Micros::ZERO);
                Micros::from_millis(500 + random.next(3000))
            });
            it.work = Some(work.saturating_sub(STEP));
            if work <= STEP {
                (it.came, it.work) = (None, None);
                it.next = world.now + Micros::from_millis(random.next(4000 * it.number));
                world.set_busy(it.number, false);
            }
        }
    }
    longest
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]
    /// At most four work at once. One that lacks its memory waits until another has rested for as long as a move takes, that one's has gone and
    /// its own has come, and for as much of a claim before it.
    #[test]
    fn requests_wait_for_moves_only(seed: u64) {
        let most = Micros(2 * (3 * one_move().0).max(IDLE.0 + 2 * one_move().0)) + Micros::from_millis(200);
        let longest = play(seed);
        prop_assert!(longest <= most, "one waited for {longest} of {most}");
    }
}
