//! The program's device memory: what it was given, at which addresses, and how much of its lease that is.
//!
//! `cuMemAlloc` gives out memory that this library maps itself ([`crate::vmm`]), so that it can be moved away and
//! back without the program's doing ([`crate::swap`]). Small pieces share blocks. Whatever is not plain memory of one
//! device stays with the driver and is only counted: managed and stream-ordered memory. The physical
//! memory that a program handles itself moves where it is plain ([`crate::physical`]). Where mapping fails, the driver's own call is made.
//!
//! Before memory is made, it is taken from the lease ([`crate::lease`]); the daemon grants leases in batches, so this
//! is mostly a look at two numbers. Blocks that become empty are kept for the next allocation of their size, up to a batch. Beyond the tenant's limit the program gets CUDA's own error.

use std::{
    collections::{BTreeMap, HashMap},
    ffi::{c_int, c_void},
    sync::{
        Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Duration,
};

use gpumux_wire::{MEMORY_LIMIT_VARIABLE, Shim};

use crate::{
    attempt::{self, Refused, in_time},
    block::{Block, Departed, UNKNOWN},
    caches,
    driver::{self, AllocationProp, CUcontext, CUresult, SUCCESS, functions},
    gate, guard, ipc, lease,
    notice::say,
    physical::{self, Physical},
    pools::{self, Pools},
    ranges::{self, Allocation},
    swap,
    vmm::{self, CHUNK, GRANULE, OUT_OF_MEMORY},
    wake,
    work::{self, current_context, within},
};

/// Smaller allocations share a block of [`GRANULE`].
const SMALL: u64 = 1 << 20;
/// Alignment of small allocations and of rows: the driver's own.
const UNIT: u64 = 512;
/// Leases are asked for with so much in advance, and kept with as much unused; on small devices less.
const BATCH: u64 = 64 << 20;
/// At most this part of a device (as its reciprocal).
const BATCH_PART: u64 = 128;
/// After so many failures to map, the driver's own calls are made at once.
const MAX_FAILURES: u32 = 3;
/// Most devices that are told apart.
const MAX_DEVICES: usize = 32;

functions! {
    ctx_get_device c"cuCtxGetDevice" (*mut c_int);
    ctx_synchronize c"cuCtxSynchronize" ();
    ctx_from_green c"cuCtxFromGreenCtx" (*mut CUcontext, CUcontext);
    device_uuid c"cuDeviceGetUuid" (*mut [u8; 16], c_int);
    device_uuid_v2 c"cuDeviceGetUuid_v2" (*mut [u8; 16], c_int);
    device_total c"cuDeviceTotalMem_v2" (*mut usize, c_int);
}

/// What the driver keeps and this library only counts.
#[derive(Clone, Copy)]
struct Native {
    device: c_int,
    bytes: u64,
    context: u64,
    /// The number of the pool that it is from; 0: none.
    pool: u64,
}

/// One device, and the lease on it.
struct Device {
    uuid: String,
    total: u64,
    movable: Lease,
    pinned: Lease,
    /// Part of the movable that is on the host.
    away: u64,
    /// Nothing is mapped by this library from now on.
    native: bool,
    /// How often the daemon received what the process has of it.
    told: u64,
}

#[derive(Clone, Copy, Default)]
struct Lease {
    granted: u64,
    used: u64,
}

fn batch(total: u64) -> u64 {
    BATCH.min(total / BATCH_PART)
}

impl Lease {
    const fn unused(self) -> u64 {
        self.granted.saturating_sub(self.used)
    }
}

/// All of it.
#[derive(Default)]
pub(crate) struct Space {
    pub(crate) blocks: BTreeMap<u64, Block>,
    /// By address.
    natives: HashMap<u64, Native>,
    /// Memory that the program handles itself, by its handles.
    pub(crate) physicals: BTreeMap<u64, Physical>,
    /// What other processes may open, by token.
    pub(crate) exports: BTreeMap<u128, ipc::Export>,
    /// Other processes' memory that is open here, by address.
    pub(crate) imports: BTreeMap<u64, ipc::Import>,
    /// What is being opened, by token, and whether it will be accounted to this process.
    pub(crate) opening: Option<(u128, bool)>,
    pub(crate) pools: Pools,
    devices: BTreeMap<c_int, Device>,
    /// Freed while a capture went on: nothing can be waited for then.
    deferred: Vec<u64>,
    /// Blocks with nothing in them, for the next allocation like them. They count as used.
    spares: Vec<u64>,
}

static SPACE: Mutex<Option<Space>> = Mutex::new(None);
/// Something was counted.
static USED: AtomicBool = AtomicBool::new(false);
/// This process was forked from one that counted: CUDA is unusable here, and so are the tables.
static SPOILED: AtomicBool = AtomicBool::new(false);
/// Whatever the process gets stays where it is.
static STAYS: AtomicBool = AtomicBool::new(false);
static FAILURES: AtomicU32 = AtomicU32::new(0);

/// Works on the tables. Never while waiting for anything.
pub(crate) fn with<R>(work: impl FnOnce(&mut Space) -> R) -> R {
    let mut guard: MutexGuard<'_, Option<Space>> = guard::lock(&SPACE);
    work(guard.get_or_insert_default())
}

/// After a fork, in the child.
pub(crate) fn in_child() {
    if USED.load(Ordering::Acquire) {
        SPOILED.store(true, Ordering::Release);
    }
}

pub(crate) fn off() -> bool {
    SPOILED.load(Ordering::Acquire) || !driver::enabled() || !wake::has_agent()
}

/// Whether `GPUMUX_MEMORY=native` leaves all memory with the driver.
fn stays_native() -> bool {
    static NATIVE: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
    *NATIVE.get_or_init(|| std::env::var_os("GPUMUX_MEMORY").is_some_and(|value| value == "native"))
}

/// As NVML writes it. The driver's older function gives the GPU's UUID, its later one that of a MIG instance.
fn uuid_text(gpu: [u8; 16], bytes: [u8; 16]) -> String {
    let prefix = if gpu == bytes { "GPU" } else { "MIG" };
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let parts = [
        &hex[..8],
        &hex[8..12],
        &hex[12..16],
        &hex[16..20],
        &hex[20..],
    ];
    format!("{prefix}-{}", parts.join("-"))
}

/// The current context's device, once it is known to the tables.
pub(crate) fn current_device() -> Option<c_int> {
    let mut device = -1;
    // SAFETY: a place to write.
    if unsafe { ctx_get_device()?(&raw mut device) } != SUCCESS {
        return None;
    }
    known_device(device)
}

/// The UUID of the current context's device.
pub(crate) fn current_uuid() -> Option<String> {
    let device = current_device()?;
    with(|space| Some(space.devices.get(&device)?.uuid.clone()))
}

/// A device, once it is known to the tables.
pub(crate) fn known_device(device: c_int) -> Option<c_int> {
    if with(|space| space.devices.contains_key(&device)) {
        return Some(device);
    }
    let (mut gpu, mut uuid, mut total) = ([0; 16], [0; 16], 0);
    // SAFETY: places to write; a device that does not exist is refused.
    let known = unsafe {
        device_uuid_v2().or_else(device_uuid)?(&raw mut uuid, device) == SUCCESS
            && device_uuid().or_else(device_uuid_v2)?(&raw mut gpu, device) == SUCCESS
            && device_total()?(&raw mut total, device) == SUCCESS
    };
    known.then(|| {
        USED.store(true, Ordering::Release);
        with(|space| {
            if space.devices.len() < MAX_DEVICES {
                space.devices.entry(device).or_insert_with(|| Device {
                    uuid: uuid_text(gpu, uuid),
                    total: total as u64,
                    movable: Lease::default(),
                    pinned: Lease::default(),
                    away: 0,
                    native: stays_native() || STAYS.load(Ordering::Acquire),
                    told: 0,
                });
            }
        });
    });
    with(|space| space.devices.contains_key(&device)).then_some(device)
}

/// Does something with the tables and sends the daemon what the process's memory is now, before any other thread does.
pub(crate) fn tell_with<I: IntoIterator<Item = Shim>>(work: impl FnOnce(&mut Space) -> I) {
    with(|space| work(space).into_iter().for_each(lease::tell));
}

// ---- The lease -----------------------------------------------------------------------------------

impl Device {
    fn lease(&mut self, pinned: bool) -> &mut Lease {
        match pinned {
            true => &mut self.pinned,
            false => &mut self.movable,
        }
    }

    /// Gives back what is not used.
    const fn trim(&mut self) {
        self.movable.granted = self.movable.used;
        self.pinned.granted = self.pinned.used;
    }

    fn holds(&mut self) -> Shim {
        self.told += 1;
        Shim::Holds {
            device: self.uuid.clone(),
            total: self.total,
            movable: self.movable.granted.saturating_sub(self.away),
            pinned: self.pinned.granted,
            swapped: self.away,
        }
    }
}

/// Takes so much from the lease, which grows if it must. Not inside the gate: this may wait for others to be moved.
pub(crate) fn take(device: c_int, bytes: u64, pinned: bool) -> bool {
    take_within(lease::ANSWER, device, bytes, pinned)
}

/// The same, waited for no longer than this.
pub(crate) fn take_within(wait: Duration, device: c_int, bytes: u64, pinned: bool) -> bool {
    // What is there is taken at once, so that no thread gives it back while more is requested.
    let found = with(|space| {
        let known = space.devices.get_mut(&device)?;
        let lease = known.lease(pinned);
        let pocket = lease.unused().min(bytes);
        lease.used += pocket;
        Some((pocket, known.uuid.clone(), known.total, known.told))
    });
    let Some((pocket, uuid, total, told)) = found else {
        return true;
    };
    let need = bytes - pocket;
    if need == 0 {
        return true;
    }
    if wait.is_zero() {
        give(device, pocket, pinned);
        return false;
    }
    // What is kept for later is of use now.
    if !pinned && drop_spares(|spare| spare.device == device) {
        with(|space| {
            if let Some(known) = space.devices.get_mut(&device) {
                known.movable.used = known.movable.used.saturating_sub(pocket);
            }
        });
        return take_within(wait, device, bytes, pinned);
    }
    caches::look();
    let ask = |ticket| Shim::Ask {
        ticket,
        device: uuid,
        total,
        need,
        want: need.saturating_add(batch(total)),
        pinned,
    };
    // When no daemon manages this process, it grants itself what it needs.
    let given = lease::ask_within(wait, ask).map_or(need, |(bytes, _)| bytes);
    with(|space| {
        let Some(known) = space.devices.get_mut(&device) else {
            return true;
        };
        let lease = known.lease(pinned);
        lease.granted += given;
        let enough = given >= need;
        match enough {
            true => lease.used += need,
            false => lease.used -= pocket.min(lease.used),
        }
        // What was said meanwhile was without this.
        if given > 0 && known.told != told {
            lease::tell(known.holds());
        }
        enough
    })
}

/// Gives so much back.
pub(crate) fn give(device: c_int, bytes: u64, pinned: bool) {
    tell_with(|space| space.give(device, bytes, pinned));
}

/// Frees the spare blocks that are meant. Whether there were any.
pub(crate) fn drop_spares(meant: impl Fn(&Block) -> bool) -> bool {
    let dropped: Vec<(u64, Block)> = with(|space| {
        let Space { spares, blocks, .. } = space;
        let gone = spares.extract_if(.., |at| blocks.get(at).is_none_or(&meant));
        let gone: Vec<u64> = gone.collect();
        let blocks = gone.into_iter().map(|at| (at, blocks.remove(&at)));
        blocks
            .filter_map(|(at, block)| Some((at, block?)))
            .collect()
    });
    for (at, block) in &dropped {
        let_go(*at, block);
    }
    !dropped.is_empty()
}

/// Frees a block that is in the tables no more.
pub(crate) fn let_go(at: u64, block: &Block) {
    block.unback(at);
    vmm::unreserve(at, block.bytes);
    tell_with(|space| {
        // What is kept of the lease is for memory that moves.
        let stayed = block.stays();
        let moves = stayed.then(|| space.book_as_movable(block.device, block.held()));
        let scratch = block
            .elastic
            .and_then(|_| space.give(block.device, block.piece, true));
        let given = space.give(block.device, block.held(), false);
        moves.flatten().into_iter().chain(scratch).chain(given)
    });
}

/// Gives back all that is granted and not used.
pub(crate) fn trim() {
    pools::trim();
    drop_spares(|_| true);
    tell_with(|space| {
        space.devices.values_mut().for_each(Device::trim);
        space.holds()
    });
}

/// The ordinal of a device of which the process has memory.
pub(crate) fn ordinal(uuid: &str) -> Option<c_int> {
    with(|space| {
        let mut devices = space.devices.iter();
        let found = devices.find(|(_, device)| device.uuid == uuid);
        found.map(|(ordinal, _)| *ordinal)
    })
}

impl Space {
    /// Gives so much back. What the daemon must receive.
    pub(crate) fn give(&mut self, device: c_int, bytes: u64, pinned: bool) -> Option<Shim> {
        let known = self.devices.get_mut(&device)?;
        let keep = batch(known.total);
        let lease = known.lease(pinned);
        lease.used = lease.used.saturating_sub(bytes);
        // Only now and then, so that a program that frees and allocates in turn sends no requests.
        if lease.unused() <= keep * 2 {
            return None;
        }
        lease.granted = lease.used + keep;
        Some(known.holds())
    }

    pub(crate) fn holds(&mut self) -> Vec<Shim> {
        self.devices.values_mut().map(Device::holds).collect()
    }

    /// Whether nothing of a device is mapped by this library any more.
    pub(crate) fn is_native(&self, device: c_int) -> bool {
        self.devices.get(&device).is_none_or(|it| it.native)
    }

    /// A device's UUID, as NVML writes it.
    pub(crate) fn uuid(&self, device: c_int) -> Option<String> {
        Some(self.devices.get(&device)?.uuid.clone())
    }

    /// A chunk of the block at this address has left the device.
    pub(crate) fn leave(
        &mut self,
        at: u64,
        index: usize,
        host: Vec<(usize, usize)>,
    ) -> Option<Departed> {
        let block = self.blocks.get_mut(&at)?;
        let (departed, device) = (block.left(at, index, host)?, block.device);
        if let Some(elastic) = block.elastic.filter(|_| departed.dropped() > 0) {
            elastic.table.count_taken();
        }
        self.drop_bytes(device, departed.dropped());
        Some(departed)
    }

    /// So much of a device is freed that the daemon is to have back: it receives that with the next message.
    pub(crate) fn drop_bytes(&mut self, device: c_int, bytes: u64) {
        if let Some(known) = self.devices.get_mut(&device).filter(|_| bytes > 0) {
            known.movable.used = known.movable.used.saturating_sub(bytes);
            known.movable.granted = known.movable.granted.saturating_sub(bytes);
        }
    }

    /// Whether there is nothing in this block.
    pub(crate) fn is_spare(&self, at: u64) -> bool {
        self.spares.contains(&at)
    }

    /// So much of a device's memory is on the host now.
    pub(crate) fn set_away(&mut self) {
        for (ordinal, device) in &mut self.devices {
            let own = self.blocks.values().filter(|it| it.device == *ordinal);
            let blocks = own.map(Block::away);
            let own = self.physicals.values().filter(|it| it.device == *ordinal);
            let physicals = own.filter(|it| it.is_away()).map(|it| it.bytes);
            device.away = blocks.chain(physicals).sum();
            if device.away > 0 {
                device.trim();
            }
        }
    }
}

// ---- Allocating ----------------------------------------------------------------------------------

/// `cuMemAlloc`
///
/// # Safety
/// `out` must be what the program passed.
pub(crate) unsafe fn alloc(out: *mut u64, bytes: usize, real: impl Fn() -> CUresult) -> CUresult {
    // SAFETY: the caller's.
    unsafe { alloc_bytes(out, Some(bytes as u64), real, || ()) }
}

/// `cuMemAllocPitch`
///
/// # Safety
/// `out` and `pitch` must be what the program passed.
pub(crate) unsafe fn alloc_pitch(
    out: *mut u64,
    pitch: *mut usize,
    width: usize,
    height: usize,
    element: u32,
    real: impl Fn() -> CUresult,
) -> CUresult {
    let row = width.checked_next_multiple_of(UNIT as usize);
    let row = row.filter(|_| matches!(element, 4 | 8 | 16) && !pitch.is_null());
    let bytes = row
        .and_then(|row| row.checked_mul(height))
        .map(|it| it as u64);
    // SAFETY: the caller's; written only when the program passed a place.
    unsafe { alloc_bytes(out, bytes, real, || *pitch = row.unwrap_or(0)) }
}

/// # Safety
/// `out` must be what the program passed.
unsafe fn alloc_bytes(
    out: *mut u64,
    bytes: Option<u64>,
    real: impl Fn() -> CUresult,
    done: impl FnOnce(),
) -> CUresult {
    let plain = bytes.filter(|bytes| *bytes != 0 && *bytes < 1 << 46 && !out.is_null());
    let (Some(bytes), false) = (plain, off()) else {
        return gate::through(real);
    };
    let (Some(device), Some(context)) = (current_device(), current_context()) else {
        return gate::through(real);
    };
    if let Some(error) = broken() {
        return error;
    }
    free_deferred();
    let native = with(|space| space.is_native(device));
    // Without a daemon it would never move; one that was lost may come back.
    if native || !lease::is_managed() {
        // SAFETY: as above.
        return unsafe { count_native(device, bytes, out, real) };
    }
    match in_time(None, || map(device, context, bytes)) {
        Ok(address) => {
            // SAFETY: the program's place, which is not null.
            unsafe { *out = address };
            done();
            SUCCESS
        }
        Err(Refused::ByAccounting | Refused::ByDriver(OUT_OF_MEMORY)) => OUT_OF_MEMORY,
        Err(Refused::ByDriver(error)) => {
            failed(error);
            // SAFETY: as above.
            unsafe { count_native(device, bytes, out, real) }
        }
    }
}

/// What the current context answers to everything, since a kernel of it has failed: nothing is handed out in it any more,
/// not even of what is kept.
fn broken() -> Option<CUresult> {
    // To wait would end a capture.
    if !work::has_failed() || work::is_capturing_anywhere() {
        return None;
    }
    let wait = ctx_synchronize()?;
    // SAFETY: no arguments.
    let result = gate::through(|| unsafe { wait() });
    work::is_fatal(result).then_some(result)
}

/// Mapping has failed other than for want of memory.
#[cold]
fn failed(error: CUresult) {
    let failures = FAILURES.fetch_add(1, Ordering::AcqRel) + 1;
    if failures == 1 {
        say(format_args!(
            "cannot map device memory (the driver answers {error}): it will not be movable"
        ));
    }
    if failures >= MAX_FAILURES {
        with(|space| {
            for device in space.devices.values_mut() {
                device.native = true;
            }
        });
    }
}

/// Memory of the lease, mapped.
fn map(device: c_int, context: u64, bytes: u64) -> Result<u64, Refused> {
    let small = bytes < SMALL;
    let size = bytes.next_multiple_of(GRANULE);
    let there = with(|space| match small {
        true => space.carve(device, context, bytes),
        false => space.reuse(device, context, bytes, size),
    });
    if let Some(found) = there {
        return Ok(found);
    }
    if !take(device, size, false) {
        return Err(Refused::ByAccounting);
    }
    let back = || {
        let at = vmm::reserve(size)?;
        let chunks =
            vmm::back(at, size, CHUNK, device).inspect_err(|_| vmm::unreserve(at, size))?;
        let free = small.then(|| BTreeMap::from([(0, size)]));
        with(|space| {
            let block = Block::new((size, device, context), chunks, free);
            space.blocks.insert(at, block);
            if small {
                return space.carve_from(at, context, bytes).ok_or(OUT_OF_MEMORY);
            }
            let allocation = Allocation {
                bytes,
                block: at,
                context,
            };
            ranges::write(|it| it.allocations.insert(at, allocation));
            Ok(at)
        })
    };
    let mapped = attempt::make(None, || gate::through(back));
    mapped.inspect_err(|_| give(device, size, false))
}

impl Space {
    /// A small allocation in a block that is there.
    fn carve(&mut self, device: c_int, context: u64, bytes: u64) -> Option<u64> {
        let units = bytes.next_multiple_of(UNIT);
        let fits = |block: &Block| {
            let free = block.free.as_ref();
            block.device == device
                && block.context == context
                && free.is_some_and(|free| free.values().any(|length| *length >= units))
        };
        let at = *self.blocks.iter().find(|(_, block)| fits(block))?.0;
        self.carve_from(at, context, bytes)
    }

    /// A spare block of this size.
    fn reuse(&mut self, device: c_int, context: u64, bytes: u64, size: u64) -> Option<u64> {
        let fits = |at: &u64| {
            self.blocks.get(at).is_some_and(|block| {
                (block.device, block.context, block.bytes) == (device, context, size)
                    && block.free.is_none()
            })
        };
        let place = self.spares.iter().position(fits)?;
        let at = self.spares.swap_remove(place);
        let allocation = Allocation {
            bytes,
            block: at,
            context,
        };
        ranges::write(|it| it.allocations.insert(at, allocation));
        Some(at)
    }

    fn carve_from(&mut self, at: u64, context: u64, bytes: u64) -> Option<u64> {
        self.spares.retain(|spare| *spare != at);
        let units = bytes.next_multiple_of(UNIT);
        let free = self.blocks.get_mut(&at)?.free.as_mut()?;
        let fit = free.iter().find(|(_, length)| **length >= units);
        let (offset, length) = fit.map(|(offset, length)| (*offset, *length))?;
        free.remove(&offset);
        if length > units {
            free.insert(offset + units, length - units);
        }
        let allocation = Allocation {
            bytes,
            block: at,
            context,
        };
        ranges::write(|it| it.allocations.insert(at + offset, allocation));
        Some(at + offset)
    }

    /// Takes an allocation out; its block too if nothing else is in that.
    fn remove(&mut self, address: u64) -> Option<(u64, Block)> {
        let allocation = ranges::write(|it| it.allocations.remove(&address))?;
        let at = allocation.block;
        self.end_exports(|export| export.is_of(address));
        let block = self.blocks.get_mut(&at)?;
        if let Some(free) = &mut block.free {
            let (mut offset, mut length) = (address - at, allocation.bytes.next_multiple_of(UNIT));
            if let Some(after) = free.remove(&(offset + length)) {
                length += after;
            }
            if let Some((before, size)) = free.range(..offset).next_back()
                && before + size == offset
            {
                (offset, length) = (*before, length + size);
            }
            free.insert(offset, length);
            let begin = address - at;
            block.forget_range(&(begin..begin + allocation.bytes));
            if length != block.bytes {
                return None;
            }
        }
        // Other processes that use it keep it.
        self.drop_exports(at);
        match self.spare(at) {
            true => None,
            false => self.blocks.remove(&at).map(|block| (at, block)),
        }
    }

    /// A context's memory goes with it: this library's, and what is only counted. What comes from a pool stays until it is freed.
    fn take_context(&mut self, context: u64) -> (Vec<(u64, Block)>, Vec<Native>) {
        let own = |it: &Native| it.context == context && it.pool == 0;
        let natives = self.natives.extract_if(|_, it| own(it));
        let natives = natives.map(|(_, it)| it).collect();
        ranges::write(|it| it.allocations.retain(|_, it| it.context != context));
        let blocks = self.blocks.extract_if(.., |_, it| it.context == context);
        let blocks: Vec<_> = blocks.collect();
        for (at, _) in &blocks {
            self.drop_exports(*at);
        }
        let Self {
            spares,
            blocks: left,
            ..
        } = self;
        spares.retain(|at| left.contains_key(at));
        (blocks, natives)
    }

    /// What was of one context is another's.
    fn hand_over(&mut self, from: u64, to: u64) {
        let blocks = self.blocks.values_mut().map(|it| &mut it.context);
        let natives = self.natives.values_mut().map(|it| &mut it.context);
        let physicals = self.physicals.values_mut().map(|it| &mut it.context);
        let imports = self.imports.values_mut().map(|it| &mut it.context);
        let all = blocks.chain(natives).chain(physicals).chain(imports);
        all.filter(|it| **it == from).for_each(|it| *it = to);
        ranges::write(|it| {
            let all = (it.allocations.values_mut()).chain(it.opened.values_mut());
            let all = all.map(|it| &mut it.context);
            all.filter(|it| **it == from).for_each(|it| *it = to);
        });
    }

    /// Keeps an empty block, if there are not too many.
    fn spare(&mut self, at: u64) -> bool {
        let Some(block) = self.blocks.get(&at) else {
            return false;
        };
        let Some(device) = self.devices.get(&block.device) else {
            return false;
        };
        let own = self.spares.iter().filter_map(|at| self.blocks.get(at));
        let own = own.filter(|spare| spare.device == block.device);
        let kept: u64 = own.map(|spare| spare.bytes).sum();
        let keep = !block.stays()
            && block.elastic.is_none()
            && !device.native
            && block.away() == 0
            && kept + block.bytes <= batch(device.total);
        if keep && let Some(block) = self.blocks.get_mut(&at) {
            block.forget_advice();
            self.spares.push(at);
        }
        keep
    }
}

/// The allocation of ours that an address lies in, with its start.
pub(crate) fn find(address: u64) -> Option<(u64, Allocation)> {
    ranges::read(|it| it.allocation_of(address))
}

/// The context of an allocation of ours that begins there.
fn context_of(address: u64) -> Option<u64> {
    ranges::read(|it| it.allocations.get(&address).map(|it| it.context))
}

/// `cuMemFree`
pub(crate) fn free(address: u64, real: impl FnOnce() -> CUresult) -> CUresult {
    if address == 0 || off() {
        return gate::through(real);
    }
    let Some(context) = context_of(address) else {
        return release_native(address, real);
    };
    if work::is_capturing_anywhere() {
        defer(address);
        return SUCCESS;
    }
    free_deferred();
    let result = settle(context);
    release(address);
    result
}

/// Waits until nothing of a context can use memory that is freed, as the driver's own call does.
pub(crate) fn settle(context: u64) -> CUresult {
    // If memory is away, this brings it back: else nothing would end.
    gate::through(|| ());
    within(context, || {
        let wait = || match ctx_synchronize() {
            // SAFETY: no arguments.
            Some(wait) => unsafe { wait() },
            None => SUCCESS,
        };
        work::observe_context(context as CUcontext, wait)
    })
    // The context is gone, and all its work.
    .unwrap_or(SUCCESS)
}

fn release(address: u64) {
    gate::through(|| {
        if let Some((at, block)) = with(|space| space.remove(address)) {
            let_go(at, &block);
        }
    });
}

/// Frees what could not be freed during a capture.
fn free_deferred() {
    if work::is_capturing_anywhere() {
        return;
    }
    let deferred = with(|space| std::mem::take(&mut space.deferred));
    for address in deferred {
        if let Some(context) = context_of(address) {
            let _ = settle(context);
            release(address);
        }
        ipc::close_deferred(address);
    }
}

/// Has what is freed at this address freed when no capture goes on any more.
pub(crate) fn defer(address: u64) {
    with(|space| space.deferred.push(address));
}

/// `cuCtxDestroy`: a context's memory goes with it.
pub(crate) fn destroy_context(context: CUcontext, real: impl FnOnce() -> CUresult) -> CUresult {
    let gone = |result: &CUresult| (*result == SUCCESS).then_some(context as u64);
    end_context(|| work::destroy_context(context, real), gone)
}

/// `cuGreenCtxDestroy`: its device's primary context has what was allocated in it, while that one is there.
pub(crate) fn destroy_green(green: CUcontext, real: impl FnOnce() -> CUresult) -> CUresult {
    let counted = !off() && USED.load(Ordering::Acquire);
    let mut context = std::ptr::null_mut();
    // SAFETY: the program's handle, and a place to write.
    let asked = || unsafe { ctx_from_green()?(&raw mut context, green) == SUCCESS }.then_some(());
    let known = counted.then(asked).flatten().and_then(|()| {
        let device = within(context as u64, current_device).flatten()?;
        Some((context as u64, device, work::primary_context(device)?))
    });
    let gone = |result: &CUresult| {
        let (context, device, primary) = known.filter(|_| *result == SUCCESS)?;
        if work::primary_context(device) != Some(primary) {
            return Some(context);
        }
        with(|space| space.hand_over(context, primary));
        None
    };
    end_context(|| work::destroy_context(green, real), gone)
}

/// `cuDevicePrimaryCtxRelease` and `Reset`
pub(crate) fn release_primary(device: c_int, real: impl FnOnce() -> CUresult) -> CUresult {
    let counted = !off() && USED.load(Ordering::Acquire);
    let context = counted.then(|| work::primary_context(device)).flatten();
    let gone = |_: &CUresult| context.filter(|_| work::primary_context(device).is_none());
    end_context(|| work::release_primary(device, real), gone)
}

/// A call after which a context may be gone, with all its streams and work.
fn end_context(
    real: impl FnOnce() -> CUresult,
    gone: impl FnOnce(&CUresult) -> Option<u64>,
) -> CUresult {
    // The driver may end a context by calls of its own exports.
    if off() || gate::is_nested() {
        return gate::through(real);
    }
    gate::through(|| {
        // Still inside, or a mover would find no thread there and enter a context that is no more.
        let (result, ended) = swap::without_preparing(|| {
            let result = pools::without_use(real);
            let gone = gone(&result).filter(|_| USED.load(Ordering::Acquire));
            let ended = gone.map(|context| {
                swap::forget_context(context);
                physical::forget_context(context);
                let (blocks, natives) = with(|space| space.take_context(context));
                (context, blocks, natives)
            });
            (result, ended)
        });
        let is_over = ended.is_some();
        let (context, blocks, natives) = ended.unwrap_or_default();
        ipc::forget_context(context);
        for (at, block) in blocks {
            let_go(at, &block);
        }
        give_natives(natives);
        if is_over {
            pools::context_ended();
        }
        result
    })
}

// ---- What the program knows of its memory --------------------------------------------------------

/// `gpumux_advise`
pub(crate) fn advise(address: u64, bytes: u64, advice: c_int) -> c_int {
    if off() {
        return UNKNOWN;
    }
    let advised = with(|space| {
        let (start, allocation) = find(address)?;
        let end = (start + allocation.bytes).min(address.saturating_add(bytes));
        let at = allocation.block;
        Some(
            space
                .blocks
                .get_mut(&at)?
                .advise(address - at..end - at, advice),
        )
    });
    advised.unwrap_or(UNKNOWN)
}

/// See `include/gpumux.h`.
#[unsafe(no_mangle)]
extern "C" fn gpumux_advise(address: u64, bytes: u64, advice: c_int) -> c_int {
    std::panic::catch_unwind(|| advise(address, bytes, advice)).unwrap_or(UNKNOWN)
}

// ---- What stays with the driver ------------------------------------------------------------------

/// A call of the driver, inside the gate.
fn through(real: impl Fn() -> CUresult) -> Result<(), CUresult> {
    match gate::through(real) {
        SUCCESS => Ok(()),
        error => Err(error),
    }
}

/// Has the driver give out memory, booked as what does not move.
fn make_native(device: c_int, bytes: u64, real: impl Fn() -> CUresult) -> Result<(), CUresult> {
    let made = in_time(None, || {
        if !take(device, bytes, true) {
            return Err(Refused::ByAccounting);
        }
        let made = attempt::make(None, || through(&real));
        made.inspect_err(|_| give(device, bytes, true))
    });
    made.map_err(Refused::error)
}

/// Counts what the driver gives out itself.
///
/// # Safety
/// `out` must be where `real` writes what it gives; if it is null, `real` fails.
unsafe fn count_native(
    device: c_int,
    bytes: u64,
    out: *mut u64,
    real: impl Fn() -> CUresult,
) -> CUresult {
    if let Err(result) = make_native(device, bytes, real) {
        return result;
    }
    // SAFETY: the driver has just written there.
    note_native(unsafe { *out }, device, bytes, 0);
    SUCCESS
}

/// Notes what the driver has given out at an address.
fn note_native(at: u64, device: c_int, bytes: u64, pool: u64) {
    let native = Native {
        device,
        bytes,
        context: current_context().unwrap_or(0),
        pool,
    };
    // What had this address before has gone unseen.
    give_natives(with(|space| space.natives.insert(at, native)));
}

fn give_natives(gone: impl IntoIterator<Item = Native>) {
    for it in gone {
        match it.pool != 0 && with(|space| space.put_back(it.pool, it.bytes)) {
            true => pools::freed(),
            false => give(it.device, it.bytes, true),
        }
    }
}

/// A stream-ordered allocation, from a pool that the program names or the device's.
///
/// # Safety
/// `out` must be what the program passed.
pub(crate) unsafe fn alloc_pooled(
    out: *mut u64,
    bytes: usize,
    pool: Option<u64>,
    real: impl Fn() -> CUresult,
) -> CUresult {
    // What is captured allocates when its graph runs, and is not seen.
    let counted = !off() && bytes != 0 && !work::is_capturing_anywhere();
    let current = counted.then(current_device).flatten();
    let place = |current| match pool {
        Some(pool) => Some((pools::place(pool).unwrap_or(current), pool)),
        None => Some((current, pools::of_device(current)?)),
    };
    let place = current.and_then(place);
    if place.is_some_and(|(device, _)| device == pools::ELSEWHERE) {
        return gate::through(real);
    }
    let known = |(device, pool)| Some((known_device(device)?, pool));
    let Some((device, pool)) = place.and_then(known) else {
        // SAFETY: the caller's.
        return unsafe { alloc_native(out, bytes, real) };
    };
    let bytes = bytes as u64;
    let made = in_time(None, || {
        let drawn = pools::take(pool, device, bytes).ok_or(Refused::ByAccounting)?;
        match attempt::make(None, || through(&real)) {
            Ok(()) => Ok(drawn),
            Err(refused) => {
                drawn.give();
                Err(refused)
            }
        }
    });
    match made {
        Ok(drawn) => {
            // SAFETY: the driver has just written there.
            note_native(unsafe { *out }, device, bytes, drawn.pool);
            drawn.grown();
            SUCCESS
        }
        Err(refused) => refused.error(),
    }
}

/// An allocation that the driver keeps: managed memory.
///
/// # Safety
/// `out` must be what the program passed.
pub(crate) unsafe fn alloc_native(
    out: *mut u64,
    bytes: usize,
    real: impl Fn() -> CUresult,
) -> CUresult {
    // What is captured allocates when its graph runs, and is not seen.
    let counted = !off() && bytes != 0 && !work::is_capturing_anywhere();
    match counted.then(current_device).flatten() {
        // SAFETY: the caller's.
        Some(device) => unsafe { count_native(device, bytes as u64, out, real) },
        None => gate::through(real),
    }
}

/// `CUDA_ARRAY3D_DESCRIPTOR`; that of flat arrays lacks depth and flags.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ArrayShape {
    pub(crate) width: usize,
    pub(crate) height: usize,
    pub(crate) depth: usize,
    pub(crate) format: u32,
    pub(crate) channels: u32,
    pub(crate) flags: u32,
}

/// The head of it that flat arrays have.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct FlatShape {
    width: usize,
    height: usize,
    format: u32,
    channels: u32,
}

impl From<FlatShape> for ArrayShape {
    fn from(it: FlatShape) -> Self {
        Self {
            width: it.width,
            height: it.height,
            format: it.format,
            channels: it.channels,
            ..Self::default()
        }
    }
}

impl ArrayShape {
    /// About how much memory an array of so many levels takes: the driver pads rows and levels by what it does not tell. None: the
    /// program maps memory to it itself (sparse and deferred arrays).
    fn bytes(&self, levels: u32) -> u64 {
        /// `CUDA_ARRAY3D_SPARSE` and `CUDA_ARRAY3D_DEFERRED_MAPPING`
        const UNBACKED: u32 = 0x40 | 0x80;
        if self.flags & UNBACKED != 0 {
            return 0;
        }
        // `CU_AD_FORMAT_…`: 8 bits, 16 bits; what is packed or compressed takes at most as much as 32 bits.
        let channel = match self.format {
            0x01 | 0x08 => 1,
            0x02 | 0x09 | 0x10 => 2,
            _ => 4,
        };
        let extent = |size: usize, level: u32| (size as u64 >> level).max(1);
        let level = |n| {
            // The depth of layers does not shrink; to count them in full errs to the safe side.
            let area = extent(self.width, n).saturating_mul(extent(self.height, n));
            area.saturating_mul(extent(self.depth, 0))
                .saturating_mul(u64::from(self.channels.max(1)) * channel)
        };
        (0..levels.clamp(1, 32))
            .map(level)
            .fold(0, u64::saturating_add)
    }
}

/// `cuArrayCreate` and its like: the driver has the memory, and it is counted by the array's handle.
///
/// # Safety
/// The arguments must be what the program passed.
pub(crate) unsafe fn create_array<S: Copy + Into<ArrayShape>>(
    out: *mut u64,
    shape: *const S,
    levels: u32,
    real: impl Fn() -> CUresult,
) -> CUresult {
    // SAFETY: a program that passes no shape gets the driver's error.
    let bytes = unsafe { shape.as_ref() }.map_or(0, |it| (*it).into().bytes(levels));
    if out.is_null() || bytes == 0 || off() {
        return gate::through(real);
    }
    match current_device() {
        // SAFETY: the caller's.
        Some(device) => unsafe { count_native(device, bytes, out, real) },
        None => gate::through(real),
    }
}

/// `cuArrayDestroy`, `cuMipmappedArrayDestroy`
pub(crate) fn destroy_array(array: u64, real: impl FnOnce() -> CUresult) -> CUresult {
    release_native(array, real)
}

/// `cuMemCreate`
///
/// # Safety
/// The arguments must be what the program passed.
pub(crate) unsafe fn create(
    out: *mut u64,
    bytes: usize,
    prop: *const AllocationProp,
    flags: u64,
    real: impl Fn() -> CUresult,
) -> CUresult {
    // What the driver makes for itself has its own handle, and it may hold a lock: no request can be sent.
    if gate::is_nested() {
        return real();
    }
    // SAFETY: a program that passes no properties gets the driver's error.
    let prop = unsafe { prop.as_ref() };
    // `CU_MEM_LOCATION_TYPE_DEVICE`; memory of the host belongs to no lease.
    let prop = prop.filter(|it| it.location.kind == 1 && !off());
    let known = prop.and_then(|prop| Some((prop, known_device(prop.location.id)?)));
    let Some((prop, device)) = known else {
        return gate::through(real);
    };
    let bytes = bytes as u64;
    let native = with(|space| space.devices.get(&device).is_none_or(|it| it.native));
    let plain = !native && !out.is_null() && physical::may_move(bytes, prop, flags);
    // It is moved in this context: that must be of its device.
    let plain = plain && current_device() == Some(device);
    let Some(context) = current_context().filter(|_| plain && lease::is_managed()) else {
        return match make_native(device, bytes, real) {
            Ok(()) => {
                // SAFETY: the driver has just written there.
                physical::counted(unsafe { *out }, bytes, *prop);
                SUCCESS
            }
            Err(result) => result,
        };
    };
    let make = || {
        let result = real();
        if result == SUCCESS {
            // SAFETY: the driver has just written there.
            unsafe { *out = physical::made(*out, bytes, context, *prop) };
        }
        result
    };
    let made = in_time(None, || {
        if !take(device, bytes, false) {
            return Err(Refused::ByAccounting);
        }
        let made = attempt::make(None, || through(make));
        made.inspect_err(|_| give(device, bytes, false))
    });
    made.map_or_else(Refused::error, |()| SUCCESS)
}

/// `cuMemRelease`
pub(crate) fn release_handle(handle: u64, real: impl FnOnce() -> CUresult) -> CUresult {
    match physical::release(handle) {
        Some(result) => result,
        None => gate::through(real),
    }
}

/// `cuMemFreeAsync`
pub(crate) fn free_async(address: u64, real: impl FnOnce() -> CUresult) -> CUresult {
    // Ours may be freed that way too: the driver has no pool for it.
    match !off() && context_of(address).is_some() {
        true => free(address, real),
        false => release_native(address, real),
    }
}

fn release_native(address: u64, real: impl FnOnce() -> CUresult) -> CUresult {
    let result = gate::through(real);
    if result == SUCCESS && !off() {
        give_natives(with(|space| space.natives.remove(&address)));
    }
    result
}

/// The program takes hold of physical memory behind an address: that stays where it is from now on.
pub(crate) fn pin(address: u64, bytes: u64, real: impl FnOnce() -> CUresult) -> CUresult {
    if off() {
        return gate::through(real);
    }
    gate::through(|| {
        tell_with(|space| {
            let (_, allocation) = find(address)?;
            space.pin(allocation.block)
        });
        physical::pin(address, bytes);
        real()
    })
}

/// All that the process has stays where it is from now on, and whatever it gets.
pub(crate) fn stay() {
    STAYS.store(true, Ordering::Release);
    drop_spares(|_| true);
    tell_with(|space| {
        space.devices.values_mut().for_each(|it| it.native = true);
        let blocks: Vec<u64> = space.blocks.keys().copied().collect();
        let handles: Vec<u64> = space.physicals.keys().copied().collect();
        for at in blocks {
            let _ = space.pin(at);
        }
        for handle in handles {
            let _ = space.pin_physical(handle);
        }
        space.holds()
    });
}

/// `cuPointerSetAttribute`
pub(crate) fn set_pointer_attribute(
    which: c_int,
    address: u64,
    real: impl FnOnce() -> CUresult,
) -> CUresult {
    /// `CU_POINTER_ATTRIBUTE_SYNC_MEMOPS`: set before other devices on the bus (network adapters, disks) are given the memory's
    /// pages, which are never visible.
    const SYNC_MEMOPS: c_int = 6;
    match which {
        SYNC_MEMOPS => pin(address, 1, real),
        _ => gate::through(real),
    }
}

impl Space {
    /// A pool has taken so much more of a device. What the daemon must receive.
    pub(crate) fn book_more(&mut self, device: c_int, bytes: u64) -> Option<Shim> {
        let device = self.devices.get_mut(&device).filter(|_| bytes > 0)?;
        device.movable.used += bytes;
        device.movable.granted = device.movable.granted.max(device.movable.used);
        Some(device.holds())
    }

    /// So much of a device counts as pinned from now on, or as movable.
    pub(crate) fn shift(&mut self, device: c_int, bytes: u64, pinned: bool) {
        let Some(device) = self.devices.get_mut(&device) else {
            return;
        };
        let from = device.lease(!pinned);
        from.granted = from.granted.saturating_sub(bytes);
        from.used = from.used.saturating_sub(bytes);
        let to = device.lease(pinned);
        to.granted += bytes;
        to.used += bytes;
    }

    fn pin(&mut self, at: u64) -> Option<Shim> {
        let block = self.blocks.get_mut(&at).filter(|block| !block.pinned)?;
        let stayed = block.stays();
        block.pinned = true;
        let (device, bytes) = (block.device, block.held());
        match stayed {
            true => None,
            false => self.book_as_pinned(device, bytes),
        }
    }

    /// Another process has one more export of a block open, or one less. What the daemon must receive.
    pub(crate) fn set_shared(&mut self, at: u64, more: bool) -> Option<Shim> {
        let block = self.blocks.get_mut(&at)?;
        let stayed = block.stays();
        block.shared = match more {
            true => block.shared + 1,
            false => block.shared.saturating_sub(1),
        };
        let (device, bytes, stays) = (block.device, block.held(), block.stays());
        match (stayed, stays) {
            (false, true) => self.book_as_pinned(device, bytes),
            (true, false) => self.book_as_movable(device, bytes),
            _ => None,
        }
    }

    /// So much of a device does not move any more. What the daemon must hear.
    pub(crate) fn book_as_pinned(&mut self, device: c_int, bytes: u64) -> Option<Shim> {
        self.shift(device, bytes, true);
        Some(self.devices.get_mut(&device)?.holds())
    }

    /// So much of a device moves again. What the daemon must receive.
    fn book_as_movable(&mut self, device: c_int, bytes: u64) -> Option<Shim> {
        self.shift(device, bytes, false);
        Some(self.devices.get_mut(&device)?.holds())
    }

    /// Memory that another process made is accounted to this one, or no longer. What the daemon must receive.
    pub(crate) fn book_foreign(&mut self, device: c_int, bytes: u64, more: bool) -> Option<Shim> {
        let device = self.devices.get_mut(&device)?;
        for lease in [&mut device.pinned.granted, &mut device.pinned.used] {
            *lease = match more {
                true => *lease + bytes,
                false => lease.saturating_sub(bytes),
            };
        }
        Some(device.holds())
    }
}

/// The program shares memory in a way that only the driver's own can be shared in: later allocations are that.
pub(crate) fn leave_to_driver() {
    with(|space| {
        for device in space.devices.values_mut() {
            device.native = true;
        }
    });
}

/// `cuCtxEnablePeerAccess`: from now on memory of the peer's device may be reached from the current one.
pub(crate) fn enable_peer(peer: CUcontext, real: impl FnOnce() -> CUresult) -> CUresult {
    let result = gate::through(real);
    if result != SUCCESS || off() {
        return result;
    }
    let Some(reaching) = current_device() else {
        return result;
    };
    let Some(reached) = within(peer as u64, current_device).flatten() else {
        return result;
    };
    gate::through(|| {
        tell_with(|space| {
            for device in space.devices.values_mut() {
                device.native = true;
            }
            let own = space
                .blocks
                .iter()
                .filter(|(_, block)| block.device == reached);
            let own: Vec<(u64, u64)> = own.map(|(at, block)| (*at, block.bytes)).collect();
            for (at, bytes) in &own {
                vmm::allow(*at, *bytes, reaching);
            }
            own.iter().filter_map(|(at, _)| space.pin(*at)).last()
        });
    });
    result
}

// ---- What a program is shown ---------------------------------------------------------------------

/// What the tenant may believe of a device: free and in all.
fn view(device: c_int) -> Option<(u64, u64)> {
    let (uuid, total, unused) = with(|space| {
        let known = space.devices.get(&device)?;
        let spares = space.spares.iter().filter_map(|at| space.blocks.get(at));
        let spare = spares.filter(|it| it.device == device).map(|it| it.bytes);
        let unused = known.movable.unused() + known.pinned.unused() + spare.sum::<u64>();
        Some((known.uuid.clone(), known.total, unused))
    })?;
    let question = |ticket| Shim::View {
        ticket,
        device: uuid,
        total,
    };
    let (free, all) = lease::ask(question)?;
    let all = all.min(total);
    (all != 0).then(|| (free.saturating_add(unused).min(all), all))
}

/// `cuMemGetInfo`
///
/// # Safety
/// The arguments must be what the program passed.
pub(crate) unsafe fn info(
    free: *mut usize,
    total: *mut usize,
    real: impl FnOnce() -> CUresult,
) -> CUresult {
    let result = real();
    if result == SUCCESS
        && !off()
        && let Some((left, all)) = current_device().and_then(view)
    {
        for (place, value) in [(free, left), (total, all)] {
            if !place.is_null() {
                // SAFETY: the driver has just written there.
                unsafe { *place = value as usize };
            }
        }
    }
    result
}

/// The limit that the environment names.
fn told() -> Option<u64> {
    std::env::var(MEMORY_LIMIT_VARIABLE).ok()?.parse().ok()
}

/// `cuDeviceTotalMem`
///
/// # Safety
/// The arguments must be what the program passed.
pub(crate) unsafe fn total(
    bytes: *mut usize,
    device: c_int,
    real: impl FnOnce() -> CUresult,
) -> CUresult {
    let result = real();
    // Before it has used a context a process belongs to no tenant: then only its environment is known.
    if result == SUCCESS
        && !bytes.is_null()
        && let Some(all) = (!off())
            .then(|| view(device))
            .flatten()
            .map(|it| it.1)
            .or_else(told)
    {
        // SAFETY: the driver has just written there.
        unsafe { *bytes = (*bytes).min(all as usize) };
    }
    result
}

/// `cuMemGetAddressRange`
///
/// # Safety
/// The arguments must be what the program passed.
pub(crate) unsafe fn range(
    base: *mut u64,
    bytes: *mut usize,
    address: u64,
    real: impl FnOnce() -> CUresult,
) -> CUresult {
    let Some((start, allocation)) = ours(address) else {
        return when_there(address, real);
    };
    // SAFETY: the program's places.
    unsafe {
        if !base.is_null() {
            *base = start;
        }
        if !bytes.is_null() {
            *bytes = allocation.bytes as usize;
        }
    }
    SUCCESS
}

/// The allocation mapped by this library that an address lies in, with its start: of this process, or of another one.
fn ours(address: u64) -> Option<(u64, Allocation)> {
    (!off())
        .then(|| ranges::read(|it| it.known_of(address)))
        .flatten()
}

/// Whether an address is of memory that the program got by `cuMemAlloc` or `cuIpcOpenMemHandle`, mapped by this library.
pub(crate) fn is_allocated(address: u64) -> bool {
    ours(address).is_some()
}

/// A question about an address: memory that the program handles must be there for it.
fn when_there(address: u64, real: impl FnOnce() -> CUresult) -> CUresult {
    match !off() && physical::is_mapped(address) {
        true => gate::through(real),
        false => real(),
    }
}

/// Attributes that the driver would answer by the mapping, not by the allocation; and the address, which is the same by which the
/// program asks.
const CONTEXT: c_int = 1;
const DEVICE_POINTER: c_int = 3;
const RANGE_START: c_int = 11;
const RANGE_BYTES: c_int = 12;

/// What an attribute of an allocation of ours is.
fn attribute(
    attribute: c_int,
    address: u64,
    (start, allocation): (u64, Allocation),
) -> Option<u64> {
    match attribute {
        DEVICE_POINTER => Some(address),
        CONTEXT => Some(allocation.context),
        RANGE_START => Some(start),
        RANGE_BYTES => Some(allocation.bytes),
        _ => None,
    }
}

/// `cuPointerGetAttribute`
///
/// # Safety
/// The arguments must be what the program passed.
pub(crate) unsafe fn pointer_attribute(
    data: *mut c_void,
    which: c_int,
    address: u64,
    real: impl FnOnce() -> CUresult,
) -> CUresult {
    let Some(found) = ours(address) else {
        return when_there(address, real);
    };
    if let Some(value) = attribute(which, address, found)
        && !data.is_null()
    {
        // SAFETY: all of them are 64 bits long.
        unsafe { data.cast::<u64>().write_unaligned(value) };
        return SUCCESS;
    }
    gate::through(real)
}

/// `cuPointerGetAttributes`
///
/// # Safety
/// The arguments must be what the program passed.
pub(crate) unsafe fn pointer_attributes(
    count: u32,
    attributes: *const c_int,
    data: *const *mut c_void,
    address: u64,
    real: impl FnOnce() -> CUresult,
) -> CUresult {
    let Some(found) = ours(address) else {
        return when_there(address, real);
    };
    let result = gate::through(real);
    if result == SUCCESS && !attributes.is_null() && !data.is_null() {
        for n in 0..count as usize {
            // SAFETY: the driver has just read as many of both.
            let (which, place) = unsafe { (*attributes.add(n), *data.add(n)) };
            if let Some(value) = attribute(which, address, found)
                && !place.is_null()
            {
                // SAFETY: as above; all of them are 64 bits long.
                unsafe { place.cast::<u64>().write_unaligned(value) };
            }
        }
    }
    result
}

#[cfg(test)]
impl Space {
    /// A device of 100 GiB.
    pub(crate) fn know_for_tests(&mut self, device: c_int) {
        let known = Device {
            uuid: String::new(),
            total: 100 << 30,
            movable: Lease::default(),
            pinned: Lease::default(),
            away: 0,
            native: false,
            told: 0,
        };
        self.devices.insert(device, known);
    }

    /// The daemon has granted what does not move, and it is used.
    pub(crate) fn grant_for_tests(&mut self, device: c_int, bytes: u64) {
        let lease = &mut self.devices.get_mut(&device).expect("known").pinned;
        lease.granted += bytes;
        lease.used += bytes;
    }

    /// Of a device, what is used that moves, and that does not.
    pub(crate) fn used_for_tests(&self, device: c_int) -> (u64, u64) {
        let known = &self.devices[&device];
        (known.movable.used, known.pinned.used)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::tests::block;

    #[test]
    fn arrays_are_counted_by_extent_and_format() {
        const BYTE: u32 = 0x01;
        const FLOAT: u32 = 0x20;
        let shape = |width, height, depth, format, channels| ArrayShape {
            width,
            height,
            depth,
            format,
            channels,
            flags: 0,
        };
        assert_eq!(shape(1000, 0, 0, BYTE, 1).bytes(1), 1000);
        assert_eq!(shape(64, 32, 0, FLOAT, 4).bytes(1), 64 * 32 * 16);
        assert_eq!(shape(64, 32, 8, FLOAT, 2).bytes(1), 64 * 32 * 8 * 8);
        // Each level has half the width and half the height of the one before.
        assert_eq!(shape(4, 4, 0, BYTE, 1).bytes(3), 16 + 4 + 1);
        let sparse = ArrayShape {
            flags: 0x40,
            ..shape(64, 64, 0, BYTE, 1)
        };
        assert_eq!(sparse.bytes(1), 0);
        assert_eq!(
            shape(usize::MAX, usize::MAX, 2, FLOAT, 4).bytes(9),
            u64::MAX
        );
    }

    #[test]
    fn memory_of_a_green_context_outlives_it() {
        let mut space = Space::default();
        space.blocks.insert(4096, block(4096));
        let native = Native {
            device: 0,
            bytes: 1,
            context: 2,
            pool: 0,
        };
        space.natives.insert(1, native);
        space.hand_over(1, 3);
        assert_eq!(space.blocks[&4096].context, 3);
        assert_eq!(space.natives[&1].context, 2, "another's stays so");
        assert_eq!(space.take_context(1).0.len(), 0);
        assert_eq!(space.take_context(3).0.len(), 1);
    }
}
