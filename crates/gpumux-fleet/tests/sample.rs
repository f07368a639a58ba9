//! Lists of nodes and pods, and what the sample of a cluster's trace shows.

use gpumux_fleet::{
    engine::Moves,
    model::{Demand, NodeSpec},
    replay::{self, Policy},
    rules::Rule,
};

/// The sample in `scenarios/fleet`, five times as large.
fn sample() -> (Vec<NodeSpec>, Vec<Demand>) {
    let mut models = gpumux_fleet::model::Models::default();
    let nodes = gpumux_fleet::trace::nodes(
        include_str!("../../../scenarios/fleet/nodes.csv"),
        &mut models,
    )
    .unwrap();
    let pods = gpumux_fleet::trace::pods(
        include_str!("../../../scenarios/fleet/pods.csv"),
        &mut models,
    )
    .unwrap();
    (
        gpumux_fleet::model::scaled(&nodes, 880),
        pods.iter().map(|pod| pod.demand).collect(),
    )
}

#[test]
fn replay_of_the_sample_orders_the_policies() {
    let (specs, workload) = sample();
    let allocated = |policy| {
        let runs = (0..4).map(|seed| {
            replay::run(&specs, &workload, policy, seed)
                .at(130)
                .unwrap()
                .allocated
        });
        runs.sum::<f64>() / 4.0
    };
    let [random, fgd] = [Rule::Random, Rule::Fgd].map(|rule| allocated(Policy::Rule(rule)));
    let gpumux = allocated(Policy::Gpumux(Moves::default()));
    assert!(random < fgd, "random {random} FGD {fgd}");
    assert!(fgd < gpumux, "FGD {fgd} gpumux {gpumux}");
}

#[test]
fn wrong_list_names_line_column_and_value() {
    let mut models = gpumux_fleet::model::Models::default();
    let error = |text: &str, models: &mut _| {
        gpumux_fleet::trace::nodes(text, models)
            .unwrap_err()
            .to_string()
    };
    let head = "sn,cpu_milli,memory_mib,gpu,model\n";
    let many = error(&format!("{head}a,1,1,1,T4\nb,1,1,17,T4\n"), &mut models);
    assert_eq!(many, "line 3: gpu of b is 17, at most 16 is possible");
    let no_number = error(&format!("{head}a,x,1,1,T4\n"), &mut models);
    assert_eq!(
        no_number,
        "line 2: cpu_milli is `x`: invalid digit found in string"
    );
    let no_column = error("sn,cpu_milli,memory_mib\na,1,1\n", &mut models);
    assert_eq!(no_column, "line 2: missing field `gpu`");
    let short = error(&format!("{head}a,1\n"), &mut models);
    assert!(short.starts_with("line 2: "), "{short}");
}

#[test]
fn elastic_sharing_of_the_sample_needs_the_fewest_gpus() {
    use gpumux_fleet::{
        model::Models,
        sizing::{Need, Sharing, needed},
        trace,
    };
    let mut models = Models::default();
    let nodes = trace::nodes(
        include_str!("../../../scenarios/fleet/nodes.csv"),
        &mut models,
    )
    .unwrap();
    let pods = trace::pods(
        include_str!("../../../scenarios/fleet/pods.csv"),
        &mut models,
    )
    .unwrap();
    let of = |sharing| needed(&nodes, &pods, sharing, 1, 4, &[100.0, 0.0]).unwrap();
    let [exclusive, sliced, fgd, guaranteed, elastic]: [Need; 5] = [
        Sharing::Exclusive,
        Sharing::TimeSliced(4),
        Sharing::Fractions(Rule::Fgd),
        Sharing::Guaranteed,
        Sharing::Elastic,
    ]
    .map(of);
    assert!(
        elastic.gpus < guaranteed.gpus && fgd.gpus < exclusive.gpus,
        "{elastic:?} {guaranteed:?} {fgd:?} {exclusive:?}"
    );
    // Time slicing needs few GPUs and keeps no share.
    assert!(sliced.attained < Some(100.0));
    for keeps in [&exclusive, &fgd, &guaranteed, &elastic] {
        assert_eq!(keeps.attained, Some(100.0));
    }
    // Preemptible tenants have all they ask for when the others idle, and less when these are busy.
    let sensitive = pods.iter().filter(|pod| pod.latency_sensitive);
    let sensitive: Vec<_> = sensitive.cloned().collect();
    let alone = needed(&nodes, &sensitive, Sharing::Elastic, 1, 4, &[50.0]).unwrap();
    assert_eq!(
        (alone.attained, alone.best_effort),
        (Some(100.0), vec![(50.0, None)])
    );
    let rates: Vec<f64> = elastic.best_effort.iter().filter_map(|it| it.1).collect();
    assert!(rates[0] < rates[1] && rates[1] == 100.0, "{rates:?}");
}
