//! Which descriptors are control files (`/dev/nvidiactl`): one byte each, so that `close` and
//! `ioctl` on anything else cost one load.
//!
//! The real one is known by its device number, whenever it is first met. The emulated one is a
//! socket, known by the path that gave it. Only small numbers have a byte; beyond them the real
//! control file is still found, by a system call each time.

use std::{
    ffi::{CStr, c_char, c_int},
    os::fd::BorrowedFd,
    sync::atomic::{AtomicU8, AtomicUsize, Ordering},
};

use gpumux_rm::real::is_control_file;
use rustix::fs::FileType;

/// The path under which both kinds are opened.
const PATH: &CStr = c"/dev/nvidiactl";

/// Descriptors that have a byte.
const NUMBERS: usize = 65_536;

/// Which driver is behind a control file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The kernel's.
    Device = 1,
    /// The emulated device's.
    Emulated = 2,
}

static KINDS: [AtomicU8; NUMBERS] = [const { AtomicU8::new(0) }; NUMBERS];

/// How many descriptors without a byte are known as control files.
static BEYOND: AtomicUsize = AtomicUsize::new(0);

/// Whether a path that `open` has just accepted leads to a control file.
///
/// # Safety
/// `path` must be a C string.
pub(crate) unsafe fn is_path(path: *const c_char) -> bool {
    // SAFETY: the caller's; the comparison stops at the first difference, thus within the string.
    !path.is_null() && unsafe { libc::strcmp(path, PATH.as_ptr()) } == 0
}

/// Remembers what `open` made of the control file's path.
pub(crate) fn opened(fd: c_int) {
    if let Some(kind) = examine(fd, true) {
        remember(fd, kind);
    }
}

/// What is behind `fd`, if it is a control file.
pub(crate) fn kind(fd: c_int) -> Option<Kind> {
    match KINDS
        .get(usize::try_from(fd).ok()?)
        .map(|kind| kind.load(Ordering::Acquire))
    {
        Some(1) => Some(Kind::Device),
        Some(2) => Some(Kind::Emulated),
        _ => {
            let kind = examine(fd, false)?;
            remember(fd, kind);
            Some(kind)
        }
    }
}

/// Whether closing `fd` may close a control file. One load.
pub(crate) fn may_be_known(fd: c_int) -> bool {
    match usize::try_from(fd).map(|fd| KINDS.get(fd)) {
        Ok(Some(kind)) => kind.load(Ordering::Acquire) != 0,
        Ok(None) => BEYOND.load(Ordering::Acquire) != 0,
        Err(_) => false,
    }
}

/// Forgets a descriptor that is about to be closed.
pub(crate) fn forget(fd: c_int) {
    if let Some(kind) = usize::try_from(fd).ok().and_then(|fd| KINDS.get(fd)) {
        kind.store(0, Ordering::Release);
    }
}

fn remember(fd: c_int, kind: Kind) {
    match usize::try_from(fd).map(|fd| KINDS.get(fd)) {
        Ok(Some(slot)) => slot.store(kind as u8, Ordering::Release),
        // Never counted down: a program with so many files pays a lock per close.
        Ok(None) => _ = BEYOND.fetch_add(1, Ordering::AcqRel),
        Err(_) => {}
    }
}

fn examine(fd: c_int, by_its_path: bool) -> Option<Kind> {
    if fd < 0 {
        return None;
    }
    // SAFETY: only examined here; a number that is not open gives an error.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    if is_control_file(fd).ok()? {
        return Some(Kind::Device);
    }
    let socket = || {
        rustix::fs::fstat(fd)
            .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Socket)
    };
    (by_its_path && socket()).then_some(Kind::Emulated)
}
