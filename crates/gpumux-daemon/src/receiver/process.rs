//! The receiver: accepts connections, and has each served by a relay.

use std::{
    io::{self, IoSliceMut},
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use gpumux_wire::{
    message::{decode, encode},
    socket::{recv_bytes, send_bytes},
};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    net::{
        RecvAncillaryBuffer, RecvFlags, ReturnFlags, SendFlags, SocketFlags, SocketType, recvmsg,
    },
    process::{DumpableBehavior, Resource, getrlimit, set_dumpable_behavior},
    thread::{
        CapabilitySet, CapabilitySets, set_capabilities, set_no_new_privs, set_thread_groups,
        set_thread_res_gid, set_thread_res_uid,
    },
};

use super::{
    children::Children,
    places::{Places, Refusal},
    protocol::{Kind, Place, Report, SetUp, pair},
    refused::{self, Pair, Refused},
    relay::Relay,
};
use crate::{
    peer::{NOBODY, credentials, pidfd},
    quota,
};

/// User and group that no other process has: one of the same user could stop or kill this one. Linux distributions and container
/// runtimes give out no ids above 2^31 (systemd's table of users and groups).
const ALONE: u32 = 0xfffe_4750;
/// How long to wait when there are no processes or files left.
const PAUSE: Duration = Duration::from_millis(50);
/// How often the daemon is notified that connections are refused.
const QUIET: Duration = Duration::from_secs(10);

/// The receiver's process: its standard input leads to the daemon.
///
/// # Errors
/// When it was not started by a daemon, or its rights cannot be given up.
pub fn main() -> io::Result<()> {
    // A copy of it in a relay would hide this process's end from the daemon.
    // SAFETY: the file is open, as the one that started this process knows, and nothing else here uses it.
    let control = unsafe { OwnedFd::from_raw_fd(io::stdin().as_raw_fd()) };
    // It ends after the daemon, also where a container's runtime or a terminal stops all processes at once. Relays inherit that.
    for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
        // SAFETY: no handler is set.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
    serve(control, Place::Process)
}

/// Accepts connections until the daemon has ended.
///
/// # Errors
/// When the daemon did not say what to do.
pub(super) fn serve(control: OwnedFd, place: Place) -> io::Result<()> {
    let mut bytes = [0; 8192];
    let (length, files) = recv_bytes(&control, &mut bytes, RecvFlags::empty())?;
    let set_up: SetUp = decode(&bytes[..length]).map_err(io::Error::other)?;
    let [sessions, api]: [OwnedFd; 2] = files
        .try_into()
        .map_err(|_| io::Error::from(io::ErrorKind::InvalidData))?;
    if place == Place::Process {
        give_up_rights(set_up.emulated.is_some())?;
    }
    let mut receiving = Receiving {
        control,
        sessions,
        api,
        emulated: set_up.emulated,
        places: Places::new(set_up.relays.min(processes() / 2)),
        refused: Refused::new()?,
        children: Children::new(place)?,
        reported: None,
    };
    while receiving.step()? {}
    Ok(())
}

/// Processes that this one's user and control group may have, as far as that is known (getrlimit(2); `pids.max` of Linux's
/// cgroup-v2).
fn processes() -> usize {
    let own = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let path = own.lines().find_map(|line| line.strip_prefix("0::/"));
    let groups = Path::new("/sys/fs/cgroup").join(path.unwrap_or_default());
    let of_groups = groups.ancestors().filter_map(|group| {
        let most = std::fs::read_to_string(group.join("pids.max")).ok()?;
        most.trim().parse::<u64>().ok()
    });
    let of_user = getrlimit(Resource::Nproc).current;
    let least = of_groups.chain(of_user).min().unwrap_or(u64::MAX);
    usize::try_from(least).unwrap_or(usize::MAX)
}

/// What a child is.
enum Role {
    /// A relay for a connection that has this place.
    Relay(quota::Place),
    Closer(Pair),
}

impl Role {
    fn files(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let pair = match self {
            Self::Relay(_) => None,
            Self::Closer(pair) => Some(pair.files()),
        };
        pair.into_iter().flatten()
    }
}

struct Receiving {
    /// Leads to the daemon.
    control: OwnedFd,
    sessions: OwnedFd,
    api: OwnedFd,
    emulated: Option<PathBuf>,
    places: Places,
    refused: Refused,
    children: Children<Role>,
    /// When the daemon was last notified that a connection was refused.
    reported: Option<Instant>,
}

impl Receiving {
    /// Handles what has come; false: the daemon has ended.
    fn step(&mut self) -> io::Result<bool> {
        let accepts = match self.refused.is_full() {
            true => PollFlags::empty(),
            false => PollFlags::IN,
        };
        let mut ready = [
            PollFd::new(&self.control, PollFlags::IN),
            PollFd::from_borrowed_fd(self.children.ends(), PollFlags::IN),
            PollFd::new(&self.sessions, accepts),
            PollFd::new(&self.api, accepts),
        ];
        let pause = Timespec::try_from(PAUSE).ok();
        let pause = pause.filter(|_| self.refused.is_waiting());
        match poll(&mut ready, pause.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let [ended, _, session, request] = ready.map(|it| !it.revents().is_empty());
        if ended {
            // The daemon sends nothing more.
            return Ok(false);
        }
        for child in self.children.ended() {
            match child {
                Role::Relay(place) => drop(place),
                Role::Closer(pair) => self.refused.give_back(pair),
            }
        }
        self.start_closers();
        for (kind, ready) in [(Kind::Session, session), (Kind::Api, request)] {
            if ready && !self.refused.is_full() {
                self.accept(kind)?;
                self.start_closers();
            }
        }
        Ok(true)
    }

    fn accept(&mut self, kind: Kind) -> io::Result<()> {
        let listener = match kind {
            Kind::Session => &self.sessions,
            Kind::Api => &self.api,
        };
        match rustix::net::accept_with(listener, SocketFlags::CLOEXEC) {
            Ok(user) => self.introduce(user, kind),
            Err(Errno::AGAIN | Errno::CONNABORTED | Errno::INTR) => Ok(()),
            Err(_) => {
                std::thread::sleep(PAUSE);
                Ok(())
            }
        }
    }

    /// Has a relay serve a connection, and notifies the daemon. From then on the relay's reference is the last.
    fn introduce(&mut self, user: OwnedFd, kind: Kind) -> io::Result<()> {
        if is_over(&user) {
            return Ok(());
        }
        let (pid, uid) = credentials(&user).unwrap_or((0, NOBODY));
        let pidfd = pidfd(&user);
        let packets = match kind {
            Kind::Session => SocketType::SEQPACKET,
            Kind::Api => SocketType::STREAM,
        };
        let ends = (self.places.take(uid)).and_then(|place| Ok((place, pair(packets)?)));
        let (place, (daemon, theirs)) = match ends {
            Ok(ends) => ends,
            Err(refusal) => return self.refuse(user, kind, &refusal),
        };
        let relay = Relay {
            kind,
            user,
            daemon,
            emulated: self.emulated.clone(),
        };
        let mut files = vec![theirs.as_fd()];
        files.extend(pidfd.as_ref().map(AsFd::as_fd));
        // A relay that had the daemon's end would not see it close.
        let unneeded = self.unneeded(&files);
        if let Err((error, relay, _)) = self.children.start(relay, &unneeded, Role::Relay(place)) {
            return self.refuse(relay.user, kind, &error.into());
        }
        let arrival = Report::Arrival { kind, pid, uid };
        let bytes = encode(&arrival).map_err(io::Error::other)?;
        match send_bytes(&self.control, &bytes, &files, SendFlags::empty()) {
            // Too many files of this process's user are on their way in sockets (unix(7)). The relay passes the reason on, and ends.
            Err(error) if error.raw_os_error() == Some(Errno::TOOMANYREFS.raw_os_error()) => {
                let reason = Refusal::from(error).to_string();
                refused::refuse(&theirs, kind, &reason);
                Ok(())
            }
            sent => sent,
        }
    }

    fn refuse(&mut self, user: OwnedFd, kind: Kind, refusal: &Refusal) -> io::Result<()> {
        let reason = refusal.to_string();
        refused::refuse(&user, kind, &reason);
        self.refused.add(user);
        if self.reported.is_some_and(|it| it.elapsed() < QUIET) {
            return Ok(());
        }
        self.reported = Some(Instant::now());
        let bytes = encode(&Report::Refused(reason)).map_err(io::Error::other)?;
        send_bytes(&self.control, &bytes, &[], SendFlags::empty())
    }

    fn start_closers(&mut self) {
        loop {
            let closers = (self.children.living()).filter(|it| matches!(it, Role::Closer(_)));
            // Without files left, it is tried again.
            let Ok(Some((mut pair, closer))) = self.refused.due(closers.count()) else {
                return;
            };
            let keeps = closer.keeps;
            let unneeded = self.unneeded(&pair.files().collect::<Vec<_>>());
            let into = pair.close();
            let started = (self.children).start(closer, &unneeded, Role::Closer(pair));
            match started {
                Ok(()) => self.refused.keep(into.filter(|_| keeps)),
                Err((_, _, Role::Closer(pair))) => return self.refused.give_back(pair),
                Err((_, _, Role::Relay(_))) => return,
            }
        }
    }

    /// This process's files, which no child needs, and `others`.
    fn unneeded(&self, others: &[BorrowedFd<'_>]) -> Vec<RawFd> {
        let own = [&self.control, &self.sessions, &self.api].map(|file| file.as_fd());
        (own.into_iter().chain(others.iter().copied()))
            .chain(self.refused.files())
            .chain((self.children.living()).flat_map(Role::files))
            .map(|file| file.as_raw_fd())
            .collect()
    }
}

/// Whether the other side has closed the connection and left nothing in it: no file ends with it, so that it needs no process. A packet
/// without bytes may carry files.
fn is_over(user: &OwnedFd) -> bool {
    let mut ready = [PollFd::new(user, PollFlags::IN)];
    let polled = poll(&mut ready, Some(&Timespec::default()));
    let [ready] = ready;
    if polled.is_err() || !ready.revents().contains(PollFlags::HUP) {
        return false;
    }
    let left = recvmsg(
        user,
        &mut [IoSliceMut::new(&mut [0])],
        &mut RecvAncillaryBuffer::default(),
        RecvFlags::PEEK | RecvFlags::DONTWAIT,
    );
    left.is_ok_and(|left| left.bytes == 0 && !left.flags.contains(ReturnFlags::CTRUNC))
}

/// From now on this process has no rights but those of its open files, and no other process can look into it.
fn give_up_rights(emulated: bool) -> io::Result<()> {
    set_no_new_privs(true)?;
    // The emulated device's socket may be for its own user only, and a relay must reach it.
    if rustix::process::geteuid().is_root() && !emulated {
        let become_user = |id: u32| {
            let (uid, gid) = (rustix::fs::Uid::from_raw(id), rustix::fs::Gid::from_raw(id));
            set_thread_groups(&[])
                .and_then(|()| set_thread_res_gid(gid, gid, gid))
                .and_then(|()| set_thread_res_uid(uid, uid, uid))
        };
        // A container's user namespace may have no such id.
        let changed = become_user(ALONE).or_else(|error| match error {
            Errno::INVAL => become_user(NOBODY),
            other => Err(other),
        });
        match changed {
            // A daemon without CAP_SETUID stays what it is, but for its capabilities.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[ignore = "runs as a process of its own"]
    fn process_without_rights() {
        give_up_rights(false).unwrap();
        println!("ready");
        let _ = io::Read::read(&mut io::stdin(), &mut [0]);
        println!("lives");
    }

    #[test]
    fn no_other_process_can_stop_the_receiver_or_look_into_it() {
        use std::{
            io::{BufRead, BufReader, Write},
            os::unix::process::CommandExt,
            process::{Command, Stdio},
        };
        if !rustix::process::geteuid().is_root() {
            return eprintln!("SKIPPED: only root can act as another user");
        }
        let mut command = Command::new(std::env::current_exe().unwrap());
        let test = "receiver::process::tests::process_without_rights";
        command.args([test, "--exact", "--ignored", "--nocapture"]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut said = |what: &str| out.any(|line| line.unwrap().ends_with(what));
        assert!(said("ready"));
        let pid = child.id();
        for attack in [
            format!("kill -STOP {pid}"),
            format!("kill -KILL {pid}"),
            format!("cat /proc/{pid}/environ"),
            format!("ls /proc/{pid}/fd/"),
        ] {
            let mut shell = Command::new("sh");
            let shell = shell.args(["-c", &attack]).uid(NOBODY).gid(NOBODY);
            let done = shell.stdout(Stdio::null()).stderr(Stdio::null()).status();
            assert!(!done.unwrap().success(), "{attack}");
        }
        child.stdin.take().unwrap().write_all(b"\n").unwrap();
        assert!(said("lives"));
        assert!(child.wait().unwrap().success());
    }

    #[test]
    fn closed_connection_is_over_unless_something_is_left_in_it() {
        for packets in [SocketType::SEQPACKET, SocketType::STREAM] {
            let (own, theirs) = pair(packets).unwrap();
            assert!(!is_over(&own));
            drop(theirs);
            assert!(is_over(&own));
            let (own, theirs) = pair(packets).unwrap();
            send_bytes(&theirs, &[1], &[theirs.as_fd()], SendFlags::empty()).unwrap();
            rustix::net::shutdown(&theirs, rustix::net::Shutdown::Both).unwrap();
            assert!(!is_over(&own), "a file is left");
        }
        // A packet without bytes, with a file.
        let (own, theirs) = pair(SocketType::SEQPACKET).unwrap();
        send_bytes(&theirs, &[], &[io::stdin().as_fd()], SendFlags::empty()).unwrap();
        drop(theirs);
        assert!(!is_over(&own));
        let (_, files) = recv_bytes(&own, &mut [0], RecvFlags::DONTWAIT).unwrap();
        assert_eq!(files.len(), 1, "it is still there");
        drop(files);
        assert!(is_over(&own));
    }
}
