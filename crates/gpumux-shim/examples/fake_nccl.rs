//! A stand-in for NCCL in the shim's tests: it only has a version, that of `FAKE_NCCL_VERSION`.

use std::ffi::c_int;

/// # Safety
/// As NCCL's.
#[unsafe(no_mangle)]
#[allow(non_snake_case)]
pub unsafe extern "C" fn ncclGetVersion(version: *mut c_int) -> c_int {
    let told = std::env::var("FAKE_NCCL_VERSION").unwrap_or_default();
    // SAFETY: the caller's place.
    unsafe { *version = told.parse().unwrap_or(0) };
    0
}
