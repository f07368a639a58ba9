//! The kernel driver's resource manager: clients, their objects, and the processes that may name them.
//!
//! Strict as the real one: a client belongs to the open control file that made it, and a call
//! through another file gets `INVALID_CLIENT`, whatever its rights. Sizes must be exact. What the calls mean for the
//! hardware is left to the caller, through [`Hardware`].

use std::collections::{BTreeMap, BTreeSet};

use gpumux_core::Timeslice;
use gpumux_rm::{
    RmStatus,
    layout::{
        Alloc21, Alloc64, Control, DisableChannelsParams, DupObject, Free, GidInfoParams,
        GroupAlloc, GroupScheduleParams, InterleaveParams, PreemptionModeParams, Share,
        SubdeviceAlloc, TimesliceParams, XferCmd, class, cmd, engine, escape,
    },
};
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// An open control file: one connection.
pub(crate) type FileId = u64;

/// A channel group, however many handles lead to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct GroupKey(u64);

/// What the resource manager asks of the devices.
pub(crate) trait Hardware {
    /// Whether there is one with this number that can be used: a GPU that is partitioned is used by its instances.
    fn has(&self, device: u32) -> bool;
    /// UUID text of one.
    fn uuid(&self, device: u32) -> String;
    /// A group was made.
    fn add_group(&mut self, key: GroupKey, device: u32, engine: u32);
    /// Its last handle is gone.
    fn remove_group(&mut self, key: GroupKey);
    /// Its maker is gone, while others still have handles: nothing can run there any more.
    fn orphan_group(&mut self, key: GroupKey);
    /// Its slice.
    fn set_timeslice(&mut self, key: GroupKey, slice: Timeslice);
    /// Whether it is off the device.
    fn set_frozen(&mut self, key: GroupKey, frozen: bool);
}

/// The caller, by the kernel's report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Caller {
    /// The file it calls through.
    pub(crate) file: FileId,
    /// Whether it has `CAP_SYS_NICE`; here: is root.
    pub(crate) root: bool,
}

#[derive(Debug)]
struct Client {
    file: FileId,
    objects: BTreeMap<u32, Object>,
}

#[derive(Clone, Debug)]
struct Object {
    parent: u32,
    class: u32,
    kind: Kind,
}

#[derive(Clone, Debug)]
enum Kind {
    Device(u32),
    Subdevice(u32),
    Group(GroupKey),
    /// Of a group that need not have a handle of the same client (a duplicate does not own its channels).
    Channel(GroupKey),
}

#[derive(Debug)]
struct Group {
    /// Handles that lead to it.
    handles: usize,
    /// Its maker.
    file: FileId,
    device: u32,
    /// What GET reports: the last value set, before any a constant.
    reported: u64,
    /// All channels, and how often those that are disabled were.
    channels: BTreeSet<(u32, u32)>,
    disabled: BTreeMap<(u32, u32), u32>,
}

impl Group {
    fn frozen(&self) -> bool {
        let stopped = |client: u32| {
            let mut own = self.channels.range((client, 0)..=(client, u32::MAX));
            own.all(|channel| self.disabled.contains_key(channel))
        };
        self.channels.iter().any(|(client, _)| stopped(*client))
    }
}

/// Reported before any value was set: 128 << 3 (`kernel_channel_group`, Volta and later).
const UNSET_TIMESLICE: u64 = 1024;

/// A policy that names a client, added to those there are.
const SHARE_WITH_CLIENT: u32 = 3;

/// Most objects of one file's clients together: far above what programs use.
const MAX_OBJECTS: usize = 1 << 16;

/// All clients.
#[derive(Debug, Default)]
pub(crate) struct Tree {
    clients: BTreeMap<u32, Client>,
    groups: BTreeMap<GroupKey, Group>,
    /// Client and object, and a client that may duplicate it.
    shares: BTreeSet<(u32, u32, u32)>,
    next_client: u32,
    next_object: u32,
    next_group: u64,
}

/// A control with the device whose lock it takes and what kind it is, for its cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GroupControl {
    SetTimeslice,
    Freeze,
    Thaw,
    Preempt,
}

type Result<T> = std::result::Result<T, RmStatus>;

impl Tree {
    /// Works off one escape: `arg` and `params` are read and written back. `Err` is the errno of the
    /// ioctl itself; RM's answer is in the structure.
    pub(crate) fn call(
        &mut self,
        hardware: &mut dyn Hardware,
        caller: Caller,
        number: u32,
        arg: &mut [u8],
        params: &mut [u8],
    ) -> std::result::Result<(), i32> {
        let Ok(number) = u8::try_from(number) else {
            return Err(libc::ENOTTY);
        };
        match number {
            escape::ALLOC if arg.len() == size_of::<Alloc21>() => {
                let mut call = read::<Alloc21>(arg)?;
                let handles = [call.root, call.parent, call.object];
                let made = self.alloc(hardware, caller, handles, call.class, params);
                if let Ok(new) = made {
                    (call.object, call.root) = (new, if call.root == 0 { new } else { call.root });
                }
                call.status = status(made.map(drop));
                write(&call, arg);
            }
            escape::ALLOC => {
                let mut call = read::<Alloc64>(arg)?;
                let handles = [call.root, call.parent, call.object];
                let made = self.alloc(hardware, caller, handles, call.class, params);
                if let Ok(new) = made {
                    (call.object, call.root) = (new, if call.root == 0 { new } else { call.root });
                }
                call.status = status(made.map(drop));
                write(&call, arg);
            }
            escape::FREE => {
                let mut call = read::<Free>(arg)?;
                call.status = status(self.free(hardware, caller, call.root, call.object));
                write(&call, arg);
            }
            escape::DUP_OBJECT => {
                let mut call = read::<DupObject>(arg)?;
                let made = self.duplicate(hardware, caller, &call);
                if let Ok(new) = made {
                    call.object = new;
                }
                call.status = status(made.map(drop));
                write(&call, arg);
            }
            escape::SHARE => {
                let mut call = read::<Share>(arg)?;
                call.status = status(self.share(caller, &call));
                write(&call, arg);
            }
            escape::CONTROL => {
                let mut call = read::<Control>(arg)?;
                call.status = if call.params_size as usize == params.len() {
                    status(self.control(hardware, caller, &call, params))
                } else {
                    RmStatus::INVALID_ARGUMENT.0
                };
                write(&call, arg);
            }
            // The client library unpacks it.
            escape::XFER_CMD if arg.len() == size_of::<XferCmd>() => return Err(libc::EINVAL),
            _ => return Err(libc::ENOTTY),
        }
        Ok(())
    }

    /// The device and control of a control that takes noticeable time, if it is one that will work.
    pub(crate) fn group_control(
        &self,
        caller: Caller,
        number: u32,
        arg: &[u8],
        params: &[u8],
    ) -> Option<(u32, GroupControl)> {
        if number != u32::from(escape::CONTROL) {
            return None;
        }
        let call = Control::read_from_bytes(arg).ok()?;
        let group_control = match call.cmd {
            cmd::SET_TIMESLICE => GroupControl::SetTimeslice,
            cmd::PREEMPT => GroupControl::Preempt,
            cmd::DISABLE_CHANNELS if params.first() == Some(&0) => GroupControl::Thaw,
            cmd::DISABLE_CHANNELS => GroupControl::Freeze,
            _ => return None,
        };
        let object = self.object(caller, call.client, call.object).ok()?;
        let device = match object.kind {
            Kind::Device(device) | Kind::Subdevice(device) => device,
            Kind::Group(group) | Kind::Channel(group) => self.groups.get(&group)?.device,
        };
        Some((device, group_control))
    }

    /// The file was closed for the last time: its clients go.
    pub(crate) fn close(&mut self, hardware: &mut dyn Hardware, file: FileId) {
        let gone: Vec<u32> = self
            .clients
            .iter()
            .filter(|(_, client)| client.file == file)
            .map(|(handle, _)| *handle)
            .collect();
        for client in gone {
            self.free_client(hardware, client);
        }
        for (key, _) in self.groups.iter().filter(|(_, group)| group.file == file) {
            hardware.orphan_group(*key);
        }
    }

    /// The group behind a handle of a client that was made through this file.
    pub(crate) fn group(&self, caller: Caller, client: u32, handle: u32) -> Result<GroupKey> {
        match self.object(caller, client, handle)?.kind {
            Kind::Group(key) => Ok(key),
            _ => Err(RmStatus::INVALID_OBJECT_HANDLE),
        }
    }

    fn client(&self, caller: Caller, handle: u32) -> Result<&Client> {
        self.clients
            .get(&handle)
            .filter(|client| client.file == caller.file)
            .ok_or(RmStatus::INVALID_CLIENT)
    }

    fn object(&self, caller: Caller, client: u32, handle: u32) -> Result<&Object> {
        self.client(caller, client)?
            .objects
            .get(&handle)
            .ok_or(RmStatus::INVALID_OBJECT_HANDLE)
    }

    fn alloc(
        &mut self,
        hardware: &mut dyn Hardware,
        caller: Caller,
        [root, parent, object]: [u32; 3],
        class: u32,
        params: &[u8],
    ) -> Result<u32> {
        if class::is_client(class) {
            return self.alloc_client(caller, root, object);
        }
        let owned: usize = self
            .clients
            .values()
            .filter(|client| client.file == caller.file)
            .map(|client| client.objects.len())
            .sum();
        if owned >= MAX_OBJECTS {
            return Err(RmStatus::INSUFFICIENT_RESOURCES);
        }
        let client = self.client(caller, root)?;
        let of = |class: u32| {
            client
                .objects
                .get(&parent)
                .filter(|object| object.class == class)
                .map(|object| &object.kind)
                .ok_or(RmStatus::INVALID_OBJECT_PARENT)
        };
        let kind = match class {
            class::DEVICE => {
                if parent != root {
                    return Err(RmStatus::INVALID_OBJECT_PARENT);
                }
                let device = word(params, 0)?;
                if !hardware.has(device) {
                    return Err(RmStatus::INVALID_DEVICE);
                }
                Kind::Device(device)
            }
            class::SUBDEVICE => {
                let Kind::Device(device) = *of(class::DEVICE)? else {
                    return Err(RmStatus::INVALID_OBJECT_PARENT);
                };
                if !params.is_empty() && exact::<SubdeviceAlloc>(params)?.subdevice_id != 0 {
                    return Err(RmStatus::INVALID_ARGUMENT);
                }
                Kind::Subdevice(device)
            }
            class::CHANNEL_GROUP => {
                let Kind::Device(device) = *of(class::DEVICE)? else {
                    return Err(RmStatus::INVALID_OBJECT_PARENT);
                };
                let engine = exact::<GroupAlloc>(params)?.engine;
                if engine != engine::GR0 && !(engine::COPY0..=engine::COPY9).contains(&engine) {
                    return Err(RmStatus::INVALID_ARGUMENT);
                }
                self.next_group += 1;
                let key = GroupKey(self.next_group);
                self.groups.insert(
                    key,
                    Group {
                        handles: 0,
                        file: caller.file,
                        device,
                        reported: UNSET_TIMESLICE,
                        channels: BTreeSet::new(),
                        disabled: BTreeMap::new(),
                    },
                );
                hardware.add_group(key, device, engine);
                Kind::Group(key)
            }
            class if class::is_channel(class) => match *of(class::CHANNEL_GROUP)? {
                Kind::Group(key) => Kind::Channel(key),
                _ => return Err(RmStatus::INVALID_OBJECT_PARENT),
            },
            _ => return Err(RmStatus::INVALID_CLASS),
        };
        let new = self.insert(
            root,
            object,
            Object {
                parent,
                class,
                kind: kind.clone(),
            },
        );
        if let (Err(_), Kind::Group(key)) = (&new, &kind) {
            self.groups.remove(key);
            hardware.remove_group(*key);
        }
        self.follow(hardware, &kind);
        new
    }

    fn alloc_client(&mut self, caller: Caller, root: u32, object: u32) -> Result<u32> {
        let owned = |client: &&Client| client.file == caller.file;
        if self.clients.values().filter(owned).count() >= MAX_OBJECTS / 64 {
            return Err(RmStatus::INSUFFICIENT_RESOURCES);
        }
        let asked = if object == 0 { root } else { object };
        let handle = if asked == 0 {
            loop {
                self.next_client = (self.next_client + 1) % 0xffff;
                let handle = 0xc1d0_0000 | self.next_client;
                if !self.clients.contains_key(&handle) {
                    break handle;
                }
            }
        } else {
            asked
        };
        if self.clients.contains_key(&handle) {
            return Err(RmStatus::INSERT_DUPLICATE_NAME);
        }
        self.clients.insert(
            handle,
            Client {
                file: caller.file,
                objects: BTreeMap::new(),
            },
        );
        Ok(handle)
    }

    /// Puts an object under its handle, or under a new one for 0.
    fn insert(&mut self, root: u32, handle: u32, object: Object) -> Result<u32> {
        let client = self
            .clients
            .get_mut(&root)
            .ok_or(RmStatus::INVALID_CLIENT)?;
        let handle = if handle == 0 {
            loop {
                self.next_object = (self.next_object + 1) & 0x00ff_ffff;
                let handle = 0xca00_0000 | self.next_object;
                if !client.objects.contains_key(&handle) {
                    break handle;
                }
            }
        } else {
            handle
        };
        if handle == root || client.objects.contains_key(&handle) {
            return Err(RmStatus::INSERT_DUPLICATE_NAME);
        }
        match &object.kind {
            Kind::Group(key) => {
                if let Some(group) = self.groups.get_mut(key) {
                    group.handles += 1;
                }
            }
            Kind::Channel(key) => {
                if let Some(group) = self.groups.get_mut(key) {
                    group.channels.insert((root, handle));
                }
            }
            Kind::Device(_) | Kind::Subdevice(_) => {}
        }
        client.objects.insert(handle, object);
        Ok(handle)
    }

    fn duplicate(
        &mut self,
        hardware: &mut dyn Hardware,
        caller: Caller,
        call: &DupObject,
    ) -> Result<u32> {
        self.client(caller, call.client)?;
        let source = match self.object(caller, call.client_src, call.object_src) {
            // Another file's, by the policy that its owner has set: so do MPS servers.
            Err(_)
                if self
                    .shares
                    .contains(&(call.client_src, call.object_src, call.client)) =>
            {
                let owner = self.clients.get(&call.client_src);
                owner.and_then(|owner| owner.objects.get(&call.object_src))
            }
            own => Some(own?),
        };
        let source = source.ok_or(RmStatus::INVALID_OBJECT_HANDLE)?.clone();
        if !matches!(source.kind, Kind::Group(_)) {
            return Err(RmStatus::NOT_SUPPORTED);
        }
        let parent = self.object(caller, call.client, call.parent)?;
        if !matches!(parent.kind, Kind::Device(_)) {
            return Err(RmStatus::INVALID_OBJECT_PARENT);
        }
        let kind = source.kind.clone();
        let object = Object {
            parent: call.parent,
            ..source
        };
        let new = self.insert(call.client, call.object, object);
        self.follow(hardware, &kind);
        new
    }

    /// Lets another client duplicate an object.
    fn share(&mut self, caller: Caller, call: &Share) -> Result<()> {
        self.object(caller, call.client, call.object)?;
        if (call.kind, call.access) != (SHARE_WITH_CLIENT, 1) {
            return Err(RmStatus::NOT_SUPPORTED);
        }
        if self.shares.len() >= MAX_OBJECTS {
            return Err(RmStatus::INSUFFICIENT_RESOURCES);
        }
        self.shares.insert((call.client, call.object, call.target));
        Ok(())
    }

    fn free(
        &mut self,
        hardware: &mut dyn Hardware,
        caller: Caller,
        root: u32,
        object: u32,
    ) -> Result<()> {
        self.client(caller, root)?;
        if object == root {
            self.free_client(hardware, root);
            return Ok(());
        }
        self.object(caller, root, object)?;
        self.free_object(hardware, root, object);
        Ok(())
    }

    fn free_client(&mut self, hardware: &mut dyn Hardware, root: u32) {
        while let Some(object) = self
            .clients
            .get(&root)
            .and_then(|client| client.objects.keys().next().copied())
        {
            self.free_object(hardware, root, object);
        }
        self.clients.remove(&root);
        let gone = |(owner, _, target): &(u32, u32, u32)| *owner == root || *target == root;
        self.shares.retain(|share| !gone(share));
    }

    /// Frees an object after its children.
    fn free_object(&mut self, hardware: &mut dyn Hardware, root: u32, handle: u32) {
        let mut doomed = vec![handle];
        let mut at = 0;
        while let (Some(parent), Some(client)) = (doomed.get(at).copied(), self.clients.get(&root))
        {
            at += 1;
            let children = client
                .objects
                .iter()
                .filter(|(_, object)| object.parent == parent)
                .map(|(handle, _)| *handle);
            doomed.extend(children);
        }
        for handle in doomed.into_iter().rev() {
            let Some(object) = self
                .clients
                .get_mut(&root)
                .and_then(|client| client.objects.remove(&handle))
            else {
                continue;
            };
            if let Kind::Channel(key) = &object.kind
                && let Some(group) = self.groups.get_mut(key)
            {
                group.channels.remove(&(root, handle));
                group.disabled.remove(&(root, handle));
            }
            if let Kind::Group(key) = &object.kind
                && let Some(group) = self.groups.get_mut(key)
            {
                group.handles -= 1;
                if group.handles == 0 {
                    self.groups.remove(key);
                    hardware.remove_group(*key);
                }
            }
            self.follow(hardware, &object.kind);
        }
    }

    /// Tells the hardware whether a group may run, after its channels changed.
    fn follow(&self, hardware: &mut dyn Hardware, kind: &Kind) {
        if let Kind::Group(key) | Kind::Channel(key) = kind
            && let Some(group) = self.groups.get(key)
        {
            hardware.set_frozen(*key, group.frozen());
        }
    }

    fn control(
        &mut self,
        hardware: &mut dyn Hardware,
        caller: Caller,
        call: &Control,
        params: &mut [u8],
    ) -> Result<()> {
        let kind = self.object(caller, call.client, call.object)?.kind.clone();
        match (call.cmd, kind) {
            (cmd::GROUP_SCHEDULE, Kind::Group(_)) => {
                exact::<GroupScheduleParams>(params)?;
                Ok(())
            }
            (cmd::SET_TIMESLICE, Kind::Group(key)) => {
                let us = exact::<TimesliceParams>(params)?.timeslice_us;
                if !(Timeslice::MIN.0..=Timeslice::MAX.0).contains(&us) {
                    return Err(RmStatus::INVALID_ARGUMENT);
                }
                if let Some(group) = self.groups.get_mut(&key) {
                    group.reported = us;
                }
                hardware.set_timeslice(key, Timeslice(us));
                Ok(())
            }
            (cmd::GET_TIMESLICE, Kind::Group(key)) => {
                let mut out = exact::<TimesliceParams>(params)?;
                out.timeslice_us = self
                    .groups
                    .get(&key)
                    .map_or(UNSET_TIMESLICE, |group| group.reported);
                write(&out, params);
                Ok(())
            }
            // Off the device and on again; the model has no use for more.
            (cmd::PREEMPT, Kind::Group(_)) => match params.len() {
                8 => Ok(()),
                _ => Err(RmStatus::INVALID_PARAM_STRUCT),
            },
            (cmd::SET_INTERLEAVE_LEVEL, Kind::Group(_)) => {
                let level = exact::<InterleaveParams>(params)?.level;
                if !caller.root {
                    return Err(RmStatus::INSUFFICIENT_PERMISSIONS);
                }
                if level > 2 {
                    return Err(RmStatus::INVALID_ARGUMENT);
                }
                Ok(())
            }
            (cmd::DISABLE_CHANNELS, Kind::Subdevice(device)) => {
                let request = exact::<DisableChannelsParams>(params)?;
                self.disable(hardware, caller, device, &request)
            }
            (cmd::SET_PREEMPTION_MODE, Kind::Subdevice(_)) => {
                let request = exact::<PreemptionModeParams>(params)?;
                match self
                    .object(caller, call.client, request.channel)
                    .map(|object| &object.kind)
                {
                    Ok(Kind::Channel(_) | Kind::Group(_)) if request.compute <= 2 => Ok(()),
                    Ok(Kind::Channel(_) | Kind::Group(_)) => Err(RmStatus::INVALID_ARGUMENT),
                    _ => Err(RmStatus::INVALID_CHANNEL),
                }
            }
            (cmd::GET_GID_INFO, Kind::Subdevice(device)) => {
                let mut out = exact::<GidInfoParams>(params)?;
                if out.flags & 3 != 0 {
                    return Err(RmStatus::NOT_SUPPORTED);
                }
                let text = hardware.uuid(device);
                out.data = [0; 256];
                out.data[..text.len()].copy_from_slice(text.as_bytes());
                out.length = text.len() as u32 + 1;
                write(&out, params);
                Ok(())
            }
            _ => Err(RmStatus::NOT_SUPPORTED),
        }
    }

    fn disable(
        &mut self,
        hardware: &mut dyn Hardware,
        caller: Caller,
        device: u32,
        request: &DisableChannelsParams,
    ) -> Result<()> {
        let count = request.count as usize;
        if count > request.channels.len() || request.event != 0 {
            return Err(RmStatus::INVALID_ARGUMENT);
        }
        let mut touched = BTreeSet::new();
        for (client, channel) in request.clients.iter().zip(&request.channels).take(count) {
            // The firmware takes root at its word about other files' channels.
            let owner = self
                .clients
                .get(client)
                .filter(|owner| owner.file == caller.file || caller.root)
                .ok_or(RmStatus::INVALID_CLIENT)?;
            let key = match owner.objects.get(channel).map(|object| &object.kind) {
                Some(Kind::Channel(key)) => *key,
                _ => return Err(RmStatus::INVALID_CHANNEL),
            };
            if self.groups.get(&key).map(|group| group.device) != Some(device) {
                return Err(RmStatus::INVALID_CHANNEL);
            }
            touched.insert(key);
        }
        // All are checked: only now anything changes.
        for pair in request
            .clients
            .iter()
            .copied()
            .zip(request.channels)
            .take(count)
        {
            for key in &touched {
                if let Some(group) = self.groups.get_mut(key)
                    && group.channels.contains(&pair)
                {
                    let times = group.disabled.remove(&pair).unwrap_or(0);
                    // Each disabling needs an enabling of its own.
                    let times = match request.disable != 0 {
                        true => times + 1,
                        false => times.saturating_sub(1),
                    };
                    group.disabled.extend((times > 0).then_some((pair, times)));
                }
            }
        }
        for key in touched {
            self.follow(hardware, &Kind::Group(key));
        }
        Ok(())
    }
}

fn status(result: Result<()>) -> u32 {
    result.err().unwrap_or(RmStatus::OK).0
}

/// The structure that an escape must carry, exactly. Copied, because packets are not aligned.
fn read<T: FromBytes>(bytes: &[u8]) -> std::result::Result<T, i32> {
    T::read_from_bytes(bytes).map_err(|_| libc::EINVAL)
}

/// Writes it back.
fn write(value: &(impl IntoBytes + Immutable), bytes: &mut [u8]) {
    // The sizes are equal: it was read from there.
    let _ = value.write_to(bytes);
}

/// A control's parameters, exactly.
fn exact<T: FromBytes>(bytes: &[u8]) -> Result<T> {
    T::read_from_bytes(bytes).map_err(|_| RmStatus::INVALID_PARAM_STRUCT)
}

/// A 32-bit word of parameters that may be longer.
fn word(bytes: &[u8], at: usize) -> Result<u32> {
    u32::read_from_prefix(bytes.get(at..).unwrap_or_default())
        .map(|(word, _)| word)
        .map_err(|_| RmStatus::INVALID_PARAM_STRUCT)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Remembers what it received.
    #[derive(Default)]
    struct Fake {
        groups: BTreeMap<GroupKey, (u32, u32)>,
        slices: BTreeMap<GroupKey, u64>,
        frozen: BTreeSet<GroupKey>,
        orphans: BTreeSet<GroupKey>,
    }

    impl Hardware for Fake {
        fn has(&self, device: u32) -> bool {
            device < 2
        }
        fn uuid(&self, device: u32) -> String {
            format!("GPU-{device}")
        }
        fn add_group(&mut self, key: GroupKey, device: u32, engine: u32) {
            self.groups.insert(key, (device, engine));
        }
        fn remove_group(&mut self, key: GroupKey) {
            assert!(self.groups.remove(&key).is_some());
            self.frozen.remove(&key);
        }
        fn orphan_group(&mut self, key: GroupKey) {
            self.orphans.insert(key);
        }
        fn set_timeslice(&mut self, key: GroupKey, slice: Timeslice) {
            self.slices.insert(key, slice.0);
        }
        fn set_frozen(&mut self, key: GroupKey, frozen: bool) {
            if frozen {
                self.frozen.insert(key);
            } else {
                self.frozen.remove(&key);
            }
        }
    }

    const ME: Caller = Caller {
        file: 1,
        root: false,
    };
    const OTHER: Caller = Caller {
        file: 2,
        root: false,
    };
    const ROOT: Caller = Caller {
        file: 3,
        root: true,
    };

    #[derive(Default)]
    struct Driver {
        tree: Tree,
        fake: Fake,
    }

    impl Driver {
        fn alloc(
            &mut self,
            by: Caller,
            root: u32,
            parent: u32,
            class: u32,
            params: &[u8],
        ) -> std::result::Result<u32, RmStatus> {
            let mut call = Alloc64 {
                root,
                parent,
                class,
                ..Default::default()
            };
            let mut params = params.to_vec();
            let number = escape::ALLOC.into();
            self.tree
                .call(&mut self.fake, by, number, call.as_mut_bytes(), &mut params)
                .unwrap();
            match call.status {
                0 => Ok(call.object),
                other => Err(RmStatus(other)),
            }
        }

        fn control(
            &mut self,
            by: Caller,
            client: u32,
            object: u32,
            cmd: u32,
            params: &mut [u8],
        ) -> RmStatus {
            let mut call = Control {
                client,
                object,
                cmd,
                params_size: params.len() as u32,
                ..Default::default()
            };
            let number = escape::CONTROL.into();
            self.tree
                .call(&mut self.fake, by, number, call.as_mut_bytes(), params)
                .unwrap();
            RmStatus(call.status)
        }

        fn free(&mut self, by: Caller, root: u32, object: u32) -> RmStatus {
            let mut call = Free {
                root,
                object,
                ..Default::default()
            };
            let number = escape::FREE.into();
            self.tree
                .call(&mut self.fake, by, number, call.as_mut_bytes(), &mut [])
                .unwrap();
            RmStatus(call.status)
        }

        /// Client, device, subdevice, group and two channels.
        fn context(&mut self, by: Caller) -> [u32; 6] {
            let client = self.alloc(by, 0, 0, class::ROOT_CLIENT, &[]).unwrap();
            let device = self
                .alloc(by, client, client, class::DEVICE, &1u32.to_le_bytes())
                .unwrap();
            let subdevice = self
                .alloc(by, client, device, class::SUBDEVICE, &[0; 4])
                .unwrap();
            let group = GroupAlloc {
                engine: 1,
                ..Default::default()
            };
            let group = self
                .alloc(by, client, device, class::CHANNEL_GROUP, group.as_bytes())
                .unwrap();
            let channel = || (client, group, 0xc86f, [].as_slice());
            let [a, b] = [channel(), channel()].map(|(client, group, class, none)| {
                self.alloc(by, client, group, class, none).unwrap()
            });
            [client, device, subdevice, group, a, b]
        }
    }

    fn disable(on: bool, client: u32, channels: &[u32]) -> DisableChannelsParams {
        let mut params = DisableChannelsParams {
            disable: on.into(),
            count: channels.len() as u32,
            ..Default::default()
        };
        params.clients[..channels.len()].fill(client);
        params.channels[..channels.len()].copy_from_slice(channels);
        params
    }

    #[test]
    fn only_the_file_that_made_a_client_may_use_it() {
        let mut driver = Driver::default();
        let [client, device, subdevice, group, a, b] = driver.context(ME);
        for foreign in [OTHER, ROOT] {
            let mut slice = 1u64.to_le_bytes();
            let answer = driver.control(foreign, client, group, cmd::SET_TIMESLICE, &mut slice);
            assert_eq!(answer, RmStatus::INVALID_CLIENT);
            assert_eq!(
                driver.free(foreign, client, device),
                RmStatus::INVALID_CLIENT
            );
            let made = driver.alloc(foreign, client, device, class::SUBDEVICE, &[]);
            assert_eq!(made, Err(RmStatus::INVALID_CLIENT));
        }
        // A foreign process's own subdevice does not help, unless it is root's.
        for (foreign, expected) in [(OTHER, RmStatus::INVALID_CLIENT), (ROOT, RmStatus::OK)] {
            let [own, _, own_subdevice, ..] = driver.context(foreign);
            let mut params = disable(true, client, &[a, b]);
            let answer = driver.control(
                foreign,
                own,
                own_subdevice,
                cmd::DISABLE_CHANNELS,
                params.as_mut_bytes(),
            );
            assert_eq!(answer, expected);
        }
        assert_eq!(driver.fake.frozen.len(), 1);
        let _ = subdevice;
    }

    #[test]
    fn a_group_is_frozen_when_all_its_channels_are() {
        let mut driver = Driver::default();
        let [client, _, subdevice, _, a, b] = driver.context(ME);
        for (on, channels, frozen) in [
            (true, vec![a], 0),
            (true, vec![b], 1),
            (false, vec![a], 0),
            (true, vec![a, b], 1),
            (false, vec![a, b], 0),
        ] {
            let mut params = disable(on, client, &channels);
            let params = params.as_mut_bytes();
            let answer = driver.control(ME, client, subdevice, cmd::DISABLE_CHANNELS, params);
            assert_eq!(answer, RmStatus::OK);
            assert_eq!(driver.fake.frozen.len(), frozen);
        }
        // What was disabled three times is to be enabled three times; one time more does nothing.
        for (on, frozen) in [
            (true, 1),
            (true, 1),
            (true, 1),
            (false, 1),
            (false, 1),
            (false, 0),
            (false, 0),
            (true, 1),
            (false, 0),
        ] {
            let mut params = disable(on, client, &[a, b]);
            let params = params.as_mut_bytes();
            let answer = driver.control(ME, client, subdevice, cmd::DISABLE_CHANNELS, params);
            assert_eq!((answer, driver.fake.frozen.len()), (RmStatus::OK, frozen));
        }
        // One wrong channel, and nothing happens.
        let mut params = disable(true, client, &[a, b, 77]);
        let params = params.as_mut_bytes();
        let answer = driver.control(ME, client, subdevice, cmd::DISABLE_CHANNELS, params);
        assert_eq!(answer, RmStatus::INVALID_CHANNEL);
        assert!(driver.fake.frozen.is_empty());
    }

    #[test]
    fn sizes_are_exact() {
        let mut driver = Driver::default();
        let [client, _, subdevice, group, ..] = driver.context(ME);
        for (object, cmd, size) in [
            (group, cmd::SET_TIMESLICE, 8),
            (group, cmd::GET_TIMESLICE, 8),
            (group, cmd::GROUP_SCHEDULE, 3),
            (group, cmd::PREEMPT, 8),
            (subdevice, cmd::DISABLE_CHANNELS, 536),
            (subdevice, cmd::GET_GID_INFO, 268),
        ] {
            for wrong in [0, size - 1, size + 1] {
                let answer = driver.control(ME, client, object, cmd, &mut vec![0; wrong]);
                assert_eq!(answer, RmStatus::INVALID_PARAM_STRUCT, "{cmd:x} {wrong}");
            }
        }
        let mut arg = [0; 31];
        let number = escape::CONTROL.into();
        let answer = driver
            .tree
            .call(&mut driver.fake, ME, number, &mut arg, &mut []);
        assert_eq!(answer, Err(libc::EINVAL));
        let made = driver.alloc(ME, client, client, class::DEVICE, &[0; 3]);
        assert_eq!(made, Err(RmStatus::INVALID_PARAM_STRUCT));
    }

    #[test]
    fn slices_are_read_back_and_bounded() {
        let mut driver = Driver::default();
        let [client, _, _, group, ..] = driver.context(ME);
        let read = |driver: &mut Driver| {
            let mut params = [0; 8];
            let answer = driver.control(ME, client, group, cmd::GET_TIMESLICE, &mut params);
            assert_eq!(answer, RmStatus::OK);
            u64::from_le_bytes(params)
        };
        assert_eq!(read(&mut driver), 1024);
        for (us, expected) in [
            (0, RmStatus::INVALID_ARGUMENT),
            (1, RmStatus::OK),
            (1_000_000, RmStatus::OK),
            (1_000_001, RmStatus::INVALID_ARGUMENT),
            (u64::MAX, RmStatus::INVALID_ARGUMENT),
        ] {
            let mut params = us.to_le_bytes();
            let answer = driver.control(ME, client, group, cmd::SET_TIMESLICE, &mut params);
            assert_eq!(answer, expected, "{us}");
        }
        assert_eq!(read(&mut driver), 1_000_000);
        assert_eq!(
            driver.fake.slices.values().collect::<Vec<_>>(),
            [&1_000_000]
        );
    }

    #[test]
    fn interleave_needs_the_right() {
        let mut driver = Driver::default();
        for (by, expected) in [
            (ME, RmStatus::INSUFFICIENT_PERMISSIONS),
            (ROOT, RmStatus::OK),
        ] {
            let [client, _, _, group, ..] = driver.context(by);
            let mut level = 2u32.to_le_bytes();
            let answer = driver.control(by, client, group, cmd::SET_INTERLEAVE_LEVEL, &mut level);
            assert_eq!(answer, expected);
        }
    }

    #[test]
    fn freeing_takes_the_children_along() {
        let mut driver = Driver::default();
        let [client, device, _, group, a, _] = driver.context(ME);
        assert_eq!(driver.free(ME, client, device), RmStatus::OK);
        assert!(driver.fake.groups.is_empty());
        for gone in [device, group, a] {
            assert_eq!(
                driver.free(ME, client, gone),
                RmStatus::INVALID_OBJECT_HANDLE
            );
        }
        assert_eq!(driver.free(ME, client, client), RmStatus::OK);
        assert_eq!(driver.free(ME, client, client), RmStatus::INVALID_CLIENT);
    }

    #[test]
    fn the_last_close_takes_everything() {
        let mut driver = Driver::default();
        driver.context(ME);
        driver.context(ME);
        driver.context(OTHER);
        driver.tree.close(&mut driver.fake, ME.file);
        assert_eq!(driver.fake.groups.len(), 1);
        driver.tree.close(&mut driver.fake, OTHER.file);
        assert!(driver.fake.groups.is_empty());
        assert!(driver.tree.clients.is_empty() && driver.tree.groups.is_empty());
    }

    #[test]
    fn a_duplicate_keeps_its_group() {
        let mut driver = Driver::default();
        let [client, device, _, group, ..] = driver.context(ME);
        let [other, other_device, ..] = driver.context(ME);
        let mut call = DupObject {
            client: other,
            parent: other_device,
            client_src: client,
            object_src: group,
            ..Default::default()
        };
        let number = escape::DUP_OBJECT.into();
        driver
            .tree
            .call(&mut driver.fake, ME, number, call.as_mut_bytes(), &mut [])
            .unwrap();
        assert_eq!(call.status, 0);
        assert_eq!(driver.free(ME, client, device), RmStatus::OK);
        assert_eq!(driver.fake.groups.len(), 2);
        let mut slice = 7u64.to_le_bytes();
        let answer = driver.control(ME, other, call.object, cmd::SET_TIMESLICE, &mut slice);
        assert_eq!(answer, RmStatus::OK);
        assert_eq!(driver.free(ME, other, call.object), RmStatus::OK);
        assert_eq!(driver.fake.groups.len(), 1);
    }

    #[test]
    fn a_group_is_shared_with_whom_its_owner_names_and_frozen_when_all_are() {
        let mut driver = Driver::default();
        let [server, _, _, group, ..] = driver.context(ME);
        let [client, device, subdevice, ..] = driver.context(OTHER);
        let duplicate = |driver: &mut Driver| {
            let mut call = DupObject {
                client,
                parent: device,
                client_src: server,
                object_src: group,
                ..Default::default()
            };
            let number = escape::DUP_OBJECT.into();
            (driver.tree)
                .call(
                    &mut driver.fake,
                    OTHER,
                    number,
                    call.as_mut_bytes(),
                    &mut [],
                )
                .unwrap();
            (RmStatus(call.status), call.object)
        };
        assert_eq!(duplicate(&mut driver).0, RmStatus::INVALID_CLIENT);
        for (by, expected) in [(OTHER, RmStatus::INVALID_CLIENT), (ME, RmStatus::OK)] {
            let mut call = Share {
                client: server,
                object: group,
                target: client,
                access: 1,
                kind: SHARE_WITH_CLIENT,
                status: 0,
            };
            let number = escape::SHARE.into();
            (driver.tree)
                .call(&mut driver.fake, by, number, call.as_mut_bytes(), &mut [])
                .unwrap();
            assert_eq!(RmStatus(call.status), expected);
        }
        let (answer, shared) = duplicate(&mut driver);
        assert_eq!(answer, RmStatus::OK);
        let mut slice = 7u64.to_le_bytes();
        let answer = driver.control(OTHER, client, shared, cmd::SET_TIMESLICE, &mut slice);
        assert_eq!(answer, RmStatus::OK);
        // The server's channels are not the client's to freeze.
        let channel = driver.alloc(OTHER, client, shared, 0xc86f, &[]).unwrap();
        let mut params = disable(true, client, &[channel]);
        let params = params.as_mut_bytes();
        let answer = driver.control(OTHER, client, subdevice, cmd::DISABLE_CHANNELS, params);
        assert_eq!(answer, RmStatus::OK);
        assert_eq!(driver.fake.frozen.len(), 1);
        let _ = driver.free(OTHER, client, channel);
        assert!(driver.fake.frozen.is_empty());
        driver.tree.close(&mut driver.fake, ME.file);
        assert_eq!(driver.fake.orphans.len(), 1);
        driver.tree.close(&mut driver.fake, OTHER.file);
        assert!(driver.fake.groups.is_empty() && driver.tree.shares.is_empty());
    }

    #[test]
    fn uuids_are_terminated_text() {
        let mut driver = Driver::default();
        let [client, _, subdevice, ..] = driver.context(ME);
        let mut params = GidInfoParams::default();
        let bytes = params.as_mut_bytes();
        let answer = driver.control(ME, client, subdevice, cmd::GET_GID_INFO, bytes);
        assert_eq!(answer, RmStatus::OK);
        assert_eq!(&params.data[..params.length as usize], b"GPU-1\0");
    }

    proptest::proptest! {
        /// No sequence of calls with any handles panics or lets a file touch another's objects.
        #[test]
        fn any_calls(calls in proptest::collection::vec(
            (1..3u64, 0..8u32, proptest::collection::vec(0..8u32, 12), 0..40usize), 0..60)
        ) {
            let mut driver = Driver::default();
            let [client, ..] = driver.context(Caller { file: 9, root: false });
            let groups = driver.fake.groups.len();
            for (file, number, words, length) in calls {
                let number = [0x29, 0x2a, 0x2b, 0x2b, 0x34, 0x2b, 0x2a, 211][number as usize];
                let sizes = [16, 32, 48, 32, 28, 48, 32, 16];
                let classes = [0x41, 0x80, 0x2080, 0xa06c, 0xc86f, 1, 2, 0xa06c_0103];
                let words: Vec<u32> = words
                    .iter()
                    .enumerate()
                    .map(|(i, word)| match i {
                        0 | 1 if *word > 5 => client,
                        2 if number == 0x2a => classes[*word as usize],
                        3 if number == 0x2b => classes[*word as usize],
                        _ => *word,
                    })
                    .collect();
                let mut arg = words.as_bytes().to_vec();
                arg.truncate(sizes[(words[4] % 8) as usize]);
                let mut params = vec![1; length];
                let caller = Caller { file, root: false };
                let _ = driver.tree.call(&mut driver.fake, caller, number, &mut arg, &mut params);
            }
            driver.tree.close(&mut driver.fake, 1);
            driver.tree.close(&mut driver.fake, 2);
            proptest::prop_assert_eq!(driver.fake.groups.len(), groups);
        }
    }
}
