//! Follows claims while their pods run: changes their shares when the annotation changes, and writes what they
//! have into their status. Only slow facts are written there; what changes every second is in the metrics.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use futures_util::StreamExt;
use gpumux_core::TenantSpec;
use k8s_openapi::{
    api::resource::v1::{AllocatedDeviceStatus, ResourceClaim},
    apimachinery::pkg::{
        apis::meta::v1::{Condition, Time},
        runtime::RawExtension,
    },
    jiff::Timestamp,
};
use kube::{
    Api,
    api::{Patch as ApiPatch, PatchParams},
    runtime::{WatchStreamExt, watcher},
};
use serde_json::json;
use tokio::{sync::mpsc, task::JoinHandle};

use crate::{
    DRIVER,
    checkpoint::Record,
    claim::{ClaimRef, Share},
    device::Device,
    events::Happened,
    prepare::{Engine, PrepareError},
    share::{ANNOTATION, Patch},
};

/// How long after a failure of the daemon or the API server a claim is looked at again.
const RETRY: Duration = Duration::from_secs(5);

/// Follows for as long as news can come.
pub async fn run(engine: Engine, mut news: mpsc::UnboundedReceiver<ClaimRef>) {
    let (seen, mut events) = mpsc::channel(64);
    let mut watchers = Watchers::default();
    let mut devices = engine.devices.clone();
    look_at_all(&engine).await;
    loop {
        watchers.watch(&engine, &seen);
        tokio::select! {
            claim = news.recv() => match claim {
                Some(claim) => look(&engine, &claim).await,
                None => return,
            },
            Some(claim) = events.recv() => follow(&engine, &claim).await,
            changed = devices.changed() => match changed {
                Ok(()) => look_at_all(&engine).await,
                Err(_) => return,
            },
        }
    }
}

/// One watch for each namespace that has prepared claims here: neither one for each claim of the node nor one for all
/// claims of the cluster.
#[derive(Default)]
struct Watchers(BTreeMap<String, JoinHandle<()>>);

impl Watchers {
    fn watch(&mut self, engine: &Engine, seen: &mpsc::Sender<ResourceClaim>) {
        let Ok(records) = engine.store.all() else {
            return;
        };
        let wanted: BTreeSet<_> = records
            .iter()
            .map(|record| record.claim.namespace.clone())
            .collect();
        self.0.retain(|namespace, task| {
            let keep = wanted.contains(namespace);
            if !keep {
                task.abort();
            }
            keep
        });
        for namespace in wanted {
            let api: Api<ResourceClaim> = Api::namespaced(engine.kube.clone(), &namespace);
            let seen = seen.clone();
            self.0.entry(namespace).or_insert_with(|| {
                tokio::spawn(async move {
                    let mut events = std::pin::pin!(
                        watcher(api, watcher::Config::default())
                            .default_backoff()
                            .applied_objects()
                    );
                    while let Some(event) = events.next().await {
                        match event {
                            Ok(claim) => drop(seen.send(claim).await),
                            Err(error) => tracing::debug!(%error, "watching claims"),
                        }
                    }
                })
            });
        }
    }
}

impl Drop for Watchers {
    fn drop(&mut self) {
        self.0.values().for_each(JoinHandle::abort);
    }
}

async fn look_at_all(engine: &Engine) {
    let Ok(records) = engine.store.all() else {
        return;
    };
    for record in records.iter().filter(|record| record.ready) {
        look(engine, &record.claim).await;
    }
}

async fn look(engine: &Engine, claim: &ClaimRef) {
    let api: Api<ResourceClaim> = Api::namespaced(engine.kube.clone(), &claim.namespace);
    match api.get_opt(&claim.name).await {
        Ok(Some(found)) => follow(engine, &found).await,
        Ok(None) => {}
        Err(error) => again(engine, claim, &error.to_string()),
    }
}

/// Looks again later.
fn again(engine: &Engine, claim: &ClaimRef, why: &str) {
    tracing::warn!(claim = %claim.name, namespace = %claim.namespace, why, "looked at again later");
    let (news, claim) = (engine.news.clone(), claim.clone());
    tokio::spawn(async move {
        tokio::time::sleep(RETRY).await;
        let _ = news.send(claim);
    });
}

/// Brings a claim's annotation into force and its status up to date, if it is prepared here.
async fn follow(engine: &Engine, claim: &ResourceClaim) {
    let uid = claim.metadata.uid.as_deref().unwrap_or_default();
    let prepared = || {
        engine
            .store
            .get(uid)
            .ok()
            .flatten()
            .filter(|record| record.ready)
    };
    let Some(before) = prepared() else { return };
    let reference = before.claim.clone();
    let annotations = claim.metadata.annotations.as_ref();
    let patch = annotations
        .and_then(|all| all.get(ANNOTATION))
        .map(String::as_str);
    let resized = if before.patch.as_deref() == patch {
        Ok(())
    } else {
        engine.resize(uid, patch).await
    };
    let Some(record) = prepared() else { return };
    if let Err(error @ PrepareError::Daemon(_)) = &resized {
        again(engine, &record.claim, &error.to_string());
    }
    let resized = resized.map_err(|error| error.to_string());
    tell(engine, &before, &record, &resized).await;
    let devices = engine.devices.borrow().clone();
    let current = claim
        .status
        .as_ref()
        .and_then(|status| status.devices.as_deref())
        .unwrap_or_default();
    let wanted = status(&record, &devices, &resized, current, Timestamp::now());
    let ours: Vec<_> = current
        .iter()
        .filter(|device| device.driver == DRIVER)
        .cloned()
        .collect();
    if ours == wanted {
        return;
    }
    if let Err(error) = write_status(engine, claim, &record, &wanted).await {
        match error {
            kube::Error::Api(status) if matches!(status.code, 404 | 409) => {
                tracing::debug!(claim = %reference.name, %status, "the claim changed meanwhile");
            }
            kube::Error::Api(status) if status.code == 422 => {
                // What is there cannot be written again as it is: trying again would not help.
                let note = format!("its status cannot be written: {}", status.message);
                tracing::warn!(claim = %reference.name, namespace = %reference.namespace, note);
                let events = &engine.events;
                events
                    .write(&reference, Happened::StatusRefused, &note)
                    .await;
            }
            error => again(engine, &reference, &error.to_string()),
        }
    }
}

/// Writes the driver's part of a claim's status.
///
/// With server-side apply the API server encodes the claim's opaque parameters anew and then refuses any difference to what is
/// stored, such as another order of fields (Kubernetes 1.36.2). A merge patch leaves them alone if only the order differs.
async fn write_status(
    engine: &Engine,
    claim: &ResourceClaim,
    record: &Record,
    wanted: &[AllocatedDeviceStatus],
) -> Result<(), kube::Error> {
    let api: Api<ResourceClaim> = Api::namespaced(engine.kube.clone(), &record.claim.namespace);
    let change = json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        // With the uid, a claim that was made anew under this name is not touched.
        "metadata": {"name": record.claim.name, "uid": record.claim.uid},
        "status": {"devices": wanted},
    });
    let apply = PatchParams::apply(DRIVER).force();
    match api
        .patch_status(&record.claim.name, &apply, &ApiPatch::Apply(change))
        .await
    {
        Err(kube::Error::Api(status)) if status.code == 422 => {}
        other => return other.map(drop),
    }
    // A list is replaced whole: other drivers' devices stay, and the version makes sure that none is lost.
    let current = claim.status.as_ref().and_then(|it| it.devices.as_deref());
    let others = current.unwrap_or_default().iter();
    let others = others.filter(|device| device.driver != DRIVER);
    let all: Vec<_> = others.chain(wanted).collect();
    let change = json!({
        "metadata": {"uid": record.claim.uid, "resourceVersion": claim.metadata.resource_version},
        "status": {"devices": all},
    });
    let merge = PatchParams {
        field_manager: Some(DRIVER.to_owned()),
        ..PatchParams::default()
    };
    api.patch_status(&record.claim.name, &merge, &ApiPatch::Merge(change))
        .await
        .map(drop)
}

/// Reports on the claim what has become of it.
async fn tell(engine: &Engine, before: &Record, now: &Record, resized: &Result<(), String>) {
    let (claim, events) = (&now.claim, &engine.events);
    match resized {
        Err(error) => events.write(claim, Happened::ResizeRefused, error).await,
        Ok(()) => {
            events.over(&claim.uid, Happened::ResizeRefused);
            if before.patch != now.patch {
                let note = match &now.patch {
                    Some(patch) => format!("in force: {patch}"),
                    None => "in force: what was allocated".to_owned(),
                };
                events.over(&claim.uid, Happened::Resized);
                events.write(claim, Happened::Resized, &note).await;
            }
        }
    }
    let devices = engine.devices.borrow().clone();
    let faults: Vec<String> = now
        .shares
        .iter()
        .filter_map(|share| Some(format!("{}: {}", share.device, fault(share, &devices)?)))
        .collect();
    if !faults.is_empty() {
        let note = faults.join("; ");
        events.write(claim, Happened::DeviceFault, &note).await;
    } else if events.over(&claim.uid, Happened::DeviceFault) {
        events.over(&claim.uid, Happened::DeviceRecovered);
        events
            .write(claim, Happened::DeviceRecovered, "its devices work again")
            .await;
    }
}

/// Why the device of a share does not work.
fn fault(share: &Share, devices: &[Device]) -> Option<String> {
    match devices.iter().find(|device| device.is(&share.of)) {
        Some(device) => device.fault.clone(),
        None => Some("the device is gone".to_owned()),
    }
}

/// What the status of a claim is to say about its devices. Times of conditions that did not change are kept.
pub fn status(
    record: &Record,
    devices: &[Device],
    resized: &Result<(), String>,
    current: &[AllocatedDeviceStatus],
    now: Timestamp,
) -> Vec<AllocatedDeviceStatus> {
    let patch: Option<Patch> = record.patch.as_deref().and_then(|text| text.parse().ok());
    let one = |share: &Share| {
        let fault = fault(share, devices);
        let before = current.iter().find(|device| {
            device.driver == DRIVER
                && device.pool == share.pool
                && device.device == share.device
                && device.share_id == share.share_id
        });
        let condition = |kind: &str, error: Option<&str>, good: &str, bad: &str| {
            let (status, reason) = if error.is_none() {
                ("True", good)
            } else {
                ("False", bad)
            };
            let then = before
                .and_then(|device| device.conditions.as_ref())
                .into_iter()
                .flatten();
            let kept = then.filter(|c| c.type_ == kind && c.status == status && c.reason == reason);
            Condition {
                type_: kind.to_owned(),
                status: status.to_owned(),
                reason: reason.to_owned(),
                message: error.unwrap_or_default().to_owned(),
                last_transition_time: kept
                    .map(|c| c.last_transition_time.clone())
                    .next()
                    .unwrap_or(Time(now)),
                observed_generation: None,
            }
        };
        AllocatedDeviceStatus {
            driver: DRIVER.to_owned(),
            pool: share.pool.clone(),
            device: share.device.clone(),
            share_id: share.share_id.clone(),
            conditions: Some(vec![
                condition("Ready", fault.as_deref(), "Prepared", "DeviceFault"),
                condition(
                    "ShareApplied",
                    resized.as_ref().err().map(String::as_str),
                    "Applied",
                    "Refused",
                ),
            ]),
            data: share
                .spec(patch.as_ref())
                .ok()
                .map(|spec| RawExtension(facts(share, &spec))),
            network_data: None,
        }
    };
    record.shares.iter().map(one).collect()
}

fn facts(share: &Share, spec: &TenantSpec) -> serde_json::Value {
    let milli = |part: f64| (part * 1000.0).round() as u64;
    json!({
        "uuid": share.of.uuid,
        "class": spec.class.name(),
        "guaranteed": {"compute": milli(spec.guaranteed)},
        "limit": {"compute": milli(spec.limit)},
        "weight": number(spec.weight),
        "memory": {"guaranteed": spec.memory_guaranteed, "limit": spec.memory_limit},
        "accounted": share.guaranteed(),
    })
}

/// As the API server stores it: a whole number has no fraction. Otherwise what is there would seem to differ, and be written again.
fn number(value: f64) -> serde_json::Value {
    match value.fract() == 0.0 {
        true => json!(value as i64),
        false => json!(value),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{checkpoint::tests::record, slices::tests::device};

    #[test]
    fn a_status_that_says_nothing_new_keeps_its_times() {
        let record = record("a", 500);
        let at = |second| Timestamp::from_second(second).unwrap();
        let first = status(&record, &[device(0)], &Ok(()), &[], at(1));
        let json = serde_json::to_value(&first).unwrap();
        assert_eq!(json[0]["data"]["guaranteed"]["compute"], 500);
        assert_eq!(json[0]["data"]["accounted"]["memory"], 1 << 30);
        assert_eq!(status(&record, &[device(0)], &Ok(()), &first, at(2)), first);
        let broken = Device {
            fault: Some("lost".into()),
            ..device(0)
        };
        let then = status(&record, &[broken], &Err("limit 4".into()), &first, at(3));
        let conditions = then[0].conditions.as_ref().unwrap();
        for (condition, message) in conditions.iter().zip(["lost", "limit 4"]) {
            assert_eq!(
                (condition.status.as_str(), condition.message.as_str()),
                ("False", message)
            );
            assert_eq!(condition.last_transition_time, Time(at(3)));
        }
    }
}
