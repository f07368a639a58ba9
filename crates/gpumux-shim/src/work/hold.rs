//! Taking the device before the work arrives: *holds*.
//!
//! A hold is two launches of a one-thread kernel (`hold.ptx`) in a stream of this library's own, in the
//! program's context and so in its channel group: while the first spins and the second waits, the
//! hardware leaves the turn with the group, and the switch to it happens while the program still prepares its
//! input. A stream of our own, because in the program's stream its copies would wait for the hold.
//!
//! A hold lasts until the program has submitted its work, however many launches that takes: between two of them a
//! group without a hold loses its turn. It ends when the program begins to wait, in stream order
//! behind the work. It also ends by its own time-out on the device's clock, at the daemon's word, when the program
//! waits for the whole context without work, and at exit. Host and kernel speak through words of host memory.
//!
//! A hold may also last from one wait to the next, where a program submits only a little between the two: then it begins while the device still
//! works for the first. And it may begin near the end of a long request, where the host has submitted nearly all of it.
//!
//! Holds happen where the daemon reports that they may pay ([`set_policy`]), never during a stream capture, and but for those only
//! while the context has no work.

use std::{
    ffi::{c_char, c_int, c_uint, c_void},
    panic::catch_unwind,
    ptr,
    sync::{
        Mutex, OnceLock,
        atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering},
    },
    time::Instant,
};

use gpumux_wire::page::{HintCounts, Slot, Work};

use crate::{
    ground::{
        context::{bits, current_context, is_capturing_anywhere, page, within},
        driver::{CUresult, CUstream, SUCCESS, functions},
        gate,
        guard::{lock, lock_by, try_lock},
        notice::say,
    },
    work::predictor::{Call, Lessons, Site, Waited},
};

/// Contexts that can be held.
const PLACES: usize = 16;

const PTX: &str = concat!(include_str!("hold.ptx"), "\0");

/// What host and kernel tell each other. Registered with the driver while a context is held here; never
/// unmapped, so that a late store does no harm.
#[repr(C, align(4096))]
struct Words {
    /// Holds with tickets up to this one end.
    released: AtomicU32,
    /// The last hold that has ended.
    finished: AtomicU32,
    /// When the hold began, by the device's clock in ns.
    began: AtomicU64,
    /// How long the last hold kept the device from others, in ns: until it ended or work met it.
    held: AtomicU64,
    /// The last hold that work met.
    met: AtomicU32,
}

static WORDS: OnceLock<&'static [Words; PLACES]> = OnceLock::new();

/// Makes the words. Shared memory: a fork does not put another page under the one that the device knows.
fn make_words() -> Option<&'static [Words; PLACES]> {
    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
    if let Some(words) = WORDS.get() {
        return Some(words);
    }
    let access = ProtFlags::READ | ProtFlags::WRITE;
    let size = size_of::<[Words; PLACES]>();
    // SAFETY: a fresh mapping at an address of the kernel's choice.
    let made = unsafe { mmap_anonymous(ptr::null_mut(), size, access, MapFlags::SHARED) }.ok()?;
    // SAFETY: zeroed, page-aligned, as long as said, never unmapped; all fields are atomics.
    Some(WORDS.get_or_init(|| unsafe { &*made.cast() }))
}

/// The words of a place in which there may be a hold.
fn words(index: usize) -> Option<&'static Words> {
    WORDS.get().map(|words| &words[index])
}

/// Ends the last hold of a place, if there is one.
fn release(index: usize) {
    if let Some(words) = words(index) {
        let ticket = TABLE[index].ticket.load(Ordering::Acquire);
        words.released.store(ticket, Ordering::Release);
    }
}

/// A context.
struct Place {
    /// Its handle; 0: free.
    context: AtomicU64,
    /// Its ordinal, once prepared.
    device: AtomicI32,
    /// Its groups, by their slots.
    slots: AtomicU64,
    /// The last hold.
    ticket: AtomicU32,
    /// The stream of the work that met it.
    stream: AtomicU64,
    /// The request is near its end when the program has submitted so many pieces.
    due: AtomicU64,
    state: Mutex<State>,
}

struct State {
    ready: Ready,
    function: usize,
    stream: usize,
    words: u64,
    /// A hold that is not accounted for yet.
    open: bool,
    /// A call that work may follow, when it was made, and the time-out of the hold that answered it.
    pending: Option<(Site, u64, Option<f32>)>,
    /// The same once its work is launched.
    running: Option<(Site, u64, bool)>,
    /// The hold counts as a piece of work, as the program has no other until the next wait.
    counts: bool,
    /// A hold pays, and its kernel is not loaded.
    lacks_kernel: bool,
    lessons: Lessons,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Ready {
    No,
    Yes,
    /// The driver does not want it.
    Never,
}

const NOTHING: State = State {
    ready: Ready::No,
    function: 0,
    stream: 0,
    words: 0,
    open: false,
    pending: None,
    running: None,
    counts: false,
    lacks_kernel: false,
    lessons: Lessons::new(),
};

static TABLE: [Place; PLACES] = [const {
    Place {
        context: AtomicU64::new(0),
        device: AtomicI32::new(-1),
        slots: AtomicU64::new(0),
        ticket: AtomicU32::new(0),
        stream: AtomicU64::new(0),
        due: AtomicU64::new(0),
        state: Mutex::new(NOTHING),
    }
}; PLACES];

/// Places whose next launch matters, as bits: a hold, or a call that may have predicted it.
static ARMED: AtomicU32 = AtomicU32::new(0);
/// Places whose hold work has met and that last until the program waits.
static KEPT: AtomicU32 = AtomicU32::new(0);
/// Places in which a long request is expected.
static EXPECTED: AtomicU32 = AtomicU32::new(0);
/// Places whose next idleness matters: see [`Lessons::took`].
static TIMED: AtomicU32 = AtomicU32::new(0);
/// Groups for which a hold may pay, by their slots; and whether this library may hold of its own accord.
static CONTENDED: AtomicU64 = AtomicU64::new(0);
static AUTOMATIC: AtomicBool = AtomicBool::new(false);
/// The process ends: the driver is no longer to be called.
static EXITING: AtomicBool = AtomicBool::new(false);
functions! {
    ctx_get_device c"cuCtxGetDevice" (*mut c_int);
    module_load c"cuModuleLoadData" (*mut *mut c_void, *const c_char);
    module_get_function c"cuModuleGetFunction" (*mut *mut c_void, *mut c_void, *const c_char);
    host_register c"cuMemHostRegister_v2" (*mut c_void, usize, c_uint);
    host_device_pointer c"cuMemHostGetDevicePointer_v2" (*mut u64, *mut c_void, c_uint);
    stream_create c"cuStreamCreate" (*mut CUstream, c_uint);
    stream_write c"cuStreamWriteValue32_v2" (CUstream, u64, u32, c_uint);
    launch_kernel c"cuLaunchKernel" (
        *mut c_void, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, CUstream,
        *mut *mut c_void, *mut *mut c_void
    );
}

/// What became of a hint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub(crate) enum Hinted {
    /// The device is being taken.
    Held = 0,
    /// It is held, or being taken, already.
    Already = 1,
    /// It would gain nothing: no other tenant competes, the tenant is not of class latency or takes no hints,
    /// the context has work, its memory is away, or a capture goes on.
    Needless = 2,
    /// The work is too far away.
    TooEarly = 3,
    /// The device is taken shortly before the work comes.
    Later = 4,
    /// The process has no context on that device, or its driver refuses.
    Impossible = -1,
}

/// The daemon reports where holds may pay.
pub(crate) fn set_policy(contended: u64, automatic: bool) {
    CONTENDED.store(contended, Ordering::Release);
    AUTOMATIC.store(automatic && contended != 0, Ordering::Release);
    if contended == 0 {
        release_all();
    }
}

/// After a fork, in the child: there is no device here.
pub(crate) fn in_child() {
    CONTENDED.store(0, Ordering::Release);
    AUTOMATIC.store(false, Ordering::Release);
    for bits in [&ARMED, &KEPT, &EXPECTED] {
        bits.store(0, Ordering::Release);
    }
}

/// The process ends. A thread that is just taking a device is awaited until this time: libcuda must not be called during its end.
pub(crate) fn exit(deadline: Instant) {
    EXITING.store(true, Ordering::Release);
    for place in &TABLE {
        drop(lock_by(&place.state, deadline));
    }
    release_all();
}

fn release_all() {
    // A child has its parent's words, but none of its holds.
    if page().is_some() {
        ARMED.store(0, Ordering::Release);
        KEPT.store(0, Ordering::Release);
        (0..PLACES).for_each(release);
    }
}

pub(super) fn now_us() -> u64 {
    static ORIGIN: OnceLock<Instant> = OnceLock::new();
    ORIGIN.get_or_init(Instant::now).elapsed().as_micros() as u64
}

fn find(context: u64) -> Option<usize> {
    let is = |place: &Place| place.context.load(Ordering::Acquire) == context;
    (context != 0).then(|| TABLE.iter().position(is)).flatten()
}

/// A context that has streams, and its groups. Called under the lock of [`work`].
pub(crate) fn know(context: u64, slots: u64) {
    let place = find(context).or_else(|| {
        let free = |place: &Place| place.context.load(Ordering::Acquire) == 0;
        TABLE.iter().position(free)
    });
    if let Some(place) = place.map(|index| &TABLE[index]) {
        place.slots.store(slots, Ordering::Relaxed);
        place.context.store(context, Ordering::Release);
    }
}

/// A context goes. What was made in it goes with it. Called under the lock of [`work`].
pub(crate) fn forget(context: u64) {
    end(context, || true);
}

/// Lets `work` end a context, while no thread takes the device there. It says whether it has. Called under the lock of [`work`].
pub(crate) fn end(context: u64, work: impl FnOnce() -> bool) -> bool {
    let Some(index) = find(context) else {
        return work();
    };
    let place = &TABLE[index];
    let mut state = lock(&place.state);
    release(index);
    if !work() {
        return false;
    }
    place.context.store(0, Ordering::Release);
    place.device.store(-1, Ordering::Relaxed);
    for bits in [&ARMED, &KEPT, &EXPECTED] {
        bits.fetch_and(!(1 << index), Ordering::AcqRel);
    }
    if let Some(words) = words(index) {
        let ticket = place.ticket.load(Ordering::Acquire);
        words.finished.store(ticket, Ordering::Release);
    }
    *state = NOTHING;
    true
}

/// Runs something while no capture begins and no context goes; not while a stream is capturing or the process exits.
type Undisturbed = fn(&mut dyn FnMut());

static UNDISTURBED: OnceLock<Undisturbed> = OnceLock::new();

/// Work is counted from now on: holds may be prepared, by what keeps the driver undisturbed meanwhile.
pub(crate) fn activate(undisturbed: Undisturbed) {
    let _ = UNDISTURBED.set(undisturbed);
}

/// Loads the kernel into contexts where it may be needed. Called by the poller while the program is idle.
pub(crate) fn prepare_all() {
    let contended = CONTENDED.load(Ordering::Acquire);
    if contended == 0 {
        return;
    }
    for (index, place) in TABLE.iter().enumerate() {
        if place.context.load(Ordering::Acquire) != 0
            && place.slots.load(Ordering::Relaxed) & contended != 0
        {
            prepare(index);
        }
    }
}

/// Loads the kernel into a context. Undisturbed, so that no capture begins and no
/// context goes meanwhile; and inside the gate, because in a frozen group that would never end.
fn prepare(index: usize) {
    let place = &TABLE[index];
    if try_lock(&place.state).is_none_or(|state| state.ready != Ready::No) {
        return;
    }
    let prepare = || {
        let context = place.context.load(Ordering::Acquire);
        let mut state = lock(&place.state);
        if context == 0 || state.ready != Ready::No {
            return;
        }
        let mut error = SUCCESS;
        let loaded = within(context, || load(index, &mut state, &mut error)).flatten();
        state.ready = match loaded {
            Some(()) => Ready::Yes,
            None => Ready::Never,
        };
        if loaded.is_none() {
            say(format_args!(
                "cannot take the GPU ahead of work: the driver answers {error}"
            ));
        }
    };
    if let Some(undisturbed) = UNDISTURBED.get() {
        undisturbed(&mut || _ = gate::try_through(prepare));
    }
}

/// Makes what a hold needs, in the current context.
fn load(index: usize, state: &mut State, error: &mut CUresult) -> Option<()> {
    /// `CU_STREAM_NON_BLOCKING`: the legacy stream does not wait for it.
    const NON_BLOCKING: u32 = 1;
    /// `CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP`
    const MAPPED: u32 = 3;
    /// `CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED`: by the context that had this place before.
    const REGISTERED: CUresult = 712;
    let words = (&raw const make_words()?[index]).cast_mut().cast();
    let (mut device, mut module, mut function) = (-1, ptr::null_mut(), ptr::null_mut());
    let (mut stream, mut address) = (ptr::null_mut(), 0);
    let mut ok = |result: CUresult| {
        *error = result;
        (result == SUCCESS).then_some(())
    };
    // SAFETY: places to write, C strings, and memory of that size that stays.
    unsafe {
        ok(ctx_get_device()?(&raw mut device))?;
        let registered = host_register()?(words, size_of::<Words>(), MAPPED);
        ok(registered).or((registered == REGISTERED).then_some(()))?;
        ok(host_device_pointer()?(&raw mut address, words, 0))?;
        ok(module_load()?(&raw mut module, PTX.as_ptr().cast()))?;
        let name = c"gpumux_hold".as_ptr();
        ok(module_get_function()?(&raw mut function, module, name))?;
        ok(stream_create()?(&raw mut stream, NON_BLOCKING))?;
    }
    state.function = function as usize;
    state.stream = stream as usize;
    state.words = address;
    TABLE[index].device.store(device, Ordering::Relaxed);
    // The driver may load the code only now: not when it matters.
    launch(
        state,
        TABLE[index].ticket.load(Ordering::Acquire),
        false,
        0.0,
    )
}

/// Launches the kernel in the current context. One whose ticket is released ends at once.
fn launch(state: &State, mut ticket: u32, last: bool, timeout_us: f32) -> Option<()> {
    let (mut words, mut last) = (state.words, u32::from(last));
    let mut timeout = (timeout_us * 1e3) as u64;
    let mut args: [*mut c_void; 4] = [
        (&raw mut words).cast(),
        (&raw mut ticket).cast(),
        (&raw mut last).cast(),
        (&raw mut timeout).cast(),
    ];
    let (function, stream) = (state.function as *mut c_void, state.stream as CUstream);
    let (args, none) = (args.as_mut_ptr(), ptr::null_mut());
    // SAFETY: the kernel, its four arguments, and a stream of its context that is never destroyed.
    let result = unsafe { launch_kernel()?(function, 1, 1, 1, 1, 1, 1, 0, stream, args, none) };
    (result == SUCCESS).then_some(())
}

/// Whether a context has no work.
fn is_idle(place: &Place) -> bool {
    let idle = |slot| {
        let slot = page().and_then(|page| page.slot(slot));
        slot.is_some_and(|slot| matches!(slot.work(), Work::Idle(_)))
    };
    bits(place.slots.load(Ordering::Relaxed)).all(idle)
}

/// Whether a hold may gain anything anywhere in this process.
pub(crate) fn may_pay() -> bool {
    CONTENDED.load(Ordering::Acquire) != 0
}

/// Whether others compete with this place, and nothing forbids a hold.
fn contended(place: &Place) -> bool {
    place.slots.load(Ordering::Relaxed) & CONTENDED.load(Ordering::Acquire) != 0
        && !EXITING.load(Ordering::Acquire)
        && !is_capturing_anywhere()
}

/// Whether a hold in this place may gain anything now.
fn wanted(place: &Place) -> bool {
    contended(place) && is_idle(place)
}

/// Takes the device, unless the program's memory is not there.
fn hold(index: usize, state: &mut State, timeout_us: f32) -> Hinted {
    gate::try_through(|| hold_inside(index, state, timeout_us)).unwrap_or(Hinted::Needless)
}

fn hold_inside(index: usize, state: &mut State, timeout_us: f32) -> Hinted {
    let place = &TABLE[index];
    let context = place.context.load(Ordering::Acquire);
    if state.ready != Ready::Yes || context == 0 {
        return Hinted::Impossible;
    }
    // It may have ended since it was asked whether a hold is wanted.
    if EXITING.load(Ordering::Acquire) {
        return Hinted::Needless;
    }
    account(index, state);
    if state.open {
        return Hinted::Already;
    }
    // Before the launches: a thread that submits work from now on ends it.
    let ticket = place.ticket.fetch_add(1, Ordering::AcqRel).wrapping_add(1);
    KEPT.fetch_and(!(1 << index), Ordering::AcqRel);
    ARMED.fetch_or(1 << index, Ordering::AcqRel);
    let launched = within(context, || {
        launch(state, ticket, false, timeout_us)?;
        launch(state, ticket, true, timeout_us)
    });
    if launched.flatten().is_none() {
        release(index);
        if let Some(words) = words(index) {
            // Nothing else will say that it has ended.
            words.finished.store(ticket, Ordering::Release);
        }
        state.ready = Ready::Never;
        return Hinted::Impossible;
    }
    state.open = true;
    count(place, |counts| counts.given = 1);
    if is_idle(place) {
        slots(place).for_each(Slot::comes);
    }
    Hinted::Held
}

fn slots(place: &Place) -> impl Iterator<Item = &'static Slot> {
    bits(place.slots.load(Ordering::Relaxed)).filter_map(|slot| page()?.slot(slot))
}

fn count(place: &Place, set: impl FnOnce(&mut HintCounts)) {
    let mut counts = HintCounts::default();
    set(&mut counts);
    if let Some(slot) = slots(place).next() {
        slot.count_hints(counts);
    }
}

/// Whether work has met the last hold.
fn is_met(index: usize) -> bool {
    let ticket = TABLE[index].ticket.load(Ordering::Acquire);
    words(index).is_some_and(|words| words.met.load(Ordering::Acquire) == ticket)
}

/// Counts the last hold, if it has ended.
fn account(index: usize, state: &mut State) {
    let (place, Some(words)) = (&TABLE[index], words(index)) else {
        return;
    };
    let ticket = place.ticket.load(Ordering::Acquire);
    if !state.open || words.finished.load(Ordering::Acquire) != ticket {
        return;
    }
    state.open = false;
    count(place, |counts| {
        counts.held_ns = words.held.load(Ordering::Acquire);
        match is_met(index) {
            true => counts.useful = 1,
            false => counts.wasted = 1,
        }
    });
}

/// Counts the holds that have ended. Called by the poller. Returns the groups, by their slots, that may have no work any more.
pub(crate) fn account_all() -> u64 {
    let mut slots = 0;
    for (index, place) in TABLE.iter().enumerate() {
        if place.ticket.load(Ordering::Relaxed) != 0
            && let Some(mut state) = try_lock(&place.state)
        {
            account(index, &mut state);
            if state.counts && !state.open {
                state.counts = false;
                slots |= place.slots.load(Ordering::Relaxed);
            }
        }
    }
    slots
}

/// Takes a device now, for so long at most; that of this context first.
pub(super) fn take(device: Option<c_int>, context: Option<u64>, timeout_us: f32) -> Hinted {
    if CONTENDED.load(Ordering::Acquire) == 0 || is_capturing_anywhere() {
        return Hinted::Needless;
    }
    let current = context.and_then(find);
    let mut best = Hinted::Impossible;
    for index in current.into_iter().chain(0..PLACES) {
        let place = &TABLE[index];
        if place.context.load(Ordering::Acquire) == 0 {
            continue;
        }
        prepare(index);
        if device.is_some_and(|device| device != place.device.load(Ordering::Relaxed)) {
            continue;
        }
        let hinted = match wanted(place) {
            false => Hinted::Needless,
            true => try_lock(&place.state).map_or(Hinted::Already, |mut state| {
                hold(index, &mut state, timeout_us)
            }),
        };
        match hinted {
            Hinted::Impossible => {}
            // A hint from outside is for all devices.
            _ if device.is_none() => best = hinted,
            _ => return hinted,
        }
    }
    best
}

// ---- What the program does -----------------------------------------------------------------------

/// The program is about to make a call that work may follow.
#[inline]
pub(crate) fn predict(call: Call, bytes: usize) {
    if AUTOMATIC.load(Ordering::Relaxed) {
        let _ = catch_unwind(|| watch(Site::new(call, bytes)));
    }
}

#[cold]
fn watch(site: Site) {
    let Some(index) = current_context().and_then(find) else {
        return;
    };
    let place = &TABLE[index];
    // Only the first call after idleness.
    if ARMED.load(Ordering::Acquire) >> index & 1 != 0 || !wanted(place) {
        return;
    }
    let Some(mut state) = try_lock(&place.state).filter(|state| state.ready == Ready::Yes) else {
        return;
    };
    let now = now_us();
    let timeout = state.lessons.decide(site, now);
    let held = timeout.filter(|timeout| hold(index, &mut state, *timeout) == Hinted::Held);
    state.pending = Some((site, now, held));
    ARMED.fetch_or(1 << index, Ordering::AcqRel);
}

/// The program waits for what it has submitted. Where a little more and another wait will follow soon, it keeps the device until then.
#[inline]
pub(crate) fn wait(real: impl FnOnce(bool) -> CUresult) -> CUresult {
    kept(true, real)
}

/// The program reads what it has computed: that is a wait, or the last call before one.
#[inline]
pub(crate) fn read(real: impl FnOnce() -> CUresult) -> CUresult {
    kept(false, |_| real())
}

/// The program waits for a whole context: also for holds there, so none outlasts that.
pub(crate) fn wait_for_all(context: u64, real: impl FnOnce() -> CUresult) -> CUresult {
    let waiting = match current_context() == Some(context) {
        true => begins_to_wait(false),
        false => None,
    };
    submitted();
    if let Some(index) = is_armed().then(|| find(context)).flatten()
        && ARMED.load(Ordering::Acquire) >> index & 1 != 0
    {
        // No work has met it.
        release(index);
    }
    let result = real();
    has_waited(waiting, true);
    result
}

/// Whether the program is known to have submitted all that it had.
#[inline]
fn kept(has_submitted: bool, real: impl FnOnce(bool) -> CUresult) -> CUresult {
    let waiting = begins_to_wait(true);
    let is_kept = waiting.is_some_and(|it| it.wait.held.is_some());
    if has_submitted && !is_kept {
        submitted();
    }
    let result = real(is_kept);
    has_waited(waiting, has_submitted);
    result
}

#[inline]
fn begins_to_wait(may_keep: bool) -> Option<Waiting> {
    match AUTOMATIC.load(Ordering::Relaxed) {
        true => catch_unwind(|| begin_wait(may_keep)).ok().flatten(),
        false => None,
    }
}

#[inline]
fn has_waited(waiting: Option<Waiting>, done: bool) {
    if let Some(waiting) = waiting {
        let _ = catch_unwind(|| end_wait(waiting, done));
    }
}

/// A wait that goes on.
#[derive(Clone, Copy)]
struct Waiting {
    index: usize,
    wait: Waited,
    /// Work has met the hold before the wait: none does that comes after it.
    met: bool,
}

/// `may_keep`: a hold may outlast the wait.
#[cold]
fn begin_wait(may_keep: bool) -> Option<Waiting> {
    // Within a call the driver may have locks that a launch needs.
    if gate::is_nested() {
        return None;
    }
    let index = current_context().and_then(find)?;
    let place = &TABLE[index];
    let mut state = try_lock(&place.state).filter(|_| contended(place))?;
    let now = now_us();
    let upto = slots(place).next()?.submitted();
    let (mut wait, takes) = state.lessons.begin_wait(now, upto, may_keep)?;
    if takes {
        wait.held = (wait.held).filter(|timeout| keeps(index, &mut state, *timeout));
    }
    let met = is_met(index);
    Some(Waiting { index, wait, met })
}

/// Whether the device is held from now on.
fn keeps(index: usize, state: &mut State, timeout_us: f32) -> bool {
    state.lacks_kernel |= state.ready == Ready::No;
    let hinted = hold(index, state, timeout_us);
    matches!(hinted, Hinted::Held | Hinted::Already)
}

#[cold]
fn end_wait(it: Waiting, done: bool) {
    let (place, mut lacks_kernel) = (&TABLE[it.index], false);
    if let Some(mut state) = try_lock(&place.state) {
        if done && it.wait.held.is_some() {
            account(it.index, &mut state);
            let over = !state.open && (it.met || !is_met(it.index));
            state.lessons.waited(it.wait.site, over);
            // Others do not have the device now: they are not to be charged for it.
            if state.open && is_idle(place) {
                slots(place).for_each(|slot| _ = slot.submit());
                state.lessons.upto = state.lessons.upto.wrapping_add(1);
                state.counts = true;
            }
            // Others have it again: what was thought to go on has ended, see `Seen::after_wait`.
            if !state.open {
                slots(place).for_each(|slot| slot.complete(slot.completed()));
            }
        }
        state.lessons.end_wait(it.wait, now_us(), done);
        if let Some(due) = state.lessons.due() {
            place.due.store(due, Ordering::Release);
            EXPECTED.fetch_or(1 << it.index, Ordering::AcqRel);
        }
        // Loading may wait for all work of the context, under a lock that other threads need.
        lacks_kernel = is_idle(place) && std::mem::take(&mut state.lacks_kernel);
    }
    if lacks_kernel {
        prepare(it.index);
    }
}

/// The program has submitted work. Near the end of a long request it takes the device, so that the wait does not lose a neighbour's timeslice.
#[inline]
pub(crate) fn ahead() {
    for index in bits(EXPECTED.load(Ordering::Relaxed).into()) {
        let place = &TABLE[index as usize];
        let due = place.due.load(Ordering::Acquire);
        if let Some(submitted) = slots(place).next().map(Slot::submitted)
            && submitted >= due
        {
            let _ = catch_unwind(|| come_near(index as usize, submitted));
        }
    }
}

#[cold]
fn come_near(index: usize, submitted: u64) {
    let (place, bit) = (&TABLE[index], 1 << index);
    // Within a call the driver may have locks that a launch needs.
    if gate::is_nested() || current_context() != Some(place.context.load(Ordering::Acquire)) {
        return;
    }
    let Some(mut state) = try_lock(&place.state) else {
        return;
    };
    // Another thread may have waited meanwhile: this is the next request.
    if state.lessons.due().is_none_or(|due| submitted < due)
        || EXPECTED.fetch_and(!bit, Ordering::AcqRel) & bit == 0
        || !AUTOMATIC.load(Ordering::Relaxed)
        || !contended(place)
    {
        return;
    }
    if let Some(timeout) = state.lessons.near(now_us(), submitted)
        && !keeps(index, &mut state, timeout)
    {
        state.lessons.not_held();
    }
}

/// Whether [`launched`] has anything to do. One load.
#[inline]
pub(crate) fn is_armed() -> bool {
    ARMED.load(Ordering::Relaxed) != 0
}

/// The program has submitted work to a stream of a context: that has the device now.
#[cold]
pub(crate) fn launched(context: u64, stream: u64) {
    let Some(index) = find(context) else { return };
    let bit = 1 << index;
    if ARMED.fetch_and(!bit, Ordering::AcqRel) & bit == 0 {
        return;
    }
    let place = &TABLE[index];
    let ticket = place.ticket.load(Ordering::Acquire);
    let over = |word: &AtomicU32| word.load(Ordering::Acquire) == ticket;
    if let Some(words) = words(index)
        && !over(&words.finished)
        && !over(&words.released)
    {
        words.met.store(ticket, Ordering::Release);
        place.stream.store(stream, Ordering::Release);
        KEPT.fetch_or(bit, Ordering::AcqRel);
    }
    if let Some(mut state) = try_lock(&place.state)
        && let Some((site, at, held)) = state.pending.take()
    {
        let gap = now_us().saturating_sub(at);
        state.lessons.learn(site, gap, held);
        state.running = Some((site, at, held.is_some()));
        TIMED.fetch_or(bit, Ordering::AcqRel);
    }
}

/// Groups, by their slots, may have become idle; the program saw it, or the poller.
#[inline]
pub(crate) fn settled(slots: u64) {
    if TIMED.load(Ordering::Relaxed) != 0 {
        note_idle(slots);
    }
}

#[cold]
fn note_idle(slots: u64) {
    for index in bits(TIMED.load(Ordering::Acquire).into()) {
        let (index, place) = (index as usize, &TABLE[index as usize]);
        if place.slots.load(Ordering::Relaxed) & slots == 0 || !is_idle(place) {
            continue;
        }
        TIMED.fetch_and(!(1 << index), Ordering::AcqRel);
        if let Some(mut state) = try_lock(&place.state)
            && let Some((site, at, held)) = state.running.take()
        {
            let took = now_us().saturating_sub(at);
            state.lessons.took(site, took, held);
        }
    }
}

/// The program is about to wait, or its streams to change: it has submitted what it had.
#[inline]
pub(crate) fn submitted() {
    if KEPT.load(Ordering::Relaxed) != 0 {
        end_kept();
    }
}

/// Ends holds in the order of their work's stream, so that the group keeps its turn until that is done.
#[cold]
fn end_kept() {
    for index in bits(KEPT.load(Ordering::Acquire).into()) {
        let (index, place, bit) = (index as usize, &TABLE[index as usize], 1 << index);
        // Before it is anyone's to end the hold: the stream is not destroyed meanwhile.
        let state = try_lock(&place.state);
        if KEPT.fetch_and(!bit, Ordering::AcqRel) & bit == 0 {
            continue;
        }
        let ticket = place.ticket.load(Ordering::Acquire);
        let over =
            words(index).is_none_or(|words| words.finished.load(Ordering::Acquire) == ticket);
        if !over && !state.is_some_and(|state| release_behind(place, state.words, ticket)) {
            release(index);
        }
    }
}

/// To be called under the lock of the place.
fn release_behind(place: &Place, address: u64, ticket: u32) -> bool {
    let Some(write) = stream_write() else {
        return false;
    };
    let stream = place.stream.load(Ordering::Acquire);
    if stream == 0 || address == 0 || is_capturing_anywhere() {
        return false;
    }
    let context = place.context.load(Ordering::Acquire);
    // SAFETY: the stream of the program's last work, which `forget_stream` keeps from being destroyed, and a mapped word.
    let write = || unsafe { write(stream as CUstream, address, ticket, 0) == SUCCESS };
    within(context, write).unwrap_or(false)
}

/// A stream is about to be destroyed: from here on no hold ends behind it. Called under the lock of [`work`].
pub(crate) fn forget_stream(stream: u64) {
    let used = |place: &&Place| place.context.load(Ordering::Acquire) != 0;
    for place in TABLE.iter().filter(used) {
        let _state = lock(&place.state);
        let _ = (place.stream).compare_exchange(stream, 0, Ordering::AcqRel, Ordering::Acquire);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// A context with these groups, by their slots: where it is, and its words.
    fn placed(context: u64, slots: u64) -> (usize, &'static Place, &'static Words) {
        know(context, slots);
        let index = find(context).unwrap();
        (index, &TABLE[index], &make_words().unwrap()[index])
    }

    /// The emulated device goes by this name and these parameters.
    #[test]
    fn the_kernel_is_declared_as_it_is_launched() {
        let entry = ".visible .entry gpumux_hold(.param .u64 page, .param .u32 ticket, .param .u32 last, .param .u64 timeout_ns)";
        assert!(PTX.contains(entry));
        assert_eq!(PTX.matches(".entry").count(), 1);
        assert_eq!(std::mem::offset_of!(Words, finished), 4);
        assert_eq!(std::mem::offset_of!(Words, began), 8);
        assert_eq!(std::mem::offset_of!(Words, held), 16);
        assert_eq!(std::mem::offset_of!(Words, met), 24);
    }

    #[test]
    fn ending_context_is_not_used_to_take_the_device() {
        let _alone = crate::ground::guard::alone();
        const CONTEXT: u64 = 0xc0;
        know(CONTEXT, 1);
        let index = find(CONTEXT).unwrap();
        let is_closed = || try_lock(&TABLE[index].state).is_none();
        assert!(!end(CONTEXT, || {
            assert!(is_closed());
            false
        }));
        assert_eq!(find(CONTEXT), Some(index), "it lives");
        assert!(end(CONTEXT, || true));
        assert_eq!(find(CONTEXT), None);
        assert!(end(CONTEXT, || true), "one that never had streams");
    }

    #[test]
    fn stream_is_there_until_no_hold_ends_behind_it() {
        let _alone = crate::ground::guard::alone();
        const CONTEXT: u64 = 0xc1;
        const STREAM: u64 = 0x57;
        know(CONTEXT, 1);
        let place = &TABLE[find(CONTEXT).unwrap()];
        place.stream.store(STREAM, Ordering::Release);
        // As while a hold ends.
        let state = lock(&place.state);
        std::thread::scope(|scope| {
            let destroys = scope.spawn(|| forget_stream(STREAM));
            std::thread::sleep(Duration::from_millis(20));
            assert!(!destroys.is_finished());
            drop(state);
        });
        assert_eq!(place.stream.load(Ordering::Acquire), 0);
        end(CONTEXT, || true);
    }

    #[test]
    fn exit_waits_until_no_device_is_being_taken() {
        let _alone = crate::ground::guard::alone();
        let state = lock(&TABLE[PLACES - 1].state);
        let exits = || exit(Instant::now() + Duration::from_secs(60));
        std::thread::scope(|scope| {
            let ending = scope.spawn(exits);
            while !EXITING.load(Ordering::Acquire) {
                std::thread::yield_now();
            }
            std::thread::sleep(Duration::from_millis(20));
            assert!(!ending.is_finished());
            drop(state);
        });
        // Not without end.
        let _state = lock(&TABLE[PLACES - 1].state);
        exit(Instant::now());
    }

    /// Others do not have the device between two waits, and would be charged for it. It counts until the hold has ended.
    #[test]
    fn device_that_is_kept_counts_as_work() {
        let _alone = crate::ground::guard::alone();
        const CONTEXT: u64 = 0xc2;
        let (index, place, words) = placed(CONTEXT, 0);
        let ends = |held| {
            let mut wait = Waited::new(Site::new(Call::Wait, 3));
            wait.held = held;
            let met = false;
            end_wait(Waiting { index, wait, met }, true);
            let state = lock(&place.state);
            (state.counts, state.lessons.upto)
        };
        assert_eq!(ends(None), (false, 0));
        place.ticket.store(7, Ordering::Release);
        lock(&place.state).open = true;
        assert_eq!(ends(Some(500.0)), (true, 1));
        account_all();
        assert!(lock(&place.state).counts, "it goes on");
        words.finished.store(7, Ordering::Release);
        account_all();
        assert!(!lock(&place.state).counts);
        assert_eq!(ends(Some(500.0)), (false, 1), "it was over before");
        end(CONTEXT, || true);
    }

    /// The device was to be kept for what follows, and was not: timeslices must not be set by the pause after it.
    #[test]
    fn request_ends_with_the_wait_in_which_its_hold_ran_out() {
        let _alone = crate::ground::guard::alone();
        const CONTEXT: u64 = 0xc9;
        let page = crate::ground::context::test_page();
        let slot = page.slot(5).unwrap();
        slot.begin_counting();
        let (index, place, words) = placed(CONTEXT, 1 << 5);
        for (ticket, ended) in [(3, 0), (4, 1)] {
            place.ticket.store(4, Ordering::Release);
            words.finished.store(ticket, Ordering::Release);
            lock(&place.state).open = true;
            // As `Seen::Between` says.
            slot.find_complete(slot.submit());
            let mut wait = Waited::new(Site::new(Call::Wait, 1));
            wait.held = Some(500.0);
            let met = false;
            end_wait(Waiting { index, wait, met }, true);
            assert_eq!(slot.waits().unwrap().count, ended);
        }
        end(CONTEXT, || true);
    }

    /// A read ends while its work goes on: only the wait after it can load the kernel.
    #[test]
    fn kernel_is_still_lacking_after_a_read() {
        let _alone = crate::ground::guard::alone();
        const CONTEXT: u64 = 0xc7;
        let (index, place, _) = placed(CONTEXT, 0);
        // There is no such slot, so it is not idle.
        place.slots.store(1 << 63, Ordering::Relaxed);
        lock(&place.state).lacks_kernel = true;
        let wait = Waited::new(Site::new(Call::Wait, 600));
        let met = false;
        end_wait(Waiting { index, wait, met }, false);
        assert!(lock(&place.state).lacks_kernel);
        end(CONTEXT, || true);
    }

    /// The hold before the end is met by what is submitted after it, and runs out while the program waits.
    #[test]
    fn hold_that_runs_out_in_the_wait_is_over() {
        let _alone = crate::ground::guard::alone();
        const CONTEXT: u64 = 0xc8;
        let (index, place, words) = placed(CONTEXT, 0);
        let held = |met| {
            lock(&place.state).lessons = Lessons::new();
            let held = |ticket: &u32| {
                for word in [&place.ticket, &words.met, &words.finished] {
                    word.store(*ticket, Ordering::Release);
                }
                let mut state = lock(&place.state);
                state.open = true;
                let upto = u64::from(ticket * 690);
                let (wait, _) = state.lessons.begin_wait(now_us(), upto, true).unwrap();
                drop(state);
                end_wait(Waiting { index, wait, met }, true);
                wait.held.is_some()
            };
            (1..=100).filter(held).count()
        };
        let (lasts, runs_out) = (held(false), held(true));
        assert!(lasts > 80 && runs_out < 30, "{lasts} {runs_out}");
        end(CONTEXT, || true);
    }
}
