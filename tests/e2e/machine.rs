//! What goes wrong on the machine below the daemon: a driver library that does not answer, and a system time that is set.

use std::{
    fs,
    io::{Read, Write},
    os::unix::net::UnixStream,
    process::Command,
    time::{SystemTime, UNIX_EPOCH},
};

use gpumux_tests::{Node, Options, PATIENCE, Process, Run, real, wait_for};
use gpumux_wire::Shim;
use rustix::{
    fs::{CWD, Mode, mkfifoat},
    process::{Pid, Signal, kill_process},
};
use serde_json::Value;

use crate::{
    REQUESTS, TICKS, at_once,
    hostile::{Guest, daemon_serves, send},
};

fn without_daemon() -> Option<Node> {
    if real() {
        eprintln!("SKIPPED: it needs the emulated device");
        return None;
    }
    Some(Node::with(Options {
        without_daemon: true,
        ..Options::default()
    }))
}

fn start(node: &Node, name: &str) -> Process {
    let mut process =
        Process::start(&mut node.tenant(&format!("--name {name} --class batch"), TICKS));
    process.wait_lines(1);
    process
}

/// NVML stops answering at one of its calls: the first of all, or one of a later look.
#[test]
fn nvml_that_does_not_answer_stops_no_tenant() {
    at_once([1, 3], |call| {
        let Some(mut node) = without_daemon() else {
            return;
        };
        let file = node.dir().join("nvml");
        let fault = format!("delay@{call}:nvmlDeviceGetCount_v2");
        node.set_variable("GPUMUX_EMU_FAULT", fault);
        node.set_variable("GPUMUX_EMU_DELAY_FILE", &file);
        node.start_daemon();
        let old = start(&node, "old");
        wait_for("NVML to stand still", PATIENCE, || {
            file.exists().then_some(())
        });
        daemon_serves(&node, &old);
        // Memory is guaranteed, metrics are answered, and the daemon ends and begins meanwhile.
        let options = "--name guaranteed --class batch --memory-guaranteed 1GiB";
        let mut guaranteed = Process::start(&mut node.tenant(options, TICKS));
        guaranteed.wait_lines(2);
        let memory = node.gpumux(["memory", "--json"]).run().ok().json();
        let shown = &memory["devices"][0]["tenants"];
        assert!(shown.to_string().contains("guaranteed"), "{memory:#}");
        // What NVML reported before, if it ever did, is without that tenant's context.
        assert!(file.exists(), "NVML answers");
        let used = || node.get("/v1/devices")[0]["readings"]["memory_used"].clone();
        let shows = |state: &str| {
            wait_for(state, PATIENCE, || {
                (node.get("/v1/devices")[0]["state"] == state).then_some(())
            });
        };
        shows("NVML does not answer");
        let before = used();
        assert_eq!(before.is_null(), call == 1, "{before}");
        fs::remove_file(&file).unwrap();
        wait_for("what NVML reports", PATIENCE, || {
            (used() != before).then_some(())
        });
        shows("ok");
        node.stop_daemon().ok();
    });
}

/// A driver that keeps the scheduling thread in a control.
#[test]
fn control_that_hangs_stops_no_answer() {
    let Some(mut node) = without_daemon() else {
        return;
    };
    node.start_daemon();
    let tenants = [start(&node, "old"), start(&node, "other")];
    let latency = node.tenant("--name serve --class latency", REQUESTS);
    let _serve = Process::start(&mut { latency });
    for name in ["other", "serve"] {
        node.wait_tenant(name, |it| !it["domains"][0].is_null());
    }
    let device = Pid::from_raw(node.emulated_pid() as i32).unwrap();
    kill_process(device, Signal::STOP).unwrap();
    let change = Process::start(&mut node.gpumux(["set", "old", "--weight", "2"]));
    let state = || {
        node.get("/v1/devices")[0]["state"]
            .as_str()
            .unwrap()
            .to_owned()
    };
    wait_for("the device's state", PATIENCE, || {
        state().contains("scheduling").then_some(())
    });
    assert!(node.find_tenant("old").is_some());
    for args in [
        &["ps"][..],
        &["explain", "old"],
        &["memory"],
        &["memory", "--json"],
    ] {
        node.gpumux(args).run().ok();
    }
    let (_, answer) = node.request("GET", "/metrics", "").unwrap();
    assert!(answer.contains("tenant=\"old\""), "{answer}");
    // Without its daemon a program runs unmanaged.
    let new = node.gpumux(["run", "--", "echo", "runs"]).run().ok();
    assert_eq!(new.out, "runs\n");
    assert!(
        new.err.contains("unmanaged") && new.err.contains("scheduling"),
        "{}",
        new.err
    );
    // A change that begins now is refused. What does not need that thread waits neither for it nor for the change before.
    let changed = change.finish_within(PATIENCE);
    assert!(
        changed.status.success() || changed.err.contains("scheduling"),
        "{changed:#?}"
    );
    let refused = node.gpumux(["set", "old", "--weight", "3"]).run();
    assert_eq!(refused.code(), 1, "{refused:#?}");
    assert!(refused.err.contains("scheduling"), "{refused:#?}");
    node.gpumux(["hint", "serve"]).run().ok();
    node.gpumux(["kill", "other"]).run().ok();
    let [old, other] = tenants;
    other.finish_within(PATIENCE);
    node.gpumux(["hint", "serve"]).run().ok();
    kill_process(device, Signal::CONT).unwrap();
    wait_for("the device's state", PATIENCE, || {
        (state() == "ok").then_some(())
    });
    node.wait_tenant("old", |it| it["spec"]["weight"] == 2.0);
    daemon_serves(&node, &old);
}

/// A disk that does not answer, where the daemon keeps what is known of programs.
#[test]
fn disk_that_hangs_stops_no_answer() {
    let Some(mut node) = without_daemon() else {
        return;
    };
    node.start_daemon();
    let old = start(&node, "old");
    // A writer that opens it waits for a reader.
    let file = node.dir().join("programs.json.new");
    mkfifoat(CWD, &file, Mode::RWXU).unwrap();
    let body = r#"{"curve":[[50,1.0],[100,2.0]]}"#;
    let teach = |n: u32| {
        let mut stream = UnixStream::connect(node.api_socket()).unwrap();
        let length = body.len();
        let head = format!(
            "PUT /v1/programs/p{n} HTTP/1.0\r\nhost: gpumux\r\ncontent-type: application/json"
        );
        write!(stream, "{head}\r\ncontent-length: {length}\r\n\r\n{body}").unwrap();
        stream
    };
    let taught: Vec<UnixStream> = (0..64).map(teach).collect();
    wait_for("the programs", PATIENCE, || {
        let known = node
            .gpumux(["profile", "--list", "--json"])
            .run()
            .ok()
            .json();
        (known["programs"].as_array()?.len() == taught.len()).then_some(())
    });
    daemon_serves(&node, &old);
    let mut written = String::new();
    fs::File::open(&file)
        .unwrap()
        .read_to_string(&mut written)
        .unwrap();
    assert!(written.contains("fingerprint"), "{written}");
    let answer_of = |mut stream: UnixStream| {
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    // The disk refused to flush the first, and requests that waited too long are answered so. What follows writes all.
    for stream in taught {
        let answer = answer_of(stream);
        let kept = answer.starts_with("HTTP/1.0 204");
        assert!(kept || answer.contains("cannot keep it"), "{answer}");
    }
    let last = answer_of(teach(64));
    assert!(last.starts_with("HTTP/1.0 204"), "{last}");
    let written = fs::read_to_string(node.dir().join("programs.json")).unwrap();
    assert!(
        (0..=64).all(|n| written.contains(&format!("\"p{n}\""))),
        "{written}"
    );
    daemon_serves(&node, &old);
}

/// The same of what is set for names: the change holds, and its user learns that it is not kept.
#[test]
fn settings_disk_that_hangs_stops_no_answer() {
    let Some(mut node) = without_daemon() else {
        return;
    };
    node.start_daemon();
    let old = start(&node, "old");
    let file = node.dir().join("settings.json.new");
    mkfifoat(CWD, &file, Mode::RWXU).unwrap();
    for weight in ["2", "3"] {
        let changed = node.gpumux(["set", "old", "--weight", weight]).run();
        assert_eq!(changed.code(), 1, "{changed:#?}");
        assert!(changed.err.contains("it holds now"), "{changed:#?}");
        assert!(changed.err.contains("has not answered"), "{changed:#?}");
        daemon_serves(&node, &old);
    }
    assert_eq!(node.find_tenant("old").unwrap()["spec"]["weight"], 3.0);
    fs::File::open(&file)
        .unwrap()
        .read_to_string(&mut String::new())
        .unwrap();
    // What follows writes all.
    node.gpumux(["set", "old", "--weight", "4"]).run().ok();
    let written = fs::read_to_string(node.dir().join("settings.json")).unwrap();
    assert!(written.contains("\"weight\":4.0"), "{written}");
}

/// The first process that names a device is no authority on it.
#[test]
fn claimed_device_size_limits_no_other_without_nvml() {
    let Some(mut node) = without_daemon() else {
        return;
    };
    node.set_variable("GPUMUX_NVML", "/nonexistent");
    node.start_daemon();
    let first = start(&node, "first");
    let tenant = node.wait_tenant("first", |it| !it["domains"][0].is_null());
    let device = tenant["domains"][0]["device"].as_str().unwrap().to_owned();
    first.kill();
    node.stop_daemon().ok();
    node.start_daemon();
    let guest = Guest::new(&node);
    let ask = Shim::Ask {
        ticket: 1,
        device,
        total: 4096,
        need: 1,
        want: 1,
        pinned: false,
    };
    send(&guest.session, &ask, None);
    wait_for("the device", PATIENCE, || {
        let memory = node.gpumux(["memory", "--json"]).run().ok().json();
        (memory["devices"][0]["total"] == 4096).then_some(())
    });
    let check = "gpumux workload check --json --seconds 0.1";
    let checked = node.tenant("--strict", check).run().ok().json();
    assert_eq!(checked["mismatches"], 0, "{checked:#}");
}

/// A library with which the daemon's system time is apart from the machine's by the seconds in a file.
const SHIFT: &str = r#"
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t clock, struct timespec *time) {
    int failed = syscall(SYS_clock_gettime, clock, time);
    const char *path = getenv("SHIFT");
    int file = clock == CLOCK_REALTIME && path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file >= 0) {
        char text[32] = {0};
        if (read(file, text, sizeof text - 1) > 0)
            time->tv_sec += atol(text);
        close(file);
    }
    return failed;
}
"#;

#[test]
fn system_time_that_is_set_stops_no_tenant_and_accuses_none() {
    let Some(mut node) = without_daemon() else {
        return;
    };
    let (source, library) = (node.dir().join("shift.c"), node.dir().join("shift.so"));
    fs::write(&source, SHIFT).unwrap();
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-o"])
        .arg(&library)
        .arg(&source);
    cc.run().ok();
    let shift = node.dir().join("shift");
    fs::write(&shift, "0").unwrap();
    node.set_variable("LD_PRELOAD", &library);
    node.set_variable("SHIFT", &shift);
    node.start_daemon();
    let tenants = [start(&node, "old"), start(&node, "other")];
    let now = || {
        let time = SystemTime::now().duration_since(UNIX_EPOCH);
        time.unwrap().as_secs() as i64
    };
    // An hour ahead, a year back, to where a clock without a battery begins, and right again.
    for seconds in [3600, -365 * 86400, 3600 - now(), 0] {
        fs::write(&shift, seconds.to_string()).unwrap();
        daemon_serves(&node, &tenants[0]);
        let events = node.gpumux(["events", "--past", "--json"]).run().ok().out;
        let last: Value = serde_json::from_str(events.lines().last().unwrap()).unwrap();
        assert_eq!(last["tenant"], "new", "{last}");
        let expected = now() + seconds;
        let shown = last["at_ms"].as_i64().unwrap() / 1000;
        assert!(
            (expected - shown).abs() < 600,
            "{last}: the time was not set"
        );
        for args in [&["ps", "-a"][..], &["explain", "old"], &["memory"]] {
            node.gpumux(args).run().ok();
        }
        // The next daemon takes over what was written by another time.
        node.kill_daemon();
        node.start_daemon();
        for (name, process) in ["old", "other"].iter().zip(&tenants) {
            let tenant = node.wait_tenant(name, |it| !it["domains"][0].is_null());
            assert!(tenant["tampering"].is_null(), "{tenant:#}");
            let lines = process.lines();
            wait_for("its progress", PATIENCE, || {
                (process.lines() > lines + 1).then_some(())
            });
        }
    }
}

#[test]
fn second_daemon_of_a_device_is_refused() {
    let Some(mut node) = without_daemon() else {
        return;
    };
    node.start_daemon();
    let other = tempfile::tempdir().unwrap();
    let second = || {
        let mut command = node.gpumux(["daemon", "--runtime-dir"]);
        command.arg(other.path());
        command
    };
    let refused = second().run();
    assert_eq!(refused.code(), 1, "{refused:?}");
    let pid = node.daemon().pid();
    for part in [
        "GPU 0 (GPU-",
        &format!("pid {pid}"),
        &format!("`kill {pid}`"),
    ] {
        assert!(refused.err.contains(part), "{refused:?}");
    }
    let again = start(&node, "a");
    assert_eq!(node.ps()["tenants"].as_array().map(Vec::len), Some(1));
    drop(again);
    let mut command = second();
    node.kill_daemon();
    let _next = Process::start(&mut command);
    wait_for("the next daemon", PATIENCE, || {
        UnixStream::connect(other.path().join("api.sock")).ok()
    });
}
