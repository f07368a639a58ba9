//! Device memory that processes of a tenant share (CUDA IPC): which process exports it, which have it open, and what each
//! of them must be sent.
//!
//! An export is named by a token, a number that cannot be guessed, and only within its tenant. The memory itself passes
//! from process to process as files, which this module does not see. While a process has an export open, the memory stays
//! where it is. It is accounted to the process that exports it; if that is gone, to one that has it open.
//!
//! A session begins with an introduction: all that the process exports and has open. What is known of the process and is not
//! in it has ended meanwhile. An export that was open before this daemon knew of it is *inherited*: a process that never
//! connects again may have it open, so it is never unshared.

use std::collections::{BTreeMap, BTreeSet};

use crate::{Micros, TenantId};

/// Most exports of a tenant that are known.
const MOST_EXPORTS: usize = 1 << 12;
/// Most requests of a session that are under way: one for each of its threads that opens memory.
const MOST_REQUESTS: usize = 64;

/// How long an exporter may take to answer a request, or to report that its memory is being moved or on its way back.
pub const ANSWER: Micros = Micros::from_secs(30);
/// Until when after its begin a daemon waits for the exporters of the one before, which may not have come again.
pub const RETURNS: Micros = Micros::from_secs(5);

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
    /// The exporter has not answered a request within [`ANSWER`].
    Late {
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

/// A process's part in an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Part {
    Opener,
    Owner,
}

#[derive(Clone, Debug)]
struct Member {
    tenant: TenantId,
    process: Process,
    /// What was known of the process when the session began, and its introduction has not named yet.
    unconfirmed: BTreeSet<(Part, Token)>,
}

/// The process that exports something.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Owner {
    /// It has not connected to this daemon yet.
    #[default]
    Unknown,
    Process(Process),
    /// It has ended, or does not export this any more.
    Gone,
}

#[derive(Clone, Debug, Default)]
struct Export {
    owner: Owner,
    /// It was open before this daemon knew of it.
    inherited: bool,
    openers: BTreeSet<Process>,
    /// The opener that it is accounted to.
    charged: Option<Process>,
}

#[derive(Clone, Copy, Debug)]
struct Request {
    owner: Session,
    opener: Session,
    ticket: u32,
    /// When the exporter must have answered; none: its memory is on its way back.
    due: Option<Micros>,
}

/// A request for what no process has introduced yet to a daemon that has just begun.
#[derive(Clone, Copy, Debug)]
struct Early {
    opener: Session,
    ticket: u32,
    token: Token,
    index: u32,
    asked: Micros,
}

/// All exports.
#[derive(Clone, Debug, Default)]
pub struct Exports {
    sessions: BTreeMap<Session, Member>,
    /// The latest session of each process that has one.
    current: BTreeMap<Process, Session>,
    exports: BTreeMap<(TenantId, Token), Export>,
    requests: BTreeMap<u64, Request>,
    early: Vec<Early>,
    ops: u64,
}

impl Exports {
    /// A session begins, with an introduction: [`Exports::exported`] and [`Exports::opened`] until [`Exports::introduced`].
    pub fn join(&mut self, session: Session, tenant: TenantId, process: Process) {
        let mut unconfirmed = BTreeSet::new();
        for ((_, token), export) in self.exports.range(all_of(tenant)) {
            if export.openers.contains(&process) {
                unconfirmed.insert((Part::Opener, *token));
            }
            if export.owner == Owner::Process(process) {
                unconfirmed.insert((Part::Owner, *token));
            }
        }
        let member = Member {
            tenant,
            process,
            unconfirmed,
        };
        self.sessions.insert(session, member);
        self.current.insert(process, session);
    }

    /// The process exports memory, which no process has open yet.
    pub fn export(&mut self, session: Session, token: Token) {
        self.own(session, token);
    }

    /// Introduction: the process has exported this since before the session. `open`: another process has it open, for all that
    /// the exporter was sent.
    pub fn exported(&mut self, session: Session, token: Token, open: bool) -> Vec<Command> {
        let Some((before, export)) = self.own(session, token) else {
            return Vec::new();
        };
        if before == Owner::Unknown {
            export.inherited = open;
        }
        let unshared = open && !export.inherited && export.openers.is_empty();
        // The message was lost with a session.
        let unshared = unshared.then_some(Command::Unshared { to: session, token });
        let early: Vec<Early> = (self.early)
            .extract_if(.., |it| it.token == token)
            .collect();
        let served = early
            .into_iter()
            .flat_map(|it| self.redeem(it.opener, it.ticket, it.token, it.index, it.asked));
        unshared.into_iter().chain(served).collect()
    }

    /// Introduction: the process has had this open since before the session; `charged`: it is accounted to it.
    pub fn opened(&mut self, session: Session, token: Token, charged: bool) -> Vec<Command> {
        self.confirm(session, Part::Opener, token);
        let Some((process, export)) = self.entry(session, token) else {
            return Vec::new();
        };
        export.openers.insert(process);
        match export.owner {
            Owner::Unknown | Owner::Gone if charged => {
                export.owner = Owner::Gone;
                export.charged = Some(process);
                Vec::new()
            }
            // The message was lost with a session, or there was no session to send it to.
            Owner::Gone if export.charged.is_none_or(|it| it == process) => {
                export.charged = Some(process);
                vec![Command::Orphaned { to: session, token }]
            }
            _ => Vec::new(),
        }
    }

    /// The introduction is complete: what was known of the process and is not in it has ended.
    pub fn introduced(&mut self, session: Session) -> Vec<Command> {
        let Some(member) = self.current(session) else {
            return Vec::new();
        };
        let (tenant, process) = (member.tenant, member.process);
        let unconfirmed = std::mem::take(&mut member.unconfirmed);
        let ended = unconfirmed.into_iter().map(|(part, token)| match part {
            Part::Opener => self.close((tenant, token), process),
            Part::Owner => self.orphan((tenant, token)),
        });
        ended.flatten().collect()
    }

    /// The process exports this no longer: the memory is not its any more.
    pub fn withdraw(&mut self, session: Session, token: Token) -> Vec<Command> {
        self.confirm(session, Part::Owner, token);
        let Some(member) = self.current(session) else {
            return Vec::new();
        };
        let (key, owner) = ((member.tenant, token), Owner::Process(member.process));
        match self.exports.get(&key).is_some_and(|it| it.owner == owner) {
            true => self.orphan(key),
            false => Vec::new(),
        }
    }

    /// The process requests a piece of what another one of its tenant exports, from the first on. `now`: since this daemon began.
    pub fn redeem(
        &mut self,
        session: Session,
        ticket: u32,
        token: Token,
        index: u32,
        now: Micros,
    ) -> Vec<Command> {
        let refused = vec![Command::Refuse {
            to: session,
            ticket,
        }];
        let Some(member) = self.current(session) else {
            return refused;
        };
        let (tenant, process) = (member.tenant, member.process);
        let own = self.requests.values().filter(|it| it.opener == session);
        let early = self.early.iter().filter(|it| it.opener == session);
        if own.count() + early.count() >= MOST_REQUESTS {
            return refused;
        }
        let export = self.exports.get_mut(&(tenant, token));
        let Some(export) = export.filter(|it| it.owner != Owner::Unknown) else {
            if now >= RETURNS {
                return refused;
            }
            self.early.push(Early {
                opener: session,
                ticket,
                token,
                index,
                asked: now,
            });
            return Vec::new();
        };
        let owner = match export.owner {
            Owner::Process(owner) if owner != process => self.current.get(&owner).copied(),
            _ => None,
        };
        let Some(to) = owner else {
            return refused;
        };
        if index == 0 {
            export.openers.insert(process);
        } else if !export.openers.contains(&process) {
            return refused;
        }
        self.confirm(session, Part::Opener, token);
        self.ops += 1;
        let request = Request {
            owner: to,
            opener: session,
            ticket,
            due: Some(now + ANSWER),
        };
        self.requests.insert(self.ops, request);
        vec![Command::Serve {
            to,
            op: self.ops,
            token,
            index,
        }]
    }

    /// The process reports that the memory of a request is on its way back to the device.
    pub fn delayed(&mut self, session: Session, op: u64) {
        let request = self.requests.get_mut(&op);
        if let Some(request) = request.filter(|it| it.owner == session) {
            request.due = None;
        }
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

    /// When [`Exports::give_up`] has something to do, unless an answer comes before.
    pub fn next_due(&self) -> Option<Micros> {
        let early = self.early.first().map(|_| RETURNS);
        let dues = self.requests.values().filter_map(|it| it.due);
        dues.chain(early).min()
    }

    /// Ends the requests whose exporter has not answered, or not come again, in time.
    pub fn give_up(&mut self, now: Micros) -> Vec<Command> {
        let late = |_: &u64, it: &mut Request| it.due.is_some_and(|due| due <= now);
        let late = self.requests.extract_if(.., late);
        let late = late.map(|(_, it)| Command::Late {
            to: it.opener,
            ticket: it.ticket,
        });
        let unknown = self.early.extract_if(.., |_| now >= RETURNS);
        let unknown = unknown.map(|it| Command::Refuse {
            to: it.opener,
            ticket: it.ticket,
        });
        late.chain(unknown).collect()
    }

    /// The process has closed this, or could not open it.
    pub fn closed(&mut self, session: Session, token: Token) -> Vec<Command> {
        self.confirm(session, Part::Opener, token);
        (self.early).retain(|it| (it.opener, it.token) != (session, token));
        let Some(member) = self.current(session) else {
            return Vec::new();
        };
        let (key, process) = ((member.tenant, token), member.process);
        self.close(key, process)
    }

    /// A session has ended; its process may live on, with what it exports and has open.
    pub fn left(&mut self, session: Session) -> Vec<Command> {
        if let Some(member) = self.sessions.remove(&session)
            && self.current.get(&member.process) == Some(&session)
        {
            self.current.remove(&member.process);
        }
        self.early.retain(|it| it.opener != session);
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

    /// Whether processes of a tenant export memory, or have some of another process open.
    pub fn shares(&self, tenant: TenantId) -> bool {
        self.exports.range(all_of(tenant)).next().is_some()
    }

    /// Whether something is known of what a process exports or has open.
    pub fn concerns(&self, process: Process) -> bool {
        let mut exports = self.exports.values();
        exports.any(|it| it.owner == Owner::Process(process) || it.openers.contains(&process))
    }

    /// A process has ended.
    pub fn ended(&mut self, process: Process) -> Vec<Command> {
        let keys: Vec<_> = self.exports.keys().copied().collect();
        let mut commands = Vec::new();
        for key in keys {
            commands.extend(self.close(key, process));
            let export = self.exports.get(&key);
            if export.is_some_and(|it| it.owner == Owner::Process(process)) {
                commands.extend(self.orphan(key));
            }
        }
        commands
    }

    /// A session, if its process has not begun another one: messages of an old session that arrive late are ignored.
    fn current(&mut self, session: Session) -> Option<&mut Member> {
        let member = self.sessions.get_mut(&session)?;
        (self.current.get(&member.process) == Some(&session)).then_some(member)
    }

    fn confirm(&mut self, session: Session, part: Part, token: Token) {
        if let Some(member) = self.current(session) {
            member.unconfirmed.remove(&(part, token));
        }
    }

    /// An export of the session's tenant, known from now on if there is room for it.
    fn entry(&mut self, session: Session, token: Token) -> Option<(Process, &mut Export)> {
        let member = self.current(session)?;
        let (tenant, process) = (member.tenant, member.process);
        let key = (tenant, token);
        let known = self.exports.contains_key(&key);
        if !known && self.exports.range(all_of(tenant)).count() >= MOST_EXPORTS {
            return None;
        }
        Some((process, self.exports.entry(key).or_default()))
    }

    /// An export is the process's, if it is not another's; whose it was before.
    fn own(&mut self, session: Session, token: Token) -> Option<(Owner, &mut Export)> {
        self.confirm(session, Part::Owner, token);
        let (process, export) = self.entry(session, token)?;
        let before = export.owner;
        // Of another process, this one has learned the token, or made it up.
        if before != Owner::Unknown && before != Owner::Process(process) {
            return None;
        }
        export.owner = Owner::Process(process);
        Some((before, export))
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
            (true, Owner::Process(_)) if export.inherited => Vec::new(),
            (true, Owner::Process(owner)) => {
                let to = self.current.get(&owner).copied();
                to.map(|to| Command::Unshared { to, token: key.1 })
                    .into_iter()
                    .collect()
            }
            (true, _) => {
                self.exports.remove(&key);
                Vec::new()
            }
            (false, Owner::Gone) if charged => self.charge(key),
            (false, _) => Vec::new(),
        }
    }

    fn orphan(&mut self, key: (TenantId, Token)) -> Vec<Command> {
        let Some(export) = self.exports.get_mut(&key) else {
            return Vec::new();
        };
        export.owner = Owner::Gone;
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

/// The names of all exports of a tenant.
const fn all_of(tenant: TenantId) -> std::ops::RangeInclusive<(TenantId, Token)> {
    (tenant, Token::MIN)..=(tenant, Token::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TENANT: TenantId = TenantId(1);
    const TOKEN: Token = 77;
    const NOW: Micros = Micros::from_secs(5);

    /// Sessions 1, 2 and 3 of processes 101, 102 and 103 of one tenant; 9 of another's.
    fn exports() -> Exports {
        let mut exports = Exports::default();
        for session in 1..=3 {
            exports.join(session, TENANT, 100 + session);
        }
        exports.join(9, TenantId(2), 109);
        exports.export(1, TOKEN);
        exports
    }

    /// Opens it in a session; the exporter's session answers.
    fn open(exports: &mut Exports, session: Session) {
        let commands = exports.redeem(session, 5, TOKEN, 0, NOW);
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
        assert_eq!(exports.redeem(9, 1, TOKEN, 0, NOW), refused);
        // To export it itself does not help, nor does it harm.
        exports.export(9, TOKEN);
        assert_eq!(exports.redeem(9, 1, TOKEN, 0, NOW), refused);
        assert_eq!(exports.withdraw(9, TOKEN), []);
        open(&mut exports, 2);
        assert_eq!(exports.closed(9, TOKEN), []);
    }

    #[test]
    fn new_daemon_waits_for_exporters_of_the_one_before() {
        let early = Micros::from_secs(1);
        let mut exports = Exports::default();
        exports.join(2, TENANT, 102);
        exports.join(3, TENANT, 103);
        assert_eq!(exports.redeem(2, 5, TOKEN, 0, early), []);
        assert_eq!(exports.redeem(3, 6, TOKEN, 0, early), []);
        assert_eq!(exports.redeem(2, 7, TOKEN + 1, 0, early), []);
        // One that has it open comes before the exporter.
        assert_eq!(exports.opened(3, TOKEN, false), []);
        assert_eq!(exports.redeem(3, 8, TOKEN, 0, early), []);
        assert_eq!(exports.left(3), []);
        exports.join(1, TENANT, 101);
        let commands = exports.exported(1, TOKEN, false);
        let [Command::Serve { to: 1, op, .. }] = commands[..] else {
            panic!("{commands:?}");
        };
        let passed = Command::Pass { to: 2, ticket: 5 };
        assert_eq!(exports.served(1, op, true), Some(passed));
        // What none exports is refused when all should have come.
        assert_eq!(exports.give_up(early), []);
        assert_eq!(exports.next_due(), Some(RETURNS));
        let refused = [Command::Refuse { to: 2, ticket: 7 }];
        assert_eq!(exports.give_up(RETURNS), refused);
        assert_eq!(exports.next_due(), None);
        let refused = [Command::Refuse { to: 2, ticket: 9 }];
        assert_eq!(exports.redeem(2, 9, TOKEN + 1, 0, RETURNS), refused);
    }

    #[test]
    fn later_pieces_are_only_for_a_process_that_began() {
        let mut exports = exports();
        let refused = [Command::Refuse { to: 2, ticket: 1 }];
        assert_eq!(exports.redeem(2, 1, TOKEN, 1, NOW), refused);
        open(&mut exports, 2);
        assert_eq!(exports.redeem(2, 1, TOKEN, 1, NOW).len(), 1);
        let own = [Command::Refuse { to: 1, ticket: 1 }];
        assert_eq!(
            exports.redeem(1, 1, TOKEN, 0, NOW),
            own,
            "the exporter's own"
        );
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
    fn lost_messages_are_made_good_by_the_introduction() {
        let unshared = [Command::Unshared {
            to: 4,
            token: TOKEN,
        }];
        // Closed while the exporter is between sessions.
        let mut exports = exports();
        open(&mut exports, 2);
        assert_eq!(exports.left(1), []);
        assert_eq!(exports.closed(2, TOKEN), []);
        exports.join(4, TENANT, 101);
        assert_eq!(exports.exported(4, TOKEN, false), []);
        assert_eq!(exports.exported(4, TOKEN, true), unshared);
        // Closed while the opener is between sessions.
        let mut exports = self::exports();
        exports.join(4, TENANT, 101);
        exports.exported(4, TOKEN, false);
        assert_eq!(exports.introduced(4), []);
        let commands = exports.redeem(2, 5, TOKEN, 0, NOW);
        assert!(matches!(commands[..], [Command::Serve { to: 4, .. }]));
        exports.join(5, TENANT, 102);
        assert_eq!(exports.introduced(5), unshared);
        // Withdrawn while the exporter is between sessions, and what that makes of the opener.
        let mut exports = self::exports();
        open(&mut exports, 2);
        exports.left(2);
        exports.join(4, TENANT, 101);
        assert_eq!(exports.introduced(4), [], "no session to send it to");
        exports.join(5, TENANT, 102);
        let orphaned = [Command::Orphaned {
            to: 5,
            token: TOKEN,
        }];
        assert_eq!(exports.opened(5, TOKEN, false), orphaned);
        assert_eq!(exports.introduced(5), []);
        exports.join(6, TENANT, 102);
        assert_eq!(exports.opened(6, TOKEN, true), [], "it was received");
    }

    #[test]
    fn messages_of_a_process_s_old_session_tell_nothing() {
        let mut exports = exports();
        exports.join(4, TENANT, 102);
        assert_eq!(exports.introduced(4), []);
        open(&mut exports, 4);
        assert_eq!(exports.closed(2, TOKEN), [], "it was of an earlier opening");
        exports.join(5, TENANT, 101);
        exports.exported(5, TOKEN, true);
        assert_eq!(exports.introduced(5), []);
        assert_eq!(exports.withdraw(1, TOKEN), []);
        assert!(exports.concerns(101) && exports.concerns(102));
    }

    #[test]
    fn exporter_that_does_not_answer_is_given_up() {
        let mut exports = exports();
        assert_eq!(exports.next_due(), None);
        assert_eq!(exports.redeem(2, 6, TOKEN, 0, NOW).len(), 1);
        let later = NOW + Micros::from_secs(1);
        assert_eq!(exports.redeem(3, 7, TOKEN, 0, later).len(), 1);
        let due = NOW + ANSWER;
        assert_eq!(exports.next_due(), Some(due));
        assert_eq!(exports.give_up(Micros(due.0 - 1)), []);
        assert_eq!(
            exports.give_up(due),
            [Command::Late { to: 2, ticket: 6 }],
            "the other is a second younger"
        );
        assert_eq!(exports.served(1, 1, true), None);
        // Memory that is on its way back may take longer.
        exports.delayed(2, 2);
        assert!(exports.next_due().is_some(), "not the exporter's report");
        exports.delayed(1, 2);
        assert_eq!(exports.next_due(), None);
        let passed = Command::Pass { to: 3, ticket: 7 };
        assert_eq!(exports.served(1, 2, true), Some(passed));
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
        assert_eq!(exports.redeem(3, 1, TOKEN, 0, NOW), refused);
        assert_eq!(exports.closed(2, TOKEN), orphaned(3));
        assert_eq!(exports.ended(103), []);
        assert!(exports.exports.is_empty());
    }

    #[test]
    fn requests_end_with_the_exporter_s_session() {
        let mut exports = exports();
        assert_eq!(exports.redeem(2, 6, TOKEN, 0, NOW).len(), 1);
        let refused = [Command::Refuse { to: 2, ticket: 6 }];
        assert_eq!(exports.left(1), refused);
        assert_eq!(exports.served(1, 1, true), None);
        // One that has waited for an answer and is gone gets none.
        let mut exports = self::exports();
        assert_eq!(exports.redeem(2, 6, TOKEN, 0, NOW).len(), 1);
        assert_eq!(exports.left(2), []);
        assert_eq!(exports.served(1, 1, true), None);
    }

    #[test]
    fn inherited_export_is_never_unshared() {
        for exporter_first in [true, false] {
            for open in [true, false] {
                let mut exports = Exports::default();
                exports.join(1, TENANT, 101);
                exports.join(2, TENANT, 102);
                let exported = |exports: &mut Exports| {
                    assert_eq!(exports.exported(1, TOKEN, open), []);
                };
                if exporter_first {
                    exported(&mut exports);
                }
                if open {
                    assert_eq!(exports.opened(2, TOKEN, false), []);
                }
                if !exporter_first {
                    exported(&mut exports);
                }
                if !open {
                    self::open(&mut exports, 2);
                }
                // Where it was open, a process that has not connected may have it open too.
                let unshared = Command::Unshared {
                    to: 1,
                    token: TOKEN,
                };
                let expected = if open { vec![] } else { vec![unshared] };
                assert_eq!(exports.closed(2, TOKEN), expected);
                exports.join(3, TENANT, 101);
                assert_eq!(exports.exported(3, TOKEN, open), []);
            }
        }
    }

    #[test]
    fn export_of_another_process_cannot_be_taken_over() {
        let mut exports = exports();
        exports.export(2, TOKEN);
        assert_eq!(exports.withdraw(2, TOKEN), []);
        open(&mut exports, 3);
    }
}
