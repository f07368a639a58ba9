//! What was learnt of a program over all its runs, for its next start: its curve, and what it needs of the memory's bandwidth.

use serde::{Deserialize, Serialize};

use super::{Bandwidth, Curve, curve::Mean, is_point};

/// What was measured of one program.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Program {
    /// Pieces of work per second while no neighbour disturbed it, by percent of the SMs.
    curve: Curve,
    /// Part of the time in which it has the device, when it has all SMs and no neighbour disturbs it.
    duty: Option<Mean>,
    /// What it was measured to need of the memory's bandwidth.
    #[serde(default)]
    bandwidth: Option<Bandwidth>,
}

/// What a tenant did in a while in which no other member of its group had work.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Observation {
    /// How long that was, in seconds.
    pub seconds: f64,
    /// Seconds of that in which it, or its group, had work and others had the device.
    pub waited: f64,
    /// Seconds of that in which it had work itself: while it waits, the work may be that of others in its group.
    pub busy: f64,
    /// Pieces of work that it gave to the device.
    pub work: u64,
    /// Percent of the SMs that it may use.
    pub percent: u32,
}

/// A while in which a program was kept waiting for more than this part of it, or did fewer pieces of work, tells nothing.
const WAITED: f64 = 0.75;
const PIECES: u64 = 10;
/// Nor does one in which it had nothing to do for most of the time: then its users set its throughput, not the SMs.
const DUTY: f64 = 0.5;

/// Pieces of work per second in which a program was not kept `waited` of so many `seconds`; `None` where it was for most of
/// them.
pub fn throughput(work: u64, seconds: f64, waited: f64) -> Option<f64> {
    let telling = seconds > 0.0 && waited <= seconds * WAITED;
    telling.then(|| work as f64 / (seconds - waited))
}

impl Program {
    /// Learns from a while of its life, which may leave its curve alone; whether that told anything.
    pub fn learn(&mut self, seen: &Observation, keep_curve: bool) -> bool {
        let rate = throughput(seen.work, seen.seconds, seen.waited);
        let Some(rate) = rate.filter(|rate| is_point(seen.percent, *rate)) else {
            return false;
        };
        // As if it had had work whenever its group waited: what is left is its own in any case.
        let duty = (seen.busy - seen.waited) / (seen.seconds - seen.waited);
        if seen.work < PIECES || !duty.is_finite() || duty < DUTY {
            return false;
        }
        if !keep_curve {
            self.curve.measure(seen.percent, rate);
        }
        if seen.percent == 100 {
            self.duty.get_or_insert_default().add(duty.min(1.0));
        }
        true
    }

    /// What was measured on purpose: percent of the SMs, pieces of work per second, and what it needs of the memory's bandwidth.
    pub fn measured(
        points: impl IntoIterator<Item = (u32, f64)>,
        bandwidth: Option<Bandwidth>,
    ) -> Self {
        Self {
            curve: Curve::of_percents(points),
            duty: None,
            bandwidth,
        }
    }

    /// All that is known of its curve.
    pub fn curve(&self) -> &Curve {
        &self.curve
    }

    /// Its curve, if more of it is known than one point: a line does not show which program gains most from SMs.
    pub fn utility(&self) -> Option<&Curve> {
        (self.curve.points().count() > 1).then_some(&self.curve)
    }

    /// What it needs of the memory's bandwidth, if that was measured.
    pub fn bandwidth(&self) -> Option<Bandwidth> {
        self.bandwidth
    }

    /// The part of the time for which it needs a device that it has alone.
    pub fn duty(&self) -> f64 {
        self.duty.map_or(1.0, |duty| duty.value()).max(DUTY)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A second without a neighbour.
    fn second(work: u64, percent: u32) -> Observation {
        Observation {
            seconds: 1.0,
            waited: 0.0,
            busy: 1.0,
            work,
            percent,
        }
    }

    #[test]
    fn its_curve_grows_with_every_percentage_that_it_ran_at() {
        let mut program = Program::default();
        assert!(program.learn(&second(1000, 100), false));
        assert_eq!(program.utility(), None, "one point is no curve");
        assert!(program.learn(&second(900, 50), false));
        let curve = program.utility().expect("two points");
        assert_eq!(curve.utility(50, 100), 0.9);
        let program = Program::measured([(25, 1.0), (100, 2.0), (101, 9.0)], None);
        assert_eq!(program.curve().points().count(), 2);
    }

    #[test]
    fn time_in_which_others_had_the_device_does_not_count() {
        let mut program = Program::default();
        let half = Observation {
            waited: 0.5,
            ..second(500, 100)
        };
        assert!(program.learn(&half, false));
        assert_eq!(program.curve().rate(100), 1000.0);
    }

    #[test]
    fn a_while_that_tells_nothing_teaches_nothing() {
        let mut program = Program::default();
        for nothing in [
            second(PIECES - 1, 100),
            second(1000, 0),
            second(1000, 101),
            Observation {
                waited: 0.9,
                ..second(1000, 100)
            },
            // Its users let it rest.
            Observation {
                busy: 0.2,
                ..second(1000, 100)
            },
            // The same, while its group was busy and waited.
            Observation {
                busy: 0.6,
                waited: 0.5,
                ..second(1000, 100)
            },
            Observation {
                seconds: 0.0,
                ..second(1000, 100)
            },
            Observation {
                busy: f64::NAN,
                ..second(1000, 100)
            },
            second(u64::MAX, 100),
        ] {
            assert!(!program.learn(&nothing, false), "{nothing:?}");
        }
        assert_eq!(program, Program::default());
    }

    #[test]
    fn a_curve_that_is_kept_is_not_learnt_from() {
        let mut program = Program::measured([(100, 1000.0)], None);
        assert!(program.learn(&second(9000, 100), true));
        assert_eq!(program.curve().rate(100), 1000.0);
    }

    #[test]
    fn throughput_needs_time_of_its_own() {
        assert_eq!(throughput(300, 4.0, 1.0), Some(100.0));
        assert_eq!(throughput(300, 4.0, 3.1), None);
        assert_eq!(throughput(300, 0.0, 0.0), None);
        assert_eq!(throughput(300, 4.0, f64::NAN), None);
    }

    #[test]
    fn program_idle_half_of_the_time_needs_the_device_for_the_rest() {
        let mut program = Program::default();
        assert_eq!(program.duty(), 1.0, "what is not known");
        let lazy = Observation {
            busy: 0.5,
            ..second(1000, 100)
        };
        assert!(program.learn(&lazy, false));
        assert_eq!(program.duty(), 0.5);
    }
}
