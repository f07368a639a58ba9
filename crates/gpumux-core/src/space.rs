//! Sharing in space: how the SMs of one group are divided among its members, and which tenant joins a group at all.
//!
//! # Problem
//! Kernels of several programs run at the same time only inside one MPS group, which the hardware time-slices as
//! one domain. There, nothing divides the SMs: the first process takes all it can use. What a program
//! makes of more SMs differs: a training step may scale to the last one while a decoding model stops at a quarter of
//! them. A division by heads wastes what the one can't use and the other could.
//!
//! # Approach
//! - A [`Curve`] holds what was measured of a program: throughput at so many SMs. It is made monotone (more SMs never
//!   hurt; where measurements say so, it is noise) and then concave (its hull). Throughput is compared *relative to the
//!   whole device*, which makes programs comparable: utility 1 is what a program does alone.
//! - [`divide`] gives SMs away one step at a time (8 SMs on Hopper, what the hardware can separate), beginning with
//!   all minima, always to the one with the best claim to the next step. What "best" means is the
//!   [`Rule`]: for `utility` the largest weighted gain on the hull. Gains on a hull only fall, so this water-filling reaches
//!   the largest sum that the hulls allow; it misses the best sum on the curves as measured by at most the distance between hull and
//!   curve where it stops. With contention it is no more than a good guess.
//! - What was never measured goes on like the last step that was: a program is presumed to scale until it was seen not to.
//!   With no measurement at all the members are alike, and the division is that by weight.
//! - Members share the memory's bandwidth, whatever SMs they have. Two numbers of each program, its [`Bandwidth`], say what that costs;
//!   what is best is decided on the rates with that.
//! - [`Program`] is what was learnt of a program over its runs: throughput at every percentage of the SMs at which it ran, and its
//!   bandwidth. The daemon uses it at the next start, because the percentages of MPS act only there.
//! - [`decide`] finds which tenant joins a group at all: by what the tenant wants, whom it trusts, its class, faults and what
//!   is predicted ([`predict`]).
//! - [`blocks`] limits the thread blocks of a member's collectives, so that those of all members fit on a device at once.
//!
//! # Guarantees
//! A guaranteed share of the device becomes a minimum of SMs ([`minimum`]): the group as a whole gets its part of the
//! device's time ([`combine`]), and inside it the member gets the SMs that make up the rest. Minima are rounded up to
//! steps, never down; where that does not fit (no member can have less than one step), nothing is divided, and [`percentages`]
//! tries finer steps.
//!
//! # Ties
//! Equal claims: the member with the fewest SMs for its weight, then the first. SMs that make no whole step (4 of an H100's
//! 132) belong to none.

mod bandwidth;
mod collectives;
mod curve;
mod divide;
mod program;
mod sharing;

pub use bandwidth::{Bandwidth, BesideProbe};
pub use collectives::{BLOCKS, Spinning, blocks};
pub use curve::{Curve, is_point};
pub use divide::{Claimant, Rule, STEP, divide, minimum, rates, total};
pub use program::{Observation, Program, throughput};
pub use sharing::{
    Applicant, Decision, Member, Prediction, Sharing, Way, combine, decide, hinders, percentage,
    percentages, predict,
};
