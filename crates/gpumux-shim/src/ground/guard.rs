//! What every excursion from the program's code into ours keeps: `errno`, no panic across, and not into
//! itself (a signal handler, or a libc that calls an interposed function).

use std::{
    cell::Cell,
    mem::MaybeUninit,
    panic::AssertUnwindSafe,
    ptr,
    sync::{Mutex, MutexGuard, PoisonError, TryLockError},
    thread::sleep,
    time::{Duration, Instant},
};

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

/// A lock, also after a panic of its holder: [`enter`] lets the program go on, and its calls must.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The same if it is free.
pub(crate) fn try_lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(guard)) => Some(guard.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// The same, waited for until this time.
pub(crate) fn lock_by<T>(mutex: &Mutex<T>, deadline: Instant) -> Option<MutexGuard<'_, T>> {
    const LOOK: Duration = Duration::from_micros(200);
    loop {
        match try_lock(mutex) {
            None if Instant::now() < deadline => sleep(LOOK),
            locked => return locked,
        }
    }
}

/// Does something while no signal reaches this thread, nor any that it makes.
pub(crate) fn without_signals<R>(work: impl FnOnce() -> R) -> R {
    let mut all = MaybeUninit::uninit();
    let mut before = MaybeUninit::uninit();
    // SAFETY: both sets are written before they are read, and the mask is put back below.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
    }
    let result = work();
    // SAFETY: the set was written above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), ptr::null_mut()) };
    result
}

/// Held by a test that uses what the whole process shares: others wait.
#[cfg(test)]
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    lock(&ALONE)
}
