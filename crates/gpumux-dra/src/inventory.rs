//! Looks at the node's devices every few seconds: what the daemon manages, joined with NVML and the kernel's files.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use gpumux_daemon::{api::types, client::Client as Daemon};
use nvml_wrapper::Nvml;
use tokio::sync::watch;

use crate::device::{self, Device};

/// How often.
const EVERY: Duration = Duration::from_secs(5);
/// A fault that lasts so long evicts what runs on the device.
const EVICT_AFTER: Duration = Duration::from_secs(30);

/// Where devices come from.
#[derive(Clone, Debug)]
pub enum Inventory {
    /// The daemon, NVML and the kernel.
    Node {
        /// NVML's library, if not the system's.
        nvml: Option<PathBuf>,
    },
    /// These.
    Fixed(Vec<Device>),
}

/// Follows the devices. The first look is done when this returns.
pub async fn watch(inventory: Inventory, daemon: Daemon) -> watch::Receiver<Arc<Vec<Device>>> {
    let library = match inventory {
        Inventory::Fixed(devices) => return fixed(devices),
        Inventory::Node { nvml } => nvml,
    };
    let mut looker = Looker {
        nvml: None,
        library,
        faults: HashMap::new(),
        last: Vec::new(),
    };
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

struct Looker {
    nvml: Option<Arc<Nvml>>,
    library: Option<PathBuf>,
    faults: HashMap<String, Instant>,
    last: Vec<Device>,
}

impl Looker {
    async fn look(&mut self, daemon: &Daemon) {
        match daemon.devices().await {
            Ok(known) => {
                let facts = self
                    .facts(known.iter().map(|device| device.uuid.clone()).collect())
                    .await;
                self.last = known
                    .iter()
                    .map(|device| self.join(device, &facts))
                    .collect();
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

    fn join(&mut self, known: &types::Device, facts: &HashMap<String, (u32, u32)>) -> Device {
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
        let proc = device::proc_facts(Path::new("/"), &known.uuid);
        let minor = proc.as_ref().and_then(|proc| proc.minor);
        let pci_bus_id = proc.map(|proc| proc.pci_bus_id);
        Device {
            name: device::name(minor, &known.uuid),
            uuid: known.uuid.clone(),
            product: known.name.clone(),
            compute_capability: facts.get(&known.uuid).copied(),
            driver: known.driver.clone(),
            pcie_root: pci_bus_id
                .as_deref()
                .and_then(|bus| device::pcie_root(Path::new("/"), bus)),
            pci_bus_id,
            memory_bytes: known.memory_bytes,
            minor,
            mig: known.uuid.starts_with("MIG-"),
            emulated: known.emulated,
            fault,
            evict,
        }
    }

    /// Compute capabilities by UUID. A driver in trouble may not answer for long, so in a thread that may block.
    async fn facts(&mut self, uuids: Vec<String>) -> HashMap<String, (u32, u32)> {
        let (nvml, library) = (self.nvml.clone(), self.library.clone());
        let ask = tokio::task::spawn_blocking(move || {
            let nvml = match nvml {
                Some(nvml) => nvml,
                None => Arc::new(init(library.as_deref())?),
            };
            let capability = |uuid: String| {
                let device = nvml.device_by_uuid(uuid.as_str()).ok()?;
                let found = device.cuda_compute_capability().ok()?;
                Some((
                    uuid,
                    (found.major.try_into().ok()?, found.minor.try_into().ok()?),
                ))
            };
            Some((uuids.into_iter().filter_map(capability).collect(), nvml))
        });
        match tokio::time::timeout(EVERY, ask).await {
            Ok(Ok(Some((facts, nvml)))) => {
                self.nvml = Some(nvml);
                facts
            }
            // Facts do not change: keep what is known.
            _ => self
                .last
                .iter()
                .filter_map(|device| Some((device.uuid.clone(), device.compute_capability?)))
                .collect(),
        }
    }
}

fn init(library: Option<&Path>) -> Option<Nvml> {
    let library = library.unwrap_or(Path::new("libnvidia-ml.so.1"));
    Nvml::builder().lib_path(library.as_os_str()).init().ok()
}
