//! What the program's addresses belong to, for the questions that programs ask with every launch (Triton's launcher asks about
//! every pointer argument).
//!
//! Readers of different threads do not meet: each counts itself in a place of its own, looks whether a writer is there, and reads.
//! A writer marks itself and waits until no reader is counted. Writing is rare: memory is given out, taken back or mapped.

use std::{
    cell::UnsafeCell,
    collections::BTreeMap,
    hint,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    thread,
};

use crate::ground::{gate, guard};

/// What the program was given by `cuMemAlloc`, of memory that this library maps.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Allocation {
    pub(crate) bytes: u64,
    pub(crate) block: u64,
    pub(crate) context: u64,
}

/// By address.
#[derive(Default)]
pub(crate) struct Ranges {
    pub(crate) allocations: BTreeMap<u64, Allocation>,
    /// Allocations of other processes that the program has opened.
    pub(crate) opened: BTreeMap<u64, Allocation>,
    /// Where memory that the program handles itself is mapped: bytes and handle.
    pub(crate) mapped: BTreeMap<u64, (u64, u64)>,
}

impl Ranges {
    const fn new() -> Self {
        Self {
            allocations: BTreeMap::new(),
            opened: BTreeMap::new(),
            mapped: BTreeMap::new(),
        }
    }

    /// The allocation that an address lies in, with its start.
    pub(crate) fn allocation_of(&self, address: u64) -> Option<(u64, Allocation)> {
        holder(&self.allocations, address)
    }

    /// The same, also of what was opened.
    pub(crate) fn known_of(&self, address: u64) -> Option<(u64, Allocation)> {
        holder(&self.allocations, address).or_else(|| holder(&self.opened, address))
    }

    /// The handle of what is mapped at an address.
    pub(crate) fn mapped_at(&self, address: u64) -> Option<u64> {
        let (at, (bytes, handle)) = self.mapped.range(..=address).next_back()?;
        (address - at < *bytes).then_some(*handle)
    }
}

fn holder(all: &BTreeMap<u64, Allocation>, address: u64) -> Option<(u64, Allocation)> {
    let (start, allocation) = all.range(..=address).next_back()?;
    (address - start < allocation.bytes).then_some((*start, *allocation))
}

#[repr(align(64))]
struct Readers(AtomicU32);

/// A value that is read by many threads at once and rarely written.
pub(crate) struct Shared<T> {
    value: UnsafeCell<T>,
    readers: [Readers; gate::SHARDS],
    writing: AtomicBool,
    writers: Mutex<()>,
}

// SAFETY: the value is only touched as `read` and `write` do, which let in many readers or one writer.
unsafe impl<T: Send + Sync> Sync for Shared<T> {}

/// Counts a reader until dropped, also by unwinding.
struct Reading<'a>(&'a AtomicU32);

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        // After what was read: a writer that finds no reader here may write.
        self.0.fetch_sub(1, Ordering::Release);
    }
}

impl<T> Shared<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self {
            value: UnsafeCell::new(value),
            readers: [const { Readers(AtomicU32::new(0)) }; gate::SHARDS],
            writing: AtomicBool::new(false),
            writers: Mutex::new(()),
        }
    }

    /// Reads. `work` must be short, and not write.
    #[inline]
    pub(crate) fn read<R>(&self, work: impl FnOnce(&T) -> R) -> R {
        let place = &self.readers[gate::shard_number()].0;
        loop {
            // Before the look, and both in one order with `write`: either it sees this thread, or this thread sees it.
            place.fetch_add(1, Ordering::SeqCst);
            if !self.writing.load(Ordering::SeqCst) {
                break;
            }
            place.fetch_sub(1, Ordering::SeqCst);
            drop(guard::lock(&self.writers));
        }
        let _reading = Reading(place);
        // SAFETY: a writer has waited until no reader is counted, or has not begun and will wait for this thread.
        work(unsafe { &*self.value.get() })
    }

    /// Writes, alone. `work` must be short, and neither read nor write.
    pub(crate) fn write<R>(&self, work: impl FnOnce(&mut T) -> R) -> R {
        /// Lets readers in again, also by unwinding.
        struct Writing<'a>(&'a AtomicBool);
        impl Drop for Writing<'_> {
            fn drop(&mut self) {
                self.0.store(false, Ordering::SeqCst);
            }
        }
        let _alone = guard::lock(&self.writers);
        self.writing.store(true, Ordering::SeqCst);
        let _writing = Writing(&self.writing);
        for place in &self.readers {
            let mut looks = 0;
            while place.0.load(Ordering::SeqCst) != 0 {
                looks += 1;
                if looks < 100 {
                    hint::spin_loop();
                } else {
                    thread::yield_now();
                }
            }
        }
        // SAFETY: no reader is inside, and none gets in; other writers wait for the lock.
        work(unsafe { &mut *self.value.get() })
    }
}

static RANGES: Shared<Ranges> = Shared::new(Ranges::new());

pub(crate) fn read<R>(work: impl FnOnce(&Ranges) -> R) -> R {
    RANGES.read(work)
}

pub(crate) fn write<R>(work: impl FnOnce(&mut Ranges) -> R) -> R {
    RANGES.write(work)
}

/// The program has an allocation of so many bytes at an address, in a block.
pub(crate) fn add(at: u64, bytes: u64, block: u64, context: u64) {
    let allocation = Allocation {
        bytes,
        block,
        context,
    };
    write(|it| it.allocations.insert(at, allocation));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writers keep two numbers equal in steps; a reader that got in meanwhile would see them differ.
    #[test]
    fn readers_see_what_writers_have_finished() {
        let shared = Shared::new((0_u64, Box::new(0_u64)));
        let ended = AtomicBool::new(false);
        thread::scope(|scope| {
            let readers: Vec<_> = (0..4)
                .map(|_| {
                    scope.spawn(|| {
                        let (mut last, mut reads) = (0, 0_u64);
                        while !ended.load(Ordering::Relaxed) {
                            let (first, second) = shared.read(|it| (it.0, *it.1));
                            assert_eq!(first, second);
                            assert!(first >= last, "time goes on");
                            last = first;
                            reads += 1;
                        }
                        reads
                    })
                })
                .collect();
            let writers: Vec<_> = (0..2)
                .map(|_| {
                    scope.spawn(|| {
                        for _ in 0..20_000 {
                            shared.write(|it| {
                                it.0 += 1;
                                // What is freed under a reader's eyes would be read after it.
                                let next = *it.1 + 1;
                                drop(std::mem::replace(&mut it.1, Box::new(next)));
                            });
                        }
                    })
                })
                .collect();
            writers.into_iter().for_each(|it| it.join().unwrap());
            ended.store(true, Ordering::Relaxed);
            let reads: u64 = readers.into_iter().map(|it| it.join().unwrap()).sum();
            assert!(reads > 0);
        });
        assert_eq!(shared.read(|it| it.0), 40_000);
    }

    #[test]
    fn panicked_reader_does_not_block_writers() {
        let shared = Shared::new(1);
        let read = || shared.read(|_| panic!("a fault"));
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(read)).is_err());
        let write = || shared.write(|_| panic!("a fault"));
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(write)).is_err());
        shared.write(|it| *it += 1);
        assert_eq!(shared.read(|it| *it), 2);
    }

    #[test]
    fn an_address_belongs_to_what_it_lies_in() {
        let mut ranges = Ranges::new();
        let allocation = Allocation {
            bytes: 100,
            block: 4096,
            context: 1,
        };
        ranges.allocations.insert(4096, allocation);
        ranges.mapped.insert(8192, (512, 7));
        let start = |address| ranges.allocation_of(address).map(|it| it.0);
        assert_eq!(start(4095), None);
        assert_eq!(start(4096), Some(4096));
        assert_eq!(start(4195), Some(4096));
        assert_eq!(start(4196), None);
        assert_eq!(ranges.mapped_at(8191), None);
        assert_eq!(ranges.mapped_at(8192 + 511), Some(7));
        assert_eq!(ranges.mapped_at(8192 + 512), None);
    }
}
