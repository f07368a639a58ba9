//! Memory pools. A pool keeps the memory that it has got from the device, up to its threshold, when the program waits for work next.

use std::{
    collections::{BTreeMap, HashMap},
    ffi::{c_int, c_uint},
    sync::{Arc, Mutex},
};

use crate::{
    border::{AnyOut, In, Out, UserData, cuda, exports},
    context::Context,
    error::{CuError, Result},
    memory,
    process::{Registry, lock, process},
    stream,
};

type Handle = usize;

/// A pool.
pub(crate) struct Pool {
    device: c_int,
    /// What was set, by attribute.
    values: Mutex<HashMap<c_int, u64>>,
    /// Most that was reserved, and used.
    most: Mutex<(u64, u64)>,
}

/// Each device's default pool, and its current one.
static OF_DEVICES: Mutex<BTreeMap<c_int, (Handle, Handle)>> = Mutex::new(BTreeMap::new());
static POOLS: Registry<Pool> = Registry::new();

/// Attributes: what is kept, and of what the pool has and what is used, how much now and at most.
const THRESHOLD: c_int = 4;
const RESERVED: c_int = 5;
const MOST_RESERVED: c_int = 6;
const USED: c_int = 7;
const MOST_USED: c_int = 8;

/// Reuse: on unless switched off. Release threshold: 0.
fn initial(attribute: c_int) -> Result<u64> {
    match attribute {
        1..=3 => Ok(1),
        THRESHOLD..=MOST_USED => Ok(0),
        _ => Err(CuError::INVALID_VALUE),
    }
}

fn make(device: c_int) -> Result<Handle> {
    process()?.device(device)?;
    Ok(POOLS.add(Arc::new(Pool {
        device,
        values: Mutex::default(),
        most: Mutex::default(),
    })))
}

/// Allocates from a pool.
pub(crate) fn alloc(handle: Handle, context: &Context, bytes: u64) -> Result<u64> {
    let pool = POOLS.get(handle)?;
    let device = process()?.device(pool.device)?.index;
    let at = memory::alloc_from_pool(device, context.handle(), handle, bytes)?;
    let now = memory::pool_use(handle);
    let mut most = lock(&pool.most);
    *most = (most.0.max(now.0), most.1.max(now.1));
    Ok(at)
}

/// The program has waited for work: pools give back what is empty and above their thresholds.
pub(crate) fn settle() {
    if process().is_err() {
        return;
    }
    for (handle, pool) in POOLS.entries() {
        let keep = lock(&pool.values).get(&THRESHOLD).copied().unwrap_or(0);
        let (reserved, used) = memory::pool_use(handle);
        if reserved > keep && reserved > used {
            memory::trim_pool(handle, keep);
        }
    }
}

impl Pool {
    fn value(&self, handle: Handle, attribute: c_int) -> Result<u64> {
        let now = memory::pool_use(handle);
        Ok(match attribute {
            RESERVED => now.0,
            USED => now.1,
            MOST_RESERVED => lock(&self.most).0.max(now.0),
            MOST_USED => lock(&self.most).1.max(now.1),
            _ => match lock(&self.values).get(&attribute) {
                Some(value) => *value,
                None => initial(attribute)?,
            },
        })
    }

    fn set(&self, handle: Handle, attribute: c_int, value: u64) -> Result {
        let now = memory::pool_use(handle);
        match (attribute, value) {
            // The most can only begin anew.
            (MOST_RESERVED, 0) => lock(&self.most).0 = now.0,
            (MOST_USED, 0) => lock(&self.most).1 = now.1,
            (RESERVED..=MOST_USED, _) => return Err(CuError::INVALID_VALUE),
            _ => {
                lock(&self.values).insert(attribute, value);
            }
        }
        Ok(())
    }
}

/// A device's pool: the default one, made when first asked for, or the one that was set.
pub(crate) fn of_device(device: c_int, default: bool) -> Result<Handle> {
    process()?.device(device)?;
    let mut pools = lock(&OF_DEVICES);
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
        if POOLS.get(pool)?.device != device {
            return Err(CuError::INVALID_VALUE);
        }
        let first = of_device(device, true)?;
        lock(&OF_DEVICES).insert(device, (first, pool));
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
        initial(attribute)?;
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
    cuMemAllocManaged(address: Out<u64>, bytes: usize, flags: c_uint) => {
        // The host reaches all memory of the device here.
        address.check()?;
        if flags != 1 && flags != 2 {
            return Err(CuError::INVALID_VALUE);
        }
        let context = crate::context::current()?;
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
