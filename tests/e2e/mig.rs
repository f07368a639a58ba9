//! MIG instances: devices of their own. gpumux shares them like GPUs, and makes and removes them when root asks. On the emulated device only.

use std::{
    ffi::OsStr,
    fs::{Permissions, set_permissions},
    os::unix::fs::PermissionsExt,
    process::Command,
};

use gpumux_tests::{Node, Options, PATIENCE, Process, Run, binary, real, wait_for};
use serde_json::{Value, json};

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
        "gpumux workload check --json --memory 64MiB --rounds 10000 --ready-file {}",
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

/// A request to the daemon's API as root: status and answer.
fn api(node: &Node, method: &str, path: &str, body: &Value) -> (u16, Value) {
    let body = match body {
        Value::Null => String::new(),
        body => body.to_string(),
    };
    let (status, answer) = node.request(method, path, &body).unwrap();
    (status, serde_json::from_str(&answer).unwrap_or_default())
}

fn make(node: &Node, gpu: &str, profile: &str, start: u32) -> (u16, Value) {
    let new = json!({"gpu": gpu, "profile": profile, "start": start});
    api(node, "POST", "/v1/mig", &new)
}

fn remove(node: &Node, gpu: &str, instance: &Value, device: &str) -> (u16, Value) {
    let path = format!("/v1/mig/{gpu}/{instance}?device={device}");
    api(node, "DELETE", &path, &Value::Null)
}

/// The GPU in MIG mode.
fn listed(node: &Node) -> Value {
    let (status, gpus) = api(node, "GET", "/v1/mig", &Value::Null);
    assert_eq!((status, gpus.as_array().map(Vec::len)), (200, Some(1)));
    gpus[0].clone()
}

/// The UUIDs of all devices.
fn known(node: &Node) -> Vec<Value> {
    let (_, devices) = api(node, "GET", "/v1/devices", &Value::Null);
    let all = devices.as_array().unwrap().iter();
    all.map(|it| it["uuid"].clone()).collect()
}

/// A node of a GPU in MIG mode without an instance, and one that is whole.
fn in_mig_mode(variables: &[(&str, &OsStr)]) -> Option<Node> {
    if real() {
        eprintln!("SKIPPED: it needs the emulated device");
        return None;
    }
    let mut node = Node::with(Options {
        devices: 2,
        profile: "devices = 2\nmig_mode = [true, false]\n",
        without_daemon: true,
        ..Options::default()
    });
    for (name, value) in variables {
        node.set_variable(name, value);
    }
    node.start_daemon();
    Some(node)
}

#[test]
fn instance_is_a_device_from_its_making_to_its_removal() {
    let Some(node) = in_mig_mode(&[]) else {
        return;
    };
    let gpu = listed(&node);
    let uuid = gpu["uuid"].as_str().unwrap();
    let profiles = gpu["profiles"].as_array().unwrap();
    let large = profiles.iter().find(|it| it["name"] == "3g.40gb").unwrap();
    assert_eq!(large["starts"], json!([0, 4]), "{gpu:#}");
    assert_eq!(large["memory_slices"], 4, "{gpu:#}");
    let whole = known(&node);
    assert_eq!(whole.len(), 1, "the other GPU");
    let (status, made) = make(&node, uuid, "1g.10gb", 3);
    assert_eq!(status, 201, "{made}");
    let device = &made["compute_instances"][0]["device"];
    // It is known at once, and its tenants are as on any device.
    assert!(known(&node).contains(device));
    let device = device.as_str().unwrap();
    let mut program = on(&node, device, "--name one --class batch", TICKS);
    program.wait_lines(5);
    let tenant = node.wait_tenant("one", |it| it["domains"][0]["device"] == device);
    assert_eq!(tenant["domains"][0]["device"], device);

    // Neither is it removed under its tenant, nor is another in its place.
    let number = &made["gpu_instance"];
    let (status, error) = remove(&node, uuid, number, device);
    assert_eq!(status, 409, "{error}");
    assert!(error["error"].as_str().unwrap().contains("tenant one"));
    let (status, error) = make(&node, uuid, "3g.40gb", 0);
    assert_eq!(status, 409, "{error}");
    let text = error["error"].as_str().unwrap();
    assert!(text.contains("GPU instance 7 (1g.10gb at 3)"), "{text}");
    program.kill();
    // A process that is no tenant counts as well.
    let mut command = node.on_device([
        binary().into_os_string(),
        "workload".into(),
        "check".into(),
        "--seconds".into(),
        "60".into(),
    ]);
    let foreign = Process::start(command.env("CUDA_VISIBLE_DEVICES", device));
    let refused = wait_for("the foreign process", PATIENCE, || {
        let (_, error) = remove(&node, uuid, number, device);
        let text = error["error"].as_str().unwrap_or_default().to_owned();
        text.contains("pid").then_some(text)
    });
    assert!(refused.contains(device), "{refused}");
    foreign.kill();

    let (status, error) = remove(&node, uuid, number, "MIG-other");
    assert_eq!(status, 409, "{error}");
    wait_for("the removal", PATIENCE, || {
        (remove(&node, uuid, number, device).0 == 204).then_some(())
    });
    assert_eq!(known(&node), whole);
    assert_eq!(listed(&node)["instances"], json!([]));
    assert_eq!(make(&node, uuid, "3g.40gb", 0).0, 201);
}

/// Also the last instance of the only GPU.
#[test]
fn instances_of_others_are_noticed_at_run_time() {
    if real() {
        return;
    }
    let node = Node::with(Options {
        profile: "mig_mode = [true]\n",
        ..Options::default()
    });
    let gpu = listed(&node)["uuid"].clone();
    // Another daemon stands for another administrator. It finds the devices by another name: a device has one daemon.
    let mut other = Node::with(Options {
        without_daemon: true,
        ..Options::default()
    });
    // At no moment is there none: its own device may still be setting the file's permissions.
    let name = other.dir().join("name");
    std::os::unix::fs::symlink(node.dir().join("emu.sock"), &name).unwrap();
    std::fs::rename(&name, other.dir().join("emu.sock")).unwrap();
    other.start_daemon();
    assert_eq!(listed(&other)["uuid"], gpu);
    let gpu = gpu.as_str().unwrap();
    assert!(known(&node).is_empty());
    let (_, made) = make(&other, gpu, "2g.20gb", 4);
    let device = &made["compute_instances"][0]["device"];
    wait_for("the new instance", PATIENCE, || {
        (known(&node) == [device.clone()]).then_some(())
    });
    assert_eq!(listed(&node)["instances"][0], made);
    let removed = remove(&other, gpu, &made["gpu_instance"], device.as_str().unwrap());
    assert_eq!(removed.0, 204, "{}", removed.1);
    wait_for("its end", PATIENCE, || {
        known(&node).is_empty().then_some(())
    });
}

#[test]
fn compute_instance_that_fails_leaves_nothing() {
    let fault = "fail@1:nvmlGpuInstanceCreateComputeInstance";
    let Some(node) = in_mig_mode(&[("GPUMUX_EMU_FAULT", fault.as_ref())]) else {
        return;
    };
    let gpu = listed(&node)["uuid"].clone();
    let gpu = gpu.as_str().unwrap();
    let (status, error) = make(&node, gpu, "1g.20gb", 6);
    assert_eq!(status, 500, "{error}");
    let text = error["error"].as_str().unwrap();
    assert!(text.contains("1g.20gb at memory slice 6") && text.contains("was removed again"));
    assert_eq!(listed(&node)["instances"], json!([]));
    assert_eq!(make(&node, gpu, "1g.20gb", 6).0, 201);
}

/// The half-made instance is listed, and can be removed.
#[test]
fn daemon_killed_between_two_calls_leaves_what_is_listed() {
    let fault = "kill@1:nvmlGpuInstanceCreateComputeInstance";
    let Some(mut node) = in_mig_mode(&[("GPUMUX_EMU_FAULT", fault.as_ref())]) else {
        return;
    };
    let gpu = listed(&node)["uuid"].clone();
    let gpu = gpu.as_str().unwrap();
    let body = json!({"gpu": gpu, "profile": "1g.10gb", "start": 0}).to_string();
    assert_eq!(node.request("POST", "/v1/mig", &body), None);
    node.await_daemons_end();
    node.set_variable("GPUMUX_EMU_FAULT", "");
    node.start_daemon();
    let left = listed(&node)["instances"][0].clone();
    assert_eq!(left["compute_instances"], json!([]), "{left}");
    assert_eq!(make(&node, gpu, "1g.10gb", 0).0, 409);
    let number = &left["gpu_instance"];
    let path = format!("/v1/mig/{gpu}/{number}");
    let (status, error) = api(&node, "DELETE", &path, &Value::Null);
    assert_eq!(status, 204, "{error}");
    assert_eq!(make(&node, gpu, "1g.10gb", 0).0, 201);
}

/// A driver that hangs in one call keeps the next from it, and not the daemon from its tenants.
#[test]
fn nvml_that_hangs_is_refused_in_time_and_heals() {
    let file = tempfile::tempdir().unwrap().keep().join("hangs");
    let fault = "delay@1:nvmlGpuInstanceCreateComputeInstance";
    let Some(node) = in_mig_mode(&[
        ("GPUMUX_EMU_FAULT", fault.as_ref()),
        ("GPUMUX_EMU_DELAY_FILE", file.as_os_str()),
    ]) else {
        return;
    };
    let gpu = listed(&node)["uuid"].clone();
    let gpu = gpu.as_str().unwrap();
    let (status, error) = make(&node, gpu, "1g.10gb", 0);
    assert_eq!(status, 504, "{error}");
    assert!(
        error["error"]
            .as_str()
            .unwrap()
            .contains("has not answered for 15 s")
    );
    assert_eq!(known(&node).len(), 1);
    std::fs::remove_file(&file).unwrap();
    let made = wait_for("what was begun to be done", PATIENCE, || {
        let made = listed(&node)["instances"][0].clone();
        made["compute_instances"][0].is_object().then_some(made)
    });
    assert_eq!(made["start"], 0);
    std::fs::remove_dir_all(file.parent().unwrap()).unwrap();
}

#[test]
fn users_neither_list_nor_make_nor_remove_instances() {
    let Some(node) = in_mig_mode(&[]) else {
        return;
    };
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: it needs root");
        return;
    }
    set_permissions(node.dir(), Permissions::from_mode(0o755)).unwrap();
    let gpu = listed(&node)["uuid"].clone();
    let script = "import http.client, socket, sys\n\
        for method, path in [a.split(' ') for a in sys.argv[2:]]:\n \
        c = http.client.HTTPConnection('gpumux')\n \
        c.sock = socket.socket(socket.AF_UNIX)\n \
        c.sock.connect(sys.argv[1])\n \
        c.request(method, path, '{}', {'content-type': 'application/json'})\n \
        print(c.getresponse().status)\n";
    let mut command = Command::new("python3");
    command.args(["-c", script]).arg(node.api_socket());
    let remove = format!("DELETE /v1/mig/{}/7", gpu.as_str().unwrap());
    command.args(["GET /v1/devices", "GET /v1/mig", "POST /v1/mig", &remove]);
    let done = crate::users::as_nobody(command).run().ok();
    assert_eq!(done.out, "200\n403\n403\n403\n");
}
