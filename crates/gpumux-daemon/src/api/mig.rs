//! MIG instances: which there are and can be; they are made and removed for root only.

use std::time::Duration;

use axum::{
    Json,
    extract::{Path, Query, rejection::JsonRejection},
    http::StatusCode,
};
use serde::Deserialize;

use super::{
    context::{Answer, Api, Caller, Done, Shared, to_its_end},
    refused::Refused,
    shown::show,
    types::{MigGpu, MigInstance, NewMigInstance, Problem},
};
use crate::{mig::MigError, peer::Peer, scheduler::Command, users::trusted};

/// How long NVML may take to list a device that was just made.
const LISTED: Duration = Duration::from_secs(5);

impl From<MigError> for Refused {
    fn from(error: MigError) -> Self {
        let status = match &error {
            MigError::NotTrusted => StatusCode::FORBIDDEN,
            MigError::NoGpu(_) | MigError::NoInstance { .. } => StatusCode::NOT_FOUND,
            MigError::NoProfile { .. } | MigError::NoPlace { .. } => {
                StatusCode::UNPROCESSABLE_ENTITY
            }
            MigError::Held { .. } | MigError::Other { .. } | MigError::InUse { .. } => {
                StatusCode::CONFLICT
            }
            MigError::Slow => StatusCode::GATEWAY_TIMEOUT,
            MigError::Nvml { .. }
            | MigError::HalfMade { .. }
            | MigError::Old(_)
            | MigError::Thread(_) => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Self(status, error.to_string())
    }
}

fn check(peer: &Peer) -> Result<(), MigError> {
    match trusted(peer.uid) {
        true => Ok(()),
        false => Err(MigError::NotTrusted),
    }
}

/// The GPUs in MIG mode: which instances they have, and which they can have.
#[utoipa::path(get, path = "/v1/mig", responses((status = 200, body = [MigGpu]), (status = "4XX", body = Problem)))]
pub(super) async fn list(api: Shared, peer: Caller) -> Answer<Vec<MigGpu>> {
    check(&peer)?;
    let mut gpus = api.partitioner.list().await?;
    for gpu in &mut gpus {
        gpu.emulated = api.config.emulated.is_some() && api.config.nvml.is_some();
    }
    Ok(Json(gpus))
}

/// Makes a GPU instance with one compute instance; answers when it can be used.
#[utoipa::path(
    post, path = "/v1/mig", request_body = NewMigInstance,
    responses((status = 201, body = MigInstance), (status = "4XX", body = Problem))
)]
pub(super) async fn make(
    api: Shared,
    peer: Caller,
    new: Result<Json<NewMigInstance>, JsonRejection>,
) -> Result<(StatusCode, Json<MigInstance>), Refused> {
    check(&peer)?;
    let Json(new) = new?;
    let made = to_its_end(async move {
        let made = api.partitioner.make(new.clone()).await?;
        tracing::info!(
            gpu = new.gpu,
            profile = new.profile,
            start = new.start,
            "made a MIG instance"
        );
        let devices = made.compute_instances.iter();
        for it in devices.filter(|it| !it.device.is_empty()) {
            api.until_listed(&it.device, true).await?;
        }
        Ok::<_, Refused>(made)
    });
    Ok((StatusCode::CREATED, Json(made.await?)))
}

#[derive(Deserialize)]
pub(super) struct Removal {
    /// UUID of its compute instance.
    device: Option<String>,
}

/// Removes a GPU instance that nothing uses.
#[utoipa::path(
    delete, path = "/v1/mig/{gpu}/{gpu_instance}",
    params(
        ("gpu" = String, Path, description = "UUID of the GPU"),
        ("gpu_instance" = u32, Path, description = "The driver's number of the GPU instance"),
        ("device" = Option<String>, Query, description = "UUID of its one compute instance; without it: it has none. Another instance is not removed"),
    ),
    responses((status = 204), (status = "4XX", body = Problem))
)]
pub(super) async fn remove(
    api: Shared,
    peer: Caller,
    Path((gpu, id)): Path<(String, u32)>,
    Query(Removal { device }): Query<Removal>,
) -> Done {
    check(&peer)?;
    if let Some(device) = &device {
        api.check_without_tenants(device).await?;
    }
    let removed = to_its_end(async move {
        let done = api.partitioner.remove(gpu.clone(), id, device.clone());
        done.await?;
        tracing::info!(gpu, gpu_instance = id, "removed a MIG instance");
        match &device {
            Some(device) => api.until_listed(device, false).await,
            None => Ok(()),
        }
    });
    removed.await?;
    Ok(StatusCode::NO_CONTENT)
}

impl Api {
    /// Whether no tenant is on a device, or confined to it.
    async fn check_without_tenants(&self, device: &str) -> Result<(), Refused> {
        let seen = self.seen().await?;
        let tenants = seen.tenants.iter().cloned();
        let shown = tenants.map(|tenant| show(tenant, &seen.view));
        let on = shown.filter(|it| {
            it.devices.iter().any(|on| on == device) || it.may_use.iter().any(|may| may == device)
        });
        let holders: Vec<String> = on.map(|it| format!("tenant {}", it.name)).collect();
        if holders.is_empty() {
            return Ok(());
        }
        let error = MigError::InUse {
            device: device.to_owned(),
            holders: holders.join(", "),
        };
        Err(error.into())
    }

    /// Has the devices looked at until this one is known, or is known no more: the next request counts on it.
    async fn until_listed(&self, device: &str, listed: bool) -> Result<(), Refused> {
        let is_listed = || self.devices.list().iter().any(|it| it.uuid == device);
        let wait = async {
            while is_listed() != listed {
                self.devices.look_again();
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        // The instance is there, or gone, all the same: the next look shows it.
        let _ = tokio::time::timeout(LISTED, wait).await;
        let known = self.devices.list();
        let told = |answer| Command::KnowDevices(known, answer);
        self.unless_stalled(self.scheduler.ask(told)).await
    }
}
