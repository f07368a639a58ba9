//! Connections that get no relay: they are refused here, and closed elsewhere.
//!
//! A user's files may wait in a refused connection, so the receiver must never close the last reference to one. It sends the connection
//! into a socket pair of its own, of which it keeps both ends, and only then closes its copy. A process, the *closer*, takes all
//! of a pair's connections out, and ends. One closer runs at a time unless it hangs: then each further [`MOST`] connections
//! get another. When [`HANGING`] hang, the next one takes connections for as long as that is so, until they are half of the files that it
//! may have: how many processes hang depends on neither the users nor, but for that, on the number of their connections.

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
    process::{Resource, getrlimit},
};

use super::{
    children::Work,
    protocol::{Kind, pair},
};

/// Connections that wait in a pair: the kernel's default buffer (`net.core.wmem_default`) has room for twice as many.
pub(super) const MOST: usize = 128;

/// Closers that may hang before one keeps connections open.
pub(super) const HANGING: usize = 8;

/// Sends the reason, and that nothing follows.
pub(super) fn refuse(connection: &OwnedFd, kind: Kind, reason: &str) {
    let bytes = match kind {
        Kind::Session => encode(&Daemon::Refused {
            reason: reason.to_owned(),
        })
        .unwrap_or_default(),
        Kind::Api => no_place(reason).into_bytes(),
    };
    // A new connection has room for that.
    let _ = send_bytes(connection, &bytes, &[], SendFlags::DONTWAIT);
    let _ = shutdown(connection, Shutdown::Write);
}

/// The answer to a connection that finds no place. A daemon that ends answers otherwise: clients wait for the next one then.
pub(crate) fn no_place(reason: &str) -> String {
    let problem = serde_json::json!({ "error": reason });
    let head = "HTTP/1.1 429 Too Many Requests\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n";
    format!("{head}{problem}\n")
}

/// Connections on their way to a closer.
pub(super) struct Pair {
    /// None once a closer has it.
    into: Option<OwnedFd>,
    from: OwnedFd,
    count: usize,
}

impl Pair {
    /// # Errors
    /// When there are no files left.
    fn new() -> io::Result<Self> {
        let (into, from) = pair(SocketType::SEQPACKET)?;
        Ok(Self {
            into: Some(into),
            from,
            count: 0,
        })
    }

    pub(super) fn files(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let into = self.into.iter().map(AsFd::as_fd);
        into.chain([self.from.as_fd()])
    }

    /// No further connection comes, once what this returns is closed.
    pub(super) fn close(&mut self) -> Option<OwnedFd> {
        self.into.take()
    }

    fn is_empty(&self) -> bool {
        ioctl_fionread(&self.from).is_ok_and(|length| length == 0)
    }
}

fn pass(into: &OwnedFd, connection: &OwnedFd) -> io::Result<()> {
    send_bytes(into, &[0], &[connection.as_fd()], SendFlags::DONTWAIT)
}

/// The connections that wait for a closer.
pub(super) struct Refused {
    /// The one that is being filled is last.
    pairs: Vec<Pair>,
    /// Leads to the closer that keeps connections open until this is closed.
    keeper: Option<OwnedFd>,
    /// One for which there was no room.
    left_over: Option<OwnedFd>,
}

impl Refused {
    /// # Errors
    /// When there are no files left.
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self {
            pairs: vec![Pair::new()?],
            keeper: None,
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
        match self.keeper.as_ref().map(|it| pass(it, &connection)) {
            Some(Ok(())) => return Ok(()),
            Some(Err(error)) if error.kind() == io::ErrorKind::WouldBlock => {
                return Err(connection);
            }
            // It has all that it may have, or has ended.
            Some(Err(_)) => self.keeper = None,
            None => {}
        }
        let Some(pair) = self.pairs.last_mut().filter(|pair| pair.count < MOST) else {
            return Err(connection);
        };
        match pair.into.as_ref().map(|it| pass(it, &connection)) {
            Some(Ok(())) => pair.count += 1,
            _ => return Err(connection),
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
            .chain(self.keeper.iter().map(AsFd::as_fd))
            .chain(self.left_over.iter().map(AsFd::as_fd))
    }

    /// A pair for which a closer shall be started now, given how many live.
    ///
    /// # Errors
    /// When there are no files left.
    pub(super) fn due(&mut self, living: usize) -> io::Result<Option<(Pair, Closer)>> {
        if living < HANGING {
            self.keeper = None;
        }
        if let Some(connection) = self.left_over.take() {
            self.add(connection);
        }
        let Some(first) = self.pairs.first().filter(|it| it.count > 0) else {
            return Ok(None);
        };
        if self.keeper.is_some() || (living > 0 && first.count < MOST) {
            return Ok(None);
        }
        let closer = Closer {
            from: first.from.try_clone()?,
            keeps: living >= HANGING,
        };
        if self.pairs.len() == 1 {
            self.pairs.push(Pair::new()?);
        }
        Ok(Some((self.pairs.remove(0), closer)))
    }

    /// A closer takes connections out of its pair for as long as this is open.
    pub(super) fn keep(&mut self, into: Option<OwnedFd>) {
        self.keeper = into;
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
    /// Until the pair's other end is closed, or it has half of the files that it may have.
    pub(super) keeps: bool,
}

impl Work for Closer {
    fn run(self) -> Vec<OwnedFd> {
        let (flags, most) = match self.keeps {
            false => (RecvFlags::DONTWAIT, u64::MAX),
            true => (
                RecvFlags::empty(),
                getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX) / 2,
            ),
        };
        let mut connections = Vec::new();
        while let Ok((1.., connection)) = recv_bytes(&self.from, &mut [0], flags) {
            connections.extend(connection);
            if connections.len() as u64 >= most {
                // What is on its way still comes.
                let _ = shutdown(&self.from, Shutdown::Read);
            }
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

    /// What a closer of the next pair takes, as one that hangs then.
    fn hang(refused: &mut Refused, living: usize) -> Vec<OwnedFd> {
        let (_pair, closer) = refused.due(living).unwrap().unwrap();
        assert!(!closer.keeps);
        closer.run()
    }

    fn is_due(refused: &mut Refused, living: usize) -> bool {
        let due = refused.due(living).unwrap();
        due.is_some()
    }

    #[test]
    fn closer_is_due_at_once_and_beside_another_for_many() {
        let mut refused = Refused::new().unwrap();
        assert!(!is_due(&mut refused, 0));
        refused.add(connection());
        assert_eq!(hang(&mut refused, 0).len(), 1);
        for _ in 0..MOST {
            assert!(!is_due(&mut refused, 1) && !refused.is_full());
            refused.add(connection());
        }
        refused.add(connection());
        assert!(refused.is_full());
        assert_eq!(hang(&mut refused, 1).len(), MOST);
        assert!(!is_due(&mut refused, 1) && !refused.is_full());
        assert_eq!(hang(&mut refused, 0).len(), 1);
    }

    #[test]
    fn pair_that_a_closer_has_not_emptied_is_due_again() {
        let mut refused = Refused::new().unwrap();
        refused.add(connection());
        let (pair, _) = refused.due(0).unwrap().unwrap();
        refused.give_back(pair);
        assert!(refused.is_waiting());
        let (pair, closer) = refused.due(0).unwrap().unwrap();
        closer.run();
        refused.give_back(pair);
        assert!(!is_due(&mut refused, 0) && !refused.is_waiting());
    }

    #[test]
    fn closers_that_hang_are_bounded_whatever_is_refused() {
        let mut refused = Refused::new().unwrap();
        let mut closers = 0;
        let mut keeper = None;
        for _ in 0..MOST * HANGING * 3 {
            refused.add(connection());
            // The process that keeps them may be late.
            while refused.is_full() {
                assert!(!is_due(&mut refused, closers));
                std::thread::yield_now();
            }
            let Some((mut pair, closer)) = refused.due(closers).unwrap() else {
                continue;
            };
            closers += 1;
            match closer.keeps {
                false => drop(closer.run()),
                true => {
                    refused.keep(pair.close());
                    keeper = Some(std::thread::spawn(|| closer.run().len()));
                    // It reads beside this.
                    while !pair.is_empty() {
                        std::thread::yield_now();
                    }
                }
            }
        }
        assert_eq!(closers, HANGING + 1);
        // They go on: it ends with what it has kept.
        assert!(!is_due(&mut refused, 1));
        let kept = keeper.unwrap().join().unwrap();
        // The first closer took one connection.
        assert_eq!(kept, MOST * (HANGING * 2 + 1) - 1);
        refused.add(connection());
        assert_eq!(hang(&mut refused, 0).len(), 1);
    }

    #[test]
    fn keeper_with_all_files_that_it_may_have_ends() {
        let mut refused = Refused::new().unwrap();
        (0..MOST).for_each(|_| refused.add(connection()));
        let (mut pair, closer) = refused.due(HANGING).unwrap().unwrap();
        assert!(closer.keeps);
        let into = pair.close();
        shutdown(&pair.from, Shutdown::Read).unwrap();
        refused.keep(into);
        assert_eq!(closer.run().len(), MOST, "what was on its way");
        refused.add(connection());
        assert!(!refused.is_full());
        assert_eq!(hang(&mut refused, 0).len(), 1, "it waits for another");
    }
}
