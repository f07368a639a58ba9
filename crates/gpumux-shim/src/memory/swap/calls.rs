//! The functions of the driver that moving memory calls itself.

use std::ffi::c_void;

use crate::ground::driver::{CUstream, functions};

functions! {
    pub(super) stream_create c"cuStreamCreate" (*mut CUstream, u32);
    pub(super) stream_destroy c"cuStreamDestroy_v2" (CUstream);
    pub(super) stream_query c"cuStreamQuery" (CUstream);
    pub(super) stream_synchronize c"cuStreamSynchronize" (CUstream);
    pub(super) to_host c"cuMemcpyDtoHAsync_v2" (*mut c_void, u64, usize, CUstream);
    pub(super) to_device c"cuMemcpyHtoDAsync_v2" (u64, *const c_void, usize, CUstream);
    pub(super) host_register c"cuMemHostRegister_v2" (*mut c_void, usize, u32);
    pub(super) host_unregister c"cuMemHostUnregister" (*mut c_void);
    pub(super) mem_alloc c"cuMemAlloc_v2" (*mut u64, usize);
    pub(super) mem_info c"cuMemGetInfo_v2" (*mut usize, *mut usize);
}

/// Calls a function of the driver; what it answers otherwise ends the work.
macro_rules! call {
    ($function:ident, $($arg:expr),*) => {
        match $function() {
            // SAFETY: the signature is `cuda.h`'s; the callers pass memory that outlives the copy.
            Some(function) => match unsafe { function($($arg),*) } {
                $crate::ground::driver::SUCCESS => Ok(()),
                error => Err(format!("{} answers {error}", stringify!($function))),
            },
            None => Err(format!("the driver has no {}", stringify!($function))),
        }
    };
}
pub(super) use call;
