//! The calls that libcuda makes to the resource manager, in its order (traced with driver 580.159): one file and one
//! client per process, a device and a subdevice per GPU, and per context a compute group and three copy groups
//! with their channels, each scheduled; last the compute group's slice.

use std::{
    collections::HashMap,
    io,
    os::fd::{AsFd, AsRawFd, OwnedFd},
};

use gpumux_emu::{client::Execution, mps::Member};
use gpumux_rm::{
    RmStatus,
    layout::{
        Alloc64, ChannelAllocHead, Control, DeviceAllocHead, DupObject, Free, GroupAlloc,
        GroupScheduleParams, SubdeviceAlloc, TimesliceParams, class, cmd, engine, escape, iowr,
    },
};
use zerocopy::{FromBytes, IntoBytes};

use crate::{
    error::{CuError, Result},
    system::outward,
};

/// Hopper's channel class.
const CHANNEL: u32 = 0xc86f;
/// Engines of a context's groups and how many channels each has.
const GROUPS: [(u32, usize); 4] = [(engine::GR0, 8), (11, 4), (12, 4), (13, 4)];
/// What libcuda sets for its compute group, in µs.
const TIMESLICE: u64 = 2048;

/// The process's open control file and client.
pub(crate) struct Rm {
    file: OwnedFd,
    client: u32,
    next: u32,
    /// Device and subdevice handles.
    devices: HashMap<u32, (u32, u32)>,
    /// Its MPS server, whose groups it uses.
    mps: Option<Member>,
}

/// The handles of one context.
#[derive(Debug)]
pub(crate) struct Groups {
    client: u32,
    device: u32,
    groups: Vec<u32>,
    channels: Vec<u32>,
}

fn failed(error: io::Error) -> CuError {
    match error.raw_os_error() {
        Some(libc::ENOENT | libc::ENODEV | libc::ECONNREFUSED | libc::EACCES) => CuError::NO_DEVICE,
        _ => CuError::DEVICE_UNAVAILABLE,
    }
}

fn check(status: u32) -> Result {
    match RmStatus(status) {
        RmStatus::OK => Ok(()),
        RmStatus::NO_MEMORY | RmStatus::INSUFFICIENT_RESOURCES => Err(CuError::OUT_OF_MEMORY),
        _ => Err(CuError::DEVICE_UNAVAILABLE),
    }
}

impl Rm {
    pub(crate) fn open() -> Result<Self> {
        let file = outward::open(c"/dev/nvidiactl").map_err(failed)?;
        let mut this = Self {
            file,
            client: 0,
            next: 0x5c00_0000,
            devices: HashMap::new(),
            mps: None,
        };
        this.client = this.alloc(0, 0, class::ROOT_CLIENT, &mut [])?;
        this.mps = Member::join(this.client).map_err(|error| {
            eprintln!("gpumux: {error}");
            match error.kind() {
                io::ErrorKind::ConnectionRefused => CuError::MPS_SERVER_NOT_READY,
                _ => CuError::MPS_CONNECTION_FAILED,
            }
        })?;
        Ok(this)
    }

    /// Makes a context's groups.
    pub(crate) fn make_groups(&mut self, index: u32) -> Result<Groups> {
        let (device, _) = self.device(index)?;
        let mut made = Groups {
            client: self.client,
            device,
            groups: Vec::new(),
            channels: Vec::new(),
        };
        let result = match &self.mps {
            Some(mps) => {
                let groups = mps
                    .groups(index)
                    .map_err(|_| CuError::MPS_CONNECTION_FAILED)?;
                self.fill_shared(&mut made, groups)
            }
            None => self.fill(&mut made),
        };
        if result.is_err() {
            self.free_groups(&made);
        }
        result.map(|()| made)
    }

    fn fill(&mut self, made: &mut Groups) -> Result {
        for (engine, channels) in GROUPS {
            let mut params = GroupAlloc {
                engine,
                ..Default::default()
            };
            let params = params.as_mut_bytes();
            let group = self.alloc(self.client, made.device, class::CHANNEL_GROUP, params)?;
            made.groups.push(group);
            self.add_channels(made, group, engine, channels)?;
            let mut schedule = GroupScheduleParams {
                enable: 1,
                ..Default::default()
            };
            self.control(group, cmd::GROUP_SCHEDULE, schedule.as_mut_bytes())?;
        }
        let mut slice = TimesliceParams {
            timeslice_us: TIMESLICE,
        };
        self.control(made.groups[0], cmd::SET_TIMESLICE, slice.as_mut_bytes())
    }

    /// An MPS client: duplicates of the server's groups, with channels of its own. The server schedules them and sets their slices.
    fn fill_shared(&mut self, made: &mut Groups, (server, groups): (u32, [u32; 4])) -> Result {
        for ((engine, channels), shared) in GROUPS.into_iter().zip(groups) {
            self.next += 1;
            let mut call = DupObject {
                client: self.client,
                parent: made.device,
                object: self.next,
                client_src: server,
                object_src: shared,
                ..Default::default()
            };
            self.call(escape::DUP_OBJECT, &mut call)?;
            check(call.status)?;
            made.groups.push(call.object);
            self.add_channels(made, call.object, engine, channels)?;
        }
        Ok(())
    }

    /// Adds channels to a group. Each names the engine: a duplicate of a group does not tell it.
    fn add_channels(
        &mut self,
        made: &mut Groups,
        group: u32,
        engine: u32,
        channels: usize,
    ) -> Result {
        for _ in 0..channels {
            let mut params = ChannelAllocHead {
                engine,
                ..Default::default()
            };
            let params = params.as_mut_bytes();
            let channel = self.alloc(self.client, group, CHANNEL, params)?;
            made.channels.push(channel);
        }
        Ok(())
    }

    /// A context of this process has faulted.
    pub(crate) fn faulted(&self, error: CuError) {
        if let Some(mps) = &self.mps {
            mps.faulted(error.0);
        }
    }

    /// Whether the groups are an MPS server's.
    pub(crate) fn is_in_group(&self) -> bool {
        self.mps.is_some()
    }

    /// Whether the MPS server of this process's contexts has ended.
    pub(crate) fn has_lost_server(&self) -> bool {
        self.mps.as_ref().is_some_and(Member::is_lost)
    }

    /// Opens the connection for a context's work, confined to the SMs that an MPS client may use.
    pub(crate) fn execution(&self, groups: &Groups, sms: u32) -> Result<Execution> {
        let [compute, up, down, _] = groups.groups[..] else {
            return Err(CuError::UNKNOWN);
        };
        Ok(Execution::open_confined(
            self.file.as_fd(),
            groups.client,
            [compute, up, down],
            self.mps.as_ref().map_or(0, |mps| mps.sms(sms)),
        )?)
    }

    /// Frees a context's groups as libcuda does: preempted first, every channel on its own, with the device as parent.
    pub(crate) fn free_groups(&self, groups: &Groups) {
        if let Some(compute) = groups.groups.first().filter(|_| self.mps.is_none()) {
            let _ = self.control(*compute, cmd::PREEMPT, &mut [1, 0, 0, 0, 0, 0, 0, 0]);
        }
        for object in groups.channels.iter().chain(&groups.groups) {
            let _ = self.free(groups.device, *object);
        }
    }

    fn device(&mut self, index: u32) -> Result<(u32, u32)> {
        if let Some(known) = self.devices.get(&index) {
            return Ok(*known);
        }
        let mut params = DeviceAllocHead { device_id: index };
        let params = params.as_mut_bytes();
        let device = self.alloc(self.client, self.client, class::DEVICE, params)?;
        let mut params = SubdeviceAlloc { subdevice_id: 0 };
        let params = params.as_mut_bytes();
        let subdevice = self.alloc(self.client, device, class::SUBDEVICE, params)?;
        self.devices.insert(index, (device, subdevice));
        Ok((device, subdevice))
    }

    fn alloc(&mut self, root: u32, parent: u32, class: u32, params: &mut [u8]) -> Result<u32> {
        let object = if root == 0 {
            0
        } else {
            self.next += 1;
            self.next
        };
        let mut call = Alloc64 {
            root,
            parent,
            object,
            class,
            params: if params.is_empty() {
                0
            } else {
                params.as_mut_ptr() as u64
            },
            params_size: params.len() as u32,
            ..Default::default()
        };
        self.call(escape::ALLOC, &mut call)?;
        check(call.status)?;
        Ok(call.object)
    }

    fn control(&self, object: u32, cmd: u32, params: &mut [u8]) -> Result {
        let mut call = Control {
            client: self.client,
            object,
            cmd,
            params: params.as_mut_ptr() as u64,
            params_size: params.len() as u32,
            ..Default::default()
        };
        self.call(escape::CONTROL, &mut call)?;
        check(call.status)
    }

    fn free(&self, parent: u32, object: u32) -> Result {
        let mut call = Free {
            root: self.client,
            parent,
            object,
            status: 0,
        };
        self.call(escape::FREE, &mut call)?;
        check(call.status)
    }

    fn call<T: FromBytes + IntoBytes>(&self, number: u8, call: &mut T) -> Result {
        let request = iowr(number, size_of::<T>());
        // SAFETY: the request is made for the structure's size, and its pointer and length are those of a
        // slice that the callers above hold, or 0.
        unsafe { outward::ioctl(self.file.as_raw_fd(), request, call) }.map_err(failed)
    }
}
