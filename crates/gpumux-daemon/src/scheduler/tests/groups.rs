//! MPS groups: one channel group to the policy, its members, its crashes.

use super::*;

#[test]
fn a_group_is_one_domain_to_the_policy() {
    let mut bench = Bench::new();
    bench.add(1, Class::Latency);
    bench.pages[0].slot(1).unwrap().complete(1);
    bench.member(2, 50, "team");
    bench.member(3, 50, "team");
    bench.add(4, Class::Batch);
    bench.run(Micros::from_secs(3));
    let [a, b, alone] = [2, 3, 4].map(|n| bench.domain(n));
    assert!(a.group.is_some() && a.group == b.group && alone.group.is_none());
    assert_eq!((a.frozen, a.timeslice_us), (b.frozen, b.timeslice_us));
    assert_ne!(a.frozen, alone.frozen, "they alternate");
    // It weighs what its members weigh together, and each has what the group has.
    let part = a.received_us as f64 / (a.received_us + alone.received_us) as f64;
    assert!((0.62..0.71).contains(&part), "{part}");
    assert!(
        a.received_us.abs_diff(b.received_us) < 50_000,
        "{a:?} {b:?}"
    );
    // Every member's controls are pulled.
    let pulls = bench.take_pulls();
    let freezes = pulls
        .iter()
        .filter(|pull| **pull == Pull::Freeze(50))
        .count() as u64;
    assert_eq!(freezes, a.freezes + b.freezes);
}

#[test]
fn a_member_is_busy_only_while_it_has_work_itself() {
    let mut bench = Bench::new();
    bench.member(2, 50, "team");
    bench.member(3, 50, "team");
    bench.run(Micros::from_secs(1));
    bench.pages[1].slot(3).unwrap().complete(1);
    bench.run(Micros::from_secs(1));
    let received = [2, 3].map(|n| bench.domain(n).received_us / 100_000);
    assert!(
        received.iter().all(|it| (19..=20).contains(it)),
        "{received:?}"
    );
    let [works, rests] = [2, 3].map(|n| bench.domain(n).id);
    let busy = bench.engine.view().busy_us;
    assert!((1_900_000..=2_000_000).contains(&busy[&works]), "{busy:?}");
    assert!((900_000..=1_100_000).contains(&busy[&rests]), "{busy:?}");
}

#[test]
fn several_channel_groups_of_a_group_member_are_counted_once() {
    let mut bench = Bench::new();
    bench.member(2, 50, "team");
    for key in [3, 4] {
        let group = NewGroup {
            shared: true,
            ..bench.group(key, 50, 1)
        };
        let member = Member {
            session: SessionId(2),
            key,
            pid: 1002,
            handles: (key, 50),
        };
        let group = NewGroup {
            member,
            tenant: TenantId(2),
            ..group
        };
        bench.engine.add(group).unwrap();
        bench.pages.last().unwrap().slot(key).unwrap().submit();
    }
    let total = |bench: &mut Bench| {
        let view = bench.engine.view();
        let share: f64 = view.domains.iter().map(|(_, it)| it.received_share).sum();
        let key = (TenantId(2), "GPU-0".to_owned());
        (view.totals[&key].received_us / 1e6, share)
    };
    bench.run(Micros::from_secs(2));
    let (received, share) = total(&mut bench);
    assert!((1.9..2.1).contains(&received), "{received} s");
    assert!((0.9..1.01).contains(&share), "{share}");
    // The one that counts goes: another one counts, from then on.
    bench.engine.gone(SessionId(2), 2);
    bench.run(Micros::from_secs(2));
    let (received, _) = total(&mut bench);
    assert!((3.9..4.1).contains(&received), "{received} s");
}

#[test]
fn members_come_and_go_without_changing_what_the_group_has() {
    let mut bench = Bench::new();
    bench.add(1, Class::Latency);
    bench.pages[0].slot(1).unwrap().complete(1);
    bench.add(4, Class::Batch);
    bench.member(2, 50, "team");
    while !bench.domain(2).frozen {
        bench.run(Micros::from_millis(5));
    }
    bench.take_pulls();
    bench.member(3, 50, "team");
    bench.engine.step();
    let pulls = bench.take_pulls();
    assert!(
        pulls.ends_with(&[Pull::Freeze(50), Pull::Set(50, 1)]),
        "{pulls:?}"
    );
    assert!(bench.domain(3).frozen);
    // One leaves, alive: the slice is the other's too.
    bench.engine.leave(SessionId(3), true);
    assert_eq!(bench.take_pulls(), []);
    // One dies: only the daemon can thaw its channels.
    bench.member(5, 50, "team");
    bench.engine.step();
    bench.take_pulls();
    bench.hardware().groups.get_mut(&50).unwrap().slice = 2048;
    bench.engine.leave(SessionId(5), false);
    assert_eq!(bench.take_pulls(), [Pull::Thaw(50)]);
    bench.engine.leave(SessionId(2), true);
    assert!(bench.take_pulls().contains(&Pull::Set(50, 2048)));
}

#[test]
fn group_is_frozen_while_memory_of_one_member_is_mapped_anew() {
    let mut bench = Bench::new();
    bench.member(2, 50, "team");
    bench.member(3, 50, "team");
    bench.add(4, Class::Batch);
    let frozen = |bench: &mut Bench, all: &[u32]| {
        bench.run(Micros::from_millis(100));
        let all = all.iter().map(|n| bench.domain(*n).frozen);
        all.collect::<Vec<_>>()
    };
    bench.park(TenantId(2), true);
    assert_eq!(frozen(&mut bench, &[2, 3, 4]), [true, true, false]);
    bench.member(5, 50, "team");
    assert_eq!(frozen(&mut bench, &[2, 3, 5]), [true; 3]);
    bench.park(TenantId(2), false);
    bench.engine.leave(SessionId(4), false);
    assert_eq!(frozen(&mut bench, &[2, 3, 5]), [false; 3]);
    // It ends meanwhile.
    bench.park(TenantId(2), true);
    assert_eq!(frozen(&mut bench, &[3, 5]), [true; 2]);
    bench.engine.leave(SessionId(2), false);
    assert_eq!(frozen(&mut bench, &[3, 5]), [false; 2]);
}

#[test]
fn crash_in_a_group_is_reported_once_and_no_other_crash() {
    let mut bench = Bench::new();
    let (tell, mut told) = tokio::sync::mpsc::unbounded_channel();
    bench.engine.crashes.report_to(tell);
    let come = |bench: &mut Bench, n: u32| {
        let (page, file) = Page::create().unwrap();
        let page_of_daemon = Arc::new(Page::open(file).unwrap());
        bench.meet(n.into(), TenantId(n.into()), page_of_daemon);
        page
    };
    bench.member(2, 50, "team");
    bench.member(3, 50, "team");
    // Placed in the group, but with a context of its own.
    bench.member(5, 60, "team");
    bench.engine.leave(SessionId(5), false);
    let own = bench.group(5, 60, 1);
    bench.engine.add(own).unwrap();
    bench.add(4, Class::Batch);
    let pages = [2, 3, 4, 5].map(|n| come(&mut bench, n));
    pages[0].set_fault(700);
    pages[0].set_fault(719);
    pages[2].set_fault(700);
    pages[3].set_fault(700);
    for _ in 0..2 {
        bench.engine.step();
    }
    let crash = match told.try_recv() {
        Ok(crate::failure::Failure::Process(crash)) => crash,
        other => panic!("{other:?}"),
    };
    assert_eq!((crash.pid, crash.error, &*crash.group), (1002, 700, "team"));
    assert!(told.try_recv().is_err());
    let pids: Vec<u32> = bench
        .engine
        .give_up("team")
        .iter()
        .map(|it| it.pid)
        .collect();
    assert_eq!(pids, [1003], "a crash is not reported again");

    // One whose context was its own says so after that has gone.
    bench.member(6, 60, "team");
    bench.engine.leave(SessionId(6), false);
    let page = come(&mut bench, 6);
    let own = bench.group(6, 61, 1);
    bench.engine.add(own).unwrap();
    bench.engine.gone(SessionId(6), 6);
    page.set_fault(700);
    bench.engine.step();
    assert!(told.try_recv().is_err());
}

#[test]
fn session_begun_anew_in_a_lost_group_does_not_wait_unbounded() {
    let mut bench = Bench::new();
    let (tell, mut told) = tokio::sync::mpsc::unbounded_channel();
    bench.engine.crashes.report_to(tell);
    bench.engine.place(TenantId(2), "team".into());
    let (page, file) = Page::create().unwrap();
    let opened = Arc::new(Page::open(file).unwrap());
    bench.meet(2, TenantId(2), opened);
    bench.engine.leave_unmanaged(SessionId(2), Some(7));
    let slot = page.slot(7).unwrap();
    slot.begin_counting();
    // As the thread does while there are sessions, although nothing happens.
    let run = |bench: &mut Bench, seconds: u64| {
        for _ in 0..seconds * 10 {
            bench.hardware().now += 100_000;
            bench.engine.step();
        }
    };
    run(&mut bench, 5);
    assert!(told.try_recv().is_err(), "it has no work");
    // One that gets on has not lost its server.
    for _ in 0..5 {
        slot.submit();
        run(&mut bench, 1);
    }
    assert!(told.try_recv().is_err());
    run(&mut bench, 2);
    assert!(matches!(
        told.try_recv(),
        Ok(crate::failure::Failure::Stuck { pid: 1002, .. })
    ));
    bench.engine.gone(SessionId(2), 7);
    run(&mut bench, 5);
    assert!(told.try_recv().is_err());
}

#[test]
fn process_that_lost_its_group_neither_runs_nor_waits_unbounded() {
    let mut bench = Bench::new();
    let (tell, mut told) = tokio::sync::mpsc::unbounded_channel();
    bench.engine.crashes.report_to(tell);
    bench.add(1, Class::Batch);
    // The second knows it, the third has no work.
    let mut errors = Vec::new();
    for n in [2, 3, 4] {
        bench.member(n, 50, "team");
        let (page, file) = Page::create().unwrap();
        let opened = Arc::new(Page::open(file).unwrap());
        bench.meet(n.into(), TenantId(n.into()), opened);
        errors.push(page);
    }
    bench.pages[3].slot(4).unwrap().complete(1);
    bench.run(Micros::from_secs(3));
    assert!(told.try_recv().is_err(), "nothing has failed");
    // An assertion is the affair of one alone.
    errors[1].set_fault(710);
    errors[1].receive_fault();
    bench.run(Micros::from_secs(1));
    assert!(told.try_recv().is_err());
    assert!(!bench.engine.has_unaware("team"));
    assert_eq!(bench.engine.give_up("team").len(), 3);
    assert!(bench.engine.has_unaware("team"));
    bench.run(Micros::from_millis(100));
    let had = bench.domain(2).received_us;
    bench.run(Micros::from_millis(1800));
    assert_eq!(bench.domain(2).received_us, had);
    assert!(told.try_recv().is_err(), "not yet");
    bench.run(Micros::from_millis(200));
    let stuck = match told.try_recv() {
        Ok(crate::failure::Failure::Stuck { pid, .. }) => pid,
        other => panic!("{other:?}"),
    };
    assert_eq!(stuck, 1002);
    assert!(told.try_recv().is_err());
    // Its library has asked the driver, while the program still waits.
    errors[0].set_fault(806);
    assert!(bench.engine.has_unaware("team"));
    bench.run(Micros::from_secs(2));
    assert!(matches!(
        told.try_recv(),
        Ok(crate::failure::Failure::Stuck { pid: 1002, .. })
    ));
    errors[0].receive_fault();
    assert!(!bench.engine.has_unaware("team"));
    bench.run(Micros::from_secs(5));
    assert!(told.try_recv().is_err(), "it knows it now");
}

#[test]
fn ended_member_is_remembered_with_its_work_for_a_while() {
    let mut bench = Bench::new();
    let mut files = Vec::new();
    for (n, group) in [
        (2, "team"),
        (3, "team"),
        (4, "other"),
        (5, "team"),
        (6, "team"),
    ] {
        bench.member(n, 50, group);
        let (page, file) = Page::create().unwrap();
        let opened = Arc::new(Page::open(file).unwrap());
        bench.meet(n.into(), TenantId(n.into()), opened);
        files.push(page);
    }
    bench.run(Micros::from_secs(1));
    // Its last piece of work was done, although the daemon has not looked since.
    bench.pages[1].slot(3).unwrap().complete(1);
    // A process that exits frees what it has first.
    bench.engine.gone(SessionId(6), 6);
    for n in [2, 3, 4, 6] {
        bench.engine.leave(SessionId(n), false);
    }
    bench.run(Micros::from_secs(1));
    let mut told = bench.engine.give_up("team");
    told.sort_by_key(|crash| crash.pid);
    let seen: Vec<_> = (told.iter())
        .map(|it| (it.pid, it.busy, it.ended_ms.is_some()))
        .collect();
    assert_eq!(
        seen,
        [
            (1002, true, true),
            (1003, false, true),
            (1005, true, false),
            (1006, true, true)
        ]
    );
    assert!(
        (1000..1100).contains(&told[0].ended_ms.unwrap()),
        "{told:?}"
    );
    assert_eq!(bench.engine.give_up("team"), [], "once");
    bench.run(Micros::from_secs(2));
    assert_eq!(bench.engine.give_up("other"), [], "too long ago");
}

/// What `tests/e2e` measures as `noticed_after_ms`, on the engine's own clock.
#[test]
fn crash_is_reported_within_a_tenth_of_a_second_beside_others() {
    for others in [0, 1, 8] {
        let mut bench = Bench::new();
        let (tell, mut told) = tokio::sync::mpsc::unbounded_channel();
        bench.engine.crashes.report_to(tell);
        bench.member(2, 50, "team");
        for other in 0..others {
            bench.add(3 + other, Class::Standard);
        }
        let (page, file) = Page::create().unwrap();
        let opened = Arc::new(Page::open(file).unwrap());
        bench.meet(2, TenantId(2), opened);
        bench.run(Micros::from_secs(1));
        page.set_fault(700);
        bench.run(Micros::from_millis(100));
        assert!(told.try_recv().is_ok(), "beside {others} others");
    }
}
