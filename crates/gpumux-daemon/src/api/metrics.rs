//! `/metrics` in OpenMetrics text, made at each scrape from what the scheduler knows.

use std::{collections::BTreeMap, fmt};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet, text},
    metrics::MetricType,
    registry::{Registry, Unit},
};

use gpumux_wire::page::STEPS;

use super::types::{
    DeviceMemory, Domain, MemoryShare, RequestFigures, Status, Tenant, TenantState,
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

type Labels<'a> = Vec<(&'static str, &'a str)>;

/// One family of counters or gauges.
struct Family<'e> {
    metric: MetricEncoder<'e>,
    counter: bool,
}

impl Family<'_> {
    fn sample(&mut self, labels: Labels<'_>, value: f64) -> fmt::Result {
        match labels.is_empty() {
            true => write(&mut self.metric, self.counter, value),
            false => write(
                &mut self.metric.encode_family(&labels)?,
                self.counter,
                value,
            ),
        }
    }
}

fn write(metric: &mut MetricEncoder<'_>, counter: bool, value: f64) -> fmt::Result {
    match counter {
        true => metric.encode_counter::<NoLabelSet, _, f64>(&value, None),
        false => metric.encode_gauge(&value),
    }
}

/// Name without unit, unit, help.
type Name = (&'static str, Option<&'static str>, &'static str);

/// A family, and what its value is.
type Shown<T> = (Name, fn(&T) -> f64);
type OfDomains = fn(&[&Domain]) -> f64;

fn family(
    encoder: &mut DescriptorEncoder<'_>,
    (name, unit, help): Name,
    kind: MetricType,
    samples: impl FnOnce(&mut Family<'_>) -> fmt::Result,
) -> fmt::Result {
    let unit = unit.map(|unit| Unit::Other(unit.into()));
    let counter = matches!(kind, MetricType::Counter);
    let metric = encoder.encode_descriptor(name, help, unit.as_ref(), kind)?;
    samples(&mut Family { metric, counter })
}

/// What is counted per tenant and device, over all their domains.
const COUNTED: [Shown<Totals>; 9] = [
    (
        (
            "gpumux_tenant_received",
            Some("seconds"),
            "Device time received.",
        ),
        |t| t.received_us / 1e6,
    ),
    (
        (
            "gpumux_tenant_runnable",
            Some("seconds"),
            "Time in which there was work.",
        ),
        |t| t.runnable_us / 1e6,
    ),
    (
        (
            "gpumux_tenant_waited",
            Some("seconds"),
            "Time in which there was work that did not run.",
        ),
        |t| t.waited_us / 1e6,
    ),
    (
        (
            "gpumux_tenant_frozen",
            Some("seconds"),
            "Time in which channel groups were frozen.",
        ),
        |t| t.frozen_us / 1e6,
    ),
    (
        (
            "gpumux_tenant_preemptions",
            None,
            "Preemptions: a channel group with work was taken off the device.",
        ),
        |t| t.preemptions as f64,
    ),
    (
        ("gpumux_tenant_freezes", None, "Freezes of a channel group."),
        |t| t.freezes as f64,
    ),
    (
        ("gpumux_tenant_thaws", None, "Thaws of a channel group."),
        |t| t.thaws as f64,
    ),
    (
        (
            "gpumux_tenant_slice_changes",
            None,
            "Timeslices set by the daemon.",
        ),
        |t| t.slice_changes as f64,
    ),
    (
        (
            "gpumux_tenant_undone_controls",
            None,
            "Timeslices and freezes that the tenant's process was found to have undone.",
        ),
        |t| t.tampered as f64,
    ),
];

/// What is shown per tenant and device as it is now, of the domains there.
const SHOWN: [(Name, OfDomains); 4] = [
    (
        (
            "gpumux_tenant_entitled",
            Some("ratio"),
            "Share of the device while all tenants there want it.",
        ),
        |d| d.iter().map(|d| d.entitled_share).fold(0.0, f64::max),
    ),
    (
        (
            "gpumux_tenant_share",
            Some("ratio"),
            "Share of the device received in the last second or two.",
        ),
        |d| d.iter().map(|d| d.received_share).sum(),
    ),
    (
        (
            "gpumux_tenant_domains",
            None,
            "Channel groups on the device.",
        ),
        |d| d.len() as f64,
    ),
    (
        (
            "gpumux_tenant_faulty_domains",
            None,
            "Channel groups with a control that fails.",
        ),
        |d| d.iter().filter(|d| d.error.is_some()).count() as f64,
    ),
];

/// What is shown per tenant.
const PROMISED: [Shown<Tenant>; 4] = [
    (
        (
            "gpumux_tenant_guaranteed",
            Some("ratio"),
            "Share of each device that is guaranteed.",
        ),
        Tenant::guaranteed,
    ),
    (
        (
            "gpumux_tenant_limit",
            Some("ratio"),
            "Share of each device that is not exceeded while others want it.",
        ),
        |t| t.spec.limit,
    ),
    (
        ("gpumux_tenant_weight", None, "Weight among its equals."),
        |t| t.spec.weight,
    ),
    (
        ("gpumux_tenant_processes", None, "Connected processes."),
        |t| t.pids.len() as f64,
    ),
];

/// What a tenant's processes count.
const HINTS: [Shown<Tenant>; 5] = [
    (
        (
            "gpumux_tenant_progress",
            None,
            "What the program reported as done with gpumux_progress, in its own unit, such as tokens.",
        ),
        |t| t.progress as f64,
    ),
    (
        (
            "gpumux_tenant_hints",
            None,
            "Reservations of a device ahead of work.",
        ),
        |t| t.hints.given as f64,
    ),
    (
        (
            "gpumux_tenant_useful_hints",
            None,
            "Reservations that work found in place.",
        ),
        |t| t.hints.useful as f64,
    ),
    (
        (
            "gpumux_tenant_wasted_hints",
            None,
            "Reservations that ended before work came.",
        ),
        |t| t.hints.wasted as f64,
    ),
    (
        (
            "gpumux_tenant_hint_held",
            Some("seconds"),
            "Device time of reservations.",
        ),
        |t| t.hints.held_us as f64 / 1e6,
    ),
];

/// What is shown of a tenant's memory on a device.
const MEMORY: [Shown<MemoryShare>; 5] = [
    (
        (
            "gpumux_tenant_memory",
            Some("bytes"),
            "Memory of the device that the tenant has.",
        ),
        |m| m.in_use as f64,
    ),
    (
        (
            "gpumux_tenant_memory_guaranteed",
            Some("bytes"),
            "Memory of the device that is guaranteed to the tenant.",
        ),
        |m| m.guaranteed as f64,
    ),
    (
        (
            "gpumux_tenant_memory_above_guarantee",
            Some("bytes"),
            "Memory of the device that the tenant has above its guarantee.",
        ),
        |m| m.above_guarantee as f64,
    ),
    (
        (
            "gpumux_tenant_memory_pinned",
            Some("bytes"),
            "Memory of the device that cannot be moved.",
        ),
        |m| m.pinned as f64,
    ),
    (
        (
            "gpumux_tenant_memory_swapped",
            Some("bytes"),
            "The device's memory that the tenant has on the host.",
        ),
        |m| m.swapped as f64,
    ),
];

/// How a tenant's memory was moved.
const MOVES: [Shown<Tenant>; 6] = [
    (
        (
            "gpumux_tenant_swap_outs",
            None,
            "Moves of memory to the host.",
        ),
        |t| t.moves.outs as f64,
    ),
    (
        (
            "gpumux_tenant_swap_ins",
            None,
            "Moves of memory back to the device.",
        ),
        |t| t.moves.backs as f64,
    ),
    (
        (
            "gpumux_tenant_swapped_out",
            Some("bytes"),
            "Bytes moved to the host.",
        ),
        |t| t.moves.out_bytes as f64,
    ),
    (
        (
            "gpumux_tenant_swapped_in",
            Some("bytes"),
            "Bytes moved back from the host.",
        ),
        |t| t.moves.back_bytes as f64,
    ),
    (
        (
            "gpumux_tenant_swapping_out",
            Some("seconds"),
            "Time of moves to the host.",
        ),
        |t| t.moves.out_us as f64 / 1e6,
    ),
    (
        (
            "gpumux_tenant_swapping_in",
            Some("seconds"),
            "Time of moves back to the device.",
        ),
        |t| t.moves.back_us as f64 / 1e6,
    ),
];

/// What is shown of groups that share devices in space.
const GROUPS: [(Shown<GroupCounts>, MetricType); 4] = [
    (
        (
            ("gpumux_group_members", None, "Members of the MPS group."),
            |g| g.members as f64,
        ),
        MetricType::Gauge,
    ),
    (
        (
            (
                "gpumux_group_faults",
                None,
                "Faults that ended the processes of all members.",
            ),
            |g| g.faults as f64,
        ),
        MetricType::Counter,
    ),
    (
        (
            (
                "gpumux_group_restarts",
                None,
                "Restarts of the MPS group after a fault.",
            ),
            |g| g.restarts as f64,
        ),
        MetricType::Counter,
    ),
    (
        (
            (
                "gpumux_group_restarting",
                Some("seconds"),
                "Time from faults until the MPS group was available again.",
            ),
            |g| g.restarting.as_secs_f64(),
        ),
        MetricType::Counter,
    ),
];

/// Doublings of 1 µs at which the classes of request times end: 64 µs to 67 s.
const REQUEST_DOUBLINGS: std::ops::RangeInclusive<i32> = 6..=26;

/// What is counted of the scheduling thread.
const SCHEDULER: [Shown<Status>; 4] = [
    (
        (
            "gpumux_scheduler_steps",
            None,
            "Iterations of the scheduling thread.",
        ),
        |s| s.scheduler.steps as f64,
    ),
    (
        ("gpumux_scheduler_plans", None, "Plans of a device."),
        |s| s.scheduler.plans as f64,
    ),
    (
        (
            "gpumux_scheduler_busy",
            Some("seconds"),
            "Time of the scheduling thread outside of controls.",
        ),
        |s| s.scheduler.busy_s,
    ),
    (
        (
            "gpumux_lease_expiries",
            None,
            "Expired leases: a process freed itself, because the scheduling thread stood still.",
        ),
        |s| s.scheduler.lease_expiries as f64,
    ),
];

impl Collector for Scrape {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let encoder = &mut encoder;
        self.daemon(encoder)?;
        self.devices(encoder)?;
        self.tenants(encoder)?;
        for ((name, value), kind) in GROUPS {
            family(encoder, name, kind, |f| {
                let mut groups = self.groups.iter();
                groups.try_for_each(|(name, it)| f.sample(vec![("group", name)], value(it)))
            })?;
        }
        Ok(())
    }
}

impl Scrape {
    fn daemon(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let Status {
            version, policy, ..
        } = &self.status;
        let gauge = MetricType::Gauge;
        family(
            encoder,
            (
                "gpumux_build_info",
                None,
                "The daemon's version and policy; always 1.",
            ),
            gauge,
            |f| f.sample(vec![("version", version), ("policy", policy)], 1.0),
        )?;
        let singles: [(Name, f64); 6] = [
            (
                (
                    "gpumux_start_time",
                    Some("seconds"),
                    "When the daemon started, since 1970.",
                ),
                self.started,
            ),
            (
                ("gpumux_tenants", None, "Tenants."),
                self.status.tenants as f64,
            ),
            (
                ("gpumux_sessions", None, "Connected processes of tenants."),
                self.status.sessions as f64,
            ),
            (
                (
                    "gpumux_host_memory",
                    Some("bytes"),
                    "Memory of the host that processes keep for what is moved there.",
                ),
                self.status.host_memory.used as f64,
            ),
            (
                (
                    "gpumux_host_memory_limit",
                    Some("bytes"),
                    "Limit of memory of the host for moved memory; 0: what the host has.",
                ),
                self.status.host_memory.limit.unwrap_or(0) as f64,
            ),
            (
                (
                    "gpumux_scheduler_plan_max",
                    Some("seconds"),
                    "The longest plan so far.",
                ),
                self.status.scheduler.plan_max_us as f64 / 1e6,
            ),
        ];
        for (name, value) in singles {
            family(encoder, name, MetricType::Gauge, |f| {
                f.sample(vec![], value)
            })?;
        }
        for (name, value) in SCHEDULER {
            family(encoder, name, MetricType::Counter, |f| {
                f.sample(vec![], value(&self.status))
            })?;
        }
        let name = (
            "gpumux_scheduler_step",
            Some("seconds"),
            "Time of an iteration of the scheduling thread, with its controls.",
        );
        let thread = &self.status.scheduler;
        family(encoder, name, MetricType::Histogram, |f| {
            let (sum, counts) = (thread.steps_total_us, &thread.steps_histogram);
            durations(&mut f.metric, sum, thread.steps, counts)
        })
    }

    fn devices(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let devices = &self.status.devices;
        let each = |f: &mut Family<'_>, value: fn(&super::types::Device) -> f64| {
            devices
                .iter()
                .try_for_each(|d| f.sample(vec![("device", &d.uuid)], value(d)))
        };
        let help = "A device, its name, driver and policy; always 1.";
        family(
            encoder,
            ("gpumux_device_info", None, help),
            MetricType::Gauge,
            |f| {
                devices.iter().try_for_each(|d| {
                    let emulated = if d.emulated { "true" } else { "false" };
                    let labels = vec![
                        ("device", &*d.uuid),
                        ("name", &d.name),
                        ("driver", &d.driver),
                        ("policy", &d.policy),
                        ("emulated", emulated),
                    ];
                    f.sample(labels, 1.0)
                })
            },
        )?;
        let gauge = || MetricType::Gauge;
        family(
            encoder,
            ("gpumux_device_healthy", None, "Whether the device is well."),
            gauge(),
            |f| each(f, |d| f64::from(u8::from(d.state == "ok"))),
        )?;
        family(
            encoder,
            (
                "gpumux_device_memory",
                Some("bytes"),
                "Memory of the device.",
            ),
            gauge(),
            |f| each(f, |d| d.memory_bytes as f64),
        )?;
        let foreign: [Shown<super::types::Device>; 3] = [
            (
                (
                    "gpumux_device_foreign_processes",
                    None,
                    "Processes on the device that gpumux does not control.",
                ),
                |d| d.foreign.len() as f64,
            ),
            (
                (
                    "gpumux_device_foreign_memory",
                    Some("bytes"),
                    "Memory of these processes, as far as the driver reports it.",
                ),
                |d| {
                    d.foreign
                        .iter()
                        .filter_map(|it| it.memory_bytes)
                        .sum::<u64>() as f64
                },
            ),
            (
                (
                    "gpumux_device_foreign_used",
                    Some("ratio"),
                    "Part of the last seconds in which kernels of these processes ran, as far as the driver reports it.",
                ),
                |d| d.foreign.iter().filter_map(|it| it.used_share).sum(),
            ),
        ];
        for (name, value) in foreign {
            family(encoder, name, gauge(), |f| each(f, value))?;
        }
        let kinds: [Shown<DeviceMemory>; 2] = [
            (
                (
                    "gpumux_device_memory_free",
                    Some("bytes"),
                    "Free memory of the device.",
                ),
                |m| m.free as f64,
            ),
            (
                (
                    "gpumux_device_memory_occupied",
                    Some("bytes"),
                    "Memory of the device that contexts and foreign processes occupy.",
                ),
                |m| m.occupied as f64,
            ),
        ];
        for (name, value) in kinds {
            family(encoder, name, gauge(), |f| {
                self.memory
                    .iter()
                    .try_for_each(|m| f.sample(vec![("device", &m.device)], value(m)))
            })?;
        }
        let pairs = || {
            devices.iter().flat_map(|d| {
                d.controls.iter().map(|control| {
                    (
                        vec![("device", &*d.uuid), ("control", &control.control)],
                        control,
                    )
                })
            })
        };
        let failures = ("gpumux_control_failures", None, "Failed controls.");
        family(encoder, failures, MetricType::Counter, |f| {
            pairs().try_for_each(|(labels, control)| f.sample(labels, control.failures as f64))
        })?;
        let pulls = ("gpumux_control", Some("seconds"), "Time of a control.");
        family(encoder, pulls, MetricType::Histogram, |f| {
            pairs().try_for_each(|(labels, control)| {
                let metric = &mut f.metric.encode_family(&labels)?;
                durations(metric, control.total_us, control.pulls, &control.histogram)
            })
        })
    }

    fn tenants(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let help = "A tenant, its class and owner; always 1.";
        family(
            encoder,
            ("gpumux_tenant_info", None, help),
            MetricType::Gauge,
            |f| {
                self.tenants.iter().try_for_each(|tenant| {
                    let (class, uid) = (tenant.class.name(), tenant.uid.to_string());
                    f.sample(
                        vec![
                            ("tenant", &tenant.name),
                            ("class", class),
                            ("user", &tenant.user),
                            ("uid", &uid),
                        ],
                        1.0,
                    )
                })
            },
        )?;
        for (name, value) in PROMISED {
            family(encoder, name, MetricType::Gauge, |f| {
                self.tenants
                    .iter()
                    .try_for_each(|t| f.sample(vec![("tenant", &t.name)], value(t)))
            })?;
        }
        for (name, value) in MEMORY {
            family(encoder, name, MetricType::Gauge, |f| {
                let all = self.tenants.iter().flat_map(|tenant| &tenant.memory);
                all.into_iter().try_for_each(|m| {
                    f.sample(vec![("tenant", &m.tenant), ("device", &m.device)], value(m))
                })
            })?;
        }
        let state = (
            "gpumux_tenant_state",
            None,
            "1 for the tenant's state, 0 for the others: starting, idle, running, queued, swapped, blocked, faulty or tampers.",
        );
        family(encoder, state, MetricType::Gauge, |f| {
            self.tenants.iter().try_for_each(|t| {
                TenantState::ALL.into_iter().try_for_each(|state| {
                    let labels = vec![("tenant", &*t.name), ("state", state.name())];
                    f.sample(labels, f64::from(u8::from(t.state == state)))
                })
            })
        })?;
        for (name, value) in HINTS.iter().chain(&MOVES).copied() {
            family(encoder, name, MetricType::Counter, |f| {
                self.tenants
                    .iter()
                    .try_for_each(|t| f.sample(vec![("tenant", &t.name)], value(t)))
            })?;
        }
        let name = (
            "gpumux_tenant_request",
            Some("seconds"),
            "Time of a request that the program marked with gpumux_begin and gpumux_end.",
        );
        family(encoder, name, MetricType::Histogram, |f| {
            let marked = self.tenants.iter().filter(|t| t.requests.count > 0);
            marked.into_iter().try_for_each(|t| {
                let labels: Labels<'_> = vec![("tenant", &t.name)];
                requests(&mut f.metric.encode_family(&labels)?, &t.requests)
            })
        })?;
        for (name, value) in SHOWN {
            family(encoder, name, MetricType::Gauge, |f| {
                for tenant in &self.tenants {
                    for device in &tenant.devices {
                        let here: Vec<_> = tenant
                            .domains
                            .iter()
                            .filter(|d| d.device == *device)
                            .collect();
                        f.sample(
                            vec![("tenant", &tenant.name), ("device", device)],
                            value(&here),
                        )?;
                    }
                }
                Ok(())
            })?;
        }
        for (name, value) in COUNTED {
            family(encoder, name, MetricType::Counter, |f| {
                self.totals.iter().try_for_each(|(tenant, device, totals)| {
                    f.sample(vec![("tenant", tenant), ("device", device)], value(totals))
                })
            })?;
        }
        Ok(())
    }
}

/// Durations that were counted in the classes of [`BUCKETS_US`].
fn durations(
    metric: &mut MetricEncoder<'_>,
    total_us: u64,
    count: u64,
    counts: &[u64],
) -> fmt::Result {
    let ends = BUCKETS_US
        .iter()
        .map(|end| *end as f64 / 1e6)
        .chain([f64::INFINITY]);
    let buckets: Vec<(f64, u64)> = ends.zip(counts.iter().copied()).collect();
    metric.encode_histogram::<NoLabelSet>(total_us as f64 / 1e6, count, &buckets, None)
}

fn requests(metric: &mut MetricEncoder<'_>, figures: &RequestFigures) -> fmt::Result {
    let ends = REQUEST_DOUBLINGS.map(|doublings| f64::from(doublings).exp2() / 1e6);
    let mut buckets: Vec<(f64, u64)> = ends.chain([f64::INFINITY]).map(|end| (end, 0)).collect();
    for [step, count] in &figures.histogram {
        // Step 0 begins at 1 µs, so the first eight end at or below the first doubling.
        let doublings = (*step as usize / STEPS + 1).max(*REQUEST_DOUBLINGS.start() as usize);
        let bucket = (doublings - *REQUEST_DOUBLINGS.start() as usize).min(buckets.len() - 1);
        buckets[bucket].1 = buckets[bucket].1.saturating_add(*count);
    }
    let sum = figures.total_us / 1e6;
    metric.encode_histogram::<NoLabelSet>(sum, figures.count, &buckets, None)
}

#[cfg(test)]
pub(crate) mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use gpumux_core::Class;

    use super::*;
    use crate::api::types::{
        ControlCost, Device, HintFigures, HostMemory, MoveFigures, Scheduler, TenantSpec,
    };

    pub(crate) fn example() -> Scrape {
        let control = |control: &str| ControlCost {
            control: control.into(),
            pulls: 3,
            failures: 1,
            min_us: 10,
            mean_us: 20,
            max_us: 900_000,
            total_us: 900_060,
            histogram: vec![1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1],
        };
        let device = |uuid: &str| Device {
            uuid: uuid.into(),
            index: None,
            readings: Default::default(),
            name: "with \"quotes\" and \\".into(),
            emulated: true,
            driver: "580.1".into(),
            memory_bytes: 1 << 30,
            memory_guaranteeable: 0,
            context_bytes: 0,
            hardware: Default::default(),
            policy: "priority".into(),
            state: "ok".into(),
            domains: 1,
            foreign: vec![crate::api::types::ForeignProcess {
                pid: 7,
                name: "python".into(),
                uid: Some(1000),
                memory_bytes: Some(1 << 30),
                used_share: Some(0.25),
                tenant: None,
            }],
            controls: vec![control("freeze"), control("thaw")],
        };
        let totals = Totals {
            received_us: 1.5e6,
            preemptions: 7,
            ..Totals::default()
        };
        Scrape {
            status: Status {
                faults: Vec::new(),
                host_memory: HostMemory {
                    used: 4096,
                    ..HostMemory::default()
                },
                version: "1".into(),
                protocol: 1,
                pid: 1,
                uptime_s: 1,
                listen: None,
                runtime_dir: "/run".into(),
                session_socket: "/run/s".into(),
                policy: "priority".into(),
                tenants: 1,
                sessions: 1,
                devices: vec![device("GPU-0"), device("GPU-1")],
                scheduler: Scheduler {
                    steps: 5,
                    plans: 2,
                    busy_s: 0.5,
                    plan_max_us: 80,
                    steps_total_us: 1_000_300,
                    steps_histogram: vec![0, 0, 4, 0, 0, 0, 0, 0, 0, 0, 1],
                    lease_expiries: 3,
                },
            },
            tenants: vec![Tenant {
                command: String::new(),
                log: None,
                lost_output: None,
                name: "web".into(),
                class: Class::Latency,
                spec: TenantSpec::default(),
                uid: 1000,
                user: "alice".into(),
                may_use: Vec::new(),
                lapsed: false,
                tampering: None,
                pids: vec![1],
                devices: vec!["GPU-0".into()],
                domains: Vec::new(),
                since: 0,
                state: TenantState::Blocked,
                placement: Default::default(),
                work: 0,
                progress: 700,
                hints: HintFigures {
                    given: 4,
                    useful: 3,
                    wasted: 1,
                    held_us: 250,
                },
                // 1 µs, 4 ms, and more than an hour.
                requests: RequestFigures {
                    count: 6,
                    total_us: 3.6e9,
                    histogram: vec![[0, 2], [95, 3], [255, 1]],
                    ..RequestFigures::default()
                },
                memory: vec![MemoryShare {
                    device: "GPU-0".into(),
                    tenant: "web".into(),
                    guaranteed: 4 << 20,
                    limit: None,
                    in_use: 5 << 20,
                    above_guarantee: 1 << 20,
                    pinned: 2 << 20,
                    swapped: 3 << 20,
                    above_limit: 0,
                }],
                asleep: true,
                waits_for_memory: true,
                uncontrolled: None,
                unlisted_calls: Vec::new(),
                moves: MoveFigures {
                    outs: 2,
                    backs: 1,
                    out_bytes: 6 << 20,
                    back_bytes: 3 << 20,
                    out_us: 500_000,
                    back_us: 250_000,
                },
            }],
            totals: vec![("web".into(), "GPU-0".into(), totals)],
            memory: vec![DeviceMemory {
                device: "GPU-0".into(),
                total: 80 << 20,
                occupied: 7 << 20,
                free: 68 << 20,
                tenants: Vec::new(),
            }],
            groups: BTreeMap::from([(
                "1000/team".into(),
                GroupCounts {
                    members: 2,
                    faults: 3,
                    restarts: 2,
                    restarting: std::time::Duration::from_millis(1500),
                },
            )]),
            started: 1e9,
        }
    }

    /// A linter: what OpenMetrics demands and Prometheus' naming rules ask for. Returns the samples' names.
    pub(crate) fn lint(text: &str) -> BTreeSet<String> {
        let body = text.strip_suffix("# EOF\n").expect("it ends with EOF");
        let mut described: BTreeMap<&str, (bool, &str, Option<&str>)> = BTreeMap::new();
        let (mut samples, mut series) = (BTreeSet::new(), BTreeSet::new());
        for line in body.lines() {
            let words: Vec<&str> = line.splitn(4, ' ').collect();
            match words[..] {
                ["#", "HELP", name, help] => {
                    assert!(help.ends_with('.') && help.len() > 5, "{line}");
                    assert!(
                        described.insert(name, (true, "", None)).is_none(),
                        "twice: {line}"
                    );
                }
                ["#", "TYPE", name, kind] => described.get_mut(name).expect(line).1 = kind,
                ["#", "UNIT", name, unit] => {
                    assert!(name.ends_with(&format!("_{unit}")), "{line}");
                    described.get_mut(name).expect(line).2 = Some(unit);
                }
                _ => {
                    let (id, value) = line.rsplit_once(' ').expect(line);
                    let value: f64 = value.parse().expect(line);
                    assert!(value.is_finite(), "{line}");
                    assert!(series.insert(id.to_owned()), "twice: {line}");
                    let name = id.split('{').next().unwrap();
                    assert!(name.starts_with("gpumux_"), "{line}");
                    assert!(
                        name.bytes()
                            .all(|b| b.is_ascii_lowercase() || b"_0123456789".contains(&b)),
                        "{line}"
                    );
                    let ends = ["_total", "_bucket", "_sum", "_count"];
                    let family = described.get(name).map(|_| name).unwrap_or_else(|| {
                        ends.iter()
                            .find_map(|end| name.strip_suffix(end))
                            .expect(line)
                    });
                    let (_, kind, _) = described
                        .get(family)
                        .unwrap_or_else(|| panic!("no HELP: {line}"));
                    match *kind {
                        "counter" => assert!(name.ends_with("_total") && value >= 0.0, "{line}"),
                        "gauge" => assert!(name == family && !name.ends_with("_total"), "{line}"),
                        "histogram" => assert!(
                            ["_bucket", "_sum", "_count"]
                                .iter()
                                .any(|e| name.ends_with(e)),
                            "{line}"
                        ),
                        kind => panic!("type {kind}: {line}"),
                    }
                    samples.insert(name.to_owned());
                }
            }
        }
        for (name, (_, kind, unit)) in described {
            assert!(!kind.is_empty(), "{name} has no TYPE");
            for short in ["_us", "_ms", "milliseconds", "microseconds", "percent"] {
                assert!(!name.ends_with(short), "{name}: use base units");
            }
            assert_eq!(
                unit.is_some(),
                ["_seconds", "_bytes", "_ratio"]
                    .iter()
                    .any(|u| name.ends_with(u)),
                "{name}"
            );
        }
        samples
    }

    #[test]
    fn metrics_keep_the_rules_of_openmetrics() {
        let text = example().text();
        lint(&text);
        for line in [
            r#"gpumux_tenant_received_seconds_total{tenant="web",device="GPU-0"} 1.5"#,
            r#"gpumux_control_seconds_bucket{le="0.00005",device="GPU-0",control="freeze"} 2"#,
            r#"gpumux_control_seconds_count{device="GPU-1",control="thaw"} 3"#,
            r#"gpumux_scheduler_step_seconds_bucket{le="0.1"} 4"#,
            r#"gpumux_scheduler_step_seconds_bucket{le="+Inf"} 5"#,
            r#"gpumux_tenant_progress_total{tenant="web"} 700"#,
            r#"gpumux_tenant_useful_hints_total{tenant="web"} 3"#,
            r#"gpumux_tenant_hint_held_seconds_total{tenant="web"} 0.00025"#,
            r#"gpumux_tenant_request_seconds_bucket{le="0.000064",tenant="web"} 2"#,
            r#"gpumux_tenant_request_seconds_bucket{le="0.002048",tenant="web"} 2"#,
            r#"gpumux_tenant_request_seconds_bucket{le="0.004096",tenant="web"} 5"#,
            r#"gpumux_tenant_request_seconds_bucket{le="+Inf",tenant="web"} 6"#,
            r#"gpumux_tenant_request_seconds_sum{tenant="web"} 3600"#,
            r#"gpumux_tenant_state{tenant="web",state="blocked"} 1"#,
            "gpumux_host_memory_bytes 4096",
            "gpumux_host_memory_limit_bytes 0",
            r#"gpumux_group_members{group="1000/team"} 2"#,
            r#"gpumux_group_faults_total{group="1000/team"} 3"#,
            r#"gpumux_group_restarting_seconds_total{group="1000/team"} 1.5"#,
        ] {
            assert!(text.contains(line), "{line} in\n{text}");
        }
        assert!(text.contains(r#"name="with \"quotes\" and \\""#), "{text}");
        assert!(
            text.contains(r#"le="+Inf",device="GPU-0",control="freeze"} 3"#),
            "{text}"
        );
    }

    /// The metrics that the dashboard and the alerts ask for exist.
    #[test]
    fn the_dashboard_and_the_alerts_name_metrics_that_exist() {
        let known = lint(&example().text());
        for (file, text) in [
            (
                "grafana.json",
                include_str!("../../../../deploy/grafana.json"),
            ),
            ("alerts.yml", include_str!("../../../../deploy/alerts.yml")),
        ] {
            let names: BTreeSet<&str> = text
                .split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'))
                .filter(|word| word.starts_with("gpumux_"))
                .collect();
            assert!(names.len() > 5, "{file}");
            for name in names {
                assert!(known.contains(name), "{file} asks for {name}");
            }
        }
        // What an operator must be notified of has an alert.
        for name in [
            "gpumux_tenant_swapping_in_seconds_total",
            "gpumux_tenant_state",
            "gpumux_group_faults_total",
        ] {
            let alerts = include_str!("../../../../deploy/alerts.yml");
            assert!(alerts.contains(name), "{name}");
        }
        let dashboard: serde_json::Value =
            serde_json::from_str(include_str!("../../../../deploy/grafana.json")).unwrap();
        assert!(dashboard["panels"].as_array().unwrap().len() > 5);
    }
}
