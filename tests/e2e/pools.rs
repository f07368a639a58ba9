//! Pools of stream-ordered memory, accounted as the device has them.

use gpumux_tests::{Node, PATIENCE, Process, Run, wait_for};
use serde_json::Value;

use crate::memory::python;

/// Random calls of pools: of the device's own, of others, and of a second context that ends, which the pools outlive. Then prints
/// what the pools have.
const PROGRAM: &str = r#"
import random, sys
random.seed(int(sys.argv[1]))
use_device()
first, device = ctypes.c_void_p(), 0
call("cuCtxGetCurrent", ctypes.byref(first))
# A part that moves: only then everything that is not used is given back.
plain = ctypes.c_uint64()
call("cuMemAlloc_v2", ctypes.byref(plain), ctypes.c_size_t(20 << 20))
own = ctypes.c_void_p()
call("cuDeviceGetDefaultMemPool", ctypes.byref(own), device)
call("cuMemPoolSetAttribute", own, 4, ctypes.byref(ctypes.c_uint64(2**64 - 1)))
pools, made, second = [own.value], [], None
def alloc():
    at, size = ctypes.c_uint64(), 512 * random.randrange(1, 2 * 40960)
    pool = random.choice(pools)
    call("cuMemAllocFromPoolAsync", ctypes.byref(at), ctypes.c_size_t(size), ctypes.c_void_p(pool), None)
    made.append((at.value, pool))
def free():
    if made:
        at, _ = made.pop(random.randrange(len(made)))
        call("cuMemFreeAsync", ctypes.c_uint64(at), None)
def create():
    if len(pools) < 4:
        properties, pool = (ctypes.c_int * 32)(1, 0, 1, device), ctypes.c_void_p()
        call("cuMemPoolCreate", ctypes.byref(pool), properties)
        if random.random() < 0.5:
            call("cuMemPoolSetAttribute", pool, 4, ctypes.byref(ctypes.c_uint64(2**64 - 1)))
        pools.append(pool.value)
def destroy():
    unused = [it for it in pools[1:] if all(it != pool for _, pool in made)]
    if unused:
        gone = random.choice(unused)
        pools.remove(gone)
        call("cuMemPoolDestroy", ctypes.c_void_p(gone))
def trim():
    call("cuMemPoolTrimTo", ctypes.c_void_p(random.choice(pools)), ctypes.c_size_t(0))
def wait():
    call("cuCtxSynchronize")
def change_context():
    global second
    if second is None:
        made_context = ctypes.c_void_p()
        call("cuCtxCreate_v2", ctypes.byref(made_context), 0, device)
        second = made_context.value
    else:
        call("cuCtxDestroy_v2", ctypes.c_void_p(second))
        second = None
        call("cuCtxSetCurrent", first)
steps = [alloc] * 6 + [free] * 5 + [create, destroy, trim, wait, change_context]
for line in sys.stdin:
    if line == "go\n":
        for _ in range(60):
            random.choice(steps)()
        call("cuCtxSynchronize")
        print("done", flush=True)
    else:
        reserved = 0
        for pool in pools:
            value = ctypes.c_uint64()
            call("cuMemPoolGetAttribute", ctypes.c_void_p(pool), 5, ctypes.byref(value))
            reserved += value.value
        print(reserved, flush=True)
"#;

#[test]
fn pools_are_accounted_as_the_device_has_them() {
    for seed in 1..=4 {
        let node = Node::start();
        let Some(command) = python(&node, PROGRAM) else {
            return;
        };
        let command = format!("{command} {seed}");
        let mut program = Process::start(&mut node.tenant("--name pools", &command));
        for round in 0..5 {
            program.write("go\n");
            program.wait_lines(2 * round + 1);
            wait_for("it is moved", PATIENCE, || {
                let slept = node.gpumux(["sleep", "pools"]).run();
                slept.status.success().then_some(())
            });
            // To ask a pool wakes nothing.
            program.write("count\n");
            program.wait_lines(2 * round + 2);
            let out = program.out();
            let reserved: u64 = out.lines().last().unwrap().parse().unwrap();
            let tenant = node.find_tenant("pools").expect("it runs");
            let memory = &tenant["memory"][0];
            let accounted = memory["in_use"].as_u64().unwrap();
            assert_eq!(
                accounted, reserved,
                "seed {seed}, round {round}: {memory:#}"
            );
        }
        program.close_input();
        program.finish().ok();
    }
}

/// The pool's device need not be the current one.
#[test]
fn pool_counts_on_its_own_device() {
    const PROGRAM: &str = r#"
import sys, uuid
use_device()
at, pool, name = ctypes.c_uint64(), ctypes.c_void_p(), (ctypes.c_ubyte * 16)()
call("cuDeviceGetUuid", name, 1)
if sys.argv[1] == "made":
    properties = (ctypes.c_int * 32)(1, 0, 1, 1)
    call("cuMemPoolCreate", ctypes.byref(pool), properties)
else:
    call("cuDeviceGetDefaultMemPool", ctypes.byref(pool), 1)
call("cuMemAllocFromPoolAsync", ctypes.byref(at), ctypes.c_size_t(40 << 20), pool, None)
print(f"GPU-{uuid.UUID(bytes=bytes(name))}", flush=True)
sys.stdin.read()
"#;
    for kind in ["made", "default"] {
        let Some(node) = Node::with_two_devices() else {
            return;
        };
        let Some(command) = python(&node, PROGRAM) else {
            return;
        };
        let mut program =
            Process::start(&mut node.tenant("--name pools", &format!("{command} {kind}")));
        program.wait_lines(1);
        let second = program.out();
        let tenant = node.wait_tenant("pools", |it| {
            let memory = it["memory"].as_array().expect("an array");
            memory
                .iter()
                .any(|it| it["pinned"].as_u64() >= Some(40 << 20))
        });
        let memory = tenant["memory"].as_array().expect("an array");
        let pinned = memory.iter().filter(|it| it["pinned"].as_u64() > Some(0));
        let found: Vec<&str> = pinned.filter_map(|it| it["device"].as_str()).collect();
        assert_eq!(found, [second.trim_end()], "{kind}: {tenant:#}");
        program.close_input();
        program.finish().ok();
    }
}

/// A graph that allocates when it runs, by capture or by nodes: it fills its memory and copies a part to memory of the program.
const GRAPH: &str = r#"
import sys
MIB = 1 << 20
use_device()
at, plain = ctypes.c_uint64(), ctypes.c_uint64()
stream, graph, run = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
call("cuMemAlloc_v2", ctypes.byref(plain), ctypes.c_size_t(20 * MIB))
call("cuStreamCreate", ctypes.byref(stream), 1)
if sys.argv[1] == "captured":
    call("cuStreamBeginCapture_v2", stream, 2)
    call("cuMemAllocAsync", ctypes.byref(at), ctypes.c_size_t(64 * MIB), stream)
    call("cuMemsetD32Async", at, 7, ctypes.c_size_t(16 * MIB), stream)
    call("cuMemcpyDtoDAsync_v2", plain, ctypes.c_uint64(at.value + 63 * MIB), ctypes.c_size_t(MIB), stream)
    call("cuMemFreeAsync", at, stream)
    call("cuStreamEndCapture", stream, ctypes.byref(graph))
else:
    # Pinned memory of device 0.
    words = (ctypes.c_uint64 * 15)()
    ctypes.cast(words, ctypes.POINTER(ctypes.c_int))[0] = 1
    ctypes.cast(words, ctypes.POINTER(ctypes.c_int))[2] = 1
    words[13] = 64 * MIB
    node, free = ctypes.c_void_p(), ctypes.c_void_p()
    call("cuGraphCreate", ctypes.byref(graph), 0)
    call("cuGraphAddMemAllocNode", ctypes.byref(node), graph, None, ctypes.c_size_t(0), words)
    class Set(ctypes.Structure):
        _fields_ = [("to", ctypes.c_uint64), ("pitch", ctypes.c_size_t), ("value", ctypes.c_uint), ("size", ctypes.c_uint),
                    ("width", ctypes.c_size_t), ("height", ctypes.c_size_t)]
    filled, context = ctypes.c_void_p(), ctypes.c_void_p()
    call("cuCtxGetCurrent", ctypes.byref(context))
    fill = Set(words[14], 0, 7, 4, 16 * MIB, 1)
    call("cuGraphAddMemsetNode", ctypes.byref(filled), graph, ctypes.byref(node), ctypes.c_size_t(1), ctypes.byref(fill), context)
    call("cuGraphAddMemFreeNode", ctypes.byref(free), graph, ctypes.byref(filled), ctypes.c_size_t(1), ctypes.c_uint64(words[14]))
call("cuGraphInstantiateWithFlags", ctypes.byref(run), graph, ctypes.c_uint64(0))
print("ready", flush=True)
for line in sys.stdin:
    call("cuMemsetD32_v2", plain, 0, ctypes.c_size_t(5 * MIB))
    call("cuGraphLaunch", run, stream)
    call("cuStreamSynchronize", stream)
    value = ctypes.c_uint32()
    call("cuMemcpyDtoH_v2", ctypes.byref(value), ctypes.c_uint64(plain.value + 512), ctypes.c_size_t(4))
    assert value.value == (7 if sys.argv[1] == "captured" else 0), value.value
    print("ran", flush=True)
"#;

#[test]
fn memory_of_graphs_counts_and_is_given_back() {
    for kind in ["captured", "nodes"] {
        let node = Node::start();
        let Some(command) = python(&node, GRAPH) else {
            return;
        };
        let command = format!("{command} {kind}");
        let mut program = Process::start(&mut node.tenant("--name graphs", &command));
        program.wait_lines(1);
        let field = |it: &Value, name: &str| it["memory"][0][name].as_u64().unwrap_or(0);
        for round in 0..2 {
            program.write("go\n");
            program.wait_lines(2 + round);
            node.wait_tenant("graphs", |it| field(it, "in_use") >= 84 << 20);
            // What is not in use is given back, the rest moves.
            wait_for("it is moved", PATIENCE, || {
                node.gpumux(["sleep", "graphs"])
                    .run()
                    .status
                    .success()
                    .then_some(())
            });
            let tenant = node.find_tenant("graphs").expect("it runs");
            assert_eq!(field(&tenant, "in_use"), 0, "{kind}: {tenant:#}");
            assert!(field(&tenant, "swapped") >= 20 << 20);
        }
        program.close_input();
        program.finish().ok();
    }
}
