//! The gate that the program's calls pass before they touch device memory, or have the driver use the device for itself.
//!
//! While the memory is being moved away or is away, a thread that wants to touch it waits here. A thread that passed before is
//! counted until the real call returns: so there is a moment at which no thread is inside and none gets in. An open
//! gate costs two additions to a counter that few threads share.

use std::{
    cell::Cell,
    sync::{
        Condvar, Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use crate::ground::{guard, wake};

/// Counters of threads inside, so that threads rarely share one.
pub(crate) const SHARDS: usize = 64;

#[repr(align(64))]
struct Shard(AtomicU32);

static INSIDE: [Shard; SHARDS] = [const { Shard(AtomicU32::new(0)) }; SHARDS];
static CLOSED: AtomicBool = AtomicBool::new(false);
/// A thread waits.
static WOKEN: AtomicBool = AtomicBool::new(false);
static OPENED: (Mutex<()>, Condvar) = (Mutex::new(()), Condvar::new());

/// How long a waiting thread sleeps before it looks again by itself.
const LOOK: Duration = Duration::from_millis(100);

thread_local! {
    /// This thread's counter, from 1; 0: none yet.
    static SHARD: Cell<usize> = const { Cell::new(0) };
    /// How deep in calls this thread is: libcuda may call its own exports through ours.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
}

/// Counts this thread until dropped, also by unwinding.
struct Inside(&'static Shard);

impl Drop for Inside {
    fn drop(&mut self) {
        DEPTH.set(0);
        self.0.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// This thread's place among [`SHARDS`].
#[inline]
pub(crate) fn shard_number() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    if SHARD.get() == 0 {
        SHARD.set(NEXT.fetch_add(1, Ordering::Relaxed) % SHARDS + 1);
    }
    SHARD.get() - 1
}

fn shard() -> &'static Shard {
    &INSIDE[shard_number()]
}

/// Makes the program's call once the gate is open.
#[inline]
pub(crate) fn through<R>(real: impl FnOnce() -> R) -> R {
    if DEPTH.get() != 0 {
        return real();
    }
    let shard = shard();
    loop {
        // Before the look, and both in one order with `close`: either it sees this thread, or this
        // thread sees it closed.
        shard.0.fetch_add(1, Ordering::SeqCst);
        if !CLOSED.load(Ordering::SeqCst) {
            break;
        }
        shard.0.fetch_sub(1, Ordering::SeqCst);
        wait();
    }
    DEPTH.set(1);
    let _inside = Inside(shard);
    real()
}

/// The same, but a gate that stays closed for so long keeps the call from being made. None: it was.
pub(crate) fn through_by<R>(deadline: Instant, real: impl FnOnce() -> R) -> Option<R> {
    let mut real = Some(real);
    loop {
        if let Some(result) = try_through(|| real.take().map(|real| real())) {
            return result;
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return None;
        }
        await_open(left);
    }
}

/// Makes a call of this library's own, which the program does not wait for, unless the gate is closed.
pub(crate) fn try_through<R>(call: impl FnOnce() -> R) -> Option<R> {
    if DEPTH.get() != 0 {
        return Some(call());
    }
    let inside = Inside(shard());
    // As in `through`.
    inside.0.0.fetch_add(1, Ordering::SeqCst);
    DEPTH.set(1);
    (!CLOSED.load(Ordering::SeqCst)).then(call)
}

/// Makes the program's call once the gate is open, and does not count it: for calls that only wait for work. They are no
/// reason not to close the gate, but a thread that begins to wait while its memory is away needs it back.
#[inline]
pub(crate) fn after<R>(real: impl FnOnce() -> R) -> R {
    while DEPTH.get() == 0 && CLOSED.load(Ordering::SeqCst) {
        wait();
    }
    real()
}

/// Whether this thread is in a call of the program already: what comes now is the driver's own.
pub(crate) fn is_nested() -> bool {
    DEPTH.get() != 0
}

#[cold]
fn wait() {
    loop {
        if !WOKEN.swap(true, Ordering::AcqRel) {
            wake::agent();
        }
        let guard = lock();
        if !CLOSED.load(Ordering::SeqCst) {
            return;
        }
        drop(OPENED.1.wait_timeout(guard, LOOK));
    }
}

/// Waits until the gate is open, a while: for threads that do not touch memory, but wait for the device.
fn await_open(patience: Duration) {
    let deadline = Instant::now() + patience;
    while CLOSED.load(Ordering::SeqCst) && Instant::now() < deadline {
        if !WOKEN.swap(true, Ordering::AcqRel) {
            wake::agent();
        }
        let guard = lock();
        if CLOSED.load(Ordering::SeqCst) {
            drop(OPENED.1.wait_timeout(guard, LOOK));
        }
    }
}

fn lock() -> MutexGuard<'static, ()> {
    guard::lock(&OPENED.0)
}

/// Lets no thread in any more.
pub(crate) fn close() {
    WOKEN.store(false, Ordering::Release);
    CLOSED.store(true, Ordering::SeqCst);
}

/// Lets all threads in again.
pub(crate) fn open() {
    let guard = lock();
    CLOSED.store(false, Ordering::SeqCst);
    drop(guard);
    OPENED.1.notify_all();
}

/// Whether a thread is inside.
pub(crate) fn is_occupied() -> bool {
    INSIDE
        .iter()
        .any(|shard| shard.0.load(Ordering::SeqCst) != 0)
}

/// Whether a thread has come to the closed gate; returned once.
pub(crate) fn take_wake_request() -> bool {
    CLOSED.load(Ordering::SeqCst) && WOKEN.swap(false, Ordering::AcqRel)
}

/// No move is under way, one is about to begin, or none may begin any more.
const NOBODY: u32 = 0;
const MOVER: u32 = 1;
const LEFT: u32 = 2;
static MOVES: AtomicU32 = AtomicU32::new(NOBODY);

/// The thread that moves memory makes ready for that, until this is dropped.
pub(crate) struct Moving(());

impl Drop for Moving {
    fn drop(&mut self) {
        let _ = MOVES.compare_exchange(MOVER, NOBODY, Ordering::SeqCst, Ordering::SeqCst);
    }
}

/// Before the driver is called in order to move memory; not while the process ends.
pub(crate) fn begin_move() -> Option<Moving> {
    let begun = MOVES.compare_exchange(NOBODY, MOVER, Ordering::SeqCst, Ordering::SeqCst);
    begun.is_ok().then(|| Moving(()))
}

static LEAVING: AtomicBool = AtomicBool::new(false);

/// Whether the process waits for the mover in order to end.
pub(crate) fn is_leaving() -> bool {
    LEAVING.load(Ordering::Acquire)
}

/// The process ends: from here on no move begins, since the driver is about to go. One that is under way is awaited.
pub(crate) fn leave(patience: Duration) {
    LEAVING.store(true, Ordering::Release);
    let deadline = Instant::now() + patience;
    while MOVES
        .compare_exchange(NOBODY, LEFT, Ordering::SeqCst, Ordering::SeqCst)
        .is_err_and(|found| found == MOVER)
    {
        if Instant::now() > deadline {
            MOVES.store(LEFT, Ordering::SeqCst);
            break;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    await_open(patience);
}

/// After a fork, in the child: the others that were inside, or that closed it, do not exist here.
pub(crate) fn in_child() {
    for shard in &INSIDE {
        shard.0.store(0, Ordering::SeqCst);
    }
    CLOSED.store(false, Ordering::SeqCst);
    MOVES.store(NOBODY, Ordering::SeqCst);
    LEAVING.store(false, Ordering::SeqCst);
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn exit_waits_for_the_mover_and_forbids_moves() {
        let _alone = crate::ground::guard::alone();
        let moving = begin_move().expect("nobody has left");
        assert!(begin_move().is_none());
        let leaving = std::thread::spawn(|| leave(Duration::from_secs(60)));
        std::thread::yield_now();
        assert!(!leaving.is_finished());
        drop(moving);
        leaving.join().unwrap();
        assert!(begin_move().is_none());
        // Other tests of this process go on.
        LEAVING.store(false, Ordering::Release);
        MOVES.store(NOBODY, Ordering::SeqCst);
    }

    #[test]
    fn closed_gate_is_empty_once_it_is_left() {
        let _alone = crate::ground::guard::alone();
        let (entered, is_in) = mpsc::channel();
        let (leave, may_leave) = mpsc::channel::<()>();
        let first = std::thread::spawn(move || {
            through(|| {
                // Calls within a call do not wait, or it would never return.
                through(|| entered.send(()).unwrap());
                may_leave.recv().unwrap();
                through(|| ());
            });
        });
        is_in.recv().unwrap();
        close();
        assert!(is_occupied());
        assert_eq!(try_through(|| ()), None);
        let second = std::thread::spawn(|| through(is_occupied));
        leave.send(()).unwrap();
        first.join().unwrap();
        assert!(!second.is_finished());
        while is_occupied() {
            std::thread::yield_now();
        }
        open();
        assert!(second.join().unwrap(), "it counts itself");
        assert!(!is_occupied());
        assert_eq!(try_through(is_occupied), Some(true));
        assert!(!is_occupied());
    }
}
