//! Tenants of several processes.

use super::*;

/// Of several processes, the one that was moved is moved back.
/// Whether a tenant has a domain of each of two processes.
fn both(tenant: &Value) -> bool {
    tenant["domains"].as_array().map(Vec::len) == Some(2)
}

/// A tenant `work` of two processes that work; none without Python.
fn two_processes(node: &Node) -> Option<Process> {
    let program = python(node, WORK)?;
    let mut process =
        Process::start(&mut node.tenant("--name work", &format!("{program} children 2")));
    node.wait_tenant("work", both);
    process.wait_lines(6);
    Some(process)
}

#[test]
fn failed_call_is_undone_for_all_processes() {
    let fault = (
        "GPUMUX_EMU_FAULT",
        "fail@2:cuCheckpointProcessRestore".to_owned(),
    );
    let Some(node) = devices(&[fault]) else {
        return;
    };
    let Some(mut process) = two_processes(&node) else {
        return;
    };
    refused(&node, &mut process, "work", "1", "goes on where it was");
    node.wait_tenant("work", both);
    assert_eq!(numbers(&node, "work"), [0]);
    goes_on(&mut process);
}

#[test]
fn several_processes_move_together() {
    let Some(node) = devices(&[]) else { return };
    let Some(mut process) = two_processes(&node) else {
        return;
    };
    for to in [1, 0] {
        go(&node, "work", &to.to_string()).ok();
        node.wait_tenant("work", both);
        assert_eq!(numbers(&node, "work"), [to]);
        goes_on(&mut process);
    }
}
