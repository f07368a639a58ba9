//! The thread itself, and the way to it.

use std::{
    iter,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

use gpumux_core::Micros;
use gpumux_wire::lease::{Lease, RENEW};
use rustix::time::{ClockId, clock_gettime};
use tokio::sync::oneshot;

use super::{
    command::Command,
    engine::Engine,
    model::{Answer, Clock},
    recording::Recording,
    renewal::Renewal,
};
use crate::config::Config;

/// When the lease is renewed although nothing happens.
const RENEW_AFTER: Micros = Micros(RENEW.as_micros() as u64);

/// Most commands carried out between two looks at the devices.
const COMMANDS_PER_STEP: usize = 64;

/// The way to the scheduling thread.
#[derive(Clone)]
pub(crate) struct Handle {
    commands: mpsc::Sender<Command>,
    lease: Option<Arc<OwnedFd>>,
    renewal: Arc<Renewal>,
}

/// The scheduling thread has ended.
#[derive(Debug, thiserror::Error)]
#[error("the daemon is shutting down")]
pub(crate) struct Stopped;

impl Handle {
    /// Has a command carried out on the scheduling thread, and returns its answer.
    ///
    /// # Errors
    /// When the thread has ended.
    pub(crate) async fn ask<T>(
        &self,
        command: impl FnOnce(Answer<T>) -> Command,
    ) -> Result<T, Stopped> {
        self.send(command)?.await.map_err(|_| Stopped)
    }

    /// Has a command carried out after all that were sent before it. The answer may be awaited.
    ///
    /// # Errors
    /// When the thread has ended.
    pub(crate) fn send<T>(
        &self,
        command: impl FnOnce(Answer<T>) -> Command,
    ) -> Result<oneshot::Receiver<T>, Stopped> {
        let (answer, answered) = oneshot::channel();
        self.commands.send(command(answer)).map_err(|_| Stopped)?;
        Ok(answered)
    }

    /// Returns when the thread has made no progress for so long: a control has not returned from the driver.
    pub(crate) async fn stalled_for(&self, limit: Duration) {
        while let Some(rest) = limit.checked_sub(Duration::from_micros(self.renewal.stood().0))
            && !rest.is_zero()
        {
            tokio::time::sleep(rest).await;
        }
    }

    /// The lease that the thread renews, for the processes under its control; none where the kernel has no such memory.
    pub(crate) fn lease(&self) -> Option<BorrowedFd<'_>> {
        self.lease.as_deref().map(AsFd::as_fd)
    }
}

/// Starts the scheduling thread. It ends, and restores everything, when the last handle is dropped.
///
/// # Errors
/// When no thread can be made, or no file for a recording.
pub(crate) fn start(config: Arc<Config>) -> std::io::Result<Handle> {
    let (reaper, dead) = mpsc::channel::<Box<dyn Send>>();
    thread::Builder::new()
        .name("reaper".into())
        .spawn(move || dead.into_iter().for_each(drop))?;
    let (commands, queue) = mpsc::channel();
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
    let renewal = Arc::new(Renewal::new(lease, Arc::clone(&clock)));
    renewal.keep()?;
    let own = Arc::clone(&renewal);
    let recording = (config.record.as_deref())
        .map(Recording::start)
        .transpose()?;
    let body = move || {
        ask_for_priority();
        let mut engine = Engine::new(config, clock, reaper, own);
        if let Some(recording) = recording {
            engine.record(recording);
        }
        if let Err(error) = engine.crashes.start() {
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
    Ok(Handle {
        commands,
        lease: file,
        renewal,
    })
}

fn serve(mut engine: Engine, queue: &mpsc::Receiver<Command>) {
    loop {
        let due = engine.step();
        let due = match engine.has_sessions() {
            true => {
                let renew = engine.state.now() + RENEW_AFTER;
                Some(due.map_or(renew, |due| due.min(renew)))
            }
            false => due,
        };
        let before = used();
        engine.renewal.rest();
        let command = loop {
            // Far more often than anything else, and far less work.
            let look = engine.schedule_launches();
            let received = match due.into_iter().chain(look).min() {
                Some(at) => {
                    let wait = at.saturating_sub(engine.state.now());
                    queue.recv_timeout(Duration::from_micros(wait.0))
                }
                None => queue.recv().map_err(Into::into),
            };
            let is_due = due.is_none_or(|due| due <= engine.state.now());
            match received {
                Err(mpsc::RecvTimeoutError::Timeout) if !is_due => {}
                received => break received,
            }
        };
        engine.woke(used().saturating_sub(before));
        // Before any control: processes that freed themselves meanwhile are left alone, see `Engine::step`.
        engine.renew();
        match command {
            Ok(command) => {
                let others = queue.try_iter().take(COMMANDS_PER_STEP);
                for command in iter::once(command).chain(others) {
                    command.carry_out(&mut engine);
                    engine.renew();
                }
            }
            Err(mpsc::RecvTimeoutError::Timeout) => {}
            Err(mpsc::RecvTimeoutError::Disconnected) => return engine.restore(),
        }
    }
}

/// The CPU time of this thread.
pub(super) fn used() -> Micros {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Micros(time.tv_sec as u64 * 1_000_000 + time.tv_nsec as u64 / 1000)
}

/// A scheduler should not wait for what it schedules. Without the right to it, it is as others.
fn ask_for_priority() {
    // SAFETY: it sets a property of this thread, in ns, and touches no memory: time-outs end when they should.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1 as libc::c_ulong) };
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
