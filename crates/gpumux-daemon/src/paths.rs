//! Where the daemon and its users meet: the runtime directory and what lies in it.

use std::{
    fs::{DirBuilder, File, OpenOptions, Permissions},
    io::{self, Write},
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
    time::Duration,
};

use rustix::{
    fs::{FlockOperation, Mode, OFlags, flock, open},
    process::getuid,
};

/// Variables that lead a program to an MPS server, and that set its part of the SMs and its priority there.
pub const MPS_VARIABLES: [&str; 4] = [
    "CUDA_MPS_PIPE_DIRECTORY",
    "CUDA_MPS_LOG_DIRECTORY",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
    "CUDA_MPS_CLIENT_PRIORITY",
];

/// The system daemon's directory.
const SYSTEM: &str = "/run/gpumux";

/// Where a daemon of this user keeps its sockets: `GPUMUX_RUNTIME_DIR`, or `/run/gpumux` for
/// root, or `$XDG_RUNTIME_DIR/gpumux`, or `/tmp/gpumux-UID`.
pub fn runtime_dir() -> PathBuf {
    if let Some(dir) = named() {
        return dir;
    }
    if getuid().is_root() {
        return SYSTEM.into();
    }
    match std::env::var_os("XDG_RUNTIME_DIR").filter(|dir| !dir.is_empty()) {
        Some(dir) => PathBuf::from(dir).join("gpumux"),
        None => format!("/tmp/gpumux-{}", getuid().as_raw()).into(),
    }
}

/// Where a user finds a daemon: its own if that has a socket, else the system's if that has
/// one. A directory that belongs to another user than this one or root is never taken.
pub fn find() -> PathBuf {
    let own = runtime_dir();
    let owner = |path: &Path| std::fs::symlink_metadata(path).ok().map(|it| it.uid());
    let trusted = |owner| owner == 0 || owner == getuid().as_raw();
    let serves = |dir: &Path| owner(&api_socket(dir)).is_some_and(trusted);
    let is_foreign = owner(&own).is_some_and(|owner| !trusted(owner));
    if named().is_none() && (is_foreign || !serves(&own) && serves(SYSTEM.as_ref())) {
        return SYSTEM.into();
    }
    own
}

fn named() -> Option<PathBuf> {
    let dir = std::env::var_os("GPUMUX_RUNTIME_DIR").filter(|dir| !dir.is_empty())?;
    Some(dir.into())
}

/// The socket where tenants' processes meet the daemon.
pub fn session_socket(dir: &Path) -> PathBuf {
    dir.join("session.sock")
}

/// The session socket once more, alone in a directory that outlives the daemon: containers mount that
/// directory, where the API's socket must not be, because root in a container is root to it.
pub fn container_socket(dir: &Path) -> PathBuf {
    dir.join("container").join("session.sock")
}

/// Makes the session socket appear as [`container_socket`] too.
pub(crate) fn share_with_containers(dir: &Path) -> io::Result<()> {
    let socket = container_socket(dir);
    if let Some(parent) = socket.parent() {
        DirBuilder::new()
            .recursive(true)
            .mode(0o755)
            .create(parent)?;
    }
    std::fs::hard_link(session_socket(dir), socket)
}

/// The socket of the API.
pub fn api_socket(dir: &Path) -> PathBuf {
    dir.join("api.sock")
}

/// Why a runtime directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DirError {
    /// Another daemon lives there.
    #[error(
        "a daemon (pid {pid}) already serves {dir}: stop it, or use another --runtime-dir; one that does not answer is ended by `kill -9 {pid}`, after which the next takes over even if it hangs"
    )]
    AlreadyRunning {
        /// The directory.
        dir: PathBuf,
        /// The daemon that lives there, as it wrote itself.
        pid: String,
    },
    /// It is not ours.
    #[error("{0} belongs to another user: remove it, or use another --runtime-dir")]
    Foreign(PathBuf),
    /// Every user could put files there, or take the sockets' names.
    #[error("all users may write to {0}: `chmod o-w {0}`, or use another --runtime-dir")]
    Open(PathBuf),
    /// It cannot be made or written.
    #[error("cannot use {0}: {1}; choose a directory of your own with --runtime-dir")]
    Io(PathBuf, io::Error),
    /// It was taken from under the daemon that had it.
    #[error(
        "the runtime directory {0} was removed or replaced while the daemon used it, so that no client finds the daemon: the daemon \
         ends, and programs that run go on unmanaged; start both again, and leave the directory to the daemon"
    )]
    Lost(PathBuf),
}

/// Makes a runtime directory if need be.
///
/// # Errors
/// When it cannot be made, another user has made it, or all users may write to it.
pub fn make(dir: &Path) -> Result<(), DirError> {
    let io = |error| DirError::Io(dir.to_owned(), error);
    // Tenants of all users must reach a system daemon's sockets.
    let mode = if getuid().is_root() { 0o755 } else { 0o700 };
    DirBuilder::new()
        .recursive(true)
        .mode(mode)
        .create(dir)
        .map_err(io)?;
    let made = std::fs::symlink_metadata(dir).map_err(io)?;
    if !made.is_dir() || made.uid() != getuid().as_raw() {
        return Err(DirError::Foreign(dir.to_owned()));
    }
    match made.mode() & 0o002 {
        0 => Ok(()),
        _ => Err(DirError::Open(dir.to_owned())),
    }
}

/// The daemon's hold on its runtime directory: at most one daemon has it.
#[derive(Debug)]
pub(crate) struct RuntimeDir {
    path: PathBuf,
    lock: File,
}

impl RuntimeDir {
    /// Makes the directory if need be, takes its lock, and removes sockets that a dead daemon left.
    pub(crate) fn take(path: PathBuf) -> Result<Self, DirError> {
        let io = |error| DirError::Io(path.clone(), error);
        make(&path)?;
        // One at a time comes here, or two could find the same dead daemon.
        let turn = lock_file(&path.join("lock.turn"), 0o600).map_err(io)?;
        let alone = locked(&turn);
        let name = path.join("lock");
        let mut lock = lock_file(&name, 0o644).map_err(io)?;
        if !alone || !locked(&lock) {
            let pid = std::fs::read_to_string(&name).unwrap_or_default();
            let pid = pid.trim().to_owned();
            if !alone || !has_been_killed(&pid, &lock) {
                return Err(DirError::AlreadyRunning { dir: path, pid });
            }
            tracing::warn!(
                pid,
                "the last daemon was killed and hangs in the kernel: taking over from it"
            );
            // It keeps its lock for as long as it hangs, on a file that has no name any more.
            let new = path.join("lock.new");
            lock = lock_file(&new, 0o644).map_err(io)?;
            flock(&lock, FlockOperation::NonBlockingLockExclusive)
                .map_err(|error| io(error.into()))?;
            std::fs::rename(&new, &name).map_err(io)?;
        }
        lock.set_len(0).map_err(io)?;
        writeln!(lock, "{}", std::process::id()).map_err(io)?;
        // The process that bound these did so under the lock and is gone.
        let dir = Self { path, lock };
        dir.remove_sockets();
        Ok(dir)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the lock is still where the next daemon would look for it.
    pub(crate) fn check(&self) -> Result<(), DirError> {
        let lock = self.path.join("lock");
        let io = |error| DirError::Io(self.path.clone(), error);
        let own = self.lock.metadata().map_err(io)?;
        let found = match std::fs::symlink_metadata(lock) {
            Ok(found) => (found.dev(), found.ino()) == (own.dev(), own.ino()),
            Err(error) => error.kind() != io::ErrorKind::NotFound,
        };
        match found {
            true => Ok(()),
            false => Err(DirError::Lost(self.path.clone())),
        }
    }

    fn remove_sockets(&self) {
        for socket in [
            session_socket(&self.path),
            container_socket(&self.path),
            api_socket(&self.path),
        ] {
            let _ = std::fs::remove_file(socket);
        }
    }
}

/// Whether a daemon has the directory, be it one that only starts.
pub fn taken(dir: &Path) -> bool {
    // The user that made the directory may have made a pipe of that name, which no process shall wait for.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    // A shared lock, so that processes that ask don't take each other for a daemon.
    open(dir.join("lock"), flags, Mode::empty())
        .is_ok_and(|lock| flock(lock, FlockOperation::NonBlockingLockShared).is_err())
}

/// Opens a file to lock, and makes it if need be.
fn lock_file(path: &Path, mode: u32) -> io::Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(mode)
        .open(path)
}

/// Whether the process that holds this lock has been killed, so that nothing of it can run any more, although it has
/// not ended: a call into the kernel that does not return, such as the closing of a file of a file system in user space,
/// keeps it, and with it its lock and its sockets.
fn has_been_killed(pid: &str, lock: &File) -> bool {
    let holds = || {
        let inode = lock.metadata().ok()?.ino();
        let locks = std::fs::read_to_string("/proc/locks").ok()?;
        // The pid may be that of a process in another pid namespace.
        Some(holds_lock(&locks, pid, inode))
    };
    holds() == Some(true) && pid.parse().is_ok_and(is_killed)
}

/// Whether nothing of a process can run any more, although it may be there yet.
pub(crate) fn is_killed(pid: u32) -> bool {
    let tasks = || {
        let all = std::fs::read_dir(format!("/proc/{pid}/task")).ok()?;
        let status = |task: io::Result<std::fs::DirEntry>| {
            std::fs::read_to_string(task.ok()?.path().join("status")).ok()
        };
        all.map(status).collect::<Option<Vec<String>>>()
    };
    tasks().is_some_and(|tasks| !tasks.is_empty() && tasks.iter().all(|it| has_ended(it)))
}

/// Whether `/proc/locks` (proc_locks(5)) shows that this process holds a lock on a file with this inode.
fn holds_lock(locks: &str, pid: &str, inode: u64) -> bool {
    let inode = inode.to_string();
    locks.lines().any(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        matches!(words[..], [_, "FLOCK", _, "WRITE", by, file, ..]
            if by == pid && file.rsplit(':').next() == Some(&inode))
    })
}

/// Whether a thread with this `/proc/PID/task/TID/status` (proc_pid_status(5)) has ended, or will not run before it does.
fn has_ended(status: &str) -> bool {
    let field = |name| {
        let mut lines = status.lines();
        lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
    };
    let pending = |name| {
        let mask = field(name).and_then(|it| u64::from_str_radix(it.trim(), 16).ok());
        mask.is_some_and(|mask| mask & 1 << (libc::SIGKILL - 1) != 0)
    };
    let ended = field("State").is_some_and(|it| it.trim_start().starts_with(['Z', 'X']));
    ended || pending("SigPnd") || pending("ShdPnd")
}

/// Whether the lock could be had. One that is about to end may hold it for a moment yet.
fn locked(lock: &File) -> bool {
    (0..100).any(|attempt| {
        if attempt > 0 {
            std::thread::sleep(Duration::from_millis(10));
        }
        flock(lock, FlockOperation::NonBlockingLockExclusive).is_ok()
    })
}

impl Drop for RuntimeDir {
    fn drop(&mut self) {
        // Else they are another daemon's.
        if self.check().is_ok() {
            self.remove_sockets();
        }
    }
}

/// Lets every local user connect to a socket. Permissions are decided by peer credentials,
/// and the users that get here at all by the directory.
pub(crate) fn open_to_all(socket: &Path) -> io::Result<()> {
    std::fs::set_permissions(socket, Permissions::from_mode(0o666))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use rustix::fs::{CWD, FileType, mknodat};

    use super::*;

    #[test]
    fn only_one_daemon_holds_a_directory() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("a/b");
        let first = RuntimeDir::take(path.clone()).unwrap();
        let error = RuntimeDir::take(path.clone()).unwrap_err().to_string();
        assert!(
            error.contains(&format!("pid {}", std::process::id())),
            "{error}"
        );
        assert!(taken(&path));
        std::fs::write(session_socket(&path), "").unwrap();
        drop(first);
        // What another test starts has the lock, too, until it executes its program.
        let free = (0..300).any(|_| {
            std::thread::sleep(Duration::from_millis(10));
            !taken(&path)
        });
        assert!(free);
        let pipe = parent.path().join("lock");
        mknodat(CWD, pipe, FileType::Fifo, Mode::RWXU, 0).unwrap();
        assert!(
            !taken(parent.path()),
            "a reader without a writer does not wait"
        );
        let _second = RuntimeDir::take(path.clone()).unwrap();
        assert!(
            !session_socket(&path).exists(),
            "a dead daemon's socket is removed"
        );
    }

    #[test]
    fn directory_that_all_may_write_to_is_refused() {
        let parent = tempfile::tempdir().unwrap();
        let mode = |mode| std::fs::set_permissions(&parent, PermissionsExt::from_mode(mode));
        mode(0o777).unwrap();
        let error = make(parent.path()).unwrap_err();
        assert!(error.to_string().contains("chmod o-w"), "{error}");
        mode(0o755).unwrap();
        make(parent.path()).unwrap();
    }

    #[test]
    fn removed_directory_is_noticed_and_its_successor_left_alone() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("a");
        let first = RuntimeDir::take(path.clone()).unwrap();
        first.check().unwrap();
        std::fs::remove_dir_all(&path).unwrap();
        let error = first.check().unwrap_err();
        assert!(matches!(error, DirError::Lost(_)), "{error}");
        let second = RuntimeDir::take(path.clone()).unwrap();
        std::fs::write(api_socket(&path), "").unwrap();
        assert!(matches!(first.check(), Err(DirError::Lost(_))));
        second.check().unwrap();
        drop(first);
        assert!(api_socket(&path).exists(), "it is the second daemon's");
    }

    #[test]
    fn killed_daemon_differs_from_one_that_stands_still() {
        let status = |state: &str, pending: &str| {
            format!(
                "Name:\tgpumux\nState:\t{state}\nSigPnd:\t{pending}\nShdPnd:\t0000000000000000\n"
            )
        };
        let none = "0000000000000000";
        assert!(has_ended(&status("Z (zombie)", none)));
        assert!(has_ended(&status("D (disk sleep)", "0000000000000100")));
        assert!(!has_ended(&status("D (disk sleep)", none)));
        assert!(!has_ended(&status("T (stopped)", "0000000000004000")));
        assert!(!has_ended(""));
        let locks = "1: FLOCK  ADVISORY  WRITE 4207 00:1a:77 0 EOF\n2: POSIX  ADVISORY  WRITE 5 00:1a:78 0 EOF\n";
        assert!(holds_lock(locks, "4207", 77));
        assert!(!holds_lock(locks, "4207", 7) && !holds_lock(locks, "420", 77));
        assert!(!holds_lock(locks, "5", 78), "another kind of lock");
        // This process holds one, and lives.
        let parent = tempfile::tempdir().unwrap();
        let dir = RuntimeDir::take(parent.path().join("a")).unwrap();
        let lock = File::open(dir.path().join("lock")).unwrap();
        assert!(!has_been_killed(&std::process::id().to_string(), &lock));
        let locks = std::fs::read_to_string("/proc/locks").unwrap();
        let own = std::process::id().to_string();
        assert!(
            holds_lock(&locks, &own, lock.metadata().unwrap().ino()),
            "{locks}"
        );
    }

    #[test]
    fn runtime_dir_that_is_a_link_is_refused() {
        let parent = tempfile::tempdir().unwrap();
        let (real, link) = (parent.path().join("real"), parent.path().join("link"));
        std::fs::create_dir(&real).unwrap();
        std::os::unix::fs::symlink(&real, &link).unwrap();
        assert!(matches!(RuntimeDir::take(link), Err(DirError::Foreign(_))));
    }
}
