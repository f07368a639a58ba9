//! Copies between host and device: counted, and divided by the tenants' shares.

use std::time::Instant;

use gpumux_cuda::list::{Class, entry_points};
use gpumux_tests::{Node, Options, PATIENCE, Process, Run, real, wait_for};
use serde_json::Value;

use crate::{at_once, memory::python};

/// What the link carries each way, in bytes per second: programs on a loaded machine fill it.
const LINK: u64 = 10_000_000;

fn node() -> Node {
    Node::with(Options {
        profile: "hardware = { host_to_device = 10_000_000, device_to_host = 10_000_000 }",
        ..Options::default()
    })
}

/// Copies in one direction without end, each of so many bytes, with [`AHEAD`] bytes queued.
const COPIES: &str = r#"
import sys
use_device()
way, size = sys.argv[1], int(sys.argv[2])
stream, host, device = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_uint64()
bytes = ctypes.c_size_t(size)
call("cuStreamCreate", ctypes.byref(stream), 1)
call("cuMemAllocHost_v2", ctypes.byref(host), bytes)
call("cuMemAlloc_v2", ctypes.byref(device), bytes)
copy = {
    "in": ("cuMemcpyHtoDAsync_v2", device, host),
    "out": ("cuMemcpyDtoHAsync_v2", host, device),
    "between": ("cuMemcpyAsync", host, device),
}[way]
done = [ctypes.c_void_p() for _ in range((2 << 20) // size)]
for event in done:
    call("cuEventCreate", ctypes.byref(event), 2)
while True:
    for event in done:
        call("cuEventSynchronize", event)
        call(*copy, bytes, stream)
        call("cuEventRecord", event, stream)
"#;
const AHEAD: u64 = 2 << 20;
/// Bytes of a large copy, and of a small one.
const LARGE: u64 = 128 << 10;
const SMALL: u64 = 32 << 10;

/// What a tenant has copied in one direction, in bytes, and the most that it may, in bytes per second.
fn copied(tenant: &Value, way: &str) -> (u64, Option<u64>) {
    let copying = &tenant["domains"][0]["copies"][way];
    let bytes = copying["bytes"].as_u64().unwrap_or(0);
    (bytes, copying["limit"].as_u64())
}

/// Two copies beside one, is limited to less than it would have, and copies no more. How the link is divided is the planner's, in virtual
/// time; how much of it two programs fill is the machine's.
fn keeps_to_its_limit(node: &Node, way: &str) {
    /// How long a look at what was copied may be old: one second, and more on a loaded machine.
    const OLD: f64 = 2.0;
    let mut begun = None;
    let (bytes, passed, limit) = wait_for("a limit that lasts", 12 * PATIENCE, || {
        let asked = Instant::now();
        let ps = node.ps();
        let two = (ps["tenants"].as_array()?.iter()).find(|it| it["name"] == "two")?;
        let (bytes, limit) = copied(two, way);
        let Some(limit) = limit.filter(|it| *it < LINK / 2) else {
            begun = None;
            return None;
        };
        let (since, before, most) = begun.unwrap_or((asked, bytes, limit));
        let most = limit.max(most);
        begun = Some((since, before, most));
        let passed = since.elapsed().as_secs_f64();
        (passed >= 8.0).then_some((bytes - before, passed, most))
    });
    let allowed = limit as f64 * (passed + OLD) + AHEAD as f64;
    assert!(bytes > 0, "{way}");
    assert!(
        bytes as f64 <= allowed,
        "{bytes} of {allowed} {way}: {passed} s at {limit}"
    );
}

#[test]
fn copies_follow_guarantees_until_one_copies_alone() {
    // A real link carries more than such programs copy: `bench/copies.py` fills it.
    if real() {
        return;
    }
    at_once(
        [("in", "to_device"), ("out", "to_host")],
        |(argument, way)| {
            let node = node();
            let Some(program) = python(&node, COPIES) else {
                return;
            };
            let start = |options: &str| {
                Process::start(&mut node.tenant(options, &format!("{program} {argument} {LARGE}")))
            };
            let one = start("--name one --guaranteed 0.75");
            let _two = start("--name two --guaranteed 0.25");
            keeps_to_its_limit(&node, way);
            let explained = node.gpumux(["explain", "two"]).run().ok().out;
            assert!(explained.contains("it copies"), "{explained}");
            one.kill();
            node.wait_tenant("two", |it| copied(it, way).1.is_none());
        },
    );
}

/// Every kind of call, with what it is to count.
const EVERY: &str = r#"
context = use_device()
SIZE = 128 << 10
size, few = ctypes.c_size_t(SIZE), ctypes.c_size_t(4 << 10)
stream, graph = ctypes.c_void_p(), ctypes.c_void_p()
pinned, plain = ctypes.c_void_p(), ctypes.create_string_buffer(SIZE)
one, two = ctypes.c_uint64(), ctypes.c_uint64()
call("cuStreamCreate", ctypes.byref(stream), 1)
call("cuMemAllocHost_v2", ctypes.byref(pinned), size)
for at in (one, two):
    call("cuMemAlloc_v2", ctypes.byref(at), size)
address = ctypes.c_uint64(pinned.value)
def words(*values):
    return (ctypes.c_uint64 * len(values))(*values)
# The kind of memory (1 host, 2 device) and its two addresses; 128 rows of 1 KiB.
IN, OUT = ((1, pinned.value, 0), (2, 0, one.value)), ((2, 0, one.value), (1, pinned.value, 0))
def plane(*sides):
    return words(*(it for side in sides for it in (0, 0, *side, 0, 1024)), 1024, 128)
def volume(*sides):
    return words(*(it for side in sides for it in (0, 0, 0, 0, *side, 0, 0, 1024, 16)), 1024, 16, 8)
def operation(to, source):
    # In the stream's order.
    return [*(it for at in (source, to) for it in (1, at.value, 1024, 16, 0)), 1024, 16, 8, 1]
# Two to the device, one to the host, one within the device.
BATCH = words(one.value, one.value, pinned.value, two.value), words(*[pinned.value] * 2, *[one.value] * 2), words(*[SIZE] * 4)
VOLUMES = words(*operation(one, address), *operation(one, address), *operation(address, one), *operation(two, one))
none, four, array = ctypes.c_void_p(), ctypes.c_size_t(4), ctypes.c_void_p()
# One kind of copy for all: in the stream's order.
KINDS, failed = (words(1, 0, 0), words(0), ctypes.c_size_t(1)), ctypes.byref(ctypes.c_size_t())
def newer(name, *arguments, older):
    # A driver may not have it yet.
    call(name, *arguments) if hasattr(cuda, name) else call(*older)
# Of bytes.
call("cuArrayCreate_v2", ctypes.byref(array), words(SIZE, 0, 1 | 1 << 32))
input()
# To the device: 12.
call("cuMemcpyHtoD_v2", one, plain, size)
call("cuMemcpyHtoDAsync_v2", one, pinned, size, stream)
call("cuMemcpyAsync", one, address, size, stream)
call("cuMemcpy", one, address, size)
newer("cuMemcpyWithAttributesAsync", one, address, size, KINDS[0], stream, older=("cuMemcpyAsync", one, address, size, stream))
call("cuMemcpy2D_v2", plane(*IN))
call("cuMemcpy2DUnaligned_v2", plane(*IN))
call("cuMemcpy3D_v2", volume(*IN))
call("cuMemcpy3DPeer", volume(*IN))
newer("cuMemcpy3DWithAttributesAsync", words(*operation(one, address)), none, stream, older=("cuMemcpy3D_v2", volume(*IN)))
call("cuMemcpyHtoA_v2", array, none, plain, size)
call("cuMemcpyHtoAAsync_v2", array, none, pinned, size, stream)
# To the host: 8.
call("cuMemcpyDtoH_v2", plain, one, size)
call("cuMemcpyDtoHAsync_v2", pinned, one, size, stream)
call("cuMemcpyAsync", address, one, size, stream)
call("cuMemcpy2DAsync_v2", plane(*OUT), stream)
call("cuMemcpy3DAsync_v2", volume(*OUT), stream)
call("cuMemcpy3DPeerAsync", volume(*OUT), stream)
call("cuMemcpyAtoH_v2", plain, array, none, size)
call("cuMemcpyAtoHAsync_v2", pinned, array, none, size, stream)
# 8 to the device, and 4 to the host.
call("cuMemcpyBatchAsync", *BATCH, four, *KINDS, failed, stream)
call("cuMemcpyBatchAsync_v2", *BATCH, four, *KINDS, stream)
call("cuMemcpy3DBatchAsync", four, VOLUMES, failed, none, stream)
call("cuMemcpy3DBatchAsync_v2", four, VOLUMES, none, stream)
# Neither.
call("cuMemcpyDtoD_v2", two, one, size)
call("cuMemcpyAsync", two, one, size, stream)
call("cuStreamBeginCapture_v2", stream, 0)
call("cuMemcpyHtoDAsync_v2", one, pinned, size, stream)
call("cuStreamEndCapture", stream, ctypes.byref(graph))
# Few bytes: one of 17 is asked about.
for _ in range(34):
    call("cuMemcpyAsync", one, address, few, stream)
    call("cuMemcpyHtoDAsync_v2", one, pinned, few, stream)
call("cuCtxSynchronize")
input()
"#;

#[test]
fn every_copy_between_host_and_device_is_counted() {
    /// They copy within devices, or from one to another.
    const WITHIN: &[&str] = &[
        "AtoA",
        "AtoD",
        "DtoA",
        "DtoD",
        "DtoDAsync",
        "Peer",
        "PeerAsync",
    ];
    let copies = entry_points()
        .filter(|it| it.symbol.starts_with("cuMemcpy") && it.class != Class::Short)
        .filter(|it| !it.per_thread() && !WITHIN.contains(&&it.name["cuMemcpy".len()..]));
    for it in copies {
        let called = ["call", "newer"].map(|how| format!("{how}(\"{}\"", it.symbol));
        let is_called = called.iter().any(|it| EVERY.contains(it));
        assert!(is_called, "{it:?}");
    }

    let node = Node::start();
    let Some(program) = python(&node, EVERY) else {
        return;
    };
    let mut tenant = Process::start(&mut node.tenant("--name one", &program));
    // What was copied before the daemon has the group is not counted.
    node.wait_tenant("one", |it| it["domains"][0].is_object());
    tenant.write("\n");
    let counts = |it: &Value| ["to_device", "to_host"].map(|way| copied(it, way).0);
    const SIZE: u64 = 128 << 10;
    let expected = [20 * SIZE + 68 * (4 << 10), 12 * SIZE];
    let found = node.wait_tenant("one", |it| {
        let counts = counts(it);
        counts[0] >= expected[0] && counts[1] >= expected[1]
    });
    assert_eq!(counts(&found), expected);
}

#[test]
fn many_small_copies_are_limited_like_large_ones() {
    if real() {
        return;
    }
    at_once(["out", "between"], |argument| {
        let node = node();
        let Some(program) = python(&node, COPIES) else {
            return;
        };
        let start = |options: &str, copies: &str| {
            Process::start(&mut node.tenant(options, &format!("{program} {copies}")))
        };
        let _two = start(
            "--name two --guaranteed 0.25",
            &format!("{argument} {SMALL}"),
        );
        node.wait_tenant("two", |it| copied(it, "to_host").0 > 0);
        let _one = start("--name one --guaranteed 0.75", &format!("out {LARGE}"));
        keeps_to_its_limit(&node, "to_host");
    });
}
