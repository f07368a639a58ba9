//! The ledger of one device's memory: who was promised how much, and who has what. The one arbiter: two who ask
//! at the same time are answered one after the other.
//!
//! Rules, in this order:
//! - what is handed out, with what contexts and strangers occupy, never exceeds the device;
//! - nobody gets more than its limit; what was moved to the host counts, since it comes back;
//! - what was promised to others and is not in use may be *lent*, but only as movable memory: it
//!   can be taken back. Memory that cannot be moved (*pinned*) never takes what others were promised.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{Class, TenantId};

/// What a tenant was promised of a device's memory, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Gets so much whenever it wants it.
    pub guaranteed: u64,
    /// Never has more.
    pub limit: u64,
}

impl Default for Share {
    fn default() -> Self {
        Self {
            guaranteed: 0,
            limit: u64::MAX,
        }
    }
}

/// What a tenant has, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holding {
    /// On the device; can be moved away.
    pub movable: u64,
    /// On the device; stays there.
    pub pinned: u64,
    /// On the host.
    pub swapped: u64,
}

impl Holding {
    /// What it has on the device.
    pub const fn resident(self) -> u64 {
        self.movable.saturating_add(self.pinned)
    }

    /// All that it has.
    pub const fn all(self) -> u64 {
        self.resident().saturating_add(self.swapped)
    }

    /// Both together.
    pub const fn plus(self, other: Self) -> Self {
        Self {
            movable: self.movable.saturating_add(other.movable),
            pinned: self.pinned.saturating_add(other.pinned),
            swapped: self.swapped.saturating_add(other.swapped),
        }
    }
}

/// Whether memory can be moved away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// It can.
    Movable,
    /// It cannot.
    Pinned,
}

/// Why nothing was handed out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Denied {
    /// The tenant would exceed its limit.
    #[error("{held} bytes of at most {limit} are in use: raise the limit or free some")]
    Limit {
        /// Its limit.
        limit: u64,
        /// What it has.
        held: u64,
    },
    /// The device has no room now.
    #[error("{missing} bytes are missing on the device")]
    Full {
        /// How much others would have to give.
        missing: u64,
    },
    /// It can never be had on this device.
    #[error("{asked} bytes are more than the {most} that this tenant can ever have here")]
    Never {
        /// What was asked, with what it has.
        asked: u64,
        /// What can be had at most.
        most: u64,
    },
}

/// A promise that the device cannot keep.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "cannot promise {asked} bytes of memory: {promised} of {usable} are promised to others or cannot be moved"
)]
pub struct OverPromised {
    /// What was asked.
    pub asked: u64,
    /// What the others were promised.
    pub promised: u64,
    /// What the device can hold.
    pub usable: u64,
}

/// One tenant in the ledger.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Entry {
    /// Its promise.
    pub share: Share,
    /// What it has.
    pub holding: Holding,
}

impl Entry {
    /// What it has on the device beyond its guarantee.
    pub const fn borrowed(&self) -> u64 {
        self.holding
            .resident()
            .saturating_sub(self.share.guaranteed)
    }

    /// What the others must leave to it.
    const fn entitled(&self) -> u64 {
        if self.share.guaranteed > self.holding.pinned {
            self.share.guaranteed
        } else {
            self.holding.pinned
        }
    }
}

/// The ledger of one device.
#[derive(Clone, Debug, Default)]
pub struct Ledger {
    capacity: u64,
    occupied: u64,
    tenants: BTreeMap<TenantId, Entry>,
}

impl Ledger {
    /// Of a device with so many bytes.
    pub fn new(capacity: u64) -> Self {
        Self {
            capacity,
            ..Self::default()
        }
    }

    /// What contexts, and programs that are no tenants, occupy.
    pub fn occupy(&mut self, bytes: u64) {
        self.occupied = bytes;
    }

    /// What tenants can have together.
    pub const fn usable(&self) -> u64 {
        self.capacity.saturating_sub(self.occupied)
    }

    /// What they have together.
    pub fn resident(&self) -> u64 {
        self.tenants
            .values()
            .fold(0, |sum, it| sum.saturating_add(it.holding.resident()))
    }

    /// What nobody has.
    pub fn free(&self) -> u64 {
        self.usable().saturating_sub(self.resident())
    }

    /// One tenant.
    pub fn entry(&self, tenant: TenantId) -> Entry {
        self.tenants.get(&tenant).copied().unwrap_or_default()
    }

    /// All tenants.
    pub fn entries(&self) -> impl Iterator<Item = (TenantId, Entry)> {
        self.tenants.iter().map(|(id, entry)| (*id, *entry))
    }

    fn others(&self, tenant: TenantId) -> impl Iterator<Item = &Entry> {
        let others = self.tenants.iter().filter(move |(id, _)| **id != tenant);
        others.map(|(_, entry)| entry)
    }

    /// What can never be moved or is promised, of all others.
    fn entitled(&self, tenant: TenantId) -> u64 {
        self.others(tenant)
            .fold(0, |sum, it| sum.saturating_add(it.entitled()))
    }

    /// Changes a tenant's promise.
    ///
    /// # Errors
    /// When more would be promised than there is; then nothing changes.
    pub fn promise(&mut self, tenant: TenantId, share: Share) -> Result<(), OverPromised> {
        let promised = self.entitled(tenant);
        let before = self.entry(tenant).share.guaranteed;
        let usable = self.usable();
        if share.guaranteed > before && promised.saturating_add(share.guaranteed) > usable {
            return Err(OverPromised {
                asked: share.guaranteed,
                promised,
                usable,
            });
        }
        self.tenants.entry(tenant).or_default().share = share;
        Ok(())
    }

    /// Hands out at least `need` and at most `want` bytes.
    ///
    /// # Errors
    /// When `need` cannot be had now, or ever; then nothing changes.
    pub fn ask(
        &mut self,
        tenant: TenantId,
        need: u64,
        want: u64,
        kind: Kind,
    ) -> Result<u64, Denied> {
        let entry = self.entry(tenant);
        let held = entry.holding.all();
        let limit = entry.share.limit;
        let below_limit = limit.saturating_sub(held);
        if need > below_limit {
            return Err(Denied::Limit { limit, held });
        }
        // With everybody else at the least that they must have.
        let (has, others) = match kind {
            Kind::Movable => (
                entry.holding.resident(),
                self.others(tenant)
                    .fold(0u64, |sum, it| sum.saturating_add(it.holding.pinned)),
            ),
            Kind::Pinned => (entry.holding.pinned, self.entitled(tenant)),
        };
        let most = self.usable().saturating_sub(others);
        let asked = has.saturating_add(need);
        if asked > most {
            return Err(Denied::Never { asked, most });
        }
        let free = self.free();
        if need > free {
            return Err(Denied::Full {
                missing: need - free,
            });
        }
        let given = want.max(need).min(below_limit).min(free).min(most - has);
        let holding = &mut self.tenants.entry(tenant).or_default().holding;
        match kind {
            Kind::Movable => holding.movable = holding.movable.saturating_add(given),
            Kind::Pinned => holding.pinned = holding.pinned.saturating_add(given),
        }
        Ok(given)
    }

    /// Makes room for all that a tenant has on the host, and counts it as being on the device.
    ///
    /// # Errors
    /// When there is no room now, or never will be; then nothing changes.
    pub fn bring_back(&mut self, tenant: TenantId) -> Result<u64, Denied> {
        let holding = self.entry(tenant).holding;
        let asked = holding.all();
        let pinned = self
            .others(tenant)
            .fold(0u64, |sum, it| sum.saturating_add(it.holding.pinned));
        let most = self.usable().saturating_sub(pinned);
        if asked > most {
            return Err(Denied::Never { asked, most });
        }
        let free = self.free();
        if holding.swapped > free {
            return Err(Denied::Full {
                missing: holding.swapped - free,
            });
        }
        let back = Holding {
            movable: holding.movable.saturating_add(holding.swapped),
            swapped: 0,
            ..holding
        };
        self.set(tenant, back);
        Ok(holding.swapped)
    }

    /// The tenant has so much, whatever was known before: it says less than it was given, or comes back after
    /// nobody kept books.
    pub fn set(&mut self, tenant: TenantId, holding: Holding) {
        self.tenants.entry(tenant).or_default().holding = holding;
    }

    /// The tenant has ended.
    pub fn forget(&mut self, tenant: TenantId) {
        self.tenants.remove(&tenant);
    }
}

/// A tenant whose memory may be moved away for another's sake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Who.
    pub tenant: TenantId,
    /// Its class.
    pub class: Class,
    /// Whether it lacks a part already, and so cannot run.
    pub asleep: bool,
    /// Whether it has no work.
    pub idle: bool,
    /// What can be moved, in bytes.
    pub movable: u64,
    /// What of that it was not promised.
    pub borrowed: u64,
    /// Since when it has had its memory or was without work, by any clock.
    pub since: u64,
}

/// Who gives way, in this order, so that `missing` bytes come free, and how much of that each gives. Those that lack a part
/// already, and so cannot run, before all others; idle tenants before those that work; then batch before standard
/// before latency; then who has borrowed, and who has been there longest. One that works gives way only if it has borrowed.
/// None if it does not suffice.
pub fn victims(missing: u64, candidates: &[Candidate]) -> Option<Vec<(TenantId, u64)>> {
    let rank = |class: Class| match class {
        Class::Batch => 0,
        Class::Standard => 1,
        Class::Latency => 2,
    };
    let mut order: Vec<&Candidate> = candidates
        .iter()
        .filter(|it| it.movable > 0 && (it.asleep || it.idle || it.borrowed > 0))
        .collect();
    order.sort_by_key(|it| {
        (
            !it.asleep,
            !it.idle,
            rank(it.class),
            it.borrowed == 0,
            it.since,
            it.tenant,
        )
    });
    let mut left = missing;
    let mut chosen = Vec::new();
    for candidate in order {
        let part = left.min(candidate.movable);
        if part > 0 {
            chosen.push((candidate.tenant, part));
        }
        left -= part;
    }
    (left == 0).then_some(chosen)
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: TenantId = TenantId(1);
    const B: TenantId = TenantId(2);

    fn share(guaranteed: u64, limit: u64) -> Share {
        Share { guaranteed, limit }
    }

    #[test]
    fn a_limit_bounds_one_and_the_device_all() {
        let mut ledger = Ledger::new(110);
        ledger.occupy(10);
        ledger.promise(A, share(0, 60)).unwrap();
        assert_eq!(ledger.ask(A, 10, 50, Kind::Movable), Ok(50));
        assert_eq!(ledger.ask(A, 10, 50, Kind::Movable), Ok(10));
        let beyond = ledger.ask(A, 1, 1, Kind::Movable).unwrap_err();
        assert_eq!(
            beyond,
            Denied::Limit {
                limit: 60,
                held: 60
            }
        );
        assert_eq!(ledger.ask(B, 30, 100, Kind::Movable), Ok(40));
        let full = ledger.ask(B, 5, 5, Kind::Movable).unwrap_err();
        assert_eq!(full, Denied::Full { missing: 5 });
        ledger.set(
            A,
            Holding {
                swapped: 60,
                ..Holding::default()
            },
        );
        let back = ledger.ask(A, 1, 1, Kind::Movable).unwrap_err();
        assert_eq!(
            back,
            Denied::Limit {
                limit: 60,
                held: 60
            },
            "it comes back"
        );
        assert_eq!(ledger.ask(B, 60, 60, Kind::Movable), Ok(60));
    }

    #[test]
    fn what_is_promised_is_lent_only_if_it_can_be_taken_back() {
        let mut ledger = Ledger::new(100);
        ledger.promise(A, share(60, u64::MAX)).unwrap();
        let never = ledger.ask(B, 50, 50, Kind::Pinned).unwrap_err();
        assert_eq!(
            never,
            Denied::Never {
                asked: 50,
                most: 40
            }
        );
        assert_eq!(ledger.ask(B, 30, 90, Kind::Pinned), Ok(40));
        assert_eq!(ledger.ask(B, 50, 50, Kind::Movable), Ok(50));
        assert_eq!(ledger.entry(B).borrowed(), 90);
        let full = ledger.ask(A, 60, 60, Kind::Pinned).unwrap_err();
        assert_eq!(full, Denied::Full { missing: 50 });
        let error = ledger.promise(B, share(50, u64::MAX)).unwrap_err();
        assert_eq!((error.promised, error.usable), (60, 100));
    }

    #[test]
    fn the_idle_give_way_first_and_a_guarantee_in_use_never() {
        let candidate = |id, class, idle, borrowed| Candidate {
            tenant: TenantId(id),
            class,
            asleep: false,
            idle,
            movable: 10,
            borrowed,
            since: id,
        };
        let all = [
            candidate(1, Class::Batch, false, 0),
            candidate(2, Class::Latency, true, 0),
            candidate(3, Class::Standard, false, 10),
            candidate(4, Class::Batch, false, 5),
            candidate(5, Class::Batch, true, 0),
            Candidate {
                asleep: true,
                movable: 1,
                ..candidate(6, Class::Latency, false, 0)
            },
        ];
        let ids = |missing| {
            let them = victims(missing, &all)?;
            Some(
                them.iter()
                    .map(|(id, part)| (id.0, *part))
                    .collect::<Vec<_>>(),
            )
        };
        assert_eq!(ids(0), Some(vec![]));
        assert_eq!(ids(7), Some(vec![(6, 1), (5, 6)]), "no more than needed");
        assert_eq!(
            ids(32),
            Some(vec![(6, 1), (5, 10), (2, 10), (4, 10), (3, 1)])
        );
        assert_eq!(ids(42), None);
    }
}
