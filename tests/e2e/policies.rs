//! What `gpumux.toml` gives users, their Unix groups and declared tenants.

use std::{fs, process::Command};

use gpumux_tests::{Node, Options, PATIENCE, Process, Run, wait_for};
use serde_json::{Value, json};

use crate::{TICKS, users::as_user};

/// `nobody`, and a user that is in none of its groups.
const NOBODY: u32 = 65534;
const OTHER: u32 = 1;

/// A node whose daemon has this configuration; none where the machine has fewer devices.
fn configured(devices: u32, text: &str) -> Option<Node> {
    if gpumux_tests::devices() < devices as usize {
        eprintln!("SKIPPED: it needs {devices} devices");
        return None;
    }
    let mut node = Node::with(Options {
        devices,
        without_daemon: true,
        ..Options::default()
    });
    let file = node.dir().join("gpumux.toml");
    fs::write(&file, text).unwrap();
    node.configure(["--config".into(), file.display().to_string()]);
    node.start_daemon();
    Some(node)
}

/// Waits until a tenant has ended.
fn wait_end(node: &Node, name: &str) {
    wait_for("its end", PATIENCE, || {
        node.find_tenant(name).is_none().then_some(())
    });
}

/// Why a program is not started.
#[track_caller]
fn refused(mut command: Command) -> String {
    let refused = command.run();
    assert_eq!(refused.code(), 125, "{refused:#?}");
    refused.err
}

#[test]
fn members_of_a_unix_group_have_what_its_section_allows() {
    if !crate::users::is_root() {
        return;
    }
    let number = NOBODY.to_string();
    let group = Command::new("id").args(["-gn", &number]).run().ok().out;
    let group = group.trim();
    let configured = configured(
        1,
        &format!(
            "[defaults]\nclasses = ['batch']\nmax_guaranteed = '10%'\n\
             [unix_groups.{group}]\nclasses = ['latency', 'batch']\nmax_guaranteed = '40%'\nmax_tenants = 2\n"
        ),
    );
    let Some(node) = configured else { return };
    crate::users::open_to_all(&node);
    let member = |options: &str| as_user(NOBODY, node.tenant(options, TICKS));
    let other = |options: &str| as_user(OTHER, node.tenant(options, TICKS));
    // By class.
    let error = refused(member("--class standard"));
    assert!(error.contains("use latency or batch"), "{error}");
    let error = refused(other("--class latency"));
    assert!(error.contains("use batch"), "{error}");
    // One that asks for none has one that it may have.
    let own = Process::start(&mut other("--name own"));
    assert_eq!(node.wait_tenant("own", |_| true)["class"], "batch");
    // By guarantees, of all tenants together and also later.
    let error = refused(other("--guaranteed 20%"));
    assert!(error.contains("at most 10%"), "{error}");
    let error = refused(member("--class batch --guaranteed 50%"));
    assert!(error.contains("at most 40%"), "{error}");
    let _web = Process::start(&mut member("--name web --class latency --guaranteed 30%"));
    node.wait_tenant("web", |_| true);
    let error = refused(member("--name night --class batch --guaranteed 20%"));
    assert!(
        error.contains("guaranteed to web (30%)") && error.contains("guarantee at most 10%"),
        "{error}"
    );
    let set = |uid, name: &str, share: &str| {
        as_user(uid, node.gpumux(["set", name, "--guaranteed", share])).run()
    };
    assert_eq!(set(NOBODY, "web", "45%").code(), 1);
    set(NOBODY, "web", "40%").ok();
    assert_eq!(set(OTHER, "own", "11%").code(), 1);
    set(OTHER, "own", "10%").ok();
    // By number.
    let _second = Process::start(&mut member("--name second --class batch"));
    node.wait_tenant("second", |_| true);
    let error = refused(member("--class batch"));
    assert!(error.contains("max_tenants"), "{error}");
    // Nothing of that binds root, that can give more.
    let _root = Process::start(&mut node.tenant("--name root --guaranteed 40%", TICKS));
    node.wait_tenant("root", |_| true);
    own.kill();
    wait_end(&node, "own");
    node.gpumux(["set", "nobody/web", "--guaranteed", "60%"])
        .run()
        .ok();
    assert_eq!(node.find_tenant("web").unwrap()["spec"]["guaranteed"], 0.6);
}

#[test]
fn declared_tenants_have_what_the_configuration_gives_them() {
    let uid = rustix::process::getuid().as_raw();
    let user = Command::new("id").arg("-un").run().ok().out;
    let user = user.trim();
    let configured = configured(
        2,
        &format!(
            "[users.{uid}]\nmax_guaranteed = '50%'\n\
             [tenants.web]\nclass = 'latency'\nguaranteed = '20%'\nlimit = '80%'\nmemory_limit = '2GiB'\ngpu = ['1']\n\
             [tenants.'{user}/web']\nguaranteed = '30%'\n\
             [tenants.greedy]\nguaranteed = '60%'\n"
        ),
    );
    let Some(node) = configured else { return };
    let start = |options: &str| {
        let process = Process::start(&mut node.tenant(options, TICKS));
        (
            process,
            node.wait_tenant("web", |it| !it["domains"][0].is_null()),
        )
    };
    let (process, web) = start("--name web");
    // Of its user's section first, then of that for its name.
    let (spec, uuid) = (&web["spec"], &web["devices"][0]);
    let got = ["class", "guaranteed", "limit", "memory_limit"].map(|key| spec[key].clone());
    assert_eq!(json!(got), json!(["latency", 0.3, 0.8, 2_u64 << 30]));
    let devices = node.get("/v1/status")["devices"].clone();
    let second = devices.as_array().unwrap().iter();
    let second = second.filter(|it| it["index"] == 1);
    assert!(
        second.map(|it| &it["uuid"]).eq([uuid]),
        "{web:#} {devices:#}"
    );
    assert_eq!(web["may_use"], Value::from(vec![uuid.clone()]));
    // What was set for the name comes before, and flags before that. What neither says is as declared.
    node.gpumux(["set", "web", "--guaranteed", "25%", "--weight", "3"])
        .run()
        .ok();
    process.kill();
    wait_end(&node, "web");
    let (process, web) = start("--name web --weight 5 --gpu 0");
    let spec = &web["spec"];
    let got = ["class", "guaranteed", "limit", "weight"].map(|key| spec[key].clone());
    assert_eq!(json!(got), json!(["latency", 0.25, 0.8, 5.0]));
    assert_ne!(&web["devices"][0], uuid, "{web:#}");
    process.kill();
    // A tenant of another name has nothing of that; one that is declared is within its user's policy.
    let _other = Process::start(&mut node.tenant("--name web2", TICKS));
    let other = node.wait_tenant("web2", |_| true);
    assert_eq!(other["spec"]["guaranteed"], 0.0, "{other:#}");
    let error = refused(node.tenant("--name greedy", TICKS));
    assert!(
        error.contains("60%") && error.contains("at most 50%"),
        "{error}"
    );
}

#[test]
fn unused_guarantees_lapse_and_hold_again_with_work() {
    let uid = rustix::process::getuid().as_raw();
    let configured = configured(1, &format!("[users.{uid}]\nguarantee_expires_s = 3\n"));
    let Some(node) = configured else { return };
    let guaranteed = |name: &str| {
        let (_, metrics) = node.request("GET", "/metrics", "").unwrap();
        let line = format!("gpumux_tenant_guaranteed_ratio{{tenant=\"{name}\"}} ");
        let value = metrics.lines().find_map(|it| it.strip_prefix(&line));
        value.unwrap_or_else(|| panic!("{metrics}")).to_owned()
    };
    let explained = |name: &str| node.gpumux(["explain", name]).run().ok().out;
    // One that works, and one that waits for its input before it does.
    let _busy = Process::start(&mut node.tenant("--name busy --guaranteed 40%", TICKS));
    let mut late = node.tenant("--name late --guaranteed 60%", "sh -c");
    late.arg("read line; exec $GPUMUX_TEST_PROGRAM scratch");
    let mut late = Process::start(late.env("GPUMUX_TEST_PROGRAM", gpumux_tests::binary()));
    node.wait_tenant("late", |it| it["lapsed"] == true);
    assert_eq!(guaranteed("late"), "0.0");
    let listed = node.gpumux(["ps"]).run().ok().out;
    assert!(
        listed.contains("late: its guarantees have lapsed"),
        "{listed}"
    );
    assert!(
        explained("late").contains("have lapsed"),
        "{}",
        explained("late")
    );
    // Another may have it meanwhile, as long as it has work.
    let mut other = Process::start(&mut node.tenant("--name other --guaranteed 50%", TICKS));
    other.wait_lines(2);
    late.write("\n");
    late.wait_lines(2);
    let tenant = node.find_tenant("late").unwrap();
    assert_eq!(tenant["lapsed"], true, "{tenant:#}");
    assert_eq!(tenant["spec"]["guaranteed"], 0.6, "{tenant:#}");
    other.kill();
    node.wait_tenant("late", |it| it["lapsed"] == false);
    assert_eq!(guaranteed("late"), "0.6");
    assert!(
        !explained("late").contains("lapsed"),
        "{}",
        explained("late")
    );
    let error = refused(node.tenant("--guaranteed 10%", TICKS));
    assert!(error.contains("late (60%) and busy (40%)"), "{error}");
    // What works has not lapsed.
    assert_eq!(node.find_tenant("busy").unwrap()["lapsed"], false);
}
