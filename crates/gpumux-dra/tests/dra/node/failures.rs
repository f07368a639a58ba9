//! What goes wrong under a running driver, and what comes back.

use gpumux_daemon::api::types::NewTenant;

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn without_the_api_server_claims_can_still_go() {
    let mut node = Node::new().await;
    let (driver, kubelet) = node.start().await;
    let claim = node.half("first");
    kubelet.prepare_one(&claim).await.unwrap();
    driver.stop().await;
    // No process listens there.
    let nowhere = crate::support::api::client("http://127.0.0.1:1");
    let driver = start(node.config(), nowhere).await.unwrap();
    let kubelet = Kubelet::register(&node.config().places.registry).await;
    kubelet.prepare_one(&claim).await.unwrap();
    kubelet.unprepare_one(&claim).await.unwrap();
    assert!(node.tenant(&claim).await.is_none());
    let error = kubelet.prepare_one(&claim).await.unwrap_err();
    assert!(error.contains("cannot read the claim"), "{error}");
    driver.stop().await;
}

/// A small disk of its own under a directory. Goes with the value.
struct SmallDisk(std::path::PathBuf);

impl SmallDisk {
    /// None where this user may not mount.
    fn mount(dir: std::path::PathBuf) -> Option<Self> {
        std::fs::create_dir_all(&dir).unwrap();
        let mut mount = std::process::Command::new("mount");
        mount
            .args(["-t", "tmpfs", "-o", "size=64k", "tmpfs"])
            .arg(&dir);
        let mounted = mount.stderr(std::process::Stdio::null()).status();
        mounted
            .is_ok_and(|status| status.success())
            .then_some(Self(dir))
    }

    fn fill(&self) {
        use std::io::Write;
        let mut file = std::fs::File::create(self.0.join("filler")).unwrap();
        while file.write_all(&[0; 512]).is_ok() {}
    }

    fn clear(&self) {
        std::fs::remove_file(self.0.join("filler")).unwrap();
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount")
            .arg("-l")
            .arg(&self.0)
            .status();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_leaves_nothing_and_lets_claims_go() {
    let mut node = Node::new().await;
    let disks = ["plugins", "cdi"].map(|dir| SmallDisk::mount(node.path(dir)));
    let [Some(plugins), Some(cdi)] = disks else {
        eprintln!("skipped: this user may not mount");
        return;
    };
    let (driver, kubelet) = node.start().await;
    let claims = node.claims(8, "gpumux-guaranteed", &json!({"compute": "10"}));
    let there = &claims[7];
    kubelet.prepare_one(there).await.unwrap();
    for (disk, message) in [
        (&cdi, "cannot write the CDI file in"),
        (&plugins, "cannot keep the claim in"),
    ] {
        disk.fill();
        // The last page of the file may have room for some.
        let mut refused = 0;
        for claim in &claims[..7] {
            let Err(error) = kubelet.prepare_one(claim).await else {
                continue;
            };
            refused += 1;
            assert!(
                error.contains(message) && error.contains("No space left"),
                "{error}"
            );
            assert!(node.tenant(claim).await.is_none() && !node.cdi_file(claim).exists());
        }
        assert!(refused > 0, "{message}");
        assert_eq!(node.records(), 8 - refused);
        for claim in &claims[..7] {
            kubelet.unprepare_one(claim).await.unwrap();
        }
        assert_eq!(
            (node.records(), node.daemon.tenants().await.unwrap().len()),
            (1, 1)
        );
        disk.clear();
        kubelet.prepare_one(&claims[0]).await.unwrap();
        kubelet.unprepare_one(&claims[0]).await.unwrap();
    }
    plugins.fill();
    kubelet.unprepare_one(there).await.unwrap();
    assert_eq!(
        (node.records(), node.daemon.tenants().await.unwrap().len()),
        (0, 0)
    );
    driver.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rolling_update_hands_everything_over() {
    let mut node = Node::new().await;
    let instance = |name: &str| -> Config {
        let mut config = config(node.dir.path(), vec![device(0)]);
        config.places.instance = Some(name.into());
        config
    };
    let (old, new) = (instance("pod-a"), instance("pod-b"));
    let sockets = [
        old.places.registration_socket(),
        new.places.registration_socket(),
    ];
    let old = start(old, node.api.client.clone()).await.unwrap();
    let kubelet = Kubelet::register_socket(&sockets[0]).await;
    node.api.until_published().await;
    let claim = node.half("first");
    kubelet.prepare_one(&claim).await.unwrap();
    let generation = node.api.slices()[0].spec.pool.generation;
    let mut new = start(new, node.api.client.clone()).await.unwrap();
    let kubelet = Kubelet::register_socket(&sockets[1]).await;
    old.stop().await;
    assert!(!sockets[0].exists() && sockets[1].exists());
    // The new one leads now, and finds nothing to change.
    new.published
        .wait_for(|published| published.slices > 0)
        .await
        .unwrap();
    assert_eq!(node.api.slices()[0].spec.pool.generation, generation);
    // What the old one prepared, the new one knows.
    kubelet.prepare_one(&claim).await.unwrap();
    assert_eq!(node.daemon.tenants().await.unwrap().len(), 1);
    kubelet.unprepare_one(&claim).await.unwrap();
    assert_eq!(node.daemon.tenants().await.unwrap().len(), 0);
    new.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn second_instance_of_a_name_reports_the_first() {
    let node = Node::new().await;
    let (driver, _) = node.start().await;
    let error = start(node.config(), node.api.client.clone())
        .await
        .err()
        .expect("refused");
    assert!(
        matches!(error, Error::Kubelet(KubeletError::Held(_))),
        "{error}"
    );
    // The first is unharmed.
    Kubelet::register(&node.config().places.registry).await;
    driver.stop().await;
    // What a killed instance left is no hindrance, and goes, also if it had another name.
    let bind =
        |path: std::path::PathBuf| drop(std::os::unix::net::UnixListener::bind(path).unwrap());
    let mut dead = node.config().places;
    bind(dead.registration_socket());
    dead.instance = Some("dead".into());
    bind(dead.registration_socket());
    bind(dead.service_socket());
    std::fs::write(dead.service_socket().with_extension("lock"), "").unwrap();
    let (driver, _) = node.start().await;
    assert!(!dead.registration_socket().exists() && !dead.service_socket().exists());
    driver.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_record_is_made_anew_or_cleaned_up() {
    let mut node = Node::new().await;
    let (driver, kubelet) = node.start().await;
    let claim = node.half("first");
    let log = node.path("plugins/gpumux.dev/claims/claims.log");
    let damage = || {
        let mut bytes = std::fs::read(&log).unwrap();
        let place = bytes.len() - 9;
        bytes[place] ^= 4;
        std::fs::write(&log, bytes).unwrap();
    };
    kubelet.prepare_one(&claim).await.unwrap();
    let before = cdi_env(&node.cdi_file(&claim));
    driver.stop().await;
    damage();
    let (driver, kubelet) = node.start().await;
    kubelet.prepare_one(&claim).await.unwrap();
    assert_ne!(cdi_env(&node.cdi_file(&claim)), before, "a new secret");
    assert_eq!(node.daemon.tenants().await.unwrap().len(), 1);
    driver.stop().await;
    damage();
    let (driver, kubelet) = node.start().await;
    kubelet.unprepare_one(&claim).await.unwrap();
    assert_eq!(
        (node.daemon.tenants().await.unwrap().len(), node.records()),
        (0, 0)
    );
    assert!(!node.cdi_file(&claim).exists());
    driver.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tenants_that_the_daemon_lost_come_back_with_their_secret() {
    let mut node = Node::new().await;
    let (driver, kubelet) = node.start().await;
    let claim = node.half("first");
    kubelet.prepare_one(&claim).await.unwrap();
    let tenant = node.tenant(&claim).await.unwrap();
    node.daemon.delete(&tenant.name).await.unwrap();
    assert!(driver.engine.restore().await.unwrap() <= 1);
    let back = node.tenant(&claim).await.unwrap();
    assert_eq!((back.name, back.spec), (tenant.name, tenant.spec));
    driver.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tenant_made_anew_is_described_as_the_daemon_made_it() {
    let mut node = Node::new().await;
    let (driver, kubelet) = node.start().await;
    let share = Some(json!({"memoryLimit": "4Gi"}));
    let claim = node.claim("c", "gpumux-preemptible", json!({"memory": "2Gi"}), share);
    kubelet.prepare_one(&claim).await.unwrap();
    let less_context = |gib: u64| (gib << 30) - device(0).context_bytes;
    let described = || {
        let env = cdi_env(&node.cdi_file(&claim)).into_iter();
        let mut limits = env.filter_map(|it| it.strip_prefix("GPUMUX_MEMORY_LIMIT=")?.parse().ok());
        limits.next()
    };
    assert_eq!(described(), Some(less_context(4)));
    let patch = Some(r#"{"memoryLimit": "6Gi"}"#);
    node.api.annotate("team", "c", "gpumux.dev/share", patch);
    let resized = |api: &Api| {
        let claim = api.claim("team", "c")?;
        let memory = claim.pointer("/status/devices/0/data/memory")?;
        (memory["limit"] == less_context(6)).then_some(())
    };
    node.api.until(resized).await;
    let lose = async || {
        let tenant = node.tenant(&claim).await.unwrap();
        node.daemon.delete(&tenant.name).await.unwrap();
    };
    lose().await;
    driver.engine.restore().await.unwrap();
    kubelet.prepare_one(&claim).await.unwrap();
    assert_eq!(described(), Some(less_context(6)));
    lose().await;
    let patch = Some(r#"{"memoryLimit": "8Gi"}"#);
    driver.engine.resize(&claim.uid, patch).await.unwrap();
    kubelet.prepare_one(&claim).await.unwrap();
    assert_eq!(described(), Some(less_context(8)));
    driver.stop().await;
}

/// The daemon made it after the driver had stopped waiting for it.
#[tokio::test(flavor = "multi_thread")]
async fn tenant_of_an_unknown_claim_goes_with_the_claim() {
    let mut node = Node::new().await;
    let (driver, kubelet) = node.start().await;
    let [claim, other] = ["first", "other"].map(|name| node.half(name));
    for claim in [&claim, &other] {
        let late = NewTenant {
            name: Some(gpumux_dra::prepare::tenant_prefix(&claim.uid) + "0"),
            kept: true,
            ..NewTenant::default()
        };
        node.daemon.create(&late).await.unwrap();
    }
    kubelet.unprepare_one(&claim).await.unwrap();
    assert!(node.tenant(&claim).await.is_none());
    assert!(node.tenant(&other).await.is_some());
    driver.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn health_changes_reach_the_kubelet() {
    let node = Node::new().await;
    let mut config = node.config();
    let broken = Device {
        fault: Some("Xid 79".into()),
        ..device(1)
    };
    config.inventory = Inventory::Fixed(vec![device(0), broken]);
    let registry = config.places.registry.clone();
    let driver = start(config, node.api.client.clone()).await.unwrap();
    let kubelet = Kubelet::register(&registry).await;
    for version in ["v1", "v1alpha1"] {
        let health = kubelet.health(version).await;
        let of = |name: &str| {
            let device = health
                .devices
                .iter()
                .find(|device| device.device.as_ref().unwrap().device_name == name)
                .unwrap();
            (device.health(), device.message.as_str())
        };
        assert_eq!(of("gpu-0"), (HealthStatus::Healthy, ""));
        for name in ["gpu-1", "gpu-1-whole"] {
            assert_eq!(of(name), (HealthStatus::Unhealthy, "Xid 79"));
        }
    }
    driver.stop().await;
}
