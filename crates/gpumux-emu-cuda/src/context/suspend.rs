//! A context of a process that is checkpointed has no groups; it gets new ones, maybe on another device, when the process is restored.

use std::sync::{
    Arc, PoisonError,
    atomic::{AtomicBool, Ordering},
};

use gpumux_emu::{client::Execution, protocol::Command};

use super::Context;
use crate::{error::Result, process::lock, rm::Rm};

impl Context {
    /// Whether no work is under way.
    pub(crate) fn is_idle(&self) -> bool {
        self.state().pending.is_empty()
    }

    /// Ends its connection and frees its groups. No work is under way.
    pub(crate) fn suspend(&self, rm: &Rm) {
        self.suspended.store(true, Ordering::SeqCst);
        let execution = self.execution();
        let _ = execution.send(&Command::End);
        execution.shut_down();
        if let Some(groups) = lock(&self.groups).take() {
            rm.free_groups(&groups);
        }
    }

    /// Makes groups and a connection anew, on the device that is its own now.
    pub(crate) fn resume(self: &Arc<Self>, rm: &mut Rm) -> Result {
        let groups = rm.make_groups(self.device.index)?;
        let execution = match rm.execution(&groups, self.device.info.sms) {
            Ok(execution) => execution,
            Err(error) => {
                rm.free_groups(&groups);
                return Err(error);
            }
        };
        *lock(&self.groups) = Some(groups);
        *(self.execution.write()).unwrap_or_else(PoisonError::into_inner) = Arc::new(execution);
        self.suspended.store(false, Ordering::SeqCst);
        self.start_worker()
    }

    /// Whether this connection is not its own any more.
    pub(super) fn has_left(&self, execution: &Arc<Execution>) -> bool {
        let suspended: &AtomicBool = &self.suspended;
        suspended.load(Ordering::SeqCst) || !Arc::ptr_eq(execution, &self.execution())
    }
}
