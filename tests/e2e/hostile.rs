//! A client that does all it can: the daemon must neither crash nor let others wait.

mod receivers;

use std::{
    fs::{File, Permissions, set_permissions},
    io::{Read, Write},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::{fs::PermissionsExt, net::UnixStream, process::CommandExt},
    },
    path::Path,
    process::Command,
    sync::atomic::Ordering,
    time::Duration,
};

use gpumux_tests::{
    Node, Options, PATIENCE, Process, Run,
    hanging::{lingering, open_on_fuse},
    readable, wait_for,
};
use gpumux_wire::{Daemon, PROTOCOL, Shim, message::MAX_CHANNELS, page::Page, socket};
use rustix::{
    net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, socketpair},
    process::{Pid, Signal, kill_process},
};
use serde_json::Value;

use crate::{TICKS, attacks::settled_files};

/// How long another user's request may take while one user is hostile: less than the 10 s for which a request of that user may hang.
const SOON: Duration = Duration::from_secs(9);

const HOUR: Duration = Duration::from_secs(3600);

pub(crate) fn connect(node: &Node) -> OwnedFd {
    socket::connect(&node.session_socket(), SocketFlags::empty()).unwrap()
}

pub(crate) fn hello(token: Option<&str>) -> Shim {
    Shim::Hello {
        protocol: PROTOCOL,
        version: "test".into(),
        tenant: token.map(str::to_owned),
    }
}

pub(crate) fn send(session: &OwnedFd, message: &Shim, file: Option<BorrowedFd<'_>>) {
    // A daemon that has closed is as good an answer as any.
    let _ = socket::send(session, message, file, SendFlags::empty());
}

pub(crate) fn group(key: u32, handle: u32, channels: u32) -> Shim {
    Shim::Group {
        key,
        engine: 1,
        client: 0xc1d0_0001_u32.wrapping_add(handle),
        subdevice: 0x5c00_0003,
        group: handle,
        channels: (0..channels).map(|n| n.wrapping_mul(handle)).collect(),
        timeslice_us: 2048,
        shared: false,
    }
}

/// A session of a tenant of its own, made as `gpumux run` makes one.
pub(crate) struct Guest {
    pub(crate) session: OwnedFd,
    _run: Process,
}

impl Guest {
    pub(crate) fn new(node: &Node) -> Self {
        let script = "echo $GPUMUX_TENANT; sleep 600";
        let mut run = Process::start(&mut node.gpumux(["run", "--", "sh", "-c", script]));
        run.wait_lines(1);
        let session = connect(node);
        let (_page, file) = Page::create().unwrap();
        send(&session, &hello(Some(run.out().trim())), Some(file.as_fd()));
        assert!(readable(&session, SOON), "no answer to a good hello");
        match socket::recv(&session, RecvFlags::empty()).unwrap() {
            Some((Daemon::Welcome { .. }, _)) => {}
            other => panic!("not welcome: {other:?}"),
        }
        Self { session, _run: run }
    }
}

/// The daemon answers and manages: an old tenant is still there, and a new one is taken in.
#[track_caller]
pub(crate) fn daemon_serves(node: &Node, old: &Process) {
    let lines = old.lines();
    let new = Process::start(&mut node.tenant("--name new --class latency", TICKS));
    wait_for("a new tenant", SOON, || {
        let domain = &node.find_tenant("new")?["domains"][0];
        domain.is_object().then_some(())
    });
    // Beside latency tenants that always have work, also stopped ones, its turn may be seconds away: so far as it is entitled to.
    let bound = &node.find_tenant("old").expect("it is known")["domains"][0]["wait_bound_us"];
    let bound = Duration::from_micros(bound.as_u64().unwrap_or(0));
    wait_for("progress of the old", SOON + bound, || {
        (old.lines() > lines).then_some(())
    });
    drop(new);
    wait_for("its end", SOON, || {
        node.find_tenant("new").is_none().then_some(())
    });
}

pub(crate) fn with_old_tenant() -> (Node, Process) {
    let node = Node::start();
    let mut old = Process::start(&mut node.tenant("--name old --class batch", TICKS));
    old.wait_lines(1);
    node.wait_tenant("old", |tenant| !tenant["domains"][0].is_null());
    (node, old)
}

#[test]
fn garbage_is_survived() {
    let (node, old) = with_old_tenant();
    let good = gpumux_wire::message::encode(&hello(None)).unwrap();
    let mut packets = vec![
        vec![0],
        vec![0xff; 1],
        vec![0xff; 16 * 1024],
        vec![0; 64 * 1024],
        vec![0xff; 150_000],
    ];
    packets.extend((1..good.len()).map(|cut| good[..cut].to_vec()));
    packets.push([&good[..], &[0]].concat());
    for packet in packets {
        let session = connect(&node);
        let _ = rustix::net::send(&session, &packet, SendFlags::NOSIGNAL);
        let _ = rustix::net::send(&session, &packet, SendFlags::NOSIGNAL);
    }
    daemon_serves(&node, &old);
}

#[test]
fn hellos_that_are_not_right_are_refused() {
    let (node, old) = with_old_tenant();
    let (_page, page) = Page::create().unwrap();
    let null = File::open("/dev/null").unwrap();
    let other = Shim::Hello {
        protocol: PROTOCOL + 1,
        version: "9".into(),
        tenant: None,
    };
    let long = Shim::Hello {
        protocol: PROTOCOL,
        version: "9".repeat(10_000),
        tenant: Some("x".repeat(5_000)),
    };
    for (message, file) in [
        (&other, Some(page.as_fd())),
        (
            &hello(Some("00000000000000000000000000000000")),
            Some(page.as_fd()),
        ),
        (&hello(Some("../../etc/passwd")), Some(page.as_fd())),
        (&hello(None), Some(null.as_fd())),
        (&long, Some(page.as_fd())),
        (&group(0, 0x5c00_0010, 8), Some(null.as_fd())),
    ] {
        let session = connect(&node);
        send(&session, message, file);
        assert!(readable(&session, SOON), "no answer to {message:?}");
        match socket::recv::<Daemon>(&session, RecvFlags::empty()) {
            Ok(Some((Daemon::Welcome { .. }, _))) => panic!("welcome with {message:?}"),
            Ok(Some((Daemon::Refused { reason }, _))) => assert!(!reason.is_empty()),
            Ok(_) | Err(_) => {}
        }
    }
    daemon_serves(&node, &old);
}

#[test]
fn handles_and_files_that_are_not_the_senders_move_nothing() {
    let (node, old) = with_old_tenant();
    let guest = Guest::new(&node);
    let (unread, _silent) = socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )
    .unwrap();
    let null = File::open("/dev/null").unwrap();
    let (_page, page) = Page::create().unwrap();
    let api = UnixStream::connect(node.api_socket()).unwrap();
    let mut key = 0;
    for file in [
        None,
        Some(null.as_fd()),
        Some(page.as_fd()),
        Some(unread.as_fd()),
        Some(api.as_fd()),
    ] {
        for handle in [0, 1, 0x5c00_0010, u32::MAX] {
            for channels in [0, 1, 8, MAX_CHANNELS as u32, MAX_CHANNELS as u32 + 1] {
                send(&guest.session, &group(key, handle, channels), file);
                key += 1;
            }
        }
    }
    for key in [0, 7, 1000, u32::MAX] {
        send(
            &guest.session,
            &Shim::Channels {
                key,
                channels: vec![key; 100],
            },
            None,
        );
        send(&guest.session, &Shim::TimesliceTouched { key }, None);
        send(&guest.session, &Shim::Gone { key }, None);
    }
    daemon_serves(&node, &old);
    let frozen = |tenant: &Value| tenant["domains"][0]["frozen"] == true;
    assert!(!frozen(&node.find_tenant("old").unwrap()));
}

#[test]
fn a_thousand_groups_of_one_session_are_bounded() {
    let (node, old) = with_old_tenant();
    let guest = Guest::new(&node);
    let null = File::open("/dev/null").unwrap();
    for key in 0..10_000 {
        send(&guest.session, &group(key, key, 8), Some(null.as_fd()));
    }
    daemon_serves(&node, &old);
}

#[test]
fn ten_thousand_connections_are_survived() {
    let (node, old) = with_old_tenant();
    // As many as this process may have at a time, held open; the rest come and go.
    let mut held = Vec::new();
    for n in 0..10_000 {
        // Not waiting: a daemon whose queue is full says so.
        match socket::connect(&node.session_socket(), SocketFlags::NONBLOCK) {
            Ok(session) if held.len() < 500 => held.push(session),
            Ok(_) => {}
            Err(_) if n % 100 == 0 => std::thread::sleep(Duration::from_millis(1)),
            Err(_) => {}
        }
    }
    drop(held);
    // What is answered next is behind all of these. A library that found no place in the queue would try again much later.
    let last = connect(&node);
    send(&last, &group(0, 0, 8), None);
    assert!(readable(&last, PATIENCE * 3), "they are never done with");
    drop(last);
    settled_files(&node);
    daemon_serves(&node, &old);
}

#[test]
fn silent_open_connections_do_not_lock_others_out() {
    let (node, old) = with_old_tenant();
    let connect = |_| socket::connect(&node.session_socket(), SocketFlags::NONBLOCK).ok();
    let held: Vec<_> = (0..400).filter_map(connect).collect();
    assert!(!held.is_empty());
    wait_for(
        "the silent ones to be dropped",
        Duration::from_secs(30),
        || {
            let new = node
                .tenant("", "gpumux workload check --json --seconds 0.1")
                .run();
            (new.status.success() && new.err.is_empty()).then_some(())
        },
    );
    daemon_serves(&node, &old);
}

#[test]
fn the_api_survives_garbage() {
    let (node, old) = with_old_tenant();
    let bodies = [
        "",
        "{",
        "{\"spec\":{\"class\":\"fast\"}}",
        "{\"name\":7}",
        "\u{0}\u{0}",
    ];
    let mut requests: Vec<Vec<u8>> = vec![
        b"\0\0\0\0".to_vec(),
        b"GET\r\n\r\n".to_vec(),
        b"GET /../../etc/passwd HTTP/1.1\r\nhost: x\r\n\r\n".to_vec(),
        [b"GET /".to_vec(), vec![b'a'; 200_000]].concat(),
        b"POST /v1/tenants HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n{".to_vec(),
    ];
    requests.extend(bodies.map(|body| {
        let head = "POST /v1/tenants HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n";
        format!("{head}content-length: {}\r\n\r\n{body}", body.len()).into_bytes()
    }));
    for request in requests {
        let mut stream = UnixStream::connect(node.api_socket()).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_millis(200)))
            .unwrap();
        let _ = stream.write_all(&request);
        let mut answer = [0; 12];
        if stream.read_exact(&mut answer).is_ok() {
            let answer = String::from_utf8_lossy(&answer).into_owned();
            assert!(answer.starts_with("HTTP/1.1 4"), "{answer}");
        }
    }
    daemon_serves(&node, &old);
}

/// Sends a file to both sockets of the daemon; the reference there is the last when this process has closed its own.
fn send_file(dir: &Path, file: BorrowedFd<'_>) -> [OwnedFd; 2] {
    let session = socket::connect(&dir.join("session.sock"), SocketFlags::empty()).unwrap();
    send(&session, &Shim::Gone { key: 1 }, Some(file));
    let request = UnixStream::connect(dir.join("api.sock")).unwrap();
    socket::send_bytes(&request, b"GET / ", &[file], SendFlags::empty()).unwrap();
    [session, request.into()]
}

/// One of the tests that run as processes of their own.
fn as_process(test: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    let test = format!("hostile::{test}");
    command.args([&test, "--exact", "--ignored", "--nocapture"]);
    command
}

#[test]
#[ignore = "runs as a process of its own"]
fn a_process_that_serves_fuse() {
    let at = tempfile::tempdir().unwrap();
    let (file, hangs) = match open_on_fuse(at.path()) {
        Ok(opened) => opened,
        Err(error) => return println!("skipped: FUSE cannot be mounted here: {error}"),
    };
    let mut command = as_process(&std::env::var("GPUMUX_TEST_SENDER").unwrap());
    if rustix::process::geteuid().is_root() {
        command.uid(HOSTILE).gid(HOSTILE);
    }
    let mut sender = command.stdin(file).spawn().unwrap();
    // It has this process's file.
    drop(command);
    hangs.store(true, Ordering::Release);
    sender.wait().unwrap();
}

#[test]
#[ignore = "runs as a process of its own"]
fn a_process_that_sends_its_input() {
    // It could not be killed while its file system is there.
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).unwrap();
    let dir = std::env::var_os("GPUMUX_RUNTIME_DIR").unwrap();
    let (dir, file) = (Path::new(&dir), std::io::stdin());
    let _sent: Vec<_> = (0..4).map(|_| send_file(dir, file.as_fd())).collect();
    println!("sent");
    std::thread::sleep(HOUR);
}

#[test]
#[ignore = "runs as a process of its own"]
fn a_process_that_sends_files_that_linger() {
    let dir = std::env::var_os("GPUMUX_RUNTIME_DIR").unwrap();
    let _kept: Vec<_> = (0..16)
        .map(|_| {
            let (file, other) = lingering(HOUR);
            let sent = send_file(Path::new(&dir), file.as_fd());
            // Where this is still the last reference, this thread hangs.
            std::thread::spawn(move || drop(file));
            (sent, other)
        })
        .collect();
    println!("sent");
    std::thread::sleep(HOUR);
}

/// A user that has no tenants.
const HOSTILE: u32 = 4799;

#[test]
#[ignore = "runs as a process of its own"]
fn a_process_that_hangs_relays() {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).unwrap();
    let dir = std::env::var_os("GPUMUX_RUNTIME_DIR").unwrap();
    let (dir, file) = (Path::new(&dir), std::io::stdin());
    let connect = || {
        let session = socket::connect(&dir.join("session.sock"), SocketFlags::empty()).unwrap();
        send(&session, &Shim::Gone { key: 1 }, Some(file.as_fd()));
        session
    };
    let held: Vec<_> = (0..700).map(|_| connect()).collect();
    let reason = wait_for("a refusal", PATIENCE, || {
        let received = held
            .iter()
            .map(|it| socket::recv(it, RecvFlags::DONTWAIT).ok());
        (received.flatten().flatten()).find_map(|(message, _)| match message {
            Daemon::Refused { reason } => Some(reason),
            _ => None,
        })
    });
    assert!(
        reason.starts_with(&format!("user {HOSTILE} has ")),
        "{reason}"
    );
    // These close before they are refused, or after.
    (0..500).for_each(|_| drop(connect()));
    println!("sent");
    std::thread::sleep(HOUR);
}

/// A process that has sent hostile files to the daemon, itself or by a `sender`; none where it cannot make them.
fn hostile(node: &Node, test: &str, sender: &str) -> Option<Process> {
    set_permissions(node.dir(), Permissions::from_mode(0o755)).unwrap();
    let mut command = as_process(test);
    command.env("GPUMUX_TEST_SENDER", sender);
    let mut hostile = Process::start(command.env("GPUMUX_RUNTIME_DIR", node.dir()));
    wait_for("its files", PATIENCE, || {
        hostile.poll();
        let out = hostile.out();
        (out.contains("sent") || out.contains("skipped")).then_some(())
    });
    if hostile.out().contains("skipped") {
        eprintln!("{}", hostile.out());
        return None;
    }
    Some(hostile)
}

#[test]
fn files_whose_end_lingers_stop_no_other_program() {
    let (mut node, old) = with_old_tenant();
    let hostile = hostile(&node, "a_process_that_sends_files_that_linger", "");
    daemon_serves(&node, &old);
    node.kill_daemon();
    node.start_daemon();
    daemon_serves(&node, &old);
    drop(hostile);
}

#[test]
fn files_of_fuse_stop_no_other_program_nor_the_next_daemon() {
    let (mut node, old) = with_old_tenant();
    let sender = "a_process_that_sends_its_input";
    let Some(hostile) = hostile(&node, "a_process_that_serves_fuse", sender) else {
        return;
    };
    daemon_serves(&node, &old);
    node.kill_daemon();
    node.start_daemon();
    daemon_serves(&node, &old);
    hostile.kill();
}
