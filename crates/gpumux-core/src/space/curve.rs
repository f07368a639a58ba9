//! A program's scaling profile: its throughput as a function of their number, as far as it was measured.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Measurements at one number of SMs weigh as much as the last so many: what a program does changes.
const REMEMBERED: f64 = 8.0;

/// Measured throughput at so many SMs. The unit of throughput is the caller's; only ratios count.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Curve {
    points: BTreeMap<u32, Mean>,
}

/// Whether this can be a point of a curve over percentages of the SMs: 1 to 100 percent, and a throughput that
/// is 0 or has a size of which ratios can be made.
pub fn is_point(percent: u32, rate: f64) -> bool {
    (1..=100).contains(&percent) && (rate == 0.0 || (1e-6..=1e15).contains(&rate))
}

/// A mean that forgets slowly.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Mean {
    value: f64,
    /// How many measurements it rests on, at most [`REMEMBERED`].
    samples: f64,
}

impl Mean {
    pub(super) fn add(&mut self, value: f64) {
        self.samples = (self.samples + 1.0).min(REMEMBERED);
        self.value += (value - self.value) / self.samples;
    }

    pub(super) fn value(self) -> f64 {
        self.value
    }
}

/// A line through points of rising SMs that begins at the origin and goes on as it ended.
pub(super) struct Line(Vec<(f64, f64)>);

impl Curve {
    /// Of measurements `(sms, rate)`.
    pub fn measured(points: impl IntoIterator<Item = (u32, f64)>) -> Self {
        let mut curve = Self::default();
        for (sms, rate) in points {
            curve.measure(sms, rate);
        }
        curve
    }

    /// Of measurements at percentages of the SMs. Those that are no [`is_point`] are left out.
    pub fn of_percents(points: impl IntoIterator<Item = (u32, f64)>) -> Self {
        let points = points.into_iter();
        Self::measured(points.filter(|(percent, rate)| is_point(*percent, *rate)))
    }

    /// Adds a measurement. One that makes no sense (no SMs, a rate below 0 or not finite) is ignored.
    pub fn measure(&mut self, sms: u32, rate: f64) {
        if sms == 0 || !rate.is_finite() || rate < 0.0 {
            return;
        }
        self.points.entry(sms).or_default().add(rate);
    }

    /// Whether nothing was measured.
    pub fn is_empty(&self) -> bool {
        self.points.is_empty()
    }

    /// What was measured, by rising SMs: `(sms, mean rate)`.
    pub fn points(&self) -> impl Iterator<Item = (u32, f64)> + '_ {
        self.points.iter().map(|(sms, mean)| (*sms, mean.value))
    }

    /// Throughput at so many SMs: between measurements on the straight line, beyond the last one as it went before.
    /// Never falls with more SMs.
    pub fn rate(&self, sms: u32) -> f64 {
        self.monotone().at(sms)
    }

    /// Throughput at so many SMs relative to `whole` SMs, as measured. Linear if nothing was.
    pub fn utility(&self, sms: u32, whole: u32) -> f64 {
        self.monotone().relative(sms, whole)
    }

    /// The measurements, pooled where fewer SMs seemed better (isotonic regression).
    pub(super) fn monotone(&self) -> Line {
        // Blocks of SMs with one rate: (sum of rate x samples, samples, the SMs).
        let mut blocks: Vec<(f64, f64, Vec<u32>)> = Vec::new();
        for (sms, point) in &self.points {
            blocks.push((point.value * point.samples, point.samples, vec![*sms]));
            while let [.., a, b] = &blocks[..]
                && a.0 / a.1 > b.0 / b.1
            {
                let (sum, samples, sms) = blocks.pop().unwrap_or_default();
                if let Some(last) = blocks.last_mut() {
                    last.0 += sum;
                    last.1 += samples;
                    last.2.extend(sms);
                }
            }
        }
        let pooled = blocks.iter().flat_map(|(sum, samples, sms)| {
            let rate = sum / samples;
            sms.iter().map(move |sms| (f64::from(*sms), rate))
        });
        Line(std::iter::once((0.0, 0.0)).chain(pooled).collect())
    }

    /// The least concave line above [`Self::monotone`] up to `whole` SMs, where the two meet.
    pub(super) fn hull(&self, whole: u32) -> Line {
        let line = self.monotone();
        let end = (f64::from(whole), line.at(whole));
        let mut hull: Vec<(f64, f64)> = Vec::new();
        let before = line.0.into_iter().filter(|point| point.0 < end.0);
        for next in before.chain([end]) {
            while let [.., a, b] = hull[..]
                && (b.1 - a.1) * (next.0 - a.0) <= (next.1 - a.1) * (b.0 - a.0)
            {
                hull.pop();
            }
            hull.push(next);
        }
        Line(hull)
    }
}

impl Line {
    pub(super) fn at(&self, sms: u32) -> f64 {
        let sms = f64::from(sms);
        let [.., a, b] = self.0[..] else {
            // Nothing measured: as much as there are SMs.
            return sms;
        };
        let after = self.0.partition_point(|point| point.0 < sms);
        let (a, b) = match after {
            0 => return 0.0,
            after if after < self.0.len() => (self.0[after - 1], self.0[after]),
            _ => (a, b),
        };
        a.1 + (b.1 - a.1) * (sms - a.0) / (b.0 - a.0)
    }

    /// 0 to 1 for up to `whole` SMs.
    pub(super) fn relative(&self, sms: u32, whole: u32) -> f64 {
        match self.at(whole) {
            all if all > 0.0 => self.at(sms) / all,
            _ => 0.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn nothing_measured_is_linear() {
        let curve = Curve::default();
        assert_eq!(curve.utility(33, 132), 0.25);
    }

    #[test]
    fn between_and_beyond_measurements_it_goes_straight_on() {
        let curve = Curve::measured([(32, 8.0), (64, 12.0)]);
        assert_eq!(curve.rate(16), 4.0);
        assert_eq!(curve.rate(48), 10.0);
        assert_eq!(curve.rate(96), 16.0);
        let saturated = Curve::measured([(32, 8.0), (64, 8.0)]);
        assert_eq!(saturated.rate(132), 8.0);
    }

    #[test]
    fn what_falls_is_pooled_by_how_often_it_was_measured() {
        let curve = Curve::measured([(8, 4.0), (16, 4.0), (16, 4.0), (16, 4.0), (24, 0.0)]);
        assert_eq!([8, 16, 24].map(|sms| curve.rate(sms)), [3.2; 3]);
    }

    #[test]
    fn the_hull_passes_over_dents_and_stays_on_concave_points() {
        let dent = Curve::measured([(8, 0.0), (16, 4.0), (24, 5.0)]).hull(24);
        assert_eq!([8, 16, 24].map(|sms| dent.at(sms)), [2.0, 4.0, 5.0]);
    }

    #[test]
    fn new_measurements_displace_old_ones() {
        let mut curve = Curve::measured([(8, 100.0); 20]);
        for _ in 0..40 {
            curve.measure(8, 10.0);
        }
        assert!(curve.rate(8) < 11.0, "{}", curve.rate(8));
    }

    #[test]
    fn nonsense_is_ignored() {
        let curve = Curve::measured([(0, 1.0), (8, f64::NAN), (8, -1.0), (8, f64::INFINITY)]);
        assert!(curve.is_empty());
    }

    fn curves() -> impl Strategy<Value = Curve> {
        let point = (1..140_u32, 0.0..1000.0_f64);
        prop::collection::vec(point, 0..20).prop_map(Curve::measured)
    }

    proptest! {
        #[test]
        fn the_line_never_falls_and_the_hull_is_concave_above_it(curve in curves()) {
            let (line, hull) = (curve.monotone(), curve.hull(132));
            let near = 1e-9 * line.at(132).max(1.0);
            prop_assert!((hull.at(132) - line.at(132)).abs() <= near);
            for sms in 1..132 {
                prop_assert!(line.at(sms) >= line.at(sms - 1) - near);
                prop_assert!(hull.at(sms) >= line.at(sms) - near);
                let (before, here, after) = (hull.at(sms - 1), hull.at(sms), hull.at(sms + 1));
                prop_assert!(here - before >= after - here - near, "{sms}: {curve:?}");
            }
        }
    }
}
