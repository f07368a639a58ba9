//! What is known about one device at one moment.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::{Control, DomainId, Micros, RunState, TenantId, TenantSpec, Timeslice, UserId};

/// Whether a domain has work for the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Demand {
    /// Nothing is known: treated as work.
    #[default]
    Unknown,
    /// Nothing is queued or running.
    Idle,
    /// Work is queued or running.
    Busy,
}

/// Device time in which a group ends what a program had queued: one that runs ahead of the device has up to a second of work queued.
pub const QUEUED: Micros = Micros::from_secs(2);

impl Demand {
    /// Of a domain whose stopped process left work behind, and which received so much device time since: a process that does not run
    /// cannot report that its work has ended. `used`: the part of the last second in which its kernels ran, if the driver tells.
    pub fn of_stopped(received: Micros, used: Option<f64>) -> Self {
        match received < QUEUED || used.is_some_and(|used| used > 0.0) {
            true => Self::Busy,
            false => Self::Idle,
        }
    }

    /// Of a domain whose process does not report its work. `used`: the part of the last second in which its kernels ran, if the driver
    /// tells. One that uses the device most of the time must not have it for nothing.
    pub fn of_unknown(used: Option<f64>) -> Self {
        match used.is_some_and(|used| used > 0.5) {
            true => Self::Busy,
            false => Self::Unknown,
        }
    }

    /// Whether the domain must be treated as having work.
    pub const fn may_run(self) -> bool {
        !matches!(self, Self::Idle)
    }
}

/// One tenant with at least one domain on the device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TenantState {
    /// Who.
    pub id: TenantId,
    /// Whose it is.
    #[serde(default)]
    pub user: UserId,
    /// Its spec.
    pub spec: TenantSpec,
}

/// One domain on the device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DomainState {
    /// Which.
    pub id: DomainId,
    /// Whose. Names a [`TenantState`] of the same snapshot.
    pub tenant: TenantId,
    /// Whether it has work.
    pub demand: Demand,
    /// Since when `demand` is what it is.
    pub demand_since: Micros,
    /// When work is expected to come, of a domain where it comes at regular times (see [`crate::Rhythm`]).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expected: Option<Micros>,
    /// The timeslice that its neighbours may have while it is launch-bound (see [`crate::Launches`]); none: the shortest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tolerated: Option<Timeslice>,
    /// How long its requests take lately, each from its first piece of work to the end of the wait for all of it; none if it has not waited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request: Option<Micros>,
    /// The part of the time in which it had work lately, up to the last look at which it had waited for all of it. The program writes that: not to
    /// be trusted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub worked: Option<f64>,
    /// Device time it has received so far (see [`crate::Accounts`]). Never falls.
    pub received: Micros,
    /// The slice it has now.
    pub timeslice: Timeslice,
    /// Whether it is enabled now.
    pub run: RunState,
    /// Frozen: it must not run, because its memory is not there. [`crate::gang`] also sets here what was
    /// decided for it together with its tenant's domains on other devices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pinned: Option<RunState>,
}

impl DomainState {
    /// One as a program makes it, with this demand since then.
    pub fn new(id: DomainId, tenant: TenantId, demand: Demand, since: Micros) -> Self {
        Self {
            id,
            tenant,
            demand,
            demand_since: since,
            expected: None,
            tolerated: None,
            request: None,
            worked: None,
            received: Micros::ZERO,
            timeslice: Timeslice::DEFAULT,
            run: RunState::Enabled,
            pinned: None,
        }
    }
}

/// What the controls and the hardware cost, as measured on this device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Costs {
    /// Context switch between two channel groups.
    pub switch: Micros,
    /// Freezing a group.
    pub freeze: Micros,
    /// Thawing a group.
    pub thaw: Micros,
    /// Setting a timeslice.
    pub set_timeslice: Micros,
}

impl Costs {
    /// What pulling this control costs.
    pub const fn of(&self, control: Control) -> Micros {
        match control {
            Control::Freeze(_) => self.freeze,
            Control::Thaw(_) => self.thaw,
            Control::SetTimeslice(..) => self.set_timeslice,
        }
    }
}

impl Default for Costs {
    /// H100, driver 580.159: the middle of what was measured.
    fn default() -> Self {
        Self {
            switch: Micros(188),
            freeze: Micros(600),
            thaw: Micros(220),
            set_timeslice: Micros(200),
        }
    }
}

/// One device at one moment: all that a policy may know.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Snapshot {
    /// The moment. Later snapshots of the same device never carry an earlier one.
    pub now: Micros,
    /// Tenants, by ascending id.
    pub tenants: Vec<TenantState>,
    /// Weights of users; 1 for those that are not named.
    #[serde(default)]
    pub users: BTreeMap<UserId, f64>,
    /// Domains, by ascending id.
    pub domains: Vec<DomainState>,
    /// Measured costs.
    pub costs: Costs,
    /// What is not controlled uses most of the device, with the driver's timeslice.
    #[serde(default)]
    pub crowded: bool,
    /// Set by [`crate::gang`] only: the tenants that have work on other devices too. Where there is one, a gang that runs must
    /// run alone.
    #[serde(default)]
    pub gangs: BTreeSet<TenantId>,
}

impl Snapshot {
    /// These tenants with one domain each, as programs make them: for [`crate::Policy::bounds`].
    pub fn of_tenants(tenants: Vec<TenantState>) -> Self {
        let domain = |(at, tenant): (usize, &TenantState)| {
            DomainState::new(
                DomainId(at as u64),
                tenant.id,
                Demand::Unknown,
                Micros::ZERO,
            )
        };
        Self {
            domains: tenants.iter().enumerate().map(domain).collect(),
            tenants,
            ..Self::default()
        }
    }

    /// The tenant of this id.
    pub fn tenant(&self, id: TenantId) -> Option<&TenantState> {
        let at = (self.tenants).binary_search_by_key(&id, |tenant| tenant.id);
        self.tenants.get(at.ok()?)
    }

    /// Whose a tenant is; of one that isn't named, root's.
    pub fn user_of(&self, id: TenantId) -> UserId {
        self.tenant(id)
            .map(|tenant| tenant.user)
            .unwrap_or_default()
    }
}
