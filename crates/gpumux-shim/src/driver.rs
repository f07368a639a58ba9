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

use crate::{foresee::Call, next, work};

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
                $body
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
    cuGraphLaunch [c"cuGraphLaunch" 10000] (graph: *mut c_void, stream: CUstream)
        real => work::submit(stream, LEGACY, real);
    cuGraphLaunch_ptsz [c"cuGraphLaunch" 10000 PER_THREAD] (graph: *mut c_void, stream: CUstream)
        real => work::submit(stream, OWN, real);
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

    // What may tell that work is coming.
    cuMemcpyHtoD_v2 [c"cuMemcpyHtoD" 3020] (to: CUdeviceptr, from: *const c_void, bytes: usize)
        real => work::input(Call::Copy, bytes, real);
    cuMemcpyHtoD_v2_ptds [c"cuMemcpyHtoD" 7000 PER_THREAD] (
        to: CUdeviceptr, from: *const c_void, bytes: usize,
    ) real => work::input(Call::Copy, bytes, real);
    cuMemcpyHtoDAsync_v2 [c"cuMemcpyHtoDAsync" 3020] (
        to: CUdeviceptr, from: *const c_void, bytes: usize, stream: CUstream,
    ) real => work::input(Call::AsyncCopy, bytes, real);
    cuMemcpyHtoDAsync_v2_ptsz [c"cuMemcpyHtoDAsync" 7000 PER_THREAD] (
        to: CUdeviceptr, from: *const c_void, bytes: usize, stream: CUstream,
    ) real => work::input(Call::AsyncCopy, bytes, real);
    cuMemcpyAsync [c"cuMemcpyAsync" 4000] (
        to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: CUstream,
    ) real => work::input(Call::AsyncCopy, bytes, real);
    cuMemcpyAsync_ptsz [c"cuMemcpyAsync" 7000 PER_THREAD] (
        to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: CUstream,
    ) real => work::input(Call::AsyncCopy, bytes, real);
    cuMemcpy [c"cuMemcpy" 4000] (to: CUdeviceptr, from: CUdeviceptr, bytes: usize)
        real => work::input(Call::Copy, bytes, real);
    cuMemcpy_ptds [c"cuMemcpy" 7000 PER_THREAD] (to: CUdeviceptr, from: CUdeviceptr, bytes: usize)
        real => work::input(Call::Copy, bytes, real);
    cuMemHostRegister_v2 [c"cuMemHostRegister" 6050] (
        memory: *mut c_void, bytes: usize, flags: c_uint,
    ) real => work::input(Call::Register, bytes, real);
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
        real => work::observe_stream(stream, LEGACY, real);
    cuStreamSynchronize_ptsz [c"cuStreamSynchronize" 7000 PER_THREAD] (stream: CUstream)
        real => work::observe_stream(stream, OWN, real);
    cuStreamQuery [c"cuStreamQuery" 2000] (stream: CUstream)
        real => work::observe_stream(stream, LEGACY, real);
    cuStreamQuery_ptsz [c"cuStreamQuery" 7000 PER_THREAD] (stream: CUstream)
        real => work::observe_stream(stream, OWN, real);
    cuMemcpyDtoH_v2 [c"cuMemcpyDtoH" 3020] (to: *mut c_void, from: CUdeviceptr, bytes: usize)
        real => work::observe_stream(ptr::null_mut(), LEGACY, real);
    cuMemcpyDtoH_v2_ptds [c"cuMemcpyDtoH" 7000 PER_THREAD] (
        to: *mut c_void, from: CUdeviceptr, bytes: usize,
    ) real => work::observe_stream(ptr::null_mut(), OWN, real);
    cuCtxSynchronize [c"cuCtxSynchronize" 2000] ()
        real => work::observe_context(ptr::null_mut(), real);
    cuCtxSynchronize_v2 [c"cuCtxSynchronize" 13000] (context: CUcontext)
        real => work::observe_context(context, real);
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
        real => work::observe_event(event, real);
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
    cuStreamDestroy [c"cuStreamDestroy" 2000] (stream: CUstream)
        real => work::destroy_stream(stream, real);
    cuStreamDestroy_v2 [c"cuStreamDestroy" 4000] (stream: CUstream)
        real => work::destroy_stream(stream, real);
    cuCtxDestroy [c"cuCtxDestroy" 2000] (context: CUcontext)
        real => work::destroy_context(context, real);
    cuCtxDestroy_v2 [c"cuCtxDestroy" 4000] (context: CUcontext)
        real => work::destroy_context(context, real);
    cuGreenCtxDestroy [c"cuGreenCtxDestroy" 12040] (context: CUcontext)
        real => work::destroy_context(context, real);
    cuDevicePrimaryCtxRelease [c"cuDevicePrimaryCtxRelease" 7000] (device: CUdevice)
        real => work::release_primary(device, real);
    cuDevicePrimaryCtxRelease_v2 [c"cuDevicePrimaryCtxRelease" 11000] (device: CUdevice)
        real => work::release_primary(device, real);
    cuDevicePrimaryCtxReset [c"cuDevicePrimaryCtxReset" 7000] (device: CUdevice)
        real => work::release_primary(device, real);
    cuDevicePrimaryCtxReset_v2 [c"cuDevicePrimaryCtxReset" 11000] (device: CUdevice)
        real => work::release_primary(device, real);

    // Which group is whose.
    cuCtxCreate [c"cuCtxCreate" 2000] (
        out: *mut CUcontext, flags: c_uint, device: CUdevice,
    // SAFETY: for all of these: a call that succeeds has written the context.
    ) real => unsafe { work::create_context(out, real) };
    cuCtxCreate_v2 [c"cuCtxCreate" 3020] (
        out: *mut CUcontext, flags: c_uint, device: CUdevice,
    // SAFETY: as above.
    ) real => unsafe { work::create_context(out, real) };
    cuCtxCreate_v3 [c"cuCtxCreate" 11040] (
        out: *mut CUcontext, affinity: *mut c_void, count: c_int, flags: c_uint, device: CUdevice,
    // SAFETY: as above.
    ) real => unsafe { work::create_context(out, real) };
    cuCtxCreate_v4 [c"cuCtxCreate" 12050] (
        out: *mut CUcontext, params: *mut c_void, flags: c_uint, device: CUdevice,
    // SAFETY: as above.
    ) real => unsafe { work::create_context(out, real) };
    cuDevicePrimaryCtxRetain [c"cuDevicePrimaryCtxRetain" 7000] (
        out: *mut CUcontext, device: CUdevice,
    // SAFETY: as above.
    ) real => unsafe { work::create_context(out, real) };
}
