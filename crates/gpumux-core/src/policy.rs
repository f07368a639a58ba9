//! Policies: pure functions from a snapshot to a plan.

use serde::{Deserialize, Serialize};

use crate::{Plan, Snapshot};

/// What a policy must remember from one plan to the next. The caller keeps it, one per device,
/// and starts with the default.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Memory {}

/// A scheduling policy. The same snapshot and memory always give the same plan.
pub trait Policy: Send + Sync {
    /// The name in configuration files.
    fn name(&self) -> &'static str;

    /// What the device's domains shall have now. Ask again when anything in the snapshot changed
    /// (a domain came or went, demand flipped, a spec was set) and at [`Plan::next`].
    fn plan(&self, snapshot: &Snapshot, memory: &mut Memory) -> Plan;
}
