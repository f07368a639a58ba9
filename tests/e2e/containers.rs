//! Containers that a real runtime starts, with the devices that `gpumux cdi generate` describes.

use std::{ffi::OsString, fs, process::Command};

use gpumux_tests::{Node, Options, PATIENCE, Process, Run, binary, program, real, wait_for};
use rustix::process::Signal;

/// The container's program, in a mount namespace in which the runtime finds the test's description alone. A limit is no higher
/// than that of the test, which a runtime may not raise everywhere.
const RUN: &str = r#"
exec unshare --mount sh -euc '
mkdir -p /run/cdi
mount --bind "$DIR/cdi" /run/cdi
exec podman --root "$DIR/storage" --runroot "$DIR/state" $RUNTIME run --rm --network none \
  --ulimit "nofile=$(ulimit -Hn):$(ulimit -Hn)" --ulimit nproc=1024:1024 \
  --device gpumux.dev/gpu=all -e GPUMUX_TENANT -v "$BUILT:/opt/gpumux:ro" --rootfs "$ROOT:O" \
  sh -c "/opt/gpumux/gpumux doctor --json; exec /opt/gpumux/gpumux workload batch --seconds 5"'
"#;

/// The image of `deploy/Containerfile` from what the test has built, as its first stage would, on a fresh system as the base; and the
/// daemon in it, with what the documentation says that it needs.
const IMAGE: &str = r#"
podman="podman --root $DIR/storage --runroot $DIR/state"
mkdir -p "$DIR/src/target/release"
cp "$BUILT/gpumux" "$BUILT/libgpumux.so" "$BUILT/libgpumux_emu.so" "$DIR/src/target/release"
tar -C "$ROOT" --exclude=./proc --exclude=./dev -c . | $podman import -q - docker.io/library/debian:bookworm-slim >&2
$podman build -q --isolation chroot --pull=never -t gpumux -f "$DIR/Containerfile" "$DIR/src" >&2
exec $podman $RUNTIME run --rm --network none --pid=host \
  --ulimit "nofile=$(ulimit -Hn):$(ulimit -Hn)" --ulimit nproc=1024:1024 \
  -v "$NODE:$NODE" -e "GPUMUX_RUNTIME_DIR=$NODE" -e "GPUMUX_EMU_SOCKET=$NODE/emu.sock" gpumux gpumux emu -- gpumux daemon
"#;

fn has(name: &str) -> bool {
    Command::new(name).arg("--version").output().is_ok()
}

/// crun takes no mixture of both versions of control groups.
fn runtime() -> &'static str {
    if has("runc") { "--runtime=runc" } else { "" }
}

/// A fresh system, where there are containers, too.
fn fresh_root() -> Option<OsString> {
    let root = std::env::var_os("GPUMUX_TEST_ROOT").filter(|_| has("podman") && !real());
    if root.is_none() {
        eprintln!("SKIPPED: no podman, no GPUMUX_TEST_ROOT (see `fresh`), or a real device");
    }
    root
}

#[test]
fn daemon_of_the_image_serves_programs_of_the_host() {
    let Some(root) = fresh_root() else { return };
    let node = Node::with(Options {
        without_daemon: true,
        ..Options::default()
    });
    let dir = tempfile::tempdir().unwrap();
    // Without the compiler and its image.
    let recipe = include_str!("../../deploy/Containerfile");
    let (build, image) = recipe.split_once("\n\nFROM ").unwrap();
    assert!(build.contains("cargo build --release --locked"), "{build}");
    let recipe =
        format!("FROM debian:bookworm-slim AS build\nWORKDIR /src\nCOPY . .\n\nFROM {image}");
    fs::write(dir.path().join("Containerfile"), recipe).unwrap();
    let script = dir.path().join("image");
    program(&script, &format!("#!/bin/sh\nset -eu{IMAGE}"));
    let mut image = Command::new(&script);
    image.env("DIR", dir.path()).env("ROOT", root);
    image.env("BUILT", binary().parent().unwrap());
    image.env("NODE", node.dir()).env("RUNTIME", runtime());
    let mut daemon = Process::start(&mut image);
    // It writes a system and an image to the disk before.
    wait_for("the daemon's socket", PATIENCE * 10, || {
        assert!(daemon.poll().is_none(), "{}", daemon.err());
        node.api_socket().exists().then_some(())
    });
    let options = "--strict --name web --class latency";
    let load = "gpumux workload batch --seconds 1";
    let tenant = Process::start(&mut node.tenant(options, load));
    let seen = node.wait_tenant("web", |tenant| tenant["domains"][0].is_object());
    assert_eq!(seen["pids"][0], tenant.pid(), "{seen:#}");
    tenant.finish_within(PATIENCE * 2).ok();
    daemon.signal(Signal::TERM);
    let ended = daemon.finish_within(PATIENCE).ok();
    assert!(!ended.err.contains("ERROR"), "{}", ended.err);
}

#[test]
fn container_with_a_cdi_device_joins_its_tenant() {
    let Some(root) = fresh_root() else { return };
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
    run.env("RUNTIME", runtime());
    let container = Process::start(&mut run);
    let tenant = node.wait_tenant("web", |tenant| tenant["domains"][0].is_object());
    assert_eq!(tenant["class"], "latency", "{tenant:#}");
    let pid = &tenant["pids"][0];
    assert_ne!(pid, container.pid(), "{tenant:#}");
    let inside = fs::read_link(format!("/proc/{pid}/ns/pid")).unwrap();
    assert_ne!(inside, fs::read_link("/proc/self/ns/pid").unwrap());
    let done = container.finish_within(PATIENCE * 2).ok();
    let (report, batch) = done.out.rsplit_once("}\n").unwrap();
    assert!(batch.starts_with("batch on "), "{done:?}");
    let report: serde_json::Value = serde_json::from_str(&format!("{report}}}")).unwrap();
    let sandboxes = report["sandboxes"].as_array().unwrap();
    for name in ["container", "seccomp"] {
        let found = sandboxes.iter().find(|it| it["name"] == name).unwrap();
        assert!(found["way_out"].is_string(), "{found:#}");
    }
    let freeze = &report["devices"][0]["controls"][1];
    assert_eq!(freeze["works"], true, "{report:#}");
}
