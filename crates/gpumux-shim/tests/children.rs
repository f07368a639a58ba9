//! Children of a program, and the shim in them.

mod support;

use std::process::Command;

use gpumux_wire::Shim;
use support::{Place, context, end_quietly};

fn kill(pid: &str) {
    assert!(
        Command::new("kill")
            .args(["-9", pid])
            .status()
            .unwrap()
            .success()
    );
}

#[test]
fn a_child_forked_before_has_a_session_of_its_own() {
    let place = Place::new();
    let listener = place.listen();
    let mut tenant = place.tenant();
    let child = tenant.tell("fork");
    let (of_child, ..) = listener.session();
    assert_eq!(context(&of_child)[0].2.group, 0x5c00_0200);
    tenant.tell("open");
    tenant.tell("context 100");
    let (of_parent, ..) = listener.session();
    assert_eq!(context(&of_parent)[0].2.group, 0x100);
    kill(&child);
    assert!(of_child.recv().is_none());
    end_quietly(tenant);
}

#[test]
fn a_child_forked_after_keeps_nothing_and_may_begin_anew() {
    let place = Place::new();
    let listener = place.listen();
    let mut tenant = place.tenant_with_context();
    let (session, ..) = listener.session();
    context(&session);
    let idle = tenant.tell("fork-idle");
    let busy = tenant.tell("fork");
    let (of_child, ..) = listener.session();
    let first = &context(&of_child)[0];
    assert_eq!(
        (first.0, first.2.group),
        (0, 0x5c00_0200),
        "the parent's groups are not the child's"
    );
    // The parent's session goes on, and ends with the parent although its children live.
    tenant.tell("free 110");
    assert!(matches!(session.packet(), Shim::Gone { .. }));
    tenant.child.kill().unwrap();
    assert!(session.recv().is_none());
    kill(&idle);
    kill(&busy);
    assert!(of_child.recv().is_none());
    tenant.end();
}

#[test]
fn a_child_of_vfork_does_not_change_its_parent() {
    let place = Place::new();
    let listener = place.listen();
    let mut tenant = place.tenant_with_context();
    let (session, ..) = listener.session();
    let [compute, _] = context(&session);
    assert_eq!(tenant.tell("vfork-close"), "0");
    // Had the close counted, the group would be gone and this unheard.
    tenant.tell("slice 100");
    assert_eq!(session.packet(), Shim::TimesliceTouched { key: compute.0 });
    end_quietly(tenant);
}
