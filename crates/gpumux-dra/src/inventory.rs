//! Asks the daemon for the node's devices every few seconds. The daemon has NVML; this process needs neither it nor device nodes.

use std::{
    collections::HashMap,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use gpumux_daemon::{api::types, client::Client as Daemon};
use tokio::sync::watch;

use crate::device::{self, Device};

/// How often.
const EVERY: Duration = Duration::from_secs(5);
/// A fault that lasts so long evicts what runs on the device.
const EVICT_AFTER: Duration = Duration::from_secs(30);

/// Where devices come from.
#[derive(Clone, Debug)]
pub enum Inventory {
    /// The daemon's.
    Node,
    /// These.
    Fixed(Vec<Device>),
}

/// Follows the devices. The first look is done when this returns.
pub async fn watch(inventory: Inventory, daemon: Daemon) -> watch::Receiver<Arc<Vec<Device>>> {
    if let Inventory::Fixed(devices) = inventory {
        return fixed(devices);
    }
    let mut looker = Looker::default();
    looker.look(&daemon).await;
    let (sender, receiver) = watch::channel(Arc::new(looker.last.clone()));
    tokio::spawn(async move {
        while !sender.is_closed() {
            tokio::time::sleep(EVERY).await;
            looker.look(&daemon).await;
            sender.send_if_modified(|devices| {
                let changed = **devices != looker.last;
                if changed {
                    *devices = Arc::new(looker.last.clone());
                }
                changed
            });
        }
    });
    receiver
}

fn fixed(devices: Vec<Device>) -> watch::Receiver<Arc<Vec<Device>>> {
    let (sender, receiver) = watch::channel(Arc::new(devices));
    // They never change, but must not look abandoned.
    tokio::spawn(async move { sender.closed().await });
    receiver
}

#[derive(Default)]
struct Looker {
    faults: HashMap<String, Instant>,
    last: Vec<Device>,
}

impl Looker {
    async fn look(&mut self, daemon: &Daemon) {
        match daemon.devices().await {
            Ok(known) => {
                // NVML reports a GPU that is in MIG instances only by these. A device without memory is one that NVML does not
                // report: it cannot be given out.
                let known = known.iter().filter(|device| device.memory_bytes > 0);
                self.last = known.map(|device| self.join(device)).collect();
                self.last
                    .sort_by(|a, b| (a.minor, &a.name).cmp(&(b.minor, &b.name)));
            }
            Err(error) => {
                tracing::warn!(%error, "nothing new is scheduled here");
                for device in &mut self.last {
                    // Pods on it run on; only new ones need the daemon.
                    device
                        .fault
                        .get_or_insert_with(|| "gpumuxd does not answer".to_owned());
                }
            }
        }
    }

    fn join(&mut self, known: &types::Device) -> Device {
        let fault = (known.state != "ok").then(|| known.state.clone());
        let evict = match &fault {
            None => {
                self.faults.remove(&known.uuid);
                false
            }
            Some(_) => {
                self.faults
                    .entry(known.uuid.clone())
                    .or_insert_with(Instant::now)
                    .elapsed()
                    >= EVICT_AFTER
            }
        };
        let types::Hardware {
            compute_capability,
            minor,
            pci_bus_id,
            mig,
        } = known.hardware.clone();
        Device {
            name: device::name(minor, mig, &known.uuid),
            uuid: known.uuid.clone(),
            product: known.name.clone(),
            compute_capability,
            driver: known.driver.clone(),
            pcie_root: pci_bus_id
                .as_deref()
                .and_then(|bus| device::pcie_root(Path::new("/"), bus)),
            pci_bus_id,
            memory_bytes: known.memory_bytes,
            memory_guaranteeable: known.memory_guaranteeable,
            context_bytes: known.context_bytes,
            minor,
            mig,
            emulated: known.emulated,
            fault,
            evict,
        }
    }
}
