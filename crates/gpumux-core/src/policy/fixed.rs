//! Fixed timeslices, a context per program: a baseline to measure against. Latency domains have 1 s, all others
//! 1 µs (the values of GPreempt's artifact, USENIX ATC 2025), and no domain is ever frozen.
//!
//! GPreempt is something else: it has two contexts in one process, and all batch work shares the one with 1 µs.
//! With a context for each batch program, two busy ones preempt each other for ever and neither makes progress,
//! so this breaks the rule that two runnable domains with a 1 µs timeslice never meet. Not for use.

use super::{Memory, Policy};
use crate::{Class, DomainPlan, Plan, RunState, Snapshot, Timeslice};

/// See the module.
#[derive(Clone, Copy, Debug, Default)]
pub struct Fixed;

impl Policy for Fixed {
    fn name(&self) -> &'static str {
        "fixed"
    }

    fn plan(&self, snapshot: &Snapshot, _: &mut Memory) -> Plan {
        let domains = snapshot.domains.iter().map(|domain| {
            let class = snapshot
                .tenant(domain.tenant)
                .map(|tenant| tenant.spec.class);
            let timeslice = match class {
                Some(Class::Latency) => Timeslice::MAX,
                _ => Timeslice::MIN,
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
