//! The kubelet's side: registration, the DRA services in both versions, and the health of devices.

use std::{
    fs::{self, File, OpenOptions},
    future::Future,
    io,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    pin::Pin,
    sync::Arc,
    time::{Duration, SystemTime},
};

use futures_util::{Stream, StreamExt};
use rustix::fs::{FlockOperation, flock};
use tokio::{net::UnixListener, sync::watch, task::JoinHandle};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Request, Response, Status, transport::Server};

use crate::{
    DRIVER,
    authority::Lenient,
    claim::{self, ClaimRef},
    device::Device,
    prepare::{Engine, Prepared},
    proto::{health, health_v1, registration, v1, v1beta1},
};

/// The services that are offered, the best first.
const SERVICES: [&str; 4] = [
    "v1.DRAPlugin",
    "v1beta1.DRAPlugin",
    "v1.DRAResourceHealth",
    "v1alpha1.DRAResourceHealth",
];
/// How often the health of all devices is said again.
const HEALTH_EVERY: Duration = Duration::from_secs(10);
/// After so long without news the kubelet is to take health for unknown.
const HEALTH_TIMEOUT: Duration = Duration::from_secs(30);
/// A Unix socket's path is at most this long.
const MAX_PATH: usize = 107;

/// Where the sockets are.
#[derive(Clone, Debug)]
pub struct Places {
    /// The kubelet's directory for plugins' own files.
    pub plugins: PathBuf,
    /// The directory that the kubelet watches for registrations.
    pub registry: PathBuf,
    /// Tells instances apart that run at the same time during a rolling update: the pod's uid.
    pub instance: Option<String>,
}

impl Places {
    /// The driver's directory.
    pub fn dir(&self) -> PathBuf {
        self.plugins.join(DRIVER)
    }

    /// The socket of the services.
    pub fn service_socket(&self) -> PathBuf {
        self.dir().join(match &self.instance {
            Some(instance) => format!("dra-{instance}.sock"),
            None => "dra.sock".to_owned(),
        })
    }

    /// The socket of the instance's health.
    pub fn health_socket(&self) -> PathBuf {
        self.dir().join(match &self.instance {
            Some(instance) => format!("health-{instance}.sock"),
            None => "health.sock".to_owned(),
        })
    }

    /// The socket of the registration.
    pub fn registration_socket(&self) -> PathBuf {
        self.registry.join(match &self.instance {
            Some(instance) => format!("{DRIVER}-{instance}-reg.sock"),
            None => format!("{DRIVER}-reg.sock"),
        })
    }
}

/// Why the kubelet cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum KubeletError {
    /// The same instance runs already.
    #[error(
        "another instance holds {0}: stop it, or give each its own --instance for a rolling update"
    )]
    Held(PathBuf),
    /// A socket or a directory.
    #[error("cannot use {0}: {1}")]
    Io(PathBuf, io::Error),
    /// Too long for the kernel.
    #[error("the path {0} is longer than {MAX_PATH} bytes: choose a shorter kubelet directory")]
    LongPath(PathBuf),
}

/// Whether the kubelet has taken the registration: not heard yet, yes, or why not.
pub type Registered = Option<Result<(), String>>;

/// The running services. Ends them on [`Served::stop`]; dropping it leaves the sockets to the next instance.
pub struct Served {
    /// Follows what the kubelet says of the registration.
    pub registered: watch::Receiver<Registered>,
    stop: watch::Sender<bool>,
    servers: Vec<(PathBuf, JoinHandle<Result<(), tonic::transport::Error>>)>,
    lock_path: PathBuf,
    _lock: File,
}

impl Served {
    /// Unregisters, lets calls that run end, and removes the sockets.
    pub async fn stop(self) {
        // The kubelet must not dial a socket that is about to go.
        for (socket, _) in self.servers.iter().rev() {
            let _ = fs::remove_file(socket);
        }
        let _ = self.stop.send(true);
        for (_, server) in self.servers {
            if let Ok(Err(error)) = server.await {
                tracing::warn!(%error, "a server ended badly");
            }
        }
        let _ = fs::remove_file(&self.lock_path);
    }
}

/// Starts to serve the kubelet.
///
/// # Errors
/// The sockets cannot be made, or another instance has them.
pub fn serve(engine: Engine, places: &Places) -> Result<Served, KubeletError> {
    let (service, registry) = (places.service_socket(), places.registration_socket());
    for path in [&service, &registry] {
        if path.as_os_str().len() > MAX_PATH {
            return Err(KubeletError::LongPath(path.clone()));
        }
        if let Some(dir) = path.parent() {
            fs::create_dir_all(dir).map_err(|e| KubeletError::Io(dir.to_owned(), e))?;
        }
    }
    let lock_path = service.with_extension("lock");
    let lock = hold(&lock_path)?;
    clear_dead(places, &lock_path);
    let (stop, stopped) = watch::channel(false);
    let (heard, registered) = watch::channel(None);
    let plugin = Arc::new(engine);
    let health = Arc::new(Health {
        pool: plugin.node.clone(),
        devices: plugin.devices.clone(),
        stopped: stopped.clone(),
    });
    let dra = Server::builder()
        .add_service(v1::dra_plugin_server::DraPluginServer::from_arc(
            plugin.clone(),
        ))
        .add_service(v1beta1::dra_plugin_server::DraPluginServer::from_arc(
            plugin.clone(),
        ))
        .add_service(health_v1::DraResourceHealthServer::from_arc(health.clone()))
        .add_service(health::dra_resource_health_server::DraResourceHealthServer::from_arc(health));
    let registration = Server::builder().add_service(
        registration::registration_server::RegistrationServer::new(Registration {
            endpoint: service.display().to_string(),
            heard,
        }),
    );
    // The services are there before the kubelet can find them.
    let mut servers = Vec::new();
    for (path, router) in [(service, dra), (registry, registration)] {
        let incoming = listen(&path)?;
        let mut stopped = stopped.clone();
        let until = async move { drop(stopped.wait_for(|stop| *stop).await) };
        servers.push((
            path,
            tokio::spawn(router.serve_with_incoming_shutdown(incoming, until)),
        ));
    }
    Ok(Served {
        registered,
        stop,
        servers,
        lock_path,
        _lock: lock,
    })
}

/// Removes the sockets of instances that were killed: no process holds their locks, and no other would remove them.
fn clear_dead(places: &Places, own: &Path) {
    let Ok(entries) = fs::read_dir(places.dir()) else {
        return;
    };
    for path in entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path != own)
    {
        let name = path
            .file_name()
            .and_then(|name| name.to_str())
            .unwrap_or_default();
        let Some(instance) = name
            .strip_prefix("dra-")
            .and_then(|name| name.strip_suffix(".lock"))
        else {
            continue;
        };
        let dead = Places {
            instance: Some(instance.to_owned()),
            ..places.clone()
        };
        if let Ok(_lock) = hold(&path) {
            tracing::info!(instance, "removing what a killed instance left");
            let sockets = [
                dead.registration_socket(),
                dead.service_socket(),
                dead.health_socket(),
            ];
            for left in sockets.into_iter().chain([path]) {
                let _ = fs::remove_file(left);
            }
        }
    }
}

/// Takes a lock that the process holds until it ends.
fn hold(path: &Path) -> Result<File, KubeletError> {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(false).mode(0o600);
    let file = options
        .open(path)
        .map_err(|e| KubeletError::Io(path.to_owned(), e))?;
    flock(&file, FlockOperation::NonBlockingLockExclusive)
        .map_err(|_| KubeletError::Held(path.to_owned()))?;
    Ok(file)
}

fn listen(path: &Path) -> Result<impl Stream<Item = io::Result<Lenient>> + use<>, KubeletError> {
    let failed = |e| KubeletError::Io(path.to_owned(), e);
    // We hold the lock: the process that bound it is gone.
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
        _ => {}
    }
    let listener = UnixListener::bind(path).map_err(failed)?;
    Ok(UnixListenerStream::new(listener).map(|stream| stream.map(Lenient::new)))
}

struct Registration {
    endpoint: String,
    heard: watch::Sender<Registered>,
}

#[tonic::async_trait]
impl registration::registration_server::Registration for Registration {
    async fn get_info(
        &self,
        _: Request<registration::InfoRequest>,
    ) -> Result<Response<registration::PluginInfo>, Status> {
        Ok(Response::new(registration::PluginInfo {
            r#type: "DRAPlugin".to_owned(),
            name: DRIVER.to_owned(),
            endpoint: self.endpoint.clone(),
            supported_versions: SERVICES.map(str::to_owned).to_vec(),
        }))
    }

    async fn notify_registration_status(
        &self,
        request: Request<registration::RegistrationStatus>,
    ) -> Result<Response<registration::RegistrationStatusResponse>, Status> {
        let status = request.into_inner();
        if status.plugin_registered {
            tracing::info!("registered with the kubelet");
        } else {
            tracing::error!(error = status.error, "the kubelet refuses the registration");
        }
        let _ = self.heard.send(Some(if status.plugin_registered {
            Ok(())
        } else {
            Err(status.error)
        }));
        Ok(Response::new(registration::RegistrationStatusResponse {}))
    }
}

/// The two versions differ in nothing but their names.
macro_rules! dra_plugin {
    ($version:ident) => {
        #[tonic::async_trait]
        impl $version::dra_plugin_server::DraPlugin for Engine {
            async fn node_prepare_resources(
                &self,
                request: Request<v1::NodePrepareResourcesRequest>,
            ) -> Result<Response<v1::NodePrepareResourcesResponse>, Status> {
                prepare(self.clone(), request.into_inner().claims).await
            }

            async fn node_unprepare_resources(
                &self,
                request: Request<v1::NodeUnprepareResourcesRequest>,
            ) -> Result<Response<v1::NodeUnprepareResourcesResponse>, Status> {
                unprepare(self.clone(), request.into_inner().claims).await
            }
        }
    };
}

dra_plugin!(v1);
dra_plugin!(v1beta1);

async fn prepare(
    engine: Engine,
    claims: Vec<v1::Claim>,
) -> Result<Response<v1::NodePrepareResourcesResponse>, Status> {
    let (claims, results) = detached(
        claims,
        |claims| async move { engine.prepare(&claims).await },
    )
    .await?;
    let device = |prepared: Prepared| v1::Device {
        // A container names the request, never its alternative; the kubelet compares the two as they are.
        request_names: vec![claim::request_of(&prepared.request).to_owned()],
        pool_name: prepared.pool,
        device_name: prepared.device,
        cdi_device_ids: vec![prepared.cdi_id],
        share_id: prepared.share_id,
    };
    let answers = claims.into_iter().zip(results).map(|(claim, result)| {
        let (devices, error) = match result {
            Ok(devices) => (devices.into_iter().map(device).collect(), String::new()),
            Err(error) => (Vec::new(), error.to_string()),
        };
        let answer = v1::NodePrepareResourceResponse { devices, error };
        (claim.uid, answer)
    });
    let claims = answers.collect();
    Ok(Response::new(v1::NodePrepareResourcesResponse { claims }))
}

async fn unprepare(
    engine: Engine,
    claims: Vec<v1::Claim>,
) -> Result<Response<v1::NodeUnprepareResourcesResponse>, Status> {
    let (claims, results) = detached(
        claims,
        |claims| async move { engine.unprepare(&claims).await },
    )
    .await?;
    let answers = claims.into_iter().zip(results).map(|(claim, result)| {
        let error = result
            .err()
            .map_or_else(String::new, |error| error.to_string());
        (claim.uid, v1::NodeUnprepareResourceResponse { error })
    });
    let claims = answers.collect();
    Ok(Response::new(v1::NodeUnprepareResourcesResponse { claims }))
}

/// Does the work in a task of its own: a kubelet that hangs up must not leave it half done.
async fn detached<T, F>(
    claims: Vec<v1::Claim>,
    work: impl FnOnce(Vec<ClaimRef>) -> F,
) -> Result<(Vec<ClaimRef>, T), Status>
where
    T: Send + 'static,
    F: Future<Output = T> + Send + 'static,
{
    let refer = |claim: v1::Claim| ClaimRef {
        namespace: claim.namespace,
        name: claim.name,
        uid: claim.uid,
    };
    let claims: Vec<_> = claims.into_iter().map(refer).collect();
    if let Some(claim) = claims.iter().find(|claim| !is_uid(&claim.uid)) {
        return Err(Status::invalid_argument(format!(
            "`{}` is no uid of a claim",
            claim.uid
        )));
    }
    let result = tokio::spawn(work(claims.clone())).await;
    let result = result.map_err(|error| Status::internal(error.to_string()))?;
    Ok((claims, result))
}

/// A uid becomes part of file names.
fn is_uid(uid: &str) -> bool {
    (1..=40).contains(&uid.len()) && uid.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
}

struct Health {
    pool: String,
    devices: watch::Receiver<Arc<Vec<Device>>>,
    stopped: watch::Receiver<bool>,
}

impl Health {
    fn stream(&self) -> HealthStream {
        let state = (
            self.pool.clone(),
            self.devices.clone(),
            self.stopped.clone(),
            true,
        );
        let stream = futures_util::stream::unfold(
            state,
            |(pool, mut devices, mut stopped, first)| async move {
                if !first {
                    tokio::select! {
                        _ = stopped.wait_for(|stop| *stop) => return None,
                        changed = devices.changed() => changed.ok()?,
                        () = tokio::time::sleep(HEALTH_EVERY) => {}
                    }
                }
                let news = health_of(&pool, &devices.borrow_and_update());
                Some((Ok(news), (pool, devices, stopped, false)))
            },
        );
        Box::pin(stream)
    }
}

type HealthStream =
    Pin<Box<dyn Stream<Item = Result<health::NodeWatchResourcesResponse, Status>> + Send>>;

macro_rules! health_service {
    ($server:path) => {
        #[tonic::async_trait]
        impl $server for Health {
            type NodeWatchResourcesStream = HealthStream;

            async fn node_watch_resources(
                &self,
                _: Request<health::NodeWatchResourcesRequest>,
            ) -> Result<Response<HealthStream>, Status> {
                Ok(Response::new(self.stream()))
            }
        }
    };
}

health_service!(health_v1::DraResourceHealth);
health_service!(health::dra_resource_health_server::DraResourceHealth);

fn health_of(pool: &str, devices: &[Device]) -> health::NodeWatchResourcesResponse {
    let now = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default();
    let one = |device: &Device, name: String| health::DeviceHealth {
        device: Some(health::DeviceIdentifier {
            pool_name: pool.to_owned(),
            device_name: name,
        }),
        health: match device.fault {
            None => health::HealthStatus::Healthy,
            Some(_) => health::HealthStatus::Unhealthy,
        }
        .into(),
        last_updated_time: now.as_secs().cast_signed(),
        health_check_timeout_seconds: HEALTH_TIMEOUT.as_secs().cast_signed(),
        message: {
            let fault = device.fault.as_deref().unwrap_or_default();
            fault[..fault.floor_char_boundary(1024)].to_owned()
        },
    };
    let both = |device: &Device| {
        let whole = device.whole_name();
        let shared = (whole != device.name).then(|| one(device, device.name.clone()));
        shared.into_iter().chain([one(device, whole)])
    };
    health::NodeWatchResourcesResponse {
        devices: devices.iter().flat_map(both).collect(),
    }
}
