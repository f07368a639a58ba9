//! How tenants begin and end: `/v1/events`, `/v1/ended`, `/v1/settings`, signals and exit codes.

use std::{collections::VecDeque, convert::Infallible};

use axum::{
    Json,
    extract::{Path, Query, rejection::JsonRejection},
    http::StatusCode,
    response::{
        IntoResponse,
        sse::{self, Sse},
    },
};
use serde::Deserialize;

use super::{
    context::{Answer, Caller, Done, Shared, asker, watcher},
    refused::Refused,
    shown::program_only,
    types::{
        Ended, Event, EventKind, Exit, LostOutput, NewSignal, Problem, Reported, Setting, Signalled,
    },
};
use crate::quota::Place;

/// The last tenants that ended, the latest last.
#[utoipa::path(get, path = "/v1/ended", responses((status = 200, body = [Ended])))]
pub(super) async fn ended(api: Shared, peer: Option<Caller>) -> Json<Vec<Ended>> {
    let mut ends = api.tenants.ends().await;
    if peer.is_none() {
        for end in &mut ends {
            (end.command, end.log) = (program_only(&end.command), None);
        }
    }
    Json(ends)
}

/// Since when.
#[derive(Deserialize)]
pub(super) struct Since {
    after: Option<u64>,
}

/// A client that follows events: the last one sent, those to be sent, whether it is a local user, and its place.
type Following = (Shared, u64, VecDeque<Event>, bool, Place);

/// What happens from now on, or has happened after the event of a number, as server-sent events.
#[utoipa::path(
    get, path = "/v1/events",
    params(("after" = Option<u64>, Query, description = "Begin after the event of this number, as far as events are kept; 0: with all of them; without it: with the next one")),
    responses((status = 200, body = Event, content_type = "text/event-stream"), (status = "4XX", body = Problem))
)]
pub(super) async fn events(
    api: Shared,
    peer: Option<Caller>,
    since: Query<Since>,
) -> Result<impl IntoResponse, Refused> {
    let place = watcher(&api.watchers, asker(peer.as_ref()))?;
    let last = api.tenants.events.last();
    // A number of an earlier daemon's life may be higher.
    let after = since.after.map_or(last, |after| after.min(last));
    let waiting: VecDeque<Event> = VecDeque::new();
    let state = (api, after, waiting, peer.is_some(), place);
    let next = async |(api, mut after, mut waiting, local, place): Following| {
        while waiting.is_empty() {
            waiting = api.tenants.events.after(after).await.into();
        }
        let event = outward(waiting.pop_front()?, local);
        after = event.number;
        // No map with odd keys is in it.
        let data = serde_json::to_string(&event).unwrap_or_default();
        let sent = sse::Event::default().data(data);
        Some((
            Ok::<_, Infallible>(sent),
            (api, after, waiting, local, place),
        ))
    };
    let stream = futures_util::stream::unfold(state, next);
    Ok(Sse::new(stream).keep_alive(sse::KeepAlive::default()))
}

/// The last events, the latest last.
#[utoipa::path(get, path = "/v1/events/past", responses((status = 200, body = [Event])))]
pub(super) async fn past_events(api: Shared, peer: Option<Caller>) -> Json<Vec<Event>> {
    let events = api.tenants.events.kept().into_iter();
    Json(events.map(|event| outward(event, peer.is_some())).collect())
}

/// What others than local users may see of an event: that of a start names the command.
fn outward(mut event: Event, local: bool) -> Event {
    if !local && event.kind == EventKind::Started {
        event.text.clear();
    }
    event
}

/// What the caller (root: any user) set for names.
#[utoipa::path(get, path = "/v1/settings", responses((status = 200, body = [Setting])))]
pub(super) async fn settings(api: Shared, peer: Caller) -> Json<Vec<Setting>> {
    Json(api.tenants.settings(peer.uid).await)
}

/// Sends a signal to a tenant's program.
#[utoipa::path(
    post, path = "/v1/tenants/{name}/signal", request_body = NewSignal,
    params(("name" = String, Path, description = "Name of the tenant")),
    responses((status = 200, body = Signalled), (status = "4XX", body = Problem))
)]
pub(super) async fn signal(
    api: Shared,
    peer: Caller,
    Path(name): Path<String>,
    signal: Result<Json<NewSignal>, JsonRejection>,
) -> Answer<Signalled> {
    let Json(NewSignal { signal }) = signal?;
    let signalled = api.tenants.signal(peer.uid, &name, signal);
    let processes = api.in_time(signalled).await?;
    Ok(Json(Signalled { processes }))
}

/// Reports how a tenant's program ended: its parent knows.
#[utoipa::path(
    post, path = "/v1/tenants/{name}/exit", request_body = Exit,
    params(("name" = String, Path, description = "Name of the tenant")),
    responses((status = 200, body = Reported), (status = "4XX", body = Problem))
)]
pub(super) async fn exit(
    api: Shared,
    peer: Caller,
    Path(name): Path<String>,
    exit: Result<Json<Exit>, JsonRejection>,
) -> Answer<Reported> {
    let Json(exit) = exit?;
    let reported = api.tenants.report_exit(peer.uid, &name, exit);
    Ok(Json(api.in_time(reported).await?))
}

/// Reports that output of a tenant's program could not be written: its parent knows.
#[utoipa::path(
    post, path = "/v1/tenants/{name}/lost-output", request_body = LostOutput,
    params(("name" = String, Path, description = "Name of the tenant")),
    responses((status = 204), (status = "4XX", body = Problem))
)]
pub(super) async fn lost_output(
    api: Shared,
    peer: Caller,
    Path(name): Path<String>,
    lost: Result<Json<LostOutput>, JsonRejection>,
) -> Done {
    let Json(lost) = lost?;
    let reported = api.tenants.report_lost_output(peer.uid, &name, lost);
    api.in_time(reported).await?;
    Ok(StatusCode::NO_CONTENT)
}
