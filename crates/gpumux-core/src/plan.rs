//! What a policy wants for one device, and the levers that bring it about.

use serde::{Deserialize, Serialize};

use crate::{DomainId, Micros, Snapshot, Timeslice};

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

/// One pull of one lever.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Lever {
    /// Take the domain off the device.
    Freeze(DomainId),
    /// Give the domain this slice.
    SetTimeslice(DomainId, Timeslice),
    /// Let the domain run again.
    Thaw(DomainId),
}

impl Lever {
    /// The domain it acts on.
    pub const fn domain(self) -> DomainId {
        match self {
            Self::Freeze(id) | Self::SetTimeslice(id, _) | Self::Thaw(id) => id,
        }
    }
}

impl Plan {
    /// The fewest pulls that turn what the snapshot shows into this plan, in the order to pull them:
    /// freezes before slices before thaws, and long slices before short ones, so that two runnable
    /// domains never share a 1 µs slice on the way.
    pub fn levers(&self, snapshot: &Snapshot) -> Vec<Lever> {
        let mut levers = Vec::new();
        let pairs = || self.domains.iter().zip(&snapshot.domains);
        for (want, have) in pairs() {
            if want.run == RunState::Frozen && have.run == RunState::Enabled {
                levers.push(Lever::Freeze(want.id));
            }
        }
        let mut slices: Vec<&DomainPlan> = pairs()
            .filter(|(want, have)| want.timeslice != have.timeslice)
            .map(|(want, _)| want)
            .collect();
        slices.sort_by_key(|want| std::cmp::Reverse(want.timeslice));
        levers.extend(
            slices
                .iter()
                .map(|want| Lever::SetTimeslice(want.id, want.timeslice)),
        );
        for (want, have) in pairs() {
            if want.run == RunState::Enabled && have.run == RunState::Frozen {
                levers.push(Lever::Thaw(want.id));
            }
        }
        levers
    }
}
