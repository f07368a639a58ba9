//! The streams of this process and what is known of each: what was submitted, what has returned, what is done.

use std::{
    cell::Cell,
    ffi::c_int,
    panic::AssertUnwindSafe,
    ptr,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
};

use gpumux_wire::page::{Page, SLOTS};

use crate::{
    ground::{
        context::{self, bits, current_context, page, within},
        driver::{CUcontext, CUevent, CUresult, CUstream, SUCCESS, functions},
        guard, wake,
    },
    work::{hold, permits},
};

/// Streams that are told apart. (PyTorch has 32 per priority.)
pub(super) const STREAMS: usize = 512;

/// `CU_STREAM_LEGACY` and `CU_STREAM_PER_THREAD`, as handles of streams.
pub(super) const LEGACY: u64 = 1;
pub(super) const PER_THREAD: u64 = 2;

/// Handles of places that have no stream: free, and left with work by a destroyed stream.
pub(super) const FREE: u64 = 0;
pub(super) const ORPHAN: u64 = u64::MAX;

/// Results after which a context's work has ended for good: the hardware (`CUDA_ERROR_ECC_UNCORRECTABLE`, `NVLINK_UNCORRECTABLE`,
/// `CONTAINED`), addresses, assertions, launches and instructions that went wrong (`CUDA_ERROR_ILLEGAL_ADDRESS` to
/// `CUDA_ERROR_LAUNCH_FAILED`, but for those between that are refusals), `CUDA_ERROR_TENSOR_MEMORY_LEAK`.
pub(crate) const fn is_fatal(result: CUresult) -> bool {
    matches!(result, 214 | 220 | 226 | 700 | 702 | 710 | 714..=719 | 721)
}

/// A context of this process has seen an error that ends it.
static FAILED: AtomicBool = AtomicBool::new(false);

/// Whether a context of this process has, or had, seen an error that ends it.
pub(crate) fn has_failed() -> bool {
    FAILED.load(Ordering::Acquire)
}

/// Tells the daemon of an error that the program got and that ends the context, or (806, 810) of a lost MPS server.
pub(super) fn note(result: CUresult) {
    if notice(result)
        && let Some(page) = page()
    {
        page.receive_fault();
    }
}

/// As [`note`], of an error that the program itself need not have got: it may wait without end for work that a lost server had.
/// Whether it was such an error.
pub(super) fn notice(result: CUresult) -> bool {
    if is_fatal(result) {
        FAILED.store(true, Ordering::Release);
    }
    let ends = is_fatal(result) || matches!(result, 806 | 810);
    if ends && let Some(page) = page() {
        page.set_fault(result as u32);
    }
    ends
}

/// What is known of one stream. Counts never go down, also when another stream takes the place.
#[repr(align(64))]
pub(super) struct Stream {
    /// Tells default streams apart: which context's, and which thread's.
    pub(super) scope: AtomicU64,
    pub(super) thread: AtomicU64,
    /// Pieces of work that the program has begun to submit.
    pub(super) started: AtomicU64,
    /// Those whose submission has returned.
    pub(super) returned: AtomicU64,
    /// Those that are done.
    pub(super) done: AtomicU64,
    /// The groups that it may belong to, by their slots.
    pub(super) slots: AtomicU64,
    /// The context to ask in, and the green context, if it is of one.
    pub(super) context: AtomicU64,
    pub(super) green: AtomicU64,
    /// For an orphan: the event to ask instead.
    pub(super) event: AtomicU64,
    /// Copies that the program has given it, counted when the call has returned: until then its thread is inside the gate.
    pub(super) copies: AtomicU64,
    /// Those that are done.
    pub(super) landed: AtomicU64,
}

/// The streams' handles, apart from the rest because they are searched.
pub(super) static HANDLES: [AtomicU64; STREAMS] = [const { AtomicU64::new(FREE) }; STREAMS];

pub(super) static STATES: [Stream; STREAMS] = [const {
    Stream {
        scope: AtomicU64::new(0),
        thread: AtomicU64::new(0),
        started: AtomicU64::new(0),
        returned: AtomicU64::new(0),
        done: AtomicU64::new(0),
        slots: AtomicU64::new(0),
        context: AtomicU64::new(0),
        green: AtomicU64::new(0),
        event: AtomicU64::new(0),
        copies: AtomicU64::new(0),
        landed: AtomicU64::new(0),
    }
}; STREAMS];

/// How many places have ever been used.
pub(super) static USED: AtomicUsize = AtomicUsize::new(0);

/// Slots of groups that got work of which nothing more can be known: they stay busy.
pub(super) static LOST: AtomicU64 = AtomicU64::new(0);

const _: () = assert!(SLOTS == 64, "one bit for each slot");

/// The program has called a function that is not on the list: the demand of groups that it makes later is unknown, too.
pub(super) static UNKNOWN: AtomicBool = AtomicBool::new(false);

/// Copies were given to a stream that is not known.
pub(super) static COPIES_LOST: AtomicBool = AtomicBool::new(false);

/// Set by the first stream: the agent starts the poller.
pub(super) static POLLER_WANTED: AtomicBool = AtomicBool::new(false);

/// What is changed under a lock: rarely, and never for a launch on a known stream.
pub(super) struct Slow {
    /// Contexts whose groups are known for sure, by their slots.
    pub(super) contexts: Vec<(u64, u64)>,
    /// Streams that are capturing.
    pub(super) captures: Vec<Key>,
    /// The process is about to end: libcuda is no longer to be called.
    pub(super) exiting: bool,
}

pub(super) static SLOW: Mutex<Slow> = Mutex::new(Slow {
    contexts: Vec::new(),
    captures: Vec::new(),
    exiting: false,
});

thread_local! {
    static IN_SLOW: Cell<bool> = const { Cell::new(false) };
    /// Where this thread found its last stream.
    static LAST: Cell<usize> = const { Cell::new(0) };
    /// This thread's number, from 1; 0: none yet.
    static THREAD: Cell<u64> = const { Cell::new(0) };
    /// Slots of the compute groups that this thread has made and no context has claimed.
    pub(super) static MADE: Cell<u64> = const { Cell::new(0) };
}

functions! {
    stream_get_ctx c"cuStreamGetCtx" (CUstream, *mut CUcontext);
    stream_get_green_ctx c"cuStreamGetGreenCtx" (CUstream, *mut CUcontext);
    stream_is_capturing c"cuStreamIsCapturing" (CUstream, *mut c_int);
    stream_query c"cuStreamQuery" (CUstream);
    event_query c"cuEventQuery" (CUevent);
    event_destroy c"cuEventDestroy_v2" (CUevent);
}

/// The slots of all compute groups that have one, as bits.
pub(super) static GROUPS: AtomicU64 = AtomicU64::new(0);
/// Those that contexts have claimed which are not gone.
pub(super) static CLAIMED: AtomicU64 = AtomicU64::new(0);

/// A stream's identity.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Key {
    pub(super) handle: u64,
    /// See [`Stream`].
    pub(super) scope: u64,
    pub(super) thread: u64,
}

impl Key {
    /// `own`: the function's default stream is the thread's own.
    pub(super) fn new(stream: CUstream, own: bool) -> Option<Self> {
        let handle = match stream as u64 {
            0 if own => PER_THREAD,
            0 => LEGACY,
            handle => handle,
        };
        let (scope, thread) = match handle {
            LEGACY => (current_context()?, 0),
            PER_THREAD => (current_context()?, thread_number()),
            _ => (0, 0),
        };
        Some(Self {
            handle,
            scope,
            thread,
        })
    }

    /// Where the stream is, if it is known.
    pub(super) fn find(self) -> Option<usize> {
        let is = |place: usize| {
            HANDLES[place].load(Ordering::Acquire) == self.handle
                && STATES[place].scope.load(Ordering::Relaxed) == self.scope
                && STATES[place].thread.load(Ordering::Relaxed) == self.thread
        };
        let last = LAST.get();
        if is(last) {
            return Some(last);
        }
        let found = (0..USED.load(Ordering::Acquire)).find(|place| is(*place))?;
        LAST.set(found);
        Some(found)
    }
}

fn thread_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    if THREAD.get() == 0 {
        THREAD.set(NEXT.fetch_add(1, Ordering::Relaxed));
    }
    THREAD.get()
}

/// Runs `work` under the lock. `None` within itself: libcuda may call its own exports through ours.
pub(super) fn slow<R>(work: impl FnOnce(&mut Slow) -> R) -> Option<R> {
    if IN_SLOW.replace(true) {
        return None;
    }
    let mut guard = guard::lock(&SLOW);
    let result = std::panic::catch_unwind(AssertUnwindSafe(|| work(&mut guard)));
    drop(guard);
    IN_SLOW.set(false);
    result.ok()
}

/// Runs `work` while no capture goes on or begins and no context is destroyed, unless one does just now.
pub(super) fn undisturbed(work: &mut dyn FnMut()) {
    slow(|slow| {
        if !slow.exiting && slow.captures.is_empty() {
            work();
        }
    });
}

impl Stream {
    pub(super) fn is_idle(&self) -> bool {
        // Order matters: what is done now had started before.
        let done = self.done.load(Ordering::Acquire);
        done >= self.started.load(Ordering::Acquire)
    }

    pub(super) fn has_copies(&self) -> bool {
        // As above.
        let landed = self.landed.load(Ordering::Acquire);
        landed < self.copies.load(Ordering::Acquire)
    }

    /// Without work and copies.
    pub(super) fn is_clean(&self) -> bool {
        self.is_idle() && !self.has_copies()
    }

    /// The pieces of work, and the copies, whose submission has returned.
    pub(super) fn so_far(&self) -> (u64, u64) {
        (
            self.returned.load(Ordering::Acquire),
            self.copies.load(Ordering::Acquire),
        )
    }

    /// So much is done.
    pub(super) fn finish(&self, (work, copies): (u64, u64), seen: Seen) {
        self.landed.fetch_max(copies, Ordering::AcqRel);
        self.done.fetch_max(work, Ordering::AcqRel);
        settle(self.slots.load(Ordering::Relaxed), seen);
    }
}

/// How the end of work was seen.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Seen {
    /// The program asked, waited, or has submitted nothing for a while.
    Waited,
    /// Between two of its launches.
    Between,
}

impl Seen {
    /// The program has waited. Where it keeps the device for what comes next, its request goes on.
    pub(super) fn after_wait(keeps_device: bool) -> Self {
        if keeps_device {
            Self::Between
        } else {
            Self::Waited
        }
    }
}

pub(super) fn places() -> impl Iterator<Item = (u64, &'static Stream)> {
    let used = USED.load(Ordering::Acquire);
    HANDLES[..used]
        .iter()
        .map(|handle| handle.load(Ordering::Acquire))
        .zip(&STATES)
}

/// Says of these slots that all is done, where it is.
pub(super) fn settle(slots: u64, seen: Seen) {
    let Some(page) = page() else { return };
    for slot in bits(slots & !LOST.load(Ordering::Acquire)) {
        let Some(counters) = page.slot(slot) else {
            continue;
        };
        // Before the streams: a thread that is counted in it has also started on its stream.
        let submitted = counters.submitted();
        let busy = |(handle, stream): (u64, &Stream)| {
            handle != FREE
                && stream.slots.load(Ordering::Relaxed) >> slot & 1 != 0
                && !stream.is_idle()
        };
        if places().any(busy) {
            continue;
        }
        match seen {
            Seen::Waited => counters.complete(submitted),
            Seen::Between => counters.find_complete(submitted),
        }
    }
    hold::settled(slots);
}

/// Nothing more can be known of the work of these groups, which have some.
pub(super) fn lose(slots: u64) {
    if let Some(page) = page() {
        LOST.fetch_or(slots, Ordering::AcqRel);
        begin_counting(slots);
        count(page, slots);
    }
}

pub(super) fn count(page: &Page, slots: u64) {
    for slot in bits(slots) {
        if let Some(counters) = page.slot(slot) {
            counters.submit();
        }
    }
}

pub(super) fn is_capturing(key: Key) -> bool {
    let mut status = 0;
    // The legacy stream cannot capture, and must not be asked while others do.
    // SAFETY: the program's stream, and a place to write.
    key.handle != LEGACY
        && stream_is_capturing().is_some_and(|ask| unsafe {
            ask(key.handle as CUstream, &raw mut status) == SUCCESS && status != 0
        })
}

/// Makes a place for a stream. `None` when there is none left.
#[cold]
pub(super) fn insert(key: Key) -> Option<usize> {
    let place = slow(|slow| {
        if let Some(place) = key.find() {
            return Some(place);
        }
        let context = match key.handle {
            LEGACY | PER_THREAD => key.scope,
            handle => {
                let mut context = ptr::null_mut();
                // SAFETY: the program's stream, and a place to write.
                let asked = stream_get_ctx()
                    .map(|ask| unsafe { ask(handle as CUstream, &raw mut context) });
                if asked == Some(SUCCESS) {
                    context as u64
                } else {
                    current_context()?
                }
            }
        };
        let mut green = ptr::null_mut();
        if key.handle > PER_THREAD
            && let Some(ask) = stream_get_green_ctx()
        {
            // SAFETY: as above. A failure leaves null.
            unsafe { ask(key.handle as CUstream, &raw mut green) };
        }
        let slots = slow.slots_of(context);
        let used = USED.load(Ordering::Acquire);
        if used == STREAMS && slow.captures.is_empty() {
            // The poller may not have come to it.
            for (handle, state) in places().filter(|(handle, _)| *handle == ORPHAN) {
                ask(handle, state, Seen::Waited);
            }
        }
        let free = HANDLES[..used]
            .iter()
            .position(|handle| handle.load(Ordering::Acquire) == FREE);
        // Full: an idle stream's place; it gets another with its next work.
        let idle = || {
            (used == STREAMS)
                .then(|| STATES.iter().position(Stream::is_clean))
                .flatten()
        };
        let place = free.or_else(idle).or((used < STREAMS).then_some(used))?;
        let state = &STATES[place];
        HANDLES[place].store(FREE, Ordering::Release);
        state.scope.store(key.scope, Ordering::Relaxed);
        state.thread.store(key.thread, Ordering::Relaxed);
        state.slots.store(slots, Ordering::Relaxed);
        state.context.store(context, Ordering::Relaxed);
        state.green.store(green as u64, Ordering::Relaxed);
        state.event.store(0, Ordering::Relaxed);
        HANDLES[place].store(key.handle, Ordering::Release);
        USED.store(used.max(place + 1), Ordering::Release);
        begin_counting(slots);
        hold::know(context, slots);
        Some(place)
    })
    .flatten()?;
    if !POLLER_WANTED.swap(true, Ordering::AcqRel) {
        wake::agent();
    }
    Some(place)
}

impl Slow {
    /// The groups that a context's work may belong to: its own, or all that no context has claimed.
    fn slots_of(&self, context: u64) -> u64 {
        if let Some((_, slots)) = self.contexts.iter().find(|(known, _)| *known == context) {
            return *slots;
        }
        let all = GROUPS.load(Ordering::Acquire);
        let claimed = self
            .contexts
            .iter()
            .fold(0, |mask, (_, slots)| mask | slots);
        match all & !claimed {
            0 => all,
            unclaimed => unclaimed,
        }
    }

    /// The contexts have changed.
    pub(super) fn claim(&self) {
        let slots = self.contexts.iter().fold(0, |all, (_, slots)| all | slots);
        CLAIMED.store(slots, Ordering::Release);
    }

    /// Forgets a context, green or not, and all its streams.
    pub(super) fn forget_context(&mut self, context: u64) {
        hold::forget(context);
        permits::forget(context);
        let all = |of: bool| {
            let some = self.contexts.iter().filter(|it| (it.0 == context) == of);
            some.fold(0, |slots, it| slots | it.1)
        };
        let own = all(true) & !all(false);
        self.contexts.retain(|(known, _)| *known != context);
        self.claim();
        // The next context may have its slots.
        for slot in bits(own & LOST.fetch_and(!own, Ordering::AcqRel)) {
            if let Some(counters) = page().and_then(|page| page.slot(slot)) {
                counters.complete(counters.submitted());
            }
        }
        for ((handle, state), slot) in places().zip(&HANDLES) {
            let is = |field: &AtomicU64| field.load(Ordering::Relaxed) == context;
            if handle != FREE && (is(&state.context) || is(&state.green)) {
                self.end_capture_of(Key {
                    handle,
                    scope: state.scope.load(Ordering::Relaxed),
                    thread: state.thread.load(Ordering::Relaxed),
                });
                let (_, copies) = state.so_far();
                let all = (state.started.load(Ordering::Acquire), copies);
                state.finish(all, Seen::Waited);
                slot.store(FREE, Ordering::Release);
            }
        }
    }

    pub(super) fn end_capture_of(&mut self, key: Key) {
        self.captures.retain(|capturing| *capturing != key);
        context::set_captures(self.captures.len());
    }
}

pub(super) fn begin_counting(slots: u64) {
    if let Some(page) = page() {
        bits(slots)
            .filter_map(|slot| page.slot(slot))
            .for_each(|slot| slot.begin_counting());
    }
}

/// Asks the driver whether a stream has done what it was given.
pub(super) fn ask(handle: u64, state: &Stream, seen: Seen) {
    let so_far = state.so_far();
    // While a submission is under way the answer would prove nothing of use.
    if state.is_clean() || so_far.0 != state.started.load(Ordering::Acquire) {
        return;
    }
    let event = state.event.load(Ordering::Acquire) as CUevent;
    let result = within(state.context.load(Ordering::Relaxed), || match handle {
        PER_THREAD => None,
        ORPHAN if event.is_null() => None,
        // SAFETY: an event of our own.
        ORPHAN => event_query().map(|query| unsafe { query(event) }),
        // SAFETY: the lock is held, so the program has not destroyed the stream.
        stream => stream_query().map(|query| unsafe { query(stream as CUstream) }),
    });
    let Some(result) = result.flatten() else {
        return;
    };
    notice(result);
    if result == SUCCESS || is_fatal(result) {
        state.finish(so_far, seen);
        if handle == ORPHAN {
            state.event.store(0, Ordering::Release);
            if let Some(destroy) = event_destroy() {
                // SAFETY: as above, for the last time.
                unsafe { destroy(event) };
            }
        }
    }
}
