//! What the tables have: each is filled by the module that makes such memory.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::c_int,
};

use crate::{ground::driver::AllocationProp, memory::vmm::Chunk};

/// What the driver keeps and this library only counts.
#[derive(Clone, Copy)]
pub(crate) struct Native {
    pub(crate) device: c_int,
    pub(crate) bytes: u64,
    pub(crate) context: u64,
    /// The number of the pool that it is from; 0: none.
    pub(crate) pool: u64,
}

/// What one `cuMemCreate` made.
#[derive(Clone, Debug)]
pub(crate) struct Physical {
    pub(crate) bytes: u64,
    pub(crate) device: c_int,
    pub(crate) context: u64,
    pub(crate) prop: AllocationProp,
    /// The driver's handle, unless the memory is away or the program has let go of it.
    pub(crate) handle: Option<u64>,
    /// How often the program holds its handle. At 0 the memory lives as long as it is mapped.
    pub(crate) references: u32,
    /// By address where it is mapped: whether it may be touched there.
    pub(crate) mappings: BTreeMap<u64, bool>,
    /// It stays where it is.
    pub(crate) pinned: bool,
    /// Where its contents are while it is away; empty while it is not.
    pub(crate) host: Vec<(usize, usize)>,
}

impl Physical {
    pub(crate) const fn new(handle: u64, bytes: u64, context: u64, prop: AllocationProp) -> Self {
        Self {
            bytes,
            device: prop.location.id,
            context,
            prop,
            handle: Some(handle),
            references: 1,
            mappings: BTreeMap::new(),
            pinned: false,
            host: Vec::new(),
        }
    }

    pub(crate) fn is_away(&self) -> bool {
        !self.host.is_empty()
    }

    /// What is away does not come back. How many bytes that is.
    pub(super) fn forget_away(&mut self) -> u64 {
        if !self.is_away() {
            return 0;
        }
        // Nothing of it can move or is counted any more.
        (self.host, self.pinned) = (Vec::new(), true);
        std::mem::take(&mut self.bytes)
    }

    /// Where it can be read and written.
    pub(crate) fn address(&self) -> Option<u64> {
        let mut mappings = self.mappings.iter();
        mappings.find_map(|(at, accessible)| accessible.then_some(*at))
    }

    pub(crate) fn is_movable(&self) -> bool {
        !self.pinned && !self.is_away() && self.address().is_some()
    }
}

/// Memory that other processes may open.
#[derive(Debug)]
pub(crate) struct Export {
    /// The allocation; none: it was freed while others had it open, and others of its block were not.
    pub(crate) address: Option<u64>,
    pub(crate) block: u64,
    /// Another process has it open.
    pub(crate) open: bool,
    /// The daemon has it: the token may be passed on.
    pub(crate) known: bool,
}

impl Export {
    pub(crate) fn is_of(&self, address: u64) -> bool {
        self.address == Some(address)
    }
}

/// Another process's memory that is open here.
#[derive(Debug)]
pub(crate) struct Import {
    pub(crate) token: u128,
    /// Where the whole is mapped, and what that has.
    pub(crate) at: u64,
    pub(crate) bytes: u64,
    pub(crate) chunks: Vec<Chunk>,
    /// Where the memory is.
    pub(crate) device: i32,
    /// For which it was opened: another context has the same memory elsewhere.
    pub(crate) context: u64,
    /// How often the program has it open.
    pub(crate) count: u32,
    /// Its exporter is gone: it is accounted to this process.
    pub(crate) charged: bool,
}

/// A pool that the program has allocated from.
#[derive(Debug)]
pub(crate) struct Pool {
    /// None: the program has destroyed it.
    pub(crate) handle: Option<u64>,
    /// The driver can be asked about it: not when the device's primary context has ended, before the program uses it again.
    pub(crate) known: bool,
    pub(crate) device: c_int,
    /// Bytes that are counted for it: at least what is allocated.
    pub(crate) booked: u64,
    /// Bytes that are allocated and not freed.
    pub(crate) used: u64,
}

/// Memory of a device that graphs have.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct GraphMemory {
    pub(crate) reserved: u64,
    /// It counts as pinned.
    pub(crate) pinned: u64,
}

impl GraphMemory {
    /// As the driver reports it; `idle`: no work is under way.
    pub(crate) fn new(reserved: u64, used: u64, idle: bool) -> Self {
        Self {
            reserved,
            pinned: if idle { used.min(reserved) } else { reserved },
        }
    }
}

/// All of them, by numbers of this library's: the driver may use a handle again.
#[derive(Debug, Default)]
pub(crate) struct Pools {
    pub(crate) all: BTreeMap<u64, Pool>,
    pub(crate) numbers: u64,
    /// The devices of those that the program has made, by handle.
    pub(crate) places: BTreeMap<u64, c_int>,
}

impl Pools {
    pub(crate) fn number(&self, handle: u64) -> Option<u64> {
        let mut all = self.all.iter();
        Some(*all.find(|(_, it)| it.handle == Some(handle))?.0)
    }

    /// Those that the driver can be asked about, with their handles.
    pub(crate) fn known(&self) -> Vec<(u64, u64)> {
        let known = self.all.iter().filter(|(_, it)| it.known);
        known
            .filter_map(|(number, it)| Some((*number, it.handle?)))
            .collect()
    }

    pub(crate) fn devices(&self) -> BTreeSet<c_int> {
        self.all.values().map(|it| it.device).collect()
    }

    pub(crate) fn have_slack(&self) -> bool {
        let mut known = self.all.values().filter(|it| it.known);
        known.any(|it| it.booked > it.used)
    }
}
