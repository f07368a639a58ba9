//! What is known of processes: their channel groups, counters and history, and what becomes of those that end.

use gpumux_core::broker;

use super::*;

#[test]
fn process_that_freed_itself_is_controlled_in_its_next_session() {
    let mut bench = Bench::new();
    for (n, class) in [(1, Class::Latency), (2, Class::Batch), (3, Class::Batch)] {
        let spec = TenantSpec {
            class,
            ..TenantSpec::default()
        };
        bench.spec(n, spec).unwrap();
        let group = bench.group(n, n, 1);
        let page = Arc::clone(&group.page);
        bench.meet(n.into(), TenantId(n.into()), page);
        bench.engine.add(group).unwrap();
        if class == Class::Batch {
            bench.pages.last().unwrap().slot(n).unwrap().submit();
        }
    }
    let group = |bench: &Bench, n: u32| bench.hardware().groups[&n];
    bench.run(Micros::from_millis(500));
    let frozen = (2..=3).find(|n| group(&bench, *n).frozen).unwrap();
    // Its lease expires while the daemon stands still; the daemon's own control was on its way then.
    bench.hardware().now += 500_000;
    bench.pages[frozen as usize - 1].expire();
    bench.take_pulls();
    bench.run(Micros::from_millis(500));
    let own = [
        Pull::Thaw(frozen),
        Pull::Set(frozen, 2048),
        Pull::Freeze(frozen),
        Pull::Set(frozen, 1),
    ];
    let pulls: Vec<Pull> = bench
        .take_pulls()
        .into_iter()
        .filter(|it| own.contains(it))
        .collect();
    assert!(!group(&bench, frozen).frozen && group(&bench, frozen).slice == 2048);
    assert!(
        !pulls.contains(&own[2]) && !pulls.contains(&own[3]),
        "{pulls:?}"
    );
    assert_eq!(bench.engine.view().scheduler.lease_expiries, 1);
    let late = bench.group(frozen, 9, 1);
    assert!(matches!(bench.engine.add(late), Err(GroupError::Expired)));
    bench.engine.leave(SessionId(frozen.into()), true);
    assert_eq!(
        bench.engine.view().scheduler.lease_expiries,
        1,
        "counted once"
    );
}

#[test]
fn a_dead_process_is_closed_at_once_and_untouched() {
    let mut bench = Bench::new();
    bench.add(1, Class::Latency);
    bench.add(2, Class::Batch);
    bench.add(3, Class::Batch);
    bench.engine.step();
    bench.take_pulls();
    let group = bench.group(2, 20, 9);
    bench.engine.add(group).unwrap();
    bench.engine.leave(SessionId(2), false);
    assert_eq!(bench.closed(), [2, 20], "compute and copy group");
    assert_eq!(bench.take_pulls(), []);
    bench.hardware().groups.remove(&2);
    bench.engine.step();
    assert!(
        !bench.hardware().groups[&3].frozen,
        "the other has the device"
    );
}

#[test]
fn counts_of_ended_processes_are_kept_and_counted_once() {
    let mut bench = Bench::new();
    bench.spec(1, TenantSpec::default()).unwrap();
    let (page, file) = Page::create().unwrap();
    let come = |bench: &mut Bench, session| {
        let page = Arc::new(Page::open(&file).unwrap());
        bench.meet(session, TenantId(1), page);
    };
    let count = |bench: &mut Bench| {
        let view = bench.engine.view();
        let all = view.counted.get(&TenantId(1));
        all.map(|all| (all.hints.given, all.requests.count()))
    };
    let hint = HintCounts {
        given: 1,
        ..HintCounts::default()
    };
    come(&mut bench, 1);
    page.requests().record(5000);
    page.slot(3).unwrap().count_hints(hint);
    assert_eq!(count(&mut bench), Some((1, 1)));
    bench.engine.leave(SessionId(1), true);
    page.requests().record(5000);
    // The same process comes again, with the same page; what it did alone is not the daemon's business.
    come(&mut bench, 2);
    assert_eq!(count(&mut bench), Some((1, 1)));
    page.requests().record(5000);
    bench.engine.leave(SessionId(2), false);
    assert_eq!(count(&mut bench), Some((1, 2)));
    bench.engine.step();
    let steps = bench.engine.view().scheduler;
    assert_eq!(
        (steps.steps, steps.steps_histogram.iter().sum::<u64>()),
        (1, 1)
    );
    // A tenant that has ended before its last process leaves nothing.
    come(&mut bench, 3);
    bench.engine.forget(TenantId(1));
    bench.engine.leave(SessionId(3), false);
    assert_eq!(count(&mut bench), None);
}

#[test]
fn hints_and_moves_of_memory_are_in_the_history() {
    let mut bench = Bench::new();
    bench.add(1, Class::Latency);
    bench.add(2, Class::Batch);
    bench.engine.step();
    let page = bench.pages.first().unwrap();
    page.slot(1).unwrap().count_hints(HintCounts {
        given: 2,
        ..HintCounts::default()
    });
    bench.run(Micros::from_millis(50));
    let (tenant, took) = (TenantId(2), Micros::from_millis(3));
    bench.park(tenant, true);
    bench.run(Micros::from_millis(50));
    assert_eq!(bench.domain(2).reason, "its memory is away");
    bench.moved(tenant, true, 4096, took);
    bench.park(tenant, false);
    bench.moved(tenant, false, 4096, took);
    let (bytes, took_us) = (4096, 3000);
    let all = bench.engine.history(Micros::from_secs(10));
    let of = |n: u64| -> Vec<What> {
        let events = all[0].events.iter().filter(|it| it.who.tenant.0 == n);
        events.map(|it| it.what).collect()
    };
    assert!(of(1).contains(&What::Held(2)), "{:?}", of(1));
    assert!(of(2).contains(&What::Reason("its memory is away")));
    assert!(of(2).ends_with(&[
        What::WentAway { bytes, took_us },
        What::CameBack { bytes, took_us }
    ]));
}

#[test]
fn a_living_process_that_leaves_is_given_back() {
    let mut bench = Bench::new();
    bench.add(1, Class::Latency);
    bench.add(2, Class::Batch);
    bench.add(3, Class::Batch);
    bench.engine.step();
    let frozen = if bench.hardware().groups[&2].frozen {
        2
    } else {
        3
    };
    bench.engine.leave(SessionId(frozen), true);
    let group = bench.hardware().groups[&(frozen as u32)];
    assert!(!group.frozen && group.slice == 2048, "{group:?}");
    assert_eq!(bench.closed(), [frozen as u32]);
}

#[test]
fn a_group_belongs_to_one_process() {
    let mut bench = Bench::new();
    bench.add(1, Class::Standard);
    let mut stolen = bench.group(1, 1, 1);
    stolen.member.pid += 1;
    assert!(matches!(
        bench.engine.add(stolen),
        Err(GroupError::Claimed(1001))
    ));
    let mut again = bench.group(1, 1, 1);
    again.member.session = SessionId(77);
    bench.engine.add(again).unwrap();
    assert_eq!(
        bench.engine.view().domains.len(),
        1,
        "the same process is back"
    );
    bench.engine.leave(SessionId(1), true);
    assert_eq!(
        bench.engine.view().domains.len(),
        1,
        "its old session has nothing to give back"
    );
    let foreign = bench.group(9, 9, 1);
    assert!(matches!(
        bench.engine.add(foreign),
        Err(GroupError::NoTenant)
    ));
}

/// Its new session was examined, and let run, before the old one's last control.
#[test]
fn process_that_is_back_early_runs_although_its_old_session_froze_it_last() {
    let mut bench = Bench::new();
    bench.add(1, Class::Latency);
    bench.add(2, Class::Batch);
    bench.add(3, Class::Batch);
    bench.run(Micros::from_millis(50));
    let frozen = [2, 3]
        .into_iter()
        .find(|n| bench.hardware().groups[n].frozen);
    let frozen = frozen.expect("one of them waits");
    let mut again = bench.group(frozen, frozen, 1);
    again.member.session = SessionId(77);
    bench.engine.add(again).unwrap();
    let group = bench.hardware().groups[&frozen];
    assert!(
        !group.frozen,
        "the controller believes that it runs: {group:?}"
    );
}

#[test]
fn stopped_process_counts_until_its_work_has_ended() {
    let mut bench = Bench::new();
    bench.add(1, Class::Latency);
    bench.add(2, Class::Batch);
    bench.run(Micros::from_millis(1_500));
    assert_eq!(bench.engine.standing(), [1001, 1002].into());
    let stopped = [1001].into();
    bench.engine.set_stopped(&stopped);
    bench.run(Micros::from_millis(500));
    let left = bench.domain(1);
    assert!(left.stopped && left.demand == Demand::Busy, "{left:?}");
    for _ in 0..8 {
        bench.engine.set_stopped(&stopped);
        bench.run(Micros::from_secs(1));
    }
    let left = bench.domain(1);
    assert!(left.stopped && left.demand == Demand::Idle, "{left:?}");
    assert!(bench.domain(2).received_share > 0.99);
    // The driver has seen its kernels.
    let measure = |bench: &mut Bench, used: f64| {
        let device = bench.engine.state.devices.get_mut("GPU-0").unwrap();
        device.used_by = Some([(1001, used)].into());
    };
    measure(&mut bench, 0.1);
    bench.run(Micros::from_millis(100));
    assert_eq!(bench.domain(1).demand, Demand::Busy);
    measure(&mut bench, 0.0);
    bench.run(Micros::from_millis(100));
    assert_eq!(bench.domain(1).demand, Demand::Idle);
    // It goes on with what it had, and later with more.
    bench.engine.set_stopped(&[].into());
    bench.run(Micros::from_millis(100));
    let on = bench.domain(1);
    assert!(!on.stopped && on.demand == Demand::Busy, "{on:?}");
    bench.engine.set_stopped(&stopped);
    bench.pages[0].slot(1).unwrap().submit();
    bench.run(Micros::from_millis(100));
    let on = bench.domain(1);
    assert!(!on.stopped && on.demand == Demand::Busy, "{on:?}");
    assert_eq!(bench.engine.standing(), [1002].into());
}

#[test]
fn stopped_process_without_work_stays_idle() {
    let mut bench = Bench::new();
    bench.add(1, Class::Latency);
    let slot = bench.pages[0].slot(1).unwrap();
    slot.complete(slot.submitted());
    bench.engine.set_stopped(&[1001].into());
    bench.run(Micros::from_secs(1));
    let idle = bench.domain(1);
    assert!(!idle.stopped && idle.demand == Demand::Idle, "{idle:?}");
}

/// As with `GPUMUX_HOOKS=0`.
#[test]
fn process_that_reports_no_work_pays_for_what_the_driver_measures() {
    for (used, pays) in [(0.1, false), (0.9, true)] {
        let mut bench = Bench::new();
        let latency = TenantSpec {
            class: Class::Latency,
            ..TenantSpec::default()
        };
        bench.spec(1, latency).unwrap();
        let silent = Page::open(Page::create().unwrap().1).unwrap();
        let group = NewGroup {
            page: Arc::new(silent),
            ..bench.group(1, 1, 1)
        };
        bench.engine.add(group).unwrap();
        bench.add(2, Class::Standard);
        for device in bench.engine.state.devices.values_mut() {
            device.used_by = Some([(1001, used)].into());
        }
        bench.run(Micros::from_secs(5));
        let frozen = bench.take_pulls().contains(&Pull::Freeze(1));
        assert_eq!(frozen, pays, "{used}");
    }
}

/// It is stopped and reads nothing: what it must not miss would keep its gate closed, or a thread waiting.
#[test]
fn session_of_a_process_that_misses_an_order_ends() {
    let (process, ticket, bytes) = (broker::ProcessId(1), 7, 64);
    let grant = broker::Command::Grant {
        process,
        ticket,
        bytes,
    };
    let resume = broker::Command::Order(process, 0, broker::Order::Resume);
    for command in [resume, grant] {
        let mut bench = Bench::new();
        bench.spec(1, TenantSpec::default()).unwrap();
        let page = Arc::clone(&bench.group(1, 1, 1).page);
        bench.meet(1, TenantId(1), page);
        let carry_out = |bench: &mut Bench| {
            let Engine { moves, state, .. } = &mut bench.engine;
            moves.carry_out(state, Micros::ZERO, command.clone());
        };
        let fill = |bench: &Bench| while bench.engine.state.send(SessionId(1), &Daemon::Trim) {};
        let next = |bench: &Bench| {
            let socket = &bench.processes[&1];
            socket::recv::<Daemon>(socket, RecvFlags::DONTWAIT)
        };
        carry_out(&mut bench);
        assert_eq!(bench.received(1).len(), 1);
        fill(&bench);
        assert!(bench.received(1).len() > 10);
        assert!(next(&bench).is_err(), "it goes on");
        fill(&bench);
        carry_out(&mut bench);
        bench.received(1);
        assert!(matches!(next(&bench), Ok(None)), "it has ended");
    }
}
