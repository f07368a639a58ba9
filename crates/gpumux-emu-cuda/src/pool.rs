//! Memory pools. A pool keeps the memory that it has got from the device, up to its threshold, when the program waits for work next.

use std::{
    collections::{BTreeMap, HashMap},
    ffi::c_int,
    sync::{Arc, Mutex},
};

use gpumux_cuda::types::pool::{MOST_RESERVED, MOST_USED, RESERVED, THRESHOLD, USED};

use crate::{
    error::{CuError, Result},
    memory,
    process::{Registry, lock, process},
};

type Handle = usize;

/// A pool.
pub(crate) struct Pool {
    pub(crate) device: c_int,
    /// What was set, by attribute.
    values: Mutex<HashMap<c_int, u64>>,
    /// Most that was reserved, and used.
    most: Mutex<(u64, u64)>,
}

/// Each device's default pool, and its current one.
static OF_DEVICES: Mutex<BTreeMap<c_int, (Handle, Handle)>> = Mutex::new(BTreeMap::new());
pub(crate) static POOLS: Registry<Pool> = Registry::new();

/// Reuse: on unless switched off. Release threshold: 0.
pub(crate) fn initial(attribute: c_int) -> Result<u64> {
    match attribute {
        1..=3 => Ok(1),
        THRESHOLD..=MOST_USED => Ok(0),
        _ => Err(CuError::INVALID_VALUE),
    }
}

pub(crate) fn make(device: c_int) -> Result<Handle> {
    process()?.device(device)?;
    Ok(POOLS.add(Arc::new(Pool {
        device,
        values: Mutex::default(),
        most: Mutex::default(),
    })))
}

/// Allocates from a pool, for the context of a handle.
pub(crate) fn alloc(handle: Handle, context: usize, bytes: u64) -> Result<u64> {
    let pool = POOLS.get(handle)?;
    let device = process()?.device(pool.device)?.index;
    let at = memory::alloc_from_pool(device, context, handle, bytes)?;
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
    pub(crate) fn value(&self, handle: Handle, attribute: c_int) -> Result<u64> {
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

    pub(crate) fn set(&self, handle: Handle, attribute: c_int, value: u64) -> Result {
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

/// Sets a device's pool.
pub(crate) fn set_of_device(device: c_int, pool: Handle) -> Result {
    if POOLS.get(pool)?.device != device {
        return Err(CuError::INVALID_VALUE);
    }
    let first = of_device(device, true)?;
    lock(&OF_DEVICES).insert(device, (first, pool));
    Ok(())
}
