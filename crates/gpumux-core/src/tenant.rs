//! A tenant's spec: what it asks for and may have.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use crate::{admission::Quantity, ledger::Share};

/// Most characters of a name.
pub const MAX_NAME: usize = 64;

/// Whether this may be in the name of a tenant, trust domain or program.
pub fn is_name_char(c: char) -> bool {
    c.is_ascii_alphanumeric() || "._-".contains(c)
}

/// Whether a tenant, trust domain or program may be called that.
pub fn is_name(name: &str) -> bool {
    (1..=MAX_NAME).contains(&name.len())
        && name.chars().all(is_name_char)
        && name.starts_with(|c: char| c.is_ascii_alphanumeric())
}

/// How a tenant takes its turn.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum Class {
    /// Takes the device at once when it has work.
    Latency,
    /// A weighted share.
    #[default]
    Standard,
    /// What is left.
    Batch,
}

impl Class {
    /// All classes, highest first.
    pub const ALL: [Self; 3] = [Self::Latency, Self::Standard, Self::Batch];

    /// The name used in the CLI, the API and configuration files.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Latency => "latency",
            Self::Standard => "standard",
            Self::Batch => "batch",
        }
    }
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A class name that is none.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown class `{0}`: use latency, standard or batch")]
pub struct ParseClassError(pub String);

impl FromStr for Class {
    type Err = ParseClassError;
    fn from_str(s: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .into_iter()
            .find(|class| class.name() == s)
            .ok_or_else(|| ParseClassError(s.to_owned()))
    }
}

/// What may take the device for a `latency` tenant before its work arrives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Hints {
    /// The program, its owner from outside, and the preloaded library where it predicts work.
    #[default]
    Auto,
    /// The program and its owner only.
    Manual,
    /// None of them.
    Off,
}

impl Hints {
    /// All of them, the most first.
    pub const ALL: [Self; 3] = [Self::Auto, Self::Manual, Self::Off];

    /// The name used in the CLI, the API and configuration files.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Manual => "manual",
            Self::Off => "off",
        }
    }
}

/// What becomes of a request for memory that the device has no room for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, Hash)]
#[serde(rename_all = "kebab-case")]
pub enum MemoryPolicy {
    /// Others' memory is moved to the host where the rules allow it; else it waits, a while.
    #[default]
    SwapOthers,
    /// It waits, a while, until others free some.
    Wait,
    /// It fails at once, with CUDA's own error.
    Fail,
}

impl MemoryPolicy {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::SwapOthers, Self::Wait, Self::Fail];

    /// The name used in the CLI, the API and configuration files.
    pub const fn name(self) -> &'static str {
        match self {
            Self::SwapOthers => "swap-others",
            Self::Wait => "wait",
            Self::Fail => "fail",
        }
    }
}

/// A tenant's spec: what it has whenever it has work, and what bounds it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TenantSpec {
    /// How it takes its turn.
    pub class: Class,
    /// Share of each device's compute that it always gets when it wants it, 0 to 1. Counted of the
    /// time the device works for tenants, so that the cost of switching is shared by all.
    pub guaranteed: f64,
    /// Share of each device's compute that it never exceeds while others want it, 0 to 1.
    pub limit: f64,
    /// Weight among its user's tenants of its class when capacity is left over, 0.001 to 1000.
    pub weight: f64,
    /// How long a request of a `latency` tenant may take, in µs. With one, it waits up to a tenth of that, and
    /// 2 ms, for others: that spares them switches between its kernels. Without, it never waits.
    pub latency_objective_us: Option<u64>,
    /// What may take the device before its work arrives.
    pub hints: Hints,
    /// Bytes of each device's memory that it always gets when it wants them.
    pub memory_guaranteed: u64,
    /// Bytes of each device's memory that it never exceeds; none: what the device has.
    pub memory_limit: Option<u64>,
    /// What becomes of a request for memory that the device has no room for.
    pub memory_policy: MemoryPolicy,
    /// After how many seconds without work its memory is moved to the host; none: never by itself.
    pub sleep_after_s: Option<u64>,
}

impl Default for TenantSpec {
    fn default() -> Self {
        Self {
            class: Class::default(),
            guaranteed: 0.0,
            limit: 1.0,
            weight: 1.0,
            latency_objective_us: None,
            hints: Hints::Auto,
            memory_guaranteed: 0,
            memory_limit: None,
            memory_policy: MemoryPolicy::default(),
            sleep_after_s: None,
        }
    }
}

/// Why a spec was refused.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SpecError {
    /// Not a share.
    #[error("{field} {value} is not a share: use a number from 0 to 1")]
    NotAShare {
        /// `guaranteed` or `limit`.
        field: &'static str,
        /// What was asked.
        value: f64,
    },
    /// Weight not within [`TenantSpec::WEIGHTS`].
    #[error("weight {0} is out of range: use a number from 0.001 to 1000, such as 1")]
    BadWeight(f64),
    /// Latency objective not within [`TenantSpec::OBJECTIVES_US`].
    #[error(
        "latency objective {} ms is out of range: use 0.001 to 3600000 (an hour), or none",
        *.0 as f64 / 1e3
    )]
    BadObjective(u64),
    /// Guaranteed more than the limit allows.
    #[error(
        "guaranteed {guaranteed} is more than limit {limit}: raise the limit or lower the guarantee"
    )]
    GuaranteeAboveLimit {
        /// What was asked as guarantee.
        guaranteed: f64,
        /// What was asked as limit.
        limit: f64,
    },
    /// Guaranteed more memory than the limit allows.
    #[error(
        "memory guaranteed {} is more than memory limit {}: raise the limit or lower the guarantee",
        Quantity::Memory(*guaranteed), Quantity::Memory(*limit)
    )]
    MemoryAboveLimit {
        /// What was asked as guarantee, in bytes.
        guaranteed: u64,
        /// What was asked as limit, in bytes.
        limit: u64,
    },
}

/// See [`TenantSpec::slowdown`].
const SLOWDOWN: f64 = 0.05;

impl TenantSpec {
    /// Weights that make sense: a million to one between the extremes.
    pub const WEIGHTS: std::ops::RangeInclusive<f64> = 0.001..=1000.0;

    /// Latency objectives that make sense, in µs.
    pub const OBJECTIVES_US: std::ops::RangeInclusive<u64> = 1..=3_600_000_000;

    /// Checks the spec by itself (not against other tenants).
    ///
    /// # Errors
    /// Names the first field that makes no sense.
    pub fn validate(&self) -> Result<(), SpecError> {
        for (field, value) in [("guaranteed", self.guaranteed), ("limit", self.limit)] {
            if !(0.0..=1.0).contains(&value) {
                return Err(SpecError::NotAShare { field, value });
            }
        }
        if !Self::WEIGHTS.contains(&self.weight) {
            return Err(SpecError::BadWeight(self.weight));
        }
        if let Some(objective) = self.latency_objective_us
            && !Self::OBJECTIVES_US.contains(&objective)
        {
            return Err(SpecError::BadObjective(objective));
        }
        if self.guaranteed > self.limit {
            return Err(SpecError::GuaranteeAboveLimit {
                guaranteed: self.guaranteed,
                limit: self.limit,
            });
        }
        match self.memory_limit {
            Some(limit) if self.memory_guaranteed > limit => Err(SpecError::MemoryAboveLimit {
                guaranteed: self.memory_guaranteed,
                limit,
            }),
            _ => Ok(()),
        }
    }

    /// By which part its requests may take longer for the sake of others, if it is launch-bound (see [`crate::Launches`]): that of others
    /// than latency tenants is not looked at.
    pub fn slowdown(&self) -> f64 {
        match self.class {
            Class::Latency => SLOWDOWN,
            Class::Standard | Class::Batch => 0.0,
        }
    }

    /// Its guarantee and limit of memory.
    pub fn memory(&self) -> Share {
        Share {
            guaranteed: self.memory_guaranteed,
            limit: self.memory_limit.unwrap_or(u64::MAX),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_make_no_sense_are_refused() {
        let field = |change: fn(&mut TenantSpec)| {
            let mut spec = TenantSpec::default();
            change(&mut spec);
            spec.validate().map_err(|error| error.to_string())
        };
        assert_eq!(field(|_| ()), Ok(()));
        for (change, message) in [
            (
                (|s| s.guaranteed = -0.1) as fn(&mut TenantSpec),
                "guaranteed -0.1",
            ),
            (|s| s.limit = f64::NAN, "limit NaN"),
            (|s| s.limit = 1.5, "limit 1.5"),
            (|s| s.weight = -2.0, "weight -2"),
            (|s| s.weight = f64::INFINITY, "weight inf"),
            (|s| s.weight = f64::NAN, "weight NaN"),
            (
                |s| s.latency_objective_us = Some(0),
                "latency objective 0 ms is out of range",
            ),
            (
                |s| s.latency_objective_us = Some(u64::MAX),
                "latency objective 18446744073709550 ms",
            ),
            (
                |s| (s.guaranteed, s.limit) = (0.6, 0.5),
                "guaranteed 0.6 is more than limit 0.5",
            ),
        ] {
            let error = field(change).expect_err(message);
            assert!(error.starts_with(message), "{error}");
        }
    }

    #[test]
    fn an_unknown_class_is_named() {
        let error = "urgent".parse::<Class>().expect_err("unknown");
        assert!(error.to_string().contains("`urgent`"), "{error}");
    }
}
