//! For model checking: what makes no difference is made the same, so that there are few states.

use std::collections::BTreeMap;

use super::{Broker, Micros, Place, model::Gates};

impl Broker {
    /// Moves the origin of time to `now` less `horizon`; what is longer ago counts as that long ago. For model checking: two
    /// brokers in which everything is equally long ago are equal then.
    pub fn rebase(&mut self, now: Micros, horizon: Micros) {
        let at = |time: &mut Micros| *time = (*time + horizon).saturating_sub(now);
        let maybe = |time: &mut Option<Micros>| time.iter_mut().for_each(at);
        for tenant in self.tenants.values_mut() {
            at(&mut tenant.activity.idle_since);
            match &mut tenant.place {
                Place::Leaving(leaving) => {
                    at(&mut leaving.round.began);
                    at(&mut leaving.round.deadline);
                    if let Gates::Closed(time) | Gates::Open(time) = &mut leaving.gates {
                        at(time);
                    }
                    maybe(&mut leaving.drains);
                    maybe(&mut leaving.report);
                }
                Place::Returning(round) => {
                    at(&mut round.began);
                    at(&mut round.deadline);
                }
                Place::Home | Place::Away { .. } => {}
            }
            maybe(&mut tenant.wants_since);
            tenant.host_full.iter_mut().for_each(|(since, _)| at(since));
            at(&mut tenant.home_since);
            at(&mut tenant.joined);
            if let Some((since, until)) = &mut tenant.lost {
                at(since);
                at(until);
            }
            if let Some(((_, age), since)) = &mut tenant.passed {
                at(age);
                at(since);
            }
            at(&mut tenant.not_before);
            at(&mut tenant.back_not_before);
            at(&mut tenant.take_not_before);
            (tenant.sleeps.iter_mut().chain(&mut tenant.wakes)).for_each(|(_, since)| at(since));
        }
        for process in self.processes.values_mut() {
            maybe(&mut process.reclaimed);
            maybe(&mut process.dropped);
            process.trim.iter_mut().for_each(|(_, since)| at(since));
        }
        for pending in self.asks.values_mut() {
            at(&mut pending.since);
        }
        for reclaim in self.reclaims.values_mut() {
            at(&mut reclaim.until);
        }
        self.accounting.times().for_each(at);
        self.accounting.expect_nothing();
        maybe(&mut self.trimmed);
        at(&mut self.looked);
    }

    /// Gives orders that are awaited, and requests, the smallest names, which are new only to each other. For model checking, as
    /// [`Self::rebase`]. The new names of orders by the old ones.
    pub fn rename_ops(&mut self) -> BTreeMap<u64, u64> {
        let mut names = BTreeMap::new();
        let rounds = self
            .tenants
            .values_mut()
            .filter_map(|tenant| match &mut tenant.place {
                Place::Leaving(leaving) => Some(&mut leaving.round.op),
                Place::Returning(round) => Some(&mut round.op),
                Place::Home | Place::Away { .. } => None,
            });
        let reclaims = self.reclaims.values_mut().map(|it| &mut it.op);
        let trims = self.processes.values_mut();
        let trims = trims.filter_map(|it| Some(&mut it.trim.as_mut()?.0));
        for op in rounds.chain(reclaims.filter(|op| **op != 0)).chain(trims) {
            let new = names.len() as u64 + 1;
            *op = *names.entry(*op).or_insert(new);
        }
        self.ops = names.len() as u64;
        self.asks = (std::mem::take(&mut self.asks).into_iter().zip(1..))
            .map(|(((tenant, _), pending), place)| ((tenant, place), pending))
            .collect();
        self.asked = self.asks.len() as u64;
        names
    }
}
