//! gpumux from end to end: the real binary, libraries and processes, on the emulated device, or on a real one
//! with `GPUMUX_TEST_REAL=1`. See the harness (`gpumux-tests`) for how to carry this to another machine.

mod attacks;
mod caches;
mod completions;
mod consoles;
mod containers;
mod contracts;
mod controls;
mod copies;
mod cuda;
mod devices;
mod docs;
mod elastic;
mod emu;
mod ends;
mod faults;
mod foreign;
mod fresh;
mod gangs;
mod hints;
mod hostile;
mod ipc;
mod itself;
mod launches;
mod lease;
mod lifecycle;
mod machine;
mod memory;
mod mig;
mod mover;
mod moves;
mod on_demand;
mod packages;
mod policies;
mod pools;
mod ranks;
mod recipes;
mod recording;
mod run;
mod seen;
mod soak;
mod space;
mod storms;
mod tamper;
mod timings;
mod transparency;
mod unit;
mod unlisted;
mod usage;
mod users;

use std::{process::Command, time::Duration};

use gpumux_tests::{PATIENCE, Process, real, wait_settled};

/// A tenant program that runs one short kernel after the other and prints a line for each.
const TICKS: &str = "gpumux scratch";

/// The command with a limit of so many blocks for each file that it writes: as on a full disk, what is beyond that fails.
fn on_full_disk(command: &Command, blocks: u32) -> Command {
    let mut limited = Command::new("sh");
    let script = format!("trap '' XFSZ; ulimit -f {blocks}; exec \"$@\"");
    limited.args(["-c", &script, "sh"]);
    limited.arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => limited.env(name, value),
            None => limited.env_remove(name),
        };
    }
    limited
}

/// Does it for each of these, for all at once: it waits most of the time.
fn at_once<T: Send>(all: impl IntoIterator<Item = T>, one: impl Fn(T) + Sync) {
    std::thread::scope(|scope| {
        for it in all {
            scope.spawn(|| one(it));
        }
    });
}

/// Whether a tenant is under control. Whether it has work, or its turn, at this moment changes all the time.
fn is_well(tenant: &serde_json::Value) -> bool {
    ["running", "idle", "queued"]
        .iter()
        .any(|it| tenant["state"] == *it)
}

/// Waits until a frozen program stands still. What it had done before may be read later. One that runs writes some fifty lines
/// in this time.
#[track_caller]
fn wait_still(process: &Process) {
    let a_while = Duration::from_millis(300);
    wait_settled("it stands still", a_second(), a_while, || process.lines());
}

/// What is specified to happen within a second. The emulated device's machine may stand still for longer: there, that it comes at all.
fn a_second() -> Duration {
    match real() {
        true => Duration::from_secs(1),
        false => PATIENCE,
    }
}

/// A latency tenant's program that has work now and then. Beside it, batch tenants take turns by freezing.
const REQUESTS: &str =
    "gpumux workload latency --kernels 1 --iterations 110000 --period-us 20000 --seconds 600";
