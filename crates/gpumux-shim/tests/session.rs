//! The shim between a program that makes RM calls, the driver's stand-in and a daemon.

mod support;

use std::{
    process::Stdio,
    time::{Duration, Instant},
};

use gpumux_rm::Controls;
use gpumux_wire::{
    Daemon, REVISION, Shim,
    lease::{LOOK, LOOKS, Lease},
    page::Work,
    permits::Permits,
};
use support::{Connection, Place, Tenant, context, end_quietly, example, group, shim};

#[test]
fn programs_without_a_driver_do_not_notice() {
    let place = Place::new();
    // What a program sees of itself: threads, descriptors, environment, results.
    let script = "ls /proc/$$/task | wc -l; ls /proc/$$/fd; ls /proc/self/fd; \
                  env | grep -v LD_PRELOAD | sort; ls /nowhere; (exec 5</dev/null; echo sub); \
                  command -v python3 >/dev/null && python3 -c 'import os, subprocess, threading; \
                  print(len(os.listdir(\"/proc/self/fd\")), threading.active_count()); \
                  subprocess.run([\"true\"], close_fds=True, check=True); \
                  print(os.open(\"/dev/null\", os.O_RDONLY))'; exit 3";
    let run = |preload: &str| {
        let mut command = place.command("bash");
        command
            .args(["-c", script])
            .env("LD_PRELOAD", preload)
            .env("LC_ALL", "C");
        let output = command.stdin(Stdio::null()).output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (
            output.status.code(),
            text(output.stdout),
            text(output.stderr),
        )
    };
    let (code, out, err) = run("");
    assert_eq!((code, err.contains("nowhere")), (Some(3), true));
    assert_eq!(run(shim().to_str().unwrap()), (code, out, err));
    assert!(!place.socket().exists());
}

#[test]
fn groups_are_announced_with_their_file_and_followed() {
    let place = Place::new();
    let listener = place.listen();
    let mut command = place.command(example("tenant"));
    let mut tenant = Tenant::start(command.env("GPUMUX_TENANT", "5ec7e7"));
    let client = tenant.tell("open");
    let agents = |tenant: &mut Tenant| tenant.tell("threads").matches("gpumux").count();
    assert_eq!(agents(&mut tenant), 0, "not before a group");
    tenant.tell("context 100");
    let (session, token, page) = listener.session();
    assert_eq!(token.as_deref(), Some("5ec7e7"));
    let [compute, copy] = context(&session);
    let (key, engine, handles, controls) = compute;
    assert_eq!((key, engine), (0, 1));
    assert_eq!(format!("{:x}", handles.client), client);
    assert_eq!((handles.subdevice, handles.group), (0x5c00_0003, 0x100));
    assert_eq!(handles.channels, [0x101, 0x102]);
    assert_eq!((copy.1, copy.2.group), (11, 0x110));
    assert_eq!(page.slot(key).unwrap().work(), Work::Unknown);
    assert_eq!(agents(&mut tenant), 1);

    // The file carries the authority.
    controls.set_timeslice(7).unwrap();
    controls.freeze().unwrap();
    place.await_log(
        0,
        &[
            "slice 100 2048",
            "slice 100 7",
            "freeze 5c000003 [101, 102]",
        ],
    );

    tenant.tell("slice 100");
    assert_eq!(session.packet(), Shim::TimesliceTouched { key });
    tenant.tell("free 101");
    assert_eq!(
        session.packet(),
        Shim::Channels {
            key,
            channels: vec![0x102]
        }
    );
    tenant.tell("free 110");
    assert_eq!(session.packet(), Shim::Gone { key: copy.0 });
    tenant.tell("context 200");
    let second = context(&session);
    assert_eq!((second[0].0, second[0].2.group), (1, 0x200));
    drop((controls, copy, second));
    assert_eq!(tenant.tell("close"), "0");
    for _ in 0..3 {
        assert!(matches!(session.packet(), Shim::Gone { .. }));
    }
    // No process holds the program's file any more.
    place.await_log(0, &["closed"]);
    end_quietly(tenant);
    assert!(session.recv().is_none());
}

/// The daemon offers permits while a group goes: the agent looks no more for its device, and wakes up no more.
#[test]
fn offer_that_crosses_the_end_of_a_group_is_of_no_effect() {
    for gone_before in [false, true] {
        let place = Place::new();
        let listener = place.listen();
        let mut tenant = place.tenant_with_context();
        let (session, ..) = listener.session();
        let [(key, ..), _copy] = context(&session);
        let (_, file) = Permits::create().unwrap();
        let offer = || session.send_file(&Daemon::Permits { key }, &file);
        if !gone_before {
            offer();
        }
        tenant.tell("free 100");
        assert_eq!(session.packet(), Shim::Gone { key });
        if gone_before {
            offer();
        }
        std::thread::sleep(Duration::from_millis(100));
        let before = tenant.agents_sleeps();
        std::thread::sleep(Duration::from_millis(500));
        let sleeps = tenant.agents_sleeps() - before;
        assert!(sleeps < 20, "{sleeps}");
        drop(session);
        tenant.end();
    }
}

#[test]
fn nccl_that_refuses_several_ranks_on_a_device_is_reported() {
    for (version, ranks, reported) in [
        ("22809", "2", true),
        ("23003", "2", false),
        ("22809", "1", false),
    ] {
        let place = Place::new();
        let listener = place.listen();
        let nccl = place.dir().join("libnccl.so.2");
        std::fs::copy(example("libfake_nccl.so"), &nccl).unwrap();
        let preloaded = [shim(), example("libfake_rm.so"), nccl];
        let mut command = place.command(example("tenant"));
        command
            .env("LD_PRELOAD", std::env::join_paths(preloaded).unwrap())
            .env("FAKE_NCCL_VERSION", version)
            .env("GPUMUX_RANKS_PER_GPU", ranks);
        let mut tenant = Tenant::start(&mut command);
        tenant.tell("open");
        tenant.tell("context 100");
        let _session = listener.session();
        let (errors, _) = tenant.end();
        let line = errors.iter().find(|it| it.contains("NCCL 2.28.9"));
        assert_eq!(line.is_some(), reported, "{version}: {errors:?}");
        assert!(
            line.is_none_or(|it| it.contains("2.30.3 or newer")),
            "{line:?}"
        );
    }
}

#[test]
fn a_group_whose_library_says_nothing_is_taken_as_it_is() {
    let place = Place::new();
    let listener = place.listen();
    let mut tenant = place.tenant();
    tenant.tell("open");
    tenant.tell("bare 100");
    let (session, ..) = listener.session();
    assert_eq!(group(&session).2.group, 0x100);
    end_quietly(tenant);
}

/// A group's timeslice was set before the group was thawed, since line `from`.
#[track_caller]
fn assert_slice_before_thaw(log: &[String], from: usize, slice: &str, thaw: &str) {
    let at = |line: &str| log.iter().skip(from).position(|it| it == line);
    let (slice, thaw) = (at(slice).unwrap(), at(thaw).unwrap());
    assert!(slice < thaw, "{:#?}", &log[from..]);
}

const COMPUTE: [&str; 2] = ["slice 100 2048", "thaw 5c000003 [101, 102]"];
const COPY: [&str; 2] = ["slice 110 1024", "thaw 5c000003 [111, 112]"];

#[test]
fn expired_lease_frees_groups_while_the_session_is_open() {
    let place = Place::new();
    let listener = place.listen();
    let tenant = place.tenant_with_context();
    let (lease, file) = Lease::create().unwrap();
    let (session, _, page) = listener.session_under(Some(&file));
    let [compute, _] = context(&session);
    assert_eq!((page.revision(), page.expired()), (REVISION, 0));
    compute.3.set_timeslice(1).unwrap();
    compute.3.freeze().unwrap();
    place.refuse_timeslices(true);
    lease.renew();
    let from = place.log().len();
    place.await_log(from, &["refused 100"]);
    assert_eq!(page.expired(), 1, "before any control");
    place.await_log(place.log().len(), &["refused 100", "refused 110"]);
    let thawed = |log: Vec<String>| log.iter().skip(from).any(|it| it.starts_with("thaw"));
    assert!(!thawed(place.log()), "it would run at 1 µs");
    place.refuse_timeslices(false);
    place.await_log(from, &COMPUTE);
    place.await_log(from, &COPY);
    for [slice, thaw] in [COMPUTE, COPY] {
        assert_slice_before_thaw(&place.log(), from, slice, thaw);
    }
    // A control of the daemon's that was on its way is undone, too.
    compute.3.freeze().unwrap();
    place.await_log(place.log().len(), &COMPUTE);
    // The old session is over, and everything is reported anew under the next lease, which this time is renewed.
    assert!(session.recv().is_none());
    let (session, ..) = listener.session_under(Some(&file));
    let [compute, _] = context(&session);
    compute.3.freeze().unwrap();
    let from = place.log().len();
    let (mut renewed, mut longest) = (Instant::now(), Duration::ZERO);
    for _ in 0..50 {
        std::thread::sleep(LOOK / 4);
        lease.renew();
        longest = longest.max(renewed.elapsed());
        renewed = Instant::now();
    }
    // Where this thread was not run for that long, the lease has expired.
    let in_time = longest < (LOOKS - 1) * LOOK;
    assert!(
        !in_time || place.log().len() == from,
        "its groups are the daemon's"
    );
    let (errors, code) = tenant.end();
    assert_eq!((errors.len(), code), (1, Some(0)), "{errors:?}");
    assert!(errors[0].contains("stands still"), "{errors:?}");
}

#[test]
fn library_without_a_lease_stays_with_a_daemon_of_revision_0() {
    let place = Place::new();
    let listener = place.listen();
    let tenant = place.tenant_with_context();
    let (session, _, page) = listener.session();
    let [compute, _] = context(&session);
    compute.3.freeze().unwrap();
    let from = place.log().len();
    std::thread::sleep(LOOK * (LOOKS + 5));
    assert_eq!((place.log().len(), page.expired()), (from, 0));
    drop((session, listener));
    place.await_log(from, &COMPUTE);
    tenant.end();
}

#[test]
fn lost_daemons_settings_are_undone_and_reported_to_the_next() {
    for bye in [false, true] {
        let place = Place::new();
        let mut listener = Some(place.listen());
        let mut tenant = place.tenant_with_context();
        let (session, ..) = listener.as_ref().unwrap().session();
        let [compute, copy] = context(&session);
        compute.3.set_timeslice(1).unwrap();
        compute.3.freeze().unwrap();
        let from = place.log().len();
        // One that says good-bye is back at once; another is gone for a while.
        if bye {
            session.send(&Daemon::Bye);
        } else {
            listener = None;
        }
        drop(session);
        place.await_log(from, &[COMPUTE, COPY].concat());
        for [slice, thaw] in [COMPUTE, COPY] {
            assert_slice_before_thaw(&place.log(), from, slice, thaw);
        }
        tenant.tell("context 200");
        tenant.tell("free 110");
        let listener = listener.unwrap_or_else(|| place.listen());
        let (session, ..) = listener.session();
        let again = [group(&session), group(&session), group(&session)];
        assert_eq!(
            (again[0].0, &again[0].2),
            (compute.0, &compute.2),
            "the same names"
        );
        assert!(again.iter().all(|group| group.0 != copy.0));
        let (errors, code) = tenant.end();
        assert_eq!(
            (errors.len(), code),
            (usize::from(!bye), Some(0)),
            "{errors:?}"
        );
        assert!(
            bye || errors[0].starts_with("gpumux: lost the daemon"),
            "{errors:?}"
        );
    }
}

/// Runs a program to its end while `daemon` does what it does. What the program said on standard
/// error, and its exit code.
fn run_against(place: &Place, strict: bool, daemon: impl FnOnce()) -> (Vec<String>, Option<i32>) {
    let mut command = place.command(example("tenant"));
    if strict {
        command.env("GPUMUX_STRICT", "1");
    }
    let mut tenant = Tenant::start(&mut command);
    tenant.tell("open");
    std::thread::scope(|scope| {
        // A strict program waits for the daemon's answer.
        let telling = scope.spawn(|| tenant.try_tell("context 100").is_some());
        daemon();
        assert!(telling.join().unwrap() || strict);
    });
    let mut errors = vec![tenant.error_line().trim_end().to_owned()];
    let runs_on = tenant.try_tell("threads").is_some();
    assert_eq!(runs_on, !strict);
    let (more, code) = tenant.end();
    errors.extend(more);
    (errors, code)
}

#[test]
fn a_daemon_that_is_of_no_use_costs_one_line_or_the_program() {
    type Answer = fn(&Connection);
    let no_answer: Option<Answer> = None;
    let answers: [(&str, Option<Answer>); 6] = [
        ("cannot reach", no_answer),
        (
            "protocol 99",
            Some(|connection| {
                let protocol = 99;
                connection.send(&Daemon::Welcome {
                    protocol,
                    tenant: String::new(),
                    memory: false,
                });
            }),
        ),
        (
            "no room",
            Some(|connection| {
                connection.send(&Daemon::Refused {
                    reason: "no\nroom".into(),
                });
            }),
        ),
        (
            "does not speak",
            Some(|connection| connection.send_bytes(&[0xff; 300])),
        ),
        ("cannot reach", Some(|_| {})),
        (
            "timed out",
            Some(|connection| assert!(connection.recv().is_none())),
        ),
    ];
    for (strict, exit) in [(false, 0), (true, 125)] {
        for (reason, answer) in answers {
            let place = Place::new();
            let listener = answer.map(|_| place.listen());
            let (errors, code) = run_against(&place, strict, || {
                if let (Some(listener), Some(answer)) = (&listener, answer) {
                    let connection = listener.accept();
                    connection.hello();
                    answer(&connection);
                }
            });
            assert_eq!((errors.len(), code), (1, Some(exit)), "{errors:?}");
            assert!(errors[0].starts_with("gpumux: "), "{errors:?}");
            assert!(
                errors[0].contains(reason),
                "{errors:?} says nothing of {reason:?}"
            );
            assert_eq!(errors[0].contains("GPUMUX_STRICT=1"), strict, "{errors:?}");
        }
    }
}

#[test]
fn lost_daemon_that_answered_late_at_first_is_reported() {
    let place = Place::new();
    let listener = place.listen();
    let mut tenant = place.tenant_with_context();
    let late = listener.accept();
    late.hello();
    assert!(late.recv().is_none());
    assert!(tenant.error_line().contains("timed out"));
    let (session, ..) = listener.session();
    drop((session, listener));
    assert!(tenant.error_line().contains("lost the daemon"));
    end_quietly(tenant);
}

#[test]
fn a_socket_that_is_none_costs_one_line() {
    let place = Place::new();
    std::fs::write(place.socket(), "").unwrap();
    let (errors, code) = run_against(&place, false, || {});
    assert_eq!((errors.len(), code), (1, Some(0)), "{errors:?}");
}

#[test]
fn a_strict_program_runs_with_its_daemon() {
    let place = Place::new();
    let listener = place.listen();
    let mut command = place.command(example("tenant"));
    let mut tenant = Tenant::start(command.env("GPUMUX_STRICT", "1"));
    tenant.tell("open");
    let (session, mut tenant) = std::thread::scope(|scope| {
        let telling = scope.spawn(|| {
            tenant.tell("context 100");
            tenant
        });
        let (session, ..) = listener.session();
        (session, telling.join().unwrap())
    });
    context(&session);
    // Lost later, the daemon takes no program with it.
    drop((session, listener));
    place.await_log(0, &["thaw 5c000003 [101, 102]"]);
    assert!(tenant.error_line().starts_with("gpumux: "));
    end_quietly(tenant);
}

#[test]
fn threads_that_race_are_all_seen() {
    let place = Place::new();
    let listener = place.listen();
    let mut tenant = place.tenant();
    tenant.tell("race 8");
    let (session, ..) = listener.session();
    let groups: Vec<_> = (0..16).map(|_| group(&session)).collect();
    let mut keys: Vec<_> = groups.iter().map(|group| group.0).collect();
    keys.sort_unstable();
    keys.dedup();
    assert_eq!(keys.len(), 16);
    let mut clients: Vec<_> = groups.iter().map(|group| group.2.client).collect();
    clients.sort_unstable();
    clients.dedup();
    assert_eq!(clients.len(), 8);
    // Each group came with the file of its own client.
    let from = place.log().len();
    for (.., controls) in &groups {
        controls.set_timeslice(9).unwrap();
    }
    assert_eq!(place.log().len() - from, 16);
    end_quietly(tenant);
}

#[test]
fn errno_is_the_program_s_and_the_library_stays() {
    let place = Place::new();
    let _listener = place.listen();
    let mut tenant = place.tenant();
    assert_eq!(tenant.tell("errno"), "20", "ENOTDIR");
    let mut command = place.command(example("tenant"));
    command.env("LD_PRELOAD", "");
    let mut plain = Tenant::start(&mut command);
    assert_eq!(plain.tell(&format!("dlopen {}", shim().display())), "true");
    plain.end();
}

#[test]
fn what_the_calls_tell_can_be_watched() {
    let place = Place::new();
    let listener = place.listen();
    let mut command = place.command(example("tenant"));
    let mut tenant = Tenant::start(command.env("GPUMUX_TRACE", "rm"));
    tenant.tell("open");
    tenant.tell("context 100");
    let _session = listener.session();
    let (lines, _) = tenant.end();
    let shows = |what: &str| lines.iter().any(|line| line.contains(what));
    assert!(
        shows("SetTimeslice") && shows("Ready(GroupId(0))"),
        "{lines:#?}"
    );
    assert!(
        lines.iter().all(|line| line.starts_with("gpumux: rm: ")),
        "{lines:#?}"
    );
}
