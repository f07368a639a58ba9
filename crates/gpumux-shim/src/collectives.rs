//! NCCL's profiler plug-in: counts a process's collectives, the bytes that they send, and whether one is on the device.
//!
//! NCCL opens the library that `NCCL_PROFILER_PLUGIN` names and takes `ncclProfiler_v5` out of it; the number names the layout below
//! (NVIDIA/nccl, `src/include/plugin/profiler/profiler_v5.h`). 2.28 is the first version that does; 2.30 still does, after v6. Only events of
//! the host are asked for: calls, and launches of kernels. Kernels of NCCL that report themselves would cost device time. What a captured
//! graph runs is not counted: NCCL is not called again then.

use std::{
    ffi::{CStr, c_char, c_int, c_void},
    ptr,
};

use crate::{
    ground::{context::add_collective, driver::CUstream},
    work,
};

/// `ncclProfileCollApi`, `ncclProfileP2pApi`, `ncclProfileKernelLaunch`
const COLLECTIVE: u64 = 1 << 9;
const POINT_TO_POINT: u64 = 1 << 10;
const LAUNCH: u64 = 1 << 11;
/// `CU_STREAM_LEGACY`: the stream that null is, too.
const LEGACY: *mut c_void = ptr::without_provenance_mut(1);

/// `ncclProfilerEventDescr_v5_t`, as far as it is read.
#[repr(C)]
struct Event {
    kind: u64,
    parent: *mut c_void,
    rank: c_int,
    of: Of,
}

#[repr(C)]
union Of {
    collective: Collective,
    point_to_point: PointToPoint,
    launch: *mut c_void,
}

/// `collApi`
#[derive(Clone, Copy)]
#[repr(C)]
struct Collective {
    function: *const c_char,
    count: usize,
    datatype: *const c_char,
    root: c_int,
    stream: *mut c_void,
    captured: u8,
}

/// `p2pApi`
#[derive(Clone, Copy)]
#[repr(C)]
struct PointToPoint {
    function: *const c_char,
    count: usize,
    datatype: *const c_char,
    stream: *mut c_void,
    captured: u8,
}

/// `ncclProfiler_v5_t`
#[repr(C)]
struct Profiler {
    name: *const c_char,
    init: unsafe extern "C" fn(
        *mut *mut c_void,
        u64,
        *mut c_int,
        *const c_char,
        c_int,
        c_int,
        c_int,
        *const c_void,
    ) -> c_int,
    start: unsafe extern "C" fn(*mut c_void, *mut *mut c_void, *const Event) -> c_int,
    stop: extern "C" fn(*mut c_void) -> c_int,
    record: extern "C" fn(*mut c_void, c_int, *const c_void) -> c_int,
    finalize: extern "C" fn(*mut c_void) -> c_int,
}

// SAFETY: nothing in it changes.
unsafe impl Sync for Profiler {}

#[unsafe(no_mangle)]
#[allow(non_upper_case_globals)]
static ncclProfiler_v5: Profiler = Profiler {
    name: c"gpumux".as_ptr(),
    init,
    start,
    stop,
    record,
    finalize,
};

/// `ncclSuccess`
const SUCCESS: c_int = 0;

/// A communicator is made: its number of ranks is all that has to be known of it later.
unsafe extern "C" fn init(
    context: *mut *mut c_void,
    _id: u64,
    mask: *mut c_int,
    _name: *const c_char,
    _nodes: c_int,
    ranks: c_int,
    _rank: c_int,
    _log: *const c_void,
) -> c_int {
    let ranks = usize::try_from(ranks).unwrap_or(1).max(1);
    // SAFETY: NCCL's places.
    unsafe {
        *context = ptr::without_provenance_mut(ranks);
        *mask = (COLLECTIVE | POINT_TO_POINT | LAUNCH) as c_int;
    }
    SUCCESS
}

unsafe extern "C" fn start(
    context: *mut c_void,
    handle: *mut *mut c_void,
    event: *const Event,
) -> c_int {
    // SAFETY: NCCL's event, whose kind says which part of it is there, and its place.
    unsafe {
        *handle = ptr::null_mut();
        let of = &raw const (*event).of;
        match (*event).kind {
            COLLECTIVE => {
                let it = &*of.cast::<Collective>();
                count(context, it.function, it.count, it.datatype, it.captured);
            }
            POINT_TO_POINT => {
                let it = &*of.cast::<PointToPoint>();
                count(context, it.function, it.count, it.datatype, it.captured);
            }
            LAUNCH => {
                let stream = *of.cast::<*mut c_void>();
                *handle = if stream.is_null() { LEGACY } else { stream };
            }
            _ => {}
        }
    }
    SUCCESS
}

/// What began ends. Only launches have a handle, their stream's.
extern "C" fn stop(handle: *mut c_void) -> c_int {
    if !handle.is_null() {
        work::collective_launched(handle as CUstream);
    }
    SUCCESS
}

extern "C" fn record(_handle: *mut c_void, _state: c_int, _details: *const c_void) -> c_int {
    SUCCESS
}

extern "C" fn finalize(_context: *mut c_void) -> c_int {
    SUCCESS
}

/// Counts a call.
///
/// # Safety
/// The texts must be C strings or null.
unsafe fn count(
    context: *mut c_void,
    function: *const c_char,
    count: usize,
    datatype: *const c_char,
    captured: u8,
) {
    if captured != 0 {
        return;
    }
    let text = |at: *const c_char| match at.is_null() {
        true => &b""[..],
        // SAFETY: the caller's.
        false => unsafe { CStr::from_ptr(at) }.to_bytes(),
    };
    let bytes = (count as u64).saturating_mul(width(text(datatype)));
    add_collective(sent(text(function), bytes, context.addr() as u64));
}

/// Bytes of an element.
fn width(datatype: &[u8]) -> u64 {
    match datatype {
        b"ncclInt64" | b"ncclUint64" | b"ncclFloat64" => 8,
        b"ncclInt32" | b"ncclUint32" | b"ncclFloat32" => 4,
        b"ncclFloat16" | b"ncclBfloat16" => 2,
        // Bytes, which NCCL has no name for among them.
        _ => 1,
    }
}

/// Bytes that each of so many ranks sends in a call with so many bytes of its own (NVIDIA/nccl-tests, `doc/PERFORMANCE.md`).
fn sent(function: &[u8], bytes: u64, ranks: u64) -> u64 {
    let others = ranks.saturating_sub(1);
    match function {
        b"AllReduce" => bytes.saturating_mul(2 * others) / ranks.max(1),
        b"AllGather" | b"ReduceScatter" | b"AlltoAll" => bytes.saturating_mul(others),
        b"Recv" => 0,
        _ => bytes,
    }
}

#[cfg(test)]
mod tests {
    use std::mem::{offset_of, size_of};

    use super::*;

    /// The offsets that a C compiler gives NCCL's structures on both of its 64-bit processors.
    #[test]
    fn events_lie_as_in_nccls_header() {
        assert_eq!(offset_of!(Event, of), 24);
        assert_eq!(offset_of!(Collective, datatype), 16);
        assert_eq!(offset_of!(Collective, stream), 32);
        assert_eq!(offset_of!(Collective, captured), 40);
        assert_eq!(offset_of!(PointToPoint, captured), 32);
        assert_eq!(size_of::<Profiler>(), 48);
    }

    #[test]
    fn ranks_send_what_their_algorithms_must() {
        let all = |function| [1, 2, 4].map(|ranks| sent(function, 1000, ranks));
        assert_eq!(all(b"AllReduce"), [0, 1000, 1500]);
        assert_eq!(all(b"AllGather"), [0, 1000, 3000]);
        assert_eq!(all(b"ReduceScatter"), [0, 1000, 3000]);
        assert_eq!(all(b"Broadcast"), [1000; 3]);
        assert_eq!((all(b"Send"), all(b"Recv")), ([1000; 3], [0; 3]));
        assert_eq!(sent(b"AllReduce", u64::MAX, 0), 0);
        let widths = [
            &b"ncclFloat64"[..],
            b"ncclInt32",
            b"ncclBfloat16",
            b"ncclInt8",
            b"Unknown",
        ];
        assert_eq!(widths.map(width), [8, 4, 2, 1, 1]);
    }
}
