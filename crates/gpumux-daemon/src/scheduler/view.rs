//! What the scheduling thread knows, for people and for metrics.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use gpumux_core::{
    Micros, TenantId,
    broker::{Line, Standing},
    runlist::Mechanism,
};

use super::{
    device::Device,
    domain,
    engine::Engine,
    record::{Counted, History, Totals},
};
use crate::api::types;

/// What the scheduling thread knows, for people.
#[derive(Clone, Debug)]
pub(crate) struct View {
    pub(crate) domains: Vec<(TenantId, types::Domain)>,
    /// How long each domain had work itself, whatever the others of its group had, in µs.
    pub(crate) busy_us: BTreeMap<u64, u64>,
    /// What each tenant had on each device so far, its ended domains too.
    pub(crate) totals: BTreeMap<(TenantId, String), Totals>,
    /// Without what only NVML knows.
    pub(crate) devices: Vec<types::Device>,
    pub(crate) scheduler: types::Scheduler,
    /// What each tenant's processes counted so far, those that are gone too.
    pub(crate) counted: BTreeMap<TenantId, Counted>,
    pub(crate) memory: Vec<Line>,
    /// Tenants whose memory is on its way or away.
    pub(crate) swapped_out: BTreeSet<TenantId>,
    pub(crate) swap_reasons: BTreeMap<TenantId, types::SwapReason>,
    pub(crate) standings: BTreeMap<TenantId, Standing>,
    /// Bytes of host memory that moved memory takes, and may take.
    pub(crate) on_host: (u64, u64),
    pub(crate) moves: BTreeMap<TenantId, types::MoveFigures>,
    /// Driver calls of a tenant's processes that their library does not know.
    pub(crate) unlisted: BTreeMap<TenantId, BTreeSet<String>>,
    /// Tenants whose guarantees have lapsed.
    pub(crate) lapsed: BTreeSet<TenantId>,
    /// Tenants whose processes undo controls.
    pub(crate) tampering: BTreeMap<TenantId, types::Tampering>,
}

impl Engine {
    /// What happened on every device in the last `time`, as far as it is remembered.
    pub(super) fn history(&mut self, time: Micros) -> Vec<History> {
        let to = self.state.now();
        let from = to.saturating_sub(time);
        let devices = self.state.devices.iter();
        let history = |(uuid, device): (&String, &Device)| History {
            device: uuid.clone(),
            from,
            to,
            events: device.record.since(from),
            present: (device.domains.values())
                .zip(self.state.controller.domains(device.index))
                .map(|(domain, known)| (Arc::clone(&domain.who), domain::now(known)))
                .collect(),
        };
        devices.map(history).collect()
    }

    /// What there is, for people.
    pub(super) fn view(&mut self) -> View {
        let now = self.state.now();
        let mut view = View {
            domains: Vec::new(),
            busy_us: BTreeMap::new(),
            totals: BTreeMap::new(),
            devices: Vec::new(),
            scheduler: types::Scheduler {
                steps: self.steps.count,
                steps_total_us: self.steps.total.0,
                steps_histogram: self.steps.histogram.into(),
                ..self.stats.clone()
            },
            counted: self.ended.clone(),
            memory: self.moves.broker.lines(),
            swapped_out: self.moves.swapped_out.clone(),
            swap_reasons: self.moves.reasons.clone(),
            standings: self.moves.broker.standings().collect(),
            on_host: self.moves.broker.on_host(),
            moves: self.moves.figures.clone(),
            unlisted: self.unlisted.clone(),
            lapsed: self.expiry.lapsed().collect(),
            tampering: self.tampers.list(now),
        };
        for met in self.state.sessions.values() {
            let all = view.counted.entry(met.tenant).or_default();
            *all = met.counted().plus(all);
        }
        self.state.sample(now);
        for device in self.state.devices.values() {
            self.state.controller.account_until(device.index, now);
        }
        for (uuid, device) in &self.state.devices {
            let policy = self.state.controller.policy(device.index);
            let entitled = self.state.bounds(device.index, &device.tenants());
            view.devices.push(types::Device {
                uuid: uuid.clone(),
                index: None,
                name: String::new(),
                emulated: device.emulated,
                driver: String::new(),
                memory_bytes: 0,
                memory_guaranteeable: self.moves.broker.guaranteeable(uuid),
                context_bytes: self.moves.broker.context(uuid),
                hardware: types::Hardware::default(),
                readings: types::Readings::default(),
                policy: policy.name().into(),
                state: device.lost.clone().unwrap_or_else(|| "ok".into()),
                domains: device.domains.len(),
                foreign: (self.admission.foreign.get(uuid))
                    .map(|all| all.list(|id| Some(self.state.owners.get(&id)?.name.clone())))
                    .unwrap_or_default(),
                controls: device.costs.list(),
            });
            for (tenant, totals) in &device.ended {
                *view.totals.entry((*tenant, uuid.clone())).or_default() += *totals;
            }
            for (domain, known) in
                (device.domains.values()).zip(self.state.controller.domains(device.index))
            {
                let account = self.state.controller.account(domain.who.id);
                let (tenant, has) = (domain.who.tenant, domain::now(known));
                let totals = domain.totals(now, known, &account);
                let (received_share, waited_share) =
                    domain.lately(now, account.received_us, account.waited_us);
                *view.totals.entry((tenant, uuid.clone())).or_default() += totals;
                let shown = types::Domain {
                    id: domain.who.id.0,
                    group: domain.group.map(|group| group.0),
                    device: uuid.clone(),
                    pid: domain.member.pid,
                    timeslice_us: has.timeslice_us,
                    frozen: has.frozen,
                    demand: has.demand,
                    stopped: domain.is_stopped(),
                    entitled_share: entitled.get(&tenant).map_or(0.0, |bound| bound.share),
                    wait_bound_us: entitled.get(&tenant).map_or(0, |bound| bound.wait.0),
                    received_share,
                    waited_share,
                    measured_share: device.measured(domain.member.pid),
                    received_us: account.received_us as u64,
                    runnable_us: account.runnable_us as u64,
                    waited_us: account.waited_us as u64,
                    preemptions: account.preemptions,
                    freezes: domain.freezes,
                    thaws: domain.thaws,
                    slice_changes: domain.slice_changes,
                    tampered: domain.tampered,
                    mechanism: match domain.launches {
                        Some(_) => Mechanism::Launches,
                        None => Mechanism::Controls,
                    },
                    refused: domain.launches.as_ref().map(|it| it.why.to_string()),
                    held_launches: domain.held_launches(),
                    copies: domain.copies.shown(),
                    reason: has.reason.into(),
                    error: (domain.error.clone()).filter(|_| known.is_faulty()),
                };
                view.busy_us.insert(shown.id, known.busy(now).0);
                view.domains.push((tenant, shown));
            }
        }
        view
    }
}
