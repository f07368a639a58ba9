//! Its requests: what is read, watched, written and applied, and what is refused.

use super::{
    objects::{apply_status, encoded_anew, merge_status, strict},
    *,
};

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

pub(super) async fn handle(State(api): State<Api>, request: Request) -> Response {
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
    // As roles name it.
    let verb = match (parts.method.as_str(), &target.name) {
        ("GET", _) if watch => "watch",
        ("GET", None) => "list",
        ("GET", Some(_)) => "get",
        ("POST", _) => "create",
        ("PUT", _) => "update",
        ("PATCH", _) => "patch",
        ("DELETE", _) => "delete",
        (other, _) => other,
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
