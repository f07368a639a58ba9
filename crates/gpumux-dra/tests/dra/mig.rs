//! MIG instances that are made for claims and removed after them, with the real daemon on emulated GPUs in MIG mode.

mod crashes;

use std::{path::PathBuf, sync::OnceLock, time::Duration};

use gpumux_daemon::{
    api::types::{MigInstance, NewMigInstance},
    client::Client as Daemon,
};
use gpumux_dra::{Config, inventory::Inventory, prepare::Step, proto::v1, start};
use gpumux_tests::{Node as Machine, Options, PATIENCE, Process, binary};
use serde_json::{Value, json};

use crate::{
    crash::Driver,
    support::{
        api::Api,
        kubelet::Kubelet,
        node::{self, Node},
        scheduler::Scheduler,
    },
};

/// A machine with one GPU in MIG mode, which has no instance, and a node on it.
async fn machine(variables: &[(&str, &str)]) -> (Machine, Node) {
    let mut machine = Machine::with(Options {
        profile: "mig_mode = [true]\n",
        without_daemon: true,
        ..Options::default()
    });
    for (name, value) in variables {
        machine.set_variable(name, value);
    }
    machine.start_daemon();
    let node = Node {
        api: Api::start().await,
        scheduler: Scheduler::default(),
        daemon: Daemon::new(machine.dir()),
        dir: tempfile::tempdir().unwrap(),
    };
    (machine, node)
}

fn config(machine: &Machine, node: &Node) -> Config {
    Config {
        inventory: Inventory::Node,
        mig_repartition: true,
        runtime_dir: machine.dir().to_owned(),
        ..node::config(node.dir.path(), Vec::new())
    }
}

async fn driver(machine: &Machine, node: &Node) -> (gpumux_dra::Driver, Kubelet) {
    let config = config(machine, node);
    let (driver, kubelet) = node.start_with(config).await;
    (driver, kubelet)
}

/// A claim of an instance, before the scheduler has seen it.
fn put(node: &Node, name: &str, profile: &str) -> v1::Claim {
    let expression = format!("device.attributes['gpumux.dev'].profile == '{profile}'");
    let claim = json!({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": {
            "deviceClassName": "gpumux-mig", "allocationMode": "ExactCount", "count": 1,
            "selectors": [{"cel": {"expression": expression}}]}}]}}});
    let made = node.api.put_claim("team", name, claim);
    v1::Claim {
        namespace: "team".into(),
        name: name.into(),
        uid: made["metadata"]["uid"].as_str().unwrap().into(),
    }
}

fn claim(node: &mut Node, name: &str, profile: &str) -> v1::Claim {
    let claim = put(node, name, profile);
    let fits = node.scheduler.bind(&node.api, "team", name, name);
    assert!(fits, "{name} does not fit");
    claim
}

/// The instances of the GPU.
async fn instances(node: &Node) -> Vec<MigInstance> {
    node.daemon.mig_gpus().await.unwrap().remove(0).instances
}

async fn make(node: &Node, profile: &str, start: u32) -> MigInstance {
    let gpu = node.daemon.mig_gpus().await.unwrap().remove(0).uuid;
    let new = NewMigInstance {
        gpu,
        profile: profile.into(),
        start,
    };
    node.daemon.make_mig(&new).await.unwrap()
}

/// The names of all published devices.
fn published(node: &Node) -> Vec<String> {
    let slices = node.api.slices();
    let devices = slices
        .iter()
        .flat_map(|it| it.spec.devices.iter().flatten());
    devices.map(|device| device.name.clone()).collect()
}

/// The profile and place of a name such as `gpu-0-mig-1g-10gb-at-3`.
fn allocated(node: &Node, claim: &v1::Claim) -> String {
    let claim = node.api.claim("team", &claim.name).unwrap();
    let result = &claim["status"]["allocation"]["devices"]["results"][0];
    result["device"].as_str().unwrap().to_owned()
}

async fn until(what: &str, good: impl AsyncFn() -> bool) {
    let end = std::time::Instant::now() + PATIENCE;
    while !good().await {
        assert!(std::time::Instant::now() < end, "{what} does not come");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn claim_has_an_instance_for_as_long_as_it_is_prepared() {
    let (machine, mut node) = machine(&[]).await;
    let (driver, kubelet) = driver(&machine, &node).await;
    assert_eq!(published(&node).len(), 25, "all places of an H100");
    let claim2 = claim(&mut node, "a", "2g.20gb");
    assert_eq!(allocated(&node, &claim2), "gpu-0-mig-2g-20gb-at-0");
    let devices = kubelet.prepare_one(&claim2).await.unwrap();
    assert_eq!(devices[0].device_name, "gpu-0-mig-2g-20gb-at-0");
    let made = instances(&node).await;
    assert_eq!((made.len(), made[0].start), (1, 0));
    let uuid = &made[0].compute_instances[0].device;
    let tenant = node.tenant(&claim2).await.unwrap();
    assert_eq!(
        (&tenant.may_use, tenant.spec.guaranteed),
        (&vec![uuid.clone()], 1.0)
    );
    let file = std::fs::read_to_string(node.cdi_file(&claim2)).unwrap();
    assert!(
        file.contains(&format!("CUDA_VISIBLE_DEVICES={uuid}")),
        "{file}"
    );
    // The kubelet may ask again, and the scheduler gives no part of it to another.
    kubelet.prepare_one(&claim2).await.unwrap();
    assert_eq!(instances(&node).await, made);
    let whole = put(&node, "whole", "7g.80gb");
    assert!(!node.scheduler.bind(&node.api, "team", "whole", "whole"));
    let beside = claim(&mut node, "b", "3g.40gb");
    assert_eq!(allocated(&node, &beside), "gpu-0-mig-3g-40gb-at-4");
    kubelet.prepare_one(&beside).await.unwrap();
    assert_eq!(instances(&node).await.len(), 2);
    // What is made for claims changes no slice, so that none is written anew for each claim.
    let generation = node.api.slices()[0].spec.pool.generation;
    tokio::time::sleep(Duration::from_secs(6)).await;
    assert_eq!(node.api.slices()[0].spec.pool.generation, generation);
    assert_eq!(published(&node).len(), 25);

    for claim in [&claim2, &beside] {
        kubelet.unprepare_one(claim).await.unwrap();
        kubelet.unprepare_one(claim).await.unwrap();
    }
    assert_eq!(instances(&node).await, []);
    assert_eq!(node.records(), 0);
    node.scheduler = Scheduler::default();
    assert!(node.scheduler.bind(&node.api, "team", "whole", "whole"));
    kubelet.prepare_one(&whole).await.unwrap();
    assert_eq!(instances(&node).await[0].profile, "7g.80gb");
    driver.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn instances_of_others_are_offered_as_they_are_and_stay() {
    let (machine, mut node) = machine(&[]).await;
    let theirs = make(&node, "3g.40gb", 0).await;
    let (driver, kubelet) = driver(&machine, &node).await;
    let names = published(&node);
    assert!(names.contains(&"gpu-0-mig-1-0".to_owned()), "{names:?}");
    assert!(
        names.contains(&"gpu-0-mig-1-0-whole".to_owned()),
        "{names:?}"
    );
    let places: Vec<_> = names.iter().filter(|name| name.contains("-at-")).collect();
    assert!(!places.is_empty());
    for name in places {
        let start: u32 = name.rsplit('-').next().unwrap().parse().unwrap();
        assert!(start >= 4, "{name}");
    }
    let own = claim(&mut node, "own", "2g.20gb");
    kubelet.prepare_one(&own).await.unwrap();
    // A share of theirs works as before.
    let share = node.half("share");
    kubelet.prepare_one(&share).await.unwrap();
    for claim in [&own, &share] {
        kubelet.unprepare_one(claim).await.unwrap();
    }
    assert_eq!(instances(&node).await, std::slice::from_ref(&theirs));

    // Someone is faster than the kubelet: the claim waits, and theirs is not touched.
    let late = claim(&mut node, "late", "1g.10gb");
    let name = allocated(&node, &late);
    let place: u32 = name.rsplit('-').next().unwrap().parse().unwrap();
    let second = make(&node, "1g.10gb", place).await;
    for _ in 0..2 {
        let error = kubelet.prepare_one(&late).await.unwrap_err();
        assert!(
            error.contains("no device gpu-0-mig-1g-10gb")
                || error.contains("this claim has not made"),
            "{error}"
        );
    }
    kubelet.unprepare_one(&late).await.unwrap();
    assert_eq!(instances(&node).await, [theirs.clone(), second]);
    driver.stop().await;
    let (driver, _) = self::driver(&machine, &node).await;
    driver.engine.restore().await.unwrap();
    assert_eq!(instances(&node).await.len(), 2);
    driver.stop().await;
}

/// The runtime directory of the daemon at which someone else makes an instance.
static FASTER: OnceLock<PathBuf> = OnceLock::new();

/// Between the driver's record and its request.
#[tokio::test(flavor = "multi_thread")]
async fn instance_that_others_made_meanwhile_is_not_taken() {
    let (machine, mut node) = machine(&[]).await;
    FASTER.set(machine.dir().to_owned()).unwrap();
    let config = Config {
        after: |step| {
            if step != Step::Recorded {
                return;
            }
            let make = async || {
                let daemon = Daemon::new(FASTER.get().unwrap());
                let gpu = daemon.mig_gpus().await.unwrap().remove(0).uuid;
                let (profile, start) = ("1g.10gb".into(), 0);
                let new = NewMigInstance {
                    gpu,
                    profile,
                    start,
                };
                // Only the first time there is room.
                let _ = daemon.make_mig(&new).await;
            };
            let run = move || {
                let mut runtime = tokio::runtime::Builder::new_current_thread();
                let runtime = runtime.enable_all().build().unwrap();
                runtime.block_on(make());
            };
            std::thread::spawn(run).join().unwrap();
        },
        ..config(&machine, &node)
    };
    let (driver, kubelet) = node.start_with(config).await;
    let claim = claim(&mut node, "a", "1g.10gb");
    assert_eq!(allocated(&node, &claim), "gpu-0-mig-1g-10gb-at-0");
    let error = kubelet.prepare_one(&claim).await.unwrap_err();
    assert!(error.contains("has no room"), "{error}");
    let theirs = instances(&node).await;
    assert_eq!((theirs.len(), node.records()), (1, 0));
    kubelet.prepare_one(&claim).await.unwrap_err();
    kubelet.unprepare_one(&claim).await.unwrap();
    driver.engine.restore().await.unwrap();
    assert_eq!(instances(&node).await, theirs);
    driver.stop().await;
}

/// A container that has not ended yet: the kubelet asks again.
#[tokio::test(flavor = "multi_thread")]
async fn instance_in_use_is_removed_once_it_is_idle() {
    let (machine, mut node) = machine(&[]).await;
    let (driver, kubelet) = driver(&machine, &node).await;
    let claim = claim(&mut node, "a", "1g.10gb");
    kubelet.prepare_one(&claim).await.unwrap();
    let uuid = instances(&node).await[0].compute_instances[0]
        .device
        .clone();
    let mut command = machine.on_device([
        binary().to_str().unwrap(),
        "workload",
        "check",
        "--seconds",
        "60",
    ]);
    let program = Process::start(command.env("CUDA_VISIBLE_DEVICES", &uuid));
    let is_used = async || {
        let devices = node.daemon.devices().await.unwrap();
        let found = devices.iter().find(|it| it.uuid == uuid);
        found.is_some_and(|it| !it.foreign.is_empty())
    };
    until("the program", is_used).await;
    let error = kubelet.unprepare_one(&claim).await.unwrap_err();
    assert!(error.contains(&uuid) && error.contains("pid"), "{error}");
    assert_eq!((instances(&node).await.len(), node.records()), (1, 1));
    program.kill();
    until("the removal", async || {
        kubelet.unprepare_one(&claim).await.is_ok()
    })
    .await;
    assert_eq!((instances(&node).await.len(), node.records()), (0, 0));
    driver.stop().await;
}

/// Off by default: GPUs in MIG mode offer the instances that they have, and none is made.
#[tokio::test(flavor = "multi_thread")]
async fn no_instance_is_made_unless_that_is_switched_on() {
    let (machine, node) = machine(&[]).await;
    let theirs = make(&node, "1g.10gb", 0).await;
    let config = Config {
        mig_repartition: false,
        ..config(&machine, &node)
    };
    let driver = start(config, node.api.client.clone()).await.unwrap();
    node.api.until_published().await;
    assert_eq!(published(&node), ["gpu-0-mig-7-0", "gpu-0-mig-7-0-whole"]);
    assert_eq!(instances(&node).await, [theirs]);
    driver.stop().await;
    let slices: Value = serde_json::to_value(node.api.slices()).unwrap();
    assert!(!slices.to_string().contains("memory-slice"), "{slices}");
}

#[tokio::test(flavor = "multi_thread")]
async fn claims_keep_their_instances_when_it_is_switched_off() {
    let (machine, mut node) = machine(&[]).await;
    let (driver, kubelet) = driver(&machine, &node).await;
    let claim = claim(&mut node, "a", "1g.10gb");
    kubelet.prepare_one(&claim).await.unwrap();
    let made = instances(&node).await;
    driver.stop().await;
    let config = Config {
        mig_repartition: false,
        ..config(&machine, &node)
    };
    let registry = config.places.registry.clone();
    let driver = start(config, node.api.client.clone()).await.unwrap();
    let kubelet = Kubelet::register(&registry).await;
    // No other claim is offered what it has.
    until("other slices", async || {
        published(&node) == [allocated(&node, &claim)]
    })
    .await;
    kubelet.prepare_one(&claim).await.unwrap();
    assert_eq!(instances(&node).await, made);
    kubelet.unprepare_one(&claim).await.unwrap();
    assert_eq!(instances(&node).await, []);
    driver.stop().await;
}
