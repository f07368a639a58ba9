mod busy;

use super::*;
use crate::policy::{MaxMin, Priority};
use crate::testing::{domain, snapshot};
use crate::{Control, DomainId, DomainState, UserId};

fn plan(snapshot: &Snapshot, memory: &mut Memory) -> Plan {
    Shared::new(Priority).plan(snapshot, memory)
}

fn shape(plan: &Plan) -> Vec<(u64, RunState)> {
    let shape = |domain: &DomainPlan| (domain.timeslice.0, domain.run);
    plan.domains.iter().map(shape).collect()
}

use RunState::{Enabled, Frozen};

#[test]
fn a_tenant_alone_is_left_alone() {
    let alone = snapshot(&[Class::Batch], vec![domain(1, 0)]);
    let got = plan(&alone, &mut Memory::default());
    assert_eq!(got.controls(&alone), []);
    assert_eq!(got.next, None);
}

#[test]
fn latency_goes_before_one_batch_domain() {
    let classes = [Class::Latency, Class::Batch, Class::Batch];
    let domains = vec![domain(1, 0), domain(2, 1), domain(3, 2)];
    let got = plan(&snapshot(&classes, domains), &mut Memory::default());
    assert_eq!(
        shape(&got),
        [(1_000_000, Enabled), (1, Enabled), (1, Frozen)]
    );
}

#[test]
fn an_objective_leaves_the_back_row_a_slice() {
    let classes = [Class::Latency, Class::Latency, Class::Batch];
    let domains = vec![domain(1, 0), domain(2, 1), domain(3, 2)];
    let mut now = snapshot(&classes, domains);
    let slice = |now: &Snapshot| shape(&plan(now, &mut Memory::default()))[2].0;
    now.tenants[0].spec.latency_objective_us = Some(8_000);
    assert_eq!(slice(&now), 1, "the other one has no time");
    now.tenants[1].spec.latency_objective_us = Some(20_000);
    assert_eq!(slice(&now), 800);
    now.tenants[0].spec.latency_objective_us = Some(3_000_000);
    assert_eq!(slice(&now), 2_000);
    now.tenants[1].spec.latency_objective_us = Some(1_000_000);
    assert_eq!(slice(&now), 2_000, "never longer than the driver's own");
}

#[test]
fn foreign_work_ends_the_shortest_timeslice() {
    let classes = [Class::Latency, Class::Batch];
    let mut now = snapshot(&classes, vec![domain(1, 0), domain(2, 1)]);
    let slice = |now: &Snapshot| shape(&plan(now, &mut Memory::default()))[1].0;
    assert_eq!(slice(&now), 1);
    now.crowded = true;
    assert_eq!(slice(&now), 2_000);
}

#[test]
fn launch_bound_program_keeps_its_share_by_timeslices() {
    let classes = [Class::Latency, Class::Batch];
    let mut now = snapshot(&classes, vec![domain(1, 0), domain(2, 1)]);
    now.domains[0].tolerated = Some(Timeslice(2_000));
    let mut memory = Memory::default();
    let got = plan(&now, &mut memory);
    // A floor of 5% for the other.
    assert_eq!(shape(&got), [(37_477, Enabled), (2_000, Enabled)]);
    let slices = |it: &DomainPlan| it.timeslice.0 as f64 - RESTORE_US;
    let progress: Vec<f64> = got.domains.iter().map(slices).collect();
    assert!((progress[0] / progress[1] - 19.0).abs() < 0.01);
    now.domains[0].tolerated = None;
    let got = plan(&now, &mut memory);
    assert_eq!(shape(&got)[0], (1_000_000, Enabled), "preempts");
    // Equal timeslices of 2 ms would cost a sixth of the device.
    now.domains[0].tolerated = Some(Timeslice(2_000));
    now.tenants[1].spec.guaranteed = 0.5;
    let got = plan(&now, &mut memory);
    assert_eq!(shape(&got)[0], (1_000_000, Enabled), "too short");
}

#[test]
fn launch_bound_program_keeps_its_neighbours_timeslices_beside_an_idle_server() {
    let classes = [Class::Latency, Class::Latency, Class::Batch];
    let domains = vec![domain(1, 0), domain(2, 1), domain(3, 2)];
    let mut now = snapshot(&classes, domains);
    now.now = Micros::from_secs(10);
    now.domains[0].tolerated = Some(Timeslice(2_000));
    now.domains[1].demand = Demand::Idle;
    let batch = |now: &Snapshot| shape(&plan(now, &mut Memory::default()))[2];
    assert_eq!(batch(&now), (2_000, Enabled));
    now.tenants[1].spec.latency_objective_us = Some(8_000);
    assert_eq!(batch(&now), (800, Enabled), "it may be back at any time");
    now.tenants[1].spec.latency_objective_us = None;
    now.domains[1].demand_since = Micros::from_millis(9_500);
    assert_eq!(batch(&now), (1, Frozen), "it had work lately");
    let next = plan(&now, &mut Memory::default()).next;
    assert!(next <= Some(Micros::from_millis(10_500)), "{next:?}");
}

#[test]
fn standard_tenants_share_by_slices_that_cost_five_percent() {
    let mut two = snapshot(&[Class::Standard; 2], vec![domain(1, 0), domain(2, 1)]);
    two.tenants[0].spec.guaranteed = 0.7;
    two.tenants[1].spec.guaranteed = 0.3;
    let got = plan(&two, &mut Memory::default());
    let slices: Vec<f64> = got.domains.iter().map(|d| d.timeslice.0 as f64).collect();
    let share = slices[0] / (slices[0] + slices[1]);
    assert!((share - 0.7).abs() < 0.003, "{share}");
    let cost = 2.0 * two.costs.switch.0 as f64 / (slices[0] + slices[1]);
    assert!((cost - 0.05).abs() < 0.001, "{cost}");
    assert_eq!(got.next, None, "slices alone do it");
}

#[test]
fn batch_tenants_alone_are_neither_frozen_nor_switched_often() {
    let four = snapshot(
        &[Class::Batch; 4],
        (0..4).map(|id| domain(id, id)).collect(),
    );
    let got = plan(&four, &mut Memory::default());
    assert!(shape(&got).iter().all(|shape| *shape == (18_829, Enabled)));
}

#[test]
fn a_standard_domain_takes_a_turn_that_batch_only_borrowed() {
    let classes = [Class::Latency, Class::Standard, Class::Batch];
    let mut now = snapshot(&classes, vec![domain(1, 0), domain(2, 1), domain(3, 2)]);
    now.domains[0].demand = Demand::Idle;
    now.domains[1].demand = Demand::Idle;
    let mut memory = Memory::default();
    assert_eq!(shape(&plan(&now, &mut memory))[2], (1, Enabled));
    now.now = Micros::from_secs(1);
    now.domains[2].received = Micros::from_secs(1);
    now.domains[1].demand = Demand::Busy;
    now.domains[1].demand_since = now.now;
    let got = plan(&now, &mut memory);
    assert_eq!(shape(&got)[1..], [(1, Enabled), (1, Frozen)]);
    // The borrower comes back for its floor, but not before the other had a full turn.
    assert!(got.next.expect("a turn ends") >= now.now + Micros::from_millis(40));
}

#[test]
fn a_short_pause_does_not_cost_the_turn_and_a_long_one_does() {
    let classes = [Class::Latency, Class::Batch, Class::Batch];
    let mut now = snapshot(&classes, vec![domain(1, 0), domain(2, 1), domain(3, 2)]);
    let mut memory = Memory::default();
    plan(&now, &mut memory);
    now.now = Micros(5_000);
    now.domains[1].demand = Demand::Idle;
    now.domains[1].demand_since = Micros(4_500);
    let got = plan(&now, &mut memory);
    assert_eq!(shape(&got)[1..], [(1, Enabled), (1, Frozen)]);
    assert_eq!(got.next, Some(Micros(4_500 + 1_008)));
    now.now = Micros(5_600);
    let got = plan(&now, &mut memory);
    assert_eq!(shape(&got)[1..], [(1, Frozen), (1, Enabled)]);
    let last = Control::Freeze(DomainId(2));
    assert_eq!(
        got.controls(&now).last(),
        Some(&last),
        "no tenant waits for it"
    );
}

#[test]
fn contender_in_a_pause_is_kept_from_the_owner() {
    let classes = [Class::Latency, Class::Batch, Class::Batch, Class::Batch];
    let mut now = snapshot(&classes, (1..=4).map(|id| domain(id, id - 1)).collect());
    now.domains[3].demand = Demand::Idle;
    now.now = Micros(200_000);
    let mut memory = Memory::default();
    let states = |plan: &Plan| -> Vec<_> { plan.domains[1..].iter().map(|it| it.run).collect() };
    let first = plan(&now, &mut memory);
    assert_eq!(states(&first), [Enabled, Frozen, Enabled], "long idle");
    // The owner pauses for longer than handing over takes.
    now.now = Micros(210_000);
    now.domains[1].demand = Demand::Idle;
    now.domains[1].demand_since = Micros(205_000);
    let handed_over = plan(&now, &mut memory);
    assert_eq!(states(&handed_over), [Frozen, Enabled, Enabled]);
    assert!(handed_over.next <= Some(Micros(305_000)));
    let with = |change: &dyn Fn(&mut Snapshot)| {
        let (mut later, mut memory) = (now.clone(), memory.clone());
        later.now = Micros(220_000);
        change(&mut later);
        plan(&later, &mut memory)
    };
    let both = with(&|now| {
        now.domains[2].demand = Demand::Idle;
        now.domains[2].demand_since = Micros(215_000);
    });
    let apart = [Frozen, Enabled, Enabled];
    assert_eq!(states(&both), apart, "both may be back at once");
    let long = with(&|now| now.now = Micros(305_000));
    assert_eq!(states(&long), [Enabled; 3]);
    let back = with(&|now| now.domains[1].demand = Demand::Busy);
    assert_eq!(back.domains[1].reason, "waits for its quantum");
}

#[test]
fn short_pause_keeps_what_is_owed_and_a_long_one_forfeits_it() {
    let classes = [Class::Latency, Class::Batch, Class::Batch];
    let mut now = snapshot(&classes, vec![domain(1, 0), domain(2, 1), domain(3, 2)]);
    now.domains[0].demand = Demand::Idle;
    let mut memory = Memory::default();
    plan(&now, &mut memory);
    now.now = Micros(40_000);
    now.domains[1].received = now.now;
    now.domains[2].demand = Demand::Idle;
    now.domains[2].demand_since = now.now;
    plan(&now, &mut memory);
    let back_after = |pause: u64| {
        let (mut now, mut memory) = (now.clone(), memory.clone());
        now.now = Micros(40_000 + pause);
        now.domains[1].received = now.now;
        now.domains[2].demand = Demand::Busy;
        now.domains[2].demand_since = now.now;
        plan(&now, &mut memory);
        memory.lag(DomainId(3))
    };
    assert!((back_after(5_000) - 20_000.0).abs() < 1.0);
    assert!(back_after(5_001).abs() < 1.0);
}

#[test]
fn one_that_may_run_and_whose_work_is_unknown_is_owed_nothing() {
    let classes = [Class::Latency, Class::Batch, Class::Batch];
    let mut now = snapshot(&classes, vec![domain(1, 0), domain(2, 1), domain(3, 2)]);
    now.domains[0].demand = Demand::Unknown;
    let mut memory = Memory::default();
    plan(&now, &mut memory);
    now.now = Micros(400_000);
    now.domains[1].received = Micros(200_000);
    now.domains[2].received = Micros(200_000);
    let lag = |now: &Snapshot, id: u64| {
        let mut memory = memory.clone();
        plan(now, &mut memory);
        memory.lag(DomainId(id))
    };
    for id in 1..=3 {
        assert!(lag(&now, id).abs() < 1.0, "{id}: {}", lag(&now, id));
    }
    // While it is frozen, it may have work that waits.
    now.domains[0].run = Frozen;
    assert!(lag(&now, 1) > 100_000.0 && lag(&now, 2) < -10_000.0);
}

#[test]
fn users_tenants_share_what_the_user_is_entitled_to() {
    let classes = [Class::Latency, Class::Latency, Class::Batch, Class::Batch];
    let mut now = snapshot(&classes, (1..=4).map(|id| domain(id, id - 1)).collect());
    now.tenants[3].user = UserId(7);
    now.domains[1].demand = Demand::Idle;
    let mut memory = Memory::default();
    plan(&now, &mut memory);
    assert!((memory.share(DomainId(4)) - 0.5).abs() < 1e-9);
    // One takes all, pauses, and another of the same user comes: the user is still ahead.
    now.now = Micros(30_000);
    now.domains[0].received = now.now;
    now.domains[0].demand = Demand::Idle;
    now.domains[0].demand_since = now.now;
    now.domains[1].demand = Demand::Busy;
    now.domains[1].demand_since = now.now;
    let next = plan(&now, &mut memory);
    assert!(memory.lag(DomainId(4)) > 14_900.0);
    // The one that pauses counts until it is level, and owes as much.
    assert!(memory.lag(DomainId(2)) < -7_000.0, "{memory:?}");
    now.now = Micros(60_000);
    now.domains[1].received = Micros(30_000);
    let after = plan(&now, &mut memory);
    let runs = |plan: &Plan| [plan.domains[1].run, plan.domains[3].run];
    assert_eq!((runs(&next)[0], runs(&after)), (Enabled, [Frozen, Enabled]));
}

#[test]
fn a_latency_domain_over_its_budget_pauses_until_it_is_level() {
    let classes = [Class::Latency, Class::Batch];
    let mut now = snapshot(&classes, vec![domain(1, 0), domain(2, 1)]);
    now.tenants[1].spec.guaranteed = 0.4;
    let mut memory = Memory::default();
    let first = plan(&now, &mut memory);
    assert_eq!(shape(&first)[0], (1_000_000, Enabled));
    let pause = first.next.expect("the budget ends");
    assert!((55_000..65_000).contains(&pause.0), "{pause}");
    now.now = pause;
    now.domains[0].received = pause;
    let second = plan(&now, &mut memory);
    assert_eq!(shape(&second), [(1_000_000, Frozen), (1, Enabled)]);
    let level = second.next.expect("the pause ends");
    now.domains[1].received = level.saturating_sub(pause);
    now.now = level;
    assert_eq!(shape(&plan(&now, &mut memory))[0], (1_000_000, Enabled));
    // An idle contender has no claim.
    now.domains[0].received += Micros::from_secs(1);
    now.domains[1].demand = Demand::Idle;
    now.now = level + Micros::from_secs(1);
    assert_eq!(shape(&plan(&now, &mut memory))[0], (1_000_000, Enabled));
}

/// A request that is found counts until the next look. What the program says of them tells that they are short.
#[test]
fn latency_domain_with_little_work_is_not_over_its_budget() {
    let classes = [Class::Latency, Class::Batch];
    let mut now = snapshot(&classes, vec![domain(1, 0), domain(2, 1)]);
    now.tenants[1].spec.guaranteed = 0.4;
    let mut memory = Memory::default();
    let pause = plan(&now, &mut memory).next.expect("the budget ends");
    now.now = pause;
    now.domains[0].received = pause;
    let run = |worked, busy_for: u64| {
        let (mut now, mut memory) = (now.clone(), memory.clone());
        now.domains[0].worked = worked;
        now.domains[0].demand_since = pause.saturating_sub(Micros(busy_for));
        shape(&plan(&now, &mut memory))[0].1
    };
    assert_eq!(run(None, 1_000), Frozen);
    assert_eq!(run(Some(0.7), 1_000), Frozen, "more than its share");
    assert_eq!(run(Some(0.3), 1_000), Enabled);
    assert_eq!(run(Some(0.3), 50_000), Frozen, "it works since");
    // One that lies has the device for some bursts, and no longer.
    let lie = |lasts: u64| {
        let mut now = now.clone();
        (now.domains[0].worked, now.now) = (Some(0.0), Micros(lasts));
        (now.domains[0].received, now.domains[0].demand_since) = (now.now, now.now);
        shape(&plan(&now, &mut memory.clone()))[0].1
    };
    assert_eq!((lie(200_000), lie(400_000)), (Enabled, Frozen));
}

#[test]
fn contender_that_must_not_run_pauses_no_other() {
    let classes = [Class::Latency, Class::Batch];
    let mut now = snapshot(&classes, vec![domain(1, 0), domain(2, 1)]);
    now.tenants[1].spec.guaranteed = 0.4;
    now.domains[1].pinned = Some(Frozen);
    for gangs in [vec![], vec![now.domains[1].tenant]] {
        now.gangs = gangs.into_iter().collect();
        let mut memory = Memory::default();
        plan(&now, &mut memory);
        let mut later = now.clone();
        later.now = Micros::from_secs(1);
        later.domains[0].received = later.now;
        assert_eq!(shape(&plan(&later, &mut memory))[0], (1_000_000, Enabled));
    }
}

/// Its memory may be on the host, with work queued.
#[test]
fn quantum_ends_beside_a_latency_domain_that_must_not_run() {
    let classes = [Class::Latency, Class::Standard, Class::Standard];
    let mut now = snapshot(&classes, vec![domain(1, 0), domain(2, 1), domain(3, 2)]);
    now.domains[0].pinned = Some(Frozen);
    let quantum = Tuning::default().quantum(&now.costs, [(0, Class::Standard)]);
    let next = plan(&now, &mut Memory::default()).next.unwrap();
    assert!(next <= Micros(quantum as u64 + 1), "{next}");
}

/// The account of a group begins anew with its members.
#[test]
fn quantum_of_an_owner_whose_account_began_anew_ends() {
    let classes = [Class::Latency, Class::Batch, Class::Batch];
    let mut now = snapshot(&classes, vec![domain(1, 0), domain(2, 1), domain(3, 2)]);
    (now.domains[0].demand, now.now) = (Demand::Idle, Micros::from_secs(600));
    (now.domains[1].received, now.domains[2].received) = (now.now, now.now);
    let mut memory = Memory::default();
    let first = shape(&plan(&now, &mut memory));
    let owner = first.iter().rposition(|it| it.1 == Enabled).unwrap();
    for (index, domain) in now.domains.iter_mut().enumerate() {
        domain.run = if index == owner { Enabled } else { Frozen };
    }
    now.domains[owner].received = Micros::ZERO;
    plan(&now, &mut memory);
    now.now += Micros::from_millis(300);
    now.domains[owner].received = Micros::from_millis(300);
    assert_eq!(shape(&plan(&now, &mut memory))[owner].1, Frozen);
}

#[test]
fn what_a_limited_domain_took_too_much_is_not_forgotten_when_another_comes() {
    let classes = [Class::Latency, Class::Latency, Class::Batch];
    let mut now = snapshot(&classes, vec![domain(1, 0), domain(2, 1), domain(3, 2)]);
    now.tenants[0].spec.limit = 0.3;
    now.domains[1].demand = Demand::Idle;
    let mut memory = Memory::default();
    plan(&now, &mut memory);
    now.now = Micros::from_millis(100);
    now.domains[0].received = now.now;
    assert_eq!(shape(&plan(&now, &mut memory))[0].1, Frozen);
    let debt = memory.lag(DomainId(1));
    now.domains[1].demand = Demand::Busy;
    plan(&now, &mut memory);
    let later = memory.lag(DomainId(1));
    assert!(
        later < -30_000.0 && (later - debt).abs() < 100.0,
        "{debt}, {later}"
    );
}

/// Timeslices give it a half, which is more than its limit: the third domain takes no part, as far as is known.
#[test]
fn limit_holds_beside_one_without_memory_or_known_demand() {
    let known = |it: &mut DomainState| (it.pinned, it.run) = (Some(Frozen), Frozen);
    let unknown = |it: &mut DomainState| it.demand = Demand::Unknown;
    for third in [&known as &dyn Fn(&mut DomainState), &unknown] {
        let domains = (0..3).map(|id| domain(id + 1, id)).collect();
        let mut now = snapshot(&[Class::Standard; 3], domains);
        now.tenants[0].spec.limit = 0.4;
        now.tenants[2].spec.weight = 8.0;
        third(&mut now.domains[2]);
        let mut memory = Memory::default();
        let got = plan(&now, &mut memory);
        assert_eq!(got.domains[0].timeslice, got.domains[1].timeslice);
        now.now = got.next.expect("it will have run ahead");
        assert!(now.now < Micros::from_millis(300), "{:?}", now.now);
        for domain in &mut now.domains[..2] {
            domain.received = Micros(now.now.0 / 2);
        }
        let got = plan(&now, &mut memory);
        assert_eq!(got.domains[0].run, Frozen);
        assert_eq!(got.domains[1].run, Enabled);
    }
}

#[test]
fn max_min_lets_batch_share_by_slices() {
    let classes = [Class::Standard, Class::Batch];
    let now = snapshot(&classes, vec![domain(1, 0), domain(2, 1)]);
    let got = Shared::new(MaxMin).plan(&now, &mut Memory::default());
    assert_eq!(got.domains[0].timeslice, got.domains[1].timeslice);
    assert!(got.domains.iter().all(|domain| domain.run == Enabled));
}

#[test]
fn what_is_gone_is_forgotten() {
    let classes = [Class::Latency, Class::Batch, Class::Batch];
    let mut now = snapshot(&classes, vec![domain(1, 0), domain(2, 1), domain(3, 2)]);
    let mut memory = Memory::default();
    plan(&now, &mut memory);
    now.domains.clear();
    now.tenants.clear();
    assert_eq!(plan(&now, &mut memory), Plan::default());
    assert_eq!((memory.owner, memory.domains.len()), (None, 0));
}
