//! The HTTP API on the daemon's Unix socket. Who asks is known from the socket: every local user
//! may look, only a tenant's owner and root may change it.

pub mod types;

use std::{
    collections::BTreeMap,
    io,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use axum::{
    Extension, Json, Router,
    extract::{DefaultBodyLimit, Path, Request, State, rejection::JsonRejection},
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::get,
};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use tokio::{net::UnixListener, sync::watch};
use utoipa::OpenApi;

use crate::{
    config::Config,
    devices::Devices,
    paths,
    peer::{Peer, credentials},
    scheduler::{Handle, Stopped, View},
    session::Sessions,
    tenants::{Tenant, TenantError, Tenants},
};
use types::{Created, Device, NewTenant, Problem, SpecChange, Status, TenantState};

/// Largest request body in bytes.
const MAX_BODY: usize = 64 * 1024;
/// How long a connection may take to say what it wants.
const HEADERS: Duration = Duration::from_secs(10);
/// Most connections of one user, and of all.
const MAX_CONNECTIONS: (usize, usize) = (256, 1024);

/// What the API speaks about.
pub(crate) struct Api {
    pub(crate) config: Arc<Config>,
    pub(crate) tenants: Arc<Tenants>,
    pub(crate) sessions: Arc<Sessions>,
    pub(crate) scheduler: Handle,
    pub(crate) devices: Devices,
    pub(crate) runtime_dir: PathBuf,
    pub(crate) started: Instant,
}

/// Serves the API until told to stop.
pub(crate) async fn serve(api: Arc<Api>, listener: UnixListener, mut stop: watch::Receiver<bool>) {
    let router = router(api);
    let users: Arc<Mutex<BTreeMap<u32, usize>>> = Arc::default();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = stop.wait_for(|stop| *stop) => return,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a request");
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        let Ok((_, uid)) = credentials(&stream) else {
            continue;
        };
        let Some(place) = Place::take(&users, uid) else {
            continue;
        };
        let Ok(peer) = Peer::of(&stream) else {
            continue;
        };
        let service = TowerToHyperService::new(router.clone().layer(Extension(Arc::new(peer))));
        tokio::spawn(async move {
            let _place = place;
            let connection = hyper::server::conn::http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(HEADERS)
                .serve_connection(TokioIo::new(stream), service);
            if let Err(error) = connection.await {
                tracing::debug!(%error, "a request went wrong");
            }
        });
    }
}

/// A connection's place among its user's; given back when dropped.
struct Place(Arc<Mutex<BTreeMap<u32, usize>>>, u32);

impl Place {
    fn take(users: &Arc<Mutex<BTreeMap<u32, usize>>>, uid: u32) -> Option<Self> {
        let mut table = users.lock().unwrap_or_else(PoisonError::into_inner);
        let all: usize = table.values().sum();
        let own = table.entry(uid).or_default();
        if *own >= MAX_CONNECTIONS.0 || all >= MAX_CONNECTIONS.1 {
            return None;
        }
        *own += 1;
        Some(Self(Arc::clone(users), uid))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut table = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(own) = table.get_mut(&self.1) {
            *own -= 1;
            if *own == 0 {
                table.remove(&self.1);
            }
        }
    }
}

fn router(api: Arc<Api>) -> Router {
    Router::new()
        .route("/openapi.json", get(openapi))
        .route("/v1/status", get(status))
        .route("/v1/devices", get(devices))
        .route("/v1/tenants", get(tenants).post(create))
        .route(
            "/v1/tenants/{name}",
            get(tenant).patch(change).delete(delete),
        )
        .fallback(async |request: Request| {
            Refused(
                StatusCode::NOT_FOUND,
                format!("there is no {}: see /openapi.json", request.uri().path()),
            )
        })
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .with_state(api)
}

#[derive(OpenApi)]
#[openapi(
    info(
        title = "gpumux",
        description = "The API of gpumuxd, on the Unix socket api.sock in its runtime directory."
    ),
    paths(status, devices, tenants, tenant, create, change, delete),
    components(schemas(Problem))
)]
struct Document;

/// The API's description: generated from the types, and kept in `openapi.json` beside the sources.
pub fn document() -> String {
    // Only maps with other keys than strings cannot be written.
    Document::openapi().to_pretty_json().unwrap_or_default() + "\n"
}

/// An answer that is not a success.
struct Refused(StatusCode, String);

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        (self.0, Json(Problem { error: self.1 })).into_response()
    }
}

impl From<TenantError> for Refused {
    fn from(error: TenantError) -> Self {
        let status = match &error {
            TenantError::Unknown(_) | TenantError::UnknownToken => StatusCode::NOT_FOUND,
            TenantError::NotYours(_) | TenantError::NotTrusted => StatusCode::FORBIDDEN,
            TenantError::Taken(_) | TenantError::Busy(..) => StatusCode::CONFLICT,
            TenantError::BadName(_) | TenantError::BadToken | TenantError::Spec(_) => {
                StatusCode::UNPROCESSABLE_ENTITY
            }
            TenantError::Invisible => StatusCode::BAD_REQUEST,
            TenantError::TooMany(_) => StatusCode::TOO_MANY_REQUESTS,
            TenantError::Stopped(_) => StatusCode::SERVICE_UNAVAILABLE,
            TenantError::Save(..) => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Self(status, error.to_string())
    }
}

impl From<Stopped> for Refused {
    fn from(error: Stopped) -> Self {
        TenantError::from(error).into()
    }
}

impl From<JsonRejection> for Refused {
    fn from(error: JsonRejection) -> Self {
        Self(error.status(), error.body_text())
    }
}

type Answer<T> = Result<Json<T>, Refused>;

async fn openapi() -> impl IntoResponse {
    ([("content-type", "application/json")], document())
}

/// What the daemon is and does.
#[utoipa::path(get, path = "/v1/status", responses((status = 200, body = Status)))]
async fn status(State(api): State<Arc<Api>>) -> Answer<Status> {
    let view = api.view().await?;
    Ok(Json(Status {
        version: env!("CARGO_PKG_VERSION").into(),
        protocol: gpumux_wire::PROTOCOL,
        pid: std::process::id(),
        uptime_s: api.started.elapsed().as_secs(),
        runtime_dir: api.runtime_dir.display().to_string(),
        session_socket: paths::session_socket(&api.runtime_dir)
            .display()
            .to_string(),
        policy: api.config.policy.clone(),
        tenants: api.tenants.list().await.len(),
        sessions: api.sessions.count(),
        devices: view.devices,
        scheduler: view.scheduler,
    }))
}

/// The devices.
#[utoipa::path(get, path = "/v1/devices", responses((status = 200, body = Vec<Device>)))]
async fn devices(State(api): State<Arc<Api>>) -> Answer<Vec<Device>> {
    Ok(Json(api.view().await?.devices))
}

/// All tenants, the oldest first.
#[utoipa::path(get, path = "/v1/tenants", responses((status = 200, body = Vec<types::Tenant>)))]
async fn tenants(State(api): State<Arc<Api>>) -> Answer<Vec<types::Tenant>> {
    let view = api.view().await?;
    let tenants = api.tenants.list().await;
    Ok(Json(
        tenants
            .into_iter()
            .map(|tenant| show(tenant, &view))
            .collect(),
    ))
}

/// One tenant.
#[utoipa::path(
    get, path = "/v1/tenants/{name}",
    params(("name" = String, Path, description = "Name of the tenant")),
    responses((status = 200, body = types::Tenant), (status = "4XX", body = Problem))
)]
async fn tenant(State(api): State<Arc<Api>>, Path(name): Path<String>) -> Answer<types::Tenant> {
    api.tenant(&name).await
}

/// Makes a tenant.
#[utoipa::path(
    post, path = "/v1/tenants", request_body = NewTenant,
    responses((status = 201, body = Created), (status = "4XX", body = Problem))
)]
async fn create(
    State(api): State<Arc<Api>>,
    Extension(peer): Extension<Arc<Peer>>,
    new: Result<Json<NewTenant>, JsonRejection>,
) -> Result<(StatusCode, Json<Created>), Refused> {
    let Json(new) = new?;
    let created = api.tenants.create(&peer, new).await?;
    Ok((StatusCode::CREATED, Json(created)))
}

/// Changes what a tenant is promised: in force at once, or refused and nothing changed.
#[utoipa::path(
    patch, path = "/v1/tenants/{name}", request_body = SpecChange,
    params(("name" = String, Path, description = "Name of the tenant")),
    responses((status = 200, body = types::Tenant), (status = "4XX", body = Problem))
)]
async fn change(
    State(api): State<Arc<Api>>,
    Extension(peer): Extension<Arc<Peer>>,
    Path(name): Path<String>,
    change: Result<Json<SpecChange>, JsonRejection>,
) -> Answer<types::Tenant> {
    let Json(change) = change?;
    api.tenants.change(peer.uid, &name, &change).await?;
    api.tenant(&name).await
}

/// Ends a tenant that has no connected process.
#[utoipa::path(
    delete, path = "/v1/tenants/{name}",
    params(("name" = String, Path, description = "Name of the tenant")),
    responses((status = 204), (status = "4XX", body = Problem))
)]
async fn delete(
    State(api): State<Arc<Api>>,
    Extension(peer): Extension<Arc<Peer>>,
    Path(name): Path<String>,
) -> Result<StatusCode, Refused> {
    api.tenants.delete(peer.uid, &name).await?;
    Ok(StatusCode::NO_CONTENT)
}

impl Api {
    /// What the scheduler sees, and of the devices what only NVML knows.
    async fn view(&self) -> Result<View, Stopped> {
        let mut view = self.scheduler.call(|engine| engine.view()).await?;
        let known = self.devices.list();
        for device in &mut view.devices {
            if let Some(known) = known.iter().find(|known| known.uuid == device.uuid) {
                // NVML of its own: that of the emulated device.
                device.emulated |= self.config.emulated.is_some() && self.config.nvml.is_some();
                device.name = known.name.clone();
                device.driver = known.driver.clone();
                device.memory_bytes = known.memory_bytes;
                if device.state == "ok" {
                    device.state = known.state.clone();
                }
            }
        }
        Ok(view)
    }

    async fn tenant(&self, name: &str) -> Answer<types::Tenant> {
        let view = self.view().await?;
        let tenants = self.tenants.list().await;
        let tenant = tenants.into_iter().find(|tenant| tenant.name == name);
        let tenant = tenant.ok_or_else(|| TenantError::Unknown(name.to_owned()))?;
        Ok(Json(show(tenant, &view)))
    }
}

/// A tenant with its domains.
fn show(tenant: Tenant, view: &View) -> types::Tenant {
    let own = view.domains.iter().filter(|(id, _)| *id == tenant.id);
    let domains: Vec<types::Domain> = own.map(|(_, domain)| domain.clone()).collect();
    let mut devices: Vec<String> = domains.iter().map(|domain| domain.device.clone()).collect();
    devices.sort_unstable();
    devices.dedup();
    let state = if domains.is_empty() {
        TenantState::Waiting
    } else if domains.iter().any(|domain| domain.error.is_some()) {
        TenantState::Faulty
    } else if domains.iter().any(|domain| domain.demand.may_run()) {
        TenantState::Running
    } else {
        TenantState::Idle
    };
    types::Tenant {
        name: tenant.name,
        class: tenant.spec.class,
        spec: tenant.spec.into(),
        uid: tenant.uid,
        pids: tenant.pids,
        devices,
        domains,
        since: tenant.since,
        state,
    }
}

/// Listens where the API shall be.
///
/// # Errors
/// When the socket cannot be made.
pub(crate) fn listen(socket: &std::path::Path) -> io::Result<UnixListener> {
    let listener = UnixListener::bind(socket)?;
    paths::open_to_all(socket)?;
    Ok(listener)
}

#[cfg(test)]
mod tests {
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
