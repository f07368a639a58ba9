//! Programs that work for a request now and then, more than fit: each has its memory soon, where others rest.

use gpumux_core::{
    Class, Micros,
    broker::{Event, ProcessId},
};
use proptest::prelude::*;

use super::{
    programs::Random,
    world::{GIB, World},
};

/// Bytes of each, and how many of them fit. Something is left, but not enough for another.
const EACH: u64 = 17 * GIB;
const FIT: usize = 4;
const CAPACITY: u64 = 74 * GIB;
/// A program of six waits so long at most: another has been idle for as long as a move takes, its memory goes, and its own comes; an earlier
/// claim may need as much.
const SOON: Micros = Micros::from_millis(2500);

struct Program {
    process: ProcessId,
    next: Micros,
    /// The request that it works on came then, and it has begun; it ends then.
    came: Option<Micros>,
    until: Option<Micros>,
}

/// The longest that a program waited for its memory, and how often one did.
fn play(seed: u64) -> (Micros, u64) {
    const STEP: Micros = Micros::from_millis(10);
    let mut world = World::new(CAPACITY);
    let mut random = Random(seed | 1);
    let mut programs = Vec::new();
    for number in 1..=6 {
        let process = world.tenant(number, Class::Latency, 0);
        assert_eq!(world.allocate(number, EACH), EACH);
        let next = world.now;
        programs.push(Program {
            process,
            next,
            came: None,
            until: None,
        });
    }
    let end = world.now + Micros::from_secs(120);
    let (mut longest, mut waited) = (Micros::ZERO, 0);
    while world.now < end {
        world.run_for(STEP);
        let mut active = programs.iter().filter(|it| it.came.is_some()).count();
        for (number, program) in (1..).zip(&mut programs) {
            match (program.came, program.until) {
                (None, _) if world.now >= program.next && active < FIT => {
                    active += 1;
                    program.came = Some(world.now);
                    world.event(Event::Waits(program.process));
                }
                (Some(came), None) if world.is_home(number) => {
                    let took = world.now.saturating_sub(came);
                    longest = longest.max(took);
                    waited += u64::from(took > STEP);
                    program.until = Some(world.now + Micros::from_millis(500 + random.next(3000)));
                    world.set_busy(number, true);
                    // Something more for a moment.
                    let holding = world.puppets[&program.process].holding;
                    let more = gpumux_core::ledger::Holding {
                        movable: holding.movable - random.next(64) * (1 << 20),
                        ..holding
                    };
                    world.report(program.process, more, Micros::ZERO);
                }
                (Some(came), None) => {
                    let took = world.now.saturating_sub(came);
                    longest = longest.max(took);
                    world.event(Event::Waits(program.process));
                }
                (Some(_), Some(until)) if world.now >= until => {
                    (program.came, program.until) = (None, None);
                    program.next = world.now + Micros::from_millis(random.next(4000 * number));
                    world.set_busy(number, false);
                }
                _ => {}
            }
        }
    }
    (longest, waited)
}

fn check(seed: u64) {
    let (longest, waited) = play(seed);
    assert!(waited >= 10, "only {waited} had to wait");
    assert!(longest <= SOON, "one waited for {longest}");
}

#[test]
fn idle_program_that_gave_way_has_its_memory_for_the_next_request() {
    check(18_049_871_656_067_916_224);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]
    #[test]
    fn requests_wait_for_moves_only(seed: u64) {
        check(seed);
    }
}
