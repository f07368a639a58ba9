//! What the API says and hears. The CLI uses the same types.

mod history;
mod life;
mod state;

use std::{collections::BTreeMap, fmt};

use gpumux_core::{
    Class, Demand,
    quantity::{Percent, Size},
    runlist::Mechanism,
    space::{self, Bandwidth, Prediction, Sharing, Way},
};
use gpumux_wire::page::{HintCounts, RequestTimes};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

pub use gpumux_core::{SpecChange, TenantSpec};
pub use history::{DeviceHistory, History, Me, Readings, TenantHistory};
pub use life::{
    Ended, Event, EventKind, Exit, LostOutput, NewSignal, Reported, Setting, Signalled,
};
pub use state::TenantState;

/// The daemon.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Status {
    /// Version of the daemon.
    pub version: String,
    /// Version of the protocol that it speaks with the shims.
    pub protocol: u32,
    /// Its process.
    pub pid: u32,
    /// Seconds since it started.
    pub uptime_s: u64,
    /// Where its sockets are.
    pub runtime_dir: String,
    /// The socket for tenants' processes.
    pub session_socket: String,
    /// TCP address where all this can be watched with a browser, if there is one.
    #[serde(default)]
    pub listen: Option<String>,
    /// The policy of devices that have none of their own.
    pub policy: String,
    /// How many tenants there are.
    pub tenants: usize,
    /// How many processes are connected.
    pub sessions: usize,
    /// The devices.
    pub devices: Vec<Device>,
    /// The scheduling thread.
    pub scheduler: Scheduler,
    /// The last faults in groups, the latest last.
    #[serde(default)]
    pub faults: Vec<Fault>,
    /// What moved memory takes on the host.
    #[serde(default)]
    pub host_memory: HostMemory,
}

/// What moved memory takes on the host, for all tenants together.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HostMemory {
    /// Bytes that processes keep, in use or for the next time.
    pub used: u64,
    /// Most that they may keep; none: what the host has.
    pub limit: Option<u64>,
    /// The folder where it is; none: the processes' own memory.
    pub location: Option<String>,
    /// It is overwritten after use.
    pub scrub: bool,
}

/// What the scheduling thread does.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Scheduler {
    /// How often it looked.
    pub steps: u64,
    /// How often a device was planned.
    pub plans: u64,
    /// Seconds spent other than in controls.
    pub busy_s: f64,
    /// The longest plan of all devices in µs.
    pub plan_max_us: u64,
    /// Time of all steps, controls included, in µs.
    #[serde(default)]
    pub steps_total_us: u64,
    /// How many steps took up to 20, 50, 100, 200, 500 µs, 1, 2, 5, 20, 100 ms, and longer.
    #[serde(default)]
    pub steps_histogram: Vec<u64>,
    /// How often a process freed itself, because the scheduling thread had not renewed its lease for half a second.
    #[serde(default)]
    pub lease_expiries: u64,
}

impl fmt::Display for ForeignProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = if self.name.is_empty() {
            "a process"
        } else {
            &self.name
        };
        write!(f, "{name} (pid {}", self.pid)?;
        if let Some(tenant) = &self.tenant {
            write!(f, " of tenant {tenant}, which may not use the device")?;
        }
        if let Some(tenant) = &self.started_by {
            write!(
                f,
                ", started by tenant {tenant} and not connected to the daemon"
            )?;
        }
        if let Some(bytes) = self.memory_bytes {
            write!(f, ", {}", Size(bytes))?;
        }
        match self.used_share {
            Some(share) => write!(f, ", {} of the time)", Percent(share)),
            None => f.write_str(", use unknown)"),
        }
    }
}

/// A device that is shared.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Device {
    /// As the driver writes it.
    pub uuid: String,
    /// NVML's index of the GPU that it is, or is a part of; `null` where NVML is missing.
    #[serde(default)]
    pub index: Option<u32>,
    /// Product name; empty where NVML is missing.
    pub name: String,
    /// Whether it is the emulated device.
    pub emulated: bool,
    /// Version of the driver; empty where NVML is missing.
    pub driver: String,
    /// Bytes of memory; 0 where NVML is missing.
    pub memory_bytes: u64,
    /// Bytes that tenants can be guaranteed together, each tenant's context of `context_bytes` included; 0 where NVML is missing.
    #[serde(default)]
    pub memory_guaranteeable: u64,
    /// Bytes that one process's context is counted with.
    #[serde(default)]
    pub context_bytes: u64,
    /// Where it is in the machine.
    #[serde(default)]
    pub hardware: Hardware,
    /// What NVML measures of it now.
    #[serde(default)]
    pub readings: Readings,
    /// The policy that plans it.
    pub policy: String,
    /// `ok`, or what is wrong with it.
    pub state: String,
    /// How many domains run on it.
    pub domains: usize,
    /// The processes on it that gpumux does not control.
    #[serde(default)]
    pub foreign: Vec<ForeignProcess>,
    /// What its controls cost.
    pub controls: Vec<ControlCost>,
}

/// A process on a device that gpumux does not control: a program without its library, or a tenant's process on a device that
/// the tenant may not use.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ForeignProcess {
    /// Its pid.
    pub pid: u32,
    /// Its name, as the kernel has it; empty where that is not to be seen.
    pub name: String,
    /// Whose it is.
    pub uid: Option<u32>,
    /// Bytes of the device's memory that it has, if the driver tells.
    pub memory_bytes: Option<u64>,
    /// Part of the last seconds in which its kernels ran, 0 to 1; `null` where the driver does not report it.
    pub used_share: Option<f64>,
    /// The tenant that it is of, if it is of one that may not use the device.
    pub tenant: Option<String>,
    /// The tenant whose program started it, and of which it is not connected: it lacks gpumux's library, or is stopped.
    #[serde(default)]
    pub started_by: Option<String>,
}

/// What NVML reports of a device's place in the machine: what a container needs to use it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Hardware {
    /// Major and minor compute capability.
    pub compute_capability: Option<(u32, u32)>,
    /// The number in `/dev/nvidiaN` of the GPU.
    pub minor: Option<u32>,
    /// Domain, bus, device and function as sysfs writes them: `0000:3b:00.0`.
    pub pci_bus_id: Option<String>,
    /// Which part of the GPU it is, if it is a MIG instance.
    pub mig: Option<Mig>,
}

/// A MIG instance, as the driver numbers it within its GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Mig {
    /// The GPU instance: memory and processors.
    pub gpu_instance: u32,
    /// The compute instance in it.
    pub compute_instance: u32,
}

/// A GPU in MIG mode: which instances it has, and which it can have.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MigGpu {
    /// As the driver writes it.
    pub uuid: String,
    /// NVML's index of it.
    pub index: u32,
    /// Product name.
    pub name: String,
    /// Version of the driver.
    pub driver: String,
    /// Whether it is the emulated device.
    pub emulated: bool,
    /// Where it is in the machine.
    pub hardware: Hardware,
    /// All profiles of GPU instances.
    pub profiles: Vec<MigProfile>,
    /// All GPU instances that it has.
    pub instances: Vec<MigInstance>,
}

/// A profile of GPU instances, as `nvidia-smi mig -lgip` and `-lgipp` list it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MigProfile {
    /// Such as `1g.10gb`.
    pub name: String,
    /// The driver's number of it.
    pub id: u32,
    /// Slices of processors that an instance has.
    pub slices: u32,
    /// Memory slices that an instance has, one after the other.
    pub memory_slices: u32,
    /// Bytes of memory that an instance has.
    pub memory_bytes: u64,
    /// Most instances of the profile on a GPU.
    pub most: u32,
    /// The memory slices at which an instance can begin.
    pub starts: Vec<u32>,
}

/// A GPU instance that exists.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MigInstance {
    /// The driver's number of it.
    pub gpu_instance: u32,
    /// Its profile; empty if the driver names none.
    pub profile: String,
    /// Its first memory slice.
    pub start: u32,
    /// How many memory slices it has.
    pub memory_slices: u32,
    /// How many slices of processors it has.
    pub slices: u32,
    /// Its compute instances: what programs use.
    pub compute_instances: Vec<MigCompute>,
}

/// A compute instance in a GPU instance.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MigCompute {
    /// The driver's number of it.
    pub compute_instance: u32,
    /// Its UUID as a device; empty while NVML lists it as none.
    pub device: String,
}

/// A GPU instance to be made, with one compute instance that has all of it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewMigInstance {
    /// UUID of a GPU in MIG mode.
    pub gpu: String,
    /// The profile's name.
    pub profile: String,
    /// The first memory slice.
    pub start: u32,
}

/// What one kind of control cost on one device so far.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ControlCost {
    /// `freeze`, `thaw`, `set_timeslice` or `read_timeslice`.
    pub control: String,
    /// How often it moved.
    pub pulls: u64,
    /// How often it did not.
    pub failures: u64,
    /// Least time in µs.
    pub min_us: u64,
    /// Mean time in µs.
    pub mean_us: u64,
    /// Most time in µs.
    pub max_us: u64,
    /// Time of all that moved, in µs.
    #[serde(default)]
    pub total_us: u64,
    /// How many took up to 20, 50, 100, 200, 500 µs, 1, 2, 5, 20, 100 ms, and longer.
    #[serde(default)]
    pub histogram: Vec<u64>,
}

/// A tenant to be made. It lives while the process that asked for it or any of its sessions does.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct NewTenant {
    /// Its name; refused while another tenant has it.
    pub name: Option<String>,
    /// Without a name: the program that it is named after, with a number if that is taken.
    pub program: Option<String>,
    /// Its spec, as far as it differs from what was [set](SpecChange) for this name before, and from the
    /// defaults.
    pub spec: SpecChange,
    /// It lives until it is deleted, and any process with its secret belongs to it, whatever its user: for
    /// containers, whose processes come and go. Only root and the daemon's own user may ask
    /// for it.
    pub kept: bool,
    /// Its trust domain: tenants of the same user and trust domain may share a device in space, where a fault of one
    /// ends all of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trust: Option<String>,
    /// Whether it shares in time or in space.
    #[serde(default)]
    #[schema(value_type = String, pattern = "^(auto|time|space)$")]
    pub sharing: Sharing,
    /// Its program's scaling profile: `[percent of the SMs, throughput]`, in any unit. An MPS group's SMs are divided for the
    /// largest sum of throughputs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub utility: Vec<(u32, f64)>,
    /// The name under which its program's scaling profile is kept and looked up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fingerprint: Option<String>,
    /// In a group: confined to so many percent of the SMs, whatever others would leave it. For measurements.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 100)]
    pub sm_percent: Option<u32>,
    /// Processes of it that share each device as ranks of one job; 0 and 1: it has no such. Only in a group.
    #[serde(default, skip_serializing_if = "is_zero")]
    #[schema(maximum = 8)]
    pub ranks_per_gpu: u32,
    /// Thread blocks of a collective at most, where its user has set that (`NCCL_MAX_CTAS`, `NCCL_MAX_NCHANNELS`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_ctas: Option<u32>,
    /// Its `NCCL_MAX_CTAS` is set to what its placement has, where its user has set none.
    #[serde(default, skip_serializing_if = "is_false")]
    pub limits_collectives: bool,
    /// Its command line, for people; cut to 1000 bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
    /// The folder of the file `NAME.log` that its output goes to, if it runs detached.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub log: Option<String>,
    /// Its secret, 32 hexadecimal digits that the caller has chosen: for a kept tenant whose processes know it already. And a process that
    /// makes the same request again, because the answer was lost, has one tenant: what its first request made ends.
    pub token: Option<String>,
    /// The devices that its processes may use and that its guarantees hold on: UUIDs, how a UUID begins, numbers as `nvidia-smi`
    /// has them, or `all`. Empty: those of `visible`. Its channel groups and requests for memory on any other device are refused.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<String>,
    /// Where it names no devices: what the program finds in `CUDA_VISIBLE_DEVICES`; none: all devices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub visible: Option<String>,
    /// The secret of the tenant that the asking process is of: it leaves that one, which ends if it was its last process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub leaves: Option<String>,
}

/// A tenant that was made.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Created {
    /// Its name.
    pub name: String,
    /// The secret that makes a process belong to it (`GPUMUX_TENANT`).
    pub token: String,
    /// The socket for its processes (`GPUMUX_SOCKET`).
    pub socket: String,
    /// What else its processes need in their environment: to share in space, and to know their limit.
    #[serde(default)]
    pub environment: BTreeMap<String, String>,
    /// How it shares devices, and why.
    #[serde(default)]
    pub placement: Placement,
    /// Its spec.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spec: Option<TenantSpec>,
    /// What it has because it was [set](SpecChange) for its name before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remembered: Option<SpecChange>,
}

fn is_zero(number: &u32) -> bool {
    *number == 0
}

fn is_false(flag: &bool) -> bool {
    !flag
}

/// How a tenant shares devices, decided at its start.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Placement {
    /// In time, in a context of its own, or in space with the members of its group.
    #[schema(value_type = String, pattern = "^(time|space)$")]
    pub way: Way,
    /// Why, for people.
    pub reason: String,
    /// Its trust domain.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trust: Option<String>,
    /// Percentage of the SMs that each of its processes is confined to, if it is. Ranks that share a device have equal parts of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sm_percent: Option<u32>,
    /// Ranks that share each device; 0: one process has it.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub ranks_per_gpu: u32,
    /// Thread blocks that a collective of each of its processes may have (`NCCL_MAX_CTAS`), where the SMs of its devices are known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_ctas: Option<u32>,
    /// Where the curve is from by which SMs were divided for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub curve: Option<CurveFrom>,
    /// The name under which its program's scaling profile is kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fingerprint: Option<String>,
    /// What its group was expected to do with it, and beside it in time, if the profiles of all are known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prediction: Option<Prediction>,
}

/// Where a program's scaling profile comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum CurveFrom {
    /// Said when the tenant was made.
    Given,
    /// Measured in earlier runs of the program.
    Measured,
}

/// What is known of a program: [`NewTenant::fingerprint`] names it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Program {
    /// Its name here.
    pub fingerprint: String,
    /// Whose tenants ran it.
    pub uid: u32,
    /// Pieces of work, or units of reported progress, per second at percentages of the SMs, without neighbours: `[percent, rate]`.
    pub curve: Vec<(u32, f64)>,
    /// Whether rates are of progress that the program reports (`gpumux_progress`); else of pieces of work.
    #[serde(default)]
    pub reported: bool,
    /// What it needs of the memory's bandwidth, if that was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<Bandwidth>,
    /// Whether its curve was measured by `gpumux profile`; else it is what was seen of its runs.
    pub profiled: bool,
    /// When something was learnt of it last, in seconds since 1970.
    pub learnt: u64,
}

/// A curve that was measured: replaces what was known.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewCurve {
    /// Pieces of work, or units of reported progress, per second at percentages of the SMs: `[percent, rate]`.
    pub curve: Vec<(u32, f64)>,
    /// Whether rates are of reported progress.
    #[serde(default)]
    pub reported: bool,
    /// What it needs of the memory's bandwidth, if that was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<Bandwidth>,
}

impl Default for Placement {
    fn default() -> Self {
        Self {
            way: Way::Time,
            reason: "names no trust domain".into(),
            trust: None,
            sm_percent: None,
            ranks_per_gpu: 0,
            max_ctas: None,
            curve: None,
            fingerprint: None,
            prediction: None,
        }
    }
}

impl Placement {
    /// Processes of it that share each device.
    pub fn processes(&self) -> u32 {
        self.ranks_per_gpu.max(1)
    }

    /// Percentage of the SMs that each of them is confined to; 100: to none.
    pub fn percent_of_each(&self) -> u32 {
        (self.sm_percent.unwrap_or(100) / self.processes()).max(1)
    }
}

/// That a tenant's processes undo controls: thaw themselves, set their timeslices, or claim an expired lease.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Tampering {
    /// How often that was found.
    pub findings: u64,
    /// Whether the tenant is treated as class batch without a compute guarantee therefore, until root changes its settings.
    pub lowered: bool,
}

/// A tenant.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Tenant {
    /// Unique among its user's living tenants.
    pub name: String,
    /// When it runs beside others.
    #[schema(value_type = String, pattern = "^(latency|standard|batch)$")]
    pub class: Class,
    /// Its spec.
    pub spec: TenantSpec,
    /// Whose it is.
    pub uid: u32,
    /// The user's name. Root names another user's tenant `user/name`.
    #[serde(default)]
    pub user: String,
    /// UUIDs of the devices that it may use; empty: all.
    #[serde(default)]
    pub may_use: Vec<String>,
    /// Its guarantees have lapsed, since it had no work for as long as its user's policy says. They hold again when it has work and
    /// they fit.
    #[serde(default)]
    pub lapsed: bool,
    /// Its processes were found undoing controls within the last ten minutes, or its settings do not hold for that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tampering: Option<Tampering>,
    /// Its connected processes.
    pub pids: Vec<u32>,
    /// Its command; on TCP, where any machine may ask, only the program's name.
    #[serde(default)]
    pub command: String,
    /// The file of its output, if it runs detached.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub log: Option<String>,
    /// What could not be written of its output there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lost_output: Option<LostOutput>,
    /// UUIDs of the devices that it has domains on.
    pub devices: Vec<String>,
    /// Its domains.
    pub domains: Vec<Domain>,
    /// When it began, in seconds since 1970.
    pub since: u64,
    /// What it does.
    pub state: TenantState,
    /// How it shares devices, and why.
    #[serde(default)]
    pub placement: Placement,
    /// Pieces of work (kernels, graphs) that its processes gave to devices.
    #[serde(default)]
    pub work: u64,
    /// What its processes reported as done (`gpumux_progress`), in a unit of their own, such as tokens; 0: they report nothing.
    #[serde(default)]
    pub progress: u64,
    /// Collectives of its processes, by NCCL's profiler.
    #[serde(default)]
    pub collectives: CollectiveFigures,
    /// How its processes took devices before their work arrived.
    pub hints: HintFigures,
    /// The requests that its processes marked.
    pub requests: RequestFigures,
    /// What it has of each device's memory.
    #[serde(default)]
    pub memory: Vec<MemoryShare>,
    /// Whether some or all of its memory is on the host.
    #[serde(default)]
    pub asleep: bool,
    /// Why its memory is on the host; `null` where it is not there, or an earlier daemon moved it.
    #[serde(default)]
    pub swap_reason: Option<SwapReason>,
    /// Whether it waits for room on a device: for memory that it asked for, or to come back.
    #[serde(default)]
    pub waits_for_memory: bool,
    /// Bytes that the host lacks for what others would have to move there for it; `null` where it does not wait, or waits for something else.
    #[serde(default)]
    pub lacks_on_host: Option<u64>,
    /// How its memory was moved.
    #[serde(default)]
    pub moves: MoveFigures,
    /// Why the driver does not let gpumux control its processes: those run unmanaged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uncontrolled: Option<String>,
    /// Driver calls of its processes that the library does not know: their memory stays on the device, and they count as busy.
    #[serde(default)]
    pub unlisted_calls: Vec<String>,
}

impl Device {
    /// What people call the one of these devices: its number, if NVML tells, as `nvidia-smi` and `--gpu` have it, and behind it that of a
    /// MIG instance.
    pub fn number(uuid: &str, devices: &[Self]) -> Option<String> {
        let device = devices.iter().find(|device| device.uuid == uuid)?;
        let gpu = device.index?;
        Some(match device.hardware.mig {
            Some(mig) => format!("{gpu}:{}", mig.gpu_instance),
            None => gpu.to_string(),
        })
    }
}

impl Placement {
    /// User and trust domain of the group of a tenant of this user, as `1000/team`, if it is in one.
    pub fn group(&self, uid: u32) -> Option<String> {
        let trust = self.trust.as_deref();
        let trust = trust.filter(|_| self.way == Way::Space)?;
        Some(format!("{uid}/{trust}"))
    }
}

impl Tenant {
    /// The share of each of its devices that is guaranteed to it now: none while its guarantees have lapsed.
    pub fn guaranteed(&self) -> f64 {
        match self.lapsed {
            true => 0.0,
            false => self.spec.guaranteed,
        }
    }

    /// The share of a device that it received in the last second or two. Of its members in a group, which run together, one has what the
    /// group had.
    pub fn received(&self, device: &str) -> f64 {
        let here = self.domains.iter().filter(|it| it.device == device);
        here.map(|it| it.received_share).sum()
    }

    /// The share of a device that all of these received in the last second or two. An MPS group's members run together: it counts once.
    pub fn received_by(all: &[Self], device: &str) -> f64 {
        let domains = all.iter().flat_map(|it| &it.domains);
        let mut groups: BTreeMap<Option<u64>, f64> = BTreeMap::new();
        for domain in domains.filter(|it| it.device == device) {
            let received = groups.entry(domain.group).or_default();
            *received = match domain.group {
                Some(_) => received.max(domain.received_share),
                None => *received + domain.received_share,
            };
        }
        // Not all are of the same second.
        groups.values().fold(0.0, |sum: f64, it| sum + it).min(1.0)
    }

    /// What it copies between the host and a device: to the device, and to the host.
    pub fn copies(&self, device: &str) -> [Copying; 2] {
        let here = || self.domains.iter().filter(|it| it.device == device);
        let sum = |of: fn(&Domain) -> Copying| here().map(of).reduce(Copying::plus);
        [sum(|it| it.copies.to_device), sum(|it| it.copies.to_host)].map(Option::unwrap_or_default)
    }

    /// User and trust domain of its group, as `1000/team`, if it is in one.
    pub fn group(&self) -> Option<String> {
        self.placement.group(self.uid)
    }

    /// The other members of its group, of all tenants.
    pub fn members<'a>(&self, all: &'a [Self]) -> impl Iterator<Item = &'a Self> {
        let (own, group) = (self.name.clone(), self.group());
        let is_other = move |it: &&Self| it.name != own && group.is_some() && it.group() == group;
        all.iter().filter(is_other)
    }

    /// The members of its group, of all tenants, that keep more SMs until they end than its guarantee leaves them.
    pub fn hindered_by<'a>(&self, all: &'a [Self]) -> Vec<&'a str> {
        let guaranteed = self.spec.guaranteed;
        let hinders = |it: &&Self| space::hinders(it.placement.sm_percent, guaranteed);
        let members = self.members(all).filter(hinders);
        members.map(|it| &*it.name).collect()
    }
}

/// Why a tenant's memory was moved to the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum SwapReason {
    /// A user requested it.
    Requested,
    /// The tenant had no work for as long as its spec says.
    Idle,
    /// Other tenants needed the room.
    Needed,
}

/// Collectives of a tenant, sends and receives included. All 0 where NCCL does not report to gpumux's library; those that captured graphs run
/// are not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CollectiveFigures {
    /// Calls.
    pub calls: u64,
    /// Bytes that its ranks on this machine sent in them.
    pub bytes: u64,
    /// Whether one is not known to be done.
    pub in_progress: bool,
}

/// Moves of a tenant's memory between devices and the host, since the daemon's first message of the tenant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MoveFigures {
    /// How often memory was moved to the host.
    pub outs: u64,
    /// How often it came back.
    pub backs: u64,
    /// Bytes that were moved to the host.
    pub out_bytes: u64,
    /// Bytes that came back.
    pub back_bytes: u64,
    /// How long moving to the host took, in µs.
    pub out_us: u64,
    /// How long coming back took, in µs.
    pub back_us: u64,
}

/// What a tenant has of one device's memory, in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MemoryShare {
    /// UUID of the device.
    pub device: String,
    /// The tenant; `user/name` where several users have one of this name.
    pub tenant: String,
    /// What it always gets when it wants it.
    pub guaranteed: u64,
    /// What it never exceeds, if there is a limit.
    pub limit: Option<u64>,
    /// What it has on the device.
    pub in_use: u64,
    /// Of that, what is above its guarantee.
    pub above_guarantee: u64,
    /// Of that, what cannot be moved.
    pub pinned: u64,
    /// What it has on the host.
    pub swapped: u64,
    /// Of all that it has, also on the host, what is above its limit: it keeps that, and no allocation succeeds before it is freed.
    #[serde(default)]
    pub above_limit: u64,
}

impl MemoryShare {
    /// For people: what stays on the device that they call so when the tenant's memory is moved to the host.
    pub fn stays(&self, device: &str) -> Option<String> {
        (self.pinned > 0).then(|| {
            format!(
                "{} of its memory stays on {device}: managed or stream-ordered memory, arrays, and what other processes have open \
                 cannot be moved",
                Size(self.pinned)
            )
        })
    }

    /// For people: what follows if it has more than its limit on the device that they call so.
    pub fn excess(&self, device: &str) -> Option<String> {
        let limit = self.limit.filter(|_| self.above_limit > 0)?;
        let has = limit.saturating_add(self.above_limit);
        Some(format!(
            "{} has {} of the memory of {device}, {} above its limit of {}: it keeps that, and its allocations fail until it has \
             freed as much",
            self.tenant,
            Size(has),
            Size(self.above_limit),
            Size(limit)
        ))
    }
}

/// One device's memory, in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DeviceMemory {
    /// UUID of the device.
    pub device: String,
    /// What it has.
    pub total: u64,
    /// What contexts, and programs that are no tenants, occupy, with a small reserve.
    pub occupied: u64,
    /// Not granted to any tenant.
    pub free: u64,
    /// The tenants that have the rest.
    pub tenants: Vec<MemoryShare>,
}

/// Reservations of a device ahead of work, since the daemon's first message of the tenant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct HintFigures {
    /// How many there were.
    pub given: u64,
    /// Those that work found in place.
    pub useful: u64,
    /// Those that ended before work came.
    pub wasted: u64,
    /// How long they had the device, in µs.
    pub held_us: u64,
}

impl From<HintCounts> for HintFigures {
    fn from(counts: HintCounts) -> Self {
        Self {
            given: counts.given,
            useful: counts.useful,
            wasted: counts.wasted,
            held_us: counts.held_ns / 1000,
        }
    }
}

/// Requests that a program marks with `gpumux_begin` and `gpumux_end`, since the daemon's first message of the tenant.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RequestFigures {
    /// How many ended.
    pub count: u64,
    /// Median time in µs, within 5%.
    pub p50_us: f64,
    /// 99% took no longer, in µs, within 5%.
    pub p99_us: f64,
    /// How long all of them took, in µs, within 5%.
    #[serde(default)]
    pub total_us: f64,
    /// `[n, count]` of every step of time that has requests: step n ends at 2^((n + 1) / 8) µs.
    #[serde(default)]
    pub histogram: Vec<[u64; 2]>,
}

impl From<&RequestTimes> for RequestFigures {
    fn from(times: &RequestTimes) -> Self {
        match times.count() {
            0 => Self::default(),
            count => Self {
                count,
                p50_us: times.quantile_us(0.5),
                p99_us: times.quantile_us(0.99),
                total_us: times.total_us(),
                histogram: (times.steps())
                    .map(|(step, count)| [step as u64, count])
                    .collect(),
            },
        }
    }
}

/// The GPU where a tenant shall be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewPlace {
    /// A number as `nvidia-smi` has it, a UUID, or how a UUID begins.
    pub gpu: String,
}

/// A tenant that was moved to another GPU, and how long each part took.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Relocated {
    /// UUID of the GPU where it was.
    pub from: String,
    /// UUID of the GPU where it is.
    pub to: String,
    /// Until its work had ended and its memory was on the host, in seconds.
    pub out_s: f64,
    /// The driver's calls, in seconds.
    pub driver_s: f64,
    /// Until its memory was on the other GPU, in seconds.
    pub back_s: f64,
}

/// Says that a tenant's work is coming.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct NewHint {
    /// In how many µs, if that is known; at most a second.
    #[schema(maximum = 1_000_000)]
    pub expected_us: Option<u32>,
}

impl NewHint {
    /// The farthest work of which the tenant's library takes note, in µs.
    pub const FARTHEST_US: u32 = gpumux_wire::message::FARTHEST_HINT_US;
}

/// A hint that was passed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Hinted {
    /// How many processes were notified.
    pub processes: usize,
}

/// A fault that ended all processes in a group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Fault {
    /// How many there were so far in the daemon's life, this one too.
    #[serde(default)]
    pub number: u64,
    /// Seconds since 1970.
    pub at: u64,
    /// User and trust domain of the group, as `1000/team`.
    pub group: String,
    /// The driver's error.
    pub error: u32,
    /// The tenant that caused it, if that is known.
    pub faulting_client: Option<String>,
    /// What says so.
    pub evidence: String,
    /// The other tenants whose processes it ended.
    pub others: Vec<String>,
    /// How long after a program got the error the daemon noticed it, in ms; none if no program got one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub noticed_after_ms: Option<u64>,
    /// How long it took until the group was there again, in ms; none while it is not.
    pub restarted_ms: Option<u64>,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let client = self.faulting_client.as_deref();
        let client = client.unwrap_or("an unknown member");
        let others = match self.others.is_empty() {
            true => "no other member".into(),
            false => self.others.join(", "),
        };
        let (group, error) = (&self.group, self.error);
        write!(
            f,
            "group {group}: a fault (error {error}) of {client} ended {others}"
        )
    }
}

/// A tenant's domain on a device.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Domain {
    /// Unique in the daemon's life.
    pub id: u64,
    /// The group whose SMs it shares with other domains; they run and wait together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<u64>,
    /// UUID of its device.
    pub device: String,
    /// Its process.
    pub pid: u32,
    /// How long it may run before the hardware switches to the next, in µs.
    pub timeslice_us: u64,
    /// Whether it is taken off the device.
    pub frozen: bool,
    /// How it is scheduled: by the driver's `controls`, or at its `launches` where they are refused.
    #[serde(default)]
    #[schema(value_type = String, pattern = "^(controls|launches)$")]
    pub mechanism: Mechanism,
    /// Why its controls are not used, if so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<String>,
    /// How often a thread waited to launch, since the process began.
    #[serde(default)]
    pub held_launches: u64,
    /// Whether it has work.
    #[schema(value_type = String, pattern = "^(unknown|idle|busy)$")]
    pub demand: Demand,
    /// Whether its process was stopped (SIGSTOP, a debugger) while it had work: that counts until the device has ended it.
    #[serde(default)]
    pub stopped: bool,
    /// Share of the device that its tenant gets if all tenants there want it.
    pub entitled_share: f64,
    /// Longest that its tenant waits with work, in µs of the time that the device works for tenants; 0: the policy has no bound.
    #[serde(default)]
    pub wait_bound_us: u64,
    /// Share that it received in the last second or two. Members of a group run together: of those of one tenant the first has it, the
    /// others 0; so too in what follows.
    pub received_share: f64,
    /// Part of the last second or two in which it had work and did not run.
    #[serde(default)]
    pub waited_share: f64,
    /// Part of the last second in which its process's kernels ran, as NVML measured it; none where the driver does not tell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured_share: Option<f64>,
    /// Device time received, in µs.
    pub received_us: u64,
    /// Time in which it had work, in µs. Time of unknown demand is not in it.
    pub runnable_us: u64,
    /// Of that, time in which it did not run, in µs; a wait for memory does not count.
    pub waited_us: u64,
    /// How often it was frozen while it had work; switches between timeslices do not count.
    pub preemptions: u64,
    /// How often it was frozen.
    pub freezes: u64,
    /// How often it was thawed.
    pub thaws: u64,
    /// How often its slice was set.
    pub slice_changes: u64,
    /// How often its process was found to have changed its slice, or to have run while it was frozen; both were set again.
    pub tampered: u64,
    /// Its copies between the host and the device.
    #[serde(default)]
    pub copies: Copies,
    /// Why it has what it has.
    pub reason: String,
    /// Why it is not managed now: a control that does not move.
    pub error: Option<String>,
}

/// Copies between the host and a device, as the process's library counted them when it submitted them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Copies {
    /// From the host to the device.
    pub to_device: Copying,
    /// From the device to the host.
    pub to_host: Copying,
}

/// Copies in one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Copying {
    /// Bytes so far.
    pub bytes: u64,
    /// Bytes a second, lately.
    pub rate: u64,
    /// Bytes a second to which the process is limited, since others have less than their shares; none: it is not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<u64>,
}

impl Copying {
    /// Both together. The sum is limited if both are.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self {
            bytes: self.bytes.saturating_add(other.bytes),
            rate: self.rate.saturating_add(other.rate),
            limit: self
                .limit
                .zip(other.limit)
                .map(|(a, b)| a.saturating_add(b)),
        }
    }
}

/// Why a tenant receives what it receives.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Explanation {
    /// Its name.
    pub name: String,
    /// The whole in five lines, for people.
    pub text: String,
    /// What it is entitled to: its settings, and what follows from them beside the others of the moment.
    #[serde(default)]
    pub entitlement: String,
    /// What it received.
    #[serde(default)]
    pub received: String,
    /// Why it runs or waits now.
    #[serde(default)]
    pub why: String,
    /// What its user can do.
    #[serde(default)]
    pub advice: String,
    /// The tenants on the same devices, those that received most first.
    #[serde(default)]
    pub neighbours: Vec<Neighbour>,
}

/// A tenant on a device of another one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Neighbour {
    /// Its name.
    pub name: String,
    /// Whose it is.
    #[serde(default)]
    pub user: String,
    /// Its class.
    #[schema(value_type = String, pattern = "^(latency|standard|batch)$")]
    pub class: Class,
    /// What it does.
    pub state: TenantState,
    /// Share of each device's compute that is guaranteed to it.
    pub guaranteed: f64,
    /// The devices that both use, by index.
    pub gpus: Vec<String>,
    /// User and trust domain of its group, as `1000/team`, if it is in one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// The most that it received of one of them in the last second: in a group, what all members received together.
    pub received: f64,
}

/// All that there is at one moment: what `/v1/live` sends twice a second.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Live {
    /// The daemon and the devices.
    pub status: Status,
    /// All tenants, the oldest first.
    pub tenants: Vec<Tenant>,
    /// All devices' memory.
    pub memory: Vec<DeviceMemory>,
}

/// Why a request was refused; the body of every answer that is not a success.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Problem {
    /// For people.
    pub error: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn change_to_null_is_only_for_what_may_be_none() {
        let read = |text: &str| serde_json::from_str::<SpecChange>(text);
        let none = read(r#"{"memory_limit": null, "sleep_after_s": null}"#).expect("may be none");
        assert_eq!(
            (none.memory_limit, none.sleep_after_s),
            (Some(None), Some(None))
        );
        for (text, problem) in [
            (r#"{"guaranteed": null}"#, "expected f64"),
            (r#"{"class": null}"#, "expected"),
            (r#"{"wait": 1}"#, "unknown field `wait`"),
        ] {
            let error = read(text).expect_err(text).to_string();
            assert!(error.contains(problem), "{error}");
        }
    }
}
