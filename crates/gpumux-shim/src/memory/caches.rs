//! PyTorch's cache, which is given back when others need memory, without the program's doing.
//!
//! Where this process is a Python program, its main thread is asked, when it needs more memory, to register a function as
//! a program itself could ([`crate::memory::reclaim`]); `caches.py` does nothing where PyTorch is not imported. `--frameworks leave` of `gpumux run`
//! leaves caches alone.

use std::{
    ffi::{CStr, CString, c_char, c_int, c_void},
    mem::transmute_copy,
    ptr,
    sync::atomic::{AtomicBool, AtomicU32, Ordering},
};

use gpumux_wire::FRAMEWORKS_VARIABLE;

use crate::ground::next;

/// What the main thread runs, among names of its own.
const SOURCE: &str = include_str!("caches.py");
/// How often it is asked: a program that has not imported PyTorch by then does not use it.
const MOST: u32 = 64;

/// It is registered.
static DONE: AtomicBool = AtomicBool::new(false);
/// The main thread has been asked and has not run it yet.
static ASKED: AtomicBool = AtomicBool::new(false);
static TIMES: AtomicU32 = AtomicU32::new(0);

type IsInitialized = unsafe extern "C" fn() -> c_int;
type Pending = unsafe extern "C" fn(*mut c_void) -> c_int;
type AddPending = unsafe extern "C" fn(Pending, *mut c_void) -> c_int;
type Run = unsafe extern "C" fn(*const c_char, *mut c_void) -> c_int;

/// A function of the interpreter, if there is one in this process.
///
/// # Safety
/// `F` must be the type of a pointer to a function with this name's signature.
unsafe fn of_python<F: Copy>(name: &CStr) -> Option<F> {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>()) }
    // SAFETY: a C string; the interpreter is the program or one of its libraries.
    let address = unsafe { next::dlsym()?(libc::RTLD_DEFAULT, name.as_ptr()) };
    // SAFETY: the caller names the function's type; null is ruled out.
    (!address.is_null()).then(|| unsafe { transmute_copy(&address) })
}

/// The process needs more memory of a device: a moment at which PyTorch may have been imported. Takes no lock and waits for nothing.
pub(crate) fn look() {
    if DONE.load(Ordering::Relaxed)
        || ASKED.load(Ordering::Relaxed)
        || TIMES.load(Ordering::Relaxed) >= MOST
        || left_alone()
    {
        return;
    }
    // SAFETY: signatures of Python's C API.
    let (there, add) = unsafe {
        let there: Option<IsInitialized> = of_python(c"Py_IsInitialized");
        let add: Option<AddPending> = of_python(c"Py_AddPendingCall");
        (there, add)
    };
    let (Some(there), Some(add)) = (there, add) else {
        TIMES.store(MOST, Ordering::Relaxed);
        return;
    };
    // SAFETY: needs no lock of the interpreter's.
    if unsafe { there() } == 0 || ASKED.swap(true, Ordering::AcqRel) {
        return;
    }
    TIMES.fetch_add(1, Ordering::Relaxed);
    // SAFETY: any thread may add a call, at any time while there is an interpreter.
    if unsafe { add(run, ptr::null_mut()) } != 0 {
        ASKED.store(false, Ordering::Release);
    }
}

fn left_alone() -> bool {
    std::env::var_os(FRAMEWORKS_VARIABLE).is_some_and(|value| value == "leave")
}

/// Runs in the interpreter's main thread, between two steps of the program.
unsafe extern "C" fn run(_: *mut c_void) -> c_int {
    ASKED.store(false, Ordering::Release);
    // SAFETY: as above.
    let run: Option<Run> = unsafe { of_python(c"PyRun_SimpleStringFlags") };
    let line = CString::new(format!("exec(compile({SOURCE:?}, 'gpumux', 'exec'), {{}})"));
    if let (Some(run), Ok(line)) = (run, line) {
        // SAFETY: this thread has the interpreter's lock. What the program goes on with is not touched.
        unsafe { run(line.as_ptr(), ptr::null_mut()) };
    }
    0
}

/// For `caches.py` alone.
#[unsafe(no_mangle)]
extern "C" fn gpumux_caches_are_given_back() {
    DONE.store(true, Ordering::Relaxed);
}

/// After a fork, in the child: functions of its parent are not called there.
pub(crate) fn in_child() {
    DONE.store(true, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// It is passed as a literal of Rust's, which is Python's too as long as it is ASCII.
    #[test]
    fn source_is_a_literal_in_both_languages() {
        assert!(SOURCE.is_ascii() && !SOURCE.contains(['\0', '\'', '\\']));
    }

    #[test]
    fn program_without_an_interpreter_is_asked_nothing() {
        look();
        assert_eq!(TIMES.load(Ordering::Relaxed), MOST);
        assert!(!ASKED.load(Ordering::Relaxed));
    }
}
