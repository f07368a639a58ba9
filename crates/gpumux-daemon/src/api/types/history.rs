//! What is measured of devices, and the last hour of devices and tenants.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What NVML measures of a device now. `null` where the driver or the device does not report it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Readings {
    /// Part of the last second or so in which kernels ran, 0 to 1; `null` for MIG instances.
    pub utilization: Option<f64>,
    /// Temperature of the GPU in °C; of a MIG instance: that of its GPU.
    pub temperature_c: Option<u32>,
    /// Power that the GPU draws in W; `null` for MIG instances.
    pub power_w: Option<f64>,
    /// Power limit that is in force in W; `null` for MIG instances.
    pub power_limit_w: Option<f64>,
    /// Bytes of its memory in use by all processes, foreign ones included.
    pub memory_used: Option<u64>,
}

/// The last five minutes or the last hour. All courses have `samples` values, the latest last; `null`: not known then.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct History {
    /// When it was asked for, in seconds since 1970; the last sample is at most a step older.
    pub now: u64,
    /// Seconds from one sample to the next.
    pub step_s: u64,
    /// Number of samples.
    pub samples: usize,
    /// The devices.
    pub devices: Vec<DeviceHistory>,
    /// Tenants on devices that they use, those that ended in the last hour, too; the oldest first.
    pub tenants: Vec<TenantHistory>,
    /// Tenants that live and are left out, because 256 others are recorded.
    pub left_out: usize,
}

/// The course of a device's [`Readings`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DeviceHistory {
    /// UUID of the device.
    pub device: String,
    /// Part of the time in which kernels ran.
    pub utilization: Vec<Option<f32>>,
    /// In °C.
    pub temperature_c: Vec<Option<f32>>,
    /// In W.
    pub power_w: Vec<Option<f32>>,
    /// In bytes.
    pub memory_used: Vec<Option<f32>>,
}

/// The course of a tenant on a device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct TenantHistory {
    /// Unique in the daemon's life: a later tenant of the same name has another.
    pub id: u64,
    /// Its name.
    pub name: String,
    /// Its user's number.
    pub uid: u32,
    /// Its user's name, or number where the system has no name for it.
    pub user: String,
    /// UUID of the device.
    pub device: String,
    /// The MPS group of which it is a member, as user and trust domain. What it received is what all members received.
    #[serde(default)]
    pub group: Option<String>,
    /// Seconds since it ended; `null` while it lives.
    pub ended_s_ago: Option<u64>,
    /// Part of the device's time that it received.
    pub received: Vec<Option<f32>>,
    /// Part of the time in which it had work and did not run.
    pub waiting: Vec<Option<f32>>,
    /// Bytes on the device.
    pub memory: Vec<Option<f32>>,
    /// Bytes on the host.
    pub swapped: Vec<Option<f32>>,
    /// How often a second its memory was moved, either way.
    pub moves: Vec<Option<f32>>,
}

/// The user of the client.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Me {
    /// The user, whose own tenants may be changed; 0: root, all tenants.
    pub uid: u32,
    /// The tenant of the client's process, as the API names it; none: no tenant has connected with this process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
}
