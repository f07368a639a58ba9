//! The loop: connections, the timer, and bringing everything to the present.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    io,
    os::fd::{AsFd, OwnedFd},
};

use gpumux_rm::emulated;
use rustix::{
    event::epoll,
    io::Errno,
    net::{SocketFlags, UCred, accept_with, sockopt},
    time::{
        Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
        timerfd_settime,
    },
};

use super::{
    books::{Memory, Process},
    call::{Call, Freeze},
    device::Devices,
    execution::Execution,
    rm::Tree,
    wire::{self, Incoming, Packet, now, receive},
};
use crate::{
    Profile,
    protocol::{self, Answer, HELLO, Refusal, Request},
};

const LISTENER: u64 = 0;
const TIMER: u64 = 1;
const STOP: u64 = 2;
const FIRST_CONNECTION: u64 = 16;

/// Packets read from one connection before the others have their turn.
const BURST: usize = 64;
/// Packets that a peer may leave unread.
pub(super) const MAX_UNREAD: usize = 1024;
/// How long no connection is accepted when files have run out.
const ACCEPT_PAUSE: u64 = 100_000_000;

pub(super) struct Connection {
    socket: OwnedFd,
    /// The process that opened it: owner of its memory.
    pub(super) pid: u32,
    pub(super) role: Role,
    /// What could not be sent yet.
    unsent: VecDeque<(Vec<u8>, Option<OwnedFd>)>,
    /// We wait until more can be sent.
    stuck: bool,
}

pub(super) enum Role {
    /// Nothing came yet: a control file, or a process connection before its hello.
    Unknown,
    /// `/dev/nvidiactl`, with the number of calls under way.
    Control(usize),
    Process,
    Execution(Box<Execution>),
}

pub(super) enum Action {
    /// A control whose time is over.
    Control(Call),
    /// A freeze that waits for programs waits no longer.
    FreezeTimeout(u64),
    /// The driver has freed memory of a process that has ended: of which device, and how much.
    Release(u32, u64),
    /// Accept again.
    Accept,
}

pub(super) struct Core {
    pub(super) devices: Devices,
    pub(super) tree: Tree,
    poll: OwnedFd,
    listener: OwnedFd,
    timer: OwnedFd,
    armed: Option<u64>,
    pub(super) connections: HashMap<u64, Connection>,
    /// Work of programs that died, and their pids, while a process holds their control files.
    pub(super) orphans: HashMap<u64, (u32, Box<Execution>)>,
    next_connection: u64,
    timers: BTreeMap<(u64, u64), Action>,
    next_timer: u64,
    pub(super) freezes: HashMap<u64, Freeze>,
    pub(super) next_token: u64,
    pub(super) memory: HashMap<u64, Memory>,
    /// Memory by device and inode of its file.
    pub(super) files: HashMap<(u64, u64), u64>,
    pub(super) next_memory: u64,
    pub(super) processes: HashMap<u32, Process>,
    pub(super) random: u64,
    /// Calls that froze or thawed so far.
    pub(super) switched: u64,
}

impl Core {
    pub(super) fn new(profile: Profile, listener: OwnedFd, stop: &OwnedFd) -> io::Result<Self> {
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
            devices: Devices::new(profile, now()),
            tree: Tree::default(),
            poll,
            listener,
            timer,
            armed: None,
            connections: HashMap::new(),
            orphans: HashMap::new(),
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
            switched: 0,
        })
    }

    pub(super) fn run(&mut self) -> io::Result<()> {
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
                Action::Release(device, bytes) => self.devices.give(device, bytes),
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

    pub(super) fn after(&mut self, due: u64, action: Action) {
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

    pub(super) fn add_connection(&mut self, socket: OwnedFd, pid: u32, role: Role) -> Option<u64> {
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

    pub(super) fn close(&mut self, id: u64) {
        let Some(connection) = self.connections.remove(&id) else {
            return;
        };
        let now = now();
        for device in &mut self.devices.all {
            device.advance(now);
        }
        match connection.role {
            Role::Control(_) => {
                self.end_orphans(id);
                self.tree.close(&mut self.devices, id);
                self.follow_controls();
            }
            Role::Execution(execution) => self.leave_execution(id, connection.pid, execution),
            Role::Unknown | Role::Process => {}
        }
        let waited: Vec<u64> = self.freezes.keys().copied().collect();
        for token in waited {
            self.progressed(id, token);
        }
        self.leave(connection.pid);
    }

    pub(super) fn send(&mut self, id: u64, message: &impl serde::Serialize, file: Option<OwnedFd>) {
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

fn pid(peer: &UCred) -> u32 {
    peer.pid.as_raw_nonzero().get() as u32
}
