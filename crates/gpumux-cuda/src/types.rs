//! Types and constants of the CUDA driver API, as in `cuda.h` of CUDA 12.9.

use std::ffi::{c_int, c_void};

/// `CUresult`: 0 is success.
pub type CUresult = c_int;
/// Device ordinal handle.
pub type CUdevice = c_int;
/// Address in device memory.
pub type CUdeviceptr = u64;
/// Handle of physical memory made by `cuMemCreate`.
pub type CUmemGenericAllocationHandle = u64;
/// Opaque context handle.
pub type CUcontext = *mut c_void;
/// Opaque module handle.
pub type CUmodule = *mut c_void;
/// Opaque kernel handle.
pub type CUfunction = *mut c_void;
/// Opaque stream handle.
pub type CUstream = *mut c_void;
/// Opaque event handle.
pub type CUevent = *mut c_void;
/// Opaque graph handle.
pub type CUgraph = *mut c_void;
/// Opaque handle of an instantiated graph.
pub type CUgraphExec = *mut c_void;

/// `CUuuid`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CUuuid {
    /// The 16 bytes in the order in which they are written.
    pub bytes: [u8; 16],
}

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct CUmemLocation {
    /// [`MEM_LOCATION_TYPE_DEVICE`].
    pub kind: c_int,
    /// Device ordinal.
    pub id: c_int,
}

/// `CUmemAllocationProp`: what `cuMemCreate` shall make.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CUmemAllocationProp {
    /// [`MEM_ALLOCATION_TYPE_PINNED`].
    pub kind: c_int,
    /// 0, or [`MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`] to allow exporting.
    pub requested_handle_types: c_int,
    /// Where the memory lives.
    pub location: CUmemLocation,
    /// Unused on Linux: null.
    pub win32_handle_meta_data: *mut c_void,
    /// Compression, RDMA, usage and reserved bytes: 0.
    pub alloc_flags: [u8; 8],
}

impl CUmemAllocationProp {
    /// Plain pinned memory of one device.
    pub const fn on_device(device: CUdevice) -> Self {
        Self {
            kind: MEM_ALLOCATION_TYPE_PINNED,
            requested_handle_types: 0,
            location: CUmemLocation {
                kind: MEM_LOCATION_TYPE_DEVICE,
                id: device,
            },
            win32_handle_meta_data: std::ptr::null_mut(),
            alloc_flags: [0; 8],
        }
    }
}

/// `CUmemAccessDesc`: the device that may access a mapping, and how.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CUmemAccessDesc {
    /// The device that may.
    pub location: CUmemLocation,
    /// [`MEM_ACCESS_FLAGS_PROT_READWRITE`].
    pub flags: c_int,
}

const _: () = assert!(size_of::<CUmemAllocationProp>() == 32);
const _: () = assert!(size_of::<CUmemAccessDesc>() == 12);

/// `CUDA_SUCCESS`.
pub const SUCCESS: CUresult = 0;
/// `CUDA_ERROR_INVALID_VALUE`.
pub const ERROR_INVALID_VALUE: CUresult = 1;
/// `CUDA_ERROR_OUT_OF_MEMORY`.
pub const ERROR_OUT_OF_MEMORY: CUresult = 2;
/// `CUDA_ERROR_NOT_READY`: the work is still going on.
pub const ERROR_NOT_READY: CUresult = 600;

/// `CU_STREAM_NON_BLOCKING`.
pub const STREAM_NON_BLOCKING: u32 = 1;
/// `CU_EVENT_BLOCKING_SYNC`: a wait sleeps instead of spinning.
pub const EVENT_BLOCKING_SYNC: u32 = 1;
/// `CU_EVENT_DISABLE_TIMING`.
pub const EVENT_DISABLE_TIMING: u32 = 2;
/// `CU_STREAM_CAPTURE_MODE_THREAD_LOCAL`.
pub const STREAM_CAPTURE_MODE_THREAD_LOCAL: c_int = 1;
/// `CU_MEM_ALLOCATION_TYPE_PINNED`.
pub const MEM_ALLOCATION_TYPE_PINNED: c_int = 1;
/// `CU_MEM_LOCATION_TYPE_DEVICE`.
pub const MEM_LOCATION_TYPE_DEVICE: c_int = 1;
/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
pub const MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR: c_int = 1;
/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
pub const MEM_ACCESS_FLAGS_PROT_READWRITE: c_int = 3;
/// `CU_MEM_ALLOC_GRANULARITY_MINIMUM`.
pub const MEM_ALLOC_GRANULARITY_MINIMUM: c_int = 0;
/// `CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT`.
pub const DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: c_int = 16;
/// `CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR`.
pub const DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: c_int = 75;
/// `CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR`.
pub const DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: c_int = 76;

/// Declares numbers that the driver API names.
macro_rules! numbers {
    ($($(#[$docs:meta])* $list:ident { $($(#[$of:meta])* $name:ident = $number:literal,)* })*) => {$(
        $(#[$docs])*
        pub mod $list {
            $($(#[$of])* pub const $name: std::ffi::c_int = $number;)*
        }
    )*};
}

numbers! {
    /// `CUgraphMem_attribute`: memory of a device's graphs.
    graph_memory {
        /// What launches use now.
        USED = 0,
        /// The most that they used.
        MOST_USED = 1,
        /// What the driver keeps now.
        RESERVED = 2,
        /// The most that it kept.
        MOST_RESERVED = 3,
    }
    /// `CUmemPool_attribute`: stream-ordered memory.
    pool {
        /// What is kept when all work has ended.
        THRESHOLD = 4,
        /// What the pool has now.
        RESERVED = 5,
        /// The most that it had.
        MOST_RESERVED = 6,
        /// What the program uses now.
        USED = 7,
        /// The most that it used.
        MOST_USED = 8,
    }
    /// `CUgraphNodeType`: what a node of a graph does.
    graph_node {
        /// A kernel runs.
        KERNEL = 0,
        /// Memory is copied.
        MEMCPY = 1,
        /// Memory is set.
        MEMSET = 2,
        /// A function of the program runs.
        HOST = 3,
        /// Another graph runs.
        GRAPH = 4,
        /// Nothing.
        EMPTY = 5,
        /// Memory is allocated.
        ALLOCATE = 10,
        /// Memory is freed.
        FREE = 11,
    }
}
