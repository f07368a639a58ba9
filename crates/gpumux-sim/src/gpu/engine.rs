//! How one engine is shared: whose turn it is, for how long, and what a change costs.

use super::{
    hardware::{Hardware, Nanos},
    model::{Engine, Gpu, Group, GroupId, Phase, Ready, Scheduler},
};

impl Scheduler {
    pub(super) fn new(engine: Engine, hardware: &Hardware) -> Self {
        Self {
            engine,
            capacity: match engine {
                Engine::Compute => hardware.sms.max(1),
                Engine::HostToDevice | Engine::DeviceToHost => 1,
            },
            round: Vec::new(),
            resident: None,
            last: None,
            phase: Phase::Idle,
        }
    }

    pub(super) fn add(&mut self, group: GroupId) {
        self.round.push(group);
    }

    pub(super) fn remove(&mut self, group: GroupId) {
        if self.last == Some(group) {
            // The round goes on where the group was.
            let at = self.round.iter().position(|other| *other == group);
            self.last = at
                .and_then(|at| at.checked_sub(1))
                .map(|before| self.round[before]);
        }
        self.round.retain(|other| *other != group);
        if self.resident == Some(group) {
            self.resident = None;
            if matches!(self.phase, Phase::Running { .. }) {
                self.phase = Phase::Idle;
            }
        }
    }

    pub(super) fn running(&self) -> Option<GroupId> {
        match self.phase {
            Phase::Running { .. } => self.resident,
            Phase::Idle | Phase::Switching { .. } => None,
        }
    }

    /// Groups in the order in which they get their turn, the last one at the end.
    fn turns(&self) -> impl Iterator<Item = GroupId> + '_ {
        let start = self
            .last
            .and_then(|last| self.round.iter().position(|group| *group == last))
            .map_or(0, |at| at + 1);
        self.round[start..]
            .iter()
            .chain(&self.round[..start])
            .copied()
    }
}

impl Group {
    fn runnable(&self) -> bool {
        !self.frozen && !self.ready.is_empty()
    }

    fn occupied(&self) -> u32 {
        self.ready.iter().map(|ready| ready.sms).sum()
    }
}

impl Ready {
    pub(super) fn started(&self) -> bool {
        self.sms > 0 || self.left < self.total
    }
}

impl Gpu {
    /// Lets time pass until `to` during which nothing changes.
    pub(super) fn pass(&mut self, to: Nanos) {
        for scheduler in self.schedulers.values() {
            let Phase::Running { restored, .. } = scheduler.phase else {
                continue;
            };
            let compute = scheduler.engine == Engine::Compute;
            let elapsed = to.saturating_sub(restored.max(self.now));
            let Some(group) = scheduler
                .resident
                .and_then(|group| self.groups.get_mut(&group))
                .filter(|_| elapsed > 0)
            else {
                continue;
            };
            for ready in &mut group.ready {
                let work = elapsed.saturating_mul(ready.pace.into()).min(ready.left);
                ready.left -= work;
                group.received.work += work;
                if compute
                    && ready.sms > 0
                    && let Some(stream) = self.streams.get_mut(&ready.stream)
                {
                    stream.received.work += work;
                    stream.received.busy += elapsed;
                }
            }
            group.received.busy += elapsed;
        }
        self.now = to;
    }

    /// The next moment at which an engine's state changes by itself.
    pub(super) fn next_change(&self) -> Option<Nanos> {
        self.schedulers
            .values()
            .filter_map(|scheduler| match scheduler.phase {
                Phase::Idle => None,
                Phase::Switching { until } => Some(until),
                Phase::Running { restored, .. } => {
                    let finish = self
                        .resident(scheduler)
                        .and_then(|group| first_finish(group, restored.max(self.now)));
                    [finish, self.deadline(scheduler)]
                        .into_iter()
                        .flatten()
                        .min()
                }
            })
            .min()
    }

    /// A moment before which no work on `engine` completes.
    pub(super) fn earliest_completion(&self, engine: Engine) -> Option<Nanos> {
        let scheduler = &self.schedulers[&engine];
        let resident = self.resident(scheduler);
        let (first, others_from) = match scheduler.phase {
            Phase::Idle => return None,
            Phase::Switching { until } => (
                resident
                    .filter(|group| group.runnable())
                    .and_then(|group| self.soonest(group, until)),
                Some(until),
            ),
            Phase::Running { restored, .. } => {
                let finish = resident.and_then(|group| first_finish(group, restored.max(self.now)));
                let deadline = self.deadline(scheduler);
                let others = deadline.map(|at| {
                    at.saturating_add(self.switch_cost(engine, resident.map_or(0, Group::occupied)))
                });
                (finish, others)
            }
        };
        let others = others_from.and_then(|from| {
            scheduler
                .round
                .iter()
                .filter(|id| Some(**id) != scheduler.resident)
                .map(|id| &self.groups[id])
                .filter(|group| group.runnable())
                .filter_map(|group| self.soonest(group, from))
                .min()
        });
        [first, others].into_iter().flatten().min()
    }

    /// When a group that gets its engine at `from` completes its first work, at the soonest.
    fn soonest(&self, group: &Group, from: Nanos) -> Option<Nanos> {
        let from = from.saturating_add(self.restore_cost(group));
        group
            .ready
            .iter()
            .map(|ready| from.saturating_add(ready.left.div_ceil(ready.useful.into())))
            .min()
    }

    /// Follows up a change: completes what is done, and gives every engine to whom it is due now.
    pub(super) fn settle(&mut self) {
        for engine in Engine::ALL {
            self.complete(engine);
        }
        // Completions may have made work ready on any engine, so turns are decided last. No
        // decision completes work: all that is ready has work left.
        for engine in Engine::ALL {
            self.decide(engine);
        }
    }

    fn complete(&mut self, engine: Engine) {
        let Some(id) = self.schedulers[&engine].running() else {
            return;
        };
        let Some(group) = self.groups.get_mut(&id) else {
            return;
        };
        let done: Vec<Ready> = group
            .ready
            .extract_if(.., |ready| ready.left == 0)
            .collect();
        for ready in done {
            self.complete_head(ready.stream);
        }
    }

    fn decide(&mut self, engine: Engine) {
        let now = self.now;
        let scheduler = &self.schedulers[&engine];
        match scheduler.phase {
            Phase::Switching { until } if now < until => {}
            Phase::Switching { .. } => {
                self.scheduler(engine).resident = None;
                self.begin_next(engine);
            }
            Phase::Idle => self.begin_next(engine),
            Phase::Running {
                since,
                restored,
                exhausted,
            } => {
                let Some(id) = scheduler.resident else {
                    return;
                };
                let capacity = scheduler.capacity;
                let group = &self.groups[&id];
                let leaves = if group.frozen {
                    true
                } else if group.ready.is_empty() {
                    if !self.contended(&self.schedulers[&engine]) {
                        self.scheduler(engine).phase = Phase::Idle;
                        return;
                    }
                    true
                } else {
                    let exhausted = if engine == Engine::Compute && self.exhausted(group) {
                        exhausted.or(Some(now.max(restored)))
                    } else {
                        None
                    };
                    self.scheduler(engine).phase = Phase::Running {
                        since,
                        restored,
                        exhausted,
                    };
                    self.deadline(&self.schedulers[&engine])
                        .is_some_and(|deadline| deadline <= now)
                };
                if leaves {
                    self.take_off(engine, id);
                } else {
                    self.share(id, capacity);
                }
            }
        }
    }

    /// Takes the running group off its engine, if one runs; it goes on when its turn comes again.
    pub(super) fn interrupt(&mut self, engine: Engine) {
        if let Some(id) = self.schedulers[&engine].running() {
            self.take_off(engine, id);
        }
    }

    /// Takes the resident group off its engine.
    fn take_off(&mut self, engine: Engine, id: GroupId) {
        let occupied = self.groups[&id].occupied();
        let until = self.now + self.switch_cost(engine, occupied);
        if let Some(group) = self.groups.get_mut(&id) {
            if group.ready.iter().any(Ready::started) {
                group.interrupted = true;
                group.received.preemptions += 1;
            }
            for ready in &mut group.ready {
                (ready.sms, ready.pace) = (0, 0);
            }
        }
        self.scheduler(engine).phase = Phase::Switching { until };
    }

    /// Gives an engine to the next group that has work. When it still holds another
    /// group's state, that has to go first.
    fn begin_next(&mut self, engine: Engine) {
        let scheduler = &self.schedulers[&engine];
        let next = match scheduler.resident {
            // An idle engine goes on with what it holds at no cost.
            Some(id) if self.groups[&id].runnable() => Some(id),
            _ => scheduler.turns().find(|id| self.groups[id].runnable()),
        };
        let now = self.now;
        let Some(id) = next else {
            self.scheduler(engine).phase = Phase::Idle;
            return;
        };
        match scheduler.resident {
            Some(resident) if resident != id => {
                self.take_off(engine, resident);
                return;
            }
            Some(_) => {}
            None => {
                if let Some(group) = self.groups.get_mut(&id) {
                    group.received.switches += 1;
                }
            }
        }
        let restored = now + self.restore_cost(&self.groups[&id]);
        if let Some(group) = self.groups.get_mut(&id) {
            group.interrupted = false;
        }
        let scheduler = self.scheduler(engine);
        scheduler.resident = Some(id);
        scheduler.last = Some(id);
        scheduler.phase = Phase::Running {
            since: now,
            restored,
            exhausted: None,
        };
        let capacity = scheduler.capacity;
        self.share(id, capacity);
        // Sets when it is exhausted.
        self.decide(engine);
    }

    /// When the running group loses its engine; `None` while no other has work for it.
    fn deadline(&self, scheduler: &Scheduler) -> Option<Nanos> {
        let Phase::Running {
            since, exhausted, ..
        } = scheduler.phase
        else {
            return None;
        };
        let group = self.resident(scheduler)?;
        if !self.contended(scheduler) {
            return None;
        }
        let slice = group.timeslice.0.saturating_mul(1000).max(1);
        let slices = (self.now - since).div_ceil(slice).max(1);
        let over = since.saturating_add(slices.saturating_mul(slice));
        let lost = exhausted.map(|at| at + self.hardware.linger);
        Some(lost.map_or(over, |lost| over.min(lost).max(self.now)))
    }

    /// Whether a group other than the resident one has work for the engine.
    pub(super) fn contended(&self, scheduler: &Scheduler) -> bool {
        scheduler
            .round
            .iter()
            .any(|id| Some(*id) != scheduler.resident && self.groups[id].runnable())
    }

    /// Whether all that a group has is running, with nothing behind it.
    fn exhausted(&self, group: &Group) -> bool {
        group
            .ready
            .iter()
            .all(|ready| ready.started() && self.streams[&ready.stream].queue.len() == 1)
    }

    fn switch_cost(&self, engine: Engine, occupied: u32) -> Nanos {
        match engine {
            Engine::Compute => self.hardware.switch(occupied),
            Engine::HostToDevice | Engine::DeviceToHost => self.hardware.copy_switch,
        }
    }

    /// What a group must spend at the start of its slice.
    fn restore_cost(&self, group: &Group) -> Nanos {
        if group.interrupted && group.engine == Engine::Compute {
            self.hardware.restore
        } else {
            0
        }
    }

    /// Shares the SMs among a group's kernels: the one that became ready first gets all that it can use and its partition has left.
    /// The memory's bandwidth is shared by what each would take with its SMs.
    fn share(&mut self, id: GroupId, capacity: u32) {
        let Some(group) = self.groups.get_mut(&id) else {
            return;
        };
        let mut free = capacity;
        let mut left = self.partitions.clone();
        for ready in &mut group.ready {
            let bound = ready.partition.and_then(|id| left.get_mut(&id));
            ready.sms = ready.width.min(free);
            if let Some(bound) = bound {
                ready.sms = ready.sms.min(*bound);
                *bound -= ready.sms;
            }
            free -= ready.sms;
            ready.pace = ready.sms.min(ready.useful);
        }
        let moving = || group.ready.iter().filter(|ready| ready.moving);
        let (most, wanted) = (self.hardware.saturating(), moving().map(|it| it.pace).sum());
        if most < wanted {
            let moving = group.ready.iter_mut().filter(|it| it.moving && it.pace > 0);
            moving.for_each(|it| it.pace = (it.pace * most / wanted).max(1));
        }
    }

    fn resident(&self, scheduler: &Scheduler) -> Option<&Group> {
        scheduler.resident.and_then(|id| self.groups.get(&id))
    }
}

/// When the first of a running group's kernels completes, if nothing interrupts it.
fn first_finish(group: &Group, from: Nanos) -> Option<Nanos> {
    group
        .ready
        .iter()
        .filter(|ready| ready.pace > 0)
        .map(|ready| from.saturating_add(ready.left.div_ceil(ready.pace.into())))
        .min()
}
