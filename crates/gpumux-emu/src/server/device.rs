//! The devices: the hardware model against the clock, and the books of memory.

use std::collections::{BTreeMap, HashMap};

use gpumux_core::Timeslice;
use gpumux_rm::layout::engine;
use gpumux_sim::gpu::{Engine, Event, Gpu, GroupId, StreamId, WorkId};

use super::rm::{GroupKey, Hardware};
use crate::{
    Profile,
    mig::{self, Place, SHAPES},
    protocol::{DeviceInfo, DeviceStatus, GpuInstance, Refusal},
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
    fn new(info: &DeviceInfo, profile: &Profile, now: u64) -> Self {
        Self {
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
        }
    }

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

/// A GPU instance of a GPU.
struct Partition {
    gpu: u32,
    place: Place,
    /// The device that its compute instance is.
    device: Option<u32>,
}

impl Partition {
    fn shown(&self) -> GpuInstance {
        GpuInstance {
            id: self.place.id,
            profile: self.place.shape.id,
            start: self.place.start,
            device: self.device,
        }
    }
}

/// All devices and their groups.
pub(super) struct Devices {
    pub(super) profile: Profile,
    infos: Vec<DeviceInfo>,
    pub(super) all: Vec<Device>,
    /// GPU instances.
    instances: Vec<Partition>,
    groups: BTreeMap<GroupKey, (u32, GroupId, Engine)>,
    /// Groups that were removed, frozen or thawed, since the last look.
    pub(super) removed: Vec<GroupKey>,
    pub(super) frozen: Vec<GroupKey>,
    pub(super) thawed: Vec<GroupKey>,
}

impl Devices {
    pub(super) fn new(profile: Profile, now: u64) -> Self {
        let infos = profile.infos();
        let all = infos.iter().map(|it| Device::new(it, &profile, now));
        let all = all.collect();
        let places = profile.places();
        let placed = places.into_iter().zip(profile.devices..);
        let instances = placed.map(|((gpu, place), device)| Partition {
            gpu,
            place,
            device: Some(device),
        });
        let instances = instances.collect();
        Self {
            profile,
            infos,
            all,
            instances,
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

    /// The GPU instances of a GPU in MIG mode, by rising numbers.
    pub(super) fn gpu_instances(&self, gpu: u32) -> Result<Vec<GpuInstance>, Refusal> {
        let info = self.infos.get(gpu as usize);
        info.filter(|it| it.mig_mode).ok_or(Refusal::Unknown)?;
        let own = self.instances.iter().filter(|it| it.gpu == gpu);
        let mut all: Vec<_> = own.map(Partition::shown).collect();
        all.sort_by_key(|it| it.id);
        Ok(all)
    }

    pub(super) fn make_gpu_instance(
        &mut self,
        gpu: u32,
        profile: u32,
        start: u32,
    ) -> Result<GpuInstance, Refusal> {
        self.gpu_instances(gpu)?;
        let shape = SHAPES.iter().find(|shape| shape.id == profile);
        let shape = shape.filter(|it| it.starts.contains(&start));
        let shape = shape.ok_or(Refusal::Unknown)?;
        let own = self.instances.iter().filter(|it| it.gpu == gpu);
        let others: Vec<Place> = own.map(|it| it.place).collect();
        let place = mig::place(&others, shape, start).ok_or(Refusal::NoRoom)?;
        let made = Partition {
            gpu,
            place,
            device: None,
        };
        let shown = made.shown();
        self.instances.push(made);
        Ok(shown)
    }

    fn partition(&mut self, gpu: u32, id: u32) -> Result<&mut Partition, Refusal> {
        let mut all = self.instances.iter_mut();
        let found = all.find(|it| it.gpu == gpu && it.place.id == id);
        found.ok_or(Refusal::Unknown)
    }

    /// The device that a GPU instance's compute instance is.
    pub(super) fn compute_instance(&mut self, gpu: u32, id: u32) -> Result<u32, Refusal> {
        self.partition(gpu, id)?.device.ok_or(Refusal::Unknown)
    }

    pub(super) fn make_compute_instance(
        &mut self,
        gpu: u32,
        id: u32,
        now: u64,
    ) -> Result<(), Refusal> {
        let partition = self.partition(gpu, id)?;
        if partition.device.is_some() {
            return Err(Refusal::NoRoom);
        }
        let place = partition.place;
        let info = DeviceInfo {
            uuid: self.profile.instance_uuid(gpu, id),
            ..mig::instance(&place, gpu, &self.infos[gpu as usize])
        };
        let device = Device::new(&info, &self.profile, now);
        // The place of one that is gone is taken first: clients name devices by their places.
        let vacant = self.infos.iter().position(|info| info.gone);
        let at = vacant.unwrap_or(self.infos.len());
        if vacant.is_some() {
            (self.infos[at], self.all[at]) = (info, device);
        } else {
            self.infos.push(info);
            self.all.push(device);
        }
        self.partition(gpu, id)?.device = Some(at as u32);
        Ok(())
    }

    /// Without processes. The memory of the last ones may not be free yet.
    pub(super) fn end_compute_instance(&mut self, gpu: u32, id: u32) -> Result<(), Refusal> {
        let at = self.compute_instance(gpu, id)?;
        let has_groups = self.groups.values().any(|(device, ..)| *device == at);
        if has_groups || self.all[at as usize].used > 0 {
            return Err(Refusal::InUse);
        }
        self.infos[at as usize].gone = true;
        self.partition(gpu, id)?.device = None;
        Ok(())
    }

    pub(super) fn end_gpu_instance(&mut self, gpu: u32, id: u32) -> Result<(), Refusal> {
        if self.partition(gpu, id)?.device.is_some() {
            return Err(Refusal::InUse);
        }
        self.instances
            .retain(|it| (it.gpu, it.place.id) != (gpu, id));
        Ok(())
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
        let info = self.infos.get(device as usize);
        info.is_some_and(|it| !it.mig_mode && !it.gone)
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
