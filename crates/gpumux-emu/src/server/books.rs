//! What the server keeps of processes and of their memory.

use std::{
    collections::{BTreeMap, HashMap},
    os::fd::OwnedFd,
};

use rustix::fs::{MemfdFlags, SealFlags};

pub(super) struct Memory {
    pub(super) device: u32,
    pub(super) bytes: u64,
    pub(super) shares: u64,
    pub(super) file: (u64, u64),
    /// For importers, once it was exported.
    pub(super) exported: Option<OwnedFd>,
}

#[derive(Default)]
pub(super) struct Process {
    pub(super) connections: usize,
    /// Shares in memory.
    pub(super) shares: HashMap<u64, u64>,
    /// Contexts per device.
    pub(super) contexts: BTreeMap<u32, u64>,
}

/// Fresh memory whose size is fixed.
pub(super) fn memory_file(bytes: u64) -> Option<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create("emulated-gpu", flags).ok()?;
    rustix::fs::ftruncate(&file, bytes).ok()?;
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&file, seals).ok()?;
    Some(file)
}

pub(super) fn file_identity(file: &OwnedFd) -> Option<(u64, u64)> {
    let stat = rustix::fs::fstat(file).ok()?;
    Some((stat.st_dev, stat.st_ino))
}
