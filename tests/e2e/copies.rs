//! Copies between host and device: counted, and divided by the tenants' shares.

use gpumux_tests::{Node, Options, PATIENCE, Process, Run, wait_for};
use serde_json::Value;

use crate::memory::python;

/// A node with a slow link: programs on a loaded machine fill it.
fn node() -> Node {
    Node::with(Options {
        profile: "hardware = { host_to_device = 40_000_000, device_to_host = 40_000_000 }",
        ..Options::default()
    })
}

/// Copies in one direction, a few ahead, without end.
const COPIES: &str = r#"
import sys
use_device()
size, stream = ctypes.c_size_t(1 << 18), ctypes.c_void_p()
host, device = ctypes.c_void_p(), ctypes.c_uint64()
call("cuStreamCreate", ctypes.byref(stream), 1)
call("cuMemAllocHost_v2", ctypes.byref(host), size)
call("cuMemAlloc_v2", ctypes.byref(device), size)
while True:
    for _ in range(8):
        if sys.argv[1] == "in":
            call("cuMemcpyHtoDAsync_v2", device, host, size, stream)
        else:
            call("cuMemcpyDtoHAsync_v2", host, device, size, stream)
    call("cuStreamSynchronize", stream)
"#;

/// What a tenant has copied in one direction, in bytes, and whether it is limited.
fn copied(tenant: &Value, way: &str) -> (u64, bool) {
    let copying = &tenant["domains"][0]["copies"][way];
    let bytes = copying["bytes"].as_u64().unwrap_or(0);
    (bytes, copying["limit"].is_u64())
}

/// Both copy so many bytes more together; returns the part of the first.
fn part(node: &Node, way: &str, bytes: u64) -> f64 {
    let now = || {
        let all = node.ps();
        let all = all["tenants"].as_array().expect("tenants");
        let of = |name: &str| {
            let own = all.iter().find(|it| it["name"] == name).expect("it runs");
            copied(own, way).0
        };
        [of("one"), of("two")]
    };
    let before = now();
    wait_for("copies", PATIENCE, || {
        let after = now();
        let [one, two] = [0, 1].map(|n| (after[n] - before[n]) as f64);
        (one + two >= bytes as f64).then_some(one / (one + two))
    })
}

#[test]
fn copies_follow_guarantees_until_one_copies_alone() {
    for (argument, way) in [("in", "to_device"), ("out", "to_host")] {
        let node = node();
        let Some(program) = python(&node, COPIES) else {
            return;
        };
        let start = |options: &str| {
            Process::start(&mut node.tenant(options, &format!("{program} {argument}")))
        };
        let one = start("--name one --guaranteed 0.75");
        let _two = start("--name two --guaranteed 0.25");
        node.wait_tenant("two", |it| copied(it, way).1);
        let part = part(&node, way, 120_000_000);
        assert!((0.65..0.85).contains(&part), "{part} {way}");
        let explained = node.gpumux(["explain", "two"]).run().ok().out;
        assert!(explained.contains("it copies"), "{explained}");
        one.kill();
        node.wait_tenant("two", |it| !copied(it, way).1);
    }
}

/// Every kind of call, with what it is to count.
const EVERY: &str = r#"
context = use_device()
K, size = 1024, ctypes.c_size_t(128 << 10)
stream, graph = ctypes.c_void_p(), ctypes.c_void_p()
pinned, plain = ctypes.c_void_p(), ctypes.create_string_buffer(128 << 10)
one, two = ctypes.c_uint64(), ctypes.c_uint64()
call("cuStreamCreate", ctypes.byref(stream), 1)
call("cuMemAllocHost_v2", ctypes.byref(pinned), size)
for at in (one, two):
    call("cuMemAlloc_v2", ctypes.byref(at), size)
address = ctypes.c_uint64(pinned.value)
class Plane(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in "x y kind host device array pitch X Y Kind Host Device Array Pitch width height".split()]
def plane(**values):
    return ctypes.byref(Plane(width=1024, height=128, pitch=1024, Pitch=1024, **values))
input()
# To the device: 5.
call("cuMemcpyHtoD_v2", one, plain, size)
call("cuMemcpyHtoDAsync_v2", one, pinned, size, stream)
call("cuMemcpyAsync", one, address, size, stream)
call("cuMemcpy", one, address, size)
call("cuMemcpy2D_v2", plane(kind=1, host=pinned.value, Kind=2, Device=one.value))
# To the host: 4.
call("cuMemcpyDtoH_v2", plain, one, size)
call("cuMemcpyDtoHAsync_v2", pinned, one, size, stream)
call("cuMemcpyAsync", address, one, size, stream)
call("cuMemcpy2DAsync_v2", plane(kind=2, device=one.value, Kind=1, Host=pinned.value), stream)
# Neither.
call("cuMemcpyDtoD_v2", two, one, size)
call("cuMemcpyAsync", two, one, size, stream)
call("cuStreamBeginCapture_v2", stream, 0)
call("cuMemcpyHtoDAsync_v2", one, pinned, size, stream)
call("cuStreamEndCapture", stream, ctypes.byref(graph))
call("cuCtxSynchronize")
input()
"#;

#[test]
fn every_copy_between_host_and_device_is_counted() {
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
    let found = node.wait_tenant("one", |it| counts(it) >= [5 * SIZE, 4 * SIZE]);
    assert_eq!(counts(&found), [5 * SIZE, 4 * SIZE]);
}
