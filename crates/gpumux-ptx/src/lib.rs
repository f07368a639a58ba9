//! PTX, read and interpreted: enough of it for kernels that are compiled by nvcc and use integers, floats, memory,
//! shared memory, atomics, barriers, warp functions, calls and `printf`.
//!
//! [`Module::parse`] reads text into kernels whose instructions are resolved; an instruction that is not known makes
//! only its own kernel unusable ([`Kernel::usable`]). A [`Run`] executes one launch step by step, so that the caller that drives
//! it can stop in between: blocks take turns, and so do the threads of a block, hence a thread that waits for another one's
//! store gets it. Threads of a warp do not run in lockstep; warp functions wait for all the lanes that they name.
//!
//! The crate has no unsafe code: what addresses mean is up to the [`Memory`] that the driver of a run brings.

mod alu;
mod code;
mod exec;
mod lex;
mod parse;
mod text;

pub use code::{Global, Kernel, Module, Parameter};
pub use exec::{Fault, FaultKind, Launch, Memory, Run, Stats, Turn};
pub use parse::ParseError;
