//! One GPU in virtual time: channel groups that share compute and copy engines by time, and
//! kernels of one group that share its SMs.
//!
//! The model is exact and deterministic: time is in integer nanoseconds, work in SM-nanoseconds, and
//! nothing happens between two calls but what [`Gpu::advance`] works off. It knows neither a
//! clock nor processes; the simulator drives it with virtual time, the emulated device with real time.
//!
//! How the hardware shares one engine, as measured on an H100:
//! - Groups that have work take turns, in the order in which they were made. A group keeps the engine until
//!   its slice is over *and* another group has work. While no other has, slices follow each other.
//! - A group without work loses the engine at once when another has some. So does, after
//!   [`Hardware::linger`], a group whose last kernel runs with nothing queued behind it. An event or any
//!   other work behind it keeps the engine (this is why one hold kernel does not hold, and two do).
//! - A switch costs more the more SMs the outgoing group fills ([`Hardware::switch`]); kernels are
//!   interrupted at any instruction and resume where they were. The group that resumes first restores its state, within its slice.
//! - To freeze or thaw a group, or to set a slice while several have work, RM interrupts the group that runs, whichever it is:
//!   the round goes on behind it.
//! - Kernels of different streams of one group run at the same time when SMs are free, in the order in
//!   which they became ready. One of a stream of higher priority goes before those that have not begun (as CUDA documents).
//!
//! Several programs in one group (MPS) are several sets of streams that submit to the same group. A program can
//! be confined to a number of SMs ([`Gpu::add_partition`]): all its streams together get no more of them.

mod engine;
mod hardware;
mod model;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use gpumux_core::Timeslice;

pub use hardware::{Hardware, Nanos};
pub use model::{
    Engine, Event, EventKind, Gpu, GpuError, GroupId, PartitionId, Progress, Received, StreamId,
    StreamReceived, Work, WorkId,
};
use model::{Group, Item, Ready, Scheduler, Stream, UNKNOWN_LENGTH};

impl Gpu {
    /// An idle GPU at time 0.
    pub fn new(hardware: Hardware) -> Self {
        let schedulers = Engine::ALL
            .into_iter()
            .map(|engine| (engine, Scheduler::new(engine, &hardware)))
            .collect();
        Self {
            hardware,
            now: 0,
            next_id: 1,
            schedulers,
            groups: BTreeMap::new(),
            streams: BTreeMap::new(),
            partitions: BTreeMap::new(),
            live: BTreeMap::new(),
            waiters: BTreeMap::new(),
            events: Vec::new(),
        }
    }

    /// Its constants.
    pub fn hardware(&self) -> &Hardware {
        &self.hardware
    }

    /// Works off everything up to and including `to`, and returns what happened, in order; also what
    /// calls since the last advance completed at once. An earlier `to` than the last changes nothing.
    pub fn advance(&mut self, to: Nanos) -> Vec<Event> {
        while let Some(at) = self.next_change().filter(|at| *at <= to) {
            self.pass(at);
            self.settle();
        }
        self.pass(to.max(self.now));
        std::mem::take(&mut self.events)
    }

    /// No event comes before this moment; `None`: none comes without another call. Often the exact moment
    /// of the next one; never a moment that was already worked off.
    pub fn next_event(&self) -> Option<Nanos> {
        if !self.events.is_empty() {
            return Some(self.now);
        }
        Engine::ALL
            .into_iter()
            .filter_map(|engine| self.earliest_completion(engine))
            .min()
    }

    /// Adds a group with its engine's default slice, last in the round.
    pub fn add_group(&mut self, engine: Engine) -> GroupId {
        let id = GroupId(self.fresh());
        self.groups.insert(
            id,
            Group {
                engine,
                timeslice: engine.default_timeslice(),
                frozen: false,
                ready: Vec::new(),
                interrupted: false,
                received: Received::default(),
            },
        );
        self.scheduler(engine).add(id);
        id
    }

    /// Removes a group and all its work, complete or not. No events come from it any more.
    ///
    /// # Errors
    /// When there is no such group.
    pub fn remove_group(&mut self, group: GroupId) -> Result<(), GpuError> {
        let engine = self.group(group)?.engine;
        self.abort(group)?;
        self.groups.remove(&group);
        self.scheduler(engine).remove(group);
        self.settle();
        Ok(())
    }

    /// Drops all work of a group, as a fault does. What waits for it goes on.
    ///
    /// # Errors
    /// When there is no such group.
    pub fn abort(&mut self, group: GroupId) -> Result<(), GpuError> {
        let state = self.groups.get_mut(&group).ok_or(GpuError::Group(group))?;
        state.ready.clear();
        state.interrupted = false;
        let mut gone = Vec::new();
        for stream in self.streams.values_mut() {
            if stream.queue.front().is_some_and(|head| head.group == group) {
                stream.head_started = false;
            }
            stream.queue.retain(|item| {
                if item.group == group {
                    gone.push(item.id);
                }
                item.group != group
            });
        }
        self.go_on_without(&gone);
        Ok(())
    }

    /// Adds a stream.
    pub fn add_stream(&mut self) -> StreamId {
        let id = StreamId(self.fresh());
        self.streams.insert(id, Stream::default());
        id
    }

    /// Removes a stream and its work, complete or not. What waits for it goes on.
    ///
    /// # Errors
    /// When there is no such stream.
    pub fn remove_stream(&mut self, stream: StreamId) -> Result<(), GpuError> {
        let state = self
            .streams
            .remove(&stream)
            .ok_or(GpuError::Stream(stream))?;
        for group in self.groups.values_mut() {
            group.ready.retain(|ready| ready.stream != stream);
        }
        let gone: Vec<WorkId> = state.queue.iter().map(|item| item.id).collect();
        self.go_on_without(&gone);
        Ok(())
    }

    /// Adds a bound of so many SMs, at least one, for streams to be confined to.
    pub fn add_partition(&mut self, sms: u32) -> PartitionId {
        let id = PartitionId(self.fresh());
        self.partitions.insert(id, sms.max(1));
        id
    }

    /// Changes a partition's bound, at once, for running kernels too.
    ///
    /// # Errors
    /// When there is no such partition.
    pub fn resize_partition(&mut self, id: PartitionId, sms: u32) -> Result<(), GpuError> {
        let bound = self.partitions.get_mut(&id);
        *bound.ok_or(GpuError::Partition(id))? = sms.max(1);
        self.settle();
        Ok(())
    }

    /// Removes a partition. Streams that were confined to it are free.
    ///
    /// # Errors
    /// When there is no such partition.
    pub fn remove_partition(&mut self, id: PartitionId) -> Result<(), GpuError> {
        let gone = self.partitions.remove(&id);
        gone.ok_or(GpuError::Partition(id))?;
        self.settle();
        Ok(())
    }

    /// Confines a stream's kernels, from the next one on, to a partition that it shares with others; `None`: to none.
    ///
    /// # Errors
    /// When there is no such stream or partition.
    pub fn confine(
        &mut self,
        stream: StreamId,
        partition: Option<PartitionId>,
    ) -> Result<(), GpuError> {
        if let Some(id) = partition.filter(|id| !self.partitions.contains_key(id)) {
            return Err(GpuError::Partition(id));
        }
        let state = self.streams.get_mut(&stream);
        state.ok_or(GpuError::Stream(stream))?.partition = partition;
        Ok(())
    }

    /// Sets a stream's priority, from its next kernel on: lower numbers go first.
    ///
    /// # Errors
    /// When there is no such stream.
    pub fn prioritize(&mut self, stream: StreamId, priority: i32) -> Result<(), GpuError> {
        let state = self.streams.get_mut(&stream);
        state.ok_or(GpuError::Stream(stream))?.priority = priority;
        Ok(())
    }

    /// What a stream has received so far.
    ///
    /// # Errors
    /// When there is no such stream.
    pub fn stream_received(&self, stream: StreamId) -> Result<StreamReceived, GpuError> {
        let state = self.streams.get(&stream);
        Ok(state.ok_or(GpuError::Stream(stream))?.received)
    }

    /// Sets a group's slice, at once.
    ///
    /// # Errors
    /// When there is no such group.
    pub fn set_timeslice(&mut self, group: GroupId, slice: Timeslice) -> Result<(), GpuError> {
        let state = self.groups.get_mut(&group).ok_or(GpuError::Group(group))?;
        state.timeslice = Timeslice(slice.0.max(1));
        let engine = state.engine;
        if self.contended(&self.schedulers[&engine]) {
            self.interrupt(engine);
        }
        self.settle();
        Ok(())
    }

    /// Takes a group off its engine, in the middle of kernels if need be, until [`Gpu::thaw`].
    /// The engine needs a switch's time; the group's work stands still at once.
    ///
    /// # Errors
    /// When there is no such group.
    pub fn freeze(&mut self, group: GroupId) -> Result<(), GpuError> {
        self.set_frozen(group, true)
    }

    /// Lets a group run again.
    ///
    /// # Errors
    /// When there is no such group.
    pub fn thaw(&mut self, group: GroupId) -> Result<(), GpuError> {
        self.set_frozen(group, false)
    }

    /// Whether a group is frozen.
    ///
    /// # Errors
    /// When there is no such group.
    pub fn frozen(&self, group: GroupId) -> Result<bool, GpuError> {
        Ok(self.group(group)?.frozen)
    }

    /// Submits work to a group, behind everything in the stream, at the time of the last [`Gpu::advance`].
    ///
    /// # Errors
    /// When there is no such group or stream.
    pub fn submit(
        &mut self,
        group: GroupId,
        stream: StreamId,
        work: Work,
    ) -> Result<WorkId, GpuError> {
        self.group(group)?;
        let id = WorkId(self.next_id);
        let queue = &mut self
            .streams
            .get_mut(&stream)
            .ok_or(GpuError::Stream(stream))?
            .queue;
        self.next_id += 1;
        queue.push_back(Item {
            id,
            group,
            work,
            released: false,
            length: None,
        });
        self.live.insert(id, stream);
        self.start_head(stream);
        self.settle();
        Ok(id)
    }

    /// Ends a hold (after [`Hardware::hold_exit`] of running) or a host function, also before
    /// it began. Other work and completed work are left alone.
    pub fn release(&mut self, work: WorkId) {
        let Some(stream) = self.live.get(&work).copied() else {
            return;
        };
        let Some(item) = self
            .streams
            .get_mut(&stream)
            .and_then(|stream| stream.queue.iter_mut().find(|item| item.id == work))
        else {
            return;
        };
        item.released = true;
        let (host, group) = (item.work == Work::Host, item.group);
        let state = &self.streams[&stream];
        if host && state.head_started && state.queue[0].id == work {
            self.complete_head(stream);
        } else if let Some(group) = self.groups.get_mut(&group) {
            for ready in &mut group.ready {
                if ready.work == work && ready.hold {
                    ready.left = ready.left.min(self.hardware.hold_exit);
                }
            }
        }
        self.settle();
    }

    /// Tells how long a [`Work::Rest`] takes in all. What has passed counts; so it may end at once.
    pub fn set_length(&mut self, work: WorkId, length: Nanos) {
        let Some(stream) = self.live.get(&work) else {
            return;
        };
        let queue = self.streams.get_mut(stream).map(|it| &mut it.queue);
        let item = queue.and_then(|queue| queue.iter_mut().find(|item| item.id == work));
        let Some(item) = item.filter(|item| matches!(item.work, Work::Rest { .. })) else {
            return;
        };
        item.length = Some(length);
        if let Some(group) = self.groups.get_mut(&item.group) {
            let open = group
                .ready
                .iter_mut()
                .filter(|ready| ready.work == work && ready.open);
            for ready in open {
                let done = ready.total - ready.left;
                ready.total = length.saturating_mul(ready.useful.into()).max(done + 1);
                ready.left = ready.total - done;
                ready.open = false;
            }
        }
        self.settle();
    }

    /// Whether a piece of work is complete (or was dropped).
    pub fn is_complete(&self, work: WorkId) -> bool {
        !self.live.contains_key(&work)
    }

    /// Whether a stream has nothing left to do.
    ///
    /// # Errors
    /// When there is no such stream.
    pub fn is_idle(&self, stream: StreamId) -> Result<bool, GpuError> {
        let state = self.streams.get(&stream).ok_or(GpuError::Stream(stream))?;
        Ok(state.queue.is_empty())
    }

    /// How far the group's running and interrupted work is. Work that never ran is not listed, unless it is the rest of
    /// a kernel.
    ///
    /// # Errors
    /// When there is no such group.
    pub fn progress(&self, group: GroupId) -> Result<Vec<Progress>, GpuError> {
        Ok(self
            .group(group)?
            .ready
            .iter()
            .filter(|ready| ready.left < ready.total || ready.open)
            .map(|ready| Progress {
                work: ready.work,
                done: ready.total - ready.left,
                total: ready.total,
            })
            .collect())
    }

    /// How long work that has begun, or is next, would still run with all SMs that it can use; `None` for any other.
    ///
    /// # Errors
    /// When there is no such group.
    pub fn left(&self, group: GroupId, work: WorkId) -> Result<Option<Nanos>, GpuError> {
        let ready = &self.group(group)?.ready;
        Ok(ready
            .iter()
            .find(|it| it.work == work)
            .map(|it| match it.open {
                true => Nanos::MAX,
                false => it.left / u64::from(it.useful.max(1)),
            }))
    }

    /// What a group has received so far.
    ///
    /// # Errors
    /// When there is no such group.
    pub fn received(&self, group: GroupId) -> Result<Received, GpuError> {
        Ok(self.group(group)?.received)
    }

    /// Whether a group has work that the engine could run now, were it not frozen.
    ///
    /// # Errors
    /// When there is no such group.
    pub fn has_work(&self, group: GroupId) -> Result<bool, GpuError> {
        Ok(!self.group(group)?.ready.is_empty())
    }

    fn fresh(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id - 1
    }

    fn group(&self, id: GroupId) -> Result<&Group, GpuError> {
        self.groups.get(&id).ok_or(GpuError::Group(id))
    }

    fn scheduler(&mut self, engine: Engine) -> &mut Scheduler {
        self.schedulers
            .entry(engine)
            .or_insert_with(|| Scheduler::new(engine, &self.hardware))
    }

    fn set_frozen(&mut self, group: GroupId, frozen: bool) -> Result<(), GpuError> {
        let state = self.groups.get_mut(&group).ok_or(GpuError::Group(group))?;
        let (changes, engine) = (state.frozen != frozen, state.engine);
        state.frozen = frozen;
        if changes {
            self.interrupt(engine);
        }
        if !frozen {
            // Events and waits stood still with their channel.
            let waiting: Vec<StreamId> = self
                .streams
                .iter()
                .filter(|(_, stream)| {
                    !stream.head_started
                        && stream.queue.front().is_some_and(|head| head.group == group)
                })
                .map(|(id, _)| *id)
                .collect();
            for stream in waiting {
                self.start_head(stream);
            }
        }
        self.settle();
        Ok(())
    }

    /// Starts a stream's head, completing on the way what takes no time.
    fn start_head(&mut self, id: StreamId) {
        loop {
            let Some(stream) = self.streams.get_mut(&id) else {
                return;
            };
            let Some(head) = stream
                .queue
                .front()
                .copied()
                .filter(|_| !stream.head_started)
            else {
                return;
            };
            let Some(group) = self.groups.get_mut(&head.group) else {
                return;
            };
            let (width, duration) = match head.work {
                Work::Kernel { sms, duration } | Work::Moving { sms, duration } => {
                    (sms, duration.saturating_add(self.hardware.kernel_overhead))
                }
                Work::Hold { .. } if head.released => {
                    (1, self.hardware.hold_exit + self.hardware.kernel_overhead)
                }
                Work::Hold { timeout } => {
                    (1, timeout.saturating_add(self.hardware.kernel_overhead))
                }
                Work::Rest { sms } => (sms, head.length.unwrap_or(UNKNOWN_LENGTH)),
                Work::Copy { bytes } => {
                    let (width, rate) = match group.engine {
                        Engine::Compute => (self.hardware.sms, self.hardware.device_to_device),
                        Engine::HostToDevice => (1, self.hardware.host_to_device),
                        Engine::DeviceToHost => (1, self.hardware.device_to_host),
                    };
                    let time = Hardware::transfer(bytes, rate);
                    (width, time.saturating_add(self.hardware.copy_overhead))
                }
                Work::Record | Work::Wait(_) | Work::Host if group.frozen => return,
                Work::Wait(other) if self.live.contains_key(&other) => {
                    let waiters = self.waiters.entry(other).or_default();
                    if !waiters.contains(&id) {
                        waiters.push(id);
                    }
                    return;
                }
                Work::Host if !head.released => {
                    stream.head_started = true;
                    self.event(id, head, EventKind::HostReady);
                    return;
                }
                Work::Record | Work::Wait(_) | Work::Host => {
                    self.finish_head(id);
                    continue;
                }
            };
            stream.head_started = true;
            let capacity = match group.engine {
                Engine::Compute => self.hardware.sms,
                Engine::HostToDevice | Engine::DeviceToHost => 1,
            };
            let width = width.clamp(1, capacity.max(1));
            let moving = matches!(head.work, Work::Moving { .. });
            let useful = match moving {
                true => width.min(self.hardware.saturating()),
                false => width,
            };
            let total = duration.max(1).saturating_mul(useful.into());
            let priority = stream.priority;
            let behind = |it: &Ready| it.started() || it.priority <= priority;
            let place = group.ready.iter().rposition(behind).map_or(0, |at| at + 1);
            let ready = Ready {
                work: head.id,
                stream: id,
                partition: stream.partition,
                priority,
                width,
                useful,
                sms: 0,
                pace: 0,
                moving,
                total,
                left: total,
                hold: matches!(head.work, Work::Hold { .. }),
                open: matches!(head.work, Work::Rest { .. }) && head.length.is_none(),
            };
            group.ready.insert(place, ready);
            return;
        }
    }

    /// The head is complete: reports it and starts what comes next here and elsewhere.
    fn complete_head(&mut self, stream: StreamId) {
        self.finish_head(stream);
        self.start_head(stream);
    }

    fn finish_head(&mut self, id: StreamId) {
        let Some(stream) = self.streams.get_mut(&id) else {
            return;
        };
        stream.head_started = false;
        if let Some(head) = stream.queue.pop_front() {
            self.event(id, head, EventKind::Done);
            self.forget(head.id);
        }
    }

    /// A piece of work is out of the way: what waits for it goes on.
    fn forget(&mut self, work: WorkId) {
        self.live.remove(&work);
        for waiter in self.waiters.remove(&work).unwrap_or_default() {
            self.start_head(waiter);
        }
    }

    /// Starts what waited for, or was queued behind, work that was dropped.
    fn go_on_without(&mut self, gone: &[WorkId]) {
        for work in gone {
            self.forget(*work);
        }
        let streams: Vec<StreamId> = self.streams.keys().copied().collect();
        for stream in streams {
            self.start_head(stream);
        }
        self.settle();
    }

    fn event(&mut self, stream: StreamId, item: Item, kind: EventKind) {
        self.events.push(Event {
            at: self.now,
            group: item.group,
            stream,
            work: item.id,
            kind,
        });
    }
}
