//! The memory broker: which tenants have their memory on the device, which give way, and in which order requests are served.
//!
//! A pure state machine: [`Broker::handle`] takes the time and an [`Event`] and returns [`Command`]s;
//! [`Broker::next_wakeup`] tells when it must be called although nothing happens. The daemon and the simulator only carry
//! commands out. `tests/broker` checks it exhaustively in small worlds.
//!
//! # Problem
//! Tenants have more memory than the device. A tenant that lacks a part of its memory cannot run, so it is frozen and waits.
//! Processes answer late, refuse, stop or end at every step. No tenant may wait without end while there is room.
//!
//! # Approach
//! What tenants lack is computed anew after every event from the state itself (*claims*): memory that was asked for, and
//! memory on the host of tenants that want to run. A tenant wants to run if its page shows outstanding work, a thread of it is
//! blocked, or it waits for memory; so no claim depends on a message that only a blocked thread could send, and none
//! outlives its tenant. Claims are served in one order (see `claims.rs`): those within a guarantee first, then by the time
//! at which they began, plus a patience by class. A claim that lacks room has others moved away (*victims*), all at once, if they
//! suffice and the host has room for all of them; what comes free is kept for it. If they do not suffice now, later claims that fit may pass it.
//!
//! # A move
//! [`Order::Quiesce`] (every process closes its gate), [`Command::Freeze`], [`Order::Out`]; back: room is accounted for,
//! [`Order::In`], [`Command::Thaw`]. Each step has a deadline. Until the third step a move is undone when a
//! process refuses or is late; a victim that failed is left alone for 1, 2, 4 … 60 s and is the last resort then. From the third
//! step on, the tenant stays frozen until its memory is back, or until its processes end.
//! What a process gets while gates close may move too: all are ordered again, under another name, and it may keep more on the host.
//! Processes of one tenant may wait for each other (collectives). If one has closed its gate and another does not get quiet within [`CLOSED`], all
//! open their gates for a moment and close them again.
//!
//! # Memory that needs no copy
//! Of elastic ranges, processes report what has no contents (*free*) and what is a cache (*cached*). If that suffices for a claim, it is
//! taken instead of moving anything: free memory above its holder's guarantee from everyone, caches where the claim is within its
//! guarantee or the holder would be moved. The tenant is frozen meanwhile, so that no kernel meets an address that is being
//! mapped anew, and goes on at once. A move frees such memory first, too. A tenant's own is taken for its requests in the same way, also where
//! they would exceed its limit or the device else, and before memory of others moves.
//!
//! # Thrash control
//! A tenant with work keeps its memory for at least [`turn`]: moving takes at most a twentieth of the time, and tenants
//! whose sets do not fit run one after the other. Idle means idle for at least as long as coming back takes; memory within a guarantee
//! is lent only after its owner was idle for a whole turn. A tenant that waits for memory gives way at once, but in its turn only if it could not
//! be served with what is left on the device of tenants that cannot run.

mod accounting;
mod claims;
mod finite;
mod messages;
mod model;
mod moves;
mod request;
mod room;

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    MemoryPolicy, Micros, TenantId,
    ledger::{Holding, HostFull, HostPool, turn},
};

use accounting::Accounting;
pub use accounting::{CONTEXT, LEAVE, Line, RESERVE, RETURN, overhead};
pub use claims::longest_wait;
pub use messages::{
    Activity, Ask, Command, Droppable, Event, Kept, MoveError, Order, Part, Reply, Terms,
};
use model::{Age, Leaving, Round};
pub use model::{Mutation, ProcessId};
use request::{AskKey, Pending};
pub use request::{MAX_ASKS, MAX_PARTS, MEET};

/// How long a process may take to close its gate, besides a second for each GiB of host memory that it may have to make.
pub const QUIET: Micros = Micros::from_secs(20);
const QUIET_PER_GIB: Micros = Micros::from_secs(1);
/// How long the first gate of a tenant may be closed while another of its processes does not get quiet, and how long all go on then.
/// Both double each time.
pub const CLOSED: Micros = Micros::from_millis(500);
const OPEN: Micros = Micros::from_millis(50);
/// How long the gates stay closed besides where work must end that was submitted before, and how often it is asked for: an open gate lets more in.
const DRAIN: Micros = Micros::from_secs(5);
const DRAINS: Micros = Micros::from_millis(10);
/// How long freezing may take.
pub const FREEZE: Micros = Micros::from_secs(5);
/// How long moving one process's memory may take before its tenant counts as stuck: 140 GiB at 1 GiB/s, and as much again.
pub const MOVE: Micros = Micros::from_secs(300);
/// A victim that has not closed its gate after this long is not counted on: others are asked, too.
pub const HEDGE: Micros = Micros::from_secs(1);
/// How long a request for memory waits until others free some, and until others were moved away.
pub const PATIENCE: Micros = Micros::from_secs(60);
/// See [`PATIENCE`].
pub const PATIENCE_FOR_TURNS: Micros = Micros::from_secs(300);
/// How long processes get to give back leases that they do not use before a request is refused, before others are moved for
/// it, and how often they are asked to.
pub const TRIM: Micros = Micros::from_secs(1);
const TRIM_HEDGE: Micros = Micros::from_millis(30);
const TRIM_PAUSE: Micros = Micros::from_secs(1);
/// How often room is looked for while a claim waits.
pub const LOOK: Micros = Micros::from_millis(100);
/// How long a claim counts as one that the host had no room for: while that is so, it is found again at every look or two.
const HOST_FULL: Micros = Micros::from_secs(1);
/// With more tenants and requests than this, everything is looked at only after [`LOOK_EACH`] for each of them: one takes about
/// a tenth of that.
const FEW: u64 = 64;
const LOOK_EACH: Micros = Micros(10);
/// How long a program may take to give caches back, and how long it is not asked again for the same claim, or for any if it gave nothing.
const RECLAIM: Micros = Micros::from_secs(1);
const RECLAIM_PAUSE: Micros = Micros::from_secs(5);
/// How long a request to sleep waits for others to let go of host memory.
const DROP: Micros = Micros::from_secs(5);
/// How long freeing memory that needs no copy may take before its tenant counts as stuck.
const TAKE: Micros = HEDGE;
/// For so long a request that was withdrawn keeps its age for the next: programs wait in slices.
const AGAIN: Micros = Micros::from_secs(1);

/// After how long a tenant's own free and cached memory is taken for its request: a program that is refused at once may use it itself, and knows
/// best which. And how long the gates may take to close for that.
const OWN: (Micros, Micros) = (Micros::from_millis(30), Micros::from_secs(5));
/// Shortest and longest time for which a victim that failed is left alone.
pub const BACKOFF: (Micros, Micros) = (Micros::from_secs(1), Micros::from_secs(60));
/// How long a tenant must have been idle at least to count as idle.
pub const IDLE: Micros = Micros::from_millis(200);
/// Host memory comes in multiples of this, where the limit allows it.
pub const HOST_PIECE: u64 = 32 << 20;
/// Speed of a move that is assumed before one was measured, in bytes per µs: a PCIe 5 link's 50 GB/s, as measured on H100 and H200.
pub const SPEED: u64 = 50_000;

/// Where a tenant's memory is.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Place {
    /// On the device.
    Home,
    /// On its way to the host.
    Leaving(Leaving),
    /// A part of it, or all, is on the host, and the tenant is frozen.
    Away {
        /// A user asked for it: outstanding work alone does not bring it back.
        asked: bool,
    },
    /// On its way back.
    Returning(Round),
}

/// What people are shown of a tenant's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Standing {
    /// A part of it is on the host or on its way.
    pub swapped_out: bool,
    /// It waits for room.
    pub waits: bool,
    /// A process of it does not answer in the middle of a move.
    pub stuck: bool,
    /// It waits, and lately the host had no room for what others would have had to move for it.
    pub host_full: Option<HostFull>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Tenant {
    terms: Terms,
    activity: Activity,
    place: Place,
    /// A thread of it is blocked because its memory is away.
    blocked: bool,
    /// It had outstanding work when it was moved.
    left_busy: bool,
    /// It goes to another device: it is moved once its work has ended, and does not come back.
    detained: bool,
    /// Since when it wants to come back.
    wants_since: Option<Micros>,
    /// Since when its memory is on the device, and how long it took to come.
    home_since: Micros,
    took: Micros,
    /// Since when it has a process.
    joined: Micros,
    /// Since when it lacked what a process waited for that withdrew its request or whose connection was lost, and until when a new claim is as old.
    lost: Option<(Micros, Micros)>,
    /// Host memory that its processes may have from before their sessions: what they say of it counts up to this.
    moved_before: u64,
    /// It came back past claims that are older than its own was, of this age and since then: against these it has no turn.
    passed: Option<(Age, Micros)>,
    /// It was moved before its turn was over, although it did not rest, or waited for memory, and is not back yet.
    gave_way: bool,
    /// When others could last not be moved for it, since the host had no room for that.
    host_full: Option<(Micros, HostFull)>,
    /// By device: the most that it had and asked for since the last tenant was moved for room.
    most: BTreeMap<String, u64>,
    /// Moves of it to the host that failed in a row, and when the next may be tried.
    failures: u32,
    not_before: Micros,
    /// The same for its way back, when the driver had less room than is accounted for.
    back_failures: u32,
    back_not_before: Micros,
    /// It freed less without a copy than it had reported: it is not asked to again before this.
    take_not_before: Micros,
    sleeps: Vec<(u64, Micros)>,
    wakes: Vec<(u64, Micros)>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Process {
    tenant: TenantId,
    /// Host memory that it reports to keep, in bytes.
    kept: u64,
    /// Its program gives caches back, and when it was last asked to.
    reclaims: bool,
    reclaimed: Option<Micros>,
    /// It gave some then.
    gave: bool,
    /// When it was last asked to let go of host memory.
    dropped: Option<Micros>,
    /// The last [`Order::Trim`] while it has not answered that, and since when it has not answered.
    trim: Option<(u64, Micros)>,
}

/// Caches that are being given back on a device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Reclaim {
    op: u64,
    waiting: BTreeSet<ProcessId>,
    /// No more is asked for in this round after this.
    until: Micros,
}

/// The memory broker.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Broker {
    accounting: Accounting,
    host: HostPool,
    tenants: BTreeMap<TenantId, Tenant>,
    processes: BTreeMap<ProcessId, Process>,
    asks: BTreeMap<AskKey, Pending>,
    /// Requests so far.
    asked: u64,
    ops: u64,
    trimmed: Option<Micros>,
    reclaims: BTreeMap<String, Reclaim>,
    /// Bytes per µs that moves achieved lately.
    speed: u64,
    /// When everything was last looked at.
    looked: Micros,
    /// Something happened that was not looked at yet.
    unsettled: bool,
    mutation: Option<Mutation>,
}

impl Tenant {
    fn new(now: Micros, terms: Terms) -> Self {
        Self {
            terms,
            activity: Activity::default(),
            place: Place::Home,
            blocked: false,
            left_busy: false,
            detained: false,
            wants_since: None,
            home_since: now,
            took: Micros::ZERO,
            joined: now,
            lost: None,
            moved_before: 0,
            passed: None,
            gave_way: false,
            host_full: None,
            most: BTreeMap::new(),
            failures: 0,
            not_before: Micros::ZERO,
            back_failures: 0,
            back_not_before: Micros::ZERO,
            take_not_before: Micros::ZERO,
            sleeps: Vec::new(),
            wakes: Vec::new(),
        }
    }

    /// For how long it has had its memory and no work: while it waited for memory it could not work, and before it had a process none
    /// was seen.
    fn idle_for(&self, now: Micros) -> Micros {
        let since = (self.activity.idle_since.max(self.home_since)).max(self.joined);
        match self.activity.busy {
            true => Micros::ZERO,
            false => now.saturating_sub(since),
        }
    }

    /// Whether it has had no work for so long that its memory may go: as long as that takes to come back.
    fn rests(&self, now: Micros) -> bool {
        self.idle_for(now) >= IDLE.max(self.took)
    }

    /// Since when it lacks what it claims from now on.
    fn lacks_since(&self, now: Micros) -> Micros {
        let lost = self.lost.filter(|(_, until)| now < *until);
        lost.map_or(now, |(since, _)| since)
    }

    /// A new claim is as old as one since then, for so long.
    fn keep_age(&mut self, now: Micros, since: Micros, time: Micros) {
        self.lost = Some((since.min(self.lacks_since(now)), now + time));
    }

    /// It is not to be chosen as a victim for a while.
    fn failed(&mut self, now: Micros, mutation: Option<Mutation>) {
        if mutation == Some(Mutation::NoBackoff) {
            return;
        }
        let pause = BACKOFF.0.0 << self.failures.min(16);
        self.not_before = now + Micros(pause).min(BACKOFF.1);
        self.failures = self.failures.saturating_add(1);
    }
}

impl Broker {
    /// Moved memory may take at most so many bytes of the host.
    pub fn new(host_limit: u64) -> Self {
        Self {
            accounting: Accounting::default(),
            host: HostPool::new(host_limit),
            tenants: BTreeMap::new(),
            processes: BTreeMap::new(),
            asks: BTreeMap::new(),
            asked: 0,
            ops: 0,
            trimmed: None,
            reclaims: BTreeMap::new(),
            speed: SPEED,
            looked: Micros::ZERO,
            unsettled: false,
            mutation: None,
        }
    }

    /// The same with a fault, for tests of tests.
    #[must_use]
    pub fn mutated(mut self, mutation: Mutation) -> Self {
        self.accounting.mutation = Some(mutation);
        self.mutation = Some(mutation);
        self
    }

    fn has(&self, mutation: Mutation) -> bool {
        self.mutation == Some(mutation)
    }

    /// Something happened; what is to be done now, in this order.
    pub fn handle(&mut self, now: Micros, event: Event) -> Vec<Command> {
        let mut out = Vec::new();
        self.accounting.await_no_more(now);
        self.apply(now, event, &mut out);
        self.unsettled = !self.settles(now);
        if !self.unsettled {
            self.looked = now;
            self.expire(now, &mut out);
            self.report_silent(now, &mut out);
            self.update_wants(now);
            self.start_sleeps(now, &mut out);
            self.refuse_parts(now, &mut out);
            self.serve(now, &mut out);
        }
        out
    }

    /// Whether an event at this time has everything looked at, or only what it concerns. With many tenants and requests the
    /// looks are apart, so that no tenant can take the scheduling thread by sending events: see [`LOOK_EACH`].
    pub fn settles(&self, now: Micros) -> bool {
        now >= self.looked + self.pause()
    }

    fn pause(&self) -> Micros {
        match (self.tenants.len() + self.asks.len()) as u64 {
            0..=FEW => Micros::ZERO,
            many => Micros(LOOK_EACH.0 * many).min(LOOK),
        }
    }

    /// The requests of a tenant, oldest first.
    fn apply(&mut self, now: Micros, event: Event, out: &mut Vec<Command>) {
        match event {
            Event::Tick => {}
            Event::Device {
                uuid,
                capacity,
                used,
            } => self.accounting.measure(now, &uuid, capacity, used),
            Event::DeviceGone(uuid) => self.accounting.forget_device(&uuid),
            Event::Tenant(id, terms) => {
                let refused = self.accounting.guarantee(id, terms.share);
                out.extend(
                    (refused.into_iter()).map(|(uuid, why)| Command::NotKept(id, uuid, why)),
                );
                if !self.tenants.contains_key(&id) {
                    self.accounting.expect(now, id);
                }
                let tenant = self.tenants.entry(id);
                tenant
                    .and_modify(|tenant| tenant.terms = terms)
                    .or_insert_with(|| Tenant::new(now, terms));
            }
            Event::Restored(id) => {
                if let Some(tenant) = self.tenants.get_mut(&id) {
                    tenant.moved_before = u64::MAX;
                    self.accounting.restored(now, id);
                }
            }
            Event::Confined(id, devices) => self.accounting.confine(id, devices),
            Event::TenantGone(id) => {
                let own = |it: &(&ProcessId, &Process)| it.1.tenant == id;
                let own: Vec<ProcessId> =
                    self.processes.iter().filter(own).map(|it| *it.0).collect();
                for process in own {
                    self.process_left(now, process, false, out);
                }
                self.tenants.remove(&id);
                self.accounting.forget(now, id);
            }
            Event::Activity(all) => {
                for (id, activity) in all {
                    if let Some(tenant) = self.tenants.get_mut(&id) {
                        tenant.activity = activity;
                    }
                }
            }
            Event::Joined(process, id) => {
                self.accounting.join(now, process, id);
                let new = Process {
                    tenant: id,
                    kept: 0,
                    reclaims: false,
                    reclaimed: None,
                    gave: false,
                    dropped: None,
                    trim: None,
                };
                let first = !self.processes.values().any(|it| it.tenant == id);
                self.processes.insert(process, new);
                if let Some(tenant) = self.tenants.get_mut(&id) {
                    if first {
                        tenant.joined = now;
                    }
                    // It will want to work.
                    tenant.blocked = true;
                }
            }
            Event::Left(process) => self.process_left(now, process, false, out),
            Event::Lost(process) => self.process_left(now, process, true, out),
            Event::Contexts {
                process,
                device,
                count,
                before,
            } => self.accounting.contexts(process, &device, count, before),
            Event::Ask {
                process,
                ticket,
                ask,
            } => self.asked(now, process, ticket, ask, out),
            Event::Missing { process, ticket } => {
                let tenant = self.accounting.tenant_of(process);
                let policy = tenant.and_then(|id| Some(self.tenants.get(&id)?.terms.policy));
                let leaving = tenant.is_some_and(|id| self.accounting.is_leaving(now, id));
                let again = match policy {
                    None | Some(MemoryPolicy::Fail) => 0,
                    Some(_) if leaving => 2,
                    Some(_) => 1,
                };
                out.push(Command::Grant {
                    process,
                    ticket,
                    bytes: again,
                });
            }
            Event::Holds {
                process,
                device,
                total,
                holding,
            } => self.holds(process, &device, total, holding, out),
            Event::Confirms(process) => self.accounting.confirms(process),
            Event::Received(process, ticket) => self.accounting.received(process, ticket),
            Event::Keeps(process, bytes) => self.keeps(now, process, bytes, out),
            Event::Reclaims(process) => {
                if let Some(process) = self.processes.get_mut(&process) {
                    process.reclaims = true;
                }
            }
            Event::Droppable {
                process,
                device,
                droppable,
            } => self.accounting.droppable(process, &device, droppable),
            Event::Kept {
                process,
                device,
                kept,
            } => self.accounting.kept(process, &device, kept),
            Event::View {
                tenant,
                device,
                total,
            } => {
                let policy = self.tenants.get(&tenant).map(|it| it.terms.policy);
                let (free, total) = policy.map_or((0, 0), |policy| {
                    (self.accounting).view(now, tenant, &device, total, policy)
                });
                out.push(Command::Shown {
                    tenant,
                    device,
                    free,
                    total,
                });
            }
            Event::WasShown(id, device, bytes) => self.accounting.was_shown(id, &device, bytes),
            Event::Cancel(process, ticket) => {
                let own = |of: ProcessId, name: u32| (of, name) == (process, ticket);
                let meant = |it: &Pending| {
                    let mut parts = it.parts.iter().zip(&it.tickets);
                    parts.any(|((of, _), name)| own(*of, *name))
                };
                let gone = self.asks.extract_if(.., |_, pending| meant(pending));
                for ((id, _), pending) in gone {
                    if let Some(tenant) = self.tenants.get_mut(&id)
                        && !pending.lacks_parts()
                    {
                        tenant.keep_age(now, pending.since, AGAIN);
                    }
                    pending.answer(&[], own, out);
                }
            }
            Event::Waits(process) => {
                let tenant = self.accounting.tenant_of(process);
                if let Some(tenant) = tenant.and_then(|id| self.tenants.get_mut(&id)) {
                    tenant.blocked = true;
                }
            }
            Event::Reply(process, op, reply) => self.replied(now, process, op, reply, out),
            Event::Frozen(tenant, result) => self.frozen(now, tenant, result, out),
            Event::Sleep(id, request) => match self.tenants.get_mut(&id) {
                Some(tenant) => tenant.sleeps.push((request, now)),
                None => out.push(Command::Answer(request, Err(no_process()))),
            },
            Event::Detain(id, request) => self.detain(now, id, request, out),
            Event::Release(id) => {
                if let Some(tenant) = self.tenants.get_mut(&id) {
                    tenant.detained = false;
                }
            }
            Event::Arrives(id, device, bytes) => self.accounting.arrives(id, &device, bytes),
            Event::Wake(id, request) => match self.tenants.get_mut(&id) {
                Some(tenant) if tenant.place != Place::Home => {
                    tenant.wakes.push((request, now));
                    self.call_off(now, id, out);
                }
                _ => out.push(Command::Answer(request, Ok(()))),
            },
        }
    }

    /// A process has ended, or its connection has and it lives.
    fn process_left(&mut self, now: Micros, id: ProcessId, lives: bool, out: &mut Vec<Command>) {
        let whose = self.accounting.leave(now, id, lives);
        let Some(process) = self.processes.remove(&id) else {
            // Its connection was lost before.
            if let Some(tenant) = whose.and_then(|it| self.tenants.get_mut(&it)) {
                tenant.lost = None;
            }
            return;
        };
        let kept = self.host.kept_by(id.0);
        self.host.set(id.0, 0);
        let asked = self.asks.extract_if(.., |_, pending| pending.is_of(id));
        let asked: Vec<Pending> = asked.map(|(_, pending)| pending).collect();
        (asked.iter()).for_each(|it| it.answer(&[], |of, _| of == id, out));
        let asked = asked.iter().map(|it| it.since).min();
        for reclaim in self.reclaims.values_mut() {
            reclaim.waiting.remove(&id);
        }
        let last = !self
            .processes
            .values()
            .any(|it| it.tenant == process.tenant);
        let Some(tenant) = self.tenants.get_mut(&process.tenant) else {
            return;
        };
        if lives {
            tenant.moved_before = tenant.moved_before.saturating_add(kept);
        }
        let keeps = lives && self.mutation != Some(Mutation::SessionBeginsAnew);
        let since = asked.into_iter().chain(tenant.wants_since.filter(|_| last));
        if let Some(since) = since.min().filter(|_| keeps) {
            tenant.keep_age(now, since, RETURN.1);
        }
        if last {
            // Nothing of it is left to be moved or to be frozen.
            let was = std::mem::replace(&mut tenant.place, Place::Home);
            tenant.blocked = false;
            tenant.left_busy = false;
            tenant.detained = false;
            let stays = matches!(was, Place::Home | Place::Leaving(_));
            if !(keeps && stays) {
                tenant.home_since = now;
            }
            for (request, _) in tenant.sleeps.drain(..).chain(tenant.wakes.drain(..)) {
                out.push(Command::Answer(request, Err(no_process())));
            }
            self.accounting.returned(process.tenant);
            if was != Place::Home {
                out.push(Command::Thaw(process.tenant));
            }
            return;
        }
        match &mut tenant.place {
            Place::Leaving(leaving) => {
                if leaving.forget(id) {
                    // The others have joined since. A user's request is carried out with them.
                    return self.undo(process.tenant, out);
                }
            }
            Place::Returning(round) => drop(round.waiting.remove(&id)),
            Place::Home | Place::Away { .. } => return,
        }
        self.advance(now, process.tenant, out);
    }

    /// Orders processes, of one tenant or all, to give back leases that are not used.
    fn trim(&mut self, now: Micros, of: Option<TenantId>, out: &mut Vec<Command>) {
        if of.is_none() {
            self.trimmed = Some(now);
        }
        self.ops += 1;
        let processes = self.processes.iter_mut();
        for (id, process) in processes.filter(|(_, it)| of.is_none_or(|of| it.tenant == of)) {
            let since = process.trim.map_or(now, |(_, since)| since);
            process.trim = Some((self.ops, since));
            out.push(Command::Order(*id, self.ops, Order::Trim));
        }
    }

    /// Whether processes, or those of one tenant, were asked for leases of a device less than `time` ago and have not answered.
    fn is_trimming(&self, now: Micros, uuid: &str, of: Option<TenantId>, time: Micros) -> bool {
        let owes = |it: &Process| it.trim.is_some_and(|(_, since)| now < since + time);
        (self.processes.iter())
            .filter(|(_, it)| of.is_none_or(|of| it.tenant == of) && owes(it))
            .any(|(id, _)| self.accounting.devices_of(*id).any(|it| it == uuid))
    }

    fn holds(
        &mut self,
        process: ProcessId,
        device: &str,
        total: u64,
        holding: Holding,
        out: &mut Vec<Command>,
    ) {
        self.accounting.holds(process, device, total, holding);
        // One that doesn't say what it answers.
        if !self.accounting.confirms_grants(process)
            && let Some(it) = self.processes.get_mut(&process)
        {
            it.trim = None;
        }
        let tenant = self.accounting.tenant_of(process);
        let Some((id, tenant)) = tenant.and_then(|id| Some((id, self.tenants.get(&id)?))) else {
            return;
        };
        // A daemon before this one had it moved, and it could not come back by itself.
        match &tenant.place {
            Place::Home if holding.swapped > 0 => self.stays_away(id, out),
            Place::Leaving(leaving) if holding.swapped > 0 && leaving.has_moved_nothing() => {
                self.undo(id, out);
            }
            _ => {
                self.extend_move(process, ("", 0), out);
            }
        }
    }

    fn keeps(&mut self, now: Micros, id: ProcessId, bytes: u64, out: &mut Vec<Command>) {
        let allowed = self.may_keep(id);
        let Some(process) = self.processes.get_mut(&id) else {
            return;
        };
        process.kept = bytes;
        let before = self.host.kept_by(id.0);
        let moved = self
            .accounting
            .on_host(id)
            .min(bytes)
            .saturating_sub(before);
        let tenant = self.tenants.get_mut(&process.tenant);
        let moved = tenant.map_or(0, |it| {
            let moved = moved.min(it.moved_before);
            it.moved_before -= moved;
            moved
        });
        let counts = self.host.hear(id.0, bytes, before.saturating_add(moved));
        // By the order that is under way, which it may not have received yet, it may make more.
        if let Some(host) = allowed {
            self.host.set(id.0, self.host.kept_by(id.0).max(host));
        }
        // Made for an earlier daemon, or too late for a move that was given up: it is made anew when it is needed. Letting go
        // takes a while, and what is made meanwhile is allowed.
        let lately = process.dropped.is_some_and(|at| now < at + DROP);
        if !counts && !lately {
            process.dropped = Some(now);
            out.push(Command::Order(id, 0, Order::DropHost));
        }
    }

    /// Whether a tenant wants its memory on the device.
    fn wants(&self, id: TenantId, tenant: &Tenant) -> bool {
        let Place::Away { asked } = tenant.place else {
            return false;
        };
        if tenant.detained {
            return false;
        }
        let has_work =
            (tenant.activity.busy || tenant.left_busy) && !self.has(Mutation::DemandByMessage);
        let would_work = tenant.blocked || (!asked && has_work);
        let wants = self.has_asked(id) || would_work;
        !tenant.wakes.is_empty() || (wants && !tenant.activity.stopped)
    }

    fn update_wants(&mut self, now: Micros) {
        let wants: Vec<(TenantId, bool)> = (self.tenants.iter())
            .map(|(id, tenant)| (*id, self.wants(*id, tenant)))
            .collect();
        for (id, wants) in wants {
            if let Some(tenant) = self.tenants.get_mut(&id) {
                match &tenant.place {
                    Place::Home | Place::Away { .. } => {
                        let since = tenant.lacks_since(now);
                        tenant.wants_since = wants.then(|| tenant.wants_since.unwrap_or(since));
                    }
                    // Moving more of it, or back in vain, makes its claim no younger.
                    Place::Leaving(_) | Place::Returning(_) => {}
                }
            }
        }
    }

    /// When to call [`Self::handle`] with [`Event::Tick`] at the latest; none: when something happens.
    pub fn next_wakeup(&self) -> Option<Micros> {
        let now = self.looked;
        let mut next: Option<Micros> = None;
        let mut at = |time: Micros| next = Some(next.map_or(time, |it| it.min(time)));
        for tenant in self.tenants.values() {
            match &tenant.place {
                Place::Leaving(leaving) => {
                    let hedge = leaving.round.began + HEDGE;
                    at(match leaving.round.late {
                        true => now + LOOK,
                        false if now < hedge => leaving.round.deadline.min(hedge),
                        false => leaving.round.deadline,
                    });
                    leaving.report.into_iter().for_each(&mut at);
                    leaving.gates_due().into_iter().for_each(&mut at);
                    leaving.drains_due().into_iter().for_each(&mut at);
                }
                Place::Returning(round) if !round.late => at(round.deadline),
                // Its page is looked at.
                Place::Away { .. } => at(now + LOOK),
                Place::Home if !tenant.sleeps.is_empty() => at(now + LOOK),
                Place::Home if tenant.terms.sleep_after.is_some() => at(now + LOOK),
                Place::Home | Place::Returning(_) => {}
            }
        }
        if !self.asks.is_empty() {
            at(now + LOOK);
        }
        let young = (self.asks.iter()).filter(|(_, it)| now < it.since + OWN.0);
        for ((tenant, _), pending) in young {
            let mut devices = pending.parts.iter().map(|(_, ask)| &ask.device);
            if devices.any(|uuid| self.accounting.droppable_of(*tenant, uuid).all() > 0) {
                at(pending.since + OWN.0);
            }
        }
        match self.unsettled {
            true => Some(self.looked + self.pause()),
            false => next,
        }
    }

    /// Bytes of a device that tenants can be guaranteed together now, one that asks among them, and what each of them is guaranteed or
    /// has pinned; none of a device that is not known.
    pub fn booked(&self, device: &str, asking: TenantId) -> Option<(u64, BTreeMap<TenantId, u64>)> {
        self.accounting.booked(device, asking)
    }

    /// The devices that are known.
    pub fn uuids(&self) -> impl Iterator<Item = &String> {
        self.accounting.uuids()
    }

    /// Whether memory of this process counts as taken although its connection was lost.
    pub fn awaits(&self, process: ProcessId) -> bool {
        self.accounting.awaits(process)
    }

    /// Every device's accounts.
    pub fn lines(&self) -> Vec<Line> {
        self.accounting.lines()
    }

    /// Bytes of a device that tenants can be guaranteed together, their contexts included. It does not change as they come and go.
    pub fn guaranteeable(&self, device: &str) -> u64 {
        self.accounting.guaranteeable(device)
    }

    /// Bytes that one context occupies on a device.
    pub fn context(&self, device: &str) -> u64 {
        self.accounting.context(device)
    }

    /// Bytes of host memory that moved memory takes, and may take.
    pub fn on_host(&self) -> (u64, u64) {
        (self.host.kept(), self.host.limit())
    }

    /// Every tenant's standing.
    pub fn standings(&self) -> impl Iterator<Item = (TenantId, Standing)> {
        self.tenants.iter().map(|(id, tenant)| {
            let late = |round: &Round| round.late;
            let waits = tenant.wants_since.is_some()
                || matches!(tenant.place, Place::Returning(_))
                || self.has_asked(*id);
            let standing = Standing {
                swapped_out: match &tenant.place {
                    Place::Home => false,
                    Place::Leaving(leaving) => !leaving.drops(),
                    Place::Away { .. } | Place::Returning(_) => true,
                },
                waits,
                host_full: (tenant.host_full)
                    .filter(|(at, _)| waits && self.looked < *at + HOST_FULL)
                    .map(|(_, full)| full),
                stuck: match &tenant.place {
                    Place::Leaving(leaving) => late(&leaving.round),
                    Place::Returning(round) => late(round),
                    Place::Home | Place::Away { .. } => false,
                },
            };
            (*id, standing)
        })
    }
}

fn no_process() -> MoveError {
    MoveError::Busy("it has no connected process".into())
}
