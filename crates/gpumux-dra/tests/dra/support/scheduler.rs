//! A scheduler for tests: it reads published slices as the real one does and allocates claims first fit. It knows
//! nothing of the driver but its rounding rule, which the recordings prove.

use std::collections::BTreeMap;

use gpumux_dra::{
    model::{Policy, Valid},
    quantity,
};
use k8s_openapi::{
    api::resource::v1::{CapacityRequestPolicy, Device, ResourceSlice},
    apimachinery::pkg::api::resource::Quantity,
};
use serde_json::{Value, json};

use super::api::Api;

/// What is given out of a pool.
#[derive(Clone, Default)]
pub struct Scheduler {
    consumed: BTreeMap<(String, String), u64>,
    /// How many claims use a device.
    users: BTreeMap<String, usize>,
    made: u64,
}

impl Scheduler {
    /// The results for a claim's requests, or none if they do not all fit.
    pub fn allocate(&mut self, slices: &[ResourceSlice], claim: &Value) -> Option<Vec<Value>> {
        let mut slices: Vec<_> = slices.iter().collect();
        slices.sort_by(|a, b| a.metadata.name.cmp(&b.metadata.name));
        let newest = slices
            .iter()
            .map(|slice| slice.spec.pool.generation)
            .max()?;
        let pool: Vec<_> = slices
            .into_iter()
            .filter(|slice| slice.spec.pool.generation == newest)
            .collect();
        // A pool is used only when it is complete.
        if pool.len() as i64 != pool[0].spec.pool.resource_slice_count {
            return None;
        }
        let counters: BTreeMap<(String, String), u64> = pool
            .iter()
            .flat_map(|slice| slice.spec.shared_counters.iter().flatten())
            .flat_map(|set| {
                set.counters
                    .iter()
                    .map(|(name, counter)| ((set.name.clone(), name.clone()), counter))
            })
            .map(|(key, counter)| (key, quantity::parse(&counter.value).unwrap()))
            .collect();
        let devices: Vec<&Device> = pool
            .iter()
            .flat_map(|slice| slice.spec.devices.iter().flatten())
            .collect();
        let before = (self.consumed.clone(), self.users.clone());
        let mut results = Vec::new();
        for request in claim["spec"]["devices"]["requests"].as_array()? {
            // The first alternative that fits; what is allocated names both.
            let alternatives = alternatives(request);
            let found = alternatives.iter().find_map(|(name, wanted)| {
                let first = self.find(&devices, &counters, wanted, &[])?;
                Some((name, wanted, first.0.name.clone()))
            });
            let Some((name, wanted, _)) = found else {
                (self.consumed, self.users) = before;
                return None;
            };
            let mut own = Vec::new();
            for _ in 0..wanted["count"].as_u64().unwrap_or(1) {
                let Some((device, consumed)) = self.find(&devices, &counters, wanted, &own) else {
                    (self.consumed, self.users) = before;
                    return None;
                };
                own.push(device.name.clone());
                *self.users.entry(device.name.clone()).or_default() += 1;
                for (name, value) in &consumed {
                    *self
                        .consumed
                        .entry((device.name.clone(), name.clone()))
                        .or_default() += value;
                }
                let mut result = json!({"request": name, "driver": pool[0].spec.driver,
                "pool": pool[0].spec.pool.name, "device": device.name});
                if device.allow_multiple_allocations == Some(true) {
                    self.made += 1;
                    result["shareID"] = json!(format!("00000000-0000-4000-9000-{:012}", self.made));
                    let write = |(name, value): (&String, &u64)| {
                        (name.clone(), json!(quantity::bytes(*value).0))
                    };
                    result["consumedCapacity"] = consumed.iter().map(write).collect();
                }
                results.push(result);
            }
        }
        Some(results)
    }

    /// The first device that has enough left, other than these.
    fn find<'a>(
        &self,
        devices: &[&'a Device],
        counters: &BTreeMap<(String, String), u64>,
        wanted: &Value,
        but: &[String],
    ) -> Option<(&'a Device, BTreeMap<String, u64>)> {
        let mut devices_left = devices.iter().filter(|device| !but.contains(&device.name));
        devices_left.find_map(|device| {
            let consumed = self.fits(devices, counters, device, wanted)?;
            Some((*device, consumed))
        })
    }

    /// What the device would give, if the class selects it and enough is left.
    fn fits(
        &self,
        devices: &[&Device],
        counters: &BTreeMap<(String, String), u64>,
        device: &Device,
        wanted: &Value,
    ) -> Option<BTreeMap<String, u64>> {
        let shared = device.allow_multiple_allocations == Some(true);
        let class = wanted["deviceClassName"].as_str()?;
        let profile = device.attributes.as_ref().and_then(|it| it.get("profile"));
        let selected = match class {
            // A selector names the profile in quotes.
            "gpumux-mig" => profile
                .and_then(|it| it.string.as_ref())
                .is_some_and(|it| wanted["selectors"].to_string().contains(&format!("'{it}'"))),
            _ => profile.is_none() && shared != class.ends_with("whole"),
        };
        if !selected
            || device
                .taints
                .iter()
                .flatten()
                .any(|taint| taint.effect != "None")
        {
            return None;
        }
        if !shared && self.users.contains_key(&device.name) {
            return None;
        }
        // A device's counters are charged once, however many share it.
        for consumption in device
            .consumes_counters
            .iter()
            .flatten()
            .filter(|_| !self.users.contains_key(&device.name))
        {
            for (name, counter) in &consumption.counters {
                let others: u64 = devices
                    .iter()
                    .filter(|other| {
                        other.name != device.name && self.users.contains_key(&other.name)
                    })
                    .flat_map(|other| other.consumes_counters.iter().flatten())
                    .filter(|other| other.counter_set == consumption.counter_set)
                    .filter_map(|other| other.counters.get(name))
                    .map(|counter| quantity::parse(&counter.value).unwrap())
                    .sum();
                let there = *counters.get(&(consumption.counter_set.clone(), name.clone()))?;
                if others + quantity::parse(&counter.value).unwrap() > there {
                    return None;
                }
            }
        }
        let asked = wanted
            .pointer("/capacity/requests")
            .and_then(Value::as_object);
        if asked.into_iter().flatten().any(|(name, _)| {
            !device
                .capacity
                .as_ref()
                .is_some_and(|c| c.contains_key(name))
        }) {
            return None;
        }
        let mut consumed = BTreeMap::new();
        for (name, capacity) in device.capacity.iter().flatten().filter(|_| shared) {
            let there = quantity::parse(&capacity.value).unwrap();
            let asked = asked
                .and_then(|asked| asked.get(name))
                .and_then(Value::as_str);
            let asked = asked.map(|text| quantity::parse(&Quantity(text.into())).unwrap());
            let amount = match &capacity.request_policy {
                Some(published) => policy(published).consumed(asked, there).ok()?,
                // Without a policy a request takes what it names, or everything.
                None => asked.unwrap_or(there),
            };
            let used = self
                .consumed
                .get(&(device.name.clone(), name.clone()))
                .copied()
                .unwrap_or(0);
            if used + amount > there {
                return None;
            }
            consumed.insert(name.clone(), amount);
        }
        Some(consumed)
    }

    /// Allocates a claim of the API server's in place, with the configuration of its class and its own.
    pub fn bind(&mut self, api: &Api, namespace: &str, name: &str, pod: &str) -> bool {
        let mut claim = api.claim(namespace, name).unwrap();
        let Some(results) = self.allocate(&api.slices(), &claim) else {
            return false;
        };
        let requests = claim["spec"]["devices"]["requests"].as_array().unwrap();
        let all: Vec<_> = requests.iter().flat_map(alternatives).collect();
        let mut config = Vec::new();
        for result in &results {
            let (name, wanted) = all
                .iter()
                .find(|(name, _)| result["request"] == **name)
                .unwrap();
            let tier = match wanted["deviceClassName"].as_str().unwrap() {
                "gpumux-guaranteed" => json!("guaranteed"),
                "gpumux-preemptible" => json!("preemptible"),
                _ => Value::Null,
            };
            config.push(json!({"source": "FromClass", "requests": [name], "opaque": {
                "driver": gpumux_dra::DRIVER,
                "parameters": {"apiVersion": "config.gpumux.dev/v1alpha1", "kind": "GpuShare", "tier": tier}}}));
        }
        for own in claim
            .pointer("/spec/devices/config")
            .and_then(Value::as_array)
            .into_iter()
            .flatten()
        {
            let mut own = own.clone();
            own["source"] = json!("FromClaim");
            config.push(own);
        }
        claim["status"] = json!({
            "allocation": {"devices": {"results": results, "config": config}},
            "reservedFor": [{"resource": "pods", "name": pod, "uid": format!("pod-{pod}")}],
        });
        api.put_claim(namespace, name, claim);
        true
    }
}

/// What may satisfy a request, by the name that an allocation of it has.
fn alternatives(request: &Value) -> Vec<(String, &Value)> {
    let name = request["name"].as_str().unwrap_or_default();
    match request["firstAvailable"].as_array() {
        None => vec![(name.to_owned(), &request["exactly"])],
        Some(all) => all
            .iter()
            .map(|one| {
                (
                    format!("{name}/{}", one["name"].as_str().unwrap_or_default()),
                    one,
                )
            })
            .collect(),
    }
}

fn policy(published: &CapacityRequestPolicy) -> Policy {
    let number = |quantity: &Quantity| quantity::parse(quantity).unwrap();
    let valid = match (&published.valid_range, &published.valid_values) {
        (Some(range), _) => Valid::Range {
            min: number(&range.min),
            max: range.max.as_ref().map(number),
            step: range.step.as_ref().map_or(1, number),
        },
        (None, values) => Valid::Values(values.iter().flatten().map(number).collect()),
    };
    Policy {
        default: published.default.as_ref().map_or(0, number),
        valid,
    }
}
