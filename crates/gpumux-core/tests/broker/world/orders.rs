//! What becomes of the broker's commands: processes carry orders out, each in its manner.

use super::*;

impl World {
    pub(super) fn trim(&mut self, process: ProcessId, op: u64) {
        if let Some(puppet) = self.puppets.get_mut(&process) {
            puppet.holding.movable -= std::mem::take(&mut puppet.unused);
            let holding = puppet.holding;
            self.send(holds(process, self.capacity, holding));
            self.send(Event::Reply(process, op, Reply::Done));
        }
    }

    /// Its gate closes, if it may keep what will move.
    pub(super) fn close(
        &mut self,
        process: ProcessId,
        (op, idle): (u64, bool),
        (least, host): (u64, u64),
    ) {
        let Some(puppet) = self.puppets.get_mut(&process) else {
            return;
        };
        let moves = (puppet.holding.movable - puppet.unused).min(least);
        let reply = match puppet.holding.swapped + moves <= host {
            true => {
                puppet.closed = true;
                Reply::Quiet(idle)
            }
            false => Reply::Refused("it may not keep what is to be moved".into()),
        };
        self.send(Event::Reply(process, op, reply));
    }

    pub(super) fn carry_out(&mut self, commands: Vec<Command>) {
        let orders = |is: fn(&Order) -> bool| -> BTreeSet<ProcessId> {
            let to = |it: &Command| match it {
                Command::Order(process, _, order) if is(order) => Some(*process),
                _ => None,
            };
            commands.iter().filter_map(to).collect()
        };
        let out = orders(|it| matches!(it, Order::Quiesce { .. } | Order::Out { .. }));
        let both = &out & &orders(|it| *it == Order::In);
        assert!(both.is_empty(), "they move out and in at once: {both:?}");
        for command in commands {
            match command {
                Command::Order(process, op, order) => {
                    self.orders += 1;
                    match self.latency {
                        Micros::ZERO => self.deliver(process, op, order),
                        latency => self.due(latency, Due::Order(process, op, order)),
                    }
                }
                Command::Grant {
                    process,
                    ticket,
                    bytes,
                } => match self.latency {
                    Micros::ZERO => self.granted(process, ticket, bytes),
                    latency => self.due(latency, Due::Grant(process, ticket, bytes)),
                },
                Command::Freeze(tenant) => {
                    let (after, result) = match self.unfreezable.get(&tenant) {
                        Some(time) => (*time, Err("the control hangs".into())),
                        None => (Micros(500), Ok(())),
                    };
                    if result.is_ok() {
                        self.frozen.insert(tenant);
                    }
                    self.later(after, Event::Frozen(tenant, result));
                }
                Command::Thaw(tenant) => {
                    assert!(
                        self.puppets
                            .values()
                            .all(|it| it.tenant != tenant || it.holding.swapped == 0),
                        "thawed while memory is away: {tenant:?}"
                    );
                    self.frozen.remove(&tenant);
                }
                Command::Answer(request, answer) => {
                    assert!(
                        self.answers.insert(request, answer).is_none(),
                        "answered twice"
                    );
                }
                Command::Moved {
                    tenant, out, bytes, ..
                } => self.moves.push((self.now, tenant, out, bytes)),
                Command::Shown { free, total, .. } => self.shown = Some((free, total)),
                Command::Failed(tenant, _) => self.failed.push(tenant),
                Command::Silent(process) => self.silent.push((self.now, process)),
                Command::NotKept(..) => {}
            }
        }
    }

    pub(super) fn deliver(&mut self, process: ProcessId, op: u64, order: Order) {
        let Some(puppet) = self.puppets.get_mut(&process) else {
            return;
        };
        if puppet.manner == Manner::Stopped {
            puppet.mailbox.push((op, order));
            return;
        }
        let reply = |reply| Event::Reply(process, op, reply);
        let (tenant, manner, holding) = (puppet.tenant, puppet.manner, puppet.holding);
        match order {
            Order::Resume => {
                puppet.closed = false;
                if manner == Manner::Behind {
                    puppet.manner = Manner::Prompt;
                }
                for due in self.queue.values_mut() {
                    if let Due::Close(it, (op, _), _) = *due
                        && it == process
                    {
                        let why = Reply::Refused("it was called off".into());
                        *due = Due::Event(Event::Reply(process, op, why));
                    }
                }
            }
            Order::Trim => {
                let delay = puppet.trim;
                self.due(delay, Due::Trim(process, op));
            }
            Order::Quiesce { least, host } => match manner {
                Manner::Behind => {}
                Manner::Refuses(time) => {
                    self.later(time, reply(Reply::Refused("copies do not end".into())));
                }
                _ => {
                    let mut delay = Micros(300);
                    if let Manner::Slow(time) = manner {
                        let ready = *puppet.ready.get_or_insert(self.now + time);
                        delay = ready.saturating_sub(self.now).max(delay);
                    }
                    let idle = !self.busy.get(&tenant).copied().unwrap_or(false);
                    self.due(delay, Due::Close(process, (op, idle), (least, host)));
                }
            },
            Order::Out { least, host } => {
                if !puppet.closed && holding.swapped == 0 {
                    let why = "it was not asked to be quiet".into();
                    return self.later(Micros(100), reply(Reply::Refused(why)));
                }
                assert!(
                    self.frozen.contains(&tenant),
                    "moved while it runs: {tenant:?}"
                );
                if manner == Manner::RefusesToMove {
                    return self.later(Micros(100), reply(Reply::Refused("a copy failed".into())));
                }
                let movable = holding.movable - puppet.unused;
                let bytes = match manner {
                    Manner::MovesNothing => 0,
                    _ => movable.min(least),
                };
                assert!(
                    holding.swapped + bytes <= host,
                    "more than the host may keep: {} of {host}",
                    holding.swapped + bytes
                );
                puppet.kept = puppet.kept.max(holding.swapped + bytes);
                let (kept, moved) = (puppet.kept, bytes as i64);
                let took = Micros(bytes / LINK + 1000);
                self.due(took, Due::Moved(process, -moved, moved));
                self.later(took, Event::Keeps(process, kept));
                self.later(took, reply(Reply::Done));
            }
            Order::In => {
                if let Manner::CannotReturn(times) = manner
                    && times > 0
                {
                    puppet.manner = Manner::CannotReturn(times - 1);
                    return self.later(Micros(100), reply(Reply::Refused("out of memory".into())));
                }
                if matches!(manner, Manner::CannotReturnBefore(at) if self.now < at) {
                    return self.later(Micros(100), reply(Reply::Refused("out of memory".into())));
                }
                puppet.closed = false;
                let moved = holding.swapped as i64;
                let took = Micros(holding.swapped / LINK + 1000);
                self.due(took, Due::Moved(process, moved, -moved));
                self.later(took, reply(Reply::Done));
            }
            Order::DropHost => {
                if holding.swapped == 0 {
                    puppet.kept = 0;
                }
                let kept = puppet.kept;
                self.later(Micros(1000), Event::Keeps(process, kept));
            }
            Order::Reclaim { bytes, .. } => {
                let gives = if puppet.gives {
                    bytes.min(holding.movable)
                } else {
                    0
                };
                self.reclaims.push((self.now, process));
                self.due(Micros(1000), Due::Moved(process, -(gives as i64), 0));
                self.later(Micros(1000), reply(Reply::Freed(gives)));
            }
            Order::Take { bytes, .. } => {
                assert!(
                    self.frozen.contains(&tenant),
                    "mapped anew while it runs: {tenant:?}"
                );
                let bytes = match manner {
                    Manner::MovesNothing => 0,
                    _ => bytes.min(puppet.droppable.free + puppet.droppable.cached),
                };
                let free = bytes.min(puppet.droppable.free);
                puppet.droppable.free -= free;
                puppet.droppable.cached -= bytes - free;
                let (took, droppable) = (Micros(bytes / GIB * 3000 + 100), puppet.droppable);
                self.drops.push((self.now, tenant, bytes));
                if manner != Manner::MovesNothing {
                    let device = DEVICE.to_owned();
                    let event = Event::Droppable {
                        process,
                        device,
                        droppable,
                    };
                    self.later(took, event);
                }
                self.due(took, Due::Moved(process, -(bytes as i64), 0));
                self.later(took, reply(Reply::Done));
            }
        }
    }
}

pub(super) fn holds(process: ProcessId, total: u64, holding: Holding) -> Event {
    Event::Holds {
        process,
        device: DEVICE.to_owned(),
        total,
        holding,
    }
}
