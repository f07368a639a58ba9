//! A simulated daemon: the controller of the real one, with the delays and costs of the real one.
//!
//! It sees demand late and issues one control after the other. A freeze takes its domain off the device when the call begins and a
//! thaw or slice acts when the call is over: with that, a rotation every 10 ms costs what was measured (8%).

use std::collections::BTreeMap;

use gpumux_core::controller::{Controller, Event, NewDomain, Outcome};
use gpumux_core::policy::Bound;
use gpumux_core::{
    Control, Costs, Demand, DomainId, Micros, Policy, Progress, RunState, Snapshot, TenantId,
    TenantSpec, Timeslice, UserId,
};

use crate::gpu::{Gpu, GroupId, Nanos};
use crate::report::DeviceReport;

/// Controls pulled.
#[derive(Clone, Copy, Debug, Default)]
struct Pulled {
    freezes: u64,
    thaws: u64,
    slices: u64,
}

/// A control pulled, for the trace.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pull {
    pub(crate) device: usize,
    pub(crate) control: Control,
    pub(crate) until: Nanos,
    command: u64,
}

pub(crate) struct Daemon {
    controller: Controller,
    costs: Costs,
    /// The device and the group of each domain.
    groups: BTreeMap<DomainId, (usize, GroupId)>,
    /// The control being pulled.
    pulling: Option<Pull>,
    /// By device.
    pulled: Vec<Pulled>,
    busy: Nanos,
}

fn micros(now: Nanos) -> Micros {
    Micros(now / 1000)
}

impl Daemon {
    /// A daemon for as many devices as there are policies.
    pub(crate) fn new(
        policies: Vec<Box<dyn Policy>>,
        costs: Costs,
        users: BTreeMap<UserId, f64>,
    ) -> Self {
        let mut controller = Controller::new(users);
        let pulled = vec![Pulled::default(); policies.len()];
        for policy in policies {
            controller.add_device(policy.into(), costs, Micros::ZERO);
        }
        Self {
            controller,
            costs,
            groups: BTreeMap::new(),
            pulling: None,
            pulled,
            busy: 0,
        }
    }

    /// When it wants to act by itself.
    pub(crate) fn wakes(&self) -> Option<Nanos> {
        let next = || self.controller.next_wakeup();
        (self.pulling.map(|pull| pull.until)).or_else(|| Some(next()?.0.saturating_mul(1000)))
    }

    /// What the tenants of a snapshot can rely on.
    pub(crate) fn bounds(&self, device: usize, snapshot: &Snapshot) -> Vec<Bound> {
        self.controller.policy(device).bounds(snapshot)
    }

    /// A domain was announced. Ids rise.
    pub(crate) fn announce(
        &mut self,
        now: Nanos,
        device: usize,
        (id, group): (DomainId, GroupId),
        (tenant, user, spec): (TenantId, UserId, &TenantSpec),
    ) {
        self.guarantee(now, tenant, user, spec.clone());
        self.groups.insert(id, (device, group));
        let new = NewDomain {
            device,
            id,
            tenant,
            group: None,
            demand: Demand::Unknown,
            timeslice: Timeslice::DEFAULT,
            default: Timeslice::DEFAULT,
            run: RunState::Enabled,
        };
        self.controller.handle(micros(now), Event::Came(new));
    }

    /// A tenant has this spec from now on.
    pub(crate) fn guarantee(
        &mut self,
        now: Nanos,
        tenant: TenantId,
        user: UserId,
        spec: TenantSpec,
    ) {
        let event = Event::Tenant(tenant, user, spec);
        self.controller.handle(micros(now), event);
    }

    /// A domain must be frozen because its memory is away or on its way, or need not any more.
    pub(crate) fn park(&mut self, now: Nanos, id: DomainId, swapped_out: bool) {
        let event = Event::SwappedOut(id, swapped_out);
        self.controller.handle(micros(now), event);
    }

    /// A domain is gone.
    pub(crate) fn forget(&mut self, now: Nanos, id: DomainId) {
        self.groups.remove(&id);
        self.controller.handle(micros(now), Event::Gone(id));
    }

    /// The daemon learns of a domain's demand.
    pub(crate) fn demand(&mut self, now: Nanos, id: DomainId, demand: Demand) {
        let event = Event::Demand(id, demand);
        self.controller.handle(micros(now), event);
    }

    /// The daemon learns what a program has done so far.
    pub(crate) fn progress(&mut self, now: Nanos, id: DomainId, progress: Progress) {
        let event = Event::Progress(id, progress);
        self.controller.handle(micros(now), event);
    }

    /// Work came, or was said to come, after a pause. The daemon learns the time, if later.
    pub(crate) fn came(&mut self, now: Nanos, id: DomainId) {
        let event = Event::Arrival(id, micros(now));
        self.controller.handle(micros(now), event);
    }

    /// Finishes the control it pulls, and begins the next one. Returns what it began.
    pub(crate) fn act(&mut self, now: Nanos, gpus: &mut [Gpu]) -> Option<Pull> {
        if self.wakes().is_none_or(|wakes| now < wakes) {
            return None;
        }
        let moment = micros(now);
        if let Some(pull) = self.pulling.take() {
            if !matches!(pull.control, Control::Freeze(_)) {
                self.apply(pull.control, gpus);
            }
            let done = Outcome::Done(self.costs.of(pull.control));
            (self.controller).handle(moment, Event::Ended(pull.command, done));
        }
        // The real one looks at what programs say just then, not at what it learned before.
        for (id, (device, group)) in &self.groups {
            let at_work = gpus[*device].has_work(*group) == Ok(true);
            self.controller.handle(moment, Event::AtWork(*id, at_work));
        }
        let command = self.controller.poll(moment)?;
        let (device, control) = (command.device, command.control);
        if matches!(control, Control::Freeze(_)) {
            self.apply(control, gpus);
        }
        let pulled = &mut self.pulled[device];
        match control {
            Control::Freeze(_) => pulled.freezes += 1,
            Control::Thaw(_) => pulled.thaws += 1,
            Control::SetTimeslice(..) => pulled.slices += 1,
        }
        let cost = self.costs.of(control).0 * 1000;
        self.busy += cost;
        let pull = Pull {
            device,
            control,
            until: now + cost,
            command: command.id,
        };
        self.pulling = Some(pull);
        Some(pull)
    }

    /// Part of this time that it spent pulling controls, and how often it planned.
    pub(crate) fn effort(&self, seconds: f64) -> (f64, u64) {
        let busy = self.busy as f64 / 1e9 / seconds;
        (busy, self.controller.plans())
    }

    /// Adds the controls pulled to a device's report.
    pub(crate) fn report(&self, device: usize, seconds: f64, report: &mut DeviceReport) {
        let pulled = self.pulled[device];
        report.freezes = pulled.freezes as f64 / seconds;
        report.thaws = pulled.thaws as f64 / seconds;
        report.slice_changes = pulled.slices as f64 / seconds;
    }

    /// A control acts. Its domain may be gone meanwhile.
    fn apply(&self, control: Control, gpus: &mut [Gpu]) {
        let Some((device, group)) = self.groups.get(&control.domain()).copied() else {
            return;
        };
        let gpu = &mut gpus[device];
        let acted = match control {
            Control::Freeze(_) => gpu.freeze(group),
            Control::Thaw(_) => gpu.thaw(group),
            Control::SetTimeslice(_, timeslice) => gpu.set_timeslice(group, timeslice),
        };
        acted.expect("a domain's group lives as long as the domain");
    }
}
