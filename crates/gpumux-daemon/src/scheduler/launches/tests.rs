use gpumux_core::{Class, Demand, TenantId, TenantSpec};
use gpumux_wire::permits::{Permits, Permitted, Word};

use super::{super::tests::Bench, *};
use crate::scheduler::{GroupError, Launches, NewGroup};

/// Tenant, session, process and group `n` of this class, without work, which reads the permits that are returned.
fn add(bench: &mut Bench, n: u32, class: Class) -> Result<Permitted, GroupError> {
    let spec = TenantSpec {
        class,
        ..TenantSpec::default()
    };
    bench.spec(n, spec).unwrap();
    let (page, file) = Permits::create().unwrap();
    let launches = Launches {
        page: page.into(),
        key: n,
        why: "they are refused".into(),
    };
    let group = NewGroup {
        controls: launches.controls(2048),
        launches: Some(launches),
        ..bench.group(n, n, 1)
    };
    bench.engine.add(group)?;
    Ok(Permitted::open(file).unwrap())
}

fn bench() -> Bench {
    let mut bench = Bench::new();
    bench.engine.state.device("GPU-0".into(), "priority");
    bench
}

#[test]
fn request_holds_other_launches_at_the_next_look() {
    let mut bench = bench();
    let serve = add(&mut bench, 1, Class::Latency).unwrap();
    let train = add(&mut bench, 2, Class::Batch).unwrap();
    bench.pages[1].slot(2).unwrap().submit();
    bench.run(Micros::from_millis(50));
    let look = |bench: &mut Bench| {
        let next = bench.engine.schedule_launches().unwrap();
        assert!(next <= bench.engine.state.now() + LOOK);
        (serve.word(1).permit, train.word(2).permit)
    };
    let some = Permit::Budget(runlist::OUTSTANDING.0 as u32);
    assert_eq!(look(&mut bench), (Permit::Free, some));
    bench.pages[0].slot(1).unwrap().submit();
    assert_eq!(look(&mut bench), (Permit::Free, Permit::Hold));
    bench.pages[0].slot(1).unwrap().complete(1);
    assert_eq!(look(&mut bench), (Permit::Free, some));
}

/// The objective stands for what a launch-bound program shows: its neighbour's timeslice is long.
#[test]
fn neighbour_with_a_long_timeslice_launches_in_gaps() {
    let mut bench = bench();
    let decode = add(&mut bench, 1, Class::Latency).unwrap();
    let train = add(&mut bench, 2, Class::Batch).unwrap();
    let spec = TenantSpec {
        class: Class::Latency,
        latency_objective_us: Some(20_000),
        ..TenantSpec::default()
    };
    bench.spec(1, spec).unwrap();
    bench.pages[1].slot(2).unwrap().submit();
    bench.run(Micros::from_millis(50));
    let look = |bench: &mut Bench| {
        bench.run(LOOK);
        bench.engine.schedule_launches();
        let launches = train.word(2).permit != Permit::Hold;
        // What it launched is done by the next look, and it would launch more.
        let slot = bench.pages[1].slot(2).unwrap();
        slot.complete(slot.submitted());
        if launches {
            slot.submit();
        } else if !slot.waits_to_launch() {
            slot.begin_wait();
        }
        (decode.word(1), launches)
    };
    let free = Word {
        permit: Permit::Free,
        watched: true,
    };
    let mut turns = [0, 0];
    for _ in 0..100 {
        let piece = bench.pages[0].slot(1).unwrap().submit();
        for done in [false, true] {
            let (word, launches) = look(&mut bench);
            assert_eq!(word, free, "it goes on launching");
            turns[usize::from(launches)] += 1;
            if done {
                bench.pages[0].slot(1).unwrap().find_complete(piece);
            }
        }
    }
    let [held, launches] = turns;
    assert!(held > 5 && launches > 150, "{turns:?}");
}

#[test]
fn frozen_group_is_held_at_once() {
    let mut bench = bench();
    let serve = add(&mut bench, 1, Class::Latency).unwrap();
    let batch = [2, 3].map(|n| add(&mut bench, n, Class::Batch).unwrap());
    for n in [2, 3] {
        bench.pages[n - 1].slot(n as u32).unwrap().submit();
    }
    let mut held = [0, 0];
    for _ in 0..50 {
        bench.run(Micros::from_millis(10));
        bench.engine.schedule_launches();
        let now = [0, 1].map(|n| batch[n].word(n as u32 + 2).permit == Permit::Hold);
        assert!(now[0] || now[1], "both would run");
        held = [0, 1].map(|n| held[n] + u32::from(now[n]));
    }
    assert!(held.iter().all(|it| *it > 5), "{held:?}");
    assert_eq!(serve.word(1).permit, Permit::Free);
}

/// Else nothing would let it run.
#[test]
fn thread_that_waits_to_launch_is_demand() {
    let mut bench = bench();
    let _train = add(&mut bench, 2, Class::Batch).unwrap();
    let slot = bench.pages[0].slot(2).unwrap();
    slot.begin_wait();
    assert_eq!(bench.domain(2).demand, Demand::Busy);
    bench.pages[0].slot(2).unwrap().end_wait();
    assert_eq!(bench.domain(2).demand, Demand::Idle);
    assert_eq!(bench.domain(2).held_launches, 1);
}

/// The process names the device; the driver has confirmed nothing.
#[test]
fn group_on_an_unlisted_device_is_refused() {
    let mut bench = Bench::new();
    let refused = add(&mut bench, 1, Class::Batch).unwrap_err();
    assert!(refused.to_string().contains("GPU-0"), "{refused}");
    assert!(!bench.engine.state.devices.contains_key("GPU-0"));
    assert_eq!(bench.engine.state.domains().count(), 0);
    bench.engine.forget(TenantId(1));
}
