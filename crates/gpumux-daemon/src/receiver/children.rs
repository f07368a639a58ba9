//! What the receiver starts: processes of its own, or threads.

use std::{
    collections::BTreeMap,
    io,
    mem::ManuallyDrop,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
    sync::Arc,
};

use rustix::{
    pipe::{PipeFlags, pipe_with},
    process::{WaitOptions, wait},
};

use super::protocol::Place;

/// What a child does.
pub(super) trait Work: Send + 'static {
    /// Does it. The files that are returned may take long to close: they end with the child. A process that exits does not wait for
    /// sockets that linger (Linux, `inet_release`).
    fn run(self) -> Vec<OwnedFd>;
}

/// A child: its pid, or a thread's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Child(u32);

/// How the end of children is known.
enum Ends {
    /// By `SIGCHLD`, from this signalfd.
    Signals(OwnedFd),
    /// By what threads write, each its number.
    Pipe(OwnedFd, Arc<OwnedFd>),
}

/// The children that live.
pub(super) struct Children<T> {
    ends: Ends,
    made: u32,
    living: BTreeMap<Child, T>,
}

impl<T> Children<T> {
    /// For a process of one thread if `place` is [`Place::Process`].
    ///
    /// # Errors
    /// When there are no files left.
    pub(super) fn new(place: Place) -> io::Result<Self> {
        let ends = match place {
            Place::Process => Ends::Signals(child_signals()?),
            Place::Threads => {
                let (reader, writer) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
                Ends::Pipe(reader, Arc::new(writer))
            }
        };
        Ok(Self {
            ends,
            made: 0,
            living: BTreeMap::new(),
        })
    }

    /// A file with something to read when a child has ended.
    pub(super) fn ends(&self) -> BorrowedFd<'_> {
        match &self.ends {
            Ends::Signals(file) | Ends::Pipe(file, _) => file.as_fd(),
        }
    }

    /// Starts one. A process closes its copies of `unneeded` first.
    ///
    /// # Errors
    /// When there is no process left: with the work, and what was to be kept.
    pub(super) fn start<W: Work>(
        &mut self,
        work: W,
        unneeded: &[RawFd],
        kept: T,
    ) -> Result<(), (io::Error, W, T)> {
        let child = match &self.ends {
            Ends::Signals(signals) => {
                // SAFETY: this process has one thread, so the child may do whatever it could.
                match unsafe { libc::fork() } {
                    -1 => return Err((io::Error::last_os_error(), work, kept)),
                    0 => {
                        for file in unneeded.iter().copied().chain([signals.as_raw_fd()]) {
                            // SAFETY: the child uses none of them: it ends before this function returns.
                            unsafe { libc::close(file) };
                        }
                        let _kept = ManuallyDrop::new(work.run());
                        // SAFETY: ends the process; what its parent has in memory is not for it to tidy up.
                        unsafe { libc::_exit(0) }
                    }
                    pid => Child(pid.cast_unsigned()),
                }
            }
            Ends::Pipe(_, writer) => {
                self.made += 1;
                let (number, writer) = (self.made, Arc::clone(writer));
                std::thread::spawn(move || {
                    drop(work.run());
                    let _ = rustix::io::write(&*writer, &number.to_ne_bytes());
                });
                Child(number)
            }
        };
        self.living.insert(child, kept);
        Ok(())
    }

    /// What was kept for those that have ended.
    pub(super) fn ended(&mut self) -> Vec<T> {
        let mut ended = Vec::new();
        match &self.ends {
            Ends::Signals(signals) => {
                let mut signal = [0; size_of::<libc::signalfd_siginfo>()];
                while rustix::io::read(signals, &mut signal).is_ok() {}
                while let Ok(Some((pid, _))) = wait(WaitOptions::NOHANG) {
                    ended.push(Child(pid.as_raw_pid().cast_unsigned()));
                }
            }
            Ends::Pipe(reader, _) => {
                let mut number = [0; 4];
                while let Ok(4) = rustix::io::read(reader, &mut number) {
                    ended.push(Child(u32::from_ne_bytes(number)));
                }
            }
        }
        (ended.into_iter())
            .filter_map(|child| self.living.remove(&child))
            .collect()
    }

    /// What is kept for those that live.
    pub(super) fn living(&self) -> impl Iterator<Item = &T> {
        self.living.values()
    }
}

/// Has this thread's `SIGCHLD` be read from a file.
fn child_signals() -> io::Result<OwnedFd> {
    // SAFETY: the set is initialized before it is used, and outlives the calls; the file is new, and nothing else has it.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        libc::sigaddset(&raw mut set, libc::SIGCHLD);
        let file = match libc::sigprocmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) {
            0 => libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK),
            error => error,
        };
        match file {
            -1 => Err(io::Error::last_os_error()),
            file => Ok(OwnedFd::from_raw_fd(file)),
        }
    }
}
