//! The functions of libc that this library exports in front of libc's.
//!
//! C declares `open` and `ioctl` as variadic. They are defined here with as many arguments as they can
//! have: on the architectures of NVIDIA's driver (System V x86-64, AArch64 on Linux) the
//! callee finds them in the same registers, and one that the caller did not pass is passed on as it is.
//! All are `C-unwind`: they are cancellation points, and cancellation unwinds.

use std::ffi::{c_char, c_int, c_ulong, c_void};

use gpumux_rm::{capture::Call, layout::IOC_MAGIC};

use crate::{
    agent,
    ground::{control_files, guard, next::Next},
    process,
};

type Ioctl = unsafe extern "C-unwind" fn(c_int, c_ulong, *mut c_void) -> c_int;
type Open = unsafe extern "C-unwind" fn(*const c_char, c_int, libc::mode_t) -> c_int;
type OpenAt = unsafe extern "C-unwind" fn(c_int, *const c_char, c_int, libc::mode_t) -> c_int;
type Close = unsafe extern "C-unwind" fn(c_int) -> c_int;

/// What a call answers that no library defines.
fn missing() -> c_int {
    // SAFETY: always points to this thread's `errno`.
    unsafe { *libc::__errno_location() = libc::ENOSYS };
    -1
}

/// libc's `ioctl`; remembers what the driver library's RM calls tell.
///
/// # Safety
/// As `ioctl`.
#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn ioctl(fd: c_int, request: c_ulong, arg: *mut c_void) -> c_int {
    static NEXT: Next = Next::new(c"ioctl");
    // SAFETY: the type is `ioctl`'s as explained above.
    let Some(next) = (unsafe { NEXT.get::<Ioctl>() }) else {
        return missing();
    };
    let (nr, kind) = (request as u8, (request >> 8) as u8);
    if kind != IOC_MAGIC || !Call::may_matter(nr) {
        // SAFETY: the program's own call.
        return unsafe { next(fd, request, arg) };
    }
    // SAFETY: the program's own call.
    let result = unsafe { next(fd, request, arg) };
    if result == 0 && !arg.is_null() {
        guard::enter(|| {
            if let Some(kind) = control_files::kind(fd) {
                let size = (request >> 16) as usize & 0x3fff;
                // SAFETY: the driver has just read and written as many bytes there.
                let arg = unsafe { std::slice::from_raw_parts(arg.cast::<u8>(), size) };
                process::called(fd, kind, nr, arg, agent::start);
            }
        });
    }
    result
}

/// Common to the four ways to open a file.
unsafe fn after_open(path: *const c_char, fd: c_int) -> c_int {
    // SAFETY: the kernel has just read the path.
    if fd >= 0 && unsafe { control_files::is_path(path) } {
        guard::enter(|| {
            // The number may have been a control file that was closed past this library.
            process::closing(fd);
            control_files::opened(fd);
        });
    }
    fd
}

macro_rules! opens {
    ($($name:ident, $symbol:literal, $type:ty, ($($before:ident: $before_type:ty)?);)*) => {$(
        #[doc = concat!("libc's `", stringify!($name), "`; remembers control files.")]
        ///
        /// # Safety
        /// As libc's.
        #[unsafe(no_mangle)]
        unsafe extern "C-unwind" fn $name(
            $($before: $before_type,)?
            path: *const c_char,
            flags: c_int,
            mode: libc::mode_t,
        ) -> c_int {
            static NEXT: Next = Next::new($symbol);
            // SAFETY: the type is the function's as explained above.
            let Some(next) = (unsafe { NEXT.get::<$type>() }) else {
                return missing();
            };
            // SAFETY: the program's own call.
            let fd = unsafe { next($($before,)? path, flags, mode) };
            // SAFETY: the call above took the path.
            unsafe { after_open(path, fd) }
        }
    )*};
}

opens! {
    open, c"open", Open, ();
    open64, c"open64", Open, ();
    openat, c"openat", OpenAt, (dir: c_int);
    openat64, c"openat64", OpenAt, (dir: c_int);
}

/// libc's `close`; a control file's groups are forgotten before it goes.
///
/// # Safety
/// As `close`.
#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn close(fd: c_int) -> c_int {
    static NEXT: Next = Next::new(c"close");
    if control_files::may_be_known(fd) {
        // Before: afterwards the number may already be another thread's.
        guard::enter(|| process::closing(fd));
    }
    // SAFETY: the type is `close`'s.
    match unsafe { NEXT.get::<Close>() } {
        // SAFETY: the program's own call.
        Some(next) => unsafe { next(fd) },
        None => missing(),
    }
}
