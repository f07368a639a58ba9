//! Channel groups that are scheduled at launch, where the driver refuses the controls: what the controller decides is carried out by
//! writing permits in a page ([`gpumux_wire::permits`]). [`gpumux_core::runlist`] decides what is written.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use gpumux_core::{
    Micros, RunState,
    controller::Controller,
    runlist::{self, Member},
};
use gpumux_rm::{ControlFailure, Controls, Interleave, PreemptionMode};
use gpumux_wire::permits::{Permit, Permits, Word};

use super::device::Device;

/// How often the device's groups are looked at while one of them has work: a request waits that long until others are held.
const LOOK: Micros = Micros(100);
/// The same while none has.
const IDLE: Micros = Micros(2_000);

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
    fn write(&self, permit: Permit, watched: bool) {
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
    fn set_preemption_mode(&self, _: PreemptionMode) -> Result<(), ControlFailure> {
        Ok(())
    }
    fn set_interleave(&self, _: Interleave) -> Result<(), ControlFailure> {
        Ok(())
    }
    fn device_uuid(&self) -> Result<String, ControlFailure> {
        Ok(String::new())
    }
    fn set_channels(&mut self, _: Vec<u32>) {}
}

impl Device {
    /// Whether some group is scheduled at launch.
    pub(super) fn has_launches(&self) -> bool {
        self.domains.values().any(|it| it.launches.is_some())
    }

    /// Writes which groups may launch now. Groups with controls count as well. Returns when to do so again; none: when something else
    /// happens.
    pub(super) fn admit(&mut self, now: Micros, controller: &Controller) -> Option<Micros> {
        if !self.has_launches() {
            return None;
        }
        let known = controller.domains(self.index);
        let (mut groups, mut members) = (Vec::new(), Vec::new());
        for (domain, known) in self.domains.values().zip(known) {
            if domain.is_free() {
                continue;
            }
            groups.push(domain.launches.as_ref());
            members.push(Member {
                id: domain.who.id,
                timeslice: known.state.timeslice,
                run: known.state.run,
                running: domain.has_launched(),
                waits: domain.waits_to_launch(),
            });
        }
        let (permits, next) = self.runlist.step(now, &members);
        let several = members.len() > 1;
        for (launches, permit) in groups.into_iter().zip(permits) {
            let Some(launches) = launches else { continue };
            let permit = match permit {
                runlist::Permit::Free => Permit::Free,
                runlist::Permit::Hold => Permit::Hold,
                runlist::Permit::Budget(time) => {
                    Permit::Budget(time.0.try_into().unwrap_or(u32::MAX))
                }
            };
            // One that may launch freely is waited for by its own program.
            launches.write(permit, several && permit != Permit::Free);
        }
        let works = |it: &Member| it.running || it.waits && it.run == RunState::Enabled;
        let pause = match members.iter().any(works) {
            true => LOOK,
            false => IDLE,
        };
        let look = several.then_some(now + pause);
        look.into_iter().chain(next).min()
    }
}

#[cfg(test)]
mod tests;
