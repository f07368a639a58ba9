//! When requests arrive, and waiting for it.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use rand::{Rng, SeedableRng, rngs::StdRng};
use rand_distr::{Distribution, Exp1};

/// How the gaps between arrivals are drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Gaps {
    /// All within this fraction of the period, evenly spread; 0 is strictly periodic.
    Periodic(f64),
    /// Exponential: a Poisson process.
    Poisson,
}

/// Arrival times since the start, without end. They never wait for the requests: one that takes longer
/// than its gap makes the next one late.
pub struct Arrivals {
    next: Duration,
    period: Duration,
    gaps: Gaps,
    rng: StdRng,
}

impl Arrivals {
    /// One arrival per `period` on average; the same seed gives the same arrivals.
    pub fn new(period: Duration, gaps: Gaps, seed: u64) -> Self {
        Self {
            next: Duration::ZERO,
            period,
            gaps,
            rng: StdRng::seed_from_u64(seed),
        }
    }
}

impl Iterator for Arrivals {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        let factor: f64 = match self.gaps {
            Gaps::Periodic(jitter) => 1.0 + jitter * self.rng.random_range(-1.0..=1.0),
            Gaps::Poisson => Exp1.sample(&mut self.rng),
        };
        self.next += self.period.mul_f64(factor.max(0.0));
        Some(self.next)
    }
}

/// How long a sleep may overshoot: what is left is spun when precision is wanted.
const SLEEP_SLACK: Duration = Duration::from_micros(150);
/// How often a wait looks at `stop`.
const STOP_POLL: Duration = Duration::from_millis(50);

/// Waits until `due`, to the microsecond if `precise`. False when told to stop.
pub fn wait_until(due: Instant, precise: bool, stop: &AtomicBool) -> bool {
    while !stop.load(Ordering::Relaxed) {
        let left = due.saturating_duration_since(Instant::now());
        let sleep = if precise {
            left.saturating_sub(SLEEP_SLACK)
        } else {
            left
        };
        if left.is_zero() {
            return true;
        } else if sleep.is_zero() {
            std::hint::spin_loop();
        } else {
            thread::sleep(sleep.min(STOP_POLL));
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PERIOD: Duration = Duration::from_millis(5);

    #[test]
    fn periodic_arrivals_are_multiples_of_the_period() {
        let arrivals: Vec<_> = Arrivals::new(PERIOD, Gaps::Periodic(0.0), 1)
            .take(3)
            .collect();
        assert_eq!(arrivals, [PERIOD, 2 * PERIOD, 3 * PERIOD]);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        #[test]
        fn arrivals_are_ordered_and_as_frequent_as_asked(
            seed in any::<u64>(),
            gaps in prop_oneof![Just(Gaps::Periodic(0.0)), Just(Gaps::Periodic(1.0)), Just(Gaps::Poisson)],
        ) {
            let arrivals: Vec<_> = Arrivals::new(PERIOD, gaps, seed).take(10_000).collect();
            prop_assert!(arrivals.is_sorted());
            let mean = arrivals[9_999].as_secs_f64() / 10_000.0 / PERIOD.as_secs_f64();
            // Six standard deviations of the mean of 10,000 exponential gaps.
            prop_assert!((0.94..1.06).contains(&mean), "mean gap {mean} periods");
            let again: Vec<_> = Arrivals::new(PERIOD, gaps, seed).take(10_000).collect();
            prop_assert_eq!(arrivals, again);
        }
    }

    #[test]
    fn a_wait_ends_when_told_to_stop() {
        let stop = AtomicBool::new(true);
        let far = Instant::now() + Duration::from_secs(3600);
        assert!(!wait_until(far, true, &stop));
        stop.store(false, Ordering::Relaxed);
        assert!(wait_until(Instant::now(), true, &stop));
    }
}
