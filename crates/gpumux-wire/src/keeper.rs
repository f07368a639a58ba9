//! The packets between a program and the supervisor that keeps its memory over a fault (`gpumux run --keep-memory`).
//!
//! The supervisor holds the files by which device memory is imported. It needs no device for that.

use serde::{Deserialize, Serialize};

/// Names the supervisor's socket, an abstract one (unix(7)).
pub const VARIABLE: &str = "GPUMUX_KEEPER";

/// Longest name of a buffer, in bytes.
pub const LONGEST_NAME: usize = 128;

/// From the program; each is answered. Packets marked *file* carry one file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// First of all.
    Hello {
        /// The secret that names the tenant.
        tenant: String,
    },
    /// Finds a buffer and holds it: no other process finds it while this one lives.
    Find {
        /// Its name.
        name: String,
    },
    /// Has a buffer kept, which this process holds; *file*: its memory.
    Keep {
        /// Its name.
        name: String,
        /// What it is.
        buffer: Buffer,
    },
    /// A buffer is kept no more.
    Drop {
        /// Its name.
        name: String,
    },
}

/// A kept buffer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Buffer {
    /// UUID of its device.
    pub device: String,
    /// What the program has of it, in bytes: where its parts are follows from that.
    pub size: u64,
    /// What its memory has.
    pub bytes: u64,
}

/// From the supervisor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    /// Done; to [`Request::Find`]: there is none.
    Done,
    /// Answer to [`Request::Find`]; *file*: its memory.
    Found(Buffer),
    /// Another process holds it.
    Busy,
    /// It cannot be done.
    Refused {
        /// Why, for people.
        reason: String,
    },
}
