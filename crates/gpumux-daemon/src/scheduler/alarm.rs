//! Notices errors of processes, whatever the scheduling thread does: while the driver recovers from a fault, a control may
//! keep that waiting (0.3 s on an H100, driver 580.159.04).

use std::{
    collections::BTreeMap,
    io,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::Duration,
};

use crate::link::{Link, SessionId};

/// How often it looks.
const LOOK: Duration = Duration::from_millis(40);

/// A process that is watched; until it is dropped.
#[derive(Default)]
pub(super) struct Alarm(Arc<Shared>);

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    watched: BTreeMap<SessionId, Watched>,
    over: bool,
}

struct Watched {
    link: Arc<Link>,
    noticed_after_ms: Option<u64>,
}

impl Alarm {
    /// Starts the thread that looks.
    ///
    /// # Errors
    /// When none can be made.
    pub(super) fn start(&self) -> io::Result<()> {
        let shared = Arc::clone(&self.0);
        let thread = thread::Builder::new().name("alarm".into());
        thread.spawn(move || shared.look()).map(drop)
    }

    /// Watches a process from now on.
    pub(super) fn watch(&self, link: &Arc<Link>) {
        let watched = Watched {
            link: Arc::clone(link),
            noticed_after_ms: None,
        };
        self.0.state().watched.insert(link.session, watched);
        self.0.changed.notify_one();
    }

    /// It has ended.
    pub(super) fn forget(&self, session: SessionId) {
        self.0.state().watched.remove(&session);
    }

    /// How long after a process got its error that was noticed, in ms.
    pub(super) fn noticed_after_ms(&self, session: SessionId) -> Option<u64> {
        self.0.state().watched.get(&session)?.noticed_after_ms
    }
}

impl Drop for Alarm {
    fn drop(&mut self) {
        self.0.state().over = true;
        self.0.changed.notify_one();
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn look(&self) {
        loop {
            let state = self.state();
            let none = |state: &mut State| state.watched.is_empty() && !state.over;
            let state = self.changed.wait_while(state, none);
            let mut state = state.unwrap_or_else(PoisonError::into_inner);
            if state.over {
                return;
            }
            for it in state.watched.values_mut() {
                it.look();
            }
            drop(state);
            thread::sleep(LOOK);
        }
    }
}

impl Watched {
    fn look(&mut self) {
        let error = self.link.page.fault();
        if error != 0 && self.noticed_after_ms.is_none() {
            self.noticed_after_ms = self.link.page.fault_age_ms();
            let (pid, after_ms) = (self.link.pid, self.noticed_after_ms);
            tracing::info!(
                pid,
                error,
                after_ms,
                "an error has ended a program's context"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use gpumux_core::TenantId;
    use gpumux_wire::page::Page;
    use rustix::net::SocketType;

    use super::*;
    use crate::receiver::pair;

    #[test]
    fn an_error_is_noticed_without_the_scheduling_thread() {
        let alarm = Alarm::default();
        alarm.start().unwrap();
        let (page, _file) = Page::create().unwrap();
        let page = Arc::new(page);
        let id = SessionId(1);
        let (socket, _process) = pair(SocketType::SEQPACKET).unwrap();
        let link = Link::new(id, TenantId(1), 7, Arc::clone(&page), socket.into());
        alarm.watch(&link);
        assert_eq!(alarm.noticed_after_ms(id), None);
        page.set_fault(719);
        let noticed = || alarm.noticed_after_ms(id);
        let after = gpumux_tests::wait_for("the alarm", Duration::from_secs(20), noticed);
        alarm.0.state().watched.values_mut().for_each(Watched::look);
        assert_eq!(noticed(), Some(after), "it counts from then");
        alarm.forget(id);
        assert_eq!(noticed(), None);
        let shared = Arc::downgrade(&alarm.0);
        drop(alarm);
        gpumux_tests::wait_for("its end", Duration::from_secs(20), || {
            (shared.strong_count() == 0).then_some(())
        });
    }
}
