//! Events that processes share.

use gpumux_tests::{Node, Run};

use super::COMMON;
use crate::memory::python;

/// Events are the driver's: what one process records, another one waits for. So is memory that is left with the driver.
#[test]
fn event_of_another_process_is_waited_for() {
    const EXPORTER: &str = r#"
if len(sys.argv) > 1:
    event = ctypes.c_void_p()
    at = open_memory(sys.argv[1])
    call("cuIpcOpenEventHandle", ctypes.byref(event), Handle.from_buffer_copy(bytes.fromhex(sys.argv[2])))
    call("cuStreamWaitEvent", None, event, 0)
    call("cuMemsetD32Async", ctypes.c_uint64(at + 4), 9, ctypes.c_size_t(1), None)
    call("cuEventSynchronize", event)
    assert read(at) == 8
    call("cuCtxSynchronize")
    call("cuEventDestroy_v2", event)
    sys.exit()
event, handle = ctypes.c_void_p(), Handle()
call("cuEventCreate", ctypes.byref(event), 6)
call("cuIpcGetEventHandle", ctypes.byref(handle), event)
at = alloc(4 * MIB)
call("cuMemsetD32Async", ctypes.c_uint64(at), 8, ctypes.c_size_t(1), None)
call("cuEventRecord", event, None)
it = Child(export(at), bytes(handle).hex())
it.end()
assert (read(at), read(at + 4)) == (8, 9)
say("done")
"#;
    let node = Node::start();
    let Some(program) = python(&node, &[COMMON, EXPORTER].concat()) else {
        return;
    };
    for memory in ["", "native"] {
        let mut tenant = node.tenant("--name exporter --class batch", &program);
        let ended = tenant.env("GPUMUX_MEMORY", memory).run().ok();
        assert_eq!(ended.out, "done\n");
        assert_eq!(ended.err.contains("same tenant"), memory.is_empty());
    }
}
