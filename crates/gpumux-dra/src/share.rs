//! `GpuShare`: the driver's parameters in a DeviceClass or a claim, and in a claim's annotation.
//!
//! What Kubernetes accounts (guaranteed compute and memory) is consumed capacity and not said here, except that
//! the annotation may lower it. Everything else about a share is.

use std::{collections::BTreeSet, fmt, str::FromStr};

use gpumux_core::{Class, TenantSpec};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::model::{Amounts, WHOLE_COMPUTE};

/// The version of the parameters.
pub const API_VERSION: &str = "config.gpumux.dev/v1alpha1";
/// Their kind.
pub const KIND: &str = "GpuShare";
/// The annotation of a claim whose value (JSON of [`Patch`]) changes its shares while the pod runs.
pub const ANNOTATION: &str = "gpumux.dev/share";

/// What the claim must have been allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Tier {
    /// Some compute; it is always there when the pod wants it.
    Guaranteed,
    /// No compute; the pod uses what others leave, and gives it back in microseconds.
    Preemptible,
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Guaranteed => "guaranteed",
            Self::Preemptible => "preemptible",
        })
    }
}

/// The parameters. Those of the class come first, those of the claim override them field by field.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct GpuShare {
    /// [`API_VERSION`].
    pub api_version: String,
    /// [`KIND`].
    pub kind: String,
    /// What the claim must have been allocated; either if left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tier: Option<Tier>,
    /// How it takes its turn; `standard` with guaranteed compute and `batch` without if left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub class: Option<Class>,
    /// milli-GPU that it never exceeds while others want it, 10 to 1000; 1000 if left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<u64>,
    /// Instead of `limit`: milli-GPU that it may borrow above its guarantee.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub burst: Option<u64>,
    /// Weight among its equals, 0.001 to 1000; 1 if left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight: Option<f64>,
    /// Latency objective of one request in µs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub latency_objective_us: Option<u64>,
    /// Tenants of one trust domain may run in one address space of the device, where a fault of one ends all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trust_domain: Option<String>,
    /// Whether its memory leaves the device while it is idle.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sleep: Option<Sleep>,
}

/// When an idle tenant's memory leaves the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Sleep {
    /// Seconds of idleness after which it sleeps, 1 to 86400.
    pub after_seconds: u64,
}

/// A change of a running claim: the same fields as [`GpuShare`], and a lower guarantee.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Patch {
    /// [`API_VERSION`], if at all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub api_version: Option<String>,
    /// [`KIND`], if at all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// Guaranteed milli-GPU, at most what the claim was allocated.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compute: Option<u64>,
    /// See [`GpuShare::class`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub class: Option<Class>,
    /// See [`GpuShare::limit`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<u64>,
    /// See [`GpuShare::burst`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub burst: Option<u64>,
    /// See [`GpuShare::weight`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight: Option<f64>,
    /// See [`GpuShare::latency_objective_us`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub latency_objective_us: Option<u64>,
}

/// Why parameters are refused.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ShareError {
    /// Not JSON of this shape.
    #[error("cannot read {what}: {why}; see docs/kubernetes.md for its fields")]
    Shape {
        /// `GpuShare` or the annotation.
        what: &'static str,
        /// What the reader says.
        why: String,
    },
    /// Something else's parameters.
    #[error(
        "parameters are `{api_version}` `{kind}`: write apiVersion: {API_VERSION} and kind: {KIND}"
    )]
    Kind {
        /// As given.
        api_version: String,
        /// As given.
        kind: String,
    },
    /// A number that makes no sense.
    #[error("{field} {value} is out of range: use {range}")]
    Range {
        /// Which.
        field: &'static str,
        /// As given.
        value: String,
        /// What is allowed.
        range: String,
    },
    /// Two ways to say one thing.
    #[error("limit and burst both bound the share: keep one of them")]
    LimitAndBurst,
    /// The class of devices and what was allocated do not agree.
    #[error(
        "tier `guaranteed` needs guaranteed compute, and the claim has none: request capacity `compute`, at least 10"
    )]
    NothingGuaranteed,
    /// The class of devices and what was allocated do not agree.
    #[error(
        "tier `preemptible` has no guaranteed compute, and the claim was allocated {0}: request no `compute`, or use class gpumux-guaranteed"
    )]
    Guaranteed(u64),
    /// No name.
    #[error("trustDomain `{0}` is no name: use 1 to 63 letters, digits, `.`, `_`, `-`")]
    TrustDomain(String),
    /// The node's daemon has no means for it.
    #[error("{0} cannot be kept by the gpumuxd of this node: leave it out, or update gpumuxd")]
    NotSupported(&'static str),
}

impl GpuShare {
    /// Reads parameters strictly and checks each field by itself.
    ///
    /// # Errors
    /// Names the field and what it may be.
    pub fn read(parameters: &serde_json::Value) -> Result<Self, ShareError> {
        let kind = |name: &str| {
            parameters
                .get(name)
                .and_then(serde_json::Value::as_str)
                .unwrap_or_default()
                .to_owned()
        };
        let (api_version, own_kind) = (kind("apiVersion"), kind("kind"));
        if api_version != API_VERSION || own_kind != KIND {
            return Err(ShareError::Kind {
                api_version,
                kind: own_kind,
            });
        }
        let share = Self::deserialize(parameters).map_err(|error| ShareError::Shape {
            what: KIND,
            why: error.to_string(),
        })?;
        share.check()?;
        Ok(share)
    }

    fn check(&self) -> Result<(), ShareError> {
        in_range("limit", self.limit, 10, WHOLE_COMPUTE)?;
        in_range("burst", self.burst, 0, WHOLE_COMPUTE)?;
        in_range(
            "latencyObjectiveUs",
            self.latency_objective_us,
            1,
            3_600_000_000,
        )?;
        in_range(
            "sleep.afterSeconds",
            self.sleep.map(|sleep| sleep.after_seconds),
            1,
            86_400,
        )?;
        if let Some(weight) = self
            .weight
            .filter(|weight| !TenantSpec::WEIGHTS.contains(weight))
        {
            return Err(ShareError::Range {
                field: "weight",
                value: weight.to_string(),
                range: "0.001 to 1000".into(),
            });
        }
        if self.limit.is_some() && self.burst.is_some() {
            return Err(ShareError::LimitAndBurst);
        }
        let named = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
        match &self.trust_domain {
            Some(name) if name.is_empty() || name.len() > 63 || !name.chars().all(named) => {
                Err(ShareError::TrustDomain(name.clone()))
            }
            _ => Ok(()),
        }
    }

    /// These parameters, with what `over` says in their place.
    pub fn overridden(self, over: Self) -> Self {
        let bound = over.limit.is_some() || over.burst.is_some();
        Self {
            tier: over.tier.or(self.tier),
            class: over.class.or(self.class),
            limit: if bound { over.limit } else { self.limit },
            burst: if bound { over.burst } else { self.burst },
            weight: over.weight.or(self.weight),
            latency_objective_us: over.latency_objective_us.or(self.latency_objective_us),
            trust_domain: over.trust_domain.or(self.trust_domain),
            sleep: over.sleep.or(self.sleep),
            api_version: over.api_version,
            kind: over.kind,
        }
    }

    /// These parameters after a change, and the guarantee that goes with them.
    fn patched(&self, patch: &Patch) -> Self {
        self.clone().overridden(Self {
            api_version: self.api_version.clone(),
            kind: self.kind.clone(),
            class: patch.class,
            limit: patch.limit,
            burst: patch.burst,
            weight: patch.weight,
            latency_objective_us: patch.latency_objective_us,
            ..Self::default()
        })
    }

    /// The tenant's promise, with `allocated` guaranteed.
    ///
    /// # Errors
    /// The tier and the allocation do not agree, or the limit is below the guarantee.
    pub fn spec(
        &self,
        allocated: &Amounts,
        patch: Option<&Patch>,
    ) -> Result<TenantSpec, ShareError> {
        match (self.tier, allocated.compute) {
            (Some(Tier::Guaranteed), 0) => return Err(ShareError::NothingGuaranteed),
            (Some(Tier::Preemptible), compute @ 1..) => {
                return Err(ShareError::Guaranteed(compute));
            }
            _ => {}
        }
        let share = patch.map_or_else(|| self.clone(), |patch| self.patched(patch));
        let guaranteed = match patch.and_then(|patch| patch.compute) {
            None => allocated.compute,
            Some(compute) => {
                in_range("compute", Some(compute), 0, allocated.compute)?;
                compute
            }
        };
        let limit = match (share.limit, share.burst) {
            (Some(limit), _) => {
                in_range("limit", Some(limit), guaranteed.max(10), WHOLE_COMPUTE)?;
                limit
            }
            (None, Some(burst)) => {
                // Without guarantee and burst it would never run.
                in_range(
                    "burst",
                    Some(burst),
                    if guaranteed == 0 { 10 } else { 0 },
                    WHOLE_COMPUTE,
                )?;
                (guaranteed + burst).min(WHOLE_COMPUTE)
            }
            (None, None) => WHOLE_COMPUTE,
        };
        let preemptible = allocated.compute == 0;
        Ok(TenantSpec {
            class: share.class.unwrap_or(if preemptible {
                Class::Batch
            } else {
                Class::Standard
            }),
            guaranteed: milli(guaranteed),
            limit: milli(limit),
            weight: share.weight.unwrap_or(1.0),
            latency_objective_us: share.latency_objective_us,
            ..TenantSpec::default()
        })
    }
}

impl GpuShare {
    /// What the tenant is promised beside its [`spec`](Self::spec), for a daemon whose promises have these fields.
    ///
    /// # Errors
    /// The daemon has no means for what is asked.
    pub fn extra(
        &self,
        allocated: &Amounts,
        known: &BTreeSet<String>,
    ) -> Result<Map<String, Value>, ShareError> {
        let sleep = self.sleep.map(|sleep| sleep.after_seconds.into());
        let trust = self.trust_domain.clone().map(Value::from);
        let mut extra = Map::new();
        for (field, value, parameter) in [
            // Accounted by Kubernetes all the same.
            ("memory_guaranteed", Some(allocated.memory.into()), None),
            ("sleep_after_s", sleep, Some("sleep")),
            ("trust_domain", trust, Some("trustDomain")),
        ] {
            match (value, parameter) {
                (Some(value), _) if known.contains(field) => {
                    drop(extra.insert(field.into(), value))
                }
                (Some(_), Some(parameter)) => return Err(ShareError::NotSupported(parameter)),
                _ => {}
            }
        }
        Ok(extra)
    }
}

impl FromStr for Patch {
    type Err = ShareError;

    /// Reads the annotation strictly.
    fn from_str(text: &str) -> Result<Self, ShareError> {
        let patch: Self = serde_json::from_str(text).map_err(|error| ShareError::Shape {
            what: "annotation gpumux.dev/share",
            why: error.to_string(),
        })?;
        let api_version = patch.api_version.as_deref().unwrap_or(API_VERSION);
        let kind = patch.kind.as_deref().unwrap_or(KIND);
        if (api_version, kind) != (API_VERSION, KIND) {
            return Err(ShareError::Kind {
                api_version: api_version.to_owned(),
                kind: kind.to_owned(),
            });
        }
        GpuShare::default().patched(&patch).check()?;
        Ok(patch)
    }
}

/// A share of 1 from milli-GPU.
fn milli(compute: u64) -> f64 {
    compute as f64 / WHOLE_COMPUTE as f64
}

fn in_range(field: &'static str, value: Option<u64>, min: u64, max: u64) -> Result<(), ShareError> {
    match value {
        Some(value) if !(min..=max).contains(&value) => Err(ShareError::Range {
            field,
            value: value.to_string(),
            range: format!("{min} to {max}"),
        }),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn share(fields: serde_json::Value) -> Result<GpuShare, String> {
        let mut value = json!({"apiVersion": API_VERSION, "kind": KIND});
        value
            .as_object_mut()
            .unwrap()
            .extend(fields.as_object().unwrap().clone());
        GpuShare::read(&value).map_err(|error| error.to_string())
    }

    fn allocated(compute: u64) -> Amounts {
        Amounts {
            compute,
            memory: 1 << 30,
            clients: 1,
        }
    }

    #[test]
    fn wrong_parameters_are_named() {
        for (fields, message) in [
            (
                json!({"kind": "GpuConfig"}),
                "parameters are `config.gpumux.dev/v1alpha1` `GpuConfig`",
            ),
            (json!({"prio": 1}), "unknown field `prio`"),
            (json!({"class": "urgent"}), "unknown variant `urgent`"),
            (
                json!({"limit": 1001}),
                "limit 1001 is out of range: use 10 to 1000",
            ),
            (json!({"weight": 0.0}), "weight 0 is out of range"),
            (json!({"limit": 500, "burst": 1}), "limit and burst both"),
            (json!({"trustDomain": "a b"}), "trustDomain `a b`"),
            (
                json!({"sleep": {"afterSeconds": 0}}),
                "sleep.afterSeconds 0",
            ),
            (json!({"sleep": {"after": 1}}), "unknown field `after`"),
            (json!({"latencyObjectiveUs": -5}), "invalid value"),
        ] {
            let error = share(fields).unwrap_err();
            assert!(error.contains(message), "{error}");
        }
    }

    #[test]
    fn the_claim_overrides_the_class() {
        let class = share(json!({"tier": "guaranteed", "limit": 700, "weight": 2.0})).unwrap();
        let claim = share(json!({"burst": 100, "class": "latency"})).unwrap();
        let spec = class.overridden(claim).spec(&allocated(300), None).unwrap();
        assert_eq!(
            (spec.class, spec.guaranteed, spec.limit, spec.weight),
            (Class::Latency, 0.3, 0.4, 2.0)
        );
    }

    #[test]
    fn the_tier_must_agree_with_the_allocation() {
        let error = |tier, compute| {
            share(json!({"tier": tier}))
                .unwrap()
                .spec(&allocated(compute), None)
                .unwrap_err()
                .to_string()
        };
        assert!(error("guaranteed", 0).contains("at least 10"));
        assert!(error("preemptible", 300).contains("allocated 300"));
        let spec = share(json!({"tier": "preemptible"}))
            .unwrap()
            .spec(&allocated(0), None)
            .unwrap();
        assert_eq!((spec.class, spec.guaranteed), (Class::Batch, 0.0));
    }

    #[test]
    fn the_daemon_gets_what_it_has_means_for_and_the_rest_is_refused() {
        let share = share(json!({"trustDomain": "team", "sleep": {"afterSeconds": 60}})).unwrap();
        let known = |fields: &[&str]| fields.iter().map(|field| (*field).to_owned()).collect();
        let all = known(&[
            "guaranteed",
            "memory_guaranteed",
            "sleep_after_s",
            "trust_domain",
        ]);
        let extra = share.extra(&allocated(0), &all).unwrap();
        assert_eq!(
            Value::Object(extra),
            json!({"memory_guaranteed": 1 << 30, "sleep_after_s": 60, "trust_domain": "team"})
        );
        let error = |fields: &[&str]| {
            let refused = share.extra(&allocated(0), &known(fields));
            refused.unwrap_err().to_string()
        };
        assert!(error(&["sleep_after_s"]).starts_with("trustDomain cannot be kept"));
        assert!(error(&["trust_domain"]).starts_with("sleep cannot be kept"));
        let plain = GpuShare::default()
            .extra(&allocated(0), &known(&[]))
            .unwrap();
        assert!(plain.is_empty());
    }

    #[test]
    fn a_running_claim_is_resized_within_its_allocation() {
        let base = share(json!({"limit": 800})).unwrap();
        let resize = |patch: &str| {
            let patch: Patch = patch.parse().map_err(|e: ShareError| e.to_string())?;
            base.spec(&allocated(500), Some(&patch))
                .map_err(|error| error.to_string())
        };
        let spec = resize(r#"{"compute": 200, "weight": 4}"#).unwrap();
        assert_eq!((spec.guaranteed, spec.limit, spec.weight), (0.2, 0.8, 4.0));
        assert_eq!(resize(r#"{"burst": 100}"#).unwrap().limit, 0.6);
        let whole =
            r#"{"apiVersion": "config.gpumux.dev/v1alpha1", "kind": "GpuShare", "limit": 900}"#;
        assert_eq!(resize(whole).unwrap().limit, 0.9);
        for (patch, message) in [
            (
                r#"{"compute": 600}"#,
                "compute 600 is out of range: use 0 to 500",
            ),
            (
                r#"{"limit": 400}"#,
                "limit 400 is out of range: use 500 to 1000",
            ),
            (r#"{"memory": 1}"#, "unknown field `memory`"),
            (r#"{"kind": "GpuConfig"}"#, "write apiVersion"),
            ("faster", "cannot read annotation"),
        ] {
            let error = resize(patch).unwrap_err();
            assert!(error.contains(message), "{error}");
        }
    }
}
