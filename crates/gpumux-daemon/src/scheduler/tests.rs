//! The scheduler on controls that only record their calls, and on a clock that only they move.

use std::{
    collections::BTreeMap,
    io,
    sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc},
    time::{Duration, Instant},
};

use gpumux_core::{
    Class, Micros, TenantId, TenantSpec, Timeslice,
    admission::UserPolicy,
    broker::{Ask, Event, Line, ProcessId},
    ledger::Kind,
    tamper::{TamperRule, Then},
};
use gpumux_rm::{ControlError, ControlFailure, Controls, Interleave, PreemptionMode, RmStatus};
use gpumux_wire::{
    lease::{LOOK, Lease, Leased},
    page::{HintCounts, Page},
};

use super::{
    GroupError, Left, Member, Met, NewGroup, Owner, SessionId, What, engine::Engine, model::Clock,
    renewal::Renewal, thread::used,
};
use crate::{api::types, config::Config};

/// What each control takes on this device.
const COST: u64 = 100;

#[derive(Clone, Debug, PartialEq, Eq)]
enum Pull {
    Freeze(u32),
    Thaw(u32),
    Set(u32, u64),
}

#[derive(Clone, Copy, Debug)]
struct Group {
    device: u32,
    slice: u64,
    frozen: bool,
    broken: bool,
}

/// The hardware: groups by handle. Complains when two that may run have a slice of 1 µs.
#[derive(Default)]
struct Hardware {
    now: u64,
    pulls: Vec<Pull>,
    groups: BTreeMap<u32, Group>,
    closed: Vec<u32>,
    /// What a control takes besides [`COST`]: the driver does other things first.
    busy: u64,
    /// A process that watches the lease, and when it looked last.
    lease: Option<Leased>,
    looked: u64,
    expired: bool,
}

impl Hardware {
    /// Time passes, and the process looks at its lease.
    fn pass(&mut self, time: u64) {
        self.now += time;
        let every = LOOK.as_micros() as u64;
        while self.looked + every <= self.now {
            self.looked += every;
            self.expired |= self.lease.as_mut().is_some_and(Leased::look);
        }
    }
}

type Shared = Arc<Mutex<Hardware>>;

/// Also after a test has failed in the middle of it, or its cleaning up would hide why.
fn lock(hardware: &Shared) -> MutexGuard<'_, Hardware> {
    hardware.lock().unwrap_or_else(PoisonError::into_inner)
}

fn stuck() -> ControlFailure {
    let source = ControlError::Status(RmStatus::INVALID_CHANNEL);
    ControlFailure {
        control: "fake",
        source,
    }
}

struct FakeControls {
    group: u32,
    hardware: Shared,
}

impl FakeControls {
    fn pull(&self, pull: Pull, change: impl FnOnce(&mut Group)) -> Result<(), ControlFailure> {
        let mut hardware = lock(&self.hardware);
        let time = COST + hardware.busy;
        hardware.pass(time);
        let group = hardware.groups.get_mut(&self.group).unwrap();
        if group.broken {
            return Err(stuck());
        }
        change(group);
        let device = group.device;
        hardware.pulls.push(pull);
        let livelocked = |group: &&Group| {
            group.device == device && group.slice == 1 && !group.frozen && !group.broken
        };
        assert!(
            hardware.groups.values().filter(livelocked).count() < 2,
            "{:?}",
            hardware.pulls
        );
        Ok(())
    }
}

impl Controls for FakeControls {
    fn set_timeslice(&self, us: u64) -> Result<(), ControlFailure> {
        self.pull(Pull::Set(self.group, us), |group| group.slice = us)
    }
    fn timeslice(&self) -> Result<u64, ControlFailure> {
        let group = lock(&self.hardware).groups[&self.group];
        match group.broken {
            true => Err(stuck()),
            false => Ok(group.slice),
        }
    }
    fn freeze(&self) -> Result<(), ControlFailure> {
        self.pull(Pull::Freeze(self.group), |group| group.frozen = true)
    }
    fn thaw(&self) -> Result<(), ControlFailure> {
        self.pull(Pull::Thaw(self.group), |group| group.frozen = false)
    }
    fn set_preemption_mode(&self, _: PreemptionMode) -> Result<(), ControlFailure> {
        Ok(())
    }
    fn set_interleave(&self, _: Interleave) -> Result<(), ControlFailure> {
        Ok(())
    }
    fn device_uuid(&self) -> Result<String, ControlFailure> {
        Ok("GPU-0".into())
    }
    fn set_channels(&mut self, _: Vec<u32>) {}
}

impl Drop for FakeControls {
    fn drop(&mut self) {
        lock(&self.hardware).closed.push(self.group);
    }
}

/// An engine, its hardware, and the controls that it threw away.
struct Bench {
    engine: Engine,
    hardware: Shared,
    dead: mpsc::Receiver<Box<dyn Send>>,
    pages: Vec<Page>,
}

impl Bench {
    fn new() -> Self {
        Self::with(Config::default())
    }

    fn with(config: Config) -> Self {
        let hardware = Shared::default();
        let clock = Arc::clone(&hardware);
        let (reaper, dead) = mpsc::channel();
        let clock: Clock = Arc::new(move || Micros(lock(&clock).now));
        let (lease, file) = Lease::create().unwrap();
        let renewal = Arc::new(Renewal::new(Some(lease), Arc::clone(&clock)));
        lock(&hardware).lease = Some(Leased::open(file).unwrap());
        let engine = Engine::new(Arc::new(config), clock, reaper, renewal);
        Self {
            engine,
            hardware,
            dead,
            pages: Vec::new(),
        }
    }

    fn hardware(&self) -> MutexGuard<'_, Hardware> {
        lock(&self.hardware)
    }

    /// Tenant, session, process and group `n` of this class; always busy.
    fn add(&mut self, n: u32, class: Class) {
        self.spec(
            n,
            TenantSpec {
                class,
                ..TenantSpec::default()
            },
        )
        .unwrap();
        let group = self.group(n, n, 1);
        self.engine.add(group).unwrap();
        self.pages.last().unwrap().slot(n).unwrap().submit();
    }

    fn park(&mut self, tenant: TenantId, swapped_out: bool) {
        let Engine { moves, state, .. } = &mut self.engine;
        moves.park(state, tenant, swapped_out);
    }

    fn moved(&mut self, tenant: TenantId, out: bool, bytes: u64, took: Micros) {
        let Engine { moves, state, .. } = &mut self.engine;
        moves.moved(state, tenant, out, bytes, took);
    }

    fn spec(&mut self, n: u32, spec: TenantSpec) -> Result<(), gpumux_core::admission::Refusal> {
        self.engine.set_spec(TenantId(n.into()), spec)
    }

    fn group(&mut self, n: u32, handle: u32, engine: u32) -> NewGroup {
        let (page, file) = Page::create().unwrap();
        page.slot(n).unwrap().begin_counting();
        self.pages.push(page);
        let group = Group {
            device: 0,
            slice: 2048,
            frozen: false,
            broken: false,
        };
        self.hardware().groups.insert(handle, group);
        NewGroup {
            member: Member {
                session: SessionId(n.into()),
                key: n,
                pid: 1000 + n,
                handles: (n, handle),
            },
            tenant: TenantId(n.into()),
            engine,
            device: "GPU-0".into(),
            emulated: true,
            controls: Box::new(FakeControls {
                group: handle,
                hardware: Arc::clone(&self.hardware),
            }),
            page: Arc::new(Page::open(file).unwrap()),
            shared: false,
            timeslice: Timeslice(2048),
            default: Timeslice(2048),
        }
    }

    /// A busy tenant whose process shares the hardware's group `handle` as a member of the group of this name.
    fn member(&mut self, n: u32, handle: u32, name: &str) {
        let spec = TenantSpec {
            class: Class::Batch,
            ..TenantSpec::default()
        };
        self.spec(n, spec).unwrap();
        self.engine.place(TenantId(n.into()), name.into());
        let before = self.hardware().groups.get(&handle).copied();
        let group = NewGroup {
            shared: true,
            ..self.group(n, handle, 1)
        };
        if let Some(before) = before {
            self.hardware().groups.insert(handle, before);
        }
        self.engine.add(group).unwrap();
        self.pages.last().unwrap().slot(n).unwrap().submit();
    }

    /// Steps as the thread would, for this long.
    fn run(&mut self, time: Micros) {
        let end = self.engine.state.now() + time;
        while self.engine.state.now() < end {
            let next = self.engine.step().unwrap_or(end).min(end);
            let mut hardware = self.hardware();
            hardware.now = hardware.now.max(next.0);
        }
    }

    fn take_pulls(&self) -> Vec<Pull> {
        std::mem::take(&mut self.hardware().pulls)
    }

    fn domain(&mut self, n: u32) -> types::Domain {
        let tenant = TenantId(n.into());
        let mut domains = self.engine.view().domains.into_iter();
        domains
            .find(|(id, _)| *id == tenant)
            .map(|(_, domain)| domain)
            .unwrap()
    }

    fn closed(&self) -> Vec<u32> {
        self.dead.try_iter().for_each(drop);
        let mut closed = self.hardware().closed.clone();
        closed.sort_unstable();
        closed
    }
}

#[test]
fn process_that_freed_itself_is_not_controlled_until_it_comes_again() {
    let mut bench = Bench::new();
    for (n, class) in [(1, Class::Latency), (2, Class::Batch), (3, Class::Batch)] {
        let spec = TenantSpec {
            class,
            ..TenantSpec::default()
        };
        bench.spec(n, spec).unwrap();
        let group = bench.group(n, n, 1);
        let page = Arc::clone(&group.page);
        let met = Met::new(TenantId(n.into()), page, Box::new(|_| true)).with_pid(1000 + n);
        bench.engine.meet(SessionId(n.into()), met);
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
    assert_ne!(a.frozen, alone.frozen, "they take turns");
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
fn crash_in_a_group_is_reported_once_and_no_other_crash() {
    let mut bench = Bench::new();
    let (tell, mut told) = tokio::sync::mpsc::unbounded_channel();
    bench.engine.crashes.report_to(tell);
    let come = |bench: &mut Bench, n: u32| {
        let (page, file) = Page::create().unwrap();
        let page_of_daemon = Arc::new(Page::open(file).unwrap());
        let met = Met::new(TenantId(n.into()), page_of_daemon, Box::new(|_| true));
        bench
            .engine
            .meet(SessionId(n.into()), met.with_pid(1000 + n));
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
    let met = Met::new(TenantId(2), opened, Box::new(|_| true)).with_pid(1002);
    bench.engine.meet(SessionId(2), met);
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
        let met = Met::new(TenantId(n.into()), opened, Box::new(|_| true)).with_pid(1000 + n);
        bench.engine.meet(SessionId(n.into()), met);
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
        let met = Met::new(TenantId(n.into()), opened, Box::new(|_| true)).with_pid(1000 + n);
        bench.engine.meet(SessionId(n.into()), met);
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

/// Two members of a group, of which the second ends at work and the first has none, beside a tenant of this class. Also a
/// file that says whether the memory is held.
fn left_behind(beside: Class) -> (Bench, io::PipeReader) {
    left_behind_by(beside, |_| {})
}

/// The same; before its end, the second does something.
fn left_behind_by(beside: Class, act: impl FnOnce(&mut Engine)) -> (Bench, io::PipeReader) {
    let mut bench = Bench::new();
    bench.add(1, beside);
    for n in [2, 3] {
        bench.member(n, 50, "team");
        let (_, file) = Page::create().unwrap();
        let page = Arc::new(Page::open(file).unwrap());
        let met = Met::new(TenantId(n.into()), page, Box::new(|_| true)).with_pid(1000 + n);
        bench.engine.meet(SessionId(n.into()), met);
    }
    bench.pages[1].slot(2).unwrap().complete(1);
    let (reader, writer) = io::pipe().unwrap();
    rustix::io::ioctl_fionbio(&reader, true).unwrap();
    act(&mut bench.engine);
    let left = Left::Session(SessionId(3));
    assert!(bench.engine.hold(&left, vec![writer.into()]).is_none());
    bench.engine.leave(SessionId(3), false);
    bench.engine.forget(TenantId(3));
    (bench, reader)
}

/// Whether the memory is held still, after this time.
fn held_after(bench: &mut Bench, seconds: u64, file: &mut io::PipeReader) -> bool {
    bench.run(Micros::from_secs(seconds));
    bench.dead.try_iter().for_each(drop);
    let read = io::Read::read(file, &mut [0]);
    read.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
}

#[test]
fn what_a_member_leaves_behind_is_work_of_its_group_until_that_had_time_for_it() {
    let (mut bench, mut file) = left_behind(Class::Batch);
    assert!(held_after(&mut bench, 3, &mut file), "half of 3 s");
    assert!(!held_after(&mut bench, 3, &mut file));
    // No other member of the group had work.
    let had = bench.domain(2).received_us;
    assert!((2_000_000..2_600_000).contains(&had), "{had}");
    bench.run(Micros::from_secs(1));
    assert_eq!(bench.domain(2).received_us, had, "it has none any more");
}

#[test]
fn what_a_member_leaves_behind_that_exits_is_held_as_long() {
    // It frees its part of the group, as the driver library does.
    let (mut bench, mut file) = left_behind_by(Class::Batch, |engine| {
        engine.place(TenantId(3), "team".into());
        engine.gone(SessionId(3), 3);
    });
    assert!(held_after(&mut bench, 3, &mut file), "half of 3 s");
    assert!(!held_after(&mut bench, 3, &mut file));
}

#[test]
fn work_of_the_last_member_is_held_for_new_members() {
    let (mut bench, mut file) = left_behind(Class::Standard);
    bench.engine.leave(SessionId(2), false);
    assert!(held_after(&mut bench, 1, &mut file));
    bench.member(4, 50, "team");
    assert!(held_after(&mut bench, 20, &mut file), "it got no time");
    bench.engine.leave(SessionId(1), false);
    assert!(held_after(&mut bench, 1, &mut file));
    assert!(!held_after(&mut bench, 2, &mut file));
}

#[test]
fn deferred_release_waits_for_higher_classes_within_a_bound() {
    let (mut bench, mut file) = left_behind(Class::Standard);
    assert!(held_after(&mut bench, 20, &mut file));
    bench.run(Micros::from_millis(10_500));
    assert!(!held_after(&mut bench, 0, &mut file));
    let left: Vec<u32> = (bench.engine.give_up("team").iter())
        .filter(|it| it.ended_at_work())
        .map(|it| it.pid)
        .collect();
    assert_eq!(left, [1003], "a fault now may be of its making");

    let mut hold = || {
        let team = Left::Group("team".into());
        bench.engine.hold(&team, Vec::new()).is_none()
    };
    let held = std::iter::repeat_with(&mut hold).take_while(|held| *held);
    assert_eq!(held.count(), 48, "not of any number");

    let (mut bench, mut file) = left_behind(Class::Standard);
    bench.engine.leave(SessionId(2), false);
    assert!(held_after(&mut bench, 1, &mut file));
    assert!(
        !held_after(&mut bench, 2, &mut file),
        "nobody is left to be hurt"
    );
    let none = bench.engine.hold(&Left::Group("team".into()), Vec::new());
    assert!(none.is_some(), "there is no such group any more");
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
        let met = Met::new(TenantId(2), opened, Box::new(|_| true));
        bench.engine.meet(SessionId(2), met);
        bench.run(Micros::from_secs(1));
        page.set_fault(700);
        bench.run(Micros::from_millis(100));
        assert!(told.try_recv().is_ok(), "beside {others} others");
    }
}

#[test]
fn controls_wait_for_a_latency_tenant_to_finish_but_not_for_long() {
    let mut bench = Bench::new();
    bench.add(1, Class::Latency);
    bench.add(2, Class::Batch);
    bench.add(3, Class::Batch);
    bench.pages[0].slot(1).unwrap().complete(1);
    bench.run(Micros::from_millis(5));
    let (mut at_work, mut between) = (Vec::new(), Vec::new());
    for request in 2..250 {
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

#[test]
fn controls_wait_for_a_latency_tenant_that_is_expected() {
    // Where the machine stalls while a page is looked at, a time is wrong.
    let rounds = [(); 3].map(|()| pulled_just_before_work());
    assert!(rounds.iter().any(|count| *count < 12), "{rounds:?} of 49");
}

fn pulled_just_before_work() -> usize {
    let mut bench = Bench::new();
    bench.add(1, Class::Latency);
    bench.add(2, Class::Batch);
    bench.add(3, Class::Batch);
    let (mut just_before, mut all) = (0, Vec::new());
    for request in 1..60 {
        // The page's clock is the machine's: what is a pause takes real time, and what is seen late was long ago.
        std::thread::sleep(Duration::from_millis(2));
        bench.pages[0].slot(1).unwrap().complete(request);
        bench.pages[0].slot(1).unwrap().submit();
        bench.engine.view();
        bench.run(Micros(1000));
        bench.pages[0].slot(1).unwrap().complete(request + 1);
        bench.run(Micros(8750));
        all.extend(bench.take_pulls());
        bench.park(TenantId(2), request % 2 == 0);
        bench.run(Micros(250));
        let pulls = bench.take_pulls();
        just_before += usize::from(request > 10 && !pulls.is_empty());
        all.extend(pulls);
    }
    assert!(all.len() > 20, "{all:?}");
    just_before
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
fn what_processes_count_is_kept_when_they_are_gone_and_never_counted_twice() {
    let mut bench = Bench::new();
    bench.spec(1, TenantSpec::default()).unwrap();
    let (page, file) = Page::create().unwrap();
    let come = |bench: &mut Bench, session| {
        let page = Arc::new(Page::open(&file).unwrap());
        let met = Met::new(TenantId(1), page, Box::new(|_| true));
        bench.engine.meet(SessionId(session), met);
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
    (bench.engine)
        .change(TenantId(2), policy(), latency, true)
        .unwrap();
    assert_eq!(class(&bench), Class::Latency);
    assert!(bench.engine.view().tampering.is_empty());
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
    let met = Met::new(TenantId(2), Arc::clone(&group.page), Box::new(|_| true));
    bench.engine.meet(SessionId(2), met);
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
    let met = Met::new(
        TenantId(1),
        Arc::new(Page::create().unwrap().0),
        Box::new(|_| true),
    );
    bench.engine.meet(SessionId(1), met.with_pid(1001));
    bench.engine.leave_unmanaged(SessionId(1), None);
    for _ in 0..20 {
        measure(&mut bench, &[(1001, 1.0)]);
    }
    assert!(bench.engine.view().tampering.is_empty());
}

#[test]
fn process_with_another_group_that_fails_or_is_shared_is_not_found() {
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
    for second in 0..40 {
        bench.park(TenantId(1), second % 4 < 2);
        measure(&mut bench, &[(1001, 0.85)]);
    }
    assert!(bench.engine.view().tampering.is_empty());
}

/// What NVML reports of a device whose processes used these parts of the last second.
fn measured(used: &[(u32, f64)]) -> crate::devices::Known {
    let at = Instant::now();
    crate::devices::Known {
        uuid: "GPU-0".to_owned(),
        memory_bytes: 80 << 30,
        used_by: Some(crate::devices::Used {
            since: at - Duration::from_secs(1),
            at,
            parts: used.iter().copied().collect(),
        }),
        state: "ok".into(),
        ..Default::default()
    }
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
fn a_domain_whose_memory_comes_back_while_its_controls_stick_is_frozen_when_it_is_said_to_be() {
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

#[test]
fn copy_groups_are_left_alone_unless_configured() {
    for copy_engines in [false, true] {
        let mut bench = Bench::with(Config {
            copy_engines,
            ..Config::default()
        });
        bench.add(1, Class::Latency);
        let group = bench.group(1, 10, 11);
        bench.engine.add(group).unwrap();
        bench.engine.step();
        assert_eq!(bench.hardware().groups[&10].slice != 2048, copy_engines);
        bench.engine.restore();
        assert_eq!(bench.hardware().groups[&10].slice, 2048);
    }
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
fn confined_tenants_are_guaranteed_per_device() {
    const GIB: u64 = 1 << 30;
    let mut bench = Bench::new();
    let known = |uuid: &str| crate::devices::Known {
        uuid: uuid.to_owned(),
        gpu: 0,
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
    let met = Met::new(tenant, page, Box::new(|_| true));
    bench.engine.meet(session, met);
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

#[test]
fn guarantee_lapses_without_work_and_holds_again_with_it() {
    let mut bench = Bench::new();
    let rules = gpumux_core::admission::UserRules {
        guarantee_expires_s: Some(10),
        ..Default::default()
    };
    let policy = gpumux_core::admission::UserPolicy::new("alice".into(), false, &rules);
    let owner = |name: &str| super::Owner {
        name: name.into(),
        uid: 1000,
        policy: policy.clone().into(),
    };
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
