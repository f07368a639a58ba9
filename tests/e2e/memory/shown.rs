//! What programs are shown of a device's memory, by which engines size themselves.

use super::*;

/// For each line that it reads, prints the capacity in MiB: by the driver's total, by NVML's two calls, and by free memory's total, the last
/// only with a context. Then what is free and used by NVML.
const PROGRAM: &str = r#"
import sys
nvml = ctypes.CDLL("libnvidia-ml.so.1")
assert nvml.nvmlInit_v2() == 0
class Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]
class MemoryV2(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint)] + [(name, ctypes.c_ulonglong) for name in ("total", "reserved", "free", "used")]
handle = ctypes.c_void_p()
assert nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle)) == 0
def look(context):
    size, free, total = ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_size_t()
    call("cuDeviceTotalMem_v2", ctypes.byref(size), 0)
    memory, exact = Memory(), MemoryV2(ctypes.sizeof(MemoryV2) | 2 << 24)
    assert nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0
    assert nvml.nvmlDeviceGetMemoryInfo_v2(handle, ctypes.byref(exact)) == 0
    assert memory.free + memory.used == memory.total
    assert exact.free + exact.used + exact.reserved == exact.total
    seen = [size.value, memory.total, exact.total]
    if context:
        call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        seen.append(total.value)
        assert free.value == memory.free == exact.free
    print(*(it >> 20 for it in seen), flush=True)
print("ready", flush=True)
context = None
for line in sys.stdin:
    if line.strip() == "context":
        context = use_device()
    look(context)
"#;

/// A program that answers with the capacity that it was shown by every call.
struct Asker(Process);

impl Asker {
    fn start(node: &Node, name: &str) -> Option<Self> {
        let command = python(node, PROGRAM)?;
        let mut process = Process::start(&mut node.tenant(&format!("--name {name}"), &command));
        process.next_line();
        Some(Self(process))
    }

    /// The capacity: the same by every call, though NVML's own total of a device is more than the driver's.
    #[track_caller]
    fn ask(&mut self, what: &str) -> u64 {
        self.0.write(&format!("{what}\n"));
        let line = self.0.next_line();
        let seen: Vec<u64> = line.split(' ').map(|it| it.parse().unwrap()).collect();
        assert!(seen.iter().all(|it| *it == seen[0]), "{line}");
        seen[0]
    }
}

#[test]
fn servers_that_start_together_are_shown_equal_parts() {
    let mut node = Node::start();
    let Some(alone) = Asker::start(&node, "alone").map(|mut it| it.ask("look")) else {
        return;
    };
    let names = ["a", "b", "c", "d", "e", "f"];
    let mut all: Vec<Asker> = (names.iter())
        .map(|name| Asker::start(&node, name).expect("Python is there"))
        .collect();
    // Half of them ask before they have a context.
    let first: Vec<u64> = (all.iter_mut().enumerate())
        .map(|(n, it)| it.ask(if n % 2 == 0 { "context" } else { "look" }))
        .collect();
    for shown in &first {
        assert!(
            *shown <= alone / 6 && *shown > alone / 8,
            "{first:?} of {alone}"
        );
    }
    let again: Vec<u64> = all.iter_mut().map(|it| it.ask("context")).collect();
    assert_eq!(again, first);
    // Neighbours have ended, and the daemon is another.
    all.truncate(3);
    node.kill_daemon();
    node.start_daemon();
    for name in ["a", "b", "c"] {
        node.wait_tenant(name, |it| !it["domains"][0].is_null());
    }
    let again: Vec<u64> = all.iter_mut().map(|it| it.ask("look")).collect();
    assert_eq!(again, first[..3]);
}
