//! Random worlds of up to 40 tenants: what must hold holds, and once all behave, each has what it is entitled to.

use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicUsize, Ordering},
};

use gpumux_core::{
    Calm, Class, DomainId, Micros, TenantSpec, Timeslice, UserId, controller::Event, policy, space,
};
use proptest::prelude::*;

use super::world::{GIB, Late, Manner, STANDS, World, spec, with_memory};

/// One thing that happens to a tenant.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Step {
    Busy(u64),
    Idle(u64),
    Fails(u64),
    Hangs(u64),
    Works(u64),
    Tampered(u64),
    Stopped(u64),
    /// It asks for so many GiB of one of its devices.
    Asks(u64, usize, u64),
    Frees(u64),
    Ends(u64),
    /// Its connection ends, and it begins another one.
    Loses(u64),
    /// One of this class, guarantee and limit comes, or has these from now on and a second process.
    Comes(u64, Class, f64, f64),
    /// Its program has waited for so many pieces of work, which took so long.
    Waited(u64, u64, Micros),
    Pass(Micros),
}

impl Step {
    pub(crate) fn apply(self, world: &mut World) {
        match self {
            Self::Busy(id) => world.set_busy(id, true),
            Self::Idle(id) => world.set_busy(id, false),
            Self::Fails(id) => world.set_manner(id, Manner::Fails),
            Self::Hangs(id) => world.set_manner(id, Manner::Hangs),
            Self::Works(id) => world.set_manner(id, Manner::Works),
            Self::Tampered(id) => world.tamper(id, Timeslice(777)),
            Self::Stopped(id) => world.stop(id),
            Self::Asks(id, n, gib) => world.ask(id, n, gib * GIB),
            Self::Frees(id) => world.free(id),
            Self::Ends(id) => world.kill(id),
            Self::Loses(id) => world.lose(id),
            Self::Comes(id, class, guaranteed, limit) => {
                if !world.has(id) {
                    world.tenant(id, spec(class, guaranteed), &[id as usize % 2]);
                } else if world.processes(id) < 2 {
                    world.join(id);
                }
                world.set(id, |it| {
                    (it.class, it.guaranteed, it.limit) = (class, guaranteed, limit);
                });
            }
            Self::Waited(id, pieces, time) => {
                // As many as it takes to be sure, and one more.
                for _ in 0..6 {
                    world.waited(id, pieces, time, Micros(time.0 / 10));
                    world.run_for(world.late.looks);
                }
            }
            Self::Pass(time) => world.run_for(time),
        }
    }
}

fn step() -> impl Strategy<Value = Step> {
    let id = 1..=40u64;
    prop_oneof![
        4 => id.clone().prop_map(Step::Busy),
        3 => id.clone().prop_map(Step::Idle),
        1 => id.clone().prop_map(Step::Fails),
        1 => id.clone().prop_map(Step::Hangs),
        2 => id.clone().prop_map(Step::Works),
        1 => id.clone().prop_map(Step::Tampered),
        1 => id.clone().prop_map(Step::Stopped),
        2 => (id.clone(), 0..2usize, 1..40u64).prop_map(|(id, n, gib)| Step::Asks(id, n, gib)),
        1 => id.clone().prop_map(Step::Frees),
        1 => id.clone().prop_map(Step::Ends),
        1 => id.clone().prop_map(Step::Loses),
        1 => (id.clone(), prop::sample::select(Class::ALL.to_vec()), 0.0..0.02f64, 0.02..1.5f64)
            .prop_map(|(id, class, guaranteed, limit)| Step::Comes(id, class, guaranteed, limit.min(1.0))),
        2 => (id.clone(), 1..600u64, 100..20_000u64)
            .prop_map(|(id, pieces, us)| Step::Waited(id, pieces, Micros(us))),
        6 => (1..100_000u64).prop_map(|us| Step::Pass(Micros(us))),
    ]
}

fn late() -> impl Strategy<Value = Late> {
    let packets = prop_oneof![2 => 0..5_000u64, 1 => 0..500_000u64];
    let late = (packets, 0..20_000u64, 0..300_000u64);
    let late = late.prop_map(|(packets, looks, ends)| Late::of(packets, looks, ends));
    prop_oneof![1 => Just(Late::default()), 3 => late]
}

/// A tenant's class, part of what can be guaranteed, weight, and the devices that it needs.
type Kind = (Class, f64, f64, Vec<usize>);

fn kinds(most: usize) -> impl Strategy<Value = Vec<Kind>> {
    prop::collection::vec(kind(), 1..=most)
}

fn kind() -> impl Strategy<Value = Kind> {
    let devices = prop_oneof![
        3 => Just(vec![0]),
        3 => Just(vec![1]),
        1 => Just(vec![0, 1]),
    ];
    let class = prop::sample::select(Class::ALL.to_vec());
    (class, 0.0..1.0f64, 0.5..4.0f64, devices)
}

/// What else a tenant may have.
#[derive(Clone, Debug)]
struct Terms {
    user: u32,
    /// Unless its guarantee is more.
    limit: f64,
    /// It is in its user's MPS group on its device, unless it is a latency tenant.
    group: bool,
    /// How long it has work, and then none, in ms.
    pauses: Option<(u64, u64)>,
}

fn terms() -> impl Strategy<Value = Terms> {
    let limit = prop_oneof![3 => Just(1.0), 1 => 0.02..1.0f64];
    let pauses = prop_oneof![3 => Just(None), 1 => (5..40u64, 1..5u64).prop_map(Some)];
    (0..2u32, limit, any::<bool>(), pauses).prop_map(|(user, limit, group, pauses)| Terms {
        user,
        limit,
        group,
        pauses,
    })
}

fn specs(kinds: &[Kind], guaranteed: f64) -> Vec<(TenantSpec, Vec<usize>)> {
    let sum: f64 = kinds.iter().map(|it| it.1).sum();
    let spec = |(class, part, weight, devices): &Kind| {
        let spec = TenantSpec {
            weight: *weight,
            ..spec(*class, guaranteed * part / sum.max(1.0))
        };
        (spec, devices.clone())
    };
    kinds.iter().map(spec).collect()
}

/// What was played so far, for people.
static PLAYED: [AtomicUsize; 5] = [const { AtomicUsize::new(0) }; 5];

// PROPTEST_CASES runs more of them.
fn cases() -> u32 {
    ProptestConfig::default().cases / 16
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), max_shrink_iters: 60, failure_persistence: None, ..Default::default() })]

    /// `World` checks after every step.
    #[test]
    fn random_worlds_keep_what_must_hold(
        policy in prop::sample::select(policy::NAMES.to_vec()),
        kinds in kinds(12),
        groups in prop::collection::vec(any::<bool>(), 12),
        late in late(),
        steps in prop::collection::vec(step(), 1..60),
    ) {
        let mut world = World::new(policy, 2);
        world.late = late;
        let count = kinds.len() as u64;
        for ((id, (spec, devices)), group) in (1..).zip(specs(&kinds, 0.6)).zip(groups) {
            let group = group && spec.class != Class::Latency && devices.len() == 1;
            let group = group.then_some(DomainId(1_000 + devices[0] as u64));
            world.member(id, UserId::default(), with_memory(spec, GIB), &devices, group);
        }
        for step in steps {
            let step = match step {
                Step::Busy(id) => Step::Busy(id % count + 1),
                Step::Idle(id) => Step::Idle(id % count + 1),
                Step::Fails(id) => Step::Fails(id % count + 1),
                Step::Works(id) => Step::Works(id % count + 1),
                Step::Hangs(id) => Step::Hangs(id % count + 1),
                Step::Frees(id) => Step::Frees(id % count + 1),
                Step::Comes(id, class, guaranteed, limit) => Step::Comes(id % (count + 2) + 1, class, guaranteed, limit),
                Step::Tampered(id) => Step::Tampered(id % count + 1),
                Step::Stopped(id) => Step::Stopped(id % count + 1),
                Step::Asks(id, n, gib) => Step::Asks(id % count + 1, n, gib),
                Step::Ends(id) => Step::Ends(id % count + 1),
                Step::Waited(id, pieces, time) => Step::Waited(id % count + 1, pieces, time),
                other => other,
            };
            step.apply(&mut world);
        }
        world.recover();
        world.run_for(Micros::from_secs(10));
        for id in 1..=count {
            let away = world.away(id);
            prop_assert!(away < Micros::from_secs(120), "{id}: {away}");
        }
    }

    /// Any number of tenants of two users on two devices, some of them members of MPS groups, with limits, or with pauses: none waits longer than its policy's
    /// bound, and each receives its guarantee, and no more than its limit where another wants more.
    #[test]
    fn tenants_receive_guarantees_within_the_bound(
        kinds in prop::collection::vec((kind(), terms()), 1..=40),
        guaranteed in 0.0..0.8f64,
    ) {
        let mut world = World::new("priority", 2);
        let mut groups: BTreeMap<DomainId, Vec<(u64, TenantSpec)>> = BTreeMap::new();
        let (mut kinds, terms): (Vec<Kind>, Vec<Terms>) = kinds.into_iter().unzip();
        // For gangs there is no bound.
        kinds.iter_mut().for_each(|it| it.3.truncate(1));
        let sums = [0, 1].map(|device| {
            kinds.iter().filter(|it| it.3 == [device]).map(|it| it.1).sum::<f64>()
        });
        for ((id, (class, part, weight, devices)), terms) in (1..).zip(&kinds).zip(&terms) {
            let device = devices[0];
            let part = guaranteed * part / sums[device].max(1.0);
            let spec = TenantSpec {
                weight: *weight,
                limit: terms.limit.max(part),
                ..spec(*class, part)
            };
            let shared = terms.group && spec.class != Class::Latency;
            let shared = shared.then_some(DomainId(1_000 + 2 * device as u64 + u64::from(terms.user)));
            world.member(id, UserId(terms.user), spec.clone(), devices, shared);
            world.set_busy(id, true);
            groups.entry(shared.unwrap_or(world.group(id))).or_default().push((id, spec));
        }
        let bound = world.wait_bound();
        // At first all begin at once, and none is owed anything.
        world.run_for(bound);
        world.longest_wait = Micros::ZERO;
        let pauses = (1..).zip(&terms).filter_map(|(id, it)| Some((id, it.pauses?)));
        let pauses: BTreeMap<u64, (u64, u64)> = pauses.collect();
        let time = Micros((2 * bound.0).clamp(2_000_000, 10_000_000));
        let shares = world.shares_of(time, &pauses);
        prop_assert!(world.longest_wait <= bound, "{} of {bound}", world.longest_wait);
        let slack = bound.0 as f64 / time.0 as f64;
        for (name, members) in &groups {
            let spec = space::combine(members.iter().map(|(_, spec)| spec));
            // A group has work if any member has.
            let works = members.iter().map(|(id, _)| pauses.get(id).map_or(1.0, |(works, pause)| {
                *works as f64 / (works + pause) as f64
            }));
            let works = works.fold(0.0, f64::max);
            // Of what switches leave; a bound's worth of service may be missing at the end.
            let least = spec.guaranteed * (0.85 * works - slack);
            prop_assert!(shares[name] >= least, "{name:?}: {} of {}", shares[name], spec.guaranteed);
            let device = |id: &u64| kinds[*id as usize - 1].3[0];
            let wants_more = groups.values().flatten().any(|(id, it)| {
                device(id) == device(&members[0].0) && !members.iter().any(|(own, _)| own == id) && it.limit >= 1.0 && !pauses.contains_key(id)
            });
            let most = spec.limit * (1.0 + slack) + 0.03;
            prop_assert!(!wants_more || shares[name] <= most, "{name:?}: {} of at most {}", shares[name], spec.limit);
        }
        let of = |is: &dyn Fn(&Terms) -> bool| terms.iter().filter(|it| is(it)).count();
        let more = [1, terms.len(), groups.len(), of(&|it| it.limit < 1.0), pauses.len()];
        for (all, more) in PLAYED.iter().zip(more) {
            all.fetch_add(more, Ordering::Relaxed);
        }
        let [mixes, tenants, groups, limited, pausing] = PLAYED.each_ref().map(|it| it.load(Ordering::Relaxed));
        if mixes == cases() as usize {
            println!("covered: {mixes} mixes, {tenants} tenants in {groups} channel groups, {limited} with limits, {pausing} that pause");
        }
    }
}

/// A guarantee of compute is worth nothing without the memory: its owner's is brought back although others have work.
#[test]
fn guaranteed_tenant_gets_its_memory_back_within_a_bound() {
    let mut world = World::new("priority", 1);
    world.tenant(1, with_memory(spec(Class::Latency, 0.4), 40 * GIB), &[0]);
    world.tenant(2, spec(Class::Batch, 0.0), &[0]);
    world.tenant(3, spec(Class::Batch, 0.0), &[0]);
    world.ask(1, 0, 35 * GIB);
    for id in [2, 3] {
        world.set_busy(id, true);
        world.ask(id, 0, 35 * GIB);
    }
    world.run_for(Micros::from_secs(300));
    assert!(world.seen.moves > 0, "they do not fit");
    world.set_busy(1, true);
    let mut longest = Micros::ZERO;
    for _ in 0..100 {
        world.run_for(Micros::from_millis(100));
        longest = longest.max(world.away(1));
    }
    println!("its memory was away for {longest}");
    assert!(longest < Micros::from_secs(5), "{longest}");
    let shares = world.shares(Micros::from_secs(2));
    assert!(shares[&1] > 0.35, "{shares:?}");
}

/// Its controls fail for long: it is left alone longer and longer.
#[test]
pub(crate) fn failing_controls_are_tried_seldom() {
    let mut world = World::new("priority", 1);
    world.tenant(1, spec(Class::Latency, 0.0), &[0]);
    world.tenant(2, spec(Class::Batch, 0.0), &[0]);
    (1..=2).for_each(|id| world.set_busy(id, true));
    world.run_for(Micros::from_secs(1));
    world.set_manner(2, Manner::Fails);
    let before = world.seen.failed;
    world.run_for(Micros::from_secs(20));
    let failed = world.seen.failed - before;
    assert!((2..60).contains(&failed), "{failed} controls failed");
}

/// A control that the driver carried out late, or a process with the right to: what should run does again soon, and a long kernel costs next to nothing.
#[test]
pub(crate) fn group_that_something_froze_runs_again() {
    let mut world = World::new("priority", 1);
    (1..=2).for_each(|id| world.tenant(id, spec(Class::Latency, 0.0), &[0]));
    world.set_busy(1, true);
    world.run_for(Micros::from_secs(20));
    let commands = world.seen.commands;
    world.run_for(Micros::from_secs(60));
    let more = world.seen.commands - commands;
    assert!(more < 20, "{more} controls of one long kernel");
    world.waited(1, 1, Micros::from_millis(1), Micros::ZERO);
    world.run_for(Micros::from_millis(10));
    world.freeze_unseen(1);
    world.run_for(STANDS);
    assert!(!world.groups[&world.group(1)].frozen);
}

/// Frozen tenants that say again and again that they have new channels cost few controls.
#[test]
fn new_channels_are_frozen_again_but_seldom() {
    let mut world = World::new("priority", 1);
    world.tenant(1, spec(Class::Latency, 0.0), &[0]);
    (2..=8).for_each(|id| world.tenant(id, spec(Class::Batch, 0.0), &[0]));
    (1..=8).for_each(|id| world.set_busy(id, true));
    world.run_for(Micros::from_secs(1));
    let mut commands = |says: bool| {
        let before = world.seen.commands;
        for _ in 0..10_000 {
            let frozen = (2..=8).filter(|id| says && world.groups[&world.group(*id)].frozen);
            let frozen: Vec<u64> = frozen.collect();
            frozen.into_iter().for_each(|id| world.says_channels(id));
            world.run_for(Micros(500));
        }
        world.seen.commands - before
    };
    let (usual, more) = (commands(false), commands(true));
    println!("{usual} controls in 5 s, {more} while six say that they have channels");
    assert!(
        more > usual + 32,
        "{usual} became {more}: none is frozen again"
    );
    assert!(more <= usual + 32 + 250 + 20, "{usual} became {more}");
}

/// A tenant without work gives its memory to a latency tenant: it is frozen although that one is at work all the time.
#[test]
pub(crate) fn controls_wait_for_latency_work_but_not_for_long() {
    let mut world = World::new("priority", 1);
    world.tenant(1, spec(Class::Latency, 0.0), &[0]);
    world.tenant(2, spec(Class::Batch, 0.0), &[0]);
    world.ask(2, 0, 60 * GIB);
    world.run_for(Micros::from_secs(100));
    world.set_busy(1, true);
    world.ask(1, 0, 60 * GIB);
    world.run_for(Micros::from_secs(100));
    assert!(world.seen.moves > 0, "{:?}", world.seen);
}

/// Work that comes at regular times is waited for before it is there.
#[test]
fn controls_wait_for_latency_work_that_is_expected() {
    let mut world = World::new("priority", 1);
    world.tenant(1, spec(Class::Latency, 0.0), &[0]);
    for id in [2, 3] {
        world.tenant(id, spec(Class::Batch, 0.0), &[0]);
        world.set_busy(id, true);
    }
    let batch = world.group(2);
    for request in 1..60 {
        world.set_busy(1, true);
        world.run_for(Micros(1_000));
        world.set_busy(1, false);
        world.run_for(Micros(8_750));
        let before = world.seen.commands;
        // There is a control to issue, just before work comes.
        let now = world.now;
        let event = Event::SwappedOut(batch, request % 2 == 0);
        world.controller.handle(now, event);
        world.run_for(Micros(250));
        let issued = world.seen.commands - before;
        assert!(
            request <= 10 || issued == 0,
            "{issued} before request {request}"
        );
    }
    assert!(world.seen.commands > 25, "{:?}", world.seen);
}

/// Controls of two devices wait for latency work at moments that differ: a poll for one does not prolong the other's wait.
#[test]
fn controls_of_two_devices_wait_no_longer_than_of_one() {
    let mut world = World::new("priority", 2);
    for (id, device) in [(1, 0), (3, 1)] {
        world.tenant(id, spec(Class::Latency, 0.9), &[device]);
        world.tenant(id + 1, spec(Class::Batch, 0.0), &[device]);
        world.set_busy(id, true);
    }
    world.run_for(Micros::from_secs(2));
    for batch in [2, 4] {
        let id = world.group(batch);
        let now = world.now;
        (world.controller).handle(now, Event::SwappedOut(id, true));
        world.run_for(Micros(500));
    }
    // One of them waits for the other's control, too.
    world.run_for(Calm::MOST + Micros::from_millis(2));
    for batch in [2, 4] {
        assert!(world.groups[&world.group(batch)].frozen, "{batch}");
    }
}

/// What a program says of its waits: how long its requests are, where one long one is soon forgotten, and its part of the time.
#[test]
fn requests_and_their_part_of_the_time_are_known() {
    let mut world = World::new("priority", 1);
    world.tenant(1, spec(Class::Latency, 0.0), &[0]);
    let mut waits = |us: u64, count: usize| {
        for _ in 0..count {
            world.run_for(Micros::from_millis(10));
            world.waited(1, 1, Micros(us), Micros::ZERO);
        }
        // The look at it.
        world.run_for(Micros(1));
        let state = &(world.controller.domain(world.group(1)).expect("it came")).state;
        let worked = state.worked.expect("it has waited");
        (state.request.expect("it has waited").0, worked)
    };
    let (request, worked) = waits(1_000, 10);
    assert_eq!(request, 1_000);
    assert!((worked - 0.1).abs() < 0.001, "{worked}");
    assert_eq!(waits(101_000, 1).0, 26_000);
    assert_eq!(waits(1_000, 1).0, 3_250);
    // A look right after a request, which may be all of the time since the one before, tells nothing of many.
    let (_, worked) = waits(1_000, 50);
    world.run_for(Micros(300));
    world.waited(1, 1, Micros(300), Micros::ZERO);
    world.run_for(Micros(1));
    let state = &(world.controller.domain(world.group(1)).expect("it came")).state;
    let then = state.worked.expect("it has waited");
    assert!(worked < 0.11 && then < 0.12, "{worked} {then}");
    // That it works all the time from now on is soon known.
    for _ in 0..20 {
        world.run_for(Micros::from_millis(10));
        world.waited(1, 1, Micros::from_millis(10), Micros::ZERO);
    }
    world.run_for(Micros(1));
    let state = &(world.controller.domain(world.group(1)).expect("it came")).state;
    assert!(state.worked > Some(0.9), "{:?}", state.worked);
}

/// The neighbour of a launch-bound program has a longer timeslice, a shorter one within some requests whose host waits for the device, and the shortest
/// where these are short, or within the time of some if they are graphs.
#[test]
pub(crate) fn neighbours_timeslice_follows_the_shape_of_requests() {
    let mut world = World::new("priority", 1);
    world.tenant(1, spec(Class::Latency, 0.0), &[0]);
    world.tenant(2, spec(Class::Batch, 0.0), &[0]);
    world.set_busy(1, true);
    world.set_busy(2, true);
    let requests = |world: &mut World, count: u64, (pieces, us, waits): (u64, u64, u64)| {
        for _ in 0..count {
            world.run_for(Micros(us));
            world.waited(1, pieces, Micros(us), Micros(waits));
        }
        // The control is issued.
        world.run_for(Micros::from_millis(5));
        world.timeslice(2)
    };
    let (eager, graph) = ((480, 11_000, 500), (3, 3_000, 2_900));
    let (short, long) = ((480, 5_000, 4_000), (480, 14_000, 10_000));
    assert_eq!(requests(&mut world, 100, graph), 1);
    for (next, count, timeslice) in [(graph, 16, 1), (short, 30, 1), (long, 40, 1_000)] {
        assert_eq!(requests(&mut world, 200, eager), 1_000);
        assert_eq!(requests(&mut world, count, next), timeslice, "{next:?}");
    }
}

/// The neighbour of a program that always has work outstanding, and never waits for all of it, has a longer timeslice, also where the program's
/// host waits for the device: 50 ms are long for a request.
#[test]
fn neighbours_timeslice_follows_a_pipeline_s_pace() {
    let mut world = World::new("priority", 1);
    world.tenant(1, spec(Class::Latency, 0.0), &[0]);
    world.tenant(2, spec(Class::Batch, 0.0), &[0]);
    world.set_busy(1, true);
    world.set_busy(2, true);
    let stream = |world: &mut World, ms: u64, pieces: u64, waits: u64| {
        for _ in 0..ms {
            world.run_for(Micros::from_millis(1));
            world.submitted(1, pieces, Micros(waits));
        }
        // The control is issued.
        world.run_for(Micros::from_millis(5));
        world.timeslice(2)
    };
    assert_eq!(stream(&mut world, 1_000, 1, 0), 1, "large kernels");
    assert_eq!(stream(&mut world, 2_000, 58, 0), 2_000);
    assert_eq!(stream(&mut world, 2_000, 58, 700), 2_000, "it waits");
    assert_eq!(stream(&mut world, 1_000, 1, 700), 1, "large kernels again");
}

/// Whenever a tenant ends, also in the middle of its turn's handover, no control of its groups follows.
#[test]
pub(crate) fn no_control_follows_the_end_of_a_tenant() {
    for offset in 0..400 {
        let mut world = World::new("priority", 1);
        world.tenant(1, spec(Class::Latency, 0.0), &[0]);
        for id in 2..=4 {
            world.tenant(id, spec(Class::Batch, 0.0), &[0]);
            world.set_busy(id, true);
        }
        world.run_for(Micros(200 * offset));
        world.kill(2 + offset % 3);
        world.run_for(Micros::from_millis(5));
    }
}

/// At each return it would have the device until its new work is seen.
#[test]
fn latency_tenant_that_pauses_again_and_again_keeps_its_limit() {
    for (limit, works, pause) in [(0.02, 5, 1), (0.1, 5, 1), (0.2, 20, 5), (0.02, 40, 4)] {
        let mut world = World::new("priority", 1);
        world.tenant(1, spec(Class::Latency, 0.0), &[0]);
        let limited = TenantSpec {
            limit,
            ..spec(Class::Latency, 0.0)
        };
        world.tenant(2, limited, &[0]);
        (1..=2).for_each(|id| world.set_busy(id, true));
        world.run_for(Micros::from_secs(2));
        let shares = world.shares_of(Micros::from_secs(10), &[(2, (works, pause))].into());
        let received = shares[&world.group(2)];
        assert!(received < limit + 0.02, "{received} of {limit}");
        assert!(received > 0.9 * limit, "{received} of {limit}");
    }
}

/// What another leaves in its pauses goes to all others, in proportion to their timeslices.
#[test]
fn limit_holds_beside_a_tenant_that_pauses_again_and_again() {
    for (limit, works, pause, own) in [
        (0.02, 5, 1, None),
        (0.25, 5, 2, None),
        (0.25, 40, 40, Some((7, 1))),
        (0.4, 5, 4, None),
    ] {
        let mut world = World::new("priority", 1);
        for (id, user, class, limit) in [
            (1, 1, Class::Standard, 1.0),
            (2, 0, Class::Batch, 1.0),
            (3, 0, Class::Standard, limit),
        ] {
            let spec = TenantSpec {
                limit,
                ..spec(class, 0.0)
            };
            world.member(id, UserId(user), spec, &[0], None);
            world.set_busy(id, true);
        }
        world.run_for(Micros::from_secs(2));
        world.longest_wait = Micros::ZERO;
        let before = world.seen.commands;
        let pauses = own.map(|own| (3, own)).into_iter();
        let pauses = pauses.chain([(1, (works, pause))]).collect();
        let received = world.shares_of(Micros::from_secs(10), &pauses)[&world.group(3)];
        assert!(received < limit + 0.02, "{received} of {limit}");
        assert!(received > 0.9 * limit, "{received} of {limit}");
        let commands = world.seen.commands - before;
        assert!(commands < 300, "{commands} controls in 10 s");
        assert!(world.longest_wait < world.wait_bound());
        // It has what no other wants.
        (1..=2).for_each(|id| world.set_busy(id, false));
        world.set_busy(3, true);
        world.run_for(Micros::from_millis(100));
        let alone = world.shares(Micros::from_secs(1))[&3];
        assert!(alone > 0.99, "{alone}");
    }
}

/// Quanta end where shares change: where it begins to pause. Its turn is not another's for that.
#[test]
fn tenant_that_pauses_whenever_a_quantum_ends_has_its_turn() {
    let mut world = World::new("priority", 1);
    let tenants = [
        (1, 1, Class::Latency, 0.1675, 0.5, None),
        (3, 1, Class::Latency, 0.0489, 0.5, None),
        (4, 0, Class::Standard, 0.0594, 0.5, None),
        (6, 0, Class::Standard, 0.1797, 1.3939, Some(DomainId(1_000))),
        (7, 1, Class::Batch, 0.1124, 0.9929, None),
        (8, 1, Class::Batch, 0.1168, 3.439, Some(DomainId(1_001))),
        (9, 1, Class::Latency, 0.0656, 2.0966, None),
    ];
    for (id, user, class, guaranteed, weight, group) in tenants {
        let spec = TenantSpec {
            weight,
            limit: if id == 4 { 0.3016 } else { 1.0 },
            ..spec(class, guaranteed)
        };
        world.member(id, UserId(user), spec, &[0], group);
        world.set_busy(id, true);
    }
    world.run_for(world.wait_bound());
    let shares = world.shares_of(Micros::from_secs(10), &[(4, (13, 3))].into());
    let received = shares[&world.group(4)];
    assert!(received > 0.05, "{received} of 0.0594");
}
