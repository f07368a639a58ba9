//! The ground that the rest of this library stands on: the driver API's types, and the functions of libcuda that it calls for
//! itself.

use std::{
    ffi::{CStr, c_int, c_uint, c_void},
    mem::transmute_copy,
    ptr,
    sync::atomic::{AtomicPtr, AtomicU8, Ordering},
};

use crate::ground::next;

pub(crate) type CUresult = c_int;
pub(crate) type CUstream = *mut c_void;
pub(crate) type CUcontext = *mut c_void;
pub(crate) type CUevent = *mut c_void;
pub(crate) type CUdeviceptr = u64;
pub(crate) type CUdevice = c_int;

/// `CUDA_SUCCESS`
pub(crate) const SUCCESS: CUresult = 0;
/// `CUDA_ERROR_NOT_INITIALIZED`: what a call answers without a driver.
pub(crate) const NOT_INITIALIZED: CUresult = 3;

/// The head of `CUlaunchConfig`.
#[repr(C)]
pub(crate) struct LaunchConfig {
    pub(crate) grid: [c_uint; 3],
    pub(crate) block: [c_uint; 3],
    pub(crate) shared_bytes: c_uint,
    pub(crate) stream: CUstream,
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
pub(crate) static LIBRARY: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());

/// Looks a symbol up in libcuda, loaded in whatever way. Does not load it.
pub(crate) fn lookup(name: &CStr) -> *mut c_void {
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

    pub(crate) const fn name(&self) -> &'static CStr {
        self.name
    }

    /// Its address if it has been looked up, else null.
    pub(crate) fn known(&self) -> *mut c_void {
        self.address.load(Ordering::Relaxed)
    }
}

/// Functions of libcuda that this library calls for itself.
macro_rules! functions {
    ($($visible:vis $name:ident $symbol:literal ($($type:ty),*);)*) => {$(
        $visible fn $name() -> Option<unsafe extern "C" fn($($type),*) -> $crate::ground::driver::CUresult> {
            static FUNCTION: $crate::ground::driver::Function =
                $crate::ground::driver::Function::new($symbol);
            // SAFETY: the signature is `cuda.h`'s.
            unsafe { FUNCTION.get() }
        }
    )*};
}

pub(crate) use functions;

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
