//! `sweep`: a job that changes all of its memory again and again, and finds every element that is not as it left it.

use std::{sync::atomic::AtomicBool, time::Instant};

use anyhow::Context as _;
use gpumux_cuda::DeviceBuffer;

use crate::{
    Report, Sweep,
    kernels::Gpu,
    report::{Times, Verified},
    stopped,
};

const DEFAULT_MEMORY: usize = 64 << 20;
/// What the first pass expects; any number would do.
const FIRST: u32 = 0x600D_5EED;

/// A number on the device that passes count in.
fn counter(gpu: &Gpu) -> gpumux_cuda::Result<DeviceBuffer> {
    let counter = DeviceBuffer::new(&gpu.context, 8)?;
    counter.write(0, &[0; 8])?;
    Ok(counter)
}

/// Memory that the first pass of a sweep makes what the next expects.
fn begun(gpu: &Gpu, bytes: usize, unknown: &DeviceBuffer) -> anyhow::Result<DeviceBuffer> {
    let buffer = DeviceBuffer::new(&gpu.context, bytes.max(4) / 4 * 4)
        .with_context(|| format!("cannot allocate {bytes} bytes"))?;
    gpu.sweep(&buffer, FIRST, unknown)?;
    Ok(buffer)
}

pub(crate) fn sweep(args: &Sweep, stop: &AtomicBool) -> anyhow::Result<Report> {
    let gpu = Gpu::open(args.common.device)?;
    let mut report = args.common.report("sweep", &gpu.name);
    // What was in memory before the first pass is nothing to count.
    let (wrong, unknown) = (counter(&gpu)?, counter(&gpu)?);
    if !args.common.gate.wait(stop)? {
        return Ok(report);
    }

    let begin = Instant::now();
    let (mut times, mut last) = (Times::new(), begin);
    let mut verified = Verified {
        sum_matches: true,
        ..Verified::default()
    };
    let bytes = args.common.memory.unwrap_or(DEFAULT_MEMORY);
    let piece = args.piece.unwrap_or(bytes);
    let pieces = (0..bytes)
        .step_by(piece)
        .map(|from| begun(&gpu, piece.min(bytes - from), &unknown))
        .collect::<anyhow::Result<Vec<_>>>()?;
    loop {
        if let Some(bytes) = args.churn {
            let fresh = begun(&gpu, bytes, &unknown)?;
            gpu.sweep(&fresh, FIRST.wrapping_add(1), &wrong)?;
            verified.elements += fresh.bytes() as u64 / 4;
            gpu.stream.synchronize()?;
        }
        gpu.stream.synchronize()?;
        let now = Instant::now();
        times.record(now - last);
        last = now;
        if report.calls == 0 {
            args.common.gate.ready()?;
        }
        let over = match args.passes {
            Some(passes) => report.calls >= passes,
            None => begin.elapsed() >= args.common.seconds,
        };
        if over || stopped(stop) {
            break;
        }
        report.calls += 1;
        verified.rounds += 1;
        for buffer in &pieces {
            verified.elements += buffer.bytes() as u64 / 4;
            gpu.sweep(buffer, FIRST.wrapping_add(verified.rounds), &wrong)?;
        }
    }
    let mut count = [0; 8];
    wrong.read(0, &mut count)?;
    verified.mismatches = u64::from_le_bytes(count);
    report.seconds = begin.elapsed().as_secs_f64();
    report.rate = report.calls as f64 / report.seconds;
    report.times = times.quantiles();
    report.verified = Some(verified);
    Ok(report)
}
