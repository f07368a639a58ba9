//! What replaces the controls of a channel group where the driver refuses them: permits in a page ([`gpumux_wire::permits`]).

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use gpumux_rm::{ControlFailure, Controls};
use gpumux_wire::permits::{Permit, Permits, Word};

/// What replaces a group's controls.
#[derive(Clone)]
pub(crate) struct Launches {
    /// Where its process reads whether it may launch.
    pub(crate) page: Arc<Permits>,
    /// The group's key there.
    pub(crate) key: u32,
    /// Why its controls are not used.
    pub(crate) why: Arc<str>,
}

impl Launches {
    pub(super) fn write(&self, permit: Permit, watched: bool) {
        self.page.set(self.key, Word { permit, watched });
    }

    /// Its controls, which work on the page. The timeslice is kept, for the daemon to read back.
    pub(crate) fn controls(&self, timeslice_us: u64) -> Box<dyn Controls> {
        Box::new(Gate {
            launches: self.clone(),
            timeslice_us: AtomicU64::new(timeslice_us),
        })
    }
}

struct Gate {
    launches: Launches,
    timeslice_us: AtomicU64,
}

/// A freeze holds further launches, at once. The next look lets them go after a thaw.
impl Controls for Gate {
    fn set_timeslice(&self, us: u64) -> Result<(), ControlFailure> {
        self.timeslice_us.store(us, Ordering::Release);
        Ok(())
    }
    fn timeslice(&self) -> Result<u64, ControlFailure> {
        Ok(self.timeslice_us.load(Ordering::Acquire))
    }
    fn freeze(&self) -> Result<(), ControlFailure> {
        self.launches.write(Permit::Hold, true);
        Ok(())
    }
    fn thaw(&self) -> Result<(), ControlFailure> {
        Ok(())
    }
}
