//! Looks into a process of a user from a process that may hang.
//!
//! # Problem
//! A process may have its environment on a file system of its own, and a process that reads it waits for that file system. A file that is taken from a
//! process by its number may be another by then than its name said before, and closing that one can take as long as its owner likes.
//!
//! # Approach
//! A process of its own (the hidden command [`COMMAND`]), with the daemon's rights, looks and sends what it found. Of the files that it
//! took, the daemon gets those that are what they were taken for; with the others it ends. The daemon waits a bounded time.

use std::{
    io,
    os::{
        fd::{AsFd, AsRawFd, FromRawFd, OwnedFd},
        unix::{fs::MetadataExt, process::CommandExt},
    },
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use gpumux_wire::{
    message::{MAX_PACKET, decode, encode},
    socket::{recv_bytes, send_bytes},
};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    net::{RecvFlags, SendFlags, SocketType},
};
use serde::{Deserialize, Serialize};

use crate::{
    peer::{ProcessFd, ProcessId},
    quota::{self, Quota, Taken},
    receiver::{Place, pair},
    verify::{is_of_driver, leads_to},
};

/// Name of the hidden command that runs [`main`].
pub const COMMAND: &str = "examine";
/// How long the look at a process may take: far more than it does on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);
/// Time until the next look at a program that is just beginning.
const SOON: Duration = Duration::from_millis(1);
/// Looks into processes of one user that may be under way or hang.
const MOST_LOOKS: usize = 256;
/// Files of a process that the daemon gets.
const MOST: usize = 8;
/// The driver's files that it lives with.
const FILES: [&str; 2] = ["/dev/nvidiactl", "/dev/nvidia-uvm"];

/// What is looked for.
#[derive(Debug, Serialize, Deserialize)]
enum Question {
    /// A variable of its environment.
    Variable(String),
    /// The driver's files that it has open.
    Files {
        /// The emulated device's server.
        emulated: Option<PathBuf>,
    },
}

/// First packet to the process that looks; its file is the other process's pidfd.
#[derive(Debug, Serialize, Deserialize)]
struct Task {
    process: ProcessId,
    question: Question,
}

/// Looks into processes of users.
#[derive(Clone, Debug)]
pub(crate) struct Examiner {
    place: Place,
    /// Looks that have not ended, also those that hang, by the user whose process it is.
    looks: Quota,
}

/// That a look takes place, until its process has ended.
///
/// # Errors
/// [`io::ErrorKind::QuotaExceeded`] when the user has too many.
fn begin(looks: &Quota, uid: u32) -> io::Result<quota::Place> {
    looks.take(uid, |Taken { own, .. }| {
        let text = format!(
            "{own} processes that look into processes of user {uid} have not ended: end that user's file systems that do not answer"
        );
        match own < MOST_LOOKS {
            true => Ok(()),
            false => Err(io::Error::new(io::ErrorKind::QuotaExceeded, text)),
        }
    })
}

impl Examiner {
    /// That works there.
    pub(crate) fn new(place: Place) -> Self {
        let looks = Quota::default();
        Self { place, looks }
    }

    /// What a variable was when the process's program began, unless that was written over. Blocks.
    ///
    /// # Errors
    /// [`io::ErrorKind::TimedOut`] when that is not known by `deadline`; others when there is no look at the process.
    pub(crate) fn variable(
        &self,
        process: ProcessId,
        watch: &ProcessFd,
        name: &str,
        deadline: Instant,
    ) -> io::Result<Option<String>> {
        let found = self.ask(process, watch, Question::Variable(name.into()), deadline)?;
        let (value, _) = found
            .into_iter()
            .next()
            .ok_or(io::ErrorKind::UnexpectedEof)?;
        decode(&value).map_err(io::Error::other)
    }

    /// The driver's files that the process has open, as far as this daemon may take them (as `ptrace(2)` says of
    /// `PTRACE_MODE_ATTACH_REALCREDS`), and as far as that is known in [`PATIENCE`]. Blocks.
    pub(crate) fn files(
        &self,
        process: ProcessId,
        watch: &ProcessFd,
        emulated: Option<&Path>,
    ) -> Vec<OwnedFd> {
        let emulated = emulated.map(Path::to_owned);
        let deadline = Instant::now() + PATIENCE;
        let found = self.ask(process, watch, Question::Files { emulated }, deadline);
        (found.unwrap_or_default().into_iter())
            .filter_map(|(_, file)| file)
            .collect()
    }

    fn ask(
        &self,
        process: ProcessId,
        watch: &ProcessFd,
        question: Question,
        deadline: Instant,
    ) -> io::Result<Vec<(Vec<u8>, Option<OwnedFd>)>> {
        let uid = std::fs::metadata(format!("/proc/{}", process.pid))?.uid();
        let look = begin(&self.looks, uid)?;
        let (own, theirs) = pair(SocketType::SEQPACKET)?;
        let task = encode(&Task { process, question }).map_err(io::Error::other)?;
        send_bytes(&own, &task, &[watch.as_fd()], SendFlags::empty())?;
        match self.place {
            Place::Process => {
                let mut command = Command::new("/proc/self/exe");
                command.arg(COMMAND).stdin(theirs).current_dir("/");
                command.stdout(Stdio::null()).stderr(Stdio::null());
                let mut child = command.process_group(0).spawn()?;
                // It has the other end, too.
                drop(command);
                let found = answer(&own, deadline);
                // SIGKILL ends most waits. Nothing of the daemon's waits for the others but this thread, which ends with the daemon.
                let _ = child.kill();
                std::thread::Builder::new().spawn(move || {
                    let _ = child.wait();
                    drop(look);
                })?;
                found
            }
            Place::Threads => {
                std::thread::spawn(move || {
                    let _ = self::look(&theirs);
                    drop(look);
                });
                answer(&own, deadline)
            }
        }
    }
}

/// What comes until the other side's end.
///
/// # Errors
/// When that is not there by `deadline`.
fn answer(own: &OwnedFd, deadline: Instant) -> io::Result<Vec<(Vec<u8>, Option<OwnedFd>)>> {
    let mut found = Vec::new();
    let mut bytes = vec![0; MAX_PACKET];
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).map_err(io::Error::other)?;
        if poll(&mut [PollFd::new(own, PollFlags::IN)], Some(&left))? == 0 {
            return Err(io::ErrorKind::TimedOut.into());
        }
        match recv_bytes(own, &mut bytes, RecvFlags::DONTWAIT)? {
            (0, _) => return Ok(found),
            (length, files) => found.push((bytes[..length].to_vec(), files.into_iter().next())),
        }
    }
}

/// The process that looks: its standard input leads to the daemon.
///
/// # Errors
/// When it was not started by a daemon.
pub fn main() -> io::Result<()> {
    // SAFETY: the file is open, as the one that started this process knows, and nothing else here uses it.
    let daemon = unsafe { OwnedFd::from_raw_fd(io::stdin().as_raw_fd()) };
    look(&daemon)
}

fn look(daemon: &OwnedFd) -> io::Result<()> {
    let mut bytes = vec![0; MAX_PACKET];
    let (length, files) = recv_bytes(daemon, &mut bytes, RecvFlags::empty())?;
    let task: Task = decode(&bytes[..length]).map_err(io::Error::other)?;
    let watch = files.into_iter().next().map(ProcessFd::from);
    let watch = watch.ok_or(io::ErrorKind::InvalidData)?;
    match task.question {
        Question::Variable(name) => {
            let value = loop {
                match task.process.variable(&name) {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        std::thread::sleep(SOON);
                    }
                    found => break found?,
                }
            };
            let value = encode(&value).map_err(io::Error::other)?;
            send_bytes(daemon, &value, &[], SendFlags::empty())
        }
        Question::Files { emulated } => {
            let taken = taken(task.process, &watch, emulated.is_some());
            hand_over(daemon, taken, emulated.as_deref())
        }
    }
}

/// Sends those that are the driver's. The daemon sees the end before the others are closed.
fn hand_over(daemon: &OwnedFd, taken: Vec<OwnedFd>, emulated: Option<&Path>) -> io::Result<()> {
    let (good, _others): (Vec<_>, Vec<_>) =
        (taken.into_iter()).partition(|file| is_of_driver(file) || is_emulated(file, emulated));
    for file in good.iter().take(MOST) {
        send_bytes(daemon, &[0], &[file.as_fd()], SendFlags::empty())?;
    }
    rustix::net::shutdown(daemon, rustix::net::Shutdown::Both)?;
    Ok(())
}

/// Files that may be of the driver or lead to the emulated device, by their names.
fn taken(process: ProcessId, watch: &ProcessFd, emulated: bool) -> Vec<OwnedFd> {
    let may_be = |path: &Path| {
        FILES.iter().any(|file| path == Path::new(file))
            || (emulated && path.to_string_lossy().starts_with("socket:"))
    };
    (process.files().filter(|(_, path)| may_be(path)))
        .filter_map(|(number, _)| watch.take(number))
        .collect()
}

fn is_emulated(file: &OwnedFd, server: Option<&Path>) -> bool {
    server.is_some_and(|server| leads_to(file, server).is_ok())
}

#[cfg(test)]
mod tests {
    use std::{
        io::Read,
        net::{TcpListener, TcpStream},
    };

    use gpumux_tests::hanging::lingering;
    use rustix::net::SocketFlags;

    use super::*;
    use crate::fake::Driver;

    /// A process that has said that its program runs, and executes no other after that.
    fn process(input: OwnedFd) -> (std::process::Child, ProcessId, ProcessFd) {
        let mut command = Command::new("sh");
        command.args(["-c", "echo; kill -STOP $$"]);
        let out = command
            .stdin(input)
            .stdout(Stdio::piped())
            .env("TEST", "a=b");
        let mut child = out.spawn().unwrap();
        let mut said = [0];
        child
            .stdout
            .as_mut()
            .unwrap()
            .read_exact(&mut said)
            .unwrap();
        let process = ProcessId::of(child.id()).unwrap();
        (child, process, process.watch().unwrap())
    }

    fn nothing() -> OwnedFd {
        std::fs::File::open("/dev/null").unwrap().into()
    }

    #[test]
    fn variable_of_another_process_is_found() {
        let examiner = Examiner::new(Place::Threads);
        let (mut child, process, watch) = process(nothing());
        let deadline = Instant::now() + PATIENCE;
        let variable = |name| examiner.variable(process, &watch, name, deadline);
        assert_eq!(variable("TEST").unwrap().as_deref(), Some("a=b"));
        assert_eq!(variable("TES").unwrap(), None);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(variable("TEST").is_err());
    }

    #[test]
    fn looks_that_hang_are_bounded_for_each_user() {
        let looks = Quota::default();
        let mut hung: Vec<quota::Place> = (0..MOST_LOOKS)
            .map(|_| begin(&looks, 1000).unwrap())
            .collect();
        let error = begin(&looks, 1000).err().unwrap();
        assert_eq!(error.kind(), io::ErrorKind::QuotaExceeded);
        assert!(error.to_string().contains("user 1000"), "{error}");
        assert!(begin(&looks, 1001).is_ok(), "of another user");
        hung.pop();
        assert!(begin(&looks, 1000).is_ok());
        drop(hung);
        assert_eq!(looks.all(), 0);
    }

    #[test]
    fn look_counts_until_its_process_has_ended() {
        let examiner = Examiner::new(Place::Threads);
        let (mut child, id, watch) = process(nothing());
        for _ in 0..2 * MOST_LOOKS {
            let deadline = Instant::now() + PATIENCE;
            examiner.variable(id, &watch, "TEST", deadline).unwrap();
        }
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn only_files_that_lead_to_the_device_are_handed_over() {
        let dir = tempfile::tempdir().unwrap();
        let driver = Driver::start(dir.path(), "driver.sock");
        let examiner = Examiner::new(Place::Threads);
        let device = gpumux_wire::socket::connect(&driver.socket, SocketFlags::empty()).unwrap();
        let (mut child, id, watch) = process(device);
        let files = |server| examiner.files(id, &watch, server);
        assert_eq!(files(Some(&*driver.socket)).len(), 1);
        assert_eq!(files(None).len(), 0);
        child.kill().unwrap();
        child.wait().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let other = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut child, id, watch) = process(other.into());
        assert_eq!(examiner.files(id, &watch, Some(&driver.socket)).len(), 0);
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn file_whose_end_lingers_does_not_delay_the_answer() {
        let dir = tempfile::tempdir().unwrap();
        let driver = Driver::start(dir.path(), "driver.sock");
        let (file, other): (TcpStream, TcpStream) = lingering(Duration::from_secs(60));
        let (mut child, id, watch) = process(file.into());
        let (own, theirs) = pair(SocketType::SEQPACKET).unwrap();
        let taken = taken(id, &watch, true);
        assert_eq!(taken.len(), 1);
        // The reference that was taken is the last.
        child.kill().unwrap();
        child.wait().unwrap();
        std::thread::spawn(move || hand_over(&theirs, taken, Some(&driver.socket)));
        let mut bytes = [0; 8];
        let (length, files) = recv_bytes(&own, &mut bytes, RecvFlags::empty()).unwrap();
        assert!(length == 0 && files.is_empty());
        drop((other, dir));
    }
}
