//! Policies: pure functions from a snapshot of one device to a plan for it.
//!
//! # Problem
//! The hardware goes round the channel groups that have work and lets each run for its slice; a switch
//! costs 136 to 190 µs (H100, driver 580.159). All that can be set are the slices (1 µs to 1 s) and which group is
//! frozen. From these, tenants shall get guaranteed shares, latency tenants the device at once,
//! batch tenants what is left, and none may wait without end. Two runnable groups at 1 µs must never meet:
//! they would switch all the time and make no progress.
//!
//! # Approach
//! Two steps, so that a new policy only has to write the first (`docs/add-a-policy.md`):
//! 1. **Division** ([`Division`]): which share of the device does each tenant that wants it hold? First the users, then the tenants of
//!    each user. This is all in which `priority`, `max-min` and `weighted` differ.
//! 2. **Schedule** (the module `schedule`, common to all): timeslices and freezes that bring the shares about.
//!
//! Class orders *when* a tenant runs, shares decide *how much*. Without latency tenants, timeslices in proportion to the shares do
//! everything: no freezes, no need to know demand. Only a domain that ran ahead of its limit, in the pauses of others, is frozen until it is level. While a
//! latency tenant exists,
//! - a latency domain that has work and has not run ahead of its share by its *burst* is *preempting*: its timeslice is the longest, and the
//!   hardware switches to it at once;
//! - all others *rotate*: they have the shortest timeslice, 1 µs, and of those with work exactly one is enabled, the *owner* of the current
//!   *quantum*. The others are frozen, and so are those that paused within the last 100 ms: they may be back before the next look;
//! - a latency domain that has run for 10 ms without a pause rotates, too, if there are others of its class, which then preempt it. Within its
//!   burst it goes before lower classes all the same;
//! - latency domains that all have work most of the time share by timeslices: none of them has short requests, for which the device would be taken
//!   from the others at once, and each can use the gaps of the others. The owner beside them has a timeslice for the shares of all that rotate.
//!   Among timeslices, short requests wait most of the time. So those that pause in each round are *looked at*, one after the other and less and less
//!   often: at what each does when it may take the device at once.
//!
//! # Lag
//! The module `lag` counts for each user, tenant and domain the device time that it was entitled to while it wanted the device, less the
//! device time that it received. The owner is chosen by earliest eligible virtual deadline (EEVDF, Stoica and Abdel-Wahab): of the domains that
//! are owed something, the one whose request, a quantum, would end first at its share. A quantum is in proportion to the share, 10 to 50 ms on
//! an H100, where handing over takes 2% of 50 ms. A latency domain that ran ahead by its burst waits until its lag is level: for the part of
//! 100 ms that is others', or as long as controls take. No other becomes the owner just before that.
//! - A domain that pauses when it ran ahead still counts as one of those that the device is divided among, until it is level at its own
//!   rate: what it took at once, others get back then.
//! - A pause of up to 5 ms forfeits nothing of what a domain is owed, up to a quantum; a longer one forfeits all, to all others.
//!   One that paused when the quantum was given away takes it on its return if it is owed a whole quantum.
//! - What was received above the guarantee while no other had work costs nothing, for the share was then larger.
//!
//! # Bounds
//! With share s when all have work, request r, largest quantum Q, B for what the latency tenants may run ahead together and C for the
//! time that controls take, a domain waits for 2 r / s + Q + B + C at most, and its service lags behind its share by s times that. See
//! [`Bound`]; `gpumux sim` prints both beside the worst that happened.
//!
//! A latency tenant that says how long a request may take (its objective) gives the owner timeslices of a tenth of
//! that instead of 1 µs. A tenant that launches kernel by kernel then costs its neighbours less time for switching.
//!
//! # Ties
//! Equal deadlines: the domain that became the owner longest ago, then the lower id. Nothing depends on hash order or on a clock.

mod actors;
mod contract;
mod divide;
mod fixed;
mod greedy;
mod lag;
mod schedule;
mod tuning;

pub use contract::{Bound, Policy};
pub use divide::{Claim, Division, FLOOR, MaxMin, Priority, Weighted, fill, guarantees};
pub use fixed::Fixed;
pub use lag::Memory;
pub(crate) use lag::Wait;
pub use schedule::Shared;
pub use tuning::Tuning;

/// Makes a policy with a tuning.
type Make = fn(Tuning) -> Box<dyn Policy>;

/// The policies, the default first: a new one is a line here.
const POLICIES: [(&str, Make); 3] = [
    ("priority", |it| Box::new(Shared::tuned(Priority, it))),
    ("max-min", |it| Box::new(Shared::tuned(MaxMin, it))),
    ("weighted", |it| Box::new(Shared::tuned(Weighted, it))),
];

/// Their names, the default first. ([`by_name`] also knows the baseline `fixed`, which is only for
/// measurements: see [`Fixed`].)
pub const NAMES: [&str; POLICIES.len()] = {
    let mut names = [""; POLICIES.len()];
    let mut at = 0;
    while at < names.len() {
        names[at] = POLICIES[at].0;
        at += 1;
    }
    names
};

/// The policy of this name, with default tuning.
pub fn by_name(name: &str) -> Option<Box<dyn Policy>> {
    tuned(name, Tuning::default())
}

/// The policy of this name, with a tuning of your own.
pub fn tuned(name: &str, tuning: Tuning) -> Option<Box<dyn Policy>> {
    if name == "fixed" {
        return Some(Box::new(Fixed));
    }
    let (_, make) = POLICIES.into_iter().find(|(known, _)| *known == name)?;
    Some(make(tuning))
}
