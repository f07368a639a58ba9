//! Memory that is kept from going before the kernels that use it have ended: in a shared group that is a fault of all
//! (an H100, docs/fidelity.md), and NVIDIA's MPS leaves it at that. A process's memory stays while any process has its driver files.

use std::os::fd::OwnedFd;

use crate::scheduler::{Command, Handle, Left, STAY};

/// Holds a process's driver files until its group had [`STAY`] on the device. Without such a group they are held for that time, while
/// the caller waits for what this returns.
pub(crate) async fn until_ended(
    scheduler: &Handle,
    of: Left,
    files: Vec<OwnedFd>,
) -> impl Future<Output = ()> + use<> {
    let rest = scheduler
        .ask(|answer| Command::Hold(of, files, answer))
        .await;
    async move {
        if let Ok(Some(files)) = rest {
            tokio::time::sleep(STAY).await;
            // The last one frees memory, which takes the driver long.
            tokio::task::spawn_blocking(|| drop(files));
        }
    }
}
