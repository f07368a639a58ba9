//! Snapshots for unit tests.

use crate::{
    Class, Costs, Demand, DomainId, DomainState, Micros, Snapshot, TenantId, TenantSpec,
    TenantState, UserId,
};

/// A busy domain in the state in which a program makes it.
pub(crate) fn domain(id: u64, tenant: u64) -> DomainState {
    DomainState::new(DomainId(id), TenantId(tenant), Demand::Busy, Micros::ZERO)
}

/// Tenants 0, 1, … of these classes, and the domains.
pub(crate) fn snapshot(classes: &[Class], domains: Vec<DomainState>) -> Snapshot {
    let tenant = |(id, class): (usize, &Class)| TenantState {
        id: TenantId(id as u64),
        user: UserId::default(),
        spec: TenantSpec {
            class: *class,
            ..TenantSpec::default()
        },
    };
    Snapshot {
        now: Micros::ZERO,
        tenants: classes.iter().enumerate().map(tenant).collect(),
        domains,
        costs: Costs::default(),
        ..Snapshot::default()
    }
}
