//! Sharing in space: groups of a trust domain, the controls on a group, and what its faults end.

mod faults;
mod kept;
mod shown;
mod sms;

use crate::{REQUESTS, TICKS, is_well, wait_still};
use gpumux_rm::Controls;
use gpumux_tests::{
    Listener, Node, Options, PATIENCE, Patience, Process, Run, Session, real, wait_for,
    wait_settled,
};
use rustix::process::{Pid, Signal};
use serde_json::Value;
use std::{
    cell::RefCell,
    fs,
    io::{Read, Write},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

/// What a plain MPS server does: the reason why the daemon holds files, and the model of the emulated device.
#[test]
fn work_of_a_killed_client_ends_others_unless_short_or_held() {
    let puppets = Puppets::new();
    let endless = "fault --kind endless --seconds 0.1".to_owned();
    let batch = |us: u32| format!("batch --kernel-us {us} --seconds 600");
    for (program, held, ends) in [
        (batch(500), false, false),
        (batch(20_000), true, false),
        (endless, false, true),
    ] {
        let (mut neighbour, _session, controls) = puppets.start(TICKS);
        let running = puppets.node.dir().join("running");
        let command = format!(
            "gpumux workload {program} --ready-file {}",
            running.display()
        );
        let (killed, session, others_controls) = puppets.start(&command);
        wait_for("its longest kernels", PATIENCE, || {
            running.exists().then_some(())
        });
        fs::remove_file(&running).unwrap();
        let files = RefCell::new(Vec::new());
        let a_while = Duration::from_secs(1);
        wait_settled("its files have come", PATIENCE, a_while, || {
            let mut files = files.borrow_mut();
            files.extend(session.files());
            files.len()
        });
        // The controls have a control file, too.
        let kept = held.then_some((files, others_controls));
        drop(session);
        killed.kill();
        std::thread::sleep(Duration::from_secs(1));
        drop(kept);
        if ends {
            let end = neighbour.finish();
            assert_ne!(end.code(), 0, "{program}");
            assert!(end.err.contains("ILLEGAL_ADDRESS"), "{program}: {end:#?}");
        } else {
            let lines = neighbour.lines();
            neighbour.wait_lines(lines + 100);
        }
        drop(controls);
    }
}

const GROUP: &str = "--class batch --trust team";

/// Long kernels back to back, on every SM.
const LOAD: &str = "gpumux workload batch --kernel-us 10000 --seconds 600";

#[track_caller]
fn member(node: &Node, name: &str, more: &str, program: &str) -> Process {
    Process::start(&mut node.tenant(&format!("{GROUP} --name {name} {more}"), program))
}

fn domain(tenant: &Value) -> &Value {
    &tenant["domains"][0]
}

fn has_domain(tenant: &Value) -> bool {
    !domain(tenant).is_null()
}

fn find<'a>(ps: &'a Value, name: &str) -> &'a Value {
    let tenants = ps["tenants"].as_array().unwrap();
    tenants.iter().find(|it| it["name"] == name).unwrap()
}

/// Waits until one look at all tenants shows what `accept` takes.
#[track_caller]
fn wait_ps<T>(node: &Node, what: &str, mut accept: impl FnMut(&Value) -> Option<T>) -> T {
    let mut left = Patience::new(PATIENCE);
    loop {
        let ps = node.ps();
        if let Some(found) = accept(&ps) {
            return found;
        }
        assert!(left.lasts(), "{what} never came to be: {ps:#}");
    }
}

#[test]
fn tenants_of_a_trust_domain_share_a_group_and_others_do_not() {
    let node = Node::start();
    let mut first = member(&node, "a", "", TICKS);
    first.wait_lines(1);
    let mut all = [
        first,
        member(&node, "b", "", TICKS),
        Process::start(&mut node.tenant("--class batch --trust other --name c", TICKS)),
        Process::start(&mut node.tenant("--class batch --name d", TICKS)),
        member(&node, "e", "--sharing time", TICKS),
    ];
    for process in &mut all {
        process.wait_lines(3);
    }
    let [a, b, c, d, e] = ["a", "b", "c", "d", "e"].map(|name| node.wait_tenant(name, has_domain));
    let group = |tenant: &Value| domain(tenant)["group"].as_u64();
    assert!(group(&a).is_some(), "{a:#}");
    assert_eq!(group(&a), group(&b));
    assert!(group(&c).is_some() && group(&c) != group(&a), "{c:#}");
    assert_eq!((group(&d), group(&e)), (None, None));
    for (tenant, way, reason) in [
        (&a, "space", "first of team"),
        (&b, "space", "with 1 other of team"),
        (&c, "space", "first of other"),
        (&d, "time", "names no trust domain"),
        (&e, "time", "asked for time"),
    ] {
        assert_eq!(tenant["placement"]["way"], way, "{tenant:#}");
        let said = tenant["placement"]["reason"].as_str().unwrap();
        assert!(said.contains(reason), "{said}");
    }
    let explained = node.gpumux(["explain", "b"]).run().ok().out;
    assert!(
        explained.contains("group team, now with a ("),
        "{explained}"
    );
    for process in &mut all {
        let lines = process.lines();
        process.wait_lines(lines + 10);
    }
    // What a process has from an MPS server for its copies is not scheduled: memory moves while the tenant is frozen.
    let ps = node.ps();
    for name in ["a", "b", "c", "d", "e"] {
        let tenant = find(&ps, name);
        let domains = tenant["domains"].as_array().unwrap().len();
        assert_eq!(domains, 1, "{tenant:#}");
    }
}

#[test]
fn a_group_is_frozen_and_thawed_as_one_and_all_progress() {
    let node = Node::start();
    let mut all = [
        member(&node, "a", "", TICKS),
        member(&node, "b", "", TICKS),
        Process::start(&mut node.tenant("--class batch --name outside", TICKS)),
    ];
    for name in ["a", "b", "outside"] {
        node.wait_tenant(name, has_domain);
    }
    // Beside a latency tenant, batch domains take turns by freezing.
    let _serve = Process::start(&mut node.tenant("--class latency --name serve", REQUESTS));
    node.wait_tenant("serve", has_domain);
    let frozen = |ps: &Value, name: &str| domain(find(ps, name))["frozen"].as_bool();
    // Their controls follow each other: a look may come between two, but not look after look.
    let mut between = 0;
    for state in [true, false, true] {
        wait_ps(&node, "the group's turn", |ps| {
            let both = ["a", "b"].map(|name| frozen(ps, name));
            between = if both[0] == both[1] { 0 } else { between + 1 };
            assert!(between < 3, "{ps:#}");
            (both == [Some(state); 2]).then_some(())
        });
    }
    let slice = |tenant: &Value| domain(tenant)["timeslice_us"].as_u64();
    assert_eq!(
        slice(&node.wait_tenant("b", |it| slice(it) == Some(1))),
        Some(1)
    );
    for process in &mut all {
        let lines = process.lines();
        process.wait_lines(lines + 20);
    }
    // A new member gets the group's state.
    let mut late = member(&node, "late", "", TICKS);
    late.wait_lines(10);
    node.wait_tenant("late", |it| slice(it) == Some(1));
}

#[test]
fn a_latency_tenant_outside_preempts_the_group() {
    let node = Node::start();
    // Without preemption, kernels would let requests wait for as long as they take: on a machine that also has to be the device, for
    // far longer than that needs.
    let (load, most_us) = match real() {
        true => (LOAD, 5_000.0),
        false => (
            "gpumux workload batch --kernel-us 5000000 --seconds 600",
            1_000_000.0,
        ),
    };
    let loads = ["a", "b"].map(|name| member(&node, name, "", load));
    for name in ["a", "b"] {
        node.wait_tenant(name, |it| domain(it)["demand"] == "busy");
    }
    let serve =
        "gpumux workload latency --kernels 10 --kernel-us 10 --period-us 50000 --seconds 3 --json";
    let report = node
        .tenant("--class latency --name serve", serve)
        .run()
        .ok()
        .json();
    println!("latency outside a busy group of two: {report:#}");
    let p50 = report["p50_us"].as_f64().unwrap();
    assert!(p50 < most_us, "{report:#}");
    drop(loads);
}

/// Programs in an MPS of the test's own, whose sessions the test itself holds.
struct Puppets {
    node: Node,
    listener: Listener,
    folder: PathBuf,
    _control: Process,
}

impl Puppets {
    #[track_caller]
    fn new() -> Self {
        let node = Node::with(Options {
            without_daemon: true,
            ..Options::default()
        });
        let listener = Listener::new(node.session_socket());
        let folder = node.dir().join("mps");
        for part in ["pipe", "log"] {
            fs::create_dir_all(folder.join(part)).unwrap();
        }
        let mut control = match real() {
            true => Command::new(control_program()),
            false => node.gpumux(["emu", "mps"]),
        };
        control.arg("-f");
        enter(&mut control, &folder);
        let control = Process::start(&mut control);
        wait_for("the control daemon", PATIENCE, || {
            folder.join("pipe/control").exists().then_some(())
        });
        Self {
            node,
            listener,
            folder,
            _control: control,
        }
    }

    #[track_caller]
    fn start(&self, program: &str) -> (Process, Session, Box<dyn Controls>) {
        let mut command = self.node.shimmed(program, &self.listener.path);
        enter(&mut command, &self.folder);
        let process = Process::start(&mut command);
        let (session, controls) = self.listener.controls();
        (process, session, controls)
    }
}

/// NVIDIA's, where it may be.
fn control_program() -> PathBuf {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let more = ["/usr/bin", "/usr/local/nvidia/bin"].map(PathBuf::from);
    let mut places = std::env::split_paths(&path).chain(more);
    let found = places.find_map(|place| {
        let program = place.join("nvidia-cuda-mps-control");
        program.is_file().then_some(program)
    });
    found.expect("nvidia-cuda-mps-control is installed")
}

/// Sends a signal to the server of the node's only group.
fn signal_server(node: &Node, signal: Signal) {
    let mut groups = fs::read_dir(node.dir().join("groups")).unwrap().flatten();
    let mut ask = match real() {
        true => Command::new(control_program()),
        false => node.gpumux(["emu", "mps"]),
    };
    enter(&mut ask, &groups.next().unwrap().path());
    let mut asked = Process::start(&mut ask);
    asked.write("get_server_list\n");
    let server: i32 = asked.finish().out.trim().parse().unwrap();
    rustix::process::kill_process(Pid::from_raw(server).unwrap(), signal).unwrap();
}

fn enter(command: &mut Command, folder: &Path) {
    command
        .env("CUDA_MPS_PIPE_DIRECTORY", folder.join("pipe"))
        .env("CUDA_MPS_LOG_DIRECTORY", folder.join("log"));
}

#[test]
fn the_groups_controls_are_at_every_clients_handles() {
    let puppets = Puppets::new();
    let mut clients = Vec::new();
    for count in [1, 2, 8] {
        while clients.len() < count {
            let mut client = puppets.start(TICKS);
            client.0.wait_lines(2);
            clients.push(client);
        }
        let controls: Vec<&dyn Controls> =
            clients.iter().map(|(_, _, controls)| &**controls).collect();
        controls[0].set_timeslice(1000 + count as u64).unwrap();
        let read: Vec<_> = controls.iter().map(|it| it.timeslice()).collect();
        println!("{count} clients; slice set through the first, read through each: {read:?}");
        for controls in &controls {
            controls.set_timeslice(3000).unwrap();
        }
        for controls in &controls {
            assert_eq!(controls.timeslice().unwrap(), 3000);
        }
    }
    let progress = |clients: &[(Process, Session, Box<dyn Controls>)], time| -> Vec<usize> {
        let before: Vec<usize> = clients.iter().map(|it| it.0.lines()).collect();
        std::thread::sleep(time);
        clients
            .iter()
            .zip(before)
            .map(|(it, before)| it.0.lines() - before)
            .collect()
    };
    let time = Duration::from_millis(500);
    clients[0].2.freeze().unwrap();
    std::thread::sleep(Duration::from_millis(50));
    println!(
        "progress with the first of 8 frozen: {:?}",
        progress(&clients, time)
    );
    for (_, _, controls) in &clients[1..] {
        controls.freeze().unwrap();
    }
    for (process, _, _) in &clients {
        wait_still(process);
    }
    for (_, _, controls) in &clients {
        controls.thaw().unwrap();
    }
    for (process, _, _) in &mut clients {
        let lines = process.lines();
        process.wait_lines(lines + 3);
    }
}

#[test]
fn process_of_another_trust_domain_cannot_join() {
    let mut node = Node::start();
    let mut inside = member(&node, "inside", "", TICKS);
    inside.wait_lines(3);
    node.wait_tenant("inside", has_domain);
    let groups = || fs::read_dir(node.dir().join("groups")).unwrap().flatten();
    let folder = groups().next().unwrap().path();
    let pipe = folder.join("pipe").display().to_string();
    let scratch = format!("{} scratch", gpumux_tests::binary().display());
    // Also where it has no session: without the library, with no secret or a wrong one, without a daemon.
    let sets = [
        ":",
        "LD_PRELOAD=$(echo $LD_PRELOAD | sed 's/[^: ]*libgpumux.so[: ]*//')",
        "unset GPUMUX_TENANT",
        "GPUMUX_TENANT=garbage",
        "GPUMUX_SOCKET=/nonexistent",
    ];
    for options in [
        "--name outsider",
        "--name outsider --trust other --sharing space",
    ] {
        for set in sets {
            let script = format!("{set}; CUDA_MPS_PIPE_DIRECTORY={pipe} exec {scratch}");
            let mut command = node.tenant(options, "sh -c");
            let outsider = Process::start(command.arg(script)).finish_within(PATIENCE);
            assert_eq!(outsider.code(), 128 + 9, "{set}: {outsider:#?}");
            wait_for("its tenant's end", PATIENCE, || {
                node.find_tenant("outsider").is_none().then_some(())
            });
        }
    }
    // Nor may a process without a tenant.
    let foreign = |node: &Node| {
        let mut command = node.on_device(scratch.split(' '));
        enter(&mut command, &folder);
        Process::start(&mut command)
    };
    let ended = foreign(&node).finish_within(PATIENCE);
    assert_eq!(ended.code(), 128 + 9, "{ended:#?}");
    // They were ended before they did harm.
    let lines = inside.lines();
    inside.wait_lines(lines + 10);
    assert_eq!(node.ps()["faults"].as_array().map(Vec::len), Some(0));
    // A process that came while there was no daemon is found by the next one.
    node.kill_daemon();
    let mut early = foreign(&node);
    early.wait_lines(1);
    node.start_daemon();
    let ended = early.finish_within(PATIENCE);
    assert_eq!(ended.code(), 128 + 9, "{ended:#?}");
    let lines = inside.lines();
    inside.wait_lines(lines + 10);
}
