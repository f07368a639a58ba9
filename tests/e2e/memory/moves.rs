//! Memory that moves and comes back: every byte is in place, whatever the program and the device do meanwhile.

use super::*;

#[test]
fn a_kernel_that_is_moved_away_in_its_middle_ends_right() {
    let node = Node::start();
    let worker = checks(&node, 96, 4);
    let mut moves = 0;
    for _ in 0..3 {
        assert!(sleeps(&node, "worker"));
        moves += 1;
        node.gpumux(["wake", "worker"]).run().ok();
        let awake = node.wait_tenant("worker", |it| it["asleep"] == false);
        assert_eq!(bytes(&awake, "swapped"), 0, "{awake:#}");
        let told = &awake["moves"];
        let moved = |field: &str| told[field].as_u64().expect("a number");
        assert!(moved("outs") >= moves && moved("backs") >= moves, "{told}");
        assert!(moved("out_bytes") >= moves * (96 << 20), "{told}");
    }
    verified(&worker.finish_within(PATIENCE * 3));
}

#[test]
fn client_that_asked_for_a_move_may_go_away_in_its_middle() {
    let node = Node::start();
    let worker = checks(&node, 96, 8);
    for _ in 0..5 {
        let mover = Process::start(&mut node.gpumux(["sleep", "worker"]));
        // Frozen, and its memory still to be moved.
        node.wait_tenant("worker", |it| it["asleep"] == true);
        mover.kill();
        node.gpumux(["wake", "worker"]).run().ok();
        node.wait_tenant("worker", |it| it["asleep"] == false);
    }
    verified(&worker.finish_within(PATIENCE * 3));
}

/// What PyTorch's expandable segments do: addresses reserved and physical memory mapped by the program itself.
#[test]
fn memory_that_a_program_maps_itself_moves_too() {
    let node = Node::start();
    let before = free(&node);
    let programs = [0, 1].map(|seed| {
        let program = endless(seed, "64MiB") + " --mapped";
        Process::start(&mut node.tenant(&format!("--name m{seed}"), &program))
    });
    let mut left = Patience::new(PATIENCE * 6);
    let (mut moves, mut pinned, mut least) = (0, 0, u64::MAX);
    while moves < MOVES {
        for name in ["m0", "m1"] {
            moves += u32::from(sleeps(&node, name));
            if let Some(tenant) = node.find_tenant(name) {
                pinned += bytes(&tenant, "pinned");
                // On the way back it still counts as asleep, with nothing away.
                let away = bytes(&tenant, "swapped") > 0 && tenant["waits_for_memory"] == false;
                if away && tenant["asleep"] == true {
                    least = least.min(bytes(&tenant, "in_use"));
                }
            }
        }
        assert!(left.lasts(), "only {moves} moves");
    }
    assert_eq!(pinned, 0, "some of it was not movable");
    // If ever it was seen asleep.
    assert!(matches!(least, 0 | u64::MAX), "{least} bytes stayed");
    for program in programs {
        end_verified(program);
    }
    wait_for("the memory of all", PATIENCE, || {
        (free(&node) >= before).then_some(())
    });
}

#[test]
fn an_idle_tenant_sleeps_and_wakes_with_its_next_work() {
    let node = Node::start();
    let latency = "gpumux workload latency --kernels 1 --kernel-us 10 --period-us 4000000 --seconds 600 --memory 64MiB --json";
    let serve = Process::start(&mut node.tenant("--name serve --sleep-after 1s", latency));
    let moved = |it: &Value, field: &str| it["moves"][field].as_u64() >= Some(64 << 20);
    node.wait_tenant("serve", |it| {
        moved(it, "out_bytes") && moved(it, "back_bytes")
    });
    serve.signal(Signal::TERM);
    let finished = serve.finish_within(PATIENCE * 2);
    assert!(finished.status.success(), "{}", finished.err);
    assert_eq!(finished.json()["errors"], 0);
}

#[test]
fn sleep_and_want_of_room_are_explained_and_traced() {
    if real() {
        eprintln!("SKIPPED: the device is too large to fill in a test");
        return;
    }
    let node = Node::with_memory(256 << 20);
    let idle = |name: &str, policy: &str| {
        let options = format!("--name {name} --memory-policy {policy}");
        let program = "gpumux workload idle --seconds 600 --memory 150MiB";
        Process::start(&mut node.tenant(&options, program))
    };
    let _first = idle("first", "wait");
    node.wait_tenant("first", |it| bytes(it, "in_use") >= 150 << 20);
    let explain = |name: &str| node.gpumux(["explain", name]).run().ok().out;
    // There is no room for a second one, and it does not take any.
    let _second = idle("second", "wait");
    node.wait_tenant("second", |it| it["waits_for_memory"] == true);
    let why = explain("second");
    assert!(why.contains("(memory policy wait)"), "{why}");
    assert!(sleeps(&node, "first"));
    let asleep = node.wait_tenant("first", |it| it["asleep"] == true);
    assert_eq!(asleep["waits_for_memory"], false, "{asleep:#}");
    let why = explain("first");
    assert!(why.contains("It is swapped out: "), "{why}");
    node.wait_tenant("second", |it| {
        it["waits_for_memory"] == false && bytes(it, "in_use") >= 150 << 20
    });
    node.gpumux(["wake", "first"]).run().ok();
    let file = node.dir().join("moves.json");
    let words = ["trace", "--seconds", "100", "-o", file.to_str().unwrap()];
    node.gpumux(words).run().ok();
    let trace: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    for name in ["memory goes to the host", "memory comes back"] {
        let has = |phase| {
            events
                .iter()
                .any(|it| it["name"] == name && it["ph"] == phase)
        };
        assert!(has("b") && has("e"), "{name}: {trace:#}");
    }
}

/// A default stream of the thread's own can be asked about by that thread alone, and it waits for the device only.
#[test]
fn tenant_that_waits_for_the_device_can_be_moved() {
    const PROGRAM: &str = r#"
import sys
use_device()
address, size = ctypes.c_uint64(), 4 << 20
call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
sent, back = ctypes.create_string_buffer(b"gpumux " * (size // 7), size), ctypes.create_string_buffer(size)
def copy(name, *args):
    call(name, *args, ctypes.c_size_t(size), None)
    call("cuCtxSynchronize")
copy("cuMemcpyHtoDAsync_v2_ptsz", address, sent)
print("sent", flush=True)
sys.stdin.readline()
copy("cuMemcpyDtoHAsync_v2_ptsz", back, address)
print("right" if back.raw == sent.raw else "wrong", flush=True)
"#;
    let node = Node::start();
    let Some(program) = python(&node, PROGRAM) else {
        return;
    };
    let mut own = Process::start(&mut node.tenant("--name own", &program));
    own.wait_lines(1);
    node.gpumux(["sleep", "own"]).run().ok();
    node.wait_tenant("own", |it| it["asleep"] == true);
    own.write("\n");
    let finished = own.finish_within(PATIENCE).ok();
    assert!(finished.out.ends_with("right\n"), "{}", finished.out);
}

/// No other thread can ask about a thread's own default stream: every call that has seen the end of its copies counts, whatever it was
/// seen by. And a copy that fails for want of a context leaves nothing to wait for.
#[test]
fn copies_in_a_threads_own_stream_are_seen_to_end() {
    const PROGRAM: &str = r#"
import sys, threading
OWN, size = ctypes.c_void_p(2), ctypes.c_size_t(4 << 20)
sent = ctypes.create_string_buffer(b"gpumux " * (size.value // 7), size.value)
context, address = use_device(), ctypes.c_uint64()
call("cuMemAlloc_v2", ctypes.byref(address), size)
def by_name():
    call("cuMemcpyHtoDAsync_v2", address, sent, size, OWN)
    call("cuStreamSynchronize", OWN)
def by_event():
    event = ctypes.c_void_p()
    call("cuCtxSetCurrent", context)
    call("cuEventCreate", ctypes.byref(event), 0)
    call("cuMemcpyHtoDAsync_v2_ptsz", address, sent, size, None)
    call("cuEventRecord_ptsz", event, None)
    call("cuEventSynchronize", event)
def from_another_thread():
    call("cuCtxSetCurrent", context)
    call("cuMemcpyHtoDAsync_v2_ptsz", address, sent, size, None)
def in_a_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
def by_event_in_a_thread():
    in_a_thread(by_event)
def by_waiting_for_all():
    in_a_thread(from_another_thread)
    call("cuCtxSynchronize")
def without_context():
    assert cuda.cuMemcpyHtoDAsync_v2(address, sent, size, None) != 0
def by_its_failure():
    in_a_thread(without_context)
for how in by_its_failure, by_name, by_event_in_a_thread, by_waiting_for_all:
    how()
    print(how.__name__, flush=True)
    sys.stdin.readline()
    # Back again.
    call("cuMemcpyDtoH_v2", ctypes.create_string_buffer(8), address, ctypes.c_size_t(8))
"#;
    let node = Node::start();
    let Some(program) = python(&node, PROGRAM) else {
        return;
    };
    let mut own = Process::start(&mut node.tenant("--name own", &program));
    for n in 1..=4 {
        own.wait_lines(n);
        node.gpumux(["sleep", "own"]).run().ok();
        node.wait_tenant("own", |it| it["asleep"] == true);
        own.write("\n");
    }
    own.finish_within(PATIENCE).ok();
}

/// Its stream is destroyed while the copy has not even begun: a move of the memory waits for it all the same.
#[test]
fn a_copy_that_outlives_its_stream_arrives() {
    const PROGRAM: &str = r#"
import sys, threading
use_device()
address, host, stream, size = ctypes.c_uint64(), ctypes.c_void_p(), ctypes.c_void_p(), 4 << 20
call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
call("cuMemHostAlloc", ctypes.byref(host), ctypes.c_size_t(size), 0)
ctypes.memset(host, 7, size)
call("cuStreamCreate", ctypes.byref(stream), 1)
go, done = threading.Event(), threading.Event()
function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
wait, tell = function(lambda _: go.wait()), function(lambda _: done.set())
call("cuLaunchHostFunc", stream, wait, None)
call("cuMemcpyHtoDAsync_v2", address, host, ctypes.c_size_t(size), stream)
call("cuLaunchHostFunc", stream, tell, None)
call("cuStreamDestroy_v2", stream)
print("destroyed", flush=True)
sys.stdin.readline()
go.set()
done.wait()
print("arrived", flush=True)
sys.stdin.readline()
back = ctypes.create_string_buffer(size)
call("cuMemcpyDtoH_v2", back, address, ctypes.c_size_t(size))
print("right" if back.raw == bytes([7]) * size else "wrong", flush=True)
"#;
    let node = Node::start();
    let Some(program) = python(&node, PROGRAM) else {
        return;
    };
    let mut tenant = Process::start(&mut node.tenant("--name copier", &program));
    tenant.wait_lines(1);
    let mover = Process::start(&mut node.gpumux(["sleep", "copier"]));
    // A daemon that does not wait has moved it by then.
    std::thread::sleep(Duration::from_secs(1));
    tenant.write("\n");
    tenant.wait_lines(2);
    mover.finish_within(PATIENCE).ok();
    tenant.write("\n");
    let finished = tenant.finish_within(PATIENCE).ok();
    assert!(finished.out.ends_with("right\n"), "{}", finished.out);
}

/// What a program allocates while the daemon is away is its next daemon's to move.
#[test]
fn memory_allocated_without_daemon_moves_after_its_return() {
    const SIZE: u64 = 64 << 20;
    let mut node = Node::start();
    let (start, ready) = (node.dir().join("start"), node.dir().join("ready"));
    let job = format!(
        "gpumux workload sweep --json --memory 64MiB --seconds 600 --start-file {} --ready-file {}",
        start.display(),
        ready.display()
    );
    let job = Process::start(&mut node.tenant("--name job", &job));
    // Its session has begun.
    node.wait_tenant("job", |it| bytes(it, "in_use") > 0);
    node.kill_daemon();
    wait_for("the loss of the daemon", PATIENCE, || {
        job.err().contains("lost the daemon").then_some(())
    });
    File::create(&start).expect("room");
    wait_for("its first pass", PATIENCE, || ready.exists().then_some(()));
    node.start_daemon();
    let back = node.wait_tenant("job", |it| bytes(it, "in_use") >= SIZE);
    assert!(bytes(&back, "pinned") < SIZE, "{back:#}");
    wait_for("it is moved", PATIENCE, || {
        sleeps(&node, "job").then_some(())
    });
    // Its next pass wakes it.
    node.wait_tenant("job", |it| it["moves"]["out_bytes"].as_u64() >= Some(SIZE));
    job.signal(Signal::TERM);
    verified(&job.finish());
}

/// Kernels on one device count up words in memory of another, which they reach by peer access: memory that was allocated before that access, a
/// small piece of it, and memory that was allocated after it.
const PEERS: &str = r#"
import sys
MIB = 1 << 20
PTX = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry count(.param .u64 at)
{
    .reg .u32 %value;
    .reg .u64 %at;
    ld.param.u64 %at, [at];
    ld.global.u32 %value, [%at];
    add.u32 %value, %value, 1;
    st.global.u32 [%at], %value;
    ret;
}
"""
can, here, there = ctypes.c_int(), use_device(), ctypes.c_void_p()
call("cuDeviceCanAccessPeer", ctypes.byref(can), 0, 1)
if not can.value:
    print("none", flush=True)
    sys.exit()
call("cuDevicePrimaryCtxRetain", ctypes.byref(there), 1)
def alloc(size):
    at = ctypes.c_uint64()
    call("cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(size))
    call("cuMemsetD32_v2", at, 0, ctypes.c_size_t(size // 4))
    call("cuCtxSynchronize")
    return at.value
call("cuCtxSetCurrent", there)
# Two chunks, and a part of a shared one.
large, small = alloc(80 * MIB), alloc(4096)
call("cuCtxSetCurrent", here)
own = alloc(20 * MIB)
call("cuCtxEnablePeerAccess", there, 0)
call("cuCtxSetCurrent", there)
late = alloc(20 * MIB)
call("cuCtxSetCurrent", here)
words = [large, large + 80 * MIB - 4, small, late + 10 * MIB, own]
module, count = ctypes.c_void_p(), ctypes.c_void_p()
call("cuModuleLoadData", ctypes.byref(module), PTX)
call("cuModuleGetFunction", ctypes.byref(count), module, b"count")
print("ready", flush=True)
for number, line in enumerate(sys.stdin, 1):
    for at in words:
        argument = ctypes.c_uint64(at)
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
        call("cuLaunchKernel", count, 1, 1, 1, 1, 1, 1, 0, None, arguments, None)
    call("cuCtxSynchronize")
    for at in words:
        value = ctypes.c_uint32()
        call("cuMemcpyDtoH_v2", ctypes.byref(value), ctypes.c_uint64(at), ctypes.c_size_t(4))
        assert value.value == number, (hex(at), value.value, number)
    print("right", flush=True)
"#;

#[test]
fn memory_reached_by_peer_access_moves_and_is_reached_again() {
    let Some(node) = Node::with_two_devices() else {
        return;
    };
    let Some(command) = python(&node, PEERS) else {
        return;
    };
    let mut peers = Process::start(&mut node.tenant("--name peers", &command));
    peers.wait_lines(1);
    if peers.out().starts_with("none") {
        return eprintln!("SKIPPED: the devices do not reach each other");
    }
    for round in 0..3 {
        peers.write("go\n");
        peers.wait_lines(2 + round);
        let tenant = node.find_tenant("peers").expect("it runs");
        assert_eq!(bytes(&tenant, "pinned"), 0, "{tenant:#}");
        assert!(sleeps(&node, "peers"));
        let tenant = node.find_tenant("peers").expect("it runs");
        assert!(bytes(&tenant, "swapped") >= 120 << 20, "{tenant:#}");
        assert_eq!(bytes(&tenant, "in_use"), 0, "{tenant:#}");
    }
    peers.write("go\n");
    peers.wait_lines(5);
    peers.close_input();
    peers.finish_within(PATIENCE).ok();
}
