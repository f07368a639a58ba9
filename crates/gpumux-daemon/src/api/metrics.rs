//! `/metrics` in OpenMetrics text, made at each scrape from what the scheduler knows.

use std::{borrow::Borrow, collections::BTreeMap, fmt, iter};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet, text},
    metrics::MetricType,
    registry::{Registry, Unit},
};

use gpumux_wire::page::STEPS;

use super::types::{
    ControlCost, Device, DeviceMemory, MemoryShare, RequestFigures, Status, Tenant, TenantState,
};
use crate::{
    scheduler::{BUCKETS_US, Totals},
    tenants::GroupCounts,
};

/// How the answer is to be read.
pub(crate) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// All that is shown.
#[derive(Debug)]
pub(crate) struct Scrape {
    pub(crate) status: Status,
    pub(crate) tenants: Vec<Tenant>,
    /// Tenant, device, and what it had there.
    pub(crate) totals: Vec<(String, String, Totals)>,
    pub(crate) memory: Vec<DeviceMemory>,
    /// What became of groups, by name.
    pub(crate) groups: BTreeMap<String, GroupCounts>,
    /// When the daemon started, in seconds since 1970.
    pub(crate) started: f64,
}

impl Scrape {
    /// As text.
    pub(crate) fn text(self) -> String {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(self));
        let mut text = String::new();
        // Writing into a string cannot fail.
        let _ = text::encode(&mut text, &registry);
        text
    }
}

/// One metric of a `T`.
struct Metric<T> {
    kind: MetricType,
    /// Without its unit.
    name: &'static str,
    /// A base unit, or nothing.
    unit: &'static str,
    help: &'static str,
    value: fn(&T) -> f64,
}

/// Metrics of a type, a line each.
macro_rules! metrics {
    ($($table:ident: $of:ty { $($kind:ident $name:literal $unit:literal $help:literal $value:expr;)* })*) => {$(
        const $table: &[Metric<$of>] = &[$(Metric {
            kind: MetricType::$kind,
            name: $name,
            unit: $unit,
            help: $help,
            value: $value,
        }),*];
    )*};
}

metrics! {
    BUILD: Status {
        Gauge "gpumux_build_info" "" "The daemon's version and policy; always 1." |_| 1.0;
    }
    DAEMON: Scrape {
        Gauge "gpumux_start_time" "seconds" "When the daemon started, since 1970." |s| s.started;
    }
    STATUS: Status {
        Gauge "gpumux_tenants" "" "Tenants." |s| s.tenants as f64;
        Gauge "gpumux_sessions" "" "Connected processes of tenants." |s| s.sessions as f64;
        Gauge "gpumux_host_memory" "bytes" "Memory of the host that processes keep for what is moved there." |s| s.host_memory.used as f64;
        Gauge "gpumux_host_memory_limit" "bytes" "Limit of memory of the host for moved memory; 0: what the host has."
            |s| s.host_memory.limit.unwrap_or(0) as f64;
        Gauge "gpumux_scheduler_plan_max" "seconds" "The longest plan so far." |s| s.scheduler.plan_max_us as f64 / 1e6;
        Counter "gpumux_scheduler_steps" "" "Iterations of the scheduling thread." |s| s.scheduler.steps as f64;
        Counter "gpumux_scheduler_plans" "" "Plans of a device." |s| s.scheduler.plans as f64;
        Counter "gpumux_scheduler_busy" "seconds" "Time of the scheduling thread outside of controls." |s| s.scheduler.busy_s;
        Counter "gpumux_lease_expiries" "" "Expired leases: a process freed itself, because the scheduling thread stood still."
            |s| s.scheduler.lease_expiries as f64;
    }
    DEVICE_INFO: Device {
        Gauge "gpumux_device_info" "" "A device, its name, driver and policy; always 1." |_| 1.0;
    }
    DEVICE: Device {
        Gauge "gpumux_device_healthy" "" "Whether the device is well." |d| f64::from(d.state == "ok");
        Gauge "gpumux_device_memory" "bytes" "Memory of the device." |d| d.memory_bytes as f64;
        Gauge "gpumux_device_foreign_processes" "" "Processes on the device that gpumux does not control." |d| d.foreign.len() as f64;
        Gauge "gpumux_device_foreign_memory" "bytes" "Memory of these processes, as far as the driver reports it."
            |d| d.foreign.iter().filter_map(|it| it.memory_bytes).sum::<u64>() as f64;
        Gauge "gpumux_device_foreign_used" "ratio" "Part of the last seconds in which kernels of these processes ran; NaN: the driver does not report it."
            |d| d.foreign.iter().try_fold(0.0, |sum, it| Some(sum + it.used_share?)).unwrap_or(f64::NAN);
    }
    DEVICE_RECEIVED: f64 {
        Gauge "gpumux_device_received" "ratio" "Share of the device that all tenants received in the last second or two; an MPS group counts once."
            |share| *share;
    }
    DEVICE_MEMORY: DeviceMemory {
        Gauge "gpumux_device_memory_free" "bytes" "Free memory of the device." |m| m.free as f64;
        Gauge "gpumux_device_memory_occupied" "bytes" "Memory of the device that contexts and foreign processes occupy." |m| m.occupied as f64;
    }
    CONTROL: ControlCost {
        Counter "gpumux_control_failures" "" "Failed controls." |c| c.failures as f64;
    }
    TENANT_INFO: Tenant {
        Gauge "gpumux_tenant_info" "" "A tenant, its class and owner; always 1." |_| 1.0;
    }
    TENANT: Tenant {
        Gauge "gpumux_tenant_guaranteed" "ratio" "Share of each device that is guaranteed." Tenant::guaranteed;
        Gauge "gpumux_tenant_limit" "ratio" "Share of each device that is not exceeded while others want it." |t| t.spec.limit;
        Gauge "gpumux_tenant_weight" "" "Weight among its equals." |t| t.spec.weight;
        Gauge "gpumux_tenant_processes" "" "Connected processes." |t| t.pids.len() as f64;
        Counter "gpumux_tenant_progress" "" "What the program reported as done with gpumux_progress, in its own unit, such as tokens."
            |t| t.progress as f64;
        Counter "gpumux_tenant_collectives" "" "Calls of NCCL's collectives, sends and receives." |t| t.collectives.calls as f64;
        Counter "gpumux_tenant_collectives_sent" "bytes" "Bytes that the tenant's ranks sent in them." |t| t.collectives.bytes as f64;
        Gauge "gpumux_tenant_collective_in_progress" "" "Whether a collective is not known to be done." |t| f64::from(t.collectives.in_progress);
        Counter "gpumux_tenant_hints" "" "Reservations of a device ahead of work." |t| t.hints.given as f64;
        Counter "gpumux_tenant_useful_hints" "" "Reservations that work found in place." |t| t.hints.useful as f64;
        Counter "gpumux_tenant_wasted_hints" "" "Reservations that ended before work came." |t| t.hints.wasted as f64;
        Counter "gpumux_tenant_hint_held" "seconds" "Device time of reservations." |t| t.hints.held_us as f64 / 1e6;
        Counter "gpumux_tenant_swap_outs" "" "Moves of memory to the host." |t| t.moves.outs as f64;
        Counter "gpumux_tenant_swap_ins" "" "Moves of memory back to the device." |t| t.moves.backs as f64;
        Counter "gpumux_tenant_swapped_out" "bytes" "Bytes moved to the host." |t| t.moves.out_bytes as f64;
        Counter "gpumux_tenant_swapped_in" "bytes" "Bytes moved back from the host." |t| t.moves.back_bytes as f64;
        Counter "gpumux_tenant_swapping_out" "seconds" "Time of moves to the host." |t| t.moves.out_us as f64 / 1e6;
        Counter "gpumux_tenant_swapping_in" "seconds" "Time of moves back to the device." |t| t.moves.back_us as f64 / 1e6;
    }
    STATE: bool {
        Gauge "gpumux_tenant_state" ""
            "1 for the tenant's state, 0 for the others: starting, idle, running, queued, swapped, blocked, faulty or tampers."
            |is| f64::from(*is);
    }
    TENANT_MEMORY: MemoryShare {
        Gauge "gpumux_tenant_memory" "bytes" "Memory of the device that the tenant has." |m| m.in_use as f64;
        Gauge "gpumux_tenant_memory_guaranteed" "bytes" "Memory of the device that is guaranteed to the tenant." |m| m.guaranteed as f64;
        Gauge "gpumux_tenant_memory_above_guarantee" "bytes" "Memory of the device that the tenant has above its guarantee."
            |m| m.above_guarantee as f64;
        Gauge "gpumux_tenant_memory_pinned" "bytes" "Memory of the device that cannot be moved." |m| m.pinned as f64;
        Gauge "gpumux_tenant_memory_swapped" "bytes" "The device's memory that the tenant has on the host." |m| m.swapped as f64;
    }
    TENANT_ON_DEVICE: OnDevice {
        Gauge "gpumux_tenant_entitled" "ratio" "Share of the device while all tenants there want it." |d| d.entitled;
        Gauge "gpumux_tenant_share" "ratio" "Share of the device received in the last second or two; of an MPS group, each member has what all received together." |d| d.received;
        Gauge "gpumux_tenant_domains" "" "Channel groups on the device." |d| d.domains as f64;
        Gauge "gpumux_tenant_faulty_domains" "" "Channel groups with a control that fails." |d| d.faulty as f64;
    }
    TOTALS: Totals {
        Counter "gpumux_tenant_received" "seconds" "Device time received; of an MPS group, each member has what all received together." |t| t.received_us / 1e6;
        Counter "gpumux_tenant_runnable" "seconds" "Time in which there was work." |t| t.runnable_us / 1e6;
        Counter "gpumux_tenant_waited" "seconds" "Time in which there was work that did not run; a wait for memory does not count." |t| t.waited_us / 1e6;
        Counter "gpumux_tenant_frozen" "seconds" "Time in which channel groups were frozen." |t| t.frozen_us / 1e6;
        Counter "gpumux_tenant_preemptions" "" "Freezes of a channel group that had work; switches between timeslices do not count." |t| t.preemptions as f64;
        Counter "gpumux_tenant_freezes" "" "Freezes of a channel group." |t| t.freezes as f64;
        Counter "gpumux_tenant_thaws" "" "Thaws of a channel group." |t| t.thaws as f64;
        Counter "gpumux_tenant_slice_changes" "" "Timeslices set by the daemon." |t| t.slice_changes as f64;
        Counter "gpumux_tenant_undone_controls" "" "Timeslices and freezes that the tenant's process was found to have undone."
            |t| t.tampered as f64;
        Counter "gpumux_tenant_copied_to_device" "bytes" "Bytes copied from the host to the device." |t| t.copied[0] as f64;
        Counter "gpumux_tenant_copied_to_host" "bytes" "Bytes copied from the device to the host." |t| t.copied[1] as f64;
    }
    GROUP: GroupCounts {
        Gauge "gpumux_group_members" "" "Members of the MPS group." |g| g.members as f64;
        Counter "gpumux_group_faults" "" "Faults that ended the processes of all members." |g| g.faults as f64;
        Counter "gpumux_group_restarts" "" "Restarts of the MPS group after a fault." |g| g.restarts as f64;
        Counter "gpumux_group_restarting" "seconds" "Time from faults until the MPS group was available again." |g| g.restarting.as_secs_f64();
    }
}

/// What a tenant has on a device, over its domains there.
struct OnDevice {
    entitled: f64,
    received: f64,
    domains: usize,
    faulty: usize,
}

impl OnDevice {
    fn of(tenant: &Tenant, device: &str) -> Self {
        let here = || tenant.domains.iter().filter(|it| it.device == device);
        Self {
            entitled: here().map(|it| it.entitled_share).fold(0.0, f64::max),
            received: tenant.received(device),
            domains: here().count(),
            faulty: here().filter(|it| it.error.is_some()).count(),
        }
    }
}

/// Times that were counted in classes.
struct Times {
    sum_s: f64,
    count: u64,
    /// The end of each class in seconds, and how many are in it.
    classes: Vec<(f64, u64)>,
}

/// Doublings of 1 µs at which the classes of request times end: 64 µs to 67 s.
const REQUEST_DOUBLINGS: std::ops::RangeInclusive<i32> = 6..=26;

impl Times {
    /// In the classes of [`BUCKETS_US`].
    fn of_thread(total_us: u64, count: u64, counts: &[u64]) -> Self {
        let ends = BUCKETS_US.iter().map(|end| *end as f64 / 1e6);
        let ends = ends.chain([f64::INFINITY]);
        Self {
            sum_s: total_us as f64 / 1e6,
            count,
            classes: ends.zip(counts.iter().copied()).collect(),
        }
    }

    fn of_requests(figures: &RequestFigures) -> Self {
        let ends = REQUEST_DOUBLINGS.map(|doublings| f64::from(doublings).exp2() / 1e6);
        let mut classes: Vec<(f64, u64)> =
            ends.chain([f64::INFINITY]).map(|end| (end, 0)).collect();
        for [step, count] in &figures.histogram {
            // Step 0 begins at 1 µs, so the first eight end at or below the first doubling.
            let doublings = (*step as usize / STEPS + 1).max(*REQUEST_DOUBLINGS.start() as usize);
            let class = (doublings - *REQUEST_DOUBLINGS.start() as usize).min(classes.len() - 1);
            classes[class].1 = classes[class].1.saturating_add(*count);
        }
        Self {
            sum_s: figures.total_us / 1e6,
            count: figures.count,
            classes,
        }
    }
}

type Labels<'a> = Vec<(&'static str, &'a str)>;

fn of(tenant: &Tenant) -> Labels<'_> {
    vec![("tenant", &tenant.name)]
}

fn on<'a>(tenant: &'a str, device: &'a str) -> Labels<'a> {
    vec![("tenant", tenant), ("device", device)]
}

/// Each metric of a table, of all these.
fn show<'a, T>(
    encoder: &mut DescriptorEncoder<'_>,
    table: &[Metric<T>],
    all: impl Iterator<Item = (Labels<'a>, impl Borrow<T>)> + Clone,
) -> fmt::Result {
    for metric in table {
        let Metric {
            name, help, kind, ..
        } = *metric;
        let unit = (!metric.unit.is_empty()).then(|| Unit::Other(metric.unit.into()));
        let mut family = encoder.encode_descriptor(name, help, unit.as_ref(), kind)?;
        let counts = matches!(kind, MetricType::Counter);
        for (labels, it) in all.clone() {
            let value = (metric.value)(it.borrow());
            let sample = |encoder: &mut MetricEncoder<'_>| match counts {
                true => encoder.encode_counter::<NoLabelSet, _, f64>(&value, None),
                false => encoder.encode_gauge(&value),
            };
            match labels.is_empty() {
                true => sample(&mut family)?,
                false => sample(&mut family.encode_family(&labels)?)?,
            }
        }
    }
    Ok(())
}

fn show_times<'a>(
    encoder: &mut DescriptorEncoder<'_>,
    name: &'static str,
    help: &'static str,
    all: impl Iterator<Item = (Labels<'a>, Times)>,
) -> fmt::Result {
    let kind = MetricType::Histogram;
    let mut family = encoder.encode_descriptor(name, help, Some(&Unit::Seconds), kind)?;
    for (labels, it) in all {
        let sample = |encoder: &mut MetricEncoder<'_>| {
            encoder.encode_histogram::<NoLabelSet>(it.sum_s, it.count, &it.classes, None)
        };
        match labels.is_empty() {
            true => sample(&mut family)?,
            false => sample(&mut family.encode_family(&labels)?)?,
        }
    }
    Ok(())
}

impl Collector for Scrape {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        self.daemon(&mut encoder)?;
        self.devices(&mut encoder)?;
        self.tenants(&mut encoder)?;
        let groups = self.groups.iter();
        let groups = groups.map(|(name, it)| (vec![("group", name.as_str())], it));
        show(&mut encoder, GROUP, groups)
    }
}

impl Scrape {
    fn daemon(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let status = &self.status;
        let info = vec![("version", &*status.version), ("policy", &status.policy)];
        show(encoder, BUILD, iter::once((info, status)))?;
        show(encoder, DAEMON, iter::once((vec![], self)))?;
        show(encoder, STATUS, iter::once((vec![], status)))?;
        let thread = &status.scheduler;
        let steps = Times::of_thread(thread.steps_total_us, thread.steps, &thread.steps_histogram);
        let help = "Time of an iteration of the scheduling thread, with its controls.";
        show_times(
            encoder,
            "gpumux_scheduler_step",
            help,
            iter::once((vec![], steps)),
        )
    }

    fn devices(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let devices = self.status.devices.iter();
        let info = devices.clone().map(|d| {
            let emulated = if d.emulated { "true" } else { "false" };
            let labels = vec![
                ("device", d.uuid.as_str()),
                ("name", &d.name),
                ("driver", &d.driver),
                ("policy", &d.policy),
                ("emulated", emulated),
            ];
            (labels, d)
        });
        show(encoder, DEVICE_INFO, info)?;
        let all = devices
            .clone()
            .map(|d| (vec![("device", d.uuid.as_str())], d));
        show(encoder, DEVICE, all)?;
        let received = devices.clone().map(|d| {
            let share = Tenant::received_by(&self.tenants, &d.uuid);
            (vec![("device", d.uuid.as_str())], share)
        });
        show(encoder, DEVICE_RECEIVED, received)?;
        let memory = self.memory.iter();
        let memory = memory.map(|m| (vec![("device", m.device.as_str())], m));
        show(encoder, DEVICE_MEMORY, memory)?;
        let controls = devices.flat_map(|d| {
            let labels = |it| vec![("device", d.uuid.as_str()), ("control", it)];
            let all = d.controls.iter();
            all.map(move |it| (labels(it.control.as_str()), it))
        });
        show(encoder, CONTROL, controls.clone())?;
        let times = |it: &ControlCost| Times::of_thread(it.total_us, it.pulls, &it.histogram);
        let times = controls.map(|(labels, it)| (labels, times(it)));
        show_times(encoder, "gpumux_control", "Time of a control.", times)
    }

    fn tenants(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let tenants = self.tenants.iter();
        let uids: Vec<String> = tenants.clone().map(|t| t.uid.to_string()).collect();
        let info = tenants.clone().zip(&uids).map(|(t, uid)| {
            let labels = vec![
                ("tenant", t.name.as_str()),
                ("class", t.class.name()),
                ("user", &t.user),
                ("uid", uid),
            ];
            (labels, t)
        });
        show(encoder, TENANT_INFO, info)?;
        show(encoder, TENANT, tenants.clone().map(|t| (of(t), t)))?;
        let states = tenants.clone().flat_map(|t| {
            let labels =
                |state: TenantState| vec![("tenant", t.name.as_str()), ("state", state.name())];
            let all = TenantState::ALL.into_iter();
            all.map(move |state| (labels(state), state == t.state))
        });
        show(encoder, STATE, states)?;
        let marked = tenants.clone().filter(|t| t.requests.count > 0);
        let requests = marked.map(|t| (of(t), Times::of_requests(&t.requests)));
        let help = "Time of a request that the program marked with gpumux_begin and gpumux_end.";
        show_times(encoder, "gpumux_tenant_request", help, requests)?;
        let memory = tenants.clone().flat_map(|t| &t.memory);
        show(
            encoder,
            TENANT_MEMORY,
            memory.map(|m| (on(&m.tenant, &m.device), m)),
        )?;
        let here = tenants.flat_map(|t| {
            let devices = t.devices.iter();
            devices.map(move |device| (on(&t.name, device), OnDevice::of(t, device)))
        });
        show(encoder, TENANT_ON_DEVICE, here)?;
        let totals = self.totals.iter();
        show(
            encoder,
            TOTALS,
            totals.map(|(tenant, device, it)| (on(tenant, device), it)),
        )
    }
}

#[cfg(test)]
pub(crate) mod tests;
