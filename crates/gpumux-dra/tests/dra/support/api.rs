//! An API server for tests: nodes, pods, DeviceClasses, ResourceSlices and ResourceClaims, typed, with resource versions, conflicts, field
//! selectors, watches and server-side apply of a claim's device status. It refuses unknown fields, and checks slices
//! as the real one does (`recordings.rs` proves it).

pub mod objects;
mod rules;
pub mod serve;

pub use rules::check;

use axum::{
    Router,
    body::{Body, Bytes},
    extract::{Request, State},
    http::{Method, StatusCode, header::CONTENT_TYPE},
    response::{IntoResponse, Response},
};
use gpumux_dra::quantity;
use k8s_openapi::{
    api::resource::v1::{Device, DeviceCapacity, ResourceClaim, ResourceSlice},
    apimachinery::pkg::api::resource::Quantity,
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Value, json};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex},
};
use tokio::sync::watch;

/// Kind, namespace, name.
type Key = (&'static str, String, String);

const CLAIMS: &str = "resourceclaims";

const SLICES: &str = "resourceslices";

const NODES: &str = "nodes";

const PODS: &str = "pods";

const CLASSES: &str = "deviceclasses";

const EVENTS: &str = "events";

/// How the bytes of a claim's opaque parameters are stored. The real server keeps them as they were sent, and compares them as bytes
/// with what it encodes anew when the status is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stored {
    /// As Go writes JSON, so as kubectl and Helm send it.
    Canonical,
    /// Fields in another order.
    Unsorted,
    /// With spaces.
    Spaced,
}

#[derive(Clone)]
pub struct Api {
    state: Arc<Mutex<Inner>>,
    version: Arc<watch::Sender<u64>>,
    pub client: kube::Client,
    /// Where it is.
    pub uri: String,
}

#[derive(Default)]
struct Inner {
    version: u64,
    objects: BTreeMap<Key, Value>,
    events: Vec<(u64, Key, &'static str, Value)>,
    /// Which devices of a claim's status a manager owns.
    owned: BTreeMap<(Key, String), BTreeSet<String>>,
    /// How often each verb was used on each kind.
    calls: BTreeMap<String, usize>,
    /// As of a cluster without the feature gate.
    gate_off: bool,
    /// Claims whose parameters are not stored as Go writes them.
    stored: BTreeMap<Key, Stored>,
    /// No client may write slices.
    slices_forbidden: bool,
}

/// A refusal: code, message and causes.
#[derive(Debug, PartialEq)]
pub struct Refusal {
    pub code: u16,
    pub message: String,
    pub causes: Vec<Cause>,
}

#[derive(Debug, PartialEq, Clone)]
pub struct Cause {
    pub reason: &'static str,
    pub field: String,
    pub message: String,
}

fn refuse<T>(code: u16, message: impl Into<String>) -> Result<T, Refusal> {
    Err(Refusal {
        code,
        message: message.into(),
        causes: Vec::new(),
    })
}

pub fn client(uri: &str) -> kube::Client {
    let _ = rustls::crypto::ring::default_provider().install_default();
    kube::Client::try_from(kube::Config::new(uri.parse().unwrap())).unwrap()
}

impl Api {
    /// Serves on a port of its own until the runtime ends.
    pub async fn start() -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let uri = format!("http://{}", listener.local_addr().unwrap());
        let client = client(&uri);
        let api = Self {
            state: Arc::default(),
            version: Arc::new(watch::channel(0).0),
            client,
            uri,
        };
        api.put(
            NODES,
            "",
            "node1",
            json!({"apiVersion": "v1", "kind": "Node"}),
        );
        let router = Router::new()
            .fallback(serve::handle)
            .with_state(api.clone());
        tokio::spawn(async move { axum::serve(listener, router).await });
        api
    }

    /// The driver's role is broken: it may not write slices.
    pub fn forbid_slices(&self, forbidden: bool) {
        self.state.lock().unwrap().slices_forbidden = forbidden;
    }

    /// A claim's parameters came from a client that writes JSON so.
    pub fn store_parameters(&self, namespace: &str, name: &str, stored: Stored) {
        let key = (CLAIMS, namespace.to_owned(), name.to_owned());
        self.state.lock().unwrap().stored.insert(key, stored);
    }

    /// Reasons and notes of the Events in a namespace, the oldest first.
    pub fn events(&self, namespace: &str) -> Vec<(String, String)> {
        let inner = self.state.lock().unwrap();
        let own = inner
            .events
            .iter()
            .filter(|(_, key, ..)| key.0 == EVENTS && key.1 == namespace);
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        own.map(|(.., event)| (text(&event["reason"]), text(&event["note"])))
            .collect()
    }

    pub fn turn_gate_off(&self) {
        self.state.lock().unwrap().gate_off = true;
    }

    /// Puts an object there as a user or the scheduler would, and gives it a uid if it has none.
    pub fn put(&self, kind: &'static str, namespace: &str, name: &str, mut object: Value) -> Value {
        object["metadata"]["name"] = json!(name);
        if !namespace.is_empty() {
            object["metadata"]["namespace"] = json!(namespace);
        }
        let mut inner = self.state.lock().unwrap();
        let key = (kind, namespace.to_owned(), name.to_owned());
        if object["metadata"].get("uid").is_none() {
            let uid = format!("00000000-0000-4000-8000-{:012}", inner.version + 1);
            object["metadata"]["uid"] = json!(uid);
        }
        let object = inner.store(key, object);
        self.version.send_replace(inner.version);
        object
    }

    pub fn put_claim(&self, namespace: &str, name: &str, claim: Value) -> Value {
        self.put(CLAIMS, namespace, name, claim)
    }

    pub fn claim(&self, namespace: &str, name: &str) -> Option<Value> {
        let key = (CLAIMS, namespace.to_owned(), name.to_owned());
        self.state.lock().unwrap().objects.get(&key).cloned()
    }

    pub fn delete_claim(&self, namespace: &str, name: &str) {
        self.delete(CLAIMS, namespace, name);
    }

    pub fn delete(&self, kind: &'static str, namespace: &str, name: &str) {
        self.remove(&(kind, namespace.to_owned(), name.to_owned()));
    }

    /// Sets or removes an annotation of a claim.
    pub fn annotate(&self, namespace: &str, name: &str, annotation: &str, value: Option<&str>) {
        let mut claim = self.claim(namespace, name).unwrap();
        match value {
            Some(value) => claim["metadata"]["annotations"][annotation] = json!(value),
            None => claim["metadata"]["annotations"] = json!({}),
        }
        self.put(CLAIMS, namespace, name, claim);
    }

    pub fn slices(&self) -> Vec<ResourceSlice> {
        let inner = self.state.lock().unwrap();
        let slices = inner.objects.iter().filter(|(key, _)| key.0 == SLICES);
        slices
            .map(|(_, object)| serde_json::from_value(object.clone()).unwrap())
            .collect()
    }

    /// Waits until a pool is published whole.
    pub async fn until_published(&self) {
        let whole = |api: &Self| {
            let slices = api.slices();
            let count = slices.first()?.spec.pool.resource_slice_count;
            (slices.len() as i64 == count).then_some(())
        };
        self.until(whole).await;
    }

    /// What a kubelet does when it starts.
    pub fn wipe_slices(&self) {
        let keys: Vec<_> = self
            .state
            .lock()
            .unwrap()
            .objects
            .keys()
            .filter(|key| key.0 == SLICES)
            .cloned()
            .collect();
        keys.iter().for_each(|key| self.remove(key));
    }

    pub fn calls(&self, call: &str) -> usize {
        self.state
            .lock()
            .unwrap()
            .calls
            .get(call)
            .copied()
            .unwrap_or(0)
    }

    /// Each verb and kind that was asked for.
    pub fn used(&self) -> BTreeSet<String> {
        self.state.lock().unwrap().calls.keys().cloned().collect()
    }

    /// All requests so far.
    pub fn all_calls(&self) -> usize {
        self.state.lock().unwrap().calls.values().sum()
    }

    /// Waits until what is there satisfies a condition: each change is looked at.
    pub async fn until<T>(&self, mut condition: impl FnMut(&Self) -> Option<T>) -> T {
        let mut changes = self.version.subscribe();
        let wait = async {
            loop {
                changes.borrow_and_update();
                if let Some(found) = condition(self) {
                    return found;
                }
                changes.changed().await.unwrap();
            }
        };
        tokio::time::timeout(std::time::Duration::from_secs(60), wait)
            .await
            .expect("in a minute")
    }

    fn remove(&self, key: &Key) {
        let mut inner = self.state.lock().unwrap();
        if let Some(object) = inner.objects.remove(key) {
            inner.version += 1;
            let version = inner.version;
            inner.events.push((version, key.clone(), "DELETED", object));
            self.version.send_replace(version);
        }
    }
}

impl Inner {
    fn store(&mut self, key: Key, mut object: Value) -> Value {
        self.version += 1;
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        let event = if self.objects.contains_key(&key) {
            "MODIFIED"
        } else {
            "ADDED"
        };
        self.events
            .push((self.version, key.clone(), event, object.clone()));
        self.objects.insert(key, object.clone());
        object
    }
}
