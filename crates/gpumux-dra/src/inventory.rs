//! Looks at the node's devices every few seconds: what the daemon manages, joined with NVML and the kernel's files.

use std::{
    collections::HashMap,
    ffi::{CStr, CString},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use gpumux_daemon::{api::types, client::Client as Daemon};
use nvml_wrapper::Nvml;
use nvml_wrapper_sys::bindings::NvmlLib;
use tokio::sync::watch;

use crate::device::{self, Device, Mig};

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
        facts: HashMap::new(),
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
    facts: HashMap<String, Facts>,
    last: Vec<Device>,
}

impl Looker {
    async fn look(&mut self, daemon: &Daemon) {
        match daemon.devices().await {
            Ok(known) => {
                let facts = self
                    .facts(known.iter().map(|device| device.uuid.clone()).collect())
                    .await;
                // A GPU that is in instances is used through them only.
                let parents: Vec<_> = facts.values().filter_map(|f| f.parent.as_ref()).collect();
                let known = known
                    .iter()
                    .filter(|device| !parents.contains(&&device.uuid));
                self.last = known.map(|device| self.join(device, &facts)).collect();
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

    fn join(&mut self, known: &types::Device, all: &HashMap<String, Facts>) -> Device {
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
        let facts = all.get(&known.uuid).cloned().unwrap_or_default();
        let gpu = facts.parent.as_ref().unwrap_or(&known.uuid);
        let proc = device::proc_facts(Path::new("/"), gpu);
        let minor = proc.as_ref().and_then(|proc| proc.minor);
        let pci_bus_id = proc.map(|proc| proc.pci_bus_id);
        Device {
            name: device::name(minor, facts.mig, &known.uuid),
            uuid: known.uuid.clone(),
            product: known.name.clone(),
            compute_capability: facts.compute_capability,
            driver: known.driver.clone(),
            pcie_root: pci_bus_id
                .as_deref()
                .and_then(|bus| device::pcie_root(Path::new("/"), bus)),
            pci_bus_id,
            memory_bytes: known.memory_bytes,
            minor,
            mig: facts.mig,
            emulated: known.emulated,
            fault,
            evict,
        }
    }

    /// What NVML knows, by UUID. A driver in trouble may not answer for long, so in a thread that may block.
    async fn facts(&mut self, uuids: Vec<String>) -> HashMap<String, Facts> {
        let (nvml, library) = (self.nvml.clone(), self.library.clone());
        let ask = tokio::task::spawn_blocking(move || {
            let library = library.as_deref().unwrap_or(Path::new("libnvidia-ml.so.1"));
            let nvml = match nvml {
                Some(nvml) => nvml,
                None => Arc::new(Nvml::builder().lib_path(library.as_os_str()).init().ok()?),
            };
            let one = |uuid: String| Some((uuid.clone(), facts(&nvml, library, &uuid)?));
            Some((uuids.into_iter().filter_map(one).collect(), nvml))
        });
        // Facts do not change: without an answer, what is known stays.
        if let Ok(Ok(Some((facts, nvml)))) = tokio::time::timeout(EVERY, ask).await {
            self.nvml = Some(nvml);
            self.facts = facts;
        }
        self.facts.clone()
    }
}

/// What NVML knows of a device.
#[derive(Clone, Debug, Default)]
struct Facts {
    compute_capability: Option<(u32, u32)>,
    /// Of a MIG instance: its numbers, and its GPU's UUID.
    mig: Option<Mig>,
    parent: Option<String>,
}

fn facts(nvml: &Nvml, library: &Path, uuid: &str) -> Option<Facts> {
    let instance = uuid
        .starts_with("MIG-")
        .then(|| mig(library, uuid))
        .flatten();
    let (mig, parent) = instance.unzip();
    let gpu = nvml
        .device_by_uuid(parent.as_deref().unwrap_or(uuid))
        .ok()?;
    let capability = gpu.cuda_compute_capability().ok();
    Some(Facts {
        compute_capability: capability
            .and_then(|found| Some((found.major.try_into().ok()?, found.minor.try_into().ok()?))),
        mig,
        parent,
    })
}

/// The numbers of a MIG instance and its GPU's UUID. The wrapper has no functions for them. NVML must be initialised.
fn mig(library: &Path, uuid: &str) -> Option<(Mig, String)> {
    let text = CString::new(uuid).ok()?;
    // SAFETY: the library is NVML, which this process has loaded already, so this only counts another user of it.
    let nvml = unsafe { NvmlLib::new(library) }.ok()?;
    let (mut instance, mut gpu) = (std::ptr::null_mut(), std::ptr::null_mut());
    let (mut gi, mut ci, mut name) = (0, 0, [0u8; 96]);
    // SAFETY: each function is there (an older library has none of them, and then is not called), handles come from
    // the call before, and every pointer is to a local variable of the type and size that is passed.
    let found = unsafe {
        nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle
            .as_ref()
            .ok()?;
        nvml.nvmlDeviceGetHandleByUUID(text.as_ptr(), &mut instance) == 0
            && nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(instance, &mut gpu) == 0
            && nvml.nvmlDeviceGetGpuInstanceId(instance, &mut gi) == 0
            && nvml.nvmlDeviceGetComputeInstanceId(instance, &mut ci) == 0
            && nvml.nvmlDeviceGetUUID(gpu, name.as_mut_ptr().cast(), 96) == 0
    };
    let parent = CStr::from_bytes_until_nul(&name).ok()?.to_str().ok()?;
    let mig = Mig {
        gpu_instance: gi,
        compute_instance: ci,
    };
    found.then(|| (mig, parent.to_owned()))
}
