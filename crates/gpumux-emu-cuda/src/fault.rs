//! Faults on demand: `GPUMUX_EMU_FAULT` names what shall go wrong in a process, and at which of its calls.
//!
//! Nothing is drawn: the same program fails in the same place each time. A named thread is never the process's first.

use std::{
    ffi::c_int,
    fs::File,
    path::Path,
    sync::{
        LazyLock,
        atomic::{AtomicU64, Ordering},
    },
    thread::sleep,
    time::Duration,
};

pub(crate) use gpumux_emu::fault::{At, Kind};
use gpumux_emu::fault::{Fault, FaultError, VARIABLE};
use rustix::process::{Signal, getpid, kill_process};

use crate::error::CuError;

/// The file that a delayed call makes.
const DELAY_FILE: &str = "GPUMUX_EMU_DELAY_FILE";
/// How often it is looked for.
const LOOK: Duration = Duration::from_millis(1);

/// A fault that shall be, and the calls so far that count for it alone.
#[derive(Debug)]
struct Counted {
    fault: Fault,
    calls: AtomicU64,
}

/// Faults that shall be, and calls so far.
struct Plan {
    faults: Vec<Counted>,
    counts: [AtomicU64; 5],
}

static PLAN: LazyLock<Option<Plan>> = LazyLock::new(|| {
    let text = std::env::var(VARIABLE)
        .ok()
        .filter(|text| !text.is_empty())?;
    match parse(&text) {
        Ok(faults) => Some(Plan {
            faults,
            counts: Default::default(),
        }),
        Err(error) => {
            eprintln!("gpumux: {VARIABLE}={text} is ignored: {error}");
            None
        }
    }
});

fn parse(text: &str) -> Result<Vec<Counted>, FaultError> {
    let one = |text: &str| {
        Ok(Counted {
            fault: text.parse()?,
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

impl Counted {
    /// Whether it is due at this call, the process's `number`-th.
    fn is_due(&self, function: &str, number: u64) -> bool {
        let fault = &self.fault;
        let Some(of) = &fault.function else {
            return fault.number == number;
        };
        of == function
            && fault.thread.as_deref().is_none_or(is_this_thread)
            && self.calls.fetch_add(1, Ordering::Relaxed) + 1 == fault.number
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
    let mut faults = plan.faults.iter().map(|it| &it.fault);
    let found = faults.find(|fault| fault.at == at && fault.number == number);
    found.map(|fault| fault.kind)
}

/// A driver call begins: what it answers if it is to fail.
pub(crate) fn call(function: &str) -> Option<c_int> {
    let plan = PLAN.as_ref()?;
    let number = plan.count(At::Call);
    let calls = plan.faults.iter().filter(|it| it.fault.at == At::Call);
    let fails = strike(calls.filter(|it| it.is_due(function, number)));
    fails.then_some(CuError::OUT_OF_MEMORY.0)
}

/// A call of NVML that a fault names begins: whether it is to fail. Calls of the driver that have no name in the fault are counted
/// without it.
pub(crate) fn nvml_call(function: &str) -> bool {
    let faults = PLAN.iter().flat_map(|plan| &plan.faults);
    let named = faults.filter(|it| it.fault.at == At::Call && it.fault.function.is_some());
    strike(named.filter(|it| it.is_due(function, 0)))
}

/// A call begins for which these are due: whether it is to fail. It counts for all of them.
fn strike<'a>(due: impl Iterator<Item = &'a Counted>) -> bool {
    let mut fails = false;
    for it in due {
        match it.fault.kind {
            Kind::Delay => await_removal(),
            Kind::Kill => drop(kill_process(getpid(), Signal::KILL)),
            Kind::Stop => drop(kill_process(getpid(), Signal::STOP)),
            _ => fails = true,
        }
    }
    fails
}

/// Makes the file that the process is to wait with, and waits until it is gone.
fn await_removal() {
    let Some(file) = std::env::var_os(DELAY_FILE) else {
        eprintln!(
            "gpumux: {VARIABLE} has a delay, which needs {DELAY_FILE}: the file that the call makes"
        );
        return;
    };
    let file = Path::new(&file);
    if let Err(error) = File::create(file) {
        eprintln!(
            "gpumux: cannot make {DELAY_FILE}={}: {error}",
            file.display()
        );
    }
    while file.exists() {
        sleep(LOOK);
    }
}

/// What a context ends with.
pub(crate) fn code(kind: Kind) -> CuError {
    match kind {
        Kind::OutOfMemory => CuError::OUT_OF_MEMORY,
        Kind::IllegalAddress => CuError::ILLEGAL_ADDRESS,
        Kind::DeviceLost => CuError::DEVICE_UNAVAILABLE,
        _ => CuError::LAUNCH_FAILED,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_of_one_function_are_counted_by_themselves() {
        let faults = parse("kill@2:cuMemMap").unwrap();
        assert!(!faults[0].is_due("cuMemMap", 1));
        assert!(!faults[0].is_due("cuMemUnmap", 2));
        assert!(faults[0].is_due("cuMemMap", 3));
    }

    #[test]
    fn call_that_fails_counts_for_later_faults() {
        let faults = parse("fail@1:cuMemMap,fail@2:cuMemMap").unwrap();
        let fails = |_| strike(faults.iter().filter(|it| it.is_due("cuMemMap", 0)));
        assert_eq!([1, 2, 3].map(fails), [true, true, false]);
    }
}
