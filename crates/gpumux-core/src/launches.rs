//! Whether a program is *launch-bound*: its host submits many small pieces of work, and only then waits, or never for all of them. The device
//! idles between them.
//!
//! A neighbour with the shortest timeslice runs in these gaps, and is preempted by the next piece: two switches for each gap. With a longer
//! timeslice it keeps the device for a while, and the pieces that were submitted meanwhile run one after the other: the host is
//! ahead of the device again before it waits. Only at the wait may the program lose the rest of a timeslice. On an H200, beside training, an eager token
//! of a language model takes 10.6 ms alone, 11.4 ms with a neighbour's timeslice of 1 µs, and 10.7 ms with one of 2 ms; training then keeps
//! 0.95 of its rate instead of 0.76.
//!
//! So the neighbours of a launch-bound tenant get a longer timeslice, as long as its requests take no longer than they do otherwise. How long requests took without
//! neighbours is no measure: on an H200 they take 1.12 to 1.36 times as long beside training whatever its timeslice, and the shortest is the worst (`bench/sweep.py`).
//! Nor is how long they took a while ago: the host that submits them is slower and faster by itself, for seconds. So a request that takes too long ends
//! nothing yet. It begins a *comparison*: a few requests beside the shortest timeslice. Only a timeslice that loses most of several comparisons
//! is given up, for half of it.

use serde::{Deserialize, Serialize};

use crate::{Micros, Timeslice};

/// A request is the time from a program's first piece of work until it has waited for all of it. Launch-bound are those of so many pieces at least, on average:
/// a graph and its copies are three or four. To be checked: `bench/sweep.py`.
const PIECES: u64 = 32;

/// A neighbour's timeslices, halved from the longest after each that was too long, and never longer than a request. Below the shortest, switches
/// cost more than the gaps are worth; above the longest was not measured. To be checked: `bench/sweep.py`.
const TIMESLICES: (Timeslice, Timeslice) = (Timeslice(500), Timeslice(2_000));

/// So many launch-bound requests beside the shortest timeslice are what others are compared with.
const SURE: u32 = 4;

/// So many requests in a row that take too long begin a comparison.
const STRIKES: u64 = 2;

/// So many more comparisons lost than not end a timeslice. On a noisy host about one in four is lost by chance (`noise_of_the_host_does_not_end_it`).
const LOST: u32 = 4;

/// After a comparison that was not lost, requests must be so many before they can begin another: twice as many each time, at most so many.
/// One that takes more than so many times as long as beside the shortest timeslice begins one at once, which counts twice.
const MOST_QUIET: u32 = 64;
const GROSS: f64 = 2.0;

/// A comparison also begins after so many requests, and so long: the program may have become faster beside the shortest timeslice.
const ROUTINE: (u32, Micros) = (128, Micros::from_secs(10));

/// What a program submits in so long without ever having waited for all of it is judged as [`STRIKES`] requests: a pipeline of bounded depth, or a
/// program that waits in callbacks, always has work outstanding. Some requests of a language model, so that the depth matters little.
const STREAM: Micros = Micros::from_millis(50);

/// A mean forgets one part in so many with each value; that of what a comparison follows, which is to be near it, in so many.
const WEIGHT: u32 = 16;
const NEAR: u32 = 4;

/// How soon it is tried again after it had to be ended: at first, and at most, doubled with each end at the shortest timeslice. One that lasted
/// for long enough was no failure.
const RETRY: (Micros, Micros) = (Micros::from_secs(1), Micros::from_secs(60));
const LASTED: Micros = Micros::from_secs(10);

/// What a program has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// How often it has waited for all that it had submitted.
    pub waits: u64,
    /// Pieces of work (kernels, graphs, copies) of those.
    pub pieces: u64,
    /// How long they took, each from the first piece to the end of the wait.
    pub busy: Micros,
    /// Pieces of work that it has submitted so far, also those that it has not waited for.
    pub submitted: u64,
}

impl Progress {
    /// What came after `before`; none if that is not possible.
    fn since(self, before: Self) -> Option<Self> {
        Some(Self {
            waits: self.waits.checked_sub(before.waits)?,
            pieces: self.pieces.checked_sub(before.pieces)?,
            busy: Micros(self.busy.0.checked_sub(before.busy.0)?),
            submitted: self.submitted.checked_sub(before.submitted)?,
        })
    }

    fn plus(self, more: Self) -> Self {
        Self {
            waits: self.waits.saturating_add(more.waits),
            pieces: self.pieces.saturating_add(more.pieces),
            busy: Micros(self.busy.0.saturating_add(more.busy.0)),
            submitted: self.submitted.saturating_add(more.submitted),
        }
    }
}

/// A mean of the last values, and how far they lie from it.
#[derive(Clone, Copy, Debug, Default)]
struct Mean {
    count: u32,
    mean: f64,
    deviation: f64,
}

impl Mean {
    /// It forgets one part in `most` with each value.
    fn record(&mut self, value: f64, most: u32) {
        self.count = self.count.saturating_add(1);
        let weight = 1.0 / f64::from(self.count.min(most));
        if self.count > 1 {
            self.deviation += weight * ((value - self.mean).abs() - self.deviation);
        }
        self.mean += weight * (value - self.mean);
    }
}

/// What is known of the way in which a program submits work.
#[derive(Clone, Debug)]
pub struct Launches {
    seen: Option<Progress>,
    /// What is not judged yet.
    open: Progress,
    /// Since when it has waited for nothing, and what it submitted from then on.
    stream: Option<(Micros, u64)>,
    /// A launch-bound request, in µs, with what is waited for between them.
    length: Mean,
    /// Time for each piece, in µs: with neighbours at the shortest timeslice, and at a longer one.
    short: Mean,
    long: Mean,
    near: Mean,
    /// The longer timeslice, and since when.
    tolerated: Option<(Timeslice, Micros)>,
    /// What is tried next.
    next: Timeslice,
    /// Requests in a row that take too long.
    row: u32,
    /// What requests took at the longer timeslice, while they are compared with those at the shortest.
    compared: Option<Mean>,
    /// How many more comparisons were lost than not.
    lost: u32,
    /// Requests at a longer timeslice before a comparison may begin.
    quiet: u32,
    /// Since when a longer timeslice is in force or compared.
    since: Micros,
    /// What is not judged yet shall not be: it began under another timeslice, or the program was frozen meanwhile.
    mixed: bool,
    /// Not tried before this, and how long that was after the last end.
    retry: (Micros, Micros),
}

impl Default for Launches {
    fn default() -> Self {
        Self {
            seen: None,
            open: Progress::default(),
            stream: None,
            length: Mean::default(),
            short: Mean::default(),
            long: Mean::default(),
            near: Mean::default(),
            tolerated: None,
            next: TIMESLICES.1,
            row: 0,
            compared: None,
            lost: 0,
            quiet: STRIKES as u32,
            since: Micros::ZERO,
            mixed: false,
            retry: (Micros::ZERO, Micros::ZERO),
        }
    }
}

impl Launches {
    /// The timeslice that neighbours may have, if longer than the shortest.
    pub fn tolerated(&self) -> Option<Timeslice> {
        self.tolerated.map(|(timeslice, _)| timeslice)
    }

    /// The program was frozen since the last look: what it does meanwhile tells nothing.
    pub fn leave_out(&mut self) {
        self.mixed = true;
    }

    /// What the program had done by now; `contended`: others compete for its device. Its requests may take longer by the part `slowdown`; 0: never tried.
    /// Returns whether [`Self::tolerated`] has changed.
    pub fn progress(
        &mut self,
        now: Micros,
        progress: Progress,
        contended: impl FnOnce() -> bool,
        slowdown: f64,
    ) -> bool {
        let Some(before) = self.seen.replace(progress) else {
            return false;
        };
        // It may be anything: the program writes it.
        let more = progress.since(before).unwrap_or_default();
        self.open = self.open.plus(more);
        self.stream(now, more);
        let Progress {
            waits: requests,
            pieces,
            busy,
            ..
        } = self.open;
        if requests == 0 {
            return false;
        }
        let launch_bound = pieces / requests >= PIECES;
        // Many programs wait for a number or two between long requests, and may lose a timeslice at each: they are judged together.
        let cycle = self.length.mean.max(TIMESLICES.1.0 as f64);
        let short = requests >= STRIKES && busy.0 as f64 >= cycle || requests >= 4 * STRIKES;
        if !launch_bound && !short {
            return false;
        }
        self.open = Progress::default();
        if slowdown <= 0.0 || !launch_bound {
            return self.end(now);
        }
        if std::mem::take(&mut self.mixed) {
            return false;
        }
        self.judge(
            now,
            busy.0 as f64 / pieces as f64,
            busy.0 as f64 / requests as f64,
            contended(),
            slowdown,
        )
    }

    /// Counts what it submits without a wait as requests.
    fn stream(&mut self, now: Micros, more: Progress) {
        // Before the first look, it may have had no work.
        self.stream = match self.stream.filter(|_| more.waits == 0) {
            Some((since, before)) => Some((since, before.saturating_add(more.submitted))),
            None => Some((now, 0)),
        };
        if let Some((since, pieces)) = self.stream
            && since + STREAM <= now
        {
            self.stream = Some((now, 0));
            self.open = Progress {
                waits: STRIKES,
                pieces,
                busy: now.saturating_sub(since),
                submitted: pieces,
            };
        }
    }

    /// One or more launch-bound requests, of so long, with so much time for each piece.
    fn judge(
        &mut self,
        now: Micros,
        each: f64,
        length: f64,
        contended: bool,
        slowdown: f64,
    ) -> bool {
        if !contended {
            return false;
        }
        let Some((_, since)) = self.tolerated else {
            self.short.record(each, WEIGHT);
            self.length.record(length, WEIGHT);
            return self.short.count >= SURE && now >= self.retry.0 && self.begin(now, slowdown);
        };
        self.long.record(each, WEIGHT);
        self.near.record(each, NEAR);
        let allowed = self.short.mean * (1.0 + slowdown);
        // One request may be off by as much as others are.
        self.row = match each > allowed + 2.0 * self.short.deviation {
            true => self.row + 1,
            false => 0,
        };
        let slow =
            u64::from(self.row) >= STRIKES || self.long.count >= WEIGHT && self.long.mean > allowed;
        let gross = u64::from(self.row) >= STRIKES && each > GROSS * allowed;
        let (count, time) = ROUTINE;
        let routine = self.long.count >= count && since + time <= now;
        // One lost comparison may be chance: the next ones follow at once.
        let again = self.lost > 0 && self.long.count >= SURE;
        let compare = slow && self.long.count >= self.quiet || gross || again || routine;
        if compare {
            self.compared = Some(self.near);
            self.leave();
        }
        compare
    }

    /// The shortest timeslice is in force again; what it is like is found anew.
    fn leave(&mut self) {
        self.tolerated = None;
        (self.row, self.mixed) = (0, true);
        (self.short, self.length) = (Mean::default(), Mean::default());
    }

    /// A longer timeslice, if the requests are long enough: the one that was compared if it was no slower, or not often enough.
    fn begin(&mut self, now: Micros, slowdown: f64) -> bool {
        match self.compared.take() {
            Some(long) => {
                if long.mean > self.short.mean * (1.0 + slowdown) {
                    let far = long.mean > self.short.mean * GROSS;
                    self.lost += if far { LOST / 2 } else { 1 };
                    if self.lost >= LOST && self.halve(now) {
                        return false;
                    }
                } else if self.lost > 0 {
                    self.lost -= 1;
                } else {
                    self.quiet = (2 * self.quiet).min(MOST_QUIET);
                }
            }
            None => self.since = now,
        }
        while self.next > TIMESLICES.0 && self.next.0 as f64 > self.length.mean {
            self.next = Timeslice(self.next.0 / 2);
        }
        if self.next.0 as f64 > self.length.mean {
            return false;
        }
        (self.long, self.near) = (Mean::default(), Mean::default());
        (self.row, self.mixed) = (0, true);
        self.tolerated = Some((self.next, now));
        true
    }

    /// The timeslice is too long. Whether it was the shortest of those that are tried.
    fn halve(&mut self, now: Micros) -> bool {
        let lasted = now.saturating_sub(self.since) >= LASTED;
        (self.lost, self.quiet) = (0, STRIKES as u32);
        self.since = now;
        self.next = Timeslice(self.next.0 / 2);
        if self.next >= TIMESLICES.0 {
            return false;
        }
        self.next = TIMESLICES.1;
        let wait = match lasted {
            true => RETRY.0,
            false => Micros(self.retry.1.0 * 2).clamp(RETRY.0, RETRY.1),
        };
        self.retry = (now + wait, wait);
        true
    }

    /// The program does not submit in this way any more.
    fn end(&mut self, now: Micros) -> bool {
        let was = self.tolerated.is_some();
        let mixed = self.mixed;
        self.leave();
        (self.compared, self.lost, self.quiet) = (None, 0, STRIKES as u32);
        match was {
            true => self.retry.0 = self.retry.0.max(now + RETRY.0),
            false => self.mixed = mixed,
        }
        was
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EAGER: (u64, u64) = (480, 11_400);

    /// A program, and what a look at it every request finds.
    #[derive(Default)]
    struct Program {
        launches: Launches,
        now: Micros,
        done: Progress,
    }

    impl Program {
        /// So many requests of so many pieces, which take so long; where it ends, and whether anything changed.
        fn run(&mut self, requests: u64, (pieces, us): (u64, u64), contended: bool) -> u64 {
            let mut changes = 0;
            self.launches
                .progress(self.now, self.done, || contended, 0.05);
            for _ in 0..requests {
                self.now += Micros(us + 100);
                self.done = self.done.plus(Progress {
                    waits: 1,
                    pieces,
                    busy: Micros(us),
                    submitted: pieces,
                });
                changes +=
                    u64::from(
                        self.launches
                            .progress(self.now, self.done, || contended, 0.05),
                    );
            }
            changes
        }

        /// So many milliseconds in which it submits so many pieces each and waits for none.
        fn stream(&mut self, ms: u64, pieces: u64) -> u64 {
            let mut changes = 0;
            for _ in 0..ms {
                self.now += Micros(1_000);
                self.done.submitted += pieces;
                let (now, done) = (self.now, self.done);
                changes += u64::from(self.launches.progress(now, done, || true, 0.05));
            }
            changes
        }

        fn tolerated(&self) -> Option<u64> {
            self.launches.tolerated().map(|it| it.0)
        }

        /// The part of so many requests that ran beside a neighbour's timeslice of so many µs (0: any longer one). How long one takes
        /// depends on its number and on whether such a timeslice is in force.
        fn part_at(
            &mut self,
            requests: usize,
            timeslice: u64,
            us: impl FnMut(usize, bool) -> u64,
        ) -> f64 {
            let mut us = us;
            let mut found = 0;
            for at in 0..requests {
                let tolerated = self.tolerated();
                found += usize::from(tolerated.is_some_and(|it| timeslice == 0 || it == timeslice));
                self.run(1, (480, us(at, tolerated.is_some())), true);
            }
            found as f64 / requests as f64
        }
    }

    /// A host like those of virtual machines: it drifts by a third within seconds, and single requests take longer by chance.
    struct Noise {
        state: u64,
        drift: f64,
    }

    impl Noise {
        fn new(seed: u64) -> Self {
            Self {
                state: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
                drift: 1.0,
            }
        }

        /// 0 to 1.
        fn next(&mut self) -> f64 {
            self.state ^= self.state << 13;
            self.state ^= self.state >> 7;
            self.state ^= self.state << 17;
            (self.state >> 11) as f64 / (1u64 << 53) as f64
        }

        fn of(&mut self, us: f64) -> u64 {
            self.drift = (self.drift + 0.06 * (self.next() - 0.5)).clamp(0.85, 1.35);
            let single = 1.0
                + 0.05 * self.next()
                + if self.next() < 0.05 {
                    0.5 * self.next()
                } else {
                    0.0
                };
            (us * self.drift * single) as u64
        }
    }

    #[test]
    fn eager_program_gets_a_longer_timeslice_for_its_neighbours() {
        let mut program = Program::default();
        program.run(3, EAGER, true);
        assert_eq!(program.tolerated(), None, "not sure yet");
        program.run(1, EAGER, true);
        assert_eq!(program.tolerated(), Some(2_000));
        let kept = program.part_at(2_000, 2_000, |_, _| 10_700);
        assert!(kept > 0.97, "all but comparisons: {kept}");
    }

    #[test]
    fn timeslice_is_halved_until_requests_are_no_slower() {
        let mut program = Program::default();
        let mut tried = Vec::new();
        while program.now < Micros::from_secs(30) {
            let slow = program.tolerated().is_some_and(|it| it > 500);
            program.run(1, (480, if slow { 13_000 } else { 10_600 }), true);
            tried.extend(program.tolerated());
        }
        tried.dedup();
        assert_eq!(tried, [2_000, 1_000, 500]);
    }

    #[test]
    fn timeslice_is_no_longer_than_a_request() {
        let mut program = Program::default();
        program.run(9, (200, 1_400), true);
        assert_eq!(program.tolerated(), Some(1_000));
        let mut program = Program::default();
        assert_eq!(program.run(1_000, (40, 480), true), 0, "too short");
    }

    #[test]
    fn graph_and_wait_never_gets_one() {
        let mut program = Program::default();
        assert_eq!(program.run(10_000, (4, 12_000), true), 0);
    }

    #[test]
    fn stretch_beyond_the_target_ends_it_within_two_requests() {
        for us in [11_971, 15_000, 1_000_000] {
            let mut program = Program::default();
            program.run(20, EAGER, true);
            assert_eq!(program.tolerated(), Some(2_000));
            assert_eq!(program.run(2, (480, us), true), 1, "{us} µs");
            assert_eq!(program.tolerated(), None);
        }
    }

    #[test]
    fn timeslice_that_makes_requests_slower_is_given_up() {
        for slower in [1.15, 1.4, 3.0] {
            for seed in 1..=20 {
                let mut program = Program::default();
                let mut noise = Noise::new(seed);
                for _ in 0..2 {
                    let part = program.part_at(3_000, 0, |_, longer| {
                        noise.of(10_600.0 * if longer { slower } else { 1.0 })
                    });
                    assert!(part * (slower - 1.0) < 0.08, "{slower} {seed}: {part}");
                }
            }
        }
    }

    #[test]
    fn noise_of_the_host_does_not_end_it() {
        for seed in 1..=50 {
            let mut program = Program::default();
            let mut noise = Noise::new(seed);
            let part = program.part_at(1_000, 0, |_, _| noise.of(11_000.0));
            assert!(part > 0.75, "{seed}: {part}");
            let later = program.part_at(3_000, 0, |_, _| noise.of(11_000.0));
            assert!(later > 0.85, "{seed}: {later}");
        }
    }

    #[test]
    fn change_of_shape_ends_it_within_the_time_of_a_request() {
        let mut program = Program::default();
        program.run(20, EAGER, true);
        // A graph that lost most of two timeslices.
        assert_eq!(program.run(6, (3, 2_000), true), 1);
        assert_eq!(program.tolerated(), None);
    }

    #[test]
    fn waits_that_lose_a_timeslice_are_judged_with_their_request() {
        let mut program = Program::default();
        for _ in 0..100 {
            program.run(1, EAGER, true);
            program.run(2, (3, 2_000), true);
        }
        assert_eq!(program.tolerated(), Some(2_000));
    }

    #[test]
    fn single_waits_between_long_requests_change_nothing() {
        let mut program = Program::default();
        for _ in 0..100 {
            program.run(1, EAGER, true);
            program.run(2, (3, 60), true);
        }
        assert_eq!(program.tolerated(), Some(2_000));
    }

    #[test]
    fn requests_without_neighbours_are_no_measure() {
        let mut program = Program::default();
        assert_eq!(program.run(100, (480, 7_400), false), 0, "nothing to gain");
        program.run(4, EAGER, true);
        assert_eq!(program.tolerated(), Some(2_000));
        assert_eq!(program.run(100, (480, 11_000), true), 0);
    }

    #[test]
    fn slower_on_average_ends_it_though_single_requests_vary() {
        let vary = |at: usize, us: u64| us + [0, 1_600][at % 2];
        let mut program = Program::default();
        let kept = program.part_at(400, 2_000, |at, longer| {
            vary(at, if longer { 10_300 } else { 10_000 })
        });
        assert!(kept > 0.95, "within the target: {kept}");
        let mut program = Program::default();
        program.part_at(400, 2_000, |at, longer| {
            vary(at, if longer { 11_500 } else { 10_000 })
        });
        let kept = program.part_at(400, 0, |at, longer| {
            vary(at, if longer { 11_500 } else { 10_000 })
        });
        assert!(kept < 0.25, "{kept}");
    }

    #[test]
    fn it_is_tried_again_less_and_less_often() {
        let mut program = Program::default();
        let slow = |_, longer| if longer { 13_000 } else { 10_600 };
        let parts: Vec<f64> = [20, 80, 100]
            .map(|seconds| program.part_at(seconds * 1_000_000 / 11_000, 0, slow))
            .into();
        assert!(
            parts[0] < 0.25 && parts[1] < 0.05 && parts[2] < 0.02,
            "{parts:?}"
        );
        assert!(parts.iter().all(|it| *it > 0.0), "{parts:?}");
    }

    #[test]
    fn pipeline_gets_a_longer_timeslice_for_its_neighbours() {
        let mut program = Program::default();
        program.stream(190, 58);
        assert_eq!(program.tolerated(), None, "not sure yet");
        program.stream(20, 58);
        assert_eq!(program.tolerated(), Some(2_000));
        assert!(
            program.stream(10_000, 57) <= 2,
            "it stays, but for a comparison"
        );
    }

    #[test]
    fn slower_pipeline_ends_it_within_150_ms() {
        let mut program = Program::default();
        program.stream(1_000, 58);
        assert_eq!(program.tolerated(), Some(2_000));
        assert_eq!(program.stream(150, 46), 1);
        assert_eq!(program.tolerated(), None);
    }

    #[test]
    fn pipeline_that_becomes_graph_and_wait_ends_it() {
        let mut program = Program::default();
        program.stream(1_000, 58);
        program.run(60, (3, 2_000), true);
        assert_eq!(program.tolerated(), None);
    }

    #[test]
    fn stream_of_few_pieces_never_gets_one() {
        let mut program = Program::default();
        assert_eq!(program.stream(10_000, 1), 0);
    }

    #[test]
    fn time_without_work_is_no_stream() {
        let mut program = Program::default();
        program.run(20, EAGER, true);
        for _ in 0..100 {
            // It has waited: nothing changes until it works again.
            program.now += Micros::from_secs(1);
            assert_eq!(program.run(1, (480, 10_700), true), 0);
        }
    }

    #[test]
    fn counters_may_be_anything() {
        let mut launches = Launches::default();
        let wild = [0, u64::MAX, 3, 1 << 63, 0, 7, u64::MAX];
        for (at, value) in wild.into_iter().cycle().take(500).enumerate() {
            let progress = Progress {
                waits: value,
                pieces: wild[at % 5],
                busy: Micros(wild[at % 3]),
                submitted: wild[at % 7],
            };
            launches.progress(Micros(at as u64), progress, || true, 0.05);
        }
    }

    #[test]
    fn without_a_slowdown_it_is_never_tried() {
        let mut launches = Launches::default();
        for at in 0..1_000 {
            let progress = Progress {
                waits: at,
                pieces: at * EAGER.0,
                busy: Micros(at * EAGER.1),
                submitted: at * EAGER.0,
            };
            assert!(!launches.progress(Micros(at * 20_000), progress, || true, 0.0));
        }
    }
}
