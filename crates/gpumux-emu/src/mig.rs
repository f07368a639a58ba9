//! MIG: into which instances a device can be partitioned, and what an instance is made of.

use crate::protocol::{DeviceInfo, Instance};

/// What `nvidia-smi mig -lgip` names on an H100 80GB, which also gives the memory and the SMs.
struct Shape {
    name: &'static str,
    /// Of the GPU's seven slices of processors.
    slices: u32,
    /// Of its eight of memory.
    memory_slices: u32,
    sms: u64,
    memory_mib: u64,
    /// Numbers of the driver for such instances begin here.
    first_id: u32,
}

const fn shape(
    name: &'static str,
    slices: u32,
    memory_slices: u32,
    sms: u64,
    memory_mib: u64,
    first_id: u32,
) -> Shape {
    Shape {
        name,
        slices,
        memory_slices,
        sms,
        memory_mib,
        first_id,
    }
}

/// 9.75, 19.62, 39.5 and 79.25 GiB.
const SHAPES: [Shape; 6] = [
    shape("1g.10gb", 1, 1, 16, 9_984, 7),
    shape("1g.20gb", 1, 2, 26, 20_096, 3),
    shape("2g.20gb", 2, 2, 32, 20_096, 3),
    shape("3g.40gb", 3, 4, 60, 40_448, 1),
    shape("4g.40gb", 4, 4, 64, 40_448, 1),
    shape("7g.80gb", 7, 8, 132, 81_152, 0),
];
/// The GPU that [`SHAPES`] are parts of.
const WHOLE: (u64, u64) = (132, 80 << 10);

/// How many instances a GPU can have.
pub const MAX_INSTANCES: u32 = 7;

/// The instance's profiles that there are.
pub(crate) const ALLOWED: &str = "1g.10gb, 1g.20gb, 2g.20gb, 3g.40gb, 4g.40gb or 7g.80gb, of one device at most 7 of 7 \
                                  slices (the first number) and 8 of 8 memory slices of 10 GB (the second)";

/// Whether one device can have these together.
pub(crate) fn fits(names: &[String]) -> bool {
    let found: Option<Vec<_>> = names.iter().map(|name| find(name)).collect();
    found.is_some_and(|shapes| {
        shapes.iter().map(|it| it.slices).sum::<u32>() <= 7
            && shapes.iter().map(|it| it.memory_slices).sum::<u32>() <= 8
    })
}

fn find(name: &str) -> Option<&'static Shape> {
    SHAPES.iter().find(|shape| shape.name == name)
}

/// The instances of these names, in order, that the GPU of this number is partitioned into: each with its part of the GPU's memory,
/// SMs and bandwidth, still under the GPU's UUID. A GPU that is not an H100 is partitioned in proportion, under the same names.
pub(crate) fn parts(names: &[String], gpu: u32, whole: &DeviceInfo) -> Vec<DeviceInfo> {
    let mut taken = Vec::new();
    let of = |all: u64, part: u64, whole: u64| {
        (u128::from(all) * u128::from(part) / u128::from(whole)) as u64
    };
    let part = |name: &String| {
        let shape = find(name)?;
        let id = (shape.first_id..).find(|id| !taken.contains(id))?;
        taken.push(id);
        let bandwidth = of(whole.memory_bandwidth, shape.memory_slices.into(), 8);
        Some(DeviceInfo {
            name: format!("{} MIG {}", whole.name, shape.name),
            memory: of(whole.memory, shape.memory_mib, WHOLE.1),
            sms: of(whole.sms.into(), shape.sms, WHOLE.0).max(1) as u32,
            memory_bandwidth: bandwidth.max(1),
            instance: Some(Instance {
                gpu,
                gpu_uuid: whole.uuid,
                profile: shape.name.to_owned(),
                gpu_instance: id,
                compute_instance: 0,
                slices: shape.slices,
            }),
            ..whole.clone()
        })
    };
    names.iter().filter_map(part).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(list: &[&str]) -> Vec<String> {
        list.iter().map(|&name| name.to_owned()).collect()
    }

    #[test]
    fn only_what_a_gpu_has_can_be_given_away() {
        for good in [
            &["1g.10gb"; 7][..],
            &["3g.40gb", "3g.40gb"],
            &["4g.40gb", "2g.20gb", "1g.20gb"],
            &["7g.80gb"],
            &[],
        ] {
            assert!(fits(&names(good)), "{good:?}");
        }
        for bad in [
            &["1g.10gb"; 8][..],
            &["3g.40gb", "3g.40gb", "1g.10gb"],
            &["4g.40gb", "4g.40gb"],
            &["1g.5gb"],
            &["7g.80gb", "1g.10gb"],
        ] {
            assert!(!fits(&names(bad)), "{bad:?}");
        }
    }

    #[test]
    fn instances_are_what_the_driver_makes_of_an_h100() {
        let mut whole = crate::Profile::default().infos().remove(0);
        let made = names(&["1g.10gb", "3g.40gb", "1g.10gb", "2g.20gb"]);
        let found: Vec<_> = parts(&made, 0, &whole)
            .iter()
            .map(|it| {
                let id = it.instance.as_ref().map(|it| it.gpu_instance);
                (it.sms, it.memory >> 20, id.unwrap())
            })
            .collect();
        let expected = [(16, 9984, 7), (60, 40448, 1), (16, 9984, 8), (32, 20096, 3)];
        assert_eq!(found, expected);
        whole.sms = 4;
        assert_eq!(parts(&made, 0, &whole)[0].sms, 1);
    }
}
