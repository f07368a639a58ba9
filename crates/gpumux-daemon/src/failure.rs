//! What can go wrong with an MPS group, as groups and the scheduling thread report it.

use std::sync::Arc;

use gpumux_core::TenantId;

/// What can go wrong with a group.
#[derive(Debug)]
pub(crate) enum Failure {
    /// A process in it got an error that ends its context.
    Process(Crash),
    /// Its server has ended, or hangs.
    Server(Arc<str>),
    /// A process of this tenant waits without end for a device that it had from a server that is gone.
    Stuck { tenant: TenantId, pid: u32 },
}

/// A process in a group whose context is unusable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Crash {
    pub(crate) group: Arc<str>,
    pub(crate) tenant: TenantId,
    pub(crate) pid: u32,
    /// The driver's error; 0: it got none yet.
    pub(crate) error: u32,
    /// It had work under way.
    pub(crate) busy: bool,
    /// How long ago it got the error, in ms.
    pub(crate) age_ms: Option<u64>,
    /// How long ago it ended by itself, in ms; none: it was there when the group failed.
    pub(crate) ended_ms: Option<u64>,
}

/// `CUDA_ERROR_ASSERT`: the only error of a kernel that leaves the others of an MPS server alone (H100, driver 580.159.04).
const ASSERT: u32 = 710;

impl Crash {
    /// Whether such an error of one ends the others of its group, too.
    pub(crate) fn ends_others(error: u32) -> bool {
        !matches!(error, 0 | ASSERT)
    }

    /// Its process went away by itself while it had work.
    pub(crate) fn ended_at_work(&self) -> bool {
        self.ended_ms.is_some() && self.busy
    }
}
