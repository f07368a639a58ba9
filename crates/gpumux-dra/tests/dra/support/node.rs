//! A node for tests: the real daemon in a thread, the kubelet's directories, and the driver.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use gpumux_daemon::{client::Client as Daemon, paths};
use gpumux_dra::{
    Config, cdi, checkpoint::Store, device::Device, inventory::Inventory, kubelet::Places,
    prepare::Step, proto::v1, start,
};
use serde_json::{Value, json};

use super::{api::Api, kubelet::Kubelet, scheduler::Scheduler};

pub struct Node {
    pub dir: tempfile::TempDir,
    pub api: Api,
    pub scheduler: Scheduler,
    pub daemon: Daemon,
}

pub fn device(minor: u32) -> Device {
    Device {
        name: format!("gpu-{minor}"),
        uuid: format!("GPU-{minor:08}-0000-0000-0000-000000000000"),
        product: "NVIDIA H100 80GB HBM3".into(),
        compute_capability: Some((9, 0)),
        driver: "580.82.07".into(),
        pci_bus_id: Some(format!("0000:{minor:02x}:00.0")),
        pcie_root: Some("pci0000:00".into()),
        memory_bytes: 80 << 30,
        memory_guaranteeable: (80 << 30) - (800 << 20),
        context_bytes: 544 << 20,
        minor: Some(minor),
        mig: None,
        offer: None,
        emulated: false,
        fault: None,
        evict: false,
    }
}

/// Starts the real daemon on a directory of its own; it ends with the test's process.
pub async fn daemon(dir: &Path) -> Daemon {
    let config = gpumux_daemon::Config {
        runtime_dir: Some(dir.to_owned()),
        nvml: None,
        ..Default::default()
    };
    std::thread::spawn(move || gpumux_daemon::run(config, gpumux_daemon::receiver::Place::Threads));
    let client = Daemon::new(dir);
    let wait = async {
        while client.status().await.is_err() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), wait)
        .await
        .expect("a daemon");
    assert!(paths::container_socket(dir).exists());
    client
}

/// The driver's configuration on a node whose files are under `dir`.
pub fn config(dir: &Path, devices: Vec<Device>) -> Config {
    let places = Places {
        plugins: dir.join("plugins"),
        registry: dir.join("plugins_registry"),
        instance: None,
    };
    Config {
        node: "node1".into(),
        pod_resources: dir.join("pod-resources.sock"),
        state_dir: places.dir().join("claims"),
        places,
        cdi_dir: dir.join("cdi"),
        runtime_dir: dir.join("run"),
        host: cdi::Host {
            socket_dir: dir.join("run/container"),
            shim: dir.join("lib/libgpumux.so"),
            root: dir.into(),
            ..Default::default()
        },
        inventory: Inventory::Fixed(devices),
        mig_repartition: false,
        metrics: "127.0.0.1:0".parse().unwrap(),
        metrics_authenticate: false,
        after: |_: Step| {},
    }
}

impl Node {
    pub async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let daemon = daemon(&dir.path().join("run")).await;
        Self {
            api: Api::start().await,
            scheduler: Scheduler::default(),
            daemon,
            dir,
        }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn config(&self) -> Config {
        config(self.dir.path(), vec![device(0)])
    }

    /// Starts the driver and registers it with the kubelet.
    pub async fn start(&self) -> (gpumux_dra::Driver, Kubelet) {
        self.start_with(self.config()).await
    }

    /// The same with another configuration.
    pub async fn start_with(&self, config: Config) -> (gpumux_dra::Driver, Kubelet) {
        let registry = config.places.registry.clone();
        let driver = start(config, self.api.client.clone()).await.unwrap();
        let kubelet = Kubelet::register(&registry).await;
        self.api.until_published().await;
        (driver, kubelet)
    }

    /// A node with eight GPUs, its driver with its kubelet, and so many claims of a part of a GPU's memory.
    pub async fn full(claims: usize) -> (Self, gpumux_dra::Driver, Kubelet, Vec<v1::Claim>) {
        let mut node = Self::new().await;
        let mut config = node.config();
        config.inventory = Inventory::Fixed((0..8).map(device).collect());
        let (driver, kubelet) = node.start_with(config).await;
        let memory = json!({"memory": "3Gi"});
        let claims = node.claims(claims, "gpumux-preemptible", &memory);
        (node, driver, kubelet, claims)
    }

    /// So many claims, `c0` and on.
    pub fn claims(&mut self, count: usize, class: &str, capacity: &Value) -> Vec<v1::Claim> {
        (0..count)
            .map(|n| self.claim(&format!("c{n}"), class, capacity.clone(), None))
            .collect()
    }

    /// A claim of half a GPU.
    pub fn half(&mut self, name: &str) -> v1::Claim {
        let half = json!({"compute": "500"});
        self.claim(name, "gpumux-guaranteed", half, None)
    }

    /// A claim without a guarantee.
    pub fn preemptible(&mut self, name: &str) -> v1::Claim {
        self.claim(name, "gpumux-preemptible", json!({}), None)
    }

    /// Makes a claim and has it allocated for a pod of the same name.
    pub fn claim(
        &mut self,
        name: &str,
        class: &str,
        capacity: Value,
        share: Option<Value>,
    ) -> v1::Claim {
        let config = share.map(|mut fields| {
            fields["apiVersion"] = json!("config.gpumux.dev/v1alpha1");
            fields["kind"] = json!("GpuShare");
            json!([{"opaque": {"driver": gpumux_dra::DRIVER, "parameters": fields}}])
        });
        let mut spec = json!({"devices": {"requests": [{"name": "gpu", "exactly": {
            "deviceClassName": class, "allocationMode": "ExactCount", "count": 1,
            "capacity": {"requests": capacity}}}]}});
        if let Some(config) = config {
            spec["devices"]["config"] = config;
        }
        let claim =
            json!({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "spec": spec});
        let made = self.api.put_claim("team", name, claim);
        assert!(
            self.scheduler.bind(&self.api, "team", name, name),
            "{name} does not fit"
        );
        v1::Claim {
            namespace: "team".into(),
            name: name.into(),
            uid: made["metadata"]["uid"].as_str().unwrap().into(),
        }
    }

    /// The spec of a claim's tenant at the daemon.
    pub async fn tenant(&self, claim: &v1::Claim) -> Option<gpumux_daemon::api::types::Tenant> {
        let tenants = self.daemon.tenants().await.unwrap();
        tenants.into_iter().find(|tenant| {
            tenant
                .name
                .starts_with(&gpumux_dra::prepare::tenant_prefix(&claim.uid))
        })
    }

    pub fn cdi_file(&self, claim: &v1::Claim) -> PathBuf {
        cdi::path(&self.path("cdi"), &claim.uid)
    }

    /// How many claims are remembered.
    pub fn records(&self) -> usize {
        let store = Store::open(self.path("plugins/gpumux.dev/claims")).unwrap();
        store.all().unwrap().len()
    }
}
