use proptest::prelude::*;

use super::*;
use crate::api::types::MigCompute;

const GPU: &str = "GPU-0";

fn profile(name: &str, slices: u32, memory_slices: u32, most: u32, starts: &[u32]) -> MigProfile {
    MigProfile {
        name: name.into(),
        id: 0,
        slices,
        memory_slices,
        memory_bytes: u64::from(memory_slices) * (10 << 30),
        most,
        starts: starts.into(),
    }
}

/// As an H100's.
fn whole_gpu() -> MigGpu {
    MigGpu {
        uuid: GPU.into(),
        profiles: vec![
            profile("1g.10gb", 1, 1, 7, &[0, 1, 2, 3, 4, 5, 6]),
            profile("1g.10gb+me", 1, 1, 1, &[0, 1, 2, 3, 4, 5, 6]),
            profile("1g.20gb", 1, 2, 4, &[0, 2, 4, 6]),
            profile("2g.20gb", 2, 2, 3, &[0, 2, 4]),
            profile("3g.40gb", 3, 4, 2, &[0, 4]),
            profile("4g.40gb", 4, 4, 1, &[0]),
            profile("7g.80gb", 7, 8, 1, &[0]),
        ],
        ..MigGpu::default()
    }
}

fn new(profile: &str, start: u32) -> NewMigInstance {
    NewMigInstance {
        gpu: GPU.into(),
        profile: profile.into(),
        start,
    }
}

fn made(id: u32, profile: &MigProfile, start: u32) -> MigInstance {
    MigInstance {
        gpu_instance: id,
        profile: profile.name.clone(),
        start,
        memory_slices: profile.memory_slices,
        slices: profile.slices,
        compute_instances: vec![MigCompute {
            compute_instance: 0,
            device: format!("MIG-{id}"),
        }],
    }
}

#[test]
fn refused_instance_names_value_device_and_holder() {
    let mut gpus = vec![whole_gpu()];
    let at_3 = made(7, &gpus[0].profiles[0], 3);
    gpus[0].instances.push(at_3);
    for (new, parts) in [
        (
            NewMigInstance {
                gpu: "GPU-9".into(),
                ..new("1g.10gb", 0)
            },
            &["GPU-9 is no GPU in MIG mode", "nvidia-smi"][..],
        ),
        (
            new("1g.5gb", 0),
            &["GPU-0", "`1g.5gb`", "1g.10gb, 1g.10gb+me"],
        ),
        (
            new("3g.40gb", 2),
            &["3g.40gb", "memory slice 2 of GPU-0", "0, 4"],
        ),
        (
            new("3g.40gb", 0),
            &["3g.40gb", "GPU instance 7 (1g.10gb at 3)"],
        ),
        (new("1g.10gb", 3), &["GPU instance 7"]),
    ] {
        let error = check_new(&gpus, &new).unwrap_err().to_string();
        for part in parts {
            assert!(error.contains(part), "{error}");
        }
    }
    check_new(&gpus, &new("3g.40gb", 4)).unwrap();
}

#[test]
fn only_the_instance_that_is_meant_is_removed() {
    let mut gpus = vec![whole_gpu()];
    let profile = gpus[0].profiles[0].clone();
    gpus[0].instances = vec![made(7, &profile, 0), made(8, &profile, 1)];
    gpus[0].instances[1].compute_instances.clear();
    assert!(check_removal(&gpus, GPU, 7, Some("MIG-7")).is_ok());
    assert!(check_removal(&gpus, GPU, 8, None).is_ok());
    for (id, device, part) in [
        (7, Some("MIG-8"), "has MIG-7 and not MIG-8"),
        (7, None, "has MIG-7 and not no compute instance"),
        (8, Some("MIG-8"), "has no compute instance and not MIG-8"),
        (9, None, "no GPU instance 9"),
    ] {
        let error = check_removal(&gpus, GPU, id, device).unwrap_err();
        assert!(error.to_string().contains(part), "{error}");
    }
    // One that others divided among several compute instances.
    let second = MigCompute {
        compute_instance: 1,
        device: "MIG-7-1".into(),
    };
    gpus[0].instances[0].compute_instances.push(second);
    assert!(check_removal(&gpus, GPU, 7, Some("MIG-7")).is_err());
}

proptest! {
    /// Whatever is asked for, a GPU's instances never share a slice; and what has its slices free is not refused.
    #[test]
    fn accepted_instances_never_overlap(asked in prop::collection::vec((0usize..7, 0u32..9), 1..40)) {
        let mut gpus = vec![whole_gpu()];
        for (id, (profile, start)) in (0..).zip(asked) {
            let name = gpus[0].profiles[profile].name.clone();
            let before = gpus[0].instances.clone();
            match check_new(&gpus, &new(&name, start)) {
                Ok((_, profile)) => {
                    let instance = made(id, profile, start);
                    gpus[0].instances.push(instance);
                }
                Err(MigError::Held { holders, .. }) => prop_assert!(!holders.is_empty()),
                Err(error) => prop_assert!(matches!(error, MigError::NoPlace { .. }), "{error}"),
            }
            let slices: Vec<u32> = (gpus[0].instances.iter())
                .flat_map(|it| it.start..it.start + it.memory_slices)
                .collect();
            let mut distinct = slices.clone();
            distinct.sort_unstable();
            distinct.dedup();
            prop_assert_eq!(slices.len(), distinct.len());
            prop_assert!(distinct.iter().all(|slice| *slice < 8));
            prop_assert!(gpus[0].instances.iter().map(|it| it.slices).sum::<u32>() <= 7);
            prop_assert_eq!(&gpus[0].instances[..before.len()], &before[..]);
        }
        // An instance that is gone leaves its place.
        if let Some(gone) = gpus[0].instances.pop() {
            prop_assert!(check_new(&gpus, &new(&gone.profile, gone.start)).is_ok());
        }
    }
}
