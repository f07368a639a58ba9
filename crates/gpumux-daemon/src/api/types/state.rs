//! The state of a tenant, in one word: the same in `ps`, `top`, the web page, `explain`, metrics and the API.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What a tenant does.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum TenantState {
    /// No process of it has used a GPU yet.
    #[default]
    Starting,
    /// It has no work for a GPU.
    Idle,
    /// It has work, and may run.
    Running,
    /// It has work, and is frozen until its quantum comes.
    Queued,
    /// Its process is stopped (SIGSTOP, a debugger), with work that it launched before.
    Stopped,
    /// Some or all of its memory is swapped out, or on its way.
    Swapped,
    /// It waits for room in a GPU's memory.
    Blocked,
    /// A control (freeze, thaw, timeslice) of one of its channel groups failed, or the driver does not allow them.
    Faulty,
    /// Its processes undo gpumux's controls.
    Tampers,
}

gpumux_core::names!(
    TenantState: Starting = "starting", Idle = "idle", Running = "running", Queued = "queued", Stopped = "stopped",
    Swapped = "swapped", Blocked = "blocked", Faulty = "faulty", Tampers = "tampers"
);
