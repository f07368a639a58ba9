//! How tenants begin and end: events, ends, signals, and what is remembered for names.

use std::fmt;

use gpumux_core::{SpecChange, quantity::Size};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Something that happened to a tenant or a group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Event {
    /// How many there were so far in the daemon's life, this one too.
    pub number: u64,
    /// Milliseconds since 1970.
    pub at_ms: u64,
    /// What happened.
    pub kind: EventKind,
    /// The tenant; none: it concerns a group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
    /// The tenant's user.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    /// Details, for people.
    pub text: String,
}

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum EventKind {
    /// A tenant was made.
    Started,
    /// A tenant ended.
    Ended,
    /// A tenant was not admitted.
    Refused,
    /// A tenant's settings changed.
    Resized,
    /// Memory of a tenant moved to the host.
    Swapped,
    /// Memory of a tenant came back.
    Returned,
    /// A tenant moved to another device.
    Moved,
    /// A tenant reached its memory limit.
    Limit,
    /// A fault ended all processes in a group.
    Fault,
    /// A group was started again after a fault.
    Restart,
    /// A process of a tenant undid a control.
    Tampered,
    /// A stopped process of a tenant has memory that others are guaranteed.
    Stopped,
}

gpumux_core::names!(
    EventKind: Started = "started", Ended = "ended", Refused = "refused", Resized = "resized", Swapped = "swapped", Returned = "returned",
    Moved = "moved", Limit = "limit", Fault = "fault", Restart = "restart", Tampered = "tampered",
    Stopped = "stopped"
);

/// How a program ended; neither code nor signal: that is not known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Exit {
    /// Its exit code.
    pub code: Option<i32>,
    /// The signal that ended it.
    pub signal: Option<i32>,
}

impl Exit {
    /// As `wait(2)` reports it.
    pub const fn of_status(status: i32) -> Self {
        match status & 0x7f {
            0 => Self {
                code: Some(status >> 8 & 0xff),
                signal: None,
            },
            signal => Self {
                code: None,
                signal: Some(signal),
            },
        }
    }

    /// The exit code that a shell shows, if the end is known.
    pub fn shell_code(self) -> Option<u8> {
        let code = self.code.or(self.signal.map(|signal| 128 + signal));
        code.and_then(|code| u8::try_from(code).ok())
    }
}

/// A tenant that has ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Ended {
    /// Its name.
    pub name: String,
    /// Its user's number.
    pub uid: u32,
    /// Its user's name, or number where the system has no name for it.
    pub user: String,
    /// Its class.
    pub class: String,
    /// Its command.
    pub command: String,
    /// When it began, in seconds since 1970.
    pub since: u64,
    /// When it ended, in seconds since 1970.
    pub at: u64,
    /// How its program ended.
    pub exit: Exit,
    /// Why it ended, for people.
    pub reason: String,
    /// It was killed for memory, reached its memory limit, or output of it was lost.
    pub noteworthy: bool,
    /// The file of its output, if it ran detached.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub log: Option<String>,
}

/// What is known of a program's end that was reported.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Reported {
    /// Why it ended, for people.
    pub reason: String,
    /// It was killed for memory, reached its memory limit, or output of it was lost: its user should see the reason.
    pub noteworthy: bool,
}

/// Output of a program that runs detached which its parent could not write.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct LostOutput {
    /// How many bytes, since the program began.
    pub bytes: u64,
    /// Why, in the words of the system.
    pub why: String,
}

impl fmt::Display for LostOutput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of its output lost ({})", Size(self.bytes), self.why)
    }
}

/// A signal for a tenant's program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewSignal {
    /// Its number, 1 to 31: real-time signals are not sent. 9 (SIGKILL) is sent to every process of the tenant, any other to its program.
    #[schema(minimum = 1, maximum = 31)]
    pub signal: i32,
}

/// Processes that were sent a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Signalled {
    /// How many.
    pub processes: usize,
}

/// What a user set for a name: the next tenant of this name has it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Setting {
    /// The user.
    pub uid: u32,
    /// The name.
    pub name: String,
    /// What was set.
    pub change: SpecChange,
}
