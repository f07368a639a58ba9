//! Pinned host memory for what is away: made in large pieces, filled in order, and reused.

use std::{ffi::c_void, path::PathBuf, ptr};

use super::{
    calls::*,
    host,
    host::{HUGE, PIECE, available_memory, map, mib, populate, spread},
    numa,
};
use crate::ground::context::within;

/// Part of the host's available memory that is left free (as its reciprocal).
const SPARE: u64 = 10;

/// Pinned host memory that is reused.
#[derive(Default)]
pub(super) struct Pool {
    /// Addresses and lengths.
    pieces: Vec<(usize, usize)>,
    pub(super) total: usize,
    /// Folder where it is made.
    pub(super) location: Option<PathBuf>,
}

/// How far the pool is filled.
#[derive(Clone, Copy, Default)]
pub(super) struct Cursor {
    piece: usize,
    offset: usize,
    /// In all.
    pub(super) bytes: usize,
}

impl Cursor {
    /// So many bytes, in parts.
    pub(super) fn take(&mut self, pool: &Pool, mut bytes: usize) -> Option<Vec<(usize, usize)>> {
        let mut parts = Vec::new();
        while bytes > 0 {
            let (at, length) = *pool.pieces.get(self.piece)?;
            let part = bytes.min(length - self.offset);
            if part == 0 {
                (self.piece, self.offset) = (self.piece + 1, 0);
                continue;
            }
            parts.push((at + self.offset, part));
            self.offset += part;
            self.bytes += part;
            bytes -= part;
        }
        Some(parts)
    }
}

impl Pool {
    /// Lets go of all of it.
    pub(super) fn clear(&mut self) {
        for (at, length) in self.pieces.drain(..) {
            // Fails where the context that pinned it is gone; what counts is that it is not pinned any more.
            let _ = call!(host_unregister, at as *mut c_void);
            // SAFETY: mapped by `grow`; nothing is copied to or from it.
            let _ = unsafe { rustix::mm::munmap(at as *mut c_void, length) };
        }
        self.total = 0;
    }

    /// Makes it hold so many bytes, of so many that are allowed. Registered in a context, for all of them.
    pub(super) fn grow(&mut self, bytes: usize, most: usize, context: u64) -> Result<(), String> {
        if bytes <= self.total {
            return Ok(());
        }
        let need = (bytes - self.total).next_multiple_of(HUGE);
        let room = most.saturating_sub(self.total) / HUGE * HUGE;
        if need > room {
            return Err(format!(
                "{} are to be moved, and it may keep {} on the host",
                mib(bytes as u64),
                mib(most as u64)
            ));
        }
        let more = need
            .checked_next_multiple_of(PIECE)
            .unwrap_or(need)
            .min(room);
        let location = self.location.as_deref();
        let place = location.map_or_else(String::new, |it| format!(" in {}", it.display()));
        let more = match available_memory(location) {
            Some(available) => fitting(more, need, available).ok_or_else(|| {
                let (need, free) = (mib(need as u64), mib(available));
                format!("the host has no room for {need} more{place}: {free} are free, of which a tenth stays so")
            })?,
            None => more,
        };
        let at = map(more, location).map_err(|error| match location {
            None => format!("the host has no room: {error}"),
            Some(location) => format!("no host memory in {}: {error}", location.display()),
        })?;
        host::advise(at, more);
        if let Some(node) = within(context, numa::node).flatten() {
            numa::prefer(node, at, more);
        }
        if !populate(at as usize, more) && location.is_some() {
            // To touch it would be a bus error.
            // SAFETY: made above, and known to no other thread.
            let _ = unsafe { rustix::mm::munmap(at, more) };
            return Err(format!(
                "the host has no room for {}{place}",
                mib(more as u64)
            ));
        }
        // `CU_MEMHOSTREGISTER_PORTABLE`: pinned for every context.
        let registered = within(context, || call!(host_register, at, more, 1));
        if let Err(why) = registered.unwrap_or_else(|| Err("its context cannot be entered".into()))
        {
            // SAFETY: made above, and known to no other thread.
            let _ = unsafe { rustix::mm::munmap(at, more) };
            return Err(why);
        }
        self.pieces.push((at as usize, more));
        self.total += more;
        Ok(())
    }

    /// Overwrites these bytes of it with zeros.
    pub(super) fn zero(&self, from: usize, to: usize) {
        let mut begin = 0;
        let mut parts = Vec::new();
        for (at, length) in &self.pieces {
            let (low, high) = (from.max(begin), to.min(begin + length));
            if low < high {
                parts.push((at + low - begin, high - low));
            }
            begin += length;
        }
        for (at, length) in parts {
            spread(length, |offset, length| {
                // SAFETY: a part of a piece, which no copy reads or writes now.
                unsafe { ptr::write_bytes((at + offset) as *mut u8, 0, length) };
                true
            });
        }
    }
}

/// How much is made at once: in large steps where there is room for that, else what is needed; none where there is none for that
/// either.
pub(super) fn fitting(step: usize, need: usize, available: u64) -> Option<usize> {
    let most = available - available / SPARE;
    [step, need].into_iter().find(|it| *it as u64 <= most)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_memory_grows_by_what_is_needed_where_a_step_has_no_room() {
        let (step, need) = (128 << 20, 66 << 20);
        let made = |available: u64| fitting(step, need, available << 20);
        assert_eq!(
            [143, 142, 74, 73].map(made),
            [Some(step), Some(need), Some(need), None]
        );
    }

    #[test]
    fn parts_cover_the_pool_once() {
        let pool = Pool {
            pieces: vec![(1000, 10), (2000, 5), (3000, 20)],
            total: 35,
            ..Pool::default()
        };
        let mut cursor = Cursor::default();
        assert_eq!(cursor.take(&pool, 4), Some(vec![(1000, 4)]));
        let across = vec![(1004, 6), (2000, 5), (3000, 1)];
        assert_eq!(cursor.take(&pool, 12), Some(across));
        assert_eq!(cursor.take(&pool, 19), Some(vec![(3001, 19)]));
        assert_eq!(cursor.take(&pool, 0), Some(vec![]));
        assert_eq!(cursor.take(&pool, 1), None);
    }

    #[test]
    fn what_is_scrubbed_is_zero_and_nothing_else() {
        let mut memory = [vec![7u8; 10], vec![7u8; 5], vec![7u8; 20]];
        let pieces = memory.each_mut();
        let pool = Pool {
            pieces: pieces.map(|it| (it.as_mut_ptr() as usize, it.len())).into(),
            total: 35,
            ..Pool::default()
        };
        pool.zero(8, 17);
        let zeros = memory
            .concat()
            .iter()
            .enumerate()
            .filter_map(|(n, it)| (*it == 0).then_some(n))
            .collect::<Vec<_>>();
        assert_eq!(zeros, (8..17).collect::<Vec<_>>());
    }
}
