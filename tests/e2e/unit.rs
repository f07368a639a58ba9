//! The daemon with exactly the rights that its service's unit gives it.

use std::{
    env,
    process::{Command, Stdio},
    time::Duration,
};

use gpumux_tests::{Process, unit};

/// Both modules take turns with the rest of the machine.
const LONG: Duration = Duration::from_secs(900);
/// What needs no right: without a daemon, or about time, SMs and memory among tenants of one user.
const WITHOUT: [&str; 8] = [
    "space::a_group_is_frozen",
    "space::a_latency_tenant_outside",
    "space::the_groups_controls",
    "space::work_of_a_killed_client",
    "space::faults::killed_member",
    "space::faults::the_fault_matrix",
    "space::kept::kept_buffer_is_whole",
    "space::sms::",
];

#[test]
fn users_and_groups_work_under_the_units_capabilities() {
    let setpriv = Command::new("setpriv")
        .arg("--version")
        .stdout(Stdio::null())
        .status();
    if !rustix::process::geteuid().is_root() || !setpriv.is_ok_and(|it| it.success()) {
        eprintln!("SKIPPED: it needs root, and setpriv of util-linux");
        return;
    }
    if env::var_os("GPUMUX_TEST_UNIT").is_some() {
        return;
    }
    let mut tests = Command::new(env::current_exe().unwrap());
    tests
        .args(["users::", "space::", "--test-threads=4"])
        .args(WITHOUT.iter().flat_map(|it| ["--skip", it]))
        .env("GPUMUX_TEST_UNIT", "1");
    let finished = Process::start(&mut tests).finish_within(LONG).ok();
    assert!(!finished.out.contains("running 0 tests"), "{finished:#?}");
}

#[test]
fn unit_gives_the_rights_that_are_documented() {
    let rights: Vec<String> = unit("CapabilityBoundingSet")
        .split_whitespace()
        .map(str::to_owned)
        .collect();
    let security = include_str!("../../docs/security.md");
    for right in &rights {
        assert!(security.contains(&format!("| `{right}` |")), "{right}");
    }
    let documented = security.matches("| `CAP_").count();
    assert_eq!(documented, rights.len());
}
