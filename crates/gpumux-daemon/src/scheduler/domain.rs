//! One channel group of a tenant's process, with its controls and its counters.

use std::{sync::Arc, time::Duration};

use gpumux_core::{
    Account, Demand, DomainId, Micros, Progress, RunState, TenantId, Timeslice, controller,
};
use gpumux_rm::Controls;
use gpumux_wire::{
    message::{COPYING, WAITED},
    page::{Arrival, COPIED, Direction, GAP, Page, Slot, Work},
};

use super::{
    permits::Launches,
    record::{Now, Totals, Who},
};
use crate::{api::types, link::SessionId};

const _: () = assert!(GAP == Progress::GAP.0 * 1_000);

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

impl Member {
    /// Whether it is a group of this session, and this one if one is named.
    pub(super) fn is_of(&self, session: SessionId, key: Option<u32>) -> bool {
        self.session == session && key.is_none_or(|key| key == self.key)
    }
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
    pub(crate) controls: Box<dyn Controls>,
    pub(crate) page: Arc<Page>,
    /// The process has it from an MPS server.
    pub(crate) shared: bool,
    /// The slice it was found with.
    pub(crate) timeslice: Timeslice,
    /// The slice that the driver library gave it.
    pub(crate) default: Timeslice,
    /// Whether it is frozen.
    pub(crate) run: RunState,
    /// What replaces its controls, if they are not used.
    pub(crate) launches: Option<Launches>,
}

impl NewGroup {
    /// Makes the group once more as it is said to be. A group that cannot be controlled shows that by its first control.
    pub(super) fn confirm(&mut self) {
        let _ = match self.run {
            // Not with a timeslice of 1 µs beside another.
            RunState::Enabled => (self.controls.set_timeslice(self.default.0))
                .inspect(|()| self.timeslice = self.default)
                .and_then(|()| self.controls.thaw()),
            RunState::Frozen => self.controls.freeze(),
        };
    }
}

/// A domain under management: what it takes to carry out what the controller decides.
pub(crate) struct Domain {
    /// The group to which it belongs: to the policy, all its members are this one domain.
    pub(super) group: Option<DomainId>,
    pub(super) member: Member,
    pub(super) who: Arc<Who>,
    pub(super) controls: Box<dyn Controls>,
    pub(super) default: Timeslice,
    pub(super) launches: Option<Launches>,
    pub(super) freezes: u64,
    pub(super) thaws: u64,
    pub(super) slice_changes: u64,
    pub(super) tampered: u64,
    /// The reason that was recorded last.
    pub(super) reason: &'static str,
    /// The last failure of a control.
    pub(super) error: Option<String>,
    /// Device time received, and time waited, at two moments: the last second or two lie after the first.
    window: [(Micros, f64, f64); 2],
    /// When it came under control.
    pub(super) came_at: Micros,
    /// When its timeslice was last read back as it should be.
    pub(super) verified: Micros,
    /// How often its process's library has reported that the timeslice was set.
    pub(super) own_sets: u32,
    page: Arc<Page>,
    /// How often the lease had expired for its process when it came.
    pub(super) epoch: u64,
    /// Its context is unusable: it needs nothing.
    lost: bool,
    /// Whether it had work or held the device at the last look.
    at_work: bool,
    /// Holds that its process had counted at the last look.
    holds: u64,
    /// The last arrival that is known.
    came: Option<Arrival>,
    /// What its program had done at the last look.
    progress: Progress,
    /// Pieces of work that it had submitted at the last look, and the last look that found new ones: work may begin and end between two.
    submitted: u64,
    pub(super) worked: Micros,
    /// The work with which its process was found stopped, and the device time that it had received by then.
    stopped: Option<(Work, Micros)>,
    /// The device has ended what the stopped process had launched.
    spent: bool,
    /// What its process had counted as copied at the last look.
    copied: [u32; 2],
    pub(super) copies: Copies,
}

/// Copies between the host and the device, by [`gpumux_wire::page::Direction`].
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Copies {
    /// In bytes.
    pub(super) total: [u64; 2],
    /// Since the last look, in bytes.
    pub(super) new: [u64; 2],
    /// The same in bytes a second.
    pub(super) rates: [u64; 2],
    /// The last limits that its process was sent, in bytes a second.
    pub(super) limits: [Option<u64>; 2],
}

impl Copies {
    /// For people.
    pub(super) fn shown(&self) -> types::Copies {
        let copying = |n: usize| types::Copying {
            bytes: self.total[n],
            rate: self.rates[n],
            limit: self.limits[n],
        };
        types::Copies {
            to_device: copying(Direction::ToDevice as usize),
            to_host: copying(Direction::ToHost as usize),
        }
    }
}

/// Longer than a process holds the device ahead of work that it expects soon.
const HELD: Duration = Duration::from_micros(600);

impl Domain {
    pub(super) fn new(id: DomainId, group: NewGroup, now: Micros) -> Self {
        let mut domain = Self {
            epoch: group.page.expired(),
            who: Arc::new(Who {
                id,
                tenant: group.tenant,
                pid: group.member.pid,
            }),
            group: None,
            member: group.member,
            controls: group.controls,
            default: group.default,
            launches: group.launches,
            freezes: 0,
            thaws: 0,
            slice_changes: 0,
            tampered: 0,
            reason: "new",
            error: None,
            window: [(now, 0.0, 0.0); 2],
            came_at: now,
            verified: now,
            own_sets: 0,
            page: group.page,
            lost: false,
            at_work: false,
            holds: 0,
            came: None,
            progress: Progress::default(),
            submitted: 0,
            worked: now,
            stopped: None,
            spent: false,
            copied: [0; 2],
            copies: Copies::default(),
        };
        // What it did before this session does not count.
        domain.new_holds();
        domain.copied = domain.copied();
        domain
    }

    /// Whether its process has freed it, since its lease had expired: no control is used until the process comes again.
    pub(super) fn is_free(&self) -> bool {
        self.page.expired() != self.epoch
    }

    #[cfg(test)]
    pub(super) fn page(&self) -> &Arc<Page> {
        &self.page
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

    /// What of its demand counts, given the device time that the domain has received, and what the driver measured of the process.
    /// `silent`: the process reports the work of none of its groups on the device.
    pub(super) fn counted_demand(
        &mut self,
        received: Micros,
        used: Option<f64>,
        silent: bool,
    ) -> Demand {
        let left = self.stopped_at();
        let left = left.map(|before| Demand::of_stopped(received.saturating_sub(before), used));
        self.spent = left == Some(Demand::Idle);
        left.unwrap_or_else(|| match self.demand() {
            Demand::Unknown => Demand::of_unknown(used.filter(|_| silent)),
            known => known,
        })
    }

    /// What the process says of its work.
    pub(super) fn demand(&self) -> Demand {
        if self.lost {
            return Demand::Idle;
        }
        match self.work() {
            Some(Work::Busy(_)) => Demand::Busy,
            _ if self.wants_to_launch() => Demand::Busy,
            Some(Work::Idle(_)) => Demand::Idle,
            Some(Work::Unknown) | None => Demand::Unknown,
        }
    }

    fn work(&self) -> Option<Work> {
        self.page.slot(self.member.key).map(Slot::work)
    }

    /// Whether its process may be stopped: it has work, and has submitted none for so long.
    pub(super) fn stands(&self, now: Micros, time: Micros) -> bool {
        self.worked + time <= now && (self.stopped.is_some() || self.demand() == Demand::Busy)
    }

    /// Whether its process is stopped, as was found now.
    pub(super) fn set_stopped(&mut self, stopped: bool, received: Micros) {
        let left = stopped && self.demand() == Demand::Busy;
        let before = self.stopped_at().unwrap_or(received);
        self.stopped = (self.work().filter(|_| left)).map(|work| (work, before));
    }

    /// If its process is stopped, the device time that it had received by then. Only a process that runs changes its work.
    fn stopped_at(&self) -> Option<Micros> {
        let (work, received) = self.stopped?;
        (self.work() == Some(work)).then_some(received)
    }

    /// Whether its process is stopped, and left work behind.
    pub(super) fn is_stopped(&self) -> bool {
        self.stopped_at().is_some()
    }

    /// Whether a thread waits to launch, where that takes a permit, and would.
    pub(super) fn waits_to_launch(&self) -> bool {
        !self.spent && self.wants_to_launch()
    }

    fn wants_to_launch(&self) -> bool {
        let slot = self.page.slot(self.member.key);
        self.launches.is_some() && !self.lost && slot.is_some_and(Slot::waits_to_launch)
    }

    /// Whether something was launched that is not done.
    pub(super) fn has_launched(&self) -> bool {
        let slot = self.page.slot(self.member.key);
        let launched = slot.is_some_and(|slot| matches!(slot.work(), Work::Busy(_)));
        launched && !self.lost && !self.spent
    }

    /// How many pieces had been launched when the last one was seen to be done.
    pub(super) fn completed(&self) -> u64 {
        let slot = self.page.slot(self.member.key);
        slot.map_or(0, Slot::completed)
    }

    /// How many pieces it has launched.
    pub(super) fn submitted(&self) -> u64 {
        let slot = self.page.slot(self.member.key);
        slot.map_or(0, Slot::submitted)
    }

    /// How many launches waited for a permit.
    pub(super) fn held_launches(&self) -> u64 {
        let slot = self.page.slot(self.member.key);
        slot.map_or(0, Slot::held_launches)
    }

    /// Whether it has work, or holds the device ahead of some, if that is news; its demand is known.
    pub(super) fn new_at_work(&mut self, demand: Demand) -> Option<bool> {
        let at_work = demand == Demand::Busy || self.holds_device();
        let before = std::mem::replace(&mut self.at_work, at_work);
        (at_work != before).then_some(at_work)
    }

    /// Whether it holds the device ahead of work.
    fn holds_device(&self) -> bool {
        let holds = |slot: &Slot| {
            let hints = slot.hints();
            let ended = hints.useful.saturating_add(hints.wasted);
            let ago = || slot.came().and_then(Arrival::ago);
            hints.given > ended && ago().is_some_and(|ago| ago < HELD)
        };
        self.page.slot(self.member.key).is_some_and(holds)
    }

    /// Notes work since the last look, whether it has ended or not.
    pub(super) fn note_work(&mut self, now: Micros) {
        let submitted = (self.page.slot(self.member.key)).map_or(0, Slot::submitted);
        if submitted != std::mem::replace(&mut self.submitted, submitted) {
            self.worked = now;
        }
    }

    /// When work came after a pause, if that is news.
    pub(super) fn arrival(&mut self, now: Micros) -> Option<Micros> {
        let came = self.page.slot(self.member.key).and_then(Slot::came);
        if came == std::mem::replace(&mut self.came, came) {
            return None;
        }
        let ago = Micros(came?.ago()?.as_micros() as u64);
        Some(now.saturating_sub(ago))
    }

    /// What its program has done so far, if that is news; never of older libraries, which do not count how long it waits.
    pub(super) fn progress(&mut self) -> Option<Progress> {
        let page = Some(&self.page).filter(|it| it.revision() >= WAITED);
        let slot = page?.slot(self.member.key)?;
        let waits = slot.waits()?;
        let found = Progress {
            waits: waits.count,
            pieces: waits.pieces,
            busy: Micros(waits.busy_ns / 1_000),
            waited_us: waits.waited_us,
            submitted: slot.submitted(),
        };
        let before = std::mem::replace(&mut self.progress, found);
        (found != before).then_some(found)
    }

    /// How often its process took the device ahead of work since this was asked last, if it did.
    pub(super) fn new_holds(&mut self) -> Option<u64> {
        let given = self.page.slot(self.member.key)?.hints().given;
        let before = std::mem::replace(&mut self.holds, given);
        // Whatever the process wrote there.
        given.checked_sub(before).filter(|times| *times > 0)
    }

    fn copied(&self) -> [u32; 2] {
        let slot = self.page.slot(self.member.key);
        slot.map_or([0; 2], Slot::copied)
    }

    /// Looks at what its process has copied since the last look, so many seconds ago.
    pub(super) fn note_copies(&mut self, elapsed: f64) {
        let copied = self.copied();
        let before = std::mem::replace(&mut self.copied, copied);
        for (n, copies) in copied.iter().enumerate() {
            let new = u64::from(copies.wrapping_sub(before[n])) * COPIED;
            self.copies.new[n] = new;
            self.copies.total[n] = self.copies.total[n].saturating_add(new);
            self.copies.rates[n] = (new as f64 / elapsed.max(1e-6)) as u64;
        }
    }

    /// Whether its process's library limits copies.
    pub(super) fn limits_copies(&self) -> bool {
        self.page.revision() >= COPYING
    }

    /// Gives the group back as the driver library made it, as far as its controls succeed.
    pub(super) fn restore(&self, known: &controller::Domain) {
        // What a faulty domain really has is not known.
        let faulty = known.is_faulty();
        if faulty || known.state.timeslice != self.default {
            let _ = self.controls.set_timeslice(self.default.0);
        }
        // A swapped out one is thawed by its own process, once its memory is back.
        if (faulty || known.state.run == RunState::Frozen) && !known.swapped_out {
            let _ = self.controls.thaw();
        }
    }

    /// What it had so far, given its account.
    pub(super) fn totals(
        &self,
        now: Micros,
        known: &controller::Domain,
        account: &Account,
    ) -> Totals {
        Totals {
            received_us: account.received_us,
            runnable_us: account.runnable_us,
            waited_us: account.waited_us,
            frozen_us: known.frozen(now).0 as f64,
            preemptions: account.preemptions,
            freezes: self.freezes,
            thaws: self.thaws,
            slice_changes: self.slice_changes,
            tampered: self.tampered,
            copied: self.copies.total,
        }
    }

    /// Begins a new second of [`Self::lately`].
    pub(super) fn turn_window(&mut self, now: Micros, received_us: f64, waited_us: f64) {
        self.window = [self.window[1], (now, received_us, waited_us)];
    }

    /// Of the last second or two: the share of the device that it received, and the part in which it waited.
    pub(super) fn lately(&self, now: Micros, received_us: f64, waited_us: f64) -> (f64, f64) {
        let (since, received, waited) = self.window[0];
        let elapsed = now.saturating_sub(since).0;
        let part = |more: f64| match elapsed {
            0 => 0.0,
            elapsed => (more / elapsed as f64).clamp(0.0, 1.0),
        };
        (part(received_us - received), part(waited_us - waited))
    }
}

/// What a domain has.
pub(super) fn now(known: &controller::Domain) -> Now {
    Now {
        frozen: known.state.run == RunState::Frozen,
        timeslice_us: known.state.timeslice.0,
        demand: known.state.demand,
        reason: known.reason,
    }
}
