//! What a policy is asked, and what it promises.

use super::lag::Memory;
use crate::{Micros, Plan, Snapshot, TenantId};

/// A scheduling policy. The same snapshot and memory always give the same plan.
pub trait Policy: Send + Sync {
    /// The name in configuration files.
    fn name(&self) -> &'static str;

    /// What the device's domains shall have now. Ask again when anything in the snapshot changed
    /// (a domain came or went, demand flipped, a spec was set) and at [`Plan::next`].
    fn plan(&self, snapshot: &Snapshot, memory: &mut Memory) -> Plan;

    /// What each tenant of the snapshot can rely on, whatever the others do; none of a policy that guarantees nothing.
    fn bounds(&self, snapshot: &Snapshot) -> Vec<Bound> {
        let _ = snapshot;
        Vec::new()
    }
}

/// What a tenant can rely on beside the others that there are: in any interval in which it always has work and its memory is there, it
/// receives at least `share` of the time that the device works for tenants, less `lag`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bound {
    /// Whose.
    pub tenant: TenantId,
    /// Share of the device when all tenants have work: at least its guarantee, and its part of the floor.
    pub share: f64,
    /// How far its service may lag behind that share.
    pub lag: Micros,
    /// Longest wait with work, in time that the device works for tenants.
    pub wait: Micros,
}
