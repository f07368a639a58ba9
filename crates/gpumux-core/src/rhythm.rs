//! When a domain's work comes next, where it comes at regular times: a camera, a control loop, a decoder with a fixed rate.

use crate::{Micros, Ring};

/// So many distances between arrivals are remembered, and so many of them must fit.
const REMEMBERED: usize = 8;
const FITTING: usize = 6;
/// No work comes more or less often: there is nothing to gain.
const PERIODS: (Micros, Micros) = (Micros::from_millis(2), Micros::from_secs(2));
/// After so many periods without an arrival, nothing is expected any more.
const PATIENCE: u64 = 3;

/// The times at which work came.
#[derive(Clone, Debug, Default)]
pub struct Rhythm {
    last: Option<Micros>,
    distances: Ring<Micros, REMEMBERED>,
    /// The usual distance, if there is one.
    period: Option<Micros>,
}

impl Rhythm {
    /// How much earlier or later than expected work may come: what a timer, a thread's start and the host's work are off.
    pub const SLACK: Micros = Micros(200);

    /// Work came after a pause. Times rise.
    pub fn came(&mut self, at: Micros) {
        if let Some(last) = self.last {
            self.distances.push(at.saturating_sub(last));
            self.period = self.find_period();
        }
        self.last = Some(at);
    }

    /// When it comes next; none if it comes at irregular times, or has stopped coming. In the past by [`Self::SLACK`]
    /// at most.
    pub fn next(&self, now: Micros) -> Option<Micros> {
        let (last, period) = (self.last?, self.period?);
        let late = now.saturating_sub(last + Self::SLACK).0;
        let periods = late.div_ceil(period.0).max(1);
        (periods <= PATIENCE).then(|| last + Micros(period.0 * periods))
    }

    fn find_period(&self) -> Option<Micros> {
        if self.distances.len() < REMEMBERED {
            return None;
        }
        let mut sorted: Vec<Micros> = self.distances.iter().copied().collect();
        sorted.sort_unstable();
        let middle = sorted[REMEMBERED / 2];
        // Some were missed, or came while work was there.
        let fits = |distance: &&Micros| {
            let times = (distance.0 + middle.0 / 2) / middle.0.max(1);
            times > 0 && distance.0.abs_diff(middle.0 * times) <= Self::SLACK.0
        };
        let regular = sorted.iter().filter(fits).count() >= FITTING;
        (regular && PERIODS.0 <= middle && middle <= PERIODS.1).then_some(middle)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rhythm(times: impl IntoIterator<Item = u64>) -> Rhythm {
        let mut rhythm = Rhythm::default();
        times.into_iter().for_each(|at| rhythm.came(Micros(at)));
        rhythm
    }

    #[test]
    fn regular_arrivals_are_expected() {
        let steady = rhythm((0..9).map(|n| 1000 + n * 10_000));
        assert_eq!(steady.next(Micros(81_500)), Some(Micros(91_000)));
        assert_eq!(
            steady.next(Micros(91_200)),
            Some(Micros(91_000)),
            "a bit late"
        );
        assert_eq!(steady.next(Micros(91_201)), Some(Micros(101_000)), "missed");
        assert_eq!(
            steady.next(Micros(111_201)),
            None,
            "it does not come any more"
        );
        assert_eq!(
            rhythm((0..8).map(|n| n * 10_000)).next(Micros(70_000)),
            None
        );
    }

    #[test]
    fn it_may_jitter_and_skip() {
        let jitter = [0, 80, 20, 150, 60, 0, 110, 40, 90, 10];
        let times = (0..10)
            .filter(|n| *n != 4)
            .map(|n| n * 5_000 + jitter[n as usize]);
        let next = rhythm(times).next(Micros(46_000)).unwrap();
        assert!(next.0.abs_diff(50_000) < 200, "{next}");
    }

    #[test]
    fn random_or_constant_arrivals_are_not_expected() {
        let random = [0, 7, 9, 24, 25, 31, 52, 60, 71, 72].map(|ms| ms * 1000);
        assert_eq!(rhythm(random).next(Micros(73_000)), None);
        assert_eq!(
            rhythm((0..20).map(|n| n * 1_000)).next(Micros(20_000)),
            None
        );
        assert_eq!(rhythm((0..20).map(|_| 5)).next(Micros(5)), None);
        // As when a clock begins anew.
        assert_eq!(
            rhythm((0..20).rev().map(|n| n * 10_000)).next(Micros(0)),
            None
        );
    }
}
