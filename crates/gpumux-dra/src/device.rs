//! The node's devices as Kubernetes sees them: what the daemon manages, joined with what NVML and sysfs know.

use std::{
    io,
    path::{Path, PathBuf},
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
    /// The number in `/dev/nvidiaN` of the GPU; none on the emulated device.
    pub minor: Option<u32>,
    /// Which part of the GPU it is, if it is a MIG instance.
    pub mig: Option<Mig>,
    /// Whether it is the emulated device.
    pub emulated: bool,
    /// Why nothing new may run on it.
    pub fault: Option<String>,
    /// Whether what runs on it must go: the fault has lasted, and is the device's own.
    pub evict: bool,
}

/// A MIG instance, as the driver numbers it within its GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Mig {
    /// The GPU instance: memory and processors.
    pub gpu_instance: u32,
    /// The compute instance in it.
    pub compute_instance: u32,
}

impl Device {
    /// The name under which it is used by one claim alone.
    pub fn whole_name(&self) -> String {
        format!("{}-whole", self.name)
    }
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

/// What the kernel driver says about the device in `/proc/driver/nvidia/gpus/BUS/information`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProcFacts {
    /// As sysfs writes it.
    pub pci_bus_id: String,
    /// The number in `/dev/nvidiaN`.
    pub minor: Option<u32>,
}

/// Finds a device by UUID in the kernel driver's files under `root` (`/` on a node).
pub fn proc_facts(root: &Path, uuid: &str) -> Option<ProcFacts> {
    let gpus = std::fs::read_dir(root.join("proc/driver/nvidia/gpus")).ok()?;
    gpus.flatten().find_map(|entry| {
        let text = std::fs::read_to_string(entry.path().join("information")).ok()?;
        let field = |name: &str| {
            let line = text.lines().find(|line| line.starts_with(name))?;
            Some(line.split_once(':')?.1.trim().to_owned())
        };
        (field("GPU UUID")?.eq_ignore_ascii_case(uuid)).then(|| ProcFacts {
            pci_bus_id: entry.file_name().to_string_lossy().to_lowercase(),
            minor: field("Device Minor").and_then(|minor| minor.parse().ok()),
        })
    })
}

/// The device nodes that allow the use of a MIG instance, beside those of its GPU: one for each of the two instances,
/// numbered by the kernel driver in `/proc/driver/nvidia/capabilities`.
///
/// # Errors
/// The instance is gone, or the driver's files are not what they were.
pub fn capability_nodes(root: &Path, minor: u32, mig: Mig) -> io::Result<[String; 2]> {
    let gpu = root.join(format!(
        "proc/driver/nvidia/capabilities/gpu{minor}/mig/gi{}",
        mig.gpu_instance
    ));
    let node = |path: PathBuf| {
        let text = std::fs::read_to_string(&path)?;
        let number = text
            .lines()
            .find_map(|line| line.strip_prefix("DeviceFileMinor:"));
        let number: u32 = number
            .and_then(|number| number.trim().parse().ok())
            .ok_or_else(|| io::Error::other(format!("{} names no device node", path.display())))?;
        Ok::<_, io::Error>(format!("/dev/nvidia-caps/nvidia-cap{number}"))
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
    fn the_kernel_drivers_files_give_bus_minor_and_root() {
        let root = tempfile::tempdir().unwrap();
        let gpu = root.path().join("proc/driver/nvidia/gpus/0000:3B:00.0");
        std::fs::create_dir_all(&gpu).unwrap();
        std::fs::write(
            gpu.join("information"),
            "Model: \t\t NVIDIA H100 80GB HBM3\nGPU UUID: \t GPU-0f1e\nDevice Minor: \t 3\n",
        )
        .unwrap();
        let devices = root.path().join("sys/bus/pci/devices");
        std::fs::create_dir_all(&devices).unwrap();
        std::os::unix::fs::symlink(
            "../../../devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0",
            devices.join("0000:3b:00.0"),
        )
        .unwrap();
        let facts = proc_facts(root.path(), "GPU-0F1E").unwrap();
        assert_eq!(
            facts,
            ProcFacts {
                pci_bus_id: "0000:3b:00.0".into(),
                minor: Some(3)
            }
        );
        assert_eq!(
            pcie_root(root.path(), &facts.pci_bus_id).unwrap(),
            "pci0000:3a"
        );
        assert_eq!(proc_facts(root.path(), "GPU-other"), None);
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
    }
}
