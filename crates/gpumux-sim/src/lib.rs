//! A virtual-time GPU that runs the policies unchanged
#![forbid(unsafe_code)]

pub mod gpu;
