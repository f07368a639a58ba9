//! A connected process, as all parts of the daemon have it: one link, from its hello to its end.

use std::{
    collections::{BTreeMap, VecDeque},
    io,
    os::fd::{AsFd, OwnedFd},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use gpumux_core::TenantId;
use gpumux_wire::{Daemon, page::Page, socket};
use rustix::net::{SendFlags, Shutdown};

/// Most messages that wait for room in a socket: several for each export of a tenant. A session with more ends.
const MOST_UNSENT: usize = 1 << 14;

/// One connection of a tenant's process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct SessionId(pub(crate) u64);

/// A connected process.
pub(crate) struct Link {
    pub(crate) session: SessionId,
    pub(crate) tenant: TenantId,
    pub(crate) pid: u32,
    pub(crate) page: Arc<Page>,
    /// When its session began: before it could see the lease.
    pub(crate) made: Instant,
    socket: Arc<OwnedFd>,
    /// What its full socket has not taken yet.
    unsent: Mutex<VecDeque<(Daemon, Option<OwnedFd>)>>,
}

impl Link {
    pub(crate) fn new(
        session: SessionId,
        tenant: TenantId,
        pid: u32,
        page: Arc<Page>,
        socket: Arc<OwnedFd>,
    ) -> Arc<Self> {
        Arc::new(Self {
            session,
            tenant,
            pid,
            page,
            made: Instant::now(),
            socket,
            unsent: Mutex::default(),
        })
    }

    /// Sends a message, without waiting. Whether that was possible.
    pub(crate) fn send(&self, message: &Daemon) -> bool {
        send(&self.socket, message)
    }

    /// Sends what the process must not miss, without waiting. If the socket does not take it, the session ends: the introduction of the next
    /// one makes it good.
    pub(crate) fn send_or_end(&self, message: &Daemon) {
        if !self.send(message) {
            self.end();
        }
    }

    fn end(&self) {
        let _ = rustix::net::shutdown(&self.socket, Shutdown::Both);
    }

    /// Sends a message behind those of this kind that the socket has not taken yet.
    pub(crate) fn send_in_order(&self, message: Daemon, file: Option<OwnedFd>) {
        let mut unsent = self.unsent();
        if unsent.len() >= MOST_UNSENT {
            unsent.clear();
            return self.end();
        }
        unsent.push_back((message, file));
        drop(unsent);
        self.flush();
    }

    /// Whether the socket has not taken all yet.
    pub(crate) fn has_unsent(&self) -> bool {
        !self.unsent().is_empty()
    }

    /// Sends what the socket takes, in order.
    pub(crate) fn flush(&self) {
        let mut unsent = self.unsent();
        while let Some((message, file)) = unsent.front() {
            let file = file.as_ref().map(AsFd::as_fd);
            match socket::send(&self.socket, message, file, SendFlags::DONTWAIT) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) => match *message {
                    // A file may be refused. The program that waits for it shall get its error.
                    Daemon::Piece {
                        ticket,
                        piece: Some(_),
                    } => {
                        tracing::warn!(%error, "a piece of shared memory cannot be passed on");
                        let refused = Daemon::Piece {
                            ticket,
                            piece: None,
                        };
                        unsent[0] = (refused, None);
                        continue;
                    }
                    // The session is at its end: the next one's introduction makes it good.
                    _ => tracing::debug!(%error, ?message, "a message about shared memory is lost"),
                },
                Ok(()) => {}
            }
            unsent.pop_front();
        }
    }

    fn unsent(&self) -> MutexGuard<'_, VecDeque<(Daemon, Option<OwnedFd>)>> {
        self.unsent.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Sends the other side a message, without waiting. Whether that was possible.
pub(crate) fn send(socket: &OwnedFd, message: &Daemon) -> bool {
    socket::send(socket, message, None, SendFlags::DONTWAIT).is_ok()
}

/// All connected processes.
#[derive(Default)]
pub(crate) struct Links(Mutex<BTreeMap<SessionId, Arc<Link>>>);

impl Links {
    fn table(&self) -> MutexGuard<'_, BTreeMap<SessionId, Arc<Link>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn add(&self, link: &Arc<Link>) {
        self.table().insert(link.session, Arc::clone(link));
    }

    pub(crate) fn remove(&self, session: SessionId) {
        self.table().remove(&session);
    }

    pub(crate) fn find(&self, session: SessionId) -> Option<Arc<Link>> {
        self.table().get(&session).cloned()
    }

    pub(crate) fn all(&self) -> Vec<Arc<Link>> {
        self.table().values().cloned().collect()
    }
}
