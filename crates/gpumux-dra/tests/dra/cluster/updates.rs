//! Updates of the driver: the old instance stays until the new one works.

use super::*;

/// What the DaemonSet controller does with a surge: the old instance ends once the new one has been ready for long enough; without a
/// probe a container is ready as soon as it runs.
fn old_one_ends(set: &Value, runs_s: u64, ready_s: Option<u64>) -> bool {
    let update = &set["spec"]["updateStrategy"]["rollingUpdate"];
    assert_eq!(
        (&update["maxSurge"], &update["maxUnavailable"]),
        (&json!(1), &json!(0))
    );
    let container = &set["spec"]["template"]["spec"]["containers"][0];
    let ready_s = match container["readinessProbe"].is_null() {
        true => Some(runs_s),
        false => ready_s,
    };
    let enough = set["spec"]["minReadySeconds"].as_u64().unwrap_or(0);
    ready_s.is_some_and(|ready_s| ready_s >= enough)
}

/// The ports of the node that a pod of this DaemonSet takes: on the node's network, the API server gives each port of a container to it.
fn node_ports(set: &Value) -> Vec<u64> {
    let pod = &set["spec"]["template"]["spec"];
    let containers = pod["containers"].as_array().unwrap().iter();
    let ports = containers.flat_map(|it| it["ports"].as_array().cloned().unwrap_or_default());
    let taken = |port: Value| match pod["hostNetwork"] == true {
        true => port["containerPort"].as_u64(),
        false => port["hostPort"].as_u64(),
    };
    ports.filter_map(taken).collect()
}

/// During an update, the scheduler must find room for the new instance beside the old one.
#[test]
fn two_instances_of_the_driver_fit_on_a_node() {
    for own_network in [true, false] {
        let values = json!({"metrics": {"hostNetwork": own_network}});
        let objects = chart::render_with(&values);
        let sets = objects.iter().filter(|it| it["kind"] == "DaemonSet");
        for set in sets {
            let surge = &set["spec"]["updateStrategy"]["rollingUpdate"]["maxSurge"];
            if surge.as_u64().is_some_and(|surge| surge > 0) {
                assert_eq!(node_ports(set), [0; 0], "{}", set["metadata"]["name"]);
            }
        }
    }
}

/// B6: of a broken release, no instance takes over.
#[tokio::test(flavor = "multi_thread")]
async fn broken_release_leaves_the_good_one_in_place() {
    let objects = chart::render();
    let is_driver = |object: &&Value| {
        object["kind"] == "DaemonSet" && object["metadata"]["name"] == "gpumux-dra"
    };
    let set = objects.iter().find(is_driver).unwrap().clone();
    let mut bare = set.clone();
    bare["spec"]["template"]["spec"]["containers"][0]["readinessProbe"] = Value::Null;
    bare["spec"]["minReadySeconds"] = json!(0);
    assert!(
        old_one_ends(&bare, 0, None),
        "as it was with the real controller"
    );

    let node = Node::new().await;
    let instance = |name: &str| -> Config {
        let mut config = config(node.dir.path(), vec![device(0)]);
        config.places.instance = Some(name.into());
        config
    };
    let old = instance("old");
    let (registration, health) = (old.places.registration_socket(), old.places.health_socket());
    let old = start(old, node.api.client.clone()).await.unwrap();
    let ready = async |socket: &PathBuf| {
        health::check(socket, Check::Ready)
            .await
            .map_err(|error| error.to_string())
    };
    assert_eq!(
        ready(&health).await.unwrap_err(),
        "not registered with the kubelet yet"
    );
    Kubelet::register_socket(&registration).await;
    node.api.until_published().await;
    let wait = async {
        while ready(&health).await.is_err() {
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(gpumux_tests::PATIENCE, wait)
        .await
        .expect("ready");
    let generation = node.api.slices()[0].spec.pool.generation;

    // One that crashes at once; one that the kubelet never registers; one without an API server; one whose role may write no slices.
    let crashed = instance("crashed").places.health_socket();
    let error = ready(&crashed).await.unwrap_err();
    assert!(error.contains("no instance answers"), "{error}");
    let nowhere = crate::support::api::client("http://127.0.0.1:1");
    for (name, client, registered, allowed, why) in [
        (
            "silent",
            node.api.client.clone(),
            false,
            true,
            "not registered",
        ),
        ("lost", nowhere, true, true, "cannot publish"),
        ("weak", node.api.client.clone(), true, false, "forbidden"),
    ] {
        let new = instance(name);
        let (registration, health) = (new.places.registration_socket(), new.places.health_socket());
        let new = start(new, client).await.unwrap();
        if registered {
            Kubelet::register_socket(&registration).await;
        }
        node.api.forbid_slices(!allowed);
        let error = ready(&health).await.unwrap_err();
        assert!(error.contains(why), "{name}: {error}");
        health::check(&health, Check::Live).await.unwrap();
        // It is not ready after an hour either, and so the old one stays.
        assert!(!old_one_ends(&set, 3600, None), "{name}");
        node.api.forbid_slices(false);
        new.stop().await;
        assert!(!health.exists());
    }
    ready(&health).await.unwrap();
    assert_eq!(
        node.api.slices()[0].spec.pool.generation,
        generation,
        "nothing was disturbed"
    );

    // A good one is ready beside the old one, without a slice of its own, and takes over.
    let new = instance("new");
    let (registration, health) = (new.places.registration_socket(), new.places.health_socket());
    let mut new = start(new, node.api.client.clone()).await.unwrap();
    Kubelet::register_socket(&registration).await;
    ready(&health).await.unwrap();
    assert!(
        !old_one_ends(&set, 1, Some(1)),
        "one that fails soon is not good"
    );
    assert!(old_one_ends(&set, 60, Some(60)));
    old.stop().await;
    new.published
        .wait_for(|published| published.looked)
        .await
        .unwrap();
    ready(&health).await.unwrap();
    assert_eq!(node.api.slices()[0].spec.pool.generation, generation);
    new.stop().await;
}
