//! What a real Kubernetes 1.36.2 control plane showed that fakes had not: each test was one of its faults.

mod updates;

use std::{collections::BTreeSet, path::PathBuf};

use gpumux_daemon::client::Client as Daemon;
use gpumux_dra::{
    Config, cdi,
    device::Device,
    health::{self, Check},
    inventory::Inventory,
    proto::v1,
    start,
};
use gpumux_tests::{Node as Machine, Options, library};
use serde_json::{Value, json};

use crate::{
    chart,
    support::{
        api::{Api, Stored},
        kubelet::{Kubelet, given},
        node::{Node, config, device},
        scheduler::Scheduler,
    },
};

/// A node whose daemon knows its emulated devices, and the driver as the chart starts it.
async fn with_devices(devices: u32) -> (Machine, Node, gpumux_dra::Driver, Kubelet) {
    let machine = Machine::with(Options {
        devices,
        ..Options::default()
    });
    let node = Node {
        api: Api::start().await,
        scheduler: Scheduler::default(),
        daemon: Daemon::new(machine.dir()),
        dir: tempfile::tempdir().unwrap(),
    };
    let wait = async {
        loop {
            let there = node.daemon.devices().await.unwrap();
            if there
                .iter()
                .filter(|it| it.memory_guaranteeable > 0)
                .count()
                == devices as usize
            {
                return;
            }
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(gpumux_tests::PATIENCE, wait)
        .await
        .expect("the daemon finds its devices");
    let base = config(node.dir.path(), Vec::new());
    let config = Config {
        runtime_dir: machine.dir().to_owned(),
        inventory: Inventory::Node,
        host: cdi::Host {
            socket_dir: machine.dir().join("container"),
            emulator: Some(library("libgpumux_emu.so")),
            ..base.host
        },
        ..base
    };
    let (driver, kubelet) = node.start_with(config).await;
    (machine, node, driver, kubelet)
}

fn visible(file: &PathBuf) -> Vec<String> {
    let json: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    let devices = json["devices"].as_array().unwrap().iter();
    devices
        .flat_map(|device| device["containerEdits"]["env"].as_array().unwrap())
        .filter_map(|env| env.as_str()?.strip_prefix("CUDA_VISIBLE_DEVICES="))
        .map(str::to_owned)
        .collect()
}

/// B1, B2, B3: a daemon that knows its devices keeps what the slices offer, on the GPU that the scheduler chose.
#[tokio::test(flavor = "multi_thread")]
async fn each_gpu_gives_all_that_its_slice_offers() {
    let (_machine, mut node, driver, kubelet) = with_devices(2).await;
    // Most of both GPUs, compute and memory.
    let much = json!({"compute": "900", "memory": "60Gi"});
    let claims = ["a", "b"].map(|name| node.claim(name, "gpumux-guaranteed", much.clone(), None));
    let mut seen = Vec::new();
    for claim in &claims {
        kubelet.prepare_one(claim).await.unwrap();
        let tenant = node.tenant(claim).await.unwrap();
        assert_eq!(tenant.spec.guaranteed, 0.9);
        seen.extend(visible(&node.cdi_file(claim)));
    }
    seen.sort();
    let mut uuids: Vec<String> = driver
        .engine
        .devices
        .borrow()
        .iter()
        .map(|it| it.uuid.clone())
        .collect();
    uuids.sort();
    assert_eq!(seen, uuids, "each is tied to its GPU");
    // All memory that is left, to the last step: no claim that fits Kubernetes' books is refused by the daemon.
    let left = |device: &Device| device.capacity().memory - (60 << 30);
    let steps = driver
        .engine
        .devices
        .borrow()
        .iter()
        .map(left)
        .min()
        .unwrap()
        >> 28;
    let rest = json!({"memory": format!("{}Mi", steps * 256)});
    for name in ["c", "d"] {
        let claim = node.claim(name, "gpumux-preemptible", rest.clone(), None);
        kubelet.prepare_one(&claim).await.unwrap();
        kubelet.unprepare_one(&claim).await.unwrap();
    }
    for claim in &claims {
        kubelet.unprepare_one(claim).await.unwrap();
    }
    // Whole, with everything that belongs to it.
    node.scheduler = Scheduler::default();
    for name in ["w1", "w2"] {
        let claim = node.claim(name, "gpumux-whole", json!({}), None);
        kubelet.prepare_one(&claim).await.unwrap();
        let spec = node.tenant(&claim).await.unwrap().spec;
        assert_eq!((spec.guaranteed, spec.memory_limit), (1.0, None));
    }
    driver.stop().await;
}

/// One tenant on two GPUs sees both, whatever order its variables come in.
#[tokio::test(flavor = "multi_thread")]
async fn one_request_for_two_gpus_is_one_tenant_that_sees_both() {
    let mut node = Node::new().await;
    let mut config = node.config();
    config.inventory = Inventory::Fixed(vec![device(0), device(1)]);
    let (driver, kubelet) = node.start_with(config).await;
    let request = json!([{"name": "gpu", "exactly": {"deviceClassName": "gpumux-guaranteed", "count": 2,
        "capacity": {"requests": {"compute": "500"}}}}]);
    let claim = allocated(&mut node, "two", request);
    let devices = kubelet.prepare_one(&claim).await.unwrap();
    assert_eq!(given(&devices, Some("gpu")).len(), 2);
    let both = [device(0).uuid, device(1).uuid].join(",");
    assert_eq!(visible(&node.cdi_file(&claim)), [both.clone(), both]);
    assert_eq!(node.daemon.tenants().await.unwrap().len(), 1);
    driver.stop().await;
}

/// Makes a claim with these requests, and has it allocated.
fn allocated(node: &mut Node, name: &str, requests: Value) -> v1::Claim {
    let claim = json!({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
        "spec": {"devices": {"requests": requests}}});
    let made = node.api.put_claim("team", name, claim);
    assert!(
        node.scheduler.bind(&node.api, "team", name, name),
        "{name} does not fit"
    );
    v1::Claim {
        namespace: "team".into(),
        name: name.into(),
        uid: made["metadata"]["uid"].as_str().unwrap().into(),
    }
}

/// B4: the kubelet gives a container nothing, without an error, if names of alternatives come back to it.
#[tokio::test(flavor = "multi_thread")]
async fn container_that_names_a_prioritized_request_gets_its_device() {
    let mut node = Node::new().await;
    let (driver, kubelet) = node.start().await;
    node.claim(
        "first",
        "gpumux-guaranteed",
        json!({"compute": "600"}),
        None,
    );
    let share = |name: &str, compute: &str| json!({"name": name, "deviceClassName": "gpumux-guaranteed", "capacity": {"requests": {"compute": compute}}});
    let requests =
        json!([{"name": "gpu", "firstAvailable": [share("big", "900"), share("small", "300")]}]);
    let claim = allocated(&mut node, "either", requests);
    let chosen = node.api.claim("team", "either").unwrap();
    let chosen = chosen
        .pointer("/status/allocation/devices/results/0/request")
        .unwrap();
    assert_eq!(chosen, "gpu/small");
    let devices = kubelet.prepare_one(&claim).await.unwrap();
    let id = format!("gpumux.dev/share={}-0", claim.uid);
    for request in [Some("gpu"), None] {
        assert_eq!(
            given(&devices, request),
            *std::slice::from_ref(&id),
            "{request:?}"
        );
    }
    assert!(given(&devices, Some("other")).is_empty());
    assert_eq!(node.tenant(&claim).await.unwrap().spec.guaranteed, 0.3);
    driver.stop().await;
}

/// B5: the API server refuses the status of claims whose parameters another client wrote.
#[tokio::test(flavor = "multi_thread")]
async fn status_that_the_server_refuses_is_reduced_or_reported() {
    let mut node = Node::new().await;
    let (driver, kubelet) = node.start().await;
    for (name, stored) in [
        ("plain", Stored::Canonical),
        ("unsorted", Stored::Unsorted),
        ("spaced", Stored::Spaced),
    ] {
        let share = json!({"weight": 2});
        let claim = node.claim(name, "gpumux-preemptible", json!({}), Some(share));
        node.api.store_parameters("team", name, stored);
        kubelet.prepare_one(&claim).await.unwrap();
    }
    for name in ["plain", "unsorted"] {
        let ready = |api: &Api| {
            let claim = api.claim("team", name)?;
            let condition = claim.pointer("/status/devices/0/conditions/0")?;
            (condition["status"] == "True").then_some(())
        };
        node.api.until(ready).await;
    }
    let refused = |api: &Api| {
        let events = api.events("team");
        let event = events
            .into_iter()
            .find(|(reason, _)| reason == "StatusRefused")?;
        Some(event.1)
    };
    let note = node.api.until(refused).await;
    assert!(note.contains("field is immutable"), "{note}");
    // A refused resize is seen there, too.
    node.api.annotate(
        "team",
        "spaced",
        "gpumux.dev/share",
        Some(r#"{"compute": 900}"#),
    );
    let resize = |api: &Api| {
        let mut events = api.events("team").into_iter();
        events.find(|(reason, _)| reason == "ShareResizeRefused")
    };
    let (_, note) = node.api.until(resize).await;
    assert_eq!(note, "compute 900 is out of range: use 0 to 0");
    let count = node
        .api
        .events("team")
        .iter()
        .filter(|it| it.0 == "StatusRefused")
        .count();
    assert_eq!(count, 1, "each is reported once");
    driver.stop().await;
}

/// The server stores numbers as Go writes them. Changes that are not the driver's business lead to no write.
#[tokio::test(flavor = "multi_thread")]
async fn status_that_says_nothing_new_is_not_written_again() {
    let mut node = Node::new().await;
    let (driver, kubelet) = node.start().await;
    let share = json!({"weight": 2});
    let claim = node.claim("c", "gpumux-preemptible", json!({}), Some(share));
    kubelet.prepare_one(&claim).await.unwrap();
    let resize = async |weight: u64| {
        let text = json!({"weight": weight}).to_string();
        node.api
            .annotate("team", "c", "gpumux.dev/share", Some(&text));
        let written = |api: &Api| {
            let claim = api.claim("team", "c")?;
            let now = claim.pointer("/status/devices/0/data/weight")?;
            (*now == weight).then_some(())
        };
        node.api.until(written).await;
        node.api.calls("patch resourceclaims/status")
    };
    let before = resize(3).await;
    for n in 0..3 {
        let note = Some(n.to_string());
        node.api
            .annotate("team", "c", "example.com/note", note.as_deref());
    }
    assert_eq!(resize(4).await, before + 1);
    driver.stop().await;
}

/// Verb and resource of each right that the chart's role gives the driver.
fn rights() -> BTreeSet<String> {
    let objects = chart::render();
    let is_role = |object: &&Value| {
        object["kind"] == "ClusterRole" && object["metadata"]["name"] == "gpumux-dra"
    };
    let role = objects.iter().find(is_role).unwrap();
    let texts = |list: &Value| -> Vec<String> { serde_json::from_value(list.clone()).unwrap() };
    let rules = role["rules"].as_array().unwrap().iter();
    rules
        .flat_map(|rule| {
            let (verbs, resources) = (texts(&rule["verbs"]), texts(&rule["resources"]));
            verbs.into_iter().flat_map(move |verb| {
                let right = move |resource: &String| format!("{verb} {resource}");
                resources.iter().map(right).collect::<Vec<_>>()
            })
        })
        .collect()
}

/// The role allows what the driver asks for in its life, and nothing else.
#[tokio::test(flavor = "multi_thread")]
async fn driver_uses_each_of_its_rights_and_no_other() {
    let mut node = Node::new().await;
    let (driver, kubelet) = node.start().await;
    let claim = node.preemptible("c");
    kubelet.prepare_one(&claim).await.unwrap();
    let resize = Some(r#"{"weight": 2}"#);
    node.api.annotate("team", "c", "gpumux.dev/share", resize);
    let reported = |api: &Api| {
        let mut events = api.events("team").into_iter();
        events.find(|(reason, _)| reason == "ShareResized")
    };
    node.api.until(reported).await;
    let watched = async {
        while node.api.calls("watch resourceclaims") == 0 {
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(gpumux_tests::PATIENCE, watched)
        .await
        .expect("a watch of claims");
    driver.stop().await;
    // A node that loses devices has fewer slices.
    let slices = kube::Api::all(node.api.client.clone());
    let own = gpumux_dra::publish::node(&node.api.client, "node1")
        .await
        .unwrap();
    let many: Vec<_> = (0..40).map(device).collect();
    for devices in [&many[..], &many[..1]] {
        gpumux_dra::publish::reconcile(&slices, &own, devices)
            .await
            .unwrap();
    }
    let mut used = node.api.used();
    // From 1.36 the real server also asks whether a status is that of the driver's own devices, on its own node.
    assert!(used.contains("patch resourceclaims/status"));
    used.insert("associated-node:patch resourceclaims/driver".to_owned());
    assert_eq!(used, rights());
}
