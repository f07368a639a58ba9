//! Contexts: which compute groups are whose, and what is forgotten when one goes.

use std::{
    ffi::c_int,
    ptr,
    sync::atomic::{AtomicBool, Ordering},
};

use gpumux_wire::page::SLOTS;

use super::streams::{CLAIMED, GROUPS, MADE, Slow, UNKNOWN, begin_counting, is_fatal, lose, slow};
use crate::{
    ground::{
        context::{current_context, page},
        driver::{CUcontext, CUresult, SUCCESS, functions},
    },
    work::hold,
};

functions! {
    primary_retain c"cuDevicePrimaryCtxRetain" (*mut CUcontext, c_int);
    primary_release c"cuDevicePrimaryCtxRelease_v2" (c_int);
    stream_priorities c"cuCtxGetStreamPriorityRange" (*mut c_int, *mut c_int);
    primary_state c"cuDevicePrimaryCtxGetState" (c_int, *mut u32, *mut c_int);
}

/// The driver has taken a group from a context that may go on: the process was checkpointed.
static REMADE: AtomicBool = AtomicBool::new(false);

/// A context is made: the groups that this thread makes meanwhile are its own.
///
/// # Safety
/// When `real` succeeds, it must have written a context to `out`.
pub(crate) unsafe fn create_context(
    out: *mut CUcontext,
    real: impl FnOnce() -> CUresult,
) -> CUresult {
    MADE.set(0);
    let result = real();
    let slots = MADE.replace(0);
    if result == SUCCESS && slots != 0 && page().is_some() {
        // SAFETY: the caller's.
        let context = unsafe { *out } as u64;
        slow(|slow| {
            slow.contexts.retain(|(known, _)| *known != context);
            slow.contexts.push((context, slots));
            slow.claim();
        });
        begin_counting(slots);
        if UNKNOWN.load(Ordering::Acquire) {
            lose(slots);
        }
    }
    result
}

/// This thread has just made the compute group of this slot.
pub(crate) fn group_made(slot: u32) {
    if slot < SLOTS as u32 {
        MADE.set(MADE.get() | 1 << slot);
        GROUPS.fetch_or(1 << slot, Ordering::AcqRel);
    }
}

/// A context whose compute group this is, once that is known for sure.
pub(crate) fn context_of(slot: u32) -> Option<u64> {
    let of = |slow: &mut Slow| {
        let is = |(_, slots): &&(u64, u64)| slots.checked_shr(slot).is_some_and(|it| it & 1 != 0);
        slow.contexts.iter().find(is).map(|(context, _)| *context)
    };
    slow(of).flatten()
}

/// The compute group of this slot is gone. Whether a context has claimed it, so that another group may have the slot: the context ends,
/// or the driver has taken a checkpoint of the process and will make another group for it.
pub(crate) fn group_gone(slot: u32) -> bool {
    if slot >= SLOTS as u32 {
        return false;
    }
    GROUPS.fetch_and(!(1 << slot), Ordering::AcqRel);
    let lives = CLAIMED.load(Ordering::Acquire) >> slot & 1 != 0;
    REMADE.fetch_or(lives, Ordering::AcqRel);
    lives
}

/// Whether groups were made anew since this was asked last: the process's devices may be others.
pub(crate) fn take_remade() -> bool {
    REMADE.swap(false, Ordering::AcqRel)
}

/// Whether a context is gone after this answer: the error may be that of its work, after which there is nothing left to ask.
pub(crate) fn is_destroyed(result: CUresult) -> bool {
    result == SUCCESS || is_fatal(result)
}

/// Contexts are destroyed by one call: a green one has two handles, and its streams may be known by either. Null is none.
pub(crate) fn destroy_context(
    contexts: [CUcontext; 2],
    real: impl FnOnce() -> CUresult,
) -> CUresult {
    if page().is_none() {
        return real();
    }
    end(contexts.map(|it| it as u64), real, is_destroyed)
}

/// Whether a device has a primary context.
fn is_active(device: c_int) -> bool {
    let (mut flags, mut active) = (0, 0);
    // SAFETY: two places to write.
    primary_state()
        .is_some_and(|ask| unsafe { ask(device, &raw mut flags, &raw mut active) } == SUCCESS)
        && active != 0
}

/// A device's primary context, if there is one. Which one it is can only be learned by retaining it once more.
pub(crate) fn primary_context(device: c_int) -> Option<u64> {
    if !is_active(device) {
        return None;
    }
    let (retain, release) = (primary_retain()?, primary_release()?);
    let mut context = ptr::null_mut();
    // SAFETY: a place to write; what is retained is released.
    let retained = unsafe {
        retain(&raw mut context, device) == SUCCESS && {
            release(device);
            true
        }
    };
    retained.then_some(context as u64)
}

/// A device's primary context is released or reset: it may go, with all its streams.
pub(crate) fn release_primary(device: c_int, real: impl FnOnce() -> CUresult) -> CUresult {
    let Some(context) = page().and_then(|_| primary_context(device)) else {
        return real();
    };
    end([context, 0], real, |_| !is_active(device))
}

/// Whether this thread's context, which was this one, is still there. One that is gone may be current further on, and must not be entered.
pub(crate) fn is_there(context: u64) -> bool {
    /// `CUDA_ERROR_CONTEXT_IS_DESTROYED`
    const DESTROYED: CUresult = 709;
    // SAFETY: both places may be null.
    let ask = || stream_priorities().map(|ask| unsafe { ask(ptr::null_mut(), ptr::null_mut()) });
    current_context() == Some(context) && ask() != Some(DESTROYED)
}

/// A context goes, with all its streams, if no other attachment to it is left.
pub(crate) fn detach_context(context: CUcontext, real: impl FnOnce() -> CUresult) -> CUresult {
    if page().is_none() || context.is_null() {
        return real();
    }
    let context = context as u64;
    let is_gone = |result| result == SUCCESS && !is_there(context);
    end([context, 0], real, is_gone)
}

/// A call that may end contexts; 0 is none. They are forgotten if they are gone then: only now, or a thread that finds a stream of
/// theirs meanwhile would make them known again.
fn end(
    contexts: [u64; 2],
    real: impl FnOnce() -> CUresult,
    is_gone: impl FnOnce(CUresult) -> bool,
) -> CUresult {
    let mut real = Some(real);
    let result = slow(|slow| {
        // Under both locks, so that the poller is not in a context that goes.
        let mut result = None;
        let gone = hold::end(contexts[0], || {
            result = real.take().map(|real| real());
            result.is_some_and(is_gone)
        });
        let gone = contexts.into_iter().filter(|it| gone && *it != 0);
        gone.for_each(|it| slow.forget_context(it));
        result
    });
    match (result.flatten(), real) {
        (Some(result), _) => result,
        (None, Some(real)) => real(),
        (None, None) => SUCCESS,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ground::context;

    #[test]
    fn only_a_context_that_is_destroyed_is_forgotten() {
        context::test_page();
        const SLOT: u32 = 40;
        let context = 0xde57 as CUcontext;
        let known = || context_of(SLOT) == Some(context as u64);
        let destroy = |contexts, result| {
            slow(|slow| slow.contexts.push((context as u64, 1 << SLOT)));
            assert_eq!(destroy_context(contexts, || result), result);
        };
        const INVALID_CONTEXT: CUresult = 201;
        destroy([context, ptr::null_mut()], INVALID_CONTEXT);
        assert!(known());
        destroy([context, ptr::null_mut()], SUCCESS);
        assert!(!known());
        destroy([0x97ee as CUcontext, context], SUCCESS);
        assert!(!known(), "by its other handle");
        destroy([context, ptr::null_mut()], 700);
        assert!(!known(), "its work has ended");
    }
}
