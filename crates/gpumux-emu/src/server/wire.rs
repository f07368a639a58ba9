//! Packets in and out, never waiting.

use std::{
    io::{IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, OwnedFd},
};

use rustix::{
    io::Errno,
    net::{
        RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
        SendAncillaryMessage, SendFlags, UCred, recvmsg, sendmsg,
    },
    time::{ClockId, clock_gettime},
};

/// What a socket has.
pub(super) enum Incoming<'a> {
    /// Nothing now.
    Nothing,
    /// It was closed, or is of no use.
    End,
    Packet(Packet<'a>),
}

/// One packet.
pub(super) struct Packet<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) files: Vec<OwnedFd>,
    /// The sender, by the kernel's report.
    pub(super) sender: Option<UCred>,
}

/// `CLOCK_MONOTONIC` in ns.
pub(crate) fn now() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Reads one packet.
pub(super) fn receive<'a>(socket: &OwnedFd, buffer: &'a mut [u8]) -> Incoming<'a> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4), ScmCredentials(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let received = loop {
        match recvmsg(
            socket,
            &mut [IoSliceMut::new(buffer)],
            &mut ancillary,
            flags,
        ) {
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Incoming::Nothing,
            Err(_) => return Incoming::End,
            Ok(received) => break received,
        }
    };
    let (mut files, mut sender) = (Vec::new(), None);
    for message in ancillary.drain() {
        match message {
            RecvAncillaryMessage::ScmRights(rights) => files.extend(rights),
            RecvAncillaryMessage::ScmCredentials(credentials) => sender = Some(credentials),
            _ => {}
        }
    }
    let cut = received.flags.contains(ReturnFlags::TRUNC);
    if received.bytes == 0 || cut {
        return Incoming::End;
    }
    Incoming::Packet(Packet {
        bytes: &buffer[..received.bytes],
        files,
        sender,
    })
}

/// Sends one packet with at most one file.
pub(super) fn send(socket: &OwnedFd, bytes: &[u8], file: Option<&OwnedFd>) -> Result<(), Errno> {
    let files: Vec<_> = file.into_iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() {
        ancillary.push(SendAncillaryMessage::ScmRights(&files));
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    sendmsg(socket, &[IoSlice::new(bytes)], &mut ancillary, flags)?;
    Ok(())
}

/// Answers on a socket that a client passed for one answer. Whether it arrives is their concern.
pub(super) fn send_once(socket: &OwnedFd, bytes: &[u8]) {
    let _ = send(socket, bytes, None);
}
