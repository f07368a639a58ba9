//! Controls that a process undid, and what only looks like it.

use super::*;

#[test]
fn timeslice_that_another_process_set_is_set_again() {
    let mut bench = Bench::new();
    bench.add(1, Class::Latency);
    bench.add(2, Class::Batch);
    bench.engine.step();
    let tamper = |bench: &Bench| bench.hardware().groups.get_mut(&2).unwrap().slice = 500_000;
    let touch = |bench: &mut Bench| {
        tamper(bench);
        bench.engine.touched(SessionId(2), 2);
        bench.engine.step();
        assert_eq!(bench.hardware().groups[&2].slice, 1);
    };
    touch(&mut bench);
    bench.run(Micros::from_secs(6));
    touch(&mut bench);
    bench.run(Micros::from_secs(6));
    assert_eq!(bench.domain(2).tampered, 0, "the driver library's doing");
    // It sets one no more often than that.
    touch(&mut bench);
    bench.run(Micros::from_secs(6));
    assert_eq!(bench.domain(2).tampered, 1);
    // No report: found by looking.
    tamper(&bench);
    bench.run(Micros::from_millis(1100));
    assert_eq!(bench.hardware().groups[&2].slice, 1);
    bench.run(Micros::from_secs(3));
    assert_eq!(bench.domain(2).tampered, 2);
}

#[test]
fn timeslice_set_in_time_and_found_late_is_no_tampering() {
    let mut bench = Bench::new();
    bench.add(1, Class::Latency);
    bench.add(2, Class::Batch);
    bench.engine.step();
    bench.run(Micros::from_millis(1_900));
    bench.hardware().groups.get_mut(&2).unwrap().slice = 500_000;
    // The thread stands still.
    bench.hardware().now += 5_000_000;
    bench.run(Micros::from_secs(10));
    assert_eq!(bench.hardware().groups[&2].slice, 1);
    assert!(bench.engine.view().tampering.is_empty());
}

#[test]
fn session_that_ends_explains_a_timeslice_that_changed() {
    let mut bench = Bench::new();
    bench.add(1, Class::Latency);
    bench.add(2, Class::Batch);
    bench.run(Micros::from_secs(4));
    // Its library frees the group; that the session has ended is known later, since the thread stands still.
    bench.hardware().groups.get_mut(&2).unwrap().slice = 2048;
    bench.run(Micros::from_millis(1_500));
    bench.hardware().now += 20_000_000;
    bench.engine.step();
    bench.engine.leave(SessionId(2), true);
    bench.run(Micros::from_secs(10));
    assert!(bench.engine.view().tampering.is_empty());
}

#[test]
fn tenant_that_sets_its_timeslice_again_and_again_is_lowered() {
    let rule = TamperRule {
        then: Then::Lower,
        ..TamperRule::default()
    };
    let mut bench = Bench::with(Config {
        tampering: rule,
        ..Config::default()
    });
    bench.add(1, Class::Standard);
    bench.add(2, Class::Latency);
    let class = |bench: &Bench| bench.engine.state.tenants[&TenantId(2)].class;
    // Its user may not have what it is lowered to.
    let rules = gpumux_core::admission::UserRules {
        classes: Some([Class::Latency].into()),
        ..Default::default()
    };
    let policy = UserPolicy::new("two".into(), false, &rules);
    let owner = Owner {
        name: "two".into(),
        uid: 7,
        policy: Arc::new(policy),
    };
    bench.engine.state.owners.insert(TenantId(2), owner);
    bench.run(Micros::from_secs(3));
    for n in 0..3 {
        assert_eq!(class(&bench), Class::Latency, "{n}");
        bench.hardware().groups.get_mut(&2).unwrap().slice = 777;
        bench.run(Micros::from_millis(4100));
    }
    assert_eq!(class(&bench), Class::Batch);
    let shown = bench.engine.view().tampering[&TenantId(2)];
    assert_eq!((shown.findings, shown.lowered), (3, true));
    // Its user cannot raise it; root can.
    let latency = TenantSpec {
        class: Class::Latency,
        ..TenantSpec::default()
    };
    bench.spec(2, latency.clone()).unwrap();
    assert_eq!(class(&bench), Class::Batch);
    let owner = Owner {
        name: "two".into(),
        uid: 7,
        policy: Arc::new(UserPolicy::unlimited()),
    };
    bench.engine.state.owners.insert(TenantId(2), owner);
    let policy = || Arc::new(UserPolicy::unlimited());
    (bench.engine)
        .change(TenantId(2), policy(), latency.clone(), false)
        .unwrap();
    assert_eq!(class(&bench), Class::Batch);
    // What root wishes and cannot be had pardons nothing.
    let too_much = TenantSpec {
        guaranteed: 2.0,
        ..latency.clone()
    };
    let refused = (bench.engine).change(TenantId(2), policy(), too_much, true);
    assert!(refused.is_err());
    let shown = bench.engine.view().tampering[&TenantId(2)];
    assert_eq!((shown.findings, shown.lowered), (3, true));
    (bench.engine)
        .change(TenantId(2), policy(), latency, true)
        .unwrap();
    assert_eq!(class(&bench), Class::Latency);
    assert!(bench.engine.view().tampering.is_empty());
}

#[test]
fn lowered_tenant_is_lowered_with_the_next_daemon() {
    let mut bench = Bench::new();
    let (tenant, policy) = (TenantId(2), || Arc::new(UserPolicy::unlimited()));
    let owner = Owner {
        name: "two".into(),
        uid: 7,
        policy: policy(),
    };
    let spec = TenantSpec {
        class: Class::Latency,
        guaranteed: 0.5,
        ..TenantSpec::default()
    };
    let lowered = Withheld {
        lapsed: false,
        lowered: true,
    };
    // Its settings are kept for when they hold again.
    let again = (bench.engine).admit_again(tenant, owner, &[], spec.clone(), lowered);
    assert_eq!(again, (spec.clone(), None));
    let now = |bench: &Bench| {
        let spec = &bench.engine.state.tenants[&tenant];
        (spec.class, spec.guaranteed)
    };
    assert_eq!(now(&bench), (Class::Batch, 0.0));
    let shown = bench.engine.view().tampering[&tenant];
    assert_eq!((shown.findings, shown.lowered), (0, true));
    let change = |bench: &mut Bench, by_root| {
        let engine = &mut bench.engine;
        engine.change(tenant, policy(), spec.clone(), by_root)
    };
    change(&mut bench, false).unwrap();
    assert_eq!(now(&bench), (Class::Batch, 0.0));
    change(&mut bench, true).unwrap();
    assert_eq!(now(&bench), (Class::Latency, 0.5));
}

#[test]
fn timeslice_that_an_expired_lease_set_is_no_tampering() {
    let mut bench = Bench::new();
    bench.add(1, Class::Latency);
    bench.add(2, Class::Batch);
    bench.run(Micros::from_secs(3));
    bench.hardware().groups.get_mut(&2).unwrap().slice = 2048;
    bench.pages[1].expire();
    bench.engine.touched(SessionId(2), 2);
    bench.run(Micros::from_secs(2));
    assert!(bench.engine.view().tampering.is_empty());
}

#[test]
fn process_that_claims_an_expired_lease_stays_under_control() {
    let mut bench = Bench::new();
    bench.add(1, Class::Latency);
    bench.spec(2, TenantSpec::default()).unwrap();
    let group = bench.group(2, 2, 1);
    bench.meet(2, TenantId(2), Arc::clone(&group.page));
    bench.engine.add(group).unwrap();
    bench.pages[1].slot(2).unwrap().submit();
    for _ in 0..200 {
        bench.engine.renew();
        bench.run(Micros::from_millis(100));
    }
    let set = bench.hardware().groups[&2].slice;
    bench.hardware().groups.get_mut(&2).unwrap().slice = 777_777;
    bench.pages[1].expire();
    for _ in 0..15 {
        bench.engine.renew();
        bench.run(Micros::from_millis(100));
    }
    assert_eq!(bench.hardware().groups[&2].slice, set);
    assert_eq!(bench.engine.view().tampering[&TenantId(2)].findings, 1);
    for _ in 0..40 {
        bench.engine.renew();
        bench.run(Micros::from_millis(100));
    }
    // The lease, and the timeslice.
    assert_eq!(bench.engine.view().tampering[&TenantId(2)].findings, 2);
    // After a daemon stood still, it may be true.
    bench.hardware().now += 500_000;
    bench.engine.renew();
    bench.pages[1].expire();
    bench.run(Micros::from_millis(100));
    assert_eq!(bench.engine.view().domains.len(), 1);
}

/// A tenant whose process is frozen, since its memory is away.
fn frozen() -> Bench {
    let mut bench = Bench::new();
    bench.add(1, Class::Batch);
    bench.park(TenantId(1), true);
    bench.run(Micros::from_millis(10));
    assert!(bench.hardware().groups[&1].frozen);
    bench
}

/// A second, and then what NVML measured.
fn measure(bench: &mut Bench, used: &[(u32, f64)]) {
    bench.run(Micros::from_secs(1));
    bench.engine.know_devices([measured(used)]);
    bench.engine.step();
}

#[test]
fn process_that_thaws_itself_is_frozen_again_and_found() {
    let mut bench = frozen();
    for second in 1..=10 {
        // What is measured beside it makes the measurement worthless at first.
        let own = if second < 7 { 1.0 } else { 0.05 };
        measure(&mut bench, &[(1001, own), (7, 0.9)]);
    }
    assert!(bench.engine.view().tampering.is_empty());
    bench.hardware().groups.get_mut(&1).unwrap().frozen = false;
    measure(&mut bench, &[(1001, 1.0)]);
    assert!(bench.hardware().groups[&1].frozen);
    assert_eq!(bench.domain(1).tampered, 0);
    bench.run(Micros::from_secs(4));
    assert_eq!(bench.domain(1).tampered, 1);
    assert_eq!(bench.engine.view().tampering[&TenantId(1)].findings, 1);
}

#[test]
fn process_with_a_group_that_cannot_be_managed_is_not_found() {
    let mut bench = frozen();
    bench.meet(1, TenantId(1), Arc::new(Page::create().unwrap().0));
    bench.engine.leave_unmanaged(SessionId(1), None);
    for _ in 0..20 {
        measure(&mut bench, &[(1001, 1.0)]);
    }
    assert!(bench.engine.view().tampering.is_empty());
}

#[test]
fn process_with_another_failed_or_shared_group_is_not_found() {
    for broken in [true, false] {
        let mut bench = frozen();
        let mut second = bench.group(1, 2, 1);
        (second.shared, second.member.key) = (!broken, 2);
        if !broken {
            bench.engine.place(TenantId(1), "group".into());
        }
        bench.engine.add(second).unwrap();
        bench.hardware().groups.get_mut(&2).unwrap().broken = broken;
        for _ in 0..20 {
            measure(&mut bench, &[(1001, 1.0)]);
        }
        assert!(bench.engine.view().tampering.is_empty(), "{broken}");
    }
}

#[test]
fn control_that_takes_long_is_no_tampering() {
    let mut bench = Bench::new();
    bench.add(1, Class::Batch);
    // The driver freezes at the end of 1.5 s, and thaws at their beginning.
    bench.hardware().busy = 1_500_000;
    let mut freezes = 0;
    for second in 0..40 {
        let begin = bench.engine.state.now();
        let mut ran = Micros::ZERO;
        bench.park(TenantId(1), second % 4 < 2);
        for _ in 0..100 {
            let frozen = |bench: &Bench| bench.hardware().groups[&1].frozen;
            let (from, before) = (bench.engine.state.now(), frozen(&bench));
            bench.run(Micros::from_millis(10));
            if !before || !frozen(&bench) {
                ran += bench.engine.state.now().saturating_sub(from);
            }
            freezes += u32::from(!before && frozen(&bench));
        }
        let time = bench.engine.state.now().saturating_sub(begin);
        let used = ran.as_secs_f64() / time.as_secs_f64();
        bench.engine.know_devices([measured(&[(1001, used)])]);
        bench.engine.step();
    }
    assert!(freezes > 5);
    assert!(bench.engine.view().tampering.is_empty());
}

/// What NVML reports of a device whose processes used these parts of the last second.
fn measured(used: &[(u32, f64)]) -> crate::devices::Known {
    let at = Instant::now();
    crate::devices::Known {
        uuid: "GPU-0".to_owned(),
        memory_bytes: 80 << 30,
        used_by: Some(crate::devices::Used {
            parts: used.iter().copied().collect(),
            samples: used.iter().map(|(pid, part)| (*pid, (at, *part))).collect(),
        }),
        state: "ok".into(),
        ..Default::default()
    }
}
