//! What goes wrong on demand (`GPUMUX_EMU_FAULT`, the profile's `controls`): it shows as the driver's own error, and stays
//! where it is.

use std::process::Command;

use gpumux_tests::{Finished, Node, Options, PATIENCE, Process, Run, real, wait_for};
use rustix::process::Signal;

use crate::{REQUESTS, TICKS};

/// A program that allocates, copies, launches, waits and verifies.
const CHECK: &str = "gpumux workload check --json --seconds 0.05 --memory 1MiB";

/// A node, unless the device is a real one.
fn node(options: Options) -> Option<Node> {
    if real() {
        eprintln!("SKIPPED: faults on demand need the emulated device");
        return None;
    }
    Some(Node::with(options))
}

fn without_daemon() -> Option<Node> {
    node(Options {
        without_daemon: true,
        ..Options::default()
    })
}

fn faulty(mut command: Command, fault: &str) -> Command {
    command.env("GPUMUX_EMU_FAULT", fault);
    command
}

fn alone(node: &Node, program: &str) -> Command {
    let socket = node.session_socket();
    let mut command = node.shimmed(program, &socket);
    command.env_remove("LD_PRELOAD");
    command
}

#[track_caller]
fn works(finished: Finished) {
    let finished = finished.ok();
    assert_eq!(finished.json()["mismatches"], 0, "{finished:#?}");
}

/// Nothing is left of a program that is gone: the device's server holds as many files as before it.
#[track_caller]
fn wait_files(node: &Node, count: usize) {
    wait_for("files to be closed", PATIENCE, || {
        (node.emulated_files() == count).then_some(())
    });
}

#[test]
fn calls_and_kernels_fail_with_the_drivers_errors() {
    let Some(node) = without_daemon() else {
        return;
    };
    for (fault, error) in [
        ("out-of-memory@1", "CUDA_ERROR_OUT_OF_MEMORY"),
        ("illegal-address@1", "CUDA_ERROR_ILLEGAL_ADDRESS"),
        ("trap@2", "CUDA_ERROR_LAUNCH_FAILED"),
        ("device-lost@1", "CUDA_ERROR_DEVICE_UNAVAILABLE"),
    ] {
        let finished = faulty(alone(&node, CHECK), fault).run();
        assert_eq!(finished.code(), 1, "{fault}: {finished:#?}");
        let said = format!("{}{}", finished.out, finished.err);
        assert!(said.contains(error), "{fault}: {finished:#?}");
        works(alone(&node, CHECK).run());
    }
}

/// A tenant whose `fault` makes it stand still, beside others that do not.
fn stands_still(program: &str, fault: &str) {
    let Some(node) = node(Options::default()) else {
        return;
    };
    let stuck = faulty(node.tenant("--name stuck --class batch", program), fault);
    let mut stuck = Process::start(&mut { stuck });
    node.wait_tenant("stuck", |it| it["domains"][0]["demand"] == "busy");
    // It keeps its turn as one that is busy would, and no more.
    let mut other = Process::start(&mut node.tenant("--name other --class batch", TICKS));
    other.wait_lines(5);
    let requests = "gpumux workload latency --json --calls 10 --seconds 60";
    let requests = node.tenant("--name serve --class latency", requests).run();
    assert_eq!(requests.ok().json()["calls"], 10);
    let lines = other.lines();
    other.wait_lines(lines + 5);
    assert!(stuck.poll().is_none(), "{}{}", stuck.out(), stuck.err());
    stuck.signal(Signal::KILL);
    stuck.finish();
    wait_for("its end", PATIENCE, || {
        node.find_tenant("stuck").is_none().then_some(())
    });
    works(alone(&node, CHECK).run());
}

#[test]
fn an_endless_kernel_takes_turns_and_can_be_killed() {
    stands_still("gpumux workload batch --iterations 100000", "endless@9");
}

#[test]
fn a_stalled_copy_holds_up_its_own_program_only() {
    let program = "gpumux workload latency --copy 1MiB --iterations 1000 --seconds 60";
    stands_still(program, "stalled-copy@5");
}

/// Every driver call and every RM call of a small program, or so many of them as there is time for.
fn each(total: u64) -> impl Iterator<Item = u64> {
    let step = match std::env::var_os("GPUMUX_SOAK_SECONDS") {
        Some(_) => 1,
        None => total.div_ceil(12),
    };
    (1..=total).step_by(step as usize)
}

/// How many there are: the least power of 2 that the program does not come to.
fn count(node: &Node, fault: &str) -> u64 {
    let survives = |n: &u64| {
        let finished = faulty(alone(node, CHECK), &format!("{fault}@{n}")).run();
        finished.status.success()
    };
    let powers = (4..20).map(|shift| 1 << shift);
    powers.into_iter().find(survives).expect("it ends")
}

#[test]
fn a_program_killed_at_any_call_leaves_nothing_behind() {
    let Some(node) = node(Options::default()) else {
        return;
    };
    let mut other = Process::start(&mut node.tenant("--name other --class batch", TICKS));
    other.wait_lines(3);
    let total = count(&node, "kill");
    let before = node.emulated_files();
    for n in each(total) {
        let victim = node.tenant("--name victim --class latency", CHECK);
        let code = faulty(victim, &format!("kill@{n}")).run().code();
        assert!([0, 128 + 9].contains(&code), "kill@{n}: {code}");
        wait_files(&node, before);
        wait_victim(&node);
    }
    let lines = other.lines();
    other.wait_lines(lines + 5);
}

/// Until then its name is taken.
fn wait_victim(node: &Node) {
    wait_for("the victim's end", PATIENCE, || {
        node.find_tenant("victim").is_none().then_some(())
    });
}

#[test]
fn a_failing_control_is_an_error_or_does_not_matter() {
    let Some(node) = node(Options::default()) else {
        return;
    };
    let total = count(&node, "control");
    let before = node.emulated_files();
    for n in each(total) {
        for managed in [false, true] {
            let command = match managed {
                true => node.tenant("--name victim --class latency", CHECK),
                false => alone(&node, CHECK),
            };
            let finished = faulty(command, &format!("control@{n}")).run();
            match finished.code() {
                0 => works(finished),
                _ => assert!(finished.err.contains("CUDA_ERROR"), "{n}: {finished:#?}"),
            }
            wait_files(&node, before);
            wait_victim(&node);
        }
    }
}

/// The daemon's own controls, slow or failing now and then: all tenants go on, and it reports the state.
fn bad_controls(profile: &'static str) {
    let Some(node) = node(Options {
        profile,
        ..Options::default()
    }) else {
        return;
    };
    let mut tenants = ["a", "b"].map(|name| {
        let options = format!("--class batch --name {name}");
        Process::start(&mut node.tenant(&options, TICKS))
    });
    let _serve = Process::start(&mut node.tenant("--class latency --name serve", REQUESTS));
    for _ in 0..3 {
        for tenant in &mut tenants {
            let lines = tenant.lines();
            tenant.wait_lines(lines + 3);
        }
    }
    assert_eq!(node.ps()["tenants"].as_array().map(Vec::len), Some(3));
    for tenant in tenants {
        tenant.signal(Signal::TERM);
        tenant.finish();
    }
}

#[test]
fn slow_controls() {
    bad_controls(
        "controls = { set_timeslice_us = [30000, 60000], freeze_us = [30000, 90000], thaw_us = [30000, 60000] }",
    );
}

#[test]
fn failing_controls() {
    bad_controls("controls = { fail_every = 3 }");
}
