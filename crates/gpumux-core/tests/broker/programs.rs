//! Programs that allocate, compute and free in turn, and do not fit together: each goes on, and moves leave time for work.

use gpumux_core::{
    Class, Micros,
    broker::{Event, ProcessId},
};
use proptest::prelude::*;

use super::world::{GIB, World};

/// How long a program may stand still here: turns take up to 40 times a move of a second.
const STILL: Micros = Micros::from_secs(40);

/// One program: what it does now, and when it did something last.
struct Program {
    process: ProcessId,
    /// It holds at most so much.
    most: u64,
    /// The request that it waits for.
    ticket: Option<u32>,
    busy_until: Micros,
    progress: Micros,
    steps: u64,
}

/// Numbers that look random (xorshift64).
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self, below: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % below
    }
}

/// The longest that any of so many programs, of at most so many GiB each, stood still on a device of 112 GiB, and the steps of all.
fn play(programs: u64, most: u64, seed: u64) -> (Micros, u64) {
    const STEP: Micros = Micros::from_millis(1);
    let time = Micros::from_secs(60);
    let mut world = World::new(112 * GIB);
    let mut random = Random(seed | 1);
    let start = |n| Program {
        process: world.tenant(n, Class::Batch, 0),
        most: most * GIB,
        ticket: None,
        busy_until: Micros::ZERO,
        progress: world.now,
        steps: 0,
    };
    let mut programs: Vec<Program> = (1..=programs).map(start).collect();
    let (begin, mut tickets, mut longest) = (world.now, 0, Micros::ZERO);
    while world.now < begin + time {
        world.run_for(STEP);
        for program in &mut programs {
            let (process, tenant) = (program.process, program.process.0);
            longest = longest.max(world.now.saturating_sub(program.progress));
            if let Some(ticket) = program.ticket {
                let Some(bytes) = world.grants.remove(&(process, ticket)) else {
                    continue;
                };
                assert!(bytes > 0, "it fits alone");
                program.ticket = None;
                program.progress = world.now;
            }
            if !world.is_home(tenant) || world.puppets[&process].closed {
                world.set_busy(tenant, false);
                world.event(Event::Waits(process));
                continue;
            }
            if world.now < program.busy_until {
                continue;
            }
            world.set_busy(tenant, false);
            program.progress = world.now;
            program.steps += 1;
            let holding = world.puppets[&process].holding;
            let bytes = (1 + random.next(8)) * GIB;
            match random.next(4) {
                0 if holding.movable + bytes <= program.most => {
                    tickets += 1;
                    program.ticket = Some(tickets);
                    world.ask(process, tickets, bytes);
                }
                1 if holding.movable >= bytes && holding.movable * 2 > program.most => {
                    let left = gpumux_core::ledger::Holding {
                        movable: holding.movable - bytes,
                        ..holding
                    };
                    world.report(process, left, Micros::ZERO);
                    world.run_for(Micros::ZERO);
                }
                _ => {
                    program.busy_until = world.now + Micros(500 + random.next(5000));
                    world.set_busy(tenant, true);
                }
            }
        }
    }
    (longest, programs.iter().map(|it| it.steps).sum())
}

/// Two of three fit: as much is done as by two alone, but for the moves.
fn check(most: u64, seed: u64) {
    let (_, alone) = play(1, most, seed);
    let (longest, together) = play(3, most, seed);
    assert!(longest <= STILL, "one stood still for {longest}");
    assert!(
        together * 2 >= alone * 3,
        "{together} steps, {alone} alone, of at most {most} GiB"
    );
}

pub(crate) fn large_ones_take_turns_that_leave_time_for_work() {
    check(55, 1);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]
    #[test]
    fn each_goes_on_and_moves_leave_time_for_work(seed: u64, most in 20..56u64) {
        check(most, seed);
    }
}
