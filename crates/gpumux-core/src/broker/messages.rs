//! What the broker is given, and what it orders.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::model::ProcessId;
use crate::{
    Class, MemoryPolicy, Micros, TenantId,
    ledger::{Holding, HostFull, Kind, Overcommitted, Share},
};

/// What the broker must know of a tenant's spec.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, Hash)]
pub struct Terms {
    /// Its class.
    pub class: Class,
    /// Its guarantee and limit.
    pub share: Share,
    /// What becomes of requests that the device has no room for.
    pub policy: MemoryPolicy,
    /// Idle for so long, it is moved to the host.
    pub sleep_after: Option<Micros>,
}

/// What a tenant's processes do, as their pages show.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, Hash)]
pub struct Activity {
    /// It has outstanding work.
    pub busy: bool,
    /// Since when it has had none.
    pub idle_since: Micros,
    /// It is in an MPS group, whose members are frozen only together: it is not kept frozen for memory on the host. What needs no copy is
    /// taken.
    pub in_group: bool,
    /// A process of it is stopped with work under way (SIGSTOP, a debugger): it answers no order.
    #[serde(default)]
    pub stopped: bool,
}

/// A request for memory on one device.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize, Hash)]
pub struct Ask {
    /// UUID of the device.
    pub device: String,
    /// What the process reports as the device's capacity, in bytes.
    pub total: u64,
    /// Fewer bytes than this are of no use.
    pub need: u64,
    /// More bytes than this are not wanted now.
    pub want: u64,
    /// Whether the memory can be moved.
    pub kind: Kind,
    /// It is a part of a request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub part: Option<Part>,
}

/// A request for memory of several devices or processes of one tenant is granted when there is room for all its parts, or not at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize, Hash)]
pub struct Part {
    /// The tenant's name for the request.
    pub of: u64,
    /// How many parts it has.
    pub parts: u32,
}

/// What of a process's movable memory can be freed without a copy, in bytes.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize, Hash,
)]
pub struct Droppable {
    /// It has no contents.
    pub free: u64,
    /// The program can make its contents anew.
    pub cached: u64,
}

impl Droppable {
    /// Both.
    pub(super) fn all(&self) -> u64 {
        self.free + self.cached
    }
}

/// What of a process's pinned memory is kept over its end for the tenant's next process, in bytes.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize, Hash,
)]
pub struct Kept {
    /// All of it.
    pub bytes: u64,
    /// The part that an earlier process left.
    pub inherited: u64,
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Hash)]
pub enum Event {
    /// Time has passed.
    Tick,
    /// The driver reports a device's memory: capacity and use, in bytes.
    Device {
        /// UUID, as NVML writes it.
        uuid: String,
        /// All its memory.
        capacity: u64,
        /// What is used of it, by whomever.
        used: u64,
    },
    /// The driver reports this device no more.
    DeviceGone(String),
    /// A tenant has these terms now.
    Tenant(TenantId, Terms),
    /// A new tenant may use these devices only, by UUID.
    Confined(TenantId, BTreeSet<String>),
    /// This tenant was there before this broker: its processes return, and may have memory that the driver reports already.
    Restored(TenantId),
    /// A tenant has ended.
    TenantGone(TenantId),
    /// What these tenants do now.
    Activity(Vec<(TenantId, Activity)>),
    /// A process of a tenant has connected.
    Joined(ProcessId, TenantId),
    /// It has ended, with its connection or after it.
    Left(ProcessId),
    /// Its connection has ended, and it lives: it has its memory, and will connect again.
    Lost(ProcessId),
    /// It has so many compute contexts on a device; `before`: and had them before this broker began.
    Contexts {
        /// Which process.
        process: ProcessId,
        /// UUID of the device.
        device: String,
        /// How many.
        count: u32,
        /// They are older than this broker.
        before: bool,
    },
    /// It asks for memory; answered by [`Command::Grant`].
    Ask {
        /// Which process.
        process: ProcessId,
        /// Its name for the request.
        ticket: u32,
        /// What it asks for.
        ask: Ask,
    },
    /// The driver had no memory although it was granted; answered by [`Command::Grant`]: whether to try again.
    Missing {
        /// Which process.
        process: ProcessId,
        /// Its name for the request.
        ticket: u32,
    },
    /// It reports all that it has on a device.
    Holds {
        /// Which process.
        process: ProcessId,
        /// UUID of the device.
        device: String,
        /// The device's capacity, as the process reports it.
        total: u64,
        /// What it has.
        holding: Holding,
    },
    /// It will say when it has received what it was granted, and answers each [`Order::Trim`].
    Confirms(ProcessId),
    /// It has received what it was granted by this name: what it reports from now on contains that.
    Received(ProcessId, u32),
    /// It keeps so many bytes of host memory for what is moved.
    Keeps(ProcessId, u64),
    /// Its program gives caches back when it is asked to.
    Reclaims(ProcessId),
    /// So much of what it has of a device can be freed without a copy.
    Droppable {
        /// Which process.
        process: ProcessId,
        /// UUID of the device.
        device: String,
        /// How much.
        droppable: Droppable,
    },
    /// So much of what it has of a device is kept over its end.
    Kept {
        /// Which process.
        process: ProcessId,
        /// UUID of the device.
        device: String,
        /// How much.
        kept: Kept,
    },
    /// What a program of a tenant is shown of a device; answered by [`Command::Shown`].
    View {
        /// Whose.
        tenant: TenantId,
        /// UUID of the device.
        device: String,
        /// The device's capacity, as the process reports it.
        total: u64,
    },
    /// Before this broker, a tenant's programs were shown this capacity of a device.
    WasShown(TenantId, String, u64),
    /// A request of this name needs no answer any more.
    Cancel(ProcessId, u32),
    /// A thread of it is blocked because its memory is away.
    Waits(ProcessId),
    /// It answers an order.
    Reply(ProcessId, u64, Reply),
    /// All groups of a tenant are frozen, or why that cannot be.
    Frozen(TenantId, Result<(), String>),
    /// A user asks for a tenant to be moved to the host; answered by [`Command::Answer`].
    Sleep(TenantId, u64),
    /// A user asks for it to be brought back; answered by [`Command::Answer`].
    Wake(TenantId, u64),
    /// A tenant is to go to another device: as [`Event::Sleep`], but once its work has ended, and it stays on the host until
    /// [`Event::Release`].
    Detain(TenantId, u64),
    /// It may come back.
    Release(TenantId),
    /// A tenant will come to this device with so many bytes; none: it has come, or comes no more.
    Arrives(TenantId, String, Option<u64>),
}

/// What a process answers to an order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Hash)]
pub enum Reply {
    /// Its gate is closed. Whether it has no outstanding work.
    Quiet(bool),
    /// Done; what it holds was reported before.
    Done,
    /// It cannot, and all is as it was: why.
    Refused(String),
    /// Caches of so many bytes were given back.
    Freed(u64),
}

/// What a process is to do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Hash)]
pub enum Order {
    /// Close the gate; answered by [`Reply::Quiet`].
    Quiesce {
        /// Bytes of each device that the order to move will name.
        least: u64,
        /// Bytes of host memory that it may keep.
        host: u64,
    },
    /// Open the gate; not answered.
    Resume,
    /// Move at least `least` bytes of each device to the host, if there are so many; answered by [`Reply::Done`].
    Out {
        /// Bytes of each device.
        least: u64,
        /// Bytes of host memory that it may keep.
        host: u64,
    },
    /// Bring everything back; answered by [`Reply::Done`].
    In,
    /// Let go of host memory that is not in use; answered by [`Reply::Done`].
    DropHost,
    /// Have the program give caches back; answered by [`Reply::Freed`].
    Reclaim {
        /// UUID of the device.
        device: String,
        /// Bytes that are missing there.
        bytes: u64,
    },
    /// Give back leases that are not used; answered by [`Reply::Done`] where grants are confirmed ([`Event::Confirms`]), else by what
    /// it has.
    Trim,
    /// Free memory that needs no copy; answered by [`Reply::Done`].
    Take {
        /// UUID of the device.
        device: String,
        /// Bytes that shall come free.
        bytes: u64,
    },
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Hash)]
pub enum Command {
    /// A process gets an order of this name.
    Order(ProcessId, u64, Order),
    /// Answers [`Event::Ask`]: bytes that it may have, 0 for none. [`Event::Missing`]: 1 to try again once the accounting may have been
    /// corrected, 2 to try again at once and until the answer is another: the memory of processes that have ended is being freed.
    Grant {
        /// Which process.
        process: ProcessId,
        /// Its name for the request.
        ticket: u32,
        /// Bytes.
        bytes: u64,
    },
    /// Answers [`Event::View`]. With a capacity of 0, the program is shown what the driver reports.
    Shown {
        /// Whose program.
        tenant: TenantId,
        /// UUID of the device.
        device: String,
        /// Bytes that it may still take.
        free: u64,
        /// The capacity.
        total: u64,
    },
    /// Freeze all compute groups of a tenant; answered by [`Event::Frozen`].
    Freeze(TenantId),
    /// Let them run.
    Thaw(TenantId),
    /// Answers [`Event::Sleep`] or [`Event::Wake`].
    Answer(u64, Result<(), MoveError>),
    /// For the records: a tenant's memory has moved.
    Moved {
        /// Whose.
        tenant: TenantId,
        /// To the host, or back.
        out: bool,
        /// Bytes.
        bytes: u64,
        /// From the first order to the last answer.
        took: Micros,
    },
    /// For the log: a move failed, and why.
    Failed(TenantId, MoveError),
    /// A process has not answered an order for long, and has what others are guaranteed: it may be stopped.
    Silent(ProcessId),
    /// For the log: a guarantee that this device has no room for.
    NotKept(TenantId, String, Overcommitted),
}

/// Why memory was not moved. Everything is as it was, but for [`MoveError::Stuck`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize, Hash)]
pub enum MoveError {
    /// Not now.
    #[error("the tenant cannot be moved now: {0}")]
    Busy(String),
    /// No host memory.
    #[error("{0}: raise `limit` of `[host_memory]` in the daemon's configuration")]
    HostFull(#[from] HostFull),
    /// Its groups do not freeze.
    #[error("its groups cannot be frozen: {0}")]
    Freeze(String),
    /// No room came free in time.
    #[error(
        "its memory cannot come back: other tenants cannot be moved; it comes back when they free some"
    )]
    NoRoom,
    /// A process does not answer in the middle of a move.
    #[error("a process of it does not answer: it stays frozen until that process answers or ends")]
    Stuck,
}
