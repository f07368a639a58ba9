//! How room is made for a claim: what others give back, free without a copy, or move to the host.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    Activity, Broker, Command, Droppable, Micros, OWN, Order, Place, RECLAIM, RECLAIM_PAUSE,
    TRIM_HEDGE, TRIM_PAUSE, Tenant, TenantId,
    claims::{Aside, CLASS_TURNS, Claim},
    model::{Mutation, ProcessId, Why},
    request::Pending,
    turn,
};
use crate::{
    Class,
    ledger::{EXTRA, HostFull},
};

/// What a tenant can give.
struct Offer {
    tenant: TenantId,
    bytes: u64,
    /// The least is chosen first.
    order: (
        bool,
        bool,
        bool,
        std::cmp::Reverse<Class>,
        bool,
        Micros,
        TenantId,
    ),
}

/// How room is made for one claim.
#[derive(Default)]
struct Making {
    /// By device: bytes that come free already.
    coming: BTreeMap<String, u64>,
    /// What tenants free without a copy: of one device after the other.
    freed: BTreeMap<TenantId, (String, u64)>,
    /// By device: what programs are asked to give back, and their processes.
    reclaims: Vec<(String, u64, BTreeSet<ProcessId>)>,
    /// What tenants move to the host, by device.
    moves: BTreeMap<TenantId, BTreeMap<String, u64>>,
    /// Without what programs give back the rest does not suffice.
    depends: bool,
    /// On some device nothing suffices.
    lacks: bool,
}

impl Making {
    /// What the tenant itself frees is all that is to be waited for.
    fn serves_own(&self, tenant: TenantId) -> bool {
        self.freed.contains_key(&tenant) && self.moves.is_empty() && self.reclaims.is_empty()
    }
}

impl Broker {
    /// Has room made for a claim, if others can give what it lacks, and sets that aside for it. Whether they can.
    pub(super) fn collect(
        &mut self,
        now: Micros,
        claim: &Claim,
        lacks: &BTreeMap<String, u64>,
        first: &BTreeSet<TenantId>,
        aside: &mut Aside,
        out: &mut Vec<Command>,
    ) -> bool {
        // Others move only for those that may have that; its own every request may have.
        if !(claim.takes || claim.ask.is_some()) {
            return false;
        }
        // The driver had less room than is accounted for.
        let tenant = self.tenants.get(&claim.tenant);
        let extra = tenant.map_or(0, |it| u64::from(it.back_failures.min(8)));
        let mut making = self.making(now, claim, (lacks, extra), first, &aside.coming);
        let serves_own = making.serves_own(claim.tenant);
        let mut collecting = (extra > 0 || !lacks.is_empty() || serves_own) && !making.lacks;
        if collecting && let Err(full) = self.reserve_host(&making.moves) {
            self.host_is_full(now, claim, &making.moves, full, out);
            if !self.has(Mutation::MoveInVain) {
                // To move some of them, or to free some, would not serve the claim. What comes free already is kept for it.
                collecting = making.coming.values().any(|it| *it > 0);
                making.freed.clear();
                making.reclaims.clear();
                let unmoved = std::mem::take(&mut making.moves);
                aside.unmoved.extend(unmoved.into_keys());
            }
        }
        if making.depends {
            making.freed.clear();
            (std::mem::take(&mut making.moves).into_keys()).for_each(|it| self.free_host(it));
        }
        if self.has(Mutation::TakeComing) || collecting {
            for (uuid, comes) in &making.coming {
                *aside.coming.entry(uuid.clone()).or_default() -= comes;
            }
        }
        if collecting {
            let own = claim.ask.filter(|_| serves_own);
            if let Some(pending) = own.and_then(|key| self.asks.get_mut(&key)) {
                pending.own = true;
            }
            self.make(now, claim.tenant, making, out);
            for (uuid, need) in &claim.needs {
                if !self.has(Mutation::RoomForYounger) {
                    *aside.room.entry(uuid.clone()).or_default() += need;
                }
            }
        }
        // What is granted and not used cannot be moved.
        let lately = self.trimmed.is_some_and(|at| now < at + TRIM_PAUSE);
        if claim.takes && !lately && !collecting {
            self.trim(now, None, out);
        }
        collecting
    }

    /// Chooses what others give of what a claim lacks, and `extra` pieces more of each device.
    fn making(
        &self,
        now: Micros,
        claim: &Claim,
        (lacks, extra): (&BTreeMap<String, u64>, u64),
        first: &BTreeSet<TenantId>,
        coming: &BTreeMap<String, u64>,
    ) -> Making {
        let mut making = Making::default();
        let mut trimming = false;
        let pending = claim.ask.and_then(|key| self.asks.get(&key));
        let excess = self.excess(claim);
        for uuid in claim.needs.keys() {
            let piece = self.accounting.capacity(uuid) / EXTRA;
            let lack = lacks.get(uuid).copied().unwrap_or(0) + extra * piece;
            let comes = lack.min(coming.get(uuid).copied().unwrap_or(0));
            let missing = lack - comes;
            if comes > 0 {
                making.coming.insert(uuid.clone(), comes);
            }
            let excess = excess.get(uuid).copied().unwrap_or(0);
            if missing.max(excess) == 0 {
                continue;
            }
            // Leases that are not used come first, then caches.
            let trims = |it: &Pending| !it.trimmed || self.is_trimming(now, uuid, None, TRIM_HEDGE);
            if pending.is_some_and(trims) {
                trimming = true;
                continue;
            }
            let offers = match claim.takes {
                true => self.offers(now, claim, (uuid, missing), first),
                false => Vec::new(),
            };
            // What needs no copy goes before what must be copied, and before a program's help.
            let own = self.own(now, claim, uuid);
            let all = own.all();
            let waits = all > 0 && claim.ask.is_some() && now < claim.since + OWN.0;
            let lack = (uuid.as_str(), missing, excess);
            let drops = self.drops(now, claim, lack, &offers, (own, waits));
            if let Some(drops) = drops.filter(|_| !self.has(Mutation::CopyDroppable)) {
                for (holder, part) in drops {
                    let part = (uuid.clone(), part);
                    making.freed.entry(holder).or_insert(part);
                }
                continue;
            }
            if excess > all {
                making.lacks = true;
                continue;
            }
            if waits {
                trimming = true;
                continue;
            }
            if !claim.takes {
                making.lacks = true;
                continue;
            }
            // All of its own, and the rest of others.
            let missing = missing.saturating_sub(all);
            if all > 0 {
                let part = (uuid.clone(), all);
                making.freed.entry(claim.tenant).or_insert(part);
            }
            if let Some(processes) = self.due_to_reclaim(now, claim, uuid, &offers) {
                making.reclaims.push((uuid.clone(), missing, processes));
                making.depends |= choose(missing, &offers).is_none();
            } else {
                // A process that asks for memory will often ask for more.
                let ahead = claim.ask.map_or(0, |_| piece);
                let victims = self.victims(uuid, (missing, ahead), &offers);
                making.lacks |= victims.is_none();
                for (victim, part) in victims.into_iter().flatten() {
                    let parts = making.moves.entry(victim).or_default();
                    parts.insert(uuid.clone(), part);
                }
            }
        }
        making.moves.retain(|it, _| !making.freed.contains_key(it));
        if trimming {
            making.moves.clear();
            making.freed.clear();
            making.reclaims.clear();
        }
        making
    }

    /// Has others do their part.
    fn make(&mut self, now: Micros, claimant: TenantId, making: Making, out: &mut Vec<Command>) {
        for (uuid, missing, processes) in making.reclaims {
            self.reclaim(now, uuid, missing, processes, out);
        }
        for (holder, (uuid, part)) in making.freed {
            let home = |it: &Tenant| it.place == Place::Home;
            if self.tenants.get(&holder).is_some_and(home) {
                let why = if holder == claimant {
                    Why::Own
                } else {
                    Why::Drop
                };
                self.begin_drop(now, holder, &uuid, part, why, out);
            }
        }
        for (victim, parts) in making.moves {
            self.move_away(now, victim, parts, out);
        }
    }

    /// The tenants that give what is missing of a device and, if the host has room for that, more; none if they do not suffice.
    fn victims(
        &self,
        uuid: &str,
        (missing, ahead): (u64, u64),
        offers: &[Offer],
    ) -> Option<Vec<(TenantId, u64)>> {
        let more = Some(missing.saturating_add(ahead)).filter(|_| ahead > 0);
        let more = more.and_then(|it| choose(it, offers));
        let more = more.filter(|it| self.fit_host(uuid, it));
        more.or_else(|| choose(missing, offers))
    }

    /// The host has no room for all that victims are to move for a claim.
    fn host_is_full(
        &mut self,
        now: Micros,
        claim: &Claim,
        victims: &BTreeMap<TenantId, BTreeMap<String, u64>>,
        full: HostFull,
        out: &mut Vec<Command>,
    ) {
        if let Some(tenant) = self.tenants.get_mut(&claim.tenant) {
            tenant.host_full = Some((now, full));
        }
        for id in victims.keys() {
            self.drop_unused(now, *id, out);
            out.push(Command::Failed(*id, full.into()));
        }
    }

    /// Moves a victim away, or leaves it alone for a while.
    fn move_away(
        &mut self,
        now: Micros,
        victim: TenantId,
        parts: BTreeMap<String, u64>,
        out: &mut Vec<Command>,
    ) {
        let moved = self.begin_leave(now, victim, parts, Why::Room, out);
        if moved.is_ok() {
            // One that rests gives nothing up.
            let asks = self.has_asked(victim);
            if let Some(it) = self.tenants.get_mut(&victim) {
                let in_turn = now < it.home_since + turn(it.took);
                it.gave_way |= in_turn && (asks || !it.rests(now));
                // It came back past older claims, and had no turn: its own is as old as it was.
                if in_turn && let Some((_, since)) = it.passed.filter(|_| !it.rests(now)) {
                    it.wants_since = Some(since);
                }
            }
            // From now on others are looked at anew.
            (self.tenants.values_mut()).for_each(|it| it.most.clear());
        }
        if let Err(error) = moved {
            if let Some(tenant) = self.tenants.get_mut(&victim) {
                tenant.failed(now, self.mutation);
            }
            // What was reserved for it.
            self.free_host(victim);
            out.push(Command::Failed(victim, error));
        }
    }

    /// The processes of the next tenant whose programs can give caches back, for at most [`RECLAIM`] in all for a claim: none while some are
    /// asked; no set if no more can come. One that had nothing to give is not asked again for a while.
    fn due_to_reclaim(
        &self,
        now: Micros,
        claim: &Claim,
        uuid: &str,
        offers: &[Offer],
    ) -> Option<BTreeSet<ProcessId>> {
        if let Some(reclaim) = self.reclaims.get(uuid) {
            if !reclaim.waiting.is_empty() {
                return Some(BTreeSet::new());
            }
            let lately = (reclaim.until..reclaim.until + RECLAIM_PAUSE).contains(&now);
            if lately && claim.since + RECLAIM <= reclaim.until {
                return None;
            }
        }
        let of = |offer: &Offer| -> BTreeSet<ProcessId> {
            let home = self.tenants.get(&offer.tenant).map(|it| &it.place) == Some(&Place::Home);
            let due = |it: &super::Process| {
                let asked = it.reclaimed.filter(|at| now < *at + RECLAIM_PAUSE);
                let paused = asked.is_some_and(|at| !it.gave || at >= claim.since);
                home && it.tenant == offer.tenant && it.reclaims && !paused
            };
            let due = self.processes.iter().filter(|(_, it)| due(it));
            due.map(|(process, _)| *process).collect()
        };
        offers.iter().map(of).find(|it| !it.is_empty())
    }

    /// Has programs give caches back.
    fn reclaim(
        &mut self,
        now: Micros,
        uuid: String,
        missing: u64,
        waiting: BTreeSet<ProcessId>,
        out: &mut Vec<Command>,
    ) {
        if waiting.is_empty() {
            return;
        }
        self.ops += 1;
        for process in &waiting {
            if let Some(it) = self.processes.get_mut(process) {
                (it.reclaimed, it.gave) = (Some(now), false);
            }
            let order = Order::Reclaim {
                device: uuid.clone(),
                bytes: missing,
            };
            out.push(Command::Order(*process, self.ops, order));
        }
        let reclaim = self.reclaims.entry(uuid).or_default();
        if now >= reclaim.until {
            reclaim.until = now + RECLAIM;
        }
        (reclaim.op, reclaim.waiting) = (self.ops, waiting);
    }

    /// What a tenant can free of its own for its request, without a copy.
    fn own(&self, now: Micros, claim: &Claim, uuid: &str) -> Droppable {
        let can = |it: &&Tenant| {
            it.place == Place::Home && now >= it.not_before && now >= it.take_not_before
        };
        let tenant = self.tenants.get(&claim.tenant).filter(can);
        match tenant.and(claim.ask) {
            Some(_) => self.accounting.droppable_of(claim.tenant, uuid),
            None => Droppable::default(),
        }
    }

    /// Whether a tenant can free all that its request lacks.
    pub(super) fn serves_own(&self, now: Micros, claim: &Claim) -> bool {
        let (lacks, excess) = (self.lacks(claim, &Aside::default()), self.excess(claim));
        claim.needs.keys().all(|uuid| {
            let [lack, excess] = [&lacks, &excess].map(|it| it.get(uuid).copied().unwrap_or(0));
            let own = self.own(now, claim, uuid);
            lack.max(excess) <= own.all()
        })
    }

    /// What can be freed of a device without a copy, if that suffices: first what only the tenant's own can make up for; then what has no
    /// contents, its own first; then caches, its own first unless it is guaranteed what others have. Of others that of the lowest class first. `waits`: its own is not taken yet.
    fn drops(
        &self,
        now: Micros,
        claim: &Claim,
        (uuid, missing, excess): (&str, u64, u64),
        offers: &[Offer],
        (own, waits): (Droppable, bool),
    ) -> Option<Vec<(TenantId, u64)>> {
        let mut holders: Vec<_> = (self.tenants.iter())
            .filter(|(id, it)| {
                let rests = now >= it.not_before && now >= it.take_not_before;
                let frees = match &it.place {
                    Place::Home => true,
                    // Memory of another device: that of this one is next.
                    Place::Leaving(it) => it.frees_elsewhere(now, uuid),
                    Place::Away { .. } | Place::Returning(_) => false,
                };
                claim.takes && **id != claim.tenant && frees && rests
            })
            .filter_map(|(id, it)| {
                let all = self.accounting.droppable_of(*id, uuid);
                let gives = offers.iter().find(|it| it.tenant == *id);
                let borrowed = self.accounting.entry(*id, uuid).borrowed();
                let most = gives.map_or(borrowed, |it| it.bytes.max(borrowed));
                let free = all.free.min(most);
                let yields = claim.entitled || (gives.is_some() && !waits);
                let cached = if yields {
                    all.cached.min(most - free)
                } else {
                    0
                };
                let order = (std::cmp::Reverse(it.terms.class), *id);
                (free + cached > 0).then_some((order, free, cached))
            })
            .collect();
        holders.sort_unstable();
        let own = if waits { Droppable::default() } else { own };
        let only = excess.min(own.all());
        let left_free = own.free.saturating_sub(only);
        let left_cached = own.cached - (only - only.min(own.free));
        let own_cached = (claim.tenant, left_cached);
        let [before, after] = match claim.entitled {
            true => [None, Some(own_cached)],
            false => [Some(own_cached), None],
        };
        let free = holders.iter().map(|((_, id), free, _)| (*id, *free));
        let cached = holders.iter().map(|((_, id), _, cached)| (*id, *cached));
        let free = [(claim.tenant, left_free)].into_iter().chain(free);
        let cached = before.into_iter().chain(cached).chain(after);
        let mut parts: BTreeMap<TenantId, u64> = BTreeMap::new();
        if only > 0 {
            parts.insert(claim.tenant, only);
        }
        let mut left = missing.saturating_sub(only);
        for (id, bytes) in free.chain(cached) {
            let part = left.min(bytes);
            if part > 0 {
                *parts.entry(id).or_default() += part;
            }
            left -= part;
        }
        (left == 0 && only == excess).then(|| parts.into_iter().collect())
    }

    /// What others can give of a device for a claim, in the order in which they are asked.
    fn offers(
        &self,
        now: Micros,
        claim: &Claim,
        lack: (&str, u64),
        first: &BTreeSet<TenantId>,
    ) -> Vec<Offer> {
        let (uuid, missing) = lack;
        let lack = (uuid, missing, self.could_be_free(uuid));
        let mut offers: Vec<Offer> = (self.tenants.iter())
            .filter(|(id, _)| **id != claim.tenant)
            .filter_map(|(id, tenant)| self.offer(now, claim, lack, first, *id, tenant))
            .collect();
        offers.sort_by_key(|offer| offer.order);
        offers
    }

    /// What is free of a device, and what tenants that cannot run have there.
    fn could_be_free(&self, uuid: &str) -> u64 {
        let away = (self.tenants.iter()).filter(|(_, it)| matches!(it.place, Place::Away { .. }));
        let theirs = away.map(|(id, _)| self.accounting.entry(*id, uuid).holding.movable);
        let free = (self.accounting.ledger(uuid)).map_or(0, crate::ledger::Ledger::free);
        theirs.fold(free, u64::saturating_add)
    }

    fn offer(
        &self,
        now: Micros,
        claim: &Claim,
        (uuid, missing, left): (&str, u64, u64),
        first: &BTreeSet<TenantId>,
        id: TenantId,
        tenant: &Tenant,
    ) -> Option<Offer> {
        let entry = self.accounting.entry(id, uuid);
        let movable = entry.holding.movable;
        let Activity { busy, in_group, .. } = tenant.activity;
        if movable == 0 || in_group || now < tenant.not_before {
            return None;
        }
        let away = match tenant.place {
            // It cannot run: the memory that it still has on the device is of no use, unless it is served before.
            Place::Away { .. } => true,
            Place::Home => false,
            Place::Leaving(_) | Place::Returning(_) => return None,
        };
        if away && first.contains(&id) {
            return None;
        }
        // It waits for memory itself, and is served later, unless what tenants that cannot run have suffices for it.
        let asks = || self.asks_of(id).filter(|(_, it)| it.is_on(uuid));
        let needs = || asks().fold(0, |sum: u64, (_, it)| sum.saturating_add(it.needs_of(uuid)));
        // For one that would only come back to wait for more, too, it is not idle: they would exchange their memory without end.
        let same = claim.ask.is_none()
            && asks().next().is_some()
            && !self.has(Mutation::ExchangeAmongWaiting)
            && (self.asks_of(claim.tenant)).any(|(_, it)| it.is_on(uuid));
        let waits = || !same && !busy && !first.contains(&id) && needs() > left;
        let swap = Micros(missing / self.speed.max(1));
        let own_turn = turn(tenant.took.max(swap));
        let home_for = now.saturating_sub(tenant.home_since);
        let idle_for = match same {
            true => Micros::ZERO,
            false => tenant.idle_for(now),
        };
        let at_once = !busy && self.has(Mutation::IdleAtOnce);
        let idle = away || at_once || (!same && tenant.rests(now)) || waits();
        let long_idle = away || at_once || idle_for >= own_turn;
        let entitled = claim.entitled && !self.has(Mutation::TurnsAgainstGuarantees);
        // A lower class waits longer, but not for more than these turns in all: others may have come in between.
        let class_wait = Micros(own_turn.0.saturating_mul(CLASS_TURNS));
        let lower = tenant.terms.class < claim.class && now < claim.since + class_wait;
        let due_turn = match lower {
            true => class_wait,
            false => own_turn,
        };
        // A claim that came later is older by its class only: it may be of one that was moved for this tenant.
        let passed = (tenant.passed).is_some_and(|(age, since)| {
            claim.age() < age && claim.since < since && tenant.home_since > claim.since
        });
        let had_its_turn = passed || home_for >= due_turn;
        let borrowed = movable.min(entry.borrowed());
        // What exceeds its guarantee is moved whole if need be: without a part of its memory it cannot run anyway.
        let exceeds = entry.holding.all() > entry.share.guaranteed;
        let bytes = match () {
            () if long_idle || (exceeds && (idle || had_its_turn)) => movable,
            () if entitled => borrowed,
            () => 0,
        };
        // Others would have to let go of host memory first.
        let fits = self.fits_host(id, uuid, bytes.min(missing));
        let order = (
            tenant.failures > 0 || !fits,
            !away,
            !idle,
            std::cmp::Reverse(tenant.terms.class),
            borrowed == 0,
            tenant.home_since,
            id,
        );
        (bytes > 0).then_some(Offer {
            tenant: id,
            bytes,
            order,
        })
    }
}

/// The tenants that give, and how much, in this order; none if it does not suffice.
fn choose(missing: u64, offers: &[Offer]) -> Option<Vec<(TenantId, u64)>> {
    let mut left = missing;
    let mut chosen = Vec::new();
    for offer in offers {
        let part = left.min(offer.bytes);
        if part > 0 {
            chosen.push((offer.tenant, part));
        }
        left -= part;
    }
    (left == 0).then_some(chosen)
}
