//! Copies between host and device, whose link carries [`CARRIES`] bytes a second and divides that evenly.

use gpumux_wire::{REVISION, message::COPYING, page::Direction};

use super::*;

const CARRIES: u64 = 50_000_000_000;
/// Between two steps of the thread.
const BEAT: Micros = Micros::from_millis(500);

/// Tenants 1 and 2 with these guarantees, and processes with libraries of this revision.
fn bench(guaranteed: [f64; 2], revision: u32) -> Bench {
    let mut bench = Bench::new();
    for (n, guaranteed) in (1..).zip(guaranteed) {
        let spec = TenantSpec {
            guaranteed,
            ..TenantSpec::default()
        };
        bench.spec(n, spec).unwrap();
        let (page, file) = Page::create().unwrap();
        rustix::io::pwrite(&file, &u64::from(revision).to_ne_bytes(), 16).unwrap();
        let read = Arc::new(Page::open(&file).unwrap());
        let group = NewGroup {
            page: Arc::clone(&read),
            ..bench.group(n, n, 1)
        };
        *bench.pages.last_mut().unwrap() = page;
        bench.engine.add(group).unwrap();
        bench.meet(n.into(), TenantId(n.into()), read);
    }
    bench
}

/// The processes copy as fast as they may, if they want to: for so many beats. Returns the part of the first.
fn copy(bench: &mut Bench, limits: &mut [Option<u64>; 2], beats: u32, wants: [bool; 2]) -> f64 {
    let mut sums = [0, 0];
    for _ in 0..beats {
        let most = |at: usize| match wants[at] {
            true => limits[at].unwrap_or(CARRIES),
            false => 0,
        };
        let (one, two) = (most(0), most(1));
        let one = one.min((CARRIES - two).max(CARRIES / 2));
        let rates = [one, two.min(CARRIES - one)];
        for (n, rate) in rates.into_iter().enumerate() {
            let bytes = rate / 2;
            sums[n] += bytes;
            let slot = bench.pages[n].slot(n as u32 + 1).unwrap();
            slot.count_copy(Direction::ToHost, bytes);
        }
        bench.hardware().now += BEAT.0;
        bench.engine.step();
        for (n, limit) in limits.iter_mut().enumerate() {
            for message in bench.received(n as u64 + 1) {
                if let Daemon::CopyRates { key, rates } = message {
                    assert_eq!((key, rates[0]), (n as u32 + 1, None));
                    *limit = rates[1];
                }
            }
        }
    }
    sums[0] as f64 / (sums[0] + sums[1]) as f64
}

#[test]
fn copies_follow_guarantees_and_their_changes() {
    let mut bench = bench([0.7, 0.3], REVISION);
    let mut limits = [None; 2];
    copy(&mut bench, &mut limits, 8, [true, true]);
    // Less than the time after which limits are lifted for a look.
    let part = copy(&mut bench, &mut limits, 40, [true, true]);
    assert!((0.68..0.72).contains(&part), "{part}");
    let shown = bench.domain(2).copies;
    assert_eq!(shown.to_device, types::Copying::default());
    assert!(shown.to_host.limit.is_some() && shown.to_host.bytes > CARRIES);
    for (n, guaranteed) in [(1, 0.1), (2, 0.9)] {
        let spec = TenantSpec {
            guaranteed,
            ..TenantSpec::default()
        };
        bench.spec(n, spec).unwrap();
    }
    copy(&mut bench, &mut limits, 20, [true, true]);
    let part = copy(&mut bench, &mut limits, 100, [true, true]);
    assert!((0.08..0.12).contains(&part), "{part}");
}

#[test]
fn tenant_that_copies_alone_is_not_limited() {
    let mut bench = bench([0.7, 0.3], REVISION);
    let mut limits = [None; 2];
    copy(&mut bench, &mut limits, 20, [true, true]);
    assert_ne!(limits, [None; 2]);
    copy(&mut bench, &mut limits, 4, [false, true]);
    assert_eq!(limits, [None; 2]);
    let part = copy(&mut bench, &mut limits, 50, [false, true]);
    assert_eq!((part, limits), (0.0, [None; 2]));
}

/// Its library has no such message.
#[test]
fn older_library_is_not_limited() {
    let mut bench = bench([0.7, 0.3], COPYING - 1);
    let mut limits = [None; 2];
    let part = copy(&mut bench, &mut limits, 50, [true, true]);
    assert_eq!((part, limits), (0.5, [None; 2]));
}

/// After a move to another device, a process gives the new group the key of the one that is gone.
#[test]
fn limit_ends_with_its_group() {
    let mut bench = bench([0.7, 0.3], REVISION);
    let mut limits = [None; 2];
    copy(&mut bench, &mut limits, 20, [true, true]);
    assert!(limits[1].is_some());
    bench.engine.gone(SessionId(2), 2);
    let rates = [None; 2];
    let free = Daemon::CopyRates { key: 2, rates };
    assert_eq!(bench.received(2), [free]);
    bench.engine.gone(SessionId(2), 2);
    assert_eq!(bench.received(2), [], "it is not limited any more");
}
