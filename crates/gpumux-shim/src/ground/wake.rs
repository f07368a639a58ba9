//! Whether there is an agent, and how it is woken: by all that change what it has to tell or to do.

use std::{
    ptr,
    sync::atomic::{AtomicPtr, Ordering},
};

use crate::ground::own::OwnFd;

/// The event on which the agent waits. A forked child has none; one of vfork sees its parent's, but calls no CUDA.
static EVENT: AtomicPtr<OwnFd> = AtomicPtr::new(ptr::null_mut());

/// The agent waits for this event from now on.
pub(crate) fn set(event: &'static OwnFd) {
    EVENT.store(ptr::from_ref(event).cast_mut(), Ordering::Release);
}

/// Whether there is an agent, and so maybe a daemon. One load: programs ask this with every launch.
#[inline]
pub(crate) fn has_agent() -> bool {
    !EVENT.load(Ordering::Acquire).is_null()
}

/// Makes the agent look at everything.
pub(crate) fn agent() {
    // SAFETY: null, or an event that is never closed.
    if let Some(event) = unsafe { EVENT.load(Ordering::Acquire).as_ref() } {
        signal(event);
    }
}

/// Signals an event.
pub(crate) fn signal(event: &OwnFd) {
    // Full means that it is awake already.
    let _ = rustix::io::write(event, &1u64.to_ne_bytes());
}

/// After a fork, in the child: it has no agent.
pub(crate) fn in_child() {
    EVENT.store(ptr::null_mut(), Ordering::Release);
}

/// Time-outs of this thread end when they should, not some 50 µs later.
pub(crate) fn be_punctual() {
    // SAFETY: it sets a property of this thread, in ns, and touches no memory.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1 as libc::c_ulong) };
}
