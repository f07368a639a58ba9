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
//! programs that reach libcuda past [`crate::driver`]; their groups stay *unknown*. The
//! poller cannot ask about per-thread default streams: those become idle when their thread synchronises.

mod events;

use std::{
    cell::Cell,
    ffi::c_int,
    panic::AssertUnwindSafe,
    ptr,
    sync::{
        Mutex, Once,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use gpumux_wire::page::{Page, SLOTS};

pub(crate) use self::events::{destroy_event, observe_event, record, record_all};
pub(crate) use crate::context::{current_context, is_capturing_anywhere, relax_captures, within};
use crate::{
    context::{self, bits, page},
    driver::{self, CUcontext, CUevent, CUresult, CUstream, SUCCESS, functions},
    gate, guard, hold,
    meter::Piece,
    permits::{self, On},
    predictor::Call,
    wake,
};

/// Streams that are told apart. (PyTorch has 32 per priority.)
const STREAMS: usize = 512;

/// Copies from the host of so many bytes may be made by the compute group (an H100, from memory that is not pinned).
const STAGED: usize = 64 << 10;

/// How often the poller looks while the program submits work.
const BUSY_TICK: Duration = Duration::from_millis(8);

/// Its first and longest pause while the program is silent: with work outstanding, and with none.
const SILENT_TICK: (Duration, Duration) = (Duration::from_millis(2), Duration::from_millis(16));
const IDLE_TICK: (Duration, Duration) = (Duration::from_millis(4), Duration::from_millis(32));

/// How long the process's exit waits for memory that is away to come back.
const EXIT_AWAKE: Duration = Duration::from_secs(5);
/// How long it waits for the poller to leave libcuda.
const EXIT_WAIT: Duration = Duration::from_millis(100);

/// `CU_STREAM_LEGACY` and `CU_STREAM_PER_THREAD`, as handles of streams.
const LEGACY: u64 = 1;
const PER_THREAD: u64 = 2;
/// Handles of places that have no stream: free, and left with work by a destroyed stream.
const FREE: u64 = 0;
const ORPHAN: u64 = u64::MAX;

/// Results after which a context's work has ended for good: addresses, assertions, launches and
/// instructions that went wrong (`CUDA_ERROR_ILLEGAL_ADDRESS` to `CUDA_ERROR_LAUNCH_FAILED`, but for
/// those between that are refusals).
pub(crate) const fn is_fatal(result: CUresult) -> bool {
    matches!(result, 700 | 702 | 710 | 714..=719)
}

/// A context of this process has seen an error that ends it.
static FAILED: AtomicBool = AtomicBool::new(false);

/// Whether a context of this process has, or had, seen an error that ends it.
pub(crate) fn has_failed() -> bool {
    FAILED.load(Ordering::Acquire)
}

/// Tells the daemon of an error that the program got and that ends the context, or (806, 810) of a lost MPS server.
fn note(result: CUresult) {
    if notice(result)
        && let Some(page) = page()
    {
        page.receive_fault();
    }
}

/// As [`note`], of an error that the program itself need not have got: it may wait without end for work that a lost server had.
/// Whether it was such an error.
fn notice(result: CUresult) -> bool {
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
struct Stream {
    /// Tells default streams apart: which context's, and whose thread's.
    scope: AtomicU64,
    /// Pieces of work that the program has begun to submit.
    started: AtomicU64,
    /// Those whose submission has returned.
    returned: AtomicU64,
    /// Those that are done.
    done: AtomicU64,
    /// The groups that it may belong to, by their slots.
    slots: AtomicU64,
    /// The context to ask in, and the green context, if it is of one.
    context: AtomicU64,
    green: AtomicU64,
    /// For an orphan: the event to ask instead.
    event: AtomicU64,
    /// Copies that the program has given it, counted when the call has returned: until then its thread is inside the gate.
    copies: AtomicU64,
    /// Those that are done.
    landed: AtomicU64,
}

/// The streams' handles, apart from the rest because they are searched.
static HANDLES: [AtomicU64; STREAMS] = [const { AtomicU64::new(FREE) }; STREAMS];
static STATES: [Stream; STREAMS] = [const {
    Stream {
        scope: AtomicU64::new(0),
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
static USED: AtomicUsize = AtomicUsize::new(0);

/// This process was forked from one that counted. Its tables and locks are not usable.
static SPOILED: AtomicBool = AtomicBool::new(false);
/// Slots of groups that got work of which nothing more can be known: they stay busy.
static LOST: AtomicU64 = AtomicU64::new(0);
const _: () = assert!(SLOTS == 64, "one bit for each slot");
/// The program has called a function that is not on the list: the demand of groups that it makes later is unknown, too.
static UNKNOWN: AtomicBool = AtomicBool::new(false);
/// Copies were given to a stream that is not known.
static COPIES_LOST: AtomicBool = AtomicBool::new(false);
/// Set by the first stream: the agent starts the poller.
static POLLER_WANTED: AtomicBool = AtomicBool::new(false);

/// What is changed under a lock: rarely, and never for a launch on a known stream.
struct Slow {
    /// Contexts whose groups are known for sure, by their slots.
    contexts: Vec<(u64, u64)>,
    /// Streams that are capturing.
    captures: Vec<Key>,
    /// The process is about to end: libcuda is no longer to be called.
    exiting: bool,
}

static SLOW: Mutex<Slow> = Mutex::new(Slow {
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
    static MADE: Cell<u64> = const { Cell::new(0) };
}

functions! {
    stream_get_ctx c"cuStreamGetCtx" (CUstream, *mut CUcontext);
    stream_get_green_ctx c"cuStreamGetGreenCtx" (CUstream, *mut CUcontext);
    stream_is_capturing c"cuStreamIsCapturing" (CUstream, *mut c_int);
    stream_query c"cuStreamQuery" (CUstream);
    event_create c"cuEventCreate" (*mut CUevent, u32);
    event_record c"cuEventRecord" (CUevent, CUstream);
    event_query c"cuEventQuery" (CUevent);
    event_destroy c"cuEventDestroy_v2" (CUevent);
    primary_retain c"cuDevicePrimaryCtxRetain" (*mut CUcontext, c_int);
    primary_release c"cuDevicePrimaryCtxRelease_v2" (c_int);
    primary_state c"cuDevicePrimaryCtxGetState" (c_int, *mut u32, *mut c_int);
}

/// The slots of all compute groups that have one, as bits.
static GROUPS: AtomicU64 = AtomicU64::new(0);
/// Those that contexts have claimed which are not gone.
static CLAIMED: AtomicU64 = AtomicU64::new(0);
/// The driver has taken a group from a context that goes on: the process was checkpointed.
static REMADE: AtomicBool = AtomicBool::new(false);

/// A stream's identity.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Key {
    handle: u64,
    scope: u64,
}

impl Key {
    /// `own`: the function's default stream is the thread's own.
    fn new(stream: CUstream, own: bool) -> Option<Self> {
        let handle = match stream as u64 {
            0 if own => PER_THREAD,
            0 => LEGACY,
            handle => handle,
        };
        let scope = match handle {
            LEGACY => current_context()?,
            // Addresses have 47 bits.
            PER_THREAD => current_context()? | thread_number()? << 48,
            _ => 0,
        };
        Some(Self { handle, scope })
    }

    /// Where the stream is, if it is known.
    fn find(self) -> Option<usize> {
        let is = |place: usize| {
            HANDLES[place].load(Ordering::Acquire) == self.handle
                && STATES[place].scope.load(Ordering::Relaxed) == self.scope
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

fn thread_number() -> Option<u64> {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    if THREAD.get() == 0 {
        THREAD.set(NEXT.fetch_add(1, Ordering::Relaxed));
    }
    // Later threads cannot be told apart: their work is lost track of.
    Some(THREAD.get()).filter(|number| *number < 1 << 16)
}

/// Runs `work` under the lock. `None` within itself: libcuda may call its own exports through ours.
fn slow<R>(work: impl FnOnce(&mut Slow) -> R) -> Option<R> {
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
fn undisturbed(work: &mut dyn FnMut()) {
    slow(|slow| {
        if !slow.exiting && slow.captures.is_empty() {
            work();
        }
    });
}

impl Stream {
    fn is_idle(&self) -> bool {
        // Order matters: what is done now had started before.
        let done = self.done.load(Ordering::Acquire);
        done >= self.started.load(Ordering::Acquire)
    }

    fn has_copies(&self) -> bool {
        // As above.
        let landed = self.landed.load(Ordering::Acquire);
        landed < self.copies.load(Ordering::Acquire)
    }

    /// Without work and copies.
    fn is_clean(&self) -> bool {
        self.is_idle() && !self.has_copies()
    }

    /// The pieces of work, and the copies, whose submission has returned.
    fn so_far(&self) -> (u64, u64) {
        (
            self.returned.load(Ordering::Acquire),
            self.copies.load(Ordering::Acquire),
        )
    }

    /// So much is done.
    fn finish(&self, (work, copies): (u64, u64)) {
        self.landed.fetch_max(copies, Ordering::AcqRel);
        self.done.fetch_max(work, Ordering::AcqRel);
        settle(self.slots.load(Ordering::Relaxed));
    }
}

fn places() -> impl Iterator<Item = (u64, &'static Stream)> {
    let used = USED.load(Ordering::Acquire);
    HANDLES[..used]
        .iter()
        .map(|handle| handle.load(Ordering::Acquire))
        .zip(&STATES)
}

/// Says of these slots that all is done, where it is.
fn settle(slots: u64) {
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
        if !places().any(busy) {
            counters.complete(submitted);
        }
    }
    hold::settled(slots);
}

// ---- What the program does -----------------------------------------------------------------------

/// The program submits work to a stream.
#[inline]
pub(crate) fn submit(
    stream: CUstream,
    own: bool,
    piece: Piece,
    real: impl FnOnce() -> CUresult,
) -> CUresult {
    let on = permits::is_active().then(|| admit(stream, own, piece));
    gate::through(|| match on.flatten() {
        Some(on) => submit_measured(on, (stream, own), piece, real),
        None => submit_inside(stream, own, real).0,
    })
}

/// The program launches a graph. It may have copies in it.
pub(crate) fn launch_graph(
    graph: u64,
    stream: CUstream,
    own: bool,
    real: impl FnOnce() -> CUresult,
) -> CUresult {
    let piece = Piece::new(graph, [0; 3]);
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
    permits::enter(on, piece, reap).then_some(on)
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

/// Finds out by our events what is done.
fn reap() {
    let done = |place: usize| STATES[place].done.load(Ordering::Acquire);
    for (place, upto) in permits::reap(done) {
        STATES[place].finish((upto, 0));
    }
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
        if key.is_some() || thread_number().is_none() {
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
    match bytes <= STAGED {
        true => either(stream, own, real),
        false => copy(stream, own, real),
    }
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

/// Nothing more can be known of the work of these groups, which have some.
fn lose(slots: u64) {
    if let Some(page) = page() {
        LOST.fetch_or(slots, Ordering::AcqRel);
        begin_counting(slots);
        count(page, slots);
    }
}

/// Whether copies may be under way on any stream. Asks the driver; not while a capture goes on.
pub(crate) fn copies_under_way() -> bool {
    let found = slow(|slow| {
        if slow.exiting || !slow.captures.is_empty() || COPIES_LOST.load(Ordering::Acquire) {
            return true;
        }
        places().any(|(handle, state)| {
            handle != FREE && state.has_copies() && {
                ask(handle, state);
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
            ask(handle, state);
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

fn count(page: &Page, slots: u64) {
    for slot in bits(slots) {
        if let Some(counters) = page.slot(slot) {
            counters.submit();
        }
    }
}

fn is_capturing(key: Key) -> bool {
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
fn insert(key: Key) -> Option<usize> {
    let place = slow(|slow| {
        if let Some(place) = key.find() {
            return Some(place);
        }
        let context = match key.handle {
            LEGACY | PER_THREAD => key.scope & ((1 << 48) - 1),
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
                ask(handle, state);
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
    fn claim(&self) {
        let slots = self.contexts.iter().fold(0, |all, (_, slots)| all | slots);
        CLAIMED.store(slots, Ordering::Release);
    }

    /// Forgets a context, green or not, and all its streams.
    fn forget_context(&mut self, context: u64) {
        hold::forget(context);
        permits::forget(context);
        self.contexts.retain(|(known, _)| *known != context);
        self.claim();
        for ((handle, state), slot) in places().zip(&HANDLES) {
            let is = |field: &AtomicU64| field.load(Ordering::Relaxed) == context;
            if handle != FREE && (is(&state.context) || is(&state.green)) {
                self.end_capture_of(Key {
                    handle,
                    scope: state.scope.load(Ordering::Relaxed),
                });
                let (_, copies) = state.so_far();
                state.finish((state.started.load(Ordering::Acquire), copies));
                slot.store(FREE, Ordering::Release);
            }
        }
    }

    fn end_capture_of(&mut self, key: Key) {
        self.captures.retain(|capturing| *capturing != key);
        context::set_captures(self.captures.len());
    }
}

fn begin_counting(slots: u64) {
    if let Some(page) = page() {
        bits(slots)
            .filter_map(|slot| page.slot(slot))
            .for_each(|slot| slot.begin_counting());
    }
}

/// The program asks or waits for a stream; success means that it is idle.
pub(crate) fn observe_stream(
    stream: CUstream,
    own: bool,
    real: impl FnOnce() -> CUresult,
) -> CUresult {
    hold::submitted();
    let seen = page()
        .and_then(|_| Key::new(stream, own))
        .and_then(Key::find)
        .map(|place| {
            let state = &STATES[place];
            (state, state.so_far())
        });
    let result = real();
    note(result);
    if let Some((state, so_far)) = seen
        && result == SUCCESS
    {
        state.finish(so_far);
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
    let mut seen = [(0, 0); STREAMS];
    hold::submitted();
    hold::before_wait(context);
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
        settle(slots);
    }
    result
}

/// The program is called back rather than wait.
pub(crate) fn call_back(real: impl FnOnce() -> CUresult) -> CUresult {
    let result = real();
    hold::submitted();
    result
}

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

/// A stream is destroyed; what it still has to do runs on unseen.
pub(crate) fn destroy_stream(stream: CUstream, real: impl FnOnce() -> CUresult) -> CUresult {
    hold::submitted();
    let place = page()
        .and_then(|_| Key::new(stream, false))
        .and_then(Key::find);
    if let Some(place) = place.filter(|_| stream as u64 > PER_THREAD) {
        slow(|slow| {
            let state = &STATES[place];
            slow.end_capture_of(Key {
                handle: stream as u64,
                scope: 0,
            });
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
        return state.finish(so_far);
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

// ---- The poller ----------------------------------------------------------------------------------

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
    gate::in_child();
}

/// Keeps this library's threads from calling the driver when the process ends. To be called when the driver has been loaded
/// and used: handlers run in the reverse order of their registration, and this one must come before libcuda's own.
pub(crate) fn guard_exit() {
    static REGISTERED: Once = Once::new();
    extern "C" fn exiting() {
        hold::exit(Instant::now() + EXIT_WAIT);
        gate::leave(EXIT_AWAKE);
        if let Some(mut slow) = guard::lock_by(&SLOW, Instant::now() + EXIT_WAIT) {
            slow.exiting = true;
        }
    }
    // SAFETY: the handler is never unloaded.
    REGISTERED.call_once(|| unsafe {
        libc::atexit(exiting);
    });
}

/// Starts the poller when the first stream has appeared. Called by the agent.
///
/// It is a thread of its own because libcuda may keep it waiting for the device: the agent
/// must be free to thaw the very group that libcuda waits for.
pub(crate) fn start_poller(started: &mut bool) {
    if *started || !POLLER_WANTED.load(Ordering::Acquire) {
        return;
    }
    *started = true;
    // Without it, groups become idle by the program's own synchronisation only.
    let _ = thread::Builder::new()
        .name("gpumux-poll".to_owned())
        .spawn(|| {
            guard_exit();
            relax_captures();
            wake::be_punctual();
            hold::become_server();
            let (mut tick, mut before) = (BUSY_TICK, 0);
            loop {
                thread::park_timeout(hold::until_due().map_or(tick, |due| due.min(tick)));
                if hold::serve() {
                    continue;
                }
                let longer =
                    |(first, most): (Duration, Duration)| (tick * 3 / 2).clamp(first, most);
                let found = look(&mut before);
                let outstanding = !matches!(found, Look::Idle);
                let pause = match found {
                    Look::Submitting => BUSY_TICK,
                    Look::Asked if tick == BUSY_TICK => SILENT_TICK.0,
                    Look::Asked => longer(SILENT_TICK),
                    Look::Idle => {
                        hold::prepare_all();
                        longer(IDLE_TICK)
                    }
                };
                tick = permits::hasten(pause, outstanding);
                hold::account_all();
            }
        });
}

/// What the poller found.
enum Look {
    /// No work is outstanding.
    Idle,
    /// The program has submitted work since the last look.
    Submitting,
    /// The driver was asked about what is outstanding.
    Asked,
}

/// Looks after outstanding streams, if the program has submitted nothing since the last look.
fn look(before: &mut u64) -> Look {
    let (started, outstanding) = places().fold((0u64, false), |(sum, any), (handle, state)| {
        let started = state.started.load(Ordering::Acquire);
        (
            sum.wrapping_add(started),
            any || handle != FREE && !state.is_idle(),
        )
    });
    if !outstanding {
        return Look::Idle;
    }
    let watched = permits::is_watched();
    if watched {
        reap();
    }
    if std::mem::replace(before, started) != started && !watched {
        return Look::Submitting;
    }
    slow(|slow| {
        for ((handle, state), slot) in places().zip(&HANDLES) {
            if handle == FREE || slow.exiting || is_capturing_anywhere() {
                continue;
            }
            ask(handle, state);
            if handle == ORPHAN && state.is_clean() {
                slot.store(FREE, Ordering::Release);
            }
        }
    });
    Look::Asked
}

/// Asks the driver whether a stream has done what it was given.
fn ask(handle: u64, state: &Stream) {
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
        state.finish(so_far);
        if handle == ORPHAN {
            state.event.store(0, Ordering::Release);
            if let Some(destroy) = event_destroy() {
                // SAFETY: as above, for the last time.
                unsafe { destroy(event) };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A stream of no context, at a place of the test's own.
    fn stream_at(place: usize) -> (CUstream, &'static Stream) {
        let page = Box::leak(Box::new(Page::create().expect("a page").0));
        context::set_page(page);
        let handle = 0x1000 + place as u64;
        HANDLES[place].store(handle, Ordering::Release);
        USED.fetch_max(place + 1, Ordering::AcqRel);
        (handle as CUstream, &STATES[place])
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
            assert_eq!(observe_stream(stream, own, asked), SUCCESS);
            assert!(state.has_copies());
            assert_eq!(observe_stream(stream, own, || SUCCESS), SUCCESS);
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
        assert_eq!(observe_stream(stream, false, || SUCCESS), SUCCESS);
        assert_eq!(destroy_stream(stream, || SUCCESS), SUCCESS);
        assert_eq!(HANDLES[1].load(Ordering::Acquire), FREE);
    }

    #[test]
    fn an_event_proves_the_copies_before_it() {
        let (stream, state) = stream_at(2);
        let event = 0x77 as CUevent;
        copied(stream, false, SUCCESS);
        record(event, stream, false, || SUCCESS);
        copied(stream, false, SUCCESS);
        observe_event(event, || SUCCESS);
        assert!(state.has_copies());
        record(event, stream, false, || SUCCESS);
        observe_event(event, || SUCCESS);
        assert!(!state.has_copies());
    }
}
