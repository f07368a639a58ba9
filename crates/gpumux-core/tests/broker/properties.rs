//! Random worlds: whatever tenants and processes do, what must hold holds, and once they behave all are served.

use std::collections::BTreeMap;

use gpumux_core::{
    Class, Micros, TenantId,
    broker::{Event, HOST_PIECE, ProcessId},
};
use proptest::prelude::*;

use super::world::{GIB, Manner, World};

/// Tenants of a world, each with one process of the same number.
const TENANTS: u64 = 5;

#[derive(Clone, Debug)]
enum Step {
    /// Asks for so many GiB.
    Ask(u64, u64),
    Busy(u64, bool),
    Manner(u64, Manner),
    /// A blocked thread asks for its memory.
    Waits(u64),
    Sleep(u64),
    Wake(u64),
    /// Its process ends, and another begins in its place.
    Kill(u64),
    /// The driver reports.
    Measure,
    /// So many ms pass.
    Pass(u64),
}

fn manner() -> impl Strategy<Value = Manner> {
    prop_oneof![
        4 => Just(Manner::Prompt),
        1 => (1..30_000u64).prop_map(|ms| Manner::Slow(Micros::from_millis(ms))),
        1 => (1..5_000u64).prop_map(|ms| Manner::Refuses(Micros::from_millis(ms))),
        1 => Just(Manner::Stopped),
        1 => Just(Manner::MovesNothing),
        1 => Just(Manner::RefusesToMove),
        1 => (1..4u32).prop_map(Manner::CannotReturn),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let tenant = 1..=TENANTS;
    prop_oneof![
        4 => (tenant.clone(), 1..30u64).prop_map(|(t, gib)| Step::Ask(t, gib)),
        4 => (tenant.clone(), any::<bool>()).prop_map(|(t, busy)| Step::Busy(t, busy)),
        2 => (tenant.clone(), manner()).prop_map(|(t, manner)| Step::Manner(t, manner)),
        1 => tenant.clone().prop_map(Step::Waits),
        1 => tenant.clone().prop_map(Step::Sleep),
        1 => tenant.clone().prop_map(Step::Wake),
        1 => tenant.prop_map(Step::Kill),
        1 => Just(Step::Measure),
        8 => (1..20_000u64).prop_map(Step::Pass),
    ]
}

fn class() -> impl Strategy<Value = Class> {
    prop_oneof![
        Just(Class::Latency),
        Just(Class::Standard),
        Just(Class::Batch)
    ]
}

proptest! {
    #[test]
    fn all_are_served_whatever_happened(
        tenants in proptest::collection::vec((class(), 0..20u64), TENANTS as usize),
        host in prop_oneof![Just(u64::MAX), (0..60u64).prop_map(|gib| gib * GIB)],
        latency in prop_oneof![Just(0), 1..5000u64],
        steps in proptest::collection::vec(step(), 1..60),
    ) {
        let mut world = World::with_host(60 * GIB, host);
        world.latency = Micros(latency);
        for (n, (class, guaranteed)) in tenants.iter().enumerate() {
            // 58 GiB can be handed out.
            let guaranteed = (*guaranteed * GIB).min(11 * GIB);
            world.tenant(n as u64 + 1, *class, guaranteed);
        }
        let (mut tickets, mut requests) = (0, 0);
        let mut sizes = BTreeMap::new();
        for step in steps {
            match step {
                Step::Ask(t, gib) => {
                    // What it has asked for, granted or not.
                    let asked: &mut u64 = sizes.entry(t).or_default();
                    if *asked + gib <= 30 {
                        *asked += gib;
                        tickets += 1;
                        world.ask(ProcessId(t), tickets, gib * GIB);
                    }
                }
                Step::Busy(t, busy) => world.set_busy(t, busy),
                Step::Manner(t, manner) => {
                    world.wake_up(t);
                    world.puppets.get_mut(&ProcessId(t)).expect("there").manner = manner;
                }
                Step::Waits(t) => world.event(Event::Waits(ProcessId(t))),
                Step::Sleep(t) => {
                    requests += 1;
                    world.event(Event::Sleep(TenantId(t), requests));
                }
                Step::Wake(t) => {
                    requests += 1;
                    world.event(Event::Wake(TenantId(t), requests));
                }
                Step::Kill(t) => {
                    sizes.remove(&t);
                    world.kill(t);
                    world.process(t, t);
                }
                Step::Measure => world.measure(),
                Step::Pass(ms) => world.run_for(Micros::from_millis(ms)),
            }
        }
        // From now on all behave. With as much host memory as `docs/memory.md` asks for, each that wants to run does so within its bound:
        // for each of the others ten turns and two moves, the pause of a failed move, and 30 s by class.
        for t in 1..=TENANTS {
            world.wake_up(t);
            world.set_busy(t, true);
        }
        world.run_for(Micros::from_secs(320));
        prop_assert_eq!(world.answers.len(), requests as usize, "each request is answered");
        let line = world.broker.lines().remove(0);
        let room = line.capacity - line.occupied;
        let sizes = || line.entries.iter().map(|(_, it)| it.holding.all());
        let exceeds = sizes().sum::<u64>().saturating_sub(room);
        let more = line.capacity / 64 + TENANTS * 2 * HOST_PIECE;
        let enough = exceeds + sizes().max().unwrap_or_default() + more;
        if host >= enough {
            let mut served = [false; TENANTS as usize];
            for _ in 0..6000 {
                world.run_for(Micros::from_millis(100));
                for t in 1..=TENANTS {
                    served[t as usize - 1] |= world.is_home(t);
                    // Its threads come to the gate.
                    if !world.is_home(t) {
                        world.event(Event::Waits(ProcessId(t)));
                    }
                }
                if served == [true; TENANTS as usize] {
                    break;
                }
            }
            for (id, entry) in &world.broker.lines()[0].entries {
                // Guarantees that others use may leave too little.
                let within = line.entries.iter().filter(|(other, it)| {
                    other != id && it.holding.all() <= it.share.guaranteed
                });
                let kept: u64 = within.map(|(_, it)| it.holding.all()).sum();
                let fits = kept + entry.holding.all() <= room;
                let n = id.0 as usize - 1;
                prop_assert!(served[n] || !fits, "{id:?} was never served");
            }
        }
    }
}
