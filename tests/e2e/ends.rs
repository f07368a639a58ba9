//! The driver frees the memory of a process only some time after its end: allocations that the accounting has room for wait for that.

use gpumux_tests::{Node, Options, Process, real};
use rustix::process::Signal;

use crate::memory::python;

/// Takes so many MiB by each of these calls, says so, and gives it back unless it is to keep it.
const PROGRAM: &str = r#"
import sys
context = use_device()
class Location(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int), ("id", ctypes.c_int)]
class Properties(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int), ("handles", ctypes.c_int), ("location", Location), ("win32", ctypes.c_void_p), ("flags", ctypes.c_uint8 * 8)]
def allocate(size):
    call("cuMemAlloc_v2", ctypes.byref(at), size)
    return "cuMemFree_v2"
def create(size):
    properties = Properties(kind=1, location=Location(1, 0))
    call("cuMemCreate", ctypes.byref(at), size, ctypes.byref(properties), ctypes.c_ulonglong(0))
    return "cuMemRelease"
def managed(size):
    call("cuMemAllocManaged", ctypes.byref(at), size, 1)
    return "cuMemFree_v2"
at = ctypes.c_uint64()
print("there", flush=True)
for line in sys.stdin:
    do, size, *keep = line.split()
    free = globals()[do](ctypes.c_size_t(int(size) << 20))
    if not keep:
        call(free, at)
    print("done", flush=True)
"#;

/// A tenant that is guaranteed 224 of 320 MiB asks for 190 just after the end of another that has as much.
#[test]
fn allocation_waits_until_an_ended_process_is_freed() {
    if real() {
        eprintln!("SKIPPED: the device is too large to fill in a test");
        return;
    }
    let node = Node::with(Options {
        memory: 320 << 20,
        profile: "release_ms = 2000",
        ..Options::default()
    });
    let Some(program) = python(&node, PROGRAM) else {
        return;
    };
    let start = |options: &str| {
        let mut process = Process::start(&mut node.tenant(options, &program));
        process.wait_lines(1);
        process
    };
    let mut owner = start("--name owner --memory-guaranteed 224MiB");
    for call in ["allocate", "create", "managed"] {
        let mut borrower = start(&format!("--name {call}"));
        borrower.write("allocate 190 keep\n");
        borrower.wait_lines(2);
        borrower.signal(Signal::KILL);
        let lines = owner.lines();
        owner.write(&format!("{call} 190\n"));
        owner.wait_lines(lines + 1);
    }
}
