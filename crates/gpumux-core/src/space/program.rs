//! What was learnt of a program over all its runs, for its next start: its curve, and what neighbours cost it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{Curve, Interference, curve::Mean, is_point};

/// What was measured of one program.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Program {
    /// Pieces of work per second while no neighbour disturbed it, by percent of the SMs.
    curve: Curve,
    /// Part of the time in which it has the device, when it has all SMs and no neighbour disturbs it.
    duty: Option<Mean>,
    /// Pieces of work per second in a group where so many others had work.
    beside: BTreeMap<u32, Mean>,
}

/// What a tenant did in a while.
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
    /// How many others of its group had work meanwhile.
    pub beside: u32,
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
        if seen.beside > 0 {
            self.beside.entry(seen.beside).or_default().add(rate);
            return true;
        }
        if !keep_curve {
            self.curve.measure(seen.percent, rate);
        }
        if seen.percent == 100 {
            self.duty.get_or_insert_default().add(duty.min(1.0));
        }
        true
    }

    /// Replaces the curve by one that was measured on purpose: percent of the SMs, pieces of work per second.
    pub fn set_curve(&mut self, points: impl IntoIterator<Item = (u32, f64)>) {
        self.curve = Curve::of_percents(points);
    }

    /// All that is known of its curve.
    pub fn curve(&self) -> &Curve {
        &self.curve
    }

    /// Its curve, if more of it is known than one point: a line does not show which program gains most from SMs.
    pub fn utility(&self) -> Option<&Curve> {
        (self.curve.points().count() > 1).then_some(&self.curve)
    }

    /// Throughput beside so many others with work, relative to that alone.
    pub fn beside(&self) -> impl Iterator<Item = (u32, f64)> + '_ {
        let alone = self.alone();
        let relative = move |(others, mean): (&u32, &Mean)| Some((*others, mean.value() / alone?));
        let relative = self.beside.iter().filter_map(relative);
        relative.filter(|(_, part)| part.is_finite())
    }

    /// What is to be expected beside so many others, of whom it would have this share in turns. Of more neighbours than were
    /// ever seen the most that were seen must do.
    pub fn interference(&self, others: u32, share: f64) -> Option<Interference> {
        let (_, in_group) = self
            .beside()
            .take_while(|(seen, _)| *seen <= others)
            .last()?;
        let duty = self.duty.map_or(1.0, |duty| duty.value());
        Some(Interference {
            in_group,
            in_turns: (share / duty.max(DUTY)).min(1.0),
        })
    }

    fn alone(&self) -> Option<f64> {
        let whole = self.curve.points().find(|(percent, _)| *percent == 100);
        whole.map(|(_, rate)| rate).filter(|rate| *rate > 0.0)
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
            beside: 0,
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
        program.set_curve([(25, 1.0), (100, 2.0), (101, 9.0)]);
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
                beside: 1,
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
    fn interference_needs_its_speed_alone_and_beside_neighbours() {
        let mut program = Program::default();
        let beside = |others, work| Observation {
            beside: others,
            ..second(work, 100)
        };
        assert!(program.learn(&beside(1, 300), false));
        assert_eq!(
            program.interference(1, 0.5),
            None,
            "nothing to compare with"
        );
        assert!(program.learn(&second(1000, 100), false));
        assert!(program.learn(&beside(3, 200), false));
        let of = |others, share| program.interference(others, share);
        let expected = |in_group, in_turns| Some(Interference { in_group, in_turns });
        assert_eq!(of(0, 1.0), None);
        assert_eq!(of(1, 0.5), expected(0.3, 0.5));
        assert_eq!(of(2, 0.25), expected(0.3, 0.25));
        assert_eq!(of(9, 0.1), expected(0.2, 0.1));
    }

    #[test]
    fn a_curve_that_is_kept_is_not_learnt_from_but_compared_with() {
        let mut program = Program::default();
        program.set_curve([(100, 1000.0)]);
        assert!(program.learn(&second(9000, 100), true));
        let neighbour = Observation {
            beside: 1,
            ..second(500, 100)
        };
        assert!(program.learn(&neighbour, true));
        assert_eq!(program.curve().rate(100), 1000.0);
        assert_eq!(program.beside().collect::<Vec<_>>(), [(1, 0.5)]);
    }

    #[test]
    fn ratios_are_finite_whatever_a_file_says() {
        let mut program = Program::default();
        program.curve.measure(100, f64::from_bits(1));
        program.beside.entry(1).or_default().add(1e3);
        assert_eq!(program.beside().count(), 0);
        assert_eq!(program.interference(1, 0.5), None);
        program.set_curve([(50, 0.0), (75, 1e-7), (99, f64::NAN), (100, 1e16)]);
        assert_eq!(program.curve().points().collect::<Vec<_>>(), [(50, 0.0)]);
    }

    #[test]
    fn throughput_needs_time_of_its_own() {
        assert_eq!(throughput(300, 4.0, 1.0), Some(100.0));
        assert_eq!(throughput(300, 4.0, 3.1), None);
        assert_eq!(throughput(300, 0.0, 0.0), None);
        assert_eq!(throughput(300, 4.0, f64::NAN), None);
    }

    #[test]
    fn program_idle_half_of_the_time_loses_less_by_turns() {
        let mut program = Program::default();
        let lazy = Observation {
            busy: 0.5,
            ..second(1000, 100)
        };
        assert!(program.learn(&lazy, false));
        assert!(program.learn(&Observation { beside: 1, ..lazy }, false));
        let measured = program.interference(1, 0.5).expect("both");
        assert_eq!((measured.in_group, measured.in_turns), (1.0, 1.0));
    }
}
