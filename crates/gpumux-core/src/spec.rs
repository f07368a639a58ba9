//! A tenant's spec: what it asks for and may have. One table defines it; a change of it, its keys in the API and in
//! files, its flags, and its words follow from that.

use std::{fmt, time::Duration};

use serde::{Deserialize, Deserializer, Serialize};

use crate::{
    Class, Hints, MemoryPolicy,
    ledger::Share,
    quantity::Quantity,
    quantity::{Percent, Size, Time},
};

/// How people write the values of a field: as a flag, and in a file.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    /// One of several names, and what such a name is called.
    Name(&'static str, &'static [&'static str]),
    /// A share of a device.
    Share,
    /// A number within [`TenantSpec::WEIGHTS`].
    Weight,
    /// A size in bytes.
    Size,
    /// A size in bytes, or `none`.
    SizeOrNone,
    /// A time in µs within [`TenantSpec::OBJECTIVES_US`], or `none`.
    Objective,
    /// A time in seconds, or `never`.
    SecondsOrNever,
}

/// A field of the spec.
#[derive(Clone, Copy, Debug)]
pub struct Field {
    /// Its key in the API and in files.
    pub key: &'static str,
    /// Its flag, without dashes in front.
    pub flag: &'static str,
    /// Its values.
    pub kind: Kind,
    /// The flag's help.
    pub help: &'static str,
}

/// Makes the spec and all that follows from its fields. Each has its key, type and default; its type in the API's document;
/// its flag, the kind of its values, and the flag's help.
macro_rules! spec {
    ($(
        $(#[doc = $doc:literal])+
        $key:ident: $type:ty = $default:expr,
        api($api:ty $(, $rule:ident = $bound:tt)*),
        flag($flag:literal, $kind:expr, $help:literal);
    )+) => {
        /// A tenant's spec: what it has whenever it has work, and what bounds it.
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
        #[cfg_attr(feature = "openapi", derive(utoipa::ToSchema), schema(as = Spec))]
        #[serde(deny_unknown_fields, default)]
        pub struct TenantSpec {$(
            $(#[doc = $doc])+
            #[cfg_attr(feature = "openapi", schema(value_type = $api $(, $rule = $bound)*))]
            pub $key: $type,
        )+}

        impl Default for TenantSpec {
            fn default() -> Self {
                Self { $($key: $default),+ }
            }
        }

        /// A change of a tenant's spec: what is not named stays.
        #[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
        #[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
        #[serde(deny_unknown_fields)]
        pub struct SpecChange {$(
            $(#[doc = $doc])+
            #[serde(default, deserialize_with = "named", skip_serializing_if = "Option::is_none")]
            #[cfg_attr(feature = "openapi", schema(value_type = $api $(, $rule = $bound)*))]
            pub $key: Option<$type>,
        )+}

        impl SpecChange {
            /// The fields of a spec.
            pub const FIELDS: &[Field] = &[$(Field {
                key: stringify!($key),
                flag: $flag,
                kind: $kind,
                help: $help,
            }),+];

            /// Both changes, where this one comes after the other.
            #[must_use]
            pub fn after(&self, other: &Self) -> Self {
                Self { $($key: self.$key.or(other.$key)),+ }
            }

            /// The spec after the change.
            pub fn apply(&self, spec: &TenantSpec) -> TenantSpec {
                TenantSpec { $($key: self.$key.unwrap_or(spec.$key)),+ }
            }
        }

        /// The change to exactly this spec.
        impl From<&TenantSpec> for SpecChange {
            fn from(spec: &TenantSpec) -> Self {
                Self { $($key: Some(spec.$key)),+ }
            }
        }

        /// In the words of the flags: `class batch, guaranteed 50%, memory limit none`.
        impl fmt::Display for SpecChange {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let parts = [$(
                    self.$key.map(|it| format!("{} {}", $flag.replace('-', " "), it.words($kind)))
                ),+];
                f.pad(&parts.into_iter().flatten().collect::<Vec<_>>().join(", "))
            }
        }
    };
}

spec! {
    /// When it runs beside others.
    class: Class = Class::Standard,
    api(String, pattern = "^(latency|standard|batch)$"),
    flag("class", Kind::Name("CLASS", &Class::NAMES), "latency: takes the GPU at once when it has work; standard: a weighted share; batch: what is left");

    /// Share of each device's compute that it always gets when it has work, 0 to 1. Counted of the
    /// time the device works for tenants, so that the cost of switching is shared by all.
    guaranteed: f64 = 0.0,
    api(f64, minimum = 0, maximum = 1),
    flag("guaranteed", Kind::Share, "Share of each device's compute that it always gets when it has work, such as 50% or 0.5");

    /// Share of each device's compute that it never exceeds while others have work, 0 to 1.
    limit: f64 = 1.0,
    api(f64, minimum = 0, maximum = 1),
    flag("limit", Kind::Share, "Share of each device's compute that it never exceeds while others have work, such as 80% or 0.8");

    /// Weight among its user's tenants of its class when capacity is left over, 0.001 to 1000.
    weight: f64 = 1.0,
    api(f64, minimum = 0.001, maximum = 1000),
    flag("weight", Kind::Weight, "Weight among its equals when capacity is left over, 0.001 to 1000");

    /// How long a request of a `latency` tenant may take, in µs; `null`: it never waits. With one, it waits up to a tenth of that, and
    /// 2 ms, for others: that spares them switches between its kernels.
    latency_objective_us: Option<u64> = None,
    api(Option<u64>),
    flag("latency-objective", Kind::Objective, "How long a request may take, such as 20ms (a number alone is in ms), or none: a latency tenant then waits up to a tenth of it for others, which spares them many switches if it launches kernel by kernel");

    /// What may take the device for a `latency` tenant before its work arrives.
    hints: Hints = Hints::Auto,
    api(String, pattern = "^(auto|manual|off)$"),
    flag("hints", Kind::Name("HINTS", &Hints::NAMES), "What may take the GPU for a latency tenant before its work arrives: auto (the program, its owner, the library where it predicts work), manual, off");

    /// Bytes of each device's memory that it always gets when it asks for them.
    memory_guaranteed: u64 = 0,
    api(u64),
    flag("memory-guaranteed", Kind::Size, "Memory of each device that it always gets when it asks for it, such as 8GiB (8G, 8Gi), or 0");

    /// Bytes of each device's memory that it never exceeds; `null`: what the device has.
    memory_limit: Option<u64> = None,
    api(Option<u64>),
    flag("memory-limit", Kind::SizeOrNone, "Memory of each device that it never exceeds, such as 40GiB, or none");

    /// What becomes of a request for memory that the device has no room for.
    memory_policy: MemoryPolicy = MemoryPolicy::SwapOthers,
    api(String, pattern = "^(swap-others|wait|fail)$"),
    flag("memory-policy", Kind::Name("POLICY", &MemoryPolicy::NAMES), "When the device has no room for its memory: swap-others moves others' to the host, wait waits a while, fail fails as CUDA does");

    /// After how many seconds without work its memory is moved to the host; `null`: never by itself.
    sleep_after_s: Option<u64> = None,
    api(Option<u64>),
    flag("sleep-after", Kind::SecondsOrNever, "Move its memory to the host after so long without work, such as 30s or 5min, or never; it comes back with the next work");
}

/// A value that is named: where a field may be none, `null` is one.
fn named<'de, T: Deserialize<'de>, D: Deserializer<'de>>(value: D) -> Result<Option<T>, D::Error> {
    T::deserialize(value).map(Some)
}

/// A field's value as its flag takes it.
trait Words {
    fn words(self, kind: Kind) -> String;
}

macro_rules! words_by_name {
    ($($type:ty),+) => {$(
        impl Words for $type {
            fn words(self, _: Kind) -> String {
                self.to_string()
            }
        }
    )+};
}
words_by_name!(Class, Hints, MemoryPolicy);

impl Words for f64 {
    fn words(self, kind: Kind) -> String {
        match kind {
            Kind::Share => Percent(self).to_string(),
            _ => self.to_string(),
        }
    }
}

impl Words for u64 {
    fn words(self, kind: Kind) -> String {
        match kind {
            Kind::Objective => Time(Duration::from_micros(self)).to_string(),
            Kind::SecondsOrNever => Time(Duration::from_secs(self)).to_string(),
            _ => Size(self).to_string(),
        }
    }
}

impl Words for Option<u64> {
    fn words(self, kind: Kind) -> String {
        match (self, kind) {
            (Some(value), _) => value.words(kind),
            (None, Kind::SecondsOrNever) => "never".to_owned(),
            (None, _) => "none".to_owned(),
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
    /// A memory limit below [`TenantSpec::LEAST_MEMORY`].
    #[error("memory limit {} leaves room for nothing: use at least 1 MiB, or none", Quantity::Memory(*.0))]
    NoMemory(u64),
}

impl SpecChange {
    /// What of this has no effect on a tenant of this spec, and why.
    pub fn without_effect(&self, spec: &TenantSpec) -> Vec<String> {
        let hints = self.hints.filter(|it| *it != Hints::Off);
        let objective = self.latency_objective_us.flatten();
        let only_latency = [
            objective.and(Some("latency objective")),
            hints.and(Some("hints")),
        ];
        let named = only_latency.into_iter().flatten();
        let named = named.filter(|_| spec.class != Class::Latency);
        let note = |what| {
            format!(
                "{what}: no effect on class {}, only on class latency",
                spec.class
            )
        };
        named.map(note).collect()
    }
}

/// See [`TenantSpec::slowdown`].
const SLOWDOWN: f64 = 0.05;

impl TenantSpec {
    /// The least memory limit that makes sense, in bytes.
    pub const LEAST_MEMORY: u64 = 1 << 20;

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
            Some(limit) if limit < Self::LEAST_MEMORY => Err(SpecError::NoMemory(limit)),
            Some(limit) if self.memory_guaranteed > limit => Err(SpecError::MemoryAboveLimit {
                guaranteed: self.memory_guaranteed,
                limit,
            }),
            _ => Ok(()),
        }
    }

    /// Its latency objective, where its class has one.
    pub fn objective_us(&self) -> Option<u64> {
        (self.latency_objective_us).filter(|_| self.class == Class::Latency)
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
    fn settings_of_latency_tenants_have_no_effect_on_others() {
        let change = SpecChange {
            latency_objective_us: Some(Some(20_000)),
            hints: Some(Hints::Manual),
            weight: Some(2.0),
            ..SpecChange::default()
        };
        let notes = |change: &SpecChange, class| {
            let spec = TenantSpec {
                class,
                ..TenantSpec::default()
            };
            change.without_effect(&spec)
        };
        assert_eq!(notes(&change, Class::Latency), [""; 0]);
        for class in [Class::Standard, Class::Batch] {
            let [objective, hints] = &notes(&change, class)[..] else {
                panic!("two have none");
            };
            assert!(objective.starts_with("latency objective: no effect"));
            assert!(hints.starts_with("hints: no effect"));
        }
        let cleared = SpecChange {
            latency_objective_us: Some(None),
            hints: Some(Hints::Off),
            ..SpecChange::default()
        };
        assert_eq!(notes(&cleared, Class::Batch), [""; 0]);
    }

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
            (|s| s.memory_limit = Some(0), "memory limit 0"),
            (|s| s.memory_limit = Some(1), "memory limit 1"),
        ] {
            let error = field(change).expect_err(message);
            assert!(error.starts_with(message), "{error}");
        }
    }

    #[test]
    fn change_is_shown_in_the_words_of_the_flags() {
        let change = SpecChange {
            class: Some(Class::Batch),
            guaranteed: Some(0.5),
            memory_limit: Some(None),
            memory_guaranteed: Some(8 << 30),
            sleep_after_s: Some(Some(90)),
            ..SpecChange::default()
        };
        let text = "class batch, guaranteed 50%, memory guaranteed 8.0 GiB, memory limit none, sleep after 1m30s";
        assert_eq!(change.to_string(), text);
        assert_eq!(SpecChange::default().to_string(), "");
    }
}
