//! What a process left behind in a group when it ended at work: its work goes on, as the group's, and its memory stays until
//! the group had time enough to end it.

use std::{os::fd::OwnedFd, sync::Arc, time::Duration};

use gpumux_core::{DomainId, Micros, QUEUED};
use gpumux_rm::Controls;

use crate::link::SessionId;

/// How much time on the device a group gets to end kernels that a process left behind.
pub(crate) const STAY: Duration = Duration::from_micros(QUEUED.0);

/// The longest that it stays, for a group that gets no time on the device: behind higher classes that always have work.
const LONGEST: Micros = Micros::from_secs(30);

/// Whom memory is held of.
pub(crate) enum Left {
    /// A process with a session.
    Session(SessionId),
    /// One without, in the group of this name.
    Group(Arc<str>),
}

/// Memory held for a group.
pub(super) struct Held {
    group: DomainId,
    since: Micros,
    /// Device time that the group had received before.
    before: f64,
    _files: Arc<[OwnedFd]>,
    /// Controls of channels that are frozen: of a group without members, which nothing thaws.
    frozen: Vec<Box<dyn Controls>>,
}

impl Held {
    pub(super) fn new(group: DomainId, since: Micros, before: f64, files: Arc<[OwnedFd]>) -> Self {
        Self {
            group,
            since,
            before,
            _files: files,
            frozen: Vec::new(),
        }
    }

    /// The last member of the group left this frozen.
    pub(super) fn keep_frozen(&mut self, controls: Box<dyn Controls>) {
        self.frozen.push(controls);
    }

    /// A process joins the group: no channel of it runs while some are frozen.
    pub(super) fn thaw(&mut self) {
        for controls in self.frozen.drain(..) {
            let _ = controls.thaw();
        }
    }

    pub(super) fn group(&self) -> DomainId {
        self.group
    }

    pub(super) fn since(&self) -> Micros {
        self.since
    }

    /// Whether it is over, given the device time that the group has received; none: it has no members. With those that come
    /// then it is counted anew.
    pub(super) fn is_over(&mut self, now: Micros, received: Option<f64>) -> bool {
        let held = now.saturating_sub(self.since);
        let had = match received {
            Some(received) => received - self.before,
            None => {
                self.before = 0.0;
                held.0 as f64
            }
        };
        had >= STAY.as_micros() as f64 || held >= LONGEST
    }
}
