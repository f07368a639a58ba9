//! Process connections: what devices there are, and memory.

use std::{collections::BTreeMap, os::fd::OwnedFd};

use super::{
    books::{Memory, file_identity, memory_file},
    core::{Action, Core, Role},
    wire::now,
};
use crate::protocol::{Answer, Refusal, Request};

/// Processes of which an answer can tell beside its other fields.
const MOST: usize = 2048;

impl Core {
    /// A process has one connection less. With the last one its memory goes, but stays taken for a while.
    pub(super) fn leave(&mut self, pid: u32) {
        let Some(process) = self.processes.get_mut(&pid) else {
            return;
        };
        process.connections -= 1;
        if process.connections > 0 {
            return;
        }
        let process = self.processes.remove(&pid).unwrap_or_default();
        let due = now() + self.devices.profile.release_ms * 1_000_000;
        for (memory, shares) in process.shares {
            if let Some((device, bytes)) = self.drop_shares(memory, shares) {
                self.after(due, Action::Release(device, bytes));
            }
        }
    }

    /// Ends shares in memory. With the last one it is gone: of which device, and how much.
    fn drop_shares(&mut self, id: u64, shares: u64) -> Option<(u32, u64)> {
        let memory = self.memory.get_mut(&id)?;
        memory.shares = memory.shares.saturating_sub(shares);
        if memory.shares > 0 {
            return None;
        }
        let gone = self.memory.remove(&id)?;
        self.files.remove(&gone.file);
        Some((gone.device, gone.bytes))
    }

    pub(super) fn request(
        &mut self,
        id: u64,
        request: Request,
        files: Vec<OwnedFd>,
    ) -> Result<(Answer, Option<OwnedFd>), Refusal> {
        let pid = self.connections[&id].pid;
        match request {
            Request::Hello { .. } | Request::ExportMemory { .. } => Err(Refusal::Unknown),
            Request::Devices => Ok((Answer::Devices(self.devices.infos()), None)),
            Request::CreateMemory { device, bytes } => {
                let (id, file) = self.create_memory(pid, device, bytes)?;
                Ok((Answer::Memory { id, device, bytes }, Some(file)))
            }
            Request::ImportMemory => {
                let file = files.first().ok_or(Refusal::Unknown)?;
                let id = file_identity(file)
                    .and_then(|file| self.files.get(&file).copied())
                    .ok_or(Refusal::Unknown)?;
                let memory = self.memory.get_mut(&id).ok_or(Refusal::Unknown)?;
                memory.shares += 1;
                let (device, bytes) = (memory.device, memory.bytes);
                let found = memory.exported.as_ref();
                let found = found.and_then(|it| it.try_clone().ok());
                let process = self.processes.entry(pid).or_default();
                *process.shares.entry(id).or_default() += 1;
                Ok((Answer::Memory { id, device, bytes }, found))
            }
            Request::FreeMemory { id } => {
                let process = self.processes.entry(pid).or_default();
                let shares = process.shares.get_mut(&id).ok_or(Refusal::Unknown)?;
                *shares -= 1;
                if *shares == 0 {
                    process.shares.remove(&id);
                }
                if let Some((device, bytes)) = self.drop_shares(id, 1) {
                    self.devices.give(device, bytes);
                }
                Ok((Answer::Ok, None))
            }
            Request::Status { device } => {
                let mut status = self.devices.status(device, now()).ok_or(Refusal::Unknown)?;
                status.processes = self.processes_on(device);
                status.busy = self.busy_on(device);
                Ok((Answer::Status(status), None))
            }
            Request::GpuInstances { gpu } => {
                let all = self.devices.gpu_instances(gpu)?;
                Ok((Answer::GpuInstances(all), None))
            }
            Request::MakeGpuInstance {
                gpu,
                profile,
                start,
            } => {
                let made = self.devices.make_gpu_instance(gpu, profile, start)?;
                Ok((Answer::GpuInstances(vec![made]), None))
            }
            Request::MakeComputeInstance { gpu, id } => {
                self.devices.make_compute_instance(gpu, id, now())?;
                Ok((Answer::Ok, None))
            }
            Request::EndComputeInstance { gpu, id } => {
                let device = self.devices.compute_instance(gpu, id)?;
                if !self.processes_on(device).is_empty() {
                    return Err(Refusal::InUse);
                }
                self.devices.end_compute_instance(gpu, id)?;
                Ok((Answer::Ok, None))
            }
            Request::EndGpuInstance { gpu, id } => {
                self.devices.end_gpu_instance(gpu, id)?;
                Ok((Answer::Ok, None))
            }
        }
    }

    /// A connection holds a share in memory of its process from now on. By what it is found, on its other side.
    pub(super) fn export(
        &mut self,
        pid: u32,
        id: u64,
        files: Vec<OwnedFd>,
    ) -> Result<(u64, u64), Refusal> {
        let [own, file] = <[OwnedFd; 2]>::try_from(files).map_err(|_| Refusal::Unknown)?;
        let owned = self
            .processes
            .get(&pid)
            .is_some_and(|it| it.shares.contains_key(&id));
        let memory = self.memory.get_mut(&id).filter(|_| owned);
        let memory = memory.filter(|it| file_identity(&file) == Some(it.file));
        let memory = memory.ok_or(Refusal::Unknown)?;
        let identity = file_identity(&own).ok_or(Refusal::Host)?;
        memory.shares += 1;
        memory.exported.get_or_insert(file);
        self.files.insert(identity, id);
        Ok(identity)
    }

    /// All files of such a connection are closed.
    pub(super) fn end_export(&mut self, identity: (u64, u64)) {
        let id = self.files.remove(&identity);
        if let Some((device, bytes)) = id.and_then(|id| self.drop_shares(id, 1)) {
            self.devices.give(device, bytes);
        }
    }

    pub(super) fn create_memory(
        &mut self,
        pid: u32,
        device: u32,
        bytes: u64,
    ) -> Result<(u64, OwnedFd), Refusal> {
        if bytes == 0 {
            return Err(Refusal::Unknown);
        }
        self.devices.take(device, bytes)?;
        let made = memory_file(bytes).and_then(|file| Some((file_identity(&file)?, file)));
        let Some((identity, file)) = made else {
            self.devices.give(device, bytes);
            return Err(Refusal::Host);
        };
        self.next_memory += 1;
        let id = self.next_memory;
        self.files.insert(identity, id);
        self.memory.insert(
            id,
            Memory {
                device,
                bytes,
                shares: 1,
                file: identity,
                exported: None,
            },
        );
        let process = self.processes.entry(pid).or_default();
        process.shares.insert(id, 1);
        Ok((id, file))
    }

    /// Processes with contexts on a device, and how long their kernels have run, as far as streams that are there tell.
    fn busy_on(&self, index: u32) -> Vec<(u32, u64)> {
        let Some(device) = self.devices.all.get(index as usize) else {
            return Vec::new();
        };
        let mut busy: BTreeMap<u32, u64> = BTreeMap::new();
        for connection in self.connections.values() {
            let Role::Execution(execution) = &connection.role else {
                continue;
            };
            if execution.device == index {
                let streams = execution.streams.values();
                let received = streams.filter_map(|it| device.gpu.stream_received(*it).ok());
                let ran: u64 = received.map(|it| it.busy).sum();
                *busy.entry(connection.pid).or_default() += ran;
            }
        }
        busy.into_iter().take(MOST).collect()
    }

    /// Processes with contexts on a device, and what they use.
    pub(super) fn processes_on(&self, device: u32) -> Vec<(u32, u64)> {
        let mut found: Vec<(u32, u64)> = self
            .processes
            .iter()
            .filter_map(|(pid, process)| {
                let contexts = process.contexts.get(&device).filter(|n| **n > 0)?;
                let memory: u64 = process
                    .shares
                    .keys()
                    .filter_map(|id| self.memory.get(id))
                    .filter(|memory| memory.device == device)
                    .map(|memory| memory.bytes)
                    .sum();
                Some((
                    *pid,
                    memory + contexts * self.devices.profile.context_memory,
                ))
            })
            .collect();
        found.sort_unstable();
        found.truncate(MOST);
        found
    }
}
