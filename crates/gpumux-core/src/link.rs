//! Sharing one direction of the link between the host and a device among the tenants that copy.
//!
//! Copy engines obey no timeslice: of a link that is full, all tenants that copy have equal parts. What can be set is the largest rate
//! of a tenant. So the tenants that have more than their share are limited to it, and what they leave goes to the others.
//!
//! Neither what the link carries now nor how much a tenant would like to copy is known, only how much it has copied. Its kind tells only
//! when it is surely not full. Both are found by a *trial*. While no tenant is limited, the sum of all rates is what the link carries. If
//! a tenant has less than its share of that, the tenants above their shares are limited for up to [`HOLDS`]: what they queued before is
//! copied first. If the first copies more by then, the limits stay, and else they are lifted, at once where it takes nothing at all. A
//! tenant that does not take its share although it could is *content*: for a while, what it does not use is the others'. Limits are
//! renewed by a new trial every [`KEEP`], since the link may carry more or less by then.
//!
//! Only while others are limited to their shares does a low rate show that a tenant is content. So nothing is ever lent by what it has
//! while they have more: it would have less, and more would be lent.

use std::collections::BTreeMap;

use crate::{Micros, TenantId};

/// Least time between two looks. A program counts a copy when it submits it, up to a few hundred MB ahead.
pub const LOOK: Micros = Micros::from_secs(1);

/// How long limits stay without a new trial.
const KEEP: Micros = Micros::from_secs(30);

/// How long the limits of a trial may take to hold.
const HOLDS: Micros = Micros::from_secs(2);

/// How long a tenant is content for the first time, and after many.
const CONTENT: (Micros, Micros) = (Micros::from_secs(4), Micros::from_secs(32));

/// A tenant is short that has less than this part of what it is entitled to.
const SHORT: f64 = 0.92;

/// A trial succeeds if those that were short take at least this part of what the others left.
const TAKEN: f64 = 0.25;

/// The limits of a trial that take effect without that the others take at least this part are lifted at once.
const NOTHING: f64 = 0.02;

/// What two looks may differ by that show what the link carries.
const ALIKE: f64 = 0.1;

/// A content tenant is so no longer when its rate changes by this part of what the link carries.
const CHANGE: f64 = 0.2;

/// The part of the link that is left to content tenants beyond what they have. One that takes half of its part is content no longer.
const SLACK: f64 = 0.05;

/// A tenant that copies less than this part of what the link carried does not count.
const COPIES: f64 = 0.01;

/// A link with less than this part of what it can carry is not full.
const FULL: f64 = 0.5;

/// What remains of that after a look: half after two minutes.
const FADES: f64 = 0.9942;

/// By tenant: bytes a second, or a share.
type Rates = BTreeMap<TenantId, f64>;

/// One direction of the link of one device.
#[derive(Clone, Debug, Default)]
pub struct Link {
    at: Option<Micros>,
    phase: Phase,
    content: BTreeMap<TenantId, Content>,
    /// What each tenant copied a second at the last look.
    before: Rates,
    /// What it can carry by its kind; 0: unknown.
    capacity: f64,
    /// The most that it carried lately.
    most: f64,
    limits: Rates,
}

#[derive(Clone, Debug, Default)]
enum Phase {
    /// None is limited.
    #[default]
    Free,
    /// Tenants are limited to find out whether the others want more.
    Trial(Trial),
    /// The others do. With what the link carries.
    Kept { since: Micros, carries: f64 },
}

/// What tenants had before, and were entitled to.
#[derive(Clone, Debug)]
struct Trial {
    had: Rates,
    entitled: Rates,
    /// What the link carried.
    carries: f64,
    /// By then its limits hold.
    until: Micros,
}

/// A tenant that did not take more when it could.
#[derive(Clone, Copy, Debug)]
struct Content {
    rate: f64,
    until: Micros,
    pause: Micros,
}

impl Link {
    /// What it can carry by its kind, in bytes a second: tenants that copy little in all are never limited.
    pub fn set_capacity(&mut self, capacity: u64) {
        self.capacity = capacity as f64;
    }

    /// What it can carry; where that is unknown, the most that it did. Programs count their copies themselves, and could count too many.
    fn carries(&self) -> f64 {
        match self.capacity > 0.0 {
            true => self.capacity,
            false => self.most,
        }
    }

    /// Whether it is time to look.
    pub fn is_due(&self, now: Micros) -> bool {
        self.at.is_none_or(|at| at + LOOK <= now)
    }

    /// How long the last look is ago.
    pub fn since(&self, now: Micros) -> Micros {
        now.saturating_sub(self.at.unwrap_or(now))
    }

    /// Takes what each tenant has copied since the last look, in bytes. `shares`: the share of each of these tenants, in their order,
    /// if only they want a device. Returns to what rates tenants are limited from now on, in bytes a second; the others are not.
    pub fn look(
        &mut self,
        now: Micros,
        copied: &BTreeMap<TenantId, u64>,
        shares: impl Fn(&[TenantId]) -> Vec<f64>,
    ) -> &BTreeMap<TenantId, f64> {
        let elapsed = self.since(now).as_secs_f64();
        self.at = Some(now);
        if elapsed <= 0.0 {
            return &self.limits;
        }
        let rate = |(tenant, bytes): (&TenantId, &u64)| (*tenant, *bytes as f64 / elapsed);
        let mut rates: Rates = copied.iter().map(rate).collect();
        let carried: f64 = rates.values().sum();
        // Of two looks: a program may have queued much in one.
        let lasting = carried.min(self.before.values().sum());
        self.most = (self.most * FADES).max(lasting);
        let least = COPIES * self.carries();
        rates.retain(|_, rate| *rate > least);
        self.limits = match rates.len() {
            0 | 1 => {
                self.phase = Phase::Free;
                Rates::new()
            }
            _ => self.divide(now, &rates, &shares),
        };
        self.before = rates;
        &self.limits
    }

    /// The limits of tenants that copy at these rates.
    fn divide(
        &mut self,
        now: Micros,
        rates: &Rates,
        shares: &dyn Fn(&[TenantId]) -> Vec<f64>,
    ) -> Rates {
        let carried: f64 = rates.values().sum();
        match std::mem::take(&mut self.phase) {
            Phase::Trial(trial) if trial.succeeds(rates) => {
                self.phase = Phase::Kept {
                    since: now,
                    carries: trial.carries,
                };
            }
            Phase::Trial(trial) if now < trial.until && !trial.is_vain(rates) => {
                self.phase = Phase::Trial(trial);
                return self.limits.clone();
            }
            Phase::Trial(Trial { had, entitled, .. }) => {
                self.becomes_content(now, &had, &entitled);
                return Rates::new();
            }
            Phase::Kept { since, .. } if since + KEEP <= now => return Rates::new(),
            other => self.phase = other,
        }
        let kept = match self.phase {
            Phase::Kept { since, carries } => Some((since, carries)),
            _ => None,
        };
        let slack = self.slack();
        self.content.retain(|tenant, it| {
            let rate = rates.get(tenant).copied().unwrap_or(0.0);
            let grows = kept.map_or(CHANGE * carried, |(_, carries)| slack / 2.0 * carries);
            (it.rate - CHANGE * carried..it.rate + grows).contains(&rate)
                && now < it.until + it.pause
        });
        let Some((since, carries)) = kept else {
            // Of two looks: programs that are limited no more may have queued much in one.
            let before = self.before.values().sum::<f64>();
            let carries = f64::midpoint(carried, before);
            let entitled = self.entitled(now, carries, rates, shares);
            let is_known = rates.keys().eq(self.before.keys())
                && carries >= FULL * self.carries()
                && (carried - before).abs() <= ALIKE * carried;
            let is_short = rates.iter().any(|it| is_short(&entitled, it));
            if !is_known || !is_short {
                return Rates::new();
            }
            let limits = above(rates, &entitled);
            self.phase = Phase::Trial(Trial {
                had: rates.clone(),
                carries,
                entitled,
                until: now + HOLDS,
            });
            return limits;
        };
        // What those that are limited queued before is copied by then.
        if since + HOLDS <= now {
            let entitled = self.entitled(now, carries, rates, shares);
            self.becomes_content(now, rates, &entitled);
        }
        let entitled = self.entitled(now, carries, rates, shares);
        let has_more = |tenant: &TenantId, own: f64| rates[tenant] * SHORT > own;
        let limited = |(tenant, own): &(TenantId, f64)| {
            let is_content = self.is_content(now, *tenant);
            !is_content && (self.limits.contains_key(tenant) || has_more(tenant, *own))
        };
        entitled.into_iter().filter(limited).collect()
    }

    /// Those that had less than they were entitled to did not want more.
    fn becomes_content(&mut self, now: Micros, had: &Rates, entitled: &Rates) {
        for (tenant, rate) in had.iter().filter(|it| is_short(entitled, *it)) {
            if self.is_content(now, *tenant) {
                continue;
            }
            let before = self.content.get(tenant).map(|it| Micros(2 * it.pause.0));
            let pause = before.unwrap_or(CONTENT.0).min(CONTENT.1);
            let it = Content {
                rate: *rate,
                until: now + pause,
                pause,
            };
            self.content.insert(*tenant, it);
        }
    }

    /// Each content tenant's part of [`SLACK`].
    fn slack(&self) -> f64 {
        SLACK / self.content.len().max(1) as f64
    }

    fn is_content(&self, now: Micros, tenant: TenantId) -> bool {
        let content = self.content.get(&tenant);
        content.is_some_and(|it| now < it.until)
    }

    /// What each tenant is entitled to of what the link carries: of those that are content what they have, and some more; of the others
    /// their shares of the rest.
    fn entitled(
        &self,
        now: Micros,
        carries: f64,
        rates: &Rates,
        shares: &dyn Fn(&[TenantId]) -> Vec<f64>,
    ) -> Rates {
        let (content, others): (Vec<TenantId>, Vec<TenantId>) = rates
            .keys()
            .partition(|tenant| self.is_content(now, **tenant));
        let content = content.into_iter().map(|tenant| {
            let rate = self.content.get(&tenant).map_or(0.0, |it| it.rate);
            (tenant, rate + self.slack() * carries)
        });
        let mut entitled: Rates = content.collect();
        let rest = (carries - entitled.values().sum::<f64>()).max(0.0);
        let shares = shares(&others).into_iter().map(|share| share * rest);
        entitled.extend(others.into_iter().zip(shares));
        entitled
    }
}

impl Trial {
    /// What those have left and taken that had more than they were entitled to, and the others.
    fn moved(&self, has: &Rates) -> (f64, f64) {
        let (mut left, mut taken) = (0.0, 0.0);
        for (tenant, had) in &self.had {
            let has = has.get(tenant).copied().unwrap_or(0.0);
            match self.entitled.get(tenant).is_some_and(|own| own < had) {
                true => left += had - has,
                false => taken += has - had,
            }
        }
        (left, taken)
    }

    /// Whether its limits took effect, and the others take nothing.
    fn is_vain(&self, has: &Rates) -> bool {
        let own = |tenant| self.entitled.get(tenant).copied().unwrap_or(f64::MAX);
        let had = self.had.iter();
        let over: f64 = had.map(|(tenant, had)| (had - own(tenant)).max(0.0)).sum();
        let (left, taken) = self.moved(has);
        left >= over / 2.0 && taken < NOTHING * left
    }

    /// Whether the others took what those left.
    fn succeeds(&self, has: &Rates) -> bool {
        let (left, taken) = self.moved(has);
        taken > 0.0 && taken >= TAKEN * left
    }
}

/// Whether a tenant that has this has less than it is entitled to.
fn is_short(entitled: &Rates, (tenant, rate): (&TenantId, &f64)) -> bool {
    entitled.get(tenant).is_some_and(|own| *rate < SHORT * own)
}

/// What those are entitled to that have more.
fn above(rates: &Rates, entitled: &Rates) -> Rates {
    let own = entitled
        .iter()
        .filter(|(tenant, own)| rates[tenant] > **own);
    own.map(|(tenant, own)| (*tenant, *own)).collect()
}

#[cfg(test)]
mod tests;
