//! A daemon that is there and does nothing: the processes free themselves, and are managed again when it goes on.

use std::{
    io::{Read, Write},
    os::unix::net::UnixStream,
};

use gpumux_tests::{Node, PATIENCE, Process, Run, wait_for};
use rustix::process::Signal;
use serde_json::Value;

use crate::{REQUESTS, TICKS, memory::python};

fn freezes(tenant: &Value) -> Option<u64> {
    tenant["domains"][0]["freezes"].as_u64()
}

#[test]
fn stopped_daemon_leaves_no_tenant_frozen_and_controls_again() {
    let node = Node::start();
    let serve = Process::start(&mut node.tenant("--name serve --class latency", REQUESTS));
    let names = ["b0", "b1", "b2"];
    let batch = names.map(|name| {
        Process::start(&mut node.tenant(&format!("--name {name} --class batch"), TICKS))
    });
    // They take turns: when the daemon stops, all but one of them are frozen.
    for name in names {
        node.wait_tenant(name, |tenant| freezes(tenant) > Some(2));
    }
    // On a slow machine, some may have freed themselves already, and print it once.
    let expired_before = expiries(&node);
    let freed = |it: &&Process| it.err().contains("stands still");
    let all = || batch.iter().chain([&serve]);
    let already = all().filter(freed).count();
    node.daemon().signal(Signal::STOP);
    let before: Vec<usize> = batch.iter().map(Process::lines).collect();
    for (process, before) in batch.iter().zip(before) {
        wait_for("a tenant of a stopped daemon to run", PATIENCE, || {
            (process.lines() > before + 50).then_some(())
        });
    }
    wait_for("all to have freed themselves", PATIENCE, || {
        all().all(|it| freed(&it)).then_some(())
    });
    node.daemon().signal(Signal::CONT);
    for name in names {
        node.wait_tenant(name, |tenant| freezes(tenant) > Some(2));
    }
    node.wait_tenant("serve", |tenant| {
        tenant["domains"][0]["timeslice_us"] == 1_000_000
    });
    let expired = expiries(&node) - expired_before;
    assert!(expired >= (4 - already) as u64, "{expired}");
}

/// How often processes have freed themselves.
fn expiries(node: &Node) -> u64 {
    let mut api = UnixStream::connect(node.api_socket()).unwrap();
    api.write_all(b"GET /v1/status HTTP/1.0\r\nhost: gpumux\r\n\r\n")
        .unwrap();
    let mut answer = String::new();
    api.read_to_string(&mut answer).unwrap();
    let (_, body) = answer.split_once("\r\n\r\n").unwrap();
    let status: Value = serde_json::from_str(body).unwrap();
    status["scheduler"]["lease_expiries"].as_u64().unwrap()
}

#[test]
fn sleeping_tenant_of_a_stopped_daemon_runs_once_memory_is_back() {
    // It makes no call while it waits: however fast the device is, it stays asleep.
    const PROGRAM: &str = r#"
use_device()
at, size = ctypes.c_uint64(), 48 << 20
call("cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(size))
call("cuMemsetD32_v2", at, 0x12345678, ctypes.c_size_t(size // 4))
call("cuCtxSynchronize")
print("written", flush=True)
input()
found = ctypes.create_string_buffer(size)
call("cuMemcpyDtoH_v2", found, at, ctypes.c_size_t(size))
assert found.raw == (0x12345678).to_bytes(4, "little") * (size // 4)
print("as it was")
"#;
    let node = Node::start();
    let Some(program) = python(&node, PROGRAM) else {
        return;
    };
    let mut sleeper = Process::start(&mut node.tenant("--name sleeper", &program));
    sleeper.wait_lines(1);
    node.wait_tenant("sleeper", |tenant| !tenant["domains"][0].is_null());
    node.gpumux(["sleep", "sleeper"]).run().ok();
    let tenant = node.find_tenant("sleeper").expect("it waits");
    assert!(
        tenant["memory"][0]["swapped"].as_u64() >= Some(48 << 20),
        "{tenant:#}"
    );
    node.daemon().signal(Signal::STOP);
    // It brings its memory back itself, and only then runs and ends: every byte is as it was.
    sleeper.write("\n");
    assert!(sleeper.finish().ok().out.contains("as it was"));
    node.daemon().signal(Signal::CONT);
    wait_for("the end of its tenant", PATIENCE, || {
        node.find_tenant("sleeper").is_none().then_some(())
    });
}
