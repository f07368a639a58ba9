//! The tests' own API server and scheduler answer as the real ones did; and what the driver publishes is what the
//! real API server takes.

use gpumux_dra::slices;
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::{Api, api::PostParams};
use serde_json::Value;

use crate::support::{api, node::device, scheduler::Scheduler};

#[tokio::test]
async fn the_api_server_takes_and_refuses_what_the_real_one_did() {
    let recorded: Value =
        serde_json::from_str(include_str!("../data/resourceslice-validation.json")).unwrap();
    let server = api::Api::start().await;
    let client: Api<kube::api::DynamicObject> = Api::all_with(
        server.client.clone(),
        &kube::api::ApiResource::erase::<ResourceSlice>(&()),
    );
    let cases = recorded["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 25);
    for case in cases {
        let object = serde_json::from_value(case["request"].clone()).unwrap();
        let answer = client.create(&PostParams::default(), &object).await;
        let name = &case["case"];
        let code = match &answer {
            Ok(_) => 201,
            Err(kube::Error::Api(status)) => status.code,
            Err(error) => panic!("{name}: {error}"),
        };
        assert_eq!(
            code,
            case["code"].as_u64().unwrap() as u16,
            "{name}: {answer:?}"
        );
        let Some(causes) = case["causes"].as_array() else {
            continue;
        };
        let typed: ResourceSlice = serde_json::from_value(case["request"].clone()).unwrap();
        let mut found = api::check(&typed).unwrap_err().causes;
        // Fields of a map come in any order.
        found.sort_by(|a, b| a.field.cmp(&b.field));
        let mut causes = causes.clone();
        causes.sort_by_key(|cause| cause["field"].as_str().unwrap().to_owned());
        assert_eq!(found.len(), causes.len(), "{name}: {found:?}");
        for (found, recorded) in found.iter().zip(&causes) {
            assert_eq!(found.field, recorded["field"].as_str().unwrap(), "{name}");
            assert_eq!(found.reason, recorded["reason"].as_str().unwrap(), "{name}");
            // How the server prints a value with two kinds is its own business.
            if name != "attr-two-values" {
                assert_eq!(
                    found.message,
                    recorded["message"].as_str().unwrap(),
                    "{name}"
                );
            }
        }
    }
}

#[test]
fn the_scheduler_allocates_what_the_real_one_did() {
    let recorded: Vec<Value> =
        serde_json::from_str(include_str!("../data/allocations.json")).unwrap();
    let kind = |wanted: &'static str| {
        recorded
            .iter()
            .filter(move |object| object["kind"] == wanted)
    };
    let slices: Vec<ResourceSlice> = kind("ResourceSlice")
        .map(|slice| serde_json::from_value(slice.clone()).unwrap())
        .collect();
    let mut claims: Vec<_> = kind("ResourceClaim").collect();
    claims.sort_by_key(|claim| {
        claim["metadata"]["creationTimestamp"]
            .as_str()
            .unwrap()
            .to_owned()
    });
    assert_eq!((slices.len(), claims.len()), (2, 6));
    let mut scheduler = Scheduler::default();
    for claim in claims {
        let name = &claim["metadata"]["name"];
        let found = scheduler.allocate(&slices, claim);
        let recorded = claim
            .pointer("/status/allocation/devices/results")
            .and_then(Value::as_array);
        assert_eq!(found.is_some(), recorded.is_some(), "{name}");
        for (found, recorded) in found.iter().flatten().zip(recorded.into_iter().flatten()) {
            for field in ["request", "driver", "pool", "device", "consumedCapacity"] {
                assert_eq!(found[field], recorded[field], "{name} {field}");
            }
        }
    }
}

#[test]
fn what_a_node_publishes_is_within_the_limits() {
    let node = slices::Node {
        name: "node1".into(),
        uid: "u".into(),
    };
    // 8 GPUs as they are, and as 7 MIG instances each.
    for count in [1, 8, 56] {
        let devices: Vec<_> = (0..count).map(device).collect();
        let specs = slices::build(&node, &devices, 3);
        let published: usize = specs
            .iter()
            .map(|spec| spec.devices.as_ref().map_or(0, Vec::len))
            .sum();
        assert_eq!(published, 2 * count as usize);
        for (index, spec) in specs.into_iter().enumerate() {
            let slice = slices::object(&node, index, spec);
            assert_eq!(slice.spec.pool.generation, 3);
            api::check(&slice).unwrap();
        }
    }
}
