//! `gpumux dra`: the Kubernetes DRA driver of a node.
//!
//! It tells the API server which devices there are ([`slices`], [`publish`]), turns allocated claims into tenants
//! of the daemon and CDI files when the kubelet asks ([`claim`], [`prepare`], [`kubelet`]), follows changes
//! of a claim while its pod runs ([`live`], [`events`]), and serves metrics and its health ([`metrics`], [`health`]). What a claim may have is in
//! [`model`] and [`share`], which MIG instances are made for it in [`mig`]. `gpumux fleet serve` extends the scheduler ([`extender`]). State that must survive a restart is in [`checkpoint`].

mod authority;
pub mod cdi;
pub mod checkpoint;
pub mod claim;
pub mod device;
pub mod events;
pub mod extender;
pub mod health;
mod http;
pub mod inventory;
pub mod kubelet;
pub mod live;
pub mod metrics;
pub mod mig;
pub mod model;
pub mod prepare;
pub mod proto;
pub mod publish;
pub mod quantity;
mod run;
pub mod share;
pub mod slices;

/// The driver's name, which is also the domain of its attributes, taints and annotations.
pub const DRIVER: &str = "gpumux.dev";

pub use run::{Args, Config, Driver, Error, check, run, slices_json, start};
