//! What programs and pools keep, and give back when others lack memory.

use super::*;

#[test]
fn caches_are_given_back_before_anything_is_moved() {
    if real() {
        eprintln!("SKIPPED: the device is too large to fill in a test");
        return;
    }
    let node = Node::with_memory(256 << 20);
    let program = "gpumux workload idle --seconds 600 --memory 16MiB --cache 160MiB --json";
    let first = Process::start(&mut node.tenant("--name first", program));
    node.wait_tenant("first", |it| bytes(it, "in_use") >= 176 << 20);
    let (second, in_time) = takes(&node, "second", 128);
    let tenant = node.wait_tenant("first", |it| bytes(it, "in_use") < 128 << 20);
    if in_time {
        assert!(bytes(&tenant, "in_use") >= 16 << 20, "{tenant:#}");
        assert_eq!(tenant["asleep"], false, "{tenant:#}");
        assert_eq!(tenant["moves"]["outs"], 0, "{tenant:#}");
    }
    // When they do not suffice, the rest is moved as ever.
    let idle = "gpumux workload idle --seconds 600 --memory 128MiB";
    let _third = Process::start(&mut node.tenant("--name third", idle));
    node.wait_tenant("third", |it| bytes(it, "in_use") >= 128 << 20);
    drop(second);
    first.signal(Signal::TERM);
    let report = first.finish_within(PATIENCE).json();
    assert_ne!(report["calls"], 0, "{report:#}");
}

/// `python/gpumux.py` with nothing but the driver: a cache that is given back.
#[test]
fn a_python_program_gives_its_cache_back() {
    const PROGRAM: &str = r#"
import sys, time
sys.path.insert(0, sys.argv[1])
import gpumux
context, cache = use_device(), []
for _ in range(10):
    address = ctypes.c_uint64()
    call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(16 << 20))
    cache.append(address)
def free(device, missing):
    call("cuCtxSetCurrent", context)
    freed = len(cache)
    while cache:
        call("cuMemFree_v2", cache.pop())
    return freed * (16 << 20)
def broken(device, missing):
    raise ValueError("of mine")
assert gpumux.on_reclaim(broken) and gpumux.on_reclaim(free)
while cache:
    time.sleep(0.01)
print("given back", flush=True)
"#;
    if real() {
        eprintln!("SKIPPED: the device is too large to fill in a test");
        return;
    }
    let node = Node::with_memory(256 << 20);
    let Some(program) = python(&node, PROGRAM) else {
        return;
    };
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../python");
    let text = format!("{program} {folder}");
    let cache = Process::start(&mut node.tenant("--name cache", &text));
    node.wait_tenant("cache", |it| bytes(it, "in_use") >= 160 << 20);
    let idle = "gpumux workload idle --seconds 600 --memory 128MiB";
    let _second = Process::start(&mut node.tenant("--name second", idle));
    node.wait_tenant("second", |it| bytes(it, "in_use") >= 128 << 20);
    let finished = cache.finish_within(PATIENCE).ok();
    assert_eq!(finished.out, "given back\n", "{}", finished.err);
    // The other one failed, and was reported.
    assert!(
        finished.err.contains("ValueError('of mine')"),
        "{}",
        finished.err
    );
}

/// A pool keeps freed memory, as PyTorch's and CuPy's do: it is the tenant's until another tenant lacks it.
#[test]
fn pool_keeps_its_memory_until_others_lack_it() {
    const PROGRAM: &str = r#"
import sys
use_device()
pool = ctypes.c_void_p()
call("cuDeviceGetDefaultMemPool", ctypes.byref(pool), 0)
call("cuMemPoolSetAttribute", pool, 4, ctypes.byref(ctypes.c_uint64(2**64 - 1)))
def use(value):
    memory, size = ctypes.c_uint64(), 600 << 20
    call("cuMemAllocAsync", ctypes.byref(memory), ctypes.c_size_t(size), None)
    call("cuMemsetD8Async", memory, value, ctypes.c_size_t(size), None)
    last = ctypes.c_ubyte()
    call("cuMemcpyDtoH_v2", ctypes.byref(last), ctypes.c_uint64(memory.value + size - 1), ctypes.c_size_t(1))
    assert last.value == value
    call("cuMemFreeAsync", memory, None)
    call("cuStreamSynchronize", None)
for value in range(1, 20):
    use(value)
    print(value, flush=True)
    if not sys.stdin.readline():
        break
"#;
    if real() {
        eprintln!("SKIPPED: the device is too large to fill in a test");
        return;
    }
    const KEPT: u64 = 600 << 20;
    let node = Node::with_memory(1 << 30);
    let Some(command) = python(&node, PROGRAM) else {
        return;
    };
    let mut keeper = Process::start(&mut node.tenant("--name keeper", &command));
    node.wait_tenant("keeper", |it| bytes(it, "in_use") >= KEPT);
    keeper.wait_lines(1);
    // Longer than pools are counted anew: it still has all of it.
    std::thread::sleep(Duration::from_millis(2500));
    let kept = node.find_tenant("keeper").expect("it runs");
    assert!(bytes(&kept, "in_use") >= KEPT, "{kept:#}");
    assert!(bytes(&kept, "pinned") < KEPT, "{kept:#}");
    // There is room for the next, at once: nothing has to be moved for it.
    let (next, in_time) = takes(&node, "next", 700);
    let left = node.find_tenant("keeper").expect("it runs");
    assert!(bytes(&left, "in_use") < 100 << 20, "{left:#}");
    assert!(left["moves"]["outs"] == 0 || !in_time, "{left:#}");
    next.kill();
    // It takes from the device again what it needs.
    keeper.write("\n");
    keeper.wait_lines(2);
    // A tenant that sleeps leaves nothing in its pools.
    assert!(sleeps(&node, "keeper"));
    let asleep = node.find_tenant("keeper").expect("it runs");
    assert!(bytes(&asleep, "in_use") < 100 << 20, "{asleep:#}");
    keeper.kill();
}

/// The driver's default: a pool gives back what is free when the program waits next.
#[test]
fn pool_that_keeps_nothing_is_not_counted() {
    const PROGRAM: &str = r#"
import sys
use_device()
memory, size = ctypes.c_uint64(), ctypes.c_size_t(256 << 20)
call("cuMemAllocAsync", ctypes.byref(memory), size, None)
call("cuStreamSynchronize", None)
sys.stdin.readline()
call("cuMemFreeAsync", memory, None)
call("cuStreamSynchronize", None)
sys.stdin.readline()
"#;
    let node = Node::start();
    let Some(command) = python(&node, PROGRAM) else {
        return;
    };
    let mut program = Process::start(&mut node.tenant("--name pool", &command));
    node.wait_tenant("pool", |it| bytes(it, "in_use") >= 256 << 20);
    program.write("free\n");
    // Not more than what is kept of a lease.
    node.wait_tenant("pool", |it| bytes(it, "in_use") <= 128 << 20);
    program.kill();
}
