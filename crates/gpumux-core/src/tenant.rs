//! What a tenant is called, and the words of its [spec](crate::TenantSpec).

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

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

    /// Their names in the CLI, the API and configuration files.
    pub const NAMES: [&'static str; 3] = ["latency", "standard", "batch"];

    /// Its name.
    pub const fn name(self) -> &'static str {
        Self::NAMES[self as usize]
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

    /// Their names in the CLI, the API and configuration files.
    pub const NAMES: [&'static str; 3] = ["auto", "manual", "off"];

    /// Its name.
    pub const fn name(self) -> &'static str {
        Self::NAMES[self as usize]
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

    /// Their names in the CLI, the API and configuration files.
    pub const NAMES: [&'static str; 3] = ["swap-others", "wait", "fail"];

    /// Its name.
    pub const fn name(self) -> &'static str {
        Self::NAMES[self as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_class_is_named() {
        let error = "urgent".parse::<Class>().expect_err("unknown");
        assert!(error.to_string().contains("`urgent`"), "{error}");
    }
}
