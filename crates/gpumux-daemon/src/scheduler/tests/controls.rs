//! How a plan becomes controls: their order, when they wait, what becomes of those that fail.

use gpumux_core::controller::{Call, Event};

use super::*;

#[test]
fn classes_become_slices() {
    let mut bench = Bench::new();
    bench.add(1, Class::Latency);
    bench.add(2, Class::Batch);
    bench.engine.step();
    assert_eq!(bench.hardware().groups[&1].slice, 1_000_000);
    assert_eq!(bench.hardware().groups[&2].slice, 1);
    assert!(!bench.hardware().groups[&2].frozen);
}

#[test]
fn batch_tenants_take_turns_and_freeze_before_they_thaw() {
    let mut bench = Bench::new();
    bench.add(1, Class::Latency);
    for n in 2..=4 {
        bench.add(n, Class::Batch);
    }
    // The latency tenant has no work, so that the others get all.
    bench.pages[0].slot(1).unwrap().complete(1);
    // That never two of them may run is checked at every pull.
    bench.run(Micros::from_secs(3));
    let pulls = bench.take_pulls();
    for pair in pulls
        .windows(2)
        .filter(|pair| matches!(pair[1], Pull::Thaw(_)))
    {
        assert!(matches!(pair[0], Pull::Freeze(_)), "{pair:?}");
    }
    let received: Vec<u64> = (2..=4).map(|n| bench.domain(n).received_us).collect();
    for share in &received {
        assert!((900_000..1_050_000).contains(share), "{received:?}");
    }
    let domain = bench.domain(2);
    assert!(domain.preemptions >= 5 && domain.freezes >= 5, "{domain:?}");
    assert!(domain.waited_us > domain.received_us, "{domain:?}");
    assert!((0.2..0.5).contains(&domain.received_share), "{domain:?}");
}

#[test]
fn controls_wait_briefly_for_a_latency_tenant_to_finish() {
    let mut bench = Bench::new();
    bench.add(1, Class::Latency);
    bench.add(2, Class::Batch);
    bench.add(3, Class::Batch);
    bench.pages[0].slot(1).unwrap().complete(1);
    bench.run(Micros::from_millis(5));
    let (mut at_work, mut between) = (Vec::new(), Vec::new());
    for request in 2..500 {
        bench.take_pulls();
        bench.pages[0].slot(1).unwrap().submit();
        bench.run(Micros::from_millis(2));
        at_work.extend(bench.take_pulls());
        bench.pages[0].slot(1).unwrap().complete(request);
        bench.run(Micros::from_millis(2));
        between.extend(bench.take_pulls());
    }
    assert_eq!(at_work, []);
    assert!(between.len() > 10, "{between:?}");
    bench.pages[0].slot(1).unwrap().submit();
    bench.run(Micros::from_millis(500));
    let pulls = bench.take_pulls();
    assert!(pulls.len() > 1, "{pulls:?}");
}

/// From what comes regularly the controller learns when to expect it (`controls_wait_for_latency_work_that_is_expected`).
#[test]
fn arrival_of_work_is_reported_once() {
    let mut bench = Bench::new();
    bench.add(1, Class::Latency);
    bench.add(2, Class::Batch);
    bench.engine.state.controller.record();
    bench.run(Micros::from_millis(50));
    let calls = bench.engine.state.controller.take_calls();
    let came = calls.iter().filter_map(|(_, call)| match call {
        Call::Handle(Event::Arrival(id, _)) => Some(*id),
        _ => None,
    });
    let came: Vec<_> = came.collect();
    assert!(
        came.len() == 2 && came[0] != came[1],
        "one of each: {came:?}"
    );
}

#[test]
fn nothing_changes_nothing_is_pulled() {
    let mut bench = Bench::new();
    bench.add(1, Class::Latency);
    bench.add(2, Class::Batch);
    bench.add(3, Class::Batch);
    bench.run(Micros::from_millis(10));
    assert!(!bench.take_pulls().is_empty());
    let class = Class::Batch;
    bench
        .spec(
            3,
            TenantSpec {
                class,
                ..TenantSpec::default()
            },
        )
        .unwrap();
    bench.engine.step();
    assert_eq!(bench.take_pulls(), []);
}

#[test]
fn a_class_changes_while_running() {
    let mut bench = Bench::new();
    bench.add(1, Class::Latency);
    bench.add(2, Class::Batch);
    bench.engine.step();
    let set = bench.engine.state.now();
    let class = Class::Latency;
    bench
        .spec(
            2,
            TenantSpec {
                class,
                ..TenantSpec::default()
            },
        )
        .unwrap();
    bench
        .spec(
            1,
            TenantSpec {
                class: Class::Batch,
                ..TenantSpec::default()
            },
        )
        .unwrap();
    bench.engine.step();
    assert_eq!(bench.hardware().groups[&1].slice, 1);
    assert!(bench.hardware().groups[&2].slice > 1000);
    assert!(bench.engine.state.now().saturating_sub(set) < Micros::from_millis(100));
}

#[test]
fn shutdown_gives_every_group_its_own_timeslice_back() {
    let mut bench = Bench::new();
    bench.add(1, Class::Latency);
    for n in 2..=5 {
        bench.add(n, Class::Batch);
    }
    bench.run(Micros::from_millis(120));
    bench.engine.restore();
    for group in bench.hardware().groups.values() {
        assert!(!group.frozen && group.slice == 2048, "{group:?}");
    }
    bench.take_pulls();
    assert_eq!(bench.engine.step(), None);
    assert_eq!(bench.take_pulls(), [], "and then nothing more happens");
}

#[test]
fn a_domain_whose_controls_stick_does_not_hold_up_the_others() {
    let mut bench = Bench::new();
    bench.add(1, Class::Latency);
    for n in 2..=4 {
        bench.add(n, Class::Batch);
    }
    bench.pages[0].slot(1).unwrap().complete(1);
    bench.run(Micros::from_millis(200));
    // Else it could meet another before it is taken up again.
    while !bench.hardware().groups[&3].frozen {
        bench.run(Micros::from_millis(1));
    }
    bench.hardware().groups.get_mut(&3).unwrap().broken = true;
    bench.run(Micros::from_secs(1));
    let stuck = bench.domain(3);
    assert!(stuck.error.is_some(), "{stuck:?}");
    bench.take_pulls();
    bench.run(Micros::from_millis(500));
    let pulls = bench.take_pulls();
    assert!(
        pulls.contains(&Pull::Thaw(2)) && pulls.contains(&Pull::Thaw(4)),
        "{pulls:?}"
    );
    // It is asked again, less and less often, and taken up when it moves.
    bench.hardware().groups.get_mut(&3).unwrap().broken = false;
    bench.run(Micros::from_secs(6));
    assert_eq!(bench.domain(3).error, None);
    let thaws = bench
        .take_pulls()
        .into_iter()
        .filter(|pull| *pull == Pull::Thaw(3))
        .count();
    assert!(thaws > 3, "{thaws}");
}

#[test]
fn group_without_memory_is_frozen_when_its_stuck_controls_end() {
    let mut bench = Bench::new();
    bench.add(1, Class::Latency);
    bench.add(2, Class::Batch);
    bench.add(3, Class::Batch);
    bench.pages[0].slot(1).unwrap().complete(1);
    bench.park(TenantId(3), true);
    bench.run(Micros::from_millis(100));
    bench.hardware().groups.get_mut(&3).unwrap().broken = true;
    bench.run(Micros::from_millis(1_500));
    assert!(bench.domain(3).error.is_some() && bench.domain(3).frozen);
    bench.park(TenantId(3), false);
    bench.hardware().groups.get_mut(&3).unwrap().broken = false;
    // That never two of them may run is checked at every pull.
    bench.run(Micros::from_secs(5));
    assert_eq!(bench.domain(3).error, None);
    assert_eq!(bench.domain(3).frozen, bench.hardware().groups[&3].frozen);
}

/// As a daemon finds it after one that was killed.
#[test]
fn group_that_comes_frozen_runs_once_its_memory_is_there() {
    for away in [false, true] {
        let mut bench = Bench::new();
        bench.spec(1, TenantSpec::default()).unwrap();
        bench.park(TenantId(1), away);
        let run = gpumux_core::RunState::Frozen;
        let group = NewGroup {
            run,
            ..bench.group(1, 1, 1)
        };
        bench.hardware().groups.get_mut(&1).unwrap().frozen = true;
        bench.engine.add(group).unwrap();
        bench.pages.last().unwrap().slot(1).unwrap().submit();
        bench.run(Micros::from_millis(100));
        assert_eq!(bench.take_pulls().contains(&Pull::Thaw(1)), !away);
        assert_eq!(bench.hardware().groups[&1].frozen, away);
        bench.park(TenantId(1), false);
        bench.run(Micros::from_millis(100));
        assert!(!bench.hardware().groups[&1].frozen);
    }
}

#[test]
fn copy_group_is_left_alone() {
    let mut bench = Bench::new();
    bench.add(1, Class::Latency);
    let group = bench.group(1, 10, 11);
    bench.engine.add(group).unwrap();
    bench.engine.step();
    assert_eq!(bench.hardware().groups[&10].slice, 2048);
    assert_eq!(bench.engine.view().domains.len(), 1);
}

#[test]
fn slow_controls_of_many_groups_let_no_lease_expire() {
    let mut bench = Bench::new();
    bench.hardware().busy = 45_000;
    for n in 1..=30 {
        bench.add(n, Class::Batch);
    }
    bench.engine.step();
    let pulls = bench.take_pulls().len();
    assert!(pulls >= 29, "{pulls} controls in one step");
    assert!(!bench.hardware().expired);
    // One that never seems to end does.
    bench.hardware().busy = 700_000;
    bench
        .engine
        .set_spec(
            TenantId(1),
            TenantSpec {
                class: Class::Latency,
                ..TenantSpec::default()
            },
        )
        .unwrap();
    bench.run(Micros::from_secs(5));
    assert!(bench.hardware().expired);
}

#[test]
fn looking_at_demand_is_rare_where_nothing_depends_on_it() {
    let mut bench = Bench::new();
    assert_eq!(bench.engine.step(), None, "no domains, nothing to do");
    bench.add(1, Class::Standard);
    bench.run(Micros::from_secs(10));
    let alone = bench.engine.view().scheduler.steps;
    assert!(alone < 600, "{alone} steps in 10 s");
    bench.add(2, Class::Batch);
    bench.add(3, Class::Batch);
    bench.run(Micros::from_secs(1));
    let contended = bench.engine.view().scheduler.steps - alone;
    assert!((100..2000).contains(&contended), "{contended} steps in 1 s");
}

/// On the real thread and clock: what 16 tenants cost, of which one works in short bursts.
#[test]
#[ignore = "a measurement: run it alone and in release"]
fn sixteen_tenants_cost_less_than_two_percent_of_a_cpu() {
    let mut bench = Bench::new();
    let origin = std::time::Instant::now();
    let reaper = mpsc::channel().0;
    let clock: Clock = Arc::new(move || Micros(origin.elapsed().as_micros() as u64));
    let renewal = Arc::new(Renewal::new(None, Arc::clone(&clock)));
    bench.engine = Engine::new(Arc::new(Config::default()), clock, reaper, renewal);
    bench.add(1, Class::Latency);
    for n in 2..=16 {
        bench.add(n, if n < 4 { Class::Standard } else { Class::Batch });
    }
    let before = used();
    let slot = bench.pages[0].slot(1).unwrap();
    let seconds = 5.0;
    while origin.elapsed().as_secs_f64() < seconds {
        let next = bench.engine.step().unwrap_or_default();
        // A request every 10 ms that takes 2 ms.
        match origin.elapsed().as_millis() % 10 {
            0..2 => drop(slot.submit()),
            _ => slot.complete(slot.submitted()),
        }
        let wait = next.saturating_sub(bench.engine.state.now());
        let asleep = used();
        std::thread::sleep(std::time::Duration::from_micros(wait.0));
        bench.engine.woke(used().saturating_sub(asleep));
    }
    let part = used().saturating_sub(before).as_secs_f64() / seconds;
    let stats = bench.engine.view().scheduler;
    println!("{:.2}% of a CPU, {stats:?}", part * 100.0);
    assert!(part < 0.02, "{part}");
}

#[test]
fn longest_waits_grow_where_controls_take_longer() {
    let wait = |busy: u64| {
        let mut bench = Bench::new();
        bench.add(1, Class::Latency);
        bench.add(2, Class::Batch);
        bench.add(3, Class::Batch);
        bench.hardware().busy = busy;
        bench.run(Micros::from_secs(3));
        bench.domain(3).wait_bound_us
    };
    let (quick, slow) = (wait(0), wait(3_000));
    assert!(slow > quick + 2_000, "{quick}, {slow}");
}
