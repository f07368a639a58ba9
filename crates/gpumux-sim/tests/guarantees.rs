//! Guarantees of random mixes of tenants, kept on the hardware model with all delays and costs.

use gpumux_core::{
    Class,
    policy::{self, Tuning},
};
use gpumux_sim::{Arrival, Mode, Scenario, Work, run};
use proptest::prelude::*;

/// So many are measured.
const SECONDS: f64 = 10.0;

/// A device on which all tenants always have work.
fn saturated(tenants: &[(Class, f64)], policy: &str) -> Scenario {
    let seconds = SECONDS + 1.1;
    let mut text = format!("seconds = {seconds}\nmodes = [\"gpumux\"]\npolicy = \"{policy}\"\n");
    for (at, (class, guaranteed)) in tenants.iter().enumerate() {
        text += &format!(
            "[[tenant]]\nname = \"{at}\"\nclass = \"{class}\"\nguaranteed = {guaranteed}\n\
             arrival = {{ kind = \"closed\", depth = 3 }}\n\
             work = {{ kind = \"kernels\", kernel_us = 3000, cv = 0.5 }}\n"
        );
    }
    Scenario::from_toml(&text).expect("sound")
}

/// Two to four tenants that are guaranteed the whole device.
fn mixes() -> impl Strategy<Value = Vec<(Class, f64)>> {
    let class = prop::sample::select(Class::ALL.to_vec());
    prop::collection::vec((class, 0.1..1.0f64), 2..5).prop_map(|mut tenants| {
        let sum: f64 = tenants.iter().map(|(_, share)| share).sum();
        for (_, share) in &mut tenants {
            *share = (*share / sum * 1000.0).floor() / 1000.0;
        }
        tenants
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..Default::default() })]

    /// Over all, and in each second, it has what it was guaranteed but for the lag that its bound allows, and half a percent of the device.
    #[test]
    fn guarantees_are_kept_in_each_second(
        tenants in mixes(),
        policy in prop::sample::select(policy::NAMES.to_vec()),
    ) {
        let report = run(&saturated(&tenants, policy)).expect("sound");
        for tenant in &report.modes[0].tenants {
            let bound = tenant.bound.expect("one device and a policy");
            let all = tenant.received_of_used * SECONDS + bound.lag_ms / 1e3;
            prop_assert!(all >= (tenant.guaranteed - 0.005) * SECONDS, "{tenant:?}");
            let second = tenant.window_min + bound.lag_ms / 1e3;
            prop_assert!(second >= tenant.guaranteed - 0.005, "{tenant:?}");
        }
    }

    /// Beside a latency tenant whose requests come at random moments.
    #[test]
    fn no_tenant_waits_longer_than_its_bound(
        tenants in mixes(),
        policy in prop::sample::select(policy::NAMES.to_vec()),
    ) {
        let mut scenario = saturated(&tenants, policy);
        for tenant in &mut scenario.tenants {
            if tenant.class == Class::Latency {
                tenant.arrival = Arrival::Poisson { rate: 40.0 };
                tenant.work = Work::Kernels {
                    kernels: 1, kernel_us: 2000.0, sms: None, launch_us: 0.0, cv: 0.5, prepare_us: 0.0, hint_us: None,
                };
            }
        }
        let report = run(&scenario).expect("sound");
        let used = report.modes[0].devices[0].used.max(0.05);
        // What it was ahead when another's pause ends is paid back first.
        let period = Tuning::default().period.0 as f64 / 1e3;
        for tenant in &report.modes[0].tenants {
            let bound = tenant.bound.expect("one device and a policy");
            let most = (bound.wait_ms + period / bound.share) / used + 10.0;
            prop_assert!(tenant.longest_wait_ms <= most, "{tenant:?}, at most {most}");
        }
    }
}

/// Members of one group that always have work, each with the SMs that its kernels can use and their length in µs.
fn group(members: &[(u32, u32)]) -> Scenario {
    let mut text =
        String::from("seconds = 14\nwarmup_s = 6\nmodes = [\"alone\", \"equal\", \"utility\"]\n");
    for (at, (sms, kernel_us)) in members.iter().enumerate() {
        text += &format!(
            "[[tenant]]\nname = \"{at}\"\nclass = \"batch\"\ntrust = \"team\"\n\
             arrival = {{ kind = \"closed\", depth = 2 }}\n\
             work = {{ kind = \"kernels\", kernel_us = {kernel_us}, sms = {sms} }}\n"
        );
    }
    Scenario::from_toml(&text).expect("sound")
}

/// The sum of each one's rate over its rate alone, by equal parts of the SMs and by utility.
fn utilities(members: &[(u32, u32)]) -> (f64, f64) {
    let report = run(&group(members)).expect("sound");
    let mode = |wanted| {
        report
            .modes
            .iter()
            .find(|it| it.mode == wanted)
            .expect("ran")
    };
    let total = |wanted| -> f64 {
        let alone = mode(Mode::Alone).tenants.iter();
        let rates = mode(wanted).tenants.iter().zip(alone);
        rates.map(|(it, alone)| it.rate / alone.rate).sum()
    };
    (total(Mode::Equal), total(Mode::Utility))
}

#[test]
fn saturated_and_scaling_program_gain_a_tenth_by_utility() {
    for members in [[(24, 1000), (132, 4000)], [(16, 500), (132, 2000)]] {
        let (equal, utility) = utilities(&members);
        assert!(
            utility >= 1.1 * equal,
            "{members:?}: {utility} against {equal}"
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, failure_persistence: None, ..Default::default() })]

    /// Steps are eight SMs, and kernels are not always side by side.
    #[test]
    fn utility_loses_at_most_two_percent_against_equal_parts(
        members in prop::collection::vec((8..=132_u32, 300..6000_u32), 2..4),
    ) {
        let (equal, utility) = utilities(&members);
        prop_assert!(utility >= 0.98 * equal, "{members:?}: {utility} against {equal}");
    }
}
