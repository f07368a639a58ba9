//! Device memory of a process that is checkpointed is on no device; restored, it is on the same or another one, at its addresses.

use std::{collections::HashMap, os::fd::OwnedFd, sync::Arc};

use rustix::{
    fs::SeekFrom,
    io::{Errno, pread, pwrite},
    mm::ProtFlags,
};

use super::{Physical, Space, map_raw, space, space_mut};
use crate::{
    error::{CuError, Result},
    process::{lock, process},
};

/// So much is copied at a time.
const PART: usize = 1 << 20;

/// Whether the driver could move all of it: no managed memory, and none of other processes.
pub(crate) fn is_movable() -> bool {
    let space = space();
    space.opened.is_empty() && !space.allocations.values().any(|it| it.managed)
}

impl Space {
    /// Every piece of physical memory, once.
    fn physicals(&self) -> HashMap<*const Physical, Arc<Physical>> {
        let mapped = self.mapped.values().map(|it| &it.physical);
        let all = mapped.chain(self.handles.values().map(|(it, _)| it));
        all.map(|it| (Arc::as_ptr(it), Arc::clone(it))).collect()
    }

    /// Puts other pieces in the places of all; returns what was there.
    fn replace(&mut self, by: &HashMap<*const Physical, Arc<Physical>>) -> Vec<Arc<Physical>> {
        let mapped = self.mapped.values_mut().map(|it| &mut it.physical);
        let all = mapped.chain(self.handles.values_mut().map(|(it, _)| it));
        all.filter_map(|it| {
            let new = by.get(&Arc::as_ptr(it))?;
            Some(std::mem::replace(it, Arc::clone(new)))
        })
        .collect()
    }
}

/// Takes all of it off its devices. The contents stay with the process.
pub(crate) fn detach() -> Result {
    let mut space = space_mut();
    let mut detached = HashMap::new();
    for (key, old) in space.physicals() {
        let file = old.file.try_clone().map_err(|_| CuError::OUT_OF_MEMORY)?;
        let new = Physical {
            id: None,
            file,
            bytes: old.bytes,
            device: old.device,
            exportable: old.exportable,
        };
        detached.insert(key, Arc::new(new));
    }
    let old = space.replace(&detached);
    // The server is notified without the lock.
    drop(space);
    drop(old);
    Ok(())
}

/// Puts all of it on devices again: on this one in the place of that.
pub(crate) fn attach(now: impl Fn(u32) -> u32) -> Result {
    let mut made = HashMap::new();
    let detached = space().physicals();
    for (key, old) in detached {
        let device = now(old.device);
        let (id, file) = lock(&process()?.connection).create_memory(device, old.bytes)?;
        let new = Arc::new(Physical {
            id: Some(id),
            file,
            bytes: old.bytes,
            device,
            exportable: old.exportable,
        });
        copy(&old.file, &new.file, old.bytes).map_err(|_| CuError::OPERATING_SYSTEM)?;
        made.insert(key, new);
    }
    let mut space = space_mut();
    let old = space.replace(&made);
    for (at, mapping) in &mut space.mapped {
        let prot = match mapping.accessible {
            true => ProtFlags::READ | ProtFlags::WRITE,
            false => ProtFlags::empty(),
        };
        map_raw(*at, mapping.bytes, &mapping.physical.file, 0, prot)?;
        let seen = mapping.devices.unwrap_or(0);
        let seen = (0..u32::BITS).filter(|bit| seen & 1 << bit != 0);
        let seen = seen.fold(0, |all, bit| all | 1 << now(bit));
        mapping.devices = mapping.devices.map(|_| seen);
    }
    for memory in space.graphs.values_mut() {
        memory.device = now(memory.device);
    }
    for piece in space.pieces.values_mut() {
        piece.device = now(piece.device);
    }
    drop(space);
    drop(old);
    Ok(())
}

/// Copies what has contents.
fn copy(from: &OwnedFd, to: &OwnedFd, bytes: u64) -> rustix::io::Result<()> {
    let mut buffer = vec![0; PART];
    let mut at = 0;
    while at < bytes {
        at = match rustix::fs::seek(from, SeekFrom::Data(at)) {
            Ok(at) => at,
            // Only a hole is left.
            Err(Errno::NXIO) => return Ok(()),
            Err(error) => return Err(error),
        };
        let end = rustix::fs::seek(from, SeekFrom::Hole(at))?.min(bytes);
        while at < end {
            let part = buffer.len().min((end - at) as usize);
            let read = pread(from, &mut buffer[..part], at)?;
            let mut rest = &buffer[..read];
            while !rest.is_empty() {
                let written = pwrite(to, rest, at)?;
                (at, rest) = (at + written as u64, &rest[written..]);
            }
            if read == 0 {
                return Ok(());
            }
        }
    }
    Ok(())
}
