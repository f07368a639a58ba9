//! Whether a program is *launch-bound*: its host submits many small pieces of work, and only then waits, or never for all of them. The device
//! idles between them.
//!
//! A neighbour with the shortest timeslice runs in these gaps, and is preempted by the next piece: two switches for each gap. With a longer
//! timeslice it keeps the device for a while, and the pieces that were submitted meanwhile run one after the other: the host is
//! ahead of the device again before it waits. Only at the wait may the program lose a timeslice. On an H200, beside training, the shortest
//! timeslice costs an eager language model more than one of 2 ms, and training has 0.11 of its rate instead of all (`bench/sweep.py`).
//!
//! So the neighbours of a launch-bound tenant get a longer timeslice. So do those of one that keeps the device busy with long requests: it is
//! their floor. How long follows from how its requests pass: from the time in which its host submits, and from the time in which it waits. How long requests take is no measure: the host that submits them is slower and faster by
//! itself, for seconds, by more than a timeslice costs.

use serde::{Deserialize, Serialize};

use crate::{Micros, Timeslice};

/// A request is the time from a program's first piece of work until it has waited for all of it. Launch-bound are those of so many pieces at least, on average:
/// a graph and its copies are three or four.
const PIECES: u64 = 32;

/// A neighbour's timeslices, halved from the longest. Below the shortest, switches cost more than the gaps are worth; above the longest was not measured.
const TIMESLICES: (Timeslice, Timeslice) = (Timeslice(500), Timeslice(2_000));

/// What a wait loses of a neighbour's timeslice on average, as its reciprocal: half of it, where the neighbour has the device two thirds of the time.
const LOSES: f64 = 3.0;

/// Each wait beside others takes two switches longer, in µs, and their timeslice at most.
const SWITCHES: u64 = 300;

/// So many times in a row a program was found to be launch-bound before its neighbours have a longer timeslice.
const SURE: u32 = 2;

/// It is no longer launch-bound when it has submitted few pieces for each wait for so many times as long as its requests took.
const CYCLES: f64 = 2.0;

/// That is how long its neighbours' timeslice is wrong each time it changes its ways. Where it was right for less than so many times as long before,
/// the try has failed. It has failed as well where its host waits longer because of the timeslice, unless that took so long to show.
const RIGHT: f64 = 10.0;
const LASTED: Micros = Micros::from_secs(5);

/// A timeslice stays until another is right by so much of it.
const MARGIN: f64 = 0.25;

/// What a program submits in so long without ever having waited for all of it is judged as so many requests: a pipeline of bounded depth, or a
/// program that waits in callbacks, always has work outstanding. Some requests of a language model, so that the depth matters little.
const STREAM: (Micros, u64) = (Micros::from_millis(50), 2);

/// A mean forgets one part in so many with each value.
const WEIGHT: u32 = 8;

/// How soon it is tried again after it failed: at first, and at most, doubled each time.
const RETRY: (Micros, Micros) = (Micros::from_secs(1), Micros::from_secs(60));

/// What a program has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// How often it has waited for all that it had submitted.
    pub waits: u64,
    /// Pieces of work (kernels, graphs, copies) of those.
    pub pieces: u64,
    /// How long they took, each from the first piece to the end of the wait.
    pub busy: Micros,
    /// How long it submitted nothing while it had not waited for all of its work, in µs: at the end of each wait, and between two pieces if
    /// that was at least [`Self::GAP`]. Goes round.
    #[serde(default)]
    pub waited_us: u32,
    /// Pieces of work that it has submitted so far, also those that it has not waited for.
    pub submitted: u64,
}

impl Progress {
    /// Between the launches of a request are shorter gaps.
    pub const GAP: Micros = Micros(500);

    /// What came after `before`; none if that is not possible.
    pub(crate) fn since(self, before: Self) -> Option<Self> {
        Some(Self {
            waits: self.waits.checked_sub(before.waits)?,
            pieces: self.pieces.checked_sub(before.pieces)?,
            busy: Micros(self.busy.0.checked_sub(before.busy.0)?),
            waited_us: self.waited_us.wrapping_sub(before.waited_us),
            submitted: self.submitted.checked_sub(before.submitted)?,
        })
    }

    fn plus(self, more: Self) -> Self {
        Self {
            waits: self.waits.saturating_add(more.waits),
            pieces: self.pieces.saturating_add(more.pieces),
            busy: Micros(self.busy.0.saturating_add(more.busy.0)),
            waited_us: self.waited_us.saturating_add(more.waited_us),
            submitted: self.submitted.saturating_add(more.submitted),
        }
    }
}

/// A mean of the last values.
#[derive(Clone, Copy, Debug, Default)]
struct Mean {
    count: u32,
    mean: f64,
}

impl Mean {
    fn record(&mut self, value: f64) {
        self.count = self.count.saturating_add(1);
        self.mean += (value - self.mean) / f64::from(self.count.min(WEIGHT));
    }
}

/// What is known of the way in which a program submits work.
#[derive(Clone, Debug, Default)]
pub struct Launches {
    seen: Option<Progress>,
    /// What is not judged yet.
    open: Progress,
    /// Since when it has waited for nothing, and what it did from then on.
    stream: Option<(Micros, Progress)>,
    /// Its launch-bound requests, in µs, and the timeslice that their neighbours may have.
    length: Mean,
    allowed: Mean,
    /// The longer timeslice, and since when there is one.
    tolerated: Option<(Timeslice, Micros)>,
    /// How long its launch-bound requests took since then.
    right: Micros,
    /// What is not judged yet shall not be: it began under another timeslice, or the program was frozen meanwhile.
    mixed: bool,
    /// Not tried before this, and how long that was after the last end.
    retry: (Micros, Micros),
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

    /// What the program had done by now. Its requests may take longer by the part `slowdown` for the sake of others.
    /// Returns whether [`Self::tolerated`] has changed.
    pub fn progress(&mut self, now: Micros, progress: Progress, slowdown: f64) -> bool {
        let Some(before) = self.seen.replace(progress) else {
            return false;
        };
        // It may be anything: the program writes it.
        let more = progress.since(before).unwrap_or_default();
        self.open = self.open.plus(more);
        self.stream(now, more, before.submitted != before.pieces);
        let found = self.open;
        if found.waits == 0 {
            return false;
        }
        let launch_bound = found.pieces / found.waits >= PIECES;
        // Many programs wait for a number or two between long requests, and may lose a timeslice at each: they are judged together.
        if !launch_bound && (found.busy.0 as f64) < self.wrong() {
            return false;
        }
        self.open = Progress::default();
        if slowdown <= 0.0 || !launch_bound {
            return self.end(now, self.right.0 as f64 >= RIGHT * self.wrong());
        }
        self.right = Micros(self.right.0.saturating_add(found.busy.0));
        match std::mem::take(&mut self.mixed) {
            true => false,
            false => self.judge(now, found, slowdown),
        }
    }

    /// For how long the timeslice is wrong, in µs, once the program does not submit so any more.
    fn wrong(&self) -> f64 {
        CYCLES * self.length.mean.max(TIMESLICES.1.0 as f64)
    }

    /// Counts what it submits without a wait as requests. Whether it had work when it was looked at before.
    fn stream(&mut self, now: Micros, more: Progress, had_work: bool) {
        let goes_on = self.stream.filter(|_| more.waits == 0 && had_work);
        let (since, found) = match goes_on {
            Some((since, before)) => (since, before.plus(more)),
            None => (now, Progress::default()),
        };
        self.stream = Some((since, found));
        if since + STREAM.0 <= now {
            self.stream = Some((now, Progress::default()));
            // How long its host waited is in there already.
            self.open = self.open.plus(Progress {
                waits: STREAM.1,
                pieces: found.submitted,
                busy: now.saturating_sub(since),
                ..Progress::default()
            });
        }
    }

    /// Launch-bound requests. While the host submits, the device follows: the wait at the end costs a part of a timeslice. The more of a request the host waits,
    /// the more of it a timeslice delays, but by no more than itself: a request that keeps the device busy gives neighbours their floor so. Freezes for it would
    /// delay few requests by much more (H200, forty kernels of 0.2 ms a request, `bench/sweep.py`: p99 1.45 instead of 1.03 times alone, the mean 1.06 and 1.07).
    fn judge(&mut self, now: Micros, found: Progress, slowdown: f64) -> bool {
        let requests = found.waits as f64;
        let length = found.busy.0 as f64 / requests;
        let others = self.tolerated.map_or(0, |(it, _)| it.0) + SWITCHES;
        let waits = (f64::from(found.waited_us) / requests - others as f64).max(0.0);
        let launching = LOSES * slowdown * (length - 2.0 * waits);
        let allowed = launching.max((1.0 + MARGIN) * slowdown * length);
        self.length.record(length);
        (self.allowed).record(allowed.clamp(0.0, 2.0 * TIMESLICES.1.0 as f64));
        let allowed = self.allowed.mean;
        let Some((timeslice, since)) = self.tolerated else {
            let (first, sure) = (longest(allowed), self.allowed.count >= SURE);
            let Some(first) = first.filter(|_| sure && now >= self.retry.0) else {
                return false;
            };
            self.tolerated = Some((first, now));
            self.right = Micros::ZERO;
            self.mixed = true;
            return true;
        };
        let exact = timeslice.0 as f64;
        if allowed >= exact * (1.0 - MARGIN) && allowed < 2.0 * exact * (1.0 + MARGIN) {
            return false;
        }
        match longest(allowed) {
            Some(other) if other == timeslice => false,
            Some(other) => {
                self.tolerated = Some((other, since));
                self.mixed = true;
                true
            }
            None => self.end(now, now.saturating_sub(since) >= LASTED),
        }
    }

    /// The program does not submit in this way any more. If it did for long enough, that was no failure.
    fn end(&mut self, now: Micros, long_enough: bool) -> bool {
        (self.length, self.allowed) = (Mean::default(), Mean::default());
        if self.tolerated.take().is_none() {
            return false;
        }
        self.mixed = true;
        let wait = match long_enough {
            true => Micros(0),
            false => Micros(self.retry.1.0 * 2).clamp(RETRY.0, RETRY.1),
        };
        self.retry = (now + wait, wait);
        true
    }
}

/// The longest timeslice that is no longer than this, in µs, if there is one.
fn longest(allowed: f64) -> Option<Timeslice> {
    let (least, most) = TIMESLICES;
    let halves = std::iter::successors(Some(most.0), |it| Some(it / 2));
    halves
        .take_while(|it| *it >= least.0)
        .find(|it| *it as f64 <= allowed)
        .map(Timeslice)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pieces, and µs, of which the host waits so many.
    type Request = (u64, u64, u32);

    /// A token of a language model that is launched kernel by kernel, beside training.
    const EAGER: Request = (480, 11_400, 600);

    /// A program, and what a look at it every request finds.
    #[derive(Default)]
    struct Program {
        launches: Launches,
        now: Micros,
        done: Progress,
    }

    impl Program {
        fn look(&mut self) -> u64 {
            u64::from(self.launches.progress(self.now, self.done, 0.05))
        }

        /// So many such requests; how often the timeslice changed.
        fn run(&mut self, requests: u64, (pieces, us, waited_us): Request) -> u64 {
            let mut changes = self.look();
            for _ in 0..requests {
                self.now += Micros(us + 100);
                self.done.waits += 1;
                self.done.submitted += pieces;
                self.done.pieces = self.done.submitted;
                self.done.busy += Micros(us);
                self.done.waited_us = self.done.waited_us.wrapping_add(waited_us);
                changes += self.look();
            }
            changes
        }

        /// So many milliseconds in which it submits so many pieces each, waits so many µs, and never for all.
        fn stream(&mut self, ms: u64, pieces: u64, waited_us: u32) -> u64 {
            let mut changes = 0;
            for _ in 0..ms {
                self.now += Micros(1_000);
                self.done.submitted += pieces;
                self.done.waited_us = self.done.waited_us.wrapping_add(waited_us);
                changes += self.look();
            }
            changes
        }

        fn tolerated(&self) -> Option<u64> {
            self.launches.tolerated().map(|it| it.0)
        }
    }

    /// A host like those of virtual machines: it drifts by a third within seconds, and single requests take several times as long by chance.
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

        /// What such a request becomes: its host stands in its middle at times, which looks like a wait.
        fn of(&mut self, (pieces, us, waited_us): Request) -> Request {
            self.drift = (self.drift + 0.06 * (self.next() - 0.5)).clamp(0.85, 1.35);
            let stands = match self.next() < 0.03 {
                true => (40_000.0 * self.next()) as u32,
                false => 0,
            };
            let us = (us as f64 * self.drift * (1.0 + 0.05 * self.next())) as u64;
            (pieces, us + u64::from(stands), waited_us + stands)
        }
    }

    #[test]
    fn eager_program_gets_a_longer_timeslice_for_its_neighbours() {
        let mut program = Program::default();
        program.run(1, EAGER);
        assert_eq!(program.tolerated(), None, "not sure yet");
        program.run(1, EAGER);
        assert_eq!(program.tolerated(), Some(1_000));
        // Its waits take part of the timeslice longer.
        assert_eq!(program.run(2_000, (480, 11_900, 1_200)), 0);
        let mut program = Program::default();
        program.run(2, (480, 20_000, 600));
        assert_eq!(program.tolerated(), Some(2_000), "longer requests");
    }

    #[test]
    fn timeslice_is_a_part_of_a_request() {
        for (us, timeslice) in [(2_000, None), (4_400, Some(500)), (7_500, Some(1_000))] {
            let mut program = Program::default();
            program.run(9, (200, us, 100));
            assert_eq!(program.tolerated(), timeslice, "{us} µs");
        }
    }

    #[test]
    fn graph_and_wait_never_gets_one() {
        let mut program = Program::default();
        assert_eq!(program.run(10_000, (4, 12_000, 11_900)), 0);
    }

    /// However many pieces it launches, a neighbour's timeslice delays each of its requests by all of it.
    #[test]
    fn program_that_waits_for_the_device_leaves_neighbours_their_floor() {
        for (us, timeslice) in [(7_900, None), (8_000, Some(500)), (40_000, Some(2_000))] {
            for part in [0.45, 0.7, 0.99] {
                let mut program = Program::default();
                let changes = program.run(10_000, (64, us, (us as f64 * part) as u32));
                assert_eq!(program.tolerated(), timeslice, "{us} µs, {part} of it");
                assert!(changes <= 1, "{changes}");
            }
        }
    }

    #[test]
    fn program_that_begins_to_wait_for_the_device_has_a_shorter_one() {
        let mut program = Program::default();
        program.run(1_000, EAGER);
        let requests = (1..100).find(|_| program.run(1, (480, 11_400, 8_000)) > 0);
        assert!(requests.is_some_and(|it| it <= 30), "{requests:?}");
        program.run(20, (480, 11_400, 8_000));
        assert_eq!(program.tolerated(), Some(500));
        program.run(20, (480, 5_000, 4_000));
        assert_eq!(program.tolerated(), None, "a short request");
    }

    #[test]
    fn noise_of_the_host_does_not_end_it() {
        for seed in 1..=200 {
            let (mut program, mut noise) = (Program::default(), Noise::new(seed));
            let mut without = 0;
            for _ in 0..3_000 {
                program.run(1, noise.of(EAGER));
                without += u32::from(program.tolerated().is_none());
            }
            assert!(without < 30, "{seed}: {without}");
        }
    }

    #[test]
    fn change_of_shape_ends_it_within_the_time_of_some_requests() {
        let mut program = Program::default();
        program.run(20, EAGER);
        // A graph that lost most of two timeslices.
        let requests = CYCLES as u64 * EAGER.1 / 2_000 + 1;
        assert_eq!(program.run(requests, (3, 2_000, 1_990)), 1);
        assert_eq!(program.tolerated(), None);
    }

    /// Such as prompts and tokens in turns: neighbours have most of its gaps each time, and its graphs lose a timeslice for part of theirs only.
    #[test]
    fn program_that_changes_its_shape_again_and_again_is_followed() {
        let mut program = Program::default();
        let (mut with, mut all) = ([0; 2], [0; 2]);
        for _ in 0..200 {
            for (index, request) in [EAGER, (4, 1_900, 1_850)].into_iter().enumerate() {
                for _ in 0..30 {
                    program.run(1, request);
                    with[index] += u32::from(program.tolerated().is_some());
                    all[index] += 1;
                }
            }
        }
        assert!(with[0] * 10 >= all[0] * 9, "{with:?} of {all:?}");
        assert!(with[1] * 10 <= all[1] * 4, "{with:?} of {all:?}");
        // What it does next is not tried any later.
        program.stream(200, 58, 0);
        assert_eq!(program.tolerated(), Some(2_000));
    }

    /// Such as a prompt of some requests and then tokens, with pauses of the user: time without work is no success.
    #[test]
    fn pauses_do_not_make_a_short_try_right() {
        let mut program = Program::default();
        let mut wrong = 0;
        for _ in 0..1_000 {
            program.run(3, EAGER);
            program.now += Micros::from_secs(1);
            for _ in 0..20 {
                program.run(1, (4, 1_900, 1_850));
                wrong += u32::from(program.tolerated().is_some());
            }
            program.now += Micros::from_secs(1);
        }
        assert!(wrong <= 1_000, "{wrong} of 20000");
    }

    #[test]
    fn waits_that_lose_a_timeslice_are_judged_with_their_request() {
        let mut program = Program::default();
        for _ in 0..100 {
            program.run(1, EAGER);
            program.run(2, (3, 2_000, 1_990));
        }
        assert_eq!(program.tolerated(), Some(500));
    }

    /// Such as those before a sequence of tokens.
    #[test]
    fn single_waits_between_long_requests_change_nothing() {
        let mut program = Program::default();
        program.run(2, EAGER);
        for _ in 0..100 {
            assert_eq!(program.run(12, (3, 60, 50)), 0);
            assert_eq!(program.run(20, EAGER), 0);
        }
        assert_eq!(program.tolerated(), Some(1_000));
    }

    #[test]
    fn what_ends_soon_is_tried_again_less_and_less_often() {
        let mut program = Program::default();
        let mut times = 0;
        while program.now < Micros::from_secs(300) {
            let tolerated = program.tolerated().is_some();
            let waited = if tolerated { 4_000 } else { 200 };
            program.run(1, (480, 5_000, waited));
            times += u32::from(!tolerated && program.tolerated().is_some());
        }
        assert!((3..12).contains(&times), "{times}");
    }

    #[test]
    fn pipeline_gets_a_longer_timeslice_for_its_neighbours() {
        let mut program = Program::default();
        program.stream(100, 58, 0);
        assert_eq!(program.tolerated(), None, "not sure yet");
        program.stream(10, 58, 0);
        assert_eq!(program.tolerated(), Some(2_000));
        assert_eq!(program.stream(10_000, 57, 100), 0);
    }

    /// It waits in callbacks, or for a part of its work.
    #[test]
    fn pipeline_that_waits_for_the_device_has_a_shorter_one() {
        let mut program = Program::default();
        assert_eq!(program.stream(10_000, 58, 600), 1);
        assert_eq!(program.tolerated(), Some(1_000));
    }

    #[test]
    fn pipeline_that_becomes_one_of_large_kernels_ends_it() {
        let mut program = Program::default();
        program.stream(1_000, 58, 0);
        program.stream(200, 1, 0);
        assert_eq!(program.tolerated(), None);
    }

    #[test]
    fn pipeline_that_becomes_graph_and_wait_ends_it() {
        let mut program = Program::default();
        program.stream(1_000, 58, 0);
        program.run(60, (3, 2_000, 1_990));
        assert_eq!(program.tolerated(), None);
    }

    #[test]
    fn stream_of_few_pieces_never_gets_one() {
        let mut program = Program::default();
        assert_eq!(program.stream(10_000, 1, 0), 0);
    }

    #[test]
    fn time_without_work_is_no_stream() {
        let mut program = Program::default();
        program.run(20, EAGER);
        for _ in 0..100 {
            // It has waited: nothing changes until it works again, and is seen in the middle of that.
            program.now += Micros::from_secs(1);
            program.done.submitted += 10;
            assert_eq!(program.look(), 0);
            assert_eq!(program.run(1, (470, EAGER.1, EAGER.2)), 0);
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
                waited_us: wild[at % 4] as u32,
                submitted: wild[at % 7],
            };
            launches.progress(Micros(at as u64), progress, 0.05);
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
                waited_us: 0,
                submitted: at * EAGER.0,
            };
            assert!(!launches.progress(Micros(at * 20_000), progress, 0.0));
        }
    }
}
