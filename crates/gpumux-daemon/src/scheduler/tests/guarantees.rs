//! Guarantees: admission for each device, tenants of several devices, and claims without work.

use gpumux_core::ledger::Holding;
use gpumux_wire::message::Daemon;

use super::*;

#[test]
fn guarantee_that_does_not_fit_changes_nothing() {
    let mut bench = Bench::new();
    bench.add(1, Class::Standard);
    bench.add(2, Class::Standard);
    let guarantee = |guaranteed| TenantSpec {
        guaranteed,
        ..TenantSpec::default()
    };
    bench.spec(1, guarantee(0.7)).unwrap();
    bench.engine.step();
    let before = bench.engine.view().domains;
    let error = bench.spec(2, guarantee(0.5)).unwrap_err().to_string();
    assert!(
        error.contains("tenant 1 (70%)") && error.contains("GPU-0"),
        "{error}"
    );
    assert_eq!(bench.engine.view().domains, before);
    bench.spec(2, guarantee(0.3)).unwrap();
    assert!((bench.domain(2).entitled_share - 0.3).abs() < 1e-6);
    // One that names no device is booked on all that there are.
    assert!(bench.spec(3, guarantee(0.1)).is_err());
    bench.engine.know_devices([crate::devices::Known {
        uuid: "GPU-1".to_owned(),
        gpu: 1,
        sms: None,
        link: None,
        other: None,
        name: String::new(),
        memory_bytes: 80 << 30,
        memory_used: 0,
        readings: Default::default(),
        hardware: Default::default(),
        used_by: None,
        processes: Vec::new(),
        driver: String::new(),
        state: "ok".into(),
    }]);
    let error = bench.spec(3, guarantee(0.1)).unwrap_err().to_string();
    assert!(error.contains("GPU-0"), "{error}");
    bench.engine.confine(TenantId(3), &["GPU-1".to_owned()]);
    assert!(bench.spec(3, guarantee(0.5)).is_err(), "1 may use it, too");
    bench.spec(1, guarantee(0.0)).unwrap();
    bench.spec(3, guarantee(0.7)).unwrap();
}

#[test]
fn a_tenant_on_two_devices_runs_on_both_or_on_none() {
    let mut bench = Bench::new();
    // Tenant 2 has a domain on either device, and each device others that want it.
    for n in 1..=6 {
        bench.add(n, if n == 1 { Class::Latency } else { Class::Batch });
    }
    bench.pages[0].slot(1).unwrap().complete(1);
    for (n, handle) in [(2, 20), (3, 30), (7, 70)] {
        bench
            .spec(
                n,
                TenantSpec {
                    class: Class::Batch,
                    ..TenantSpec::default()
                },
            )
            .unwrap();
        let mut group = bench.group(n, handle, 1);
        group.device = "GPU-1".into();
        bench.hardware().groups.get_mut(&handle).unwrap().device = 1;
        group.member.key = n + 10;
        let slot = bench.pages.last().unwrap().slot(n + 10).unwrap();
        slot.begin_counting();
        slot.submit();
        bench.engine.add(group).unwrap();
    }
    let mut together = [0; 2];
    let end = Micros::from_secs(3);
    while bench.engine.state.now() < end {
        let next = bench.engine.step().unwrap();
        let mut hardware = bench.hardware();
        let frozen = [2, 20].map(|handle| hardware.groups[&handle].frozen);
        assert_eq!(frozen[0], frozen[1], "after {:?}", hardware.pulls);
        together[usize::from(frozen[0])] += 1;
        hardware.now = hardware.now.max(next.0);
    }
    assert!(together[0] > 0 && together[1] > 0, "{together:?}");
}

#[test]
fn confined_tenants_are_guaranteed_per_device() {
    const GIB: u64 = 1 << 30;
    let mut bench = Bench::new();
    let known = |uuid: &str| crate::devices::Known {
        uuid: uuid.to_owned(),
        gpu: 0,
        sms: None,
        link: None,
        other: None,
        name: String::new(),
        memory_bytes: 80 * GIB,
        memory_used: 0,
        readings: Default::default(),
        hardware: Default::default(),
        used_by: None,
        processes: Vec::new(),
        driver: String::new(),
        state: "ok".into(),
    };
    bench.engine.know_devices(["GPU-0", "GPU-1"].map(known));
    let mut make = |n: u32, device: &str, guaranteed, memory_guaranteed| {
        let (id, devices) = (TenantId(n.into()), [device.to_owned()]);
        bench.engine.confine(id, &devices);
        let spec = TenantSpec {
            guaranteed,
            memory_guaranteed,
            ..TenantSpec::default()
        };
        let made = bench.engine.set_spec(id, spec);
        made.map_err(|error| {
            bench.engine.forget(id);
            error.to_string()
        })
    };
    // Each device has its own 100% and its own memory, also before anything runs there.
    make(1, "GPU-0", 0.9, 60 * GIB).unwrap();
    make(2, "GPU-1", 0.9, 60 * GIB).unwrap();
    let error = make(3, "GPU-1", 0.2, 0).unwrap_err();
    assert!(
        error.contains("GPU 0 (GPU-1)") && error.contains("90%"),
        "{error}"
    );
    let error = make(3, "GPU-1", 0.0, 30 * GIB).unwrap_err();
    assert!(error.contains("cannot guarantee 30.0 GiB"), "{error}");
    make(3, "GPU-1", 0.1, 10 * GIB).unwrap();
    // All that a device is said to guarantee can be guaranteed, contexts included.
    bench.engine.forget(TenantId(2));
    bench.engine.forget(TenantId(3));
    let device = &bench.engine.view().devices[1];
    let (all, context) = (device.memory_guaranteeable, device.context_bytes);
    assert!(all > 79 * GIB && context > 0);
    bench.engine.confine(TenantId(2), &["GPU-1".to_owned()]);
    let whole = TenantSpec {
        memory_guaranteed: all - context,
        ..TenantSpec::default()
    };
    // It has a context itself.
    let more = TenantSpec {
        memory_guaranteed: all - context + 1,
        ..TenantSpec::default()
    };
    let error = bench.spec(2, more).unwrap_err().to_string();
    assert!(error.contains("can be guaranteed"), "{error}");
    bench.spec(2, whole).unwrap();
    let mut group = bench.group(2, 2, 1);
    group.device = "GPU-1".into();
    bench.engine.add(group).unwrap();
    let device = &bench.engine.view().devices[1];
    assert_eq!(device.memory_guaranteeable, all, "whoever runs there");
}

#[test]
fn confined_tenant_on_another_device_is_refused() {
    let mut bench = Bench::new();
    let tenant = TenantId(1);
    bench.engine.confine(tenant, &["GPU-1".to_owned()]);
    bench.spec(1, TenantSpec::default()).unwrap();
    let group = bench.group(1, 1, 1);
    let error = bench.engine.add(group).unwrap_err();
    assert_eq!(
        error.to_string(),
        "its tenant may not use device GPU-0: run it on GPU-1"
    );
    let mut group = bench.group(1, 2, 1);
    group.device = "GPU-1".into();
    bench.engine.add(group).unwrap();
    let (page, session) = (Page::create().unwrap().1, SessionId(1));
    let page = Arc::new(Page::open(page).unwrap());
    bench.meet(1, tenant, page);
    for (ticket, device) in ["GPU-0", "GPU-1"].into_iter().enumerate() {
        bench.engine.memory_event(Event::Ask {
            process: ProcessId(session.0),
            ticket: ticket as u32,
            ask: Ask {
                device: device.into(),
                total: 80 << 30,
                need: 1 << 30,
                want: 1 << 30,
                kind: Kind::Movable,
                part: None,
            },
        });
    }
    bench.run(Micros::from_secs(1));
    let lines = bench.engine.view().memory;
    let has = |line: &Line| {
        let own = line.entries.iter().find(|(id, _)| *id == tenant);
        own.map_or(0, |(_, entry)| entry.holding.resident())
    };
    let granted: Vec<(&str, u64)> = (lines.iter())
        .map(|line| (line.uuid.as_str(), has(line)))
        .filter(|(_, bytes)| *bytes > 0)
        .collect();
    assert_eq!(granted, [("GPU-1", 1 << 30)]);
}

/// A user's tenant of this name, whose guarantees lapse after so many seconds without work.
fn owner(name: &str, expires: Option<u64>) -> super::Owner {
    let rules = gpumux_core::admission::UserRules {
        guarantee_expires_s: expires,
        ..Default::default()
    };
    let policy = gpumux_core::admission::UserPolicy::new("alice".into(), false, &rules);
    super::Owner {
        name: name.into(),
        uid: 1000,
        policy: policy.into(),
    }
}

#[test]
fn guarantee_lapses_without_work_and_holds_again_with_it() {
    let mut bench = Bench::new();
    let owner = |name: &str| owner(name, Some(10));
    let spec = |guaranteed| TenantSpec {
        guaranteed,
        ..TenantSpec::default()
    };
    let sleeper = TenantId(1);
    bench
        .engine
        .admit(sleeper, owner("sleeper"), spec(0.7))
        .unwrap();
    let group = bench.group(1, 1, 1);
    bench.engine.add(group).unwrap();
    bench.engine.step();
    let wish =
        |bench: &mut Bench, share| bench.engine.admit(TenantId(2), owner("new"), spec(share));
    assert!(wish(&mut bench, 0.6).is_err(), "it holds yet");
    bench.hardware().now += 9_000_000;
    assert!(wish(&mut bench, 0.6).is_err(), "it holds yet");
    bench.hardware().now += 2_000_000;
    wish(&mut bench, 0.6).unwrap();
    assert!(bench.engine.view().lapsed.contains(&sleeper));
    // What is changed meanwhile needs no room for them, unless it is more.
    let heavier = TenantSpec {
        weight: 2.0,
        ..spec(0.7)
    };
    bench.engine.set_spec(sleeper, heavier).unwrap();
    assert!(bench.engine.set_spec(sleeper, spec(0.8)).is_err());
    let now = &bench.engine.state.tenants[&sleeper];
    assert_eq!((now.weight, now.guaranteed), (2.0, 0.0));
    // Work comes, but there is no room.
    bench.pages[0].slot(1).unwrap().submit();
    bench.engine.step();
    assert!(bench.engine.view().lapsed.contains(&sleeper));
    bench.engine.forget(TenantId(2));
    bench.hardware().now += 1_000;
    bench.engine.step();
    assert!(!bench.engine.view().lapsed.contains(&sleeper));
    assert_eq!(bench.engine.state.tenants[&sleeper].guaranteed, 0.7);
}

/// The last daemon had admitted it when another's guarantee had lapsed; this one knows nothing of that.
#[test]
fn tenant_whose_guarantee_does_not_fit_again_keeps_all_else() {
    for expires in [None, Some(10)] {
        let mut bench = Bench::new();
        let spec = TenantSpec {
            guaranteed: 0.7,
            weight: 3.0,
            limit: 0.9,
            ..TenantSpec::default()
        };
        let group = bench.group(1, 1, 1);
        let again = |bench: &mut Bench, n: u64| {
            let owner = owner(&n.to_string(), expires);
            let none = Withheld::default();
            (bench.engine).admit_again(TenantId(n), owner, &[], spec.clone(), none)
        };
        assert!(again(&mut bench, 1).1.is_none());
        bench.engine.add(group).unwrap();
        let (kept, why) = again(&mut bench, 2);
        assert!(why.is_some());
        let now = &bench.engine.state.tenants[&TenantId(2)];
        assert_eq!((now.guaranteed, now.weight, now.limit), (0.0, 3.0, 0.9));
        assert_eq!(kept.guaranteed, expires.map_or(0.0, |_| 0.7));
        // It has work, and gets it once it fits.
        bench.engine.forget(TenantId(1));
        let group = bench.group(2, 2, 1);
        bench.engine.add(group).unwrap();
        bench.pages.last().unwrap().slot(2).unwrap().submit();
        bench.run(Micros::from_secs(2));
        let now = &bench.engine.state.tenants[&TenantId(2)];
        assert_eq!(now.guaranteed, kept.guaranteed);
    }
}

/// Neither has work. Of both, the next daemon may meet either first.
#[test]
fn what_has_lapsed_is_not_taken_from_others_by_the_next_daemon() {
    let spec = TenantSpec {
        guaranteed: 0.7,
        ..TenantSpec::default()
    };
    let lapsed = Withheld {
        lapsed: true,
        lowered: false,
    };
    let (sleeper, holder) = (TenantId(1), TenantId(2));
    for order in [[sleeper, holder], [holder, sleeper]] {
        let mut bench = Bench::new();
        for tenant in order {
            let (expires, withheld) = match tenant == sleeper {
                true => (Some(10), lapsed),
                false => (None, Withheld::default()),
            };
            let owner = owner(&tenant.0.to_string(), expires);
            let again = (bench.engine).admit_again(tenant, owner, &[], spec.clone(), withheld);
            assert_eq!(again, (spec.clone(), None));
        }
        let group = bench.group(1, 1, 1);
        bench.engine.add(group).unwrap();
        bench.run(Micros::from_secs(1));
        let holds = |bench: &Bench, tenant| bench.engine.state.tenants[&tenant].guaranteed;
        assert_eq!((holds(&bench, sleeper), holds(&bench, holder)), (0.0, 0.7));
        assert_eq!(bench.engine.view().lapsed, [sleeper].into());
        // It holds again with its work, once it fits.
        bench.engine.forget(holder);
        bench.pages.last().unwrap().slot(1).unwrap().submit();
        bench.run(Micros::from_secs(1));
        assert_eq!(holds(&bench, sleeper), 0.7);
    }
}

#[test]
fn work_that_begins_and_ends_between_two_looks_counts() {
    let mut bench = Bench::new();
    let owner = owner("server", Some(10));
    let server = TenantId(1);
    let spec = TenantSpec {
        guaranteed: 0.7,
        memory_guaranteed: 1 << 30,
        sleep_after_s: Some(10),
        ..TenantSpec::default()
    };
    bench.engine.admit(server, owner, spec).unwrap();
    let group = bench.group(1, 1, 1);
    let page = Arc::clone(&group.page);
    bench.engine.add(group).unwrap();
    bench.meet(1, server, page);
    let holding = Holding {
        movable: 1 << 30,
        ..Holding::default()
    };
    bench.engine.memory_event(Event::Holds {
        process: ProcessId(1),
        device: "GPU-0".into(),
        total: 80 << 30,
        holding,
    });
    let moves = |bench: &Bench| {
        let received = bench.received(1);
        received
            .iter()
            .any(|it| matches!(it, Daemon::Quiesce { .. }))
    };
    let settle = |bench: &mut Bench| {
        bench.run(Micros::from_secs(1));
        bench.engine.expire_guarantees();
    };
    for request in 1..=30 {
        let slot = bench.pages[0].slot(1).unwrap();
        slot.submit();
        slot.complete(request);
        settle(&mut bench);
        assert!(bench.engine.view().lapsed.is_empty(), "{request}");
        assert!(!moves(&bench), "{request}");
    }
    for _ in 0..15 {
        settle(&mut bench);
    }
    assert!(bench.engine.view().lapsed.contains(&server));
    assert!(moves(&bench));
}

#[test]
fn sleep_that_comes_after_all_time_harms_none() {
    let mut bench = Bench::new();
    for (n, seconds) in [(1, u64::MAX), (2, u64::MAX / 1_000_000)] {
        let spec = TenantSpec {
            sleep_after_s: Some(seconds),
            ..TenantSpec::default()
        };
        bench.spec(n, spec).unwrap();
        let group = bench.group(n, n, 1);
        bench.engine.add(group).unwrap();
    }
    bench.run(Micros::from_secs(2));
    assert_eq!(bench.engine.view().domains.len(), 2);
}
