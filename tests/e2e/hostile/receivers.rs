//! The process that takes in what users send: bounded, replaced, ended.

use super::*;

/// The processes that a process has started and not waited for.
fn children(parent: u32) -> Vec<u32> {
    let children = format!("/proc/{parent}/task/{parent}/children");
    let children = std::fs::read_to_string(children).unwrap_or_default();
    let pids = children.split_whitespace();
    pids.map(|pid| pid.parse().unwrap()).collect()
}

/// The process that receives connections for the daemon.
fn receiver(node: &Node) -> u32 {
    let receives = |pid: &u32| {
        let command = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&command).ends_with("receiver\0")
    };
    let threads = format!("/proc/{}/task", node.daemon().pid());
    wait_for("a receiver", PATIENCE, || {
        let started = std::fs::read_dir(&threads).ok()?.flatten().map(|thread| {
            let children = std::fs::read_to_string(thread.path().join("children"));
            children.unwrap_or_default()
        });
        let pids: Vec<u32> = started
            .flat_map(|pids| {
                let pids = pids.split_whitespace();
                pids.filter_map(|pid| pid.parse().ok()).collect::<Vec<_>>()
            })
            .collect();
        pids.into_iter().find(receives)
    })
}

fn pid(number: u32) -> Pid {
    Pid::from_raw(number.cast_signed()).unwrap()
}

/// Sends a signal to the receiver and to its relays.
fn signal_receivers(node: &Node, signal: Signal) {
    let receiver = receiver(node);
    for relay in children(receiver) {
        // Its connection may have ended, and it with that.
        let _ = kill_process(pid(relay), signal);
    }
    kill_process(pid(receiver), signal).unwrap();
}

#[test]
fn hung_relays_of_a_user_are_bounded_and_others_are_served() {
    if !rustix::process::geteuid().is_root() {
        return eprintln!("skipped: it needs processes of two users");
    }
    let config = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(&config, "max_sessions = 32").unwrap();
    let node = Node::with(Options {
        daemon: vec!["--config".into(), config.path().display().to_string()],
        ..Options::default()
    });
    let mut old = Process::start(&mut node.tenant("--name old --class batch", TICKS));
    old.wait_lines(1);
    let sender = "a_process_that_hangs_relays";
    let Some(hostile) = hostile(&node, "a_process_that_serves_fuse", sender) else {
        return;
    };
    // 32 sessions, 1024 connections of users to the API, 64 of root: half of them, and some that close what was refused.
    let own = 560;
    let receiver = receiver(&node);
    let hang = children(receiver).len();
    assert!((own..own + 32).contains(&hang), "{hang} relays");
    daemon_serves(&node, &old);
    let mut refused = node.gpumux(["ps"]);
    let refused = refused.uid(HOSTILE).gid(HOSTILE).env("HOME", "/").run();
    assert!(refused.err.contains("user 4799 has 560"), "{}", refused.err);
    hostile.kill();
    wait_for("the end of relays", PATIENCE, || {
        (children(receiver).len() < 32).then_some(())
    });
    daemon_serves(&node, &old);
}

#[test]
fn killed_receiver_is_replaced_while_sessions_last() {
    let (node, old) = with_old_tenant();
    let killed = receiver(&node);
    kill_process(pid(killed), Signal::KILL).unwrap();
    wait_for("another receiver", PATIENCE, || {
        (receiver(&node) != killed).then_some(())
    });
    daemon_serves(&node, &old);
}

#[test]
fn stop_signal_for_all_processes_ends_in_good_order() {
    let (mut node, old) = with_old_tenant();
    // As a container's runtime sends it where the container has the host's processes in view.
    signal_receivers(&node, Signal::TERM);
    daemon_serves(&node, &old);
    let ended = node.stop_daemon().ok();
    assert!(!ended.err.contains("ERROR"), "{}", ended.err);
}

#[test]
fn daemon_whose_terminal_closes_ends_in_good_order() {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let ignored = (status.lines()).find_map(|it| it.strip_prefix("SigIgn:"));
    let ignored = u64::from_str_radix(ignored.unwrap().trim(), 16).unwrap();
    if ignored & 1 != 0 {
        return eprintln!(
            "SKIPPED: SIGHUP is ignored (nohup), and so it is by a daemon that is started here"
        );
    }
    let (mut node, _old) = with_old_tenant();
    // A terminal sends it to all processes of the daemon.
    signal_receivers(&node, Signal::HUP);
    let ended = node.end_daemon(Signal::HUP).ok();
    assert!(ended.err.contains("stopped"), "{}", ended.err);
    assert!(!ended.err.contains("ERROR"), "{}", ended.err);
}
