//! The states of an elastic range's granules, in a table that the program, this library and its agent change at any time, each by
//! comparing and exchanging one word. So the agent takes what the program does not need, whatever the program's threads do.

use std::{
    io,
    ops::Range,
    sync::{
        Mutex,
        atomic::{AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering},
    },
};

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};

use crate::ground::guard;

/// No memory is behind the granule but the scratch page.
pub(crate) const OUT: u32 = 0;
/// There is memory, and its contents are not needed.
pub(crate) const FREE: u32 = 1;
/// The program can make its contents anew.
pub(crate) const CACHED: u32 = 2;
/// Its contents count.
pub(crate) const IN_USE: u32 = 3;
/// Added to the state before: this library is changing what is behind the granule.
const TAKING: u32 = 4;
/// Bits of the state; the others count how often contents were lost.
const STATE: u32 = 7;
const GENERATION: u32 = 8;

/// Most ranges of a process: PyTorch takes one for each large tensor of a memory pool.
const MAX_RANGES: usize = 4096;

/// `struct gpumux_range` in `include/gpumux.h`; the words follow it.
#[repr(C)]
struct Header {
    /// 0: the range is freed, or this is a forked child.
    address: AtomicU64,
    bytes: AtomicU64,
    granule: AtomicU64,
    granules: AtomicU64,
    target: AtomicU64,
    taken: AtomicU64,
    taken_cached: AtomicU64,
    moved: AtomicU64,
}

/// A range's table. Its memory is never given back: the program may read it at any time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Table(&'static Header);

static TABLES: [AtomicPtr<Header>; MAX_RANGES] =
    [const { AtomicPtr::new(std::ptr::null_mut()) }; MAX_RANGES];
/// No more of them were used so far.
static USED: AtomicUsize = AtomicUsize::new(0);

/// By table, what requests for memory wait for: granules that have some are about to be in use.
static WANTED: Mutex<Vec<Wanted>> = Mutex::new(Vec::new());

type Wanted = (usize, Range<usize>);

/// A request waits for these until this is dropped.
pub(crate) struct Wanting(Wanted);

impl Drop for Wanting {
    fn drop(&mut self) {
        let mut all = guard::lock(&WANTED);
        if let Some(place) = all.iter().position(|it| *it == self.0) {
            all.swap_remove(place);
        }
    }
}

fn used() -> &'static [AtomicPtr<Header>] {
    &TABLES[..USED.load(Ordering::Acquire)]
}

impl std::fmt::Debug for Header {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:#x}", self.address.load(Ordering::Relaxed))
    }
}

impl Table {
    /// A table in which all granules are out.
    ///
    /// # Errors
    /// When the process has no memory for it, or too many ranges.
    pub(crate) fn new(address: u64, bytes: u64, granule: u64) -> io::Result<Self> {
        let granules = bytes / granule;
        let size = size_of::<Header>() + granules as usize * size_of::<AtomicU32>();
        let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let at = unsafe { mmap_anonymous(std::ptr::null_mut(), size, access, flags) }?;
        // SAFETY: the mapping made above. A child finds zeros: no range.
        unsafe { libc::madvise(at, size, libc::MADV_WIPEONFORK) };
        // SAFETY: zeros are a header; it is aligned to a page, is never unmapped, and has only atomic fields.
        let table = Self(unsafe { &*at.cast::<Header>() });
        let header = table.0;
        header.bytes.store(bytes, Ordering::Relaxed);
        header.granule.store(granule, Ordering::Relaxed);
        header.target.store(bytes, Ordering::Relaxed);
        header.granules.store(granules, Ordering::Relaxed);
        header.address.store(address, Ordering::Release);
        let (null, own) = (std::ptr::null_mut(), at.cast());
        // Another thread may make one, too.
        let take = |it: &AtomicPtr<Header>| {
            it.compare_exchange(null, own, Ordering::AcqRel, Ordering::Relaxed)
                .is_ok()
        };
        let Some(place) = TABLES.iter().position(take) else {
            // SAFETY: the mapping made above, of which no thread knows.
            let _ = unsafe { rustix::mm::munmap(at, size) };
            return Err(io::ErrorKind::OutOfMemory.into());
        };
        USED.fetch_max(place + 1, Ordering::AcqRel);
        Ok(table)
    }

    /// All ranges that there are.
    pub(crate) fn all() -> impl Iterator<Item = Self> {
        used().iter().filter_map(|it| {
            // SAFETY: null, or a table, which is never given back.
            let header = unsafe { it.load(Ordering::Acquire).as_ref() }?;
            (header.address.load(Ordering::Acquire) != 0).then_some(Self(header))
        })
    }

    /// The table of the range at an address.
    pub(crate) fn of(address: u64) -> Option<Self> {
        Self::all().find(|it| address != 0 && it.address() == address)
    }

    /// What the program knows it by.
    pub(crate) fn pointer(self) -> *const std::ffi::c_void {
        std::ptr::from_ref(self.0).cast()
    }

    /// The range is freed. Another may get its place in the list, but not its memory.
    pub(crate) fn end(self) {
        self.0.address.store(0, Ordering::Release);
        for index in 0..self.granules() {
            self.lose(index);
        }
        let own = std::ptr::from_ref(self.0).cast_mut();
        for place in used() {
            let null = std::ptr::null_mut();
            let _ = place.compare_exchange(own, null, Ordering::AcqRel, Ordering::Relaxed);
        }
    }

    pub(crate) fn address(self) -> u64 {
        self.0.address.load(Ordering::Acquire)
    }

    pub(crate) fn granule(self) -> u64 {
        self.0.granule.load(Ordering::Relaxed)
    }

    pub(crate) fn granules(self) -> usize {
        self.0.granules.load(Ordering::Relaxed) as usize
    }

    /// So many bytes should the range keep on the device; `u64::MAX`: as many as it has addresses for.
    pub(crate) fn set_target(self, bytes: u64) {
        let most = self.0.bytes.load(Ordering::Relaxed);
        self.0.target.store(bytes.min(most), Ordering::Release);
    }

    fn word(self, index: usize) -> Option<&'static AtomicU32> {
        if index >= self.granules() {
            return None;
        }
        let words = std::ptr::from_ref(self.0)
            .wrapping_add(1)
            .cast::<AtomicU32>();
        // SAFETY: the table was made with a word for each granule, behind the header.
        Some(unsafe { &*words.add(index) })
    }

    pub(crate) fn state(self, index: usize) -> u32 {
        let word = self.word(index);
        word.map_or(OUT, |word| word.load(Ordering::Acquire) & STATE)
    }

    /// Changes a state, if it is this one. Whether it was.
    pub(crate) fn exchange(self, index: usize, from: u32, to: u32) -> bool {
        let Some(word) = self.word(index) else {
            return false;
        };
        let change = |now: u32| (now & STATE == from).then_some(now & !STATE | to);
        word.fetch_update(Ordering::AcqRel, Ordering::Acquire, change)
            .is_ok()
    }

    /// Takes a granule in this state from the program, until [`Self::put_back`], [`Self::lose`] or [`Self::fill`]. Whether it could.
    pub(crate) fn grab(self, index: usize, from: u32) -> bool {
        self.exchange(index, from, from + TAKING)
    }

    /// Takes one whose contents are not needed. Whether it could.
    pub(crate) fn grab_droppable(self, index: usize) -> bool {
        self.grab(index, FREE) || self.grab(index, CACHED)
    }

    /// A request waits for memory for all of these.
    pub(crate) fn want(self, granules: Range<usize>) -> Wanting {
        let wanted = (std::ptr::from_ref(self.0).addr(), granules);
        guard::lock(&WANTED).push(wanted.clone());
        Wanting(wanted)
    }

    /// What requests wait for.
    pub(crate) fn wanted(self) -> Vec<Range<usize>> {
        let own = std::ptr::from_ref(self.0).addr();
        let all = guard::lock(&WANTED);
        let all = all.iter().filter(|it| it.0 == own);
        all.map(|it| it.1.clone()).collect()
    }

    /// Whether its contents are not needed, at this moment.
    pub(crate) fn is_droppable(self, index: usize) -> bool {
        matches!(self.state(index), FREE | CACHED)
    }

    pub(crate) fn is_grabbed(self, index: usize) -> bool {
        self.state(index) >= TAKING
    }

    /// Nothing became of a granule that was taken.
    pub(crate) fn put_back(self, index: usize) {
        if let Some(word) = self.word(index) {
            let _ = word.fetch_update(Ordering::AcqRel, Ordering::Acquire, |now| {
                (now & STATE >= TAKING).then(|| now - TAKING)
            });
        }
    }

    /// It has no memory any more.
    pub(crate) fn lose(self, index: usize) {
        if let Some(word) = self.word(index) {
            let now = word.load(Ordering::Acquire);
            let next = (now & !STATE).wrapping_add(GENERATION) | OUT;
            word.store(next, Ordering::Release);
        }
    }

    /// Others took one that was in this state.
    pub(crate) fn count_taken(self, state: u32) {
        let header = self.0;
        let counters: &[&AtomicU64] = match state & !TAKING {
            IN_USE => &[&header.moved],
            CACHED => &[&header.taken, &header.taken_cached],
            _ => &[&header.taken],
        };
        for counter in counters {
            counter.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// It has memory, for the program.
    pub(crate) fn fill(self, index: usize) {
        self.exchange(index, OUT + TAKING, IN_USE);
    }
}

/// For [`crate::memory::elastic`]: what the program may set.
pub(crate) const fn is_settable(state: u32) -> bool {
    matches!(state, FREE | CACHED | IN_USE)
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn taken_granule_has_one_owner() {
        let table = Table::new(0x1000_0000, 8 * MIB, 2 * MIB).unwrap();
        assert_eq!(table.granules(), 4);
        assert!(!table.exchange(0, FREE, IN_USE), "nothing is behind it");
        assert!(table.grab(0, OUT) && !table.grab(0, OUT));
        assert!(!table.grab_droppable(0));
        table.fill(0);
        assert_eq!(table.state(0), IN_USE);
        assert!(!table.grab_droppable(0), "it is in use");
        assert!(table.exchange(0, IN_USE, CACHED) && table.grab_droppable(0));
        table.put_back(0);
        assert_eq!(table.state(0), CACHED);
        assert!(table.grab_droppable(0));
        table.lose(0);
        let word = table.word(0).unwrap().load(Ordering::Relaxed);
        assert_eq!(word, GENERATION | OUT, "the program can tell");
        assert!(table.word(4).is_none());
        assert_eq!(table.state(4), OUT);
        assert!(Table::of(0x1000_0000).is_some());
        table.end();
        assert!(Table::of(0x1000_0000).is_none());
    }

    #[test]
    fn ranges_of_many_tensors_made_by_threads_are_all_found() {
        let make = |thread: u64| {
            let addresses = (1..=250).map(|it| (thread << 40) + it * 2 * MIB);
            let make = |at| Table::new(at, 2 * MIB, 2 * MIB).unwrap();
            addresses.map(make).collect::<Vec<_>>()
        };
        let tables: Vec<Table> = thread::scope(|scope| {
            let threads = [1, 2, 3, 4].map(|it| scope.spawn(move || make(it)));
            threads
                .into_iter()
                .flat_map(|it| it.join().unwrap())
                .collect()
        });
        let found = tables.iter().filter(|it| Table::of(it.address()).is_some());
        assert_eq!(found.count(), 1000);
        tables.into_iter().for_each(Table::end);
        assert!(Table::of((1 << 40) + 2 * MIB).is_none());
    }

    #[test]
    fn granules_are_wanted_while_a_request_waits() {
        let table = Table::new(0x3000_0000, 8 * MIB, 2 * MIB).unwrap();
        let (first, second) = (table.want(0..2), table.want(0..2));
        drop(first);
        assert!(table.wanted().contains(&(0..2)));
        drop(second);
        assert!(table.wanted().is_empty());
        table.end();
    }

    /// One side gives and takes back, the other takes: none has it at the same time.
    #[test]
    fn program_and_agent_never_have_a_granule_at_once() {
        let table = Table::new(0x2000_0000, 2 * MIB, 2 * MIB).unwrap();
        assert!(table.grab(0, OUT));
        table.fill(0);
        let owners = AtomicU32::new(0);
        let alone = || {
            assert_eq!(owners.fetch_add(1, Ordering::SeqCst), 0);
            owners.fetch_sub(1, Ordering::SeqCst);
        };
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut lost = 0;
                for _ in 0..20_000 {
                    alone();
                    assert!(table.exchange(0, IN_USE, FREE));
                    while !table.exchange(0, FREE, IN_USE) {
                        if table.grab(0, OUT) {
                            lost += 1;
                            table.fill(0);
                            break;
                        }
                        std::hint::spin_loop();
                    }
                }
                assert!(table.exchange(0, IN_USE, CACHED));
                lost
            });
            scope.spawn(|| {
                loop {
                    if table.grab(0, FREE) {
                        alone();
                        table.lose(0);
                    }
                    if table.state(0) == CACHED {
                        break;
                    }
                }
            });
        });
        table.end();
    }
}
