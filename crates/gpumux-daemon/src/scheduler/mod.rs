//! The scheduling thread: owns every domain and every control.
//!
//! Others send it commands ([`Handle::ask`], [`Command`]); between commands it looks at demand, asks the
//! policy and issues controls (`step`). It never waits for a tenant, and if it fails, the
//! process ends: that closes every session, upon which the tenants' agents thaw themselves. If it stands still,
//! its lease expires ([`gpumux_wire::lease`]), and they do so, too.
//!
//! `model`, `record` ← `domain`, `process`, `held`, `renewal`, `alarm` ← `device` ← `launches`, `state` ← `copies`, `admission`, `expiry`, `foreign`,
//! `tamper`, `crashes`, `memory` ← `engine` ← `step`, `view`, `relocation` ← `command` ← `thread`.

mod admission;
mod alarm;
mod command;
mod copies;
mod crashes;
mod device;
mod domain;
mod engine;
mod expiry;
mod foreign;
mod held;
mod launches;
mod memory;
mod model;
mod permits;
mod process;
mod record;
mod recording;
mod relocation;
mod renewal;
mod state;
mod step;
mod tamper;
#[cfg(test)]
mod tests;
mod thread;
mod view;

pub(crate) use command::Command;
pub(crate) use domain::{Member, NewGroup};
pub(crate) use engine::GroupError;
pub(crate) use gpumux_core::controller::AWAY;
pub(crate) use held::{Left, STAY};
pub(crate) use model::{Happening, Owner, Withheld};
pub(crate) use permits::Launches;
pub(crate) use process::Met;
pub(crate) use record::{BUCKETS_US, Event, History, Now, Totals, What, Who};
pub(crate) use relocation::Relocate;
pub(crate) use thread::{Handle, Stopped, start};
pub(crate) use view::View;
