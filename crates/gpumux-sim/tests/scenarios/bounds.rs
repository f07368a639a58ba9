//! What the policies guarantee, within the bounds that reports name.

use super::*;

/// A scenario in mode `gpumux` for so many seconds, changed before.
fn managed(name: &str, seconds: f64, change: impl FnOnce(&mut Scenario)) -> ModeReport {
    let mut scenario = scenario(name);
    scenario.modes = vec![Mode::Gpumux];
    scenario.seconds = scenario.seconds.min(seconds);
    change(&mut scenario);
    run(&scenario).expect(name).modes.remove(0)
}

/// Sets a tenant's guarantee.
fn guarantee(scenario: &mut Scenario, name: &str, share: f64) {
    let mut tenants = scenario.tenants.iter_mut();
    let tenant = tenants.find(|tenant| tenant.name == name).expect(name);
    tenant.guaranteed = share;
}

/// Guarantees and floors hold within the bounds that the report names. While its memory is away a tenant is entitled to nothing, so that its
/// wait then has no bound here. Of several devices no bound is given.
#[test]
fn every_tenant_of_every_scenario_keeps_its_bounds() {
    let (mut checked, mut played) = (0, 0);
    for (name, _) in ALL {
        let known = scenario(name);
        if known.devices > 1 || !known.trace_names().is_empty() {
            continue;
        }
        played += 1;
        let report = managed(name, 20.0, |_| ());
        let used = used(&report);
        for tenant in &report.tenants {
            let bound = tenant.bound.expect("one device and a policy");
            assert!(
                bound.share >= tenant.guaranteed - 0.005,
                "{name}: {tenant:?}"
            );
            let lag = bound.worst_lag_ms.unwrap_or(0.0);
            assert!(lag <= bound.lag_ms, "{name}: {tenant:?}");
            checked += 1;
            let kind = known.tenants.iter();
            let mut kind = kind.filter(|it| tenant.name.starts_with(&it.name));
            if kind.any(|it| it.memory_gib > it.memory_guaranteed_gib) {
                continue;
            }
            // Its wait is in the time that the device works, observed every 5 ms.
            let wait = bound.wait_ms / used.max(0.05) + 10.0;
            assert!(tenant.longest_wait_ms <= wait, "{name}: {tenant:?}");
        }
    }
    println!("covered: bounds of {checked} tenants of {played} scenarios");
    assert!(
        checked >= 190 && played >= ALL.len() - 6,
        "{checked}, {played}"
    );
}

/// A guarantee is a share of the time that the device works for tenants. So admission keeps nothing for switches: what they take is taken
/// from all in proportion, and from no tenant's share.
#[test]
fn guarantees_of_the_whole_device_hold_whatever_switches_cost() {
    for name in ["saturating", "shares-70-30", "shares-50-25-25"] {
        let mut lost = Vec::new();
        for slower in [1, 8] {
            let report = managed(name, 20.0, |scenario| {
                scenario.hardware.switch_base *= slower;
            });
            let all = &report.tenants;
            let sum: f64 = all.iter().map(|it| it.guaranteed).sum();
            assert!((sum - 1.0).abs() < 1e-9, "{name}: {sum}");
            for tenant in all {
                let bound = tenant.bound.expect("one device and a policy");
                assert!(bound.worst_lag_ms <= Some(bound.lag_ms), "{tenant:?}");
                let received = tenant.received_of_used;
                assert!(received >= tenant.guaranteed - 0.005, "{tenant:?}");
            }
            lost.push(1.0 - used(&report));
        }
        assert!(lost[1] > 3.0 * lost[0], "{name}: switches cost {lost:?}");
    }
}

#[test]
fn guaranteed_memory_stays_beside_jobs_that_do_not_fit() {
    let serve = |name| {
        let report = managed(name, 61.0, |_| ());
        let serve = tenant(&report, "serve");
        (serve.moves.is_some(), serve.latency.expect("requests"))
    };
    let (moves, latency) = serve("memory-guaranteed");
    assert!(!moves && latency.p99_ms < 3.0, "{latency:?}");
    let (moves, lent) = serve("memory-without-guarantee");
    assert!(moves && lent.p99_ms > 1_000.0, "{lent:?}");
}

#[test]
fn hints_that_lie_cost_those_that_do_not_little() {
    let report = managed("hints-that-lie", 21.0, |_| ());
    let honest = tenant(&report, "honest").latency.expect("requests");
    assert!(honest.p50_ms < 0.7 && honest.p99_ms < 5.0, "{honest:?}");
    for train in ["train-1", "train-2"] {
        let train = tenant(&report, train);
        assert!(train.received_of_used >= 0.2, "{train:?}");
    }
}

#[test]
fn guarantee_never_lowers_its_owners_service() {
    let serve = |share| {
        let report = managed("everybody-latency", 31.0, |it| guarantee(it, "user", share));
        tenant(&report, "user").latency.expect("requests")
    };
    let (without, with) = (serve(0.0), serve(0.1));
    // A quantum would be 50 ms, a switch 0.19 ms.
    assert!(with.p50_ms <= without.p50_ms + 0.4, "{without:?} {with:?}");
    assert!(with.p99_ms <= without.p99_ms + 0.4, "{without:?} {with:?}");
    assert!(with.p99_ms < 5.0, "{with:?}");
    let burst = |share| {
        let report = managed("bursty", 31.0, |it| guarantee(it, "burst", share));
        tenant(&report, "burst").received_of_used
    };
    let shares = [0.0, 0.15, 0.3, 0.45].map(burst);
    let rises = |pair: &[f64]| pair[1] >= pair[0] - 0.01;
    assert!(shares.windows(2).all(rises), "{shares:?}");
}

#[test]
fn batch_keeps_its_floor_behind_several_latency_tenants() {
    let report = managed("everybody-latency", 31.0, |_| ());
    let batch = tenant(&report, "batch");
    assert!(batch.received_of_used >= 0.045, "{batch:?}");
    assert!(batch.longest_wait_ms < 1_000.0, "{batch:?}");
}

#[test]
fn guarantee_among_many_contenders_holds_in_every_second() {
    let report = managed("many-contenders", 31.0, |_| ());
    let guaranteed = tenant(&report, "stdg");
    assert!(guaranteed.received_of_used >= 0.2, "{guaranteed:?}");
    assert!(guaranteed.window_min >= 0.2, "{guaranteed:?}");
    assert!(guaranteed.longest_wait_ms < 1_000.0, "{guaranteed:?}");
}

#[test]
fn pauses_of_a_few_milliseconds_cost_no_guarantee() {
    let report = managed("pauses", 11.0, |_| ());
    let guaranteed = tenant(&report, "guaranteed80");
    assert!(guaranteed.received_of_used >= 0.8, "{guaranteed:?}");
}

#[test]
fn weights_hold_behind_a_latency_tenant_that_always_has_work() {
    let report = managed("weights-behind-eager", 31.0, |_| ());
    let rate = |name| tenant(&report, name).rate;
    assert!(rate("nine") > 6.0 * rate("one"), "{report:#?}");
    let floor = rate("nine") + rate("one");
    assert!(floor >= 0.04 * 200.0, "5 ms each: {floor}");
}

#[test]
fn batch_among_thirty_tenants_waits_for_seconds_at_most() {
    let report = managed("thirty", 31.0, |_| ());
    for batch in report
        .tenants
        .iter()
        .filter(|it| it.name.starts_with("batch"))
    {
        let bound = batch.bound.expect("one device and a policy");
        assert!(
            batch.longest_wait_ms < 8_000.0 && bound.wait_ms < 10_000.0,
            "{batch:?}"
        );
    }
}

#[test]
fn users_part_depends_neither_on_its_jobs_nor_on_their_class() {
    let alice = |count, class: gpumux_core::Class| {
        let report = managed("users", 31.0, |it| {
            (it.tenants[2].count, it.tenants[2].class) = (count, class);
        });
        let own = ["serve", "night"].map(|name| tenant(&report, name));
        let latency = own[0].latency.expect("requests");
        assert!(latency.p99_ms < 4.0, "{latency:?}");
        own.map(|it| it.received_of_used).iter().sum::<f64>()
    };
    for class in gpumux_core::Class::ALL {
        for count in [1, 3] {
            let part = alice(count, class);
            assert!((part - 0.5).abs() < 0.02, "{count} {class}: {part}");
        }
    }
}

/// Neither in its gaps nor in its pauses does a program that launches kernel by kernel keep the device from others. In the first version training had 0.003,
/// 0.07, 0.33 and 0.73 of what time slicing gives.
#[test]
fn launch_bound_program_that_pauses_leaves_others_the_device() {
    for (pause_us, least) in [(0.0, 0.6), (500.0, 0.6), (2_000.0, 0.7), (10_000.0, 0.85)] {
        let mut known = scenario("eager-pauses+train");
        known.seconds = 11.0;
        known.modes = vec![Mode::Alone, Mode::TimeSlicing, Mode::Gpumux];
        if let Arrival::Closed { think_us, .. } = &mut known.tenants[0].arrival {
            *think_us = pause_us;
        }
        let report = run(&known).expect("played");
        let train = |of| tenant(mode(&report, of), "train").received;
        let (part, sliced) = (train(Mode::Gpumux), train(Mode::TimeSlicing));
        assert!(part >= least * sliced, "{pause_us}: {part} of {sliced}");
        let eager = |of| p50_us(mode(&report, of), "eager");
        let (beside, alone) = (eager(Mode::Gpumux), eager(Mode::Alone));
        assert!(beside <= 1.1 * alone, "{pause_us}: {beside} of {alone} µs");
    }
}

/// Several latency tenants that always have work share by timeslices, unless someone was promised more than that keeps: a guarantee, a part of the
/// device for each user, a weight.
#[test]
fn promises_hold_beside_several_busy_latency_tenants() {
    for name in ["server-beside-anothers-latency", "server-beside-latency"] {
        let report = managed(name, 61.0, |_| ());
        let serve = tenant(&report, "serve");
        assert!(p50_us(&report, "serve") <= 5_000.0, "{name}: {serve:?}");
        assert!(serve.rate >= 99.0, "{name}: all are served: {serve:?}");
    }
    let report = managed("guarantees-beside-latency", 61.0, |_| ());
    for (name, weight) in [("latency-1", 1.0), ("latency-2", 0.03)] {
        let got = tenant(&report, name).received_of_used;
        assert!((got - 0.3 * weight / 1.03).abs() <= 0.01, "{name}: {got}");
    }
}

/// What a gang is owed on one device it does not take from the guarantees of another.
#[test]
fn guarantee_beside_gangs_lags_by_little() {
    let report = managed("guarantee-beside-gangs", 61.0, |_| ());
    let batch = tenant(&report, "batch-1");
    let lacks_s = 60.0 * (batch.guaranteed - batch.received_of_used);
    assert!(lacks_s <= 0.3, "{lacks_s} s: {batch:?}");
    let gang = tenant(&report, "gang-batch");
    assert!(gang.received_of_used >= 0.015, "its floor: {gang:?}");
}
