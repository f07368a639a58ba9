//! The scheduler's extender against an API server: a scheduler that asks it fills GPUs one after another.

use std::collections::{BTreeMap, BTreeSet};

use gpumux_dra::{
    extender::{
        Extender, Score,
        cluster::{Change, Cluster, Kind, Object},
        start,
    },
    slices,
};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};

use crate::{
    chart,
    support::{api::Api, node::device, scheduler::Scheduler},
};

const GPUS: u32 = 2;

/// A cluster with a scheduler that asks the extender as kube-scheduler does: nodes that have room, by name.
struct Fleet {
    api: Api,
    extender: Extender,
    address: std::net::SocketAddr,
    pools: BTreeMap<String, Scheduler>,
}

impl Fleet {
    async fn new(nodes: usize) -> Self {
        let api = Api::start().await;
        for object in chart::render() {
            if object["kind"] == "DeviceClass" {
                let name = object["metadata"]["name"].as_str().unwrap().to_owned();
                api.put("deviceclasses", "", &name, object);
            }
        }
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let extender = start(api.client.clone(), listener);
        let mut fleet = Self {
            api,
            extender,
            address,
            pools: BTreeMap::new(),
        };
        for n in 0..nodes {
            fleet.add_node(&format!("node-{n}"));
        }
        fleet
            .until_free(nodes as u64 * u64::from(GPUS), nodes as u64 * 2000)
            .await;
        fleet
    }

    fn add_node(&mut self, name: &str) {
        let node = json!({"apiVersion": "v1", "kind": "Node", "status": {"allocatable": {"cpu": "64", "memory": "512Gi"}}});
        self.api.put("nodes", "", name, node);
        let owner = slices::Node {
            name: name.to_owned(),
            uid: format!("uid-{name}"),
        };
        let devices: Vec<_> = (0..GPUS).map(device).collect();
        for (index, spec) in slices::build(&owner, &devices, 1).into_iter().enumerate() {
            let object = serde_json::to_value(slices::object(&owner, index, spec)).unwrap();
            let name = slices::object_name(&owner, index);
            self.api.put("resourceslices", "", &name, object);
        }
        self.pools.insert(name.to_owned(), Scheduler::default());
    }

    /// Waits until the extender knows so many GPUs, with so much of them free.
    async fn until_free(&self, gpus: u64, milli: u64) {
        let wanted = format!("{gpus} GPUs known, {milli} milli-GPU");
        let wait = async {
            loop {
                let answer = self.http("GET", "/readyz", "").await;
                if answer.contains(&wanted) {
                    return;
                }
                tokio::time::sleep(std::time::Duration::from_millis(20)).await;
            }
        };
        let patience = std::time::Duration::from_secs(60);
        tokio::time::timeout(patience, wait).await.expect(&wanted);
    }

    async fn http(&self, method: &str, path: &str, body: &str) -> String {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        let length = body.len();
        let request = format!("{method} {path} HTTP/1.0\r\nContent-Length: {length}\r\n\r\n{body}");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }

    /// The scores of nodes for a pod, over HTTP.
    async fn scores(&self, pod: &Value, nodes: &[String]) -> Vec<Score> {
        let body = json!({"Pod": pod, "Nodes": null, "NodeNames": nodes}).to_string();
        let answer = self.http("POST", "/prioritize", &body).await;
        assert!(answer.starts_with("HTTP/1.0 200"), "{answer}");
        let (_, body) = answer.split_once("\r\n\r\n").unwrap();
        serde_json::from_str(body).unwrap()
    }

    /// Schedules a pod with a claim: on the node of the highest score of those that have room; of equal ones, the last. Returns where.
    async fn schedule(&mut self, name: &str, class: &str, capacity: Value) -> String {
        let exactly = json!({"deviceClassName": class, "capacity": {"requests": capacity}});
        let spec = json!({"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}});
        let mut claim =
            json!({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "spec": spec});
        let claim_name = format!("{name}-share-x");
        self.api.put_claim("team", &claim_name, claim.clone());
        let mut pod = pod(name, &claim_name);
        let slices = self.api.slices();
        let own = |node: &str| {
            let own = slices
                .iter()
                .filter(|it| it.spec.node_name.as_deref() == Some(node));
            own.cloned().collect::<Vec<_>>()
        };
        // The extender must know the claim first, as it does in a cluster long before the scheduler has filtered the nodes.
        let nodes: Vec<String> = self.pools.keys().cloned().collect();
        let patience = tokio::time::Instant::now() + std::time::Duration::from_secs(60);
        let scores = loop {
            let scores = self.scores(&pod, &nodes).await;
            if scores.iter().any(|score| score.score > 0) {
                break scores;
            }
            assert!(
                tokio::time::Instant::now() < patience,
                "no node has a score"
            );
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        };
        let mut order: Vec<&Score> = scores.iter().collect();
        order.sort_by_key(|score| score.score);
        let (node, results) = order
            .into_iter()
            .rev()
            .find_map(|score| {
                let pool = self.pools.get_mut(&score.host)?;
                Some((
                    score.host.clone(),
                    pool.allocate(&own(&score.host), &claim)?,
                ))
            })
            .expect("room on a node");
        claim["status"] = json!({"allocation": {"devices": {"results": results}}});
        self.api.put_claim("team", &claim_name, claim);
        pod["spec"]["nodeName"] = json!(node);
        self.api.put("pods", "team", name, pod);
        node
    }
}

/// A pod as the scheduler sends it: the claim's name is in its status, since a template made it.
fn pod(name: &str, claim: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": "team"},
        "spec": {
            "containers": [{"name": "main", "resources": {"requests": {"cpu": "500m", "memory": "1Gi"}, "claims": [{"name": "share"}]}}],
            "resourceClaims": [{"name": "share", "resourceClaimTemplateName": "half"}]
        },
        "status": {"phase": "Pending", "resourceClaimStatuses": [{"name": "share", "resourceClaimName": claim}]}})
}

#[tokio::test(flavor = "multi_thread")]
async fn extender_fills_one_gpu_after_another() {
    let mut fleet = Fleet::new(6).await;
    let mut used = Vec::new();
    let mut free = 12_000;
    for n in 0..8 {
        let capacity = json!({"compute": "500", "memory": "8Gi"});
        used.push(
            fleet
                .schedule(&format!("p{n}"), "gpumux-guaranteed", capacity)
                .await,
        );
        free -= 500;
        fleet.until_free(12, free).await;
    }
    // Eight halves are four GPUs, on two nodes: the first is full before the second is used.
    let nodes: BTreeSet<&String> = used.iter().collect();
    assert_eq!(nodes.len(), 2, "{used:?}");
    assert!(used[..4].iter().all(|node| *node == used[0]), "{used:?}");
    // A node that leaves or a claim that ends changes what is free.
    fleet.api.delete_claim("team", "p0-share-x");
    fleet.until_free(12, free + 500).await;
    let slice = format!("{}-gpumux.dev-001", used[7]);
    fleet.api.delete("resourceslices", "", &slice);
    fleet.until_free(10, 8000 + 500).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn extender_spreads_preemptible_shares_over_nodes() {
    let mut fleet = Fleet::new(3).await;
    let mut used = Vec::new();
    for n in 0..6 {
        let capacity = json!({"memory": "2Gi"});
        let name = format!("p{n}");
        used.push(fleet.schedule(&name, "gpumux-preemptible", capacity).await);
        // Preemptible shares hold no compute: what shows that the extender has seen one is the next order of nodes.
        let nodes: Vec<String> = fleet.pools.keys().cloned().collect();
        fleet
            .api
            .put_claim("team", "probe", claim("gpumux-preemptible"));
        let least = used
            .iter()
            .fold(BTreeMap::<&String, usize>::new(), |mut sum, node| {
                *sum.entry(node).or_default() += 1;
                sum
            });
        let patience = tokio::time::Instant::now() + std::time::Duration::from_secs(60);
        loop {
            let scores = fleet.scores(&pod("probe", "probe"), &nodes).await;
            let best = scores.iter().max_by_key(|score| score.score).unwrap();
            let fewest = nodes
                .iter()
                .map(|node| least.get(node).copied().unwrap_or(0))
                .min();
            if best.score > 0 && Some(least.get(&best.host).copied().unwrap_or(0)) == fewest {
                break;
            }
            assert!(
                tokio::time::Instant::now() < patience,
                "{used:?} {scores:?}"
            );
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    }
    let nodes: BTreeSet<&String> = used.iter().collect();
    assert_eq!(nodes.len(), 3, "{used:?}");
}

fn claim(class: &str) -> Value {
    let spec =
        json!({"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": class}}]}});
    json!({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "spec": spec})
}

#[tokio::test(flavor = "multi_thread")]
async fn extender_without_an_opinion_scores_all_nodes_equally() {
    let fleet = Fleet::new(3).await;
    let nodes = ["node-0", "node-1", "unknown"].map(str::to_owned);
    let zeros = |scores: &[Score]| scores.len() == 3 && scores.iter().all(|it| it.score == 0);
    // No claims, another driver's class, and a claim that does not exist.
    let plain = json!({"metadata": {"name": "p", "namespace": "team"}, "spec": {"containers": [{"name": "main"}]}});
    assert!(zeros(&fleet.scores(&plain, &nodes).await));
    fleet
        .api
        .put_claim("team", "other", claim("gpu.example.com"));
    assert!(zeros(&fleet.scores(&pod("p", "other"), &nodes).await));
    assert!(zeros(&fleet.scores(&pod("p", "missing"), &nodes).await));
    // Whole nodes instead of names, and extended resources.
    let mut extended = plain.clone();
    extended["spec"]["containers"][0]["resources"] = json!({"limits": {"gpumux.dev/gpu": "1"}});
    let items: Vec<_> = nodes
        .iter()
        .map(|name| json!({"metadata": {"name": name}}))
        .collect();
    let body = json!({"pod": extended, "nodes": {"items": items}}).to_string();
    let scores = fleet.extender.shared.prioritize(body.as_bytes()).unwrap();
    let scores: Vec<i64> = scores.iter().map(|score| score.score).collect();
    assert_eq!(scores, [10, 9, 0]);
    let wrong = fleet.http("POST", "/prioritize", "{}").await;
    assert!(wrong.starts_with("HTTP/1.0 400"), "{wrong}");
}

fn is<T: serde::de::DeserializeOwned>(object: fn(Box<T>) -> Object, value: Value) -> Change {
    Change::Is(object(Box::new(serde_json::from_value(value).unwrap())))
}

/// Two nodes with a GPU each, as listed once.
fn cluster() -> Cluster {
    let mut cluster = Cluster::default();
    let kinds = [Kind::Node, Kind::Slice, Kind::Class, Kind::Claim, Kind::Pod];
    kinds
        .into_iter()
        .for_each(|kind| cluster.apply(Change::Listing(kind)));
    let classes = chart::render().into_iter();
    for class in classes.filter(|object| object["kind"] == "DeviceClass") {
        cluster.apply(is(Object::Class, class));
    }
    for name in ["a", "b"] {
        let status = json!({"allocatable": {"cpu": "32", "memory": "64Gi"}});
        let node = json!({"metadata": {"name": name}, "status": status});
        cluster.apply(is(Object::Node, node));
        let owner = slices::Node {
            name: name.into(),
            uid: String::new(),
        };
        for (index, spec) in slices::build(&owner, &[device(0)], 1)
            .into_iter()
            .enumerate()
        {
            let slice = Box::new(slices::object(&owner, index, spec));
            cluster.apply(Change::Is(Object::Slice(slice)));
        }
    }
    assert!(!cluster.is_complete());
    kinds
        .into_iter()
        .for_each(|kind| cluster.apply(Change::Listed(kind)));
    assert!(cluster.is_complete());
    cluster
}

/// A claim of half a GPU, allocated on a node or still open.
fn half(name: &str, node: Option<&str>) -> Value {
    let mut claim = claim("gpumux-guaranteed");
    claim["metadata"] = json!({"name": name, "namespace": "team"});
    claim["spec"]["devices"]["requests"][0]["exactly"]["capacity"] =
        json!({"requests": {"compute": "500"}});
    if let Some(node) = node {
        let result = json!({"request": "gpu", "driver": "gpumux.dev", "pool": node, "device": "gpu-0",
            "consumedCapacity": {"compute": "500", "memory": "1Gi", "clients": "1"}});
        claim["status"] = json!({"allocation": {"devices": {"results": [result]}}});
    }
    claim
}

#[test]
fn extender_drops_what_a_new_listing_does_not_name() {
    let mut cluster = cluster();
    cluster.apply(is(Object::Claim, half("one", Some("a"))));
    cluster.apply(is(Object::Claim, half("two", Some("b"))));
    assert_eq!(cluster.free(), (2, 1000));
    // The watch broke, and `one` was deleted meanwhile.
    cluster.apply(Change::Listing(Kind::Claim));
    cluster.apply(is(Object::Claim, half("two", Some("b"))));
    assert_eq!(cluster.free(), (2, 1000));
    cluster.apply(Change::Listed(Kind::Claim));
    assert_eq!(cluster.free(), (2, 1500));
    // A node's devices go and come back, and so does what is held there.
    let node = json!({"metadata": {"name": "b"}, "status": {"allocatable": {"cpu": "32", "memory": "64Gi"}}});
    cluster.apply(Change::Gone(Object::Node(Box::new(
        serde_json::from_value(node.clone()).unwrap(),
    ))));
    assert_eq!(cluster.free(), (1, 1000));
    cluster.apply(is(Object::Node, node));
    assert_eq!(cluster.free(), (2, 1500));
}

#[test]
fn extender_learns_once_enough_pods_run() {
    let mut cluster = cluster();
    assert!(cluster.lesson().is_none());
    for n in 0..32 {
        let name = format!("p{n}");
        let mut claim = half(&name, None);
        // A GPU that one half uses can no longer be had whole.
        if n % 2 == 1 {
            claim["spec"]["devices"]["requests"][0]["exactly"]["capacity"] =
                json!({"requests": {"compute": "1000"}});
        }
        cluster.apply(is(Object::Claim, claim));
        let mut pod = pod(&name, &name);
        cluster.apply(is(Object::Pod, pod.clone()));
        assert!(cluster.lesson().is_none(), "after {n} pods");
        pod["spec"]["nodeName"] = json!("a");
        pod["status"]["phase"] = json!("Running");
        cluster.apply(is(Object::Pod, pod.clone()));
        // The same again is no other pod.
        pod["metadata"]["labels"] = json!({"changed": "yes"});
        cluster.apply(is(Object::Pod, pod));
    }
    let lesson = cluster.lesson().expect("32 pods");
    assert!(cluster.lesson().is_none(), "it was taken");
    cluster.apply(is(Object::Claim, half("one", Some("b"))));
    cluster.learned(lesson.learn());
    cluster.apply(is(Object::Claim, half("next", None)));
    let next: k8s_openapi::api::core::v1::Pod =
        serde_json::from_value(pod("next", "next")).unwrap();
    assert_eq!(cluster.scores(&next, ["a", "b"].into_iter()), [9, 10]);
}
