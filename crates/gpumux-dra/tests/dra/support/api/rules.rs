//! What the real server checks of a slice.

use super::*;

/// The checks of a slice, in the real server's words.
pub fn check(slice: &ResourceSlice) -> Result<(), Refusal> {
    let mut causes = Vec::new();
    let mut add = |reason, field: String, message: String| {
        causes.push(Cause {
            reason,
            field,
            message,
        })
    };
    let spec = &slice.spec;
    let places = [
        spec.node_name.is_some(),
        spec.node_selector.is_some(),
        spec.all_nodes.is_some(),
        spec.per_device_node_selection.is_some(),
    ];
    if places.iter().filter(|place| **place).count() != 1 {
        let one_of = "exactly one of `nodeName`, `nodeSelector`, `allNodes`, `perDeviceNodeSelection` is required";
        add(
            "FieldValueRequired",
            "spec".into(),
            format!("Required value: {one_of}"),
        );
    }
    if spec.pool.resource_slice_count <= 0 {
        let count = spec.pool.resource_slice_count;
        let message = format!("Invalid value: {count}: must be greater than zero");
        add(
            "FieldValueInvalid",
            "spec.pool.resourceSliceCount".into(),
            message,
        );
    }
    if spec.devices.is_some() && spec.shared_counters.is_some() {
        let message = "Invalid value: \"\": only one of `sharedCounters` or `devices` is allowed";
        add("FieldValueInvalid", "spec".into(), message.into());
    }
    let devices = spec.devices.as_deref().unwrap_or_default();
    let heavy = devices
        .iter()
        .any(|device| device.taints.is_some() || device.consumes_counters.is_some());
    let most = if heavy { 64 } else { 128 };
    if devices.len() > most {
        let message = format!(
            "Too many: {}: must have at most {most} items",
            devices.len()
        );
        add("FieldValueTooMany", "spec.devices".into(), message);
    }
    let sets = spec.shared_counters.as_deref().unwrap_or_default();
    if sets.len() > 8 {
        add(
            "FieldValueTooMany",
            "spec.sharedCounters".into(),
            format!("Too many: {}: must have at most 8 items", sets.len()),
        );
    }
    for (index, set) in sets
        .iter()
        .enumerate()
        .filter(|(_, set)| set.counters.len() > 32)
    {
        let message = format!(
            "Too many: {}: must have at most 32 items",
            set.counters.len()
        );
        add(
            "FieldValueTooMany",
            format!("spec.sharedCounters[{index}].counters"),
            message,
        );
    }
    let mut names = BTreeSet::new();
    for (index, device) in devices.iter().enumerate() {
        if !names.insert(&device.name) {
            let message = format!("Duplicate value: {:?}", device.name);
            add(
                "FieldValueDuplicate",
                format!("spec.devices[{index}]"),
                message,
            );
        }
        check_device(device, &format!("spec.devices[{index}]"), &mut add);
    }
    if causes.is_empty() {
        return Ok(());
    }
    let name = slice.metadata.name.as_deref().unwrap_or_default();
    let all: Vec<_> = causes
        .iter()
        .map(|cause| format!("{}: {}", cause.field, cause.message))
        .collect();
    let message = format!(
        "ResourceSlice.resource.k8s.io {name:?} is invalid: {}",
        all.join(", ")
    );
    Err(Refusal {
        code: 422,
        message,
        causes,
    })
}

fn check_device(device: &Device, path: &str, add: &mut impl FnMut(&'static str, String, String)) {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    let name = &device.name;
    if name.is_empty()
        || name.len() > 63
        || !name.chars().all(plain)
        || name.starts_with('-')
        || name.ends_with('-')
    {
        let message = format!(
            "Invalid value: {name:?}: a lowercase RFC 1123 label must consist of lower case alphanumeric characters \
             or '-', and must start and end with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used \
             for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?')"
        );
        add("FieldValueInvalid", format!("{path}.name"), message);
    }
    let attributes = device.attributes.iter().flatten();
    let capacities: Vec<_> = device.capacity.iter().flatten().collect();
    let total = attributes.clone().count() + capacities.len();
    if total > 32 {
        let message = format!(
            "Invalid value: {total}: the total number of attributes and capacities must not exceed 32"
        );
        add("FieldValueInvalid", path.into(), message);
    }
    for (name, attribute) in attributes {
        let path = format!("{path}.attributes[{name}]");
        let kinds = [
            attribute.int.is_some(),
            attribute.bool.is_some(),
            attribute.string.is_some(),
            attribute.version.is_some(),
        ];
        if kinds.iter().filter(|kind| **kind).count() != 1 {
            let shown = json!({"IntValue": attribute.int, "BoolValue": attribute.bool, "StringValue": attribute.string,
                "VersionValue": attribute.version});
            add(
                "FieldValueInvalid",
                path,
                format!("Invalid value: {shown}: exactly one value must be specified"),
            );
        } else if attribute
            .string
            .as_ref()
            .is_some_and(|text| text.len() > 64)
        {
            add(
                "FieldValueTooLong",
                format!("{path}.string"),
                "Too long: may not be more than 64 bytes".into(),
            );
        } else if attribute
            .version
            .as_ref()
            .is_some_and(|version| !is_semver(version))
        {
            add(
                "FieldValueInvalid",
                format!("{path}.version"),
                "Invalid value: must be a string compatible with semver.org spec 2.0.0".into(),
            );
        }
    }
    for (name, capacity) in capacities {
        check_capacity(
            device,
            capacity,
            &format!("{path}.capacity[{name}].requestPolicy"),
            add,
        );
    }
    if device
        .consumes_counters
        .as_ref()
        .is_some_and(|consumed| consumed.len() > 2)
    {
        add(
            "FieldValueTooMany",
            format!("{path}.consumesCounters"),
            "Too many".into(),
        );
    }
    for (index, taint) in device.taints.iter().flatten().enumerate() {
        if !matches!(taint.effect.as_str(), "None" | "NoSchedule" | "NoExecute") {
            let message = format!(
                "Unsupported value: {:?}: supported values: \"NoExecute\", \"NoSchedule\", \"None\"",
                taint.effect
            );
            add(
                "FieldValueNotSupported",
                format!("{path}.taints[{index}].effect"),
                message,
            );
        }
    }
}

fn check_capacity(
    device: &Device,
    capacity: &DeviceCapacity,
    path: &str,
    add: &mut impl FnMut(&'static str, String, String),
) {
    let Some(policy) = &capacity.request_policy else {
        return;
    };
    let number = |quantity: &Quantity| quantity::parse(quantity).unwrap_or(0);
    if device.allow_multiple_allocations != Some(true) {
        add(
            "FieldValueForbidden",
            path.into(),
            "Forbidden: allowMultipleAllocations must be true".into(),
        );
        return;
    }
    let default = policy.default.as_ref();
    match (&policy.valid_range, &policy.valid_values) {
        (Some(_), Some(_)) => {
            let message = "Forbidden: exactly one policy can be specified, cannot specify \"validValues\" and \"validRange\" at the same time";
            add("FieldValueForbidden", path.into(), message.into());
        }
        (None, Some(values)) => {
            let path = format!("{path}.validValues");
            if values.len() > 10 {
                add(
                    "FieldValueTooMany",
                    path.clone(),
                    format!("Too many: {}: must have at most 10 items", values.len()),
                );
            }
            for (index, pair) in values.windows(2).enumerate() {
                if number(&pair[0]) >= number(&pair[1]) {
                    let message = format!(
                        "Invalid value: {:?}: values must be sorted in ascending order",
                        pair[1].0
                    );
                    add(
                        "FieldValueInvalid",
                        format!("{path}[{}]", index + 1),
                        message,
                    );
                }
            }
            let Some(default) = default else { return };
            // Values beyond the limit do not count, and neither do any then.
            if values.len() > 10 || !values.iter().any(|value| number(value) == number(default)) {
                let message = format!(
                    "Invalid value: {:?}: default value is not valid according to the requestPolicy",
                    default.0
                );
                add("FieldValueInvalid", path, message);
            }
        }
        (Some(range), None) => {
            let Some(default) = default else {
                add(
                    "FieldValueRequired",
                    format!("{path}.default"),
                    "Required value: required when validRange is defined".into(),
                );
                return;
            };
            let path = format!("{path}.validRange");
            if range.min.0.is_empty() {
                add(
                    "FieldValueRequired",
                    format!("{path}.min"),
                    "Required value: required when validRange is defined".into(),
                );
                return;
            }
            if let Some(max) = range
                .max
                .as_ref()
                .filter(|max| number(max) > number(&capacity.value))
            {
                let canonical = |quantity: &Quantity| quantity::count(number(quantity)).0;
                let message = format!(
                    "Invalid value: {:?}: max is larger than capacity value: {}",
                    canonical(max),
                    canonical(&capacity.value)
                );
                add("FieldValueInvalid", format!("{path}.max"), message);
            }
            if number(default) < number(&range.min) {
                let message = format!(
                    "Invalid value: {:?}: default is less than min: {}",
                    default.0, range.min.0
                );
                add("FieldValueInvalid", format!("{path}.min"), message);
            } else if let Some(step) = &range.step
                && !(number(default) - number(&range.min)).is_multiple_of(number(step).max(1))
            {
                let message = format!(
                    "Invalid value: {:?}: value is not a multiple of a given step ({}) from ({})",
                    default.0, step.0, range.min.0
                );
                add("FieldValueInvalid", format!("{path}.step"), message);
            }
        }
        (None, None) => {}
    }
}

fn is_semver(version: &str) -> bool {
    let number = |part: &str| {
        part.parse::<u64>()
            .is_ok_and(|value| value.to_string() == part)
    };
    version.split('.').count() == 3 && version.split('.').all(number)
}
