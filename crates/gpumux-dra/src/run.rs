//! The driver as a whole: configuration, start, and end.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use gpumux_daemon::{client::Client as Daemon, paths};
use rustix::fs::{FlockOperation, flock};
use tokio::{
    sync::{mpsc, watch},
    task::{AbortHandle, JoinSet},
};

use crate::{
    cdi,
    checkpoint::{CheckpointError, Store},
    events::Events,
    health::{self, Check, CheckError, Health, Leading},
    http,
    inventory::{self, Inventory},
    kubelet::{self, KubeletError, Places, Served},
    live,
    metrics::{self, Endpoints},
    prepare::{Engine, Step},
    publish::{self, Published},
    slices::{self, Node},
};

/// How often the daemon is checked for tenants that it should have.
const RESTORE_EVERY: Duration = Duration::from_secs(5);
/// How often the API server is asked for the node until it knows it.
const FIND_EVERY: Duration = Duration::from_secs(2);
/// How often an instance that waits for another to end looks.
const WAIT_EVERY: Duration = Duration::from_secs(1);

const EXAMPLES: &str = "\
Examples:
  gpumux dra --node-name n1 --print-slices   what this node would offer; needs no cluster

In a cluster its Helm chart runs it: see docs/kubernetes.md.";

/// Run the Kubernetes DRA driver of this node
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Name of the Kubernetes node.
    #[arg(long, env = "NODE_NAME")]
    pub node_name: String,
    /// Tells instances apart that run at the same time during a rolling update, such as the pod's uid.
    #[arg(long, env = "POD_UID")]
    pub instance: Option<String>,
    /// The kubelet's directory.
    #[arg(long, default_value = "/var/lib/kubelet", value_name = "DIR")]
    pub kubelet_dir: PathBuf,
    /// Where the container runtime looks for CDI files.
    #[arg(long, default_value = "/var/run/cdi", value_name = "DIR")]
    pub cdi_dir: PathBuf,
    /// The daemon's directory, on the host and here. [default: /run/gpumux]
    #[arg(long, env = "GPUMUX_RUNTIME_DIR", value_name = "DIR")]
    pub runtime_dir: Option<PathBuf>,
    /// The directory on the host that has libgpumux.so.
    #[arg(long, default_value = "/var/lib/gpumux/lib", value_name = "DIR")]
    pub library_dir: PathBuf,
    /// Where the host's / is seen from here.
    #[arg(long, default_value = "/", value_name = "DIR")]
    pub host_root: PathBuf,
    /// Where the driver is installed on the host if not in /, such as /run/nvidia/driver.
    #[arg(long, value_name = "DIR")]
    pub driver_root: Option<PathBuf>,
    /// Where metrics are served.
    #[arg(long, default_value = "0.0.0.0:9400", value_name = "ADDRESS")]
    pub metrics: SocketAddr,
    /// Serve metrics only to clients that the API server lets `get` /metrics: they send a bearer token.
    #[arg(long)]
    pub metrics_authenticate: bool,
    /// Make a MIG instance for each claim that is allocated one, and remove it when the claim goes, on GPUs in MIG mode. Instances that
    /// others made stay as they are.
    #[arg(long)]
    pub mig_repartition: bool,
    /// The emulated device's socket, if this node shares the emulated device.
    #[arg(long, env = "GPUMUX_EMU_SOCKET", value_name = "SOCKET")]
    pub emulated: Option<PathBuf>,
    /// Only print the ResourceSlices that the node would publish, as JSON.
    #[arg(long)]
    pub print_slices: bool,
    /// Only ask the instance that runs with the same options, as the kubelet's probes do.
    #[arg(long, value_name = "WHAT", conflicts_with = "print_slices")]
    pub check: Option<Check>,
}

/// Everything that the driver must know.
#[derive(Clone, Debug)]
pub struct Config {
    /// The node's name.
    pub node: String,
    /// The kubelet's places.
    pub places: Places,
    /// The kubelet's socket that says which containers use which claims.
    pub pod_resources: PathBuf,
    /// Where claims are remembered.
    pub state_dir: PathBuf,
    /// Where CDI files go.
    pub cdi_dir: PathBuf,
    /// The daemon's directory.
    pub runtime_dir: PathBuf,
    /// What goes into containers.
    pub host: cdi::Host,
    /// Where devices come from.
    pub inventory: Inventory,
    /// Whether MIG instances are made for claims.
    pub mig_repartition: bool,
    /// Where metrics are served.
    pub metrics: SocketAddr,
    /// Only to clients that the API server allows it.
    pub metrics_authenticate: bool,
    /// Told after each step of preparing and unpreparing; for tests.
    pub after: fn(Step),
}

impl From<Args> for Config {
    fn from(args: Args) -> Self {
        let runtime_dir = args.runtime_dir.unwrap_or_else(|| "/run/gpumux".into());
        let places = Places {
            plugins: args.kubelet_dir.join("plugins"),
            registry: args.kubelet_dir.join("plugins_registry"),
            instance: args.instance,
        };
        let socket = paths::container_socket(&runtime_dir);
        Self {
            node: args.node_name,
            pod_resources: args.kubelet_dir.join("pod-resources/kubelet.sock"),
            state_dir: places.dir().join("claims"),
            places,
            cdi_dir: args.cdi_dir,
            host: cdi::Host {
                socket_dir: socket.parent().unwrap_or(&runtime_dir).to_owned(),
                shim: args.library_dir.join("libgpumux.so"),
                emulator: args
                    .emulated
                    .as_ref()
                    .map(|_| args.library_dir.join("libgpumux_emu.so")),
                emulator_socket: args.emulated,
                root: args.host_root,
                driver_root: args.driver_root,
            },
            runtime_dir,
            inventory: Inventory::Node,
            mig_repartition: args.mig_repartition,
            metrics: args.metrics,
            metrics_authenticate: args.metrics_authenticate,
            after: |_| {},
        }
    }
}

/// Why the driver does not run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No way to the API server.
    #[error("no API server: {0}; run in a pod, or set KUBECONFIG")]
    NoCluster(String),
    /// Nothing to offer.
    #[error(
        "no daemon in {0} has a device: start `gpumux daemon`, or name its folder with --runtime-dir"
    )]
    NoDevices(PathBuf),
    /// What must be remembered.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The kubelet's places.
    #[error(transparent)]
    Kubelet(#[from] KubeletError),
    /// What an instance answered.
    #[error(transparent)]
    Check(#[from] CheckError),
    /// The socket of the instance's health.
    #[error("cannot serve health at {0}: {1}")]
    Health(PathBuf, std::io::Error),
    /// The extender's address.
    #[error("cannot listen at {0}: {1}; choose another address with --listen")]
    Listen(SocketAddr, std::io::Error),
    /// The system.
    #[error(transparent)]
    Io(#[from] std::io::Error),
}

/// Runs the driver until SIGTERM or SIGINT.
///
/// # Errors
/// It cannot start; once started, it retries.
pub fn run(config: Config) -> Result<(), Error> {
    until_signal(async |client| start(config, client).await, Driver::stop)
}

/// Starts something in a runtime of its own, and stops it at SIGTERM or SIGINT.
pub(crate) fn until_signal<T>(
    start: impl AsyncFnOnce(kube::Client) -> Result<T, Error>,
    stop: impl AsyncFnOnce(T),
) -> Result<(), Error> {
    // Two providers may be linked; the HTTP client does not choose.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    runtime.block_on(async {
        use tokio::signal::unix::{SignalKind, signal};
        let (mut term, mut int) = (
            signal(SignalKind::terminate())?,
            signal(SignalKind::interrupt())?,
        );
        let client = kube::Client::try_default()
            .await
            .map_err(|e| Error::NoCluster(e.to_string()))?;
        let running = start(client).await?;
        tokio::select! {
            _ = term.recv() => {}
            _ = int.recv() => {}
        }
        stop(running).await;
        Ok(())
    })
}

/// The ResourceSlices that the driver would publish now, as a JSON list, without any cluster.
///
/// # Errors
/// There are no devices.
pub fn slices_json(config: Config) -> Result<String, Error> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let (state_dir, makes) = (&config.state_dir, config.mig_repartition);
    let records = makes.then(|| Store::open(state_dir)).transpose()?;
    let devices = runtime.block_on(async {
        let daemon = Daemon::new(&config.runtime_dir);
        let devices = inventory::watch(config.inventory, daemon, records, makes).await;
        Arc::clone(&devices.borrow())
    });
    if devices.is_empty() {
        return Err(Error::NoDevices(config.runtime_dir));
    }
    let node = Node {
        name: config.node,
        uid: String::new(),
    };
    let specs = slices::build(&node, &devices, 1).into_iter().enumerate();
    let objects: Vec<_> = specs
        .map(|(index, spec)| slices::object(&node, index, spec))
        .collect();
    Ok(serde_json::to_string_pretty(&objects).map_err(std::io::Error::from)?)
}

/// Asks the instance that runs with this configuration.
///
/// # Errors
/// It does not answer, or is not what is asked.
pub fn check(config: &Config, check: Check) -> Result<(), Error> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let socket = config.places.health_socket();
    Ok(runtime.block_on(health::check(&socket, check))?)
}

/// A running driver.
pub struct Driver {
    /// Does what the kubelet asks.
    pub engine: Engine,
    /// Follows the publisher of this instance; it says nothing while another instance publishes.
    pub published: watch::Receiver<Published>,
    /// The kubelet's services.
    pub served: Served,
    health_socket: PathBuf,
    tasks: JoinSet<()>,
}

impl Driver {
    /// Unregisters and ends. Pods run on; the slices stay for the next instance.
    pub async fn stop(mut self) {
        self.served.stop().await;
        self.tasks.shutdown().await;
        let _ = std::fs::remove_file(self.health_socket);
    }
}

/// Starts the driver in this runtime.
///
/// # Errors
/// The kubelet's places cannot be used.
pub async fn start(config: Config, client: kube::Client) -> Result<Driver, Error> {
    let daemon = Daemon::new(&config.runtime_dir);
    let store = Store::open(&config.state_dir)?;
    let (records, makes) = (Some(store.clone()), config.mig_repartition);
    let devices = inventory::watch(config.inventory, daemon.clone(), records, makes).await;
    let (news, heard) = mpsc::unbounded_channel();
    let engine = Engine {
        node: config.node.clone(),
        kube: client.clone(),
        daemon,
        store,
        cdi_dir: config.cdi_dir,
        host: Arc::new(config.host),
        devices: devices.clone(),
        news,
        events: Events::new(client.clone(), &config.node),
        after: config.after,
    };
    let served = kubelet::serve(engine.clone(), &config.places)?;
    let (result, published) = watch::channel(Published::default());
    let mut tasks = JoinSet::new();
    serve_metrics(
        &mut tasks,
        config.metrics,
        Endpoints {
            engine: engine.clone(),
            pod_resources: config.pod_resources,
            published: published.clone(),
            authenticate: config.metrics_authenticate,
        },
    );
    let (leads, leading) = watch::channel(Leading::Waits);
    let health_socket = config.places.health_socket();
    let health = Health {
        engine: engine.clone(),
        published: published.clone(),
        registered: served.registered.clone(),
        leading,
    };
    let health = health::serve(&health_socket, health);
    tasks.spawn(health.map_err(|error| Error::Health(health_socket.clone(), error))?);
    let (lock, leader) = (config.places.dir().join("leader.lock"), engine.clone());
    tasks.spawn(async move {
        let leads = EndsWith(leads);
        // Of two instances the older leads until it ends, so that they never undo each other's work.
        let Ok(_lead) = lead(&lock)
            .await
            .inspect_err(|error| tracing::error!(%error, "cannot lead"))
        else {
            return;
        };
        leads.0.send_replace(Leading::Leads);
        let publish = async {
            // Claims can be unprepared while the API server is away; slices cannot be published.
            let node = find(&client, &leader.node).await;
            publish::run(client.clone(), node, devices, result).await;
        };
        tokio::join!(
            publish,
            live::run(leader.clone(), heard),
            restore(leader.clone()),
        );
    });
    Ok(Driver {
        engine,
        published,
        served,
        health_socket,
        tasks,
    })
}

/// Says that the leader's tasks have ended, also if one of them failed.
struct EndsWith(watch::Sender<Leading>);

impl Drop for EndsWith {
    fn drop(&mut self) {
        self.0.send_replace(Leading::Ended);
    }
}

/// Waits until no other instance leads.
async fn lead(path: &Path) -> std::io::Result<std::fs::File> {
    let file = std::fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .open(path)?;
    while flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
        tokio::time::sleep(WAIT_EVERY).await;
    }
    Ok(file)
}

/// The node, once the API server knows it.
async fn find(client: &kube::Client, name: &str) -> Node {
    loop {
        match publish::node(client, name).await {
            Ok(node) => return node,
            Err(error) => tracing::warn!(node = name, %error, "cannot publish yet"),
        }
        tokio::time::sleep(FIND_EVERY).await;
    }
}

async fn restore(engine: Engine) {
    loop {
        match engine.restore().await {
            Ok(0) => {}
            Ok(restored) => tracing::info!(restored, "claims whose tenants the daemon had lost"),
            Err(error) => tracing::warn!(%error, "cannot check the daemon's tenants"),
        }
        tokio::time::sleep(RESTORE_EVERY).await;
    }
}

fn serve_metrics(
    tasks: &mut JoinSet<()>,
    address: SocketAddr,
    endpoints: Endpoints,
) -> AbortHandle {
    tasks.spawn(async move {
        let mut warned = false;
        let listener = loop {
            match tokio::net::TcpListener::bind(address).await {
                Ok(listener) => break listener,
                // During a rolling update the older instance has it.
                Err(error) if !warned => {
                    tracing::warn!(%address, %error, "no metrics until the address is free");
                    warned = true;
                }
                Err(_) => {}
            }
            tokio::time::sleep(WAIT_EVERY).await;
        };
        http::serve(listener, metrics::router(endpoints)).await;
    })
}
