//! What work does to memory, executed here when the server reports how far it is.
//!
//! Every effect is a number of steps, so that it can stop anywhere and go on later: a kernel frozen in the
//! middle has really done half of its work.

use std::sync::Arc;

use crate::{
    access::{Place, copy, set},
    border::HostCall,
    error::{CuError, Result},
    interpret::Interpreted,
    kernel::Kernel,
    memory,
};

/// What a piece of work does.
#[derive(Clone)]
pub(crate) enum Effect {
    Nothing,
    Kernel(Kernel),
    /// A kernel that is interpreted: begins here, and is done by [`crate::interpret`].
    Interpreted(Interpreted),
    /// Bytes from one place to another; the flags say which are the device's.
    Copy {
        to: u64,
        from: u64,
        bytes: u64,
        to_device: bool,
        from_device: bool,
    },
    /// The same for a volume.
    Rows(Rows),
    /// Bytes that were taken from the program at once.
    Write {
        to: u64,
        data: Arc<[u8]>,
    },
    /// `count` elements of `width` bytes (1, 2 or 4) become `value`.
    Set {
        to: u64,
        width: u64,
        value: u32,
        count: u64,
    },
    /// Goes wrong.
    Fault(CuError),
    /// Allocates a graph's memory, which its launch has made already.
    Allocate(u64),
    /// Frees memory of `cuMemAlloc`.
    Free(u64),
    /// A call into the program; never run here.
    Host(HostCall),
}

/// A copy of a volume, row by row.
#[derive(Clone, Copy)]
pub(crate) struct Rows {
    pub(crate) to: u64,
    pub(crate) from: u64,
    pub(crate) to_pitch: u64,
    pub(crate) from_pitch: u64,
    pub(crate) to_slice: u64,
    pub(crate) from_slice: u64,
    pub(crate) width: u64,
    pub(crate) height: u64,
    pub(crate) depth: u64,
    pub(crate) to_device: bool,
    pub(crate) from_device: bool,
}

impl Rows {
    fn run(&self, from: u64, to: u64) -> Result {
        for row in from..to {
            let (slice, row) = (row / self.height, row % self.height);
            let target = self.to + slice * self.to_slice + row * self.to_pitch;
            let source = self.from + slice * self.from_slice + row * self.from_pitch;
            let (target, source) = (
                Place::new(target, self.to_device),
                Place::new(source, self.from_device),
            );
            copy(target, source, self.width)?;
        }
        Ok(())
    }
}

impl Effect {
    /// How many steps it has.
    pub(crate) fn steps(&self) -> u64 {
        match self {
            Self::Nothing | Self::Allocate(_) | Self::Host(_) | Self::Interpreted(_) => 0,
            Self::Free(_) | Self::Fault(_) => 1,
            Self::Kernel(kernel) => kernel.steps(),
            Self::Copy { bytes, .. } => *bytes,
            Self::Rows(rows) => rows.height * rows.depth,
            Self::Write { data, .. } => data.len() as u64,
            Self::Set { count, .. } => *count,
        }
    }

    /// Does the steps from one to before another.
    pub(crate) fn run(&self, from: u64, to: u64) -> Result {
        if from >= to {
            return Ok(());
        }
        let steps = to - from;
        match self {
            Self::Nothing | Self::Allocate(_) | Self::Host(_) | Self::Interpreted(_) => Ok(()),
            Self::Free(address) => memory::free(*address),
            Self::Fault(error) => Err(*error),
            Self::Kernel(kernel) => kernel.run(from, to),
            Self::Copy {
                to: target,
                from: source,
                to_device,
                from_device,
                ..
            } => copy(
                Place::new(target + from, *to_device),
                Place::new(source + from, *from_device),
                steps,
            ),
            Self::Rows(rows) => rows.run(from, to),
            Self::Write { to: target, data } => {
                let part = &data[from as usize..to as usize];
                let source = Place::new(part.as_ptr() as u64, false);
                copy(Place::new(target + from, true), source, steps)
            }
            Self::Set {
                to: target,
                width,
                value,
                ..
            } => set(target + from * width, *width, *value, steps),
        }
    }
}
