//! The accounts behind a plan: what each user, each of its tenants and each of their domains is owed.
//!
//! *Lag* is the device time that a node of this tree was entitled to while it had work, less the device time that it received (as in
//! EEVDF), counted in its parent's device time. Of a domain it is summed over the levels ([`Memory::lag`]): so a user's total doesn't depend
//! on how its jobs are split. The lags of all with work sum to zero on each level, also when tenants come and go ([`Memory::settle`]).

use std::collections::BTreeSet;

use super::greedy::{Habit, Looks, Seen};
use crate::{Demand, DomainId, DomainState, Micros, RunState, Snapshot, TenantId, UserId};

/// A pause of this length forfeits nothing of what a node is owed; a longer one forfeits all.
pub(super) const GRACE: Micros = Micros::from_millis(5);
/// What a policy must remember from one plan to the next. The caller keeps it, one per device,
/// and starts with the default. Copied for every draft of a plan: vectors in the order of the snapshot, not maps.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Memory {
    at: Option<Micros>,
    /// Which of the rotating domains runs, or did last.
    pub(super) owner: Option<Owner>,
    /// Timeslices keep the shares of some, roughly: of what they leave owed, no more than this counts.
    most: Option<f64>,
    /// The device, its users, their tenants and the domains of these, each behind its parent.
    nodes: Vec<Node>,
    /// In the order of the last snapshot.
    pub(super) domains: Vec<Track>,
    looks: Looks,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Name {
    Device,
    User(UserId),
    Tenant(TenantId),
    Domain(DomainId),
}

/// The owner of the current quantum.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Owner {
    pub(super) id: DomainId,
    /// It was not entitled to it: none that is had work.
    pub(super) borrowed: bool,
    /// It has used its quantum up, and keeps it only until a latency domain comes back.
    pub(super) over: bool,
}

/// The device, a user, a tenant or a domain.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Node {
    name: Name,
    /// Where its parent is; of the device, itself.
    parent: usize,
    /// In µs; negative if it is ahead.
    lag: f64,
    /// Share of the device; while it has no work, the one that it would have.
    share: f64,
    /// The same of its parent's share.
    part: f64,
    /// Has work.
    wants: bool,
    /// It might have run since the plan before and did not, and whether it had work is not known: it is owed nothing for that time.
    unknown: bool,
    /// When it last had work.
    left: Micros,
}

/// What is remembered of one domain.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Track {
    pub(super) id: DomainId,
    /// Where the device, its user, its tenant and its own node are.
    path: [usize; 4],
    received: Micros,
    /// Its lag, summed over the levels.
    pub(super) lag: f64,
    /// How much of its current quantum it has used, in µs.
    pub(super) used: f64,
    /// When it last became the owner.
    pub(super) since: Micros,
    /// It ran so far ahead, of its share or of its limit, that it must wait until it is level.
    pub(super) exhausted: bool,
    /// The largest share that it may receive, where timeslices keep the shares; all, where turns do.
    pub(super) ceiling: f64,
    /// By how much it received more, in µs.
    pub(super) over: f64,
    pub(super) habit: Habit,
    wait: Option<Wait>,
    /// Since when its gang runs.
    runs: Option<Micros>,
}

/// That a domain waits for its gang.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Wait {
    Since(Micros),
    /// It did so for long, until then.
    Over(Micros),
}

/// What a domain, or those below a node, are entitled to from now on.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Entitled {
    pub(super) share: f64,
    /// See [`Track::ceiling`].
    pub(super) ceiling: f64,
    /// Its share is one of those that sum to 1: see [`Memory::counted`].
    pub(super) counts: bool,
    pub(super) wants: bool,
    /// It has work for certain.
    pub(super) busy: bool,
}

impl Memory {
    fn track(&self, id: DomainId) -> Option<&Track> {
        self.domains.iter().find(|track| track.id == id)
    }

    fn node(&self, track: &Track) -> &Node {
        &self.nodes[track.path[3]]
    }

    /// The device time a domain is owed, in µs; negative if it is ahead.
    pub fn lag(&self, id: DomainId) -> f64 {
        self.track(id).map_or(0.0, |track| track.lag)
    }

    /// The share of the device to which a domain was entitled at the last plan; if it was idle, the share that
    /// it would have had.
    pub fn share(&self, id: DomainId) -> f64 {
        self.track(id).map_or(0.0, |track| self.node(track).share)
    }

    /// How a domain waits for its gang.
    pub(crate) fn wait(&self, id: DomainId) -> Option<Wait> {
        self.track(id)?.wait
    }

    /// Since when the domain's gang runs, if it does.
    pub(crate) fn runs_since(&self, id: DomainId) -> Option<Micros> {
        self.track(id)?.runs
    }

    /// When it was planned for last.
    pub(crate) fn planned_at(&self) -> Option<Micros> {
        self.at
    }

    /// Takes note of the domains that wait for their gangs from now on, of the end of waits that were at least so long, and of
    /// the domains whose gangs run.
    pub(crate) fn note_gangs(
        &mut self,
        now: Micros,
        waiting: &BTreeSet<DomainId>,
        running: &BTreeSet<DomainId>,
        long: Micros,
    ) {
        for track in &mut self.domains {
            track.wait = match (track.wait, waiting.contains(&track.id)) {
                (Some(Wait::Since(at)), true) => Some(Wait::Since(at)),
                (_, true) => Some(Wait::Since(now)),
                (Some(Wait::Since(at)), false) => (at + long <= now).then_some(Wait::Over(now)),
                (over, false) => over,
            };
            let since = track.runs.unwrap_or(now);
            track.runs = running.contains(&track.id).then_some(since);
        }
    }

    /// Forgets what is gone and charges the others for the time since the last plan.
    pub(crate) fn charge(&mut self, snapshot: &Snapshot) {
        let now = snapshot.now;
        let aligned = self.align(snapshot);
        let pairs = || self.domains.iter().zip(&snapshot.domains);
        if aligned
            && self.at == Some(now)
            && pairs().all(|(track, domain)| track.received == domain.received)
        {
            return;
        }
        let elapsed = self.at.map_or(0, |at| now.saturating_sub(at).0) as f64;
        self.at = self.at.max(Some(now));
        // Only as time passes: a second plan of one moment would level what the first one cut.
        if let Some(most) = self.most {
            for node in &mut self.nodes {
                node.lag = node.lag.clamp(-most, most);
            }
        }
        let mut received = vec![0.0; self.nodes.len()];
        for node in &mut self.nodes {
            node.unknown = node.wants;
        }
        for (track, domain) in self.domains.iter_mut().zip(&snapshot.domains) {
            let got = domain.received.saturating_sub(track.received).0 as f64;
            let got = got.min(elapsed);
            // The account of a group that was made anew begins at zero.
            (track.received, track.habit.request) = (domain.received, domain.request);
            track.habit.work(elapsed, self.looks.are_at(track.id));
            if self.owner.is_some_and(|owner| owner.id == domain.id) {
                track.used += got;
            }
            let idle = got == 0.0 && domain.run == RunState::Enabled;
            let unknown = domain.demand == Demand::Unknown && idle;
            let works = self.nodes[track.path[3]].wants && !unknown;
            for at in track.path {
                received[at] += got;
                self.nodes[at].unknown &= !works;
            }
        }
        for track in &mut self.domains {
            let more = received[track.path[3]] - track.ceiling * received[0];
            track.over = (track.over + more).max(0.0);
        }
        received[0] = received[0].min(elapsed);
        for at in 1..self.nodes.len() {
            let parent = self.nodes[at].parent;
            let above = (received[parent], self.nodes[parent].wants);
            self.nodes[at].charge(above, received[at], elapsed, now);
        }
        self.level();
    }

    /// Makes the accounts those of the snapshot's domains, in their order. Whether they were.
    fn align(&mut self, snapshot: &Snapshot) -> bool {
        let names = |domain: &DomainState| {
            let user = Name::User(snapshot.user_of(domain.tenant));
            let (tenant, own) = (Name::Tenant(domain.tenant), Name::Domain(domain.id));
            [Name::Device, user, tenant, own]
        };
        let known = |track: &Track| track.path.map(|at| self.nodes[at].name);
        let mut pairs = self.domains.iter().zip(&snapshot.domains);
        if !self.nodes.is_empty()
            && self.domains.len() == snapshot.domains.len()
            && pairs.all(|(track, domain)| known(track) == names(domain))
        {
            return true;
        }
        let nodes = std::mem::take(&mut self.nodes);
        let tracks = std::mem::take(&mut self.domains);
        self.branch(&nodes, Name::Device, 0);
        for domain in &snapshot.domains {
            let mut parent = 0;
            let path = names(domain).map(|name| {
                parent = self.branch(&nodes, name, parent);
                parent
            });
            let track = tracks.iter().find(|track| track.id == domain.id).copied();
            let track = track.unwrap_or_else(|| Track::new(domain));
            self.domains.push(Track { path, ..track });
        }
        false
    }

    /// Where the node of this name is, with what `before` knew of it.
    fn branch(&mut self, before: &[Node], name: Name, parent: usize) -> usize {
        let at = |nodes: &[Node]| nodes.iter().position(|it| it.name == name);
        if let Some(at) = at(&self.nodes) {
            return at;
        }
        let node = at(before).map_or_else(|| Node::new(name), |at| before[at]);
        self.nodes.push(Node { parent, ..node });
        self.nodes.len() - 1
    }

    /// Makes the lags below each node sum to zero: what a pause forfeits is for all.
    fn level(&mut self) {
        // The sums of lag, and of part of those that are open.
        let mut sums = vec![(0.0, 0.0); self.nodes.len()];
        let open = |node: &Node| node.wants && !node.unknown;
        for node in self.nodes.iter().skip(1) {
            let sum = &mut sums[node.parent];
            sum.0 += node.lag;
            if open(node) {
                sum.1 += node.part;
            }
        }
        for node in self.nodes.iter_mut().skip(1) {
            let (sum, whole) = sums[node.parent];
            if open(node) && whole > 0.0 {
                node.lag -= sum * node.part / whole;
            }
        }
    }

    /// Which domains of the last snapshot the device is divided among, if these have work: they, and those that ran ahead before they
    /// paused. Had such a one got no more than its share, it would still have work. If it did not count, its user's share
    /// would shrink before the siblings that waited for it had theirs.
    pub(super) fn counted(&self, wants: &[bool]) -> Vec<bool> {
        let mut works = vec![false; self.nodes.len()];
        let pairs = || self.domains.iter().zip(wants);
        for (track, wants) in pairs() {
            track.path.iter().for_each(|at| works[*at] |= wants);
        }
        let ahead = |at: &usize| !works[*at] && self.nodes[*at].lag < -1.0;
        let counts = |(track, wants): (&Track, &bool)| *wants || track.path.iter().any(ahead);
        pairs().map(counts).collect()
    }

    /// What each domain of the last snapshot is entitled to from now on. `most` is what a pause may keep of a lag.
    pub(super) fn settle(&mut self, now: Micros, entitled: &[Entitled], most: f64) {
        let mut next = vec![Entitled::default(); self.nodes.len()];
        for (track, it) in self.domains.iter_mut().zip(entitled) {
            track.path.iter().for_each(|at| next[*at].add(it));
            let in_look = self.looks.are_at(track.id);
            track.habit.see(it.busy, now, in_look);
            track.ceiling = it.ceiling;
        }
        // The device is all that there is.
        next[0].share = 1.0;
        for (node, it) in self.nodes.iter_mut().zip(&next) {
            node.take(it, next[node.parent].share, now, most);
        }
        self.level();
        self.most = None;
        for track in &mut self.domains {
            let lag = |above: f64, at: usize| self.nodes[at].lag + self.nodes[at].part * above;
            track.lag = track.path.into_iter().fold(0.0, lag);
        }
    }

    /// Begins a look at one of the domains that share by timeslices, if that is due: see [`Looks::begin`].
    pub(super) fn look(&mut self, now: Micros, round: Micros) -> Option<Micros> {
        let habits = self.domains.iter_mut().map(|it| (it.id, &mut it.habit));
        self.looks.begin(now, round, habits)
    }

    /// They do not share so, or not now.
    pub(super) fn are_apart(&mut self) {
        self.looks.are_apart();
    }

    /// The domain that is looked at, and when that may be over. One that does not take what it can get had not run ahead: timeslices tell
    /// roughly what a domain received.
    pub(super) fn looked_at(&mut self, now: Micros, long: Micros) -> Option<(DomainId, Micros)> {
        let mut domains = self.domains.iter_mut();
        let Some(track) = domains.find(|it| self.looks.are_at(it.id)) else {
            self.looks.end();
            return None;
        };
        match self.looks.look(now, long, &mut track.habit) {
            Seen::Nothing(until) => return Some((track.id, until)),
            Seen::Greedy => {}
            Seen::Modest => {
                let [_, _, tenant, own] = track.path;
                for at in [tenant, own] {
                    self.nodes[at].lag = self.nodes[at].lag.max(0.0);
                }
            }
        }
        None
    }

    /// Timeslices keep the shares of these domains, so that none of them owns a quantum. What is owed stays within `most`: they do that roughly.
    pub(super) fn leave_to_timeslices(&mut self, ids: impl Iterator<Item = DomainId>, most: f64) {
        for id in ids {
            self.owner = self.owner.filter(|owner| owner.id != id);
            let track = self.domains.iter_mut().find(|track| track.id == id);
            track.into_iter().for_each(|it| it.exhausted = false);
        }
        for track in &mut self.domains {
            track.lag = track.lag.clamp(-most, most);
        }
        self.most = Some(most);
    }

    /// Forgets what each domain is owed: timeslices keep the shares.
    pub(super) fn clear(&mut self) {
        self.owner = None;
        for track in &mut self.domains {
            (track.lag, track.used) = (0.0, 0.0);
        }
        self.nodes.iter_mut().for_each(|node| node.lag = 0.0);
    }
}

impl Track {
    fn new(domain: &DomainState) -> Self {
        Self {
            id: domain.id,
            path: [0; 4],
            received: domain.received,
            lag: 0.0,
            used: 0.0,
            since: Micros::ZERO,
            exhausted: false,
            ceiling: 1.0,
            over: 0.0,
            habit: Habit::default(),
            wait: None,
            runs: None,
        }
    }
}

impl Entitled {
    /// A domain below it.
    fn add(&mut self, it: &Self) {
        // The shares of others matter only where none below counts.
        if it.counts && !self.counts {
            self.share = 0.0;
        }
        if it.counts || !self.counts {
            self.share += it.share;
        }
        self.counts |= it.counts;
        self.wants |= it.wants;
    }
}

impl Node {
    fn new(name: Name) -> Self {
        Self {
            name,
            parent: 0,
            lag: 0.0,
            share: 0.0,
            part: 0.0,
            wants: false,
            unknown: false,
            left: Micros::ZERO,
        }
    }

    /// For so much time, in which its parent received so much and had work or not.
    fn charge(&mut self, (parent, works): (f64, bool), got: f64, elapsed: f64, now: Micros) {
        if self.wants {
            let part = if self.unknown { 0.0 } else { self.part };
            self.lag += part * parent - got;
        } else if self.lag < 0.0 {
            // It pays back at its own rate; while others of its parent have work, only from what these receive: else they would be
            // owed nothing any more, and had received nothing.
            let paid = match works {
                true => self.part * parent,
                false => self.share * elapsed,
            };
            self.lag = (self.lag - got + paid).min(0.0);
        } else if self.left + GRACE < now {
            self.lag = 0.0;
        }
    }

    fn take(&mut self, next: &Entitled, whole: f64, now: Micros, most: f64) {
        if self.wants && !next.wants {
            self.left = now;
            self.lag = self.lag.min(most);
        }
        self.share = next.share;
        self.part = (next.share / whole.max(1e-12)).min(1.0);
        self.wants = next.wants;
    }
}
