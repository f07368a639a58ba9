//! Faults in a group, lost servers, and what comes back after them.

use super::*;

/// What the servers of the daemon's groups have said, for the reader of a failed test.
fn logs(node: &Node) -> String {
    let mut text = String::new();
    let groups = fs::read_dir(node.dir().join("groups"))
        .into_iter()
        .flatten()
        .flatten();
    for group in groups {
        let log = group.path().join("control.out");
        let said = fs::read_to_string(&log).unwrap_or_default();
        text += &format!("--- {}\n{said}", log.display());
    }
    text
}

#[test]
fn fault_ends_only_its_group_and_the_group_comes_back() {
    let node = Node::start();
    let mut outside = Process::start(&mut node.tenant("--class standard --name outside", TICKS));
    let mut victim = member(&node, "victim", "", TICKS);
    outside.wait_lines(3);
    victim.wait_lines(3);
    let mut again = member(&node, "again", "--restart on-collateral", TICKS);
    again.wait_lines(3);
    let fault = member(
        &node,
        "faulty",
        "",
        "gpumux workload fault --kind illegal-address --seconds 1",
    )
    .finish();
    assert_ne!(fault.code(), 0, "{fault:#?}");
    let ended = Instant::now();
    let victim = victim.finish();
    assert_ne!(victim.code(), 0, "{victim:#?}");
    println!(
        "the victim was gone {:?} after the fault: {}",
        ended.elapsed(),
        victim.err
    );
    let fault = wait_ps(&node, "the fault", |ps| ps["faults"].get(0).cloned());
    println!("{fault:#}\n{}", logs(&node));
    // 100 ms until it is noticed is the aim. The emulated device's machine may have other things to do.
    for took in ["noticed_after_ms", "restarted_ms"] {
        let took = fault[took].as_u64();
        assert!(took.is_some_and(|ms| ms < 2000 || !real()), "{fault:#}");
    }
    let others: Vec<&str> = fault["others"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(Value::as_str)
        .collect();
    assert!(
        others.contains(&"victim") && others.contains(&"again"),
        "{fault:#}"
    );
    if !real() {
        assert_eq!(fault["faulting_client"], "faulty", "{fault:#}");
        assert!(!others.contains(&"faulty"), "{fault:#}");
    }
    // What was outside did not notice; what asked for it runs again; new members can join.
    let lines = outside.lines();
    outside.wait_lines(lines + 20);
    let lines = again.lines();
    again.wait_lines(lines + 5);
    let mut new = member(&node, "new", "", TICKS);
    new.wait_lines(5);
    let group = |tenant: &Value| domain(tenant)["group"].as_u64();
    let new = node.wait_tenant("new", has_domain);
    let again = node.wait_tenant("again", has_domain);
    assert!(
        group(&new).is_some() && group(&new) == group(&again),
        "{new:#} {again:#}"
    );
    assert!(is_well(&node.find_tenant("outside").unwrap()));
}

#[test]
fn repeated_faulting_client_joins_no_group() {
    if real() {
        // The faulting client is known for sure on the emulated device only.
        return;
    }
    let node = Node::start();
    for round in 1..=2 {
        member(&node, "faulty", "", "gpumux workload fault --seconds 0.1").finish();
        wait_ps(&node, "the fault", |ps| {
            ps["faults"].get(round - 1).map(|_| ())
        });
    }
    let mut moved = member(&node, "faulty", "", TICKS);
    moved.wait_lines(1);
    let moved = node.wait_tenant("faulty", has_domain);
    assert_eq!(moved["placement"]["way"], "time");
    let reason = moved["placement"]["reason"].as_str().unwrap();
    assert!(reason.contains("took its group down 2 times"), "{reason}");
    let why = node.gpumux(["explain", "faulty"]).run().ok().out;
    assert!(why.contains("A fault of its own (error "), "{why}");
    let mut api = UnixStream::connect(node.api_socket()).unwrap();
    api.write_all(b"GET /metrics HTTP/1.0\r\nhost: gpumux\r\n\r\n")
        .unwrap();
    let mut metrics = String::new();
    api.read_to_string(&mut metrics).unwrap();
    for name in ["gpumux_group_faults_total", "gpumux_group_restarts_total"] {
        let lines = metrics.lines();
        let mut own = lines.filter(|it| it.starts_with(name) && it.contains("/team\""));
        let line = own.next().unwrap_or_else(|| panic!("no {name}: {metrics}"));
        assert!(line.ends_with("} 2.0"), "{line}");
    }
}

#[test]
fn repeated_faulting_program_joins_no_group() {
    if real() {
        // The faulting client is known for sure on the emulated device only.
        return;
    }
    let node = Node::start();
    let start = |program: &str| Process::start(&mut node.tenant(GROUP, program));
    // All are called after the same binary, with numbers.
    let mut first = Process::start(&mut node.tenant("", TICKS));
    first.wait_lines(1);
    let bad = "gpumux workload fault --seconds 3";
    let place = |name: &str| node.wait_tenant(name, |_| true)["placement"].clone();
    for round in 1..=2 {
        start(bad).finish();
        let faulting_client = wait_ps(&node, "the fault", |ps| {
            Some(ps["faults"].get(round - 1)?["faulting_client"].clone())
        });
        assert_eq!(faulting_client, "gpumux-2");
        wait_for("its end", PATIENCE, || {
            node.find_tenant("gpumux-2").is_none().then_some(())
        });
    }
    let good = start(TICKS);
    assert_eq!(place("gpumux-2")["way"], "space");
    let _third = start(bad);
    let banned = place("gpumux-3");
    assert_eq!(banned["way"], "time", "{banned:#}");
    drop(good);
}

/// A tenant `again` of the group, whose program writes its process to the file `ran` and works. When it runs again, it says so and ends
/// with 3.
fn again(node: &Node, options: &str) -> Command {
    let flag = node.dir().join("ran");
    let script = format!(
        "if [ -e {0} ]; then echo again; exit 3; fi; echo $$ > {0}; exec {1} {2}",
        flag.display(),
        gpumux_tests::binary().display(),
        TICKS.strip_prefix("gpumux ").unwrap()
    );
    let options = format!("{options} {GROUP} --name again --restart on-collateral");
    let mut command = node.tenant(&options, "sh -c");
    command.arg(script);
    command
}

#[test]
fn a_fault_runs_a_program_again_once() {
    let node = Node::start();
    let mut again = Process::start(&mut again(&node, ""));
    again.wait_lines(3);
    member(&node, "faulty", "", "gpumux workload fault --seconds 0.1").finish();
    let finished = again.finish_within(PATIENCE);
    assert_eq!(finished.code(), 3, "{finished:#?}");
    let count = finished.out.lines().filter(|line| *line == "again").count();
    assert_eq!(count, 1, "{finished:#?}");
}

/// No daemon saw the fault. The program's parent waits for the next one, and runs it again.
#[test]
fn fault_while_the_daemon_is_away_runs_a_program_again() {
    let mut node = Node::start();
    let home = node.dir().to_owned();
    let mut started = again(&node, "-d");
    started.env("XDG_STATE_HOME", &home).run().ok();
    node.wait_tenant("again", has_domain);
    let go = node.dir().join("go");
    let program = format!(
        "gpumux workload fault --seconds 0.1 --start-file {}",
        go.display()
    );
    let faulty = member(&node, "faulty", "", &program);
    node.wait_tenant("faulty", has_domain);
    node.kill_daemon();
    fs::write(&go, "").unwrap();
    faulty.finish();
    // A program that a daemon still meets tells it of the fault.
    let program = fs::read_to_string(node.dir().join("ran")).unwrap();
    let program = format!("/proc/{}", program.trim());
    wait_for("the program's end", PATIENCE, || {
        (!Path::new(&program).exists()).then_some(())
    });
    node.start_daemon();
    let asks = |words: [&str; 2]| {
        let mut command = node.gpumux(words);
        command.env("XDG_STATE_HOME", &home).run()
    };
    assert_eq!(asks(["wait", "again"]).code(), 3);
    let log = asks(["logs", "again"]).ok().out;
    assert_eq!(log.lines().filter(|it| *it == "again").count(), 1, "{log}");
    assert!(log.contains("while there was no daemon"), "{log}");
}

#[test]
fn member_that_loses_its_server_is_named_although_it_ends() {
    // Only of what is one process it is known that it ends.
    if real() {
        return;
    }
    let node = Node::start();
    let mut all = ["a", "b"].map(|name| member(&node, name, "", TICKS));
    for (member, name) in all.iter_mut().zip(["a", "b"]) {
        member.wait_lines(2);
        node.wait_tenant(name, has_domain);
    }
    let group = fs::read_dir(node.dir().join("groups")).unwrap().next();
    let mut ask = node.gpumux(["emu", "mps"]);
    enter(&mut ask, &group.unwrap().unwrap().path());
    let mut asked = Process::start(&mut ask);
    asked.write("get_server_list\n");
    let server: i32 = asked.finish().out.trim().parse().unwrap();
    rustix::process::kill_process(Pid::from_raw(server).unwrap(), Signal::KILL).unwrap();
    for member in all {
        // As if the loss of its server had ended it.
        member.kill();
    }
    let fault = wait_ps(&node, "the failure", |ps| ps["faults"].get(0).cloned());
    assert_eq!(fault["faulting_client"], Value::Null, "{fault:#}");
    assert_eq!(fault["others"], serde_json::json!(["a", "b"]), "{fault:#}");
}

#[test]
fn group_can_be_joined_after_its_servers_end_and_a_new_daemon() {
    let mut node = Node::start();
    let mut first = member(&node, "first", "", TICKS);
    first.wait_lines(2);
    node.kill_daemon();
    node.start_daemon();
    let mut second = member(&node, "second", "", TICKS);
    second.wait_lines(2);
    let group = |tenant: &Value| domain(tenant)["group"].as_u64();
    let ps = wait_ps(&node, "one group", |ps| {
        let both = ["first", "second"].map(|name| group(find(ps, name)));
        (both[0].is_some() && both[0] == both[1]).then(|| ps.clone())
    });
    assert_eq!(
        find(&ps, "second")["placement"]["reason"],
        "with 1 other of team"
    );
}

#[test]
fn groups_that_no_daemon_will_find_can_be_ended() {
    let mut node = Node::start();
    let mut first = member(&node, "first", "", TICKS);
    first.wait_lines(2);
    let refused = node.gpumux(["daemon", "--end-groups"]).run();
    assert!(refused.err.contains("already"), "{refused:?}");
    node.stop_daemon();
    let file = node.dir().join("groups.json");
    // The first line is its checksum.
    let saved = || {
        let text = fs::read_to_string(&file).unwrap();
        let groups = text.lines().nth(1).map(serde_json::from_str);
        groups.unwrap().unwrap()
    };
    let groups: Value = saved();
    let pid = groups[0]["process"]["pid"].as_i64().unwrap();
    let folder = PathBuf::from(groups[0]["folder"].as_str().unwrap());
    let server = PathBuf::from(format!("/proc/{pid}/cmdline"));
    // Of one that has ended but was not waited for nothing is left.
    let lives = || fs::read(&server).is_ok_and(|words| !words.is_empty());
    assert!(lives() && folder.is_dir(), "it outlives the daemon");
    node.gpumux(["daemon", "--end-groups"]).run().ok();
    wait_for("the server's end", PATIENCE, || (!lives()).then_some(()));
    assert!(!folder.exists());
    assert_eq!(saved(), Value::Array(Vec::new()));
}

/// What a program does wrong, and whether it ends those in its group. A program that leaves work behind ends others only if that work takes longer
/// than the daemon holds its memory.
const FAULTS: [(&str, bool); 7] = [
    ("illegal-address", true),
    ("assert", false),
    ("trap", true),
    ("endless", true),
    ("exit", true),
    ("kill", false),
    ("out-of-memory", false),
];

/// Lets a tenant do it, as far as it does anything.
fn let_fail(node: &Node, options: &str, fault: &str) {
    // Of its own name, because a tenant that ended its group twice joins none any more.
    let name = format!("faulty-{fault}");
    let killed = ["endless", "kill"].contains(&fault);
    let running = node.dir().join(&name);
    let program = match fault {
        "kill" => "batch --kernel-us 20000 --seconds 600".to_owned(),
        "endless" => "fault --kind endless --seconds 0.1".to_owned(),
        fault => format!("fault --kind {fault} --seconds 0.7"),
    };
    let program = format!(
        "gpumux workload {program} --ready-file {}",
        running.display()
    );
    let mut faulting_client =
        Process::start(&mut node.tenant(&format!("--name {name} {options}"), &program));
    if killed {
        wait_for("its last kernel", PATIENCE, || {
            running.exists().then_some(())
        });
        // It runs, for longer than one of those that end.
        let received = |it: &Value| domain(it)["received_us"].as_u64();
        let before = received(&node.wait_tenant(&name, has_domain)).unwrap_or(0);
        node.wait_tenant(&name, |it| received(it) > Some(before + 50_000));
        assert!(
            faulting_client.poll().is_none(),
            "{}",
            faulting_client.err()
        );
        faulting_client.kill();
    } else {
        faulting_client.finish();
    }
    wait_for("the end of the faulty client", PATIENCE, || {
        node.find_tenant(&name).is_none().then_some(())
    });
}

#[test]
fn the_fault_matrix_in_time() {
    let node = Node::start();
    let mut outside = Process::start(&mut node.tenant("--class standard --name outside", TICKS));
    for (fault, _) in FAULTS {
        let_fail(&node, "--class batch", fault);
        let lines = outside.lines();
        outside.wait_lines(lines + 10);
        assert!(is_well(&node.find_tenant("outside").unwrap()), "{fault}");
    }
    assert_eq!(node.ps()["faults"].as_array().map(Vec::len), Some(0));
}

#[test]
fn the_fault_matrix_in_a_group() {
    let node = Node::start();
    // Batch tenants take turns by freezing beside one that has work now and then.
    let _serve = Process::start(&mut node.tenant("--class latency", REQUESTS));
    let mut outside = Process::start(&mut node.tenant("--class batch --name outside", TICKS));
    for (number, (fault, ends)) in FAULTS.into_iter().enumerate() {
        let trust = format!("--trust team{number} --class batch");
        let mut inside =
            Process::start(&mut node.tenant(&format!("{trust} --name inside{number}"), TICKS));
        inside.wait_lines(3);
        node.wait_tenant(&format!("inside{number}"), has_domain);
        let before = node.ps()["faults"].as_array().map_or(0, Vec::len);
        let_fail(&node, &trust, fault);
        let faults = || node.ps()["faults"].as_array().map_or(0, Vec::len) - before;
        if ends {
            assert_ne!(inside.finish().code(), 0, "{fault}");
            wait_for("the fault's record", PATIENCE, || {
                (faults() == 1).then_some(())
            });
            let found = node.ps()["faults"][before].clone();
            println!("{fault}: {found}");
            assert_ne!(
                found["faulting_client"],
                format!("inside{number}"),
                "{fault}"
            );
        } else {
            // So long that memory that was held has gone.
            std::thread::sleep(Duration::from_millis(2500));
            let lines = inside.lines();
            inside.wait_lines(lines + 10);
            assert_eq!(faults(), 0, "{fault}");
        }
        let lines = outside.lines();
        outside.wait_lines(lines + 10);
        let began = Instant::now();
        let mut new =
            Process::start(&mut node.tenant(&format!("{trust} --name new{number}"), TICKS));
        new.wait_lines(3);
        println!("{fault}: a new member works after {:?}", began.elapsed());
        let group = |tenant: &Value| domain(tenant)["group"].as_u64();
        node.wait_tenant(&format!("new{number}"), |it| group(it).is_some());
    }
}

#[test]
fn killed_member_beside_constant_work_harms_no_other() {
    let node = Node::start();
    let mut inside = member(&node, "inside", "", TICKS);
    inside.wait_lines(3);
    node.wait_tenant("inside", has_domain);
    let mut outside = Process::start(&mut node.tenant("--class standard --name outside", TICKS));
    outside.wait_lines(3);
    let_fail(&node, GROUP, "kill");
    // Longer than the work would take.
    std::thread::sleep(Duration::from_secs(4));
    assert!(inside.poll().is_none(), "{}", inside.err());
    outside.kill();
    let lines = inside.lines();
    inside.wait_lines(lines + 10);
    std::thread::sleep(Duration::from_millis(2500));
    assert!(inside.poll().is_none(), "{}", inside.err());
    assert_eq!(node.ps()["faults"].as_array().map(Vec::len), Some(0));
}

#[test]
fn a_server_that_hangs_or_dies_is_replaced() {
    let node = Node::start();
    let mut outside = Process::start(&mut node.tenant("--class standard --name outside", TICKS));
    for (number, signal) in [Signal::KILL, Signal::STOP].into_iter().enumerate() {
        let mut again = member(
            &node,
            &format!("again{number}"),
            "--restart on-collateral",
            TICKS,
        );
        again.wait_lines(2);
        node.wait_tenant(&format!("again{number}"), has_domain);
        // On an H100 its wait for the device never ends when the server has gone.
        let name = format!("waits{number}");
        let _waits = member(&node, &name, "--restart on-collateral", LOAD);
        let waits = node.wait_tenant(&name, |it| domain(it)["demand"] == "busy");
        signal_server(&node, signal);
        // A context of its own does not need it.
        let lines = outside.lines();
        outside.wait_lines(lines + 5);
        let fault = wait_ps(&node, "the failure", |ps| ps["faults"].get(number).cloned());
        assert_eq!(fault["faulting_client"], Value::Null, "{fault:#}");
        assert!(
            fault["evidence"].as_str().unwrap().contains("server"),
            "{fault:#}"
        );
        assert!(is_well(&node.find_tenant("outside").unwrap()));
        let lines = again.lines();
        again.wait_lines(lines + 5);
        let lines = outside.lines();
        outside.wait_lines(lines + 5);
        node.wait_tenant(&name, |it| {
            let new = domain(it)["pid"].is_u64() && domain(it)["pid"] != domain(&waits)["pid"];
            new && domain(it)["demand"] == "busy"
        });
        let mut new = member(&node, &format!("new{number}"), "", TICKS);
        new.wait_lines(2);
        println!("{signal:?}: {fault}");
    }
}

/// As where the driver keeps a program waiting in its end.
#[test]
fn program_that_lost_its_group_and_does_not_end_is_run_again() {
    let node = Node::start();
    let gpumux = gpumux_tests::binary();
    let script = format!(
        "trap '' TERM; echo begins; {} workload batch --kernel-us 1000 --seconds 600; sleep 600",
        gpumux.display()
    );
    let options = format!("{GROUP} --name lingers --restart on-collateral");
    let lingers = Process::start(node.tenant(&options, "sh -c").arg(&script));
    node.wait_tenant("lingers", |it| domain(it)["demand"] == "busy");
    signal_server(&node, Signal::KILL);
    wait_for("the second start", Duration::from_secs(60), || {
        (lingers.out().matches("begins").count() == 2).then_some(())
    });
    lingers.kill();
}
