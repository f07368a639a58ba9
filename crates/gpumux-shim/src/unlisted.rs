//! Functions of a driver that is newer than the list of entry points: nothing is known of what they do.
//!
//! The program gets a stand-in for such a function (programs look many up that they never call). At its first call the
//! process's memory stays where it is from then on, and its work is no longer known to end: the call may touch any
//! memory, and may submit work. If memory is swapped out, the call waits until it is back. What only asks is let through.

use std::{
    ffi::{CStr, c_void},
    ptr,
    sync::{
        OnceLock,
        atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering},
    },
};

use gpumux_wire::{Shim, message::LONGEST_NAME};

use crate::{
    ground::{gate, lease, notice::say},
    memory::allocate,
    work,
};

/// Most functions that have a stand-in; what is looked up beyond counts as called.
const STAND_INS: usize = 64;

/// Families of functions that touch neither memory nor work.
const HARMLESS: [&str; 8] = [
    "cuCoredump",
    "cuDevSm",
    "cuDevResource",
    "cuDevice",
    "cuLogs",
    "cuProfiler",
    "cuTensorMap",
    "cuUserObject",
];

/// A function that has a stand-in: its address, and its name, which is never freed.
struct Known {
    real: AtomicPtr<c_void>,
    name: AtomicPtr<String>,
}

static KNOWN: [Known; STAND_INS] = [const {
    Known {
        real: AtomicPtr::new(ptr::null_mut()),
        name: AtomicPtr::new(ptr::null_mut()),
    }
}; STAND_INS];
/// How many of them there are.
static USED: AtomicUsize = AtomicUsize::new(0);
/// One was called.
static CALLED: AtomicBool = AtomicBool::new(false);
/// The first that was.
static FIRST: OnceLock<String> = OnceLock::new();

/// Whether a function of this name may touch memory, or submit work.
fn concerns(name: &str) -> bool {
    let asks = name.contains("Get") || name.contains("Query");
    let harmless = asks || HARMLESS.iter().any(|start| name.starts_with(start));
    name.starts_with("cuMem") || name.starts_with("cu") && !harmless
}

/// What the program gets for a function of libcuda that is not listed.
pub(crate) fn stand_in(name: &CStr, real: *mut c_void) -> *mut c_void {
    let name = name.to_string_lossy();
    if !concerns(&name) {
        return real;
    }
    let used = USED.load(Ordering::Acquire).min(STAND_INS);
    let known = KNOWN[..used].iter();
    let mut known = known.map(|it| it.real.load(Ordering::Acquire));
    let place = known.position(|it| it == real).or_else(|| {
        let place = USED.fetch_add(1, Ordering::AcqRel);
        let known = KNOWN.get(place)?;
        known.real.store(real, Ordering::Release);
        let name = Box::into_raw(Box::new(name.clone().into_owned()));
        known.name.store(name, Ordering::Release);
        Some(place)
    });
    match place.and_then(code) {
        Some(code) => code.cast_mut().cast(),
        None => {
            called(&name);
            real
        }
    }
}

/// The program calls the function of this place: where that is.
extern "C" fn enter(place: usize) -> *mut c_void {
    let known = &KNOWN[place];
    if !CALLED.load(Ordering::Acquire) {
        // SAFETY: null, or a name that is never freed.
        let name = unsafe { known.name.load(Ordering::Acquire).as_ref() };
        called(name.map_or("an unlisted function", String::as_str));
    }
    known.real.load(Ordering::Acquire)
}

/// Nothing of this process moves any more, and its work never ends, as far as is known.
#[cold]
fn called(name: &str) {
    // Inside the gate, so that all memory is there and does not move meanwhile.
    gate::through(|| {
        if CALLED.swap(true, Ordering::AcqRel) {
            return;
        }
        FIRST.get_or_init(|| name.to_owned());
        allocate::stay();
        work::lose_track();
        if let Some(message) = message() {
            lease::tell(message);
        }
    });
    say(format_args!(
        "{name} is unknown to this version of gpumux: from now on this program's memory stays on the device, and it counts as \
         busy; a newer gpumux may know it"
    ));
}

/// What is sent to the daemon about it, if it understands that.
pub(crate) fn message() -> Option<Shim> {
    let mut name = FIRST.get()?.clone();
    name.truncate(name.floor_char_boundary(LONGEST_NAME));
    lease::knows(2).then_some(Shim::Unlisted { name })
}

/// Whether one was called.
#[cfg(test)]
pub(crate) fn was_called() -> bool {
    CALLED.load(Ordering::Acquire)
}

/// The code of a place's stand-in.
fn code(place: usize) -> Option<*const ()> {
    CODE.get(place).map(|code| *code as *const ())
}

/// Calls `enter` with all registers that may carry arguments kept, then jumps to the function: the arguments on the
/// stack stay where they are.
#[unsafe(naked)]
unsafe extern "C" fn through<const PLACE: usize>() {
    #[cfg(target_arch = "x86_64")]
    std::arch::naked_asm!(
        "push rbp",
        "mov rbp, rsp",
        "push rdi",
        "push rsi",
        "push rdx",
        "push rcx",
        "push r8",
        "push r9",
        "push rax",
        "push r10",
        "sub rsp, 128",
        "movups [rsp], xmm0",
        "movups [rsp + 16], xmm1",
        "movups [rsp + 32], xmm2",
        "movups [rsp + 48], xmm3",
        "movups [rsp + 64], xmm4",
        "movups [rsp + 80], xmm5",
        "movups [rsp + 96], xmm6",
        "movups [rsp + 112], xmm7",
        "mov edi, {place}",
        "call {enter}",
        "mov r11, rax",
        "movups xmm0, [rsp]",
        "movups xmm1, [rsp + 16]",
        "movups xmm2, [rsp + 32]",
        "movups xmm3, [rsp + 48]",
        "movups xmm4, [rsp + 64]",
        "movups xmm5, [rsp + 80]",
        "movups xmm6, [rsp + 96]",
        "movups xmm7, [rsp + 112]",
        "add rsp, 128",
        "pop r10",
        "pop rax",
        "pop r9",
        "pop r8",
        "pop rcx",
        "pop rdx",
        "pop rsi",
        "pop rdi",
        "pop rbp",
        "jmp r11",
        place = const PLACE,
        enter = sym enter,
    );
    #[cfg(target_arch = "aarch64")]
    std::arch::naked_asm!(
        "stp x29, x30, [sp, #-224]!",
        "mov x29, sp",
        "stp x0, x1, [sp, #16]",
        "stp x2, x3, [sp, #32]",
        "stp x4, x5, [sp, #48]",
        "stp x6, x7, [sp, #64]",
        "str x8, [sp, #80]",
        "stp q0, q1, [sp, #96]",
        "stp q2, q3, [sp, #128]",
        "stp q4, q5, [sp, #160]",
        "stp q6, q7, [sp, #192]",
        "mov x0, #{place}",
        "bl {enter}",
        "mov x16, x0",
        "ldp x0, x1, [sp, #16]",
        "ldp x2, x3, [sp, #32]",
        "ldp x4, x5, [sp, #48]",
        "ldp x6, x7, [sp, #64]",
        "ldr x8, [sp, #80]",
        "ldp q0, q1, [sp, #96]",
        "ldp q2, q3, [sp, #128]",
        "ldp q4, q5, [sp, #160]",
        "ldp q6, q7, [sp, #192]",
        "ldp x29, x30, [sp], #224",
        "br x16",
        place = const PLACE,
        enter = sym enter,
    )
}

macro_rules! places {
    ($($eight:literal)*) => {
        [$(
            through::<{ 8 * $eight }>, through::<{ 8 * $eight + 1 }>, through::<{ 8 * $eight + 2 }>,
            through::<{ 8 * $eight + 3 }>, through::<{ 8 * $eight + 4 }>, through::<{ 8 * $eight + 5 }>,
            through::<{ 8 * $eight + 6 }>, through::<{ 8 * $eight + 7 }>,
        )*]
    };
}

static CODE: [unsafe extern "C" fn(); STAND_INS] = places!(0 1 2 3 4 5 6 7);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn questions_and_harmless_families_are_let_through() {
        for name in [
            "cuMemcpyFooAsync",
            "cuMemGetFoo",
            "cuLaunchFoo",
            "cuFoo",
            "cuGraphAddFooNode",
        ] {
            assert!(concerns(name), "{name}");
        }
        for name in [
            "cuDeviceFoo",
            "cuFooGetBar",
            "cuStreamQueryFoo",
            "cuLogsFoo",
        ] {
            assert!(!concerns(name), "{name}");
        }
    }

    #[test]
    fn a_call_through_a_stand_in_keeps_every_argument() {
        type Many = extern "C" fn(u64, u64, u64, u64, u64, u64, u64, f64, u64, f32) -> u64;
        extern "C" fn many(
            a: u64,
            b: u64,
            c: u64,
            d: u64,
            e: u64,
            f: u64,
            g: u64,
            x: f64,
            h: u64,
            y: f32,
        ) -> u64 {
            assert_eq!((x, y), (0.5, 0.25));
            [a, b, c, d, e, f, g, h]
                .iter()
                .fold(0, |sum, it| sum * 10 + it)
        }
        let real = many as *mut c_void;
        let stand_in = stand_in(c"cuManyAsync", real);
        assert_ne!(stand_in, real);
        assert_eq!(
            super::stand_in(c"cuManyAsync", real),
            stand_in,
            "one for each function"
        );
        assert!(!was_called(), "looking up is no call");
        // SAFETY: the stand-in has the function's signature.
        let call: Many = unsafe { std::mem::transmute(stand_in) };
        assert_eq!(call(1, 2, 3, 4, 5, 6, 7, 0.5, 8, 0.25), 12_345_678);
        assert!(was_called());
        assert_eq!(call(1, 2, 3, 4, 5, 6, 7, 0.5, 8, 0.25), 12_345_678);
    }
}
