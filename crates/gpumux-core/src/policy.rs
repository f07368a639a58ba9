//! Policies: pure functions from a snapshot of one device to a plan for it.
//!
//! # Problem
//! The hardware goes round the channel groups that have work and lets each run for its slice; a switch
//! costs 136 to 190 µs (H100, driver 580.159). All that can be set are the slices (1 µs to 1 s) and who is
//! frozen. From these, tenants shall get guaranteed shares, latency tenants the device at once,
//! batch tenants what is left, and nobody may wait forever. Two runnable groups at 1 µs must never meet:
//! they would switch all the time and make no progress.
//!
//! # Approach
//! Two steps, so that a new policy only has to write the first (`docs/add-a-policy.md`):
//! 1. **Division** ([`Division`]): which share of the device does each tenant that wants it get?
//!    This is all in which `priority`, `max-min` and `weighted` differ.
//! 2. **Turns** (the module `turns`, common to all): slices and freezes that bring the shares about.
//!    The domains of a device stand in two rows. The *front* row has long slices and is enabled: the
//!    hardware alone serves it, at once. The *back* row has the shortest slices, 1 µs, so it gives way at once; of its domains
//!    with work exactly one, whose turn it is, is enabled and the others are frozen. Who pauses after it met others there stays frozen
//!    until it has been away for 100 ms: it may be back before anybody looks.
//!    While a latency domain exists, the latency domains are the front row and all others the back row.
//!    Without one, `priority` puts standard and whoever has a guarantee before the other batch domains; otherwise
//!    everybody stands in front. Then shares come from slices alone: no freezes, no need to know demand.
//!
//! # The primitive: lag
//! Per domain one number, *lag*: the device time it was entitled to while it wanted the device, less the device
//! time it received (in EEVDF's sense). It is charged with what the device delivered, so the cost of
//! switching falls on everybody in proportion; in the back row with what that row received, so that it is fair among its
//! domains whatever the front row takes. All that needs time follows from it:
//! - *Whose turn in the back row*: the domain with the largest lag per share, that is the
//!   smallest virtual time. A turn's length is proportional to the share, around a quantum for which freeze,
//!   thaw and switch cost 2% (50 ms on H100, where 97.6% of solo were measured at 50 ms and 92% at 10 ms;
//!   short ones of 20 ms would cost 5%).
//! - *Budget of the front row*: a domain that ran ahead by what its share allows in a period of 100 ms is
//!   frozen while the back row wants the device, until its lag is level again: a constant-bandwidth
//!   server. Its share comes from the division: the guarantee plus what its weight earns of the rest.
//! - *Sleepers* earn nothing while they sleep (lag is then at most 0) and pay back what
//!   they took too much, at their own rate. What was borrowed while nobody else wanted the device costs nothing,
//!   for the share was then larger.
//!
//! A latency tenant that says how long a request may take (its objective) gives the back row slices of a tenth of
//! that instead of 1 µs. Whoever launches kernel by kernel then loses fewer of its neighbours' time to switching.
//!
//! Several latency domains: each keeps the device until it has no work (1 s slice), because one
//! that waits for the other's short request is served sooner than one that switches in the middle of it.
//! One that has been busy for 10 ms without a pause gets a slice by share instead (some milliseconds), so that it
//! cannot hold the others up for a second. Shares among several that *always* have work, beside others with a
//! guarantee, are kept less exactly: a budget period holds few of their slices, and the accounts cannot know which.
//!
//! # Ties
//! Equal lag: who had its turn longest ago, then the lower id. Nothing depends on hash order or on a clock.

mod divide;
mod fixed;
mod turns;

pub use divide::{Claim, Division, MaxMin, Priority, Weighted, fill, guarantees};
pub use fixed::Fixed;
pub(crate) use turns::Wait;
pub use turns::{Memory, Shared, Tuning};

use crate::{Plan, Snapshot};

/// A scheduling policy. The same snapshot and memory always give the same plan.
pub trait Policy: Send + Sync {
    /// The name in configuration files.
    fn name(&self) -> &'static str;

    /// What the device's domains shall have now. Ask again when anything in the snapshot changed
    /// (a domain came or went, demand flipped, a spec was set) and at [`Plan::next`].
    fn plan(&self, snapshot: &Snapshot, memory: &mut Memory) -> Plan;
}

/// The policies, the default first. ([`by_name`] also knows the baseline `fixed`, which is only for
/// measurements: see [`Fixed`].)
pub const NAMES: [&str; 3] = ["priority", "max-min", "weighted"];

/// The policy of this name, with default tuning.
pub fn by_name(name: &str) -> Option<Box<dyn Policy>> {
    tuned(name, Tuning::default())
}

/// The policy of this name, with a tuning of your own.
pub fn tuned(name: &str, tuning: Tuning) -> Option<Box<dyn Policy>> {
    match name {
        "priority" => Some(Box::new(Shared::tuned(Priority, tuning))),
        "max-min" => Some(Box::new(Shared::tuned(MaxMin, tuning))),
        "weighted" => Some(Box::new(Shared::tuned(Weighted, tuning))),
        "fixed" => Some(Box::new(Fixed)),
        _ => None,
    }
}
