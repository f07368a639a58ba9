//! The border to C: how exported functions are made, and the arguments that are pointers.
//!
//! The types here only ever come in as arguments of exported functions, whose callers promise, as
//! the APIs' documentation demands, that pointers are null or valid for what the function does with them, for the
//! length of the call. That promise is what the `unsafe` blocks below stand on.

pub(crate) mod code;

use std::{
    cell::Cell,
    ffi::{CStr, c_char, c_int, c_void},
    os::fd::BorrowedFd,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, LazyLock},
};

use crate::{
    error::{CuError, Result},
    fault, locked,
};

/// Exports functions, a line each. In brackets the symbol of the variant in which the null stream means the
/// thread's own, where there is one.
macro_rules! exports {
    ($list:ident by $call:path; $($([$per_thread:ident])? $symbol:ident $args:tt => $body:expr;)*) => {
        $(
            $crate::border::export_one!($call, $symbol, $args, $body);
            $($crate::border::export_per_thread!($call, $per_thread, $args, $body);)?
        )*

        /// Everything that is exported above.
        #[allow(dead_code)] // one of the lists is for tests only
        pub(crate) const $list: &[(&str, $crate::border::Address)] = &[$(
            (stringify!($symbol), $crate::border::Address($symbol as *const ())),
            $((stringify!($per_thread), $crate::border::Address($per_thread as *const ())),)?
        )*];
    };
}

macro_rules! export_one {
    ($call:path, $symbol:ident, ($($arg:ident: $type:ty),* $(,)?), $body:expr) => {
        #[unsafe(no_mangle)]
        #[allow(non_snake_case, clippy::too_many_arguments)]
        pub(crate) extern "C" fn $symbol($($arg: $type),*) -> ::std::ffi::c_int {
            $call(stringify!($symbol), || $body)
        }
    };
}

macro_rules! export_per_thread {
    ($call:path, $symbol:ident, ($($arg:ident: $type:ty),* $(,)?), $body:expr) => {
        #[unsafe(no_mangle)]
        #[allow(non_snake_case, clippy::too_many_arguments)]
        pub(crate) extern "C" fn $symbol($($arg: $type),*) -> ::std::ffi::c_int {
            $call(stringify!($symbol), || $crate::border::per_thread(|| $body))
        }
    };
}

pub(crate) use {export_one, export_per_thread, exports};

/// Where an exported function is.
#[derive(Clone, Copy)]
pub(crate) struct Address(pub(crate) *const ());

// SAFETY: the address of code, which is the same for all threads and never written.
unsafe impl Sync for Address {}

/// Runs the body of a driver function. No panic leaves it. With `GPUMUX_EMU_TRACE` it is named on standard error when it
/// fails.
pub(crate) fn cuda(name: &str, body: impl FnOnce() -> Result) -> c_int {
    locked::pass(|| unlocked(name, body))
}

/// The same, also while the process is locked.
pub(crate) fn unlocked(name: &str, body: impl FnOnce() -> Result) -> c_int {
    if let Some(code) = fault::call(name) {
        return code;
    }
    let code = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => return 0,
        Ok(Err(error)) => error.0,
        Err(_) => CuError::UNKNOWN.0,
    };
    static TRACE: LazyLock<bool> = LazyLock::new(|| std::env::var_os("GPUMUX_EMU_TRACE").is_some());
    if *TRACE {
        eprintln!("gpumux: {name}: {code}");
    }
    code
}

thread_local! {
    static PER_THREAD: Cell<bool> = const { Cell::new(false) };
}

/// Runs a body in which the null stream means the thread's own.
pub(crate) fn per_thread<T>(body: impl FnOnce() -> T) -> T {
    struct Reset(bool);
    impl Drop for Reset {
        fn drop(&mut self) {
            PER_THREAD.set(self.0);
        }
    }
    let _reset = Reset(PER_THREAD.replace(true));
    body()
}

/// Whether the null stream means the thread's own here.
pub(crate) fn is_per_thread() -> bool {
    PER_THREAD.get()
}

/// Where a result goes.
#[repr(transparent)]
pub(crate) struct Out<T>(*mut T);

// Not derived: that would demand it of what it points to.
impl<T> Clone for Out<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Out<T> {}

impl<T> Out<T> {
    pub(crate) fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// Refuses null, before anything is done.
    pub(crate) fn check(self) -> Result {
        if self.is_null() {
            return Err(CuError::INVALID_VALUE);
        }
        Ok(())
    }

    /// Stores the result.
    pub(crate) fn put(self, value: T) -> Result {
        self.check()?;
        // SAFETY: not null, so valid for writing (see the module's head).
        unsafe { self.0.write_unaligned(value) };
        Ok(())
    }

    /// Stores a result that the caller may not want.
    pub(crate) fn put_if_wanted(self, value: T) {
        let _ = self.put(value);
    }

    /// Stores at most `values.len()` results in an array, for which the caller said there is space.
    pub(crate) fn put_all(self, values: impl IntoIterator<Item = T>) -> Result {
        self.check()?;
        for (i, value) in values.into_iter().enumerate() {
            // SAFETY: not null, and the array is as long as the caller said.
            unsafe { self.0.add(i).write_unaligned(value) };
        }
        Ok(())
    }
}

impl<T: Copy> Out<T> {
    /// Reads what the caller put there.
    pub(crate) fn get(self) -> Result<T> {
        In(self.0.cast_const()).get()
    }
}

impl Out<c_char> {
    /// Stores text in `length` bytes with its end; cut where it is too long.
    pub(crate) fn put_text(self, length: c_int, text: &str) -> Result {
        let room = usize::try_from(length)
            .ok()
            .and_then(|length| length.checked_sub(1))
            .ok_or(CuError::INVALID_VALUE)?;
        let bytes = text.bytes().take(room).chain([0]);
        self.put_all(bytes.map(|byte| byte as c_char))
    }
}

/// What a caller passes by pointer.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(crate) struct In<T>(*const T);

impl<T: Copy> In<T> {
    pub(crate) fn get(self) -> Result<T> {
        self.get_at(0)
    }

    /// One of an array.
    pub(crate) fn get_at(self, index: usize) -> Result<T> {
        if self.0.is_null() {
            return Err(CuError::INVALID_VALUE);
        }
        // SAFETY: not null, and the array is as long as the caller said.
        Ok(unsafe { self.0.add(index).read_unaligned() })
    }
}

/// Terminated text.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(crate) struct Text(*const c_char);

impl Text {
    pub(crate) fn get(self) -> Result<String> {
        if self.0.is_null() {
            return Err(CuError::INVALID_VALUE);
        }
        // SAFETY: not null, so terminated.
        let text = unsafe { CStr::from_ptr(self.0) };
        Ok(text.to_string_lossy().into_owned())
    }

    /// The content of the file that it names, and a 0 behind it.
    pub(crate) fn file(self) -> Result<Vec<u8>> {
        let mut bytes = std::fs::read(self.get()?).map_err(|_| CuError::FILE_NOT_FOUND)?;
        bytes.push(0);
        Ok(bytes)
    }
}

/// A kernel's arguments: an array of pointers to them, or one buffer with all.
#[derive(Clone, Copy)]
pub(crate) struct Arguments {
    pub(crate) pointers: Pointers,
    pub(crate) extra: Pointers,
}

/// `void **`.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(crate) struct Pointers(*mut *mut c_void);

impl Pointers {
    pub(crate) const NONE: Self = Self(std::ptr::null_mut());

    fn at(self, index: usize) -> Result<*mut c_void> {
        In(self.0.cast_const()).get_at(index)
    }
}

/// Tags in `extra` (`CU_LAUNCH_PARAM_*`).
const BUFFER_POINTER: usize = 1;
const BUFFER_SIZE: usize = 2;

impl Arguments {
    /// The bytes of each argument, laid out as the kernel declares them: (offset, size).
    pub(crate) fn read(self, layout: &[(usize, usize)]) -> Result<Vec<Vec<u8>>> {
        if layout.is_empty() {
            return Ok(Vec::new());
        }
        if !self.pointers.0.is_null() {
            let one = |(index, (_, size)): (usize, &(usize, usize))| {
                bytes(self.pointers.at(index)?, *size)
            };
            return layout.iter().enumerate().map(one).collect();
        }
        if self.extra.0.is_null() {
            return Err(CuError::INVALID_VALUE);
        }
        let (mut buffer, mut length) = (std::ptr::null_mut(), 0_usize);
        // Three pairs at most, then 0.
        for pair in 0..3 {
            match self.extra.at(2 * pair)? as usize {
                0 => break,
                BUFFER_POINTER => buffer = self.extra.at(2 * pair + 1)?,
                BUFFER_SIZE => length = In(self.extra.at(2 * pair + 1)?.cast::<usize>()).get()?,
                _ => return Err(CuError::INVALID_VALUE),
            }
        }
        let all = bytes(buffer, length)?;
        let one = |(offset, size): &(usize, usize)| {
            let part = all.get(*offset..offset.saturating_add(*size));
            part.map(<[u8]>::to_vec).ok_or(CuError::INVALID_VALUE)
        };
        layout.iter().map(one).collect()
    }
}

fn bytes(from: *mut c_void, size: usize) -> Result<Vec<u8>> {
    let from = In(from.cast_const().cast::<u8>());
    (0..size).map(|i| from.get_at(i)).collect()
}

/// Where an attribute goes whose type depends on the attribute.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(crate) struct AnyOut(*mut c_void);

impl AnyOut {
    pub(crate) fn typed<T>(self) -> Out<T> {
        Out(self.0.cast())
    }

    /// The number that is passed as a pointer.
    pub(crate) fn number(self) -> usize {
        self.0 as usize
    }
}

/// A function of the program that takes the program's data (`CUhostFn`).
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(crate) struct HostFunction(Option<extern "C" fn(*mut c_void)>);

/// A function of the program that is called behind work (`CUstreamCallback`).
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(crate) struct StreamCallback(Option<extern "C" fn(usize, c_int, *mut c_void)>);

/// The program's data for its function.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(crate) struct UserData(*mut c_void);

/// A function of the program that is called when a context ends (key and value come with it).
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(crate) struct StorageEnd(Option<extern "C" fn(usize, usize, usize)>);

impl StorageEnd {
    pub(crate) fn call(self, context: usize, key: usize, value: usize) {
        if let Some(function) = self.0 {
            function(context, key, value);
        }
    }
}

/// Writes what a kernel printed behind what the program printed.
pub(crate) fn print(text: &[u8]) {
    unsafe extern "C" {
        static stdout: *mut libc::FILE;
    }
    if !text.is_empty() {
        // SAFETY: the C library's own stream, which locks itself.
        unsafe { libc::fwrite(text.as_ptr().cast(), 1, text.len(), stdout) };
    }
}

/// A call into the program.
#[derive(Clone)]
pub(crate) enum HostCall {
    Function(extern "C" fn(*mut c_void), usize),
    Callback(extern "C" fn(usize, c_int, *mut c_void), usize, usize),
    /// None: work waits here for something.
    Wait(Arc<dyn Fn() + Send + Sync>),
}

impl HostCall {
    pub(crate) fn function(function: HostFunction, data: UserData) -> Result<Self> {
        let function = function.0.ok_or(CuError::INVALID_VALUE)?;
        Ok(Self::Function(function, data.0 as usize))
    }

    pub(crate) fn callback(
        function: StreamCallback,
        stream: usize,
        data: UserData,
    ) -> Result<Self> {
        let function = function.0.ok_or(CuError::INVALID_VALUE)?;
        Ok(Self::Callback(function, stream, data.0 as usize))
    }

    pub(crate) fn run(self) {
        match self {
            Self::Function(function, data) => function(data as *mut c_void),
            Self::Callback(function, stream, data) => function(stream, 0, data as *mut c_void),
            Self::Wait(wait) => wait(),
        }
    }
}

/// A copy of the program's memory, which it passed to be copied.
pub(crate) fn program_bytes(from: u64, size: usize) -> Result<Vec<u8>> {
    if from == 0 {
        return Err(CuError::INVALID_VALUE);
    }
    let mut data = vec![0; size];
    // SAFETY: not null, so as long as the program said.
    unsafe { std::ptr::copy_nonoverlapping(from as *const u8, data.as_mut_ptr(), size) };
    Ok(data)
}

/// A file of the program's, which stays open during the call.
pub(crate) fn program_file(fd: c_int) -> Result<BorrowedFd<'static>> {
    if fd < 0 {
        return Err(CuError::INVALID_VALUE);
    }
    // SAFETY: the program passed it for the call and the result is not kept longer; a number that is no file
    // gives errors.
    Ok(unsafe { BorrowedFd::borrow_raw(fd) })
}
