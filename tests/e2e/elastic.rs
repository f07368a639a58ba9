//! Elastic ranges and `gpumux.kv`: memory goes to whom it is guaranteed, whatever its borrower does, and every byte that counts stays.

mod ranks;

use gpumux_tests::{Node, Options, PATIENCE, Process, Run, real, wait_for};
use rustix::process::Signal;

use crate::{TICKS, memory::python};

/// Carries out lines of Python, one after the other.
const COMMON: &str = r#"
import sys, threading, time
sys.path.insert(0, sys.argv[1])
import gpumux.kv
MIB = 1 << 20
context = use_device()
pool = gpumux.kv.Pool(192 * MIB, MIB, granule_bytes=2 * MIB, fallback=False)
def write(pages):
    for page in pages:
        call("cuMemsetD32_v2", ctypes.c_uint64(pool.address + page * MIB), page * 77 + 1, ctypes.c_size_t(MIB // 4))
    call("cuCtxSynchronize")
def verify(pages):
    found = (ctypes.c_uint32 * (MIB // 4))()
    for page in pages:
        call("cuMemcpyDtoH_v2", found, ctypes.c_uint64(pool.address + page * MIB), ctypes.c_size_t(MIB))
        assert bytes(found) == (page * 77 + 1).to_bytes(4, "little") * (MIB // 4), f"page {page} is {found[0]}"
def get(count):
    deadline, pages = time.monotonic() + 60, None
    while pages is None and time.monotonic() < deadline:
        pages = pool.alloc(count)
    assert pages is not None, f"no {count} pages: {pool.limits()}"
    write(pages)
    return pages
def work(pages):
    call("cuCtxSetCurrent", context)
    while True:
        write(pages)
def begin_work(pages):
    threading.Thread(target=work, args=[pages], daemon=True).start()
print("there", flush=True)
for line in sys.stdin:
    exec(line)
    print("done", flush=True)
"#;

/// What `gpumux.vllm` does in an engine: steps over blocks of 1 MiB, each with contents of its own.
const ENGINE: &str = r#"
import random, types
from gpumux._blocks import Blocks
class Fence:
    def query(self): return True
    def synchronize(self): call("cuCtxSynchronize")
elastic = gpumux.kv._Elastic(0, 160 * MIB, 2 * MIB)
blocks = [types.SimpleNamespace(block_id=n, block_hash=None) for n in range(160)]
rng, used, contents = random.Random(5), [], {}
def evict(numbers):
    for number in numbers: blocks[number].block_hash = None
def fill(number, value, count=1):
    call("cuMemsetD32_v2", ctypes.c_uint64(elastic.address + number * MIB), value, ctypes.c_size_t(count * MIB // 4))
    contents[number] = value
def right(block):
    found = (ctypes.c_uint32 * (MIB // 4))()
    call("cuMemcpyDtoH_v2", found, ctypes.c_uint64(elastic.address + block.block_id * MIB), ctypes.c_size_t(MIB))
    assert bytes(found) == contents[block.block_id].to_bytes(4, "little") * (MIB // 4), block
free = Blocks(elastic, MIB, blocks, blocks[1:], evict, Fence, lambda first, count: fill(first * 2, 0, count * 2))
def leave(count):
    for block in [used.pop() for _ in range(count)]:
        block.block_hash = rng.choice([None, 1])
        free.append(block)
    free.end(idle=not used)
def step(want):
    free.begin(want, lookup=True)
    hits = [it for it in blocks if it.block_hash and it not in used][:3]
    for block in hits:
        free.remove(block)
        right(block)
    new = free.popleft_n(min(want, free.num_free_blocks))
    free.end()
    for block in new:
        block.block_hash = None
        fill(block.block_id, rng.getrandbits(31))
    used.extend(hits + new)
    for block in used: right(block)
    rng.shuffle(used)
"#;

/// A tenant with a pool on a device of 320 MiB, of which it gets 192 at most.
struct Tenant {
    process: Process,
}

impl Tenant {
    fn start(node: &Node, options: &str) -> Option<Self> {
        let program = python(node, COMMON)?;
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../python");
        let process = Process::start(&mut node.tenant(options, &format!("{program} {folder}")));
        let mut tenant = Self { process };
        tenant.wait();
        Some(tenant)
    }

    fn wait(&mut self) {
        self.process.next_line();
    }

    fn send(&mut self, line: &str) {
        self.process.write(&format!("{line}\n"));
    }

    fn runs(&mut self, line: &str) {
        self.send(line);
        self.wait();
    }
}

/// A borrower of 192 MiB, and a tenant that is guaranteed as much.
fn two(borrower: &str) -> Option<(Node, Tenant, Tenant)> {
    two_on("", borrower)
}

/// The same on an emulated device of this profile.
fn two_on(profile: &'static str, borrower: &str) -> Option<(Node, Tenant, Tenant)> {
    if real() {
        eprintln!("SKIPPED: the device is too large to fill in a test");
        return None;
    }
    let node = Node::with(Options {
        memory: 320 << 20,
        profile,
        ..Options::default()
    });
    let owner = Tenant::start(&node, "--name owner --memory-guaranteed 224MiB")?;
    let borrower = Tenant::start(&node, &format!("--name borrower {borrower}"))?;
    Some((node, owner, borrower))
}

/// Bytes that went to the host.
fn copied(node: &Node, name: &str) -> u64 {
    let tenant = node.find_tenant(name).expect("it is there");
    tenant["moves"]["out_bytes"].as_u64().expect("a number")
}

#[test]
fn free_pages_go_back_and_forth_between_two_pools() {
    let Some((node, mut owner, mut borrower)) = two("") else {
        return;
    };
    borrower.runs("kept = get(16); write(kept)");
    for _ in 0..3 {
        borrower.runs("pages = get(160); verify(kept + pages); pool.free(pages)");
        owner.runs("pages = get(160); verify(pages); pool.free(pages)");
        borrower.runs("verify(kept)");
    }
    borrower.runs("assert pool.limits().taken >= 40, pool.limits()");
    for name in ["owner", "borrower"] {
        assert_eq!(copied(&node, name), 0, "{name}");
    }
}

/// A tenant alone on a device of 320 MiB, whose pool has 190 MiB that it does not need.
fn idle_pool(options: &str) -> Option<(Node, Tenant)> {
    if real() {
        eprintln!("SKIPPED: the device is too large to fill in a test");
        return None;
    }
    let node = Node::with(Options {
        memory: 320 << 20,
        ..Options::default()
    });
    let mut engine = Tenant::start(&node, &format!("--name engine {options}"))?;
    engine.runs("pool.free(get(190))");
    Some((node, engine))
}

/// Allocates as PyTorch does for activations, and keeps Python's lock meanwhile.
const ALLOCATE: &str = r#"
def allocate(mib):
    at, began = ctypes.c_uint64(), time.monotonic()
    error = ctypes.PyDLL("libcuda.so.1").cuMemAlloc_v2(ctypes.byref(at), ctypes.c_size_t(mib * MIB))
    assert error == 0, error
    assert time.monotonic() - began < 10
    return at
"#;

#[test]
fn free_pages_serve_other_requests_of_their_process() {
    let Some((node, mut engine)) = idle_pool("") else {
        return;
    };
    engine.runs(&format!("exec({ALLOCATE:?})"));
    engine.runs("kept = get(20); at = allocate(200); verify(kept)");
    engine.runs("it = pool.limits(); assert it.taken > 0 == it.moved, it");
    // What it has goes to nothing that cannot be had.
    engine.runs("assert pool.alloc(150, wait_s=0.5) is None");
    engine.runs("assert pool.limits().committed == it.committed >= 40 * MIB, (it, pool.limits())");
    engine.runs("call('cuMemFree_v2', at); pool.free(kept); keys = pool.cached(get(190))");
    engine.runs("other = gpumux.kv.Pool(200 * MIB, MIB, granule_bytes=2 * MIB, fallback=False)");
    engine
        .runs("assert other.alloc(200, wait_s=10); it = pool.limits(); assert it.taken_cached, it");
    assert_eq!(copied(&node, "engine"), 0);
}

#[test]
fn free_pages_serve_other_processes_of_their_tenant() {
    let Some((node, mut engine)) = idle_pool("") else {
        return;
    };
    engine.runs("import subprocess; words = open('/proc/self/cmdline').read().split(chr(0))[:-1]");
    engine.runs(
        "child = subprocess.Popen(words, stdin=-1, stdout=-1, text=True); child.stdout.readline()",
    );
    engine.runs("print('pages = get(180); verify(pages)', file=child.stdin, flush=True)");
    engine.runs("assert child.stdout.readline() == 'done' + chr(10)");
    engine.runs("it = pool.limits(); assert it.taken > 0, it");
    engine.runs("child.stdin.close(); child.wait()");
    assert_eq!(copied(&node, "engine"), 0);
}

#[test]
fn free_pages_serve_a_tenant_at_its_limit() {
    let Some((node, mut engine)) = idle_pool("--memory-limit 210MiB") else {
        return;
    };
    engine.runs(&format!("exec({ALLOCATE:?})"));
    engine.runs("at = allocate(120); assert pool.limits().taken > 0");
    assert_eq!(copied(&node, "engine"), 0);
}

#[test]
fn engine_blocks_stay_right_while_granules_are_taken() {
    let Some((node, mut owner, mut engine)) = two("") else {
        return;
    };
    engine.runs(&format!("exec({ENGINE:?})"));
    for _ in 0..4 {
        engine.runs("step(150); leave(len(used) - 20)");
        owner.runs("pages = get(180); verify(pages)");
        engine.runs("step(20); assert 0 < len(used) < 60, len(used); leave(len(used) // 2)");
        owner.runs("pool.free(pages)");
        engine.runs("step(30); leave(len(used))");
    }
    engine.runs("assert elastic.losses()['taken'] >= 20, elastic.losses()");
    assert_eq!(copied(&node, "owner"), 0);
}

#[test]
fn cached_pages_are_taken_and_their_owner_learns_it() {
    let Some((node, mut owner, mut borrower)) = two("") else {
        return;
    };
    borrower.runs("kept = get(20); keys = pool.cached(get(150))");
    owner.runs("pages = get(180)");
    borrower.runs("found = pool.touch(keys); there = [it for it in found if it is not None]");
    borrower
        .runs("assert 0 < len(there) < 140, len(there); verify(there + kept); it = pool.limits()");
    borrower.runs("assert it.taken == it.taken_cached > 0 == it.moved, it");
    assert_eq!(copied(&node, "borrower"), 0);
}

#[test]
fn borrower_that_holds_python_s_lock_gives_free_pages() {
    let Some((node, mut owner, mut borrower)) = two("") else {
        return;
    };
    borrower.runs("pool.free(get(160))");
    borrower.send("ctypes.PyDLL(None).sleep(3600)");
    owner.runs("pages = get(190); verify(pages)");
    assert_eq!(
        borrower.process.lines(),
        borrower.process.taken(),
        "it still has the lock"
    );
    assert_eq!(copied(&node, "borrower"), 0);
    borrower.process.signal(Signal::KILL);
}

#[test]
fn borrower_that_holds_python_s_lock_gives_pages_in_use() {
    let Some((node, mut owner, mut borrower)) = two("") else {
        return;
    };
    borrower.runs("pages = get(190)");
    borrower.send("ctypes.PyDLL(None).sleep(8); verify(pages)");
    owner.runs("pages = get(190); verify(pages)");
    assert!(copied(&node, "borrower") >= 64 << 20);
    // While it lives, what it is guaranteed is lent only after a turn, and a turn is as long as moves here are slow.
    drop(owner);
    borrower.wait();
}

#[test]
fn target_is_low_after_pages_in_use_have_moved() {
    let Some((_node, mut owner, mut borrower)) = two("") else {
        return;
    };
    borrower.runs("pages = get(150); other = gpumux.kv.Pool(3 * MIB, MIB, granule_bytes=2 * MIB)");
    borrower.runs("it = other.limits(); assert it.target == it.bytes_max == 3 * MIB, it");
    owner.runs("pages = get(190); verify(pages)");
    borrower.runs("it = pool.limits(); assert it.moved > 0 and it.target < 150 * MIB, it");
}

#[test]
fn target_is_low_while_requests_are_refused() {
    let Some((_node, mut owner, mut borrower)) = two("") else {
        return;
    };
    owner.runs("pages = get(190); begin_work(pages)");
    borrower.runs("kept = get(20); end = time.monotonic() + 12");
    let refused = "assert pool.alloc(150, wait_s=0.2) is None; it = pool.limits()";
    let step = format!("{refused}; assert it.target < 100 * MIB, it; time.sleep(0.5)");
    borrower.runs(&format!("while time.monotonic() < end: {step}"));
}

#[test]
fn borrower_that_is_frozen_gives_free_pages() {
    let Some((_node, mut owner, mut borrower)) = two("--class batch") else {
        return;
    };
    borrower.runs("pool.free(get(160)); kept = get(2); begin_work(kept)");
    owner.runs("kept = get(2); begin_work(kept)");
    owner.runs("pages = get(188); verify(pages)");
    borrower.runs("verify(kept)");
}

/// All members are frozen for that, and go on.
#[test]
fn member_of_a_group_gives_free_pages_and_its_neighbour_goes_on() {
    let group = "--class batch --trust team";
    let Some((node, mut owner, mut borrower)) = two(group) else {
        return;
    };
    let mut neighbour = Process::start(&mut node.tenant(&format!("{group} --name mate"), TICKS));
    borrower.runs("pool.free(get(140)); kept = get(2); begin_work(kept)");
    let shared = |name: &str| {
        let tenant = node.wait_tenant(name, |it| it["domains"][0]["group"].is_u64());
        (
            tenant["domains"][0]["group"].as_u64(),
            tenant["domains"][0]["freezes"].as_u64(),
        )
    };
    let (before, mate) = (shared("borrower"), shared("mate"));
    assert_eq!(before.0, mate.0);
    owner.runs("pages = get(188); verify(pages)");
    assert!(shared("borrower").1 > before.1 && shared("mate").1 > mate.1);
    borrower.runs("verify(kept); assert pool.limits().taken > 0, pool.limits()");
    assert_eq!(copied(&node, "borrower"), 0);
    neighbour.wait_lines(neighbour.lines() + 10);
}

/// The texts of events about stopped processes.
fn stops(node: &Node) -> Vec<String> {
    let events = node.gpumux(["events", "--past", "--json"]).run().ok();
    let events = events.out.lines().filter_map(|line| {
        let event: serde_json::Value = serde_json::from_str(line).expect("JSON");
        (event["kind"] == "stopped").then(|| event["text"].as_str().unwrap_or("").to_owned())
    });
    events.collect()
}

/// A borrower that is stopped while it has memory that the other tenant is guaranteed.
fn stopped(rule: &str, pages: &str) -> Option<(Node, Tenant, Tenant)> {
    let (mut node, mut owner, mut borrower) = two("")?;
    let file = node.dir().join("gpumux.toml");
    std::fs::write(&file, format!("when_stopped = '{rule}'\n")).expect("room");
    node.configure(["--config".into(), file.display().to_string()]);
    node.stop_daemon();
    node.start_daemon();
    borrower.runs(pages);
    borrower.process.signal(Signal::STOP);
    owner.send("pages = get(190); verify(pages)");
    Some((node, owner, borrower))
}

#[test]
fn stopped_borrower_is_reported_and_gives_its_pages_when_it_goes_on() {
    let Some((node, mut owner, mut borrower)) = stopped("report", "pool.free(get(160))") else {
        return;
    };
    let text = wait_for("the report", PATIENCE, || stops(&node).pop());
    assert!(
        text.ends_with("has memory that others are guaranteed"),
        "{text}"
    );
    assert_eq!(owner.process.lines(), owner.process.taken(), "it waits");
    borrower.process.signal(Signal::CONT);
    owner.wait();
    borrower.runs("assert pool.limits().taken > 0");
}

#[test]
fn stopped_borrower_goes_on_for_a_guarantee_if_configured() {
    for pages in ["pool.free(get(160))", "pages = get(190)"] {
        let Some((node, mut owner, borrower)) = stopped("continue", pages) else {
            return;
        };
        owner.wait();
        let texts = stops(&node);
        assert!(
            texts.iter().any(|it| it.ends_with("it was sent SIGCONT")),
            "{texts:?}"
        );
        drop((owner, borrower));
    }
}

#[test]
fn stopped_borrower_ends_for_a_guarantee_if_configured() {
    let Some((node, mut owner, borrower)) = stopped("end", "pages = get(190)") else {
        return;
    };
    owner.wait();
    assert_eq!(borrower.process.finish().code(), 137);
    let texts = stops(&node);
    assert!(
        texts.iter().any(|it| it.ends_with("it was ended")),
        "{texts:?}"
    );
}

#[test]
fn pages_of_a_killed_borrower_come_once_the_driver_freed_them() {
    let late = "release_ms = 3500";
    let Some((node, mut owner, mut borrower)) = two_on(late, "") else {
        return;
    };
    borrower.runs("pages = get(190)");
    borrower.process.signal(Signal::KILL);
    owner.runs("pages = pool.alloc(190, wait_s=60)");
    owner.runs("assert pages is not None, pool.limits(); write(pages); verify(pages)");
    wait_for("the borrower to be gone", PATIENCE, || {
        node.find_tenant("borrower").is_none().then_some(())
    });
}

#[test]
fn pages_in_use_move_and_come_back_and_others_do_not() {
    let Some((node, _owner, mut borrower)) = two("") else {
        return;
    };
    borrower.runs("kept = get(31); gone = pool.cached(get(40)); pool.free(get(40))");
    for _ in 0..3 {
        node.gpumux(["sleep", "borrower"]).run().ok();
        let asleep = node.wait_tenant("borrower", |it| it["asleep"] == true);
        let bytes = asleep["memory"][0]["swapped"].as_u64().unwrap_or(0);
        assert!((31 << 20..64 << 20).contains(&bytes), "{asleep:#}");
        node.gpumux(["wake", "borrower"]).run().ok();
        borrower.runs("verify(kept); pages = get(40); verify(pages); pool.free(pages)");
    }
    borrower.runs("assert pool.touch(gone).count(None) >= 38");
}

/// A graph that writes a page, captured step by step.
const CAPTURE: &str = r#"
stream, graph, run = (ctypes.c_void_p() for _ in range(3))
call("cuStreamCreate", ctypes.byref(stream), 1)
def begin(mode):
    global page
    page = get(1)[0]
    call("cuMemsetD32_v2", ctypes.c_uint64(pool.address + page * MIB), 0, ctypes.c_size_t(MIB // 4))
    call("cuStreamBeginCapture_v2", stream, mode)
    call("cuMemsetD32Async", ctypes.c_uint64(pool.address + page * MIB), page * 77 + 1, ctypes.c_size_t(MIB // 4), stream)
def end():
    call("cuStreamEndCapture", stream, ctypes.byref(graph))
    call("cuGraphInstantiateWithFlags", ctypes.byref(run), graph, ctypes.c_uint64(0))
    call("cuGraphLaunch", run, stream)
    call("cuStreamSynchronize", stream)
    verify([page])
    pool.free([page])
def change():
    call("cuCtxSetCurrent", context)
    pages = pool.alloc(100)
    keys = pool.cached(pages[50:])
    pool.free(pages[:50])
    pool.trim()
    pool.free([it for it in pool.touch(keys) if it is not None])
    gpumux.kv.Pool(8 * MIB, MIB, granule_bytes=2 * MIB, fallback=False).close()
    ranges.append(gpumux.kv._segment(8 * MIB, 0, None))
def aside():
    thread = threading.Thread(target=change)
    thread.start()
    thread.join()
ranges = []
"#;

/// Modes: global, thread-local.
#[test]
fn memory_that_comes_and_goes_spoils_no_capture() {
    let Some((_node, _owner, mut engine)) = two("") else {
        return;
    };
    engine.runs(&format!("exec({CAPTURE:?})"));
    for mode in [0, 1] {
        engine.runs(&format!(
            "begin({mode}); change(); aside(); end(); assert all(ranges) and len(ranges) == 2, ranges"
        ));
        engine.runs("[gpumux.kv._range_free(ranges.pop()) for _ in range(2)]; pool.trim()");
    }
}

#[test]
fn granules_are_taken_once_a_capture_has_ended() {
    let Some((node, mut owner, mut engine)) = two("") else {
        return;
    };
    engine.runs(&format!("exec({CAPTURE:?})"));
    for mode in [0, 1] {
        engine.runs(&format!("pool.free(get(150)); begin({mode})"));
        owner.send("pages = get(180)");
        node.wait_tenant("owner", |it| it["waits_for_memory"] == true);
        engine.runs("aside()");
        engine.runs("end(); pool.alloc(0)");
        owner.wait();
        owner.runs("verify(pages); pool.free(pages); pool.trim()");
    }
    engine.runs("assert pool.limits().taken > 0, pool.limits()");
    assert_eq!(copied(&node, "borrower"), 0);
}

#[test]
fn program_is_asked_for_no_caches_while_it_captures() {
    let Some((node, mut owner, mut engine)) = two("") else {
        return;
    };
    engine.runs(&format!("exec({CAPTURE:?})"));
    engine.runs("calls = []; kept = get(170)");
    // As `torch.cuda.empty_cache`.
    engine.runs("gpumux.on_reclaim(lambda *_: calls.append(call('cuCtxSetCurrent', context)) or call('cuCtxSynchronize') or 0)");
    engine.runs("begin(0)");
    owner.send("pages = get(180)");
    node.wait_tenant("owner", |it| it["waits_for_memory"] == true);
    engine.runs("aside(); assert not calls; end()");
    owner.wait();
    owner.runs("verify(pages); pool.free(pages); pool.trim()");
    engine.runs("verify(kept)");
}

#[test]
fn pool_outlives_its_daemon() {
    let Some((mut node, _owner, mut borrower)) = two("") else {
        return;
    };
    borrower.runs("kept = get(31); pool.free(get(40))");
    node.kill_daemon();
    borrower.runs("pages = get(60); verify(kept + pages); pool.free(pages)");
    node.start_daemon();
    node.wait_tenant("borrower", |it| {
        it["memory"][0]["in_use"].as_u64() >= Some(90 << 20)
    });
    borrower.runs("pages = get(60); verify(kept + pages)");
}

#[test]
fn forked_child_has_no_pool_and_its_parent_keeps_it() {
    let Some((_node, _owner, mut borrower)) = two("") else {
        return;
    };
    borrower.runs("import os; kept = get(31); child = os.fork(); child or os._exit(any(pool.alloc(it) is not None for it in (1, 200 - 31)))");
    borrower.runs(
        "assert os.waitpid(child, 0)[1] == 0; verify(kept); pages = get(60); verify(kept + pages)",
    );
}

/// Of a model over two devices.
#[test]
fn pages_of_two_devices_come_together_or_not_at_all() {
    if real() {
        return eprintln!("SKIPPED: the device is too large to fill in a test");
    }
    let node = Node::with(Options {
        memory: 320 << 20,
        devices: 2,
        ..Options::default()
    });
    let other =
        "other = gpumux.kv.Pool(256 * MIB, MIB, device=1, granule_bytes=2 * MIB, fallback=False)";
    let start = |options: &str| {
        let mut tenant = Tenant::start(&node, options)?;
        tenant.runs(other);
        Some(tenant)
    };
    let Some(mut neighbour) = start("--name neighbour") else {
        return;
    };
    let mut job = start("--name job --memory-policy wait").expect("as the other");
    neighbour.runs("pages = other.alloc(200)");
    job.runs("assert gpumux.kv.alloc_together([pool, other], 150) is None");
    job.runs("assert [it.limits().in_use for it in (pool, other)] == [0, 0]");
    // What it got of the first is others' again.
    neighbour.runs("first = get(190); verify(first)");
    neighbour.runs("pool.free(first); pool.trim(); other.free(pages); other.trim()");
    job.runs("both = gpumux.kv.alloc_together([pool, other], 150); assert [len(it) for it in both] == [150, 150]");
}

/// As PyTorch's allocator takes and frees segments: no Python runs in it, and its threads may have called nothing of CUDA before.
#[test]
fn segment_is_all_in_use_and_its_memory_comes_back() {
    let Some((_node, _owner, mut borrower)) = two("--memory-limit 190MiB") else {
        return;
    };
    borrower.runs("take = lambda size: gpumux.kv._segment(size, 0, None); whole = 100 * MIB + 1; at = take(whole); assert at");
    // The last byte that was asked for, too.
    borrower.runs(
        "call('cuMemsetD8_v2', ctypes.c_uint64(at), 7, ctypes.c_size_t(whole)); found = ctypes.c_ubyte(); \
         call('cuMemcpyDtoH_v2', ctypes.byref(found), ctypes.c_uint64(at + whole - 1), ctypes.c_size_t(1)); assert found.value == 7",
    );
    borrower.runs("assert take(150 * MIB) == take(0) == take(-1) == 0");
    borrower.runs("assert gpumux.kv._range_free(at) == 0");
    borrower.runs("made = []; thread = threading.Thread(target=lambda: made.append(take(150 * MIB))); thread.start(); thread.join(); assert made[0]");
}

/// What takes kvcached's place: tensors of two layers, in pages of 8 MiB.
const KVCACHED: &str = "import types; sys.modules['torch'] = types.SimpleNamespace(from_dlpack=lambda it: it); \
    from gpumux.compat import _vmm_ops as ops; ops.init_kvcached('cuda:0'); \
    ops.create_kv_tensors(96 * MIB, 2, 'cuda:0', 2); pool = ops._group(0).memory; \
    offsets = lambda count: [it * 8 * MIB for it in range(count)]";
/// Maps pages, which waits for others, and tries to.
const MAP: &str = r"exec('def fits(count):\n try: return ops.map_to_kv_tensors(offsets(count))\n except RuntimeError: return False')";
const MAPPED: &str = "mapped = lambda count: any(fits(count) for _ in range(60))";

#[test]
fn kvcached_pages_are_other_tenants_once_unmapped() {
    let Some((_node, mut owner, mut borrower)) = two("--memory-limit 190MiB") else {
        return;
    };
    for line in [KVCACHED, MAP, MAPPED] {
        borrower.runs(line);
    }
    for _ in 0..2 {
        borrower.runs("assert mapped(20); write(range(160)); verify(range(160))");
        borrower.runs("assert ops.unmap_from_kv_tensors(offsets(20)) and pool.committed() == 0");
        owner.runs("pages = get(190); verify(pages)");
        // All or none: so many exceed its limit.
        borrower.runs("assert not fits(24) and pool.committed() == 0");
        borrower.runs("assert mapped(4); write(range(32)); verify(range(32))");
        borrower.runs("ops.unmap_from_kv_tensors(offsets(4))");
        owner.runs("verify(pages); pool.free(pages); pool.trim()");
    }
}

#[test]
fn kvcached_pages_in_use_move_for_a_guarantee() {
    let Some((node, mut owner, mut borrower)) = two("") else {
        return;
    };
    borrower.runs(KVCACHED);
    borrower.runs("ops.map_to_kv_tensors(offsets(20)); write(range(160))");
    owner.runs("pages = get(190); verify(pages)");
    assert!(copied(&node, "borrower") > 0);
    owner.runs("verify(pages); pool.free(pages)");
    borrower.runs("verify(range(160)); assert pool.losses()['moved'] > 0, pool.losses()");
}

/// An engine each of whose tokens is a checksum of the pages of its request.
const STAND_IN: &str = "sys.path.insert(0, sys.argv[1] + '/../bench'); import types, serve_worker, standin; \
    engine = standin.StandIn(types.SimpleNamespace(engine={'kv_cache_memory_bytes': 128 * MIB}, cold=True)); \
    tokens = lambda: serve_worker.greedy(engine, [[160 + it, 12] for it in range(48)], None)['tokens']; right = tokens()";

#[test]
fn tokens_stay_the_same_while_pages_in_use_are_taken() {
    let Some((_node, mut owner, mut engine)) = two("") else {
        return;
    };
    engine.runs(STAND_IN);
    engine.runs("keep = get(120)");
    engine.send("while engine.state()['moved'] < 20: assert tokens() == right");
    for _ in 0..20 {
        // The engine goes on when the other has not used its guarantee for a turn.
        owner.runs("pages = get(160); verify(pages); pool.free(pages); pool.trim()");
        owner.runs("time.sleep(2)");
        if engine.process.lines() > engine.process.taken() {
            break;
        }
    }
    engine.wait();
    engine.runs("verify(keep); assert tokens() == right");
}

#[test]
fn pool_without_the_library_takes_all_of_it_at_once() {
    const PROGRAM: &str = r#"
import sys, warnings
sys.path.insert(0, sys.argv[1])
import gpumux.kv
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    pool = gpumux.kv.Pool(8 << 20, 1 << 20)
assert pool.kind == "device" and "gpumux run" in str(said[0].message), said
pages = pool.alloc(8)
assert sorted(pages) == list(range(8)) and pool.alloc(1) is None
keys = pool.cached(pages[:4])
assert len(pool.alloc(1)) == 1 and pool.touch(keys)[1:] == pages[1:4]
pool.close()
print("right")
"#;
    let node = Node::start();
    let Some(program) = python(&node, PROGRAM) else {
        return;
    };
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../python");
    let words = format!("{program} {folder}");
    let finished = node.on_device(words.split_whitespace()).run().ok();
    assert_eq!(finished.out, "right\n");
}
