//! Identifiers and units.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Microseconds: of time since an origin the caller chose, or of duration.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Micros(pub u64);

impl Micros {
    /// From milliseconds; what is beyond all time is its end.
    pub const fn from_millis(ms: u64) -> Self {
        Self(ms.saturating_mul(1000))
    }

    /// From seconds; what is beyond all time is its end.
    pub const fn from_secs(s: u64) -> Self {
        Self(s.saturating_mul(1_000_000))
    }

    /// Zero.
    pub const ZERO: Self = Self(0);

    /// In seconds.
    pub fn as_secs_f64(self) -> f64 {
        self.0 as f64 / 1e6
    }

    /// `self - other`, or zero where `other` is later.
    pub const fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }
}

impl std::ops::AddAssign for Micros {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl std::ops::Add for Micros {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}

impl fmt::Display for Micros {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} µs", self.0)
    }
}

/// A tenant, unique in one daemon's (or simulation's) lifetime.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct TenantId(pub u64);

/// A user of the machine, by uid. The tenants of one user share what the user is entitled to.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct UserId(pub u32);

/// A domain: one compute channel group on one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct DomainId(pub u64);

/// How long a channel group may run before the hardware turns to the next one, in µs.
///
/// The driver accepts 1 µs to 1 s (measured on H100, driver 580.159).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Timeslice(pub u64);

impl Timeslice {
    /// Shortest: gives way as soon as another group has work.
    pub const MIN: Self = Self(1);
    /// Longest: practically never gives way while it has work.
    pub const MAX: Self = Self(1_000_000);
    /// What libcuda sets for a compute group (2048 µs, measured on H100, driver 580.159).
    pub const DEFAULT: Self = Self(2048);
}

impl fmt::Display for Timeslice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} µs", self.0)
    }
}
