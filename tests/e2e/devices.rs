//! Which devices a tenant may use, and what is admitted and seen there.

use gpumux_tests::{Node, Options, Process, Run, real};
use serde_json::Value;

use crate::TICKS;

/// Their UUIDs are in another order.
#[test]
fn devices_and_their_memory_are_listed_by_number() {
    if real() {
        eprintln!("SKIPPED: a machine with four devices is needed");
        return;
    }
    let node = Node::with(Options {
        devices: 4,
        ..Options::default()
    });
    let devices = node.get("/v1/devices");
    let numbers: Vec<_> = values(&devices, "index").collect();
    assert_eq!(numbers, [0, 1, 2, 3], "{devices:#}");
    let uuids: Vec<_> = values(&devices, "uuid").collect();
    assert!(!uuids.is_sorted_by_key(|it| it.as_str()), "{uuids:?}");
    let memory = node.get("/v1/memory");
    assert_eq!(values(&memory, "device").collect::<Vec<_>>(), uuids);
}

fn values<'a>(list: &'a Value, key: &'a str) -> impl Iterator<Item = &'a Value> {
    list.as_array()
        .into_iter()
        .flatten()
        .map(move |it| &it[key])
}

#[test]
fn guarantee_is_booked_on_the_devices_that_are_named() {
    let Some(node) = Node::with_two_devices() else {
        return;
    };
    let start = |name: &str, options: &str| {
        let options = format!("--name {name} --guaranteed 0.7 {options}");
        Process::start(&mut node.tenant(&options, TICKS))
    };
    let _a = start("a", "--gpu 0");
    let _b = start("b", "--gpu 1");
    let device = |name: &str| {
        let used = |tenant: &Value| !tenant["devices"].as_array().unwrap().is_empty();
        let tenant = node.wait_tenant(name, used);
        assert_eq!(tenant["devices"], tenant["may_use"], "{tenant:#}");
        tenant["devices"][0].as_str().unwrap().to_owned()
    };
    assert_ne!(device("a"), device("b"));
    // By what the program sees, too.
    let mut third = node.tenant("--name c --guaranteed 0.7", "true");
    let third = third.env("CUDA_VISIBLE_DEVICES", "1").run();
    assert_eq!(third.status.code(), Some(125), "{}", third.err);
    let expected = format!("of GPU 1 ({}", &device("b")[..8]);
    assert!(third.err.contains(&expected), "{}", third.err);
    assert!(third.err.contains("b (70%)"), "{}", third.err);
    let all = node.tenant("--name d --guaranteed 0.4", "true").run();
    assert_eq!(all.status.code(), Some(125), "{}", all.err);
}
