//! The page in which the daemon writes which channel groups of a process may launch kernels, where the driver refuses the controls.
//!
//! The daemon makes one for each session that has such groups; the process maps it for reading. There is one word per channel group, by
//! the group's key as in [`crate::page`]. A thread that must wait does so by futex on its group's word. A process that has
//! lost the daemon, or whose lease has expired, no longer looks at it.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
    time::Duration,
};

use rustix::{
    thread::futex::{self, Flags},
    time::Timespec,
};

use crate::{
    mapping::{self, Mapping},
    page::SLOTS,
};

#[derive(Debug)]
#[repr(C)]
struct Layout {
    magic: AtomicU64,
    words: [AtomicU32; SLOTS],
}

// SAFETY: `repr(C)`, atomics only.
unsafe impl mapping::Layout for Layout {
    const MAGIC: u64 = 0x0001_6164_6d69_7400;
    const NAME: &'static str = "gpumux-permits";

    fn magic(&self) -> &AtomicU64 {
        &self.magic
    }
}

/// Whether a group may launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Permit {
    /// As much as it likes.
    Free,
    /// As long as work of so many µs is launched and not done.
    Budget(u32),
    /// Not now.
    Hold,
}

/// What a group's word says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Word {
    /// Whether it may launch.
    pub permit: Permit,
    /// Others may want the device: the process finds out soon that the group's work has ended.
    pub watched: bool,
}

const FREE: u32 = 0;
const HOLD: u32 = 1;
const WATCHED: u32 = 1 << 31;

impl Word {
    fn pack(self) -> u32 {
        let permit = match self.permit {
            Permit::Free => FREE,
            Permit::Hold => HOLD,
            Permit::Budget(us) => us.clamp(HOLD + 1, WATCHED - 1),
        };
        permit | if self.watched { WATCHED } else { 0 }
    }

    fn unpack(word: u32) -> Self {
        let permit = match word & !WATCHED {
            FREE => Permit::Free,
            HOLD => Permit::Hold,
            us => Permit::Budget(us),
        };
        let watched = word & WATCHED != 0;
        Self { permit, watched }
    }
}

/// The daemon's side.
#[derive(Debug)]
pub struct Permits(Mapping<Layout>);

impl Permits {
    /// Makes a page in which all groups may launch. The file is for the process, which cannot write it.
    ///
    /// # Errors
    /// When there is no memory for it, or the kernel (before Linux 5.1) cannot make it read-only.
    pub fn create() -> io::Result<(Self, OwnedFd)> {
        let (made, file) = Mapping::<Layout>::create(mapping::READ_ONLY)?;
        Ok((Self(made), file))
    }

    /// What the group with this key may do from now on.
    pub fn set(&self, key: u32, word: Word) {
        let Some(place) = self.0.words.get(key as usize) else {
            return;
        };
        let new = word.pack();
        if place.swap(new, Ordering::AcqRel) != new {
            // Without waiters a system call of less than a microsecond.
            let _ = futex::wake(place, Flags::empty(), i32::MAX as u32);
        }
    }
}

/// A process's side.
#[derive(Debug)]
pub struct Permitted(Mapping<Layout>);

impl Permitted {
    /// Maps the file that came with [`crate::Daemon::Permits`].
    ///
    /// # Errors
    /// When it is no such page.
    pub fn open(file: impl AsFd) -> io::Result<Self> {
        Ok(Self(Mapping::open(file)?))
    }

    /// What the group with this key may do.
    #[inline]
    pub fn word(&self, key: u32) -> Word {
        let word = self.0.words.get(key as usize);
        Word::unpack(word.map_or(FREE, |word| word.load(Ordering::Acquire)))
    }

    /// Waits while the group's word is this one, for so long at most.
    pub fn wait_while(&self, key: u32, word: Word, most: Duration) {
        if let Some(place) = self.0.words.get(key as usize) {
            wait(place, word.pack(), most);
        }
    }
}

fn wait(place: &AtomicU32, while_it_is: u32, most: Duration) {
    let most = Timespec {
        tv_sec: most.as_secs() as i64,
        tv_nsec: most.subsec_nanos().into(),
    };
    // Its end proves nothing: the callers look again.
    let _ = futex::wait(place, Flags::empty(), while_it_is, Some(&most));
}

#[cfg(test)]
mod tests {
    use super::*;

    const HELD: Word = Word {
        permit: Permit::Hold,
        watched: true,
    };

    #[test]
    fn words_survive_the_page() {
        let (daemon, file) = Permits::create().unwrap();
        let process = Permitted::open(&file).unwrap();
        let free = Word {
            permit: Permit::Free,
            watched: false,
        };
        assert_eq!(process.word(0), free);
        for permit in [
            Permit::Free,
            Permit::Hold,
            Permit::Budget(2),
            Permit::Budget(400),
        ] {
            for watched in [false, true] {
                let word = Word { permit, watched };
                daemon.set(63, word);
                assert_eq!(process.word(63), word);
            }
        }
        daemon.set(SLOTS as u32, HELD);
        assert_eq!(process.word(SLOTS as u32), free, "it has no word");
    }

    #[test]
    fn waiting_thread_is_woken_by_a_change() {
        let (daemon, file) = Permits::create().unwrap();
        let process = Permitted::open(&file).unwrap();
        daemon.set(1, HELD);
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| {
                while process.word(1) == HELD {
                    process.wait_while(1, HELD, Duration::from_secs(3600));
                }
            });
            let permit = Permit::Budget(400);
            daemon.set(1, Word { permit, ..HELD });
            waits.join().unwrap();
        });
    }

    #[test]
    fn process_cannot_write_its_permits() {
        let (_daemon, file) = Permits::create().unwrap();
        let written = rustix::io::pwrite(&file, &[0; 4], 12);
        assert_eq!(written, Err(rustix::io::Errno::PERM));
    }
}
