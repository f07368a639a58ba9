//! Host memory for moved memory: where it comes from, and how much of it there is.

use std::{ffi::c_void, io, path::Path, ptr};

use gpumux_wire::message::HOST_PIECE;

use crate::ground::own::OwnFd;

/// Host memory comes in pieces of a multiple of this, where as much is allowed.
pub(super) const PIECE: usize = HOST_PIECE as usize;
/// Size of a huge page, which pieces are multiples of.
pub(super) const HUGE: usize = 2 << 20;
/// `HUGETLBFS_MAGIC`
const HUGETLBFS: u32 = 0x9584_58f6;
/// Most threads that make host memory ready.
const POPULATORS: usize = 8;
/// A thread does at least so much of it.
const PART: usize = 32 << 20;

/// New memory, which no other process can reach: the process's own, or that of a file without a name.
pub(super) fn map(bytes: usize, location: Option<&Path>) -> io::Result<*mut c_void> {
    use rustix::{
        fs::{Mode, OFlags, ftruncate, open},
        mm::{MapFlags, ProtFlags, mmap, mmap_anonymous},
    };
    let access = ProtFlags::READ | ProtFlags::WRITE;
    let Some(location) = location else {
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let at = unsafe { mmap_anonymous(ptr::null_mut(), bytes, access, MapFlags::PRIVATE) };
        return Ok(at?);
    };
    // `O_EXCL`: it can never get a name.
    let flags = OFlags::TMPFILE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC;
    let file = OwnFd::new(|| Ok(open(location, flags, Mode::RUSR | Mode::WUSR)?))?;
    ftruncate(&file, bytes as u64)?;
    // SAFETY: as above.
    Ok(unsafe { mmap(ptr::null_mut(), bytes, access, MapFlags::SHARED, &file, 0) }?)
}

/// Faster to pin; a child must not copy it, nor must a core file have it.
pub(super) fn advise(at: *mut c_void, bytes: usize) {
    for advice in [
        libc::MADV_HUGEPAGE,
        libc::MADV_DONTFORK,
        libc::MADV_DONTDUMP,
    ] {
        // SAFETY: a mapping of `map`. What the kernel does not know it refuses.
        unsafe { libc::madvise(at, bytes, advice) };
    }
}

/// Has the kernel find and clear pages, on several CPUs: on one this takes most of the time of pinning. Whether it did.
pub(super) fn populate(at: usize, bytes: usize) -> bool {
    spread(bytes, |offset, length| {
        let from = (at + offset) as *mut c_void;
        // SAFETY: a part of the pool's mapping, which no other thread has yet.
        let done = unsafe { libc::madvise(from, length, libc::MADV_POPULATE_WRITE) };
        // A kernel that does not know this makes pages when they are pinned.
        done == 0 || io::Error::last_os_error().raw_os_error() == Some(libc::EINVAL)
    })
}

/// Does something to all parts of so many bytes, given their offset and length, on several CPUs. Whether all say so.
pub(super) fn spread(bytes: usize, work: impl Fn(usize, usize) -> bool + Sync) -> bool {
    let threads = std::thread::available_parallelism().map_or(1, |it| it.get().min(POPULATORS));
    let part = bytes.div_ceil(threads).next_multiple_of(PART);
    std::thread::scope(|scope| {
        let work = &work;
        let parts = (0..bytes).step_by(part);
        let begun = parts.map(|from| {
            let length = part.min(bytes - from);
            let thread = std::thread::Builder::new();
            // Without a thread this one does it.
            match thread.spawn_scoped(scope, move || work(from, length)) {
                Ok(thread) => Err(thread),
                Err(_) => Ok(work(from, length)),
            }
        });
        let begun: Vec<_> = begun.collect();
        let mut ended = begun.into_iter().map(|it| match it {
            Ok(done) => done,
            Err(thread) => thread.join().unwrap_or(false),
        });
        ended.all(|done| done)
    })
}

/// What the kernel would give without swapping, in bytes: of the machine, of the control group, and at this location.
pub(super) fn available_memory(location: Option<&Path>) -> Option<u64> {
    let mut least = None;
    if let Some(location) = location {
        let stat = rustix::fs::statfs(location).ok()?;
        // 0: no size is set.
        least = (stat.f_blocks != 0).then(|| stat.f_bavail.saturating_mul(stat.f_bsize as u64));
        if stat.f_type as u32 == HUGETLBFS {
            return least;
        }
    }
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let kib = number(&text, "MemAvailable:")?;
    [Some(kib * 1024), group_memory(), least]
        .into_iter()
        .flatten()
        .min()
}

/// What this process's control group (version 2; in a container it is the root) may still take.
fn group_memory() -> Option<u64> {
    let own = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = own.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let folder = std::path::Path::new("/sys/fs/cgroup").join(path);
    let read = |file: &str| std::fs::read_to_string(folder.join(file)).ok();
    let most: u64 = read("memory.max")?.trim().parse().ok()?;
    let used: u64 = read("memory.current")?.trim().parse().ok()?;
    let cache = number(&read("memory.stat")?, "inactive_file").unwrap_or(0);
    Some(most.saturating_sub(used.saturating_sub(cache)))
}

/// The number after this word at the beginning of a line.
fn number(text: &str, word: &str) -> Option<u64> {
    let mut lines = text.lines().map(str::split_whitespace);
    lines.find_map(|mut words| (words.next() == Some(word)).then(|| words.next()?.parse().ok())?)
}

/// So many bytes as people write them.
pub(super) fn mib(bytes: u64) -> String {
    format!("{} MiB", bytes.div_ceil(1 << 20))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_found_by_their_word() {
        let text = "a 1\ninactive_file 42\ninactive_files 7\n";
        assert_eq!(number(text, "inactive_file"), Some(42));
        assert_eq!(number(text, "b"), None);
    }
}
