//! What programs are shown of a device: they size themselves by it, and some end when it changes.

use super::{Accounting, overhead};
use crate::{MemoryPolicy, Micros, TenantId};

/// How long a tenant is expected to take memory, from its start and from its first question on: servers that start together import
/// their libraries for many seconds before they ask, and load for some more.
const SOON: Micros = Micros::from_secs(60);

impl Accounting {
    /// A tenant has started, or has asked for the first time what there is.
    pub(in super::super) fn expect(&mut self, now: Micros, tenant: TenantId) {
        self.expected.retain(|_, until| now < *until);
        self.expected.insert(tenant, now + SOON);
    }

    /// For [`super::super::Broker::rebase`]: in its worlds nothing is asked, and when tenants started makes no difference.
    pub(in super::super) fn expect_nothing(&mut self) {
        self.expected.clear();
    }

    /// The capacity that a tenant is shown of a device, and what it may still take of it, in bytes: (free, total).
    ///
    /// The capacity is the tenant's limit, else fixed by its first question. So free memory changes only by the tenant's own
    /// doing. A tenant whose requests may fail for want of room is shown no more than there is.
    pub(in super::super) fn view(
        &mut self,
        now: Micros,
        tenant: TenantId,
        uuid: &str,
        total: u64,
        policy: MemoryPolicy,
    ) -> (u64, u64) {
        if self.device(uuid, total).is_none() {
            return (0, 0);
        }
        self.add_up(uuid, tenant);
        let (capacity, entry) = (self.capacity(uuid), self.entry(tenant, uuid));
        let total = match policy {
            _ if entry.share.limit < capacity => entry.share.limit,
            MemoryPolicy::SwapOthers => self.shown(now, tenant, uuid),
            MemoryPolicy::Wait | MemoryPolicy::Fail => capacity,
        };
        let usable = capacity.saturating_sub(overhead(capacity));
        let own = total.min(usable).saturating_sub(entry.holding.all());
        let there = self.ledger(uuid).map_or(0, |ledger| ledger.free());
        let free = match policy {
            MemoryPolicy::SwapOthers => own,
            MemoryPolicy::Wait | MemoryPolicy::Fail => {
                // What it is guaranteed is there when it wants it.
                let guaranteed = entry.share.guaranteed;
                own.min(there.max(guaranteed.saturating_sub(entry.holding.resident())))
            }
        };
        (free, total)
    }

    /// A tenant was shown this by the broker before, and is again. It may have been shown more since, if its program asked before its process reported that. Its
    /// limit is no such capacity.
    pub(in super::super) fn was_shown(&mut self, tenant: TenantId, uuid: &str, bytes: u64) {
        let Some(share) = self.shares.get(&tenant) else {
            return;
        };
        let capacity = self.capacity(uuid);
        if bytes > 0 && share.limit >= capacity && self.devices.contains_key(uuid) {
            let key = (tenant, uuid.to_owned());
            let shown = self.shown.entry(key).or_insert(capacity);
            *shown = bytes.min(*shown);
        }
    }

    /// The capacity that a tenant without a limit is shown of a device, fixed when it is first asked for.
    fn shown(&mut self, now: Micros, tenant: TenantId, uuid: &str) -> u64 {
        let key = (tenant, uuid.to_owned());
        if let Some(shown) = self.shown.get(&key) {
            return *shown;
        }
        let shown = self.part(now, tenant, uuid);
        self.shown.insert(key, shown);
        self.expect(now, tenant);
        shown
    }

    /// All of a device, or, where others have memory or guarantees or are expected, an equal part of what these leave, but at
    /// least the tenant's own guarantee. A sharer with a smaller limit leaves the rest of its part.
    fn part(&self, now: Micros, tenant: TenantId, uuid: &str) -> u64 {
        let Some(device) = self.devices.get(uuid) else {
            return 0;
        };
        let mut left = device.ledger.usable();
        let others = device.ledger.entries().filter(|(id, _)| *id != tenant);
        let entitled: u64 = others
            .map(|(_, entry)| entry.entitled())
            .fold(0, u64::saturating_add);
        let is_expected = |id| self.expected.get(&id).is_some_and(|until| now < *until);
        let shares = self.shares.iter().filter(|(id, share)| {
            let uses = device.ledger.entry(**id).holding.all() > 0 || is_expected(**id);
            **id != tenant && share.guaranteed == 0 && uses && self.may_use(**id, uuid)
        });
        let mut limits: Vec<u64> = shares.clone().map(|(_, share)| share.limit).collect();
        if entitled == 0 && limits.is_empty() {
            return device.capacity;
        }
        // Contexts that are still to come.
        let has_context = |id: TenantId| {
            let mut processes = device.contexts.keys();
            processes.any(|process| self.tenant_of(*process) == Some(id))
        };
        for id in shares.map(|(id, _)| *id).chain([tenant]) {
            if !has_context(id) {
                left = left.saturating_sub(super::context(device.capacity));
            }
        }
        left = left.saturating_sub(entitled);
        limits.sort_unstable();
        let mut sharers = limits.len() as u64 + 1;
        for limit in limits {
            if limit < left / sharers {
                left -= limit;
                sharers -= 1;
            }
        }
        let guaranteed = self.shares.get(&tenant).map_or(0, |it| it.guaranteed);
        (left / sharers).max(guaranteed)
    }
}
