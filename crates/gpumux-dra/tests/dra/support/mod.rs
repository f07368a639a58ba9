//! What the tests share.

pub mod api;
pub mod kubelet;
pub mod node;
pub mod scheduler;
