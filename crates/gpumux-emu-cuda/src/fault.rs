//! Faults on demand: `GPUMUX_EMU_FAULT` names what shall go wrong in a process, and at which of its calls.
//!
//! `kind@n`, several with commas between: the n-th allocation, launch, copy, RM call or driver call of the process, counted
//! from 1. Nothing is drawn: the same program fails in the same place each time.

use std::sync::{
    LazyLock,
    atomic::{AtomicU64, Ordering},
};

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
    /// The process is killed when it makes a driver call.
    Kill,
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

const KINDS: [(&str, Kind, At); 8] = [
    ("out-of-memory", Kind::OutOfMemory, At::Allocation),
    ("illegal-address", Kind::IllegalAddress, At::Launch),
    ("trap", Kind::Trap, At::Launch),
    ("endless", Kind::Endless, At::Launch),
    ("device-lost", Kind::DeviceLost, At::Launch),
    ("stalled-copy", Kind::StalledCopy, At::Copy),
    ("control", Kind::Control, At::Control),
    ("kill", Kind::Kill, At::Call),
];

/// Faults that shall be, and calls so far.
struct Plan {
    faults: Vec<(Kind, At, u64)>,
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
                "gpumux: {VARIABLE}={text} is no list of faults: use KIND@N with one of {kinds}"
            );
            None
        }
    }
});

fn parse(text: &str) -> Option<Vec<(Kind, At, u64)>> {
    let one = |text: &str| {
        let (name, number) = text.trim().split_once('@')?;
        let (_, kind, at) = KINDS.iter().find(|(known, ..)| *known == name)?;
        let number = number.parse().ok().filter(|number| *number > 0)?;
        Some((*kind, *at, number))
    };
    text.split(',').map(one).collect()
}

/// Counts one; the fault that is due.
pub(crate) fn due(at: At) -> Option<Kind> {
    let plan = PLAN.as_ref()?;
    let number = plan.counts[at as usize].fetch_add(1, Ordering::Relaxed) + 1;
    let found = plan
        .faults
        .iter()
        .find(|fault| fault.1 == at && fault.2 == number);
    found.map(|fault| fault.0)
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
        assert_eq!(
            parse("out-of-memory@3, kill@1"),
            Some(vec![
                (Kind::OutOfMemory, At::Allocation, 3),
                (Kind::Kill, At::Call, 1)
            ])
        );
        for wrong in ["", "trap", "trap@", "trap@0", "nothing@1", "trap@1;kill@2"] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
    }
}
