//! The driver API's functions that this library stands in front of, and how programs reach them.
//!
//! There is one list, [`hooks!`] below. Whatever way a program takes to a listed function, it gets ours,
//! and ours calls the real one:
//! - a program linked to libcuda binds to this library's exports, because it is preloaded;
//! - `dlsym` is exported too ([`crate::loader`]) and exchanges pointers into libcuda;
//! - `cuGetProcAddress` calls the real one first and exchanges what that returned.
//!
//! A pointer is exchanged for what it *is*, not for the name it was asked by: the real address of each
//! listed function is known, so libcuda's own rules about versions and streams keep
//! deciding. What is not listed, or unknown to this version, passes through.
//!
//! Not seen: libraries loaded with `RTLD_DEEPBIND`, and functions in libcuda's private tables.

use std::{
    ffi::{CStr, c_char, c_int, c_uint, c_void},
    mem::transmute_copy,
    ptr,
    sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, Ordering},
};

use crate::{foresee::Call, gate, memory, next, physical, trace, vmm::Access, work};

pub(crate) type CUresult = c_int;
pub(crate) type CUstream = *mut c_void;
pub(crate) type CUcontext = *mut c_void;
pub(crate) type CUevent = *mut c_void;
type CUdeviceptr = u64;
type CUdevice = c_int;

/// `CUDA_SUCCESS`
pub(crate) const SUCCESS: CUresult = 0;
/// `CUDA_ERROR_NOT_INITIALIZED`: what a call answers without a driver.
const NOT_INITIALIZED: CUresult = 3;
/// `CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM`
const PER_THREAD: u64 = 2;

/// The head of `CUlaunchConfig`.
#[repr(C)]
struct LaunchConfig {
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared_bytes: c_uint,
    stream: CUstream,
}

/// `CUmemAllocationProp`: what memory is made.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct AllocationProp {
    pub(crate) kind: c_int,
    pub(crate) handles: c_int,
    pub(crate) location: Location,
    pub(crate) win32: u64,
    pub(crate) flags: [u8; 8],
}

/// `CUmemLocation`: where memory is.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Location {
    pub(crate) kind: c_int,
    pub(crate) id: c_int,
}

/// libcuda, once something was found in it. Never closed.
static LIBRARY: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());

/// Looks a symbol up in libcuda, loaded in whatever way. Does not load it.
fn lookup(name: &CStr) -> *mut c_void {
    let Some(dlsym) = next::dlsym() else {
        return ptr::null_mut();
    };
    let mut library = LIBRARY.load(Ordering::Acquire);
    if library.is_null() {
        // SAFETY: a C string; RTLD_NEXT is relative to this library. Finds a driver that the program
        // is linked to, or that is preloaded.
        let address = unsafe { dlsym(libc::RTLD_NEXT, name.as_ptr()) };
        if !address.is_null() {
            return address;
        }
        // SAFETY: a C string; nothing is loaded. The handle keeps libcuda from being unloaded.
        library = unsafe {
            libc::dlopen(
                c"libcuda.so.1".as_ptr(),
                libc::RTLD_LAZY | libc::RTLD_NOLOAD,
            )
        };
        if library.is_null() {
            return ptr::null_mut();
        }
        LIBRARY.store(library, Ordering::Release);
    }
    // SAFETY: an open library and a C string.
    unsafe { dlsym(library, name.as_ptr()) }
}

/// A function of libcuda that this library calls for itself.
pub(crate) struct Function {
    name: &'static CStr,
    address: AtomicPtr<c_void>,
}

impl Function {
    pub(crate) const fn new(name: &'static CStr) -> Self {
        let address = AtomicPtr::new(ptr::null_mut());
        Self { name, address }
    }

    /// The real function, if this driver has it.
    ///
    /// # Safety
    /// `F` must be the type of a pointer to a function with this name's signature.
    pub(crate) unsafe fn get<F: Copy>(&self) -> Option<F> {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) }
        let mut address = self.address.load(Ordering::Relaxed);
        if address.is_null() {
            address = lookup(self.name);
            self.address.store(address, Ordering::Relaxed);
        }
        // SAFETY: the caller names the function's type; null was ruled out.
        (!address.is_null()).then(|| unsafe { transmute_copy(&address) })
    }
}

/// One listed function.
struct Row {
    real: Function,
    ours: *const (),
    /// By what `cuGetProcAddress` knows it: name, version, flags.
    ask: Option<(&'static CStr, c_int, u64)>,
    /// What that gives, should it differ from the exported symbol.
    asked: AtomicPtr<c_void>,
}

// SAFETY: the only field that is not `Sync` is the address of a function.
unsafe impl Sync for Row {}

/// Ours for a real address, or the address itself.
fn exchange(address: *mut c_void) -> *mut c_void {
    let is = |known: &AtomicPtr<c_void>| known.load(Ordering::Relaxed) == address;
    let exported = ROWS.iter().find(|row| is(&row.real.address));
    match exported.or_else(|| ROWS.iter().find(|row| is(&row.asked))) {
        Some(row) if !address.is_null() => row.ours as *mut c_void,
        _ => address,
    }
}

/// Whether `GPUMUX_HOOKS=0` keeps programs from getting our functions.
pub(crate) fn enabled() -> bool {
    static ENABLED: AtomicU8 = AtomicU8::new(0);
    match ENABLED.load(Ordering::Relaxed) {
        0 => {
            let on = std::env::var_os("GPUMUX_HOOKS").is_none_or(|value| value != "0");
            ENABLED.store(1 + u8::from(on), Ordering::Relaxed);
            on
        }
        state => state == 2,
    }
}

/// What a program's `dlsym` of a driver function gives instead of `address`.
///
/// # Safety
/// `address` must be what the real `dlsym` gave.
pub(crate) unsafe fn found(address: *mut c_void) -> *mut c_void {
    if let Some(row) = ROWS.iter().find(|row| ptr::eq(row.ours.cast(), address)) {
        // Our own export, found by a search of everything. It is only there if libcuda is.
        let real = lookup(row.real.name);
        return if real.is_null() || !enabled() {
            real
        } else {
            address
        };
    }
    // SAFETY: the caller's.
    if !enabled() || unsafe { !learn(address) } {
        return address;
    }
    exchange(address)
}

/// Learns the real addresses if `address` lies in libcuda. Whether they are known.
unsafe fn learn(address: *mut c_void) -> bool {
    static LEARNED: AtomicBool = AtomicBool::new(false);
    if LEARNED.load(Ordering::Acquire) {
        return true;
    }
    let Some(dlsym) = next::dlsym() else {
        return false;
    };
    let within = |address: *mut c_void| {
        // SAFETY: an all-zero `Dl_info` is valid, and any address may be asked about.
        let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
        // SAFETY: as above.
        (unsafe { libc::dladdr(address, &raw mut info) } != 0).then_some(info)
    };
    let Some(object) = within(address) else {
        return false;
    };
    let flags = libc::RTLD_LAZY | libc::RTLD_NOLOAD | libc::RTLD_NODELETE;
    // SAFETY: a path from the loader; it only gives another handle of a library that is loaded.
    let library = unsafe { libc::dlopen(object.dli_fname, flags) };
    let is_driver = !library.is_null()
        && [c"cuInit", c"cuDriverGetVersion"].iter().all(|name| {
            // SAFETY: as above.
            within(unsafe { dlsym(library, name.as_ptr()) })
                .is_some_and(|found| found.dli_fbase == object.dli_fbase)
        });
    if is_driver {
        LIBRARY.store(library, Ordering::Release);
        for row in &ROWS {
            // SAFETY: only the address is wanted.
            let _ = unsafe { row.real.get::<*mut c_void>() };
        }
        LEARNED.store(true, Ordering::Release);
    }
    // The program's own look-up succeeded: it must not find an error of ours.
    // SAFETY: no requirements.
    unsafe { libc::dlerror() };
    is_driver
}

type GetProcAddress = unsafe extern "C-unwind" fn(
    *const c_char,
    *mut *mut c_void,
    c_int,
    u64,
    *mut c_int,
) -> CUresult;

/// Exchanges what `cuGetProcAddress` has answered.
unsafe fn answered(result: CUresult, function: *mut *mut c_void) -> CUresult {
    if result == SUCCESS && !function.is_null() && enabled() {
        learn_asked();
        // SAFETY: the real function has just written there.
        unsafe { *function = exchange(*function) };
    }
    result
}

/// Asks `cuGetProcAddress` for the listed functions, once: it may give other addresses than `dlsym`.
fn learn_asked() {
    static LEARNED: AtomicBool = AtomicBool::new(false);
    static ASK: Function = Function::new(c"cuGetProcAddress_v2");
    // SAFETY: the type is the function's.
    let Some(ask) = (unsafe { ASK.get::<GetProcAddress>() }) else {
        return;
    };
    if LEARNED.swap(true, Ordering::AcqRel) {
        return;
    }
    for row in &ROWS {
        // SAFETY: only the address is wanted.
        let _ = unsafe { row.real.get::<*mut c_void>() };
        let Some((name, version, flags)) = row.ask else {
            continue;
        };
        let (mut address, mut status) = (ptr::null_mut(), 0);
        // SAFETY: a C string and two places to write.
        let result = unsafe {
            ask(
                name.as_ptr(),
                &raw mut address,
                version,
                flags,
                &raw mut status,
            )
        };
        // An own export comes back when the driver itself is preloaded behind this library.
        if result == SUCCESS && !ROWS.iter().any(|row| ptr::eq(row.ours.cast(), address)) {
            row.asked.store(address, Ordering::Relaxed);
        }
    }
}

macro_rules! hooks {
    ($(
        $name:ident $([$ask:literal $version:literal $($flags:ident)?])?
        ($($arg:ident: $type:ty),* $(,)?) $real:ident => $body:expr;
    )*) => {
        #[allow(non_camel_case_types, clippy::enum_variant_names)]
        #[derive(Clone, Copy)]
        enum Id { $($name),* }

        static ROWS: [Row; [$(Id::$name),*].len()] = [$({
            #[allow(unused_mut, unused_assignments)]
            let mut ask = None;
            $(
                #[allow(unused_mut, unused_assignments)]
                let mut flags = 0;
                $(flags = $flags;)?
                ask = Some(($ask, $version, flags));
            )?
            Row {
                // SAFETY: `concat!` puts the one NUL at its end.
                real: Function::new(unsafe {
                    CStr::from_bytes_with_nul_unchecked(
                        concat!(stringify!($name), "\0").as_bytes(),
                    )
                }),
                ours: $name as *const (),
                ask,
                asked: AtomicPtr::new(ptr::null_mut()),
            }
        }),*];

        $(
            #[doc = concat!("In front of libcuda's `", stringify!($name), "`.")]
            ///
            /// # Safety
            /// As libcuda's.
            #[unsafe(no_mangle)]
            #[allow(non_snake_case, clippy::too_many_arguments)]
            unsafe extern "C-unwind" fn $name($($arg: $type),*) -> CUresult {
                type Real = unsafe extern "C-unwind" fn($($type),*) -> CUresult;
                // SAFETY: the signature is `cuda.h`'s.
                let Some(function) = (unsafe { ROWS[Id::$name as usize].real.get::<Real>() }) else {
                    return NOT_INITIALIZED;
                };
                // SAFETY: the program's own call.
                let $real = || unsafe { function($($arg),*) };
                let call = || $body;
                if trace::calls() {
                    let result = call();
                    trace::called(stringify!($name), &[$((stringify!($arg), &$arg)),*], result);
                    return result;
                }
                call()
            }
        )*
    };
}

/// The default stream of a function whose name has no `_ptsz` or `_ptds`, and of one that has.
const LEGACY: bool = false;
const OWN: bool = true;

hooks! {
    // Look-up.
    cuGetProcAddress [c"cuGetProcAddress" 11030] (
        name: *const c_char, function: *mut *mut c_void, version: c_int, flags: u64,
    // SAFETY: `real` has written to `function`.
    ) real => unsafe { answered(real(), function) };
    cuGetProcAddress_v2 [c"cuGetProcAddress" 12000] (
        name: *const c_char, function: *mut *mut c_void, version: c_int, flags: u64,
        status: *mut c_int,
    // SAFETY: as above.
    ) real => unsafe { answered(real(), function) };
    cuGetProcAddress_v2_ptsz [c"cuGetProcAddress" 12000 PER_THREAD] (
        name: *const c_char, function: *mut *mut c_void, version: c_int, flags: u64,
        status: *mut c_int,
    // SAFETY: as above.
    ) real => unsafe { answered(real(), function) };

    // Work for the compute group.
    cuLaunchKernel [c"cuLaunchKernel" 4000] (
        function_: *mut c_void, gx: c_uint, gy: c_uint, gz: c_uint, bx: c_uint, by: c_uint,
        bz: c_uint, shared: c_uint, stream: CUstream, args: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) real => work::submit(stream, LEGACY, real);
    cuLaunchKernel_ptsz [c"cuLaunchKernel" 7000 PER_THREAD] (
        function_: *mut c_void, gx: c_uint, gy: c_uint, gz: c_uint, bx: c_uint, by: c_uint,
        bz: c_uint, shared: c_uint, stream: CUstream, args: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) real => work::submit(stream, OWN, real);
    cuLaunchKernelEx [c"cuLaunchKernelEx" 11060] (
        config: *const LaunchConfig, function_: *mut c_void, args: *mut *mut c_void,
        extra: *mut *mut c_void,
    // SAFETY: a program that passes no configuration crashes in libcuda as well.
    ) real => work::submit(unsafe { (*config).stream }, LEGACY, real);
    cuLaunchKernelEx_ptsz [c"cuLaunchKernelEx" 11060 PER_THREAD] (
        config: *const LaunchConfig, function_: *mut c_void, args: *mut *mut c_void,
        extra: *mut *mut c_void,
    // SAFETY: as above.
    ) real => work::submit(unsafe { (*config).stream }, OWN, real);
    cuLaunchCooperativeKernel [c"cuLaunchCooperativeKernel" 9000] (
        function_: *mut c_void, gx: c_uint, gy: c_uint, gz: c_uint, bx: c_uint, by: c_uint,
        bz: c_uint, shared: c_uint, stream: CUstream, args: *mut *mut c_void,
    ) real => work::submit(stream, LEGACY, real);
    cuLaunchCooperativeKernel_ptsz [c"cuLaunchCooperativeKernel" 9000 PER_THREAD] (
        function_: *mut c_void, gx: c_uint, gy: c_uint, gz: c_uint, bx: c_uint, by: c_uint,
        bz: c_uint, shared: c_uint, stream: CUstream, args: *mut *mut c_void,
    ) real => work::submit(stream, OWN, real);
    // A graph may have copies in it.
    cuGraphLaunch [c"cuGraphLaunch" 10000] (graph: *mut c_void, stream: CUstream)
        real => work::copy(stream, LEGACY, || work::submit(stream, LEGACY, real));
    cuGraphLaunch_ptsz [c"cuGraphLaunch" 10000 PER_THREAD] (graph: *mut c_void, stream: CUstream)
        real => work::copy(stream, OWN, || work::submit(stream, OWN, real));
    cuMemsetD8Async [c"cuMemsetD8Async" 3020] (
        to: CUdeviceptr, value: u8, count: usize, stream: CUstream,
    ) real => work::submit(stream, LEGACY, real);
    cuMemsetD8Async_ptsz [c"cuMemsetD8Async" 7000 PER_THREAD] (
        to: CUdeviceptr, value: u8, count: usize, stream: CUstream,
    ) real => work::submit(stream, OWN, real);
    cuMemsetD16Async [c"cuMemsetD16Async" 3020] (
        to: CUdeviceptr, value: u16, count: usize, stream: CUstream,
    ) real => work::submit(stream, LEGACY, real);
    cuMemsetD16Async_ptsz [c"cuMemsetD16Async" 7000 PER_THREAD] (
        to: CUdeviceptr, value: u16, count: usize, stream: CUstream,
    ) real => work::submit(stream, OWN, real);
    cuMemsetD32Async [c"cuMemsetD32Async" 3020] (
        to: CUdeviceptr, value: c_uint, count: usize, stream: CUstream,
    ) real => work::submit(stream, LEGACY, real);
    cuMemsetD32Async_ptsz [c"cuMemsetD32Async" 7000 PER_THREAD] (
        to: CUdeviceptr, value: c_uint, count: usize, stream: CUstream,
    ) real => work::submit(stream, OWN, real);

    // Other work that touches memory, maybe on copy engines. Only the stream matters here: what else there is
    // is passed on as it came. (Every argument is an integer or a pointer and takes one register, or
    // one eight-byte place on the stack.)
    cuGraphUpload [c"cuGraphUpload" 11010] (a: u64, stream: CUstream)
        real => work::copy(stream, LEGACY, real);
    cuGraphUpload_ptsz [c"cuGraphUpload" 11010 PER_THREAD] (a: u64, stream: CUstream)
        real => work::copy(stream, OWN, real);
    cuLaunch [c"cuLaunch" 2000] (a: u64)
        real => work::either(ptr::null_mut(), LEGACY, real);
    cuLaunchCooperativeKernelMultiDevice [c"cuLaunchCooperativeKernelMultiDevice" 9000] (a: u64, b: u64, c: u64)
        real => work::either(ptr::null_mut(), LEGACY, real);
    cuLaunchGrid [c"cuLaunchGrid" 2000] (a: u64, b: u64, c: u64)
        real => work::either(ptr::null_mut(), LEGACY, real);
    cuLaunchGridAsync [c"cuLaunchGridAsync" 2000] (a: u64, b: u64, c: u64, stream: CUstream)
        real => work::either(stream, LEGACY, real);
    cuMemBatchDecompressAsync [c"cuMemBatchDecompressAsync" 12060] (a: u64, b: u64, c: u64, d: u64, stream: CUstream)
        real => work::either(stream, LEGACY, real);
    cuMemBatchDecompressAsync_ptsz [c"cuMemBatchDecompressAsync" 12060 PER_THREAD] (a: u64, b: u64, c: u64, d: u64, stream: CUstream)
        real => work::either(stream, OWN, real);
    cuMemDiscardAndPrefetchBatchAsync [c"cuMemDiscardAndPrefetchBatchAsync" 13000] (a: u64, b: u64, c: u64, d: u64, e: u64, f: u64, g: u64, stream: CUstream)
        real => work::copy(stream, LEGACY, real);
    cuMemDiscardAndPrefetchBatchAsync_ptsz [c"cuMemDiscardAndPrefetchBatchAsync" 13000 PER_THREAD] (a: u64, b: u64, c: u64, d: u64, e: u64, f: u64, g: u64, stream: CUstream)
        real => work::copy(stream, OWN, real);
    cuMemDiscardBatchAsync [c"cuMemDiscardBatchAsync" 13000] (a: u64, b: u64, c: u64, d: u64, stream: CUstream)
        real => work::copy(stream, LEGACY, real);
    cuMemDiscardBatchAsync_ptsz [c"cuMemDiscardBatchAsync" 13000 PER_THREAD] (a: u64, b: u64, c: u64, d: u64, stream: CUstream)
        real => work::copy(stream, OWN, real);
    cuMemMapArrayAsync [c"cuMemMapArrayAsync" 11010] (a: u64, b: u64, stream: CUstream)
        real => work::copy(stream, LEGACY, real);
    cuMemMapArrayAsync_ptsz [c"cuMemMapArrayAsync" 11010 PER_THREAD] (a: u64, b: u64, stream: CUstream)
        real => work::copy(stream, OWN, real);
    cuMemPrefetchAsync [c"cuMemPrefetchAsync" 8000] (a: u64, b: u64, c: u64, stream: CUstream)
        real => work::copy(stream, LEGACY, real);
    cuMemPrefetchAsync_ptsz [c"cuMemPrefetchAsync" 8000 PER_THREAD] (a: u64, b: u64, c: u64, stream: CUstream)
        real => work::copy(stream, OWN, real);
    cuMemPrefetchAsync_v2 [c"cuMemPrefetchAsync" 12020] (a: u64, b: u64, c: u64, d: u64, stream: CUstream)
        real => work::copy(stream, LEGACY, real);
    cuMemPrefetchAsync_v2_ptsz [c"cuMemPrefetchAsync" 12020 PER_THREAD] (a: u64, b: u64, c: u64, d: u64, stream: CUstream)
        real => work::copy(stream, OWN, real);
    cuMemPrefetchBatchAsync [c"cuMemPrefetchBatchAsync" 13000] (a: u64, b: u64, c: u64, d: u64, e: u64, f: u64, g: u64, stream: CUstream)
        real => work::copy(stream, LEGACY, real);
    cuMemPrefetchBatchAsync_ptsz [c"cuMemPrefetchBatchAsync" 13000 PER_THREAD] (a: u64, b: u64, c: u64, d: u64, e: u64, f: u64, g: u64, stream: CUstream)
        real => work::copy(stream, OWN, real);
    cuMemcpy2DAsync_v2 [c"cuMemcpy2DAsync" 3020] (a: u64, stream: CUstream)
        real => work::either(stream, LEGACY, real);
    cuMemcpy2DAsync_v2_ptsz [c"cuMemcpy2DAsync" 7000 PER_THREAD] (a: u64, stream: CUstream)
        real => work::either(stream, OWN, real);
    cuMemcpy2DUnaligned_v2 [c"cuMemcpy2DUnaligned" 3020] (a: u64)
        real => work::either(ptr::null_mut(), LEGACY, real);
    cuMemcpy2DUnaligned_v2_ptds [c"cuMemcpy2DUnaligned" 7000 PER_THREAD] (a: u64)
        real => work::either(ptr::null_mut(), OWN, real);
    cuMemcpy2D_v2 [c"cuMemcpy2D" 3020] (a: u64)
        real => work::either(ptr::null_mut(), LEGACY, real);
    cuMemcpy2D_v2_ptds [c"cuMemcpy2D" 7000 PER_THREAD] (a: u64)
        real => work::either(ptr::null_mut(), OWN, real);
    cuMemcpy3DAsync_v2 [c"cuMemcpy3DAsync" 3020] (a: u64, stream: CUstream)
        real => work::either(stream, LEGACY, real);
    cuMemcpy3DAsync_v2_ptsz [c"cuMemcpy3DAsync" 7000 PER_THREAD] (a: u64, stream: CUstream)
        real => work::either(stream, OWN, real);
    cuMemcpy3DBatchAsync [c"cuMemcpy3DBatchAsync" 12080] (a: u64, b: u64, c: u64, d: u64, stream: CUstream)
        real => work::either(stream, LEGACY, real);
    cuMemcpy3DBatchAsync_ptsz [c"cuMemcpy3DBatchAsync" 12080 PER_THREAD] (a: u64, b: u64, c: u64, d: u64, stream: CUstream)
        real => work::either(stream, OWN, real);
    cuMemcpy3DBatchAsync_v2 [c"cuMemcpy3DBatchAsync" 13000] (a: u64, b: u64, c: u64, stream: CUstream)
        real => work::either(stream, LEGACY, real);
    cuMemcpy3DBatchAsync_v2_ptsz [c"cuMemcpy3DBatchAsync" 13000 PER_THREAD] (a: u64, b: u64, c: u64, stream: CUstream)
        real => work::either(stream, OWN, real);
    cuMemcpy3DPeer [c"cuMemcpy3DPeer" 4000] (a: u64)
        real => work::either(ptr::null_mut(), LEGACY, real);
    cuMemcpy3DPeerAsync [c"cuMemcpy3DPeerAsync" 4000] (a: u64, stream: CUstream)
        real => work::either(stream, LEGACY, real);
    cuMemcpy3DPeerAsync_ptsz [c"cuMemcpy3DPeerAsync" 7000 PER_THREAD] (a: u64, stream: CUstream)
        real => work::either(stream, OWN, real);
    cuMemcpy3DPeer_ptds [c"cuMemcpy3DPeer" 7000 PER_THREAD] (a: u64)
        real => work::either(ptr::null_mut(), OWN, real);
    cuMemcpy3D_v2 [c"cuMemcpy3D" 3020] (a: u64)
        real => work::either(ptr::null_mut(), LEGACY, real);
    cuMemcpy3D_v2_ptds [c"cuMemcpy3D" 7000 PER_THREAD] (a: u64)
        real => work::either(ptr::null_mut(), OWN, real);
    cuMemcpyAtoA_v2 [c"cuMemcpyAtoA" 3020] (a: u64, b: u64, c: u64, d: u64, e: u64)
        real => work::either(ptr::null_mut(), LEGACY, real);
    cuMemcpyAtoA_v2_ptds [c"cuMemcpyAtoA" 7000 PER_THREAD] (a: u64, b: u64, c: u64, d: u64, e: u64)
        real => work::either(ptr::null_mut(), OWN, real);
    cuMemcpyAtoD_v2 [c"cuMemcpyAtoD" 3020] (a: u64, b: u64, c: u64, d: u64)
        real => work::either(ptr::null_mut(), LEGACY, real);
    cuMemcpyAtoD_v2_ptds [c"cuMemcpyAtoD" 7000 PER_THREAD] (a: u64, b: u64, c: u64, d: u64)
        real => work::either(ptr::null_mut(), OWN, real);
    cuMemcpyAtoHAsync_v2 [c"cuMemcpyAtoHAsync" 3020] (a: u64, b: u64, c: u64, d: u64, stream: CUstream)
        real => work::either(stream, LEGACY, real);
    cuMemcpyAtoHAsync_v2_ptsz [c"cuMemcpyAtoHAsync" 7000 PER_THREAD] (a: u64, b: u64, c: u64, d: u64, stream: CUstream)
        real => work::either(stream, OWN, real);
    cuMemcpyAtoH_v2 [c"cuMemcpyAtoH" 3020] (a: u64, b: u64, c: u64, d: u64)
        real => work::either(ptr::null_mut(), LEGACY, real);
    cuMemcpyAtoH_v2_ptds [c"cuMemcpyAtoH" 7000 PER_THREAD] (a: u64, b: u64, c: u64, d: u64)
        real => work::either(ptr::null_mut(), OWN, real);
    cuMemcpyBatchAsync [c"cuMemcpyBatchAsync" 12080] (a: u64, b: u64, c: u64, d: u64, e: u64, f: u64, g: u64, h: u64, stream: CUstream)
        real => work::either(stream, LEGACY, real);
    cuMemcpyBatchAsync_ptsz [c"cuMemcpyBatchAsync" 12080 PER_THREAD] (a: u64, b: u64, c: u64, d: u64, e: u64, f: u64, g: u64, h: u64, stream: CUstream)
        real => work::either(stream, OWN, real);
    cuMemcpyBatchAsync_v2 [c"cuMemcpyBatchAsync" 13000] (a: u64, b: u64, c: u64, d: u64, e: u64, f: u64, g: u64, stream: CUstream)
        real => work::either(stream, LEGACY, real);
    cuMemcpyBatchAsync_v2_ptsz [c"cuMemcpyBatchAsync" 13000 PER_THREAD] (a: u64, b: u64, c: u64, d: u64, e: u64, f: u64, g: u64, stream: CUstream)
        real => work::either(stream, OWN, real);
    cuMemcpyDtoA_v2 [c"cuMemcpyDtoA" 3020] (a: u64, b: u64, c: u64, d: u64)
        real => work::either(ptr::null_mut(), LEGACY, real);
    cuMemcpyDtoA_v2_ptds [c"cuMemcpyDtoA" 7000 PER_THREAD] (a: u64, b: u64, c: u64, d: u64)
        real => work::either(ptr::null_mut(), OWN, real);
    cuMemcpyDtoDAsync [c"cuMemcpyDtoDAsync" 3000] (a: u64, b: u64, c: u64, stream: CUstream)
        real => work::either(stream, LEGACY, real);
    cuMemcpyDtoDAsync_v2 [c"cuMemcpyDtoDAsync" 3020] (a: u64, b: u64, c: u64, stream: CUstream)
        real => work::either(stream, LEGACY, real);
    cuMemcpyDtoDAsync_v2_ptsz [c"cuMemcpyDtoDAsync" 7000 PER_THREAD] (a: u64, b: u64, c: u64, stream: CUstream)
        real => work::either(stream, OWN, real);
    cuMemcpyDtoD_v2 [c"cuMemcpyDtoD" 3020] (a: u64, b: u64, c: u64)
        real => work::either(ptr::null_mut(), LEGACY, real);
    cuMemcpyDtoD_v2_ptds [c"cuMemcpyDtoD" 7000 PER_THREAD] (a: u64, b: u64, c: u64)
        real => work::either(ptr::null_mut(), OWN, real);
    cuMemcpyDtoHAsync_v2 [c"cuMemcpyDtoHAsync" 3020] (a: u64, b: u64, c: u64, stream: CUstream)
        real => work::copy(stream, LEGACY, real);
    cuMemcpyDtoHAsync_v2_ptsz [c"cuMemcpyDtoHAsync" 7000 PER_THREAD] (a: u64, b: u64, c: u64, stream: CUstream)
        real => work::copy(stream, OWN, real);
    cuMemcpyHtoAAsync_v2 [c"cuMemcpyHtoAAsync" 3020] (a: u64, b: u64, c: u64, d: u64, stream: CUstream)
        real => work::either(stream, LEGACY, real);
    cuMemcpyHtoAAsync_v2_ptsz [c"cuMemcpyHtoAAsync" 7000 PER_THREAD] (a: u64, b: u64, c: u64, d: u64, stream: CUstream)
        real => work::either(stream, OWN, real);
    cuMemcpyHtoA_v2 [c"cuMemcpyHtoA" 3020] (a: u64, b: u64, c: u64, d: u64)
        real => work::either(ptr::null_mut(), LEGACY, real);
    cuMemcpyHtoA_v2_ptds [c"cuMemcpyHtoA" 7000 PER_THREAD] (a: u64, b: u64, c: u64, d: u64)
        real => work::either(ptr::null_mut(), OWN, real);
    cuMemcpyPeer [c"cuMemcpyPeer" 4000] (a: u64, b: u64, c: u64, d: u64, e: u64)
        real => work::either(ptr::null_mut(), LEGACY, real);
    cuMemcpyPeerAsync [c"cuMemcpyPeerAsync" 4000] (a: u64, b: u64, c: u64, d: u64, e: u64, stream: CUstream)
        real => work::either(stream, LEGACY, real);
    cuMemcpyPeerAsync_ptsz [c"cuMemcpyPeerAsync" 7000 PER_THREAD] (a: u64, b: u64, c: u64, d: u64, e: u64, stream: CUstream)
        real => work::either(stream, OWN, real);
    cuMemcpyPeer_ptds [c"cuMemcpyPeer" 7000 PER_THREAD] (a: u64, b: u64, c: u64, d: u64, e: u64)
        real => work::either(ptr::null_mut(), OWN, real);
    cuMemsetD16_v2 [c"cuMemsetD16" 3020] (a: u64, b: u64, c: u64)
        real => work::either(ptr::null_mut(), LEGACY, real);
    cuMemsetD16_v2_ptds [c"cuMemsetD16" 7000 PER_THREAD] (a: u64, b: u64, c: u64)
        real => work::either(ptr::null_mut(), OWN, real);
    cuMemsetD2D16Async [c"cuMemsetD2D16Async" 3020] (a: u64, b: u64, c: u64, d: u64, e: u64, stream: CUstream)
        real => work::either(stream, LEGACY, real);
    cuMemsetD2D16Async_ptsz [c"cuMemsetD2D16Async" 7000 PER_THREAD] (a: u64, b: u64, c: u64, d: u64, e: u64, stream: CUstream)
        real => work::either(stream, OWN, real);
    cuMemsetD2D16_v2 [c"cuMemsetD2D16" 3020] (a: u64, b: u64, c: u64, d: u64, e: u64)
        real => work::either(ptr::null_mut(), LEGACY, real);
    cuMemsetD2D16_v2_ptds [c"cuMemsetD2D16" 7000 PER_THREAD] (a: u64, b: u64, c: u64, d: u64, e: u64)
        real => work::either(ptr::null_mut(), OWN, real);
    cuMemsetD2D32Async [c"cuMemsetD2D32Async" 3020] (a: u64, b: u64, c: u64, d: u64, e: u64, stream: CUstream)
        real => work::either(stream, LEGACY, real);
    cuMemsetD2D32Async_ptsz [c"cuMemsetD2D32Async" 7000 PER_THREAD] (a: u64, b: u64, c: u64, d: u64, e: u64, stream: CUstream)
        real => work::either(stream, OWN, real);
    cuMemsetD2D32_v2 [c"cuMemsetD2D32" 3020] (a: u64, b: u64, c: u64, d: u64, e: u64)
        real => work::either(ptr::null_mut(), LEGACY, real);
    cuMemsetD2D32_v2_ptds [c"cuMemsetD2D32" 7000 PER_THREAD] (a: u64, b: u64, c: u64, d: u64, e: u64)
        real => work::either(ptr::null_mut(), OWN, real);
    cuMemsetD2D8Async [c"cuMemsetD2D8Async" 3020] (a: u64, b: u64, c: u64, d: u64, e: u64, stream: CUstream)
        real => work::either(stream, LEGACY, real);
    cuMemsetD2D8Async_ptsz [c"cuMemsetD2D8Async" 7000 PER_THREAD] (a: u64, b: u64, c: u64, d: u64, e: u64, stream: CUstream)
        real => work::either(stream, OWN, real);
    cuMemsetD2D8_v2 [c"cuMemsetD2D8" 3020] (a: u64, b: u64, c: u64, d: u64, e: u64)
        real => work::either(ptr::null_mut(), LEGACY, real);
    cuMemsetD2D8_v2_ptds [c"cuMemsetD2D8" 7000 PER_THREAD] (a: u64, b: u64, c: u64, d: u64, e: u64)
        real => work::either(ptr::null_mut(), OWN, real);
    cuMemsetD32_v2 [c"cuMemsetD32" 3020] (a: u64, b: u64, c: u64)
        real => work::either(ptr::null_mut(), LEGACY, real);
    cuMemsetD32_v2_ptds [c"cuMemsetD32" 7000 PER_THREAD] (a: u64, b: u64, c: u64)
        real => work::either(ptr::null_mut(), OWN, real);
    cuMemsetD8_v2 [c"cuMemsetD8" 3020] (a: u64, b: u64, c: u64)
        real => work::either(ptr::null_mut(), LEGACY, real);
    cuMemsetD8_v2_ptds [c"cuMemsetD8" 7000 PER_THREAD] (a: u64, b: u64, c: u64)
        real => work::either(ptr::null_mut(), OWN, real);
    cuStreamAttachMemAsync [c"cuStreamAttachMemAsync" 6000] (stream: CUstream, b: u64, c: u64, d: u64)
        real => work::copy(stream, LEGACY, real);
    cuStreamAttachMemAsync_ptsz [c"cuStreamAttachMemAsync" 7000 PER_THREAD] (stream: CUstream, b: u64, c: u64, d: u64)
        real => work::copy(stream, OWN, real);
    cuStreamBatchMemOp [c"cuStreamBatchMemOp" 8000] (stream: CUstream, b: u64, c: u64, d: u64)
        real => work::copy(stream, LEGACY, real);
    cuStreamBatchMemOp_ptsz [c"cuStreamBatchMemOp" 8000 PER_THREAD] (stream: CUstream, b: u64, c: u64, d: u64)
        real => work::copy(stream, OWN, real);
    cuStreamBatchMemOp_v2 [c"cuStreamBatchMemOp" 11070] (stream: CUstream, b: u64, c: u64, d: u64)
        real => work::copy(stream, LEGACY, real);
    cuStreamBatchMemOp_v2_ptsz [c"cuStreamBatchMemOp" 11070 PER_THREAD] (stream: CUstream, b: u64, c: u64, d: u64)
        real => work::copy(stream, OWN, real);
    cuStreamWaitValue32 [c"cuStreamWaitValue32" 8000] (stream: CUstream, b: u64, c: u64, d: u64)
        real => work::copy(stream, LEGACY, real);
    cuStreamWaitValue32_ptsz [c"cuStreamWaitValue32" 8000 PER_THREAD] (stream: CUstream, b: u64, c: u64, d: u64)
        real => work::copy(stream, OWN, real);
    cuStreamWaitValue32_v2 [c"cuStreamWaitValue32" 11070] (stream: CUstream, b: u64, c: u64, d: u64)
        real => work::copy(stream, LEGACY, real);
    cuStreamWaitValue32_v2_ptsz [c"cuStreamWaitValue32" 11070 PER_THREAD] (stream: CUstream, b: u64, c: u64, d: u64)
        real => work::copy(stream, OWN, real);
    cuStreamWaitValue64 [c"cuStreamWaitValue64" 9000] (stream: CUstream, b: u64, c: u64, d: u64)
        real => work::copy(stream, LEGACY, real);
    cuStreamWaitValue64_ptsz [c"cuStreamWaitValue64" 9000 PER_THREAD] (stream: CUstream, b: u64, c: u64, d: u64)
        real => work::copy(stream, OWN, real);
    cuStreamWaitValue64_v2 [c"cuStreamWaitValue64" 11070] (stream: CUstream, b: u64, c: u64, d: u64)
        real => work::copy(stream, LEGACY, real);
    cuStreamWaitValue64_v2_ptsz [c"cuStreamWaitValue64" 11070 PER_THREAD] (stream: CUstream, b: u64, c: u64, d: u64)
        real => work::copy(stream, OWN, real);
    cuStreamWriteValue32 [c"cuStreamWriteValue32" 8000] (stream: CUstream, b: u64, c: u64, d: u64)
        real => work::copy(stream, LEGACY, real);
    cuStreamWriteValue32_ptsz [c"cuStreamWriteValue32" 8000 PER_THREAD] (stream: CUstream, b: u64, c: u64, d: u64)
        real => work::copy(stream, OWN, real);
    cuStreamWriteValue32_v2 [c"cuStreamWriteValue32" 11070] (stream: CUstream, b: u64, c: u64, d: u64)
        real => work::copy(stream, LEGACY, real);
    cuStreamWriteValue32_v2_ptsz [c"cuStreamWriteValue32" 11070 PER_THREAD] (stream: CUstream, b: u64, c: u64, d: u64)
        real => work::copy(stream, OWN, real);
    cuStreamWriteValue64 [c"cuStreamWriteValue64" 9000] (stream: CUstream, b: u64, c: u64, d: u64)
        real => work::copy(stream, LEGACY, real);
    cuStreamWriteValue64_ptsz [c"cuStreamWriteValue64" 9000 PER_THREAD] (stream: CUstream, b: u64, c: u64, d: u64)
        real => work::copy(stream, OWN, real);
    cuStreamWriteValue64_v2 [c"cuStreamWriteValue64" 11070] (stream: CUstream, b: u64, c: u64, d: u64)
        real => work::copy(stream, LEGACY, real);
    cuStreamWriteValue64_v2_ptsz [c"cuStreamWriteValue64" 11070 PER_THREAD] (stream: CUstream, b: u64, c: u64, d: u64)
        real => work::copy(stream, OWN, real);

    // Device memory.
    cuMemAlloc_v2 [c"cuMemAlloc" 3020] (out: *mut CUdeviceptr, bytes: usize)
        // SAFETY: the program's own arguments.
    real => unsafe { memory::alloc(out, bytes, real) };
    cuMemAllocPitch_v2 [c"cuMemAllocPitch" 3020] (
        out: *mut CUdeviceptr, pitch: *mut usize, width: usize, height: usize, element: c_uint,
    ) // SAFETY: the program's own arguments.
    real => unsafe { memory::alloc_pitch(out, pitch, width, height, element, real) };
    cuMemAllocManaged [c"cuMemAllocManaged" 6000] (
        out: *mut CUdeviceptr, bytes: usize, flags: c_uint,
    ) // SAFETY: the program's own arguments.
    real => unsafe { memory::alloc_native(out, bytes, real) };
    cuMemFree_v2 [c"cuMemFree" 3020] (address: CUdeviceptr) real => memory::free(address, real);
    cuMemAllocAsync [c"cuMemAllocAsync" 11020] (
        out: *mut CUdeviceptr, bytes: usize, stream: CUstream,
    ) // SAFETY: the program's own arguments.
    real => unsafe { memory::alloc_native(out, bytes, real) };
    cuMemAllocAsync_ptsz [c"cuMemAllocAsync" 11020 PER_THREAD] (
        out: *mut CUdeviceptr, bytes: usize, stream: CUstream,
    ) // SAFETY: the program's own arguments.
    real => unsafe { memory::alloc_native(out, bytes, real) };
    cuMemAllocFromPoolAsync [c"cuMemAllocFromPoolAsync" 11020] (
        out: *mut CUdeviceptr, bytes: usize, pool: *mut c_void, stream: CUstream,
    ) // SAFETY: the program's own arguments.
    real => unsafe { memory::alloc_native(out, bytes, real) };
    cuMemAllocFromPoolAsync_ptsz [c"cuMemAllocFromPoolAsync" 11020 PER_THREAD] (
        out: *mut CUdeviceptr, bytes: usize, pool: *mut c_void, stream: CUstream,
    ) // SAFETY: the program's own arguments.
    real => unsafe { memory::alloc_native(out, bytes, real) };
    cuMemFreeAsync [c"cuMemFreeAsync" 11020] (address: CUdeviceptr, stream: CUstream)
        real => memory::free_async(address, real);
    cuMemFreeAsync_ptsz [c"cuMemFreeAsync" 11020 PER_THREAD] (
        address: CUdeviceptr, stream: CUstream,
    ) real => memory::free_async(address, real);
    cuMemCreate [c"cuMemCreate" 10020] (
        handle: *mut u64, bytes: usize, prop: *const AllocationProp, flags: u64,
    ) // SAFETY: the program's own arguments.
    real => unsafe { memory::create(handle, bytes, prop, flags, real) };
    cuMemRelease [c"cuMemRelease" 10020] (handle: u64) real => memory::release_handle(handle, real);
    cuMemMap [c"cuMemMap" 10020] (
        address: CUdeviceptr, bytes: usize, offset: usize, handle: u64, flags: u64,
    ) real => physical::map(address, bytes, offset, handle, flags, real);
    cuMemUnmap [c"cuMemUnmap" 10020] (address: CUdeviceptr, bytes: usize)
        real => physical::unmap(address, bytes, real);
    cuMemSetAccess [c"cuMemSetAccess" 10020] (
        address: CUdeviceptr, bytes: usize, access: *const Access, count: usize,
    ) // SAFETY: the program's own arguments.
    real => unsafe { physical::set_access(address, bytes, access, count, real) };
    cuMemGetAccess [c"cuMemGetAccess" 10020] (a: u64, b: u64, c: u64) real => gate::through(real);
    cuMemExportToShareableHandle [c"cuMemExportToShareableHandle" 10020] (
        out: *mut c_void, handle: u64, kind: c_int, flags: u64,
    ) // SAFETY: the program's own arguments.
    real => unsafe { physical::export(out, handle, kind, flags, real) };
    cuMemGetAllocationPropertiesFromHandle [c"cuMemGetAllocationPropertiesFromHandle" 10020] (
        prop: *mut AllocationProp, handle: u64,
    ) // SAFETY: the program's own arguments.
    real => unsafe { physical::properties(prop, handle, real) };
    cuMulticastBindMem [c"cuMulticastBindMem" 12010] (
        group: u64, at: usize, handle: u64, offset: usize, bytes: usize, flags: u64,
    ) real => physical::bind((group, at), handle, (offset, bytes, flags), real);
    cuMulticastBindAddr [c"cuMulticastBindAddr" 12010] (
        group: u64, at: usize, address: CUdeviceptr, bytes: usize, flags: u64,
    ) real => memory::pin(address, bytes as u64, real);
    cuMemRetainAllocationHandle [c"cuMemRetainAllocationHandle" 11000] (
        handle: *mut u64, address: CUdeviceptr,
    ) // SAFETY: the program's own arguments.
    real => unsafe { physical::retain(handle, address, real) };
    cuMemGetHandleForAddressRange [c"cuMemGetHandleForAddressRange" 11070] (
        handle: *mut c_void, address: CUdeviceptr, bytes: usize, kind: c_int, flags: u64,
    ) real => memory::pin(address, bytes as u64, real);
    cuIpcGetMemHandle [c"cuIpcGetMemHandle" 4010] (handle: *mut c_void, address: CUdeviceptr)
        real => memory::share(address, real);
    cuCtxEnablePeerAccess [c"cuCtxEnablePeerAccess" 4000] (peer: CUcontext, flags: c_uint)
        real => memory::enable_peer(peer, real);

    // What a program is told of it.
    cuMemGetInfo_v2 [c"cuMemGetInfo" 3020] (free: *mut usize, total: *mut usize)
        // SAFETY: the program's own arguments.
    real => unsafe { memory::info(free, total, real) };
    cuDeviceTotalMem_v2 [c"cuDeviceTotalMem" 3020] (bytes: *mut usize, device: CUdevice)
        // SAFETY: the program's own arguments.
    real => unsafe { memory::total(bytes, device, real) };
    cuMemGetAddressRange_v2 [c"cuMemGetAddressRange" 3020] (
        base: *mut CUdeviceptr, bytes: *mut usize, address: CUdeviceptr,
    ) // SAFETY: the program's own arguments.
    real => unsafe { memory::range(base, bytes, address, real) };
    cuPointerGetAttribute [c"cuPointerGetAttribute" 4000] (
        data: *mut c_void, attribute: c_int, address: CUdeviceptr,
    ) // SAFETY: the program's own arguments.
    real => unsafe { memory::pointer_attribute(data, attribute, address, real) };
    cuPointerGetAttributes [c"cuPointerGetAttributes" 7000] (
        count: c_uint, attributes: *const c_int, data: *const *mut c_void, address: CUdeviceptr,
    ) // SAFETY: the program's own arguments.
    real => unsafe { memory::pointer_attributes(count, attributes, data, address, real) };

    // What may tell that work is coming.
    cuMemcpyHtoD_v2 [c"cuMemcpyHtoD" 3020] (to: CUdeviceptr, from: *const c_void, bytes: usize)
        real => work::input(Call::Copy, bytes, || work::from_host(ptr::null_mut(), LEGACY, bytes, real));
    cuMemcpyHtoD_v2_ptds [c"cuMemcpyHtoD" 7000 PER_THREAD] (
        to: CUdeviceptr, from: *const c_void, bytes: usize,
    ) real => work::input(Call::Copy, bytes, || work::from_host(ptr::null_mut(), OWN, bytes, real));
    cuMemcpyHtoDAsync_v2 [c"cuMemcpyHtoDAsync" 3020] (
        to: CUdeviceptr, from: *const c_void, bytes: usize, stream: CUstream,
    ) real => work::input(Call::AsyncCopy, bytes, || work::from_host(stream, LEGACY, bytes, real));
    cuMemcpyHtoDAsync_v2_ptsz [c"cuMemcpyHtoDAsync" 7000 PER_THREAD] (
        to: CUdeviceptr, from: *const c_void, bytes: usize, stream: CUstream,
    ) real => work::input(Call::AsyncCopy, bytes, || work::from_host(stream, OWN, bytes, real));
    cuMemcpyAsync [c"cuMemcpyAsync" 4000] (
        to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: CUstream,
    ) real => work::input(Call::AsyncCopy, bytes, || work::either(stream, LEGACY, real));
    cuMemcpyAsync_ptsz [c"cuMemcpyAsync" 7000 PER_THREAD] (
        to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: CUstream,
    ) real => work::input(Call::AsyncCopy, bytes, || work::either(stream, OWN, real));
    cuMemcpy [c"cuMemcpy" 4000] (to: CUdeviceptr, from: CUdeviceptr, bytes: usize)
        real => work::input(Call::Copy, bytes, || work::either(ptr::null_mut(), LEGACY, real));
    cuMemcpy_ptds [c"cuMemcpy" 7000 PER_THREAD] (to: CUdeviceptr, from: CUdeviceptr, bytes: usize)
        real => work::input(Call::Copy, bytes, || work::either(ptr::null_mut(), OWN, real));
    cuMemHostRegister_v2 [c"cuMemHostRegister" 6050] (
        memory: *mut c_void, bytes: usize, flags: c_uint,
    ) real => work::input(Call::Register, bytes, || gate::through(real));
    cuStreamWaitEvent [c"cuStreamWaitEvent" 3020] (stream: CUstream, event: CUevent, flags: c_uint)
        real => work::input(Call::Wait, 0, real);
    cuStreamWaitEvent_ptsz [c"cuStreamWaitEvent" 7000 PER_THREAD] (
        stream: CUstream, event: CUevent, flags: c_uint,
    ) real => work::input(Call::Wait, 0, real);

    // What tells that work is submitted.
    cuLaunchHostFunc [c"cuLaunchHostFunc" 10000] (
        stream: CUstream, function_: *mut c_void, data: *mut c_void,
    ) real => work::call_back(real);
    cuLaunchHostFunc_ptsz [c"cuLaunchHostFunc" 10000 PER_THREAD] (
        stream: CUstream, function_: *mut c_void, data: *mut c_void,
    ) real => work::call_back(real);

    // What tells that work is done.
    cuStreamSynchronize [c"cuStreamSynchronize" 2000] (stream: CUstream)
        real => work::observe_stream(stream, LEGACY, || gate::after(real));
    cuStreamSynchronize_ptsz [c"cuStreamSynchronize" 7000 PER_THREAD] (stream: CUstream)
        real => work::observe_stream(stream, OWN, || gate::after(real));
    cuStreamQuery [c"cuStreamQuery" 2000] (stream: CUstream)
        real => work::observe_stream(stream, LEGACY, real);
    cuStreamQuery_ptsz [c"cuStreamQuery" 7000 PER_THREAD] (stream: CUstream)
        real => work::observe_stream(stream, OWN, real);
    cuMemcpyDtoH_v2 [c"cuMemcpyDtoH" 3020] (to: *mut c_void, from: CUdeviceptr, bytes: usize)
        real => work::observe_stream(ptr::null_mut(), LEGACY, || gate::through(real));
    cuMemcpyDtoH_v2_ptds [c"cuMemcpyDtoH" 7000 PER_THREAD] (
        to: *mut c_void, from: CUdeviceptr, bytes: usize,
    ) real => work::observe_stream(ptr::null_mut(), OWN, || gate::through(real));
    cuCtxSynchronize [c"cuCtxSynchronize" 2000] ()
        real => work::observe_context(ptr::null_mut(), || gate::after(real));
    cuCtxSynchronize_v2 [c"cuCtxSynchronize" 13000] (context: CUcontext)
        real => work::observe_context(context, || gate::after(real));
    cuEventRecord [c"cuEventRecord" 2000] (event: CUevent, stream: CUstream)
        real => work::record(event, stream, LEGACY, real);
    cuEventRecord_ptsz [c"cuEventRecord" 7000 PER_THREAD] (event: CUevent, stream: CUstream)
        real => work::record(event, stream, OWN, real);
    cuEventRecordWithFlags [c"cuEventRecordWithFlags" 11010] (
        event: CUevent, stream: CUstream, flags: c_uint,
    ) real => work::record(event, stream, LEGACY, real);
    cuEventRecordWithFlags_ptsz [c"cuEventRecordWithFlags" 11010 PER_THREAD] (
        event: CUevent, stream: CUstream, flags: c_uint,
    ) real => work::record(event, stream, OWN, real);
    cuEventSynchronize [c"cuEventSynchronize" 2000] (event: CUevent)
        real => work::observe_event(event, || gate::after(real));
    cuEventQuery [c"cuEventQuery" 2000] (event: CUevent) real => work::observe_event(event, real);
    cuEventDestroy [c"cuEventDestroy" 2000] (event: CUevent)
        real => work::destroy_event(event, real);
    cuEventDestroy_v2 [c"cuEventDestroy" 4000] (event: CUevent)
        real => work::destroy_event(event, real);

    // What must not be asked, or no longer.
    cuStreamBeginCapture [c"cuStreamBeginCapture" 10000] (stream: CUstream)
        real => work::begin_capture(stream, LEGACY, real);
    cuStreamBeginCapture_ptsz [c"cuStreamBeginCapture" 10000 PER_THREAD] (stream: CUstream)
        real => work::begin_capture(stream, OWN, real);
    cuStreamBeginCapture_v2 [c"cuStreamBeginCapture" 10010] (stream: CUstream, mode: c_int)
        real => work::begin_capture(stream, LEGACY, real);
    cuStreamBeginCapture_v2_ptsz [c"cuStreamBeginCapture" 10010 PER_THREAD] (
        stream: CUstream, mode: c_int,
    ) real => work::begin_capture(stream, OWN, real);
    cuStreamBeginCaptureToGraph [c"cuStreamBeginCaptureToGraph" 12030] (
        stream: CUstream, graph: *mut c_void, after: *const c_void, edges: *const c_void,
        count: usize, mode: c_int,
    ) real => work::begin_capture(stream, LEGACY, real);
    cuStreamBeginCaptureToGraph_ptsz [c"cuStreamBeginCaptureToGraph" 12030 PER_THREAD] (
        stream: CUstream, graph: *mut c_void, after: *const c_void, edges: *const c_void,
        count: usize, mode: c_int,
    ) real => work::begin_capture(stream, OWN, real);
    cuStreamEndCapture [c"cuStreamEndCapture" 10000] (stream: CUstream, graph: *mut *mut c_void)
        real => work::end_capture(stream, LEGACY, real);
    cuStreamEndCapture_ptsz [c"cuStreamEndCapture" 10000 PER_THREAD] (
        stream: CUstream, graph: *mut *mut c_void,
    ) real => work::end_capture(stream, OWN, real);
    // It may have an event made.
    cuStreamDestroy [c"cuStreamDestroy" 2000] (stream: CUstream)
        real => gate::through(|| work::destroy_stream(stream, real));
    cuStreamDestroy_v2 [c"cuStreamDestroy" 4000] (stream: CUstream)
        real => gate::through(|| work::destroy_stream(stream, real));
    cuCtxDestroy [c"cuCtxDestroy" 2000] (context: CUcontext)
        real => memory::destroy_context(context, real);
    cuCtxDestroy_v2 [c"cuCtxDestroy" 4000] (context: CUcontext)
        real => memory::destroy_context(context, real);
    cuGreenCtxDestroy [c"cuGreenCtxDestroy" 12040] (context: CUcontext)
        real => memory::destroy_context(context, real);
    cuDevicePrimaryCtxRelease [c"cuDevicePrimaryCtxRelease" 7000] (device: CUdevice)
        real => memory::release_primary(device, real);
    cuDevicePrimaryCtxRelease_v2 [c"cuDevicePrimaryCtxRelease" 11000] (device: CUdevice)
        real => memory::release_primary(device, real);
    cuDevicePrimaryCtxReset [c"cuDevicePrimaryCtxReset" 7000] (device: CUdevice)
        real => memory::release_primary(device, real);
    cuDevicePrimaryCtxReset_v2 [c"cuDevicePrimaryCtxReset" 11000] (device: CUdevice)
        real => memory::release_primary(device, real);

    // Which group is whose.
    cuCtxCreate [c"cuCtxCreate" 2000] (
        out: *mut CUcontext, flags: c_uint, device: CUdevice,
    // SAFETY: for all of these: a call that succeeds has written the context.
    ) real => unsafe { work::create_context(out, || gate::through(real)) };
    cuCtxCreate_v2 [c"cuCtxCreate" 3020] (
        out: *mut CUcontext, flags: c_uint, device: CUdevice,
    // SAFETY: as above.
    ) real => unsafe { work::create_context(out, || gate::through(real)) };
    cuCtxCreate_v3 [c"cuCtxCreate" 11040] (
        out: *mut CUcontext, affinity: *mut c_void, count: c_int, flags: c_uint, device: CUdevice,
    // SAFETY: as above.
    ) real => unsafe { work::create_context(out, || gate::through(real)) };
    cuCtxCreate_v4 [c"cuCtxCreate" 12050] (
        out: *mut CUcontext, params: *mut c_void, flags: c_uint, device: CUdevice,
    // SAFETY: as above.
    ) real => unsafe { work::create_context(out, || gate::through(real)) };
    cuDevicePrimaryCtxRetain [c"cuDevicePrimaryCtxRetain" 7000] (
        out: *mut CUcontext, device: CUdevice,
    // SAFETY: as above.
    ) real => unsafe { work::create_context(out, || gate::through(real)) };

    // What may have the device do something for the driver itself (load code, make a graph's or a stream's own memory), under
    // the driver's lock: with the compute group frozen it would not return, and no other call either. Arguments are passed on as they came.
    cuModuleLoad [c"cuModuleLoad" 2000] (a: u64, b: u64)
        real => gate::through(real);
    cuModuleLoadData [c"cuModuleLoadData" 2000] (a: u64, b: u64)
        real => gate::through(real);
    cuModuleLoadDataEx [c"cuModuleLoadDataEx" 2010] (a: u64, b: u64, c: u64, d: u64, e: u64)
        real => gate::through(real);
    cuModuleLoadFatBinary [c"cuModuleLoadFatBinary" 2000] (a: u64, b: u64)
        real => gate::through(real);
    cuModuleUnload [c"cuModuleUnload" 2000] (a: u64)
        real => gate::through(real);
    cuModuleGetFunction [c"cuModuleGetFunction" 2000] (a: u64, b: u64, c: u64)
        real => gate::through(real);
    cuModuleGetGlobal [c"cuModuleGetGlobal" 2000] (a: u64, b: u64, c: u64, d: u64)
        real => gate::through(real);
    cuModuleGetGlobal_v2 [c"cuModuleGetGlobal" 3020] (a: u64, b: u64, c: u64, d: u64)
        real => gate::through(real);
    cuModuleEnumerateFunctions [c"cuModuleEnumerateFunctions" 12040] (a: u64, b: u64, c: u64)
        real => gate::through(real);
    cuLibraryLoadData [c"cuLibraryLoadData" 12000] (a: u64, b: u64, c: u64, d: u64, e: u64, f: u64, g: u64, h: u64)
        real => gate::through(real);
    cuLibraryLoadFromFile [c"cuLibraryLoadFromFile" 12000] (a: u64, b: u64, c: u64, d: u64, e: u64, f: u64, g: u64, h: u64)
        real => gate::through(real);
    cuLibraryUnload [c"cuLibraryUnload" 12000] (a: u64)
        real => gate::through(real);
    cuLibraryGetKernel [c"cuLibraryGetKernel" 12000] (a: u64, b: u64, c: u64)
        real => gate::through(real);
    cuLibraryGetModule [c"cuLibraryGetModule" 12000] (a: u64, b: u64)
        real => gate::through(real);
    cuLibraryGetGlobal [c"cuLibraryGetGlobal" 12000] (a: u64, b: u64, c: u64, d: u64)
        real => gate::through(real);
    cuLibraryGetManaged [c"cuLibraryGetManaged" 12000] (a: u64, b: u64, c: u64, d: u64)
        real => gate::through(real);
    cuLibraryGetUnifiedFunction [c"cuLibraryGetUnifiedFunction" 12000] (a: u64, b: u64, c: u64)
        real => gate::through(real);
    cuLibraryEnumerateKernels [c"cuLibraryEnumerateKernels" 12040] (a: u64, b: u64, c: u64)
        real => gate::through(real);
    cuKernelGetFunction [c"cuKernelGetFunction" 12000] (a: u64, b: u64)
        real => gate::through(real);
    cuKernelGetAttribute [c"cuKernelGetAttribute" 12000] (a: u64, b: u64, c: u64, d: u64)
        real => gate::through(real);
    cuKernelSetAttribute [c"cuKernelSetAttribute" 12000] (a: u64, b: u64, c: u64, d: u64)
        real => gate::through(real);
    cuKernelSetCacheConfig [c"cuKernelSetCacheConfig" 12000] (a: u64, b: u64, c: u64)
        real => gate::through(real);
    cuFuncLoad [c"cuFuncLoad" 12040] (a: u64)
        real => gate::through(real);
    cuFuncGetAttribute [c"cuFuncGetAttribute" 2020] (a: u64, b: u64, c: u64)
        real => gate::through(real);
    cuFuncSetAttribute [c"cuFuncSetAttribute" 9000] (a: u64, b: u64, c: u64)
        real => gate::through(real);
    cuFuncSetCacheConfig [c"cuFuncSetCacheConfig" 3000] (a: u64, b: u64)
        real => gate::through(real);
    cuFuncSetSharedMemConfig [c"cuFuncSetSharedMemConfig" 4020] (a: u64, b: u64)
        real => gate::through(real);
    cuOccupancyAvailableDynamicSMemPerBlock [c"cuOccupancyAvailableDynamicSMemPerBlock" 10020] (a: u64, b: u64, c: u64, d: u64)
        real => gate::through(real);
    cuOccupancyMaxActiveBlocksPerMultiprocessor [c"cuOccupancyMaxActiveBlocksPerMultiprocessor" 6050] (a: u64, b: u64, c: u64, d: u64)
        real => gate::through(real);
    cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags [c"cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags" 7000] (a: u64, b: u64, c: u64, d: u64, e: u64)
        real => gate::through(real);
    cuOccupancyMaxActiveClusters [c"cuOccupancyMaxActiveClusters" 11070] (a: u64, b: u64, c: u64)
        real => gate::through(real);
    cuOccupancyMaxPotentialBlockSize [c"cuOccupancyMaxPotentialBlockSize" 6050] (a: u64, b: u64, c: u64, d: u64, e: u64, f: u64)
        real => gate::through(real);
    cuOccupancyMaxPotentialBlockSizeWithFlags [c"cuOccupancyMaxPotentialBlockSizeWithFlags" 7000] (a: u64, b: u64, c: u64, d: u64, e: u64, f: u64, g: u64)
        real => gate::through(real);
    cuOccupancyMaxPotentialClusterSize [c"cuOccupancyMaxPotentialClusterSize" 11070] (a: u64, b: u64, c: u64)
        real => gate::through(real);
    cuGraphInstantiate [c"cuGraphInstantiate" 10000] (a: u64, b: u64, c: u64, d: u64, e: u64)
        real => gate::through(real);
    cuGraphInstantiate_v2 [c"cuGraphInstantiate" 11000] (a: u64, b: u64, c: u64, d: u64, e: u64)
        real => gate::through(real);
    cuGraphInstantiateWithFlags [c"cuGraphInstantiateWithFlags" 11040] (a: u64, b: u64, c: u64)
        real => gate::through(real);
    cuGraphInstantiateWithParams [c"cuGraphInstantiateWithParams" 12000] (a: u64, b: u64, c: u64)
        real => gate::through(real);
    cuGraphInstantiateWithParams_ptsz [c"cuGraphInstantiateWithParams" 12000 PER_THREAD] (a: u64, b: u64, c: u64)
        real => gate::through(real);
    cuGraphExecUpdate [c"cuGraphExecUpdate" 10020] (a: u64, b: u64, c: u64, d: u64)
        real => gate::through(real);
    cuGraphExecUpdate_v2 [c"cuGraphExecUpdate" 12000] (a: u64, b: u64, c: u64)
        real => gate::through(real);
    cuGraphExecDestroy [c"cuGraphExecDestroy" 10000] (a: u64)
        real => gate::through(real);
    cuGraphExecKernelNodeSetParams [c"cuGraphExecKernelNodeSetParams" 10010] (a: u64, b: u64, c: u64)
        real => gate::through(real);
    cuGraphExecKernelNodeSetParams_v2 [c"cuGraphExecKernelNodeSetParams" 12000] (a: u64, b: u64, c: u64)
        real => gate::through(real);
    cuGraphExecMemcpyNodeSetParams [c"cuGraphExecMemcpyNodeSetParams" 10020] (a: u64, b: u64, c: u64, d: u64)
        real => gate::through(real);
    cuGraphExecMemsetNodeSetParams [c"cuGraphExecMemsetNodeSetParams" 10020] (a: u64, b: u64, c: u64, d: u64)
        real => gate::through(real);
    cuGraphExecChildGraphNodeSetParams [c"cuGraphExecChildGraphNodeSetParams" 11010] (a: u64, b: u64, c: u64)
        real => gate::through(real);
    cuGraphExecNodeSetParams [c"cuGraphExecNodeSetParams" 12020] (a: u64, b: u64, c: u64)
        real => gate::through(real);
    cuGraphDestroy [c"cuGraphDestroy" 10000] (a: u64)
        real => gate::through(real);
    cuStreamCreate [c"cuStreamCreate" 2000] (a: u64, b: u64)
        real => gate::through(real);
    cuStreamCreateWithPriority [c"cuStreamCreateWithPriority" 5050] (a: u64, b: u64, c: u64)
        real => gate::through(real);
    cuGreenCtxCreate [c"cuGreenCtxCreate" 12040] (a: u64, b: u64, c: u64, d: u64)
        real => gate::through(real);
    cuGreenCtxStreamCreate [c"cuGreenCtxStreamCreate" 12050] (a: u64, b: u64, c: u64, d: u64)
        real => gate::through(real);
    cuEventCreate [c"cuEventCreate" 2000] (a: u64, b: u64)
        real => gate::through(real);
    cuMemHostAlloc [c"cuMemHostAlloc" 2020] (a: u64, b: u64, c: u64)
        real => gate::through(real);
    cuMemAllocHost [c"cuMemAllocHost" 2000] (a: u64, b: u64)
        real => gate::through(real);
    cuMemAllocHost_v2 [c"cuMemAllocHost" 3020] (a: u64, b: u64)
        real => gate::through(real);
    cuMemFreeHost [c"cuMemFreeHost" 2000] (a: u64)
        real => gate::through(real);
    cuMemHostUnregister [c"cuMemHostUnregister" 4000] (a: u64)
        real => gate::through(real);
    cuMemAddressReserve [c"cuMemAddressReserve" 10020] (a: u64, b: u64, c: u64, d: u64, e: u64)
        real => gate::through(real);
    cuMemAddressFree [c"cuMemAddressFree" 10020] (a: u64, b: u64)
        real => gate::through(real);
    cuMemPoolCreate [c"cuMemPoolCreate" 11020] (a: u64, b: u64)
        real => gate::through(real);
    cuMemPoolDestroy [c"cuMemPoolDestroy" 11020] (a: u64)
        real => gate::through(real);
    cuMemPoolTrimTo [c"cuMemPoolTrimTo" 11020] (a: u64, b: u64)
        real => gate::through(real);
    cuMemPoolSetAccess [c"cuMemPoolSetAccess" 11020] (a: u64, b: u64, c: u64)
        real => gate::through(real);
    cuDeviceGraphMemTrim [c"cuDeviceGraphMemTrim" 11040] (a: u64)
        real => gate::through(real);
    cuArrayCreate [c"cuArrayCreate" 2000] (a: u64, b: u64)
        real => gate::through(real);
    cuArrayCreate_v2 [c"cuArrayCreate" 3020] (a: u64, b: u64)
        real => gate::through(real);
    cuArray3DCreate [c"cuArray3DCreate" 2000] (a: u64, b: u64)
        real => gate::through(real);
    cuArray3DCreate_v2 [c"cuArray3DCreate" 3020] (a: u64, b: u64)
        real => gate::through(real);
    cuArrayDestroy [c"cuArrayDestroy" 2000] (a: u64)
        real => gate::through(real);
    cuMipmappedArrayCreate [c"cuMipmappedArrayCreate" 5000] (a: u64, b: u64, c: u64)
        real => gate::through(real);
    cuMipmappedArrayDestroy [c"cuMipmappedArrayDestroy" 5000] (a: u64)
        real => gate::through(real);
    cuTexObjectCreate [c"cuTexObjectCreate" 5000] (a: u64, b: u64, c: u64, d: u64)
        real => gate::through(real);
    cuTexObjectDestroy [c"cuTexObjectDestroy" 5000] (a: u64)
        real => gate::through(real);
    cuSurfObjectCreate [c"cuSurfObjectCreate" 5000] (a: u64, b: u64)
        real => gate::through(real);
    cuSurfObjectDestroy [c"cuSurfObjectDestroy" 5000] (a: u64)
        real => gate::through(real);
    cuCtxSetLimit [c"cuCtxSetLimit" 3010] (a: u64, b: u64)
        real => gate::through(real);
    cuCtxDisablePeerAccess [c"cuCtxDisablePeerAccess" 4000] (a: u64)
        real => gate::through(real);
    cuCtxResetPersistingL2Cache [c"cuCtxResetPersistingL2Cache" 11000] ()
        real => gate::through(real);
    cuIpcCloseMemHandle [c"cuIpcCloseMemHandle" 4010] (a: u64)
        real => gate::through(real);
    cuImportExternalMemory [c"cuImportExternalMemory" 10000] (a: u64, b: u64)
        real => gate::through(real);
    cuDestroyExternalMemory [c"cuDestroyExternalMemory" 10000] (a: u64)
        real => gate::through(real);
    cuExternalMemoryGetMappedBuffer [c"cuExternalMemoryGetMappedBuffer" 10000] (a: u64, b: u64, c: u64)
        real => gate::through(real);
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;

    /// What the headers declare: exported symbols, each with name, version and flags.
    fn declared() -> BTreeMap<&'static str, (&'static str, c_int, u64)> {
        let lines = include_str!("entry_points.txt").lines();
        lines
            .filter(|line| !line.starts_with('#'))
            .map(|line| {
                let words: Vec<&str> = line.split(' ').collect();
                let [symbol, name, version, flags] = words[..] else {
                    panic!("{line}")
                };
                let known = (name, version.parse().unwrap(), flags.parse().unwrap());
                (symbol, known)
            })
            .collect()
    }

    fn listed() -> BTreeMap<&'static str, &'static Row> {
        let name = |row: &'static Row| row.real.name.to_str().unwrap();
        ROWS.iter().map(|row| (name(row), row)).collect()
    }

    #[test]
    fn what_is_listed_is_declared_so() {
        let declared = declared();
        assert_eq!(declared.len(), 634);
        assert_eq!(listed().len(), ROWS.len(), "something is listed twice");
        for (symbol, row) in listed() {
            // Exported, but in no header.
            if symbol == "cuGetProcAddress_v2_ptsz" {
                continue;
            }
            let known = declared.get(symbol).unwrap_or_else(|| panic!("{symbol}"));
            let asked = row
                .ask
                .map(|(name, version, flags)| (name.to_str().unwrap(), version, flags));
            if symbol.starts_with("cuGetProcAddress") {
                continue;
            }
            assert_eq!(asked, Some(*known), "{symbol}");
        }
    }

    /// What may touch device memory or give it out, by the beginnings of names.
    const CONCERNS: [&str; 18] = [
        "cuMemcpy",
        "cuMemset",
        "cuMemAlloc",
        "cuMemFree",
        "cuMemPrefetch",
        "cuMemDiscard",
        "cuMemBatch",
        "cuMemMapArray",
        "cuLaunch",
        "cuGraphLaunch",
        "cuGraphUpload",
        "cuStreamWriteValue",
        "cuStreamWaitValue",
        "cuStreamBatchMemOp",
        "cuStreamAttachMem",
        "cuMemCreate",
        "cuMemRelease",
        "cuMemGetInfo",
    ];

    /// Of those, what is left alone: host memory of the oldest form.
    const LEFT_ALONE: [&str; 1] = ["cuMemAllocHost"];

    #[test]
    fn nothing_that_concerns_memory_is_forgotten() {
        let (declared, listed) = (declared(), listed());
        // The first forms have addresses of 32 bits: no driver of today gives such out.
        let short = |symbol: &str, version: c_int| {
            version == 2000 && declared.contains_key(&*format!("{symbol}_v2"))
        };
        let forgotten: BTreeSet<&str> = declared
            .iter()
            .filter(|(symbol, (_, version, _))| {
                CONCERNS.iter().any(|start| symbol.starts_with(start))
                    && !listed.contains_key(*symbol)
                    && !LEFT_ALONE.contains(symbol)
                    && !short(symbol, *version)
            })
            .map(|(symbol, _)| *symbol)
            .collect();
        assert_eq!(forgotten, BTreeSet::new());
    }
}
