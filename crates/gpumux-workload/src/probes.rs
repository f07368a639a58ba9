//! The workloads that tests look at: verified memory, an idle tenant, a faulting one.

use std::{
    ffi::{c_int, c_void},
    ptr,
    sync::{Mutex, MutexGuard, PoisonError, atomic::AtomicBool},
    time::{Duration, Instant},
};

use anyhow::Context as _;
use gpumux_cuda::DeviceBuffer;

use crate::{
    Check, Fault, FaultKind, Idle, Report, hints::symbol, kernels::Gpu, loops::hold_memory,
    pace::wait_until, report::Verified, stopped,
};

/// What `check` fills the memory with; any number would do.
const FILL: u32 = 0x600D_5EED;
const DEFAULT_MEMORY: usize = 64 << 20;
const CHUNK: usize = 16 << 20;
const SMALL: usize = 4096;
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
    let _held = hold_memory(&gpu, &args.common, args.chunk)?;
    let cache = (args.cache.map(|bytes| hold_cache(&gpu, bytes))).transpose()?;
    args.common.gate.ready()?;
    if args.common.gate.wait(stop)? {
        let begin = Instant::now();
        wait_until(begin + args.common.seconds, false, stop);
        report.seconds = begin.elapsed().as_secs_f64();
    }
    // Pieces that were given back.
    report.calls = cache.map_or(0, |(pieces, cache)| pieces - lock(cache).len() as u64);
    Ok(report)
}

/// Memory that is given back when asked for.
type Cache = Mutex<Vec<DeviceBuffer>>;

fn lock(cache: &Cache) -> MutexGuard<'_, Vec<DeviceBuffer>> {
    cache.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `gpumux_on_reclaim`
type OnReclaim = unsafe extern "C" fn(
    unsafe extern "C" fn(c_int, u64, *mut c_void) -> u64,
    *mut c_void,
) -> c_int;

fn hold_cache(gpu: &Gpu, bytes: usize) -> anyhow::Result<(u64, &'static Cache)> {
    let pieces = (0..bytes.div_ceil(CHUNK)).map(|_| DeviceBuffer::new(&gpu.context, CHUNK));
    let pieces = pieces.collect::<Result<Vec<_>, _>>()?;
    let count = pieces.len() as u64;
    // To the end of the process: its function may be called as long.
    let cache: &'static Cache = Box::leak(Box::new(Mutex::new(pieces)));
    let name = c"gpumux_on_reclaim";
    // SAFETY: null is `None`; else it is the library's function with its documented signature.
    let register: Option<OnReclaim> = unsafe { std::mem::transmute(symbol(name)) };
    let register = register.context("gpumux_on_reclaim is not there: run it by `gpumux run`")?;
    // SAFETY: as documented; the cache lives as long as the process.
    let registered = unsafe { register(give_back, ptr::from_ref(cache) as *mut c_void) };
    anyhow::ensure!(registered == 0, "gpumux_on_reclaim answers {registered}");
    Ok((count, cache))
}

unsafe extern "C" fn give_back(_device: c_int, bytes: u64, cache: *mut c_void) -> u64 {
    // SAFETY: what was registered, see `hold_cache`.
    let cache = unsafe { &*cache.cast::<Cache>() };
    let pieces = bytes.div_ceil(CHUNK as u64) as usize;
    let mut cache = lock(cache);
    let gone = cache.len().saturating_sub(pieces);
    cache.drain(gone..).count() as u64 * CHUNK as u64
}

pub(crate) fn fault(args: &Fault, stop: &AtomicBool) -> anyhow::Result<Report> {
    let gpu = Gpu::open(args.common.device)?;
    let mut report = args.common.report("fault", &gpu.name);
    let _held = hold_memory(&gpu, &args.common, None)?;
    // Shares its piece with what is asked for after the fault.
    let _small = DeviceBuffer::new(&gpu.context, SMALL)?;
    if !args.common.gate.wait(stop)? {
        return Ok(report);
    }
    let begin = Instant::now();
    let deadline = begin + args.common.seconds;
    let mut launch = || -> gpumux_cuda::Result<()> {
        while Instant::now() < deadline && !stopped(stop) {
            gpu.work(gpu.shape(1, 256), 1000)?;
            gpu.stream.synchronize()?;
            report.calls += 1;
        }
        if stopped(stop) {
            return Ok(());
        }
        match args.kind {
            FaultKind::Trap => gpu.trap(),
            FaultKind::Assert => gpu.assert(),
            FaultKind::IllegalAddress => gpu.stray(),
            FaultKind::Endless => gpu.spin(gpu.shape(2, 256), 3_600_000_000_000),
            FaultKind::Exit => gpu.spin(gpu.shape(2, 256), 10_000_000_000),
            FaultKind::OutOfMemory => {
                let mut held = Vec::new();
                loop {
                    held.push(DeviceBuffer::new(&gpu.context, 1 << 30)?);
                }
            }
        }
    };
    let mut died = launch();
    if died.is_ok() && !stopped(stop) {
        args.common.gate.ready()?;
        if args.kind == FaultKind::Exit {
            std::process::exit(0);
        }
        died = gpu.stream.synchronize();
    }
    report.seconds = begin.elapsed().as_secs_f64();
    match died {
        Err(error) => {
            let fails = matches!(args.kind, FaultKind::Trap | FaultKind::IllegalAddress);
            if fails && DeviceBuffer::new(&gpu.context, SMALL).is_ok() {
                anyhow::bail!("a context that has failed hands out memory");
            }
            report.errors = 1;
            report.error = Some(error.to_string());
        }
        Ok(()) if stopped(stop) => {}
        Ok(()) => anyhow::bail!("the faulting kernel ended without an error"),
    }
    Ok(report)
}
