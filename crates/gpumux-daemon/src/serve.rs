//! The daemon's life: from its lock to its last word.

use std::{
    fs::DirBuilder,
    future::Future,
    io,
    net::SocketAddr,
    os::{fd::OwnedFd, unix::fs::DirBuilderExt},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use sd_notify::NotifyState;
use tokio::{
    net::TcpListener,
    signal::unix::{SignalKind, signal},
    sync::watch,
};

use crate::{
    api::{self, Api},
    claims::{Claimed, Claims},
    config::{Config, ConfigError},
    devices::{self, Devices, Numbers},
    examine::Examiner,
    groups::Groups,
    history,
    mig::Partitioner,
    mistakes::absences,
    mistakes::mistakes,
    paths::{self, DirError, RuntimeDir},
    peer::ProcessId,
    quota::Quota,
    receiver::{self, Place, Receiver},
    scheduler::{self, Command, Handle, Stopped},
    session::{HELLO, Sessions},
    signals,
    tenants::{self, Files, TenantError, Tenants},
    users::Users,
};

/// How long NVML may take before the daemon is ready without it.
const NVML: Duration = Duration::from_secs(3);
/// How long sessions may take to say goodbye.
const GOODBYE: Duration = Duration::from_secs(2);
/// How often the daemon looks whether it can go on: several times in what a service manager waits for a sign of life.
const BEAT: Duration = Duration::from_secs(1);
/// Connections that may wait to be accepted.
const BACKLOG: i32 = 4096;

/// Why the daemon does not run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The configuration makes no sense.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The runtime directory cannot be had; among others because another daemon has it
    /// ([`DirError::AlreadyRunning`]).
    #[error(transparent)]
    Dir(#[from] DirError),
    /// Another daemon has a device.
    #[error(transparent)]
    Claimed(#[from] Claimed),
    /// A socket cannot be made.
    #[error("cannot listen on {0}: {1}")]
    Listen(PathBuf, io::Error),
    /// The TCP address of the configuration cannot be had.
    #[error("cannot listen on {0}, which `listen` in the configuration names: {1}")]
    ListenTcp(SocketAddr, io::Error),
    /// The tenants of the last daemon cannot be taken over.
    #[error("cannot take the tenants over: {0}")]
    Tenants(String),
    /// The system refuses something that every daemon needs.
    #[error("cannot start: {0}")]
    System(#[from] io::Error),
}

impl From<TenantError> for Error {
    fn from(error: TenantError) -> Self {
        Self::Tenants(error.to_string())
    }
}

impl From<Stopped> for Error {
    fn from(error: Stopped) -> Self {
        Self::Tenants(error.to_string())
    }
}

/// Runs the daemon until SIGTERM, SIGINT or SIGHUP (the last unless it is ignored, as by `nohup`), or until it was idle for as long as the configuration says.
/// Every channel group is thawed and has its own timeslice back when it returns.
///
/// # Errors
/// When it cannot start.
pub fn run(config: Config, place: Place) -> Result<(), Error> {
    let runtime = runtime()?;
    let result = runtime.block_on(async {
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut hangup = match signals::is_ignored(SignalKind::hangup().as_raw_value()) {
            true => None,
            false => Some(signal(SignalKind::hangup())?),
        };
        let hung_up = async move {
            match &mut hangup {
                Some(hangup) => drop(hangup.recv().await),
                None => std::future::pending().await,
            }
        };
        let signalled = async move {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
                () = hung_up => {}
            }
        };
        serve(config, place, signalled).await
    });
    // A driver or an emulated device that does not answer must not keep the process.
    runtime.shutdown_timeout(Duration::from_secs(1));
    result
}

/// Ends the groups that a daemon has left to the next one, with the processes in them: for when none comes any more.
///
/// # Errors
/// When a daemon runs, or the runtime directory cannot be had.
pub fn end_groups(config: &Config) -> Result<(), Error> {
    config.check()?;
    let runtime = runtime()?;
    runtime.block_on(async {
        let dir = runtime_dir(config)?;
        // Their ends are not waited for.
        let examiner = Examiner::new(Place::Process);
        Groups::load(config, dir.path(), examiner).close().await;
        Ok::<_, Error>(())
    })?;
    runtime.shutdown_timeout(Duration::from_secs(1));
    Ok(())
}

/// The machine's GPUs and MIG instances, by UUID with NVML's numbers; none without NVML.
pub fn known_devices(config: &Config) -> Option<Numbers> {
    let runtime = runtime().ok()?;
    let known = runtime.block_on(async {
        let (devices, mut looked) = Devices::watch(config.nvml.clone());
        let _ = tokio::time::timeout(NVML, looked.wait_for(|looked| *looked)).await;
        devices.list()
    });
    runtime.shutdown_timeout(Duration::from_secs(1));
    (!known.is_empty()).then(|| devices::numbered(&known))
}

fn runtime() -> io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .max_blocking_threads(16)
        .enable_all()
        .build()
}

fn runtime_dir(config: &Config) -> Result<RuntimeDir, DirError> {
    let dir = config.runtime_dir.clone();
    RuntimeDir::take(dir.unwrap_or_else(paths::runtime_dir))
}

/// The daemon, until `ended` says so.
async fn serve(config: Config, place: Place, ended: impl Future<Output = ()>) -> Result<(), Error> {
    if let Some(mistake) = mistakes(&config).into_iter().next() {
        return Err(mistake.into());
    }
    raise_file_limit();
    let dir = runtime_dir(&config)?;
    let config = Arc::new(config);
    let scheduler = scheduler::start(Arc::clone(&config))?;
    let (devices, mut looked) = Devices::watch(config.nvml.clone());
    let (session_socket, api_socket) = (
        paths::session_socket(dir.path()),
        paths::api_socket(dir.path()),
    );
    let state = state_dir(&config, dir.path());
    let files = Files {
        tenants: dir.path().join("tenants.json"),
        settings: state.join("settings.json"),
        programs: state.join("programs.json"),
    };
    let groups = Groups::load(&config, dir.path(), Examiner::new(place));
    let tenants = Tenants::load(
        files,
        session_socket.display().to_string(),
        scheduler.clone(),
        Arc::clone(&groups),
        Users::new(Arc::clone(&config)),
    )
    .await?;
    tenants::watch(&tenants).await?;
    let sessions = Sessions::new(&config, HELLO, Arc::clone(&tenants), scheduler.clone());
    let listener = listen(&session_socket)?;
    let tcp = match config.listen {
        Some(address) => Some(listen_tcp(address.0).await?),
        None => None,
    };
    paths::share_with_containers(dir.path())
        .map_err(|error| Error::Listen(session_socket.clone(), error))?;
    // The API's socket appears last: a client that finds it finds a daemon that is ready.
    let _ = tokio::time::timeout(NVML, looked.wait_for(|looked| *looked)).await;
    let mut claims = Claims::new(config.emulated.as_deref());
    if let Some(claimed) = know(&mut claims, &devices, &scheduler)
        .await?
        .into_iter()
        .next()
    {
        return Err(claimed.into());
    }
    // What has failed must not keep the rest from its daemon.
    let known = devices::numbered(&devices.list());
    for absence in absences(&config, Some(&known).filter(|known| !known.is_empty())) {
        tracing::warn!("{absence}");
    }
    let listen_api =
        |socket: &Path| api::listen(socket).map_err(|error| Error::Listen(socket.into(), error));
    let receiver = {
        let setting = receiver::Setting {
            place,
            emulated: config.emulated.clone(),
            connections: config.max_sessions + api::CONNECTIONS,
        };
        move |listener, api| Receiver::start(&setting, listener, api)
    };
    let first = receiver(listener, listen_api(&api_socket)?)?;
    let arrivals = receiver::receive(first, move || {
        let _ = (
            std::fs::remove_file(&session_socket),
            std::fs::remove_file(&api_socket),
        );
        let listener = listen(&session_socket).map_err(io::Error::other)?;
        receiver(listener, api::listen(&api_socket)?)
    });
    let (stop, stopped) = watch::channel(false);
    let api = Arc::new(Api {
        config: Arc::clone(&config),
        tenants: Arc::clone(&tenants),
        sessions: Arc::clone(&sessions),
        scheduler: scheduler.clone(),
        devices: devices.clone(),
        partitioner: Partitioner::new(config.nvml.clone()),
        runtime_dir: dir.path().to_owned(),
        started: Instant::now(),
        listen: tcp.as_ref().and_then(|listener| listener.local_addr().ok()),
        live: tokio::sync::Mutex::default(),
        past: history::Past::default(),
        watchers: Quota::default(),
        last: std::sync::Mutex::default(),
    });
    tokio::spawn(api::history::keep(Arc::clone(&api), stopped.clone()));
    if let Some(listener) = tcp {
        tokio::spawn(api::serve_tcp(
            api::readable_router(Arc::clone(&api)),
            listener,
            stopped.clone(),
        ));
    }
    let api_task = tokio::spawn(api::serve(api::router(api), arrivals.api, stopped.clone()));
    let session_task = tokio::spawn(Arc::clone(&sessions).serve(arrivals.sessions, stopped));
    tell(&[NotifyState::Ready]);
    tracing::info!(dir = %dir.path().display(), "ready");

    let idle = config.idle_exit_s.map(Duration::from_secs);
    let result = tokio::select! {
        () = ended => Ok(()),
        () = idle_for(&tenants, idle) => {
            tracing::info!("no tenant runs any more: the daemon ends");
            Ok(())
        }
        result = keep_house(&dir, &mut claims, &devices, &scheduler, looked) => result,
    };

    tell(&[NotifyState::Stopping]);
    tenants.close().await;
    // First all processes run as before, then they are notified.
    let restored = scheduler.ask(Command::Restore).await;
    let _ = stop.send(true);
    let gone = async {
        while sessions.count() > 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let _ = tokio::time::timeout(GOODBYE, gone).await;
    let _ = tokio::join!(api_task, session_task);
    match dir.check() {
        Ok(()) => groups.close().await,
        // The file there is another daemon's.
        Err(_) => groups.end_empty().await,
    }
    tracing::info!("stopped");
    result.and(Ok(restored?))
}

/// Listens where sessions shall be.
fn listen(socket: &Path) -> Result<OwnedFd, Error> {
    let cannot = |error| Error::Listen(socket.to_owned(), error);
    let listener = gpumux_wire::socket::listen(socket, BACKLOG).map_err(cannot)?;
    paths::open_to_all(socket).map_err(cannot)?;
    Ok(listener)
}

/// Where what survives the machine's end is kept. One that cannot be written is reported with what else is absent.
fn state_dir(config: &Config, runtime_dir: &Path) -> PathBuf {
    let dir = config.state_dir.as_ref();
    // A disk that is full or read-only must not keep tenants from their daemon.
    let made = dir.filter(|dir| {
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(dir)
            .is_ok()
    });
    made.map_or_else(|| runtime_dir.to_owned(), PathBuf::clone)
}

async fn listen_tcp(address: SocketAddr) -> Result<TcpListener, Error> {
    let cannot = |error| Error::ListenTcp(address, error);
    let listener = TcpListener::bind(address).await.map_err(cannot)?;
    let own = listener.local_addr().map_err(cannot)?;
    tracing::info!("http://{own}/ shows what happens; http://{own}/metrics is for Prometheus");
    Ok(listener)
}

/// Returns when there was no tenant for as long as `idle` says.
async fn idle_for(tenants: &Tenants, idle: Option<Duration>) {
    let Some(idle) = idle else {
        return std::future::pending().await;
    };
    while let Err(rest) = tenants.close_if_empty(idle).await {
        tokio::time::sleep(rest.max(Duration::from_millis(100))).await;
    }
}

/// Tells the scheduler of devices, and the service manager that all is well. Returns when the daemon cannot go on.
async fn keep_house(
    dir: &RuntimeDir,
    claims: &mut Claims,
    devices: &Devices,
    scheduler: &Handle,
    mut looked: watch::Receiver<bool>,
) -> Result<(), Error> {
    let watched = sd_notify::watchdog_enabled(false, &mut 0);
    let mut beat = tokio::time::interval(BEAT);
    let mut nvml = true;
    loop {
        tokio::select! {
            _ = beat.tick() => {
                dir.check()?;
                claims.answer();
                // Only a scheduler that still works is well.
                look_for_stopped(scheduler).await?;
                if watched {
                    tell(&[NotifyState::Watchdog]);
                }
            }
            changed = looked.changed(), if nvml => {
                nvml = changed.is_ok();
                for claimed in know(claims, devices, scheduler).await? {
                    tracing::warn!("{claimed}. Until then this daemon leaves it out");
                }
            }
        }
    }
}

/// Reports to the scheduler which processes with work are stopped.
async fn look_for_stopped(scheduler: &Handle) -> Result<(), Stopped> {
    let mut standing = scheduler.ask(Command::Standing).await?;
    if standing.is_empty() {
        return Ok(());
    }
    let looked = tokio::task::spawn_blocking(|| {
        standing.retain(|pid| ProcessId::is_stopped(*pid));
        standing
    });
    let stopped = looked.await.unwrap_or_default();
    scheduler
        .ask(|answer| Command::Stopped(stopped, answer))
        .await
}

/// Reports the devices to the scheduler. Returns those of which it is new that another daemon has them.
async fn know(
    claims: &mut Claims,
    devices: &Devices,
    scheduler: &Handle,
) -> Result<Vec<Claimed>, Error> {
    let claimed = claims.claim(&devices.list());
    devices.set_others(claims.others());
    let known = |answer| Command::KnowDevices(devices.list(), answer);
    scheduler.ask(known).await?;
    Ok(claimed)
}

/// Without a service manager the notice has no receiver.
fn tell(state: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(false, state) {
        tracing::debug!(%error, "cannot notify the service manager");
    }
}

/// Every session needs some files.
pub(crate) fn raise_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    let most = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    if let Err(error) = setrlimit(Resource::Nofile, most) {
        tracing::warn!(%error, "cannot raise the limit of open files");
    }
}

#[cfg(test)]
mod tests;
