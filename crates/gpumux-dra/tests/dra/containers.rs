//! Programs in containers on the emulated device, with the shares that their claims were allocated. `gpumux dra`,
//! `gpumux daemon` and `gpumux emu` are the real ones. The containers are containerd's, started through CRI with CDI devices
//! as the kubelet does, where the machine has a containerd that knows CDI; else namespaces made by hand.

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use gpumux_daemon::api::types::Tenant;
use gpumux_tests::{Node as Machine, Process, Run, binary, library};
use serde_json::{Value, json};

use crate::support::{
    cri::{self, Containerd, Pod},
    kubelet::Kubelet,
    node::Node,
    scheduler::Scheduler,
};

/// What runs containers.
enum Runtime {
    Containerd(Containerd),
    ByHand,
}

/// A container, and a directory of its own on the host. What is mounted there goes with the value.
struct Container {
    running: Option<Running>,
    dir: PathBuf,
}

enum Running {
    Pod(Pod),
    Process(Process),
}

impl Runtime {
    /// Runs a program in a container that has this machine's /usr and the devices of a claim.
    async fn run(
        &self,
        dir: &Path,
        cdi_dir: &Path,
        devices: &[String],
        args: &[&str],
    ) -> Container {
        let own = ["upper", "work", "usr"].map(|sub| dir.join(sub));
        own.iter()
            .for_each(|sub| std::fs::create_dir_all(sub).unwrap());
        let running = match self {
            Self::Containerd(containerd) => {
                // Mounts of a CDI file need places below it.
                let mounted = Command::new("sh")
                    .args(["-c", &overlay(dir, "/usr", "usr")])
                    .status();
                assert!(mounted.unwrap().success(), "overlay");
                let binds = [(own[2].as_path(), "/usr"), (&binary(), "/gpumux")];
                let name = dir.file_name().unwrap().to_str().unwrap();
                Running::Pod(containerd.run(name, devices, &binds, args).await)
            }
            Self::ByHand => {
                Running::Process(Process::start(&mut by_hand(dir, cdi_dir, devices, args)))
            }
        };
        Container {
            running: Some(running),
            dir: dir.to_owned(),
        }
    }

    /// What a container said, if it has ended.
    async fn ended(&self, container: &mut Container) -> Option<String> {
        match (self, container.running.as_mut()?) {
            (Self::Containerd(containerd), Running::Pod(pod)) => containerd
                .ended(pod)
                .await
                .map(|code| format!("{}{code}", pod.out())),
            (_, Running::Process(process)) => {
                let status = process.poll()?;
                Some(format!(
                    "{}{}{}",
                    process.out(),
                    process.err(),
                    status.code().unwrap_or(-1)
                ))
            }
            _ => unreachable!("a pod is containerd's"),
        }
    }

    async fn stop(&self, mut container: Container) {
        match (self, container.running.take()) {
            (Self::Containerd(containerd), Some(Running::Pod(pod))) => containerd.stop(pod).await,
            (_, Some(Running::Process(process))) => process.kill(),
            _ => {}
        }
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        let mut umount = Command::new("umount");
        let _ = umount
            .arg("-l")
            .arg(self.dir.join("usr"))
            .stderr(Stdio::null())
            .status();
    }
}

/// The command that makes a tree writable without changing it.
fn overlay(dir: &Path, of: &str, to: &str) -> String {
    let dir = dir.display();
    format!(
        "mount -t overlay overlay -o lowerdir={of},upperdir={dir}/upper,workdir={dir}/work {dir}/{to}"
    )
}

/// The same without a runtime: mount and pid namespaces, what the CDI file adds, another root and user.
fn by_hand(dir: &Path, cdi_dir: &Path, devices: &[String], args: &[&str]) -> Command {
    let root = dir.join("usr");
    let mut script = format!("set -e\n{}\n", overlay(dir, "/", "usr"));
    let mut bind = |from: &str, to: &str| {
        let to = format!("{}{to}", root.display());
        let place = match Path::new(from).is_dir() {
            true => format!("mkdir -p {to}"),
            false => format!("mkdir -p $(dirname {to}); touch {to}"),
        };
        script += &format!("{place}; mount --bind {from} {to}\n");
    };
    bind(binary().to_str().unwrap(), "/gpumux");
    let mut env = vec!["PATH=/usr/sbin:/usr/bin:/sbin:/bin".to_owned()];
    for edits in devices.iter().flat_map(|device| edits(cdi_dir, device)) {
        let all = |name: &str| edits[name].as_array().cloned().unwrap_or_default();
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        for mount in all("mounts") {
            bind(&text(&mount["hostPath"]), &text(&mount["containerPath"]));
        }
        env.extend(all("env").iter().map(text));
    }
    let root = root.display();
    script += &format!("mount -t proc proc {root}/proc; mount -t tmpfs tmpfs {root}/dev\n");
    script += &format!(
        "mkdir -m 1777 {root}/dev/shm; exec chroot --userspec=1000:1000 {root} /usr/bin/env -i \"$@\""
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
        "sh",
    ]);
    command.args(env).args(args);
    command
}

/// What a CDI device adds to a container: its file's edits, and its own.
fn edits(cdi_dir: &Path, device: &str) -> [Value; 2] {
    let (kind, name) = device.split_once('=').unwrap();
    for file in std::fs::read_dir(cdi_dir).unwrap() {
        let bytes = std::fs::read(file.unwrap().path()).unwrap();
        let spec: Value = serde_json::from_slice(&bytes).unwrap();
        let mut devices = spec["devices"].as_array().unwrap().iter();
        if spec["kind"] == kind
            && let Some(found) = devices.find(|device| device["name"] == name)
        {
            return [&spec, found].map(|of| of["containerEdits"].clone());
        }
    }
    panic!("no CDI device {device}");
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
    runtime: &Runtime,
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
            if let Some(out) = runtime.ended(container).await {
                panic!("a container ended: {out}");
            }
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
    // It has no NVML, as in the chart's container.
    command
        .env("KUBECONFIG", &kubeconfig)
        .env("GPUMUX_NVML", "/nowhere/libnvidia-ml.so.1");
    let mut process = Process::start(&mut command);
    let socket = kubelet_dir.join("plugins_registry/gpumux.dev-reg.sock");
    gpumux_tests::wait_for("the driver", Duration::from_secs(60), || {
        assert!(process.poll().is_none(), "it ended: {}", process.err());
        std::os::unix::net::UnixStream::connect(&socket).ok()
    });
    process
}

/// The daemon's NVML is enough: it knows which part of which GPU an instance is.
#[tokio::test(flavor = "multi_thread")]
async fn mig_instances_are_published_instead_of_their_gpu() {
    let machine = Machine::with(gpumux_tests::Options {
        devices: 2,
        profile: "mig = [['1g.10gb', '2g.20gb']]\n",
        ..Default::default()
    });
    let node = Node {
        api: crate::support::api::Api::start().await,
        scheduler: Scheduler::default(),
        daemon: gpumux_daemon::client::Client::new(machine.dir()),
        dir: tempfile::tempdir().unwrap(),
    };
    let end = Instant::now() + Duration::from_secs(60);
    while node.daemon.devices().await.unwrap().len() < 3 {
        assert!(Instant::now() < end, "the daemon finds no instances");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let _driver = dra(&machine, &node);
    let _kubelet = Kubelet::register(&machine.dir().join("kubelet/plugins_registry")).await;
    node.api.until_published().await;
    let published = serde_json::to_value(node.api.slices()).unwrap();
    let slices = published.as_array().unwrap().iter();
    let devices = slices.filter_map(|slice| slice["spec"]["devices"].as_array());
    let mut found = std::collections::BTreeSet::new();
    for device in devices.flatten() {
        let attributes = &device["attributes"];
        let uuid = attributes["uuid"]["string"].as_str().unwrap();
        let kind = attributes["type"]["string"].as_str().unwrap();
        assert_eq!(uuid.starts_with("MIG-"), kind == "mig", "{device}");
        let capability = &attributes["cudaComputeCapability"]["version"];
        assert_eq!(capability, "9.0.0", "{device}");
        let product = attributes["productName"]["string"].as_str().unwrap();
        let profile = product
            .split_once(" MIG ")
            .map(|(_, profile)| profile.to_owned());
        let name = device["name"].as_str().unwrap();
        assert_eq!(name.contains("-mig-"), kind == "mig", "{device}");
        found.insert((kind.to_owned(), profile, uuid.to_owned()));
    }
    let found: Vec<_> = found.iter().map(|it| (&*it.0, it.1.as_deref())).collect();
    let expected = [
        ("gpu", None),
        ("mig", Some("1g.10gb")),
        ("mig", Some("2g.20gb")),
    ];
    assert_eq!(found, expected);
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
        node.half("first"),
        node.claim(
            "second",
            "gpumux-guaranteed",
            json!({"compute": "300"}),
            None,
        ),
        node.preemptible("batch"),
    ];
    let cdi_dir = machine.dir().join("cdi");
    let runtime = match cri::find() {
        Ok(programs) => {
            let dir = scratch.path().join("containerd");
            Runtime::Containerd(Containerd::start(&programs, &dir, &cdi_dir))
        }
        Err(why) => {
            eprintln!("namespaces by hand instead of containers: {why}");
            Runtime::ByHand
        }
    };
    let mut containers = Vec::new();
    for claim in &claims {
        let devices = kubelet.prepare_one(claim).await.unwrap();
        let program = ["/gpumux", "workload", "batch", "--seconds", "600"];
        let dir = scratch.path().join(&claim.name);
        let devices = &devices[0].cdi_device_ids;
        containers.push(runtime.run(&dir, &cdi_dir, devices, &program).await);
    }
    // What is in a container: its tenant, and no way to the daemon's API.
    let look = "ls /usr/local/gpumux/run; env; id -u; ls /dev";
    let devices = kubelet.prepare_one(&claims[0]).await.unwrap();
    let dir = scratch.path().join("look");
    let program = ["/bin/sh", "-c", look];
    let mut looking = runtime
        .run(&dir, &cdi_dir, &devices[0].cdi_device_ids, &program)
        .await;
    let end = Instant::now() + Duration::from_secs(30);
    let seen = loop {
        if let Some(seen) = runtime.ended(&mut looking).await {
            break seen;
        }
        assert!(Instant::now() < end, "it does not end");
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    runtime.stop(looking).await;
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
                domain.entitled_share,
                domain.received_share,
                domain.received_us,
            ))
        };
        claims.iter().map(of).collect()
    };
    until(
        &node,
        &runtime,
        &mut containers,
        "three running shares in the order of their guarantees",
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

    // Resized while it runs: now the second has the larger guarantee, and receives it.
    node.api.annotate(
        "team",
        "first",
        gpumux_dra::share::ANNOTATION,
        Some(r#"{"compute": 50, "limit": 100}"#),
    );
    until(
        &node,
        &runtime,
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
        &runtime,
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
    for container in containers {
        runtime.stop(container).await;
    }
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
    for sub in ["upper", "work", "usr"] {
        std::fs::create_dir_all(inside.join(sub)).unwrap();
    }
    let mut process = Process::start(&mut by_hand(&inside, &cdi, &devices, &args));
    gpumux_tests::wait_for("a tenant of the container", gpumux_tests::PATIENCE, || {
        assert!(process.poll().is_none(), "{}", process.err());
        let tenants = machine.ps()["tenants"].as_array().unwrap().clone();
        let tenant = tenants.first()?;
        (tenant["uid"] == 1000 && tenant["domains"][0]["demand"] == "busy").then_some(())
    });
}
