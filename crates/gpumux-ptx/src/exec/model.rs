//! What a launch consists of, and what its threads share.

use std::sync::Arc;

use crate::code::{Function, Module};

/// Threads of a warp.
pub(crate) const WARP: usize = 32;
/// Barriers of a block.
pub(super) const BARRIERS: usize = 16;
/// Cycles between instructions of one thread, on average; what `%clock` counts by.
pub(crate) const CYCLES: u64 = 6;
/// Addresses of the windows by which generic addresses reach what is not global memory. No process has memory there.
pub(crate) const WINDOW: u32 = 56;
pub(crate) const SHARED: u64 = 1 << WINDOW;
pub(crate) const LOCAL: u64 = 2 << WINDOW;
pub(crate) const PARAM: u64 = 3 << WINDOW;

/// Global memory. Sizes are 1, 2, 4 or 8 bytes, addresses multiples of them; values are little-endian.
pub trait Memory {
    /// Reads; `None` where there is no memory.
    fn load(&mut self, at: u64, size: u32) -> Option<u64>;
    /// Writes; false where there is no memory.
    fn store(&mut self, at: u64, size: u32, value: u64) -> bool;
    /// Replaces a value at once, and gives what was there; `None` where there is no memory.
    fn update(&mut self, at: u64, size: u32, change: &mut dyn FnMut(u64) -> u64) -> Option<u64>;
    /// Nanoseconds of some clock, for `%globaltimer`.
    fn now(&mut self) -> u64;
}

/// What is launched.
#[derive(Clone, Debug)]
pub struct Launch {
    /// The module.
    pub module: Arc<Module>,
    /// Which of its kernels.
    pub kernel: usize,
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block, at most 1024.
    pub block: [u32; 3],
    /// Bytes of shared memory beside what the kernel declares.
    pub dynamic_shared: u32,
    /// All parameters, laid out as the kernel declares.
    pub parameters: Vec<u8>,
    /// Addresses of the module's variables.
    pub globals: Vec<u64>,
    /// Blocks that are under way at a time, if none ends.
    pub resident: usize,
    /// The device's SMs, which kernels can ask for.
    pub sms: u32,
    /// Memory for the barrier of a cooperative grid; 0: there is none.
    pub workspace: u64,
}

/// What a kernel did wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FaultKind {
    /// No memory at this address.
    #[error("illegal address {0:#x}")]
    IllegalAddress(u64),
    /// An address that is no multiple of the size.
    #[error("misaligned address {0:#x}")]
    Misaligned(u64),
    /// `trap`.
    #[error("trap")]
    Trap,
    /// `assert`.
    #[error("assertion failed: {0}")]
    Assert(String),
    /// Calls without end.
    #[error("the stack is full")]
    Stack,
    /// All threads wait for something that never comes.
    #[error("all threads wait at barriers that the others never reach")]
    Stuck,
    /// The kernel cannot be run.
    #[error("{0}")]
    Unusable(String),
}

/// What was executed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Instructions of all threads.
    pub instructions: u64,
    /// Instructions of the thread that had most.
    pub longest: u64,
    /// Bytes read and written in global memory.
    pub bytes: u64,
    /// Blocks that have ended.
    pub blocks: u64,
}

impl Stats {
    /// Cycles that the longest thread takes by itself.
    pub fn longest_cycles(&self) -> u64 {
        self.longest.saturating_mul(CYCLES)
    }
}

/// What all instructions of a block have in common.
pub(crate) struct Shared<'a> {
    pub(crate) launch: &'a Launch,
    pub(crate) functions: &'a [Function],
    pub(crate) index: [u32; 3],
    pub(crate) declared: u32,
    pub(crate) stats: &'a mut Stats,
    pub(crate) output: &'a mut Vec<u8>,
}
