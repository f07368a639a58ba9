//! Programs on the emulated device: the server that plays it, and the environment that leads them there.

use std::{
    env,
    ffi::OsString,
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::Context;
use gpumux_emu::SOCKET_VARIABLE;
use rustix::net::SocketFlags;

use crate::{background, libraries};

/// A server that runs.
pub(crate) struct Server {
    socket: PathBuf,
}

impl Server {
    /// The one that this process's environment names.
    pub(crate) fn here() -> Option<Self> {
        env::var_os(SOCKET_VARIABLE).map(|socket| Self {
            socket: socket.into(),
        })
    }

    /// Starts one in `dir` that ends when this process does, whatever program that has become by then. The server
    /// then removes the folder.
    ///
    /// # Errors
    /// When it does not come up.
    pub(crate) fn start(dir: &Path, options: Vec<OsString>) -> anyhow::Result<Self> {
        let socket = dir.join("emu.sock");
        let pid = std::process::id().to_string();
        let mut args: Vec<OsString> = ["emu", "serve", "--while", &pid].map(Into::into).into();
        args.extend(["--socket".into(), socket.clone().into()]);
        args.extend(options);
        background::start(&args, &dir.join("emu.log"), || {
            gpumux_wire::socket::connect(&socket, SocketFlags::NONBLOCK).is_ok()
        })
        .context("cannot start the emulated device")?;
        Ok(Self { socket })
    }

    /// Makes a program find the emulated device instead of a real one.
    ///
    /// # Errors
    /// When the library is missing.
    pub(crate) fn enter(&self, program: &mut Command) -> anyhow::Result<()> {
        let library = libraries::find(libraries::EMULATED)?;
        let links = links(&self.socket);
        if links.is_dir() {
            // For a program that loads NVML by its name, or looks for libcuda before it is loaded.
            let path = libraries::first("LD_LIBRARY_PATH", &links);
            program.env("LD_LIBRARY_PATH", path);
        }
        // CuPy compiles to code that only a GPU runs, and takes reductions from libraries of such code, unless a variable forbids that.
        for (name, value) in [("CUPY_COMPILE_WITH_PTX", "1"), ("CUPY_ACCELERATORS", "")] {
            if env::var_os(name).is_none() {
                program.env(name, value);
            }
        }
        program
            .env(SOCKET_VARIABLE, &self.socket)
            .env("GPUMUX_NVML", &library)
            // Behind the shim. The library has libcuda's soname, so that a program that loads libcuda gets it.
            .env("LD_PRELOAD", libraries::last("LD_PRELOAD", &library));
        Ok(())
    }
}

/// Where the names under which programs load a driver's libraries are: beside the server's socket.
fn links(socket: &Path) -> PathBuf {
    let mut path = socket.as_os_str().to_owned();
    path.push(".lib");
    path.into()
}

/// Makes them. Before the socket: a process that finds the socket finds them.
///
/// # Errors
/// When the library is missing, or they cannot be made.
pub(crate) fn make_links(socket: &Path) -> anyhow::Result<()> {
    let library = libraries::find(libraries::EMULATED)?;
    let links = links(socket);
    let link = |name: &str| {
        let at = links.join(name);
        // A server at this socket has made it before.
        if fs::read_link(&at).is_ok_and(|it| it == library) {
            return Ok(());
        }
        let _ = fs::remove_file(&at);
        symlink(&library, at)
    };
    fs::create_dir_all(&links)
        .and_then(|()| {
            let names = ["libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1"];
            names.into_iter().try_for_each(link)
        })
        .with_context(|| format!("cannot make {}", links.display()))
}

/// Removes them.
pub(crate) fn remove_links(socket: &Path) {
    let _ = fs::remove_dir_all(links(socket));
}
