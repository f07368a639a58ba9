//! Containers through containerd's CRI, as the kubelet starts them: pods, and CDI devices by their names.

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use gpumux_tests::Process;
use prost::Message;

use super::kubelet::{Connection, Failure};

const IMAGE: &str = "localhost/gpumux-test:1";
const SERVICE: &str = "/runtime.v1.RuntimeService/";

/// Where containerd's programs are: in PATH if they know CDI, or where `tests/get-containerd` put them. A CI run gets
/// them by itself.
pub fn find() -> Result<PathBuf, String> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let in_path = || std::env::split_paths(&path);
    let good = |dir: &Path| {
        // It cannot do without.
        in_path()
            .chain([dir.into()])
            .find(|dir| dir.join("runc").exists())?;
        let output = Command::new(dir.join("containerd"))
            .arg("--version")
            .output();
        let text = String::from_utf8(output.ok()?.stdout).ok()?;
        let version = text
            .split_whitespace()
            .nth(2)?
            .trim_start_matches('v')
            .to_owned();
        let mut numbers = version
            .split('.')
            .map(|number| number.parse::<u32>().unwrap_or(0));
        ((numbers.next()?, numbers.next()?) >= (1, 7)).then(|| dir.to_owned())
    };
    if let Some(dir) = in_path().find_map(|dir| good(&dir)) {
        return Ok(dir);
    }
    let own = Path::new(env!("CARGO_TARGET_TMPDIR")).join("containerd");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/get-containerd");
    if good(&own).is_none() && std::env::var_os("CI").is_some() {
        let mut get = Command::new("timeout");
        get.arg("120").arg(&script).arg(&own).stdout(Stdio::null());
        let _ = get.status();
    }
    good(&own).ok_or_else(|| {
        format!(
            "no containerd from 1.7 on, or no runc: run {} {}",
            script.display(),
            own.display()
        )
    })
}

/// containerd on a directory of its own.
pub struct Containerd {
    process: Option<Process>,
    programs: PathBuf,
    dir: PathBuf,
}

impl Containerd {
    /// Starts it, with one image that has nothing but a program that waits.
    pub fn start(programs: &Path, dir: &Path, cdi_dir: &Path) -> Self {
        std::fs::create_dir_all(dir).unwrap();
        let config = format!(
            "version = 2\nroot = \"{0}/root\"\nstate = \"{0}/state\"\n[grpc]\naddress = \"{0}/c.sock\"\n\
             [plugins.\"io.containerd.grpc.v1.cri\"]\nsandbox_image = \"{IMAGE}\"\nenable_cdi = true\n\
             cdi_spec_dirs = [\"{1}\"]\ndisable_cgroup = true\nrestrict_oom_score_adj = true\n\
             [plugins.\"io.containerd.grpc.v1.cri\".containerd]\nsnapshotter = \"native\"\n",
            dir.display(),
            cdi_dir.display()
        );
        std::fs::write(dir.join("config.toml"), config).unwrap();
        let path = std::env::var("PATH").unwrap_or_default();
        let path = format!("{}:{path}:/usr/sbin:/sbin", programs.display());
        let mut command = Command::new(programs.join("containerd"));
        command
            .arg("--config")
            .arg(dir.join("config.toml"))
            .env("PATH", path);
        let containerd = Self {
            process: Some(Process::start(&mut command)),
            programs: programs.to_owned(),
            dir: dir.to_owned(),
        };
        gpumux_tests::wait_for("containerd", Duration::from_secs(60), || {
            containerd.ctr(&["version"]).then_some(())
        });
        containerd.import();
        containerd
    }

    fn ctr(&self, args: &[&str]) -> bool {
        let mut command = Command::new(self.programs.join("ctr"));
        command
            .arg("--address")
            .arg(self.dir.join("c.sock"))
            .args(["--namespace", "k8s.io"]);
        let status = command
            .args(args)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status();
        status.is_ok_and(|status| status.success())
    }

    fn import(&self) {
        let image = self.dir.join("image");
        let root = image.join("root");
        std::fs::create_dir_all(root.join("usr")).unwrap();
        for name in ["bin", "lib", "lib64", "sbin"] {
            std::os::unix::fs::symlink(format!("usr/{name}"), root.join(name)).unwrap();
        }
        std::fs::write(root.join("wait"), waits()).unwrap();
        let script =
            "set -e; chmod 755 root/wait; tar -C root -cf layer.tar .; sha256sum layer.tar";
        let output = Command::new("sh")
            .args(["-c", script])
            .current_dir(&image)
            .output()
            .unwrap();
        let digest = String::from_utf8(output.stdout).unwrap();
        let digest = digest.split(' ').next().unwrap();
        let config = serde_json::json!({"architecture": "amd64", "os": "linux", "config": {"Entrypoint": ["/wait"]},
            "rootfs": {"type": "layers", "diff_ids": [format!("sha256:{digest}")]}});
        let manifest = serde_json::json!([{"Config": "config.json", "RepoTags": [IMAGE], "Layers": ["layer.tar"]}]);
        std::fs::write(image.join("config.json"), config.to_string()).unwrap();
        std::fs::write(image.join("manifest.json"), manifest.to_string()).unwrap();
        let mut tar = Command::new("tar");
        tar.args([
            "-cf",
            "image.tar",
            "manifest.json",
            "config.json",
            "layer.tar",
        ]);
        assert!(tar.current_dir(&image).status().unwrap().success());
        let archive = image.join("image.tar").display().to_string();
        assert!(
            self.ctr(&["images", "import", "--snapshotter", "native", &archive]),
            "the image"
        );
    }

    async fn call<T: Message + Default>(
        &self,
        method: &str,
        message: &impl Message,
    ) -> Result<T, Failure> {
        let mut connection = Connection::unix(&self.dir.join("c.sock")).await.unwrap();
        connection
            .call(&format!("{SERVICE}{method}"), message)
            .await
    }

    /// Runs a program as a container in a pod of its own, with this machine's /usr.
    pub async fn run(
        &self,
        name: &str,
        devices: &[String],
        binds: &[(&Path, &str)],
        args: &[&str],
    ) -> Pod {
        let logs = self.dir.join("logs").join(name);
        std::fs::create_dir_all(&logs).unwrap();
        let metadata = || Metadata {
            name: name.into(),
            uid: name.into(),
            namespace: "team".into(),
        };
        // The node's network: this needs no plug-ins.
        let own = || Namespaces {
            network: 2,
            pid: 1,
            ipc: 0,
        };
        let sandbox = PodSandboxConfig {
            metadata: Some(metadata()),
            log_directory: logs.display().to_string(),
            linux: Some(LinuxSandbox {
                security_context: Some(SandboxSecurity {
                    namespace_options: Some(own()),
                }),
            }),
        };
        let request = RunPodSandboxRequest {
            config: Some(sandbox.clone()),
        };
        let end = std::time::Instant::now() + Duration::from_secs(30);
        let sandbox_id = loop {
            match self.call::<Id>("RunPodSandbox", &request).await {
                Ok(answer) => break answer.id,
                // containerd lists an image some time after it is there.
                Err(error) => assert!(std::time::Instant::now() < end, "{error:?}"),
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        };
        let request = CreateContainerRequest {
            pod_sandbox_id: sandbox_id.clone(),
            sandbox_config: Some(sandbox),
            config: Some(ContainerConfig {
                metadata: Some(Metadata {
                    name: name.into(),
                    ..Metadata::default()
                }),
                image: Some(Id { id: IMAGE.into() }),
                command: args.iter().map(|arg| (*arg).to_owned()).collect(),
                mounts: binds
                    .iter()
                    .map(|(from, to)| Mount {
                        container_path: (*to).to_owned(),
                        host_path: from.display().to_string(),
                    })
                    .collect(),
                log_path: "log".into(),
                linux: Some(LinuxContainer {
                    security_context: Some(ContainerSecurity {
                        namespace_options: Some(own()),
                        run_as_user: Some(Int64 { value: 1000 }),
                        no_new_privs: true,
                    }),
                }),
                cdi_devices: devices.iter().map(|id| Id { id: id.clone() }).collect(),
            }),
        };
        let container: Id = self
            .call("CreateContainer", &request)
            .await
            .expect("a container");
        let _: Empty = self
            .call("StartContainer", &container)
            .await
            .expect("it starts");
        Pod {
            sandbox: sandbox_id,
            container: container.id,
            log: logs.join("log"),
        }
    }

    /// The exit code of a container that has ended.
    pub async fn ended(&self, pod: &Pod) -> Option<i32> {
        let id = Id {
            id: pod.container.clone(),
        };
        let answer: StatusResponse = self.call("ContainerStatus", &id).await.unwrap();
        let status = answer.status.unwrap();
        (status.state == 2).then_some(status.exit_code)
    }

    /// Ends a pod and what runs in it.
    pub async fn stop(&self, pod: Pod) {
        let id = Id { id: pod.sandbox };
        for method in ["StopPodSandbox", "RemovePodSandbox"] {
            let _: Empty = self.call(method, &id).await.expect(method);
        }
    }
}

impl Drop for Containerd {
    fn drop(&mut self) {
        // Its shims outlive it: what a failed test left must go first.
        let mut list = Command::new(self.programs.join("ctr"));
        list.arg("--address").arg(self.dir.join("c.sock"));
        let output = list
            .args(["--namespace", "k8s.io", "tasks", "list", "--quiet"])
            .output();
        let ids = output.map(|output| output.stdout).unwrap_or_default();
        for id in String::from_utf8(ids).unwrap_or_default().lines() {
            self.ctr(&["tasks", "delete", "--force", id]);
        }
        if let Some(process) = self.process.take() {
            process.kill();
        }
    }
}

pub struct Pod {
    sandbox: String,
    container: String,
    log: PathBuf,
}

impl Pod {
    /// What it wrote so far.
    pub fn out(&self) -> String {
        let log = std::fs::read_to_string(&self.log).unwrap_or_default();
        // Time, stream, and whether the line is whole come before the text.
        let text = |line: &str| line.splitn(4, ' ').nth(3).unwrap_or_default().to_owned() + "\n";
        log.lines().map(text).collect()
    }
}

/// A program that waits without end: an x86-64 ELF file with one segment and `pause` in a loop.
fn waits() -> Vec<u8> {
    const BASE: u64 = 0x40_0000;
    const CODE: [u8; 9] = [0xb8, 34, 0, 0, 0, 0x0f, 0x05, 0xeb, 0xf7];
    let mut elf = b"\x7fELF\x02\x01\x01".to_vec();
    elf.resize(16, 0);
    elf.extend([2, 0, 62, 0, 1, 0, 0, 0]);
    for value in [BASE + 120, 64, 0] {
        elf.extend(value.to_le_bytes());
    }
    elf.extend([0, 0, 0, 0, 64, 0, 56, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    elf.extend([1, 0, 0, 0, 5, 0, 0, 0]);
    for value in [0, BASE, BASE, 129, 129, 4096] {
        elf.extend(value.to_le_bytes());
    }
    elf.extend(CODE);
    elf
}

// The parts of CRI v1 that are used. Messages of one string in field 1 are all `Id`.

#[derive(Clone, PartialEq, Message)]
struct Id {
    #[prost(string, tag = "1")]
    id: String,
}

#[derive(Clone, PartialEq, Message)]
struct Empty {}

#[derive(Clone, PartialEq, Message)]
struct Metadata {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(string, tag = "2")]
    uid: String,
    #[prost(string, tag = "3")]
    namespace: String,
}

#[derive(Clone, PartialEq, Message)]
struct Namespaces {
    #[prost(int32, tag = "1")]
    network: i32,
    #[prost(int32, tag = "2")]
    pid: i32,
    #[prost(int32, tag = "3")]
    ipc: i32,
}

#[derive(Clone, PartialEq, Message)]
struct SandboxSecurity {
    #[prost(message, tag = "1")]
    namespace_options: Option<Namespaces>,
}

#[derive(Clone, PartialEq, Message)]
struct LinuxSandbox {
    #[prost(message, tag = "2")]
    security_context: Option<SandboxSecurity>,
}

#[derive(Clone, PartialEq, Message)]
struct PodSandboxConfig {
    #[prost(message, tag = "1")]
    metadata: Option<Metadata>,
    #[prost(string, tag = "3")]
    log_directory: String,
    #[prost(message, tag = "8")]
    linux: Option<LinuxSandbox>,
}

#[derive(Clone, PartialEq, Message)]
struct RunPodSandboxRequest {
    #[prost(message, tag = "1")]
    config: Option<PodSandboxConfig>,
}

#[derive(Clone, PartialEq, Message)]
struct Mount {
    #[prost(string, tag = "1")]
    container_path: String,
    #[prost(string, tag = "2")]
    host_path: String,
}

#[derive(Clone, PartialEq, Message)]
struct Int64 {
    #[prost(int64, tag = "1")]
    value: i64,
}

#[derive(Clone, PartialEq, Message)]
struct ContainerSecurity {
    #[prost(message, tag = "3")]
    namespace_options: Option<Namespaces>,
    #[prost(message, tag = "5")]
    run_as_user: Option<Int64>,
    #[prost(bool, tag = "11")]
    no_new_privs: bool,
}

#[derive(Clone, PartialEq, Message)]
struct LinuxContainer {
    #[prost(message, tag = "2")]
    security_context: Option<ContainerSecurity>,
}

#[derive(Clone, PartialEq, Message)]
struct ContainerConfig {
    #[prost(message, tag = "1")]
    metadata: Option<Metadata>,
    #[prost(message, tag = "2")]
    image: Option<Id>,
    #[prost(string, repeated, tag = "3")]
    command: Vec<String>,
    #[prost(message, repeated, tag = "7")]
    mounts: Vec<Mount>,
    #[prost(string, tag = "11")]
    log_path: String,
    #[prost(message, tag = "15")]
    linux: Option<LinuxContainer>,
    #[prost(message, repeated, tag = "17")]
    cdi_devices: Vec<Id>,
}

#[derive(Clone, PartialEq, Message)]
struct CreateContainerRequest {
    #[prost(string, tag = "1")]
    pod_sandbox_id: String,
    #[prost(message, tag = "2")]
    config: Option<ContainerConfig>,
    #[prost(message, tag = "3")]
    sandbox_config: Option<PodSandboxConfig>,
}

#[derive(Clone, PartialEq, Message)]
struct Status {
    #[prost(int32, tag = "3")]
    state: i32,
    #[prost(int32, tag = "7")]
    exit_code: i32,
}

#[derive(Clone, PartialEq, Message)]
struct StatusResponse {
    #[prost(message, tag = "1")]
    status: Option<Status>,
}
