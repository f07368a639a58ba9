//! Numbers and structures of the RM ioctls.
//!
//! Source: NVIDIA open GPU kernel modules:
//! `nv_escape.h`, `nv-ioctl.h`, `nvos.h`, `alloc_channel.h`, `cl2080_notification.h`, `class/cl*06f.h`,
//! `ctrl/ctrla06c.h`, `ctrl2080fifo.h`, `ctrl2080gr.h`, `ctrl2080gpu.h`. RM compares a control's
//! size with its own `sizeof`, so every size is checked here at compile time. All structures below but one are
//! the same in all of [`crate::branches::BRANCHES`].

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// `_IOC` type of all RM ioctls.
pub const IOC_MAGIC: u8 = b'F';

/// Builds the request number of `_IOWR('F', nr, size)`.
pub const fn iowr(nr: u8, size: usize) -> u64 {
    (3 << 30) | ((size as u64) << 16) | ((IOC_MAGIC as u64) << 8) | nr as u64
}

/// Escape numbers on `/dev/nvidiactl`.
pub mod escape {
    /// `NV_ESC_RM_FREE`
    pub const FREE: u8 = 0x29;
    /// `NV_ESC_RM_CONTROL`
    pub const CONTROL: u8 = 0x2a;
    /// `NV_ESC_RM_ALLOC`
    pub const ALLOC: u8 = 0x2b;
    /// `NV_ESC_RM_DUP_OBJECT`
    pub const DUP_OBJECT: u8 = 0x34;
    /// `NV_ESC_RM_SHARE`
    pub const SHARE: u8 = 0x35;
    /// `NV_ESC_IOCTL_XFER_CMD` (`NV_IOCTL_BASE` + 11)
    pub const XFER_CMD: u8 = 211;
}

/// Object classes.
pub mod class {
    /// `NV01_ROOT`
    pub const ROOT: u32 = 0x0000;
    /// `NV01_ROOT_NON_PRIV`
    pub const ROOT_NON_PRIV: u32 = 0x0001;
    /// `NV01_ROOT_CLIENT`
    pub const ROOT_CLIENT: u32 = 0x0041;
    /// `NV01_DEVICE_0`
    pub const DEVICE: u32 = 0x0080;
    /// `NV20_SUBDEVICE_0`
    pub const SUBDEVICE: u32 = 0x2080;
    /// `KEPLER_CHANNEL_GROUP_A`
    pub const CHANNEL_GROUP: u32 = 0xa06c;
    /// GPFIFO channel classes from Volta to Blackwell.
    pub const CHANNELS: [(u32, &str); 6] = [
        (0xc36f, "Volta"),
        (0xc46f, "Turing"),
        (0xc56f, "Ampere"),
        (0xc86f, "Hopper"),
        (0xc96f, "Blackwell A"),
        (0xca6f, "Blackwell B"),
    ];

    /// Whether `class` makes an RM client.
    pub const fn is_client(class: u32) -> bool {
        matches!(class, ROOT | ROOT_NON_PRIV | ROOT_CLIENT)
    }

    /// Whether `class` is a GPFIFO channel class that gpumux knows.
    pub fn is_channel(class: u32) -> bool {
        CHANNELS.iter().any(|(known, _)| *known == class)
    }
}

/// Engine types (`NV2080_ENGINE_TYPE_*`).
pub mod engine {
    /// Compute (and graphics).
    pub const GR0: u32 = 1;
    /// First copy engine.
    pub const COPY0: u32 = 9;
    /// Last of the ten first copy engines.
    pub const COPY9: u32 = 18;
}

/// Control commands.
pub mod cmd {
    /// `NVA06C_CTRL_CMD_GPFIFO_SCHEDULE`: libcuda enables a group with it.
    pub const GROUP_SCHEDULE: u32 = 0xa06c_0101;
    /// `NVA06C_CTRL_CMD_SET_TIMESLICE`
    pub const SET_TIMESLICE: u32 = 0xa06c_0103;
    /// `NVA06C_CTRL_CMD_GET_TIMESLICE`
    pub const GET_TIMESLICE: u32 = 0xa06c_0104;
    /// `NVA06C_CTRL_CMD_PREEMPT`
    pub const PREEMPT: u32 = 0xa06c_0105;
    /// `NVA06C_CTRL_CMD_SET_INTERLEAVE_LEVEL`: needs `CAP_SYS_NICE` in the caller.
    pub const SET_INTERLEAVE_LEVEL: u32 = 0xa06c_0107;
    /// `NV2080_CTRL_CMD_FIFO_DISABLE_CHANNELS`
    pub const DISABLE_CHANNELS: u32 = 0x2080_110b;
    /// `NV2080_CTRL_CMD_GR_SET_CTXSW_PREEMPTION_MODE`
    pub const SET_PREEMPTION_MODE: u32 = 0x2080_1210;
    /// `NV2080_CTRL_CMD_GPU_GET_GID_INFO`
    pub const GET_GID_INFO: u32 = 0x2080_014a;
}

macro_rules! layout {
    ($($(#[$doc:meta])* $name:ident: $size:literal { $($(#[$fdoc:meta])* $field:ident: $ty:ty),* $(,)? })*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable)]
        #[repr(C)]
        pub struct $name { $($(#[$fdoc])* pub $field: $ty),* }
        const _: () = assert!(size_of::<$name>() == $size);
        impl Default for $name {
            fn default() -> Self { zerocopy::FromZeros::new_zeroed() }
        }
    )*};
}

layout! {
    /// `NVOS00_PARAMETERS`: FREE.
    Free: 16 {
        /// Client.
        root: u32,
        /// Parent.
        parent: u32,
        /// What is freed; a client frees itself.
        object: u32,
        /// Answer.
        status: u32,
    }
    /// `NVOS54_PARAMETERS`: CONTROL.
    Control: 32 {
        /// Client.
        client: u32,
        /// Object.
        object: u32,
        /// Command.
        cmd: u32,
        /// Flags.
        flags: u32,
        /// Pointer to the parameters.
        params: u64,
        /// Their exact size.
        params_size: u32,
        /// Answer.
        status: u32,
    }
    /// `NVOS21_PARAMETERS`: ALLOC, short form.
    Alloc21: 32 {
        /// Client; for a new client the same as `object`, or 0 in and the new handle out.
        root: u32,
        /// Parent.
        parent: u32,
        /// New handle; 0 asks RM to choose.
        object: u32,
        /// Class.
        class: u32,
        /// Pointer to the class's parameters.
        params: u64,
        /// Their size.
        params_size: u32,
        /// Answer.
        status: u32,
    }
    /// `NVOS64_PARAMETERS`: ALLOC, long form; told from the short one by its size.
    Alloc64: 48 {
        /// Client.
        root: u32,
        /// Parent.
        parent: u32,
        /// New handle.
        object: u32,
        /// Class.
        class: u32,
        /// Pointer to the class's parameters.
        params: u64,
        /// Pointer to the rights asked for.
        rights: u64,
        /// Size of the parameters.
        params_size: u32,
        /// Flags.
        flags: u32,
        /// Answer.
        status: u32,
        /// Padding.
        pad: u32,
    }
    /// `NVOS55_PARAMETERS`: DUP_OBJECT.
    DupObject: 28 {
        /// Client that gets the new handle.
        client: u32,
        /// Parent of the new handle.
        parent: u32,
        /// New handle.
        object: u32,
        /// Client that owns the source.
        client_src: u32,
        /// Source.
        object_src: u32,
        /// Flags.
        flags: u32,
        /// Answer.
        status: u32,
    }
    /// `NVOS57_PARAMETERS` with an `RS_SHARE_POLICY`: SHARE.
    Share: 24 {
        /// Client that owns the object.
        client: u32,
        /// What is shared.
        object: u32,
        /// Whom with: for type 3 (`RS_SHARE_TYPE_CLIENT`) a client.
        target: u32,
        /// What that one may do; bit 0: duplicate it (`RS_ACCESS_DUP_OBJECT`).
        access: u32,
        /// Type, and above 16 bits what is done with the policy (0: added).
        kind: u32,
        /// Answer.
        status: u32,
    }
    /// `nv_ioctl_xfer_t`: any escape whose structure is given by pointer.
    XferCmd: 16 {
        /// Escape number.
        cmd: u32,
        /// Size of the structure.
        size: u32,
        /// Pointer to it.
        ptr: u64,
    }
    /// `NV0080_ALLOC_PARAMETERS`, first field only: which device.
    DeviceAllocHead: 4 {
        /// RM's device instance.
        device_id: u32,
    }
    /// `NV2080_ALLOC_PARAMETERS`.
    SubdeviceAlloc: 4 {
        /// Subdevice within the device.
        subdevice_id: u32,
    }
    /// `NV_CHANNEL_GROUP_ALLOCATION_PARAMETERS`.
    GroupAlloc: 20 {
        /// Error notifier.
        error: u32,
        /// ECC error notifier.
        ecc_error: u32,
        /// Address space.
        vaspace: u32,
        /// Engine type.
        engine: u32,
        /// Caller is a vGPU plugin (one byte and padding).
        vgpu_plugin: u32,
    }
    /// `NV_CHANNEL_ALLOC_PARAMS` up to branch 595, its first fields (the rest differs between branches).
    ChannelAllocHead: 136 {
        /// Error notifier.
        error: u32,
        /// No longer used.
        buffer: u32,
        /// Where the GPFIFO begins.
        gpfifo_offset: u64,
        /// Its entries.
        gpfifo_entries: u32,
        /// Flags.
        flags: u32,
        /// Context share.
        context_share: u32,
        /// Address space.
        vaspace: u32,
        /// USERD memory by subdevice.
        userd_memory: [u32; 8],
        /// Offsets in it.
        userd_offset: [u64; 8],
        /// Engine type.
        engine: u32,
        /// Channel id.
        cid: u32,
    }
    /// `NVA06C_CTRL_TIMESLICE_PARAMS`.
    TimesliceParams: 8 {
        /// Slice in µs.
        timeslice_us: u64,
    }
    /// `NVA06C_CTRL_GPFIFO_SCHEDULE_PARAMS` from branch 575 on; before, it ends with `skip_submit`.
    GroupScheduleParams: 3 {
        /// Enable.
        enable: u8,
        /// Do not submit the runlist.
        skip_submit: u8,
        /// Do not enable.
        skip_enable: u8,
    }
    /// `NVA06C_CTRL_INTERLEAVE_LEVEL_PARAMS`.
    InterleaveParams: 4 {
        /// 0 low, 1 medium (default), 2 high.
        level: u32,
    }
    /// `NV2080_CTRL_FIFO_DISABLE_CHANNELS_PARAMS`.
    DisableChannelsParams: 536 {
        /// 1 takes the channels off the device, 0 lets them run.
        disable: u8,
        /// Padding.
        pad0: [u8; 3],
        /// How many of the entries count.
        count: u32,
        /// Only keep from being scheduled; do not preempt.
        only_disable_scheduling: u8,
        /// Rewind GP_PUT.
        rewind_gp_put: u8,
        /// Padding.
        pad1: [u8; 6],
        /// Must be NULL.
        event: u64,
        /// Clients of the channels.
        clients: [u32; 64],
        /// Channels.
        channels: [u32; 64],
    }
    /// `NV2080_CTRL_GR_SET_CTXSW_PREEMPTION_MODE_PARAMS`.
    PreemptionModeParams: 32 {
        /// Bit 0: set the compute mode; bit 1: set the graphics mode.
        flags: u32,
        /// A channel of the group.
        channel: u32,
        /// Graphics mode.
        graphics: u32,
        /// Compute mode: 0 WFI, 1 CTA, 2 CILP.
        compute: u32,
        /// Route: flags.
        route_flags: u32,
        /// Padding.
        pad: u32,
        /// Route.
        route: u64,
    }
    /// `NV2080_CTRL_GPU_GET_GID_INFO_PARAMS`.
    GidInfoParams: 268 {
        /// 0.
        index: u32,
        /// Bits 1:0: format, 0 ASCII, 2 binary. Bit 2: type, 0 SHA-1.
        flags: u32,
        /// Bytes of `data` that count.
        length: u32,
        /// The id; in ASCII with its final NUL.
        data: [u8; 256],
    }
}

/// Which structures a driver has, where branches differ in what gpumux reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Variant {
    /// Branches up to 595.
    #[default]
    To595,
    /// Branches from 610 on have one more handle in `NV_CHANNEL_ALLOC_PARAMS` (source: gVisor's `pkg/abi/nvgpu/classes.go`,
    /// `NV_CHANNEL_ALLOC_PARAMS_V610`).
    From610,
}

impl Variant {
    /// That of a driver of this version, as `/sys/module/nvidia/version` has it.
    pub fn of(version: &str) -> Self {
        match crate::branches::branch(version) {
            Some(610..) => Self::From610,
            _ => Self::To595,
        }
    }

    /// Where the engine type is in `NV_CHANNEL_ALLOC_PARAMS`, in bytes.
    pub const fn channel_engine(self) -> usize {
        match self {
            Self::To595 => std::mem::offset_of!(ChannelAllocHead, engine),
            Self::From610 => 136,
        }
    }
}
