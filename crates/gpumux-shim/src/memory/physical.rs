//! Physical memory that the program handles itself (`cuMemCreate`, as PyTorch's expandable segments do): it moves too.
//!
//! The program gets a handle of this library's making, because the driver's changes when the memory comes back. Where it
//! is mapped and may be touched is remembered, so that it can be mapped there again. What other devices or processes
//! may reach, what is no plain memory, and what cannot be copied (because it is mapped nowhere) stays where it is. What is
//! known never to move keeps the driver's handle, and is only counted until nothing holds it.

use std::{
    collections::BTreeMap,
    ffi::c_int,
    slice,
    sync::atomic::{AtomicU64, Ordering},
};

use crate::{
    ground::{
        driver::{AllocationProp, CUresult, SUCCESS},
        gate,
    },
    memory::{
        ranges,
        space::{self, Physical, Space, with},
        vmm::{self, Access, GRANULE},
    },
};

/// The handles of this library begin here: above all addresses, which the driver's are made of.
const FIRST: u64 = 0x6770_0000_0000_0000;
/// `CUDA_ERROR_INVALID_VALUE`
const INVALID_VALUE: CUresult = 1;
/// Handle types that the memory may be passed on by, if it ever is: `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR` and
/// `CU_MEM_HANDLE_TYPE_FABRIC`. What is passed on stays where it is from then on.
const PASSED_ON: c_int = 1 | 8;

/// A handle that no other memory ever has.
fn fresh() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(FIRST);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Whether it is one of those.
const fn is_ours(handle: u64) -> bool {
    handle >> 48 == FIRST >> 48
}

/// The driver's handle for one that the program has.
fn real_handle(handle: u64) -> Result<u64, CUresult> {
    with(|space| space.physicals.get(&handle)?.handle).ok_or(INVALID_VALUE)
}

/// Whether memory like this can move.
pub(crate) fn may_move(bytes: u64, prop: &AllocationProp, flags: u64) -> bool {
    let [compression, _rdma, rest @ ..] = prop.flags;
    // `CU_MEM_ALLOCATION_TYPE_PINNED` on a device, of a plain kind and for no tiles.
    (prop.kind, prop.location.kind, prop.win32, flags) == (1, 1, 0, 0)
        && prop.handles & !PASSED_ON == 0
        && (compression, rest) == (0, [0; 6])
        && bytes != 0
        && bytes.is_multiple_of(GRANULE)
}

/// The driver has made memory for the program; the program's handle.
pub(crate) fn made(handle: u64, bytes: u64, context: u64, prop: AllocationProp) -> u64 {
    let physical = Physical::new(handle, bytes, context, prop);
    let name = fresh();
    with(|space| space.physicals.insert(name, physical));
    name
}

/// The driver has made memory that does not move; the program has the driver's handle.
pub(crate) fn counted(handle: u64, bytes: u64, prop: AllocationProp) {
    let physical = Physical {
        pinned: true,
        ..Physical::new(handle, bytes, 0, prop)
    };
    with(|space| space.physicals.insert(handle, physical));
}

/// `cuMemRelease`; none: it is not known.
pub(crate) fn release(handle: u64) -> Option<CUresult> {
    let known = || is_ours(handle) || with(|space| space.physicals.contains_key(&handle));
    if space::off() || !known() {
        return None;
    }
    let result = gate::through(|| {
        let last = with(|space| {
            let physical = space.physicals.get_mut(&handle)?;
            physical.references = physical.references.checked_sub(1)?;
            Some(match physical.references {
                // The driver's own is kept as long as it is mapped, so that nothing else is called so.
                0 if is_ours(handle) => physical.handle.take(),
                _ => None,
            })
        });
        let Some(real) = last else {
            return INVALID_VALUE;
        };
        let result = real.map_or(SUCCESS, vmm::release);
        give(with(|space| space.end_unmapped(handle)));
        result
    });
    Some(result)
}

/// Nothing holds it any more.
fn give(gone: impl IntoIterator<Item = Physical>) {
    for physical in gone {
        if let Some(handle) = physical.handle {
            let _ = vmm::release(handle);
        }
        space::give(physical.device, physical.bytes, physical.pinned);
    }
}

impl Space {
    /// Forgets memory that nothing holds any more.
    fn end_unmapped(&mut self, handle: u64) -> Option<Physical> {
        let physical = self.physicals.get(&handle)?;
        let ended = physical.references == 0 && physical.mappings.is_empty();
        ended.then(|| self.physicals.remove(&handle)).flatten()
    }

    /// It stays where it is from now on. What the daemon must hear.
    pub(crate) fn pin_physical(&mut self, handle: u64) -> Option<gpumux_wire::Shim> {
        let physical = self.physicals.get_mut(&handle).filter(|it| !it.pinned)?;
        physical.pinned = true;
        let (device, bytes) = (physical.device, physical.bytes);
        self.book_as_pinned(device, bytes)
    }
}

/// What lies in a range of addresses: where, and the handle of it.
fn mapped_in(at: u64, bytes: u64) -> Vec<(u64, u64)> {
    ranges::read(|it| {
        let range = it.mapped.range(at..at.saturating_add(bytes));
        range.map(|(at, (_, handle))| (*at, *handle)).collect()
    })
}

/// The handle of what is mapped at an address.
fn mapped_at(address: u64) -> Option<u64> {
    ranges::read(|it| it.mapped_at(address))
}

/// What is mapped in a range stays where it is from now on, as far as the program handles it.
fn pin_mapped(address: u64, bytes: u64) {
    space::tell_with(|space| {
        let inside = mapped_in(address, bytes).into_iter();
        let all = mapped_at(address).into_iter();
        let all = all.chain(inside.map(|(_, handle)| handle));
        all.filter_map(|handle| space.pin_physical(handle))
            .collect::<Vec<_>>()
    });
}

/// The program takes hold of physical memory behind an address: that stays where it is from now on.
pub(crate) fn pin(address: u64, bytes: u64, real: impl FnOnce() -> CUresult) -> CUresult {
    if space::off() {
        return gate::through(real);
    }
    gate::through(|| {
        space::tell_with(|space| {
            let (_, allocation) = space::find(address)?;
            space.pin(allocation.block)
        });
        pin_mapped(address, bytes);
        real()
    })
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

fn pin_handle(handle: u64) {
    space::tell_with(|space| space.pin_physical(handle));
}

/// Whether an address is of memory that the program handles: the driver has no record of it while it is away.
pub(crate) fn is_mapped(address: u64) -> bool {
    mapped_at(address).is_some()
}

/// A context is gone: without it nothing is copied.
pub(crate) fn forget_context(context: u64) {
    let all = with(|space| {
        let own = space
            .physicals
            .iter()
            .filter(|(_, it)| it.context == context);
        own.map(|(handle, _)| *handle).collect::<Vec<_>>()
    });
    all.into_iter().for_each(pin_handle);
}

/// `cuMemMap`
pub(crate) fn map(
    at: u64,
    bytes: usize,
    offset: usize,
    handle: u64,
    flags: u64,
    real: impl FnOnce() -> CUresult,
) -> CUresult {
    gate::through(|| {
        let result = match is_ours(handle) {
            true => real_handle(handle)
                .map_or_else(|error| error, |own| vmm::map(at, bytes, offset, own, flags)),
            false => real(),
        };
        if result != SUCCESS {
            return result;
        }
        space::tell_with(|space| {
            let physical = space.physicals.get_mut(&handle)?;
            physical.mappings.insert(at, false);
            let whole = (offset, bytes as u64) == (0, physical.bytes);
            ranges::write(|it| it.mapped.insert(at, (bytes as u64, handle)));
            match whole {
                true => None,
                false => space.pin_physical(handle),
            }
        });
        result
    })
}

/// `cuMemUnmap`
pub(crate) fn unmap(at: u64, bytes: usize, real: impl FnOnce() -> CUresult) -> CUresult {
    gate::through(|| {
        let result = real();
        if result == SUCCESS {
            let mut gone = Vec::new();
            with(|space| {
                for (at, handle) in mapped_in(at, bytes as u64) {
                    ranges::write(|it| it.mapped.remove(&at));
                    if let Some(physical) = space.physicals.get_mut(&handle) {
                        physical.mappings.remove(&at);
                    }
                    gone.extend(space.end_unmapped(handle));
                }
            });
            give(gone);
        }
        result
    })
}

/// `cuMemSetAccess`
///
/// # Safety
/// The arguments must be what the program passed.
pub(crate) unsafe fn set_access(
    at: u64,
    bytes: usize,
    access: *const Access,
    count: usize,
    real: impl FnOnce() -> CUresult,
) -> CUresult {
    gate::through(|| {
        let result = real();
        if result != SUCCESS || access.is_null() {
            return result;
        }
        // SAFETY: the driver has just read as many.
        let access = unsafe { slice::from_raw_parts(access, count) };
        space::tell_with(|space| {
            let mut holds = Vec::new();
            for (at, handle) in mapped_in(at, bytes as u64) {
                let Some(physical) = space.physicals.get_mut(&handle) else {
                    continue;
                };
                let own = physical.prop.location;
                for it in access {
                    if it.location == own {
                        physical.mappings.insert(at, it.flags == vmm::READ_WRITE);
                    }
                }
                // Read-only, or from elsewhere: that would have to be made again in the same way.
                if access
                    .iter()
                    .any(|it| it.location != own || !matches!(it.flags, 0 | vmm::READ_WRITE))
                {
                    holds.extend(space.pin_physical(handle));
                }
            }
            holds
        });
        result
    })
}

/// `cuMemRetainAllocationHandle`: the handle of what is mapped at an address, once more.
///
/// # Safety
/// The arguments must be what the program passed.
pub(crate) unsafe fn retain(
    out: *mut u64,
    address: u64,
    real: impl FnOnce() -> CUresult,
) -> CUresult {
    let ours = (!out.is_null() && !space::off()).then(|| mapped_at(address));
    let Some(handle) = ours.flatten() else {
        // The program got a block of this library by `cuMemAlloc`, and the driver has no handle for such memory.
        return match space::is_allocated(address) {
            true => INVALID_VALUE,
            false => gate::through(real),
        };
    };
    gate::through(|| {
        let held = with(|space| {
            let physical = space.physicals.get_mut(&handle)?;
            physical.handle?;
            physical.references += 1;
            Some(())
        });
        let result = match held {
            Some(()) => SUCCESS,
            None => real(),
        };
        if result == SUCCESS {
            // SAFETY: the program's place, which is not null, and where the driver has written if it was asked.
            let own = unsafe { out.replace(handle) };
            let spare = with(|space| {
                let physical = space
                    .physicals
                    .get_mut(&handle)
                    .filter(|_| held.is_none())?;
                physical.references += 1;
                // Another thread may have asked at the same time: one reference of the driver's is enough.
                match physical.handle {
                    None => physical.handle.replace(own),
                    Some(_) => Some(own),
                }
            });
            if let Some(spare) = spare {
                vmm::release(spare);
            }
        }
        result
    })
}

/// A call about memory by its handle; `pins`: it passes the memory on, which stays where it is from then on.
pub(crate) fn passed_on(
    handle: u64,
    pins: bool,
    call: impl FnOnce(u64) -> Option<CUresult>,
    real: impl FnOnce() -> CUresult,
) -> CUresult {
    if !is_ours(handle) {
        return gate::through(real);
    }
    gate::through(|| match real_handle(handle) {
        Ok(own) => {
            if pins {
                pin_handle(handle);
            }
            call(own).unwrap_or(INVALID_VALUE)
        }
        Err(error) => error,
    })
}

// ---- Moving --------------------------------------------------------------------------------------

/// There is a copy of the contents: lets go of the memory. The addresses stay the program's.
pub(crate) fn leave(handle: u64, host: Vec<(usize, usize)>) {
    let left = with(|space| {
        let physical = space.physicals.get_mut(&handle)?;
        physical.host = host;
        let held = physical.handle.take();
        Some((physical.mappings.clone(), physical.bytes, held))
    });
    if let Some((mappings, bytes, held)) = left {
        unmake(&mappings, bytes, held);
    }
}

fn unmake(mappings: &BTreeMap<u64, bool>, bytes: u64, handle: Option<u64>) {
    for at in mappings.keys() {
        vmm::unmap(*at, bytes);
    }
    if let Some(handle) = handle {
        let _ = vmm::release(handle);
    }
}

/// New memory in place of what is away, where that was mapped: its handle.
pub(crate) fn remake(physical: &Physical) -> Result<u64, CUresult> {
    let bytes = physical.bytes as usize;
    let handle = vmm::create(bytes, &physical.prop)?;
    let mut mapped = BTreeMap::new();
    for (at, accessible) in &physical.mappings {
        let mut result = vmm::map(*at, bytes, 0, handle, 0);
        if result == SUCCESS {
            mapped.insert(*at, *accessible);
            if *accessible {
                result = vmm::set_access(*at, bytes, physical.prop.location);
            }
        }
        if result != SUCCESS {
            unmake(&mapped, physical.bytes, Some(handle));
            return Err(result);
        }
    }
    Ok(handle)
}

/// What was made anew is of no use: the contents stay on the host.
pub(crate) fn give_up(handle: u64, made: u64) {
    let physical = with(|space| space.physicals.get(&handle).cloned());
    if let Some(physical) = physical {
        unmake(&physical.mappings, physical.bytes, Some(made));
    }
}

/// Its contents are in what was made anew.
pub(crate) fn arrived(handle: u64, made: Option<u64>) {
    let needless = with(|space| {
        let physical = space.physicals.get_mut(&handle)?;
        physical.host.clear();
        match physical.references {
            0 => made,
            _ => {
                physical.handle = made;
                None
            }
        }
    });
    if let Some(needless) = needless {
        let _ = vmm::release(needless);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ground::driver::Location;

    #[test]
    fn only_plain_memory_of_a_device_moves() {
        let plain = AllocationProp {
            kind: 1,
            handles: 1,
            location: Location { kind: 1, id: 0 },
            // It may be reached by devices on the bus, if a program ever asks for it.
            flags: [0, 1, 0, 0, 0, 0, 0, 0],
            ..AllocationProp::default()
        };
        assert!(may_move(GRANULE, &plain, 0));
        assert!(!may_move(GRANULE + 512, &plain, 0));
        assert!(!may_move(0, &plain, 0));
        assert!(!may_move(GRANULE, &plain, 1));
        for handles in [0, 8, 9] {
            assert!(may_move(GRANULE, &AllocationProp { handles, ..plain }, 0));
        }
        let mut others = [plain; 4];
        others[0].location.kind = 2;
        others[1].flags[0] = 1;
        others[2].flags[2] = 1;
        others[3].handles = 2;
        for other in others {
            assert!(!may_move(GRANULE, &other, 0), "{other:?}");
        }
    }

    #[test]
    fn own_handles_differ_from_the_drivers() {
        let (first, second) = (fresh(), fresh());
        assert_ne!(first, second);
        assert!(is_ours(first) && is_ours(second));
        for driver in [0, 1, 0x7f12_3456_7890, u64::MAX, 0xffff_8000_0000_0000] {
            assert!(!is_ours(driver));
        }
        assert_eq!(release(1), None);
    }
}
