//! How long the kubelet waits for a claim to be prepared: 64 claims, one pod after the other, and all pods at once. Measured
//! over the kubelet's socket, with the real daemon and an API server in this process.
//! Prints one line of JSON for each.

#[allow(dead_code, unreachable_pub)]
#[path = "../tests/dra/support/mod.rs"]
mod support;

use std::time::{Duration, Instant};

use gpumux_dra::proto::v1;
use serde_json::json;
use support::{kubelet::Kubelet, node::Node};

const CLAIMS: usize = 64;
const ROUNDS: usize = 5;

#[tokio::main]
async fn main() {
    let mut node = Node::new().await;
    let (driver, kubelet) = node.start().await;
    let claims: Vec<_> = (0..CLAIMS)
        .map(|n| {
            node.claim(
                &format!("c{n}"),
                "gpumux-guaranteed",
                json!({"compute": "10", "memory": "1Gi"}),
                None,
            )
        })
        .collect();
    let (mut single, mut at_once) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        for claim in &claims {
            single.push(timed(&kubelet, claim).await);
        }
        unprepare(&kubelet, &claims).await;
        let mut all = tokio::task::JoinSet::new();
        for claim in claims.clone() {
            let kubelet = Kubelet {
                endpoint: kubelet.endpoint.clone(),
                services: Vec::new(),
            };
            all.spawn(async move { timed(&kubelet, &claim).await });
        }
        at_once.extend(all.join_all().await);
        unprepare(&kubelet, &claims).await;
    }
    driver.stop().await;
    report("one pod after the other", single);
    report("all pods at once", at_once);
}

async fn timed(kubelet: &Kubelet, claim: &v1::Claim) -> Duration {
    let start = Instant::now();
    kubelet.prepare_one(claim).await.expect("prepared");
    start.elapsed()
}

async fn unprepare(kubelet: &Kubelet, claims: &[v1::Claim]) {
    for claim in claims {
        kubelet.unprepare_one(claim).await.expect("unprepared");
    }
}

fn report(how: &str, mut times: Vec<Duration>) {
    times.sort();
    let ms = |part: f64| {
        let index = ((times.len() - 1) as f64 * part).round() as usize;
        (times[index].as_secs_f64() * 1e5).round() / 1e2
    };
    let line = json!({"prepare": how, "claims": CLAIMS, "samples": times.len(), "p50_ms": ms(0.5), "p99_ms": ms(0.99), "max_ms": ms(1.0)});
    println!("{line}");
}
