//! Receives users' connections, and the files that come with them, apart from the daemon.
//!
//! # Problem
//! Closing the last reference to a file can take as long as the file's owner likes: a socket with `SO_LINGER` waits for its
//! other side, a file of a FUSE file system for a program of the user, where not even SIGKILL helps. A file that a process sends
//! over a Unix socket has its last reference in the receiving socket, also when it is never taken out (unix(7)).
//!
//! # Approach
//! The daemon holds no socket of a user. A process without privilege, the *receiver*, accepts connections; a process
//! of its own for each, a *relay* (`receiver/relay.rs`), passes bytes and packets on over a socket pair of the daemon's. Of files
//! it passes on the driver's device nodes and memory files, whose end waits for no user. A relay that hangs, hangs alone: it has nothing
//! but its user's connection. When the daemon ends, receiver and relays see that and end.

mod children;
mod places;
mod process;
mod protocol;
mod refused;
mod relay;

use std::{
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::process::CommandExt,
    },
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::Duration,
};

use gpumux_wire::{
    message::{decode, encode},
    socket::{recv_bytes, send_bytes},
};
use rustix::net::{RecvFlags, SendFlags, SocketType};
use tokio::sync::mpsc;

use crate::peer::{Peer, ProcessFd, readable};
pub use process::main;
pub use protocol::{COMMAND, Place};
use protocol::{Kind, Report, SetUp};
pub(crate) use protocol::{STALLED, pair};
pub(crate) use refused::no_place;

/// Connections that may wait for the daemon's tasks.
const WAITING: usize = 64;
/// How long to wait before a receiver that ended is replaced.
const PAUSE: Duration = Duration::from_millis(100);

/// A user's connection.
#[derive(Debug)]
pub(crate) struct Connection {
    /// The daemon's end of the relay's socket pair. Non-blocking.
    pub(crate) socket: OwnedFd,
    /// The process that connected.
    pub(crate) peer: Peer,
}

/// How a receiver works.
#[derive(Clone, Debug)]
pub(crate) struct Setting {
    /// Where it runs.
    pub(crate) place: Place,
    /// The emulated device's server.
    pub(crate) emulated: Option<PathBuf>,
    /// Most connections, also of those whose end hangs.
    pub(crate) connections: usize,
}

/// A running receiver.
pub(crate) struct Receiver {
    control: OwnedFd,
    child: Option<Child>,
}

/// The connections that arrive.
pub(crate) struct Arrivals {
    pub(crate) sessions: mpsc::Receiver<Connection>,
    pub(crate) api: mpsc::Receiver<Connection>,
}

impl Receiver {
    /// Starts one for these listening sockets.
    ///
    /// # Errors
    /// When the process cannot be started.
    pub(crate) fn start(setting: &Setting, sessions: OwnedFd, api: OwnedFd) -> io::Result<Self> {
        let (control, theirs) = pair(SocketType::SEQPACKET)?;
        let place = setting.place;
        let set_up = SetUp {
            emulated: setting.emulated.clone(),
            relays: setting.connections,
        };
        let bytes = encode(&set_up).map_err(io::Error::other)?;
        let files = [sessions.as_fd(), api.as_fd()];
        send_bytes(&control, &bytes, &files, SendFlags::empty())?;
        let child = match place {
            Place::Process => Some(
                // The program that runs, also where a newer one has its name.
                Command::new("/proc/self/exe")
                    .arg(COMMAND)
                    .stdin(theirs)
                    .stdout(Stdio::null())
                    .stderr(Stdio::null())
                    .current_dir("/")
                    // An interrupt of the terminal is for the daemon, which ends in good order.
                    .process_group(0)
                    .spawn()?,
            ),
            Place::Threads => {
                std::thread::spawn(move || process::serve(theirs, place));
                None
            }
        };
        rustix::io::ioctl_fionbio(&control, true)?;
        Ok(Self { control, child })
    }

    /// Hands its connections to the daemon's tasks, until it or they have ended.
    async fn run(
        mut self,
        sessions: &mpsc::Sender<Connection>,
        api: &mpsc::Sender<Connection>,
    ) -> io::Result<()> {
        let events = readable(self.control.as_fd())?;
        let mut bytes = [0; 1024];
        loop {
            let mut ready = tokio::select! {
                ready = events.readable() => ready?,
                () = sessions.closed() => break,
                () = api.closed() => break,
            };
            let received = ready
                .try_io(|control| recv_bytes(control.get_ref(), &mut bytes, RecvFlags::DONTWAIT));
            let (length, files) = match received {
                Ok(received) => received?,
                Err(_would_block) => continue,
            };
            if length == 0 {
                break;
            }
            let (kind, pid, uid) = match decode(&bytes[..length]).map_err(io::Error::other)? {
                Report::Arrival { kind, pid, uid } => (kind, pid, uid),
                Report::Refused(reason) => {
                    tracing::warn!("a connection is refused: {reason}");
                    continue;
                }
            };
            let mut files = files.into_iter();
            let Some(socket) = files.next() else {
                continue;
            };
            rustix::io::ioctl_fionbio(&socket, true)?;
            let pidfd = files.next().map(ProcessFd::from);
            let peer = Peer::new(pid, uid, pidfd);
            let to = match kind {
                Kind::Session => sessions,
                Kind::Api => api,
            };
            if to.send(Connection { socket, peer }).await.is_err() {
                break;
            }
        }
        drop(events);
        drop(self.control);
        if let Some(child) = &mut self.child {
            // It ends by itself; nothing waits for one that hangs.
            let _ = child.try_wait();
        }
        Ok(())
    }
}

/// Receives connections until the daemon's tasks have ended. A receiver that ends before is replaced by one that `again` starts,
/// on new listening sockets.
pub(crate) fn receive(
    first: Receiver,
    mut again: impl FnMut() -> io::Result<Receiver> + Send + 'static,
) -> Arrivals {
    let (sessions, session_arrivals) = mpsc::channel(WAITING);
    let (api, api_arrivals) = mpsc::channel(WAITING);
    tokio::spawn(async move {
        let mut receiver = Ok(first);
        loop {
            let result = match receiver {
                Ok(receiver) => receiver.run(&sessions, &api).await,
                Err(error) => Err(error),
            };
            if sessions.is_closed() || api.is_closed() {
                return;
            }
            tracing::error!(
                ?result,
                "connections are not received: another receiver is started"
            );
            tokio::time::sleep(PAUSE).await;
            receiver = again();
        }
    });
    Arrivals {
        sessions: session_arrivals,
        api: api_arrivals,
    }
}

#[cfg(test)]
mod tests;
