//! A policy of its own: the tighter a tenant's latency objective, the more it gets of what is not guaranteed.
//! `docs/add-a-policy.md` explains it. Run with `cargo run -p gpumux-core --example objective`.

use gpumux_core::policy::{Claim, Division, Policy, Shared, fill, guarantees};
use gpumux_core::{
    Costs, Demand, DomainId, DomainState, Memory, Micros, Snapshot, TenantId, TenantSpec,
    TenantState, UserId,
};

/// Divides what is not guaranteed in inverse proportion to the latency objectives.
struct Objective;

/// A tenant without an objective is served as if its objective were a second.
const PATIENT: Micros = Micros::from_secs(1);

impl Division for Objective {
    fn name(&self) -> &'static str {
        "objective"
    }

    fn divide(&self, claims: &[Claim]) -> Vec<f64> {
        let mut shares = guarantees(claims);
        fill(&mut shares, claims, |claim| {
            1.0 / claim.objective.unwrap_or(PATIENT).0.max(1) as f64
        });
        shares
    }
}

fn main() {
    let objectives = [Some(10_000), Some(40_000), None];
    let tenants = objectives.into_iter().enumerate().map(|(id, objective)| {
        let spec = TenantSpec {
            latency_objective_us: objective,
            ..TenantSpec::default()
        };
        TenantState {
            id: TenantId(id as u64),
            user: UserId::default(),
            spec,
        }
    });
    let domains =
        (0..3).map(|id| DomainState::new(DomainId(id), TenantId(id), Demand::Busy, Micros::ZERO));
    let snapshot = Snapshot {
        now: Micros::ZERO,
        tenants: tenants.collect(),
        domains: domains.collect(),
        costs: Costs::default(),
        ..Snapshot::default()
    };

    let plan = Shared::new(Objective).plan(&snapshot, &mut Memory::default());
    for domain in &plan.domains {
        println!(
            "domain {}: {}, {}",
            domain.id.0, domain.timeslice, domain.reason
        );
    }
    let slices: Vec<f64> = plan.domains.iter().map(|d| d.timeslice.0 as f64).collect();
    let ratio = slices[0] / slices[1];
    assert!((3.8..4.2).contains(&ratio), "10 ms against 40 ms: {ratio}");
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_tightest_objective_gets_most() {
        super::main();
    }
}
