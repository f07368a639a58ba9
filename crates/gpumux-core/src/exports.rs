//! Device memory that processes of a tenant share (CUDA IPC): which process exports it, which have it open, and what each
//! of them must be sent.
//!
//! An export is named by a token, a number that cannot be guessed, and only within its tenant. The memory itself passes
//! from process to process as files, which this module does not see. While a process has an export open, the memory stays
//! where it is. It is accounted to the process that exports it; if that is gone, to one that has it open.

use std::collections::{BTreeMap, BTreeSet};

use crate::TenantId;

/// Most exports of a tenant that are known.
const MOST_EXPORTS: usize = 1 << 12;
/// Most requests of a session that are under way: one for each of its threads that opens memory.
const MOST_REQUESTS: usize = 64;

/// A session with a process; a process may have several, one after the other.
pub type Session = u64;
/// A process, whatever its sessions.
pub type Process = u64;
/// The name of an export.
pub type Token = u128;

/// What a session must be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// A process requests a piece of what this one exports; to be answered by [`Exports::served`].
    Serve {
        /// The session that exports it.
        to: Session,
        /// The request's name.
        op: u64,
        /// What is exported.
        token: Token,
        /// Which piece, from 0.
        index: u32,
    },
    /// The piece that has just come is the answer to a request.
    Pass {
        /// The session that requested it.
        to: Session,
        /// Its name for the request.
        ticket: u32,
    },
    /// There is no answer to a request.
    Refuse {
        /// The session that requested it.
        to: Session,
        /// Its name for the request.
        ticket: u32,
    },
    /// No other process has this export open any more.
    Unshared {
        /// The session that exports it.
        to: Session,
        /// What is exported.
        token: Token,
    },
    /// The process that exported this is gone: it is accounted to this one from now on.
    Orphaned {
        /// A session that has it open.
        to: Session,
        /// What was exported.
        token: Token,
    },
}

#[derive(Clone, Copy, Debug)]
struct Member {
    tenant: TenantId,
    process: Process,
}

#[derive(Clone, Debug, Default)]
struct Export {
    /// None: it is gone, or has not said yet that it exports this.
    owner: Option<Process>,
    openers: BTreeSet<Process>,
    /// The opener that it is accounted to.
    charged: Option<Process>,
}

#[derive(Clone, Copy, Debug)]
struct Request {
    owner: Session,
    opener: Session,
    ticket: u32,
}

/// All exports.
#[derive(Clone, Debug, Default)]
pub struct Exports {
    sessions: BTreeMap<Session, Member>,
    /// The latest session of each process that has one.
    current: BTreeMap<Process, Session>,
    exports: BTreeMap<(TenantId, Token), Export>,
    requests: BTreeMap<u64, Request>,
    ops: u64,
}

impl Exports {
    /// A session begins.
    pub fn join(&mut self, session: Session, tenant: TenantId, process: Process) {
        self.sessions.insert(session, Member { tenant, process });
        self.current.insert(process, session);
    }

    /// The process exports memory, or did so before this daemon began.
    pub fn export(&mut self, session: Session, token: Token) -> Vec<Command> {
        let Some((member, export)) = self.entry(session, token) else {
            return Vec::new();
        };
        let before = export.owner.replace(member.process);
        match before {
            // Another process's: this one has learned of the token, or made it up.
            Some(other) if other != member.process => {
                export.owner = before;
                Vec::new()
            }
            // It may have missed the message.
            Some(_) if export.openers.is_empty() => vec![Command::Unshared { to: session, token }],
            _ => Vec::new(),
        }
    }

    /// The process exports this no longer: the memory is not its any more.
    pub fn withdraw(&mut self, session: Session, token: Token) -> Vec<Command> {
        let Some(member) = self.sessions.get(&session).copied() else {
            return Vec::new();
        };
        let key = (member.tenant, token);
        match self.exports.get(&key) {
            Some(it) if it.owner == Some(member.process) => self.orphan(key),
            _ => Vec::new(),
        }
    }

    /// The process requests a piece of what another one of its tenant exports, from the first on.
    pub fn redeem(
        &mut self,
        session: Session,
        ticket: u32,
        token: Token,
        index: u32,
    ) -> Vec<Command> {
        let refused = vec![Command::Refuse {
            to: session,
            ticket,
        }];
        let Some(member) = self.sessions.get(&session).copied() else {
            return refused;
        };
        let own = self.requests.values().filter(|it| it.opener == session);
        if own.count() >= MOST_REQUESTS {
            return refused;
        }
        let Some(export) = self.exports.get_mut(&(member.tenant, token)) else {
            return refused;
        };
        let owner = export.owner.filter(|owner| *owner != member.process);
        let Some(to) = owner.and_then(|owner| self.current.get(&owner).copied()) else {
            return refused;
        };
        if index == 0 {
            export.openers.insert(member.process);
        } else if !export.openers.contains(&member.process) {
            return refused;
        }
        self.ops += 1;
        let request = Request {
            owner: to,
            opener: session,
            ticket,
        };
        self.requests.insert(self.ops, request);
        vec![Command::Serve {
            to,
            op: self.ops,
            token,
            index,
        }]
    }

    /// The process answers a request: whether the piece has come.
    pub fn served(&mut self, session: Session, op: u64, found: bool) -> Option<Command> {
        let request = self.requests.get(&op).filter(|it| it.owner == session)?;
        let (to, ticket) = (request.opener, request.ticket);
        self.requests.remove(&op);
        Some(match found {
            true => Command::Pass { to, ticket },
            false => Command::Refuse { to, ticket },
        })
    }

    /// The process has had this open since before the daemon began; `charged`: it is accounted to it.
    pub fn opened(&mut self, session: Session, token: Token, charged: bool) {
        if let Some((member, export)) = self.entry(session, token) {
            export.openers.insert(member.process);
            if charged {
                export.charged = Some(member.process);
            }
        }
    }

    /// The process has closed this, or could not open it.
    pub fn closed(&mut self, session: Session, token: Token) -> Vec<Command> {
        let Some(member) = self.sessions.get(&session).copied() else {
            return Vec::new();
        };
        self.close((member.tenant, token), member.process)
    }

    /// A session has ended; its process may live on, with what it exports and has open.
    pub fn left(&mut self, session: Session) -> Vec<Command> {
        if let Some(member) = self.sessions.remove(&session)
            && self.current.get(&member.process) == Some(&session)
        {
            self.current.remove(&member.process);
        }
        let gone = |_: &u64, it: &mut Request| it.owner == session || it.opener == session;
        let gone: Vec<Request> = self.requests.extract_if(.., gone).map(|it| it.1).collect();
        let waiting = gone.iter().filter(|it| it.opener != session);
        waiting
            .map(|it| Command::Refuse {
                to: it.opener,
                ticket: it.ticket,
            })
            .collect()
    }

    /// Whether something is known of what a process exports or has open.
    pub fn concerns(&self, process: Process) -> bool {
        let mut exports = self.exports.values();
        exports.any(|it| it.owner == Some(process) || it.openers.contains(&process))
    }

    /// A process has ended.
    pub fn ended(&mut self, process: Process) -> Vec<Command> {
        let keys: Vec<_> = self.exports.keys().copied().collect();
        let mut commands = Vec::new();
        for key in keys {
            commands.extend(self.close(key, process));
            let export = self.exports.get(&key);
            if export.is_some_and(|it| it.owner == Some(process)) {
                commands.extend(self.orphan(key));
            }
        }
        commands
    }

    /// An export of the session's tenant, known from now on if there is room for it.
    fn entry(&mut self, session: Session, token: Token) -> Option<(Member, &mut Export)> {
        let member = *self.sessions.get(&session)?;
        let key = (member.tenant, token);
        let all = (member.tenant, Token::MIN)..=(member.tenant, Token::MAX);
        if !self.exports.contains_key(&key) && self.exports.range(all).count() >= MOST_EXPORTS {
            return None;
        }
        Some((member, self.exports.entry(key).or_default()))
    }

    fn close(&mut self, key: (TenantId, Token), process: Process) -> Vec<Command> {
        let Some(export) = self.exports.get_mut(&key) else {
            return Vec::new();
        };
        if !export.openers.remove(&process) {
            return Vec::new();
        }
        let charged = export.charged.take_if(|it| *it == process).is_some();
        match (export.openers.is_empty(), export.owner) {
            (true, None) => {
                self.exports.remove(&key);
                Vec::new()
            }
            (true, Some(owner)) => {
                let to = self.current.get(&owner).copied();
                to.map(|to| Command::Unshared { to, token: key.1 })
                    .into_iter()
                    .collect()
            }
            (false, _) if charged => self.charge(key),
            (false, _) => Vec::new(),
        }
    }

    fn orphan(&mut self, key: (TenantId, Token)) -> Vec<Command> {
        let Some(export) = self.exports.get_mut(&key) else {
            return Vec::new();
        };
        export.owner = None;
        if export.openers.is_empty() {
            self.exports.remove(&key);
            return Vec::new();
        }
        self.charge(key)
    }

    /// Accounts what has no exporter to one that has it open.
    fn charge(&mut self, key: (TenantId, Token)) -> Vec<Command> {
        let Some(export) = self.exports.get_mut(&key) else {
            return Vec::new();
        };
        let reachable = |it: &Process| Some((*it, *self.current.get(it)?));
        let Some((process, to)) = export.openers.iter().find_map(reachable) else {
            return Vec::new();
        };
        export.charged = Some(process);
        vec![Command::Orphaned { to, token: key.1 }]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TENANT: TenantId = TenantId(1);
    const TOKEN: Token = 77;

    /// Sessions 1, 2 and 3 of processes 101, 102 and 103 of one tenant; 9 of another's.
    fn exports() -> Exports {
        let mut exports = Exports::default();
        for session in 1..=3 {
            exports.join(session, TENANT, 100 + session);
        }
        exports.join(9, TenantId(2), 109);
        assert_eq!(exports.export(1, TOKEN), []);
        exports
    }

    /// Opens it in a session; the exporter's session answers.
    fn open(exports: &mut Exports, session: Session) {
        let commands = exports.redeem(session, 5, TOKEN, 0);
        let [
            Command::Serve {
                to: 1,
                op,
                token: TOKEN,
                index: 0,
            },
        ] = commands[..]
        else {
            panic!("{commands:?}");
        };
        let passed = Command::Pass {
            to: session,
            ticket: 5,
        };
        assert_eq!(exports.served(1, op, true), Some(passed));
        assert_eq!(exports.served(1, op, true), None, "it is answered once");
    }

    #[test]
    fn token_of_another_tenant_is_refused() {
        let mut exports = exports();
        let refused = [Command::Refuse { to: 9, ticket: 1 }];
        assert_eq!(exports.redeem(9, 1, TOKEN, 0), refused);
        // To export it itself does not help, nor does it harm.
        assert_eq!(exports.export(9, TOKEN), []);
        assert_eq!(exports.redeem(9, 1, TOKEN, 0), refused);
        assert_eq!(exports.withdraw(9, TOKEN), []);
        open(&mut exports, 2);
        assert_eq!(exports.closed(9, TOKEN), []);
    }

    #[test]
    fn later_pieces_are_only_for_a_process_that_began() {
        let mut exports = exports();
        let refused = [Command::Refuse { to: 2, ticket: 1 }];
        assert_eq!(exports.redeem(2, 1, TOKEN, 1), refused);
        open(&mut exports, 2);
        assert_eq!(exports.redeem(2, 1, TOKEN, 1).len(), 1);
        let own = [Command::Refuse { to: 1, ticket: 1 }];
        assert_eq!(exports.redeem(1, 1, TOKEN, 0), own, "the exporter's own");
    }

    #[test]
    fn export_is_unshared_when_its_last_opener_is_gone() {
        let mut exports = exports();
        open(&mut exports, 2);
        open(&mut exports, 3);
        let unshared = [Command::Unshared {
            to: 1,
            token: TOKEN,
        }];
        assert_eq!(exports.closed(2, TOKEN), []);
        assert_eq!(exports.closed(2, TOKEN), []);
        // A session that ends is not its process's end: it has the memory still.
        assert_eq!(exports.left(3), []);
        assert!(exports.concerns(103));
        assert_eq!(exports.ended(103), unshared);
        assert!(!exports.concerns(103));
        open(&mut exports, 2);
        assert_eq!(exports.closed(2, TOKEN), unshared);
    }

    #[test]
    fn exporter_between_sessions_is_notified_in_the_next() {
        let mut exports = exports();
        open(&mut exports, 2);
        assert_eq!(exports.left(1), []);
        assert_eq!(exports.closed(2, TOKEN), []);
        exports.join(4, TENANT, 101);
        let unshared = [Command::Unshared {
            to: 4,
            token: TOKEN,
        }];
        assert_eq!(exports.export(4, TOKEN), unshared);
    }

    #[test]
    fn memory_without_exporter_is_accounted_to_one_opener() {
        let mut exports = exports();
        open(&mut exports, 2);
        open(&mut exports, 3);
        assert_eq!(exports.left(1), []);
        let orphaned = |to| [Command::Orphaned { to, token: TOKEN }];
        assert_eq!(exports.ended(101), orphaned(2));
        let refused = [Command::Refuse { to: 3, ticket: 1 }];
        assert_eq!(exports.redeem(3, 1, TOKEN, 0), refused);
        assert_eq!(exports.closed(2, TOKEN), orphaned(3));
        assert_eq!(exports.ended(103), []);
        assert!(exports.exports.is_empty());
    }

    #[test]
    fn requests_end_with_the_exporter_s_session() {
        let mut exports = exports();
        assert_eq!(exports.redeem(2, 6, TOKEN, 0).len(), 1);
        let refused = [Command::Refuse { to: 2, ticket: 6 }];
        assert_eq!(exports.left(1), refused);
        assert_eq!(exports.served(1, 1, true), None);
        // One that has waited for an answer and is gone gets none.
        let mut exports = self::exports();
        assert_eq!(exports.redeem(2, 6, TOKEN, 0).len(), 1);
        assert_eq!(exports.left(2), []);
        assert_eq!(exports.served(1, 1, true), None);
    }

    #[test]
    fn new_daemon_learns_of_exports_in_any_order() {
        for exporter_first in [true, false] {
            let mut exports = Exports::default();
            exports.join(1, TENANT, 101);
            exports.join(2, TENANT, 102);
            if exporter_first {
                // It may be open in a process that has not come yet.
                assert_eq!(exports.export(1, TOKEN), []);
                exports.opened(2, TOKEN, false);
            } else {
                exports.opened(2, TOKEN, false);
                assert_eq!(exports.export(1, TOKEN), []);
            }
            let unshared = [Command::Unshared {
                to: 1,
                token: TOKEN,
            }];
            assert_eq!(exports.closed(2, TOKEN), unshared);
        }
    }

    #[test]
    fn export_of_another_process_cannot_be_taken_over() {
        let mut exports = exports();
        assert_eq!(exports.export(2, TOKEN), []);
        assert_eq!(exports.withdraw(2, TOKEN), []);
        open(&mut exports, 3);
    }
}
