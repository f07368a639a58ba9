//! From registration to unprepare, and everything that can go wrong on the way.

mod crowd;
mod failures;
mod metrics;

use crate::support::{
    api::Api,
    kubelet::{Connection, Failure, Kubelet},
    node::{Node, config, device},
};
use gpumux_dra::{
    Config, Error,
    device::Device,
    inventory::Inventory,
    kubelet::KubeletError,
    proto::v1,
    proto::{health::HealthStatus, pod_resources},
    slices, start,
};
use serde_json::{Value, json};
use std::{os::unix::fs::PermissionsExt, path::Path};

fn cdi_env(path: &Path) -> Vec<String> {
    let file: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    serde_json::from_value(file["devices"][0]["containerEdits"]["env"].clone()).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn two_guarantees_and_a_preemptible_claim_share_one_gpu() {
    let mut node = Node::new().await;
    let (driver, kubelet) = node.start().await;
    assert_eq!(
        kubelet.services,
        [
            "v1.DRAPlugin",
            "v1beta1.DRAPlugin",
            "v1.DRAResourceHealth",
            "v1alpha1.DRAResourceHealth"
        ]
    );
    let first = node.claim(
        "first",
        "gpumux-guaranteed",
        json!({"compute": "500"}),
        Some(json!({"class": "latency"})),
    );
    let second = node.claim(
        "second",
        "gpumux-guaranteed",
        json!({"compute": "295"}),
        Some(json!({"burst": 100})),
    );
    let batch = node.preemptible("batch");
    let claims = [first.clone(), second.clone(), batch.clone()];
    let prepared = kubelet.prepare(&claims).await.unwrap();
    for claim in &claims {
        let devices = prepared[&claim.uid].as_ref().unwrap();
        assert_eq!(devices.len(), 1);
        assert_eq!(
            (
                devices[0].device_name.as_str(),
                devices[0].pool_name.as_str()
            ),
            ("gpu-0", "node1")
        );
        assert_eq!(devices[0].request_names, ["gpu"]);
        assert_eq!(
            devices[0].cdi_device_ids,
            [format!("gpumux.dev/share={}-0", claim.uid)]
        );
        assert!(devices[0].share_id.is_some());
    }
    for (claim, class, guaranteed, limit) in [
        (&first, "latency", 0.5, 1.0),
        (&second, "standard", 0.3, 0.4),
        (&batch, "batch", 0.0, 1.0),
    ] {
        let tenant = node.tenant(claim).await.unwrap();
        assert_eq!(
            (
                tenant.class.name(),
                tenant.spec.guaranteed,
                tenant.spec.limit
            ),
            (class, guaranteed, limit)
        );
        let file = node.cdi_file(claim);
        assert_eq!(
            file.metadata().unwrap().permissions().mode() & 0o077,
            0,
            "it has a secret in it"
        );
        assert!(
            cdi_env(&file)
                .iter()
                .any(|env| env.starts_with("GPUMUX_TENANT="))
        );
    }
    // The same again, in both versions of the protocol, changes nothing.
    let env = cdi_env(&node.cdi_file(&first));
    assert_eq!(
        kubelet.prepare_one(&first).await.unwrap(),
        *prepared[&first.uid].as_ref().unwrap()
    );
    assert_eq!(
        kubelet.prepare_old(&first).await.unwrap()[0].cdi_device_ids[0],
        format!("gpumux.dev/share={}-0", first.uid)
    );
    assert_eq!(cdi_env(&node.cdi_file(&first)), env);
    assert_eq!(node.daemon.tenants().await.unwrap().len(), 3);

    // The claims say what they have.
    let data = |api: &Api, claim: &str| {
        api.claim("team", claim)?
            .pointer("/status/devices/0/data")
            .cloned()
    };
    let facts = node.api.until(|api| data(api, "first")).await;
    assert_eq!(
        (&facts["guaranteed"]["compute"], &facts["class"]),
        (&json!(500), &json!("latency"))
    );

    // Live: within the allocation it is done, beyond it is refused and said.
    node.api.annotate(
        "team",
        "first",
        "gpumux.dev/share",
        Some(r#"{"compute": 200, "limit": 600, "weight": 4}"#),
    );
    node.api
        .until(|api| (data(api, "first")?["guaranteed"]["compute"] == 200).then_some(()))
        .await;
    let spec = node.tenant(&first).await.unwrap().spec;
    assert_eq!((spec.guaranteed, spec.limit, spec.weight), (0.2, 0.6, 4.0));
    node.api.annotate(
        "team",
        "first",
        "gpumux.dev/share",
        Some(r#"{"compute": 600}"#),
    );
    let refused = |api: &Api| {
        let claim = api.claim("team", "first")?;
        let condition = claim.pointer("/status/devices/0/conditions/1")?.clone();
        (condition["status"] == "False").then_some(condition)
    };
    let condition = node.api.until(refused).await;
    assert_eq!(condition["type"], "ShareApplied");
    assert_eq!(
        condition["message"],
        "compute 600 is out of range: use 0 to 500"
    );
    assert_eq!(
        node.tenant(&first).await.unwrap().spec.guaranteed,
        0.2,
        "as before"
    );
    node.api.annotate("team", "first", "gpumux.dev/share", None);
    node.api
        .until(|api| (data(api, "first")?["guaranteed"]["compute"] == 500).then_some(()))
        .await;
    assert_eq!(node.tenant(&first).await.unwrap().spec.guaranteed, 0.5);

    // One goes while its claim does not exist any more; one was never there.
    node.api.delete_claim("team", "second");
    for claim in [
        &second,
        &second,
        &v1::Claim {
            uid: "never".into(),
            ..second.clone()
        },
    ] {
        kubelet.unprepare_one(claim).await.unwrap();
    }
    assert!(node.tenant(&second).await.is_none() && !node.cdi_file(&second).exists());
    kubelet.unprepare_one(&first).await.unwrap();
    kubelet.unprepare_one(&batch).await.unwrap();
    assert_eq!(
        (node.daemon.tenants().await.unwrap().len(), node.records()),
        (0, 0)
    );
    assert_eq!(std::fs::read_dir(node.path("cdi")).unwrap().count(), 0);
    driver.stop().await;
    let left = |dir: &str| std::fs::read_dir(node.path(dir)).unwrap().count();
    assert_eq!(left("plugins_registry"), 0, "no socket stays");
}

#[tokio::test(flavor = "multi_thread")]
async fn without_the_shim_the_kubelet_could_not_register() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("plain.sock");
    let listener = tokio::net::UnixListener::bind(&socket).unwrap();
    let server = tonic::transport::Server::builder().add_routes(tonic::service::Routes::default());
    tokio::spawn(
        server.serve_with_incoming(tokio_stream::wrappers::UnixListenerStream::new(listener)),
    );
    let mut connection = Connection::bare(&socket).await.unwrap();
    let info = gpumux_dra::proto::registration::InfoRequest {};
    let answer: Result<gpumux_dra::proto::registration::PluginInfo, _> = connection
        .call("/pluginregistration.Registration/GetInfo", &info)
        .await;
    assert_eq!(
        answer.unwrap_err(),
        Failure::Reset(1),
        "PROTOCOL_ERROR, as from the real kubelet"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn slices_come_back_and_follow_the_devices() {
    let node = Node::new().await;
    let (devices, watched) = tokio::sync::watch::channel(std::sync::Arc::new(vec![device(0)]));
    let (result, published) = tokio::sync::watch::channel(Default::default());
    let own = slices::Node {
        name: "node1".into(),
        uid: "u".into(),
    };
    tokio::spawn(gpumux_dra::publish::run(
        node.api.client.clone(),
        own,
        watched,
        result,
    ));
    let complete = |api: &Api, generation: i64| {
        let slices = api.slices();
        let good = slices.len() == 2
            && slices
                .iter()
                .all(|slice| slice.spec.pool.generation >= generation);
        good.then_some(slices)
    };
    node.api.until(|api| complete(api, 1)).await;
    // The kubelet starts.
    node.api.wipe_slices();
    node.api.until(|api| complete(api, 1)).await;
    // Another client changes a slice.
    let mut slice = serde_json::to_value(&node.api.slices()[1]).unwrap();
    slice["spec"]["devices"] = json!([]);
    let name = slice["metadata"]["name"].as_str().unwrap().to_owned();
    node.api.put("resourceslices", "", &name, slice);
    let whole = |api: &Api| {
        complete(api, 2)?[1]
            .spec
            .devices
            .as_ref()
            .is_some_and(|d| d.len() == 2)
            .then_some(())
    };
    node.api.until(whole).await;
    // A device breaks.
    let broken = Device {
        fault: Some("lost".into()),
        evict: true,
        ..device(0)
    };
    devices.send(std::sync::Arc::new(vec![broken])).unwrap();
    let tainted = |api: &Api| {
        complete(api, 3)?[1].spec.devices.as_ref()?[0]
            .taints
            .clone()
    };
    assert_eq!(node.api.until(tainted).await[0].effect, "NoExecute");
    // As it is, nothing more is written.
    let writes = node.api.calls("update resourceslices");
    let pool = slices::Node {
        name: "node1".into(),
        uid: "u".into(),
    };
    let broken = Device {
        fault: Some("lost".into()),
        evict: true,
        ..device(0)
    };
    let api = kube::Api::all(node.api.client.clone());
    gpumux_dra::publish::reconcile(&api, &pool, &[broken])
        .await
        .unwrap();
    assert_eq!(node.api.calls("update resourceslices"), writes);
    drop(published);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_without_the_feature_is_named() {
    let node = Node::new().await;
    node.api.turn_gate_off();
    let own = slices::Node {
        name: "node1".into(),
        uid: "u".into(),
    };
    let api = kube::Api::all(node.api.client.clone());
    let error = gpumux_dra::publish::reconcile(&api, &own, &[device(0)])
        .await
        .unwrap_err()
        .to_string();
    assert!(error.contains("Kubernetes 1.36"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_wrong_is_said_and_nothing_is_half_prepared() {
    let mut node = Node::new().await;
    let (driver, kubelet) = node.start().await;
    let mut errors = Vec::new();
    let unknown = node.claim(
        "unknown-field",
        "gpumux-guaranteed",
        json!({"compute": "10"}),
        Some(json!({"prio": 1})),
    );
    errors.push((unknown, "unknown field `prio`"));
    let nothing = node.claim("nothing", "gpumux-guaranteed", json!({}), None);
    errors.push((nothing, "tier `guaranteed` needs guaranteed compute"));
    let below = node.claim(
        "below",
        "gpumux-guaranteed",
        json!({"compute": "300"}),
        Some(json!({"limit": 100})),
    );
    errors.push((below, "limit 100 is out of range: use 300 to 1000"));

    let foreign = node.preemptible("foreign");
    let mut claim = node.api.claim("team", "foreign").unwrap();
    claim["status"]["allocation"]["devices"]["results"][0]["driver"] = json!("gpu.example.com");
    node.api.put_claim("team", "foreign", claim);
    errors.push((
        foreign,
        "claim team/foreign has no device of driver gpumux.dev",
    ));

    let vanished = node.preemptible("vanished");
    node.api.delete_claim("team", "vanished");
    errors.push((vanished, "claim team/vanished does not exist"));

    let anew = node.preemptible("anew");
    errors.push((
        v1::Claim {
            uid: "00000000-dead".into(),
            ..anew.clone()
        },
        "made anew",
    ));

    // A scheduler that gives out more than there is.
    let good = node.claim("good", "gpumux-guaranteed", json!({"compute": "600"}), None);
    kubelet.prepare_one(&good).await.unwrap();
    let greedy = node.claim(
        "greedy",
        "gpumux-guaranteed",
        json!({"compute": "10"}),
        None,
    );
    let mut claim = node.api.claim("team", "greedy").unwrap();
    claim["status"]["allocation"]["devices"]["results"][0]["consumedCapacity"]["compute"] =
        json!("500");
    node.api.put_claim("team", "greedy", claim);
    errors.push((greedy, "has 400 of 1000 compute left, and 500 was allocated to this claim; it is held by team/good"));

    let all: Vec<_> = errors
        .iter()
        .map(|(claim, _)| claim.clone())
        .chain([good.clone()])
        .collect();
    let answers = kubelet.prepare(&all).await.unwrap();
    for (claim, message) in &errors {
        let error = answers[&claim.uid].as_ref().unwrap_err();
        assert!(error.contains(message), "{}: {error}", claim.name);
        assert!(
            !node.cdi_file(claim).exists() && node.tenant(claim).await.is_none(),
            "{}",
            claim.name
        );
    }
    assert!(answers[&good.uid].is_ok(), "one bad claim harms no other");
    assert_eq!(node.records(), 1);
    // All of them can be unprepared, and a uid that is none is refused before it becomes a path.
    for (claim, _) in &errors {
        kubelet.unprepare_one(claim).await.unwrap();
    }
    let path = v1::Claim {
        uid: "../../x".into(),
        ..good.clone()
    };
    let failure = kubelet.prepare(&[path]).await.unwrap_err();
    assert!(matches!(failure, Failure::Status(code, _) if code == "3"));
    driver.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn all_parameters_reach_the_daemon() {
    let mut node = Node::new().await;
    let (driver, kubelet) = node.start().await;
    let parameters =
        json!({"trustDomain": "team-a", "sleep": {"afterSeconds": 30}, "memoryLimit": "4Gi"});
    let capacity = json!({"memory": "2Gi"});
    let claim = node.claim("c", "gpumux-preemptible", capacity, Some(parameters));
    kubelet.prepare_one(&claim).await.unwrap();
    let tenant = node.tenant(&claim).await.unwrap();
    assert_eq!(tenant.placement.trust.as_deref(), Some("team-a"));
    let context = device(0).context_bytes;
    assert_eq!(
        (
            tenant.spec.memory_guaranteed,
            tenant.spec.memory_limit,
            tenant.spec.sleep_after_s
        ),
        ((2 << 30) - context, Some((4 << 30) - context), Some(30))
    );
    // The program is shown the limit from its beginning.
    let limit = format!("{}={}", "GPUMUX_MEMORY_LIMIT", (4u64 << 30) - context);
    let env = cdi_env(&node.cdi_file(&claim));
    assert!(
        env.iter()
            .any(|one| one.ends_with(&limit[limit.find('=').unwrap()..])),
        "{env:?}"
    );
    node.api.annotate(
        "team",
        "c",
        "gpumux.dev/share",
        Some(r#"{"memoryLimit": "requested"}"#),
    );
    let limited = |api: &Api| {
        let claim = api.claim("team", "c")?;
        let memory = claim.pointer("/status/devices/0/data/memory")?.clone();
        (memory["limit"] == (2u64 << 30) - context).then_some(())
    };
    node.api.until(limited).await;
    kubelet.unprepare_one(&claim).await.unwrap();
    driver.stop().await;
}
