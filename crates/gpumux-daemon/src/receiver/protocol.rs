//! What the daemon, its receiver and the relays send each other.

use std::{io, os::fd::OwnedFd, path::PathBuf, time::Duration};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use serde::{Deserialize, Serialize};

/// Name of the hidden command that runs [`main`](super::main).
pub const COMMAND: &str = "receiver";
/// How long a part of an answer of the API may wait to be read.
pub(crate) const STALLED: Duration = Duration::from_secs(20);

/// Which socket a connection came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Kind {
    /// Packets with files.
    Session,
    /// A stream of bytes.
    Api,
}

/// First packet to the receiver, with both listening sockets: sessions', the API's.
#[derive(Serialize, Deserialize)]
pub(super) struct SetUp {
    /// The emulated device's server.
    pub(super) emulated: Option<PathBuf>,
    /// Relays that may live.
    pub(super) relays: usize,
}

/// From the receiver.
#[derive(Serialize, Deserialize)]
pub(super) enum Report {
    /// A connection. With the daemon's end of the relay's socket pair, and a pidfd of the other side where the kernel has one.
    Arrival {
        kind: Kind,
        /// 0: it lives in a pid namespace that the daemon does not see.
        pid: u32,
        uid: u32,
    },
    /// Connections are refused, and why.
    Refused(String),
}

/// Where connections are received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In a process of its own: this program must run [`main`](super::main) as its hidden command [`COMMAND`].
    Process,
    /// In threads of this one, where a file that hangs can keep the process from ending: for tests that run a daemon in
    /// their own process.
    Threads,
}

/// Two connected sockets, closed on exec.
pub(crate) fn pair(kind: SocketType) -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(socketpair(
        AddressFamily::UNIX,
        kind,
        SocketFlags::CLOEXEC,
        None,
    )?)
}
