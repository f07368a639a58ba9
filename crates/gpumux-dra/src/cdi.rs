//! CDI files, of claims and of whole nodes: what the container runtime adds to a container that uses them. No image changes, no
//! privilege: device nodes, the driver's and gpumux's libraries, the session socket, and the container's tenant.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use gpumux_daemon::paths::MPS_VARIABLES;
use serde::{Deserialize, Serialize};

use crate::{
    checkpoint::{Record, TenantRecord, write_whole},
    claim::Share,
    device,
};

/// The kind of the devices: vendor and class.
pub const KIND: &str = "gpumux.dev/share";
/// The kind of a node's devices, for containers that no cluster starts.
pub const NODE_KIND: &str = "gpumux.dev/gpu";
/// Where gpumux's files are in a container.
const IN_CONTAINER: &str = "/usr/local/gpumux";
/// Debian's folder of this processor's libraries.
const DEBIAN_DIR: &str = match cfg!(target_arch = "aarch64") {
    true => "usr/lib/aarch64-linux-gnu",
    false => "usr/lib/x86_64-linux-gnu",
};
/// Where a container's dynamic linker looks by default: glibc on Debian's and on Red Hat's paths.
const LIBRARY_DIRS: [&str; 2] = [DEBIAN_DIR, "usr/lib64"];
/// The least version that has what is used here: device names that begin with a digit.
const CDI_VERSION: &str = "0.5.0";

/// What of the host goes into containers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Host {
    /// The directory that has nothing but the daemon's session socket.
    pub socket_dir: PathBuf,
    /// `libgpumux.so`.
    pub shim: PathBuf,
    /// The emulated device's library, if this node has the emulated device.
    pub emulator: Option<PathBuf>,
    /// The emulated device's socket.
    pub emulator_socket: Option<PathBuf>,
    /// Where the host's `/` is seen from here.
    pub root: PathBuf,
    /// Where the driver is installed on the host if not in `/`: `/run/nvidia/driver` with NVIDIA's GPU Operator. Its device nodes
    /// and libraries come first.
    pub driver_root: Option<PathBuf>,
}

impl Host {
    /// Where the driver's files may be, as the host names it, the best first.
    fn driver_roots(&self) -> impl Iterator<Item = &Path> {
        let own = self.driver_root.as_deref();
        own.into_iter().chain([Path::new("/")])
    }

    /// A path of the host as it is seen from here.
    fn seen(&self, path: &Path) -> PathBuf {
        self.root.join(path.strip_prefix("/").unwrap_or(path))
    }
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Spec {
    cdi_version: String,
    kind: String,
    devices: Vec<CdiDevice>,
    /// Once per container, however many devices it has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    container_edits: Option<Edits>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct CdiDevice {
    name: String,
    container_edits: Edits,
}

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Edits {
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    env: Vec<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    device_nodes: Vec<Node>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    mounts: Vec<Mount>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Node {
    path: String,
    host_path: String,
    /// With these the runtime makes the node, also where the host has none.
    #[serde(rename = "type", default, skip_serializing_if = "Option::is_none")]
    kind: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    major: Option<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    minor: Option<i64>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Mount {
    host_path: String,
    container_path: String,
    options: Vec<String>,
}

/// The CDI id of a claim's share. Request names may have a `/`, which CDI refuses, so they are not in it.
pub fn id(uid: &str, index: usize) -> String {
    format!("{KIND}={uid}-{index}")
}

/// The claim's file.
pub fn path(dir: &Path, uid: &str) -> PathBuf {
    dir.join(format!("gpumux.dev-share-{uid}.json"))
}

/// Writes the claim's file whole or not at all.
///
/// # Errors
/// The disk, or a MIG instance that is gone.
pub fn write(dir: &Path, host: &Host, record: &Record) -> io::Result<()> {
    let device = |(index, share)| {
        Ok(CdiDevice {
            name: format!("{}-{index}", record.claim.uid),
            container_edits: edits(host, share, tenant(record, index), &visible(record, index))?,
        })
    };
    let devices = record.shares.iter().enumerate().map(device);
    let spec = Spec {
        cdi_version: CDI_VERSION.to_owned(),
        kind: KIND.to_owned(),
        devices: devices.collect::<io::Result<_>>()?,
        container_edits: None,
    };
    fs::create_dir_all(dir)?;
    let path = path(dir, &record.claim.uid);
    let bytes = serde_json::to_vec_pretty(&spec)?;
    if fs::read(&path).is_ok_and(|there| there == bytes) {
        return Ok(());
    }
    write_whole(&path, &bytes, |_| Ok(()))
}

/// Removes the claim's file; one that is not there is removed already.
///
/// # Errors
/// The disk.
pub fn remove(dir: &Path, uid: &str) -> io::Result<()> {
    match fs::remove_file(path(dir, uid)) {
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
            ) =>
        {
            Ok(())
        }
        other => other,
    }
}

/// The file of this node's GPUs: one by one as the kernel numbers them, and `all` of them. Containers that use them are tenants
/// of the daemon: each process by itself, or all of those that have the same `GPUMUX_TENANT`.
///
/// # Errors
/// When the node has no GPU, and no emulated device was named.
pub fn node_spec(host: &Host) -> io::Result<String> {
    let emulated = host.emulator_socket.is_some();
    let gpus = gpus(&host.root)?;
    if gpus.is_empty() && !emulated {
        let why = "there is no /dev/nvidia0: load the driver first (nvidia-smi does)";
        return Err(io::Error::new(io::ErrorKind::NotFound, why));
    }
    let device = |name: String, gpus: &[u32]| CdiDevice {
        name,
        container_edits: Edits {
            // It must not be empty.
            env: vec!["GPUMUX=1".to_owned()],
            device_nodes: match emulated {
                true => Vec::new(),
                false => nodes(host, gpus),
            },
            ..Edits::default()
        },
    };
    let mut devices = vec![device("all".to_owned(), &gpus)];
    if !emulated {
        devices.extend(gpus.iter().map(|gpu| device(gpu.to_string(), &[*gpu])));
    }
    let spec = Spec {
        cdi_version: CDI_VERSION.to_owned(),
        kind: NODE_KIND.to_owned(),
        devices,
        container_edits: Some(libraries(host, emulated)),
    };
    Ok(serde_json::to_string_pretty(&spec)? + "\n")
}

/// Numbers of the GPUs' device files.
fn gpus(root: &Path) -> io::Result<Vec<u32>> {
    let number = |entry: fs::DirEntry| {
        let name = entry.file_name().into_string().ok()?;
        name.strip_prefix("nvidia")?.parse().ok()
    };
    let entries = fs::read_dir(root.join("dev"))?;
    let mut gpus: Vec<u32> = entries.flatten().filter_map(number).collect();
    gpus.sort_unstable();
    Ok(gpus)
}

fn tenant(record: &Record, share: usize) -> Option<&TenantRecord> {
    let index = (*record.tenant_of.get(share)?)?;
    record.tenants.get(index)
}

/// The devices that a container with this share may see: all of its tenant, those of its own request first, because the container
/// may have only these. Of several shares in a container the last one's variables count.
fn visible(record: &Record, share: usize) -> String {
    let of = |index: usize| record.tenant_of.get(index).copied().flatten();
    let shares = || record.shares.iter().enumerate();
    let own = &record.shares[share].request;
    let tenants = shares()
        .filter(|(index, _)| *index == share || of(*index).is_some() && of(*index) == of(share));
    let (first, others): (Vec<_>, Vec<_>) = tenants.partition(|(_, it)| it.request == *own);
    let uuids = first
        .iter()
        .chain(&others)
        .map(|(_, it)| it.of.uuid.as_str());
    uuids.collect::<Vec<_>>().join(",")
}

fn edits(
    host: &Host,
    share: &Share,
    tenant: Option<&TenantRecord>,
    visible: &str,
) -> io::Result<Edits> {
    let mut edits = match tenant {
        Some(tenant) => {
            let mut edits = libraries(host, share.of.emulated);
            edits.env.push(format!("GPUMUX_TENANT={}", tenant.token));
            edits.env.push("GPUMUX_STRICT=1".to_owned());
            let own = tenant.environment.iter();
            edits
                .env
                .extend(own.map(|(name, value)| format!("{name}={value}")));
            // A group's pipes and logs: its members share them.
            let folders = tenant
                .environment
                .iter()
                .filter(|(name, _)| MPS_VARIABLES[..2].contains(&name.as_str()));
            edits.mounts.extend(folders.map(|(_, folder)| {
                Mount {
                    options: ["rw", "nosuid", "nodev", "rbind", "rprivate"]
                        .map(str::to_owned)
                        .to_vec(),
                    ..mount(Path::new(folder), folder)
                }
            }));
            edits
        }
        None => {
            let (edits, preload) = driver(host, share.of.emulated);
            preloading(edits, &preload)
        }
    };
    edits.env.push(format!("CUDA_VISIBLE_DEVICES={visible}"));
    if !share.of.emulated {
        let own: Vec<u32> = share.of.minor.into_iter().collect();
        edits.device_nodes = nodes(host, &own);
        if let (Some(minor), Some(mig)) = (share.of.minor, share.of.mig) {
            // The kernel driver's files are the same in every container's /proc.
            let capabilities = device::capability_nodes(&host.root, minor, mig)
                .or_else(|_| device::capability_nodes(Path::new("/"), minor, mig))?;
            edits.device_nodes.extend(capabilities.map(capability));
        }
    }
    Ok(edits)
}

/// What makes programs of a tenant: the driver's libraries, gpumux's, which comes before them, and where the daemon is.
fn libraries(host: &Host, emulated: bool) -> Edits {
    let shim = format!("{IN_CONTAINER}/lib/libgpumux.so");
    let run = format!("{IN_CONTAINER}/run");
    let (mut edits, mut preload) = driver(host, emulated);
    edits.env.push(format!("GPUMUX_SOCKET={run}/session.sock"));
    edits
        .mounts
        .extend([mount(&host.shim, &shim), mount(&host.socket_dir, &run)]);
    preload.insert(0, shim);
    preloading(edits, &preload)
}

/// What programs need of the driver to use its devices, without gpumux, and what is to be preloaded for it.
fn driver(host: &Host, emulated: bool) -> (Edits, Vec<String>) {
    let (mut edits, mut preload) = (Edits::default(), Vec::new());
    if !emulated {
        for (name, file) in driver_libraries(host) {
            edits.mounts.extend(library_mounts(&name, &file));
        }
        return (edits, preload);
    }
    if let Some(library) = &host.emulator {
        let inside = format!("{IN_CONTAINER}/lib/libgpumux_emu.so");
        edits.mounts.push(mount(library, &inside));
        for name in ["libcuda.so.1", "libnvidia-ml.so.1"] {
            edits.mounts.extend(library_mounts(name, library));
        }
        preload.push(inside);
    }
    if let Some(socket) = &host.emulator_socket {
        // Under the name that it was bound to: that is how the emulated device's files are recognised.
        let inside = socket.display().to_string();
        edits.mounts.push(mount(socket, &inside));
        edits.env.push(format!("GPUMUX_EMU_SOCKET={inside}"));
    }
    (edits, preload)
}

fn preloading(mut edits: Edits, files: &[String]) -> Edits {
    if !files.is_empty() {
        edits.env.push(format!("LD_PRELOAD={}", files.join(":")));
    }
    edits
}

fn node(path: &Path, host_path: &Path) -> Node {
    Node {
        path: path.display().to_string(),
        host_path: host_path.display().to_string(),
        kind: None,
        major: None,
        minor: None,
    }
}

/// The node of an instance. The host may not have it yet where the instance was just made.
fn capability(it: device::Capability) -> Node {
    let (major, minor) = it.numbers;
    let path = Path::new(&it.path);
    Node {
        kind: major.map(|_| "c".to_owned()),
        major,
        minor: major.map(|_| minor),
        ..node(path, path)
    }
}

/// Device files of these GPUs, and those that all need; as far as the host or the driver's root has them.
fn nodes(host: &Host, gpus: &[u32]) -> Vec<Node> {
    let common = [
        "nvidiactl",
        "nvidia-uvm",
        "nvidia-uvm-tools",
        "nvidia-modeset",
    ]
    .map(str::to_owned);
    let own = gpus.iter().map(|gpu| format!("nvidia{gpu}"));
    let find = |name: String| {
        let path = Path::new("/dev").join(&name);
        let in_root = host
            .driver_root
            .as_ref()
            .map(|root| root.join("dev").join(&name));
        let mut places = [Some(path.clone()), in_root].into_iter().flatten();
        let there = places.find(|place| host.seen(place).exists())?;
        Some(node(&path, &there))
    };
    own.chain(common).filter_map(find).collect()
}

fn library_mounts(name: &str, file: &Path) -> impl Iterator<Item = Mount> {
    LIBRARY_DIRS
        .map(|dir| mount(file, &format!("/{dir}/{name}")))
        .into_iter()
}

fn mount(host_path: &Path, container_path: &str) -> Mount {
    Mount {
        host_path: host_path.display().to_string(),
        container_path: container_path.to_owned(),
        options: ["ro", "nosuid", "nodev", "rbind", "rprivate"]
            .map(str::to_owned)
            .to_vec(),
    }
}

/// The driver's libraries that programs load by these names, in the usual places of the driver's root or the host. Each is resolved to
/// the file that it stands for, as the host names it. A driver that is upgraded moves them, so they are looked for each time.
fn driver_libraries(host: &Host) -> Vec<(String, PathBuf)> {
    const NAMES: [&str; 7] = [
        "libcuda.so.1",
        "libnvidia-ml.so.1",
        "libnvidia-ptxjitcompiler.so.1",
        "libnvidia-nvvm.so.4",
        "libcudadebugger.so.1",
        "libnvidia-opencl.so.1",
        "libnvcuvid.so.1",
    ];
    const DIRS: [&str; 5] = [
        DEBIAN_DIR,
        "usr/lib64",
        "usr/lib",
        "usr/local/nvidia/lib64",
        "home/kubernetes/bin/nvidia/lib64",
    ];
    let find = |root: &Path, name: &str| {
        let root = fs::canonicalize(host.seen(root)).ok()?;
        let whole = fs::canonicalize(&host.root).ok()?;
        let files = DIRS
            .iter()
            .filter_map(|dir| fs::canonicalize(root.join(dir).join(name)).ok());
        // A link that leads out of the tree is not the driver's file.
        let mut own = files.filter(|file| file.starts_with(&root));
        Some(Path::new("/").join(own.next()?.strip_prefix(whole).ok()?))
    };
    let find = |name: &str| host.driver_roots().find_map(|root| find(root, name));
    NAMES
        .iter()
        .filter_map(|name| Some(((*name).to_owned(), find(name)?)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::tests::record;

    fn host(dir: &Path) -> Host {
        for node in ["nvidiactl", "nvidia0", "nvidia1", "nvidia-uvm"] {
            fs::create_dir_all(dir.join("dev")).unwrap();
            fs::write(dir.join("dev").join(node), "").unwrap();
        }
        let libraries = dir.join("usr/lib64");
        fs::create_dir_all(&libraries).unwrap();
        fs::write(libraries.join("libcuda.so.1"), "").unwrap();
        Host {
            socket_dir: "/run/gpumux/container".into(),
            shim: "/opt/gpumux/lib/libgpumux.so".into(),
            root: dir.to_owned(),
            ..Host::default()
        }
    }

    #[test]
    fn the_file_has_what_a_container_needs() {
        let dir = tempfile::tempdir().unwrap();
        let record = record("0b1c", 500);
        write(dir.path(), &host(dir.path()), &record).unwrap();
        let path = path(dir.path(), "0b1c");
        let json: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        assert_eq!(
            (
                &json["cdiVersion"],
                &json["kind"],
                &json["devices"][0]["name"]
            ),
            (&"0.5.0".into(), &KIND.into(), &"0b1c-0".into())
        );
        let edits = &json["devices"][0]["containerEdits"];
        let env = edits["env"].as_array().unwrap();
        assert!(env.contains(&format!("GPUMUX_TENANT={}", record.tenants[0].token).into()));
        assert!(env.contains(&"LD_PRELOAD=/usr/local/gpumux/lib/libgpumux.so".into()));
        let nodes: Vec<_> = edits["deviceNodes"]
            .as_array()
            .unwrap()
            .iter()
            .map(|n| n["path"].as_str().unwrap())
            .collect();
        assert_eq!(
            nodes,
            ["/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm"],
            "no other device"
        );
        let mounts = edits["mounts"].to_string();
        assert!(
            mounts.contains(&format!("/{DEBIAN_DIR}/libcuda.so.1")),
            "{mounts}"
        );
        assert!(!mounts.contains("api.sock"));
        remove(dir.path(), "0b1c").unwrap();
        remove(dir.path(), "0b1c").unwrap();
        assert!(!path.exists());
    }

    #[test]
    fn a_mig_instance_comes_with_its_capabilities() {
        let dir = tempfile::tempdir().unwrap();
        let instance = dir
            .path()
            .join("proc/driver/nvidia/capabilities/gpu0/mig/gi3");
        fs::create_dir_all(instance.join("ci0")).unwrap();
        let access = |minor| format!("DeviceFileMinor: {minor}\nDeviceFileMode: 292\n");
        fs::write(instance.join("access"), access(30)).unwrap();
        fs::write(instance.join("ci0/access"), access(31)).unwrap();
        let mut record = record("0b1c", 500);
        record.shares[0].of.uuid = "MIG-1".into();
        record.shares[0].of.mig = Some(device::Mig {
            gpu_instance: 3,
            compute_instance: 0,
        });
        let host = host(dir.path());
        let of = |record: &Record| edits(&host, &record.shares[0], None, "MIG-1");
        let found = of(&record).unwrap();
        let nodes: Vec<_> = found.device_nodes.iter().map(|n| n.path.as_str()).collect();
        let capabilities = [
            "/dev/nvidia-caps/nvidia-cap30",
            "/dev/nvidia-caps/nvidia-cap31",
        ];
        assert_eq!(
            nodes[..3],
            ["/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm"]
        );
        assert_eq!(nodes[3..], capabilities);
        let numbers = |record: &Record| {
            let nodes = of(record).unwrap().device_nodes.into_iter().skip(3);
            nodes
                .map(|n| (n.kind, n.major, n.minor))
                .collect::<Vec<_>>()
        };
        assert_eq!(numbers(&record), [(None, None, None), (None, None, None)]);
        let drivers =
            "Character devices:\n  1 mem\n235 nvidia-caps-imex-channels\n236 nvidia-caps\n";
        fs::write(dir.path().join("proc/devices"), drivers).unwrap();
        let c = Some("c".to_owned());
        let expected = [(c.clone(), Some(236), Some(30)), (c, Some(236), Some(31))];
        assert_eq!(numbers(&record), expected);
        let cdi = dir.path().join("cdi");
        write(&cdi, &host, &record).unwrap();
        container_device_interface::spec::read_spec(&path(&cdi, "0b1c"), 0).expect("valid CDI");
        assert!(found.env.contains(&"CUDA_VISIBLE_DEVICES=MIG-1".to_owned()));
        fs::remove_dir_all(instance).unwrap();
        assert!(
            of(&record).is_err(),
            "an instance that is gone gives nothing"
        );
    }

    #[test]
    fn a_node_is_valid_cdi_with_each_gpu_and_all_of_them() {
        let dir = tempfile::tempdir().unwrap();
        let host = host(dir.path());
        let file = dir.path().join("gpumux.json");
        fs::write(&file, node_spec(&host).unwrap()).unwrap();
        let spec = container_device_interface::spec::read_spec(&file, 0).expect("valid CDI");
        for name in ["all", "0", "1"] {
            assert!(spec.get_device(name).is_some(), "{name}");
        }
        let json: serde_json::Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
        let nodes = |n: usize| {
            let nodes = &json["devices"][n]["containerEdits"]["deviceNodes"];
            let nodes = nodes.as_array().unwrap().iter();
            nodes
                .map(|node| node["path"].as_str().unwrap().to_owned())
                .collect::<Vec<_>>()
        };
        let common = ["/dev/nvidiactl", "/dev/nvidia-uvm"];
        assert_eq!(nodes(0)[..2], ["/dev/nvidia0", "/dev/nvidia1"]);
        assert_eq!(nodes(2)[..1], ["/dev/nvidia1"]);
        assert_eq!(
            (&nodes(0)[2..], &nodes(2)[1..]),
            (
                &common.map(str::to_owned)[..],
                &common.map(str::to_owned)[..]
            )
        );
        let all = json["containerEdits"].to_string();
        assert!(
            all.contains("LD_PRELOAD=") && all.contains("libcuda.so.1"),
            "{all}"
        );
        assert!(!all.contains("api.sock") && !all.contains("GPUMUX_TENANT"));
        let nothing = tempfile::tempdir().unwrap();
        fs::create_dir(nothing.path().join("dev")).unwrap();
        let root = nothing.path().to_owned();
        let error = node_spec(&Host { root, ..host }).unwrap_err().to_string();
        assert!(error.contains("/dev/nvidia0"), "{error}");
    }

    #[test]
    fn the_hosts_libraries_are_named_as_on_the_host() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("usr/lib64");
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("libcuda.so.580.82.07"), "").unwrap();
        std::os::unix::fs::symlink("libcuda.so.580.82.07", dir.join("libcuda.so.1")).unwrap();
        std::os::unix::fs::symlink("/etc/hostname", dir.join("libnvidia-ml.so.1")).unwrap();
        let host = Host {
            root: root.path().to_owned(),
            driver_root: Some("/run/nvidia/driver".into()),
            ..Host::default()
        };
        let library = |path: &str| [("libcuda.so.1".to_owned(), PathBuf::from(path))];
        let found = driver_libraries(&host);
        assert_eq!(found, library("/usr/lib64/libcuda.so.580.82.07"));
        // A driver in a container of its own comes first, also when it comes later.
        let dir = root.path().join("run/nvidia/driver/usr/lib64");
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("libcuda.so.1"), "").unwrap();
        let found = driver_libraries(&host);
        assert_eq!(found, library("/run/nvidia/driver/usr/lib64/libcuda.so.1"));
        let dev = root.path().join("run/nvidia/driver/dev");
        fs::create_dir_all(&dev).unwrap();
        fs::write(dev.join("nvidiactl"), "").unwrap();
        let found = nodes(&host, &[]);
        let found: Vec<_> = found.iter().map(|it| (&*it.path, &*it.host_path)).collect();
        let inside = "/run/nvidia/driver/dev/nvidiactl";
        assert_eq!(found, [("/dev/nvidiactl", inside)]);
    }

    #[test]
    fn containers_see_the_devices_of_their_tenant_only() {
        let dir = tempfile::tempdir().unwrap();
        let mut record = record("0b1c", 500);
        let mut other = record.shares[0].clone();
        other.of = crate::slices::tests::device(1);
        other.request = "second".into();
        let (first, second) = (record.shares[0].of.uuid.clone(), other.of.uuid.clone());
        record.shares.push(other.clone());
        other.usage = crate::model::Use::Admin;
        record.shares.push(other);
        record.tenant_of = vec![Some(0), Some(0), None];
        write(dir.path(), &host(dir.path()), &record).unwrap();
        let file = fs::read(path(dir.path(), "0b1c")).unwrap();
        let json: serde_json::Value = serde_json::from_slice(&file).unwrap();
        let env = |device: usize| json["devices"][device]["containerEdits"]["env"].to_string();
        assert!(env(0).contains(&format!("CUDA_VISIBLE_DEVICES={first},{second}")));
        assert!(env(1).contains(&format!("CUDA_VISIBLE_DEVICES={second},{first}")));
        // A container that only looks has the driver and its device, and is no tenant.
        assert!(env(2).contains(&format!("CUDA_VISIBLE_DEVICES={second}\"")));
        assert!(!env(2).contains("GPUMUX") && !env(2).contains("LD_PRELOAD"));
        let mounts = json["devices"][2]["containerEdits"]["mounts"].to_string();
        assert!(
            mounts.contains("libcuda.so.1") && !mounts.contains("gpumux"),
            "{mounts}"
        );
    }
}
