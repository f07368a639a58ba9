//! The HTTP API. On the daemon's Unix socket the kernel names the client's user: every local user may look, only
//! a tenant's owner and root may change it. On TCP, if the configuration has an address, every client may look, and none
//! may change anything.

mod body;
mod connections;
mod context;
pub mod explain;
pub(crate) mod history;
mod life;
mod metrics;
mod mig;
mod page;
mod refused;
mod seen;
mod shown;
mod state;
mod trace;
pub mod types;

use std::{convert::Infallible, sync::Arc};

use axum::{
    Json, Router,
    extract::{DefaultBodyLimit, Path, Query, Request, rejection::JsonRejection},
    http::{StatusCode, header},
    middleware,
    response::{
        IntoResponse, Response,
        sse::{Event, Sse},
    },
    routing::{delete, get, patch, post, put},
};
use gpumux_core::{Micros, TenantId, relocation::Gpu};
use serde::Deserialize;
use utoipa::OpenApi;

use crate::{
    clock::since_1970,
    devices::numbered,
    memory as moves,
    relocation::{RelocationError, Relocator},
    scheduler::Command,
    tenants::resolve,
};
use body::{MAX_BODY, whole_body};
pub(crate) use connections::{CONNECTIONS, is_local_name, listen, serve, serve_router, serve_tcp};
pub(crate) use context::Api;
use context::{Answer, Caller, Done, LIVE, Shared, asker, to_its_end, watcher};
use refused::Refused;
use shown::{memory_map, outward, show};
use types::{
    Created, Device, DeviceMemory, Explanation, Hinted, Live, NewCurve, NewHint, NewPlace,
    NewTenant, Problem, Program, Relocated, SpecChange, Status,
};

/// What the clients on the Unix socket may read and change.
pub(crate) fn router(api: Arc<Api>) -> Router {
    readable()
        .route("/v1/me", get(page::me))
        .route("/v1/tenants", post(create))
        .route("/v1/tenants/{name}", patch(change).delete(remove))
        .route("/v1/tenants/{name}/hint", post(hint))
        .route("/v1/tenants/{name}/signal", post(life::signal))
        .route("/v1/tenants/{name}/exit", post(life::exit))
        .route("/v1/tenants/{name}/lost-output", post(life::lost_output))
        .route("/v1/settings", get(life::settings))
        .route("/v1/tenants/{name}/move", post(relocate))
        .route("/v1/tenants/{name}/sleep", post(sleep))
        .route("/v1/tenants/{name}/wake", post(wake))
        .route("/v1/settings/{name}", delete(forget))
        .route("/v1/programs/{fingerprint}", put(teach).delete(unlearn))
        .route("/v1/mig", get(mig::list).post(mig::make))
        .route("/v1/mig/{gpu}/{gpu_instance}", delete(mig::remove))
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .layer(middleware::from_fn(whole_body))
        .with_state(api)
}

/// What every client may read, for those on TCP.
pub(crate) fn readable_router(api: Arc<Api>) -> Router {
    readable().with_state(api)
}

/// What every client may read.
fn readable() -> Router<Arc<Api>> {
    Router::new()
        .route("/", get(page::page))
        .route("/metrics", get(metrics))
        .route("/openapi.json", get(openapi))
        .route("/v1/status", get(status))
        .route("/v1/devices", get(devices))
        .route("/v1/tenants", get(tenants))
        .route("/v1/tenants/{name}", get(tenant))
        .route("/v1/tenants/{name}/explanation", get(explanation))
        .route("/v1/live", get(live))
        .route("/v1/ended", get(life::ended))
        .route("/v1/events", get(life::events))
        .route("/v1/events/past", get(life::past_events))
        .route("/v1/history", get(history::history))
        .route("/v1/memory", get(memory))
        .route("/v1/programs", get(programs))
        .route("/v1/trace", get(trace))
        .fallback(async |request: Request| {
            Refused(
                StatusCode::NOT_FOUND,
                format!("there is no {}: see /openapi.json", request.uri().path()),
            )
        })
}

#[derive(OpenApi)]
#[openapi(
    info(
        title = "gpumux",
        description = "The API of gpumuxd, on the Unix socket api.sock in its runtime directory."
    ),
    paths(
        status,
        devices,
        tenants,
        tenant,
        explanation,
        live,
        history::history,
        page::me,
        trace,
        metrics,
        create,
        change,
        remove,
        forget,
        life::ended,
        life::events,
        life::past_events,
        life::settings,
        life::signal,
        life::exit,
        life::lost_output,
        hint,
        memory,
        relocate,
        sleep,
        wake,
        programs,
        teach,
        unlearn,
        mig::list,
        mig::make,
        mig::remove
    ),
    components(schemas(Problem))
)]
struct Document;

/// The API's description: generated from the types, and kept in `openapi.json` beside the sources.
pub fn document() -> String {
    // Only maps with other keys than strings cannot be written.
    Document::openapi().to_pretty_json().unwrap_or_default() + "\n"
}

async fn openapi() -> impl IntoResponse {
    ([("content-type", "application/json")], document())
}

/// What the daemon is and does.
#[utoipa::path(get, path = "/v1/status", responses((status = 200, body = Status)))]
async fn status(api: Shared) -> Answer<Status> {
    let seen = api.seen().await?;
    Ok(Json(api.status(&seen, seen.faults.clone())))
}

/// Metrics for Prometheus.
#[utoipa::path(get, path = "/metrics", responses((status = 200, description = "OpenMetrics text", content_type = "application/openmetrics-text")))]
async fn metrics(api: Shared) -> Result<Response, Refused> {
    let seen = api.seen().await?;
    let (view, names) = (&seen.view, &seen.names);
    let name = |id: TenantId| {
        let lives = seen.tenants.iter().any(|tenant| tenant.id == id);
        names.get(&id).filter(|_| lives).cloned()
    };
    let totals = (view.totals.iter())
        .filter_map(|((id, device), totals)| Some((name(*id)?, device.clone(), *totals)))
        .collect();
    let scrape = metrics::Scrape {
        totals,
        groups: seen.groups.clone(),
        memory: memory_map(view, names),
        status: api.status(&seen, Vec::new()),
        tenants: (seen.tenants.iter().cloned())
            .map(|mut tenant| {
                // A label must tell two users' tenants of one name apart.
                if let Some(name) = names.get(&tenant.id) {
                    tenant.name.clone_from(name);
                }
                show(tenant, view)
            })
            .collect(),
        // Whole seconds, so that it stays the same.
        started: since_1970()
            .saturating_sub(api.started.elapsed())
            .as_secs_f64()
            .round(),
    };
    Ok((
        [(header::CONTENT_TYPE, metrics::CONTENT_TYPE)],
        scrape.text(),
    )
        .into_response())
}

/// All that there is, sent twice a second as server-sent events.
#[utoipa::path(
    get, path = "/v1/live",
    responses((status = 200, body = Live, content_type = "text/event-stream"), (status = "4XX", body = Problem))
)]
async fn live(api: Shared, peer: Option<Caller>) -> Result<impl IntoResponse, Refused> {
    let place = watcher(&api.watchers, asker(peer.as_ref()))?;
    let beat = tokio::time::interval(LIVE);
    let state = (api, beat, place);
    let events = futures_util::stream::unfold(state, async |(api, mut beat, place)| {
        beat.tick().await;
        // A daemon that stops ends the stream.
        let data = api.live().await.ok()?;
        Some((
            Ok::<_, Infallible>(Event::default().data(&*data)),
            (api, beat, place),
        ))
    });
    Ok(Sse::new(events))
}

/// The memory of each device by tenant.
#[utoipa::path(get, path = "/v1/memory", responses((status = 200, body = [DeviceMemory])))]
async fn memory(api: Shared) -> Answer<Vec<DeviceMemory>> {
    let seen = api.seen().await?;
    Ok(Json(memory_map(&seen.view, &seen.names)))
}

/// Moves a tenant to another GPU; answers when it is there.
#[utoipa::path(post, path = "/v1/tenants/{name}/move", params(("name" = String, Path)), request_body = NewPlace,
    responses((status = 200, body = Relocated), (status = "4XX", body = Problem)))]
async fn relocate(
    api: Shared,
    peer: Caller,
    Path(name): Path<String>,
    place: Result<Json<NewPlace>, JsonRejection>,
) -> Answer<Relocated> {
    let Json(NewPlace { gpu }) = place?;
    let movable = api.tenants.movable(peer.uid, &name, |_| true);
    let tenant = api.in_time(movable).await?;
    let known = api.devices.list();
    let target = resolve(&gpu, &numbered(&known))?;
    let gpus = known.into_iter().map(|it| Gpu {
        instance: it.hardware.mig.is_some() || it.uuid.starts_with("MIG-"),
        trouble: it.other.or((it.state != "ok").then_some(it.state)),
        uuid: it.uuid,
        number: it.gpu,
        name: it.name,
        memory: it.memory_bytes,
    });
    let (gpus, shares) = (gpus.collect(), api.sessions.shares(tenant));
    let relocator = Relocator {
        config: Arc::clone(&api.config),
        scheduler: api.scheduler.clone(),
    };
    let tenants = Arc::clone(&api.tenants);
    let moved = to_its_end(async move {
        let moved = relocator.relocate(tenant, target, gpus, shares).await?;
        tenants.relocated(tenant, &moved).await;
        Ok::<_, RelocationError>(moved)
    });
    Ok(Json(api.unless_stalled(moved).await?))
}

/// Moves a tenant's memory to the host; answers when that is done.
#[utoipa::path(post, path = "/v1/tenants/{name}/sleep", params(("name" = String, Path)),
    responses((status = 204), (status = "4XX", body = Problem)))]
async fn sleep(api: Shared, peer: Caller, Path(name): Path<String>) -> Done {
    let movable = api.tenants.movable(peer.uid, &name, |away| !away);
    let tenant = api.in_time(movable).await?;
    api.unless_stalled(moves::sleep(&api.scheduler, tenant))
        .await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Brings a tenant's memory back; answers when that is done.
#[utoipa::path(post, path = "/v1/tenants/{name}/wake", params(("name" = String, Path)),
    responses((status = 204), (status = "4XX", body = Problem)))]
async fn wake(api: Shared, peer: Caller, Path(name): Path<String>) -> Done {
    let movable = api.tenants.movable(peer.uid, &name, |away| away);
    let tenant = api.in_time(movable).await?;
    api.unless_stalled(moves::wake(&api.scheduler, tenant))
        .await?;
    Ok(StatusCode::NO_CONTENT)
}

/// How much of the past.
#[derive(Deserialize)]
struct Past {
    seconds: Option<f64>,
}

/// The last seconds as a Chrome trace, which Perfetto opens.
#[utoipa::path(
    get, path = "/v1/trace",
    params(("seconds" = Option<f64>, Query, description = "How much of the past, 10 if not given")),
    responses((status = 200, description = "Chrome trace", content_type = "application/json"), (status = "4XX", body = Problem))
)]
async fn trace(api: Shared, past: Query<Past>) -> Result<Response, Refused> {
    let seconds = past.seconds.unwrap_or(10.0);
    if !(seconds > 0.0 && seconds <= 3600.0) {
        let message = format!("{seconds} seconds cannot be traced: use more than 0 and up to 3600");
        return Err(Refused(StatusCode::UNPROCESSABLE_ENTITY, message));
    }
    let time = Micros((seconds * 1e6) as u64);
    let asked = api.scheduler.ask(|answer| Command::History(time, answer));
    let history = api.unless_stalled(asked).await?;
    let names = &api.seen().await?.names;
    let name = |id| {
        names
            .get(&id)
            .cloned()
            .unwrap_or_else(|| "a tenant that ended".into())
    };
    let json = trace::chrome(&history, name);
    Ok(([(header::CONTENT_TYPE, "application/json")], json).into_response())
}

/// Why a tenant gets what it gets.
#[utoipa::path(
    get, path = "/v1/tenants/{name}/explanation",
    params(("name" = String, Path, description = "Name of the tenant")),
    responses((status = 200, body = Explanation), (status = "4XX", body = Problem))
)]
async fn explanation(
    api: Shared,
    peer: Option<Caller>,
    Path(name): Path<String>,
) -> Answer<Explanation> {
    let seen = api.seen().await?;
    let tenant = seen.find(asker(peer.as_ref()), &name)?.clone();
    let asked = (api.scheduler).ask(|answer| Command::Most(tenant.id, answer));
    // A thread that hangs in a control leaves out advice, not the answer.
    let most = api.unless_stalled(asked).await.ok().flatten();
    let tenant = show(tenant, &seen.view);
    let all: Vec<_> = seen.shown().collect();
    let (devices, faults) = (&seen.view.devices, &seen.faults);
    let explained = explain::explain(&tenant, &all, devices, faults, most.as_ref());
    Ok(Json(explained))
}

/// The devices.
#[utoipa::path(get, path = "/v1/devices", responses((status = 200, body = Vec<Device>)))]
async fn devices(api: Shared) -> Answer<Vec<Device>> {
    Ok(Json(api.seen().await?.view.devices.clone()))
}

/// All tenants, the oldest first.
#[utoipa::path(get, path = "/v1/tenants", responses((status = 200, body = Vec<types::Tenant>)))]
async fn tenants(api: Shared, peer: Option<Caller>) -> Answer<Vec<types::Tenant>> {
    let seen = api.seen().await?;
    let shown = seen.shown();
    Ok(Json(shown.map(|it| outward(it, peer.is_some())).collect()))
}

/// One tenant.
#[utoipa::path(
    get, path = "/v1/tenants/{name}",
    params(("name" = String, Path, description = "Name of the tenant")),
    responses((status = 200, body = types::Tenant), (status = "4XX", body = Problem))
)]
async fn tenant(
    api: Shared,
    peer: Option<Caller>,
    Path(name): Path<String>,
) -> Answer<types::Tenant> {
    let Json(tenant) = api.tenant(asker(peer.as_ref()), &name).await?;
    Ok(Json(outward(tenant, peer.is_some())))
}

/// Makes a tenant.
#[utoipa::path(
    post, path = "/v1/tenants", request_body = NewTenant,
    responses((status = 201, body = Created), (status = "4XX", body = Problem))
)]
async fn create(
    api: Shared,
    peer: Caller,
    new: Result<Json<NewTenant>, JsonRejection>,
) -> Result<(StatusCode, Json<Created>), Refused> {
    let Json(new) = new?;
    // A group may be started for it.
    let tenants = Arc::clone(&api.tenants);
    let created = to_its_end(async move {
        let name = new.name.clone().or(new.program.clone());
        let created = tenants.create(&peer, new).await;
        created.inspect_err(|error| {
            let whose = (name.as_deref().unwrap_or_default(), peer.uid);
            (tenants.events).push(types::EventKind::Refused, Some(whose), error.to_string());
        })
    });
    let created = api.unless_stalled(created).await?;
    Ok((StatusCode::CREATED, Json(created)))
}

/// Changes a tenant's spec: in force at once, or refused and nothing changed. If the user chose its
/// name, its owner's next tenant of this name has the same.
#[utoipa::path(
    patch, path = "/v1/tenants/{name}", request_body = SpecChange,
    params(("name" = String, Path, description = "Name of the tenant")),
    responses((status = 200, body = types::Tenant), (status = "4XX", body = Problem))
)]
async fn change(
    api: Shared,
    peer: Caller,
    Path(name): Path<String>,
    change: Result<Json<SpecChange>, JsonRejection>,
) -> Answer<types::Tenant> {
    let Json(change) = change?;
    let (tenants, tenant, uid) = (Arc::clone(&api.tenants), name.clone(), peer.uid);
    let changed = to_its_end(async move { tenants.change(uid, &tenant, &change).await });
    api.unless_stalled(changed).await?;
    api.tenant(Some(uid), &name).await
}

/// Ends a tenant that has no connected process.
#[utoipa::path(
    delete, path = "/v1/tenants/{name}",
    params(("name" = String, Path, description = "Name of the tenant")),
    responses((status = 204), (status = "4XX", body = Problem))
)]
async fn remove(api: Shared, peer: Caller, Path(name): Path<String>) -> Done {
    let tenants = Arc::clone(&api.tenants);
    let removed = to_its_end(async move { tenants.delete(peer.uid, &name).await });
    api.unless_stalled(removed).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Forgets what was set for tenants of this name: the next one has the defaults.
#[utoipa::path(
    delete, path = "/v1/settings/{name}",
    params(("name" = String, Path, description = "Name of tenants")),
    responses((status = 204), (status = "4XX", body = Problem))
)]
async fn forget(api: Shared, peer: Caller, Path(name): Path<String>) -> Done {
    let tenants = Arc::clone(&api.tenants);
    let forgotten = to_its_end(async move { tenants.forget(peer.uid, &name).await });
    api.in_time(forgotten).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// What is known of programs, by user and fingerprint.
#[utoipa::path(get, path = "/v1/programs", responses((status = 200, body = [Program])))]
async fn programs(api: Shared) -> Json<Vec<Program>> {
    Json(api.tenants.programs.list())
}

/// Sets the scaling profile of a program of the caller's.
#[utoipa::path(
    put, path = "/v1/programs/{fingerprint}", request_body = NewCurve,
    params(("fingerprint" = String, Path, description = "What its tenants name as their program")),
    responses((status = 204), (status = "4XX", body = Problem))
)]
async fn teach(
    api: Shared,
    peer: Caller,
    Path(fingerprint): Path<String>,
    curve: Result<Json<NewCurve>, JsonRejection>,
) -> Done {
    let Json(curve) = curve?;
    let taught = async move { api.tenants.teach(peer.uid, &fingerprint, &curve).await };
    to_its_end(taught).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Forgets what is known of a program of the caller's (root: of any user's).
#[utoipa::path(
    delete, path = "/v1/programs/{fingerprint}",
    params(("fingerprint" = String, Path, description = "What its tenants name as their program")),
    responses((status = 204), (status = "4XX", body = Problem))
)]
async fn unlearn(api: Shared, peer: Caller, Path(fingerprint): Path<String>) -> Done {
    let unlearnt = async move { api.tenants.unlearn(peer.uid, &fingerprint).await };
    to_its_end(unlearnt).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Says that a tenant's work is coming: its processes take their devices ahead of it.
#[utoipa::path(
    post, path = "/v1/tenants/{name}/hint", request_body = NewHint,
    params(("name" = String, Path, description = "Name of the tenant")),
    responses((status = 202, body = Hinted), (status = "4XX", body = Problem))
)]
async fn hint(
    api: Shared,
    peer: Caller,
    Path(name): Path<String>,
    hint: Result<Json<NewHint>, JsonRejection>,
) -> Result<(StatusCode, Json<Hinted>), Refused> {
    let Json(NewHint { expected_us }) = hint?;
    if let Some(us) = expected_us.filter(|us| *us > NewHint::FARTHEST_US) {
        let farthest = NewHint::FARTHEST_US;
        let message = format!("work in {us} µs is too far away: hint at most {farthest} µs ahead");
        return Err(Refused(StatusCode::UNPROCESSABLE_ENTITY, message));
    }
    let hintable = api.tenants.hintable(peer.uid, &name);
    let tenant = api.in_time(hintable).await?;
    let processes = api.sessions.hint(tenant, expected_us);
    Ok((StatusCode::ACCEPTED, Json(Hinted { processes })))
}

/// Checks a scrape by the rules of OpenMetrics; returns the names in it.
#[cfg(test)]
pub(crate) use metrics::tests::lint as lint_metrics;

#[cfg(test)]
mod tests {
    #[tokio::test]
    async fn change_that_was_begun_ends_without_its_client() {
        let (begin, begun) = tokio::sync::oneshot::channel();
        let (end, ended) = tokio::sync::oneshot::channel();
        let work = async move {
            let _ = begun.await;
            let _ = end.send(());
            Ok::<_, crate::tenants::TenantError>(())
        };
        tokio::select! {
            biased;
            _ = super::to_its_end(work) => panic!("it has not begun"),
            () = std::future::ready(()) => {}
        }
        begin.send(()).unwrap();
        ended.await.unwrap();
    }

    #[test]
    fn the_document_is_up_to_date() {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/openapi.json");
        let document = super::document();
        if std::env::var_os("UPDATE_OPENAPI").is_some() {
            std::fs::write(file, &document).unwrap();
        }
        assert!(
            std::fs::read_to_string(file).unwrap_or_default() == document,
            "openapi.json is not what the types say: run `UPDATE_OPENAPI=1 cargo test -p gpumux-daemon document`"
        );
    }
}
