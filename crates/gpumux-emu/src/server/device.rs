//! The devices: the hardware model against the clock, and the books of memory.

use std::collections::{BTreeMap, HashMap};

use gpumux_core::Timeslice;
use gpumux_rm::layout::engine;
use gpumux_sim::gpu::{Engine, Event, Gpu, GroupId, StreamId, WorkId};

use super::rm::{GroupKey, Hardware};
use crate::{
    Profile,
    protocol::{DeviceInfo, DeviceStatus, Refusal},
};

/// One device. Its model's time 0 is `origin` on `CLOCK_MONOTONIC`.
pub(super) struct Device {
    pub(super) gpu: Gpu,
    origin: u64,
    /// What the model reported and was not handled yet.
    events: Vec<Event>,
    /// Whose work is under way: execution connection, its number there, whether to report it at once.
    pub(super) works: HashMap<WorkId, (u64, u64, bool)>,
    pub(super) used: u64,
    /// Busy time of groups that are gone: compute, copies.
    retired: [u64; 2],
    /// When utilisation was last read, the busy times then, and the answer.
    sample: (u64, [u64; 2], [u32; 2]),
    /// Controls take turns: until when the last one takes.
    pub(super) control_until: u64,
}

impl Device {
    /// Brings the model to `time`, or leaves it where it is when it is further.
    pub(super) fn advance(&mut self, time: u64) {
        let events = self.gpu.advance(time.saturating_sub(self.origin));
        self.events.extend(events);
    }

    pub(super) fn take_events(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.events)
    }

    pub(super) fn next_event(&self) -> Option<u64> {
        if !self.events.is_empty() {
            return Some(0);
        }
        Some(self.gpu.next_event()?.saturating_add(self.origin))
    }

    /// A moment of the model on the clock.
    pub(super) fn clock(&self, at: u64) -> u64 {
        at.saturating_add(self.origin)
    }
}

/// All devices and their groups.
pub(super) struct Devices {
    pub(super) profile: Profile,
    infos: Vec<DeviceInfo>,
    pub(super) all: Vec<Device>,
    groups: BTreeMap<GroupKey, (u32, GroupId, Engine)>,
    /// Groups that were removed, frozen or thawed, since the last look.
    pub(super) removed: Vec<GroupKey>,
    pub(super) frozen: Vec<GroupKey>,
    pub(super) thawed: Vec<GroupKey>,
}

impl Devices {
    pub(super) fn new(profile: Profile, now: u64) -> Self {
        let infos = profile.infos();
        let all = infos
            .iter()
            .map(|info| Device {
                gpu: Gpu::new(gpumux_sim::gpu::Hardware {
                    sms: info.sms,
                    ..profile.hardware.clone()
                }),
                origin: now,
                events: Vec::new(),
                works: HashMap::new(),
                used: 0,
                retired: [0; 2],
                sample: (now, [0; 2], [0; 2]),
                control_until: 0,
            })
            .collect();
        Self {
            profile,
            infos,
            all,
            groups: BTreeMap::new(),
            removed: Vec::new(),
            frozen: Vec::new(),
            thawed: Vec::new(),
        }
    }

    pub(super) fn group(&self, key: GroupKey) -> Option<(u32, GroupId, Engine)> {
        self.groups.get(&key).copied()
    }

    pub(super) fn next_event(&self) -> Option<u64> {
        self.all.iter().filter_map(Device::next_event).min()
    }

    pub(super) fn infos(&self) -> Vec<DeviceInfo> {
        self.infos.clone()
    }

    /// Takes memory of a device.
    pub(super) fn take(&mut self, device: u32, bytes: u64) -> Result<(), Refusal> {
        let total = (self.infos.get(device as usize)).map_or(0, |info| info.memory);
        if !self.has(device) {
            return Err(Refusal::Unknown);
        }
        let device = self.all.get_mut(device as usize).ok_or(Refusal::Unknown)?;
        let used = device.used.checked_add(bytes).filter(|used| *used <= total);
        device.used = used.ok_or(Refusal::OutOfMemory)?;
        Ok(())
    }

    /// Gives memory of a device back.
    pub(super) fn give(&mut self, device: u32, bytes: u64) {
        if let Some(device) = self.all.get_mut(device as usize) {
            device.used = device.used.saturating_sub(bytes);
        }
    }

    /// A device's state, without its processes.
    pub(super) fn status(&mut self, index: u32, now: u64) -> Option<DeviceStatus> {
        /// Utilisation is not read more often, so that short work does not make it jump.
        const SAMPLE: u64 = 100_000_000;
        let device = self.all.get_mut(index as usize)?;
        device.advance(now);
        let mut busy = device.retired;
        for (_, group, engine) in self.groups.values().filter(|group| group.0 == index) {
            if let Ok(received) = device.gpu.received(*group) {
                busy[usize::from(*engine != Engine::Compute)] += received.busy;
            }
        }
        let (then, before, _) = device.sample;
        if now.saturating_sub(then) >= SAMPLE {
            let percent = |i: usize| {
                let part = (busy[i] - before[i]).saturating_mul(100) / (now - then);
                part.min(100) as u32
            };
            device.sample = (now, busy, [percent(0), percent(1)]);
        }
        let [compute_percent, copy_percent] = device.sample.2;
        let parts = self.infos.iter().zip(&self.all);
        let parts = parts.filter(|(info, _)| info.is_part_of(index));
        let used = parts.map(|(_, part)| part.used).sum::<u64>();
        Some(DeviceStatus {
            used: self.all[index as usize].used + used,
            compute_percent,
            copy_percent,
            processes: Vec::new(),
            busy: Vec::new(),
        })
    }

    /// Removes a stream once its work is done; true when it is gone.
    pub(super) fn end_stream(&mut self, device: u32, stream: StreamId) -> bool {
        let Some(device) = self.all.get_mut(device as usize) else {
            return true;
        };
        match device.gpu.is_idle(stream) {
            Ok(false) => false,
            Ok(true) => device.gpu.remove_stream(stream).is_ok(),
            Err(_) => true,
        }
    }
}

impl Hardware for Devices {
    fn has(&self, device: u32) -> bool {
        self.infos.get(device as usize).is_some()
            && !self.infos.iter().any(|info| info.is_part_of(device))
    }

    fn uuid(&self, device: u32) -> String {
        (self.infos.get(device as usize)).map_or_else(String::new, DeviceInfo::uuid_text)
    }

    fn add_group(&mut self, key: GroupKey, device: u32, number: u32) {
        // Copy engines take turns by number; a context makes its groups on 11, 12 and 13.
        let engine = match number {
            engine::GR0 => Engine::Compute,
            odd if odd % 2 == 1 => Engine::HostToDevice,
            _ => Engine::DeviceToHost,
        };
        if let Some(state) = self.all.get_mut(device as usize) {
            let group = state.gpu.add_group(engine);
            self.groups.insert(key, (device, group, engine));
        }
    }

    fn remove_group(&mut self, key: GroupKey) {
        let Some((device, group, engine)) = self.groups.remove(&key) else {
            return;
        };
        if let Some(device) = self.all.get_mut(device as usize) {
            if let Ok(received) = device.gpu.received(group) {
                device.retired[usize::from(engine != Engine::Compute)] += received.busy;
            }
            let _ = device.gpu.remove_group(group);
        }
        self.removed.push(key);
    }

    fn orphan_group(&mut self, key: GroupKey) {
        self.removed.push(key);
    }

    fn set_timeslice(&mut self, key: GroupKey, slice: Timeslice) {
        if let Some((device, group, _)) = self.group(key)
            && let Some(device) = self.all.get_mut(device as usize)
        {
            let _ = device.gpu.set_timeslice(group, slice);
        }
    }

    fn set_frozen(&mut self, key: GroupKey, frozen: bool) {
        let Some((device, group, _)) = self.group(key) else {
            return;
        };
        let Some(device) = self.all.get_mut(device as usize) else {
            return;
        };
        if device.gpu.frozen(group) == Ok(frozen) {
            return;
        }
        if frozen {
            let _ = device.gpu.freeze(group);
            self.frozen.push(key);
        } else {
            let _ = device.gpu.thaw(group);
            self.thawed.push(key);
        }
    }
}
