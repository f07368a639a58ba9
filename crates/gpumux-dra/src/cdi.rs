//! CDI files, of claims and of whole nodes: what the container runtime adds to a container that uses them. No image changes, no
//! privilege: device nodes, the driver's and gpumux's libraries, the session socket, and who the container is.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use crate::{
    checkpoint::{Record, write_whole},
    claim::Share,
    device,
};

/// The kind of the devices: vendor and class.
pub const KIND: &str = "gpumux.dev/share";
/// The kind of a node's devices, for containers that no cluster starts.
pub const NODE_KIND: &str = "gpumux.dev/gpu";
/// Where gpumux's files are in a container.
const IN_CONTAINER: &str = "/usr/local/gpumux";
/// Where a container's dynamic linker looks without being told: glibc on Debian's and on Red Hat's paths.
const LIBRARY_DIRS: [&str; 2] = ["/usr/lib/x86_64-linux-gnu", "/usr/lib64"];
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
    /// Libraries of the driver: name for the linker, file on the host.
    pub driver_libraries: Vec<(String, PathBuf)>,
    /// Where the host's `/` is seen from here.
    pub root: PathBuf,
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
            container_edits: edits(host, share, token(record, index))?,
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
    write_whole(&path, &bytes).map(drop)
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

fn token(record: &Record, share: usize) -> &str {
    let tenant = record
        .tenant_of
        .get(share)
        .and_then(|&tenant| record.tenants.get(tenant));
    tenant.map_or("", |tenant| &tenant.token)
}

fn edits(host: &Host, share: &Share, token: &str) -> io::Result<Edits> {
    let mut edits = libraries(host, share.of.emulated);
    edits.env.push(format!("GPUMUX_TENANT={token}"));
    edits.env.push("GPUMUX_STRICT=1".to_owned());
    if !share.of.emulated {
        let own: Vec<u32> = share.of.minor.into_iter().collect();
        edits.device_nodes = nodes(host, &own);
        if let (Some(minor), Some(mig)) = (share.of.minor, share.of.mig) {
            let nodes = device::capability_nodes(&host.root, minor, mig)?;
            edits.device_nodes.extend(nodes.map(node));
            edits
                .env
                .push(format!("CUDA_VISIBLE_DEVICES={}", share.of.uuid));
        }
    }
    Ok(edits)
}

/// The libraries, where the daemon is, and what makes programs load them.
fn libraries(host: &Host, emulated: bool) -> Edits {
    let shim = format!("{IN_CONTAINER}/lib/libgpumux.so");
    let run = format!("{IN_CONTAINER}/run");
    let mut edits = Edits {
        env: vec![format!("GPUMUX_SOCKET={run}/session.sock")],
        mounts: vec![mount(&host.shim, &shim), mount(&host.socket_dir, &run)],
        ..Edits::default()
    };
    let mut preload = vec![shim];
    if emulated {
        if let Some(library) = &host.emulator {
            let inside = format!("{IN_CONTAINER}/lib/libgpumux_emu.so");
            edits.mounts.push(mount(library, &inside));
            preload.push(inside);
            for name in ["libcuda.so.1", "libnvidia-ml.so.1"] {
                edits.mounts.extend(library_mounts(name, library));
            }
        }
        if let Some(socket) = &host.emulator_socket {
            // Under the name that it was bound to: that is how the emulated device's files are recognised.
            let inside = socket.display().to_string();
            edits.mounts.push(mount(socket, &inside));
            edits.env.push(format!("GPUMUX_EMU_SOCKET={inside}"));
        }
    } else {
        for (name, file) in &host.driver_libraries {
            edits.mounts.extend(library_mounts(name, file));
        }
    }
    edits.env.push(format!("LD_PRELOAD={}", preload.join(":")));
    edits
}

fn node(path: String) -> Node {
    Node {
        host_path: path.clone(),
        path,
    }
}

/// Device files of these GPUs, and those that all need; as far as the host has them.
fn nodes(host: &Host, gpus: &[u32]) -> Vec<Node> {
    let common = [
        "nvidiactl",
        "nvidia-uvm",
        "nvidia-uvm-tools",
        "nvidia-modeset",
    ]
    .map(str::to_owned);
    let own = gpus.iter().map(|gpu| format!("nvidia{gpu}"));
    own.chain(common)
        .map(|name| format!("/dev/{name}"))
        .filter(|path| host.root.join(path.trim_start_matches('/')).exists())
        .map(node)
        .collect()
}

fn library_mounts(name: &str, file: &Path) -> impl Iterator<Item = Mount> {
    LIBRARY_DIRS
        .map(|dir| mount(file, &format!("{dir}/{name}")))
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

/// The driver's libraries that programs load by these names, found in the usual places of the host whose `/` is
/// seen as `root`. Each is resolved to the file that it stands for, as the host names it.
pub fn driver_libraries(root: &Path) -> Vec<(String, PathBuf)> {
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
        "usr/lib/x86_64-linux-gnu",
        "usr/lib64",
        "usr/lib",
        "usr/local/nvidia/lib64",
        "home/kubernetes/bin/nvidia/lib64",
    ];
    let Ok(root) = fs::canonicalize(root) else {
        return Vec::new();
    };
    let find = |name: &str| {
        let files = DIRS
            .iter()
            .filter_map(|dir| fs::canonicalize(root.join(dir).join(name)).ok());
        // A link that leads out of the host's tree is not the host's file.
        files
            .filter_map(|file| Some(Path::new("/").join(file.strip_prefix(&root).ok()?)))
            .next()
    };
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
        Host {
            socket_dir: "/run/gpumux/container".into(),
            shim: "/opt/gpumux/lib/libgpumux.so".into(),
            driver_libraries: vec![(
                "libcuda.so.1".into(),
                "/usr/lib64/libcuda.so.580.82.07".into(),
            )],
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
            mounts.contains("/usr/lib/x86_64-linux-gnu/libcuda.so.1"),
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
        let of = |record: &Record| edits(&host, &record.shares[0], "t");
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
        let found = driver_libraries(root.path());
        assert_eq!(
            found,
            [(
                "libcuda.so.1".to_owned(),
                PathBuf::from("/usr/lib64/libcuda.so.580.82.07")
            )]
        );
    }
}
