//! How much of a device each tenant received: accounted from what the controls allow and what demand says.
//!
//! The hardware goes round the enabled groups that have work and gives each its slice, so in an interval
//! in which nothing changed each of them received `(slice - restore) / sum of (slice + switch)` of it. A latency domain's
//! 1 s beside a batch domain's 1 µs thus counts as nearly all, as it is.
//!
//! When another domain than before gets most of the device, it pays for the switch, as far as none
//! ran for that long anyway, and for the restoring of its state, if it was interrupted. When others are frozen or thawed, the
//! domain that runs pays for being interrupted.
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
    /// Time in which it had work outstanding. Time of unknown demand counts neither here nor as waiting.
    pub runnable_us: f64,
    /// The part of that time in which it did not run.
    pub waited_us: f64,
    /// How often it was frozen while it had work, or may have had.
    pub preemptions: u64,
    frozen: bool,
    /// It has work and does not run: its state must be restored before it does.
    waits: bool,
}

impl Account {
    /// What was received since the account was `before`.
    pub(crate) fn since(&self, before: &Self) -> Self {
        Self {
            received_us: (self.received_us - before.received_us).max(0.0),
            runnable_us: (self.runnable_us - before.runnable_us).max(0.0),
            waited_us: (self.waited_us - before.waited_us).max(0.0),
            preemptions: self.preemptions.saturating_sub(before.preemptions),
            frozen: self.frozen,
            waits: self.waits,
        }
    }

    /// Device time received, for [`DomainState::received`].
    pub fn received(&self) -> Micros {
        Micros(self.received_us as u64)
    }
}

/// The accounts of one device's domains.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Accounts {
    until: Option<Micros>,
    /// The domain that got most of the device last, and how long none has since.
    runner: Option<DomainId>,
    idle_us: f64,
    /// What is left of a switch.
    switching_us: f64,
    accounts: BTreeMap<DomainId, Account>,
}

impl Accounts {
    /// Accounts for the time since the last call, in which `domains` were as given: call it
    /// before every change. Domains not named are forgotten.
    pub fn advance(&mut self, now: Micros, domains: &[DomainState], costs: &Costs) {
        let elapsed = self.until.map_or(0, |until| now.saturating_sub(until).0) as f64;
        self.until = self.until.max(Some(now));
        let fractions = fractions(domains, costs);
        let controls = domains.iter().filter(|it| self.was_frozen_or_thawed(it));
        let interruption = controls.count() as f64 * interruption(domains, costs);
        let worked = elapsed - self.switch(domains, &fractions, elapsed, costs, interruption);
        for (domain, fraction) in domains.iter().zip(fractions) {
            let account = self.accounts.entry(domain.id).or_default();
            account.received_us += fraction * worked;
            let frozen = domain.run == RunState::Frozen;
            if domain.demand == Demand::Busy {
                account.runnable_us += elapsed;
                account.waited_us += (1.0 - fraction) * elapsed;
            }
            if domain.demand.may_run() {
                account.preemptions += u64::from(frozen && !account.frozen);
            }
            account.frozen = frozen;
            account.waits = domain.demand == Demand::Busy && fraction == 0.0;
        }
        if self.accounts.len() > domains.len() {
            let named = |id: DomainId| domains.iter().any(|domain| domain.id == id);
            self.accounts.retain(|id, _| named(*id));
        }
    }

    fn was_frozen_or_thawed(&self, domain: &DomainState) -> bool {
        let before = self.accounts.get(&domain.id);
        before.is_some_and(|it| it.frozen != (domain.run == RunState::Frozen))
    }

    /// How much of the elapsed time went into a switch to another domain, or into an interruption.
    fn switch(
        &mut self,
        domains: &[DomainState],
        fractions: &[f64],
        elapsed: f64,
        costs: &Costs,
        interruption: f64,
    ) -> f64 {
        if fractions.iter().all(|fraction| *fraction == 0.0) {
            self.idle_us += elapsed;
            return 0.0;
        }
        let most = fractions.iter().position(|fraction| *fraction > 0.5);
        if let Some(runner) = most.map(|at| domains[at].id) {
            if self.runner.is_some_and(|before| before != runner) {
                let restores = self.accounts.get(&runner).is_some_and(|it| it.waits);
                let restore = if restores { RESTORE_US } else { 0.0 };
                self.switching_us = (costs.switch.0 as f64 - self.idle_us).max(0.0) + restore;
            } else if self.idle_us == 0.0 {
                self.switching_us += interruption;
            }
            self.runner = Some(runner);
        }
        self.idle_us = 0.0;
        let switched = self.switching_us.min(elapsed);
        self.switching_us -= switched;
        switched
    }

    /// One domain's account; zero if it was never seen.
    pub fn get(&self, id: DomainId) -> Account {
        self.accounts.get(&id).copied().unwrap_or_default()
    }
}

/// What a control on one group costs another that runs, in µs: a switch, and one more if another waits, which runs first
/// (`timings::neighbours`, docs/fidelity.md); and its own state is restored.
fn interruption(domains: &[DomainState], costs: &Costs) -> f64 {
    let wants = |it: &&DomainState| it.run == RunState::Enabled && it.demand == Demand::Busy;
    let waiting = domains.iter().filter(wants).count() > 1;
    costs.switch.0 as f64 * if waiting { 2.0 } else { 1.0 } + RESTORE_US
}

/// What a group loses of each slice to the restoring of its state, in µs. Fitted to what two groups
/// with equal slices of 200 µs to 100 ms got of an H100 (44% at 200 µs).
pub(crate) const RESTORE_US: f64 = 29.0;

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
                    true if count == 1 => 1.0,
                    true => (domain.timeslice.0 as f64 - RESTORE_US).max(0.0) / round,
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::domain;

    fn sliced(id: u64, timeslice: u64) -> DomainState {
        DomainState {
            timeslice: Timeslice(timeslice),
            ..domain(id, id)
        }
    }

    #[test]
    fn slices_divide_what_switches_leave() {
        let domains = [sliced(1, 3000), sliced(2, 1000)];
        let got = fractions(&domains, &Costs::default());
        assert!((got[0] / got[1] - 3.0).abs() < 0.1);
        assert!((got[0] + got[1] - (4000.0 - 58.0) / 4376.0).abs() < 1e-9);
        let livelock = [sliced(1, 1), sliced(2, 1)];
        assert_eq!(fractions(&livelock, &Costs::default()), [0.0, 0.0]);
        assert_eq!(fractions(&domains[..1], &Costs::default()), [1.0]);
    }

    #[test]
    fn unknown_demand_counts_only_while_no_domain_is_busy() {
        let mut domains = [sliced(1, 1_000_000), sliced(2, 1), sliced(3, 1)];
        domains[0].demand = Demand::Unknown;
        domains[2].run = RunState::Frozen;
        let all_of_it = |domains: &[DomainState]| fractions(domains, &Costs::default());
        assert_eq!(all_of_it(&domains), [0.0, 1.0, 0.0]);
        domains[1].demand = Demand::Unknown;
        assert_eq!(all_of_it(&domains), [0.0, 1.0, 0.0]);
        domains[1].demand = Demand::Idle;
        assert_eq!(all_of_it(&domains), [1.0, 0.0, 0.0]);
    }

    #[test]
    fn accounts_add_up_and_the_next_domain_pays_for_the_switch() {
        let costs = Costs::default();
        let mut domains = [sliced(1, 1), sliced(2, 1)];
        domains[1].run = RunState::Frozen;
        let mut accounts = Accounts::default();
        accounts.advance(Micros(0), &domains, &costs);
        accounts.advance(Micros(1000), &domains, &costs);
        assert_eq!(accounts.get(DomainId(1)).received_us, 1000.0);
        domains[0].run = RunState::Frozen;
        domains[1].run = RunState::Enabled;
        accounts.advance(Micros(2000), &domains, &costs);
        assert_eq!(accounts.get(DomainId(1)).received_us, 1000.0);
        assert_eq!(accounts.get(DomainId(1)).preemptions, 1);
        let begun = 1000.0 - costs.switch.0 as f64 - RESTORE_US;
        assert_eq!(accounts.get(DomainId(2)).received_us, begun);
        // While both are frozen, the switch is over before the next one runs.
        domains[1].run = RunState::Frozen;
        accounts.advance(Micros(3000), &domains, &costs);
        domains[0].run = RunState::Enabled;
        accounts.advance(Micros(4000), &domains, &costs);
        let received = accounts.get(DomainId(1)).received_us;
        assert_eq!(received, 2000.0 - RESTORE_US);
        assert_eq!(accounts.get(DomainId(1)).waited_us, 2000.0);
        accounts.advance(Micros(4000), &[], &costs);
        assert_eq!(accounts.get(DomainId(1)), Account::default());
    }

    #[test]
    fn frozen_time_without_work_is_not_waiting() {
        let mut domains = [sliced(1, 1_000), sliced(2, 1_000)];
        domains[0].run = RunState::Frozen;
        let mut accounts = Accounts::default();
        accounts.advance(Micros(0), &domains, &Costs::default());
        for (now, demand, waited) in [
            (1_000, Demand::Unknown, 0.0),
            (2_000, Demand::Busy, 1_000.0),
            (3_000, Demand::Idle, 1_000.0),
        ] {
            domains[0].demand = demand;
            accounts.advance(Micros(now), &domains, &Costs::default());
            let account = accounts.get(DomainId(1));
            let got = (account.runnable_us, account.waited_us);
            assert_eq!(got, (waited, waited), "{demand:?}");
        }
    }

    #[test]
    fn running_domain_pays_for_controls_on_others() {
        let costs = Costs::default();
        let one = costs.switch.0 as f64 + RESTORE_US;
        let two = one + costs.switch.0 as f64;
        let mut domains = [sliced(1, 1_000_000), sliced(2, 1), sliced(3, 1)];
        domains[1].demand = Demand::Idle;
        domains[2].run = RunState::Frozen;
        let mut accounts = Accounts::default();
        let mut received = |now, domains: &[DomainState]| {
            accounts.advance(Micros(now), domains, &costs);
            accounts.get(DomainId(1)).received_us
        };
        received(0, &domains);
        assert_eq!(received(1_000, &domains), 1_000.0);
        domains[1].run = RunState::Frozen;
        assert_eq!(received(2_000, &domains), 2_000.0 - one);
        assert_eq!(received(3_000, &domains), 3_000.0 - one);
        // The one that waits runs first.
        domains[2].run = RunState::Enabled;
        let third = received(4_000, &domains);
        assert!((third - (4_000.0 - one - two)).abs() < 1.0, "{third}");
    }
}
