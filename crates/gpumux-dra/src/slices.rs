//! Builds the ResourceSlices of a node from its devices.
//!
//! Every device appears twice: shared (many claims, consumable capacity) and whole (one claim). Both draw on
//! one counter, so that the scheduler never gives a device out in both ways. Counters live in slices of their
//! own, in front of the devices'.

use std::collections::BTreeMap;

use k8s_openapi::{
    api::resource::v1::{
        CapacityRequestPolicy, CapacityRequestPolicyRange, Counter, CounterSet,
        Device as ApiDevice, DeviceAttribute, DeviceCapacity, DeviceCounterConsumption,
        DeviceTaint, ResourcePool, ResourceSlice, ResourceSliceSpec,
    },
    apimachinery::pkg::{
        api::resource::Quantity,
        apis::meta::v1::{ObjectMeta, OwnerReference},
    },
};

use crate::{
    DRIVER,
    device::Device,
    model::{self, Policy, Resource, Valid},
    quantity,
};

/// Most devices of a slice whose devices consume counters or have taints.
pub const DEVICES_PER_SLICE: usize = 64;
/// Most counter sets of a slice.
pub const COUNTER_SETS_PER_SLICE: usize = 8;
/// Most counters of a counter set.
pub const COUNTERS_PER_SET: usize = 32;
/// The taint of a device that does not work. Once the fault has lasted, pods on it are evicted, unless they tolerate it.
pub const FAULT_TAINT: &str = "gpumux.dev/fault";

/// Whose slices they are.
#[derive(Clone, Debug)]
pub struct Node {
    /// Its name.
    pub name: String,
    /// Its uid, so that the slices go with it.
    pub uid: String,
}

/// The specs of the node's slices, in the order of their names, all of the given generation.
pub fn build(node: &Node, devices: &[Device], generation: i64) -> Vec<ResourceSliceSpec> {
    let sets: Vec<CounterSet> = devices
        .chunks(COUNTERS_PER_SET)
        .enumerate()
        .map(|(index, devices)| CounterSet {
            name: set_name(index),
            counters: devices
                .iter()
                .map(|device| {
                    (
                        device.name.clone(),
                        Counter {
                            value: quantity::count(1),
                        },
                    )
                })
                .collect(),
        })
        .collect();
    let shared_and_whole: Vec<ApiDevice> = devices
        .iter()
        .enumerate()
        .flat_map(|(index, device)| {
            let set = set_name(index / COUNTERS_PER_SET);
            [shared(device, &set), whole(device, &set)]
        })
        .collect();
    let counters = sets
        .chunks(COUNTER_SETS_PER_SLICE)
        .map(|sets| (Some(sets.to_vec()), None));
    let device_chunks = shared_and_whole
        .chunks(DEVICES_PER_SLICE)
        .map(|chunk| (None, Some(chunk.to_vec())));
    let contents: Vec<_> = counters.chain(device_chunks).collect();
    let count = i64::try_from(contents.len()).unwrap_or(i64::MAX);
    contents
        .into_iter()
        .map(|(shared_counters, devices)| ResourceSliceSpec {
            driver: DRIVER.to_owned(),
            node_name: Some(node.name.clone()),
            pool: ResourcePool {
                name: node.name.clone(),
                generation,
                resource_slice_count: count,
            },
            shared_counters,
            devices,
            ..Default::default()
        })
        .collect()
}

/// A slice object around a spec.
pub fn object(node: &Node, index: usize, spec: ResourceSliceSpec) -> ResourceSlice {
    ResourceSlice {
        metadata: ObjectMeta {
            name: Some(object_name(node, index)),
            owner_references: Some(vec![OwnerReference {
                api_version: "v1".to_owned(),
                kind: "Node".to_owned(),
                name: node.name.clone(),
                uid: node.uid.clone(),
                controller: Some(true),
                ..Default::default()
            }]),
            ..Default::default()
        },
        spec,
    }
}

/// The name of a node's slice. The scheduler goes through devices in the order of these names.
pub fn object_name(node: &Node, index: usize) -> String {
    format!("{}-{DRIVER}-{index:03}", node.name)
}

fn set_name(index: usize) -> String {
    format!("use-{index}")
}

fn shared(device: &Device, set: &str) -> ApiDevice {
    let whole = device.capacity();
    let capacity = |resource: Resource| {
        let write = match resource {
            Resource::Memory => quantity::bytes,
            Resource::Compute | Resource::Clients => quantity::count,
        };
        DeviceCapacity {
            value: write(whole.get(resource)),
            request_policy: Some(policy(resource, write)),
        }
    };
    ApiDevice {
        allow_multiple_allocations: Some(true),
        capacity: Some(
            Resource::ALL
                .into_iter()
                .map(|r| (r.name().to_owned(), capacity(r)))
                .collect(),
        ),
        ..common(device, device.name.clone(), set)
    }
}

fn whole(device: &Device, set: &str) -> ApiDevice {
    let capacity = [
        (Resource::Compute, quantity::count(model::WHOLE_COMPUTE)),
        (Resource::Memory, quantity::bytes(device.memory_bytes)),
    ];
    ApiDevice {
        capacity: Some(
            capacity
                .into_iter()
                .map(|(resource, value)| {
                    (
                        resource.name().to_owned(),
                        DeviceCapacity {
                            value,
                            request_policy: None,
                        },
                    )
                })
                .collect(),
        ),
        ..common(device, device.whole_name(), set)
    }
}

fn common(device: &Device, name: String, set: &str) -> ApiDevice {
    ApiDevice {
        name,
        attributes: Some(attributes(device)),
        consumes_counters: Some(vec![DeviceCounterConsumption {
            counter_set: set.to_owned(),
            counters: BTreeMap::from([(
                device.name.clone(),
                Counter {
                    value: quantity::count(1),
                },
            )]),
        }]),
        taints: device.fault.as_deref().map(|fault| {
            vec![DeviceTaint {
                key: FAULT_TAINT.to_owned(),
                value: Some(label_value(fault)),
                effect: if device.evict {
                    "NoExecute"
                } else {
                    "NoSchedule"
                }
                .to_owned(),
                time_added: None,
            }]
        }),
        ..Default::default()
    }
}

fn policy(resource: Resource, write: fn(u64) -> Quantity) -> CapacityRequestPolicy {
    let policy = Policy::of(resource);
    let (valid_range, valid_values) = match policy.valid {
        Valid::Range { min, max, step } => (
            Some(CapacityRequestPolicyRange {
                min: write(min),
                max: max.map(write),
                step: Some(write(step)),
            }),
            None,
        ),
        Valid::Values(values) => (None, Some(values.into_iter().map(write).collect())),
    };
    CapacityRequestPolicy {
        default: Some(write(policy.default)),
        valid_range,
        valid_values,
    }
}

fn attributes(device: &Device) -> BTreeMap<String, DeviceAttribute> {
    let string = |value: &str| DeviceAttribute {
        string: Some(cut(value, 64)),
        ..Default::default()
    };
    let version = |value: String| DeviceAttribute {
        version: Some(value),
        ..Default::default()
    };
    let flag = |value| DeviceAttribute {
        bool: Some(value),
        ..Default::default()
    };
    let mut attributes = BTreeMap::from([
        ("uuid".to_owned(), string(&device.uuid)),
        (
            "type".to_owned(),
            string(if device.mig.is_some() { "mig" } else { "gpu" }),
        ),
        ("emulated".to_owned(), flag(device.emulated)),
    ]);
    let mut add = |name: &str, value| attributes.insert(name.to_owned(), value);
    if !device.product.is_empty() {
        add("productName", string(&device.product));
    }
    if let Some((major, minor)) = device.compute_capability {
        add(
            "cudaComputeCapability",
            version(format!("{major}.{minor}.0")),
        );
    }
    if let Some(value) = semver(&device.driver) {
        add("driverVersion", version(value));
    }
    if let Some(bus) = &device.pci_bus_id {
        add("resource.kubernetes.io/pciBusID", string(bus));
    }
    if let Some(root) = &device.pcie_root {
        add("resource.kubernetes.io/pcieRoot", string(root));
    }
    attributes
}

/// The driver's version as semantic version, which allows no leading zeros: `580.82.07` is `580.82.7`.
fn semver(version: &str) -> Option<String> {
    let mut numbers: Vec<u64> = version
        .split('.')
        .map(|part| part.parse().ok())
        .collect::<Option<_>>()?;
    if numbers.len() > 3 {
        return None;
    }
    numbers.resize(3, 0);
    Some(
        numbers
            .iter()
            .map(u64::to_string)
            .collect::<Vec<_>>()
            .join("."),
    )
}

fn cut(text: &str, bytes: usize) -> String {
    text[..text.floor_char_boundary(bytes)].to_owned()
}

/// What a taint's value may hold: a label value.
fn label_value(text: &str) -> String {
    let plain: String = text
        .chars()
        .map(|c| {
            if c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.') {
                c
            } else {
                '-'
            }
        })
        .take(63)
        .collect();
    plain
        .trim_matches(|c: char| !c.is_ascii_alphanumeric())
        .to_owned()
}

/// Whether what is published means the same as what is wanted, whatever its generation. Quantities are
/// compared by value, because the API server writes them in its own way.
pub fn same(published: &ResourceSliceSpec, wanted: &ResourceSliceSpec) -> bool {
    let plain = |spec: &ResourceSliceSpec| {
        let mut spec = spec.clone();
        spec.pool.generation = 0;
        for device in spec.devices.iter_mut().flatten() {
            for capacity in device.capacity.iter_mut().flat_map(|map| map.values_mut()) {
                normalize(&mut capacity.value);
                let Some(policy) = &mut capacity.request_policy else {
                    continue;
                };
                policy.default.iter_mut().for_each(normalize);
                policy.valid_values.iter_mut().flatten().for_each(normalize);
                if let Some(range) = &mut policy.valid_range {
                    normalize(&mut range.min);
                    range
                        .max
                        .iter_mut()
                        .chain(&mut range.step)
                        .for_each(normalize);
                }
            }
            for taint in device.taints.iter_mut().flatten() {
                taint.time_added = None;
            }
        }
        spec
    };
    plain(published) == plain(wanted)
}

fn normalize(value: &mut Quantity) {
    if let Ok(number) = quantity::parse(value) {
        value.0 = number.to_string();
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn device(minor: u32) -> Device {
        Device {
            name: format!("gpu-{minor}"),
            uuid: format!("GPU-0f1e2d3c-0000-0000-0000-{minor:012}"),
            product: "NVIDIA H100 80GB HBM3".into(),
            compute_capability: Some((9, 0)),
            driver: "580.82.07".into(),
            pci_bus_id: Some(format!("0000:{minor:02x}:00.0")),
            pcie_root: Some("pci0000:3a".into()),
            memory_bytes: 80 << 30,
            memory_guaranteeable: 79 << 30,
            context_bytes: 544 << 20,
            minor: Some(minor),
            mig: None,
            emulated: false,
            fault: None,
            evict: false,
        }
    }

    pub(crate) fn node() -> Node {
        Node {
            name: "node1".into(),
            uid: "n-1".into(),
        }
    }

    #[test]
    fn a_gpu_is_offered_shared_and_whole_through_one_counter() {
        let slices = build(&node(), &[device(0)], 7);
        let json = serde_json::to_value(&slices).unwrap();
        assert_eq!(
            json[0]["sharedCounters"][0]["counters"]["gpu-0"]["value"],
            "1"
        );
        let devices = &json[1]["devices"];
        assert_eq!(devices[0]["allowMultipleAllocations"], true);
        assert_eq!(devices[1]["name"], "gpu-0-whole");
        for index in [0, 1] {
            assert_eq!(devices[index]["consumesCounters"][0]["counterSet"], "use-0");
            assert_eq!(
                devices[index]["consumesCounters"][0]["counters"]["gpu-0"]["value"],
                "1"
            );
        }
        assert_eq!(devices[0]["capacity"]["compute"]["value"], "1k");
        assert_eq!(
            devices[0]["capacity"]["memory"]["value"], "79Gi",
            "what gpumuxd can guarantee"
        );
        assert_eq!(devices[1]["capacity"]["memory"]["value"], "80Gi");
        assert_eq!(
            devices[0]["attributes"]["driverVersion"]["version"],
            "580.82.7"
        );
        assert_eq!(json[1]["pool"]["generation"], 7);
        assert_eq!(json[1]["pool"]["resourceSliceCount"], 2);
    }

    #[test]
    fn a_broken_device_evicts_its_pods() {
        for (evict, effect) in [(false, "NoSchedule"), (true, "NoExecute")] {
            let broken = Device {
                fault: Some("device lost (Xid 79)".into()),
                evict,
                ..device(0)
            };
            let slices = build(&node(), &[broken], 1);
            let taints = slices[1].devices.as_ref().unwrap()[0]
                .taints
                .as_ref()
                .unwrap();
            assert_eq!(taints[0].effect, effect);
            assert_eq!(taints[0].value.as_deref(), Some("device-lost--Xid-79"));
        }
    }

    #[test]
    fn the_same_slice_in_other_words_is_the_same() {
        let wanted = build(&node(), &[device(0)], 1);
        let mut published = wanted[1].clone();
        published.pool.generation = 9;
        let devices = published.devices.as_mut().unwrap();
        devices[0]
            .capacity
            .as_mut()
            .unwrap()
            .get_mut("compute")
            .unwrap()
            .value = Quantity("1000".into());
        assert!(same(&published, &wanted[1]));
        published.devices.as_mut().unwrap()[0].allow_multiple_allocations = None;
        assert!(
            !same(&published, &wanted[1]),
            "a cluster without the gate drops the field"
        );
    }
}
