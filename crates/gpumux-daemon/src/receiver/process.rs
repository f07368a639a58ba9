//! The receiver: accepts connections, and has each served by a relay.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    path::Path,
    time::Duration,
};

use gpumux_wire::{
    message::{decode, encode},
    socket::{recv_bytes, send_bytes},
};
use rustix::{
    event::{PollFd, PollFlags, poll},
    io::Errno,
    net::{RecvFlags, SendFlags, SocketFlags, SocketType},
    process::{DumpableBehavior, set_dumpable_behavior},
    thread::{
        CapabilitySet, CapabilitySets, set_capabilities, set_no_new_privs, set_thread_groups,
        set_thread_res_gid, set_thread_res_uid,
    },
};

use super::{Arrival, Kind, Place, SetUp, pair, relay::Relay};
use crate::peer::{credentials, pidfd};

/// User and group without rights (`nobody` on all Linux distributions; the kernel's overflow id).
const NOBODY: u32 = 65534;
/// How long to wait when there are no processes or files left.
const PAUSE: Duration = Duration::from_millis(50);

/// The receiver's process: its standard input leads to the daemon.
///
/// # Errors
/// When it was not started by a daemon, or its rights cannot be given up.
pub fn main() -> io::Result<()> {
    let control = io::stdin().as_fd().try_clone_to_owned()?;
    // SAFETY: no handler of this process's is replaced; children are reaped by the kernel (signal(2)).
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
    serve(&control, Place::Process)
}

/// Accepts connections until the daemon has ended.
///
/// # Errors
/// When the daemon did not say what to do.
pub(super) fn serve(control: &OwnedFd, place: Place) -> io::Result<()> {
    let mut bytes = [0; 8192];
    let (length, files) = recv_bytes(control, &mut bytes, RecvFlags::empty())?;
    let set_up: SetUp = decode(&bytes[..length]).map_err(io::Error::other)?;
    let [sessions, api]: [OwnedFd; 2] = files
        .try_into()
        .map_err(|_| io::Error::from(io::ErrorKind::InvalidData))?;
    if place == Place::Process {
        give_up_rights(set_up.emulated.is_some())?;
    }
    let own = [control.as_fd(), sessions.as_fd(), api.as_fd()];
    loop {
        let mut ready = own.map(|file| PollFd::from_borrowed_fd(file, PollFlags::IN));
        match poll(&mut ready, None) {
            Err(Errno::INTR) => continue,
            other => other?,
        };
        let [ended, session, request] = ready.map(|it| !it.revents().is_empty());
        if ended {
            // The daemon sends nothing more.
            return Ok(());
        }
        for (kind, listener) in [
            (session, (Kind::Session, &sessions)),
            (request, (Kind::Api, &api)),
        ]
        .into_iter()
        .filter_map(|(ready, it)| ready.then_some(it))
        {
            match rustix::net::accept_with(listener, SocketFlags::CLOEXEC) {
                Ok(user) => {
                    let emulated = set_up.emulated.as_deref();
                    introduce(user, kind, (control, emulated), &own, place)?;
                }
                Err(Errno::AGAIN | Errno::CONNABORTED | Errno::INTR) => {}
                Err(_) => std::thread::sleep(PAUSE),
            }
        }
    }
}

/// Has a relay serve a connection, and tells the daemon. From then on the relay's reference is the last.
fn introduce(
    user: OwnedFd,
    kind: Kind,
    (control, emulated): (&OwnedFd, Option<&Path>),
    own: &[BorrowedFd<'_>],
    place: Place,
) -> io::Result<()> {
    let (pid, uid) = credentials(&user).unwrap_or((0, NOBODY));
    let pidfd = pidfd(&user);
    let packets = match kind {
        Kind::Session => SocketType::SEQPACKET,
        Kind::Api => SocketType::STREAM,
    };
    let (daemon, theirs) = until(|| pair(packets));
    let relay = Relay {
        kind,
        user,
        daemon,
        emulated: emulated.map(Path::to_owned),
    };
    let mut files = vec![theirs.as_fd()];
    files.extend(pidfd.as_ref().map(AsFd::as_fd));
    match place {
        // A relay that had the daemon's end would not see it close.
        Place::Process => fork(relay, &[own, &files].concat()),
        Place::Threads => drop(std::thread::spawn(move || relay.run())),
    }
    let bytes = encode(&Arrival { kind, pid, uid }).map_err(io::Error::other)?;
    send_bytes(control, &bytes, &files, SendFlags::empty())
}

/// Starts a relay's process. `own` are this process's files, which it does not need.
fn fork(relay: Relay, own: &[BorrowedFd<'_>]) {
    // SAFETY: this process has one thread, so the child may do whatever it could.
    let child = until(|| match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        child => Ok(child),
    });
    if child == 0 {
        for file in own {
            // SAFETY: the child uses none of them: it ends before this function returns.
            unsafe { libc::close(file.as_raw_fd()) };
        }
        relay.run();
        // SAFETY: ends the process; what its parent has in memory is not for it to tidy up.
        unsafe { libc::_exit(0) };
    }
}

/// Tries until processes and files suffice.
fn until<T>(mut action: impl FnMut() -> io::Result<T>) -> T {
    loop {
        match action() {
            Ok(done) => return done,
            Err(_) => std::thread::sleep(PAUSE),
        }
    }
}

/// From now on this process has no rights but those of its open files, and no other process can look into it.
fn give_up_rights(emulated: bool) -> io::Result<()> {
    set_no_new_privs(true)?;
    // The emulated device's socket may be for its own user only, and a relay must reach it.
    if rustix::process::geteuid().is_root() && !emulated {
        let (uid, gid) = (
            rustix::fs::Uid::from_raw(NOBODY),
            rustix::fs::Gid::from_raw(NOBODY),
        );
        // A daemon without CAP_SETUID stays what it is, but for its capabilities.
        let changed = set_thread_groups(&[])
            .and_then(|()| set_thread_res_gid(gid, gid, gid))
            .and_then(|()| set_thread_res_uid(uid, uid, uid));
        match changed {
            Ok(()) | Err(Errno::PERM) => {}
            Err(error) => return Err(error.into()),
        }
    }
    let none = CapabilitySet::empty();
    set_capabilities(
        None,
        CapabilitySets {
            effective: none,
            permitted: none,
            inheritable: none,
        },
    )?;
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    Ok(())
}
