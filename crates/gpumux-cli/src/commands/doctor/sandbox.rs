//! What stands between programs and the driver here, as files say.

use std::{fs, path::Path};

use serde::Serialize;

/// What the files say.
#[derive(Default)]
pub(super) struct Files {
    /// `/proc/sys/kernel/osrelease`
    release: String,
    /// `/proc/self/uid_map`
    uid_map: String,
    /// `/proc/self/status`
    status: String,
    /// `/proc/self/cgroup`
    cgroup: String,
    /// `/proc/self/mountinfo`
    mounts: String,
    /// Whether podman's `/run/.containerenv` is there.
    containerenv: bool,
    /// Whether Docker's `/.dockerenv` is there.
    dockerenv: bool,
    /// Whether `/dev/dxg` is there, the GPU of WSL2.
    dxg: bool,
    /// `/proc/driver/nvidia/gpus/*/information`
    gpus: Vec<String>,
}

impl Files {
    /// Of this process.
    pub(super) fn read() -> Self {
        let text = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let gpus = fs::read_dir("/proc/driver/nvidia/gpus").into_iter();
        let gpus = gpus.flatten().flatten().map(|it| it.path());
        Self {
            release: text("/proc/sys/kernel/osrelease"),
            uid_map: text("/proc/self/uid_map"),
            status: text("/proc/self/status"),
            cgroup: text("/proc/self/cgroup"),
            mounts: text("/proc/self/mountinfo"),
            containerenv: Path::new("/run/.containerenv").exists(),
            dockerenv: Path::new("/.dockerenv").exists(),
            dxg: Path::new("/dev/dxg").exists(),
            gpus: gpus
                .filter_map(|it| fs::read_to_string(it.join("information")).ok())
                .collect(),
        }
    }
}

/// One thing that stands there.
#[derive(Debug, PartialEq, Serialize)]
pub(super) struct Sandbox {
    pub(super) name: &'static str,
    /// What shows it.
    pub(super) shown_by: String,
    /// What it means for gpumux.
    pub(super) effect: &'static str,
    /// What to do about it.
    pub(super) way_out: &'static str,
}

const CONTAINER: (&str, &str) = (
    "programs are tenants if they reach the daemon: a daemon that runs outside needs nothing of the container",
    "start the container with `--device gpumux.dev/gpu=all` (`gpumux cdi generate`), or mount /run/gpumux/container",
);
const GVISOR: (&str, &str) = (
    "not measured; by its source, timeslices are set and channels frozen, but a timeslice is read only with the capability `profiling`: \
     without it gpumux schedules launches",
    "run the daemon in the same sandbox; for the controls, `runsc --nvproxy-allowed-driver-capabilities=compute,utility,profiling`, \
     and the same in NVIDIA_DRIVER_CAPABILITIES",
);
const NAMESPACE: (&str, &str) = (
    "tenants belong to the user that the daemon sees outside; a daemon in here serves this namespace alone",
    "start `gpumux run` as that user; in rootless podman, `--userns=keep-id` gives a user the same number outside",
);
const SECCOMP: (&str, &str) = (
    "a filter decides on system calls; those of Docker and podman allow all that gpumux needs",
    "where something below fails with EPERM, allow ioctl, sendmsg, memfd_create and pidfd_open in the profile",
);
const WSL: (&str, &str) = (
    "programs use /dev/dxg and not the driver's files for Linux: neither the controls nor launches are scheduled",
    "none; on Linux itself the controls are tried, and `gpumux emu` works here",
);
const VGPU: (&str, &str) = (
    "the host's driver decides which controls pass, and its scheduler which guest runs; nothing was measured",
    "the rows of the device say what passes; with a whole GPU (passthrough) or MIG there is no such host in between",
);

/// All that the files show, from what lies next to the driver outwards.
pub(super) fn detect(files: &Files) -> Vec<Sandbox> {
    let found = [
        ("vGPU", vgpu(files), VGPU),
        ("WSL2", wsl(files), WSL),
        ("gVisor", gvisor(files), GVISOR),
        ("container", container(files), CONTAINER),
        ("user namespace", namespace(files), NAMESPACE),
        ("seccomp", seccomp(files), SECCOMP),
    ];
    found
        .into_iter()
        .filter_map(|(name, shown_by, (effect, way_out))| {
            Some(Sandbox {
                name,
                shown_by: shown_by?,
                effect,
                way_out,
            })
        })
        .collect()
}

/// A guest's device is named after its profile, such as `A100-40C`: memory in GB, and what it is licensed for.
fn vgpu(files: &Files) -> Option<String> {
    let models = files.gpus.iter().flat_map(|text| text.lines());
    let mut models = models.filter_map(|line| Some(line.strip_prefix("Model:")?.trim()));
    let model = models.find(|model| {
        let profile = model.rsplit('-').next().unwrap_or_default();
        let profile = profile.strip_suffix("ME").unwrap_or(profile);
        let memory = profile.strip_suffix(['A', 'B', 'C', 'Q']);
        memory.is_some_and(|it| !it.is_empty() && it.chars().all(|c| c.is_ascii_digit()))
    })?;
    Some(format!("the device is a {model}"))
}

fn wsl(files: &Files) -> Option<String> {
    let release = files.release.trim();
    let kernel = release.to_ascii_lowercase().contains("microsoft");
    (kernel || files.dxg).then(|| match kernel {
        true => format!("the kernel is {release}"),
        false => "/dev/dxg is there".into(),
    })
}

fn gvisor(files: &Files) -> Option<String> {
    let release = files.release.trim();
    release
        .ends_with("-gvisor")
        .then(|| format!("the kernel is {release}"))
}

fn container(files: &Files) -> Option<String> {
    let marks = [
        (files.containerenv, "/run/.containerenv"),
        (files.dockerenv, "/.dockerenv"),
    ];
    if let Some((_, mark)) = marks.into_iter().find(|(there, _)| *there) {
        return Some(format!("{mark} is there"));
    }
    // With version 2 of control groups a container sees its own as the root, so that the mount of its files is what remains.
    let runtimes = ["docker", "kubepods", "libpod", "containerd", "crio", "lxc"];
    let named = |text: &str| runtimes.into_iter().find(|it| text.contains(it));
    if let Some(runtime) = named(&files.cgroup) {
        return Some(format!("its control group is one of {runtime}"));
    }
    let mut mounts = files.mounts.lines();
    let root = mounts.find(|line| line.split(' ').nth(4) == Some("/"))?;
    let runtime = root.contains(" overlay ").then(|| named(root))??;
    Some(format!("its root is an overlay of {runtime}"))
}

/// The namespace that the system starts in maps all users to themselves.
fn namespace(files: &Files) -> Option<String> {
    let map = files.uid_map.lines();
    let map = map.map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "));
    let map: Vec<_> = map.collect();
    if files.uid_map.is_empty() && !files.status.is_empty() {
        return Some("no user is mapped".into());
    }
    let all = ["0 0 4294967295"];
    (!map.is_empty() && map != all).then(|| format!("users are mapped: {}", map.join(", ")))
}

fn seccomp(files: &Files) -> Option<String> {
    let mut lines = files.status.lines();
    let mode = lines.find_map(|line| line.strip_prefix("Seccomp:"))?.trim();
    (mode != "0").then(|| format!("mode {mode}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A process of the host: Debian 12.
    fn host() -> Files {
        Files {
            release: "6.1.0-37-amd64\n".into(),
            uid_map: "         0          0 4294967295\n".into(),
            status: "Name:\tcat\nNoNewPrivs:\t0\nSeccomp:\t0\nSeccomp_filters:\t0\n".into(),
            cgroup: "0::/user.slice/user-1000.slice/session-1.scope\n".into(),
            mounts: "22 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n".into(),
            gpus: vec!["Model: \t\t NVIDIA A100-SXM4-40GB\nIRQ:   \t\t 67\n".into()],
            ..Files::default()
        }
    }

    /// What is found, with what shows it.
    fn found(files: &Files) -> Vec<(&'static str, String)> {
        let sandboxes = detect(files).into_iter();
        sandboxes.map(|it| (it.name, it.shown_by)).collect()
    }

    fn one(name: &'static str, shown_by: &str) -> Vec<(&'static str, String)> {
        vec![(name, shown_by.into())]
    }

    #[test]
    fn host_has_no_sandbox() {
        assert_eq!(found(&host()), []);
        assert_eq!(found(&Files::default()), [], "files that cannot be read");
    }

    #[test]
    fn user_namespace_is_shown_by_its_map() {
        let of = |map: &str| {
            found(&Files {
                uid_map: map.into(),
                ..host()
            })
        };
        // `unshare -Ur`, rootless podman, and `unshare -U` before a map is written.
        let name = "user namespace";
        let root = of("         0       1000          1\n");
        assert_eq!(root, one(name, "users are mapped: 0 1000 1"));
        let podman = of("         0       1000          1\n         1     100000      65536\n");
        let shown = "users are mapped: 0 1000 1, 1 100000 65536";
        assert_eq!(podman, one(name, shown));
        assert_eq!(of(""), one(name, "no user is mapped"));
    }

    #[test]
    fn container_is_shown_by_what_its_runtime_leaves() {
        let docker = Files {
            dockerenv: true,
            ..host()
        };
        assert_eq!(found(&docker), one("container", "/.dockerenv is there"));
        let podman = Files {
            containerenv: true,
            ..host()
        };
        let shown = "/run/.containerenv is there";
        assert_eq!(found(&podman), one("container", shown));
        let kubernetes = Files {
            cgroup: "11:memory:/kubepods/besteffort/pod8a3e\n0::/\n".into(),
            ..host()
        };
        let shown = "its control group is one of kubepods";
        assert_eq!(found(&kubernetes), one("container", shown));
        // containerd with version 2 of control groups.
        let mounts = "1240 1012 0:214 / / rw,relatime - overlay overlay rw,lowerdir=/var/lib/containerd/\
                      io.containerd.snapshotter.v1.overlayfs/snapshots/12/fs,upperdir=/var/lib\n\
                      1241 1240 0:217 / /proc rw,nosuid - proc proc rw\n";
        let containerd = Files {
            cgroup: "0::/\n".into(),
            mounts: mounts.into(),
            ..host()
        };
        let shown = "its root is an overlay of containerd";
        assert_eq!(found(&containerd), one("container", shown));
        let live_system = Files {
            mounts: "22 1 0:20 / / rw - overlay overlay rw,lowerdir=/run/rootfsbase\n".into(),
            ..host()
        };
        assert_eq!(found(&live_system), []);
    }

    #[test]
    fn seccomp_is_shown_by_its_mode() {
        // In a container of podman 4.3 with its default profile.
        let filtered = Files {
            status: "Name:\tgrep\nNoNewPrivs:\t0\nSeccomp:\t2\nSeccomp_filters:\t1\n".into(),
            ..host()
        };
        assert_eq!(found(&filtered), one("seccomp", "mode 2"));
    }

    #[test]
    fn gvisor_and_wsl_are_shown_by_their_kernel() {
        let of = |release: &str, dxg| {
            found(&Files {
                release: release.into(),
                dxg,
                ..host()
            })
        };
        let gvisor = of("4.19.0-gvisor", false);
        assert_eq!(gvisor, one("gVisor", "the kernel is 4.19.0-gvisor"));
        let wsl = of("5.15.167.4-microsoft-standard-WSL2\n", true);
        let shown = "the kernel is 5.15.167.4-microsoft-standard-WSL2";
        assert_eq!(wsl, one("WSL2", shown));
        let own_kernel = of("6.6.36", true);
        assert_eq!(own_kernel, one("WSL2", "/dev/dxg is there"));
    }

    #[test]
    fn vgpu_is_shown_by_its_profile_alone() {
        let of = |model: &str| {
            let gpus = vec![format!("Model: \t\t {model}\nIRQ:   \t\t 67\n")];
            found(&Files { gpus, ..host() })
        };
        for model in ["GRID T4-16Q", "NVIDIA A40-8Q", "GRID A100-1-5CME"] {
            assert_eq!(of(model), one("vGPU", &format!("the device is a {model}")));
        }
        for model in [
            "NVIDIA H100 80GB HBM3",
            "A100-PG509-200",
            "NVIDIA RTX A6000",
            "NVIDIA A100-PCIE-40GB",
        ] {
            assert_eq!(of(model), [], "{model}");
        }
    }
}
