//! What the daemon receives of elastic ranges: how much of a process's memory needs no copy.

use std::{
    collections::BTreeMap,
    ffi::c_int,
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use gpumux_wire::{Shim, message::ELASTIC};

use crate::ground::{guard, lease};

/// How often the daemon receives it.
pub(crate) const PERIOD: Duration = Duration::from_millis(50);

/// There was a range.
static ANY: AtomicBool = AtomicBool::new(false);

/// Of a device: its UUID, and bytes that are free and those that are a cache.
pub(crate) type Droppable = (String, u64, u64);

#[derive(Default)]
struct Reports {
    /// What the daemon has, by device: bytes that are free, and those that are a cache.
    told: BTreeMap<c_int, (u64, u64)>,
    next: Option<Instant>,
}

static REPORTS: Mutex<Reports> = Mutex::new(Reports {
    told: BTreeMap::new(),
    next: None,
});

/// There is a range.
pub(crate) fn begin() {
    ANY.store(true, Ordering::Release);
}

/// Whether there was one.
pub(crate) fn is_needed() -> bool {
    ANY.load(Ordering::Acquire)
}

/// Whether it is time for a report.
pub(crate) fn is_due() -> bool {
    guard::lock(&REPORTS).is_due(Instant::now())
}

/// A session begins, whose daemon has received nothing.
pub(crate) fn forget_told() {
    let mut reports = guard::lock(&REPORTS);
    reports.told.clear();
    reports.next = None;
}

/// Reports what has changed.
pub(crate) fn send(find: impl FnOnce() -> BTreeMap<c_int, Droppable>) {
    if !is_needed() || !lease::knows(ELASTIC) {
        return;
    }
    // Several threads report: what was found first is sent first.
    let mut reports = guard::lock(&REPORTS);
    let found = find();
    reports
        .changed(found, Instant::now())
        .into_iter()
        .for_each(lease::tell);
}

impl Reports {
    fn is_due(&self, now: Instant) -> bool {
        self.next.is_none_or(|next| next <= now)
    }

    /// What the daemon does not have yet, of what was found by device. The next report is due a while later.
    fn changed(&mut self, found: BTreeMap<c_int, Droppable>, now: Instant) -> Vec<Shim> {
        self.next = Some(now + PERIOD);
        let news = found
            .into_iter()
            .filter_map(|(device, (uuid, free, cached))| {
                let known = self.told.insert(device, (free, cached));
                (known != Some((free, cached))).then_some(Shim::Droppable {
                    device: uuid,
                    free,
                    cached,
                })
            });
        news.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_have_only_changes_and_are_due_after_a_period() {
        let start = Instant::now();
        let mut reports = Reports::default();
        let found = |free| BTreeMap::from([(0, ("GPU-0".to_owned(), free, 7))]);
        assert!(reports.is_due(start));
        assert_eq!(reports.changed(found(1), start).len(), 1);
        let early = start + PERIOD - Duration::from_nanos(1);
        assert!(!reports.is_due(early) && reports.is_due(start + PERIOD));
        assert_eq!(reports.changed(found(1), early), []);
        assert!(!reports.is_due(start + PERIOD), "it counts from the last");
        assert_eq!(reports.changed(found(2), early).len(), 1);
    }
}
