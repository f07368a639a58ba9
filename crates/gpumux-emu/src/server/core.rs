//! What the server has: devices, connections, and what is due when.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    io,
    os::fd::{AsFd, OwnedFd},
};

use rustix::{
    event::epoll,
    io::Errno,
    time::{TimerfdClockId, TimerfdFlags, timerfd_create},
};

use super::{
    books::{Memory, Process},
    call::{Call, Freeze},
    device::Devices,
    execution::Execution,
    rm::Tree,
    wire::{self, now},
};
use crate::{Profile, protocol};

pub(super) const LISTENER: u64 = 0;
pub(super) const TIMER: u64 = 1;
pub(super) const STOP: u64 = 2;
const FIRST_CONNECTION: u64 = 16;

/// Packets that a peer may leave unread.
pub(super) const MAX_UNREAD: usize = 1024;

pub(super) struct Connection {
    pub(super) socket: OwnedFd,
    /// The process that opened it: owner of its memory.
    pub(super) pid: u32,
    pub(super) role: Role,
    /// What could not be sent yet.
    pub(super) unsent: VecDeque<(Vec<u8>, Option<OwnedFd>)>,
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
    /// A file that keeps memory: by what that is found.
    Export((u64, u64)),
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
    pub(super) poll: OwnedFd,
    pub(super) listener: OwnedFd,
    pub(super) timer: OwnedFd,
    /// What the timer is set to.
    pub(super) armed: Option<u64>,
    pub(super) connections: HashMap<u64, Connection>,
    /// Work of programs that died, and their pids, while a process holds their control files.
    pub(super) orphans: HashMap<u64, (u32, Box<Execution>)>,
    next_connection: u64,
    /// Connections to close before anything else is done.
    pub(super) closing: VecDeque<u64>,
    pub(super) timers: BTreeMap<(u64, u64), Action>,
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
            closing: VecDeque::new(),
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

    pub(super) fn after(&mut self, due: u64, action: Action) {
        self.next_timer += 1;
        self.timers.insert((due, self.next_timer), action);
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
            self.closing.push_back(id);
        }
    }

    pub(super) fn send_rest(&mut self, id: u64) {
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
