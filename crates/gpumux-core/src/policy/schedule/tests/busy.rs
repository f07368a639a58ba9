//! Latency tenants that always have work, beside each other and beside others.

use super::*;

/// Latency domains that take what they can get, from the first plan on for a second.
fn greedy(classes: &[Class]) -> (Snapshot, Memory) {
    let domains = (0..classes.len() as u64).map(|id| domain(id + 1, id));
    let mut now = snapshot(classes, domains.collect());
    let mut memory = Memory::default();
    for ms in 0..=1000 {
        now.now = Micros::from_millis(ms);
        plan(&now, &mut memory);
        for domain in &mut now.domains[..2] {
            domain.received += Micros(500);
        }
    }
    (now, memory)
}

#[test]
fn busy_latency_tenants_share_by_timeslices() {
    let (mut now, mut memory) = greedy(&[Class::Latency; 2]);
    let shared = [(2_048, Enabled), (2_048, Enabled)];
    assert_eq!(shape(&plan(&now, &mut memory)), shared);
    // A pause between two tokens changes nothing, nor does one between two sequences.
    for pause in [5, 5_000] {
        let (mut now, mut memory) = (now.clone(), memory.clone());
        now.domains[0].demand = Demand::Idle;
        now.domains[0].demand_since = now.now;
        plan(&now, &mut memory);
        now.now += Micros::from_millis(pause);
        now.domains[1].received += Micros::from_millis(pause);
        plan(&now, &mut memory);
        now.domains[0].demand = Demand::Busy;
        now.domains[0].demand_since = now.now;
        assert_eq!(shape(&plan(&now, &mut memory)), shared, "{pause} ms");
    }
    now.tenants[0].spec.weight = 3.0;
    let slices = plan(&now, &mut memory).domains;
    let work = |it: &DomainPlan| it.timeslice.0 as f64 - RESTORE_US;
    assert!((work(&slices[0]) / work(&slices[1]) - 3.0).abs() < 0.01);
    // A tenth of an objective is the longest timeslice, if the shares can be had so.
    let slices_with = |objective, limit| {
        let (mut now, mut memory) = (now.clone(), memory.clone());
        now.tenants[1].spec.latency_objective_us = Some(objective);
        now.tenants[0].spec.limit = limit;
        plan(&now, &mut memory).domains
    };
    let slices = slices_with(18_000, 1.0);
    assert!((work(&slices[0]) - 1_800.0).abs() <= 1.0);
    assert!((work(&slices[0]) / work(&slices[1]) - 3.0).abs() < 0.01);
    let rotates = |slices: &[DomainPlan]| slices.iter().any(|it| it.run == Frozen);
    assert!(rotates(&slices_with(10_000, 1.0)));
    assert!(rotates(&slices_with(18_000, 0.6)), "a limit is one of time");
}

/// However often it is planned meanwhile.
#[test]
fn short_requests_are_never_taken_for_a_busy_tenant() {
    for (pause, step) in [(20, 20), (300, 300), (300, 10), (5_000, 5_000)] {
        let (mut now, mut memory) = greedy(&[Class::Latency; 3]);
        for _ in 0..500 {
            let third = now.domains.last_mut().expect("three");
            (third.demand, third.demand_since) = (Demand::Busy, now.now);
            plan(&now, &mut memory);
            now.now += Micros::from_millis(1);
            let third = now.domains.last_mut().expect("three");
            third.received += Micros::from_millis(1);
            (third.demand, third.demand_since) = (Demand::Idle, now.now);
            let got = plan(&now, &mut memory);
            assert_eq!(shape(&got)[2].0, 1_000_000, "{pause} ms");
            for _ in 0..pause / step {
                for domain in &mut now.domains[..2] {
                    domain.received += Micros::from_millis(step / 2);
                }
                now.now += Micros::from_millis(step);
                plan(&now, &mut memory);
            }
        }
    }
}

#[test]
fn busy_latency_tenants_leave_the_owner_the_others_shares() {
    let (now, mut memory) = greedy(&[Class::Latency, Class::Latency, Class::Batch, Class::Batch]);
    let got = plan(&now, &mut memory);
    let work = |it: &DomainPlan| it.timeslice.0 as f64 - RESTORE_US;
    let runs: Vec<f64> = got
        .domains
        .iter()
        .filter(|it| it.run == Enabled)
        .map(work)
        .collect();
    assert_eq!(runs.len(), 3, "{:?}", shape(&got));
    let owner = runs[2] / runs.iter().sum::<f64>();
    assert!((owner - 0.05).abs() < 0.001, "the floor: {owner}");
    // While those pause it has the whole device, and its quantum ends as always.
    let (mut now, mut memory) = (now, memory);
    for domain in &mut now.domains[..2] {
        (domain.demand, domain.demand_since) = (Demand::Idle, now.now);
    }
    let quantum = Tuning::default().quantum(&now.costs, [(UserId::default(), Class::Batch)]);
    let soon = now.now + Micros(2 * quantum as u64);
    assert!(plan(&now, &mut memory).next <= Some(soon));
}

/// Shares may differ for a while from those that timeslices give, as in pauses.
#[test]
fn busy_latency_tenants_owe_each_other_little() {
    let (mut now, mut memory) = greedy(&[Class::Latency; 2]);
    for _ in 0..600 {
        now.now += Micros::from_millis(100);
        now.domains[0].received += Micros::from_millis(90);
        now.domains[1].received += Micros::from_millis(9 + 20);
        plan(&now, &mut memory);
    }
    let lags = now.domains.iter().map(|it| memory.lag(it.id).abs());
    assert!(lags.fold(0.0, f64::max) <= 3.0 * 50_400.0);
}

#[test]
fn idle_latency_tenant_has_no_part_of_the_owners_timeslice() {
    let (mut now, mut memory) = greedy(&[Class::Latency; 2]);
    // It owned a quantum while they rotated.
    memory.owner = Some(Owner {
        id: now.domains[0].id,
        borrowed: false,
        over: false,
    });
    (now.domains[0].demand, now.domains[0].demand_since) = (Demand::Idle, now.now);
    let got = plan(&now, &mut memory);
    assert_eq!(shape(&got), [(2_048, Enabled), (2_048, Enabled)]);
}

#[test]
fn short_requests_take_the_device_from_busy_latency_tenants() {
    let (mut now, mut memory) = greedy(&[Class::Latency; 3]);
    now.domains[2].demand_since = now.now;
    let at_once = [(1_000_000, Enabled)];
    assert_eq!(shape(&plan(&now, &mut memory))[2..], at_once);
    let runs = |plan: &Plan| plan.domains.iter().filter(|it| it.run == Enabled).count();
    assert_eq!(runs(&plan(&now, &mut memory)), 2, "it, and the owner");
    now.domains[2].demand = Demand::Idle;
    now.domains[2].demand_since = now.now;
    let got = plan(&now, &mut memory);
    assert_eq!(runs(&got), 2);
    // Until it has sent none for a second.
    let end = now.now + Tuning::default().recent;
    assert!(got.next <= Some(end));
    now.now = end;
    for domain in &mut now.domains[..2] {
        domain.received += Micros::from_millis(500);
    }
    assert_eq!(runs(&plan(&now, &mut memory)), 3);
}

#[test]
fn busy_latency_domain_gives_way_to_another() {
    let classes = [Class::Latency, Class::Latency];
    let mut now = snapshot(&classes, vec![domain(1, 0), domain(2, 1)]);
    now.domains[1].demand = Demand::Idle;
    let mut memory = Memory::default();
    let got = plan(&now, &mut memory);
    assert_eq!(shape(&got)[0].0, 1_000_000);
    assert_eq!(got.next, Some(Micros::from_millis(10)));
    now.now = Micros::from_millis(10);
    let got = plan(&now, &mut memory);
    assert_eq!(shape(&got), [(1, Enabled), (1_000_000, Enabled)]);
}
