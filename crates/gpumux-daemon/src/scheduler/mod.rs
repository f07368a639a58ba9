//! The scheduling thread: owns every domain and every control.
//!
//! All other threads hand it jobs ([`Handle::call`]); between jobs it looks at demand, asks the
//! policy and issues controls ([`Engine::step`]). It never waits for a tenant, and if it fails, the
//! process ends: that closes every session, upon which the tenants' agents thaw themselves. If it stands still,
//! its lease expires ([`gpumux_wire::lease`]), and they do so, too.

mod admission;
mod alarm;
mod device;
mod domain;
mod engine;
mod expiry;
mod foreign;
mod held;
mod memory;
mod record;
mod renewal;
mod tamper;
#[cfg(test)]
mod tests;

use std::{
    iter,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

use gpumux_core::{Micros, TenantId};
use gpumux_wire::lease::{Lease, RENEW};
use rustix::time::{ClockId, clock_gettime};
use tokio::sync::oneshot;

pub(crate) use admission::Owner;
pub(crate) use domain::{Member, NewGroup};
pub(crate) use engine::{Engine, GroupError, Left, Met, View};
pub(crate) use gpumux_core::controller::AWAY;
pub(crate) use memory::Happening;
pub(crate) use record::{BUCKETS_US, Event, History, Now, Totals, What, Who};
use renewal::Renewal;

use crate::config::Config;

/// One connection of a tenant's process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct SessionId(pub(crate) u64);

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

/// The time, from an origin of its own.
type Clock = Arc<dyn Fn() -> Micros + Send + Sync>;

/// Takes controls and files that are no longer needed: closing the last file of a dead process frees its
/// memory and takes the driver long.
type Reaper = mpsc::Sender<Box<dyn Send>>;

type Job = Box<dyn FnOnce(&mut Engine) + Send>;

/// When the lease is renewed although nothing happens.
const RENEW_AFTER: Micros = Micros(RENEW.as_micros() as u64);

/// Most jobs done between two looks at the devices.
const JOBS_PER_STEP: usize = 64;

/// The way to the scheduling thread.
#[derive(Clone)]
pub(crate) struct Handle {
    jobs: mpsc::Sender<Job>,
    lease: Option<Arc<OwnedFd>>,
}

/// The scheduling thread has ended.
#[derive(Debug, thiserror::Error)]
#[error("the daemon is shutting down")]
pub(crate) struct Stopped;

impl Handle {
    /// Does a job on the scheduling thread and returns what it returns.
    ///
    /// # Errors
    /// When the thread has ended.
    pub(crate) async fn call<R: Send + 'static>(
        &self,
        job: impl FnOnce(&mut Engine) -> R + Send + 'static,
    ) -> Result<R, Stopped> {
        let (reply, answer) = oneshot::channel();
        let job = Box::new(move |engine: &mut Engine| {
            // The caller may have gone; the job is done anyway.
            let _ = reply.send(job(engine));
        });
        self.jobs.send(job).map_err(|_| Stopped)?;
        answer.await.map_err(|_| Stopped)
    }

    /// The lease that the thread renews, for the processes under its control; none where the kernel has no such memory.
    pub(crate) fn lease(&self) -> Option<BorrowedFd<'_>> {
        self.lease.as_deref().map(AsFd::as_fd)
    }
}

/// Starts the scheduling thread. It ends, and restores everything, when the last handle is dropped.
///
/// # Errors
/// When no thread can be made.
pub(crate) fn start(config: Arc<Config>) -> std::io::Result<Handle> {
    let (reaper, dead) = mpsc::channel::<Box<dyn Send>>();
    thread::Builder::new()
        .name("reaper".into())
        .spawn(move || dead.into_iter().for_each(drop))?;
    let (jobs, queue) = mpsc::channel();
    let origin = Instant::now();
    let clock: Clock = Arc::new(move || Micros(origin.elapsed().as_micros() as u64));
    let (lease, file) = match Lease::create() {
        Ok((lease, file)) => (Some(lease), Some(Arc::new(file))),
        Err(error) => {
            tracing::warn!(%error, "no lease can be made (before Linux 5.1): programs free themselves when the daemon \
                has ended, but not while it stands still");
            (None, None)
        }
    };
    let body = move || {
        ask_for_priority();
        let renewal = Arc::new(Renewal::new(lease, Arc::clone(&clock)));
        let engine = Engine::new(config, clock, reaper, renewal);
        if let Err(error) = engine.start_alarm() {
            tracing::warn!(%error, "errors of programs are noticed later than they could be");
        }
        if std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            serve(engine, &queue);
        }))
        .is_err()
        {
            tracing::error!(
                "the scheduling thread failed: the daemon ends, so that no process stays frozen"
            );
            std::process::abort();
        }
    };
    thread::Builder::new()
        .name("scheduler".into())
        .spawn(body)?;
    Ok(Handle { jobs, lease: file })
}

fn serve(mut engine: Engine, queue: &mpsc::Receiver<Job>) {
    loop {
        let wait = engine.step().map(|at| at.saturating_sub(engine.now()));
        let wait = match engine.has_sessions() {
            true => Some(wait.map_or(RENEW_AFTER, |wait| wait.min(RENEW_AFTER))),
            false => wait,
        };
        let before = used();
        let job = match wait {
            Some(wait) => queue.recv_timeout(Duration::from_micros(wait.0)),
            None => queue.recv().map_err(Into::into),
        };
        engine.woke(used().saturating_sub(before));
        // Before any control: processes that freed themselves meanwhile are left alone, see `Engine::step`.
        engine.renew();
        match job {
            Ok(job) => {
                let others = queue.try_iter().take(JOBS_PER_STEP);
                for job in iter::once(job).chain(others) {
                    job(&mut engine);
                    engine.renew();
                }
            }
            Err(mpsc::RecvTimeoutError::Timeout) => {}
            Err(mpsc::RecvTimeoutError::Disconnected) => return engine.restore(),
        }
    }
}

/// The CPU time of this thread.
fn used() -> Micros {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Micros(time.tv_sec as u64 * 1_000_000 + time.tv_nsec as u64 / 1000)
}

/// A scheduler should not wait for what it schedules. Without the right to it, it is as others.
fn ask_for_priority() {
    let lowest = libc::sched_param { sched_priority: 1 };
    // SAFETY: the parameter outlives the call; 0 means this thread.
    let real_time = unsafe {
        libc::sched_setscheduler(
            0,
            libc::SCHED_RR | libc::SCHED_RESET_ON_FORK,
            &raw const lowest,
        )
    };
    if real_time != 0 {
        let thread = rustix::thread::gettid();
        let _ = rustix::process::setpriority_process(Some(thread), -10);
    }
}
