//! Fixed timeslices, as a baseline to measure against: 1 s for the first domain of each latency tenant, 1 µs for
//! every other (the values of GPreempt's artifact, USENIX ATC 2025). No domain is ever frozen.
//!
//! What that is depends on the programs:
//! - *a context per program* is not GPreempt. Two batch programs with work preempt each other without end, and neither makes
//!   progress, so this breaks the rule that two runnable domains with a 1 µs timeslice never meet;
//! - *one program with two contexts*, of class latency, is GPreempt's arrangement: latency work in the first context,
//!   all batch work in the second, so that only one domain has 1 µs.
//!
//! Not for use.

use std::collections::BTreeSet;

use super::{contract::Policy, lag::Memory};
use crate::{Class, DomainPlan, Plan, RunState, Snapshot, Timeslice};

/// See the module.
#[derive(Clone, Copy, Debug, Default)]
pub struct Fixed;

impl Policy for Fixed {
    fn name(&self) -> &'static str {
        "fixed"
    }

    fn plan(&self, snapshot: &Snapshot, _: &mut Memory) -> Plan {
        let mut seen = BTreeSet::new();
        // Ids rise in the order in which contexts are made.
        let domains = snapshot.domains.iter().map(|domain| {
            let class = snapshot
                .tenant(domain.tenant)
                .map(|tenant| tenant.spec.class);
            let first = seen.insert(domain.tenant);
            let timeslice = if first && class == Some(Class::Latency) {
                Timeslice::MAX
            } else {
                Timeslice::MIN
            };
            DomainPlan {
                id: domain.id,
                timeslice,
                run: RunState::Enabled,
                reason: "baseline: a fixed timeslice by class",
            }
        });
        Plan {
            domains: domains.collect(),
            next: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Demand, DomainId, DomainState, Micros, TenantId, TenantSpec, TenantState};

    #[test]
    fn second_context_of_a_latency_program_has_1_us() {
        let tenant = |id, class| TenantState {
            id: TenantId(id),
            user: crate::UserId::default(),
            spec: TenantSpec {
                class,
                ..TenantSpec::default()
            },
        };
        let domain = |id, tenant| DomainState {
            id: DomainId(id),
            tenant: TenantId(tenant),
            demand: Demand::Busy,
            demand_since: Micros(0),
            request: None,
            worked: None,
            expected: None,
            tolerated: None,
            received: Micros(0),
            timeslice: Timeslice::DEFAULT,
            run: RunState::Enabled,
            pinned: None,
        };
        let snapshot = Snapshot {
            tenants: vec![tenant(1, Class::Latency), tenant(2, Class::Batch)],
            domains: vec![domain(1, 1), domain(2, 2), domain(3, 1), domain(4, 2)],
            ..Snapshot::default()
        };
        let plan = Fixed.plan(&snapshot, &mut Memory::default());
        let slices: Vec<_> = plan.domains.iter().map(|it| it.timeslice).collect();
        let (long, short) = (Timeslice::MAX, Timeslice::MIN);
        assert_eq!(slices, [long, short, short, short]);
        assert!(plan.domains.iter().all(|it| it.run == RunState::Enabled));
    }
}
