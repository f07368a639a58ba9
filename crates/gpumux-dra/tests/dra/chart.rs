//! The Helm chart and the examples, rendered, and read strictly as what Kubernetes 1.36 knows.

mod recipes;

use std::{collections::BTreeMap, path::PathBuf};

use gpumux_dra::{health::Check, share::GpuShare};
use gtmpl::{Context, Func, FuncError, Template, Value as TemplateValue};
use k8s_openapi::api::{
    admissionregistration::v1::{ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding},
    apps::v1::{DaemonSet, Deployment, StatefulSet},
    batch::v1::Job,
    core::v1::{Namespace, Service, ServiceAccount},
    networking::v1::NetworkPolicy,
    rbac::v1::{ClusterRole, ClusterRoleBinding},
    resource::v1::{DeviceClass, ResourceClaimTemplate},
};
use serde_json::Value;

use crate::support::api::objects::strict;

fn deploy() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../deploy")
}

pub(crate) fn documents(text: &str) -> Vec<Value> {
    serde_saphyr::from_multiple::<Value>(text).unwrap_or_else(|error| panic!("{error}\n{text}"))
}

fn read(text: &str) -> Value {
    documents(text).remove(0)
}

/// Helm's functions that the chart uses.
fn quote(args: &[TemplateValue]) -> Result<TemplateValue, FuncError> {
    Ok(TemplateValue::from(format!("{:?}", args[0].to_string())))
}

fn to_json(args: &[TemplateValue]) -> Result<TemplateValue, FuncError> {
    Ok(TemplateValue::from(json(&args[0]).to_string()))
}

fn json(value: &TemplateValue) -> Value {
    match value {
        TemplateValue::Object(map) | TemplateValue::Map(map) => map
            .iter()
            .map(|(name, value)| (name.clone(), json(value)))
            .collect(),
        TemplateValue::Array(items) => items.iter().map(json).collect(),
        TemplateValue::String(text) => text.clone().into(),
        TemplateValue::Bool(flag) => (*flag).into(),
        TemplateValue::Number(number) => serde_json::from_str(&number.to_string()).unwrap(),
        _ => Value::Null,
    }
}

fn template_value(value: &Value) -> TemplateValue {
    match value {
        Value::Object(map) => TemplateValue::Object(
            map.iter()
                .map(|(name, value)| (name.clone(), template_value(value)))
                .collect(),
        ),
        Value::Array(items) => TemplateValue::Array(items.iter().map(template_value).collect()),
        Value::String(text) => TemplateValue::from(text.clone()),
        Value::Bool(flag) => TemplateValue::from(*flag),
        Value::Number(number) => TemplateValue::from(number.as_i64().unwrap()),
        Value::Null => TemplateValue::Nil,
    }
}

/// The chart's objects, as `helm template` would print them.
pub(crate) fn render() -> Vec<Value> {
    render_with(&Value::Null)
}

/// The same with other values, as from `--values`.
pub(crate) fn render_with(changes: &Value) -> Vec<Value> {
    let chart = deploy().join("helm/gpumux");
    let mut values = read(&std::fs::read_to_string(chart.join("values.yaml")).unwrap());
    change(&mut values, changes);
    let names = std::fs::read_to_string(chart.join("templates/_names.tpl")).unwrap();
    let mut files: Vec<_> = std::fs::read_dir(chart.join("templates"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    files.sort();
    let mut objects = Vec::new();
    for file in files.iter().filter(|file| {
        file.extension()
            .is_some_and(|extension| extension == "yaml")
    }) {
        let mut template = Template::default();
        template.add_funcs(&[("quote", quote as Func), ("toJson", to_json)]);
        let text = std::fs::read_to_string(file).unwrap();
        template
            .parse(format!("{names}{text}"))
            .unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        let context = serde_json::json!({"Values": values, "Release": {"Name": "gpumux", "Namespace": "gpumux-system"}});
        let rendered = template
            .render(&Context::from(template_value(&context)))
            .unwrap();
        objects.extend(
            documents(&rendered)
                .into_iter()
                .filter(|object| !object.is_null()),
        );
    }
    objects
}

/// Changes values as Helm does: maps are merged, and only what there is can be changed.
fn change(values: &mut Value, changes: &Value) {
    for (name, new) in changes.as_object().into_iter().flatten() {
        let old = values
            .get_mut(name)
            .unwrap_or_else(|| panic!("there is no value {name}"));
        match new.is_object() && old.as_object().is_some_and(|old| !old.is_empty()) {
            true => change(old, new),
            false => *old = new.clone(),
        }
    }
}

/// What this chart uses of the Prometheus operator's PodMonitor (monitoring.coreos.com/v1). The fields were compared with the CRD of the
/// operator's version 0.91.0.
#[derive(serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct PodMonitor {
    api_version: String,
    kind: String,
    metadata: k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta,
    spec: PodMonitorSpec,
}

#[derive(serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct PodMonitorSpec {
    selector: k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector,
    pod_metrics_endpoints: Vec<MetricsEndpoint>,
}

#[derive(serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct MetricsEndpoint {
    interval: String,
    relabelings: Vec<Relabeling>,
    honor_labels: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    authorization: Option<MetricsAuthorization>,
}

#[derive(serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Relabeling {
    #[serde(skip_serializing_if = "Option::is_none")]
    action: Option<String>,
    source_labels: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    regex: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    target_label: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    replacement: Option<String>,
}

#[derive(serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct MetricsAuthorization {
    credentials: k8s_openapi::api::core::v1::SecretKeySelector,
}

/// Reads an object strictly as its kind.
fn check(object: &Value) {
    let object = object.clone();
    let kind = object["kind"].as_str().expect("a kind").to_owned();
    let result = match kind.as_str() {
        "DaemonSet" => strict::<DaemonSet>(object).map(drop),
        "Deployment" => strict::<Deployment>(object).map(drop),
        "StatefulSet" => strict::<StatefulSet>(object).map(drop),
        "Job" => strict::<Job>(object).map(drop),
        "Namespace" => strict::<Namespace>(object).map(drop),
        "Service" => strict::<Service>(object).map(drop),
        "ServiceAccount" => strict::<ServiceAccount>(object).map(drop),
        "ClusterRole" => strict::<ClusterRole>(object).map(drop),
        "ClusterRoleBinding" => strict::<ClusterRoleBinding>(object).map(drop),
        "DeviceClass" => strict::<DeviceClass>(object).map(drop),
        "ResourceClaimTemplate" => strict::<ResourceClaimTemplate>(object).map(drop),
        "ValidatingAdmissionPolicy" => strict::<ValidatingAdmissionPolicy>(object).map(drop),
        "ValidatingAdmissionPolicyBinding" => {
            strict::<ValidatingAdmissionPolicyBinding>(object).map(drop)
        }
        "NetworkPolicy" => strict::<NetworkPolicy>(object).map(drop),
        "PodMonitor" => strict::<PodMonitor>(object).map(drop),
        other => panic!("kind {other} is not expected here"),
    };
    result.unwrap_or_else(|error| panic!("{kind}: {error:?}"));
}

/// All parameters of the driver somewhere in an object.
fn parameters(object: &Value) -> Vec<&Value> {
    match object {
        Value::Object(map)
            if map
                .get("driver")
                .is_some_and(|driver| driver == "gpumux.dev") =>
        {
            map.get("parameters").into_iter().collect()
        }
        Value::Object(map) => map.values().flat_map(parameters).collect(),
        Value::Array(items) => items.iter().flat_map(parameters).collect(),
        _ => Vec::new(),
    }
}

#[test]
fn the_chart_is_what_kubernetes_knows() {
    let objects = render();
    let mut kinds = BTreeMap::<&str, usize>::new();
    for object in &objects {
        check(object);
        *kinds.entry(object["kind"].as_str().unwrap()).or_default() += 1;
    }
    let expected = [
        ("ClusterRole", 1),
        ("ClusterRoleBinding", 1),
        ("DaemonSet", 2),
        ("DeviceClass", 3),
        ("NetworkPolicy", 1),
        ("ServiceAccount", 1),
        ("ValidatingAdmissionPolicy", 3),
        ("ValidatingAdmissionPolicyBinding", 3),
    ];
    assert_eq!(kinds, BTreeMap::from(expected));
    let classes: Vec<_> = objects
        .iter()
        .filter(|object| object["kind"] == "DeviceClass")
        .collect();
    assert_eq!(
        classes.iter().flat_map(|class| parameters(class)).count(),
        2
    );
    for parameters in classes.iter().flat_map(|class| parameters(class)) {
        GpuShare::read(parameters).unwrap();
    }
}

#[test]
fn every_value_of_the_chart_makes_valid_objects() {
    let changes = serde_json::json!({
        "image": {"digest": "sha256:00"},
        "driverRoot": "/run/nvidia/driver",
        "extraEnv": [{"name": "GPUMUX_EMU_SOCKET", "value": "/run/gpumux/emu.sock"}],
        "podAnnotations": {"example.com/a": "b"},
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms":
            [{"matchExpressions": [{"key": "nvidia.com/gpu.present", "operator": "Exists"}]}]}}},
        "classes": {
            "guaranteed": {"bounds": {"maxMemoryLimit": "requested", "maxLimit": 800}},
            "whole": {"extendedResourceName": "nvidia.com/gpu"},
            "sizes": [{"name": "gpumux-250", "compute": 250, "bounds": {"maxWeight": 4}}]
        },
        "mig": {"repartition": true},
        "metrics": {
            "authenticate": true,
            "podMonitor": {"enabled": true, "bearerTokenSecret": {"name": "scrape", "key": "token"}},
            "networkPolicy": {"enabled": true, "from": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]}
        },
        "fleet": {"enabled": true, "clusterIP": "10.96.0.40", "from": [{"ipBlock": {"cidr": "10.0.0.10/32"}}]}
    });
    let objects = render_with(&changes);
    objects.iter().for_each(check);
    let find = |kind: &str, name: &str| {
        let is = |object: &&Value| object["kind"] == kind && object["metadata"]["name"] == name;
        objects
            .iter()
            .find(is)
            .unwrap_or_else(|| panic!("no {kind} {name}"))
    };
    for name in ["gpumux-daemon", "gpumux-dra"] {
        let container = &find("DaemonSet", name)["spec"]["template"]["spec"]["containers"][0];
        assert!(
            container["env"].to_string().contains("GPUMUX_EMU_SOCKET"),
            "{name}"
        );
        assert_eq!(container["image"], "ghcr.io/gpumux/gpumux@sha256:00");
    }
    let daemon = find("DaemonSet", "gpumux-daemon").to_string();
    assert!(daemon.contains("/host/run/nvidia/driver/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1"));
    let driver =
        find("DaemonSet", "gpumux-dra")["spec"]["template"]["spec"]["containers"][0].clone();
    assert!(
        driver["command"]
            .to_string()
            .contains("--driver-root=/run/nvidia/driver")
    );
    assert!(driver["command"].to_string().contains("--mig-repartition"));
    find("DeviceClass", "gpumux-mig");
    assert_eq!(
        find("DeviceClass", "gpumux-whole")["spec"]["extendedResourceName"],
        "nvidia.com/gpu"
    );
    let bounds = |class: &str| {
        let class = find("DeviceClass", class);
        GpuShare::read(parameters(class)[0])
            .unwrap()
            .bounds
            .unwrap()
    };
    assert_eq!(bounds("gpumux-guaranteed").max_limit, Some(800));
    assert_eq!(bounds("gpumux-250").max_weight, Some(4.0));
    find("PodMonitor", "gpumux-dra");
    find("NetworkPolicy", "gpumux-dra");
    find("ClusterRole", "gpumux-metrics-reader");
    // The extender reads the cluster and changes nothing.
    for rule in find("ClusterRole", "gpumux-fleet")["rules"]
        .as_array()
        .unwrap()
    {
        assert_eq!(rule["verbs"], serde_json::json!(["list", "watch"]));
    }
    extender_is_where_the_scheduler_looks(&objects);
}

/// The recipe for the scheduler names an address, a path and a port that the chart's extender has. Field names are those of
/// kubescheduler.config.k8s.io/v1.
fn extender_is_where_the_scheduler_looks(objects: &[Value]) {
    use clap::{Args, FromArgMatches};
    let named = |kind: &str| {
        let mut found = objects.iter().filter(|object| object["kind"] == kind);
        let found = found.find(|object| object["metadata"]["name"] == "gpumux-fleet");
        found.unwrap_or_else(|| panic!("no {kind}"))
    };
    let text = std::fs::read_to_string(deploy().join("kubernetes/scheduler.yaml")).unwrap();
    let recipe = read(&text);
    let extender = recipe["extenders"][0].as_object().unwrap();
    let known = "urlPrefix filterVerb preemptVerb prioritizeVerb weight bindVerb enableHTTPS tlsConfig httpTimeout \
        nodeCacheCapable managedResources ignorable";
    for field in extender.keys() {
        assert!(known.split(' ').any(|known| known == field), "{field}");
    }
    let service = &named("Service")["spec"];
    let port = &service["ports"][0]["port"];
    let address = format!("http://{}:{port}", service["clusterIP"].as_str().unwrap());
    assert_eq!(extender["urlPrefix"], address);
    assert_eq!(extender["prioritizeVerb"], "prioritize");
    let container = &named("Deployment")["spec"]["template"]["spec"]["containers"][0];
    let command = container["command"].as_array().unwrap().iter();
    let command: Vec<&str> = command.map(|arg| arg.as_str().unwrap()).collect();
    assert_eq!(command[..3], ["gpumux", "fleet", "serve"]);
    let parser = gpumux_dra::extender::Args::augment_args(clap::Command::new("serve"));
    let matches = parser.get_matches_from(&command[2..]);
    let args = gpumux_dra::extender::Args::from_arg_matches(&matches).unwrap();
    assert_eq!(serde_json::json!(args.listen.port()), *port);
}

#[test]
fn the_driver_has_the_least_rights() {
    let objects = render();
    let role = objects
        .iter()
        .find(|object| object["kind"] == "ClusterRole")
        .unwrap();
    for rule in role["rules"].as_array().unwrap() {
        let text = rule.to_string();
        assert!(
            !text.contains('*') && !text.contains("secrets") && !text.contains("pods"),
            "{text}"
        );
    }
    for set in objects
        .iter()
        .filter(|object| object["kind"] == "DaemonSet")
    {
        let name = set["metadata"]["name"].as_str().unwrap();
        let pod = &set["spec"]["template"]["spec"];
        let containers = pod["containers"]
            .as_array()
            .unwrap()
            .iter()
            .chain(pod["initContainers"].as_array().into_iter().flatten());
        let privileged = containers
            .filter(|container| container["securityContext"]["privileged"] == true)
            .count();
        assert_eq!(privileged, usize::from(name == "gpumux-daemon"), "{name}");
        let sets = [
            &set["spec"]["selector"]["matchLabels"],
            &set["spec"]["template"]["metadata"]["labels"],
        ];
        assert_eq!(sets[0], sets[1], "{name}");
        if privileged == 0 {
            let text = pod.to_string();
            assert!(text.contains(r#""drop":["ALL"]"#), "{name}");
            for volume in pod["volumes"].as_array().unwrap() {
                assert_ne!(volume["hostPath"]["path"], "/", "{name}");
            }
            // A client that floods the port of the metrics must not restart it.
            let probe = &pod["containers"][0]["livenessProbe"];
            assert!(probe["exec"].is_object(), "{name}: {probe}");
        }
        // Each mount has its volume.
        let volumes: Vec<_> = pod["volumes"]
            .as_array()
            .unwrap()
            .iter()
            .map(|volume| &volume["name"])
            .collect();
        for mount in pod["containers"][0]["volumeMounts"].as_array().unwrap() {
            assert!(volumes.contains(&&mount["name"]), "{name}: {mount}");
        }
    }
}

#[test]
fn the_drivers_command_line_is_one_that_it_takes() {
    use clap::{Args, FromArgMatches};
    let objects = render();
    let dra = objects
        .iter()
        .find(|object| object["metadata"]["name"] == "gpumux-dra" && object["kind"] == "DaemonSet")
        .unwrap();
    let container = &dra["spec"]["template"]["spec"]["containers"][0];
    let command: Vec<_> = container["command"]
        .as_array()
        .unwrap()
        .iter()
        .map(|arg| arg.as_str().unwrap())
        .collect();
    assert_eq!(command[..2], ["gpumux", "dra"]);
    let parse = |command: &[&str]| {
        let parser = gpumux_dra::Args::augment_args(clap::Command::new("dra"));
        let environment = ["--node-name", "node1", "--instance", "pod-1"];
        let matches = parser.get_matches_from(command[1..].iter().copied().chain(environment));
        gpumux_dra::Args::from_arg_matches(&matches).unwrap()
    };
    let args = parse(&command);
    assert_eq!(args.host_root, PathBuf::from("/host"));
    // The probes ask this very instance.
    let socket = |args: gpumux_dra::Args| gpumux_dra::Config::from(args).places.health_socket();
    let own = socket(args);
    for (probe, check) in [
        ("readinessProbe", Check::Ready),
        ("livenessProbe", Check::Live),
    ] {
        let probe = container[probe]["exec"]["command"].as_array().unwrap();
        let probe: Vec<_> = probe.iter().map(|arg| arg.as_str().unwrap()).collect();
        let args = parse(&probe);
        assert_eq!(args.check, Some(check));
        assert_eq!(socket(args), own);
    }
    let variables: Vec<_> = container["env"]
        .as_array()
        .unwrap()
        .iter()
        .map(|env| env["name"].as_str().unwrap())
        .collect();
    assert!(
        ["NODE_NAME", "POD_UID", "GPUMUX_RUNTIME_DIR"]
            .iter()
            .all(|name| variables.contains(name))
    );
}

#[test]
fn the_image_has_what_the_chart_looks_for() {
    let recipe = std::fs::read_to_string(deploy().join("Containerfile")).unwrap();
    let values = std::fs::read_to_string(deploy().join("helm/gpumux/values.yaml")).unwrap();
    let libraries = read(&values)["image"]["libraries"]
        .as_str()
        .unwrap()
        .to_owned();
    let copied = |file: &str, to: &str| {
        let mut lines = recipe
            .lines()
            .filter(|line| line.starts_with("COPY --from=build"));
        lines.any(|line| line.contains(&format!("/{file} ")) && line.ends_with(&format!(" {to}/")))
    };
    assert!(copied("gpumux", "/usr/bin"));
    for library in ["libgpumux.so", "libgpumux_emu.so"] {
        assert!(copied(library, &libraries), "{library}");
    }
    // The compiler is the one that the workspace needs.
    let compiler = format!("rust:{}-", env!("CARGO_PKG_RUST_VERSION"));
    assert!(recipe.contains(&compiler), "{compiler}");
}
