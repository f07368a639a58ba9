//! The program's device memory: what is given out and freed, and what goes with a context.
//!
//! `cuMemAlloc` gives out memory that this library maps itself ([`crate::memory::vmm`]), so that it can be moved away and
//! back without the program's doing ([`crate::memory::swap`]). Small pieces share blocks. Whatever is not plain memory of one
//! device stays with the driver and is only counted ([`crate::memory::native`]). The physical
//! memory that a program handles itself moves where it is plain ([`crate::memory::physical`]). Where mapping fails, the driver's own call is made.
//!
//! What is made is taken from the lease first ([`crate::memory::space`]). Blocks that become empty are kept for the next allocation of their size,
//! up to a batch. Beyond the tenant's limit the program gets CUDA's own error.

use std::{
    collections::BTreeMap,
    ffi::c_int,
    sync::atomic::{AtomicU32, Ordering},
};

use crate::{
    ground::{
        context::{current_context, is_capturing_anywhere, within},
        driver::{CUcontext, CUresult, SUCCESS, functions},
        gate, lease,
        notice::say,
    },
    memory::{
        attempt::{self, Refused, in_time},
        block::{Block, UNKNOWN},
        ipc,
        native::{count_native, give_natives, release_native},
        physical, pools, ranges,
        space::{
            self, Native, Space, batch, current_device, defer, drop_spares, find, give, let_go,
            off, settle, take, tell_with, with,
        },
        swap,
        vmm::{self, CHUNK, GRANULE, OUT_OF_MEMORY},
    },
    work,
};

/// Smaller allocations share a block of [`GRANULE`].
const SMALL: u64 = 1 << 20;
/// Alignment of small allocations and of rows: the driver's own.
const UNIT: u64 = 512;
/// After so many failures to map, the driver's own calls are made at once.
const MAX_FAILURES: u32 = 3;

functions! {
    ctx_synchronize c"cuCtxSynchronize" ();
    ctx_from_green c"cuCtxFromGreenCtx" (*mut CUcontext, CUcontext);
}

static FAILURES: AtomicU32 = AtomicU32::new(0);

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
    // Without a daemon it would never move; one that was lost may come back.
    let place = match lease::is_managed() {
        true => with(|space| space.allot(device, context, bytes)),
        false => Place::WithDriver,
    };
    let mapped = match place {
        Place::At(address) => Ok(address),
        Place::New => in_time(None, || map(device, context, bytes)),
        // SAFETY: as above.
        Place::WithDriver => return unsafe { count_native(device, bytes, out, real) },
    };
    match mapped {
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
    if !work::has_failed() || is_capturing_anywhere() {
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
        space::leave_to_driver();
    }
}

/// Where an allocation comes from.
enum Place {
    /// It is made of memory that the process has.
    At(u64),
    /// Memory that is yet to be mapped.
    New,
    WithDriver,
}

/// Memory of the lease, mapped.
fn map(device: c_int, context: u64, bytes: u64) -> Result<u64, Refused> {
    let small = bytes < SMALL;
    let size = bytes.next_multiple_of(GRANULE);
    if !take(device, size, false) {
        return Err(Refused::ByAccounting);
    }
    let back = || {
        let at = vmm::reserve(size)?;
        let reached_by = vmm::reached_by(device);
        let chunks =
            vmm::back(at, size, CHUNK, device).inspect_err(|_| vmm::unreserve(at, size))?;
        let free = small.then(|| BTreeMap::from([(0, size)]));
        if !is_capturing_anywhere() {
            // Without it the memory may not move: the program need not know.
            let _ = swap::make_tools(context);
        }
        let made = with(|space| {
            let block = Block::new((size, device, context), chunks, free);
            space.blocks.insert(at, block);
            if small {
                return space.carve_from(at, context, bytes).ok_or(OUT_OF_MEMORY);
            }
            ranges::add(at, bytes, at, context);
            Ok(at)
        });
        // Another thread has given a device access meanwhile, and may not have found this block.
        if vmm::reached_by(device) != reached_by {
            let _ = vmm::grant(at, size, device);
        }
        made
    };
    let mapped = attempt::make(None, || gate::through(back));
    mapped.inspect_err(|_| give(device, size, false))
}

impl Space {
    /// An allocation, if there is memory for it. All that one needs of the tables while it is like others before it.
    fn allot(&mut self, device: c_int, context: u64, bytes: u64) -> Place {
        if self.is_native(device) {
            return Place::WithDriver;
        }
        let there = match bytes < SMALL {
            true => self.carve(device, context, bytes),
            false => self.reuse(device, context, bytes, bytes.next_multiple_of(GRANULE)),
        };
        there.map_or(Place::New, Place::At)
    }

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
        ranges::add(at, bytes, at, context);
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
        ranges::add(at + offset, bytes, at, context);
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
            && block.held() == block.bytes
            && kept + block.bytes <= batch(device.total);
        if keep && let Some(block) = self.blocks.get_mut(&at) {
            block.forget_advice();
            self.spares.push(at);
        }
        keep
    }
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
    if is_capturing_anywhere() {
        defer(address);
        return SUCCESS;
    }
    free_deferred();
    let result = settle(context);
    release(address);
    result
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
    if is_capturing_anywhere() {
        return;
    }
    for address in space::take_deferred() {
        if let Some(context) = context_of(address) {
            let _ = settle(context);
            release(address);
        }
        ipc::close_deferred(address);
    }
}

/// A context is about to be destroyed, for which locks are taken: the driver shall not wait for its work then.
fn await_work(context: u64) {
    if !off() && !is_capturing_anywhere() {
        let _ = settle(context);
    }
}

/// `cuCtxDestroy`: a context's memory goes with it.
pub(crate) fn destroy_context(context: CUcontext, real: impl FnOnce() -> CUresult) -> CUresult {
    let gone = |result: &CUresult| work::is_destroyed(*result).then_some(context as u64);
    await_work(context as u64);
    end_context(
        || work::destroy_context([context, std::ptr::null_mut()], real),
        gone,
    )
}

/// `cuCtxDetach`: the context goes with the last that was attached to it.
pub(crate) fn detach_context(context: CUcontext, real: impl FnOnce() -> CUresult) -> CUresult {
    let gone = |result: &CUresult| {
        let context = context as u64;
        (*result == SUCCESS && !work::is_there(context)).then_some(context)
    };
    end_context(|| work::detach_context(context, real), gone)
}

/// `cuGreenCtxDestroy`: its device's primary context has what was allocated in it, while that one is there.
pub(crate) fn destroy_green(green: CUcontext, real: impl FnOnce() -> CUresult) -> CUresult {
    let mut context = std::ptr::null_mut();
    // SAFETY: the program's handle, and a place to write, which stays null at an error.
    let _ = ctx_from_green().map(|ask| unsafe { ask(&raw mut context, green) });
    let counted = !off() && !gate::is_nested() && space::is_used();
    let asked = (counted && !context.is_null()).then_some(context as u64);
    let known = asked.and_then(|context| {
        let device = within(context, current_device).flatten()?;
        Some((context, device, work::primary_context(device)?))
    });
    let gone = |result: &CUresult| {
        let (context, device, primary) = known.filter(|_| work::is_destroyed(*result))?;
        if work::primary_context(device) != Some(primary) {
            return Some(context);
        }
        with(|space| space.hand_over(context, primary));
        None
    };
    asked.into_iter().for_each(await_work);
    let end = || {
        asked.into_iter().for_each(swap::end_context);
        // Its default streams are known by the context, the others by both.
        work::destroy_context([context, green], real)
    };
    end_context(end, gone)
}

/// `cuDevicePrimaryCtxRelease` and `Reset`
pub(crate) fn release_primary(device: c_int, real: impl FnOnce() -> CUresult) -> CUresult {
    let counted = !off() && space::is_used();
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
            let gone = gone(&result).filter(|_| space::is_used());
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

/// `cuMemFreeAsync`
pub(crate) fn free_async(address: u64, real: impl FnOnce() -> CUresult) -> CUresult {
    // Ours may be freed that way too: the driver has no pool for it.
    match !off() && context_of(address).is_some() {
        true => free(address, real),
        false => release_native(address, real),
    }
}

/// All that the process has stays where it is from now on, and whatever it gets.
pub(crate) fn stay() {
    space::STAYS.store(true, Ordering::Release);
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

/// `cuCtxEnablePeerAccess`: from now on memory of the peer's device may be reached from the current one, also when it has moved.
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
    if !vmm::let_reach(reaching, reached) {
        stay();
        return result;
    }
    // What is made later has the access from the start.
    let granted = gate::through(|| {
        let own = with(|space| {
            let all = space.blocks.iter();
            let own = all.filter(|(_, block)| block.device == reached);
            own.map(|(at, block)| (*at, block.bytes))
                .collect::<Vec<_>>()
        });
        own.into_iter()
            .try_for_each(|(at, bytes)| vmm::grant(at, bytes, reached))
    });
    granted.err().unwrap_or(result)
}

/// Gives back all that is granted and not used.
pub(crate) fn trim() {
    pools::trim();
    drop_spares(|_| true);
    space::trim();
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::block::tests::block;

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
