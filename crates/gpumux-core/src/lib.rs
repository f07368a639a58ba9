//! What gpumux decides, apart from how it is done: tenants and their specs,
//! domains, the snapshot of a device, the plan for it, and the policies between.
//!
//! Nothing here reads a clock, does I/O or keeps state of its own. Time comes in
//! with the snapshot; what a policy must remember travels in its [`Memory`].
#![forbid(unsafe_code)]

mod accounts;
mod control;
mod launches;
mod plan;
mod rhythm;
mod ring;
mod snapshot;
mod spec;
#[macro_use]
mod tenant;
#[cfg(test)]
mod testing;
mod units;

pub mod admission;
pub mod broker;
pub mod controller;
pub mod exports;
pub mod gang;
pub mod ledger;
pub mod link;
pub mod policy;
pub mod quantity;
pub mod recording;
pub mod relocation;
pub mod runlist;
pub mod space;
pub mod tamper;

pub use accounts::{Account, Accounts, fractions};
pub use control::{Control, RunState};
pub use launches::{Launches, Progress};
pub use plan::{Calm, DomainPlan, Plan};
pub use policy::{Memory, Policy};
pub use rhythm::Rhythm;
pub use ring::Ring;
pub use snapshot::{Costs, Demand, DomainState, QUEUED, Snapshot, TenantState};
pub use spec::{Field, Kind, SpecChange, SpecError, TenantSpec};
pub use tenant::{Class, Hints, MAX_NAME, MemoryPolicy, is_name, is_name_char};
pub use units::{DomainId, Micros, TenantId, Timeslice, UserId};
