//! `memory`: a random program that knows what every byte of its memory must be, and looks. Now and then it says that a part need
//! not be kept, and later asks whether it was.

use std::{
    collections::VecDeque, ffi::c_int, fs, io, path::Path, sync::atomic::AtomicBool, time::Instant,
};

use anyhow::Context as _;
use gpumux_cuda::{DeviceBuffer, Graph, Mapping, types::ERROR_OUT_OF_MEMORY};

use crate::{Memory, Report, hints::symbol, kernels::Gpu, report::Verified, stopped};

const DEFAULT_MEMORY: usize = 64 << 20;
/// Least physical memory that is mapped: every device's granularity.
const PIECE: usize = 2 << 20;
/// Most buffers at a time.
const BUFFERS: u64 = 24;

/// Numbers that look random (splitmix64), after some that are given.
struct Dice(u64, VecDeque<u64>);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        if let Some(given) = self.1.pop_front() {
            return given % sides.max(1);
        }
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % sides.max(1)
    }
}

/// `gpumux_advise` of the preloaded library.
type Advise = unsafe extern "C" fn(u64, u64, c_int) -> c_int;
/// Numbers of `gpumux.h`.
const KEEP: c_int = 0;
const DISCARDABLE: c_int = 2;
const LOST: c_int = 1;

fn advise(buffer: &Buffer, (from, count): (usize, usize), advice: c_int) -> Option<c_int> {
    // SAFETY: null is `None`; else it is the library's function with its documented signature.
    let function: Option<Advise> = unsafe { std::mem::transmute(symbol(c"gpumux_advise")) };
    let (address, bytes) = (buffer.memory.address() + from as u64 * 4, count as u64 * 4);
    // SAFETY: any numbers may be passed.
    function.map(|function| unsafe { function(address, bytes, advice) })
}

struct Buffer {
    memory: DeviceBuffer,
    expected: Vec<u32>,
    /// Adds a number to every element, and which.
    graph: Option<(Graph, u32)>,
    /// Elements that need not be kept: from which on, how many.
    discardable: Option<(usize, usize)>,
}

pub(crate) fn memory(args: &Memory, stop: &AtomicBool) -> anyhow::Result<Report> {
    let gpu = Gpu::open(args.common.device)?;
    let mut report = args.common.report("memory", &gpu.name);
    let most = args.common.memory.unwrap_or(DEFAULT_MEMORY);
    let mut dice = Dice(args.seed, VecDeque::new());
    let mut script = match &args.script {
        None => None,
        Some(path) => Some(read_script(path)?.into_iter()),
    };
    let mut buffers: Vec<Buffer> = Vec::new();
    let mut verified = Verified {
        sum_matches: true,
        ..Verified::default()
    };
    if !args.common.gate.wait(stop)? {
        return Ok(report);
    }
    args.common.gate.ready()?;
    let begin = Instant::now();
    let ends = |calls: u64| match args.steps {
        Some(steps) => calls >= steps,
        None => begin.elapsed() >= args.common.seconds,
    };
    while !stopped(stop) {
        match &mut script {
            None if ends(report.calls) => break,
            None => {}
            Some(script) => match script.next() {
                Some(step) => dice = Dice(step.iter().sum(), step.into()),
                None => break,
            },
        }
        report.calls += 1;
        let full = buffers.len() as u64 >= BUFFERS;
        let at = dice.roll(buffers.len() as u64) as usize;
        match dice.roll(if script.is_some() { 12 } else { 11 }) {
            // Work may be under way.
            11 => pause()?,
            0..=2 if !full => {
                let held: usize = buffers.iter().map(|it| it.expected.len() * 4).sum();
                // Small ones, and some that take several pieces of physical memory.
                let size = match dice.roll(3) {
                    0 => 4 * (1 + dice.roll(4000)),
                    1 => 4 * (1 + dice.roll(1 << 18)),
                    _ => 4 * (1 + dice.roll(most as u64 / 12)),
                } as usize;
                if held + size > most {
                    continue;
                }
                let made = match args.mapped && dice.roll(4) != 0 {
                    true => mapped(&gpu, size, &mut dice),
                    false => DeviceBuffer::new(&gpu.context, size),
                };
                match made {
                    Ok(memory) => {
                        let value = dice.roll(1 << 32) as u32;
                        gpu.fill(&memory, value)?;
                        let expected = vec![value; size / 4];
                        buffers.push(Buffer {
                            memory,
                            expected,
                            graph: None,
                            discardable: None,
                        });
                    }
                    // Beyond a limit: what is there must go on.
                    Err(error) if error.code() == Some(ERROR_OUT_OF_MEMORY) => {
                        report.late = Some(report.late.unwrap_or(0) + 1)
                    }
                    Err(error) => return Err(error).context("cannot allocate"),
                }
            }
            _ if buffers.is_empty() => {}
            // Everything below uses a buffer.
            it if it != 9 && buffers[at].settle(&gpu, &mut dice)? => {}
            3 => {
                let buffer = buffers.swap_remove(at);
                look(&gpu, &buffer, &mut verified)?;
            }
            4 => {
                look(&gpu, &buffers[at], &mut verified)?;
            }
            5 | 6 => {
                let buffer = &mut buffers[at];
                let value = dice.roll(1 << 32) as u32;
                gpu.add(&buffer.memory, value)?;
                buffer.add(value);
            }
            7 => {
                let buffer = &mut buffers[at];
                let from = dice.roll(buffer.expected.len() as u64) as usize;
                let most = (buffer.expected.len() - from).min(1 << 14);
                let count = 1 + dice.roll(most as u64) as usize;
                let fresh: Vec<u32> = (0..count).map(|_| dice.roll(1 << 32) as u32).collect();
                buffer.write(&gpu, from, &fresh)?;
            }
            9 => {
                let buffer = &mut buffers[at];
                let from = dice.roll(buffer.expected.len() as u64) as usize;
                let count = 1 + dice.roll((buffer.expected.len() - from) as u64) as usize;
                if buffer.discardable.is_none()
                    && advise(buffer, (from, count), DISCARDABLE) == Some(0)
                {
                    buffer.discardable = Some((from, count));
                }
            }
            8 => {
                let rounds = 1 + dice.roll(20) as u32;
                gpu.rounds(&buffers[at].memory, rounds)?;
                buffers[at].add(rounds);
            }
            _ => {
                let buffer = &mut buffers[at];
                if buffer.graph.is_none() {
                    let value = dice.roll(1 << 32) as u32;
                    let graph = gpu.stream.capture(|| gpu.add(&buffer.memory, value))?;
                    buffer.graph = Some((graph, value));
                }
                if let Some((graph, value)) = &buffer.graph {
                    gpu.stream.launch_graph(graph)?;
                    let value = *value;
                    buffer.add(value);
                }
            }
        }
    }
    for buffer in &mut buffers {
        buffer.settle(&gpu, &mut dice)?;
        look(&gpu, buffer, &mut verified)?;
    }
    report.seconds = begin.elapsed().as_secs_f64();
    report.rate = report.calls as f64 / report.seconds;
    report.verified = Some(verified);
    Ok(report)
}

/// One step a line, each of numbers.
fn read_script(path: &Path) -> anyhow::Result<Vec<Vec<u64>>> {
    let text = fs::read_to_string(path).with_context(|| format!("no {}", path.display()))?;
    let step = |line: &str| line.split_whitespace().map(str::parse).collect();
    let steps: Result<Vec<Vec<u64>>, _> = text.lines().map(step).collect();
    steps.with_context(|| format!("{} is no script of numbers", path.display()))
}

/// Lets the process that started this act in between.
fn pause() -> anyhow::Result<()> {
    println!("pause");
    io::stdin().read_line(&mut String::new())?;
    Ok(())
}

/// Memory in pieces that are mapped one after another, whose handles are kept or let go of.
fn mapped(gpu: &Gpu, bytes: usize, dice: &mut Dice) -> gpumux_cuda::Result<DeviceBuffer> {
    let chunk = PIECE * (1 + dice.roll(3) as usize);
    let mut mapping = Mapping::reserve(&gpu.context, chunk, bytes.div_ceil(chunk))?;
    mapping.back()?;
    if dice.roll(2) == 0 {
        mapping.release()?;
    }
    Ok(DeviceBuffer::of_mapping(mapping, bytes))
}

impl Buffer {
    fn write(&mut self, gpu: &Gpu, from: usize, fresh: &[u32]) -> anyhow::Result<()> {
        let bytes: Vec<u8> = fresh.iter().flat_map(|it| it.to_ne_bytes()).collect();
        gpu.stream.synchronize()?;
        self.memory.write(from * 4, &bytes)?;
        self.expected[from..from + fresh.len()].copy_from_slice(fresh);
        Ok(())
    }

    /// All of it counts again; what is lost is written anew. Whether that was so.
    fn settle(&mut self, gpu: &Gpu, dice: &mut Dice) -> anyhow::Result<bool> {
        let Some((from, count)) = self.discardable.take() else {
            return Ok(false);
        };
        let lost = advise(self, (from, count), KEEP) == Some(LOST);
        if lost {
            let fresh: Vec<u32> = (0..count).map(|_| dice.roll(1 << 32) as u32).collect();
            self.write(gpu, from, &fresh)?;
        }
        Ok(lost)
    }

    fn add(&mut self, value: u32) {
        for element in &mut self.expected {
            *element = element.wrapping_add(value);
        }
    }
}

/// Compares a whole buffer.
fn look(gpu: &Gpu, buffer: &Buffer, verified: &mut Verified) -> anyhow::Result<()> {
    gpu.stream.synchronize()?;
    let mut bytes = vec![0; buffer.expected.len() * 4];
    buffer.memory.read(0, &mut bytes)?;
    let found = bytes.chunks_exact(4);
    let wrong = found
        .zip(&buffer.expected)
        .filter(|(found, it)| **found != it.to_ne_bytes());
    verified.mismatches += wrong.count() as u64;
    verified.elements += buffer.expected.len() as u64;
    let sum = buffer
        .expected
        .iter()
        .map(|it| u64::from(*it))
        .fold(0, u64::wrapping_add);
    verified.sum_matches &= gpu.sum(&buffer.memory)? == sum;
    Ok(())
}
