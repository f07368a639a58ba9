//! Memory of other processes that this one has open.

use std::{cell::Cell, collections::BTreeMap, ffi::c_uint, sync::Mutex};

use gpumux_wire::{Shim, message::Piece};

use super::{Handle, is_managed, tell, token_of};
use crate::{
    driver::{CUresult, Location, SUCCESS},
    gate, guard, lease,
    memory::{self, Space, with},
    notice::say,
    own::OwnFd,
    ranges::{self, Allocation},
    vmm::{self, Chunk, GRANULE},
    work::{self, current_context},
};

/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`, the only flag there is.
const LAZY: c_uint = 1;
/// Largest allocation that is opened, as in [`memory`].
const LARGEST: u64 = 1 << 46;

const INVALID_VALUE: CUresult = 1;
/// `CUDA_ERROR_INVALID_CONTEXT`: also what a process gets that opens its own memory.
const INVALID_CONTEXT: CUresult = 201;
const MAP_FAILED: CUresult = 205;
const INVALID_HANDLE: CUresult = 400;

/// Another process's memory that is open here.
#[derive(Debug)]
pub(crate) struct Import {
    pub(super) token: u128,
    /// Where the whole is mapped, and what that has.
    at: u64,
    bytes: u64,
    chunks: Vec<Chunk>,
    device: i32,
    pub(crate) context: u64,
    /// How often the program has it open.
    count: u32,
    /// Its exporter is gone: it is accounted to this process.
    pub(super) charged: bool,
}

/// Held while memory is opened or closed, so that one handle is opened once. Never inside the gate.
static OPENING: Mutex<()> = Mutex::new(());
/// Pieces that have come, by the request's ticket.
static PIECES: Mutex<BTreeMap<u32, (Piece, OwnFd)>> = Mutex::new(BTreeMap::new());

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
        places.extend(location.filter(|it| !places.contains(it)));
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
