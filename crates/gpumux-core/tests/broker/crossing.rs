//! Packets that cross: a process reports the state of a moment before an order, or a grant, that is on its way to it.

use gpumux_core::{Class, MemoryPolicy, Micros, TenantId, broker::ProcessId};

use super::{
    programs::Random,
    world::{GIB, World},
};

const TENANTS: u64 = 4;

/// Programs allocate and free at any moment, and use less than they were granted.
#[test]
pub(crate) fn memory_is_handed_out_once_while_packets_cross() {
    for seed in 1..=100 {
        let mut random = Random(seed);
        let mut world = World::new(20 * GIB);
        world.latency = Micros(1 + random.next(3000));
        for id in 1..=TENANTS {
            world.tenant(id, Class::Standard, 0);
            if random.next(2) == 0 {
                world.set_policy(id, MemoryPolicy::Fail);
            }
        }
        for ticket in 1..300 {
            let id = 1 + random.next(TENANTS);
            let process = ProcessId(id);
            match random.next(6) {
                0 | 1 => world.ask(process, ticket, (1 + random.next(6)) * GIB),
                2 => world.free(id, (1 + random.next(4)) * GIB),
                3 => world.leave_unused(id, GIB),
                4 => world.set_busy(id, random.next(2) == 0),
                _ => {}
            }
            world.run_for(Micros(random.next(4 * world.latency.0)));
        }
        (1..=TENANTS).for_each(|id| world.set_busy(id, false));
        world.run_for(Micros::from_secs(400));
        for id in 1..=TENANTS {
            assert!(!world.waits_for_answer(id), "{:?}", TenantId(id));
        }
    }
}
