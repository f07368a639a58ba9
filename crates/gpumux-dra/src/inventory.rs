//! Asks the daemon for the node's devices every few seconds. The daemon has NVML; this process needs neither it nor device nodes.
//! Where MIG instances are made for claims, those that a GPU can have are devices too, whether they exist or not.

use std::{
    collections::{BTreeSet, HashMap},
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use gpumux_daemon::{api::types, client::Client as Daemon};
use tokio::sync::watch;

use crate::{
    checkpoint::Store,
    device::{self, Device},
    mig::{self, Offer, Place},
};

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

/// Follows the devices. The first look is done when this returns. `records` names the MIG instances that were made for claims;
/// `makes`: further ones may be.
pub async fn watch(
    inventory: Inventory,
    daemon: Daemon,
    records: Option<Store>,
    makes: bool,
) -> watch::Receiver<Arc<Vec<Device>>> {
    if let Inventory::Fixed(devices) = inventory {
        return fixed(devices);
    }
    let mut looker = Looker {
        records,
        makes,
        ..Looker::default()
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

/// The places of MIG instances that records name.
fn recorded(makes: &Store) -> Result<BTreeSet<Place>, crate::checkpoint::CheckpointError> {
    let records = makes.all()?;
    let shares = records.iter().flat_map(|record| &record.shares);
    let offers = shares.filter_map(|share| share.of.offer.as_ref());
    Ok(offers
        .filter(|offer| offer.recorded)
        .map(|offer| offer.place.clone())
        .collect())
}

#[derive(Default)]
struct Looker {
    faults: HashMap<String, Instant>,
    last: Vec<Device>,
    gpus: Vec<types::MigGpu>,
    trouble: Option<String>,
    records: Option<Store>,
    makes: bool,
}

/// What one look shows.
struct Seen {
    known: Vec<types::Device>,
    /// The GPUs in MIG mode as last listed, and why they are not listed now.
    gpus: Vec<types::MigGpu>,
    trouble: Option<String>,
    /// The places that records name.
    own: BTreeSet<Place>,
}

impl Looker {
    async fn see(&mut self, daemon: &Daemon) -> Result<Seen, String> {
        let records = self.records.clone();
        let own = || match &records {
            Some(records) => recorded(records).map_err(|error| error.to_string()),
            None => Ok(BTreeSet::new()),
        };
        // Before and after: an instance that is made or removed meanwhile is the claim's in either listing.
        let before = own()?;
        let mut trouble = None;
        if self.makes || !before.is_empty() {
            match daemon.mig_gpus().await {
                Ok(gpus) => self.gpus = gpus,
                Err(error) => trouble = Some(error.to_string()),
            }
            if let Some(error) = trouble.as_ref().filter(|_| trouble != self.trouble) {
                tracing::warn!(error, "no MIG instance is made for new claims here");
            }
            self.trouble.clone_from(&trouble);
        }
        let known = daemon.devices().await.map_err(|error| error.to_string())?;
        let after = own()?;
        Ok(Seen {
            known,
            gpus: self.gpus.clone(),
            trouble,
            own: before.union(&after).cloned().collect(),
        })
    }

    async fn look(&mut self, daemon: &Daemon) {
        match self.see(daemon).await {
            Ok(seen) => {
                let makes = self.makes;
                let made = seen.gpus.iter().flat_map(|gpu| {
                    let own = |it: &&types::MigInstance| seen.own.contains(&Place::of(gpu, it));
                    let instances = gpu.instances.iter().filter(own);
                    instances.flat_map(|it| &it.compute_instances)
                });
                let made: BTreeSet<&str> = made.map(|it| it.device.as_str()).collect();
                let known = &seen.known;
                // NVML reports a GPU that is in MIG instances only by these. A device without memory is one that NVML does not
                // report: it cannot be given out.
                let known = known
                    .iter()
                    .filter(|it| it.memory_bytes > 0 && !made.contains(&*it.uuid));
                let mut all: Vec<Device> = known.map(|device| self.join(device)).collect();
                for gpu in &seen.gpus {
                    let offers = mig::offers(gpu, &seen.own).into_iter();
                    // Where none is made any more, claims keep what they have.
                    let offers = offers.filter(|it| makes || seen.own.contains(&it.0.place));
                    for (offer, profile) in offers {
                        all.push(self.offered(gpu, offer, profile, &seen));
                    }
                }
                self.last = all;
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

    /// An instance that can be made, or was made for a claim.
    fn offered(
        &mut self,
        gpu: &types::MigGpu,
        offer: Offer,
        profile: &types::MigProfile,
        seen: &Seen,
    ) -> Device {
        let there = mig::at(&offer.place, std::slice::from_ref(gpu));
        let made = there.and_then(|it| it.compute_instances.first());
        let known = made.and_then(|made| seen.known.iter().find(|it| it.uuid == made.device));
        let base = match known {
            Some(known) => self.join(known),
            // What is known of its GPU.
            None => self.join(&types::Device {
                uuid: String::new(),
                name: format!("{} MIG {}", gpu.name, profile.name),
                driver: gpu.driver.clone(),
                emulated: gpu.emulated,
                hardware: gpu.hardware.clone(),
                state: "ok".to_owned(),
                ..types::Device::default()
            }),
        };
        let of_gpu = device::name(gpu.hardware.minor, None, &gpu.uuid);
        let place = &offer.place;
        Device {
            name: device::place_name(&of_gpu, &place.profile, place.start),
            memory_bytes: profile.memory_bytes,
            // It is used whole.
            memory_guaranteeable: 0,
            context_bytes: 0,
            // What changes with each claim is in the claim's record.
            uuid: String::new(),
            mig: None,
            offer: Some(offer),
            fault: seen.trouble.clone().or(base.fault),
            ..base
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
            offer: None,
            emulated: known.emulated,
            fault,
            evict,
        }
    }
}
