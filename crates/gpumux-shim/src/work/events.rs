//! What the program's own events prove of the work before them.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    thread,
};

use super::{Key, STATES, Seen, hold, is_capturing, is_capturing_anywhere, note, page};
use crate::ground::driver::{CUevent, CUresult, CUstream, SUCCESS};

/// Events that are remembered, by a hash of their handle.
const EVENTS: usize = 1024;

/// Where an event was last recorded: its handle, stream's place (16 bits) with how much work had returned, and how many copies.
struct Mark {
    event: AtomicU64,
    at: AtomicU64,
    copies: AtomicU64,
}

static MARKS: [Mark; EVENTS] = [const {
    Mark {
        event: AtomicU64::new(0),
        at: AtomicU64::new(0),
        copies: AtomicU64::new(0),
    }
}; EVENTS];

/// A mark that is being written.
const WRITING: u64 = u64::MAX;

impl Mark {
    fn of(event: CUevent) -> &'static Self {
        // Fibonacci hashing: handles differ in their middle bits.
        &MARKS[((event as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 54) as usize % EVENTS]
    }

    /// Writes it, over whichever event had it.
    fn set(&self, event: u64, (at, copies): (u64, u64)) {
        // Three stores long, by threads that record events of the same hash at the same time.
        while self.event.swap(WRITING, Ordering::AcqRel) == WRITING {
            thread::yield_now();
        }
        self.at.store(at, Ordering::Release);
        self.copies.store(copies, Ordering::Release);
        self.event.store(event, Ordering::Release);
    }

    fn get(&self, event: CUevent) -> Option<(u64, u64)> {
        let is = || self.event.load(Ordering::Acquire) == event as u64;
        let read = || {
            (
                self.at.load(Ordering::Acquire),
                self.copies.load(Ordering::Acquire),
            )
        };
        let at = is().then(read)?;
        is().then_some(at)
    }

    /// What `event` says no longer holds.
    fn clear(event: CUevent) {
        let mark = Self::of(event);
        if mark.event.load(Ordering::Acquire) == event as u64 {
            mark.set(0, (0, 0));
        }
    }
}

/// The program records an event: it will prove what had returned on the stream until now.
pub(crate) fn record(
    event: CUevent,
    stream: CUstream,
    own: bool,
    real: impl FnOnce() -> CUresult,
) -> CUresult {
    if page().is_none() {
        return real();
    }
    Mark::clear(event);
    let key = Key::new(stream, own);
    let captured = key.is_some_and(|key| is_capturing_anywhere() && is_capturing(key));
    let at = key.and_then(Key::find).map(|place| {
        let (returned, copies) = STATES[place].so_far();
        ((place as u64) << 48 | returned & ((1 << 48) - 1), copies)
    });
    let result = real();
    if let Some(at) = at
        && result == SUCCESS
        && !captured
    {
        Mark::of(event).set(event as u64, at);
    }
    result
}

/// The program has an event record all of a context's work: what it proved of a stream before no longer holds.
pub(crate) fn record_all(event: CUevent, real: impl FnOnce() -> CUresult) -> CUresult {
    destroy_event(event, real)
}

/// The program asks for an event.
pub(crate) fn ask_event(event: CUevent, real: impl FnOnce() -> CUresult) -> CUresult {
    hold::submitted();
    observe_event(event, Seen::Waited, real)
}

/// The program waits for an event.
pub(crate) fn wait_event(event: CUevent, real: impl FnOnce() -> CUresult) -> CUresult {
    hold::wait(|kept| observe_event(event, Seen::after_wait(kept), real))
}

fn observe_event(event: CUevent, seen: Seen, real: impl FnOnce() -> CUresult) -> CUresult {
    let mark = page().and_then(|_| Mark::of(event).get(event));
    let result = real();
    note(result);
    // Only if it has not been recorded anew meanwhile.
    if let Some(mark) = mark
        && result == SUCCESS
        && Mark::of(event).get(event) == Some(mark)
    {
        let (at, copies) = mark;
        let so_far = (at & ((1 << 48) - 1), copies);
        STATES[(at >> 48) as usize].finish(so_far, seen);
    }
    result
}

pub(crate) fn destroy_event(event: CUevent, real: impl FnOnce() -> CUresult) -> CUresult {
    if page().is_some() {
        Mark::clear(event);
    }
    real()
}
