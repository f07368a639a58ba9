//! As many tenants as a node has at most.

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn two_hundred_tenants_on_eight_gpus() {
    let (node, driver, kubelet, claims) = Node::full(200).await;
    let mut shares = tokio::task::JoinSet::new();
    for pods in claims.chunks(5) {
        let (pods, endpoint) = (pods.to_vec(), kubelet.endpoint.clone());
        shares.spawn(async move {
            let kubelet = Kubelet {
                endpoint,
                services: Vec::new(),
            };
            // As the kubelet does: a busy machine's daemon may be late.
            let mut answers = kubelet.prepare(&pods).await.unwrap();
            for _ in 0..10 {
                if answers.values().any(Result::is_err) {
                    answers = kubelet.prepare(&pods).await.unwrap();
                }
            }
            answers
        });
    }
    let prepared = shares.join_all().await;
    let devices: std::collections::BTreeMap<String, usize> = prepared
        .iter()
        .flat_map(|answers| answers.values())
        .map(|answer| answer.as_ref().unwrap()[0].device_name.clone())
        .fold(Default::default(), |mut all, name| {
            *all.entry(name).or_default() += 1;
            all
        });
    assert_eq!(devices.values().sum::<usize>(), 200);
    assert_eq!(devices.len(), 8, "26 of 3 GiB fill a device: {devices:?}");
    assert_eq!(node.daemon.tenants().await.unwrap().len(), 200);
    // The API's limits: what a claim's status may hold, and how often each server is asked.
    let said = |api: &Api| {
        let status = |claim: &v1::Claim| {
            let devices = api.claim("team", &claim.name)?["status"]["devices"].clone();
            let device = devices.as_array()?.first()?.clone();
            assert!(device["data"].to_string().len() <= 10 << 10, "{device}");
            assert!(device["conditions"].as_array()?.len() <= 8, "{device}");
            Some(())
        };
        claims.iter().map(status).collect::<Option<Vec<_>>>()
    };
    node.api.until(said).await;
    for slice in node.api.slices() {
        crate::support::api::check(&slice).unwrap();
        assert_eq!(
            slice.spec.pool.generation, 1,
            "tenants do not change slices"
        );
    }
    let watches = node.api.calls("watch resourceclaims");
    assert!(watches <= 1, "one for a namespace: {watches}");
    let patches = node.api.calls("patch resourceclaims/status");
    assert!((200..400).contains(&patches), "{patches}");
    driver.stop().await;
}
