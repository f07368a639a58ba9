//! From shares to slices and freezes: the mechanism common to all policies. Its parent tells why.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::{Claim, Division, Policy, divide};
use crate::accounts::RESTORE_US;
use crate::{
    Class, Costs, Demand, DomainId, DomainPlan, DomainState, Micros, Plan, RunState, Snapshot,
    TenantId, TenantSpec, Timeslice,
};

/// What may be traded against what. The defaults suit GPUs whose switch costs 100 µs to 1 ms.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Tuning {
    /// Part of the device that switching between turns of the back row may cost. Sets the quantum.
    pub turn_cost: f64,
    /// Part of the device that switching between slices of the front row may cost. Sets the slices.
    pub slice_cost: f64,
    /// The same when only batch domains share the device: nobody waits, so switch less.
    pub batch_slice_cost: f64,
    /// Period of the front row's budgets. A domain within its share may run this long times its share
    /// without a pause.
    pub period: Micros,
    /// From when on a busy latency domain gets a slice by share if there are several.
    pub hog: Micros,
    /// How long an idle domain counts when slices are set, so that short pauses pull no levers.
    pub recent: Micros,
}

impl Default for Tuning {
    fn default() -> Self {
        Self {
            turn_cost: 0.02,
            slice_cost: 0.05,
            batch_slice_cost: 0.01,
            period: Micros::from_millis(100),
            hog: Micros::from_millis(10),
            recent: Micros::from_secs(1),
        }
    }
}

/// Shortest slice of the front row.
const MIN_SLICE_US: f64 = 500.0;
/// Longest round of slices.
const MAX_ROUND_US: f64 = 200_000.0;
/// Bounds of the quantum, whatever the costs are said to be.
const QUANTUM_US: (f64, f64) = (10_000.0, 200_000.0);
/// Among more than so many, nobody has a turn soon anyway: turns are longer, and switching costs less.
const MANY: f64 = 8.0;
/// A turn is over after this many times its length, even if others took most of that time.
const MAX_STRETCH: f64 = 10.0;
/// Estimated moments are not asked for sooner than this.
const MIN_STEP_US: f64 = 2_000.0;
/// Who has paused for longer is not expected back soon.
const PAUSE: Micros = Micros::from_millis(100);
/// Smallest budget: a freeze costs about as much.
const MIN_BUDGET_US: f64 = 1_000.0;
/// The part of its objective that a request may wait for one slice of the back row, and the longest such
/// slice: beyond the driver's own it would wait longer than without us.
const PATIENCE: u64 = 10;
const MAX_PATIENCE: u64 = Timeslice::DEFAULT.0 - 48;
/// Bound of what a domain can be ahead or behind.
const MAX_LAG_US: f64 = 1e6;

impl Tuning {
    /// What handing over a turn costs.
    fn handover(costs: &Costs) -> f64 {
        (costs.freeze + costs.thaw + costs.switch).0 as f64
    }

    /// The mean length of a turn.
    fn quantum(&self, costs: &Costs) -> f64 {
        (Self::handover(costs) / self.turn_cost.max(1e-3)).clamp(QUANTUM_US.0, QUANTUM_US.1)
    }

    /// As good as there: moments are estimated without the switch that lies before them, and to ask
    /// again would cost more.
    fn slack(costs: &Costs) -> f64 {
        2.0 * costs.switch.0.min(1_000) as f64
    }

    /// The shortest turn worth its cost.
    fn min_turn(&self, costs: &Costs) -> f64 {
        self.quantum(costs) / 5.0
    }
}

/// What a policy must remember from one plan to the next. The caller keeps it, one per device,
/// and starts with the default.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Memory {
    at: Option<Micros>,
    turn: Option<Turn>,
    domains: BTreeMap<DomainId, Track>,
}

/// The turn of the back row.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct Turn {
    holder: DomainId,
    since: Micros,
    /// What the holder had received when it began.
    received: Micros,
}

/// What is remembered of one domain.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct Track {
    received: Micros,
    /// Device time it is owed, in µs; negative if it is ahead.
    lag: f64,
    /// Its share since the last plan; while it was idle, the share that it would have had.
    share: f64,
    /// Its part of what is charged: in the front row its share of the device, in the back row its share of what
    /// the row gets. So the back row's lags don't move when the front row takes the device.
    part: f64,
    front: bool,
    wanted: bool,
    /// Ran ahead of its budget and must wait until its lag is level.
    exhausted: bool,
    /// When its last turn began.
    turn: Micros,
    /// See [`Stage::rivalry`].
    rival: bool,
    wait: Option<Wait>,
}

/// That a domain waits for its gang.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Wait {
    Since(Micros),
    /// It did so for long, until then.
    Over(Micros),
}

impl Memory {
    /// The device time a domain is owed, in µs; negative if it is ahead.
    pub fn lag(&self, id: DomainId) -> f64 {
        self.domains.get(&id).map_or(0.0, |track| track.lag)
    }

    /// The share of the device to which a domain was entitled at the last plan; if it was idle, the share that
    /// it would have had.
    pub fn share(&self, id: DomainId) -> f64 {
        self.domains.get(&id).map_or(0.0, |track| track.share)
    }

    /// How a domain waits for its gang.
    pub(crate) fn wait(&self, id: DomainId) -> Option<Wait> {
        self.domains.get(&id)?.wait
    }

    /// Takes note of the domains that wait for their gangs from now on, and of the end of waits that were at least so long.
    pub(crate) fn note_waits(&mut self, now: Micros, waiting: &BTreeSet<DomainId>, long: Micros) {
        for (id, track) in &mut self.domains {
            track.wait = match (track.wait, waiting.contains(id)) {
                (Some(Wait::Since(at)), true) => Some(Wait::Since(at)),
                (_, true) => Some(Wait::Since(now)),
                (Some(Wait::Since(at)), false) => (at + long <= now).then_some(Wait::Over(now)),
                (over, false) => over,
            };
        }
    }

    /// Forgets domains that are gone and charges the others for the time since the last plan.
    fn charge(&mut self, snapshot: &Snapshot) {
        let elapsed = self.at.map_or(0, |at| snapshot.now.saturating_sub(at).0) as f64;
        self.at = self.at.max(Some(snapshot.now));
        let before = std::mem::take(&mut self.domains);
        let (mut delivered, mut delivered_back) = (0.0_f64, 0.0_f64);
        let charged: Vec<(DomainId, Track, f64)> = snapshot
            .domains
            .iter()
            .map(|domain| {
                let track = before.get(&domain.id).copied().unwrap_or(Track {
                    received: domain.received,
                    lag: 0.0,
                    share: 0.0,
                    part: 0.0,
                    front: true,
                    wanted: false,
                    exhausted: false,
                    turn: Micros::ZERO,
                    rival: false,
                    wait: None,
                });
                let got = domain.received.saturating_sub(track.received).0 as f64;
                let got = got.min(elapsed);
                delivered += got;
                delivered_back += if track.front { 0.0 } else { got };
                (domain.id, track, got)
            })
            .collect();
        for ((id, mut track, got), domain) in charged.into_iter().zip(&snapshot.domains) {
            let divided = if track.front {
                delivered
            } else {
                delivered_back
            };
            track.lag = match track.wanted {
                true => track.lag + track.part * divided.min(elapsed) - got,
                false => (track.lag + track.part * elapsed - got).min(0.0),
            };
            track.lag = track.lag.clamp(-MAX_LAG_US, MAX_LAG_US);
            track.received = track.received.max(domain.received);
            self.domains.insert(id, track);
        }
    }
}

/// A policy: a division brought about by turns.
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
        let before = memory.turn.map(|turn| turn.holder);
        let decide = |memory: &mut Memory| {
            let mut stage = Stage::new(&self.division, &self.tuning, snapshot, memory);
            stage.bound_debts(memory);
            stage.budgets(memory);
            let holder = stage.turn(memory);
            (stage, holder)
        };
        let (mut stage, mut holder) = decide(memory);
        // A pause counts only as long as its turn: what was decided in view of it is decided anew.
        if stage.pauses_without_turn(holder) {
            (stage, holder) = decide(memory);
        }
        stage.rivalry(before, holder, &snapshot.gangs, memory);
        let slices = stage.slices();
        let domains = (0..stage.cast.len())
            .map(|index| {
                let (run, reason) = stage.run_state(index, holder);
                DomainPlan {
                    id: stage.cast[index].domain.id,
                    timeslice: slices[index],
                    run,
                    reason,
                }
            })
            .collect();
        let next = stage.next.map(|at| Micros(at.max(snapshot.now.0 + 1)));
        Plan { domains, next }
    }
}

/// One domain while a plan is made.
struct Actor<'a> {
    domain: &'a DomainState,
    claim: Claim,
    front: bool,
    /// Has work, or is the turn's holder in a short pause.
    wants: bool,
    share: f64,
    /// See [`Track::part`].
    part: f64,
    /// What its slice is made from.
    slice_share: f64,
    recent: bool,
    /// Over its budget while others want the device.
    over_budget: bool,
    /// See [`Stage::rivalry`].
    rival: bool,
}

impl Actor<'_> {
    fn runnable(&self) -> bool {
        self.domain.demand.may_run()
    }

    fn class(&self) -> Class {
        self.claim.class
    }

    /// Must not run now, whoever's turn it is.
    fn held(&self) -> bool {
        self.domain.pinned == Some(RunState::Frozen)
    }

    /// May take the turn.
    fn waits(&self) -> bool {
        !self.front && self.runnable() && !self.held()
    }
}

/// All domains while a plan is made.
struct Stage<'a> {
    now: Micros,
    costs: &'a Costs,
    tuning: &'a Tuning,
    strict: bool,
    cast: Vec<Actor<'a>>,
    next: Option<u64>,
}

impl<'a> Stage<'a> {
    fn new(
        division: &dyn Division,
        tuning: &'a Tuning,
        snapshot: &'a Snapshot,
        memory: &mut Memory,
    ) -> Self {
        let now = snapshot.now;
        let specs: BTreeMap<_, _> = snapshot
            .tenants
            .iter()
            .map(|tenant| (tenant.id, Claim::from(&tenant.spec)))
            .collect();
        let nobody = Claim::from(&TenantSpec::default());
        let idle_for = |domain: &DomainState| now.saturating_sub(domain.demand_since);
        let linger = Micros(Tuning::handover(&snapshot.costs) as u64);
        let mut cast: Vec<Actor> = snapshot
            .domains
            .iter()
            .map(|domain| {
                let holds = memory.turn.is_some_and(|turn| turn.holder == domain.id);
                let pause = holds && idle_for(domain) < linger;
                // Who is held for its gang goes on being owed; who has no memory here can't be given anything.
                let parked = domain.pinned == Some(RunState::Frozen)
                    && !snapshot.gangs.contains(&domain.tenant);
                Actor {
                    domain,
                    claim: specs.get(&domain.tenant).copied().unwrap_or(nobody),
                    front: true,
                    wants: (domain.demand.may_run() || pause) && !parked,
                    share: 0.0,
                    part: 0.0,
                    slice_share: 0.0,
                    recent: domain.demand.may_run() || idle_for(domain) < tuning.recent,
                    over_budget: false,
                    rival: false,
                }
            })
            .collect();

        let top = cast.iter().map(Actor::class).min().unwrap_or_default();
        let strict = division.strict();
        let rotate = !snapshot.gangs.is_empty() && cast.len() > 1;
        for actor in &mut cast {
            actor.front = match top {
                Class::Latency => actor.claim.class == top,
                _ if rotate => false,
                // A guarantee is kept best by slices: that needs no accounts.
                _ => !strict || actor.claim.class == top || actor.claim.guaranteed > 0.0,
            };
        }

        // A pause only matters to somebody who waits for the turn.
        let rivals = cast.iter().any(|actor| !actor.front && actor.runnable());
        for actor in &mut cast {
            actor.wants &= actor.runnable() || (rivals && !actor.front);
        }

        let all = divide(division, &cast, |_| true);
        let wanting = divide(division, &cast, |actor| actor.wants);
        let recent = divide(division, &cast, |actor| actor.recent);
        let front: Vec<bool> = cast.iter().map(|actor| actor.front).collect();
        let back = |shares: &[f64]| -> f64 {
            let both = shares.iter().zip(&front);
            both.filter(|(_, front)| !**front)
                .map(|(share, _)| share)
                .sum()
        };
        for (index, actor) in cast.iter_mut().enumerate() {
            let or_all = |share: f64, counted| if counted { share } else { all[index] };
            actor.share = or_all(wanting[index], actor.wants);
            actor.part = match (actor.front, actor.wants) {
                (true, _) => actor.share,
                (false, true) => actor.share / back(&wanting).max(1e-9),
                (false, false) => actor.share / back(&all).max(1e-9),
            };
            actor.slice_share = or_all(recent[index], actor.recent);
            if let Some(track) = memory.domains.get_mut(&actor.domain.id) {
                track.share = actor.share;
                track.part = actor.part;
                track.front = actor.front;
                track.wanted = actor.wants;
            }
        }
        Self {
            now,
            costs: &snapshot.costs,
            tuning,
            strict,
            cast,
            next: None,
        }
    }

    /// Asks for a plan in about `delay` µs.
    fn ask_in(&mut self, delay: f64) {
        let at = self
            .now
            .0
            .saturating_add(delay.max(MIN_STEP_US).ceil() as u64);
        self.next = earlier(self.next, at);
    }

    /// Nobody is further ahead than by a turn (back row) or two budgets (front row): a debt made with
    /// a large share must not take forever to pay back with a small one. In the front row nobody
    /// is further behind either: what its neighbours took, the back row need not pay.
    fn bound_debts(&self, memory: &mut Memory) {
        for (index, actor) in self.cast.iter().enumerate() {
            let (ahead, behind) = match actor.front {
                true => (2.0 * self.budget(index), 2.0 * self.budget(index)),
                false => (self.turn_length(index), MAX_LAG_US),
            };
            if let Some(track) = memory.domains.get_mut(&actor.domain.id) {
                track.lag = track.lag.clamp(-ahead, behind);
            }
        }
    }

    /// The share of the device that a front domain must leave to others: the back row's, and one with a limit all beyond its
    /// share, whoever is there at the moment, so that what it took too much is not forgotten when others come.
    fn left_to_others(&self, index: usize) -> f64 {
        let back = self.cast.iter().filter(|actor| !actor.front && actor.wants);
        let back: f64 = back.map(|actor| actor.share).sum();
        match self.cast[index].claim.limit < 1.0 {
            true => back.max(1.0 - self.cast[index].share),
            false => back,
        }
    }

    /// How far a front domain may run ahead, in µs: so far that it then pauses for what the
    /// others are due in a period, or for a turn of the back row if that is longer.
    fn budget(&self, index: usize) -> f64 {
        let pause = self.tuning.period.0 as f64 * self.left_to_others(index);
        let budget = self.cast[index].share * pause.max(self.tuning.min_turn(self.costs));
        budget.max(MIN_BUDGET_US)
    }

    /// Finds the front domains that are over their budget while others want the device.
    fn budgets(&mut self, memory: &mut Memory) {
        for index in 0..self.cast.len() {
            let actor = &self.cast[index];
            let Some(track) = memory.domains.get_mut(&actor.domain.id) else {
                continue;
            };
            let rivals = self.cast.iter().enumerate();
            let limited = actor.claim.limit < 1.0;
            let contested = rivals
                .filter(|(at, rival)| *at != index && rival.wants && !rival.held())
                .any(|(_, rival)| !rival.front || limited);
            let budget = self.budget(index);
            let slack = Tuning::slack(self.costs).min(budget / 4.0);
            if !actor.front || !contested || track.lag >= -slack {
                track.exhausted = false;
            } else if track.lag <= slack - budget {
                track.exhausted = true;
            }
            if !actor.front || !contested || !actor.runnable() {
                continue;
            }
            let (lag, share, exhausted) = (track.lag, actor.share, track.exhausted);
            self.cast[index].over_budget = exhausted;
            match exhausted {
                true => self.ask_in(-lag / share.max(1e-9)),
                false => self.ask_in((lag + budget) / (1.0 - share).max(1e-9)),
            }
        }
        // Nobody pauses for nobody.
        let others = |actor: &Actor| actor.wants && !actor.over_budget && !actor.held();
        if !self.cast.iter().any(others) {
            for actor in &mut self.cast {
                actor.over_budget = false;
            }
        }
    }

    /// Whose turn it is in the back row.
    fn turn(&mut self, memory: &mut Memory) -> Option<usize> {
        let holder = memory.turn.and_then(|turn| {
            let holds = |actor: &Actor| !actor.front && actor.domain.id == turn.holder;
            Some((turn, self.cast.iter().position(holds)?))
        });
        let forced = self
            .cast
            .iter()
            .position(|actor| actor.waits() && actor.domain.pinned == Some(RunState::Enabled));
        let chosen = match (forced, holder) {
            (Some(forced), _) => Some(forced),
            (None, Some((turn, index))) if self.keeps(index, turn, memory) => Some(index),
            _ => self.fairest(memory),
        };
        let Some(index) = chosen else {
            memory.turn = None;
            return None;
        };
        let domain = self.cast[index].domain;
        // A turn that is over and goes to the same domain again is a new one.
        let goes_on = |(turn, held): (Turn, usize)| {
            held == index && (forced.is_some() || self.keeps(index, turn, memory))
        };
        if !holder.is_some_and(goes_on) {
            memory.turn = Some(Turn {
                holder: domain.id,
                since: self.now,
                received: domain.received,
            });
            if let Some(track) = memory.domains.get_mut(&domain.id) {
                track.turn = self.now;
            }
        }
        if let Some(turn) = memory.turn {
            self.ask_at_turn_end(index, turn, memory);
        }
        Some(index)
    }

    /// Whether somebody paused when it lost its turn.
    fn pauses_without_turn(&self, holder: Option<usize>) -> bool {
        let mut cast = self.cast.iter().enumerate();
        cast.any(|(index, actor)| actor.wants && !actor.runnable() && holder != Some(index))
    }

    /// How long a turn of this domain is, in µs of device time.
    fn turn_length(&self, index: usize) -> f64 {
        let rivals = self.cast.iter().filter(|actor| !actor.front && actor.wants);
        let rivals = rivals.count() as f64;
        let quantum = self.tuning.quantum(self.costs) * (rivals / MANY).max(1.0);
        let proportional = self.cast[index].part * rivals * quantum;
        proportional.clamp(self.tuning.min_turn(self.costs), 4.0 * quantum)
    }

    /// Others that may take the turn.
    fn rivals(&self, index: usize) -> impl Iterator<Item = &Actor<'a>> {
        let others = self.cast.iter().enumerate();
        others.filter_map(move |(at, actor)| (at != index && actor.waits()).then_some(actor))
    }

    /// Whether a higher class waits behind this domain and `strict` says that it need not.
    fn outranked(&self, index: usize) -> bool {
        let class = self.cast[index].class();
        self.strict && self.rivals(index).any(|rival| rival.class() < class)
    }

    /// Whether the turn's holder keeps it.
    fn keeps(&self, index: usize, turn: Turn, memory: &Memory) -> bool {
        let actor = &self.cast[index];
        if !actor.wants || actor.held() {
            return false;
        }
        if self.rivals(index).next().is_none() {
            return true;
        }
        let used = actor.domain.received.saturating_sub(turn.received).0 as f64;
        let held = self.now.saturating_sub(turn.since).0 as f64;
        let length = self.turn_length(index);
        let slack = Tuning::slack(self.costs);
        let borrowed = used + slack >= self.tuning.min_turn(self.costs)
            && memory.lag(actor.domain.id) <= slack
            && self.outranked(index);
        used + slack < length && held < MAX_STRETCH * length && !borrowed
    }

    /// The domain of the back row that is furthest behind.
    fn fairest(&self, memory: &Memory) -> Option<usize> {
        let key = |index: &usize| {
            let actor = &self.cast[*index];
            let track = memory.domains.get(&actor.domain.id);
            let (lag, turn) = track.map_or((0.0, Micros::ZERO), |track| (track.lag, track.turn));
            (lag / actor.part.max(1e-9), turn, actor.domain.id)
        };
        (0..self.cast.len())
            .filter(|index| self.cast[*index].waits())
            .min_by(|a, b| {
                let (a, b) = (key(a), key(b));
                b.0.total_cmp(&a.0).then((a.1, a.2).cmp(&(b.1, b.2)))
            })
    }

    /// Asks for a plan when the holder's turn will be over.
    fn ask_at_turn_end(&mut self, index: usize, turn: Turn, memory: &Memory) {
        if self.rivals(index).next().is_none() {
            return;
        }
        let actor = &self.cast[index];
        if !actor.runnable() {
            let end = actor.domain.demand_since.0 as f64 + Tuning::handover(self.costs);
            self.next = earlier(self.next, end as u64);
            return;
        }
        let used = actor.domain.received.saturating_sub(turn.received).0 as f64;
        let length = self.turn_length(index);
        let held = self.now.saturating_sub(turn.since).0 as f64;
        let mut left = (length - used).min(MAX_STRETCH * length - held);
        if self.outranked(index) {
            let level = memory.lag(actor.domain.id) / (1.0 - actor.part).max(1e-9);
            left = left.min(level.max(self.tuning.min_turn(self.costs) - used));
        }
        // While the front row runs, the turn hardly gets on.
        let front_runs =
            |actor: &Actor| actor.front && actor.runnable() && !actor.over_budget && !actor.held();
        if self.cast.iter().any(front_runs) {
            left = left.max(self.tuning.min_turn(self.costs));
        }
        self.ask_in(left);
    }

    /// The slice of the back row: what every latency tenant's objective leaves time for. Programs that launch
    /// kernel by kernel have gaps, and the longer the slice, the fewer of them are lost to switching.
    fn patience(&self) -> Timeslice {
        let front = self.cast.iter().filter(|actor| actor.front);
        // Who has no objective wants the device at once.
        let least = front.map(|actor| actor.claim.objective.map_or(0, |it| it.0 / PATIENCE));
        Timeslice(
            least
                .min()
                .unwrap_or(0)
                .clamp(Timeslice::MIN.0, MAX_PATIENCE),
        )
    }

    /// The slice of every domain.
    fn slices(&mut self) -> Vec<Timeslice> {
        let front = || self.cast.iter().filter(|actor| actor.front);
        let alone = front().count() == 1;
        let latency = front().any(|actor| actor.class() == Class::Latency);
        let only_batch = front().all(|actor| actor.class() == Class::Batch);
        let cost = match only_batch {
            true => self.tuning.batch_slice_cost,
            false => self.tuning.slice_cost,
        };
        let recent = || front().filter(|actor| actor.recent);
        let sum: f64 = recent().map(|actor| actor.slice_share).sum();
        let least = recent().map(|a| a.slice_share).fold(1.0, f64::min);
        let sum = if sum > 0.0 { sum } else { 1.0 };
        let affordable = recent().count() as f64 * self.costs.switch.0 as f64 / cost.max(1e-3);
        let round = affordable
            .max(MIN_SLICE_US * sum / least.max(1e-9))
            .min(MAX_ROUND_US);
        let by_share = |actor: &Actor| {
            let slice = (actor.slice_share / sum * round).max(MIN_SLICE_US) + RESTORE_US;
            Timeslice((slice as u64).min(Timeslice::MAX.0))
        };

        let patience = self.patience();
        let mut next = self.next;
        let slices = self.cast.iter().map(|actor| {
            let demand = actor.domain.demand;
            let since = actor.domain.demand_since;
            match (actor.front, alone, latency) {
                (false, ..) => patience,
                // Nobody to share with: leave it as the driver made it.
                (true, true, false) if self.cast.len() == 1 => Timeslice::DEFAULT,
                (true, true, _) => Timeslice::MAX,
                (true, false, true) => {
                    let from = since + self.tuning.hog;
                    match demand {
                        Demand::Unknown => by_share(actor),
                        Demand::Busy if self.now >= from => by_share(actor),
                        Demand::Busy => {
                            next = earlier(next, from.0);
                            Timeslice::MAX
                        }
                        Demand::Idle => Timeslice::MAX,
                    }
                }
                (true, false, false) => {
                    if demand == Demand::Idle && actor.recent {
                        next = earlier(next, (since + self.tuning.recent).0);
                    }
                    by_share(actor)
                }
            }
        });
        let slices = slices.collect();
        self.next = next;
        slices
    }

    /// Finds the domains whose work met another's lately: they wait for the turn, or lost it in a pause. If they pause they may
    /// be back in the middle of another's turn: enabled then, the two would meet at their short slices until that is seen, and
    /// a latency domain that comes meanwhile waits for their switches. Whoever has paused for longer, or met nobody, is
    /// enabled: what it does then need not wait for a plan.
    fn rivalry(
        &mut self,
        before: Option<DomainId>,
        holder: Option<usize>,
        gangs: &BTreeSet<TenantId>,
        memory: &mut Memory,
    ) {
        let taken = holder.map(|index| self.cast[index].domain.id);
        let loser = before.filter(|_| taken.is_some());
        for actor in &mut self.cast {
            let id = actor.domain.id;
            let Some(track) = memory.domains.get_mut(&id) else {
                continue;
            };
            let forgotten = actor.domain.demand_since + PAUSE;
            let met = actor.runnable() || loser == Some(id) || track.rival && self.now < forgotten;
            let alone = actor.front || taken == Some(id) || gangs.contains(&actor.domain.tenant);
            actor.rival = met && !alone;
            track.rival = actor.rival;
            if actor.rival && !actor.runnable() {
                self.next = earlier(self.next, forgotten.0);
            }
        }
    }

    /// Whether a domain may run, and why.
    fn run_state(&self, index: usize, holder: Option<usize>) -> (RunState, &'static str) {
        use RunState::{Enabled, Frozen};
        let actor = &self.cast[index];
        if !actor.runnable() {
            return match actor.rival {
                true => (Frozen, "pauses while others want the turn"),
                false => (Enabled, "has no work"),
            };
        }
        match (actor.domain.pinned, actor.front) {
            (Some(Frozen), _) => (Frozen, "waits for its gang"),
            (Some(Enabled), true) => (Enabled, "runs with its gang"),
            (_, true) if actor.over_budget => (Frozen, "over its budget while others wait"),
            (_, true) if actor.class() == Class::Latency => (Enabled, "takes the device at once"),
            (_, true) => (Enabled, "shares by slices"),
            (_, false) if holder == Some(index) => (Enabled, "has its turn"),
            (_, false) => (Frozen, "waits for its turn"),
        }
    }
}

/// The earlier of two moments, of which the first may be none.
fn earlier(next: Option<u64>, at: u64) -> Option<u64> {
    Some(next.map_or(at, |next| next.min(at)))
}

/// The share of each domain if just those that `counts` names want the device. A tenant's share is split evenly
/// among its domains.
fn divide(division: &dyn Division, cast: &[Actor], counts: impl Fn(&Actor) -> bool) -> Vec<f64> {
    let mut tenants: BTreeMap<_, (usize, usize)> = BTreeMap::new();
    let mut claims = Vec::new();
    for actor in cast.iter().filter(|actor| counts(actor)) {
        let entry = tenants.entry(actor.domain.tenant).or_insert_with(|| {
            claims.push(actor.claim);
            (claims.len() - 1, 0)
        });
        entry.1 += 1;
    }
    let shares = divide::shares(division, &claims);
    cast.iter()
        .map(|actor| match tenants.get(&actor.domain.tenant) {
            Some((claim, domains)) if counts(actor) => shares[*claim] / *domains as f64,
            _ => 0.0,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Lever;
    use crate::policy::{MaxMin, Priority};
    use crate::testing::{domain, snapshot};

    fn plan(snapshot: &Snapshot, memory: &mut Memory) -> Plan {
        Shared::new(Priority).plan(snapshot, memory)
    }

    fn shape(plan: &Plan) -> Vec<(u64, RunState)> {
        let shape = |domain: &DomainPlan| (domain.timeslice.0, domain.run);
        plan.domains.iter().map(shape).collect()
    }

    use RunState::{Enabled, Frozen};

    #[test]
    fn a_tenant_alone_is_left_alone() {
        let alone = snapshot(&[Class::Batch], vec![domain(1, 0)]);
        let got = plan(&alone, &mut Memory::default());
        assert_eq!(got.levers(&alone), []);
        assert_eq!(got.next, None);
    }

    #[test]
    fn latency_goes_before_one_batch_domain() {
        let classes = [Class::Latency, Class::Batch, Class::Batch];
        let domains = vec![domain(1, 0), domain(2, 1), domain(3, 2)];
        let got = plan(&snapshot(&classes, domains), &mut Memory::default());
        assert_eq!(
            shape(&got),
            [(1_000_000, Enabled), (1, Enabled), (1, Frozen)]
        );
    }

    #[test]
    fn an_objective_leaves_the_back_row_a_slice() {
        let classes = [Class::Latency, Class::Latency, Class::Batch];
        let domains = vec![domain(1, 0), domain(2, 1), domain(3, 2)];
        let mut now = snapshot(&classes, domains);
        let slice = |now: &Snapshot| shape(&plan(now, &mut Memory::default()))[2].0;
        now.tenants[0].spec.latency_objective_us = Some(8_000);
        assert_eq!(slice(&now), 1, "the other one has no time");
        now.tenants[1].spec.latency_objective_us = Some(20_000);
        assert_eq!(slice(&now), 800);
        now.tenants[0].spec.latency_objective_us = Some(3_000_000);
        assert_eq!(slice(&now), 2_000);
        now.tenants[1].spec.latency_objective_us = Some(1_000_000);
        assert_eq!(slice(&now), 2_000, "never longer than the driver's own");
    }

    #[test]
    fn standard_tenants_share_by_slices_that_cost_five_percent() {
        let mut two = snapshot(&[Class::Standard; 2], vec![domain(1, 0), domain(2, 1)]);
        two.tenants[0].spec.guaranteed = 0.7;
        two.tenants[1].spec.guaranteed = 0.3;
        let got = plan(&two, &mut Memory::default());
        let slices: Vec<f64> = got.domains.iter().map(|d| d.timeslice.0 as f64).collect();
        let share = slices[0] / (slices[0] + slices[1]);
        assert!((share - 0.7).abs() < 0.003, "{share}");
        let cost = 2.0 * two.costs.switch.0 as f64 / (slices[0] + slices[1]);
        assert!((cost - 0.05).abs() < 0.001, "{cost}");
        assert_eq!(got.next, None, "slices alone do it");
    }

    #[test]
    fn batch_tenants_alone_are_neither_frozen_nor_switched_often() {
        let four = snapshot(
            &[Class::Batch; 4],
            (0..4).map(|id| domain(id, id)).collect(),
        );
        let got = plan(&four, &mut Memory::default());
        assert!(shape(&got).iter().all(|shape| *shape == (18_829, Enabled)));
    }

    #[test]
    fn a_standard_domain_takes_a_turn_that_batch_only_borrowed() {
        let classes = [Class::Latency, Class::Standard, Class::Batch];
        let mut now = snapshot(&classes, vec![domain(1, 0), domain(2, 1), domain(3, 2)]);
        now.domains[0].demand = Demand::Idle;
        now.domains[1].demand = Demand::Idle;
        let mut memory = Memory::default();
        assert_eq!(shape(&plan(&now, &mut memory))[2], (1, Enabled));
        now.now = Micros::from_secs(1);
        now.domains[2].received = Micros::from_secs(1);
        now.domains[1].demand = Demand::Busy;
        now.domains[1].demand_since = now.now;
        let got = plan(&now, &mut memory);
        assert_eq!(shape(&got)[1..], [(1, Enabled), (1, Frozen)]);
        // The borrower comes back for its floor, but not before the other had a full turn.
        assert!(got.next.expect("a turn ends") >= now.now + Micros::from_millis(40));
    }

    #[test]
    fn a_short_pause_does_not_cost_the_turn_and_a_long_one_does() {
        let classes = [Class::Latency, Class::Batch, Class::Batch];
        let mut now = snapshot(&classes, vec![domain(1, 0), domain(2, 1), domain(3, 2)]);
        let mut memory = Memory::default();
        plan(&now, &mut memory);
        now.now = Micros(5_000);
        now.domains[1].demand = Demand::Idle;
        now.domains[1].demand_since = Micros(4_500);
        let got = plan(&now, &mut memory);
        assert_eq!(shape(&got)[1..], [(1, Enabled), (1, Frozen)]);
        assert_eq!(got.next, Some(Micros(4_500 + 1_008)));
        now.now = Micros(5_600);
        let got = plan(&now, &mut memory);
        assert_eq!(shape(&got)[1..], [(1, Frozen), (1, Enabled)]);
        let last = Lever::Freeze(DomainId(2));
        assert_eq!(got.levers(&now).last(), Some(&last), "nobody waits for it");
    }

    #[test]
    fn who_pauses_while_others_want_the_turn_stays_away_for_a_while() {
        let classes = [
            Class::Latency,
            Class::Batch,
            Class::Batch,
            Class::Batch,
            Class::Batch,
        ];
        let mut domains: Vec<_> = (1..=5).map(|id| domain(id, id - 1)).collect();
        domains[4].demand = Demand::Idle;
        let mut now = snapshot(&classes, domains);
        let mut memory = Memory::default();
        let states =
            |plan: &Plan| -> Vec<_> { plan.domains[1..].iter().map(|it| it.run).collect() };
        let first = plan(&now, &mut memory);
        assert_eq!(states(&first), [Enabled, Frozen, Frozen, Enabled]);
        // The second had the turn; the fourth waited for it.
        now.now = Micros(10_000);
        for index in [1, 3] {
            now.domains[index].demand = Demand::Idle;
            now.domains[index].demand_since = Micros(5_000);
        }
        let handed_over = plan(&now, &mut memory);
        let apart = [Frozen, Enabled, Frozen, Enabled];
        assert_eq!(states(&handed_over), apart, "the fifth has met nobody");
        let with = |change: &dyn Fn(&mut Snapshot)| {
            let (mut later, mut memory) = (now.clone(), memory.clone());
            later.now = Micros(20_000);
            change(&mut later);
            plan(&later, &mut memory)
        };
        let kept = with(&|_| {});
        assert_eq!(states(&kept), apart);
        assert!(kept.next <= Some(Micros(105_000)), "{:?}", kept.next);
        let pause = with(&|now| now.domains[2].demand = Demand::Idle);
        assert_eq!(states(&pause), apart, "all may be back at once");
        let long = with(&|now| now.now = Micros(105_000));
        assert_eq!(states(&long), [Enabled; 4]);
        let back = with(&|now| now.domains[1].demand = Demand::Busy);
        assert_eq!(back.domains[1].reason, "waits for its turn");
    }

    #[test]
    fn a_latency_domain_over_its_budget_pauses_until_it_is_level() {
        let classes = [Class::Latency, Class::Batch];
        let mut now = snapshot(&classes, vec![domain(1, 0), domain(2, 1)]);
        now.tenants[1].spec.guaranteed = 0.4;
        let mut memory = Memory::default();
        let first = plan(&now, &mut memory);
        assert_eq!(shape(&first)[0], (1_000_000, Enabled));
        let pause = first.next.expect("the budget ends");
        assert!((55_000..65_000).contains(&pause.0), "{pause}");
        now.now = pause;
        now.domains[0].received = pause;
        let second = plan(&now, &mut memory);
        assert_eq!(shape(&second), [(1_000_000, Frozen), (1, Enabled)]);
        let level = second.next.expect("the pause ends");
        now.domains[1].received = level.saturating_sub(pause);
        now.now = level;
        assert_eq!(shape(&plan(&now, &mut memory))[0], (1_000_000, Enabled));
        // An idle rival has no claim.
        now.domains[0].received += Micros::from_secs(1);
        now.domains[1].demand = Demand::Idle;
        now.now = level + Micros::from_secs(1);
        assert_eq!(shape(&plan(&now, &mut memory))[0], (1_000_000, Enabled));
    }

    #[test]
    fn nobody_pauses_for_one_that_must_not_run() {
        let classes = [Class::Latency, Class::Batch];
        let mut now = snapshot(&classes, vec![domain(1, 0), domain(2, 1)]);
        now.tenants[1].spec.guaranteed = 0.4;
        now.domains[1].pinned = Some(Frozen);
        for gangs in [vec![], vec![now.domains[1].tenant]] {
            now.gangs = gangs.into_iter().collect();
            let mut memory = Memory::default();
            plan(&now, &mut memory);
            let mut later = now.clone();
            later.now = Micros::from_secs(1);
            later.domains[0].received = later.now;
            assert_eq!(shape(&plan(&later, &mut memory))[0], (1_000_000, Enabled));
        }
    }

    #[test]
    fn what_a_limited_domain_took_too_much_is_not_forgotten_when_another_comes() {
        let classes = [Class::Latency, Class::Latency, Class::Batch];
        let mut now = snapshot(&classes, vec![domain(1, 0), domain(2, 1), domain(3, 2)]);
        now.tenants[0].spec.limit = 0.3;
        now.domains[1].demand = Demand::Idle;
        let mut memory = Memory::default();
        plan(&now, &mut memory);
        now.now = Micros::from_millis(100);
        now.domains[0].received = now.now;
        assert_eq!(shape(&plan(&now, &mut memory))[0].1, Frozen);
        let debt = memory.lag(DomainId(1));
        now.domains[1].demand = Demand::Busy;
        plan(&now, &mut memory);
        let later = memory.lag(DomainId(1));
        assert!(
            later < -30_000.0 && (later - debt).abs() < 100.0,
            "{debt}, {later}"
        );
    }

    #[test]
    fn one_of_several_latency_domains_that_never_pauses_is_sliced() {
        let classes = [Class::Latency, Class::Latency];
        let mut now = snapshot(&classes, vec![domain(1, 0), domain(2, 1)]);
        now.domains[1].demand = Demand::Idle;
        let mut memory = Memory::default();
        let got = plan(&now, &mut memory);
        assert_eq!(shape(&got)[0].0, 1_000_000);
        assert_eq!(got.next, Some(Micros::from_millis(10)));
        now.now = Micros::from_millis(10);
        let got = plan(&now, &mut memory);
        assert!(shape(&got)[0].0 < 10_000);
        assert_eq!(shape(&got)[1].0, 1_000_000);
    }

    #[test]
    fn max_min_lets_batch_share_by_slices() {
        let classes = [Class::Standard, Class::Batch];
        let now = snapshot(&classes, vec![domain(1, 0), domain(2, 1)]);
        let got = Shared::new(MaxMin).plan(&now, &mut Memory::default());
        assert_eq!(got.domains[0].timeslice, got.domains[1].timeslice);
        assert!(got.domains.iter().all(|domain| domain.run == Enabled));
    }

    #[test]
    fn what_is_gone_is_forgotten() {
        let classes = [Class::Latency, Class::Batch, Class::Batch];
        let mut now = snapshot(&classes, vec![domain(1, 0), domain(2, 1), domain(3, 2)]);
        let mut memory = Memory::default();
        plan(&now, &mut memory);
        now.domains.clear();
        now.tenants.clear();
        assert_eq!(plan(&now, &mut memory), Plan::default());
        assert_eq!((memory.turn, memory.domains.len()), (None, 0));
    }
}
