//! Who got how much of a device: accounted from what the levers allow and what demand says.
//!
//! The hardware goes round the enabled groups that have work and gives each its slice, so in an interval
//! in which nothing changed each of them received `slice / sum of (slice + switch)` of it. A latency domain's
//! 1 s beside a batch domain's 1 µs thus counts as nearly all, as it is.
//!
//! A domain of unknown demand counts only while no enabled domain is known to be busy; then the ones
//! with the longest possible slice count last, because they would hold the device and are mostly idle.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{Costs, Demand, DomainId, DomainState, Micros, RunState, Timeslice};

/// What one domain got so far, in µs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Account {
    /// Device time received.
    pub received_us: f64,
    /// Time in which it had work, or may have had.
    pub runnable_us: f64,
    /// Runnable but not running.
    pub waited_us: f64,
    /// How often it was frozen while it had work.
    pub preemptions: u64,
    frozen: bool,
}

impl Account {
    /// Device time received, for [`DomainState::received`].
    pub fn received(&self) -> Micros {
        Micros(self.received_us as u64)
    }
}

/// The accounts of one device's domains.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Accounts {
    until: Option<Micros>,
    accounts: BTreeMap<DomainId, Account>,
}

impl Accounts {
    /// Accounts for the time since the last call, in which `domains` were as given: call it
    /// before every change. Domains not named are forgotten.
    pub fn advance(&mut self, now: Micros, domains: &[DomainState], costs: &Costs) {
        let elapsed = self.until.map_or(0, |until| now.saturating_sub(until).0) as f64;
        self.until = self.until.max(Some(now));
        self.accounts
            .retain(|id, _| domains.iter().any(|domain| domain.id == *id));
        for (domain, fraction) in domains.iter().zip(fractions(domains, costs)) {
            let account = self.accounts.entry(domain.id).or_default();
            account.received_us += fraction * elapsed;
            let frozen = domain.run == RunState::Frozen;
            if domain.demand.may_run() {
                account.runnable_us += elapsed;
                account.waited_us += (1.0 - fraction) * elapsed;
                account.preemptions += u64::from(frozen && !account.frozen);
            }
            account.frozen = frozen;
        }
    }

    /// One domain's account; zero if it was never seen.
    pub fn get(&self, id: DomainId) -> Account {
        self.accounts.get(&id).copied().unwrap_or_default()
    }
}

/// The fraction of the device that each domain receives while nothing changes; in `domains`' order.
pub fn fractions(domains: &[DomainState], costs: &Costs) -> Vec<f64> {
    let runs =
        |domain: &DomainState, demand| domain.run == RunState::Enabled && domain.demand == demand;
    let among = |pick: &dyn Fn(&DomainState) -> bool| -> Option<Vec<f64>> {
        let count = domains.iter().filter(|domain| pick(domain)).count();
        let switch = if count > 1 {
            costs.switch.0 as f64
        } else {
            0.0
        };
        let round: f64 = domains
            .iter()
            .filter(|domain| pick(domain))
            .map(|domain| domain.timeslice.0.max(1) as f64 + switch)
            .sum();
        (count > 0).then(|| {
            domains
                .iter()
                .map(|domain| match pick(domain) {
                    true => domain.timeslice.0.max(1) as f64 / round,
                    false => 0.0,
                })
                .collect()
        })
    };
    among(&|domain| runs(domain, Demand::Busy))
        .or_else(|| among(&|d| runs(d, Demand::Unknown) && d.timeslice < Timeslice::MAX))
        .or_else(|| among(&|domain| runs(domain, Demand::Unknown)))
        .unwrap_or_else(|| vec![0.0; domains.len()])
}
