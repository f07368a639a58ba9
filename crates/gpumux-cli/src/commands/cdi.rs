//! `gpumux cdi`: lets containers have GPUs without a cluster.

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::Context;
use gpumux_daemon::paths;
use gpumux_dra::cdi::{self, Host};

use crate::{libraries, output};

const EXAMPLES: &str = "\
Examples:
  gpumux cdi generate                                   print it
  sudo gpumux cdi generate -o /etc/cdi/gpumux.json
  podman run --device gpumux.dev/gpu=all image serve
  gpumux run --name web -- podman run --device gpumux.dev/gpu=0 -e GPUMUX_TENANT image serve

The file names the GPUs of this machine, each by its number in /dev and all as `all`, with the driver's \
and gpumux's libraries and the daemon's session socket. Container runtimes read it from /etc/cdi or \
/var/run/cdi (Docker from version 25 where CDI is switched on). Make it anew after the driver or \
gpumux has been upgraded.";

/// Describe the GPUs for container runtimes (CDI)
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand)]
enum Action {
    Generate(Generate),
}

/// Write the CDI specification of this machine's GPUs
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
struct Generate {
    /// Write it there, whole or not at all, instead of printing it
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let Action::Generate(args) = &args.action;
    let socket = paths::container_socket(&paths::find());
    let emulator_socket = std::env::var_os(gpumux_emu::SOCKET_VARIABLE).map(PathBuf::from);
    let emulator = match &emulator_socket {
        Some(_) => Some(libraries::find(libraries::EMULATED)?),
        None => None,
    };
    let root = Path::new("/");
    let spec = cdi::node_spec(&Host {
        socket_dir: socket.parent().unwrap_or(root).to_owned(),
        shim: libraries::find(libraries::SHIM)?,
        emulator,
        emulator_socket,
        root: root.to_owned(),
        driver_root: None,
    })?;
    match &args.output {
        None => output::print(&spec)?,
        Some(file) => {
            write(file, &spec).with_context(|| format!("cannot write {}", file.display()))?
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// A runtime that looks at the folder meanwhile sees the old file or the new one.
fn write(file: &Path, spec: &str) -> std::io::Result<()> {
    let dir = file.parent().filter(|dir| !dir.as_os_str().is_empty());
    if let Some(dir) = dir {
        fs::create_dir_all(dir)?;
    }
    // A device, a pipe: it is written to, not replaced. Of a link, what it names.
    if fs::metadata(file).is_ok_and(|it| !it.is_file()) {
        return fs::OpenOptions::new()
            .write(true)
            .open(file)?
            .write_all(spec.as_bytes());
    }
    let file = fs::canonicalize(file).unwrap_or_else(|_| file.into());
    // Runtimes read only what ends in .json or .yaml.
    let new = file.with_extension("new");
    fs::write(&new, spec)?;
    fs::rename(new, file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_files_are_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        // A link stays, with what it names made anew.
        fs::write(at("target"), "old").unwrap();
        std::os::unix::fs::symlink(at("target"), at("link")).unwrap();
        for file in ["link", "new.json"] {
            write(&at(file), "spec").unwrap();
        }
        assert!(fs::symlink_metadata(at("link")).unwrap().is_symlink());
        for file in ["target", "new.json"] {
            assert_eq!(fs::read_to_string(at(file)).unwrap(), "spec");
        }
        // What is no file is written to.
        rustix::fs::mkfifoat(rustix::fs::CWD, at("pipe"), 0o600.into()).unwrap();
        let pipe = at("pipe");
        let reader = std::thread::spawn(move || fs::read_to_string(pipe).unwrap());
        write(&at("pipe"), "spec").unwrap();
        assert_eq!(reader.join().unwrap(), "spec");
        assert!(!fs::metadata(at("pipe")).unwrap().is_file());
    }
}
