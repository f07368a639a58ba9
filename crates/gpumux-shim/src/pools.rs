//! The driver's pools of stream-ordered memory: what they have of the lease, and how they give it back.
//!
//! A pool keeps what the program has freed, up to a threshold, for its next allocation. It is counted as long as the pool has it:
//! anew when a pool grows, every second while a part of one is free, and when the daemon needs room. Then the free part goes
//! back to the device first: so it counts as movable, and what is allocated as pinned.

use std::{
    ffi::c_int,
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use crate::{
    driver::{CUresult, SUCCESS, functions},
    gate, guard,
    memory::{self, Space},
    process, work,
};

/// `CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT`
const RESERVED: c_int = 5;
/// How often pools with a free part are counted.
const PERIOD: Duration = Duration::from_secs(1);

functions! {
    device_pool c"cuDeviceGetMemPool" (*mut u64, c_int);
    pool_attribute c"cuMemPoolGetAttribute" (u64, c_int, *mut u64);
    pool_trim c"cuMemPoolTrimTo" (u64, usize);
}

/// A pool that the program has allocated from.
pub(crate) struct Pool {
    device: c_int,
    /// Bytes that are counted for it: at least what is allocated.
    booked: u64,
    /// Bytes that are allocated and not freed.
    used: u64,
}

/// Held while a pool is used that the program could destroy.
static IN_USE: Mutex<()> = Mutex::new(());
/// The agent counts them again; until then it need not be woken.
static WATCHED: AtomicBool = AtomicBool::new(false);
/// When it does.
static DUE: Mutex<Option<Instant>> = Mutex::new(None);

/// The pool that a device's allocations come from where the program names none.
pub(crate) fn of_device(device: c_int) -> Option<u64> {
    let mut pool = 0;
    // SAFETY: a place to write; a device that does not exist is refused.
    (unsafe { device_pool()?(&raw mut pool, device) } == SUCCESS).then_some(pool)
}

/// Bytes of the device that a pool has. The program must not destroy it meanwhile.
fn reserved(pool: u64) -> Option<u64> {
    let mut bytes = 0;
    // SAFETY: the attribute has 64 bits.
    (unsafe { pool_attribute()?(pool, RESERVED, &raw mut bytes) } == SUCCESS).then_some(bytes)
}

impl Space {
    /// Counts an allocation from a pool. By how much more than before the pool is counted: that must be taken from the lease.
    fn draw(&mut self, handle: u64, device: c_int, bytes: u64) -> u64 {
        let pool = self.pools.entry(handle).or_insert(Pool {
            device,
            booked: 0,
            used: 0,
        });
        pool.used += bytes;
        let need = pool.used.saturating_sub(pool.booked);
        pool.booked += need;
        self.shift(device, bytes - need, true);
        need
    }

    /// The allocation was not made after all.
    fn undo(&mut self, handle: u64, bytes: u64, need: u64) {
        if let Some(pool) = self.pools.get_mut(&handle) {
            pool.used = pool.used.saturating_sub(bytes);
            pool.booked = pool.booked.saturating_sub(need);
            let device = pool.device;
            self.shift(device, bytes - need, false);
        }
    }

    /// An allocation is freed: the pool keeps it for now. Whether there is such a pool.
    pub(crate) fn put_back(&mut self, handle: u64, bytes: u64) -> bool {
        let Some(pool) = self.pools.get_mut(&handle) else {
            return false;
        };
        pool.used = pool.used.saturating_sub(bytes);
        let device = pool.device;
        self.shift(device, bytes, false);
        true
    }

    fn take_unused_pools(&mut self) -> Vec<Pool> {
        let unused = self.pools.extract_if(.., |_, it| it.used == 0);
        unused.map(|(_, it)| it).collect()
    }

    /// A pool is counted by what it has. Of which device how much less, or more.
    fn count(&mut self, handle: u64, reserved: u64) -> Option<(c_int, u64, u64)> {
        let pool = self.pools.get_mut(&handle)?;
        let before = std::mem::replace(&mut pool.booked, reserved.max(pool.used));
        let (less, more) = (
            before.saturating_sub(pool.booked),
            pool.booked.saturating_sub(before),
        );
        Some((pool.device, less, more))
    }
}

/// Takes what an allocation needs beyond what its pool keeps. The bytes of it that are new; none: there is no room.
pub(crate) fn take(handle: u64, device: c_int, bytes: u64) -> Option<u64> {
    for again in [true, false] {
        let need = memory::with(|space| space.draw(handle, device, bytes));
        if need == 0 || memory::take(device, need, true) {
            return Some(need);
        }
        memory::with(|space| space.undo(handle, bytes, need));
        // Another pool, or this one in pieces that are too small, may keep what is lacking.
        if !again || !trim() {
            break;
        }
    }
    None
}

/// The driver has refused an allocation.
pub(crate) fn give(handle: u64, device: c_int, bytes: u64, need: u64) {
    memory::with(|space| space.undo(handle, bytes, need));
    memory::give(device, need, true);
}

/// A pool may have grown by more than was allocated.
pub(crate) fn grown(handle: u64) {
    let _in_use = guard::lock(&IN_USE);
    recount(handle);
}

/// Some of what a pool has is free now.
pub(crate) fn freed() {
    if !WATCHED.swap(true, Ordering::AcqRel) {
        process::wake_agent();
    }
}

fn recount(handle: u64) {
    let known = memory::with(|space| space.pools.contains_key(&handle));
    let Some(reserved) = known.then(|| reserved(handle)).flatten() else {
        return;
    };
    if let Some((device, less, more)) = memory::with(|space| space.count(handle, reserved)) {
        if less > 0 {
            memory::give(device, less, false);
        }
        memory::tell_with(|space| space.book_more(device, more));
    }
}

fn handles() -> Vec<u64> {
    memory::with(|space| space.pools.keys().copied().collect())
}

/// Counts pools when that is due. How long the agent may wait, if it would wait for `most`.
pub(crate) fn look(most: Option<Duration>) -> Option<Duration> {
    if !WATCHED.load(Ordering::Acquire) {
        return most;
    }
    let mut due = guard::lock(&DUE);
    let now = Instant::now();
    let at = *due.get_or_insert(now + PERIOD);
    if now >= at && work::is_capturing_anywhere() {
        // Questions wait until it has ended.
        *due = None;
        return Some(most.map_or(PERIOD, |most| most.min(PERIOD)));
    }
    if now < at {
        return Some(most.map_or(at - now, |most| most.min(at - now)));
    }
    *due = None;
    drop(due);
    // What is freed from here on wakes the agent again.
    WATCHED.store(false, Ordering::Release);
    let in_use = guard::lock(&IN_USE);
    handles().into_iter().for_each(recount);
    drop(in_use);
    // Allocations and releases meanwhile sent nothing.
    memory::tell_with(Space::holds);
    let slack = memory::with(|space| space.pools.values().any(|it| it.booked > it.used));
    if slack {
        WATCHED.store(true, Ordering::Release);
        return Some(most.map_or(PERIOD, |most| most.min(PERIOD)));
    }
    most
}

/// Has pools give back to the device what is free. Whether any had something. Not during a capture, which it could end.
pub(crate) fn trim() -> bool {
    let slack = memory::with(|space| space.pools.values().any(|it| it.booked > it.used));
    if !slack || work::is_capturing_anywhere() {
        return false;
    }
    let _in_use = guard::lock(&IN_USE);
    for handle in handles() {
        if let Some(trim) = pool_trim() {
            // SAFETY: the pool is there: the program cannot destroy it now.
            unsafe { trim(handle, 0) };
        }
        recount(handle);
    }
    true
}

/// `cuMemPoolDestroy`: what is still allocated goes when it is freed.
pub(crate) fn destroy(handle: u64, real: impl FnOnce() -> CUresult) -> CUresult {
    if memory::off() {
        return gate::through(real);
    }
    gate::through(|| {
        let _in_use = guard::lock(&IN_USE);
        let result = real();
        if result == SUCCESS
            && let Some(pool) = memory::with(|space| space.remove_pool(handle))
        {
            memory::give(pool.device, pool.booked.saturating_sub(pool.used), false);
        }
        result
    })
}

/// A context has ended, and its allocations with it: pools of which nothing is allocated are counted again when something is.
pub(crate) fn forget_unused() {
    let _in_use = guard::lock(&IN_USE);
    for pool in memory::with(Space::take_unused_pools) {
        memory::give(pool.device, pool.booked, false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pool_is_counted_by_what_it_keeps() {
        const POOL: u64 = 7;
        let mut space = Space::default();
        let counts = |space: &Space| {
            let pool = &space.pools[&POOL];
            (pool.booked, pool.used)
        };
        assert_eq!(space.draw(POOL, 0, 100), 100);
        // The driver has taken more for it.
        assert_eq!(space.count(POOL, 128), Some((0, 0, 28)));
        assert_eq!(space.draw(POOL, 0, 20), 0, "the pool has it");
        assert_eq!(space.draw(POOL, 0, 20), 12);
        assert_eq!(counts(&space), (140, 140));
        space.undo(POOL, 20, 12);
        assert_eq!(counts(&space), (128, 120));
        assert!(space.put_back(POOL, 100));
        assert_eq!(counts(&space), (128, 20), "freed memory is still its");
        assert_eq!(space.count(POOL, 32), Some((0, 96, 0)));
        // What is allocated counts, whatever the driver answers.
        assert_eq!(space.count(POOL, 0), Some((0, 12, 0)));
        assert!(space.take_unused_pools().is_empty());
        assert!(space.put_back(POOL, 20));
        assert_eq!(space.take_unused_pools().len(), 1);
        assert!(!space.put_back(POOL, 1), "it is gone");
    }
}
