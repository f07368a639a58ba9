//! Whether an instance is alive and ready, on a Unix socket of its own: two instances run during a rolling update, and neither a port
//! of the node nor a flood of requests for metrics may decide about them.

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use axum::{Router, extract::State, http::StatusCode, routing::get};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{UnixListener, UnixStream},
    sync::watch,
};

use crate::{
    http,
    kubelet::Registered,
    prepare::Engine,
    publish::{self, Published},
};

/// How long the API server and the daemon may take before an instance counts as not ready. The chart's probes wait longer.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long a probe waits for the instance.
const PROBE: Duration = Duration::from_secs(9);
/// Most bytes of an answer to a probe.
const ANSWER: u64 = 4096;

/// Of several instances on the node, the older publishes slices and follows claims.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leading {
    /// Another instance does.
    Waits,
    /// This one.
    Leads,
    /// This one did, and its tasks have ended.
    Ended,
}

/// What is asked of an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Check {
    /// It answers, and its tasks run.
    Live,
    /// It can take over: registered with the kubelet, gpumuxd answers, and slices are published or could be.
    Ready,
}

impl Check {
    const fn path(self) -> &'static str {
        match self {
            Self::Live => "/livez",
            Self::Ready => "/readyz",
        }
    }
}

/// What is looked at.
#[derive(Clone)]
pub(crate) struct Health {
    pub(crate) engine: Engine,
    pub(crate) published: watch::Receiver<Published>,
    pub(crate) registered: watch::Receiver<Registered>,
    pub(crate) leading: watch::Receiver<Leading>,
}

impl Health {
    fn live(&self) -> Result<(), String> {
        match *self.leading.borrow() {
            Leading::Ended => Err("publishing slices and following claims has ended".to_owned()),
            Leading::Waits | Leading::Leads => Ok(()),
        }
    }

    async fn ready(&self) -> Result<(), String> {
        self.live()?;
        match &*self.registered.borrow() {
            Some(Ok(())) => {}
            Some(Err(error)) => {
                return Err(format!("the kubelet refuses the registration: {error}"));
            }
            None => return Err("not registered with the kubelet yet".to_owned()),
        }
        let engine = &self.engine;
        let leads = *self.leading.borrow() == Leading::Leads;
        if leads {
            let published = self.published.borrow();
            return match &published.error {
                Some(error) => Err(error.clone()),
                None if !published.looked => Err("slices are not published yet".to_owned()),
                None => Ok(()),
            };
        }
        let daemon = async {
            engine
                .daemon
                .status()
                .await
                .map_err(|error| error.to_string())
        };
        let devices = engine.devices.borrow().clone();
        let slices = async {
            let rehearsed = publish::rehearse(&engine.kube, &engine.node, &devices).await;
            rehearsed.map_err(|error| error.to_string())
        };
        let both = async { tokio::try_join!(daemon, slices) };
        match tokio::time::timeout(PATIENCE, both).await {
            Ok(answers) => answers.map(drop),
            Err(_) => Err(format!(
                "gpumuxd and the API server did not both answer within {} s",
                PATIENCE.as_secs()
            )),
        }
    }
}

/// Serves an instance's health. No other process may serve there: the caller holds the instance's lock.
///
/// # Errors
/// The socket cannot be made.
pub(crate) fn serve(socket: &Path, health: Health) -> io::Result<impl Future<Output = ()> + use<>> {
    match std::fs::remove_file(socket) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(socket)?;
    let answer = |result: Result<(), String>| match result {
        Ok(()) => (StatusCode::OK, "ok\n".to_owned()),
        Err(why) => (StatusCode::SERVICE_UNAVAILABLE, why + "\n"),
    };
    let live = async move |State(health): State<Arc<Health>>| answer(health.live());
    let ready = async move |State(health): State<Arc<Health>>| answer(health.ready().await);
    let router = Router::new()
        .route(Check::Live.path(), get(live))
        .route(Check::Ready.path(), get(ready))
        .with_state(Arc::new(health));
    Ok(http::serve(listener, router))
}

/// Why a check failed.
#[derive(Debug, thiserror::Error)]
pub enum CheckError {
    /// No process serves there.
    #[error("no instance answers at {0}: {1}")]
    NoInstance(PathBuf, io::Error),
    /// It took too long.
    #[error("the instance at {0} did not answer within {seconds} s", seconds = PROBE.as_secs())]
    Slow(PathBuf),
    /// It says no.
    #[error("{0}")]
    Failed(String),
}

/// Asks the instance of this socket.
///
/// # Errors
/// It does not answer, or is not what is asked.
pub async fn check(socket: &Path, check: Check) -> Result<(), CheckError> {
    let ask = async {
        let mut stream = UnixStream::connect(socket).await?;
        let request = format!("GET {} HTTP/1.0\r\n\r\n", check.path());
        stream.write_all(request.as_bytes()).await?;
        let mut answer = String::new();
        stream.take(ANSWER).read_to_string(&mut answer).await?;
        Ok(answer)
    };
    let answer = tokio::time::timeout(PROBE, ask)
        .await
        .map_err(|_| CheckError::Slow(socket.to_owned()))?
        .map_err(|error| CheckError::NoInstance(socket.to_owned(), error))?;
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
    match head.split(' ').nth(1) {
        Some("200") => Ok(()),
        _ => Err(CheckError::Failed(body.trim().to_owned())),
    }
}
