//! What the thread does in a second: how often it wakes up, looks at the processes' pages, plans and issues controls.

use super::*;

/// What it takes to wake up on a machine that has other work.
const WAKING: Micros = Micros(40);

/// So many in a second.
#[derive(Clone, Copy, Debug)]
struct Effort {
    steps: u64,
    /// Each reads the pages of all.
    looks: u64,
    plans: u64,
    controls: u64,
    timeslices: u64,
}

/// That of sixteen tenants, of which so many are latency tenants, after two seconds; all have work, or none has.
fn effort(latency: u32, busy: bool) -> Effort {
    const SECONDS: u64 = 10;
    let mut bench = Bench::new();
    for n in 1..=16 {
        let class = match n <= latency {
            true => Class::Latency,
            false => Class::Batch,
        };
        bench.add(n, class);
        let domains = &bench.engine.state.devices["GPU-0"].domains;
        let page = Arc::clone(domains.values().last().unwrap().page());
        bench.meet(n.into(), TenantId(n.into()), page);
        if !busy {
            bench.pages.last().unwrap().slot(n).unwrap().complete(1);
        }
    }
    let run = |bench: &mut Bench, seconds: u64| {
        let end = bench.engine.state.now() + Micros::from_secs(seconds);
        while bench.engine.state.now() < end {
            // A program that did nothing at all would be let run again now and then.
            let pages = bench.pages.iter().zip(1..).filter(|_| busy);
            pages.for_each(|(page, n)| _ = page.slot(n).unwrap().submit());
            let next = bench.engine.step().unwrap_or(end).min(end);
            bench.engine.woke(WAKING);
            let mut hardware = bench.hardware();
            hardware.now = hardware.now.max(next.0);
        }
    };
    let counts = |bench: &Bench| {
        let pulls = &bench.hardware().pulls;
        let sets = pulls.iter().filter(|it| matches!(it, Pull::Set(..)));
        [
            bench.engine.steps.count,
            bench.engine.state.devices["GPU-0"].looks,
            bench.engine.stats.plans,
            pulls.len() as u64,
            sets.count() as u64,
        ]
    };
    run(&mut bench, 2);
    let before = counts(&bench);
    run(&mut bench, SECONDS);
    let after = counts(&bench);
    let [steps, looks, plans, controls, timeslices] =
        std::array::from_fn(|at| (after[at] - before[at]) / SECONDS);
    let effort = Effort {
        steps,
        looks,
        plans,
        controls,
        timeslices,
    };
    println!("{latency} latency tenants, busy: {busy}: {effort:?}");
    effort
}

#[test]
fn busy_latency_tenants_share_with_few_controls() {
    let it = effort(8, true);
    assert_eq!(it.timeslices, 0, "{it:?}");
    assert!(it.controls <= 6 && it.plans <= 10, "{it:?}");
    assert!(it.steps <= 110 && it.looks <= 115, "{it:?}");
}

#[test]
fn batch_tenants_behind_a_busy_one_take_few_controls() {
    let it = effort(1, true);
    assert!(it.controls <= 45 && it.timeslices == 0, "{it:?}");
    assert!(
        it.steps <= 130 && it.looks <= 170 && it.plans <= 65,
        "{it:?}"
    );
}

#[test]
fn tenants_that_share_by_timeslices_are_looked_at_seldom() {
    let busy = effort(0, true);
    assert!(busy.steps <= 27 && busy.looks <= 27, "{busy:?}");
    assert_eq!((busy.controls, busy.plans), (0, 0), "{busy:?}");
    let idle = effort(0, false);
    assert!(idle.steps <= 105 && idle.looks <= 105, "{idle:?}");
    assert_eq!((idle.controls, idle.plans), (0, 0), "{idle:?}");
}
