//! Devices, their primary contexts, and which context a handle names.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, atomic::Ordering},
};

use gpumux_emu::protocol::DeviceStatus;

use crate::{
    border::Text,
    context::{self, CONTEXTS, Context, current},
    error::{CuError, Result},
    memory,
    process::{Process, lock, process},
};

/// PCI bus id as text.
pub(crate) fn pci_bus_id(bus: u32) -> String {
    format!("0000:{bus:02X}:00.0")
}

/// The device with this PCI bus id.
pub(crate) fn by_pci_bus_id(text: Text) -> Result<i32> {
    let text = text.get()?;
    let found = process()?
        .devices
        .iter()
        .position(|device| same_bus_id(&text, device.info.pci_bus));
    found.map(|at| at as i32).ok_or(CuError::INVALID_DEVICE)
}

/// Compares in any of the forms that are in use: with or without domain, of four or eight digits.
pub(crate) fn same_bus_id(text: &str, bus: u32) -> bool {
    let parts: Vec<&str> = text.split(':').collect();
    let (domain, at, rest) = match parts[..] {
        [domain, at, rest] => (domain, at, rest),
        [at, rest] => ("0", at, rest),
        _ => return false,
    };
    let hex = |text| u32::from_str_radix(text, 16).ok();
    let (slot, function) = rest.split_once('.').unwrap_or((rest, "0"));
    hex(domain) == Some(0)
        && hex(at) == Some(bus)
        && hex(slot) == Some(0)
        && hex(function) == Some(0)
}

impl Process {
    /// A device's state now.
    pub(crate) fn status(&self, index: u32) -> Result<DeviceStatus> {
        Ok(lock(&self.connection).status(index)?)
    }
}

/// Free and total memory of the current context's device.
pub(crate) fn memory_info() -> Result<(usize, usize)> {
    let context = current()?;
    context.check()?;
    let total = context.device.info.memory;
    let used = process()?.status(context.device.index)?.used;
    Ok((total.saturating_sub(used) as usize, total as usize))
}

/// The primary contexts by device.
static PRIMARIES: Mutex<BTreeMap<i32, Primary>> = Mutex::new(BTreeMap::new());

/// A device's primary context.
#[derive(Default)]
struct Primary {
    context: Option<Arc<Context>>,
    /// Once it was made.
    handle: Option<usize>,
    retained: usize,
    flags: u32,
}

impl Primary {
    fn with<T>(ordinal: i32, body: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        process()?.device(ordinal)?;
        body(lock(&PRIMARIES).entry(ordinal).or_default())
    }

    /// The context, made if there is none. It has the same handle each time.
    fn made(&mut self, ordinal: i32) -> Result<Arc<Context>> {
        if let Some(context) = &self.context {
            return Ok(Arc::clone(context));
        }
        let made = context::create(ordinal, self.flags, self.handle)?;
        self.handle = Some(made.handle());
        Ok(Arc::clone(self.context.insert(made)))
    }
}

/// The primary context, made when first retained.
pub(crate) fn retain_primary(ordinal: i32) -> Result<usize> {
    Primary::with(ordinal, |primary| {
        let context = primary.made(ordinal)?;
        primary.retained += 1;
        Ok(context.handle())
    })
}

/// The primary context, without retaining it.
pub(crate) fn primary(ordinal: i32) -> Result<usize> {
    Primary::with(ordinal, |primary| Ok(primary.made(ordinal)?.handle()))
}

/// The primary context, if there is one.
pub(crate) fn active_primary(ordinal: i32) -> Result<Option<Arc<Context>>> {
    Primary::with(ordinal, |primary| Ok(primary.context.clone()))
}

/// The primary context of a handle that it had before it was reset: it is made anew, as long as it is retained.
fn revive(handle: usize) -> Result<Arc<Context>> {
    process()?;
    let mut primaries = lock(&PRIMARIES);
    let mut all = primaries.iter_mut();
    let found = all.find(|(_, it)| it.retained > 0 && it.handle == Some(handle));
    let (ordinal, primary) = found.ok_or(CuError::INVALID_CONTEXT)?;
    primary.made(*ordinal)
}

/// The context of a handle, or the current one for 0.
pub(crate) fn context(handle: usize) -> Result<Arc<Context>> {
    if handle == 0 {
        return current();
    }
    CONTEXTS.get(handle).or_else(|_| revive(handle))
}

/// Puts a context on top of the thread's stack.
pub(crate) fn push(handle: usize) -> Result {
    if handle == 0 {
        return Err(CuError::INVALID_CONTEXT);
    }
    context::push(context(handle)?);
    Ok(())
}

/// Replaces the top of the thread's stack; 0 only takes it.
pub(crate) fn set_current(handle: usize) -> Result {
    process()?;
    if handle == 0 {
        let _ = context::pop();
        return Ok(());
    }
    let context = context(handle)?;
    let _ = context::pop();
    context::push(context);
    Ok(())
}

/// Gives it back; with the last it is destroyed.
pub(crate) fn release_primary(ordinal: i32) -> Result {
    let gone = Primary::with(ordinal, |primary| {
        let left = primary.retained.checked_sub(1);
        primary.retained = left.ok_or(CuError::INVALID_CONTEXT)?;
        Ok(primary.context.take_if(|_| primary.retained == 0))
    })?;
    gone.map_or(Ok(()), |context| context::destroy(context.handle()))
}

/// Destroys it, however often it is retained.
pub(crate) fn reset_primary(ordinal: i32) -> Result {
    let gone = Primary::with(ordinal, |primary| Ok(primary.context.take()))?;
    gone.map_or(Ok(()), |context| context::destroy(context.handle()))
}

/// Flags, and whether it is active.
pub(crate) fn primary_state(ordinal: i32) -> Result<(u32, i32)> {
    Primary::with(ordinal, |primary| {
        Ok((primary.flags, primary.context.is_some().into()))
    })
}

/// Sets its flags for when it is made.
pub(crate) fn set_primary_flags(ordinal: i32, flags: u32) -> Result {
    Primary::with(ordinal, |primary| {
        primary.flags = flags;
        Ok(())
    })
}

/// Whether the devices of two numbers reach each other's memory: two whole GPUs of one server do.
pub(crate) fn are_peers(ordinal: i32, peer: i32) -> Result<bool> {
    let process = process()?;
    let (one, other) = (process.device(ordinal)?, process.device(peer)?);
    Ok(one.index != other.index && one.info.instance.is_none() && other.info.instance.is_none())
}

/// Gives the current context access to the memory of another device, or takes it.
pub(crate) fn set_peer(peer: usize, flags: u32, access: bool) -> Result {
    let (own, peer) = (current()?, context(peer)?);
    if flags != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    if own.ordinal == peer.ordinal {
        return Err(CuError::INVALID_DEVICE);
    }
    if access && !are_peers(own.ordinal, peer.ordinal)? {
        return Err(CuError::PEER_ACCESS_UNSUPPORTED);
    }
    let bit = 1 << peer.device.index;
    let before = match access {
        true => own.peers.fetch_or(bit, Ordering::Relaxed),
        false => own.peers.fetch_and(!bit, Ordering::Relaxed),
    };
    match (access, before & bit != 0) {
        (true, true) => Err(CuError::PEER_ACCESS_ALREADY_ENABLED),
        (false, false) => Err(CuError::PEER_ACCESS_NOT_ENABLED),
        _ => Ok(()),
    }
}

/// `cuMemFree`: waits for the work of the memory's context, as the driver does. No context need be current.
pub(crate) fn free_memory(address: u64) -> Result {
    if address == 0 {
        return Ok(());
    }
    process()?;
    let owner = memory::space().allocation(address).map(|it| it.context);
    let context = CONTEXTS.get(owner.ok_or(CuError::INVALID_VALUE)?);
    // After a fault nothing runs any more: freed all the same, and told.
    let done = context.map_or(Ok(()), |context| context.synchronize());
    memory::free(address)?;
    done
}

/// `cuMemFreeHost`, likewise; all of the process's contexts may use it.
pub(crate) fn free_host(address: u64) -> Result {
    process()?;
    let contexts = CONTEXTS.all();
    let waited = contexts.iter().map(|context| context.synchronize());
    let done = waited.collect::<Vec<_>>();
    memory::free_host(address)?;
    done.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bus_ids_are_known_in_all_forms() {
        let text = pci_bus_id(0x1b);
        assert_eq!(text, "0000:1B:00.0");
        for same in [&text, "00000000:1B:00.0", "1b:00.0", "0000:1b:00"] {
            assert!(same_bus_id(same, 0x1b), "{same}");
        }
        for other in [
            "0000:1C:00.0",
            "0001:1B:00.0",
            "1B",
            "",
            "0000:1B:01.0",
            "x:y:z",
        ] {
            assert!(!same_bus_id(other, 0x1b), "{other}");
        }
    }
}
