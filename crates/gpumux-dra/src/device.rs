//! The node's devices as Kubernetes sees them: what the daemon reports, joined with what sysfs shows.

use std::{
    io,
    path::{Path, PathBuf},
};

pub use gpumux_daemon::api::types::Mig;

use crate::{
    mig::Offer,
    model::{self, Amounts, MEMORY_STEP},
};

/// A GPU or MIG instance of this node.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Device {
    /// Its name in the slice: a DNS label, stable while the device stays in its slot.
    pub name: String,
    /// As the driver writes it.
    pub uuid: String,
    /// Product name; empty if unknown.
    pub product: String,
    /// Major and minor.
    pub compute_capability: Option<(u32, u32)>,
    /// Version of the kernel driver; empty if unknown.
    pub driver: String,
    /// As sysfs writes it: `0000:3b:00.0`.
    pub pci_bus_id: Option<String>,
    /// The root of its PCI hierarchy as sysfs writes it: `pci0000:3a`.
    pub pcie_root: Option<String>,
    /// Bytes.
    pub memory_bytes: u64,
    /// Bytes that the daemon can guarantee to all claims together, with `context_bytes` for each of them.
    #[serde(default)]
    pub memory_guaranteeable: u64,
    /// Bytes that the CUDA context of a claim's process takes of what the claim was allocated.
    #[serde(default)]
    pub context_bytes: u64,
    /// The number in `/dev/nvidiaN` of the GPU; none where the daemon has no NVML.
    pub minor: Option<u32>,
    /// Which part of the GPU it is, if it is a MIG instance.
    pub mig: Option<Mig>,
    /// It is a MIG instance that is made when a claim is allocated it. Its UUID is empty and its numbers are missing before.
    #[serde(default)]
    pub offer: Option<Offer>,
    /// Whether it is the emulated device.
    pub emulated: bool,
    /// Why nothing new may run on it.
    pub fault: Option<String>,
    /// Whether what runs on it must go: the fault has lasted, and is the device's own.
    pub evict: bool,
}

impl Device {
    /// The name under which it is used by one claim alone.
    pub fn whole_name(&self) -> String {
        match self.offer {
            Some(_) => self.name.clone(),
            None => format!("{}-whole", self.name),
        }
    }

    /// Whether both are one device: by the place of an instance that is made for claims, else by UUID.
    pub fn is(&self, other: &Self) -> bool {
        match (&self.offer, &other.offer) {
            (Some(own), Some(other)) => own.place == other.place,
            (None, None) => self.uuid == other.uuid,
            _ => false,
        }
    }

    /// Whether both are instances that are made for claims, and have a memory slice in common.
    pub fn overlaps(&self, other: &Self) -> bool {
        let (Some(own), Some(other)) = (&self.offer, &other.offer) else {
            return false;
        };
        own.place.overlaps(&other.place)
    }

    /// What claims can consume of it together.
    pub fn capacity(&self) -> Amounts {
        model::capacity(self.memory_guaranteeable / MEMORY_STEP * MEMORY_STEP)
    }
}

/// A profile as a part of a label, such as `1g-10gb`.
pub fn profile_name(profile: &str) -> String {
    let parts = profile.split(|c: char| !c.is_ascii_alphanumeric());
    let parts: Vec<&str> = parts.filter(|part| !part.is_empty()).collect();
    parts.join("-").to_ascii_lowercase()
}

/// A label for an instance that can be made in the GPU that has this label.
pub fn place_name(gpu: &str, profile: &str, start: u32) -> String {
    format!("{gpu}-mig-{}-at-{start}", profile_name(profile))
}

/// A label for the device: by its numbers where it has some, else by its UUID.
pub fn name(minor: Option<u32>, mig: Option<Mig>, uuid: &str) -> String {
    match (minor, mig) {
        (Some(minor), None) => format!("gpu-{minor}"),
        (Some(minor), Some(mig)) => {
            format!(
                "gpu-{minor}-mig-{}-{}",
                mig.gpu_instance, mig.compute_instance
            )
        }
        (None, _) => {
            let plain: String = uuid.chars().filter(char::is_ascii_alphanumeric).collect();
            let plain = plain.to_ascii_lowercase();
            format!("gpu-{}", &plain[plain.len().saturating_sub(12)..])
        }
    }
}

/// A device node that allows the use of a GPU instance or a compute instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capability {
    /// Where programs look for it.
    pub path: String,
    /// Its numbers, with which it can be made where the host has none yet, as of an instance that has just been made. The first is
    /// missing on kernels that name no such driver.
    pub numbers: (Option<i64>, i64),
}

/// The device nodes that allow the use of a MIG instance, beside those of its GPU: one for each of the two instances,
/// numbered by the kernel driver in `/proc/driver/nvidia/capabilities`.
///
/// # Errors
/// The instance is gone, or the driver's files are not what they were.
pub fn capability_nodes(root: &Path, minor: u32, mig: Mig) -> io::Result<[Capability; 2]> {
    let gpu = root.join(format!(
        "proc/driver/nvidia/capabilities/gpu{minor}/mig/gi{}",
        mig.gpu_instance
    ));
    let drivers = std::fs::read_to_string(root.join("proc/devices")).unwrap_or_default();
    let of_driver = |line: &str| {
        let (number, name) = line.trim().split_once(' ')?;
        (name == "nvidia-caps").then(|| number.parse().ok())?
    };
    let major: Option<i64> = drivers.lines().find_map(of_driver);
    let node = |path: PathBuf| {
        let text = std::fs::read_to_string(&path)?;
        let number = text
            .lines()
            .find_map(|line| line.strip_prefix("DeviceFileMinor:"));
        let number: u32 = number
            .and_then(|number| number.trim().parse().ok())
            .ok_or_else(|| io::Error::other(format!("{} names no device node", path.display())))?;
        Ok::<_, io::Error>(Capability {
            path: format!("/dev/nvidia-caps/nvidia-cap{number}"),
            numbers: (major, number.into()),
        })
    };
    let compute = gpu.join(format!("ci{}/access", mig.compute_instance));
    Ok([node(gpu.join("access"))?, node(compute)?])
}

/// The root of a PCI device's hierarchy: `pci0000:3a`.
pub fn pcie_root(root: &Path, bus_id: &str) -> Option<String> {
    let link: PathBuf = std::fs::read_link(root.join("sys/bus/pci/devices").join(bus_id)).ok()?;
    link.components()
        .map(|part| part.as_os_str().to_string_lossy().into_owned())
        .find(|part| part.starts_with("pci"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pcie_root_is_read_from_sysfs() {
        let root = tempfile::tempdir().unwrap();
        let devices = root.path().join("sys/bus/pci/devices");
        std::fs::create_dir_all(&devices).unwrap();
        std::os::unix::fs::symlink(
            "../../../devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0",
            devices.join("0000:3b:00.0"),
        )
        .unwrap();
        assert_eq!(
            pcie_root(root.path(), "0000:3b:00.0").unwrap(),
            "pci0000:3a"
        );
    }

    #[test]
    fn names_are_labels() {
        assert_eq!(name(Some(7), None, "GPU-x"), "gpu-7");
        let mig = Mig {
            gpu_instance: 9,
            compute_instance: 0,
        };
        assert_eq!(name(Some(7), Some(mig), "MIG-x"), "gpu-7-mig-9-0");
        assert_eq!(
            name(None, None, "GPU-0F1E2D3C-0000-0000-0000-ABCDEF012345"),
            "gpu-abcdef012345"
        );
        assert_eq!(name(None, None, "E"), "gpu-e");
        assert_eq!(
            place_name("gpu-7", "1g.10gb+me", 6),
            "gpu-7-mig-1g-10gb-me-at-6"
        );
    }
}
