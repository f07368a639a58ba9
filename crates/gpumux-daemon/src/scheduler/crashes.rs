//! Processes in groups whose contexts are unusable: which they are, which of them wait in vain, and which ended shortly before.

use std::{collections::BTreeSet, io, sync::Arc};

use gpumux_core::{Demand, Micros, Ring};
use tokio::sync::mpsc::UnboundedSender;

use super::{
    alarm::Alarm,
    device::Device,
    domain::Domain,
    held::{Held, STAY},
    process::Met,
    state::State,
};
use crate::{
    failure::{Crash, Failure},
    link::{Link, SessionId},
};

/// How long after a process left a group a fault there may be of its making: this much longer than its memory is held.
const AFTERMATH: Micros = Micros::from_secs(1);
/// How long a process may wait for a device that it has lost: NVIDIA's driver does so without end where a server is gone (580.159.04).
const STUCK: Micros = Micros::from_secs(2);
const LATELY: Micros = Micros(STAY.as_micros() as u64 + AFTERMATH.0);
/// Processes that ended in groups that are remembered.
const MAX_ENDED: usize = 256;

/// A process in a group that has ended.
struct Ended {
    at: Micros,
    /// Until then a fault of the group may be of its making.
    matters_until: Micros,
    crash: Crash,
}

/// What is known of crashes.
#[derive(Default)]
pub(super) struct Crashes {
    alarm: Alarm,
    /// Processes in groups that ended lately: others of their groups may fail by it.
    ended: Ring<Ended, MAX_ENDED>,
    /// Where crashes in groups are reported.
    tell: Option<UnboundedSender<Failure>>,
}

impl Crashes {
    /// Notices errors of programs by a thread of its own from now on.
    ///
    /// # Errors
    /// When no thread can be made.
    pub(super) fn start(&self) -> io::Result<()> {
        self.alarm.start()
    }

    /// Crashes in groups are reported there from now on.
    pub(super) fn report_to(&mut self, to: UnboundedSender<Failure>) {
        self.tell = Some(to);
    }

    /// A process has connected.
    pub(super) fn watch(&self, link: &Arc<Link>) {
        self.alarm.watch(link);
    }

    /// Its session has ended.
    pub(super) fn forget(&self, session: SessionId) {
        self.alarm.forget(session);
    }

    /// What a process left in a group of this device is held no longer: a fault there may be of its making for a while.
    pub(super) fn released(&mut self, device: &Device, held: &Held, now: Micros) {
        for it in self.ended.iter_mut() {
            if device.group_named(&it.crash.group) == Some(held.group()) {
                it.matters_until = it.matters_until.max(now + AFTERMATH);
            }
        }
    }

    /// Reports processes that have crashed since.
    pub(super) fn report(&self, state: &mut State) {
        let Some(to) = &self.tell else {
            return;
        };
        for crash in self.crashed(state, |_, met| Crash::ends_others(met.page.fault())) {
            let _ = to.send(Failure::Process(crash));
        }
    }

    /// Whether some process still waits for the device although its group has failed, and knows nothing of that.
    pub(super) fn has_unaware(state: &State, group: &str) -> bool {
        let mut members = state.sessions.iter().filter(|(_, met)| {
            let placed = state.placed.get(&met.tenant);
            placed.is_some_and(|name| **name == *group)
        });
        members.any(|(id, met)| !met.page.has_received_fault() && waits_in_vain(state, *id))
    }

    /// Tells of processes that have waited too long for a device that they lost with their group.
    pub(super) fn report_stuck(&self, state: &mut State, now: Micros) {
        let Some(to) = &self.tell else {
            return;
        };
        let sessions = state.sessions.iter();
        let lost = sessions.filter(|(_, met)| met.given_up || !met.lost.is_empty());
        for id in lost.map(|(id, _)| *id).collect::<Vec<_>>() {
            let waits = waits_in_vain(state, id);
            let Some(met) = state.sessions.get_mut(&id) else {
                continue;
            };
            let waits = met.waits_for_the_lost() || waits;
            let waits = waits && !met.page.has_received_fault();
            let since = waits.then(|| met.waits_since.unwrap_or(now));
            met.waits_since = since;
            if since.is_some_and(|since| now.saturating_sub(since) >= STUCK) {
                met.waits_since = Some(now);
                let _ = to.send(Failure::Stuck {
                    tenant: met.tenant,
                    pid: met.pid,
                });
            }
        }
    }

    /// All processes in a group that has failed, and those that had left it just before. What happens to them is reported no more.
    pub(super) fn give_up(&mut self, state: &mut State, group: &str) -> Vec<Crash> {
        let placed = state.placed.clone();
        let mut all = self.crashed(state, |_, met| {
            placed.get(&met.tenant).is_some_and(|it| **it == *group)
        });
        let now = state.now();
        let held = state.devices.values().any(|device| device.holds(group));
        let left = self.ended.take(|it| *it.crash.group == *group).into_iter();
        let left = left.filter(|it| held || now < it.matters_until);
        all.extend(left.map(|it| Crash {
            ended_ms: Some(now.saturating_sub(it.at).0 / 1000),
            ..it.crash
        }));
        all
    }

    /// Remembers a process in a group that ends before its group has failed.
    pub(super) fn remember(&mut self, state: &mut State, session: SessionId) {
        let tenant = state.sessions.get(&session).map(|met| met.tenant);
        if !tenant.is_some_and(|it| state.placed.contains_key(&it)) {
            return;
        }
        let now = state.now();
        // The work that it had at its end.
        state.sample(now);
        let left = self.crashed(state, |id, _| id == session);
        self.ended.extend(left.into_iter().map(|crash| Ended {
            at: now,
            matters_until: now + LATELY,
            crash,
        }));
    }

    /// Processes in groups that are `so`, each once. They want the device no more.
    fn crashed(&self, state: &mut State, so: impl Fn(SessionId, &Met) -> bool) -> Vec<Crash> {
        let now = state.now();
        let (mut found, mut lost) = (Vec::new(), BTreeSet::new());
        for (id, met) in state
            .sessions
            .iter_mut()
            .filter(|(id, met)| !met.given_up && so(**id, met))
        {
            let Some(group) = state.placed.get(&met.tenant) else {
                continue;
            };
            let domains = state
                .devices
                .values()
                .flat_map(|device| device.domains.values());
            let mut own = domains
                .filter(|domain| domain.member.session == *id)
                .peekable();
            // One with a context of its own does not use the group's server, also when that context is gone. Of one that
            // never had any nothing is known.
            let lately = |at: Micros| now.saturating_sub(at) < LATELY;
            let mut shares = own.peek().is_none() && met.shared.unwrap_or(true);
            let mut busy = met.freed.is_some_and(lately);
            for domain in own {
                shares |= domain.group.is_some();
                let known = state.controller.domain(domain.who.id);
                busy |= known.is_some_and(|it| it.state.demand == Demand::Busy);
            }
            if shares {
                met.given_up = true;
                found.push(Crash {
                    group: Arc::clone(group),
                    tenant: met.tenant,
                    pid: met.pid,
                    error: met.page.fault(),
                    busy,
                    age_ms: (self.alarm.noticed_after_ms(*id)).or_else(|| met.page.fault_age_ms()),
                    ended_ms: None,
                });
                lost.insert(*id);
            }
        }
        let domains = (state.devices.values_mut()).flat_map(|device| device.domains.values_mut());
        domains
            .filter(|domain| lost.contains(&domain.member.session))
            .for_each(Domain::lose_context);
        found
    }
}

/// Whether it waits for work in a group that has failed.
fn waits_in_vain(state: &State, session: SessionId) -> bool {
    let mut domains = state.domains();
    domains.any(|domain| domain.member.session == session && domain.waits_in_vain())
}
