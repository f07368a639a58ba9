//! Contexts: which compute groups are whose, and what is forgotten when one goes.

use std::{
    ffi::c_int,
    ptr,
    sync::atomic::{AtomicBool, Ordering},
};

use gpumux_wire::page::SLOTS;

use super::streams::{CLAIMED, GROUPS, MADE, Slow, UNKNOWN, begin_counting, lose, slow};
use crate::{
    ground::{
        context::page,
        driver::{CUcontext, CUresult, SUCCESS, functions},
    },
    work::hold,
};

functions! {
    primary_retain c"cuDevicePrimaryCtxRetain" (*mut CUcontext, c_int);
    primary_release c"cuDevicePrimaryCtxRelease_v2" (c_int);
    primary_state c"cuDevicePrimaryCtxGetState" (c_int, *mut u32, *mut c_int);
}

/// The driver has taken a group from a context that goes on: the process was checkpointed.
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

/// The compute group of this slot is gone. Whether its context is not: the driver has taken a checkpoint of the process, and will make
/// another group for it.
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

pub(crate) fn destroy_context(context: CUcontext, real: impl FnOnce() -> CUresult) -> CUresult {
    if page().is_some() && !context.is_null() {
        slow(|slow| slow.forget_context(context as u64));
    }
    real()
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
    let mut real = Some(real);
    let result = slow(|slow| {
        // Under both locks, so that the poller is not in a context that goes.
        let mut result = None;
        let gone = hold::end(context, || {
            result = real.take().map(|real| real());
            !is_active(device)
        });
        if gone {
            slow.forget_context(context);
        }
        result
    });
    match (result.flatten(), real) {
        (Some(result), _) => result,
        (None, Some(real)) => real(),
        (None, None) => SUCCESS,
    }
}
