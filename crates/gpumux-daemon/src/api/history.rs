//! `/v1/history`: time and memory of tenants and devices in the last minutes; a sample is taken each second.

use std::{sync::Arc, time::Duration};

use axum::{
    extract::Query,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use gpumux_core::Micros;
use serde::Deserialize;
use tokio::sync::watch;

use super::{
    context::{Api, Shared},
    refused::Refused,
    types,
};
use crate::{
    history::{Look, Span},
    scheduler::Stopped,
};

/// How often a sample is taken.
const EVERY: Duration = Duration::from_secs(1);

/// Takes samples until told to stop.
pub(crate) async fn keep(api: Arc<Api>, mut stop: watch::Receiver<bool>) {
    let mut beat = tokio::time::interval(EVERY);
    beat.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = beat.tick() => {}
            _ = stop.wait_for(|stop| *stop) => return,
        }
        if take(&api).await.is_err() {
            return;
        }
    }
}

async fn take(api: &Api) -> Result<(), Stopped> {
    let seen = api.look().await?;
    let view = &seen.view;
    let now = Micros(api.started.elapsed().as_micros() as u64);
    let mut looks = Vec::new();
    for tenant in &seen.tenants {
        for device in &view.devices {
            let totals = view.totals.get(&(tenant.id, device.uuid.clone()));
            let line = view.memory.iter().find(|line| line.uuid == device.uuid);
            let entries = line.into_iter().flat_map(|line| &line.entries);
            let holding = (entries.filter(|(id, _)| *id == tenant.id))
                .map(|(_, entry)| (entry.holding.resident(), entry.holding.swapped))
                .fold((0, 0), |sum, own| (sum.0 + own.0, sum.1 + own.1));
            if totals.is_none() && holding == (0, 0) {
                continue;
            }
            let totals = totals.copied().unwrap_or_default();
            let moves = view.moves.get(&tenant.id);
            looks.push(Look {
                tenant: tenant.id,
                device: device.uuid.clone(),
                name: tenant.name.clone(),
                uid: tenant.uid,
                user: tenant.user.clone(),
                group: tenant.placement.group(tenant.uid),
                received_us: totals.received_us,
                waited_us: totals.waited_us,
                memory: holding.0,
                swapped: holding.1,
                moves: moves.map_or(0, |it| it.outs + it.backs),
            });
        }
    }
    let devices = (view.devices.iter()).map(|it| (it.uuid.clone(), it.readings));
    api.past.record(now, &devices.collect::<Vec<_>>(), looks);
    Ok(())
}

/// How much of the past.
#[derive(Deserialize)]
pub(super) struct Asked {
    span: Option<String>,
}

/// Time and memory of tenants and devices: the last five minutes by the second, or the last hour by ten seconds.
#[utoipa::path(
    get, path = "/v1/history",
    params(("span" = Option<String>, Query, description = "`5m` (if not given) or `1h`")),
    responses((status = 200, body = types::History), (status = "4XX", body = types::Problem))
)]
pub(super) async fn history(api: Shared, asked: Query<Asked>) -> Result<Response, Refused> {
    let span = match asked.span.as_deref() {
        None | Some("5m") => Span::FiveMinutes,
        Some("1h") => Span::Hour,
        Some(other) => {
            let message = format!("there is no history of `{other}`: use 5m or 1h");
            return Err(Refused(StatusCode::UNPROCESSABLE_ENTITY, message));
        }
    };
    let json = [(header::CONTENT_TYPE, "application/json")];
    Ok((json, api.past.answer(span).to_string()).into_response())
}
