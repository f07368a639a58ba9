//! Where tenants' memory is, and on which devices.

use gpumux_core::{broker::Reply, ledger::Holding};
use gpumux_wire::message::Daemon;

use super::*;
use crate::api::types::SwapReason;

#[test]
fn joining_program_is_not_moved_before_its_domain_is_known() {
    let mut bench = Bench::new();
    let tenant = TenantId(1);
    bench.spec(1, TenantSpec::default()).unwrap();
    bench.engine.place(tenant, "team".into());
    let group = bench.group(1, 1, 1);
    let session = SessionId(1);
    bench.meet(1, tenant, Arc::clone(&group.page));
    bench.engine.memory_event(Event::Holds {
        process: ProcessId(session.0),
        device: "GPU-0".into(),
        total: 80 << 30,
        holding: Holding {
            movable: 1 << 30,
            ..Holding::default()
        },
    });
    let sleep = |bench: &mut Bench| {
        let (answer, mut answered) = tokio::sync::oneshot::channel();
        let Engine { moves, state, .. } = &mut bench.engine;
        let request = |request| Event::Sleep(tenant, request);
        moves.request(state, request, answer);
        answered.try_recv()
    };
    let refused = sleep(&mut bench).unwrap().unwrap_err().to_string();
    assert!(refused.contains("shares a group"), "{refused}");
    // It has not joined: it is as any other.
    bench.engine.add(group).unwrap();
    assert!(sleep(&mut bench).is_err(), "it is being moved");
}

#[test]
fn reason_of_a_tenant_on_the_host_is_known() {
    let reason = |is_requested| {
        let mut bench = Bench::new();
        let tenant = TenantId(1);
        let spec = TenantSpec {
            sleep_after_s: Some(2),
            ..TenantSpec::default()
        };
        bench.spec(1, spec).unwrap();
        let group = bench.group(1, 1, 1);
        bench.meet(1, tenant, Arc::clone(&group.page));
        bench.engine.add(group).unwrap();
        bench.engine.memory_event(Event::Holds {
            process: ProcessId(1),
            device: "GPU-0".into(),
            total: 80 << 30,
            holding: Holding {
                movable: 1 << 30,
                ..Holding::default()
            },
        });
        if is_requested {
            let (answer, _) = tokio::sync::oneshot::channel();
            let Engine { moves, state, .. } = &mut bench.engine;
            moves.request(state, |request| Event::Sleep(tenant, request), answer);
        } else {
            bench.run(Micros::from_secs(5));
        }
        let quiesce = |it: &Daemon| match it {
            Daemon::Quiesce { op, .. } => Some(*op),
            _ => None,
        };
        let op = bench.received(1).iter().find_map(quiesce).unwrap();
        let quiet = Event::Reply(ProcessId(1), op, Reply::Quiet(true));
        bench.engine.memory_event(quiet);
        let view = bench.engine.view();
        assert!(view.swapped_out.contains(&tenant));
        view.swap_reasons.get(&tenant).copied()
    };
    assert_eq!(reason(true), Some(SwapReason::Requested));
    assert_eq!(reason(false), Some(SwapReason::Idle));
}

#[test]
fn device_that_is_gone_is_forgotten_unless_it_is_used() {
    const GIB: u64 = 1 << 30;
    let mut bench = Bench::new();
    let known = |(uuid, gib): (&str, u64)| crate::devices::Known {
        uuid: uuid.to_owned(),
        memory_bytes: gib * GIB,
        state: "ok".into(),
        ..crate::devices::Known::default()
    };
    bench.add(1, Class::Batch);
    let listed = |bench: &mut Bench| {
        let view = bench.engine.view();
        let lines = view.memory.iter().map(|line| line.uuid.clone());
        let devices = view.devices.iter().map(|it| it.uuid.clone());
        assert!(devices.clone().eq(lines));
        devices.collect::<Vec<_>>()
    };
    // The first is where the tenant's process is.
    let all = [("GPU-0", 80), ("MIG-0", 80), ("MIG-1", 10)];
    bench.engine.know_devices(all.map(known));
    assert_eq!(listed(&mut bench), ["GPU-0", "MIG-0", "MIG-1"]);
    // A guarantee must fit on each device that there is, and not on one that there was.
    let guarantee = |gib: u64| TenantSpec {
        memory_guaranteed: gib * GIB,
        ..TenantSpec::default()
    };
    bench.spec(2, guarantee(20)).unwrap_err();
    bench.engine.know_devices([("MIG-0", 80)].map(known));
    assert_eq!(listed(&mut bench), ["GPU-0", "MIG-0"], "the first is used");
    bench.spec(2, guarantee(20)).unwrap();
    // Others come and go, with the numbers of those that went.
    for n in 0..20 {
        let uuid = format!("MIG-new-{n}");
        bench
            .engine
            .know_devices([("MIG-0", 80), (&*uuid, 40)].map(known));
        assert_eq!(listed(&mut bench), ["GPU-0", "MIG-0", &*uuid]);
        let most = bench.engine.state.devices.values().map(|it| it.index).max();
        assert_eq!(most, Some(2));
    }
}
