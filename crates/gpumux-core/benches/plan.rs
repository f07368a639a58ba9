//! How long a plan takes (64 domains of 32 tenants of all classes, half of them idle), and a step of the controller beside many tenants.

use std::{collections::BTreeMap, hint::black_box};

use criterion::Criterion;
use gpumux_core::{
    Class, Costs, Demand, DomainId, DomainState, Memory, Micros, RunState, Snapshot, TenantId,
    TenantSpec, TenantState, Timeslice, UserId,
    controller::{Controller, Event, NewDomain, Outcome},
    policy,
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
    let domains = (0..64).map(|id| {
        DomainState::new(
            DomainId(id),
            TenantId(id / 2),
            if id % 2 == 0 {
                Demand::Busy
            } else {
                Demand::Idle
            },
            Micros::ZERO,
        )
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

/// A latency tenant and so many batch tenants that all have work.
fn controller(tenants: u64) -> Controller {
    let mut controller = Controller::new(BTreeMap::new());
    let policy = policy::by_name("priority").expect("known");
    controller.add_device(policy.into(), Costs::default(), Micros::ZERO);
    for id in 0..=tenants {
        let class = if id == 0 {
            Class::Latency
        } else {
            Class::Batch
        };
        let spec = TenantSpec {
            class,
            ..TenantSpec::default()
        };
        let tenant = TenantId(id);
        controller.handle(Micros::ZERO, Event::Tenant(tenant, UserId::default(), spec));
        let new = NewDomain {
            device: 0,
            id: DomainId(id),
            tenant,
            group: None,
            demand: Demand::Busy,
            timeslice: Timeslice::DEFAULT,
            default: Timeslice::DEFAULT,
            run: RunState::Enabled,
        };
        controller.handle(Micros::ZERO, Event::Came(new));
    }
    controller
}

/// Carries out all controls at once.
fn settle(controller: &mut Controller, now: Micros) {
    while controller.next_wakeup().is_some_and(|at| at <= now) {
        if let Some(command) = controller.poll(now) {
            let ended = Event::Ended(command.id, Outcome::Done(Micros(200)));
            controller.handle(now, ended);
        }
    }
}

/// A millisecond: the demand of the latency tenant has changed, that of the others was looked at, and what follows is carried out.
fn step(criterion: &mut Criterion) {
    for tenants in [15, 300] {
        let mut controller = controller(tenants);
        let (mut now, mut busy) = (Micros::ZERO, true);
        settle(&mut controller, now);
        criterion.bench_function(&format!("step/{tenants} batch tenants"), |bencher| {
            bencher.iter(|| {
                now += Micros(1_000);
                busy = !busy;
                let demand = if busy { Demand::Busy } else { Demand::Idle };
                controller.handle(now, Event::Demand(DomainId(0), demand));
                for id in 0..=tenants {
                    let at_work = id > 0 || busy;
                    controller.handle(now, Event::AtWork(DomainId(id), at_work));
                }
                settle(&mut controller, now);
                black_box(controller.plans())
            });
        });
    }
}

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    plan(&mut criterion);
    step(&mut criterion);
    criterion.final_summary();
}
