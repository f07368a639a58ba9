//! `dlsym`, exported in front of libc's, so that a program that loads libcuda by itself gets our
//! functions.
//!
//! libc's `dlsym` goes by its caller's address for `RTLD_NEXT` and `RTLD_DEFAULT`. Everything but the
//! driver's names must therefore *jump* there with the program's return address still in place,
//! which only assembly can promise.

#![cfg(target_arch = "x86_64")]

use std::{
    arch::naked_asm,
    ffi::{CStr, c_char, c_void},
    ptr,
};

use crate::{hooks, next};

/// libc's `dlsym`; for functions of the CUDA driver, ours where there is one.
///
/// # Safety
/// As libc's.
#[unsafe(no_mangle)]
#[unsafe(naked)]
unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    naked_asm!(
        "cmp rdi, -1", // RTLD_NEXT: depends on the caller
        "je 2f",
        "test rsi, rsi",
        "je 2f",
        "cmp byte ptr [rsi], 'c'",
        "jne 2f",
        "cmp byte ptr [rsi + 1], 'u'",
        "jne 2f",
        "mov al, byte ptr [rsi + 2]", // cuLaunch…, but not cuda…, cublas…
        "sub al, 'A'",
        "cmp al, 26",
        "jae 2f",
        "jmp {driver}",
        "2:",
        "push rdi",
        "push rsi",
        "sub rsp, 8",
        "call {real}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        "test rax, rax",
        "je 3f",
        "jmp rax",
        "3:",
        "ret",
        driver = sym driver_function,
        real = sym real,
    )
}

/// The address of libc's `dlsym`.
extern "C" fn real() -> *const c_void {
    next::dlsym().map_or(ptr::null(), |dlsym| dlsym as *const c_void)
}

unsafe extern "C" fn driver_function(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    let Some(dlsym) = next::dlsym() else {
        return ptr::null_mut();
    };
    // SAFETY: the program's own call.
    let address = unsafe { dlsym(handle, name) };
    if address.is_null() {
        return address;
    }
    // SAFETY: the real `dlsym`'s answer, and what it has just read.
    unsafe { hooks::found(CStr::from_ptr(name), address) }
}
