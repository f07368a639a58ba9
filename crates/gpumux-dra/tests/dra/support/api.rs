//! An API server for tests: nodes, pods, DeviceClasses, ResourceSlices and ResourceClaims, typed, with resource versions, conflicts, field
//! selectors, watches and server-side apply of a claim's device status. It refuses unknown fields, and checks slices
//! as the real one does (`recordings.rs` proves it).

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex},
};

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
        let router = Router::new().fallback(handle).with_state(api.clone());
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

struct Target {
    kind: &'static str,
    namespace: String,
    name: Option<String>,
    status: bool,
}

fn target(path: &str) -> Option<Target> {
    let mut parts: Vec<&str> = path.trim_matches('/').split('/').collect();
    let status = parts.last() == Some(&"status");
    if status {
        parts.pop();
    }
    let (kind, namespace, rest): (_, &str, &[&str]) = match parts.as_slice() {
        ["api", "v1", "nodes", rest @ ..] => (NODES, "", rest),
        ["apis", "resource.k8s.io", "v1", "resourceslices", rest @ ..] => (SLICES, "", rest),
        ["apis", "resource.k8s.io", "v1", "deviceclasses", rest @ ..] => (CLASSES, "", rest),
        // Those of all namespaces.
        ["apis", "resource.k8s.io", "v1", "resourceclaims"] => (CLAIMS, "", &[]),
        ["api", "v1", "pods"] => (PODS, "", &[]),
        [
            "apis",
            "resource.k8s.io",
            "v1",
            "namespaces",
            namespace,
            "resourceclaims",
            rest @ ..,
        ] => (CLAIMS, namespace, rest),
        [
            "apis",
            "events.k8s.io",
            "v1",
            "namespaces",
            namespace,
            "events",
            rest @ ..,
        ] => (EVENTS, namespace, rest),
        _ => return None,
    };
    Some(Target {
        kind,
        namespace: namespace.to_owned(),
        name: rest.first().map(|s| (*s).to_owned()),
        status,
    })
}

async fn handle(State(api): State<Api>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let body = axum::body::to_bytes(body, 4 << 20)
        .await
        .unwrap_or_default();
    let query: BTreeMap<String, String> = parts
        .uri
        .query()
        .unwrap_or_default()
        .split('&')
        .filter_map(|pair| pair.split_once('='))
        .map(|(name, value)| (name.to_owned(), unescape(value)))
        .collect();
    // Permissions: `reader` may read metrics, any other known token nothing.
    let review: Value = serde_json::from_slice(&body).unwrap_or_default();
    match parts.uri.path() {
        "/apis/authentication.k8s.io/v1/tokenreviews" => {
            let token = review["spec"]["token"].as_str().unwrap_or_default();
            let known = matches!(token, "reader" | "other");
            let status = json!({"authenticated": known, "user": {"username": token}});
            let answer_body = json!({"metadata": {}, "spec": review["spec"], "status": status});
            return answer(Ok((201, answer_body)));
        }
        "/apis/authorization.k8s.io/v1/subjectaccessreviews" => {
            let attributes = &review["spec"]["nonResourceAttributes"];
            let asked = *attributes == json!({"path": "/metrics", "verb": "get"});
            let allowed = asked && review["spec"]["user"] == "reader";
            let answer_body =
                json!({"metadata": {}, "spec": review["spec"], "status": {"allowed": allowed}});
            return answer(Ok((201, answer_body)));
        }
        _ => {}
    }
    let Some(target) = target(parts.uri.path()) else {
        return answer(refuse(404, format!("no such path: {}", parts.uri.path())));
    };
    let watch = query
        .get("watch")
        .is_some_and(|watch| watch == "true" || watch == "1");
    let verb = if watch {
        "watch".to_owned()
    } else {
        parts.method.as_str().to_lowercase()
    };
    let of = format!(
        "{verb} {}{}",
        target.kind,
        if target.status { "/status" } else { "" }
    );
    *api.state.lock().unwrap().calls.entry(of).or_default() += 1;
    if watch {
        return api.watch(&target, &query);
    }
    let content_type = parts.headers.get(CONTENT_TYPE);
    let merge = content_type.is_some_and(|it| it == "application/merge-patch+json");
    answer(api.serve(&parts.method, &target, &query, &body, merge))
}

fn answer(result: Result<(u16, Value), Refusal>) -> Response {
    let (code, value) = result.unwrap_or_else(|refusal| {
        let causes: Vec<_> = refusal
            .causes
            .iter()
            .map(|cause| json!({"reason": cause.reason, "field": cause.field, "message": cause.message}))
            .collect();
        let reason = match refusal.code {
            404 => "NotFound",
            409 => "Conflict",
            _ => "Invalid",
        };
        let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "metadata": {},
            "code": refusal.code, "reason": reason, "message": refusal.message, "details": {"causes": causes}});
        (refusal.code, status)
    });
    let code = StatusCode::from_u16(code).unwrap();
    (
        code,
        [(CONTENT_TYPE, "application/json")],
        value.to_string(),
    )
        .into_response()
}

fn unescape(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        match byte {
            b'%' => {
                let digits: Vec<u8> = rest.by_ref().take(2).collect();
                let digits = String::from_utf8(digits).unwrap();
                bytes.push(u8::from_str_radix(&digits, 16).unwrap());
            }
            b'+' => bytes.push(b' '),
            byte => bytes.push(byte),
        }
    }
    String::from_utf8(bytes).unwrap()
}

/// Whether a namespace is asked for; none asked for means all.
fn within(namespace: &str, asked: &str) -> bool {
    asked.is_empty() || namespace == asked
}

/// Whether an object is selected. Only the selectors that the real server has for these kinds.
fn selected(object: &Value, query: &BTreeMap<String, String>) -> Result<bool, Refusal> {
    let Some(selector) = query.get("fieldSelector") else {
        return Ok(true);
    };
    for term in selector.split(',').filter(|term| !term.is_empty()) {
        let (field, value) = term.split_once('=').unwrap_or((term, ""));
        let (field, wanted) = match field.strip_suffix('!') {
            Some(field) => (field, false),
            None => (field, true),
        };
        if !matches!(
            field,
            "metadata.name"
                | "metadata.namespace"
                | "spec.nodeName"
                | "spec.driver"
                | "status.phase"
        ) {
            return refuse(400, format!("field label not supported: {field}"));
        }
        let pointer = format!("/{}", field.replace('.', "/"));
        if (object.pointer(&pointer).and_then(Value::as_str) == Some(value)) != wanted {
            return Ok(false);
        }
    }
    Ok(true)
}

impl Api {
    fn serve(
        &self,
        method: &Method,
        target: &Target,
        query: &BTreeMap<String, String>,
        body: &Bytes,
        merge: bool,
    ) -> Result<(u16, Value), Refusal> {
        let dry = query.get("dryRun").is_some_and(|dry| dry == "All");
        let mut inner = self.state.lock().unwrap();
        let key = |name: &str| (target.kind, target.namespace.clone(), name.to_owned());
        let parse = || serde_json::from_slice::<Value>(body);
        let result = match (method.as_str(), &target.name) {
            ("GET", None) => {
                let in_namespace =
                    |key: &Key| key.0 == target.kind && within(&key.1, &target.namespace);
                let mut items = Vec::new();
                for (_, object) in inner.objects.iter().filter(|(key, _)| in_namespace(key)) {
                    if selected(object, query)? {
                        items.push(object.clone());
                    }
                }
                let version = inner.version.to_string();
                return Ok((
                    200,
                    json!({"apiVersion": "resource.k8s.io/v1", "kind": "List",
                        "metadata": {"resourceVersion": version}, "items": items}),
                ));
            }
            ("GET", Some(name)) => {
                return match inner.objects.get(&key(name)) {
                    Some(object) => Ok((200, object.clone())),
                    None => refuse(404, format!("{} \"{name}\" not found", target.kind)),
                };
            }
            ("POST", None) => {
                let Ok(object) = parse() else {
                    return refuse(400, "not JSON");
                };
                let object = self.admit(&inner, target.kind, object)?;
                if dry {
                    return Ok((201, object));
                }
                let name = object["metadata"]["name"]
                    .as_str()
                    .unwrap_or_default()
                    .to_owned();
                if inner.objects.contains_key(&key(&name)) {
                    return refuse(409, format!("{} \"{name}\" already exists", target.kind));
                }
                let mut object = object;
                object["metadata"]["uid"] =
                    json!(format!("00000000-0000-4000-8000-{:012}", inner.version + 1));
                (201, inner.store(key(&name), object))
            }
            ("PUT", Some(name)) => {
                let Ok(mut object) = parse() else {
                    return refuse(400, "not JSON");
                };
                let Some(there) = inner.objects.get(&key(name)) else {
                    return refuse(404, format!("{} \"{name}\" not found", target.kind));
                };
                if object["metadata"]["resourceVersion"] != there["metadata"]["resourceVersion"] {
                    return refuse(
                        409,
                        "the object has been modified; please apply your changes to the latest version",
                    );
                }
                object["metadata"]["uid"] = there["metadata"]["uid"].clone();
                let object = self.admit(&inner, target.kind, object)?;
                if dry {
                    return Ok((200, object));
                }
                (200, inner.store(key(name), object))
            }
            ("PATCH", Some(name)) if target.kind == CLAIMS && target.status => {
                let Ok(patch) = parse() else {
                    return refuse(400, "not JSON");
                };
                let manager = query.get("fieldManager").cloned().unwrap_or_default();
                encoded_anew(inner.stored.get(&key(name)), name, merge)?;
                let claim = match merge {
                    true => merge_status(&mut inner, key(name), &patch)?,
                    false => apply_status(&mut inner, key(name), &manager, &patch)?,
                };
                (200, claim)
            }
            ("DELETE", Some(name)) => {
                drop(inner);
                self.remove(&key(name));
                return Ok((
                    200,
                    json!({"kind": "Status", "status": "Success", "metadata": {}}),
                ));
            }
            _ => return refuse(405, format!("{method} is not served here")),
        };
        self.version.send_replace(inner.version);
        Ok(result)
    }

    fn admit(&self, inner: &Inner, kind: &str, object: Value) -> Result<Value, Refusal> {
        match kind {
            SLICES if inner.slices_forbidden => refuse(
                403,
                "resourceslices.resource.k8s.io is forbidden: User cannot write",
            ),
            EVENTS => {
                let event: k8s_openapi::api::events::v1::Event = strict(object)?;
                // What the real server requires of a new Event.
                let named = [
                    &event.action,
                    &event.reason,
                    &event.reporting_controller,
                    &event.reporting_instance,
                ];
                if event.event_time.is_none()
                    || named.iter().any(|field| field.is_none())
                    || event.note.as_ref().is_some_and(|it| it.len() > 1024)
                {
                    return refuse(422, "Event is invalid");
                }
                Ok(serde_json::to_value(event).unwrap())
            }
            SLICES => {
                let mut slice: ResourceSlice = strict(object)?;
                check(&slice)?;
                if inner.gate_off {
                    for device in slice.spec.devices.iter_mut().flatten() {
                        device.allow_multiple_allocations = None;
                        device
                            .capacity
                            .iter_mut()
                            .flat_map(BTreeMap::values_mut)
                            .for_each(|capacity| {
                                capacity.request_policy = None;
                            });
                    }
                }
                Ok(serde_json::to_value(slice).unwrap())
            }
            CLAIMS => Ok(serde_json::to_value(strict::<ResourceClaim>(object)?).unwrap()),
            _ => refuse(405, "read only"),
        }
    }

    fn watch(&self, target: &Target, query: &BTreeMap<String, String>) -> Response {
        let from: u64 = query
            .get("resourceVersion")
            .and_then(|version| version.parse().ok())
            .unwrap_or(0);
        let state = (
            self.clone(),
            target.kind,
            target.namespace.clone(),
            query.clone(),
            from,
        );
        let stream =
            futures_util::stream::unfold(state, |(api, kind, namespace, query, from)| async move {
                let mut versions = api.version.subscribe();
                loop {
                    versions.borrow_and_update();
                    let (version, text) = {
                        let inner = api.state.lock().unwrap();
                        let news = inner.events.iter().filter(|(version, key, ..)| {
                            *version > from && key.0 == kind && within(&key.1, &namespace)
                        });
                        let lines: String = news
                            .filter(|(.., object)| selected(object, &query).unwrap_or(false))
                            .map(|(.., event, object)| {
                                format!("{}\n", json!({"type": event, "object": object}))
                            })
                            .collect();
                        (inner.version, lines)
                    };
                    if !text.is_empty() {
                        let next = (api.clone(), kind, namespace, query, version);
                        return Some((Ok::<_, std::convert::Infallible>(text), next));
                    }
                    versions.changed().await.ok()?;
                }
            });
        (
            [(CONTENT_TYPE, "application/json")],
            Body::from_stream(stream),
        )
            .into_response()
    }
}

/// Decodes, and refuses what the type does not know.
pub fn strict<T: DeserializeOwned + Serialize>(object: Value) -> Result<T, Refusal> {
    let typed: T = match serde_json::from_value(object.clone()) {
        Ok(typed) => typed,
        Err(error) => return refuse(400, error.to_string()),
    };
    match unknown(
        &object,
        &serde_json::to_value(&typed).unwrap(),
        String::new(),
    ) {
        Some(field) => refuse(
            400,
            format!("strict decoding error: unknown field \"{field}\""),
        ),
        None => Ok(typed),
    }
}

/// The first field that was lost on the way through the type.
fn unknown(sent: &Value, kept: &Value, path: String) -> Option<String> {
    match (sent, kept) {
        (Value::Object(sent), _) => {
            sent.iter()
                .filter(|(_, value)| !value.is_null())
                .find_map(|(name, value)| {
                    let path = if path.is_empty() {
                        name.clone()
                    } else {
                        format!("{path}.{name}")
                    };
                    match kept.get(name) {
                        Some(kept) => unknown(value, kept, path),
                        None => Some(path),
                    }
                })
        }
        (Value::Array(sent), Value::Array(kept)) => {
            let mut pairs = sent.iter().zip(kept).enumerate();
            pairs.find_map(|(index, (sent, kept))| unknown(sent, kept, format!("{path}[{index}]")))
        }
        _ => None,
    }
}

/// What the real server (1.36.2) answers to any change of the status when the parameters that it stores are not those that it
/// encodes anew. A merge patch keeps the order of fields.
fn encoded_anew(stored: Option<&Stored>, name: &str, merge: bool) -> Result<(), Refusal> {
    match (stored, merge) {
        (Some(Stored::Spaced), _) | (Some(Stored::Unsorted), false) => refuse(
            422,
            format!(
                "ResourceClaim.resource.k8s.io {name:?} is invalid: [status.allocation: Forbidden: changing status.allocation \
                 requires resourceclaims/binding permission, status.allocation: Invalid value: field is immutable]"
            ),
        ),
        _ => Ok(()),
    }
}

/// A merge patch of the status: lists are replaced whole.
fn merge_status(inner: &mut Inner, key: Key, patch: &Value) -> Result<Value, Refusal> {
    let Some(mut claim) = inner.objects.get(&key).cloned() else {
        return refuse(404, format!("resourceclaims \"{}\" not found", key.2));
    };
    for field in ["uid", "resourceVersion"] {
        let named = &patch["metadata"][field];
        if !named.is_null() && *named != claim["metadata"][field] {
            return refuse(409, format!("{field} in precondition does not match"));
        }
    }
    let fields = patch["status"].as_object().into_iter().flatten();
    if let Some((field, _)) = fields.clone().find(|(field, _)| *field != "devices") {
        return refuse(
            422,
            format!("status.{field}: Invalid value: field is immutable"),
        );
    }
    claim["status"]["devices"] = patch["status"]["devices"].clone();
    Ok(inner.store(key, claim))
}

/// Server-side apply of `status.devices`, a list by driver, pool, device and share.
fn apply_status(
    inner: &mut Inner,
    key: Key,
    manager: &str,
    patch: &Value,
) -> Result<Value, Refusal> {
    let typed: ResourceClaim = {
        let mut whole = patch.clone();
        whole["spec"] = json!({});
        strict(whole)?
    };
    let Some(mut claim) = inner.objects.get(&key).cloned() else {
        return refuse(404, format!("resourceclaims \"{}\" not found", key.2));
    };
    if typed.metadata.uid.is_some() && patch["metadata"]["uid"] != claim["metadata"]["uid"] {
        return refuse(
            409,
            "Precondition failed: UID in precondition does not match",
        );
    }
    if manager.is_empty() {
        return refuse(
            422,
            "fieldManager: Required value: is required for apply patch",
        );
    }
    let id = |device: &Value| {
        ["driver", "pool", "device", "shareID"]
            .map(|name| device[name].as_str().unwrap_or_default())
            .join("/")
    };
    let allocated: BTreeSet<String> = claim
        .pointer("/status/allocation/devices/results")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
        .map(id)
        .collect();
    let applied = patch["status"]["devices"]
        .as_array()
        .cloned()
        .unwrap_or_default();
    for (index, device) in applied.iter().enumerate() {
        if !allocated.contains(&id(device)) {
            return refuse(
                422,
                format!(
                    "status.devices[{index}]: Invalid value: must be an allocated device in the claim"
                ),
            );
        }
        if device["data"].to_string().len() > 10 << 10
            || device["conditions"].as_array().is_some_and(|c| c.len() > 8)
        {
            return refuse(422, format!("status.devices[{index}]: Too long"));
        }
    }
    let ids: BTreeSet<String> = applied.iter().map(id).collect();
    let before = inner
        .owned
        .insert((key.clone(), manager.to_owned()), ids.clone())
        .unwrap_or_default();
    let mut devices: Vec<Value> = claim["status"]["devices"]
        .as_array()
        .cloned()
        .unwrap_or_default();
    devices.retain(|device| !before.contains(&id(device)) && !ids.contains(&id(device)));
    devices.extend(applied);
    claim["status"]["devices"] = json!(devices);
    Ok(inner.store(key, claim))
}

/// The checks of a slice, in the real server's words.
pub fn check(slice: &ResourceSlice) -> Result<(), Refusal> {
    let mut causes = Vec::new();
    let mut add = |reason, field: String, message: String| {
        causes.push(Cause {
            reason,
            field,
            message,
        })
    };
    let spec = &slice.spec;
    let places = [
        spec.node_name.is_some(),
        spec.node_selector.is_some(),
        spec.all_nodes.is_some(),
        spec.per_device_node_selection.is_some(),
    ];
    if places.iter().filter(|place| **place).count() != 1 {
        let one_of = "exactly one of `nodeName`, `nodeSelector`, `allNodes`, `perDeviceNodeSelection` is required";
        add(
            "FieldValueRequired",
            "spec".into(),
            format!("Required value: {one_of}"),
        );
    }
    if spec.pool.resource_slice_count <= 0 {
        let count = spec.pool.resource_slice_count;
        let message = format!("Invalid value: {count}: must be greater than zero");
        add(
            "FieldValueInvalid",
            "spec.pool.resourceSliceCount".into(),
            message,
        );
    }
    if spec.devices.is_some() && spec.shared_counters.is_some() {
        let message = "Invalid value: \"\": only one of `sharedCounters` or `devices` is allowed";
        add("FieldValueInvalid", "spec".into(), message.into());
    }
    let devices = spec.devices.as_deref().unwrap_or_default();
    let heavy = devices
        .iter()
        .any(|device| device.taints.is_some() || device.consumes_counters.is_some());
    let most = if heavy { 64 } else { 128 };
    if devices.len() > most {
        let message = format!(
            "Too many: {}: must have at most {most} items",
            devices.len()
        );
        add("FieldValueTooMany", "spec.devices".into(), message);
    }
    let sets = spec.shared_counters.as_deref().unwrap_or_default();
    if sets.len() > 8 {
        add(
            "FieldValueTooMany",
            "spec.sharedCounters".into(),
            format!("Too many: {}: must have at most 8 items", sets.len()),
        );
    }
    for (index, set) in sets
        .iter()
        .enumerate()
        .filter(|(_, set)| set.counters.len() > 32)
    {
        let message = format!(
            "Too many: {}: must have at most 32 items",
            set.counters.len()
        );
        add(
            "FieldValueTooMany",
            format!("spec.sharedCounters[{index}].counters"),
            message,
        );
    }
    let mut names = BTreeSet::new();
    for (index, device) in devices.iter().enumerate() {
        if !names.insert(&device.name) {
            let message = format!("Duplicate value: {:?}", device.name);
            add(
                "FieldValueDuplicate",
                format!("spec.devices[{index}]"),
                message,
            );
        }
        check_device(device, &format!("spec.devices[{index}]"), &mut add);
    }
    if causes.is_empty() {
        return Ok(());
    }
    let name = slice.metadata.name.as_deref().unwrap_or_default();
    let all: Vec<_> = causes
        .iter()
        .map(|cause| format!("{}: {}", cause.field, cause.message))
        .collect();
    let message = format!(
        "ResourceSlice.resource.k8s.io {name:?} is invalid: {}",
        all.join(", ")
    );
    Err(Refusal {
        code: 422,
        message,
        causes,
    })
}

fn check_device(device: &Device, path: &str, add: &mut impl FnMut(&'static str, String, String)) {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    let name = &device.name;
    if name.is_empty()
        || name.len() > 63
        || !name.chars().all(plain)
        || name.starts_with('-')
        || name.ends_with('-')
    {
        let message = format!(
            "Invalid value: {name:?}: a lowercase RFC 1123 label must consist of lower case alphanumeric characters \
             or '-', and must start and end with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used \
             for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?')"
        );
        add("FieldValueInvalid", format!("{path}.name"), message);
    }
    let attributes = device.attributes.iter().flatten();
    let capacities: Vec<_> = device.capacity.iter().flatten().collect();
    let total = attributes.clone().count() + capacities.len();
    if total > 32 {
        let message = format!(
            "Invalid value: {total}: the total number of attributes and capacities must not exceed 32"
        );
        add("FieldValueInvalid", path.into(), message);
    }
    for (name, attribute) in attributes {
        let path = format!("{path}.attributes[{name}]");
        let kinds = [
            attribute.int.is_some(),
            attribute.bool.is_some(),
            attribute.string.is_some(),
            attribute.version.is_some(),
        ];
        if kinds.iter().filter(|kind| **kind).count() != 1 {
            let shown = json!({"IntValue": attribute.int, "BoolValue": attribute.bool, "StringValue": attribute.string,
                "VersionValue": attribute.version});
            add(
                "FieldValueInvalid",
                path,
                format!("Invalid value: {shown}: exactly one value must be specified"),
            );
        } else if attribute
            .string
            .as_ref()
            .is_some_and(|text| text.len() > 64)
        {
            add(
                "FieldValueTooLong",
                format!("{path}.string"),
                "Too long: may not be more than 64 bytes".into(),
            );
        } else if attribute
            .version
            .as_ref()
            .is_some_and(|version| !is_semver(version))
        {
            add(
                "FieldValueInvalid",
                format!("{path}.version"),
                "Invalid value: must be a string compatible with semver.org spec 2.0.0".into(),
            );
        }
    }
    for (name, capacity) in capacities {
        check_capacity(
            device,
            capacity,
            &format!("{path}.capacity[{name}].requestPolicy"),
            add,
        );
    }
    if device
        .consumes_counters
        .as_ref()
        .is_some_and(|consumed| consumed.len() > 2)
    {
        add(
            "FieldValueTooMany",
            format!("{path}.consumesCounters"),
            "Too many".into(),
        );
    }
    for (index, taint) in device.taints.iter().flatten().enumerate() {
        if !matches!(taint.effect.as_str(), "None" | "NoSchedule" | "NoExecute") {
            let message = format!(
                "Unsupported value: {:?}: supported values: \"NoExecute\", \"NoSchedule\", \"None\"",
                taint.effect
            );
            add(
                "FieldValueNotSupported",
                format!("{path}.taints[{index}].effect"),
                message,
            );
        }
    }
}

fn check_capacity(
    device: &Device,
    capacity: &DeviceCapacity,
    path: &str,
    add: &mut impl FnMut(&'static str, String, String),
) {
    let Some(policy) = &capacity.request_policy else {
        return;
    };
    let number = |quantity: &Quantity| quantity::parse(quantity).unwrap_or(0);
    if device.allow_multiple_allocations != Some(true) {
        add(
            "FieldValueForbidden",
            path.into(),
            "Forbidden: allowMultipleAllocations must be true".into(),
        );
        return;
    }
    let default = policy.default.as_ref();
    match (&policy.valid_range, &policy.valid_values) {
        (Some(_), Some(_)) => {
            let message = "Forbidden: exactly one policy can be specified, cannot specify \"validValues\" and \"validRange\" at the same time";
            add("FieldValueForbidden", path.into(), message.into());
        }
        (None, Some(values)) => {
            let path = format!("{path}.validValues");
            if values.len() > 10 {
                add(
                    "FieldValueTooMany",
                    path.clone(),
                    format!("Too many: {}: must have at most 10 items", values.len()),
                );
            }
            for (index, pair) in values.windows(2).enumerate() {
                if number(&pair[0]) >= number(&pair[1]) {
                    let message = format!(
                        "Invalid value: {:?}: values must be sorted in ascending order",
                        pair[1].0
                    );
                    add(
                        "FieldValueInvalid",
                        format!("{path}[{}]", index + 1),
                        message,
                    );
                }
            }
            let Some(default) = default else { return };
            // Values beyond the limit do not count, and neither do any then.
            if values.len() > 10 || !values.iter().any(|value| number(value) == number(default)) {
                let message = format!(
                    "Invalid value: {:?}: default value is not valid according to the requestPolicy",
                    default.0
                );
                add("FieldValueInvalid", path, message);
            }
        }
        (Some(range), None) => {
            let Some(default) = default else {
                add(
                    "FieldValueRequired",
                    format!("{path}.default"),
                    "Required value: required when validRange is defined".into(),
                );
                return;
            };
            let path = format!("{path}.validRange");
            if range.min.0.is_empty() {
                add(
                    "FieldValueRequired",
                    format!("{path}.min"),
                    "Required value: required when validRange is defined".into(),
                );
                return;
            }
            if let Some(max) = range
                .max
                .as_ref()
                .filter(|max| number(max) > number(&capacity.value))
            {
                let canonical = |quantity: &Quantity| quantity::count(number(quantity)).0;
                let message = format!(
                    "Invalid value: {:?}: max is larger than capacity value: {}",
                    canonical(max),
                    canonical(&capacity.value)
                );
                add("FieldValueInvalid", format!("{path}.max"), message);
            }
            if number(default) < number(&range.min) {
                let message = format!(
                    "Invalid value: {:?}: default is less than min: {}",
                    default.0, range.min.0
                );
                add("FieldValueInvalid", format!("{path}.min"), message);
            } else if let Some(step) = &range.step
                && !(number(default) - number(&range.min)).is_multiple_of(number(step).max(1))
            {
                let message = format!(
                    "Invalid value: {:?}: value is not a multiple of a given step ({}) from ({})",
                    default.0, step.0, range.min.0
                );
                add("FieldValueInvalid", format!("{path}.step"), message);
            }
        }
        (None, None) => {}
    }
}

fn is_semver(version: &str) -> bool {
    let number = |part: &str| {
        part.parse::<u64>()
            .is_ok_and(|value| value.to_string() == part)
    };
    version.split('.').count() == 3 && version.split('.').all(number)
}
