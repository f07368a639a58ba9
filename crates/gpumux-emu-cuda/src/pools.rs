//! Calls for memory pools and for managed memory.

use std::ffi::{c_int, c_uint};

use crate::{
    border::{AnyOut, In, Out, UserData, cuda, exports},
    context::current,
    error::CuError,
    memory,
    pool::{self, POOLS},
    process::process,
    stream,
};

type Handle = usize;

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
    [cuMemPrefetchAsync_ptsz]cuMemPrefetchAsync(_at: u64, _bytes: usize, _device: c_int, stream: Handle) => stream::stream(stream).map(drop);
    cuMemAdvise(_at: u64, _bytes: usize, _advice: c_int, _device: c_int) => process().map(drop);
    [cuMemPrefetchAsync_v2_ptsz]cuMemPrefetchAsync_v2(_at: u64, _bytes: usize, _location: u64, _flags: c_uint, stream: Handle) => stream::stream(stream).map(drop);
    cuMemAdvise_v2(_at: u64, _bytes: usize, _advice: c_int, _location: u64) => process().map(drop);
    [cuStreamAttachMemAsync_ptsz]cuStreamAttachMemAsync(stream: Handle, _at: u64, _bytes: usize, _flags: c_uint) => stream::stream(stream).map(drop);
    cuProfilerStart() => process().map(drop);
    cuProfilerStop() => process().map(drop);
}
