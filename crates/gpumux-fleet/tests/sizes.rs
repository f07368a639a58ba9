//! How many GPUs a workload needs, with gpumux and by simple rules.

use gpumux_fleet::{
    lifetimes,
    model::{Models, NodeSpec, Pod},
    rules::Rule,
    sizing::{Sharing, needed},
    trace,
};
use rand::{Rng, SeedableRng, rngs::StdRng};

/// The nodes of the sample, and its tenants.
fn sample() -> (Vec<NodeSpec>, Vec<Pod>) {
    let mut models = Models::default();
    let nodes = include_str!("../../../scenarios/fleet/nodes.csv");
    let pods = include_str!("../../../scenarios/fleet/pods.csv");
    let nodes = trace::nodes(nodes, &mut models).unwrap();
    (nodes, trace::pods(pods, &mut models).unwrap())
}

/// 60 random tenants of the list, and so many that take all GPUs of a node.
fn drawn(pods: &[Pod], whole_nodes: usize, rng: &mut StdRng) -> Vec<Pod> {
    let whole = |pod: &&Pod| pod.demand.gpus == 8;
    let (whole, others): (Vec<&Pod>, Vec<&Pod>) = pods.iter().partition(whole);
    let few = (0..60).map(|_| others[rng.random_range(0..others.len())]);
    let drawn = few.chain(whole.into_iter().cycle().take(whole_nodes));
    drawn.cloned().collect()
}

/// GPUs of the smallest fleet, summed over orders of nodes and tenants: with gpumux, and with the best of the rules.
fn sums(need: impl Fn(Sharing, u64) -> usize) -> (usize, usize) {
    let sum = |sharing| (42..46).map(|seed| need(sharing, seed)).sum::<usize>();
    let rules = [Rule::BestFit, Rule::GpuPacking, Rule::Fgd];
    let best = rules.map(|rule| sum(Sharing::Fractions(rule)));
    (sum(Sharing::Guaranteed), best.into_iter().min().unwrap())
}

#[test]
fn random_tenants_need_hardly_more_gpus_than_by_the_best_rule() {
    let mut rng = StdRng::seed_from_u64(1);
    let (specs, pods) = sample();
    let (mut all, mut all_best) = (0, 0);
    for whole_nodes in 0..4 {
        let pods = drawn(&pods, whole_nodes, &mut rng);
        let need = |sharing, seed| needed(&specs, &pods, sharing, seed, 8, &[]).unwrap().gpus;
        let (found, best) = sums(need);
        assert!(
            found * 10 <= best * 11,
            "{whole_nodes} whole nodes: {found}, by the best rule {best}"
        );
        (all, all_best) = (all + found, all_best + best);
    }
    assert!(
        all * 100 <= all_best * 103,
        "{all}, by the best rules {all_best}"
    );
}

#[test]
fn whole_nodes_of_the_sample_find_room_as_by_the_best_rule() {
    let (specs, pods) = sample();
    let at_once = |sharing, seed| needed(&specs, &pods, sharing, seed, 8, &[]).unwrap().gpus;
    let over_time = |sharing, seed| {
        let lived = lifetimes::needed(&specs, &pods, sharing, seed, 8, &[]);
        lived.unwrap().gpus
    };
    for (found, best) in [sums(at_once), sums(over_time)] {
        assert!(
            found * 100 <= best * 103,
            "{found}, by the best rule {best}"
        );
    }
}

/// Best-effort tenants that take only idle shares leave as much room for the others, so the fleet is no larger.
#[test]
fn preemptible_tenants_of_the_sample_enlarge_no_fleet() {
    let (specs, pods) = sample();
    let gpus = |sharing| {
        let need = |seed| needed(&specs, &pods, sharing, seed, 8, &[]).unwrap().gpus;
        (42..46).map(need).sum::<usize>()
    };
    let (elastic, guaranteed) = (gpus(Sharing::Elastic), gpus(Sharing::Guaranteed));
    assert!(
        elastic <= guaranteed,
        "{elastic}, all guaranteed {guaranteed}"
    );
}
