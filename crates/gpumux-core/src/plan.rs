//! What a policy wants for one device.

use serde::{Deserialize, Serialize};

use crate::{DomainId, Micros, Timeslice};

/// Whether the hardware may run a domain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RunState {
    /// Enabled: runs when the hardware gives it its turn.
    #[default]
    Enabled,
    /// Taken off the device, if need be in the middle of a kernel, until thawed.
    Frozen,
}

/// What one domain shall have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DomainPlan {
    /// Which domain.
    pub id: DomainId,
    /// Its slice.
    pub timeslice: Timeslice,
    /// Whether it may run.
    pub run: RunState,
    /// Why, in a few words, for people.
    pub reason: &'static str,
}

/// What the policy wants now. Names every domain of its snapshot exactly once, in the same order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Plan {
    /// Per domain.
    pub domains: Vec<DomainPlan>,
    /// When the policy wants to be asked again although nothing else happened.
    pub next: Option<Micros>,
}
