//! gpumuxd: sessions, the scheduling thread, and the API.
//!
//! [`run`] is the whole daemon. Tenants' processes meet it at `session` (a `SOCK_SEQPACKET` socket: the shim
//! hands over a process's channel groups), through relays of their own ([`receiver`]); people and programs at [`api`] (HTTP on a Unix socket;
//! [`client`] speaks it). `tenants` has the tenants by name and secret; `scheduler` is a thread of its own that owns every
//! domain and every control, and runs the policies of `gpumux-core`. All but that thread is on tokio.

pub mod api;
pub mod client;
pub mod config;
pub mod forward;
pub mod paths;

mod claims;
pub mod clock;
mod devices;
mod events;
pub mod examine;
mod failure;
#[cfg(test)]
mod fake;
#[cfg(test)]
mod generated;
mod groups;
mod history;
mod hold;
mod link;
mod memory;
mod mig;
mod mistakes;
mod peer;
mod programs;
mod quota;
pub mod receiver;
pub mod relocation;
mod scheduler;
mod secret;
mod serve;
mod session;
mod sharing;
pub mod signals;
mod store;
mod tenants;
mod users;
mod verify;

/// Reads bytes as one of the files of state that outlive the daemon: of tenants, settings, programs or groups. For fuzzing.
#[doc(hidden)]
pub fn read_state(kind: u8, bytes: &[u8]) {
    let sealed = kind & 0x80 == 0;
    match kind % 4 {
        0 => tenants::read_state(bytes, sealed),
        1 => store::read_again::<Vec<api::types::Setting>>(bytes, sealed),
        2 => programs::read_state(bytes, sealed),
        _ => groups::read_state(bytes, sealed),
    }
}

pub use config::{Config, Listen};
pub use mistakes::{absences, mistakes};
pub use secret::secret;
pub use serve::{Error, end_groups, known_devices, run};
pub use store::replace;
pub use users::user_name;
