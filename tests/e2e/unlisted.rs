//! What a newer driver has and the list of entry points lacks: `cuMemcpyFutureAsync`, which only the emulated device has, stands for it.

use gpumux_tests::{Node, Process, Run};
use serde_json::Value;

use crate::memory::python;

fn bytes(tenant: &Value, field: &str) -> u64 {
    let memory = tenant["memory"].as_array().expect("an array");
    memory.iter().filter_map(|it| it[field].as_u64()).sum()
}

/// To look it up changes nothing; with the first call memory stays, work counts as unfinished, and people are notified.
#[test]
fn unlisted_call_keeps_memory_on_the_device() {
    const PROGRAM: &str = r#"
import sys
use_device()
size = ctypes.c_size_t(64 << 20)
at = ctypes.c_uint64()
call("cuMemAlloc_v2", ctypes.byref(at), size)
call("cuMemsetD8_v2", at, ctypes.c_ubyte(7), size)
cuda.cuMemcpyFutureAsync
print("ready", flush=True)
sys.stdin.readline()
half = ctypes.c_size_t(32 << 20)
call("cuMemcpyFutureAsync", ctypes.c_uint64(at.value + half.value), at, half, None)
call("cuCtxSynchronize")
# What is allocated afterwards stays, too.
call("cuMemAlloc_v2", ctypes.byref(ctypes.c_uint64()), size)
print("called", flush=True)
sys.stdin.readline()
byte = (ctypes.c_ubyte * 1)()
call("cuMemcpyDtoH_v2", byte, ctypes.c_uint64(at.value + (64 << 20) - 1), ctypes.c_size_t(1))
assert byte[0] == 7
"#;
    let node = Node::start();
    let Some(program) = python(&node, PROGRAM) else {
        return;
    };
    let mut holder = Process::start(&mut node.tenant("--name future", &program));
    holder.wait_lines(1);
    node.gpumux(["sleep", "future"]).run().ok();
    let asleep = node.wait_tenant("future", |it| bytes(it, "swapped") >= 64 << 20);
    assert_eq!(
        asleep["unlisted_calls"],
        serde_json::json!([]),
        "{asleep:#}"
    );
    // The call comes while its memory is on the host: it waits for that.
    holder.write("call\n");
    holder.wait_lines(2);
    let tenant = node.wait_tenant("future", |it| {
        it["unlisted_calls"] == serde_json::json!(["cuMemcpyFutureAsync"])
    });
    assert_eq!(bytes(&tenant, "swapped"), 0, "{tenant:#}");
    assert!(bytes(&tenant, "pinned") >= 128 << 20, "{tenant:#}");
    assert_eq!(tenant["state"], "running", "{tenant:#}");
    let _ = node.gpumux(["sleep", "future"]).run();
    let tenant = node.find_tenant("future").expect("it lives");
    assert_eq!(bytes(&tenant, "swapped"), 0, "{tenant:#}");
    let explained = node.gpumux(["explain", "future"]).run().ok().out;
    assert!(
        explained.contains("called cuMemcpyFutureAsync"),
        "{explained}"
    );
    holder.write("end\n");
    let finished = holder.finish();
    let told = finished
        .err
        .matches("cuMemcpyFutureAsync is unknown")
        .count();
    assert_eq!(told, 1, "{}", finished.err);
}
