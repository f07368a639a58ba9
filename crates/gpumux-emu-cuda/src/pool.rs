//! Memory pools. All of a device's pools give out the same memory, and at once give it back when it is freed: what a program
//! sets is kept and told, but changes nothing.

use std::{
    collections::HashMap,
    ffi::{c_int, c_uint},
    sync::{Arc, Mutex},
};

use crate::{
    border::{AnyOut, In, Out, UserData, cuda, exports},
    error::{CuError, Result},
    process::{lock, process},
    stream,
};

type Handle = usize;

/// A pool.
pub(crate) struct Pool {
    device: c_int,
    /// What was set, by attribute.
    values: Mutex<HashMap<c_int, u64>>,
}

/// Reuse: on unless switched off. Release threshold: 0.
fn initial(attribute: c_int) -> Result<u64> {
    match attribute {
        1..=3 => Ok(1),
        // Threshold, and what is reserved and used, now and at most.
        4..=8 => Ok(0),
        _ => Err(CuError::INVALID_VALUE),
    }
}

fn make(device: c_int) -> Result<Handle> {
    let process = process()?;
    process.device(device)?;
    Ok(process.pools.add(Arc::new(Pool {
        device,
        values: Mutex::default(),
    })))
}

/// A device's pool: the default one, made when first asked for, or the one that was set.
fn of_device(device: c_int, default: bool) -> Result<Handle> {
    let process = process()?;
    process.device(device)?;
    let mut pools = lock(&process.device_pools);
    let known = pools.get(&device).copied();
    let (first, current) = match known {
        Some(pools) => pools,
        None => {
            let made = make(device)?;
            pools.insert(device, (made, made));
            (made, made)
        }
    };
    Ok(if default { first } else { current })
}

exports! { FUNCTIONS by cuda;
    cuDeviceGetDefaultMemPool(pool: Out<Handle>, device: c_int) => pool.put(of_device(device, true)?);
    cuDeviceGetMemPool(pool: Out<Handle>, device: c_int) => pool.put(of_device(device, false)?);
    cuDeviceSetMemPool(device: c_int, pool: Handle) => {
        let process = process()?;
        if process.pools.get(pool)?.device != device {
            return Err(CuError::INVALID_VALUE);
        }
        let first = of_device(device, true)?;
        lock(&process.device_pools).insert(device, (first, pool));
        Ok(())
    };
    cuMemPoolCreate(pool: Out<Handle>, props: In<[c_int; 4]>) => {
        // Kind of allocation, of handles, of location, and which.
        let [kind, _, location, device] = props.get()?;
        if kind != 1 || location != 1 {
            return Err(CuError::NOT_SUPPORTED);
        }
        pool.put(make(device)?)
    };
    cuMemPoolDestroy(pool: Handle) => process()?.pools.remove(pool).map(drop);
    cuMemPoolTrimTo(pool: Handle, _keep: usize) => process()?.pools.get(pool).map(drop);
    cuMemPoolSetAttribute(pool: Handle, attribute: c_int, value: AnyOut) => {
        let pool = process()?.pools.get(pool)?;
        initial(attribute)?;
        let value = match attribute {
            1..=3 => value.typed::<c_int>().get()? as u64,
            _ => value.typed::<u64>().get()?,
        };
        lock(&pool.values).insert(attribute, value);
        Ok(())
    };
    cuMemPoolGetAttribute(pool: Handle, attribute: c_int, value: AnyOut) => {
        let pool = process()?.pools.get(pool)?;
        let found = match lock(&pool.values).get(&attribute) {
            Some(value) => *value,
            None => initial(attribute)?,
        };
        match attribute {
            1..=3 => value.typed::<c_int>().put(found as c_int),
            _ => value.typed::<u64>().put(found),
        }
    };
    cuMemPoolSetAccess(pool: Handle, _access: UserData, _count: usize) => process()?.pools.get(pool).map(drop);
    cuMemPoolGetAccess(flags: Out<c_int>, pool: Handle, location: In<[c_int; 2]>) => {
        let own = process()?.pools.get(pool)?.device;
        let [kind, device] = location.get()?;
        flags.put(if kind == 1 && device == own { 3 } else { 0 })
    };
    [cuMemAllocFromPoolAsync_ptsz]cuMemAllocFromPoolAsync(address: Out<u64>, bytes: usize, pool: Handle, stream: Handle) => {
        address.check()?;
        process()?.pools.get(pool)?;
        address.put(stream::alloc_async(bytes, stream)?)
    };
    cuMemAllocManaged(address: Out<u64>, bytes: usize, flags: c_uint) => {
        // The host reaches all memory of the device here.
        address.check()?;
        if flags != 1 && flags != 2 {
            return Err(CuError::INVALID_VALUE);
        }
        let context = crate::context::current()?;
        context.check()?;
        let at = crate::memory::alloc(context.device.index, context.handle(), bytes as u64)?;
        crate::memory::manage(at);
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
