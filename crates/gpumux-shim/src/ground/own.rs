//! Descriptors of the library's own, so that a forked child can close them all.
//!
//! They carry `O_CLOEXEC`; but a child that only forks would keep the session open
//! after its parent's end.

use std::{
    cell::UnsafeCell,
    io,
    mem::ManuallyDrop,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
    sync::{Mutex, MutexGuard},
};

use crate::ground::guard;

/// The most that are ever open but for questions of a process without a session: event, page, session, a file of host memory that is being
/// made, of memory that processes share one that is sent, one that is opened and one that has come, and the supervisor with a file of
/// kept memory.
const MOST: usize = 9 + LOOKS;
/// Threads that ask such a question at the same time; more get no answer.
const LOOKS: usize = 7;

type Table = [RawFd; MOST];

static TABLE: Mutex<Table> = Mutex::new([-1; MOST]);

/// A descriptor that children do not get.
#[derive(Debug)]
pub(crate) struct OwnFd(ManuallyDrop<OwnedFd>);

impl OwnFd {
    /// Makes a descriptor. No fork can happen between its making and its being listed, so `make`
    /// must not wait.
    pub(crate) fn new(make: impl FnOnce() -> io::Result<OwnedFd>) -> io::Result<Self> {
        let mut table = lock();
        let Some(free) = table.iter_mut().find(|fd| **fd < 0) else {
            return Err(io::Error::other(
                "too many descriptors of the library's own",
            ));
        };
        let fd = make()?;
        *free = fd.as_raw_fd();
        Ok(Self(ManuallyDrop::new(fd)))
    }
}

impl AsFd for OwnFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Drop for OwnFd {
    fn drop(&mut self) {
        let mut table = lock();
        for fd in table.iter_mut().filter(|fd| **fd == self.0.as_raw_fd()) {
            *fd = -1;
        }
        // SAFETY: dropped once, here; closing under the lock keeps a child from closing a
        // number that has become another file's.
        unsafe { ManuallyDrop::drop(&mut self.0) };
    }
}

fn lock() -> MutexGuard<'static, Table> {
    guard::lock(&TABLE)
}

/// The table's lock between the handlers of one fork.
struct ForkLock(UnsafeCell<Option<MutexGuard<'static, Table>>>);

// SAFETY: only the thread that holds the table's lock touches the cell.
unsafe impl Sync for ForkLock {}

static FORK_LOCK: ForkLock = ForkLock(UnsafeCell::new(None));

/// Before a fork.
pub(crate) fn before_fork() {
    let guard = lock();
    // SAFETY: this thread has just taken the lock.
    unsafe { *FORK_LOCK.0.get() = Some(guard) };
}

/// After a fork, in the parent.
pub(crate) fn after_fork() {
    // SAFETY: this thread took the lock in `before_fork`.
    drop(unsafe { (*FORK_LOCK.0.get()).take() });
}

/// After a fork, in the child: closes everything.
pub(crate) fn in_child() {
    // SAFETY: the child's only thread is the one that took the lock in `before_fork`.
    let Some(mut table) = (unsafe { (*FORK_LOCK.0.get()).take() }) else {
        return;
    };
    for fd in table.iter_mut().filter(|fd| **fd >= 0) {
        // SAFETY: the number is this library's, copied by the fork; nothing in the child uses it.
        unsafe { libc::close(*fd) };
        *fd = -1;
    }
}
