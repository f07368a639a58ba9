//! The page in which a tenant's shim counts its work, so that the daemon reads which tenants have some.
//!
//! The shim makes it (a sealed memfd), maps it for writing and sends it with its hello; the
//! daemon maps it for reading. There is one slot per channel group, by the group's key. The
//! shim counts *submitted* up when the program gives work to the group, and sets *completed* to
//! a value of *submitted* that it knows to be done. A group has work while they differ.
//! All fields are independent words written by one process and read by the other;
//! a reader that sees `completed` (acquire) also sees the `submitted` it was taken from.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
};

use rustix::fs::SealFlags;

use crate::{
    clock::now_ms,
    mapping::{self, Mapping},
    message::REVISION,
    slot::Expiries,
    sync::{AtomicU64, Ordering},
};

pub use crate::slot::{Arrival, COPIED, Direction, GAP, HintCounts, Slot, Waits, Work};

/// Groups that can have a slot.
pub const SLOTS: usize = 64;
/// The first [`REVISION`] whose libraries say whether the program knows of an error.
const RECEIVES: u32 = 3;

/// Says that a page is one, and its layout's version.
const MAGIC: u64 = 0x0003_6770_756d_7578;

/// The whole page.
#[derive(Debug)]
#[repr(C)]
struct Layout {
    magic: AtomicU64,
    /// The first driver error after which nothing more could run, and above its 32 bits the time, by [`now_ms`]; 0: none.
    fault: AtomicU64,
    /// The maker's [`REVISION`]; 0: none that says so.
    revision: AtomicU64,
    /// How often the daemon's lease has expired for the process: see [`crate::lease`].
    expired: Expiries,
    /// 1: a call of the program's own has returned that error to it. From revision 3 on.
    received: AtomicU64,
    /// What the program reports as done, in a unit of its own, such as tokens; 0: it reports nothing, as do older libraries.
    progress: AtomicU64,
    /// Calls of NCCL's collectives, sends and receives, and the bytes that they send; 0 where NCCL does not report to the library.
    collectives: AtomicU64,
    collective_bytes: AtomicU64,
    /// Where the last collective was submitted: the group's key, and below its 8 bits the number of pieces submitted with it; 0: none.
    collective: AtomicU64,
    slots: [Slot; SLOTS],
    requests: Requests,
}

// SAFETY: `repr(C)`, atomics only.
unsafe impl mapping::Layout for Layout {
    const MAGIC: u64 = MAGIC;
    const NAME: &'static str = "gpumux-page";

    fn magic(&self) -> &AtomicU64 {
        &self.magic
    }
}

/// Steps of the histogram of request times per doubling.
pub const STEPS: usize = 8;
/// Its doublings: from 1 µs to more than an hour.
pub const DOUBLINGS: usize = 32;

/// How long the program's requests took, where it marks them: a histogram whose steps are an eighth
/// of a doubling apart.
#[derive(Debug)]
#[repr(C, align(128))]
pub struct Requests([AtomicU64; STEPS * DOUBLINGS]);

impl Requests {
    /// Counts a request that took so long.
    pub fn record(&self, ns: u64) {
        let doublings = (ns as f64 / 1e3).max(1.0).log2();
        let step = (doublings * STEPS as f64) as usize;
        self.0[step.min(STEPS * DOUBLINGS - 1)].fetch_add(1, Ordering::Relaxed);
    }

    /// The counts, whatever the writer put there; none is believed to be so high that sums could overflow.
    pub fn times(&self) -> RequestTimes {
        let count = |n: usize| self.0[n].load(Ordering::Relaxed).min(1 << 40);
        RequestTimes(std::array::from_fn(count))
    }
}

/// Request times of some processes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestTimes([u64; STEPS * DOUBLINGS]);

impl Default for RequestTimes {
    fn default() -> Self {
        Self([0; STEPS * DOUBLINGS])
    }
}

impl RequestTimes {
    /// How many requests.
    pub fn count(&self) -> u64 {
        self.0
            .iter()
            .fold(0, |sum, count| sum.saturating_add(*count))
    }

    /// Steps with requests in them, the shortest first, and how many. Step `n` ends at 2^((n + 1) / [`STEPS`]) µs.
    pub fn steps(&self) -> impl Iterator<Item = (usize, u64)> {
        let all = self.0.iter().copied().enumerate();
        all.filter(|(_, count)| *count > 0)
    }

    /// How long all of them took, in µs, to half a step.
    pub fn total_us(&self) -> f64 {
        self.steps()
            .map(|(step, count)| middle_us(step) * count as f64)
            .sum()
    }

    /// Both together.
    #[must_use]
    pub fn plus(mut self, other: &Self) -> Self {
        for (sum, more) in self.0.iter_mut().zip(&other.0) {
            *sum = sum.saturating_add(*more);
        }
        self
    }

    /// What was added since it was `before`.
    #[must_use]
    pub fn since(mut self, before: &Self) -> Self {
        for (now, before) in self.0.iter_mut().zip(&before.0) {
            *now = now.saturating_sub(*before);
        }
        self
    }

    /// The time in µs that this part of the requests did not exceed, to a step.
    pub fn quantile_us(&self, part: f64) -> f64 {
        let rank = (self.count() as f64 * part).ceil().max(1.0) as u64;
        let mut seen = 0u64;
        let step = self.0.iter().position(|count| {
            seen = seen.saturating_add(*count);
            seen >= rank
        });
        step.map_or(0.0, middle_us)
    }
}

fn middle_us(step: usize) -> f64 {
    ((step as f64 + 0.5) / STEPS as f64).exp2()
}

/// A mapped page.
#[derive(Debug)]
pub struct Page(Mapping<Layout>);

/// How old the daemon takes a fault to be at most: a clock that began anew or a program that lies says more.
const FAULT_AGE_MS: u32 = 30 * 24 * 3_600_000;

impl Page {
    /// Makes a page and maps it for writing. The file is for the daemon.
    ///
    /// # Errors
    /// When there is no memory for it.
    pub fn create() -> io::Result<(Self, OwnedFd)> {
        let (made, file) = Mapping::<Layout>::create(SealFlags::empty())?;
        made.revision.store(REVISION.into(), Ordering::Release);
        Ok((Self(made), file))
    }

    /// The maker's [`REVISION`], whatever the writer put there.
    pub fn revision(&self) -> u32 {
        let revision = self.layout().revision.load(Ordering::Acquire);
        u32::try_from(revision).unwrap_or(u32::MAX)
    }

    /// Records that the daemon's lease has expired. Before the process uses a control itself.
    pub fn expire(&self) {
        self.layout().expired.count();
    }

    /// How often it has, whatever the writer put there.
    pub fn expired(&self) -> u64 {
        self.layout().expired.read()
    }

    /// Says that the driver has an error after which the program's context is of no use; the first one stays. The program
    /// itself may still wait for its work.
    pub fn set_fault(&self, error: u32) {
        let fault = &self.layout().fault;
        let told = u64::from(now_ms()) << 32 | u64::from(error);
        let _ = fault.compare_exchange(0, told, Ordering::AcqRel, Ordering::Relaxed);
    }

    /// Says that a call of the program's own has returned that error.
    pub fn receive_fault(&self) {
        self.layout().received.store(1, Ordering::Release);
    }

    /// Whether the program itself knows of the error, as far as its library says that.
    pub fn has_received_fault(&self) -> bool {
        let says = self.revision() >= RECEIVES;
        self.fault() != 0 && (!says || self.layout().received.load(Ordering::Acquire) != 0)
    }

    /// How long ago the driver had that error, in ms, whatever the writer put there; none beyond
    /// a minute.
    pub fn fault_age_ms(&self) -> Option<u64> {
        let told = self.layout().fault.load(Ordering::Acquire);
        let age = now_ms().wrapping_sub((told >> 32) as u32);
        (told as u32 != 0 && age <= FAULT_AGE_MS).then_some(age.into())
    }

    /// The driver error after which the program's context was of no use, whatever the writer put there; 0: none.
    pub fn fault(&self) -> u32 {
        self.layout().fault.load(Ordering::Acquire) as u32
    }

    /// Maps a page that a peer sent, for reading.
    ///
    /// # Errors
    /// When it is not a page that is safe to read.
    pub fn open(file: impl AsFd) -> io::Result<Self> {
        Ok(Self(Mapping::open(file)?))
    }

    fn layout(&self) -> &Layout {
        &self.0
    }

    /// Adds to what the program reports as done. For the page's maker.
    pub fn add_progress(&self, units: u64) {
        self.layout().progress.fetch_add(units, Ordering::Relaxed);
    }

    /// What the program has reported as done, whatever the writer put there.
    pub fn progress(&self) -> u64 {
        self.layout().progress.load(Ordering::Relaxed)
    }

    /// Counts collectives, and the bytes that they send. For the page's maker.
    pub fn add_collectives(&self, calls: u64, bytes: u64) {
        let all = self.layout();
        all.collectives.fetch_add(calls, Ordering::Relaxed);
        all.collective_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// What was submitted last to the group with this key is a collective. For the page's maker.
    pub fn note_collective(&self, key: u32) {
        if let Some(slot) = self.slot(key) {
            let at = u64::from(key) << 56 | slot.submitted();
            self.layout().collective.store(at, Ordering::Relaxed);
        }
    }

    /// Whether the last collective is not known to be done, whatever the writer put there.
    pub fn has_collective(&self) -> bool {
        let at = self.layout().collective.load(Ordering::Relaxed);
        let slot = self.slot((at >> 56) as u32);
        slot.is_some_and(|it| at << 8 >> 8 > it.completed())
    }

    /// Collectives so far, and the bytes that they send, whatever the writer put there.
    pub fn collectives(&self) -> (u64, u64) {
        let all = self.layout();
        (
            all.collectives.load(Ordering::Relaxed),
            all.collective_bytes.load(Ordering::Relaxed),
        )
    }

    /// The times of the process's requests. Writing is for the page's maker, as for a slot.
    pub fn requests(&self) -> &Requests {
        &self.layout().requests
    }

    /// The slot of the group with this key, if it has one. Writing to a slot of a page that was
    /// opened for reading would fault: only its maker may.
    pub fn slot(&self, key: u32) -> Option<&Slot> {
        self.layout().slots.get(key as usize)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::slot::PAUSE;

    #[test]
    fn waits_count_once_all_that_was_submitted_is_done() {
        let slot = Slot::default();
        assert_eq!(slot.waits(), Some(Waits::default()));
        for _ in 0..3 {
            slot.submit();
        }
        slot.complete(2);
        assert_eq!(slot.waits(), Some(Waits::default()), "one is not done");
        slot.complete(3);
        let first = slot.waits().expect("no other thread");
        assert_eq!((first.count, first.pieces), (1, 3));
        slot.complete(3);
        assert_eq!(slot.waits(), Some(first), "there was nothing to wait for");
        let upto = slot.submit();
        std::thread::sleep(std::time::Duration::from_millis(2));
        slot.complete(upto);
        let second = slot.waits().expect("no other thread");
        assert_eq!((second.count, second.pieces), (2, 4));
        assert!(second.busy_ns >= first.busy_ns + 2_000_000, "{second:?}");
        assert!(second.waited_us >= first.waited_us + 2_000, "{second:?}");
    }

    /// Whether it polls, waits in a callback, or waits for some of its work only.
    #[test]
    fn time_in_which_nothing_is_submitted_is_waited() {
        let slot = Slot::default();
        let submit_some = || (0..4).fold(0, |_, _| slot.submit());
        submit_some();
        std::thread::sleep(Duration::from_millis(2));
        let upto = submit_some();
        let waits = slot.waits().expect("no other thread");
        assert!(waits.count == 0 && waits.waited_us >= 2_000, "{waits:?}");
        slot.complete(upto);
        let done = slot.waits().expect("no other thread").waited_us;
        std::thread::sleep(Duration::from_millis(2));
        slot.submit();
        let idle = slot.waits().expect("no other thread").waited_us;
        assert_eq!(idle, done, "there was nothing to wait for");
        // A thread that waits for a permit does not wait for work.
        slot.begin_wait();
        std::thread::sleep(Duration::from_millis(50));
        slot.end_wait();
        submit_some();
        let held = slot.waits().expect("no other thread").waited_us;
        assert!(held < done + 50_000, "{held}");
    }

    /// Else a program that launches kernel by kernel would seem to wait for each.
    #[test]
    fn gap_between_two_launches_is_no_wait() {
        let slot = Slot::default();
        slot.begin_counting();
        for upto in 1..=3 {
            assert_eq!(slot.submit(), upto);
            std::thread::sleep(Duration::from_millis(1));
            slot.find_complete(upto);
            assert_eq!(slot.work(), Work::Idle(upto));
            assert_eq!(slot.waits().map(|it| it.count), Some(0));
        }
        slot.complete(3);
        let waits = slot.waits().expect("no other thread");
        assert_eq!((waits.count, waits.pieces), (1, 3));
        assert!(waits.busy_ns >= 3_000_000, "from the first: {waits:?}");
        slot.complete(3);
        assert_eq!(slot.waits(), Some(waits));
    }

    #[test]
    fn the_reader_sees_what_the_writer_counts() {
        let (writer, file) = Page::create().unwrap();
        let reader = Page::open(&file).unwrap();
        let (ours, theirs) = (writer.slot(3).unwrap(), reader.slot(3).unwrap());
        assert_eq!(theirs.work(), Work::Unknown);
        ours.begin_counting();
        assert_eq!(theirs.work(), Work::Idle(0));
        let first = ours.submit();
        ours.submit();
        ours.complete(first);
        assert_eq!(theirs.work(), Work::Busy(2));
        ours.complete(2);
        ours.complete(1);
        assert_eq!(theirs.work(), Work::Idle(2));
        assert!(writer.slot(SLOTS as u32).is_none());
    }

    #[test]
    fn a_collective_is_in_progress_until_its_piece_is_done() {
        let (writer, file) = Page::create().unwrap();
        let reader = Page::open(&file).unwrap();
        let slot = writer.slot(3).unwrap();
        writer.note_collective(3);
        assert!(!reader.has_collective(), "nothing was submitted");
        slot.submit();
        writer.note_collective(3);
        assert!(reader.has_collective());
        slot.submit();
        slot.complete(1);
        assert!(!reader.has_collective(), "what follows is another kernel");
        writer.note_collective(3);
        assert!(reader.has_collective());
        slot.complete(2);
        assert!(!reader.has_collective());
        let lie = &writer.layout().collective;
        lie.store(u64::MAX, Ordering::Relaxed);
        assert!(!reader.has_collective(), "no such group");
    }

    #[test]
    fn the_reader_sees_when_work_came_after_a_pause() {
        let (writer, file) = Page::create().unwrap();
        let reader = Page::open(&file).unwrap();
        let (ours, theirs) = (writer.slot(3).unwrap(), reader.slot(3).unwrap());
        assert_eq!(theirs.came(), None);
        let came = || theirs.came().unwrap();
        ours.submit();
        let first = came();
        assert!(theirs.came().unwrap().ago().unwrap() < Duration::from_secs(60));
        std::thread::sleep(Duration::from_millis(2));
        ours.submit();
        assert_eq!(came(), first, "some is there");
        ours.complete(2);
        std::thread::sleep(Duration::from_millis(2));
        ours.submit();
        let second = came();
        assert!(second.0 - first.0 >= PAUSE);
        ours.complete(3);
        // However long this thread is not run.
        ours.touched.store(u64::MAX, Ordering::Relaxed);
        ours.submit();
        assert_eq!(came(), second, "no pause");
        ours.came.store(u64::MAX, Ordering::Relaxed);
        assert_eq!(came().ago(), None, "whatever the writer says");
    }

    #[test]
    fn later_counts_lie_where_older_pages_have_nothing() {
        let (writer, file) = Page::create().unwrap();
        let reader = Page::open(&file).unwrap();
        assert_eq!(reader.progress(), 0);
        writer.add_progress(40);
        writer.add_progress(2);
        assert_eq!(reader.progress(), 42);
        writer.add_collectives(1, 1000);
        writer.add_collectives(1, 24);
        assert_eq!(reader.collectives(), (2, 1024));
        // Between the words of older layouts and the slots, whose place has not changed.
        assert_eq!(std::mem::offset_of!(Layout, progress), 40);
        assert_eq!(std::mem::offset_of!(Layout, collective), 64);
        assert_eq!(std::mem::offset_of!(Layout, slots), 128);
        assert_eq!(size_of::<Slot>(), 128);
    }

    #[test]
    fn copies_are_counted_by_direction_and_go_round() {
        let (writer, file) = Page::create().unwrap();
        let reader = Page::open(&file).unwrap();
        let (ours, theirs) = (writer.slot(3).unwrap(), reader.slot(3).unwrap());
        ours.count_copy(Direction::ToHost, 3 * COPIED);
        ours.count_copy(Direction::ToDevice, 1);
        assert_eq!(theirs.copied(), [1, 3]);
        ours.count_copy(Direction::ToHost, u64::from(u32::MAX) * COPIED);
        assert_eq!(theirs.copied(), [1, 2]);
    }

    #[test]
    fn the_first_fault_stays_and_has_an_age() {
        let (writer, file) = Page::create().unwrap();
        let reader = Page::open(&file).unwrap();
        assert_eq!((reader.fault(), reader.fault_age_ms()), (0, None));
        writer.set_fault(719);
        writer.set_fault(700);
        assert_eq!(reader.fault(), 719);
        assert!(!reader.has_received_fault());
        writer.receive_fault();
        assert!(reader.has_received_fault());
        // A library that says nothing of that.
        writer.layout().received.store(0, Ordering::Release);
        writer.layout().revision.store(2, Ordering::Release);
        assert!(reader.has_received_fault());
        let age = reader.fault_age_ms().unwrap();
        assert!(age < 60_000, "{age}");
        let future = u64::from(now_ms().wrapping_add(1000)) << 32 | 719;
        writer.layout().fault.store(future, Ordering::Release);
        assert_eq!((reader.fault(), reader.fault_age_ms()), (719, None));
    }

    #[test]
    fn hints_and_requests_add_up() {
        let (writer, file) = Page::create().unwrap();
        let reader = Page::open(&file).unwrap();
        let one = HintCounts {
            given: 1,
            useful: 1,
            wasted: 0,
            held_ns: 70,
        };
        let slot = writer.slot(0).unwrap();
        slot.count_hints(one);
        slot.count_hints(one);
        assert_eq!(reader.slot(0).unwrap().hints(), one.plus(one));
        for us in 1..=100 {
            writer.requests().record(us * 1000);
        }
        let before = reader.requests().times();
        assert_eq!(before.count(), 100);
        let p50 = before.quantile_us(0.5);
        assert!((45.0..56.0).contains(&p50), "{p50}");
        // 1 + 2 + … + 100, to half a step.
        let total = before.total_us();
        assert!((4800.0..5300.0).contains(&total), "{total}");
        writer.requests().record(0);
        writer.requests().record(u64::MAX);
        let times = reader.requests().times();
        assert_eq!(times.clone().plus(&before).count(), 202);
        let new: Vec<_> = times.since(&before).steps().collect();
        assert_eq!(new, [(0, 1), (STEPS * DOUBLINGS - 1, 1)]);
        // Whatever a hostile writer counts, nothing overflows.
        for count in &writer.requests().0 {
            count.store(u64::MAX, Ordering::Relaxed);
        }
        let most = reader.requests().times().plus(&before);
        assert!(most.count() > 1 << 48);
        assert!(most.quantile_us(0.99) >= 1.0 && most.total_us().is_finite());
        assert_eq!(before.since(&most), RequestTimes::default());
        let most = HintCounts {
            given: u64::MAX,
            ..one
        };
        assert_eq!(most.plus(most).given, u64::MAX);
    }

    #[test]
    fn pages_that_could_hurt_the_reader_are_refused() {
        let plain = rustix::fs::memfd_create("x", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&plain, size_of::<Layout>() as u64).unwrap();
        assert!(Page::open(&plain).is_err(), "not sealed");
        rustix::fs::fcntl_add_seals(&plain, mapping::SEALS).unwrap();
        assert!(Page::open(&plain).is_err(), "no magic");
        assert!(Page::open(std::fs::File::open("/dev/null").unwrap()).is_err());
    }
}
