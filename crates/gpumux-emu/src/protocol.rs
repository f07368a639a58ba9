//! What programs and the server say to each other, apart from RM calls (those are in
//! [`gpumux_rm::emulated`]).
//!
//! A *process connection* carries one [`Request`] and one [`Answer`] at a time. An *execution connection* belongs to
//! one context: [`Command`]s go to the server, [`Report`]s come back. It is opened through the control
//! file that made the context's groups ([`OPEN_EXECUTION`]), whose authority it needs, and is the socket that the answer came on.
//! All sockets are `SOCK_SEQPACKET`; a packet is one postcard-encoded message. Times are `CLOCK_MONOTONIC` in ns.

use serde::{Deserialize, Serialize, de::DeserializeOwned};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Both sides must have the same.
pub const VERSION: u32 = 9;

/// First word of the first packet of a process connection: not an RM call's magic.
pub const HELLO: u32 = 0x31_50_45_47; // "GEP1"

/// Largest packet in bytes.
pub const MAX_PACKET: usize = 64 * 1024;

/// Most submissions in one packet.
pub const MAX_SUBMISSIONS: usize = 512;

/// Most work that one execution connection may have under way.
pub const MAX_LIVE: usize = 1 << 16;

/// The escape on a control file that opens an execution connection, with [`OpenExecution`]. Outside the
/// range of the driver's own.
pub const OPEN_EXECUTION: u8 = 0xf0;

/// Structure of [`OPEN_EXECUTION`]: the groups that a context made.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct OpenExecution {
    /// RM client of all groups.
    pub client: u32,
    /// Compute group.
    pub compute: u32,
    /// Group of the copy engine from host to device.
    pub host_to_device: u32,
    /// Group of the copy engine from device to host.
    pub device_to_host: u32,
    /// SMs that its kernels may use together; 0: all.
    pub sms: u32,
    /// RM's answer; `NO_MEMORY` when the context's own memory does not fit.
    pub status: u32,
}

/// On a process connection, to the server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Request {
    /// First of all.
    Hello {
        /// [`HELLO`].
        magic: u32,
        /// [`VERSION`].
        version: u32,
    },
    /// What devices there are.
    Devices,
    /// Physical memory; the answer carries its file.
    CreateMemory {
        /// Of which device.
        device: u32,
        /// How much.
        bytes: u64,
    },
    /// A share in the memory whose file comes with this.
    ImportMemory,
    /// Gives up one share.
    FreeMemory {
        /// Which.
        id: u64,
    },
    /// A device's state.
    Status {
        /// Which.
        device: u32,
    },
    /// The GPU instances of a GPU in MIG mode.
    GpuInstances {
        /// Which GPU.
        gpu: u32,
    },
    /// Makes a GPU instance, which is no device yet.
    MakeGpuInstance {
        /// Of which GPU.
        gpu: u32,
        /// The driver's number of the profile.
        profile: u32,
        /// Its first memory slice.
        start: u32,
    },
    /// Makes the compute instance that has all of a GPU instance: a device.
    MakeComputeInstance {
        /// Of which GPU.
        gpu: u32,
        /// In which GPU instance.
        id: u32,
    },
    /// Ends a compute instance that is not in use.
    EndComputeInstance {
        /// Of which GPU.
        gpu: u32,
        /// In which GPU instance.
        id: u32,
    },
    /// Ends a GPU instance without a compute instance.
    EndGpuInstance {
        /// Of which GPU.
        gpu: u32,
        /// Which.
        id: u32,
    },
    /// First and last on a connection of its own: that holds a share in memory until it is closed everywhere. With it come the
    /// connection's own file, by which the memory is imported, and the memory's.
    ExportMemory {
        /// [`HELLO`].
        magic: u32,
        /// Which.
        id: u64,
    },
}

/// On a process connection, from the server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Answer {
    /// Done.
    Ok,
    /// The devices in order.
    Devices(Vec<DeviceInfo>),
    /// A share in memory.
    Memory {
        /// Its name among the server's memory.
        id: u64,
        /// Of which device.
        device: u32,
        /// How much.
        bytes: u64,
    },
    /// A device's state.
    Status(DeviceStatus),
    /// A GPU's instances, by rising numbers.
    GpuInstances(Vec<GpuInstance>),
    /// It cannot be done.
    Refused(Refusal),
}

/// Why the server refuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum Refusal {
    /// Not enough memory on the device.
    #[error("the emulated device is out of memory")]
    OutOfMemory,
    /// No such device, memory, or the like.
    #[error("the emulated device does not know what was named")]
    Unknown,
    /// Client and server were not built from the same source.
    #[error(
        "the emulated device's server has another version: use the gpumux that belongs to libgpumux_emu.so"
    )]
    Version,
    /// There is no room for such an instance there.
    #[error("the emulated device has no room for the instance")]
    NoRoom,
    /// It is in use.
    #[error("the emulated device's instance is in use")]
    InUse,
    /// The server cannot get memory from its own machine.
    #[error("the emulated device's server cannot make a memory file")]
    Host,
}

/// What a device is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DeviceInfo {
    /// Product name.
    pub name: String,
    /// UUID.
    pub uuid: [u8; 16],
    /// PCI bus.
    pub pci_bus: u32,
    /// Bytes of memory.
    pub memory: u64,
    /// Bytes that a stream takes of it.
    pub stream_memory: u64,
    /// Bytes that NVML counts beyond these.
    pub reserved_memory: u64,
    /// Streaming multiprocessors.
    pub sms: u32,
    /// Compute capability.
    pub compute_capability: (u32, u32),
    /// SM clock in kHz.
    pub clock_khz: u32,
    /// Bytes per second that kernels can move.
    pub memory_bandwidth: u64,
    /// NVML's driver version.
    pub driver_version: String,
    /// CUDA's driver version.
    pub cuda_version: i32,
    /// Whether it is a GPU in MIG mode, which can be used by its instances only.
    pub mig_mode: bool,
    /// Of a MIG instance: which part of which GPU it is.
    pub instance: Option<Instance>,
    /// It was a MIG instance, and is one no more.
    pub gone: bool,
}

/// A GPU instance: memory and processors of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuInstance {
    /// The driver's number of it.
    pub id: u32,
    /// The driver's number of its profile.
    pub profile: u32,
    /// Its first memory slice.
    pub start: u32,
    /// The device that its compute instance is, by its number among the server's.
    pub device: Option<u32>,
}

/// A MIG instance's place in its GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Instance {
    /// The GPU's number among the server's devices.
    pub gpu: u32,
    /// The GPU's UUID.
    pub gpu_uuid: [u8; 16],
    /// Such as `1g.10gb`.
    pub profile: String,
    /// The driver's number of the GPU instance: memory and processors.
    pub gpu_instance: u32,
    /// Of the compute instance in it.
    pub compute_instance: u32,
    /// How many of the GPU's seven slices of processors.
    pub slices: u32,
}

impl DeviceInfo {
    /// Its UUID as the driver writes it: `GPU-…`, or `MIG-…` of an instance.
    pub fn uuid_text(&self) -> String {
        prefixed(self.instance.as_ref().map_or("GPU", |_| "MIG"), &self.uuid)
    }

    /// Whether it is an instance of the GPU with this number.
    pub fn is_part_of(&self, gpu: u32) -> bool {
        !self.gone && self.instance.as_ref().is_some_and(|it| it.gpu == gpu)
    }
}

/// A GPU's UUID as the driver writes it: `GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx`.
pub fn uuid_text(uuid: &[u8; 16]) -> String {
    prefixed("GPU", uuid)
}

/// The same with `MIG`, for an instance, or any other prefix.
fn prefixed(prefix: &str, uuid: &[u8; 16]) -> String {
    let hex: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    format!(
        "{prefix}-{}-{}-{}-{}-{}",
        &hex[..8],
        &hex[8..12],
        &hex[12..16],
        &hex[16..20],
        &hex[20..]
    )
}

/// A device at one moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DeviceStatus {
    /// Bytes in use.
    pub used: u64,
    /// Percent of the last second or so in which compute groups ran.
    pub compute_percent: u32,
    /// The same for copies.
    pub copy_percent: u32,
    /// Processes with contexts, and the bytes that they use.
    pub processes: Vec<(u32, u64)>,
    /// How long the kernels of processes with contexts have run, in ns.
    pub busy: Vec<(u32, u64)>,
}

/// Which of a context's groups runs a piece of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Queue {
    /// The SMs.
    Compute,
    /// The copy engine from host to device.
    HostToDevice,
    /// The copy engine from device to host.
    DeviceToHost,
}

/// What is submitted. Streams and work have numbers that the client chose; work numbers rise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Work {
    /// A kernel.
    Kernel {
        /// SMs that it can use.
        sms: u32,
        /// ns with all of them.
        duration: u64,
    },
    /// A kernel that waits for memory, as [`gpumux_sim::gpu::Work::Moving`].
    Moving {
        /// SMs that it can use.
        sms: u32,
        /// ns with all of them and all of the memory's bandwidth.
        duration: u64,
    },
    /// A copy.
    Copy {
        /// Bytes.
        bytes: u64,
    },
    /// A kernel of one thread that keeps the group's turn until the client says so ([`Command::HostDone`]).
    Hold {
        /// ns of running after which it ends by itself.
        timeout: u64,
    },
    /// The rest of the kernel before it in its stream: begins with unknown length, which the client tells
    /// ([`Command::Length`]).
    Rest {
        /// SMs that it can use.
        sms: u32,
    },
    /// A mark in the stream.
    Record,
    /// Waits for other work of this context.
    Wait(u64),
    /// A host function: reported when it may run, over when the client says so.
    Host,
}

/// One piece of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Submission {
    /// Stream.
    pub stream: u64,
    /// That of the stream: lower goes first.
    pub priority: i8,
    /// Number of the work.
    pub id: u64,
    /// Where it runs.
    pub queue: Queue,
    /// What it is.
    pub work: Work,
    /// Report it as soon as it is done. Other work is reported at the latest when its stream is idle.
    pub prompt: bool,
}

/// On an execution connection, to the server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Command {
    /// Work, in order.
    Submit {
        /// When the program submitted it.
        at: u64,
        /// What.
        items: Vec<Submission>,
    },
    /// A host function has returned, or a hold shall end.
    HostDone {
        /// Which.
        id: u64,
    },
    /// How long a [`Work::Rest`] takes.
    Length {
        /// Which.
        id: u64,
        /// ns with all of its SMs.
        duration: u64,
    },
    /// Effects are where [`Report::Progress`] wanted them.
    Progressed {
        /// That report's token.
        token: u64,
    },
    /// The stream is not used any more; its work goes on.
    EndStream {
        /// Which.
        stream: u64,
    },
    /// A kernel faulted: drop all work of this context.
    Abort {
        /// And that of the others in its group.
        all: bool,
    },
    /// The program destroys the context. A program that goes without that has died, or left its work behind.
    End,
}

/// On an execution connection, from the server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Report {
    /// Work that is done and when, in order.
    Done(Vec<(u64, u64)>),
    /// A host function may run.
    HostReady {
        /// Which.
        id: u64,
    },
    /// Another program in the same group faulted: all that was under way is gone.
    Lost,
    /// The group was frozen: bring the effects of its kernels to where they were interrupted, and answer.
    Progress {
        /// For the answer.
        token: u64,
        /// Work, done and total.
        works: Vec<(u64, u64, u64)>,
    },
    /// A frozen group goes on.
    Thawed,
}

/// Encodes a message; `None` when it is larger than [`MAX_PACKET`].
pub fn encode(message: &impl Serialize) -> Option<Vec<u8>> {
    postcard::to_stdvec(message)
        .ok()
        .filter(|bytes| bytes.len() <= MAX_PACKET)
}

/// Decodes a message; `None` for anything but exactly one.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Option<T> {
    match postcard::take_from_bytes(bytes) {
        Ok((message, [])) => Some(message),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_survive_and_garbage_does_not() {
        let item = Submission {
            stream: u64::MAX,
            priority: i8::MIN,
            id: u64::MAX,
            queue: Queue::DeviceToHost,
            work: Work::Kernel {
                sms: u32::MAX,
                duration: u64::MAX,
            },
            prompt: true,
        };
        let full = Command::Submit {
            at: u64::MAX,
            items: vec![item; MAX_SUBMISSIONS],
        };
        let bytes = encode(&full).expect("the largest packet fits");
        assert_eq!(decode::<Command>(&bytes), Some(full));
        assert_eq!(decode::<Command>(&bytes[..bytes.len() - 1]), None);
        assert_eq!(decode::<Command>(&[bytes, vec![0]].concat()), None);
    }

    proptest::proptest! {
        #[test]
        fn no_packet_panics(bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..200)) {
            let _ = (decode::<Request>(&bytes), decode::<Command>(&bytes));
            let _ = (decode::<Answer>(&bytes), decode::<Report>(&bytes));
        }
    }
}
