//! What the API shows, of one moment. The last is kept for when the driver keeps the scheduling thread in a control.

use std::{
    collections::BTreeMap,
    future::Future,
    sync::{Arc, PoisonError},
    time::Duration,
};

use axum::http::StatusCode;
use gpumux_core::TenantId;

use super::{
    Api, Refused, show,
    types::{self, Fault},
};
use crate::{
    scheduler::{Command, Stopped, View},
    tenants::{self, GroupCounts, Tenant, TenantError},
};

/// What was seen last is shown when the scheduling thread made no progress for so long.
const OLD: Duration = Duration::from_secs(1);
/// What only that thread can do is refused after so long, before clients stop waiting.
const REFUSED: Duration = Duration::from_secs(4);
/// Why, also as the state of each device.
const STALLED: &str = "the scheduling thread waits for the driver: a control does not return";

/// All that there is.
#[derive(Clone)]
pub(crate) struct Seen {
    pub(super) view: View,
    pub(super) tenants: Vec<Tenant>,
    pub(super) names: BTreeMap<TenantId, String>,
    pub(super) faults: Vec<Fault>,
    pub(super) groups: BTreeMap<String, GroupCounts>,
}

impl Seen {
    pub(super) fn find(&self, uid: Option<u32>, name: &str) -> Result<&Tenant, TenantError> {
        tenants::find(self.tenants.iter(), uid, name)
    }

    pub(super) fn shown(&self) -> impl Iterator<Item = types::Tenant> {
        let tenants = self.tenants.iter().cloned();
        tenants.map(|tenant| show(tenant, &self.view))
    }
}

impl Api {
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
        let seen = Arc::new(Seen {
            view,
            tenants: self.tenants.list().await,
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
