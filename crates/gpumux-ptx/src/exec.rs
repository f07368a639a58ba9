//! A launch, step by step.

mod model;
mod phase;
mod thread;
mod warp;

use std::{collections::VecDeque, sync::Arc};

use model::{BARRIERS, Shared, WARP};
pub use model::{FaultKind, Launch, Memory, Stats};
use thread::{Stop, Thread};

/// Instructions that a thread executes before another one of its block goes on, and a block before another block.
const THREAD_TURN: u64 = 4096;
const BLOCK_TURN: u64 = 1 << 18;

/// A fault and where it was.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("kernel `{kernel}`, PTX line {line}, block {block:?}, thread {thread}: {kind}")]
pub struct Fault {
    /// Name of the kernel.
    pub kernel: String,
    /// Line of the module's text; 0 when unknown.
    pub line: u32,
    /// Block.
    pub block: [u32; 3],
    /// Number of the thread in its block.
    pub thread: usize,
    /// What it was.
    pub kind: FaultKind,
}

/// A launch under way. Blocks take turns: [`Run::step`] executes them one after the other; or several threads [`Run::take`] one
/// each, let it [`Turn::run`], and [`Run::give`] it back.
#[derive(Debug)]
pub struct Run {
    launch: Arc<Launch>,
    function: usize,
    blocks: u64,
    next: u64,
    active: VecDeque<Block>,
    /// Blocks that were taken.
    away: usize,
    /// A new block's turn comes before those that had theirs.
    fresh: bool,
    stats: Stats,
    output: Vec<u8>,
}

/// A block that has its turn.
#[derive(Debug)]
pub struct Turn {
    launch: Arc<Launch>,
    block: Block,
    stats: Stats,
    output: Vec<u8>,
    end: Result<bool, Fault>,
}

#[derive(Debug)]
struct Block {
    index: [u32; 3],
    threads: Vec<Thread>,
    shared: Vec<u8>,
    barriers: [Barrier; BARRIERS],
    live: usize,
}

#[derive(Clone, Copy, Debug, Default)]
struct Barrier {
    arrived: u32,
    /// Predicates that were true.
    count: u32,
    /// As many are awaited; 0: all that live.
    expected: u32,
    waiting: u32,
}

impl Run {
    /// Prepares a launch.
    ///
    /// # Errors
    /// When the kernel cannot be run, names the instruction.
    pub fn new(launch: Launch) -> Result<Self, Fault> {
        let unusable = |name: &str, why: &str| Fault {
            kernel: name.to_owned(),
            line: 0,
            block: [0; 3],
            thread: 0,
            kind: FaultKind::Unusable(why.to_owned()),
        };
        let Some(kernel) = launch.module.kernels.get(launch.kernel) else {
            return Err(unusable("?", "there is no such kernel"));
        };
        let function = match &kernel.function {
            Ok(function) => *function,
            Err(why) => return Err(unusable(&kernel.name, why)),
        };
        let threads: u64 = launch.block.iter().map(|it| u64::from(*it)).product();
        if launch.parameters.len() < kernel.parameter_bytes()
            || !(1..=1024).contains(&threads)
            || launch.globals.len() != launch.module.globals.len()
        {
            return Err(unusable(&kernel.name, "the launch does not fit the kernel"));
        }
        let blocks = launch.grid.iter().map(|it| u64::from(*it)).product();
        Ok(Self {
            function,
            blocks,
            next: 0,
            active: VecDeque::new(),
            away: 0,
            fresh: false,
            stats: Stats::default(),
            output: Vec::new(),
            launch: Arc::new(launch),
        })
    }

    /// What was executed so far.
    pub fn stats(&self) -> Stats {
        self.stats
    }

    /// What the kernel printed since this was last called.
    pub fn take_output(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.output)
    }

    /// Executes some `budget` instructions; true when the launch is done.
    ///
    /// # Errors
    /// What a thread did wrong. The run is of no use then.
    pub fn step(&mut self, memory: &mut impl Memory, budget: u64) -> Result<bool, Fault> {
        let until = self.stats.instructions.saturating_add(budget);
        while self.stats.instructions < until {
            let Some(mut turn) = self.take() else {
                return Ok(self.is_done());
            };
            turn.run(memory, BLOCK_TURN);
            self.output.extend(turn.take_output());
            self.give(turn)?;
        }
        Ok(self.is_done())
    }

    fn is_done(&self) -> bool {
        self.active.is_empty() && self.away == 0 && self.next == self.blocks
    }

    /// Blocks of the launch.
    pub fn blocks(&self) -> u64 {
        self.blocks
    }

    /// The block whose turn it is; none while all that may be under way are taken, or have ended.
    pub fn take(&mut self) -> Option<Turn> {
        let under_way = self.active.len() + self.away;
        let room = self.next < self.blocks && under_way < self.launch.resident.max(1);
        // The others must go on even if those that began wait for them.
        let block = match room && (self.fresh || self.active.is_empty()) {
            true => self.begin(),
            false => self.active.pop_front()?,
        };
        self.fresh = false;
        self.away += 1;
        Some(Turn {
            launch: Arc::clone(&self.launch),
            block,
            stats: Stats::default(),
            output: Vec::new(),
            end: Ok(false),
        })
    }

    /// Takes a block back; true when the launch is done.
    ///
    /// # Errors
    /// What a thread did wrong. The run is of no use then.
    pub fn give(&mut self, turn: Turn) -> Result<bool, Fault> {
        self.away -= 1;
        self.stats.instructions += turn.stats.instructions;
        self.stats.bytes += turn.stats.bytes;
        self.stats.longest = self.stats.longest.max(turn.stats.longest);
        if turn.end? {
            self.stats.blocks += 1;
        } else {
            self.active.push_back(turn.block);
            self.fresh = true;
        }
        Ok(self.is_done())
    }

    fn begin(&mut self) -> Block {
        let [x, y, _] = self.launch.grid.map(u64::from);
        let number = self.next;
        self.next += 1;
        let index = [number % x, number / x % y, number / (x * y)].map(|it| it as u32);
        let count = self.launch.block.iter().product::<u32>() as usize;
        let function = &self.launch.module.functions[self.function];
        let threads = (0..count)
            .map(|number| Thread::new(number, self.launch.block, self.function, function))
            .collect();
        let declared = self.launch.module.kernels[self.launch.kernel].shared;
        let shared = declared.next_multiple_of(16) + self.launch.dynamic_shared;
        Block {
            index,
            threads,
            shared: vec![0; shared as usize],
            barriers: Default::default(),
            live: count,
        }
    }
}

impl Turn {
    /// Executes some `most` instructions of the block.
    pub fn run(&mut self, memory: &mut impl Memory, most: u64) {
        self.end = self.go_on(memory, most);
    }

    /// What the block printed.
    pub fn take_output(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.output)
    }

    /// True when the block has ended.
    fn go_on(&mut self, memory: &mut impl Memory, most: u64) -> Result<bool, Fault> {
        let until = self.stats.instructions + most;
        let block = &mut self.block;
        let module = Arc::clone(&self.launch.module);
        let kernel = &module.kernels[self.launch.kernel];
        while self.stats.instructions < until {
            let before = self.stats.instructions;
            let mut shared = Shared {
                launch: &self.launch,
                functions: &module.functions,
                index: block.index,
                declared: kernel.shared,
                stats: &mut self.stats,
                output: &mut self.output,
            };
            let fault = |thread: usize, line: u32, kind: FaultKind| Fault {
                kernel: kernel.name.clone(),
                line,
                block: block.index,
                thread,
                kind,
            };
            let (mut resumed, mut only_turns) = (false, true);
            for first in (0..block.threads.len()).step_by(WARP) {
                let last = (first + WARP).min(block.threads.len());
                for number in first..last {
                    if !block.threads[number].is_ready() {
                        continue;
                    }
                    let thread = &mut block.threads[number];
                    let stop = thread
                        .run(&mut shared, &mut block.shared, memory, THREAD_TURN)
                        .map_err(|(line, kind)| fault(number, line, kind))?;
                    only_turns &= matches!(stop, Stop::Turn);
                    match stop {
                        Stop::Turn | Stop::Warp => {}
                        Stop::Exit => block.live -= 1,
                        Stop::Barrier {
                            id,
                            threads,
                            arrive,
                            flag,
                        } => {
                            let barrier = &mut block.barriers[id % BARRIERS];
                            barrier.arrived += 1;
                            barrier.count += u32::from(flag);
                            barrier.waiting += u32::from(!arrive);
                            barrier.expected = threads;
                        }
                    }
                }
                resumed |= warp::settle(&mut block.threads[first..last], &module.functions);
            }
            if block.live == 0 {
                return Ok(true);
            }
            resumed |= block.open_barriers();
            // A block that computes for long may wait for another one as well: it is that one's turn.
            if only_turns && !resumed && self.stats.instructions > before {
                return Ok(false);
            }
            if self.stats.instructions == before && !resumed {
                let number = block
                    .threads
                    .iter()
                    .position(|it| !it.is_done())
                    .unwrap_or(0);
                let line = block.threads[number].line(&module.functions);
                return Err(Fault {
                    kernel: kernel.name.clone(),
                    line,
                    block: block.index,
                    thread: number,
                    kind: FaultKind::Stuck,
                });
            }
        }
        Ok(false)
    }
}

impl Block {
    /// Releases the threads that wait at complete barriers; whether there was one.
    fn open_barriers(&mut self) -> bool {
        let mut opened = false;
        for (id, barrier) in self.barriers.iter_mut().enumerate() {
            let expected = match barrier.expected {
                0 => self.live as u32,
                expected => expected,
            };
            if barrier.waiting == 0 || barrier.arrived < expected {
                continue;
            }
            for thread in &mut self.threads {
                opened |= thread.pass_barrier(id, barrier.count, barrier.arrived);
            }
            *barrier = Barrier::default();
        }
        opened
    }
}
