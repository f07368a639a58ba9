//! Execution connections: work in, completions out.

use std::collections::BTreeSet;

use gpumux_sim::gpu::{self, EventKind, WorkId};

use super::{
    core::{Core, Role},
    execution::Execution,
    rm::GroupKey,
    wire::now,
};
use crate::protocol::{Command, MAX_LIVE, MAX_SUBMISSIONS, Queue, Report, Work};

/// Reports are sent together up to this many.
const MAX_BATCH: usize = 256;

/// A kernel that a program leaves behind with more ns to run than this still uses the program's memory when that goes: a
/// fault of all in its group. (An H100: of 4 ms so, of 2 ms not; docs/fidelity.md.)
const OUTLIVES: u64 = 3_000_000;

impl Core {
    pub(super) fn command(&mut self, id: u64, command: Command) -> Option<()> {
        let now = now();
        let Role::Execution(execution) = &mut self.connections.get_mut(&id)?.role else {
            return None;
        };
        let device = self.devices.all.get_mut(execution.device as usize)?;
        match command {
            Command::Submit { at, items } => {
                if items.len() > MAX_SUBMISSIONS || execution.works.len() + items.len() > MAX_LIVE {
                    return None;
                }
                device.advance(at.min(now));
                for item in items {
                    let stream = *execution.streams.entry(item.stream).or_insert_with(|| {
                        let stream = device.gpu.add_stream();
                        let _ = device.gpu.confine(stream, execution.partition);
                        let _ = device.gpu.prioritize(stream, item.priority.into());
                        stream
                    });
                    let group = match item.queue {
                        Queue::Compute => execution.groups[0],
                        Queue::HostToDevice => execution.groups[1],
                        Queue::DeviceToHost => execution.groups[2],
                    };
                    let work = match item.work {
                        Work::Kernel { sms, duration } => gpu::Work::Kernel { sms, duration },
                        Work::Moving { sms, duration } => gpu::Work::Moving { sms, duration },
                        Work::Copy { bytes } => gpu::Work::Copy { bytes },
                        Work::Record => gpu::Work::Record,
                        Work::Hold { timeout } => gpu::Work::Hold { timeout },
                        Work::Rest { sms } => gpu::Work::Rest { sms },
                        Work::Host => gpu::Work::Host,
                        Work::Wait(other) => match execution.works.get(&other) {
                            Some(other) => gpu::Work::Wait(*other),
                            None => gpu::Work::Record,
                        },
                    };
                    let work = device.gpu.submit(group, stream, work).ok()?;
                    if execution.works.insert(item.id, work).is_some() {
                        return None;
                    }
                    device.works.insert(work, (id, item.id, item.prompt));
                }
            }
            Command::HostDone { id } => {
                device.advance(now);
                if let Some(work) = execution.works.get(&id) {
                    device.gpu.release(*work);
                }
            }
            Command::Length { id, duration } => {
                device.advance(now);
                if let Some(work) = execution.works.get(&id) {
                    device.gpu.set_length(*work, duration);
                }
            }
            Command::Progressed { token } => self.progressed(id, token),
            Command::EndStream { stream } => {
                let index = execution.device;
                if let Some(stream) = execution.streams.remove(&stream) {
                    execution.ending.insert(stream);
                    if self.devices.end_stream(index, stream) {
                        execution.ending.remove(&stream);
                    }
                }
            }
            Command::Abort { all } => {
                device.advance(now);
                execution.drop_work(device);
                let keys = execution.keys;
                if all {
                    self.fault_of_another(id, &keys);
                }
            }
            Command::End => execution.ended = true,
        }
        Some(())
    }

    /// The connection is gone. The memory of a program lives as long as its control file, which others may hold.
    pub(super) fn leave_execution(&mut self, id: u64, pid: u32, execution: Box<Execution>) {
        if self.is_missed(&execution) && self.connections.contains_key(&execution.file) {
            self.orphans.insert(id, (pid, execution));
        } else {
            self.end_execution(id, pid, execution);
        }
    }

    /// The control file is closed, and with it goes the memory of those that died before.
    pub(super) fn end_orphans(&mut self, file: u64) {
        let of_file = |_: &u64, (_, it): &mut (u32, Box<Execution>)| it.file == file;
        let orphans: Vec<_> = self.orphans.extract_if(of_file).collect();
        for (id, (pid, execution)) in orphans {
            self.end_execution(id, pid, execution);
        }
    }

    fn end_execution(&mut self, id: u64, pid: u32, mut execution: Box<Execution>) {
        if self.is_missed(&execution) {
            let keys = execution.keys;
            self.fault_of_another(id, &keys);
        }
        if let Some(device) = self.devices.all.get_mut(execution.device as usize) {
            execution.drop_work(device);
            if let Some(partition) = execution.partition {
                let _ = device.gpu.remove_partition(partition);
            }
        }
        let bytes = self.devices.profile.context_memory;
        self.devices.give(execution.device, bytes);
        if let Some(process) = self.processes.get_mut(&pid)
            && let Some(contexts) = process.contexts.get_mut(&execution.device)
        {
            *contexts -= 1;
        }
    }

    /// Whether it was left with a kernel whose fault would end others of its group.
    fn is_missed(&self, execution: &Execution) -> bool {
        let Some(device) = self.devices.all.get(execution.device as usize) else {
            return false;
        };
        let (group, key) = (execution.groups[0], execution.keys[0]);
        let shared = self
            .connections
            .values()
            .any(|it| matches!(&it.role, Role::Execution(other) if other.keys[0] == key));
        let outlives = |work: &WorkId| {
            let left = device.gpu.left(group, *work).ok().flatten();
            left.is_some_and(|left| left > OUTLIVES)
        };
        !execution.ended && shared && execution.works.values().any(outlives)
    }

    /// One of a group faulted: so do all that share the group.
    fn fault_of_another(&mut self, faulting: u64, keys: &[GroupKey]) {
        let shares = |it: &Execution| it.keys.iter().any(|key| keys.contains(key));
        let others: Vec<u64> = (self.connections.iter())
            .filter(|(id, it)| {
                **id != faulting && matches!(&it.role, Role::Execution(it) if shares(it))
            })
            .map(|(id, _)| *id)
            .collect();
        let of_group = |_: &u64, (_, it): &mut (u32, Box<Execution>)| shares(it);
        let orphans: Vec<_> = self.orphans.extract_if(of_group).collect();
        for (id, (pid, mut orphan)) in orphans {
            orphan.ended = true;
            self.end_execution(id, pid, orphan);
        }
        for id in others {
            let Some(Role::Execution(execution)) =
                self.connections.get_mut(&id).map(|it| &mut it.role)
            else {
                continue;
            };
            if let Some(device) = self.devices.all.get_mut(execution.device as usize) {
                execution.drop_work(device);
            }
            self.send(id, &Report::Lost, None);
        }
    }

    pub(super) fn progressed(&mut self, id: u64, token: u64) {
        if let Some(freeze) = self.freezes.get_mut(&token)
            && freeze.waiting.remove(&id)
            && freeze.waiting.is_empty()
        {
            self.finish_freeze(token);
        }
    }

    /// Passes the model's events on: all that are due now together.
    pub(super) fn dispatch(&mut self) {
        let mut due = BTreeSet::new();
        for index in 0..self.devices.all.len() {
            for event in self.devices.all[index].take_events() {
                self.report(index, event, &mut due);
            }
        }
        for id in due {
            self.flush(id);
        }
    }

    pub(super) fn report(&mut self, index: usize, event: gpu::Event, due: &mut BTreeSet<u64>) {
        let device = &mut self.devices.all[index];
        let Some((id, number, prompt)) = device.works.get(&event.work).copied() else {
            return;
        };
        let Some(Role::Execution(execution)) = self.connections.get_mut(&id).map(|it| &mut it.role)
        else {
            device.works.remove(&event.work);
            return;
        };
        match event.kind {
            EventKind::HostReady => {
                self.flush(id);
                self.send(id, &Report::HostReady { id: number }, None);
            }
            EventKind::Done => {
                device.works.remove(&event.work);
                execution.works.remove(&number);
                execution.done.push((number, device.clock(event.at)));
                let idle = device.gpu.is_idle(event.stream) != Ok(false);
                let full = execution.done.len() >= MAX_BATCH;
                if idle && execution.ending.remove(&event.stream) {
                    let _ = device.gpu.remove_stream(event.stream);
                }
                if full {
                    self.flush(id);
                } else if prompt || idle {
                    due.insert(id);
                }
            }
        }
    }

    /// Reports what is done.
    pub(super) fn flush(&mut self, id: u64) {
        let Some(Role::Execution(execution)) = self.connections.get_mut(&id).map(|it| &mut it.role)
        else {
            return;
        };
        let done = std::mem::take(&mut execution.done);
        if !done.is_empty() {
            self.send(id, &Report::Done(done), None);
        }
    }
}
