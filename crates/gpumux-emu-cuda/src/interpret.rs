//! Kernels that are interpreted: the device's memory as they see it, how long they take, and whose turn it is.
//!
//! Such a kernel has two parts for the server: its beginning, which is reported like any completion, and the rest,
//! whose length is set when the interpreter has come to the end. So it has the device while it is interpreted, alternating with
//! the context's other kernels and not while its group is frozen, and it takes at least the time of the work model.
//!
//! The blocks of a context's kernels are interpreted on all cores, or on as many as `GPUMUX_EMU_CORES` says. In which order
//! they touch memory is not defined, as on a GPU.

use std::{
    collections::VecDeque,
    io::{self, Write},
    sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering},
    sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, RwLockReadGuard},
};

use gpumux_emu::{client, protocol::DeviceInfo};
use gpumux_ptx::{Fault, FaultKind, Launch, Memory, Run, Stats, Turn};

use crate::{
    border::print,
    error::{CuError, Result},
    kernel::Shape,
    memory::{self, Space, Viewer},
    process::lock,
};

/// Instructions that a block executes before another one of the context goes on, or memory can be mapped.
const TURN: u64 = 1 << 17;
/// Lanes of an SM.
const LANES: u64 = 128;

/// A launch that is interpreted.
#[derive(Clone, Debug)]
pub(crate) struct Interpreted {
    pub(crate) launch: Arc<Launch>,
    pub(crate) shape: Shape,
}

/// ns that a kernel takes with all of its SMs.
pub(crate) fn duration(stats: Stats, shape: Shape, device: &DeviceInfo) -> u64 {
    let (width, together) = shape.width(device);
    let waves = shape
        .blocks
        .div_ceil(together * u64::from(device.sms))
        .max(1);
    let issue = stats.instructions / (LANES * u64::from(width));
    let cycles = stats.longest_cycles().saturating_mul(waves).max(issue);
    let computing = cycles as f64 * 1e6 / f64::from(device.clock_khz.max(1));
    let part = f64::from(width) / f64::from(device.sms.max(1));
    let moving = stats.bytes as f64 * 1e9 / (device.memory_bandwidth.max(1) as f64 * part);
    computing.max(moving) as u64
}

/// The code of a fault.
pub(crate) fn code(kind: &FaultKind) -> CuError {
    match kind {
        FaultKind::IllegalAddress(_) => CuError::ILLEGAL_ADDRESS,
        FaultKind::Misaligned(_) => CuError::MISALIGNED_ADDRESS,
        FaultKind::Trap => CuError::LAUNCH_FAILED,
        FaultKind::Assert(_) => CuError::ASSERT,
        FaultKind::Stack => CuError::HARDWARE_STACK_ERROR,
        FaultKind::Stuck => CuError::LAUNCH_TIMEOUT,
        FaultKind::Unusable(_) => CuError::NOT_SUPPORTED,
    }
}

/// Says what happened, as the code alone does not.
pub(crate) fn explain(fault: &Fault) {
    // A program's standard error may be closed.
    let _ = writeln!(std::io::stderr(), "gpumux: {fault}");
}

/// How many threads interpret a context's kernels.
static CORES: LazyLock<usize> = LazyLock::new(|| {
    let asked = std::env::var("GPUMUX_EMU_CORES").ok();
    let asked = asked.and_then(|cores| cores.parse().ok());
    let there = || std::thread::available_parallelism().map_or(1, Into::into);
    asked.filter(|cores| *cores > 0).unwrap_or_else(there)
});

/// A context's interpreted kernels.
#[derive(Default)]
pub(crate) struct Interpreter {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    /// Blocks that have their turn.
    running: usize,
    frozen: bool,
    ended: bool,
    threads: usize,
}

struct Job {
    /// The rest of the kernel.
    id: u64,
    shape: Shape,
    run: Run,
}

impl State {
    /// A block whose turn it is, and its kernel's number. Kernels take turns, too.
    fn take(&mut self) -> Option<(u64, Turn)> {
        if self.frozen {
            return None;
        }
        for _ in 0..self.jobs.len() {
            let mut job = self.jobs.pop_front()?;
            let (id, turn) = (job.id, job.run.take());
            self.jobs.push_back(job);
            if let Some(turn) = turn {
                self.running += 1;
                return Some((id, turn));
            }
        }
        None
    }

    /// Takes a block back; what to tell if that was the kernel's end. Nothing of a kernel that was dropped meanwhile.
    fn give(&mut self, id: u64, turn: Turn) -> Option<End> {
        let at = self.jobs.iter().position(|job| job.id == id)?;
        let end = match self.jobs[at].run.give(turn) {
            Ok(false) => return None,
            Ok(true) => Ok((id, self.jobs[at].shape, self.jobs[at].run.stats())),
            Err(fault) => Err(fault),
        };
        self.jobs.remove(at);
        Some(end)
    }
}

/// Number, shape and what was executed; or what was wrong.
pub(crate) type End = std::result::Result<(u64, Shape, Stats), Fault>;

impl Interpreter {
    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        let waited = self.changed.wait(state);
        waited.unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Begins a kernel whose rest has this number. `start` starts a thread that calls [`Self::turn`]; the first is not
    /// there only to help.
    pub(crate) fn begin(
        &self,
        id: u64,
        kernel: &Interpreted,
        start: impl Fn(bool) -> io::Result<()>,
    ) -> Result {
        let run = Run::new((*kernel.launch).clone()).map_err(|fault| {
            explain(&fault);
            code(&fault.kind)
        })?;
        let mut state = lock(&self.state);
        let wanted = (run.blocks() as usize).clamp(1, *CORES);
        state.jobs.push_back(Job {
            id,
            shape: kernel.shape,
            run,
        });
        while state.threads < wanted {
            start(state.threads > 0).map_err(|_| CuError::OPERATING_SYSTEM)?;
            state.threads += 1;
        }
        drop(state);
        self.changed.notify_all();
        Ok(())
    }

    /// Whether the rest with this number is under way.
    pub(crate) fn has(&self, id: u64) -> bool {
        lock(&self.state).jobs.iter().any(|job| job.id == id)
    }

    /// Stops, between two turns of each block, or goes on.
    pub(crate) fn freeze(&self, frozen: bool) {
        let mut state = lock(&self.state);
        state.frozen = frozen;
        self.changed.notify_all();
        while frozen && state.running > 0 {
            state = self.wait(state);
        }
    }

    /// Drops all kernels, and the threads. Nothing touches memory any more.
    pub(crate) fn end(&self) {
        let mut state = lock(&self.state);
        state.ended = true;
        state.jobs.clear();
        self.changed.notify_all();
        while state.running > 0 {
            state = self.wait(state);
        }
    }

    /// One turn of one block: what to tell. False when there will be no more.
    pub(crate) fn turn(&self, viewer: Viewer) -> (bool, Option<End>) {
        let mut state = lock(&self.state);
        let (id, mut turn) = loop {
            if state.ended {
                return (false, None);
            }
            match state.take() {
                Some(taken) => break taken,
                None => state = self.wait(state),
            }
        };
        drop(state);
        turn.run(&mut Reachable::new(viewer), TURN);
        lock(&self.state).running -= 1;
        self.changed.notify_all();
        // Before the end of the block is visible; a freeze does not wait for that.
        print(&turn.take_output());
        let end = lock(&self.state).give(id, turn);
        self.changed.notify_all();
        (true, end)
    }
}

/// Memory that a kernel may touch, which stays mapped meanwhile.
struct Reachable {
    space: RwLockReadGuard<'static, Space>,
    viewer: Viewer,
    /// The range that was last touched.
    last: (u64, u64),
}

impl Reachable {
    fn new(viewer: Viewer) -> Self {
        Self {
            viewer,
            space: memory::space(),
            last: (0, 0),
        }
    }

    fn check(&mut self, at: u64, size: u32) -> bool {
        let Some(end) = at.checked_add(size.into()) else {
            return false;
        };
        if at >= self.last.0 && end <= self.last.1 {
            return true;
        }
        match self.space.reachable_range(at, self.viewer) {
            Some(range) if end <= range.1 => {
                self.last = range;
                true
            }
            _ => false,
        }
    }
}

// SAFETY of all that follows: `check` says that the range is the device's or pinned memory, and `space` keeps it
// mapped; the caller keeps accesses aligned (`Memory` demands it). The program and other kernels may access it at the same
// time, so all accesses are atomic.
macro_rules! atomically {
    ($at:expr, $size:expr, $cell:ident => $body:expr) => {
        match $size {
            1 => {
                // SAFETY: see above.
                let $cell = unsafe { AtomicU8::from_ptr($at as *mut u8) };
                $body
            }
            2 => {
                // SAFETY: see above.
                let $cell = unsafe { AtomicU16::from_ptr($at as *mut u16) };
                $body
            }
            4 => {
                // SAFETY: see above.
                let $cell = unsafe { AtomicU32::from_ptr($at as *mut u32) };
                $body
            }
            _ => {
                // SAFETY: see above.
                let $cell = unsafe { AtomicU64::from_ptr($at as *mut u64) };
                $body
            }
        }
    };
}

#[allow(clippy::unnecessary_cast)] // of the widest
impl Memory for Reachable {
    fn load(&mut self, at: u64, size: u32) -> Option<u64> {
        self.check(at, size)
            .then(|| atomically!(at, size, cell => cell.load(Ordering::Acquire) as u64))
    }

    fn store(&mut self, at: u64, size: u32, value: u64) -> bool {
        let there = self.check(at, size);
        if there {
            atomically!(at, size, cell => cell.store(value as _, Ordering::Release));
        }
        there
    }

    fn update(&mut self, at: u64, size: u32, change: &mut dyn FnMut(u64) -> u64) -> Option<u64> {
        self.check(at, size).then(|| {
            atomically!(at, size, cell => {
                let mut old = cell.load(Ordering::Acquire);
                loop {
                    let new = change(old as u64);
                    match cell.compare_exchange_weak(old, new as _, Ordering::AcqRel, Ordering::Acquire) {
                        Ok(_) => break old as u64,
                        Err(now) => old = now,
                    }
                }
            })
        })
    }

    fn now(&mut self) -> u64 {
        client::now()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_takes_as_long_as_its_narrowest_resource() {
        let device = crate::kernel::tests::h100();
        let shape = Shape {
            blocks: 264,
            threads: 1024,
        };
        let time = |stats| duration(stats, shape, &device);
        let none = Stats::default();
        // 6 cycles an instruction at 1.755 GHz.
        assert_eq!(
            time(Stats {
                longest: 1755,
                ..none
            }),
            6000
        );
        // 132 SMs of 128 lanes.
        assert_eq!(
            time(Stats {
                instructions: 132 * 128 * 1755,
                ..none
            }),
            1000
        );
        // 3.35 TB/s.
        assert_eq!(
            time(Stats {
                bytes: 3_350_000,
                ..none
            }),
            1000
        );
    }
}
