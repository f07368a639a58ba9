//! What a switch between two programs consists of: short requests beside a neighbour that fills the device, with stamps of the device's timer in the kernels
//! of both. `bench/switch.py` puts them together.
//!
//! The neighbour's kernels find out by themselves when they did not run: the timer jumps. They write in which stretches of time they ran.
//! Both programs print one JSON object: `requests` has four times of each in ns (submitted, first and last instruction, seen by
//! the host), `ran` has the stretches.

use std::{
    collections::VecDeque,
    ffi::CString,
    fmt::Write as _,
    sync::{Arc, atomic::AtomicBool},
    time::Instant,
};

use anyhow::{Context as _, bail};
use gpumux_cuda::{Arg, Context, Device, DeviceBuffer, Event, Function, Module, Stream};
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};
use rustix::time::{ClockId, clock_gettime};
use signal_hook::consts::{SIGINT, SIGTERM};

use crate::{Switch, pace::wait_until, stopped, tamper};

/// A kernel whose timer jumps by so many ns did not run meanwhile.
const JUMP: u64 = 20_000;
/// Stretches of time that are kept, the newest.
const STRETCHES: u64 = 1 << 17;
/// Requests at most.
const REQUESTS: usize = 1 << 14;
/// Empty requests by which the device's timer and the host's clock are compared.
const COMPARED: usize = 200;
const THREADS: u32 = 256;

/// The text of both kernels: `run`, whose threads have so many more registers in use and whose blocks so many bytes of shared memory, and `request`.
fn ptx(registers: u32, shared: usize) -> String {
    let mut text = String::from(".version 7.0\n.target sm_70\n.address_size 64\n");
    text += &format!(
        "
// Runs for `ns`, without the time in which it does not run. Writes at `log` a count, and from byte 16 on the stretches in which it ran.
.visible .entry run(.param .u64 log, .param .u64 ns)
{{
    .reg .pred %more, %own, %jump;
    .reg .u64 %log, %ns, %begin, %before, %now, %step, %done, %count, %place;
    .reg .u32 %thread, %block;
    .reg .f32 %r<{count}>, %c;
    .shared .align 16 .b8 held[{shared}];
    ld.param.u64 %log, [log];
    ld.param.u64 %ns, [ns];
    cvta.to.global.u64 %log, %log;
    mov.u32 %thread, %tid.x;
    mov.u32 %block, %ctaid.x;
    cvt.rn.f32.u32 %c, %thread;
    st.volatile.shared.f32 [held], %c;
    or.b32 %thread, %thread, %block;
    setp.eq.u32 %own, %thread, 0;
    mov.u64 %before, %globaltimer;
    mov.u64 %begin, %before;
    mov.u64 %done, 0;
",
        count = registers + 1,
        shared = shared.max(16),
    );
    let all = || 0..=registers;
    for at in all() {
        let _ = writeln!(text, "    ld.volatile.shared.f32 %r{at}, [held];");
    }
    text += "again:\n";
    for at in all() {
        let next = (at + 1) % (registers + 1);
        let _ = writeln!(text, "    fma.rn.f32 %r{at}, %r{at}, 0f3F000000, %r{next};");
    }
    let write = |label: &str| {
        format!(
            "    @!%own bra {label};
    ld.global.u64 %count, [%log];
    rem.u64 %place, %count, {STRETCHES};
    shl.b64 %place, %place, 4;
    add.u64 %place, %log, %place;
    st.global.u64 [%place+16], %begin;
    st.global.u64 [%place+24], %before;
    add.u64 %count, %count, 1;
    st.global.u64 [%log], %count;
{label}:
"
        )
    };
    text += &format!(
        "    mov.u64 %now, %globaltimer;
    sub.u64 %step, %now, %before;
    setp.gt.u64 %jump, %step, {JUMP};
    @%jump bra jumped;
    add.u64 %done, %done, %step;
    bra go_on;
jumped:
{}    mov.u64 %begin, %now;
    add.u64 %done, %done, {JUMP};           // it ends also where each step takes that long
go_on:
    mov.u64 %before, %now;
    setp.lt.u64 %more, %done, %ns;
    @%more bra again;
{}",
        write("jumped_seen"),
        write("end_seen"),
    );
    for at in all().skip(1) {
        let _ = writeln!(text, "    add.f32 %r0, %r0, %r{at};");
    }
    text += "    st.volatile.shared.f32 [held], %r0;
    ret;
}

// Reads `n` words at `data`, `passes` times. Writes at `stamps` when the first thread began and the last one ended.
.visible .entry request(.param .u64 stamps, .param .u64 data, .param .u64 n, .param .u32 passes)
{
    .reg .pred %p, %first;
    .reg .u32 %passes, %pass, %word, %sum, %thread, %block, %threads, %blocks;
    .reg .u64 %stamps, %data, %n, %start, %i, %stride, %address, %now;
    .shared .align 16 .b8 held[16];
    mov.u64 %start, %globaltimer;
    ld.param.u64 %stamps, [stamps];
    ld.param.u64 %data, [data];
    ld.param.u64 %n, [n];
    ld.param.u32 %passes, [passes];
    cvta.to.global.u64 %stamps, %stamps;
    cvta.to.global.u64 %data, %data;
    mov.u32 %thread, %tid.x;
    mov.u32 %block, %ctaid.x;
    mov.u32 %threads, %ntid.x;
    mov.u32 %blocks, %nctaid.x;
    setp.eq.u32 %first, %thread, 0;
    @%first red.global.min.u64 [%stamps], %start;
    mul.wide.u32 %stride, %blocks, %threads;
    mov.u32 %sum, 0;
    mov.u32 %pass, 0;
pass:
    setp.ge.u32 %p, %pass, %passes;
    @%p bra end;
    mul.wide.u32 %i, %block, %threads;
    cvt.u64.u32 %address, %thread;
    add.u64 %i, %i, %address;
word:
    setp.ge.u64 %p, %i, %n;
    @%p bra next;
    shl.b64 %address, %i, 2;
    add.u64 %address, %data, %address;
    ld.volatile.global.u32 %word, [%address];
    add.u32 %sum, %sum, %word;
    add.u64 %i, %i, %stride;
    bra word;
next:
    add.u32 %pass, %pass, 1;
    bra pass;
end:
    st.volatile.shared.u32 [held], %sum;
    bar.sync 0;
    mov.u64 %now, %globaltimer;
    @%first red.global.max.u64 [%stamps+8], %now;
    ret;
}
";
    text
}

/// A device with both kernels.
struct Gpu {
    context: Context,
    stream: Stream,
    multiprocessors: u32,
    run: Function,
    request: Function,
}

impl Gpu {
    fn open(args: &Switch) -> anyhow::Result<Self> {
        let ordinal = args.common.device;
        let device = Device::get(ordinal).with_context(|| format!("device {ordinal}"))?;
        let context = Context::primary(device).context("cannot create a context")?;
        let text = CString::new(ptx(args.registers, args.shared.unwrap_or(0)))?;
        let module = Module::from_ptx(&context, &text).context("cannot load the kernels")?;
        Ok(Self {
            stream: Stream::new(&context)?,
            multiprocessors: device.multiprocessors()?,
            run: module.function("run")?,
            request: module.function("request")?,
            context,
        })
    }

    fn launch(
        &self,
        function: &Function,
        blocks: u32,
        arguments: &[Arg],
    ) -> gpumux_cuda::Result<()> {
        // SAFETY: the callers pass what the text above says, and buffers of these sizes, which live until the stream was waited for.
        unsafe { self.stream.launch(function, blocks, THREADS, arguments) }
    }
}

fn now() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Numbers at this place of a buffer.
fn numbers(buffer: &DeviceBuffer, at: usize, count: usize) -> gpumux_cuda::Result<Vec<u64>> {
    let mut bytes = vec![0; count * 8];
    buffer.read(at * 8, &mut bytes)?;
    let (words, _) = bytes.as_chunks();
    Ok(words.iter().map(|it| u64::from_le_bytes(*it)).collect())
}

pub(crate) fn switch(args: &Switch) -> anyhow::Result<()> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGINT] {
        signal_hook::flag::register(signal, Arc::clone(&stop))?;
    }
    match args.neighbour {
        true => neighbour(args, &stop),
        false => requests(args, &stop),
    }
}

fn neighbour(args: &Switch, stop: &AtomicBool) -> anyhow::Result<()> {
    const DEPTH: usize = 16;
    let controls = args.preemption.map(|_| tamper::capture()).transpose()?;
    let gpu = Gpu::open(args)?;
    if let Some((controls, mode)) = controls.zip(args.preemption) {
        tamper::set_preemption(&controls, mode.into())?;
    }
    let log = DeviceBuffer::new(&gpu.context, (2 + 2 * STRETCHES as usize) * 8)?;
    log.write(0, &[0; 8])?;
    let ns = Arg::U64(args.kernel_us.as_nanos() as u64);
    let blocks = gpu.multiprocessors * args.blocks;
    let launch = || gpu.launch(&gpu.run, blocks, &[Arg::U64(log.address()), ns]);
    launch()?;
    gpu.stream.synchronize()?;
    args.common.gate.ready()?;
    if args.common.gate.wait(stop)? {
        let end = Instant::now() + args.common.seconds;
        let event = || Event::new(&gpu.context, gpumux_cuda::Wait::Block);
        let mut idle = (0..DEPTH).map(|_| event()).collect::<Result<Vec<_>, _>>()?;
        let mut in_flight = VecDeque::new();
        while Instant::now() < end && !stopped(stop) {
            while let Some(event) = idle.pop() {
                launch()?;
                event.record(&gpu.stream)?;
                in_flight.push_back(event);
            }
            if let Some(event) = in_flight.pop_front() {
                event.synchronize()?;
                idle.push(event);
            }
        }
    }
    gpu.stream.synchronize()?;
    let count = numbers(&log, 0, 1)?[0];
    let kept = count.min(STRETCHES) as usize;
    let ran = numbers(&log, 2, 2 * kept)?;
    let ran: Vec<_> = ran.as_chunks::<2>().0.to_vec();
    println!("{}", serde_json::json!({ "ran": ran, "count": count }));
    Ok(())
}

fn requests(args: &Switch, stop: &AtomicBool) -> anyhow::Result<()> {
    let gpu = Gpu::open(args)?;
    let data = DeviceBuffer::new(&gpu.context, args.touch)?;
    gpu.stream.fill(&data, 1)?;
    let stamps = DeviceBuffer::new(&gpu.context, REQUESTS * 16)?;
    let unset: Vec<u8> = [u64::MAX, 0].map(u64::to_le_bytes).concat();
    stamps.write(0, &unset.repeat(REQUESTS))?;
    let request = |at: usize, n: u64, passes: u32| -> gpumux_cuda::Result<(u64, u64)> {
        let place = Arg::U64(stamps.address() + 16 * at as u64);
        let submitted = now();
        let (data, n) = (Arg::U64(data.address()), Arg::U64(n));
        // One that only compares the clocks is as short as can be.
        let blocks = if passes == 0 { 1 } else { gpu.multiprocessors };
        gpu.launch(&gpu.request, blocks, &[place, data, n, Arg::U32(passes)])?;
        match args.wait {
            crate::Wait::Spin => while !gpu.stream.is_done()? {},
            crate::Wait::Block => gpu.stream.synchronize()?,
        }
        Ok((submitted, now()))
    };
    let words = args.touch as u64 / 4;
    // As many passes as take the time that was asked for, once all is warm.
    let time = |passes: u32| -> anyhow::Result<f64> {
        let mut best = f64::INFINITY;
        for at in 0..3 {
            request(at, words, passes)?;
            let seen = numbers(&stamps, 2 * at, 2)?;
            best = best.min(seen[1].saturating_sub(seen[0]) as f64);
            stamps.write(16 * at, &unset)?;
        }
        Ok(best)
    };
    let (few, many) = (time(1)?, time(9)?);
    let each = ((many - few) / 8.0).max(1.0);
    let asked = args.request_us.as_nanos() as f64;
    let passes = ((asked - few) / each).round().clamp(0.0, 1e6) as u32 + 1;
    // Before the neighbour begins.
    let mut host = Vec::new();
    for at in 0..COMPARED {
        host.push(request(at, 0, 0)?);
    }
    args.common.gate.ready()?;
    if !args.common.gate.wait(stop)? {
        bail!("stopped before the start");
    }
    let mut rng = StdRng::seed_from_u64(1);
    let end = Instant::now() + args.common.seconds;
    let mut next = Instant::now();
    while host.len() < REQUESTS && !stopped(stop) {
        // Not in step with the neighbour's kernels.
        next = next.max(Instant::now()) + args.period_us.mul_f64(rng.random_range(0.5..1.5));
        if next >= end {
            break;
        }
        wait_until(next, false, stop);
        host.push(request(host.len(), words, passes)?);
    }
    let device = numbers(&stamps, 0, 2 * host.len())?;
    let device = device.as_chunks::<2>().0;
    let all: Vec<_> = (host.iter().zip(device))
        .map(|((submitted, seen), [first, last])| [*submitted, *first, *last, *seen])
        .collect();
    let (compared, requests) = all.split_at(COMPARED);
    let found = serde_json::json!({ "compared": compared, "requests": requests, "passes": passes });
    println!("{found}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_has_the_registers_and_memory_that_were_asked_for() {
        let text = ptx(100, 4096);
        assert!(text.contains(".f32 %r<101>") && text.contains("held[4096]"));
        assert!(text.contains("fma.rn.f32 %r100, %r100, 0f3F000000, %r0;"));
        assert!(ptx(0, 0).contains("fma.rn.f32 %r0, %r0, 0f3F000000, %r0;"));
    }
}
