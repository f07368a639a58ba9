//! What a program is shown of a device's memory by NVML: the same as by the CUDA driver. Engines size themselves by either.
//!
//! Programs load NVML by themselves (`dlopen`), so only what `dlsym` gives is exchanged.

use std::{
    ffi::{CStr, c_char, c_int, c_uint, c_void},
    mem, ptr,
    sync::atomic::{AtomicPtr, Ordering},
};

use crate::{
    ground::{driver, next},
    memory::shown,
};

type Handle = *mut c_void;
type Return = c_int;
type GetUuid = unsafe extern "C" fn(Handle, *mut c_char, c_uint) -> Return;
type GetMemory<T> = unsafe extern "C" fn(Handle, *mut T) -> Return;

const SUCCESS: Return = 0;
/// `NVML_ERROR_FUNCTION_NOT_FOUND`
const NOT_FOUND: Return = 13;
/// Longest UUID with its end (`NVML_DEVICE_UUID_V2_BUFFER_SIZE`).
const UUID: usize = 96;

/// `nvmlMemory_t`
#[repr(C)]
struct Memory {
    total: u64,
    free: u64,
    used: u64,
}

/// `nvmlMemory_v2_t`
#[repr(C)]
struct MemoryV2 {
    version: c_uint,
    total: u64,
    reserved: u64,
    free: u64,
    used: u64,
}

static REAL: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
static REAL_V2: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
static GET_UUID: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());

/// What a program's `dlsym` of a function of NVML gives instead of `address`, which the real one gave.
pub(crate) fn found(library: *mut c_void, name: &CStr, address: *mut c_void) -> *mut c_void {
    let (real, ours) = match name.to_bytes() {
        b"nvmlDeviceGetMemoryInfo" => (&REAL, memory as *const c_void),
        b"nvmlDeviceGetMemoryInfo_v2" => (&REAL_V2, memory_v2 as *const c_void),
        _ => return address,
    };
    let Some(dlsym) = next::dlsym().filter(|_| driver::enabled()) else {
        return address;
    };
    // SAFETY: the program's own library, in which `name` was just found.
    let uuid = unsafe { dlsym(library, c"nvmlDeviceGetUUID".as_ptr()) };
    if uuid.is_null() {
        return address;
    }
    GET_UUID.store(uuid, Ordering::Release);
    real.store(address, Ordering::Release);
    ours.cast_mut()
}

/// The tenant's view of a device of so much memory: free and in all.
fn view(device: Handle, total: u64) -> Option<(u64, u64)> {
    let get = GET_UUID.load(Ordering::Acquire);
    let mut text = [0u8; UUID];
    // SAFETY: `found` has stored NVML's function before it gave out ours.
    let get: GetUuid = unsafe { mem::transmute::<*mut c_void, GetUuid>(get) };
    // SAFETY: the device of the program's own call, and as many bytes as are named.
    if unsafe { get(device, text.as_mut_ptr().cast(), UUID as c_uint) } != SUCCESS {
        return None;
    }
    let uuid = CStr::from_bytes_until_nul(&text).ok()?.to_str().ok()?;
    shown::view_anywhere(uuid, total)
}

/// Makes the program's own call; then what it got is exchanged.
///
/// # Safety
/// The arguments must be what the program passed.
unsafe fn answer<T>(
    real: &AtomicPtr<c_void>,
    device: Handle,
    out: *mut T,
    exchange: impl FnOnce(&mut T),
) -> Return {
    let real = real.load(Ordering::Acquire);
    if real.is_null() {
        return NOT_FOUND;
    }
    // SAFETY: `found` has stored NVML's function of this type there.
    let call: GetMemory<T> = unsafe { mem::transmute::<*mut c_void, GetMemory<T>>(real) };
    // SAFETY: the program's own call.
    let result = unsafe { call(device, out) };
    if result == SUCCESS && !out.is_null() {
        // SAFETY: NVML has just written there.
        exchange(unsafe { &mut *out });
    }
    result
}

unsafe extern "C" fn memory(device: Handle, out: *mut Memory) -> Return {
    let exchange = |it: &mut Memory| {
        if let Some((free, total)) = view(device, it.total) {
            *it = Memory {
                total,
                free,
                used: total - free,
            };
        }
    };
    // SAFETY: the program's own call.
    unsafe { answer(&REAL, device, out, exchange) }
}

unsafe extern "C" fn memory_v2(device: Handle, out: *mut MemoryV2) -> Return {
    let exchange = |it: &mut MemoryV2| {
        if let Some((free, total)) = view(device, it.total) {
            let reserved = it.reserved.min(total - free);
            *it = MemoryV2 {
                version: it.version,
                total,
                reserved,
                free,
                used: total - free - reserved,
            };
        }
    };
    // SAFETY: the program's own call.
    unsafe { answer(&REAL_V2, device, out, exchange) }
}
