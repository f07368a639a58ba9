//! A domain under control.

use serde::{Deserialize, Serialize};

use crate::{
    Account, Demand, DomainId, DomainState, Launches, Micros, Progress, Rhythm, RunState, TenantId,
    Timeslice, tamper::Course,
};

/// Why a domain whose memory is away is frozen, whatever the policy decides.
pub const AWAY: &str = "its memory is away";

/// How long a domain is left alone after a first failure, and at most.
pub const BACKOFF: (Micros, Micros) = (Micros::from_millis(20), Micros::from_secs(5));

/// A failure that long after the one before it counts as the first.
const FORGIVEN: Micros = Micros::from_secs(10);

/// How soon a deferred control is looked at again, and how often demand is looked at while it decides which domain runs.
pub const TICK: Micros = Micros::from_millis(1);

/// How long a domain without work still counts as one that competes: many pause between pieces of work.
const LINGERS: Micros = Micros::from_secs(1);

/// Over so long it is averaged how much of the time its program says that it had work.
const WORKED: Micros = Micros::from_millis(50);

/// A domain that may run and stands still is let run again: after this at first, and at most, doubled each time.
const STANDS: (Micros, Micros) = (Micros::from_secs(2), Micros::from_secs(16));

/// A channel group to control.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NewDomain {
    /// The number of its device, see [`Controller::add_device`].
    pub device: usize,
    /// Its name; no other's, nor a group's.
    pub id: DomainId,
    /// Its tenant.
    pub tenant: TenantId,
    /// The MPS group to which it belongs: all members are controlled alike.
    pub group: Option<DomainId>,
    /// Whether it has work.
    pub demand: Demand,
    /// Its timeslice.
    pub timeslice: Timeslice,
    /// The timeslice that the driver library gave it.
    pub default: Timeslice,
    /// Frozen: its memory was away when it came.
    #[serde(default)]
    pub run: RunState,
}

/// A domain under control.
#[derive(Clone, Debug)]
pub struct Domain {
    /// What is known of it.
    pub state: DomainState,
    /// Its group, if it belongs to one.
    pub group: Option<DomainId>,
    /// Why it runs or not, in a few words.
    pub reason: &'static str,
    /// Its memory is away.
    pub(super) away: bool,
    /// It stays frozen: its memory is away, or that of another member of its group.
    pub swapped_out: bool,
    /// When it was certainly frozen.
    pub course: Course,
    pub(super) default: Timeslice,
    /// A control was issued and has not ended.
    pub(super) under_way: bool,
    pub(super) at_work: bool,
    pub(super) rhythm: Rhythm,
    pub(super) launches: Launches,
    /// What its program has done, and when it had last waited for all of its work.
    done: Progress,
    waited: Micros,
    /// How long it had been frozen when that was looked at.
    pub(super) frozen_before: Micros,
    pub(super) fault: Option<Fault>,
    /// When it last failed, and for how long it was to be left alone then.
    pub(super) last_fault: Option<(Micros, Micros)>,
    /// What its group had before it came.
    pub(super) before: Account,
    /// How long it had work before [`DomainState::demand_since`].
    pub(super) busy: Micros,
    /// Since when it is frozen, and for how long it was before.
    pub(super) frozen: (Option<Micros>, Micros),
    /// When its program last did something or it was let run, and how often it was let run again since then.
    stirred: (Micros, u32),
}

/// That a control failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fault {
    /// When to take the domain up again.
    pub(super) until: Micros,
    /// That is under way.
    pub(super) trying: bool,
}

impl Domain {
    pub(super) fn new(new: &NewDomain, now: Micros, before: Account) -> Self {
        Self {
            state: DomainState {
                id: new.id,
                tenant: new.tenant,
                demand: new.demand,
                demand_since: now,
                expected: None,
                tolerated: None,
                request: None,
                worked: None,
                received: Micros::ZERO,
                timeslice: new.timeslice,
                run: new.run,
                pinned: None,
            },
            group: new.group,
            reason: "new",
            away: false,
            swapped_out: false,
            course: Course::default(),
            default: new.default,
            under_way: false,
            at_work: false,
            rhythm: Rhythm::default(),
            launches: Launches::default(),
            done: Progress::default(),
            waited: now,
            frozen_before: Micros::ZERO,
            fault: None,
            last_fault: None,
            before,
            busy: Micros::ZERO,
            frozen: ((new.run == RunState::Frozen).then_some(now), Micros::ZERO),
            stirred: (now, 0),
        }
    }

    /// Its program does something.
    pub(super) fn stir(&mut self, now: Micros) {
        self.stirred = (now, 0);
    }

    /// Its program has done so much.
    pub(super) fn note(&mut self, now: Micros, done: Progress) {
        let before = std::mem::replace(&mut self.done, done);
        let more = done.since(before).unwrap_or_default();
        if let Some(mean) = more.busy.0.checked_div(more.waits) {
            // A moving mean: each request counts for a quarter. What is known from before counts as four of these at most, so that one long
            // request is soon forgotten.
            let before = self.state.request.map_or(mean, |it| it.0);
            let before = before.min(mean.saturating_mul(4)) as f64;
            let kept = 0.75_f64.powf(more.waits as f64);
            let request = kept * before + (1.0 - kept) * mean as f64;
            self.state.request = Some(Micros(request as u64));
            let time = now.saturating_sub(std::mem::replace(&mut self.waited, now));
            let part = (more.busy.0 as f64 / time.0.max(1) as f64).min(1.0);
            // Two looks may be a request apart, and what it was in between is no measure.
            let kept = (-(time.0 as f64) / WORKED.0 as f64).exp();
            let before = self.state.worked.unwrap_or(part);
            self.state.worked = Some(kept * before + (1.0 - kept) * part);
        }
    }

    /// When it is let run once more although it may: it has work, and its program has done nothing for long. The driver may have carried out
    /// an earlier control late, or another process one of its own.
    pub(super) fn again_at(&self) -> Option<Micros> {
        let runs = self.state.run == RunState::Enabled && !self.swapped_out;
        let stands = runs && self.state.demand == Demand::Busy && !self.is_faulty();
        let ((since, times), (first, most)) = (self.stirred, STANDS);
        stands.then(|| since + Micros(first.0 << times.min(10)).min(most))
    }

    /// That is done now.
    pub(super) fn run_again(&mut self, now: Micros) {
        self.stirred = (now, self.stirred.1.saturating_add(1));
    }

    /// Its name to the policy and in the accounts.
    pub fn planned_as(&self) -> DomainId {
        self.group.unwrap_or(self.state.id)
    }

    /// A control failed: it is not controlled now.
    pub fn is_faulty(&self) -> bool {
        self.fault.is_some()
    }

    /// Whether it has been taken off the device, and no control is under way that ends that.
    pub fn is_frozen(&self) -> bool {
        self.state.run == RunState::Frozen && !self.under_way
    }

    /// How long it had work itself, whatever the others of its group had.
    pub fn busy(&self, now: Micros) -> Micros {
        match self.state.demand {
            Demand::Busy => self.busy + now.saturating_sub(self.state.demand_since),
            Demand::Idle | Demand::Unknown => self.busy,
        }
    }

    /// How long it was frozen.
    pub fn frozen(&self, now: Micros) -> Micros {
        let (since, before) = self.frozen;
        before + since.map_or(Micros::ZERO, |since| now.saturating_sub(since))
    }

    pub(super) fn set_demand(&mut self, demand: Demand, now: Micros) {
        // Work that ended without a wait is in nothing that the program says.
        if self.state.demand == Demand::Busy && self.waited < self.state.demand_since {
            self.state.worked = None;
        }
        self.stir(now);
        self.busy = self.busy(now);
        (self.state.demand, self.state.demand_since) = (demand, now);
    }

    pub(super) fn set_run(&mut self, run: RunState, now: Micros) {
        self.state.run = run;
        self.frozen = match (run, self.frozen) {
            (RunState::Frozen, (None, before)) => (Some(now), before),
            (RunState::Enabled, (Some(_), _)) => {
                self.stir(now);
                (None, self.frozen(now))
            }
            (_, unchanged) => unchanged,
        };
    }

    /// Whether it runs only when others let it.
    pub(super) fn gives_way(&self) -> bool {
        self.state.run == RunState::Frozen || self.state.timeslice < Timeslice::DEFAULT
    }

    /// Whether it has, or had a moment ago, work to compete with.
    pub(super) fn competes(&self, now: Micros) -> bool {
        self.state.demand.may_run() || now.saturating_sub(self.state.demand_since) < LINGERS
    }

    /// Leaves it alone for a while.
    pub(super) fn give_up(&mut self, now: Micros) {
        self.state.timeslice = self.default;
        if !self.swapped_out {
            self.set_run(RunState::Enabled, now);
        }
        let backoff = match self.last_fault {
            Some((at, before)) if now.saturating_sub(at + before) <= FORGIVEN => {
                Micros(before.0 * 2).min(BACKOFF.1)
            }
            _ => BACKOFF.0,
        };
        self.last_fault = Some((now, backoff));
        let until = now + backoff;
        self.fault = Some(Fault {
            until,
            trying: false,
        });
    }
}
