//! Shared memory that one process makes and others map, without trusting its maker or its readers.

use std::{
    io,
    ops::Deref,
    os::fd::{AsFd, OwnedFd},
    ptr::NonNull,
    sync::atomic::AtomicU64,
};

use rustix::{
    fs::{MemfdFlags, SealFlags},
    mm::{MapFlags, ProtFlags},
};

/// What keeps the file from shrinking under its readers.
pub(crate) const SEALS: SealFlags = SealFlags::SHRINK
    .union(SealFlags::GROW)
    .union(SealFlags::SEAL);

/// Forbids writes except through the existing mapping (Linux 5.1).
pub(crate) const READ_ONLY: SealFlags = SealFlags::FUTURE_WRITE;

/// What a file may be mapped as.
///
/// # Safety
/// The type is `repr(C)`, has no references, and consists of atomics only, for which every bit pattern is valid.
pub(crate) unsafe trait Layout {
    /// The first word of the file: what it is, and the layout's version.
    const MAGIC: u64;
    /// The memfd's name, and the layout's name in errors.
    const NAME: &'static str;

    /// Where [`Self::MAGIC`] stands.
    fn magic(&self) -> &AtomicU64;
}

/// A mapped file.
#[derive(Debug)]
pub(crate) struct Mapping<T: Layout>(NonNull<T>);

// SAFETY: the memory consists of atomics and stays mapped as long as the value lives.
unsafe impl<T: Layout> Send for Mapping<T> {}
// SAFETY: as above.
unsafe impl<T: Layout> Sync for Mapping<T> {}

impl<T: Layout> Mapping<T> {
    /// Makes a file with these seals besides those that fix its size, and maps it for writing.
    pub(crate) fn create(more: SealFlags) -> io::Result<(Self, OwnedFd)> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create(T::NAME, flags)?;
        rustix::fs::ftruncate(&file, size_of::<T>() as u64)?;
        // Before the seals: they may forbid a mapping for writing.
        let made = Self::map(&file, ProtFlags::READ | ProtFlags::WRITE)?;
        rustix::fs::fcntl_add_seals(&file, SEALS | more)?;
        made.magic()
            .store(T::MAGIC, std::sync::atomic::Ordering::Release);
        Ok((made, file))
    }

    /// Maps a file that a peer sent, for reading.
    pub(crate) fn open(file: impl AsFd) -> io::Result<Self> {
        let refuse = |why: &str| {
            let why = format!("{} {why}", T::NAME);
            Err(io::Error::new(io::ErrorKind::InvalidData, why))
        };
        // Without these seals its owner could shrink it, and reading would raise SIGBUS.
        if !rustix::fs::fcntl_get_seals(&file)?.contains(SEALS) {
            return refuse("is not sealed");
        }
        if rustix::fs::fstat(&file)?.st_size != size_of::<T>() as i64 {
            return refuse("has a wrong size");
        }
        let mapped = Self::map(&file, ProtFlags::READ)?;
        if mapped.magic().load(std::sync::atomic::Ordering::Acquire) != T::MAGIC {
            return refuse("is of another version");
        }
        Ok(mapped)
    }

    fn map(file: impl AsFd, protection: ProtFlags) -> io::Result<Self> {
        // SAFETY: a fresh mapping at an address of the kernel's choice; nothing else refers to it.
        let pointer = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                size_of::<T>(),
                protection,
                MapFlags::SHARED,
                file,
                0,
            )
        }?;
        NonNull::new(pointer.cast())
            .map(Self)
            .ok_or_else(|| io::ErrorKind::OutOfMemory.into())
    }
}

impl<T: Layout> Deref for Mapping<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: the mapping is page-aligned, as long as `T`, sealed against shrinking, and lives
        // until drop; by the trait's contract all fields are atomics, so concurrent change is allowed.
        unsafe { self.0.as_ref() }
    }
}

impl<T: Layout> Drop for Mapping<T> {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `map` with this size, and no reference outlives `self`.
        let _ = unsafe { rustix::mm::munmap(self.0.as_ptr().cast(), size_of::<T>()) };
    }
}
