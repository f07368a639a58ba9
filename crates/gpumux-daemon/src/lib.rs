//! gpumuxd: sessions, the scheduling thread, and the API.
//!
//! [`run`] is the whole daemon. Tenants' processes meet it at `session` (a `SOCK_SEQPACKET` socket: the shim
//! hands over a process's channel groups), through relays of their own ([`receiver`]); people and programs at [`api`] (HTTP on a Unix socket;
//! [`client`] speaks it). `tenants` knows who is who; `scheduler` is a thread of its own that owns every
//! domain and every lever, and runs the policies of `gpumux-core`. All but that thread is on tokio.

pub mod api;
pub mod client;
pub mod config;
pub mod forward;
pub mod paths;

mod devices;
mod events;
#[cfg(test)]
mod fake;
mod groups;
mod history;
mod hold;
mod memory;
mod peer;
mod programs;
pub mod receiver;
mod scheduler;
mod serve;
mod session;
mod sharing;
mod store;
mod tenants;
mod users;
mod verify;

pub use config::{Config, Listen};
pub use serve::{Error, device_uuids, end_groups, run};
