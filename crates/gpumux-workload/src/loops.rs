//! The workloads that measure time: requests, back-to-back kernels, bare launches.

use std::{
    collections::VecDeque,
    hint,
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use gpumux_cuda::{DeviceBuffer, Event, HostBuffer, Mapping, Result};

use crate::{
    Batch, Common, Latency, Launch, Report, Wait, Work,
    hints::Hinter,
    kernels::{Gpu, Shape},
    pace::{Arrivals, Gaps, wait_until},
    report::Times,
    stopped, tamper,
};

/// The kernel of a loop, ready to launch.
struct Kernel {
    shape: Shape,
    iterations: u32,
    /// What one takes alone, if measured.
    us: Option<f64>,
}

impl Work {
    fn prepare(&self, gpu: &Gpu, default_shape: Shape, default_us: u64) -> Result<Kernel> {
        let shape = Shape {
            blocks: self.blocks.unwrap_or(default_shape.blocks),
            threads: self.threads.unwrap_or(default_shape.threads),
        };
        if let Some(iterations) = self.iterations {
            return Ok(Kernel {
                shape,
                iterations,
                us: None,
            });
        }
        let target = self.kernel_us.unwrap_or(Duration::from_micros(default_us));
        let us_per_iteration = calibrate(gpu, shape)?;
        let iterations = (target.as_secs_f64() * 1e6 / us_per_iteration).round();
        // The cast saturates.
        let iterations = (iterations as u32).max(1);
        Ok(Kernel {
            shape,
            iterations,
            us: Some(f64::from(iterations) * us_per_iteration),
        })
    }
}

/// Microseconds that one more iteration takes: the slope between two kernels that are long enough for
/// the launch itself not to count, and short enough to run undisturbed at times where others share the device.
fn calibrate(gpu: &Gpu, shape: Shape) -> Result<f64> {
    const LONG_US: f64 = 250.0;
    const TIMES: usize = 8;
    // An idle device first has to raise its clocks.
    gpu.spin(shape, 100_000_000)?;
    gpu.stream.synchronize()?;
    let fastest = |iterations| {
        let mut fastest = f64::INFINITY;
        for _ in 0..TIMES {
            fastest = fastest.min(gpu.time_us(1, || gpu.work(shape, iterations))?);
        }
        Ok(fastest)
    };
    let mut iterations: u32 = 1000;
    let mut short = fastest(iterations)?;
    while short < LONG_US && iterations < u32::MAX / 64 {
        iterations *= 4;
        short = fastest(iterations)?;
    }
    let long = fastest(4 * iterations)?;
    Ok(per_iteration(short, long, iterations))
}

/// What one more iteration of a task's kernels takes, in µs.
pub(crate) fn us_per_iteration(gpu: &Gpu) -> Result<f64> {
    calibrate(gpu, gpu.shape(1, 256))
}

/// The slope between a kernel of `iterations` and one of four times as many. Where others share the device, either may
/// have waited for them; but the launch is never more than half of the long one.
fn per_iteration(short: f64, long: f64, iterations: u32) -> f64 {
    let iterations = f64::from(iterations);
    let slope = (long - short) / (3.0 * iterations);
    let least = long / 2.0 / (4.0 * iterations);
    slope.max(least).max(f64::MIN_POSITIVE)
}

/// Where a measurement ends.
struct End {
    begin: Instant,
    deadline: Instant,
    calls: u64,
}

impl End {
    fn new(common: &Common, calls: Option<u64>) -> Self {
        let begin = Instant::now();
        Self {
            begin,
            deadline: begin + common.seconds,
            calls: calls.unwrap_or(u64::MAX),
        }
    }

    /// Counts a call that was completed now in its second.
    fn count(&self, per_second: &mut Vec<u64>, now: Instant) {
        let second = now.duration_since(self.begin).as_secs() as usize;
        per_second.resize(per_second.len().max(second + 1), 0);
        per_second[second] += 1;
    }

    fn report(&self, mut report: Report, end: Instant, times: &Times) -> Report {
        report.seconds = end
            .min(self.deadline)
            .duration_since(self.begin)
            .as_secs_f64();
        report.calls = times.count();
        if report.seconds > 0.0 {
            report.rate = report.calls as f64 / report.seconds;
        }
        report.times = times.quantiles();
        report
    }
}

/// Notes a driver error of the loop in the report, or passes its value on.
fn noted<T>(report: &mut Report, result: Result<T>) -> Option<T> {
    result
        .inspect_err(|error| {
            report.errors += 1;
            report.error = Some(error.to_string());
        })
        .ok()
}

pub(crate) fn latency(args: &Latency, stop: &AtomicBool) -> anyhow::Result<Report> {
    let gpu = Gpu::open(args.common.device)?;
    let kernel = args.work.prepare(&gpu, gpu.shape(1, 256), 10)?;
    let mut report = args.common.report("latency", &gpu.name);
    report.iterations = Some(kernel.iterations);
    report.kernel_us = kernel.us;
    if args.work.calibrate {
        return Ok(report);
    }

    let _held = hold_memory(&gpu, &args.common, None)?;
    let input = args
        .copy
        .map(|bytes| {
            let host = HostBuffer::new(&gpu.context, bytes)?;
            Ok::<_, gpumux_cuda::Error>((DeviceBuffer::new(&gpu.context, bytes)?, host))
        })
        .transpose()?;
    let submit = || {
        if let Some((device, host)) = &input {
            gpu.stream.copy_to_device(device, host)?;
        }
        (0..args.kernels).try_for_each(|_| gpu.work(kernel.shape, kernel.iterations))
    };
    let graph = args.graph.then(|| gpu.stream.capture(submit)).transpose()?;
    let done = Event::new(&gpu.context, args.work.wait.into())?;
    let request = || {
        match &graph {
            Some(graph) => gpu.stream.launch_graph(graph)?,
            None => submit()?,
        }
        if args.work.wait == Wait::Spin {
            while !gpu.stream.is_done()? {
                hint::spin_loop();
            }
            return Ok(());
        }
        done.record(&gpu.stream)?;
        done.synchronize()
    };
    for _ in 0..3 {
        request()?;
    }
    let mut hinter = Hinter::new(args)?;
    args.common.gate.ready()?;
    if !args.common.gate.wait(stop)? {
        return Ok(report);
    }

    let gaps = if args.poisson {
        Gaps::Poisson
    } else {
        Gaps::Periodic(args.jitter)
    };
    let arrivals = Arrivals::new(args.rate.unwrap_or(args.period_us), gaps, args.seed);
    let end = End::new(&args.common, args.work.calls);
    let (mut times, mut late) = (Times::new(), 0);
    let mut per_second = Vec::new();
    for arrival in arrivals {
        let due = end.begin + arrival;
        if due >= end.deadline || times.count() >= end.calls || stopped(stop) {
            break;
        }
        let now = Instant::now();
        if now >= end.deadline {
            // Requests that are due but did not get their turn are not made any more.
            break;
        }
        late += u64::from(now > due);
        if !wait_until(due, args.work.wait == Wait::Spin, stop) {
            break;
        }
        let prepared = (|| {
            let Some(prepare) = args.prepare_us else {
                return hinter.say(Duration::ZERO);
            };
            let ready = Instant::now() + prepare;
            hinter.say(prepare)?;
            while Instant::now() < ready {
                hint::spin_loop();
            }
            Ok(())
        })();
        prepared?;
        let from = if args.from_arrival {
            due
        } else {
            Instant::now()
        };
        if noted(&mut report, request()).is_none() {
            break;
        }
        times.record(from.elapsed());
        end.count(&mut per_second, Instant::now());
        hinter.answered()?;
    }
    report.late = Some(late);
    let mut report = end.report(report, Instant::now(), &times);
    per_second.resize(report.seconds as usize, 0);
    report.per_second = per_second;
    Ok(report)
}

pub(crate) fn batch(args: &Batch, stop: &AtomicBool) -> anyhow::Result<Report> {
    let undone = tamper::begin(&args.tamper, args.tamper_every_us)?;
    let gpu = Gpu::open(args.common.device)?;
    let kernel = match args.read {
        Some(_) => None,
        None => Some(args.work.prepare(&gpu, gpu.shape(2, 1024), 10_000)?),
    };
    let mut report = args.common.report("batch", &gpu.name);
    report.iterations = kernel.as_ref().map(|it| it.iterations);
    report.kernel_us = kernel.as_ref().and_then(|it| it.us);
    if args.work.calibrate {
        return Ok(report);
    }

    let memory = match kernel {
        Some(_) => hold_memory(&gpu, &args.common, None)?,
        // What is only read needs no contents.
        None => (args.common.memory)
            .map(|bytes| DeviceBuffer::new(&gpu.context, bytes))
            .transpose()?,
    };
    let read = memory.as_ref().zip(args.read);
    let launch = || match (&kernel, read) {
        (Some(kernel), _) => gpu.work(kernel.shape, kernel.iterations),
        (None, Some((memory, times))) => gpu.read(memory, times),
        (None, None) => Ok(()),
    };
    let mut idle = (0..args.in_flight)
        .map(|_| Event::new(&gpu.context, args.work.wait.into()))
        .collect::<Result<Vec<_>>>()?;
    if let Some(kernel) = &kernel {
        gpu.work(kernel.shape, 1)?;
    }
    gpu.stream.synchronize()?;
    args.common.gate.ready()?;
    if !args.common.gate.wait(stop)? {
        return Ok(report);
    }

    let end = End::new(&args.common, args.work.calls);
    let mut times = Times::new();
    let mut last = end.begin;
    let mut per_second = Vec::new();
    let mut in_flight = VecDeque::with_capacity(idle.len());
    while Instant::now() < end.deadline && times.count() < end.calls && !stopped(stop) {
        let step = (|| {
            while let Some(event) = idle.pop() {
                launch()?;
                event.record(&gpu.stream)?;
                in_flight.push_back(event);
            }
            if let Some(event) = in_flight.pop_front() {
                event.synchronize()?;
                idle.push(event);
            }
            Ok(Instant::now())
        })();
        let Some(now) = noted(&mut report, step) else {
            break;
        };
        // What ends after the deadline is not counted, as its beginning is.
        if now <= end.deadline {
            times.record(now - last);
            last = now;
            end.count(&mut per_second, now);
        }
    }
    let mut report = end.report(report, Instant::now(), &times);
    per_second.resize(report.seconds as usize, 0);
    report.per_second = per_second;
    report.undone = undone.map(|count| count.load(Ordering::Relaxed));
    if report.errors == 0 {
        gpu.stream.synchronize()?;
    }
    Ok(report)
}

pub(crate) fn launch(args: &Launch, stop: &AtomicBool) -> anyhow::Result<Report> {
    /// Launches between two waits, fewer than the driver queues.
    const BURST: u32 = 512;
    let gpu = Gpu::open(args.common.device)?;
    let mut report = args.common.report("launch", &gpu.name);
    let _held = hold_memory(&gpu, &args.common, None)?;
    let one = Shape {
        blocks: 1,
        threads: 1,
    };
    gpu.spin(one, 0)?;
    gpu.stream.synchronize()?;
    args.common.gate.ready()?;
    if !args.common.gate.wait(stop)? {
        return Ok(report);
    }

    let end = End::new(&args.common, None);
    let mut times = Times::new();
    while Instant::now() < end.deadline && !stopped(stop) {
        let burst = (0..BURST)
            .try_for_each(|_| {
                let begin = Instant::now();
                gpu.spin(one, 0)?;
                times.record(begin.elapsed());
                Ok(())
            })
            .and_then(|()| gpu.stream.synchronize());
        if noted(&mut report, burst).is_none() {
            break;
        }
    }
    Ok(end.report(report, Instant::now(), &times))
}

/// The memory that was asked for, written once so that it is really there: one allocation, or mapped in chunks of so many bytes.
pub(crate) fn hold_memory(
    gpu: &Gpu,
    common: &Common,
    chunk: Option<usize>,
) -> Result<Option<DeviceBuffer>> {
    let Some(bytes) = common.memory else {
        return Ok(None);
    };
    let buffer = match chunk.map(|chunk| chunk.max(1)) {
        None => DeviceBuffer::new(&gpu.context, bytes)?,
        Some(chunk) => {
            let mut mapping = Mapping::reserve(&gpu.context, chunk, bytes.div_ceil(chunk))?;
            mapping.back()?;
            DeviceBuffer::of_mapping(mapping, bytes)
        }
    };
    gpu.stream.fill(&buffer, 0)?;
    gpu.stream.synchronize()?;
    Ok(Some(buffer))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_kernel_that_waited_does_not_make_work_endless() {
        assert_eq!(per_iteration(1010.0, 4010.0, 1000), 1.0);
        assert_eq!(per_iteration(5000.0, 4000.0, 1000), 0.5);
    }
}
