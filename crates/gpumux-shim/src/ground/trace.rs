//! `GPUMUX_TRACE=calls`: prints every listed call of the driver API, for diagnosis.

use std::{
    fmt::{Debug, Write},
    sync::atomic::{AtomicU8, Ordering},
};

use crate::ground::{driver::CUresult, guard, notice::say};

/// Whether `GPUMUX_TRACE` names `what`.
pub(crate) fn wants(what: &str) -> bool {
    std::env::var("GPUMUX_TRACE").is_ok_and(|value| value.split(',').any(|it| it == what))
}

/// Whether calls are printed. One load, once it is known.
#[inline]
pub(crate) fn calls() -> bool {
    static ON: AtomicU8 = AtomicU8::new(0);
    match ON.load(Ordering::Relaxed) {
        0 => {
            let on = wants("calls");
            ON.store(1 + u8::from(on), Ordering::Relaxed);
            on
        }
        state => state == 2,
    }
}

/// A call has returned.
#[cold]
pub(crate) fn called(name: &str, arguments: &[(&str, &dyn Debug)], result: CUresult) {
    guard::enter(|| {
        let mut line = format!("call: {name}(");
        for (n, (argument, value)) in arguments.iter().enumerate() {
            let comma = if n == 0 { "" } else { ", " };
            let _ = write!(line, "{comma}{argument}: {value:x?}");
        }
        say(format_args!("{line}) = {result}"));
    });
}
