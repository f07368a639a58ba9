//! Policies: pure functions from a snapshot to a plan.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{DomainId, Micros, Plan, Snapshot};

/// What a policy must remember from one plan to the next. The caller keeps it, one per device.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Memory {
    /// The batch domain whose turn it is, and since when.
    pub turn: Option<(DomainId, Micros)>,
    /// Virtual time per domain in weighted microseconds.
    pub virtual_time: BTreeMap<DomainId, f64>,
}

/// A scheduling policy. The same snapshot and memory always give the same plan.
pub trait Policy: Send + Sync {
    /// The name in configuration files.
    fn name(&self) -> &'static str;

    /// What the device's domains shall have now.
    fn plan(&self, snapshot: &Snapshot, memory: &mut Memory) -> Plan;
}
