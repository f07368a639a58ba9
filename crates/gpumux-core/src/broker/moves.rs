//! Moves: the steps in which a tenant's memory goes to the host and comes back.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    Broker, CLOSED, Command, DRAIN, DRAINS, DROP, FREEZE, HEDGE, HOST_PIECE, MOVE, Micros,
    MoveError, OPEN, OWN, Order, PATIENCE_FOR_TURNS, Place, QUIET, QUIET_PER_GIB, RECLAIM_PAUSE,
    Reply, TAKE, TRIM_PAUSE, Tenant, TenantId,
    model::{Gates, Leaving, Mutation, ProcessId, Round, Step, Why},
    no_process,
};
use crate::ledger::HostFull;

impl Broker {
    fn processes_of(&self, id: TenantId) -> BTreeSet<ProcessId> {
        let own = self.processes.iter().filter(|(_, it)| it.tenant == id);
        own.map(|(process, _)| *process).collect()
    }

    fn next_op(&mut self) -> u64 {
        self.ops += 1;
        self.ops
    }

    /// Begins to move so much of each device to the host.
    ///
    /// # Errors
    /// When that cannot even begin; nothing was ordered then.
    pub(super) fn begin_leave(
        &mut self,
        now: Micros,
        id: TenantId,
        parts: BTreeMap<String, u64>,
        why: Why,
        out: &mut Vec<Command>,
    ) -> Result<(), MoveError> {
        let mut processes = self.processes_of(id);
        let Some(tenant) = self.tenants.get(&id) else {
            return Err(no_process());
        };
        if tenant.activity.in_group {
            let why = "it shares a group, whose members can only be frozen together";
            return Err(MoveError::Busy(why.into()));
        }
        if processes.is_empty() {
            return Err(no_process());
        }
        let (more, asked) = match tenant.place {
            Place::Home => (false, false),
            Place::Away { asked } => (true, asked),
            Place::Leaving(_) | Place::Returning(_) => {
                return Err(MoveError::Busy("it is being moved".into()));
            }
        };
        // One that has joined since was not asked to be quiet, and has nothing yet.
        let has = |id: &ProcessId| {
            let mut devices = self.accounting.uuids();
            devices.any(|uuid| self.accounting.holding(*id, uuid).movable > 0)
        };
        processes.retain(|it| !more || has(it));
        if processes.is_empty() {
            return Err(MoveError::Busy("it has nothing more".into()));
        }
        let least = self.apportion(&processes, &parts);
        let host = self.all_host_needs(&least);
        let host = self.host.reserve(&host, HOST_PIECE)?;
        let orders: BTreeMap<ProcessId, (u64, u64)> = (least.into_iter())
            .map(|(process, least)| (process, (least, host.get(&process.0).copied().unwrap_or(0))))
            .collect();
        let most = orders.values().map(|(_, host)| *host).max().unwrap_or(0);
        let quiet = QUIET + Micros((most >> 20).saturating_mul(QUIET_PER_GIB.0) >> 10);
        let (step, patience) = match more {
            true => (Step::Out, MOVE),
            false => (Step::Quiesce, quiet),
        };
        let had = (parts.keys())
            .map(|uuid| (uuid.clone(), self.movable(id, uuid)))
            .collect();
        let leaving = Leaving {
            step,
            round: Round {
                op: self.next_op(),
                began: now,
                deadline: now + patience,
                waiting: processes,
                refused: None,
                late: false,
                before: self.accounting.all_swapped(id),
            },
            parts,
            had,
            orders,
            gates: Gates::Closing,
            opened: 0,
            busy: false,
            drains: None,
            more,
            asked,
            report: Some(now + HEDGE),
            why,
        };
        leaving.give_orders(out);
        if let Some(tenant) = self.tenants.get_mut(&id) {
            // What was true of a tenant that ran.
            (tenant.blocked, tenant.left_busy) = (tenant.blocked && more, tenant.left_busy && more);
            tenant.place = Place::Leaving(leaving);
        }
        Ok(())
    }

    /// Host memory that a process needs at least when so much of each device moves, and when all of it does, in bytes; with so much
    /// more of one device.
    fn host_needs(
        &self,
        process: ProcessId,
        least: u64,
        (device, more): (&str, u64),
    ) -> (u64, u64) {
        let needs = |least: u64| {
            let on_host = |uuid: &String| {
                let it = self.accounting.holding(process, uuid);
                let movable = it.movable + if uuid == device { more } else { 0 };
                it.swapped.saturating_add(movable.min(least))
            };
            let all = self.accounting.uuids().map(on_host);
            all.fold(0, u64::saturating_add)
        };
        (needs(least), needs(u64::MAX))
    }

    fn all_host_needs(&self, least: &BTreeMap<ProcessId, u64>) -> BTreeMap<u64, (u64, u64)> {
        let nothing = ("", 0);
        let needs = |(process, least): (&ProcessId, &u64)| {
            (process.0, self.host_needs(*process, *least, nothing))
        };
        least.iter().map(needs).collect()
    }

    /// Whether the host has room for so much of what a tenant has of a device.
    pub(super) fn fits_host(&self, id: TenantId, uuid: &str, bytes: u64) -> bool {
        let most = bytes.saturating_mul(self.accounting.uuids().count() as u64);
        self.host.kept().saturating_add(most) <= self.host.limit() || {
            self.fit_host(uuid, &[(id, bytes)])
        }
    }

    /// Whether the host has room for so much of what each of these tenants has of a device.
    pub(super) fn fit_host(&self, uuid: &str, victims: &[(TenantId, u64)]) -> bool {
        let parts = |(id, part): &(TenantId, u64)| (*id, [(uuid.to_owned(), *part)].into());
        let victims = victims.iter().map(parts).collect();
        self.host.room_after(&self.victims_needs(&victims)).is_ok()
    }

    /// Host memory that the processes of these tenants need at least, and when all of what they have moves, if they move so much.
    fn victims_needs(
        &self,
        victims: &BTreeMap<TenantId, BTreeMap<String, u64>>,
    ) -> BTreeMap<u64, (u64, u64)> {
        let mut needs = BTreeMap::new();
        for (victim, parts) in victims {
            let least = self.apportion(&self.processes_of(*victim), parts);
            needs.extend(self.all_host_needs(&least));
        }
        needs
    }

    /// Lets all of these tenants have the host memory that they need to move so much.
    ///
    /// # Errors
    /// When there is no room for all of it; then nothing changes.
    pub(super) fn reserve_host(
        &mut self,
        victims: &BTreeMap<TenantId, BTreeMap<String, u64>>,
    ) -> Result<(), HostFull> {
        let needs = self.victims_needs(victims).into_iter();
        let needs = needs.map(|(id, (need, _))| (id, (need, need)));
        self.host.reserve(&needs.collect(), HOST_PIECE).map(drop)
    }

    /// The order by which a process makes host memory and closes its gate: bytes of each device to be moved, and bytes of host
    /// memory that it may keep.
    pub(super) fn closes(&self, process: ProcessId) -> Option<(u64, u64)> {
        let tenant = self.accounting.tenant_of(process)?;
        match &self.tenants.get(&tenant)?.place {
            Place::Leaving(it) if it.step == Step::Quiesce && !it.drops() => {
                it.orders.get(&process).copied()
            }
            _ => None,
        }
    }

    /// Bytes of host memory that a process may keep by the order that is under way.
    pub(super) fn may_keep(&self, process: ProcessId) -> Option<u64> {
        let tenant = self.accounting.tenant_of(process)?;
        match &self.tenants.get(&tenant)?.place {
            Place::Leaving(it) if !it.drops() => Some(it.orders.get(&process)?.1),
            _ => None,
        }
    }

    /// A process has more than when its gate was ordered to close, or gets so much more of a device: that may move too. Whether
    /// the host has room for it.
    pub(super) fn extend_move(
        &mut self,
        process: ProcessId,
        more: (&str, u64),
        out: &mut Vec<Command>,
    ) -> bool {
        let Some((least, before)) = self.closes(process) else {
            return true;
        };
        let needs = BTreeMap::from([(process.0, self.host_needs(process, least, more))]);
        let Ok(host) = self.host.reserve(&needs, HOST_PIECE) else {
            return false;
        };
        let host = host.into_values().sum();
        let tenant = self.processes.get(&process).map(|it| it.tenant);
        let place = tenant.and_then(|id| Some(&mut self.tenants.get_mut(&id)?.place));
        if let Some(Place::Leaving(leaving)) = place.filter(|_| host > before) {
            leaving.orders.insert(process, (least, host));
            self.ops += 1;
            leaving.order_again(self.ops, out);
        }
        true
    }

    /// Begins to free so much of a device that needs no copy: of the processes that have it the gates are closed, and the tenant is
    /// frozen, only while it is mapped anew.
    pub(super) fn begin_drop(
        &mut self,
        now: Micros,
        id: TenantId,
        uuid: &str,
        bytes: u64,
        why: Why,
        out: &mut Vec<Command>,
    ) {
        let mut left = bytes;
        let mut orders = BTreeMap::new();
        for (process, can) in self.accounting.droppables(id, uuid) {
            let part = left.min(can.free + can.cached);
            if part > 0 {
                orders.insert(process, (part, 0));
            }
            left -= part;
        }
        let parts = BTreeMap::from([(uuid.to_owned(), bytes)]);
        let leaving = Leaving {
            step: Step::Quiesce,
            round: Round {
                op: self.next_op(),
                began: now,
                deadline: now + if why == Why::Own { OWN.1 } else { QUIET },
                waiting: orders.keys().copied().collect(),
                refused: None,
                late: false,
                before: 0,
            },
            had: BTreeMap::from([(uuid.to_owned(), self.movable(id, uuid))]),
            parts,
            orders,
            gates: Gates::Closing,
            opened: 0,
            busy: false,
            drains: None,
            more: false,
            asked: false,
            report: Some(now + HEDGE),
            why,
        };
        leaving.give_orders(out);
        if let Some(tenant) = self.tenants.get_mut(&id) {
            tenant.place = Place::Leaving(leaving);
        }
    }

    /// Memory that needed no copy has been freed: the tenant goes on.
    fn dropped(
        &mut self,
        now: Micros,
        id: TenantId,
        refused: Option<&String>,
        out: &mut Vec<Command>,
    ) {
        let Some(tenant) = self.tenants.get(&id) else {
            return;
        };
        let Place::Leaving(leaving) = &tenant.place else {
            return;
        };
        let freed: u64 = (leaving.parts.keys())
            .map(|uuid| leaving.freed(uuid, self.movable(id, uuid)))
            .sum();
        let short = refused.is_some() || freed < leaving.parts.values().sum();
        if let Some(tenant) = self.tenants.get_mut(&id).filter(|_| short) {
            // The program has taken it into use, or its report is wrong.
            tenant.take_not_before = now + RECLAIM_PAUSE;
            self.end_own(id);
        }
        self.undo(id, out);
    }

    /// What a tenant has of its own does not come for its requests.
    pub(super) fn end_own(&mut self, id: TenantId) {
        let asks = self.asks.range_mut((id, 0)..=(id, u64::MAX));
        asks.for_each(|(_, it)| it.own = false);
    }

    /// What a tenant has on a device that can be moved.
    fn movable(&self, id: TenantId, uuid: &str) -> u64 {
        self.accounting.entry(id, uuid).holding.movable
    }

    /// Bytes by device that come free soon since tenants are being moved away.
    pub(super) fn coming(&self, now: Micros) -> BTreeMap<String, u64> {
        let hedge = match self.has(Mutation::NoHedge) {
            true => MOVE,
            false => HEDGE,
        };
        let mut coming: BTreeMap<String, u64> = BTreeMap::new();
        for (id, tenant) in &self.tenants {
            if let Place::Leaving(leaving) = &tenant.place {
                for uuid in leaving.parts.keys() {
                    let soon = leaving.coming(uuid, self.movable(*id, uuid), now, hedge);
                    let sum = coming.entry(uuid.clone()).or_default();
                    *sum = sum.saturating_add(soon);
                }
            }
        }
        coming
    }

    /// Which process moves how much of each device, so that together they move at least the parts.
    fn apportion(
        &self,
        processes: &BTreeSet<ProcessId>,
        parts: &BTreeMap<String, u64>,
    ) -> BTreeMap<ProcessId, u64> {
        let mut least: BTreeMap<ProcessId, u64> =
            processes.iter().map(|process| (*process, 0)).collect();
        for (uuid, part) in parts {
            let mut left = *part;
            for (process, least) in &mut least {
                let own = match *part {
                    // All of it, also what was not reported yet.
                    u64::MAX => u64::MAX,
                    _ => left.min(self.accounting.holding(*process, uuid).movable),
                };
                *least = own.max(*least);
                left -= own.min(left);
            }
        }
        least
    }

    /// A process has answered an order.
    pub(super) fn replied(
        &mut self,
        now: Micros,
        process: ProcessId,
        op: u64,
        reply: Reply,
        out: &mut Vec<Command>,
    ) {
        for reclaim in self.reclaims.values_mut().filter(|it| it.op == op) {
            reclaim.waiting.remove(&process);
        }
        if let Some(it) = self.processes.get_mut(&process) {
            // It answers: also a later one, soon.
            it.trim = (it.trim.filter(|(last, _)| *last != op)).map(|(last, _)| (last, now));
        }
        // A program may take its time, over sessions: another daemon may have named its order like one of these.
        if let Reply::Freed(bytes) = reply {
            if let Some(it) = self.processes.get_mut(&process) {
                it.gave = bytes > 0;
            }
            return;
        }
        let Some(id) = self.accounting.tenant_of(process) else {
            return;
        };
        let Some(tenant) = self.tenants.get_mut(&id) else {
            return;
        };
        let (round, leaving) = match &mut tenant.place {
            Place::Leaving(it) => (&mut it.round, Some((&mut it.busy, &mut it.gates))),
            Place::Returning(round) => (round, None),
            Place::Home | Place::Away { .. } => return,
        };
        if round.op != op || !round.waiting.remove(&process) {
            return;
        }
        match reply {
            Reply::Quiet(idle) => {
                if let Some((busy, gates)) = leaving {
                    *busy |= !idle;
                    if *gates == Gates::Closing && self.mutation != Some(Mutation::KeepGatesClosed)
                    {
                        *gates = Gates::Closed(now);
                    }
                }
            }
            Reply::Refused(why) => round.refused = Some(why),
            Reply::Done | Reply::Freed(_) => {}
        }
        self.advance(now, id, out);
    }

    /// The tenant's groups are frozen, or cannot be.
    pub(super) fn frozen(
        &mut self,
        now: Micros,
        id: TenantId,
        result: Result<(), String>,
        out: &mut Vec<Command>,
    ) {
        let Some(Place::Leaving(leaving)) = self.tenants.get_mut(&id).map(|it| &mut it.place)
        else {
            return;
        };
        if leaving.step != Step::Freeze {
            return;
        }
        if let Err(why) = result {
            return self.give_up(now, id, MoveError::Freeze(why), out);
        }
        self.ops += 1;
        leaving.step = Step::Out;
        leaving.round.op = self.ops;
        leaving.round.deadline = now + if leaving.drops() { TAKE } else { MOVE };
        leaving.report = Some(now + HEDGE);
        leaving.round.waiting = leaving.orders.keys().copied().collect();
        // A process that has ended since has nothing.
        (leaving.round.waiting).retain(|process| self.processes.contains_key(process));
        leaving.give_orders(out);
        self.advance(now, id, out);
    }

    /// Goes on to the next step if all have answered.
    pub(super) fn advance(&mut self, now: Micros, id: TenantId, out: &mut Vec<Command>) {
        let Some(tenant) = self.tenants.get_mut(&id) else {
            return;
        };
        match &mut tenant.place {
            // One refusal is enough: the others need not make host memory for a move that will not be.
            Place::Leaving(leaving)
                if leaving.round.waiting.is_empty()
                    || (leaving.step == Step::Quiesce && leaving.round.refused.is_some()) =>
            {
                let asked = leaving.is_asked_for();
                let own = leaving.why == Why::Own;
                let needed = asked || self.mutation == Some(Mutation::OutliveAsker) || {
                    let parts = leaving.parts.clone();
                    self.is_needed(id, parts.keys()) || own && self.needs_own(id, parts.keys())
                };
                let Some(tenant) = self.tenants.get_mut(&id) else {
                    return;
                };
                let Place::Leaving(leaving) = &mut tenant.place else {
                    return;
                };
                match (leaving.step, leaving.round.refused.take()) {
                    // Room came free otherwise, or the tenant that lacked it has gone.
                    (Step::Quiesce, None) if !needed => self.undo(id, out),
                    (Step::Quiesce, None) if tenant.detained && leaving.busy => {
                        leaving.drains.get_or_insert(now + DRAINS);
                    }
                    (Step::Quiesce, None) => {
                        leaving.step = Step::Freeze;
                        leaving.round.deadline = now + FREEZE;
                        out.push(Command::Freeze(id));
                    }
                    (Step::Quiesce, Some(why)) => self.give_up(now, id, MoveError::Busy(why), out),
                    (Step::Freeze, _) => {}
                    (Step::Out, refused) if leaving.drops() => {
                        self.dropped(now, id, refused.as_ref(), out);
                    }
                    (Step::Out, refused) => self.left(now, id, refused, out),
                }
            }
            Place::Returning(round) if round.waiting.is_empty() => {
                let refused = round.refused.take();
                self.came_back(now, id, refused, out);
            }
            _ => {}
        }
    }

    /// A move to the host has failed of which nothing has moved yet.
    fn give_up(&mut self, now: Micros, id: TenantId, why: MoveError, out: &mut Vec<Command>) {
        self.undo(id, out);
        self.end_own(id);
        let Some(tenant) = self.tenants.get_mut(&id) else {
            return;
        };
        tenant.failed(now, self.mutation);
        let requests = std::mem::take(&mut tenant.sleeps);
        out.extend((requests.into_iter()).map(|it| Command::Answer(it.0, Err(why.clone()))));
        out.push(Command::Failed(id, why));
    }

    /// A user has a tenant woken whose move to the host has not begun to copy, and that no other tenant needs: the move is called off.
    pub(super) fn call_off(&mut self, now: Micros, id: TenantId, out: &mut Vec<Command>) {
        let Some(tenant) = self.tenants.get_mut(&id) else {
            return;
        };
        let Place::Leaving(leaving) = &tenant.place else {
            return;
        };
        if !leaving.is_asked_for() || leaving.step == Step::Out {
            return;
        }
        // Not moved again at once where it was idle.
        tenant.home_since = now;
        let why = MoveError::Busy("it was woken before it was asleep".into());
        let requests = std::mem::take(&mut tenant.sleeps);
        out.extend((requests.into_iter()).map(|it| Command::Answer(it.0, Err(why.clone()))));
        self.undo(id, out);
    }

    /// A part of a tenant's memory is on the host, and it was not this broker that had it moved there: it comes back when there is room.
    pub(super) fn stays_away(&mut self, id: TenantId, out: &mut Vec<Command>) {
        if let Some(tenant) = self.tenants.get_mut(&id) {
            out.push(Command::Freeze(id));
            tenant.place = Place::Away { asked: false };
            tenant.blocked = tenant.sleeps.is_empty();
        }
    }

    /// Undoes a move to the host of which nothing has moved yet.
    pub(super) fn undo(&mut self, id: TenantId, out: &mut Vec<Command>) {
        let away = !self.accounting.swapped(id).is_empty();
        let Some(tenant) = self.tenants.get_mut(&id) else {
            return;
        };
        let Place::Leaving(leaving) = &tenant.place else {
            return;
        };
        let resumed = leaving.orders.keys().copied();
        out.extend(resumed.map(|process| Command::Order(process, 0, Order::Resume)));
        if away {
            // Of a process that has joined since.
            self.stays_away(id, out);
            return self.free_host(id);
        }
        if leaving.step != Step::Quiesce {
            out.push(Command::Thaw(id));
        }
        tenant.place = Place::Home;
        let requests = std::mem::take(&mut tenant.wakes);
        out.extend((requests.into_iter()).map(|it| Command::Answer(it.0, Ok(()))));
        self.free_host(id);
    }

    /// Takes back host memory that was allowed for a move and is not used.
    pub(super) fn free_host(&mut self, id: TenantId) {
        if self.has(Mutation::KeepReservation) {
            return;
        }
        for (process, it) in self.processes.iter().filter(|(_, it)| it.tenant == id) {
            self.host.hear(process.0, it.kept, 0);
        }
    }

    /// A move to the host has ended, for all processes or not.
    fn left(&mut self, now: Micros, id: TenantId, refused: Option<String>, out: &mut Vec<Command>) {
        let swapped = self.accounting.all_swapped(id);
        let Some(Place::Leaving(leaving)) = self.tenants.get(&id).map(|it| &it.place) else {
            return;
        };
        let freed = |uuid: &String| leaving.freed(uuid, self.movable(id, uuid)) > 0;
        let gave_nothing = leaving.why == Why::Room && !leaving.parts.keys().any(freed);
        let Some(tenant) = self.tenants.get_mut(&id) else {
            return;
        };
        let Place::Leaving(leaving) = &tenant.place else {
            return;
        };
        let bytes = swapped.saturating_sub(leaving.round.before);
        let took = now.saturating_sub(leaving.round.began);
        let (more, before) = (leaving.more, leaving.asked);
        let by_user = leaving.why == Why::User;
        tenant.left_busy |= leaving.busy || refused.is_some() && !more;
        let asked = match refused {
            // What has moved comes back, unless it was there before.
            Some(_) => before,
            None => before || by_user,
        };
        tenant.place = Place::Away { asked };
        let error = match refused {
            Some(why) => Some(MoveError::Busy(why)),
            // What it was granted and does not use cannot be moved, nor what a pool keeps that the driver cannot divide.
            None if bytes == 0 && (gave_nothing || more && !by_user) => {
                Some(MoveError::Busy("it has nothing more".into()))
            }
            None => None,
        };
        match &error {
            Some(_) => tenant.failed(now, self.mutation),
            None => tenant.failures = 0,
        }
        let answer = error.clone().map_or(Ok(()), Err);
        let requests = match by_user || error.is_some() {
            true => std::mem::take(&mut tenant.sleeps),
            false => Vec::new(),
        };
        out.extend((requests.into_iter()).map(|it| Command::Answer(it.0, answer.clone())));
        self.free_host(id);
        self.learn_speed(bytes, took);
        out.push(Command::Moved {
            tenant: id,
            out: true,
            bytes,
            took,
        });
        if let Some(error) = error {
            out.push(Command::Failed(id, error));
            self.trim(now, None, out);
        }
    }

    /// The fastest of the last moves: one that was held up (a stopped process) says nothing about the link, nor does a small one.
    fn learn_speed(&mut self, bytes: u64, took: Micros) {
        if bytes >= 1 << 28 {
            let now = bytes / took.0.max(1);
            self.speed = now.max(self.speed - self.speed / 8).max(1);
        }
    }

    /// Begins to bring a tenant back, for whom there is room.
    pub(super) fn begin_return(&mut self, now: Micros, id: TenantId, out: &mut Vec<Command>) {
        let processes = self.processes_of(id);
        if let Err((device, denied)) = self.accounting.begin_return(id) {
            debug_assert!(false, "there was room: {denied} on {device}");
            return;
        }
        let op = self.next_op();
        let before = self.accounting.all_swapped(id);
        for process in &processes {
            out.push(Command::Order(*process, op, Order::In));
        }
        if let Some(tenant) = self.tenants.get_mut(&id) {
            tenant.place = Place::Returning(Round {
                op,
                began: now,
                deadline: now + MOVE,
                waiting: processes,
                refused: None,
                late: false,
                before,
            });
        }
        self.advance(now, id, out);
    }

    fn came_back(
        &mut self,
        now: Micros,
        id: TenantId,
        refused: Option<String>,
        out: &mut Vec<Command>,
    ) {
        self.accounting.returned(id);
        let swapped = self.accounting.swapped(id);
        let leaving = self.accounting.is_leaving(now, id);
        let Some(tenant) = self.tenants.get_mut(&id) else {
            return;
        };
        let Place::Returning(round) = &tenant.place else {
            return;
        };
        let (took, bytes) = (now.saturating_sub(round.began), round.before);
        let lacks = || "it reports memory on the host".to_owned();
        if let Some(why) = refused.or_else(|| (!swapped.is_empty()).then(lacks)) {
            // The driver had less room than is accounted for: more of others' is moved before the next attempt, unless room comes
            // by itself.
            tenant.place = Place::Away { asked: false };
            tenant.left_busy = true;
            tenant.back_failures = tenant.back_failures.saturating_add(u32::from(!leaving));
            let pause = super::LOOK.0 << tenant.back_failures.min(5);
            tenant.back_not_before = now + Micros(pause);
            out.push(Command::Failed(id, MoveError::Busy(why)));
            return;
        }
        tenant.place = Place::Home;
        // Time in which it was held up gives it no longer turn.
        let usual = Micros(bytes / self.speed.max(1) * 4) + Micros::from_secs(1);
        (tenant.home_since, tenant.took) = (now, took.min(usual));
        (tenant.blocked, tenant.left_busy, tenant.gave_way) = (false, false, false);
        (tenant.back_failures, tenant.lost) = (0, None);
        let requests = std::mem::take(&mut tenant.wakes);
        self.learn_speed(bytes, took);
        out.push(Command::Thaw(id));
        out.push(Command::Moved {
            tenant: id,
            out: false,
            bytes,
            took,
        });
        out.extend((requests.into_iter()).map(|it| Command::Answer(it.0, Ok(()))));
    }

    /// Ends what has passed its deadline.
    pub(super) fn expire(&mut self, now: Micros, out: &mut Vec<Command>) {
        let due = |round: &Round| !round.late && round.deadline <= now;
        let ids: Vec<TenantId> = self.tenants.keys().copied().collect();
        for id in ids {
            let Some(tenant) = self.tenants.get_mut(&id) else {
                continue;
            };
            let due_wakes =
                (tenant.wakes).extract_if(.., |(_, since)| *since + PATIENCE_FOR_TURNS <= now);
            let no_room = |it: (u64, Micros)| Command::Answer(it.0, Err(MoveError::NoRoom));
            out.extend(due_wakes.map(no_room));
            let why = "a process of it does not answer";
            let why = match tenant.detained {
                true => "its work does not end",
                false => why,
            };
            match &mut tenant.place {
                Place::Leaving(leaving) if due(&leaving.round) => match leaving.step {
                    Step::Quiesce => self.give_up(now, id, MoveError::Busy(why.into()), out),
                    Step::Freeze => {
                        let why = MoveError::Freeze(format!("not within {FREEZE}"));
                        self.give_up(now, id, why, out);
                    }
                    Step::Out => {
                        leaving.round.late = true;
                        leaving.report = Some(now);
                        if leaving.drops() {
                            tenant.failed(now, self.mutation);
                        }
                        let requests = std::mem::take(&mut tenant.sleeps);
                        let stuck =
                            |it: (u64, Micros)| Command::Answer(it.0, Err(MoveError::Stuck));
                        out.extend(requests.into_iter().map(stuck));
                        out.push(Command::Failed(id, MoveError::Stuck));
                    }
                },
                Place::Leaving(leaving) if leaving.drains_due().is_some_and(|at| at <= now) => {
                    self.ops += 1;
                    leaving.look_for_work(now, self.ops, out);
                }
                Place::Leaving(leaving) if leaving.gates_due().is_some_and(|at| at <= now) => {
                    self.ops += 1;
                    leaving.turn_gates(now, self.ops, out);
                }
                Place::Returning(round) if due(round) => {
                    round.late = true;
                    let requests = std::mem::take(&mut tenant.wakes);
                    let stuck = |it: (u64, Micros)| Command::Answer(it.0, Err(MoveError::Stuck));
                    out.extend(requests.into_iter().map(stuck));
                    out.push(Command::Failed(id, MoveError::Stuck));
                }
                _ => {}
            }
        }
        for reclaim in self.reclaims.values_mut() {
            if reclaim.until <= now {
                reclaim.waiting.clear();
            }
        }
    }

    /// Reports processes that have not answered for long, where others are guaranteed what their tenant has above its own guarantee.
    pub(super) fn report_silent(&mut self, now: Micros, out: &mut Vec<Command>) {
        let due = |tenant: &Tenant| match &tenant.place {
            Place::Leaving(it) => it.report.is_some_and(|at| at <= now),
            _ => false,
        };
        let ids: Vec<TenantId> = (self.tenants.iter().filter(|(_, it)| due(it)))
            .map(|(id, _)| *id)
            .collect();
        for id in ids {
            let Some(Place::Leaving(leaving)) = self.tenants.get_mut(&id).map(|it| &mut it.place)
            else {
                continue;
            };
            leaving.report = None;
            let (waiting, parts) = (leaving.round.waiting.clone(), leaving.parts.clone());
            let borrows = |uuid: &&String| self.accounting.entry(id, uuid).borrowed() > 0;
            if self.is_guaranteed_to_others(id, parts.keys().filter(borrows)) {
                out.extend(waiting.into_iter().map(Command::Silent));
            }
        }
    }

    /// A tenant is to go to another device.
    pub(super) fn detain(
        &mut self,
        now: Micros,
        id: TenantId,
        request: u64,
        out: &mut Vec<Command>,
    ) {
        let Some(tenant) = self.tenants.get_mut(&id) else {
            return out.push(Command::Answer(request, Err(no_process())));
        };
        let why = match tenant.place {
            Place::Home => None,
            Place::Away { .. } if !tenant.left_busy => None,
            Place::Away { .. } => {
                Some("its kernels were interrupted when it was moved to the host: wake it first")
            }
            Place::Leaving(_) | Place::Returning(_) => Some("its memory is being moved"),
        };
        if let Some(why) = why {
            let error = MoveError::Busy(why.into());
            return out.push(Command::Answer(request, Err(error)));
        }
        tenant.detained = true;
        tenant.sleeps.push((request, now));
    }

    /// Moves tenants to the host that users want there, or that have been idle for as long as their terms say.
    pub(super) fn start_sleeps(&mut self, now: Micros, out: &mut Vec<Command>) {
        let ids: Vec<TenantId> = self.tenants.keys().copied().collect();
        for id in ids {
            let movable = self.accounting.movable(id);
            // It will have work once it has what it waits for.
            let waits = self.has_asked(id);
            let Some(tenant) = self.tenants.get_mut(&id) else {
                continue;
            };
            let still = matches!(tenant.place, Place::Home | Place::Away { .. });
            let request = tenant.sleeps.first().copied();
            let idle = tenant.terms.sleep_after.is_some_and(|after| {
                tenant.place == Place::Home
                    && !waits
                    && !tenant.activity.in_group
                    && !tenant.activity.busy
                    && movable > 0
                    && tenant.idle_for(now) >= after
                    && now.saturating_sub(tenant.home_since) >= after
                    && now >= tenant.not_before
            });
            if !still || (request.is_none() && !idle) {
                continue;
            }
            let away = matches!(tenant.place, Place::Away { .. });
            if request.is_some() && away && movable == 0 {
                // All of it is there already; only the user, or a thread that is blocked, brings it back.
                tenant.place = Place::Away { asked: true };
                let requests = std::mem::take(&mut tenant.sleeps);
                out.extend(requests.into_iter().map(|it| Command::Answer(it.0, Ok(()))));
                continue;
            }
            let why = request.map_or(Why::Idle, |_| Why::User);
            let all = (self.accounting.uuids()).map(|uuid| (uuid.clone(), u64::MAX));
            let all = all.collect();
            let Err(error) = self.begin_leave(now, id, all, why, out) else {
                continue;
            };
            let waited = request.map_or(Micros::ZERO, |(_, since)| now.saturating_sub(since));
            let full = matches!(error, MoveError::HostFull(_));
            if full && self.drop_unused(now, id, out) && waited < DROP {
                continue;
            }
            let Some(tenant) = self.tenants.get_mut(&id) else {
                continue;
            };
            tenant.failed(now, self.mutation);
            let requests = std::mem::take(&mut tenant.sleeps);
            let answers = requests.into_iter();
            out.extend(answers.map(|it| Command::Answer(it.0, Err(error.clone()))));
            out.push(Command::Failed(id, error));
        }
    }

    /// Has others let go of host memory that they do not use, and the tenant give back what it was granted and does not use.
    /// Whether another process may yet do so.
    pub(super) fn drop_unused(
        &mut self,
        now: Micros,
        id: TenantId,
        out: &mut Vec<Command>,
    ) -> bool {
        let mut some = false;
        for (process, it) in &mut self.processes {
            let own = it.tenant == id;
            let home = self.tenants.get(&it.tenant).map(|it| &it.place) == Some(&Place::Home);
            if !own && (it.kept == 0 || !home) {
                continue;
            }
            let (order, time) = match own {
                true => (Order::Trim, TRIM_PAUSE),
                false => (Order::DropHost, DROP),
            };
            let asked = *it.dropped.get_or_insert_with(|| {
                out.push(Command::Order(*process, 0, order.clone()));
                now
            });
            some |= now < asked + time;
            if now >= asked + DROP {
                it.dropped = None;
            }
        }
        some
    }
}

impl Leaving {
    /// A process of it is gone. Whether it was the last one that was to move something.
    pub(super) fn forget(&mut self, process: ProcessId) -> bool {
        self.round.waiting.remove(&process);
        self.orders.remove(&process);
        self.orders.is_empty()
    }

    /// There is a way back.
    pub(super) fn has_moved_nothing(&self) -> bool {
        !self.more && self.step != Step::Out
    }

    /// Its user or its terms ask for it: no other tenant needs it.
    fn is_asked_for(&self) -> bool {
        matches!(self.why, Why::User | Why::Idle)
    }

    /// Nothing goes to the host.
    pub(super) fn drops(&self) -> bool {
        matches!(self.why, Why::Drop | Why::Own)
    }

    /// It frees memory of another device without a copy, and is not late with that.
    pub(super) fn frees_elsewhere(&self, now: Micros, uuid: &str) -> bool {
        self.drops() && !self.parts.contains_key(uuid) && now < self.round.began + HEDGE
    }

    fn give_orders(&self, out: &mut Vec<Command>) {
        let device = self.parts.keys().next();
        for process in &self.round.waiting {
            let (least, host) = self.orders.get(process).copied().unwrap_or_default();
            let order = match (self.step, device.filter(|_| self.drops())) {
                (Step::Quiesce, None) => Order::Quiesce { least, host },
                // Nothing is to be made ready for copies.
                (Step::Quiesce, Some(_)) => Order::Quiesce { least: 0, host: 0 },
                (Step::Freeze | Step::Out, None) => Order::Out { least, host },
                (Step::Freeze | Step::Out, Some(device)) => Order::Take {
                    device: device.clone(),
                    bytes: least,
                },
            };
            out.push(Command::Order(*process, self.round.op, order));
        }
    }

    /// When its processes are asked again whether their work has ended.
    pub(super) fn drains_due(&self) -> Option<Micros> {
        self.drains.filter(|_| self.round.waiting.is_empty())
    }

    /// When all gates are to be opened, or closed again. Each time later than the time before: a copy may just take long.
    pub(super) fn gates_due(&self) -> Option<Micros> {
        match self.gates {
            _ if self.step != Step::Quiesce => None,
            Gates::Closing => None,
            Gates::Closed(since) => {
                let drain = self.drains.map_or(Micros::ZERO, |_| DRAIN);
                Some(since + drain + Micros(CLOSED.0 << self.opened.min(16)))
            }
            Gates::Open(until) => Some(until),
        }
    }

    /// Asks whether work has ended. The gates stay closed.
    fn look_for_work(&mut self, now: Micros, op: u64, out: &mut Vec<Command>) {
        self.drains = Some(now + DRAINS);
        self.order_again(op, out);
    }

    /// All are to close their gates by another order, unless these are open for a moment. What was answered until now does not count.
    fn order_again(&mut self, op: u64, out: &mut Vec<Command>) {
        (self.busy, self.round.op) = (false, op);
        self.round.waiting = self.orders.keys().copied().collect();
        if !matches!(self.gates, Gates::Open(_)) {
            self.give_orders(out);
        }
    }

    /// Opens all gates, or closes them again.
    fn turn_gates(&mut self, now: Micros, op: u64, out: &mut Vec<Command>) {
        self.drains = None;
        if let Gates::Open(_) = self.gates {
            self.gates = Gates::Closing;
        } else {
            self.gates = Gates::Open(now + Micros(OPEN.0 << self.opened.min(16)));
            self.opened += 1;
            let all = self.orders.keys();
            out.extend(all.map(|process| Command::Order(*process, 0, Order::Resume)));
        }
        self.order_again(op, out);
    }

    /// Bytes of a device that came free, where so much can still be moved.
    fn freed(&self, uuid: &str, movable: u64) -> u64 {
        self.had
            .get(uuid)
            .map_or(0, |had| had.saturating_sub(movable))
    }

    /// Bytes of a device that will come free soon. What one of several processes has moved is free already.
    fn coming(&self, uuid: &str, movable: u64, now: Micros, hedge: Micros) -> u64 {
        let counts = match self.step {
            Step::Quiesce => now < self.round.began + hedge,
            Step::Freeze | Step::Out => !self.round.late,
        };
        match counts {
            true => {
                let part = self.parts.get(uuid).copied().unwrap_or(0);
                // All of it may be asked for, which is no more than it has.
                part.saturating_sub(self.freed(uuid, movable)).min(movable)
            }
            false => 0,
        }
    }
}
