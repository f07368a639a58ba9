//! What every excursion from the program's code into ours keeps: `errno`, no panic across, and not into
//! itself (a signal handler, or a libc that calls an interposed function).

use std::{cell::Cell, panic::AssertUnwindSafe};

thread_local! {
    // Constant and without destructor: usable in any thread at any time.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Runs `work` unless this thread is already in such work.
pub(crate) fn enter(work: impl FnOnce()) {
    if INSIDE.replace(true) {
        return;
    }
    // SAFETY: always points to this thread's `errno`.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: as above.
    let saved = unsafe { *errno };
    // A panic is a bug of ours and must not become the program's: it goes on unmanaged.
    let _ = std::panic::catch_unwind(AssertUnwindSafe(work));
    // SAFETY: as above.
    unsafe { *errno = saved };
    INSIDE.set(false);
}
