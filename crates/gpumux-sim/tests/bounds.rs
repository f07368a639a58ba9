//! Random mixes of 1 to 40 tenants of several users: all classes, guarantees, limits, weights and pauses. Each keeps its bounds on the hardware model
//! with all delays and costs.

use std::{
    fmt::Write as _,
    sync::atomic::{AtomicUsize, Ordering},
};

use gpumux_core::{Class, Costs, policy::Tuning};
use gpumux_sim::{ModeReport, Scenario, run};
use proptest::prelude::*;

/// One tenant.
#[derive(Clone, Debug)]
struct Mixed {
    class: Class,
    user: u8,
    /// A part of what can be guaranteed, or nothing.
    guaranteed: f64,
    /// Above its guarantee; 1: none.
    limit: f64,
    weight: f64,
    kernel_us: f64,
    /// How long it pauses after each of its requests, in µs.
    pause_us: f64,
    /// Requests that it has outstanding at once: with one, it leaves the rest of its timeslice at the end of each.
    depth: u32,
    /// Instead of all that, of latency tenants: requests of 1 ms and longer come at random, and need so much of the device. It switches twice for each.
    load: Option<f64>,
}

fn mixed() -> impl Strategy<Value = Mixed> {
    let class = prop::sample::select(Class::ALL.to_vec());
    let guaranteed = prop_oneof![1 => Just(0.0), 1 => 0.05..1.0f64];
    let limit = prop_oneof![2 => Just(1.0), 1 => 0.05..1.0f64];
    // None; some that forfeit nothing; and longer ones.
    let pause = prop_oneof![2 => Just(0.0), 2 => 100.0..4_900.0f64, 1 => 5_000.0..50_000.0f64];
    let kernel = prop_oneof![50.0..1_000.0f64, 1_000.0..20_000.0f64];
    (
        (class, 0..3u8, guaranteed, limit),
        (0.25..4.0f64, kernel, pause, 2..=4u32),
        prop_oneof![4 => Just(None), 1 => (0.02..0.6f64).prop_map(Some)],
    )
        .prop_map(
            |((class, user, guaranteed, limit), (weight, kernel_us, pause_us, depth), load)| {
                let load = load.filter(|_| class == Class::Latency);
                Mixed {
                    class,
                    user,
                    guaranteed,
                    limit,
                    weight,
                    kernel_us: load.map_or(kernel_us, |_| f64::max(kernel_us, 1_000.0)),
                    pause_us,
                    depth,
                    load,
                }
            },
        )
}

fn scenario(tenants: &[Mixed]) -> Scenario {
    let sum: f64 = tenants.iter().map(|it| it.guaranteed).sum();
    let mut text = String::from("seconds = 5\n");
    for (at, it) in tenants.iter().enumerate() {
        let guaranteed = (0.7 * it.guaranteed / sum.max(1.0) * 1e3).floor() / 1e3;
        let limit = it.limit.max(guaranteed);
        let arrival = match it.load {
            Some(load) => format!("kind = \"poisson\", rate = {}", 1e6 * load / it.kernel_us),
            None => format!(
                "kind = \"closed\", depth = {}, think_us = {}, think_cv = 0.2",
                it.depth, it.pause_us
            ),
        };
        let _ = writeln!(
            text,
            "[[tenant]]\nname = \"{at}\"\nclass = \"{}\"\nuser = \"{}\"\nguaranteed = {guaranteed}\nlimit = {limit}\nweight = {}\n\
             arrival = {{ {arrival} }}\n\
             work = {{ kind = \"kernels\", kernel_us = {}, cv = 0.2 }}",
            it.class, it.user, it.weight, it.kernel_us
        );
    }
    Scenario::from_toml(&text).expect("sound")
}

/// What was played so far, for people.
static PLAYED: [AtomicUsize; 5] = [const { AtomicUsize::new(0) }; 5];

fn count(tenants: &[Mixed]) {
    let of = |is: &dyn Fn(&&Mixed) -> bool| tenants.iter().filter(is).count();
    let more = [
        1,
        tenants.len(),
        of(&|it| it.guaranteed > 0.0),
        of(&|it| it.limit < 1.0),
        of(&|it| it.pause_us > 0.0 || it.load.is_some()),
    ];
    for (all, more) in PLAYED.iter().zip(more) {
        all.fetch_add(more, Ordering::Relaxed);
    }
}

fn play(tenants: &[Mixed]) -> ModeReport {
    count(tenants);
    run(&scenario(tenants)).expect("played").modes.remove(0)
}

fn cases() -> u32 {
    ProptestConfig::default().cases / 8
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), max_shrink_iters: 60, failure_persistence: None, ..Default::default() })]

    #[test]
    fn every_tenant_of_random_mixes_keeps_its_bounds(tenants in prop::collection::vec(mixed(), 1..=40)) {
        let report = play(&tenants);
        let used = report.devices[0].used.max(0.05);
        // Shares shrink when another's pause ends. Then a tenant pays back what it was ahead: a quantum, or a burst.
        let pauses = tenants.iter().any(|it| it.pause_us > 0.0 || it.load.is_some());
        let latency = tenants.iter().filter(|it| it.class == Class::Latency);
        let debt = match (pauses, latency.count()) {
            (false, _) => 0.0,
            (true, 0 | 1) => {
                let kinds = tenants.iter().map(|it| (it.user, it.class));
                Tuning::default().quantum(&Costs::default(), kinds) / 1e3
            }
            (true, _) => Tuning::default().period.0 as f64 / 1e3,
        };
        for (tenant, mixed) in report.tenants.iter().zip(&tenants) {
            let bound = tenant.bound.expect("one device and a policy");
            prop_assert!(bound.share >= tenant.guaranteed - 0.005, "{tenant:?}");
            let lag = bound.worst_lag_ms.unwrap_or(0.0);
            // One that pauses leaves the rest of its timeslice or quantum each time.
            let leaves = mixed.pause_us > 0.0 || mixed.load.is_some();
            prop_assert!(leaves || lag <= bound.lag_ms + debt, "{mixed:?} {tenant:?}");
            // A server that needs clearly less than its share has no backlog.
            let switches = 2.0 * Costs::default().switch.0 as f64 / mixed.kernel_us;
            let needs = mixed.load.map(|load| load * (1.0 + switches));
            if let (Some(latency), true) = (tenant.latency, needs < Some(0.6 * bound.share)) {
                prop_assert!(mixed.load.is_none() || latency.p50_ms <= bound.wait_ms, "{mixed:?} {tenant:?}");
            }
            // In the time that the device works, observed every 5 ms.
            let wait = (bound.wait_ms + debt / bound.share) / used + 10.0;
            prop_assert!(tenant.longest_wait_ms <= wait, "at most {wait}: {tenant:?}");
        }
        let [mixes, all, guaranteed, limited, pausing] = PLAYED.each_ref().map(|it| it.load(Ordering::Relaxed));
        if mixes == cases() as usize {
            println!("covered: {mixes} mixes, {all} tenants: {guaranteed} guaranteed, {limited} limited, {pausing} that pause");
        }
    }
}
