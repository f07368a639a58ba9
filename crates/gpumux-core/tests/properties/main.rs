//! What every policy must keep, whatever happens: random arrivals, departures, demand, specs
//! and times on a device that obeys at once and serves as `Accounts` says.

mod shares;

use std::collections::BTreeMap;

use gpumux_core::{
    Accounts, Class, Control, Costs, Demand, DomainId, DomainState, Memory, Micros, Plan, Policy,
    RunState, Snapshot, TenantId, TenantSpec, TenantState, Timeslice, UserId, fractions, policy,
};
use proptest::prelude::*;

/// One thing that happens.
#[derive(Clone, Debug)]
enum Event {
    Arrive(TenantSpec, Demand),
    Depart(usize),
    Demand(usize, Demand),
    Spec(usize, TenantSpec),
    /// Its program is launch-bound: neighbours may have this timeslice.
    Tolerates(usize, Option<Timeslice>),
    Wait(u64),
}

fn demand() -> impl Strategy<Value = Demand> {
    prop_oneof![
        4 => Just(Demand::Busy),
        2 => Just(Demand::Idle),
        1 => Just(Demand::Unknown),
    ]
}

fn tolerated() -> impl Strategy<Value = Option<Timeslice>> {
    let slices = [500, 1_000, 2_000].map(|us| Some(Timeslice(us)));
    prop::sample::select([&slices[..], &[None]].concat())
}

/// A spec that may guarantee too much together with others, or make no sense.
fn spec() -> impl Strategy<Value = TenantSpec> {
    let number = prop_oneof![
        8 => 0.0..1.0,
        1 => prop::sample::select(vec![f64::NAN, f64::INFINITY, -1.0, 1e300, 0.0]),
    ];
    let class = prop::sample::select(Class::ALL.to_vec());
    let plain = prop_oneof![2 => Just(0.0), 1 => number.clone()];
    (class, plain, number.clone(), number).prop_map(|(class, guaranteed, limit, weight)| {
        TenantSpec {
            class,
            guaranteed,
            limit: if limit < 0.5 { 1.0 } else { limit },
            weight: 10.0 * weight,
            latency_objective_us: (limit > 0.3).then_some((limit * 1e5) as u64),
            ..TenantSpec::default()
        }
    })
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        3 => (spec(), demand()).prop_map(|(spec, demand)| Event::Arrive(spec, demand)),
        1 => any::<usize>().prop_map(Event::Depart),
        5 => (any::<usize>(), demand()).prop_map(|(at, demand)| Event::Demand(at, demand)),
        1 => (any::<usize>(), spec()).prop_map(|(at, spec)| Event::Spec(at, spec)),
        1 => (any::<usize>(), tolerated()).prop_map(|(at, slice)| Event::Tolerates(at, slice)),
        4 => (0..300_000u64).prop_map(Event::Wait),
    ]
}

/// A device that obeys at once, and its scheduler.
struct World {
    policy: Box<dyn Policy>,
    memory: Memory,
    accounts: Accounts,
    now: Snapshot,
    next: Option<Micros>,
    born: u64,
    /// Since when a runnable domain has not run.
    waiting: BTreeMap<DomainId, Micros>,
    longest_wait: BTreeMap<DomainId, u64>,
}

impl World {
    fn new(policy: Box<dyn Policy>) -> Self {
        Self {
            policy,
            memory: Memory::default(),
            accounts: Accounts::default(),
            now: Snapshot {
                costs: Costs::default(),
                ..Snapshot::default()
            },
            next: None,
            born: 0,
            waiting: BTreeMap::new(),
            longest_wait: BTreeMap::new(),
        }
    }

    fn arrive(&mut self, user: UserId, spec: TenantSpec, demand: Demand) -> DomainId {
        self.born += 1;
        self.now.tenants.push(TenantState {
            id: TenantId(self.born),
            user,
            spec,
        });
        self.now.domains.push(DomainState::new(
            DomainId(self.born),
            TenantId(self.born),
            demand,
            self.now.now,
        ));
        DomainId(self.born)
    }

    fn apply(&mut self, event: Event) {
        let count = self.now.domains.len();
        match event {
            Event::Arrive(spec, demand) if count < 8 => {
                self.arrive(UserId::default(), spec, demand);
            }
            Event::Depart(at) if count > 0 => {
                self.now.domains.remove(at % count);
                self.now.tenants.remove(at % count);
            }
            Event::Demand(at, demand) if count > 0 => {
                let domain = &mut self.now.domains[at % count];
                if domain.demand != demand {
                    domain.demand = demand;
                    domain.demand_since = self.now.now;
                }
            }
            Event::Tolerates(at, slice) if count > 0 => {
                self.now.domains[at % count].tolerated = slice;
            }
            Event::Spec(at, spec) if count > 0 => self.now.tenants[at % count].spec = spec,
            Event::Wait(us) => return self.run_for(us),
            _ => {}
        }
        self.plan();
    }

    /// Plans, checks the plan, and issues the controls.
    fn plan(&mut self) {
        let mut again = self.memory.clone();
        let plan = self.policy.plan(&self.now, &mut self.memory);
        assert_eq!(
            plan,
            self.policy.plan(&self.now, &mut again),
            "not deterministic"
        );
        assert_eq!(self.memory, again, "not deterministic");
        self.check(&plan);
        self.issue(&plan);
        let repeated = self.policy.plan(&self.now, &mut self.memory);
        assert_eq!(
            repeated.controls(&self.now),
            [],
            "a plan applied twice issues controls"
        );
        self.next = repeated.next;
        self.observe();
    }

    fn issue(&mut self, plan: &Plan) {
        for control in plan.controls(&self.now) {
            let domains = &mut self.now.domains;
            let domain = domains
                .iter_mut()
                .find(|domain| domain.id == control.domain());
            let domain = domain.expect("a domain of the snapshot");
            match control {
                Control::Freeze(_) => domain.run = RunState::Frozen,
                Control::Thaw(_) => domain.run = RunState::Enabled,
                Control::SetTimeslice(_, timeslice) => domain.timeslice = timeslice,
            }
        }
    }

    fn check(&self, plan: &Plan) {
        let ids = |plan: &Plan| plan.domains.iter().map(|d| d.id).collect::<Vec<_>>();
        let expected: Vec<_> = self.now.domains.iter().map(|domain| domain.id).collect();
        assert_eq!(ids(plan), expected, "every domain once and in order");
        let runnable = || {
            let domains = self.now.domains.iter().zip(&plan.domains);
            domains.filter(|(domain, _)| domain.demand.may_run())
        };
        let enabled = || runnable().filter(|(_, plan)| plan.run == RunState::Enabled);
        // Slices of less than 500 µs are the back row's.
        let short = enabled().filter(|(_, plan)| plan.timeslice < Timeslice(500));
        assert!(short.count() <= 1, "livelock: {plan:?}");
        // The holder of the turn may pause for as long as handing over would cost.
        let costs = &self.now.costs;
        let handover = costs.freeze + costs.thaw + costs.switch;
        let pauses = |domain: &DomainState| {
            domain.demand == Demand::Idle && self.now.now < domain.demand_since + handover
        };
        let paused = self.now.domains.iter().any(pauses);
        let conserving = runnable().count() == 0 || enabled().count() > 0 || paused;
        assert!(
            conserving,
            "not work conserving: {plan:?} for {:?}",
            self.now
        );
        for domain in &plan.domains {
            assert!(
                (Timeslice::MIN..=Timeslice::MAX).contains(&domain.timeslice),
                "{domain:?}"
            );
        }
        assert!(
            plan.next.is_none_or(|next| next > self.now.now),
            "asks for the past"
        );
        if runnable().count() <= 1 {
            // Only slices may have to change, when an idle domain has been so for a second.
            let soon = self.now.now + Micros::from_secs(1);
            assert!(plan.next.is_none_or(|next| next <= soon), "{plan:?}");
        }
    }

    fn run_for(&mut self, us: u64) {
        let end = self.now.now + Micros(us);
        while self.now.now < end {
            let until = self.next.map_or(end, |next| next.min(end));
            self.now.now = until;
            self.accounts
                .advance(until, &self.now.domains, &self.now.costs);
            for domain in &mut self.now.domains {
                domain.received = self.accounts.get(domain.id).received();
            }
            self.plan();
        }
    }

    /// Notes which tenants wait. A timeslice of 1 µs beside a longer one does not count as running: restoring the state takes longer.
    fn observe(&mut self) {
        let now = self.now.now;
        let running = fractions(&self.now.domains, &self.now.costs);
        for (domain, fraction) in self.now.domains.iter().zip(running) {
            let waits = domain.demand == Demand::Busy && fraction <= 0.0;
            if let Some(since) = self.waiting.get(&domain.id) {
                let longest = self.longest_wait.entry(domain.id).or_default();
                *longest = (*longest).max(now.saturating_sub(*since).0);
            }
            match waits {
                true => _ = self.waiting.entry(domain.id).or_insert(now),
                false => _ = self.waiting.remove(&domain.id),
            }
        }
    }

    /// From now on, no tenant has waited yet.
    fn forget_waits(&mut self) {
        self.waiting.clear();
        self.longest_wait.clear();
    }
}

fn policies() -> impl Strategy<Value = &'static str> {
    prop::sample::select(policy::NAMES.to_vec())
}

fn policy(name: &str) -> Box<dyn Policy> {
    policy::by_name(name).expect("known")
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, max_shrink_iters: 0, failure_persistence: None, ..Default::default() })]

    /// `World::plan` checks every plan on the way.
    #[test]
    fn every_plan_is_safe(name in policies(), events in prop::collection::vec(event(), 1..60)) {
        let mut world = World::new(policy(name));
        for event in events {
            world.apply(event);
        }
    }

    /// Whatever happened before, once demand is stable no domain waits longer than its bound and the time in which its
    /// share makes up for what it was ahead when its share was larger: a quantum or a burst. At first, while what earlier
    /// shares left is paid back, it may be twice that.
    #[test]
    fn each_tenant_waits_no_longer_than_its_bound(
        name in policies(),
        events in prop::collection::vec(event(), 1..40),
    ) {
        let mut world = World::new(policy(name));
        for event in events {
            // Specs that make no sense are refused before they get here; plans for them are safe, no more.
            world.apply(match event {
                Event::Arrive(spec, demand) if spec.validate().is_err() => {
                    Event::Arrive(TenantSpec::default(), demand)
                }
                Event::Spec(at, spec) if spec.validate().is_err() => {
                    Event::Spec(at, TenantSpec::default())
                }
                event => event,
            });
        }
        let known = |domain: &DomainState| domain.demand == Demand::Unknown;
        for at in 0..world.now.domains.len() {
            if known(&world.now.domains[at]) {
                world.apply(Event::Demand(at, Demand::Busy));
            }
        }
        world.forget_waits();
        let bounds = world.policy.bounds(&world.now);
        let bound = |world: &World, id: DomainId| {
            let bound = bounds.iter().find(|bound| bound.tenant == TenantId(id.0));
            let bound = bound.expect("every tenant has one");
            let share = world.memory.share(id).max(bound.share);
            // Switching takes at most a part of the time.
            (bound.wait.0 as f64 + 100_000.0 / share) / 0.85
        };
        let ids: Vec<_> = world.now.domains.iter().map(|domain| domain.id).collect();
        let longest = ids.iter().map(|id| bound(&world, *id)).fold(0.0, f64::max);
        for times in [2.0, 1.0] {
            world.forget_waits();
            world.run_for((1.2 * times * longest) as u64);
            for id in &ids {
                let waited = world.longest_wait.get(id).copied().unwrap_or(0) as f64;
                let bound = times * bound(&world, *id);
                prop_assert!(
                    waited <= bound,
                    "{id:?} waited {waited} µs, more than {bound}: {:?} {:?}", world.now, world.memory
                );
            }
        }
    }

    /// When all tenants always have work, each receives its share, and with it its guarantee.
    #[test]
    fn saturated_device_keeps_all_guarantees(
        name in policies(),
        specs in prop::collection::vec((prop::sample::select(Class::ALL.to_vec()), 0.05..0.3f64), 2..4),
    ) {
        let mut world = World::new(policy(name));
        let mut ids = Vec::new();
        for (class, guaranteed) in specs {
            let spec = TenantSpec { class, guaranteed, ..TenantSpec::default() };
            ids.push((world.arrive(UserId::default(), spec, Demand::Busy), guaranteed));
        }
        world.plan();
        world.run_for(2_000_000);
        let received = |world: &World| -> Vec<f64> {
            ids.iter().map(|(id, _)| world.accounts.get(*id).received_us).collect()
        };
        let before = received(&world);
        world.run_for(10_000_000);
        let after = received(&world);
        let got: Vec<f64> = after.iter().zip(&before).map(|(after, before)| after - before).collect();
        let sum: f64 = got.iter().sum();
        for ((id, guaranteed), got) in ids.iter().zip(&got) {
            let share = got / sum;
            prop_assert!(share > guaranteed - 0.01, "{id:?} got {share} of {guaranteed}");
            let entitled = world.memory.share(*id);
            prop_assert!((share - entitled).abs() < 0.02, "{id:?} got {share} of {entitled}");
        }
    }
}
