//! What every request has at hand. What was seen last is kept for when the driver keeps the scheduling thread in a control.

use std::{
    collections::BTreeMap,
    future::Future,
    net::SocketAddr,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use axum::{Extension, Json, extract::State, http::StatusCode};

use super::{
    refused::Refused,
    seen::Seen,
    shown::{memory_map, outward, show},
    types::{self, Fault, Live, Status},
};
use crate::{
    config::Config,
    devices::Devices,
    history::Past,
    mig::Partitioner,
    paths,
    peer::Peer,
    quota::{ON_TCP, Place, Quota, Taken, kept},
    scheduler::{Command, Handle, Stopped, View},
    session::Sessions,
    tenants::Tenants,
};

/// The most connections that watch live data, and those of one user: the other places stay for single requests.
const MAX_WATCHERS: usize = 128;
const MAX_WATCHERS_PER_USER: usize = MAX_WATCHERS / 2;
/// How often what is live is sent.
pub(super) const LIVE: Duration = Duration::from_millis(500);
/// What was seen last is shown when the scheduling thread made no progress for so long.
const OLD: Duration = Duration::from_secs(1);
/// What only that thread can do is refused after so long, before clients stop waiting.
const REFUSED: Duration = Duration::from_secs(4);
/// Why, also as the state of each device.
const STALLED: &str = "the scheduling thread waits for the driver: a control does not return";

pub(super) type Answer<T> = Result<Json<T>, Refused>;
/// An answer without contents.
pub(super) type Done = Result<StatusCode, Refused>;
pub(super) type Shared = State<Arc<Api>>;
/// The process that asks.
pub(super) type Caller = Extension<Arc<Peer>>;

/// What the API speaks about.
pub(crate) struct Api {
    pub(crate) config: Arc<Config>,
    pub(crate) tenants: Arc<Tenants>,
    pub(crate) sessions: Arc<Sessions>,
    pub(crate) scheduler: Handle,
    pub(crate) devices: Devices,
    pub(crate) partitioner: Partitioner,
    pub(crate) runtime_dir: PathBuf,
    pub(crate) started: Instant,
    /// The TCP address that is listened on.
    pub(crate) listen: Option<SocketAddr>,
    /// What was sent last, and when it was made: all watchers share it.
    pub(crate) live: tokio::sync::Mutex<Option<(Instant, Arc<str>)>>,
    pub(crate) past: Past,
    /// The places of those that watch.
    pub(crate) watchers: Quota,
    /// What was seen last.
    pub(crate) last: Mutex<Option<Arc<Seen>>>,
}

impl Api {
    pub(super) fn status(&self, seen: &Seen, faults: Vec<Fault>) -> Status {
        let (api, view) = (self, &seen.view);
        Status {
            version: env!("CARGO_PKG_VERSION").into(),
            faults,
            protocol: gpumux_wire::PROTOCOL,
            pid: std::process::id(),
            uptime_s: api.started.elapsed().as_secs(),
            runtime_dir: api.runtime_dir.display().to_string(),
            session_socket: paths::session_socket(&api.runtime_dir)
                .display()
                .to_string(),
            listen: api.listen.map(|address| address.to_string()),
            policy: api.config.policy.clone(),
            tenants: seen.tenants.len(),
            sessions: api.sessions.count(),
            devices: view.devices.clone(),
            scheduler: view.scheduler.clone(),
            host_memory: api.host_memory(view),
        }
    }

    fn host_memory(&self, view: &View) -> types::HostMemory {
        let (used, limit) = view.on_host;
        let rules = &self.config.host_memory;
        types::HostMemory {
            used,
            limit: Some(limit).filter(|limit| *limit != u64::MAX),
            location: (rules.location.as_ref()).map(|it| it.display().to_string()),
            scrub: rules.scrub,
        }
    }

    /// Adds what only NVML knows of the devices.
    fn complete(&self, view: &mut View) {
        let known = self.devices.list();
        for device in &mut view.devices {
            if let Some(known) = known.iter().find(|known| known.uuid == device.uuid) {
                // NVML of its own: that of the emulated device.
                device.emulated |= self.config.emulated.is_some() && self.config.nvml.is_some();
                device.index = Some(known.gpu);
                device.name = known.name.clone();
                device.readings = types::Readings {
                    memory_used: Some(known.memory_used),
                    ..known.readings
                };
                device.driver = known.driver.clone();
                device.memory_bytes = known.memory_bytes;
                device.hardware = known.hardware.clone();
                if device.state == "ok" {
                    device.state = known.state.clone();
                }
            }
            if let Some(trouble) = self.devices.trouble().filter(|_| device.state == "ok") {
                device.state = trouble.into();
            }
        }
        // Devices are listed by number, and so is their memory.
        let unknown = u32::MAX;
        (view.devices).sort_by_key(|device| device.index.unwrap_or(unknown));
        let number: BTreeMap<&str, u32> = (view.devices.iter())
            .filter_map(|device| Some((&*device.uuid, device.index?)))
            .collect();
        (view.memory).sort_by_key(|line| number.get(&*line.uuid).copied().unwrap_or(unknown));
    }

    /// All that there is, as JSON; made at most as often as it is sent to one.
    pub(super) async fn live(&self) -> Result<Arc<str>, Refused> {
        let mut last = self.live.lock().await;
        if let Some((at, text)) = &*last
            && at.elapsed() < LIVE * 4 / 5
        {
            return Ok(Arc::clone(text));
        }
        let seen = self.seen().await?;
        let live = Live {
            memory: memory_map(&seen.view, &seen.names),
            status: self.status(&seen, seen.faults.clone()),
            tenants: seen.shown().map(|it| outward(it, false)).collect(),
        };
        // No map with odd keys is in it.
        let text: Arc<str> = serde_json::to_string(&live).unwrap_or_default().into();
        *last = Some((Instant::now(), Arc::clone(&text)));
        Ok(text)
    }

    pub(super) async fn tenant(&self, uid: Option<u32>, name: &str) -> Answer<types::Tenant> {
        let seen = self.seen().await?;
        let tenant = seen.find(uid, name)?.clone();
        Ok(Json(show(tenant, &seen.view)))
    }

    /// What there is, or what was seen last: within two seconds.
    pub(super) async fn seen(&self) -> Result<Arc<Seen>, Refused> {
        tokio::select! {
            biased;
            () = self.scheduler.stalled_for(OLD) => {}
            seen = self.look() => return Ok(seen?),
        }
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let mut seen = last.as_deref().cloned().ok_or_else(stalled)?;
        for device in &mut seen.view.devices {
            device.state = STALLED.into();
        }
        Ok(seen.into())
    }

    /// What there is, as soon as the scheduling thread answers.
    pub(super) async fn look(&self) -> Result<Arc<Seen>, Stopped> {
        let mut view = self.scheduler.ask(Command::View).await?;
        self.complete(&mut view);
        let tenants = self.tenants.list().await;
        for process in view.devices.iter_mut().flat_map(|it| &mut it.foreign) {
            if process.tenant.is_none() {
                let tenant = crate::tenants::started_by(&tenants, process.pid);
                process.started_by = tenant.map(|it| it.name.clone());
            }
        }
        let seen = Arc::new(Seen {
            view,
            tenants,
            names: self.tenants.names().await,
            faults: self.tenants.faults().await,
            groups: self.tenants.groups().await,
        });
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        *last = Some(Arc::clone(&seen));
        Ok(seen)
    }

    /// Has something done that the scheduling thread takes part in.
    pub(super) async fn unless_stalled<T, E: Into<Refused>>(
        &self,
        work: impl Future<Output = Result<T, E>>,
    ) -> Result<T, Refused> {
        tokio::select! {
            biased;
            () = self.scheduler.stalled_for(REFUSED) => Err(stalled()),
            done = work => done.map_err(Into::into),
        }
    }

    /// Has something done that needs only what is known here, which a change may hold that waits for the scheduling thread.
    pub(super) async fn in_time<T, E: Into<Refused>>(
        &self,
        work: impl Future<Output = Result<T, E>>,
    ) -> Result<T, Refused> {
        match tokio::time::timeout(REFUSED, work).await {
            Ok(done) => done.map_err(Into::into),
            Err(_) => Err(stalled()),
        }
    }
}

fn stalled() -> Refused {
    Refused(StatusCode::GATEWAY_TIMEOUT, STALLED.into())
}

/// The user that asks; none on TCP, where it is unknown.
pub(super) fn asker(peer: Option<&Caller>) -> Option<u32> {
    peer.map(|peer| peer.uid)
}

/// A place among those that watch, for this user; none: a client on TCP.
pub(super) fn watcher(watchers: &Quota, uid: Option<u32>) -> Result<Place, Refused> {
    let uid = uid.unwrap_or(ON_TCP);
    watchers.take(uid, |Taken { own, all }| {
        let is_room = all < MAX_WATCHERS - kept(MAX_WATCHERS, uid, own);
        match is_room && (uid == 0 || own < MAX_WATCHERS_PER_USER) {
            true => Ok(()),
            false => {
                let why = format!(
                    "{all} clients follow events or live data already, {own} of them of this user: ask /v1/status from time to time"
                );
                Err(Refused(StatusCode::TOO_MANY_REQUESTS, why))
            }
        }
    })
}

/// The client may go away in the middle of it; what was begun must not stay half done.
pub(super) async fn to_its_end<T: Send + 'static, E: Into<Refused> + Send + 'static>(
    work: impl Future<Output = Result<T, E>> + Send + 'static,
) -> Result<T, Refused> {
    match tokio::spawn(work).await {
        Ok(done) => done.map_err(Into::into),
        Err(error) => {
            let status = StatusCode::INTERNAL_SERVER_ERROR;
            Err(Refused(status, error.to_string()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_to_watch_are_left_to_root_and_other_users() {
        let watchers = Quota::default();
        let fill = |uid| -> Vec<_> {
            let places = std::iter::repeat_with(|| watcher(&watchers, uid));
            places.map_while(Result::ok).collect()
        };
        let held = [Some(7), None, Some(8), Some(0)].map(fill);
        assert_eq!(held.each_ref().map(Vec::len), [64, 48, 8, 8]);
        let refused = watcher(&watchers, Some(7)).unwrap_err();
        // That of a daemon which leaves is another one: clients wait for the next daemon.
        assert_eq!(refused.0, StatusCode::TOO_MANY_REQUESTS);
    }
}
