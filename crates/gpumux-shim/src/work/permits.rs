//! Where launches wait if the driver refuses the controls: the daemon writes permits (see [`gpumux_wire::permits`]).
//!
//! A group may launch freely, within a budget of what is launched and not done, or not at all. Only kernels and graphs wait, and none
//! that a stream captures. What was launched runs to its end. While others want the device, events between launches show how much is
//! outstanding ([`crate::work::meter`]).
//!
//! A thread waits here before it passes the gate, so memory can be moved meanwhile. It waits for the daemon no longer than its lease
//! lasts: then [`release`] lets all launch.

use std::{
    collections::BTreeMap,
    ptr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicPtr, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use gpumux_wire::{
    page::{SLOTS, Slot},
    permits::{Permit, Permitted},
};

use crate::{
    ground::{
        context::{aside, bits, is_capturing_anywhere, page},
        driver::{CUevent, CUresult, CUstream, SUCCESS, functions},
        gate, guard,
    },
    work::meter::{Meter, Piece},
};

/// How long a thread that may not launch sleeps before it looks again by itself: what lets it launch wakes it, but for [`release`].
const HELD: Duration = Duration::from_millis(10);
/// How long one sleeps whose budget is used up.
const FULL: Duration = Duration::from_micros(30);
/// How often the end of work is looked for while others want the device: with work outstanding, and with none.
const LOOK: (Duration, Duration) = (Duration::from_micros(150), Duration::from_millis(1));

/// The page; null: nothing waits.
static PAGE: AtomicPtr<Permitted> = AtomicPtr::new(ptr::null_mut());
/// Slots of the groups that wait there.
static GROUPS: AtomicU64 = AtomicU64::new(0);

functions! {
    event_create c"cuEventCreate" (*mut CUevent, u32);
    event_record c"cuEventRecord" (CUevent, CUstream);
    event_query c"cuEventQuery" (CUevent);
    event_elapsed c"cuEventElapsedTime" (*mut f32, CUevent, CUevent);
}

/// An event of ours.
struct Marker {
    /// Of which context; 0: that is gone.
    context: AtomicU64,
    event: u64,
}

/// Events that are not in use, with their contexts.
static SPARE: Mutex<Vec<(u64, u64)>> = Mutex::new(Vec::new());

impl Drop for Marker {
    fn drop(&mut self) {
        let context = *self.context.get_mut();
        if context != 0 {
            guard::lock(&SPARE).push((context, self.event));
        }
    }
}

/// What is outstanding, by the group's slot.
static METERS: Mutex<BTreeMap<u32, Meter<Arc<Marker>>>> = Mutex::new(BTreeMap::new());

fn with_meter<R>(slot: u32, work: impl FnOnce(&mut Meter<Arc<Marker>>) -> R) -> R {
    work(guard::lock(&METERS).entry(slot).or_default())
}

/// Nanoseconds since some moment.
fn now() -> u64 {
    static ORIGIN: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
    ORIGIN.get_or_init(Instant::now).elapsed().as_nanos() as u64
}

/// A group waits there from now on.
pub(crate) fn begin(permits: Option<Permitted>, slot: u32) {
    if let Some(new) = permits
        && PAGE.load(Ordering::Acquire).is_null()
    {
        // Never freed: a thread may be looking at it. There is one for each session.
        PAGE.store(Box::into_raw(Box::new(new)), Ordering::Release);
    }
    if slot < SLOTS as u32 && page_of_permits().is_some() {
        GROUPS.fetch_or(1 << slot, Ordering::AcqRel);
    }
}

/// Whether there is a page already.
pub(crate) fn has_page() -> bool {
    page_of_permits().is_some()
}

/// No daemon decides any more: all launch as they like.
pub(crate) fn release() {
    GROUPS.store(0, Ordering::Release);
    PAGE.store(ptr::null_mut(), Ordering::Release);
}

/// After a fork, in the child.
pub(crate) fn in_child() {
    release();
}

fn page_of_permits() -> Option<&'static Permitted> {
    // SAFETY: null, or a box that is never freed.
    unsafe { PAGE.load(Ordering::Acquire).as_ref() }
}

/// Whether launches of some group wait.
#[inline]
pub(crate) fn is_active() -> bool {
    GROUPS.load(Ordering::Acquire) != 0
}

/// How long the poller may pause, given that it would for so long.
pub(crate) fn hasten(pause: Duration, outstanding: bool) -> Duration {
    if !is_watched() {
        return pause;
    }
    pause.min(if outstanding { LOOK.0 } else { LOOK.1 })
}

/// Whether others want a device that a group of this process uses.
pub(crate) fn is_watched() -> bool {
    let groups = GROUPS.load(Ordering::Acquire);
    groups != 0
        && page_of_permits().is_some_and(|all| bits(groups).any(|slot| all.word(slot).watched))
}

/// A stream that is launched on.
#[derive(Clone, Copy)]
pub(crate) struct On {
    pub(crate) place: usize,
    pub(crate) stream: u64,
    pub(crate) context: u64,
    pub(crate) slots: u64,
}

impl On {
    fn slot(self) -> Option<u32> {
        bits(self.slots & GROUPS.load(Ordering::Acquire)).next()
    }

    /// Records an event of ours on the stream. None while a capture goes on, which it could spoil.
    fn record(self) -> Option<Arc<Marker>> {
        if is_capturing_anywhere() {
            return None;
        }
        aside(self.context, || {
            let marker = spare(self.context).or_else(|| make(self.context))?;
            // SAFETY: an event of ours; the stream is being used by the program's call.
            let recorded =
                unsafe { event_record()?(marker.event as CUevent, self.stream as CUstream) };
            (recorded == SUCCESS).then(|| Arc::new(marker))
        })
        .flatten()
    }
}

fn spare(context: u64) -> Option<Marker> {
    let mut spare = guard::lock(&SPARE);
    let at = spare.iter().rposition(|(of, _)| *of == context)?;
    let (context, event) = spare.swap_remove(at);
    let context = AtomicU64::new(context);
    Some(Marker { context, event })
}

fn make(context: u64) -> Option<Marker> {
    let mut event = ptr::null_mut();
    // SAFETY: a place to write.
    let made = unsafe { event_create()?(&raw mut event, 0) } == SUCCESS;
    let context = AtomicU64::new(context);
    let event = event as u64;
    made.then_some(Marker { context, event })
}

/// A thread that waits to launch, until dropped.
struct Waiting(&'static Slot);

impl Waiting {
    fn begin(slot: u32) -> Option<Self> {
        let counters = page()?.slot(slot)?;
        counters.begin_wait();
        Some(Self(counters))
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.end_wait();
    }
}

/// Waits until this may be launched. `look` finds out what is done. Whether the launch is to be measured.
pub(crate) fn enter(on: On, piece: Piece, look: impl Fn()) -> bool {
    let Some(slot) = on.slot() else {
        return false;
    };
    let mut waiting = None;
    while let Some(permits) = page_of_permits() {
        let word = permits.word(slot);
        let pause = match word.permit {
            Permit::Free => return false,
            Permit::Hold => {
                waiting = waiting.or_else(|| Waiting::begin(slot));
                HELD
            }
            // Nothing can be found out while a capture goes on, and that may wait for this thread.
            Permit::Budget(_) if is_capturing_anywhere() => return false,
            Permit::Budget(us) => {
                let budget = u64::from(us) * 1_000;
                let fits = || with_meter(slot, |meter| meter.admits(piece, budget, now()));
                // The driver is asked only when that may change something.
                if fits() || {
                    look();
                    fits()
                } {
                    return true;
                }
                // What is launched must be seen to end.
                if with_meter(slot, |meter| meter.is_open(on.place)) {
                    gate::try_through(|| mark(on, slot));
                }
                FULL
            }
        };
        permits.wait_while(slot, word, pause);
    }
    false
}

/// About to launch: records an event before it, if it takes one to measure how long it takes.
pub(crate) fn before(on: On) -> Before {
    let slot = on.slot();
    let begins = slot.is_some_and(|slot| with_meter(slot, |meter| meter.begins(on.place)));
    Before {
        slot,
        event: begins.then(|| on.record()).flatten(),
    }
}

/// What [`before`] found.
pub(crate) struct Before {
    slot: Option<u32>,
    event: Option<Arc<Marker>>,
}

/// It was launched: the stream has now been given `upto` pieces.
pub(crate) fn launched(on: On, upto: u64, piece: Piece, before: Before) {
    let Before { slot, event } = before;
    let Some(slot) = slot else { return };
    if with_meter(slot, |meter| {
        meter.launched(on.place, upto, piece, event, now())
    }) {
        mark(on, slot);
    }
}

/// Records an event behind what was launched on a stream. Without one the poller finds the end.
fn mark(on: On, slot: u32) {
    if let Some(marker) = on.record() {
        with_meter(slot, |meter| meter.mark(on.place, marker));
    }
}

/// Finds out what is done; `done`: how many pieces a stream has done, as is known so far. Returns what the streams have done now.
pub(crate) fn reap(done: impl Fn(usize) -> u64) -> Vec<(usize, u64)> {
    if is_capturing_anywhere() {
        return Vec::new();
    }
    let ended = |result: CUresult| result == SUCCESS || result != NOT_READY;
    let reached = |marker: &Arc<Marker>| {
        let context = marker.context.load(Ordering::Acquire);
        let query = || event_query().map(|query| unsafe_query(query, marker));
        // An error ends the context, and all that it had.
        aside(context, query).flatten().is_none_or(ended)
    };
    let between = |from: &Arc<Marker>, to: &Arc<Marker>| {
        let mut ms = 0.0;
        let context = to.context.load(Ordering::Acquire);
        // SAFETY: a place to write and two events of ours, of one context.
        let asked = aside(context, || unsafe {
            event_elapsed().map(|ask| ask(&raw mut ms, from.event as CUevent, to.event as CUevent))
        });
        let is_known = asked.flatten() == Some(SUCCESS) && ms >= 0.0;
        is_known.then_some((f64::from(ms) * 1e6) as u64)
    };
    let mut meters = guard::lock(&METERS);
    let reap = |meter: &mut Meter<_>| meter.reap(reached, between, &done);
    meters.values_mut().flat_map(reap).collect()
}

/// `CUDA_ERROR_NOT_READY`
const NOT_READY: CUresult = 600;

fn unsafe_query(query: unsafe extern "C" fn(CUevent) -> CUresult, marker: &Marker) -> CUresult {
    // SAFETY: an event of ours, whose context is current.
    unsafe { query(marker.event as CUevent) }
}

/// A context is about to go, and its events with it.
pub(crate) fn forget(context: u64) {
    let gone = |marker: &Arc<Marker>| {
        let own = marker.context.load(Ordering::Acquire) == context;
        if own {
            marker.context.store(0, Ordering::Release);
        }
        own || marker.context.load(Ordering::Acquire) == 0
    };
    for meter in guard::lock(&METERS).values_mut() {
        meter.forget(gone);
    }
    guard::lock(&SPARE).retain(|(of, _)| *of != context);
}

#[cfg(test)]
mod tests {
    use std::thread;

    use gpumux_wire::permits::{Permits, Word};

    use super::*;

    #[test]
    fn held_launch_waits_for_its_permit_or_the_release() {
        let _alone = crate::ground::guard::alone();
        const SLOT: u32 = 5;
        let (daemon, file) = Permits::create().unwrap();
        let set = |permit| {
            let watched = true;
            daemon.set(SLOT, Word { permit, watched });
        };
        let launch = |slots| {
            let on = On {
                place: 0,
                stream: 0,
                context: 0,
                slots,
            };
            thread::spawn(move || enter(on, Piece::new(1, [0; 3]), || ()))
        };
        assert!(!is_active() && !launch(1 << SLOT).join().unwrap());
        set(Permit::Hold);
        begin(Permitted::open(file).ok(), SLOT);
        assert!(is_active() && is_watched());
        assert!(!launch(1).join().unwrap(), "another group does not wait");
        let held = launch(1 << SLOT);
        thread::yield_now();
        assert!(!held.is_finished());
        set(Permit::Budget(400));
        assert!(held.join().unwrap(), "it is measured");
        set(Permit::Hold);
        let held = launch(1 << SLOT);
        thread::yield_now();
        assert!(!held.is_finished());
        release();
        assert!(!held.join().unwrap());
        assert!(!is_active() && !is_watched());
    }
}
