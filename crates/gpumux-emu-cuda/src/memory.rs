//! Device memory in this process: addresses are the process's own, physical memory is files from the
//! server mapped there. And host memory that the device may reach.
//!
//! The bookkeeping decides what the device may touch: an access outside of it is an illegal address, never a crash.

mod graphs;
mod suspend;

pub(crate) use graphs::{
    back_for_launch, graph_attribute, reserve_for_graph, reset_graph_attribute, trim_graphs,
};
pub(crate) use suspend::{attach, detach, is_movable};

use std::{
    collections::{BTreeMap, HashMap},
    ffi::c_void,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    ptr::null_mut,
    sync::{
        Arc, LazyLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, atomic::AtomicU64,
    },
    time::Duration,
};

use gpumux_emu::client;
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap, mmap_anonymous, mprotect, munmap};

use crate::{
    error::{CuError, Result},
    fault, locked,
    process::{lock, process},
    system,
};

/// Physical memory comes in multiples of this.
pub(crate) const GRANULARITY: u64 = 2 << 20;
/// Smaller allocations share pieces of [`GRANULARITY`].
const SMALL: u64 = 1 << 20;
/// By so much a pool grows at least (as the driver's pools do on an H100).
const POOL_PIECE: u64 = 32 << 20;
/// Alignment of small allocations.
const UNIT: u64 = 512;

/// Physical memory; gone when its last holder releases it.
pub(crate) struct Physical {
    /// None while the process is checkpointed: then it is on no device.
    id: Option<u64>,
    file: OwnedFd,
    pub(crate) bytes: u64,
    /// Number of the device in the server.
    pub(crate) device: u32,
    pub(crate) exportable: bool,
}

impl Drop for Physical {
    fn drop(&mut self) {
        if let (Some(id), Ok(process)) = (self.id, process()) {
            // A server that is gone has freed it already.
            let _ = lock(&process.connection).free_memory(id);
        }
    }
}

struct Mapping {
    bytes: u64,
    physical: Arc<Physical>,
    accessible: bool,
    /// The devices that may use it, a bit each, of memory that was mapped by the program. Other memory is its device's, and that of
    /// the contexts that have access to the device's.
    devices: Option<u32>,
}

impl Mapping {
    fn is_seen(&self, by: Viewer) -> bool {
        let own = 1 << self.physical.device;
        self.accessible
            && match self.devices {
                Some(devices) => devices & 1 << by.device != 0,
                None => (by.peers | 1 << by.device) & own != 0,
            }
    }
}

/// An access to memory: a context's device, and the devices to whose memory it has access, a bit each.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Viewer {
    pub(crate) device: u32,
    pub(crate) peers: u32,
}

/// Memory of another process.
struct Opened {
    mapping: u64,
    count: usize,
    /// Its process, and its address there.
    of: (u64, u64),
}

/// What `cuMemAlloc` gave out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Allocation {
    pub(crate) bytes: u64,
    /// Handle of its context.
    pub(crate) context: usize,
    /// The program uses it as its own, too (`cuMemAllocManaged`).
    pub(crate) managed: bool,
    /// Handle of its pool; 0: none.
    pub(crate) pool: usize,
    /// Will be freed when its stream has come to that: its pool does not count it any more (CuPy's tests; docs/fidelity.md).
    going: bool,
    /// The shared piece that it is part of.
    piece: Option<u64>,
}

/// Host memory that the device may reach.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostRange {
    pub(crate) bytes: u64,
    pub(crate) flags: u32,
    /// Allocated by us, not registered.
    owned: bool,
}

/// A shared piece: free ranges by offset.
struct Piece {
    device: u32,
    /// The pool whose it is; 0: none.
    pool: usize,
    bytes: u64,
    free: BTreeMap<u64, u64>,
}

/// What a node of a graph allocates.
struct GraphMemory {
    /// Number of the device in the server.
    device: u32,
    bytes: u64,
    /// Launches that have allocated it and not freed it.
    uses: u32,
}

/// All memory of the process.
#[derive(Default)]
pub(crate) struct Space {
    reserved: BTreeMap<u64, u64>,
    mapped: BTreeMap<u64, Mapping>,
    allocations: BTreeMap<u64, Allocation>,
    pieces: BTreeMap<u64, Piece>,
    host: BTreeMap<u64, HostRange>,
    opened: BTreeMap<u64, Opened>,
    graphs: BTreeMap<u64, GraphMemory>,
    handles: HashMap<u64, (Arc<Physical>, usize)>,
    next_handle: u64,
}

static SPACE: LazyLock<RwLock<Space>> = LazyLock::new(RwLock::default);

/// To look at it. While the guard lives, nothing is unmapped.
pub(crate) fn space() -> RwLockReadGuard<'static, Space> {
    SPACE.read().unwrap_or_else(PoisonError::into_inner)
}

fn space_mut() -> RwLockWriteGuard<'static, Space> {
    SPACE.write().unwrap_or_else(PoisonError::into_inner)
}

/// The range of a map that contains `address`.
fn find<T>(
    ranges: &BTreeMap<u64, T>,
    address: u64,
    bytes: impl Fn(&T) -> u64,
) -> Option<(u64, &T)> {
    ranges
        .range(..=address)
        .next_back()
        .filter(|(start, range)| address - **start < bytes(range))
        .map(|(start, range)| (*start, range))
}

impl Space {
    /// Whether the device may use this range as its own memory.
    pub(crate) fn is_device(&self, address: u64, bytes: u64) -> bool {
        let Some(end) = address.checked_add(bytes) else {
            return false;
        };
        let mut at = address;
        while at < end {
            match find(&self.mapped, at, |mapping| mapping.bytes) {
                Some((start, mapping)) if mapping.accessible => at = start + mapping.bytes,
                _ => return false,
            }
        }
        true
    }

    /// Whether this is host memory that the device may reach.
    pub(crate) fn is_pinned(&self, address: u64, bytes: u64) -> bool {
        find(&self.host, address, |range| range.bytes)
            .is_some_and(|(start, range)| bytes <= range.bytes - (address - start))
    }

    /// Whether a part of this range is reserved, and there is no memory that the device may use.
    pub(crate) fn is_unmapped(&self, address: u64, bytes: u64) -> bool {
        let touched = |at| find(&self.reserved, at, |bytes| *bytes).is_some();
        (touched(address) || touched(address.saturating_add(bytes.saturating_sub(1))))
            && !self.is_device(address, bytes)
    }

    /// Whether a kernel may touch this range.
    pub(crate) fn is_reachable(&self, address: u64, bytes: u64) -> bool {
        self.is_device(address, bytes) || self.is_pinned(address, bytes)
    }

    /// The mapping or pinned range around an address that a kernel of this context may touch: start and end.
    pub(crate) fn reachable_range(&self, address: u64, by: Viewer) -> Option<(u64, u64)> {
        let mapped = find(&self.mapped, address, |mapping| mapping.bytes)
            .filter(|(_, mapping)| mapping.is_seen(by))
            .map(|(start, mapping)| (start, start + mapping.bytes));
        let pinned = || {
            self.host_range(address)
                .map(|(start, range)| (start, start + range.bytes))
        };
        mapped.or_else(pinned)
    }

    /// The allocation, mapping or pinned range that contains an address: start and bytes.
    pub(crate) fn range_of(&self, address: u64) -> Option<(u64, u64)> {
        let allocation = find(&self.allocations, address, |allocation| allocation.bytes)
            .map(|(start, allocation)| (start, allocation.bytes));
        let mapping = || {
            find(&self.mapped, address, |mapping| mapping.bytes)
                .map(|(start, mapping)| (start, mapping.bytes))
        };
        let pinned = || {
            self.host_range(address)
                .map(|(start, range)| (start, range.bytes))
        };
        allocation.or_else(mapping).or_else(pinned)
    }

    /// The device of an address.
    pub(crate) fn device_of(&self, address: u64) -> Option<u32> {
        find(&self.mapped, address, |mapping| mapping.bytes)
            .map(|(_, mapping)| mapping.physical.device)
    }

    /// Whether an address is mapped to memory that can be passed on.
    pub(crate) fn is_exportable(&self, address: u64) -> bool {
        let mapping = find(&self.mapped, address, |mapping| mapping.bytes);
        mapping.is_some_and(|(_, mapping)| mapping.physical.exportable)
    }

    pub(crate) fn allocation(&self, address: u64) -> Option<Allocation> {
        find(&self.allocations, address, |allocation| allocation.bytes).map(|(_, it)| *it)
    }

    pub(crate) fn host_range(&self, address: u64) -> Option<(u64, HostRange)> {
        find(&self.host, address, |range| range.bytes).map(|(start, range)| (start, *range))
    }

    pub(crate) fn handle(&self, handle: u64) -> Result<Arc<Physical>> {
        let found = self.handles.get(&handle);
        found
            .map(|(it, _)| Arc::clone(it))
            .ok_or(CuError::INVALID_VALUE)
    }

    fn add_handle(&mut self, physical: Arc<Physical>) -> u64 {
        self.next_handle += 1;
        self.handles.insert(self.next_handle, (physical, 1));
        self.next_handle
    }
}

// Address space

/// Reserves addresses, aligned, at `hint` if that is free.
pub(crate) fn reserve(bytes: u64, alignment: u64, hint: u64) -> Result<u64> {
    let alignment = alignment.max(GRANULARITY);
    if bytes == 0 || !bytes.is_multiple_of(GRANULARITY) || !alignment.is_power_of_two() {
        return Err(CuError::INVALID_VALUE);
    }
    let at = reserve_raw(bytes, alignment, hint)?;
    space_mut().reserved.insert(at, bytes);
    Ok(at)
}

fn reserve_raw(bytes: u64, alignment: u64, hint: u64) -> Result<u64> {
    let padded = bytes.checked_add(alignment).ok_or(CuError::OUT_OF_MEMORY)?;
    let padded = usize::try_from(padded).map_err(|_| CuError::OUT_OF_MEMORY)?;
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    let hint = if hint.is_multiple_of(alignment) {
        hint
    } else {
        0
    };
    // SAFETY: without FIXED this only adds a mapping where there was none.
    let start = unsafe { mmap_anonymous(hint as *mut c_void, padded, ProtFlags::empty(), flags) }
        .map_err(|_| CuError::OUT_OF_MEMORY)? as u64;
    let at = start.next_multiple_of(alignment);
    unmap_raw(start, at - start);
    unmap_raw(at + bytes, start + padded as u64 - (at + bytes));
    Ok(at)
}

/// Gives addresses back to the system. They must be ours.
fn unmap_raw(at: u64, bytes: u64) {
    if bytes > 0 {
        // SAFETY: the callers pass ranges that they mapped themselves and nothing uses any more.
        let _ = unsafe { munmap(at as *mut c_void, bytes as usize) };
    }
}

/// Makes addresses of ours empty again, still reserved.
fn clear_raw(at: u64, bytes: u64) -> Result {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
    // SAFETY: the callers pass ranges of their own reservations.
    unsafe { mmap_anonymous(at as *mut c_void, bytes as usize, ProtFlags::empty(), flags) }
        .map(drop)
        .map_err(|_| CuError::UNMAP_FAILED)
}

/// Puts a file at addresses of ours.
fn map_raw(at: u64, bytes: u64, file: &OwnedFd, offset: u64, prot: ProtFlags) -> Result {
    let flags = MapFlags::SHARED | MapFlags::FIXED;
    // SAFETY: the callers pass ranges of their own reservations.
    unsafe { mmap(at as *mut c_void, bytes as usize, prot, flags, file, offset) }
        .map(drop)
        .map_err(|_| CuError::MAP_FAILED)
}

/// Ends a reservation; it must be given as it was made, with nothing mapped.
pub(crate) fn free_reservation(at: u64, bytes: u64) -> Result {
    let mut space = space_mut();
    if space.reserved.get(&at) != Some(&bytes)
        || space.mapped.range(at..at + bytes).next().is_some()
    {
        return Err(CuError::INVALID_VALUE);
    }
    space.reserved.remove(&at);
    unmap_raw(at, bytes);
    Ok(())
}

// Physical memory

fn fail_if_due() -> Result {
    fault::due(fault::At::Allocation).map_or(Ok(()), |kind| Err(fault::code(kind)))
}

fn create_physical(device: u32, bytes: u64, exportable: bool) -> Result<Arc<Physical>> {
    let (id, file) = lock(&process()?.connection).create_memory(device, bytes)?;
    Ok(Arc::new(Physical {
        id: Some(id),
        file,
        bytes,
        device,
        exportable,
    }))
}

/// Creates physical memory; its handle.
pub(crate) fn create(device: u32, bytes: u64, exportable: bool) -> Result<u64> {
    fail_if_due()?;
    if bytes == 0 || !bytes.is_multiple_of(GRANULARITY) {
        return Err(CuError::INVALID_VALUE);
    }
    let physical = create_physical(device, bytes, exportable)?;
    Ok(space_mut().add_handle(physical))
}

/// Takes a share in memory that came as a file.
pub(crate) fn import(file: BorrowedFd<'_>) -> Result<u64> {
    let (id, device, bytes, file) = lock(&process()?.connection).import_memory(file)?;
    locked::note_shared();
    let physical = Arc::new(Physical {
        id: Some(id),
        file,
        bytes,
        device,
        exportable: true,
    });
    Ok(space_mut().add_handle(physical))
}

/// A file by which memory is passed on, and which keeps it.
pub(crate) fn export(handle: u64) -> Result<OwnedFd> {
    let physical = space().handle(handle)?;
    let id = physical.id.filter(|_| physical.exportable);
    let id = id.ok_or(CuError::INVALID_VALUE)?;
    locked::note_shared();
    let server = system::socket_path().ok_or(CuError::OPERATING_SYSTEM)?;
    Ok(client::export_memory(&server, id, physical.file.as_fd())?)
}

/// A handle is not needed any more; mappings keep the memory.
pub(crate) fn release(handle: u64) -> Result {
    let mut space = space_mut();
    let (_, count) = space
        .handles
        .get_mut(&handle)
        .ok_or(CuError::INVALID_VALUE)?;
    *count -= 1;
    let gone = if *count == 0 {
        space.handles.remove(&handle)
    } else {
        None
    };
    // The server is notified without the lock.
    drop(space);
    drop(gone);
    Ok(())
}

/// A handle of what is mapped at an address.
pub(crate) fn retain(address: u64) -> Result<u64> {
    let mut space = space_mut();
    let physical = find(&space.mapped, address, |mapping| mapping.bytes)
        .map(|(_, mapping)| Arc::clone(&mapping.physical))
        .ok_or(CuError::INVALID_VALUE)?;
    let known = space
        .handles
        .iter_mut()
        .find(|(_, (other, _))| Arc::ptr_eq(other, &physical));
    if let Some((handle, (_, count))) = known {
        *count += 1;
        return Ok(*handle);
    }
    Ok(space.add_handle(physical))
}

/// Maps a handle, without access.
pub(crate) fn map(address: u64, bytes: u64, offset: u64, handle: u64) -> Result {
    let mut space = space_mut();
    let physical = space.handle(handle)?;
    let inside = find(&space.reserved, address, |reserved| *reserved)
        .is_some_and(|(start, reserved)| bytes <= reserved - (address - start));
    let fits = offset == 0 && bytes == physical.bytes && address.is_multiple_of(GRANULARITY);
    if !inside || !fits {
        return Err(CuError::INVALID_VALUE);
    }
    let before = find(&space.mapped, address, |mapping| mapping.bytes);
    if before.is_some()
        || space
            .mapped
            .range(address..address + bytes)
            .next()
            .is_some()
    {
        return Err(CuError::ALREADY_MAPPED);
    }
    map_raw(address, bytes, &physical.file, offset, ProtFlags::empty())?;
    let mapping = Mapping {
        bytes,
        physical,
        accessible: false,
        devices: Some(0),
    };
    space.mapped.insert(address, mapping);
    Ok(())
}

/// Whole mappings that make up a range exactly.
fn whole(space: &Space, address: u64, bytes: u64) -> Result<Vec<u64>> {
    let end = address.checked_add(bytes).ok_or(CuError::INVALID_VALUE)?;
    let mut at = address;
    let mut found = Vec::new();
    while at < end {
        let mapping = space.mapped.get(&at).ok_or(CuError::INVALID_VALUE)?;
        found.push(at);
        at += mapping.bytes;
    }
    if at != end || bytes == 0 {
        return Err(CuError::INVALID_VALUE);
    }
    Ok(found)
}

/// Unmaps whole mappings; the addresses stay reserved.
pub(crate) fn unmap(address: u64, bytes: u64) -> Result {
    let mut space = space_mut();
    if space.allocations.contains_key(&address) {
        return Err(CuError::INVALID_VALUE);
    }
    let starts = whole(&space, address, bytes)?;
    clear_raw(address, bytes)?;
    let gone: Vec<Mapping> = starts
        .iter()
        .filter_map(|start| space.mapped.remove(start))
        .collect();
    drop(space);
    drop(gone);
    Ok(())
}

/// Allows and forbids devices, a bit each, to use mappings.
pub(crate) fn set_access(address: u64, bytes: u64, granted: u32, taken: u32) -> Result {
    let mut space = space_mut();
    let starts = whole(&space, address, bytes)?;
    let now = |mapping: &Mapping| mapping.devices.unwrap_or(0) & !taken | granted;
    // The host sees what some device may use.
    let allowed = starts.iter().any(|start| now(&space.mapped[start]) != 0);
    let prot = if allowed {
        MprotectFlags::READ | MprotectFlags::WRITE
    } else {
        MprotectFlags::empty()
    };
    // SAFETY: all of the range is mappings of ours.
    unsafe { mprotect(address as *mut c_void, bytes as usize, prot) }
        .map_err(|_| CuError::OPERATING_SYSTEM)?;
    for start in starts {
        if let Some(mapping) = space.mapped.get_mut(&start) {
            mapping.devices = Some(now(mapping));
            mapping.accessible = allowed;
        }
    }
    Ok(())
}

/// Whether a device may use an address; an error when nothing is mapped there.
pub(crate) fn access(address: u64, by: Viewer) -> Result<bool> {
    let space = space();
    find(&space.mapped, address, |mapping| mapping.bytes)
        .map(|(_, mapping)| mapping.is_seen(by))
        .ok_or(CuError::INVALID_VALUE)
}

// cuMemAlloc

/// Memory at an address of its own.
fn map_new(device: u32, bytes: u64) -> Result<u64> {
    map_at_new_place(create_physical(device, bytes, false)?)
}

fn map_at_new_place(physical: Arc<Physical>) -> Result<u64> {
    let bytes = physical.bytes;
    let at = reserve_raw(bytes, GRANULARITY, 0)?;
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    if let Err(error) = map_raw(at, bytes, &physical.file, 0, prot) {
        unmap_raw(at, bytes);
        return Err(error);
    }
    let mapping = Mapping {
        bytes,
        physical,
        accessible: true,
        devices: None,
    };
    space_mut().mapped.insert(at, mapping);
    Ok(at)
}

/// Allocates device memory for a context.
pub(crate) fn alloc(device: u32, context: usize, bytes: u64) -> Result<u64> {
    fail_if_due()?;
    if bytes == 0 {
        return Err(CuError::INVALID_VALUE);
    }
    if bytes >= SMALL {
        let whole = bytes
            .checked_next_multiple_of(GRANULARITY)
            .ok_or(CuError::OUT_OF_MEMORY)?;
        let at = map_new(device, whole)?;
        let allocation = Allocation {
            bytes,
            context,
            managed: false,
            pool: 0,
            going: false,
            piece: None,
        };
        space_mut().allocations.insert(at, allocation);
        return Ok(at);
    }
    alloc_in_pieces(device, context, 0, bytes, &[GRANULARITY])
}

/// Allocates from a pool, whose memory grows by pieces as the driver's does.
pub(crate) fn alloc_from_pool(device: u32, context: usize, pool: usize, bytes: u64) -> Result<u64> {
    fail_if_due()?;
    let least = bytes
        .checked_next_multiple_of(GRANULARITY)
        .filter(|bytes| *bytes > 0)
        .ok_or(CuError::INVALID_VALUE)?;
    alloc_in_pieces(
        device,
        context,
        pool,
        bytes,
        &[least.max(POOL_PIECE), least],
    )
}

/// Allocates in a piece that there is, or a new one: as large as the first of these sizes for which there is memory.
fn alloc_in_pieces(
    device: u32,
    context: usize,
    pool: usize,
    bytes: u64,
    sizes: &[u64],
) -> Result<u64> {
    let units = bytes.next_multiple_of(UNIT);
    loop {
        if let Some(at) = space_mut().alloc_small(device, context, pool, bytes, units) {
            return Ok(at);
        }
        let mut made = Err(CuError::OUT_OF_MEMORY);
        for size in sizes {
            made = map_new(device, *size).map(|start| (start, *size));
            if made.is_ok() {
                break;
            }
        }
        let (start, size) = made?;
        let piece = Piece {
            device,
            pool,
            bytes: size,
            free: BTreeMap::from([(0, size)]),
        };
        space_mut().pieces.insert(start, piece);
    }
}

/// Bytes that a pool has, and of them those that are allocated.
pub(crate) fn pool_use(pool: usize) -> (u64, u64) {
    let space = space();
    let pieces = space.pieces.values().filter(|piece| piece.pool == pool);
    let (reserved, used) = pieces.fold((0, 0), |(reserved, used), piece| {
        let free: u64 = piece.free.values().sum();
        (reserved + piece.bytes, used + piece.bytes - free)
    });
    let going = space.allocations.values().filter(|it| it.going);
    let going = going.filter(|it| it.pool == pool);
    let bytes = going.map(|it| it.bytes.next_multiple_of(UNIT));
    (reserved, used - bytes.sum::<u64>())
}

/// Gives pieces of a pool that are empty back, as long as it has more than `keep` bytes.
pub(crate) fn trim_pool(pool: usize, keep: u64) {
    let (mut reserved, _) = pool_use(pool);
    let mut gone = Vec::new();
    let mut space = space_mut();
    let empty = |piece: &Piece| piece.pool == pool && piece.free.get(&0) == Some(&piece.bytes);
    let starts: Vec<u64> = space
        .pieces
        .iter()
        .filter_map(|(start, piece)| empty(piece).then_some(*start))
        .collect();
    for start in starts {
        if reserved <= keep {
            break;
        }
        if let Some(piece) = space.pieces.remove(&start) {
            reserved -= piece.bytes;
            unmap_raw(start, piece.bytes);
            gone.extend(space.mapped.remove(&start));
        }
    }
    drop(space);
    drop(gone);
}

/// A pool is no more: what is allocated goes when it is freed.
pub(crate) fn end_pool(pool: usize) {
    trim_pool(pool, 0);
    let mut space = space_mut();
    let pieces = space.pieces.values_mut();
    pieces
        .filter(|piece| piece.pool == pool)
        .for_each(|piece| piece.pool = 0);
}

/// Marks an allocation as managed memory.
pub(crate) fn manage(address: u64) {
    if let Some(allocation) = space_mut().allocations.get_mut(&address) {
        allocation.managed = true;
    }
}

impl Space {
    /// Whether the program looks at this memory by itself: pinned or managed memory.
    pub(crate) fn is_hosts(&self, address: u64) -> bool {
        self.host_range(address).is_some() || self.allocation(address).is_some_and(|it| it.managed)
    }

    fn alloc_small(
        &mut self,
        device: u32,
        context: usize,
        pool: usize,
        bytes: u64,
        units: u64,
    ) -> Option<u64> {
        let (start, piece, offset, length) = self
            .pieces
            .iter_mut()
            .filter(|(_, piece)| piece.device == device && piece.pool == pool)
            .find_map(|(start, piece)| {
                let fit = piece.free.iter().find(|(_, length)| **length >= units);
                let (offset, length) = fit.map(|(offset, length)| (*offset, *length))?;
                Some((*start, piece, offset, length))
            })?;
        piece.free.remove(&offset);
        if length > units {
            piece.free.insert(offset + units, length - units);
        }
        let allocation = Allocation {
            bytes,
            context,
            managed: false,
            pool,
            going: false,
            piece: Some(start),
        };
        self.allocations.insert(start + offset, allocation);
        Some(start + offset)
    }

    /// Gives a small allocation's range back; true when its piece is empty, and no pool keeps it.
    fn free_small(&mut self, start: u64, at: u64, bytes: u64) -> bool {
        let Some(piece) = self.pieces.get_mut(&start) else {
            return false;
        };
        let (mut offset, mut length) = (at - start, bytes.next_multiple_of(UNIT));
        if let Some(after) = piece.free.remove(&(offset + length)) {
            length += after;
        }
        if let Some((before, len)) = piece.free.range(..offset).next_back()
            && before + len == offset
        {
            (offset, length) = (*before, length + len);
        }
        piece.free.insert(offset, length);
        length == piece.bytes && piece.pool == 0
    }
}

/// Memory will be freed in stream order.
pub(crate) fn begin_free(address: u64) -> Result {
    let mut space = space_mut();
    let allocation = space.allocations.get_mut(&address);
    match allocation.filter(|it| !it.going) {
        Some(allocation) => allocation.going = true,
        None => return Err(CuError::INVALID_VALUE),
    }
    Ok(())
}

/// Frees what [`alloc`] gave.
pub(crate) fn free(address: u64) -> Result {
    let mut space = space_mut();
    if space.release_graph(address) {
        return Ok(());
    }
    let allocation = space
        .allocations
        .remove(&address)
        .ok_or(CuError::INVALID_VALUE)?;
    let start = match allocation.piece {
        Some(start) if space.free_small(start, address, allocation.bytes) => {
            space.pieces.remove(&start);
            start
        }
        Some(_) => return Ok(()),
        None => address,
    };
    let gone = space.mapped.remove(&start);
    if let Some(mapping) = &gone {
        unmap_raw(start, mapping.bytes);
    }
    drop(space);
    drop(gone);
    Ok(())
}

/// Frees everything that was allocated for a context. What comes from a pool is the pool's, and outlives the context (as on an H200,
/// driver 580.159.04).
pub(crate) fn free_all_of(context: usize) {
    let addresses: Vec<u64> = space()
        .allocations
        .iter()
        .filter(|(_, allocation)| allocation.context == context && allocation.pool == 0)
        .map(|(address, _)| *address)
        .collect();
    for address in addresses {
        let _ = free(address);
    }
}

// Memory of other processes

/// Calls `handle` with the file of an allocation, the address where it begins, where that is in the file, and its bytes.
pub(crate) fn share<T>(
    address: u64,
    handle: impl FnOnce(&OwnedFd, u64, u64, u64) -> T,
) -> Result<T> {
    let space = space();
    let wrong = CuError::INVALID_VALUE;
    let (at, allocation) =
        find(&space.allocations, address, |allocation| allocation.bytes).ok_or(wrong)?;
    let (start, mapping) = find(&space.mapped, at, |mapping| mapping.bytes).ok_or(wrong)?;
    // Other processes have no part in managed memory and in pools.
    if allocation.managed || allocation.pool != 0 {
        return Err(wrong);
    }
    locked::note_shared();
    Ok(handle(
        &mapping.physical.file,
        at,
        at - start,
        allocation.bytes,
    ))
}

/// The address of memory that is another process's: `of` is that process, and its address there. The same each time.
pub(crate) fn open_shared(
    of: (u64, u64),
    offset: u64,
    bytes: u64,
    file: impl FnOnce() -> Result<OwnedFd>,
) -> Result<u64> {
    if let Some((at, opened)) = space_mut().opened.iter_mut().find(|(_, it)| it.of == of) {
        opened.count += 1;
        return Ok(*at);
    }
    let file = file()?;
    let (id, device, whole, file) = lock(&process()?.connection).import_memory(file.as_fd())?;
    locked::note_shared();
    let physical = Arc::new(Physical {
        id: Some(id),
        file,
        bytes: whole,
        device,
        exportable: false,
    });
    if offset.checked_add(bytes).is_none_or(|end| end > whole) {
        return Err(CuError::INVALID_VALUE);
    }
    let mapping = map_at_new_place(physical)?;
    let mut space = space_mut();
    let opened = Opened {
        mapping,
        count: 1,
        of,
    };
    space.opened.insert(mapping + offset, opened);
    Ok(mapping + offset)
}

/// Ends what [`open_shared`] began.
pub(crate) fn close_shared(address: u64) -> Result {
    let mut space = space_mut();
    let opened = space
        .opened
        .get_mut(&address)
        .ok_or(CuError::INVALID_VALUE)?;
    opened.count -= 1;
    if opened.count > 0 {
        return Ok(());
    }
    let at = opened.mapping;
    space.opened.remove(&address);
    let gone = space.mapped.remove(&at);
    if let Some(mapping) = &gone {
        unmap_raw(at, mapping.bytes);
    }
    drop(space);
    drop(gone);
    Ok(())
}

/// A page that processes can share.
pub(crate) fn shared_page() -> Result<OwnedFd> {
    let wrong = |_| CuError::OUT_OF_MEMORY;
    let file = rustix::fs::memfd_create("event", rustix::fs::MemfdFlags::CLOEXEC).map_err(wrong)?;
    rustix::fs::ftruncate(&file, PAGE as u64).map_err(wrong)?;
    Ok(file)
}

const PAGE: usize = 4096;

/// The first words of such a page, for as long as the process lives.
pub(crate) fn shared_words(file: &OwnedFd) -> Result<&'static [AtomicU64; 2]> {
    let wrong = |_| CuError::INVALID_HANDLE;
    // A file of another kind, or too short, would end the process at an access.
    let size = rustix::fs::fstat(file).map_err(wrong)?.st_size;
    if size < PAGE as i64 {
        return Err(CuError::INVALID_HANDLE);
    }
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: adds a mapping where there was none; it is never unmapped.
    let at = unsafe { mmap(null_mut(), PAGE, prot, MapFlags::SHARED, file, 0) }.map_err(wrong)?;
    // SAFETY: a whole page is mapped there for good, and all that access it do so atomically.
    Ok(unsafe { &*at.cast::<[AtomicU64; 2]>() })
}

// Host memory

/// What pinning takes for each GiB: of memory that is allocated for it, and of the program's own, which is there
/// (320 to 340 ms and 32 to 35 ms on an H100's machine).
const PIN_NEW: Duration = Duration::from_millis(330);
const PIN: Duration = Duration::from_millis(34);

fn pinning(bytes: u64, each: Duration) -> Duration {
    each.mul_f64(bytes as f64 / (1_u64 << 30) as f64)
}

/// Allocates pinned host memory.
pub(crate) fn alloc_host(bytes: usize, flags: u32) -> Result<*mut c_void> {
    if bytes == 0 {
        return Err(CuError::INVALID_VALUE);
    }
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: adds a mapping where there was none.
    let at = unsafe { mmap_anonymous(null_mut(), bytes, prot, MapFlags::PRIVATE) }
        .map_err(|_| CuError::OUT_OF_MEMORY)?;
    let range = HostRange {
        bytes: bytes as u64,
        flags,
        owned: true,
    };
    std::thread::sleep(pinning(bytes as u64, PIN_NEW));
    space_mut().host.insert(at as u64, range);
    Ok(at)
}

/// Frees what [`alloc_host`] gave.
pub(crate) fn free_host(address: u64) -> Result {
    let mut space = space_mut();
    match space.host.get(&address) {
        Some(range) if range.owned => {
            unmap_raw(address, range.bytes);
            space.host.remove(&address);
            Ok(())
        }
        _ => Err(CuError::INVALID_VALUE),
    }
}

/// Lets the device reach memory of the program.
pub(crate) fn register_host(address: u64, bytes: u64, flags: u32) -> Result {
    let end = address.checked_add(bytes).ok_or(CuError::INVALID_VALUE)?;
    if address == 0 || bytes == 0 {
        return Err(CuError::INVALID_VALUE);
    }
    let mut space = space_mut();
    if space.host_range(address).is_some() || space.host.range(address..end).next().is_some() {
        return Err(CuError::HOST_MEMORY_ALREADY_REGISTERED);
    }
    let range = HostRange {
        bytes,
        flags,
        owned: false,
    };
    space.host.insert(address, range);
    drop(space);
    std::thread::sleep(pinning(bytes, PIN));
    Ok(())
}

/// Ends that.
pub(crate) fn unregister_host(address: u64) -> Result {
    let mut space = space_mut();
    match space.host.get(&address) {
        Some(range) if !range.owned => {
            space.host.remove(&address);
            Ok(())
        }
        _ => Err(CuError::HOST_MEMORY_NOT_REGISTERED),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(space: &mut Space) {
        let piece = Piece {
            device: 0,
            pool: 0,
            bytes: GRANULARITY,
            free: BTreeMap::from([(0, GRANULARITY)]),
        };
        space.pieces.insert(GRANULARITY, piece);
    }

    proptest::proptest! {
        /// Small allocations never overlap, and when all are freed their piece is whole again.
        #[test]
        fn small_allocations(ops in proptest::collection::vec((1..300_000u64, 0..8usize), 1..100)) {
            let mut space = Space::default();
            piece(&mut space);
            let mut live: Vec<(u64, u64)> = Vec::new();
            for (bytes, free) in ops {
                let units = bytes.next_multiple_of(UNIT);
                if let Some(at) = space.alloc_small(0, 1, 0, bytes, units) {
                    assert!(at % UNIT == 0 && at + bytes <= 2 * GRANULARITY);
                    for (other, length) in &live {
                        assert!(at + units <= *other || other + length <= at);
                    }
                    live.push((at, units));
                }
                if free < live.len() {
                    let (at, units) = live.swap_remove(free);
                    let empty = space.free_small(GRANULARITY, at, units);
                    assert_eq!(empty, live.is_empty());
                }
            }
            while let Some((at, units)) = live.pop() {
                assert_eq!(space.free_small(GRANULARITY, at, units), live.is_empty());
            }
        }
    }

    #[test]
    fn pinning_takes_its_part_of_a_gib() {
        assert_eq!(pinning(512 << 20, PIN), Duration::from_millis(17));
        assert_eq!(pinning(3 << 30, PIN_NEW), Duration::from_millis(990));
    }

    #[test]
    fn pinned_ranges_are_known_by_any_part() {
        let mut space = Space::default();
        let range = HostRange {
            bytes: 100,
            flags: 0,
            owned: false,
        };
        space.host.insert(1000, range);
        assert!(space.is_pinned(1000, 100) && space.is_pinned(1099, 1));
        assert!(!space.is_pinned(999, 2) && !space.is_pinned(1099, 2) && !space.is_pinned(1100, 1));
        assert!(!space.is_device(1000, 1));
        assert!(!space.is_device(u64::MAX, 2));
    }
}
