//! Placement of tenants on the GPUs of a fleet.
#![forbid(unsafe_code)]

pub mod engine;
pub mod fleet;
pub mod index;
pub mod model;
pub mod outlook;
pub mod replay;
pub mod rules;
pub mod trace;
pub mod typical;
