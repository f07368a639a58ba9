//! Device memory that processes of a tenant share: packets become calls of `gpumux-core`'s [`Exports`], and what that decides is
//! sent to the sessions. The memory passes through here as files, which are kept only until the opener's socket takes them.

use std::{
    os::fd::OwnedFd,
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
};
use tokio::time::Instant;

use crate::{
    link::{Link, Links, SessionId},
    peer::Peer,
};

/// How often a task looks for requests that got no answer, and for room in full sockets.
const LOOK: Duration = Duration::from_millis(100);

/// All sessions that may share memory.
pub(crate) struct Sharing {
    state: Mutex<State>,
    began: Instant,
}

#[derive(Default)]
struct State {
    exports: Exports,
    links: Arc<Links>,
    /// A task ends the requests that get no answer, and sends what full sockets have not taken.
    watched: bool,
}

/// The name of a process. One that the daemon does not see, in a pid namespace of its own, is another one with every session.
fn process(peer: &Peer, session: SessionId) -> Process {
    match peer.process {
        Some(it) => it.start << 32 | u64::from(it.pid),
        None => 1 << 63 | session.0,
    }
}

impl Sharing {
    pub(crate) fn new(links: Arc<Links>) -> Self {
        let state = State {
            links,
            ..State::default()
        };
        Self {
            state: state.into(),
            began: Instant::now(),
        }
    }

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

    /// A session begins.
    pub(crate) fn join(&self, link: &Link, peer: &Peer) {
        let mut state = self.state();
        let process = process(peer, link.session);
        state.exports.join(link.session.0, link.tenant, process);
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
        state.links.all().iter().for_each(|it| it.flush());
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
        self.exports.next_due().is_some() || self.links.all().iter().any(|it| it.has_unsent())
    }

    /// The process may pass the token on.
    fn answer(&self, session: u64, ticket: u32) {
        self.send(session, Daemon::Exported { ticket }, None);
    }

    fn send(&self, to: u64, message: Daemon, file: Option<OwnedFd>) {
        if let Some(link) = self.links.find(SessionId(to)) {
            link.send_in_order(message, file);
        }
    }

    /// Whether a session's library knows what this revision added.
    fn knows(&self, session: u64, revision: u32) -> bool {
        let link = self.links.find(SessionId(session));
        link.is_some_and(|it| it.page.revision() >= revision)
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
            self.send(to, message, file);
        }
    }
}
