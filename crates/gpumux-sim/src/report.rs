//! What came out of a scenario.

use serde::Serialize;

use crate::gpu::Nanos;
use crate::mode::Mode;

/// A scenario's results, one entry per mode.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// The scenario's name.
    pub scenario: String,
    /// What it shows.
    pub about: String,
    /// Simulated seconds, warm-up included.
    pub seconds: f64,
    /// Its seed.
    pub seed: u64,
    /// The results.
    pub modes: Vec<ModeReport>,
}

/// The results in one mode. They cover the time after the warm-up.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ModeReport {
    /// The mode.
    pub mode: Mode,
    /// The policy, in modes with a daemon.
    pub policy: Option<String>,
    /// Per tenant, in the scenario's order.
    pub tenants: Vec<TenantReport>,
    /// Per device. In mode `alone` there is one set for each tenant.
    pub devices: Vec<DeviceReport>,
    /// Part of the time that the daemon spent pulling controls.
    pub daemon_busy: f64,
    /// How often the daemon asked for a plan.
    pub plans: u64,
}

/// What one tenant got.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TenantReport {
    /// Its name.
    pub name: String,
    /// Its guaranteed share of each device.
    pub guaranteed: f64,
    /// SMs that it had at the end, where the SMs of a group were divided.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sms: Option<u32>,
    /// Share of its devices' time in which its work progressed.
    pub received: f64,
    /// Share of the time in which its devices worked for any tenant: what a guarantee is measured by.
    pub received_of_used: f64,
    /// The smallest such share in a window.
    pub window_min: f64,
    /// The largest such share in a window.
    pub window_max: f64,
    /// Share of the time in which it had work.
    pub wanted: f64,
    /// Longest time without progress while it had work, in ms.
    pub longest_wait_ms: f64,
    /// What it can rely on, and the worst that happened; where a daemon with a policy runs and every tenant has a context of
    /// its own on one device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bound: Option<BoundReport>,
    /// Requests completed per second.
    pub rate: f64,
    /// From arrival to completion.
    pub latency: Option<Latency>,
    /// How often it lost a device in the middle of a kernel, per second.
    pub preemptions: f64,
    /// How its memory moved in the whole time, on all devices, if it did.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub moves: Option<Moves>,
}

/// A tenant's bounds ([`gpumux_core::policy::Bound`]) and what came of them.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct BoundReport {
    /// Share of the time that the device works for tenants to which it is entitled when all have work.
    pub share: f64,
    /// How far its service may lag behind that, in ms.
    pub lag_ms: f64,
    /// How far it did, in the worst interval in which it had work but for pauses of 5 ms; none of a program that launches
    /// kernel by kernel, which has work for the device only now and then.
    pub worst_lag_ms: Option<f64>,
    /// The longest wait, in ms of the time that the device works for tenants.
    pub wait_ms: f64,
}

/// Moves of a tenant's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Moves {
    /// How often a part went to the host.
    pub outs: u64,
    /// How often it came back.
    pub backs: u64,
    /// What went to the host, in GiB.
    pub out_gib: f64,
    /// How long that and coming back took.
    pub moving_s: f64,
}

impl Moves {
    /// Adds those on another device.
    pub(crate) fn add(&mut self, more: Self) {
        self.outs += more.outs;
        self.backs += more.backs;
        self.out_gib += more.out_gib;
        self.moving_s += more.moving_s;
    }
}

/// A distribution of latencies, in ms.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Latency {
    /// How many requests.
    pub count: u64,
    /// Mean.
    pub mean_ms: f64,
    /// Median.
    pub p50_ms: f64,
    /// 99 of 100 are at most this.
    pub p99_ms: f64,
    /// 999 of 1000 are at most this.
    pub p999_ms: f64,
    /// The longest.
    pub max_ms: f64,
}

impl Latency {
    /// Of these latencies in ns; none if there are none.
    pub(crate) fn of(mut samples: Vec<Nanos>) -> Option<Self> {
        samples.sort_unstable();
        let max = *samples.last()?;
        let ms = |ns: Nanos| ns as f64 / 1e6;
        // The smallest value that the given part of all values does not exceed.
        let quantile = |part: f64| {
            let rank = (part * samples.len() as f64).ceil() as usize;
            ms(samples[rank.clamp(1, samples.len()) - 1])
        };
        let sum: u128 = samples.iter().map(|ns| u128::from(*ns)).sum();
        Some(Self {
            count: samples.len() as u64,
            mean_ms: sum as f64 / samples.len() as f64 / 1e6,
            p50_ms: quantile(0.5),
            p99_ms: quantile(0.99),
            p999_ms: quantile(0.999),
            max_ms: ms(max),
        })
    }
}

/// What one device did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct DeviceReport {
    /// Part of the time in which it worked for any tenant.
    pub used: f64,
    /// Part of the time in which a tenant had work and none progressed: switches, freezes and pauses.
    pub overhead: f64,
    /// Freezes per second.
    pub freezes: f64,
    /// Thaws per second.
    pub thaws: f64,
    /// Slices set per second.
    pub slice_changes: f64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_values_that_occurred() {
        let latency = Latency::of((1..=1000).rev().map(|ms| ms * 1_000_000).collect());
        let latency = latency.expect("samples");
        assert_eq!((latency.p50_ms, latency.p99_ms), (500.0, 990.0));
        assert_eq!((latency.p999_ms, latency.max_ms), (999.0, 1000.0));
        assert_eq!(Latency::of(Vec::new()), None);
    }
}
