//! The domains of a device while a plan is made for it, and their shares.

use std::collections::BTreeMap;

use super::divide::{self, Claim, Division};
use crate::{Class, Demand, DomainState, Micros, RunState, Snapshot, TenantId, TenantSpec};

/// How a domain gets at the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// All such are enabled, and timeslices are in proportion to shares.
    Slices,
    /// A latency domain within its entitlement: it takes the device at once.
    Preempting,
    /// It gives way to those. Of all such with work only one, the owner, is enabled.
    Rotating,
}

/// One domain while a plan is made.
pub(super) struct Actor<'a> {
    pub(super) domain: &'a DomainState,
    pub(super) claim: Claim,
    pub(super) user: crate::UserId,
    /// Has work and may be given the device.
    pub(super) wants: bool,
    /// The device is divided among it and others: it has work, or ran ahead before it paused.
    pub(super) counts: bool,
    pub(super) share: f64,
    pub(super) way: Way,
    /// Has no work, and may be back before the next look at demand.
    pub(super) contends: bool,
    pub(super) exhausted: bool,
    /// Keeps others of its class waiting for long.
    pub(super) hog: bool,
}

impl Actor<'_> {
    pub(super) fn runnable(&self) -> bool {
        self.domain.demand.may_run()
    }

    pub(super) fn class(&self) -> Class {
        self.claim.class
    }

    pub(super) fn kind(&self) -> (crate::UserId, Class) {
        (self.user, self.class())
    }

    /// Must not run now, whatever it is owed.
    pub(super) fn held(&self) -> bool {
        self.domain.pinned == Some(RunState::Frozen)
    }

    /// Has work for certain.
    pub(super) fn works(&self) -> bool {
        self.wants && self.domain.demand == Demand::Busy
    }

    /// Goes before those that are not: within its entitlement it gives way to others of its class only.
    pub(super) fn privileged(&self) -> bool {
        self.class() == Class::Latency && !self.exhausted
    }

    /// May own the quantum.
    pub(super) fn rotates(&self) -> bool {
        self.way == Way::Rotating && self.is_ready()
    }

    /// May have work, and may run.
    pub(super) fn is_ready(&self) -> bool {
        self.runnable() && !self.held()
    }

    pub(super) fn idle_for(&self, now: Micros) -> Micros {
        match self.runnable() {
            true => Micros::ZERO,
            false => now.saturating_sub(self.domain.demand_since),
        }
    }
}

/// A snapshot's domains.
pub(super) fn cast<'a>(snapshot: &'a Snapshot) -> Vec<Actor<'a>> {
    let unknown = TenantSpec::default();
    let actor = |domain: &'a DomainState| {
        let DomainState { tenant, pinned, .. } = domain;
        let state = snapshot.tenant(*tenant);
        // A domain that is frozen for its gang keeps its claim; one without its memory here cannot be given anything.
        let swapped_out = *pinned == Some(RunState::Frozen) && !snapshot.gangs.contains(tenant);
        Actor {
            domain,
            claim: Claim::from(state.map_or(&unknown, |it| &it.spec)),
            user: state.map(|it| it.user).unwrap_or_default(),
            wants: domain.demand.may_run() && !swapped_out,
            counts: false,
            share: 0.0,
            way: Way::Slices,
            contends: false,
            exhausted: false,
            hog: false,
        }
    };
    snapshot.domains.iter().map(actor).collect()
}

/// The largest share that each domain may receive: its limit, or what it is entitled to where all that `works` names are at their limits.
pub(super) fn ceilings(
    division: &dyn Division,
    cast: &[Actor],
    snapshot: &Snapshot,
    works: impl Fn(&Actor) -> bool,
) -> Vec<f64> {
    if cast.iter().all(|it| it.claim.limit >= 1.0) {
        return vec![1.0; cast.len()];
    }
    let shares = divide(division, cast, snapshot, &works);
    let ceiling = |(actor, share): (&Actor, f64)| {
        let own = cast
            .iter()
            .filter(|it| it.domain.tenant == actor.domain.tenant && works(it));
        let limit = actor.claim.limit / own.count().max(1) as f64;
        limit.max(share).max(1e-6)
    };
    cast.iter().zip(shares).map(ceiling).collect()
}

/// The share of each domain if just those that `counts` names want the device. A tenant's share is split evenly
/// among its domains.
pub(super) fn divide(
    division: &dyn Division,
    cast: &[Actor],
    snapshot: &Snapshot,
    counts: impl Fn(&Actor) -> bool,
) -> Vec<f64> {
    let mut claimants: Vec<(usize, divide::Claimant)> = Vec::new();
    let mut known: BTreeMap<TenantId, usize> = BTreeMap::new();
    // Of each domain, which claimant is its tenant.
    let mut whose = Vec::with_capacity(cast.len());
    for actor in cast {
        if !counts(actor) {
            whose.push(None);
            continue;
        }
        let claimant = *known.entry(actor.domain.tenant).or_insert_with(|| {
            let (user, claim) = (actor.user, actor.claim);
            claimants.push((0, divide::Claimant { user, claim }));
            claimants.len() - 1
        });
        claimants[claimant].0 += 1;
        whose.push(Some(claimant));
    }
    let claims: Vec<divide::Claimant> = claimants.iter().map(|it| it.1).collect();
    let shares = divide::shares(division, &claims, &snapshot.users);
    let share = |at: Option<usize>| at.map_or(0.0, |at| shares[at] / claimants[at].0 as f64);
    whose.into_iter().map(share).collect()
}
