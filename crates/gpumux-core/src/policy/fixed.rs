//! The published recipe, as a baseline to measure against: latency domains 1 s, all others 1 µs, nobody
//! is ever frozen (GPreempt, USENIX ATC 2025; its artifact sets these values).
//!
//! It breaks the rule that two runnable domains with a 1 µs slice must never meet: with two busy
//! batch tenants the device switches all the time and neither makes progress. Not for use.

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
                reason: "baseline: a slice by class, nothing else",
            }
        });
        Plan {
            domains: domains.collect(),
            next: None,
        }
    }
}
