//! What a tenant is called, and the words of its [spec](crate::TenantSpec).

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

/// Names the values of an enum, in their order.
#[macro_export]
macro_rules! names {
    ($type:ty: $($value:ident = $name:literal),+) => {
        impl $type {
            /// All of them, in their order.
            pub const ALL: [Self; [$($name),+].len()] = [$(Self::$value),+];
            /// Their names in the CLI, the API and files.
            pub const NAMES: [&'static str; [$($name),+].len()] = [$($name),+];

            /// Its name.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$value => $name),+
                }
            }

            /// The one of this name.
            pub fn named(name: &str) -> Option<Self> {
                Self::ALL.into_iter().find(|it| it.name() == name)
            }
        }

        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.name())
            }
        }
    };
}

/// When a tenant runs beside others; the highest first.
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

names!(Class: Latency = "latency", Standard = "standard", Batch = "batch");

/// What may take the device for a `latency` tenant before its work arrives; the most first.
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

names!(Hints: Auto = "auto", Manual = "manual", Off = "off");

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

names!(MemoryPolicy: SwapOthers = "swap-others", Wait = "wait", Fail = "fail");
