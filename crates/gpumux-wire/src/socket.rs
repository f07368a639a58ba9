//! Packets with files over `SOCK_SEQPACKET` sockets.

use std::{
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
};

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use serde::{Serialize, de::DeserializeOwned};

use crate::message::{MAX_PACKET, decode, encode};

/// Connects to a session socket. The socket is closed on exec.
///
/// # Errors
/// When no process listens there.
pub fn connect(path: &Path, flags: SocketFlags) -> io::Result<OwnedFd> {
    connect_to(&SocketAddrUnix::new(path)?, flags)
}

/// Connects to the abstract socket of this name.
///
/// # Errors
/// When no process listens there.
pub fn connect_abstract(name: &[u8], flags: SocketFlags) -> io::Result<OwnedFd> {
    connect_to(&SocketAddrUnix::new_abstract_name(name)?, flags)
}

fn connect_to(address: &SocketAddrUnix, flags: SocketFlags) -> io::Result<OwnedFd> {
    let socket = new(flags)?;
    rustix::net::connect(&socket, address)?;
    Ok(socket)
}

fn new(flags: SocketFlags) -> io::Result<OwnedFd> {
    let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    let flags = flags | SocketFlags::CLOEXEC;
    Ok(rustix::net::socket_with(family, kind, flags, None)?)
}

/// Listens on a session socket.
///
/// # Errors
/// When the path cannot be bound.
pub fn listen(path: &Path, backlog: i32) -> io::Result<OwnedFd> {
    let socket = new(SocketFlags::NONBLOCK)?;
    listen_on(socket, &SocketAddrUnix::new(path)?, backlog)
}

/// Listens on an abstract socket of this name; a call that accepts waits.
///
/// # Errors
/// When the name is taken.
pub fn listen_abstract(name: &[u8], backlog: i32) -> io::Result<OwnedFd> {
    let socket = new(SocketFlags::empty())?;
    listen_on(socket, &SocketAddrUnix::new_abstract_name(name)?, backlog)
}

fn listen_on(socket: OwnedFd, address: &SocketAddrUnix, backlog: i32) -> io::Result<OwnedFd> {
    rustix::net::bind(&socket, address)?;
    rustix::net::listen(&socket, backlog)?;
    Ok(socket)
}

/// Most files of a packet that are looked at: the kernel allows no more (`SCM_MAX_FD`, unix(7)).
const MAX_FILES: usize = 253;

/// Sends a packet, with a file if there is one. Never raises `SIGPIPE`.
///
/// # Errors
/// When the other side is gone, or the packet too long.
pub fn send(
    socket: impl AsFd,
    message: &impl Serialize,
    file: Option<BorrowedFd<'_>>,
    flags: SendFlags,
) -> io::Result<()> {
    let bytes =
        encode(message).map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
    send_bytes(socket, &bytes, file.as_slice(), flags)
}

/// Sends a packet that is encoded already, with at most two files. Never raises `SIGPIPE`.
///
/// # Errors
/// When the other side is gone, or the packet too long.
pub fn send_bytes(
    socket: impl AsFd,
    bytes: &[u8],
    files: &[BorrowedFd<'_>],
    flags: SendFlags,
) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(files)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    rustix::net::sendmsg(
        socket,
        &[IoSlice::new(bytes)],
        &mut ancillary,
        flags | SendFlags::NOSIGNAL,
    )?;
    Ok(())
}

/// Receives one packet and at most one file; further files are closed. `None`: the other side
/// has closed.
///
/// # Errors
/// [`io::ErrorKind::InvalidData`] for a packet that cannot be understood; other kinds as the
/// socket reports them.
pub fn recv<T: DeserializeOwned>(
    socket: impl AsFd,
    flags: RecvFlags,
) -> io::Result<Option<(T, Option<OwnedFd>)>> {
    let mut bytes = [0; MAX_PACKET + 1];
    let (length, files) = recv_bytes(socket, &mut bytes, flags)?;
    match length {
        0 => Ok(None),
        _ if length > MAX_PACKET => Err(io::ErrorKind::InvalidData.into()),
        _ => {
            let message = decode(&bytes[..length])
                .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
            Ok(Some((message, files.into_iter().next())))
        }
    }
}

/// Receives one packet as it is, and all its files; length 0: the other side has closed. Of a longer packet the rest is lost.
///
/// # Errors
/// As the socket reports them.
pub fn recv_bytes(
    socket: impl AsFd,
    bytes: &mut [u8],
    flags: RecvFlags,
) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FILES))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received = rustix::net::recvmsg(
        socket,
        &mut [IoSliceMut::new(bytes)],
        &mut ancillary,
        flags | RecvFlags::CMSG_CLOEXEC,
    )?;
    let mut files = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = message {
            files.extend(received);
        }
    }
    Ok((received.bytes, files))
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use rustix::net::socketpair;

    use super::*;
    use crate::message::{PROTOCOL, Shim};

    #[test]
    fn a_packet_arrives_with_its_file() {
        let (a, b) = socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .unwrap();
        let hello = Shim::Hello {
            protocol: PROTOCOL,
            version: "1".into(),
            tenant: None,
        };
        let file = std::fs::File::open("/dev/zero").unwrap();
        send(&a, &hello, Some(file.as_fd()), SendFlags::empty()).unwrap();
        let (message, file) = recv::<Shim>(&b, RecvFlags::empty()).unwrap().unwrap();
        assert_eq!(message, hello);
        let mut byte = [1];
        std::fs::File::from(file.unwrap())
            .read_exact(&mut byte)
            .unwrap();
        assert_eq!(byte, [0]);
        drop(a);
        assert!(recv::<Shim>(&b, RecvFlags::empty()).unwrap().is_none());
    }

    #[test]
    fn a_packet_that_is_too_long_is_refused() {
        let (a, b) = socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .unwrap();
        rustix::net::send(&a, &[0; MAX_PACKET + 1], SendFlags::empty()).unwrap();
        let error = recv::<Shim>(&b, RecvFlags::empty()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }
}
