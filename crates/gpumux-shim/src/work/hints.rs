//! Hints by the program and from outside, and the rest of what `include/gpumux.h` offers.

use std::{
    ffi::{c_int, c_uint},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Mutex, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    thread::Thread,
    time::Duration,
};

use gpumux_wire::{clock::now_ns, message::FARTHEST_HINT_US};

use super::{
    hold::{Hinted, now_us, take},
    predictor::TIMEOUT,
};
use crate::ground::{
    context::{add_progress, current_context, page},
    guard::lock,
};

/// Work that is expected later than this, in µs, is remembered, and held for [`LEAD`] before it comes: a switch takes up to
/// 190 (measured on an H100), the launch the rest.
const SOON: u32 = 450;
const LEAD: u32 = 250;
/// How long before that, in µs, the thread wakes and spins. Without, work 500 µs ahead lost 9 µs in the middle and 73 at p99, and 5 and 6
/// with it (`bench/hints.py` 10ms/prep500, H100, 2026-11-21, commits 85f1a9c and 0fed24e).
const SPIN: u64 = 200;
/// How many are remembered.
const REMEMBERED: usize = 64;
/// What a hold waits beyond the time at which work is expected, in µs: together with two switches a hold without work
/// costs less than 1 ms.
const MARGIN: f32 = 100.0;

/// A hint from outside that was not served yet: 0 none, else the expected µs + 1.
static OUTSIDE: AtomicU64 = AtomicU64::new(0);
/// Hints whose time has not come.
static LATER: Mutex<Vec<Later>> = Mutex::new(Vec::new());
/// The thread that serves hints from outside, and those whose time comes.
static SERVER: OnceLock<Thread> = OnceLock::new();

/// A hint whose time has not come.
#[derive(Clone, Copy)]
struct Later {
    /// When to take the device, by [`now_us`].
    at: u64,
    /// `None`: all.
    device: Option<c_int>,
    /// Where the hint came from.
    context: Option<u64>,
}

/// Takes a device for work that is expected in so many µs (0: soon), now or when that is nearly over.
fn by_hand(device: Option<c_int>, expected_us: u32) -> Hinted {
    if page().is_none() {
        return Hinted::Needless;
    }
    let context = current_context();
    match expected_us {
        us if us > FARTHEST_HINT_US => Hinted::TooEarly,
        us if us > SOON => remember(device, context, us),
        us => take(device, context, timeout(us)),
    }
}

/// How long the device is held for work that is expected in so many µs (0: soon).
fn timeout(expected_us: u32) -> f32 {
    match expected_us {
        0 => TIMEOUT.1,
        us => us as f32 + MARGIN,
    }
}

/// Has the server take a device shortly before the work comes.
fn remember(device: Option<c_int>, context: Option<u64>, expected_us: u32) -> Hinted {
    let Some(server) = SERVER.get() else {
        return Hinted::Impossible;
    };
    let mut later = lock(&LATER);
    if later.len() == REMEMBERED {
        return Hinted::TooEarly;
    }
    later.push(Later {
        at: now_us() + u64::from(expected_us - LEAD),
        device,
        context,
    });
    drop(later);
    server.unpark();
    Hinted::Later
}

/// A hint from outside has come: the thread that serves them shall look.
pub(crate) fn from_outside(expected_us: Option<u32>) {
    let us = expected_us.unwrap_or(0);
    if us > SOON {
        if us <= FARTHEST_HINT_US {
            remember(None, None, us);
        }
        return;
    }
    OUTSIDE.store(u64::from(us) + 1, Ordering::Release);
    if let Some(server) = SERVER.get() {
        server.unpark();
    }
}

/// This thread serves hints from outside, and those whose time comes, from now on.
pub(crate) fn become_server() {
    // The kernel may else be 50 µs late.
    // SAFETY: a setting of this thread alone.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1_000) };
    let _ = SERVER.set(std::thread::current());
}

/// When the time of the first remembered hint comes, by [`now_us`].
fn first_due() -> Option<u64> {
    lock(&LATER).iter().map(|later| later.at).min()
}

/// How long the server may sleep before a hint's time comes.
pub(crate) fn until_due() -> Option<Duration> {
    let wake = first_due()?.saturating_sub(SPIN);
    Some(Duration::from_micros(wake.saturating_sub(now_us())))
}

/// Serves a hint from outside, and those whose time has come. Whether there were any.
pub(crate) fn serve() -> bool {
    let hint = OUTSIDE.swap(0, Ordering::AcqRel);
    if hint != 0 {
        take(None, None, timeout((hint - 1) as u32));
    }
    if let Some(at) = first_due().filter(|at| *at <= now_us() + SPIN) {
        while now_us() < at && OUTSIDE.load(Ordering::Relaxed) == 0 {
            std::hint::spin_loop();
        }
    }
    let now = now_us();
    let due: Vec<Later> = lock(&LATER)
        .extract_if(.., |later| later.at <= now)
        .collect();
    for later in &due {
        // This thread may come late. What remains says how long to hold; nothing does when the work has come.
        let remains = (later.at + u64::from(LEAD)).saturating_sub(now);
        if remains > 0 {
            take(later.device, later.context, timeout(remains as u32));
        }
    }
    hint != 0 || !due.is_empty()
}

/// See `include/gpumux.h`.
#[unsafe(no_mangle)]
extern "C" fn gpumux_hint(device: c_int, expected_us: c_uint) -> c_int {
    let hinted = catch_unwind(AssertUnwindSafe(|| by_hand(Some(device), expected_us)));
    hinted.unwrap_or(Hinted::Impossible) as c_int
}

/// See `include/gpumux.h`.
#[unsafe(no_mangle)]
extern "C" fn gpumux_begin() -> u64 {
    now_ns()
}

/// See `include/gpumux.h`.
#[unsafe(no_mangle)]
extern "C" fn gpumux_end(request: u64) {
    if let Some(page) = page()
        && request != 0
    {
        page.requests().record(now_ns().saturating_sub(request));
    }
}

/// See `include/gpumux.h`.
#[unsafe(no_mangle)]
extern "C" fn gpumux_progress(units: u64) {
    add_progress(units);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The longest hold without work, with the switches to it and back.
    #[test]
    fn a_hint_without_work_costs_less_than_a_millisecond() {
        let longest = TIMEOUT.1.max(SOON as f32 + MARGIN);
        assert!(longest + 300.0 <= 1000.0);
    }
}
