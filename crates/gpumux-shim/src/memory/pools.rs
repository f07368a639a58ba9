//! The driver's pools of stream-ordered memory: what they have of the lease, and how they give it back.
//!
//! A pool keeps what the program has freed, up to a threshold, for its next allocation. It is counted as long as the pool has it:
//! anew when a pool grows, every second while a part of one is free, and when the daemon needs room. Then the free part goes
//! back to the device first: so it counts as movable, and what is allocated as pinned. A pool that the program has destroyed is
//! counted until all of it is freed, as the driver keeps it.

use std::{
    ffi::c_int,
    sync::{
        Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use gpumux_cuda::types::pool::RESERVED;

use crate::{
    ground::{
        context::is_capturing_anywhere,
        driver::{CUresult, SUCCESS, functions},
        gate, guard, lease, wake,
    },
    memory::{
        graphs,
        space::{self, Native, Pool, Pools, Space},
    },
    work,
};

/// How often pools with a free part are counted.
const PERIOD: Duration = Duration::from_secs(1);
/// How long the agent waits for a call of the program's that may end a pool: it must stay reachable.
const SOON: Duration = Duration::from_millis(100);

functions! {
    device_count c"cuDeviceGetCount" (*mut c_int);
    device_pool c"cuDeviceGetMemPool" (*mut u64, c_int);
    default_pool c"cuDeviceGetDefaultMemPool" (*mut u64, c_int);
    pool_attribute c"cuMemPoolGetAttribute" (u64, c_int, *mut u64);
    pool_trim c"cuMemPoolTrimTo" (u64, usize);
}

/// Held while a pool is used that the program could destroy, or end with a context.
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

/// Stands for a pool whose memory is on no device.
pub(crate) const ELSEWHERE: c_int = -1;

/// The head of `CUmemPoolProps`.
#[repr(C)]
pub(crate) struct PoolProperties {
    allocation: c_int,
    handles: c_int,
    location: c_int,
    device: c_int,
}

/// The device of a pool, which need not be the current one; [`ELSEWHERE`] is the host. None: not known, as that of a pool of
/// another process.
pub(crate) fn place(pool: u64) -> Option<c_int> {
    let known = space::with(|space| {
        let Pools { all, places, .. } = &space.pools;
        let used = all.values().find(|it| it.handle == Some(pool));
        (used.map(|it| it.device)).or_else(|| places.get(&pool).copied())
    });
    known.or_else(|| {
        let mut count = 0;
        // SAFETY: a place to write.
        unsafe { device_count()?(&raw mut count) };
        (0..count).find(|device| default_of(*device) == Some(pool))
    })
}

/// A device's first pool, which the program cannot destroy.
fn default_of(device: c_int) -> Option<u64> {
    let mut pool = 0;
    // SAFETY: a place to write; no context is needed.
    (unsafe { default_pool()?(&raw mut pool, device) } == SUCCESS).then_some(pool)
}

/// `cuMemPoolCreate`
///
/// # Safety
/// Both must be what the program passed, which the driver accepts.
pub(crate) unsafe fn create(
    out: *mut u64,
    properties: *const PoolProperties,
    real: impl FnOnce() -> CUresult,
) -> CUresult {
    /// `CU_MEM_LOCATION_TYPE_DEVICE`
    const DEVICE: c_int = 1;
    // One that is being destroyed is not taken for this: it may have had the same handle.
    let result = gate::through(|| without_use(real));
    if result == SUCCESS && !space::off() {
        // SAFETY: the driver has read the one and written the other.
        let (pool, it) = unsafe { (*out, &*properties) };
        let device = match it.location {
            DEVICE => it.device,
            _ => ELSEWHERE,
        };
        space::with(|space| space.pools.places.insert(pool, device));
    }
    result
}

/// Bytes of the device that a pool has. The program must not destroy it meanwhile.
fn reserved(pool: u64) -> Option<u64> {
    let mut bytes = 0;
    // SAFETY: the attribute has 64 bits.
    (unsafe { pool_attribute()?(pool, RESERVED, &raw mut bytes) } == SUCCESS).then_some(bytes)
}

impl Space {
    /// Whether the driver keeps what is free.
    fn have_slack(&self) -> bool {
        self.pools.have_slack() || self.graphs_have_slack()
    }

    /// Counts an allocation from a pool: the pool's number, and by how much more than before it is counted. That must be taken from
    /// the lease.
    fn draw(&mut self, handle: u64, device: c_int, bytes: u64) -> (u64, u64) {
        let number = self.pools.number(handle).unwrap_or_else(|| {
            self.pools.numbers += 1;
            self.pools.numbers
        });
        let pool = self.pools.all.entry(number).or_insert(Pool {
            handle: Some(handle),
            known: true,
            device,
            booked: 0,
            used: 0,
        });
        // The program has used it, so it is there.
        pool.known = true;
        pool.used += bytes;
        let need = pool.used.saturating_sub(pool.booked);
        pool.booked += need;
        let device = pool.device;
        self.shift(device, bytes - need, true);
        (number, need)
    }

    /// The allocation was not made after all.
    fn undo(&mut self, number: u64, bytes: u64, need: u64) {
        if let Some(pool) = self.pools.all.get_mut(&number) {
            pool.used = pool.used.saturating_sub(bytes);
            pool.booked = pool.booked.saturating_sub(need);
            let device = pool.device;
            self.shift(device, bytes - need, false);
        }
    }

    /// What is freed goes back to its pool. An error has it where there is none.
    pub(crate) fn keep_in_pool(&mut self, gone: Native) -> Result<(), Native> {
        match gone.pool != 0 && self.put_back(gone.pool, gone.bytes) {
            true => Ok(()),
            false => Err(gone),
        }
    }

    /// An allocation is freed: the pool keeps it for now; one that is destroyed gives all back with its last. Whether there is
    /// such a pool.
    fn put_back(&mut self, number: u64, bytes: u64) -> bool {
        let Some(pool) = self.pools.all.get_mut(&number) else {
            return false;
        };
        pool.used = pool.used.saturating_sub(bytes);
        let (device, ends) = (pool.device, pool.handle.is_none() && pool.used == 0);
        self.shift(device, bytes, false);
        if ends {
            self.drop_pool(number);
        }
        true
    }

    fn drop_pool(&mut self, number: u64) {
        if let Some(pool) = self.pools.all.remove(&number) {
            let holds = self.give(pool.device, pool.booked, false);
            holds.into_iter().for_each(lease::tell);
        }
    }

    /// A pool is counted by what it has.
    fn count(&mut self, number: u64, reserved: u64) {
        let Some(pool) = self.pools.all.get_mut(&number) else {
            return;
        };
        let before = std::mem::replace(&mut pool.booked, reserved.max(pool.used));
        let (device, now) = (pool.device, pool.booked);
        let less = (before > now).then(|| self.give(device, before - now, false));
        let more = self.book_more(device, now.saturating_sub(before));
        let changes = less.flatten().into_iter().chain(more);
        changes.for_each(lease::tell);
    }

    /// The program has destroyed a pool: the driver keeps what it has until all of it is freed.
    fn end_pool(&mut self, handle: u64) {
        self.pools.places.remove(&handle);
        let Some(number) = self.pools.number(handle) else {
            return;
        };
        if let Some(pool) = self.pools.all.get_mut(&number) {
            (pool.handle, pool.known) = (None, false);
            if pool.used == 0 {
                self.drop_pool(number);
            }
        }
    }

    /// A device's primary context has ended: the driver can be asked about the device's own pool only.
    fn doubt_pools(&mut self, device: c_int, own: Option<u64>) {
        let all = self.pools.all.values_mut().filter(|it| it.device == device);
        all.filter(|it| it.handle != own)
            .for_each(|it| it.known = false);
    }
}

/// What an allocation takes of a pool.
pub(crate) struct Drawn {
    /// The pool's number.
    pub(crate) pool: u64,
    device: c_int,
    bytes: u64,
    /// Of them, what the pool did not keep.
    need: u64,
}

/// Takes what an allocation needs beyond what its pool keeps; none: there is no room.
pub(crate) fn take(handle: u64, device: c_int, bytes: u64) -> Option<Drawn> {
    for again in [true, false] {
        let (pool, need) = space::with(|space| space.draw(handle, device, bytes));
        if need == 0 || space::take(device, need, true) {
            return Some(Drawn {
                pool,
                device,
                bytes,
                need,
            });
        }
        space::with(|space| space.undo(pool, bytes, need));
        // Another pool, or this one in pieces that are too small, may keep what is lacking.
        if !again || !trim() {
            break;
        }
    }
    None
}

impl Drawn {
    /// The driver has refused the allocation.
    pub(crate) fn give(self) {
        space::with(|space| space.undo(self.pool, self.bytes, self.need));
        space::give(self.device, self.need, true);
    }

    /// The allocation is made: the pool may have grown by more.
    pub(crate) fn grown(&self) {
        if self.need > 0 {
            let _in_use = guard::lock(&IN_USE);
            recount();
        }
    }
}

/// What pools and graphs have may differ from what is counted: some of it is free, or a graph was launched.
pub(crate) fn watch() {
    if !WATCHED.swap(true, Ordering::AcqRel) {
        wake::agent();
    }
}

/// `cuGraphLaunch` has had this result.
#[inline]
pub(crate) fn graph_launched(result: CUresult) -> CUresult {
    if graphs::may_allocate() && result == SUCCESS && !WATCHED.load(Ordering::Relaxed) {
        note_launch();
    }
    result
}

#[cold]
fn note_launch() {
    if !space::off() && space::current_device().is_some() {
        watch();
    }
}

/// Counts all pools anew, and what graphs have. No pool may end meanwhile.
fn recount() {
    graphs::recount();
    for (number, handle) in space::with(|space| space.pools.known()) {
        if let Some(reserved) = reserved(handle) {
            space::with(|space| space.count(number, reserved));
        }
    }
}

/// Keeps the program from ending pools for a moment; none: it is about to.
fn in_use() -> Option<MutexGuard<'static, ()>> {
    guard::lock_by(&IN_USE, Instant::now() + SOON)
}

/// Counts pools when that is due. How long the agent may wait, if it would wait for `most`.
pub(crate) fn look(most: Option<Duration>) -> Option<Duration> {
    if !WATCHED.load(Ordering::Acquire) {
        return most;
    }
    let mut due = guard::lock(&DUE);
    let now = Instant::now();
    let at = *due.get_or_insert(now + PERIOD);
    if now >= at && is_capturing_anywhere() {
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
    let in_use = in_use();
    let counted = in_use.is_some();
    if counted {
        recount();
    }
    drop(in_use);
    // Allocations and releases meanwhile sent nothing.
    space::tell_with(Space::holds);
    if !counted || space::with(|space| space.have_slack()) {
        WATCHED.store(true, Ordering::Release);
        return Some(most.map_or(PERIOD, |most| most.min(PERIOD)));
    }
    most
}

/// Has pools give back to the device what is free. Whether any had something. Not during a capture, which it could end.
pub(crate) fn trim() -> bool {
    if !space::with(|space| space.have_slack()) || is_capturing_anywhere() {
        return false;
    }
    let Some(_in_use) = in_use() else {
        return false;
    };
    for (_, handle) in space::with(|space| space.pools.known()) {
        if let Some(trim) = pool_trim() {
            // SAFETY: the pool is there: the program cannot destroy it now.
            unsafe { trim(handle, 0) };
        }
    }
    graphs::trim();
    recount();
    true
}

/// `cuMemPoolDestroy`
pub(crate) fn destroy(handle: u64, real: impl FnOnce() -> CUresult) -> CUresult {
    if space::off() {
        return gate::through(real);
    }
    gate::through(|| {
        let _in_use = guard::lock(&IN_USE);
        // The last time that the driver can be asked.
        recount();
        let result = real();
        if result == SUCCESS {
            space::with(|space| space.end_pool(handle));
        }
        result
    })
}

/// Does what may end a context, and pools with it. Not while the agent uses them.
pub(crate) fn without_use<R>(work: impl FnOnce() -> R) -> R {
    let _in_use = guard::lock(&IN_USE);
    work()
}

/// A context has ended. What it allocated from pools is there until it is freed, but not every pool can be asked about.
pub(crate) fn context_ended() {
    let _in_use = guard::lock(&IN_USE);
    for device in space::with(|space| space.pools.devices()) {
        if work::primary_context(device).is_none() {
            let own = default_of(device);
            space::with(|space| space.doubt_pools(device, own));
        }
    }
    recount();
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    const DEVICE: c_int = 0;
    const MIB: u64 = 1 << 20;
    /// By so much the driver's pools grow at least.
    const PIECE: u64 = 32 * MIB;
    /// The device's own pool, which the program cannot destroy.
    const OWN: u64 = 1;

    /// A pool of the driver's, as on the emulated device: an allocation is in one of its pieces.
    #[derive(Default)]
    struct Kept {
        /// Bytes, and of them those that are allocated.
        pieces: Vec<(u64, u64)>,
        destroyed: bool,
    }

    impl Kept {
        fn alloc(&mut self, bytes: u64) -> usize {
            let mut pieces = self.pieces.iter();
            let fit = pieces.position(|(size, used)| size - used >= bytes);
            let at = fit.unwrap_or_else(|| {
                self.pieces.push((bytes.max(PIECE), 0));
                self.pieces.len() - 1
            });
            self.pieces[at].1 += bytes;
            at
        }

        fn free(&mut self, at: usize, bytes: u64) {
            self.pieces[at].1 -= bytes;
            if self.destroyed {
                self.end();
            }
        }

        /// The program has destroyed it: it goes when all of it is freed.
        fn end(&mut self) {
            self.destroyed = true;
            if self.pieces.iter().all(|it| it.1 == 0) {
                self.trim();
            }
        }

        /// Pieces keep their places.
        fn trim(&mut self) {
            let empty = self.pieces.iter_mut().filter(|it| it.1 == 0);
            empty.for_each(|it| it.0 = 0);
        }

        fn reserved(&self) -> u64 {
            self.pieces.iter().map(|it| it.0).sum()
        }
    }

    /// An allocation of the program.
    struct Made {
        number: u64,
        /// Which of the driver's pools, and which piece of it.
        kept: (usize, usize),
        bytes: u64,
    }

    struct World {
        space: Space,
        driver: Vec<Kept>,
        /// What the program has, with the driver's pool: the driver gives out handles again.
        handles: BTreeMap<u64, usize>,
        made: Vec<Made>,
        /// A primary context has ended, so that the driver was not asked about every pool.
        doubts: bool,
    }

    impl World {
        fn new() -> Self {
            let mut space = Space::default();
            space.know_for_tests(DEVICE);
            Self {
                space,
                driver: vec![Kept::default()],
                handles: BTreeMap::from([(OWN, 0)]),
                made: Vec::new(),
                doubts: false,
            }
        }

        /// The pool so named, from 0.
        fn pool(&self, n: usize) -> (u64, usize) {
            let (handle, at) = self.handles.iter().nth(n % self.handles.len()).unwrap();
            (*handle, *at)
        }

        fn alloc(&mut self, n: usize, bytes: u64, refused: bool) {
            let (handle, at) = self.pool(n);
            let (number, need) = self.space.draw(handle, DEVICE, bytes);
            self.space.grant_for_tests(DEVICE, need);
            if refused {
                self.space.undo(number, bytes, need);
                let _ = self.space.give(DEVICE, need, true);
                return;
            }
            let place = self.driver[at].alloc(bytes);
            self.made.push(Made {
                number,
                kept: (at, place),
                bytes,
            });
        }

        fn free(&mut self, gone: &Made) {
            self.driver[gone.kept.0].free(gone.kept.1, gone.bytes);
            assert!(self.space.put_back(gone.number, gone.bytes));
        }

        fn step(&mut self, (what, n, size): (u8, usize, u64)) {
            match what {
                0..4 => self.alloc(n, size * MIB, size % 7 == 0),
                4..7 if !self.made.is_empty() => {
                    let gone = self.made.swap_remove(n % self.made.len());
                    self.free(&gone);
                }
                7 => {
                    let handle = (OWN + 1..).find(|it| !self.handles.contains_key(it));
                    self.handles.insert(handle.unwrap(), self.driver.len());
                    self.driver.push(Kept::default());
                }
                8 => {
                    let (handle, at) = self.pool(n);
                    if handle != OWN {
                        self.recount();
                        self.handles.remove(&handle);
                        self.driver[at].end();
                        self.space.end_pool(handle);
                    }
                }
                // The driver gives back what is free by itself, or the agent has it do so.
                9 => {
                    let (_, at) = self.pool(n);
                    self.driver[at].trim();
                }
                10 => {
                    for (_, handle) in self.space.pools.known() {
                        self.driver[self.handles[&handle]].trim();
                    }
                }
                11 => {
                    // The device's primary context ends.
                    self.space.doubt_pools(DEVICE, Some(OWN));
                    self.doubts = true;
                }
                _ => {}
            }
        }

        fn recount(&mut self) {
            for (number, handle) in self.space.pools.known() {
                let reserved = self.driver[self.handles[&handle]].reserved();
                self.space.count(number, reserved);
            }
        }

        /// The books have what the device lacks; what is allocated is pinned.
        fn check(&mut self) {
            self.recount();
            let taken: u64 = self.driver.iter().map(Kept::reserved).sum();
            let used: u64 = self.made.iter().map(|it| it.bytes).sum();
            let (movable, pinned) = self.space.used_for_tests(DEVICE);
            assert_eq!(pinned, used);
            match self.doubts {
                false => assert_eq!(movable + pinned, taken),
                // Such a pool counts as before until the program uses it again.
                true => assert!(movable + pinned >= taken, "{movable} {pinned} {taken}"),
            }
        }
    }

    proptest! {
        #[test]
        fn pools_are_counted_by_what_the_driver_keeps(
            steps in prop::collection::vec((0u8..12, 0usize..60, 1u64..50), 1..120)
        ) {
            let mut world = World::new();
            for step in steps {
                world.step(step);
                world.check();
            }
        }
    }

    #[test]
    fn pool_keeps_its_memory_after_the_context() {
        let mut world = World::new();
        world.alloc(0, 100 * MIB, false);
        world.step((11, 0, 1));
        world.check();
        assert_eq!(world.space.used_for_tests(DEVICE), (0, 100 * MIB));
        let gone = world.made.remove(0);
        world.free(&gone);
        world.check();
        assert_eq!(world.space.used_for_tests(DEVICE), (100 * MIB, 0));
    }
}
