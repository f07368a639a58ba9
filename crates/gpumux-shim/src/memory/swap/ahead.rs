//! Host memory that is made before a move needs it, by a thread of its own: making it takes most of the time of a first move.
//!
//! It is populated and then marked as free (`MADV_FREE`): it counts as available, and the kernel takes its pages back, without
//! swapping, as soon as anything else needs memory. So it is worth having wherever the host has memory to spare. A move that takes
//! a piece populates it again, which costs nothing where the pages are still there.

use std::{
    ffi::c_void,
    io,
    sync::{Condvar, Mutex, PoisonError},
    thread::{self, sleep},
    time::{Duration, Instant},
};

use crate::{
    ground::{
        gate,
        guard::{enter, lock, without_signals},
    },
    memory::swap::host::{HUGE, PIECE, advise, has_to_spare, map},
};

/// After so many bytes the thread rests for as long as they took.
const BURST: usize = 32 << 20;
/// When it looks again whether the host has memory to spare.
const LOOK: Duration = Duration::from_secs(5);
const STACK: usize = 256 << 10;

struct Ahead {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// So many pieces shall be there.
    wanted: usize,
    /// Addresses of those that are.
    pieces: Vec<usize>,
    started: bool,
    /// The kernel cannot take memory back in this way: nothing is made ahead.
    refused: bool,
}

impl State {
    fn lacks(&self) -> bool {
        self.pieces.len() < self.wanted && !self.refused && !gate::is_leaving()
    }
}

static AHEAD: Ahead = Ahead {
    state: Mutex::new(State {
        wanted: 0,
        pieces: Vec::new(),
        started: false,
        refused: false,
    }),
    changed: Condvar::new(),
};

/// So many bytes shall be there for the moves to come. What is beyond that is let go of.
pub(crate) fn want(bytes: u64) {
    let mut state = lock(&AHEAD.state);
    state.wanted = usize::try_from(bytes).unwrap_or(usize::MAX) / PIECE;
    let keep = state.pieces.len().min(state.wanted);
    state.pieces.drain(keep..).for_each(release);
    if state.lacks() && !state.started {
        let thread = thread::Builder::new()
            .name("gpumux-ahead".to_owned())
            .stack_size(STACK);
        // Without a thread moves make what they need.
        let started = without_signals(|| thread.spawn(|| enter(run)));
        state.started = started.is_ok();
    }
    drop(state);
    AHEAD.changed.notify_all();
}

/// A piece for a move, if there is one: [`PIECE`] bytes, which the kernel may have taken back.
pub(super) fn take() -> Option<usize> {
    let mut state = lock(&AHEAD.state);
    let piece = state.pieces.pop()?;
    // It is not made once more.
    state.wanted -= 1;
    Some(piece)
}

fn release(piece: usize) {
    // SAFETY: a piece of `map`, which was in the list and so nothing uses.
    let _ = unsafe { rustix::mm::munmap(piece as *mut c_void, PIECE) };
}

fn run() {
    let mut state = lock(&AHEAD.state);
    loop {
        if !state.lacks() {
            let waited = AHEAD.changed.wait(state);
            state = waited.unwrap_or_else(PoisonError::into_inner);
            continue;
        }
        let ours = (state.pieces.len() * PIECE) as u64;
        drop(state);
        let made = match has_to_spare(ours, PIECE as u64) {
            true => make(),
            false => Err(io::ErrorKind::OutOfMemory.into()),
        };
        state = lock(&AHEAD.state);
        match made {
            Ok(Some(piece)) if state.lacks() => state.pieces.push(piece),
            Ok(piece) => piece.into_iter().for_each(release),
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => state.refused = true,
            Err(_) => {
                let waited = AHEAD.changed.wait_timeout(state, LOOK);
                state = waited.unwrap_or_else(PoisonError::into_inner).0;
            }
        }
    }
}

/// A piece; none: it is not wanted any more.
///
/// # Errors
/// When there is no memory, or the kernel (before Linux 5.14) cannot do this.
fn make() -> io::Result<Option<usize>> {
    let at = map(PIECE, None)?;
    advise(at, PIECE);
    let filled = fill(at as usize);
    if !matches!(filled, Ok(true)) {
        release(at as usize);
    }
    Ok(filled?.then_some(at as usize))
}

/// Populates a piece and marks it as free, a huge page at a time: the program's calls that map memory wait for no more than that.
/// Whether all of it; otherwise it is not wanted any more.
fn fill(at: usize) -> io::Result<bool> {
    let (mut from, end) = (at, at + PIECE);
    let mut began = (from, Instant::now());
    while from < end {
        // Whole huge pages: to mark a part of one as free splits it.
        let to = (from + 1).next_multiple_of(HUGE).min(end);
        // Marked at once, so that it is never more than this that the kernel cannot take back.
        for advice in [libc::MADV_POPULATE_WRITE, libc::MADV_FREE] {
            // SAFETY: a part of a mapping that no other thread has yet.
            if unsafe { libc::madvise(from as *mut c_void, to - from, advice) } != 0 {
                return Err(io::Error::last_os_error());
            }
        }
        from = to;
        if from < end && from - began.0 >= BURST {
            if !lock(&AHEAD.state).lacks() {
                return Ok(false);
            }
            sleep(began.1.elapsed());
            began = (from, Instant::now());
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::swap::host::populate;

    /// Wants so many pieces until they are there; while another test has the process end, none is made.
    fn made(pieces: usize) -> bool {
        let deadline = Instant::now() + Duration::from_secs(120);
        while Instant::now() < deadline {
            want((pieces * PIECE) as u64 + 5);
            let state = lock(&AHEAD.state);
            if state.refused || state.pieces.len() == pieces {
                return !state.refused;
            }
            drop(state);
            sleep(Duration::from_millis(10));
        }
        panic!("not {pieces} pieces");
    }

    /// Has the kernel take back what it can of a piece.
    fn reclaim(at: usize) {
        // SAFETY: a piece of this test.
        unsafe { libc::madvise(at as *mut c_void, PIECE, libc::MADV_PAGEOUT) };
    }

    /// Each page's first byte.
    fn firsts(at: usize) -> impl Iterator<Item = *mut u8> {
        (0..PIECE).step_by(4096).map(move |it| (at + it) as *mut u8)
    }

    #[test]
    fn piece_is_given_once_and_keeps_its_contents_from_then_on() {
        if !has_to_spare(0, 3 * PIECE as u64) {
            eprintln!("SKIPPED: the machine has too little memory to spare");
            return;
        }
        if !made(2) {
            eprintln!("SKIPPED: the kernel cannot make memory ahead");
            return;
        }
        let piece = take().unwrap();
        assert_eq!(lock(&AHEAD.state).wanted, 1, "it is not made once more");
        // The kernel takes it back before the move, and cannot afterwards.
        reclaim(piece);
        assert!(populate(piece, PIECE));
        for (n, at) in firsts(piece).enumerate() {
            // SAFETY: a page of the piece, which no other thread has.
            unsafe { at.write(n as u8 | 1) };
        }
        reclaim(piece);
        for (n, at) in firsts(piece).enumerate() {
            // SAFETY: as above.
            assert_eq!(unsafe { at.read() }, n as u8 | 1);
        }
        release(piece);
        assert!(made(0));
        assert_eq!(take(), None);
    }
}
