//! Caches of frameworks are given back when others lack memory, without the program's doing.

use gpumux_tests::{Node, PATIENCE, Process, real};

use crate::memory::{bytes, python, takes};

/// A module that is called and behaves as PyTorch, as far as its cache is concerned.
const PROGRAM: &str = r#"
import sys, time, types
context, cache = use_device(), []
def empty_cache():
    call("cuCtxSetCurrent", context)
    while cache:
        call("cuMemFree_v2", cache.pop())
torch = sys.modules["torch"] = types.ModuleType("torch")
torch.cuda = types.SimpleNamespace(empty_cache=empty_cache, memory_reserved=lambda device: len(cache) * (16 << 20))
names = set(globals())
for _ in range(10):
    address = ctypes.c_uint64()
    call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(16 << 20))
    cache.append(address)
assert set(globals()) - names == {"names", "address", "_"}, set(globals()) - names
print("there", flush=True)
sys.stdin.readline()
print("kept" if cache else "given back", flush=True)
"#;

/// What becomes of the cache when another tenant needs its memory, how much is copied to the host, and whether there was no reason for
/// more.
fn cache(options: &str) -> Option<(String, u64, bool)> {
    if real() {
        eprintln!("SKIPPED: the device is too large to fill in a test");
        return None;
    }
    let node = Node::with_memory(256 << 20);
    let program = python(&node, PROGRAM)?;
    let mut cache = Process::start(&mut node.tenant(&format!("--name cache {options}"), &program));
    cache.wait_lines(1);
    node.wait_tenant("cache", |it| bytes(it, "in_use") >= 160 << 20);
    let (_second, in_time) = takes(&node, "second", 128);
    let tenant = node.find_tenant("cache").expect("it is there");
    let copied = tenant["moves"]["out_bytes"].as_u64().expect("a number");
    cache.write("\n");
    let out = cache.finish_within(PATIENCE).ok().out;
    Some((
        out.lines().last().unwrap_or_default().to_owned(),
        copied,
        in_time,
    ))
}

#[test]
fn pytorch_s_cache_is_given_back_and_not_copied() {
    if let Some((what, copied, in_time)) = cache("") {
        assert_eq!(what, "given back");
        assert!(copied == 0 || !in_time, "{copied}");
    }
}

#[test]
fn pytorch_s_cache_stays_where_its_user_says_so() {
    if let Some((what, copied, _)) = cache("--frameworks leave") {
        assert_eq!(what, "kept");
        assert!(copied >= 16 << 20, "{copied}");
    }
}
