//! Counting a process's GPU work, so that the daemon reads which of its compute groups have some.
//!
//! A launch adds to two words: that of its stream, and the *submitted* count of its group's slot
//! in the shared page. No lock, no system call. A group is *idle* once every stream with work for
//! it has been seen to have done it: by a synchronisation that the program made anyway, or by
//! the poller, a thread that asks when streams are outstanding and the program is silent.
//!
//! The rule is: when in doubt, busy. A launch counts as *started* before the real call and as
//! *returned* after it; an observation proves only what had returned before it began; a stream is idle
//! when as many are proved *done* as have started. The work of a context whose group is not
//! known for sure counts for every group that it may belong to.
//!
//! Left out: copies that copy engines make (their groups are others), work that the device launches itself, and
//! programs that reach libcuda past [`crate::hooks`]; their groups stay *unknown*. The
//! poller cannot ask about per-thread default streams: those become idle when their thread synchronises.

mod contexts;
pub(crate) mod copies;
mod events;
pub(crate) mod graphs;
pub(crate) mod hints;
pub(crate) mod hold;
mod long;
pub(crate) mod meter;
pub(crate) mod permits;
mod poller;
pub(crate) mod predictor;
mod streams;

use std::{
    ptr,
    sync::atomic::{AtomicBool, Ordering},
};

use gpumux_wire::page::{Direction, Page};

pub(crate) use self::{
    contexts::{
        context_of, create_context, destroy_context, detach_context, group_gone, group_made,
        is_destroyed, is_there, primary_context, release_primary, take_remade,
    },
    events::{ask_event, destroy_event, record, record_all, wait_event},
    poller::{guard_exit, start_poller},
    streams::{has_failed, is_fatal},
};
use self::{
    copies::{Copied, Operation, Shape, Way, transfer},
    meter::Piece,
    permits::On,
    poller::reap,
    predictor::Call,
    streams::{
        COPIES_LOST, FREE, GROUPS, HANDLES, Key, LOST, ORPHAN, PER_THREAD, POLLER_WANTED, STATES,
        STREAMS, Seen, Stream, UNKNOWN, ask, count, insert, is_capturing, lose, note, places,
        settle, slow, undisturbed,
    },
};
use crate::ground::{
    context::{self, bits, current_context, is_capturing_anywhere, page, within},
    driver::{self, CUcontext, CUdeviceptr, CUevent, CUresult, CUstream, SUCCESS, functions},
    gate,
};

functions! {
    event_create c"cuEventCreate" (*mut CUevent, u32);
    event_record c"cuEventRecord" (CUevent, CUstream);
    stream_query c"cuStreamQuery" (CUstream);
}

/// Copies from the host of so many bytes may be made by the compute group (an H100, from memory that is not pinned).
const STAGED: usize = 64 << 10;

/// This process was forked from one that counted. Its tables and locks are not usable.
static SPOILED: AtomicBool = AtomicBool::new(false);

/// The program submits work to a stream.
#[inline]
pub(crate) fn submit(
    stream: CUstream,
    own: bool,
    piece: Piece,
    real: impl FnOnce() -> CUresult,
) -> CUresult {
    let on = permits::is_active().then(|| admit(stream, own, piece));
    let result = gate::through(|| match on.flatten() {
        Some(on) => submit_measured(on, (stream, own), piece, real),
        None => submit_inside(stream, own, real).0,
    });
    hold::ahead();
    result
}

/// The program launches a graph. It may have copies in it.
pub(crate) fn launch_graph(
    graph: u64,
    stream: CUstream,
    own: bool,
    real: impl FnOnce() -> CUresult,
) -> CUresult {
    let nodes = if permits::is_active() {
        graphs::nodes(graph)
    } else {
        0
    };
    let piece = Piece::graph(graph, nodes);
    submit(stream, own, piece, || copy(stream, own, real))
}

/// Waits until the program may launch. On which stream, if the launch is to be measured.
#[cold]
fn admit(stream: CUstream, own: bool, piece: Piece) -> Option<On> {
    if gate::is_nested() || page().is_none() {
        return None;
    }
    let key = Key::new(stream, own)?;
    if is_capturing_anywhere() && is_capturing(key) {
        return None;
    }
    let place = key.find().or_else(|| insert(key))?;
    let state = &STATES[place];
    let on = On {
        place,
        stream: key.handle,
        context: state.context.load(Ordering::Relaxed),
        slots: state.slots.load(Ordering::Relaxed),
    };
    permits::enter(on, piece, || reap(Seen::Between)).then_some(on)
}

fn submit_measured(
    on: On,
    (stream, own): (CUstream, bool),
    piece: Piece,
    real: impl FnOnce() -> CUresult,
) -> CUresult {
    let before = permits::before(on);
    let (result, counted) = submit_inside(stream, own, real);
    if let Some((_, state)) = counted
        && result == SUCCESS
    {
        permits::launched(on, state.so_far().0, piece, before);
    }
    result
}

#[inline]
fn submit_inside(
    stream: CUstream,
    own: bool,
    real: impl FnOnce() -> CUresult,
) -> (CUresult, Option<(Key, &'static Stream)>) {
    let (result, counted) = counted(stream, own, real);
    if hold::is_armed()
        && result == SUCCESS
        && let Some((key, state)) = counted
    {
        hold::launched(state.context.load(Ordering::Relaxed), key.handle);
    }
    (result, counted)
}

/// Counts what `real` submits. Also returns for which stream.
#[inline]
fn counted(
    stream: CUstream,
    own: bool,
    real: impl FnOnce() -> CUresult,
) -> (CUresult, Option<(Key, &'static Stream)>) {
    let Some(page) = page() else {
        return (real(), None);
    };
    let key = Key::new(stream, own);
    if key.is_some_and(|key| is_capturing_anywhere() && is_capturing(key)) {
        return (real(), None);
    }
    let place = key.and_then(|key| key.find().or_else(|| insert(key)));
    let Some(state) = place.map(|place| &STATES[place]) else {
        if key.is_some() {
            lose(GROUPS.load(Ordering::Acquire));
        }
        return (real(), None);
    };
    state.started.fetch_add(1, Ordering::AcqRel);
    count(page, state.slots.load(Ordering::Relaxed));
    let result = real();
    state.returned.fetch_add(1, Ordering::AcqRel);
    if result != SUCCESS {
        note(result);
    }
    (result, key.map(|key| (key, state)))
}

/// A collective's kernel was launched on a stream just now.
pub(crate) fn collective_launched(stream: CUstream) {
    let place = Key::new(stream, false).and_then(Key::find);
    if let (Some(page), Some(place)) = (page(), place) {
        bits(STATES[place].slots.load(Ordering::Relaxed))
            .for_each(|slot| page.note_collective(slot));
    }
}

/// The program gives a stream what the compute group may do, or a copy engine. If it were not counted, a neighbour with as short a
/// slice might be let run beside it, and neither would ever end. Where a hold may pay, slices are long, and only launches count.
#[inline]
pub(crate) fn either(stream: CUstream, own: bool, real: impl FnOnce() -> CUresult) -> CUresult {
    copy(stream, own, || match hold::may_pay() {
        true => real(),
        false => counted(stream, own, real).0,
    })
}

/// The program copies so many bytes from the host: a copy engine does that, unless there are few.
#[inline]
pub(crate) fn from_host(
    stream: CUstream,
    own: bool,
    bytes: usize,
    real: impl FnOnce() -> CUresult,
) -> CUresult {
    let copied = (Way::Known(Direction::ToDevice), bytes as u64);
    transfer(stream, own, [copied].into_iter(), || {
        match bytes <= STAGED {
            true => either(stream, own, real),
            false => copy(stream, own, real),
        }
    })
}

/// The program copies so many bytes to the host.
#[inline]
pub(crate) fn to_host(
    stream: CUstream,
    own: bool,
    bytes: usize,
    call: impl FnOnce() -> CUresult,
) -> CUresult {
    let copied = (Way::Known(Direction::ToHost), bytes as u64);
    transfer(stream, own, [copied].into_iter(), call)
}

/// The program copies so many bytes to the host once its work is done, and may wait for that.
#[inline]
pub(crate) fn read(
    stream: CUstream,
    own: bool,
    bytes: usize,
    real: impl FnOnce() -> CUresult,
) -> CUresult {
    hold::read(|| to_host(stream, own, bytes, || copy(stream, own, real)))
}

/// The program makes copies that either engine may do.
#[inline]
pub(crate) fn copies(
    stream: CUstream,
    own: bool,
    copies: impl Iterator<Item = Copied> + Clone,
    real: impl FnOnce() -> CUresult,
) -> CUresult {
    transfer(stream, own, copies, || either(stream, own, real))
}

/// The program copies so many bytes between two addresses.
#[inline]
pub(crate) fn between(
    stream: CUstream,
    own: bool,
    (to, from, bytes): (CUdeviceptr, CUdeviceptr, usize),
    real: impl FnOnce() -> CUresult,
) -> CUresult {
    let copied = (Way::Between(to, from), bytes as u64);
    copies(stream, own, [copied].into_iter(), real)
}

/// The program copies a batch between so many addresses.
///
/// # Safety
/// It must be what the program passed.
pub(crate) unsafe fn batch(
    stream: CUstream,
    own: bool,
    (to, from, bytes, count): (*const CUdeviceptr, *const CUdeviceptr, *const usize, usize),
    real: impl FnOnce() -> CUresult,
) -> CUresult {
    // SAFETY: the caller's.
    let [to, from] = [to, from].map(|it| unsafe { copies::all(it, count) });
    // SAFETY: the caller's.
    let bytes = unsafe { copies::all(bytes, count) };
    let ways = (to.iter().zip(from)).map(|(to, from)| Way::Between(*to, *from));
    let copied = ways.zip(bytes.iter().map(|bytes| *bytes as u64));
    copies(stream, own, copied, real)
}

/// The program copies between planes or volumes.
///
/// # Safety
/// `shape` must be null or what the program passed.
pub(crate) unsafe fn shaped<const N: usize, const M: usize, const D: usize>(
    stream: CUstream,
    own: bool,
    shape: *const Shape<N, M, D>,
    real: impl FnOnce() -> CUresult,
) -> CUresult {
    // SAFETY: the caller's.
    let shape = unsafe { shape.as_ref() };
    copies(stream, own, shape.into_iter().map(Shape::copied), real)
}

/// The program copies between volumes, so many in a call.
///
/// # Safety
/// They must be what the program passed.
pub(crate) unsafe fn operations(
    stream: CUstream,
    own: bool,
    (first, count): (*const Operation, usize),
    real: impl FnOnce() -> CUresult,
) -> CUresult {
    // SAFETY: the caller's.
    let all = unsafe { copies::all(first, count) };
    copies(stream, own, all.iter().filter_map(Operation::copied), real)
}

/// The program gives a stream a copy, or something else that may run although the compute group is frozen.
#[inline]
pub(crate) fn copy(stream: CUstream, own: bool, real: impl FnOnce() -> CUresult) -> CUresult {
    gate::through(|| {
        let result = real();
        copied(stream, own, result);
        result
    })
}

/// The program has given a stream a copy, with this result.
fn copied(stream: CUstream, own: bool, result: CUresult) {
    if page().is_some() {
        match Key::new(stream, own).and_then(|key| key.find().or_else(|| insert(key))) {
            Some(place) => {
                STATES[place].copies.fetch_add(1, Ordering::AcqRel);
            }
            // A call without context fails, or finds one that is not known here.
            None if result == SUCCESS => COPIES_LOST.store(true, Ordering::Release),
            None => {}
        }
    }
}

/// Nothing more can be known of the work of this process: it stays busy. Copies that are not seen move nothing that may move.
pub(crate) fn lose_track() {
    UNKNOWN.store(true, Ordering::Release);
    lose(GROUPS.load(Ordering::Acquire));
}

/// Whether copies may be under way on any stream. Asks the driver; not while a capture goes on.
pub(crate) fn copies_under_way() -> bool {
    let found = slow(|slow| {
        if slow.exiting || !slow.captures.is_empty() || COPIES_LOST.load(Ordering::Acquire) {
            return true;
        }
        places().any(|(handle, state)| {
            handle != FREE && state.has_copies() && {
                ask(handle, state, Seen::Waited);
                state.has_copies()
            }
        })
    });
    found.unwrap_or(true)
}

/// Whether all work of all streams has ended. Asks the driver; during a capture that is unknown.
pub(crate) fn all_idle() -> bool {
    slow(|slow| {
        if slow.exiting || !slow.captures.is_empty() {
            return false;
        }
        for (handle, state) in places().filter(|(handle, _)| *handle != FREE) {
            ask(handle, state, Seen::Waited);
        }
        LOST.load(Ordering::Acquire) == 0
            && places().all(|(handle, state)| handle == FREE || state.is_idle())
    })
    .unwrap_or(false)
}

/// The program makes a call that work may follow.
#[inline]
pub(crate) fn input(call: Call, bytes: usize, real: impl FnOnce() -> CUresult) -> CUresult {
    hold::predict(call, bytes);
    real()
}

/// The program asks for a stream; success means that it is idle.
pub(crate) fn ask_stream(stream: CUstream, own: bool, real: impl FnOnce() -> CUresult) -> CUresult {
    hold::submitted();
    observe_stream(stream, own, Seen::Waited, real)
}

/// The program waits for a stream.
pub(crate) fn wait_stream(
    stream: CUstream,
    own: bool,
    real: impl FnOnce() -> CUresult,
) -> CUresult {
    hold::wait(|kept| observe_stream(stream, own, Seen::after_wait(kept), real))
}

fn observe_stream(
    stream: CUstream,
    own: bool,
    seen: Seen,
    real: impl FnOnce() -> CUresult,
) -> CUresult {
    let found = page()
        .and_then(|_| Key::new(stream, own))
        .and_then(Key::find)
        .map(|place| {
            let state = &STATES[place];
            (state, state.so_far())
        });
    let result = real();
    note(result);
    if let Some((state, so_far)) = found
        && result == SUCCESS
    {
        state.finish(so_far, seen);
    }
    result
}

/// The program waits for a whole context; null is the current one.
pub(crate) fn observe_context(context: CUcontext, real: impl FnOnce() -> CUresult) -> CUresult {
    let context = match context as u64 {
        0 => page().and_then(|_| current_context()).unwrap_or(0),
        context => context,
    };
    if page().is_none() || context == 0 {
        return real();
    }
    hold::wait_for_all(context, || observe_all(context, real))
}

fn observe_all(context: u64, real: impl FnOnce() -> CUresult) -> CUresult {
    let mut seen = [(0, 0); STREAMS];
    let mine = |state: &Stream| state.context.load(Ordering::Relaxed) == context;
    for ((_, state), so_far) in places()
        .zip(&mut seen)
        .filter(|((_, state), _)| mine(state))
    {
        *so_far = state.so_far();
    }
    let result = real();
    note(result);
    if result == SUCCESS {
        let mut slots = 0;
        // Also of other threads' own streams, which no other thread can query.
        for ((_, state), (work, copies)) in
            places().zip(&seen).filter(|((_, state), _)| mine(state))
        {
            state.landed.fetch_max(*copies, Ordering::AcqRel);
            state.done.fetch_max(*work, Ordering::AcqRel);
            slots |= state.slots.load(Ordering::Relaxed);
        }
        settle(slots, Seen::Waited);
    }
    result
}

/// The program is called back rather than wait.
pub(crate) fn call_back(real: impl FnOnce() -> CUresult) -> CUresult {
    let result = real();
    hold::submitted();
    result
}

/// A stream is destroyed; what it still has to do runs on unseen.
pub(crate) fn destroy_stream(stream: CUstream, real: impl FnOnce() -> CUresult) -> CUresult {
    hold::submitted();
    let key = page().and_then(|_| Key::new(stream, false));
    if let Some(key) = key.filter(|key| key.handle > PER_THREAD) {
        slow(|slow| {
            hold::forget_stream(key.handle);
            slow.end_capture_of(key);
            let Some(place) = key.find() else { return };
            let state = &STATES[place];
            if !state.is_clean() && !is_capturing_anywhere() {
                within(state.context.load(Ordering::Relaxed), || {
                    leave_event(state, stream)
                });
            }
            let left = if state.is_clean() { FREE } else { ORPHAN };
            HANDLES[place].store(left, Ordering::Release);
        });
    }
    real()
}

/// Leaves an event behind the stream's last work, unless that is done.
fn leave_event(state: &Stream, stream: CUstream) {
    let so_far = state.so_far();
    // SAFETY: the program's stream, which still exists.
    if stream_query().is_some_and(|ask| unsafe { ask(stream) } == SUCCESS) {
        return state.finish(so_far, Seen::Waited);
    }
    /// `CU_EVENT_DISABLE_TIMING`
    const NO_TIMING: u32 = 2;
    let mut event = ptr::null_mut();
    if let (Some(create), Some(record)) = (event_create(), event_record()) {
        // SAFETY: a place to write, an event just made and the stream.
        unsafe {
            if create(&raw mut event, NO_TIMING) == SUCCESS && record(event, stream) == SUCCESS {
                state.event.store(event as u64, Ordering::Release);
            }
        }
    }
}

pub(crate) fn begin_capture(
    stream: CUstream,
    own: bool,
    real: impl FnOnce() -> CUresult,
) -> CUresult {
    let Some(key) = page().and_then(|_| Key::new(stream, own)) else {
        return real();
    };
    // Before, and under the lock: the poller has finished asking and asks no more.
    slow(|slow| {
        slow.captures.push(key);
        context::set_captures(slow.captures.len());
    });
    let result = real();
    if result != SUCCESS {
        slow(|slow| slow.end_capture_of(key));
    }
    result
}

pub(crate) fn end_capture(
    stream: CUstream,
    own: bool,
    real: impl FnOnce() -> CUresult,
) -> CUresult {
    let result = real();
    // Also without success: an invalidated capture has ended.
    if let Some(key) = page().and_then(|_| Key::new(stream, own)) {
        slow(|slow| slow.end_capture_of(key));
    }
    result
}

/// From now on work is counted in `page`.
pub(crate) fn activate(page: &'static Page) {
    if !SPOILED.load(Ordering::Acquire) && driver::enabled() {
        context::set_page(page);
        hold::activate(undisturbed);
    }
}

/// After a fork, in the child: the driver is unusable here if the parent had used it.
pub(crate) fn in_child() {
    GROUPS.store(0, Ordering::Release);
    if context::take_page() {
        SPOILED.store(true, Ordering::Release);
    }
    POLLER_WANTED.store(false, Ordering::Release);
    COPIES_LOST.store(false, Ordering::Release);
    hold::in_child();
    permits::in_child();
    copies::in_child();
    gate::in_child();
}

#[cfg(test)]
mod tests {
    use super::{streams::USED, *};

    /// A stream of no context, at a place of the test's own.
    fn stream_at(place: usize) -> (CUstream, &'static Stream) {
        context::test_page();
        let handle = 0x1000 + place as u64;
        HANDLES[place].store(handle, Ordering::Release);
        USED.fetch_max(place + 1, Ordering::AcqRel);
        (handle as CUstream, &STATES[place])
    }

    #[test]
    fn errors_that_end_a_context_are_not_refusals() {
        let ending = [214, 220, 226, 700, 702, 710, 714, 719, 721];
        assert_eq!(ending.map(is_fatal), [true; 9]);
        assert_eq!(
            [215, 217, 225, 701, 711, 713, 720].map(is_fatal),
            [false; 7]
        );
    }

    #[test]
    fn copy_during_a_query_is_not_taken_for_complete() {
        let (stream, state) = stream_at(0);
        for own in [false, true] {
            copied(stream, own, SUCCESS);
            let asked = || {
                copied(stream, own, SUCCESS);
                SUCCESS
            };
            assert_eq!(observe_stream(stream, own, Seen::Waited, asked), SUCCESS);
            assert!(state.has_copies());
            assert_eq!(
                observe_stream(stream, own, Seen::Waited, || SUCCESS),
                SUCCESS
            );
            assert!(!state.has_copies());
        }
    }

    #[test]
    fn a_destroyed_stream_with_copies_is_remembered() {
        let (stream, state) = stream_at(1);
        copied(stream, false, SUCCESS);
        assert_eq!(destroy_stream(stream, || SUCCESS), SUCCESS);
        assert!(state.is_idle() && state.has_copies());
        assert_eq!(HANDLES[1].load(Ordering::Acquire), ORPHAN);
        let (stream, _) = stream_at(1);
        assert_eq!(
            observe_stream(stream, false, Seen::Waited, || SUCCESS),
            SUCCESS
        );
        assert_eq!(destroy_stream(stream, || SUCCESS), SUCCESS);
        assert_eq!(HANDLES[1].load(Ordering::Acquire), FREE);
    }

    #[test]
    fn default_streams_of_later_threads_are_told_apart() {
        let (stream, _) = stream_at(3);
        let key = |thread| Key {
            thread,
            ..Key::new(stream, false).expect("a key")
        };
        STATES[3].thread.store(1 << 16 | 1, Ordering::Relaxed);
        assert!(key(1).find().is_none());
        assert_eq!(key(1 << 16 | 1).find(), Some(3));
    }

    #[test]
    fn an_event_proves_the_copies_before_it() {
        let (stream, state) = stream_at(2);
        let event = 0x77 as CUevent;
        copied(stream, false, SUCCESS);
        record(event, stream, false, || SUCCESS);
        copied(stream, false, SUCCESS);
        ask_event(event, || SUCCESS);
        assert!(state.has_copies());
        record(event, stream, false, || SUCCESS);
        ask_event(event, || SUCCESS);
        assert!(!state.has_copies());
    }
}
