//! What shim and daemon say to each other, and the page of counters they share.
//!
//! A session is one connection of a `SOCK_SEQPACKET` socket: [`message`] has the packets,
//! [`socket`] sends and receives them with their files, [`page`] is the memory in which the shim counts
//! work, [`lease`] the memory in which the daemon counts its renewals, [`permits`] the memory in which it
//! permits launches. The daemon takes everything that arrives as hostile: packets are bounded and parsed
//! without panicking, and the page can neither shrink nor be written by the daemon.

pub mod clock;
pub mod keeper;
pub mod lease;
mod mapping;
pub mod message;
pub mod page;
pub mod permits;
mod slot;
pub mod socket;

/// The atomics of shared words; `tests/loom.rs` has others in their place.
mod sync {
    pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
}

/// The variable that tells a tenant's programs in bytes how much of a device's memory they may have, which some ask before they
/// have a context and so a session. The limit itself is the daemon's.
pub const MEMORY_LIMIT_VARIABLE: &str = "GPUMUX_MEMORY_LIMIT";

/// The variable that tells a job's ranks how many of them share a device.
pub const RANKS_VARIABLE: &str = "GPUMUX_RANKS_PER_GPU";

/// The variable by which a program's user leaves its frameworks as they are: `leave`.
pub const FRAMEWORKS_VARIABLE: &str = "GPUMUX_FRAMEWORKS";

pub use message::{Daemon, PROTOCOL, REVISION, Shim};
