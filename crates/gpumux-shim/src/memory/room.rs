//! Room for what the driver makes for itself: contexts, streams, code, executable graphs.
//!
//! That takes device memory for which no program asks, so that none was moved for it. Where there is none, the call is made again
//! once the accounting has room: it has failed, so nothing was made. Which calls those are says the list of entry points.

use std::{ffi::c_int, time::Duration};

use crate::{
    ground::{
        context::is_capturing_anywhere,
        driver::{CUcontext, CUresult, SUCCESS},
        gate, lease,
    },
    memory::{
        attempt::{self, Refused, in_time},
        space::{self, current_device, give, known_device, off, take_within, with},
        vmm::OUT_OF_MEMORY,
    },
    work,
};

/// Room for a context: more than one takes at first (526 MiB on an H200, driver 580.159.04). Of a small device, an eighth at most.
const CONTEXT: u64 = 640 << 20;
/// Room for anything else at first. What it takes is not known: each further attempt has twice as much, up to a context's.
const FIRST: u64 = 64 << 20;

/// How long such a call waits for room: others' memory moves in less. A context waits as an allocation does.
const WAIT: Duration = Duration::from_secs(30);

/// Which calls are made again.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Again {
    No,
    Yes,
    /// It submits work: during a capture, its failure may have spoiled that. What this answers is of the call itself, since work that fails
    /// later never fails for want of memory.
    UnlessCapturing,
}

/// Makes the program's call, which passes the gate itself. Where the driver has no memory for it, again with room on the current device.
#[inline]
pub(crate) fn call(again: Again, call: impl Fn() -> CUresult) -> CUresult {
    match call() {
        OUT_OF_MEMORY if again != Again::No => repeat(again, &call),
        result => result,
    }
}

#[cold]
fn repeat(again: Again, call: &dyn Fn() -> CUresult) -> CUresult {
    let spoils = || again == Again::UnlessCapturing && is_capturing_anywhere();
    if spoils() {
        return OUT_OF_MEMORY;
    }
    with_room(current_device, (FIRST, WAIT), &|| match spoils() {
        true => OUT_OF_MEMORY,
        false => call(),
    })
}

/// Makes a call again that has found no memory. Others' memory moves where the accounting has no room either. Not inside the gate, as this
/// may wait for that.
fn with_room(
    device: impl FnOnce() -> Option<c_int>,
    (first, wait): (u64, Duration),
    call: &dyn Fn() -> CUresult,
) -> CUresult {
    // A call that the driver makes itself may be under a lock of its own: nothing may be waited for.
    if off()
        || gate::is_nested()
        || !(lease::session() > 0 || lease::await_link() || lease::await_return())
    {
        return OUT_OF_MEMORY;
    }
    let known = device().and_then(|it| with(|space| Some((it, space.devices.get(&it)?.total))));
    let Some((device, total)) = known else {
        return OUT_OF_MEMORY;
    };
    let most = CONTEXT.min(total / 8);
    let mut room = first.min(most);
    let made = in_time(None, || {
        if !take_within(wait, device, room, false, None) {
            return Err(Refused::ByAccounting);
        }
        let made = attempt::make(None, || match call() {
            SUCCESS => Ok(()),
            error => Err(error),
        });
        // What was made is counted as a context, or by what the driver reports as used.
        give(device, room, false);
        space::trim();
        room = most.min(2 * room);
        made
    });
    made.map_or_else(Refused::error, |()| SUCCESS)
}

/// Makes a context of a device.
///
/// # Safety
/// `out` must be what the program passed.
pub(crate) unsafe fn create_context(
    out: *mut CUcontext,
    device: c_int,
    real: impl Fn() -> CUresult,
) -> CUresult {
    // SAFETY: the caller's.
    for_context(device, || unsafe {
        work::create_context(out, || gate::through(&real))
    })
}

/// Makes the program's call, which takes as much of a device as a context.
pub(crate) fn for_context(device: c_int, call: impl Fn() -> CUresult) -> CUresult {
    match call() {
        OUT_OF_MEMORY => with_room(|| known_device(device), (CONTEXT, lease::ANSWER), &call),
        result => result,
    }
}
