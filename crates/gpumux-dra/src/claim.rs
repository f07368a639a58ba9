//! From an allocated ResourceClaim to the shares that its pod gets on this node. Pure: everything that can be
//! wrong with a claim is found here, before anything is made.

use k8s_openapi::api::resource::v1::{
    DeviceAllocationConfiguration, DeviceRequestAllocationResult, ResourceClaim,
};
use serde::{Deserialize, Serialize};

use crate::{
    DRIVER,
    device::Device,
    model::{self, Amounts, Resource, Use},
    quantity::{self, QuantityError},
    share::{GpuShare, Patch, ShareError},
};

/// Which claim.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ClaimRef {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its uid; a claim of the same name made later has another.
    pub uid: String,
}

/// A part of a device for a claim.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Share {
    /// Which request of the claim; `request/alternative` if it had alternatives.
    pub request: String,
    /// The pool: this node.
    pub pool: String,
    /// The device as published; ends in `-whole` for whole use.
    pub device: String,
    /// Tells shares of one device apart.
    pub share_id: Option<String>,
    /// The device itself, as published when the claim was prepared.
    pub of: Device,
    /// What it has of it.
    pub usage: Use,
    /// Its parameters.
    pub parameters: GpuShare,
}

impl Share {
    /// What it is guaranteed.
    pub fn guaranteed(&self) -> Amounts {
        match self.usage {
            Use::Shared(amounts) => amounts,
            Use::Whole => model::capacity(self.of.memory_bytes),
            Use::Admin => Amounts::default(),
        }
    }

    /// The tenant's guarantee. Of the memory that Kubernetes accounts, a context takes its part. A tenant that has a device whole needs no
    /// guarantee of memory there.
    ///
    /// # Errors
    /// See [`GpuShare::spec`].
    pub fn spec(&self, patch: Option<&Patch>) -> Result<gpumux_core::TenantSpec, ShareError> {
        let spec = self.parameters.spec(&self.guaranteed(), patch)?;
        let without_context = |bytes: u64| bytes.saturating_sub(self.of.context_bytes);
        Ok(gpumux_core::TenantSpec {
            memory_guaranteed: match self.usage {
                Use::Shared(amounts) => without_context(amounts.memory),
                Use::Whole | Use::Admin => 0,
            },
            memory_limit: match self.usage {
                Use::Shared(_) => spec.memory_limit.map(without_context),
                Use::Whole | Use::Admin => None,
            },
            ..spec
        })
    }
}

/// Why a claim cannot be prepared. The text becomes the pod's event.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ClaimError {
    /// Another claim has its name now.
    #[error(
        "claim {namespace}/{name} was made anew (uid {found} instead of {asked}): the pod must be made anew too"
    )]
    OtherUid {
        /// Where.
        namespace: String,
        /// Its name.
        name: String,
        /// In the request.
        asked: String,
        /// At the API server.
        found: String,
    },
    /// The scheduler has not been there, or the claim was released.
    #[error("claim {0} is not allocated")]
    NotAllocated(String),
    /// Another driver's.
    #[error("claim {0} has no device of driver {DRIVER}")]
    NotOurs(String),
    /// Another node's.
    #[error("device {device} of pool {pool} is not on this node ({node})")]
    OtherNode {
        /// As allocated.
        device: String,
        /// As allocated.
        pool: String,
        /// This.
        node: String,
    },
    /// It was there when it was published.
    #[error("this node has no device {0} any more")]
    NoDevice(String),
    /// There is nothing to look at.
    #[error("device {0} is made when a claim uses it: admin access needs a device that exists")]
    NotMade(String),
    /// It is broken.
    #[error("device {0} does not work: {1}")]
    Broken(String, String),
    /// An older control plane.
    #[error(
        "the share of device {0} has no consumed capacity: the cluster needs Kubernetes 1.36, or the feature gate DRAConsumableCapacity"
    )]
    NoConsumedCapacity(String),
    /// Something that this driver does not publish.
    #[error("capacity `{0}` is not one of compute, memory and clients")]
    UnknownCapacity(String),
    /// Not a quantity.
    #[error(transparent)]
    Quantity(#[from] QuantityError),
    /// The parameters.
    #[error("request {request}: {error}")]
    Share {
        /// Which request of the claim.
        request: String,
        /// What is wrong.
        error: ShareError,
    },
}

/// The shares that the claim was allocated on this node.
///
/// # Errors
/// Says what is wrong with the claim, for the pod's event.
pub fn shares(
    claim: &ResourceClaim,
    reference: &ClaimRef,
    node: &str,
    devices: &[Device],
) -> Result<Vec<Share>, ClaimError> {
    let ClaimRef {
        namespace,
        name,
        uid,
    } = reference;
    let full_name = format!("{namespace}/{name}");
    let found = claim.metadata.uid.clone().unwrap_or_default();
    if found != *uid {
        return Err(ClaimError::OtherUid {
            namespace: namespace.clone(),
            name: name.clone(),
            asked: uid.clone(),
            found,
        });
    }
    let allocation = claim
        .status
        .as_ref()
        .and_then(|status| status.allocation.as_ref()?.devices.as_ref())
        .ok_or_else(|| ClaimError::NotAllocated(full_name.clone()))?;
    let config = allocation.config.as_deref().unwrap_or_default();
    let shares = allocation
        .results
        .iter()
        .flatten()
        .filter(|result| result.driver == DRIVER)
        .map(|result| share(result, config, node, devices))
        .collect::<Result<Vec<_>, _>>()?;
    if shares.is_empty() {
        return Err(ClaimError::NotOurs(full_name));
    }
    Ok(shares)
}

fn share(
    result: &DeviceRequestAllocationResult,
    config: &[DeviceAllocationConfiguration],
    node: &str,
    devices: &[Device],
) -> Result<Share, ClaimError> {
    if result.pool != node {
        return Err(ClaimError::OtherNode {
            device: result.device.clone(),
            pool: result.pool.clone(),
            node: node.to_owned(),
        });
    }
    let (device, whole) = devices
        .iter()
        .find_map(|device| match &result.device {
            name if *name == device.name => Some((device, device.offer.is_some())),
            name if *name == device.whole_name() => Some((device, true)),
            _ => None,
        })
        .ok_or_else(|| ClaimError::NoDevice(result.device.clone()))?;
    let admin = result.admin_access == Some(true);
    if admin && device.offer.is_some() {
        return Err(ClaimError::NotMade(result.device.clone()));
    }
    if let Some(fault) = device.fault.as_ref().filter(|_| !admin) {
        return Err(ClaimError::Broken(result.device.clone(), fault.clone()));
    }
    let usage = match (admin, whole) {
        (true, _) => Use::Admin,
        (false, true) => Use::Whole,
        (false, false) => Use::Shared(consumed(result)?),
    };
    let in_request = |error| ClaimError::Share {
        request: result.request.clone(),
        error,
    };
    let share = Share {
        request: result.request.clone(),
        pool: result.pool.clone(),
        device: result.device.clone(),
        share_id: result.share_id.clone(),
        of: device.clone(),
        usage,
        parameters: parameters(config, &result.request).map_err(in_request)?,
    };
    if !admin {
        share.spec(None).map_err(in_request)?;
    }
    Ok(share)
}

fn consumed(result: &DeviceRequestAllocationResult) -> Result<Amounts, ClaimError> {
    let consumed = result
        .consumed_capacity
        .as_ref()
        .filter(|consumed| !consumed.is_empty())
        .ok_or_else(|| ClaimError::NoConsumedCapacity(result.device.clone()))?;
    let mut amounts = Amounts {
        compute: 0,
        memory: 0,
        clients: 1,
    };
    for (name, value) in consumed {
        let value = quantity::parse(value)?;
        match Resource::parse(name).ok_or_else(|| ClaimError::UnknownCapacity(name.clone()))? {
            Resource::Compute => amounts.compute = value,
            Resource::Memory => amounts.memory = value,
            Resource::Clients => amounts.clients = value,
        }
    }
    Ok(amounts)
}

/// The request that an allocation of `request/alternative` is for.
pub fn request_of(request: &str) -> &str {
    request
        .split_once('/')
        .map_or(request, |(parent, _)| parent)
}

/// The parameters for a request: those of the class first, then those of the claim, which cannot have bounds.
fn parameters(
    config: &[DeviceAllocationConfiguration],
    request: &str,
) -> Result<GpuShare, ShareError> {
    let parent = request_of(request);
    let applies = |entry: &&DeviceAllocationConfiguration| {
        let requests = entry.requests.as_deref().unwrap_or_default();
        requests.is_empty()
            || requests
                .iter()
                .any(|name| name == request || name == parent)
    };
    let mut entries: Vec<_> = config.iter().filter(applies).collect();
    entries.sort_by_key(|entry| entry.source != "FromClass");
    let ours = entries.into_iter().filter_map(|entry| {
        let opaque = entry.opaque.as_ref();
        Some((
            entry.source == "FromClass",
            opaque.filter(|it| it.driver == DRIVER)?,
        ))
    });
    ours.map(|(of_class, opaque)| {
        let share = GpuShare::read(&opaque.parameters.0)?;
        match share.bounds.is_some() && !of_class {
            true => Err(ShareError::BoundsInClaim),
            false => Ok(share),
        }
    })
    .try_fold(GpuShare::default(), |all, one| Ok(all.overridden(one?)))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::slices::tests::device;

    /// What a real scheduler (v1.36.2) allocated for a request of 295 milli-GPU.
    fn allocated() -> serde_json::Value {
        json!({
            "metadata": {"name": "c", "namespace": "ns", "uid": "u1"},
            "spec": {},
            "status": {"allocation": {"devices": {
                "config": [
                    {"source": "FromClass", "requests": ["gpu"], "opaque": {"driver": "gpumux.dev", "parameters":
                        {"apiVersion": "config.gpumux.dev/v1alpha1", "kind": "GpuShare", "tier": "guaranteed"}}},
                    {"source": "FromClaim", "opaque": {"driver": "other.dev", "parameters": {"any": "thing"}}}
                ],
                "results": [{
                    "consumedCapacity": {"compute": "300", "memory": "10Gi", "clients": "1"},
                    "device": "gpu-0", "driver": "gpumux.dev", "pool": "node1", "request": "gpu/big",
                    "shareID": "31b806bb-a903-45f7-8cbd-9c6635c61897"
                }]
            }}}
        })
    }

    fn read(claim: serde_json::Value) -> Result<Vec<Share>, String> {
        let reference = ClaimRef {
            namespace: "ns".into(),
            name: "c".into(),
            uid: "u1".into(),
        };
        let claim: ResourceClaim = serde_json::from_value(claim).unwrap();
        shares(&claim, &reference, "node1", &[device(0)]).map_err(|error| error.to_string())
    }

    #[test]
    fn an_allocation_becomes_a_share() {
        let shares = read(allocated()).unwrap();
        assert_eq!(shares.len(), 1);
        assert_eq!(
            shares[0].usage,
            Use::Shared(Amounts {
                compute: 300,
                memory: 10 << 30,
                clients: 1
            })
        );
        let spec = shares[0].spec(None).unwrap();
        let context = shares[0].of.context_bytes;
        assert!(context > 0);
        assert_eq!(
            (spec.guaranteed, spec.memory_guaranteed),
            (0.3, (10 << 30) - context)
        );
        assert_eq!(shares[0].of.uuid, device(0).uuid);
    }

    #[test]
    fn everything_wrong_is_named() {
        let result = "/status/allocation/devices/results/0";
        let parameters = "/status/allocation/devices/config/0/opaque/parameters";
        for (path, value, message) in [
            ("/metadata/uid".to_owned(), json!("u2"), "made anew"),
            ("/status".to_owned(), json!({}), "ns/c is not allocated"),
            (
                format!("{result}/driver"),
                json!("gpu.example.com"),
                "no device of driver gpumux.dev",
            ),
            (
                format!("{result}/pool"),
                json!("node2"),
                "pool node2 is not on this node",
            ),
            (
                format!("{result}/device"),
                json!("gpu-9"),
                "no device gpu-9",
            ),
            (
                format!("{result}/consumedCapacity"),
                json!({}),
                "DRAConsumableCapacity",
            ),
            (
                format!("{result}/consumedCapacity"),
                json!({"cores": "1"}),
                "capacity `cores`",
            ),
            (
                format!("{result}/consumedCapacity"),
                json!({"compute": "many"}),
                "`many` is not a quantity",
            ),
            (
                format!("{result}/consumedCapacity"),
                json!({"compute": "0"}),
                "request gpu/big: tier `guaranteed`",
            ),
            (
                format!("{parameters}/kind"),
                json!("Gpu"),
                "write apiVersion",
            ),
        ] {
            let mut claim = allocated();
            *claim.pointer_mut(&path).unwrap() = value;
            let error = read(claim).unwrap_err();
            assert!(error.contains(message), "{path}: {error}");
        }
        let mut claim = allocated();
        let own = json!([{"source": "FromClaim", "opaque": {"driver": "gpumux.dev", "parameters":
            {"apiVersion": "config.gpumux.dev/v1alpha1", "kind": "GpuShare", "bounds": {"maxWeight": 1000}}}}]);
        claim["status"]["allocation"]["devices"]["config"] = own;
        assert!(read(claim).unwrap_err().contains("is for DeviceClasses"));
    }

    #[test]
    fn admin_access_is_guaranteed_nothing_and_counts_for_nothing() {
        let mut claim = allocated();
        let result = claim
            .pointer_mut("/status/allocation/devices/results/0")
            .unwrap();
        result["adminAccess"] = json!(true);
        result.as_object_mut().unwrap().remove("consumedCapacity");
        let shares = read(claim).unwrap();
        assert_eq!(shares[0].usage, Use::Admin);
        assert_eq!(shares[0].guaranteed(), Amounts::default());
    }

    #[test]
    fn a_whole_device_is_guaranteed_whole() {
        let mut claim = allocated();
        let result = claim
            .pointer_mut("/status/allocation/devices/results/0")
            .unwrap();
        result["device"] = json!("gpu-0-whole");
        result.as_object_mut().unwrap().remove("consumedCapacity");
        let shares = read(claim).unwrap();
        assert_eq!(shares[0].usage, Use::Whole);
        let spec = shares[0].spec(None).unwrap();
        assert_eq!((spec.guaranteed, spec.memory_guaranteed), (1.0, 0));
    }
}
