//! Programs on the emulated device: the server that plays it, and the environment that leads them there.

use std::{
    env,
    ffi::OsString,
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
        program
            .env(SOCKET_VARIABLE, &self.socket)
            .env("GPUMUX_NVML", &library)
            // Behind the shim. The library has libcuda's soname, so that whoever loads libcuda gets it.
            .env("LD_PRELOAD", libraries::last("LD_PRELOAD", &library));
        Ok(())
    }
}
