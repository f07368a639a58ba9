//! Faults on demand: how a user writes what shall go wrong in a program, and at which of its calls.

use std::str::FromStr;

/// The environment variable that names a process's faults, with commas between.
pub const VARIABLE: &str = "GPUMUX_EMU_FAULT";

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// An allocation of device memory fails.
    OutOfMemory,
    /// A launch accesses an illegal address.
    IllegalAddress,
    /// A launch traps.
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
    /// It is stopped.
    Stop,
    /// A driver call does nothing and answers *out of memory*.
    Fail,
    /// A driver call makes a file, and goes on when the file is gone.
    Delay,
}

/// What is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum At {
    /// Allocations of device memory.
    Allocation,
    /// Launches of kernels.
    Launch,
    /// Copies.
    Copy,
    /// RM calls.
    Control,
    /// Driver calls.
    Call,
}

const KINDS: [(&str, Kind, At); 11] = [
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
    ("delay", Kind::Delay, At::Call),
];

/// A fault that shall be: `KIND@N`, the N-th call of its kind in a process, counted from 1. Of driver calls, `KIND@N:FUNCTION:THREAD`
/// counts only those of one function, and if a thread is named, those of threads of that name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// What goes wrong.
    pub kind: Kind,
    /// At which calls.
    pub at: At,
    /// At which of them.
    pub number: u64,
    /// Only calls of this function count.
    pub function: Option<String>,
    /// Only calls of threads of this name count.
    pub thread: Option<String>,
}

/// Why a text is not a fault.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum FaultError {
    /// No such kind.
    #[error("no fault is called `{0}`: use one of {names}", names = KINDS.map(|(name, ..)| name).join(", "))]
    Kind(String),
    /// No call is numbered.
    #[error("use {0}@N, where N is the number of the call, from 1")]
    Number(&'static str),
    /// It happens at other calls than driver calls, or more follows.
    #[error("use {0}@N: calls of one function (KIND@N:FUNCTION:THREAD) are counted for {names} only", names = of_calls())]
    Function(&'static str),
}

fn of_calls() -> String {
    let calls = KINDS.iter().filter(|(.., at)| *at == At::Call);
    calls.map(|(name, ..)| *name).collect::<Vec<_>>().join(", ")
}

impl FromStr for Fault {
    type Err = FaultError;

    fn from_str(text: &str) -> Result<Self, FaultError> {
        let text = text.trim();
        let (name, rest) = text.split_once('@').unwrap_or((text, ""));
        let known = KINDS.iter().find(|(known, ..)| *known == name);
        let &(name, kind, at) = known.ok_or_else(|| FaultError::Kind(name.to_owned()))?;
        let mut words = rest.split(':');
        let number = words.next().and_then(|number| number.parse().ok());
        let number = number
            .filter(|number| *number > 0)
            .ok_or(FaultError::Number(name))?;
        let (function, thread) = (words.next(), words.next());
        if words.next().is_some() || (function.is_some() && at != At::Call) {
            return Err(FaultError::Function(name));
        }
        Ok(Self {
            kind,
            at,
            number,
            function: function.map(str::to_owned),
            thread: thread.map(str::to_owned),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_named_and_numbered() {
        let fault = |text: &str| text.parse::<Fault>().unwrap();
        let short = |text: &str| {
            let it = fault(text);
            (it.kind, it.at, it.number, it.function, it.thread)
        };
        assert_eq!(
            short(" out-of-memory@3"),
            (Kind::OutOfMemory, At::Allocation, 3, None, None)
        );
        assert_eq!(short("kill@1"), (Kind::Kill, At::Call, 1, None, None));
        let (function, thread) = (Some("cuMemMap".into()), Some("gpumux-mover".into()));
        assert_eq!(
            short("stop@2:cuMemMap:gpumux-mover"),
            (Kind::Stop, At::Call, 2, function, thread)
        );
    }

    #[test]
    fn a_wrong_fault_has_the_way_out() {
        for (wrong, message) in [
            ("", "no fault is called ``: use one of out-of-memory, "),
            ("nothing@1", "no fault is called `nothing`: use one of"),
            ("trap", "use trap@N, where"),
            ("trap@", "use trap@N, where"),
            ("trap@0", "use trap@N, where"),
            ("trap@1;kill@2", "use trap@N, where"),
            ("trap@1:cuMemMap", "for kill, stop, fail, delay only"),
            ("kill@1:cuMemMap:x:y", "KIND@N:FUNCTION:THREAD"),
        ] {
            let error = wrong.parse::<Fault>().unwrap_err().to_string();
            assert!(error.contains(message), "{wrong}: {error}");
        }
    }
}
