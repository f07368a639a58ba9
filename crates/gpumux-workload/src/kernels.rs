//! The kernels of the workloads, and launching them.
//!
//! The PTX text travels in the binary; a real driver compiles it, the emulated device knows the kernels
//! by name and models them. All loops are grid-stride, so every grid and block gives the same result.
//!
//! | kernel | arguments | does |
//! |---|---|---|
//! | `gpumux_spin` | `u64 ns` | spins that long by the global timer; preempted time counts as done |
//! | `gpumux_work` | `u64 out, u32 iterations` | fixed arithmetic per thread, for measuring throughput |
//! | `gpumux_fill_u32` | `u64 ptr, u32 value, u64 n` | every element becomes `value` |
//! | `gpumux_add_u32` | `u64 ptr, u32 value, u64 n` | adds `value` to every element |
//! | `gpumux_rounds_u32` | `u64 ptr, u64 n, u32 rounds` | adds 1 to every element, round by round |
//! | `gpumux_sum_u32` | `u64 ptr, u64 n, u64 out` | adds the sum of all elements to the `u64` at `out` |
//! | `gpumux_sweep_u32` | `u64 ptr, u32 value, u64 n, u64 out` | counts the elements that are not a hash of their index plus `value` at the `u64` at `out`; all become that of `value + 1` |
//! | `gpumux_read_u32` | `u64 ptr, u64 n, u32 times, u64 out` | reads every element so many times, as fast as the memory can |
//! | `gpumux_pointers` | eight `u64` | nothing, for measuring launches; interpreted by the emulated device |
//! | `gpumux_trap` | | faults the context |
//!
//! `n` counts elements; pointers are device addresses. The model of `gpumux_work`: one iteration is two
//! dependent multiply-adds (4 cycles each) and 2.75 instructions to issue on sm_90, so with `w` warps on each of an
//! SM's four schedulers an iteration takes max(8, 2.75 `w`) cycles, for as many waves of blocks as the
//! grid has.

use std::ffi::CStr;

use anyhow::Context as _;
use gpumux_cuda::{Arg, Context, Device, DeviceBuffer, Event, Function, Module, Result, Stream};

/// The text of all kernels.
pub const PTX: &CStr =
    match CStr::from_bytes_with_nul(concat!(include_str!("kernels.ptx"), "\0").as_bytes()) {
        Ok(text) => text,
        Err(_) => panic!("kernels.ptx contains a zero byte"),
    };

/// The PTX text of a kernel whose assertion fails.
const ASSERT: &CStr =
    match CStr::from_bytes_with_nul(concat!(include_str!("assert.ptx"), "\0").as_bytes()) {
        Ok(text) => text,
        Err(_) => panic!("assert.ptx contains a zero byte"),
    };

/// Blocks, and threads in each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Blocks in the grid.
    pub blocks: u32,
    /// Threads in a block, at most 1024.
    pub threads: u32,
}

/// A device made ready: context, stream, compiled kernels.
pub struct Gpu {
    /// The context, current on the thread that made it.
    pub context: Context,
    /// Where all launches go.
    pub stream: Stream,
    /// Product name of the device.
    pub name: String,
    multiprocessors: u32,
    spin: Function,
    work: Function,
    fill: Function,
    add: Function,
    rounds: Function,
    sum: Function,
    sweep: Function,
    read: Function,
    pointers: Function,
    trap: Function,
    scratch: DeviceBuffer,
}

impl Gpu {
    /// Opens the device with this ordinal through its primary context.
    ///
    /// # Errors
    /// The driver's, with the step that failed.
    pub fn open(ordinal: u32) -> anyhow::Result<Self> {
        let device = Device::get(ordinal).with_context(|| format!("device {ordinal}"))?;
        let context = Context::primary(device).context("cannot create a context")?;
        Self::on(&context)
    }

    /// The same in a context that is current: a stream of its own, and the kernels.
    ///
    /// # Errors
    /// The driver's, with the step that failed.
    pub fn on(context: &Context) -> anyhow::Result<Self> {
        let device = context.device();
        let module = Module::from_ptx(context, PTX).context("cannot load the kernels")?;
        Ok(Self {
            stream: Stream::new(context)?,
            name: device.name()?,
            multiprocessors: device.multiprocessors()?,
            spin: module.function("gpumux_spin")?,
            work: module.function("gpumux_work")?,
            fill: module.function("gpumux_fill_u32")?,
            add: module.function("gpumux_add_u32")?,
            rounds: module.function("gpumux_rounds_u32")?,
            sum: module.function("gpumux_sum_u32")?,
            sweep: module.function("gpumux_sweep_u32")?,
            read: module.function("gpumux_read_u32")?,
            pointers: module.function("gpumux_pointers")?,
            trap: module.function("gpumux_trap")?,
            scratch: DeviceBuffer::new(context, 256)?,
            context: context.clone(),
        })
    }

    /// A grid of `per_multiprocessor` blocks on each multiprocessor.
    pub fn shape(&self, per_multiprocessor: u32, threads: u32) -> Shape {
        Shape {
            blocks: self.multiprocessors.saturating_mul(per_multiprocessor),
            threads,
        }
    }

    /// Launches `gpumux_spin`.
    pub fn spin(&self, shape: Shape, ns: u64) -> Result<()> {
        self.launch(&self.spin, shape, &[Arg::U64(ns)])
    }

    /// Launches `gpumux_work`.
    pub fn work(&self, shape: Shape, iterations: u32) -> Result<()> {
        let out = self.scratch.address();
        self.launch(&self.work, shape, &[Arg::U64(out), Arg::U32(iterations)])
    }

    /// Launches `gpumux_fill_u32` over the whole buffer.
    pub fn fill(&self, buffer: &DeviceBuffer, value: u32) -> Result<()> {
        let (address, n) = elements(buffer);
        self.launch_all(&self.fill, &[address, Arg::U32(value), n])
    }

    /// Launches `gpumux_add_u32` over the whole buffer.
    pub fn add(&self, buffer: &DeviceBuffer, value: u32) -> Result<()> {
        let (address, n) = elements(buffer);
        self.launch_all(&self.add, &[address, Arg::U32(value), n])
    }

    /// Launches `gpumux_rounds_u32` over the whole buffer.
    pub fn rounds(&self, buffer: &DeviceBuffer, rounds: u32) -> Result<()> {
        let (address, n) = elements(buffer);
        self.launch_all(&self.rounds, &[address, n, Arg::U32(rounds)])
    }

    /// Runs `gpumux_sum_u32` over the whole buffer and waits for the sum.
    pub fn sum(&self, buffer: &DeviceBuffer) -> Result<u64> {
        let (address, n) = elements(buffer);
        let out = Arg::U64(self.scratch.address());
        self.scratch.write(0, &[0; 8])?;
        self.launch_all(&self.sum, &[address, n, out])?;
        self.stream.synchronize()?;
        let mut sum = [0; 8];
        self.scratch.read(0, &mut sum)?;
        Ok(u64::from_le_bytes(sum))
    }

    /// Launches `gpumux_sweep_u32` over the whole buffer; `wrong` holds the `u64` that counts.
    pub fn sweep(&self, buffer: &DeviceBuffer, value: u32, wrong: &DeviceBuffer) -> Result<()> {
        let (address, n) = elements(buffer);
        let out = Arg::U64(wrong.address());
        self.launch_all(&self.sweep, &[address, Arg::U32(value), n, out])
    }

    /// Launches `gpumux_read_u32` over the whole buffer.
    pub fn read(&self, buffer: &DeviceBuffer, times: u32) -> Result<()> {
        let (address, n) = elements(buffer);
        let out = Arg::U64(self.scratch.address());
        self.launch_all(&self.read, &[address, n, Arg::U32(times), out])
    }

    /// Launches `gpumux_trap`: the context is of no use afterwards.
    ///
    /// # Errors
    /// The driver's; the fault itself is reported by the next wait.
    pub fn trap(&self) -> Result<()> {
        let one = Shape {
            blocks: 1,
            threads: 1,
        };
        self.launch(&self.trap, one, &[])
    }

    /// Runs a kernel whose assertion fails: the context is of no use afterwards.
    ///
    /// # Errors
    /// The driver's, that fault in the end.
    pub fn assert(&self) -> Result<()> {
        let assert = Module::from_ptx(&self.context, ASSERT)?.function("gpumux_assert")?;
        let one = Shape {
            blocks: 1,
            threads: 1,
        };
        self.launch(&assert, one, &[])?;
        // Before its module is unloaded.
        self.stream.synchronize()
    }

    /// Launches `gpumux_fill_u32` on an address without memory.
    ///
    /// # Errors
    /// The driver's; the fault itself is reported by the next wait.
    pub fn stray(&self) -> Result<()> {
        let nowhere = Arg::U64(0x10);
        self.launch_all(&self.fill, &[nowhere, Arg::U32(1), Arg::U64(1)])
    }

    /// Shortest time on the device of one of `count` launches in a row, in µs, over three tries.
    ///
    /// # Errors
    /// The driver's, or what `launch` returns.
    pub fn time_us(&self, count: u32, launch: impl Fn() -> Result<()>) -> Result<f64> {
        let (start, end) = (Event::timed(&self.context)?, Event::timed(&self.context)?);
        let mut best = f64::INFINITY;
        for _ in 0..3 {
            start.record(&self.stream)?;
            for _ in 0..count {
                launch()?;
            }
            end.record(&self.stream)?;
            end.synchronize()?;
            let us = f64::from(end.elapsed_ms(&start)?) * 1e3;
            best = best.min(us / f64::from(count));
        }
        Ok(best)
    }

    /// Launches `gpumux_pointers`.
    pub fn pointers(&self, addresses: [u64; 8]) -> Result<()> {
        let one = Shape {
            blocks: 1,
            threads: 1,
        };
        self.launch(&self.pointers, one, &addresses.map(Arg::U64))
    }

    fn launch_all(&self, function: &Function, arguments: &[Arg]) -> Result<()> {
        self.launch(function, self.shape(4, 512), arguments)
    }

    fn launch(&self, function: &Function, shape: Shape, arguments: &[Arg]) -> Result<()> {
        // SAFETY: the methods above pass what the table at this file's head says, and the buffers'
        // own bounds; freeing device memory waits for the work that uses it.
        unsafe {
            self.stream
                .launch(function, shape.blocks, shape.threads, arguments)
        }
    }
}

fn elements(buffer: &DeviceBuffer) -> (Arg, Arg) {
    (
        Arg::U64(buffer.address()),
        Arg::U64(buffer.bytes() as u64 / 4),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The emulated device and the real driver both go by these names and argument types.
    #[test]
    fn ptx_declares_every_kernel_as_documented() {
        let text = PTX.to_str().unwrap();
        for entry in [
            "gpumux_spin(.param .u64 ns)",
            "gpumux_work(.param .u64 out, .param .u32 iterations)",
            "gpumux_fill_u32(.param .u64 ptr, .param .u32 value, .param .u64 n)",
            "gpumux_add_u32(.param .u64 ptr, .param .u32 value, .param .u64 n)",
            "gpumux_rounds_u32(.param .u64 ptr, .param .u64 n, .param .u32 rounds)",
            "gpumux_sum_u32(.param .u64 ptr, .param .u64 n, .param .u64 out)",
            "gpumux_sweep_u32(.param .u64 ptr, .param .u32 value, .param .u64 n, .param .u64 out)",
            "gpumux_read_u32(.param .u64 ptr, .param .u64 n, .param .u32 times, .param .u64 out)",
            "gpumux_pointers(\n    .param .u64 a, .param .u64 b, .param .u64 c, .param .u64 d,\n",
            "gpumux_trap()",
        ] {
            assert!(
                text.contains(&format!(".visible .entry {entry}")),
                "{entry}"
            );
        }
        assert_eq!(text.matches(".entry").count(), 10);
        assert!(text.contains(".version 7.0\n.target sm_70\n"));
    }
}
