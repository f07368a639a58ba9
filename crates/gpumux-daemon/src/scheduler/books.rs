//! The books of all devices' memory: one ledger each, and what every process says that it has.
//!
//! They belong to the scheduling thread: whoever asks is answered in turn, so nothing is granted twice.

use std::collections::{BTreeMap, BTreeSet};

use gpumux_core::{
    TenantId,
    ledger::{Denied, Entry, Holding, Kind, Ledger, OverPromised, Share},
};

use super::SessionId;

/// What a context occupies beside the memory that its program asks for: 520 MiB measured on an H100 (driver
/// 580.159), and some for what libraries load into it.
pub(crate) const CONTEXT: u64 = 544 << 20;

/// Left free on every device, for what cannot be foreseen; at most a 64th of it. Besides, there is always room for one context
/// more, or no further program could begin.
const RESERVE: u64 = 256 << 20;

/// Most devices that a process may name: all that a machine can have, and some.
const MAX_DEVICES: usize = 64;

/// One device.
struct Device {
    ledger: Ledger,
    capacity: u64,
    /// What is used while no tenant has a context there.
    strangers: u64,
    /// Processes with a context, by session.
    contexts: BTreeMap<SessionId, u32>,
    /// What the driver says is used beyond all that is booked: code, and contexts larger than most.
    hidden: u64,
    /// The same as it was at the last look but one.
    hinted: u64,
}

/// What a process has, and whose it is.
struct Member {
    tenant: TenantId,
    holdings: BTreeMap<String, Holding>,
}

/// The books.
#[derive(Default)]
pub(crate) struct Books {
    devices: BTreeMap<String, Device>,
    members: BTreeMap<SessionId, Member>,
    shares: BTreeMap<TenantId, Share>,
    /// Tenants that may use some devices only, and these.
    confined: BTreeMap<TenantId, BTreeSet<String>>,
}

/// A question about memory.
#[derive(Clone, Debug)]
pub(crate) struct Ask {
    pub(crate) device: String,
    /// What the process says that the device has, if nobody else says so.
    pub(crate) total: u64,
    pub(crate) need: u64,
    pub(crate) want: u64,
    pub(crate) kind: Kind,
}

impl Device {
    fn new(capacity: u64) -> Self {
        let mut device = Self {
            ledger: Ledger::new(capacity),
            capacity,
            strangers: 0,
            contexts: BTreeMap::new(),
            hidden: 0,
            hinted: 0,
        };
        device.occupy();
        device
    }

    fn occupy(&mut self) {
        self.ledger.occupy(
            self.foreseen()
                .saturating_add(self.hidden)
                .saturating_add(self.kept_free()),
        );
    }

    /// What no tenant gets: the reserve, and room for one context more.
    fn kept_free(&self) -> u64 {
        RESERVE
            .min(self.capacity / 64)
            .saturating_add(self.context())
    }

    /// What is occupied as far as can be told without asking the driver.
    fn foreseen(&self) -> u64 {
        let contexts: u64 = self.contexts.values().map(|n| u64::from(*n)).sum();
        contexts
            .saturating_mul(self.context())
            .saturating_add(self.strangers)
    }

    /// What one context occupies. A device this small is an emulated one, whose contexts are small too.
    fn context(&self) -> u64 {
        CONTEXT.min(self.capacity / 16)
    }

    /// The driver says that so much is used. What is freed or moved in this moment is in one account and not yet in the
    /// other, so more counts only when it is seen twice.
    fn reconcile(&mut self, used: u64) {
        if self.contexts.is_empty() && self.ledger.resident() == 0 {
            (self.strangers, self.hidden, self.hinted) = (used, 0, 0);
        } else {
            let booked = self.foreseen().saturating_add(self.ledger.resident());
            let now = used.saturating_sub(booked);
            self.hidden = now.min(self.hinted);
            self.hinted = now;
        }
        self.occupy();
    }
}

impl Books {
    /// A device has so much memory, of which so much is used.
    pub(super) fn know(&mut self, uuid: &str, capacity: u64, used: u64) {
        if let Some(device) = self.device(uuid, capacity) {
            device.reconcile(used);
        }
    }

    fn device(&mut self, uuid: &str, total: u64) -> Option<&mut Device> {
        let full = self.devices.len() >= MAX_DEVICES;
        if full && !self.devices.contains_key(uuid) || total == 0 || total > 1 << 44 {
            return self.devices.get_mut(uuid);
        }
        let device = self
            .devices
            .entry(uuid.to_owned())
            .or_insert_with(|| Device::new(total));
        Some(device)
    }

    /// A new tenant may use these devices only.
    pub(super) fn confine(&mut self, tenant: TenantId, devices: BTreeSet<String>) {
        self.confined.insert(tenant, devices);
    }

    /// Whether a tenant may use a device, so that its promise holds there.
    fn may_use(&self, tenant: TenantId, uuid: &str) -> bool {
        let devices = self.confined.get(&tenant);
        devices.is_none_or(|devices| devices.contains(uuid))
    }

    /// Bytes of a device that tenants can be guaranteed together, their contexts included. It does not change as they come and go.
    pub(super) fn guaranteeable(&self, uuid: &str) -> u64 {
        self.devices.get(uuid).map_or(0, |device| {
            let taken = device.kept_free().saturating_add(device.strangers);
            device.capacity.saturating_sub(taken)
        })
    }

    /// What one context occupies on a device.
    pub(super) fn context(&self, uuid: &str) -> u64 {
        self.devices.get(uuid).map_or(0, Device::context)
    }

    /// Checks that each device that the tenant is confined to can keep this promise, or else that some device can.
    pub(super) fn check(&self, tenant: TenantId, share: Share) -> Result<(), OverPromised> {
        let check = |(uuid, device): (&String, &Device)| {
            let mut ledger = device.ledger.clone();
            // Promises hold on every device that their tenants may use.
            let others = self.shares.iter().filter(|(id, _)| **id != tenant);
            for (id, share) in others.filter(|(id, _)| self.may_use(**id, uuid)) {
                let _ = ledger.promise(*id, *share);
            }
            ledger.promise(tenant, share)
        };
        let mut own = (self.devices.iter()).filter(|(uuid, _)| self.may_use(tenant, uuid));
        if self.confined.contains_key(&tenant) {
            return own.try_for_each(check);
        }
        let mut answers = own.map(check);
        match answers.next() {
            None => Ok(()),
            Some(first) => answers.fold(first, Result::or),
        }
    }

    /// A tenant is promised this, where it can be kept.
    pub(super) fn promise(&mut self, tenant: TenantId, share: Share) {
        self.shares.insert(tenant, share);
        let confined = self.confined.get(&tenant);
        let may_use = |uuid: &String| confined.is_none_or(|devices| devices.contains(uuid));
        for (uuid, device) in self.devices.iter_mut().filter(|(uuid, _)| may_use(uuid)) {
            let limit = share.limit;
            if let Err(error) = device.ledger.promise(tenant, share) {
                tracing::warn!(device = uuid, %error, "a promise of memory cannot be kept here");
                let guaranteed = device.ledger.entry(tenant).share.guaranteed;
                let _ = device.ledger.promise(tenant, Share { guaranteed, limit });
            }
        }
    }

    pub(super) fn forget(&mut self, tenant: TenantId) {
        self.shares.remove(&tenant);
        self.confined.remove(&tenant);
        self.members.retain(|_, member| member.tenant != tenant);
        for device in self.devices.values_mut() {
            device.ledger.forget(tenant);
        }
    }

    pub(super) fn meet(&mut self, session: SessionId, tenant: TenantId) {
        let holdings = BTreeMap::new();
        self.members.insert(session, Member { tenant, holdings });
    }

    pub(super) fn leave(&mut self, session: SessionId) {
        if let Some(member) = self.members.remove(&session) {
            for device in member.holdings.keys() {
                self.add_up(device, member.tenant);
            }
        }
        for device in self.devices.values_mut() {
            if device.contexts.remove(&session).is_some() {
                device.occupy();
            }
        }
    }

    /// A process has so many compute groups, and so contexts, on a device.
    pub(super) fn contexts(&mut self, session: SessionId, uuid: &str, count: u32) {
        if let Some(device) = self.devices.get_mut(uuid) {
            device.contexts.insert(session, count);
            device.occupy();
        }
    }

    /// Makes the tenant's line in a ledger what its processes have together.
    fn add_up(&mut self, uuid: &str, tenant: TenantId) {
        let own = self.members.values().filter(|it| it.tenant == tenant);
        let all = own
            .filter_map(|member| member.holdings.get(uuid))
            .fold(Holding::default(), |sum, it| sum.plus(*it));
        let share = self.shares.get(&tenant).copied();
        let may_use = self.may_use(tenant, uuid);
        if let Some(device) = self.devices.get_mut(uuid) {
            let known = device.ledger.entries().any(|(id, _)| id == tenant);
            if let Some(share) = share.filter(|_| !known && may_use) {
                let limit = share.limit;
                if device.ledger.promise(tenant, share).is_err() {
                    let _ = device.ledger.promise(
                        tenant,
                        Share {
                            guaranteed: 0,
                            limit,
                        },
                    );
                }
            }
            device.ledger.set(tenant, all);
        }
    }

    /// A process asks for memory.
    pub(super) fn ask(&mut self, session: SessionId, ask: &Ask) -> Result<u64, Denied> {
        let never = Denied::Never {
            asked: ask.need,
            most: 0,
        };
        let tenant = self.members.get(&session).ok_or(never)?.tenant;
        if !self.may_use(tenant, &ask.device) || self.device(&ask.device, ask.total).is_none() {
            return Err(never);
        }
        self.add_up(&ask.device, tenant);
        let device = self.devices.get_mut(&ask.device).ok_or(never)?;
        let given = device.ledger.ask(tenant, ask.need, ask.want, ask.kind)?;
        if let Some(member) = self.members.get_mut(&session) {
            let holding = member.holdings.entry(ask.device.clone()).or_default();
            match ask.kind {
                Kind::Movable => holding.movable = holding.movable.saturating_add(given),
                Kind::Pinned => holding.pinned = holding.pinned.saturating_add(given),
            }
        }
        Ok(given)
    }

    /// A process says all that it has.
    pub(super) fn holds(&mut self, session: SessionId, uuid: &str, total: u64, holding: Holding) {
        if self.device(uuid, total).is_none() {
            return;
        }
        let Some(member) = self.members.get_mut(&session) else {
            return;
        };
        let tenant = member.tenant;
        member.holdings.insert(uuid.to_owned(), holding);
        self.add_up(uuid, tenant);
    }

    /// What a process shall believe: free and in all.
    pub(super) fn view(&mut self, session: SessionId, uuid: &str, total: u64) -> (u64, u64) {
        let Some(tenant) = self.members.get(&session).map(|member| member.tenant) else {
            return (0, 0);
        };
        if self.device(uuid, total).is_none() {
            return (0, 0);
        }
        self.add_up(uuid, tenant);
        let Some(device) = self.devices.get(uuid) else {
            return (0, 0);
        };
        let entry = device.ledger.entry(tenant);
        let total = device.capacity.min(entry.share.limit);
        let room = device.ledger.free().max(
            // What it was promised is there when it wants it.
            entry
                .share
                .guaranteed
                .saturating_sub(entry.holding.resident()),
        );
        (total.saturating_sub(entry.holding.all()).min(room), total)
    }

    /// Room for all that a tenant has on the host, on every device at once.
    pub(super) fn bring_back(&mut self, tenant: TenantId) -> Result<(), (String, Denied)> {
        let mut done = Vec::new();
        for (uuid, device) in &mut self.devices {
            let before = device.ledger.entry(tenant).holding;
            match device.ledger.bring_back(tenant) {
                Ok(_) => done.push((uuid.clone(), before)),
                Err(denied) => {
                    let failed = (uuid.clone(), denied);
                    for (uuid, before) in done {
                        if let Some(device) = self.devices.get_mut(&uuid) {
                            device.ledger.set(tenant, before);
                        }
                    }
                    return Err(failed);
                }
            }
        }
        // Until the processes say so themselves.
        let own = self.members.values_mut().filter(|it| it.tenant == tenant);
        for holding in own.flat_map(|member| member.holdings.values_mut()) {
            holding.movable = holding.movable.saturating_add(holding.swapped);
            holding.swapped = 0;
        }
        Ok(())
    }

    /// What a tenant has on the host, of all devices.
    pub(super) fn swapped(&self, tenant: TenantId) -> u64 {
        let ledgers = self.devices.values().map(|device| &device.ledger);
        ledgers.map(|it| it.entry(tenant).holding.swapped).sum()
    }

    /// What each process of a tenant has on the host once so much of each device has been moved there, and once all has.
    pub(super) fn on_host(&self, tenant: TenantId, least: u64) -> BTreeMap<SessionId, (u64, u64)> {
        let own = self.members.iter().filter(|(_, it)| it.tenant == tenant);
        own.map(|(session, member)| {
            let moved = |least: u64| {
                let holdings = member.holdings.values();
                let parts = holdings.map(|it| it.swapped.saturating_add(it.movable.min(least)));
                parts.fold(0, u64::saturating_add)
            };
            (*session, (moved(least), moved(u64::MAX)))
        })
        .collect()
    }

    /// Every tenant's line on a device.
    #[cfg(test)]
    fn entries(&self, uuid: &str) -> Vec<(TenantId, Entry)> {
        let device = self.devices.get(uuid);
        device.map_or_else(Vec::new, |device| device.ledger.entries().collect())
    }

    /// All devices: what they hold in all, what contexts and strangers occupy, what nobody has, and who has what.
    pub(crate) fn lines(&self) -> Vec<Line> {
        let line = |(uuid, device): (&String, &Device)| Line {
            uuid: uuid.clone(),
            capacity: device.capacity,
            occupied: device.capacity.saturating_sub(device.ledger.usable()),
            free: device.ledger.free(),
            entries: device.ledger.entries().collect(),
        };
        self.devices.iter().map(line).collect()
    }
}

/// One device in the books.
#[derive(Clone, Debug)]
pub(crate) struct Line {
    pub(crate) uuid: String,
    pub(crate) capacity: u64,
    pub(crate) occupied: u64,
    pub(crate) free: u64,
    pub(crate) entries: Vec<(TenantId, Entry)>,
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;
    const DEVICE: &str = "GPU-1";

    fn ask(need: u64, kind: Kind) -> Ask {
        Ask {
            device: DEVICE.into(),
            total: 80 * GIB,
            need,
            want: need,
            kind,
        }
    }

    #[test]
    fn processes_of_one_tenant_share_its_limit_and_their_end_gives_all_back() {
        let mut books = Books::default();
        let tenant = TenantId(1);
        books.know(DEVICE, 80 * GIB, 0);
        books.promise(
            tenant,
            Share {
                guaranteed: 0,
                limit: 8 * GIB,
            },
        );
        for session in [1, 2] {
            books.meet(SessionId(session), tenant);
            books.contexts(SessionId(session), DEVICE, 1);
        }
        assert_eq!(
            books.ask(SessionId(1), &ask(5 * GIB, Kind::Movable)),
            Ok(5 * GIB)
        );
        let beyond = books
            .ask(SessionId(2), &ask(4 * GIB, Kind::Pinned))
            .unwrap_err();
        assert_eq!(
            beyond,
            Denied::Limit {
                limit: 8 * GIB,
                held: 5 * GIB
            }
        );
        assert_eq!(books.view(SessionId(2), DEVICE, 0), (3 * GIB, 8 * GIB));
        books.leave(SessionId(1));
        assert_eq!(
            books.ask(SessionId(2), &ask(8 * GIB, Kind::Pinned)),
            Ok(8 * GIB)
        );
        books.forget(tenant);
        books.leave(SessionId(2));
        let line = &books.lines()[0];
        let kept = RESERVE + CONTEXT;
        assert_eq!((line.occupied, line.free), (kept, 80 * GIB - kept));
    }

    #[test]
    fn what_cannot_be_promised_anywhere_is_refused() {
        let mut books = Books::default();
        let share = |guaranteed| Share {
            guaranteed,
            limit: u64::MAX,
        };
        assert!(
            books.check(TenantId(1), share(90 * GIB)).is_ok(),
            "no device is known yet"
        );
        books.know(DEVICE, 80 * GIB, 0);
        assert!(books.check(TenantId(1), share(90 * GIB)).is_err());
        books.promise(TenantId(1), share(50 * GIB));
        assert!(books.check(TenantId(2), share(40 * GIB)).is_err());
        assert!(books.check(TenantId(1), share(60 * GIB)).is_ok());
        books.know("GPU-2", 80 * GIB, 0);
        // A promise holds wherever its tenant goes, so the second device helps only those who come later.
        assert!(books.check(TenantId(2), share(29 * GIB)).is_ok());
    }

    #[test]
    fn what_the_driver_uses_beyond_the_books_is_not_handed_out() {
        let mut books = Books::default();
        let session = SessionId(1);
        books.know(DEVICE, 80 * GIB, GIB);
        books.meet(session, TenantId(1));
        books.contexts(session, DEVICE, 1);
        books
            .ask(session, &ask(10 * GIB, Kind::Movable))
            .expect("room");
        let free = |books: &Books| books.lines()[0].free;
        let before = free(&books);
        // A lease that is not used yet does not hide anything.
        books.know(DEVICE, 80 * GIB, 2 * GIB);
        books.know(DEVICE, 80 * GIB, 14 * GIB);
        assert_eq!(free(&books), before, "seen once");
        books.know(DEVICE, 80 * GIB, 15 * GIB);
        let hidden = 14 * GIB - (11 * GIB + CONTEXT);
        assert_eq!(free(&books), before - hidden, "the lesser of two looks");
        books.know(DEVICE, 80 * GIB, 11 * GIB);
        assert_eq!(free(&books), before);
    }

    #[test]
    fn a_tenant_comes_back_whole_or_not_at_all() {
        let mut books = Books::default();
        let holding = |movable, swapped| Holding {
            movable,
            pinned: 0,
            swapped,
        };
        for (session, tenant) in [(1, 1), (2, 2)] {
            books.meet(SessionId(session), TenantId(tenant));
        }
        for device in ["GPU-1", "GPU-2"] {
            books.know(device, 10 * GIB, 0);
            books.holds(SessionId(1), device, 0, holding(0, 6 * GIB));
        }
        books.holds(SessionId(2), "GPU-2", 0, holding(6 * GIB, 0));
        let (device, denied) = books.bring_back(TenantId(1)).unwrap_err();
        assert_eq!(device, "GPU-2");
        assert!(matches!(denied, Denied::Full { .. }), "{denied:?}");
        assert_eq!(books.entries("GPU-1")[0].1.holding, holding(0, 6 * GIB));
        books.leave(SessionId(2));
        books.bring_back(TenantId(1)).unwrap();
        assert_eq!(books.entries("GPU-2")[0].1.holding, holding(6 * GIB, 0));
    }
}
