//! What a policy may trade against what, and what follows for quanta, bursts and rounds of timeslices.

use serde::{Deserialize, Serialize};

use crate::{Calm, Class, Costs, Micros};

/// What may be traded against what. The defaults suit GPUs whose switch costs 100 µs to 1 ms.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Tuning {
    /// Part of the device that handing over quanta may cost. Sets the quantum. The scheduling thread waits in the driver for most of
    /// that time, so it takes about as much of a CPU.
    pub quantum_cost: f64,
    /// The same where one user's batch domains rotate, beside one latency domain at most: no other waits for them, and there may be many.
    pub batch_quantum_cost: f64,
    /// Part of the device that switching between timeslices may cost. Sets the timeslices.
    pub slice_cost: f64,
    /// The same when only batch domains share the device: no latency client waits, so switch less.
    pub batch_slice_cost: f64,
    /// How far latency domains may run ahead: one whose share is s runs ahead by s (1 - s) of this.
    pub period: Micros,
    /// How long a latency domain keeps others of its class waiting without a pause.
    pub hog: Micros,
    /// How long an idle domain counts when timeslices are set, so that short pauses issue no controls.
    pub recent: Micros,
}

impl Default for Tuning {
    fn default() -> Self {
        Self {
            quantum_cost: 0.02,
            batch_quantum_cost: 0.01,
            slice_cost: 0.05,
            batch_slice_cost: 0.01,
            period: Micros::from_millis(100),
            hog: Micros::from_millis(10),
            recent: Micros::from_secs(1),
        }
    }
}

/// Shortest timeslice of domains that share by timeslices.
pub(super) const MIN_SLICE_US: f64 = 500.0;
/// Longest round of timeslices, which is also the longest timeslice.
pub(super) const MAX_ROUND_US: f64 = 1e6;
/// Bounds of the quantum, whatever the costs are said to be.
pub(super) const QUANTUM_US: (f64, f64) = (10_000.0, 200_000.0);
/// Estimated moments are not asked for sooner than this.
pub(super) const MIN_STEP_US: f64 = 2_000.0;
/// A latency domain may run ahead by this at least: a freeze costs about as much.
pub(super) const MIN_BURST_US: f64 = 1_000.0;
impl Tuning {
    /// What handing over a quantum costs.
    pub(super) fn handover(costs: &Costs) -> f64 {
        (costs.freeze + costs.thaw + costs.switch).0 as f64
    }

    /// The largest quantum, in µs, where domains of these users and classes have a device: a pause keeps no more of what a domain is owed.
    pub fn quantum<U: PartialEq>(
        &self,
        costs: &Costs,
        domains: impl IntoIterator<Item = (U, Class)>,
    ) -> f64 {
        let domains: Vec<_> = domains.into_iter().collect();
        let count = |class| domains.iter().filter(|(_, it)| *it == class).count();
        // A latency domain waits until its user is level, and those over their budgets for each other.
        let one_user = domains.windows(2).all(|pair| pair[0].0 == pair[1].0);
        let only_batch = count(Class::Batch) > 0 && count(Class::Standard) == 0;
        let cost = match only_batch && one_user && count(Class::Latency) < 2 {
            true => self.batch_quantum_cost,
            false => self.quantum_cost,
        };
        (Self::handover(costs) / cost.max(1e-3)).clamp(QUANTUM_US.0, QUANTUM_US.1)
    }

    /// How far a latency domain may run ahead: for its part of a period, so that others run for the rest of it, or as long as controls
    /// take. In a period the device switches twice.
    pub(super) fn burst(&self, costs: &Costs, share: f64) -> f64 {
        let pause = (self.period.0 as f64 * (1.0 - share)).max(Self::handover(costs));
        (share * pause).max(MIN_BURST_US)
    }

    /// As good as there: moments are estimated without the switch that lies before them, and to ask
    /// again would cost more.
    pub(super) fn slack(costs: &Costs) -> f64 {
        2.0 * costs.switch.0.min(1_000) as f64
    }

    /// By how much a control can be late: it waits for latency work and for those before it, and moments are estimated.
    pub(super) fn control(costs: &Costs) -> f64 {
        Self::handover(costs) + Calm::MOST.0 as f64 + MIN_STEP_US
    }

    /// A round of timeslices for these shares.
    pub(super) fn round(&self, costs: &Costs, shares: &[f64], only_batch: bool) -> f64 {
        let cost = match only_batch {
            true => self.batch_slice_cost,
            false => self.slice_cost,
        };
        let sum: f64 = shares.iter().sum();
        let least = shares.iter().copied().fold(1.0, f64::min);
        let affordable = shares.len() as f64 * costs.switch.0 as f64 / cost.max(1e-3);
        affordable
            .max(MIN_SLICE_US * sum / least.max(1e-9))
            .min(MAX_ROUND_US)
    }
}

/// The quantum of a domain whose share is so many times the mean of those that rotate: the largest, or less, but not so little that it
/// costs more than it is worth.
pub(super) fn request(largest: f64, relative: f64) -> f64 {
    (relative * largest).clamp(largest / 5.0, largest)
}
