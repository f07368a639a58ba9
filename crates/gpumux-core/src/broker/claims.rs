//! Claims: what tenants lack, in which order they are served, and which others give way.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    ASKS_LOOKED_AT, Activity, Ask, AskKey, Broker, Command, LOOK, MemoryPolicy, Micros, Order,
    PATIENCE, PATIENCE_FOR_TURNS, Place, RECLAIM, RECLAIM_PAUSE, TRIM, TRIM_HEDGE, TRIM_PAUSE,
    Tenant, TenantId,
    model::{Age, Mutation, ProcessId, Round, Step, Why},
    turn,
};
use crate::{
    Class,
    ledger::{Denied, EXTRA, HostFull, Kind},
};

/// A tenant of a lower class takes the memory of one of a higher only after so many turns: between them memory is divided
/// about ten to one where it does not suffice for both.
const CLASS_TURNS: u64 = 10;

/// What a tenant lacks.
pub(super) struct Claim {
    tenant: TenantId,
    /// A request for more; none: the tenant's return.
    ask: Option<AskKey>,
    /// Bytes by device.
    needs: BTreeMap<String, u64>,
    since: Micros,
    class: Class,
    /// With it, the tenant stays within its guarantee.
    entitled: bool,
    /// Others are moved for it.
    takes: bool,
}

impl Claim {
    /// Claims are served in this order: within a guarantee first, then by age, where a lower class counts as younger, so that
    /// every claim becomes the oldest at last.
    fn rank(&self) -> (Age, TenantId, Option<AskKey>) {
        (self.age(), self.tenant, self.ask)
    }

    fn age(&self) -> Age {
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

/// What is set aside for older claims, and what comes free for them, by device.
#[derive(Default)]
struct Aside {
    room: BTreeMap<String, u64>,
    coming: BTreeMap<String, u64>,
    /// Victims that were not moved, since the host is full.
    unmoved: BTreeSet<TenantId>,
}

impl Broker {
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
                });
            }
        }
        for (id, tenant) in &self.tenants {
            // A process that makes host memory still runs: it gets what is free.
            let leaving = match &tenant.place {
                Place::Home => None,
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
            let done = match claim.ask {
                Some(key) => self.serve_ask(now, &claim, key, (lacks.is_empty(), passes), out),
                None => lacks.is_empty() && self.serve_return(now, &claim, passes, out),
            };
            if done {
                continue;
            }
            // An older claim that cannot be served now keeps nothing from this one.
            if self.collect(now, &claim, lacks, &first, &mut aside, out) {
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

    /// What of a claim's needs is neither free nor set aside for others.
    fn lacks(&self, claim: &Claim, aside: &Aside) -> BTreeMap<String, u64> {
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
        if now < tenant.back_not_before || crowded {
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
            false => Err(self.accounting.could_ask(&pending.parts).unwrap_or(full)),
        };
        let full = matches!(answer, Err(Denied::Full { .. }));
        let given = match answer {
            Ok(given) => given,
            Err(_) => {
                // Little can have come together since the last time; a limit may be met by what the asker itself does not use.
                let lately = self.trimmed.is_some_and(|at| now < at + TRIM_PAUSE);
                if !(pending.trimmed || lately && full) {
                    self.trim(now, out);
                }
                if let Some(pending) = self.asks.get_mut(&key) {
                    pending.trimmed = true;
                }
                let of = (!full).then_some(claim.tenant);
                let time = match self.has(Mutation::RefuseEarly) {
                    true => TRIM_HEDGE,
                    false => TRIM,
                };
                let awaits = |it: &Self| {
                    let mut devices = claim.needs.keys();
                    devices.any(|uuid| it.is_trimming(now, uuid, of, time))
                };
                if awaits(self) || (full && now < pending.since + patience) {
                    return false;
                }
                // A report may have been sent before the order came. The one after it was not.
                let again = pending.trimmed && !pending.trimmed_again;
                if again && !self.has(Mutation::RefuseEarly) {
                    self.trim_of(now, of, out);
                    if let Some(pending) = self.asks.get_mut(&key) {
                        pending.trimmed_again = true;
                    }
                    if awaits(self) {
                        return false;
                    }
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

    /// Has caches given back and others moved away so that a claim can be served, if that suffices, and sets room aside for it.
    /// Whether it does.
    fn collect(
        &mut self,
        now: Micros,
        claim: &Claim,
        lacks: BTreeMap<String, u64>,
        first: &BTreeSet<TenantId>,
        aside: &mut Aside,
        out: &mut Vec<Command>,
    ) -> bool {
        if !claim.takes {
            return false;
        }
        let extra = self.tenants.get(&claim.tenant).map_or(0, |tenant| {
            // The driver had less room than is accounted for.
            u64::from(tenant.back_failures.min(8))
        });
        let mut collecting = extra > 0 || !lacks.is_empty();
        let mut chosen: BTreeMap<TenantId, BTreeMap<String, u64>> = BTreeMap::new();
        let mut coming = BTreeMap::new();
        // What is freed without a copy, and whether leases may still come back.
        let mut freed: BTreeMap<TenantId, (String, u64)> = BTreeMap::new();
        let mut trimming = false;
        // What programs are asked for, with their processes, and whether a device depends on that.
        let mut reclaims = Vec::new();
        let mut depends = false;
        let uuids = claim
            .needs
            .keys()
            .filter(|uuid| extra > 0 || lacks.contains_key(*uuid));
        for uuid in uuids {
            let step = self.accounting.capacity(uuid) / EXTRA;
            let lack = lacks.get(uuid).copied().unwrap_or(0) + extra * step;
            let comes = lack.min(aside.coming.get(uuid).copied().unwrap_or(0));
            coming.insert(uuid.clone(), comes);
            let missing = lack - comes;
            if missing == 0 {
                continue;
            }
            let offers = self.offers(now, claim, (uuid, missing), first);
            // Leases that are not used come first, then caches.
            let pending = claim.ask.and_then(|key| self.asks.get(&key));
            if pending
                .is_some_and(|it| !it.trimmed || self.is_trimming(now, uuid, None, TRIM_HEDGE))
            {
                trimming = true;
                continue;
            }
            // What needs no copy goes before what must be copied, and before a program's help.
            let drops = self.drops(now, claim, (uuid, missing), &offers);
            if let Some(drops) = drops.filter(|_| !self.has(Mutation::CopyDroppable)) {
                // One device of a tenant after the other.
                for (holder, part) in drops {
                    freed.entry(holder).or_insert((uuid.clone(), part));
                }
                continue;
            }
            if let Some(processes) = self.due_to_reclaim(now, uuid, &offers) {
                reclaims.push((uuid.clone(), missing, processes));
                depends |= choose(missing, &offers).is_none();
                continue;
            }
            // A process that asks for memory will often ask for more.
            let ahead = claim.ask.map_or(0, |_| step);
            match self.victims(uuid, (missing, ahead), &offers) {
                Some(victims) => {
                    for (victim, part) in victims {
                        chosen.entry(victim).or_default().insert(uuid.clone(), part);
                    }
                }
                None => collecting = false,
            }
        }
        chosen.retain(|victim, _| !freed.contains_key(victim));
        if trimming {
            chosen.clear();
            freed.clear();
            reclaims.clear();
        }
        if collecting && let Err(full) = self.reserve_host(&chosen) {
            self.host_is_full(now, claim, &chosen, full, out);
            if !self.has(Mutation::MoveInVain) {
                // To move some of them, or to free some, would not serve the claim. What comes free already is kept for it.
                collecting = coming.values().any(|it| *it > 0);
                freed.clear();
                reclaims.clear();
                aside
                    .unmoved
                    .extend(std::mem::take(&mut chosen).into_keys());
            }
        }
        if depends {
            // What programs give back may not suffice.
            freed.clear();
            (std::mem::take(&mut chosen).into_keys()).for_each(|it| self.free_host(it));
        }
        if self.has(Mutation::TakeComing) || collecting {
            for (uuid, comes) in coming {
                *aside.coming.entry(uuid).or_default() -= comes;
            }
        }
        if collecting {
            for (uuid, missing, processes) in reclaims {
                self.reclaim(now, uuid, missing, processes, out);
            }
            for (holder, (uuid, part)) in freed {
                let home = |it: &Tenant| it.place == Place::Home;
                if self.tenants.get(&holder).is_some_and(home) {
                    self.begin_drop(now, holder, &uuid, part, out);
                }
            }
            for (victim, parts) in chosen {
                self.move_away(now, victim, parts, out);
            }
            let kept = claim
                .needs
                .iter()
                .filter(|_| !self.has(Mutation::RoomForYounger));
            for (uuid, need) in kept {
                *aside.room.entry(uuid.clone()).or_default() += need;
            }
        }
        // What is granted and not used cannot be moved.
        let lately = self.trimmed.is_some_and(|at| now < at + TRIM_PAUSE);
        if !lately && !collecting {
            self.trim(now, out);
        }
        collecting
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

    /// The processes of the next tenant whose programs can give caches back, for at most [`RECLAIM`]: none while some are asked; no set if
    /// no more can come.
    fn due_to_reclaim(
        &self,
        now: Micros,
        uuid: &str,
        offers: &[Offer],
    ) -> Option<BTreeSet<ProcessId>> {
        if let Some(reclaim) = self.reclaims.get(uuid) {
            if !reclaim.waiting.is_empty() {
                return Some(BTreeSet::new());
            }
            if (reclaim.until..reclaim.until + RECLAIM_PAUSE).contains(&now) {
                return None;
            }
        }
        let of = |offer: &Offer| -> BTreeSet<ProcessId> {
            let home = self.tenants.get(&offer.tenant).map(|it| &it.place) == Some(&Place::Home);
            let due = |it: &super::Process| {
                let paused = it.reclaimed.is_some_and(|at| now < at + RECLAIM_PAUSE);
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
                it.reclaimed = Some(now);
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

    /// What others can free of a device without a copy, if that suffices: what has no contents first, then caches; of each that of
    /// the lowest class first.
    fn drops(
        &self,
        now: Micros,
        claim: &Claim,
        (uuid, missing): (&str, u64),
        offers: &[Offer],
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
                **id != claim.tenant && frees && rests
            })
            .filter_map(|(id, it)| {
                let all = self.accounting.droppables(*id, uuid);
                let free = all.iter().map(|(_, it)| it.free).sum::<u64>();
                let cached = all.iter().map(|(_, it)| it.cached).sum::<u64>();
                let gives = offers.iter().find(|it| it.tenant == *id);
                let borrowed = self.accounting.entry(*id, uuid).borrowed();
                let most = gives.map_or(borrowed, |it| it.bytes.max(borrowed));
                let free = free.min(most);
                let yields = claim.entitled || gives.is_some();
                let cached = if yields { cached.min(most - free) } else { 0 };
                let order = (std::cmp::Reverse(it.terms.class), *id);
                (free + cached > 0).then_some((order, free, cached))
            })
            .collect();
        holders.sort_unstable();
        let mut left = missing;
        let mut parts: BTreeMap<TenantId, u64> = BTreeMap::new();
        let free = holders.iter().map(|((_, id), free, _)| (*id, *free));
        let cached = holders.iter().map(|((_, id), _, cached)| (*id, *cached));
        for (id, bytes) in free.chain(cached) {
            let part = left.min(bytes);
            if part > 0 {
                *parts.entry(id).or_default() += part;
            }
            left -= part;
        }
        (left == 0).then(|| parts.into_iter().collect())
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
            // It cannot run: what is left of it on the device is of no use, unless it is served before.
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
