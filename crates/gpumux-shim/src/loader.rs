//! `dlsym`, exported in front of libc's, so that a program that loads libcuda or NVML by itself gets our
//! functions.
//!
//! libc's `dlsym` goes by its caller's address for `RTLD_NEXT` and `RTLD_DEFAULT`. Everything but the
//! driver's names must therefore *jump* there with the program's return address still in place,
//! which only assembly can guarantee.

use std::{
    arch::naked_asm,
    ffi::{CStr, c_char, c_void},
    ptr,
};

use crate::{ground::next, hooks, nvml};

/// libc's `dlsym`; for functions of the CUDA driver and of NVML, ours where there is one.
///
/// # Safety
/// As libc's.
#[unsafe(no_mangle)]
#[unsafe(naked)]
unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    #[cfg(target_arch = "x86_64")]
    naked_asm!(
        "cmp rdi, -1", // RTLD_NEXT: depends on the caller
        "je 2f",
        "test rsi, rsi",
        "je 2f",
        "cmp byte ptr [rsi], 'n'",
        "je 4f",
        "cmp byte ptr [rsi], 'c'",
        "jne 2f",
        "cmp byte ptr [rsi + 1], 'u'",
        "jne 2f",
        "mov al, byte ptr [rsi + 2]", // cuLaunch…, but not cuda…, cublas…
        "sub al, 'A'",
        "cmp al, 26",
        "jae 2f",
        "jmp {driver}",
        "4:",
        "cmp byte ptr [rsi + 1], 'v'", // nvmlDeviceGet…
        "jne 2f",
        "cmp byte ptr [rsi + 2], 'm'",
        "jne 2f",
        "cmp byte ptr [rsi + 3], 'l'",
        "jne 2f",
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
    );
    #[cfg(target_arch = "aarch64")]
    naked_asm!(
        "cmn x0, #1", // RTLD_NEXT: depends on the caller
        "b.eq 2f",
        "cbz x1, 2f",
        "ldrb w2, [x1]",
        "cmp w2, #'n'",
        "b.eq 4f",
        "cmp w2, #'c'",
        "b.ne 2f",
        "ldrb w2, [x1, #1]",
        "cmp w2, #'u'",
        "b.ne 2f",
        "ldrb w2, [x1, #2]", // cuLaunch…, but not cuda…, cublas…
        "sub w2, w2, #'A'",
        "cmp w2, #26",
        "b.hs 2f",
        "b {driver}",
        "4:",
        "ldrb w2, [x1, #1]",
        "cmp w2, #'v'", // nvmlDeviceGet…
        "b.ne 2f",
        "ldrb w2, [x1, #2]",
        "cmp w2, #'m'",
        "b.ne 2f",
        "ldrb w2, [x1, #3]",
        "cmp w2, #'l'",
        "b.ne 2f",
        "b {driver}",
        "2:",
        "stp x29, x30, [sp, #-32]!",
        "mov x29, sp",
        "stp x0, x1, [sp, #16]",
        "bl {real}",
        "mov x16, x0",
        "ldp x0, x1, [sp, #16]",
        "ldp x29, x30, [sp], #32",
        "cbz x16, 3f",
        "br x16",
        "3:",
        "mov x0, xzr",
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
    // SAFETY: what the real `dlsym` has just read.
    let name = unsafe { CStr::from_ptr(name) };
    if name.to_bytes().starts_with(b"nvml") {
        return nvml::found(handle, name, address);
    }
    // SAFETY: the real `dlsym`'s answer.
    unsafe { hooks::found(name, address) }
}

#[cfg(test)]
mod tests {
    // This program exports the `dlsym` above, so `libc::dlsym` is it.
    #[test]
    fn dlsym_of_other_names_searches_from_its_caller() {
        for name in [
            c"open", c"malloc", c"cuda", c"cuFoo", c"c", c"n", c"nvmlFoo", c"",
        ] {
            let next = |handle| {
                // SAFETY: a C string.
                unsafe { libc::dlsym(handle, name.as_ptr()) }
            };
            let there = ["open", "malloc"].contains(&name.to_str().unwrap());
            for handle in [libc::RTLD_NEXT, libc::RTLD_DEFAULT] {
                assert_eq!(!next(handle).is_null(), there, "{name:?}");
            }
        }
        let own = super::dlsym as *mut libc::c_void;
        // SAFETY: a C string.
        let next = unsafe { libc::dlsym(libc::RTLD_NEXT, c"dlsym".as_ptr()) };
        assert!(!next.is_null() && next != own, "libc's, not the caller's");
        // SAFETY: a C string.
        let all = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"dlsym".as_ptr()) };
        assert_eq!(all, own, "the program's comes first");
    }
}
