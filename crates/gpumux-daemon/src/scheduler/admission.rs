//! Which guarantees hold: what the scheduling thread knows of devices and tenants, put before [`admission`].

use std::{collections::BTreeSet, sync::Arc};

use gpumux_core::{
    TenantId, TenantSpec, UserId,
    admission::{self, Booking, Refusal, Request, Room, UserPolicy},
    broker::Event,
    controller,
};

use super::{engine::Engine, foreign::Foreigners, memory};

/// Whose a tenant is.
#[derive(Clone, Debug)]
pub(crate) struct Owner {
    /// The tenant's name.
    pub(crate) name: String,
    /// The user's id.
    pub(crate) uid: u32,
    /// What the user may have.
    pub(crate) policy: Arc<UserPolicy>,
}

impl Engine {
    /// A new tenant may use these devices only; none named: all. Comes before its spec.
    pub(crate) fn confine(&mut self, tenant: TenantId, devices: &[String]) {
        if devices.is_empty() {
            return;
        }
        let devices: BTreeSet<String> = devices.iter().cloned().collect();
        self.memory_event(Event::Confined(tenant, devices.clone()));
        self.confined.insert(tenant, devices);
    }

    /// Gives a new tenant of this owner this spec.
    ///
    /// # Errors
    /// As [`Self::set_spec`]; then the tenant is not known.
    pub(crate) fn admit(
        &mut self,
        tenant: TenantId,
        owner: Owner,
        spec: TenantSpec,
    ) -> Result<(), Refusal> {
        self.own(tenant, owner);
        self.set_spec(tenant, spec)
            .inspect_err(|_| self.forget(tenant))
    }

    /// Gives a tenant that the last daemon had admitted its spec again, although its user's policy may be stricter by now.
    ///
    /// # Errors
    /// When the devices cannot keep its guarantees; then the tenant is not known.
    pub(crate) fn admit_again(
        &mut self,
        tenant: TenantId,
        owner: Owner,
        spec: TenantSpec,
    ) -> Result<(), Refusal> {
        let policy = Arc::clone(&owner.policy);
        let own = Owner {
            policy: UserPolicy::unlimited().into(),
            ..owner.clone()
        };
        self.admit(tenant, own, spec)?;
        self.own(tenant, Owner { policy, ..owner });
        Ok(())
    }

    fn own(&mut self, tenant: TenantId, owner: Owner) {
        let user = UserId(owner.uid);
        self.users.insert(tenant, user);
        let weight = owner.policy.weight;
        if self.weights.insert(user, weight).unwrap_or(1.0) != weight {
            self.controller.set_weight(user, weight);
        }
        self.owners.insert(tenant, owner);
    }

    /// Gives a tenant this spec.
    ///
    /// # Errors
    /// When the spec makes no sense, its user may not have it, or its guarantees do not fit; then nothing changes.
    pub(crate) fn set_spec(&mut self, tenant: TenantId, spec: TenantSpec) -> Result<(), Refusal> {
        self.expire_guarantees();
        self.put_spec(tenant, spec)
    }

    pub(super) fn put_spec(&mut self, tenant: TenantId, spec: TenantSpec) -> Result<(), Refusal> {
        let spec = self.tampers.permitted(tenant, spec);
        let owner = self.owners.get(&tenant).cloned();
        let devices = self.confined.get(&tenant).cloned();
        self.admits(tenant, owner.as_ref(), devices.as_ref(), &spec)?;
        let terms = memory::terms(&spec);
        self.expiry.lapsed.remove(&tenant);
        let user = self.users.get(&tenant).copied().unwrap_or_default();
        let changed = controller::Event::Tenant(tenant, user, spec.clone());
        self.tenants.insert(tenant, spec);
        self.controller.handle(self.now(), changed);
        self.memory_event(Event::Tenant(tenant, terms));
        self.set_copy_slices();
        Ok(())
    }

    /// Changes a tenant's spec, by what its user may have now; `by_root`: whatever that is.
    ///
    /// # Errors
    /// As [`Self::set_spec`].
    pub(crate) fn change(
        &mut self,
        tenant: TenantId,
        policy: Arc<UserPolicy>,
        spec: TenantSpec,
        by_root: bool,
    ) -> Result<(), Refusal> {
        let Some(owner) = self.owners.get(&tenant).cloned() else {
            return self.set_spec(tenant, spec);
        };
        let own = Owner { policy, ..owner };
        if !by_root {
            self.own(tenant, own);
            return self.set_spec(tenant, spec);
        }
        self.tampers.pardon(tenant);
        let granted = Owner {
            policy: UserPolicy::unlimited().into(),
            ..own.clone()
        };
        self.own(tenant, granted);
        let set = self.set_spec(tenant, spec);
        self.own(tenant, own);
        set
    }

    /// Whether a new or old tenant of this owner, on these devices only or, if none are named, on all, could have this spec.
    ///
    /// # Errors
    /// As [`Self::set_spec`].
    pub(crate) fn admits(
        &self,
        tenant: TenantId,
        owner: Option<&Owner>,
        devices: Option<&BTreeSet<String>>,
        spec: &TenantSpec,
    ) -> Result<(), Refusal> {
        let request = Request {
            tenant,
            user: owner.map_or_else(UserId::default, |owner| UserId(owner.uid)),
            spec,
            before: self.tenants.get(&tenant),
        };
        let unlimited = UserPolicy::unlimited();
        let policy = owner.map_or(&unlimited, |owner| &owner.policy);
        let rooms = self.rooms(request.user, devices);
        admission::admit(&request, policy, &self.config.reserve, &rooms)
    }

    /// The devices that a tenant may use, with all that is booked there. While none is known, one that stands for those to come.
    fn rooms(&self, user: UserId, devices: Option<&BTreeSet<String>>) -> Vec<Room> {
        let known: BTreeSet<&String> = (self.devices.keys())
            .chain(self.moves.broker.uuids())
            .collect();
        let named = || self.confined.values().flatten();
        let uuids: BTreeSet<&String> = match devices {
            Some(devices) => devices.iter().collect(),
            None if known.is_empty() => named().collect(),
            None => known.clone(),
        };
        let mut rooms: Vec<Room> = uuids
            .iter()
            .map(|uuid| self.room(user, Some(uuid)))
            .collect();
        if known.is_empty() && devices.is_none() {
            rooms.push(self.room(user, None));
        }
        rooms
    }

    fn room(&self, user: UserId, uuid: Option<&String>) -> Room {
        let memory = uuid.and_then(|uuid| self.moves.broker.booked(uuid));
        let (memory, booked) = match memory {
            Some((memory, booked)) => (Some(memory), booked),
            None => Default::default(),
        };
        let here = |id: &TenantId| match (self.confined.get(id), uuid) {
            (Some(devices), Some(uuid)) => devices.contains(uuid),
            (Some(_), None) => false,
            (None, _) => true,
        };
        let book = |(id, spec): (&TenantId, &TenantSpec)| {
            let owner = self.owners.get(id);
            let name = owner.map_or_else(|| format!("tenant {}", id.0), |it| it.name.clone());
            let holder = self.users.get(id).copied().unwrap_or_default();
            Booking {
                tenant: *id,
                name: match owner.filter(|_| holder != user) {
                    Some(owner) => format!("{}/{name}", owner.policy.user),
                    None => name,
                },
                user: holder,
                privileged: owner.is_none_or(|owner| owner.policy.privileged),
                guaranteed: if here(id) { spec.guaranteed } else { 0.0 },
                memory: booked.get(id).copied().unwrap_or_default(),
            }
        };
        let foreign = uuid.and_then(|uuid| self.foreign.get(uuid));
        Room {
            device: match uuid {
                Some(uuid) => match self.numbers.get(uuid) {
                    Some(number) => {
                        let short: String = uuid.chars().take(12).collect();
                        format!("GPU {number} ({short})")
                    }
                    None => uuid.clone(),
                },
                None => "the device".into(),
            },
            memory,
            booked: self.tenants.iter().map(book).collect(),
            foreign: foreign.map(Foreigners::room).unwrap_or_default(),
        }
    }

    /// A device may become known only when it is used: it may be too small for what was admitted before.
    pub(super) fn warn_of_guarantees(&self, tenant: TenantId, device: &str) {
        let Some(spec) = self.tenants.get(&tenant) else {
            return;
        };
        let device = BTreeSet::from([device.to_owned()]);
        let request = Request {
            tenant,
            user: self.users.get(&tenant).copied().unwrap_or_default(),
            spec,
            before: None,
        };
        let rooms = self.rooms(request.user, Some(&device));
        let reserve = admission::Reserve::none();
        if let Err(error) = admission::admit(&request, &UserPolicy::unlimited(), &reserve, &rooms) {
            tracing::warn!(tenant = tenant.0, %error, "guarantees do not fit on this device: its tenants share it in proportion");
        }
    }
}
