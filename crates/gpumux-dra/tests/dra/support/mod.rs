//! What the tests share.

pub mod api;
pub mod cri;
pub mod kubelet;
pub mod node;
pub mod scheduler;
