//! A simulated daemon: what the real one knows and does, with the delays and costs of the real one.
//!
//! It sees demand late, accounts as the real one does, asks the policies of `gpumux-core`, and pulls one lever
//! after the other. A freeze takes its domain off the device when the call begins and a thaw or slice acts when the
//! call is over: with that, a rotation every 10 ms costs what was measured (8%).

use std::collections::BTreeMap;

use gpumux_core::gang::{self, Device};
use gpumux_core::policy::Bound;
use gpumux_core::{
    Accounts, Calm, Costs, Demand, DomainId, DomainState, Lever, Memory, Micros, Policy, Rhythm,
    RunState, Snapshot, TenantId, TenantSpec, TenantState, Timeslice, UserId,
};

use crate::gpu::{Gpu, GroupId, Nanos};
use crate::report::DeviceReport;

/// After what time a lever that waits is looked at again.
const AGAIN: Nanos = 1_000_000;

/// One device as the daemon sees it.
struct Managed {
    policy: Box<dyn Policy>,
    calm: Calm,
    snapshot: Snapshot,
    /// The group of each domain, and when work came.
    groups: Vec<GroupId>,
    rhythms: Vec<Rhythm>,
    memory: Memory,
    accounts: Accounts,
    pulled: Pulled,
}

/// Levers pulled.
#[derive(Clone, Copy, Debug, Default)]
struct Pulled {
    freezes: u64,
    thaws: u64,
    slices: u64,
}

/// A lever pulled, for the trace.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pull {
    pub(crate) device: usize,
    pub(crate) lever: Lever,
    pub(crate) until: Nanos,
}

pub(crate) struct Daemon {
    devices: Vec<Managed>,
    /// The lever being pulled.
    pulling: Option<Pull>,
    /// When to plan although nothing happens.
    next: Option<Nanos>,
    busy: Nanos,
    plans: u64,
}

impl Daemon {
    /// A daemon for as many devices as there are policies.
    pub(crate) fn new(
        policies: Vec<Box<dyn Policy>>,
        costs: Costs,
        users: BTreeMap<UserId, f64>,
    ) -> Self {
        let devices = policies.into_iter().map(|policy| Managed {
            policy,
            calm: Calm::default(),
            snapshot: Snapshot {
                costs,
                users: users.clone(),
                ..Snapshot::default()
            },
            groups: Vec::new(),
            rhythms: Vec::new(),
            memory: Memory::default(),
            accounts: Accounts::default(),
            pulled: Pulled::default(),
        });
        Self {
            devices: devices.collect(),
            pulling: None,
            next: None,
            busy: 0,
            plans: 0,
        }
    }

    /// When it wants to act by itself.
    pub(crate) fn wakes(&self) -> Option<Nanos> {
        self.pulling.map(|pull| pull.until).or(self.next)
    }

    /// What the tenants of a snapshot can rely on.
    pub(crate) fn bounds(&self, device: usize, snapshot: &Snapshot) -> Vec<Bound> {
        self.devices[device].policy.bounds(snapshot)
    }

    /// A domain was announced. Ids rise.
    pub(crate) fn announce(
        &mut self,
        now: Nanos,
        device: usize,
        (id, group): (DomainId, GroupId),
        (tenant, user, spec): (TenantId, UserId, &TenantSpec),
    ) {
        let managed = &mut self.devices[device];
        managed.account(now);
        managed.snapshot.tenants.push(TenantState {
            id: tenant,
            user,
            spec: spec.clone(),
        });
        managed.snapshot.domains.push(DomainState {
            id,
            tenant,
            demand: Demand::Unknown,
            demand_since: managed.snapshot.now,
            expected: None,
            received: Micros::ZERO,
            timeslice: Timeslice::DEFAULT,
            run: RunState::Enabled,
            pinned: None,
        });
        managed.groups.push(group);
        managed.rhythms.push(Rhythm::default());
        self.next = Some(now);
    }

    /// What is promised to a domain's tenant changes.
    pub(crate) fn promise(&mut self, now: Nanos, device: usize, id: DomainId, spec: TenantSpec) {
        let managed = &mut self.devices[device];
        managed.account(now);
        let snapshot = &mut managed.snapshot;
        let domain = snapshot.domains.iter().find(|domain| domain.id == id);
        if let Some(tenant) = domain.map(|domain| domain.tenant)
            && let Some(state) = snapshot.tenants.iter_mut().find(|it| it.id == tenant)
        {
            state.spec = spec;
            self.next = Some(now);
        }
    }

    /// A domain must be frozen because its memory is away or on its way, or need not any more.
    pub(crate) fn park(&mut self, now: Nanos, device: usize, id: DomainId, parked: bool) {
        let managed = &mut self.devices[device];
        managed.account(now);
        if let Some(at) = managed.position(id) {
            managed.snapshot.domains[at].pinned = parked.then_some(RunState::Frozen);
            self.next = Some(now);
        }
    }

    /// A domain is gone.
    pub(crate) fn forget(&mut self, now: Nanos, device: usize, id: DomainId) {
        let managed = &mut self.devices[device];
        managed.account(now);
        if let Some(at) = managed.position(id) {
            let gone = managed.snapshot.domains.remove(at);
            managed.groups.remove(at);
            managed.rhythms.remove(at);
            let tenants = &mut managed.snapshot.tenants;
            tenants.retain(|tenant| tenant.id != gone.tenant);
        }
        self.next = Some(now);
    }

    /// The daemon learns of a domain's demand.
    pub(crate) fn demand(&mut self, now: Nanos, device: usize, id: DomainId, demand: Demand) {
        let managed = &mut self.devices[device];
        managed.account(now);
        let at = managed.position(id);
        let moment = managed.snapshot.now;
        if let Some(domain) = at.map(|at| &mut managed.snapshot.domains[at])
            && domain.demand != demand
        {
            domain.demand = demand;
            domain.demand_since = moment;
            self.next = Some(now);
        }
    }

    /// Work came, or was said to come, after a pause. The daemon learns the time, if later.
    pub(crate) fn came(&mut self, now: Nanos, device: usize, id: DomainId) {
        let managed = &mut self.devices[device];
        if let Some(at) = managed.position(id) {
            managed.rhythms[at].came(Micros(now / 1000));
        }
    }

    /// Finishes the lever it pulls, or plans and begins the next one. Returns what it began.
    pub(crate) fn act(&mut self, now: Nanos, gpus: &mut [Gpu]) -> Option<Pull> {
        if let Some(pull) = self.pulling {
            if now < pull.until {
                return None;
            }
            self.pulling = None;
            if !matches!(pull.lever, Lever::Freeze(_)) {
                self.devices[pull.device].apply(now, pull.lever, &mut gpus[pull.device]);
            }
        } else if self.next.is_none_or(|next| now < next) {
            return None;
        }
        for managed in &mut self.devices {
            managed.account(now);
        }
        let mut devices: Vec<Device> = self
            .devices
            .iter_mut()
            .map(|managed| Device {
                policy: &*managed.policy,
                snapshot: &managed.snapshot,
                memory: &mut managed.memory,
            })
            .collect();
        let plans = gang::plan(&mut devices);
        self.plans += 1;
        let next = plans.iter().filter_map(|plan| plan.next).min();
        self.next = next.map(|next| next.0.saturating_mul(1000).max(now + 1000));
        let (device, lever) = self.devices.iter_mut().zip(&plans).enumerate().find_map(
            |(device, (managed, plan))| {
                let snapshot = &managed.snapshot;
                let levers = plan.levers(snapshot);
                let Some(lever) = levers.first().copied() else {
                    managed.calm = Calm::default();
                    return None;
                };
                // The real one looks at what programs say just then, not at what it learned before.
                let groups = snapshot.domains.iter().zip(&managed.groups);
                let at_work = |id| {
                    groups.clone().any(|(domain, group)| {
                        domain.id == id
                            && domain.run == RunState::Enabled
                            && gpus[device].has_work(*group) == Ok(true)
                    })
                };
                if managed
                    .calm
                    .awaits(&levers, snapshot, snapshot.now, at_work)
                {
                    let again = now + AGAIN;
                    self.next = Some(self.next.map_or(again, |next| next.min(again)));
                    return None;
                }
                Some((device, lever))
            },
        )?;
        let managed = &mut self.devices[device];
        if matches!(lever, Lever::Freeze(_)) {
            managed.apply(now, lever, &mut gpus[device]);
        }
        let cost = managed.snapshot.costs.of(lever).0 * 1000;
        self.busy += cost;
        let pull = Pull {
            device,
            lever,
            until: now + cost,
        };
        self.pulling = Some(pull);
        Some(pull)
    }

    /// Part of this time that it spent pulling levers, and how often it planned.
    pub(crate) fn effort(&self, seconds: f64) -> (f64, u64) {
        (self.busy as f64 / 1e9 / seconds, self.plans)
    }

    /// Adds the levers pulled to a device's report.
    pub(crate) fn report(&self, device: usize, seconds: f64, report: &mut DeviceReport) {
        let pulled = self.devices[device].pulled;
        report.freezes = pulled.freezes as f64 / seconds;
        report.thaws = pulled.thaws as f64 / seconds;
        report.slice_changes = pulled.slices as f64 / seconds;
    }
}

impl Managed {
    fn position(&self, id: DomainId) -> Option<usize> {
        let domains = &self.snapshot.domains;
        domains.iter().position(|domain| domain.id == id)
    }

    /// Accounts up to now; before every change.
    fn account(&mut self, now: Nanos) {
        let snapshot = &mut self.snapshot;
        snapshot.now = Micros(now / 1000);
        self.accounts
            .advance(snapshot.now, &snapshot.domains, &snapshot.costs);
        for (domain, rhythm) in snapshot.domains.iter_mut().zip(&self.rhythms) {
            domain.received = self.accounts.get(domain.id).received();
            domain.expected = rhythm.next(snapshot.now);
        }
    }

    /// A lever acts. Its domain may be gone meanwhile.
    fn apply(&mut self, now: Nanos, lever: Lever, gpu: &mut Gpu) {
        self.account(now);
        let Some(at) = self.position(lever.domain()) else {
            return;
        };
        let (domain, group) = (&mut self.snapshot.domains[at], self.groups[at]);
        let acted = match lever {
            Lever::Freeze(_) => {
                self.pulled.freezes += 1;
                domain.run = RunState::Frozen;
                gpu.freeze(group)
            }
            Lever::Thaw(_) => {
                self.pulled.thaws += 1;
                domain.run = RunState::Enabled;
                gpu.thaw(group)
            }
            Lever::SetTimeslice(_, timeslice) => {
                self.pulled.slices += 1;
                domain.timeslice = timeslice;
                gpu.set_timeslice(group, timeslice)
            }
        };
        acted.expect("a domain's group lives as long as the domain");
    }
}
