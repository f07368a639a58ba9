//! What calls of the driver pass: they wait while another process has locked this one (see [`crate::checkpoint`]).

use std::{
    cell::Cell,
    sync::{
        Condvar, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

/// Calls wait.
static CLOSED: AtomicBool = AtomicBool::new(false);
/// Calls that have begun.
static INSIDE: AtomicUsize = AtomicUsize::new(0);
static OPENED: (Mutex<()>, Condvar) = (Mutex::new(()), Condvar::new());
/// Memory was shared with another process.
static SHARED: AtomicBool = AtomicBool::new(false);

/// How long a waiting thread sleeps before it looks again by itself.
const LOOK: Duration = Duration::from_millis(100);

thread_local! {
    /// This thread is in a call.
    static IN_CALL: Cell<bool> = const { Cell::new(false) };
}

/// Memory is shared with another process: the driver cannot take it off its device from now on.
pub(crate) fn note_shared() {
    SHARED.store(true, Ordering::Relaxed);
}

/// Whether memory was ever shared.
pub(crate) fn has_shared() -> bool {
    SHARED.load(Ordering::Relaxed)
}

/// Makes a call of the program's once the process is not locked.
pub(crate) fn pass<T>(call: impl FnOnce() -> T) -> T {
    struct Leave;
    impl Drop for Leave {
        fn drop(&mut self) {
            IN_CALL.set(false);
            INSIDE.fetch_sub(1, Ordering::SeqCst);
        }
    }
    if IN_CALL.get() {
        return call();
    }
    loop {
        // Before the look, and both in one order with `close`.
        INSIDE.fetch_add(1, Ordering::SeqCst);
        if !CLOSED.load(Ordering::SeqCst) {
            break;
        }
        INSIDE.fetch_sub(1, Ordering::SeqCst);
        let guard = OPENED.0.lock().unwrap_or_else(PoisonError::into_inner);
        if CLOSED.load(Ordering::SeqCst) {
            drop(OPENED.1.wait_timeout(guard, LOOK));
        }
    }
    IN_CALL.set(true);
    let _leave = Leave;
    call()
}

/// Whether a call is being made.
pub(crate) fn is_occupied() -> bool {
    INSIDE.load(Ordering::SeqCst) != 0
}

/// Lets no call begin any more.
pub(crate) fn close() {
    CLOSED.store(true, Ordering::SeqCst);
}

/// Lets calls begin again.
pub(crate) fn open() {
    let guard = OPENED.0.lock().unwrap_or_else(PoisonError::into_inner);
    CLOSED.store(false, Ordering::SeqCst);
    drop(guard);
    OPENED.1.notify_all();
}
