//! What one kind of GPU costs: the constants of the model.

use serde::{Deserialize, Serialize};

/// Nanoseconds since the model's start, or a duration.
pub type Nanos = u64;

const MICRO: Nanos = 1000;

/// Constants of one GPU. The default is an H100 80GB HBM3 with driver 580.159, measured with
/// one latency task (10 kernels of 10 µs) and batch kernels of 10 ms.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Hardware {
    /// Streaming multiprocessors.
    pub sms: u32,
    /// ns to switch from one compute group to another when the outgoing one fills no SM.
    /// Measured: 136 µs with one warp running.
    pub switch_base: Nanos,
    /// ns that a switch takes longer when the outgoing group fills every SM; linear between.
    /// Measured: 180 to 190 µs in all; 188 is what the latency task loses (319 - 131).
    pub switch_fill: Nanos,
    /// ns at the start of a slice during which a group that was taken off in the middle of
    /// kernels gets its state back. It is part of the slice: with slices below it a group makes no
    /// progress. Fitted to the throughput of two groups with equal slices:
    /// (200 - 29) / (200 + 188) = 44 %.
    pub restore: Nanos,
    /// ns that a group keeps the device when kernels run but nothing is queued behind them, while
    /// another group has work. Below 12 µs: one hold kernel that got the device 12 µs before the
    /// work came had lost it.
    pub linger: Nanos,
    /// ns of start and end that every kernel pays. (131 - 10 x 10) / 10.
    pub kernel_overhead: Nanos,
    /// ns until a running hold kernel has seen its flag and ended. With two of them the latency
    /// task takes 156 instead of 131 µs: (156 - 131 - 3) / 2.
    pub hold_exit: Nanos,
    /// Bytes per second from host to device. Measured: 55.2 GB/s with pinned memory.
    pub host_to_device: u64,
    /// Bytes per second from device to host.
    pub device_to_host: u64,
    /// Bytes per second of a copy inside the device (HBM3: 3.35 TB/s, read and written).
    pub device_to_device: u64,
    /// ns of start and end that every copy pays. Not measured.
    pub copy_overhead: Nanos,
    /// ns to switch a copy engine from one group to another. Not measured.
    pub copy_switch: Nanos,
}

impl Default for Hardware {
    fn default() -> Self {
        Self {
            sms: 132,
            switch_base: 136 * MICRO,
            switch_fill: 52 * MICRO,
            restore: 29 * MICRO,
            linger: 5 * MICRO,
            kernel_overhead: 3100,
            hold_exit: 11 * MICRO,
            host_to_device: 55_200_000_000,
            device_to_host: 55_200_000_000,
            device_to_device: 1_600_000_000_000,
            copy_overhead: 2 * MICRO,
            copy_switch: 5 * MICRO,
        }
    }
}

impl Hardware {
    /// ns to switch away from a compute group that occupies `sms` SMs.
    pub fn switch(&self, sms: u32) -> Nanos {
        self.switch_base
            + self.switch_fill * u64::from(sms.min(self.sms)) / u64::from(self.sms.max(1))
    }

    /// SMs whose kernels together take all of the memory's bandwidth: a quarter. Measured on an H100: 24 SMs take 0.91 of it, 32 all.
    pub fn saturating(&self) -> u32 {
        (self.sms / 4).max(1)
    }

    /// ns that `bytes` take at `rate` bytes per second, rounded up.
    pub fn transfer(bytes: u64, rate: u64) -> Nanos {
        let ns = (u128::from(bytes) * 1_000_000_000).div_ceil(u128::from(rate.max(1)));
        u64::try_from(ns).unwrap_or(Nanos::MAX)
    }
}
