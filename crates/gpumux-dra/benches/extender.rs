//! How long the scheduler waits for the extender's order of nodes, on 1,250 nodes with 8 GPUs each: requests as the scheduler sends
//! them, with the names of all nodes, each followed by the allocation. 24 kinds of pods arrive until the GPUs are full. Without the
//! network. Prints one line of JSON.

use std::time::{Duration, Instant};

use gpumux_dra::{
    device::Device,
    extender::{
        Shared,
        cluster::{Change, Kind, Object},
    },
    slices,
};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

const NODES: usize = 1250;
const GPUS: u32 = 8;
/// What pods ask for: milli-GPU, GPUs.
const SHARES: [(u32, u32); 8] = [
    (100, 1),
    (250, 1),
    (300, 1),
    (400, 1),
    (500, 1),
    (750, 1),
    (800, 1),
    (500, 2),
];
/// CPUs, in thousandths.
const CPUS: [u32; 3] = [2000, 4000, 7500];

fn object<T: DeserializeOwned>(value: Value) -> Box<T> {
    Box::new(serde_json::from_value(value).expect("an object"))
}

fn device(minor: u32) -> Device {
    Device {
        name: format!("gpu-{minor}"),
        uuid: format!("GPU-{minor:08}-0000-0000-0000-000000000000"),
        product: "NVIDIA H100 80GB HBM3".into(),
        compute_capability: Some((9, 0)),
        driver: "580.82.07".into(),
        pci_bus_id: None,
        pcie_root: None,
        memory_bytes: 80 << 30,
        memory_guaranteeable: 79 << 30,
        context_bytes: 544 << 20,
        minor: Some(minor),
        mig: None,
        offer: None,
        emulated: false,
        fault: None,
        evict: false,
    }
}

fn cluster(names: &[String]) -> Shared {
    let shared = Shared::default();
    let kinds = [Kind::Node, Kind::Pod, Kind::Slice, Kind::Claim, Kind::Class];
    kinds
        .into_iter()
        .for_each(|kind| shared.apply(Change::Listing(kind)));
    let class = json!({"metadata": {"name": "gpumux-guaranteed"}, "spec": {"selectors": [{"cel":
        {"expression": "device.driver == \"gpumux.dev\" && device.allowMultipleAllocations"}}]}});
    shared.apply(Change::Is(Object::Class(object(class))));
    let devices: Vec<Device> = (0..GPUS).map(device).collect();
    for name in names {
        let node = json!({"metadata": {"name": name}, "status": {"allocatable": {"cpu": "96", "memory": "1Ti"}}});
        shared.apply(Change::Is(Object::Node(object(node))));
        let owner = slices::Node {
            name: name.clone(),
            uid: String::new(),
        };
        for (index, spec) in slices::build(&owner, &devices, 1).into_iter().enumerate() {
            let slice = Box::new(slices::object(&owner, index, spec));
            shared.apply(Change::Is(Object::Slice(slice)));
        }
    }
    kinds
        .into_iter()
        .for_each(|kind| shared.apply(Change::Listed(kind)));
    shared
}

fn claim(name: &str, milli: u32, count: u32, results: Option<Value>) -> Object {
    let exactly = json!({"deviceClassName": "gpumux-guaranteed", "count": count,
        "capacity": {"requests": {"compute": milli.to_string(), "memory": "4Gi"}}});
    let mut claim = json!({"metadata": {"name": name, "namespace": "team"},
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}});
    if let Some(results) = results {
        claim["status"] = json!({"allocation": {"devices": {"results": results}}});
    }
    Object::Claim(object(claim))
}

fn main() {
    // Names of the length that clusters give.
    let names: Vec<String> = (0..NODES)
        .map(|n| format!("ip-10-0-{:03}-{:03}.example.internal", n / 256, n % 256))
        .collect();
    let shared = cluster(&names);
    // Free milli-GPU of each GPU, by which the stand-in for the scheduler allocates: the first GPUs that have room.
    let mut free = vec![[1000u32; GPUS as usize]; NODES];
    let (mut times, mut learning, mut refused) = (Vec::new(), Vec::new(), 0);
    for n in 0..usize::MAX {
        let (milli, count) = SHARES[n % SHARES.len()];
        let cpu = CPUS[n / SHARES.len() % CPUS.len()];
        let name = format!("c{n}");
        shared.apply(Change::Is(claim(&name, milli, count, None)));
        let mut pod = json!({"metadata": {"name": name, "namespace": "team"},
            "spec": {"containers": [{"name": "main", "resources": {"requests": {"cpu": format!("{cpu}m"), "memory": "8Gi"}}}],
                "resourceClaims": [{"name": "share", "resourceClaimName": name}]}});
        let room = |at: usize| {
            let hosts = free[at].iter().filter(|left| **left >= milli).count();
            hosts >= count as usize
        };
        let nodes: Vec<&String> = (0..NODES)
            .filter(|at| room(*at))
            .map(|at| &names[at])
            .collect();
        if nodes.len() < 2 {
            refused += 1;
            if refused > 16 {
                break;
            }
            continue;
        }
        let body = serde_json::to_vec(&json!({"Pod": pod, "NodeNames": nodes})).expect("JSON");
        let start = Instant::now();
        let scores = shared.prioritize(&body).expect("an answer");
        let answer = serde_json::to_vec(&scores).expect("JSON");
        times.push(start.elapsed());
        std::hint::black_box(answer);
        let best = scores
            .iter()
            .max_by_key(|score| score.score)
            .expect("a node");
        let at = names
            .iter()
            .position(|name| *name == best.host)
            .expect("known");
        let mut results = Vec::new();
        for (gpu, left) in free[at].iter_mut().enumerate() {
            if results.len() < count as usize && *left >= milli {
                *left -= milli;
                results.push(json!({"request": "gpu", "driver": "gpumux.dev", "pool": best.host, "device": format!("gpu-{gpu}"),
                    "consumedCapacity": {"compute": milli.to_string(), "memory": "4Gi", "clients": "1"}}));
            }
        }
        shared.apply(Change::Is(claim(&name, milli, count, Some(json!(results)))));
        pod["spec"]["nodeName"] = json!(best.host);
        shared.apply(Change::Is(Object::Pod(object(pod))));
        // As often as the extender would: learning goes on beside the requests, and only its end counts here.
        let start = Instant::now();
        shared.learn();
        if start.elapsed() > Duration::from_millis(10) {
            learning.push(start.elapsed());
        }
    }
    let left: u32 = free.iter().flatten().sum();
    let total = NODES as u32 * GPUS * 1000;
    times.sort();
    let us = |part: f64| {
        let at = ((times.len() - 1) as f64 * part).round() as usize;
        times[at].as_micros()
    };
    let ms: Vec<_> = learning.iter().map(Duration::as_millis).collect();
    let line = json!({"gpus": NODES as u32 * GPUS, "nodes": NODES, "requests": times.len(), "p50_us": us(0.5), "p99_us": us(0.99),
        "max_us": us(1.0), "learned": ms.len(), "learn_ms_max": ms.iter().max(),
        "allocated_percent": f64::from(total - left) * 100.0 / f64::from(total)});
    println!("{line}");
}
