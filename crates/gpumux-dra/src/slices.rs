//! Builds the ResourceSlices of a node from its devices.
//!
//! Every device appears twice: shared (many claims, consumable capacity) and whole (one claim). Both draw on
//! one counter, so that the scheduler never gives a device out in both ways. Counters live in slices of their
//! own, in front of the devices'. A MIG instance that is made for a claim appears once. Its GPU has a set of counters: one for
//! each memory slice, one of the slices of processors, and one of the instances of each profile.

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
    device::{self, Device},
    mig::Offer,
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
    let (made, devices): (Vec<&Device>, Vec<&Device>) =
        devices.iter().partition(|device| device.offer.is_some());
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
        .chain(slice_counters(&made))
        .collect();
    let all: Vec<ApiDevice> = devices
        .iter()
        .enumerate()
        .flat_map(|(index, device)| {
            let set = set_name(index / COUNTERS_PER_SET);
            [shared(device, &set), whole(device, &set)]
        })
        .chain(made.iter().filter_map(|device| instance(device)))
        .collect();
    let counters = sets
        .chunks(COUNTER_SETS_PER_SLICE)
        .map(|sets| (Some(sets.to_vec()), None));
    let device_chunks = all
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

/// The name of the counters of a GPU's slices: by its UUID.
fn slices_name(gpu: &str) -> String {
    let plain: String = gpu.chars().filter(char::is_ascii_alphanumeric).collect();
    format!("slices-{}", plain.to_ascii_lowercase())
}

/// What an instance consumes of its GPU's counters.
fn slices_of(offer: &Offer) -> BTreeMap<String, Counter> {
    let place = &offer.place;
    let memory = place.start..place.start.saturating_add(place.memory_slices);
    let memory = memory.map(|slice| (format!("memory-slice-{slice}"), 1));
    let compute = ("compute-slices".to_owned(), offer.slices);
    let profile = (instances_name(&place.profile), 1);
    let all = memory.chain([compute, profile]);
    all.map(|(name, count)| (name, counter(count))).collect()
}

/// The counter of a profile's instances.
fn instances_name(profile: &str) -> String {
    format!("instances-{}", device::profile_name(profile))
}

fn counter(count: u32) -> Counter {
    Counter {
        value: quantity::count(count.into()),
    }
}

/// The counters of the GPUs whose instances are made for claims: as much as others leave.
fn slice_counters(made: &[&Device]) -> Vec<CounterSet> {
    let mut sets: BTreeMap<String, BTreeMap<String, Counter>> = BTreeMap::new();
    for offer in made.iter().filter_map(|device| device.offer.as_ref()) {
        let set = sets.entry(slices_name(&offer.place.gpu)).or_default();
        set.extend(slices_of(offer));
        set.insert("compute-slices".to_owned(), counter(offer.slices_free));
        set.insert(instances_name(&offer.place.profile), counter(offer.most));
    }
    let set = |(name, counters)| CounterSet { name, counters };
    sets.into_iter().map(set).collect()
}

/// A MIG instance that is made when a claim is allocated it.
fn instance(device: &Device) -> Option<ApiDevice> {
    let offer = device.offer.as_ref()?;
    let text = |value: &str| DeviceAttribute {
        string: Some(cut(value, 64)),
        ..Default::default()
    };
    let mut attributes = attributes(device);
    // It has one while it exists only.
    attributes.remove("uuid");
    attributes.insert("profile".to_owned(), text(&offer.place.profile));
    attributes.insert("gpuUUID".to_owned(), text(&offer.place.gpu));
    let memory = DeviceCapacity {
        value: quantity::bytes(device.memory_bytes),
        request_policy: None,
    };
    Some(ApiDevice {
        attributes: Some(attributes),
        capacity: Some(BTreeMap::from([(
            Resource::Memory.name().to_owned(),
            memory,
        )])),
        consumes_counters: Some(vec![DeviceCounterConsumption {
            counter_set: slices_name(&offer.place.gpu),
            counters: slices_of(offer),
        }]),
        ..common(device, device.name.clone(), "")
    })
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
            string(match device.mig.is_some() || device.offer.is_some() {
                true => "mig",
                false => "gpu",
            }),
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
            offer: None,
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

    /// The MIG instances that GPUs in MIG mode can have.
    fn offered(gpus: &[gpumux_daemon::api::types::MigGpu]) -> Vec<Device> {
        let all = gpus.iter().flat_map(|gpu| {
            let offers = crate::mig::offers(gpu, &Default::default());
            offers.into_iter().map(|it| (gpu.index, it.0, it.1))
        });
        let made =
            |(index, offer, profile): (u32, Offer, &gpumux_daemon::api::types::MigProfile)| {
                let gpu = format!("gpu-{index}");
                Device {
                    name: device::place_name(&gpu, &offer.place.profile, offer.place.start),
                    uuid: String::new(),
                    memory_bytes: profile.memory_bytes,
                    offer: Some(offer),
                    ..tests::device(index)
                }
            };
        all.map(made).collect()
    }

    #[test]
    fn node_of_eight_gpus_fits_with_all_mig_places() {
        let gpus: Vec<_> = (0..8).map(crate::mig::tests::gpu).collect();
        let devices = offered(&gpus);
        assert_eq!(devices.len(), 8 * 25);
        let slices = build(&node(), &devices, 1);
        let mut counters = BTreeMap::new();
        for slice in &slices {
            let sets = slice.shared_counters.iter().flatten();
            let devices = slice.devices.as_deref().unwrap_or_default();
            assert!(sets.clone().count() <= COUNTER_SETS_PER_SLICE);
            assert!(devices.len() <= DEVICES_PER_SLICE);
            assert!(serde_json::to_vec(slice).unwrap().len() < 100_000);
            for set in sets {
                assert!(set.counters.len() <= COUNTERS_PER_SET, "{set:?}");
                assert!(set.name.len() <= 63, "{}", set.name);
                counters.insert(set.name.clone(), set.counters.clone());
            }
        }
        assert_eq!(slices.len(), 1 + 4);
        assert_eq!(counters.len(), 8);
        let names: std::collections::BTreeSet<_> = slices
            .iter()
            .flat_map(|slice| slice.devices.iter().flatten())
            .map(|device| {
                assert!(device.name.len() <= 63, "{}", device.name);
                let [consumed] = &device.consumes_counters.as_ref().unwrap()[..] else {
                    panic!("one set")
                };
                let set = &counters[&consumed.counter_set];
                assert!(consumed.counters.keys().all(|name| set.contains_key(name)));
                device.name.clone()
            })
            .collect();
        assert_eq!(names.len(), devices.len());
        let json = serde_json::to_value(&slices).unwrap();
        let first = &json[1]["devices"][0];
        assert_eq!(first["name"], "gpu-0-mig-1g-10gb-at-0");
        assert_eq!(first["attributes"]["profile"]["string"], "1g.10gb");
        assert_eq!(first["attributes"]["type"]["string"], "mig");
        assert_eq!(first["capacity"]["memory"]["value"], "10Gi");
        assert!(first["attributes"]["uuid"].is_null());
        let set = &json[0]["sharedCounters"][0]["counters"];
        let value = |name: &str| set[name]["value"].clone();
        assert_eq!(value("memory-slice-7"), "1");
        assert_eq!(value("compute-slices"), "7");
        assert_eq!(value("instances-1g-10gb-me"), "1");
    }

    /// Whether the counters have room for one more device.
    fn fits(set: &CounterSet, given: &[&ApiDevice], one: &ApiDevice) -> bool {
        let count = |counter: &Counter| quantity::parse(&counter.value).unwrap();
        let consumed = |device: &ApiDevice, name: &String| {
            let all = device.consumes_counters.iter().flatten();
            let own = all.filter_map(|it| it.counters.get(name));
            own.map(count).sum::<u64>()
        };
        set.counters.iter().all(|(name, counter)| {
            let given: u64 = given.iter().map(|it| consumed(it, name)).sum();
            given + consumed(one, name) <= count(counter)
        })
    }

    proptest::proptest! {
        /// By the counters alone, what is given out beside others' instances can be made: no two share a slice.
        #[test]
        fn counters_give_no_slice_twice(
            others in proptest::collection::vec(0usize..25, 0..3),
            wanted in proptest::collection::vec(0usize..25, 1..30),
        ) {
            let mut gpu = crate::mig::tests::gpu(0);
            for other in others {
                crate::mig::tests::make_nth(&mut gpu, other);
            }
            let devices = offered(std::slice::from_ref(&gpu));
            let slices = build(&node(), &devices, 1);
            let Some(set) = slices.first().and_then(|it| it.shared_counters.as_ref()?.first()) else {
                return Ok(());
            };
            let all: Vec<&ApiDevice> = slices.iter().flat_map(|it| it.devices.iter().flatten()).collect();
            let (mut given, mut places) = (Vec::new(), Vec::new());
            for wanted in wanted {
                let at = wanted % all.len();
                if given.iter().any(|it: &&ApiDevice| it.name == all[at].name) || !fits(set, &given, all[at]) {
                    continue;
                }
                given.push(all[at]);
                let offer = devices[at].offer.as_ref().unwrap();
                places.push(offer.place.clone());
                // The driver has room for it.
                proptest::prop_assert!(crate::mig::tests::make_at(&mut gpu, &offer.place), "{}", offer.place);
            }
            for (index, place) in places.iter().enumerate() {
                proptest::prop_assert!(places[..index].iter().all(|it| !it.overlaps(place)));
            }
        }
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
