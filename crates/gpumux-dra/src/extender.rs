//! `gpumux fleet serve`: an extender of the Kubernetes scheduler. For a pod that asks for shares, it orders the nodes that the scheduler
//! found to have room, so that the fleet keeps what other pods can use ([`gpumux_fleet::engine`]).
//!
//! It serves the verb `prioritize` and no other. `filter` and `bind` could keep a pod from a node that has room, so they would put the
//! extender into the way of every pod; an order can only be worse or better. The scheduler goes on without it when it does not answer.
//! This file watches the API server and serves HTTP; [`cluster`] decides.

pub mod cluster;
mod request;

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use axum::{
    Json, Router,
    extract::{DefaultBodyLimit, State},
    http::StatusCode,
    routing::{get, post},
};
use futures_util::StreamExt;
use k8s_openapi::api::{
    core::v1::{Node, Pod},
    resource::v1::{DeviceClass, ResourceClaim, ResourceSlice},
};
use kube::{
    Api, Client, Resource,
    runtime::{WatchStreamExt, watcher},
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use tokio::{net::TcpListener, task::JoinSet};

use crate::{
    DRIVER, http,
    run::{self, Error},
};
use cluster::{Change, Cluster, Kind, Object};

/// The largest request that is read: a list of 5,000 whole nodes has 64 MiB at most; names alone need 0.5 MiB.
const LARGEST: usize = 64 << 20;
/// How often the extender looks whether the engine has something to learn.
const LEARN_EVERY: Duration = Duration::from_secs(10);

/// Serve the Kubernetes scheduler as an extender that orders nodes
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Address at which the scheduler's requests are answered, without authentication
    #[arg(long, default_value = "127.0.0.1:9401", value_name = "ADDRESS")]
    pub listen: SocketAddr,
}

/// What the scheduler asks: `ExtenderArgs` of its API, whose field names vary in case between versions.
#[derive(Deserialize)]
struct Question {
    #[serde(alias = "Pod")]
    pod: Pod,
    /// With `nodeCacheCapable: true`.
    #[serde(alias = "NodeNames", alias = "nodeNames", default)]
    nodenames: Option<Vec<String>>,
    /// Otherwise.
    #[serde(alias = "Nodes", default)]
    nodes: Option<Nodes>,
}

#[derive(Deserialize)]
struct Nodes {
    #[serde(default)]
    items: Vec<Named>,
}

#[derive(Deserialize)]
struct Named {
    metadata: Name,
}

#[derive(Deserialize)]
struct Name {
    name: String,
}

/// A node's score: `HostPriority` of the scheduler's API.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Score {
    /// The node.
    #[serde(rename = "Host")]
    pub host: String,
    /// From 0 to [`cluster::BEST`].
    #[serde(rename = "Score")]
    pub score: i64,
}

/// What watches and requests share.
#[derive(Clone, Default)]
pub struct Shared(Arc<Mutex<Cluster>>);

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Cluster> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a change in.
    pub fn apply(&self, change: Change) {
        self.lock().apply(change);
    }

    /// The answer to a request of the scheduler.
    ///
    /// # Errors
    /// It is no such request.
    pub fn prioritize(&self, request: &[u8]) -> Result<Vec<Score>, serde_json::Error> {
        let question: Question = serde_json::from_slice(request)?;
        let nodes = question.nodes.into_iter().flat_map(|nodes| nodes.items);
        let mut hosts = question.nodenames.unwrap_or_default();
        hosts.extend(nodes.map(|node| node.metadata.name));
        let names = hosts.iter().map(String::as_str);
        let scores = self.lock().scores(&question.pod, names);
        let pairs = hosts.into_iter().zip(scores);
        Ok(pairs.map(|(host, score)| Score { host, score }).collect())
    }

    /// Lets the engine learn if there is something to learn. Takes seconds for thousands of GPUs; requests are answered meanwhile.
    pub fn learn(&self) {
        let lesson = self.lock().lesson();
        if let Some(lesson) = lesson {
            let engine = lesson.learn();
            self.lock().learned(engine);
        }
    }
}

/// Serves until SIGTERM or SIGINT.
///
/// # Errors
/// There is no API server, or the address is taken.
pub fn run(args: &Args) -> Result<(), Error> {
    let serve = async |client| {
        let listener = TcpListener::bind(args.listen).await;
        let listener = listener.map_err(|error| Error::Listen(args.listen, error))?;
        Ok(start(client, listener))
    };
    run::until_signal(serve, async |extender| drop(extender))
}

/// A running extender; it ends when this is dropped.
pub struct Extender {
    /// For tests: what it knows.
    pub shared: Shared,
    _tasks: JoinSet<()>,
}

/// Starts in this runtime.
pub fn start(client: Client, listener: TcpListener) -> Extender {
    let shared = Shared::default();
    let mut tasks = JoinSet::new();
    follow::<Node>(&mut tasks, &client, &shared, Kind::Node, "", |it| {
        Object::Node(Box::new(it))
    });
    // Pods that have ended hold nothing.
    let alive = "status.phase!=Succeeded,status.phase!=Failed";
    follow::<Pod>(&mut tasks, &client, &shared, Kind::Pod, alive, |it| {
        Object::Pod(Box::new(it))
    });
    let ours = format!("spec.driver={DRIVER}");
    follow::<ResourceSlice>(&mut tasks, &client, &shared, Kind::Slice, &ours, |it| {
        Object::Slice(Box::new(it))
    });
    follow::<ResourceClaim>(&mut tasks, &client, &shared, Kind::Claim, "", |it| {
        Object::Claim(Box::new(it))
    });
    follow::<DeviceClass>(&mut tasks, &client, &shared, Kind::Class, "", |it| {
        Object::Class(Box::new(it))
    });
    let learner = shared.clone();
    tasks.spawn(async move {
        loop {
            tokio::time::sleep(LEARN_EVERY).await;
            let learner = learner.clone();
            let _ = tokio::task::spawn_blocking(move || learner.learn()).await;
        }
    });
    tasks.spawn(http::serve(listener, router(shared.clone())));
    Extender {
        shared,
        _tasks: tasks,
    }
}

/// Follows all objects of a kind.
fn follow<K>(
    tasks: &mut JoinSet<()>,
    client: &Client,
    shared: &Shared,
    kind: Kind,
    fields: &str,
    object: fn(K) -> Object,
) where
    K: Resource<DynamicType = ()> + Clone + std::fmt::Debug + DeserializeOwned + Send + 'static,
{
    let api: Api<K> = Api::all(client.clone());
    let mut config = watcher::Config::default();
    if !fields.is_empty() {
        config = config.fields(fields);
    }
    let shared = shared.clone();
    tasks.spawn(async move {
        let mut events = std::pin::pin!(watcher(api, config).default_backoff());
        while let Some(event) = events.next().await {
            shared.apply(match event {
                Ok(watcher::Event::Init) => Change::Listing(kind),
                Ok(watcher::Event::InitDone) => Change::Listed(kind),
                Ok(watcher::Event::InitApply(it) | watcher::Event::Apply(it)) => {
                    Change::Is(object(it))
                }
                Ok(watcher::Event::Delete(it)) => Change::Gone(object(it)),
                Err(error) => {
                    tracing::warn!(?kind, %error, "cannot follow the API server; nodes are ordered by what was seen last");
                    continue;
                }
            });
        }
    });
}

/// `/prioritize`, and the probes.
pub fn router(shared: Shared) -> Router {
    Router::new()
        .route("/prioritize", post(prioritize))
        .route("/readyz", get(ready))
        .route("/livez", get(async || "ok\n"))
        .layer(DefaultBodyLimit::max(LARGEST))
        .with_state(shared)
}

async fn prioritize(
    State(shared): State<Shared>,
    body: axum::body::Bytes,
) -> Result<Json<Vec<Score>>, (StatusCode, String)> {
    let answer = shared.prioritize(&body);
    answer.map(Json).map_err(|error| {
        let why = format!("not ExtenderArgs of kube-scheduler: {error}\n");
        (StatusCode::BAD_REQUEST, why)
    })
}

async fn ready(State(shared): State<Shared>) -> (StatusCode, String) {
    let mut cluster = shared.lock();
    if !cluster.is_complete() {
        let why = "the API server has not listed all kinds yet\n";
        return (StatusCode::SERVICE_UNAVAILABLE, why.to_owned());
    }
    let (gpus, free) = cluster.free();
    let text = format!("{gpus} GPUs known, {free} milli-GPU of them not guaranteed to any claim\n");
    (StatusCode::OK, text)
}
