//! A relay: serves one connection, and may hang for as long as its user likes.

use std::{
    io,
    net::Shutdown,
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::{Path, PathBuf},
};

use gpumux_wire::{
    message::MAX_PACKET,
    socket::{recv_bytes, send_bytes},
};
use rustix::{
    event::{PollFd, PollFlags, poll},
    fs::{FileType, fcntl_get_seals, fstat, major, stat},
    io::Errno,
    net::{RecvFlags, SendFlags},
};

use super::Kind;
use crate::verify::leads_to;

/// Device numbers of `/dev/nvidia*` begin with this (Documentation/admin-guide/devices.txt of Linux).
const NVIDIA: u32 = 195;
/// The driver's other device has a number that is found at run time.
const UVM: &str = "/dev/nvidia-uvm";

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

/// A packet on its way, with its file.
type Packet = (Vec<u8>, Option<OwnedFd>);

impl Relay {
    /// Passes on what comes until one side has ended. The daemon sees the end before the user's files are closed.
    pub(super) fn run(self) {
        match self.kind {
            Kind::Session => self.packets(),
            Kind::Api => self.stream(),
        }
    }

    fn stream(self) {
        let (user, daemon) = (UnixStream::from(self.user), UnixStream::from(self.daemon));
        let ends = user
            .try_clone()
            .and_then(|it| Ok((it, daemon.try_clone()?)));
        let Ok((from, to)) = ends else {
            let _ = daemon.shutdown(Shutdown::Both);
            return;
        };
        let up = std::thread::Builder::new().spawn(move || {
            // Files that come along are closed by the kernel, here.
            let _ = io::copy(&mut &from, &mut &to);
            let _ = to.shutdown(Shutdown::Write);
        });
        if up.is_ok() {
            let _ = io::copy(&mut &daemon, &mut &user);
        }
        let _ = daemon.shutdown(Shutdown::Both);
        let _ = user.shutdown(Shutdown::Both);
    }

    fn packets(self) {
        let (user, daemon) = (&self.user, &self.daemon);
        let mut buffer = vec![0; MAX_PACKET + 1];
        let (mut up, mut down): (Option<Packet>, Option<Packet>) = (None, None);
        loop {
            let wanted = |receive: bool, send: bool| {
                let mut flags = PollFlags::empty();
                flags.set(PollFlags::IN, receive);
                flags.set(PollFlags::OUT, send);
                flags
            };
            let sides = [
                (user, wanted(up.is_none(), down.is_some())),
                (daemon, wanted(down.is_none(), up.is_some())),
            ];
            // One that nothing is wanted of would report its end again and again.
            let mut ready: Vec<PollFd<'_>> = (sides.iter())
                .filter(|(_, flags)| !flags.is_empty())
                .map(|(file, flags)| PollFd::new(*file, *flags))
                .collect();
            match poll(&mut ready, None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(_) => break,
            }
            let received = match up {
                None => receive(user, &mut buffer),
                Some(_) => Ok(None),
            };
            match received {
                Ok(Some((bytes, files))) => {
                    let passes = |file: &OwnedFd| may_pass(file, self.emulated.as_deref());
                    up = Some((bytes, files.into_iter().find(passes)));
                }
                Ok(None) => {}
                Err(_) => break,
            }
            if let Some(packet) = up.take() {
                match send(daemon, &packet) {
                    Ok(true) => {}
                    Ok(false) => up = Some(packet),
                    Err(_) => break,
                }
            }
            let received = match down {
                None => receive(daemon, &mut buffer),
                Some(_) => Ok(None),
            };
            match received {
                Ok(Some((bytes, files))) => down = Some((bytes, files.into_iter().next())),
                Ok(None) => {}
                Err(_) => break,
            }
            if let Some(packet) = down.take()
                && let Ok(false) = send(user, &packet)
            {
                // A user that has gone is seen by its end, after its last words.
                down = Some(packet);
            }
        }
        let _ = rustix::net::shutdown(daemon, rustix::net::Shutdown::Both);
    }
}

/// The next packet, if there is one.
///
/// # Errors
/// When the other side has closed.
fn receive(socket: &OwnedFd, buffer: &mut [u8]) -> io::Result<Option<(Vec<u8>, Vec<OwnedFd>)>> {
    match recv_bytes(socket, buffer, RecvFlags::DONTWAIT) {
        Ok((0, _)) => Err(io::ErrorKind::UnexpectedEof.into()),
        Ok((length, files)) => Ok(Some((buffer[..length].to_vec(), files))),
        // It closed without reading all: what it sent can still be received.
        Err(error) if error.kind() == io::ErrorKind::ConnectionReset => Ok(None),
        Err(error) => would_block(error).map(|()| None),
    }
}

/// Whether it was sent now.
///
/// # Errors
/// When the other side has closed.
fn send(socket: &OwnedFd, (bytes, file): &Packet) -> io::Result<bool> {
    let files: Vec<_> = file.iter().map(AsFd::as_fd).collect();
    match send_bytes(socket, bytes, &files, SendFlags::DONTWAIT) {
        Ok(()) => Ok(true),
        Err(error) => would_block(error).map(|()| false),
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
    let Ok(own) = fstat(file) else {
        return false;
    };
    match FileType::from_raw_mode(own.st_mode) {
        FileType::CharacterDevice => {
            let uvm = || stat(UVM).is_ok_and(|uvm| major(uvm.st_rdev) == major(own.st_rdev));
            major(own.st_rdev) == NVIDIA || uvm()
        }
        FileType::RegularFile => fcntl_get_seals(file).is_ok(),
        FileType::Socket => emulated.is_some_and(|server| leads_to(file, server).is_ok()),
        _ => false,
    }
}
