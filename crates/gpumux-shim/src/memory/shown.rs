//! What a program is shown of device memory: how much there is, and whose an address is.

use std::{
    collections::BTreeMap,
    ffi::{c_int, c_void},
    sync::Mutex,
    time::Instant,
};

use gpumux_wire::{MEMORY_LIMIT_VARIABLE, Shim};

use crate::{
    ground::{
        driver::{self, CUresult, SUCCESS},
        gate, guard, lease,
        look::look,
        ranks::part,
    },
    memory::{
        ipc, physical,
        ranges::Allocation,
        space::{current_device, describe, off, ours, with},
    },
};

/// What the tenant may believe of a device: free and in all.
fn view(device: c_int) -> Option<(u64, u64)> {
    let (uuid, total) = with(|space| {
        let known = space.devices.get(&device)?;
        Some((known.uuid.clone(), known.total))
    })?;
    view_of(&uuid, total)
}

/// The same of a device of this UUID and size.
fn view_of(uuid: &str, total: u64) -> Option<(u64, u64)> {
    let (now, session) = (Instant::now(), lease::session());
    let known = with(|space| {
        let (id, known) = space.devices.iter().find(|(_, it)| it.uuid == uuid)?;
        let seen = known.seen(now, session);
        Some((*id, known.has(), seen, space.unused(*id)))
    });
    let with_unused = |(free, all): (u64, u64), unused| (free.saturating_add(unused).min(all), all);
    if let Some((_, _, Some(seen), unused)) = known {
        return Some(with_unused(seen, unused));
    }
    let question = |ticket| Shim::View {
        ticket,
        device: uuid.to_owned(),
        total,
    };
    let (free, all) = lease::ask(question)?;
    let all = all.min(total);
    if all == 0 {
        return None;
    }
    let unused = known.and_then(|(id, holds, ..)| {
        with(|space| {
            let asked = (now, session, holds);
            space.devices.get_mut(&id)?.see(asked, (free, all));
            Some(space.unused(id))
        })
    });
    Some(with_unused((free, all), unused.unwrap_or(0)))
}

/// The same, also of a process without a session. A forked child has none, either.
pub(crate) fn view_anywhere(uuid: &str, total: u64) -> Option<(u64, u64)> {
    let seen = (!off()).then(|| view_of(uuid, total)).flatten();
    let (free, all) = seen.or_else(|| look(uuid, total))?;
    let all = all.min(total);
    (all != 0).then_some((part(free.min(all)), part(all)))
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
                unsafe { *place = part(value) as usize };
            }
        }
    }
    result
}

/// The limit that the environment names.
fn told() -> Option<u64> {
    std::env::var(MEMORY_LIMIT_VARIABLE).ok()?.parse().ok()
}

/// The capacity that the program is shown of a device, also before it has a session. Without a daemon only its environment is known.
fn capacity(device: c_int) -> Option<u64> {
    /// By device: the answers of daemons to this process before it had a session. They do not change.
    static KNOWN: Mutex<BTreeMap<c_int, u64>> = Mutex::new(BTreeMap::new());
    if !off()
        && let Some((_, all)) = view(device)
    {
        return Some(all);
    }
    // In a forked child, a thread that is not there may have it.
    let mut known = guard::try_lock(&KNOWN);
    if let Some(all) = known.as_ref().and_then(|it| it.get(&device)) {
        return Some(*all);
    }
    let seen = driver::enabled().then(|| describe(device)).flatten();
    let seen = seen.and_then(|(uuid, total)| look(&uuid, total));
    let Some((_, all)) = seen.filter(|(_, all)| *all != 0) else {
        return told();
    };
    if let Some(known) = &mut known {
        known.insert(device, all);
    }
    Some(all)
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
    if result == SUCCESS
        && !bytes.is_null()
        && let Some(all) = capacity(device)
    {
        // SAFETY: the driver has just written there.
        unsafe { *bytes = (*bytes).min(part(all) as usize) };
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

/// The others of these: whether an address is fit for `cuIpcGetMemHandle`, and a mask of the kinds of handles that its memory has.
const IPC_CAPABLE: c_int = 10;
const HANDLE_TYPES: c_int = 14;

/// What the first byte of the driver's answer must be, which is small, whatever its width.
fn low_byte(attribute: c_int, is_exportable: impl FnOnce() -> bool) -> Option<u8> {
    match attribute {
        IPC_CAPABLE => is_exportable().then_some(1),
        HANDLE_TYPES => Some(0),
        _ => None,
    }
}

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
    let result = gate::through(real);
    if result == SUCCESS
        && let Some(value) = low_byte(which, || ipc::is_exportable(found))
    {
        // SAFETY: the driver has just written there.
        unsafe { data.cast::<u8>().write(value) };
    }
    result
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
            if place.is_null() {
                continue;
            }
            // SAFETY: as above; all of them are 64 bits long, and the driver has just written the others.
            unsafe {
                if let Some(value) = attribute(which, address, found) {
                    place.cast::<u64>().write_unaligned(value);
                } else if let Some(value) = low_byte(which, || ipc::is_exportable(found)) {
                    place.cast::<u8>().write(value);
                }
            }
        }
    }
    result
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use crate::memory::space::Space;

    use super::*;

    #[test]
    fn answer_serves_until_it_is_old_or_the_process_has_other_memory() {
        let mut space = Space::default();
        space.know_for_tests(0);
        let at = Instant::now();
        let seen = |space: &Space, after: u64, session| {
            space.devices[&0].seen(at + Duration::from_micros(after), session)
        };
        assert_eq!(seen(&space, 0, 1), None, "none was asked for");
        let known = space.devices.get_mut(&0).unwrap();
        let holds = known.has();
        known.see((at, 1, holds), (7, 9));
        assert_eq!(known.shown, 9);
        assert_eq!(seen(&space, 999, 1), Some((7, 9)));
        assert_eq!(seen(&space, 1_000, 1), None);
        assert_eq!(seen(&space, 0, 2), None, "of another daemon");
        space.grant_for_tests(0, 1);
        assert_eq!(seen(&space, 0, 1), None);
        // Another thread got memory before the answer came.
        let known = space.devices.get_mut(&0).unwrap();
        known.see((at, 1, holds), (7, 9));
        assert_eq!(seen(&space, 0, 1), None);
    }
}
