//! NVML, and devices with MIG instances.

#[macro_use]
mod common;

use std::ptr::null_mut;

use gpumux_emu::{Profile, protocol::uuid_text};

use common::*;

fn nvml_library() -> std::ffi::OsString {
    std::env::var_os("GPUMUX_NVML").unwrap()
}

fn nvml() -> nvml_wrapper::Nvml {
    let mut builder = nvml_wrapper::Nvml::builder();
    builder.lib_path(&nvml_library()).init().unwrap()
}

#[test]
fn nvml_knows_the_device_and_its_users() {
    on_device("nvml_knows_the_device_and_its_users", || {
        primary();
        let held = alloc(100 * MIB);
        let nvml = nvml();
        assert_eq!(nvml.device_count().unwrap(), 1);
        assert_eq!(nvml.sys_driver_version().unwrap(), "580.159.04");
        let uuid = uuid_text(&Profile::default().uuid(0));
        let device = nvml.device_by_uuid(uuid.as_str()).unwrap();
        assert_eq!(device.uuid().unwrap(), uuid);
        assert_eq!(device.name().unwrap(), Profile::default().name);
        assert_eq!(device.memory_info().unwrap().used, (620 * MIB) as u64);
        let capability = device.cuda_compute_capability().unwrap();
        assert_eq!((capability.major, capability.minor), (9, 0));
        let pci = device.pci_info().unwrap();
        assert_eq!(
            nvml.device_by_pci_bus_id(pci.bus_id)
                .unwrap()
                .uuid()
                .unwrap(),
            uuid
        );
        let running = device.running_compute_processes().unwrap();
        assert_eq!(running.len(), 1);
        assert_eq!(running[0].pid, std::process::id());
        assert!(device.utilization_rates().unwrap().gpu <= 100);
        assert!(nvml.device_by_uuid("GPU-other").is_err());
        cu!(cuMemFree_v2(held));
    });
}

/// PyTorch 2.9 looks for these when its memory is first mapped, and ends where one is missing.
#[test]
fn nvml_has_what_programs_look_for() {
    on_device("nvml_has_what_programs_look_for", || {
        let _nvml = nvml();
        // SAFETY: the library that is loaded already.
        let raw = unsafe { nvml_wrapper_sys::bindings::NvmlLib::new(nvml_library()) }.unwrap();
        assert!(raw.nvmlDeviceGetNvLinkRemotePciInfo_v2.is_ok());
        let ask = raw.nvmlDeviceGetNvLinkRemoteDeviceType.as_ref().unwrap();
        let mut kind = 0;
        // SAFETY: a place to write, which nothing looks at.
        let answer = unsafe { ask(std::ptr::null_mut(), 0, &raw mut kind) };
        assert_eq!(
            answer,
            nvml_wrapper_sys::bindings::nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED
        );
    });
}

#[test]
fn nvml_knows_mig_instances() {
    const NAME: &str = "nvml_knows_mig_instances";
    let infos = Profile::parse(PARTITIONED).unwrap().infos();
    let [gpu, whole, first, second] = [0, 1, 2, 3].map(|at: usize| infos[at].uuid_text());
    if !is_program(NAME) {
        let device = Device::new(Profile::parse(PARTITIONED).unwrap());
        let mut program = device.command(NAME);
        program.env("CUDA_VISIBLE_DEVICES", &second);
        finish(program.spawn().unwrap());
        return;
    }
    primary();
    let held = alloc(100 * MIB);
    let nvml = nvml();
    assert_eq!(nvml.device_count().unwrap(), 2);
    let by_uuid = |uuid: &String| nvml.device_by_uuid(uuid.as_str()).unwrap();
    assert_eq!(by_uuid(&gpu).mig_mode().unwrap().current, 1);
    assert_eq!(by_uuid(&whole).mig_mode().unwrap().current, 0);
    let instance = by_uuid(&second);
    assert!(instance.mig_mode().is_err());
    assert_eq!(instance.uuid().unwrap(), second);
    assert!(instance.name().unwrap().ends_with(" MIG 2g.20gb"));
    assert_eq!(instance.index().unwrap(), 1, "among its GPU's");
    assert!(nvml.device_by_index(2).is_err());
    let memory = instance.memory_info().unwrap();
    assert_eq!(
        (memory.total >> 20, memory.used),
        (20_096, (620 * MIB) as u64)
    );
    assert_eq!(by_uuid(&first).memory_info().unwrap().used, 0);
    assert_eq!(by_uuid(&gpu).memory_info().unwrap().used, memory.used);
    let attributes = instance.attributes().unwrap();
    assert_eq!(attributes.multiprocessor_count, 32);
    assert_eq!(attributes.gpu_instance_slice_count, 2);
    assert_eq!(attributes.memory_size_mb, 20_096);
    assert!(by_uuid(&whole).attributes().is_err());
    assert!(by_uuid(&gpu).utilization_rates().is_err());
    for device in [&gpu, &second] {
        let running = by_uuid(device).running_compute_processes().unwrap();
        assert_eq!(running.len(), 1);
        assert_eq!(running[0].gpu_instance_id, Some(3));
        assert_eq!(running[0].compute_instance_id, Some(0));
    }
    assert!(
        by_uuid(&first)
            .running_compute_processes()
            .unwrap()
            .is_empty()
    );

    // SAFETY: NVML is loaded already.
    let raw = unsafe { nvml_wrapper_sys::bindings::NvmlLib::new(nvml_library()) }.unwrap();
    // SAFETY: handles and places to write are of this NVML and this function.
    unsafe {
        let children = raw.nvmlDeviceGetMigDeviceHandleByIndex.as_ref().unwrap();
        let parent_of = raw.nvmlDeviceGetDeviceHandleFromMigDeviceHandle.as_ref();
        let parent_of = parent_of.unwrap();
        let (partitioned, other) = (by_uuid(&gpu).handle(), by_uuid(&whole).handle());
        let mut handle = null_mut();
        assert_eq!(children(partitioned, 1, &mut handle), 0);
        assert_eq!(handle, instance.handle());
        assert_eq!(children(partitioned, 2, &mut handle), 6, "not found");
        assert_eq!(children(partitioned, 7, &mut handle), 2, "invalid");
        assert_eq!(children(other, 0, &mut handle), 3, "not supported");
        assert_eq!(parent_of(instance.handle(), &mut handle), 0);
        assert_eq!(handle, partitioned);
        assert_eq!(parent_of(other, &mut handle), 2, "invalid");
        let is = raw.nvmlDeviceIsMigDeviceHandle.as_ref().unwrap();
        let most = raw.nvmlDeviceGetMaxMigDeviceCount.as_ref().unwrap();
        let mut answer = 9;
        for (device, instances) in [(partitioned, 7), (other, 0)] {
            assert_eq!((is(device, &mut answer), answer), (0, 0));
            assert_eq!((most(device, &mut answer), answer), (0, instances));
        }
        assert_eq!((is(instance.handle(), &mut answer), answer), (0, 1));
    }

    // And what CUDA says of it.
    let device = gpumux_cuda::Device::get(0).unwrap();
    assert_eq!(gpumux_cuda::Device::count().unwrap(), 1);
    assert_eq!(device.uuid().unwrap(), second);
    assert_eq!(device.name().unwrap(), instance.name().unwrap());
    assert_eq!(device.multiprocessors().unwrap(), 32);
    let (mut total, mut much) = (0, 0);
    cu!(cuDeviceTotalMem_v2(&mut total, 0));
    assert_eq!(total, 20_096 * MIB);
    // SAFETY: a place to write.
    let refused = code(unsafe { driver().cuMemAlloc_v2(&mut much, 20_000 * MIB) });
    assert_eq!(refused, 2, "more than the instance has");
    cu!(cuMemFree_v2(held));
}

const PARTITIONED: &str = "devices = 2\nmig = [['1g.10gb', '2g.20gb']]";

/// Without a list, a program on a partitioned device sees the first instance; the GPU itself cannot be used.
#[test]
fn a_partitioned_device_is_its_first_instance() {
    const NAME: &str = "a_partitioned_device_is_its_first_instance";
    on_profile(NAME, "mig = [['3g.40gb', '1g.10gb']]", || {
        primary();
        assert_eq!(gpumux_cuda::Device::count().unwrap(), 1);
        let device = gpumux_cuda::Device::get(0).unwrap();
        assert!(device.uuid().unwrap().starts_with("MIG-"));
        assert_eq!(device.multiprocessors().unwrap(), 60);
        let at = alloc(4);
        cu!(cuMemsetD32Async(at, 7, 1, null_mut()));
        assert_eq!(read(at, 1), [7]);
        cu!(cuMemFree_v2(at));
    });
}

/// What a GPU instance is asked for: profile number, first memory slice.
const ONE_AT_3: (u32, u32) = (19, 3);

#[test]
fn mig_instances_come_and_go() {
    use nvml_wrapper_sys::bindings as raw;
    on_profile("mig_instances_come_and_go", "mig_mode = [true]", || {
        let nvml = nvml();
        let gpu = nvml.device_by_index(0).unwrap();
        assert_eq!(gpu.mig_mode().unwrap().current, 1);
        // SAFETY: NVML is loaded already.
        let library = unsafe { raw::NvmlLib::new(nvml_library()) }.unwrap();
        macro_rules! call {
            ($name:ident($($arg:expr),* $(,)?)) => {
                // SAFETY: handles and places to write are of this NVML and this function.
                unsafe { library.$name.as_ref().unwrap()($($arg),*) }
            };
        }
        // SAFETY: it is used while NVML is there.
        let gpu = unsafe { gpu.handle() };
        let child = |index| {
            let mut handle = null_mut();
            let code = call!(nvmlDeviceGetMigDeviceHandleByIndex(gpu, index, &mut handle));
            (code, handle)
        };
        assert_eq!(child(0).0, 6, "in MIG mode, without an instance");

        // What there can be.
        let mut count = 0;
        let places = |profile, places, count: &mut u32| {
            call!(nvmlDeviceGetGpuInstancePossiblePlacements_v2(
                gpu, profile, places, count
            ))
        };
        assert_eq!((places(9, null_mut(), &mut count), count), (0, 2));
        let mut all = [raw::nvmlGpuInstancePlacement_t { start: 9, size: 9 }; 2];
        assert_eq!(places(9, all.as_mut_ptr(), &mut count), 0);
        assert_eq!(all.map(|it| (it.start, it.size)), [(0, 4), (4, 4)]);
        // SAFETY: plain numbers.
        let mut info: raw::nvmlGpuInstanceProfileInfo_v2_t = unsafe { std::mem::zeroed() };
        let size = size_of_val(&info) as u32;
        assert_eq!(
            call!(nvmlDeviceGetGpuInstanceProfileInfoV(gpu, 2, &mut info)),
            25,
            "without a version"
        );
        info.version = size | 2 << 24;
        assert_eq!(
            call!(nvmlDeviceGetGpuInstanceProfileInfoV(gpu, 2, &mut info)),
            0
        );
        assert_eq!(
            (info.id, info.sliceCount, info.memorySizeMB),
            (9, 3, 40_448)
        );

        // One is made, which is a device once it has a compute instance.
        let make = |(profile, start): (u32, u32)| {
            let (at, mut handle) = (
                raw::nvmlGpuInstancePlacement_t { start, size: 1 },
                null_mut(),
            );
            let code = call!(nvmlDeviceCreateGpuInstanceWithPlacement(
                gpu,
                profile,
                &at,
                &mut handle
            ));
            (code, handle)
        };
        let (code, instance) = make(ONE_AT_3);
        assert_eq!(code, 0);
        assert_eq!(child(0).0, 6, "no compute instance");
        assert_eq!(make(ONE_AT_3).0, 23, "it is taken");
        assert_eq!(make((9, 0)).0, 23, "so is a part of this");
        assert_eq!(make((9, 1)).0, 2, "there is no such place");
        let mut found = [null_mut(); 8];
        assert_eq!(
            call!(nvmlDeviceGetGpuInstances(
                gpu,
                ONE_AT_3.0,
                found.as_mut_ptr(),
                &mut count
            )),
            0
        );
        assert_eq!((count, found[0]), (1, instance));
        // SAFETY: plain numbers and a pointer.
        let mut info: raw::nvmlGpuInstanceInfo_t = unsafe { std::mem::zeroed() };
        assert_eq!(call!(nvmlGpuInstanceGetInfo(instance, &mut info)), 0);
        let at = (info.placement.start, info.placement.size);
        assert_eq!((info.id, info.profileId, at), (7, ONE_AT_3.0, (3, 1)));
        assert_eq!(info.device, gpu);
        let mut compute = null_mut();
        assert_eq!(
            call!(nvmlGpuInstanceCreateComputeInstance(
                instance,
                1,
                &mut compute
            )),
            3,
            "more than it has"
        );
        assert_eq!(
            call!(nvmlGpuInstanceCreateComputeInstance(
                instance,
                0,
                &mut compute
            )),
            0
        );
        let uuid = |handle| {
            // SAFETY: a handle of this NVML.
            unsafe { nvml_wrapper::Device::new(handle, &nvml) }.uuid()
        };
        let (code, device) = child(0);
        assert_eq!(code, 0);
        let first = uuid(device).unwrap();
        assert!(first.starts_with("MIG-"), "{first}");

        // A program uses it, and it cannot go.
        primary();
        let here = gpumux_cuda::Device::get(0).unwrap().uuid().unwrap();
        assert_eq!(here, first);
        let held = alloc(MIB);
        assert_eq!(call!(nvmlGpuInstanceDestroy(instance)), 19);
        assert_eq!(call!(nvmlComputeInstanceDestroy(compute)), 19);
        cu!(cuMemFree_v2(held));
        cu!(cuDevicePrimaryCtxRelease_v2(0));
        assert_eq!(call!(nvmlComputeInstanceDestroy(compute)), 0);
        assert_eq!(child(0).0, 6);
        assert!(uuid(device).is_err(), "it is gone");
        assert_eq!(call!(nvmlComputeInstanceDestroy(compute)), 2);
        assert_eq!(call!(nvmlGpuInstanceDestroy(instance)), 0);
        assert_eq!(call!(nvmlGpuInstanceDestroy(instance)), 2);
        // Another may have its place.
        assert_eq!(make((9, 0)).0, 0);
    });
}
