//! Faults on demand: `GPUMUX_EMU_FAULT` names what shall go wrong in a process, and at which of its calls.
//!
//! `kind@n`, several with commas between: the n-th allocation, launch, copy, RM call or driver call of the process, counted
//! from 1. Nothing is drawn: the same program fails in the same place each time. Of driver calls, `kill@n:function:thread` counts
//! only those of one function, and if a thread is named, by threads of that name other than the first.

use std::{
    ffi::c_int,
    sync::{
        LazyLock,
        atomic::{AtomicU64, Ordering},
    },
};

use rustix::process::{Signal, getpid, kill_process};

use crate::error::CuError;

/// The variable.
const VARIABLE: &str = "GPUMUX_EMU_FAULT";

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// An allocation of device memory fails.
    OutOfMemory,
    /// A launch accesses an illegal address, or traps.
    IllegalAddress,
    Trap,
    /// A launch never ends.
    Endless,
    /// The device is lost at a launch.
    DeviceLost,
    /// A copy never ends.
    StalledCopy,
    /// An RM call fails with `EIO`.
    Control,
    /// The process is killed, or stopped, when it makes a driver call.
    Kill,
    Stop,
    /// A driver call does nothing and answers *out of memory*.
    Fail,
}

/// What is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum At {
    Allocation,
    Launch,
    Copy,
    Control,
    Call,
}

const KINDS: [(&str, Kind, At); 10] = [
    ("out-of-memory", Kind::OutOfMemory, At::Allocation),
    ("illegal-address", Kind::IllegalAddress, At::Launch),
    ("trap", Kind::Trap, At::Launch),
    ("endless", Kind::Endless, At::Launch),
    ("device-lost", Kind::DeviceLost, At::Launch),
    ("stalled-copy", Kind::StalledCopy, At::Copy),
    ("control", Kind::Control, At::Control),
    ("kill", Kind::Kill, At::Call),
    ("stop", Kind::Stop, At::Call),
    ("fail", Kind::Fail, At::Call),
];

/// A fault that shall be.
#[derive(Debug)]
struct Fault {
    kind: Kind,
    at: At,
    number: u64,
    /// Only calls of this function count, and of threads of this name.
    function: Option<String>,
    thread: Option<String>,
    /// Those so far.
    calls: AtomicU64,
}

/// Faults that shall be, and calls so far.
struct Plan {
    faults: Vec<Fault>,
    counts: [AtomicU64; 5],
}

static PLAN: LazyLock<Option<Plan>> = LazyLock::new(|| {
    let text = std::env::var(VARIABLE)
        .ok()
        .filter(|text| !text.is_empty())?;
    match parse(&text) {
        Some(faults) => Some(Plan {
            faults,
            counts: Default::default(),
        }),
        None => {
            let kinds = KINDS.map(|(name, ..)| name).join(", ");
            eprintln!(
                "gpumux: {VARIABLE}={text} is no list of faults: use KIND@N, or KIND@N:FUNCTION:THREAD for calls, with one of {kinds}"
            );
            None
        }
    }
});

fn parse(text: &str) -> Option<Vec<Fault>> {
    let one = |text: &str| {
        let (name, rest) = text.trim().split_once('@')?;
        let (_, kind, at) = KINDS.iter().find(|(known, ..)| *known == name)?;
        let mut words = rest.split(':');
        let number = words.next()?.parse().ok().filter(|number| *number > 0)?;
        let (function, thread) = (words.next(), words.next());
        if words.next().is_some() || (function.is_some() && *at != At::Call) {
            return None;
        }
        Some(Fault {
            kind: *kind,
            at: *at,
            number,
            function: function.map(str::to_owned),
            thread: thread.map(str::to_owned),
            calls: AtomicU64::new(0),
        })
    };
    text.split(',').map(one).collect()
}

impl Plan {
    fn count(&self, at: At) -> u64 {
        self.counts[at as usize].fetch_add(1, Ordering::Relaxed) + 1
    }
}

impl Fault {
    /// Whether it is due at this call, the process's `number`-th.
    fn is_due(&self, function: &str, number: u64) -> bool {
        let Some(of) = &self.function else {
            return self.number == number;
        };
        of == function
            && self.thread.as_deref().is_none_or(is_this_thread)
            && self.calls.fetch_add(1, Ordering::Relaxed) + 1 == self.number
    }
}

/// Whether this thread has that name, and is not the first.
fn is_this_thread(name: &str) -> bool {
    let is_first = rustix::thread::gettid() == getpid();
    let own = std::fs::read_to_string("/proc/thread-self/comm").unwrap_or_default();
    !is_first && own.trim_end() == name
}

/// Counts one; the fault that is due.
pub(crate) fn due(at: At) -> Option<Kind> {
    let plan = PLAN.as_ref()?;
    let number = plan.count(at);
    let mut faults = plan.faults.iter();
    let found = faults.find(|fault| fault.at == at && fault.number == number);
    found.map(|fault| fault.kind)
}

/// A driver call begins: what it answers if it is to fail.
pub(crate) fn call(function: &str) -> Option<c_int> {
    let plan = PLAN.as_ref()?;
    let number = plan.count(At::Call);
    let calls = plan.faults.iter().filter(|fault| fault.at == At::Call);
    for fault in calls.filter(|fault| fault.is_due(function, number)) {
        let signal = match fault.kind {
            Kind::Kill => Signal::KILL,
            Kind::Stop => Signal::STOP,
            _ => return Some(CuError::OUT_OF_MEMORY.0),
        };
        let _ = kill_process(getpid(), signal);
    }
    None
}

impl Kind {
    /// What a context ends with.
    pub(crate) fn code(self) -> CuError {
        match self {
            Self::OutOfMemory => CuError::OUT_OF_MEMORY,
            Self::IllegalAddress => CuError::ILLEGAL_ADDRESS,
            Self::DeviceLost => CuError::DEVICE_UNAVAILABLE,
            _ => CuError::LAUNCH_FAILED,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_named_and_numbered() {
        let faults = parse("out-of-memory@3, kill@1, stop@2:cuMemMap:gpumux").unwrap();
        let short = |it: &Fault| (it.kind, it.at, it.number);
        assert_eq!(
            faults.iter().map(short).collect::<Vec<_>>(),
            [
                (Kind::OutOfMemory, At::Allocation, 3),
                (Kind::Kill, At::Call, 1),
                (Kind::Stop, At::Call, 2),
            ]
        );
        assert_eq!(faults[2].function.as_deref(), Some("cuMemMap"));
        assert_eq!(faults[2].thread.as_deref(), Some("gpumux"));
        for wrong in [
            "",
            "trap",
            "trap@",
            "trap@0",
            "trap@1:cuMemMap",
            "nothing@1",
            "trap@1;kill@2",
            "kill@1:cuMemMap:x:y",
        ] {
            assert!(parse(wrong).is_none(), "{wrong}");
        }
    }

    #[test]
    fn calls_of_one_function_are_counted_by_themselves() {
        let faults = parse("kill@2:cuMemMap").unwrap();
        assert!(!faults[0].is_due("cuMemMap", 1));
        assert!(!faults[0].is_due("cuMemUnmap", 2));
        assert!(faults[0].is_due("cuMemMap", 3));
    }
}
