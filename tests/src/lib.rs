//! Harness of the end-to-end tests: real processes on the emulated device, or on a real one.
//!
//! A [`Node`] is one machine in small: a runtime folder, a device and a daemon, all gone when it is dropped.
//! Programs are started on it through the `gpumux` binary, as a user would. Nothing here knows a path from
//! compile time, so that a built test executable can be carried elsewhere:
//!
//! - `GPUMUX_BIN_DIR` names the folder with `gpumux`, `libgpumux.so` and `libgpumux_emu.so`; without it they are
//!   built by `cargo build --workspace` into the folder that the test itself was built in.
//! - `GPUMUX_TEST_REAL=1` uses the machine's own GPU and driver instead of the emulated device.

mod build;
pub mod cuda;
pub mod hanging;
mod node;
mod process;
mod random;
mod session;
mod terminal;

pub use build::{binary, built, library};
pub use node::{Node, Options, unit};
pub use process::{Finished, Process, Run};
pub use random::Random;
pub use session::{Listener, Puppet, Session, readable};
pub use terminal::{at_terminal, drawn};

use std::{
    io::Write,
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

/// Longest that anything here waits for something that should happen at once.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// Whether the tests run on a real GPU.
pub fn real() -> bool {
    std::env::var_os("GPUMUX_TEST_REAL").is_some_and(|value| value == "1")
}

/// How many devices programs see; emulated ones, as many as asked for.
pub fn devices() -> usize {
    if !real() {
        return usize::MAX;
    }
    let there = |n: &usize| Path::new(&format!("/dev/nvidia{n}")).exists();
    let all = (0..64).filter(there).count();
    let seen = std::env::var("CUDA_VISIBLE_DEVICES").ok();
    seen.map_or(all, |it| it.split(',').count().min(all))
}

/// Makes a program of a script. Another process writes it: what this one has open for writing may be inherited by a program that
/// another thread starts at this moment, and could not be started.
///
/// # Panics
/// When it cannot be written.
pub fn program(path: &Path, script: &str) {
    let mut install = Command::new("install");
    install.args(["-m", "755", "/dev/stdin"]).arg(path);
    let mut writer = install.stdin(Stdio::piped()).spawn().unwrap();
    let mut stdin = writer.stdin.take().unwrap();
    stdin.write_all(script.as_bytes()).unwrap();
    drop(stdin);
    assert!(writer.wait().unwrap().success(), "{}", path.display());
}

/// Looks until what is seen stays the same for a while, and returns it.
///
/// # Panics
/// With `what`, after `patience`.
#[track_caller]
pub fn wait_settled<T: PartialEq>(
    what: &str,
    patience: Duration,
    a_while: Duration,
    look: impl Fn() -> T,
) -> T {
    wait_for(what, patience, || {
        let before = look();
        std::thread::sleep(a_while);
        (look() == before).then_some(before)
    })
}

/// Asks again and again until the answer is there.
///
/// # Panics
/// With `what`, after `patience`.
#[track_caller]
pub fn wait_for<T>(what: &str, patience: Duration, mut answer: impl FnMut() -> Option<T>) -> T {
    let mut left = Patience::new(patience);
    loop {
        if let Some(answer) = answer() {
            return answer;
        }
        assert!(left.lasts(), "waited {patience:?} in vain: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// How long something may still take. Time in which programs of this machine wait for a CPU counts a tenth: what they do takes longer.
#[derive(Debug)]
pub struct Patience {
    left: Duration,
    looked: Instant,
    waited: Duration,
}

impl Patience {
    /// So long, where nothing waits for a CPU; three times as long where that is not known.
    pub fn new(patience: Duration) -> Self {
        let waited = waited_for_cpus();
        Self {
            left: patience * if waited.is_some() { 1 } else { 3 },
            looked: Instant::now(),
            waited: waited.unwrap_or_default(),
        }
    }

    /// Whether some of it is left.
    pub fn lasts(&mut self) -> bool {
        let passed = self.looked.elapsed();
        let waited = waited_for_cpus().unwrap_or_default();
        let busy = waited.saturating_sub(self.waited).min(passed);
        self.left = self.left.saturating_sub(passed - busy * 9 / 10);
        (self.looked, self.waited) = (self.looked + passed, waited);
        !self.left.is_zero()
    }
}

/// For how long, since the machine was started, some program waited for a CPU (Linux's pressure stall information), where it is
/// counted.
fn waited_for_cpus() -> Option<Duration> {
    let pressure = std::fs::read_to_string("/proc/pressure/cpu").ok()?;
    pressure.lines().find_map(|line| {
        let (_, total) = line.strip_prefix("some ")?.split_once("total=")?;
        total.trim().parse().ok().map(Duration::from_micros)
    })
}
