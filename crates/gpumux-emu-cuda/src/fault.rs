//! Faults on demand: `GPUMUX_EMU_FAULT="kill cuMemUnmap 2 gpumux"` kills the process when a thread of that name, other than
//! the first, calls that function the second time. `stop` stops the process there; `fail` makes that call answer *out of
//! memory* without doing anything. So whoever uses the device can be tested at every step of what it does.

use std::{
    ffi::c_int,
    sync::{
        OnceLock,
        atomic::{AtomicU32, Ordering},
    },
};

use rustix::process::{Signal, getpid, kill_process};

use crate::error::CuError;

/// The variable.
const VARIABLE: &str = "GPUMUX_EMU_FAULT";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Kill,
    Stop,
    Fail,
}

#[derive(Debug)]
struct Fault {
    kind: Kind,
    function: String,
    call: u32,
    thread: String,
    calls: AtomicU32,
}

fn parse(text: &str) -> Option<Fault> {
    let mut words = text.split_whitespace();
    let kind = match words.next()? {
        "kill" => Kind::Kill,
        "stop" => Kind::Stop,
        "fail" => Kind::Fail,
        _ => return None,
    };
    Some(Fault {
        kind,
        function: words.next()?.to_owned(),
        call: words.next()?.parse().ok()?,
        thread: words.next()?.to_owned(),
        calls: AtomicU32::new(0),
    })
}

/// A call of an exported function begins; what it answers if it is to fail.
#[inline]
pub(crate) fn at(function: &str) -> Option<c_int> {
    static FAULT: OnceLock<Option<Fault>> = OnceLock::new();
    let fault = FAULT.get_or_init(|| {
        let text = std::env::var(VARIABLE).ok()?;
        let fault = parse(&text);
        if fault.is_none() {
            eprintln!("{VARIABLE}: use it as in `kill cuMemUnmap 2 gpumux`, not `{text}`");
        }
        fault
    });
    let fault = fault.as_ref()?;
    if fault.function != function || !fault.is_of_this_thread() {
        return None;
    }
    let now = fault.calls.fetch_add(1, Ordering::Relaxed) + 1;
    let signal = match fault.kind {
        Kind::Fail => return (now == fault.call).then_some(CuError::OUT_OF_MEMORY.0),
        Kind::Kill => Signal::KILL,
        Kind::Stop => Signal::STOP,
    };
    if now == fault.call {
        let _ = kill_process(getpid(), signal);
    }
    None
}

impl Fault {
    fn is_of_this_thread(&self) -> bool {
        let is_first = rustix::thread::gettid() == getpid();
        let name = std::fs::read_to_string("/proc/thread-self/comm").unwrap_or_default();
        !is_first && name.trim_end() == self.thread
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_is_four_words() {
        let fault = parse("stop cuMemMap 3 gpumux").unwrap();
        assert_eq!(
            (fault.kind, fault.function.as_str(), fault.call),
            (Kind::Stop, "cuMemMap", 3)
        );
        for wrong in [
            "",
            "kill",
            "burn cuMemMap 1 x",
            "kill cuMemMap one x",
            "kill cuMemMap 1",
        ] {
            assert!(parse(wrong).is_none(), "{wrong}");
        }
    }
}
