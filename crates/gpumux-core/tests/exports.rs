//! Processes that share memory through daemons that restart, in every order of messages: memory that a process has open stays
//! where it is, and memory that none has open may move again.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use gpumux_core::{
    Micros, TenantId,
    exports::{Command, Exports, Process, Session, Token},
};
use proptest::prelude::*;

const TENANT: TenantId = TenantId(1);
const PROCESSES: usize = 4;

/// To the daemon.
#[derive(Clone, Copy, Debug)]
enum Up {
    Exported(Token, bool),
    Opened(Token, bool),
    Introduced,
    Export(Token),
    Withdraw(Token),
    Redeem(u32, Token),
    Closed(Token),
    Piece(u64, bool),
}

/// A process with its library.
#[derive(Default)]
struct Member {
    session: Option<Session>,
    up: VecDeque<Up>,
    down: VecDeque<Command>,
    /// What it exports, and whether the memory must stay.
    exports: BTreeMap<Token, bool>,
    /// What is mapped, and whether it is accounted to this process.
    mapped: BTreeMap<Token, bool>,
    /// What is being opened, by ticket, and whether it is this process's to account.
    opening: BTreeMap<u32, (Token, bool)>,
    tickets: u32,
    /// It does nothing; the daemon may lose it.
    stopped: bool,
}

#[derive(Default)]
struct World {
    daemon: Exports,
    members: BTreeMap<Process, Member>,
    /// Sessions that have ended, which the daemon has not noticed, with what they had sent.
    lost: Vec<(Session, Process, VecDeque<Up>)>,
    /// Processes whose end the daemon notices after their sessions.
    watched: BTreeSet<Process>,
    names: u64,
    /// What was open when a daemon began.
    inherited: BTreeSet<Token>,
    restarts: usize,
    restarts_allowed: bool,
}

impl World {
    fn new(restarts_allowed: bool) -> Self {
        let mut world = Self {
            restarts_allowed,
            ..Self::default()
        };
        for _ in 0..PROCESSES {
            world.start();
        }
        world
    }

    fn name(&mut self) -> u64 {
        self.names += 1;
        self.names
    }

    fn start(&mut self) {
        let process = self.name();
        self.members.insert(process, Member::default());
    }

    /// The process so named, from 0.
    fn member(&mut self, n: usize) -> (Process, &mut Member) {
        let at = n % self.members.len();
        let (process, member) = self.members.iter_mut().nth(at).expect("it is below");
        (*process, member)
    }

    fn connect(&mut self, n: usize) {
        let session = self.name();
        let (process, member) = self.member(n);
        if member.session.is_some() {
            return;
        }
        member.session = Some(session);
        let exports = member.exports.iter();
        let exports = exports.map(|(token, open)| Up::Exported(*token, *open));
        let opening = member.opening.values();
        let opening = opening.map(|(token, charged)| Up::Opened(*token, *charged));
        let mapped = member.mapped.iter();
        let mapped = mapped.map(|(token, charged)| Up::Opened(*token, *charged));
        let all = exports.chain(opening).chain(mapped);
        member.up = all.chain([Up::Introduced]).collect();
        self.daemon.join(session, TENANT, process);
    }

    fn disconnect(&mut self, n: usize) {
        let (process, member) = self.member(n);
        member.down.clear();
        let up = std::mem::take(&mut member.up);
        if let Some(session) = member.session.take() {
            self.lost.push((session, process, up));
        }
    }

    fn receive(&mut self, session: Session, message: Up) {
        let daemon = &mut self.daemon;
        let commands = match message {
            Up::Exported(token, open) => daemon.exported(session, token, open),
            Up::Opened(token, charged) => daemon.opened(session, token, charged),
            Up::Introduced => daemon.introduced(session),
            Up::Export(token) => {
                daemon.export(session, token);
                vec![]
            }
            Up::Withdraw(token) => daemon.withdraw(session, token),
            Up::Redeem(ticket, token) => daemon.redeem(session, ticket, token, 0, Micros::ZERO),
            Up::Closed(token) => daemon.closed(session, token),
            Up::Piece(op, found) => daemon.served(session, op, found).into_iter().collect(),
        };
        self.send(commands);
    }

    fn send(&mut self, commands: Vec<Command>) {
        for command in commands {
            let to = match command {
                Command::Serve { to, .. }
                | Command::Pass { to, .. }
                | Command::Refuse { to, .. }
                | Command::Late { to, .. }
                | Command::Unshared { to, .. }
                | Command::Orphaned { to, .. } => to,
            };
            let mut members = self.members.values_mut();
            if let Some(member) = members.find(|it| it.session == Some(to)) {
                member.down.push_back(command);
            }
        }
    }

    /// The daemon receives the next message of a process.
    fn up(&mut self, n: usize) -> bool {
        let (_, member) = self.member(n);
        let next = member.session.zip(member.up.pop_front());
        next.is_some_and(|(session, message)| {
            self.receive(session, message);
            true
        })
    }

    /// A process receives the next message of the daemon.
    fn down(&mut self, n: usize) -> bool {
        let (_, member) = self.member(n);
        let Some(command) = member.down.pop_front() else {
            return false;
        };
        match command {
            Command::Serve { op, token, .. } => {
                let open = member.exports.get_mut(&token);
                let found = open.map(|open| *open = true).is_some();
                member.up.push_back(Up::Piece(op, found));
            }
            Command::Pass { ticket, .. } => {
                if let Some((token, charged)) = member.opening.remove(&ticket) {
                    member.mapped.insert(token, charged);
                }
            }
            Command::Refuse { ticket, .. } | Command::Late { ticket, .. } => {
                member.give_up(ticket);
            }
            Command::Unshared { token, .. } => {
                if let Some(open) = member.exports.get_mut(&token) {
                    *open = false;
                }
            }
            Command::Orphaned { token, .. } => {
                let opening = member.opening.values_mut();
                let mut opening = opening.filter(|it| it.0 == token).map(|it| &mut it.1);
                if let Some(charged) = opening.next().or(member.mapped.get_mut(&token)) {
                    *charged = true;
                }
            }
        }
        true
    }

    /// The daemon looks at a session that has ended: at a message that is left of it, or at its end.
    fn settle(&mut self, ends: bool) -> bool {
        let Some((session, process, up)) = self.lost.first_mut() else {
            return false;
        };
        let (session, process) = (*session, *process);
        let next = if ends { None } else { up.pop_front() };
        if let Some(message) = next {
            self.receive(session, message);
            return true;
        }
        self.lost.remove(0);
        let commands = self.daemon.left(session);
        self.send(commands);
        if !self.members.contains_key(&process) {
            let commands = self.daemon.ended(process);
            self.send(commands);
        } else if self.daemon.concerns(process) {
            self.watched.insert(process);
        }
        true
    }

    fn export(&mut self, n: usize) {
        let token = Token::from(self.name());
        let (_, member) = self.member(n);
        member.exports.insert(token, false);
        member.tell(Up::Export(token));
    }

    fn open(&mut self, n: usize, other: usize, which: usize) {
        let (exporter, from) = self.member(other);
        let token = from.exports.keys().nth(which % from.exports.len().max(1));
        let Some(token) = token.copied() else {
            return;
        };
        let (process, member) = self.member(n);
        let known = member.mapped.contains_key(&token)
            || member.opening.values().any(|opening| opening.0 == token);
        if process == exporter || known || member.session.is_none() {
            return;
        }
        member.tickets += 1;
        let ticket = member.tickets;
        member.opening.insert(ticket, (token, false));
        member.tell(Up::Redeem(ticket, token));
    }

    fn end(&mut self, n: usize) {
        let (process, _) = self.member(n);
        self.disconnect(n);
        self.members.remove(&process);
        if self.watched.remove(&process) {
            let commands = self.daemon.ended(process);
            self.send(commands);
        }
        self.start();
    }

    fn restart(&mut self) {
        self.daemon = Exports::default();
        for n in 0..PROCESSES {
            self.disconnect(n);
        }
        self.lost.clear();
        self.watched.clear();
        let exports = self.members.values().flat_map(|it| &it.exports);
        let open = exports.filter(|(_, open)| **open).map(|(token, _)| *token);
        self.inherited.extend(open);
        self.restarts += 1;
    }

    fn step(&mut self, (what, n, other): (u8, usize, usize)) {
        let (_, member) = self.member(n);
        if what == 34 {
            member.stopped ^= true;
        }
        if member.stopped && !matches!(what, 15 | 25 | 26 | 28) {
            return;
        }
        match what {
            // Most messages arrive soon: else no process would ever have anything open.
            0..6 => (0..other % 6).for_each(|_| _ = self.up(n)),
            6..12 => (0..other % 6).for_each(|_| _ = self.down(n)),
            12..15 => self.connect(n),
            15 if other < 6 => self.disconnect(n),
            16..18 => self.export(n),
            18..21 | 29..34 => self.open(n, other, other / PROCESSES),
            21 | 22 => {
                let (_, member) = self.member(n);
                let at = other % member.mapped.len().max(1);
                if let Some(token) = member.mapped.keys().nth(at).copied() {
                    member.mapped.remove(&token);
                    member.tell(Up::Closed(token));
                }
            }
            23 => {
                let (_, member) = self.member(n);
                let at = other % member.exports.len().max(1);
                if let Some(token) = member.exports.keys().nth(at).copied() {
                    member.exports.remove(&token);
                    member.tell(Up::Withdraw(token));
                }
            }
            24 => {
                let (_, member) = self.member(n);
                if let Some(ticket) = member.opening.keys().next().copied() {
                    member.give_up(ticket);
                }
            }
            25 => drop(self.settle(other % 2 == 0)),
            26 if other < 3 => self.end(n),
            // The process executes another program: it is the same process, and has nothing any more.
            27 if other < 3 => {
                self.disconnect(n);
                *self.member(n).1 = Member::default();
            }
            28 if self.restarts_allowed && other < 6 => self.restart(),
            _ => {}
        }
        self.check();
    }

    /// What a process has open stays where it is, whatever the daemon has received; no memory is accounted to two processes that have
    /// it open.
    fn check(&self) {
        for (exporter, member) in &self.members {
            for (token, open) in &member.exports {
                let mut others = self.members.iter().filter(|(it, _)| *it != exporter);
                let used = others.any(|(_, it)| it.mapped.contains_key(token));
                assert!(!used || *open, "export {token} of {exporter} may move");
            }
        }
        let mapped = self.members.values().flat_map(|it| &it.mapped);
        let mut charged = mapped.filter(|(_, charged)| **charged).map(|(it, _)| it);
        let mut once = BTreeSet::new();
        assert!(charged.all(|token| once.insert(token)), "accounted twice");
    }

    /// All messages arrive, and no process waits any longer. Then memory that none has open may move, and all memory is accounted to a process.
    fn end_all_messages(&mut self) {
        for n in 0..PROCESSES {
            self.member(n).1.stopped = false;
            self.connect(n);
            let (_, member) = self.member(n);
            let waiting: Vec<u32> = member.opening.keys().copied().collect();
            waiting.into_iter().for_each(|it| member.give_up(it));
        }
        loop {
            let mut any = self.settle(false);
            for n in 0..PROCESSES {
                any |= self.up(n) | self.down(n);
            }
            self.check();
            if !any {
                break;
            }
        }
        let used = |token: &Token| {
            self.members
                .values()
                .any(|it| it.mapped.contains_key(token))
        };
        let mut exported = BTreeSet::new();
        for (token, open) in self.members.values().flat_map(|it| &it.exports) {
            exported.insert(token);
            if !self.inherited.contains(token) {
                assert_eq!(*open, used(token), "export {token}");
            }
        }
        if self.restarts == 0 {
            let mapped = self.members.values().flat_map(|it| &it.mapped);
            let orphans = mapped.filter(|(token, _)| !exported.contains(token));
            let mut accounted: BTreeMap<Token, bool> = BTreeMap::new();
            for (token, charged) in orphans {
                *accounted.entry(*token).or_default() |= charged;
            }
            assert!(accounted.values().all(|it| *it), "{accounted:?}");
        }
    }
}

impl Member {
    fn tell(&mut self, message: Up) {
        if self.session.is_some() {
            self.up.push_back(message);
        }
    }

    fn give_up(&mut self, ticket: u32) {
        if let Some((token, _)) = self.opening.remove(&ticket) {
            self.tell(Up::Closed(token));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: ProptestConfig::default().cases * 16, failure_persistence: None, ..Default::default() })]

    #[test]
    fn memory_stays_where_it_is_while_a_process_has_it_open(
        restarts: bool,
        steps in prop::collection::vec((0u8..35, 0..PROCESSES, 0usize..16), 1..400)
    ) {
        let mut world = World::new(restarts);
        for n in 0..PROCESSES {
            world.connect(n);
        }
        for step in steps {
            world.step(step);
        }
        world.end_all_messages();
    }
}
