//! What a process writes of one channel group, and of its lease, in words that the daemon reads: the protocol, without the memory
//! that it lies in. `tests/loom.rs` runs this file with every order that the memory model allows.

use std::{sync::atomic, time::Duration};

use crate::{
    clock::now_ns,
    sync::{AtomicU32, AtomicU64, Ordering, fence},
};

/// Counters of one channel group, on cache lines of their own.
#[derive(Debug, Default)]
#[repr(C, align(128))]
pub struct Slot {
    /// Pieces of work given to the group.
    submitted: AtomicU64,
    /// A value of `submitted` up to which all work is known to be done.
    completed: AtomicU64,
    /// 1 while the shim counts work for this group; 0: nothing is known.
    counted: AtomicU32,
    /// How long nothing was submitted while the program had not waited for all of its work, in µs: at the end of each wait, and between two
    /// pieces at which the clock was read if that is at least [`GAP`]. Goes round. From revision 11 on.
    waited: atomic::AtomicU32,
    /// Holds of the device ahead of work: begun, met by work, ended without work, and how long they
    /// had the device, in ns.
    hints: [AtomicU64; 4],
    /// When work last came, or was said to come, after a pause; by the machine's monotonic clock, in ns. 0: never.
    pub(crate) came: AtomicU64,
    /// When some last came, of those pieces at which the clock was read. For the writer. Loom does not see this word and `waited`: nothing
    /// depends on the order in which they are written.
    pub(crate) touched: atomic::AtomicU64,
    /// When the first piece was submitted of those that the program has not waited for. For the writer.
    began: AtomicU64,
    /// Twice how often all work was done after some was not; odd while the two counters below change.
    waits: AtomicU64,
    /// Pieces that were submitted until then.
    settled: AtomicU64,
    /// How long that took each time, from `began`, in ns.
    busy: AtomicU64,
    /// Threads that wait to launch, see [`crate::permits`]. From revision 6 on, as the next.
    waiting: AtomicU64,
    /// Launches that have waited so.
    held: AtomicU64,
    /// Copied between the host and the group's device, by [`Direction`], in units of [`COPIED`]; goes round. From revision 10 on.
    copied: [AtomicU32; 2],
}

/// Which way a copy goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Direction {
    /// From the host to the device.
    ToDevice,
    /// From the device to the host.
    ToHost,
}

/// Unit in which copies are counted, in bytes: each is rounded up.
pub const COPIED: u64 = 1024;

/// When work came; no other came then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrival(pub(crate) u64);

impl Arrival {
    /// How long ago that was; none if it was not yet.
    pub fn ago(self) -> Option<Duration> {
        now_ns().checked_sub(self.0).map(Duration::from_nanos)
    }
}

/// A domain without work for so long, in ns, has paused: shorter gaps are between the launches of one request.
pub(crate) const PAUSE: u64 = 1_000_000;

/// A program that submits nothing for so long, in ns, with work that it has not waited for, waits for that: between the launches of a request are
/// shorter gaps.
pub const GAP: u64 = 500_000;

/// The clock is read at one piece in so many while there is work: a read costs a third of all else that is done for a launch, and so many launches of
/// a program that does not wait take less than [`GAP`].
const SAMPLED: u64 = 4;

/// Holds of a device ahead of work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HintCounts {
    /// How many there were.
    pub given: u64,
    /// Those that work found in place.
    pub useful: u64,
    /// Those that ended before work came.
    pub wasted: u64,
    /// How long they had the device, in ns.
    pub held_ns: u64,
}

impl HintCounts {
    /// Both together.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self {
            given: self.given.saturating_add(other.given),
            useful: self.useful.saturating_add(other.useful),
            wasted: self.wasted.saturating_add(other.wasted),
            held_ns: self.held_ns.saturating_add(other.held_ns),
        }
    }

    /// What was added since it was `before`.
    #[must_use]
    pub fn since(self, before: Self) -> Self {
        Self {
            given: self.given.saturating_sub(before.given),
            useful: self.useful.saturating_sub(before.useful),
            wasted: self.wasted.saturating_sub(before.wasted),
            held_ns: self.held_ns.saturating_sub(before.held_ns),
        }
    }
}

/// How often a program has waited for all that it had submitted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Waits {
    /// So often.
    pub count: u64,
    /// Pieces of work of these.
    pub pieces: u64,
    /// Time from the first piece of each until it was known to be done, in ns.
    pub busy_ns: u64,
    /// Of that, and of requests that are not waited for yet, the time in which nothing was submitted, in µs; goes round.
    pub waited_us: u32,
}

/// What a slot says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// The shim does not count this group's work.
    Unknown,
    /// All submitted work is done. The number is how many pieces that was.
    Idle(u64),
    /// Work is queued or running. The number is how many pieces were submitted.
    Busy(u64),
}

impl Slot {
    /// Says that work will be counted from now on.
    pub fn begin_counting(&self) {
        self.counted.store(1, Ordering::Release);
    }

    /// Counts one piece of work. A few processor instructions; no lock. Reads the clock where no other work is there, and at some pieces.
    pub fn submit(&self) -> u64 {
        let before = self.submitted.fetch_add(1, Ordering::AcqRel);
        let idle = self.completed.load(Ordering::Relaxed) >= before;
        if idle || before.is_multiple_of(SAMPLED) {
            let (now, last) = if idle { self.come() } else { self.touch() };
            if self.settled.load(Ordering::Relaxed) >= before {
                self.began.store(now, Ordering::Relaxed);
            } else if now.saturating_sub(last) >= GAP {
                self.wait_until(now, last);
            }
        }
        before + 1
    }

    /// Work comes, or is about to, and none is there.
    pub fn comes(&self) {
        self.come();
    }

    /// The same; returns the time, and when some came before.
    fn come(&self) -> (u64, u64) {
        let (now, before) = self.touch();
        if now.saturating_sub(before) >= PAUSE {
            self.came.store(now, Ordering::Relaxed);
        }
        (now, before)
    }

    /// Work comes, or goes on to; returns the time, and when some came before.
    fn touch(&self) -> (u64, u64) {
        let (now, before) = (now_ns(), self.touched.load(Ordering::Relaxed));
        self.touched.store(now, Ordering::Relaxed);
        (now, before)
    }

    /// Nothing was submitted in this time, although there was work to wait for.
    fn wait_until(&self, now: u64, last: u64) {
        let us = (now.saturating_sub(last) / 1_000) as u32;
        self.waited.fetch_add(us, Ordering::Relaxed);
    }

    /// The last arrival of work after a pause, whatever the writer put there.
    pub fn came(&self) -> Option<Arrival> {
        Some(Arrival(self.came.load(Ordering::Relaxed))).filter(|came| came.0 != 0)
    }

    /// Pieces submitted so far.
    pub fn submitted(&self) -> u64 {
        self.submitted.load(Ordering::Acquire)
    }

    /// Says that the first `upto` pieces are done, and that the program knows.
    pub fn complete(&self, upto: u64) {
        self.find_complete(upto);
        if self.settled.load(Ordering::Relaxed) < upto
            && upto >= self.submitted.load(Ordering::Acquire)
        {
            self.settle(upto);
        }
    }

    /// Says that the first `upto` pieces are done, as was found between two of the program's launches.
    pub fn find_complete(&self, upto: u64) {
        self.completed.fetch_max(upto, Ordering::AcqRel);
    }

    /// Counts a wait. One that ends in another thread at the same moment is left out.
    fn settle(&self, pieces: u64) {
        let waits = self.waits.load(Ordering::Acquire);
        let odd = waits | 1;
        let (write, own) = (Ordering::AcqRel, Ordering::Relaxed);
        if waits == odd || (self.waits.compare_exchange(waits, odd, write, own)).is_err() {
            return;
        }
        if self.settled.load(own) >= pieces {
            // Another thread has counted it meanwhile.
            return self.waits.store(waits, Ordering::Release);
        }
        fence(Ordering::Release);
        let now = now_ns();
        let took = now.saturating_sub(self.began.load(own));
        self.wait_until(now, self.touched.load(own));
        self.settled.store(pieces, own);
        self.busy.store(self.busy.load(own).wrapping_add(took), own);
        self.waits.store(odd.wrapping_add(1), Ordering::Release);
    }

    /// How often the program has waited for all that it had submitted, whatever the writer put there; none if that
    /// changes just now.
    pub fn waits(&self) -> Option<Waits> {
        let before = self.waits.load(Ordering::Acquire);
        let found = Waits {
            count: before / 2,
            pieces: self.settled.load(Ordering::Relaxed),
            busy_ns: self.busy.load(Ordering::Relaxed),
            waited_us: self.waited.load(Ordering::Relaxed),
        };
        fence(Ordering::Acquire);
        let after = self.waits.load(Ordering::Relaxed);
        (before == after && before.is_multiple_of(2)).then_some(found)
    }

    /// A thread begins to wait for a permit to launch: work has come. Whether none waited.
    pub fn begin_wait(&self) -> bool {
        self.come();
        self.held.fetch_add(1, Ordering::Relaxed);
        self.waiting.fetch_add(1, Ordering::AcqRel) == 0
    }

    /// It has ended waiting, for the permit and not for work.
    pub fn end_wait(&self) {
        self.touch();
        self.waiting.fetch_sub(1, Ordering::AcqRel);
    }

    /// Whether a thread waits to launch, whatever the writer put there.
    pub fn waits_to_launch(&self) -> bool {
        self.waiting.load(Ordering::Acquire) != 0
    }

    /// How many launches have waited for a permit, whatever the writer put there.
    pub fn held_launches(&self) -> u64 {
        self.held.load(Ordering::Relaxed)
    }

    /// Counts a copy of so many bytes.
    pub fn count_copy(&self, direction: Direction, bytes: u64) {
        let units = bytes.div_ceil(COPIED) as u32;
        self.copied[direction as usize].fetch_add(units, Ordering::Relaxed);
    }

    /// What was copied in both directions, by [`Direction`], in units of [`COPIED`], whatever the writer put there. Goes round.
    pub fn copied(&self) -> [u32; 2] {
        [0, 1].map(|n: usize| self.copied[n].load(Ordering::Relaxed))
    }

    /// Adds to the counts of hints.
    pub fn count_hints(&self, more: HintCounts) {
        let all = [more.given, more.useful, more.wasted, more.held_ns];
        for (count, more) in self.hints.iter().zip(all) {
            count.fetch_add(more, Ordering::Relaxed);
        }
    }

    /// The counts of hints, whatever the writer put there.
    pub fn hints(&self) -> HintCounts {
        let [given, useful, wasted, held_ns] =
            [0, 1, 2, 3].map(|n: usize| self.hints[n].load(Ordering::Relaxed));
        HintCounts {
            given,
            useful,
            wasted,
            held_ns,
        }
    }

    /// Up to which piece all are known to be done, whatever the writer put there.
    pub fn completed(&self) -> u64 {
        self.completed.load(Ordering::Acquire)
    }

    /// What the slot says. Never trusts the writer: any values give an answer.
    pub fn work(&self) -> Work {
        if self.counted.load(Ordering::Acquire) != 1 {
            return Work::Unknown;
        }
        let completed = self.completed.load(Ordering::Acquire);
        let submitted = self.submitted.load(Ordering::Acquire);
        if completed >= submitted {
            Work::Idle(submitted)
        } else {
            Work::Busy(submitted)
        }
    }
}

/// How often a process's lease has expired.
#[derive(Debug, Default)]
#[repr(transparent)]
pub(crate) struct Expiries(AtomicU64);

impl Expiries {
    /// Counts one: before the process uses a control itself.
    pub(crate) fn count(&self) {
        self.0.fetch_add(1, Ordering::AcqRel);
    }

    /// The count, whatever the writer put there.
    pub(crate) fn read(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }
}
