//! Latency tenants that always have work, beside each other and beside others.

use super::*;
use crate::accounts::Accounts;

/// Two latency domains that take what they can get, from the first plan on for two seconds. A third has no work.
fn greedy(classes: &[Class]) -> (Snapshot, Memory) {
    let domains = (0..classes.len() as u64).map(|id| domain(id + 1, id));
    let mut now = snapshot(classes, domains.collect());
    for (domain, class) in now.domains.iter_mut().zip(classes).skip(2) {
        if *class == Class::Latency {
            domain.demand = Demand::Idle;
        }
    }
    let mut memory = Memory::default();
    for ms in 0..=2000 {
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
    let (now, mut memory) = greedy(&[Class::Latency; 2]);
    let shared = [(2_048, Enabled), (2_048, Enabled)];
    assert_eq!(shape(&plan(&now, &mut memory)), shared);
    // A pause between two tokens changes nothing. After one between two sequences it is looked at.
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
        for _ in 0..pause / 80 {
            plan(&now, &mut memory);
            now.now += Micros::from_millis(1);
        }
        assert_eq!(shape(&plan(&now, &mut memory)), shared, "{pause} ms");
    }
    // A tenth of an objective is the longest timeslice.
    let with = |change: &dyn Fn(&mut Snapshot)| {
        let (mut now, mut memory) = (now.clone(), memory.clone());
        change(&mut now);
        shape(&plan(&now, &mut memory))
    };
    let objective = |us| with(&|now| now.tenants[1].spec.latency_objective_us = Some(us));
    assert_eq!(objective(18_000), [(1_829, Enabled), (1_829, Enabled)]);
    let rotates = |plan: Vec<(u64, RunState)>| plan.iter().any(|(_, run)| *run == Frozen);
    assert!(
        rotates(objective(2_000)),
        "shorter than the least timeslice"
    );
    // Timeslices keep no promise exactly.
    assert!(rotates(with(&|now| now.tenants[0].spec.guaranteed = 0.1)));
    assert!(rotates(with(&|now| now.tenants[1].spec.limit = 0.6)));
    assert!(rotates(with(&|now| now.tenants[1].spec.weight = 3.0)));
    assert!(rotates(with(&|now| now.tenants[1].user = UserId(1))));
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

/// One that is busy while it starts, and then has a request each 5 ms, or the next as soon as one that was late is over. While these share by timeslices,
/// most of its time is waiting, or all, and accounts that follow timeslices count its part of that.
#[test]
fn short_requests_after_a_busy_start_take_the_device() {
    for (guaranteed, waits) in [(0.0, 7), (0.02, 7)] {
        let (mut now, mut memory) = greedy(&[Class::Latency; 3]);
        now.tenants[2].spec.guaranteed = guaranteed;
        let mut accounts = Accounts::default();
        // Of 500 µs each. A request needs one with the device for itself, and waits for others' timeslices otherwise.
        let (mut needs, mut due, mut requests, mut at_once) = (0, 4_000, 0, 0);
        let mut came = now.now;
        for step in 0..50_000 {
            if step < 4_000 {
                needs = 2;
            } else if step >= due && needs == 0 {
                (needs, due, came) = (waits, due.max(step) + 10, now.now);
            }
            let counts = step >= 10_000;
            let third = &mut now.domains[2];
            let demand = if needs > 0 {
                Demand::Busy
            } else {
                Demand::Idle
            };
            if third.demand != demand {
                (third.demand, third.demand_since) = (demand, now.now);
            }
            let planned = plan(&now, &mut memory).domains;
            for (domain, it) in now.domains.iter_mut().zip(planned) {
                (domain.timeslice, domain.run) = (it.timeslice, it.run);
            }
            accounts.advance(now.now, &now.domains, &now.costs);
            now.now += Micros(500);
            accounts.advance(now.now, &now.domains, &now.costs);
            for domain in &mut now.domains {
                domain.received = accounts.get(domain.id).received();
            }
            requests += u32::from(counts && needs == waits);
            match (now.domains[2].run, now.domains[2].timeslice.0) {
                (Frozen, _) => {}
                (Enabled, 1_000_000) => {
                    at_once += u32::from(counts && needs == waits);
                    needs = 0;
                }
                (Enabled, _) => needs = i32::max(needs - 1, 0),
            }
            if needs == 0 {
                now.domains[2].request = Some(now.now.saturating_sub(came));
            }
        }
        assert!(
            requests > 1_000 && 100 * at_once >= 99 * requests,
            "{at_once} of {requests}, {waits}"
        );
    }
}

/// It is not known for a while whether it has work, as of a process that starts and waits for others.
#[test]
fn short_requests_after_a_long_start_take_the_device_within_a_second() {
    let (mut now, mut memory) = greedy(&[Class::Latency; 3]);
    for ms in 0..40_000 {
        let third = &mut now.domains[2];
        let demand = match ms {
            ..5_000 => Demand::Unknown,
            5_000..20_000 => Demand::Busy,
            20_000..22_000 => Demand::Idle,
            // It waits among timeslices.
            _ if ms % 5 < 4 => Demand::Busy,
            _ => Demand::Idle,
        };
        if third.demand != demand {
            (third.demand, third.demand_since) = (demand, now.now);
        }
        if shape(&plan(&now, &mut memory))[2] == (1_000_000, Enabled) && ms > 22_000 {
            assert!(ms < 23_200, "{ms}");
            return;
        }
        for domain in &mut now.domains[..2] {
            domain.received += Micros(500);
        }
        now.now += Micros::from_millis(1);
    }
    panic!("it never did");
}

/// In a look, one waits for the other for whole quanta. Two that never pause, two language models, 9 ms of work and 1 ms without, which timeslices make
/// 18 and 1, and two with less work at a time.
#[test]
fn tenants_that_take_what_they_can_get_are_seldom_looked_at() {
    // Of 60 s, and at a time, in ms.
    for (works, pause, all, once) in [(18, 0, 20, 10), (18, 1, 50, 30), (6, 1, 250, 100)] {
        let (apart, longest) = apart(works, pause);
        assert!((1..=all).contains(&apart), "{apart} ms, {works} {pause}");
        assert!(longest <= once, "{longest} ms, {works} {pause}");
    }
}

/// Planned twice at the same moment, it is the same.
#[test]
fn look_begins_in_the_plan_that_finds_it_due() {
    let (mut now, mut memory) = greedy(&[Class::Latency; 2]);
    for _ in 0..5_000 {
        let first = shape(&plan(&now, &mut memory));
        assert_eq!(shape(&plan(&now, &mut memory)), first, "{}", now.now);
        now.now += Micros::from_millis(1);
    }
}

/// It would keep the others apart for the whole of a look, and show nothing.
#[test]
fn tenant_without_work_is_not_looked_at() {
    let (mut now, mut memory) = greedy(&[Class::Latency; 3]);
    let (mut apart, mut longest) = (0, 0);
    for ms in 0..20_000 {
        let demand = if ms < 1_000 && ms % 5 < 4 {
            Demand::Busy
        } else {
            Demand::Idle
        };
        let third = &mut now.domains[2];
        if third.demand != demand {
            (third.demand, third.demand_since) = (demand, now.now);
        }
        let got = plan(&now, &mut memory);
        let together = shape(&got)[..2] == [(2_048, Enabled); 2];
        apart = if together { 0 } else { apart + 1 };
        longest = longest.max(if ms < 1_100 { 0 } else { apart });
        now.now += Micros::from_millis(1);
    }
    assert_eq!(longest, 0);
}

/// How long those are apart in the last 60 of 100 s in all, and at most, in ms.
fn apart(works: i32, pause: i32) -> (u32, u32) {
    let (mut now, mut memory) = greedy(&[Class::Latency; 2]);
    let (mut apart, mut longest, mut look) = (0, 0, 0);
    let mut lefts = [(works, now.now), (works / 2, now.now)];
    for ms in 0..100_000 {
        let got = plan(&now, &mut memory);
        let together = shape(&got) == [(2_048, Enabled), (2_048, Enabled)];
        look = if together { 0 } else { look + 1 };
        longest = longest.max(look);
        apart += u32::from(!together && ms > 40_000);
        for (domain, it) in now.domains.iter_mut().zip(got.domains) {
            (domain.timeslice, domain.run) = (it.timeslice, it.run);
        }
        let frozen = now.domains.iter().filter(|it| it.run == Frozen).count();
        now.now += Micros::from_millis(1);
        for (domain, (left, begun)) in now.domains.iter_mut().zip(&mut lefts) {
            if domain.demand == Demand::Busy && domain.run == Enabled {
                domain.received += Micros(if frozen > 0 { 1_000 } else { 500 });
                *left -= if frozen > 0 { 2 } else { 1 };
            }
            let demand = if *left > 0 || pause == 0 {
                Demand::Busy
            } else {
                Demand::Idle
            };
            if *left <= 0 {
                domain.request = Some(now.now.saturating_sub(*begun));
                (*left, *begun) = (works, now.now);
            }
            if domain.demand != demand {
                (domain.demand, domain.demand_since) = (demand, now.now);
            }
        }
    }
    (apart, longest)
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

/// Of none it is known whether it has short requests.
#[test]
fn latency_tenants_of_unknown_demand_share_by_timeslices_at_once() {
    let mut domains = vec![domain(1, 0), domain(2, 1)];
    domains
        .iter_mut()
        .for_each(|it| it.demand = Demand::Unknown);
    let now = snapshot(&[Class::Latency; 2], domains);
    let got = plan(&now, &mut Memory::default());
    assert_eq!(shape(&got), [(2_048, Enabled), (2_048, Enabled)]);
    assert!(
        got.next >= Some(now.now + Micros::from_millis(2)),
        "{got:?}"
    );
}

#[test]
fn short_requests_take_the_device_from_busy_latency_tenants() {
    let (mut now, mut memory) = greedy(&[Class::Latency; 3]);
    (now.domains[2].demand, now.domains[2].demand_since) = (Demand::Busy, now.now);
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

/// A device whose domains with work have it one after the other, each for its timeslice. The first domain always has work for a second,
/// none in the µs of `pause`, and then a request of 300 µs each 3 ms, or as soon as those that are late have ended (only the last of them, if it is
/// not `open`), but none ends in the first µs of `stall`. The others always have work. When the last request came that waited for others, in µs
/// from the first.
fn last_that_waited(mut now: Snapshot, pause: u64, stall: u64, open: bool) -> u64 {
    const STEP: u64 = 100;
    let (mut memory, mut accounts) = (Memory::default(), Accounts::default());
    let first = 1_000_000 + pause;
    // What a request lacks, when it came and the next comes, which domain has the device, and for how long yet.
    let (mut lacks, mut came, mut due, mut turn, mut left, mut last) = (0, 0, first, 0, 0, 0);
    let observed = if now.domains.len() < 10 {
        7_000_000
    } else {
        3_000_000
    };
    for at in (0..first + observed).step_by(STEP as usize) {
        now.now = Micros(at);
        if at < 1_000_000 {
            lacks = 300;
        } else if at == 1_000_000 {
            lacks = 0;
        }
        if lacks == 0 && due <= at {
            let since = if open { due } else { at };
            (lacks, came, due) = (300, at, since + 3_000);
        }
        let demand = if lacks > 0 {
            Demand::Busy
        } else {
            Demand::Idle
        };
        if now.domains[0].demand != demand {
            (now.domains[0].demand, now.domains[0].demand_since) = (demand, now.now);
        }
        let planned = plan(&now, &mut memory).domains;
        for (domain, it) in now.domains.iter_mut().zip(planned) {
            (domain.timeslice, domain.run) = (it.timeslice, it.run);
        }
        // A shorter timeslice holds at once.
        left = left.min(now.domains[turn].timeslice.0.max(STEP));
        accounts.advance(now.now, &now.domains, &now.costs);
        now.now += Micros(STEP);
        accounts.advance(now.now, &now.domains, &now.costs);
        for domain in &mut now.domains {
            domain.received = accounts.get(domain.id).received();
        }
        let runs = |it: &DomainState| it.demand == Demand::Busy && it.run == Enabled;
        if left == 0 || !runs(&now.domains[turn]) {
            let all = now.domains.len();
            let mut next = (1..=all).map(|by| (turn + by) % all);
            // The owner may pause.
            let Some(next) = next.find(|at| runs(&now.domains[*at])) else {
                continue;
            };
            (turn, left) = (next, now.domains[next].timeslice.0.max(STEP));
        }
        left = left.saturating_sub(STEP);
        if turn == 0 && at >= first + stall {
            lacks -= STEP;
            if lacks == 0 {
                now.domains[0].request = Some(Micros(at + STEP - came));
                // Its host does something first, and the device goes on.
                left = 0;
                last = if at - came > 1_000 {
                    came - first
                } else {
                    last
                };
            }
        }
    }
    last
}

/// They are looked at as soon as they come. If such a look shows nothing, since others begin at the same time, another one does.
#[test]
fn short_requests_that_come_before_the_next_round_take_the_device() {
    let cases = [
        (600_000, 0, 50_000),
        (600_000, 15_000, 50_000),
        (600_000, 40_000, 700_000),
        // Others start meanwhile. One without a pause is looked at, too.
        (0, 500_000, 2_100_000),
    ];
    for (others, guaranteed) in [(2, 0.0), (2, 0.2), (22, 0.03)] {
        let classes: Vec<Class> = std::iter::repeat_n(Class::Latency, 2)
            .chain(std::iter::repeat_n(Class::Batch, others))
            .collect();
        for (pause, stall, most) in cases {
            let domains = (0..classes.len() as u64).map(|id| domain(id + 1, id));
            let mut now = snapshot(&classes, domains.collect());
            for tenant in &mut now.tenants {
                tenant.spec.guaranteed = guaranteed;
            }
            for open in [false, true] {
                let last = last_that_waited(now.clone(), pause, stall, open);
                assert!(
                    last < most,
                    "{last} µs, pause {pause}, stall {stall}, {others} others, guaranteed {guaranteed}, open {open}"
                );
            }
        }
    }
}
