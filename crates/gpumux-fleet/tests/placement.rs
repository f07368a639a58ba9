//! What placements must never do, and what they must always do.

use gpumux_core::space::Curve;
use gpumux_fleet::{
    engine::{Engine, Moves, share_for},
    fleet::{Fleet, Free, Gpus, Move, Place, Refused},
    index::Index,
    model::{Class, Demand, NodeSpec, WHOLE},
    rules::Rule,
    typical::Typical,
};
use proptest::prelude::*;

mod common;

use common::{demands, node, nodes, place, share, whole};

/// Adds up what the tenants hold, independently of what the fleet keeps.
fn assert_not_overcommitted(fleet: &Fleet) {
    for (number, spec) in (0u32..).zip(fleet.specs()) {
        let here = || {
            fleet
                .tenants()
                .values()
                .filter(move |tenant| tenant.place.node == number)
        };
        assert!(here().map(|tenant| tenant.demand.cpu_milli).sum::<u32>() <= spec.cpu_milli);
        assert!(here().map(|tenant| tenant.demand.memory_mib).sum::<u32>() <= spec.memory_mib);
        for gpu in 0..16 {
            let on = |class| {
                here().filter(move |t| {
                    t.place.gpus.iter().any(|on| on == gpu) && t.demand.class == class
                })
            };
            let most = if gpu < usize::from(spec.gpus) {
                WHOLE
            } else {
                0
            };
            for class in [Class::Guaranteed, Class::Preemptible] {
                assert!(on(class).map(|tenant| tenant.demand.milli).sum::<u32>() <= most);
            }
            let memory: u32 = on(Class::Guaranteed)
                .map(|tenant| tenant.demand.gpu_memory_mib)
                .sum();
            assert!(memory <= spec.gpu_memory_mib);
        }
    }
}

/// Applies random arrivals and departures; the places that were chosen.
fn play(
    specs: &[NodeSpec],
    events: &[(Demand, bool)],
    moves: Moves,
) -> (Fleet, Vec<Option<Place>>) {
    let workload: Vec<Demand> = events.iter().map(|(demand, _)| *demand).collect();
    let mut engine = Engine::new(specs, &workload, Vec::new());
    let mut fleet = Fleet::new(specs.to_vec());
    let mut places = Vec::new();
    for (id, (demand, leaves)) in (0..).zip(events) {
        let admitted = engine.admit(&mut fleet, id, demand, moves).unwrap();
        places.push(admitted.map(|admitted| admitted.place));
        if *leaves && id > 0 {
            fleet.release(id / 2);
        }
        assert_not_overcommitted(&fleet);
    }
    (fleet, places)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn guarantees_random_tenants_never_exceed_the_nodes(
        specs in nodes(),
        events in prop::collection::vec((demands(), any::<bool>()), 1..60),
        most_mib in prop_oneof![Just(0), Just(20_000)],
    ) {
        let moves = Moves { most_mib, card_mib: 16_384 };
        let (_, first) = play(&specs, &events, moves);
        let (_, again) = play(&specs, &events, moves);
        prop_assert_eq!(first, again);
    }

    #[test]
    fn index_after_changes_equals_a_full_scan(
        specs in nodes(),
        events in prop::collection::vec((demands(), any::<bool>()), 1..60),
    ) {
        let workload: Vec<Demand> = events.iter().map(|(demand, _)| *demand).collect();
        let typical = Typical::of(&workload);
        let mut fleet = Fleet::new(specs);
        let mut index = Index::default();
        for (id, (demand, leaves)) in (0..).zip(&events) {
            let score = |free: &Free| Rule::Fgd.score(free, demand, &typical).map(|(score, _)| score);
            let found: Vec<u32> = index.order(&fleet, demand, |_, free| score(free)).collect();
            let mut scan: Vec<(i64, u32)> = (0..).zip(fleet.free()).filter_map(|(node, free)| Some((-score(free)?, node))).collect();
            scan.sort_unstable();
            prop_assert_eq!(&found, &scan.iter().map(|(_, node)| *node).collect::<Vec<_>>());
            if let Some(node) = found.first() {
                let gpus = Rule::Fgd.score(&fleet.free()[*node as usize], demand, &typical).unwrap().1;
                fleet.place(id, *demand, Place { node: *node, gpus }).unwrap();
            }
            if *leaves {
                fleet.release(id / 2);
            }
        }
    }

    #[test]
    fn tenant_that_asks_for_less_fits_where_more_fits(
        specs in nodes(),
        events in prop::collection::vec((demands(), any::<bool>()), 1..30),
        asked in demands(),
    ) {
        let (fleet, _) = play(&specs, &events, Moves::default());
        let less = Demand { cpu_milli: asked.cpu_milli / 2, milli: asked.milli / 2, gpu_memory_mib: asked.gpu_memory_mib / 2, ..asked };
        for free in fleet.free() {
            prop_assert!(!free.fits(&asked) || free.fits(&less));
        }
    }

    #[test]
    fn fleet_after_all_left_is_as_new(
        specs in nodes(),
        events in prop::collection::vec((demands(), any::<bool>()), 1..40),
    ) {
        let (mut fleet, _) = play(&specs, &events, Moves { most_mib: 20_000, card_mib: 16_384 });
        let tenants: Vec<u64> = fleet.tenants().keys().copied().collect();
        for id in tenants {
            fleet.release(id);
        }
        let new = Fleet::new(specs);
        prop_assert_eq!(fleet.free(), new.free());
    }

    #[test]
    fn gang_choice_leaves_the_fleet_unchanged(
        specs in nodes(),
        events in prop::collection::vec((demands(), any::<bool>()), 1..20),
        demand in demands(),
        parts in 1..6u32,
    ) {
        let (mut fleet, _) = play(&specs, &events, Moves::default());
        let before = (fleet.free().to_vec(), fleet.tenants().clone());
        let mut engine = Engine::new(&specs, &[demand], Vec::new());
        if let Some(places) = engine.choose_gang(&mut fleet, &demand, parts) {
            prop_assert_eq!(places.len(), parts as usize);
            let mut trial = fleet.clone();
            for (id, place) in (1 << 40..).zip(places) {
                trial.place(id, demand, place).unwrap();
            }
        }
        prop_assert_eq!((fleet.free().to_vec(), fleet.tenants().clone()), before);
    }
}

#[test]
fn guaranteed_tenants_are_packed_and_preemptible_ones_spread() {
    let specs: Vec<NodeSpec> = (0..4).map(|number| node(number, 2, 0)).collect();
    let guaranteed = share(500);
    let preemptible = Demand {
        class: Class::Preemptible,
        ..guaranteed
    };
    let used = |demand: Demand| {
        let mut engine = Engine::new(&specs, &[demand; 8], Vec::new());
        let mut fleet = Fleet::new(specs.clone());
        for id in 0..4 {
            engine
                .admit(&mut fleet, id, &demand, Moves::default())
                .unwrap()
                .unwrap();
        }
        let gpus = fleet
            .free()
            .iter()
            .flat_map(|free| (0..2).map(|gpu| free.used_milli(gpu)))
            .filter(|used| *used > 0);
        gpus.count()
    };
    assert_eq!(used(guaranteed), 2);
    assert_eq!(used(preemptible), 4);
}

#[test]
fn preemptible_tenant_prefers_the_gpu_that_idles_most() {
    let specs = vec![node(0, 2, 0)];
    let mut fleet = Fleet::new(specs.clone());
    fleet.place(0, share(800), place(0, 0)).unwrap();
    let demand = Demand {
        class: Class::Preemptible,
        ..share(600)
    };
    let mut engine = Engine::new(&specs, &[demand], Vec::new());
    assert_eq!(engine.choose(&fleet, &demand), Some(place(0, 1)));
}

#[test]
fn neighbours_that_want_the_same_bandwidth_are_parted() {
    let specs = vec![node(0, 2, 0)];
    let hungry = Demand {
        bandwidth_milli: 700,
        ..share(300)
    };
    let mut fleet = Fleet::new(specs.clone());
    fleet.place(0, hungry, place(0, 0)).unwrap();
    let mut engine = Engine::new(&specs, &[hungry], Vec::new());
    assert_eq!(engine.choose(&fleet, &hungry), Some(place(0, 1)));
    // One that uses little is packed.
    let modest = Demand {
        bandwidth_milli: 100,
        ..share(300)
    };
    assert_eq!(engine.choose(&fleet, &modest), Some(place(0, 0)));
}

#[test]
fn guaranteed_memory_that_is_not_there_is_refused() {
    let specs = vec![node(0, 1, 0)];
    let large = Demand {
        gpu_memory_mib: 10_000,
        ..share(300)
    };
    let mut fleet = Fleet::new(specs);
    fleet.place(0, large, place(0, 0)).unwrap();
    assert_eq!(fleet.place(1, large, place(0, 0)), Err(Refused::Full(0)));
    // A preemptible tenant's memory is moved away when it is needed.
    let preemptible = Demand {
        class: Class::Preemptible,
        ..large
    };
    assert_eq!(fleet.place(1, preemptible, place(0, 0)), Ok(()));
}

#[test]
fn gang_is_placed_in_one_network_domain() {
    // Two nodes to a domain; the first has a GPU taken.
    let specs: Vec<NodeSpec> = (0..6).map(|number| node(number, 2, 0)).collect();
    let mut fleet = Fleet::new(specs.clone());
    fleet.place(0, whole(1), place(0, 0)).unwrap();
    let part = whole(2);
    let mut engine = Engine::new(&specs, &[part, whole(1)], Vec::new());
    let places = engine.choose_gang(&mut fleet, &part, 2).unwrap();
    let domains: Vec<u32> = places
        .iter()
        .map(|place| specs[place.node as usize].domain)
        .collect();
    assert_eq!(domains[0], domains[1]);
    assert_eq!(engine.choose_gang(&mut fleet, &part, 6), None);
}

#[test]
fn tenant_that_fits_nowhere_is_placed_after_a_move() {
    let specs = vec![node(0, 2, 0)];
    let mut fleet = Fleet::new(specs.clone());
    fleet.place(0, share(500), place(0, 0)).unwrap();
    fleet.place(1, share(400), place(0, 1)).unwrap();
    let mut engine = Engine::new(&specs, &[whole(1)], Vec::new());
    let cost = 16_384 * 4 / 10;
    let mut admit = |most_mib| {
        engine
            .admit(
                &mut fleet,
                2,
                &whole(1),
                Moves {
                    most_mib,
                    card_mib: 16_384,
                },
            )
            .unwrap()
    };
    assert_eq!(admit(cost - 1), None);
    // The smaller one goes.
    let admitted = admit(cost).unwrap();
    assert_eq!(
        admitted.moves,
        [Move {
            tenant: 1,
            to: place(0, 0)
        }]
    );
    assert_eq!(admitted.place, place(0, 1));
}

#[test]
fn share_for_an_objective_follows_the_scaling_profile() {
    let saturates = Curve::of_percents([(25, 80.0), (50, 95.0), (100, 100.0)]);
    assert_eq!(share_for(&saturates, 0.8), 250);
    assert_eq!(share_for(&saturates, 0.95), 500);
    assert_eq!(share_for(&Curve::default(), 0.8), 800);
    assert_eq!(share_for(&saturates, 1.5), WHOLE);
}

#[test]
fn typical_tenants_measure_what_they_cannot_use() {
    // Half of all tenants want 600, half a whole GPU.
    let typical = Typical::of(&[share(600), whole(1)]);
    let mut fleet = Fleet::new(vec![node(0, 2, 0)]);
    assert_eq!(typical.fragments(&fleet.free()[0]), 0);
    fleet.place(0, share(300), place(0, 0)).unwrap();
    // The whole one cannot use the 700 that are left; the other one can.
    assert_eq!(typical.fragments(&fleet.free()[0]), 700);
    fleet.place(1, share(300), place(0, 0)).unwrap();
    // Now neither can use the 400.
    assert_eq!(typical.fragments(&fleet.free()[0]), 800);
}

#[test]
fn rules_choose_as_they_are_described() {
    let specs = vec![node(0, 4, 0), node(1, 4, 0), node(2, 4, 0)];
    let mut fleet = Fleet::new(specs);
    fleet
        .place(
            0,
            whole(2),
            Place {
                node: 1,
                gpus: Gpus(0b11),
            },
        )
        .unwrap();
    fleet.place(1, share(300), place(2, 0)).unwrap();
    let typical = Typical::of(&[share(300), whole(2), whole(4)]);
    let best = |rule: Rule, demand: Demand| {
        let score = |free| rule.score(free, &demand, &typical).map(|(score, _)| score);
        let nodes =
            (0..3).filter_map(|node| Some((score(&fleet.free()[node])?, std::cmp::Reverse(node))));
        nodes.max().map(|(_, node)| node.0)
    };
    assert_eq!(best(Rule::BestFit, share(300)), Some(1));
    assert_eq!(best(Rule::DotProduct, share(300)), Some(1));
    assert_eq!(best(Rule::GpuPacking, share(300)), Some(2));
    assert_eq!(best(Rule::GpuPacking, whole(2)), Some(1));
    assert_eq!(best(Rule::GpuClustering, share(300)), Some(2));
    assert_eq!(best(Rule::GpuClustering, whole(2)), Some(1));
    assert_eq!(best(Rule::Fgd, share(300)), Some(2));
    assert_eq!(best(Rule::Fgd, whole(2)), Some(1));
    assert_eq!(best(Rule::Fgd, whole(4)), Some(0));
}

#[test]
fn memory_of_a_gpu_is_kept_for_tenants_that_need_it() {
    let node = |nth| NodeSpec {
        name: format!("node-{nth}"),
        cpu_milli: 0,
        memory_mib: 0,
        gpus: 1,
        model: 0,
        gpu_memory_mib: 80_000,
        domain: 0,
    };
    let demand = |gpu_memory_mib| Demand {
        gpus: 1,
        milli: 100,
        gpu_memory_mib,
        ..Demand::default()
    };
    let specs = [node(0), node(1)];
    let (small, large) = (demand(25_000), demand(75_000));
    let mut fleet = Fleet::new(specs.to_vec());
    let alone = |node| Place {
        node,
        gpus: Gpus::default().with(0),
    };
    fleet.place(0, demand(1_000), alone(0)).unwrap();
    fleet.place(1, demand(50_000), alone(1)).unwrap();
    let mut engine = Engine::new(&specs, &[small, large], Vec::new());
    // As much of both is free, but only the first has memory for a large tenant.
    assert_eq!(engine.choose(&fleet, &small), Some(alone(1)));
}
