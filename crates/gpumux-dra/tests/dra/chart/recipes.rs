//! Recipes and examples beside the chart.

use super::*;

/// What the recipe uses of Kueue's objects (kueue.x-k8s.io/v1beta1): all fields are named, so that none is misspelt.
fn check_kueue(object: &Value) {
    let keys =
        |value: &Value| -> Vec<String> { value.as_object().unwrap().keys().cloned().collect() };
    assert_eq!(object["apiVersion"], "kueue.x-k8s.io/v1beta1");
    let spec = &object["spec"];
    match object["kind"].as_str().unwrap() {
        "ResourceFlavor" => assert!(keys(spec).is_empty()),
        "LocalQueue" => assert_eq!(keys(spec), ["clusterQueue"]),
        "ClusterQueue" => {
            assert_eq!(keys(spec), ["namespaceSelector", "resourceGroups"]);
            let group = &spec["resourceGroups"][0];
            assert_eq!(keys(group), ["coveredResources", "flavors"]);
            let flavor = &group["flavors"][0];
            assert_eq!(keys(flavor), ["name", "resources"]);
            let resources = flavor["resources"].as_array().unwrap();
            let names: Vec<_> = resources.iter().map(|it| it["name"].clone()).collect();
            assert_eq!(Value::from(names), group["coveredResources"]);
            assert!(
                resources
                    .iter()
                    .all(|it| keys(it) == ["name", "nominalQuota"])
            );
        }
        other => panic!("kind {other} is not expected here"),
    }
}

#[test]
fn the_recipe_for_kueue_is_consistent() {
    let text = std::fs::read_to_string(deploy().join("kubernetes/kueue.yaml")).unwrap();
    let mut kinds = Vec::new();
    for object in documents(&text) {
        match object["apiVersion"].as_str().unwrap().starts_with("kueue") {
            true => check_kueue(&object),
            false => check(&object),
        }
        // Kueue admits no parameters of claims.
        assert!(parameters(&object).is_empty());
        kinds.push(object["kind"].as_str().unwrap().to_owned());
    }
    assert_eq!(
        kinds,
        [
            "ResourceFlavor",
            "ClusterQueue",
            "LocalQueue",
            "ResourceClaimTemplate",
            "Job"
        ]
    );
}

#[test]
fn the_examples_are_what_kubernetes_and_the_driver_know() {
    let mut shares = 0;
    for entry in std::fs::read_dir(deploy().join("examples")).unwrap() {
        let path = entry.unwrap().path();
        for object in documents(&std::fs::read_to_string(&path).unwrap()) {
            check(&object);
            for parameters in parameters(&object) {
                let share = GpuShare::read(parameters)
                    .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
                // What an example shows must be what this version can keep.
                let some = gpumux_dra::model::Amounts {
                    compute: 50,
                    memory: 1 << 30,
                    clients: 1,
                };
                share
                    .spec(&some, None)
                    .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
                shares += 1;
            }
        }
    }
    assert_eq!(shares, 2);
}
