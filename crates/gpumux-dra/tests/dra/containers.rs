//! Programs in containers on the emulated device, with the shares that their claims were allocated. `gpumux dra`,
//! `gpumux daemon` and `gpumux emu` are the real ones; the containers are runc's where the machine has it, else
//! namespaces made by hand. What the CDI file adds is applied by the library of the CDI project.

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use container_device_interface::{cache::new_cache, spec_dirs::with_spec_dirs};
use gpumux_daemon::api::types::Tenant;
use gpumux_tests::{Node as Machine, Process, Run, binary, library};
use serde_json::{Value, json};

use crate::support::{kubelet::Kubelet, node::Node, scheduler::Scheduler};

/// A container's files and its process. Ends with the value.
struct Container {
    process: Option<Process>,
    dir: PathBuf,
}

impl Container {
    /// Runs a program in a container whose image is this machine's file system, with the devices of a claim.
    fn start(dir: &Path, cdi_dir: &Path, devices: &[String], args: &[&str]) -> Self {
        for sub in ["upper", "work", "root"] {
            std::fs::create_dir_all(dir.join(sub)).unwrap();
        }
        let overlay = format!(
            "lowerdir=/,upperdir={0}/upper,workdir={0}/work",
            dir.display()
        );
        let mounted = Command::new("mount")
            .args(["-t", "overlay", "overlay", "-o", &overlay])
            .arg(dir.join("root"))
            .status();
        assert!(mounted.unwrap().success(), "overlay");
        let spec = json!({
            "ociVersion": "1.0.2",
            "root": {"path": "root", "readonly": false},
            "process": {"user": {"uid": 1000, "gid": 1000}, "cwd": "/", "args": args,
                "env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"], "noNewPrivileges": true},
            "mounts": [
                {"destination": "/proc", "type": "proc", "source": "proc"},
                {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["mode=755"]},
                {"destination": "/dev/shm", "type": "tmpfs", "source": "shm", "options": ["mode=1777"]},
                {"destination": "/gpumux", "type": "bind", "source": binary(), "options": ["rbind", "ro"]}
            ],
            "linux": {"namespaces": [{"type": "pid"}, {"type": "ipc"}, {"type": "uts"}, {"type": "mount"}]}
        });
        let mut spec: oci_spec::runtime::Spec = serde_json::from_value(spec).unwrap();
        let cache = new_cache(vec![with_spec_dirs(&[cdi_dir.to_str().unwrap()])]);
        cache
            .lock()
            .unwrap()
            .inject_devices(Some(&mut spec), devices.to_vec())
            .expect("devices that CDI resolves");
        let spec = serde_json::to_value(spec).unwrap();
        std::fs::write(dir.join("config.json"), spec.to_string()).unwrap();
        let mut command = match Command::new("runc")
            .arg("--version")
            .stdout(Stdio::null())
            .status()
        {
            Ok(status) if status.success() => {
                let mut runc = Command::new("runc");
                runc.arg("--root")
                    .arg(dir.join("state"))
                    .arg("run")
                    .arg("--bundle")
                    .arg(dir);
                runc.arg(name(dir));
                runc
            }
            _ => by_hand(dir, &spec),
        };
        Self {
            process: Some(Process::start(&mut command)),
            dir: dir.to_owned(),
        }
    }

    /// What the program said until it ended by itself.
    fn finish(mut self) -> gpumux_tests::Finished {
        self.process.take().unwrap().finish()
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        if let Some(process) = self.process.take() {
            process.kill();
            // A killed runc leaves its container.
            let mut runc = Command::new("runc");
            runc.arg("--root")
                .arg(self.dir.join("state"))
                .args(["delete", "--force"])
                .arg(name(&self.dir));
            let _ = runc.stderr(Stdio::null()).status();
        }
        let _ = Command::new("umount")
            .arg("-l")
            .arg(self.dir.join("root"))
            .status();
    }
}

fn name(dir: &Path) -> String {
    format!("gm-{}", dir.file_name().unwrap().display())
}

/// The same without a runtime: mount and pid namespaces, the mounts of the specification, another root and user.
fn by_hand(dir: &Path, spec: &Value) -> Command {
    let root = dir.join("root");
    let mut script = String::from("set -e\n");
    for mount in spec["mounts"].as_array().unwrap() {
        let text = |name: &str| mount[name].as_str().unwrap_or_default().to_owned();
        let to = format!("{}{}", root.display(), text("destination"));
        let from = text("source");
        match mount["type"].as_str() {
            Some("proc") => script += &format!("mkdir -p {to}; mount -t proc proc {to}\n"),
            Some("tmpfs") => script += &format!("mkdir -p {to}; mount -t tmpfs tmpfs {to}\n"),
            _ if Path::new(&from).is_dir() => {
                script += &format!("mkdir -p {to}; mount --bind {from} {to}\n")
            }
            _ => {
                script +=
                    &format!("mkdir -p $(dirname {to}); touch {to}; mount --bind {from} {to}\n")
            }
        }
    }
    let words = |value: &Value| -> String {
        value
            .as_array()
            .unwrap()
            .iter()
            .map(|word| format!("'{}' ", word.as_str().unwrap()))
            .collect()
    };
    let (env, args) = (
        words(&spec["process"]["env"]),
        words(&spec["process"]["args"]),
    );
    script += &format!(
        "exec chroot --userspec=1000:1000 {} /usr/bin/env -i {env} {args}\n",
        root.display()
    );
    let mut command = Command::new("unshare");
    command.args([
        "--mount",
        "--pid",
        "--fork",
        "--kill-child",
        "sh",
        "-c",
        &script,
    ]);
    command
}

/// Whether this machine lets its user make namespaces and overlays at all.
fn containers_can_be_made(dir: &Path) -> bool {
    let script = format!(
        "mkdir -p {0}/u {0}/w {0}/m && mount -t overlay overlay -o lowerdir=/,upperdir={0}/u,workdir={0}/w {0}/m",
        dir.display()
    );
    let tried = Command::new("unshare")
        .args(["--mount", "--pid", "--fork", "sh", "-c", &script])
        .stderr(Stdio::null())
        .status();
    tried.is_ok_and(|status| status.success())
}

async fn until(
    node: &Node,
    containers: &mut [Container],
    what: &str,
    mut good: impl FnMut(&[Tenant]) -> bool,
) {
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        let tenants = node.daemon.tenants().await.unwrap();
        if good(&tenants) {
            return;
        }
        for container in containers.iter_mut() {
            let process = container.process.as_mut().unwrap();
            assert!(
                process.poll().is_none(),
                "a container ended: {} {}",
                process.out(),
                process.err()
            );
        }
        assert!(Instant::now() < end, "{what} does not come: {tenants:#?}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

fn dra(machine: &Machine, node: &Node) -> Process {
    let kubeconfig = machine.dir().join("kubeconfig");
    let config = json!({"apiVersion": "v1", "kind": "Config", "current-context": "t",
        "clusters": [{"name": "t", "cluster": {"server": node.api.uri}}],
        "users": [{"name": "t", "user": {}}],
        "contexts": [{"name": "t", "context": {"cluster": "t", "user": "t"}}]});
    std::fs::write(&kubeconfig, config.to_string()).unwrap();
    let kubelet_dir = machine.dir().join("kubelet");
    let mut command = machine.gpumux(["dra", "--node-name", "node1", "--metrics", "127.0.0.1:0"]);
    command.arg("--kubelet-dir").arg(&kubelet_dir);
    command.arg("--cdi-dir").arg(machine.dir().join("cdi"));
    command
        .arg("--library-dir")
        .arg(library("libgpumux.so").parent().unwrap());
    command
        .env("KUBECONFIG", &kubeconfig)
        .env("GPUMUX_NVML", library("libgpumux_emu.so"));
    let mut process = Process::start(&mut command);
    let socket = kubelet_dir.join("plugins_registry/gpumux.dev-reg.sock");
    gpumux_tests::wait_for("the driver", Duration::from_secs(60), || {
        assert!(process.poll().is_none(), "it ended: {}", process.err());
        std::os::unix::net::UnixStream::connect(&socket).ok()
    });
    process
}

#[tokio::test(flavor = "multi_thread")]
async fn programs_in_containers_get_the_shares_of_their_claims() {
    let scratch = tempfile::tempdir_in("/tmp").unwrap();
    if !containers_can_be_made(scratch.path()) {
        eprintln!("skipped: this machine allows neither namespaces nor overlays");
        return;
    }
    let machine = Machine::start();
    let mut node = Node {
        api: crate::support::api::Api::start().await,
        scheduler: Scheduler::default(),
        daemon: gpumux_daemon::client::Client::new(machine.dir()),
        dir: tempfile::tempdir().unwrap(),
    };
    let mut driver = dra(&machine, &node);
    let kubelet = Kubelet::register(&machine.dir().join("kubelet/plugins_registry")).await;
    node.api.until_published().await;
    let published = serde_json::to_value(node.api.slices()).unwrap();
    let device = &published[1]["spec"]["devices"][0];
    assert_eq!(device["attributes"]["emulated"]["bool"], true, "{device}");
    assert!(
        device["attributes"]["cudaComputeCapability"]["version"].is_string(),
        "{device}"
    );

    let claims = [
        node.claim(
            "first",
            "gpumux-guaranteed",
            json!({"compute": "500"}),
            None,
        ),
        node.claim(
            "second",
            "gpumux-guaranteed",
            json!({"compute": "300"}),
            None,
        ),
        node.claim("batch", "gpumux-preemptible", json!({}), None),
    ];
    let cdi_dir = machine.dir().join("cdi");
    let mut containers = Vec::new();
    for claim in &claims {
        let devices = kubelet.prepare_one(claim).await.unwrap();
        let program = ["/gpumux", "workload", "batch", "--seconds", "600"];
        let dir = scratch.path().join(&claim.name);
        containers.push(Container::start(
            &dir,
            &cdi_dir,
            &devices[0].cdi_device_ids,
            &program,
        ));
    }
    // What is in a container: who it is, and no way to the daemon's API.
    let look = "ls /usr/local/gpumux/run; env; id -u; ls /dev";
    let devices = kubelet.prepare_one(&claims[0]).await.unwrap();
    let looking = Container::start(
        &scratch.path().join("look"),
        &cdi_dir,
        &devices[0].cdi_device_ids,
        &["/bin/sh", "-c", look],
    );
    let seen = looking.finish().ok().out;
    assert!(
        seen.lines().next() == Some("session.sock") && !seen.contains("api.sock"),
        "{seen}"
    );
    assert!(
        seen.contains("GPUMUX_STRICT=1") && seen.contains("\n1000\n") && !seen.contains("nvidia1"),
        "{seen}"
    );

    let shares = |tenants: &[Tenant]| -> Option<Vec<(f64, f64, u64)>> {
        let of = |claim: &gpumux_dra::proto::v1::Claim| {
            let prefix = gpumux_dra::prepare::tenant_prefix(&claim.uid);
            let domain = tenants
                .iter()
                .find(|tenant| tenant.name.starts_with(&prefix))?
                .domains
                .first()?;
            Some((
                domain.promised_share,
                domain.received_share,
                domain.received_us,
            ))
        };
        claims.iter().map(of).collect()
    };
    until(
        &node,
        &mut containers,
        "three running shares in the order of their promises",
        |tenants| {
            shares(tenants).is_some_and(|shares| {
                let received: Vec<_> = shares.iter().map(|share| share.1).collect();
                shares[0].0 >= 0.5
                    && shares[1].0 >= 0.3
                    && received[0] > received[1]
                    && received[1] > received[2]
            })
        },
    )
    .await;

    // Resized while it runs: now the second has the larger promise, and gets it.
    node.api.annotate(
        "team",
        "first",
        gpumux_dra::share::ANNOTATION,
        Some(r#"{"compute": 50, "limit": 100}"#),
    );
    until(
        &node,
        &mut containers,
        "the first below the second",
        |tenants| {
            shares(tenants)
                .is_some_and(|shares| shares[0].0 < shares[1].0 && shares[0].1 < shares[1].1)
        },
    )
    .await;

    // The driver is killed and comes back: the programs run on, with what they have.
    driver.kill();
    let before = shares(&node.daemon.tenants().await.unwrap()).unwrap();
    driver = dra(&machine, &node);
    let kubelet = Kubelet::register(&machine.dir().join("kubelet/plugins_registry")).await;
    until(
        &node,
        &mut containers,
        "work while the driver was away",
        |tenants| {
            shares(tenants).is_some_and(|now| {
                now.iter()
                    .zip(&before)
                    .all(|(now, before)| now.2 > before.2)
            })
        },
    )
    .await;
    // While a container runs, its claim cannot be taken from it.
    let error = kubelet.unprepare_one(&claims[0]).await.unwrap_err();
    assert!(error.contains("connected process"), "{error}");
    drop(containers);
    for claim in &claims {
        let end = Instant::now() + Duration::from_secs(30);
        // As the kubelet: again until it works.
        while let Err(error) = kubelet.unprepare_one(claim).await {
            assert!(Instant::now() < end, "{error}");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
    assert_eq!(node.daemon.tenants().await.unwrap().len(), 0);
    assert_eq!(std::fs::read_dir(&cdi_dir).unwrap().count(), 0);
    driver.signal(rustix::process::Signal::TERM);
    assert_eq!(driver.finish().code(), 0);
}

/// Without a cluster: what `gpumux cdi generate` writes makes a tenant of a program in any container.
#[test]
fn a_container_has_a_gpu_by_cdi_alone() {
    let dir = tempfile::tempdir().unwrap();
    if !containers_can_be_made(dir.path()) {
        eprintln!("SKIPPED: this user may make no namespaces");
        return;
    }
    let machine = Machine::start();
    let (cdi, inside) = (dir.path().join("cdi"), dir.path().join("inside"));
    let file = cdi.join("gpumux.json");
    let mut generate = machine.on_device([binary().to_str().unwrap(), "cdi", "generate", "-o"]);
    generate.arg(&file).run().ok();
    let devices = ["gpumux.dev/gpu=all".to_owned()];
    let args = ["/gpumux", "workload", "batch", "--seconds", "600"];
    let mut container = Container::start(&inside, &cdi, &devices, &args);
    let process = container.process.as_mut().unwrap();
    gpumux_tests::wait_for("a tenant of the container", gpumux_tests::PATIENCE, || {
        assert!(process.poll().is_none(), "{}", process.err());
        let tenants = machine.ps()["tenants"].as_array().unwrap().clone();
        let tenant = tenants.first()?;
        (tenant["uid"] == 1000 && tenant["domains"][0]["demand"] == "busy").then_some(())
    });
}
