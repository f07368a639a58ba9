//! The ledger of one device's memory: what each tenant is guaranteed, and what it has. The one arbiter: two that ask
//! at the same time are answered one after the other.
//!
//! Rules, in this order:
//! - what is handed out, with what contexts and foreign processes occupy, never exceeds the device;
//! - no tenant gets more than its limit; what was moved to the host counts, since it comes back;
//! - what was guaranteed to others and is not in use may be *lent*, but only as movable memory: it
//!   can be taken back. Memory that cannot be moved (*pinned*) never takes what others were guaranteed.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{Micros, TenantId, quantity::Size};

/// Moving may take at most this part of the time (as its reciprocal) when tenants with work take turns.
const TURN: u64 = 20;
/// The least time that a tenant with work keeps its memory.
const LEAST_TURN: Micros = Micros(1_000_000);
/// A tenant that asks for memory will often ask for more: so much more of the device (as its reciprocal) is made free at a time.
pub const EXTRA: u64 = 64;

/// A tenant's guarantee and limit of a device's memory, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, Hash)]
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
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, Hash)]
pub struct Holding {
    /// On the device; can be moved away.
    pub movable: u64,
    /// On the device; stays there.
    pub pinned: u64,
    /// On the host.
    pub swapped: u64,
}

impl Holding {
    /// So many bytes of this kind, on the device.
    pub(crate) fn of(kind: Kind, bytes: u64) -> Self {
        let mut holding = Self::default();
        match kind {
            Kind::Movable => holding.movable = bytes,
            Kind::Pinned => holding.pinned = bytes,
        }
        holding
    }

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
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, Hash)]
pub enum Kind {
    /// It can.
    Movable,
    /// It cannot.
    Pinned,
}

/// Why nothing was handed out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize, Hash)]
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

/// A guarantee that does not fit on the device.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize, Hash)]
#[error(
    "cannot guarantee {asked} bytes of memory: {guaranteed} of {usable} are guaranteed to others or cannot be moved"
)]
pub struct Overcommitted {
    /// What was asked.
    pub asked: u64,
    /// What the others were guaranteed.
    pub guaranteed: u64,
    /// What the device can hold.
    pub usable: u64,
}

/// One tenant in the ledger.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Entry {
    /// Its guarantee and limit.
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
    pub const fn entitled(&self) -> u64 {
        if self.share.guaranteed > self.holding.pinned {
            self.share.guaranteed
        } else {
            self.holding.pinned
        }
    }
}

/// The ledger of one device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Ledger {
    capacity: u64,
    occupied: u64,
    unclaimed: u64,
    tenants: BTreeMap<TenantId, Entry>,
    /// What is counted as being on the device but is still on its way there.
    expected: BTreeMap<TenantId, u64>,
}

impl Ledger {
    /// Of a device with so many bytes.
    pub fn new(capacity: u64) -> Self {
        Self {
            capacity,
            ..Self::default()
        }
    }

    /// The device has so many bytes after all.
    pub fn resize(&mut self, capacity: u64) {
        self.capacity = capacity;
    }

    /// So much of what a tenant has on the device by this ledger is still on its way there.
    pub fn expect(&mut self, tenant: TenantId, bytes: u64) {
        match bytes {
            0 => drop(self.expected.remove(&tenant)),
            bytes => drop(self.expected.insert(tenant, bytes)),
        }
    }

    /// What is still on its way to the device.
    pub fn expected(&self) -> u64 {
        (self.expected.values()).fold(0, |sum, it| sum.saturating_add(*it))
    }

    /// What tenants have on the device without that.
    pub fn physical(&self) -> u64 {
        self.resident().saturating_sub(self.expected())
    }

    /// What contexts, and programs that are no tenants, occupy.
    pub fn occupy(&mut self, bytes: u64) {
        self.occupied = bytes;
    }

    /// What is on the device and may be of tenants whose processes have not reported it yet: it is not free, and may move.
    pub fn leave_unclaimed(&mut self, bytes: u64) {
        self.unclaimed = bytes;
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

    /// What no tenant has.
    pub fn free(&self) -> u64 {
        let taken = self.resident().saturating_add(self.unclaimed);
        self.usable().saturating_sub(taken)
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

    /// What can never be moved or is guaranteed, of all others.
    fn entitled(&self, tenant: TenantId) -> u64 {
        self.others(tenant)
            .fold(0, |sum, it| sum.saturating_add(it.entitled()))
    }

    /// Changes a tenant's guarantee and limit.
    ///
    /// # Errors
    /// When more would be guaranteed than there is; then nothing changes.
    pub fn guarantee(&mut self, tenant: TenantId, share: Share) -> Result<(), Overcommitted> {
        let guaranteed = self.entitled(tenant);
        let before = self.entry(tenant).share.guaranteed;
        let usable = self.usable();
        if share.guaranteed > before && guaranteed.saturating_add(share.guaranteed) > usable {
            return Err(Overcommitted {
                asked: share.guaranteed,
                guaranteed,
                usable,
            });
        }
        self.tenants.entry(tenant).or_default().share = share;
        Ok(())
    }

    /// How much more a tenant could have at most, with all others at the least that they must have.
    ///
    /// # Errors
    /// When `need` cannot be had ever, or not within the limit.
    pub fn could_ask(&self, tenant: TenantId, need: u64, kind: Kind) -> Result<u64, Denied> {
        let entry = self.entry(tenant);
        let held = entry.holding.all();
        let limit = entry.share.limit;
        let below_limit = limit.saturating_sub(held);
        if need > below_limit {
            return Err(Denied::Limit { limit, held });
        }
        let (has, most) = self.reach(tenant, kind);
        let asked = has.saturating_add(need);
        match asked > most {
            true => Err(Denied::Never { asked, most }),
            false => Ok(below_limit.min(most - has)),
        }
    }

    /// What a tenant has of a kind, and could have at most.
    fn reach(&self, tenant: TenantId, kind: Kind) -> (u64, u64) {
        let entry = self.entry(tenant);
        let (has, others) = match kind {
            Kind::Movable => (
                entry.holding.resident(),
                self.others(tenant)
                    .fold(0u64, |sum, it| sum.saturating_add(it.holding.pinned)),
            ),
            Kind::Pinned => (entry.holding.pinned, self.entitled(tenant)),
        };
        (has, self.usable().saturating_sub(others))
    }

    /// How much less movable memory a tenant must have before it could have so much more; `u64::MAX`: that would not help.
    pub fn excess(&self, tenant: TenantId, need: u64, kind: Kind) -> u64 {
        let Entry { share, holding } = self.entry(tenant);
        let over = (holding.all().saturating_add(need)).saturating_sub(share.limit);
        let (has, most) = self.reach(tenant, kind);
        let above = has.saturating_add(need).saturating_sub(most);
        match kind {
            Kind::Pinned if above > 0 => u64::MAX,
            Kind::Movable | Kind::Pinned => over.max(above),
        }
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
        let most = self.could_ask(tenant, need, kind)?;
        let free = self.free();
        if need > free {
            return Err(Denied::Full {
                missing: need - free,
            });
        }
        let given = want.max(need).min(most).min(free);
        let holding = &mut self.tenants.entry(tenant).or_default().holding;
        match kind {
            Kind::Movable => holding.movable = holding.movable.saturating_add(given),
            Kind::Pinned => holding.pinned = holding.pinned.saturating_add(given),
        }
        Ok(given)
    }

    /// Whether there is room for all that a tenant has on the host.
    ///
    /// # Errors
    /// When there is no room now, or never will be as things are.
    pub fn can_return(&self, tenant: TenantId) -> Result<(), Denied> {
        let holding = self.entry(tenant).holding;
        if holding.swapped == 0 {
            return Ok(());
        }
        let asked = holding.all();
        let pinned = self
            .others(tenant)
            .fold(0u64, |sum, it| sum.saturating_add(it.holding.pinned));
        let most = self.usable().saturating_sub(pinned);
        if asked > most {
            return Err(Denied::Never { asked, most });
        }
        let free = self.free();
        match holding.swapped > free {
            true => Err(Denied::Full {
                missing: holding.swapped - free,
            }),
            false => Ok(()),
        }
    }

    /// The tenant has so much, whatever was known before: it says less than it was given, or comes back after
    /// there was no accounting.
    pub fn set(&mut self, tenant: TenantId, holding: Holding) {
        self.tenants.entry(tenant).or_default().holding = holding;
    }

    /// The tenant has ended.
    pub fn forget(&mut self, tenant: TenantId) {
        self.expected.remove(&tenant);
        self.tenants.remove(&tenant);
    }
}

/// The host has no room for what would be moved there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize, Hash)]
#[error(
    "moved memory takes {} of at most {} on the host, and {} more are needed",
    Size(*.kept),
    Size(*.limit),
    Size(*.need)
)]
pub struct HostFull {
    /// How many bytes more would be kept.
    pub need: u64,
    /// What is kept already.
    pub kept: u64,
    /// What may be kept.
    pub limit: u64,
}

impl HostFull {
    /// Bytes by which the limit is too small.
    pub const fn lacks(self) -> u64 {
        (self.kept.saturating_add(self.need)).saturating_sub(self.limit)
    }
}

/// The host's memory that moved memory takes, by the number of the session whose process keeps it: to the end of the
/// process, or until it is asked to let go of it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct HostPool {
    limit: u64,
    kept: BTreeMap<u64, u64>,
}

impl HostPool {
    /// At most so many bytes.
    pub const fn new(limit: u64) -> Self {
        Self {
            limit,
            kept: BTreeMap::new(),
        }
    }

    /// What may be kept.
    pub const fn limit(&self) -> u64 {
        self.limit
    }

    /// What is kept by all.
    pub fn kept(&self) -> u64 {
        self.kept
            .values()
            .fold(0, |sum, it| sum.saturating_add(*it))
    }

    /// What is kept by one.
    pub fn kept_by(&self, session: u64) -> u64 {
        self.kept.get(&session).copied().unwrap_or(0)
    }

    /// Bytes that are free once each of these sessions keeps at least the first of its two numbers.
    ///
    /// # Errors
    /// When there is no room for all of them.
    pub fn room_after(&self, needs: &BTreeMap<u64, (u64, u64)>) -> Result<u64, HostFull> {
        let (kept, limit) = (self.kept(), self.limit);
        let more = |(id, (need, _)): (&u64, &(u64, u64))| need.saturating_sub(self.kept_by(*id));
        let need = (needs.iter().map(more)).fold(0u64, |sum, it| sum.saturating_add(it));
        let room = limit.saturating_sub(kept).checked_sub(need);
        room.ok_or(HostFull { need, kept, limit })
    }

    /// Lets each of these keep at least the first, and, as far as there is room, the second in whole pieces: what moves goes in
    /// blocks, of which the last may be more than is needed. Says how much each may keep at most.
    ///
    /// # Errors
    /// When there is no room for all of them; then nothing changes.
    pub fn reserve(
        &mut self,
        needs: &BTreeMap<u64, (u64, u64)>,
        piece: u64,
    ) -> Result<BTreeMap<u64, u64>, HostFull> {
        let mut room = self.room_after(needs)?;
        let mut most = BTreeMap::new();
        for (id, (need, want)) in needs {
            let own = self.kept_by(*id);
            let mut allowed = own.max(*need);
            let want = want.max(need);
            if *want > own {
                let whole = want.checked_next_multiple_of(piece).unwrap_or(*want);
                let rest = whole.saturating_sub(allowed).min(room);
                room -= rest;
                allowed += rest;
            }
            self.set(*id, allowed);
            most.insert(*id, allowed);
        }
        Ok(most)
    }

    /// One says that it keeps so much. That counts as far as it was allowed to, or as it has `moved` memory there, so that no process
    /// takes the room of others by saying so. Whether all of it counts.
    pub fn hear(&mut self, session: u64, bytes: u64, moved: u64) -> bool {
        let counted = bytes.min(self.kept_by(session).max(moved));
        self.set(session, counted);
        counted == bytes
    }

    /// One keeps so much.
    pub fn set(&mut self, session: u64, bytes: u64) {
        match bytes {
            0 => drop(self.kept.remove(&session)),
            bytes => drop(self.kept.insert(session, bytes)),
        }
    }
}

/// How long a tenant keeps its memory that took so long to come here, and will take as long to go.
pub fn turn(took: Micros) -> Micros {
    Micros(took.0.saturating_mul(2 * TURN)).max(LEAST_TURN)
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
        ledger.guarantee(A, share(0, 60)).unwrap();
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
    fn guaranteed_memory_is_lent_only_if_it_can_be_taken_back() {
        let mut ledger = Ledger::new(100);
        ledger.guarantee(A, share(60, u64::MAX)).unwrap();
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
        let error = ledger.guarantee(B, share(50, u64::MAX)).unwrap_err();
        assert_eq!((error.guaranteed, error.usable), (60, 100));
    }

    #[test]
    fn host_memory_is_never_granted_beyond_its_limit() {
        let all = |all: &[(u64, u64)]| all.iter().copied().collect::<BTreeMap<_, _>>();
        let needs = |all: &[(u64, u64)]| {
            let needs = all.iter().map(|(id, need)| (*id, (*need, *need)));
            needs.collect::<BTreeMap<_, _>>()
        };
        let mut pool = HostPool::new(100);
        assert_eq!(pool.reserve(&needs(&[(1, 30)]), 40), Ok(all(&[(1, 40)])));
        // What is kept suffices, or grows by what is missing.
        assert_eq!(pool.reserve(&needs(&[(1, 35)]), 40), Ok(all(&[(1, 40)])));
        let both = needs(&[(1, 50), (2, 45)]);
        assert_eq!(pool.reserve(&both, 40), Ok(all(&[(1, 55), (2, 45)])));
        let full = HostFull {
            need: 15,
            kept: 100,
            limit: 100,
        };
        assert_eq!(pool.reserve(&needs(&[(2, 60)]), 40), Err(full));
        pool.set(1, 20);
        assert_eq!(pool.reserve(&needs(&[(2, 60)]), 40), Ok(all(&[(2, 80)])));
        assert!(pool.hear(2, 0, 0));
        assert!(!pool.hear(3, 50, 0), "it was not allowed to");
        assert!(!pool.hear(1, 90, 10));
        assert_eq!(pool.kept(), 20);
        assert!(pool.hear(3, 50, 60), "it was moved before");
        assert_eq!(pool.kept(), 70);
        assert!(pool.hear(3, 0, 0));
        // A block may be more than is needed: all that it could be, where there is room.
        let mut wide = HostPool::new(100);
        let least = BTreeMap::from([(1, (10, 70))]);
        assert_eq!(wide.reserve(&least, 40), Ok(all(&[(1, 80)])));
        assert_eq!(HostPool::new(60).reserve(&least, 40), Ok(all(&[(1, 60)])));
        let mut boundless = HostPool::new(u64::MAX);
        assert!(boundless.reserve(&needs(&[(1, u64::MAX)]), 40).is_ok());
    }
}
