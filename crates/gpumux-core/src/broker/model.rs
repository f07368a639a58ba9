//! What the broker's parts have in common.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::Micros;

/// A connected process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ProcessId(pub u64);

/// Not within a guarantee, and since when, with the patience of its class: the least is the oldest.
pub(super) type Age = (bool, Micros);

/// An order to all processes of a tenant whose answers are awaited.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Round {
    pub(super) op: u64,
    /// When its move began.
    pub(super) began: Micros,
    pub(super) deadline: Micros,
    pub(super) waiting: BTreeSet<ProcessId>,
    /// Why a process refused.
    pub(super) refused: Option<String>,
    /// The deadline has passed, and there is no way back.
    pub(super) late: bool,
    /// What was on the host when it began; what was on the device, if memory is only freed.
    pub(super) before: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(super) enum Step {
    Quiesce,
    Freeze,
    Out,
}

/// What a move to the host is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Why {
    /// Others lack room.
    Room,
    /// A user asked for it.
    User,
    /// The tenant was idle for as long as its terms say.
    Idle,
    /// Others lack room, and memory is freed that needs no copy: nothing goes to the host.
    Drop,
    /// The same for a request of its own.
    Own,
}

/// The gates of a tenant that is to be quiet.
///
/// A copy in one process may be queued behind a collective that another has not launched, and cannot launch once its gate is closed.
/// So if one gate is closed and another process does not get quiet, all go on for a moment before they are closed again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Gates {
    /// None is known to be closed.
    Closing,
    /// One is, since then.
    Closed(Micros),
    /// All are open until then.
    Open(Micros),
}

/// A move to the host.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Leaving {
    pub(super) step: Step,
    pub(super) round: Round,
    /// Bytes that shall come free, by device.
    pub(super) parts: BTreeMap<String, u64>,
    /// What it had there that can be moved.
    pub(super) had: BTreeMap<String, u64>,
    /// By process: bytes of each device to be moved, and bytes of host memory that it may keep.
    pub(super) orders: BTreeMap<ProcessId, (u64, u64)>,
    pub(super) gates: Gates,
    /// So often all gates were opened again.
    pub(super) opened: u32,
    /// It had outstanding work when its gates were closed.
    pub(super) busy: bool,
    /// Its work must end first: when it is asked for that again.
    pub(super) drains: Option<Micros>,
    /// A part of it was on the host already: it is frozen.
    pub(super) more: bool,
    /// A user asked for the move before this one.
    pub(super) asked: bool,
    /// When its processes that have not answered are reported, if others are guaranteed what they have.
    pub(super) report: Option<Micros>,
    pub(super) why: Why,
}

/// Faults that this broker or one before it had: tests put each back and must find it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mutation {
    /// A tenant comes back only when a blocked thread of it asks.
    DemandByMessage,
    /// A victim that failed is chosen again at once.
    NoBackoff,
    /// Guaranteed memory waits for borrowers' turns.
    TurnsAgainstGuarantees,
    /// A tenant is idle between two requests, and its guarantee is lent then.
    IdleAtOnce,
    /// What tenants had before the daemon restarted counts as foreign, too.
    CountTwice,
    /// Host memory stays reserved for a move that failed.
    KeepReservation,
    /// A move is carried out although no tenant lacks room any more.
    OutliveAsker,
    /// What comes free for the oldest request is given to younger ones.
    RoomForYounger,
    /// Memory on its way back loses its place with the first report.
    ForgetReturning,
    /// A victim that does not answer is waited for.
    NoHedge,
    /// Memory is copied to the host although what needs no copy would do.
    CopyDroppable,
    /// The driver is expected to have freed a process's memory when the process has ended.
    LeaveAtOnce,
    /// A request is refused before leases that are not used can have come back.
    RefuseEarly,
    /// A gate stays closed while another process waits for what its peer behind the gate has not launched.
    KeepGatesClosed,
    /// What tenants of the last daemon have is foreign until they have reported it.
    ForeignAtOnce,
    /// What comes free is kept for the oldest claim, although that cannot be served with it.
    TakeComing,
    /// A tenant that gave way comes back into what another frees for a moment.
    ReturnAtOnce,
    /// A process whose connection was lost waits as the youngest, and its tenant has a whole turn again.
    SessionBeginsAnew,
    /// What a process has whose connection was lost is free, and foreign later.
    FreeWithoutSession,
    /// Tenants that wait for more memory take from each other what they have.
    ExchangeAmongWaiting,
    /// Of several victims some are moved although the host has no room for all.
    MoveInVain,
    /// Each part of a request is granted by itself.
    PartByPart,
    /// What a process reports while memory that it was granted is on its way to it counts as all that it has.
    ForgetGrants,
}
