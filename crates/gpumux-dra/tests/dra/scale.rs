//! What a full node and a large cluster ask of the API server: the bounds of the chapter on Kubernetes.

use std::time::{Duration, Instant};

use gpumux_dra::{proto::v1, slices};
use serde_json::json;

use crate::support::{
    api::Api,
    node::{Node, device},
};

/// Claims of a full node.
const CLAIMS: usize = 200;

#[tokio::test(flavor = "multi_thread")]
async fn full_node_asks_the_api_server_little_and_idle_nothing() {
    let (node, driver, kubelet, claims) = Node::full(CLAIMS).await;
    let before = node.api.all_calls();
    for claim in &claims {
        kubelet.prepare_one(claim).await.unwrap();
    }
    let written = |api: &Api| {
        let status = |claim: &v1::Claim| {
            let claim = api.claim("team", &claim.name)?;
            claim.pointer("/status/devices/0/data").map(drop)
        };
        claims.iter().map(status).collect::<Option<Vec<()>>>()
    };
    node.api.until(written).await;
    // Each claim: read to prepare it, read again to write its status, written, and perhaps once more by what the watch brings.
    let asked = settled(&node.api).await - before;
    assert!(
        asked <= CLAIMS * 4 + 4,
        "{asked} requests for {CLAIMS} claims"
    );
    // A full node that has nothing to do asks for nothing: watches are open, and nothing is polled.
    let before = node.api.all_calls();
    let idle = Duration::from_secs(6);
    tokio::time::sleep(idle).await;
    let asked = node.api.all_calls() - before;
    assert_eq!(asked, 0, "requests in {idle:?} without change");
    for (watch, most) in [("watch resourceclaims", 1), ("watch resourceslices", 1)] {
        assert!(node.api.calls(watch) <= most, "{watch}");
    }
    driver.stop().await;
}

/// How many requests there were, once no more come.
async fn settled(api: &Api) -> usize {
    let patience = Instant::now() + Duration::from_secs(30);
    loop {
        let before = api.all_calls();
        tokio::time::sleep(Duration::from_secs(1)).await;
        if api.all_calls() == before {
            return before;
        }
        assert!(Instant::now() < patience, "requests go on");
    }
}

#[test]
fn slices_of_a_node_are_few_and_small() {
    let node = slices::Node {
        name: "node-with-a-name-of-usual-length-0123.example.internal".into(),
        uid: "00000000-0000-4000-8000-000000000000".into(),
    };
    // 8 GPUs, and the same as 7 MIG instances each.
    for (count, objects, most) in [(8, 2, 32 << 10), (56, 3, 110 << 10)] {
        let devices: Vec<_> = (0..count).map(device).collect();
        let specs = slices::build(&node, &devices, 1);
        assert_eq!(specs.len(), objects, "{count} devices");
        let object = |(index, spec)| slices::object(&node, index, spec);
        let all: Vec<_> = specs.into_iter().enumerate().map(object).collect();
        let bytes: usize = all
            .iter()
            .map(|it| serde_json::to_vec(it).unwrap().len())
            .sum();
        assert!(bytes < most, "{count} devices: {bytes} bytes");
        println!("{count} devices: {objects} slices, {bytes} bytes");
    }
}

/// 5,000 nodes publish, and one of them again: it reads and writes its own slices only, however many others there are.
#[tokio::test(flavor = "multi_thread")]
async fn publishing_does_not_depend_on_the_number_of_nodes() {
    const NODES: usize = 5000;
    let api = Api::start().await;
    let devices: Vec<_> = vec![device(0)];
    let named = |n: usize| slices::Node {
        name: format!("node-{n}"),
        uid: format!("uid-{n}"),
    };
    let first = slices::build(&named(0), &devices, 1)
        .into_iter()
        .enumerate();
    let first: Vec<_> = first
        .map(|(index, spec)| serde_json::to_value(slices::object(&named(0), index, spec)).unwrap())
        .collect();
    for n in 0..NODES {
        for (index, object) in first.iter().enumerate() {
            let (mut object, node) = (object.clone(), named(n));
            object["spec"]["nodeName"] = json!(node.name);
            object["spec"]["pool"]["name"] = json!(node.name);
            let name = slices::object_name(&node, index);
            api.put("resourceslices", "", &name, object);
        }
    }
    let slices = kube::Api::all(api.client.clone());
    let before = api.all_calls();
    let published = gpumux_dra::publish::reconcile(&slices, &named(17), &devices)
        .await
        .unwrap();
    assert_eq!((published.slices, published.generation), (2, 1));
    assert_eq!(api.all_calls() - before, 1, "one list of its own");
    let mut broken = devices.clone();
    broken[0].fault = Some("lost".into());
    gpumux_dra::publish::reconcile(&slices, &named(17), &broken)
        .await
        .unwrap();
    // One list, and each of its own slices written, and no other.
    assert_eq!(api.all_calls() - before, 1 + 1 + 2);
}
