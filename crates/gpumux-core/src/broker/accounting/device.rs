//! One device's memory: its ledger, and what is taken of it by others than the tenants' processes that are connected.

use std::collections::BTreeMap;

use super::ProcessId;
use crate::{Micros, TenantId, ledger::Ledger};

/// What a context occupies beside the memory that its program asks for: 520 MiB measured on an H100 (driver
/// 580.159), and some for what libraries load into it.
pub const CONTEXT: u64 = 544 << 20;

/// Left free on every device, for what cannot be predicted; at most a 64th of it. Besides, there is always room for one context
/// more, or no further program could begin.
pub const RESERVE: u64 = 256 << 20;

/// How long the driver may take to free the memory of a process that has ended: up to about a second for 140 GiB.
pub const LEAVE: Micros = Micros::from_secs(5);

/// One device.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Device {
    pub(super) ledger: Ledger,
    pub(super) capacity: u64,
    /// The driver has reported the capacity.
    pub(super) measured: bool,
    /// Compute contexts, by process.
    pub(super) contexts: BTreeMap<ProcessId, u32>,
    /// What the driver reports beyond all that is accounted for: foreign processes, code, contexts larger than most. The
    /// lesser of the last two looks, since what is freed or moved between a look and a report is in one account only.
    pub(super) foreign: u64,
    /// The same by the last look alone; none before the first.
    pub(super) last_look: Option<u64>,
    /// What counts as foreign may be of tenants that have not returned yet.
    pub(super) awaits: bool,
    /// Memory of processes that have ended, which the driver may not have freed yet: until when that is expected, and bytes. The
    /// oldest first.
    pub(super) leaving: Vec<(Micros, u64)>,
    /// Memory of processes that live and have no connection. The oldest first.
    pub(super) absent: Vec<Absent>,
    /// What tenants will bring from other devices: it is taken until they have.
    pub(super) arriving: BTreeMap<TenantId, u64>,
    /// What processes of tenants had that is kept over their end, and that no process has now.
    pub(super) kept: BTreeMap<TenantId, u64>,
    /// What processes have inherited of others whose end is not known yet.
    pub(super) taken_over: BTreeMap<TenantId, u64>,
}

/// What a process has that lives and has no connection.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Absent {
    pub(super) process: ProcessId,
    pub(super) tenant: TenantId,
    /// Until when a connection is expected.
    pub(super) until: Micros,
    pub(super) bytes: u64,
    /// What of that is kept over its end.
    pub(super) kept: u64,
}

/// What of a device is never handed out: the reserve, and room for one context more. A device this small is an emulated one,
/// whose contexts are small too.
pub fn overhead(capacity: u64) -> u64 {
    RESERVE.min(capacity / 64) + context(capacity)
}

/// What one context occupies on a device of so many bytes.
pub(super) fn context(capacity: u64) -> u64 {
    CONTEXT.min(capacity / 16)
}

impl Device {
    pub(super) fn new(capacity: u64, awaits: bool) -> Self {
        let mut device = Self {
            ledger: Ledger::new(capacity),
            capacity,
            measured: false,
            contexts: BTreeMap::new(),
            foreign: 0,
            last_look: None,
            awaits,
            leaving: Vec::new(),
            absent: Vec::new(),
            arriving: BTreeMap::new(),
            kept: BTreeMap::new(),
            taken_over: BTreeMap::new(),
        };
        device.occupy();
        device
    }

    pub(super) fn occupy(&mut self) {
        let (overhead, occupies) = (overhead(self.capacity), self.occupied_by_others());
        self.ledger.occupy(
            self.in_contexts()
                .saturating_add(occupies)
                .saturating_add(self.in_arriving())
                .saturating_add(overhead),
        );
        let absent: u64 = self.absent.iter().map(|it| it.bytes).sum();
        self.ledger
            .leave_unclaimed((self.foreign - occupies).saturating_add(absent));
    }

    /// What is foreign for certain.
    pub(super) fn occupied_by_others(&self) -> u64 {
        match self.awaits {
            true => 0,
            false => self.foreign,
        }
    }

    pub(super) fn resize(&mut self, capacity: u64) {
        self.capacity = capacity;
        self.ledger.resize(capacity);
        self.occupy();
    }

    pub(super) fn in_contexts(&self) -> u64 {
        let contexts: u64 = self.contexts.values().map(|n| u64::from(*n)).sum();
        contexts.saturating_mul(context(self.capacity))
    }

    /// The driver reports that so much is used.
    pub(super) fn look(&mut self, time: Micros, used: u64) {
        self.leaving.retain(|(until, _)| time < *until);
        // What is granted may not be made yet: it takes nothing from what is leaving.
        self.left(self.in_leaving().saturating_sub(used));
        let accounted = self.in_contexts().saturating_add(self.ledger.physical());
        let mut beyond = used.saturating_sub(accounted);
        self.absent.retain_mut(|it| {
            if time >= it.until {
                // The last look saw it, too.
                self.last_look = self.last_look.map(|last| last.saturating_add(it.bytes));
                return false;
            }
            // What is not there any more was freed.
            it.bytes = it.bytes.min(beyond);
            beyond -= it.bytes;
            it.bytes > 0
        });
        let expected = self.in_leaving().saturating_add(self.in_arriving());
        let now = beyond.saturating_sub(expected);
        // What is beyond the last look may be a part of what is on its way back.
        let came = now.saturating_sub(self.last_look.unwrap_or(0));
        let now = now - came.min(self.ledger.expected());
        self.foreign = now.min(self.last_look.unwrap_or(now));
        self.last_look = Some(now);
        self.occupy();
    }

    pub(super) fn in_arriving(&self) -> u64 {
        self.arriving.values().copied().fold(0, u64::saturating_add)
    }

    pub(super) fn in_leaving(&self) -> u64 {
        self.leaving.iter().map(|(_, bytes)| *bytes).sum()
    }

    /// A process that had this has ended: the driver frees its memory within [`LEAVE`], but for what is kept.
    pub(super) fn ended(&mut self, now: Micros, it: &Absent, at_once: bool) {
        let kept = it.kept.min(it.bytes);
        let left = kept - self.pass_on(it.tenant, kept);
        if left > 0 {
            let all = self.kept.entry(it.tenant).or_default();
            *all = all.saturating_add(left);
        }
        if it.bytes > kept && !at_once {
            self.leaving.push((now + LEAVE, it.bytes - kept));
        }
    }

    /// Of so much that a process leaves, what another one has inherited already.
    pub(super) fn pass_on(&mut self, tenant: TenantId, bytes: u64) -> u64 {
        let Some(taken) = self.taken_over.get_mut(&tenant) else {
            return 0;
        };
        let part = bytes.min(*taken);
        *taken -= part;
        if *taken == 0 {
            self.taken_over.remove(&tenant);
        }
        part
    }

    /// So much of the memory of processes that have ended is not with them any more.
    pub(super) fn left(&mut self, mut bytes: u64) {
        for (_, of) in &mut self.leaving {
            let part = bytes.min(*of);
            *of -= part;
            bytes -= part;
        }
        self.leaving.retain(|(_, of)| *of > 0);
    }

    /// So much of what the last looks took for foreign belongs to a tenant: it was allocated before this accounting began. Or the
    /// process that has it was without connection, or was taken for ended.
    pub(super) fn adopt(&mut self, tenant: TenantId, mut bytes: u64) {
        for it in self.absent.iter_mut().filter(|it| it.tenant == tenant) {
            let part = bytes.min(it.bytes);
            it.bytes -= part;
            bytes -= part;
        }
        self.absent.retain(|it| it.bytes > 0);
        let leaving = self.in_leaving().min(bytes);
        self.left(leaving);
        let bytes = bytes - leaving;
        self.foreign = self.foreign.saturating_sub(bytes);
        self.last_look = self.last_look.map(|last| last.saturating_sub(bytes));
        self.occupy();
    }
}
