//! Renews the lease wherever the scheduling thread makes progress: a step may hold hundreds of controls, each of which waits for the
//! driver while programs start or end.

use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError,
    atomic::{AtomicU64, Ordering},
};

use gpumux_core::{Micros, tamper::Renewals};
use gpumux_rm::{ControlFailure, Controls};
use gpumux_wire::lease::{LOOK, LOOKS, Lease};

use super::model::Clock;

/// Some process that looks every [`LOOK`] may have found the lease expired by then.
const EXPIRES: Micros = Micros((LOOK.as_micros() * (LOOKS as u128 - 1)) as u64);

/// The lease of the scheduling thread, and when it was renewed last.
pub(crate) struct Renewal {
    /// None where the kernel has no such memory.
    lease: Option<Lease>,
    clock: Clock,
    renewals: Mutex<Renewals>,
    /// When the thread made progress last, in µs; [`RESTS`] while it waits for something to do.
    progress: AtomicU64,
}

const RESTS: u64 = u64::MAX;

impl Renewal {
    pub(crate) fn new(lease: Option<Lease>, clock: Clock) -> Self {
        let (mut renewals, now) = (Renewals::default(), clock());
        renewals.renewed(now, now);
        Self {
            lease,
            clock,
            renewals: Mutex::new(renewals),
            progress: AtomicU64::new(RESTS),
        }
    }

    fn renewals(&self) -> MutexGuard<'_, Renewals> {
        self.renewals.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a process that reports now that its lease has expired in a session that began at this time may be right.
    pub(super) fn may_have_expired(&self, began: Micros) -> bool {
        self.lease.is_none() || self.renewals().may_have_expired(began, (self.clock)())
    }

    /// The thread waits for something to do.
    pub(super) fn rest(&self) {
        self.progress.store(RESTS, Ordering::Relaxed);
    }

    /// For how long the thread has been at work without progress.
    pub(super) fn stood(&self) -> Micros {
        match self.progress.load(Ordering::Relaxed) {
            RESTS => Micros::ZERO,
            at => (self.clock)().saturating_sub(Micros(at)),
        }
    }

    /// The thread has come this far. Returns for how long it had stood still, if that was long enough for processes to free themselves.
    pub(crate) fn renew(&self) -> Option<Micros> {
        let began = (self.clock)();
        self.progress.store(began.0, Ordering::Relaxed);
        if let Some(lease) = &self.lease {
            lease.renew();
        }
        let stalled = self.renewals().renewed(began, (self.clock)());
        (stalled >= EXPIRES).then_some(stalled)
    }
}

/// Controls of a group, each of which renews the lease when it has returned.
pub(super) struct Renewing {
    pub(super) controls: Box<dyn Controls>,
    pub(super) renewal: Arc<Renewal>,
}

impl Renewing {
    fn then_renew<T>(&self, control: impl FnOnce(&dyn Controls) -> T) -> T {
        let result = control(&*self.controls);
        if let Some(stalled) = self.renewal.renew() {
            tracing::warn!(
                ms = stalled.0 / 1000,
                "a control took so long in the driver that processes may have freed themselves"
            );
        }
        result
    }
}

impl Controls for Renewing {
    fn set_timeslice(&self, us: u64) -> Result<(), ControlFailure> {
        self.then_renew(|it| it.set_timeslice(us))
    }
    fn timeslice(&self) -> Result<u64, ControlFailure> {
        self.then_renew(|it| it.timeslice())
    }
    fn freeze(&self) -> Result<(), ControlFailure> {
        self.then_renew(|it| it.freeze())
    }
    fn thaw(&self) -> Result<(), ControlFailure> {
        self.then_renew(|it| it.thaw())
    }
    fn set_channels(&mut self, channels: Vec<u32>) {
        self.controls.set_channels(channels);
    }
}
