//! From shares to timeslices and freezes: the mechanism common to all policies. Its parent tells why.

use std::collections::BTreeMap;

use super::{
    actors::{Actor, Way, cast, ceilings, divide},
    contract::{Bound, Policy},
    divide::Division,
    lag::{Entitled, Memory, Owner, Track},
    tuning::{MIN_BURST_US, MIN_SLICE_US, MIN_STEP_US, Tuning, request},
};
use crate::accounts::RESTORE_US;
use crate::{Class, Demand, DomainPlan, Micros, Plan, RunState, Snapshot, TenantId, Timeslice};

/// A domain that has paused for longer is not expected back soon.
const PAUSE: Micros = Micros::from_millis(100);
/// A program that says that it had little work is believed until it seems to be ahead of its share by so many of its bursts.
const BELIEVED: f64 = 4.0;
/// The part of its objective that a request may wait for one timeslice of the owner, and the longest such
/// timeslice: beyond the driver's own it would wait longer than without us.
const PATIENCE: u64 = 10;
const MAX_PATIENCE: u64 = Timeslice::DEFAULT.0 - 48;

/// A policy: a division brought about by timeslices and freezes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Shared<D> {
    division: D,
    tuning: Tuning,
}

impl<D: Division> Shared<D> {
    /// With default tuning.
    pub fn new(division: D) -> Self {
        Self::tuned(division, Tuning::default())
    }

    /// With a tuning of your own.
    pub fn tuned(division: D, tuning: Tuning) -> Self {
        Self { division, tuning }
    }
}

impl<D: Division> Policy for Shared<D> {
    fn name(&self) -> &'static str {
        self.division.name()
    }

    fn plan(&self, snapshot: &Snapshot, memory: &mut Memory) -> Plan {
        memory.charge(snapshot);
        let mut stage = Stage::new(&self.division, &self.tuning, snapshot, memory);
        let slices = match stage.rotates {
            true => {
                stage.bursts();
                let together = stage.together();
                if together.is_none() {
                    stage.memory.are_apart();
                }
                stage.choose_owner();
                stage.ask_for_budgets();
                stage.separate();
                together.unwrap_or_else(|| stage.rotating_slices())
            }
            false => stage.slices(),
        };
        let domains = stage.cast.iter().zip(slices).map(|(actor, timeslice)| {
            let (run, reason) = stage.run_state(actor);
            DomainPlan {
                id: actor.domain.id,
                timeslice,
                run,
                reason,
            }
        });
        let domains = domains.collect();
        let next = stage.next.map(|at| Micros(at.max(snapshot.now.0 + 1)));
        Plan { domains, next }
    }

    fn bounds(&self, snapshot: &Snapshot) -> Vec<Bound> {
        let (tuning, costs) = (&self.tuning, &snapshot.costs);
        let cast = cast(snapshot);
        let shares = divide(&self.division, &cast, snapshot, |_| true);
        let ceilings = ceilings(&self.division, &cast, snapshot, |_| true);
        let is_latency = |actor: &Actor| actor.class() == Class::Latency;
        let latency = cast.iter().filter(|it| is_latency(it)).count() as f64;
        let others = cast.iter().zip(&shares).filter(|(it, _)| !is_latency(it));
        let (count, sum) = others.fold((0.0, 0.0), |(count, sum), (_, share)| {
            (count + 1.0, sum + share)
        });
        let mean = if count > 0.0 { sum / count } else { 1.0 };
        let control = 2.0 * Tuning::control(costs);
        let quantum = tuning.quantum(costs, cast.iter().map(Actor::kind));
        let wait = |share: f64, ceiling: f64| match latency > 0.0 {
            true => {
                // No shares of so many let them run further ahead together.
                let ahead = (1.0 - 1.0 / latency).max(0.25) * tuning.period.0 as f64;
                let bursts = ahead.max(Tuning::handover(costs)) + latency * MIN_BURST_US;
                2.0 * request(quantum, share / mean) / share + quantum + bursts + control
            }
            false => {
                let only_batch = cast.iter().all(|it| it.class() == Class::Batch);
                // Then it is frozen until it is within its limit again.
                let over = match ceiling < 1.0 {
                    true => (tuning.burst(costs, ceiling) + Tuning::control(costs)) / ceiling,
                    false => 0.0,
                };
                2.0 * tuning.round(costs, &shares, only_batch) + over + control
            }
        };
        let mut bounds: BTreeMap<TenantId, Bound> = BTreeMap::new();
        for ((actor, share), ceiling) in cast.iter().zip(&shares).zip(ceilings) {
            let tenant = actor.domain.tenant;
            let bound = bounds.entry(tenant).or_insert(Bound {
                tenant,
                share: 0.0,
                lag: Micros::ZERO,
                wait: Micros::ZERO,
            });
            let wait = wait(*share, ceiling);
            bound.share += share;
            bound.lag += Micros((share * wait) as u64);
            bound.wait = bound.wait.max(Micros(wait as u64));
        }
        bounds.into_values().collect()
    }
}

/// All domains while a plan is made.
struct Stage<'a> {
    division: &'a dyn Division,
    tuning: &'a Tuning,
    snapshot: &'a Snapshot,
    memory: &'a mut Memory,
    /// The largest, in µs.
    quantum: f64,
    cast: Vec<Actor<'a>>,
    rotates: bool,
    /// The part of the device that the owner receives while it runs, where that is less than nearly all.
    pace: f64,
    next: Option<u64>,
}

impl<'a> Stage<'a> {
    fn new(
        division: &'a dyn Division,
        tuning: &'a Tuning,
        snapshot: &'a Snapshot,
        memory: &'a mut Memory,
    ) -> Self {
        let mut cast = cast(snapshot);
        let rotates = cast.iter().any(|it| it.class() == Class::Latency)
            || !snapshot.gangs.is_empty() && cast.len() > 1;
        if !rotates {
            memory.clear();
        }
        let all = divide(division, &cast, snapshot, |_| true);
        let wants: Vec<bool> = cast.iter().map(|actor| actor.wants).collect();
        for (actor, counts) in cast.iter_mut().zip(memory.counted(&wants)) {
            actor.counts = counts;
        }
        let counted = match cast.iter().all(|actor| actor.counts) {
            true => all.clone(),
            false => divide(division, &cast, snapshot, |actor| actor.counts),
        };
        let ceilings = match rotates {
            true => vec![1.0; cast.len()],
            false => ceilings(division, &cast, snapshot, |it| it.works()),
        };
        let mut entitled = Vec::new();
        for (index, actor) in cast.iter_mut().enumerate() {
            actor.share = match actor.counts {
                true => counted[index],
                false => all[index],
            };
            entitled.push(Entitled {
                share: actor.share,
                ceiling: ceilings[index],
                counts: actor.counts,
                wants: actor.wants,
                busy: actor.works(),
            });
        }
        let quantum = tuning.quantum(&snapshot.costs, cast.iter().map(Actor::kind));
        memory.settle(snapshot.now, &entitled, quantum);
        Self {
            division,
            tuning,
            snapshot,
            memory,
            quantum,
            cast,
            rotates,
            pace: 1.0,
            next: None,
        }
    }

    /// Asks for a plan in about `delay` µs.
    fn ask_in(&mut self, delay: f64) {
        let at = delay.max(MIN_STEP_US).ceil() as u64;
        self.ask_at(self.snapshot.now + Micros(at));
    }

    fn ask_at(&mut self, at: Micros) {
        self.next = Some(self.next.map_or(at.0, |next| next.min(at.0)));
    }

    /// Whether several latency domains had work lately, which must not wait long for each other. Asks for a plan when one of them had none for long.
    fn several(&mut self) -> bool {
        let lately = |it: &&Actor| it.class() == Class::Latency && self.lately(it);
        let several = self.cast.iter().filter(lately).count() > 1;
        if several {
            self.ask_when_forgotten(|it| it.class() == Class::Latency);
        }
        several
    }

    /// Asks for a plan when the first of these domains that pauses had no work lately.
    fn ask_when_forgotten(&mut self, of: impl Fn(&Actor) -> bool) {
        let pauses = self.cast.iter().filter(|it| of(it) && !it.runnable());
        let pauses = pauses.filter(|it| self.lately(it));
        let end = pauses.map(|it| it.domain.demand_since + self.tuning.recent);
        if let Some(end) = end.min() {
            self.ask_at(end);
        }
    }

    /// Finds the latency domains that take the device at once: those that have not run ahead of their share by their burst, nor
    /// kept others of their class waiting for long.
    fn bursts(&mut self) {
        let several = self.several();
        let look = self.memory.looked_at(self.snapshot.now, self.tuning.hog);
        look.into_iter().for_each(|(_, end)| self.ask_at(end));
        for index in 0..self.cast.len() {
            let (actor, track) = (&self.cast[index], self.memory.domains[index]);
            let latency = actor.class() == Class::Latency;
            let looked_at = look.is_some_and(|(id, _)| id == actor.domain.id);
            let little = self.worked_little(actor, -track.lag);
            // One that ran ahead and pauses stays over its budget: it would have the device at each return, until that is seen.
            let exhausted = !looked_at
                && self.is_contested(actor)
                && self.must_wait(track.exhausted, -track.lag, actor.share)
                && !little;
            let believed = if little { self.burst(actor.share) } else { 0.0 };
            let hog = self.tuning.hog.max(Micros(believed.ceil() as u64));
            let hogs = actor.domain.demand_since + hog;
            // Those that seem to take what they can get do not take it from one that is looked at.
            let waits = look.is_some() && track.habit.is_greedy();
            let unknown = actor.domain.demand == Demand::Unknown;
            let may_hog = several && !looked_at;
            let hog = may_hog && (unknown || hogs <= self.snapshot.now || waits);
            let runnable = actor.runnable();
            let preempts = latency && !(runnable && (exhausted || hog));
            self.memory.domains[index].exhausted = exhausted;
            let actor = &mut self.cast[index];
            (actor.exhausted, actor.hog) = (exhausted && latency, hog);
            actor.way = match preempts {
                true => Way::Preempting,
                false => Way::Rotating,
            };
            if latency && runnable && may_hog && !hog {
                self.ask_at(hogs);
            }
        }
    }

    /// Whether a domain had work for less than its share of the time lately, as its program says. One that is found to have work counts as at work
    /// until the next look, so that some short requests, as they are found, look like many. A program that lies gains some bursts.
    fn worked_little(&self, actor: &Actor, ahead: f64) -> bool {
        let busy_for = match actor.domain.demand {
            Demand::Idle => 0,
            _ => (self.snapshot.now.saturating_sub(actor.domain.demand_since)).0,
        };
        let little = actor.domain.worked.is_some_and(|it| it < actor.share);
        let burst = self.burst(actor.share);
        little && (busy_for as f64) < burst && ahead < BELIEVED * burst
    }

    /// Whether another may have work, and may run.
    fn is_contested(&self, actor: &Actor) -> bool {
        let mut others = self.cast.iter().filter(|it| it.is_ready());
        others.any(|it| it.domain.id != actor.domain.id)
    }

    fn owns(&self, actor: &Actor) -> bool {
        let owner = self.memory.owner;
        owner.is_some_and(|it| it.id == actor.domain.id)
    }

    /// The timeslices, where latency domains contend that all take what they can get, so that none has short requests for which the device must be taken from the
    /// others at once. Timeslices divide it among them: one uses the gaps of the other, and none waits for whole quanta. One that leaves its own early, as a
    /// program that waits for each request, gets less than its share: so only where no one was promised more than equal parts. The owner has the shares of all that rotate.
    fn together(&mut self) -> Option<Vec<Timeslice>> {
        let is_latency = |actor: &Actor| actor.class() == Class::Latency;
        if !self.several() || self.is_promised() || !self.snapshot.gangs.is_empty() {
            return None;
        }
        let shares = self.shares_lately();
        let (mut among, mut running, mut others) = (Vec::new(), 0.0, 0.0);
        let mut short = false;
        for (index, actor) in self.cast.iter().enumerate() {
            if !self.lately(actor) || actor.held() {
                continue;
            }
            let share = shares[index];
            if !is_latency(actor) {
                others += share;
                continue;
            }
            let track = &mut self.memory.domains[index];
            short |=
                !track.habit.judge(self.snapshot.now) && actor.domain.demand != Demand::Unknown;
            among.push(share);
            running += if actor.runnable() { share } else { 0.0 };
        }
        if short || among.len() < 2 {
            return None;
        }
        among.extend(Some(others).filter(|share| *share > 0.0));
        let round = self.round_together(&among)?;
        let Some(look_at) = self
            .memory
            .look(self.snapshot.now, Micros(2 * round as u64))
        else {
            self.bursts();
            return None;
        };
        self.ask_at(look_at);
        self.pace = (others / (others + running).max(1e-9)).max(1e-3);
        for actor in self.cast.iter_mut().filter(|it| is_latency(it)) {
            (actor.way, actor.exhausted) = (Way::Slices, false);
        }
        let ids = self.cast.iter().filter(|it| is_latency(it));
        self.memory
            .leave_to_timeslices(ids.map(|it| it.domain.id), self.quantum);
        let share = |(actor, share): (&Actor, f64)| if is_latency(actor) { share } else { others };
        let shares = self.cast.iter().zip(shares).map(share);
        Some(shares.map(|share| timeslice(share * round)).collect())
    }

    /// Whether one of those that had work lately was promised a part of the device: by a guarantee, a limit or a weight, or since it is another user's.
    fn is_promised(&self) -> bool {
        let mut lately = self.cast.iter().filter(|it| self.lately(it));
        let Some(first) = lately.next() else {
            return false;
        };
        let equal = |it: &Actor| (it.user, it.claim.weight) == (first.user, first.claim.weight);
        let bound = |it: &Actor| it.claim.guaranteed > 0.0 || it.claim.limit < 1.0;
        bound(first) || lately.any(|it| bound(it) || !equal(it))
    }

    /// A round of timeslices that are the driver's own on average: longer ones cost fewer switches, but a program that waits for its own waits longer. None
    /// if one of these shares cannot be had so, within objectives and quanta.
    fn round_together(&self, shares: &[f64]) -> Option<f64> {
        let least = shares.iter().copied().fold(1.0, f64::min).max(1e-9);
        let most = shares.iter().copied().fold(1e-9, f64::max);
        let objectives = self.cast.iter().filter_map(|it| it.claim.objective);
        let longest = objectives
            .min()
            .map_or(self.quantum, |it| (it.0 / PATIENCE) as f64);
        let own = (Timeslice::DEFAULT.0 as f64 - RESTORE_US) * shares.len() as f64;
        let round = own.min(longest / most).max(MIN_SLICE_US / least);
        (round * most <= longest + 1.0).then_some(round)
    }

    /// Asks for a plan when a latency domain will have run ahead by its burst, or will be level. The budgets of those that wait for
    /// another of their class matter when that one's quantum ends. When one that ran ahead before it paused will be level, the device
    /// is divided among the others.
    fn ask_for_budgets(&mut self) {
        let privileged = self.cast.iter().any(|it| self.owns(it) && it.privileged());
        for index in 0..self.cast.len() {
            let (actor, lag) = (&self.cast[index], self.memory.domains[index].lag);
            let matters = match actor.way {
                Way::Slices => false,
                Way::Rotating if !self.owns(actor) => actor.exhausted && !(privileged && actor.hog),
                _ => actor.class() == Class::Latency,
            };
            let share = actor.share;
            if matters && actor.is_ready() && self.is_contested(actor) {
                self.ask_in(match actor.exhausted {
                    true => self.level_in(-lag, share),
                    false => (lag + self.burst(share)) / (1.0 - share).max(1e-9),
                });
            } else if actor.counts && !actor.wants && lag < 0.0 {
                self.ask_in(-lag / share.max(1e-9));
            }
        }
    }

    fn burst(&self, share: f64) -> f64 {
        self.tuning.burst(&self.snapshot.costs, share)
    }

    /// When a domain that ran so far ahead of its share shall be thawed, so that it is level when that has been done.
    fn level_in(&self, ahead: f64, share: f64) -> f64 {
        ahead / share.max(1e-9) - self.snapshot.costs.thaw.0 as f64
    }

    /// Whether a domain that ran so far ahead of its share must wait: from its burst on, until it is level.
    fn must_wait(&self, waits: bool, ahead: f64, share: f64) -> bool {
        let burst = self.burst(share);
        let slack = Tuning::slack(&self.snapshot.costs).min(burst / 4.0);
        self.level_in(ahead, share) * share > slack && (waits || -ahead <= slack - burst)
    }

    /// Whose quantum it is: of those that are owed something, the one whose request ends first in virtual time (EEVDF), until it has
    /// used it.
    fn choose_owner(&mut self) {
        let (costs, now) = (&self.snapshot.costs, self.snapshot.now);
        let (slack, handover) = (Tuning::slack(costs), Tuning::handover(costs));
        let linger = Micros(handover as u64);
        let others = self.cast.iter();
        let others = others.filter(|actor| actor.wants && actor.way == Way::Rotating);
        let (count, sum) = others.fold((0.0, 0.0), |(count, sum), actor| {
            (count + 1.0, sum + actor.share)
        });
        let request = |index: usize| {
            let actor = &self.cast[index];
            let largest = match actor.class() {
                Class::Latency => self.tuning.quantum(costs, [actor.kind()]),
                _ => self.quantum,
            };
            request(largest, actor.share * count / f64::max(sum, 1e-9))
        };
        let lag = |index: usize| self.memory.domains[index].lag;
        let entitled = |index: usize| lag(index) >= -slack;
        let used_up = |index: usize| self.memory.domains[index].used + slack >= request(index);
        let outranks = |index: usize, other: usize| {
            self.cast[index].privileged() && !self.cast[other].privileged()
        };
        let rotating = (0..self.cast.len()).filter(|index| self.cast[*index].rotates());
        let rotating: Vec<usize> = rotating.collect();
        let others = |index: usize| rotating.iter().copied().filter(move |it| *it != index);
        // Just before a latency domain that is over its budget comes back, another owner would have next to nothing of its quantum, and
        // the controls would delay that domain.
        let comes_back = |index: usize| {
            let actor = &self.cast[index];
            actor.exhausted && self.level_in(-lag(index), actor.share) < 2.0 * handover
        };
        // Whether what one borrowed is another's; or it was given away in a pause of another that is owed a whole quantum: else one that
        // pauses whenever a quantum ends would never have its own.
        let claims = |other: usize, owner: Owner, index: usize| {
            let paused = self.cast[other].domain.demand_since > self.memory.domains[index].since;
            let passed_over = paused && lag(other) + slack >= request(other);
            !outranks(index, other) && (owner.borrowed && entitled(other) || passed_over)
        };
        let keeps = |owner: Owner, index: usize| {
            let actor = &self.cast[index];
            let left = actor.runnable() && actor.way != Way::Rotating;
            if left || others(index).any(|other| outranks(other, index)) {
                return false;
            }
            match others(index).next() {
                // It stays the one that need not be kept from the others.
                None => actor.idle_for(now) < PAUSE,
                Some(_) => {
                    actor.idle_for(now) < linger
                        && (!owner.over && !used_up(index) || others(index).any(comes_back))
                        && !others(index).any(|other| claims(other, owner, index))
                }
            }
        };
        let before = self.memory.owner.and_then(|owner| {
            let index = self.cast.iter().position(|it| it.domain.id == owner.id);
            Some((owner, index.filter(|at| !self.cast[*at].held())?))
        });
        let kept = before.filter(|(owner, index)| keeps(*owner, *index));
        let pinned = |index: &usize| self.cast[*index].domain.pinned == Some(RunState::Enabled);
        let forced = rotating.iter().copied().find(pinned);
        let first = || {
            let key = |index: usize| {
                let (actor, track) = (&self.cast[index], self.memory.domains[index]);
                let left = request(index) - track.used;
                let due = match entitled(index) {
                    true if left > slack => left,
                    true => request(index),
                    false => 0.0,
                };
                let late = (due - track.lag) / actor.share.max(1e-9);
                let rank = (!actor.privileged(), !entitled(index));
                (rank, late, track.since)
            };
            // Of those that are equal, the lowest id is the first.
            rotating.iter().copied().min_by(|a, b| {
                let (a, b) = (key(*a), key(*b));
                (a.0.cmp(&b.0))
                    .then(a.1.total_cmp(&b.1))
                    .then(a.2.cmp(&b.2))
            })
        };
        let index = forced.or(kept.map(|(_, index)| index));
        let Some(index) = index.or_else(first) else {
            self.memory.owner = None;
            return;
        };
        let actor = &self.cast[index];
        let (request, used_up) = (request(index), used_up(index));
        let new = Owner {
            id: actor.domain.id,
            borrowed: !entitled(index),
            over: false,
        };
        // When those it does not outrank will be entitled to what it has.
        let entitled_in = |index: usize| -lag(index) / self.cast[index].share.max(1e-9);
        let soonest = others(index)
            .filter(|other| !outranks(index, *other))
            .map(entitled_in)
            .fold(1e9, f64::min);
        let alone = others(index).next().is_none();
        let goes_on = forced.is_some() || kept.is_some();
        let held = before.filter(|(_, held)| goes_on && *held == index);
        let owner = held.map_or(new, |(held, _)| Owner {
            over: held.over || used_up && forced.is_none(),
            ..held
        });
        let tracks = &mut self.memory.domains;
        if let Some((_, lost)) = before.filter(|(owner, _)| owner.over && held.is_none()) {
            tracks[lost].used = 0.0;
        }
        if held.is_none() || forced.is_some() {
            tracks[index].since = now;
            if used_up {
                tracks[index].used = 0.0;
            }
        }
        let used = tracks[index].used;
        self.memory.owner = Some(owner);
        if alone {
            return;
        }
        if !actor.runnable() {
            let end = actor.domain.demand_since + linger;
            return self.ask_at(end);
        }
        if !owner.over && !self.is_preempted() {
            self.ask_in((request - used) / self.pace);
        }
        if owner.borrowed && forced.is_none() {
            self.ask_in(soonest);
        }
    }

    /// Whether the owner makes no progress now: until that changes, its quantum does not end.
    fn is_preempted(&self) -> bool {
        let busy = |it: &Actor| it.domain.demand == Demand::Busy && !it.held();
        let preempts = |it: &Actor| it.way == Way::Preempting && busy(it);
        self.cast.iter().any(preempts) && (self.patience().0 as f64) < RESTORE_US
    }

    /// Finds the domains that pause beside an owner: they may be back in the middle of its quantum, and if they were enabled, the two
    /// would meet at their short timeslices until that is seen. So would a latency domain that is over its budget.
    fn separate(&mut self) {
        for index in 0..self.cast.len() {
            let actor = &self.cast[index];
            let until = actor.domain.demand_since + PAUSE;
            let rotating = self.memory.owner.is_some() && actor.way == Way::Rotating;
            let waits = rotating && !self.owns(actor) || actor.exhausted;
            let pauses = !actor.runnable() && !self.snapshot.gangs.contains(&actor.domain.tenant);
            if waits && pauses && self.snapshot.now < until {
                self.cast[index].contends = true;
                self.ask_at(until);
            }
        }
    }

    /// The timeslice of the owner: what every latency tenant's objective leaves time for. Programs that launch
    /// kernel by kernel have gaps, and the longer the timeslice, the fewer of them are lost to switching.
    fn patience(&self) -> Timeslice {
        let latency = self.cast.iter().filter(|it| it.class() == Class::Latency);
        // Without an objective, it is what the program itself shows while it works.
        let own = |actor: &Actor| match (actor.claim.objective, actor.domain.tolerated) {
            (Some(objective), _) => Some(objective.0 / PATIENCE),
            (None, _) if !self.lately(actor) => None,
            (None, tolerated) => Some(tolerated.map_or(0, |it| it.0)),
        };
        let least = latency.filter_map(own).min().unwrap_or(0);
        // A process that is not controlled keeps the device for the driver's timeslice. Between two of those the shortest gets nothing done.
        let least = if self.snapshot.crowded {
            MAX_PATIENCE
        } else {
            least
        };
        Timeslice(least.clamp(Timeslice::MIN.0, MAX_PATIENCE))
    }

    /// The timeslices where domains rotate. Where the owner's is not the shortest, a latency domain's leaves it its share, if such a round
    /// costs no more than others: a freeze, in which a request waits for the owner's whole debt, is not needed then.
    fn rotating_slices(&mut self) -> Vec<Timeslice> {
        let (patience, several) = (self.patience(), self.several());
        let shares = match patience.0 as f64 >= MIN_SLICE_US {
            true => self.shares_lately(),
            false => vec![0.0; self.cast.len()],
        };
        let rotating = self.cast.iter().zip(&shares);
        let rotating = rotating.filter(|(it, _)| it.class() != Class::Latency && self.lately(it));
        let of_owner: f64 = rotating.map(|(_, share)| share).sum();
        let least = 2.0 * self.snapshot.costs.switch.0 as f64 / self.tuning.slice_cost.max(1e-3);
        let long = |actor: &Actor, share: f64| {
            let progress = (patience.0 as f64 - RESTORE_US) * share / of_owner.max(1e-9);
            let slice = (progress + RESTORE_US).min(Timeslice::MAX.0 as f64);
            let known = actor.domain.demand != Demand::Unknown;
            match known && slice + patience.0 as f64 >= least {
                true => Timeslice(slice as u64).max(patience),
                false => Timeslice::MAX,
            }
        };
        let slice = |(actor, share): (&Actor, &f64)| match (actor.class(), actor.way) {
            (Class::Latency, Way::Rotating) if several && self.owns(actor) => patience,
            // It is frozen until it owns the quantum again, or preempts: until then its timeslice need not change.
            (Class::Latency, Way::Rotating) if several => actor.domain.timeslice,
            (Class::Latency, _) => long(actor, *share),
            _ => patience,
        };
        self.cast.iter().zip(&shares).map(slice).collect()
    }

    /// Whether a domain has work or had some lately: short pauses issue no controls.
    fn lately(&self, actor: &Actor) -> bool {
        actor.idle_for(self.snapshot.now) < self.tuning.recent
    }

    /// The shares of the domains that had work lately, beside each other; of another, what it would have if all had work.
    fn shares_lately(&mut self) -> Vec<f64> {
        let lately = divide(self.division, &self.cast, self.snapshot, |it| {
            self.lately(it)
        });
        let all = divide(self.division, &self.cast, self.snapshot, |_| true);
        self.ask_when_forgotten(|_| true);
        let both = self.cast.iter().zip(lately.into_iter().zip(all));
        both.map(|(actor, (lately, all))| if self.lately(actor) { lately } else { all })
            .collect()
    }

    /// The timeslices that alone bring shares about, but for limits.
    fn slices(&mut self) -> Vec<Timeslice> {
        if self.cast.len() == 1 {
            // There is no other domain: leave it as the driver made it.
            return vec![Timeslice::DEFAULT];
        }
        let shares = self.shares_lately();
        let pairs = self.cast.iter().zip(&shares);
        let lately: Vec<f64> = pairs
            .filter(|(actor, _)| self.lately(actor))
            .map(|(_, share)| *share)
            .collect();
        let only_batch = self.cast.iter().all(|it| it.class() == Class::Batch);
        let round = self.tuning.round(&self.snapshot.costs, &lately, only_batch);
        self.keep_limits(&shares);
        let slices = shares.into_iter().map(|share| timeslice(share * round));
        slices.collect()
    }

    /// Freezes those that ran ahead of their limits in the pauses of others, while one that did not has work.
    fn keep_limits(&mut self, shares: &[f64]) {
        for index in 0..self.cast.len() {
            let track = self.memory.domains[index];
            self.memory.domains[index].exhausted =
                self.must_wait(track.exhausted, track.over, track.ceiling);
        }
        let mut pairs = self.cast.iter().zip(&self.memory.domains);
        let contested = pairs.any(|(it, track)| it.works() && !track.exhausted);
        // Of those that run for certain: a domain may have what all others leave.
        let mut running = 0.0;
        for ((actor, track), share) in self.cast.iter_mut().zip(&self.memory.domains).zip(shares) {
            actor.exhausted = contested && track.exhausted;
            // Else it would have the device at each return, until that is seen.
            actor.contends = actor.exhausted && !actor.runnable();
            if actor.works() && !actor.exhausted {
                running += share;
            }
        }
        let changes_in = |((actor, track), share): ((&Actor, &Track), &f64)| {
            let own = if actor.works() { 0.0 } else { *share };
            let gains = share / (running + own) - track.ceiling;
            let gains = Some(gains).filter(|it| actor.wants && !track.exhausted && *it > 0.0);
            let burst = self.burst(track.ceiling);
            match actor.exhausted {
                true => Some(self.level_in(track.over, track.ceiling)),
                false => gains.map(|gains| (burst - track.over) / gains),
            }
        };
        let pairs = self.cast.iter().zip(&self.memory.domains).zip(shares);
        let next = pairs.filter_map(changes_in).min_by(f64::total_cmp);
        next.into_iter().for_each(|delay| self.ask_in(delay));
    }

    /// Whether a domain may run, and why.
    fn run_state(&self, actor: &Actor) -> (RunState, &'static str) {
        use RunState::{Enabled, Frozen};
        if !actor.runnable() {
            return match actor.contends {
                true => (Frozen, "idle contender"),
                false => (Enabled, "has no work"),
            };
        }
        match (actor.domain.pinned, actor.way) {
            (Some(Frozen), _) => (Frozen, "waits for its gang"),
            (Some(Enabled), Way::Slices | Way::Preempting) => (Enabled, "runs with its gang"),
            (_, Way::Slices) if actor.exhausted => (Frozen, "over its limit while others wait"),
            (_, Way::Slices) => (Enabled, "shares by timeslices"),
            (_, Way::Preempting) => (Enabled, "takes the device at once"),
            (_, Way::Rotating) if self.owns(actor) => (Enabled, "has its quantum"),
            _ if actor.exhausted => (Frozen, "over its budget while others wait"),
            _ => (Frozen, "waits for its quantum"),
        }
    }
}

/// A timeslice for so many µs of work.
fn timeslice(work: f64) -> Timeslice {
    Timeslice(((work.max(MIN_SLICE_US) + RESTORE_US) as u64).min(Timeslice::MAX.0))
}

#[cfg(test)]
mod tests;
