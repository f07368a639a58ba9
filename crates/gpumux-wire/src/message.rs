//! The packets of a session.

use serde::{Deserialize, Serialize, de::DeserializeOwned};

/// Version of this protocol. Shim and daemon must have the same.
pub const PROTOCOL: u32 = 7;

/// What was added to [`PROTOCOL`] since. Each side says its own: the shim in its page of counters
/// ([`crate::page::Page::revision`]), the daemon in its lease ([`crate::lease::Leased::revision`]); a side that sends none has 0.
/// A side sends nothing that the other side's revision lacks, so that libraries and daemons of different revisions work
/// together, with what both have. Additions stand at the ends of the enumerations.
///
/// 1: the lease, a *file* of [`Daemon::Welcome`].
/// 2: [`Shim::Unlisted`].
/// 3: [`crate::page::Page::receive_fault`].
/// 4: memory that processes share: [`SHARING`].
/// 5: all that a process shares, when a session begins: [`INTRODUCTION`].
/// 6: launches that wait for permits: [`PERMITS`].
/// 7: elastic ranges: [`ELASTIC`].
/// 8: memory that is kept over a fault: [`KEEPING`].
/// 9: what programs are shown of a device: [`SHOWING`].
/// 10: copies between host and device: [`COPYING`].
/// 11: how long programs wait: [`WAITED`].
/// 12: requests of several processes: [`PARTS`].
/// 13: that a grant, or an order to give leases back, has come: [`RECEIPTS`].
pub const REVISION: u32 = 13;

/// The revision from which on processes of a tenant share memory ([`Shim::Export`] to [`Shim::Closed`]).
pub const SHARING: u32 = 4;

/// The revision from which on a session begins with all that the process shares ([`Shim::Exported`], [`Shim::Opened`] and then
/// [`Shim::Introduced`]), and a request for memory ends when the exporter doesn't answer ([`Shim::Delayed`], [`Daemon::Late`]).
pub const INTRODUCTION: u32 = 5;

/// The revision from which on a process whose controls are refused waits for permits to launch ([`crate::permits`]).
pub const PERMITS: u32 = 6;

/// The revision from which on memory may be freed without being copied ([`Shim::Droppable`], [`Daemon::Take`]), and a request for
/// memory is withdrawn ([`Shim::Cancel`]).
pub const ELASTIC: u32 = 7;

/// The revision from which on memory outlives its process ([`Shim::Kept`]).
pub const KEEPING: u32 = 8;

/// The revision from which on a program is shown a capacity before it has a session ([`Shim::Look`]), and is shown the same by the next
/// daemon ([`Shim::Shown`]).
pub const SHOWING: u32 = 9;

/// The revision from which on copies between host and device are counted ([`crate::page::Slot::copied`]) and can be limited
/// ([`Daemon::CopyRates`]).
pub const COPYING: u32 = 10;

/// The revision from which on it is counted how long a program submits nothing while it waits ([`crate::page::Waits::waited_us`]).
pub const WAITED: u32 = 11;

/// The revision from which on processes of a tenant ask for memory together ([`Shim::AskPart`]).
pub const PARTS: u32 = 12;

/// The revision from which on a process says that it has received what it was granted ([`Shim::Received`]), and that it has given
/// back what it does not use ([`Daemon::GiveBack`]).
pub const RECEIPTS: u32 = 13;

/// An answer to [`Shim::Missing`]: to ask the driver again soon is of use. Earlier libraries take it as any other than 0.
pub const LEAVING: u64 = 2;

/// Longest name in [`Shim::Unlisted`], in bytes.
pub const LONGEST_NAME: usize = 64;

/// How far ahead of its work a hint may come, in µs.
pub const FARTHEST_HINT_US: u32 = 1_000_000;

/// Largest packet in bytes.
pub const MAX_PACKET: usize = 16 * 1024;

/// Most channels that one domain may name. (A compute context has 8 on Hopper.)
pub const MAX_CHANNELS: usize = 512;

/// Host memory for moved memory is made in multiples of this, where the limit allows it.
pub const HOST_PIECE: u64 = 32 << 20;

/// Most domains of one session.
pub const MAX_DOMAINS: usize = 256;

/// From the shim. Packets marked *file* carry one file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Shim {
    /// First packet; *file*: the page of counters (see [`crate::page`]).
    Hello {
        /// [`PROTOCOL`]. Stays the first field of the first variant in all versions.
        protocol: u32,
        /// Version of the shim, for people.
        version: String,
        /// The secret that names the tenant, if the program was started by `gpumux run`.
        tenant: Option<String>,
    },
    /// A channel group exists and the driver library has finished setting it up; *file*: the
    /// control file through which its client was made.
    Group {
        /// The shim's name for it, unique in the process's life; also its slot in the page
        /// where it is below [`crate::page::SLOTS`].
        key: u32,
        /// RM engine type: 1 compute, 9 and up copy engines.
        engine: u32,
        /// RM client.
        client: u32,
        /// Subdevice of that client.
        subdevice: u32,
        /// The group.
        group: u32,
        /// Its channels.
        channels: Vec<u32>,
        /// The slice that the driver library gave it, in µs.
        timeslice_us: u64,
        /// Another process made it, and several may share it: an MPS server's.
        shared: bool,
    },
    /// *file*: a driver file of a process that shares a group. What it has mapped on its devices lives as long as all of them.
    Memory,
    /// The group's channels are now these.
    Channels {
        /// Which group.
        key: u32,
        /// All its channels.
        channels: Vec<u32>,
    },
    /// The program set the group's slice itself.
    TimesliceTouched {
        /// Which group.
        key: u32,
    },
    /// The group is gone.
    Gone {
        /// Which group.
        key: u32,
    },
    /// Asks for memory; answered by [`Daemon::Granted`].
    Ask {
        /// The shim's name for the question.
        ticket: u32,
        /// UUID of the device, as NVML writes it.
        device: String,
        /// What it has, in bytes, by the driver's report: for a daemon that does not know the device.
        total: u64,
        /// Fewer bytes than this are of no use.
        need: u64,
        /// More than this are not wanted now.
        want: u64,
        /// The memory will not be movable.
        pinned: bool,
    },
    /// All that the process has of a device's memory, used or not. Tells of less than was granted, or, at first, of
    /// what was granted to no process.
    Holds {
        /// UUID of the device.
        device: String,
        /// What it has, in bytes.
        total: u64,
        /// Bytes that can be moved.
        movable: u64,
        /// Bytes that cannot.
        pinned: u64,
        /// Bytes on the host.
        swapped: u64,
    },
    /// Asks what the program shall believe of a device's memory; answered by [`Daemon::Seen`].
    View {
        /// The shim's name for the question.
        ticket: u32,
        /// UUID of the device.
        device: String,
        /// What it has, in bytes.
        total: u64,
    },
    /// No call touches memory any more, only kernels that run: see [`Daemon::Quiesce`].
    Quiet {
        /// Of which order.
        op: u64,
        /// No work is outstanding either.
        idle: bool,
    },
    /// An order cannot be carried out; all is as it was.
    Busy {
        /// Of which order.
        op: u64,
        /// Why, for people.
        reason: String,
    },
    /// An order to move memory has been carried out; [`Shim::Holds`] came before.
    Moved {
        /// Of which order.
        op: u64,
    },
    /// The program waits for memory that was moved away.
    WakeRequest,
    /// The process keeps so much of the host's memory for what is moved.
    Keeps {
        /// Bytes.
        bytes: u64,
    },
    /// The program gives back caches when it is asked to, by [`Daemon::Reclaim`].
    Reclaims,
    /// It was asked to.
    Reclaimed {
        /// Of which order.
        op: u64,
        /// What it says that it has freed.
        bytes: u64,
    },
    /// The driver has no memory although it was granted. Answered by [`Daemon::Granted`]: 0 when the program shall get the error
    /// at once, [`LEAVING`] while the memory of processes that have ended is being freed.
    Missing {
        /// The shim's name for the question.
        ticket: u32,
    },
    /// From revision 2 on. The program has called a function of the driver that is not on the library's list: from then on its memory
    /// stays where it is, and its work counts as unfinished.
    Unlisted {
        /// The function.
        name: String,
    },
    /// From revision 4 on. Processes of the same tenant that have this token may open memory of this process. Answered by
    /// [`Daemon::Exported`].
    Export {
        /// The shim's name for the question; 0: it waits for no answer.
        ticket: u32,
        /// The export's name, which cannot be guessed.
        token: u128,
    },
    /// From revision 4 on. The memory of an export is the process's no longer.
    Withdraw {
        /// The export's name.
        token: u128,
    },
    /// From revision 4 on. Requests a piece of what another process exports; answered by [`Daemon::Piece`].
    Redeem {
        /// The shim's name for the request.
        ticket: u32,
        /// The export's name.
        token: u128,
        /// Which piece, from 0: all in order.
        index: u32,
    },
    /// From revision 4 on. Answer to [`Daemon::Serve`]; *file*, unless there is no such piece: its physical memory.
    Piece {
        /// Of which request.
        op: u64,
        /// The piece; none: there is none.
        piece: Option<Piece>,
    },
    /// From revision 4 on. The process has an export open since before this session.
    Opened {
        /// The export's name.
        token: u128,
        /// The memory is accounted to this process.
        charged: bool,
    },
    /// From revision 4 on. The process has closed an export, or could not open it.
    Closed {
        /// The export's name.
        token: u128,
    },
    /// From revision 5 on. The process exports memory since before this session.
    Exported {
        /// The export's name.
        token: u128,
        /// Another process has it open: the exporter has served it, and has received no [`Daemon::Unshared`] since.
        open: bool,
    },
    /// From revision 5 on. The process has named all that it exports and has open.
    Introduced,
    /// From revision 5 on. The answer to [`Daemon::Serve`] comes when the memory is back on the device.
    Delayed {
        /// Of which request.
        op: u64,
    },
    /// From revision 6 on. Answer to [`Daemon::Permits`]: the group's launches wait for permits from now on.
    AwaitsPermits {
        /// Which group.
        key: u32,
        /// UUID of its device.
        device: String,
    },
    /// From revision 7 on. So much of the process's movable memory can be freed without being copied: [`Daemon::Take`].
    Droppable {
        /// UUID of the device.
        device: String,
        /// Bytes without contents.
        free: u64,
        /// Bytes of caches, which the program can make anew.
        cached: u64,
    },
    /// From revision 7 on. A [`Shim::Ask`] needs no answer any more.
    Cancel {
        /// The shim's name for the question.
        ticket: u32,
    },
    /// From revision 8 on. So much of the process's pinned memory is kept over its end, for the tenant's next process.
    /// [`Shim::Holds`] comes after it.
    Kept {
        /// UUID of the device.
        device: String,
        /// Bytes.
        bytes: u64,
        /// Of these, what an earlier process left.
        inherited: u64,
    },
    /// From revision 9 on. Instead of [`Shim::Hello`], of a process that has no session: what its program is shown of a device.
    /// Answered by [`Daemon::Seen`]; then the daemon closes. An earlier daemon refuses.
    Look {
        /// The secret that names the tenant.
        tenant: String,
        /// UUID of the device, as NVML writes it.
        device: String,
        /// What it has, in bytes.
        total: u64,
    },
    /// From revision 9 on. The program was shown this capacity before this session.
    Shown {
        /// UUID of the device.
        device: String,
        /// Bytes.
        total: u64,
    },
    /// From revision 12 on. As [`Shim::Ask`], for a part of a request: all parts are granted, or none.
    AskPart {
        /// The shim's name for the question.
        ticket: u32,
        /// UUID of the device, as NVML writes it.
        device: String,
        /// What it has, in bytes, by the driver's report.
        total: u64,
        /// So many bytes, at least one: 0 is the answer when nothing is granted.
        need: u64,
        /// The memory will not be movable.
        pinned: bool,
        /// The tenant's name for the request.
        of: u64,
        /// How many parts it has.
        parts: u32,
    },
    /// From revision 13 on. [`Daemon::Granted`] has come: what [`Shim::Holds`] says from now on contains it.
    Received {
        /// Of which question.
        ticket: u32,
    },
}

/// A piece of exported memory, and where it belongs. All counts are in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Piece {
    /// What this piece has.
    pub bytes: u64,
    /// What all pieces have together.
    pub whole: u64,
    /// Where in the whole the exported allocation begins.
    pub offset: u64,
    /// What the allocation has.
    pub allocation: u64,
}

/// From the daemon. Packets marked *file* may carry one file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Daemon {
    /// Answer to a hello that is accepted; *file*, from revision 1 on: the lease (see [`crate::lease`]). A library of
    /// revision 0 closes it unseen.
    Welcome {
        /// [`PROTOCOL`].
        protocol: u32,
        /// Name of the tenant that the process belongs to.
        tenant: String,
        /// Whether questions about memory are answered; without it memory stays with the driver.
        memory: bool,
    },
    /// Answer to anything that is not accepted; the daemon closes after it.
    Refused {
        /// Why, for people.
        reason: String,
    },
    /// Where taking the device ahead of work may pay, until told otherwise. At first: nowhere.
    Hints {
        /// Groups by their slots in the page, as bits: their tenant is of class `latency`, and others
        /// compete for their device.
        contended: u64,
        /// Whether the shim may do so of its own accord.
        automatic: bool,
    },
    /// Work is coming: take the device now.
    Hint {
        /// In how many µs, if that is known.
        expected_us: Option<u32>,
    },
    /// Answer to [`Shim::Ask`].
    Granted {
        /// Of which question.
        ticket: u32,
        /// How much more the process may have; 0: nothing.
        bytes: u64,
    },
    /// Answer to [`Shim::View`].
    Seen {
        /// Of which question.
        ticket: u32,
        /// Bytes that the program may still take.
        free: u64,
        /// Bytes that it may have in all.
        total: u64,
    },
    /// Where and how moved memory is kept on the host, until told otherwise.
    HostMemory {
        /// A folder to make files in; none: the process's own memory.
        location: Option<String>,
        /// It is overwritten with zeros after use.
        scrub: bool,
    },
    /// Close the gate in front of memory until it is to be opened; answered by [`Shim::Quiet`] or [`Shim::Busy`].
    Quiesce {
        /// The order's name.
        op: u64,
        /// Of the order to move that will come.
        least: u64,
        /// So many bytes of the host's memory may be kept.
        host: u64,
    },
    /// The compute groups are frozen: move memory to the host. Answered by [`Shim::Moved`] or [`Shim::Busy`].
    SwapOut {
        /// The order's name.
        op: u64,
        /// So many bytes of each device must come free, if there are so many.
        least: u64,
        /// So many bytes of the host's memory may be kept.
        host: u64,
    },
    /// Let go of host memory that is not in use. Answered by [`Shim::Moved`]; [`Shim::Keeps`] comes before.
    DropHost {
        /// The order's name.
        op: u64,
    },
    /// Others need memory: have the program give caches back. Answered by [`Shim::Reclaimed`].
    Reclaim {
        /// The order's name.
        op: u64,
        /// UUID of the device.
        device: String,
        /// How much is missing there.
        bytes: u64,
    },
    /// There is room for all: bring back what is missing. Answered by [`Shim::Moved`] or [`Shim::Busy`].
    SwapIn {
        /// The order's name.
        op: u64,
    },
    /// All goes on as before [`Daemon::Quiesce`].
    Resume {
        /// The order's name.
        op: u64,
    },
    /// Before revision 13. Others need memory: give back what is granted and not used. [`Shim::Holds`] comes after it.
    Trim,
    /// The daemon leaves in good order: every group is thawed and has its old slice.
    Bye,
    /// From revision 4 on. Answer to [`Shim::Export`]: from now on other processes may open it.
    Exported {
        /// Of which question.
        ticket: u32,
    },
    /// From revision 4 on. A process requests a piece of what this one exports: it stays where it is until
    /// [`Daemon::Unshared`]. Answered by [`Shim::Piece`].
    Serve {
        /// The request's name.
        op: u64,
        /// The export's name.
        token: u128,
        /// Which piece, from 0.
        index: u32,
    },
    /// From revision 4 on. Answer to [`Shim::Redeem`]; *file*, unless it is refused: the piece's physical memory.
    Piece {
        /// Of which request.
        ticket: u32,
        /// The piece; none: no process of the tenant exports it.
        piece: Option<Piece>,
    },
    /// From revision 4 on. No process has this export open any more: the memory may move.
    Unshared {
        /// The export's name.
        token: u128,
    },
    /// From revision 4 on. The exporter of memory that this process has open is gone: the memory is accounted to this process.
    Orphaned {
        /// The export's name.
        token: u128,
    },
    /// From revision 5 on. Answer to [`Shim::Redeem`]: the process that exports it has not answered in time.
    Late {
        /// Of which request.
        ticket: u32,
    },
    /// From revision 6 on. *file*: the page of permits (see [`crate::permits`]), the same for all groups of a session. The group's
    /// launches wait there, since its controls are not used. Answered by [`Shim::AwaitsPermits`].
    Permits {
        /// Which group.
        key: u32,
    },
    /// From revision 7 on. The compute groups are frozen: free memory that needs no copy ([`Shim::Droppable`]). Answered by
    /// [`Shim::Moved`] or [`Shim::Busy`]; [`Shim::Droppable`] and [`Shim::Holds`] come before.
    Take {
        /// The order's name.
        op: u64,
        /// UUID of the device.
        device: String,
        /// So many bytes shall come free, if there are so many.
        bytes: u64,
    },
    /// From revision 10 on. How fast the process may copy between the host and a group's device, until another message. At first: as
    /// fast as it can.
    CopyRates {
        /// Which group.
        key: u32,
        /// By [`crate::page::Direction`], in bytes a second; none: as fast as it can.
        rates: [Option<u64>; 2],
    },
    /// From revision 13 on. Others need memory: give back what is granted and not used. Answered by [`Shim::Moved`];
    /// [`Shim::Holds`] comes before.
    GiveBack {
        /// The order's name.
        op: u64,
    },
}

/// A packet that cannot be sent or understood.
#[derive(Debug, thiserror::Error)]
pub enum MessageError {
    /// Too long.
    #[error("a packet of {0} bytes is too long: at most {MAX_PACKET} are allowed")]
    TooLong(usize),
    /// Not a packet of this protocol.
    #[error("the packet cannot be understood: {0}")]
    Malformed(#[from] postcard::Error),
}

/// Bytes of a packet.
///
/// # Errors
/// When it would be too long.
pub fn encode(message: &impl Serialize) -> Result<Vec<u8>, MessageError> {
    let bytes = postcard::to_stdvec(message)?;
    if bytes.len() > MAX_PACKET {
        return Err(MessageError::TooLong(bytes.len()));
    }
    Ok(bytes)
}

/// The packet that these bytes are, all of them.
///
/// # Errors
/// When they are no packet.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, MessageError> {
    if bytes.len() > MAX_PACKET {
        return Err(MessageError::TooLong(bytes.len()));
    }
    let (message, rest) = postcard::take_from_bytes(bytes)?;
    if rest.is_empty() {
        Ok(message)
    } else {
        Err(postcard::Error::DeserializeBadEncoding.into())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn packets_survive_the_wire() {
        let group = Shim::Group {
            key: 1,
            engine: 1,
            client: 0xc1d0_0001,
            subdevice: 0x5c00_0003,
            group: 0x5c00_0010,
            channels: (0..MAX_CHANNELS as u32).map(|n| 0x5c00_0100 + n).collect(),
            timeslice_us: 2048,
            shared: true,
        };
        assert_eq!(decode::<Shim>(&encode(&group).unwrap()).unwrap(), group);
    }

    #[test]
    fn the_protocol_version_keeps_its_place() {
        let hello = Shim::Hello {
            protocol: 7,
            version: String::new(),
            tenant: None,
        };
        assert_eq!(encode(&hello).unwrap()[..2], [0, 7]);
    }

    proptest! {
        #[test]
        fn garbage_is_refused_or_means_itself(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
            if let Ok(message) = decode::<Shim>(&bytes) {
                prop_assert_eq!(decode::<Shim>(&encode(&message).unwrap()).unwrap(), message);
            }
        }
    }
}
