//! What is shown keeps the rules of OpenMetrics, and is what the dashboard and the alerts name.

use std::collections::{BTreeMap, BTreeSet};

use gpumux_core::Class;

use super::*;
use crate::api::types::{
    CollectiveFigures, ControlCost, Device, Domain, HintFigures, HostMemory, MoveFigures,
    Scheduler, TenantSpec,
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
            started_by: None,
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
            collectives: CollectiveFigures {
                calls: 3,
                bytes: 4096,
                in_progress: true,
            },
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
            swap_reason: None,
            waits_for_memory: true,
            lacks_on_host: None,
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
        r#"gpumux_tenant_collectives_total{tenant="web"} 3"#,
        r#"gpumux_tenant_collectives_sent_bytes_total{tenant="web"} 4096"#,
        r#"gpumux_tenant_collective_in_progress{tenant="web"} 1"#,
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

#[test]
fn members_of_a_group_count_once_in_what_tenants_received() {
    let mut scrape = example();
    let domain = |group, received_share| Domain {
        device: "GPU-0".into(),
        group,
        received_share,
        ..Domain::default()
    };
    for (group, share) in [(Some(1), 0.5), (Some(1), 0.5), (None, 0.25)] {
        let mut tenant = scrape.tenants[0].clone();
        tenant.domains = vec![domain(group, share)];
        scrape.tenants.push(tenant);
    }
    let text = scrape.text();
    for line in [
        r#"gpumux_device_received_ratio{device="GPU-0"} 0.75"#,
        r#"gpumux_device_received_ratio{device="GPU-1"} 0.0"#,
    ] {
        assert!(text.contains(line), "{line} in\n{text}");
    }
}

#[test]
fn use_by_no_foreign_process_is_zero_without_a_sign() {
    let mut scrape = example();
    scrape.status.devices[0].foreign.clear();
    let text = scrape.text();
    let line = r#"gpumux_device_foreign_used_ratio{device="GPU-0"} 0.0"#;
    assert!(text.contains(line), "{text}");
}

/// The metrics that the dashboard and the alerts ask for exist.
#[test]
fn the_dashboard_and_the_alerts_name_metrics_that_exist() {
    let known = lint(&example().text());
    for (file, text) in [
        (
            "grafana.json",
            include_str!("../../../../../deploy/grafana.json"),
        ),
        (
            "alerts.yml",
            include_str!("../../../../../deploy/alerts.yml"),
        ),
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
        let alerts = include_str!("../../../../../deploy/alerts.yml");
        assert!(alerts.contains(name), "{name}");
    }
    let dashboard: serde_json::Value =
        serde_json::from_str(include_str!("../../../../../deploy/grafana.json")).unwrap();
    assert!(dashboard["panels"].as_array().unwrap().len() > 5);
}

/// The labels of a sample, but for those of a histogram's steps.
fn labels(sample: &str) -> Vec<&str> {
    let starts = sample.split('"').filter_map(|it| it.strip_suffix('='));
    let names = starts.filter_map(|it| it.rsplit(['{', ',']).next());
    names.filter(|it| *it != "le").collect()
}

/// `docs/metrics.md`: what a scrape has.
#[test]
fn reference_has_every_metric() {
    let scrape = example().text();
    let mut text = String::from(
        "<!-- Made from a scrape: UPDATE_DOCS=1 cargo test -p gpumux-daemon reference -->\n\
         # Metrics\n\n`/metrics` is OpenMetrics text ([how to ask for it](see-it.md#metrics)). A histogram has \
         `_bucket`, `_sum` and `_count`.\n\n| metric | kind | labels | meaning |\n|---|---|---|---|\n",
    );
    let about = |what: &str| {
        let lines = scrape
            .lines()
            .filter_map(|line| line.strip_prefix("# ")?.strip_prefix(what));
        let pairs = lines.filter_map(|line| line.trim_start().split_once(' '));
        pairs.collect::<Vec<_>>()
    };
    let helps: BTreeMap<_, _> = about("HELP").into_iter().collect();
    for (name, kind) in about("TYPE") {
        let sample = |line: &&str| {
            let rest = line.strip_prefix(name);
            rest.is_some_and(|it| {
                ["{", " ", "_total", "_count"]
                    .iter()
                    .any(|end| it.starts_with(end))
            })
        };
        let sample = scrape.lines().find(sample).expect(name);
        let total = if kind == "counter" { "_total" } else { "" };
        let labels: Vec<String> = labels(sample).iter().map(|it| format!("`{it}`")).collect();
        let (labels, help) = (labels.join(", "), helps[name]);
        text += &format!("| `{name}{total}` | {kind} | {labels} | {help} |\n");
    }
    crate::generated::assert_page("metrics.md", &text);
}
