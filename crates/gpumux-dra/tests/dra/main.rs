//! The driver against a kubelet, an API server and a scheduler that behave as recorded, and against the real daemon.

mod chart;
mod containers;
mod crash;
mod node;
mod policies;
mod recordings;
#[allow(unreachable_pub)]
mod support;
