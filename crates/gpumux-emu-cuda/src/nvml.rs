//! NVML: as much as tools need to name devices and to see memory and processes.
//!
//! It has a connection of its own, which is made again when the server was restarted or the process has forked.

use std::{
    collections::{BTreeMap, VecDeque},
    ffi::{CStr, c_char, c_int, c_uint, c_ulonglong},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Mutex,
    time::{SystemTime, UNIX_EPOCH},
};

use gpumux_emu::{
    client::{ClientError, ProcessConnection},
    mig::{MAX_INSTANCES, SHAPES, Shape},
    protocol::{DeviceInfo, DeviceStatus, GpuInstance, Instance, Refusal},
};

use crate::{
    border::{In, Out, Text, exports},
    device::{pci_bus_id, same_bus_id},
    error::CuError,
    fault,
    process::lock,
    system,
};

/// An `nvmlReturn_t` other than success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NvmlError(pub(crate) c_int);

type Result<T = ()> = std::result::Result<T, NvmlError>;

macro_rules! errors {
    ($($name:ident = $code:literal $text:literal;)*) => {
        #[allow(dead_code)]
        impl NvmlError { $(pub(crate) const $name: Self = Self($code);)* }

        fn describe(code: c_int) -> &'static CStr {
            match code {
                0 => c"Success",
                $($code => $text,)*
                _ => c"Unknown Error",
            }
        }
    };
}

errors! {
    UNINITIALIZED = 1 c"Uninitialized";
    INVALID_ARGUMENT = 2 c"Invalid Argument";
    NOT_SUPPORTED = 3 c"Not Supported";
    NO_PERMISSION = 4 c"Insufficient Permissions";
    NOT_FOUND = 6 c"Not Found";
    INSUFFICIENT_SIZE = 7 c"Insufficient Size";
    DRIVER_NOT_LOADED = 9 c"Driver Not Loaded";
    GPU_IS_LOST = 15 c"GPU is lost";
    IN_USE = 19 c"In use by another client";
    INSUFFICIENT_RESOURCES = 23 c"Insufficient Resources";
    ARGUMENT_VERSION_MISMATCH = 25 c"Argument version mismatch";
    UNKNOWN = 999 c"Unknown Error";
}

/// A null pointer, or text that is too long.
impl From<CuError> for NvmlError {
    fn from(_: CuError) -> Self {
        Self::INVALID_ARGUMENT
    }
}

impl From<ClientError> for NvmlError {
    fn from(error: ClientError) -> Self {
        match error {
            ClientError::Lost(_) => Self::GPU_IS_LOST,
            ClientError::Refused(Refusal::NoRoom) => Self::INSUFFICIENT_RESOURCES,
            ClientError::Refused(Refusal::InUse) => Self::IN_USE,
            ClientError::Refused(Refusal::Unknown) => Self::INVALID_ARGUMENT,
            _ => Self::UNKNOWN,
        }
    }
}

fn nvml(name: &str, body: impl FnOnce() -> Result) -> c_int {
    if fault::nvml_call(name) {
        return NvmlError::UNKNOWN.0;
    }
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => 0,
        Ok(Err(error)) => error.0,
        Err(_) => NvmlError::UNKNOWN.0,
    }
}

/// What `nvmlInit` made.
struct Nvml {
    users: usize,
    /// Process that made the connection.
    pid: u32,
    connection: ProcessConnection,
    devices: Vec<DeviceInfo>,
}

static NVML: Mutex<Option<Nvml>> = Mutex::new(None);

fn connect() -> Result<(ProcessConnection, Vec<DeviceInfo>)> {
    let socket = system::socket_path().ok_or(NvmlError::DRIVER_NOT_LOADED)?;
    let opened = || {
        let connection = ProcessConnection::open(&socket)?;
        let devices = connection.devices()?;
        Ok::<_, ClientError>((connection, devices))
    };
    opened().map_err(|_| NvmlError::DRIVER_NOT_LOADED)
}

fn init() -> Result {
    let mut state = lock(&NVML);
    if let Some(nvml) = &mut *state {
        nvml.users += 1;
        return Ok(());
    }
    let (connection, devices) = connect()?;
    *state = Some(Nvml {
        users: 1,
        pid: std::process::id(),
        connection,
        devices,
    });
    Ok(())
}

fn shutdown() -> Result {
    let mut state = lock(&NVML);
    let nvml = state.as_mut().ok_or(NvmlError::UNINITIALIZED)?;
    nvml.users -= 1;
    if nvml.users == 0 {
        *state = None;
    }
    Ok(())
}

fn with<T>(body: impl FnOnce(&Nvml) -> Result<T>) -> Result<T> {
    body(lock(&NVML).as_ref().ok_or(NvmlError::UNINITIALIZED)?)
}

/// Handles are numbers from 1.
type Handle = usize;

fn info<T>(device: Handle, body: impl FnOnce(&DeviceInfo) -> Result<T>) -> Result<T> {
    with(|nvml| {
        let device = device.checked_sub(1).and_then(|at| nvml.devices.get(at));
        let device = device.filter(|it| !it.gone);
        body(device.ok_or(NvmlError::INVALID_ARGUMENT)?)
    })
}

fn status(device: Handle) -> Result<DeviceStatus> {
    info(device, |_| Ok(()))?;
    asked(|connection| connection.status(device as u32 - 1))
}

/// Asks the server, over a new connection where the old one has ended.
fn asked<T>(ask: impl Fn(&ProcessConnection) -> std::result::Result<T, ClientError>) -> Result<T> {
    let mut state = lock(&NVML);
    let nvml = state.as_mut().ok_or(NvmlError::UNINITIALIZED)?;
    if nvml.pid == std::process::id() {
        match ask(&nvml.connection) {
            Err(ClientError::Lost(_)) => {}
            answer => return Ok(answer?),
        }
    }
    let (connection, devices) = connect().map_err(|_| NvmlError::GPU_IS_LOST)?;
    (nvml.connection, nvml.devices, nvml.pid) = (connection, devices, std::process::id());
    Ok(ask(&nvml.connection)?)
}

/// Of GPUs that are no instances.
fn count(out: Out<c_uint>) -> Result {
    let gpus = with(|nvml| {
        let gpus = nvml.devices.iter().filter(|it| it.instance.is_none());
        Ok(gpus.count())
    })?;
    Ok(out.put(gpus as c_uint)?)
}

/// The handles of a GPU's instances, in the order of their MIG indices; none of what is no partitioned GPU.
fn instances(device: Handle) -> Result<Vec<Handle>> {
    if info(device, |it| Ok(it.mig_mode))? {
        // They come and go.
        let devices = asked(ProcessConnection::devices)?;
        if let Some(nvml) = &mut *lock(&NVML) {
            nvml.devices = devices;
        }
    }
    with(|nvml| {
        let all = (1..).zip(&nvml.devices);
        let own = all.filter(|(_, it)| it.is_part_of(device as u32 - 1));
        Ok(own.map(|(handle, _)| handle).collect())
    })
}

/// A device, or the instances that a GPU is used by.
fn parts(device: Handle) -> Result<Vec<Handle>> {
    Ok(match instances(device)? {
        none if none.is_empty() => vec![device],
        parts => parts,
    })
}

/// Handles of GPU instances begin here, and those of compute instances: far from those of devices.
const GPU_INSTANCE: Handle = 0x10_0000;
const COMPUTE_INSTANCE: Handle = 0x20_0000;

/// The handle of an instance: its GPU instance has this number in this GPU.
fn part(kind: Handle, gpu: u32, id: u32) -> Handle {
    kind + gpu as usize * 0x100 + id as usize
}

fn gpu_of(instance: Handle) -> u32 {
    (instance as u32 >> 8) & 0xfff
}

/// A GPU instance, and the number of its GPU.
fn gpu_instance(handle: Handle) -> Result<(u32, GpuInstance, &'static Shape)> {
    if handle >> 20 != GPU_INSTANCE >> 20 {
        return Err(NvmlError::INVALID_ARGUMENT);
    }
    let gpu = gpu_of(handle);
    let all = asked(|it| it.gpu_instances(gpu))?;
    let found = all.into_iter().find(|it| it.id == handle as u32 & 0xff);
    let found = found.ok_or(NvmlError::INVALID_ARGUMENT)?;
    let shape = SHAPES.iter().find(|it| it.id == found.profile);
    Ok((gpu, found, shape.ok_or(NvmlError::UNKNOWN)?))
}

/// A compute instance: its GPU instance's handle, and that.
fn compute_instance(handle: Handle) -> Result<(Handle, GpuInstance, &'static Shape)> {
    if handle >> 20 != COMPUTE_INSTANCE >> 20 {
        return Err(NvmlError::INVALID_ARGUMENT);
    }
    let of = handle - COMPUTE_INSTANCE + GPU_INSTANCE;
    let (_, found, shape) = gpu_instance(of)?;
    match found.device {
        Some(_) => Ok((of, found, shape)),
        None => Err(NvmlError::INVALID_ARGUMENT),
    }
}

/// `NVML_COMPUTE_INSTANCE_PROFILE_…` of the compute instance that has all of a GPU instance; also the driver's number of it.
fn compute_profile(shape: &Shape) -> c_uint {
    match shape.slices {
        7 => 4,
        slices => slices - 1,
    }
}

/// A profile of a GPU in MIG mode.
fn shape(device: Handle, is: impl Fn(&Shape) -> bool) -> Result<&'static Shape> {
    whole(device, |it| match it.mig_mode {
        true => Ok(()),
        false => Err(NvmlError::NOT_SUPPORTED),
    })?;
    let found = SHAPES.iter().find(|it| is(it));
    found.ok_or(NvmlError::NOT_SUPPORTED)
}

fn placements(device: Handle, profile: c_uint, out: Out<Placement>, count: Out<c_uint>) -> Result {
    let shape = shape(device, |it| it.id == profile)?;
    count.put(shape.starts.len() as c_uint)?;
    if out.is_null() {
        return Ok(());
    }
    let at = |start: &u32| Placement {
        start: *start,
        size: shape.memory_slices,
    };
    Ok(out.put_all(shape.starts.iter().map(at))?)
}

fn instance<T>(device: Handle, body: impl FnOnce(&Instance) -> T) -> Result<T> {
    info(device, |it| {
        it.instance
            .as_ref()
            .map(body)
            .ok_or(NvmlError::NOT_SUPPORTED)
    })
}

/// What NVML says of GPUs only.
fn whole<T>(device: Handle, body: impl FnOnce(&DeviceInfo) -> Result<T>) -> Result<T> {
    info(device, |it| match it.instance {
        None => body(it),
        Some(_) => Err(NvmlError::NOT_SUPPORTED),
    })
}

fn find(out: Out<Handle>, matches: impl Fn(&DeviceInfo) -> bool) -> Result {
    let at = with(|nvml| {
        let found = |it: &DeviceInfo| !it.gone && matches(it);
        let found = nvml.devices.iter().position(found);
        found.ok_or(NvmlError::NOT_FOUND)
    })?;
    Ok(out.put(at + 1)?)
}

fn text(out: Out<c_char>, length: c_uint, value: &str) -> Result {
    if (length as usize) <= value.len() {
        return Err(NvmlError::INSUFFICIENT_SIZE);
    }
    Ok(out.put_text(length as c_int, value)?)
}

fn cuda_version(out: Out<c_int>) -> Result {
    let version = match with(|nvml| Ok(nvml.devices.first().map(|it| it.cuda_version))) {
        Ok(version) => version,
        Err(_) => connect()?.1.first().map(|it| it.cuda_version),
    };
    Ok(out.put(version.unwrap_or(0))?)
}

exports! { FUNCTIONS by nvml;
    nvmlInit() => init();
    nvmlInit_v2() => init();
    nvmlInitWithFlags(_flags: c_uint) => init();
    nvmlShutdown() => shutdown();
    nvmlSystemGetDriverVersion(out: Out<c_char>, length: c_uint) => {
        let version = with(|nvml| Ok(nvml.devices.first().map(|it| it.driver_version.clone())))?;
        text(out, length, &version.unwrap_or_default())
    };
    nvmlSystemGetNVMLVersion(out: Out<c_char>, length: c_uint) => {
        let version = with(|nvml| Ok(nvml.devices.first().map(|it| format!("13.{}", it.driver_version))))?;
        text(out, length, &version.unwrap_or_default())
    };
    nvmlSystemGetCudaDriverVersion(out: Out<c_int>) => cuda_version(out);
    nvmlSystemGetCudaDriverVersion_v2(out: Out<c_int>) => cuda_version(out);
    nvmlDeviceGetCount(out: Out<c_uint>) => count(out);
    nvmlDeviceGetCount_v2(out: Out<c_uint>) => count(out);
    nvmlDeviceGetHandleByIndex(index: c_uint, out: Out<Handle>) => by_index(index, out);
    nvmlDeviceGetHandleByIndex_v2(index: c_uint, out: Out<Handle>) => by_index(index, out);
    nvmlDeviceGetHandleByUUID(uuid: Text, out: Out<Handle>) => {
        let uuid = uuid.get()?;
        find(out, |device| device.uuid_text() == uuid)
    };
    nvmlDeviceGetHandleByPciBusId(id: Text, out: Out<Handle>) => by_bus_id(id, out);
    nvmlDeviceGetHandleByPciBusId_v2(id: Text, out: Out<Handle>) => by_bus_id(id, out);
    nvmlDeviceGetIndex(device: Handle, out: Out<c_uint>) => {
        // Of an instance: among its GPU's.
        let index = match instance(device, |it| it.gpu) {
            Ok(gpu) => instances(gpu as usize + 1)?.iter().position(|it| *it == device).ok_or(NvmlError::UNKNOWN)?,
            Err(_) => info(device, |_| Ok(device - 1))?,
        };
        Ok(out.put(index as c_uint)?)
    };
    nvmlDeviceGetMinorNumber(device: Handle, out: Out<c_uint>) => whole(device, |_| Ok(out.put(device as c_uint - 1)?));
    nvmlDeviceGetName(device: Handle, out: Out<c_char>, length: c_uint) => info(device, |it| text(out, length, &it.name));
    nvmlDeviceGetUUID(device: Handle, out: Out<c_char>, length: c_uint) => info(device, |it| text(out, length, &it.uuid_text()));
    nvmlDeviceGetCudaComputeCapability(device: Handle, major: Out<c_int>, minor: Out<c_int>) => info(device, |it| {
        major.put(it.compute_capability.0 as c_int)?;
        Ok(minor.put(it.compute_capability.1 as c_int)?)
    });
    nvmlDeviceGetNumGpuCores(device: Handle, out: Out<c_uint>) => info(device, |it| {
        let of_an_sm = if matches!(it.compute_capability, (7, _) | (8, 0)) { 64 } else { 128 };
        Ok(out.put(it.sms * of_an_sm)?)
    });
    nvmlDeviceGetPciInfo_v2(device: Handle, out: Out<PciInfo>) => info(device, |it| Ok(out.put(PciInfo::new(it.pci_bus))?));
    nvmlDeviceGetPciInfo_v3(device: Handle, out: Out<PciInfo>) => info(device, |it| Ok(out.put(PciInfo::new(it.pci_bus))?));
    nvmlDeviceGetMemoryInfo(device: Handle, out: Out<MemoryInfo>) => {
        let Memory { total, reserved, used } = memory(device)?;
        // This version counts what is reserved as used.
        let used = used + reserved;
        Ok(out.put(MemoryInfo { total, free: total - used, used })?)
    };
    nvmlDeviceGetMemoryInfo_v2(device: Handle, out: Out<MemoryInfoV2>) => {
        let Memory { total, reserved, used } = memory(device)?;
        let version = out.get()?.version;
        if version != MEMORY_INFO_V2 {
            return Err(NvmlError::ARGUMENT_VERSION_MISMATCH);
        }
        Ok(out.put(MemoryInfoV2 { version, total, reserved, free: total - reserved - used, used })?)
    };
    nvmlDeviceGetUtilizationRates(device: Handle, out: Out<Utilization>) => {
        // Not known of instances, nor of GPUs that are partitioned.
        whole(device, |_| Ok(()))?;
        if info(device, |it| Ok(it.mig_mode))? {
            return Err(NvmlError::NOT_SUPPORTED);
        }
        let status = status(device)?;
        Ok(out.put(Utilization { gpu: status.compute_percent, memory: status.copy_percent })?)
    };
    nvmlDeviceGetComputeRunningProcesses(device: Handle, count: Out<c_uint>, out: Out<ProcessInfoV1>) => processes(device, count, out);
    nvmlDeviceGetComputeRunningProcesses_v2(device: Handle, count: Out<c_uint>, out: Out<ProcessInfo>) => processes(device, count, out);
    nvmlDeviceGetComputeRunningProcesses_v3(device: Handle, count: Out<c_uint>, out: Out<ProcessInfo>) => processes(device, count, out);
    nvmlDeviceGetGraphicsRunningProcesses_v3(device: Handle, count: Out<c_uint>, _out: Out<ProcessInfo>) => info(device, |_| Ok(count.put(0)?));
    nvmlDeviceGetProcessUtilization(device: Handle, samples: Out<ProcessUtilization>, count: Out<c_uint>, since: c_ulonglong) => utilization(device, samples, count, since);
    nvmlDeviceGetBrand(device: Handle, out: Out<c_uint>) => info(device, |_| Ok(out.put(14)?)); // NVIDIA
    nvmlDeviceGetArchitecture(device: Handle, out: Out<c_uint>) => info(device, |_| Ok(out.put(9)?)); // Hopper
    nvmlDeviceGetComputeMode(device: Handle, out: Out<c_uint>) => info(device, |_| Ok(out.put(0)?)); // default
    nvmlDeviceGetPersistenceMode(device: Handle, out: Out<c_uint>) => info(device, |_| Ok(out.put(1)?));
    nvmlDeviceGetDisplayMode(device: Handle, out: Out<c_uint>) => info(device, |_| Ok(out.put(0)?));
    nvmlDeviceGetDisplayActive(device: Handle, out: Out<c_uint>) => info(device, |_| Ok(out.put(0)?));
    nvmlDeviceGetMemoryBusWidth(device: Handle, out: Out<c_uint>) => info(device, |_| Ok(out.put(5120)?));
    nvmlDeviceIsMigDeviceHandle(device: Handle, out: Out<c_uint>) => info(device, |it| Ok(out.put(it.instance.is_some().into())?));
    nvmlDeviceGetMaxMigDeviceCount(device: Handle, out: Out<c_uint>) => {
        whole(device, |it| Ok(out.put(if it.mig_mode { MAX_INSTANCES } else { 0 })?))
    };
    nvmlDeviceGetMigMode(device: Handle, current: Out<c_uint>, pending: Out<c_uint>) => whole(device, |it| {
        current.put(it.mig_mode.into())?;
        Ok(pending.put(it.mig_mode.into())?)
    });
    nvmlDeviceGetGpuInstanceProfileInfo(device: Handle, profile: c_uint, out: Out<ProfileInfo>) => {
        let shape = shape(device, |it| it.nvml == profile)?;
        whole(device, |it| Ok(out.put(ProfileInfo::of(shape, it))?))
    };
    nvmlDeviceGetGpuInstanceProfileInfoV(device: Handle, profile: c_uint, out: Out<ProfileInfoV2>) => {
        let shape = shape(device, |it| it.nvml == profile)?;
        if out.get()?.version != PROFILE_INFO_V2 {
            return Err(NvmlError::ARGUMENT_VERSION_MISMATCH);
        }
        whole(device, |it| Ok(out.put(ProfileInfoV2::of(shape, it))?))
    };
    nvmlDeviceGetGpuInstancePossiblePlacements(device: Handle, profile: c_uint, out: Out<Placement>, count: Out<c_uint>) => placements(device, profile, out, count);
    nvmlDeviceGetGpuInstancePossiblePlacements_v2(device: Handle, profile: c_uint, out: Out<Placement>, count: Out<c_uint>) => placements(device, profile, out, count);
    nvmlDeviceCreateGpuInstanceWithPlacement(device: Handle, profile: c_uint, at: In<Placement>, out: Out<Handle>) => {
        out.check()?;
        shape(device, |it| it.id == profile)?;
        let (gpu, start) = (device as u32 - 1, at.get()?.start);
        let made = asked(|it| it.make_gpu_instance(gpu, profile, start))?;
        Ok(out.put(part(GPU_INSTANCE, gpu, made.id))?)
    };
    nvmlDeviceGetGpuInstances(device: Handle, profile: c_uint, out: Out<Handle>, count: Out<c_uint>) => {
        shape(device, |it| it.id == profile)?;
        let gpu = device as u32 - 1;
        let all = asked(|it| it.gpu_instances(gpu))?;
        let own = all.into_iter().filter(|it| it.profile == profile);
        let own: Vec<_> = own.map(|it| part(GPU_INSTANCE, gpu, it.id)).collect();
        count.put(own.len() as c_uint)?;
        Ok(out.put_all(own)?)
    };
    nvmlDeviceGetGpuInstanceById(device: Handle, id: c_uint, out: Out<Handle>) => {
        shape(device, |_| true)?;
        let handle = part(GPU_INSTANCE, device as u32 - 1, id);
        gpu_instance(handle).map_err(|_| NvmlError::NOT_FOUND)?;
        Ok(out.put(handle)?)
    };
    nvmlGpuInstanceGetInfo(instance: Handle, out: Out<GpuInstanceInfo>) => {
        let (gpu, it, shape) = gpu_instance(instance)?;
        let placement = Placement { start: it.start, size: shape.memory_slices };
        Ok(out.put(GpuInstanceInfo { device: gpu as usize + 1, id: it.id, profile: it.profile, placement })?)
    };
    nvmlGpuInstanceDestroy(instance: Handle) => {
        let (gpu, it, _) = gpu_instance(instance)?;
        asked(|connection| connection.end_gpu_instance(gpu, it.id))
    };
    nvmlGpuInstanceGetComputeInstanceProfileInfo(instance: Handle, profile: c_uint, _engines: c_uint, out: Out<[c_uint; 9]>) => {
        // Only one that has all of its GPU instance.
        let (_, _, shape) = gpu_instance(instance)?;
        match compute_profile(shape) == profile {
            true => Ok(out.put([profile, shape.slices, 1, shape.sms as c_uint, 1, 1, 0, 1, 0])?),
            false => Err(NvmlError::NOT_SUPPORTED),
        }
    };
    nvmlGpuInstanceCreateComputeInstance(instance: Handle, profile: c_uint, out: Out<Handle>) => {
        out.check()?;
        let (gpu, it, shape) = gpu_instance(instance)?;
        if compute_profile(shape) != profile {
            return Err(NvmlError::NOT_SUPPORTED);
        }
        asked(|connection| connection.make_compute_instance(gpu, it.id))?;
        Ok(out.put(part(COMPUTE_INSTANCE, gpu, it.id))?)
    };
    nvmlGpuInstanceGetComputeInstances(instance: Handle, profile: c_uint, out: Out<Handle>, count: Out<c_uint>) => {
        let (gpu, it, shape) = gpu_instance(instance)?;
        let own = it.device.filter(|_| compute_profile(shape) == profile);
        count.put(own.is_some().into())?;
        Ok(out.put_all(own.map(|_| part(COMPUTE_INSTANCE, gpu, it.id)))?)
    };
    nvmlComputeInstanceGetInfo_v2(instance: Handle, out: Out<ComputeInstanceInfo>) => {
        let (of, it, shape) = compute_instance(instance)?;
        let device = it.device.ok_or(NvmlError::INVALID_ARGUMENT)? as usize + 1;
        let placement = Placement { start: 0, size: shape.slices };
        Ok(out.put(ComputeInstanceInfo { device, of, id: 0, profile: compute_profile(shape), placement })?)
    };
    nvmlComputeInstanceDestroy(instance: Handle) => {
        let (_, it, _) = compute_instance(instance)?;
        let gpu = gpu_of(instance);
        asked(|connection| connection.end_compute_instance(gpu, it.id))
    };
    nvmlDeviceGetMigDeviceHandleByIndex(device: Handle, index: c_uint, out: Out<Handle>) => {
        whole(device, |_| Ok(()))?;
        let all = instances(device)?;
        match all.get(index as usize) {
            Some(instance) => Ok(out.put(*instance)?),
            None if !info(device, |it| Ok(it.mig_mode))? => Err(NvmlError::NOT_SUPPORTED),
            None if index < MAX_INSTANCES => Err(NvmlError::NOT_FOUND),
            None => Err(NvmlError::INVALID_ARGUMENT),
        }
    };
    nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device: Handle, out: Out<Handle>) => match instance(device, |it| it.gpu) {
        Err(NvmlError::NOT_SUPPORTED) => Err(NvmlError::INVALID_ARGUMENT),
        gpu => Ok(out.put(gpu? as usize + 1)?),
    };
    nvmlDeviceGetGpuInstanceId(device: Handle, out: Out<c_uint>) => Ok(out.put(instance(device, |it| it.gpu_instance)?)?);
    nvmlDeviceGetComputeInstanceId(device: Handle, out: Out<c_uint>) => Ok(out.put(instance(device, |it| it.compute_instance)?)?);
    nvmlDeviceGetAttributes(device: Handle, out: Out<Attributes>) => attributes(device, out);
    nvmlDeviceGetAttributes_v2(device: Handle, out: Out<Attributes>) => attributes(device, out);
    nvmlDeviceGetClockInfo(device: Handle, kind: c_uint, out: Out<c_uint>) => clock(device, kind, out);
    nvmlDeviceGetMaxClockInfo(device: Handle, kind: c_uint, out: Out<c_uint>) => clock(device, kind, out);
    nvmlDeviceGetTemperature(device: Handle, _sensor: c_uint, out: Out<c_uint>) => Ok(out.put(heat(device)?.0)?);
    nvmlDeviceGetPowerUsage(device: Handle, out: Out<c_uint>) => Ok(out.put(heat(device)?.1)?);
    nvmlDeviceGetEnforcedPowerLimit(device: Handle, out: Out<c_uint>) => whole(device, |_| Ok(out.put(POWER_MW.1)?));
    nvmlDeviceGetPowerManagementLimit(device: Handle, out: Out<c_uint>) => whole(device, |_| Ok(out.put(POWER_MW.1)?));
    // What only a real board has: no energy counter, no links, no slot.
    nvmlDeviceGetTotalEnergyConsumption(device: Handle, _out: Out<u64>) => none(device);
    nvmlDeviceGetPerformanceState(device: Handle, _out: Out<c_uint>) => none(device);
    nvmlDeviceGetFanSpeed(device: Handle, _out: Out<c_uint>) => none(device);
    nvmlDeviceGetNvLinkState(device: Handle, _link: c_uint, _out: Out<c_uint>) => none(device);
    nvmlDeviceGetSerial(device: Handle, _out: Out<c_char>, _length: c_uint) => none(device);
    nvmlDeviceGetEccMode(device: Handle, _current: Out<c_uint>, _pending: Out<c_uint>) => none(device);
    nvmlDeviceGetBAR1MemoryInfo(device: Handle, _out: Out<[u64; 3]>) => none(device);
    nvmlDeviceGetCurrPcieLinkGeneration(device: Handle, _out: Out<c_uint>) => none(device);
    nvmlDeviceGetCurrPcieLinkWidth(device: Handle, _out: Out<c_uint>) => none(device);
    nvmlDeviceGetMaxPcieLinkGeneration(device: Handle, _out: Out<c_uint>) => none(device);
    nvmlDeviceGetMaxPcieLinkWidth(device: Handle, _out: Out<c_uint>) => none(device);
    nvmlDeviceGetCurrentClocksThrottleReasons(device: Handle, out: Out<c_ulonglong>) => info(device, |_| Ok(out.put(0)?));
    nvmlDeviceGetP2PStatus(device: Handle, other: Handle, _index: c_uint, out: Out<c_uint>) => {
        info(other, |_| Ok(()))?;
        info(device, |_| Ok(out.put(1)?)) // not supported by the chip set
    };
}

/// Never fails, so not one of the list.
#[unsafe(no_mangle)]
#[allow(non_snake_case)]
pub(crate) extern "C" fn nvmlErrorString(code: c_int) -> *const c_char {
    describe(code).as_ptr()
}

fn none(device: Handle) -> Result {
    info(device, |_| Err(NvmlError::NOT_SUPPORTED))
}

/// Power of an H100 SXM5 without work, and at its limit, in mW.
const POWER_MW: (u32, u32) = (70_000, 700_000);
/// Temperature without work, and at the power limit, in °C.
const CELSIUS: (u32, u32) = (32, 72);

/// Temperature in °C and power in mW of a whole GPU: in proportion to the use of its SMs, and at once.
fn heat(device: Handle) -> Result<(u32, u32)> {
    whole(device, |_| Ok(()))?;
    let parts = parts(device)?;
    let mut used = 0;
    for part in &parts {
        used += status(*part)?.compute_percent.min(100);
    }
    Ok(heat_at(used / parts.len() as u32))
}

fn heat_at(percent: u32) -> (u32, u32) {
    let at = |(least, most): (u32, u32)| least + (most - least) * percent / 100;
    (at(CELSIUS), at(POWER_MW))
}

/// In MHz: graphics, SM, memory, video. They never change.
fn clock(device: Handle, kind: c_uint, out: Out<c_uint>) -> Result {
    info(device, |it| {
        Ok(out.put(match kind {
            0 | 1 | 3 => it.clock_khz / 1000,
            2 => 2619,
            _ => return Err(NvmlError::INVALID_ARGUMENT),
        })?)
    })
}

fn by_index(index: c_uint, out: Out<Handle>) -> Result {
    let handle = index as usize + 1;
    info(handle, |it| match it.instance {
        None => Ok(out.put(handle)?),
        Some(_) => Err(NvmlError::INVALID_ARGUMENT),
    })
}

fn attributes(device: Handle, out: Out<Attributes>) -> Result {
    let (slices, sms, memory) = info(device, |it| {
        let instance = it.instance.as_ref().ok_or(NvmlError::NOT_SUPPORTED)?;
        Ok((instance.slices, it.sms, it.memory))
    })?;
    Ok(out.put(Attributes {
        sms,
        // The model has one for each direction.
        copy_engines: 2,
        codecs: [0; 4],
        gpu_slices: slices,
        compute_slices: slices,
        memory_mib: memory >> 20,
    })?)
}

fn by_bus_id(id: Text, out: Out<Handle>) -> Result {
    let id = id.get()?;
    find(out, |device| {
        device.instance.is_none() && same_bus_id(&id, device.pci_bus)
    })
}

/// Bytes of a device.
struct Memory {
    total: u64,
    reserved: u64,
    /// By programs.
    used: u64,
}

fn memory(device: Handle) -> Result<Memory> {
    let (memory, reserved) = info(device, |it| Ok((it.memory, it.reserved_memory)))?;
    Ok(Memory {
        total: memory + reserved,
        reserved,
        used: status(device)?.used.min(memory),
    })
}

fn processes<T: From<ProcessInfo>>(device: Handle, count: Out<c_uint>, out: Out<T>) -> Result {
    let mut running = Vec::new();
    for device in parts(device)? {
        // Those of a GPU that is whole are on no instance.
        let ids = instance(device, |it| (it.gpu_instance, it.compute_instance));
        let (gpu_instance, compute_instance) = ids.unwrap_or((u32::MAX, u32::MAX));
        let processes = status(device)?.processes.into_iter();
        running.extend(processes.map(|(pid, used)| ProcessInfo {
            pid,
            used,
            gpu_instance,
            compute_instance,
        }));
    }
    let room = count.get()? as usize;
    count.put(running.len() as c_uint)?;
    if room < running.len() {
        return Err(NvmlError::INSUFFICIENT_SIZE);
    }
    if running.is_empty() {
        return Ok(());
    }
    Ok(out.put_all(running.into_iter().map(T::from))?)
}

/// `nvmlProcessUtilizationSample_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ProcessUtilization {
    pid: c_uint,
    /// In µs since 1970.
    time: u64,
    sm_percent: c_uint,
    memory_percent: c_uint,
    encoder_percent: c_uint,
    decoder_percent: c_uint,
}

/// How long each process's kernels had run at some moments, in µs since 1970, of each device.
static SAMPLES: Mutex<BTreeMap<u32, VecDeque<Sample>>> = Mutex::new(BTreeMap::new());
type Sample = (u64, BTreeMap<u32, u64>);
/// So many are kept, and so far apart, in µs: as the driver's.
const KEPT: usize = 100;
const APART: u64 = 100_000;

/// What processes used since a moment.
fn utilization(
    device: Handle,
    samples: Out<ProcessUtilization>,
    count: Out<c_uint>,
    since: u64,
) -> Result {
    if whole(device, |it| Ok(it.mig_mode))? {
        return Err(NvmlError::NOT_SUPPORTED);
    }
    let busy: BTreeMap<u32, u64> = status(device)?.busy.into_iter().collect();
    let epoch = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = epoch.unwrap_or_default().as_micros() as u64;
    let mut all = lock(&SAMPLES);
    let known = all.entry(device as u32).or_default();
    let before = known.iter().rfind(|(at, _)| *at <= since);
    let before = before.or(known.front()).cloned();
    if known.back().is_none_or(|(at, _)| at + APART <= now) {
        known.push_back((now, busy.clone()));
        if known.len() > KEPT {
            known.pop_front();
        }
    }
    drop(all);
    let percent = |(pid, ran): (u32, u64)| {
        let (then, before) = before.as_ref()?;
        let time = now.checked_sub(*then).filter(|time| *time > 0)?;
        let ran = ran.saturating_sub(before.get(&pid).copied().unwrap_or(0));
        let percent = (ran / 10).checked_div(time)?.min(100) as c_uint;
        Some(ProcessUtilization {
            pid,
            time: now,
            sm_percent: percent,
            memory_percent: 0,
            encoder_percent: 0,
            decoder_percent: 0,
        })
    };
    let used: Vec<_> = busy
        .into_iter()
        .filter_map(percent)
        .filter(|it| it.sm_percent > 0)
        .collect();
    if used.is_empty() {
        count.put(0)?;
        return Err(NvmlError::NOT_FOUND);
    }
    let room = count.get()? as usize;
    count.put(used.len() as c_uint)?;
    if samples.is_null() || room < used.len() {
        return Err(NvmlError::INSUFFICIENT_SIZE);
    }
    Ok(samples.put_all(used)?)
}

/// `nvmlGpuInstancePlacement_t`, and `nvmlComputeInstancePlacement_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Placement {
    start: c_uint,
    size: c_uint,
}

/// `nvmlGpuInstanceInfo_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct GpuInstanceInfo {
    device: Handle,
    id: c_uint,
    profile: c_uint,
    placement: Placement,
}

/// `nvmlComputeInstanceInfo_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ComputeInstanceInfo {
    device: Handle,
    of: Handle,
    id: c_uint,
    profile: c_uint,
    placement: Placement,
}

/// What both versions of a profile's description begin with.
#[repr(C)]
#[derive(Clone, Copy)]
struct ProfileCounts {
    id: c_uint,
    p2p: c_uint,
    slices: c_uint,
    most: c_uint,
    sms: c_uint,
    copy_engines: c_uint,
    /// Decoders, encoders, JPEG, optical flow.
    codecs: [c_uint; 4],
}

impl ProfileCounts {
    fn of(shape: &Shape, gpu: &DeviceInfo) -> Self {
        Self {
            id: shape.id,
            p2p: 0,
            slices: shape.slices,
            most: shape.most,
            sms: shape.sms_of(gpu.sms),
            copy_engines: shape.slices,
            codecs: [0; 4],
        }
    }
}

/// `nvmlGpuInstanceProfileInfo_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ProfileInfo {
    counts: ProfileCounts,
    memory_mib: u64,
}
const _: () = assert!(size_of::<ProfileInfo>() == 48);

impl ProfileInfo {
    fn of(shape: &Shape, gpu: &DeviceInfo) -> Self {
        Self {
            counts: ProfileCounts::of(shape, gpu),
            memory_mib: shape.memory(gpu.memory) >> 20,
        }
    }
}

/// `nvmlGpuInstanceProfileInfo_v2_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ProfileInfoV2 {
    version: c_uint,
    counts: ProfileCounts,
    memory_mib: u64,
    name: [u8; 96],
}
const _: () = assert!(size_of::<ProfileInfoV2>() == 152);

/// `NVML_STRUCT_VERSION(GpuInstanceProfileInfo, 2)`.
const PROFILE_INFO_V2: c_uint = size_of::<ProfileInfoV2>() as c_uint | 2 << 24;

impl ProfileInfoV2 {
    fn of(shape: &Shape, gpu: &DeviceInfo) -> Self {
        let ProfileInfo { counts, memory_mib } = ProfileInfo::of(shape, gpu);
        let text = format!("MIG {}", shape.name);
        let mut name = [0; 96];
        name[..text.len()].copy_from_slice(text.as_bytes());
        Self {
            version: PROFILE_INFO_V2,
            counts,
            memory_mib,
            name,
        }
    }
}

/// `nvmlMemory_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct MemoryInfo {
    total: u64,
    free: u64,
    used: u64,
}

/// `nvmlMemory_v2_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct MemoryInfoV2 {
    version: c_uint,
    total: u64,
    reserved: u64,
    free: u64,
    used: u64,
}

/// `NVML_STRUCT_VERSION(Memory, 2)`: size and version.
const MEMORY_INFO_V2: c_uint = size_of::<MemoryInfoV2>() as c_uint | 2 << 24;
const _: () = assert!(size_of::<MemoryInfoV2>() == 40);

/// `nvmlDeviceAttributes_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Attributes {
    sms: c_uint,
    copy_engines: c_uint,
    /// Decoders, encoders, JPEG, optical flow.
    codecs: [c_uint; 4],
    gpu_slices: c_uint,
    compute_slices: c_uint,
    memory_mib: u64,
}
const _: () = assert!(size_of::<Attributes>() == 40);

/// `nvmlUtilization_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Utilization {
    gpu: c_uint,
    memory: c_uint,
}

/// `nvmlProcessInfo_t`, as the functions of versions 2 and 3 give it.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ProcessInfo {
    pid: c_uint,
    used: u64,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}
const _: () = assert!(size_of::<ProcessInfo>() == 24);

/// `nvmlProcessInfo_v1_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ProcessInfoV1 {
    pid: c_uint,
    used: u64,
}

impl From<ProcessInfo> for ProcessInfoV1 {
    fn from(ProcessInfo { pid, used, .. }: ProcessInfo) -> Self {
        Self { pid, used }
    }
}

/// `nvmlPciInfo_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct PciInfo {
    legacy: [u8; 16],
    domain: c_uint,
    bus: c_uint,
    device: c_uint,
    device_id: c_uint,
    subsystem_id: c_uint,
    id: [u8; 32],
}
const _: () = assert!(size_of::<PciInfo>() == 68);

impl PciInfo {
    fn new(bus: u32) -> Self {
        let short = pci_bus_id(bus);
        let long = format!("0000{short}");
        let mut info = Self {
            legacy: [0; 16],
            domain: 0,
            bus,
            device: 0,
            device_id: 0x2330_10de, // H100 SXM5
            subsystem_id: 0,
            id: [0; 32],
        };
        info.legacy[..short.len()].copy_from_slice(short.as_bytes());
        info.id[..long.len()].copy_from_slice(long.as_bytes());
        info
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bus_ids_are_terminated_text() {
        let info = PciInfo::new(0x1b);
        assert_eq!(&info.legacy, b"0000:1B:00.0\0\0\0\0");
        assert!(info.id.starts_with(b"00000000:1B:00.0\0"));
    }

    #[test]
    fn heat_follows_use_between_its_ends() {
        assert_eq!(heat_at(0), (32, 70_000));
        assert_eq!(heat_at(50), (52, 385_000));
        assert_eq!(heat_at(100), (72, 700_000));
    }

    #[test]
    fn nothing_works_before_init() {
        assert_eq!(nvmlShutdown(), NvmlError::UNINITIALIZED.0);
        assert_eq!(nvml("", || info(1, |_| Ok(()))), NvmlError::UNINITIALIZED.0);
        assert!(FUNCTIONS.iter().all(|it| it.0.starts_with("nvml")));
    }
}
