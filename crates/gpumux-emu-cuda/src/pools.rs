//! Calls for memory pools and for managed memory.

use std::ffi::{c_int, c_uint};

use crate::{
    border::{AnyOut, In, Out, UserData, cuda, exports},
    context::current,
    error::{CuError, Result},
    memory,
    pool::{self, POOLS},
    process::process,
    stream,
};

type Handle = usize;

/// `CUmemLocation`
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Location {
    kind: c_int,
    id: c_int,
}

impl Location {
    /// `CU_MEM_LOCATION_TYPE_DEVICE`
    const DEVICE: c_int = 1;
    /// `CU_DEVICE_CPU`, for which there is `CU_MEM_LOCATION_TYPE_HOST`.
    const CPU: c_int = -1;

    fn of(device: c_int) -> Self {
        let kind = if device == Self::CPU { 2 } else { Self::DEVICE };
        Self { kind, id: device }
    }

    /// Fails unless it is a device, or a place of the host.
    fn check(self) -> Result {
        match self.kind {
            Self::DEVICE => process()?.device(self.id).map(drop),
            2..=4 => Ok(()),
            _ => Err(CuError::INVALID_VALUE),
        }
    }
}

/// Fails unless the range is managed memory.
fn check_managed(at: u64, bytes: usize) -> Result {
    let space = memory::space();
    let inside = |(start, length): (u64, u64)| {
        let managed = space.allocation(start).is_some_and(|it| it.managed);
        managed && at - start + bytes as u64 <= length
    };
    match bytes > 0 && space.range_of(at).is_some_and(inside) {
        true => Ok(()),
        false => Err(CuError::INVALID_VALUE),
    }
}

/// The memory is everywhere already.
fn prefetch(at: u64, bytes: usize, to: Location, stream: Handle) -> Result {
    stream::stream(stream)?;
    check_managed(at, bytes)?;
    to.check()
}

/// `CU_MEM_ADVISE_…`: some name a place.
fn advise(at: u64, bytes: usize, advice: c_int, location: Location) -> Result {
    process()?;
    check_managed(at, bytes)?;
    match advice {
        3 | 5 | 6 => location.check(),
        1 | 2 | 4 => Ok(()),
        _ => Err(CuError::INVALID_VALUE),
    }
}

exports! { FUNCTIONS by cuda;
    cuDeviceGetDefaultMemPool(pool: Out<Handle>, device: c_int) => pool.put(pool::of_device(device, true)?);
    cuDeviceGetMemPool(pool: Out<Handle>, device: c_int) => pool.put(pool::of_device(device, false)?);
    cuDeviceSetMemPool(device: c_int, pool: Handle) => pool::set_of_device(device, pool);
    cuMemPoolCreate(pool: Out<Handle>, props: In<[c_int; 4]>) => {
        // Kind of allocation, of handles, of location, and which.
        let [kind, _, location, device] = props.get()?;
        if kind != 1 || location != 1 {
            return Err(CuError::NOT_SUPPORTED);
        }
        pool.put(pool::make(device)?)
    };
    cuMemPoolDestroy(pool: Handle) => {
        POOLS.remove(pool)?;
        memory::end_pool(pool);
        Ok(())
    };
    cuMemPoolTrimTo(pool: Handle, keep: usize) => {
        POOLS.get(pool)?;
        memory::trim_pool(pool, keep as u64);
        Ok(())
    };
    cuMemPoolSetAttribute(pool: Handle, attribute: c_int, value: AnyOut) => {
        let of = POOLS.get(pool)?;
        pool::initial(attribute)?;
        let value = match attribute {
            1..=3 => value.typed::<c_int>().get()? as u64,
            _ => value.typed::<u64>().get()?,
        };
        of.set(pool, attribute, value)
    };
    cuMemPoolGetAttribute(pool: Handle, attribute: c_int, value: AnyOut) => {
        let found = POOLS.get(pool)?.value(pool, attribute)?;
        match attribute {
            1..=3 => value.typed::<c_int>().put(found as c_int),
            _ => value.typed::<u64>().put(found),
        }
    };
    cuMemPoolSetAccess(pool: Handle, _access: UserData, _count: usize) => POOLS.get(pool).map(drop);
    cuMemPoolGetAccess(flags: Out<c_int>, pool: Handle, location: In<[c_int; 2]>) => {
        let own = POOLS.get(pool)?.device;
        let [kind, device] = location.get()?;
        flags.put(if kind == 1 && device == own { 3 } else { 0 })
    };
    [cuMemAllocFromPoolAsync_ptsz]cuMemAllocFromPoolAsync(address: Out<u64>, bytes: usize, pool: Handle, stream: Handle) => {
        address.check()?;
        POOLS.get(pool)?;
        address.put(stream::alloc_async(bytes, Some(pool), stream)?)
    };
    cuDeviceGetGraphMemAttribute(device: c_int, attribute: c_int, value: Out<u64>) => value.put(memory::graph_attribute(process()?.device(device)?.index, attribute)?);
    cuDeviceSetGraphMemAttribute(device: c_int, attribute: c_int, value: In<u64>) => memory::reset_graph_attribute(process()?.device(device)?.index, attribute, value.get()?);
    cuDeviceGraphMemTrim(device: c_int) => memory::trim_graphs(process()?.device(device)?.index);
    cuMemAllocManaged(address: Out<u64>, bytes: usize, flags: c_uint) => {
        // The host reaches all memory of the device here.
        address.check()?;
        if flags != 1 && flags != 2 {
            return Err(CuError::INVALID_VALUE);
        }
        let context = current()?;
        context.check()?;
        let at = memory::alloc(context.device.index, context.handle(), bytes as u64)?;
        memory::manage(at);
        address.put(at)
    };
    [cuMemPrefetchAsync_ptsz]cuMemPrefetchAsync(at: u64, bytes: usize, device: c_int, stream: Handle) => prefetch(at, bytes, Location::of(device), stream);
    cuMemAdvise(at: u64, bytes: usize, advice: c_int, device: c_int) => advise(at, bytes, advice, Location::of(device));
    [cuMemPrefetchAsync_v2_ptsz]cuMemPrefetchAsync_v2(at: u64, bytes: usize, location: Location, _flags: c_uint, stream: Handle) => prefetch(at, bytes, location, stream);
    cuMemAdvise_v2(at: u64, bytes: usize, advice: c_int, location: Location) => advise(at, bytes, advice, location);
    [cuStreamAttachMemAsync_ptsz]cuStreamAttachMemAsync(stream: Handle, _at: u64, _bytes: usize, _flags: c_uint) => stream::stream(stream).map(drop);
    cuProfilerStart() => process().map(drop);
    cuProfilerStop() => process().map(drop);
}
