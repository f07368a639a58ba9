//! What pods, claims and classes ask of one node, in the terms of the placement engine.

use std::collections::BTreeMap;

use gpumux_fleet::model::{Class as Tier, Demand, WHOLE};
use k8s_openapi::{
    api::{
        core::v1::Pod,
        resource::v1::{CapacityRequirements, DeviceClass, DeviceRequest, ResourceClaim},
    },
    apimachinery::pkg::api::resource::Quantity,
};

use crate::{
    DRIVER,
    model::{Policy, Resource},
    quantity,
};

/// What a preemptible share counts when such shares are spread, in thousandths: so ten of them fill a GPU for the engine, and then it
/// has no opinion. The allocation gives them no compute.
const PREEMPTIBLE: u32 = 100;
const MIB: u64 = 1 << 20;

/// Namespace and name.
pub(super) type Name = (String, String);

/// A DeviceClass of the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Class {
    /// Whether it selects whole GPUs.
    whole: bool,
    /// The extended resource that stands for it.
    resource: Option<String>,
}

impl Class {
    /// None of another driver. Selectors are programs: a class counts as the driver's if one of them names it, and as one of whole GPUs
    /// if one excludes devices that are shared, as the chart's do. A mistake costs a worse order of nodes. None of MIG instances that are
    /// made for claims either: they are no part of the GPUs that are packed.
    pub(super) fn of(class: &DeviceClass) -> Option<Self> {
        let spec = &class.spec;
        let expressions = || {
            let selectors = spec.selectors.iter().flatten();
            selectors.filter_map(|selector| Some(selector.cel.as_ref()?.expression.as_str()))
        };
        let configured = spec.config.iter().flatten();
        let configured = configured.filter_map(|config| config.opaque.as_ref());
        let ours = expressions().any(|text| text.contains(DRIVER))
            || configured.into_iter().any(|opaque| opaque.driver == DRIVER);
        let made = |text: &str| {
            text.replace("!(\"profile\" in", "")
                .contains("\"profile\" in")
        };
        let ours = ours && !expressions().any(made);
        ours.then(|| Self {
            whole: expressions().any(|text| text.contains("!device.allowMultipleAllocations")),
            resource: spec.extended_resource_name.clone(),
        })
    }

    fn demand(&self, count: u64, capacity: Option<&CapacityRequirements>) -> Demand {
        let asked = capacity.and_then(|capacity| capacity.requests.as_ref());
        let (milli, memory) = match self.whole {
            true => (WHOLE, 0),
            false => (
                amount(asked, Resource::Compute),
                amount(asked, Resource::Memory),
            ),
        };
        share(count, milli, memory)
    }
}

/// What is asked of a resource, as the scheduler rounds it; memory in MiB.
fn amount(asked: Option<&BTreeMap<String, Quantity>>, resource: Resource) -> u32 {
    let found = asked.and_then(|asked| {
        let mut all = asked.iter();
        all.find(|(name, _)| Resource::parse(name) == Some(resource))
    });
    let asked = found.and_then(|(_, quantity)| quantity::parse(quantity).ok());
    let consumed = Policy::of(resource).consumed(asked, u64::MAX);
    let unit = match resource {
        Resource::Memory => MIB,
        Resource::Compute | Resource::Clients => 1,
    };
    small(consumed.unwrap_or(0).div_ceil(unit))
}

fn small(value: u64) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX)
}

/// So many equal shares on GPUs of their own.
fn share(count: u64, milli: u32, gpu_memory_mib: u32) -> Demand {
    let preemptible = milli == 0;
    Demand {
        gpus: u8::try_from(count).unwrap_or(u8::MAX),
        milli: if preemptible { PREEMPTIBLE } else { milli },
        gpu_memory_mib,
        class: if preemptible {
            Tier::Preemptible
        } else {
            Tier::Guaranteed
        },
        ..Demand::default()
    }
}

/// A share that a claim was allocated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Held {
    pub(super) node: String,
    pub(super) device: String,
    pub(super) demand: Demand,
}

/// What is known of a claim.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Claim {
    /// Class, count and capacity of each request; of alternatives the first, which the scheduler prefers.
    requests: Vec<(String, u64, Option<CapacityRequirements>)>,
    /// What it was allocated. None yet: the pod that brings it decides where.
    pub(super) held: Option<Vec<Held>>,
}

impl Claim {
    pub(super) fn of(claim: &ResourceClaim) -> Self {
        let requests = claim.spec.devices.iter();
        let requests = requests.flat_map(|devices| devices.requests.iter().flatten());
        let allocation = claim.status.as_ref();
        let allocation = allocation.and_then(|status| status.allocation.as_ref());
        let results = allocation.map(|allocation| {
            let devices = allocation.devices.iter();
            let results = devices.flat_map(|devices| devices.results.iter().flatten());
            results
                .filter(|result| result.driver == DRIVER && result.admin_access != Some(true))
                .map(|result| Held {
                    node: result.pool.clone(),
                    device: result.device.clone(),
                    demand: match &result.consumed_capacity {
                        // A whole device consumes counters, and no capacity.
                        None => share(1, WHOLE, 0),
                        Some(consumed) => share(
                            1,
                            amount(Some(consumed), Resource::Compute),
                            amount(Some(consumed), Resource::Memory),
                        ),
                    },
                })
                .collect()
        });
        Self {
            requests: requests.filter_map(request).collect(),
            held: results,
        }
    }

    /// What it asks of the driver.
    pub(super) fn demands<'a>(
        &'a self,
        classes: &'a BTreeMap<String, Class>,
    ) -> impl Iterator<Item = Demand> + 'a {
        self.requests.iter().filter_map(|(class, count, capacity)| {
            Some(classes.get(class)?.demand(*count, capacity.as_ref()))
        })
    }
}

fn request(request: &DeviceRequest) -> Option<(String, u64, Option<CapacityRequirements>)> {
    let count = |count: Option<i64>| u64::try_from(count.unwrap_or(1)).unwrap_or(1);
    if let Some(exactly) = &request.exactly {
        let known = exactly.admin_access != Some(true);
        return known.then(|| {
            let class = exactly.device_class_name.clone();
            (class, count(exactly.count), exactly.capacity.clone())
        });
    }
    let first = request.first_available.as_ref()?.first()?;
    let class = first.device_class_name.clone();
    Some((class, count(first.count), first.capacity.clone()))
}

/// What is known of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Asked {
    /// Where it is bound.
    pub(super) node: Option<String>,
    /// Thousandths of a CPU.
    pub(super) cpu_milli: u32,
    /// Of the host, in MiB.
    pub(super) memory_mib: u32,
    claims: Vec<Name>,
    /// Extended resources, with their number.
    resources: BTreeMap<String, u64>,
}

impl Asked {
    /// None of a pod that has ended.
    pub(super) fn of(pod: &Pod) -> Option<Self> {
        let (spec, status) = (pod.spec.as_ref()?, pod.status.as_ref());
        let phase = status.and_then(|status| status.phase.as_deref());
        if matches!(phase, Some("Succeeded" | "Failed")) {
            return None;
        }
        let mut resources = BTreeMap::<String, u64>::new();
        let (mut cpu, mut memory) = (0, 0);
        for container in &spec.containers {
            let Some(asked) = &container.resources else {
                continue;
            };
            let (requests, limits) = (asked.requests.iter(), asked.limits.iter());
            // A limit without a request is also the request.
            let all: BTreeMap<_, _> = limits.flatten().chain(requests.flatten()).collect();
            for (name, quantity) in all {
                match name.as_str() {
                    "cpu" => cpu += quantity::milli(quantity).unwrap_or(0),
                    "memory" => memory += quantity::parse(quantity).unwrap_or(0).div_ceil(MIB),
                    name if name.contains('/') => {
                        let more = quantity::parse(quantity).unwrap_or(0);
                        *resources.entry(name.to_owned()).or_default() += more;
                    }
                    _ => {}
                }
            }
        }
        let made = status.and_then(|status| status.resource_claim_statuses.as_ref());
        let namespace = pod.metadata.namespace.clone().unwrap_or_default();
        let claims = spec.resource_claims.iter().flatten().filter_map(|claim| {
            let mut made = made.into_iter().flatten();
            let made = || {
                made.find(|it| it.name == claim.name)?
                    .resource_claim_name
                    .clone()
            };
            let name = claim.resource_claim_name.clone().or_else(made)?;
            Some((namespace.clone(), name))
        });
        Some(Self {
            node: spec.node_name.clone(),
            cpu_milli: small(cpu),
            memory_mib: small(memory),
            claims: claims.collect(),
            resources,
        })
    }

    /// Whether it may hold shares: whether it names claims or extended resources.
    pub(super) fn may_share(&self) -> bool {
        !self.claims.is_empty() || !self.resources.is_empty()
    }

    /// What it asks of the driver on one node, the pod's CPUs and memory with the first. Empty: nothing, or nothing that is still open if
    /// only `open` claims count.
    pub(super) fn demands(
        &self,
        claims: &BTreeMap<Name, Claim>,
        classes: &BTreeMap<String, Class>,
        open: bool,
    ) -> Vec<Demand> {
        let own = self.claims.iter().filter_map(|name| claims.get(name));
        let own = own.filter(|claim| !open || claim.held.is_none());
        let extended = classes.iter().filter_map(|(name, class)| {
            let implicit = format!("deviceclass.resource.kubernetes.io/{name}");
            let named = class.resource.as_ref();
            let count = named.and_then(|resource| self.resources.get(resource));
            let count = count.or_else(|| self.resources.get(&implicit))?;
            Some(class.demand(*count, None))
        });
        let mut demands: Vec<Demand> = own
            .flat_map(|claim| claim.demands(classes))
            .chain(extended)
            .filter(|demand| demand.gpus > 0)
            .collect();
        if let Some(first) = demands.first_mut() {
            (first.cpu_milli, first.memory_mib) = (self.cpu_milli, self.memory_mib);
        }
        demands
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn class_of_instances_made_for_claims_packs_no_gpus() {
        let class = |expression: &str| {
            let spec = serde_json::json!({"metadata": {"name": "c"},
                "spec": {"selectors": [{"cel": {"expression": expression}}]}});
            Class::of(&serde_json::from_value(spec).unwrap())
        };
        let own = "device.driver == \"gpumux.dev\"";
        let profile = "(\"profile\" in device.attributes[\"gpumux.dev\"])";
        let whole = format!("{own} && !device.allowMultipleAllocations && !{profile}");
        assert!(class(&whole).unwrap().whole);
        assert!(!class(own).unwrap().whole);
        let made = profile.trim_matches(['(', ')']);
        assert_eq!(class(&format!("{own} && {made}")), None);
    }
}
