//! Many processes on few devices for a while: what they leave behind, and what they cost when they only wait.
//!
//! `GPUMUX_SOAK_SECONDS=60 cargo test -p gpumux-tests --test e2e soak` makes it a soak; without that it is as short as the
//! rest.

use std::{
    fs,
    time::{Duration, Instant},
};

use gpumux_tests::{Node, Options, PATIENCE, Process, Run, real, wait_for};

const PROCESSES: usize = 16;
/// At most this part of one CPU for all of them, device included, when they only wait.
const IDLE_CPU: f64 = 0.10;

fn seconds() -> u64 {
    let asked = std::env::var("GPUMUX_SOAK_SECONDS").ok();
    asked.and_then(|text| text.parse().ok()).unwrap_or(2)
}

/// Ticks of CPU that a process has used so far.
fn ticks(pid: u32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).expect("it lives");
    // Behind the name, which may contain blanks: user is the 12th, system the 13th.
    let rest = stat.rsplit_once(')').expect("a name").1;
    let field = |i: usize| {
        rest.split_whitespace()
            .nth(i)
            .and_then(|it| it.parse::<u64>().ok())
    };
    field(11).unwrap_or(0) + field(12).unwrap_or(0)
}

/// Bytes that the device's server has in memory.
fn resident(pid: u32) -> u64 {
    let statm = fs::read_to_string(format!("/proc/{pid}/statm")).expect("it lives");
    let pages = statm.split(' ').nth(1).and_then(|it| it.parse().ok());
    4096 * pages.unwrap_or(0_u64)
}

/// Free bytes of each device.
fn free(node: &Node) -> Vec<String> {
    let of = |device: usize| {
        let gpumux = gpumux_tests::binary().into_os_string();
        let mut command = node.on_device([gpumux, "scratch".into(), "--memory".into()]);
        command.env("CUDA_VISIBLE_DEVICES", device.to_string());
        command.run().ok().out
    };
    (0..2).map(of).collect()
}

#[test]
fn sixteen_processes_on_two_devices() {
    if real() {
        eprintln!("SKIPPED: it needs the emulated device");
        return;
    }
    let node = Node::with(Options {
        devices: 2,
        without_daemon: true,
        ..Options::default()
    });
    let server = node.emulated_pid();
    let (free_before, before) = (free(&node), node.emulated_files());
    let start = |line: &str, i: usize| {
        let mut command = node.on_device(line.split(' ').map(str::to_owned));
        Process::start(command.env("CUDA_VISIBLE_DEVICES", (i % 2).to_string()))
    };

    // They work, eight on a device, so that all of it takes as long as asked; and what they compute is right.
    let gpumux = gpumux_tests::binary();
    let check = format!(
        "{} workload check --json --seconds {}",
        gpumux.display(),
        seconds() as f64 / (PROCESSES / 2) as f64
    );
    let workers: Vec<Process> = (0..PROCESSES).map(|i| start(&check, i)).collect();
    // The first calls cost more than the work.
    let patience = PATIENCE + 4 * Duration::from_secs(seconds());
    for worker in workers {
        let finished = worker.finish_within(patience).ok();
        assert_eq!(finished.json()["mismatches"], 0, "{finished:#?}");
    }
    wait_for("all files are closed", PATIENCE, || {
        (node.emulated_files() == before).then_some(())
    });

    // What the first round needed is enough for all others.
    let (settled, most) = (resident(server), 4 << 20);

    // They wait: each has a context and memory.
    let ready = |i: usize| node.dir().join(format!("ready-{i}"));
    let waiting: Vec<Process> = (0..PROCESSES)
        .map(|i| {
            let idle = "workload idle --memory 64MiB --seconds 600 --ready-file";
            start(
                &format!("{} {idle} {}", gpumux.display(), ready(i).display()),
                i,
            )
        })
        .collect();
    wait_for("all contexts", PATIENCE, || {
        (0..PROCESSES).all(|i| ready(i).exists()).then_some(())
    });
    let pids: Vec<u32> = waiting.iter().map(Process::pid).chain([server]).collect();
    let all = || pids.iter().map(|pid| ticks(*pid)).sum::<u64>();
    // Some may yet have to finish their start.
    wait_for("waiting to take less of a CPU", patience, || {
        let (first, began) = (all(), Instant::now());
        std::thread::sleep(Duration::from_secs(seconds()));
        let used = (all() - first) as f64 / 100.0 / began.elapsed().as_secs_f64();
        (used <= IDLE_CPU).then_some(())
    });
    for process in waiting {
        process.kill();
    }
    wait_for("all files are closed", PATIENCE, || {
        (node.emulated_files() == before).then_some(())
    });
    wait_for("their memory is free", PATIENCE, || {
        (free(&node) == free_before).then_some(())
    });
    let grown = resident(server).saturating_sub(settled);
    assert!(grown <= most, "the server has grown by {grown} bytes");
}
