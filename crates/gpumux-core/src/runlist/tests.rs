use proptest::prelude::*;

use super::*;

fn member(id: u64, timeslice: u64) -> Member {
    Member {
        id: DomainId(id),
        timeslice: Timeslice(timeslice),
        run: RunState::Enabled,
        running: true,
        waits: true,
        latency: false,
        done: 0,
        launched: 0,
    }
}

const FREE: Permit = Permit::Free;
const HOLD: Permit = Permit::Hold;
const SOME: Permit = Permit::Budget(OUTSTANDING);

#[test]
fn group_alone_is_never_held() {
    let mut runlist = Runlist::default();
    let alone = [member(1, 2048)];
    assert_eq!(runlist.step(Micros(0), &alone), (vec![FREE], None));
    assert_eq!(runlist.step(Micros(9_000_000), &alone), (vec![FREE], None));
}

#[test]
fn request_holds_batch_work_at_once_and_ends_it_when_done() {
    let mut runlist = Runlist::default();
    let (mut latency, batch) = (member(1, 1_000_000), member(2, 1));
    (latency.running, latency.waits) = (false, false);
    let idle = runlist.step(Micros(0), &[latency, batch]).0;
    assert_eq!(idle, [FREE, SOME], "a request would find no gate closed");
    latency.running = true;
    let (busy, next) = runlist.step(Micros(10), &[latency, batch]);
    assert_eq!(busy, [FREE, HOLD]);
    assert_eq!(
        next,
        Some(Micros(1_000_010)),
        "nothing to do until the request ends"
    );
    let late = runlist.step(Micros(1_000_010), &[latency, batch]).0;
    assert_eq!(late, [FREE, HOLD], "the other would not be next");
    latency.running = false;
    assert_eq!(
        runlist.step(Micros(1_000_020), &[latency, batch]).0,
        [FREE, SOME]
    );
}

#[test]
fn group_beside_an_idle_one_launches_further_ahead() {
    let mut runlist = Runlist::default();
    let (one, mut two) = (member(1, 4_000), member(2, 4_000));
    (two.running, two.waits) = (false, false);
    let permit = |runlist: &mut Runlist, two| runlist.step(Micros(0), &[one, two]).0[0];
    assert_eq!(permit(&mut runlist, two), Permit::Budget(MOST_OUTSTANDING));
    two.latency = true;
    let little = Permit::Budget(Micros(500));
    assert_eq!(permit(&mut runlist, two), little, "a request may come");
    (two.latency, two.waits) = (false, true);
    assert_eq!(permit(&mut runlist, two), little);
}

#[test]
fn next_group_waits_for_the_kernels_of_the_last() {
    let mut runlist = Runlist::default();
    let (mut one, two) = (member(1, 5_000), member(2, 5_000));
    let budget = Permit::Budget(Micros(625));
    let at = |runlist: &mut Runlist, now, one| runlist.step(Micros(now), &[one, two]);
    assert_eq!(
        at(&mut runlist, 0, one),
        (vec![budget, HOLD], Some(Micros(5_000)))
    );
    let (drains, next) = at(&mut runlist, 5_000, one);
    assert_eq!((drains, next), (vec![HOLD, HOLD], Some(Micros(55_000))));
    assert_eq!(at(&mut runlist, 7_000, one).0, [HOLD, HOLD]);
    one.running = false;
    assert_eq!(at(&mut runlist, 8_000, one).0, [HOLD, budget]);
    // It has used 3 ms too much, which its next time lacks.
    let two_done = Member {
        running: false,
        ..two
    };
    runlist.step(Micros(13_000), &[one, two]);
    let (back, next) = runlist.step(Micros(13_000), &[one, two_done]);
    assert_eq!((back, next), (vec![budget, HOLD], Some(Micros(15_000))));
}

/// They share by timeslices: what one launches ahead would run in another's.
#[test]
fn latency_groups_launch_little_ahead_in_a_neighbours_turn() {
    let mut runlist = Runlist::default();
    let latency = |id, timeslice, waits| Member {
        latency: true,
        running: false,
        waits,
        ..member(id, timeslice)
    };
    let batch = member(1, 2_000);
    let step = |runlist: &mut Runlist, now, waits: [bool; 2]| {
        let [one, two] = waits;
        let members = [batch, latency(2, 4_000, one), latency(3, 1_000, two)];
        runlist.step(Micros(now), &members).0
    };
    step(&mut runlist, 0, [false, false]);
    assert_eq!(step(&mut runlist, 10, [true, true])[1..], [SOME, SOME]);
    let alone = step(&mut runlist, 20, [true, false]);
    assert_eq!(alone[1..], [Permit::Watched, SOME]);
}

/// A kernel may wait for one that is held.
#[test]
fn kernel_that_does_not_end_delays_others_by_a_bound() {
    let mut runlist = Runlist::default();
    let both = [member(1, 5_000), member(2, 5_000)];
    runlist.step(Micros(0), &both);
    runlist.step(Micros(5_000), &both);
    let late = Micros(5_000) + PATIENCE;
    assert_eq!(runlist.step(late, &both).0[0], HOLD);
    assert_ne!(runlist.step(late, &both).0[1], HOLD);
}

#[test]
fn kernel_of_a_frozen_group_delays_others_by_a_bound() {
    let mut runlist = Runlist::default();
    let (mut frozen, other) = (member(1, 1), member(2, 1));
    frozen.run = RunState::Frozen;
    assert_eq!(runlist.step(Micros(0), &[frozen, other]).0, [HOLD, HOLD]);
    for late in [PATIENCE, PATIENCE + Micros(100)] {
        assert_eq!(runlist.step(late, &[frozen, other]).0, [HOLD, SOME]);
    }
}

#[test]
fn frozen_group_drains_before_the_next_runs() {
    let mut runlist = Runlist::default();
    let (mut one, mut two) = (member(1, 1), member(2, 1));
    two.run = RunState::Frozen;
    two.running = false;
    assert_eq!(runlist.step(Micros(0), &[one, two]).0, [SOME, HOLD]);
    (one.run, two.run) = (RunState::Frozen, RunState::Enabled);
    assert_eq!(runlist.step(Micros(10), &[one, two]).0, [HOLD, HOLD]);
    one.running = false;
    assert_eq!(runlist.step(Micros(300), &[one, two]).0, [HOLD, SOME]);
}

/// A device that runs kernels of fixed lengths in the order of their launch.
struct World {
    /// Per group: its name, timeslice and a kernel's length.
    groups: Vec<(u64, u64, u64)>,
    /// Per group: how long its host does something else after each kernel; none: it launches ahead.
    gaps: Vec<Option<u64>>,
    runlist: Runlist,
    now: u64,
    /// Until when kernels of a group are on the device.
    until: Vec<u64>,
    served: Vec<u64>,
}

impl World {
    fn new(groups: Vec<(u64, u64)>) -> Self {
        let named = groups.into_iter().zip(1..);
        let groups: Vec<_> = named
            .map(|((slice, kernel), id)| (id, slice, kernel))
            .collect();
        let zeros = vec![0; groups.len()];
        Self {
            gaps: vec![None; groups.len()],
            groups,
            runlist: Runlist::default(),
            now: 0,
            until: zeros.clone(),
            served: zeros,
        }
    }

    fn member(&self, at: usize) -> Member {
        let (id, slice, _) = self.groups[at];
        let waits = |gap| self.until[at] + gap <= self.now;
        Member {
            running: self.until[at] > self.now,
            waits: self.gaps[at].is_none_or(waits),
            ..member(id, slice)
        }
    }

    /// Steps for so many µs: what each was served meanwhile.
    fn serve(&mut self, us: u64) -> Vec<u64> {
        let (before, end) = (self.served.clone(), self.now + us);
        while self.now < end {
            self.step();
        }
        self.served
            .iter()
            .zip(before)
            .map(|(now, before)| now - before)
            .collect()
    }

    /// One step of 50 µs, in which every group launches what it may. Returns the permits.
    fn step(&mut self) -> Vec<Permit> {
        let members: Vec<_> = (0..self.groups.len()).map(|at| self.member(at)).collect();
        let (permits, _) = self.runlist.step(Micros(self.now), &members);
        let mut free_at = self.until.iter().copied().max().unwrap_or(0).max(self.now);
        for (at, permit) in permits.iter().enumerate() {
            let budget = match *permit {
                FREE | Permit::Watched => 10_000,
                Permit::Budget(budget) => budget.0,
                HOLD => 0,
            };
            let kernel = self.groups[at].2;
            while *permit != HOLD && members[at].waits && free_at - self.now < budget {
                free_at += kernel;
                self.until[at] = free_at;
                self.served[at] += kernel;
                if self.gaps[at].is_some() {
                    break;
                }
            }
        }
        self.now += 50;
        permits
    }
}

/// It was alone for long, and owes nothing for that.
#[test]
fn group_that_was_alone_goes_on_beside_one_that_comes() {
    let mut world = World::new(vec![(5_000, 500), (5_000, 500)]);
    world.gaps[1] = Some(u64::MAX / 2);
    world.serve(10_000_000);
    world.gaps[1] = None;
    let served = world.serve(1_000_000);
    assert!(served[0].abs_diff(served[1]) < 50_000, "{served:?}");
}

/// A kernel that is longer than its timeslice, launched in another's gap, is paid for in the next gaps. The second is due a ninth; a gap in a timeslice
/// ends it, as on the hardware, where none owes.
#[test]
fn groups_that_wait_for_each_kernel_share_by_timeslices() {
    for (kernels, gap) in [
        ([20_000, 20_000], 300),
        ([1_000, 20_000], 100),
        ([20_000, 1_000], 100),
        ([3_000, 50_000], 700),
    ] {
        let mut world = World::new(vec![(16_000, kernels[0]), (2_000, kernels[1])]);
        world.gaps = vec![Some(gap); 2];
        let served = world.serve(10_000_000);
        let part = served[1] as f64 / (served[0] + served[1]) as f64;
        assert!((0.05..0.15).contains(&part), "{part} of {kernels:?}");
        let idle = 1.0 - (served[0] + served[1]) as f64 / 10_000_000.0;
        assert!(idle < 0.2, "{idle} idle with {kernels:?}");
    }
}

/// Time in which a group wants nothing pays what its share would.
#[test]
fn debt_is_paid_by_time() {
    let mut world = World::new(vec![(5_000, 500), (5_000, 45_000)]);
    world.serve(1_000_000);
    world.gaps[1] = Some(u64::MAX / 2);
    world.serve(200_000);
    world.gaps[1] = None;
    let served = world.serve(50_000);
    assert!(served[1] > 0, "{served:?}");
}

/// A latency group that launches far ahead, beside batch work. The plan freezes it for 5 of 100 ms.
#[test]
fn freeze_lasts_until_others_had_its_time() {
    for queue in [2_000, 30_000, 500_000] {
        let mut runlist = Runlist::default();
        let (mut latency_until, mut launched, mut served) = (0, 0, 0);
        for step in 0..100_000u64 {
            let now = step * 100;
            let run = match now % 100_000 < 5_000 {
                true => RunState::Frozen,
                false => RunState::Enabled,
            };
            let latency = Member {
                run,
                running: latency_until > now,
                latency: true,
                launched,
                ..member(1, Timeslice::MAX.0)
            };
            let permits = runlist.step(Micros(now), &[latency, member(2, 1)]).0;
            if permits[0] != HOLD && latency_until <= now {
                (latency_until, launched) = (now + queue, launched + 1);
            }
            if permits[1] != HOLD {
                served += 100;
                // Both are on the device.
                latency_until += if latency_until > now { 50 } else { 0 };
            }
        }
        assert!(served >= 400_000, "{served} of 10 s beside {queue}");
        let both = [member(1, Timeslice::MAX.0), member(2, 1)];
        let mut permit = |now| runlist.step(Micros(now), &both).0[0];
        let ahead = Permit::Budget(MOST_OUTSTANDING);
        let expected = if queue > 4_000 { ahead } else { FREE };
        assert_eq!(permit(10_100_000), expected, "{queue}");
        assert_eq!(permit(21_000_000), FREE, "long ago");
    }
}

/// Its kernels wait for what it cannot launch while it is held.
#[test]
fn group_whose_kernels_ran_into_a_freeze_in_anothers_turn_is_held_for_a_bound() {
    let mut runlist = Runlist::default();
    let (mut latency, batch) = (member(1, 34_000), member(2, 2_000));
    (latency.latency, latency.running, latency.waits) = (true, false, false);
    let step =
        |runlist: &mut Runlist, now, latency| runlist.step(Micros(now), &[latency, batch]).0[0];
    step(&mut runlist, 0, latency);
    (latency.running, latency.waits) = (true, true);
    let run = RunState::Frozen;
    for at in 1..=50 {
        step(&mut runlist, at * 100, Member { run, ..latency });
    }
    let held = (51..2_000).take_while(|at| step(&mut runlist, at * 100, latency) == HOLD);
    let most = PATIENCE.0 + 5_000 + 200;
    assert!(held.count() as u64 * 100 <= most);
}

#[test]
fn group_that_gives_way_launches_little_ahead_also_after_a_freeze() {
    let mut runlist = Runlist::default();
    let (mut idle, batch) = (member(1, Timeslice::MAX.0), member(2, 1));
    (idle.running, idle.waits, idle.latency) = (false, false, true);
    for at in 0..20 {
        let run = RunState::Frozen;
        runlist.step(Micros(at * 1_000), &[idle, Member { run, ..batch }]);
    }
    let permits = runlist.step(Micros(20_100), &[idle, batch]).0;
    assert_eq!(permits, [FREE, SOME]);
}

/// Its kernels wait for something that does not come.
#[test]
fn group_whose_kernels_do_not_end_wants_nothing_until_it_launches() {
    let mut runlist = Runlist::default();
    let (mut latency, batch) = (member(1, Timeslice::MAX.0), member(2, 1));
    latency.waits = false;
    let mut step = |now, latency| runlist.step(Micros(now), &[latency, batch]).0;
    assert_eq!(step(0, latency), [FREE, HOLD]);
    for at in 1..=60 {
        let frozen = Member {
            run: RunState::Frozen,
            ..latency
        };
        step(at * 1_000, frozen);
    }
    assert_eq!(step(200_000, latency)[1], SOME);
    latency.launched = 1;
    assert_eq!(step(200_100, latency)[1], HOLD);
}

/// A latency program that launches kernel by kernel and then waits, beside one that always has kernels to launch. The driver time-slices their
/// contexts by 2 ms each.
struct Eager {
    runlist: Runlist,
    /// The program's timeslice and the other's, as the plan has them.
    timeslices: (u64, u64),
    /// Kernels of a request, from one launch to the next, and how long each takes.
    request: (u64, u64, u64),
    /// How long a kernel of the other takes.
    neighbour: u64,
    now: u64,
    /// Launches of the current request, and when the next comes.
    launched: (u64, u64),
    /// Work on the device of each, and the time that the other received.
    queued: (u64, u64),
    received: u64,
    /// Whose timeslice it is on the device, and since when.
    slice: (bool, u64),
    /// What is known of the program: pieces so far, those seen to be done.
    pieces: (u64, u64),
    held: u64,
    permits: Vec<Permit>,
}

impl Eager {
    fn new(timeslices: (u64, u64), request: (u64, u64, u64), neighbour: u64) -> Self {
        Self {
            runlist: Runlist::default(),
            timeslices,
            request,
            neighbour,
            now: 0,
            launched: (0, 0),
            queued: (0, 0),
            received: 0,
            slice: (false, 0),
            pieces: (0, 0),
            held: 0,
            permits: vec![HOLD, HOLD],
        }
    }

    /// The device runs what is queued for so many µs.
    fn run(&mut self, us: u64) {
        for _ in 0..us {
            let (own, others) = self.queued;
            let over = self.now - self.slice.1 >= 2_000;
            let first = match (own > 0, others > 0) {
                (true, true) if over => !self.slice.0,
                (true, true) => self.slice.0,
                (own, _) => own,
            };
            if first != self.slice.0 || over {
                self.slice = (first, self.now);
            }
            match first {
                true => self.queued.0 = own.saturating_sub(1),
                false => {
                    self.received += u64::from(others > 0);
                    self.queued.1 = others.saturating_sub(1);
                }
            }
            self.now += 1;
        }
    }

    /// The daemon looks every 100 µs, the program's library every 150.
    fn step(&mut self) {
        let looks = self.permits[0] == Permit::Watched && self.now.is_multiple_of(150);
        if looks && self.queued.0 == 0 {
            self.pieces.1 = self.pieces.0;
        }
        if self.now.is_multiple_of(100) {
            let latency = Member {
                running: self.pieces.1 < self.pieces.0,
                waits: self.permits[0] == HOLD && self.launched.1 <= self.now,
                latency: true,
                done: self.pieces.1,
                ..member(1, self.timeslices.0)
            };
            let batch = Member {
                running: self.queued.1 > 0,
                ..member(2, self.timeslices.1)
            };
            self.permits = self.runlist.step(Micros(self.now), &[latency, batch]).0;
        }
        let budget = match self.permits[1] {
            Permit::Budget(budget) => budget.0,
            FREE | Permit::Watched => u64::MAX,
            HOLD => 0,
        };
        while self.queued.1 < budget.min(10_000) {
            self.queued.1 += self.neighbour;
        }
        self.run(10);
    }

    /// How long a request takes, on average, and which part of the device the other has.
    fn measure(mut self, requests: u64) -> (u64, f64) {
        let (kernels, every, each) = self.request;
        for _ in 0..requests {
            self.launched = (0, self.now);
            while self.launched.0 < kernels {
                self.step();
                while self.launched.0 < kernels && self.launched.1 <= self.now {
                    if self.permits[0] == HOLD {
                        self.held += 1;
                        break;
                    }
                    self.launched.0 += 1;
                    // A host that was held does not catch up.
                    self.launched.1 = (self.launched.1 + every).max(self.now);
                    self.pieces.0 += 1;
                    self.queued.0 += each;
                }
            }
            while self.queued.0 > 0 {
                self.step();
            }
            self.pieces.1 = self.pieces.0;
        }
        let part = self.received as f64 / self.now as f64;
        (self.now / requests, part)
    }
}

/// Tokens of a language model on an H200: 480 kernels, one every 80 µs, and training.
#[test]
fn neighbour_runs_in_gaps_of_a_launch_bound_program() {
    let alone = 480 * 80;
    for (timeslice, least) in [(2_000, 0.8), (1_000, 0.7), (500, 0.55)] {
        let world = Eager::new((34_000, timeslice), (480, 80, 5), 200);
        let (took, part) = world.measure(40);
        assert!(part >= least, "{part} of the device with {timeslice} µs");
        assert!(took as f64 <= alone as f64 * 1.05, "{took} of {alone} µs");
    }
}

#[test]
fn program_that_fills_the_device_keeps_its_share() {
    // As the plan divides: 95 to 5.
    let (took, part) = Eager::new((34_000, 2_000), (480, 20, 40), 200).measure(40);
    assert!((0.03..0.15).contains(&part), "{part}");
    assert!((took as f64) < 480.0 * 40.0 * 1.2, "{took}");
}

/// What holds a graph's neighbours holds those of a program that is not launch-bound, too.
#[test]
fn neighbour_with_the_shortest_timeslice_runs_in_no_gap() {
    let world = Eager::new((Timeslice::MAX.0, 1), (480, 80, 5), 200);
    let (took, part) = world.measure(40);
    assert!(part < 0.1, "{part}");
    assert!(took < 480 * 80 * 102 / 100, "{took}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Whatever the lengths of kernels, groups receive device time as their timeslices are to each other.
    #[test]
    fn device_time_follows_timeslices(groups in prop::collection::vec((1_000u64..20_000, 5u64..30_000), 2..5)) {
        let mut world = World::new(groups.clone());
        while world.now < 10_000_000 {
            let admitted = world.step();
            let running = admitted.iter().filter(|it| **it != HOLD).count();
            prop_assert!(running <= 1, "{admitted:?}");
        }
        let all: u64 = world.served.iter().sum();
        let slices: u64 = groups.iter().map(|it| it.0).sum();
        for (served, (slice, _)) in world.served.iter().zip(&groups) {
            let (got, due) = (*served as f64 / all as f64, *slice as f64 / slices as f64);
            prop_assert!((got - due).abs() < 0.02, "{got} of {due}: {:?} {groups:?}", world.served);
        }
    }

    /// What batch work may still be on the device when a request comes: its budget and one kernel.
    #[test]
    fn request_waits_for_the_budget_and_one_kernel(kernel in 5u64..5_000, after in 1u64..2_000) {
        let mut world = World::new(vec![(1_000_000, 10), (1, kernel)]);
        // Before the request: the batch group alone has work.
        let batch = |world: &mut World| {
            let members = [
                Member { running: false, waits: false, ..member(1, 1_000_000) },
                Member { running: world.until[1] > world.now, ..member(2, 1) },
            ];
            let (permits, _) = world.runlist.step(Micros(world.now), &members);
            prop_assert_eq!(permits, vec![FREE, SOME]);
            let mut free_at = world.until[1].max(world.now);
            while free_at - world.now < OUTSTANDING.0 {
                free_at += kernel;
            }
            world.until[1] = free_at;
            world.now += 50;
            Ok(())
        };
        for _ in 0..after {
            batch(&mut world)?;
        }
        let served = world.served[1];
        prop_assert_eq!(world.step(), vec![FREE, HOLD]);
        prop_assert_eq!(world.served[1], served, "not one more is launched");
        prop_assert!(world.until[1] - (world.now - 50) <= OUTSTANDING.0 + kernel);
    }

    /// No group that may run is held without end, also if no kernel ends.
    #[test]
    fn every_group_that_may_run_is_permitted(
        slices in prop::collection::vec(500u64..50_000, 2..6),
        ends in any::<bool>(),
    ) {
        let mut runlist = Runlist::default();
        let members: Vec<_> = slices.iter().zip(1..).map(|(slice, id)| Member {
            running: !ends,
            ..member(id, *slice)
        }).collect();
        let mut admitted = vec![false; members.len()];
        let mut now = Micros(0);
        for _ in 0..10_000 {
            let (permits, next) = runlist.step(now, &members);
            for (seen, permit) in admitted.iter_mut().zip(&permits) {
                *seen |= *permit != HOLD;
            }
            let next = next.expect("others wait");
            prop_assert!(next > now);
            now = next;
        }
        prop_assert!(admitted.iter().all(|it| *it), "{admitted:?}");
    }
}
