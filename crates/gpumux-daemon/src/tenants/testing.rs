//! What tests of tenants begin with.

use std::{path::PathBuf, sync::Arc};

use gpumux_core::{TenantId, space};

use super::{Files, Tenants, find, watch};
use crate::{
    Config,
    api::types::{NewTenant, Placement, SpecChange},
    groups::Groups,
    peer::{Peer, ProcessId},
    scheduler,
    users::Users,
};

/// This process as another user's.
pub(super) fn peer(uid: u32) -> Peer {
    let process = ProcessId::of(std::process::id());
    Peer {
        uid,
        pid: std::process::id(),
        process,
        fd: process.and_then(ProcessId::watch),
    }
}

/// A process that does nothing, as this user's.
pub(super) fn child(uid: u32) -> (std::process::Child, Peer) {
    let mut command = std::process::Command::new("sleep");
    let child = command.arg("100").spawn().unwrap();
    let process = ProcessId::of(child.id());
    let peer = Peer {
        uid,
        pid: child.id(),
        process,
        fd: process.and_then(ProcessId::watch),
    };
    (child, peer)
}

/// Says that it is a control daemon, as slowly as a file `slow` beside its pipes wants, until its folder is gone.
pub(super) const CONTROL: &str = r#"#!/bin/sh
[ "$1" = -f ] || { cat >/dev/null; echo 1; exit; }
cd "$CUDA_MPS_PIPE_DIRECTORY" || exit
while [ -e "$GPUMUX_TEST_SLOW" ]; do sleep 0.05; done
: >control
while [ -e "$CUDA_MPS_PIPE_DIRECTORY" ]; do sleep 0.05; done
"#;

pub(super) async fn tenants(dir: &tempfile::TempDir) -> Arc<Tenants> {
    with_control(dir, None).await
}

/// With groups, whose control daemons are this script.
pub(super) async fn with_groups(dir: &tempfile::TempDir, script: &str) -> Arc<Tenants> {
    let control = dir.path().join("control.sh");
    gpumux_tests::program(&control, script);
    with_control(dir, Some(control)).await
}

pub(super) async fn with_control(
    dir: &tempfile::TempDir,
    mps_control: Option<PathBuf>,
) -> Arc<Tenants> {
    let config = Config {
        mps_control,
        ..Config::default()
    };
    with_config(dir, config).await
}

pub(super) async fn with_config(dir: &tempfile::TempDir, config: Config) -> Arc<Tenants> {
    let config = Arc::new(config);
    let scheduler = scheduler::start(Arc::clone(&config)).unwrap();
    let files = Files {
        tenants: dir.path().join("tenants.json"),
        settings: dir.path().join("settings.json"),
        programs: dir.path().join("programs.json"),
    };
    let groups = Groups::load(
        &config,
        dir.path(),
        crate::examine::Examiner::new(crate::receiver::Place::Threads),
    );
    let users = Users::new(config);
    let tenants = Tenants::load(files, String::new(), scheduler, groups, users);
    let tenants = tenants.await.unwrap();
    watch(&tenants).await.unwrap();
    tenants
}

pub(super) fn new(name: &str) -> NewTenant {
    NewTenant {
        name: Some(name.into()),
        ..NewTenant::default()
    }
}

/// One that wants to be in a group.
pub(super) fn member(name: &str, trust: &str, guaranteed: f64) -> NewTenant {
    NewTenant {
        trust: Some(trust.into()),
        sharing: space::Sharing::Space,
        spec: SpecChange {
            guaranteed: Some(guaranteed),
            ..SpecChange::default()
        },
        ..new(name)
    }
}

pub(super) async fn placement(tenants: &Tenants, name: &str) -> (TenantId, Placement) {
    let table = tenants.table.lock().await;
    let tenant = find(table.tenants.values(), None, name).unwrap();
    (tenant.id, tenant.placement.clone())
}
