//! Timeslices and freezes in software: which channel groups of a device may launch kernels, where the driver refuses the controls.
//!
//! The controller plans timeslices and run states as always. The hardware's runlist would carry them out; here it is
//! [`Runlist::step`], which lets one group at a time launch, or several if a timeslice cannot keep them apart. It is a pure state
//! machine: the daemon reports what it knows, and writes the [`Permit`] of each group where the group's process reads it.
//!
//! A running kernel is not interrupted. A group whose time is over gets [`Permit::Hold`], and the next one follows when its
//! kernels have ended. What it used beyond its timeslice is taken off its next ones, so that long kernels gain nothing. For the
//! same reason a program that waits for each of its kernels keeps its turn for a moment while all others owe.
//!
//! A latency group whose neighbours have a longer timeslice launches kernel by kernel ([`crate::Launches`]). Its turn ends in its first
//! gap on the device. In a neighbour's turn it goes on launching: the driver's own timeslices run what it launches beside the
//! little that the neighbour may have outstanding. Several such groups may have as little outstanding then, so that each has its share in its own turn.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{DomainId, Micros, RunState, Timeslice};

/// How programs are scheduled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mechanism {
    /// By the controls where the driver allows them, else at their launches.
    Auto,
    /// By the driver's controls. A program for which it refuses them runs unmanaged.
    #[default]
    Controls,
    /// At their launches: a kernel is launched when its program may run.
    Launches,
}

impl std::str::FromStr for Mechanism {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "controls" => Ok(Self::Controls),
            "launches" => Ok(Self::Launches),
            _ => Err(format!(
                "unknown mechanism `{text}`: use auto, controls or launches"
            )),
        }
    }
}

/// Launched and not done, at most, in time, of a group that others preempt: a request waits for that much and one kernel.
pub const OUTSTANDING: Micros = Micros(400);
/// The same at most, of a group that only gives way at the end of a timeslice.
const MOST_OUTSTANDING: Micros = Micros(4_000);
/// A timeslice of which at most this part is launched ahead, as its reciprocal.
const AHEAD: u64 = 8;
/// A group with a shorter timeslice gives way at once to one with a longer.
const SHORT: Timeslice = Timeslice(500);
/// Beyond a timeslice a group owes no more, nor for its kernels that ran while it was frozen.
const MOST_OWED: Micros = Micros::from_millis(100);
/// How long a group that launched more than [`MOST_OUTSTANDING`] ahead of a freeze launches no more than that ahead.
const SHALLOW: Micros = Micros::from_secs(10);
/// A group with nothing to launch keeps its turn for this part of what others owe, as its reciprocal, ...
const AWAITED: u64 = 4;
/// ... and for so long at most: hosts launch anew 0.1 to 1 ms after they were waited for.
const LONGEST_AWAITED: Micros = Micros::from_millis(1);
/// How long the next group waits for kernels of the last. They may wait for one that is held: then both must run for a while.
pub const PATIENCE: Micros = Micros::from_millis(50);

/// Whether a group may launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Permit {
    /// As much as it likes.
    Free,
    /// The same, and gaps between its kernels shall be known soon.
    Watched,
    /// As long as so much is launched and not done.
    Budget(Micros),
    /// Not now.
    Hold,
}

/// A channel group as it is now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member {
    /// Its name.
    pub id: DomainId,
    /// What the plan gave it.
    pub timeslice: Timeslice,
    /// Whether the plan lets it run.
    pub run: RunState,
    /// Something was launched that is not done.
    pub running: bool,
    /// A thread waits to launch.
    pub waits: bool,
    /// Its tenant's class is latency.
    pub latency: bool,
    /// How many pieces of its work had been launched when none was left on the device, as is known so far.
    pub done: u64,
    /// How many pieces it has launched.
    pub launched: u64,
}

impl Member {
    /// Whether it would use the device.
    fn wants(&self) -> bool {
        self.run == RunState::Enabled && (self.running || self.waits)
    }

    fn gives_way(&self) -> bool {
        self.timeslice < SHORT
    }

    /// Its time is that of others, in turn, which run in its gaps.
    fn leaves_gaps_to(&self, other: &Self) -> bool {
        self.latency && !other.latency && !self.gives_way() && !other.gives_way()
    }
}

/// Whose time it is.
#[derive(Clone, Copy, Debug)]
struct Turn {
    id: DomainId,
    since: Micros,
    /// [`Member::done`] when it began.
    done: u64,
}

/// See the module's description.
#[derive(Clone, Debug, Default)]
pub struct Runlist {
    current: Option<Turn>,
    /// Groups whose kernels the next one waits for, and until when at most.
    draining: Option<(Vec<DomainId>, Micros)>,
    /// Groups whose kernels were waited for in vain, until they end; and what they had launched then.
    endless: BTreeMap<DomainId, u64>,
    /// For how long groups were frozen while their kernels ran, in µs, and when the plan last had them frozen.
    overran: BTreeMap<DomainId, (u64, Micros)>,
    /// Groups that launched much ahead of a freeze, and until when they may not.
    deep: BTreeMap<DomainId, Micros>,
    /// Whose time it was last.
    last: Option<DomainId>,
    /// By how much groups exceeded their time, in µs.
    debts: BTreeMap<DomainId, u64>,
    /// When groups last had something to do.
    worked: BTreeMap<DomainId, Micros>,
    /// When the last step was.
    stepped: Micros,
}

impl Turn {
    fn new(of: &Member, since: Micros) -> Self {
        let Member { id, done, .. } = *of;
        Self { id, since, done }
    }
}

impl Runlist {
    /// What each of these may do now, in their order, and when to ask again although nothing happens. They are all groups of the
    /// device, by rising names.
    pub fn step(&mut self, now: Micros, members: &[Member]) -> (Vec<Permit>, Option<Micros>) {
        let passed = now.saturating_sub(self.stepped).0;
        self.stepped = now;
        let members = &*self.taken_for(passed, members);
        self.pay(passed, members);
        for it in members.iter().filter(|it| it.running || it.wants()) {
            self.worked.insert(it.id, now);
        }
        (self.worked).retain(|_, worked| now < *worked + LONGEST_AWAITED);
        self.drain(now, members);
        self.leave(now, members);
        if self.draining.is_none() && self.current.is_none() {
            self.current = self.choose(now, members).map(|it| Turn::new(it, now));
        }
        let next = match (&self.draining, self.current) {
            (Some((_, until)), _) => Some(*until),
            (None, Some(turn)) => {
                let contended = members.iter().filter(|it| it.wants()).count() > 1;
                let current = members.iter().find(|it| it.id == turn.id && contended);
                current.map(|it| (turn.since + self.length(it)).max(now + Micros(1)))
            }
            (None, None) => None,
        };
        let permits = members.iter().map(|it| self.permit(it, members));
        (permits.collect(), next)
    }

    /// How long a group may run in a row.
    fn length(&self, of: &Member) -> Micros {
        Micros(of.timeslice.0).saturating_sub(Micros(self.debt(of)))
    }

    /// The groups, as they are treated. A freeze lasts longer by as much of it as a group's kernels ran into, once they have ended, and the group launches less
    /// ahead from then on. One whose kernels do not end wants nothing as long as it launches nothing: they may wait for the host, or for others.
    fn taken_for(&mut self, passed: u64, members: &[Member]) -> Vec<Member> {
        let find = |id: &DomainId| members.iter().find(|it| it.id == *id);
        (self.endless).retain(|id, launched| {
            find(id).is_some_and(|it| it.running && it.launched == *launched)
        });
        self.overran.retain(|id, _| find(id).is_some());
        let now = self.stepped;
        (self.deep).retain(|id, until| find(id).is_some() && now < *until);
        let taken_for = |it: &Member| {
            let (overran, frozen) = self.overran.entry(it.id).or_default();
            if it.run == RunState::Frozen {
                *frozen = now;
            } else if it.running && *overran > 0 && now >= *frozen + PATIENCE {
                self.endless.insert(it.id, it.launched);
            }
            let running = it.running && !self.endless.contains_key(&it.id);
            let wanted = members
                .iter()
                .any(|other| other.id != it.id && other.wants());
            *overran = match it.run {
                RunState::Frozen if running => (*overran + passed).min(MOST_OWED.0),
                RunState::Enabled if !wanted => 0,
                RunState::Enabled if !running => overran.saturating_sub(passed),
                _ => *overran,
            };
            if *overran > MOST_OUTSTANDING.0 {
                self.deep.insert(it.id, now + SHALLOW);
            }
            let run = match *overran {
                0 => it.run,
                _ => RunState::Frozen,
            };
            Member {
                run,
                running,
                ..*it
            }
        };
        members.iter().map(taken_for).collect()
    }

    /// A group that leaves the device to others pays what its share of that time would be; one that has it alone owes none for that.
    fn pay(&mut self, passed: u64, members: &[Member]) {
        let current = self.current.map(|turn| turn.id);
        self.debts.retain(|id, debt| {
            let Some(of) = members.iter().find(|it| it.id == *id) else {
                return false;
            };
            let has = |it: &&Member| it.wants() || current == Some(it.id);
            let others = members.iter().filter(|it| it.id != *id).filter(has);
            let theirs: u128 = others.map(|it| u128::from(it.timeslice.0)).sum();
            if of.wants() && theirs > 0 {
                // It pays by its turns.
                return true;
            }
            let own = u128::from(of.timeslice.0.max(1));
            *debt = debt.saturating_sub((u128::from(passed) * own / (own + theirs)) as u64);
            *debt > 0
        });
    }

    /// The kernels of those before have ended, or take too long.
    fn drain(&mut self, now: Micros, members: &[Member]) {
        let Some((of, until)) = &self.draining else {
            return;
        };
        if now < *until && members.iter().any(|it| it.running && of.contains(&it.id)) {
            return;
        }
        let running = members
            .iter()
            .filter(|it| it.running && of.contains(&it.id));
        self.endless.extend(running.map(|it| (it.id, it.launched)));
        self.draining = None;
        // What it used until now is its, where no other launches in its time.
        if let Some(turn) = self.current.take()
            && let Some(member) = (members.iter()).find(|it| it.id == turn.id && !it.gives_way())
            && !(members.iter()).any(|it| it.wants() && it.leaves_gaps_to(member))
        {
            let debt = self.debts.entry(turn.id).or_default();
            let used = now.saturating_sub(turn.since).0 + *debt;
            *debt = (used.saturating_sub(member.timeslice.0)).min(member.timeslice.0 + MOST_OWED.0);
        }
    }

    /// The current group stops, if its time is over.
    fn leave(&mut self, now: Micros, members: &[Member]) {
        let Some(Turn { id, since, done }) = self.current else {
            // Kernels of a group that was frozen may still run.
            let left = members.iter().filter(|it| {
                it.running && it.run == RunState::Frozen && !self.endless.contains_key(&it.id)
            });
            let left: Vec<DomainId> = left.map(|it| it.id).collect();
            if !left.is_empty() && self.draining.is_none() && members.iter().any(Member::wants) {
                self.draining = Some((left, now + PATIENCE));
            }
            return;
        };
        let mut others = members.iter().filter(|it| it.id != id && it.wants());
        let current = members.iter().find(|it| it.id == id);
        let stays = |it: &&Member| it.running || it.wants() || self.is_awaited(now, it, members);
        let Some(current) = current.filter(stays) else {
            (self.current, self.draining) = (None, None);
            return;
        };
        let alike = |it: &Member| it.gives_way() == current.gives_way();
        // No other waits for its end.
        if self.draining.is_none()
            && !others.clone().any(alike)
            && let Some(turn) = &mut self.current
        {
            turn.since = now;
        }
        // One with a longer timeslice does not wait for kernels that run.
        if let Some(other) = others
            .clone()
            .find(|it| current.gives_way() && !it.gives_way())
        {
            (self.current, self.draining) = (Some(Turn::new(other, now)), None);
            return;
        }
        if current.done != done && others.clone().any(|it| current.leaves_gaps_to(it)) {
            (self.current, self.draining) = (None, None);
            return;
        }
        let frozen = current.run == RunState::Frozen;
        let over = since + self.length(current) <= now;
        // Those that give way to it would not run.
        let follows = |it: &Member| frozen || over && alike(it);
        if self.draining.is_none() && others.any(follows) {
            self.draining = Some((vec![id], now + PATIENCE));
        }
    }

    fn debt(&self, of: &Member) -> u64 {
        self.debts.get(&of.id).copied().unwrap_or(0)
    }

    /// How many whole timeslices a group owes.
    fn owes(&self, of: &Member) -> u64 {
        self.debt(of) / of.timeslice.0.max(1)
    }

    /// Whether a group that has nothing to launch is waited for a moment, since all that want the device owe more.
    fn is_awaited(&self, now: Micros, of: &Member, members: &[Member]) -> bool {
        let own = self.owes(of);
        let more = |it: &Member| match self.owes(it) > own {
            true => self.debt(it),
            false => 0,
        };
        let others = members
            .iter()
            .filter(|it| it.id != of.id && it.wants() && it.gives_way() == of.gives_way());
        let owed = others.map(more).min().unwrap_or(0);
        let awaited = Micros(owed / AWAITED).min(LONGEST_AWAITED);
        let worked = self.worked.get(&of.id);
        of.run == RunState::Enabled && worked.is_some_and(|it| now < *it + awaited)
    }

    /// The next one: in turn, the ones before that others must give way to. One that owes a whole timeslice is left out once for it.
    fn choose<'a>(&mut self, now: Micros, members: &'a [Member]) -> Option<&'a Member> {
        let wants = |it: &&Member| it.wants() || self.is_awaited(now, it, members);
        let wanting = members.iter().filter(wants);
        let gives_way = wanting.clone().map(Member::gives_way).min()?;
        let mut wanting: Vec<&'a Member> =
            wanting.filter(|it| it.gives_way() == gives_way).collect();
        let after = |it: &&&Member| self.last.is_some_and(|last| it.id <= last);
        let before = wanting.iter().filter(after).count();
        wanting.rotate_left(before);
        if let [only] = wanting[..] {
            self.last = Some(only.id);
            return Some(only);
        }
        // Each round pays something.
        let found = wanting
            .iter()
            .cycle()
            .find(|it| match self.debts.get_mut(&it.id) {
                Some(debt) if *debt >= it.timeslice.0 => {
                    *debt -= it.timeslice.0.max(1);
                    false
                }
                _ => true,
            });
        self.last = found.map(|it| it.id);
        found.copied()
    }

    fn permit(&self, member: &Member, members: &[Member]) -> Permit {
        if member.run == RunState::Frozen {
            return Permit::Hold;
        }
        if members.len() == 1 {
            return Permit::Free;
        }
        let current = self.current.map(|turn| turn.id);
        let may = match members.iter().find(|it| Some(it.id) == current) {
            Some(it) if it.id == member.id => self.draining.is_none(),
            Some(it) if member.leaves_gaps_to(it) => true,
            Some(it) => it.gives_way() && !member.gives_way(),
            None => self.draining.is_none() || !member.gives_way(),
        };
        let mut neighbours = (members.iter())
            .filter(|it| member.leaves_gaps_to(it))
            .peekable();
        let has_neighbours = neighbours.peek().is_some();
        // In a neighbour's time nothing but the driver's timeslices keeps it apart from others that launch then, too.
        let own = current == Some(member.id);
        let launches_too = |it: &Member| it.id != member.id && it.latency && it.wants();
        let several = !own && has_neighbours && members.iter().any(launches_too);
        let deep = self.deep.contains_key(&member.id);
        let minds = |it: &Member| it.id != member.id && (it.latency || it.wants());
        let ahead = Micros(member.timeslice.0 / AHEAD).clamp(OUTSTANDING, MOST_OUTSTANDING);
        match may {
            false => Permit::Hold,
            true if several => Permit::Budget(OUTSTANDING),
            true if !deep && neighbours.any(Member::wants) => Permit::Watched,
            true if !deep && (has_neighbours || member.timeslice == Timeslice::MAX) => Permit::Free,
            true if member.gives_way() => Permit::Budget(OUTSTANDING),
            true if !members.iter().any(minds) => Permit::Budget(MOST_OUTSTANDING),
            true => Permit::Budget(ahead),
        }
    }
}

#[cfg(test)]
mod tests;
