//! Device memory that processes share by handles (CUDA IPC).
//!
//! The driver makes no such handle for memory that this library maps. So the program gets one of this library's: a token that
//! cannot be guessed. A process of the same tenant that has it requests the memory from the daemon, which has the exporter's
//! agent send it, a file for each piece of physical memory. While another process has it open, the memory stays where it is.
//! Handles of the driver's own memory, and of events, are the driver's.

use std::{
    cell::Cell,
    collections::BTreeMap,
    ffi::c_uint,
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
};

use gpumux_wire::{
    Shim,
    message::{Piece, SHARING},
};

use crate::{
    driver::{CUresult, Location, SUCCESS},
    gate, guard, lease,
    memory::{self, Space, with},
    notice::say,
    own::OwnFd,
    ranges::{self, Allocation},
    swap,
    vmm::{self, Chunk, GRANULE},
    work::{self, current_context},
};

/// `CUipcMemHandle`: two words that no handle of the driver begins with, and the token.
pub(crate) type Handle = [u64; 8];
const MARK: [u64; 2] = [
    u64::from_ne_bytes(*b"gpumux\0I"),
    u64::from_ne_bytes(*b"PC token"),
];

/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`, the only flag there is.
const LAZY: c_uint = 1;
/// Largest allocation that is opened, as in [`memory`].
const LARGEST: u64 = 1 << 46;

const INVALID_VALUE: CUresult = 1;
/// `CUDA_ERROR_INVALID_CONTEXT`: also what a process gets that opens its own memory.
const INVALID_CONTEXT: CUresult = 201;
const MAP_FAILED: CUresult = 205;
const INVALID_HANDLE: CUresult = 400;

/// Memory that other processes may open.
#[derive(Debug)]
pub(crate) struct Export {
    /// The allocation; none: it was freed while others had it open.
    address: Option<u64>,
    block: u64,
    /// Another process has it open.
    open: bool,
}

impl Export {
    pub(crate) fn is_of(&self, address: u64) -> bool {
        self.address == Some(address)
    }
}

/// Another process's memory that is open here.
#[derive(Debug)]
pub(crate) struct Import {
    token: u128,
    /// Where the whole is mapped, and what that has.
    at: u64,
    bytes: u64,
    chunks: Vec<Chunk>,
    device: i32,
    pub(crate) context: u64,
    /// How often the program has it open.
    count: u32,
    /// Its exporter is gone: it is accounted to this process.
    charged: bool,
}

/// Held while memory is opened or closed, so that one handle is opened once. Never inside the gate.
static OPENING: Mutex<()> = Mutex::new(());
/// Pieces that have come, by the request's ticket.
static PIECES: Mutex<BTreeMap<u32, (Piece, OwnFd)>> = Mutex::new(BTreeMap::new());

/// Whether this process's daemon passes memory on.
fn is_managed() -> bool {
    lease::await_link() && lease::knows(SHARING)
}

/// Tells a daemon that passes memory on. Another may have taken its place.
fn tell(packet: Shim) {
    if lease::knows(SHARING) {
        lease::tell(packet);
    }
}

/// The token of a handle that is this library's.
fn token_of(handle: Handle) -> Option<u128> {
    let [first, second, low, high, ..] = handle;
    ([first, second] == MARK).then(|| u128::from(high) << 64 | u128::from(low))
}

fn handle_of(token: u128) -> Handle {
    [
        MARK[0],
        MARK[1],
        token as u64,
        (token >> 64) as u64,
        0,
        0,
        0,
        0,
    ]
}

/// A token that cannot be guessed; none: the kernel has no random numbers.
fn fresh() -> Option<u128> {
    let mut bytes = [0; 16];
    // SAFETY: a buffer of this length.
    let filled = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    (filled == bytes.len() as isize).then_some(u128::from_ne_bytes(bytes))
}

// ---- Memory of this process ----------------------------------------------------------------------

/// `cuIpcGetMemHandle`
///
/// # Safety
/// `handle` must be what the program passed.
pub(crate) unsafe fn get(
    handle: *mut Handle,
    address: u64,
    real: impl FnOnce() -> CUresult,
) -> CUresult {
    let own = || memory::find(address);
    let Some((start, allocation)) = (!memory::off() && !handle.is_null()).then(own).flatten()
    else {
        // The driver's own memory, or none.
        return gate::through(real);
    };
    let device = with(|space| Some(space.blocks.get(&allocation.block)?.device));
    let token = match device.is_some_and(vmm::is_shareable) && is_managed() {
        true => fresh().and_then(|token| with(|space| space.export(start, allocation, token))),
        false => None,
    };
    let Some(token) = token else {
        let result = memory::pin(address, 1, real);
        if result != SUCCESS {
            say(format_args!(
                "this program shares device memory with other processes: run it with GPUMUX_MEMORY=native"
            ));
            memory::leave_to_driver();
        }
        return result;
    };
    static NOTICED: AtomicBool = AtomicBool::new(false);
    if !NOTICED.swap(true, Ordering::Relaxed) {
        say(format_args!(
            "this program shares device memory with other processes: they must be of the same tenant, or run it with GPUMUX_MEMORY=native"
        ));
    }
    // SAFETY: the program's place of 64 bytes, of any alignment.
    unsafe { handle.write_unaligned(handle_of(token)) };
    SUCCESS
}

impl Space {
    /// An allocation may be opened by others; by its token, which is this one if it has none yet.
    fn export(&mut self, address: u64, allocation: Allocation, token: u128) -> Option<u128> {
        let mut exports = self.exports.iter();
        if let Some((known, _)) = exports.find(|(_, it)| it.is_of(address)) {
            return Some(*known);
        }
        // It may have been freed a moment ago.
        ranges::read(|it| it.allocations.contains_key(&address)).then_some(())?;
        let export = Export {
            address: Some(address),
            block: allocation.block,
            open: false,
        };
        self.exports.insert(token, export);
        tell(Shim::Export { token });
        Some(token)
    }

    /// Allocations are freed: they cannot be opened any more. What others have open they keep.
    pub(crate) fn end_exports(&mut self, ended: impl Fn(&Export) -> bool) {
        self.exports.retain(|token, export| {
            let ended = ended(export);
            if ended {
                export.address = None;
            }
            let gone = ended && !export.open;
            if gone {
                tell(Shim::Withdraw { token: *token });
            }
            !gone
        });
    }

    /// A block is gone: what others have open of it is not this process's any more.
    pub(crate) fn drop_exports(&mut self, block: u64) {
        for (token, _) in self.exports.extract_if(.., |_, it| it.block == block) {
            tell(Shim::Withdraw { token });
        }
    }

    /// A piece of an export, which stays where it is from now on; its context.
    fn serve(&mut self, token: u128, index: u32) -> Option<(Chunk, Piece, u64)> {
        let export = self.exports.get_mut(&token)?;
        let (address, at) = (export.address?, export.block);
        let allocation = ranges::read(|it| it.allocations.get(&address).copied())?;
        let block = self.blocks.get(&at)?;
        let chunk = *block.chunks.get(index as usize)?;
        let piece = Piece {
            bytes: chunk.bytes,
            whole: block.bytes,
            offset: address - at,
            allocation: allocation.bytes,
        };
        let context = block.context;
        if !std::mem::replace(&mut export.open, true)
            && let Some(holds) = self.set_shared(at, true)
        {
            lease::tell(holds);
        }
        Some((chunk, piece, context))
    }
}

/// A piece of an export, for another process. By the agent, while all memory is on the device.
pub(crate) fn serve(token: u128, index: u32) -> Option<(Piece, OwnFd)> {
    let (chunk, piece, context) = with(|space| space.serve(token, index))?;
    let made = swap::in_context(context, || vmm::export(&chunk))?;
    Some((piece, made.ok()?))
}

/// No other process has an export open any more. By the agent, while all memory is on the device.
pub(crate) fn unshared(token: u128) {
    let freed = with(|space| {
        let export = space.exports.get_mut(&token)?;
        let (at, ended) = (export.block, export.address.is_none());
        if std::mem::replace(&mut export.open, false)
            && let Some(holds) = space.set_shared(at, false)
        {
            lease::tell(holds);
        }
        if !ended {
            return None;
        }
        space.exports.remove(&token);
        tell(Shim::Withdraw { token });
        space.take_freed(at)
    });
    if let Some((at, block)) = freed {
        let context = block.context;
        // Where the context is gone, so is all that was in it.
        let _ = swap::in_context(context, || memory::let_go(at, &block));
    }
}

/// What a daemon receives about shared memory when a session begins.
pub(crate) fn introduce() -> Vec<Shim> {
    if !lease::knows(SHARING) {
        return Vec::new();
    }
    with(|space| {
        let exports = space
            .exports
            .keys()
            .map(|token| Shim::Export { token: *token });
        let imports = space.imports.values().map(|it| Shim::Opened {
            token: it.token,
            charged: it.charged,
        });
        exports.chain(imports).collect()
    })
}

// ---- Memory of other processes -------------------------------------------------------------------

/// `cuIpcOpenMemHandle`
///
/// # Safety
/// `out` must be what the program passed.
pub(crate) unsafe fn open(
    out: *mut u64,
    handle: Handle,
    flags: c_uint,
    real: impl FnOnce() -> CUresult,
) -> CUresult {
    let Some(token) = token_of(handle) else {
        return gate::through(real);
    };
    if out.is_null() || flags != LAZY {
        return INVALID_VALUE;
    }
    if memory::off() {
        return INVALID_HANDLE;
    }
    let (Some(device), Some(context)) = (memory::current_device(), current_context()) else {
        return INVALID_CONTEXT;
    };
    if with(|space| space.exports.contains_key(&token)) {
        return INVALID_CONTEXT;
    }
    let _alone = guard::lock(&OPENING);
    let again = with(|space| {
        let mut imports = space.imports.iter_mut();
        let (at, import) = imports.find(|(_, it)| it.token == token)?;
        import.count += 1;
        Some(*at)
    });
    let opened = again.map_or_else(|| fetch(token, device, context), Ok);
    match opened {
        Ok(address) => {
            // SAFETY: the program's place, which is not null.
            unsafe { *out = address };
            SUCCESS
        }
        Err(error) => {
            tell(Shim::Closed { token });
            error
        }
    }
}

/// A piece of what another process exports. Not inside the gate: the exporter may have to bring it back first.
fn piece(token: u128, index: u32) -> Option<(Piece, OwnFd)> {
    is_managed().then_some(())?;
    let asked = Cell::new(0);
    let answer = lease::ask(|ticket| {
        asked.set(ticket);
        Shim::Redeem {
            ticket,
            token,
            index,
        }
    });
    let came = guard::lock(&PIECES).remove(&asked.get());
    came.filter(|_| answer.is_some())
}

/// The daemon has answered a request. By the agent.
pub(crate) fn arrived(ticket: u32, piece: Option<(Piece, OwnFd)>) {
    let found = piece.is_some();
    if let Some(piece) = piece {
        guard::lock(&PIECES).insert(ticket, piece);
    }
    // The request may have been given up.
    if !lease::answered(ticket, (found.into(), 0)) {
        guard::lock(&PIECES).remove(&ticket);
    }
}

/// Maps another process's memory; the address of the allocation.
fn fetch(token: u128, device: i32, context: u64) -> Result<u64, CUresult> {
    let Some((head, file)) = piece(token, 0) else {
        say(format_args!(
            "cannot open another process's device memory: no process of this tenant exports it. Start both programs as one tenant, or both with GPUMUX_MEMORY=native"
        ));
        return Err(INVALID_HANDLE);
    };
    let inside = head.offset.checked_add(head.allocation);
    let sound = head.whole <= LARGEST
        && head.whole.is_multiple_of(GRANULE)
        && head.allocation != 0
        && inside.is_some_and(|end| end <= head.whole);
    if !sound {
        return Err(INVALID_HANDLE);
    }
    let at = gate::through(|| vmm::reserve(head.whole)).map_err(|_| MAP_FAILED)?;
    let mut chunks = Vec::new();
    if let Err(error) = map(token, (at, device), (head, file), &mut chunks) {
        gate::through(|| {
            vmm::unback(at, &chunks);
            vmm::unreserve(at, head.whole);
        });
        return Err(error);
    }
    let address = at + head.offset;
    let import = Import {
        token,
        at,
        bytes: head.whole,
        chunks,
        device,
        context,
        count: 1,
        charged: false,
    };
    let allocation = Allocation {
        bytes: head.allocation,
        block: at,
        context,
    };
    with(|space| {
        space.imports.insert(address, import);
        ranges::write(|it| it.opened.insert(address, allocation));
    });
    Ok(address)
}

/// Maps all pieces at reserved addresses, for this device.
fn map(
    token: u128,
    (at, device): (u64, i32),
    (head, file): (Piece, OwnFd),
    chunks: &mut Vec<Chunk>,
) -> Result<(), CUresult> {
    let mut mapped = 0;
    let mut places: Vec<Location> = vec![Location {
        kind: 1,
        id: device,
    }];
    let mut next = Some((head, file));
    while let Some((piece, file)) = next.take() {
        if piece.bytes == 0 || piece.bytes > head.whole - mapped {
            return Err(INVALID_HANDLE);
        }
        let made = gate::through(|| vmm::import(at + mapped, piece.bytes, &file));
        let (chunk, location) = made.map_err(|_| MAP_FAILED)?;
        chunks.push(chunk);
        mapped += piece.bytes;
        if !places.contains(&location) {
            places.push(location);
        }
        if mapped < head.whole {
            next = Some(self::piece(token, chunks.len() as u32).ok_or(INVALID_HANDLE)?);
        }
    }
    for location in places {
        let result = gate::through(|| vmm::set_access(at, head.whole as usize, location));
        if result != SUCCESS {
            return Err(MAP_FAILED);
        }
    }
    Ok(())
}

/// `cuIpcCloseMemHandle`
pub(crate) fn close(address: u64, real: impl FnOnce() -> CUresult) -> CUresult {
    let known = || with(|space| space.imports.contains_key(&address));
    if memory::off() || !known() {
        return gate::through(real);
    }
    let _alone = guard::lock(&OPENING);
    let left = with(|space| {
        let import = space.imports.get_mut(&address)?;
        import.count = import.count.checked_sub(1)?;
        Some((import.count, import.context))
    });
    match left {
        // It is closed already, and only waits for the end of a capture.
        None => INVALID_VALUE,
        Some((0, _)) if work::is_capturing_anywhere() => {
            memory::defer(address);
            SUCCESS
        }
        Some((0, context)) => {
            let result = memory::settle(context);
            end(address);
            result
        }
        Some(_) => SUCCESS,
    }
}

/// Closes what was closed during a capture, if it was not opened again.
pub(crate) fn close_deferred(address: u64) {
    let _alone = guard::lock(&OPENING);
    let unused = with(|space| {
        Some(space.imports.get(&address)?)
            .filter(|it| it.count == 0)?
            .context
            .into()
    });
    if let Some(context) = unused {
        let _ = memory::settle(context);
        end(address);
    }
}

fn end(address: u64) {
    let import = with(|space| space.take_import(address));
    if let Some(import) = import {
        gate::through(|| let_go(&import));
    }
}

/// A context is gone, with what was opened in it.
pub(crate) fn forget_context(context: u64) {
    let gone: Vec<Import> = with(|space| {
        let own = space.imports.iter().filter(|(_, it)| it.context == context);
        let own: Vec<u64> = own.map(|(address, _)| *address).collect();
        let gone = own.into_iter().filter_map(|it| space.take_import(it));
        gone.collect()
    });
    gone.iter().for_each(let_go);
}

impl Space {
    fn take_import(&mut self, address: u64) -> Option<Import> {
        ranges::write(|it| it.opened.remove(&address));
        self.imports.remove(&address)
    }

    /// An exporter is gone: its memory is this process's now. What the daemon must receive.
    fn adopt(&mut self, token: u128) -> Option<Shim> {
        let mut imports = self.imports.values_mut();
        let import = imports.find(|it| it.token == token && !it.charged)?;
        import.charged = true;
        let (device, bytes) = (import.device, import.bytes);
        self.book_foreign(device, bytes, true)
    }
}

fn let_go(import: &Import) {
    vmm::unback(import.at, &import.chunks);
    vmm::unreserve(import.at, import.bytes);
    if import.charged {
        memory::tell_with(|space| space.book_foreign(import.device, import.bytes, false));
    }
    // Only now: the exporter may move the memory from then on.
    tell(Shim::Closed {
        token: import.token,
    });
}

/// The exporter of memory that is open here is gone. By the agent.
pub(crate) fn orphaned(token: u128) {
    memory::tell_with(|space| space.adopt(token));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handle_names_its_token_and_no_other_is_taken_for_one() {
        let token = 0x0123_4567_89ab_cdef_1122_3344_5566_7788;
        let handle = handle_of(token);
        assert_eq!(token_of(handle), Some(token));
        for word in 0..2 {
            let mut other = handle;
            other[word] ^= 1;
            assert_eq!(token_of(other), None);
        }
        assert_ne!(fresh(), fresh());
    }

    #[test]
    fn freed_memory_cannot_be_opened_but_stays_open() {
        let export = |address, open| Export {
            address: Some(address),
            block: 4096,
            open,
        };
        let mut space = Space::default();
        space.exports.insert(1, export(4096, false));
        space.exports.insert(2, export(4608, true));
        space.exports.insert(3, export(5120, false));
        space.end_exports(|it| it.is_of(4096));
        space.end_exports(|it| it.is_of(4608));
        assert_eq!(space.exports.keys().collect::<Vec<_>>(), [&2, &3]);
        assert_eq!(space.exports[&2].address, None);
        assert!(space.serve(2, 0).is_none());
        space.drop_exports(4096);
        assert!(space.exports.is_empty());
    }
}
