//! `examples/autoscaling`: fields against the schemas of the tools, queries as PromQL, metrics against those that there are.

use std::{collections::BTreeSet, path::PathBuf};

use gpumux_dra::metrics;
use serde_json::Value;

use crate::{
    chart::documents,
    queries::{series, types, under},
};

/// What engines and tools export themselves, and the files of their sources that have the name.
const OTHERS: [(&str, &str); 7] = [
    ("vllm:num_requests_waiting", VLLM),
    ("vllm:num_requests_running", VLLM),
    ("vllm:kv_cache_usage_perc", VLLM),
    ("sglang:num_queue_reqs", SGLANG),
    ("sglang:num_running_reqs", SGLANG),
    ("sglang:token_usage", SGLANG),
    (
        "dynamo_frontend_queued_requests",
        "Dynamo 1.6.1, lib/runtime/src/metrics/prometheus_names.rs",
    ),
];
const VLLM: &str = "vLLM 0.24.0, vllm/v1/metrics/loggers.py";
const SGLANG: &str = "SGLang 0.5.15, sglang/srt/observability/metrics_collector.py";

fn read(file: &str) -> Vec<Value> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../examples/autoscaling");
    let path = folder.join(file);
    let text = std::fs::read_to_string(&path)
        .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    documents(&text)
}

/// A schema's object: its fields, of which those with `!` are needed. The tools drop others without a word.
fn has_fields(object: &Value, fields: &str) {
    let there: BTreeSet<&str> = (object.as_object())
        .unwrap_or_else(|| panic!("{object} is no object"))
        .keys()
        .map(String::as_str)
        .collect();
    let known: BTreeSet<&str> = fields
        .split(' ')
        .map(|it| it.trim_end_matches('!'))
        .collect();
    let needed: BTreeSet<&str> = (fields.split(' '))
        .filter_map(|it| it.strip_suffix('!'))
        .collect();
    let unknown: Vec<_> = there.difference(&known).collect();
    let missing: Vec<_> = needed.difference(&there).collect();
    assert!(unknown.is_empty(), "{unknown:?} in {object}");
    assert!(missing.is_empty(), "{missing:?} in {object}");
}

fn is_a(object: &Value, version: &str, kind: &str) {
    assert_eq!(object["apiVersion"], version);
    assert_eq!(object["kind"], kind);
    has_fields(object, "apiVersion! kind! metadata! spec!");
    has_fields(&object["metadata"], "name! namespace!");
}

fn items<'a>(object: &'a Value, key: &str) -> &'a [Value] {
    object[key].as_array().map_or(&[], Vec::as_slice)
}

/// keda.sh/v1alpha1, and the parameters of its scaler for Prometheus.
fn check_scaled_object(object: &Value) {
    is_a(object, "keda.sh/v1alpha1", "ScaledObject");
    let spec = &object["spec"];
    has_fields(
        spec,
        "scaleTargetRef! triggers! minReplicaCount maxReplicaCount idleReplicaCount pollingInterval cooldownPeriod \
         initialCooldownPeriod fallback advanced",
    );
    has_fields(
        &spec["scaleTargetRef"],
        "apiVersion kind name! envSourceContainerName",
    );
    let triggers = items(spec, "triggers");
    assert!(!triggers.is_empty());
    for trigger in triggers {
        has_fields(
            trigger,
            "type! metadata! name metricType authenticationRef useCachedMetrics",
        );
        assert_eq!(trigger["type"], "prometheus");
        let metadata = &trigger["metadata"];
        has_fields(
            metadata,
            "serverAddress! query! threshold! activationThreshold queryParameters namespace customHeaders ignoreNullValues \
             unsafeSsl awsRegion timeout identityOwner",
        );
        // All of its parameters are texts.
        for value in metadata.as_object().unwrap().values() {
            assert!(value.is_string(), "{metadata}");
        }
        let threshold = metadata["threshold"].as_str().unwrap();
        threshold.parse::<f64>().unwrap();
        // An average value is divided by the replicas: that is right for a sum, and wrong for a ratio.
        let query = metadata["query"].as_str().unwrap();
        let is_ratio = query.contains(" / ") || query.starts_with("avg(");
        let kind = if is_ratio { "Value" } else { "AverageValue" };
        assert_eq!(trigger["metricType"], kind, "{query}");
    }
}

#[test]
fn the_examples_for_keda_and_dynamo_fit_their_schemas() {
    let keda = read("keda.yaml");
    assert_eq!(keda.len(), 1);
    check_scaled_object(&keda[0]);

    let dynamo = read("dynamo.yaml");
    let [adapter, scaled] = &dynamo[..] else {
        panic!("{} documents", dynamo.len())
    };
    let kind = "DynamoGraphDeploymentScalingAdapter";
    is_a(adapter, "nvidia.com/v1alpha1", kind);
    has_fields(&adapter["spec"], "dgdRef! replicas!");
    has_fields(&adapter["spec"]["dgdRef"], "name! serviceName!");
    check_scaled_object(scaled);
    let target = &scaled["spec"]["scaleTargetRef"];
    for key in ["apiVersion", "kind"] {
        assert_eq!(target[key], adapter[key]);
    }
    assert_eq!(target["name"], adapter["metadata"]["name"]);

    let planner = read("dynamo-planner.yaml").remove(0);
    // The planner itself takes any field, and ignores those that it has not.
    has_fields(
        &planner,
        "environment! backend! mode! optimization_target! decode_scale_up_kv_rate! decode_scale_down_kv_rate! min_endpoint!",
    );
    let rate = |name: &str| planner[name].as_f64().unwrap();
    assert!(rate("decode_scale_up_kv_rate") > rate("decode_scale_down_kv_rate"));
}

#[test]
fn the_example_for_aibrix_fits_its_schema() {
    let documents = read("aibrix.yaml");
    let [scaler, adapter] = &documents[..] else {
        panic!("{} documents", documents.len())
    };
    is_a(scaler, "autoscaling.aibrix.ai/v1alpha1", "PodAutoscaler");
    let spec = &scaler["spec"];
    has_fields(
        spec,
        "scaleTargetRef! maxReplicas! scalingStrategy! minReplicas metricsSources! observeWindowSeconds panicWindowSeconds \
         schedules subTargetSelector",
    );
    has_fields(&spec["scaleTargetRef"], "apiVersion! kind! name!");
    assert_eq!(spec["scalingStrategy"], "APA");
    let sources = items(spec, "metricsSources");
    assert_eq!(sources.len(), 1, "APA takes one");
    has_fields(
        &sources[0],
        "metricSourceType! targetMetric! targetValue! protocolType endpoint path port",
    );
    assert_eq!(sources[0]["metricSourceType"], "custom");
    assert!(sources[0]["targetValue"].is_string());
    let rules = items(&adapter["rules"], "custom");
    assert_eq!(rules.len(), 1);
    has_fields(&rules[0], "seriesQuery! resources! name! metricsQuery!");
    assert_eq!(rules[0]["name"]["as"], sources[0]["targetMetric"]);
}

/// llm-d.ai/v1alpha1, and the parameters of the plugins that are used.
#[test]
fn the_example_for_the_llm_d_router_fits_its_schema() {
    let config = read("llm-d.yaml").remove(0);
    has_fields(
        &config,
        "apiVersion! kind! plugins! schedulingProfiles! dataLayer featureGates flowControl requestHandler saturationDetector parser",
    );
    assert_eq!(config["apiVersion"], "llm-d.ai/v1alpha1");
    assert_eq!(config["kind"], "EndpointPickerConfig");
    let mut names = BTreeSet::new();
    for plugin in items(&config, "plugins") {
        has_fields(plugin, "type! name parameters");
        let kind = plugin["type"].as_str().unwrap();
        names.insert(plugin["name"].as_str().unwrap_or(kind));
        let parameters = &plugin["parameters"];
        match kind {
            "dcgm-data-source" => {
                has_fields(
                    parameters,
                    "scheme path port insecureSkipVerify useNodeAddress! interval",
                );
                assert_eq!(parameters["useNodeAddress"], true);
            }
            "endpoint-attribute-scorer" => {
                has_fields(parameters, "attributeKey! producer! algorithm!");
                // The key under which the extractor puts DCGM_FI_DEV_GPU_UTIL.
                assert_eq!(parameters["attributeKey"], "GPUUtilization");
                assert_eq!(parameters["producer"], "dcgm-extractor");
                has_fields(&parameters["algorithm"], "type! normalization!");
            }
            "dcgm-extractor" => assert_eq!(plugin["name"], "dcgm-extractor"),
            "queue-scorer"
            | "kv-cache-utilization-scorer"
            | "max-score-picker"
            | "single-profile-handler" => assert!(parameters.is_null()),
            other => panic!("{other} is no plugin of the router's that the example uses"),
        }
    }
    for source in items(&config["dataLayer"], "sources") {
        has_fields(source, "pluginRef! extractors!");
    }
    for profile in items(&config, "schedulingProfiles") {
        has_fields(profile, "name! plugins!");
    }
    let used = under(&config, "pluginRef");
    assert!(used.len() >= 6, "{used:?}");
    for name in used {
        assert!(names.contains(name), "there is no plugin {name}");
    }
    // Its parser reads only what gpumux exports as a gauge.
    let text = metrics::render(&metrics::Facts::default());
    assert!(text.contains("# TYPE DCGM_FI_DEV_GPU_UTIL gauge\n"));
}

#[test]
fn the_examples_queries_are_on_series_that_there_are() {
    let text = metrics::render(&metrics::Facts::default());
    let there = types(&text);
    let mut count = 0;
    for file in ["keda.yaml", "aibrix.yaml", "dynamo.yaml", "prometheus.yaml"] {
        let objects = read(file);
        let queries = ["query", "seriesQuery", "metricsQuery", "expr"].map(|key| {
            let found = objects.iter().flat_map(|object| under(object, key));
            found.collect::<Vec<_>>()
        });
        for query in queries.concat() {
            count += 1;
            for name in series(query) {
                let known = there.contains(name.as_str()) || OTHERS.iter().any(|it| it.0 == name);
                assert!(known, "{file}: there is no {name}: {query}");
            }
        }
    }
    assert_eq!(count, 10);
    for rule in items(&read("prometheus.yaml")[0]["groups"][0], "rules") {
        has_fields(rule, "record! expr!");
    }
}

/// Every metric of gpumux's that the text names is there.
#[test]
fn the_examples_text_names_metrics_that_there_are() {
    let text = include_str!("../../../../examples/autoscaling/README.md");
    let scrape = metrics::render(&metrics::Facts::default());
    let there = types(&scrape);
    let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || "_:".contains(c)));
    let own = |it: &&str| {
        ["gpumux_pod_", "vllm:", "sglang:"]
            .iter()
            .any(|of| it.starts_with(of))
    };
    let names: BTreeSet<&str> = words.filter(own).collect();
    assert!(names.len() >= 10, "{names:?}");
    for name in names {
        let other = OTHERS.iter().find(|it| it.0 == name);
        assert!(
            there.contains(name) || other.is_some(),
            "there is no {name}"
        );
        // The text names each of the sources.
        let source = other.map_or("", |it| it.1.split(',').next().unwrap());
        assert!(text.contains(source), "{source} has {name}");
    }
    for file in std::fs::read_dir(
        PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../examples/autoscaling"),
    )
    .unwrap()
    {
        let file = file.unwrap().file_name().into_string().unwrap();
        assert!(
            file == "README.md" || text.contains(&format!("`{file}`")),
            "{file}"
        );
    }
}
