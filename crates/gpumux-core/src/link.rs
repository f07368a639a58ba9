//! Sharing one direction of the link between the host and a device among the tenants that copy.
//!
//! Copy engines obey no timeslice: of a link that is full, all tenants that copy have equal parts. What can be set is the largest rate
//! of a tenant. So the tenants that have more than their share are limited to it, and what they leave goes to the others.
//!
//! Neither what the link can carry nor how much a tenant would like to copy is known, only how much it has copied. Both are found by a
//! *trial*. While no tenant is limited, the sum of all rates is what the link carries. If a tenant has less than its share of that, the
//! tenants above their shares are limited for one look. If the first then copies more, the limits stay. Else they are lifted, and the
//! tenant is *content*: for a while, what it does not use is the others'. Limits are renewed by a new trial every [`KEEP`], since the link
//! may carry more or less by then.
//!
//! A tenant that is limited may have what others leave of their shares, but for [`SLACK`]: by that, a tenant that begins to copy more is
//! noticed.

use std::collections::BTreeMap;

use crate::{Micros, TenantId};

/// Least time between two looks. A program counts a copy when it submits it, up to a few hundred MB ahead.
pub const LOOK: Micros = Micros::from_millis(200);

/// How long limits stay without a new trial.
const KEEP: Micros = Micros::from_secs(10);

/// How long a tenant is content after the first trial, and after many.
const PAUSE: (Micros, Micros) = (Micros::from_secs(1), Micros::from_secs(8));

/// A tenant is short that has less than this part of its share.
const SHORT: f64 = 0.92;

/// A trial succeeds if those that were short take at least this part of what the others left.
const TAKEN: f64 = 0.25;

/// A content tenant is so no longer when its rate changes by this part of what the link carries.
const CHANGE: f64 = 0.2;

/// The part of the link that tenants which copy more than their share leave free.
const SLACK: f64 = 0.05;

/// A tenant that copies less than this part of what the link carried does not count.
const COPIES: f64 = 0.01;

/// A link with less than this part of the most that it carried lately is not full.
const FULL: f64 = 0.5;

/// What remains of that after a look: half after two minutes.
const FADES: f64 = 0.9988;

/// By tenant: bytes a second, or a share.
type Rates = BTreeMap<TenantId, f64>;

/// One direction of the link of one device.
#[derive(Clone, Debug, Default)]
pub struct Link {
    at: Option<Micros>,
    phase: Phase,
    content: BTreeMap<TenantId, Content>,
    /// The most that it carried lately.
    most: f64,
    limits: Rates,
}

#[derive(Clone, Debug, Default)]
enum Phase {
    /// None is limited.
    #[default]
    Free,
    /// Tenants are limited to find out whether the others want more. With what they had, and what they are entitled to.
    Trial { had: Rates, entitled: Rates },
    /// The others do. With what the link carries.
    Kept { since: Micros, carries: f64 },
}

/// A tenant that did not take more when it could.
#[derive(Clone, Copy, Debug)]
struct Content {
    rate: f64,
    until: Micros,
    pause: Micros,
}

impl Link {
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
        self.most = (self.most * FADES).max(carried);
        let least = COPIES * self.most;
        rates.retain(|_, rate| *rate > least);
        self.limits = match rates.len() {
            0 | 1 => {
                self.phase = Phase::Free;
                Rates::new()
            }
            _ => self.divide(now, &rates, &shares),
        };
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
        if let Phase::Kept { since, carries } = &mut self.phase {
            *carries = carries.max(carried);
            if *since + KEEP <= now {
                self.phase = Phase::Free;
                return Rates::new();
            }
        }
        if let Phase::Trial { had, entitled } = &self.phase {
            if !succeeds(had, entitled, rates) {
                let had = had.iter().map(|(tenant, rate)| (*tenant, *rate));
                let short: Vec<_> = had.filter(|it| is_short(entitled, *it)).collect();
                short
                    .into_iter()
                    .for_each(|it| self.becomes_content(now, it));
                self.phase = Phase::Free;
                return Rates::new();
            }
            let carries = had.values().sum::<f64>().max(carried);
            let since = now;
            self.phase = Phase::Kept { since, carries };
        }
        let is_like = |rate: f64, before: f64| (rate - before).abs() < CHANGE * carried;
        self.content.retain(|tenant, it| {
            let rate = rates.get(tenant);
            rate.is_some_and(|rate| is_like(*rate, it.rate)) && now < it.until + it.pause
        });
        match self.phase {
            Phase::Kept { carries, .. } => {
                let entitled = self.entitled(now, carries, rates, shares);
                self.kept(rates, &entitled, carries)
            }
            _ => {
                let entitled = self.entitled(now, carried, rates, shares);
                let short =
                    |(tenant, rate): (&TenantId, &f64)| is_short(&entitled, (*tenant, *rate));
                if carried < FULL * self.most || !rates.iter().any(short) {
                    return Rates::new();
                }
                let limits = above(rates, &entitled);
                let had = rates.clone();
                self.phase = Phase::Trial { had, entitled };
                limits
            }
        }
    }

    /// The tenant had that, and did not take more.
    fn becomes_content(&mut self, now: Micros, (tenant, rate): (TenantId, f64)) {
        let before = self.content.get(&tenant).map(|it| Micros(2 * it.pause.0));
        let pause = before.unwrap_or(PAUSE.0).min(PAUSE.1);
        let until = now + pause;
        self.content.insert(tenant, Content { rate, until, pause });
    }

    /// What each tenant is entitled to of what the link carries: those that are content to what they have, the others to their shares
    /// of the rest.
    fn entitled(
        &self,
        now: Micros,
        carries: f64,
        rates: &Rates,
        shares: &dyn Fn(&[TenantId]) -> Vec<f64>,
    ) -> Rates {
        let is_content = |tenant: &TenantId| {
            let content = self.content.get(tenant);
            content.is_some_and(|it| now < it.until)
        };
        let (mut entitled, others): (Rates, Rates) =
            rates.iter().partition(|(tenant, _)| is_content(tenant));
        let rest = (carries - entitled.values().sum::<f64>()).max(0.0);
        let others: Vec<TenantId> = others.into_keys().collect();
        let shares = shares(&others).into_iter().map(|share| share * rest);
        entitled.extend(others.into_iter().zip(shares));
        entitled
    }

    /// The limits of those that have more than they are entitled to, or had. What others leave is theirs as well.
    fn kept(&self, rates: &Rates, entitled: &Rates, carries: f64) -> Rates {
        let mut limits = above(rates, entitled);
        for tenant in self.limits.keys() {
            if let Some(own) = entitled.get(tenant) {
                limits.entry(*tenant).or_insert(*own);
            }
        }
        let left = |(tenant, own): (&TenantId, &f64)| (own - rates[tenant]).max(0.0);
        let spare = entitled.iter().map(left).sum::<f64>() - SLACK * carries;
        let takes = |(tenant, own): &(&TenantId, &f64)| rates[tenant] >= SHORT * **own;
        let all: f64 = limits.iter().filter(takes).map(|(_, own)| own).sum();
        let more = spare.max(0.0) / all.max(1.0);
        for (tenant, own) in &mut limits {
            if rates[tenant] >= SHORT * *own {
                *own += *own * more;
            }
        }
        limits
    }
}

/// Whether a tenant that has this has less than it is entitled to.
fn is_short(entitled: &Rates, (tenant, rate): (TenantId, f64)) -> bool {
    entitled.get(&tenant).is_some_and(|own| rate < SHORT * own)
}

/// What those are entitled to that have more.
fn above(rates: &Rates, entitled: &Rates) -> Rates {
    let own = entitled
        .iter()
        .filter(|(tenant, own)| rates[tenant] > **own);
    own.map(|(tenant, own)| (*tenant, *own)).collect()
}

/// Whether tenants have taken what those leave that had more than they are entitled to.
fn succeeds(had: &Rates, entitled: &Rates, has: &Rates) -> bool {
    let (mut left, mut taken) = (0.0, 0.0);
    for (tenant, had) in had {
        let has = has.get(tenant).copied().unwrap_or(0.0);
        match entitled.get(tenant).is_some_and(|own| own < had) {
            true => left += had - has,
            false => taken += has - had,
        }
    }
    taken > 0.0 && taken >= TAKEN * left
}

#[cfg(test)]
mod tests;
