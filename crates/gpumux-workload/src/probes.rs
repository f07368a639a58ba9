//! The workloads that tests look at: verified memory, an idle tenant, a faulting one.

use std::{
    sync::atomic::AtomicBool,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use gpumux_cuda::DeviceBuffer;

use crate::{
    Check, Fault, FaultKind, Idle, Report, kernels::Gpu, loops::hold_memory, pace::wait_until,
    report::Verified, stopped,
};

/// What `check` fills the memory with; any number would do.
const FILL: u32 = 0x600D_5EED;
const DEFAULT_MEMORY: usize = 64 << 20;
const CHUNK: usize = 16 << 20;
const POLL: Duration = Duration::from_millis(1);

pub(crate) fn check(args: &Check, stop: &AtomicBool) -> anyhow::Result<Report> {
    let gpu = Gpu::open(args.common.device)?;
    let mut report = args.common.report("check", &gpu.name);
    let bytes = args.common.memory.unwrap_or(DEFAULT_MEMORY) / 4 * 4;
    let buffer = DeviceBuffer::new(&gpu.context, bytes.max(4)).context("memory to check")?;
    gpu.fill(&buffer, FILL)?;
    let rounds = match args.rounds {
        Some(rounds) => rounds,
        None => {
            let round_us = gpu.time_us(1, || gpu.rounds(&buffer, 16))? / 16.0;
            let rounds = args.common.seconds.as_secs_f64() * 1e6 / round_us;
            (rounds as u32).max(1) // the cast saturates
        }
    };
    gpu.fill(&buffer, FILL)?;
    gpu.stream.synchronize()?;
    if !args.common.gate.wait(stop)? {
        return Ok(report);
    }

    let begin = Instant::now();
    gpu.rounds(&buffer, rounds)?;
    args.common.gate.ready()?;
    while !gpu.stream.is_done()? {
        if !wait_until(Instant::now() + POLL, false, stop) {
            anyhow::bail!("stopped before the kernel was done: nothing is verified");
        }
    }
    report.seconds = begin.elapsed().as_secs_f64();
    report.calls = 1;
    report.rate = 1.0 / report.seconds;

    let expected = FILL.wrapping_add(rounds);
    let elements = buffer.bytes() as u64 / 4;
    report.verified = Some(Verified {
        elements,
        rounds,
        sum_matches: gpu.sum(&buffer)? == elements * u64::from(expected),
        mismatches: mismatches(&buffer, expected)?,
    });
    Ok(report)
}

fn mismatches(buffer: &DeviceBuffer, expected: u32) -> gpumux_cuda::Result<u64> {
    let mut chunk = vec![0; CHUNK.min(buffer.bytes())];
    let mut wrong = 0;
    for offset in (0..buffer.bytes()).step_by(CHUNK) {
        let chunk = &mut chunk[..CHUNK.min(buffer.bytes() - offset)];
        buffer.read(offset, chunk)?;
        wrong += chunk
            .chunks_exact(4)
            .filter(|element| **element != expected.to_ne_bytes())
            .count();
    }
    Ok(wrong as u64)
}

pub(crate) fn idle(args: &Idle, stop: &AtomicBool) -> anyhow::Result<Report> {
    let gpu = Gpu::open(args.common.device)?;
    let mut report = args.common.report("idle", &gpu.name);
    let _held = hold_memory(&gpu, &args.common)?;
    args.common.gate.ready()?;
    if args.common.gate.wait(stop)? {
        let begin = Instant::now();
        wait_until(begin + args.common.seconds, false, stop);
        report.seconds = begin.elapsed().as_secs_f64();
    }
    Ok(report)
}

pub(crate) fn fault(args: &Fault, stop: &AtomicBool) -> anyhow::Result<Report> {
    let gpu = Gpu::open(args.common.device)?;
    let mut report = args.common.report("fault", &gpu.name);
    let _held = hold_memory(&gpu, &args.common)?;
    if !args.common.gate.wait(stop)? {
        return Ok(report);
    }
    args.common.gate.ready()?;
    let begin = Instant::now();
    let deadline = begin + args.common.seconds;
    let died = (|| {
        while Instant::now() < deadline && !stopped(stop) {
            gpu.work(gpu.shape(1, 256), 1000)?;
            gpu.stream.synchronize()?;
            report.calls += 1;
        }
        if stopped(stop) {
            return Ok(());
        }
        match args.kind {
            FaultKind::Trap => gpu.trap()?,
            FaultKind::Assert => gpu.assert()?,
            FaultKind::IllegalAddress => gpu.stray()?,
            FaultKind::Endless => gpu.spin(gpu.shape(2, 256), 3_600_000_000_000)?,
            FaultKind::Exit => {
                gpu.spin(gpu.shape(2, 256), 10_000_000_000)?;
                std::process::exit(0)
            }
            FaultKind::OutOfMemory => {
                let mut held = Vec::new();
                loop {
                    held.push(DeviceBuffer::new(&gpu.context, 1 << 30)?);
                }
            }
        }
        gpu.stream.synchronize()
    })();
    report.seconds = begin.elapsed().as_secs_f64();
    match died {
        Err(error) => {
            report.errors = 1;
            report.error = Some(error.to_string());
        }
        Ok(()) if stopped(stop) => {}
        Ok(()) => anyhow::bail!("the faulting kernel ended without an error"),
    }
    Ok(report)
}
