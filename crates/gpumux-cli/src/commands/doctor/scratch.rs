//! The program that `doctor` tries the controls on (and the tests watch): one short kernel after the other, with a
//! line for each.

use std::{
    io::{self, Write},
    process::ExitCode,
};

use gpumux_cuda::DeviceBuffer;
use gpumux_workload::kernels::Gpu;

/// Time of one kernel in ns: short against what `doctor` waits for.
const KERNEL_NS: u64 = 5_000_000;

/// Run short kernels and print a line for each (used by `doctor`)
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Ordinal of the device.
    #[arg(long, default_value_t = 0)]
    device: u32,
    /// Allocate so many bytes first.
    #[arg(long, value_name = "BYTES")]
    hold: Option<usize>,
    /// Print how many bytes of the device's memory are free, instead of running kernels.
    #[arg(long)]
    memory: bool,
}

/// Ends when no process reads its lines.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let gpu = Gpu::open(args.device)?;
    let _held = args
        .hold
        .map(|bytes| DeviceBuffer::new(&gpu.context, bytes))
        .transpose()?;
    let mut out = io::stdout();
    if args.memory {
        writeln!(out, "{}", gpu.context.memory_info()?.0)?;
        return Ok(ExitCode::SUCCESS);
    }
    let shape = gpu.shape(1, 32);
    loop {
        gpu.spin(shape, KERNEL_NS)?;
        gpu.stream.synchronize()?;
        writeln!(out, "done")?;
    }
}
