//! Memory that stays with the driver, and is only counted: managed and stream-ordered memory, arrays, and what cannot be mapped.

use std::ffi::c_int;

use crate::{
    ground::{
        context::{current_context, is_capturing_anywhere},
        driver::{AllocationProp, CUresult, SUCCESS},
        gate, lease,
    },
    memory::{
        attempt::{self, Refused, in_time},
        graphs, physical, pools,
        space::{Native, current_device, give, known_device, off, take, with},
    },
};

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
pub(crate) unsafe fn count_native(
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

pub(crate) fn give_natives(gone: impl IntoIterator<Item = Native>) {
    for it in gone {
        match with(|space| space.keep_in_pool(it)) {
            Ok(()) => pools::watch(),
            // What no pool keeps goes back to the lease.
            Err(it) => give(it.device, it.bytes, true),
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
    let counted = !off() && bytes != 0 && !is_capturing_anywhere();
    if is_capturing_anywhere() {
        // What is captured allocates when its graph runs.
        graphs::will_allocate();
    }
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
    // What is captured allocates when its graph runs.
    let counted = !off() && bytes != 0 && !is_capturing_anywhere();
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

pub(crate) fn release_native(address: u64, real: impl FnOnce() -> CUresult) -> CUresult {
    match off() {
        true => gate::through(real),
        false => release_counted(address, real),
    }
}

fn release_counted(address: u64, real: impl FnOnce() -> CUresult) -> CUresult {
    // Before its address may be another's.
    let gone = with(|space| space.natives.remove(&address));
    let result = gate::through(real);
    match gone {
        Some(it) if result != SUCCESS => with(|space| {
            space.natives.entry(address).or_insert(it);
        }),
        gone => give_natives(gone),
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

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

    /// An allocation of so many bytes, of no pool.
    const fn native(bytes: u64) -> Native {
        Native {
            device: 90,
            bytes,
            context: 0,
            pool: 0,
        }
    }

    fn bytes_at(address: u64) -> Option<u64> {
        with(|space| space.natives.get(&address).map(|it| it.bytes))
    }

    #[test]
    fn address_given_out_again_during_its_free_stays_counted() {
        const AT: u64 = 0x1_0000;
        with(|space| space.natives.insert(AT, native(1)));
        let freed = release_counted(AT, || {
            // Another thread gets the same address before this call has returned.
            with(|space| space.natives.insert(AT, native(2)));
            SUCCESS
        });
        assert_eq!((freed, bytes_at(AT)), (SUCCESS, Some(2)));
    }

    #[test]
    fn memory_that_the_driver_does_not_free_stays_counted() {
        const AT: u64 = 0x2_0000;
        with(|space| space.natives.insert(AT, native(1)));
        assert_eq!((release_counted(AT, || 700), bytes_at(AT)), (700, Some(1)));
        assert_eq!(
            (release_counted(AT, || SUCCESS), bytes_at(AT)),
            (SUCCESS, None)
        );
    }
}
