//! How long a plan takes: 64 domains of 32 tenants of all classes, half of them idle.

use std::hint::black_box;

use criterion::Criterion;
use gpumux_core::{
    Class, Costs, Demand, DomainId, DomainState, Memory, Micros, RunState, Snapshot, TenantId,
    TenantSpec, TenantState, Timeslice, UserId, policy,
};

fn snapshot() -> Snapshot {
    let tenants = (0..32).map(|id| TenantState {
        id: TenantId(id),
        user: UserId::default(),
        spec: TenantSpec {
            class: Class::ALL[id as usize % 3],
            guaranteed: 0.02,
            weight: 1.0 + id as f64,
            ..TenantSpec::default()
        },
    });
    let domains = (0..64).map(|id| DomainState {
        id: DomainId(id),
        tenant: TenantId(id / 2),
        demand: if id % 2 == 0 {
            Demand::Busy
        } else {
            Demand::Idle
        },
        demand_since: Micros::ZERO,
        expected: None,
        tolerated: None,
        received: Micros::ZERO,
        timeslice: Timeslice::DEFAULT,
        run: RunState::Enabled,
        pinned: None,
    });
    Snapshot {
        now: Micros::ZERO,
        tenants: tenants.collect(),
        domains: domains.collect(),
        costs: Costs::default(),
        ..Snapshot::default()
    }
}

fn plan(criterion: &mut Criterion) {
    for name in policy::NAMES {
        let policy = policy::by_name(name).expect("known");
        let mut snapshot = snapshot();
        let mut memory = Memory::default();
        criterion.bench_function(&format!("plan/64 domains/{name}"), |bencher| {
            bencher.iter(|| {
                snapshot.now += Micros(1_000);
                for domain in &mut snapshot.domains {
                    domain.received += Micros(15);
                }
                black_box(policy.plan(&snapshot, &mut memory))
            });
        });
    }
}

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    plan(&mut criterion);
    criterion.final_summary();
}
