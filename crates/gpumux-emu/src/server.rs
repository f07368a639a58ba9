//! The server: one thread that plays the devices for all programs.
//!
//! It sleeps until a packet comes or until the model says that something may happen, and then brings the
//! model to the present. Late waking does not distort the model: events have their exact times,
//! and a submission counts from the moment at which the program made it.
//!
//! No peer can hold it up: nothing here blocks on a socket, everything that a peer can make it keep has a bound, and
//! a client that breaks the rules loses the connection.

mod books;
mod call;
mod control;
mod core;
mod device;
mod execution;
mod process;
mod rm;
mod serve;
#[cfg(test)]
mod tests;
mod wire;
mod work;

use std::{
    io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::Arc,
    thread::JoinHandle,
};

use rustix::{
    event::{EventfdFlags, eventfd},
    io::Errno,
    net::{
        AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
    },
};

use crate::{Profile, profile::ProfileError};
use core::Core;
pub(crate) use wire::now;

/// Why the emulated device cannot start or go on.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The profile makes no sense.
    #[error(transparent)]
    Profile(#[from] ProfileError),
    /// Another server is there.
    #[error("an emulated device already listens on {0}: stop it or choose another socket")]
    InUse(PathBuf),
    /// The socket cannot be made.
    #[error("cannot listen on {path}: {source}")]
    Listen {
        /// Where.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The system refused something else.
    #[error("the emulated device's server failed: {0}")]
    Io(#[from] io::Error),
}

impl From<Errno> for ServerError {
    fn from(error: Errno) -> Self {
        Self::Io(error.into())
    }
}

/// A device that listens and does not run yet.
pub struct Server {
    core: Core,
    stop: Arc<OwnedFd>,
    socket: SocketFile,
}

/// Removes the socket's file.
struct SocketFile(PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// A running device; dropping it stops it.
pub struct ServerHandle {
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<Result<(), ServerError>>>,
}

impl ServerHandle {
    /// Stops it and waits.
    ///
    /// # Errors
    /// What made it fail before.
    pub fn stop(mut self) -> Result<(), ServerError> {
        signal(&self.stop);
        match self.thread.take().map(JoinHandle::join) {
            Some(Ok(result)) => result,
            Some(Err(_)) => Err(io::Error::other("the server panicked").into()),
            None => Ok(()),
        }
    }
}

impl Drop for ServerHandle {
    fn drop(&mut self) {
        signal(&self.stop);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn signal(stop: &OwnedFd) {
    let _ = rustix::io::write(stop, &1u64.to_ne_bytes());
}

impl Server {
    /// Listens on `path`; programs can connect from now on and are served once it runs.
    ///
    /// # Errors
    /// When the profile makes no sense, another server listens there, or the system refuses.
    pub fn bind(profile: Profile, path: &Path) -> Result<Self, ServerError> {
        profile.check()?;
        let listener = listen_on(path)?;
        let socket = SocketFile(path.to_owned());
        raise_file_limit();
        let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        Ok(Self {
            core: Core::new(profile, listener, &stop)?,
            stop,
            socket,
        })
    }

    /// Serves until the process ends.
    ///
    /// # Errors
    /// When the system refuses what the server needs.
    pub fn run(mut self) -> Result<(), ServerError> {
        Ok(self.core.run()?)
    }

    /// Serves on a thread of its own.
    ///
    /// # Errors
    /// When no thread can be started.
    pub fn spawn(self) -> Result<ServerHandle, ServerError> {
        let stop = Arc::clone(&self.stop);
        let Self {
            mut core, socket, ..
        } = self;
        let thread = std::thread::Builder::new()
            .name("emulated-gpu".into())
            .spawn(move || {
                let _socket = socket;
                Ok(core.run()?)
            })?;
        Ok(ServerHandle {
            stop,
            thread: Some(thread),
        })
    }

    /// Where programs connect.
    pub fn path(&self) -> &Path {
        &self.socket.0
    }
}

fn listen_on(path: &Path) -> Result<OwnedFd, ServerError> {
    let failed = |error: Errno| ServerError::Listen {
        path: path.to_owned(),
        source: error.into(),
    };
    let address = SocketAddrUnix::new(path).map_err(failed)?;
    let open = || {
        socket_with(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
            None,
        )
    };
    let listener = open().map_err(failed)?;
    match bind(&listener, &address) {
        Ok(()) => {}
        Err(Errno::ADDRINUSE) => {
            // A socket file without a listener is left over from a server that was killed.
            match connect(&open().map_err(failed)?, &address) {
                Err(Errno::CONNREFUSED) if is_socket(path) => {}
                Err(_) => return Err(failed(Errno::ADDRINUSE)),
                Ok(()) => return Err(ServerError::InUse(path.to_owned())),
            }
            std::fs::remove_file(path).map_err(|source| ServerError::Listen {
                path: path.to_owned(),
                source,
            })?;
            bind(&listener, &address).map_err(failed)?;
        }
        Err(error) => return Err(failed(error)),
    }
    listen(&listener, 1024).map_err(failed)?;
    Ok(listener)
}

fn is_socket(path: &Path) -> bool {
    use std::os::unix::fs::FileTypeExt;
    std::fs::symlink_metadata(path).is_ok_and(|data| data.file_type().is_socket())
}

/// Every connection is a file, and control files carry further ones.
fn raise_file_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(
        Resource::Nofile,
        Rlimit {
            current: limit.maximum,
            ..limit
        },
    );
}
