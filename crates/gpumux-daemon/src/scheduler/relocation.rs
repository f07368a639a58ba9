//! A tenant's way to another device (`gpumux-core`: `relocation`), as far as it concerns the scheduling thread.
//!
//! The tenant's memory is moved to the host once its work has ended, its groups are let go, the driver moves its processes, and their sessions
//! end. So each process brings its memory back by itself, and begins a session anew, as after the end of a daemon: wherever it is then.

use std::collections::BTreeSet;

use gpumux_core::{
    TenantId,
    broker::{Event, MoveError},
    relocation::{self, Facts, Gpu, Plan, Process, Refusal},
};
use gpumux_wire::Daemon;

use super::{
    domain::Domain,
    engine::Engine,
    model::{Answer, Relocation},
    process::Met,
};
use crate::link::SessionId;

/// A step of the way, in this order.
pub(crate) enum Relocate {
    /// Decides whether the tenant can go to this device. If so, it counts as on its way, and its room there is kept.
    Plan {
        tenant: TenantId,
        target: String,
        gpus: Vec<Gpu>,
        /// Its processes share device memory.
        shares: bool,
        /// And whose the tenant is.
        answer: Answer<Result<(Plan, u32), Refusal>>,
    },
    /// Has all its memory moved to the host, once its work has ended.
    Detain(TenantId, Answer<Result<(), MoveError>>),
    /// Controls its groups no longer: they are given back as they were made. Not where it has other processes than were planned for;
    /// whether it was done.
    LetGo(TenantId, Vec<u32>, Answer<bool>),
    /// Its processes are where they will be: their sessions end, if groups were let go.
    Release(TenantId, Answer<()>),
    /// Whether all of its processes have returned, with their memory; those that have ended apart.
    IsBack {
        tenant: TenantId,
        ended: BTreeSet<u32>,
        answer: Answer<bool>,
    },
    /// It is on its way no more, and what was kept for it is free.
    Forget(TenantId, Answer<()>),
}

impl Relocate {
    pub(super) fn carry_out(self, engine: &mut Engine) {
        match self {
            Self::Plan {
                tenant,
                target,
                gpus,
                shares,
                answer,
            } => {
                let plan = engine.plan_relocation(tenant, target, gpus, shares);
                let _ = answer.send(plan);
            }
            Self::Detain(tenant, answer) => {
                let detain = |request| Event::Detain(tenant, request);
                engine.moves.request(&mut engine.state, detain, answer);
            }
            Self::LetGo(tenant, pids, answer) => {
                let _ = answer.send(engine.let_go(tenant, &pids));
            }
            Self::Release(tenant, answer) => {
                engine.release(tenant);
                let _ = answer.send(());
            }
            Self::IsBack {
                tenant,
                ended,
                answer,
            } => {
                let _ = answer.send(engine.is_back(tenant, &ended));
            }
            Self::Forget(tenant, answer) => {
                engine.forget_relocation(tenant);
                let _ = answer.send(());
            }
        }
    }
}

impl Engine {
    fn plan_relocation(
        &mut self,
        tenant: TenantId,
        target: String,
        gpus: Vec<Gpu>,
        shares: bool,
    ) -> Result<(Plan, u32), Refusal> {
        let facts = self.relocation_facts(tenant, target, gpus, shares);
        let plan = relocation::plan(&facts)?;
        let had = facts.processes.iter().filter(|it| !it.devices.is_empty());
        let relocation = Relocation {
            to: plan.to.clone(),
            pids: had.map(|it| it.pid).collect(),
            let_go: BTreeSet::new(),
        };
        self.relocations.insert(tenant, relocation);
        self.memory_event(Event::Arrives(tenant, plan.to.clone(), Some(plan.bytes)));
        let owner = self.state.owners.get(&tenant);
        Ok((plan, owner.map_or(0, |owner| owner.uid)))
    }

    fn relocation_facts(
        &self,
        tenant: TenantId,
        target: String,
        gpus: Vec<Gpu>,
        shares: bool,
    ) -> Facts {
        let broker = &self.moves.broker;
        let own = |domain: &&Domain| domain.who.tenant == tenant;
        let devices_of = |session: SessionId| {
            let has = |domain: &Domain| domain.member.is_of(session, None);
            let devices = self.state.devices.iter();
            devices
                .filter(|(_, device)| device.domains.values().any(has))
                .map(|(uuid, _)| uuid.clone())
                .collect()
        };
        let held = |session: SessionId| {
            let mut domains = self.state.domains();
            domains.any(|it| it.member.is_of(session, None) && it.launches.is_some())
        };
        let sessions = self.state.sessions.iter();
        let processes = sessions
            .filter(|(_, met)| met.tenant == tenant)
            .map(|(id, met)| Process {
                pid: met.pid,
                devices: devices_of(*id),
                unmanaged: met.unmanaged || held(*id),
            })
            .collect();
        let (mut needs, mut free) = (0, 0);
        for line in broker.lines() {
            let entry = line.entries.iter().find(|(id, _)| *id == tenant);
            needs += entry.map_or(0, |(_, entry)| entry.holding.all());
            if line.uuid == target {
                free = line.free;
            }
        }
        let contexts = self.state.domains().filter(own).count() as u64;
        needs += contexts * broker.context(&target);
        let kept = (self.admission).keeps(&self.state, broker, tenant, &target);
        Facts {
            processes,
            in_group: self.state.is_in_group(tenant),
            shares,
            under_way: self.relocations.contains_key(&tenant),
            confined: self.state.confined.get(&tenant).cloned(),
            gpus,
            target,
            needs,
            free,
            unkept: kept.err().map(|error| error.to_string()),
        }
    }

    /// Gives the groups of a tenant back: the driver is about to end them.
    fn let_go(&mut self, tenant: TenantId, pids: &[u32]) -> bool {
        let own = |it: &(&SessionId, &Met)| it.1.tenant == tenant;
        let mut sessions = self.state.sessions.iter().filter(own);
        if !sessions.all(|(_, met)| pids.contains(&met.pid)) {
            return false;
        }
        let sessions = self.state.sessions.iter().filter(own);
        let own: BTreeSet<SessionId> = sessions.map(|(id, _)| *id).collect();
        // Its gates are closed and its work has ended: nothing runs, frozen or not.
        self.moves.park(&mut self.state, tenant, false);
        for session in &own {
            self.remove(*session, None, true);
        }
        if let Some(relocation) = self.relocations.get_mut(&tenant) {
            relocation.let_go = own;
        }
        true
    }

    fn release(&mut self, tenant: TenantId) {
        self.memory_event(Event::Release(tenant));
        if let Some(relocation) = self.relocations.get(&tenant) {
            for session in &relocation.let_go {
                self.state.send(*session, &Daemon::Bye);
            }
        }
    }

    fn is_back(&self, tenant: TenantId, ended: &BTreeSet<u32>) -> bool {
        let Some(relocation) = self.relocations.get(&tenant) else {
            return true;
        };
        let mut standings = self.moves.broker.standings();
        let away = standings.any(|(id, it)| id == tenant && it.swapped_out);
        let has_group = |pid: &u32| {
            let mut domains = self.state.domains();
            domains
                .any(|it| it.member.pid == *pid && !relocation.let_go.contains(&it.member.session))
        };
        let mut pids = relocation.pids.difference(ended);
        !away && pids.all(has_group)
    }

    /// A tenant is on its way no more.
    pub(super) fn forget_relocation(&mut self, tenant: TenantId) {
        if let Some(relocation) = self.relocations.remove(&tenant) {
            self.memory_event(Event::Release(tenant));
            self.memory_event(Event::Arrives(tenant, relocation.to, None));
        }
    }
}
