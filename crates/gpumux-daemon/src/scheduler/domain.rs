//! One channel group of a tenant's process, with its levers and its counters.

use std::{sync::Arc, time::Duration};

use gpumux_core::{
    Account, Demand, DomainId, DomainState, Micros, Rhythm, RunState, TenantId, Timeslice,
};
use gpumux_rm::Levers;
use gpumux_wire::page::{Arrival, Page, Slot, Work};

use super::{
    SessionId,
    record::{Now, Totals, Who},
};

/// Which group of which process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Member {
    /// Whose session announced it.
    pub(crate) session: SessionId,
    /// The session's name for it.
    pub(crate) key: u32,
    /// The process; 0 if it cannot be seen from here.
    pub(crate) pid: u32,
    /// RM client and group: together the group's name on its device.
    pub(crate) handles: (u32, u32),
}

/// A group that a session announced, after it was verified.
pub(crate) struct NewGroup {
    pub(crate) member: Member,
    pub(crate) tenant: TenantId,
    /// RM engine type.
    pub(crate) engine: u32,
    /// UUID of its device.
    pub(crate) device: String,
    pub(crate) emulated: bool,
    pub(crate) levers: Box<dyn Levers>,
    pub(crate) page: Arc<Page>,
    /// The process has it from an MPS server.
    pub(crate) shared: bool,
    /// The slice it was found with.
    pub(crate) timeslice: Timeslice,
    /// The slice that the driver library gave it.
    pub(crate) default: Timeslice,
}

/// A domain under management.
pub(crate) struct Domain {
    pub(super) state: DomainState,
    /// The group to which it belongs: to the policy, all its members are this one domain.
    pub(super) group: Option<DomainId>,
    /// What the group had before this member came.
    pub(super) before: Account,
    /// How long it had work itself before [`DomainState::demand_since`], in µs.
    busy_us: u64,
    pub(super) member: Member,
    pub(super) who: Arc<Who>,
    pub(super) levers: Box<dyn Levers>,
    pub(super) default: Timeslice,
    pub(super) freezes: u64,
    pub(super) thaws: u64,
    pub(super) slice_changes: u64,
    pub(super) tampered: u64,
    pub(super) reason: &'static str,
    pub(super) fault: Option<Fault>,
    /// Since when it is frozen, and how long it was before, in µs.
    frozen: (Option<Micros>, u64),
    /// When it last had a fault, and how long that was to last.
    last_fault: Option<(Micros, Micros)>,
    /// Device time received at two moments: the last second or two lie after the first.
    window: [(Micros, f64); 2],
    page: Arc<Page>,
    /// How often the lease had expired for its process when it came.
    pub(super) epoch: u64,
    /// Its memory is on its way or away: it must not run.
    parked: bool,
    /// Its context is of no use any more: it wants nothing.
    lost: bool,
    /// Holds that its process had counted at the last look.
    holds: u64,
    /// The last arrival that is known, and the times of those before.
    came: Option<Arrival>,
    rhythm: Rhythm,
}

/// A lever that did not move: until it does, the domain is left alone.
pub(super) struct Fault {
    pub(super) error: String,
    /// When to try again.
    pub(super) until: Micros,
}

/// Longer than a process holds the device ahead of work that it expects soon.
const HELD: Duration = Duration::from_micros(600);

/// How long a domain without work still counts as one that competes: many pause between pieces of work.
const LINGERS: Micros = Micros::from_secs(1);

/// How long a domain is left alone after a first fault, and at most.
const BACKOFF: (Micros, Micros) = (Micros::from_millis(20), Micros::from_secs(5));

impl Domain {
    pub(super) fn new(id: DomainId, group: NewGroup, now: Micros) -> Self {
        let mut domain = Self {
            epoch: group.page.expired(),
            state: DomainState {
                id,
                tenant: group.tenant,
                demand: Demand::Unknown,
                demand_since: now,
                expected: None,
                received: Micros::ZERO,
                timeslice: group.timeslice,
                run: RunState::Enabled,
                pinned: None,
            },
            who: Arc::new(Who {
                id,
                tenant: group.tenant,
                pid: group.member.pid,
            }),
            group: None,
            before: Account::default(),
            busy_us: 0,
            member: group.member,
            levers: group.levers,
            default: group.default,
            freezes: 0,
            thaws: 0,
            slice_changes: 0,
            tampered: 0,
            reason: "new",
            fault: None,
            frozen: (None, 0),
            last_fault: None,
            window: [(now, 0.0); 2],
            page: group.page,
            parked: false,
            lost: false,
            holds: 0,
            came: None,
            rhythm: Rhythm::default(),
        };
        domain.state.demand = domain.demand();
        // What it did before is nobody's business.
        domain.new_holds();
        domain
    }

    /// Its name to the policy and in the accounts.
    pub(super) fn planned_as(&self) -> DomainId {
        self.group.unwrap_or(self.state.id)
    }

    /// Whether it must not run.
    pub(super) fn is_parked(&self) -> bool {
        self.parked
    }

    /// It must not run, or may again.
    pub(super) fn park(&mut self, parked: bool) {
        self.parked = parked;
        self.state.pinned = parked.then_some(RunState::Frozen);
    }

    /// Whether its process has freed it, since its lease had expired: no control is used until the process comes again.
    pub(super) fn is_free(&self) -> bool {
        self.page.expired() != self.epoch
    }

    /// Its group has failed.
    pub(super) fn lose_context(&mut self) {
        self.lost = true;
    }

    /// Whether its group has failed, and the process waits for work there.
    pub(super) fn waits_in_vain(&self) -> bool {
        let slot = self.page.slot(self.member.key);
        self.lost && slot.is_some_and(|slot| matches!(slot.work(), Work::Busy(_)))
    }

    /// What the process says of its work.
    pub(super) fn demand(&self) -> Demand {
        if self.lost {
            return Demand::Idle;
        }
        match self.page.slot(self.member.key).map(|slot| slot.work()) {
            Some(Work::Busy(_)) => Demand::Busy,
            Some(Work::Idle(_)) => Demand::Idle,
            Some(Work::Unknown) | None => Demand::Unknown,
        }
    }

    /// Whether it has work, or holds the device ahead of some.
    pub(super) fn at_work(&self) -> bool {
        let holds = |slot: &Slot| {
            let hints = slot.hints();
            let ended = hints.useful.saturating_add(hints.wasted);
            let ago = || slot.came().and_then(Arrival::ago);
            hints.given > ended && ago().is_some_and(|ago| ago < HELD)
        };
        self.demand() == Demand::Busy || self.page.slot(self.member.key).is_some_and(holds)
    }

    /// Learns when work came, and when it is to be expected.
    pub(super) fn follow_rhythm(&mut self, now: Micros) {
        let slot = self.page.slot(self.member.key);
        let came = slot.and_then(Slot::came);
        if came != self.came {
            self.came = came;
            if let Some(ago) = came.and_then(Arrival::ago) {
                let ago = Micros(ago.as_micros() as u64);
                self.rhythm.came(now.saturating_sub(ago));
            }
        }
        self.state.expected = self.rhythm.next(now);
    }

    /// It has work now, or none any more.
    pub(super) fn set_demand(&mut self, demand: Demand, now: Micros) {
        self.busy_us = self.busy_us(now);
        (self.state.demand, self.state.demand_since) = (demand, now);
    }

    /// How long it had work itself, whatever the others of its group had.
    pub(super) fn busy_us(&self, now: Micros) -> u64 {
        let still = match self.state.demand {
            Demand::Busy => now.saturating_sub(self.state.demand_since).0,
            Demand::Idle | Demand::Unknown => 0,
        };
        self.busy_us + still
    }

    /// How often its process took the device ahead of work since this was asked last, if it did.
    pub(super) fn new_holds(&mut self) -> Option<u64> {
        let given = self.page.slot(self.member.key)?.hints().given;
        let before = std::mem::replace(&mut self.holds, given);
        // Whatever the process wrote there.
        given.checked_sub(before).filter(|times| *times > 0)
    }

    /// Whether it has, or had a moment ago, work to compete with.
    pub(super) fn competes(&self, now: Micros) -> bool {
        self.state.demand.may_run() || now.saturating_sub(self.state.demand_since) < LINGERS
    }

    /// Gives the domain up for a while, in the state that hurts nobody, as far as it still moves.
    pub(super) fn give_up(&mut self, error: String, now: Micros) {
        let _ = self.levers.set_timeslice(self.default.0);
        if !self.parked {
            let _ = self.levers.thaw();
            self.set_run(RunState::Enabled, now);
        }
        self.state.timeslice = self.default;
        let calm = |at: Micros| now.saturating_sub(at) > Micros::from_secs(10);
        let backoff = match self.last_fault {
            Some((at, before)) if !calm(at + before) => Micros(before.0 * 2).min(BACKOFF.1),
            _ => BACKOFF.0,
        };
        self.last_fault = Some((now, backoff));
        self.fault = Some(Fault {
            error,
            until: now + backoff,
        });
    }

    /// Takes the domain up again if its levers move.
    pub(super) fn try_again(&mut self, now: Micros) {
        let moved = self.levers.set_timeslice(self.default.0);
        let (run, moved) = match self.parked {
            true => (RunState::Frozen, moved.and_then(|()| self.levers.freeze())),
            false => (RunState::Enabled, moved.and_then(|()| self.levers.thaw())),
        };
        match moved {
            Ok(()) => {
                self.fault = None;
                self.set_run(run, now);
            }
            Err(error) => self.give_up(error.to_string(), now),
        }
    }

    /// Gives the group back as the driver library made it, as far as its levers move.
    pub(super) fn restore(&mut self) {
        // What a faulty domain really has is not known.
        let faulty = self.fault.is_some();
        if (faulty || self.state.timeslice != self.default)
            && self.levers.set_timeslice(self.default.0).is_ok()
        {
            self.state.timeslice = self.default;
        }
        // A parked one is thawed by its own process, once its memory is back.
        if (faulty || self.state.run == RunState::Frozen)
            && !self.parked
            && self.levers.thaw().is_ok()
        {
            self.state.run = RunState::Enabled;
        }
    }

    /// It is frozen or thawed now.
    pub(super) fn set_run(&mut self, run: RunState, now: Micros) {
        self.state.run = run;
        self.frozen = match (run, self.frozen) {
            (RunState::Frozen, (None, before)) => (Some(now), before),
            (RunState::Enabled, (Some(since), before)) => {
                (None, before + now.saturating_sub(since).0)
            }
            (_, unchanged) => unchanged,
        };
    }

    /// What it has.
    pub(super) fn now(&self) -> Now {
        Now {
            frozen: self.state.run == RunState::Frozen,
            timeslice_us: self.state.timeslice.0,
            demand: self.state.demand,
            reason: self.reason,
        }
    }

    /// What it had so far, given its account.
    pub(super) fn totals(&self, now: Micros, account: &Account) -> Totals {
        let (since, before) = self.frozen;
        let still = since.map_or(0, |since| now.saturating_sub(since).0);
        Totals {
            received_us: account.received_us,
            runnable_us: account.runnable_us,
            waited_us: account.waited_us,
            frozen_us: (before + still) as f64,
            preemptions: account.preemptions,
            freezes: self.freezes,
            thaws: self.thaws,
            slice_changes: self.slice_changes,
            tampered: self.tampered,
        }
    }

    /// Begins a new second of [`Self::share`].
    pub(super) fn turn_window(&mut self, now: Micros, received_us: f64) {
        self.window = [self.window[1], (now, received_us)];
    }

    /// The share of the device that it received in the last second or two.
    pub(super) fn share(&self, now: Micros, received_us: f64) -> f64 {
        let (since, before) = self.window[0];
        match now.saturating_sub(since).0 {
            0 => 0.0,
            elapsed => ((received_us - before) / elapsed as f64).clamp(0.0, 1.0),
        }
    }
}
