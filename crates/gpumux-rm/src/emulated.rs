//! The emulated driver: the same calls, as packets to the emulated device's server.
//!
//! An emulated control file is a connected `SOCK_SEQPACKET` socket. Each call is one packet that carries
//! the sending end of a fresh socket pair for its answer, so that several processes may
//! share the open file description, as they may with `/dev/nvidiactl`. The server takes the connection's
//! last close as the file's last close.

use std::{
    io::{self, IoSlice, IoSliceMut},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::Duration,
};

use rustix::{
    event::{PollFd, PollFlags, poll},
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
        SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
    },
};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

use crate::{
    ControlError, ControlFile, RmStatus,
    layout::{Control, escape},
};

/// First word of every request and answer.
pub const MAGIC: u32 = 0x31_4d_52_47; // "GRM1"

/// Largest structure and largest parameters, in bytes.
pub const MAX_BYTES: usize = 16 * 1024;

/// How long a caller waits for the server.
pub const TIMEOUT: Duration = Duration::from_secs(10);

/// Head of a request: followed by `arg_len` bytes of the escape's structure and `params_len`
/// bytes of what its parameter pointer points to.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct RequestHead {
    /// [`MAGIC`].
    pub magic: u32,
    /// Escape number.
    pub escape: u32,
    /// Bytes of the structure.
    pub arg_len: u32,
    /// Bytes of the parameters.
    pub params_len: u32,
}

/// Head of an answer: followed by structure and parameters, as long as in the request.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct AnswerHead {
    /// [`MAGIC`].
    pub magic: u32,
    /// 0, or the errno of the ioctl itself.
    pub errno: u32,
}

/// Sends one escape over an emulated control file; `arg` and `params` are written back.
///
/// # Errors
/// When the server is gone, does not answer in [`TIMEOUT`], or answers with an errno.
pub fn call(file: BorrowedFd<'_>, escape: u8, arg: &mut [u8], params: &mut [u8]) -> io::Result<()> {
    if arg.len() > MAX_BYTES || params.len() > MAX_BYTES {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let (mine, theirs) = socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )?;
    let head = RequestHead {
        magic: MAGIC,
        escape: escape.into(),
        arg_len: arg.len() as u32,
        params_len: params.len() as u32,
    };
    let fds = [theirs.as_fd()];
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    ancillary.push(SendAncillaryMessage::ScmRights(&fds));
    sendmsg(
        file,
        &[
            IoSlice::new(head.as_bytes()),
            IoSlice::new(arg),
            IoSlice::new(params),
        ],
        &mut ancillary,
        SendFlags::NOSIGNAL,
    )?;
    drop(theirs);
    wait_readable(mine.as_fd())?;
    let mut answer = AnswerHead::new_zeroed();
    let expected = size_of::<AnswerHead>() + arg.len() + params.len();
    let received = recvmsg(
        &mine,
        &mut [
            IoSliceMut::new(answer.as_mut_bytes()),
            IoSliceMut::new(arg),
            IoSliceMut::new(params),
        ],
        &mut RecvAncillaryBuffer::default(),
        RecvFlags::empty(),
    )?;
    match (received.bytes, answer.errno) {
        (n, 0) if n == expected && answer.magic == MAGIC => Ok(()),
        (n, errno) if n >= size_of::<AnswerHead>() && answer.magic == MAGIC && errno != 0 => {
            Err(io::Error::from_raw_os_error(errno as i32))
        }
        // The server closed the answer's socket: it is gone, or refused the request.
        (0, _) => Err(io::ErrorKind::ConnectionReset.into()),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

fn wait_readable(fd: BorrowedFd<'_>) -> io::Result<()> {
    let timeout = rustix::event::Timespec {
        tv_sec: TIMEOUT.as_secs() as i64,
        tv_nsec: 0,
    };
    loop {
        match poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&timeout)) {
            Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
            Ok(_) => return Ok(()),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// A control file of the emulated device.
#[derive(Debug)]
pub struct EmulatedFile(OwnedFd);

impl EmulatedFile {
    /// Takes a file that a peer sent. Whether it leads to the emulated device that the caller
    /// means is for the caller to check; one that never answers costs [`TIMEOUT`].
    ///
    /// # Errors
    /// When it is not a socket.
    pub fn new(fd: OwnedFd) -> io::Result<Self> {
        match rustix::net::sockopt::socket_type(&fd) {
            Ok(SocketType::SEQPACKET) => Ok(Self(fd)),
            _ => Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "the file is not a control file of the emulated device",
            )),
        }
    }
}

impl ControlFile for EmulatedFile {
    fn control(
        &self,
        client: u32,
        object: u32,
        cmd: u32,
        params: &mut [u8],
    ) -> Result<(), ControlError> {
        let mut arg = Control {
            client,
            object,
            cmd,
            params_size: params.len() as u32,
            ..Default::default()
        };
        call(self.0.as_fd(), escape::CONTROL, arg.as_mut_bytes(), params)?;
        match RmStatus(arg.status) {
            RmStatus::OK => Ok(()),
            status => Err(ControlError::Status(status)),
        }
    }
}
