//! What can be done to a domain.

use serde::{Deserialize, Serialize};

use crate::{DomainId, Timeslice};

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

/// One call of one control.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Control {
    /// Take the domain off the device.
    Freeze(DomainId),
    /// Give the domain this slice.
    SetTimeslice(DomainId, Timeslice),
    /// Let the domain run again.
    Thaw(DomainId),
}

impl Control {
    /// The domain it acts on.
    pub const fn domain(self) -> DomainId {
        match self {
            Self::Freeze(id) | Self::SetTimeslice(id, _) | Self::Thaw(id) => id,
        }
    }

    /// The same for another domain.
    pub(crate) const fn of_domain(self, id: DomainId) -> Self {
        match self {
            Self::Freeze(_) => Self::Freeze(id),
            Self::SetTimeslice(_, timeslice) => Self::SetTimeslice(id, timeslice),
            Self::Thaw(_) => Self::Thaw(id),
        }
    }
}
