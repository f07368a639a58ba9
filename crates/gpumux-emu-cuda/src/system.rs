//! The kernel half: the device files. `open` of `/dev/nvidiactl` connects to the server, `ioctl` on such a
//! file becomes a call over it; everything else goes to the next library. The file is an ordinary socket, so that
//! copies, passing it to other processes and closing it need no help.
//!
//! The libcuda half makes its own calls through [`outward`]: the functions that the whole process sees, a
//! preloaded shim's if there is one.

use std::{
    ffi::{CStr, OsString, c_char, c_int, c_ulong, c_void},
    io,
    os::fd::{BorrowedFd, FromRawFd, IntoRawFd, OwnedFd},
    path::PathBuf,
    sync::OnceLock,
};

use gpumux_emu::{SOCKET_VARIABLE, client};
use gpumux_rm::{
    emulated,
    layout::{Alloc21, Alloc64, Control, IOC_MAGIC, XferCmd, class, escape},
};
use zerocopy::FromBytes;

use crate::fault;

/// Where the server listens, when the environment says so.
pub(crate) fn socket_path() -> Option<PathBuf> {
    std::env::var_os(SOCKET_VARIABLE)
        .filter(|path| !path.is_empty())
        .map(|path: OsString| path.into())
}

/// `/dev/nvidiactl` and `/dev/nvidia0` to `/dev/nvidia999`.
fn is_device_path(path: &[u8]) -> bool {
    match path.strip_prefix(b"/dev/nvidia") {
        Some(b"ctl") => true,
        Some(rest) => (1..=3).contains(&rest.len()) && rest.iter().all(u8::is_ascii_digit),
        None => false,
    }
}

fn fail(error: i32) -> c_int {
    // SAFETY: the C library's own variable of this thread.
    unsafe { *libc::__errno_location() = error };
    -1
}

/// Opens a device file of the emulated device; `None` when `path` names none.
fn open_device(path: *const c_char) -> Option<c_int> {
    if path.is_null() {
        return None;
    }
    // SAFETY: not null; `open` demands terminated text.
    let path = unsafe { CStr::from_ptr(path) };
    if !is_device_path(path.to_bytes()) {
        return None;
    }
    let socket = socket_path()?;
    Some(match client::open_control_file(&socket) {
        Ok(file) => file.into_raw_fd(),
        Err(error) => fail(error.raw_os_error().unwrap_or(libc::ENODEV)),
    })
}

type Open = unsafe extern "C" fn(*const c_char, c_int, c_int) -> c_int;
type OpenAt = unsafe extern "C" fn(c_int, *const c_char, c_int, c_int) -> c_int;
type Ioctl = unsafe extern "C" fn(c_int, c_ulong, *mut c_void) -> c_int;

/// The definition of a function that follows ours: the C library's, or another preloaded one's.
macro_rules! next {
    ($name:literal as $type:ty) => {{
        static NEXT: OnceLock<Option<$type>> = OnceLock::new();
        *NEXT.get_or_init(|| {
            // SAFETY: the name is terminated.
            let found = unsafe { libc::dlsym(libc::RTLD_NEXT, $name.as_ptr()) };
            // SAFETY: the C library's function of this name has this type; its variable part is one
            // word, which is passed as a fixed argument would be on the platforms of the driver.
            (!found.is_null()).then(|| unsafe { std::mem::transmute::<*mut c_void, $type>(found) })
        })
    }};
}

macro_rules! opens {
    ($($symbol:ident $text:literal, $at_symbol:ident $at_text:literal;)*) => {$(
        /// The C library's function of this name.
        ///
        /// # Safety
        /// As the C library's.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $symbol(path: *const c_char, flags: c_int, mode: c_int) -> c_int {
            if let Some(opened) = open_device(path) {
                return opened;
            }
            match next!($text as Open) {
                // SAFETY: the caller's promise, passed on.
                Some(next) => unsafe { next(path, flags, mode) },
                None => fail(libc::ENOSYS),
            }
        }

        /// The C library's function of this name.
        ///
        /// # Safety
        /// As the C library's.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $at_symbol(
            dir: c_int,
            path: *const c_char,
            flags: c_int,
            mode: c_int,
        ) -> c_int {
            if let Some(opened) = open_device(path) {
                return opened;
            }
            match next!($at_text as OpenAt) {
                // SAFETY: the caller's promise, passed on.
                Some(next) => unsafe { next(dir, path, flags, mode) },
                None => fail(libc::ENOSYS),
            }
        }
    )*};
}

opens! {
    open c"open", openat c"openat";
    open64 c"open64", openat64 c"openat64";
}

/// The C library's `ioctl`.
///
/// # Safety
/// As the C library's.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
    if (request >> 8) & 0xff == c_ulong::from(IOC_MAGIC)
        && fd >= 0
        && let Some(socket) = socket_path()
    {
        // SAFETY: used for this call only; a number that is no file gives an error.
        let file = unsafe { BorrowedFd::borrow_raw(fd) };
        if client::is_control_file(file, &socket) {
            let size = (request >> 16 & 0x3fff) as usize;
            return match control(file, (request & 0xff) as u32, size, argument.cast()) {
                Ok(()) => 0,
                Err(error) => fail(error.raw_os_error().unwrap_or(libc::EIO)),
            };
        }
    }
    match next!(c"ioctl" as Ioctl) {
        // SAFETY: the caller's promise, passed on.
        Some(next) => unsafe { next(fd, request, argument) },
        None => fail(libc::ENOSYS),
    }
}

/// A copy of the program's memory, that is written back.
struct Lent {
    at: *mut u8,
    bytes: Vec<u8>,
}

impl Lent {
    /// Nothing for null.
    fn new(at: *mut u8, size: usize) -> io::Result<Self> {
        if size > emulated::MAX_BYTES {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        let mut bytes = vec![0; if at.is_null() { 0 } else { size }];
        // SAFETY: the caller of `ioctl` promises that its structures and what they point to are as long
        // as they say; for null nothing is read.
        unsafe { std::ptr::copy_nonoverlapping(at, bytes.as_mut_ptr(), bytes.len()) };
        Ok(Self { at, bytes })
    }

    fn give_back(&self) {
        // SAFETY: as above; RM's structures are read and written.
        unsafe { std::ptr::copy_nonoverlapping(self.bytes.as_ptr(), self.at, self.bytes.len()) };
    }
}

/// One RM call: copies what its structure points to along.
fn control(file: BorrowedFd<'_>, number: u32, size: usize, argument: *mut u8) -> io::Result<()> {
    if fault::due(fault::At::Control).is_some() {
        return Err(io::Error::from_raw_os_error(libc::EIO));
    }
    let invalid = || io::Error::from_raw_os_error(libc::EINVAL);
    let mut arg = Lent::new(argument, size)?;
    if number == u32::from(escape::XFER_CMD) {
        let inner = XferCmd::read_from_bytes(&arg.bytes).map_err(|_| invalid())?;
        if inner.cmd == number {
            return Err(invalid());
        }
        return control(file, inner.cmd, inner.size as usize, inner.ptr as *mut u8);
    }
    let number = u8::try_from(number).map_err(|_| invalid())?;
    let (at, length) = parameters(number, &arg.bytes).unwrap_or_default();
    let mut params = Lent::new(at as *mut u8, length as usize)?;
    emulated::call(file, number, &mut arg.bytes, &mut params.bytes)?;
    params.give_back();
    arg.give_back();
    Ok(())
}

/// Where a call's parameters are and how long they are.
fn parameters(number: u8, arg: &[u8]) -> Option<(u64, u32)> {
    let (at, size, class) = match number {
        escape::CONTROL => {
            let call = Control::read_from_bytes(arg).ok()?;
            return Some((call.params, call.params_size));
        }
        escape::ALLOC if arg.len() == size_of::<Alloc21>() => {
            let call = Alloc21::read_from_bytes(arg).ok()?;
            (call.params, call.params_size, call.class)
        }
        escape::ALLOC => {
            let call = Alloc64::read_from_bytes(arg).ok()?;
            (call.params, call.params_size, call.class)
        }
        _ => return None,
    };
    // Size 0 means: as long as the class's structure.
    let known = match class {
        class::DEVICE | class::SUBDEVICE => 4,
        class::CHANNEL_GROUP => 20,
        _ => 0,
    };
    Some((at, if size == 0 { known } else { size }))
}

/// The functions that the whole process sees.
pub(crate) mod outward {
    use super::*;

    /// The library that defines this function for the process: the first preloaded library that does. When none does (this
    /// library was not preloaded), it is ours.
    fn find(name: &CStr) -> Option<*mut c_void> {
        // SAFETY: the name is terminated.
        let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
        let mut info = libc::Dl_info {
            dli_fname: std::ptr::null(),
            dli_fbase: std::ptr::null_mut(),
            dli_sname: std::ptr::null(),
            dli_saddr: std::ptr::null_mut(),
        };
        // SAFETY: both pointers are valid; an unknown address gives 0.
        let known = !found.is_null() && unsafe { libc::dladdr(found, &mut info) } != 0;
        if !known || info.dli_fname.is_null() {
            return None;
        }
        // SAFETY: the loader's own name of the object.
        let object = unsafe { CStr::from_ptr(info.dli_fname) }.to_bytes();
        let file = object.rsplit(|byte| *byte == b'/').next();
        let is_libc = file.is_some_and(|file| file.starts_with(b"libc.so"));
        (!is_libc).then_some(found)
    }

    /// Opens a device file.
    pub(crate) fn open(path: &CStr) -> io::Result<OwnedFd> {
        static OPEN: OnceLock<Open> = OnceLock::new();
        let open = OPEN.get_or_init(|| match find(c"open") {
            // SAFETY: `open` has this type, see `next!`.
            Some(found) => unsafe { std::mem::transmute::<*mut c_void, Open>(found) },
            None => super::open,
        });
        // SAFETY: the path is terminated.
        let fd = unsafe { open(path.as_ptr(), libc::O_RDWR | libc::O_CLOEXEC, 0) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: just opened, for us.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// Sends an RM call.
    ///
    /// # Safety
    /// `argument` is the structure that `request` names, and what it points to is valid.
    pub(crate) unsafe fn ioctl<T>(fd: c_int, request: u64, argument: &mut T) -> io::Result<()> {
        static IOCTL: OnceLock<Ioctl> = OnceLock::new();
        let ioctl = IOCTL.get_or_init(|| match find(c"ioctl") {
            // SAFETY: `ioctl` has this type, see `next!`.
            Some(found) => unsafe { std::mem::transmute::<*mut c_void, Ioctl>(found) },
            None => super::ioctl,
        });
        // SAFETY: the caller's promise.
        let result = unsafe { ioctl(fd, request, std::ptr::from_mut(argument).cast()) };
        if result < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_device_files_are_ours() {
        for ours in ["/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia15"] {
            assert!(is_device_path(ours.as_bytes()), "{ours}");
        }
        for other in [
            "/dev/nvidia",
            "/dev/nvidia-uvm",
            "/dev/nvidia0x",
            "/dev/nvidiactl2",
            "/dev/null",
            "nvidiactl",
        ] {
            assert!(!is_device_path(other.as_bytes()), "{other}");
        }
    }
}
