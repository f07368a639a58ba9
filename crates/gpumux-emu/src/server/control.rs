//! Control files: RM calls with their costs, and freezes that wait for programs' memory.

use std::collections::{BTreeSet, HashMap};

use gpumux_rm::{
    RmStatus, emulated,
    layout::{Control, escape},
};
use gpumux_sim::gpu::Engine;
use zerocopy::{FromBytes, IntoBytes};

use super::{
    call::{Call, Freeze, answer},
    core::{Action, Connection, Core, Role},
    execution::Execution,
    rm::{Caller, GroupControl, GroupKey},
    wire::{self, Packet, now},
};
use crate::protocol::{OPEN_EXECUTION, OpenExecution, Report};

/// Controls of one file that are under way; programs wait for each.
const MAX_PENDING: usize = 256;
/// How long a freeze waits until a program has brought its effects up to date.
const PROGRESS_TIMEOUT: u64 = 500_000_000;

impl Core {
    pub(super) fn control(&mut self, id: u64, packet: Packet<'_>) -> Option<()> {
        let (head, rest) = emulated::RequestHead::read_from_prefix(packet.bytes).ok()?;
        let (arg, params) = (head.arg_len as usize, head.params_len as usize);
        if head.magic != emulated::MAGIC
            || arg > emulated::MAX_BYTES
            || params > emulated::MAX_BYTES
            || rest.len() != arg + params
        {
            return None;
        }
        let call = Call {
            caller: Caller {
                file: id,
                root: packet.sender.is_some_and(|sender| sender.uid.is_root()),
            },
            escape: head.escape,
            arg: rest[..arg].to_vec(),
            params: rest[arg..].to_vec(),
            reply: packet.files.into_iter().next()?,
        };
        let now = now();
        if call.escape == u32::from(OPEN_EXECUTION) {
            return self.open_execution(call);
        }
        let connection = self.connections.get_mut(&id)?;
        let owner = connection.pid;
        let Role::Control(pending) = &mut connection.role else {
            return None;
        };
        if self.devices.profile.controls.own_process_only
            && call.escape == u32::from(escape::CONTROL)
            && (packet.sender).is_none_or(|it| it.pid.as_raw_nonzero().get() as u32 != owner)
        {
            let mut control = Control::read_from_bytes(&call.arg).ok()?;
            control.status = RmStatus::INSUFFICIENT_PERMISSIONS.0;
            wire::send_once(&call.reply, &answer(0, control.as_bytes(), &call.params));
            return Some(());
        }
        if *pending >= MAX_PENDING {
            return None;
        }
        *pending += 1;
        match self
            .tree
            .group_control(call.caller, call.escape, &call.arg, &call.params)
        {
            Some((device, group_control)) => {
                let every = self.devices.profile.controls.fail_every;
                let counted = matches!(group_control, GroupControl::Freeze | GroupControl::Thaw);
                self.switched += u64::from(counted);
                if counted && every > 0 && self.switched.is_multiple_of(every) {
                    *pending -= 1;
                    wire::send_once(&call.reply, &answer(libc::EIO as u32, &[], &[]));
                    return Some(());
                }
                let cost = self.cost(group_control);
                let device = self.devices.all.get_mut(device as usize)?;
                let due = device.control_until.max(now) + cost;
                device.control_until = due;
                self.after(due, Action::Control(call));
            }
            None => self.finish_control(call, now),
        }
        Some(())
    }

    /// What a control costs this time, in ns.
    pub(super) fn cost(&mut self, group_control: GroupControl) -> u64 {
        let costs = &self.devices.profile.controls;
        let (least, most) = match group_control {
            GroupControl::SetTimeslice => costs.set_timeslice_us,
            GroupControl::Freeze => costs.freeze_us,
            GroupControl::Thaw => costs.thaw_us,
            GroupControl::Preempt => costs.preempt_us,
        };
        // xorshift64
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (least * 1000) + self.random % ((most - least) * 1000 + 1)
    }

    /// Carries a call out, as at `due`, and answers it.
    pub(super) fn finish_control(&mut self, mut call: Call, due: u64) {
        for device in &mut self.devices.all {
            device.advance(due);
        }
        if let Some(Connection {
            role: Role::Control(pending),
            ..
        }) = self.connections.get_mut(&call.caller.file)
        {
            *pending -= 1;
        }
        let result = self.tree.call(
            &mut self.devices,
            call.caller,
            call.escape,
            &mut call.arg,
            &mut call.params,
        );
        let errno = result.err().unwrap_or(0) as u32;
        let answer = answer(errno, &call.arg, &call.params);
        let waiting = self.follow_controls();
        if waiting.is_empty() {
            wire::send_once(&call.reply, &answer);
            return;
        }
        let token = self.next_token;
        for execution in &waiting {
            self.ask_progress(*execution, token);
        }
        self.next_token += 1;
        self.freezes.insert(
            token,
            Freeze {
                waiting,
                answer,
                reply: call.reply,
            },
        );
        self.after(now() + PROGRESS_TIMEOUT, Action::FreezeTimeout(token));
    }

    /// After a call: closes contexts whose groups are gone. Returns those with kernels that were
    /// frozen in the middle.
    pub(super) fn follow_controls(&mut self) -> BTreeSet<u64> {
        let removed = std::mem::take(&mut self.devices.removed);
        let frozen = std::mem::take(&mut self.devices.frozen);
        let thawed_keys = std::mem::take(&mut self.devices.thawed);
        if removed.is_empty() && frozen.is_empty() && thawed_keys.is_empty() {
            return BTreeSet::new();
        }
        let with = |keys: &[GroupKey]| -> BTreeSet<u64> {
            let uses = |connection: &Connection| {
                matches!(&connection.role, Role::Execution(execution)
                    if execution.keys.iter().any(|key| keys.contains(key)))
            };
            let found = self.connections.iter().filter(|(_, it)| uses(it));
            found.map(|(id, _)| *id).collect()
        };
        let (orphans, frozen, thawed) = (with(&removed), with(&frozen), with(&thawed_keys));
        // What was completed before comes first.
        self.dispatch();
        self.closing.extend(orphans);
        // Interpreted kernels are the compute group's.
        let computes = |core: &Self, id: &u64| matches!(core.connections.get(id).map(|it| &it.role), Some(Role::Execution(it)) if it.keys[..1].iter().any(|key| thawed_keys.contains(key)));
        let thawed: Vec<u64> = thawed.into_iter().filter(|id| computes(self, id)).collect();
        for id in thawed {
            self.send(id, &Report::Thawed, None);
        }
        frozen
            .into_iter()
            .filter(|id| !self.interrupted(*id).is_empty())
            .collect()
    }

    /// An execution's kernels that are frozen in the middle.
    pub(super) fn interrupted(&self, id: u64) -> Vec<(u64, u64, u64)> {
        let Some(Role::Execution(execution)) = self.connections.get(&id).map(|it| &it.role) else {
            return Vec::new();
        };
        let device = &self.devices.all[execution.device as usize];
        let mut works = Vec::new();
        for group in execution.groups {
            if device.gpu.frozen(group) != Ok(true) {
                continue;
            }
            for progress in device.gpu.progress(group).unwrap_or_default() {
                match device.works.get(&progress.work) {
                    Some((owner, number, _)) if *owner == id => {
                        works.push((*number, progress.done, progress.total));
                    }
                    _ => {}
                }
            }
        }
        works
    }

    pub(super) fn ask_progress(&mut self, id: u64, token: u64) {
        let works = self.interrupted(id);
        self.flush(id);
        self.send(id, &Report::Progress { token, works }, None);
    }

    pub(super) fn finish_freeze(&mut self, token: u64) {
        if let Some(freeze) = self.freezes.remove(&token) {
            wire::send_once(&freeze.reply, &freeze.answer);
        }
    }

    pub(super) fn open_execution(&mut self, call: Call) -> Option<()> {
        let pid = self.connections.get(&call.caller.file)?.pid;
        let Ok(mut open) = OpenExecution::read_from_bytes(&call.arg) else {
            wire::send_once(&call.reply, &answer(libc::EINVAL as u32, &[], &[]));
            return Some(());
        };
        let made = self.make_execution(call.caller, &open);
        open.status = made.as_ref().err().copied().unwrap_or(RmStatus::OK).0;
        wire::send_once(&call.reply, &answer(0, open.as_bytes(), &[]));
        if let Ok(execution) = made {
            let device = execution.device;
            let role = Role::Execution(Box::new(execution));
            if self.add_connection(call.reply, pid, role).is_none() {
                let bytes = self.devices.profile.context_memory;
                self.devices.give(device, bytes);
                return None;
            }
            let process = self.processes.entry(pid).or_default();
            *process.contexts.entry(device).or_default() += 1;
        }
        Some(())
    }

    pub(super) fn make_execution(
        &mut self,
        caller: Caller,
        open: &OpenExecution,
    ) -> Result<Execution, RmStatus> {
        let mut keys = Vec::new();
        let mut groups = Vec::new();
        let mut on = None;
        for (handle, engine) in [
            (open.compute, Engine::Compute),
            (open.host_to_device, Engine::HostToDevice),
            (open.device_to_host, Engine::DeviceToHost),
        ] {
            let key = self.tree.group(caller, open.client, handle)?;
            let (device, group, found) = self
                .devices
                .group(key)
                .ok_or(RmStatus::INVALID_OBJECT_HANDLE)?;
            if found != engine || on.is_some_and(|on| on != device) {
                return Err(RmStatus::INVALID_ARGUMENT);
            }
            on = Some(device);
            keys.push(key);
            groups.push(group);
        }
        let (Some(device), Ok(keys), Ok(groups)) = (on, keys.try_into(), groups.try_into()) else {
            return Err(RmStatus::INVALID_ARGUMENT);
        };
        let bytes = self.devices.profile.context_memory;
        self.devices
            .take(device, bytes)
            .map_err(|_| RmStatus::NO_MEMORY)?;
        let partition = match open.sms {
            0 => None,
            sms => (self.devices.all.get_mut(device as usize)).map(|it| it.gpu.add_partition(sms)),
        };
        Ok(Execution {
            file: caller.file,
            ended: false,
            device,
            keys,
            groups,
            partition,
            streams: HashMap::new(),
            ending: BTreeSet::new(),
            works: HashMap::new(),
            done: Vec::new(),
        })
    }
}
