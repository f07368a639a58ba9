//! Placement of tenants on the GPUs of a fleet.
//!
//! [`engine`] chooses places, [`fleet`] keeps what is free, [`index`] finds the best node without a look at all of them.
//! [`rules`] are known policies to compare with, [`typical`] is FGD's measure of fragmentation and [`outlook`] the learned
//! one. [`replay`] is FGD's experiment, [`sizing`] asks how many GPUs a workload needs; [`trace`] reads Alibaba's lists.
//! Nothing here reads a clock or a file.
#![forbid(unsafe_code)]

pub mod arrivals;
pub mod engine;
pub mod fleet;
pub mod index;
pub mod model;
pub mod outlook;
pub mod replay;
pub mod rules;
pub mod sizing;
pub mod trace;
pub mod typical;
