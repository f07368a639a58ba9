//! The calls of NVML that list, make and remove MIG instances.

use std::{ffi::CStr, path::Path, ptr::null_mut};

use nvml_wrapper::{
    Device, Nvml,
    enums::device::UsedGpuMemory,
    error::{NvmlError, nvml_try},
};
use nvml_wrapper_sys::bindings::{
    NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED, NVML_COMPUTE_INSTANCE_PROFILE_COUNT, NvmlLib,
    nvmlComputeInstance_t, nvmlComputeInstanceInfo_t, nvmlComputeInstanceProfileInfo_t,
    nvmlGpuInstance_t, nvmlGpuInstanceInfo_t, nvmlGpuInstancePlacement_t,
    nvmlGpuInstanceProfileInfo_t, nvmlGpuInstanceProfileInfo_v2_t,
    nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_RESOURCES, nvmlReturn_t,
};

use super::error::{MigError, join};
use crate::{
    api::types::{Mig, MigCompute, MigGpu, MigInstance, MigProfile},
    devices,
};

/// More than NVML has profiles of GPU instances: those of later drivers count too.
const PROFILES: u32 = 32;
/// More than a GPU has instances, or a profile places.
const MOST: usize = 64;
const _: () = assert!(NVML_COMPUTE_INSTANCE_PROFILE_COUNT < MOST as u32);

/// NVML, for one piece of work.
pub(super) struct Driver {
    nvml: Nvml,
    raw: NvmlLib,
}

/// A function that older libraries may lack.
fn function<'a, T, E>(found: &'a Result<T, E>, name: &'static str) -> Result<&'a T, MigError> {
    found.as_ref().map_err(|_| MigError::Old(name))
}

/// Calls a function of NVML: what it is for, and its answer.
macro_rules! call {
    ($self:ident, $what:literal, $name:ident($($arg:expr),* $(,)?)) => {{
        let function = function(&$self.raw.$name, stringify!($name))?;
        // SAFETY: the handles are of this NVML, which is there as long as `self`, and the places to write live here.
        answer($what, unsafe { function($($arg),*) })
    }};
}

#[allow(non_upper_case_globals)] // as bindgen names it
fn answer(what: &'static str, code: nvmlReturn_t) -> Result<(), MigError> {
    let error = match nvml_try(code) {
        Ok(()) => return Ok(()),
        Err(NvmlError::UnexpectedVariant(nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_RESOURCES)) => {
            "the GPU has no room for it".to_owned()
        }
        Err(error) => error.to_string(),
    };
    Err(MigError::Nvml { what, error })
}

/// An all-zero structure of plain numbers and pointers, for NVML to fill.
trait Plain: Sized {
    fn zeroed() -> Self {
        // SAFETY: only implemented for structures of numbers and pointers.
        unsafe { std::mem::zeroed() }
    }
}
impl Plain for nvmlComputeInstanceInfo_t {}
impl Plain for nvmlComputeInstanceProfileInfo_t {}
impl Plain for nvmlGpuInstanceInfo_t {}
impl Plain for nvmlGpuInstanceProfileInfo_t {}
impl Plain for nvmlGpuInstanceProfileInfo_v2_t {}

impl Driver {
    pub(super) fn open(library: Option<&Path>) -> Result<Self, MigError> {
        let failed = |error: NvmlError| MigError::Nvml {
            what: "be loaded",
            error: error.to_string(),
        };
        let (nvml, raw) = devices::init(library).map_err(failed)?;
        let raw = raw.ok_or(MigError::Old("functions of MIG"))?;
        Ok(Self { nvml, raw })
    }

    /// The GPUs in MIG mode.
    pub(super) fn list(&self) -> Result<Vec<MigGpu>, MigError> {
        let failed = |error: NvmlError| MigError::Nvml {
            what: "list the GPUs",
            error: error.to_string(),
        };
        let count = self.nvml.device_count().map_err(failed)?;
        let driver = self.nvml.sys_driver_version().unwrap_or_default();
        let mut gpus = Vec::new();
        for index in 0..count {
            // One that fails has no instances to offer, and keeps none of the others from theirs.
            let Ok(device) = self.nvml.device_by_index(index) else {
                continue;
            };
            if !device.mig_mode().is_ok_and(|mode| mode.current == 1) {
                continue;
            }
            let profiles = self.profiles(&device)?;
            gpus.push(MigGpu {
                uuid: device.uuid().map_err(failed)?,
                index,
                name: device.name().map_err(failed)?,
                driver: driver.clone(),
                emulated: false,
                hardware: devices::hardware(&device),
                instances: self.instances(&device, &profiles)?,
                profiles,
            });
        }
        Ok(gpus)
    }

    fn profiles(&self, gpu: &Device<'_>) -> Result<Vec<MigProfile>, MigError> {
        // SAFETY: the handle is used while NVML is there.
        let handle = unsafe { gpu.handle() };
        let mut profiles = Vec::new();
        for number in 0..PROFILES {
            let mut info = nvmlGpuInstanceProfileInfo_t::zeroed();
            let found = call!(
                self,
                "describe a profile",
                nvmlDeviceGetGpuInstanceProfileInfo(handle, number, &mut info)
            );
            match found {
                Ok(()) => {}
                // NVML numbers profiles of all GPUs alike: this one does not have it.
                Err(MigError::Nvml { .. }) => continue,
                Err(error) => return Err(error),
            }
            if profiles.iter().any(|it: &MigProfile| it.id == info.id) {
                continue;
            }
            let mut count = 0;
            call!(
                self,
                "count a profile's places",
                nvmlDeviceGetGpuInstancePossiblePlacements_v2(
                    handle,
                    info.id,
                    null_mut(),
                    &mut count
                )
            )?;
            let nowhere = nvmlGpuInstancePlacement_t { start: 0, size: 0 };
            let mut places = vec![nowhere; (count as usize).max(MOST)];
            call!(
                self,
                "list a profile's places",
                nvmlDeviceGetGpuInstancePossiblePlacements_v2(
                    handle,
                    info.id,
                    places.as_mut_ptr(),
                    &mut count
                )
            )?;
            places.truncate(count as usize);
            profiles.push(MigProfile {
                name: self.name(gpu, number, &info),
                id: info.id,
                slices: info.sliceCount,
                memory_slices: places.first().map_or(0, |it| it.size),
                memory_bytes: info.memorySizeMB.saturating_mul(1 << 20),
                most: info.instanceCount,
                starts: places.iter().map(|it| it.start).collect(),
            });
        }
        Ok(profiles)
    }

    /// As `nvidia-smi` names the profile.
    fn name(&self, gpu: &Device<'_>, number: u32, info: &nvmlGpuInstanceProfileInfo_t) -> String {
        let mut named = nvmlGpuInstanceProfileInfo_v2_t::zeroed();
        named.version = size_of_val(&named) as u32 | 2 << 24;
        let named = match &self.raw.nvmlDeviceGetGpuInstanceProfileInfoV {
            // SAFETY: as in `call!`.
            Ok(ask) if unsafe { ask(gpu.handle(), number, &mut named) } == 0 => {
                let bytes = named.name.map(|byte| byte as u8);
                let text = CStr::from_bytes_until_nul(&bytes).unwrap_or_default();
                text.to_string_lossy().into_owned()
            }
            _ => String::new(),
        };
        match named.trim_start_matches("MIG ") {
            "" => {
                let gb = info.memorySizeMB.div_ceil(1 << 10);
                format!("{}g.{gb}gb", info.sliceCount)
            }
            name => name.to_owned(),
        }
    }

    fn instances(
        &self,
        gpu: &Device<'_>,
        profiles: &[MigProfile],
    ) -> Result<Vec<MigInstance>, MigError> {
        let devices = devices::instances(&self.nvml, &self.raw, gpu);
        let numbered = devices.iter().filter_map(|device| {
            let numbers = devices::numbers(&self.raw, device)?;
            Some((numbers, device.uuid().ok()?))
        });
        let numbered: Vec<_> = numbered.collect();
        let mut all = Vec::new();
        for profile in profiles {
            for handle in self.handles(gpu, profile.id)? {
                let info = self.info(handle)?;
                let mut compute_instances = Vec::new();
                for compute in self.computes(handle)? {
                    let mut found = nvmlComputeInstanceInfo_t::zeroed();
                    call!(
                        self,
                        "describe a compute instance",
                        nvmlComputeInstanceGetInfo_v2(compute, &mut found)
                    )?;
                    let numbers = Mig {
                        gpu_instance: info.id,
                        compute_instance: found.id,
                    };
                    let device = numbered.iter().find(|(it, _)| *it == numbers);
                    compute_instances.push(MigCompute {
                        compute_instance: found.id,
                        device: device.map_or_else(String::new, |it| it.1.clone()),
                    });
                }
                compute_instances.sort_by_key(|it| it.compute_instance);
                all.push(MigInstance {
                    gpu_instance: info.id,
                    profile: profile.name.clone(),
                    start: info.placement.start,
                    memory_slices: info.placement.size,
                    slices: profile.slices,
                    compute_instances,
                });
            }
        }
        all.sort_by_key(|it| it.gpu_instance);
        Ok(all)
    }

    /// The GPU instances of a profile.
    fn handles(&self, gpu: &Device<'_>, profile: u32) -> Result<Vec<nvmlGpuInstance_t>, MigError> {
        let mut handles = vec![null_mut(); MOST];
        let mut count = 0;
        // SAFETY: the handle is used while NVML is there.
        let gpu = unsafe { gpu.handle() };
        call!(
            self,
            "list the GPU instances",
            nvmlDeviceGetGpuInstances(gpu, profile, handles.as_mut_ptr(), &mut count)
        )?;
        handles.truncate(count as usize);
        Ok(handles)
    }

    fn info(&self, instance: nvmlGpuInstance_t) -> Result<nvmlGpuInstanceInfo_t, MigError> {
        let mut info = nvmlGpuInstanceInfo_t::zeroed();
        call!(
            self,
            "describe a GPU instance",
            nvmlGpuInstanceGetInfo(instance, &mut info)
        )?;
        Ok(info)
    }

    /// Makes a GPU instance and a compute instance that has all of it. Returns the driver's number of the first.
    pub(super) fn make(
        &self,
        gpu: &str,
        profile: &MigProfile,
        start: u32,
    ) -> Result<u32, MigError> {
        let device = self.gpu(gpu)?;
        // SAFETY: the handle is used while NVML is there.
        let handle = unsafe { device.handle() };
        let place = nvmlGpuInstancePlacement_t {
            start,
            size: profile.memory_slices,
        };
        let mut instance = null_mut();
        call!(
            self,
            "make the GPU instance",
            nvmlDeviceCreateGpuInstanceWithPlacement(handle, profile.id, &place, &mut instance)
        )?;
        let made = self.info(instance).and_then(|info| {
            self.compute(instance, profile.slices)?;
            Ok(info.id)
        });
        let Err(error) = made else {
            return made;
        };
        let left = call!(
            self,
            "remove the GPU instance",
            nvmlGpuInstanceDestroy(instance)
        );
        let MigError::Nvml { error, .. } = error else {
            return Err(error);
        };
        Err(MigError::HalfMade {
            instance: format!("{} at memory slice {start} of {gpu}", profile.name),
            error,
            left: match left {
                Err(MigError::Nvml { error, .. }) => Some(error),
                _ => None,
            },
        })
    }

    /// Makes the compute instance that has all slices of a GPU instance.
    fn compute(&self, instance: nvmlGpuInstance_t, slices: u32) -> Result<(), MigError> {
        let mut last = None;
        for number in 0..NVML_COMPUTE_INSTANCE_PROFILE_COUNT {
            let Ok(info) = self.compute_profile(instance, number) else {
                continue;
            };
            if info.sliceCount == slices {
                let mut made = null_mut();
                match call!(
                    self,
                    "make the compute instance",
                    nvmlGpuInstanceCreateComputeInstance(instance, info.id, &mut made)
                ) {
                    Ok(()) => return Ok(()),
                    Err(error) => last = Some(error),
                }
            }
        }
        Err(last.unwrap_or(MigError::Nvml {
            what: "find the compute instance's profile",
            error: "it names none".to_owned(),
        }))
    }

    fn compute_profile(
        &self,
        instance: nvmlGpuInstance_t,
        number: u32,
    ) -> Result<nvmlComputeInstanceProfileInfo_t, MigError> {
        let mut info = nvmlComputeInstanceProfileInfo_t::zeroed();
        let engines = NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED;
        call!(
            self,
            "describe a compute instance's profile",
            nvmlGpuInstanceGetComputeInstanceProfileInfo(instance, number, engines, &mut info)
        )?;
        Ok(info)
    }

    /// Removes an instance that no process uses, with its compute instances.
    pub(super) fn remove(&self, gpu: &str, instance: &MigInstance) -> Result<(), MigError> {
        let device = self.gpu(gpu)?;
        for part in devices::instances(&self.nvml, &self.raw, &device) {
            let numbers = devices::numbers(&self.raw, &part);
            if numbers.is_some_and(|it| it.gpu_instance == instance.gpu_instance) {
                check_idle(&part)?;
            }
        }
        // SAFETY: the handle is used while NVML is there.
        let gpu = unsafe { device.handle() };
        let mut handle = null_mut();
        call!(
            self,
            "find the GPU instance",
            nvmlDeviceGetGpuInstanceById(gpu, instance.gpu_instance, &mut handle)
        )?;
        for compute in self.computes(handle)? {
            call!(
                self,
                "remove the compute instance",
                nvmlComputeInstanceDestroy(compute)
            )?;
        }
        call!(
            self,
            "remove the GPU instance",
            nvmlGpuInstanceDestroy(handle)
        )
    }

    /// The compute instances of a GPU instance.
    fn computes(
        &self,
        instance: nvmlGpuInstance_t,
    ) -> Result<Vec<nvmlComputeInstance_t>, MigError> {
        let mut all = Vec::new();
        for number in 0..NVML_COMPUTE_INSTANCE_PROFILE_COUNT {
            let Ok(profile) = self.compute_profile(instance, number) else {
                continue;
            };
            let mut handles = vec![null_mut(); MOST];
            let mut count = 0;
            call!(
                self,
                "list the compute instances",
                nvmlGpuInstanceGetComputeInstances(
                    instance,
                    profile.id,
                    handles.as_mut_ptr(),
                    &mut count
                )
            )?;
            handles.truncate(count as usize);
            all.extend(handles);
        }
        Ok(all)
    }

    fn gpu(&self, uuid: &str) -> Result<Device<'_>, MigError> {
        let found = self.nvml.device_by_uuid(uuid);
        found.map_err(|_| MigError::NoGpu(uuid.to_owned()))
    }
}

/// Whether no process uses an instance.
fn check_idle(device: &Device<'_>) -> Result<(), MigError> {
    let failed = |error: NvmlError| MigError::Nvml {
        what: "list the instance's processes",
        error: error.to_string(),
    };
    let processes = device.running_compute_processes().map_err(failed)?;
    if processes.is_empty() {
        return Ok(());
    }
    let name = |it: &nvml_wrapper::struct_wrappers::device::ProcessInfo| match it.used_gpu_memory {
        UsedGpuMemory::Used(bytes) => format!("pid {} ({} MiB)", it.pid, bytes >> 20),
        UsedGpuMemory::Unavailable => format!("pid {}", it.pid),
    };
    Err(MigError::InUse {
        device: device.uuid().unwrap_or_default(),
        holders: join(processes.iter().map(name)),
    })
}
