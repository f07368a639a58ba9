//! Processes that undo what the daemon set for their channel groups.
//!
//! A process holds the file through which its groups were made, so it can thaw them and set their timeslices itself. What it
//! cannot forge is read back: the timeslice, the device time that the driver measures for it, and whether the daemon renewed
//! its lease in time. This module decides what of that is evidence, and what follows from it.

use std::collections::{BTreeMap, VecDeque};

use serde::{Deserialize, Serialize};

use crate::{Class, DomainId, Micros, TenantSpec};

/// A driver library sets the timeslice of a group once while it makes a context. Until so long after a group came, a timeslice that
/// differs is its doing.
pub const SETTLES: Micros = Micros::from_secs(2);

/// Findings older than this count no more.
pub const REMEMBERED: Micros = Micros::from_secs(600);

/// Looks whose permitted time counts: NVML's samples are up to a second old, and each look covers a second.
const LOOKS: usize = 3;

/// Part of the device by which a measurement may exceed the permitted time.
const TOLERANCE: f64 = 0.1;

/// Device time beyond that, in seconds, after which it is a finding.
const STOLEN: f64 = 0.3;

/// A whole device is used at most this much by all processes together; measurements that sum to more do not show device time.
const WHOLE: f64 = 1.1;

/// A lease expires after 400 ms or more without renewal. With a shorter longest pause it cannot have.
const LEASE: Micros = Micros::from_millis(300);

/// How late a process may report that its lease expired.
const LATE: Micros = Micros::from_secs(10);

/// What a process undid, or claimed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tampering {
    /// It set a timeslice.
    Timeslice,
    /// It ran while it was frozen.
    Thaw,
    /// It claimed that its lease had expired, so that it would not be controlled.
    Lease,
}

impl Tampering {
    /// What it did, for people.
    pub const fn deed(self) -> &'static str {
        match self {
            Self::Timeslice => "changed its timeslice",
            Self::Thaw => "ran while it was frozen",
            Self::Lease => "claimed that its lease had expired",
        }
    }
}

/// What follows when a tenant's processes were found tampering too often.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Then {
    /// Nothing but the report.
    #[default]
    Report,
    /// The tenant is class `batch` and its compute guarantee does not hold, until root changes its settings.
    Lower,
    /// The process is ended.
    End,
}

/// What follows when processes undo controls: thaw themselves, or set their timeslices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TamperRule {
    /// After so many findings within ten minutes; 0: never.
    pub times: u32,
    /// What is done then: `"report"`, `"lower"` (class batch, no compute guarantee, until root changes the tenant) or `"end"` (the process).
    pub then: Then,
}

impl Default for TamperRule {
    fn default() -> Self {
        Self {
            times: 3,
            then: Then::Report,
        }
    }
}

/// What a tenant's processes were found doing.
#[derive(Clone, Debug, Default)]
pub struct Conduct {
    /// How often, so far.
    pub findings: u64,
    /// When, as far as it counts and no consequence followed.
    lately: VecDeque<Micros>,
    last: Option<Micros>,
}

/// What a finding means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// The first in a while: it is reported.
    pub is_news: bool,
    /// What is to be done now.
    pub then: Option<Then>,
}

impl Conduct {
    /// Counts a finding.
    pub fn found(&mut self, now: Micros, rule: &TamperRule) -> Verdict {
        let is_news = !self.is_recent(now);
        self.findings += 1;
        self.last = Some(now);
        self.lately.push_back(now);
        self.lately
            .retain(|at| now.saturating_sub(*at) < REMEMBERED);
        let often = rule.times > 0 && self.lately.len() >= rule.times as usize;
        if often {
            self.lately.clear();
        }
        // More than that never counts.
        self.lately.truncate(rule.times as usize);
        Verdict {
            is_news,
            then: often.then_some(rule.then),
        }
    }

    /// Whether a finding is not forgotten yet.
    pub fn is_recent(&self, now: Micros) -> bool {
        self.last
            .is_some_and(|at| now.saturating_sub(at) < REMEMBERED)
    }
}

/// A tenant's settings once they were lowered.
#[must_use]
pub fn lowered(spec: &TenantSpec) -> TenantSpec {
    TenantSpec {
        class: Class::Batch,
        guaranteed: 0.0,
        ..spec.clone()
    }
}

/// Whether measured device time is evidence, given the parts that all processes of a device used of the same time.
pub fn is_plausible(used: impl IntoIterator<Item = f64>) -> bool {
    used.into_iter().sum::<f64>() <= WHOLE
}

/// Compares the device time that the driver measured for one process on one device with the time in which it was not frozen.
#[derive(Clone, Debug, Default)]
pub struct Watch {
    at: Option<Micros>,
    /// How long each of its groups was frozen until then.
    frozen: BTreeMap<DomainId, Micros>,
    /// The part of the time between looks in which some group of it was enabled, the last ones.
    permitted: VecDeque<f64>,
    /// Device time beyond what was permitted, in seconds.
    stolen: f64,
}

impl Watch {
    /// A look, once a second: for how long each of its groups was frozen so far, and the part of the time since the last look in which
    /// its kernels ran; none: that was not measured, or is no evidence. Whether it ran while it was frozen.
    pub fn look(
        &mut self,
        now: Micros,
        frozen: BTreeMap<DomainId, Micros>,
        used: Option<f64>,
    ) -> bool {
        let since = self.at.replace(now).map(|at| now.saturating_sub(at));
        let before = std::mem::replace(&mut self.frozen, frozen);
        let Some(time) = since.filter(|it| *it > Micros::ZERO) else {
            return false;
        };
        let same = before.keys().eq(self.frozen.keys());
        let enabled = (self.frozen.iter().zip(&before)).map(|((_, now), (_, before))| {
            1.0 - now.saturating_sub(*before).as_secs_f64() / time.as_secs_f64()
        });
        // Groups that came or ended meanwhile were enabled for an unknown time.
        let permitted = if same { enabled.sum::<f64>() } else { 1.0 };
        self.permitted.push_back(permitted);
        if self.permitted.len() > LOOKS {
            self.permitted.pop_front();
        }
        let most = self.permitted.iter().copied().fold(0.0, f64::max);
        if self.permitted.len() < LOOKS {
            return false;
        }
        let Some(used) = used else {
            return false;
        };
        let beyond = (used - most - TOLERANCE) * time.as_secs_f64();
        self.stolen = (self.stolen + beyond).max(0.0);
        let found = self.stolen >= STOLEN;
        if found {
            self.stolen = 0.0;
        }
        found
    }
}

/// When the daemon renewed its lease: whether a process can have found it expired.
#[derive(Clone, Copy, Debug, Default)]
pub struct Renewals {
    last: Option<Micros>,
    /// When the last long pause ended.
    paused: Option<Micros>,
}

impl Renewals {
    /// The lease is renewed now. Returns the time since the last renewal; zero for the first.
    pub fn renewed(&mut self, now: Micros) -> Micros {
        let before = self.last.replace(now);
        let pause = before.map(|before| now.saturating_sub(before));
        // Of the time before the first renewal nothing is known.
        if pause.is_none_or(|pause| pause >= LEASE) {
            self.paused = Some(now);
        }
        pause.unwrap_or(Micros::ZERO)
    }

    /// Whether a process may say now that its lease has expired.
    pub fn may_have_expired(&self, now: Micros) -> bool {
        let Some(last) = self.last else {
            return true;
        };
        let paused = self.paused;
        now.saturating_sub(last) >= LEASE || paused.is_some_and(|at| now.saturating_sub(at) < LATE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Micros = Micros::from_secs(1);

    /// Looks at a process with one group, which is frozen for the first part of each second and uses the second.
    fn looks(watch: &mut Watch, from: u64, parts: &[(f64, f64)]) -> Vec<bool> {
        let mut frozen = watch
            .frozen
            .get(&DomainId(1))
            .copied()
            .unwrap_or(Micros::ZERO);
        let look = |(n, (off, used)): (usize, &(f64, f64))| {
            frozen += Micros((off * 1e6) as u64);
            let now = Micros((from + n as u64) * SECOND.0);
            let frozen = BTreeMap::from([(DomainId(1), frozen)]);
            watch.look(now, frozen, Some(*used))
        };
        parts.iter().enumerate().map(look).collect()
    }

    #[test]
    fn process_that_keeps_its_turns_is_never_found() {
        // Alone, then by turns with another; what is measured is a look late.
        let mut parts = vec![(0.0, 1.0); 5];
        parts.push((0.5, 1.0));
        parts.extend([(0.5, 0.5); 20]);
        // Frozen for long, then alone again.
        parts.push((1.0, 0.5));
        parts.extend([(1.0, 0.0); 20]);
        parts.extend([(0.0, 0.0), (0.0, 1.0), (0.0, 1.0)]);
        let mut watch = Watch::default();
        assert!(!looks(&mut watch, 0, &parts).contains(&true));
    }

    #[test]
    fn process_that_thaws_itself_is_found_within_5_s() {
        for (off, used) in [(1.0, 1.0), (1.0, 0.5), (0.5, 1.0), (0.67, 0.9)] {
            let mut watch = Watch::default();
            // Before another came it was alone.
            looks(&mut watch, 0, &[(0.0, 1.0); 4]);
            let found = looks(&mut watch, 4, &[(off, used); 10]);
            let first = found.iter().position(|it| *it).unwrap();
            assert!(first < 5, "{off} {used}: {found:?}");
            // And again and again while it goes on.
            let count = found.iter().filter(|it| **it).count();
            assert!(count >= 3, "{off} {used}: {found:?}");
        }
    }

    #[test]
    fn groups_that_come_and_measurements_that_fail_are_no_finding() {
        let mut watch = Watch::default();
        for n in 0..20 {
            // Each second another group, frozen since it came.
            let frozen = BTreeMap::from([(DomainId(n), Micros::ZERO)]);
            assert!(!watch.look(Micros(n * SECOND.0), frozen, Some(1.0)));
        }
        let mut watch = Watch::default();
        for n in 0..20 {
            let frozen = BTreeMap::from([(DomainId(1), Micros(n * SECOND.0))]);
            assert!(!watch.look(Micros(n * SECOND.0), frozen, None));
        }
        assert!(is_plausible([0.5, 0.5]));
        assert!(!is_plausible([1.0, 0.5]));
    }

    #[test]
    fn consequence_follows_after_so_many_findings_in_ten_minutes() {
        let rule = TamperRule {
            times: 3,
            then: Then::End,
        };
        let mut conduct = Conduct::default();
        let mut found = |seconds| conduct.found(Micros::from_secs(seconds), &rule);
        let nothing = Verdict {
            is_news: false,
            then: None,
        };
        let news = Verdict {
            is_news: true,
            ..nothing
        };
        assert_eq!(found(0), news);
        assert_eq!(found(1), nothing);
        // The first two are forgotten.
        assert_eq!(found(700), news);
        assert_eq!(found(800), nothing);
        assert_eq!(found(900).then, Some(Then::End));
        // It counts anew.
        assert_eq!(found(901), nothing);
        assert_eq!(found(902), nothing);
        assert_eq!(found(903).then, Some(Then::End));
        assert_eq!(conduct.findings, 8);
        assert!(conduct.is_recent(Micros::from_secs(1500)));
        assert!(!conduct.is_recent(Micros::from_secs(1503)));
        let never = TamperRule { times: 0, ..rule };
        assert!((0..100).all(|_| conduct.found(SECOND, &never).then.is_none()));
    }

    #[test]
    fn lease_that_was_renewed_in_time_cannot_have_expired() {
        let mut renewals = Renewals::default();
        assert!(renewals.may_have_expired(SECOND), "there is no lease");
        let renew = |renewals: &mut Renewals, from: u64, to: u64| {
            for ms in (from..to).step_by(100) {
                renewals.renewed(Micros::from_millis(ms));
            }
        };
        renew(&mut renewals, 0, 20_000);
        let at = Micros::from_millis;
        assert!(!renewals.may_have_expired(at(20_000)));
        assert!(renewals.may_have_expired(at(20_300)), "it stands still");
        renew(&mut renewals, 20_500, 40_000);
        let mut after = Renewals::default();
        renew(&mut after, 0, 20_000);
        renew(&mut after, 20_500, 21_000);
        assert!(after.may_have_expired(at(21_000)), "a process may be late");
        assert!(!renewals.may_have_expired(at(40_000)));
    }
}
