//! What the floor of batch tenants costs a latency tenant that always has work: no long freeze, and little more time than the floor.

use gpumux_core::{Costs, Micros};
use gpumux_sim::{ModeReport, Scenario, run};
use proptest::prelude::*;

/// The part of the device that belongs to the batch tenants.
const FLOOR: f64 = 0.05;

/// A latency tenant with two steps in flight, so that it always has work, and what runs beside it.
#[derive(Clone, Debug)]
struct Mix {
    /// How long a step takes, in so many kernels.
    step_us: f64,
    kernels: u32,
    batch: usize,
    batch_kernel_us: f64,
    costs: Costs,
}

fn mixes() -> impl Strategy<Value = Mix> {
    // From an idle H100 to a virtual machine with a noisy host.
    let costs = (1.0..12.0f64).prop_map(|times| Costs {
        freeze: Micros((600.0 * times) as u64),
        thaw: Micros((220.0 * times) as u64),
        ..Costs::default()
    });
    let kernels = (500.0..20_000.0f64, 10.0..5_000.0f64);
    (kernels, 1..=3usize, 10.0..5_000.0f64, costs).prop_map(
        |((step_us, kernel_us), batch, batch_kernel_us, costs)| Mix {
            step_us,
            kernels: ((step_us / kernel_us) as u32).max(1),
            batch,
            batch_kernel_us,
            costs,
        },
    )
}

fn play(mix: &Mix) -> ModeReport {
    let Mix { costs, kernels, .. } = mix;
    let kernel_us = mix.step_us / f64::from(*kernels);
    let text = format!(
        "seconds = 12\nwarmup_s = 2\nwindow_s = 2\n\
         [costs]\nfreeze = {}\nthaw = {}\n\
         [[tenant]]\nname = \"decode\"\nclass = \"latency\"\narrival = {{ kind = \"closed\", depth = 2 }}\n\
         work = {{ kind = \"kernels\", kernels = {kernels}, kernel_us = {kernel_us} }}\n\
         [[tenant]]\nname = \"train\"\ncount = {}\nclass = \"batch\"\narrival = {{ kind = \"closed\", depth = 2 }}\n\
         work = {{ kind = \"kernels\", kernels = 20, kernel_us = {} }}\n",
        costs.freeze.0, costs.thaw.0, mix.batch, mix.batch_kernel_us
    );
    let scenario = Scenario::from_toml(&text).expect("sound");
    run(&scenario).expect("played").modes.remove(0)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, failure_persistence: None, ..Default::default() })]

    /// A freeze lasts for a twentieth of 100 ms, or for what the controls take. The hardware switches twice for it, and up to four
    /// times more when another tenant's quantum begins after it. The daemon may wake up to 2 ms late.
    #[test]
    fn busy_latency_tenant_is_frozen_for_short_times_only(mix in mixes()) {
        let report = play(&mix);
        let (decode, train) = report.tenants.split_first().expect("the latency tenant");
        let latency = decode.latency.expect("steps");
        // Two are in flight; each kernel has an overhead.
        let alone_ms = 2.0 * (mix.step_us + 3.1 * f64::from(mix.kernels)) / 1e3;
        let ms = |us: Micros| us.0 as f64 / 1e3;
        let Costs { switch, freeze, thaw, .. } = mix.costs;
        let handover = ms(freeze + thaw + switch);
        let bound = f64::max(5.0, handover) + 6.0 * ms(switch) + 2.0;
        let late = latency.max_ms - alone_ms;
        prop_assert!(late <= bound, "{late} ms late, more than {bound}: {mix:?}");
        let slower = latency.mean_ms / alone_ms * (1.0 - FLOOR);
        prop_assert!(slower <= 1.015, "{slower} times as slow as the floor explains: {mix:?}");
        let received: f64 = train.iter().map(|it| it.received_of_used).sum();
        prop_assert!(received >= 0.98 * FLOOR, "{received}: {mix:?}");
        for tenant in train {
            let least = FLOOR / train.len() as f64;
            let bound = tenant.bound.expect("one device and a policy");
            prop_assert!(bound.share >= least - 1e-9, "{tenant:?}");
            prop_assert!(bound.worst_lag_ms.expect("no eager program") <= bound.lag_ms, "{tenant:?}");
        }
    }
}
