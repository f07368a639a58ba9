//! More of what a hostile program may try: odd pages, packets in odd states, odd requests, names, and races.

mod packets;

use std::{
    fs::{File, OpenOptions, Permissions, read_dir, read_link, set_permissions},
    io::{Read, Write},
    os::{
        fd::{AsFd, OwnedFd},
        unix::{
            fs::{FileExt, PermissionsExt},
            net::UnixStream,
        },
    },
    sync::Arc,
    thread,
    time::Duration,
};

use gpumux_tests::{Node, PATIENCE, Process, Random, Run, readable, wait_for, wait_settled};
use gpumux_wire::{
    Daemon, Shim,
    message::Piece,
    page::{Page, SLOTS},
    socket,
};
use rustix::{
    fs::{
        FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, fstat, ftruncate,
        memfd_create,
    },
    net::{RecvFlags, SendFlags},
};

use crate::{
    TICKS,
    hostile::{Guest, connect, daemon_serves, group, hello, send, with_old_tenant},
};

/// A number at a border, or any.
fn number(random: &mut Random) -> u64 {
    let any = random.below(u64::MAX);
    [0, 1, 7, any, u64::from(u32::MAX), u64::MAX][random.below(6) as usize]
}

fn memory(size: u64, seals: SealFlags) -> OwnedFd {
    let file = memfd_create("page", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, size).unwrap();
    fcntl_add_seals(&file, seals).unwrap();
    file
}

/// Reading behind the end of a mapped file would end the daemon.
#[test]
fn page_that_may_shrink_or_has_another_size_is_refused() {
    let (node, old) = with_old_tenant();
    let size = fstat(Page::create().unwrap().1).unwrap().st_size as u64;
    let both = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    for (size, seals) in [
        (size, SealFlags::empty()),
        (size, SealFlags::GROW),
        (size, SealFlags::SHRINK),
        (0, both),
        (1, both),
        (size - 1, both),
        (size + 4096, both),
        (1 << 40, both),
    ] {
        let session = connect(&node);
        let page = memory(size, seals);
        send(&session, &hello(None), Some(page.as_fd()));
        // It might be cut right after it was looked at.
        let _ = ftruncate(&page, 0);
        assert!(
            readable(&session, PATIENCE),
            "no answer to {size} {seals:?}"
        );
        if let Ok(Some((message, _))) = socket::recv::<Daemon>(&session, RecvFlags::empty()) {
            assert!(
                matches!(message, Daemon::Refused { .. }),
                "{size} {seals:?}: {message:?}"
            );
        }
    }
    daemon_serves(&node, &old);
}

#[test]
fn page_without_its_memory_harms_no_other() {
    let (node, old) = with_old_tenant();
    let session = connect(&node);
    let (_page, file) = Page::create().unwrap();
    send(&session, &hello(None), Some(file.as_fd()));
    assert!(readable(&session, PATIENCE));
    let size = fstat(&file).unwrap().st_size as u64;
    for _ in 0..200 {
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(&file, hole, 0, size).unwrap();
        send(&session, &Shim::TimesliceTouched { key: 0 }, None);
        assert!(ftruncate(&file, 0).is_err(), "it is sealed");
    }
    daemon_serves(&node, &old);
}

/// A program whose page always reports that it has no work takes nothing from one whose page does not.
#[test]
fn page_that_claims_to_be_idle_gains_nothing() {
    let (node, old) = with_old_tenant();
    let liar = Process::start(&mut node.tenant("--name liar --class batch", TICKS));
    node.wait_tenant("liar", |tenant| !tenant["domains"][0].is_null());
    let (idle, file) = Page::create().unwrap();
    for key in 0..SLOTS as u32 {
        idle.slot(key).unwrap().begin_counting();
    }
    let mut lie = vec![0; fstat(&file).unwrap().st_size as usize];
    File::from(file).read_exact_at(&mut lie, 0).unwrap();
    let files = read_dir(format!("/proc/{}/fd", liar.pid()))
        .unwrap()
        .flatten();
    let pages = files.filter(|it| {
        read_link(it.path()).is_ok_and(|to| to.to_string_lossy().contains("gpumux-page"))
    });
    let mut pages: Vec<File> = pages
        .map(|it| OpenOptions::new().write(true).open(it.path()).unwrap())
        .collect();
    assert_eq!(pages.len(), 1);
    let page = pages.remove(0);
    let ends = Arc::new(());
    let goes_on = Arc::downgrade(&ends);
    thread::spawn(move || {
        while goes_on.strong_count() > 0 {
            page.write_all_at(&lie, 0).unwrap();
            thread::sleep(Duration::from_micros(100));
        }
    });
    node.wait_tenant("liar", |it| it["domains"][0]["demand"] == "idle");
    let before = (old.lines(), liar.lines());
    let done = || (old.lines() - before.0, liar.lines() - before.1);
    wait_for("work of the old", PATIENCE, || {
        (done().0 > 300).then_some(())
    });
    let (honest, lied) = done();
    assert!(2 * lied <= 3 * honest, "{lied} beside {honest}");
    daemon_serves(&node, &old);
}

/// How many files the daemon has once no more come or go.
pub(crate) fn settled_files(node: &Node) -> usize {
    let a_while = Duration::from_millis(500);
    let what = "no files come or go";
    wait_settled(what, PATIENCE, a_while, || node.daemon_files().len())
}

#[test]
fn connections_that_race_with_their_end_leave_nothing() {
    let (node, old) = with_old_tenant();
    let before = settled_files(&node);
    let (_page, page) = Page::create().unwrap();
    thread::scope(|scope| {
        for thread in 0..4 {
            let (node, page) = (&node, &page);
            scope.spawn(move || {
                for n in 0..150 {
                    let session = connect(node);
                    match (thread + n) % 3 {
                        0 => {}
                        1 => send(&session, &hello(None), Some(page.as_fd())),
                        _ => send(&session, &hello(None), None),
                    }
                    let request = UnixStream::connect(node.api_socket());
                    let _ = request.and_then(|mut it| it.write_all(b"GET /v1/status HTTP/1.1\r\n"));
                }
            });
        }
    });
    // The daemon has 1,200 connections to end first: how long that takes is the machine's matter.
    settled_files(&node);
    daemon_serves(&node, &old);
    assert!(settled_files(&node) <= before, "{:#?}", node.daemon_files());
}

#[test]
fn requests_with_odd_numbers_names_and_nesting_are_refused() {
    let (node, old) = with_old_tenant();
    let spec = |what: &str| format!("{{\"spec\":{{{what}}}}}");
    let bodies = [
        "[".repeat(100_000),
        "{\"spec\":".repeat(20_000),
        spec("\"guaranteed\":1e400"),
        spec("\"guaranteed\":-0.1"),
        spec("\"guaranteed\":NaN"),
        spec("\"weight\":-1"),
        spec("\"weight\":1e308"),
        spec("\"memory_limit\":-1"),
        spec("\"memory_limit\":18446744073709551616"),
        spec("\"memory_guaranteed\":18446744073709551615"),
        "{\"name\":\"\\u001b[2J\"}".into(),
        "{\"name\":\"../../etc/passwd\"}".into(),
        "{\"name\":\"a\\u0000b\"}".into(),
        format!("{{\"name\":\"{}\"}}", "n".repeat(100_000)),
        "{\"trust\":\"../x\"}".into(),
    ];
    for body in &bodies {
        let shown: String = body.chars().take(60).collect();
        let answer = node.request("POST", "/v1/tenants", body);
        assert!(
            (answer.as_ref()).is_none_or(|it| (400..500).contains(&it.0)),
            "{shown}: {answer:?}"
        );
    }
    for path in [
        "/v1/tenants/..%2f..%2fetc",
        "/v1/tenants/%00",
        "/v1/tenants/%ff%fe",
    ] {
        let answer = node.request("DELETE", path, "");
        assert!(
            (answer.as_ref()).is_some_and(|it| (400..500).contains(&it.0)),
            "{path}: {answer:?}"
        );
    }
    let tenants = node.ps()["tenants"].as_array().map(Vec::len);
    assert_eq!(tenants, Some(1), "{:#}", node.ps());
    daemon_serves(&node, &old);
}

#[test]
fn control_characters_in_a_name_command_no_terminal() {
    let (node, old) = with_old_tenant();
    // Its first argument is what the kernel shows, and what the tenant is named after.
    let mut run = node.gpumux(["run", "--class", "batch", "--"]);
    let program = node.dir().join("\u{1b}[2J\u{9b}x\nname");
    std::fs::copy("/bin/sleep", &program).unwrap();
    let _named = Process::start(run.arg(&program).arg("600"));
    wait_for("its tenant", PATIENCE, || {
        (node.ps()["tenants"].as_array()?.len() == 2).then_some(())
    });
    for args in [
        &["ps"][..],
        &["ps", "-o", "wide"],
        &["ps", "--json"],
        &["events", "--past"],
        &["events", "--past", "--json"],
        &["memory"],
    ] {
        let out = node.gpumux(args).run().ok().out;
        let commands = |it: char| it.is_control() && it != '\n';
        assert!(!out.contains(commands), "{args:?}: {out:?}");
    }
    daemon_serves(&node, &old);
}

/// Programs that lived keep running; their guarantees are gone with the file.
#[test]
fn damaged_state_files_keep_no_daemon_from_starting() {
    let mut node = Node::start();
    let mut old = Process::start(&mut node.tenant("--name old --class batch", TICKS));
    old.wait_lines(1);
    for damage in ["cut", "bit", "garbage", "folder"] {
        node.kill_daemon();
        for name in [
            "tenants.json",
            "groups.json",
            "settings.json",
            "programs.json",
        ] {
            let file = node.dir().join(name);
            let mut bytes =
                std::fs::read(&file).unwrap_or_else(|_| b"gpumux 1 00000000\n[]".into());
            match damage {
                "cut" => bytes.truncate(bytes.len() / 2),
                "bit" => *bytes.last_mut().unwrap() ^= 1,
                _ => bytes = vec![0xff; 3 << 20],
            }
            let _ = std::fs::remove_file(&file);
            match damage {
                "folder" => std::fs::create_dir(&file).unwrap(),
                _ => std::fs::write(&file, bytes).unwrap(),
            }
        }
        node.start_daemon();
        let mut new = Process::start(&mut node.tenant("--name new --class batch", TICKS));
        new.wait_lines(1);
        node.wait_tenant("new", |it| !it["domains"][0].is_null());
        let lines = old.lines();
        old.wait_lines(lines + 3);
        new.kill();
        wait_for("its end", PATIENCE, || {
            node.find_tenant("new").is_none().then_some(())
        });
        for name in [
            "tenants.json",
            "groups.json",
            "settings.json",
            "programs.json",
        ] {
            let bad = node.dir().join(name).with_extension("json.bad");
            if bad.is_dir() {
                std::fs::remove_dir_all(bad).unwrap();
            }
        }
    }
}

/// A user without tenants.
const OTHER: u32 = 4798;

#[test]
fn token_of_another_users_tenant_opens_no_session() {
    if !rustix::process::geteuid().is_root() {
        return eprintln!("skipped: it needs processes of two users");
    }
    let node = Node::start();
    set_permissions(node.dir(), Permissions::from_mode(0o755)).unwrap();
    let script = "echo $GPUMUX_TENANT; sleep 600";
    let run = ["run", "--name", "victim", "--", "sh", "-c", script];
    let mut victim = Process::start(&mut node.gpumux(run));
    victim.wait_lines(1);
    let token = victim.out().trim().to_owned();
    let answer = |uid: u32| {
        let (node, token) = (&node, &token);
        let ask = move || {
            // This thread's user alone.
            let uid = rustix::fs::Uid::from_raw(uid);
            rustix::thread::set_thread_res_uid(uid, uid, uid).unwrap();
            let session = connect(node);
            let (_page, page) = Page::create().unwrap();
            send(&session, &hello(Some(token)), Some(page.as_fd()));
            assert!(readable(&session, PATIENCE), "no answer");
            socket::recv::<Daemon>(&session, RecvFlags::empty()).unwrap()
        };
        thread::scope(|scope| scope.spawn(ask).join().unwrap())
    };
    let refused = answer(OTHER);
    assert!(
        matches!(refused, Some((Daemon::Refused { .. }, _))),
        "{refused:?}"
    );
    let welcome = answer(0);
    assert!(
        matches!(welcome, Some((Daemon::Welcome { .. }, _))),
        "{welcome:?}"
    );
}

#[test]
fn tenant_that_is_started_and_killed_at_once_leaves_nothing() {
    let (node, old) = with_old_tenant();
    for n in 0..20 {
        let process = Process::start(&mut node.tenant(&format!("--name quick{n}"), TICKS));
        thread::sleep(Duration::from_millis(n * 9));
        process.kill();
    }
    wait_for("their ends", PATIENCE, || {
        (node.ps()["tenants"].as_array()?.len() == 1).then_some(())
    });
    daemon_serves(&node, &old);
}

#[test]
fn half_requests_and_watchers_that_do_not_read_keep_none_out() {
    let (node, old) = with_old_tenant();
    let begin = |request: &str| {
        let mut stream = UnixStream::connect(node.api_socket()).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        stream
    };
    let live = "GET /v1/live HTTP/1.1\r\nhost: gpumux\r\n\r\n";
    let body = "POST /v1/tenants HTTP/1.1\r\nhost: gpumux\r\ncontent-length: 100\r\n\r\n{";
    let _kept: Vec<UnixStream> = (0..150)
        .flat_map(|_| [live, body, "GET /v1/sta"])
        .map(begin)
        .collect();
    let mut metrics = begin("GET /metrics HTTP/1.0\r\nhost: gpumux\r\n\r\n");
    let mut answer = String::new();
    metrics.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.0 200"), "{answer}");
    daemon_serves(&node, &old);
}

#[test]
fn stopped_tenants_stop_no_other() {
    let (node, old) = with_old_tenant();
    let stopped: Vec<Process> = ["batch", "latency"]
        .map(|class| {
            Process::start(&mut node.tenant(&format!("--name {class} --class {class}"), TICKS))
        })
        .into();
    for (process, name) in stopped.iter().zip(["batch", "latency"]) {
        node.wait_tenant(name, |tenant| !tenant["domains"][0].is_null());
        process.signal(rustix::process::Signal::STOP);
    }
    daemon_serves(&node, &old);
    for (process, name) in stopped.iter().zip(["batch", "latency"]) {
        process.signal(rustix::process::Signal::CONT);
        let lines = process.lines();
        wait_for(name, PATIENCE, || {
            (process.lines() > lines + 3).then_some(())
        });
    }
}
