//! The ways to run the devices of a scenario.

use serde::{Deserialize, Serialize};

/// How the devices are run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// Every tenant has the devices for itself.
    Alone,
    /// What the driver does: all have the default timeslice.
    TimeSlicing,
    /// Fixed timeslices, a context per program: latency tenants 1 s, all others 1 µs, and nothing after that.
    Fixed,
    /// All in one MPS group, and nothing else.
    Mps,
    /// A daemon with a policy; each in a context of its own.
    Gpumux,
    /// The same; a tenant that names a trust domain may share its group.
    Space,
    /// The same with equal parts of the SMs in groups.
    Equal,
    /// The same with parts of the SMs by measured utility.
    Utility,
}

impl Mode {
    /// Whether a daemon runs.
    pub(crate) fn managed(self) -> bool {
        matches!(
            self,
            Self::Gpumux | Self::Space | Self::Equal | Self::Utility
        )
    }
}
