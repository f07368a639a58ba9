//! A relay: serves one connection, and may hang for as long as its user likes.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
    time::Instant,
};

use gpumux_wire::{
    message::MAX_PACKET,
    socket::{recv_bytes, send_bytes},
};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::{FileType, fcntl_get_seals, fstat},
    io::Errno,
    net::{RecvFlags, SendFlags, Shutdown, recv, shutdown},
};

use super::{
    children::Work,
    protocol::{Kind, STALLED},
};
use crate::verify::{is_of_driver, leads_to};

/// What a relay has.
pub(super) struct Relay {
    pub(super) kind: Kind,
    /// The user's connection.
    pub(super) user: OwnedFd,
    /// Its end of the socket pair.
    pub(super) daemon: OwnedFd,
    /// The emulated device's server.
    pub(super) emulated: Option<PathBuf>,
}

/// Bytes of a stream that are passed on at once.
const CHUNK: usize = 16 << 10;

/// What is on its way.
struct Item {
    bytes: Vec<u8>,
    file: Option<OwnedFd>,
    /// How many of the bytes were sent.
    sent: usize,
}

/// What goes from one side to the other.
#[derive(Default)]
struct Direction {
    item: Option<Item>,
    /// Since when the other side has taken nothing of it.
    waits: Option<Instant>,
    ended: bool,
}

impl Direction {
    fn wants_more(&self) -> bool {
        self.item.is_none() && !self.ended
    }

    /// How long the other side may still take nothing.
    ///
    /// # Errors
    /// When it has taken nothing for too long.
    fn patience(&self) -> io::Result<Option<Timespec>> {
        let Some(since) = self.waits else {
            return Ok(None);
        };
        let left = STALLED.checked_sub(since.elapsed());
        let left = left.ok_or(io::ErrorKind::TimedOut)?;
        Timespec::try_from(left).map(Some).map_err(io::Error::other)
    }

    /// Sends what can be sent now.
    ///
    /// # Errors
    /// When the other side has closed: what was on its way is lost.
    fn send(&mut self, kind: Kind, to: &OwnedFd) -> io::Result<()> {
        let Some(mut item) = self.item.take() else {
            return Ok(());
        };
        let rest = &item.bytes[item.sent..];
        let sent = match kind {
            Kind::Session => {
                let files: Vec<_> = item.file.iter().map(AsFd::as_fd).collect();
                send_bytes(to, rest, &files, SendFlags::DONTWAIT).map(|()| rest.len())
            }
            Kind::Api => {
                let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
                rustix::net::send(to, rest, flags).map_err(io::Error::from)
            }
        };
        match sent {
            Ok(length) => {
                item.sent += length;
                self.waits = None;
            }
            Err(error) => {
                would_block(error)?;
                self.waits.get_or_insert_with(Instant::now);
            }
        }
        if item.sent < item.bytes.len() {
            self.item = Some(item);
        }
        Ok(())
    }
}

impl Work for Relay {
    /// Passes on what comes until one side has ended. The daemon sees the end before the user's files are closed.
    fn run(self) -> Vec<OwnedFd> {
        let _ = self.pass();
        let _ = shutdown(&self.daemon, Shutdown::Both);
        let _ = shutdown(&self.user, Shutdown::Both);
        vec![self.user]
    }
}

impl Relay {
    /// # Errors
    /// When a side has ended.
    fn pass(&self) -> io::Result<()> {
        let mut buffer = match self.kind {
            Kind::Session => vec![0; MAX_PACKET + 1],
            Kind::Api => vec![0; CHUNK],
        };
        let (mut up, mut down) = (Direction::default(), Direction::default());
        let checked = |file: &OwnedFd| may_pass(file, self.emulated.as_deref());
        loop {
            let wanted = |from: &Direction, to: &Direction| {
                let mut flags = PollFlags::empty();
                flags.set(PollFlags::IN, from.wants_more());
                flags.set(PollFlags::OUT, to.item.is_some());
                flags
            };
            let sides = [
                (&self.user, wanted(&up, &down)),
                (&self.daemon, wanted(&down, &up)),
            ];
            // Of a session the daemon's end is noticed in any case. Elsewhere one that nothing is wanted of would report its end again
            // and again.
            let looked_at = |it: &(&OwnedFd, PollFlags)| {
                !it.1.is_empty() || (self.kind == Kind::Session && std::ptr::eq(it.0, &self.daemon))
            };
            let mut ready: Vec<PollFd<'_>> = (sides.iter().copied())
                .filter(looked_at)
                .map(|(file, flags)| PollFd::new(file, flags))
                .collect();
            let patience = match self.kind {
                Kind::Session => None,
                Kind::Api => down.patience()?,
            };
            match poll(&mut ready, patience.as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            let hung_up = |it: &PollFd<'_>| it.revents().contains(PollFlags::HUP);
            if self.kind == Kind::Session
                && down.item.is_some()
                && ready.last().is_some_and(hung_up)
            {
                return Ok(());
            }
            if up.wants_more() {
                match self.kind.receive(&self.user, &mut buffer, checked) {
                    Ok(item) => up.item = item,
                    // The daemon may still answer.
                    Err(_) if self.kind == Kind::Api => {
                        up.ended = true;
                        shutdown(&self.daemon, Shutdown::Write)?;
                    }
                    Err(error) => return Err(error),
                }
            }
            match up.send(self.kind, &self.daemon) {
                // It has closed, and what it answered before that may not have been received yet.
                Err(_) if self.kind == Kind::Api => up.ended = true,
                sent => sent?,
            }
            if down.wants_more() {
                down.item = self.kind.receive(&self.daemon, &mut buffer, |_| true)?;
            }
            match (self.kind, down.send(self.kind, &self.user)) {
                // A process that has gone is seen by its end, after its last packets.
                (Kind::Session, _) | (_, Ok(())) => {}
                (Kind::Api, error) => return error,
            }
        }
    }
}

impl Kind {
    /// What comes next, if there is something, with the first file that may pass.
    ///
    /// # Errors
    /// When the other side has closed.
    fn receive(
        self,
        socket: &OwnedFd,
        buffer: &mut [u8],
        may_pass: impl Fn(&OwnedFd) -> bool,
    ) -> io::Result<Option<Item>> {
        let received = match self {
            Self::Session => recv_bytes(socket, buffer, RecvFlags::DONTWAIT),
            // Files that come with bytes are never taken out: the kernel closes them.
            Self::Api => match recv(socket, &mut *buffer, RecvFlags::DONTWAIT) {
                Ok((length, _)) => Ok((length, Vec::new())),
                Err(error) => Err(error.into()),
            },
        };
        match received {
            Ok((0, _)) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok((length, files)) => Ok(Some(Item {
                bytes: buffer[..length].to_vec(),
                file: files.into_iter().find(may_pass),
                sent: 0,
            })),
            // It closed without reading all: what it sent can still be received.
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => Ok(None),
            Err(error) => would_block(error).map(|()| None),
        }
    }
}

fn would_block(error: io::Error) -> io::Result<()> {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(()),
        _ => Err(error),
    }
}

/// Whether the end of a file waits for no user: the driver's devices, memory, and sockets of the emulated device, to which only
/// that can have sent something.
fn may_pass(file: &OwnedFd, emulated: Option<&Path>) -> bool {
    let kind = fstat(file).map(|own| FileType::from_raw_mode(own.st_mode));
    match kind {
        Ok(FileType::RegularFile) => fcntl_get_seals(file).is_ok(),
        Ok(FileType::Socket) => emulated.is_some_and(|server| leads_to(file, server).is_ok()),
        _ => is_of_driver(file),
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read, Write},
        os::unix::net::UnixStream,
    };

    use rustix::net::SocketType;

    use super::{super::protocol::pair, *};

    #[test]
    fn answer_of_a_daemon_that_has_closed_is_passed_on() {
        let (user, own) = pair(SocketType::STREAM).unwrap();
        let (daemon, theirs) = pair(SocketType::STREAM).unwrap();
        let (mut user, mut theirs) = (UnixStream::from(user), UnixStream::from(theirs));
        user.write_all(b"GET / HTTP/1.1").unwrap();
        theirs.write_all(b"HTTP/1.1 503").unwrap();
        drop(theirs);
        let relay = Relay {
            kind: Kind::Api,
            user: own,
            daemon,
            emulated: None,
        };
        drop(relay.run());
        let mut answer = String::new();
        user.read_to_string(&mut answer).unwrap();
        assert_eq!(answer, "HTTP/1.1 503");
    }
}
