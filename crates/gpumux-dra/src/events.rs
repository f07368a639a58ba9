//! Kubernetes Events on claims: what `kubectl describe resourceclaim` shows of them.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
};

use k8s_openapi::{
    api::{core::v1::ObjectReference, events::v1::Event},
    apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta},
    jiff::Timestamp,
};
use kube::{Api, Client, api::PostParams};

use crate::{DRIVER, claim::ClaimRef};

/// Most bytes of a note.
const NOTE: usize = 1024;
/// Most bytes of a claim's name that become part of an Event's: with a number, that is at most 253.
const NAME: usize = 220;

/// What happened to a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Happened {
    /// A change by its annotation is in force.
    Resized,
    /// A change by its annotation was refused.
    ResizeRefused,
    /// The API server refuses what the driver writes into its status.
    StatusRefused,
    /// Its device does not work.
    DeviceFault,
    /// Its device works again.
    DeviceRecovered,
}

impl Happened {
    const fn reason(self) -> &'static str {
        match self {
            Self::Resized => "ShareResized",
            Self::ResizeRefused => "ShareResizeRefused",
            Self::StatusRefused => "StatusRefused",
            Self::DeviceFault => "DeviceFault",
            Self::DeviceRecovered => "DeviceRecovered",
        }
    }

    const fn kind(self) -> &'static str {
        match self {
            Self::Resized | Self::DeviceRecovered => "Normal",
            _ => "Warning",
        }
    }
}

/// Writes Events, each once. Cheap to clone.
#[derive(Clone)]
pub struct Events {
    client: Client,
    node: String,
    /// By claim's uid and what happened, what was last written.
    written: Arc<Mutex<BTreeMap<(String, Happened), String>>>,
}

impl Events {
    /// For a node.
    pub fn new(client: Client, node: &str) -> Self {
        Self {
            client,
            node: node.to_owned(),
            written: Arc::default(),
        }
    }

    /// Writes an Event, unless the same was the last of its kind. A failure to write it is logged, and changes nothing.
    pub async fn write(&self, claim: &ClaimRef, happened: Happened, note: &str) {
        let key = (claim.uid.clone(), happened);
        {
            let mut written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
            if written.get(&key).is_some_and(|before| before == note) {
                return;
            }
            written.insert(key, note.to_owned());
        }
        let now = Timestamp::now();
        let name = &claim.name[..claim.name.floor_char_boundary(NAME)];
        let event = Event {
            metadata: ObjectMeta {
                name: Some(format!("{name}.{:x}", now.as_nanosecond())),
                namespace: Some(claim.namespace.clone()),
                ..ObjectMeta::default()
            },
            event_time: Some(MicroTime(now)),
            type_: Some(happened.kind().to_owned()),
            reason: Some(happened.reason().to_owned()),
            action: Some(happened.reason().to_owned()),
            note: Some(note[..note.floor_char_boundary(NOTE)].to_owned()),
            regarding: Some(ObjectReference {
                api_version: Some("resource.k8s.io/v1".to_owned()),
                kind: Some("ResourceClaim".to_owned()),
                name: Some(claim.name.clone()),
                namespace: Some(claim.namespace.clone()),
                uid: Some(claim.uid.clone()),
                ..ObjectReference::default()
            }),
            reporting_controller: Some(DRIVER.to_owned()),
            reporting_instance: Some(self.node[..self.node.floor_char_boundary(128)].to_owned()),
            ..Event::default()
        };
        let api: Api<Event> = Api::namespaced(self.client.clone(), &claim.namespace);
        if let Err(error) = api.create(&PostParams::default(), &event).await {
            tracing::debug!(claim = %claim.name, %error, "no event");
        }
    }

    /// What happened is over: the same again is another Event. Whether it had been written.
    pub fn over(&self, uid: &str, happened: Happened) -> bool {
        let mut written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        written.remove(&(uid.to_owned(), happened)).is_some()
    }

    /// The claim has gone.
    pub fn forget(&self, uid: &str) {
        let mut written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        written.retain(|(of, _), _| of != uid);
    }
}
