//! Device memory that processes of a tenant share: packets become calls of `gpumux-core`'s [`Exports`], and what that decides is
//! sent to the sessions. The memory passes through here as files, which are kept only until the opener's socket takes them.

use std::{
    collections::{BTreeMap, VecDeque},
    io,
    os::fd::{AsFd, OwnedFd},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use gpumux_core::{
    Micros, TenantId,
    exports::{Command, Exports, Process},
};
use gpumux_wire::{
    Daemon, Shim,
    message::{INTRODUCTION, Piece},
    socket,
};
use rustix::net::{SendFlags, Shutdown};
use tokio::time::Instant;

use crate::{peer::Peer, scheduler::SessionId};

/// How often a task looks for requests that got no answer, and for room in full sockets.
const LOOK: Duration = Duration::from_millis(100);

/// Most messages that wait for room in a socket: several for each export of a tenant. A session with more ends.
const MOST_UNSENT: usize = 1 << 14;

/// All sessions that may share memory.
pub(crate) struct Sharing {
    state: Mutex<State>,
    began: Instant,
}

#[derive(Default)]
struct State {
    exports: Exports,
    peers: BTreeMap<u64, Member>,
    /// A task ends the requests that get no answer, and sends what full sockets have not taken.
    watched: bool,
}

struct Member {
    socket: Arc<OwnedFd>,
    /// Of its library.
    revision: u32,
    /// What its full socket has not taken yet.
    unsent: VecDeque<(Daemon, Option<OwnedFd>)>,
}

/// The name of a process. One that the daemon does not see, in a pid namespace of its own, is another one with every session.
fn process(peer: &Peer, session: SessionId) -> Process {
    match peer.process {
        Some(it) => it.start << 32 | u64::from(it.pid),
        None => 1 << 63 | session.0,
    }
}

impl Default for Sharing {
    fn default() -> Self {
        Self {
            state: Mutex::default(),
            began: Instant::now(),
        }
    }
}

impl Sharing {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> Micros {
        Micros(self.began.elapsed().as_micros() as u64)
    }

    /// Whether processes of a tenant share memory.
    pub(crate) fn shares(&self, tenant: TenantId) -> bool {
        self.state().exports.shares(tenant)
    }

    /// A session begins, with a library of this revision.
    pub(crate) fn join(
        &self,
        session: SessionId,
        tenant: TenantId,
        peer: &Peer,
        (socket, revision): (&Arc<OwnedFd>, u32),
    ) {
        let mut state = self.state();
        let socket = Arc::clone(socket);
        let member = Member {
            socket,
            revision,
            unsent: VecDeque::new(),
        };
        state.peers.insert(session.0, member);
        state
            .exports
            .join(session.0, tenant, process(peer, session));
    }

    /// A packet about shared memory; others are ignored.
    pub(crate) fn handle(
        self: &Arc<Self>,
        session: SessionId,
        packet: &Shim,
        file: Option<OwnedFd>,
    ) {
        let session = session.0;
        let now = self.now();
        // Under the lock, so that what is decided first is sent first.
        let mut state = self.state();
        let exports = &mut state.exports;
        let mut found = None;
        let commands = match *packet {
            // The introduction of a library of revision 4: it doesn't tell what is open.
            Shim::Export { ticket: 0, token } => exports.exported(session, token, true),
            Shim::Export { ticket, token } => {
                exports.export(session, token);
                state.answer(session, ticket);
                Vec::new()
            }
            Shim::Exported { token, open } => exports.exported(session, token, open),
            Shim::Introduced => exports.introduced(session),
            Shim::Withdraw { token } => exports.withdraw(session, token),
            Shim::Redeem {
                ticket,
                token,
                index,
            } => exports.redeem(session, ticket, token, index, now),
            Shim::Delayed { op } => {
                exports.delayed(session, op);
                Vec::new()
            }
            Shim::Opened { token, charged } => exports.opened(session, token, charged),
            Shim::Closed { token } => exports.closed(session, token),
            Shim::Piece { op, piece } => {
                found = piece.zip(file);
                let served = exports.served(session, op, found.is_some());
                served.into_iter().collect()
            }
            _ => return,
        };
        state.carry_out(commands, found);
        self.keep_watch(&mut state);
    }

    /// Has a task look after what may be left to do.
    fn keep_watch(self: &Arc<Self>, state: &mut State) {
        if state.has_more() && !std::mem::replace(&mut state.watched, true) {
            tokio::spawn(Arc::clone(self).watch());
        }
    }

    /// Ends the requests that get no answer in time, and sends what full sockets have not taken, until there is no more to do.
    async fn watch(self: Arc<Self>) {
        while self.look() {
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Whether there is more to do later.
    fn look(&self) -> bool {
        let now = self.now();
        let mut state = self.state();
        let commands = state.exports.give_up(now);
        state.carry_out(commands, None);
        state.peers.values_mut().for_each(Member::flush);
        state.watched = state.has_more();
        state.watched
    }

    /// A session has ended, and its process too unless it is `alive`. Returns the process if it must be watched: it lives on with
    /// what it shares.
    pub(crate) fn leave(
        self: &Arc<Self>,
        session: SessionId,
        peer: &Peer,
        alive: bool,
    ) -> Option<Process> {
        let process = process(peer, session);
        let mut state = self.state();
        state.peers.remove(&session.0);
        let mut commands = state.exports.left(session.0);
        if !alive {
            commands.extend(state.exports.ended(process));
        }
        state.carry_out(commands, None);
        self.keep_watch(&mut state);
        (alive && state.exports.concerns(process)).then_some(process)
    }

    /// A process has ended that lived on after its session.
    pub(crate) fn ended(self: &Arc<Self>, process: Process) {
        let mut state = self.state();
        let commands = state.exports.ended(process);
        state.carry_out(commands, None);
        self.keep_watch(&mut state);
    }
}

impl State {
    /// Whether a request may be given up, or something is unsent.
    fn has_more(&self) -> bool {
        let mut peers = self.peers.values();
        self.exports.next_due().is_some() || peers.any(|it| !it.unsent.is_empty())
    }

    /// The process may pass the token on.
    fn answer(&mut self, session: u64, ticket: u32) {
        if let Some(member) = self.peers.get_mut(&session) {
            member.send(Daemon::Exported { ticket }, None);
        }
    }

    /// Whether a session's library knows what this revision added.
    fn knows(&self, session: u64, revision: u32) -> bool {
        let member = self.peers.get(&session);
        member.is_some_and(|it| it.revision >= revision)
    }

    fn carry_out(&mut self, commands: Vec<Command>, mut found: Option<(Piece, OwnedFd)>) {
        for command in commands {
            let none = |ticket| Daemon::Piece {
                ticket,
                piece: None,
            };
            let (to, message, file) = match command {
                Command::Serve {
                    to,
                    op,
                    token,
                    index,
                } => (to, Daemon::Serve { op, token, index }, None),
                Command::Pass { to, ticket } => {
                    let (piece, file) = found.take().unzip();
                    (to, Daemon::Piece { ticket, piece }, file)
                }
                Command::Refuse { to, ticket } => (to, none(ticket), None),
                Command::Late { to, ticket } if self.knows(to, INTRODUCTION) => {
                    (to, Daemon::Late { ticket }, None)
                }
                Command::Late { to, ticket } => (to, none(ticket), None),
                Command::Unshared { to, token } => (to, Daemon::Unshared { token }, None),
                Command::Orphaned { to, token } => (to, Daemon::Orphaned { token }, None),
            };
            if let Some(member) = self.peers.get_mut(&to) {
                member.send(message, file);
            }
        }
    }
}

impl Member {
    fn send(&mut self, message: Daemon, file: Option<OwnedFd>) {
        if self.unsent.len() >= MOST_UNSENT {
            // The introduction of the next session makes it good.
            let _ = rustix::net::shutdown(&self.socket, Shutdown::Both);
            self.unsent.clear();
            return;
        }
        self.unsent.push_back((message, file));
        self.flush();
    }

    /// Sends what the socket takes, in order.
    fn flush(&mut self) {
        while let Some((message, file)) = self.unsent.front() {
            let file = file.as_ref().map(AsFd::as_fd);
            match socket::send(&self.socket, message, file, SendFlags::DONTWAIT) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) => match *message {
                    // A file may be refused. The program that waits for it shall get its error.
                    Daemon::Piece {
                        ticket,
                        piece: Some(_),
                    } => {
                        tracing::warn!(%error, "a piece of shared memory cannot be passed on");
                        let refused = Daemon::Piece {
                            ticket,
                            piece: None,
                        };
                        self.unsent[0] = (refused, None);
                        continue;
                    }
                    // The session is at its end: the next one's introduction makes it good.
                    _ => tracing::debug!(%error, ?message, "a message about shared memory is lost"),
                },
                Ok(()) => {}
            }
            self.unsent.pop_front();
        }
    }
}
