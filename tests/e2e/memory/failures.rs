//! Processes and daemons that die, and steps that fail, around a move.

use super::*;

#[test]
fn a_daemon_that_dies_leaves_no_tenant_asleep() {
    let mut node = Node::start();
    let worker = Process::start(&mut node.tenant("--name worker", &endless(3, "24MiB")));
    node.wait_tenant("worker", |it| bytes(it, "in_use") > 0);
    let idle = "gpumux workload idle --seconds 600 --memory 64MiB";
    let idler = Process::start(&mut node.tenant("--name idler", idle));
    node.wait_tenant("idler", |it| bytes(it, "in_use") >= 64 << 20);
    assert!(sleeps(&node, "idler"));
    let _ = sleeps(&node, "worker");
    node.kill_daemon();
    end_verified(worker);
    idler.signal(Signal::TERM);
    idler.finish_within(PATIENCE * 3).ok();
}

/// A tenant of more than half of the device, over restarts of the daemon.
#[test]
fn daemon_restart_keeps_memory_accounting() {
    if real() {
        eprintln!("SKIPPED: the device is too large to fill in a test");
        return;
    }
    let mut node = Node::with_memory(1 << 30);
    let idle = "gpumux workload idle --seconds 600 --memory 600MiB";
    let idler = Process::start(&mut node.tenant("--name idler", idle));
    node.wait_tenant("idler", |it| bytes(it, "in_use") >= 600 << 20);
    let before = free(&node);
    assert!(before > 100 << 20, "{before}");
    for _ in 0..3 {
        node.kill_daemon();
        node.start_daemon();
        node.wait_tenant("idler", |it| bytes(it, "in_use") >= 600 << 20);
        // Its context is known a moment after its memory.
        wait_for("the same accounting", PATIENCE, || {
            (free(&node) == before).then_some(())
        });
        // What was free is: it needs no other's memory.
        let next = "gpumux workload idle --seconds 0 --memory 100MiB";
        node.tenant("--memory-policy fail", next).run().ok();
        assert_eq!(
            node.find_tenant("idler").map(|it| bytes(&it, "swapped")),
            Some(0)
        );
    }
    idler.kill();
}

/// One context has room that is kept for it. Several at once have some where others' memory moves.
#[test]
fn programs_that_start_at_once_find_room_for_their_contexts() {
    if real() {
        return eprintln!("SKIPPED: the device is too large to fill in a test");
    }
    let node = Node::with(Options {
        profile: "memory = 1073741824\ncontext_memory = 104857600",
        ..Options::default()
    });
    let idle = "gpumux workload idle --seconds 600 --memory 650MiB";
    let idler = Process::start(&mut node.tenant("--name idler", idle));
    node.wait_tenant("idler", |it| bytes(it, "in_use") >= 650 << 20);
    let next = "gpumux workload idle --seconds 3 --memory 16MiB";
    let all: Vec<Process> = (0..4)
        .map(|n| Process::start(&mut node.tenant(&format!("--name next{n}"), next)))
        .collect();
    for one in all {
        one.finish_within(PATIENCE * 3).ok();
    }
    idler.kill();
}

/// The driver takes memory that no program asks for.
/// Its daemon was killed before its first call. What others took meanwhile, only the next daemon can move.
#[test]
fn program_begun_between_daemons_finds_room_for_its_context() {
    if real() {
        eprintln!("SKIPPED: it fills the device");
        return;
    }
    let mut node = Node::with_memory(256 << 20);
    let program = "import sys\nsys.stdin.readline()\nprint('begins', flush=True)\nuse_device()";
    let Some(command) = python(&node, program) else {
        return;
    };
    let idle = |memory: &str| format!("gpumux workload idle --seconds 600 --memory {memory}");
    let _holder = Process::start(&mut node.tenant("--name holder", &idle("150MiB")));
    node.wait_tenant("holder", |it| bytes(it, "in_use") >= 150 << 20);
    let mut late = Process::start(&mut node.tenant("--name late", &command));
    wait_for("its tenant", PATIENCE, || node.find_tenant("late"));
    node.kill_daemon();
    let ready = node.dir().join("ready");
    let hog = idle("82MiB").replace("gpumux", &gpumux_tests::binary().display().to_string());
    let hog = format!("{hog} --ready-file {}", ready.display());
    let _hog = Process::start(&mut node.on_device(hog.split(' ')));
    wait_for("the device to be full", PATIENCE, || {
        ready.exists().then_some(())
    });
    late.write("\n");
    late.wait_lines(1);
    std::thread::sleep(Duration::from_secs(1));
    node.start_daemon();
    late.finish().ok();
}

/// Its first calls come while there is no daemon: what they get moves all the same once there is one.
#[test]
fn memory_of_a_program_begun_between_daemons_moves() {
    const PROGRAM: &str = r#"
import sys
sys.stdin.readline()
use_device()
address, size = ctypes.c_uint64(), 32 << 20
call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
call("cuMemsetD8_v2", address, 7, ctypes.c_size_t(size))
call("cuCtxSynchronize")
print("has it", flush=True)
sys.stdin.readline()
found = ctypes.create_string_buffer(size)
call("cuMemcpyDtoH_v2", found, address, ctypes.c_size_t(size))
assert found.raw == b"\x07" * size
"#;
    let mut node = Node::start();
    let Some(command) = python(&node, PROGRAM) else {
        return;
    };
    let mut late = begin_between_daemons(&mut node, &command);
    node.wait_tenant("late", |it| bytes(it, "in_use") >= 32 << 20);
    node.gpumux(["sleep", "late"]).run().ok();
    node.wait_tenant("late", |it| bytes(it, "swapped") >= 32 << 20);
    late.write("\n");
    late.finish().ok();
}

#[test]
fn programs_find_room_for_their_streams_and_code() {
    const PROGRAM: &str = r#"
PTX = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .global .align 8 .b8 data[16777216];
"""
use_device()
for _ in range(2):
    stream, module = ctypes.c_void_p(), ctypes.c_void_p()
    call("cuStreamCreate", ctypes.byref(stream), 1)
    call("cuModuleLoadData", ctypes.byref(module), PTX)
print("made", flush=True)
input()
"#;
    if real() {
        return eprintln!("SKIPPED: the device is too large to fill in a test");
    }
    let node = Node::with(Options {
        profile: "memory = 268435456\ncontext_memory = 8388608\nstream_memory = 16777216",
        ..Options::default()
    });
    let Some(program) = python(&node, PROGRAM) else {
        return;
    };
    let idle = "gpumux workload idle --seconds 600 --memory 150MiB";
    let idler = Process::start(&mut node.tenant("--name idler", idle));
    node.wait_tenant("idler", |it| bytes(it, "in_use") >= 150 << 20);
    let mut all = ["one", "two"]
        .map(|name| Process::start(&mut node.tenant(&format!("--name {name}"), &program)));
    for one in &mut all {
        one.wait_lines(1);
    }
    for mut one in all {
        one.write("\n");
        one.finish_within(PATIENCE).ok();
    }
    idler.kill();
}

/// A launch that the driver refused once runs once. One into a capture is not made again, since its failure may have spoiled that.
#[test]
fn call_without_driver_memory_is_made_again_if_that_is_safe() {
    const PROGRAM: &str = r#"
import sys
PTX = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry count(.param .u64 at)
{
    .reg .u32 %value;
    .reg .u64 %at;
    ld.param.u64 %at, [at];
    ld.global.u32 %value, [%at];
    add.u32 %value, %value, 1;
    st.global.u32 [%at], %value;
    ret;
}
"""
use_device()
module, count, stream, graph, ready = (ctypes.c_void_p() for _ in range(5))
at, value = ctypes.c_uint64(), ctypes.c_uint32()
error = cuda.cuModuleLoadData(ctypes.byref(module), PTX)
print(error, flush=True)
if error:
    sys.exit()
call("cuModuleGetFunction", ctypes.byref(count), module, b"count")
call("cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(4))
call("cuMemsetD32_v2", at, 0, ctypes.c_size_t(1))
call("cuStreamCreateWithPriority", ctypes.byref(stream), 1, 0)
arguments = (ctypes.c_void_p * 1)(ctypes.addressof(at))
launch = lambda: cuda.cuLaunchKernel(count, 1, 1, 1, 1, 1, 1, 0, stream, arguments, None)
assert launch() == 0
call("cuStreamBeginCapture_v2", stream, 0)
assert [launch(), launch()] == [2, 0]
call("cuStreamEndCapture", stream, ctypes.byref(graph))
call("cuGraphInstantiateWithFlags", ctypes.byref(ready), graph, ctypes.c_uint64(0))
call("cuGraphLaunch", ready, stream)
call("cuCtxSynchronize")
call("cuMemcpyDtoH_v2", ctypes.byref(value), at, ctypes.c_size_t(4))
assert value.value == 2, value
"#;
    const FAULTS: [&str; 7] = [
        "fail@1:cuModuleLoadData",
        "fail@2:cuModuleLoadData",
        "fail@1:cuStreamCreateWithPriority",
        "fail@1:cuLaunchKernel",
        "fail@3:cuLaunchKernel",
        "fail@1:cuGraphInstantiateWithFlags",
        "fail@1:cuGraphLaunch",
    ];
    if real() {
        return eprintln!("SKIPPED: a real device does not fail at will");
    }
    let node = Node::start();
    let Some(program) = python(&node, PROGRAM) else {
        return;
    };
    // A program that does not wait for memory has one attempt more than it makes.
    for (policy, error) in [("swap-others", "0"), ("fail", "2")] {
        let options = format!("--memory-policy {policy}");
        let mut command = node.tenant(&options, &program);
        command.env("GPUMUX_EMU_FAULT", FAULTS.join(","));
        assert_eq!(command.run().ok().out.trim(), error, "{policy}");
    }
}

#[test]
fn a_sleeper_that_is_killed_leaves_nothing() {
    let node = Node::start();
    let before = free(&node);
    let idle = "gpumux workload idle --seconds 600 --memory 64MiB";
    let idler = Process::start(&mut node.tenant("--name idler", idle));
    node.wait_tenant("idler", |it| bytes(it, "in_use") >= 64 << 20);
    assert!(sleeps(&node, "idler"));
    idler.kill();
    wait_for("the end of a sleeper", PATIENCE, || {
        (node.find_tenant("idler").is_none() && free(&node) >= before).then_some(())
    });
    verified(&node.tenant("--name next", &program(5, "32MiB", 300)).run());
}

/// A daemon examines the groups of a program that it takes over: they must not run meanwhile.
#[test]
fn a_kernel_whose_memory_is_away_ends_right_with_the_next_daemon() {
    kernel_without_memory_ends_right(|node, worker| {
        node.kill_daemon();
        let line = wait_for("the worker's line", PATIENCE, || {
            let said = worker.err();
            let line = said.lines().find(|it| it.contains("trying on"));
            line.map(str::to_owned)
        });
        // It does not fill the device with a part of it.
        assert!(line.contains(" MiB free of "), "{line}");
        node.start_daemon();
    });
}

#[test]
fn a_kernel_whose_memory_is_away_ends_right_after_its_lease_expired() {
    kernel_without_memory_ends_right(|node, worker| {
        node.daemon().signal(Signal::STOP);
        wait_for("the worker's line", PATIENCE, || {
            worker.err().contains("stands still").then_some(())
        });
        node.daemon().signal(Signal::CONT);
    });
}

/// The worker loses its daemon while its memory is away, and for a while finds no room to bring it back.
fn kernel_without_memory_ends_right(lose: impl FnOnce(&mut Node, &Process)) {
    if real() {
        return eprintln!("SKIPPED: two programs do not fill a real device in time");
    }
    let mut node = Node::with_memory(256 << 20);
    let worker = checks(&node, 120, 6);
    assert!(sleeps(&node, "worker"));
    let idle = "gpumux workload idle --seconds 600 --memory 150MiB";
    let holder = Process::start(&mut node.tenant("--name holder", idle));
    node.wait_tenant("holder", |it| bytes(it, "in_use") >= 150 << 20);
    lose(&mut node, &worker);
    node.wait_tenant("worker", |it| {
        it["domains"][0].is_object() && bytes(it, "swapped") > 0
    });
    holder.kill();
    node.gpumux(["wake", "worker"]).run().ok();
    verified(&worker.finish_within(PATIENCE * 3));
}

/// Its program gets the driver's error, as without gpumux.
#[test]
fn a_sleeper_whose_device_is_lost_ends() {
    const PROGRAM: &str = r#"
use_device()
memory, size = ctypes.c_uint64(), ctypes.c_size_t(64 << 20)
call("cuMemAlloc_v2", ctypes.byref(memory), size)
input()
call("cuMemsetD8_v2", memory, 7, size)
"#;
    if real() {
        eprintln!("SKIPPED: a real device is not lost at will");
        return;
    }
    let node = Node::start();
    let Some(program) = python(&node, PROGRAM) else {
        return;
    };
    let mut program = Process::start(&mut node.tenant("--name lost", &program));
    node.wait_tenant("lost", |it| bytes(it, "in_use") >= 64 << 20);
    assert!(sleeps(&node, "lost"));
    let server = Pid::from_raw(node.emulated_pid() as i32).expect("it runs");
    kill_process(server, Signal::KILL).expect("it is killed");
    program.write("\n");
    let ended = program.finish_within(PATIENCE * 3);
    assert!(ended.err.contains("cuMemsetD8_v2 answers"), "{ended:?}");
}

/// What the library calls while it moves memory: all steps of a way out and back.
const STEPS: [(&str, u32); 11] = [
    ("cuMemHostRegister_v2", 1),
    ("cuMemcpyDtoHAsync_v2", 1),
    ("cuMemcpyDtoHAsync_v2", 2),
    ("cuStreamSynchronize", 1),
    ("cuMemUnmap", 1),
    ("cuMemRelease", 2),
    ("cuMemCreate", 1),
    ("cuMemMap", 2),
    ("cuMemSetAccess", 1),
    ("cuMemcpyHtoDAsync_v2", 1),
    ("cuStreamSynchronize", 2),
];

/// A random program without an end in which something happens at a step of a move.
fn broken(
    node: &Node,
    name: &str,
    seed: u32,
    what: &str,
    (function, call): (&str, u32),
) -> Process {
    let mut program = endless(seed, "24MiB");
    if seed % 2 == 1 {
        program += " --mapped";
    }
    let mut command = node.tenant(&format!("--name {name}"), &program);
    command.env(
        "GPUMUX_EMU_FAULT",
        format!("{what}@{call}:{function}:gpumux-mover"),
    );
    let process = Process::start(&mut command);
    node.wait_tenant(name, |it| bytes(it, "swapped") + bytes(it, "in_use") > 0);
    process
}

#[test]
fn kill_at_any_step_of_a_move_harms_no_other_tenant() {
    if real() {
        return;
    }
    let node = Node::start();
    let before = free(&node);
    let survivor = Process::start(&mut node.tenant("--name survivor", &endless(11, "24MiB")));
    for (n, step) in STEPS.into_iter().enumerate() {
        let name = format!("victim{n}");
        let mut victim = broken(&node, &name, n as u32, "kill", step);
        let (mut left, mut moved) = (Patience::new(PATIENCE * 3), 0);
        while victim.poll().is_none() {
            assert!(left.lasts(), "{step:?} never comes");
            moved += u32::from(sleeps(&node, &name));
            let _ = sleeps(&node, "survivor");
        }
        let ended = victim.finish();
        assert_eq!(
            ended.code(),
            137,
            "{step:?}, moved {moved} times: {ended:?}"
        );
    }
    end_verified(survivor);
    wait_for("the memory of the dead", PATIENCE, || {
        (free(&node) >= before).then_some(())
    });
}

#[test]
fn daemon_death_at_any_step_of_a_move_loses_no_byte() {
    if real() {
        return;
    }
    let mut node = Node::start();
    for (n, step) in STEPS.into_iter().enumerate() {
        let name = format!("t{n}");
        let tenant = broken(&node, &name, n as u32, "stop", step);
        let pid = node.wait_tenant(&name, |it| it["pids"][0].is_u64())["pids"][0].clone();
        let stopped = || {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            stat.rsplit(')')
                .next()
                .is_some_and(|rest| rest.trim_start().starts_with('T'))
        };
        let mut mover = Process::start(&mut node.gpumux(["sleep", &name]));
        wait_for(&format!("{step:?}"), PATIENCE, || {
            if mover.poll().is_some() && !stopped() {
                // It is not on the way out: the way back then, which the program begins itself.
                mover = Process::start(&mut node.gpumux(["sleep", &name]));
            }
            stopped().then_some(())
        });
        node.kill_daemon();
        let pid = pid.as_i64().and_then(|pid| Pid::from_raw(pid as i32));
        kill_process(pid.expect("a pid"), Signal::CONT).expect("it is there");
        node.start_daemon();
        end_verified(tenant);
    }
}

#[test]
fn failed_step_of_a_move_loses_no_byte() {
    if real() {
        return;
    }
    let node = Node::start();
    let before = free(&node);
    // Letting go of memory cannot fail.
    let may_fail = |(name, _): &(&str, u32)| !["cuMemUnmap", "cuMemRelease"].contains(name);
    for (n, step) in STEPS.into_iter().filter(may_fail).enumerate() {
        let name = format!("t{n}");
        let tenant = broken(&node, &name, n as u32, "fail", step);
        // Both ways, and once more after the step.
        for _ in 0..5 {
            let _ = sleeps(&node, &name);
        }
        end_verified(tenant);
    }
    wait_for("the memory of all", PATIENCE, || {
        (free(&node) >= before).then_some(())
    });
}

/// Killed at any moment of a move: nothing is lost, and a survivor has every byte. `GPUMUX_TEST_ROUNDS=200` is a longer storm.
#[test]
fn storm_of_kills_harms_no_other_tenant() {
    let node = Node::start();
    let before = free(&node);
    let rounds = std::env::var("GPUMUX_TEST_ROUNDS").ok();
    let rounds = rounds.map_or(6, |text| text.parse().expect("a number of rounds"));
    let survivor = Process::start(&mut node.tenant("--name survivor", &endless(11, "24MiB")));
    for round in 0..rounds {
        let name = format!("victim{round}");
        let work = endless(round, "24MiB");
        let victim = Process::start(&mut node.tenant(&format!("--name {name}"), &work));
        node.wait_tenant(&name, |it| bytes(it, "in_use") > 0);
        // The answer comes when the move is done, or the tenant gone.
        let mover = Process::start(&mut node.gpumux(["sleep", &name]));
        let _ = sleeps(&node, "survivor");
        std::thread::sleep(Duration::from_millis(u64::from(round % 10) * 15));
        victim.kill();
        let ended = mover.finish_within(PATIENCE * 2);
        assert!(ended.status.code().is_some(), "{ended:?}");
    }
    end_verified(survivor);
    wait_for("the memory of the dead", PATIENCE, || {
        (free(&node) >= before).then_some(())
    });
}
