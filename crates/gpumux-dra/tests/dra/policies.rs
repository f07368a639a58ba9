//! What is written in other languages, evaluated: the chart's CEL expressions on good and bad objects, and the book's PromQL.

use std::{collections::BTreeSet, sync::Arc};

use cel::{Context, Env, extractors::This};
use gpumux_dra::{metrics, quantity, slices};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use promql_parser::{
    parser::{self, Expr},
    util::{ExprVisitor, walk_expr},
};
use serde_json::{Value, json};

use crate::{
    chart::{documents, render},
    support::node::device,
};

/// CEL as the API server extends it, as far as the chart uses it.
fn context() -> Context<'static, 'static> {
    let mut context = Context::with_env(Arc::new(Env::stdlib()));
    let whole = |text: Arc<String>| quantity::parse(&Quantity(text.to_string())).unwrap() as i64;
    context.add_function("quantity", whole).unwrap();
    let compare = |This(this): This<i64>, other: i64| (this - other).signum();
    context.add_function("compareTo", compare).unwrap();
    context
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
    let objects = render();
    let policy = objects
        .iter()
        .find(|object| {
            object["kind"] == "ValidatingAdmissionPolicy" && object["metadata"]["name"] == policy
        })
        .unwrap();
    let mut context = context();
    for name in ["object", "oldObject"] {
        context.add_variable(name, request[name].clone()).unwrap();
    }
    context.add_variable("request", request.clone()).unwrap();
    let list = |name: &str| policy["spec"][name].as_array().cloned().unwrap_or_default();
    let applies = |condition: &Value| evaluate(&condition["expression"], &context) == true;
    if !list("matchConditions").iter().all(applies) {
        return Vec::new();
    }
    let mut variables = json!({});
    for variable in list("variables") {
        // Each may use those before it.
        context
            .add_variable("variables", variables.clone())
            .unwrap();
        let name = variable["name"].as_str().unwrap();
        variables[name] = evaluate(&variable["expression"], &context);
    }
    context.add_variable("variables", variables).unwrap();
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
        (
            json!({"devices": {"requests": [{"name": "gpu", "firstAvailable": [{"name": "big"}]}]}}),
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
            Some("gives a whole GPU"),
        ),
    ] {
        let of = |policy: &str, object: Value| {
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
    let published = slices::build(&node, &[device(0)], 1);
    let selected = |class: &str| -> Vec<String> {
        let objects = render();
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
            let seen = json!({"driver": gpumux_dra::DRIVER, "allowMultipleAllocations": shared});
            context.add_variable("device", seen).unwrap();
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
}

/// The series that a query reads.
#[derive(Default)]
struct Names(BTreeSet<String>);

impl ExprVisitor for Names {
    type Error = ();

    fn pre_visit(&mut self, expression: &Expr) -> Result<bool, ()> {
        match expression {
            Expr::VectorSelector(selector) => self.0.extend(selector.name.clone()),
            Expr::MatrixSelector(selector) => self.0.extend(selector.vs.name.clone()),
            _ => {}
        }
        Ok(true)
    }
}

/// The fenced blocks of the chapter on Kubernetes in a language.
fn blocks(language: &str) -> Vec<&'static str> {
    let text = include_str!("../../../../docs/kubernetes.md");
    let fence = format!("```{language}\n");
    let blocks = text.split(fence.as_str()).skip(1);
    blocks
        .map(|rest| rest.split("```").next().unwrap())
        .collect()
}

/// Everything under this key somewhere in an object.
fn under<'a>(object: &'a Value, key: &str) -> Vec<&'a str> {
    match object {
        Value::Object(map) => {
            let own = map.get(key).and_then(Value::as_str);
            own.into_iter()
                .chain(map.values().flat_map(|value| under(value, key)))
                .collect()
        }
        Value::Array(items) => items.iter().flat_map(|item| under(item, key)).collect(),
        _ => Vec::new(),
    }
}

#[test]
fn the_books_queries_are_promql_on_series_that_there_are() {
    let text = metrics::render(&metrics::Facts::default());
    let there: BTreeSet<_> = text
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next())
        .collect();
    let objects: Vec<_> = blocks("yaml").into_iter().flat_map(documents).collect();
    let mut queries: Vec<String> = blocks("promql").into_iter().map(str::to_owned).collect();
    for key in ["query", "metricsQuery", "seriesQuery"] {
        queries.extend(
            objects
                .iter()
                .flat_map(|object| under(object, key))
                .map(str::to_owned),
        );
    }
    assert_eq!(queries.len(), 5);
    for query in queries {
        // What the adapter for Prometheus puts there.
        let query = query
            .replace("<<.LabelMatchers>>", r#"namespace="prod""#)
            .replace("<<.GroupBy>>", "pod");
        let parsed = parser::parse(&query).unwrap_or_else(|error| panic!("{query}: {error}"));
        let mut names = Names::default();
        walk_expr(&mut names, &parsed).unwrap();
        assert!(!names.0.is_empty(), "{query}");
        for name in &names.0 {
            assert!(there.contains(name.as_str()), "{query}: there is no {name}");
        }
    }
}
