//! What the scheduling thread manages: devices, processes and tenants, and the controller that decides about them. It decides nothing
//! itself: the modules above change it, each in its own matter.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Instant,
};

use gpumux_core::{
    Costs, DomainId, Micros, Snapshot, TenantId, TenantSpec, TenantState, UserId,
    controller::{self, Controller},
    policy::{self, Bound},
};
use gpumux_wire::Daemon;
use tokio::sync::mpsc::UnboundedSender;

use super::{
    device::Device,
    domain::Domain,
    model::{Clock, Happening, Owner, Reaper},
    process::Met,
};
use crate::link::SessionId;

pub(super) struct State {
    pub(super) clock: Clock,
    pub(super) reaper: Reaper,
    pub(super) controller: Controller,
    pub(super) devices: BTreeMap<String, Device>,
    /// The controller's numbers of devices that are gone.
    vacant: Vec<usize>,
    pub(super) sessions: BTreeMap<SessionId, Met>,
    pub(super) tenants: BTreeMap<TenantId, TenantSpec>,
    /// Whose tenants are; root's if unknown.
    pub(super) users: BTreeMap<TenantId, UserId>,
    pub(super) owners: BTreeMap<TenantId, Owner>,
    /// Weights of users that are not 1.
    pub(super) weights: BTreeMap<UserId, f64>,
    /// Tenants that may use some devices only, and these.
    pub(super) confined: BTreeMap<TenantId, BTreeSet<String>>,
    /// Tenants that were placed in a group, and its name.
    pub(super) placed: BTreeMap<TenantId, Arc<str>>,
    /// Where happenings are reported.
    happenings: Option<UnboundedSender<Happening>>,
}

impl State {
    pub(super) fn new(clock: Clock, reaper: Reaper) -> Self {
        Self {
            clock,
            reaper,
            controller: Controller::new(BTreeMap::new()),
            devices: BTreeMap::new(),
            vacant: Vec::new(),
            sessions: BTreeMap::new(),
            tenants: BTreeMap::new(),
            users: BTreeMap::new(),
            owners: BTreeMap::new(),
            weights: BTreeMap::new(),
            confined: BTreeMap::new(),
            placed: BTreeMap::new(),
            happenings: None,
        }
    }

    pub(super) fn now(&self) -> Micros {
        (self.clock)()
    }

    /// A moment on this thread's clock.
    pub(super) fn ago(&self, at: Instant) -> Micros {
        let ago = Micros(at.elapsed().as_micros() as u64);
        self.now().saturating_sub(ago)
    }

    /// The device of this UUID, under the policy of this name if it is new.
    pub(super) fn device(&mut self, uuid: String, policy: &str) -> &mut Device {
        let now = self.now();
        let (controller, vacant) = (&mut self.controller, &mut self.vacant);
        self.devices.entry(uuid).or_insert_with(|| {
            let policy = policy::by_name(policy).unwrap_or_else(|| {
                // The configuration was checked.
                unreachable!("policy {policy}")
            });
            let (policy, costs) = (policy.into(), Costs::default());
            let index = match vacant.pop() {
                Some(index) => {
                    controller.replace_device(index, policy, costs, now);
                    index
                }
                None => controller.add_device(policy, costs, now),
            };
            Device::new(index, now)
        })
    }

    /// Forgets a device that exists no more, unless something of a process is left on it.
    pub(super) fn forget_device(&mut self, uuid: &str) -> bool {
        let Some(device) = self.devices.get(uuid) else {
            return true;
        };
        let is_empty = device.is_empty();
        if is_empty {
            self.vacant.push(device.index);
            self.devices.remove(uuid);
        }
        is_empty
    }

    /// All domains of all devices.
    pub(super) fn domains(&self) -> impl Iterator<Item = &Domain> {
        let devices = self.devices.values();
        devices.flat_map(|device| device.domains.values())
    }

    /// The domain that a session announced under this key, and its device.
    pub(super) fn find(&self, session: SessionId, key: u32) -> Option<(String, DomainId)> {
        self.devices.iter().find_map(|(uuid, device)| {
            let is = |domain: &&Domain| domain.member.is_of(session, Some(key));
            Some((uuid.clone(), device.domains.values().find(is)?.who.id))
        })
    }

    /// Reports to the controller what the processes write of their work.
    pub(super) fn sample(&mut self, now: Micros) {
        for device in self.devices.values_mut() {
            device.sample(now, &mut self.controller);
        }
    }

    /// A tenant has this spec from now on.
    pub(super) fn set_spec(&mut self, tenant: TenantId, spec: TenantSpec) {
        let user = self.users.get(&tenant).copied().unwrap_or_default();
        let changed = controller::Event::Tenant(tenant, user, spec.clone());
        self.tenants.insert(tenant, spec);
        self.controller.handle(self.now(), changed);
    }

    /// A tenant is this owner's.
    pub(super) fn own(&mut self, tenant: TenantId, owner: Owner) {
        let user = UserId(owner.uid);
        self.users.insert(tenant, user);
        let weight = owner.policy.weight;
        if self.weights.insert(user, weight).unwrap_or(1.0) != weight {
            self.controller.set_weight(user, weight);
        }
        self.owners.insert(tenant, owner);
    }

    /// Whether a tenant shares a group. One that was placed there and has no domain yet may be about to join.
    pub(super) fn is_in_group(&self, tenant: TenantId) -> bool {
        let mut own = (self.domains())
            .filter(|it| it.who.tenant == tenant)
            .peekable();
        match own.peek() {
            None => self.placed.contains_key(&tenant),
            Some(_) => own.any(|it| it.group.is_some()),
        }
    }

    /// A tenant has ended.
    pub(super) fn forget(&mut self, tenant: TenantId) {
        self.tenants.remove(&tenant);
        let gone = controller::Event::TenantGone(tenant);
        self.controller.handle(self.now(), gone);
        self.confined.remove(&tenant);
        self.users.remove(&tenant);
        self.owners.remove(&tenant);
        self.placed.remove(&tenant);
        for device in self.devices.values_mut() {
            device.ended.remove(&tenant);
        }
    }

    /// What each of these tenants is sure of on a device if all of them have work: its share, and its longest wait.
    pub(super) fn bounds(
        &self,
        device: usize,
        tenants: &BTreeSet<TenantId>,
    ) -> BTreeMap<TenantId, Bound> {
        let present = self.tenants.iter().filter(|(id, _)| tenants.contains(id));
        let tenants = present.map(|(id, spec)| TenantState {
            id: *id,
            user: self.users.get(id).copied().unwrap_or_default(),
            spec: spec.clone(),
        });
        let snapshot = Snapshot {
            users: self.weights.clone(),
            costs: self.controller.costs(device),
            ..Snapshot::of_tenants(tenants.collect())
        };
        let bounds = self.controller.policy(device).bounds(&snapshot);
        let named = bounds.into_iter().map(|bound| (bound.tenant, bound));
        named.collect()
    }

    /// Whether a tenant may use a device.
    pub(super) fn may_use(&self, tenant: TenantId, uuid: &str) -> bool {
        let devices = self.confined.get(&tenant);
        devices.is_none_or(|devices| devices.contains(uuid))
    }

    /// Sends a process a message, without waiting. Whether that was possible.
    pub(super) fn send(&self, session: SessionId, message: &Daemon) -> bool {
        let met = self.sessions.get(&session);
        met.is_some_and(|met| met.send(message))
    }

    /// Sends a process what it must not miss: see [`Link::send_or_end`](crate::link::Link::send_or_end).
    pub(super) fn send_or_end(&self, session: SessionId, message: &Daemon) {
        if let Some(met) = self.sessions.get(&session) {
            met.send_or_end(message);
        }
    }

    /// Happenings are reported there from now on.
    pub(super) fn report_to(&mut self, to: UnboundedSender<Happening>) {
        self.happenings = Some(to);
    }

    pub(super) fn report(&self, happening: Happening) {
        if let Some(to) = &self.happenings {
            let _ = to.send(happening);
        }
    }
}
