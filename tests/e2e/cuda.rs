//! Programs of the CUDA runtime, as nvcc makes them: they say the same on the emulated device and on a real one, with and
//! without gpumux.

use std::path::PathBuf;

use gpumux_tests::{
    Finished, Node, Options, PATIENCE, Patience, Process, Run,
    cuda::{Runtime, collect, collect_nvml_script, nvml_script, program, ptx},
    real, wait_for,
};

/// The programs and what they are tried with.
const PROGRAMS: [(&str, &[Runtime]); 11] = [
    ("memory", &Runtime::ALL),
    ("streams", &[Runtime::Static130, Runtime::Shared128]),
    ("kernels", &[Runtime::Static130]),
    ("relocatable", &[Runtime::Static130]),
    ("cooperative", &[Runtime::Static130]),
    ("copies", &[Runtime::Static130]),
    ("graphs", &[Runtime::Static130]),
    ("per_thread", &[Runtime::Static130]),
    ("vmm", &[Runtime::Static130]),
    ("device", &[Runtime::Static130]),
    ("timings", &[Runtime::Static130]),
];

/// `GPUMUX_COPY_CUDA_PROGRAMS=FOLDER` puts them there.
#[test]
fn all_programs_compile() {
    let folder = std::env::var_os("GPUMUX_COPY_CUDA_PROGRAMS").map(PathBuf::from);
    for (name, runtimes) in PROGRAMS {
        for runtime in runtimes {
            let program = program(name, *runtime);
            if let (Some(program), Some(folder)) = (&program, &folder) {
                collect(program, *runtime, folder).expect("a folder for programs");
            }
        }
    }
    if let Some(folder) = folder {
        collect_nvml_script(&folder).expect("a folder for programs");
    }
}

/// The kernels that `gpumux-ptx` is tested with where there is no compiler. `GPUMUX_WRITE_PTX=1` writes them.
#[test]
fn the_committed_ptx_is_what_the_compiler_makes() {
    let Some(made) = ptx("kernels") else {
        return;
    };
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/cuda/kernels.ptx");
    if std::env::var_os("GPUMUX_WRITE_PTX").is_some() {
        std::fs::write(path, &made).unwrap();
    }
    let committed = std::fs::read_to_string(path).unwrap();
    assert!(made == committed, "write it with GPUMUX_WRITE_PTX=1");
}

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

/// A program with each kind of runtime by itself, and with the usual one under gpumux.
#[track_caller]
fn check_all(name: &str) {
    let (_, runtimes) = PROGRAMS.iter().find(|it| it.0 == name).expect("listed");
    for runtime in *runtimes {
        check(name, &[], *runtime, false);
    }
    check(name, &[], Runtime::Static130, true);
}

#[test]
fn memory() {
    check_all("memory");
}

#[test]
fn streams_events_and_graphs() {
    check_all("streams");
}

#[test]
fn kernels_compute_what_they_should() {
    check_all("kernels");
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
fn kernels_that_are_linked_from_units() {
    check_all("relocatable");
}

#[test]
fn copies_of_all_shapes() {
    check_all("copies");
}

#[test]
fn graphs_node_by_node() {
    check_all("graphs");
}

#[test]
fn default_streams_per_thread() {
    check_all("per_thread");
}

#[test]
fn virtual_memory() {
    check_all("vmm");
}

#[test]
fn grids_that_cooperate() {
    check_all("cooperative");
}

/// The same with a limit, and while all their memory is moved to the host again and again: they notice nothing.
#[test]
fn programs_whose_memory_is_moved_say_the_same() {
    const MOVES: usize = 3;
    let node = Node::start();
    for name in [
        "memory",
        "streams",
        "kernels",
        "copies",
        "graphs",
        "per_thread",
        "vmm",
    ] {
        let Some(program) = program(name, Runtime::Static130) else {
            return;
        };
        let path = program.path.to_str().expect("a plain path");
        let options = format!("--name {name} --memory-limit 2GiB");
        let (mut left, mut moves) = (Patience::new(3 * PATIENCE), 0);
        // It may end before it was moved even once.
        while moves == 0 {
            let mut tenant = Process::start(&mut node.tenant(&options, path));
            while tenant.poll().is_none() && moves < MOVES {
                assert!(left.lasts(), "{name}: {}", tenant.out());
                // It wakes by itself, with its next call. Before its first and after its last it is not there.
                moves += usize::from(node.gpumux(["sleep", name]).run().status.success());
            }
            let finished = tenant.finish().ok();
            assert!(finished.out.ends_with("done\n"), "{name}: {finished:#?}");
            assert!(!finished.out.contains(": NO"), "{name}: {finished:#?}");
            wait_for("its end", PATIENCE, || {
                node.find_tenant(name).is_none().then_some(())
            });
        }
    }
}

/// Several devices, one of them partitioned, by their numbers, UUIDs and PCI ids, with their memory and processes.
#[test]
fn nvml_answers_nvidias_own_binding() {
    let Some((binding, script)) = nvml_script() else {
        return;
    };
    let devices = if real() { 1 } else { 2 };
    let node = Node::with(Options {
        devices,
        profile: "mig = [['1g.10gb', '2g.20gb']]\n",
        ..Options::default()
    });
    let script = script.to_str().expect("a plain path");
    for managed in [false, true] {
        let mut command = match managed {
            true => node.tenant("--name nvml", &format!("python3 {script}")),
            false => node.on_device(["python3", script]),
        };
        let command = command.arg(devices.to_string());
        let finished = command.env("PYTHONPATH", &binding).run().ok();
        assert!(finished.out.ends_with("done\n"), "{finished:#?}");
        assert!(!finished.out.contains(": NO"), "{finished:#?}");
    }
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
        eprintln!("SKIPPED: it needs the emulated device");
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
