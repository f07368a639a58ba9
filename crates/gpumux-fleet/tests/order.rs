//! The order of nodes for a scheduler that chooses the GPUs itself.

use gpumux_fleet::{
    engine::Engine,
    fleet::{Fleet, Free, Gpus},
    model::{Class, Demand},
};
use proptest::prelude::*;

mod common;

use common::{demands, node, nodes, place, share, whole};

/// The first free GPUs for each demand in turn, searched without the engine.
fn first_fit(free: &Free, demands: &[Demand]) -> bool {
    let mut left = *free;
    demands.iter().all(|demand| {
        let hosts = (0..usize::from(left.gpus)).filter(|gpu| left.hosts(*gpu, demand));
        let hosts = hosts.take(usize::from(demand.gpus));
        let gpus = hosts.fold(Gpus::default(), Gpus::with);
        let whole = left.fits(demand) && gpus.count() == u32::from(demand.gpus);
        let after = whole.then(|| left.without(demand, gpus)).flatten();
        after.map(|after| left = after).is_some()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever happened before, the order has each node with room for all demands once, and no other.
    #[test]
    fn order_has_each_node_with_room_for_all_once(
        specs in nodes(),
        tenants in prop::collection::vec(demands(), 0..12),
        asked in prop::collection::vec(demands(), 1..4),
    ) {
        let mut fleet = Fleet::new(specs.clone());
        let mut engine = Engine::new(&specs, &tenants, Vec::new());
        for (id, demand) in (0..).zip(&tenants) {
            let mut order = engine.order(&fleet, &asked);
            order.sort_unstable();
            let free = (0..).zip(fleet.free());
            let fits = free.filter(|(_, free)| first_fit(free, &asked));
            prop_assert_eq!(order, fits.map(|(node, _)| node).collect::<Vec<_>>());
            if let Some(place) = engine.choose(&fleet, demand) {
                fleet.place(id, *demand, place).unwrap();
            }
        }
    }
}

#[test]
fn order_names_the_started_node_first() {
    let specs = vec![node(0, 2, 0), node(1, 2, 0), node(2, 2, 0)];
    let workload = [share(500), share(500), whole(1)];
    let mut engine = Engine::new(&specs, &workload, Vec::new());
    let mut fleet = Fleet::new(specs.clone());
    fleet.place(0, share(500), place(2, 0)).unwrap();
    assert_eq!(engine.order(&fleet, &[share(500)])[0], 2);
    // No GPU of this node has room for 600.
    fleet.place(1, share(500), place(1, 0)).unwrap();
    fleet.place(2, share(500), place(1, 1)).unwrap();
    assert!(!engine.order(&fleet, &[share(600)]).contains(&1));
    // Preemptible shares: the node whose first GPU idles.
    let spread = Demand {
        class: Class::Preemptible,
        ..share(100)
    };
    assert_eq!(engine.order(&fleet, &[spread])[0], 0);
    // Another fleet after a node left: what was learned holds, and what was known of nodes does not.
    engine.forget_nodes();
    assert_eq!(
        engine.order(&Fleet::new(specs[..1].to_vec()), &[share(500)]),
        [0]
    );
}
