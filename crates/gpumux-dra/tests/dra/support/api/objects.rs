//! How objects are read, strictly, and how their status is changed.

use super::*;

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
pub(super) fn encoded_anew(
    stored: Option<&Stored>,
    name: &str,
    merge: bool,
) -> Result<(), Refusal> {
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
pub(super) fn merge_status(inner: &mut Inner, key: Key, patch: &Value) -> Result<Value, Refusal> {
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
    claim["status"]["devices"] = as_go_writes(&patch["status"]["devices"]);
    Ok(store_change(inner, key, claim))
}

/// What the real server stores of JSON that it encodes anew: a whole number has no fraction.
fn as_go_writes(value: &Value) -> Value {
    match value {
        Value::Object(fields) => {
            let fields = fields.iter();
            fields
                .map(|(name, value)| (name.clone(), as_go_writes(value)))
                .collect()
        }
        Value::Array(items) => items.iter().map(as_go_writes).collect(),
        Value::Number(number) => match number.as_f64() {
            Some(float) if number.is_f64() && float.fract() == 0.0 => json!(float as i64),
            _ => value.clone(),
        },
        _ => value.clone(),
    }
}

/// A write that changes nothing makes no version, and no watch reports it.
fn store_change(inner: &mut Inner, key: Key, object: Value) -> Value {
    match inner.objects.get(&key) {
        Some(there) if *there == object => object,
        _ => inner.store(key, object),
    }
}

/// Server-side apply of `status.devices`, a list by driver, pool, device and share.
pub(super) fn apply_status(
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
    devices.extend(applied.iter().map(as_go_writes));
    claim["status"]["devices"] = json!(devices);
    Ok(store_change(inner, key, claim))
}
