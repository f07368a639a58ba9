//! MIG: into which instances a device can be partitioned, where in it each can be, and what an instance is made of.

use crate::protocol::{DeviceInfo, Instance};

/// A profile of GPU instances as `nvidia-smi mig -lgip` and `-lgipp` list it on an H100 80GB, with its memory and SMs.
#[derive(Debug, PartialEq, Eq)]
pub struct Shape {
    /// Such as `1g.10gb`.
    pub name: &'static str,
    /// NVML's constant `NVML_GPU_INSTANCE_PROFILE_…`.
    pub nvml: u32,
    /// The driver's number of the profile.
    pub id: u32,
    /// Of the GPU's seven slices of processors.
    pub slices: u32,
    /// Of its eight of memory.
    pub memory_slices: u32,
    /// Streaming multiprocessors.
    pub sms: u64,
    /// MiB of memory.
    pub memory_mib: u64,
    /// Numbers of the driver for such instances begin here.
    first_id: u32,
    /// Most instances of the profile at a time.
    pub most: u32,
    /// At which memory slices an instance can begin.
    pub starts: &'static [u32],
}

impl Shape {
    /// Whether an instance that begins at a memory slice has none of those of another.
    pub fn is_apart(&self, start: u32, other: &Self, other_start: u32) -> bool {
        start + self.memory_slices <= other_start || other_start + other.memory_slices <= start
    }

    /// Memory, in proportion to that of a GPU with so much.
    pub fn memory(&self, whole: u64) -> u64 {
        part(whole, self.memory_mib, WHOLE.1)
    }

    /// SMs, in proportion to a GPU with so many.
    pub fn sms_of(&self, whole: u32) -> u32 {
        part(whole.into(), self.sms, WHOLE.0).max(1) as u32
    }
}

const fn shape(
    (name, nvml, id): (&'static str, u32, u32),
    (slices, memory_slices): (u32, u32),
    (sms, memory_mib): (u64, u64),
    (first_id, most): (u32, u32),
    starts: &'static [u32],
) -> Shape {
    Shape {
        name,
        nvml,
        id,
        slices,
        memory_slices,
        sms,
        memory_mib,
        first_id,
        most,
        starts,
    }
}

const EACH: &[u32] = &[0, 1, 2, 3, 4, 5, 6];

/// All profiles. 9.75, 19.62, 39.5 and 79.25 GiB.
pub const SHAPES: [Shape; 7] = [
    shape(("1g.10gb", 0, 19), (1, 1), (16, 9_984), (7, 7), EACH),
    // With the GPU's engines for pictures, of which there is one set.
    shape(("1g.10gb+me", 7, 20), (1, 1), (16, 9_984), (7, 1), EACH),
    shape(
        ("1g.20gb", 9, 15),
        (1, 2),
        (26, 20_096),
        (3, 4),
        &[0, 2, 4, 6],
    ),
    shape(("2g.20gb", 1, 14), (2, 2), (32, 20_096), (3, 3), &[0, 2, 4]),
    shape(("3g.40gb", 2, 9), (3, 4), (60, 40_448), (1, 2), &[0, 4]),
    shape(("4g.40gb", 3, 5), (4, 4), (64, 40_448), (1, 1), &[0]),
    shape(("7g.80gb", 4, 0), (7, 8), (132, 81_152), (0, 1), &[0]),
];
/// The GPU that [`SHAPES`] are parts of: SMs and MiB.
const WHOLE: (u64, u64) = (132, 80 << 10);

/// How many instances a GPU can have.
pub const MAX_INSTANCES: u32 = 7;

/// The instance's profiles that there are.
pub(crate) const ALLOWED: &str = "1g.10gb, 1g.10gb+me (one), 1g.20gb, 2g.20gb, 3g.40gb, 4g.40gb or 7g.80gb, of one device at most 7 of 7 \
                                  slices (the first number) and 8 of 8 memory slices of 10 GB (the second)";

/// An instance in a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) shape: &'static Shape,
    /// The first of its memory slices.
    pub(crate) start: u32,
    /// The driver's number of it.
    pub(crate) id: u32,
}

/// Whether one device can have these together.
pub(crate) fn fits(names: &[String]) -> bool {
    places(names).is_some()
}

/// The profile of this name.
fn find(name: &str) -> Option<&'static Shape> {
    SHAPES.iter().find(|shape| shape.name == name)
}

/// A place for each of the instances of these names; none if one device cannot have them together.
pub(crate) fn places(names: &[String]) -> Option<Vec<Place>> {
    let shapes: Vec<_> = names.iter().map(|name| find(name)).collect::<Option<_>>()?;
    let mut placed = Vec::new();
    place_all(&shapes, &mut placed).then_some(placed)
}

fn place_all(shapes: &[&'static Shape], placed: &mut Vec<Place>) -> bool {
    let Some((shape, rest)) = shapes.split_first() else {
        return true;
    };
    shape.starts.iter().any(|start| {
        let Some(place) = place(placed, shape, *start) else {
            return false;
        };
        placed.push(place);
        let fits = place_all(rest, placed);
        if !fits {
            placed.pop();
        }
        fits
    })
}

/// One more instance beside others; none where it cannot be.
pub(crate) fn place(others: &[Place], shape: &'static Shape, start: u32) -> Option<Place> {
    let slices = others.iter().map(|it| it.shape.slices).sum::<u32>();
    let alike = others.iter().filter(|it| it.shape == shape).count();
    let fits = shape.starts.contains(&start)
        && slices + shape.slices <= 7
        && alike < shape.most as usize
        && others
            .iter()
            .all(|it| shape.is_apart(start, it.shape, it.start));
    let id = (shape.first_id..).find(|id| others.iter().all(|it| it.id != *id))?;
    fits.then_some(Place { shape, start, id })
}

fn part(all: u64, part: u64, whole: u64) -> u64 {
    (u128::from(all) * u128::from(part) / u128::from(whole)) as u64
}

/// An instance of the GPU of this number: its part of the GPU's memory, SMs and bandwidth, still under the GPU's UUID. A GPU that is
/// not an H100 is partitioned in proportion, under the same names.
pub(crate) fn instance(place: &Place, gpu: u32, whole: &DeviceInfo) -> DeviceInfo {
    let shape = place.shape;
    let bandwidth = part(whole.memory_bandwidth, shape.memory_slices.into(), 8);
    DeviceInfo {
        name: format!("{} MIG {}", whole.name, shape.name),
        memory: shape.memory(whole.memory),
        reserved_memory: 0,
        sms: shape.sms_of(whole.sms),
        memory_bandwidth: bandwidth.max(1),
        mig_mode: false,
        instance: Some(Instance {
            gpu,
            gpu_uuid: whole.uuid,
            profile: shape.name.to_owned(),
            gpu_instance: place.id,
            compute_instance: 0,
            slices: shape.slices,
        }),
        ..whole.clone()
    }
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
            &["1g.10gb", "1g.10gb+me", "3g.40gb", "2g.20gb"],
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
            &["1g.10gb+me", "1g.10gb+me"],
            &["7g.80gb", "1g.10gb"],
        ] {
            assert!(!fits(&names(bad)), "{bad:?}");
        }
    }

    #[test]
    fn instances_are_what_the_driver_makes_of_an_h100() {
        let mut whole = crate::Profile::default().infos().remove(0);
        let made = places(&names(&["1g.10gb", "3g.40gb", "1g.10gb", "2g.20gb"])).unwrap();
        let found: Vec<_> = made
            .iter()
            .map(|place| {
                let it = instance(place, 0, &whole);
                (it.sms, it.memory >> 20, place.id, place.start)
            })
            .collect();
        let expected = [
            (16, 9984, 7, 0),
            (60, 40448, 1, 4),
            (16, 9984, 8, 1),
            (32, 20096, 3, 2),
        ];
        assert_eq!(found, expected);
        whole.sms = 4;
        assert_eq!(instance(&made[0], 0, &whole).sms, 1);
    }
}
