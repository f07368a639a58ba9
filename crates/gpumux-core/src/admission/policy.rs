//! What a user's tenants may have: the rules of a configuration, and what they come to for one user.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::{
    Class, TenantSpec,
    quantity::{self, Percent},
};

/// A part of a device's memory.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Amount {
    /// A share of what can be guaranteed, 0 to 1.
    Share(f64),
    /// Bytes.
    Bytes(u64),
}

impl Amount {
    /// Bytes of a device on which so many can be guaranteed.
    pub fn of(self, guaranteeable: u64) -> u64 {
        match self {
            Self::Share(share) if share >= 1.0 => guaranteeable,
            Self::Share(share) => (guaranteeable as f64 * share) as u64,
            Self::Bytes(bytes) => bytes,
        }
    }

    /// Whether it is at least as much as another, on any device; none: that depends on the device.
    fn at_least(self, other: Self) -> Option<bool> {
        match (self, other) {
            (Self::Share(a), Self::Share(b)) => Some(a >= b),
            (Self::Bytes(a), Self::Bytes(b)) => Some(a >= b),
            _ => None,
        }
    }
}

impl TryFrom<String> for Amount {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        match text.trim_end().ends_with('%') {
            true => quantity::parse_share(&text).map(Self::Share),
            false => quantity::parse_bytes(&text).map(Self::Bytes),
        }
        .map_err(|error| error.to_string())
    }
}

impl From<Amount> for String {
    fn from(amount: Amount) -> Self {
        match amount {
            Amount::Share(share) => Percent(share).to_string(),
            Amount::Bytes(bytes) => bytes.to_string(),
        }
    }
}

/// What a section of the configuration sets for users. A key that is left out is not changed by the section.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct UserRules {
    /// Classes that tenants may have.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub classes: Option<BTreeSet<Class>>,
    /// Largest share of each device's compute that all tenants of one user may be guaranteed together, such as `0.5` or `"50%"`.
    #[serde(
        deserialize_with = "quantity::read_some_share",
        skip_serializing_if = "Option::is_none"
    )]
    pub max_guaranteed: Option<f64>,
    /// Largest part of each device's memory that all tenants of one user may be guaranteed together, such as `"80%"` or `"64GiB"`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_memory_guaranteed: Option<Amount>,
    /// Most tenants of one user.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_tenants: Option<usize>,
    /// Most connected processes of one user.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_sessions: Option<usize>,
    /// Weight of the user where a device is divided among users, 0.001 to 1000.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight: Option<f64>,
    /// A tenant's guarantees lapse after so many seconds (or a time such as `"10min"`) without work, until it has work again and they can be had; 0: never. Unset: never.
    #[serde(
        deserialize_with = "quantity::read_some_seconds",
        skip_serializing_if = "Option::is_none"
    )]
    pub guarantee_expires_s: Option<u64>,
    /// The trust domain of `batch` tenants without guarantees that name none: they share devices in space, where a fault of one ends all of
    /// them; `""`: none. Unset: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub batch_trust: Option<String>,
}

impl UserRules {
    /// These rules, and what they leave out from `other`.
    #[must_use]
    pub fn or(self, other: &Self) -> Self {
        Self {
            classes: self.classes.or_else(|| other.classes.clone()),
            max_guaranteed: self.max_guaranteed.or(other.max_guaranteed),
            max_memory_guaranteed: self.max_memory_guaranteed.or(other.max_memory_guaranteed),
            max_tenants: self.max_tenants.or(other.max_tenants),
            max_sessions: self.max_sessions.or(other.max_sessions),
            weight: self.weight.or(other.weight),
            guarantee_expires_s: self.guarantee_expires_s.or(other.guarantee_expires_s),
            batch_trust: self.batch_trust.or_else(|| other.batch_trust.clone()),
        }
    }

    /// What a member of two Unix groups may have: of each key, what allows more. An amount of memory in percent and one in
    /// bytes cannot be compared: the one in percent counts.
    #[must_use]
    pub fn joined(self, other: &Self) -> Self {
        fn most<T: PartialOrd + Copy>(a: Option<T>, b: Option<T>) -> Option<T> {
            match (a, b) {
                (Some(a), Some(b)) => Some(if b > a { b } else { a }),
                (a, b) => a.or(b),
            }
        }
        let memory = match (self.max_memory_guaranteed, other.max_memory_guaranteed) {
            (Some(a), Some(b)) => Some(match a.at_least(b) {
                Some(true) => a,
                Some(false) => b,
                None if matches!(a, Amount::Share(_)) => a,
                None => b,
            }),
            (a, b) => a.or(b),
        };
        let expires = match (self.guarantee_expires_s, other.guarantee_expires_s) {
            (Some(0), _) | (_, Some(0)) => Some(0),
            (a, b) => most(a, b),
        };
        Self {
            classes: match (self.classes, &other.classes) {
                (Some(a), Some(b)) => Some(a.union(b).copied().collect()),
                (a, b) => a.or_else(|| b.clone()),
            },
            max_guaranteed: most(self.max_guaranteed, other.max_guaranteed),
            max_memory_guaranteed: memory,
            max_tenants: most(self.max_tenants, other.max_tenants),
            max_sessions: most(self.max_sessions, other.max_sessions),
            weight: most(self.weight, other.weight),
            guarantee_expires_s: expires,
            // Of two domains the first by name; none, which shares no fault, before any.
            batch_trust: match (self.batch_trust, &other.batch_trust) {
                (Some(a), Some(b)) => Some(a.min(b.clone())),
                (a, b) => a.or_else(|| b.clone()),
            },
        }
    }

    /// What applies to a user: its own section, then what the sections of its Unix groups allow together, then the
    /// defaults, key by key.
    pub fn resolve<'a>(
        user: Option<&Self>,
        groups: impl IntoIterator<Item = &'a Self>,
        defaults: &Self,
    ) -> Self {
        let groups = groups.into_iter().cloned();
        let groups = groups.reduce(|all, group| all.joined(&group));
        let own = user.cloned().unwrap_or_default();
        own.or(&groups.unwrap_or_default()).or(defaults)
    }

    /// The first value that makes no sense: its key, itself, and what could stand there.
    pub fn mistake(&self) -> Option<(&'static str, String, &'static str)> {
        let share = |share: &f64| !(0.0..=1.0).contains(share);
        if let Some(share) = self.max_guaranteed.filter(share) {
            return Some((
                "max_guaranteed",
                share.to_string(),
                "a share such as 0.5 or \"50%\"",
            ));
        }
        let weight = |weight: &f64| !TenantSpec::WEIGHTS.contains(weight);
        if let Some(weight) = self.weight.filter(weight) {
            return Some(("weight", weight.to_string(), "a number from 0.001 to 1000"));
        }
        if self.classes.as_ref().is_some_and(BTreeSet::is_empty) {
            return Some((
                "classes",
                "[]".into(),
                "at least one of latency, standard, batch",
            ));
        }
        let allowed = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        let is_name = |name: &String| {
            let begins = name.starts_with(|c: char| c.is_ascii_alphanumeric());
            name.is_empty() || begins && name.len() <= 64 && name.chars().all(allowed)
        };
        if let Some(name) = self.batch_trust.as_ref().filter(|name| !is_name(name)) {
            let instead =
                "a name of letters, digits, `.`, `_` and `-` that begins with a letter or digit";
            return Some(("batch_trust", format!("{name:?}"), instead));
        }
        None
    }
}

/// What one user's tenants may have. The keys are those of [`UserRules`].
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct UserPolicy {
    /// What people call the user.
    #[serde(skip)]
    pub user: String,
    /// Classes that its tenants may have.
    pub classes: BTreeSet<Class>,
    /// Largest share of each device's compute that its tenants may be guaranteed together.
    pub max_guaranteed: f64,
    /// Largest part of each device's memory that its tenants may be guaranteed together.
    pub max_memory_guaranteed: Amount,
    /// Most tenants.
    pub max_tenants: usize,
    /// Most connected processes.
    pub max_sessions: usize,
    /// Weight of the user among users.
    pub weight: f64,
    /// After so many seconds without work a tenant's guarantees lapse; none: never.
    pub guarantee_expires_s: Option<u64>,
    /// The trust domain of batch tenants that name none: see [`Self::trust_of`].
    pub batch_trust: Option<String>,
    /// Root, or the daemon's own user: may have what is reserved for root.
    pub privileged: bool,
}

impl UserPolicy {
    /// That of a user for whom these rules were [resolved](UserRules::resolve). What none of them names: an ordinary user may be
    /// guaranteed 80% of each device, and root all of it.
    pub fn new(user: String, privileged: bool, rules: &UserRules) -> Self {
        let (share, most) = match privileged {
            true => (1.0, usize::MAX),
            false => (0.8, 2048),
        };
        let all = || Class::ALL.into_iter().collect();
        Self {
            user,
            classes: rules.classes.clone().unwrap_or_else(all),
            max_guaranteed: rules.max_guaranteed.unwrap_or(share),
            max_memory_guaranteed: rules.max_memory_guaranteed.unwrap_or(Amount::Share(share)),
            max_tenants: rules.max_tenants.unwrap_or(most),
            max_sessions: rules.max_sessions.unwrap_or(most),
            weight: rules.weight.unwrap_or(1.0),
            guarantee_expires_s: rules.guarantee_expires_s.filter(|seconds| *seconds > 0),
            batch_trust: rules.batch_trust.clone().filter(|name| !name.is_empty()),
            privileged,
        }
    }

    /// The spec of a tenant that asks for nothing: the default, or the first class that is allowed.
    pub fn least_spec(&self) -> TenantSpec {
        let default = TenantSpec::default();
        let allowed = self.classes.contains(&default.class);
        let class = self.classes.first().filter(|_| !allowed);
        TenantSpec {
            class: class.copied().unwrap_or(default.class),
            ..default
        }
    }

    /// The trust domain of a tenant that names none. One that is guaranteed anything keeps a context of its own: in a group a fault of
    /// another would end it.
    pub fn trust_of(&self, spec: &TenantSpec) -> Option<&str> {
        let guaranteed = spec.guaranteed > 0.0 || spec.memory_guaranteed > 0;
        let shares = spec.class == Class::Batch && !guaranteed;
        self.batch_trust.as_deref().filter(|_| shares)
    }

    /// One that allows everything.
    pub fn unlimited() -> Self {
        Self::new("root".into(), true, &UserRules::default())
    }
}

/// What of each device is kept for root: no other user can be guaranteed it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Reserve {
    /// Share of compute, such as `0.1` or `"10%"`.
    #[serde(deserialize_with = "quantity::read_share")]
    pub guaranteed: f64,
    /// Part of the memory, such as `"10%"` or `"8GiB"`.
    pub memory_guaranteed: Amount,
}

impl Reserve {
    /// Nothing.
    pub const fn none() -> Self {
        Self {
            guaranteed: 0.0,
            memory_guaranteed: Amount::Bytes(0),
        }
    }
}

impl Default for Reserve {
    fn default() -> Self {
        Self {
            guaranteed: 0.1,
            memory_guaranteed: Amount::Share(0.1),
        }
    }
}
