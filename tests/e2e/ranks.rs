//! Jobs with more ranks than devices, and what NCCL reports of collectives.

use gpumux_tests::{Node, PATIENCE, Process, Run, wait_for};

use crate::memory::python;

/// Prints which rank it is, the device that it has, how many it sees, MiB of its memory, its part of the SMs, and `LOCAL_RANK`.
const RANK: &str = r#"
import os, sys
count, size, uuid = ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(16)
call("cuDeviceGetCount", ctypes.byref(count))
use_device()
call("cuDeviceTotalMem_v2", ctypes.byref(size), 0)
call("cuDeviceGetUuid_v2", uuid, 0)
free, total = ctypes.c_size_t(), ctypes.c_size_t()
call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
assert free.value <= total.value == size.value, (free.value, total.value, size.value)
percent = os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "100")
print(os.environ.get("RANK"), uuid.raw.hex(), count.value, size.value >> 20, percent, os.environ.get("LOCAL_RANK"), flush=True)
sys.stdin.read()
"#;

#[test]
fn each_rank_has_a_device_and_a_part_of_its_sms_and_memory() {
    let Some(node) = Node::with_two_devices() else {
        return;
    };
    let Some(program) = python(&node, RANK) else {
        return;
    };
    let mut alone = Process::start(&mut node.tenant("--name alone --gpu 0", &program));
    alone.wait_lines(1);
    let whole: u64 = alone.out().split(' ').nth(3).unwrap().parse().unwrap();
    drop(alone);
    wait_for("its end", PATIENCE, || {
        node.find_tenant("alone").is_none().then_some(())
    });
    let options = "--name job --class batch --trust team --ranks-per-gpu 2";
    let mut job = node.tenant(options, "sh -c");
    // As torchrun starts them.
    let start = format!("RANK=$i LOCAL_RANK=$i {program} <&3 &");
    job.arg(format!(
        "exec 3<&0; for i in 0 1 2 3; do {start} done; wait"
    ));
    let mut job = Process::start(&mut job);
    job.wait_lines(4);
    let (out, err) = (job.out(), job.err());
    let mut ranks: Vec<Vec<&str>> = out.lines().map(|it| it.split(' ').collect()).collect();
    ranks.sort_unstable();
    for (number, rank) in ranks.iter().enumerate() {
        assert_eq!(rank[0], number.to_string(), "{ranks:?}");
        assert_eq!(rank[1], ranks[number % 2][1], "{ranks:?}");
        assert_eq!([rank[2], rank[4], rank[5]], ["1", "50", "0"], "{ranks:?}");
        let shown: u64 = rank[3].parse().unwrap();
        assert!(
            (whole / 2 - 1..=whole / 2).contains(&shown),
            "{whole} {shown}"
        );
    }
    assert_ne!(ranks[0][1], ranks[1][1], "two devices");
    for set in [
        "NCCL_MULTI_RANK_GPU_ENABLE=1",
        "NCCL_NVLS_ENABLE=0",
        "NCCL_MAX_CTAS=",
    ] {
        assert!(err.contains(set), "{err}");
    }
    let all = |tenant: &serde_json::Value| tenant["domains"].as_array().map(Vec::len) == Some(4);
    let placement = node.wait_tenant("job", all)["placement"].clone();
    assert_eq!(
        (&placement["way"], &placement["ranks_per_gpu"]),
        (&"space".into(), &2.into())
    );
    let text = node.gpumux(["explain", "job"]).run().ok().out;
    assert!(text.contains("2 of its ranks share each GPU"), "{text}");
}

#[test]
fn ranks_that_share_a_device_are_refused_without_a_group() {
    let node = Node::start();
    let none = node.tenant("--ranks-per-gpu 2", "true").run();
    assert!(none.code() != 0 && none.err.contains("--trust"), "{none:?}");
    let options = "--name job --ranks-per-gpu 2 --trust team --sharing time";
    let time = node.tenant(options, "true").run();
    assert!(
        time.code() == 2 && time.err.contains("--sharing time"),
        "{time:?}"
    );
}

/// What a program that starts a tenant has in its environment, and what that tenant has.
#[test]
fn tenant_of_a_rank_has_nccl_settings_of_its_own() {
    let node = Node::start();
    let own = gpumux_tests::binary().display().to_string();
    let options = "--name job --trust team --ranks-per-gpu 3";
    let mut job = node.tenant(options, "sh -c");
    job.env("NCCL_NVLS_ENABLE", "1");
    let command = format!("env; echo inner; {own} run --name inner -- env");
    let job = job.arg(command).run().ok();
    let (outer, inner) = job.out.split_once("inner\n").expect("both have run");
    let has = |text: &str, name: &str| text.lines().any(|line| line.starts_with(name));
    for name in ["NCCL_MAX_CTAS=", "NCCL_MULTI_RANK_GPU_ENABLE=1"] {
        assert!(has(outer, name) && !has(inner, name), "{name}: {job:?}");
    }
    // The user's own.
    assert!(has(outer, "NCCL_NVLS_ENABLE=1") && has(inner, "NCCL_NVLS_ENABLE=1"));
    assert!(job.err.contains("NCCL supports 2 ranks"), "{job:?}");
}

#[test]
fn limit_that_is_not_set_is_not_booked() {
    let node = Node::start();
    let blocks = |name: &str, options: &str, set: Option<&str>| {
        let options = format!("--name {name} --trust team --sharing space {options}");
        let mut run = node.tenant(&options, "gpumux scratch");
        run.env_remove("NCCL_MAX_CTAS");
        run.envs(set.map(|it| ("NCCL_MAX_NCHANNELS", it)));
        let process = Process::start(&mut run);
        let placed = node.wait_tenant(name, |it| it["domains"][0].is_object());
        (process, placed["placement"]["max_ctas"].as_u64())
    };
    let (_left, left) = blocks("left", "--frameworks leave", None);
    let (_given, given) = blocks("given", "", Some("8"));
    let (_adapted, adapted) = blocks("adapted", "", None);
    assert_eq!((left, given), (None, Some(8)));
    // Half of what 32 and 8 leave of three quarters of 132 SMs.
    assert_eq!(adapted, Some(29));
}

/// Does with the library what NCCL 2.28 does: opens it, and reports a communicator of four ranks, calls and a launch, once it gets a line. The
/// kernel spins until it gets another.
const NCCL: &str = r#"
import os, sys
class Event(ctypes.Structure):
    _fields_ = [("type", ctypes.c_uint64), ("parent", ctypes.c_void_p), ("rank", ctypes.c_int)]
class Collective(Event):
    _fields_ = [("func", ctypes.c_char_p), ("count", ctypes.c_size_t), ("datatype", ctypes.c_char_p), ("root", ctypes.c_int),
                ("stream", ctypes.c_void_p), ("captured", ctypes.c_bool)]
class PointToPoint(Event):
    _fields_ = [("func", ctypes.c_char_p), ("count", ctypes.c_size_t), ("datatype", ctypes.c_char_p), ("stream", ctypes.c_void_p),
                ("captured", ctypes.c_bool)]
class Launch(Event):
    _fields_ = [("stream", ctypes.c_void_p)]
class Profiler(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p)] + [(name, ctypes.c_void_p) for name in ("init", "start", "stop", "record", "finalize")]
pointer = ctypes.c_void_p
use_device()
it = Profiler.in_dll(ctypes.CDLL(os.environ["NCCL_PROFILER_PLUGIN"]), "ncclProfiler_v5")
init = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(pointer), ctypes.c_uint64, ctypes.POINTER(ctypes.c_int), ctypes.c_char_p,
                        ctypes.c_int, ctypes.c_int, ctypes.c_int, pointer)(it.init)
start = ctypes.CFUNCTYPE(ctypes.c_int, pointer, ctypes.POINTER(pointer), pointer)(it.start)
stop = ctypes.CFUNCTYPE(ctypes.c_int, pointer)(it.stop)
finalize = ctypes.CFUNCTYPE(ctypes.c_int, pointer)(it.finalize)
context, mask = pointer(), ctypes.c_int()
assert init(ctypes.byref(context), 7, ctypes.byref(mask), b"comm", 1, 4, 0, None) == 0
assert mask.value == 0xe00 and it.name == b"gpumux", (mask.value, it.name)
def event(made):
    handle = pointer(123)
    assert start(context, ctypes.byref(handle), ctypes.byref(made)) == 0
    return handle
def call_of(made):
    assert event(made).value is None
stream = pointer()
call("cuStreamCreate", ctypes.byref(stream), 1)
sys.stdin.readline()
call_of(Event(1 << 8, None, 0))
call_of(Collective(1 << 9, None, 0, b"AllReduce", 1000, b"ncclFloat32", 0, stream, False))
call_of(Collective(1 << 9, None, 0, b"AllReduce", 1000, b"ncclFloat32", 0, stream, True))
call_of(PointToPoint(1 << 10, None, 0, b"Send", 24, b"ncclBfloat16", stream, False))
call_of(PointToPoint(1 << 10, None, 0, b"Recv", 24, b"ncclBfloat16", stream, False))
PTX = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry spin(.param .u64 at)
{
    .reg .u32 %value;
    .reg .u64 %at;
    .reg .pred %go;
    ld.param.u64 %at, [at];
again:
    ld.volatile.global.u32 %value, [%at];
    setp.eq.u32 %go, %value, 0;
    @%go bra again;
    ret;
}
"""
module, spin, host, device = pointer(), pointer(), pointer(), ctypes.c_uint64()
call("cuModuleLoadData", ctypes.byref(module), PTX)
call("cuModuleGetFunction", ctypes.byref(spin), module, b"spin")
call("cuMemHostAlloc", ctypes.byref(host), ctypes.c_size_t(4), 2)
flag = ctypes.c_uint32.from_address(host.value)
flag.value = 0
call("cuMemHostGetDevicePointer_v2", ctypes.byref(device), host, 0)
handle = event(Launch(1 << 11, None, 0, stream))
arguments = (pointer * 1)(ctypes.addressof(device))
call("cuLaunchKernel", spin, 1, 1, 1, 1, 1, 1, 0, stream, arguments, None)
assert handle.value and stop(handle) == 0
print("launched", flush=True)
sys.stdin.readline()
flag.value = 1
call("cuStreamSynchronize", stream)
assert stop(None) == 0 and finalize(context) == 0
print("done", flush=True)
sys.stdin.readline()
"#;

#[test]
fn collectives_that_nccl_reports_are_counted() {
    let node = Node::start();
    let Some(program) = python(&node, NCCL) else {
        return;
    };
    let mut process = Process::start(&mut node.tenant("--name job", &program));
    // What was called before the daemon has the group is not counted.
    node.wait_tenant("job", |it| it["domains"][0].is_object());
    process.write("begin\n");
    process.wait_lines(1);
    let figures = |in_progress: bool| {
        let tenant = node.wait_tenant("job", |it| it["collectives"]["in_progress"] == in_progress);
        let of = |name: &str| tenant["collectives"][name].as_u64().unwrap();
        (of("calls"), of("bytes"))
    };
    // Each of four ranks sends 3/2 of the 4000 bytes of a sum; and 48 to another. What is captured is not called.
    assert_eq!(figures(true), (3, 6000 + 48));
    let text = || node.gpumux(["explain", "job"]).run().ok().out;
    assert!(
        text().contains("in 3 collectives") && text().contains("one is in progress"),
        "{}",
        text()
    );
    process.write("end\n");
    process.wait_lines(2);
    assert_eq!(figures(false), (3, 6000 + 48));
    assert!(text().contains("none is in progress"), "{}", text());
}
