//! What a Python program asks the daemon about itself.

use std::process::Command;

use gpumux_tests::{Node, Run};

use crate::memory::python;

#[test]
fn python_program_has_its_memory_moved_and_reads_its_limits() {
    const PROGRAM: &str = r#"
import sys
sys.path.insert(0, sys.argv[1])
import gpumux
assert gpumux.tenant() is None, "it has no context yet"
use_device()
address, size = ctypes.c_uint64(), 32 << 20
call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
call("cuMemsetD8_v2", address, 7, ctypes.c_size_t(size))
call("cuCtxSynchronize")
tenant = gpumux.tenant()
assert (tenant.name, tenant.class_, tenant.asleep) == ("itself", "latency", False), tenant
memory, = gpumux.limits()
assert (memory.guaranteed, memory.limit, memory.swapped) == (64 << 20, 96 << 20, 0) and memory.in_use >= size, memory
assert gpumux.sleep()
memory, = gpumux.limits()
assert gpumux.tenant().asleep and memory.swapped >= size and memory.in_use == 0, memory
assert gpumux.wake()
assert not gpumux.tenant().asleep and gpumux.limits()[0].swapped == 0
assert gpumux.sleep()
found = ctypes.create_string_buffer(size)
call("cuMemcpyDtoH_v2", found, address, ctypes.c_size_t(size))
assert found.raw == b"\x07" * size and gpumux.limits()[0].swapped == 0
"#;
    let node = Node::start();
    let Some(program) = python(&node, PROGRAM) else {
        return;
    };
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../python");
    let options = "--name itself --class latency --memory-guaranteed 64MiB --memory-limit 96MiB";
    let words = format!("{program} {folder}");
    node.tenant(options, &words).run().ok();
    // As in a container, where its process has another number.
    let alone = ["--pid", "--fork", "--mount-proc"];
    let may =
        (Command::new("unshare").args(alone).arg("true").status()).is_ok_and(|it| it.success());
    if !may {
        eprintln!("SKIPPED: a pid namespace of its own, since this user may make none");
        return;
    }
    let words = format!("unshare {} {words}", alone.join(" "));
    node.tenant(options, &words).run().ok();
}
