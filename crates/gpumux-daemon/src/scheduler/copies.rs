//! Groups of copy engines: their timeslices follow their tenants' classes, if that is configured.

use gpumux_core::{Class, TenantId, Timeslice};
use gpumux_rm::Controls;

use super::{
    domain::{Member, NewGroup},
    model::{Reaper, SessionId},
};

/// A group of a copy engine.
struct CopyGroup {
    tenant: TenantId,
    member: Member,
    device: String,
    controls: Box<dyn Controls>,
    timeslice: Timeslice,
    default: Timeslice,
}

/// All of them.
#[derive(Default)]
pub(super) struct Copies(Vec<CopyGroup>);

impl Copies {
    /// Manages this group from now on.
    pub(super) fn add(&mut self, group: NewGroup) {
        self.0.push(CopyGroup {
            tenant: group.tenant,
            member: group.member,
            device: group.device,
            controls: group.controls,
            timeslice: group.timeslice,
            default: group.default,
        });
    }

    /// Those on a device.
    pub(super) fn members(&self, device: &str) -> impl Iterator<Item = &Member> {
        let here = self.0.iter().filter(move |copy| copy.device == device);
        here.map(|copy| &copy.member)
    }

    /// Drops the groups of a session, or one of them. If its process lives on, they are given back as they were made.
    pub(super) fn remove(
        &mut self,
        session: SessionId,
        key: Option<u32>,
        alive: bool,
        reaper: &Reaper,
    ) {
        let leaves = |copy: &mut CopyGroup| copy.member.is_of(session, key);
        for mut copy in self.0.extract_if(.., leaves) {
            if alive {
                copy.set(copy.default);
            }
            let _ = reaper.send(Box::new(copy.controls));
        }
    }

    /// The channels of a group are now these; hands them back if it is none of these groups.
    pub(super) fn set_channels(
        &mut self,
        session: SessionId,
        key: u32,
        channels: Vec<u32>,
    ) -> Option<Vec<u32>> {
        let mut all = self.0.iter_mut();
        let Some(copy) = all.find(|copy| copy.member.is_of(session, Some(key))) else {
            return Some(channels);
        };
        copy.controls.set_channels(channels);
        None
    }

    /// Gives each the timeslice that follows from its tenant's class.
    pub(super) fn follow(&mut self, class: impl Fn(TenantId) -> Option<Class>) {
        for copy in &mut self.0 {
            copy.set(match class(copy.tenant) {
                // A copy cannot be frozen in its middle: only how often turns change is decided.
                Some(Class::Latency) => Timeslice(10_000),
                Some(Class::Batch) => Timeslice(200),
                Some(Class::Standard) | None => copy.default,
            });
        }
    }

    /// Gives all back what they had.
    pub(super) fn restore(&mut self) {
        for copy in &mut self.0 {
            copy.set(copy.default);
        }
    }
}

impl CopyGroup {
    fn set(&mut self, slice: Timeslice) {
        if self.timeslice != slice && self.controls.set_timeslice(slice.0).is_ok() {
            self.timeslice = slice;
        }
    }
}
