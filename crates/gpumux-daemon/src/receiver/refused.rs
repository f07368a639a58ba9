//! Connections that get no relay: they are refused here, and closed elsewhere.
//!
//! A user's files may wait in a refused connection, so the receiver must never close the last reference to one. It sends the connection
//! into a socket pair of its own, of which it keeps both ends, and only then closes its copy. A process, the *closer*, takes all
//! of a pair's connections out, and ends. One closer runs at a time unless it hangs: then each further [`MOST`] connections
//! get another, so that a user at its bound costs one process for that many connections.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use gpumux_wire::{
    Daemon,
    message::encode,
    socket::{recv_bytes, send_bytes},
};
use rustix::{
    io::ioctl_fionread,
    net::{RecvFlags, SendFlags, Shutdown, SocketType, shutdown},
};

use super::{Kind, children::Work, pair};

/// Connections that wait in a pair: the kernel's default buffer (`net.core.wmem_default`) has room for twice as many.
pub(super) const MOST: usize = 128;

/// Sends the reason, and that nothing follows.
pub(super) fn refuse(connection: &OwnedFd, kind: Kind, reason: &str) {
    let bytes = match kind {
        Kind::Session => encode(&Daemon::Refused {
            reason: reason.to_owned(),
        })
        .unwrap_or_default(),
        Kind::Api => unavailable(reason).into_bytes(),
    };
    // A new connection has room for that.
    let _ = send_bytes(connection, &bytes, &[], SendFlags::DONTWAIT);
    let _ = shutdown(connection, Shutdown::Write);
}

/// The answer to a connection that is not served.
pub(crate) fn unavailable(reason: &str) -> String {
    let problem = serde_json::json!({ "error": reason });
    let head = "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n";
    format!("{head}{problem}\n")
}

/// Connections on their way to a closer.
pub(super) struct Pair {
    into: OwnedFd,
    from: OwnedFd,
    count: usize,
}

impl Pair {
    /// # Errors
    /// When there are no files left.
    fn new() -> io::Result<Self> {
        let (into, from) = pair(SocketType::SEQPACKET)?;
        Ok(Self {
            into,
            from,
            count: 0,
        })
    }

    pub(super) fn files(&self) -> [BorrowedFd<'_>; 2] {
        [self.into.as_fd(), self.from.as_fd()]
    }

    fn is_empty(&self) -> bool {
        ioctl_fionread(&self.from).is_ok_and(|length| length == 0)
    }
}

/// The connections that wait for a closer.
pub(super) struct Refused {
    /// The one that is being filled is last.
    pairs: Vec<Pair>,
    /// One for which there was no room.
    left_over: Option<OwnedFd>,
}

impl Refused {
    /// # Errors
    /// When there are no files left.
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self {
            pairs: vec![Pair::new()?],
            left_over: None,
        })
    }

    /// Takes a connection, which must not be closed here.
    pub(super) fn add(&mut self, connection: OwnedFd) {
        if let Err(connection) = self.try_add(connection) {
            self.left_over = Some(connection);
        }
    }

    fn try_add(&mut self, connection: OwnedFd) -> Result<(), OwnedFd> {
        let Some(pair) = self.pairs.last_mut().filter(|pair| pair.count < MOST) else {
            return Err(connection);
        };
        match send_bytes(&pair.into, &[0], &[connection.as_fd()], SendFlags::DONTWAIT) {
            Ok(()) => pair.count += 1,
            Err(_) => return Err(connection),
        }
        Ok(())
    }

    /// Whether no further connection may be accepted.
    pub(super) fn is_full(&self) -> bool {
        self.left_over.is_some()
    }

    /// Whether connections wait, which no end of a child announces.
    pub(super) fn is_waiting(&self) -> bool {
        self.is_full() || self.pairs.len() > 1
    }

    /// Files that no child needs.
    pub(super) fn files(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        (self.pairs.iter().flat_map(Pair::files))
            .chain(self.left_over.iter().map(|connection| connection.as_fd()))
    }

    /// A pair for which a closer shall be started now, given whether one runs.
    pub(super) fn due(&mut self, runs: bool) -> Option<Pair> {
        if let Some(connection) = self.left_over.take() {
            self.add(connection);
        }
        let first = self.pairs.first().filter(|it| it.count > 0)?;
        if runs && first.count < MOST {
            return None;
        }
        if self.pairs.len() == 1 {
            self.pairs.push(Pair::new().ok()?);
        }
        Some(self.pairs.remove(0))
    }

    /// Takes a pair back that no closer has emptied.
    pub(super) fn give_back(&mut self, pair: Pair) {
        if !pair.is_empty() {
            self.pairs.insert(0, pair);
        }
    }
}

/// Takes connections out of a pair, and ends with them.
pub(super) struct Closer {
    from: OwnedFd,
}

impl Closer {
    /// # Errors
    /// When there are no files left.
    pub(super) fn new(pair: &Pair) -> io::Result<Self> {
        let from = pair.from.try_clone()?;
        Ok(Self { from })
    }
}

impl Work for Closer {
    fn run(self) -> Vec<OwnedFd> {
        let mut connections = Vec::new();
        while let Ok((1.., connection)) = recv_bytes(&self.from, &mut [0], RecvFlags::DONTWAIT) {
            connections.extend(connection);
        }
        connections
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn connection() -> OwnedFd {
        pair(SocketType::STREAM).unwrap().0
    }

    #[test]
    fn closer_is_due_at_once_and_beside_another_for_many() {
        let mut refused = Refused::new().unwrap();
        assert!(refused.due(false).is_none());
        refused.add(connection());
        let first = refused.due(false).unwrap();
        assert_eq!(Closer::new(&first).unwrap().run().len(), 1);
        assert!(first.is_empty());
        for _ in 0..MOST {
            assert!(refused.due(true).is_none() && !refused.is_full());
            refused.add(connection());
        }
        refused.add(connection());
        assert!(refused.is_full());
        let second = refused.due(true).unwrap();
        assert!(refused.due(true).is_none() && !refused.is_full());
        assert_eq!(Closer::new(&second).unwrap().run().len(), MOST);
        assert_eq!(
            Closer::new(&refused.due(false).unwrap())
                .unwrap()
                .run()
                .len(),
            1
        );
    }

    #[test]
    fn pair_that_a_closer_has_not_emptied_is_due_again() {
        let mut refused = Refused::new().unwrap();
        refused.add(connection());
        let pair = refused.due(false).unwrap();
        refused.give_back(pair);
        assert!(refused.is_waiting());
        let pair = refused.due(false).unwrap();
        Closer::new(&pair).unwrap().run();
        refused.give_back(pair);
        assert!(refused.due(false).is_none() && !refused.is_waiting());
    }
}
