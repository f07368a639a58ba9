//! The driver against a kubelet, an API server and a scheduler that behave as recorded, and against the real daemon.

mod autoscalers;
mod chart;
mod cluster;
mod containers;
mod crash;
mod extender;
mod mig;
mod node;
mod partition;
mod policies;
mod queries;
mod recordings;
mod scale;
#[allow(unreachable_pub)]
mod support;
