//! The definitions that this library's exports hide: those of the next library in search order, which is
//! libc's, or another preloaded library's.

use std::{
    ffi::{CStr, c_char, c_void},
    mem::transmute_copy,
    ptr,
    sync::atomic::{AtomicPtr, Ordering},
};

type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;

/// Versions under which glibc exports `dlsym`: by architecture, then the common one since 2.34.
const DLSYM_VERSIONS: [&CStr; 3] = [c"GLIBC_2.2.5", c"GLIBC_2.17", c"GLIBC_2.34"];

/// libc's own `dlsym`, whatever this library or the program exports under that name.
pub(crate) fn dlsym() -> Option<Dlsym> {
    static DLSYM: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
    let mut address = DLSYM.load(Ordering::Relaxed);
    for version in DLSYM_VERSIONS {
        if !address.is_null() {
            break;
        }
        // SAFETY: two C strings; RTLD_NEXT searches behind this library.
        address = unsafe { libc::dlvsym(libc::RTLD_NEXT, c"dlsym".as_ptr(), version.as_ptr()) };
        DLSYM.store(address, Ordering::Relaxed);
    }
    // SAFETY: a null pointer is `None`; anything else is a function with `dlsym`'s signature.
    unsafe { transmute_copy(&address) }
}

/// A function that the next library defines, looked up once.
pub(crate) struct Next {
    name: &'static CStr,
    address: AtomicPtr<c_void>,
}

impl Next {
    pub(crate) const fn new(name: &'static CStr) -> Self {
        Self {
            name,
            address: AtomicPtr::new(ptr::null_mut()),
        }
    }

    /// The function, if a library defines it. Safe at any time: takes no lock of ours and does not
    /// allocate once it was found.
    ///
    /// # Safety
    /// `F` must be the type of a pointer to a function with this name's signature.
    pub(crate) unsafe fn get<F: Copy>(&self) -> Option<F> {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) }
        let mut address = self.address.load(Ordering::Relaxed);
        if address.is_null() {
            // SAFETY: RTLD_NEXT is relative to this library, and the name is a C string.
            address = unsafe { dlsym()?(libc::RTLD_NEXT, self.name.as_ptr()) };
            self.address.store(address, Ordering::Relaxed);
        }
        // SAFETY: the caller names the function's type; null was ruled out.
        (!address.is_null()).then(|| unsafe { transmute_copy(&address) })
    }
}
