//! Channel groups that are scheduled at launch, where the driver refuses the controls: what the controller decides is carried out by
//! writing permits in a page ([`gpumux_wire::permits`]). [`gpumux_core::runlist`] decides what is written.

use gpumux_core::{
    Class, Micros, RunState,
    controller::Controller,
    runlist::{self, Member},
};
use gpumux_wire::permits::Permit;

use super::device::Device;

/// How often the device's groups are looked at while one of them has work: a request waits that long until others are held.
const LOOK: Micros = Micros(100);
/// The same while none has.
const IDLE: Micros = Micros(2_000);

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
                latency: controller.class_of(known.state.tenant) == Class::Latency,
                done: domain.completed(),
                launched: domain.submitted(),
            });
        }
        let (permits, next) = self.runlist.step(now, &members);
        let several = members.len() > 1;
        for (launches, permit) in groups.into_iter().zip(permits) {
            let Some(launches) = launches else { continue };
            // One that may launch freely is waited for by its own program.
            let watched = several && permit != runlist::Permit::Free;
            let permit = match permit {
                runlist::Permit::Free | runlist::Permit::Watched => Permit::Free,
                runlist::Permit::Hold => Permit::Hold,
                runlist::Permit::Budget(time) => {
                    Permit::Budget(time.0.try_into().unwrap_or(u32::MAX))
                }
            };
            launches.write(permit, watched);
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
