//! What the model of contention predicts, against pairs that were measured on an H100 (`bench/results`).
//!
//! Before the probe there was no measurement of its two numbers. Here they are what is known of the programs otherwise: a program
//! that only reads memory takes the bandwidth for as long as its bytes need, and the part of a training step that half of the SMs
//! do not slow down is taken to be memory's. Both are then demand and sensitivity alike.

#![allow(clippy::disallowed_methods)] // what was measured is in files

use std::{fs::File, path::Path};

use gpumux_core::{
    TenantSpec,
    space::{Bandwidth, Claimant, Curve, Member, Prediction, predict, rates},
};
use serde_json::Value;

fn measured(file: &str, case: &str, mode: &str, value: &str) -> f64 {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../bench/results");
    let file = File::open(folder.join(file)).expect("a result");
    let results: Value = serde_json::from_reader(file).expect("JSON");
    let mut rows = results["rows"].as_array().expect("rows").iter();
    let row = rows.find(|it| it["case"] == case && it["mode"] == mode);
    row.expect("its row")["values"][value]
        .as_f64()
        .expect(value)
}

fn even(part: f64) -> Bandwidth {
    Bandwidth {
        demand: part,
        sensitivity: part,
    }
}

/// Rates of programs at percentages of the SMs.
fn at(programs: &[(&Curve, Bandwidth, u32)]) -> Vec<f64> {
    let claims = programs.iter().map(|(curve, bandwidth, _)| Claimant {
        weight: 1.0,
        min: 0,
        max: 100,
        curve,
        bandwidth: *bandwidth,
    });
    let percents: Vec<u32> = programs.iter().map(|it| it.2).collect();
    rates(&claims.collect::<Vec<_>>(), &percents, 100)
}

/// ResNet-152 training: half of the SMs give 0.735 of the rate of all.
fn training() -> (Curve, Bandwidth) {
    let half = 0.735;
    // Of its time, what is computed takes twice as long there.
    let memory = 2.0 - 1.0 / half;
    let quarters = [(25, 4.0), (50, 2.0), (75, 4.0 / 3.0), (100, 1.0)];
    let rate = |longer: f64| 1.0 / ((1.0 - memory) * longer + memory);
    let points = quarters.map(|(percent, longer)| (percent, rate(longer)));
    (Curve::of_percents(points), even(memory))
}

#[test]
fn two_training_jobs_run_at_what_their_bandwidth_allows() {
    let file = "space-h100-80gb-hbm3-fa0cc0f-curves.json";
    let measured = measured(file, "train+train", "equal", "throughput_rel");
    let (curve, bandwidth) = training();
    let pair = |bandwidth| -> f64 { at(&[(&curve, bandwidth, 50); 2]).iter().sum() };
    let by_curves = pair(Bandwidth::default());
    assert!(by_curves - measured > 0.3, "{by_curves} for {measured}");
    let predicted = pair(bandwidth);
    assert!(
        (predicted - measured).abs() < 0.05,
        "{predicted} for {measured}"
    );
    let spec = TenantSpec::default();
    let member = Member {
        spec: &spec,
        curve: &curve,
        bandwidth,
        duty: 1.0,
    };
    let all = predict(&[member; 2]).expect("both are known");
    assert!((all.in_group - predicted).abs() < 0.01, "{all:?}");
    assert_eq!(all.in_time, 1.0);
}

#[test]
fn server_of_small_requests_leaves_training_the_bandwidth() {
    let file = "space-h100-80gb-hbm3-40877d3.json";
    let measured = |value| measured(file, "inference+train", "utility", value);
    // A quarter of the SMs gave it 0.86 of its rate. An image of ResNet-50 reads next to nothing.
    let server = Curve::of_percents([(25, 0.86), (50, 1.0), (100, 1.0)]);
    let (curve, bandwidth) = training();
    let rates = at(&[(&server, even(0.01), 25), (&curve, bandwidth, 75)]);
    let sum: f64 = rates.iter().sum();
    let total = measured("throughput_rel");
    assert!((sum - total).abs() < 0.05, "{rates:?} for {total}");
    let least = measured("least_rel");
    assert!((rates[0] - least).abs() < 0.05, "{rates:?} for {least}");
}

/// Tokens that read 1.5 GiB each, with pauses, beside a triad that has 15% and 30% of the SMs.
#[test]
fn decoding_beside_a_triad_waits_for_memory() {
    let file = "collectives-bandwidth-h100-80gb-hbm3-9be3e78.json";
    let of = |mode, value| measured(file, "decode+triad", mode, value);
    let knee = |sms: u32| {
        let file = "collectives-bandwidth-h100-80gb-hbm3-356cd30.json";
        measured(file, "knee", "alone", &format!("gbs_{sms}"))
    };
    let points = [8, 16, 24, 32, 132].map(|sms| (sms * 100 / 132, knee(sms)));
    let triad = Curve::of_percents(points);
    let decode = Curve::of_percents([(50, 1.0), (100, 1.0)]);
    let token_ms = of("alone", "latency_mean_ms");
    let gbs = 1.5 * f64::from(1 << 30) / 1e6 / token_ms;
    let reads = even(gbs / of("alone", "batch_gbs"));
    for (percent, mode) in [(15, "group-15"), (30, "group-30")] {
        let rates = at(&[
            (&decode, reads, 100 - percent),
            (&triad, even(1.0), percent),
        ]);
        let token = token_ms / of(mode, "latency_mean_ms");
        assert!(
            (rates[0] - token).abs() < 0.15,
            "{mode}: {rates:?}, {token}"
        );
        // In pauses the triad is alone.
        let decoding = of(mode, "tokens") * of(mode, "latency_mean_ms") / 2000.0;
        let alone = triad.utility(percent, 100);
        let predicted = alone * (1.0 - decoding) + rates[1] * decoding;
        let moved = of(mode, "batch_gbs") / of("alone", "batch_gbs");
        assert!(
            (predicted - moved).abs() < 0.15,
            "{mode}: {predicted}, {moved}"
        );
    }
}

#[test]
fn programs_that_want_all_of_the_bandwidth_share_time() {
    let (spec, curve) = (
        TenantSpec::default(),
        Curve::of_percents([(25, 1.0), (100, 1.0)]),
    );
    let hungry = Member {
        spec: &spec,
        curve: &curve,
        bandwidth: even(1.0),
        duty: 1.0,
    };
    let both = predict(&[hungry; 2]).expect("both are known");
    let Prediction { in_group, in_time } = both;
    assert!(in_group <= in_time + 1e-6, "{both:?}");
    let computes = Member {
        bandwidth: even(0.0),
        ..hungry
    };
    let other = predict(&[hungry, computes]).expect("both are known");
    assert!(other.in_group > 1.9, "{other:?}");
}
