//! Renews the lease wherever the scheduling thread makes progress: a step may hold hundreds of controls, each of which waits for the
//! driver while programs start or end. A single control may take longer than the lease lasts while several programs fill the device. That is
//! no reason for all of them to free themselves: another thread renews the lease for it, for a while.

use std::{
    io,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicU64, Ordering},
    },
    thread,
};

use gpumux_core::{Micros, tamper::Renewals};
use gpumux_rm::{ControlFailure, Controls};
use gpumux_wire::lease::{LOOK, LOOKS, Lease};

use super::model::Clock;

/// Some process that looks every [`LOOK`] may have found the lease expired by then.
const EXPIRES: Micros = Micros((LOOK.as_micros() * (LOOKS as u128 - 1)) as u64);

/// For how long the lease is renewed while a control does not return (0.69 s were seen on an H100, driver 580.159.04, beside eight programs that each
/// allocated 15 GiB).
const SLOW: Micros = Micros::from_secs(3);

/// The lease of the scheduling thread, and when it was renewed last.
pub(crate) struct Renewal {
    /// None where the kernel has no such memory.
    lease: Option<Lease>,
    clock: Clock,
    renewals: Mutex<Renewals>,
    /// When the thread made progress last, in µs; [`RESTS`] while it waits for something to do.
    progress: AtomicU64,
    /// When a control was begun that has not returned, in µs; [`RESTS`]: none was.
    control: AtomicU64,
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
            control: AtomicU64::new(RESTS),
        }
    }

    /// Starts the thread that renews the lease for slow controls. It ends with this.
    ///
    /// # Errors
    /// When no thread can be made.
    pub(crate) fn keep(self: &Arc<Self>) -> io::Result<()> {
        let renewal: Weak<Self> = Arc::downgrade(self);
        let keep = move || {
            while let Some(renewal) = renewal.upgrade() {
                renewal.renew_for_control();
                drop(renewal);
                thread::sleep(LOOK);
            }
        };
        thread::Builder::new().name("lease".into()).spawn(keep)?;
        Ok(())
    }

    fn renew_for_control(&self) {
        let began = self.control.load(Ordering::Relaxed);
        let is_slow = began != RESTS && (self.clock)().saturating_sub(Micros(began)) < SLOW;
        if let Some(lease) = self.lease.as_ref().filter(|_| is_slow) {
            lease.renew();
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
        let (at, began) = (&self.renewal.control, (self.renewal.clock)());
        at.store(began.0, Ordering::Relaxed);
        let result = control(&*self.controls);
        at.store(RESTS, Ordering::Relaxed);
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

#[cfg(test)]
mod tests {
    use gpumux_wire::lease::Leased;

    use super::*;

    /// A process that looks at its lease sees one control of so many ms. Whether the lease expired.
    fn expires(ms: u64) -> bool {
        let now = Arc::new(AtomicU64::new(1_000_000));
        let of_clock = Arc::clone(&now);
        let (lease, file) = Lease::create().unwrap();
        let mut leased = Leased::open(file).unwrap();
        let clock: Clock = Arc::new(move || Micros(of_clock.load(Ordering::Relaxed)));
        let renewal = Renewal::new(Some(lease), clock);
        (renewal.control).store(now.load(Ordering::Relaxed), Ordering::Relaxed);
        let looks = ms / LOOK.as_millis() as u64;
        (0..looks).any(|_| {
            now.fetch_add(LOOK.as_micros() as u64, Ordering::Relaxed);
            renewal.renew_for_control();
            leased.look()
        })
    }

    #[test]
    fn slow_control_ends_no_lease_but_one_that_hangs_does() {
        assert!(!expires(2_900));
        assert!(expires(3_700));
    }
}
