//! What a process asks the daemon that has no session: it has no context yet, or was forked.

use std::{
    io,
    time::{Duration, Instant},
};

use gpumux_wire::{Daemon, Shim, socket};
use rustix::{
    event::{PollFd, PollFlags},
    net::{RecvFlags, SendFlags, SocketFlags},
};

use crate::ground::{config::Config, guard, own::OwnFd, wait::wait};

/// How long the daemon may take.
const ANSWER: Duration = Duration::from_secs(2);

/// What a program of this process's tenant is shown of a device: free and in all, in bytes. None: there is no tenant, or no daemon that
/// answers.
pub(crate) fn look(uuid: &str, total: u64) -> Option<(u64, u64)> {
    let mut seen = None;
    guard::enter(|| {
        let config = Config::read();
        if let Some(tenant) = config.tenant.clone() {
            let (device, path) = (uuid.to_owned(), config.socket());
            let question = Shim::Look {
                tenant,
                device,
                total,
            };
            seen = ask(&path, &question).unwrap_or(None);
        }
    });
    seen
}

fn ask(path: &std::path::Path, question: &Shim) -> io::Result<Option<(u64, u64)>> {
    let session = OwnFd::new(|| socket::connect(path, SocketFlags::NONBLOCK))?;
    socket::send(&session, question, None, SendFlags::empty())?;
    let deadline = Instant::now() + ANSWER;
    loop {
        match socket::recv::<Daemon>(&session, RecvFlags::empty()) {
            Ok(Some((Daemon::Seen { free, total, .. }, _))) => return Ok(Some((free, total))),
            Ok(_) => return Ok(None),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(None);
        }
        wait(&mut [PollFd::new(&session, PollFlags::IN)], Some(left))?;
    }
}
