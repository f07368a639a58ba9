//! The driver's checkpoint calls, by which one process takes another off its devices and puts it on the same or others again.
//!
//! The structures are those of CUDA 13: each has 64 bytes, and what is reserved is zero.

use std::{
    ffi::{c_int, c_uint, c_void},
    time::Duration,
};

use crate::{Result, driver::Driver};

/// A GPU's UUID.
pub type Uuid = [u8; 16];

/// What a process is as to checkpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It runs.
    Running,
    /// Its calls of CUDA wait, and it has no work.
    Locked,
    /// It is on no device.
    Checkpointed,
    /// It failed for good.
    Failed,
}

/// `CUcheckpointLockArgs`
#[repr(C)]
struct LockArgs {
    timeout_ms: c_uint,
    reserved0: c_uint,
    reserved1: [u64; 7],
}

/// `CUcheckpointGpuPair`
#[repr(C)]
struct Pair {
    old: Uuid,
    new: Uuid,
}

/// `CUcheckpointRestoreArgs`
#[repr(C)]
struct RestoreArgs {
    pairs: *const Pair,
    count: c_uint,
    reserved0: c_uint,
    reserved1: [u64; 6],
}

const _: () = assert!(size_of::<LockArgs>() == 64 && size_of::<RestoreArgs>() == 64);

/// The arguments of calls that have none yet.
const NOTHING: [u64; 8] = [0; 8];

/// What a process is.
///
/// # Errors
/// The driver's, as for the other calls: it is older, the process does not use CUDA, or is another user's.
pub fn state(driver: &Driver, pid: i32) -> Result<State> {
    let mut state: c_int = 0;
    // SAFETY: a place to write.
    unsafe { driver.cuCheckpointProcessGetState(pid, &raw mut state) }?;
    Ok(match state {
        0 => State::Running,
        1 => State::Locked,
        2 => State::Checkpointed,
        _ => State::Failed,
    })
}

/// Has its calls of CUDA wait, and its work end. It stays [`State::Running`] where that takes longer than `timeout`.
///
/// # Errors
/// As [`state`].
pub fn lock(driver: &Driver, pid: i32, timeout: Duration) -> Result<()> {
    let args = LockArgs {
        timeout_ms: c_uint::try_from(timeout.as_millis()).unwrap_or(c_uint::MAX),
        reserved0: 0,
        reserved1: [0; 7],
    };
    // SAFETY: the structure that CUDA 13 documents.
    unsafe { driver.cuCheckpointProcessLock(pid, (&raw const args).cast()) }
}

/// Takes a locked process off its devices.
///
/// # Errors
/// As [`state`].
pub fn checkpoint(driver: &Driver, pid: i32) -> Result<()> {
    // SAFETY: as above.
    unsafe { driver.cuCheckpointProcessCheckpoint(pid, NOTHING.as_ptr().cast::<c_void>()) }
}

/// Puts it on its devices, locked: the second of each pair in the place of the first. Without pairs, where it was. With some, every device
/// that it sees must be the first of one, and the second of one.
///
/// # Errors
/// As [`state`].
pub fn restore(driver: &Driver, pid: i32, pairs: &[(Uuid, Uuid)]) -> Result<()> {
    let pairs: Vec<Pair> = (pairs.iter())
        .map(|(old, new)| Pair {
            old: *old,
            new: *new,
        })
        .collect();
    let args = RestoreArgs {
        pairs: match pairs.is_empty() {
            true => std::ptr::null(),
            false => pairs.as_ptr(),
        },
        count: pairs.len() as c_uint,
        reserved0: 0,
        reserved1: [0; 6],
    };
    // SAFETY: the structure that CUDA 13 documents; the pairs live as long as the call.
    unsafe { driver.cuCheckpointProcessRestore(pid, (&raw const args).cast()) }
}

/// Lets a locked process go on.
///
/// # Errors
/// As [`state`].
pub fn unlock(driver: &Driver, pid: i32) -> Result<()> {
    // SAFETY: as above.
    unsafe { driver.cuCheckpointProcessUnlock(pid, NOTHING.as_ptr().cast::<c_void>()) }
}
