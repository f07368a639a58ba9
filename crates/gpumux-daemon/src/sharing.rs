//! Device memory that processes of a tenant share: packets become calls of `gpumux-core`'s [`Exports`], and what that decides is
//! sent to the sessions. The memory passes through here as files, one at a time, of which none is kept.

use std::{
    collections::BTreeMap,
    os::fd::{AsFd, OwnedFd},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use gpumux_core::{
    TenantId,
    exports::{Command, Exports, Process},
};
use gpumux_wire::{Daemon, Shim, message::Piece, socket};
use rustix::net::SendFlags;

use crate::{peer::Peer, scheduler::SessionId};

/// All sessions that may share memory.
#[derive(Default)]
pub(crate) struct Sharing(Mutex<State>);

#[derive(Default)]
struct State {
    exports: Exports,
    sockets: BTreeMap<u64, Arc<OwnedFd>>,
}

/// The name of a process. One that the daemon does not see, in a pid namespace of its own, is another one with every session.
fn process(peer: &Peer, session: SessionId) -> Process {
    match peer.process {
        Some(it) => it.start << 32 | u64::from(it.pid),
        None => 1 << 63 | session.0,
    }
}

impl Sharing {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A session begins.
    pub(crate) fn join(
        &self,
        session: SessionId,
        tenant: TenantId,
        peer: &Peer,
        socket: &Arc<OwnedFd>,
    ) {
        let mut state = self.state();
        state.sockets.insert(session.0, Arc::clone(socket));
        state
            .exports
            .join(session.0, tenant, process(peer, session));
    }

    /// A packet about shared memory; others are ignored.
    pub(crate) fn handle(&self, session: SessionId, packet: &Shim, file: Option<OwnedFd>) {
        let session = session.0;
        // Under the lock, so that what is decided first is sent first.
        let mut state = self.state();
        let exports = &mut state.exports;
        let mut found = None;
        let commands = match *packet {
            Shim::Export { ticket, token } => {
                let commands = exports.export(session, token);
                state.answer(session, ticket);
                commands
            }
            Shim::Withdraw { token } => exports.withdraw(session, token),
            Shim::Redeem {
                ticket,
                token,
                index,
            } => exports.redeem(session, ticket, token, index),
            Shim::Opened { token, charged } => {
                exports.opened(session, token, charged);
                Vec::new()
            }
            Shim::Closed { token } => exports.closed(session, token),
            Shim::Piece { op, piece } => {
                found = piece.zip(file);
                let served = exports.served(session, op, found.is_some());
                served.into_iter().collect()
            }
            _ => return,
        };
        state.carry_out(commands, found);
    }

    /// A session has ended, and its process too unless it is `alive`. Returns the process if it must be watched: it lives on with
    /// what it shares.
    pub(crate) fn leave(&self, session: SessionId, peer: &Peer, alive: bool) -> Option<Process> {
        let process = process(peer, session);
        let mut state = self.state();
        state.sockets.remove(&session.0);
        let commands = state.exports.left(session.0);
        state.carry_out(commands, None);
        if alive {
            return state.exports.concerns(process).then_some(process);
        }
        let commands = state.exports.ended(process);
        state.carry_out(commands, None);
        None
    }

    /// A process has ended that lived on after its session.
    pub(crate) fn ended(&self, process: Process) {
        let mut state = self.state();
        let commands = state.exports.ended(process);
        state.carry_out(commands, None);
    }
}

impl State {
    /// The process may pass the token on.
    fn answer(&self, session: u64, ticket: u32) {
        if let Some(socket) = self.sockets.get(&session).filter(|_| ticket != 0) {
            let answer = Daemon::Exported { ticket };
            let _ = socket::send(socket, &answer, None, SendFlags::DONTWAIT);
        }
    }

    fn carry_out(&mut self, commands: Vec<Command>, found: Option<(Piece, OwnedFd)>) {
        for command in commands {
            let file = found.as_ref().map(|(_, file)| file.as_fd());
            let (to, message, file) = match command {
                Command::Serve {
                    to,
                    op,
                    token,
                    index,
                } => (to, Daemon::Serve { op, token, index }, None),
                Command::Pass { to, ticket } => {
                    let piece = found.as_ref().map(|(piece, _)| *piece);
                    (to, Daemon::Piece { ticket, piece }, file)
                }
                Command::Refuse { to, ticket } => {
                    let piece = None;
                    (to, Daemon::Piece { ticket, piece }, None)
                }
                Command::Unshared { to, token } => (to, Daemon::Unshared { token }, None),
                Command::Orphaned { to, token } => (to, Daemon::Orphaned { token }, None),
            };
            let Some(socket) = self.sockets.get(&to) else {
                continue;
            };
            let sent = socket::send(socket, &message, file, SendFlags::DONTWAIT);
            if let Err(error) = sent {
                tracing::warn!(session = to, %error, ?command, "a message about shared memory is lost");
                // The program that waits for it shall get its error.
                if let Command::Serve { to, op, .. } = command {
                    let refused = self.exports.served(to, op, false);
                    self.carry_out(refused.into_iter().collect(), None);
                }
            }
        }
    }
}
