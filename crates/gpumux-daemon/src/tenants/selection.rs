//! Which devices a tenant may use, by what was asked for it.

use std::collections::BTreeMap;

use gpumux_core::is_name;

use super::model::{MAX_CONFINED, TenantError};
use crate::devices::Numbers;

/// The variable that tells CUDA programs which devices to use.
const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";
/// The variable that makes numbers in it NVML's.
const ORDER: (&str, &str) = ("CUDA_DEVICE_ORDER", "PCI_BUS_ID");

/// The devices of a tenant.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Selection {
    /// Their UUIDs; empty: all.
    pub(super) devices: Vec<String>,
    /// What its processes need in their environment to use these.
    pub(super) environment: BTreeMap<String, String>,
}

/// What was `asked` for it comes first, then what was `declared` for its name, then what its processes find `visible`. `listed`: the
/// environment must name all of them.
pub(super) fn select(
    asked: &[String],
    declared: &[String],
    visible: Option<&str>,
    numbers: &Numbers,
    listed: bool,
) -> Result<Selection, TenantError> {
    let named = if asked.is_empty() { declared } else { asked };
    let all = named.iter().any(|name| name == "all") || (named.is_empty() && visible.is_none());
    let every = if all && listed {
        every(numbers)
    } else {
        Vec::new()
    };
    let named = if every.is_empty() { named } else { &every };
    if named.len() > MAX_CONFINED {
        return Err(TenantError::TooManyDevices(named.len()));
    }
    if !named.is_empty() {
        if named.iter().any(|name| name == "all") {
            return Ok(Selection::default());
        }
        let mut devices = Vec::new();
        for name in named {
            let uuid = resolve(name, numbers)?;
            if !devices.contains(&uuid) {
                devices.push(uuid);
            }
        }
        // Some programs read numbers only.
        let by_number: Option<Vec<String>> = devices
            .iter()
            .map(|uuid| whole_gpu(uuid, numbers).map(|number| number.to_string()))
            .collect();
        let environment = match by_number {
            Some(all) => BTreeMap::from([
                (VISIBLE.into(), all.join(",")),
                (ORDER.0.into(), ORDER.1.into()),
            ]),
            None => BTreeMap::from([(VISIBLE.into(), devices.join(","))]),
        };
        return Ok(Selection {
            devices,
            environment,
        });
    }
    let Some(visible) = visible else {
        return Ok(Selection::default());
    };
    let mut selection = Selection::default();
    // As the driver does: what comes after the first name that is none does not count.
    for name in visible.split(',').map(str::trim) {
        let Ok(uuid) = resolve(name, numbers) else {
            break;
        };
        if !numbers.contains_key(&uuid) {
            break;
        }
        if name.parse::<u32>().is_ok() {
            selection.environment.insert(ORDER.0.into(), ORDER.1.into());
        }
        if !selection.devices.contains(&uuid) {
            selection.devices.push(uuid);
        }
    }
    Ok(selection)
}

/// The UUIDs of all devices, by their numbers.
fn every(numbers: &Numbers) -> Vec<String> {
    let mut all: Vec<(&String, &u32)> = numbers.iter().collect();
    all.sort_by_key(|(_, number)| **number);
    all.into_iter().map(|(uuid, _)| uuid.clone()).collect()
}

/// The UUID of the device of this name: a number, a UUID, or how a UUID begins.
pub(crate) fn resolve(name: &str, numbers: &Numbers) -> Result<String, TenantError> {
    let known = || {
        let list = |(uuid, number): (&String, &u32)| format!("{number} ({uuid})");
        let all: Vec<String> = numbers.iter().map(list).collect();
        match all.is_empty() {
            true => "no device is known yet".to_owned(),
            false => format!("the devices are {}", all.join(", ")),
        }
    };
    let fits: Vec<&String> = match name.parse::<u32>() {
        Ok(wanted) => {
            let of = numbers.iter().filter(|(_, number)| **number == wanted);
            of.map(|(uuid, _)| uuid).collect()
        }
        Err(_) if !is_name(name) => return Err(TenantError::NoDevice(name.into(), known())),
        Err(_) if numbers.contains_key(name) => return Ok(name.into()),
        Err(_) => numbers
            .keys()
            .filter(|uuid| uuid.starts_with(name))
            .collect(),
    };
    match (fits.as_slice(), numbers.is_empty() && name.contains('-')) {
        ([one], _) => Ok((*one).clone()),
        // Without NVML, devices are known once a tenant uses them.
        ([], true) => Ok(name.into()),
        _ => Err(TenantError::NoDevice(name.into(), known())),
    }
}

/// The number of a GPU that is not partitioned.
fn whole_gpu(uuid: &str, numbers: &Numbers) -> Option<u32> {
    let partitioned = numbers.keys().any(|it| it.starts_with("MIG-"));
    numbers.get(uuid).filter(|_| !partitioned).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers() -> Numbers {
        of([("GPU-aa-1", 1), ("GPU-ab-0", 0), ("MIG-x", 2), ("MIG-y", 2)])
    }

    fn of<const N: usize>(all: [(&str, u32); N]) -> Numbers {
        all.map(|(uuid, number)| (uuid.to_owned(), number)).into()
    }

    fn strings(all: &[&str]) -> Vec<String> {
        all.iter().map(|it| (*it).to_owned()).collect()
    }

    fn devices(asked: &[&str], declared: &[&str], visible: Option<&str>) -> Vec<String> {
        let found = select(
            &strings(asked),
            &strings(declared),
            visible,
            &numbers(),
            false,
        );
        found.unwrap().devices
    }

    #[test]
    fn asked_comes_before_declared_before_visible() {
        assert_eq!(devices(&["0"], &["1"], Some("1")), ["GPU-ab-0"]);
        assert_eq!(devices(&[], &["1"], Some("0")), ["GPU-aa-1"]);
        assert_eq!(devices(&[], &[], Some("0")), ["GPU-ab-0"]);
        assert_eq!(devices(&[], &[], None), [""; 0]);
        assert_eq!(devices(&["all"], &["1"], Some("1")), [""; 0]);
    }

    #[test]
    fn devices_are_named_by_number_uuid_or_beginning() {
        assert_eq!(
            devices(&["1", "GPU-ab", "1"], &[], None),
            ["GPU-aa-1", "GPU-ab-0"]
        );
        assert_eq!(devices(&["MIG-y"], &[], None), ["MIG-y"]);
        for wrong in ["3", "GPU-", "2", "GPU 0", "", "-1"] {
            let error = select(&strings(&[wrong]), &[], None, &numbers(), false).unwrap_err();
            let error = error.to_string();
            assert!(error.contains(&format!("`{wrong}`")), "{error}");
            assert!(error.contains("0 (GPU-ab-0)"), "{error}");
        }
        let unknown = select(&strings(&["GPU-7"]), &[], None, &Numbers::new(), false).unwrap();
        assert_eq!(unknown.devices, ["GPU-7"]);
    }

    #[test]
    fn visible_devices_end_at_the_first_that_is_none() {
        assert_eq!(devices(&[], &[], Some("1, 9,0")), ["GPU-aa-1"]);
        assert_eq!(
            devices(&[], &[], Some("GPU-ab,MIG-x")),
            ["GPU-ab-0", "MIG-x"]
        );
        for none in ["", "-1", "NoDevFiles"] {
            assert_eq!(devices(&[], &[], Some(none)), [""; 0], "{none}");
        }
    }

    #[test]
    fn programs_get_numbers_where_these_name_gpus() {
        let whole = of([("GPU-aa-1", 1), ("GPU-ab-0", 0)]);
        let environment = |numbers: &Numbers, asked: &[&str], visible| {
            let found = select(&strings(asked), &[], visible, numbers, false);
            let found = found.unwrap().environment;
            let of = |name: &str| found.get(name).cloned().unwrap_or_default();
            [of("CUDA_VISIBLE_DEVICES"), of("CUDA_DEVICE_ORDER")]
        };
        let by_number = ["1,0", "PCI_BUS_ID"];
        assert_eq!(environment(&whole, &["GPU-aa", "0"], None), by_number);
        // What the user has set stays.
        assert_eq!(environment(&whole, &[], Some("1")), ["", "PCI_BUS_ID"]);
        assert_eq!(environment(&whole, &[], Some("GPU-aa")), ["", ""]);
        // Beside instances a number may name something else to the driver.
        let mixed = |asked: &[&str]| environment(&numbers(), asked, None);
        assert_eq!(mixed(&["0", "MIG-x"]), ["GPU-ab-0,MIG-x", ""]);
        assert_eq!(mixed(&["1"]), ["GPU-aa-1", ""]);
    }

    #[test]
    fn ranks_find_all_devices_in_a_list() {
        let gpus: Numbers = [("GPU-b", 0), ("GPU-a", 1)]
            .map(|(uuid, number)| (uuid.to_owned(), number))
            .into();
        for (asked, visible, expected) in [
            (vec![], None, Some("0,1")),
            (vec!["all"], Some("1"), Some("0,1")),
            (vec!["1"], None, Some("1")),
            (vec![], Some("1"), None),
        ] {
            let found = select(&strings(&asked), &[], visible, &gpus, true).unwrap();
            let list = found.environment.get("CUDA_VISIBLE_DEVICES");
            assert_eq!(list.map(String::as_str), expected, "{asked:?} {visible:?}");
        }
        let none = select(&[], &[], None, &Numbers::new(), true).unwrap();
        assert_eq!(none, Selection::default(), "nothing is known");
    }
}
