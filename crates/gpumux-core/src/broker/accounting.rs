//! Memory accounting: one [`Ledger`] per device, and what each process reports.
//!
//! A device's capacity comes from its driver (NVML). While no driver has reported it, the largest total that a process
//! reports stands in: a wrong report can then weaken limits, but never keep memory from others.

mod device;
mod shown;

use std::collections::{BTreeMap, BTreeSet};

use device::{Absent, Device, context};
pub use device::{CONTEXT, LEAVE, RESERVE, overhead};

use super::{
    messages::{Ask, Droppable, Kept},
    model::{Mutation, ProcessId},
};
use crate::{
    Micros, TenantId,
    ledger::{Denied, Entry, Holding, Kind, Ledger, Overcommitted, Share},
};

/// How long memory that was there before this accounting began may be of tenants of the last daemon: from the first session on, and
/// while there is none.
pub const RETURN: (Micros, Micros) = (Micros::from_secs(5), Micros::from_secs(30));

/// Most devices that are accounted for: all that a machine can have, and some.
const MAX_DEVICES: usize = 64;

/// The largest capacity that is believed: 16 TiB.
const MAX_CAPACITY: u64 = 1 << 44;

/// What a process has, and whose it is.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Member {
    tenant: TenantId,
    holdings: BTreeMap<String, Holding>,
    /// What it was granted and has not said to have received: its name for the request, and how much of which device; none of one that never says so.
    coming: Option<Vec<(u32, String, Holding)>>,
    droppable: BTreeMap<String, Droppable>,
    kept: BTreeMap<String, Kept>,
    /// What it has inherited so far.
    inherited: BTreeMap<String, u64>,
}

/// All devices and processes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Accounting {
    devices: BTreeMap<String, Device>,
    members: BTreeMap<ProcessId, Member>,
    shares: BTreeMap<TenantId, Share>,
    /// Tenants that may use some devices only, and these.
    confined: BTreeMap<TenantId, BTreeSet<String>>,
    /// Tenants whose memory is on its way back: what is on the host has its place on the device already.
    returning: BTreeSet<TenantId>,
    /// The capacity that a tenant was shown first: programs size themselves by it, so it never changes but with the limit.
    shown: BTreeMap<(TenantId, String), u64>,
    /// Tenants that are expected to have memory soon, and until when.
    expected: BTreeMap<TenantId, Micros>,
    /// Until when tenants of the last daemon are expected to report their memory.
    returns: Option<Micros>,
    /// A process has joined.
    joined: bool,
    pub(super) mutation: Option<Mutation>,
}

/// One device in the accounts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    /// UUID of the device, as NVML writes it.
    pub uuid: String,
    /// Its memory in bytes.
    pub capacity: u64,
    /// Bytes that contexts, foreign processes and the reserve occupy.
    pub occupied: u64,
    /// Bytes that no tenant has.
    pub free: u64,
    /// Every tenant's part.
    pub entries: Vec<(TenantId, Entry)>,
}

impl Member {
    /// What is kept of a device over the process's end.
    fn kept(&self, uuid: &str) -> u64 {
        let kept = self.kept.get(uuid).map_or(0, |it| it.bytes);
        kept.min(self.holdings.get(uuid).map_or(0, |it| it.pinned))
    }
}

impl Accounting {
    /// The driver reports a device's capacity and what is used of it.
    pub(super) fn measure(&mut self, now: Micros, uuid: &str, capacity: u64, used: u64) {
        if capacity == 0 || capacity > MAX_CAPACITY {
            return;
        }
        if self.devices.len() >= MAX_DEVICES && !self.devices.contains_key(uuid) {
            // What only processes have named makes way for what exists.
            let invented = self.devices.iter().find(|(_, it)| !it.measured);
            let Some(name) = invented.map(|(name, _)| name.clone()) else {
                return;
            };
            self.devices.remove(&name);
        }
        let device = self.add_device(uuid, capacity);
        device.measured = true;
        if device.capacity != capacity {
            device.resize(capacity);
        }
        device.look(now, used);
    }

    /// The driver reports a device no more. What processes still have there stays accounted for.
    pub(super) fn forget_device(&mut self, uuid: &str) {
        let Some(device) = self.devices.get(uuid) else {
            return;
        };
        let holds = |it: &Member| it.holdings.get(uuid).is_some_and(|it| it.all() > 0);
        let used = self.members.values().any(holds)
            || device.contexts.values().any(|count| *count > 0)
            || !(device.arriving.is_empty() && device.kept.is_empty());
        if !used {
            self.devices.remove(uuid);
        }
    }

    /// A device that may be new: what tenants are guaranteed holds there, too.
    fn add_device(&mut self, uuid: &str, capacity: u64) -> &mut Device {
        let fresh = || {
            let mut device = Device::new(capacity, self.returns.is_some());
            for (tenant, share) in &self.shares {
                if allows(&self.confined, *tenant, uuid) {
                    let _ = guarantee_here(&mut device, *tenant, *share);
                }
            }
            device
        };
        self.devices.entry(uuid.to_owned()).or_insert_with(fresh)
    }

    /// A process names a device that no driver may have reported.
    pub(super) fn meet_device(&mut self, ask: &Ask) {
        self.device(&ask.device, ask.total);
    }

    /// The device of this name, if it exists as far as is known.
    fn device(&mut self, uuid: &str, total: u64) -> Option<&mut Device> {
        let believed = total > 0 && total <= MAX_CAPACITY;
        let measured = self.devices.values().any(|it| it.measured);
        let full = self.devices.len() >= MAX_DEVICES;
        if believed && !measured && !full {
            let device = self.add_device(uuid, total);
            if total > device.capacity {
                device.resize(total);
            }
        }
        self.devices.get_mut(uuid)
    }

    /// A new tenant may use these devices only.
    pub(super) fn confine(&mut self, tenant: TenantId, devices: BTreeSet<String>) {
        self.confined.insert(tenant, devices);
    }

    /// Whether a tenant may use a device, so that its guarantee holds there.
    fn may_use(&self, tenant: TenantId, uuid: &str) -> bool {
        allows(&self.confined, tenant, uuid)
    }

    /// Bytes of a device that tenants can be guaranteed together, their contexts included.
    pub(super) fn guaranteeable(&self, uuid: &str) -> u64 {
        self.devices.get(uuid).map_or(0, |device| {
            let taken = overhead(device.capacity).saturating_add(device.occupied_by_others());
            device.capacity.saturating_sub(taken)
        })
    }

    /// What one context occupies on a device.
    pub(super) fn context(&self, uuid: &str) -> u64 {
        context(self.capacity(uuid))
    }

    /// Bytes of a device that tenants can be guaranteed together now, one that asks among them, and what each of them is guaranteed or
    /// has pinned; none of a device that is not known.
    pub(super) fn booked(
        &self,
        uuid: &str,
        asking: TenantId,
    ) -> Option<(u64, BTreeMap<TenantId, u64>)> {
        let device = self.devices.get(uuid)?;
        let shares = self
            .shares
            .iter()
            .filter(|(id, _)| self.may_use(**id, uuid));
        let mut booked: BTreeMap<TenantId, u64> =
            shares.map(|(id, share)| (*id, share.guaranteed)).collect();
        for (id, entry) in device.ledger.entries() {
            let bytes = booked.entry(id).or_default();
            *bytes = (*bytes).max(entry.entitled());
        }
        // One that is guaranteed memory comes with a context, too.
        let whose = |process| self.members.get(process).map(|it| it.tenant);
        let here: BTreeSet<TenantId> = device.contexts.keys().filter_map(whose).collect();
        let guaranteed = (booked.iter()).filter_map(|(id, bytes)| (*bytes > 0).then_some(*id));
        let coming: BTreeSet<TenantId> = guaranteed.chain([asking]).collect();
        let coming = coming.difference(&here).count() as u64;
        let contexts = context(device.capacity).saturating_mul(coming);
        Some((device.ledger.usable().saturating_sub(contexts), booked))
    }

    /// A tenant is guaranteed this wherever it may be used and can be kept. Returns the devices where it cannot.
    pub(super) fn guarantee(
        &mut self,
        tenant: TenantId,
        share: Share,
    ) -> Vec<(String, Overcommitted)> {
        self.shares.insert(tenant, share);
        let confined = &self.confined;
        let may_use = |uuid: &String| allows(confined, tenant, uuid);
        let mut refused = Vec::new();
        for (uuid, device) in self.devices.iter_mut().filter(|(uuid, _)| may_use(uuid)) {
            if let Err(error) = guarantee_here(device, tenant, share) {
                refused.push((uuid.clone(), error));
            }
        }
        refused
    }

    pub(super) fn forget(&mut self, now: Micros, tenant: TenantId) {
        self.shares.remove(&tenant);
        self.confined.remove(&tenant);
        self.returning.remove(&tenant);
        self.shown.retain(|(id, _), _| *id != tenant);
        self.expected.remove(&tenant);
        self.members.retain(|_, member| member.tenant != tenant);
        for device in self.devices.values_mut() {
            device.ledger.forget(tenant);
            device.kept.remove(&tenant);
            device.taken_over.remove(&tenant);
            let absent = device.absent.extract_if(.., |it| it.tenant == tenant);
            let left = absent.map(|it| (now + LEAVE, it.bytes));
            device.leaving.extend(left);
            device.arriving.remove(&tenant);
            device.occupy();
        }
    }

    /// A tenant was there before this accounting began: what its processes have is seen before they can report it.
    pub(super) fn restored(&mut self, now: Micros, tenant: TenantId) {
        self.expected.remove(&tenant);
        if self.joined || self.mutation == Some(Mutation::ForeignAtOnce) {
            return;
        }
        self.returns.get_or_insert(now + RETURN.1);
        for device in self.devices.values_mut() {
            device.awaits = true;
            device.occupy();
        }
    }

    /// From now on, what no tenant has reported is foreign, if it is time.
    pub(super) fn await_no_more(&mut self, now: Micros) {
        if self.returns.is_none_or(|until| now < until) {
            return;
        }
        self.returns = None;
        for device in self.devices.values_mut() {
            device.awaits = false;
            device.occupy();
        }
    }

    pub(super) fn join(&mut self, now: Micros, process: ProcessId, tenant: TenantId) {
        if !std::mem::replace(&mut self.joined, true) {
            let first = |until: Micros| until.min(now + RETURN.0);
            self.returns = self.returns.map(first);
        }
        let member = Member {
            tenant,
            holdings: BTreeMap::new(),
            coming: None,
            droppable: BTreeMap::new(),
            kept: BTreeMap::new(),
            inherited: BTreeMap::new(),
        };
        self.members.insert(process, member);
    }

    pub(super) fn awaits(&self, process: ProcessId) -> bool {
        let mut absent = self.devices.values().flat_map(|it| &it.absent);
        absent.any(|it| it.process == process)
    }

    /// A process has ended, also one that was without a connection. Or it lives: its memory stays, and it is expected again for as long as
    /// processes are that were there before the accounting. Returns whose it was, if it had anything.
    pub(super) fn leave(
        &mut self,
        now: Micros,
        process: ProcessId,
        lives: bool,
    ) -> Option<TenantId> {
        let member = self.members.remove(&process);
        let lives = lives && self.mutation != Some(Mutation::FreeWithoutSession);
        let holdings = member.iter().flat_map(|it| {
            let uuids = it.holdings.keys();
            uuids.map(|uuid| (uuid.clone(), it.tenant))
        });
        let mut changed: Vec<(String, TenantId)> = holdings.collect();
        for (uuid, device) in &mut self.devices {
            let contexts = u64::from(device.contexts.remove(&process).unwrap_or(0));
            let now_absent = member.as_ref().map(|it| Absent {
                process,
                tenant: it.tenant,
                until: now + RETURN.1,
                bytes: (it.holdings.get(uuid).map_or(0_u64, |it| it.resident()))
                    .saturating_add(contexts * context(device.capacity)),
                kept: it.kept(uuid),
            });
            device.absent.extend(now_absent.filter(|it| it.bytes > 0));
            if !lives {
                let gone = device.absent.extract_if(.., |it| it.process == process);
                for it in gone.collect::<Vec<_>>() {
                    device.ended(now, &it, self.mutation == Some(Mutation::LeaveAtOnce));
                    changed.push((uuid.clone(), it.tenant));
                }
            }
            device.occupy();
        }
        let whose = changed.first().map(|it| it.1);
        for (uuid, tenant) in changed {
            self.add_up(&uuid, tenant);
        }
        whose
    }

    /// A tenant will come to a device with so much; none: it has come, or comes no more.
    pub(super) fn arrives(&mut self, tenant: TenantId, uuid: &str, bytes: Option<u64>) {
        let Some(device) = self.devices.get_mut(uuid) else {
            return;
        };
        match bytes {
            Some(bytes) => device.arriving.insert(tenant, bytes),
            None => device.arriving.remove(&tenant),
        };
        device.occupy();
    }

    /// Whether the driver may still free memory of processes that have ended, on a device of which this tenant has memory.
    pub(super) fn is_leaving(&self, now: Micros, tenant: TenantId) -> bool {
        let own = || self.members.values().filter(|it| it.tenant == tenant);
        self.devices.iter().any(|(uuid, device)| {
            device.leaving.iter().any(|(until, _)| now < *until)
                && own().any(|it| it.holdings.contains_key(uuid))
        })
    }

    /// For [`super::Broker::rebase`].
    pub(super) fn times(&mut self) -> impl Iterator<Item = &mut Micros> {
        let devices = self.devices.values_mut();
        let until = devices.flat_map(|it| {
            let leaving = it.leaving.iter_mut().map(|(until, _)| until);
            leaving.chain(it.absent.iter_mut().map(|it| &mut it.until))
        });
        until.chain(&mut self.returns)
    }

    /// A process has so many compute contexts on a device. `before`: they were there before this accounting began.
    pub(super) fn contexts(&mut self, process: ProcessId, uuid: &str, count: u32, before: bool) {
        let Some(device) = self.devices.get_mut(uuid) else {
            return;
        };
        let known = match count {
            0 => device.contexts.remove(&process),
            _ => device.contexts.insert(process, count),
        };
        let known = known.unwrap_or(0);
        device.occupy();
        if before && count > known {
            let bytes = context(device.capacity).saturating_mul(u64::from(count - known));
            if let Some(member) = self.members.get(&process) {
                device.adopt(member.tenant, bytes);
            }
        }
    }

    /// Makes the tenant's line in a ledger what its processes have together.
    fn add_up(&mut self, uuid: &str, tenant: TenantId) {
        let own = self.members.values().filter(|it| it.tenant == tenant);
        let mut all = own
            .filter_map(|member| member.holdings.get(uuid))
            .fold(Holding::default(), |sum, it| sum.plus(*it));
        if let Some(device) = self.devices.get(uuid) {
            let kept = device.kept.get(&tenant).copied().unwrap_or(0);
            all.pinned = all.pinned.saturating_add(kept);
        }
        let away = all.swapped;
        let forgets = self.mutation == Some(Mutation::ForgetReturning);
        if self.returning.contains(&tenant) && !forgets {
            all.movable = all.movable.saturating_add(std::mem::take(&mut all.swapped));
        }
        let share = self.shares.get(&tenant).copied();
        let share = share.filter(|_| self.may_use(tenant, uuid));
        if let Some(device) = self.devices.get_mut(uuid) {
            let known = device.ledger.entries().any(|(id, _)| id == tenant);
            if let Some(share) = share.filter(|_| !known) {
                let _ = guarantee_here(device, tenant, share);
            }
            device.ledger.set(tenant, all);
            device
                .ledger
                .expect(tenant, if all.swapped == 0 { away } else { 0 });
        }
    }

    /// Processes of a tenant ask for memory: what each gets. Of several parts each gets what it needs.
    ///
    /// # Errors
    /// When there is no room for one of them; then nothing changes.
    pub(super) fn ask(&mut self, parts: &[(ProcessId, Ask)]) -> Result<Vec<u64>, Denied> {
        let [(process, ask)] = parts else {
            let before = self.clone();
            let exact = |ask: &Ask| Ask {
                want: ask.need,
                ..ask.clone()
            };
            let given = (parts.iter()).map(|(process, ask)| self.ask_one(*process, &exact(ask)));
            let given: Result<Vec<u64>, Denied> = given.collect();
            if given.is_err() {
                *self = before;
            }
            return given;
        };
        Ok(vec![self.ask_one(*process, ask)?])
    }

    fn ask_one(&mut self, process: ProcessId, ask: &Ask) -> Result<u64, Denied> {
        let never = Denied::Never {
            asked: ask.need,
            most: 0,
        };
        let tenant = self.tenant_of(process).ok_or(never)?;
        if !self.may_use(tenant, &ask.device) || self.device(&ask.device, ask.total).is_none() {
            return Err(never);
        }
        self.add_up(&ask.device, tenant);
        let device = self.devices.get_mut(&ask.device).ok_or(never)?;
        let given = device.ledger.ask(tenant, ask.need, ask.want, ask.kind)?;
        if let Some(member) = self.members.get_mut(&process) {
            let holding = member.holdings.entry(ask.device.clone()).or_default();
            *holding = holding.plus(Holding::of(ask.kind, given));
        }
        Ok(given)
    }

    /// A process will say when it has received what it was granted ([`Self::received`]).
    pub(super) fn confirms(&mut self, process: ProcessId) {
        if let Some(member) = self.members.get_mut(&process) {
            member.coming = Some(Vec::new());
        }
    }

    /// Whether it said so.
    pub(super) fn confirms_grants(&self, process: ProcessId) -> bool {
        let member = self.members.get(&process);
        member.is_some_and(|it| it.coming.is_some())
    }

    /// A process was granted so much of what it asked for by this name.
    pub(super) fn granted(&mut self, (process, ask): &(ProcessId, Ask), ticket: u32, bytes: u64) {
        if self.mutation == Some(Mutation::ForgetGrants) {
            return;
        }
        let member = self.members.get_mut(process);
        if let Some(coming) = member.and_then(|it| it.coming.as_mut()) {
            coming.push((ticket, ask.device.clone(), Holding::of(ask.kind, bytes)));
        }
    }

    /// It has received that: what it reports from now on contains it.
    pub(super) fn received(&mut self, process: ProcessId, ticket: u32) {
        let member = self.members.get_mut(&process);
        if let Some(coming) = member.and_then(|it| it.coming.as_mut()) {
            coming.retain(|(it, _, _)| *it != ticket);
        }
    }

    /// Why a request could never be granted as things are, however much were moved away; none if it could.
    pub(super) fn could_ask(&self, parts: &[(ProcessId, Ask)]) -> Option<Denied> {
        let tenant = self.tenant_of(parts.first()?.0)?;
        sums(parts).into_iter().find_map(|(uuid, kinds)| {
            let ledger = &self.devices.get(uuid)?.ledger;
            let mut kinds = kinds.into_iter();
            kinds.find_map(|(need, kind)| ledger.could_ask(tenant, need, kind).err())
        })
    }

    /// By device, how much less movable memory the tenant must have before a request could be granted; `u64::MAX`: that would not help.
    pub(super) fn excess(&self, parts: &[(ProcessId, Ask)]) -> BTreeMap<String, u64> {
        let Some(tenant) = parts.first().and_then(|it| self.tenant_of(it.0)) else {
            return BTreeMap::new();
        };
        let excess = |(uuid, kinds): (&str, Vec<(u64, Kind)>)| {
            let ledger = &self.devices.get(uuid)?.ledger;
            let all = kinds.into_iter();
            let all = all.map(|(need, kind)| ledger.excess(tenant, need, kind));
            let most = all.max().filter(|it| *it > 0)?;
            Some((uuid.to_owned(), most))
        };
        sums(parts).into_iter().filter_map(excess).collect()
    }

    /// A process reports all that it has. What its first report holds beyond what it was granted was there before.
    pub(super) fn holds(&mut self, process: ProcessId, uuid: &str, total: u64, holding: Holding) {
        if self.device(uuid, total).is_none() {
            return;
        }
        let Some(member) = self.members.get_mut(&process) else {
            return;
        };
        let tenant = member.tenant;
        // It was sent before these had come.
        let coming = member.coming.iter().flatten();
        let coming = coming.filter(|(_, on, _)| on == uuid);
        let holding = coming.fold(holding, |sum, (_, _, it)| sum.plus(*it));
        let before = member.holdings.insert(uuid.to_owned(), holding);
        if before.is_none() && self.mutation != Some(Mutation::CountTwice) {
            let inherited = self.inherit(process, uuid);
            if let Some(device) = self.devices.get_mut(uuid) {
                device.adopt(tenant, holding.resident().saturating_sub(inherited));
            }
        }
        self.add_up(uuid, tenant);
    }

    /// Counts all that a tenant has on the host as being on its way to the device, until [`Self::returned`].
    ///
    /// # Errors
    /// The first device without room, and why; then nothing changes.
    pub(super) fn begin_return(&mut self, tenant: TenantId) -> Result<(), (String, Denied)> {
        for (uuid, device) in &self.devices {
            if let Err(denied) = device.ledger.can_return(tenant) {
                return Err((uuid.clone(), denied));
            }
        }
        self.returning.insert(tenant);
        self.add_up_all(tenant);
        Ok(())
    }

    /// The memory is back, or what is not stays on the host.
    pub(super) fn returned(&mut self, tenant: TenantId) {
        self.returning.remove(&tenant);
        self.add_up_all(tenant);
    }

    fn add_up_all(&mut self, tenant: TenantId) {
        let devices: Vec<String> = self.devices.keys().cloned().collect();
        for uuid in devices {
            let has = |it: &&Member| it.tenant == tenant && it.holdings.contains_key(&uuid);
            if self.members.values().any(|it| has(&it)) {
                self.add_up(&uuid, tenant);
            }
        }
    }

    pub(super) fn tenant_of(&self, process: ProcessId) -> Option<TenantId> {
        self.members.get(&process).map(|member| member.tenant)
    }

    /// The devices of which a process has reported what it has.
    pub(super) fn devices_of(&self, process: ProcessId) -> impl Iterator<Item = &String> {
        let member = self.members.get(&process);
        member.into_iter().flat_map(|it| it.holdings.keys())
    }

    pub(super) fn entry(&self, tenant: TenantId, uuid: &str) -> Entry {
        let device = self.devices.get(uuid);
        device.map_or_else(Entry::default, |it| it.ledger.entry(tenant))
    }

    /// What a tenant has on the host, by device; only where it has some.
    pub(super) fn swapped(&self, tenant: TenantId) -> BTreeMap<String, u64> {
        let own = self.members.values().filter(|it| it.tenant == tenant);
        let mut all = BTreeMap::new();
        for (uuid, holding) in own.flat_map(|it| &it.holdings) {
            if holding.swapped > 0 {
                let sum = all.entry(uuid.clone()).or_insert(0u64);
                *sum = sum.saturating_add(holding.swapped);
            }
        }
        all
    }

    /// The same of all devices together.
    pub(super) fn all_swapped(&self, tenant: TenantId) -> u64 {
        let all = self.swapped(tenant);
        all.into_values().fold(0, u64::saturating_add)
    }

    /// What a process has on the host: of each device no more than that has.
    pub(super) fn on_host(&self, process: ProcessId) -> u64 {
        let own =
            |(uuid, it): (&String, &Device)| self.holding(process, uuid).swapped.min(it.capacity);
        self.devices.iter().map(own).fold(0, u64::saturating_add)
    }

    /// What of a tenant's memory can be moved, on all devices.
    pub(super) fn movable(&self, tenant: TenantId) -> u64 {
        let ledgers = self.devices.values().map(|it| &it.ledger);
        ledgers
            .map(|it| it.entry(tenant).holding.movable)
            .fold(0, u64::saturating_add)
    }

    /// A process reports what it can free without a copy.
    pub(super) fn droppable(&mut self, process: ProcessId, uuid: &str, droppable: Droppable) {
        let known = self.devices.contains_key(uuid);
        if let Some(member) = self.members.get_mut(&process).filter(|_| known) {
            member.droppable.insert(uuid.to_owned(), droppable);
        }
    }

    /// A process reports what is kept over its end.
    pub(super) fn kept(&mut self, process: ProcessId, uuid: &str, kept: Kept) {
        let known = self.devices.contains_key(uuid);
        let Some(member) = self.members.get_mut(&process).filter(|_| known) else {
            return;
        };
        member.kept.insert(uuid.to_owned(), kept);
        // Its first report of what it has includes that.
        if member.holdings.contains_key(uuid) {
            let before = member.inherited.get(uuid).copied().unwrap_or(0);
            let inherited = self.inherit(process, uuid);
            let rest = kept.inherited.saturating_sub(before);
            self.take_over(process, uuid, rest.saturating_sub(inherited));
            let member = self.members.get_mut(&process);
            if let Some(holding) = member.and_then(|it| it.holdings.get_mut(uuid)) {
                holding.pinned = holding.pinned.saturating_add(inherited);
            }
        }
    }

    /// What a process has inherited since the last time is its own from now on: how much that is.
    fn inherit(&mut self, process: ProcessId, uuid: &str) -> u64 {
        let (Some(member), Some(device)) =
            (self.members.get_mut(&process), self.devices.get_mut(uuid))
        else {
            return 0;
        };
        let all = member.kept.get(uuid).map_or(0, |it| it.inherited);
        let before = member.inherited.insert(uuid.to_owned(), all).unwrap_or(0);
        let left = device.kept.entry(member.tenant).or_default();
        let taken = all.saturating_sub(before).min(*left);
        *left -= taken;
        taken
    }

    /// A process has inherited so much that no process has left. Others have it whose end is not known yet: they leave so much less.
    fn take_over(&mut self, process: ProcessId, uuid: &str, bytes: u64) {
        let (Some(tenant), Some(device)) = (self.tenant_of(process), self.devices.get_mut(uuid))
        else {
            return;
        };
        let others =
            (self.members.iter()).filter(|(id, it)| **id != process && it.tenant == tenant);
        let others = others.map(|(_, it)| it.kept(uuid));
        let absent = device.absent.iter().filter(|it| it.tenant == tenant);
        let absent = absent.map(|it| it.kept.min(it.bytes));
        let all = others.chain(absent).fold(0, u64::saturating_add);
        let before = device.taken_over.get(&tenant).copied().unwrap_or(0);
        let taken = before.saturating_add(bytes).min(all.max(before));
        if taken > 0 {
            device.taken_over.insert(tenant, taken);
        }
    }

    /// The processes of a tenant that can free memory of a device without a copy, and how much: never more than they have.
    pub(super) fn droppables(&self, tenant: TenantId, uuid: &str) -> Vec<(ProcessId, Droppable)> {
        let own = self.members.iter().filter(|(_, it)| it.tenant == tenant);
        let all = own.filter_map(|(process, member)| {
            let known = member.droppable.get(uuid)?;
            let movable = member.holdings.get(uuid)?.movable;
            let free = known.free.min(movable);
            let cached = known.cached.min(movable - free);
            (free + cached > 0).then_some((*process, Droppable { free, cached }))
        });
        all.collect()
    }

    /// The same of all of them together.
    pub(super) fn droppable_of(&self, tenant: TenantId, uuid: &str) -> Droppable {
        let all = self.droppables(tenant, uuid);
        Droppable {
            free: all.iter().map(|(_, it)| it.free).sum(),
            cached: all.iter().map(|(_, it)| it.cached).sum(),
        }
    }

    /// What a process has on a device.
    pub(super) fn holding(&self, process: ProcessId, uuid: &str) -> Holding {
        let member = self.members.get(&process);
        let holding = member.and_then(|it| it.holdings.get(uuid));
        holding.copied().unwrap_or_default()
    }

    pub(super) fn uuids(&self) -> impl Iterator<Item = &String> {
        self.devices.keys()
    }

    /// All of a device's memory in bytes.
    pub(super) fn capacity(&self, uuid: &str) -> u64 {
        self.devices.get(uuid).map_or(0, |it| it.capacity)
    }

    pub(super) fn ledger(&self, uuid: &str) -> Option<&Ledger> {
        self.devices.get(uuid).map(|it| &it.ledger)
    }

    pub(super) fn lines(&self) -> Vec<Line> {
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

/// Whether a tenant may use a device: any, if it is not confined.
fn allows(confined: &BTreeMap<TenantId, BTreeSet<String>>, tenant: TenantId, uuid: &str) -> bool {
    let devices = confined.get(&tenant);
    devices.is_none_or(|devices| devices.contains(uuid))
}

/// By device: what parts need of each kind together, where what is pinned leaves less to what is movable.
fn sums(parts: &[(ProcessId, Ask)]) -> BTreeMap<&str, Vec<(u64, Kind)>> {
    let mut sums: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
    for (_, ask) in parts {
        let (all, pinned) = sums.entry(&ask.device).or_default();
        *all = all.saturating_add(ask.need);
        if ask.kind == Kind::Pinned {
            *pinned = pinned.saturating_add(ask.need);
        }
    }
    let kinds = |(all, pinned)| {
        let pinned_part = Some((pinned, Kind::Pinned)).filter(|_| pinned > 0);
        let rest = Some((all, Kind::Movable)).filter(|_| all > pinned);
        pinned_part.into_iter().chain(rest).collect()
    };
    (sums.into_iter())
        .map(|(uuid, sums)| (uuid, kinds(sums)))
        .collect()
}

/// Guarantees it, or as much as was guaranteed before, and sets the limit in any case.
fn guarantee_here(
    device: &mut Device,
    tenant: TenantId,
    share: Share,
) -> Result<(), Overcommitted> {
    let kept = device.ledger.guarantee(tenant, share);
    if kept.is_err() {
        let guaranteed = device.ledger.entry(tenant).share.guaranteed;
        let _ = device.ledger.guarantee(
            tenant,
            Share {
                guaranteed,
                ..share
            },
        );
    }
    kept
}
