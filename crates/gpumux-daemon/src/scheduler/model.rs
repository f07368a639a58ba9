//! The words that all parts of the scheduling thread share.

use std::{
    collections::BTreeSet,
    sync::{Arc, mpsc},
};

use gpumux_core::{
    Micros, TenantId,
    admission::UserPolicy,
    tamper::{Tampering, Then},
};
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;

use crate::{config::WhenStopped, link::SessionId};

/// The time, from an origin of its own.
pub(super) type Clock = Arc<dyn Fn() -> Micros + Send + Sync>;

/// Takes controls and files that are no longer needed: closing the last file of a dead process frees its
/// memory and takes the driver long.
pub(super) type Reaper = mpsc::Sender<Box<dyn Send>>;

/// What of a tenant's spec does not hold now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Withheld {
    /// Its guarantees: it has had no work for too long.
    pub(crate) lapsed: bool,
    /// All that others are not given without asking: a process of it undid controls.
    pub(crate) lowered: bool,
}

/// Something that happened to a tenant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Happening {
    /// Its memory has moved.
    Moved {
        tenant: TenantId,
        /// To the host, or back.
        out: bool,
        bytes: u64,
        took: Micros,
    },
    /// A request was denied, because the tenant would have exceeded its limit.
    AtLimit { tenant: TenantId, limit: u64 },
    /// A process of it undid a control.
    Tampered {
        tenant: TenantId,
        pid: u32,
        what: Tampering,
        /// What is done about it now.
        then: Option<Then>,
    },
    /// A process of it does not answer, and has memory that others are guaranteed. What is done if it is stopped.
    Silent {
        tenant: TenantId,
        pid: u32,
        then: WhenStopped,
    },
    /// This of its spec does not hold from now on.
    Withheld { tenant: TenantId, what: Withheld },
}

/// Whose a tenant is.
#[derive(Clone, Debug)]
pub(crate) struct Owner {
    /// The tenant's name.
    pub(crate) name: String,
    /// The user's id.
    pub(crate) uid: u32,
    /// What the user may have.
    pub(crate) policy: Arc<UserPolicy>,
}

/// Where the answer to a command goes.
pub(crate) type Answer<T> = oneshot::Sender<T>;

/// A tenant on its way to another device.
#[derive(Debug)]
pub(super) struct Relocation {
    /// UUID of that device.
    pub(super) to: String,
    /// Processes that had groups.
    pub(super) pids: BTreeSet<u32>,
    /// Sessions whose groups were let go.
    pub(super) let_go: BTreeSet<SessionId>,
}
