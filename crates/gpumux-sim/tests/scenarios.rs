//! The scenarios that come with gpumux: all can be played, those that were measured on an H100 come out
//! as measured, and what the policies guarantee is kept.

use gpumux_sim::{Mode, ModeReport, Report, Scenario, TenantReport, Work, run};

macro_rules! scenarios {
    ($($name:literal),* $(,)?) => {
        &[$(($name, include_str!(concat!("../../../scenarios/", $name, ".toml")))),*]
    };
}

const ALL: &[(&str, &str)] = scenarios![
    "2graph+train",
    "batch-requests",
    "borrow",
    "bursty",
    "decode+train",
    "eager+train",
    "eager+train-8ms",
    "everybody-latency",
    "everybody-latency-20",
    "gang",
    "graph+2train",
    "graph+2train-group",
    "graph+train",
    "hog",
    "hour",
    "latency+4batch",
    "livelock",
    "llm-trace",
    "many-contenders",
    "oversubscribe-2x60",
    "pauses",
    "pipeline+train",
    "preempt",
    "preempt-hint",
    "regular",
    "regular-short",
    "rotation-2",
    "rotation-2-10ms",
    "rotation-3",
    "rotation-4",
    "saturating",
    "serve+4train",
    "shares-50-25-25",
    "shares-70-30",
    "slices-1-3",
    "slices-100000",
    "slices-200",
    "slices-2048",
    "slices-500",
    "thirty",
    "users",
    "utility-2",
    "weights-behind-eager",
];

fn scenario(name: &str) -> Scenario {
    let text = ALL.iter().find(|(other, _)| *other == name).expect(name).1;
    Scenario::from_toml(text).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// A scenario's results, played for at most ten seconds.
fn play(name: &str) -> Report {
    let mut scenario = scenario(name);
    scenario.seconds = scenario.seconds.min(10.0);
    run(&scenario).expect(name)
}

fn mode(report: &Report, mode: Mode) -> &ModeReport {
    let of = |report: &&ModeReport| report.mode == mode;
    report.modes.iter().find(of).expect("played")
}

fn tenant<'a>(report: &'a ModeReport, name: &str) -> &'a TenantReport {
    let of = |tenant: &&TenantReport| tenant.name == name;
    report.tenants.iter().find(of).expect(name)
}

fn p50_us(report: &ModeReport, name: &str) -> f64 {
    1e3 * tenant(report, name).latency.expect("requests").p50_ms
}

fn used(report: &ModeReport) -> f64 {
    report.devices[0].used
}

/// Within this part of what was measured.
fn check(what: &str, got: f64, measured: f64, part: f64) {
    assert!(
        (got / measured - 1.0).abs() <= part,
        "{what}: {got}, measured {measured}"
    );
}

#[test]
fn every_scenario_is_sound_and_named_after_its_file() {
    for (name, _) in ALL {
        let scenario = scenario(name);
        assert_eq!(scenario.name, *name);
        assert!(!scenario.about.is_empty(), "{name}");
    }
}

#[test]
fn preemption_takes_as_long_as_measured() {
    let report = play("preempt");
    check(
        "alone",
        p50_us(mode(&report, Mode::Alone), "serve"),
        135.0,
        0.04,
    );
    check(
        "sliced",
        p50_us(mode(&report, Mode::TimeSlicing), "serve"),
        1490.0,
        0.15,
    );
    for preempting in [Mode::Fixed, Mode::Gpumux] {
        let serve = tenant(mode(&report, preempting), "serve")
            .latency
            .expect("requests");
        check("p50", serve.p50_ms, 0.319, 0.05);
        check("p99", serve.p99_ms, 0.344, 0.10);
    }
    let hinted = play("preempt-hint");
    check(
        "hinted",
        p50_us(mode(&hinted, Mode::Gpumux), "serve"),
        156.0,
        0.05,
    );
}

#[test]
fn slices_cost_and_divide_as_measured() {
    for (name, measured) in [
        ("slices-200", 0.44),
        ("slices-500", 0.69),
        ("slices-2048", 0.90),
        ("slices-100000", 0.997),
    ] {
        check(name, used(&play(name).modes[0]), measured, 0.02);
    }
    let report = play("slices-1-3");
    let ratio =
        tenant(&report.modes[0], "large").received / tenant(&report.modes[0], "small").received;
    check("1000:3000", ratio, 3.04, 0.03);
}

#[test]
fn rotation_costs_what_was_measured() {
    check("10 ms", used(&play("rotation-2-10ms").modes[0]), 0.92, 0.02);
    check(
        "50 ms",
        used(mode(&play("rotation-2"), Mode::Gpumux)),
        0.976,
        0.02,
    );
}

#[test]
fn two_batch_domains_at_1_us_make_no_progress_and_rotated_they_do() {
    for name in ["livelock", "rotation-2", "graph+2train"] {
        let report = play(name);
        let trains = |report: &ModeReport| -> f64 {
            let batch = report
                .tenants
                .iter()
                .filter(|tenant| tenant.name != "serve" && tenant.name != "resnet50");
            batch.map(|tenant| tenant.received).sum()
        };
        assert!(trains(mode(&report, Mode::Fixed)) < 0.01, "{name}");
        assert!(trains(mode(&report, Mode::Gpumux)) > 0.85, "{name}");
    }
}

#[test]
fn real_programs_share_as_measured() {
    let report = play("graph+train");
    let graph = |report| tenant(report, "resnet50").latency.expect("requests");
    let train = |report| tenant(report, "resnet152").rate;
    check(
        "sliced p50",
        graph(mode(&report, Mode::TimeSlicing)).p50_ms,
        2.300,
        0.05,
    );
    check(
        "sliced p99",
        graph(mode(&report, Mode::TimeSlicing)).p99_ms,
        3.343,
        0.05,
    );
    check(
        "fixed p50",
        graph(mode(&report, Mode::Fixed)).p50_ms,
        1.195,
        0.10,
    );
    check(
        "fixed p99",
        graph(mode(&report, Mode::Fixed)).p99_ms,
        1.308,
        0.10,
    );
    check("training", train(mode(&report, Mode::Fixed)), 12.85, 0.10);
    let eager = play("eager+train");
    check(
        "eager sliced",
        graph(mode(&eager, Mode::TimeSlicing)).p50_ms,
        5.47,
        0.05,
    );
    check(
        "eager fixed",
        graph(mode(&eager, Mode::Fixed)).p50_ms,
        4.47,
        0.05,
    );
    let (patient, shortest) = (play("eager+train-8ms"), mode(&eager, Mode::Fixed));
    let (patient, eager) = (mode(&patient, Mode::Gpumux), mode(&eager, Mode::Gpumux));
    assert!(train(patient) > 1.15 * train(shortest), "{patient:#?}");
    assert!(
        train(patient) > train(eager) && train(eager) > train(shortest),
        "{eager:#?}"
    );
    assert!(
        graph(patient).p99_ms < 1.25 * graph(eager).p99_ms,
        "{patient:#?}"
    );
    let two = play("2graph+train");
    let each = tenant(mode(&two, Mode::Fixed), "resnet50-1")
        .latency
        .expect("requests");
    check("two p50", each.p50_ms, 1.18, 0.10);
    check("two p99", each.p99_ms, 2.3, 0.10);
}

/// The first timeslice that is tried is too long in the model, the second is not. (An H200 keeps 0.95 of training at the first.)
#[test]
fn launch_bound_program_and_its_neighbour_lose_little() {
    let mut known = scenario("decode+train");
    known.seconds = 6.0;
    known.modes = vec![Mode::Alone, Mode::Gpumux];
    let played = |known: &Scenario| {
        let report = run(known).expect("played");
        let token = |it| tenant(mode(&report, it), "decode").latency.expect("tokens");
        let (shared, alone) = (token(Mode::Gpumux), token(Mode::Alone));
        let training = tenant(mode(&report, Mode::Gpumux), "resnet152").received;
        let tail = shared.p99_ms / alone.p99_ms;
        (shared.p50_ms / alone.p50_ms, tail, training)
    };
    let (token, tail, training) = played(&known);
    assert!(
        token < 1.05 && tail < 1.06 && training > 0.45,
        "eager: {token:.3} of alone, p99 {tail:.3}; training {training:.3}"
    );
    // The same time on the device as a graph: it takes no longer than with the shortest timeslice, which is what an objective of 10 µs sets.
    let decode = &mut known.tenants[0];
    if let Work::Kernels { launch_us, .. } = &mut decode.work {
        *launch_us = 0.0;
    }
    let (graph, ..) = played(&known);
    known.tenants[0].latency_objective_us = Some(10);
    let (shortest, ..) = played(&known);
    assert!(
        graph <= shortest,
        "graph: {graph:.3}, {shortest:.3} of alone"
    );
}

/// A pipeline always has work outstanding: its neighbour runs in its gaps, and it loses no more than it may, a twentieth.
#[test]
fn pipeline_and_its_neighbour_lose_little() {
    let mut known = scenario("pipeline+train");
    known.seconds = 6.0;
    known.modes = vec![Mode::Gpumux];
    let played = |known: &Scenario| {
        let report = run(known).expect("played");
        let all = mode(&report, Mode::Gpumux);
        let of = |name| tenant(all, name);
        let latency = of("pipeline").latency.expect("requests");
        let tail = latency.p99_ms / latency.p50_ms;
        (of("pipeline").rate, tail, of("resnet152").received)
    };
    let (rate, tail, training) = played(&known);
    // The shortest timeslice, which is what an objective of 10 µs sets.
    known.tenants[0].latency_objective_us = Some(10);
    let (undisturbed, _, starved) = played(&known);
    assert!(
        rate >= 0.95 * undisturbed && tail < 1.1 && training > 0.4 && starved < 0.1,
        "{rate:.1} of {undisturbed:.1} a second, p99 ÷ p50 {tail:.3}; training {training:.3}, {starved:.3}"
    );
}

/// Programs that pause between requests leave the device idle in their quanta. The hardware fills the pauses, in a group without delaying
/// the latency task.
#[test]
fn batch_that_pauses_loses_in_turns_and_not_in_a_group() {
    let report = play("batch-requests");
    let of = |it| {
        let it = mode(&report, it);
        let latency = tenant(it, "vgg").latency.expect("requests");
        (used(it), latency.p99_ms)
    };
    let (alone, sliced) = (of(Mode::Alone).1, of(Mode::TimeSlicing));
    let (turns, group) = (of(Mode::Gpumux), of(Mode::Space));
    assert!(turns.0 < 0.9 * sliced.0, "{turns:?} {sliced:?}");
    assert!(group.0 >= 0.95 * sliced.0, "{group:?} {sliced:?}");
    assert!(turns.1 <= 1.05 * alone && group.1 <= 1.05 * alone && sliced.1 > 5.0 * alone);
}

#[test]
fn a_latency_task_preempts_a_group_as_a_whole() {
    let report = play("graph+2train-group");
    let graph = |of| {
        tenant(mode(&report, of), "resnet50")
            .latency
            .expect("requests")
    };
    let trains =
        |of| ["resnet152-1", "resnet152-2"].map(|name| tenant(mode(&report, of), name).rate);
    check("p50", graph(Mode::Space).p50_ms, 1.205, 0.10);
    check("p99", graph(Mode::Space).p99_ms, 1.300, 0.10);
    let [one, other] = trains(Mode::Space);
    // Real kernels don't fill every SM, which makes each switch cheaper than the model's.
    check("training in the group", one + other, 6.77 + 6.77, 0.12);
    assert!((one - other).abs() <= 0.02 * one, "{one} {other}");
    let total = |of| trains(of).iter().sum::<f64>();
    assert!(total(Mode::Space) >= total(Mode::Gpumux), "{report:#?}");
    // Without a daemon the latency task waits for what the others have queued.
    assert!(graph(Mode::Mps).p50_ms > 1.5 * graph(Mode::Space).p50_ms);
}

#[test]
fn measured_utility_beats_equal_parts_and_costs_the_latency_task_nothing() {
    let report = play("utility-2");
    let rate = |of, name| tenant(mode(&report, of), name).rate;
    let total = |of| {
        let relative = |name| rate(of, name) / rate(Mode::Alone, name);
        relative("decode") + relative("train")
    };
    assert!(
        total(Mode::Utility) > 1.1 * total(Mode::Equal),
        "{report:#?}"
    );
    assert!(
        total(Mode::Utility) > 1.1 * total(Mode::Space),
        "{report:#?}"
    );
    assert!(total(Mode::Equal) > total(Mode::Gpumux), "{report:#?}");
    let sms = |name| {
        tenant(mode(&report, Mode::Utility), name)
            .sms
            .expect("divided")
    };
    assert!((40..=56).contains(&sms("decode")), "{}", sms("decode"));
    assert!(sms("train") >= 72, "{}", sms("train"));
    let p99 = |of| {
        tenant(mode(&report, of), "serve")
            .latency
            .expect("requests")
            .p99_ms
    };
    assert!(p99(Mode::Utility) < 1.1 * p99(Mode::Gpumux));
}

#[test]
fn latency_tenants_and_sharing_in_time_stay_outside_of_groups() {
    let mut scenario = scenario("utility-2");
    (scenario.seconds, scenario.warmup_s) = (4.0, 3.0);
    scenario.modes = vec![Mode::Equal];
    scenario.tenants[0].trust = Some("team-a".into());
    scenario.tenants[1].stop_s = Some(2.0);
    let mut third = scenario.tenants[2].clone();
    (third.name, third.start_s) = ("third".into(), 1.0);
    let mut apart = scenario.tenants[2].clone();
    (apart.name, apart.sharing) = ("apart".into(), gpumux_core::space::Sharing::Time);
    scenario.tenants.extend([third, apart]);
    let report = run(&scenario).expect("sound");
    let sms = |name| tenant(&report.modes[0], name).sms;
    assert_eq!((sms("train"), sms("third")), (Some(64), Some(64)));
    assert_eq!(
        (sms("serve"), sms("decode"), sms("apart")),
        (None, None, None)
    );
    let received = |name| tenant(&report.modes[0], name).received;
    assert!(
        received("train") > 0.2 && received("apart") > 0.2,
        "{report:#?}"
    );
}

#[test]
fn regular_requests_meet_few_controls() {
    // Where those that lost their turn in a pause may be back before the next look at demand it is 1.18 and 1.24.
    for name in ["regular", "regular-short"] {
        let report = run(&scenario(name)).unwrap();
        let p99 = |of| {
            let user = tenant(mode(&report, of), "user").latency;
            user.expect("requests").p99_ms
        };
        let ratio = p99(Mode::Gpumux) / p99(Mode::Alone);
        assert!(ratio < 1.05, "{name}: {ratio}");
    }
}

#[test]
fn guaranteed_shares_are_received() {
    for name in ["shares-70-30", "shares-50-25-25"] {
        let report = play(name);
        for tenant in &mode(&report, Mode::Gpumux).tenants {
            let windows = tenant.window_min..=tenant.window_max;
            let off = (windows.start() - tenant.guaranteed)
                .abs()
                .max((windows.end() - tenant.guaranteed).abs());
            assert!(off < 0.01, "{name}: {tenant:?}");
        }
    }
}

#[test]
fn batch_tenants_lose_little_to_rotation_and_share_evenly() {
    for (name, count) in [
        ("rotation-2", 2.0),
        ("rotation-3", 3.0),
        ("rotation-4", 4.0),
    ] {
        let mut scenario = scenario(name);
        scenario.modes = vec![Mode::Gpumux];
        let report = run(&scenario).expect(name);
        assert!(used(&report.modes[0]) >= 0.97, "{name}");
        for tenant in report.modes[0]
            .tenants
            .iter()
            .filter(|tenant| tenant.name != "serve")
        {
            check(name, tenant.received_of_used, 1.0 / count, 0.03);
        }
    }
}

#[test]
fn a_latency_tenant_that_always_has_work_leaves_the_guarantees() {
    let report = play("hog");
    let fixed = tenant(mode(&report, Mode::Fixed), "train-1");
    assert!(fixed.received < 0.01, "{fixed:?}");
    for name in ["train-1", "train-2"] {
        let train = tenant(mode(&report, Mode::Gpumux), name);
        assert!(
            train.received_of_used >= 0.99 * train.guaranteed,
            "{train:?}"
        );
    }
}

#[test]
fn tenant_that_is_left_alone_uses_the_whole_device() {
    let mut scenario = scenario("borrow");
    scenario.warmup_s = 11.0;
    let report = run(&scenario).expect("sound");
    let stays = tenant(&report.modes[0], "stays");
    assert!(stays.received >= 0.98, "{stays:?}");
}

#[test]
fn a_gang_runs_on_both_devices_at_once() {
    let report = play("gang");
    let rate = |of| tenant(mode(&report, of), "gang").rate;
    assert!(rate(Mode::Gpumux) > rate(Mode::TimeSlicing));
    let shares: Vec<f64> = ["gang", "left", "right"]
        .iter()
        .map(|name| tenant(mode(&report, Mode::Gpumux), name).received)
        .collect();
    assert!(
        shares.iter().all(|share| (0.42..0.53).contains(share)),
        "{shares:?}"
    );
}

#[test]
fn a_recorded_trace_drives_a_language_model() {
    let mut scenario = scenario("llm-trace");
    assert!(run(&scenario).is_err(), "its trace is missing");
    let lines: String = (0..50)
        .map(|n| format!("{}.5,{},{}\n", n / 5, 100 + 10 * n, 5 + n))
        .collect();
    let text = format!("TIMESTAMP,ContextTokens,GeneratedTokens\n{lines}");
    scenario.add_trace("conversation", &text).expect("sound");
    scenario.seconds = 30.0;
    let report = run(&scenario).expect("complete");
    let p50 = |of| p50_us(mode(&report, of), "llm");
    assert!(p50(Mode::TimeSlicing) > 1.3 * p50(Mode::Alone));
    assert!(p50(Mode::Gpumux) < 1.15 * p50(Mode::Alone));
}

#[test]
fn the_same_seed_gives_the_same_report_and_another_does_not() {
    let mut scenario = scenario("serve+4train");
    scenario.seconds = 3.0;
    let first = run(&scenario).expect("sound");
    assert_eq!(first, run(&scenario).expect("sound"));
    let (traced, trace) = gpumux_sim::run_traced(&scenario).expect("sound");
    assert_eq!(first, traced, "looking changes nothing");
    assert!(trace.contains("\"Freeze(") && trace.contains("resnet50"));
    scenario.seed += 1;
    assert_ne!(first, run(&scenario).expect("sound"));
}

/// `bench/memory.py oversubscribe` measures the same.
#[test]
fn two_that_do_not_fit_lose_little_to_moving_and_share_alike() {
    let report = run(&scenario("oversubscribe-2x60")).expect("played");
    let shared = mode(&report, Mode::Gpumux);
    let received: Vec<f64> = shared.tenants.iter().map(|it| it.received).collect();
    let total: f64 = received.iter().sum();
    assert!((0.93..0.97).contains(&total), "{received:?}");
    for tenant in &shared.tenants {
        let moves = tenant.moves.expect("they do not fit");
        let each = moves.out_gib / moves.outs as f64;
        // What the other lacks, and a 64th of the device ahead of the first request.
        assert!((15.9..18.0).contains(&each), "{moves:?}");
        assert!((0.40..0.56).contains(&tenant.received), "{received:?}");
    }
    assert_eq!(
        run(&scenario("oversubscribe-2x60")).expect("played"),
        report
    );
    // Alone nothing moves.
    let alone = mode(&report, Mode::Alone);
    assert!(alone.tenants.iter().all(|it| it.moves.is_none()));
}

/// One on two devices, of which one is crowded, and one that fits beside it.
#[test]
fn moves_count_on_all_devices_and_only_for_the_tenant_moved() {
    let text = r#"
        seconds = 40
        devices = 2
        [[tenant]]
        name = "both"
        class = "batch"
        memory_gib = 47
        devices = [0, 1]
        arrival = { kind = "closed", depth = 2 }
        work = { kind = "kernels", kernel_us = 70_000 }
        [[tenant]]
        name = "contender"
        class = "batch"
        memory_gib = 47
        devices = [0]
        arrival = { kind = "closed", depth = 2 }
        work = { kind = "kernels", kernel_us = 70_000 }
        [[tenant]]
        name = "small"
        class = "batch"
        memory_gib = 1
        devices = [1]
        arrival = { kind = "closed", depth = 2 }
        work = { kind = "kernels", kernel_us = 70_000 }
    "#;
    let report = run(&Scenario::from_toml(text).expect("sound")).expect("played");
    let shared = mode(&report, Mode::Gpumux);
    for name in ["both", "contender"] {
        let moves = tenant(shared, name).moves.expect("they do not fit");
        assert!(moves.outs > 0 && moves.out_gib > 10.0, "{name}: {moves:?}");
    }
    assert_eq!(tenant(shared, "small").moves, None);
}

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

/// Guarantees and floors hold within the bounds that the report names. Scenarios whose memory moves are left out: while its memory is
/// away a tenant is entitled to nothing; and those with several devices, for which no bound is given.
#[test]
fn every_tenant_of_every_scenario_keeps_its_bounds() {
    let mut checked = 0;
    for (name, _) in ALL {
        let known = scenario(name);
        let moves = known.tenants.iter().any(|tenant| tenant.memory_gib > 0.0);
        if moves || known.devices > 1 || !known.trace_names().is_empty() {
            continue;
        }
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
            // Its wait is in the time that the device works, observed every 5 ms.
            let wait = bound.wait_ms / used.max(0.05) + 10.0;
            assert!(tenant.longest_wait_ms <= wait, "{name}: {tenant:?}");
            checked += 1;
        }
    }
    println!("{checked} tenants");
    assert!(checked >= 150, "{checked}");
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
    assert!(guaranteed.window_min >= 0.15, "{guaranteed:?}");
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
