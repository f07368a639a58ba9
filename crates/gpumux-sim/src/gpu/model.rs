//! What a GPU consists of.

use std::collections::{BTreeMap, VecDeque};

use gpumux_core::Timeslice;

use super::hardware::{Hardware, Nanos};

/// A channel group on one engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupId(pub(super) u64);

/// A stream: its work runs in the order of submission, whatever groups it names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StreamId(pub(super) u64);

/// A bound on the SMs that some streams have together: an MPS client's percentage, or a green context.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PartitionId(pub(super) u64);

/// One piece of work. Ids rise in the order of submission and are never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WorkId(pub(super) u64);

/// What a group runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Engine {
    /// The SMs.
    Compute,
    /// The copy engine from host to device.
    HostToDevice,
    /// The copy engine from device to host.
    DeviceToHost,
}

impl Engine {
    /// All engines of a device.
    pub const ALL: [Self; 3] = [Self::Compute, Self::HostToDevice, Self::DeviceToHost];

    /// The slice that a new group has, in µs: what libcuda sets for compute groups, what the
    /// driver gives copy groups.
    pub const fn default_timeslice(self) -> Timeslice {
        match self {
            Self::Compute => Timeslice::DEFAULT,
            Self::HostToDevice | Self::DeviceToHost => Timeslice(1024),
        }
    }
}

/// What can be submitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// A kernel that takes `duration` ns when it has `sms` SMs for itself, and proportionally longer
    /// with fewer. `sms` is clamped to what the device has, and to at least 1.
    Kernel {
        /// SMs it can use.
        sms: u32,
        /// ns with all of them.
        duration: Nanos,
    },
    /// A kernel whose time is that of its memory accesses: with more SMs than [`Hardware::saturating`] it is no faster, and all such
    /// kernels that run at the same time share the bandwidth.
    Moving {
        /// SMs it can use.
        sms: u32,
        /// ns with all of them and all of the bandwidth.
        duration: Nanos,
    },
    /// A one-SM kernel that spins until [`Gpu::release`], for at most `timeout` ns of running.
    Hold {
        /// Longest time it runs.
        timeout: Nanos,
    },
    /// The rest of the kernel before it in its stream, which has no overhead of its own. How long it takes is given while
    /// it runs, by [`Gpu::set_length`]; without that it does not end.
    Rest {
        /// SMs it can use.
        sms: u32,
    },
    /// A copy of this many bytes by the group's copy engine (in a compute group: inside the device).
    Copy {
        /// How many.
        bytes: u64,
    },
    /// Completes when everything before it in its stream has. Programs that wait for a kernel
    /// put one behind it, as libcuda does.
    Record,
    /// Completes when that work has, in whatever stream; at once if it is unknown or complete.
    Wait(WorkId),
    /// A function on the host: reported by [`EventKind::HostReady`], complete by [`Gpu::release`].
    Host,
}

/// Something happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// When, exactly.
    pub at: Nanos,
    /// In which group.
    pub group: GroupId,
    /// In which stream.
    pub stream: StreamId,
    /// To which work.
    pub work: WorkId,
    /// What.
    pub kind: EventKind,
}

/// What happened to a piece of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// It is complete.
    Done,
    /// A [`Work::Host`] may run now.
    HostReady,
}

/// What a group has received.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Received {
    /// ns during which its work progressed.
    pub busy: Nanos,
    /// SM-ns of progress (ns on copy engines).
    pub work: u64,
    /// How often it got the engine.
    pub switches: u64,
    /// How often it lost the engine with kernels in the middle.
    pub preemptions: u64,
}

/// What a stream has received on the SMs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamReceived {
    /// ns during which its kernels progressed.
    pub busy: Nanos,
    /// SM-ns of progress.
    pub work: u64,
}

/// How far a running or interrupted piece of work is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Which.
    pub work: WorkId,
    /// SM-ns done.
    pub done: u64,
    /// SM-ns in all; more than 0.
    pub total: u64,
}

/// A name that the model does not know.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GpuError {
    /// No such group.
    #[error("there is no group {0:?}")]
    Group(GroupId),
    /// No such stream.
    #[error("there is no stream {0:?}")]
    Stream(StreamId),
    /// No such partition.
    #[error("there is no partition {0:?}")]
    Partition(PartitionId),
}

/// Stands for a length that is not known: centuries, on any number of SMs.
pub(super) const UNKNOWN_LENGTH: Nanos = u64::MAX >> 13;

#[derive(Clone, Debug)]
pub(super) struct Group {
    pub(super) engine: Engine,
    pub(super) timeslice: Timeslice,
    pub(super) frozen: bool,
    /// Heads of streams that run here, in the order in which they get SMs.
    pub(super) ready: Vec<Ready>,
    /// Was taken off in the middle of kernels: must be restored before it goes on.
    pub(super) interrupted: bool,
    pub(super) received: Received,
}

/// A head of a stream that runs, was interrupted, or waits for the engine.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ready {
    pub(super) work: WorkId,
    pub(super) stream: StreamId,
    pub(super) partition: Option<PartitionId>,
    /// That of its stream.
    pub(super) priority: i32,
    /// SMs that it can use.
    pub(super) width: u32,
    /// SMs that make it faster.
    pub(super) useful: u32,
    /// SMs that it has.
    pub(super) sms: u32,
    /// SM-ns of progress per ns.
    pub(super) pace: u32,
    /// [`Work::Moving`].
    pub(super) moving: bool,
    /// Overhead included.
    pub(super) total: u64,
    pub(super) left: u64,
    pub(super) hold: bool,
    /// Its length is not known.
    pub(super) open: bool,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Stream {
    pub(super) queue: VecDeque<Item>,
    /// The head is in its group's `ready`, or is a host function that was announced.
    pub(super) head_started: bool,
    pub(super) partition: Option<PartitionId>,
    /// Lower goes first.
    pub(super) priority: i32,
    pub(super) received: StreamReceived,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Item {
    pub(super) id: WorkId,
    pub(super) group: GroupId,
    pub(super) work: Work,
    /// A hold or host function whose end was asked for before it began.
    pub(super) released: bool,
    /// Length of a [`Work::Rest`], once known.
    pub(super) length: Option<Nanos>,
}

/// One GPU. See [the module](super).
#[derive(Clone, Debug)]
pub struct Gpu {
    pub(super) hardware: Hardware,
    pub(super) now: Nanos,
    pub(super) next_id: u64,
    pub(super) schedulers: BTreeMap<Engine, Scheduler>,
    pub(super) groups: BTreeMap<GroupId, Group>,
    pub(super) streams: BTreeMap<StreamId, Stream>,
    /// SMs of each partition.
    pub(super) partitions: BTreeMap<PartitionId, u32>,
    /// Work that is not complete, and its stream.
    pub(super) live: BTreeMap<WorkId, StreamId>,
    /// Streams whose head waits for a piece of work.
    pub(super) waiters: BTreeMap<WorkId, Vec<StreamId>>,
    pub(super) events: Vec<Event>,
}

/// The state of one engine.
#[derive(Clone, Debug)]
pub(super) struct Scheduler {
    pub(super) engine: Engine,
    /// SMs; 1 on a copy engine.
    pub(super) capacity: u32,
    /// Round robin order.
    pub(super) round: Vec<GroupId>,
    /// Whose state the engine holds.
    pub(super) resident: Option<GroupId>,
    /// Where the round goes on: behind this group.
    pub(super) last: Option<GroupId>,
    pub(super) phase: Phase,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// Nothing to do.
    Idle,
    /// The resident group is on its way out.
    Switching { until: Nanos },
    /// The resident group has the engine.
    Running {
        /// Start of its first slice.
        since: Nanos,
        /// Until then its state is restored and nothing progresses.
        restored: Nanos,
        /// Since when nothing is queued behind what runs.
        exhausted: Option<Nanos>,
    },
}
