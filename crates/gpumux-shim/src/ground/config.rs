//! What the environment says. Read when the program first opens a control file; there are no limits or
//! guarantees in it.

use std::{
    env,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use rustix::process::getuid;

/// The system daemon's directory.
const SYSTEM: &str = "/run/gpumux";

/// Settings of this process.
#[derive(Debug)]
pub(crate) struct Config {
    /// `GPUMUX_SOCKET`: the daemon's session socket, if given.
    socket: Option<PathBuf>,
    /// `GPUMUX_RUNTIME_DIR`: the daemon's directory, if given.
    runtime_dir: Option<PathBuf>,
    /// `XDG_RUNTIME_DIR`.
    user_dir: Option<PathBuf>,
    /// `GPUMUX_TENANT`: whose process this is, by a secret of the daemon.
    pub(crate) tenant: Option<String>,
    /// `GPUMUX_STRICT=1`: rather end than run without a daemon.
    pub(crate) strict: bool,
    /// Neither `GPUMUX_HINTS=0` nor `CUDA_LAUNCH_BLOCKING=1`: devices may be taken ahead of work, where the daemon allows it.
    pub(crate) hints: bool,
    /// `GPUMUX_TRACE` contains `rm`: print what the RM calls tell.
    pub(crate) trace_rm: bool,
}

impl Config {
    pub(crate) fn read() -> Self {
        let path = |name| {
            env::var_os(name)
                .filter(|value| !value.is_empty())
                .map(PathBuf::from)
        };
        let text = |name| env::var(name).ok().filter(|value| !value.is_empty());
        Self {
            socket: path("GPUMUX_SOCKET"),
            runtime_dir: path("GPUMUX_RUNTIME_DIR"),
            user_dir: path("XDG_RUNTIME_DIR"),
            tenant: text("GPUMUX_TENANT"),
            strict: text("GPUMUX_STRICT").is_some_and(|value| value == "1"),
            // Where every launch waits for its kernel, one that waits for the program's own would end by its time-out only.
            hints: text("GPUMUX_HINTS").is_none_or(|value| value != "0")
                && text("CUDA_LAUNCH_BLOCKING").is_none_or(|value| value == "0"),
            trace_rm: text("GPUMUX_TRACE")
                .is_some_and(|value| value.split(',').any(|what| what == "rm")),
        }
    }

    /// Where the daemon listens: as told, or in this user's directory, or the system's if only
    /// that has a socket. A socket that belongs to neither this user nor root is not taken.
    pub(crate) fn socket(&self) -> PathBuf {
        if let Some(socket) = &self.socket {
            return socket.clone();
        }
        let in_dir = |dir: &Path| dir.join("session.sock");
        if let Some(dir) = &self.runtime_dir {
            return in_dir(dir);
        }
        let uid = getuid();
        if uid.is_root() {
            return in_dir(Path::new(SYSTEM));
        }
        let own = match &self.user_dir {
            Some(dir) => in_dir(&dir.join("gpumux")),
            None => in_dir(Path::new(&format!("/tmp/gpumux-{}", uid.as_raw()))),
        };
        let serves = |socket: &Path| {
            std::fs::symlink_metadata(socket)
                .is_ok_and(|socket| socket.uid() == 0 || socket.uid() == uid.as_raw())
        };
        let system = in_dir(Path::new(SYSTEM));
        if !serves(&own) && serves(&system) {
            system
        } else {
            own
        }
    }
}
