//! Caches that the program gives back when others need memory, before anything is moved (`gpumux_on_reclaim` in
//! `include/gpumux.h`).
//!
//! The program's function frees device memory, which may have to wait for the device or for the daemon. So it runs in a thread
//! of its own, made when the first function is registered: the agent goes on meanwhile, and the daemon waits for a while only.

use std::{
    ffi::{c_int, c_void},
    sync::{
        Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, ThreadId},
    time::{Duration, Instant},
};

use gpumux_wire::Shim;

use crate::{
    ground::{
        context::{is_capturing_anywhere, relax_captures},
        guard, lease, wake,
    },
    memory::{allocate, space, targets},
};

/// Frees what it can of a device, given its ordinal, the bytes that are missing and what was registered with it. Says how
/// many bytes it has freed.
type Function = unsafe extern "C" fn(c_int, u64, *mut c_void) -> u64;

/// Most functions.
const MAX_FUNCTIONS: usize = 64;
/// How long a caller that removes the functions waits for one that runs.
const PATIENCE: Duration = Duration::from_secs(2);
/// The answers.
const DONE: c_int = 0;
const IMPOSSIBLE: c_int = -1;

#[derive(Clone, Copy)]
struct Registered {
    function: Function,
    /// Of the program, and never read here.
    user: usize,
}

struct State {
    functions: Vec<Registered>,
    /// Their thread.
    thread: Option<ThreadId>,
    /// It is in one of them.
    inside: bool,
    /// What is to be freed: of which order, on which device, how much.
    asked: Option<(u64, c_int, u64)>,
}

static STATE: Mutex<State> = Mutex::new(State {
    functions: Vec::new(),
    thread: None,
    inside: false,
    asked: None,
});
/// There is something new in it.
static NEWS: Condvar = Condvar::new();
/// This process was forked: it has no such thread, CUDA is unusable, and the lock's holder is not there.
static SPOILED: AtomicBool = AtomicBool::new(false);

fn lock() -> MutexGuard<'static, State> {
    guard::lock(&STATE)
}

/// Whether the program has such a function.
pub(crate) fn is_asked_for() -> bool {
    !SPOILED.load(Ordering::Acquire) && !lock().functions.is_empty()
}

/// After a fork, in the child.
pub(crate) fn in_child() {
    SPOILED.store(true, Ordering::Release);
}

/// Others need so much of a device. The answer comes when the functions have returned.
pub(crate) fn begin(op: u64, device: &str, bytes: u64) {
    let ordinal = space::ordinal(device).filter(|_| is_asked_for());
    let mut state = ordinal.map(|ordinal| (lock(), ordinal));
    match &mut state {
        // What frees memory may wait for the device, which would spoil a capture.
        Some((state, ordinal)) if state.asked.is_none() && !is_capturing_anywhere() => {
            targets::lower(*ordinal, bytes);
            state.asked = Some((op, *ordinal, bytes));
            NEWS.notify_all();
        }
        // It has nothing there, captures, or is still busy with the last one.
        _ => lease::tell(Shim::Reclaimed { op, bytes: 0 }),
    }
}

fn serve() {
    let mut state = lock();
    loop {
        let Some((op, device, bytes)) = state.asked else {
            state = NEWS.wait(state).unwrap_or_else(PoisonError::into_inner);
            continue;
        };
        let (mut freed, mut next) = (0u64, 0);
        // A capture that begins meanwhile.
        relax_captures();
        // One after the other, as they are then: the program may take them back at any time.
        while freed < bytes
            && let Some(it) = state.functions.get(next).copied()
        {
            next += 1;
            state.inside = true;
            drop(state);
            // SAFETY: the program's function, with what it has registered for it: it waits before it takes them back.
            let own = unsafe { (it.function)(device, bytes - freed, it.user as *mut c_void) };
            freed = freed.saturating_add(own);
            state = lock();
            state.inside = false;
            NEWS.notify_all();
        }
        drop(state);
        // What is freed is the daemon's to give, and not kept for the next allocation.
        allocate::trim();
        space::report();
        lease::tell(Shim::Reclaimed { op, bytes: freed });
        state = lock();
        state.asked = None;
    }
}

pub(crate) fn register(function: Option<Function>, user: *mut c_void) -> c_int {
    if SPOILED.load(Ordering::Acquire) {
        return IMPOSSIBLE;
    }
    let mut state = lock();
    let Some(function) = function else {
        state.functions.clear();
        let deadline = Instant::now() + PATIENCE;
        while state.inside && state.thread != Some(thread::current().id()) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return IMPOSSIBLE;
            }
            let waited = NEWS.wait_timeout(state, left);
            (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        }
        return DONE;
    };
    if state.functions.len() >= MAX_FUNCTIONS {
        return IMPOSSIBLE;
    }
    if state.thread.is_none() {
        let thread = thread::Builder::new().name("gpumux-reclaim".to_owned());
        let Ok(thread) = guard::without_signals(|| thread.spawn(serve)) else {
            return IMPOSSIBLE;
        };
        state.thread = Some(thread.thread().id());
    }
    let user = user as usize;
    state.functions.push(Registered { function, user });
    drop(state);
    // A session that begins later gets it first.
    if wake::has_agent() {
        lease::tell(Shim::Reclaims);
    }
    DONE
}

/// See `include/gpumux.h`.
#[unsafe(no_mangle)]
extern "C" fn gpumux_on_reclaim(function: Option<Function>, user: *mut c_void) -> c_int {
    std::panic::catch_unwind(|| register(function, user)).unwrap_or(IMPOSSIBLE)
}
