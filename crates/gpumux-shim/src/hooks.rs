//! The driver API's functions that this library stands in front of, and how programs reach them.
//!
//! Which they are says the list of entry points (`gpumux-cuda`: `entry_points.txt`): `build.rs` makes the table of them all, and
//! the functions that follow from their class. The others are here. Whatever way a program takes to one of them, it gets
//! ours, and ours calls the real one:
//! - a program linked to libcuda binds to this library's exports, because it is preloaded;
//! - `dlsym` is exported too ([`crate::loader`]) and exchanges pointers into libcuda;
//! - `cuGetProcAddress` calls the real one first and exchanges what that returned.
//!
//! A pointer is exchanged for what it *is*, not for the name it was asked by: the real address of each
//! hooked function is known, so libcuda's own rules about versions and streams keep
//! deciding. What a newer driver gives out and the list does not have goes through [`crate::unlisted`].
//!
//! Not seen: libraries loaded with `RTLD_DEEPBIND`, and functions in libcuda's private tables.
//!
//! All are `C-unwind`: they are cancellation points, and cancellation unwinds. For the same reason nothing is caught here: a panic
//! in one of them is a fault of this library and unwinds into the program, which ends.

use std::{
    cell::Cell,
    ffi::{CStr, c_char, c_int, c_uint, c_void},
    ptr,
    sync::{
        Once,
        atomic::{AtomicBool, AtomicPtr, Ordering},
    },
};

use crate::{
    ground::{
        driver::{
            AllocationProp, CUcontext, CUdevice, CUdeviceptr, CUevent, CUresult, CUstream,
            Function, LIBRARY, LaunchConfig, NOT_INITIALIZED, SUCCESS, enabled, functions, lookup,
        },
        gate, next, trace,
    },
    memory::{
        allocate, graphs as graph_memory, ipc,
        native::{self, ArrayShape, FlatShape},
        physical,
        pools::{self, PoolProperties},
        room::{self, Again},
        shown,
        vmm::Access,
    },
    unlisted, work,
    work::{
        copies::{Operation, Plane, Volume},
        graphs,
        meter::Piece,
        predictor::Call,
    },
};

/// `CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM`
const PER_THREAD: u64 = 2;

/// A structure that is passed by value (`CUipcMemHandle` and its like).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct ByValue([u64; 8]);

/// One hooked function.
struct Row {
    real: Function,
    ours: *const (),
    /// By what `cuGetProcAddress` knows it: name, version, flags.
    ask: (&'static CStr, c_int, u64),
    /// What that gives, should it differ from the exported symbol.
    asked: AtomicPtr<c_void>,
}

// SAFETY: the only field that is not `Sync` is the address of a function.
unsafe impl Sync for Row {}

/// Ours for a real address.
fn exchange(address: *mut c_void) -> Option<*mut c_void> {
    let is = |known: *mut c_void| !address.is_null() && known == address;
    let exported = ROWS.iter().find(|row| is(row.real.known()));
    let row = exported
        .or_else(|| {
            ROWS.iter()
                .find(|row| is(row.asked.load(Ordering::Relaxed)))
        })
        .or_else(|| ROWS.iter().find(|row| is(row.ours.cast_mut().cast())))?;
    Some(row.ours.cast_mut().cast())
}

/// What a program's `dlsym` of a driver function gives instead of `address`.
///
/// # Safety
/// `address` must be what the real `dlsym` gave for `name`.
pub(crate) unsafe fn found(name: &CStr, address: *mut c_void) -> *mut c_void {
    if let Some(row) = ROWS.iter().find(|row| ptr::eq(row.ours.cast(), address)) {
        // Our own export, found by a search of everything. It is only there if libcuda is.
        let real = lookup(row.real.name());
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
    match exchange(address) {
        Some(ours) => ours,
        None if is_listed(name) || !is_drivers(address) => address,
        None => unlisted::stand_in(name, address),
    }
}

/// Where the object that has an address begins.
fn object_of(address: *const c_void) -> Option<libc::Dl_info> {
    // SAFETY: an all-zero `Dl_info` is valid, and any address may be asked about.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: as above.
    (unsafe { libc::dladdr(address, &raw mut info) } != 0).then_some(info)
}

/// Whether an address is of the library that has the driver's functions.
fn is_drivers(address: *mut c_void) -> bool {
    let driver = object_of(lookup(c"cuDriverGetVersion"));
    let object = object_of(address);
    object.is_some_and(|it| driver.is_some_and(|driver| driver.dli_fbase == it.dli_fbase))
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
    let Some(object) = object_of(address) else {
        return false;
    };
    let flags = libc::RTLD_LAZY | libc::RTLD_NOLOAD | libc::RTLD_NODELETE;
    // SAFETY: a path from the loader; it only gives another handle of a library that is loaded.
    let library = unsafe { libc::dlopen(object.dli_fname, flags) };
    let is_driver = !library.is_null()
        && [c"cuInit", c"cuDriverGetVersion"].iter().all(|name| {
            // SAFETY: as above.
            object_of(unsafe { dlsym(library, name.as_ptr()) })
                .is_some_and(|found| found.dli_fbase == object.dli_fbase)
        });
    if is_driver {
        LIBRARY.store(library, Ordering::Release);
        look_all_up();
        LEARNED.store(true, Ordering::Release);
    }
    // The program's own look-up succeeded: it must not find an error of ours.
    // SAFETY: no requirements.
    unsafe { libc::dlerror() };
    is_driver
}

fn look_all_up() {
    for row in &ROWS {
        // SAFETY: only the address is wanted.
        let _ = unsafe { row.real.get::<*mut c_void>() };
    }
}

type GetProcAddress = unsafe extern "C-unwind" fn(
    *const c_char,
    *mut *mut c_void,
    c_int,
    u64,
    *mut c_int,
) -> CUresult;

/// Exchanges what `cuGetProcAddress` has answered.
///
/// # Safety
/// The arguments must be what the program passed and the result the real function's.
unsafe fn answered(
    result: CUresult,
    name: *const c_char,
    function: *mut *mut c_void,
    version: c_int,
    flags: u64,
) -> CUresult {
    if result != SUCCESS || function.is_null() || name.is_null() || !enabled() {
        return result;
    }
    learn_asked();
    // SAFETY: the real function has just read the name.
    let name = unsafe { CStr::from_ptr(name) };
    // SAFETY: it has just written there.
    let place = unsafe { &mut *function };
    match exchange(*place) {
        Some(ours) => *place = ours,
        None if place.is_null() || passes(name, version, flags & PER_THREAD != 0) => {}
        None => *place = unlisted::stand_in(name, *place),
    }
    result
}

/// Asks `cuGetProcAddress` for the hooked functions, once: it may give other addresses than `dlsym`.
fn learn_asked() {
    static LEARNED: Once = Once::new();
    static ASK: Function = Function::new(c"cuGetProcAddress_v2");
    thread_local! {
        /// The driver may look up functions of its own through ours meanwhile.
        static LEARNING: Cell<bool> = const { Cell::new(false) };
    }
    // SAFETY: the type is the function's.
    let Some(ask) = (unsafe { ASK.get::<GetProcAddress>() }) else {
        return;
    };
    if LEARNING.replace(true) {
        return;
    }
    LEARNED.call_once(|| {
        look_all_up();
        for row in &ROWS {
            let (name, version, flags) = row.ask;
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
    });
    LEARNING.set(false);
}

/// One form of a function that is listed, hooked or not.
struct Form {
    symbol: &'static CStr,
    name: &'static CStr,
    version: c_int,
    per_thread: bool,
    hooked: bool,
}

/// Whether the list has this symbol.
fn is_listed(symbol: &CStr) -> bool {
    FORMS.iter().any(|form| form.symbol == symbol)
}

/// Whether a function that `cuGetProcAddress` gave for this name, and that is not hooked, is one that need not be: that is the newest
/// form which the list has for it.
fn passes(name: &CStr, version: c_int, per_thread: bool) -> bool {
    let newest = |per_thread: bool| {
        let own = FORMS.iter().filter(|form| form.name == name);
        own.filter(|form| form.version <= version && form.per_thread == per_thread)
            .max_by_key(|form| form.version)
    };
    let own = per_thread.then(|| newest(true)).flatten();
    own.or_else(|| newest(false))
        .is_some_and(|form| !form.hooked)
}

/// The table of hooked functions.
macro_rules! rows {
    ($($symbol:ident $text:literal $name:literal $version:literal $flags:literal $again:ident;)*) => {
        #[allow(non_camel_case_types, clippy::enum_variant_names)]
        #[derive(Clone, Copy)]
        enum Id { $($symbol),* }

        static ROWS: [Row; [$(Id::$symbol),*].len()] = [$(Row {
            real: Function::new($text),
            ours: $symbol as *const (),
            ask: ($name, $version, $flags),
            asked: AtomicPtr::new(ptr::null_mut()),
        }),*];

        /// Which of them are made again once there is room.
        const AGAIN: [Again; ROWS.len()] = [$(Again::$again),*];
    };
}

/// The default stream of a function whose name has no `_ptsz` or `_ptds`, and of one that has.
const LEGACY: bool = false;
const OWN: bool = true;

/// Functions in front of libcuda's, a line each. In brackets the symbol of the variant in which the null stream means the
/// thread's own, where there is one; then the second name in the parentheses says which of the two it is.
macro_rules! hooks {
    ($($([$twin:ident])? $name:ident $args:tt ($real:ident $(, $own:ident)?) => $body:expr;)*) => {$(
        hook!($name $args ($real $(, $own LEGACY)?) $body);
        $(hook!($twin $args ($real, $own OWN) $body);)?
    )*};
}

macro_rules! hook {
    ($name:ident ($($arg:ident: $type:ty),* $(,)?) ($real:ident $(, $own:ident $which:ident)?) $body:expr) => {
        #[doc = concat!("In front of libcuda's `", stringify!($name), "`.")]
        ///
        /// # Safety
        /// As libcuda's.
        #[unsafe(no_mangle)]
        #[allow(non_snake_case, clippy::too_many_arguments)]
        #[allow(clippy::undocumented_unsafe_blocks)] // said once, above the list
        unsafe extern "C-unwind" fn $name($($arg: $type),*) -> CUresult {
            type Real = unsafe extern "C-unwind" fn($($type),*) -> CUresult;
            // SAFETY: the signature is `cuda.h`'s.
            let Some(function) = (unsafe { ROWS[Id::$name as usize].real.get::<Real>() }) else {
                return NOT_INITIALIZED;
            };
            $(#[allow(unused_variables)] let $own = $which;)?
            // SAFETY: the program's own call.
            let $real = || unsafe { function($($arg),*) };
            let call = || room::call(const { AGAIN[Id::$name as usize] }, || $body);
            if trace::calls() {
                let result = call();
                trace::called(stringify!($name), &[$((stringify!($arg), &$arg)),*], result);
                return result;
            }
            call()
        }
    };
}

// The table, and what follows from the class.
include!(concat!(env!("OUT_DIR"), "/hooks.rs"));

functions! {
    export_handle c"cuMemExportToShareableHandle" (*mut c_void, u64, c_int, u64);
    properties_of c"cuMemGetAllocationPropertiesFromHandle" (*mut AllocationProp, u64);
    bind_mem c"cuMulticastBindMem" (u64, usize, u64, usize, usize, u64);
    bind_mem_v2 c"cuMulticastBindMem_v2" (u64, c_int, usize, u64, usize, usize, u64);
    bind_endpoint_mem c"cuLogicalEndpointBindMem" (u64, c_int, usize, u64, usize, usize, u64);
}

// Where a body is unsafe: what it is given is what the program passed, and a call that succeeds has written its results.
hooks! {
    // Look-up.
    cuGetProcAddress(name: *const c_char, function: *mut *mut c_void, version: c_int, flags: u64) (real) => unsafe { answered(real(), name, function, version, flags) };
    [cuGetProcAddress_v2_ptsz] cuGetProcAddress_v2(name: *const c_char, function: *mut *mut c_void, version: c_int, flags: u64, status: *mut c_int) (real, own) => {
        // Without a flag this form gives what a program with per-thread default streams means.
        let flags = if own && flags == 0 { PER_THREAD } else { flags };
        unsafe { answered(real(), name, function, version, flags) }
    };

    // A graph may have copies in it.
    [cuGraphLaunch_ptsz] cuGraphLaunch(graph: *mut c_void, stream: CUstream) (real, own) => pools::graph_launched(work::launch_graph(graph as u64, stream, own, real));

    // How much is in it is known before alone.
    cuGraphInstantiate(out: *mut *mut c_void, graph: *mut c_void, node: *mut c_void, log: *mut c_char, bytes: usize) (real) => unsafe { graphs::instantiate(out, graph, real) };
    cuGraphInstantiate_v2(out: *mut *mut c_void, graph: *mut c_void, node: *mut c_void, log: *mut c_char, bytes: usize) (real) => unsafe { graphs::instantiate(out, graph, real) };
    cuGraphInstantiateWithFlags(out: *mut *mut c_void, graph: *mut c_void, flags: u64) (real) => unsafe { graphs::instantiate(out, graph, real) };
    cuGraphInstantiateWithParams(out: *mut *mut c_void, graph: *mut c_void, params: *mut c_void) (real) => unsafe { graphs::instantiate(out, graph, real) };
    cuGraphInstantiateWithParams_ptsz(out: *mut *mut c_void, graph: *mut c_void, params: *mut c_void) (real) => unsafe { graphs::instantiate(out, graph, real) };
    cuGraphExecDestroy(executable: *mut c_void) (real) => graphs::destroy(executable, real);

    // What allocates when it runs.
    cuGraphAddMemAllocNode(node: *mut *mut c_void, graph: *mut c_void, after: *const c_void, count: usize, params: *mut c_void) (real) => graph_memory::add_allocation(real);
    cuGraphAddNode(node: *mut *mut c_void, graph: *mut c_void, after: *const c_void, count: usize, params: *const c_int) (real) => unsafe { graph_memory::add_node(params, real) };
    cuGraphAddNode_v2(node: *mut *mut c_void, graph: *mut c_void, after: *const c_void, edges: *const c_void, count: usize, params: *const c_int) (real) => unsafe { graph_memory::add_node(params, real) };
    cuGraphAddNode_v3(node: *mut *mut c_void, graph: *mut c_void, after: *const c_void, edges: *const c_void, count: usize, params: *const c_int) (real) => unsafe { graph_memory::add_node(params, real) };
    cuDeviceGraphMemTrim(device: CUdevice) (real) => graph_memory::trim_device(real);

    // Device memory.
    cuMemAlloc_v2(out: *mut CUdeviceptr, bytes: usize) (real) => unsafe { allocate::alloc(out, bytes, real) };
    cuMemAllocPitch_v2(out: *mut CUdeviceptr, pitch: *mut usize, width: usize, height: usize, element: c_uint) (real) => unsafe { allocate::alloc_pitch(out, pitch, width, height, element, real) };
    cuMemAllocManaged(out: *mut CUdeviceptr, bytes: usize, flags: c_uint) (real) => unsafe { native::alloc_native(out, bytes, real) };
    cuArrayCreate_v2(out: *mut u64, shape: *const FlatShape) (real) => unsafe { native::create_array(out, shape, 1, real) };
    cuArray3DCreate_v2(out: *mut u64, shape: *const ArrayShape) (real) => unsafe { native::create_array(out, shape, 1, real) };
    cuMipmappedArrayCreate(out: *mut u64, shape: *const ArrayShape, levels: c_uint) (real) => unsafe { native::create_array(out, shape, levels, real) };
    cuArrayDestroy(array: u64) (real) => native::destroy_array(array, real);
    cuMipmappedArrayDestroy(array: u64) (real) => native::destroy_array(array, real);
    cuMemFree_v2(address: CUdeviceptr) (real) => allocate::free(address, real);
    [cuMemAllocAsync_ptsz] cuMemAllocAsync(out: *mut CUdeviceptr, bytes: usize, stream: CUstream) (real, _own) => unsafe { native::alloc_pooled(out, bytes, None, real) };
    [cuMemAllocFromPoolAsync_ptsz] cuMemAllocFromPoolAsync(out: *mut CUdeviceptr, bytes: usize, pool: u64, stream: CUstream) (real, _own) => unsafe { native::alloc_pooled(out, bytes, Some(pool), real) };
    [cuMemFreeAsync_ptsz] cuMemFreeAsync(address: CUdeviceptr, stream: CUstream) (real, _own) => allocate::free_async(address, real);
    cuMemPoolCreate(out: *mut u64, properties: *const PoolProperties) (real) => unsafe { pools::create(out, properties, real) };
    cuMemPoolDestroy(pool: u64) (real) => pools::destroy(pool, real);
    cuMemCreate(handle: *mut u64, bytes: usize, prop: *const AllocationProp, flags: u64) (real) => unsafe { native::create(handle, bytes, prop, flags, real) };
    cuMemRelease(handle: u64) (real) => native::release_handle(handle, real);
    cuMemMap(address: CUdeviceptr, bytes: usize, offset: usize, handle: u64, flags: u64) (real) => physical::map(address, bytes, offset, handle, flags, real);
    cuMemUnmap(address: CUdeviceptr, bytes: usize) (real) => physical::unmap(address, bytes, real);
    cuMemSetAccess(address: CUdeviceptr, bytes: usize, access: *const Access, count: usize) (real) => unsafe { physical::set_access(address, bytes, access, count, real) };
    cuMemExportToShareableHandle(out: *mut c_void, handle: u64, kind: c_int, flags: u64) (real) => physical::passed_on(handle, true, |own| Some(unsafe { export_handle()?(out, own, kind, flags) }), real);
    cuMemGetAllocationPropertiesFromHandle(prop: *mut AllocationProp, handle: u64) (real) => physical::passed_on(handle, false, |own| Some(unsafe { properties_of()?(prop, own) }), real);
    cuMulticastBindMem(group: u64, at: usize, handle: u64, offset: usize, bytes: usize, flags: u64) (real) => physical::passed_on(handle, true, |own| Some(unsafe { bind_mem()?(group, at, own, offset, bytes, flags) }), real);
    cuMulticastBindMem_v2(group: u64, device: c_int, at: usize, handle: u64, offset: usize, bytes: usize, flags: u64) (real) => physical::passed_on(handle, true, |own| Some(unsafe { bind_mem_v2()?(group, device, at, own, offset, bytes, flags) }), real);
    cuLogicalEndpointBindMem(endpoint: u64, device: c_int, at: usize, handle: u64, offset: usize, bytes: usize, flags: u64) (real) => physical::passed_on(handle, true, |own| Some(unsafe { bind_endpoint_mem()?(endpoint, device, at, own, offset, bytes, flags) }), real);
    cuMulticastBindAddr(group: u64, at: usize, address: CUdeviceptr, bytes: usize, flags: u64) (real) => physical::pin(address, bytes as u64, real);
    cuMulticastBindAddr_v2(group: u64, device: c_int, at: usize, address: CUdeviceptr, bytes: usize, flags: u64) (real) => physical::pin(address, bytes as u64, real);
    cuLogicalEndpointBindAddr(endpoint: u64, device: c_int, at: usize, address: CUdeviceptr, bytes: usize, flags: u64) (real) => physical::pin(address, bytes as u64, real);
    cuMemRetainAllocationHandle(handle: *mut u64, address: CUdeviceptr) (real) => unsafe { physical::retain(handle, address, real) };
    cuMemGetHandleForAddressRange(handle: *mut c_void, address: CUdeviceptr, bytes: usize, kind: c_int, flags: u64) (real) => physical::pin(address, bytes as u64, real);
    cuPointerSetAttribute(value: *const c_void, attribute: c_int, address: CUdeviceptr) (real) => physical::set_pointer_attribute(attribute, address, real);
    cuIpcGetMemHandle(handle: *mut c_void, address: CUdeviceptr) (real) => unsafe { ipc::get(handle.cast(), address, real) };
    cuIpcOpenMemHandle(address: *mut CUdeviceptr, handle: ByValue, flags: c_uint) (real) => unsafe { ipc::open(address, handle.0, flags, real) };
    cuIpcOpenMemHandle_v2(address: *mut CUdeviceptr, handle: ByValue, flags: c_uint) (real) => unsafe { ipc::open(address, handle.0, flags, real) };
    cuIpcCloseMemHandle(address: CUdeviceptr) (real) => ipc::close(address, real);
    cuCtxEnablePeerAccess(peer: CUcontext, flags: c_uint) (real) => allocate::enable_peer(peer, real);

    // What a program is shown of it.
    cuMemGetInfo_v2(free: *mut usize, total: *mut usize) (real) => unsafe { shown::info(free, total, real) };
    cuDeviceTotalMem_v2(bytes: *mut usize, device: CUdevice) (real) => unsafe { shown::total(bytes, device, real) };
    cuMemGetAddressRange_v2(base: *mut CUdeviceptr, bytes: *mut usize, address: CUdeviceptr) (real) => unsafe { shown::range(base, bytes, address, real) };
    cuPointerGetAttribute(data: *mut c_void, attribute: c_int, address: CUdeviceptr) (real) => unsafe { shown::pointer_attribute(data, attribute, address, real) };
    cuPointerGetAttributes(count: c_uint, attributes: *const c_int, data: *const *mut c_void, address: CUdeviceptr) (real) => unsafe { shown::pointer_attributes(count, attributes, data, address, real) };

    // What may tell that work is coming.
    [cuMemcpyHtoD_v2_ptds] cuMemcpyHtoD_v2(to: CUdeviceptr, from: *const c_void, bytes: usize) (real, own) => work::input(Call::Copy, bytes, || work::from_host(ptr::null_mut(), own, bytes, real));
    [cuMemcpyHtoDAsync_v2_ptsz] cuMemcpyHtoDAsync_v2(to: CUdeviceptr, from: *const c_void, bytes: usize, stream: CUstream) (real, own) => work::input(Call::AsyncCopy, bytes, || work::from_host(stream, own, bytes, real));
    [cuMemcpyAsync_ptsz] cuMemcpyAsync(to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: CUstream) (real, own) => work::input(Call::AsyncCopy, bytes, || work::between(stream, own, (to, from, bytes), real));
    [cuMemcpy_ptds] cuMemcpy(to: CUdeviceptr, from: CUdeviceptr, bytes: usize) (real, own) => work::input(Call::Copy, bytes, || work::between(ptr::null_mut(), own, (to, from, bytes), real));

    // What goes over the link between host and device.
    [cuMemcpyDtoHAsync_v2_ptsz] cuMemcpyDtoHAsync_v2(to: *mut c_void, from: CUdeviceptr, bytes: usize, stream: CUstream) (real, own) => work::read(stream, own, bytes, real);
    [cuMemcpy2D_v2_ptds] cuMemcpy2D_v2(shape: *const Plane) (real, own) => unsafe { work::shaped(ptr::null_mut(), own, shape, real) };
    [cuMemcpy2DUnaligned_v2_ptds] cuMemcpy2DUnaligned_v2(shape: *const Plane) (real, own) => unsafe { work::shaped(ptr::null_mut(), own, shape, real) };
    [cuMemcpy2DAsync_v2_ptsz] cuMemcpy2DAsync_v2(shape: *const Plane, stream: CUstream) (real, own) => unsafe { work::shaped(stream, own, shape, real) };
    [cuMemcpy3D_v2_ptds] cuMemcpy3D_v2(shape: *const Volume) (real, own) => unsafe { work::shaped(ptr::null_mut(), own, shape, real) };
    [cuMemcpy3DAsync_v2_ptsz] cuMemcpy3DAsync_v2(shape: *const Volume, stream: CUstream) (real, own) => unsafe { work::shaped(stream, own, shape, real) };
    [cuMemcpy3DPeer_ptds] cuMemcpy3DPeer(shape: *const Volume) (real, own) => unsafe { work::shaped(ptr::null_mut(), own, shape, real) };
    [cuMemcpy3DPeerAsync_ptsz] cuMemcpy3DPeerAsync(shape: *const Volume, stream: CUstream) (real, own) => unsafe { work::shaped(stream, own, shape, real) };
    [cuMemcpyBatchAsync_ptsz] cuMemcpyBatchAsync(to: *const CUdeviceptr, from: *const CUdeviceptr, bytes: *const usize, count: usize, kinds: *const c_void, indices: *const usize, many: usize, failed: *mut usize, stream: CUstream) (real, own) => unsafe { work::batch(stream, own, (to, from, bytes, count), real) };
    [cuMemcpyBatchAsync_v2_ptsz] cuMemcpyBatchAsync_v2(to: *const CUdeviceptr, from: *const CUdeviceptr, bytes: *const usize, count: usize, kinds: *const c_void, indices: *const usize, many: usize, stream: CUstream) (real, own) => unsafe { work::batch(stream, own, (to, from, bytes, count), real) };
    [cuMemcpyWithAttributesAsync_ptsz] cuMemcpyWithAttributesAsync(to: CUdeviceptr, from: CUdeviceptr, bytes: usize, kind: *const c_void, stream: CUstream) (real, own) => work::between(stream, own, (to, from, bytes), real);
    [cuMemcpy3DBatchAsync_ptsz] cuMemcpy3DBatchAsync(count: usize, first: *const Operation, failed: *mut usize, flags: u64, stream: CUstream) (real, own) => unsafe { work::operations(stream, own, (first, count), real) };
    [cuMemcpy3DBatchAsync_v2_ptsz] cuMemcpy3DBatchAsync_v2(count: usize, first: *const Operation, flags: u64, stream: CUstream) (real, own) => unsafe { work::operations(stream, own, (first, count), real) };
    [cuMemcpy3DWithAttributesAsync_ptsz] cuMemcpy3DWithAttributesAsync(only: *const Operation, flags: u64, stream: CUstream) (real, own) => unsafe { work::operations(stream, own, (only, 1), real) };
    [cuMemcpyHtoA_v2_ptds] cuMemcpyHtoA_v2(to: u64, at: usize, from: *const c_void, bytes: usize) (real, own) => work::from_host(ptr::null_mut(), own, bytes, real);
    [cuMemcpyHtoAAsync_v2_ptsz] cuMemcpyHtoAAsync_v2(to: u64, at: usize, from: *const c_void, bytes: usize, stream: CUstream) (real, own) => work::from_host(stream, own, bytes, real);
    [cuMemcpyAtoH_v2_ptds] cuMemcpyAtoH_v2(to: *mut c_void, from: u64, at: usize, bytes: usize) (real, own) => work::to_host(ptr::null_mut(), own, bytes, || work::either(ptr::null_mut(), own, real));
    [cuMemcpyAtoHAsync_v2_ptsz] cuMemcpyAtoHAsync_v2(to: *mut c_void, from: u64, at: usize, bytes: usize, stream: CUstream) (real, own) => work::to_host(stream, own, bytes, || work::either(stream, own, real));

    // What tells that work is submitted.
    [cuLaunchHostFunc_ptsz] cuLaunchHostFunc(stream: CUstream, function_: *mut c_void, data: *mut c_void) (real, _own) => work::call_back(real);
    [cuLaunchHostFunc_v2_ptsz] cuLaunchHostFunc_v2(stream: CUstream, function_: *mut c_void, data: *mut c_void, mode: c_uint) (real, _own) => work::call_back(real);
    [cuStreamAddCallback_ptsz] cuStreamAddCallback(stream: CUstream, function_: *mut c_void, data: *mut c_void, flags: c_uint) (real, _own) => work::call_back(real);

    // What tells that work is done.
    [cuStreamSynchronize_ptsz] cuStreamSynchronize(stream: CUstream) (real, own) => work::wait_stream(stream, own, || gate::after(real));
    [cuStreamQuery_ptsz] cuStreamQuery(stream: CUstream) (real, own) => work::ask_stream(stream, own, real);
    [cuMemcpyDtoH_v2_ptds] cuMemcpyDtoH_v2(to: *mut c_void, from: CUdeviceptr, bytes: usize) (real, own) => work::to_host(ptr::null_mut(), own, bytes, || work::wait_stream(ptr::null_mut(), own, || gate::through(real)));
    cuCtxSynchronize() (real) => work::observe_context(ptr::null_mut(), || gate::after(real));
    cuCtxSynchronize_v2(context: CUcontext) (real) => work::observe_context(context, || gate::after(real));
    [cuEventRecord_ptsz] cuEventRecord(event: CUevent, stream: CUstream) (real, own) => work::record(event, stream, own, real);
    [cuEventRecordWithFlags_ptsz] cuEventRecordWithFlags(event: CUevent, stream: CUstream, flags: c_uint) (real, own) => work::record(event, stream, own, real);
    cuCtxRecordEvent(context: CUcontext, event: CUevent) (real) => work::record_all(event, real);
    cuGreenCtxRecordEvent(context: CUcontext, event: CUevent) (real) => work::record_all(event, real);
    cuEventSynchronize(event: CUevent) (real) => work::wait_event(event, || gate::after(real));
    cuEventQuery(event: CUevent) (real) => work::ask_event(event, real);
    cuEventDestroy(event: CUevent) (real) => work::destroy_event(event, real);
    cuEventDestroy_v2(event: CUevent) (real) => work::destroy_event(event, real);

    // What must not be asked, or no longer.
    [cuStreamBeginCapture_ptsz] cuStreamBeginCapture(stream: CUstream) (real, own) => work::begin_capture(stream, own, real);
    [cuStreamBeginCapture_v2_ptsz] cuStreamBeginCapture_v2(stream: CUstream, mode: c_int) (real, own) => work::begin_capture(stream, own, real);
    [cuStreamBeginCaptureToGraph_ptsz] cuStreamBeginCaptureToGraph(stream: CUstream, graph: *mut c_void, after: *const c_void, edges: *const c_void, count: usize, mode: c_int) (real, own) => work::begin_capture(stream, own, real);
    [cuStreamBeginRecaptureToGraph_ptsz] cuStreamBeginRecaptureToGraph(stream: CUstream, mode: c_int, graph: *mut c_void, callback: *mut c_void, data: *mut c_void) (real, own) => work::begin_capture(stream, own, real);
    [cuStreamBeginCaptureToCig_ptsz] cuStreamBeginCaptureToCig(stream: CUstream, parameters: *mut c_void) (real, own) => work::begin_capture(stream, own, real);
    [cuStreamEndCaptureToCig_ptsz] cuStreamEndCaptureToCig(stream: CUstream) (real, own) => work::end_capture(stream, own, real);
    [cuStreamEndCapture_ptsz] cuStreamEndCapture(stream: CUstream, graph: *mut *mut c_void) (real, own) => work::end_capture(stream, own, real);

    // It may have an event made.
    cuStreamDestroy(stream: CUstream) (real) => gate::through(|| work::destroy_stream(stream, real));
    cuStreamDestroy_v2(stream: CUstream) (real) => gate::through(|| work::destroy_stream(stream, real));
    cuCtxDestroy(context: CUcontext) (real) => allocate::destroy_context(context, real);
    cuCtxDestroy_v2(context: CUcontext) (real) => allocate::destroy_context(context, real);
    cuCtxDetach(context: CUcontext) (real) => allocate::detach_context(context, real);
    cuGreenCtxDestroy(context: CUcontext) (real) => allocate::destroy_green(context, real);
    cuDevicePrimaryCtxRelease(device: CUdevice) (real) => allocate::release_primary(device, real);
    cuDevicePrimaryCtxRelease_v2(device: CUdevice) (real) => allocate::release_primary(device, real);
    cuDevicePrimaryCtxReset(device: CUdevice) (real) => allocate::release_primary(device, real);
    cuDevicePrimaryCtxReset_v2(device: CUdevice) (real) => allocate::release_primary(device, real);

    // Which group is whose, and how much room a context takes.
    cuGreenCtxCreate(out: *mut CUcontext, resources: *mut c_void, device: CUdevice, flags: c_uint) (real) => room::for_context(device, || gate::through(real));
    cuCtxCreate(out: *mut CUcontext, flags: c_uint, device: CUdevice) (real) => unsafe { room::create_context(out, device, real) };
    cuCtxCreate_v2(out: *mut CUcontext, flags: c_uint, device: CUdevice) (real) => unsafe { room::create_context(out, device, real) };
    cuCtxCreate_v3(out: *mut CUcontext, affinity: *mut c_void, count: c_int, flags: c_uint, device: CUdevice) (real) => unsafe { room::create_context(out, device, real) };
    cuCtxCreate_v4(out: *mut CUcontext, params: *mut c_void, flags: c_uint, device: CUdevice) (real) => unsafe { room::create_context(out, device, real) };
    cuDevicePrimaryCtxRetain(out: *mut CUcontext, device: CUdevice) (real) => unsafe { room::create_context(out, device, real) };
    cuGLCtxCreate(out: *mut CUcontext, flags: c_uint, device: CUdevice) (real) => unsafe { room::create_context(out, device, real) };
    cuGLCtxCreate_v2(out: *mut CUcontext, flags: c_uint, device: CUdevice) (real) => unsafe { room::create_context(out, device, real) };
    cuVDPAUCtxCreate(out: *mut CUcontext, flags: c_uint, device: CUdevice, display: u64, address: *mut c_void) (real) => unsafe { room::create_context(out, device, real) };
    cuVDPAUCtxCreate_v2(out: *mut CUcontext, flags: c_uint, device: CUdevice, display: u64, address: *mut c_void) (real) => unsafe { room::create_context(out, device, real) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_newer_driver_gives_for_a_known_name_does_not_pass() {
        // Version 14000 stands for a form that this list does not have: the newest of the list is hooked.
        assert!(!passes(c"cuMemcpyAsync", 14000, false));
        assert!(!passes(c"cuMemcpyAsync", 14000, true));
        assert!(!passes(c"cuNewCopyAsync", 14000, false));
        assert!(passes(c"cuDeviceGetName", 14000, true));
        // The form with addresses of 32 bits is not hooked, the next is.
        assert!(passes(c"cuMemAlloc", 2000, false));
        assert!(!passes(c"cuMemAlloc", 3020, false));
    }

    #[test]
    fn every_hooked_function_has_a_row_of_its_own() {
        let hooked = FORMS.iter().filter(|form| form.hooked).count();
        assert_eq!(ROWS.len(), hooked);
        for (n, row) in ROWS.iter().enumerate() {
            let alike = |it: &Row| ptr::eq(it.ours, row.ours) || it.real.name() == row.real.name();
            assert!(!ROWS[n + 1..].iter().any(alike), "{:?}", row.real.name());
        }
    }
}
