//! The chart's CEL expressions, evaluated on good and bad objects.

use std::{collections::HashMap, sync::Arc};

use cel::{Context, Env, extractors::This};
use gpumux_dra::{quantity, slices};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use serde_json::{Value, json};

use crate::{chart::render_with, support::node::device};

/// CEL as the API server extends it, as far as the chart uses it.
fn context() -> Context<'static, 'static> {
    let mut context = Context::with_env(Arc::new(Env::stdlib()));
    let whole = |text: Arc<String>| quantity::parse(&Quantity(text.to_string())).unwrap() as i64;
    context.add_function("quantity", whole).unwrap();
    let is_quantity = |text: Arc<String>| quantity::parse(&Quantity(text.to_string())).is_ok();
    context.add_function("isQuantity", is_quantity).unwrap();
    let compare = |This(this): This<i64>, other: i64| (this - other).signum();
    context.add_function("compareTo", compare).unwrap();
    let split = |This(this): This<Arc<String>>, at: Arc<String>| {
        let parts = this.split(at.as_str());
        let parts = parts.map(|part| cel::Value::String(Arc::new(part.to_owned())));
        cel::Value::List(Arc::new(parts.collect()))
    };
    context.add_function("split", split).unwrap();
    context
}

/// As the API server reads JSON: a whole number is an int, whatever its sign.
fn read(value: &Value) -> cel::Value {
    match value {
        Value::Null => cel::Value::Null,
        Value::Bool(flag) => (*flag).into(),
        Value::String(text) => text.as_str().into(),
        Value::Array(items) => items.iter().map(read).collect::<Vec<_>>().into(),
        Value::Object(fields) => {
            let fields = fields.iter();
            let fields: HashMap<_, _> = fields
                .map(|(name, value)| (name.clone(), read(value)))
                .collect();
            fields.into()
        }
        Value::Number(number) => match number.as_i64() {
            Some(whole) => whole.into(),
            None => number.as_f64().unwrap().into(),
        },
    }
}

fn evaluate(expression: &Value, context: &Context<'_, '_>) -> Value {
    let text = expression.as_str().unwrap();
    let program = Env::stdlib()
        .compile(text)
        .unwrap_or_else(|error| panic!("{text}: {error}"));
    let value = program
        .execute(context)
        .unwrap_or_else(|error| panic!("{text}: {error}"));
    value.json().unwrap()
}

/// What the chart's policy of this name says about a request; nothing if it lets it pass.
fn refusals(policy: &str, request: &Value) -> Vec<String> {
    let sizes = json!([{"name": "gpumux-250", "compute": 250, "bounds": {}}]);
    let objects = render_with(&json!({"classes": {"sizes": sizes}}));
    let policy = objects
        .iter()
        .find(|object| {
            object["kind"] == "ValidatingAdmissionPolicy" && object["metadata"]["name"] == policy
        })
        .unwrap();
    let mut context = context();
    for name in ["object", "oldObject", "namespaceObject"] {
        context.add_variable_from_value(name, read(&request[name]));
    }
    context.add_variable_from_value("request", read(request));
    let list = |name: &str| policy["spec"][name].as_array().cloned().unwrap_or_default();
    let applies = |condition: &Value| evaluate(&condition["expression"], &context) == true;
    if !list("matchConditions").iter().all(applies) {
        return Vec::new();
    }
    let mut variables = json!({});
    for variable in list("variables") {
        // Each may use those before it.
        context.add_variable_from_value("variables", read(&variables));
        let name = variable["name"].as_str().unwrap();
        variables[name] = evaluate(&variable["expression"], &context);
    }
    context.add_variable_from_value("variables", read(&variables));
    let mut found = Vec::new();
    for validation in list("validations") {
        if evaluate(&validation["expression"], &context) != true {
            let message = match validation.get("messageExpression") {
                Some(expression) => evaluate(expression, &context),
                None => validation["message"].clone(),
            };
            found.push(message.as_str().unwrap().to_owned());
        }
    }
    found
}

#[test]
fn impossible_claims_are_refused_with_the_reason() {
    let exactly = |class: &str, requests: Value| {
        let exactly = json!({"deviceClassName": class, "capacity": {"requests": requests}});
        json!({"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}})
    };
    let either = |class: &str, requests: Value| {
        let share =
            json!({"name": "one", "deviceClassName": class, "capacity": {"requests": requests}});
        let good = json!({"name": "two", "deviceClassName": "gpumux-preemptible"});
        json!({"devices": {"requests": [{"name": "gpu", "firstAvailable": [good, share]}]}})
    };
    let with = |fields: Value| {
        let mut spec = exactly("gpumux-guaranteed", json!({"compute": "500"}));
        let mut parameters =
            json!({"apiVersion": "config.gpumux.dev/v1alpha1", "kind": "GpuShare"});
        parameters
            .as_object_mut()
            .unwrap()
            .extend(fields.as_object().unwrap().clone());
        spec["devices"]["config"] = json!([
            {"opaque": {"driver": "gpumux.dev", "parameters": parameters}},
            {"opaque": {"driver": "other.dev", "parameters": {"any": "thing"}}}
        ]);
        spec
    };
    let nothing = json!({"deviceClassName": "gpumux-guaranteed"});
    for (spec, reason) in [
        (
            exactly(
                "gpumux-guaranteed",
                json!({"compute": "500", "memory": "4Gi"}),
            ),
            None,
        ),
        (
            exactly(
                "gpumux-guaranteed",
                json!({"compute": "1k", "clients": "1"}),
            ),
            None,
        ),
        (
            exactly("gpumux-preemptible", json!({"memory": "4Gi"})),
            None,
        ),
        (exactly("gpumux-preemptible", json!({"compute": "0"})), None),
        (exactly("gpu.example.com", json!({"cores": "5000"})), None),
        (json!({}), None),
        // The real API server's objects have the field always.
        (json!({"devices": {"requests": null}}), None),
        (
            json!({"devices": {"requests": [{"name": "gpu", "firstAvailable":
                [{"name": "big", "deviceClassName": "gpu.example.com"}]}]}}),
            None,
        ),
        (
            exactly("gpumux-guaranteed", json!({"memory": "4Gi"})),
            Some("needs guaranteed compute"),
        ),
        (
            exactly("gpumux-guaranteed", json!({"compute": "0"})),
            Some("needs guaranteed compute"),
        ),
        (
            json!({"devices": {"requests": [{"name": "gpu", "exactly": nothing}]}}),
            Some("needs guaranteed compute"),
        ),
        (
            exactly("gpumux-guaranteed", json!({"compute": "1001"})),
            Some("more than 1000 milli-GPU"),
        ),
        (
            exactly("gpumux-preemptible", json!({"compute": "10"})),
            Some("has no guaranteed compute"),
        ),
        (
            exactly("gpumux-preemptible", json!({"cores": "10"})),
            Some("no GPU has another one"),
        ),
        (
            exactly("gpumux-whole", json!({"memory": "4Gi"})),
            Some("give a whole device"),
        ),
        (
            exactly("gpumux-mig", json!({"memory": "4Gi"})),
            Some("give a whole device"),
        ),
        (exactly("gpumux-250", json!({"compute": "250"})), None),
        (
            exactly("gpumux-250", json!({"compute": "500"})),
            Some("Class gpumux-250 has one size"),
        ),
        (either("gpumux-guaranteed", json!({"compute": "500"})), None),
        (
            either("gpumux-guaranteed", json!({"compute": "1001"})),
            Some("more than 1000 milli-GPU"),
        ),
        (
            either("gpumux-preemptible", json!({"compute": "10"})),
            Some("has no guaranteed compute"),
        ),
        (
            either("gpumux-whole", json!({"memory": "4Gi"})),
            Some("give a whole device"),
        ),
        (
            with(json!({"class": "latency", "burst": 0, "weight": 2})),
            None,
        ),
        (
            with(json!({"weight": 0.5, "sleep": {"afterSeconds": 5}})),
            None,
        ),
        (with(json!({"prio": 1})), Some("has the fields tier")),
        (
            with(json!({"bounds": {}})),
            Some("`bounds` is for DeviceClasses"),
        ),
        (with(json!({"kind": "GpuConfig"})), Some("kind GpuShare")),
        (
            with(json!({"class": "urgent"})),
            Some("latency, standard or batch"),
        ),
        (with(json!({"limit": 5})), Some("limit of 10 to 1000")),
        (
            with(json!({"limit": 500, "burst": 5})),
            Some("but not both"),
        ),
        (
            with(json!({"weight": 1001})),
            Some("weight is 0.001 to 1000"),
        ),
        (with(json!({"sleep": {}})), Some("sleep.afterSeconds")),
        (with(json!({"sleep": 5})), Some("sleep.afterSeconds")),
        (
            with(json!({"sleep": {"afterSeconds": 5, "more": 1}})),
            Some("sleep.afterSeconds"),
        ),
        (with(json!({"limit": "500"})), Some("limit of 10 to 1000")),
        (with(json!({"limit": 500.5})), Some("limit of 10 to 1000")),
        (
            with(json!({"weight": "2"})),
            Some("weight is 0.001 to 1000"),
        ),
        (
            with(json!({"memoryLimit": "8Gi", "trustDomain": "team-a"})),
            None,
        ),
        (with(json!({"memoryLimit": "requested"})), None),
        (with(json!({"memoryLimit": "lots"})), Some("memoryLimit is")),
        (with(json!({"memoryLimit": 5})), Some("memoryLimit is")),
        (with(json!({"trustDomain": 5})), Some("trustDomain is")),
    ] {
        let of = |policy: &str, mut object: Value| {
            object["metadata"] = json!({});
            refusals(policy, &json!({"operation": "CREATE", "object": object}))
        };
        let claim = of("gpumux-claims", json!({"spec": spec}));
        assert_eq!(
            claim,
            of("gpumux-claim-templates", json!({"spec": {"spec": spec}})),
            "{spec}"
        );
        match reason {
            None => assert!(claim.is_empty(), "{spec}: {claim:?}"),
            Some(reason) => {
                assert_eq!(claim.len(), 1, "{spec}: {claim:?}");
                assert!(claim[0].contains(reason), "{spec}: {claim:?}");
            }
        }
    }
}

#[test]
fn namespaces_can_be_bounded() {
    let allowed = json!({"metadata": {"annotations": {
        "gpumux.dev/device-classes": "gpumux-guaranteed,gpumux-preemptible",
        "gpumux.dev/max-compute": "300", "gpumux.dev/classes": "standard,batch", "gpumux.dev/max-weight": "4"}}});
    let claim = |class: &str, compute: &str, share: Value| {
        let mut parameters =
            json!({"apiVersion": "config.gpumux.dev/v1alpha1", "kind": "GpuShare"});
        parameters
            .as_object_mut()
            .unwrap()
            .extend(share.as_object().unwrap().clone());
        json!({"metadata": {}, "spec": {"devices": {
            "requests": [{"name": "gpu", "exactly": {"deviceClassName": class, "capacity": {"requests": {"compute": compute}}}}],
            "config": [{"opaque": {"driver": "gpumux.dev", "parameters": parameters}}]}}})
    };
    let refused = |operation: &str, object: &Value, old: &Value| {
        let request = json!({"operation": operation, "object": object, "oldObject": old, "namespaceObject": allowed});
        refusals("gpumux-claims", &request).join(" ")
    };
    let made = |object: Value| refused("CREATE", &object, &Value::Null);
    let good = claim(
        "gpumux-guaranteed",
        "300",
        json!({"class": "batch", "weight": 4}),
    );
    assert_eq!(made(good.clone()), "");
    let none = json!({});
    for (object, why) in [
        (
            claim("gpumux-guaranteed", "310", none.clone()),
            "at most 300 milli-GPU",
        ),
        (
            claim("gpumux-250", "250", none.clone()),
            "the DeviceClasses gpumux-guaranteed,gpumux-preemptible of gpumux only",
        ),
        (
            claim("gpumux-guaranteed", "100", json!({"class": "latency"})),
            "classes standard,batch only",
        ),
        (
            claim("gpumux-guaranteed", "100", json!({"weight": 5})),
            "weight is at most 4",
        ),
    ] {
        let said = made(object);
        assert!(said.contains(why), "{said}");
    }
    assert_eq!(
        made(claim("gpu.example.com", "100000", none)),
        "",
        "other drivers' classes are not its business"
    );
    // A resize keeps within the same bounds; anything else about an old claim is not looked at.
    let resized = |text: &str| {
        let mut object = good.clone();
        object["metadata"] = json!({"annotations": {"gpumux.dev/share": text}});
        refused("UPDATE", &object, &good)
    };
    assert_eq!(resized(r#"{"compute": 100, "limit": 200}"#), "");
    for evasion in [
        r#"{"weight": 1000}"#,
        r#"{"class": "latency"}"#,
        r#"{"\u0063lass": "latency"}"#,
    ] {
        assert!(resized(evasion).contains("may not change"), "{evasion}");
    }
    let bad = claim("gpumux-guaranteed", "900", json!({"prio": 1}));
    assert_eq!(refused("UPDATE", &bad, &bad), "", "its finalizer can go");
}

#[test]
fn a_drivers_pod_changes_the_slices_of_its_node_only() {
    let slice = |node: &str, driver: &str| json!({"spec": {"nodeName": node, "driver": driver}});
    let request = |user: &str, extra: Value, object: Value| {
        json!({"operation": "UPDATE", "object": object, "userInfo": {
            "username": format!("system:serviceaccount:gpumux-system:{user}"), "extra": extra}})
    };
    let on = |node: &str| json!({"authentication.kubernetes.io/node-name": [node]});
    let own = slice("node1", "gpumux.dev");
    let refused = |request: Value| refusals("gpumux-own-slices", &request).join(" ");
    assert_eq!(refused(request("gpumux-dra", on("node1"), own.clone())), "");
    let other = refused(request("gpumux-dra", on("node2"), own.clone()));
    assert_eq!(
        other,
        "This pod runs on node node2 and may only change its slices."
    );
    assert!(refused(request("gpumux-dra", json!({}), own.clone())).contains("names no node"));
    let foreign = slice("node1", "gpu.example.com");
    assert!(
        refused(request("gpumux-dra", on("node1"), foreign.clone()))
            .contains("of driver gpumux.dev")
    );
    assert_eq!(
        refused(request("somebody", on("node1"), foreign)),
        "",
        "others are not its business"
    );
    // What is deleted is the old object.
    let mut gone = request("gpumux-dra", on("node2"), Value::Null);
    gone["operation"] = json!("DELETE");
    gone["oldObject"] = own;
    assert!(refused(gone).contains("node2"));
}

#[test]
fn each_class_selects_its_devices() {
    let node = slices::Node {
        name: "node1".into(),
        uid: "u".into(),
    };
    let place = gpumux_dra::mig::Place {
        gpu: "GPU-1".into(),
        profile: "1g.10gb".into(),
        start: 3,
        memory_slices: 1,
    };
    let made = gpumux_dra::device::Device {
        name: "gpu-1-mig-1g-10gb-at-3".into(),
        offer: Some(gpumux_dra::mig::Offer {
            place,
            slices: 1,
            slices_free: 7,
            most: 7,
            recorded: false,
        }),
        ..device(1)
    };
    let published = slices::build(&node, &[device(0), made], 1);
    let selected = |class: &str| -> Vec<String> {
        let objects = render_with(&json!({"mig": {"repartition": true}}));
        let class = objects
            .iter()
            .find(|object| object["kind"] == "DeviceClass" && object["metadata"]["name"] == class)
            .unwrap();
        let devices = published
            .iter()
            .flat_map(|slice| slice.devices.iter().flatten());
        let good = |device: &&k8s_openapi::api::resource::v1::Device| {
            let mut context = context();
            let shared = device.allow_multiple_allocations.unwrap_or(false);
            let attributes = serde_json::to_value(&device.attributes).unwrap();
            let seen = json!({"driver": gpumux_dra::DRIVER, "allowMultipleAllocations": shared,
                "attributes": {gpumux_dra::DRIVER: attributes}});
            context.add_variable_from_value("device", read(&seen));
            let selectors = class["spec"]["selectors"].as_array().unwrap();
            selectors
                .iter()
                .all(|one| evaluate(&one["cel"]["expression"], &context) == true)
        };
        devices
            .filter(good)
            .map(|device| device.name.clone())
            .collect()
    };
    assert_eq!(selected("gpumux-guaranteed"), ["gpu-0"]);
    assert_eq!(selected("gpumux-preemptible"), ["gpu-0"]);
    assert_eq!(selected("gpumux-whole"), ["gpu-0-whole"]);
    assert_eq!(selected("gpumux-mig"), ["gpu-1-mig-1g-10gb-at-3"]);
}
