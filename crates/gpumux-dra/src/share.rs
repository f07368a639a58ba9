//! `GpuShare`: the driver's parameters in a DeviceClass or a claim, and in a claim's annotation.
//!
//! What Kubernetes accounts (guaranteed compute and memory) is consumed capacity and not part of it, except that
//! the annotation may lower compute. A DeviceClass may bound what its claims and their annotations can ask for.

use std::{fmt, str::FromStr};

use gpumux_core::{Class, TenantSpec};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use serde::{Deserialize, Serialize};

use crate::{
    model::{Amounts, WHOLE_COMPUTE},
    quantity,
};

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
    /// When it runs beside others; `standard` with guaranteed compute and `batch` without if left out.
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
    /// Memory that it never exceeds; none if left out: it may use what others leave.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_limit: Option<MemoryLimit>,
    /// What claims of the class can ask for at most. Only a DeviceClass may have it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bounds: Option<Bounds>,
}

/// A limit of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum MemoryLimit {
    /// What the claim was allocated.
    Requested,
    /// Bytes.
    Bytes(u64),
}

impl TryFrom<String> for MemoryLimit {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        match text.as_str() {
            "requested" => Ok(Self::Requested),
            _ => quantity::parse(&Quantity(text))
                .map(Self::Bytes)
                .map_err(|error| format!("{error}, or `requested`")),
        }
    }
}

impl From<MemoryLimit> for String {
    fn from(limit: MemoryLimit) -> Self {
        match limit {
            MemoryLimit::Requested => "requested".to_owned(),
            MemoryLimit::Bytes(bytes) => quantity::bytes(bytes).0,
        }
    }
}

impl MemoryLimit {
    fn bytes(self, allocated: u64) -> u64 {
        match self {
            Self::Requested => allocated,
            Self::Bytes(bytes) => bytes,
        }
    }
}

/// What claims of a DeviceClass can ask for at most. A default beyond a bound becomes the bound; what a claim asks for explicitly
/// beyond it is refused.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Bounds {
    /// Classes that a claim can have; all if left out. The first one is the default where the usual default is not among them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub classes: Option<Vec<Class>>,
    /// The largest weight.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_weight: Option<f64>,
    /// The highest limit in milli-GPU, where it is above the guarantee.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_limit: Option<u64>,
    /// The highest limit of memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_memory_limit: Option<MemoryLimit>,
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
    /// See [`GpuShare::memory_limit`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_limit: Option<MemoryLimit>,
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
    /// A claim that would set its own bounds.
    #[error("`bounds` is for DeviceClasses: leave it out of the claim")]
    BoundsInClaim,
    /// The DeviceClass does not allow it.
    #[error("the DeviceClass does not allow class `{asked}`: use {allowed}")]
    ClassNotAllowed {
        /// As asked.
        asked: Class,
        /// What the class allows.
        allowed: String,
    },
    /// The DeviceClass does not allow so much.
    #[error("{field} {value} is more than the {most} that the DeviceClass allows")]
    AboveBound {
        /// Which.
        field: &'static str,
        /// As asked.
        value: String,
        /// The bound.
        most: String,
    },
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
        if let Some(bounds) = &self.bounds {
            in_range("bounds.maxLimit", bounds.max_limit, 10, WHOLE_COMPUTE)?;
            let weight = bounds
                .max_weight
                .filter(|it| !TenantSpec::WEIGHTS.contains(it));
            if weight.is_some() || bounds.classes.as_ref().is_some_and(Vec::is_empty) {
                return Err(ShareError::Range {
                    field: "bounds",
                    value: serde_json::to_string(bounds).unwrap_or_default(),
                    range: "maxWeight 0.001 to 1000, and at least one of classes".into(),
                });
            }
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

    /// These parameters, with those of `over` in their place. Bounds stay as they are unless `over` has some.
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
            memory_limit: over.memory_limit.or(self.memory_limit),
            bounds: over.bounds.or(self.bounds),
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
            memory_limit: patch.memory_limit,
            ..Self::default()
        })
    }

    /// The tenant's spec, with `allocated` guaranteed: memory as Kubernetes counts it, contexts included.
    ///
    /// # Errors
    /// The tier and the allocation do not agree, a limit is below the guarantee, or the DeviceClass does not allow it.
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
        let bounds = share.bounds.clone().unwrap_or_default();
        let most = bounds.max_limit.unwrap_or(WHOLE_COMPUTE).max(guaranteed);
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
            (None, None) => most,
        };
        bounded("limit", limit, most)?;
        let weight = match (share.weight, bounds.max_weight) {
            (Some(weight), Some(most)) if weight > most => {
                return Err(ShareError::AboveBound {
                    field: "weight",
                    value: weight.to_string(),
                    most: most.to_string(),
                });
            }
            (Some(weight), _) => weight,
            (None, most) => most.unwrap_or(1.0).min(1.0),
        };
        Ok(TenantSpec {
            class: class(
                share.class,
                allocated.compute == 0,
                bounds.classes.as_deref(),
            )?,
            guaranteed: milli(guaranteed),
            limit: milli(limit),
            weight,
            latency_objective_us: share.latency_objective_us,
            memory_guaranteed: allocated.memory,
            memory_limit: memory_limit(share.memory_limit, &bounds, allocated.memory)?,
            sleep_after_s: share.sleep.map(|sleep| sleep.after_seconds),
            ..TenantSpec::default()
        })
    }
}

/// The class that was asked for or is the default, if the DeviceClass allows it.
fn class(
    asked: Option<Class>,
    preemptible: bool,
    allowed: Option<&[Class]>,
) -> Result<Class, ShareError> {
    let default = match preemptible {
        true => Class::Batch,
        false => Class::Standard,
    };
    let Some(allowed) = allowed else {
        return Ok(asked.unwrap_or(default));
    };
    match asked {
        Some(asked) if allowed.contains(&asked) => Ok(asked),
        Some(asked) => {
            let allowed: Vec<_> = allowed.iter().map(|class| class.name()).collect();
            Err(ShareError::ClassNotAllowed {
                asked,
                allowed: allowed.join(" or "),
            })
        }
        None if allowed.contains(&default) => Ok(default),
        None => Ok(allowed.first().copied().unwrap_or(default)),
    }
}

/// The limit of memory in bytes, if there is one.
fn memory_limit(
    asked: Option<MemoryLimit>,
    bounds: &Bounds,
    allocated: u64,
) -> Result<Option<u64>, ShareError> {
    // A bound below what was allocated cannot be meant.
    let most = bounds
        .max_memory_limit
        .map(|limit| limit.bytes(allocated).max(allocated));
    let Some(asked) = asked.map(|limit| limit.bytes(allocated)) else {
        return Ok(most);
    };
    if asked < allocated {
        return Err(ShareError::Range {
            field: "memoryLimit",
            value: quantity::bytes(asked).0,
            range: format!(
                "{} (what the claim was allocated) or more",
                quantity::bytes(allocated).0
            ),
        });
    }
    match most {
        Some(most) if asked > most => Err(ShareError::AboveBound {
            field: "memoryLimit",
            value: quantity::bytes(asked).0,
            most: quantity::bytes(most).0,
        }),
        _ => Ok(Some(asked)),
    }
}

fn bounded(field: &'static str, value: u64, most: u64) -> Result<(), ShareError> {
    if value <= most {
        return Ok(());
    }
    Err(ShareError::AboveBound {
        field,
        value: value.to_string(),
        most: most.to_string(),
    })
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
    fn memory_and_sleep_become_the_tenants_spec() {
        let spec = |fields| share(fields).unwrap().spec(&allocated(0), None).unwrap();
        let plain = spec(json!({}));
        assert_eq!(
            (
                plain.memory_guaranteed,
                plain.memory_limit,
                plain.sleep_after_s
            ),
            (1 << 30, None, None)
        );
        let all = spec(json!({"memoryLimit": "2Gi", "sleep": {"afterSeconds": 60}}));
        assert_eq!(
            (all.memory_limit, all.sleep_after_s),
            (Some(2 << 30), Some(60))
        );
        let requested = spec(json!({"memoryLimit": "requested"}));
        assert_eq!(requested.memory_limit, Some(1 << 30));
        let below = share(json!({"memoryLimit": "512Mi"})).unwrap();
        let error = below.spec(&allocated(0), None).unwrap_err().to_string();
        assert_eq!(
            error,
            "memoryLimit 512Mi is out of range: use 1Gi (what the claim was allocated) or more"
        );
        let error = share(json!({"memoryLimit": "much"})).unwrap_err();
        assert!(error.contains("or `requested`"), "{error}");
        let text = serde_json::to_value(share(json!({"memoryLimit": "2Gi"})).unwrap()).unwrap();
        assert_eq!(text["memoryLimit"], "2Gi");
    }

    #[test]
    fn device_class_bounds_its_claims_and_their_annotations() {
        let class = share(json!({"bounds": {
            "classes": ["batch"], "maxWeight": 0.5, "maxLimit": 300, "maxMemoryLimit": "requested"
        }}))
        .unwrap();
        let spec = |claim, compute, patch: Option<&str>| {
            let patch: Option<Patch> = patch.map(|text| text.parse().unwrap());
            let all = class.clone().overridden(share(claim).unwrap());
            all.spec(&allocated(compute), patch.as_ref())
                .map_err(|error| error.to_string())
        };
        // Defaults become what is allowed.
        let plain = spec(json!({}), 100, None).unwrap();
        assert_eq!(
            (plain.class, plain.weight, plain.limit, plain.memory_limit),
            (Class::Batch, 0.5, 0.3, Some(1 << 30))
        );
        // A guarantee is never cut.
        assert_eq!(spec(json!({}), 400, None).unwrap().limit, 0.4);
        let annotation = |text| spec(json!({}), 100, Some(text));
        for (result, message) in [
            (
                spec(json!({"class": "latency"}), 0, None),
                "the DeviceClass does not allow class `latency`: use batch",
            ),
            (
                spec(json!({"weight": 1000}), 0, None),
                "weight 1000 is more than the 0.5 that the DeviceClass allows",
            ),
            (
                spec(json!({"burst": 300}), 100, None),
                "limit 400 is more than the 300",
            ),
            (
                spec(json!({"memoryLimit": "2Gi"}), 0, None),
                "memoryLimit 2Gi is more than the 1Gi",
            ),
            (annotation(r#"{"weight": 2}"#), "weight 2 is more than"),
            (
                annotation(r#"{"class": "latency"}"#),
                "does not allow class",
            ),
        ] {
            let error = result.unwrap_err();
            assert!(error.contains(message), "{error}");
        }
        for bad in [
            json!({"maxWeight": 0}),
            json!({"classes": []}),
            json!({"maxLimit": 1}),
        ] {
            assert!(share(json!({ "bounds": bad })).is_err());
        }
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
