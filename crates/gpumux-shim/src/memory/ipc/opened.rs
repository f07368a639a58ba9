//! Memory of other processes that this one has open.

use std::{cell::Cell, collections::BTreeMap, ffi::c_uint, sync::Mutex};

use gpumux_wire::{Shim, message::Piece};

use super::{Handle, block_of, is_managed, tell, token_of};
use crate::{
    ground::{
        context::{current_context, is_capturing_anywhere},
        driver::{CUresult, Location, SUCCESS},
        gate, guard, lease,
        notice::say,
        own::OwnFd,
    },
    memory::{
        ranges::{self, Allocation},
        space::{self, Import, Space, with},
        vmm::{self, Chunk, GRANULE},
    },
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

/// Held while memory is opened or closed, so that one handle is opened once. Never inside the gate.
static OPENING: Mutex<()> = Mutex::new(());
/// What a request was answered with.
const FOUND: u64 = 1;
const REFUSED: u64 = 0;
const LATE: u64 = 2;

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
    if space::off() {
        return INVALID_HANDLE;
    }
    let (Some(device), Some(context)) = (space::current_device(), current_context()) else {
        return INVALID_CONTEXT;
    };
    if with(|space| space.exports.contains_key(&token)) {
        return INVALID_CONTEXT;
    }
    let _alone = guard::lock(&OPENING);
    let again = with(|space| {
        let mut imports = space.imports.iter_mut();
        let (at, import) = imports.find(|(_, it)| (it.token, it.context) == (token, context))?;
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
        Err(error) => error,
    }
}

/// A piece of what another process exports. Not inside the gate: the exporter may have to bring it back first.
fn piece(token: u128, index: u32) -> Result<(Piece, OwnFd), CUresult> {
    let asked = Cell::new(0);
    let ask = || {
        lease::ask(|ticket| {
            asked.set(ticket);
            Shim::Redeem {
                ticket,
                token,
                index,
            }
        })
    };
    let asked_once = || is_managed().then(ask).flatten().map(|it| it.0);
    let answer = loop {
        let session = lease::session();
        let answer = asked_once();
        // The daemon may have been killed a moment ago, and so may the next one.
        if answer.is_some() || !lease::await_return() || lease::session() == session {
            break answer;
        }
    };
    let came = guard::lock(&PIECES).remove(&asked.get());
    let (why, error) = match (answer, came) {
        (Some(FOUND), Some(piece)) => return Ok(piece),
        (Some(LATE), _) => (
            "the process that exports it has not answered in time. If it is stopped, let it go on; then open the memory again",
            MAP_FAILED,
        ),
        (Some(_), _) => (
            "no process of this tenant exports it. Start both programs as one tenant, or both with GPUMUX_MEMORY=native",
            INVALID_HANDLE,
        ),
        (None, _) => (
            "the daemon, which passes it on, does not answer. Open it again when the daemon is back",
            INVALID_HANDLE,
        ),
    };
    say(format_args!(
        "cannot open another process's device memory: {why}"
    ));
    Err(error)
}

/// The daemon has answered a request. By the agent.
pub(crate) fn arrived(ticket: u32, piece: Option<(Piece, OwnFd)>) {
    let answer = match piece {
        Some(piece) => {
            guard::lock(&PIECES).insert(ticket, piece);
            FOUND
        }
        None => REFUSED,
    };
    // The request may have been given up.
    if !lease::answered(ticket, (answer, 0)) {
        guard::lock(&PIECES).remove(&ticket);
    }
}

/// The exporter has not answered a request in time. By the agent.
pub(crate) fn late(ticket: u32) {
    let _ = lease::answered(ticket, (LATE, 0));
}

/// Opens another process's memory; the address of the allocation.
fn fetch(token: u128, device: i32, context: u64) -> Result<u64, CUresult> {
    // A new session may begin meanwhile: its daemon must know.
    with(|space| space.opening = Some((token, false)));
    let made = import(token, device, context);
    with(|space| {
        let orphaned = space.opening.take().is_some_and(|it| it.1);
        match made {
            Ok((address, import, allocation)) => {
                space.imports.insert(address, import);
                ranges::write(|it| it.opened.insert(address, allocation));
                if orphaned {
                    let holds = space.adopt(token);
                    holds.into_iter().for_each(lease::tell);
                }
                Ok(address)
            }
            Err(error) => {
                space.tell_closed(token);
                Err(error)
            }
        }
    })
}

/// Maps another process's memory.
fn import(token: u128, device: i32, context: u64) -> Result<(u64, Import, Allocation), CUresult> {
    let (head, file) = piece(token, 0)?;
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
    let home = map(token, (at, device), (head, file), &mut chunks).inspect_err(|_| {
        gate::through(|| {
            vmm::unback(at, &chunks);
            vmm::unreserve(at, head.whole);
        });
    })?;
    let import = Import {
        token,
        at,
        bytes: head.whole,
        chunks,
        device: home,
        context,
        count: 1,
        charged: false,
    };
    let allocation = Allocation {
        bytes: head.allocation,
        block: at,
        context,
    };
    Ok((at + head.offset, import, allocation))
}

/// Maps all pieces at reserved addresses, for this device. Where the memory is.
fn map(
    token: u128,
    (at, device): (u64, i32),
    (head, file): (Piece, OwnFd),
    chunks: &mut Vec<Chunk>,
) -> Result<i32, CUresult> {
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
            next = Some(self::piece(token, chunks.len() as u32)?);
        }
    }
    for location in &places {
        let result = gate::through(|| vmm::set_access(at, head.whole as usize, *location));
        // Its own device may be none that this process sees (`CUDA_VISIBLE_DEVICES`).
        if result != SUCCESS && location.id == device {
            return Err(MAP_FAILED);
        }
    }
    // The last is the memory's own, if the driver tells it.
    let home = places.last().map_or(device, |it| it.id);
    Ok(space::known_device(home).unwrap_or(device))
}

/// `cuIpcCloseMemHandle`
pub(crate) fn close(address: u64, real: impl FnOnce() -> CUresult) -> CUresult {
    let known = || with(|space| space.imports.contains_key(&address));
    if space::off() || !known() {
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
        Some((0, _)) if is_capturing_anywhere() => {
            space::defer(address);
            SUCCESS
        }
        Some((0, context)) => {
            let result = space::settle(context);
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
        let _ = space::settle(context);
        end(address);
    }
}

fn end(address: u64) {
    gate::through(|| let_go(address));
}

/// A context is gone, with what was opened in it.
pub(crate) fn forget_context(context: u64) {
    let own = with(|space| {
        let own = space.imports.iter().filter(|(_, it)| it.context == context);
        own.map(|(address, _)| *address).collect::<Vec<u64>>()
    });
    own.into_iter().for_each(let_go);
}

fn let_go(address: u64) {
    let mapped = with(|space| {
        let import = space.imports.get_mut(&address)?;
        ranges::write(|it| it.opened.remove(&address));
        Some((import.at, import.bytes, std::mem::take(&mut import.chunks)))
    });
    let Some((at, bytes, chunks)) = mapped else {
        return;
    };
    vmm::unback(at, &chunks);
    // Only now: the exporter may move the memory from then on.
    with(|space| space.forget_import(address));
    vmm::unreserve(at, bytes);
}

impl Space {
    /// Memory of another process is not mapped any more.
    fn forget_import(&mut self, address: u64) {
        let Some(import) = self.imports.remove(&address) else {
            return;
        };
        let mut others = self.imports.values_mut();
        match others.find(|it| block_of(it.token) == block_of(import.token)) {
            Some(other) => other.charged |= import.charged,
            None if import.charged => {
                let holds = self.book_foreign(import.device, import.bytes, false);
                holds.into_iter().for_each(lease::tell);
            }
            None => {}
        }
        self.tell_closed(import.token);
    }

    /// Sends that an export is not open here, if that is so.
    fn tell_closed(&self, token: u128) {
        let mut open = self.imports.values().map(|it| it.token);
        let opening = self.opening.is_some_and(|it| it.0 == token);
        if !opening && !open.any(|it| it == token) {
            tell(Shim::Closed { token });
        }
    }

    /// An exporter is gone: its memory is this process's now. What the daemon must receive.
    fn adopt(&mut self, token: u128) -> Option<Shim> {
        let mut imports = self.imports.values();
        if imports.any(|it| it.charged && block_of(it.token) == block_of(token)) {
            return None;
        }
        let mut imports = self.imports.values_mut();
        let Some(import) = imports.find(|it| it.token == token) else {
            // As soon as it is open.
            if let Some((_, orphaned)) = self.opening.as_mut().filter(|it| it.0 == token) {
                *orphaned = true;
            }
            return None;
        };
        import.charged = true;
        let (device, bytes) = (import.device, import.bytes);
        self.book_foreign(device, bytes, true)
    }
}

/// The exporter of memory that is open here is gone. By the agent.
pub(crate) fn orphaned(token: u128) {
    space::tell_with(|space| space.adopt(token));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn import(token: u128, context: u64) -> Import {
        Import {
            token,
            at: 4096 * context,
            bytes: 4096,
            chunks: Vec::new(),
            device: 0,
            context,
            count: 1,
            charged: false,
        }
    }

    /// Two allocations in one block have each a handle, and both are opened as the block.
    #[test]
    fn exports_of_one_block_are_accounted_once() {
        let (one, other, another) = (1 << 64 | 7, 1 << 64 | 8, 2 << 64 | 7);
        let mut space = Space::default();
        for (context, token) in (1..).zip([one, other, another]) {
            space.imports.insert(4096 * context, import(token, context));
            space.adopt(token);
        }
        let charged = |space: &Space| -> Vec<u128> {
            let charged = space.imports.values().filter(|it| it.charged);
            charged.map(|it| it.token).collect()
        };
        assert_eq!(charged(&space), [one, another]);
        space.forget_import(4096);
        assert_eq!(charged(&space), [other, another]);
    }

    /// Memory that two contexts have open is accounted once, and closed when neither has it.
    #[test]
    fn memory_of_two_contexts_is_accounted_once() {
        let import = |context| import(7, context);
        let mut space = Space::default();
        space.imports.insert(4096, import(1));
        space.imports.insert(8192, import(2));
        let charged = |space: &Space| space.imports.values().filter(|it| it.charged).count();
        space.adopt(7);
        space.adopt(7);
        assert_eq!(charged(&space), 1);
        space.forget_import(4096);
        assert_eq!((space.imports.len(), charged(&space)), (1, 1));
        space.forget_import(8192);
        space.opening = Some((8, false));
        space.adopt(7);
        assert!(space.imports.is_empty());
        assert_eq!(space.opening, Some((8, false)));
        space.adopt(8);
        assert_eq!(space.opening, Some((8, true)));
    }
}
