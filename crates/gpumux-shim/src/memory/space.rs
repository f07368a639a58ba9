//! The tables of the program's device memory, and the lease on each device that they are counted by.
//!
//! Before memory is made, it is taken from the lease ([`crate::ground::lease`]); the daemon grants leases in batches, so this is
//! mostly a look at two numbers. What memory is given out, moved and shared stands above this, and only works on the tables.

mod tables;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    ffi::c_int,
    sync::{
        Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use gpumux_wire::{
    Shim,
    message::{PARTS, RECEIPTS, SHOWING},
};

use crate::{
    ground::{
        context::within,
        driver::{self, CUcontext, CUresult, SUCCESS, functions},
        gate, guard, lease, wake,
    },
    memory::{
        block::{Block, Departed},
        caches,
        granules::{IN_USE, OUT},
        ranges::{self, Allocation},
        reports::{self, Droppable},
        vmm,
    },
    work,
};

pub(crate) use self::tables::{Export, GraphMemory, Import, Native, Physical, Pool, Pools};

/// Leases are asked for with so much in advance, and kept with as much unused; on small devices less.
const BATCH: u64 = 64 << 20;

/// At most this part of a device (as its reciprocal).
const BATCH_PART: u64 = 128;

/// Devices are told apart below this ordinal, the bits of [`KNOWN`].
const MAX_DEVICES: u32 = u32::BITS;

functions! {
    ctx_get_device c"cuCtxGetDevice" (*mut c_int);
    ctx_synchronize c"cuCtxSynchronize" ();
    device_uuid c"cuDeviceGetUuid" (*mut [u8; 16], c_int);
    device_uuid_v2 c"cuDeviceGetUuid_v2" (*mut [u8; 16], c_int);
    device_total c"cuDeviceTotalMem_v2" (*mut usize, c_int);
}

/// One device, and the lease on it.
#[derive(Default)]
pub(crate) struct Device {
    pub(crate) uuid: String,
    pub(crate) total: u64,
    /// The capacity that the program was shown; 0: none.
    pub(crate) shown: u64,
    seen: Option<Seen>,
    pub(crate) movable: Lease,
    pub(crate) pinned: Lease,
    /// Part of the movable that is on the host.
    away: u64,
    /// Nothing is mapped by this library from now on.
    pub(crate) native: bool,
    /// How often the daemon received what the process has of it.
    told: u64,
}

/// How long the daemon's answer about a device serves: some programs ask before each allocation, thousands of times a second.
const FRESH: Duration = Duration::from_millis(1);

/// See [`Device::has`].
pub(crate) type Holds = (u64, u64, u64);

/// What the daemon answered last about a device.
#[derive(Clone, Copy)]
struct Seen {
    at: Instant,
    session: u32,
    /// What the process had of it when it asked.
    holds: Holds,
    /// Bytes that are free, without what the process has and does not use; and in all.
    free: u64,
    all: u64,
}

#[derive(Clone, Copy, Default)]
pub(crate) struct Lease {
    granted: u64,
    used: u64,
}

pub(crate) fn batch(total: u64) -> u64 {
    BATCH.min(total / BATCH_PART)
}

impl Lease {
    pub(crate) const fn unused(self) -> u64 {
        self.granted.saturating_sub(self.used)
    }
}

/// All of it.
#[derive(Default)]
pub(crate) struct Space {
    pub(crate) blocks: BTreeMap<u64, Block>,
    /// By address.
    pub(crate) natives: HashMap<u64, Native>,
    /// Memory that the program handles itself, by its handles.
    pub(crate) physicals: BTreeMap<u64, Physical>,
    /// What other processes may open, by token.
    pub(crate) exports: BTreeMap<u128, Export>,
    /// Other processes' memory that is open here, by address.
    pub(crate) imports: BTreeMap<u64, Import>,
    /// What is being opened, by token, and whether it will be accounted to this process.
    pub(crate) opening: Option<(u128, bool)>,
    pub(crate) pools: Pools,
    /// By device.
    pub(crate) graphs: BTreeMap<c_int, GraphMemory>,
    /// By device, bytes that are kept over this process's end, and what of such it has inherited in this session.
    pub(crate) kept: BTreeMap<c_int, (u64, u64)>,
    pub(crate) devices: BTreeMap<c_int, Device>,
    /// Freed while a capture went on: nothing can be waited for then.
    pub(crate) deferred: Vec<u64>,
    /// Blocks with nothing in them, for the next allocation like them. They count as used.
    pub(crate) spares: Vec<u64>,
}

static SPACE: Mutex<Option<Space>> = Mutex::new(None);

/// The devices that are in the tables, a bit each.
static KNOWN: AtomicU32 = AtomicU32::new(0);

/// There may be something to free since a capture has ended.
static DEFERRED: AtomicBool = AtomicBool::new(false);

/// Something was counted.
static USED: AtomicBool = AtomicBool::new(false);

/// This process was forked from one that counted: CUDA is unusable here, and so are the tables.
static SPOILED: AtomicBool = AtomicBool::new(false);

/// Whatever the process gets stays where it is.
pub(crate) static STAYS: AtomicBool = AtomicBool::new(false);

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

/// Whether anything was counted yet.
pub(crate) fn is_used() -> bool {
    USED.load(Ordering::Acquire)
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

/// A device's UUID, and its memory in bytes.
pub(crate) fn describe(device: c_int) -> Option<(String, u64)> {
    let (mut gpu, mut uuid, mut total) = ([0; 16], [0; 16], 0);
    // SAFETY: places to write; a device that does not exist is refused.
    let known = unsafe {
        device_uuid_v2().or_else(device_uuid)?(&raw mut uuid, device) == SUCCESS
            && device_uuid().or_else(device_uuid_v2)?(&raw mut gpu, device) == SUCCESS
            && device_total()?(&raw mut total, device) == SUCCESS
    };
    known.then(|| (uuid_text(gpu, uuid), total as u64))
}

/// A device, once it is known to the tables.
pub(crate) fn known_device(device: c_int) -> Option<c_int> {
    let ordinal = u32::try_from(device).ok();
    let bit = 1 << ordinal.filter(|it| *it < MAX_DEVICES)?;
    if KNOWN.load(Ordering::Acquire) & bit != 0 {
        return Some(device);
    }
    let (uuid, total) = describe(device)?;
    USED.store(true, Ordering::Release);
    with(|space| {
        space.devices.entry(device).or_insert_with(|| Device {
            uuid,
            total,
            native: stays_native() || STAYS.load(Ordering::Acquire),
            ..Device::default()
        });
    });
    KNOWN.fetch_or(bit, Ordering::AcqRel);
    Some(device)
}

/// The process was restored from a checkpoint: its devices may be others than before.
pub(crate) fn look_anew() {
    let known: Vec<c_int> = with(|space| space.devices.keys().copied().collect());
    for device in known {
        let Some((uuid, total)) = describe(device) else {
            continue;
        };
        with(|space| {
            if let Some(it) = space.devices.get_mut(&device) {
                (it.uuid, it.total) = (uuid, total);
            }
        });
    }
}

/// Does something with the tables and sends the daemon what the process's memory is now, before any other thread does.
pub(crate) fn tell_with<I: IntoIterator<Item = Shim>>(work: impl FnOnce(&mut Space) -> I) {
    with(|space| work(space).into_iter().for_each(lease::tell));
}

impl Device {
    /// What the process has of it: what moves, what does not, and what is on the host.
    pub(crate) const fn has(&self) -> Holds {
        (self.movable.granted, self.pinned.granted, self.away)
    }

    /// The daemon of this session answered so, free and in all, to a question of a process that had this then.
    pub(crate) const fn see(
        &mut self,
        (at, session, holds): (Instant, u32, Holds),
        (free, all): (u64, u64),
    ) {
        self.shown = all;
        self.seen = Some(Seen {
            at,
            session,
            holds,
            free,
            all,
        });
    }

    /// That answer, if it serves: it is new, and what the process has of the device is as it was.
    pub(crate) fn seen(&self, now: Instant, session: u32) -> Option<(u64, u64)> {
        let it = self.seen?;
        let serves = now < it.at + FRESH && it.session == session && it.holds == self.has();
        serves.then_some((it.free, it.all))
    }

    fn lease(&mut self, pinned: bool) -> &mut Lease {
        match pinned {
            true => &mut self.pinned,
            false => &mut self.movable,
        }
    }

    /// Gives back what is not used.
    pub(crate) const fn trim(&mut self) {
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
    take_within(lease::ANSWER, device, bytes, pinned, None)
}

/// A request that processes of the tenant make together: its name, and how many parts it has.
pub(crate) type Part = (u64, u32);

/// The same, waited for no longer than this. A part of a request is granted with the others or not at all, also where the lease has room.
pub(crate) fn take_within(
    wait: Duration,
    device: c_int,
    bytes: u64,
    pinned: bool,
    part: Option<Part>,
) -> bool {
    let part = part.filter(|_| lease::knows(PARTS));
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
    // Of nothing, too: the others' parts depend on it.
    let need = (bytes - pocket).max(part.is_some().into());
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
        return take_within(wait, device, bytes, pinned, part);
    }
    caches::look();
    // What the process has itself may be what it is granted.
    report();
    let mut name = 0;
    let ask = |ticket| {
        name = ticket;
        match part {
            None => Shim::Ask {
                ticket,
                device: uuid,
                total,
                need,
                want: need.saturating_add(batch(total)),
                pinned,
            },
            Some((of, parts)) => Shim::AskPart {
                ticket,
                device: uuid,
                total,
                need,
                pinned,
                of,
                parts,
            },
        }
    };
    // When no daemon manages this process, it grants itself what it needs.
    let answer = lease::ask_within(wait, ask);
    let given = answer.map_or(need, |(bytes, _)| bytes);
    with(|space| {
        // Before any other report.
        let receipt = answer.and_then(|_| receipt(name));
        receipt.into_iter().for_each(lease::tell);
        let Some(known) = space.devices.get_mut(&device) else {
            return true;
        };
        let lease = known.lease(pinned);
        lease.granted += given;
        let enough = given >= need;
        match enough {
            true => lease.used += bytes - pocket,
            false => lease.used -= pocket.min(lease.used),
        }
        // What was said meanwhile was without this.
        if given > 0 && known.told != told {
            lease::tell(known.holds());
        }
        enough
    })
}

/// Reports what of the process's memory needs no copy, if that has changed.
pub(crate) fn report() {
    reports::send(|| with(|space| space.droppable()));
}

/// What the process reports when it has been granted what it asked for by this name.
pub(crate) fn receipt(ticket: u32) -> Option<Shim> {
    lease::knows(RECEIPTS).then_some(Shim::Received { ticket })
}

/// Gives so much back.
pub(crate) fn give(device: c_int, bytes: u64, pinned: bool) {
    tell_with(|space| space.give(device, bytes, pinned));
}

/// Gives back all that is granted and not used.
pub(crate) fn trim() {
    tell_with(|space| {
        space.devices.values_mut().for_each(Device::trim);
        space.holds()
    });
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
    if block.kept.is_some() {
        return;
    }
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

/// The ordinal of a device of which the process has memory.
pub(crate) fn ordinal(uuid: &str) -> Option<c_int> {
    with(|space| {
        let mut devices = space.devices.iter();
        let found = devices.find(|(_, device)| device.uuid == uuid);
        found.map(|(ordinal, _)| *ordinal)
    })
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

/// Has what is freed at this address freed when no capture goes on any more.
pub(crate) fn defer(address: u64) {
    with(|space| space.deferred.push(address));
    DEFERRED.store(true, Ordering::Release);
}

/// What is to be freed since then.
pub(crate) fn take_deferred() -> Vec<u64> {
    match DEFERRED.load(Ordering::Acquire) && DEFERRED.swap(false, Ordering::AcqRel) {
        true => with(|space| std::mem::take(&mut space.deferred)),
        false => Vec::new(),
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

/// The allocation of ours that an address lies in, with its start.
pub(crate) fn find(address: u64) -> Option<(u64, Allocation)> {
    ranges::read(|it| it.allocation_of(address))
}

/// The allocation mapped by this library that an address lies in, with its start: of this process, or of another one.
pub(crate) fn ours(address: u64) -> Option<(u64, Allocation)> {
    (!off())
        .then(|| ranges::read(|it| it.known_of(address)))
        .flatten()
}

/// Whether an address is of memory that the program got by `cuMemAlloc` or `cuIpcOpenMemHandle`, mapped by this library.
pub(crate) fn is_allocated(address: u64) -> bool {
    ours(address).is_some()
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

    fn droppable(&self) -> BTreeMap<c_int, Droppable> {
        let mut found: BTreeMap<c_int, Droppable> = BTreeMap::new();
        for block in self.blocks.values().filter(|it| it.elastic.is_some()) {
            let (free, cached) = block.droppable();
            let uuid = self.uuid(block.device).unwrap_or_default();
            let of = found.entry(block.device).or_insert((uuid, 0, 0));
            (of.1, of.2) = (of.1 + free, of.2 + cached);
        }
        found
    }

    /// Bytes of a device that the process has and does not use.
    pub(crate) fn unused(&self, device: c_int) -> u64 {
        let spares = self.spares.iter().filter_map(|at| self.blocks.get(at));
        let spare = spares.filter(|it| it.device == device).map(|it| it.bytes);
        let of = |it: &Device| it.movable.unused() + it.pinned.unused();
        self.devices.get(&device).map_or(0, of) + spare.sum::<u64>()
    }

    pub(crate) fn holds(&mut self) -> Vec<Shim> {
        self.devices.values_mut().map(Device::holds).collect()
    }

    /// What the program was shown, for a daemon that knows such packets.
    pub(crate) fn shown(&self) -> Vec<Shim> {
        let shown = (self.devices.values()).filter(|it| it.shown != 0 && lease::knows(SHOWING));
        let packet = |it: &Device| Shim::Shown {
            device: it.uuid.clone(),
            total: it.shown,
        };
        shown.map(packet).collect()
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
        let table = block.elastic.map(|it| it.table);
        let before = table.map_or(OUT, |it| it.state(index));
        let (departed, device) = (block.left(at, index, host)?, block.device);
        let dropped = departed.dropped() > 0;
        if let Some(table) = table {
            table.count_taken(if dropped { before } else { IN_USE });
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

    /// What is away of these contexts does not come back: they have failed for good.
    pub(crate) fn forget_away(&mut self, contexts: &BTreeSet<u64>) {
        let blocks = self.blocks.values_mut();
        let blocks = blocks.filter(|it| contexts.contains(&it.context));
        let blocks = blocks.map(|it| (it.device, it.forget_away()));
        let physicals = self.physicals.values_mut();
        let physicals = physicals.filter(|it| contexts.contains(&it.context));
        let physicals = physicals.map(|it| (it.device, it.forget_away()));
        for (device, bytes) in blocks.chain(physicals).collect::<Vec<_>>() {
            self.drop_bytes(device, bytes);
        }
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

    pub(crate) fn pin(&mut self, at: u64) -> Option<Shim> {
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
    pub(crate) fn book_as_movable(&mut self, device: c_int, bytes: u64) -> Option<Shim> {
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

#[cfg(test)]
impl Space {
    /// A device of 100 GiB.
    pub(crate) fn know_for_tests(&mut self, device: c_int) {
        let known = Device {
            total: 100 << 30,
            ..Device::default()
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

    /// What the daemon receives of a device as being on the host.
    pub(crate) fn swapped_for_tests(&mut self, device: c_int) -> u64 {
        match self.devices.get_mut(&device).expect("known").holds() {
            Shim::Holds { swapped, .. } => swapped,
            other => unreachable!("{other:?}"),
        }
    }
}
