//! Keeps the node's ResourceSlices as they must be: after a change of the devices, and after the kubelet has deleted
//! them, as it does when it starts and some time after a plugin has gone.

use std::{sync::Arc, time::Duration};

use futures_util::StreamExt;
use k8s_openapi::api::{core::v1::Node as ApiNode, resource::v1::ResourceSlice};
use kube::{
    Api, Client,
    api::{DeleteParams, ListParams, PostParams},
    runtime::{WatchStreamExt, watcher},
};
use tokio::sync::watch;

use crate::{
    DRIVER,
    device::Device,
    slices::{self, Node},
};

/// First pause after a failure; it doubles up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(15);

/// Why slices are not as they must be.
#[derive(Debug, thiserror::Error)]
pub enum PublishError {
    /// The API server.
    #[error("cannot publish: {0}")]
    Api(#[from] kube::Error),
    /// The cluster does not know consumable capacity.
    #[error(
        "the API server drops `allowMultipleAllocations`: it needs Kubernetes 1.36, or the feature gate DRAConsumableCapacity"
    )]
    TooOld,
}

/// What is published.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Published {
    /// The generation of the pool.
    pub generation: i64,
    /// How many slices.
    pub slices: usize,
    /// Why it is not as it must be.
    pub error: Option<String>,
    /// Whether slices have been looked at.
    pub looked: bool,
}

/// The node's name and identity.
///
/// # Errors
/// The API server does not know it, or does not answer.
pub async fn node(client: &Client, name: &str) -> Result<Node, kube::Error> {
    let node = Api::<ApiNode>::all(client.clone()).get(name).await?;
    Ok(Node {
        name: name.to_owned(),
        uid: node.metadata.uid.unwrap_or_default(),
    })
}

/// Publishes for as long as a receiver follows the result.
pub async fn run(
    client: Client,
    node: Node,
    mut devices: watch::Receiver<Arc<Vec<Device>>>,
    result: watch::Sender<Published>,
) {
    let api: Api<ResourceSlice> = Api::all(client);
    let config = watcher::Config::default().fields(&selector(&node));
    let mut events = std::pin::pin!(watcher(api.clone(), config).default_backoff());
    let mut pause = FIRST_PAUSE;
    while !result.is_closed() {
        let wanted = devices.borrow_and_update().clone();
        let outcome = reconcile(&api, &node, &wanted).await;
        let retry = outcome.is_err();
        pause = if retry {
            (pause * 2).min(LONGEST_PAUSE)
        } else {
            FIRST_PAUSE
        };
        match outcome {
            Ok(published) => drop(result.send_replace(published)),
            Err(error) => {
                tracing::warn!(%error, "the slices are not as they must be");
                result.send_modify(|published| published.error = Some(error.to_string()));
            }
        }
        tokio::select! {
            changed = devices.changed() => if changed.is_err() { return },
            _ = events.next() => {}
            () = tokio::time::sleep(pause), if retry => {}
            () = result.closed() => return,
        }
    }
}

/// Looks once and changes what must be changed. If anything does, all slices get a new generation.
///
/// # Errors
/// The API server refuses, another client changed a slice meanwhile, or the cluster is too old.
pub async fn reconcile(
    api: &Api<ResourceSlice>,
    node: &Node,
    devices: &[Device],
) -> Result<Published, PublishError> {
    let there = api
        .list(&ListParams::default().fields(&selector(node)))
        .await?
        .items;
    let generation = there
        .iter()
        .map(|slice| slice.spec.pool.generation)
        .max()
        .unwrap_or(0);
    let wanted = slices::build(node, devices, generation);
    let find = |index| {
        let name = slices::object_name(node, index);
        there
            .iter()
            .find(|slice| slice.metadata.name.as_deref() == Some(&name))
    };
    let good = |(index, spec)| {
        find(index).is_some_and(|slice| {
            slice.spec.pool.generation == generation && slices::same(&slice.spec, spec)
        })
    };
    if there.len() == wanted.len() && wanted.iter().enumerate().all(good) {
        return Ok(Published {
            generation,
            slices: wanted.len(),
            error: None,
            looked: true,
        });
    }
    let generation = generation + 1;
    let wanted = slices::build(node, devices, generation);
    let count = wanted.len();
    let mut dropped = false;
    for (index, spec) in wanted.into_iter().enumerate() {
        let mut object = slices::object(node, index, spec);
        let written = match find(index) {
            None => api.create(&PostParams::default(), &object).await?,
            Some(slice) => {
                object
                    .metadata
                    .resource_version
                    .clone_from(&slice.metadata.resource_version);
                api.replace(
                    &slices::object_name(node, index),
                    &PostParams::default(),
                    &object,
                )
                .await?
            }
        };
        dropped |= !slices::same(&written.spec, &object.spec);
    }
    let names: Vec<_> = (0..count)
        .map(|index| slices::object_name(node, index))
        .collect();
    for name in there
        .iter()
        .filter_map(|slice| slice.metadata.name.as_ref())
    {
        if !names.contains(name) {
            match api.delete(name, &DeleteParams::default()).await {
                Err(kube::Error::Api(status)) if status.code == 404 => {}
                other => drop(other?),
            }
        }
    }
    if dropped {
        return Err(PublishError::TooOld);
    }
    tracing::info!(
        generation,
        slices = count,
        devices = devices.len(),
        "published"
    );
    Ok(Published {
        generation,
        slices: count,
        error: None,
        looked: true,
    })
}

/// Tries to write what this instance would publish, without effect: whether it may, and whether the API server takes it.
///
/// # Errors
/// See [`reconcile`].
pub async fn rehearse(client: &Client, name: &str, devices: &[Device]) -> Result<(), PublishError> {
    let node = node(client, name).await?;
    let api: Api<ResourceSlice> = Api::all(client.clone());
    let there = api
        .list(&ListParams::default().fields(&selector(&node)))
        .await?
        .items;
    let params = PostParams {
        dry_run: true,
        ..PostParams::default()
    };
    for (index, spec) in slices::build(&node, devices, 1).into_iter().enumerate() {
        let mut object = slices::object(&node, index, spec);
        let name = slices::object_name(&node, index);
        match there
            .iter()
            .find(|it| it.metadata.name.as_ref() == Some(&name))
        {
            None => api.create(&params, &object).await?,
            Some(slice) => {
                object.spec.pool.generation = slice.spec.pool.generation + 1;
                object
                    .metadata
                    .resource_version
                    .clone_from(&slice.metadata.resource_version);
                api.replace(&name, &params, &object).await?
            }
        };
    }
    Ok(())
}

fn selector(node: &Node) -> String {
    format!("spec.driver={DRIVER},spec.nodeName={}", node.name)
}
