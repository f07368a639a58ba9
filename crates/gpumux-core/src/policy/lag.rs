//! The accounts behind a plan: what each user, each of its tenants and each of their domains is owed.
//!
//! *Lag* is the device time that a node of this tree was entitled to while it had work, less the device time that it received (as in
//! EEVDF), counted in its parent's device time. Of a domain it is summed over the levels ([`Memory::lag`]): so a user's total doesn't depend
//! on how its jobs are split. The lags of all with work sum to zero on each level, whoever comes and goes ([`Memory::settle`]).

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::{DomainId, Micros, Snapshot, TenantId, UserId};

/// A pause of this length forfeits nothing of what a node is owed; a longer one forfeits all.
pub(super) const GRACE: Micros = Micros::from_millis(5);

/// What a policy must remember from one plan to the next. The caller keeps it, one per device,
/// and starts with the default.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Memory {
    at: Option<Micros>,
    /// Which of the rotating domains runs, or did last.
    pub(super) owner: Option<Owner>,
    users: BTreeMap<UserId, Node>,
    tenants: BTreeMap<TenantId, Node>,
    pub(super) domains: BTreeMap<DomainId, Track>,
}

/// The owner of the current quantum.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Owner {
    pub(super) id: DomainId,
    /// It was not entitled to it: nobody who is had work.
    pub(super) borrowed: bool,
}

/// A user, a tenant or a domain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Node {
    /// In µs; negative if it is ahead.
    lag: f64,
    /// Share of the device; while it has no work, the one that it would have.
    share: f64,
    /// The same of its parent's share.
    part: f64,
    /// The part of its share that is another's when all have work.
    spare: f64,
    /// Has work.
    wants: bool,
    /// Nothing keeps it from running, such as its gang.
    able: bool,
    /// When it last had work.
    left: Micros,
}

/// What is remembered of one domain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Track {
    node: Node,
    received: Micros,
    /// Its lag, summed over the levels.
    pub(super) lag: f64,
    /// How much of its current quantum it has used, in µs.
    pub(super) used: f64,
    /// When it last became the owner.
    pub(super) since: Micros,
    /// A latency domain that ran so far ahead that it must wait until it is level.
    pub(super) exhausted: bool,
    wait: Option<Wait>,
}

/// That a domain waits for its gang.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Wait {
    Since(Micros),
    /// It did so for long, until then.
    Over(Micros),
}

/// What a domain is entitled to from now on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entitled {
    pub(super) id: DomainId,
    pub(super) tenant: TenantId,
    pub(super) user: UserId,
    pub(super) share: f64,
    /// Its share when all have work.
    pub(super) least: f64,
    pub(super) wants: bool,
    pub(super) able: bool,
}

impl Memory {
    /// The device time a domain is owed, in µs; negative if it is ahead.
    pub fn lag(&self, id: DomainId) -> f64 {
        self.domains.get(&id).map_or(0.0, |track| track.lag)
    }

    /// The share of the device to which a domain was entitled at the last plan; if it was idle, the share that
    /// it would have had.
    pub fn share(&self, id: DomainId) -> f64 {
        self.domains.get(&id).map_or(0.0, |track| track.node.share)
    }

    /// How a domain waits for its gang.
    pub(crate) fn wait(&self, id: DomainId) -> Option<Wait> {
        self.domains.get(&id)?.wait
    }

    /// Takes note of the domains that wait for their gangs from now on, and of the end of waits that were at least so long.
    pub(crate) fn note_waits(&mut self, now: Micros, waiting: &BTreeSet<DomainId>, long: Micros) {
        for (id, track) in &mut self.domains {
            track.wait = match (track.wait, waiting.contains(id)) {
                (Some(Wait::Since(at)), true) => Some(Wait::Since(at)),
                (_, true) => Some(Wait::Since(now)),
                (Some(Wait::Since(at)), false) => (at + long <= now).then_some(Wait::Over(now)),
                (over, false) => over,
            };
        }
    }

    /// Forgets what is gone and charges the others for the time since the last plan.
    pub(super) fn charge(&mut self, snapshot: &Snapshot) {
        let now = snapshot.now;
        let elapsed = self.at.map_or(0, |at| now.saturating_sub(at).0) as f64;
        self.at = self.at.max(Some(now));
        let mut delivered = 0.0;
        let mut users: BTreeMap<UserId, f64> = BTreeMap::new();
        let mut tenants: BTreeMap<TenantId, (UserId, f64)> = BTreeMap::new();
        let mut domains: BTreeMap<DomainId, (TenantId, f64)> = BTreeMap::new();
        for domain in &snapshot.domains {
            let track = self.domains.entry(domain.id).or_insert_with(|| Track {
                received: domain.received,
                ..Track::default()
            });
            let got = domain.received.saturating_sub(track.received).0 as f64;
            let got = got.min(elapsed);
            track.received = track.received.max(domain.received);
            if self.owner.is_some_and(|owner| owner.id == domain.id) {
                track.used += got;
            }
            let user = snapshot.user_of(domain.tenant);
            delivered += got;
            *users.entry(user).or_default() += got;
            tenants.entry(domain.tenant).or_insert((user, 0.0)).1 += got;
            domains.insert(domain.id, (domain.tenant, got));
        }
        self.users.retain(|id, _| users.contains_key(id));
        self.tenants.retain(|id, _| tenants.contains_key(id));
        self.domains.retain(|id, _| domains.contains_key(id));
        for (id, got) in &users {
            let node = self.users.entry(*id).or_default();
            node.charge(delivered.min(elapsed), *got, elapsed, now);
        }
        for (id, (user, got)) in &tenants {
            let node = self.tenants.entry(*id).or_default();
            node.charge(users[user], *got, elapsed, now);
        }
        for (id, track) in &mut self.domains {
            let (tenant, got) = domains[id];
            track.node.charge(tenants[&tenant].1, got, elapsed, now);
        }
        let tenants = tenants.into_iter().map(|(id, (user, _))| (id, user));
        let domains = domains.into_iter().map(|(id, (tenant, _))| (id, tenant));
        self.level(&tenants.collect(), &domains.collect());
    }

    /// Levels all groups of nodes, given their parents.
    fn level(
        &mut self,
        tenants: &BTreeMap<TenantId, UserId>,
        domains: &BTreeMap<DomainId, TenantId>,
    ) {
        level(self.users.values_mut());
        let mut groups: BTreeMap<UserId, Vec<&mut Node>> = BTreeMap::new();
        for (id, node) in &mut self.tenants {
            groups.entry(tenants[id]).or_default().push(node);
        }
        groups.into_values().for_each(|it| level(it.into_iter()));
        let mut groups: BTreeMap<TenantId, Vec<&mut Node>> = BTreeMap::new();
        for (id, track) in &mut self.domains {
            groups.entry(domains[id]).or_default().push(&mut track.node);
        }
        groups.into_values().for_each(|it| level(it.into_iter()));
    }

    /// What everybody is entitled to from now on. `most` is what a pause may keep of a lag.
    pub(super) fn settle(&mut self, now: Micros, entitled: &[Entitled], most: f64) {
        let mut users: BTreeMap<UserId, Node> = BTreeMap::new();
        let mut tenants: BTreeMap<TenantId, (UserId, Node)> = BTreeMap::new();
        for it in entitled {
            users.entry(it.user).or_default().add(it);
            let (_, node) = tenants
                .entry(it.tenant)
                .or_insert((it.user, Node::default()));
            node.add(it);
        }
        for (id, next) in &users {
            let node = self.users.entry(*id).or_default();
            node.take(next, 1.0, now, most);
        }
        for (id, (user, next)) in &tenants {
            let node = self.tenants.entry(*id).or_default();
            node.take(next, users[user].share, now, most);
        }
        for it in entitled {
            let mut next = Node::default();
            next.add(it);
            let track = self.domains.entry(it.id).or_default();
            track
                .node
                .take(&next, tenants[&it.tenant].1.share, now, most);
        }
        let tenants = tenants.into_iter().map(|(id, (user, _))| (id, user));
        let domains = entitled.iter().map(|it| (it.id, it.tenant));
        self.level(&tenants.collect(), &domains.collect());
        for it in entitled {
            let (user, tenant) = (self.users[&it.user], self.tenants[&it.tenant]);
            if let Some(track) = self.domains.get_mut(&it.id) {
                let above = tenant.lag + tenant.part * user.lag;
                track.lag = track.node.lag + track.node.part * above;
            }
        }
    }

    /// Forgets who is owed what: timeslices alone keep the shares.
    pub(super) fn clear(&mut self) {
        self.owner = None;
        let tracks = self.domains.values_mut();
        let tracks = tracks.map(|track| {
            (track.lag, track.used, track.exhausted) = (0.0, 0.0, false);
            &mut track.node
        });
        let nodes = self.users.values_mut().chain(self.tenants.values_mut());
        nodes.chain(tracks).for_each(|node| node.lag = 0.0);
    }
}

impl Node {
    /// A domain below it.
    fn add(&mut self, it: &Entitled) {
        // Those without work count only where none below has some.
        if it.wants && !self.wants {
            *self = Self::default();
        }
        if it.wants || !self.wants {
            self.share += it.share;
            self.spare += (it.share - it.least).max(0.0);
            self.wants |= it.wants;
            self.able |= it.able;
        }
    }

    fn charge(&mut self, parent: f64, got: f64, elapsed: f64, now: Micros) {
        if self.wants {
            self.lag += self.part * parent - got;
        } else if self.lag < 0.0 {
            // It pays back at its own rate.
            self.lag = (self.lag - got + self.share * elapsed).min(0.0);
        } else if self.left + GRACE < now {
            self.lag = 0.0;
        }
    }

    fn take(&mut self, next: &Self, whole: f64, now: Micros, most: f64) {
        if self.wants && !next.wants {
            self.left = now;
            self.lag = self.lag.min(most);
        }
        self.share = next.share;
        self.part = (next.share / whole.max(1e-12)).min(1.0);
        self.spare = next.spare;
        (self.wants, self.able) = (next.wants, next.able);
    }
}

/// Makes lags sum to zero: what a pause forfeits is everybody's, and what one that pauses pays back is taken from what the others have
/// because it pauses.
fn level<'a>(nodes: impl Iterator<Item = &'a mut Node>) {
    let nodes: Vec<&mut Node> = nodes.collect();
    let sum: f64 = nodes.iter().map(|node| node.lag).sum();
    let open = |node: &Node| node.wants && node.able;
    let total = |of: fn(&Node) -> f64| -> f64 {
        let open = nodes.iter().filter(|node| open(node));
        open.map(|node| of(node)).sum()
    };
    let of: fn(&Node) -> f64 = match sum > 0.0 && total(|node| node.spare) > 1e-9 {
        true => |node| node.spare,
        false => |node| node.part,
    };
    let whole = total(of);
    for node in nodes {
        if open(node) && whole > 0.0 {
            node.lag -= sum * of(node) / whole;
        }
    }
}
