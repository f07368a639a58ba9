//! What happened on a device lately, for traces; and what its domains had and its tenants counted in all, for metrics.

use std::sync::Arc;

use gpumux_core::{Demand, DomainId, Micros, Ring, TenantId};
use gpumux_wire::page::{HintCounts, Page, RequestTimes, SLOTS, Slot};

/// Most events kept per device: half a minute of a device whose turns change every 10 ms, in about 1 MiB.
const CAPACITY: usize = 16 * 1024;

/// Whose event.
#[derive(Debug)]
pub(crate) struct Who {
    pub(crate) id: DomainId,
    pub(crate) tenant: TenantId,
    pub(crate) pid: u32,
}

/// What happened to a domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum What {
    /// It came, and had this.
    Came(Now),
    Left,
    Frozen,
    Thawed,
    /// Its slice was set, in µs.
    Slice(u64),
    /// Its slice was found changed, in µs.
    Tampered(u64),
    /// It ran while it was frozen.
    Ran,
    Demand(Demand),
    /// A plan gave another reason than the one before.
    Reason(&'static str),
    /// A control failed.
    Fault,
    /// So often since the last look the process took the device ahead of its work.
    Held(u64),
    /// So many bytes of its tenant's memory, on all devices, went to the host.
    WentAway {
        bytes: u64,
        took_us: u64,
    },
    /// So many came back.
    CameBack {
        bytes: u64,
        took_us: u64,
    },
}

/// What a domain has at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Now {
    pub(crate) frozen: bool,
    pub(crate) timeslice_us: u64,
    pub(crate) demand: Demand,
    pub(crate) reason: &'static str,
}

/// One thing that happened.
#[derive(Clone, Debug)]
pub(crate) struct Event {
    pub(crate) at: Micros,
    pub(crate) who: Arc<Who>,
    pub(crate) what: What,
}

/// The last events of a device, the oldest first.
#[derive(Debug, Default)]
pub(super) struct Record(Ring<Event, CAPACITY>);

impl Record {
    pub(super) fn push(&mut self, at: Micros, who: &Arc<Who>, what: What) {
        let who = Arc::clone(who);
        // In order, also where a plan is written down after the controls of another device were pulled.
        let at = self.0.back().map_or(at, |last| last.at.max(at));
        self.0.push(Event { at, who, what });
    }

    /// The events since a moment.
    pub(super) fn since(&self, from: Micros) -> Vec<Event> {
        let first = self.0.partition_point(|event| event.at < from);
        self.0.range(first..).cloned().collect()
    }
}

/// The last seconds of one device.
#[derive(Debug)]
pub(crate) struct History {
    /// UUID of the device.
    pub(crate) device: String,
    pub(crate) from: Micros,
    pub(crate) to: Micros,
    pub(crate) events: Vec<Event>,
    /// The tenants that are there at the end, and what they have.
    pub(crate) present: Vec<(Arc<Who>, Now)>,
}

/// What domains had so far. Never falls, although domains end.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Totals {
    pub(crate) received_us: f64,
    pub(crate) runnable_us: f64,
    pub(crate) waited_us: f64,
    pub(crate) frozen_us: f64,
    pub(crate) preemptions: u64,
    pub(crate) freezes: u64,
    pub(crate) thaws: u64,
    pub(crate) slice_changes: u64,
    pub(crate) tampered: u64,
    /// Bytes copied between host and device, by [`gpumux_wire::page::Direction`].
    pub(crate) copied: [u64; 2],
}

impl std::ops::AddAssign for Totals {
    fn add_assign(&mut self, other: Self) {
        self.received_us += other.received_us;
        self.runnable_us += other.runnable_us;
        self.waited_us += other.waited_us;
        self.frozen_us += other.frozen_us;
        self.preemptions += other.preemptions;
        self.freezes += other.freezes;
        self.thaws += other.thaws;
        self.slice_changes += other.slice_changes;
        self.tampered += other.tampered;
        for (sum, more) in self.copied.iter_mut().zip(other.copied) {
            *sum = sum.saturating_add(more);
        }
    }
}

/// What a tenant's processes counted themselves.
#[derive(Clone, Debug, Default)]
pub(crate) struct Counted {
    /// Pieces of work given to devices. Work of which it is not sure for which of a context's groups it is counts
    /// for each of them, so the largest count is nearest.
    pub(crate) work: u64,
    /// What the processes reported as done; 0: they report nothing.
    pub(crate) progress: u64,
    pub(crate) collectives: Collectives,
    pub(crate) hints: HintCounts,
    pub(crate) requests: RequestTimes,
}

/// Collectives of a tenant's processes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Collectives {
    pub(crate) calls: u64,
    pub(crate) bytes: u64,
    /// One is not known to be done.
    pub(crate) in_progress: bool,
}

impl Collectives {
    fn plus(self, other: Self) -> Self {
        Self {
            calls: self.calls.saturating_add(other.calls),
            bytes: self.bytes.saturating_add(other.bytes),
            in_progress: self.in_progress || other.in_progress,
        }
    }

    fn since(self, before: Self) -> Self {
        Self {
            calls: self.calls.saturating_sub(before.calls),
            bytes: self.bytes.saturating_sub(before.bytes),
            in_progress: self.in_progress,
        }
    }
}

impl Counted {
    /// One process's counts.
    pub(super) fn of(page: &Page) -> Self {
        let slots = (0..SLOTS as u32).filter_map(|slot| page.slot(slot));
        let (calls, bytes) = page.collectives();
        Self {
            collectives: Collectives {
                calls,
                bytes,
                in_progress: page.has_collective(),
            },
            work: slots.clone().map(Slot::submitted).max().unwrap_or(0),
            progress: page.progress(),
            hints: slots
                .map(Slot::hints)
                .fold(HintCounts::default(), HintCounts::plus),
            requests: page.requests().times(),
        }
    }

    pub(super) fn plus(self, other: &Self) -> Self {
        Self {
            work: self.work.saturating_add(other.work),
            progress: self.progress.saturating_add(other.progress),
            collectives: self.collectives.plus(other.collectives),
            hints: self.hints.plus(other.hints),
            requests: self.requests.plus(&other.requests),
        }
    }

    /// The counts of a process that is gone.
    pub(super) fn ended(mut self) -> Self {
        self.collectives.in_progress = false;
        self
    }

    pub(super) fn since(self, before: &Self) -> Self {
        Self {
            work: self.work.saturating_sub(before.work),
            progress: self.progress.saturating_sub(before.progress),
            collectives: self.collectives.since(before.collectives),
            hints: self.hints.since(before.hints),
            requests: self.requests.since(&before.requests),
        }
    }
}

/// Upper ends of the classes in which durations are counted, in µs.
pub(crate) const BUCKETS_US: [u64; 10] = [20, 50, 100, 200, 500, 1000, 2000, 5000, 20_000, 100_000];

/// How long something took, again and again.
#[derive(Debug, Default)]
pub(super) struct Durations {
    pub(super) count: u64,
    pub(super) total: Micros,
    /// Up to each of [`BUCKETS_US`], and longer.
    pub(super) histogram: [u64; BUCKETS_US.len() + 1],
}

impl Durations {
    pub(super) fn record(&mut self, took: Micros) {
        self.count += 1;
        self.total += took;
        self.histogram[BUCKETS_US.partition_point(|end| *end < took.0)] += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_bounded_and_forgets_the_oldest() {
        let mut record = Record::default();
        let who = Arc::new(Who {
            id: DomainId(1),
            tenant: TenantId(1),
            pid: 1,
        });
        for at in 0..CAPACITY as u64 + 10 {
            record.push(Micros(at), &who, What::Frozen);
        }
        let all = record.since(Micros::ZERO);
        assert_eq!((all.len(), all[0].at), (CAPACITY, Micros(10)));
        assert_eq!(record.since(Micros(CAPACITY as u64 + 8)).len(), 2);
        assert!(size_of::<Event>() <= 64);
    }
}
