//! What this process exports.

use std::{
    ffi::c_int,
    sync::atomic::{AtomicBool, Ordering},
};

use gpumux_wire::{
    Shim,
    message::{Piece, SHARING},
};

use super::{Handle, block_of, handle_of, tell};
use crate::{
    ground::{
        driver::{CUresult, SUCCESS},
        gate, lease,
        notice::say,
        own::OwnFd,
    },
    memory::{
        physical,
        ranges::{self, Allocation},
        space::{self, Export, Space, with},
        swap,
        vmm::{self, Chunk, NOT_SUPPORTED},
    },
};

/// A token that cannot be guessed; none: the kernel has no random numbers.
fn fresh() -> Option<u128> {
    let mut bytes = [0; 16];
    // SAFETY: a buffer of this length.
    let filled = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    (filled == bytes.len() as isize).then_some(u128::from_ne_bytes(bytes))
}

/// Whether memory of this device can be passed to other processes.
fn passes(device: c_int) -> bool {
    vmm::is_shareable(device) && lease::knows(SHARING)
}

/// Whether an allocation of this start gets a handle; one of another process gets none.
pub(crate) fn is_exportable((start, allocation): (u64, Allocation)) -> bool {
    let block = |space: &mut Space| {
        let block = space.blocks.get(&allocation.block)?;
        block.elastic.is_none().then_some(block.device)
    };
    let is_own = ranges::read(|it| it.allocations.contains_key(&start));
    is_own && with(block).is_some_and(passes)
}

/// `cuIpcGetMemHandle`
///
/// # Safety
/// `handle` must be what the program passed.
pub(crate) unsafe fn get(
    handle: *mut Handle,
    address: u64,
    real: impl FnOnce() -> CUresult,
) -> CUresult {
    let own = || space::find(address);
    let Some((start, allocation)) = (!space::off() && !handle.is_null()).then(own).flatten() else {
        // The driver's own memory, or none.
        return gate::through(real);
    };
    let block = |space: &mut Space| {
        let block = space.blocks.get(&allocation.block)?;
        Some((block.device, block.elastic.is_some()))
    };
    let device = match with(block) {
        // What is behind its addresses changes.
        Some((_, true)) => return NOT_SUPPORTED,
        found => found.map(|(device, _)| device),
    };
    // What was mapped while a first daemon is awaited: only a daemon says whether it can be passed on.
    if lease::session() == 0 {
        lease::await_return();
    }
    // A daemon that is just away will learn of it.
    let token = match device.is_some_and(passes) {
        true => fresh().and_then(|token| with(|space| space.export(start, allocation, token))),
        false => None,
    };
    let Some(token) = token else {
        let result = physical::pin(address, 1, real);
        if result != SUCCESS {
            say(format_args!(
                "this program shares device memory with other processes: run it with GPUMUX_MEMORY=native"
            ));
            space::leave_to_driver();
        }
        return result;
    };
    announce(token);
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

/// Has the daemon know of an export before any other process can request it.
fn announce(token: u128) {
    if with(|space| space.exports.get(&token).is_none_or(|it| it.known)) {
        return;
    }
    // Without an answer the daemon is away, and learns of it when it is back.
    let answer = lease::ask(|ticket| Shim::Export { ticket, token });
    if answer.is_some() {
        with(|space| {
            if let Some(export) = space.exports.get_mut(&token) {
                export.known = true;
            }
        });
    }
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
        let mut exports = self.exports.iter();
        let sibling = exports.find(|(_, it)| it.block == allocation.block);
        let token = sibling.map_or(token, |(sibling, _)| {
            u128::from(block_of(*sibling)) << 64 | u128::from(token as u64)
        });
        let export = Export {
            address: Some(address),
            block: allocation.block,
            open: false,
            known: false,
        };
        self.exports.insert(token, export);
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

    /// A block is gone: what others have open of it they keep, and it is accounted to one of them.
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
        let chunk = block.chunk(index as usize)?;
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

    fn unshare(&mut self, token: u128) -> Option<Shim> {
        let export = self.exports.get_mut(&token)?;
        let (at, ended) = (export.block, export.address.is_none());
        let was_open = std::mem::replace(&mut export.open, false);
        if ended {
            self.exports.remove(&token);
            tell(Shim::Withdraw { token });
        }
        was_open.then(|| self.set_shared(at, false)).flatten()
    }
}

/// A piece of an export, for another process. By the thread that moves memory, while all memory is on the device.
pub(crate) fn serve(token: u128, index: u32) -> Option<(Piece, OwnFd)> {
    let (chunk, piece, context) = with(|space| space.serve(token, index))?;
    let made = swap::in_context(context, || vmm::export(&chunk))?;
    Some((piece, made.ok()?))
}

/// No other process has an export open any more. By the thread that moves memory, while all memory is on the device.
pub(crate) fn unshared(token: u128) {
    space::tell_with(|space| space.unshare(token));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_differ() {
        assert_ne!(fresh(), fresh());
    }

    #[test]
    fn freed_memory_cannot_be_opened_but_stays_open() {
        let export = |address, open| Export {
            address: Some(address),
            block: 4096,
            open,
            known: true,
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
        assert!(space.unshare(2).is_none());
        assert_eq!(space.exports.keys().collect::<Vec<_>>(), [&3]);
        space.drop_exports(4096);
        assert!(space.exports.is_empty());
    }
}
