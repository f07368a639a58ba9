//! A stand-in for libcuda in the shim's tests. Its kernels do nothing and end on request
//! (`fake_finish`) or waited for. It makes the RM calls of a context and it counts queries that would
//! have spoiled a capture.

#![allow(non_snake_case, clippy::missing_safety_doc)]

use std::{
    cell::Cell,
    ffi::{CStr, c_char, c_int, c_uint, c_void},
    ptr,
    sync::{
        OnceLock,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
};

use common::Rm;

mod common;

const NOT_READY: c_int = 600;
const INVALID_HANDLE: c_int = 400;
const INVALID_CONTEXT: c_int = 201;

struct Stream {
    context: *mut c_void,
    launched: AtomicU64,
    finished: AtomicU64,
    capturing: AtomicU32,
    destroyed: AtomicU32,
}

struct Event {
    stream: Cell<*const Stream>,
    count: Cell<u64>,
}

impl Stream {
    fn new(context: *mut c_void) -> *mut Self {
        Box::into_raw(Box::new(Self {
            context,
            launched: AtomicU64::new(0),
            finished: AtomicU64::new(0),
            capturing: AtomicU32::new(0),
            destroyed: AtomicU32::new(0),
        }))
    }

    /// The stream of a handle; the context's own for the default one.
    unsafe fn of(handle: *mut c_void) -> &'static Self {
        let handle = match handle as usize {
            0 | 1 => CURRENT.get(),
            _ => handle,
        };
        // SAFETY: streams and contexts are never freed here.
        unsafe { &*handle.cast::<Self>() }
    }

    fn is_done(&self) -> bool {
        self.finished.load(Ordering::SeqCst) >= self.launched.load(Ordering::SeqCst)
    }

    fn finish(&self) {
        self.finished
            .store(self.launched.load(Ordering::SeqCst), Ordering::SeqCst);
    }
}

thread_local! {
    static CURRENT: Cell<*mut c_void> = const { Cell::new(ptr::null_mut()) };
}
static CAPTURES: AtomicU32 = AtomicU32::new(0);
static SPOILED: AtomicU32 = AtomicU32::new(0);

#[unsafe(no_mangle)]
extern "C" fn cuInit(_flags: c_uint) -> c_int {
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> c_int {
    // SAFETY: the caller's.
    unsafe { *version = 13000 };
    0
}

/// A context is the stream of its default work, with a channel group behind it.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxCreate_v2(out: *mut *mut c_void, _flags: c_uint, _dev: c_int) -> c_int {
    static RM: OnceLock<Rm> = OnceLock::new();
    static GROUPS: AtomicU32 = AtomicU32::new(0x5c00_1000);
    let group = GROUPS.fetch_add(0x100, Ordering::SeqCst);
    RM.get_or_init(Rm::open).context(group);
    let context = Stream::new(ptr::null_mut()).cast();
    CURRENT.set(context);
    // SAFETY: the caller's.
    unsafe { *out = context };
    0
}

/// A green context is a place with its context, which has no group of its own.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuGreenCtxCreate(
    out: *mut *mut c_void,
    _resources: *mut c_void,
    _dev: c_int,
    _flags: c_uint,
) -> c_int {
    let context: *mut c_void = Stream::new(ptr::null_mut()).cast();
    // SAFETY: the caller's.
    unsafe { *out = Box::into_raw(Box::new(context)).cast() };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxFromGreenCtx(out: *mut *mut c_void, green: *mut c_void) -> c_int {
    // SAFETY: the caller's; green contexts are never freed here.
    unsafe { *out = *green.cast() };
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuGreenCtxDestroy(_green: *mut c_void) -> c_int {
    0
}

/// A context that was made by `cuCtxCreate` is attached to once, and that is not counted here.
static ATTACHED: AtomicU32 = AtomicU32::new(0);

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxAttach(out: *mut *mut c_void, _flags: c_uint) -> c_int {
    ATTACHED.fetch_add(1, Ordering::SeqCst);
    // SAFETY: the caller's.
    unsafe { *out = CURRENT.get() };
    0
}

/// As with the driver, what is gone is not current any more.
#[unsafe(no_mangle)]
extern "C" fn cuCtxDetach(context: *mut c_void) -> c_int {
    if context != CURRENT.get() {
        return INVALID_CONTEXT;
    }
    let others = |it: u32| it.checked_sub(1);
    if ATTACHED
        .fetch_update(Ordering::SeqCst, Ordering::SeqCst, others)
        .is_err()
    {
        CURRENT.set(ptr::null_mut());
    }
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSetCurrent(context: *mut c_void) -> c_int {
    CURRENT.set(context);
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxGetCurrent(out: *mut *mut c_void) -> c_int {
    // SAFETY: the caller's.
    unsafe { *out = CURRENT.get() };
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxPushCurrent_v2(context: *mut c_void) -> c_int {
    CURRENT.set(context);
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxPopCurrent_v2(out: *mut *mut c_void) -> c_int {
    // SAFETY: the caller's. Only a thread without a context of its own pushes in these tests.
    unsafe { *out = CURRENT.replace(ptr::null_mut()) };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamCreate(out: *mut *mut c_void, _flags: c_uint) -> c_int {
    // SAFETY: the caller's.
    unsafe { *out = Stream::new(CURRENT.get()).cast() };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamGetCtx(stream: *mut c_void, out: *mut *mut c_void) -> c_int {
    // SAFETY: the caller's.
    unsafe { *out = Stream::of(stream).context };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamDestroy_v2(stream: *mut c_void) -> c_int {
    // SAFETY: the caller's.
    unsafe { Stream::of(stream) }
        .destroyed
        .store(1, Ordering::SeqCst);
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamQuery(stream: *mut c_void) -> c_int {
    // SAFETY: the caller's.
    let stream = unsafe { Stream::of(stream) };
    if CAPTURES.load(Ordering::SeqCst) != 0 || stream.destroyed.load(Ordering::SeqCst) != 0 {
        SPOILED.fetch_add(1, Ordering::SeqCst);
        return INVALID_HANDLE;
    }
    if stream.is_done() { 0 } else { NOT_READY }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamSynchronize(stream: *mut c_void) -> c_int {
    // SAFETY: the caller's.
    unsafe { Stream::of(stream) }.finish();
    0
}

/// Ends what a stream does, as time would.
#[unsafe(no_mangle)]
unsafe extern "C" fn fake_finish(stream: *mut c_void) -> c_int {
    // SAFETY: the caller's.
    unsafe { Stream::of(stream) }.finish();
    0
}

/// How many queries would have spoiled a capture, or touched a destroyed stream.
#[unsafe(no_mangle)]
extern "C" fn fake_spoiled() -> c_int {
    SPOILED.load(Ordering::SeqCst) as c_int
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamBeginCapture_v2(stream: *mut c_void, _mode: c_int) -> c_int {
    // SAFETY: the caller's.
    unsafe { Stream::of(stream) }
        .capturing
        .store(1, Ordering::SeqCst);
    CAPTURES.fetch_add(1, Ordering::SeqCst);
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamEndCapture(stream: *mut c_void, _graph: *mut *mut c_void) -> c_int {
    // SAFETY: the caller's.
    unsafe { Stream::of(stream) }
        .capturing
        .store(0, Ordering::SeqCst);
    CAPTURES.fetch_sub(1, Ordering::SeqCst);
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamIsCapturing(stream: *mut c_void, status: *mut c_int) -> c_int {
    // SAFETY: the caller's.
    unsafe { *status = Stream::of(stream).capturing.load(Ordering::SeqCst) as c_int };
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuThreadExchangeStreamCaptureMode(_mode: *mut c_int) -> c_int {
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxSynchronize() -> c_int {
    // SAFETY: the current context.
    unsafe { Stream::of(ptr::null_mut()) }.finish();
    0
}

#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)]
unsafe extern "C" fn cuLaunchKernel(
    _function: *mut c_void,
    _gx: c_uint,
    _gy: c_uint,
    _gz: c_uint,
    _bx: c_uint,
    _by: c_uint,
    _bz: c_uint,
    _shared: c_uint,
    stream: *mut c_void,
    _args: *mut *mut c_void,
    _extra: *mut *mut c_void,
) -> c_int {
    // SAFETY: the caller's.
    let stream = unsafe { Stream::of(stream) };
    if stream.capturing.load(Ordering::SeqCst) == 0 {
        stream.launched.fetch_add(1, Ordering::SeqCst);
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventCreate(out: *mut *mut c_void, _flags: c_uint) -> c_int {
    let event = Event {
        stream: Cell::new(ptr::null()),
        count: Cell::new(0),
    };
    // SAFETY: the caller's.
    unsafe { *out = Box::into_raw(Box::new(event)).cast() };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventRecord(event: *mut c_void, stream: *mut c_void) -> c_int {
    // SAFETY: the caller's.
    let (event, stream) = unsafe { (&*event.cast::<Event>(), Stream::of(stream)) };
    event.stream.set(stream);
    event.count.set(stream.launched.load(Ordering::SeqCst));
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventQuery(event: *mut c_void) -> c_int {
    // SAFETY: the caller's; streams are never freed here.
    unsafe {
        let event = &*event.cast::<Event>();
        let done = (*event.stream.get()).finished.load(Ordering::SeqCst) >= event.count.get();
        if done { 0 } else { NOT_READY }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventSynchronize(event: *mut c_void) -> c_int {
    // SAFETY: as above.
    unsafe {
        let event = &*event.cast::<Event>();
        (*event.stream.get())
            .finished
            .fetch_max(event.count.get(), Ordering::SeqCst);
    }
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuEventDestroy_v2(_event: *mut c_void) -> c_int {
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetProcAddress_v2(
    name: *const c_char,
    function: *mut *mut c_void,
    _version: c_int,
    _flags: u64,
    _status: *mut c_int,
) -> c_int {
    // SAFETY: the caller's.
    let (name, function) = unsafe { (CStr::from_ptr(name), &mut *function) };
    // Not the addresses of symbols, which the shim's exports hide.
    let table: [(&CStr, &CStr); 6] = [
        (c"cuGetProcAddress", c"cuGetProcAddress_v2"),
        (c"cuLaunchKernel", c"cuLaunchKernel"),
        (c"cuStreamSynchronize", c"cuStreamSynchronize"),
        (c"cuCtxCreate", c"cuCtxCreate_v2"),
        (c"cuStreamCreate", c"cuStreamCreate"),
        (c"fake_finish", c"fake_finish"),
    ];
    let Some((_, symbol)) = table.iter().find(|(known, _)| *known == name) else {
        return 500;
    };
    // SAFETY: C strings; this library is loaded under this name.
    *function = unsafe {
        let own = libc::dlopen(
            c"libcuda.so.1".as_ptr(),
            libc::RTLD_NOLOAD | libc::RTLD_LAZY,
        );
        real_symbol(own, symbol)
    };
    0
}

/// A symbol of this library itself, past the shim's `dlsym`.
unsafe fn real_symbol(own: *mut c_void, symbol: &CStr) -> *mut c_void {
    type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;
    // SAFETY: C strings; libc's function has this signature.
    unsafe {
        // The first version of libc on this processor.
        let version = match cfg!(target_arch = "aarch64") {
            true => c"GLIBC_2.17",
            false => c"GLIBC_2.2.5",
        };
        let dlsym = libc::dlvsym(libc::RTLD_DEFAULT, c"dlsym".as_ptr(), version.as_ptr());
        std::mem::transmute::<*mut c_void, Dlsym>(dlsym)(own, symbol.as_ptr())
    }
}
