//! Whether a program is *launch-bound*: its host submits many small pieces of work, and only then waits, or never for all of them. The device
//! idles between them.
//!
//! A neighbour with the shortest timeslice runs in these gaps, and is preempted by the next piece: two switches for each gap. With a longer
//! timeslice it keeps the device for a while, and the pieces that were submitted meanwhile run one after the other: the host is
//! ahead of the device again before it waits. Only at the wait may the program lose the rest of a timeslice. On an H200, beside training, an eager token
//! of a language model takes 10.6 ms alone, 11.4 ms with a neighbour's timeslice of 1 µs, and 10.7 ms with one of 2 ms; training then keeps
//! 0.95 of its rate instead of 0.76.
//!
//! So the neighbours of a launch-bound tenant get a longer timeslice, as long as its requests take no longer than they do otherwise: time for each piece is compared
//! with that under the shortest timeslice. What exceeds it twice in a row, or is no longer launch-bound, ends it. How long requests took without
//! neighbours is no measure: on an H200 they take 1.12 to 1.36 times as long beside training whatever its timeslice, and the shortest is the worst (`bench/sweep.py`).

use serde::{Deserialize, Serialize};

use crate::{Micros, Timeslice};

/// A request is the time from a program's first piece of work until it has waited for all of it. Launch-bound are those of so many pieces at least, on average:
/// a graph and its copies are three or four. To be checked: `bench/sweep.py`.
const PIECES: u64 = 32;

/// A neighbour's timeslices, halved from the longest after each that was too long, and never longer than a request. Below the shortest, switches
/// cost more than the gaps are worth; above the longest was not measured. To be checked: `bench/sweep.py`.
const TIMESLICES: (Timeslice, Timeslice) = (Timeslice(500), Timeslice(2_000));

/// So many launch-bound requests in a row come before a longer timeslice is tried.
const SURE: u32 = 4;

/// So many requests in a row that take too long, or are not launch-bound, end it. Those that together took less than a
/// timeslice lost nothing: many programs wait for a number or two between long requests.
const STRIKES: u64 = 2;

/// What a program submits in so long without ever having waited for all of it is judged as [`STRIKES`] requests: a pipeline of bounded depth, or a
/// program that waits in callbacks, always has work outstanding. Some requests of a language model, so that the depth matters little.
const STREAM: Micros = Micros::from_millis(50);

/// A mean forgets one part in so many with each value.
const WEIGHT: u32 = 16;

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
    fn record(&mut self, value: f64) {
        self.count = self.count.saturating_add(1);
        let weight = 1.0 / f64::from(self.count.min(WEIGHT));
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
    /// The longer timeslice, and since when.
    tolerated: Option<(Timeslice, Micros)>,
    /// What is tried next.
    next: Timeslice,
    /// Launch-bound requests in a row; then, those that take too long.
    row: u32,
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
            tolerated: None,
            next: TIMESLICES.1,
            row: 0,
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
        let timeslice = self.tolerated().unwrap_or(TIMESLICES.0);
        let short = requests >= STRIKES && (busy.0 >= timeslice.0 || requests >= 4 * STRIKES);
        if !launch_bound && !short {
            return false;
        }
        self.open = Progress::default();
        if slowdown <= 0.0 || !launch_bound {
            self.row = 0;
            return self.end(now, false);
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
        if self.tolerated.is_none() {
            self.short.record(each);
            self.length.record(length);
            self.row += 1;
            return self.row >= SURE && now >= self.retry.0 && self.begin(now);
        }
        self.long.record(each);
        let allowed = self.short.mean * (1.0 + slowdown);
        // One request may be off by as much as others are.
        self.row = match each > allowed + 2.0 * self.short.deviation {
            true => self.row + 1,
            false => 0,
        };
        let slow = u64::from(self.row) >= STRIKES;
        let slow_on_average = self.long.count >= WEIGHT && self.long.mean > allowed;
        (slow || slow_on_average) && self.end(now, true)
    }

    /// Begins to try a longer timeslice, if the requests are long enough.
    fn begin(&mut self, now: Micros) -> bool {
        while self.next > TIMESLICES.0 && self.next.0 as f64 > self.length.mean {
            self.next = Timeslice(self.next.0 / 2);
        }
        if self.next.0 as f64 > self.length.mean {
            return false;
        }
        (self.long, self.row, self.mixed) = (Mean::default(), 0, true);
        self.tolerated = Some((self.next, now));
        true
    }

    /// Ends it, if it was tried; `slow`: because requests took too long.
    fn end(&mut self, now: Micros, slow: bool) -> bool {
        let Some((timeslice, since)) = self.tolerated.take() else {
            return false;
        };
        let (_, before) = self.retry;
        let mut wait = RETRY.0;
        if slow && now.saturating_sub(since) < LASTED {
            self.next = Timeslice(timeslice.0 / 2);
            if self.next < TIMESLICES.0 {
                self.next = TIMESLICES.1;
                wait = Micros(before.0 * 2).clamp(RETRY.0, RETRY.1);
            } else {
                wait = before.max(RETRY.0);
            }
        }
        self.retry = (now + wait, wait);
        (self.row, self.mixed) = (0, true);
        // The program may have changed.
        (self.short, self.length) = (Mean::default(), Mean::default());
        true
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
    }

    #[test]
    fn eager_program_gets_a_longer_timeslice_for_its_neighbours() {
        let mut program = Program::default();
        program.run(3, EAGER, true);
        assert_eq!(program.tolerated(), None, "not sure yet");
        program.run(1, EAGER, true);
        assert_eq!(program.tolerated(), Some(2_000));
        assert_eq!(program.run(1_000, (480, 10_700), true), 0, "it stays");
    }

    #[test]
    fn timeslice_is_halved_until_requests_are_no_slower() {
        let mut program = Program::default();
        let mut tried = Vec::new();
        while program.now < Micros::from_secs(30) {
            let before = program.tolerated();
            let slow = before.is_some_and(|it| it > 500);
            program.run(1, (480, if slow { 13_000 } else { 10_600 }), true);
            tried.extend(program.tolerated().filter(|_| before.is_none()));
        }
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
    fn change_of_shape_ends_it_within_two_requests() {
        let mut program = Program::default();
        program.run(20, EAGER, true);
        // A graph that lost most of two timeslices.
        assert_eq!(program.run(2, (3, 2_000), true), 1);
        assert_eq!(program.tolerated(), None);
    }

    #[test]
    fn waits_for_single_numbers_between_long_requests_change_nothing() {
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
        let mut program = Program::default();
        let vary = |program: &mut Program, us: u64, requests: u64| {
            (0..requests)
                .map(|at| program.run(1, (480, us + [0, 1_600][at as usize % 2]), true))
                .sum::<u64>()
        };
        vary(&mut program, 10_000, 40);
        assert_eq!(program.tolerated(), Some(2_000));
        assert_eq!(vary(&mut program, 10_300, 40), 0, "within the target");
        assert_eq!(vary(&mut program, 11_000, 40), 1);
    }

    #[test]
    fn it_is_tried_again_less_and_less_often() {
        let mut program = Program::default();
        let mut tried = Vec::new();
        while program.now < Micros::from_secs(200) {
            let slow = program.tolerated().is_some();
            if program.run(1, (480, if slow { 13_000 } else { 10_600 }), true) > 0 && !slow {
                tried.push(program.now.0 / 1_000_000);
            }
        }
        // Three timeslices after about a second each, then after two, and so on.
        let times: Vec<usize> = [0..20, 20..100, 100..200]
            .map(|span| tried.iter().filter(|at| span.contains(*at)).count())
            .to_vec();
        assert!(times[0] <= 9 && times[1] <= 9 && times[2] <= 3, "{tried:?}");
        assert!(tried.len() >= 12, "{tried:?}");
    }

    #[test]
    fn pipeline_gets_a_longer_timeslice_for_its_neighbours() {
        let mut program = Program::default();
        program.stream(190, 58);
        assert_eq!(program.tolerated(), None, "not sure yet");
        program.stream(20, 58);
        assert_eq!(program.tolerated(), Some(2_000));
        assert_eq!(program.stream(10_000, 57), 0, "it stays");
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
        assert_eq!(program.run(2, (3, 2_000), true), 1);
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
