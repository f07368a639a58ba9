//! Waiting for descriptors.

use std::time::Duration;

use rustix::{
    event::{PollFd, Timespec, poll},
    io::Errno,
};

/// Waits until something is ready, or the time is over. A signal ends it early.
pub(crate) fn wait(fds: &mut [PollFd<'_>], timeout: Option<Duration>) -> Result<(), Errno> {
    let timeout = timeout.map(|timeout| Timespec {
        tv_sec: timeout.as_secs() as i64,
        tv_nsec: timeout.subsec_nanos().into(),
    });
    match poll(fds, timeout.as_ref()) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error),
    }
}
