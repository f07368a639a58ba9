//! Claims: what tenants lack, and in which order they are served.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    Broker, Command, LOOK, MemoryPolicy, Micros, PATIENCE, PATIENCE_FOR_TURNS, Place, TRIM,
    TRIM_HEDGE, TRIM_PAUSE, Tenant, TenantId,
    messages::Ask,
    model::{Age, Mutation, ProcessId, Round, Step, Why},
    request::{AskKey, MAX_ASKS, MAX_PARTS, MEET, Pending},
    turn,
};
use crate::{
    Class,
    ledger::{Denied, Kind},
};

/// A tenant of a lower class takes the memory of one of a higher only after so many turns: between them memory is divided
/// about ten to one where it does not suffice for both.
pub(super) const CLASS_TURNS: u64 = 10;

/// The oldest requests of a tenant that are looked at.
const ASKS_LOOKED_AT: usize = 16;

/// What a tenant lacks.
pub(super) struct Claim {
    pub(super) tenant: TenantId,
    /// A request for more; none: the tenant's return.
    pub(super) ask: Option<AskKey>,
    /// Bytes by device.
    pub(super) needs: BTreeMap<String, u64>,
    pub(super) since: Micros,
    pub(super) class: Class,
    /// With it, the tenant stays within its guarantee.
    pub(super) entitled: bool,
    /// Others are moved for it.
    pub(super) takes: bool,
    /// Its tenant frees what it lacks.
    pub(super) own: bool,
}

impl Claim {
    /// Claims are served in this order: what a tenant frees of its own is for itself; then those within a guarantee, then by age, where a lower
    /// class counts as younger, so that every claim becomes the oldest at last.
    fn rank(&self) -> (bool, Age, TenantId, Option<AskKey>) {
        (!self.own, self.age(), self.tenant, self.ask)
    }

    pub(super) fn age(&self) -> Age {
        (!self.entitled, self.since + patience(self.class))
    }
}

/// By how much a claim of a class counts as younger than it is.
fn patience(class: Class) -> Micros {
    match class {
        Class::Latency => Micros::ZERO,
        Class::Standard => Micros::from_secs(10),
        Class::Batch => Micros::from_secs(30),
    }
}

/// How long a tenant of a class waits for its memory at most, while processes answer: others have these classes, and their memory takes
/// so long to move.
pub fn longest_wait(class: Class, others: impl IntoIterator<Item = (Class, Micros)>) -> Micros {
    (others.into_iter()).fold(patience(class), |sum, (other, took)| {
        let turns = if other < class { CLASS_TURNS } else { 1 };
        sum + Micros(turn(took).0.saturating_mul(turns)) + took + took
    })
}

/// What is set aside for older claims, and what comes free for them, by device.
#[derive(Default)]
pub(super) struct Aside {
    pub(super) room: BTreeMap<String, u64>,
    pub(super) coming: BTreeMap<String, u64>,
    /// Victims that were not moved, since the host is full.
    pub(super) unmoved: BTreeSet<TenantId>,
}

impl Broker {
    pub(super) fn asks_of(&self, tenant: TenantId) -> impl Iterator<Item = (&AskKey, &Pending)> {
        self.asks.range((tenant, 0)..=(tenant, u64::MAX))
    }

    pub(super) fn has_asked(&self, tenant: TenantId) -> bool {
        self.asks_of(tenant).next().is_some()
    }

    pub(super) fn asked(
        &mut self,
        now: Micros,
        process: ProcessId,
        ticket: u32,
        mut ask: Ask,
        out: &mut Vec<Command>,
    ) {
        if self.has(Mutation::PartByPart) {
            ask.part = None;
        }
        let tenant = self.accounting.tenant_of(process);
        let whole = ask.part.map_or(1, |it| it.parts);
        let room = |id: &TenantId| {
            let asks = || self.asks_of(*id).flat_map(|(_, it)| &it.parts);
            self.tenants.contains_key(id)
                && (1..=MAX_PARTS).contains(&whole)
                && asks().count() < MAX_ASKS.1
                && asks().filter(|it| it.0 == process).count() < MAX_ASKS.0
        };
        let Some(tenant) = tenant.filter(room) else {
            let bytes = 0;
            return out.push(Command::Grant {
                process,
                ticket,
                bytes,
            });
        };
        self.accounting.meet_device(&ask);
        let since = (self.tenants.get(&tenant)).map_or(now, |it| it.lacks_since(now));
        let mut own = (self.asks.range_mut((tenant, 0)..=(tenant, u64::MAX))).map(|it| it.1);
        let meets = |it: &&mut Pending| it.parts[0].1.part == ask.part && it.lacks_parts();
        if ask.part.is_some()
            && let Some(pending) = own.find(meets)
        {
            pending.parts.push((process, ask));
            pending.tickets.push(ticket);
            if !pending.lacks_parts() {
                pending.since = since;
            }
            return;
        }
        self.asked += 1;
        let mut pending = Pending {
            parts: vec![(process, ask)],
            tickets: vec![ticket],
            since,
            trimmed: false,
            own: false,
        };
        if pending.lacks_parts() {
            // The others have this long, also after a connection was lost.
            pending.since = now;
        }
        self.asks.insert((tenant, self.asked), pending);
    }

    /// Refuses requests whose other parts do not come.
    pub(super) fn refuse_parts(&mut self, now: Micros, out: &mut Vec<Command>) {
        let late = |it: &Pending| it.lacks_parts() && now >= it.since + MEET;
        let late = self.asks.extract_if(.., |_, pending| late(pending));
        late.for_each(|(_, it)| it.answer(&[], |_, _| false, out));
    }

    /// All claims, in the order in which they are served.
    fn claims(&self) -> Vec<Claim> {
        let mut claims = Vec::new();
        for (id, tenant) in &self.tenants {
            if let Some(since) = tenant.wants_since
                && matches!(tenant.place, Place::Away { .. })
            {
                let needs = self.accounting.swapped(*id);
                let fits = |(uuid, _): (&String, &u64)| {
                    let entry = self.accounting.entry(*id, uuid);
                    entry.holding.all() <= entry.share.guaranteed
                };
                claims.push(Claim {
                    tenant: *id,
                    ask: None,
                    entitled: needs.iter().all(fits),
                    needs,
                    since,
                    class: tenant.terms.class,
                    takes: true,
                    own: false,
                });
            }
        }
        for (id, tenant) in &self.tenants {
            // A process that makes host memory still runs: it gets what is free.
            let leaving = match &tenant.place {
                Place::Home => None,
                Place::Leaving(leaving) if leaving.why == Why::Own => None,
                Place::Leaving(leaving) if leaving.step == Step::Quiesce => Some(&leaving.round),
                _ => continue,
            };
            let whole = self.asks_of(*id).filter(|(_, it)| !it.lacks_parts());
            for (key, pending) in whole.take(ASKS_LOOKED_AT) {
                let answers = |it: &Round| {
                    let mut asks = pending.parts.iter();
                    asks.all(|(process, _)| it.waiting.contains(process))
                };
                if leaving.is_some_and(|it| !answers(it)) {
                    continue;
                }
                let needs = pending.needs();
                let fits = |(uuid, need): (&String, &u64)| {
                    let entry = self.accounting.entry(*id, uuid);
                    entry.holding.all().saturating_add(*need) <= entry.share.guaranteed
                };
                claims.push(Claim {
                    tenant: *id,
                    ask: Some(*key),
                    entitled: needs.iter().all(fits),
                    needs,
                    since: pending.since,
                    class: tenant.terms.class,
                    takes: leaving.is_none() && tenant.terms.policy == MemoryPolicy::SwapOthers,
                    own: pending.own,
                });
            }
        }
        claims.sort_by_key(Claim::rank);
        claims
    }

    /// Whether a claim of others lacks room on one of these devices.
    pub(super) fn is_needed<'a>(
        &self,
        id: TenantId,
        devices: impl Iterator<Item = &'a String>,
    ) -> bool {
        self.is_needed_for(&self.claims(), id, devices)
    }

    /// The same for claims within a guarantee.
    pub(super) fn is_guaranteed_to_others<'a>(
        &self,
        id: TenantId,
        devices: impl Iterator<Item = &'a String>,
    ) -> bool {
        let mut claims = self.claims();
        claims.retain(|it| it.entitled);
        self.is_needed_for(&claims, id, devices)
    }

    fn is_needed_for<'a>(
        &self,
        claims: &[Claim],
        id: TenantId,
        mut devices: impl Iterator<Item = &'a String>,
    ) -> bool {
        let nothing = Aside::default();
        devices.any(|uuid| {
            let lacks = |claim: &Claim| {
                claim.tenant != id
                    && (self.lacks(claim, &nothing).contains_key(uuid) || self.lacked(claim.tenant))
            };
            claims.iter().any(lacks)
        })
    }

    /// Whether the driver lately had less room for a tenant than is accounted for.
    fn lacked(&self, id: TenantId) -> bool {
        self.tenants.get(&id).is_some_and(|it| it.back_failures > 0)
    }

    /// Serves claims as far as there is room, and has others moved for those that lack some.
    pub(super) fn serve(&mut self, now: Micros, out: &mut Vec<Command>) {
        self.note_most();
        let claims = self.claims();
        let mut aside = Aside {
            coming: self.coming(now),
            ..Aside::default()
        };
        let mut unserved: Vec<Claim> = Vec::new();
        // Tenants for which room is being made.
        let mut first = BTreeSet::new();
        for claim in claims {
            let passes = unserved.iter().any(|older| {
                older
                    .needs
                    .keys()
                    .any(|uuid| claim.needs.contains_key(uuid))
            });
            let lacks = self.lacks(&claim, &aside);
            if self.frees_own(claim.tenant) {
                // What others give besides is for it, too: it is the oldest of its tenant.
                if claim.own || unserved.iter().all(|it| it.tenant != claim.tenant) {
                    await_own(&claim, &lacks, &mut aside);
                }
                unserved.push(claim);
                continue;
            }
            let done = match claim.ask {
                Some(key) => self.serve_ask(now, &claim, key, (lacks.is_empty(), passes), out),
                None => lacks.is_empty() && self.serve_return(now, &claim, passes, out),
            };
            if done {
                continue;
            }
            if claim.own {
                // What its tenant freed does not do: it is a claim as any other.
                self.end_own(claim.tenant);
            }
            // An older claim that cannot be served now keeps nothing from this one.
            if self.collect(now, &claim, &lacks, &first, &mut aside, out) {
                first.insert(claim.tenant);
            }
            unserved.push(claim);
        }
        // Younger claims have been looked at, which may need less of them; at the next look other victims may need less of the host.
        for id in aside.unmoved {
            if let Some(victim) = self.tenants.get_mut(&id) {
                victim.not_before = victim.not_before.max(now + LOOK);
            }
        }
    }

    /// Whether a tenant frees memory for requests of its own.
    fn frees_own(&self, id: TenantId) -> bool {
        let place = self.tenants.get(&id).map(|it| &it.place);
        matches!(place, Some(Place::Leaving(it)) if it.why == Why::Own)
    }

    /// Whether a request of a tenant lacks room on one of these devices, or is too large while it has so much.
    pub(super) fn needs_own<'a>(
        &self,
        id: TenantId,
        mut devices: impl Iterator<Item = &'a String>,
    ) -> bool {
        let (nothing, claims) = (Aside::default(), self.claims());
        let own = || claims.iter().filter(|it| it.tenant == id);
        devices.any(|uuid| {
            own().any(|it| {
                self.lacks(it, &nothing).contains_key(uuid) || self.excess(it).contains_key(uuid)
            })
        })
    }

    /// By device, how much less a tenant must have before its request could be granted.
    pub(super) fn excess(&self, claim: &Claim) -> BTreeMap<String, u64> {
        let pending = claim.ask.and_then(|key| self.asks.get(&key));
        pending.map_or_else(BTreeMap::new, |it| self.accounting.excess(&it.parts))
    }

    /// Why a request could never be granted, also with what its tenant can free of its own; none if it could.
    fn could_ask(&self, now: Micros, claim: &Claim, pending: &Pending) -> Option<Denied> {
        let can = self.tenants.get(&claim.tenant);
        let can = can.is_some_and(|it| now >= it.not_before);
        let frees = |(uuid, excess): (&String, &u64)| {
            can && *excess <= self.accounting.droppable_of(claim.tenant, uuid).all()
        };
        let denied = self.accounting.could_ask(&pending.parts);
        denied.filter(|_| !self.excess(claim).iter().all(frees))
    }

    /// What of a claim's needs is neither free nor set aside for others.
    pub(super) fn lacks(&self, claim: &Claim, aside: &Aside) -> BTreeMap<String, u64> {
        let lack = |(uuid, need): (&String, &u64)| {
            let free = self
                .accounting
                .ledger(uuid)
                .map_or(0, crate::ledger::Ledger::free);
            let kept = aside.room.get(uuid).copied().unwrap_or(0);
            let lack = need.saturating_sub(free.saturating_sub(kept));
            (lack > 0).then(|| (uuid.clone(), lack))
        };
        claim.needs.iter().filter_map(lack).collect()
    }

    /// Brings a tenant back for whom there is room. Whether it is on its way.
    fn serve_return(
        &mut self,
        now: Micros,
        claim: &Claim,
        passes: bool,
        out: &mut Vec<Command>,
    ) -> bool {
        let crowded = self.is_crowded(now, claim);
        let Some(tenant) = self.tenants.get_mut(&claim.tenant) else {
            return true;
        };
        // It may have just been chosen to give more to an older claim.
        let is_away = matches!(tenant.place, Place::Away { .. });
        if now < tenant.back_not_before || crowded || !is_away {
            return false;
        }
        tenant.passed = passes.then(|| (claim.age(), claim.since));
        self.begin_return(now, claim.tenant, out);
        true
    }

    /// Whether a tenant that gave way waits although there is room: beside it, others could not have again what they had since. One of them
    /// would be moved, or it, each time one allocates. After a turn it waits no longer.
    fn is_crowded(&self, now: Micros, claim: &Claim) -> bool {
        let Some(tenant) = self.tenants.get(&claim.tenant) else {
            return false;
        };
        let bytes = claim.needs.values().sum::<u64>();
        let own_turn = turn(tenant.took.max(Micros(bytes / self.speed.max(1))));
        let waits = tenant.gave_way && !claim.entitled && tenant.wakes.is_empty();
        let others = (self.tenants.iter()).filter(|(id, it)| {
            let counts = it.terms.class >= claim.class && it.idle_for(now) < own_turn;
            **id != claim.tenant && it.place == Place::Home && counts
        });
        let grows = |uuid: &str| {
            let more = |(id, it): (&TenantId, &Tenant)| {
                let most = it.most.get(uuid).copied().unwrap_or(0);
                most.saturating_sub(self.accounting.entry(*id, uuid).holding.all())
            };
            others.clone().map(more).fold(0, u64::saturating_add)
        };
        let fits = |(uuid, need): (&String, &u64)| {
            let free = (self.accounting.ledger(uuid)).map_or(0, crate::ledger::Ledger::free);
            need.saturating_add(grows(uuid)) <= free
        };
        waits
            && now < claim.since + own_turn
            && !self.has(Mutation::ReturnAtOnce)
            && !claim.needs.iter().all(fits)
    }

    /// Notes what tenants have and ask for while another has given way.
    fn note_most(&mut self) {
        let away = self.tenants.values().any(|it| it.gave_way);
        for (id, tenant) in &mut self.tenants {
            if !away {
                tenant.most.clear();
            } else if tenant.place == Place::Home {
                for uuid in self.accounting.uuids() {
                    let asks = self.asks.range((*id, 0)..=(*id, u64::MAX));
                    let asked =
                        asks.fold(0, |sum: u64, (_, it)| sum.saturating_add(it.needs_of(uuid)));
                    let all = self.accounting.entry(*id, uuid).holding.all();
                    let most = tenant.most.entry(uuid.clone()).or_default();
                    *most = all.saturating_add(asked).max(*most);
                }
            }
        }
    }

    /// Grants a request, or refuses it for good. Whether it was answered.
    fn serve_ask(
        &mut self,
        now: Micros,
        claim: &Claim,
        key: AskKey,
        (fits, passes): (bool, bool),
        out: &mut Vec<Command>,
    ) -> bool {
        let Some(pending) = self.asks.get(&key).cloned() else {
            return true;
        };
        let policy =
            (self.tenants.get(&claim.tenant)).map_or(MemoryPolicy::Fail, |it| it.terms.policy);
        let patience = match policy {
            MemoryPolicy::SwapOthers => PATIENCE_FOR_TURNS,
            MemoryPolicy::Wait => PATIENCE,
            MemoryPolicy::Fail => Micros::ZERO,
        };
        let full = Denied::Full { missing: 0 };
        let mut may_grow = |(process, ask): &(ProcessId, Ask)| {
            let more = (ask.device.as_str(), ask.want.max(ask.need));
            ask.kind == Kind::Pinned || self.extend_move(*process, more, out)
        };
        let answer = match fits && pending.parts.iter().all(&mut may_grow) {
            true => self.accounting.ask(&pending.parts),
            false => Err(full),
        };
        let answer = answer.map_err(|error| {
            self.could_ask(now, claim, &pending).unwrap_or(match error {
                Denied::Full { .. } => error,
                _ => full,
            })
        });
        let full = matches!(answer, Err(Denied::Full { .. }));
        let given = match answer {
            Ok(given) => given,
            Err(_) => {
                // A limit may be met by what the asker itself does not use. Of all, little can have come together since the last time.
                let of = (!full).then_some(claim.tenant);
                let lately = self.trimmed.is_some_and(|at| now < at + TRIM_PAUSE);
                if !(pending.trimmed || lately && full) {
                    self.trim(now, of, out);
                }
                if let Some(pending) = self.asks.get_mut(&key) {
                    pending.trimmed = true;
                }
                let time = match self.has(Mutation::RefuseEarly) {
                    true => TRIM_HEDGE,
                    false => TRIM,
                };
                let mut devices = claim.needs.keys();
                let awaits = devices.any(|uuid| self.is_trimming(now, uuid, of, time));
                let awaits = awaits || full && self.serves_own(now, claim);
                if awaits || (full && now < pending.since + patience) {
                    return false;
                }
                Vec::new()
            }
        };
        self.asks.remove(&key);
        let granted = pending.parts.iter().zip(&pending.tickets).zip(&given);
        for ((part, ticket), bytes) in granted.filter(|(_, bytes)| **bytes > 0) {
            self.accounting.granted(part, *ticket, *bytes);
        }
        if let Some(tenant) = self.tenants.get_mut(&claim.tenant) {
            tenant.lost = None;
            if pending.since < now && given.iter().any(|it| *it > 0) && !passes {
                // It has waited for this memory, and has a turn with it; but not a longer one while an older claim waits.
                tenant.home_since = now;
            }
        }
        pending.answer(&given, |_, _| false, out);
        true
    }
}

/// What a tenant frees is kept for its request.
fn await_own(claim: &Claim, lacks: &BTreeMap<String, u64>, aside: &mut Aside) {
    for (uuid, need) in &claim.needs {
        *aside.room.entry(uuid.clone()).or_default() += need;
        if let Some(coming) = aside.coming.get_mut(uuid) {
            *coming -= lacks.get(uuid).map_or(0, |it| *it.min(coming));
        }
    }
}
