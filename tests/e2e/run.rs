//! `gpumux run`: exit codes, signals, environment, tenants, and the daemon that it starts.

mod again;

use std::{fs, process::Command, time::Duration};

use gpumux_tests::{Node, Options, PATIENCE, Process, Run, binary, real, wait_for};
use rustix::{
    fs::{FlockOperation, flock},
    process::Signal,
};

use crate::{TICKS, on_full_disk};

fn no_daemon() -> Node {
    Node::with(Options {
        without_daemon: true,
        ..Options::default()
    })
}

#[test]
fn the_programs_exit_code_is_ours() {
    let node = Node::start();
    for code in [0, 1, 7, 125, 255] {
        let line = ["run", "--", "sh", "-c", &format!("exit {code}")].map(str::to_owned);
        assert_eq!(node.gpumux(line).run().code(), code);
    }
}

#[test]
fn programs_that_cannot_run_have_the_shells_codes() {
    let node = Node::start();
    let missing = node.tenant("", "gpumux-there-is-no-such-program").run();
    assert_eq!(missing.code(), 127, "{missing:#?}");
    assert!(
        missing.err.contains("gpumux-there-is-no-such-program"),
        "{missing:#?}"
    );
    let text = node.dir().join("text");
    fs::write(&text, "no program").unwrap();
    let text = node.tenant("", &text.display().to_string()).run();
    assert_eq!(text.code(), 126, "{text:#?}");
}

#[test]
fn long_command_runs() {
    let node = Node::start();
    let word = "x".repeat(100_000);
    let mut command = node.gpumux(["run", "--strict", "--", "echo"]);
    let finished = command.args([&word, &word]).run().ok();
    assert_eq!(finished.out.len(), 2 * word.len() + 2);
}

#[test]
fn detached_program_whose_name_cannot_be_written_is_reported_as_running() {
    let node = Node::start();
    let mut command = node.gpumux(["run", "-d", "--name", "told", "--", "sleep", "600"]);
    let full = std::fs::File::options().write(true).open("/dev/full");
    let told = command.stdout(full.expect("it is there")).output();
    let told = told.expect("it starts");
    let err = String::from_utf8_lossy(&told.stderr);
    assert!(told.status.success() && err.contains("told runs"), "{err}");
    node.wait_tenant("told", |_| true);
}

#[test]
fn folder_for_output_that_takes_no_files_is_named() {
    let node = Node::start();
    let mut command = node.gpumux(["run", "-d", "--name", "quiet", "--", "true"]);
    let finished = command.env("XDG_STATE_HOME", "/proc/nope").run();
    assert_eq!(finished.code(), 125, "{finished:#?}");
    for part in ["/proc/nope/gpumux/logs/quiet.log", "XDG_STATE_HOME"] {
        assert!(finished.err.contains(part), "{finished:#?}");
    }
}

#[test]
fn signals_reach_the_program() {
    let node = Node::start();
    // The parent of the tests may have had signals ignored, as shells do in the background, and what is ignored stays so.
    let env = ["run", "--", "env", "--default-signal"];
    let script = "trap 'echo int; exit 3' INT; trap 'echo usr1' USR1; echo ready; while :; do sleep 0.01; done";
    let mut process = Process::start(node.gpumux(env).args(["sh", "-c", script]));
    process.wait_lines(1);
    process.signal(Signal::USR1);
    process.wait_lines(2);
    process.signal(Signal::INT);
    let finished = process.finish();
    assert_eq!(finished.out, "ready\nusr1\nint\n");
    assert_eq!(finished.code(), 3);
    for (signal, code) in [(Signal::TERM, 143), (Signal::HUP, 129), (Signal::KILL, 137)] {
        let program = ["sh", "-c", "echo ready; exec sleep 60"];
        let mut process = Process::start(node.gpumux(env).args(program));
        process.wait_lines(1);
        process.signal(signal);
        assert_eq!(process.finish().code(), code);
    }
}

#[test]
fn a_shell_sees_a_signal_as_128_and_its_number() {
    let node = Node::start();
    let line = format!(
        "{} run -- sh -c 'kill -TERM $$'; echo $?",
        binary().display()
    );
    let mut shell = node.on_device(["sh", "-c", &line]);
    assert_eq!(shell.run().out, "143\n");
}

#[test]
fn input_and_output_are_the_programs_own() {
    let node = Node::start();
    let mut process = Process::start(&mut node.gpumux(["run", "--", "cat"]));
    process.write("some text\n");
    process.wait_lines(1);
    let finished = process.finish().ok();
    assert_eq!(
        (finished.out.as_str(), finished.err.as_str()),
        ("some text\n", "")
    );
}

#[test]
fn environment_names_tenant_and_socket_but_no_guarantee() {
    let node = Node::start();
    let mut run = node.gpumux([
        "run", "--class", "batch", "--weight", "3", "--strict", "--", "env",
    ]);
    run.env("LD_PRELOAD", "/dev/null/other.so");
    let finished = run.run().ok();
    let value = |name: &str| {
        let lines = finished.out.lines();
        lines
            .filter_map(|line| line.split_once('='))
            .find(|(n, _)| *n == name)
            .map(|(_, v)| v)
    };
    let preload = value("LD_PRELOAD").unwrap();
    assert!(preload.contains("/libgpumux.so:"), "{preload}");
    assert!(preload.ends_with(":/dev/null/other.so"), "{preload}");
    assert_eq!(value("GPUMUX_SOCKET"), node.session_socket().to_str());
    let token = value("GPUMUX_TENANT").unwrap();
    assert!(
        token.len() == 32 && token.bytes().all(|b| b.is_ascii_hexdigit()),
        "{token}"
    );
    assert_eq!(value("GPUMUX_STRICT"), Some("1"));
    assert!(
        !finished.out.to_lowercase().contains("batch"),
        "{}",
        finished.out
    );
}

#[test]
fn frameworks_are_adapted_unless_their_user_set_something() {
    const JAX: &str = "XLA_PYTHON_CLIENT_PREALLOCATE";
    const TENSORFLOW: &str = "TF_FORCE_GPU_ALLOW_GROWTH";
    const NCCL: &str = "NCCL_PROFILER_PLUGIN";
    let node = Node::start();
    let shown = |options: &str, program: &[&str], set: &[(&str, &str)]| {
        let mut run = node.gpumux(["run"]);
        run.args(options.split_whitespace()).arg("--").args(program);
        for name in [JAX, TENSORFLOW, NCCL, "XLA_CLIENT_MEM_FRACTION"] {
            run.env_remove(name);
        }
        let finished = run.envs(set.iter().copied()).run().ok();
        let given = [JAX, TENSORFLOW].map(|name| {
            let line = finished.out.lines().find_map(|it| it.strip_prefix(name));
            line.and_then(|it| it.strip_prefix('=')).map(str::to_owned)
        });
        (given, finished.err)
    };
    let texts =
        |jax: Option<&str>, other: Option<&str>| [jax, other].map(|it| it.map(str::to_owned));
    let script = node.dir().join("script.sh");
    fs::write(&script, "env\n").expect("room");
    let shell = ["sh", script.to_str().expect("text")];

    let (given, line) = shown("", &shell, &[]);
    assert_eq!(given, texts(Some("false"), Some("true")));
    assert!(line.contains(JAX) && line.contains(TENSORFLOW), "{line}");
    assert!(line.contains("--frameworks leave"), "{line}");
    assert!(
        line.contains(NCCL) && line.contains("/libgpumux.so"),
        "{line}"
    );
    // The user's own settings stay, and are not mentioned.
    let (given, line) = shown("", &shell, &[("XLA_CLIENT_MEM_FRACTION", ".3")]);
    assert_eq!(given, texts(None, Some("true")));
    assert!(!line.contains(JAX) && line.contains(TENSORFLOW), "{line}");
    let own = [(JAX, "true"), (TENSORFLOW, "false"), (NCCL, "none")];
    let (given, line) = shown("", &shell, &own);
    assert_eq!(given, texts(Some("true"), Some("false")));
    assert_eq!(line, "");
    // Nothing is set where that is asked for, nor for a program that runs no Python.
    let (given, line) = shown("--frameworks leave", &shell, &[]);
    assert_eq!((given, &*line), (texts(None, None), ""));
    let (given, line) = shown("", &["env"], &[]);
    assert_eq!((given, &*line), (texts(None, None), ""));
}

#[test]
fn a_process_tree_is_one_tenant() {
    let node = Node::start();
    let tree = format!("{0} scratch & {0} scratch & wait", binary().display());
    let mut tenant = node.tenant("--name tree --class batch", "sh -c");
    let _tree = Process::start(tenant.arg(tree));
    let found = node.wait_tenant("tree", |tenant| {
        tenant["domains"].as_array().map(Vec::len) == Some(2)
    });
    assert_eq!(found["pids"].as_array().map(Vec::len), Some(2));
    assert_eq!(found["class"], "batch");
    assert_eq!(
        found["devices"].as_array().map(Vec::len),
        Some(1),
        "{found:#}"
    );
    assert_eq!(node.ps()["tenants"].as_array().map(Vec::len), Some(1));
}

#[test]
fn names_are_unique_and_given_where_none_was_asked_for() {
    let node = Node::start();
    let mut first = Process::start(node.tenant("--name a", "sh -c").arg("echo ready; sleep 60"));
    first.wait_lines(1);
    let second = node.tenant("--name a", "true").run();
    assert_eq!(second.code(), 125, "{second:#?}");
    assert!(second.err.contains('a'), "{second:#?}");
    let start = || {
        let mut process = Process::start(node.tenant("", "sh -c").arg("echo ready; sleep 60"));
        process.wait_lines(1);
        process
    };
    let _two = [start(), start()];
    assert!(node.find_tenant("sh").is_some(), "{:#}", node.ps());
    assert!(node.find_tenant("sh-2").is_some(), "{:#}", node.ps());
    drop(first);
    wait_for("the tenant's end", PATIENCE, || {
        node.find_tenant("a").is_none().then_some(())
    });
    node.tenant("--name a", "true").run().ok();
}

#[test]
fn guarantees_that_do_not_fit_are_rejected() {
    let node = Node::start();
    let _first = Process::start(&mut node.tenant("--name a --guaranteed 0.7", TICKS));
    node.wait_tenant("a", |tenant| !tenant["domains"][0].is_null());
    for (options, code, word) in [
        ("--guaranteed 0.6", 125, "at most 30%"),
        ("--guaranteed 1.5", 2, "1.5"),
        ("--guaranteed 150%", 2, "150%"),
        ("--weight -1", 2, "-1"),
        ("--memory-limit 40", 2, "40GiB"),
        ("--guaranteed 0.2 --limit 0.1", 2, "20%"),
    ] {
        let refused = node.tenant(options, "echo ran").run();
        assert_eq!(refused.code(), code, "{options}: {refused:#?}");
        assert!(refused.err.contains(word), "{options}: {refused:#?}");
        assert_eq!(refused.out, "", "{options}");
    }
    let wrong = node.tenant("--class fast", "echo ran").run();
    assert_eq!(wrong.code(), 2);
    assert!(wrong.err.contains("latency, standard, batch"), "{wrong:#?}");
    assert_eq!(node.ps()["tenants"].as_array().map(Vec::len), Some(1));
}

#[test]
fn a_daemon_is_started_where_there_is_none() {
    let node = no_daemon();
    let mut tenant = Process::start(&mut node.tenant("--name first --class latency", TICKS));
    tenant.wait_lines(1);
    let found = node.wait_tenant("first", |tenant| !tenant["domains"][0].is_null());
    assert_eq!(found["class"], "latency");
    // The program has no child that it did not make, and does not share its session with the daemon.
    let children = format!("/proc/{0}/task/{0}/children", tenant.pid());
    assert_eq!(fs::read_to_string(children).unwrap(), "");
    assert!(node.dir().join("daemon.log").exists());
}

#[test]
fn a_daemon_is_started_where_one_was_killed() {
    let mut node = Node::start();
    node.kill_daemon();
    assert!(node.api_socket().exists(), "nobody removed it");
    let run = node.tenant("", "echo ran").run().ok();
    assert_eq!((run.out.as_str(), run.err.as_str()), ("ran\n", ""));
}

#[test]
fn daemon_that_cannot_start_on_a_full_disk_is_reported() {
    let node = no_daemon();
    let run = on_full_disk(&node.tenant("", "echo ran"), 0).run().ok();
    assert_eq!(run.out, "ran\n");
    let log = node.dir().join("daemon.log");
    let why = format!("{} cannot be written (File too large", log.display());
    assert!(run.err.contains(&why), "{}", run.err);
    assert!(
        run.err.contains("the program runs unmanaged"),
        "{}",
        run.err
    );
}

#[test]
fn a_started_daemon_holds_nothing_of_the_shell_that_started_it() {
    let node = no_daemon();
    // `cat` ends when no process can write to the pipe any more.
    let line = format!("{} run -- true 7>&1 | cat; echo done", binary().display());
    let shell = Process::start(&mut node.on_device(["sh", "-c", &line]));
    assert_eq!(shell.finish_within(PATIENCE).ok().out, "done\n");
}

#[test]
fn many_at_once_start_one_daemon() {
    let node = no_daemon();
    let start = |_| Process::start(node.tenant("", "sh -c").arg("echo ready; sleep 60"));
    let mut tenants: Vec<_> = (0..8).map(start).collect();
    for tenant in &mut tenants {
        tenant.wait_lines(1);
        assert_eq!(tenant.err(), "");
    }
    assert_eq!(node.ps()["tenants"].as_array().map(Vec::len), Some(8));
}

#[test]
fn program_waits_for_a_daemon_that_starts() {
    let node = no_daemon();
    // As one that has its folder, and does not serve yet.
    let name = node.dir().join("lock");
    fs::write(&name, std::process::id().to_string()).unwrap();
    let lock = fs::File::open(name).unwrap();
    flock(&lock, FlockOperation::LockExclusive).unwrap();
    let mut tenant = Process::start(&mut node.tenant("", "echo ran"));
    // Longer than a second daemon tries to be the one.
    std::thread::sleep(Duration::from_secs(1));
    assert!(tenant.poll().is_none(), "{}", tenant.err());
    drop(lock);
    let _daemon = Process::start(&mut node.gpumux(["daemon"]));
    let finished = tenant.finish().ok();
    assert_eq!(
        (finished.out.as_str(), finished.err.as_str()),
        (
            "ran
", ""
        )
    );
}

/// It refuses what would change anything while it restores what it found, and has its folder until it is gone.
#[test]
fn program_started_while_a_daemon_ends_gets_the_next() {
    if real() {
        eprintln!("SKIPPED: it needs slow controls");
        return;
    }
    let node = Node::with(Options {
        profile: "controls = { set_timeslice_us = [300000, 300000] }",
        ..Options::default()
    });
    let mut tenants: Vec<Process> = Vec::new();
    for class in ["latency", "batch", "batch", "batch"] {
        tenants.push(Process::start(
            &mut node.tenant(&format!("--class {class}"), TICKS),
        ));
        tenants.last_mut().expect("it was pushed").wait_lines(1);
    }
    node.daemon().signal(Signal::TERM);
    // It knows, and has 0.3 s of work with each of them.
    std::thread::sleep(Duration::from_millis(200));
    let tenant = node.tenant("", "echo ran").run().ok();
    assert_eq!((tenant.out.as_str(), tenant.err.as_str()), ("ran\n", ""));
}

/// As where systemd starts it again.
#[test]
fn program_started_between_daemons_gets_the_next() {
    let mut node = Node::start();
    node.kill_daemon();
    let mut tenant = node.tenant("--name waits", "sh -c");
    let mut tenant = Process::start(tenant.arg("echo ready; sleep 60"));
    node.start_daemon();
    tenant.wait_lines(1);
    assert_eq!(tenant.err(), "");
    assert!(node.find_tenant("waits").is_some());
    assert!(!node.dir().join("daemon.log").exists(), "no other began");
}

#[test]
fn a_daemon_without_tenants_ends_by_itself() {
    let node = Node::with(Options {
        daemon: ["--idle-exit", "3"].map(str::to_owned).into(),
        ..Options::default()
    });
    let tenant = node.tenant("", "sleep 4").run().ok();
    assert_eq!(tenant.err, "");
    wait_for("the daemon's end", PATIENCE, || {
        (!node.api_socket().exists()).then_some(())
    });
}

#[test]
fn without_a_daemon_the_program_runs_unmanaged_or_not_at_all() {
    let node = no_daemon();
    // A file where the runtime folder should be: no daemon can start there.
    let blocked = node.dir().join("blocked");
    fs::write(&blocked, "").unwrap();
    let run = |options: &[&str]| {
        let mut line = vec!["run"];
        line.extend(options);
        line.extend(["--", "echo", "ran"]);
        let mut command = Command::new(binary());
        command
            .args(line)
            .env("GPUMUX_RUNTIME_DIR", &blocked)
            .env_remove("LD_PRELOAD")
            .run()
    };
    let lenient = run(&[]).ok();
    assert_eq!(lenient.out, "ran\n");
    assert_eq!(lenient.err.lines().count(), 1, "{lenient:#?}");
    assert!(lenient.err.contains("unmanaged"), "{lenient:#?}");
    let strict = run(&["--strict"]);
    assert_eq!(
        (strict.code(), strict.out.as_str()),
        (125, ""),
        "{strict:#?}"
    );
    assert_eq!(strict.err.lines().count(), 1, "{strict:#?}");
}

#[test]
fn a_missing_library_is_named_with_the_places_looked_in() {
    let node = Node::start();
    let nowhere = node.dir().join("nowhere");
    let mut command = node.gpumux(["run", "--strict", "--", "true"]);
    let strict = command.env("GPUMUX_LIB_DIR", &nowhere).run();
    assert_eq!(strict.code(), 125, "{strict:#?}");
    assert!(strict.err.contains("libgpumux.so is not in"), "{strict:#?}");
    assert!(
        strict.err.contains(&nowhere.display().to_string()),
        "{strict:#?}"
    );
}

#[test]
fn tenants_end_with_their_last_process() {
    let node = Node::start();
    let mut tenant = Process::start(
        node.tenant("--name short", "sh -c")
            .arg("echo ready; sleep 60"),
    );
    tenant.wait_lines(1);
    assert_eq!(node.find_tenant("short").unwrap()["state"], "starting");
    tenant.kill();
    wait_for("the tenant's end", PATIENCE, || {
        node.find_tenant("short").is_none().then_some(())
    });
}

#[test]
fn shells_sm_percentage_does_not_reach_group_members() {
    let node = Node::start();
    let variable = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE";
    for (options, said) in [("--trust team", "\n"), ("", "10\n")] {
        let mut command = node.tenant(options, "sh -c");
        command.arg(format!("echo ${variable}")).env(variable, "10");
        assert_eq!(command.run().ok().out, said, "{options}");
    }
}

#[test]
fn run_inside_run_leaves_one_tenant() {
    let node = Node::start();
    let own = binary().display().to_string();
    let inner = format!("{own} run --name inner --guaranteed 0.6 -- {TICKS}");
    let mut program = Process::start(&mut node.tenant("--name outer --guaranteed 0.6", &inner));
    program.wait_lines(1);
    let found = node.wait_tenant("inner", |tenant| tenant["domains"][0].is_object());
    assert_eq!(found["pids"], serde_json::json!([program.pid()]));
    assert!(node.find_tenant("outer").is_none());
    let ended = node.gpumux(["ps", "-a", "-o", "wide"]).run().ok().out;
    assert!(
        ended.contains("its process became another tenant"),
        "{ended}"
    );
}

#[test]
fn run_in_a_tenants_child_keeps_the_outer_tenant() {
    let node = Node::start();
    let own = binary().display().to_string();
    let script = format!("{own} run --name inner -- sh -c 'echo; exec sleep 60'; true");
    let mut outer = node.tenant("--name outer", "sh -c");
    let mut outer = Process::start(outer.arg(script));
    outer.wait_lines(1);
    for name in ["outer", "inner"] {
        assert!(node.find_tenant(name).is_some(), "{name}");
    }
}
