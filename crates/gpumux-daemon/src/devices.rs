//! The devices as NVML knows them: GPUs and MIG instances, which are only looked at here. Without NVML, devices are known once a tenant shows them.

use std::{
    collections::BTreeMap,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::{Arc, OnceLock, PoisonError, RwLock},
    thread::{self, Thread},
    time::{Duration, Instant},
};

use nvml_wrapper::{
    Device, Nvml, enum_wrappers::device::TemperatureSensor, enums::device::UsedGpuMemory,
    error::NvmlError, struct_wrappers::device::ProcessInfo,
};
use nvml_wrapper_sys::bindings::NvmlLib;
use tokio::sync::watch;

use crate::{
    api::types::{Hardware, Mig, Readings},
    clock::since_1970,
};

/// How often NVML is asked whether the devices are well, and how much of their memory is used.
const EVERY: Duration = Duration::from_secs(1);

/// The numbers that NVML and `nvidia-smi` give the GPUs, by the UUIDs of GPUs and MIG instances.
pub(crate) type Numbers = BTreeMap<String, u32>;

/// One GPU that is not partitioned, or one MIG instance.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Known {
    pub(crate) uuid: String,
    pub(crate) name: String,
    /// NVML's index of the GPU that it is, or is a part of.
    pub(crate) gpu: u32,
    /// Its SMs, if NVML tells.
    pub(crate) sms: Option<u32>,
    /// What its link to the host can carry in one direction, in bytes a second, if NVML tells.
    pub(crate) link: Option<u64>,
    pub(crate) memory_bytes: u64,
    /// Bytes in use, by whomever.
    pub(crate) memory_used: u64,
    /// But for its memory.
    pub(crate) readings: Readings,
    pub(crate) driver: String,
    pub(crate) hardware: Hardware,
    /// `ok`, or what is wrong.
    pub(crate) state: String,
    /// It has another daemon: which.
    pub(crate) other: Option<String>,
    /// What each process used lately; none: the driver does not tell.
    pub(crate) used_by: Option<Used>,
    /// The processes that have a context on it.
    pub(crate) processes: Vec<Process>,
}

/// The numbers of these.
pub(crate) fn numbered(known: &[Known]) -> Numbers {
    let number = |it: &Known| (it.uuid.clone(), it.gpu);
    known.iter().map(number).collect()
}

/// What processes used of a device lately, by pid.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Used {
    /// The part of the time in which kernels of each ran.
    pub(crate) parts: BTreeMap<u32, f64>,
    /// The last sample of each, with the moment at which it ended; none where that is not known.
    pub(crate) samples: BTreeMap<u32, (Instant, f64)>,
}

/// Up to when the use of a GPU was seen.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    /// By NVML's clock, in µs.
    sample: u64,
    clock: Clock,
}

/// Finds moments that NVML names by the system's time, which may be set.
#[derive(Clone, Copy, Debug, Default)]
struct Clock {
    /// A moment, and the time since 1970 then.
    last: Option<(Instant, Duration)>,
    /// Since when the two go alike.
    steady: Option<Instant>,
}

/// By how much the system's time may be adjusted between two looks.
const ADJUSTED: Duration = Duration::from_millis(10);
/// For how long no moment is found after it was set.
const SET: Duration = Duration::from_secs(10);

impl Clock {
    fn look(&mut self, now: Instant, time: Duration) {
        let apart = |(before, then): (Instant, Duration)| {
            let (passed, by_time) = (now - before, time.checked_sub(then));
            by_time.is_none_or(|it| it.abs_diff(passed) > ADJUSTED)
        };
        if self.last.is_none_or(apart) {
            self.steady = Some(now);
        }
        self.last = Some((now, time));
    }

    /// The moment of a timestamp in µs since 1970 that is at most a few seconds old.
    fn moment(&self, timestamp: u64) -> Option<Instant> {
        let (now, time) = self.last?;
        let is_steady = self.steady.is_some_and(|it| now - it >= SET);
        let ago = time.checked_sub(Duration::from_micros(timestamp));
        now.checked_sub(ago.filter(|it| is_steady && *it < SET)?)
    }
}

/// A process that uses a device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Process {
    pub(crate) pid: u32,
    /// As the kernel has it; empty if the process is not to be seen from here.
    pub(crate) name: String,
    pub(crate) uid: Option<u32>,
    /// Bytes of the device's memory, if the driver tells.
    pub(crate) memory_bytes: Option<u64>,
}

/// The processes that have a context on a device.
fn processes(device: &Device<'_>) -> Vec<Process> {
    let all = device.running_compute_processes().unwrap_or_default();
    let process = |it: ProcessInfo| {
        let dir = PathBuf::from(format!("/proc/{}", it.pid));
        let name = std::fs::read_to_string(dir.join("comm")).unwrap_or_default();
        Process {
            pid: it.pid,
            name: name.trim_end().to_owned(),
            uid: std::fs::metadata(&dir).ok().map(|it| it.uid()),
            memory_bytes: match it.used_gpu_memory {
                UsedGpuMemory::Used(bytes) => Some(bytes),
                UsedGpuMemory::Unavailable => None,
            },
        }
    };
    all.into_iter().map(process).collect()
}

/// A look that takes longer is shown as a device's state.
const HANGS: Duration = Duration::from_secs(5);

/// What is known of all devices.
#[derive(Clone, Default)]
pub(crate) struct Devices {
    known: Arc<RwLock<Vec<Known>>>,
    /// Those that other daemons have, by UUID, and which.
    others: Arc<RwLock<BTreeMap<String, String>>>,
    /// Since when NVML is asked; none between two looks, and without NVML.
    asked: Arc<RwLock<Option<Instant>>>,
    /// The thread that asks.
    thread: Arc<OnceLock<Thread>>,
}

impl Devices {
    pub(crate) fn list(&self) -> Vec<Known> {
        let mut known = self.seen();
        let others = self.others.read().unwrap_or_else(PoisonError::into_inner);
        for device in &mut known {
            device.other = others.get(&device.uuid).cloned();
        }
        known
    }

    fn seen(&self) -> Vec<Known> {
        let known = self.known.read();
        known.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Other daemons have these now, by UUID.
    pub(crate) fn set_others(&self, others: BTreeMap<String, String>) {
        *self.others.write().unwrap_or_else(PoisonError::into_inner) = others;
    }

    /// Why what is known may be old.
    pub(crate) fn trouble(&self) -> Option<&'static str> {
        let asked = *self.asked.read().unwrap_or_else(PoisonError::into_inner);
        (asked?.elapsed() > HANGS).then_some("NVML does not answer")
    }

    /// Looks again at once.
    pub(crate) fn look_again(&self) {
        if let Some(thread) = self.thread.get() {
            thread.unpark();
        }
    }

    fn asks(&self, since: Option<Instant>) {
        *self.asked.write().unwrap_or_else(PoisonError::into_inner) = since;
    }

    /// Watches the devices from a thread of its own: a driver in trouble may not answer for
    /// long. The receiver changes each time they were looked at.
    pub(crate) fn watch(library: Option<PathBuf>) -> (Self, watch::Receiver<bool>) {
        let devices = Self::default();
        let (looked, changes) = watch::channel(false);
        let own = devices.clone();
        let body = move || {
            own.asks(Some(Instant::now()));
            let (nvml, raw) = match init(library.as_deref()) {
                Ok(found) => found,
                Err(error) => {
                    own.asks(None);
                    tracing::info!(%error, "no NVML: devices are known once a tenant uses them");
                    let _ = looked.send(true);
                    return;
                }
            };
            let mut seen = BTreeMap::new();
            while !looked.is_closed() {
                own.asks(Some(Instant::now()));
                own.look(&nvml, raw.as_ref(), &mut seen);
                own.asks(None);
                let _ = looked.send(true);
                thread::park_timeout(EVERY);
            }
        };
        match thread::Builder::new().name("nvml".into()).spawn(body) {
            Ok(thread) => drop(devices.thread.set(thread.thread().clone())),
            Err(error) => tracing::warn!(%error, "cannot watch the devices"),
        }
        (devices, changes)
    }

    /// `seen` has up to when the use of each GPU was seen.
    fn look(&self, nvml: &Nvml, raw: Option<&NvmlLib>, seen: &mut BTreeMap<u32, Seen>) {
        let driver = nvml.sys_driver_version().unwrap_or_default();
        let old = self.seen();
        // A driver that does not answer at all has not lost its devices.
        let Some(count) = nvml.device_count().ok().filter(|count| *count > 0) else {
            return;
        };
        let new: Vec<Known> = (0..count)
            .flat_map(
                |gpu| match describe(nvml, raw, gpu, seen.entry(gpu).or_default()) {
                    Ok(found) => found
                        .into_iter()
                        .map(|known| Known {
                            driver: driver.clone(),
                            ..known
                        })
                        .collect::<Vec<_>>(),
                    Err(error) => {
                        let of_gpu = old.iter().filter(|known| known.gpu == gpu).cloned();
                        of_gpu.map(|known| failed(known, &error)).collect()
                    }
                },
            )
            .collect();
        if new != old {
            *self.known.write().unwrap_or_else(PoisonError::into_inner) = new;
        }
    }
}

/// A device that NVML no longer answers for. It is looked at every second: what was logged before is not logged again.
fn failed(known: Known, error: &NvmlError) -> Known {
    let state = error.to_string();
    if known.state != state {
        tracing::error!(device = known.uuid, %error, "a device is in trouble");
    }
    Known {
        state,
        readings: Readings::default(),
        // What was measured before says nothing of now.
        used_by: None,
        ..known
    }
}

/// NVML, and its functions that the wrapper does not have.
pub(crate) fn init(library: Option<&Path>) -> Result<(Nvml, Option<NvmlLib>), NvmlError> {
    // Its plain name comes with the development files only.
    let path = library.unwrap_or(Path::new("libnvidia-ml.so.1"));
    match Nvml::builder().lib_path(path.as_os_str()).init() {
        // SAFETY: the library is NVML, which was just loaded, so this only counts another user of it.
        Ok(nvml) => Ok((nvml, unsafe { NvmlLib::new(path) }.ok())),
        Err(_) if library.is_none() => Ok((Nvml::init()?, None)),
        Err(error) => Err(error),
    }
}

/// The GPU, or where it is partitioned, its MIG instances: those are what programs use.
fn describe(
    nvml: &Nvml,
    raw: Option<&NvmlLib>,
    gpu: u32,
    seen: &mut Seen,
) -> Result<Vec<Known>, NvmlError> {
    let device = nvml.device_by_index(gpu)?;
    let partitioned = device.mig_mode().is_ok_and(|mode| mode.current == 1);
    let hardware = hardware(&device);
    let whole = readings(&device);
    let of = |device: Device<'_>, mig: Option<Mig>| {
        let memory = device.memory_info()?;
        let measured = match mig {
            None => whole,
            // The rest is of the whole GPU, and would be counted once for each of its instances.
            Some(_) => Readings {
                temperature_c: whole.temperature_c,
                ..Readings::default()
            },
        };
        Ok(Known {
            readings: measured,
            uuid: device.uuid()?,
            name: device.name()?,
            gpu,
            sms: sms(&device),
            link: link(&device),
            // What programs can have: the driver's own total is without what NVML reports as reserved.
            memory_bytes: memory.total.saturating_sub(memory.reserved),
            memory_used: memory.used,
            driver: String::new(),
            hardware: Hardware {
                mig,
                ..hardware.clone()
            },
            state: "ok".into(),
            other: None,
            used_by: None,
            processes: processes(&device),
        })
    };
    match raw.filter(|_| partitioned) {
        Some(raw) => {
            let instances = instances(nvml, raw, &device).into_iter();
            let numbered = instances.map(|instance| {
                let mig = numbers(raw, &instance);
                of(instance, mig)
            });
            numbered.collect()
        }
        None => {
            let used_by = used_by(&device, seen);
            let known = of(device, None)?;
            Ok(vec![Known { used_by, ..known }])
        }
    }
}

/// Where a GPU is in the machine.
pub(crate) fn hardware(gpu: &Device<'_>) -> Hardware {
    Hardware {
        compute_capability: (gpu.cuda_compute_capability().ok())
            .and_then(|it| Some((it.major.try_into().ok()?, it.minor.try_into().ok()?))),
        minor: gpu.minor_number().ok(),
        pci_bus_id: gpu.pci_info().ok().and_then(|it| bus_id(&it.bus_id)),
        mig: None,
    }
}

/// The SMs of a GPU: NVML counts cores, of which an SM has 64 or 128 (CUDA C++ programming guide, "Compute Capabilities").
fn sms(gpu: &Device<'_>) -> Option<u32> {
    let it = gpu.cuda_compute_capability().ok()?;
    let each = match (it.major, it.minor) {
        (7, _) | (8, 0) => 64,
        _ => 128,
    };
    Some(gpu.num_cores().ok()? / each).filter(|sms| *sms > 0)
}

/// What a PCIe link of its generation and width carries (PCI Express Base Specification: transfers a second of a lane, less its encoding).
fn link(gpu: &Device<'_>) -> Option<u64> {
    const LANE: [u64; 6] = [
        250_000_000,
        500_000_000,
        984_600_000,
        1_969_200_000,
        3_938_500_000,
        7_563_000_000,
    ];
    let generation = gpu.max_pcie_link_gen().ok()? as usize;
    let lane = LANE.get(generation.checked_sub(1)?).or(LANE.last())?;
    Some(lane * u64::from(gpu.max_pcie_link_width().ok()?))
}

/// What is measured of a whole GPU, but for its memory.
fn readings(device: &Device<'_>) -> Readings {
    let watts = |milliwatts: u32| f64::from(milliwatts) / 1000.0;
    Readings {
        utilization: (device.utilization_rates().ok()).map(|it| f64::from(it.gpu) / 100.0),
        temperature_c: device.temperature(TemperatureSensor::Gpu).ok(),
        power_w: device.power_usage().ok().map(watts),
        power_limit_w: device.enforced_power_limit().ok().map(watts),
        memory_used: None,
    }
}

/// A bus id as sysfs writes it (`0000:3b:00.0`) from NVML's (`00000000:3B:00.0`).
fn bus_id(nvml: &str) -> Option<String> {
    let (domain, rest) = nvml.split_once(':')?;
    let domain = u32::from_str_radix(domain, 16).ok()?;
    Some(format!("{domain:04x}:{}", rest.to_ascii_lowercase()))
}

/// The numbers of a MIG instance in its GPU.
pub(crate) fn numbers(raw: &NvmlLib, instance: &Device<'_>) -> Option<Mig> {
    let (of_gpu, of_instance) = (
        raw.nvmlDeviceGetGpuInstanceId.as_ref().ok()?,
        raw.nvmlDeviceGetComputeInstanceId.as_ref().ok()?,
    );
    // SAFETY: the handle is used while NVML is there, as below.
    let handle = unsafe { instance.handle() };
    let (mut gpu_instance, mut compute_instance) = (0, 0);
    // SAFETY: a handle of this NVML, and places to write.
    let found = unsafe {
        of_gpu(handle, &mut gpu_instance) == 0 && of_instance(handle, &mut compute_instance) == 0
    };
    found.then_some(Mig {
        gpu_instance,
        compute_instance,
    })
}

/// What processes used of a GPU since that was seen last.
fn used_by(device: &Device<'_>, seen: &mut Seen) -> Option<Used> {
    let samples = match device.process_utilization_stats(seen.sample) {
        Ok(samples) => samples,
        Err(NvmlError::NotFound) => Vec::new(),
        Err(_) => return None,
    };
    seen.clock.look(Instant::now(), since_1970());
    let mut sums: BTreeMap<u32, (f64, f64)> = BTreeMap::new();
    let mut last: BTreeMap<u32, (u64, f64)> = BTreeMap::new();
    for sample in samples.iter().filter(|it| it.sm_util <= 100) {
        seen.sample = sample.timestamp.max(seen.sample);
        let part = f64::from(sample.sm_util) / 100.0;
        let (sum, count) = sums.entry(sample.pid).or_default();
        (*sum, *count) = (*sum + part, *count + 1.0);
        let last = last.entry(sample.pid).or_default();
        if sample.timestamp > last.0 {
            *last = (sample.timestamp, part);
        }
    }
    let parts = sums.into_iter().map(|(pid, (sum, n))| (pid, sum / n));
    let moment = |(pid, (end, part))| Some((pid, (seen.clock.moment(end)?, part)));
    Some(Used {
        parts: parts.collect(),
        samples: last.into_iter().filter_map(moment).collect(),
    })
}

/// The MIG instances of a GPU that are devices.
pub(crate) fn instances<'nvml>(
    nvml: &'nvml Nvml,
    raw: &NvmlLib,
    gpu: &Device<'_>,
) -> Vec<Device<'nvml>> {
    let (Ok(max), Ok(by_index)) = (
        raw.nvmlDeviceGetMaxMigDeviceCount.as_ref(),
        raw.nvmlDeviceGetMigDeviceHandleByIndex.as_ref(),
    ) else {
        return Vec::new();
    };
    // SAFETY: the handle is used while NVML is there, as below.
    let gpu = unsafe { gpu.handle() };
    let mut count = 0;
    // SAFETY: a handle of this NVML, and a place to write.
    if unsafe { max(gpu, &mut count) } != 0 {
        return Vec::new();
    }
    // An index without an instance is an error; later ones may have one.
    (0..count)
        .filter_map(|index| {
            let mut handle = std::ptr::null_mut();
            // SAFETY: as above.
            let found = unsafe { by_index(gpu, index, &mut handle) } == 0;
            // SAFETY: a handle that this NVML gave for the instance.
            found.then(|| unsafe { Device::new(handle, nvml) })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_are_found_unless_the_systems_time_was_set() {
        let (begin, second) = (Instant::now(), Duration::from_secs(1));
        let mut clock = Clock::default();
        let mut moment = |at: u32, time: u32, timestamp: u32| {
            clock.look(begin + second * at, second * time);
            let found = clock.moment(u64::from(timestamp) * 1_000_000);
            found.map(|it| (it - begin).as_secs())
        };
        assert_eq!(moment(1, 101, 101), None, "it was not looked at before");
        for at in 2..11 {
            assert_eq!(moment(at, 100 + at, 100 + at), None);
        }
        assert_eq!(moment(11, 111, 110), Some(10));
        assert_eq!(moment(12, 112, 102), None, "too old");
        assert_eq!(moment(12, 112, 113), None, "later than now");
        // It was set, forwards and backwards.
        for time in [160, 50] {
            for at in 0..10 {
                assert_eq!(moment(20 + at, time + at, time + at), None);
            }
            assert_eq!(moment(30, time + 10, time + 9), Some(29));
        }
    }

    #[test]
    fn nvml_bus_ids_are_written_as_sysfs_does() {
        assert_eq!(bus_id("00000000:3B:00.0").as_deref(), Some("0000:3b:00.0"));
        assert_eq!(bus_id("00010000:01:00.0").as_deref(), Some("10000:01:00.0"));
        assert_eq!(bus_id("nonsense"), None);
    }
}
