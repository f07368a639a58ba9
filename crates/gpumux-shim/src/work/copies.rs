//! Copies between host and device: they are counted in the page, and wait where the daemon limits their rate (see
//! [`gpumux_wire::Daemon::CopyRates`]).
//!
//! A copy is passed on as soon as those before it are paid for at the group's rate, and is paid for as a whole. A copy that runs
//! outside of its call is so followed by the next at the time at which it has ended, if the device copies no slower.

use std::{
    cell::Cell,
    collections::BTreeMap,
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use gpumux_wire::page::{Direction, SLOTS};

use crate::{
    ground::{
        context::{bits, is_capturing_anywhere, page},
        driver::{CUdeviceptr, CUresult, CUstream, SUCCESS, functions},
        gate, guard,
    },
    work::streams::{Key, STATES, insert, is_capturing},
};

/// Copies of so few bytes wait for each other only, not for large ones.
const SMALL: u64 = 64 << 10;
/// What may be copied at once after a pause: as much as the rate allows in this time.
const BURST: Duration = Duration::from_millis(5);
/// How long a copy waits before it looks whether its rate is another one.
const LOOK: Duration = Duration::from_millis(5);

/// Slots of the groups whose copies wait.
static LIMITED: AtomicU64 = AtomicU64::new(0);
static BUCKETS: Mutex<Buckets> = Mutex::new(BTreeMap::new());

type Buckets = BTreeMap<(u32, Direction), Bucket>;

/// What may be copied at a rate.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Bucket {
    /// In bytes a second.
    rate: f64,
    /// Bytes that may be copied; below zero: that are to be paid for.
    has: f64,
    /// Bytes of small copies that are to be paid for.
    few: f64,
    /// When it had that.
    at: Instant,
}

impl Bucket {
    fn new(rate: f64, at: Instant) -> Self {
        Self {
            rate,
            has: 0.0,
            few: 0.0,
            at,
        }
    }

    /// Bytes that may be copied at once.
    fn burst(&self) -> f64 {
        self.rate * BURST.as_secs_f64()
    }

    fn fill(&mut self, now: Instant) {
        let more = self.rate * now.saturating_duration_since(self.at).as_secs_f64();
        self.has = (self.has + more).min(self.burst());
        self.few = (self.few - more).max(0.0);
        self.at = now;
    }

    /// Takes a copy of so many bytes, or returns how long it has to wait.
    fn take(&mut self, bytes: u64, now: Instant) -> Option<Duration> {
        self.fill(now);
        let is_small = bytes <= SMALL;
        let unpaid = match is_small {
            true => self.few - self.burst().max(SMALL as f64),
            false => -self.has,
        };
        if unpaid > 0.0 {
            return Some(Duration::from_secs_f64(unpaid / self.rate));
        }
        self.has -= bytes as f64;
        if is_small {
            self.few += bytes as f64;
        }
        None
    }
}

/// The copies of a group may have these rates from now on, by [`Direction`], in bytes a second.
pub(crate) fn limit(slot: u32, rates: [Option<u64>; 2]) {
    if slot >= SLOTS as u32 {
        return;
    }
    let mut buckets = guard::lock(&BUCKETS);
    let now = Instant::now();
    for (direction, rate) in [Direction::ToDevice, Direction::ToHost]
        .into_iter()
        .zip(rates)
    {
        match rate {
            None => drop(buckets.remove(&(slot, direction))),
            Some(rate) => {
                let rate = rate.max(1) as f64;
                let bucket = buckets.entry((slot, direction));
                let bucket = bucket.or_insert(Bucket::new(rate, now));
                bucket.fill(now);
                bucket.rate = rate;
            }
        }
    }
    let limited = buckets.keys().fold(0, |all, (slot, _)| all | 1 << slot);
    LIMITED.store(limited, Ordering::Release);
}

/// No daemon decides any more: all copy as they like.
pub(crate) fn release() {
    LIMITED.store(0, Ordering::Release);
    guard::lock(&BUCKETS).clear();
}

/// After a fork, in the child: another thread may have had the lock.
pub(crate) fn in_child() {
    LIMITED.store(0, Ordering::Release);
}

/// Waits until a copy may begin.
#[cold]
fn wait(slot: u32, direction: Direction, bytes: u64) {
    while LIMITED.load(Ordering::Acquire) >> slot & 1 != 0 {
        let taken = (guard::lock(&BUCKETS).get_mut(&(slot, direction)))
            .and_then(|bucket| bucket.take(bytes, Instant::now()));
        match taken {
            Some(more) => thread::sleep(more.min(LOOK)),
            None => return,
        }
    }
}

/// What a call tells of the direction of its copy.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Way {
    Known(Direction),
    /// To and from what.
    Between(CUdeviceptr, CUdeviceptr),
}

/// A copy of so many bytes.
pub(crate) type Copied = (Way, u64);

thread_local! {
    /// Bytes of this thread's small copies between addresses about which the driver was not asked.
    static FEW: Cell<u64> = const { Cell::new(0) };
}

/// What these copy, by [`Direction`]. The driver is asked about one of many small copies, which stands for those before it: `few` bytes.
fn sums(copies: impl Iterator<Item = Copied>, few: &mut u64) -> [u64; 2] {
    let mut sums = [0; 2];
    for (way, mut bytes) in copies {
        let direction = match way {
            Way::Known(direction) => Some(direction),
            Way::Between(to, from) => {
                if bytes <= SMALL {
                    *few += bytes;
                    if *few <= SMALL {
                        continue;
                    }
                    bytes = std::mem::take(few);
                }
                match (is_device(to), is_device(from)) {
                    (true, false) => Some(Direction::ToDevice),
                    (false, true) => Some(Direction::ToHost),
                    _ => None,
                }
            }
        };
        if let Some(direction) = direction {
            let sum: &mut u64 = &mut sums[direction as usize];
            *sum = sum.saturating_add(bytes);
        }
    }
    sums
}

functions! {
    pointer_attribute c"cuPointerGetAttribute" (*mut u32, i32, CUdeviceptr);
}

/// Whether an address is of device memory. The driver answers with an error for memory that it does not know.
fn is_device(address: CUdeviceptr) -> bool {
    /// `CU_POINTER_ATTRIBUTE_MEMORY_TYPE`
    const TYPE: i32 = 2;
    /// `CU_MEMORYTYPE_DEVICE`
    const DEVICE: u32 = 2;
    let mut kind = 0;
    // SAFETY: a place to write; the driver does not follow the address.
    let asked = pointer_attribute().map(|ask| unsafe { ask(&raw mut kind, TYPE, address) });
    asked == Some(SUCCESS) && kind == DEVICE
}

/// The group that copies on a stream, unless they are only captured.
fn slot_of(stream: CUstream, own: bool) -> Option<u32> {
    let key = Key::new(stream, own)?;
    if is_capturing_anywhere() && is_capturing(key) {
        return None;
    }
    let place = key.find().or_else(|| insert(key))?;
    bits(STATES[place].slots.load(Ordering::Relaxed)).next()
}

/// The program makes these copies in one call.
#[inline]
pub(crate) fn transfer(
    stream: CUstream,
    own: bool,
    copies: impl Iterator<Item = Copied> + Clone,
    call: impl FnOnce() -> CUresult,
) -> CUresult {
    let Some(page) = page().filter(|_| !gate::is_nested()) else {
        return call();
    };
    if LIMITED.load(Ordering::Relaxed) != 0 {
        let sums = sums(copies.clone(), &mut FEW.get());
        each(stream, own, sums, wait);
    }
    let result = call();
    // Only now is memory that was away surely there, and known to the driver.
    if result == SUCCESS {
        let mut few = FEW.get();
        let sums = sums(copies, &mut few);
        FEW.set(few);
        each(stream, own, sums, |slot, direction, bytes| {
            if let Some(counters) = page.slot(slot) {
                counters.count_copy(direction, bytes);
            }
        });
    }
    result
}

/// Calls `act` with the stream's group and what is copied in each direction.
#[inline]
fn each(stream: CUstream, own: bool, sums: [u64; 2], act: impl Fn(u32, Direction, u64)) {
    if sums != [0; 2]
        && let Some(slot) = slot_of(stream, own)
    {
        for direction in [Direction::ToDevice, Direction::ToHost] {
            match sums[direction as usize] {
                0 => {}
                bytes => act(slot, direction, bytes),
            }
        }
    }
}

/// One side of a copy between planes or volumes, behind its `N` offsets and before its `M` extents.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct Side<const N: usize, const M: usize> {
    offsets: [u64; N],
    kind: u32,
    host: u64,
    device: CUdeviceptr,
    array: u64,
    extents: [u64; M],
}

impl<const N: usize, const M: usize> Side<N, M> {
    /// Whether it is on the device; none: that takes its address.
    fn is_device(&self) -> Option<bool> {
        match self.kind {
            1 => Some(false),
            2 | 3 => Some(true),
            _ => None,
        }
    }
}

/// `CUDA_MEMCPY2D` with `N`, `M` and `D` 2, 1 and 2, and `CUDA_MEMCPY3D` with 4, 3 and 3.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct Shape<const N: usize, const M: usize, const D: usize> {
    from: Side<N, M>,
    to: Side<N, M>,
    size: [u64; D],
}

pub(crate) type Plane = Shape<2, 1, 2>;
pub(crate) type Volume = Shape<4, 3, 3>;

const _: () = assert!(size_of::<Plane>() == 128 && size_of::<Volume>() == 200);

impl<const N: usize, const M: usize, const D: usize> Shape<N, M, D> {
    /// What it copies.
    pub(crate) fn copied(&self) -> Copied {
        let way = match (self.to.is_device(), self.from.is_device()) {
            (Some(true), Some(false)) => Way::Known(Direction::ToDevice),
            (Some(false), Some(true)) => Way::Known(Direction::ToHost),
            _ => Way::Between(self.to.device, self.from.device),
        };
        (way, volume(&self.size))
    }
}

fn volume(size: &[u64]) -> u64 {
    size.iter().copied().fold(1, u64::saturating_mul)
}

/// `CUmemcpy3DOperand`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct Operand {
    kind: u32,
    address: CUdeviceptr,
    rest: [u64; 3],
}

/// `CUDA_MEMCPY3D_BATCH_OP`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct Operation {
    from: Operand,
    to: Operand,
    size: [u64; 3],
    flags: [u32; 2],
}

const _: () = assert!(size_of::<Operation>() == 112);

impl Operation {
    /// What it copies. With an array on a side that is not known: its elements have any size.
    pub(crate) fn copied(&self) -> Option<Copied> {
        /// `CU_MEMCPY_OPERAND_TYPE_POINTER`
        const POINTER: u32 = 1;
        let both = [self.to, self.from].map(|it| it.kind);
        let way = Way::Between(self.to.address, self.from.address);
        (both == [POINTER; 2]).then(|| (way, volume(&self.size)))
    }
}

/// What a call has so many of.
///
/// # Safety
/// They must be the program's, for as long as the call that it makes.
pub(crate) unsafe fn all<'a, T>(first: *const T, count: usize) -> &'a [T] {
    match first.is_null() || count == 0 {
        true => &[],
        // SAFETY: the caller's.
        false => unsafe { std::slice::from_raw_parts(first, count) },
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;

    const RATE: u64 = 1 << 30;

    #[test]
    fn bucket_lets_its_rate_pass_and_owes_large_copies() {
        let start = Instant::now();
        let ms = |ms| start + Duration::from_millis(ms);
        let mut bucket = Bucket::new(RATE as f64, start);
        let second = Duration::from_secs(1);
        assert_eq!(bucket.take(RATE, start), None);
        assert_eq!(bucket.take(RATE, start), Some(second));
        assert_eq!(bucket.take(SMALL, start), None, "few bytes do not wait");
        let left = bucket.take(RATE, ms(400)).unwrap();
        assert!(left > second / 2 && left < second, "{left:?}");
        assert_eq!(bucket.take(RATE, ms(1001)), None);
        // What was not used is lost, but for a burst.
        bucket.fill(ms(60_000));
        assert_eq!(bucket.has, RATE as f64 * BURST.as_secs_f64());
    }

    #[test]
    fn bucket_keeps_its_rate_with_copies_of_any_size() {
        for bytes in [4 << 10, SMALL, SMALL + 1, 1 << 20, 64 << 20] {
            let start = Instant::now();
            let (mut now, mut copied) = (start, 0);
            let mut bucket = Bucket::new(RATE as f64, start);
            while now < start + Duration::from_secs(10) {
                match bucket.take(bytes, now) {
                    None => copied += bytes,
                    // A sleep that ends late.
                    Some(more) => now += more.min(LOOK) + Duration::from_micros(100),
                }
            }
            let part = copied as f64 / (10 * RATE) as f64;
            assert!((0.99..1.02).contains(&part), "{part} with {bytes}");
        }
    }

    #[test]
    fn limited_copy_waits_until_it_is_released() {
        let _alone = crate::ground::guard::alone();
        const SLOT: u32 = 9;
        let done = AtomicBool::new(false);
        limit(SLOT, [None, Some(1)]);
        wait(SLOT, Direction::ToDevice, RATE);
        wait(SLOT + 1, Direction::ToHost, RATE);
        wait(SLOT, Direction::ToHost, RATE);
        thread::scope(|scope| {
            let waits = scope.spawn(|| {
                wait(SLOT, Direction::ToHost, RATE);
                done.store(true, Ordering::Release);
            });
            thread::sleep(4 * LOOK);
            assert!(!done.load(Ordering::Acquire));
            release();
            waits.join().unwrap();
        });
        limit(SLOT, [Some(1), None]);
        limit(SLOT, [None, None]);
        assert_eq!(LIMITED.load(Ordering::Acquire), 0);
    }
}
