//! Tenants by name and by secret, how long they live, and the files that a restarted
//! daemon knows them from.
//!
//! `life` ← `model` ← `faults`, `persistence`, `placement`, `selection` ← `table` ← `registry` ← `arrivals`, `learning` ← `supervisor`.

mod arrivals;
mod faults;
mod learning;
mod life;
mod model;
mod persistence;
mod placement;
mod registry;
mod selection;
mod supervisor;
mod table;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;

pub(crate) use faults::GroupCounts;
pub(crate) use model::{Tenant, TenantError, find, started_by};
pub(crate) use persistence::{Files, read_state};
pub(crate) use registry::Tenants;
pub(crate) use selection::resolve;
pub(crate) use supervisor::watch;
