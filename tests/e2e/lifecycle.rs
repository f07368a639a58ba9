//! The life of a tenant as users see it: names, detached runs and their logs, stop, kill, wait, events, what is remembered, and what is
//! left when it has ended.

mod killed;
mod signals;

use std::{
    fs,
    io::ErrorKind,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use gpumux_tests::{Finished, Node, PATIENCE, Process, Run, at_terminal, wait_for};
use rustix::process::Signal;
use serde_json::Value;

use crate::{REQUESTS, TICKS, on_full_disk};

/// `gpumux ARGS` with a home of its own.
fn gpumux(node: &Node, line: &str) -> Command {
    let mut command = node.gpumux(line.split_whitespace());
    at_home(node, &mut command);
    command
}

fn at_home(node: &Node, command: &mut Command) {
    command.env("HOME", node.dir()).env_remove("XDG_STATE_HOME");
}

/// Starts a shell script detached, as a tenant of this name.
fn detached(node: &Node, name: &str, script: &str) -> Finished {
    let mut command = node.tenant(&format!("-d --name {name}"), "sh -c");
    at_home(node, command.arg(script));
    command.run()
}

/// A script that waits for a file, and then runs this line.
fn after(file: &Path, line: &str) -> String {
    let file = file.display();
    format!("while [ ! -e {file} ]; do sleep 0.05; done; {line}")
}

fn ended(node: &Node, name: &str) -> Option<Value> {
    let listing = gpumux(node, "ps -a --json").run().ok().json();
    let ended = listing["ended"].as_array().unwrap().iter();
    ended.rev().find(|end| end["name"] == name).cloned()
}

#[test]
fn daemon_whose_folder_is_removed_ends_and_frees_its_tenants() {
    let mut node = Node::start();
    let _web = Process::start(&mut node.tenant("--name web --class latency", REQUESTS));
    let tenants = ["a", "b"].map(|name| {
        let options = format!("--name {name} --class batch");
        Process::start(&mut node.tenant(&options, TICKS))
    });
    for name in ["a", "b"] {
        node.wait_tenant(name, |it| it["domains"][0]["freezes"].as_u64() > Some(0));
    }
    // What removes the folder leaves the emulated device's socket, which another user's would be.
    for entry in fs::read_dir(node.dir()).unwrap().flatten() {
        let path = entry.path();
        let removed = match path.is_dir() {
            true => fs::remove_dir_all(path),
            false if path.ends_with("emu.sock") => Ok(()),
            false => fs::remove_file(path),
        };
        // The daemon may have renamed a file that it writes.
        if let Err(error) = removed {
            assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
        }
    }
    let ended = node.await_daemons_end();
    assert_eq!(ended.code(), 1, "{}", ended.err);
    assert!(
        ended.err.contains("was removed or replaced while"),
        "{}",
        ended.err
    );
    for tenant in &tenants {
        let lines = tenant.lines();
        wait_for("it goes on", PATIENCE, || {
            (tenant.lines() > lines + 3).then_some(())
        });
    }
    let none = gpumux(&node, "ps").run();
    assert!(none.err.contains("so no tenant is managed"), "{}", none.err);
    node.start_daemon();
}

#[test]
fn unknown_name_is_answered_with_a_similar_one() {
    let node = Node::start();
    detached(&node, "night", "true").ok();
    wait_for("its end", PATIENCE, || ended(&node, "night"));
    for command in ["wait", "logs", "inspect", "stop", "kill"] {
        let refused = gpumux(&node, &format!("{command} nightt")).run();
        assert_eq!(refused.code(), 1, "{refused:?}");
        let hint = "a similar name is `night`, which has ended";
        assert!(refused.err.contains(hint), "{refused:?}");
        let refused = gpumux(&node, &format!("{command} xyz")).run();
        assert_eq!(refused.code(), 1, "{refused:?}");
        assert!(refused.err.contains("see `gpumux ps"), "{refused:?}");
    }
    let ended = gpumux(&node, "stop night").run();
    assert!(ended.err.contains("this name has ended"), "{ended:?}");
    assert_eq!(gpumux(&node, "wait night").run().code(), 0);
}

#[test]
fn detached_program_leaves_its_output_and_its_exit_code() {
    let mut node = Node::start();
    let started = detached(
        &node,
        "quick",
        "echo first; echo second >&2; read line; exit 7",
    )
    .ok();
    assert_eq!(
        (started.out.as_str(), started.err.as_str()),
        ("quick\n", "")
    );
    assert_eq!(gpumux(&node, "wait quick").run().code(), 7);
    let logs = gpumux(&node, "logs quick").run().ok().out;
    assert_eq!(logs, "first\nsecond\n");
    assert_eq!(gpumux(&node, "logs -n 1 quick").run().ok().out, "second\n");
    let end = ended(&node, "quick").unwrap();
    assert_eq!(end["exit"]["code"], 7, "{end:#}");
    assert_eq!(end["reason"], "failed with exit code 7");
    let table = gpumux(&node, "ps -a").run().ok().out;
    assert!(table.contains("failed with exit code 7"), "{table}");
    let inspected = gpumux(&node, "inspect quick").run().ok().json();
    assert_eq!(inspected["ended"]["exit"]["code"], 7, "{inspected:#}");
    // A daemon of a user's own ends soon after its last tenant.
    node.stop_daemon();
    assert_eq!(gpumux(&node, "wait quick").run().code(), 7);
    let unknown = gpumux(&node, "wait other").run();
    assert!(unknown.err.contains("no daemon"), "{unknown:?}");
}

#[test]
fn output_is_followed_while_the_daemon_is_away() {
    let mut node = Node::start();
    let go = node.dir().join("go");
    let script = format!("echo first; {}", after(&go, "echo last"));
    detached(&node, "quick", &script).ok();
    let mut follows = Process::start(&mut gpumux(&node, "logs -f quick"));
    follows.wait_lines(1);
    node.kill_daemon();
    // It asks the daemon more than once.
    std::thread::sleep(Duration::from_secs(3));
    assert!(follows.poll().is_none(), "{}", follows.err());
    std::fs::write(go, "").unwrap();
    assert_eq!(follows.finish_within(PATIENCE).ok().out, "first\nlast\n");
}

#[test]
fn program_that_ends_while_the_daemon_is_away_has_an_end() {
    let mut node = Node::start();
    let go = node.dir().join("go");
    let script = after(&go, "exit 7");
    detached(&node, "quick", &script).ok();
    let mut front = node.tenant("--name front", "sh -c");
    let mut front = Process::start(front.arg(&script));
    node.wait_tenant("front", |_| true);
    let socket = node.api_socket().display().to_string();
    // A listening socket has state 1.
    let is_connected = || {
        let sockets = fs::read_to_string("/proc/net/unix").unwrap();
        let own = sockets.lines().filter(|it| it.ends_with(&socket));
        let mut states = own.filter_map(|it| it.split_whitespace().nth(5));
        states.any(|it| it != "01")
    };
    wait_for("the end of earlier requests", PATIENCE, || {
        (!is_connected()).then_some(())
    });
    let waits = Process::start(&mut gpumux(&node, "wait quick"));
    // It asks for the tenant, or waits for events.
    wait_for("the second reader", PATIENCE, || {
        is_connected().then_some(())
    });
    node.kill_daemon();
    fs::write(&go, "").unwrap();
    wait_for("the end of the program in the foreground", PATIENCE, || {
        front.poll()
    });
    node.start_daemon();
    let waited = waits.finish();
    assert_eq!(waited.code(), 7, "{waited:#?}");
    assert!(
        waited.err.contains("waiting until it is back"),
        "{waited:#?}"
    );
    assert_eq!(gpumux(&node, "wait quick").run().code(), 7);
    let end = ended(&node, "quick").unwrap();
    assert_eq!(end["reason"], "failed with exit code 7", "{end:#}");
    // It has no parent that reports its end.
    let end = ended(&node, "front").unwrap();
    assert_eq!(
        end["reason"], "ended; its exit code is not known",
        "{end:#}"
    );
}

#[test]
fn detached_program_that_cannot_start_is_reported() {
    let node = Node::start();
    let mut missing = node.tenant("-d", "gpumux-there-is-no-such-program");
    at_home(&node, &mut missing);
    let missing = missing.run();
    assert_eq!(
        (missing.code(), missing.out.as_str()),
        (127, ""),
        "{missing:?}"
    );
    assert!(missing.err.contains("no-such-program"), "{missing:?}");
    detached(&node, "one", "sleep 60").ok();
    let twice = detached(&node, "one", "true");
    assert_eq!((twice.code(), twice.out.as_str()), (125, ""), "{twice:?}");
    gpumux(&node, "kill one").run().ok();
}

#[test]
fn output_that_cannot_be_written_is_reported() {
    let node = Node::start();
    let go = node.dir().join("go");
    let script = format!(
        "head -c 100000 /dev/zero; until [ -e {} ]; do sleep 0.02; done; head -c 100000 /dev/zero; exit 3",
        go.display()
    );
    let mut run = node.tenant("-d --name full", "sh -c");
    at_home(&node, run.arg(script));
    on_full_disk(&run, 40).run().ok();
    node.wait_tenant("full", |it| {
        it["lost_output"]["bytes"].as_u64() > Some(50_000)
    });
    let text = gpumux(&node, "explain full").run().ok().out;
    assert!(text.contains("its parent could not write it to"), "{text}");
    let logs = gpumux(&node, "logs full").run().ok();
    assert!(
        logs.err.contains("of its output lost (File too large"),
        "{}",
        logs.err
    );
    fs::write(&go, "").unwrap();
    let waited = gpumux(&node, "wait full").run();
    assert_eq!(waited.code(), 3, "{}", waited.err);
    let why = "failed with exit code 3; ";
    assert!(waited.err.contains(why), "{}", waited.err);
    assert!(
        waited
            .err
            .contains("KiB of its output lost (File too large"),
        "{}",
        waited.err
    );
    let end = ended(&node, "full").unwrap();
    assert_eq!(end["noteworthy"], true, "{end:#}");
}

#[test]
fn logs_are_followed_until_the_tenant_has_ended() {
    let node = Node::start();
    let go = node.dir().join("go");
    let script = format!(
        "echo one; until [ -e {} ]; do sleep 0.02; done; echo two",
        go.display()
    );
    detached(&node, "talks", &script).ok();
    let mut follows = Process::start(&mut gpumux(&node, "logs --follow talks"));
    follows.wait_lines(1);
    assert!(follows.poll().is_none());
    fs::write(&go, "").unwrap();
    assert_eq!(follows.finish().ok().out, "one\ntwo\n");
}

#[test]
fn end_of_a_foreground_program_is_known_where_the_kernel_tells() {
    let node = Node::start();
    let run = node.tenant("--name brief", "sh -c").arg("exit 5").run();
    assert_eq!(run.code(), 5);
    let end = wait_for("its end", PATIENCE, || ended(&node, "brief"));
    let code = &end["exit"]["code"];
    assert!(code.is_null() || *code == 5, "{end:#}");
    let waited = gpumux(&node, "wait brief").run();
    let expected = if code.is_null() { 1 } else { 5 };
    assert_eq!(waited.code(), expected, "{waited:?}");
}

#[test]
fn name_is_free_as_soon_as_its_program_has_ended() {
    let node = Node::start();
    for _ in 0..5 {
        // Its parent asks for its end later: until then the daemon does not know its exit code.
        let ended = Process::start(&mut node.tenant("--name again", "sleep 1000"));
        node.wait_tenant("again", |_| true);
        ended.signal(Signal::KILL);
        let stat = format!("/proc/{}/stat", ended.pid());
        wait_for("the program's end", PATIENCE, || {
            let stat = fs::read_to_string(&stat).unwrap();
            stat.contains(") Z ").then_some(())
        });
        node.tenant("--name again", "true").run().ok();
    }
}

#[test]
fn tenants_are_named_after_the_script() {
    let node = Node::start();
    let bin = node.dir().join("bin");
    fs::create_dir(&bin).unwrap();
    gpumux_tests::program(&bin.join("python3"), "#!/bin/sh\necho ready; sleep 60\n");
    let start = |program: &str| {
        let mut process =
            Process::start(&mut node.tenant("", &format!("{}/{program}", bin.display())));
        process.wait_lines(1);
        process
    };
    let _both = [start("python3 train.py"), start("python3 -m pkg.serve")];
    for name in ["train", "serve"] {
        assert!(node.find_tenant(name).is_some(), "{:#}", node.ps());
    }
    let names = gpumux(&node, "ps -q --sort name").run().ok().out;
    assert_eq!(names, "serve\ntrain\n");
    let table = gpumux(&node, "ps train").run().ok().out;
    assert!(
        table.contains("train.py") && !table.contains("pkg.serve"),
        "{table}"
    );
    let typo = gpumux(&node, "explain trian").run();
    assert!(typo.err.contains("`train`"), "{typo:?}");
}

#[test]
fn remembered_settings_are_listed_shown_and_cleared() {
    let node = Node::start();
    let tenant = |script: &str| {
        let mut command = node.tenant("--name train", "sh -c");
        command.arg(script);
        command
    };
    let mut first = Process::start(&mut tenant("echo ready; read line"));
    first.wait_lines(1);
    let set = gpumux(&node, "set train --class batch --guaranteed 50%")
        .run()
        .ok();
    assert_eq!(set.out, "train: class batch, guaranteed 50%\n");
    first.close_input();
    first.finish();
    let list = gpumux(&node, "set --list").run().ok().out;
    assert!(
        list.contains("train") && list.contains("class batch, guaranteed 50%"),
        "{list}"
    );
    wait_for("the tenant's end", PATIENCE, || {
        node.find_tenant("train").is_none().then_some(())
    });
    let again = tenant("true").run().ok();
    assert!(
        again.err.contains("class batch, guaranteed 50%"),
        "{again:?}"
    );
    assert_eq!(again.err.lines().count(), 1, "{again:?}");
    gpumux(&node, "set --forget train").run().ok();
    wait_for("the tenant's end", PATIENCE, || {
        node.find_tenant("train").is_none().then_some(())
    });
    assert_eq!(tenant("true").run().ok().err, "");
    assert_eq!(
        gpumux(&node, "set --list --json").run().ok().json(),
        serde_json::json!([])
    );
}

#[test]
fn events_tell_of_start_change_refusal_and_end() {
    let node = Node::start();
    let follows = Process::start(&mut gpumux(&node, "events --json"));
    // It prints what happens once it is connected.
    wait_for("the follower", PATIENCE, || {
        node.tenant("", "true").run().ok();
        (follows.lines() > 0).then_some(())
    });
    let mut tenant = Process::start(&mut node.tenant("--name worker --guaranteed 70%", TICKS));
    tenant.wait_lines(1);
    gpumux(&node, "set worker --weight 2").run().ok();
    let refused = node.tenant("--name more --guaranteed 70%", "true").run();
    assert_eq!(refused.code(), 125, "{refused:?}");
    tenant.signal(Signal::TERM);
    tenant.finish();
    let kinds = || -> Vec<String> {
        let past = gpumux(&node, "events --past --json").run().ok().out;
        let event = |line: &str| serde_json::from_str::<Value>(line).unwrap();
        let events = past.lines().map(event);
        let events = events.filter(|it| it["tenant"] == "worker" || it["tenant"] == "more");
        let text = |it: Value| {
            format!(
                "{} {}",
                it["tenant"].as_str().unwrap_or("-"),
                it["kind"].as_str().unwrap()
            )
        };
        events.map(text).collect()
    };
    let expected = [
        "worker started",
        "worker resized",
        "more refused",
        "worker ended",
    ];
    wait_for("the events", PATIENCE, || {
        (kinds() == expected).then_some(())
    });
    let lines = gpumux(&node, "events --past worker").run().ok().out;
    assert_eq!(lines.lines().count(), 3, "{lines}");
    wait_for("the last event", PATIENCE, || {
        let out = follows.out();
        let mut lines = out.lines();
        let is_last = |it: &str| it.contains("\"ended\"") && it.contains("\"worker\"");
        lines.any(is_last).then_some(())
    });
    follows.signal(Signal::TERM);
}

#[test]
fn on_collateral_costs_nothing_for_a_program_outside_groups() {
    let node = Node::start();
    let mut run = node.tenant("--restart on-collateral", "sh -c");
    let mut program = Process::start(run.arg("echo $$; exec sleep 60"));
    program.wait_lines(1);
    // The program took this process's place: there is no parent that would wait for the news of a fault.
    assert_eq!(program.out().trim(), program.pid().to_string());
}

#[test]
fn static_program_does_not_run_under_strict() {
    let node = Node::start();
    let program = node.dir().join("static");
    // The head of a program with one segment, which is loaded, and no interpreter.
    let mut head = vec![0u8; 120];
    head[..6].copy_from_slice(b"\x7fELF\x02\x01");
    (head[16], head[32], head[54], head[56], head[64]) = (2, 64, 56, 1, 1);
    fs::write(&program, head).unwrap();
    let refused = node
        .tenant("--strict", &program.display().to_string())
        .run();
    assert_eq!(refused.code(), 125, "{refused:?}");
    assert!(refused.err.contains("statically linked"), "{refused:?}");
}

#[test]
fn hint_that_can_have_no_effect_is_refused() {
    let node = Node::start();
    let mut batch = Process::start(&mut node.tenant("--name night --class batch", TICKS));
    batch.wait_lines(1);
    let refused = gpumux(&node, "hint night").run();
    assert_eq!(refused.code(), 1, "{refused:?}");
    assert!(refused.err.contains("--class latency"), "{refused:?}");
    gpumux(&node, "set night --class latency --quiet")
        .run()
        .ok();
    let hinted = gpumux(&node, "hint night").run().ok().out;
    assert_eq!(hinted, "night: 1 process takes its GPU ahead of the work\n");
}
