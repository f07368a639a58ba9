//! The tenants' memory and their processes, as the broker commands them.

use super::*;

impl World {
    pub(super) fn report_frozen(&mut self) {
        for tenant in self.freezing.clone() {
            let groups = self.tenants.get(&tenant.0).map(|it| it.groups.clone());
            let all = groups.into_iter().flatten();
            let known: Vec<_> = all.filter_map(|id| self.controller.domain(id)).collect();
            let result = if known.iter().any(|it| it.is_faulty()) {
                Err("a control failed".into())
            } else if known.iter().all(|it| it.is_frozen()) {
                Ok(())
            } else {
                continue;
            };
            self.freezing.remove(&tenant);
            self.memory(broker::Event::Frozen(tenant, result));
        }
    }

    pub(crate) fn ask(&mut self, id: u64, device: usize, bytes: u64) {
        if !self.has(id) {
            return;
        }
        self.tickets += 1;
        let ask = Ask {
            device: uuid(device),
            total: CAPACITY,
            need: bytes,
            want: bytes,
            kind: Kind::Movable,
            part: None,
        };
        self.memory(broker::Event::Ask {
            process: ProcessId(id),
            ticket: self.tickets,
            ask,
        });
        self.settle();
    }

    /// A tenant's process frees half of what it has on its devices.
    pub(crate) fn free(&mut self, id: u64) {
        let Some(tenant) = self.tenants.get(&id).filter(|it| !it.stopped) else {
            return;
        };
        for (device, holding) in tenant.holding.clone() {
            let movable = holding.movable / 2;
            let event = holds(ProcessId(id), device, Holding { movable, ..holding });
            self.memory(event);
        }
        self.settle();
    }

    /// Something happened that concerns memory.
    pub(super) fn memory(&mut self, event: broker::Event) {
        if let broker::Event::Holds {
            process,
            device,
            holding,
            ..
        } = &event
            && let Some(tenant) = self.tenants.get_mut(&process.0)
        {
            let at = (0..self.devices).find(|at| uuid(*at) == *device);
            tenant.holding.insert(at.expect("a device"), *holding);
        }
        let all = self.tenants.iter().map(|(id, it)| {
            let activity = Activity {
                busy: it.busy,
                idle_since: it.idle_since,
                in_group: it
                    .groups
                    .iter()
                    .any(|id| self.groups.get(id).is_some_and(|it| it.shared.is_some())),
                ..Activity::default()
            };
            (TenantId(*id), activity)
        });
        let all = broker::Event::Activity(all.collect());
        for event in [all, event] {
            for command in self.broker.handle(self.now, event) {
                self.carry_out(command);
            }
        }
    }

    pub(super) fn carry_out(&mut self, command: broker::Command) {
        match command {
            broker::Command::Order(process, op, order) => self.deliver(process, op, order),
            broker::Command::Grant {
                process,
                ticket: _,
                bytes,
            } => self.granted(process, bytes),
            broker::Command::Freeze(tenant) => {
                self.park(tenant, true);
                self.freezing.insert(tenant);
            }
            broker::Command::Thaw(tenant) => {
                self.freezing.remove(&tenant);
                self.park(tenant, false);
            }
            broker::Command::Moved { .. } => self.seen.moves += 1,
            broker::Command::Answer(..)
            | broker::Command::Shown { .. }
            | broker::Command::Failed(..)
            | broker::Command::Silent(_)
            | broker::Command::NotKept(..) => {}
        }
    }

    /// What is granted is on the first device: all ask there.
    pub(super) fn granted(&mut self, process: ProcessId, bytes: u64) {
        if let Some(tenant) = self.tenants.get_mut(&process.0) {
            let device = tenant.groups.first().map_or(0, |it| self.groups[it].device);
            tenant.holding.entry(device).or_default().movable += bytes;
        }
    }

    pub(super) fn park(&mut self, tenant: TenantId, swapped_out: bool) {
        let groups = self.tenants.get(&tenant.0).map(|it| it.groups.clone());
        for id in groups.into_iter().flatten() {
            self.controller
                .handle(self.now, Event::SwappedOut(id, swapped_out));
        }
    }

    /// A process sends something after a while, and carries out no other order before.
    pub(super) fn later(&mut self, process: ProcessId, delay: Micros, event: broker::Event) {
        let at = self.now + delay;
        if let Some(tenant) = self.tenants.get_mut(&process.0) {
            tenant.at_work = at;
        }
        for due in [Due::Broker(event), Due::Next(process)] {
            self.sequence += 1;
            self.queue.insert((at, self.sequence), due);
        }
    }

    pub(super) fn deliver_waiting(&mut self, process: ProcessId) {
        let tenant = self.tenants.get_mut(&process.0);
        let waiting = tenant.map(|it| std::mem::take(&mut it.mailbox));
        for (op, order) in waiting.into_iter().flatten() {
            self.deliver(process, op, order);
        }
    }

    pub(super) fn deliver(&mut self, process: ProcessId, op: u64, order: Order) {
        let Some(tenant) = self.tenants.get_mut(&process.0) else {
            return;
        };
        if tenant.stopped || self.now < tenant.at_work {
            tenant.mailbox.push((op, order));
            return;
        }
        let reply = |reply| broker::Event::Reply(process, op, reply);
        let idle = !tenant.busy;
        match order {
            Order::Resume => {}
            Order::Trim => {
                for (device, holding) in tenant.holding.clone() {
                    let event = holds(process, device, holding);
                    self.later(process, Micros::ZERO, event);
                }
            }
            Order::Quiesce { .. } => self.later(process, Micros(300), reply(Reply::Quiet(idle))),
            Order::Out { least, .. } => {
                for id in &tenant.groups {
                    assert!(self.groups[id].frozen, "moved while it runs: {process:?}");
                }
                let mut reports = Vec::new();
                for (device, holding) in &tenant.holding {
                    let bytes = holding.movable.min(least);
                    let after = Holding {
                        movable: holding.movable - bytes,
                        swapped: holding.swapped + bytes,
                        ..*holding
                    };
                    reports.push((*device, bytes, after));
                }
                let out: u64 = reports.iter().map(|it| it.2.swapped).sum();
                tenant.kept = tenant.kept.max(out);
                let kept = tenant.kept;
                let took = self.report(process, reports);
                self.later(process, took, broker::Event::Keeps(process, kept));
                self.later(process, took, reply(Reply::Done));
            }
            Order::In => {
                let reports = tenant.holding.iter().map(|(device, holding)| {
                    let after = Holding {
                        movable: holding.movable + holding.swapped,
                        swapped: 0,
                        ..*holding
                    };
                    (*device, holding.swapped, after)
                });
                let reports = reports.collect();
                let took = self.report(process, reports);
                self.later(process, took, reply(Reply::Done));
            }
            Order::DropHost => {
                if tenant.holding.values().all(|it| it.swapped == 0) {
                    tenant.kept = 0;
                }
                let kept = tenant.kept;
                self.later(process, Micros(1000), broker::Event::Keeps(process, kept));
            }
            Order::Reclaim { .. } => self.later(process, Micros(1000), reply(Reply::Freed(0))),
            Order::Take { .. } => self.later(process, Micros(1000), reply(Reply::Done)),
        }
    }

    pub(super) fn report(
        &mut self,
        process: ProcessId,
        reports: Vec<(usize, u64, Holding)>,
    ) -> Micros {
        let bytes: u64 = reports.iter().map(|it| it.1).sum();
        let took = Micros(bytes / LINK + 1000);
        for (device, _, holding) in reports {
            self.later(process, took, holds(process, device, holding));
        }
        took
    }
}

pub(super) fn holds(process: ProcessId, device: usize, holding: Holding) -> broker::Event {
    broker::Event::Holds {
        process,
        device: uuid(device),
        total: CAPACITY,
        holding,
    }
}
