//! What plans of several devices must keep where tenants work on more than one: random gangs, demand, memory that goes and
//! comes, on devices that obey at once and serve as `Accounts` says.

use std::collections::BTreeSet;

use gpumux_core::gang::{self, Device};
use gpumux_core::{
    Accounts, Class, Control, Demand, DomainId, DomainState, Memory, Micros, Plan, Policy,
    RunState, Snapshot, TenantId, TenantSpec, TenantState, Timeslice, UserId, policy,
};
use proptest::prelude::*;

/// A tenant and the devices it works on.
#[derive(Clone, Debug)]
struct Gang {
    spec: TenantSpec,
    devices: BTreeSet<usize>,
}

/// One thing that happens.
#[derive(Clone, Debug)]
enum Event {
    Demand(usize, Demand),
    /// On one of its devices only.
    Part(usize, usize, Demand),
    /// Its memory leaves one of its devices, or is back.
    Park(usize, usize, bool),
    Wait(u64),
}

const DEVICES: usize = 4;

/// At most six, none of which is guaranteed as much as `most`.
fn gangs(classes: &'static [Class], most: f64) -> impl Strategy<Value = Vec<Gang>> {
    let devices = prop::collection::btree_set(0..DEVICES, 1..=3);
    let gang = (
        prop::sample::select(classes),
        devices,
        0.0..most,
        any::<bool>(),
    );
    let gang = gang.prop_map(|(class, devices, share, guaranteed)| Gang {
        spec: TenantSpec {
            class,
            guaranteed: if guaranteed { share } else { 0.0 },
            ..TenantSpec::default()
        },
        devices,
    });
    prop::collection::vec(gang, 2..7)
}

fn event() -> impl Strategy<Value = Event> {
    let demand = || {
        prop::sample::select(vec![
            Demand::Busy,
            Demand::Busy,
            Demand::Idle,
            Demand::Unknown,
        ])
    };
    prop_oneof![
        3 => (any::<usize>(), demand()).prop_map(|(at, demand)| Event::Demand(at, demand)),
        1 => (any::<usize>(), any::<usize>(), demand()).prop_map(|(at, part, demand)| Event::Part(at, part, demand)),
        1 => (any::<usize>(), any::<usize>(), any::<bool>()).prop_map(|(at, part, away)| Event::Park(at, part, away)),
        3 => (0..200_000u64).prop_map(Event::Wait),
    ]
}

/// Devices that obey at once, and their scheduler.
struct World {
    policy: Box<dyn Policy>,
    devices: Vec<Snapshot>,
    memories: Vec<Memory>,
    accounts: Vec<Accounts>,
    /// Domains by tenant: device and id.
    domains: Vec<Vec<(usize, DomainId)>>,
    next: Option<Micros>,
    now: Micros,
}

impl World {
    fn new(policy: &str, gangs: &[Gang]) -> Self {
        let mut world = Self {
            policy: policy::by_name(policy).expect("known"),
            devices: vec![Snapshot::default(); DEVICES],
            memories: vec![Memory::default(); DEVICES],
            accounts: vec![Accounts::default(); DEVICES],
            domains: Vec::new(),
            next: None,
            now: Micros::ZERO,
        };
        for (at, gang) in gangs.iter().enumerate() {
            let tenant = TenantId(at as u64);
            let mut domains = Vec::new();
            for &device in &gang.devices {
                let id = DomainId((at * DEVICES + device) as u64);
                domains.push((device, id));
                let snapshot = &mut world.devices[device];
                snapshot.tenants.push(TenantState {
                    id: tenant,
                    user: UserId::default(),
                    spec: gang.spec.clone(),
                });
                snapshot
                    .domains
                    .push(DomainState::new(id, tenant, Demand::Busy, Micros::ZERO));
            }
            world.domains.push(domains);
        }
        world.plan();
        world
    }

    fn domain(&mut self, (device, id): (usize, DomainId)) -> &mut DomainState {
        let mut domains = self.devices[device].domains.iter_mut();
        domains.find(|domain| domain.id == id).expect("known")
    }

    fn demand(&mut self, at: (usize, DomainId), demand: Demand) {
        let now = self.now;
        let domain = self.domain(at);
        if domain.demand != demand {
            domain.demand = demand;
            domain.demand_since = now;
        }
    }

    fn apply(&mut self, event: Event) {
        let count = self.domains.len();
        match event {
            Event::Demand(at, demand) => {
                for part in self.domains[at % count].clone() {
                    self.demand(part, demand);
                }
            }
            Event::Part(at, part, demand) => {
                let domains = &self.domains[at % count];
                self.demand(domains[part % domains.len()], demand);
            }
            Event::Park(at, part, away) => {
                let domains = &self.domains[at % count];
                let part = domains[part % domains.len()];
                self.domain(part).pinned = away.then_some(RunState::Frozen);
            }
            Event::Wait(us) => return self.run_for(us),
        }
        self.plan();
    }

    fn plans(&mut self) -> Vec<Plan> {
        let both = self.devices.iter().zip(&mut self.memories);
        let mut devices: Vec<Device> = both
            .map(|(snapshot, memory)| Device {
                policy: &*self.policy,
                snapshot,
                memory,
            })
            .collect();
        gang::plan(&mut devices)
    }

    /// Plans, issues the controls, and checks what is then.
    fn plan(&mut self) {
        let plans = self.plans();
        for (snapshot, plan) in self.devices.iter_mut().zip(&plans) {
            for control in plan.controls(snapshot) {
                let mut domains = snapshot.domains.iter_mut();
                let domain = domains.find(|domain| domain.id == control.domain());
                let domain = domain.expect("a domain of the snapshot");
                match control {
                    Control::Freeze(_) => domain.run = RunState::Frozen,
                    Control::Thaw(_) => domain.run = RunState::Enabled,
                    Control::SetTimeslice(_, timeslice) => domain.timeslice = timeslice,
                }
            }
        }
        self.check();
        let again = self.plans();
        for (snapshot, plan) in self.devices.iter().zip(&again) {
            assert_eq!(
                plan.controls(snapshot),
                [],
                "a plan applied twice issues controls"
            );
        }
        self.next = again.iter().filter_map(|plan| plan.next).min();
        assert!(
            self.next.is_none_or(|next| next > self.now),
            "asks for the past"
        );
    }

    /// Domains with work, on one device.
    fn runnable(&self, device: usize) -> impl Iterator<Item = &DomainState> {
        let domains = self.devices[device].domains.iter();
        domains.filter(|domain| domain.demand.may_run())
    }

    fn check(&self) {
        let swapped_out = |domain: &DomainState| domain.pinned.is_some();
        let runs = |domain: &DomainState| domain.run == RunState::Enabled;
        for device in 0..DEVICES {
            let running = || self.runnable(device).filter(|domain| runs(domain));
            assert!(
                !running().any(swapped_out),
                "runs without its memory: {:?}",
                self.devices
            );
            let short = running().filter(|domain| domain.timeslice < Timeslice(500));
            assert!(short.count() <= 1, "livelock: {:?}", self.devices);
        }
        // Whether no tenant has the device, nor keeps it through a pause.
        let costs = &self.devices[0].costs;
        let linger = costs.freeze + costs.thaw + costs.switch;
        let free = |device: usize| {
            let pauses = |domain: &DomainState| {
                domain.demand == Demand::Idle && self.now < domain.demand_since + linger
            };
            let domains = &self.devices[device].domains;
            !self.runnable(device).any(runs) && !domains.iter().any(pauses)
        };
        for tenant in 0..self.domains.len() {
            let of = |device: usize| {
                let tenant = TenantId(tenant as u64);
                self.runnable(device)
                    .filter(move |domain| domain.tenant == tenant)
            };
            let parts = || (0..DEVICES).flat_map(of);
            let states: BTreeSet<bool> = parts().map(runs).collect();
            assert!(
                states.len() < 2,
                "{tenant} runs in part: {:?}",
                self.devices
            );
            let mut devices = (0..DEVICES).filter(|device| of(*device).count() > 0);
            let idle = states.contains(&false) && !parts().any(swapped_out) && devices.all(free);
            assert!(
                !idle,
                "{tenant} waits, and no other tenant runs: {:?}",
                self.devices
            );
        }
    }

    fn run_for(&mut self, us: u64) {
        let end = self.now + Micros(us);
        while self.now < end {
            self.now = self.next.map_or(end, |next| next.min(end));
            for (snapshot, accounts) in self.devices.iter_mut().zip(&mut self.accounts) {
                snapshot.now = self.now;
                accounts.advance(self.now, &snapshot.domains, &snapshot.costs);
                for domain in &mut snapshot.domains {
                    domain.received = accounts.get(domain.id).received();
                }
            }
            self.plan();
        }
    }

    /// What part of the time every tenant gets from now on.
    fn shares(&mut self) -> Vec<f64> {
        self.run_for(2_000_000);
        let received = |world: &Self| -> Vec<f64> {
            (0..world.domains.len())
                .map(|tenant| world.received(tenant))
                .collect()
        };
        let before = received(self);
        self.run_for(8_000_000);
        let after = received(self);
        let pairs = after.iter().zip(&before);
        pairs
            .map(|(after, before)| (after - before) / 8e6)
            .collect()
    }

    /// Device time of a tenant's slowest part.
    fn received(&self, tenant: usize) -> f64 {
        let parts = self.domains[tenant].iter();
        let received = parts.map(|(device, id)| self.accounts[*device].get(*id).received_us);
        received.fold(f64::INFINITY, f64::min)
    }
}

// PROPTEST_CASES runs more of them.
proptest! {
    #![proptest_config(ProptestConfig { cases: ProptestConfig::default().cases / 4, max_shrink_iters: 50, failure_persistence: None, ..Default::default() })]

    /// `World::plan` checks every plan on the way.
    #[test]
    fn every_plan_is_safe(
        policy in prop::sample::select(policy::NAMES.to_vec()),
        gangs in gangs(&Class::ALL, 0.25),
        events in prop::collection::vec(event(), 1..40),
    ) {
        let mut world = World::new(policy, &gangs);
        for event in events {
            world.apply(event);
        }
    }

    /// Whatever gangs meet where: each of equals gets on.
    #[test]
    fn every_gang_is_served(
        // Six times that leaves a part for tenants without a guarantee.
        gangs in gangs(&[Class::Batch], 0.15),
        events in prop::collection::vec(event(), 0..10),
    ) {
        let mut world = World::new("priority", &gangs);
        for event in events {
            world.apply(event);
        }
        for tenant in 0..gangs.len() {
            for part in world.domains[tenant].clone() {
                world.domain(part).pinned = None;
                world.demand(part, Demand::Busy);
            }
        }
        world.plan();
        for (tenant, got) in world.shares().into_iter().enumerate() {
            prop_assert!(got > 0.01, "{tenant} got {got}: {gangs:?}");
        }
    }

    /// One that needs several devices and others that need one each all receive their guarantees, whichever device decides for
    /// the one.
    #[test]
    fn a_gang_and_its_neighbours_keep_their_guarantees(
        devices in prop::collection::btree_set(0..DEVICES, 2..=3),
        guaranteed in 0.05..0.4f64,
        singles in prop::collection::vec((0..DEVICES, 0.0..0.19f64), 1..8),
    ) {
        let spec = |guaranteed| TenantSpec { class: Class::Batch, guaranteed, ..TenantSpec::default() };
        let mut gangs = vec![Gang { spec: spec(guaranteed), devices }];
        for (device, guaranteed) in singles {
            let there = |gang: &&Gang| gang.devices.contains(&device);
            // What is left of the device, but for what switching costs and the floor of the others.
            let taken: f64 = gangs.iter().filter(there).map(|gang| gang.spec.guaranteed).sum();
            let spec = spec((3.0 * guaranteed).min(0.95 - taken).max(0.0));
            gangs.push(Gang { spec, devices: BTreeSet::from([device]) });
        }
        let mut world = World::new("priority", &gangs);
        for (gang, got) in gangs.iter().zip(world.shares()) {
            let guaranteed = gang.spec.guaranteed;
            prop_assert!(got > guaranteed - 0.03, "{got} of {guaranteed}: {gangs:?}");
        }
    }
}

/// A single, and gangs of which two are each owed the device where the other one runs: they ran by turns in plans of one moment.
#[test]
fn gangs_owed_by_turns_are_planned_alike_twice() {
    let gangs: Vec<Gang> = [
        (0.1351389093822066, vec![0]),
        (0.11748762460727134, vec![1, 2]),
        (0.08966141298425716, vec![2, 3]),
        (0.002384101467864449, vec![1, 2]),
        (0.057989278084985524, vec![0, 1, 3]),
    ]
    .into_iter()
    .map(|(guaranteed, devices)| Gang {
        spec: TenantSpec {
            class: Class::Batch,
            guaranteed,
            ..TenantSpec::default()
        },
        devices: devices.into_iter().collect(),
    })
    .collect();
    let mut world = World::new("priority", &gangs);
    world.apply(Event::Part(0, 0, Demand::Unknown));
    world.apply(Event::Wait(98_867));
    world.apply(Event::Wait(194_956));
    world.apply(Event::Part(0, 0, Demand::Busy));
    // `World::plan` checks every plan on the way.
    let shares = world.shares();
    assert!(shares.iter().all(|got| *got > 0.01), "{shares:?}");
}

/// Whichever device chooses whom: of four that meet in pairs only one can run, and a larger one has no more than the others.
#[test]
fn gangs_of_which_only_one_can_run_have_equal_parts() {
    let gangs = [vec![1, 3], vec![1, 2], vec![2, 3], vec![1, 2, 3]].map(|devices| Gang {
        spec: TenantSpec {
            class: Class::Batch,
            ..TenantSpec::default()
        },
        devices: devices.into_iter().collect(),
    });
    let shares = World::new("priority", &gangs).shares();
    assert!(
        shares.iter().all(|got| (got - 0.25).abs() < 0.02),
        "{shares:?}"
    );
}

/// That gangs wait long because they are many takes nothing from what others are guaranteed.
#[test]
fn many_gangs_leave_a_single_its_guarantee() {
    let gang = |guaranteed, devices: &[usize]| Gang {
        spec: TenantSpec {
            class: Class::Batch,
            guaranteed,
            ..TenantSpec::default()
        },
        devices: devices.iter().copied().collect(),
    };
    let mut gangs = vec![gang(0.5, &[0])];
    gangs.extend(std::iter::repeat_n(gang(0.0, &[0, 1]), 20));
    let shares = World::new("priority", &gangs).shares();
    assert!(shares[0] > 0.47, "{shares:?}");
    assert!(shares.iter().all(|got| *got > 0.01), "{shares:?}");
}
