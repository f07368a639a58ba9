//! Which guarantees hold: what the scheduling thread knows of devices and tenants, put before [`admission`].

use std::collections::{BTreeMap, BTreeSet};

use gpumux_core::{
    TenantId, TenantSpec, UserId,
    admission::{self, Booking, Most, Refusal, Request, Reserve, Room, UserPolicy},
    broker::Broker,
};

use super::{foreign::Foreigners, model::Owner, state::State};
use crate::devices::Numbers;

fn request<'a>(
    state: &'a State,
    tenant: TenantId,
    owner: Option<&Owner>,
    spec: &'a TenantSpec,
) -> Request<'a> {
    Request {
        tenant,
        user: owner.map_or_else(UserId::default, |owner| UserId(owner.uid)),
        spec,
        before: state.tenants.get(&tenant),
    }
}

/// What admission goes by beside the tenants' specs and the broker's accounting.
pub(super) struct Admission {
    reserve: Reserve,
    /// The numbers of the devices that NVML has reported.
    pub(super) numbers: Numbers,
    /// Their SMs, where NVML tells.
    pub(super) sms: BTreeMap<String, u32>,
    /// Processes that are not controlled, by device.
    pub(super) foreign: BTreeMap<String, Foreigners>,
}

impl Admission {
    pub(super) fn new(reserve: Reserve) -> Self {
        Self {
            reserve,
            numbers: Numbers::new(),
            sms: BTreeMap::new(),
            foreign: BTreeMap::new(),
        }
    }

    /// Whether a new or old tenant of this owner, on these devices only or, if none are named, on all, could have this spec.
    ///
    /// # Errors
    /// When its user may not have it, or its guarantees do not fit.
    pub(super) fn admits(
        &self,
        state: &State,
        broker: &Broker,
        tenant: TenantId,
        owner: Option<&Owner>,
        devices: Option<&BTreeSet<String>>,
        spec: &TenantSpec,
    ) -> Result<(), Refusal> {
        let request = request(state, tenant, owner, spec);
        let unlimited = UserPolicy::unlimited();
        let policy = owner.map_or(&unlimited, |owner| &owner.policy);
        let rooms = self.rooms(state, broker, &request, devices);
        admission::admit(&request, policy, &self.reserve, &rooms)
    }

    /// What a tenant could have at most; none of one that is not known.
    pub(super) fn most(&self, state: &State, broker: &Broker, tenant: TenantId) -> Option<Most> {
        let (spec, owner) = (state.tenants.get(&tenant)?, state.owners.get(&tenant)?);
        let request = request(state, tenant, Some(owner), spec);
        let rooms = self.rooms(state, broker, &request, state.confined.get(&tenant));
        Some(admission::most(
            &request,
            &owner.policy,
            &self.reserve,
            &rooms,
        ))
    }

    /// The devices that a tenant may use, with all that is booked there. While none is known, one that stands for those to come.
    fn rooms(
        &self,
        state: &State,
        broker: &Broker,
        asking: &Request<'_>,
        devices: Option<&BTreeSet<String>>,
    ) -> Vec<Room> {
        let known: BTreeSet<&String> = (state.devices.keys()).chain(broker.uuids()).collect();
        let named = || state.confined.values().flatten();
        let uuids: BTreeSet<&String> = match devices {
            Some(devices) => devices.iter().collect(),
            None if known.is_empty() => named().collect(),
            None => known.clone(),
        };
        let mut rooms: Vec<Room> = uuids
            .iter()
            .map(|uuid| self.room(state, broker, asking, Some(uuid)))
            .collect();
        if known.is_empty() && devices.is_none() {
            rooms.push(self.room(state, broker, asking, None));
        }
        rooms
    }

    fn room(
        &self,
        state: &State,
        broker: &Broker,
        asking: &Request<'_>,
        uuid: Option<&String>,
    ) -> Room {
        let memory = uuid.and_then(|uuid| broker.booked(uuid, asking.tenant));
        let (memory, booked) = match memory {
            Some((memory, booked)) => (Some(memory), booked),
            None => Default::default(),
        };
        let here = |id: &TenantId| match (state.confined.get(id), uuid) {
            (Some(devices), Some(uuid)) => devices.contains(uuid),
            (Some(_), None) => false,
            (None, _) => true,
        };
        let book = |(id, spec): (&TenantId, &TenantSpec)| {
            let owner = state.owners.get(id);
            let name = owner.map_or_else(|| format!("tenant {}", id.0), |it| it.name.clone());
            let holder = state.users.get(id).copied().unwrap_or_default();
            Booking {
                tenant: *id,
                name: match owner.filter(|_| holder != asking.user) {
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
            booked: state.tenants.iter().map(book).collect(),
            foreign: foreign.map(Foreigners::room).unwrap_or_default(),
        }
    }

    /// A tenant has come to a device. That may become known only now, and be too small for what was admitted before; or the tenant's context takes
    /// what others are guaranteed.
    pub(super) fn warn(&self, state: &State, broker: &Broker, tenant: TenantId, device: &str) {
        let others = state.tenants.iter().filter(|(id, spec)| {
            **id != tenant && spec.memory_guaranteed > 0 && state.may_use(**id, device)
        });
        for id in [tenant].into_iter().chain(others.map(|(id, _)| *id)) {
            if let Err(error) = self.keeps(state, broker, id, device) {
                tracing::warn!(tenant = id.0, %error, "guarantees do not fit on this device: its tenants share it in proportion");
                return;
            }
        }
    }

    /// Whether a device could keep a tenant's guarantees if it were new there.
    ///
    /// # Errors
    /// What stands in the way.
    pub(super) fn keeps(
        &self,
        state: &State,
        broker: &Broker,
        tenant: TenantId,
        device: &str,
    ) -> Result<(), Refusal> {
        let Some(spec) = state.tenants.get(&tenant) else {
            return Ok(());
        };
        let device = BTreeSet::from([device.to_owned()]);
        let request = Request {
            tenant,
            user: state.users.get(&tenant).copied().unwrap_or_default(),
            spec,
            before: None,
        };
        let rooms = self.rooms(state, broker, &request, Some(&device));
        let reserve = admission::Reserve::none();
        admission::admit(&request, &UserPolicy::unlimited(), &reserve, &rooms)
    }
}
