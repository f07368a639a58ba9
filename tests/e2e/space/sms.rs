//! How the SMs of a group are divided, and by which scaling profiles.

use super::*;

#[test]
fn member_starts_with_sms_by_guarantees_limits_and_profiles() {
    let node = Node::start();
    let start = |name: &str, options: &str| {
        let mut command = node.tenant(&format!("{GROUP} --name {name} {options}"), "sh -c");
        let script = "echo \"percent=$CUDA_MPS_ACTIVE_THREAD_PERCENTAGE\"; exec sleep 600";
        let mut process = Process::start(command.arg(script));
        process.wait_lines(1);
        process
    };
    let percent = |process: &Process| process.out().trim().replace("percent=", "");
    let sure = start("sure", "--guaranteed 0.4");
    let rest = start("rest", "");
    let little = start("little", "--limit 0.25");
    assert_eq!([&sure, &rest, &little].map(percent), ["", "60", "25"]);
    assert_eq!(
        node.find_tenant("rest").unwrap()["placement"]["sm_percent"],
        60
    );
    // What the members keep is not given to others.
    let late = start("late", "--guaranteed 0.2");
    let forced = start("forced", "--guaranteed 0.2 --sharing space");
    let reason = |name: &str| node.find_tenant(name).unwrap()["placement"]["reason"].clone();
    let said = reason("late");
    assert!(said.as_str().unwrap().contains("guarantee"), "{said}");
    assert_eq!(percent(&late), "");
    let explained = node.gpumux(["explain", "forced"]).run().ok().out;
    let table = node.gpumux(["ps"]).run().ok().out;
    assert!(
        explained.contains("holds only once sure start anew"),
        "{explained}"
    );
    assert!(
        table.contains("forced: its guarantee of 20% holds only once these start anew: sure\n"),
        "{table}"
    );
    drop((sure, rest, little, late, forced));
    for name in ["sure", "rest", "little", "late", "forced"] {
        wait_for("its end", PATIENCE, || {
            node.find_tenant(name).is_none().then_some(())
        });
    }
    // One that is done with a fifth of the SMs, and one that scales to the last.
    let small = start("small", "--utility 20:0.9,50:0.95,100:1");
    let large = start("large", "--utility 25:0.25,50:0.5,75:0.75,100:1");
    assert_eq!(percent(&large), "80");
    drop(small);
    wait_for("its end", PATIENCE, || {
        node.find_tenant("small").is_none().then_some(())
    });
    let again = start("small", "--utility 20:0.9,50:0.95,100:1");
    assert_eq!(percent(&again), "20");
}

/// Whatever the user's shell says.
#[test]
fn group_members_have_the_priority_of_their_class() {
    let node = Node::start();
    let variable = "CUDA_MPS_CLIENT_PRIORITY";
    let classes = [("latency", "0\n"), ("standard", "1\n"), ("batch", "1\n")];
    for (class, expected) in classes {
        let mut command = node.tenant(
            &format!("--trust team --sharing space --class {class}"),
            "sh -c",
        );
        command.arg(format!("echo ${variable}")).env(variable, "7");
        assert_eq!(command.run().ok().out, expected, "{class}");
    }
    let mut alone = node.tenant("", "sh -c");
    alone.arg(format!("echo ${variable}")).env(variable, "7");
    assert_eq!(alone.run().ok().out, "7\n", "for an MPS of the user's own");
}

/// Kernels that need a quarter of an H100's SMs, and such that use all. By themselves they would fit the SMs that they see.
const SMALL: &str =
    "gpumux workload batch --iterations 400000 --blocks 33 --in-flight 2 --seconds 600";
const LARGE: &str =
    "gpumux workload batch --iterations 400000 --blocks 264 --in-flight 2 --seconds 600";
/// What reads memory all the time, much more than caches hold: without its part of a cache it would lose more than bandwidth.
const READS: &str = "gpumux workload batch --read 400 --memory 256MiB --seconds 600";

/// What `gpumux profile --list` knows of a program.
fn known(node: &Node, fingerprint: &str) -> Option<Value> {
    let list = node.gpumux(["profile", "--list", "--json"]).run().ok();
    let list = list.json();
    let mut all = list["programs"].as_array().unwrap().iter();
    all.find(|it| it["fingerprint"] == fingerprint).cloned()
}

/// `gpumux profile OPTIONS -- PROGRAM`.
#[track_caller]
fn profile(node: &Node, options: &str, program: &str) -> Value {
    let line = format!(
        "gpumux profile --points 25,100 --warmup 0.5 --seconds 2 --json {options} -- {program}"
    );
    let own = gpumux_tests::binary().display().to_string();
    let words = line.split_whitespace().map(|word| match word {
        "gpumux" => own.clone(),
        word => word.to_owned(),
    });
    let mut command = node.on_device(words);
    let finished = Process::start(&mut command).finish_within(PATIENCE * 2);
    println!("{}", finished.err);
    finished.ok().json()
}

#[test]
fn profiles_are_kept_and_decide_placement() {
    let mut node = Node::start();
    let small = profile(&node, "--fingerprint small", SMALL);
    let large = profile(&node, "", LARGE);
    let quarter = |profile: &Value| profile["points"][0]["relative"].as_f64().unwrap();
    assert!(quarter(&large) < 0.75, "{large:#}");
    assert!(quarter(&small) > quarter(&large), "{small:#} {large:#}");
    let reads = profile(&node, "--fingerprint reads", READS);
    for what in ["demand", "sensitivity"] {
        let needs = |profile: &Value| profile["bandwidth"][what].as_f64().unwrap();
        let (most, least) = (needs(&reads), needs(&large));
        // Where the device is emulated, work also waits for the CPUs that other work has.
        let is_exact = most < 1.3 && least < 0.3;
        assert!(
            most > 0.7 && least < most / 2.0 && (is_exact || !real()),
            "{what}: {reads:#} {large:#}"
        );
    }
    let table = node.gpumux(["profile", "--list"]).run().ok().out;
    assert!(table.contains("DEMAND"), "{table}");
    // No tenant of it is left.
    assert_eq!(node.ps()["tenants"].as_array().map(Vec::len), Some(0));

    // The next daemon knows it too.
    node.stop_daemon().ok();
    node.start_daemon();
    let fingerprint = large["fingerprint"].as_str().unwrap();
    assert!(fingerprint.starts_with("gpumux-"), "{fingerprint}");
    let kept = known(&node, fingerprint).unwrap();
    assert_eq!(
        (&kept["curve"][0][0], &kept["profiled"]),
        (&25.into(), &true.into())
    );

    let placement = |name: &str| node.wait_tenant(name, has_domain)["placement"].clone();
    let first = member(&node, "first", "--fingerprint small", SMALL);
    assert_eq!(
        placement("first")["curve"],
        Value::Null,
        "without another member there is nothing to divide"
    );
    let running = member(&node, "large", "", LARGE);
    let of_large = placement("large");
    assert_eq!(
        (&of_large["curve"], of_large["fingerprint"].as_str()),
        (&"measured".into(), Some(fingerprint))
    );
    assert!(of_large["sm_percent"].as_u64() > Some(50), "{of_large:#}");
    let said = node.gpumux(["explain", "large"]).run().ok().out;
    assert!(
        said.contains(&format!("by what was measured of {fingerprint}")),
        "{said}"
    );
    let end = |process: Process, name: &str| {
        drop(process);
        wait_for("its end", PATIENCE, || {
            node.find_tenant(name).is_none().then_some(())
        });
    };
    end(first, "first");
    // What is said comes before what was measured.
    let second = member(
        &node,
        "second",
        "--fingerprint small --utility 25:0.9,50:0.95,100:1",
        SMALL,
    );
    assert_eq!(placement("second")["curve"], "given");
    end(second, "second");
    end(running, "large");

    // Two that want all of the bandwidth share time, unless --sharing asks for space.
    let options = "--fingerprint reads";
    let _reads = member(&node, "reads", options, READS);
    assert_eq!(placement("reads")["way"], "space");
    let twin = member(&node, "twin", options, READS);
    let of_twin = placement("twin");
    let reason = of_twin["reason"].as_str().unwrap();
    assert_eq!(of_twin["way"], "time", "{of_twin:#}");
    assert!(
        reason.contains("of one program alone in the group"),
        "{reason}"
    );
    end(twin, "twin");
    let _computes = member(&node, "computes", "", LARGE);
    assert_eq!(placement("computes")["way"], "space");
    let _asked = member(&node, "asked", &format!("{options} --sharing space"), READS);
    assert_eq!(placement("asked")["way"], "space");

    node.gpumux(["profile", "--forget", "small"]).run().ok();
    assert_eq!(known(&node, "small"), None);
    let again = node.gpumux(["profile", "--forget", "small"]).run();
    assert!(again.err.contains("nothing is known"), "{again:?}");
}

#[test]
fn a_program_that_ends_before_it_was_measured_is_no_profile() {
    let node = Node::start();
    let own = gpumux_tests::binary().display().to_string();
    let short = "workload batch --iterations 1000 --calls 5";
    let mut words = vec![own.as_str(), "profile", "--points", "50,100", "--", &own];
    words.extend(short.split_whitespace());
    let finished = node.on_device(words).run();
    assert_ne!(finished.code(), 0);
    assert!(
        finished.err.contains("ended before it was measured"),
        "{finished:?}"
    );
    let list = node.gpumux(["profile", "--list", "--json"]).run().ok();
    assert_eq!(list.json()["programs"].as_array().map(Vec::len), Some(0));
}
