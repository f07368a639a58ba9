//! The process at the other end of a socket.

use std::{
    fs::File,
    io::{self, Read},
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
    path::PathBuf,
    time::Duration,
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    ioctl,
    process::{
        Pid, PidfdFlags, PidfdGetfdFlags, Signal, pidfd_getfd, pidfd_open, pidfd_send_signal,
    },
};
use serde::{Deserialize, Serialize};
use tokio::io::{Interest, unix::AsyncFd};

use crate::api::types::Exit;

/// Threads of a process that are looked at: a signal stops all of them.
const THREADS: usize = 64;
/// How many ancestors are looked at.
const LINE: usize = 64;
/// Bytes of an environment that are looked at: the kernel allows no larger one by default.
const MAX_ENVIRONMENT: u64 = 8 << 20;

/// User and group without rights (`nobody` on all Linux distributions; the kernel's overflow id).
pub(crate) const NOBODY: u32 = 65534;

/// Clock ticks in a second: USER_HZ, which is 100 on all machines that NVIDIA's driver runs on (Linux, `asm/param.h`).
const TICKS: u64 = 100;

/// A process, told from a later one of the same pid by its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct ProcessId {
    pub(crate) pid: u32,
    /// Clock ticks from boot to its start (`/proc/PID/stat`, field 22).
    pub(crate) start: u64,
}

impl ProcessId {
    /// The process that has this pid now, if the daemon can see it.
    pub(crate) fn of(pid: u32) -> Option<Self> {
        Stat::of(pid).map(|stat| stat.process)
    }

    /// Whether it runs, or could: a process that has exited does not, although its parent may not have asked for its end yet.
    pub(crate) fn lives(self) -> bool {
        Stat::of(self.pid).is_some_and(|stat| stat.process == self && !stat.exited)
    }

    /// How long ago it began, in ms.
    pub(crate) fn age_ms(self) -> u64 {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        let now_ms = now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000;
        now_ms.saturating_sub(self.start * 1000 / TICKS)
    }

    /// Whether the process that has this pid now is a child of this one and was stopped (SIGSTOP).
    pub(crate) fn has_stopped_child(self, pid: u32) -> bool {
        Stat::of(pid).is_some_and(|stat| stat.parent == self.pid && stat.stopped)
    }

    /// Whether no thread of the process that has this pid now runs, because it was stopped (SIGSTOP), a debugger holds it, or its container
    /// is paused.
    pub(crate) fn is_stopped(pid: u32) -> bool {
        // Of most others, this one look tells it.
        let stands = |stat: Stat| stat.stopped || stat.traced;
        let all_stand = Stat::of(pid).is_some_and(stands)
            && std::fs::read_dir(format!("/proc/{pid}/task")).is_ok_and(|tasks| {
                let mut tasks = tasks.flatten().take(THREADS);
                tasks.all(|task| {
                    let thread = task.file_name().to_str().and_then(|it| it.parse().ok());
                    thread.and_then(Stat::of).is_some_and(stands)
                })
            });
        all_stand || in_frozen_cgroup(pid)
    }

    /// The process itself, its parent, that one's parent and so on, as far as they live.
    pub(crate) fn line(self) -> Vec<Self> {
        let mut line: Vec<Self> = Vec::new();
        let mut next = self.pid;
        while let Some(stat) = Stat::of(next).filter(|_| line.len() < LINE) {
            line.push(stat.process);
            next = stat.parent;
        }
        line
    }

    /// Whether it is nothing but this user's, and may be ended in its name.
    pub(crate) fn is_of(self, uid: u32) -> bool {
        let status = std::fs::read(format!("/proc/{}/status", self.pid)).unwrap_or_default();
        let status = String::from_utf8_lossy(&status);
        let mut uids = status.lines().filter_map(|line| line.strip_prefix("Uid:"));
        uids.next().is_some_and(|uids| {
            let mut all = uids.split_whitespace();
            all.all(|it| it.parse() == Ok(uid))
        })
    }

    /// A file that says when it ends; none if it has ended.
    pub(crate) fn watch(self) -> Option<ProcessFd> {
        let pid = Pid::from_raw(self.pid.try_into().ok()?)?;
        let fd = pidfd_open(pid, PidfdFlags::empty()).ok()?;
        // The pid may have passed on before it was opened.
        (Self::of(self.pid) == Some(self)).then_some(ProcessFd(fd))
    }

    /// What a variable was when its program began, unless it has written over that. Waits for a file system that the process has put
    /// its environment on: see [`crate::examine`].
    ///
    /// # Errors
    /// When the process has ended or is hidden from the daemon; [`io::ErrorKind::WouldBlock`] while `execve(2)` replaces its program:
    /// its environment looks empty for a moment.
    pub(crate) fn variable(self, name: &str) -> io::Result<Option<String>> {
        let program = || {
            let stat = Stat::of(self.pid).filter(|stat| stat.process == self && !stat.exited);
            stat.map(|stat| stat.program).ok_or(io::ErrorKind::NotFound)
        };
        let before = program()?;
        let mut environment = Vec::new();
        let file = File::open(format!("/proc/{}/environ", self.pid))?;
        file.take(MAX_ENVIRONMENT).read_to_end(&mut environment)?;
        if before.is_none() || before != program()? {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let mut variables = environment.split(|byte| *byte == 0);
        let value = variables.find_map(|variable| {
            let value = variable.strip_prefix(name.as_bytes())?;
            value.strip_prefix(b"=")
        });
        Ok(value.map(|value| String::from_utf8_lossy(value).into_owned()))
    }

    /// The files that it has open: their numbers, and where they lead.
    pub(crate) fn files(self) -> impl Iterator<Item = (RawFd, PathBuf)> {
        let files = std::fs::read_dir(format!("/proc/{}/fd", self.pid));
        files.into_iter().flatten().flatten().filter_map(|file| {
            let number = file.file_name().to_str()?.parse().ok()?;
            Some((number, std::fs::read_link(file.path()).ok()?))
        })
    }

    /// The name its program goes by, for people.
    pub(crate) fn program(self) -> String {
        let name = std::fs::read_to_string(format!("/proc/{}/comm", self.pid)).unwrap_or_default();
        name.trim().to_owned()
    }
}

/// The control groups of a process, of `/proc/PID/cgroup`: controllers (none: version 2), and path.
pub(crate) fn cgroups(text: &str) -> impl Iterator<Item = (&str, &str)> {
    text.lines()
        .filter_map(|line| line.split_once(':')?.1.split_once(':'))
}

/// Whether a process's control group is frozen: cgroup.events of version 2, freezer.state of version 1 (cgroups(7)).
fn in_frozen_cgroup(pid: u32) -> bool {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let groups = read(&format!("/proc/{pid}/cgroup"));
    cgroups(&groups).any(|(controllers, path)| {
        let (file, frozen) = match controllers {
            "" => (format!("{path}/cgroup.events"), "frozen 1"),
            "freezer" => (format!("/freezer{path}/freezer.state"), "FROZEN"),
            _ => return false,
        };
        read(&format!("/sys/fs/cgroup{file}"))
            .lines()
            .any(|it| it == frozen)
    })
}

/// What `/proc/PID/stat` says (proc(5)).
struct Stat {
    process: ProcessId,
    parent: u32,
    stopped: bool,
    /// A debugger holds it.
    traced: bool,
    exited: bool,
    /// Where its program and stack begin, which differ with each `execve(2)`; none before they are there, with the environment.
    program: Option<(u64, u64)>,
}

impl Stat {
    fn of(pid: u32) -> Option<Self> {
        let stat = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
        // The second field is a name in parentheses, and may contain anything.
        let stat = String::from_utf8_lossy(&stat);
        let (_, after) = stat.rsplit_once(") ")?;
        let field = |number: usize| after.split(' ').nth(number - 3);
        let start = field(22)?.parse().ok()?;
        // 0: not yet; 1: hidden from this process.
        let code: u64 = field(26)?.parse().ok()?;
        let stack = field(28)?.parse().ok()?;
        Some(Self {
            process: ProcessId { pid, start },
            parent: field(4)?.parse().ok()?,
            stopped: field(3)? == "T",
            traced: field(3)? == "t",
            exited: matches!(field(3)?, "Z" | "X"),
            program: (code > 1).then_some((code, stack)),
        })
    }
}

/// What the kernel reports of a process (`struct pidfd_info` of linux/pidfd.h, as of Linux 6.13).
#[repr(C)]
#[derive(Default)]
struct PidfdInfo {
    mask: u64,
    cgroup: u64,
    ids: [u32; 11],
    exit_code: i32,
}

const _: () = assert!(size_of::<PidfdInfo>() == 64);
/// The exit code is asked for, and known.
const PIDFD_INFO_EXIT: u64 = 1 << 3;
/// How often it is asked for, and the pause between: a parent waits for its child at once, or not at all.
const EXIT_LOOKS: u32 = 100;
const EXIT_PAUSE: Duration = Duration::from_millis(5);

/// A pidfd.
#[derive(Debug)]
pub(crate) struct ProcessFd(OwnedFd);

impl From<OwnedFd> for ProcessFd {
    fn from(fd: OwnedFd) -> Self {
        Self(fd)
    }
}

impl AsFd for ProcessFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl ProcessFd {
    /// Waits until the process has ended.
    pub(crate) async fn ended(&self) -> io::Result<()> {
        readable(self.0.as_fd())?.readable().await?.retain_ready();
        Ok(())
    }

    /// The same process once more.
    ///
    /// # Errors
    /// When there are no files left.
    pub(crate) fn try_clone(&self) -> io::Result<Self> {
        self.0.try_clone().map(Self)
    }

    /// A file that the process has open under this number, as far as this daemon may have it.
    pub(crate) fn take(&self, number: RawFd) -> Option<OwnedFd> {
        pidfd_getfd(&self.0, number, PidfdGetfdFlags::empty()).ok()
    }

    /// How the process ended, after [`Self::ended`]; none where the kernel (before Linux 6.15) or its parent, which has not waited for
    /// it, does not tell.
    pub(crate) async fn exit(&self) -> Option<Exit> {
        for _ in 0..EXIT_LOOKS {
            match self.status() {
                Ok(Some(status)) => return Some(Exit::of_status(status)),
                Ok(None) => tokio::time::sleep(EXIT_PAUSE).await,
                Err(_) => return None,
            }
        }
        None
    }

    /// The process's wait status, once its parent has waited for it.
    ///
    /// # Errors
    /// When the kernel does not know of the request.
    fn status(&self) -> rustix::io::Result<Option<i32>> {
        const REQUEST: ioctl::Opcode = ioctl::opcode::read_write::<PidfdInfo>(0xff, 11);
        let mut info = PidfdInfo {
            mask: PIDFD_INFO_EXIT,
            ..PidfdInfo::default()
        };
        // SAFETY: the request reads and writes a structure of the size that is part of its number, and any values of its fields are
        // valid.
        unsafe { ioctl::ioctl(&self.0, ioctl::Updater::<REQUEST, _>::new(&mut info)) }?;
        Ok((info.mask & PIDFD_INFO_EXIT != 0).then_some(info.exit_code))
    }

    /// Ends the process at once, as far as this daemon may.
    pub(crate) fn kill(&self) {
        self.signal(Signal::KILL);
    }

    /// Sends a signal, as far as this daemon may.
    pub(crate) fn signal(&self, signal: Signal) {
        let _ = self.try_signal(signal);
    }

    /// Sends a signal.
    ///
    /// # Errors
    /// When the process has ended, or this daemon may not.
    pub(crate) fn try_signal(&self, signal: Signal) -> rustix::io::Result<()> {
        pidfd_send_signal(&self.0, signal)
    }

    /// Whether the process has ended.
    pub(crate) fn has_ended(&self) -> bool {
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        poll(&mut [PollFd::new(&self.0, PollFlags::IN)], Some(&now)).is_ok_and(|ready| ready > 0)
    }
}

/// Lets the runtime say when there is something to read.
///
/// # Errors
/// When the kernel refuses.
pub(crate) fn readable(fd: BorrowedFd<'_>) -> io::Result<AsyncFd<BorrowedFd<'_>>> {
    // SAFETY: a borrowed file stays open, and the same, while the result lives.
    Ok(unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }?)
}

/// The process that connected a socket, as the kernel reports.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) uid: u32,
    /// 0: it lives in a pid namespace that the daemon does not see.
    pub(crate) pid: u32,
    pub(crate) process: Option<ProcessId>,
    pub(crate) fd: Option<ProcessFd>,
}

impl Peer {
    /// Its process and user, as the kernel reports them of its socket.
    pub(crate) fn new(pid: u32, uid: u32, fd: Option<ProcessFd>) -> Self {
        let process = ProcessId::of(pid);
        Self {
            uid,
            pid,
            process,
            // A kernel before 6.5 has none.
            fd: fd.or_else(|| process.and_then(ProcessId::watch)),
        }
    }
}

/// A pidfd of the process at the other end, where the kernel has that (Linux 6.5).
pub(crate) fn pidfd(socket: impl AsFd) -> Option<OwnedFd> {
    let fd = option(&socket, libc::SO_PEERPIDFD, -1).ok()?;
    // SAFETY: the kernel has just made this file for us, and nothing else knows of it.
    (fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Pid and uid of the process at the other end.
pub(crate) fn credentials(socket: impl AsFd) -> io::Result<(u32, u32)> {
    let unset = libc::ucred {
        pid: 0,
        uid: u32::MAX,
        gid: u32::MAX,
    };
    let ucred = option(socket, libc::SO_PEERCRED, unset)?;
    Ok((ucred.pid.max(0) as u32, ucred.uid))
}

/// Reads an option of plain data.
fn option<T: Copy>(socket: impl AsFd, name: i32, mut value: T) -> io::Result<T> {
    let mut length = size_of::<T>() as libc::socklen_t;
    // SAFETY: the pointers lead to `value` and its length, which outlive the call; the options
    // read here are plain numbers, of which any are valid.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            name,
            (&raw mut value).cast(),
            &raw mut length,
        )
    };
    match result {
        0 => Ok(value),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use std::{io::Write, os::unix::net::UnixStream, path::Path, process::Command};

    use rustix::process::{WaitOptions, waitpid};

    use super::*;

    #[test]
    fn peer_is_the_process_that_connected() {
        let (a, _b) = UnixStream::pair().unwrap();
        let (pid, uid) = credentials(&a).unwrap();
        let peer = Peer::new(pid, uid, pidfd(&a).map(ProcessFd::from));
        assert_eq!(peer.pid, std::process::id());
        assert_eq!(peer.uid, rustix::process::getuid().as_raw());
        assert_eq!(peer.process, ProcessId::of(peer.pid));
        assert!(!peer.fd.unwrap().has_ended());
    }

    #[test]
    fn a_process_has_a_user_and_a_line_of_parents() {
        let mut command = Command::new("sleep");
        let mut child = command.arg("100").env("TEST", "a=b").spawn().unwrap();
        let process = ProcessId::of(child.id()).unwrap();
        let own = ProcessId::of(std::process::id()).unwrap();
        assert_eq!(process.line()[..2], [process, own]);
        let uid = rustix::process::getuid().as_raw();
        assert!(process.is_of(uid) && !process.is_of(uid + 1));
        assert!(process.age_ms() <= own.age_ms());
        assert!(process.age_ms() < 60_000, "{}", process.age_ms());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!process.is_of(uid), "it belongs to no user any more");
    }

    #[test]
    fn stopped_process_differs_from_one_that_waits() {
        let mut child = Command::new("sleep").arg("100").spawn().unwrap();
        let process = ProcessId::of(child.id()).unwrap();
        assert!(!ProcessId::is_stopped(child.id()));
        let watch = process.watch().unwrap();
        watch.try_signal(Signal::STOP).unwrap();
        let pid = Pid::from_child(&child);
        waitpid(Some(pid), WaitOptions::UNTRACED).unwrap();
        assert!(ProcessId::is_stopped(child.id()));
        watch.try_signal(Signal::CONT).unwrap();
        waitpid(Some(pid), WaitOptions::CONTINUED).unwrap();
        assert!(!ProcessId::is_stopped(child.id()));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!ProcessId::is_stopped(child.id()));
    }

    #[test]
    fn process_of_a_paused_container_is_stopped() {
        let name = format!("gpumux-test-{}", std::process::id());
        let v1 = Path::new("/sys/fs/cgroup/freezer");
        let (group, file, words) = match v1.exists() {
            true => (v1.join(name), "freezer.state", ["FROZEN", "THAWED"]),
            false => (
                Path::new("/sys/fs/cgroup").join(name),
                "cgroup.freeze",
                ["1", "0"],
            ),
        };
        if let Err(error) = std::fs::create_dir(&group) {
            return eprintln!("SKIPPED: no control group can be made: {error}");
        }
        let mut child = Command::new("sleep").arg("100").spawn().unwrap();
        let write = |file: &str, text: &str| std::fs::write(group.join(file), text).unwrap();
        write("cgroup.procs", &child.id().to_string());
        let mut found = Vec::new();
        for word in words {
            write(file, word);
            let frozen = word == words[0];
            // It takes the kernel a moment.
            let begun = std::time::Instant::now();
            while ProcessId::is_stopped(child.id()) != frozen && begun.elapsed().as_secs() < 20 {
                std::thread::yield_now();
            }
            found.push(ProcessId::is_stopped(child.id()));
        }
        child.kill().unwrap();
        child.wait().unwrap();
        std::fs::remove_dir(&group).unwrap();
        assert_eq!(found, [true, false]);
    }

    #[test]
    fn environment_that_is_not_there_yet_is_not_empty() {
        let variable = |command: &mut Command, name| {
            // This returns when the new program's memory is there, a moment before its environment is.
            let mut child = command.spawn().unwrap();
            let process = ProcessId::of(child.id()).unwrap();
            let found = loop {
                match process.variable(name) {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    found => break found,
                }
            };
            child.kill().unwrap();
            child.wait().unwrap();
            assert!(process.variable(name).is_err(), "it has ended");
            found.unwrap()
        };
        for _ in 0..200 {
            let mut command = Command::new("sleep");
            command.arg("100").env("TEST", "a=b");
            assert_eq!(variable(&mut command, "TEST").as_deref(), Some("a=b"));
        }
        let mut command = Command::new("sleep");
        command.arg("100").env("TEST", "a=b");
        assert_eq!(variable(&mut command, "TES"), None);
        assert_eq!(variable(command.env_clear(), "TEST"), None);
    }

    #[tokio::test]
    async fn exit_of_a_process_is_known_where_the_kernel_tells() {
        for (script, exit) in [
            ("exit 7", Exit::of_status(7 << 8)),
            ("kill -9 $$", Exit::of_status(9)),
        ] {
            let mut child = Command::new("sh").args(["-c", script]).spawn().unwrap();
            let process = ProcessId::of(child.id()).unwrap();
            let Some(watch) = process.watch() else {
                continue;
            };
            watch.ended().await.unwrap();
            child.wait().unwrap();
            let told = watch.exit().await;
            assert!(told.is_none_or(|told| told == exit), "{script}: {told:?}");
        }
    }

    #[test]
    fn the_files_of_a_process_outlive_it() {
        let mut command = Command::new("sleep");
        let (mut reader, writer) = io::pipe().unwrap();
        let mut child = command.arg("100").stdout(writer).spawn().unwrap();
        drop(command);
        let process = ProcessId::of(child.id()).unwrap();
        let watch = process.watch().unwrap();
        let files: Vec<_> = process.files().collect();
        let (number, path) = files.iter().find(|(number, _)| *number == 1).unwrap();
        assert!(path.to_str().unwrap().starts_with("pipe:"), "{files:?}");
        let taken = watch.take(*number).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(watch.take(*number).is_none());
        File::from(taken).write_all(b"still there").unwrap();
        let mut said = String::new();
        reader.read_to_string(&mut said).unwrap();
        assert_eq!(said, "still there");
    }

    #[test]
    fn a_process_is_seen_whatever_it_calls_itself() {
        let script = r"printf '\377) \377' > /proc/$$/comm; echo; read line";
        let mut child = Command::new("sh")
            .args(["-c", script])
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let mut said = [0];
        Read::read_exact(child.stdout.as_mut().unwrap(), &mut said).unwrap();
        let process = ProcessId::of(child.id()).unwrap();
        assert!(process.is_of(rustix::process::getuid().as_raw()));
        assert_eq!(process.line()[1].pid, std::process::id());
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn a_process_is_not_its_pids_next_owner() {
        let mut child = Command::new("sleep").arg("100").spawn().unwrap();
        let process = ProcessId::of(child.id()).unwrap();
        let watch = process.watch().unwrap();
        assert!(!watch.has_ended());
        let other = ProcessId {
            start: process.start + 1,
            ..process
        };
        assert!(other.watch().is_none());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(watch.has_ended());
        assert!(process.watch().is_none());
    }
}
