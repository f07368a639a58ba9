//! kill -9 between every two steps of preparing and unpreparing: after a restart everything is as if nothing had been.

use std::{
    collections::BTreeSet,
    fs,
    io::{BufRead, BufReader},
    path::Path,
    process::{Child, Command, Stdio},
    sync::OnceLock,
    time::{Duration, Instant},
};

use gpumux_dra::{prepare::Step, proto::v1, start};
use gpumux_tests::{PATIENCE, wait_for};
use serde_json::json;

use crate::support::{
    api,
    kubelet::Kubelet,
    node::{Node, config, device},
};

/// The variable that makes this test's program the driver: the directory of the node.
const NODE: &str = "GPUMUX_TEST_NODE";
const URI: &str = "GPUMUX_TEST_URI";
/// The runtime directory of the daemon with GPUs in MIG mode, whose instances the driver makes.
const MIG: &str = "GPUMUX_TEST_MIG";
/// The step after which the driver kills itself.
const DIE_AFTER: &str = "GPUMUX_TEST_DIE_AFTER";
/// The instance that it is: the uid of its pod.
const INSTANCE: &str = "GPUMUX_TEST_INSTANCE";

static DIE: OnceLock<String> = OnceLock::new();

/// Not a test by itself: the driver as a process of its own, for the test below.
#[tokio::test(flavor = "multi_thread")]
async fn the_driver_as_a_process() {
    let Some(dir) = std::env::var_os(NODE) else {
        return;
    };
    DIE.set(std::env::var(DIE_AFTER).unwrap_or_default())
        .unwrap();
    let mut config = config(dir.as_ref(), vec![device(0)]);
    config.places.instance = std::env::var(INSTANCE).ok();
    if let Some(runtime_dir) = std::env::var_os(MIG) {
        config.inventory = gpumux_dra::inventory::Inventory::Node;
        config.mig_repartition = true;
        config.runtime_dir = runtime_dir.into();
    }
    config.after = |step| {
        if DIE.get().is_some_and(|die| *die == format!("{step:?}")) {
            rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL)
                .unwrap();
            // The signal arrives before this returns to anything that matters.
            std::thread::park();
        }
    };
    let driver = start(config, api::client(&std::env::var(URI).unwrap()))
        .await
        .unwrap();
    println!("serving");
    // Until the pipe from the test closes.
    let _ = tokio::task::spawn_blocking(|| std::io::stdin().read_line(&mut String::new())).await;
    driver.stop().await;
}

pub(crate) struct Driver(Child);

impl Driver {
    fn start(node: &Node, instance: &str, die_after: Option<Step>) -> Self {
        Self::start_on(node, None, instance, die_after)
    }

    /// Where `mig` is the runtime directory of a daemon with GPUs in MIG mode, on that.
    pub(crate) fn start_on(
        node: &Node,
        mig: Option<&Path>,
        instance: &str,
        die_after: Option<Step>,
    ) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "crash::the_driver_as_a_process", "--nocapture"])
            .envs(mig.map(|dir| (MIG, dir)))
            .env(NODE, node.dir.path())
            .env(URI, &node.api.uri)
            .env(INSTANCE, instance)
            .env(
                DIE_AFTER,
                die_after
                    .map(|step| format!("{step:?}"))
                    .unwrap_or_default(),
            )
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(
            lines.any(|line| line.is_ok_and(|line| line.ends_with("serving"))),
            "the driver did not start"
        );
        // What else it says must not block it.
        std::thread::spawn(move || lines.count());
        Self(child)
    }

    pub(crate) async fn kubelet(&self, node: &Node) -> Kubelet {
        Kubelet::register(&node.path("plugins_registry")).await
    }

    /// It kills itself after this step of preparing or unpreparing the claim.
    pub(crate) async fn dies_at(self, node: &Node, claim: &v1::Claim, step: Step) {
        let kubelet = self.kubelet(node).await;
        let error = match step >= Step::Undescribed {
            true => kubelet.unprepare_one(claim).await.unwrap_err(),
            false => kubelet.prepare_one(claim).await.unwrap_err(),
        };
        assert_eq!(error, "Closed", "{step:?}");
        self.died();
    }

    pub(crate) fn died(mut self) {
        use std::os::unix::process::ExitStatusExt;
        assert_eq!(self.0.wait().unwrap().signal(), Some(9));
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// All files of a node but for locks, of which there are a few, CDI files among them, and the daemon's descriptors of them: it is a thread of this process.
fn left(node: &Node) -> BTreeSet<String> {
    let dir = node.dir.path();
    let descriptors = fs::read_dir("/proc/self/fd").unwrap().flatten();
    let files = descriptors.filter_map(|it| fs::read_link(it.path()).ok());
    let own = files.filter(|file| file.starts_with(dir)).enumerate();
    let mut all: BTreeSet<String> = own.map(|(n, _)| format!("descriptor {n}")).collect();
    let mut folders = vec![dir.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap().flatten() {
            if entry.file_type().is_ok_and(|it| it.is_dir()) {
                folders.push(entry.path());
            }
            let name = entry.path().display().to_string();
            if !name.ends_with(".lock") {
                all.insert(name);
            }
        }
    }
    all
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_after_any_step_nothing_is_lost_and_nothing_stays() {
    let mut node = Node::new().await;
    let first = Driver::start(&node, "pod-a", None);
    node.api.until_published().await;
    let neighbour = node.half("neighbour");
    first
        .kubelet(&node)
        .await
        .prepare_one(&neighbour)
        .await
        .unwrap();
    drop(first);
    // `GPUMUX_TEST_SECONDS=600` makes it a soak.
    let seconds = std::env::var("GPUMUX_TEST_SECONDS").ok();
    let time = Duration::from_secs(seconds.map_or(0, |it| it.parse().unwrap()));
    let free = node.scheduler.clone();
    let (began, mut before) = (Instant::now(), None);
    for (round, step) in Step::ALL.into_iter().cycle().enumerate() {
        // What the first rounds needed is enough for all others.
        let rounds = round / Step::ALL.len();
        if rounds >= 1 && round % Step::ALL.len() == 0 {
            let before = before.get_or_insert_with(|| left(&node));
            wait_for("nothing new", PATIENCE, || {
                left(&node).is_subset(before).then_some(())
            });
            if rounds >= 2 && began.elapsed() >= time {
                let seconds = began.elapsed().as_secs();
                eprintln!(
                    "STORM claims: {round} kills of the DRA driver in {seconds} s; nothing new of {} files and descriptors",
                    before.len()
                );
                return;
            }
        }
        let going = step >= Step::Undescribed;
        let claim = node.claim(
            &format!("claim{round}"),
            "gpumux-guaranteed",
            json!({"compute": "50"}),
            Some(json!({"memoryLimit": "4Gi"})),
        );
        if going {
            let driver = Driver::start(&node, "pod-a", None);
            driver
                .kubelet(&node)
                .await
                .prepare_one(&claim)
                .await
                .unwrap();
        }
        let driver = Driver::start(&node, "pod-a", Some(step));
        driver.dies_at(&node, &claim, step).await;
        // The kubelet asks again until it gets an answer: of the same instance, or of one that is to replace it.
        let successor = ["pod-a", "pod-b"][round % Step::ALL.len() % 2];
        let driver = Driver::start(&node, successor, None);
        let kubelet = driver.kubelet(&node).await;
        if going {
            kubelet.unprepare_one(&claim).await.unwrap();
        } else {
            let devices = kubelet.prepare_one(&claim).await.unwrap();
            assert_eq!(devices.len(), 1, "{step:?}");
            assert_eq!(
                node.tenant(&claim).await.unwrap().spec.guaranteed,
                0.05,
                "{step:?}"
            );
            let described = fs::read_to_string(node.cdi_file(&claim)).unwrap();
            assert!(described.contains("GPUMUX_MEMORY_LIMIT="), "{step:?}");
            assert_eq!(node.records(), 2, "{step:?}");
            kubelet.unprepare_one(&claim).await.unwrap();
        }
        assert!(node.tenant(&claim).await.is_none(), "{step:?}");
        assert!(!node.cdi_file(&claim).exists(), "{step:?}");
        assert_eq!(node.records(), 1, "{step:?}");
        node.api.delete_claim("team", &claim.name);
        node.scheduler = free.clone();
        assert_eq!(
            node.tenant(&neighbour).await.unwrap().spec.guaranteed,
            0.5,
            "{step:?}"
        );
    }
}
