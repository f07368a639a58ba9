//! A daemon of root and tenants of ordinary users. Needs root; the other tests run as any user.

use std::{
    fs::{self, Permissions, set_permissions},
    os::unix::{fs::PermissionsExt, process::CommandExt},
    process::Command,
};

use gpumux_tests::{Node, PATIENCE, Process, Run, binary, real, wait_for};
use serde_json::Value;

use crate::{REQUESTS, TICKS};

/// `nobody`, whose number is the same on all systems that have one.
const NOBODY: u32 = 65534;

/// A node whose folder all users may enter, or nothing when the tests do not run as root.
fn node_of_root() -> Option<Node> {
    if !is_root() {
        return None;
    }
    let node = Node::start();
    open_to_all(&node);
    Some(node)
}

pub(crate) fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// All users may enter the node's folder.
pub(crate) fn open_to_all(node: &Node) {
    set_permissions(node.dir(), Permissions::from_mode(0o755)).unwrap();
    let mut probe = Command::new(binary());
    let reachable = probe
        .arg("--version")
        .stdout(std::process::Stdio::null())
        .uid(NOBODY)
        .status()
        .is_ok_and(|status| status.success());
    assert!(
        reachable,
        "nobody cannot execute {}: build where others may read",
        binary().display()
    );
}

pub(crate) fn as_nobody(command: Command) -> Command {
    as_user(NOBODY, command)
}

pub(crate) fn as_user(uid: u32, mut command: Command) -> Command {
    command.uid(uid).gid(uid).env("HOME", "/");
    command
}

#[test]
fn an_ordinary_users_tenant_is_managed_by_roots_daemon() {
    let Some(node) = node_of_root() else { return };
    let slice = |tenant: &Value| tenant["domains"][0]["timeslice_us"].as_u64();
    let _serve = Process::start(&mut as_nobody(
        node.tenant("--name serve --class latency", REQUESTS),
    ));
    let _train = Process::start(&mut node.tenant("--name train --class batch", TICKS));
    let tenant = node.wait_tenant("serve", |tenant| slice(tenant) == Some(1_000_000));
    assert_eq!(tenant["uid"], NOBODY);
    node.wait_tenant("train", |tenant| slice(tenant) == Some(1));
    // Two batch tenants, of root and of another user, are frozen in turn.
    let _more = Process::start(&mut as_nobody(
        node.tenant("--name more --class batch", TICKS),
    ));
    node.wait_tenant("more", |tenant| {
        tenant["domains"][0]["freezes"].as_u64() > Some(1)
    });
}

#[test]
fn an_ordinary_user_changes_its_own_tenants_only() {
    let Some(node) = node_of_root() else { return };
    let _root = Process::start(&mut node.tenant("--name of-root --class batch", TICKS));
    let _own = Process::start(&mut as_nobody(
        node.tenant("--name own --class batch", TICKS),
    ));
    node.wait_tenant("of-root", |tenant| !tenant["domains"][0].is_null());
    node.wait_tenant("own", |tenant| !tenant["domains"][0].is_null());
    let change = |name| as_nobody(node.gpumux(["set", name, "--class", "latency"])).run();
    change("own").ok();
    let refused = change("of-root");
    assert_eq!(refused.code(), 1, "{refused:#?}");
    assert_eq!(node.find_tenant("of-root").unwrap()["class"], "batch");
    assert_eq!(node.find_tenant("own").unwrap()["class"], "latency");
}

#[test]
fn process_that_changes_its_user_gets_the_reason() {
    let Some(node) = node_of_root() else { return };
    let program = format!("setpriv --reuid {NOBODY} --clear-groups gpumux scratch");
    let mut program = Process::start(&mut node.tenant("--name train", &program));
    let number = NOBODY.to_string();
    let user = Command::new("id").args(["-un", &number]).run().ok().out;
    let user = user.trim();
    let reason = format!(
        "runs as user {user}, and tenant `train`, whose secret the process has, is of user root"
    );
    wait_for("the reason", PATIENCE, || {
        program.err().contains(&reason).then_some(())
    });
    assert!(
        program
            .err()
            .contains(&format!("sudo -u {user} gpumux run")),
        "{}",
        program.err()
    );
    program.wait_lines(1);
}

#[test]
fn ended_tenants_of_one_name_are_found_by_user() {
    let Some(node) = node_of_root() else { return };
    let start = |command: Command| {
        let mut command = command;
        let mut process = Process::start(command.arg("echo; read line; exit 3"));
        process.wait_lines(1);
        process
    };
    let own = start(node.tenant("--name train", "sh -c"));
    let others = start(as_nobody(node.tenant("--name train", "sh -c")));
    let names = || {
        let out = node.gpumux(["ps", "-a", "-q"]).run().ok().out;
        let mut names: Vec<String> = out.lines().map(str::to_owned).collect();
        names.sort();
        names
    };
    assert_eq!(names(), ["nobody/train", "root/train"]);
    for process in [own, others] {
        assert_eq!(process.finish().code(), 3);
    }
    let end = |name: &str| {
        wait_for("its end", PATIENCE, || {
            let listing = node.gpumux(["ps", "-a", "--json", name]).run();
            let ended = listing
                .status
                .success()
                .then(|| listing.json()["ended"].clone())?;
            (ended.as_array()?.len() == 1).then(|| ended[0].clone())
        })
    };
    assert_eq!(end("nobody/train")["user"], "nobody");
    assert_eq!(end("root/train")["uid"], 0);
    assert_eq!(names(), ["nobody/train", "root/train"]);
    let inspect = |name: &str| node.gpumux(["inspect", name]).run().ok().json();
    assert_eq!(inspect("nobody/train")["ended"]["uid"], NOBODY);
    assert_eq!(inspect("train")["ended"]["user"], "root");
}

#[test]
fn an_ordinary_users_doctor_finds_the_controls() {
    let Some(node) = node_of_root() else { return };
    let doctor = node.on_device([binary().into_os_string(), "doctor".into(), "--json".into()]);
    let mut doctor = as_nobody(doctor);
    let doctor = doctor.run().ok();
    let report = doctor.json();
    assert_eq!(report["devices"][0]["emulated"], !real(), "{report:#}");
}

#[test]
fn programs_in_a_user_namespace_are_controlled() {
    let Some(node) = node_of_root() else { return };
    let probe = Command::new("unshare");
    if !as_nobody(probe)
        .args(["-Ur", "true"])
        .run()
        .status
        .success()
    {
        eprintln!("SKIPPED: users may not make user namespaces here");
        return;
    }
    // Inside they are root. The daemon sees the user outside.
    let mut web = as_nobody(node.tenant("--strict --name web --class latency", "unshare -Ur"));
    let mut web = Process::start(web.arg(binary()).arg("scratch"));
    let tenant = node.wait_tenant("web", |it| it["domains"][0].is_object());
    assert_eq!(tenant["uid"], NOBODY, "{tenant:#}");
    assert_eq!(tenant["domains"][0]["mechanism"], "controls", "{tenant:#}");
    web.wait_lines(3);
    let words = ["unshare".into(), "-Ur".into(), binary().into_os_string()];
    let words = words.into_iter().chain(["doctor".into(), "--json".into()]);
    let doctor = node.on_device(words);
    let report = as_nobody(doctor).run().ok().json();
    let sandboxes = report["sandboxes"].as_array().unwrap();
    let found = sandboxes.iter().find(|it| it["name"] == "user namespace");
    let shown_by = &found.unwrap()["shown_by"];
    assert_eq!(*shown_by, format!("users are mapped: 0 {NOBODY} 1"));
    for control in &report["devices"][0]["controls"].as_array().unwrap()[..3] {
        assert_eq!(control["works"], true, "{control:#}");
    }
}

#[test]
fn another_users_process_cannot_enter_a_group() {
    let Some(node) = node_of_root() else { return };
    let mut inside = Process::start(&mut node.tenant("--name inside --trust team", TICKS));
    inside.wait_lines(2);
    let groups = std::fs::read_dir(node.dir().join("groups")).unwrap();
    let folder = groups.flatten().next().unwrap().path();
    // The same name is another group for another user, and the folder of this one cannot be entered.
    let script = format!(
        "ls {0} 2>&1; export CUDA_MPS_PIPE_DIRECTORY={0}/pipe; exec {1} scratch",
        folder.display(),
        binary().display()
    );
    let mut command = as_nobody(node.tenant("--name other --trust team", "sh -c"));
    let mut other = Process::start(command.arg(script));
    other.wait_lines(3);
    assert!(other.out().contains("Permission denied"), "{}", other.out());
    let domain = |tenant: &Value| tenant["domains"][0].clone();
    let other = node.wait_tenant("other", |it| !domain(it).is_null());
    assert_eq!(domain(&other)["group"], Value::Null, "{other:#}");
    let inside = node.wait_tenant("inside", |it| !domain(it).is_null());
    assert!(domain(&inside)["group"].is_u64(), "{inside:#}");
}

/// The daemon of root works beside files of the group's user, whatever they are.
#[test]
fn what_a_user_does_to_its_groups_folder_harms_itself_only() {
    let Some(node) = node_of_root() else { return };
    let victim = node.dir().join("victim");
    fs::create_dir(&victim).unwrap();
    fs::write(victim.join("secret"), "secret\n").unwrap();
    set_permissions(&victim, Permissions::from_mode(0o700)).unwrap();
    let tenant = |name: &str| {
        let options = format!("--class batch --trust team --name {name}");
        // A group is needed as long as it has a tenant: this one outlives its work.
        let script = format!("{} scratch; sleep 600", binary().display());
        let mut command = as_nobody(node.tenant(&options, "sh -c"));
        let mut process = Process::start(command.arg(script));
        process.wait_lines(2);
        process
    };
    let _first = tenant("first");
    let groups = fs::read_dir(node.dir().join("groups")).unwrap();
    let folder = groups.flatten().next().unwrap().path();
    let control = || -> i32 {
        let text = fs::read_to_string(node.dir().join("groups.json")).unwrap();
        let groups = text.lines().nth(1).map(serde_json::from_str::<Value>);
        let pid = groups.unwrap().unwrap()[0]["process"]["pid"].as_i64();
        pid.unwrap_or_default() as i32
    };
    let (file, victims) = (victim.join("secret"), victim.display());
    let secret = file.display();
    for attack in [
        format!("mv pipe pipe.old && ln -s {victims} pipe"),
        "mv log log.old && mkdir log".into(),
        format!("rm -f control.out && ln -s {secret} control.out"),
        "echo > control.out".into(),
        "cat control.out".into(),
    ] {
        let mut command = Command::new("sh");
        let script = format!("cd {} && {attack}", folder.display());
        let refused = as_nobody({
            command.args(["-c", &script]);
            command
        })
        .run();
        assert_ne!(refused.code(), 0, "{attack}: {refused:?}");
    }
    // What it may do in its own parts keeps nothing from being started again.
    let script = format!(
        "cd {} && rm -rf log/* && ln -s {secret} log/control.log && ln -s {secret} log/server.log && mkfifo log/control.out \
         && rm -rf pipe/* && ln -s {secret} pipe/control && mkdir -p pipe/a/b && mkfifo pipe/fifo && kill -9 {}",
        folder.display(),
        control()
    );
    let mut command = Command::new("sh");
    command.args(["-c", &script]);
    as_nobody(command).run().ok();
    let fault = |ps: &Value| ps["faults"].get(0).cloned();
    gpumux_tests::wait_for("the failure", gpumux_tests::PATIENCE, || fault(&node.ps()));
    let _second = tenant("second");
    let domain = |tenant: &Value| tenant["domains"][0]["group"].is_u64();
    node.wait_tenant("second", domain);
    for name in ["first", "second"] {
        let said = as_nobody(node.gpumux(["explain", name])).run();
        assert!(!said.out.contains("secret"), "{said:?}");
    }
    assert_eq!(fs::read_to_string(&file).unwrap(), "secret\n");
}

/// As `deploy/systemd/run-gpumux-groups.mount` has it.
#[test]
fn user_that_fills_the_groups_file_system_stops_no_tenant() {
    let Some(node) = node_of_root() else { return };
    let groups = node.dir().join("groups");
    fs::create_dir(&groups).unwrap();
    let mut mount = Command::new("mount");
    mount.args(["-t", "tmpfs", "-o", "size=1m,mode=0711", "none"]);
    if mount.arg(&groups).run().code() != 0 {
        return eprintln!("SKIPPED: no file system can be mounted here");
    }
    let _mounted = Mounted(groups.clone());
    let tenant = |options: &str| as_nobody(node.tenant(options, TICKS));
    let mut first = Process::start(&mut tenant("--class batch --trust team --name first"));
    first.wait_lines(2);
    let folder = fs::read_dir(&groups).unwrap().flatten().next().unwrap();
    let mut fill = Command::new("sh");
    let pipe = folder.path().join("pipe");
    fill.args(["-c", &format!("cat /dev/zero > {}/full", pipe.display())]);
    assert_ne!(as_nobody(fill).run().code(), 0, "it is full");
    // Another of its groups, as of any user: they share in time instead.
    let mut second = Process::start(&mut tenant("--class batch --trust other --name second"));
    second.wait_lines(2);
    let why = node.find_tenant("second").unwrap()["placement"]["reason"].to_string();
    assert!(why.contains("No space left"), "{why}");
    second.kill();
    // All else goes on, and is kept.
    let mut third = Process::start(&mut node.tenant("--class batch --name third", TICKS));
    third.wait_lines(2);
    node.gpumux(["set", "third", "--guaranteed", "20%"])
        .run()
        .ok();
    let kept = fs::read_to_string(node.dir().join("tenants.json")).unwrap();
    assert!(kept.contains("third") && kept.contains("0.2"), "{kept}");
    let lines = first.lines();
    first.wait_lines(lines + 2);
    fs::remove_file(pipe.join("full")).unwrap();
    let mut third = Process::start(&mut tenant("--class batch --trust other --name fourth"));
    third.wait_lines(2);
    node.wait_tenant("fourth", |it| it["placement"]["way"] == "space");
}

/// Unmounted when it is dropped.
struct Mounted(std::path::PathBuf);

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}
