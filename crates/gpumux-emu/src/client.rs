//! A program's side of the connections.

use std::{
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
    time::Duration,
};

use gpumux_rm::{
    RmStatus,
    emulated::{AnswerHead, MAGIC, RequestHead},
};
use rustix::{
    event::{PollFd, PollFlags, poll},
    io::Errno,
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
        SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recvmsg,
        sendmsg, socket_with, socketpair,
    },
};
use serde::de::DeserializeOwned;
use zerocopy::{FromZeros, IntoBytes};

use crate::protocol::{
    self, Answer, Command, DeviceInfo, DeviceStatus, GpuInstance, HELLO, MAX_PACKET,
    OPEN_EXECUTION, OpenExecution, Refusal, Report, Request,
};

/// How long a program waits for an answer.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Why a call to the server failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The server is gone, or never was there.
    #[error("the emulated device does not answer: {0}")]
    Lost(#[from] io::Error),
    /// The server refuses.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// RM refuses.
    #[error("the emulated driver refused: {0}")]
    Rm(RmStatus),
}

impl From<io::ErrorKind> for ClientError {
    fn from(kind: io::ErrorKind) -> Self {
        Self::Lost(kind.into())
    }
}

impl From<Errno> for ClientError {
    fn from(error: Errno) -> Self {
        Self::Lost(error.into())
    }
}

fn odd_answer() -> ClientError {
    io::ErrorKind::InvalidData.into()
}

/// `CLOCK_MONOTONIC` in ns: the time that submissions carry.
pub fn now() -> u64 {
    crate::server::now()
}

/// Connects to the server: what opening a device file is on the emulated device.
///
/// # Errors
/// When no server listens there.
pub fn open_control_file(path: &Path) -> io::Result<OwnedFd> {
    let socket = socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

/// Whether `fd` is connected to the server that listens on `path`.
pub fn is_control_file(fd: BorrowedFd<'_>, path: &Path) -> bool {
    let Ok(address) = SocketAddrUnix::new(path) else {
        return false;
    };
    rustix::net::getpeername(fd)
        .ok()
        .flatten()
        .and_then(|peer| SocketAddrUnix::try_from(peer).ok())
        .is_some_and(|peer| peer == address)
}

/// A file that keeps memory of this process's, with its `file`, for as long as any process has it open.
///
/// # Errors
/// [`Refusal::Unknown`] when this process has no share in such memory, or when the server is gone.
pub fn export_memory(path: &Path, id: u64, file: BorrowedFd<'_>) -> Result<OwnedFd, ClientError> {
    let socket = open_control_file(path)?;
    let request = Request::ExportMemory { magic: HELLO, id };
    // The server finds the memory by the file on this side.
    send(&socket, &request, &[socket.as_fd(), file])?;
    wait_readable(socket.as_fd(), TIMEOUT)?;
    match receive(&socket)?.ok_or(io::ErrorKind::ConnectionReset)? {
        (Answer::Ok, _) => Ok(socket),
        (Answer::Refused(refusal), _) => Err(refusal.into()),
        _ => Err(odd_answer()),
    }
}

/// A process connection. Calls must not overlap: keep it in a lock.
#[derive(Debug)]
pub struct ProcessConnection {
    socket: OwnedFd,
}

impl ProcessConnection {
    /// Connects and says hello.
    ///
    /// # Errors
    /// When no server listens there, or one of another version.
    pub fn open(path: &Path) -> Result<Self, ClientError> {
        let this = Self {
            socket: open_control_file(path)?,
        };
        let hello = Request::Hello {
            magic: HELLO,
            version: protocol::VERSION,
        };
        this.ask(&hello, None)?;
        Ok(this)
    }

    /// All devices.
    ///
    /// # Errors
    /// When the server is gone.
    pub fn devices(&self) -> Result<Vec<DeviceInfo>, ClientError> {
        match self.ask(&Request::Devices, None)? {
            (Answer::Devices(devices), _) => Ok(devices),
            _ => Err(odd_answer()),
        }
    }

    /// Creates memory: its id and file.
    ///
    /// # Errors
    /// [`Refusal::OutOfMemory`], or when the server is gone.
    pub fn create_memory(&self, device: u32, bytes: u64) -> Result<(u64, OwnedFd), ClientError> {
        match self.ask(&Request::CreateMemory { device, bytes }, None)? {
            (Answer::Memory { id, .. }, Some(file)) => Ok((id, file)),
            _ => Err(odd_answer()),
        }
    }

    /// Takes a share in memory that a peer passed on, or exported: its id, device and size, and its file.
    ///
    /// # Errors
    /// [`Refusal::Unknown`] for a file that is no live memory of this server.
    pub fn import_memory(
        &self,
        file: BorrowedFd<'_>,
    ) -> Result<(u64, u32, u64, OwnedFd), ClientError> {
        match self.ask(&Request::ImportMemory, Some(file))? {
            (Answer::Memory { id, device, bytes }, found) => {
                let found = found.map_or_else(|| file.try_clone_to_owned(), Ok)?;
                Ok((id, device, bytes, found))
            }
            _ => Err(odd_answer()),
        }
    }

    /// Gives a share up.
    ///
    /// # Errors
    /// When this process has none, or the server is gone.
    pub fn free_memory(&self, id: u64) -> Result<(), ClientError> {
        self.ask(&Request::FreeMemory { id }, None).map(|_| ())
    }

    /// A device's state.
    ///
    /// # Errors
    /// When there is no such device, or the server is gone.
    pub fn status(&self, device: u32) -> Result<DeviceStatus, ClientError> {
        match self.ask(&Request::Status { device }, None)? {
            (Answer::Status(status), _) => Ok(status),
            _ => Err(odd_answer()),
        }
    }

    /// The GPU instances of a GPU in MIG mode.
    ///
    /// # Errors
    /// [`Refusal::Unknown`] for another device, or when the server is gone.
    pub fn gpu_instances(&self, gpu: u32) -> Result<Vec<GpuInstance>, ClientError> {
        match self.ask(&Request::GpuInstances { gpu }, None)? {
            (Answer::GpuInstances(all), _) => Ok(all),
            _ => Err(odd_answer()),
        }
    }

    /// Makes a GPU instance of the profile that the driver numbers so.
    ///
    /// # Errors
    /// [`Refusal::NoRoom`], [`Refusal::Unknown`], or when the server is gone.
    pub fn make_gpu_instance(
        &self,
        gpu: u32,
        profile: u32,
        start: u32,
    ) -> Result<GpuInstance, ClientError> {
        let request = Request::MakeGpuInstance {
            gpu,
            profile,
            start,
        };
        match self.ask(&request, None)? {
            (Answer::GpuInstances(made), _) => made.first().copied().ok_or_else(odd_answer),
            _ => Err(odd_answer()),
        }
    }

    /// Makes the compute instance that has all of a GPU instance.
    ///
    /// # Errors
    /// [`Refusal::NoRoom`] if there is one, [`Refusal::Unknown`], or when the server is gone.
    pub fn make_compute_instance(&self, gpu: u32, id: u32) -> Result<(), ClientError> {
        let request = Request::MakeComputeInstance { gpu, id };
        self.ask(&request, None).map(drop)
    }

    /// Ends a compute instance.
    ///
    /// # Errors
    /// [`Refusal::InUse`], [`Refusal::Unknown`], or when the server is gone.
    pub fn end_compute_instance(&self, gpu: u32, id: u32) -> Result<(), ClientError> {
        let request = Request::EndComputeInstance { gpu, id };
        self.ask(&request, None).map(drop)
    }

    /// Ends a GPU instance.
    ///
    /// # Errors
    /// [`Refusal::InUse`] while it has a compute instance, [`Refusal::Unknown`], or when the server is gone.
    pub fn end_gpu_instance(&self, gpu: u32, id: u32) -> Result<(), ClientError> {
        self.ask(&Request::EndGpuInstance { gpu, id }, None)
            .map(drop)
    }

    fn ask(
        &self,
        request: &Request,
        file: Option<BorrowedFd<'_>>,
    ) -> Result<(Answer, Option<OwnedFd>), ClientError> {
        let exchange = || {
            send(&self.socket, request, file.as_slice())?;
            wait_readable(self.socket.as_fd(), TIMEOUT)?;
            Ok::<_, ClientError>(receive(&self.socket)?.ok_or(io::ErrorKind::ConnectionReset)?)
        };
        match exchange() {
            Ok((Answer::Refused(refusal), _)) => Err(refusal.into()),
            Ok(answer) => Ok(answer),
            Err(error) => {
                // An answer that comes too late must not be taken for the next one's.
                let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
                Err(error)
            }
        }
    }
}

/// An execution connection: commands may come from any thread that keeps them in order, one thread
/// reads the reports.
#[derive(Debug)]
pub struct Execution {
    socket: OwnedFd,
}

impl Execution {
    /// Opens it through the control file that made the context's groups.
    ///
    /// # Errors
    /// [`ClientError::Rm`] when the groups are not that file's, or memory is short.
    pub fn open(
        control: BorrowedFd<'_>,
        client: u32,
        compute: u32,
        host_to_device: u32,
        device_to_host: u32,
    ) -> Result<Self, ClientError> {
        Self::open_confined(
            control,
            client,
            [compute, host_to_device, device_to_host],
            0,
        )
    }

    /// The same for work whose kernels may use so many SMs together; 0: all.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_confined(
        control: BorrowedFd<'_>,
        client: u32,
        [compute, host_to_device, device_to_host]: [u32; 3],
        sms: u32,
    ) -> Result<Self, ClientError> {
        let (mine, theirs) = socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )?;
        let mut open = OpenExecution {
            client,
            compute,
            host_to_device,
            device_to_host,
            sms,
            status: 0,
        };
        let head = RequestHead {
            magic: MAGIC,
            escape: OPEN_EXECUTION.into(),
            arg_len: size_of::<OpenExecution>() as u32,
            params_len: 0,
        };
        let bytes = [head.as_bytes(), open.as_bytes()].concat();
        send_bytes(control, &bytes, &[theirs.as_fd()])?;
        drop(theirs);
        wait_readable(mine.as_fd(), TIMEOUT)?;
        let mut answer = AnswerHead::new_zeroed();
        let received = recvmsg(
            &mine,
            &mut [
                IoSliceMut::new(answer.as_mut_bytes()),
                IoSliceMut::new(open.as_mut_bytes()),
            ],
            &mut RecvAncillaryBuffer::default(),
            RecvFlags::empty(),
        )?;
        let expected = size_of::<AnswerHead>() + size_of::<OpenExecution>();
        if received.bytes != expected || answer.errno != 0 {
            return Err(odd_answer());
        }
        match RmStatus(open.status) {
            RmStatus::OK => Ok(Self { socket: mine }),
            status => Err(ClientError::Rm(status)),
        }
    }

    /// Sends a command; waits while the server is behind.
    ///
    /// # Errors
    /// When the server is gone.
    pub fn send(&self, command: &Command) -> Result<(), ClientError> {
        send(&self.socket, command, &[])
    }

    /// Waits for the next report; `None` when the server is gone.
    ///
    /// # Errors
    /// When the server sends what is none.
    pub fn receive(&self) -> Result<Option<Report>, ClientError> {
        Ok(receive(&self.socket)?.map(|(report, _)| report))
    }

    /// Ends the connection from another thread: [`Self::receive`] returns.
    pub fn shut_down(&self) {
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
    }
}

fn send(
    socket: &OwnedFd,
    message: &impl serde::Serialize,
    files: &[BorrowedFd<'_>],
) -> Result<(), ClientError> {
    let bytes = protocol::encode(message).ok_or(io::ErrorKind::InvalidInput)?;
    send_bytes(socket.as_fd(), &bytes, files)
}

fn send_bytes(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    files: &[BorrowedFd<'_>],
) -> Result<(), ClientError> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() {
        ancillary.push(SendAncillaryMessage::ScmRights(files));
    }
    loop {
        match sendmsg(
            socket,
            &[IoSlice::new(bytes)],
            &mut ancillary,
            SendFlags::NOSIGNAL,
        ) {
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
            Ok(_) => return Ok(()),
        }
    }
}

/// A message and the file that came with it; `None` at the end.
fn receive<T: DeserializeOwned>(
    socket: &OwnedFd,
) -> Result<Option<(T, Option<OwnedFd>)>, ClientError> {
    let mut buffer = vec![0; MAX_PACKET];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        match recvmsg(
            socket,
            &mut [IoSliceMut::new(&mut buffer)],
            &mut ancillary,
            RecvFlags::CMSG_CLOEXEC,
        ) {
            Err(Errno::INTR) => {}
            Err(Errno::CONNRESET) => return Ok(None),
            Err(error) => return Err(error.into()),
            Ok(received) => break received,
        }
    };
    if received.bytes == 0 {
        return Ok(None);
    }
    let file = ancillary.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut files) => files.next(),
        _ => None,
    });
    let message = protocol::decode(&buffer[..received.bytes]).ok_or_else(odd_answer)?;
    Ok(Some((message, file)))
}

fn wait_readable(fd: BorrowedFd<'_>, timeout: Duration) -> io::Result<()> {
    let timeout = rustix::event::Timespec {
        tv_sec: timeout.as_secs() as i64,
        tv_nsec: timeout.subsec_nanos().into(),
    };
    loop {
        match poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&timeout)) {
            Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}
