//! What the rest of the library stands on: functions of the driver and of libc, the gate that calls pass, and what threads ask the daemon.

pub(crate) mod config;
pub(crate) mod context;
pub(crate) mod control_files;
pub(crate) mod driver;
pub(crate) mod gate;
pub(crate) mod guard;
pub(crate) mod lease;
pub(crate) mod look;
pub(crate) mod next;
pub(crate) mod notice;
pub(crate) mod own;
pub(crate) mod ranks;
pub(crate) mod trace;
pub(crate) mod wait;
pub(crate) mod wake;
