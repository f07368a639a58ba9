//! Long requests: when one is near its end, and whether taking the device there pays. Pure: time comes in.
//!
//! A program that submits hundreds of pieces and waits shares the device meanwhile: the host is slower. At the end the device has work left of it, and the
//! wait would lose a neighbour's timeslice. Where the device is taken before, it does not. What that gains is found by comparing requests with and without.

/// The device is taken so long before the end, in µs: what a neighbour's timeslice of 1 ms leaves of it is enough to run all that was submitted
/// meanwhile, and the wait at the end loses none.
pub(super) const AHEAD: f32 = 1_200.0;
/// Of that the others lose so much, in µs: until their timeslice ends they have the device anyhow, and then the program's pieces and the switches
/// to these would take much of it.
const LOST: f32 = AHEAD / 3.0;
/// Long requests have so many pieces, and are so many times as far from the one before.
pub(super) const LONG: u64 = 32;
const SELDOM: f32 = 8.0;
/// Of the requests, so many are to have about as many pieces as the one before.
const ALIKE: f32 = 0.75;
/// Calls and requests that are only watched at first.
pub(super) const WATCHED: u16 = 8;
/// A microsecond of latency weighs as many of the others' device time.
pub(super) const WORTH: f32 = 4.0;
/// How much a new observation counts, and a new comparison, which has more noise.
pub(super) const RECENT: f32 = 0.125;
const COMPARISON: f32 = 1.0 / 64.0;
/// Comparisons after which the gain is known, and in how many requests one is held until then.
const ENOUGH: u16 = 32;
const FIRST: u16 = 3;
/// A comparison counts by no more, in µs: hosts stand still for 20 ms at times, and what a hold gains is a part of a timeslice.
const FAR: f32 = AHEAD;
/// Of so many calls one is answered the other way, to compare: where holds pay, and where they do not.
pub(super) const COMPARED: (u16, u16) = (128, 16);
/// The same of long requests: to them a hold is little.
const LONG_COMPARED: (u16, u16) = (32, 16);

/// Whether call `n` is the one of `every`, in an order without a period: what programs do has periods.
pub(super) fn is_one_of(every: u16, n: u16) -> bool {
    /// 2^16 divided by the golden ratio: multiples of it are spread evenly.
    const STEP: u16 = 40_503;
    n.wrapping_mul(STEP) < u16::MAX / every
}

/// What is known of long requests: those of many pieces, before the first wait.
pub(super) struct Long {
    /// Pieces of the last one, and when it was waited for.
    pieces: u64,
    at: u64,
    seen: u16,
    /// Part of them that had about as many pieces as the one before.
    alike: f32,
    /// From a piece to the next near the end, in µs.
    each: f32,
    gain: Gain,
    /// The present one is near its end.
    near: Option<Near>,
    /// It is not known yet when the last one was done.
    unknown: bool,
}

#[derive(Clone, Copy)]
struct Near {
    since: u64,
    /// Pieces in all by then.
    submitted: u64,
    /// Whether the device was taken; none if that was out of the question.
    held: Option<bool>,
}

/// The end of a request that is not known to be done.
#[derive(Clone, Copy)]
pub(super) struct End {
    since: u64,
    /// Whether the device was taken, if that compares.
    held: Option<bool>,
}

/// By how much requests end sooner with a hold. Neighbours are compared: hosts are slower for seconds.
struct Gain {
    /// The last one: whether the device was taken, and how long its end took, in µs.
    last: Option<(bool, u64)>,
    /// In µs.
    mean: f32,
    compared: u16,
}

impl Long {
    pub(super) const fn new() -> Self {
        Self {
            pieces: 0,
            at: 0,
            seen: 0,
            alike: 0.0,
            each: 0.0,
            gain: Gain {
                last: None,
                mean: 0.0,
                compared: 0,
            },
            near: None,
            unknown: false,
        }
    }

    /// After how many pieces a request is near its end, if it is one like the last.
    pub(super) fn due(&self) -> Option<u64> {
        (self.pieces > 0).then(|| self.pieces - self.rest())
    }

    /// Pieces from there to the end.
    fn rest(&self) -> u64 {
        let half = self.pieces / 2;
        match self.each > 0.0 {
            true => ((AHEAD / self.each) as u64).clamp(1, half),
            false => half,
        }
    }

    /// The request is near its end, with so many pieces submitted in all. Whether to take the device, if that `may` be.
    pub(super) fn near(&mut self, now: u64, submitted: u64, may: bool) -> bool {
        let apart = now.saturating_sub(self.at) as f32 + AHEAD;
        let fits =
            self.seen >= WATCHED && self.alike > ALIKE && apart >= SELDOM * AHEAD && !self.unknown;
        let held = (fits && may).then(|| self.gain.answer(self.seen));
        self.near = Some(Near {
            since: now,
            submitted,
            held,
        });
        held == Some(true)
    }

    /// The device could not be taken for it.
    pub(super) fn not_held(&mut self) {
        if let Some(near) = &mut self.near {
            near.held = near.held.map(|_| false);
        }
    }

    /// One is waited for now, of so many pieces, and so many in all. A hold lasts for `timeout` µs. Returns its end, and whether there was a hold
    /// that work does not meet, or that is over already.
    pub(super) fn end(
        &mut self,
        now: u64,
        pieces: u64,
        upto: u64,
        timeout: f32,
    ) -> (Option<End>, bool) {
        let before = std::mem::replace(&mut self.pieces, pieces);
        let alike = pieces.abs_diff(before) <= self.rest() / 4;
        let weight = if self.seen == 0 { 1.0 } else { RECENT };
        self.alike += (f32::from(u8::from(alike)) - self.alike) * weight;
        self.at = now;
        self.seen = self.seen.checked_add(1).unwrap_or(WATCHED);
        let Some(near) = self.near.take() else {
            return (None, false);
        };
        // The first was looked at from its middle on.
        let compares = alike && self.each > 0.0;
        let rest = upto.wrapping_sub(near.submitted);
        let passed = now.saturating_sub(near.since) as f32;
        if alike && rest > 0 {
            let weight = if self.each == 0.0 { 1.0 } else { RECENT };
            self.each += (passed / rest as f32 - self.each) * weight;
        }
        self.unknown = true;
        let end = End {
            since: near.since,
            held: near.held.filter(|_| compares),
        };
        let lost = near.held == Some(true) && (!alike || passed > timeout);
        (Some(end), lost)
    }

    /// The last one is done.
    pub(super) fn done(&mut self, end: End, now: u64) {
        self.unknown = false;
        if let Some(held) = end.held {
            self.gain.compare(held, now.saturating_sub(end.since));
        }
    }
}

impl Gain {
    /// Whether to take the device for the request of this number.
    fn answer(&self, n: u16) -> bool {
        let pays = WORTH * self.mean > LOST;
        match (self.compared < ENOUGH, pays) {
            (true, _) => is_one_of(FIRST, n),
            (_, true) => !is_one_of(LONG_COMPARED.0, n),
            (_, false) => is_one_of(LONG_COMPARED.1, n),
        }
    }

    fn compare(&mut self, held: bool, us: u64) {
        if let Some((other, took)) = self.last.replace((held, us))
            && other != held
        {
            let longer = us as f32 - took as f32;
            let gain = if held { -longer } else { longer };
            let weight = COMPARISON.max(1.0 / (f32::from(self.compared) + 1.0));
            self.mean += (gain.clamp(-FAR, FAR) - self.mean) * weight;
            self.compared = self.compared.saturating_add(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: f32 = 2_700.0;

    /// A program that submits a piece every 15 µs.
    struct Program {
        long: Long,
        now: u64,
        upto: u64,
    }

    impl Program {
        fn new() -> Self {
            Self {
                long: Long::new(),
                now: 0,
                upto: 0,
            }
        }

        /// A request of so many pieces, which the host stops before the last 40 of for so many µs. Whether the device was taken for it, and how long before its end.
        fn submit(&mut self, pieces: u64, stops: u64) -> Option<u64> {
            let due = self.long.due().filter(|due| *due <= pieces);
            let begun = self.now;
            let at = |n| begun + n * 15 + if n + 40 > pieces { stops } else { 0 };
            let taken = due.filter(|due| self.long.near(at(*due), self.upto + due, true));
            self.now = at(pieces);
            self.upto += pieces;
            taken.map(|due| self.now - at(due))
        }

        /// Begins to wait for it.
        fn end(&mut self, pieces: u64) -> (Option<End>, bool) {
            self.long.end(self.now, pieces, self.upto, TIMEOUT)
        }

        /// Submits one and waits for it, which takes so long without a hold, and with one. When the device was taken before its end.
        fn request(&mut self, pieces: u64, tail: [u64; 2]) -> Option<u64> {
            let held = self.submit(pieces, 0);
            let (end, _) = self.end(pieces);
            self.now += tail[usize::from(held.is_some())];
            if let Some(end) = end {
                self.long.done(end, self.now);
            }
            held
        }

        /// So many requests. In how many per cent the device was taken.
        fn held(&mut self, requests: u64, mut tail: impl FnMut(u64) -> [u64; 2]) -> u64 {
            let held = |n: &u64| self.request(690, tail(*n)).is_some();
            (0..requests).filter(held).count() as u64 * 100 / requests
        }
    }

    #[test]
    fn device_is_taken_before_the_end() {
        let mut it = Program::new();
        let mut near = 0;
        for n in 0..1_000 {
            if let Some(ahead) = it.request(690 + n % 3, [700, 150]) {
                near += 1;
                assert!(n < 20 || ahead.abs_diff(AHEAD as u64) < 100, "{n}: {ahead}");
            }
        }
        assert!(near > 900, "{near}");
        // It gains nothing any more, and then it does again.
        assert!(it.held(10_000, |_| [700, 650]) < 45);
        assert!(it.held(10_000, |_| [700, 150]) > 90);
    }

    #[test]
    fn what_is_not_alike_or_short_or_often_is_let_be() {
        let tries = |pieces: fn(u64) -> u64, pause| {
            let mut it = Program::new();
            let held = |n: &u64| {
                it.now += pause;
                it.request(pieces(*n), [700, 150]).is_some()
            };
            (0..1_000).filter(held).count()
        };
        assert_eq!(tries(|n| 300 + 100 * (n % 4), 5_000), 0);
        assert_eq!(
            tries(|n| [400, 400, 1_000, 1_000][n as usize % 4], 5_000),
            0
        );
        assert_eq!(tries(|_| 100, 1_000), 0, "one of 2 ms after the other");
        assert_eq!(tries(|n| 100 + n % 2, 1_000), 0);
        assert!(tries(|_| 100, 10_000) > 900);
    }

    /// Bursts of 20, and a second of nothing: only the first of each may be held.
    #[test]
    fn requests_of_a_burst_are_let_be() {
        let mut it = Program::new();
        for _ in 0..100 {
            it.now += 1_000_000;
            for k in 0..20 {
                let held = it.request(150, [700, 150]);
                assert!(held.is_none() || k == 0);
            }
        }
    }

    /// Uniform noise of this standard deviation, in µs.
    fn noise(seed: &mut u64, deviation: f64) -> f64 {
        *seed ^= *seed << 13;
        *seed ^= *seed >> 7;
        *seed ^= *seed << 17;
        ((*seed >> 11) as f64 / (1u64 << 53) as f64 - 0.5) * 12f64.sqrt() * deviation
    }

    #[test]
    fn noise_is_no_gain_and_hides_none() {
        for deviation in [0.0, 100.0, 300.0, 500.0, 800.0] {
            let held = |gain: f64| {
                let of = |run: u64| {
                    let mut seed = run;
                    Program::new().held(10_000, |_| {
                        let without = 4_000.0 + noise(&mut seed, deviation);
                        [without as u64, (without - gain) as u64]
                    })
                };
                (1..=10u64)
                    .map(|run| run * 0x9E37_79B9)
                    .map(of)
                    .sum::<u64>()
                    / 10
            };
            let found = [-600.0, 0.0, 600.0, 200.0].map(held);
            println!("{deviation} µs: {found:?} %");
            assert!(found[0] < 9 && found[1] < 30, "{deviation} µs: {found:?} %");
            assert!(found[2] > 90, "{deviation} µs: {found:?} %");
            // As much as an eager language model gains beside training on an H200.
            assert!(
                found[3] > 75 || deviation > 300.0,
                "{deviation} µs: {found:?} %"
            );
        }
    }

    /// Kinds of requests that take turns, as many pieces each.
    #[test]
    fn turns_of_several_kinds_are_no_gain_and_hide_none() {
        for kinds in 1..=17 {
            for first in 0..kinds {
                let held = |gain: i64| {
                    Program::new().held(10_000, |n| {
                        let without = if n % kinds == first { 2_500 } else { 1_500 };
                        [without as u64, (without - gain) as u64]
                    })
                };
                let found = [-300, 0, 600].map(held);
                println!("{first} of {kinds}: {found:?} %");
                assert!(
                    found[0] < 9 && found[1] < 30 && found[2] > 85,
                    "{first} of {kinds}: {found:?} %"
                );
            }
        }
    }

    /// At first everything takes longer, then the host is slower for seconds at a time, and every 20th request stands still.
    #[test]
    fn gain_is_found_on_hosts_that_are_slow_at_times() {
        let run = |with| {
            Program::new().held(10_000, |n| {
                let slow = if n < 50 {
                    30_000 / (n + 1)
                } else {
                    n / 150 % 2 * 2_000
                };
                let stands = if n % 20 == 7 { 20_000 } else { 0 };
                let more = slow + stands + n * 7_919 % 400;
                [700 + more, with + more]
            })
        };
        let (gains, none) = (run(100), run(700));
        assert!(gains > 80 && none < 15, "{gains} {none}");
    }

    /// A program that reads its results and then only asks whether they are there.
    #[test]
    fn ends_that_are_not_seen_are_let_be() {
        let mut it = Program::new();
        for _ in 0..100 {
            assert_eq!(it.submit(690, 0), None);
            it.end(690);
            it.now += 500;
        }
    }

    /// The host stops before the last pieces.
    #[test]
    fn hold_that_is_over_before_the_end_is_lost() {
        let mut it = Program::new();
        let mut lost = [0; 2];
        for n in 0..1_000 {
            let stops = if n % 3 == 0 { 5_000 } else { 0 };
            let ahead = it.submit(690, stops);
            let (end, loses) = it.end(690);
            let is_over = ahead.is_some_and(|us| us as f32 > TIMEOUT);
            assert_eq!(loses, is_over, "{n}");
            lost[usize::from(loses)] += 1;
            it.now += if ahead.is_some() { 150 } else { 700 };
            if let Some(end) = end {
                it.long.done(end, it.now);
            }
        }
        assert!(lost[1] > 10, "{lost:?}");
    }
}
