//! Containers that a real runtime starts, with the devices that `gpumux cdi generate` describes.

use std::{fs, process::Command};

use gpumux_tests::{Node, PATIENCE, Process, Run, binary, program, real};

/// The container's program, in a mount namespace in which the runtime finds the test's description alone. A limit is no higher
/// than that of the test, which a runtime may not raise everywhere.
const RUN: &str = r#"
exec unshare --mount sh -euc '
mkdir -p /run/cdi
mount --bind "$DIR/cdi" /run/cdi
exec podman --root "$DIR/storage" --runroot "$DIR/state" $RUNTIME run --rm --network none \
  --ulimit "nofile=$(ulimit -Hn):$(ulimit -Hn)" --ulimit nproc=1024:1024 \
  --device gpumux.dev/gpu=all -e GPUMUX_TENANT -v "$BUILT:/opt/gpumux:ro" --rootfs "$ROOT:O" \
  /opt/gpumux/gpumux workload batch --seconds 5'
"#;

#[test]
fn container_with_a_cdi_device_joins_its_tenant() {
    let has = |name: &str| Command::new(name).arg("--version").output().is_ok();
    let root = std::env::var_os("GPUMUX_TEST_ROOT");
    let Some(root) = root.filter(|_| has("podman") && !real()) else {
        eprintln!("SKIPPED: no podman, no GPUMUX_TEST_ROOT (see `fresh`), or a real device");
        return;
    };
    let node = Node::start();
    let dir = tempfile::tempdir().unwrap();
    let description = dir.path().join("cdi/gpumux.json");
    let words = ["cdi", "generate", "-o", description.to_str().unwrap()];
    node.gpumux(words).run().ok();
    assert!(
        fs::read_to_string(&description)
            .unwrap()
            .contains("gpumux.dev/gpu")
    );
    let script = dir.path().join("container");
    program(&script, &format!("#!/bin/sh{RUN}"));
    let mut run = node.tenant("--name web --class latency", script.to_str().unwrap());
    run.env("DIR", dir.path()).env("ROOT", root);
    run.env("BUILT", binary().parent().unwrap());
    // crun takes no mixture of both versions of control groups.
    run.env("RUNTIME", if has("runc") { "--runtime=runc" } else { "" });
    let container = Process::start(&mut run);
    let tenant = node.wait_tenant("web", |tenant| tenant["domains"][0].is_object());
    assert_eq!(tenant["class"], "latency", "{tenant:#}");
    let pid = &tenant["pids"][0];
    assert_ne!(pid, container.pid(), "{tenant:#}");
    let inside = fs::read_link(format!("/proc/{pid}/ns/pid")).unwrap();
    assert_ne!(inside, fs::read_link("/proc/self/ns/pid").unwrap());
    let done = container.finish_within(PATIENCE * 2).ok();
    assert!(done.out.starts_with("batch on "), "{done:?}");
}
