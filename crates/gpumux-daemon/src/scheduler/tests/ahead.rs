//! Host memory that processes are asked to make ahead.

use gpumux_core::ledger::Holding;
use gpumux_wire::Daemon;

use super::*;
use crate::config::HostMemory;

const GIB: u64 = 1 << 30;

/// A process's session, and the requests to make memory ahead that it receives, in GiB.
fn come(bench: &mut Bench) -> Arc<Mutex<Vec<u64>>> {
    bench.spec(1, TenantSpec::default()).unwrap();
    let (page, file) = Page::create().unwrap();
    bench.pages.push(page);
    let requests = Arc::new(Mutex::new(Vec::new()));
    let writes = Arc::clone(&requests);
    let speak = move |message: &Daemon| {
        if let Daemon::Ahead { bytes } = message {
            writes.lock().unwrap().push(*bytes / GIB);
        }
        true
    };
    let page = Arc::new(Page::open(file).unwrap());
    let met = Met::new(TenantId(1), page, Box::new(speak));
    bench.engine.meet(SessionId(1), met);
    requests
}

fn holds(bench: &mut Bench, movable: u64) {
    bench.engine.memory_event(Event::Holds {
        process: ProcessId(1),
        device: "GPU-0".into(),
        total: 80 * GIB,
        holding: Holding {
            movable,
            pinned: 0,
            swapped: 0,
        },
    });
    bench.run(Micros::from_secs(3));
}

fn configure(bench: &mut Bench, location: Option<&str>) {
    let rules = HostMemory {
        limit: Some(crate::config::Bytes(20 * GIB)),
        location: location.map(Into::into),
        scrub: false,
    };
    bench.engine.moves = super::super::memory::MemoryMoves::new(&rules);
}

#[test]
fn process_is_asked_to_make_memory_ahead_when_that_changes() {
    let mut bench = Bench::new();
    configure(&mut bench, None);
    let requests = come(&mut bench);
    for movable in [3 * GIB, 3 * GIB, 30 * GIB, 0] {
        holds(&mut bench, movable);
    }
    assert_eq!(*requests.lock().unwrap(), [3, 20, 0]);
    assert_eq!(bench.engine.view().made_ahead, 0);
}

#[test]
fn nothing_is_made_ahead_where_a_location_is_set() {
    let mut bench = Bench::new();
    configure(&mut bench, Some("/dev/shm"));
    let requests = come(&mut bench);
    holds(&mut bench, 3 * GIB);
    assert!(requests.lock().unwrap().is_empty());
}

#[test]
fn limit_is_half_of_the_machines_memory_unless_it_is_set() {
    let mut bench = Bench::new();
    let (_, limit) = bench.engine.view().on_host;
    let text = std::fs::read_to_string("/proc/meminfo").unwrap();
    let total = text.split_whitespace().nth(1).unwrap();
    assert_eq!(limit, total.parse::<u64>().unwrap() * 512);
    configure(&mut bench, None);
    assert_eq!(bench.engine.view().on_host, (0, 20 * GIB));
}
