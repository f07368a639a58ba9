//! Controls around work that comes at regular times.

use gpumux_core::{Class, Micros};

use super::world::{World, spec};

#[test]
fn no_control_is_issued_just_before_expected_work() {
    let mut world = World::new("priority", 1);
    world.tenant(1, spec(Class::Latency, 0.0), &[0]);
    for id in 2..=4 {
        world.tenant(id, spec(Class::Batch, 0.0), &[0]);
        world.set_busy(id, true);
    }
    let mut issued = [0; 2];
    for request in 0..1000 {
        world.arrives(1);
        for (at, time) in [1_000, 8_800, 200].into_iter().enumerate() {
            world.set_busy(1, at == 0);
            let before = world.seen.commands;
            if at == 2 {
                // Another becomes the owner of the quantum.
                let owner = (2..=4).find(|id| world.may_run(*id)).unwrap_or(2);
                (2..=4).for_each(|id| world.set_busy(id, id != owner));
            }
            world.run_for(Micros(time));
            if request > 10 {
                issued[at / 2] += world.seen.commands - before;
            }
        }
    }
    assert_eq!(issued[1], 0, "of {issued:?}");
    assert!(issued[0] > 200, "{issued:?}");
}
