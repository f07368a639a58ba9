//! Programs of the CUDA runtime, as nvcc makes them: they say the same on the emulated device and on a real one, with and
//! without gpumux.

use gpumux_tests::{
    Finished, Node, Options, Run,
    cuda::{Runtime, program},
    real,
};

/// Runs a program, and checks that whatever it says holds.
#[track_caller]
fn check(name: &str, arguments: &[&str], runtime: Runtime, managed: bool) -> Option<Finished> {
    let program = program(name, runtime)?;
    let node = match managed {
        true => Node::start(),
        false => Node::with(Options {
            without_daemon: true,
            ..Options::default()
        }),
    };
    let path = program.path.to_str().expect("a plain path");
    let mut command = match managed {
        true => node.tenant(&format!("--name {name} --class batch"), path),
        false => node.on_device([path]),
    };
    command
        .args(arguments)
        .env("LD_LIBRARY_PATH", &program.libraries);
    let finished = command.run();
    assert!(
        finished.out.ends_with("done\n"),
        "{name} under {runtime:?}: {finished:#?}"
    );
    assert!(
        !finished.out.contains(": NO"),
        "{name} under {runtime:?}: {finished:#?}"
    );
    Some(finished)
}

/// Each program with one kind of runtime by itself, and with the usual one under gpumux.
#[track_caller]
fn check_all(name: &str, runtimes: &[Runtime]) {
    for runtime in runtimes {
        check(name, &[], *runtime, false);
    }
    check(name, &[], Runtime::Static130, true);
}

#[test]
fn memory() {
    check_all("memory", &Runtime::ALL);
}

#[test]
fn streams_events_and_graphs() {
    check_all("streams", &[Runtime::Static130]);
}

#[test]
fn kernels_compute_what_they_should() {
    check_all("kernels", &[Runtime::Static130]);
    if let Some(finished) = check("kernels", &[], Runtime::Static130, false) {
        assert!(
            finished
                .out
                .contains("hello from device: 1 of 2, 3.142,   end|\n"),
            "{}",
            finished.out
        );
    }
}

#[test]
fn grids_that_cooperate() {
    check_all("cooperative", &[Runtime::Static130]);
}

#[test]
fn faults_end_the_context_with_cudas_errors() {
    for (argument, said) in [
        ("wild", "wild store: cudaErrorIllegalAddress\n"),
        ("trap", "trap: cudaErrorLaunchFailure\n"),
    ] {
        for managed in [false, true] {
            if let Some(finished) = check("device", &[argument], Runtime::Static130, managed) {
                assert!(finished.out.contains(said), "{finished:#?}");
            }
        }
    }
}

/// What goes wrong on demand shows as CUDA's own error.
#[test]
fn faults_on_demand() {
    if real() {
        return;
    }
    let Some(program) = program("memory", Runtime::Static130) else {
        return;
    };
    let node = Node::with(Options {
        without_daemon: true,
        ..Options::default()
    });
    let run = |fault: &str| {
        let path = program.path.to_str().expect("a plain path");
        node.on_device([path]).env("GPUMUX_EMU_FAULT", fault).run()
    };
    for (fault, error) in [
        // The module's variables are the first allocation.
        ("out-of-memory@2", "cudaErrorMemoryAllocation"),
        ("illegal-address@1", "cudaErrorIllegalAddress"),
        ("trap@1", "cudaErrorLaunchFailure"),
        ("device-lost@1", "cudaErrorDevicesUnavailable"),
    ] {
        let finished = run(fault);
        assert_eq!(finished.code(), 1, "{fault}: {finished:#?}");
        assert!(finished.out.contains(error), "{fault}: {finished:#?}");
    }
    // Killed at its hundredth call: the device has its memory back.
    assert_eq!(run("kill@100").code(), 128 + 9);
    assert!(run("").out.ends_with("done\n"));
}
