//! Memory that is kept from going before the kernels that use it have ended: in a shared group that is a fault of all
//! (an H100, docs/fidelity.md), and NVIDIA's MPS leaves it at that. A process's memory stays while any process has its driver files.

use std::{
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    time::Duration,
};

use crate::{
    peer::{ProcessFd, ProcessId},
    scheduler::{Handle, Left},
    verify::leads_to,
};

/// How much time on the device the group gets to end such kernels. A program that runs ahead of the device has up to a second of work queued.
pub(crate) const STAY: Duration = Duration::from_secs(2);
/// The driver's files that it lives with.
const FILES: [&str; 2] = ["/dev/nvidiactl", "/dev/nvidia-uvm"];
/// So many of a process are looked for.
const MOST: usize = 8;

/// Holds a process's driver files until its group had [`STAY`] on the device. Without such a group they are held for that time, while
/// the caller waits for what this returns.
pub(crate) async fn until_ended(
    scheduler: &Handle,
    of: Left,
    files: Vec<OwnedFd>,
) -> impl Future<Output = ()> + use<> {
    let rest = scheduler.call(move |engine| engine.hold(&of, files)).await;
    async move {
        if let Ok(Some(files)) = rest {
            tokio::time::sleep(STAY).await;
            // The last one frees memory, which takes the driver long.
            tokio::task::spawn_blocking(|| drop(files));
        }
    }
}

/// The driver files that a living process has open, as far as this daemon may take them (as `ptrace(2)` says of
/// `PTRACE_MODE_ATTACH_REALCREDS`).
pub(crate) fn files_of(
    process: ProcessId,
    watch: &ProcessFd,
    emulated: Option<&Path>,
) -> Vec<OwnedFd> {
    let found = process
        .files()
        .filter_map(|(number, path): (i32, PathBuf)| {
            if FILES.iter().any(|file| path == Path::new(file)) {
                return watch.take(number);
            }
            let server = emulated.filter(|_| path.to_string_lossy().starts_with("socket:"))?;
            watch
                .take(number)
                .filter(|file| leads_to(file, server).is_ok())
        });
    found.take(MOST).collect()
}
