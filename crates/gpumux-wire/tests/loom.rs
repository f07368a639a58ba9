//! The words that shim and daemon share, in every order that the memory model allows (loom). The source is the product's own, with
//! loom's atomics in the place of the processor's.
//!
//! The shim's own tables (`ranges.rs`, `gate.rs`) are not here: they need one order of all sequentially consistent accesses, which
//! loom takes as acquire and release only, so that it would find faults that cannot happen.

use loom::{
    sync::{Arc, Mutex},
    thread,
};

#[path = "../src/slot.rs"]
#[allow(dead_code, unreachable_pub)]
mod slot;

mod sync {
    pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
}

mod clock {
    /// What the words are for does not depend on it.
    pub(crate) fn now_ns() -> u64 {
        1
    }
}

use slot::{Expiries, Slot, Work};

#[test]
fn group_with_work_is_never_read_as_idle() {
    loom::model(|| {
        let slot = Arc::new(Slot::default());
        slot.begin_counting();
        let writer = Arc::clone(&slot);
        let writer = thread::spawn(move || {
            let first = writer.submit();
            writer.submit();
            writer.complete(first);
        });
        // The second piece is never done.
        let work = slot.work();
        assert!(
            matches!(work, Work::Idle(0) | Work::Busy(1 | 2)),
            "{work:?}"
        );
        writer.join().unwrap();
        assert_eq!(slot.work(), Work::Busy(2));
    });
}

#[test]
fn threads_that_submit_and_complete_lose_no_work() {
    loom::model(|| {
        let slot = Arc::new(Slot::default());
        slot.begin_counting();
        let work = |slot: &Arc<Slot>| {
            let slot = Arc::clone(slot);
            thread::spawn(move || {
                let number = slot.submit();
                slot.complete(number);
                number
            })
        };
        let (one, two) = (work(&slot), work(&slot));
        let (one, two) = (one.join().unwrap(), two.join().unwrap());
        assert_eq!(one + two, 3, "each has a number of its own");
        assert_eq!(slot.work(), Work::Idle(2));
    });
}

#[test]
fn waits_are_read_together_with_their_pieces() {
    loom::model(|| {
        let slot = Arc::new(Slot::default());
        let writer = Arc::clone(&slot);
        let writer = thread::spawn(move || {
            for _ in 0..2 {
                let number = writer.submit();
                writer.complete(number);
            }
        });
        if let Some(waits) = slot.waits() {
            assert_eq!(waits.pieces, waits.count);
        }
        writer.join().unwrap();
        assert_eq!(slot.waits().map(|it| it.count), Some(2));
    });
}

#[test]
fn wait_that_two_threads_see_counts_once() {
    loom::model(|| {
        let slot = Arc::new(Slot::default());
        let number = slot.submit();
        let both = [(); 2].map(|()| {
            let slot = Arc::clone(&slot);
            thread::spawn(move || slot.complete(number))
        });
        both.into_iter().for_each(|it| it.join().unwrap());
        let waits = slot.waits().expect("no other thread");
        assert_eq!((waits.count, waits.pieces), (1, 1));
    });
}

#[test]
fn work_that_was_submitted_before_counting_is_read() {
    loom::model(|| {
        let slot = Arc::new(Slot::default());
        let writer = Arc::clone(&slot);
        let writer = thread::spawn(move || {
            writer.submit();
            writer.begin_counting();
        });
        let work = slot.work();
        assert!(matches!(work, Work::Unknown | Work::Busy(1)), "{work:?}");
        writer.join().unwrap();
    });
}

/// A process whose lease expired counts that, then thaws itself. The daemon reads the count before a control and after it, and undoes
/// one that came too late. The driver takes controls one at a time.
#[test]
fn process_that_freed_itself_does_not_stay_frozen() {
    loom::model(|| {
        let expiries = Arc::new(Expiries::default());
        let frozen = Arc::new(Mutex::new(true));
        let epoch = expiries.read();
        let process = {
            let (expiries, frozen) = (Arc::clone(&expiries), Arc::clone(&frozen));
            thread::spawn(move || {
                expiries.count();
                *frozen.lock().unwrap() = false;
            })
        };
        if expiries.read() == epoch {
            *frozen.lock().unwrap() = true;
            if expiries.read() != epoch {
                *frozen.lock().unwrap() = false;
            }
        }
        process.join().unwrap();
        assert!(!*frozen.lock().unwrap());
    });
}
