//! Contention for the memory's bandwidth, which SMs do not divide.

use serde::{Deserialize, Serialize};

/// What a program needs of the memory's bandwidth, as measured beside the probe: a program that only reads memory, and
/// takes all the bandwidth that it can have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Bandwidth {
    /// Part of the bandwidth that it takes with all SMs and alone: 0 to 1.
    pub demand: f64,
    /// Time that is added to it, of that which it takes with all SMs and alone, while others take the bandwidth: 0 to 4.
    pub sensitivity: f64,
}

/// Rates in pieces of work per second.
#[derive(Clone, Copy, Debug)]
pub struct BesideProbe {
    /// Of the program with all SMs and without the probe.
    pub whole: f64,
    /// With the SMs that the probe leaves it, without the probe.
    pub alone: f64,
    /// The same, beside the probe.
    pub beside: f64,
    /// Of the probe alone, and beside the program.
    pub probe: (f64, f64),
}

/// A program that is slowed down by more has other reasons, such as a cache that it loses.
const MOST_SENSITIVE: f64 = 4.0;
/// Rates are found when a round changes none by more than this, or after so many rounds.
const FOUND: f64 = 1e-9;
const ROUNDS: usize = 32;

impl Bandwidth {
    /// By what the program and the probe lose beside each other; `None` unless all did something.
    pub fn measured(seen: &BesideProbe) -> Option<Self> {
        let (probe, slower) = seen.probe;
        let all = [seen.whole, seen.alone, seen.beside, probe, slower];
        if !all.iter().all(|rate| rate.is_finite() && *rate > 0.0) {
            return None;
        }
        // The probe takes all of the bandwidth: what it loses is what the program takes.
        let taken = (1.0 - slower / probe).max(0.0);
        let added = (seen.whole / seen.beside - seen.whole / seen.alone).max(0.0);
        let demand = taken * seen.whole / seen.beside;
        let found = Self {
            demand: demand.clamp(0.0, 1.0),
            sensitivity: added.min(MOST_SENSITIVE),
        };
        Some(found)
    }

    /// Its part of a time in which it and the probe both wait for memory, relative to the probe's. A program with fewer requests under way loses more
    /// than it takes.
    fn pressure(&self) -> f64 {
        match self.sensitivity > self.demand {
            true => self.demand / self.sensitivity,
            false => 1.0,
        }
    }

    /// Whether both numbers are within what they may be.
    pub fn is_valid(&self) -> bool {
        (0.0..=1.0).contains(&self.demand) && (0.0..=MOST_SENSITIVE).contains(&self.sensitivity)
    }
}

/// Rates of programs that run at the same time, each relative to having the device alone. Each is given with its rate at its SMs
/// without the others.
///
/// A piece of work takes 1 / rate, and beside others its sensitivity times the part of the time in which they take the bandwidth, each by
/// its pressure. What is added to a program's time is spent in memory as well, so the rates depend on each other: they are found in rounds, each of
/// which adds to the last. Programs of which each takes all of the bandwidth share it evenly.
pub(super) fn rates(programs: &[(f64, Bandwidth)]) -> Vec<f64> {
    let mut rates: Vec<f64> = programs.iter().map(|(alone, _)| *alone).collect();
    for _ in 0..ROUNDS {
        let taken: Vec<f64> = (programs.iter().zip(&rates))
            .map(|((alone, bandwidth), rate)| match *alone > 0.0 {
                true => bandwidth.pressure() * (bandwidth.demand * rate + (1.0 - rate / alone)),
                false => 0.0,
            })
            .collect();
        let all: f64 = taken.iter().sum();
        let mut change = 0.0_f64;
        for (((alone, bandwidth), rate), own) in programs.iter().zip(&mut rates).zip(&taken) {
            let next = alone / (1.0 + alone * bandwidth.sensitivity * (all - own).max(0.0));
            change = change.max(*rate - next);
            *rate = next;
        }
        if change < FOUND {
            break;
        }
    }
    rates
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PROBE: Bandwidth = Bandwidth {
        demand: 1.0,
        sensitivity: 1.0,
    };

    fn even(part: f64) -> Bandwidth {
        Bandwidth {
            demand: part,
            sensitivity: part,
        }
    }

    #[test]
    fn programs_that_only_read_memory_gain_nothing_together() {
        for count in 2..9 {
            let all = rates(&vec![(1.0, PROBE); count]);
            let share = 1.0 / count as f64;
            assert!(all.iter().all(|rate| (rate - share).abs() < 1e-9));
        }
        assert_eq!(rates(&[(1.0, PROBE), (0.4, even(0.0))]), [1.0, 0.4]);
    }

    /// A program whose few requests wait behind the many of the probe: it loses three times what it takes.
    #[test]
    fn program_that_the_probe_crowds_out_has_its_demand() {
        let (demand, alone) = (0.56, 0.74);
        let beside = 1.0 / (1.0 / alone + 3.0 * demand);
        let seen = BesideProbe {
            whole: 1.0,
            alone,
            beside,
            // The bandwidth is used up: the probe has what the program leaves.
            probe: (1.0, 1.0 - demand * beside),
        };
        let found = Bandwidth::measured(&seen).expect("all had work");
        assert!((found.demand - demand).abs() < 1e-9, "{found:?}");
        // Beside its like it loses what it takes, no more.
        let pair = rates(&[(alone, found); 2]);
        let fair = rates(&[(alone, even(demand)); 2]);
        assert!((pair[0] - fair[0]).abs() < 1e-6, "{pair:?} {fair:?}");
        assert!(pair[0] > 1.3 * beside, "{pair:?}");
    }

    #[test]
    fn rates_without_work_or_numbers_are_no_measurement() {
        let seen = BesideProbe {
            whole: 10.0,
            alone: 8.0,
            beside: 4.0,
            probe: (100.0, 60.0),
        };
        assert!(Bandwidth::measured(&seen).is_some_and(|it| it.is_valid()));
        for beside in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert_eq!(Bandwidth::measured(&BesideProbe { beside, ..seen }), None);
        }
        assert!(!even(1.1).is_valid() && !even(f64::NAN).is_valid());
    }

    fn bandwidth() -> impl Strategy<Value = Bandwidth> {
        (0.0..=1.0_f64, 0.0..=MOST_SENSITIVE).prop_map(|(demand, sensitivity)| Bandwidth {
            demand,
            sensitivity,
        })
    }

    fn programs() -> impl Strategy<Value = Vec<(f64, Bandwidth)>> {
        prop::collection::vec((0.0..=1.0_f64, bandwidth()), 2..6)
    }

    const NEAR: f64 = 1e-6;

    proptest! {
        #[test]
        fn a_program_is_never_faster_than_alone(programs in programs()) {
            for (rate, (alone, _)) in rates(&programs).iter().zip(&programs) {
                prop_assert!((0.0..=*alone).contains(rate), "{rate} of {alone}");
            }
        }

        #[test]
        fn more_sms_never_make_a_program_slower(programs in programs(), more in 0.0..=1.0_f64) {
            let before = rates(&programs)[0];
            let mut wider = programs.clone();
            wider[0].0 += (1.0 - wider[0].0) * more;
            prop_assert!(rates(&wider)[0] >= before - NEAR, "{programs:?}");
        }

        #[test]
        fn order_does_not_matter_and_equals_run_alike(programs in programs()) {
            let mut turned = programs.clone();
            turned.reverse();
            for (a, b) in rates(&programs).iter().zip(rates(&turned).iter().rev()) {
                prop_assert!((a - b).abs() < NEAR);
            }
            let equal = rates(&[programs[0]; 3]);
            prop_assert!(equal.iter().all(|rate| (rate - equal[0]).abs() < NEAR));
        }

        #[test]
        fn no_more_is_moved_than_the_device_can(
            programs in prop::collection::vec((0.0..=1.0_f64, 0.0..=1.0_f64), 2..9),
        ) {
            let programs: Vec<_> = programs.iter().map(|(alone, part)| (*alone, even(*part))).collect();
            let rates = rates(&programs);
            let moved: f64 = rates.iter().zip(&programs).map(|(rate, (_, it))| rate * it.demand).sum();
            prop_assert!(moved <= 1.0 + NEAR, "{moved}: {programs:?}");
        }

        #[test]
        fn what_is_measured_beside_the_probe_is_what_it_was(
            alone in 0.1..=1.0_f64, own in bandwidth(), whole in 0.1..1e6_f64,
        ) {
            let beside = rates(&[(alone, own), (1.0, PROBE)])[0];
            prop_assume!(own.demand * beside < 1.0);
            let seen = BesideProbe {
                whole,
                alone: alone * whole,
                beside: beside * whole,
                probe: (300.0, 300.0 * (1.0 - own.demand * beside)),
            };
            let found = Bandwidth::measured(&seen).expect("all had work");
            prop_assert!((found.demand - own.demand).abs() < 1e-3, "{found:?} {own:?}");
            prop_assert!((found.sensitivity - own.sensitivity).abs() < 1e-3, "{found:?} {own:?}");
        }
    }
}
