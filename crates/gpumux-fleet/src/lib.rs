//! Placement of tenants on the GPUs of a fleet.
//!
//! [`engine`] chooses places, [`fleet`] keeps what is free, [`index`] finds the best node without a look at all of them.
//! [`rules`] are known policies to compare with, [`typical`] is FGD's measure of fragmentation and [`outlook`] the learned
//! one. [`replay`] is FGD's experiment, [`sizing`] asks how many GPUs a workload needs, [`lifetimes`] the same while tenants
//! come and go; [`trace`] reads Alibaba's lists. [`serving`] turns models with rates into tenants, [`usage`] plays recorded use.
//! Nothing here reads a clock or a file.
#![forbid(unsafe_code)]

pub mod arrivals;
pub mod engine;
pub mod fleet;
pub mod index;
pub mod lifetimes;
pub mod model;
pub mod outlook;
pub mod replay;
pub mod rules;
pub mod serving;
pub mod sizing;
pub mod trace;
pub mod typical;
pub mod usage;
