//! MIG instances: devices of their own. gpumux shares them like GPUs, and never makes any. On the emulated device only.

use gpumux_tests::{Node, Options, PATIENCE, Process, Run, binary, real, wait_for};
use serde_json::Value;

use crate::{REQUESTS, TICKS};

const SMALL_MIB: u64 = 9_984;
const LARGE_MIB: u64 = 20_096;

/// A device of so many bytes (0: 80 GiB) with two instances, and their UUIDs, the smaller one first.
fn partitioned(memory: u64) -> Option<(Node, [String; 2])> {
    if real() {
        eprintln!("SKIPPED: it needs the emulated device");
        return None;
    }
    let node = Node::with(Options {
        profile: "mig = [['2g.20gb', '1g.10gb']]\n",
        memory,
        ..Options::default()
    });
    let instances = wait_for("both instances", PATIENCE, || {
        let listing = node.gpumux(["memory", "--json"]).run().ok().json();
        let mut devices = listing["devices"].as_array()?.clone();
        devices.sort_by_key(|it| it["total"].as_u64());
        let uuids = devices.iter().filter_map(|it| it["device"].as_str());
        let uuids: Vec<_> = uuids.map(str::to_owned).collect();
        assert!(uuids.iter().all(|it| it.starts_with("MIG-")), "{uuids:?}");
        let whole = if memory == 0 { 80 << 30 } else { memory };
        let of = |mib| whole * mib / (80 << 10);
        let totals = [of(SMALL_MIB), of(LARGE_MIB)];
        let uuids = uuids.try_into().ok()?;
        assert!(
            devices.iter().map(|it| it["total"].clone()).eq(totals),
            "{listing:#}"
        );
        Some(uuids)
    });
    Some((node, instances))
}

/// A tenant that sees this instance.
fn on(node: &Node, instance: &str, options: &str, program: &str) -> Process {
    let mut command = node.tenant(options, program);
    Process::start(command.env("CUDA_VISIBLE_DEVICES", instance))
}

#[test]
fn instances_are_listed_instead_of_their_gpu() {
    let Some((node, [small, large])) = partitioned(0) else {
        return;
    };
    // The controls of each, and the first where none is named: here the larger one.
    let doctor = |instance: Option<&String>| {
        let mut command =
            node.on_device([binary().into_os_string(), "doctor".into(), "--json".into()]);
        command.envs(instance.map(|it| ("CUDA_VISIBLE_DEVICES", it)));
        let report = command.run().ok().json();
        assert_eq!(report["devices"].as_array().map(Vec::len), Some(1));
        report["devices"][0]["uuid"].clone()
    };
    assert_eq!(doctor(None), *large);
    assert_eq!(doctor(Some(&small)), *small);
}

#[test]
fn tenants_share_one_instance_and_leave_the_other_alone() {
    let Some((node, [shared, other])) = partitioned(0) else {
        return;
    };
    let domain = |tenant: &Value, what: &str| tenant["domains"][0][what].clone();
    let mut alone = on(&node, &other, "--class batch --name alone", TICKS);
    let _serve = on(&node, &shared, "--class latency --name serve", REQUESTS);
    let _train = on(&node, &shared, "--class batch --name train", TICKS);
    let running = node.dir().join("running");
    let check = format!(
        "gpumux workload check --json --memory 64MiB --ready-file {}",
        running.display()
    );
    let check = on(&node, &shared, "--class batch --name check", &check);
    wait_for("the kernel to run", PATIENCE, || {
        running.exists().then_some(())
    });
    // The latency tenant goes first, and the batch tenants take turns.
    let serve = node.wait_tenant("serve", |it| domain(it, "timeslice_us") == 1_000_000);
    let train = node.wait_tenant("train", |it| domain(it, "freezes").as_u64() >= Some(3));
    for tenant in [serve, train] {
        assert_eq!(domain(&tenant, "device"), *shared, "{tenant:#}");
    }
    let lines = alone.lines();
    alone.wait_lines(lines + 20);
    let tenant = node.find_tenant("alone").unwrap();
    assert_eq!(domain(&tenant, "device"), *other, "{tenant:#}");
    assert_eq!(domain(&tenant, "freezes"), 0, "{tenant:#}");
    assert_ne!(domain(&tenant, "timeslice_us"), 1, "{tenant:#}");
    let report = check.finish().ok().json();
    assert_eq!(report["mismatches"], 0, "{report:#}");
    assert_eq!(report["sum_matches"], true, "{report:#}");
}

/// An instance has its own memory: what one lacks, the other still has.
#[test]
fn memory_is_the_instances_own() {
    let Some((node, [small, large])) = partitioned(2 << 30) else {
        return;
    };
    let check = "gpumux workload --json check --seconds 0.1 --memory 300MiB";
    let much = on(&node, &small, "--name much", check).finish();
    assert!(much.err.contains("OUT_OF_MEMORY"), "{much:#?}");
    on(&node, &large, "--name fits", check).finish().ok();
}

/// Sharing in space, inside of an instance.
#[test]
fn a_trust_domain_is_a_group_in_its_instance() {
    let Some((node, [_, large])) = partitioned(0) else {
        return;
    };
    let start = |name: &str| {
        on(
            &node,
            &large,
            &format!("--class batch --trust team --name {name}"),
            TICKS,
        )
    };
    let mut members = ["a", "b"].map(start);
    for member in &mut members {
        member.wait_lines(5);
    }
    let [a, b] = ["a", "b"].map(|name| {
        let tenant = node.wait_tenant(name, |it| it["domains"][0]["group"].is_u64());
        tenant["domains"][0].clone()
    });
    assert_eq!(a["group"], b["group"]);
    assert_eq!(
        (a["device"].as_str(), b["device"].as_str()),
        (Some(&*large), Some(&*large))
    );
}
