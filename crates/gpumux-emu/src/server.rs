//! The server: one thread that plays the devices for all programs.
//!
//! It sleeps until a packet comes or until the model says that something may happen, and then brings the
//! model to the present. Late waking does not distort the model: events have their exact times,
//! and a submission counts from the moment at which the program made it.
//!
//! No peer can hold it up: nothing here blocks on a socket, everything that a peer can make it keep has a bound, and
//! whoever breaks the rules loses the connection.

mod device;
mod rm;
#[cfg(test)]
mod tests;
mod wire;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    io,
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
    sync::Arc,
    thread::JoinHandle,
};

use gpumux_rm::{RmStatus, emulated};
use gpumux_sim::gpu::{self, Engine, EventKind, GroupId, StreamId, WorkId};
use rustix::{
    event::{EventfdFlags, epoll, eventfd},
    fs::{MemfdFlags, SealFlags},
    io::Errno,
    net::{
        AddressFamily, SocketAddrUnix, SocketFlags, SocketType, UCred, accept_with, bind, connect,
        listen, socket_with, sockopt,
    },
    time::{
        Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
        timerfd_settime,
    },
};
use zerocopy::{FromBytes, IntoBytes};

use crate::{
    Profile,
    profile::ProfileError,
    protocol::{
        self, Answer, Command, HELLO, MAX_LIVE, MAX_SUBMISSIONS, OPEN_EXECUTION, OpenExecution,
        Queue, Refusal, Report, Request, Work,
    },
};
use device::{Device, Devices};
use rm::{Caller, GroupKey, Lever, Tree};
pub(crate) use wire::now;
use wire::{Incoming, Packet, receive};

const LISTENER: u64 = 0;
const TIMER: u64 = 1;
const STOP: u64 = 2;
const FIRST_CONNECTION: u64 = 16;

/// Packets read from one connection before the others have their turn.
const BURST: usize = 64;
/// Controls of one file that are under way; programs wait for each.
const MAX_PENDING: usize = 256;
/// Packets that a peer may leave unread.
const MAX_UNREAD: usize = 1024;
/// Reports are sent together up to this many.
const MAX_BATCH: usize = 256;
/// How long a freeze waits until a program has brought its effects up to date.
const PROGRESS_TIMEOUT: u64 = 500_000_000;
/// How long no connection is accepted when files have run out.
const ACCEPT_PAUSE: u64 = 100_000_000;

/// Why the emulated device cannot start or go on.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The profile makes no sense.
    #[error(transparent)]
    Profile(#[from] ProfileError),
    /// Another server is there.
    #[error("an emulated device already listens on {0}: stop it or choose another socket")]
    InUse(PathBuf),
    /// The socket cannot be made.
    #[error("cannot listen on {path}: {source}")]
    Listen {
        /// Where.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The system refused something else.
    #[error("the emulated device's server failed: {0}")]
    Io(#[from] io::Error),
}

impl From<Errno> for ServerError {
    fn from(error: Errno) -> Self {
        Self::Io(error.into())
    }
}

/// A device that listens and does not run yet.
pub struct Server {
    core: Core,
    stop: Arc<OwnedFd>,
    socket: SocketFile,
}

/// Removes the socket's file.
struct SocketFile(PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// A running device; dropping it stops it.
pub struct ServerHandle {
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<Result<(), ServerError>>>,
}

impl ServerHandle {
    /// Stops it and waits.
    ///
    /// # Errors
    /// What made it fail before.
    pub fn stop(mut self) -> Result<(), ServerError> {
        signal(&self.stop);
        match self.thread.take().map(JoinHandle::join) {
            Some(Ok(result)) => result,
            Some(Err(_)) => Err(io::Error::other("the server panicked").into()),
            None => Ok(()),
        }
    }
}

impl Drop for ServerHandle {
    fn drop(&mut self) {
        signal(&self.stop);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn signal(stop: &OwnedFd) {
    let _ = rustix::io::write(stop, &1u64.to_ne_bytes());
}

impl Server {
    /// Listens on `path`; programs can connect from now on and are served once it runs.
    ///
    /// # Errors
    /// When the profile makes no sense, another server listens there, or the system refuses.
    pub fn bind(profile: Profile, path: &Path) -> Result<Self, ServerError> {
        profile.check()?;
        let listener = listen_on(path)?;
        let socket = SocketFile(path.to_owned());
        raise_file_limit();
        let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let timer = timerfd_create(
            TimerfdClockId::Monotonic,
            TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK,
        )?;
        let poll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        for (fd, token) in [
            (listener.as_fd(), LISTENER),
            (timer.as_fd(), TIMER),
            (stop.as_fd(), STOP),
        ] {
            let data = epoll::EventData::new_u64(token);
            epoll::add(&poll, fd, data, epoll::EventFlags::IN)?;
        }
        Ok(Self {
            core: Core {
                devices: Devices::new(profile, now()),
                tree: Tree::default(),
                poll,
                listener,
                timer,
                armed: None,
                connections: HashMap::new(),
                next_connection: FIRST_CONNECTION,
                timers: BTreeMap::new(),
                next_timer: 0,
                freezes: HashMap::new(),
                next_token: 0,
                memory: HashMap::new(),
                files: HashMap::new(),
                next_memory: 0,
                processes: HashMap::new(),
                random: 0x2545_f491_4f6c_dd1d,
            },
            stop,
            socket,
        })
    }

    /// Serves until the process ends.
    ///
    /// # Errors
    /// When the system refuses what the server needs.
    pub fn run(mut self) -> Result<(), ServerError> {
        self.core.run()
    }

    /// Serves on a thread of its own.
    ///
    /// # Errors
    /// When no thread can be started.
    pub fn spawn(self) -> Result<ServerHandle, ServerError> {
        let stop = Arc::clone(&self.stop);
        let Self {
            mut core, socket, ..
        } = self;
        let thread = std::thread::Builder::new()
            .name("emulated-gpu".into())
            .spawn(move || {
                let _socket = socket;
                core.run()
            })?;
        Ok(ServerHandle {
            stop,
            thread: Some(thread),
        })
    }

    /// Where programs connect.
    pub fn path(&self) -> &Path {
        &self.socket.0
    }
}

fn listen_on(path: &Path) -> Result<OwnedFd, ServerError> {
    let failed = |error: Errno| ServerError::Listen {
        path: path.to_owned(),
        source: error.into(),
    };
    let address = SocketAddrUnix::new(path).map_err(failed)?;
    let open = || {
        socket_with(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
            None,
        )
    };
    let listener = open().map_err(failed)?;
    match bind(&listener, &address) {
        Ok(()) => {}
        Err(Errno::ADDRINUSE) => {
            // A file that nobody listens on is left over from a server that was killed.
            match connect(&open().map_err(failed)?, &address) {
                Err(Errno::CONNREFUSED) if is_socket(path) => {}
                Err(_) => return Err(failed(Errno::ADDRINUSE)),
                Ok(()) => return Err(ServerError::InUse(path.to_owned())),
            }
            std::fs::remove_file(path).map_err(|source| ServerError::Listen {
                path: path.to_owned(),
                source,
            })?;
            bind(&listener, &address).map_err(failed)?;
        }
        Err(error) => return Err(failed(error)),
    }
    listen(&listener, 1024).map_err(failed)?;
    Ok(listener)
}

fn is_socket(path: &Path) -> bool {
    use std::os::unix::fs::FileTypeExt;
    std::fs::symlink_metadata(path).is_ok_and(|data| data.file_type().is_socket())
}

/// Every connection is a file, and control files carry further ones.
fn raise_file_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(
        Resource::Nofile,
        Rlimit {
            current: limit.maximum,
            ..limit
        },
    );
}

struct Connection {
    socket: OwnedFd,
    /// Who opened it: owner of its memory.
    pid: u32,
    role: Role,
    /// What could not be sent yet.
    unsent: VecDeque<(Vec<u8>, Option<OwnedFd>)>,
    /// We wait until more can be sent.
    stuck: bool,
}

enum Role {
    /// Nothing came yet: a control file, or a process connection before its hello.
    Unknown,
    /// `/dev/nvidiactl`, with the number of calls under way.
    Control(usize),
    Process,
    Execution(Box<Execution>),
}

/// One context's work.
struct Execution {
    device: u32,
    keys: [GroupKey; 3],
    groups: [GroupId; 3],
    streams: HashMap<u64, StreamId>,
    /// Streams to remove when they are idle.
    ending: BTreeSet<StreamId>,
    /// The client's work numbers.
    works: HashMap<u64, WorkId>,
    /// Not reported yet.
    done: Vec<(u64, u64)>,
}

enum Action {
    /// A control whose time is over.
    Control(Call),
    /// A freeze that waits for programs waits no longer.
    FreezeTimeout(u64),
    /// Accept again.
    Accept,
}

/// An RM call on its way.
struct Call {
    caller: Caller,
    escape: u32,
    arg: Vec<u8>,
    params: Vec<u8>,
    reply: OwnedFd,
}

/// A freeze that is done but for the effects of interrupted kernels.
struct Freeze {
    waiting: BTreeSet<u64>,
    answer: Vec<u8>,
    reply: OwnedFd,
}

struct Memory {
    device: u32,
    bytes: u64,
    shares: u64,
    file: (u64, u64),
}

#[derive(Default)]
struct Process {
    connections: usize,
    /// Shares in memory.
    shares: HashMap<u64, u64>,
    /// Contexts per device.
    contexts: BTreeMap<u32, u64>,
}

struct Core {
    devices: Devices,
    tree: Tree,
    poll: OwnedFd,
    listener: OwnedFd,
    timer: OwnedFd,
    armed: Option<u64>,
    connections: HashMap<u64, Connection>,
    next_connection: u64,
    timers: BTreeMap<(u64, u64), Action>,
    next_timer: u64,
    freezes: HashMap<u64, Freeze>,
    next_token: u64,
    memory: HashMap<u64, Memory>,
    /// Memory by device and inode of its file.
    files: HashMap<(u64, u64), u64>,
    next_memory: u64,
    processes: HashMap<u32, Process>,
    random: u64,
}

impl Core {
    fn run(&mut self) -> Result<(), ServerError> {
        let mut ready = Vec::with_capacity(256);
        let mut buffer = vec![0; protocol::MAX_PACKET];
        loop {
            self.arm()?;
            ready.clear();
            match epoll::wait(&self.poll, rustix::buffer::spare_capacity(&mut ready), None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            for event in &ready {
                match event.data.u64() {
                    LISTENER => self.accept(),
                    TIMER => {
                        let _ = rustix::io::read(&self.timer, &mut [0; 8]);
                        self.armed = None;
                    }
                    STOP => return Ok(()),
                    id => self.serve(id, event.flags, &mut buffer),
                }
            }
            self.catch_up(now());
        }
    }

    /// Sets the timer to when something may happen next.
    fn arm(&mut self) -> io::Result<()> {
        let timer = self.timers.keys().next().map(|(due, _)| *due);
        let next = [timer, self.devices.next_event()]
            .into_iter()
            .flatten()
            .min();
        if next == self.armed {
            return Ok(());
        }
        self.armed = next;
        // 0 would disarm it.
        let at = next.map_or(0, |at| at.clamp(1, i64::MAX as u64));
        let value = Timespec {
            tv_sec: (at / 1_000_000_000) as i64,
            tv_nsec: (at % 1_000_000_000) as i64,
        };
        let spec = Itimerspec {
            it_interval: Timespec::default(),
            it_value: value,
        };
        timerfd_settime(&self.timer, TimerfdTimerFlags::ABSTIME, &spec)?;
        Ok(())
    }

    /// Brings everything to the present, in the order in which it was due.
    fn catch_up(&mut self, now: u64) {
        while let Some(entry) = self
            .timers
            .first_entry()
            .filter(|entry| entry.key().0 <= now)
        {
            let ((due, _), action) = entry.remove_entry();
            match action {
                Action::Control(call) => self.finish_control(call, due),
                Action::FreezeTimeout(token) => self.finish_freeze(token),
                Action::Accept => {
                    let data = epoll::EventData::new_u64(LISTENER);
                    let _ = epoll::modify(&self.poll, &self.listener, data, epoll::EventFlags::IN);
                }
            }
        }
        for device in &mut self.devices.all {
            device.advance(now);
        }
        self.dispatch();
    }

    fn after(&mut self, due: u64, action: Action) {
        self.next_timer += 1;
        self.timers.insert((due, self.next_timer), action);
    }

    fn accept(&mut self) {
        for _ in 0..BURST {
            match accept_with(&self.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(socket) => {
                    let _ = sockopt::set_socket_passcred(&socket, true);
                    let Ok(peer) = sockopt::socket_peercred(&socket) else {
                        continue;
                    };
                    self.add_connection(socket, pid(&peer), Role::Unknown);
                }
                Err(Errno::AGAIN) => return,
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(error) => {
                    tracing::warn!(%error, "cannot accept; pausing");
                    let data = epoll::EventData::new_u64(LISTENER);
                    let none = epoll::EventFlags::empty();
                    let _ = epoll::modify(&self.poll, &self.listener, data, none);
                    self.after(now() + ACCEPT_PAUSE, Action::Accept);
                    return;
                }
            }
        }
    }

    fn add_connection(&mut self, socket: OwnedFd, pid: u32, role: Role) -> Option<u64> {
        let id = self.next_connection;
        let data = epoll::EventData::new_u64(id);
        epoll::add(&self.poll, &socket, data, epoll::EventFlags::IN).ok()?;
        self.next_connection += 1;
        self.processes.entry(pid).or_default().connections += 1;
        self.connections.insert(
            id,
            Connection {
                socket,
                pid,
                role,
                unsent: VecDeque::new(),
                stuck: false,
            },
        );
        Some(id)
    }

    fn serve(&mut self, id: u64, flags: epoll::EventFlags, buffer: &mut [u8]) {
        if flags.contains(epoll::EventFlags::OUT) {
            self.send_rest(id);
        }
        for _ in 0..BURST {
            let Some(connection) = self.connections.get(&id) else {
                return;
            };
            match receive(&connection.socket, buffer) {
                Incoming::Nothing => return,
                Incoming::End => return self.close(id),
                Incoming::Packet(packet) => {
                    if self.packet(id, packet).is_none() {
                        tracing::debug!(connection = id, "closed for breaking the rules");
                        return self.close(id);
                    }
                }
            }
        }
    }

    /// Works off a packet; `None` when it breaks the rules.
    fn packet(&mut self, id: u64, packet: Packet<'_>) -> Option<()> {
        let connection = self.connections.get_mut(&id)?;
        match &mut connection.role {
            Role::Unknown if packet.bytes.get(..4) == Some(&emulated::MAGIC.to_ne_bytes()) => {
                connection.role = Role::Control(0);
                self.control(id, packet)
            }
            Role::Unknown => {
                match protocol::decode(packet.bytes)? {
                    Request::Hello {
                        magic: HELLO,
                        version,
                    } => {
                        connection.role = Role::Process;
                        let answer = if version == protocol::VERSION {
                            Answer::Ok
                        } else {
                            Answer::Refused(Refusal::Version)
                        };
                        self.send(id, &answer, None);
                    }
                    _ => return None,
                }
                Some(())
            }
            Role::Control(_) => self.control(id, packet),
            Role::Process => {
                let request = protocol::decode(packet.bytes)?;
                let (answer, file) = match self.request(id, request, packet.files) {
                    Ok(answer) => answer,
                    Err(refusal) => (Answer::Refused(refusal), None),
                };
                self.send(id, &answer, file);
                Some(())
            }
            Role::Execution(_) => {
                let command = protocol::decode(packet.bytes)?;
                self.command(id, command)
            }
        }
    }

    fn close(&mut self, id: u64) {
        let Some(connection) = self.connections.remove(&id) else {
            return;
        };
        let now = now();
        for device in &mut self.devices.all {
            device.advance(now);
        }
        match connection.role {
            Role::Control(_) => {
                self.tree.close(&mut self.devices, id);
                self.follow_levers();
            }
            Role::Execution(execution) => {
                if let Some(device) = self.devices.all.get_mut(execution.device as usize) {
                    drop_work(device, &execution);
                    for stream in execution.streams.values().chain(&execution.ending) {
                        let _ = device.gpu.remove_stream(*stream);
                    }
                }
                let bytes = self.devices.profile.context_memory;
                self.devices.give(execution.device, bytes);
                if let Some(process) = self.processes.get_mut(&connection.pid)
                    && let Some(contexts) = process.contexts.get_mut(&execution.device)
                {
                    *contexts -= 1;
                }
            }
            Role::Unknown | Role::Process => {}
        }
        let waited: Vec<u64> = self.freezes.keys().copied().collect();
        for token in waited {
            self.progressed(id, token);
        }
        self.leave(connection.pid);
    }

    /// A process has one connection less; with the last one its memory goes.
    fn leave(&mut self, pid: u32) {
        let Some(process) = self.processes.get_mut(&pid) else {
            return;
        };
        process.connections -= 1;
        if process.connections > 0 {
            return;
        }
        let process = self.processes.remove(&pid).unwrap_or_default();
        for (memory, shares) in process.shares {
            self.free_shares(memory, shares);
        }
    }

    fn free_shares(&mut self, id: u64, shares: u64) {
        let Some(memory) = self.memory.get_mut(&id) else {
            return;
        };
        memory.shares = memory.shares.saturating_sub(shares);
        if memory.shares == 0 {
            let (device, bytes, file) = (memory.device, memory.bytes, memory.file);
            self.devices.give(device, bytes);
            self.files.remove(&file);
            self.memory.remove(&id);
        }
    }

    // Process connections

    fn request(
        &mut self,
        id: u64,
        request: Request,
        files: Vec<OwnedFd>,
    ) -> Result<(Answer, Option<OwnedFd>), Refusal> {
        let pid = self.connections[&id].pid;
        match request {
            Request::Hello { .. } => Err(Refusal::Unknown),
            Request::Devices => Ok((Answer::Devices(self.devices.infos()), None)),
            Request::CreateMemory { device, bytes } => {
                let (id, file) = self.create_memory(pid, device, bytes)?;
                Ok((Answer::Memory { id, device, bytes }, Some(file)))
            }
            Request::ImportMemory => {
                let file = files.first().ok_or(Refusal::Unknown)?;
                let id = file_identity(file)
                    .and_then(|file| self.files.get(&file).copied())
                    .ok_or(Refusal::Unknown)?;
                let memory = self.memory.get_mut(&id).ok_or(Refusal::Unknown)?;
                memory.shares += 1;
                let (device, bytes) = (memory.device, memory.bytes);
                let process = self.processes.entry(pid).or_default();
                *process.shares.entry(id).or_default() += 1;
                Ok((Answer::Memory { id, device, bytes }, None))
            }
            Request::FreeMemory { id } => {
                let process = self.processes.entry(pid).or_default();
                let shares = process.shares.get_mut(&id).ok_or(Refusal::Unknown)?;
                *shares -= 1;
                if *shares == 0 {
                    process.shares.remove(&id);
                }
                self.free_shares(id, 1);
                Ok((Answer::Ok, None))
            }
            Request::Status { device } => {
                let mut status = self.devices.status(device, now()).ok_or(Refusal::Unknown)?;
                status.processes = self.processes_on(device);
                Ok((Answer::Status(status), None))
            }
        }
    }

    fn create_memory(
        &mut self,
        pid: u32,
        device: u32,
        bytes: u64,
    ) -> Result<(u64, OwnedFd), Refusal> {
        if bytes == 0 {
            return Err(Refusal::Unknown);
        }
        self.devices.take(device, bytes)?;
        let made = memory_file(bytes).and_then(|file| Some((file_identity(&file)?, file)));
        let Some((identity, file)) = made else {
            self.devices.give(device, bytes);
            return Err(Refusal::Host);
        };
        self.next_memory += 1;
        let id = self.next_memory;
        self.files.insert(identity, id);
        self.memory.insert(
            id,
            Memory {
                device,
                bytes,
                shares: 1,
                file: identity,
            },
        );
        let process = self.processes.entry(pid).or_default();
        process.shares.insert(id, 1);
        Ok((id, file))
    }

    /// Processes with contexts on a device, and what they use.
    fn processes_on(&self, device: u32) -> Vec<(u32, u64)> {
        /// What an answer can carry beside its other fields.
        const MOST: usize = 4096;
        let mut found: Vec<(u32, u64)> = self
            .processes
            .iter()
            .filter_map(|(pid, process)| {
                let contexts = process.contexts.get(&device).filter(|n| **n > 0)?;
                let memory: u64 = process
                    .shares
                    .keys()
                    .filter_map(|id| self.memory.get(id))
                    .filter(|memory| memory.device == device)
                    .map(|memory| memory.bytes)
                    .sum();
                Some((
                    *pid,
                    memory + contexts * self.devices.profile.context_memory,
                ))
            })
            .collect();
        found.sort_unstable();
        found.truncate(MOST);
        found
    }

    // Control files

    fn control(&mut self, id: u64, packet: Packet<'_>) -> Option<()> {
        let (head, rest) = emulated::RequestHead::read_from_prefix(packet.bytes).ok()?;
        let (arg, params) = (head.arg_len as usize, head.params_len as usize);
        if head.magic != emulated::MAGIC
            || arg > emulated::MAX_BYTES
            || params > emulated::MAX_BYTES
            || rest.len() != arg + params
        {
            return None;
        }
        let call = Call {
            caller: Caller {
                file: id,
                root: packet.sender.is_some_and(|sender| sender.uid.is_root()),
            },
            escape: head.escape,
            arg: rest[..arg].to_vec(),
            params: rest[arg..].to_vec(),
            reply: packet.files.into_iter().next()?,
        };
        let now = now();
        if call.escape == u32::from(OPEN_EXECUTION) {
            return self.open_execution(call);
        }
        let Role::Control(pending) = &mut self.connections.get_mut(&id)?.role else {
            return None;
        };
        if *pending >= MAX_PENDING {
            return None;
        }
        *pending += 1;
        match self
            .tree
            .lever(call.caller, call.escape, &call.arg, &call.params)
        {
            Some((device, lever)) => {
                let cost = self.cost(lever);
                let device = self.devices.all.get_mut(device as usize)?;
                let due = device.control_until.max(now) + cost;
                device.control_until = due;
                self.after(due, Action::Control(call));
            }
            None => self.finish_control(call, now),
        }
        Some(())
    }

    /// What a lever costs this time, in ns.
    fn cost(&mut self, lever: Lever) -> u64 {
        let costs = &self.devices.profile.controls;
        let (least, most) = match lever {
            Lever::SetTimeslice => costs.set_timeslice_us,
            Lever::Freeze => costs.freeze_us,
            Lever::Thaw => costs.thaw_us,
            Lever::Preempt => costs.preempt_us,
        };
        // xorshift64
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (least * 1000) + self.random % ((most - least) * 1000 + 1)
    }

    /// Carries a call out, as at `due`, and answers it.
    fn finish_control(&mut self, mut call: Call, due: u64) {
        for device in &mut self.devices.all {
            device.advance(due);
        }
        if let Some(Connection {
            role: Role::Control(pending),
            ..
        }) = self.connections.get_mut(&call.caller.file)
        {
            *pending -= 1;
        }
        let result = self.tree.call(
            &mut self.devices,
            call.caller,
            call.escape,
            &mut call.arg,
            &mut call.params,
        );
        let errno = result.err().unwrap_or(0) as u32;
        let answer = answer(errno, &call.arg, &call.params);
        let waiting = self.follow_levers();
        if waiting.is_empty() {
            wire::send_once(&call.reply, &answer);
            return;
        }
        let token = self.next_token;
        for execution in &waiting {
            self.ask_progress(*execution, token);
        }
        self.next_token += 1;
        self.freezes.insert(
            token,
            Freeze {
                waiting,
                answer,
                reply: call.reply,
            },
        );
        self.after(now() + PROGRESS_TIMEOUT, Action::FreezeTimeout(token));
    }

    /// After a call: closes contexts whose groups are gone. Returns those with kernels that were
    /// frozen in the middle.
    fn follow_levers(&mut self) -> BTreeSet<u64> {
        let removed = std::mem::take(&mut self.devices.removed);
        let frozen = std::mem::take(&mut self.devices.frozen);
        if removed.is_empty() && frozen.is_empty() {
            return BTreeSet::new();
        }
        let with = |keys: &[GroupKey]| -> BTreeSet<u64> {
            let uses = |connection: &Connection| {
                matches!(&connection.role, Role::Execution(execution)
                    if execution.keys.iter().any(|key| keys.contains(key)))
            };
            let found = self.connections.iter().filter(|(_, it)| uses(it));
            found.map(|(id, _)| *id).collect()
        };
        let (orphans, frozen) = (with(&removed), with(&frozen));
        // What was completed before comes first.
        self.dispatch();
        for orphan in orphans {
            self.close(orphan);
        }
        frozen
            .into_iter()
            .filter(|id| !self.interrupted(*id).is_empty())
            .collect()
    }

    /// An execution's kernels that are frozen in the middle.
    fn interrupted(&self, id: u64) -> Vec<(u64, u64, u64)> {
        let Some(Role::Execution(execution)) = self.connections.get(&id).map(|it| &it.role) else {
            return Vec::new();
        };
        let device = &self.devices.all[execution.device as usize];
        let mut works = Vec::new();
        for group in execution.groups {
            if device.gpu.frozen(group) != Ok(true) {
                continue;
            }
            for progress in device.gpu.progress(group).unwrap_or_default() {
                match device.works.get(&progress.work) {
                    Some((owner, number, _)) if *owner == id => {
                        works.push((*number, progress.done, progress.total));
                    }
                    _ => {}
                }
            }
        }
        works
    }

    fn ask_progress(&mut self, id: u64, token: u64) {
        let works = self.interrupted(id);
        self.flush(id);
        self.send(id, &Report::Progress { token, works }, None);
    }

    fn finish_freeze(&mut self, token: u64) {
        if let Some(freeze) = self.freezes.remove(&token) {
            wire::send_once(&freeze.reply, &freeze.answer);
        }
    }

    fn open_execution(&mut self, call: Call) -> Option<()> {
        let pid = self.connections.get(&call.caller.file)?.pid;
        let Ok(mut open) = OpenExecution::read_from_bytes(&call.arg) else {
            wire::send_once(&call.reply, &answer(libc::EINVAL as u32, &[], &[]));
            return Some(());
        };
        let made = self.make_execution(call.caller, &open);
        open.status = made.as_ref().err().copied().unwrap_or(RmStatus::OK).0;
        wire::send_once(&call.reply, &answer(0, open.as_bytes(), &[]));
        if let Ok(execution) = made {
            let device = execution.device;
            let role = Role::Execution(Box::new(execution));
            if self.add_connection(call.reply, pid, role).is_none() {
                let bytes = self.devices.profile.context_memory;
                self.devices.give(device, bytes);
                return None;
            }
            let process = self.processes.entry(pid).or_default();
            *process.contexts.entry(device).or_default() += 1;
        }
        Some(())
    }

    fn make_execution(
        &mut self,
        caller: Caller,
        open: &OpenExecution,
    ) -> Result<Execution, RmStatus> {
        let mut keys = Vec::new();
        let mut groups = Vec::new();
        let mut on = None;
        for (handle, engine) in [
            (open.compute, Engine::Compute),
            (open.host_to_device, Engine::HostToDevice),
            (open.device_to_host, Engine::DeviceToHost),
        ] {
            let key = self.tree.group(caller, open.client, handle)?;
            let (device, group, found) = self
                .devices
                .group(key)
                .ok_or(RmStatus::INVALID_OBJECT_HANDLE)?;
            if found != engine || on.is_some_and(|on| on != device) {
                return Err(RmStatus::INVALID_ARGUMENT);
            }
            on = Some(device);
            keys.push(key);
            groups.push(group);
        }
        let (Some(device), Ok(keys), Ok(groups)) = (on, keys.try_into(), groups.try_into()) else {
            return Err(RmStatus::INVALID_ARGUMENT);
        };
        let bytes = self.devices.profile.context_memory;
        self.devices
            .take(device, bytes)
            .map_err(|_| RmStatus::NO_MEMORY)?;
        Ok(Execution {
            device,
            keys,
            groups,
            streams: HashMap::new(),
            ending: BTreeSet::new(),
            works: HashMap::new(),
            done: Vec::new(),
        })
    }

    // Execution connections

    fn command(&mut self, id: u64, command: Command) -> Option<()> {
        let now = now();
        let Role::Execution(execution) = &mut self.connections.get_mut(&id)?.role else {
            return None;
        };
        let device = self.devices.all.get_mut(execution.device as usize)?;
        match command {
            Command::Submit { at, items } => {
                if items.len() > MAX_SUBMISSIONS || execution.works.len() + items.len() > MAX_LIVE {
                    return None;
                }
                device.advance(at.min(now));
                for item in items {
                    let stream = *execution
                        .streams
                        .entry(item.stream)
                        .or_insert_with(|| device.gpu.add_stream());
                    let group = match item.queue {
                        Queue::Compute => execution.groups[0],
                        Queue::HostToDevice => execution.groups[1],
                        Queue::DeviceToHost => execution.groups[2],
                    };
                    let work = match item.work {
                        Work::Kernel { sms, duration } => gpu::Work::Kernel { sms, duration },
                        Work::Copy { bytes } => gpu::Work::Copy { bytes },
                        Work::Record => gpu::Work::Record,
                        Work::Host => gpu::Work::Host,
                        Work::Wait(other) => match execution.works.get(&other) {
                            Some(other) => gpu::Work::Wait(*other),
                            None => gpu::Work::Record,
                        },
                    };
                    let work = device.gpu.submit(group, stream, work).ok()?;
                    if execution.works.insert(item.id, work).is_some() {
                        return None;
                    }
                    device.works.insert(work, (id, item.id, item.prompt));
                }
            }
            Command::HostDone { id } => {
                device.advance(now);
                if let Some(work) = execution.works.get(&id) {
                    device.gpu.release(*work);
                }
            }
            Command::Progressed { token } => self.progressed(id, token),
            Command::EndStream { stream } => {
                let index = execution.device;
                if let Some(stream) = execution.streams.remove(&stream) {
                    execution.ending.insert(stream);
                    if self.devices.end_stream(index, stream) {
                        execution.ending.remove(&stream);
                    }
                }
            }
            Command::Abort => {
                device.advance(now);
                drop_work(device, execution);
                execution.works.clear();
                execution.done.clear();
            }
        }
        Some(())
    }

    fn progressed(&mut self, id: u64, token: u64) {
        if let Some(freeze) = self.freezes.get_mut(&token)
            && freeze.waiting.remove(&id)
            && freeze.waiting.is_empty()
        {
            self.finish_freeze(token);
        }
    }

    /// Passes the model's events on: all that are due now together.
    fn dispatch(&mut self) {
        let mut due = BTreeSet::new();
        for index in 0..self.devices.all.len() {
            for event in self.devices.all[index].take_events() {
                self.report(index, event, &mut due);
            }
        }
        for id in due {
            self.flush(id);
        }
    }

    fn report(&mut self, index: usize, event: gpu::Event, due: &mut BTreeSet<u64>) {
        let device = &mut self.devices.all[index];
        let Some((id, number, prompt)) = device.works.get(&event.work).copied() else {
            return;
        };
        let Some(Role::Execution(execution)) = self.connections.get_mut(&id).map(|it| &mut it.role)
        else {
            device.works.remove(&event.work);
            return;
        };
        match event.kind {
            EventKind::HostReady => {
                self.flush(id);
                self.send(id, &Report::HostReady { id: number }, None);
            }
            EventKind::Done => {
                device.works.remove(&event.work);
                execution.works.remove(&number);
                execution.done.push((number, device.clock(event.at)));
                let idle = device.gpu.is_idle(event.stream) != Ok(false);
                let full = execution.done.len() >= MAX_BATCH;
                if idle && execution.ending.remove(&event.stream) {
                    let _ = device.gpu.remove_stream(event.stream);
                }
                if full {
                    self.flush(id);
                } else if prompt || idle {
                    due.insert(id);
                }
            }
        }
    }

    /// Reports what is done.
    fn flush(&mut self, id: u64) {
        let Some(Role::Execution(execution)) = self.connections.get_mut(&id).map(|it| &mut it.role)
        else {
            return;
        };
        let done = std::mem::take(&mut execution.done);
        if !done.is_empty() {
            self.send(id, &Report::Done(done), None);
        }
    }

    // Sending

    fn send(&mut self, id: u64, message: &impl serde::Serialize, file: Option<OwnedFd>) {
        let Some(bytes) = protocol::encode(message) else {
            tracing::error!(connection = id, "a message is too large to send");
            return;
        };
        let Some(connection) = self.connections.get_mut(&id) else {
            return;
        };
        connection.unsent.push_back((bytes, file));
        if connection.unsent.len() == 1 {
            self.send_rest(id);
        } else if connection.unsent.len() > MAX_UNREAD {
            tracing::debug!(connection = id, "closed for not reading");
            self.close(id);
        }
    }

    fn send_rest(&mut self, id: u64) {
        let Some(connection) = self.connections.get_mut(&id) else {
            return;
        };
        while let Some((bytes, file)) = connection.unsent.front() {
            match wire::send(&connection.socket, bytes, file.as_ref()) {
                Ok(()) => {
                    connection.unsent.pop_front();
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                // The other end is closed: the next read tells.
                Err(_) => connection.unsent.clear(),
            }
        }
        let stuck = !connection.unsent.is_empty();
        if stuck == connection.stuck {
            return;
        }
        connection.stuck = stuck;
        let mut flags = epoll::EventFlags::IN;
        flags.set(epoll::EventFlags::OUT, stuck);
        let data = epoll::EventData::new_u64(id);
        let _ = epoll::modify(&self.poll, &connection.socket, data, flags);
    }
}

/// Drops all work of an execution from its groups.
fn drop_work(device: &mut Device, execution: &Execution) {
    for group in execution.groups {
        let _ = device.gpu.abort(group);
    }
    for work in execution.works.values() {
        device.works.remove(work);
    }
}

fn answer(errno: u32, arg: &[u8], params: &[u8]) -> Vec<u8> {
    let head = emulated::AnswerHead {
        magic: emulated::MAGIC,
        errno,
    };
    [head.as_bytes(), arg, params].concat()
}

fn pid(peer: &UCred) -> u32 {
    peer.pid.as_raw_nonzero().get() as u32
}

/// Fresh memory of which nobody can change the size.
fn memory_file(bytes: u64) -> Option<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create("emulated-gpu", flags).ok()?;
    rustix::fs::ftruncate(&file, bytes).ok()?;
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&file, seals).ok()?;
    Some(file)
}

fn file_identity(file: &OwnedFd) -> Option<(u64, u64)> {
    let stat = rustix::fs::fstat(file).ok()?;
    Some((stat.st_dev, stat.st_ino))
}
