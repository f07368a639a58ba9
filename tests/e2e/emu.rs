//! `gpumux emu`: programs on an emulated device of their own. It needs no GPU, and is the same where there is one.

use std::{fs, path::Path, process::Command};

use gpumux_tests::{PATIENCE, Process, Run, binary, wait_for};

/// `gpumux emu ARGS…` as a user types it.
fn emu<'a>(args: impl IntoIterator<Item = &'a str>) -> Command {
    let mut command = Command::new(binary());
    command.arg("emu").args(args);
    for variable in ["GPUMUX_EMU_SOCKET", "GPUMUX_RUNTIME_DIR", "LD_PRELOAD"] {
        command.env_remove(variable);
    }
    command
}

#[test]
fn the_program_has_a_device_as_long_as_it_lives() {
    let mut shell = Process::start(&mut emu([
        "--",
        "sh",
        "-c",
        "echo $GPUMUX_EMU_SOCKET; read line; exit 9",
    ]));
    shell.wait_lines(1);
    let out = shell.out();
    let socket = Path::new(out.trim());
    let dir = socket.parent().unwrap();
    assert!(socket.exists() && dir.join("emu.log").exists());
    let children = format!("/proc/{0}/task/{0}/children", shell.pid());
    assert_eq!(
        fs::read_to_string(children).unwrap(),
        "",
        "the program has no child of ours"
    );
    let finished = shell.finish();
    assert_eq!((finished.code(), finished.err.as_str()), (9, ""));
    wait_for("the device's end", PATIENCE, || {
        (!dir.exists()).then_some(())
    });
}

#[test]
fn a_killed_programs_device_is_gone_too() {
    let mut shell = Process::start(&mut emu([
        "--",
        "sh",
        "-c",
        "echo $GPUMUX_EMU_SOCKET; sleep 60",
    ]));
    shell.wait_lines(1);
    let out = shell.out();
    shell.kill();
    let dir = Path::new(out.trim()).parent().unwrap();
    wait_for("the device's end", PATIENCE, || {
        (!dir.exists()).then_some(())
    });
}

#[test]
fn all_programs_inside_share_one_device_and_one_daemon() {
    let gpumux = binary().display().to_string();
    let script = format!(
        "{gpumux} run --name a --class batch -- {gpumux} workload check --seconds 0.2 >&2 &&
         {gpumux} emu -- {gpumux} run --name b -- sh -c '{gpumux} ps --json' &&
         echo $GPUMUX_RUNTIME_DIR >&2"
    );
    let finished = emu(["--", "sh", "-c", &script]).run().ok();
    // The first may not be known to be gone yet.
    let ps = finished.json();
    let mut tenants = ps["tenants"].as_array().unwrap().iter();
    assert!(tenants.any(|it| it["name"] == "b"), "{finished:#?}");
    let dir = finished.err.lines().last().unwrap();
    assert!(dir.contains("gpumux-emu-"), "{finished:#?}");
    wait_for("the end of device and daemon", PATIENCE, || {
        (!Path::new(dir).exists()).then_some(())
    });
}

#[test]
fn devices_are_as_the_profile_says() {
    let dir = tempfile::tempdir().unwrap();
    let profile = dir.path().join("profile.toml");
    fs::write(
        &profile,
        "name = \"Test GPU (emulated)\"\nmemory = 2147483648\n",
    )
    .unwrap();
    let profile = profile.to_str().unwrap();
    let gpumux = binary().display().to_string();
    let check = |more: [&str; 3]| {
        let line = [
            "--devices",
            "2",
            "--profile",
            profile,
            "--",
            &gpumux,
            "workload",
            "--json",
            "check",
            "--seconds",
            "0.1",
        ];
        emu(line.into_iter().chain(more)).run()
    };
    let second = check(["--device", "1", "--memory=64MiB"]).ok();
    assert_eq!(second.json()["device"], "Test GPU (emulated)");
    let third = check(["--device", "2", "--memory=64MiB"]);
    assert_eq!(third.code(), 1, "{third:#?}");
    let much = check(["--device", "0", "--memory=3GiB"]);
    assert!(much.err.contains("OUT_OF_MEMORY"), "{much:#?}");
}

#[test]
fn what_cannot_be_started_says_why() {
    let missing = emu(["--", "gpumux-there-is-no-such-program"]).run();
    assert_eq!(missing.code(), 127, "{missing:#?}");
}

#[test]
fn wrong_usage_ends_with_two_and_starts_nothing() {
    let wrong = [
        (
            "--fault",
            "foo",
            "no fault is called `foo`: use one of out-of-memory",
        ),
        ("--fault", "foo@2", "no fault is called `foo`"),
        ("--fault", "trap@1,kill", "use kill@N, where N is"),
        ("--devices", "0", "use a whole number from 1 to 16"),
        (
            "--profile",
            "/nonexistent.toml",
            "cannot read the profile /nonexistent.toml",
        ),
    ];
    for (flag, value, message) in wrong {
        for socket in [None, Some("/nonexistent/emu.sock")] {
            let mut command = emu([flag, value, "--", "echo", "started"]);
            command.envs(socket.map(|socket| ("GPUMUX_EMU_SOCKET", socket)));
            let finished = command.run();
            assert_eq!(finished.code(), 2, "{finished:#?}");
            assert!(finished.err.contains(message), "{finished:#?}");
            assert_eq!(finished.out, "", "{finished:#?}");
        }
    }
}

#[test]
fn options_of_a_new_device_are_refused_inside_another() {
    let gpumux = binary().display().to_string();
    let inner = [&gpumux, "emu", "--devices", "2", "--", "echo", "started"];
    let finished = emu(["--"].into_iter().chain(inner)).run();
    assert_eq!((finished.code(), &*finished.out), (2, ""), "{finished:#?}");
    assert!(finished.err.contains("GPUMUX_EMU_SOCKET"), "{finished:#?}");
}
