//! Processes that undo what the daemon set for their channel groups.
//!
//! A process holds the file through which its groups were made, so it can thaw them and set their timeslices itself. What it
//! cannot forge is read back: the timeslice, the device time that the driver measures for it, and whether the daemon renewed
//! its lease in time. This module decides what of that is evidence, and what follows from it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use serde::{Deserialize, Serialize};

use crate::{Class, DomainId, Micros, TenantSpec};

/// A driver library sets the timeslice of a group once while it makes a context. Until so long after a group came, a timeslice that
/// differs is its doing.
pub const SETTLES: Micros = Micros::from_secs(2);

/// Findings older than this count no more.
pub const REMEMBERED: Micros = Micros::from_secs(600);

/// Findings within so long of one another count as one: several processes of a tenant, or several looks, may have one cause.
pub const APART: Micros = Micros::from_secs(3);

/// A suspicion becomes a finding after so long, unless it was explained meanwhile: that the session has ended, or that the driver
/// library set the timeslice, is reported by other threads than the one that did it, and through a relay.
pub const CONFIRMED: Micros = Micros::from_secs(3);

/// Timeslices of a group that its process's own library may report as set by the driver library: one when the context is made,
/// which is the only one known (driver 580), and one more.
pub const OWN_SETS: u32 = 2;

const SECOND: Micros = Micros::from_secs(1);

/// The time of which a sample of NVML tells ends with its timestamp, and is as long as the product has it: 1/6 s to 1 s by NVML's
/// documentation (`nvmlDeviceGetUtilizationRates`), 0.2 s on an H200 (driver 580.159.04, measured). A driver may also tell of all the
/// time since the sample before.
const SAMPLE: Micros = Micros::from_millis(150);

/// By how much that time may lie beside the timestamp. On that H200 the largest error of a sample was that of 11 ms.
const BESIDE: Micros = Micros::from_millis(20);

/// Shorter freezes count as time in which a group may have run, so that a bounded number is remembered, for so long.
const SHORT: Micros = Micros::from_millis(5);
const KEPT: Micros = Micros::from_secs(10);

/// Part of the device by which a measurement may exceed the permitted time.
const TOLERANCE: f64 = 0.1;

/// Device time beyond that, in seconds, after which it is a finding.
const STOLEN: f64 = 0.3;

/// A whole device is used at most this much by all processes together; measurements that sum to more do not show device time.
const WHOLE: f64 = 1.1;

/// A lease expires after 400 ms or more without renewal. With a shorter longest pause it cannot have.
const LEASE: Micros = Micros::from_millis(300);

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
    /// After so many findings within ten minutes, each at least 3 s after the one before; 0: never.
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
    /// The last that counts.
    counted: Option<Micros>,
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
        let same = |at: Micros| now.saturating_sub(at) < APART;
        if self.counted.is_some_and(same) {
            return Verdict {
                is_news,
                then: None,
            };
        }
        self.counted = Some(now);
        self.lately.push_back(now);
        self.lately
            .retain(|at| now.saturating_sub(*at) < REMEMBERED);
        let often = rule.times > 0 && self.lately.len() >= rule.times as usize;
        if often {
            self.lately.clear();
        }
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

/// When a group was certainly frozen. What is not known counts as time in which it may have run.
#[derive(Clone, Debug, Default)]
pub struct Course {
    since: Option<Micros>,
    /// From when to when, the last ones, in order.
    frozen: VecDeque<(Micros, Micros)>,
}

impl Course {
    /// A freeze has been carried out.
    pub fn froze(&mut self, now: Micros) {
        self.since.get_or_insert(now);
    }

    /// It may run from now on: a control that lets it run begins, or something went wrong.
    pub fn may_run(&mut self, now: Micros) {
        let Some(since) = self.since.take() else {
            return;
        };
        if now.saturating_sub(since) >= SHORT {
            self.frozen.push_back((since, now));
        }
        let old = |(_, to): &(Micros, Micros)| now.saturating_sub(*to) > KEPT;
        while self.frozen.front().is_some_and(old) {
            self.frozen.pop_front();
        }
    }

    /// The largest part of any time of which a sample with this timestamp may tell in which it may have run. `longest`: that time.
    #[must_use]
    pub fn most(&self, timestamp: Micros, longest: Micros) -> f64 {
        let (first, last) = (timestamp.saturating_sub(BESIDE), timestamp + BESIDE);
        let from = first.saturating_sub(longest);
        let current = self.since.map(|since| (since, last));
        let frozen = self.frozen.iter().copied().chain(current);
        let clipped = frozen.map(|(since, until)| (since.max(from), until.min(last)));
        let frozen: Vec<(Micros, Micros)> = clipped.filter(|(a, b)| a < b).collect();
        let ran = |a: Micros, b: Micros| {
            let off = (frozen.iter())
                .map(|(since, until)| (*until.min(&b)).saturating_sub(*since.max(&a)))
                .map(Micros::as_secs_f64);
            1.0 - off.sum::<f64>() / b.saturating_sub(a).as_secs_f64()
        };
        // The part is largest for a time that begins and ends where a freeze does, or is as short, long, early or late as can be.
        let bounds = || frozen.iter().flat_map(|(since, until)| [*since, *until]);
        let begins = bounds().flat_map(|a| [a, a + SAMPLE, a + longest]);
        let ends = [first, last].into_iter().chain(bounds()).chain(begins);
        let mut most = 0.0_f64;
        for b in ends.filter(|b| (first..=last).contains(b)) {
            let lengths = [b.saturating_sub(SAMPLE), b.saturating_sub(longest)];
            let is_one = |a: &Micros| (SAMPLE..=longest).contains(&b.saturating_sub(*a));
            for a in lengths.into_iter().chain(bounds()).filter(is_one) {
                most = most.max(ran(a, b));
            }
        }
        most
    }
}

/// What the driver measured of a process on a device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample {
    /// When it ended.
    pub end: Micros,
    /// The part of its time in which kernels of the process ran.
    pub used: f64,
}

/// Compares the device time that the driver measured for one process on one device with the time in which it was not frozen.
#[derive(Clone, Debug, Default)]
pub struct Watch {
    groups: BTreeSet<DomainId>,
    /// Since when it has just these groups.
    since: Option<Micros>,
    /// The end of the last sample.
    seen: Micros,
    /// Device time beyond what was permitted, in seconds.
    stolen: f64,
}

impl Watch {
    /// Looks at `courses` of all groups that it has now, and the latest sample, if it is evidence. Whether it ran while it was
    /// frozen.
    pub fn look<'a>(
        &mut self,
        now: Micros,
        courses: impl IntoIterator<Item = (DomainId, &'a Course)>,
        sample: Option<Sample>,
    ) -> bool {
        let courses: BTreeMap<DomainId, &Course> = courses.into_iter().collect();
        if !courses.keys().eq(&self.groups) || self.since.is_none() {
            self.groups = courses.keys().copied().collect();
            // Of one that ended meanwhile it is not known when.
            (self.since, self.stolen) = (Some(now), 0.0);
        }
        // None, or the same once more.
        let Some(Sample { end, used }) = sample.filter(|it| it.end > self.seen) else {
            return false;
        };
        let time = end.saturating_sub(std::mem::replace(&mut self.seen, end));
        let (time, longest) = (time.min(SECOND), time.max(SECOND));
        let from = end.saturating_sub(longest + BESIDE);
        // Later than now by no more than clocks differ.
        let is_known = end <= now + BESIDE && now.saturating_sub(from) < KEPT;
        if !is_known || self.since.is_none_or(|since| since > from) {
            self.stolen = 0.0;
            return false;
        }
        // It may have used that in any case.
        if used <= TOLERANCE && self.stolen == 0.0 {
            return false;
        }
        let most: f64 = courses.values().map(|it| it.most(end, longest)).sum();
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
    /// When the last renewal began.
    last: Option<Micros>,
    /// When the last long pause ended.
    paused: Option<Micros>,
}

impl Renewals {
    /// The lease was renewed at a moment between these: the thread may have stood still before and after it. Returns the longest
    /// time that can lie between this renewal and the one before; zero for the first.
    pub fn renewed(&mut self, began: Micros, ended: Micros) -> Micros {
        let before = self.last.replace(began);
        let pause = before.map(|before| ended.saturating_sub(before));
        // Of the time before the first renewal nothing is known.
        if pause.is_none_or(|pause| pause >= LEASE) {
            self.paused = Some(ended);
        }
        pause.unwrap_or(Micros::ZERO)
    }

    /// Whether a process whose session began at that time may say now that its lease has expired in it. However late: it may have been
    /// stopped before it could.
    pub fn may_have_expired(&self, began: Micros, now: Micros) -> bool {
        let Some(last) = self.last else {
            return true;
        };
        now.saturating_sub(last) >= LEASE || self.paused.is_some_and(|at| at > began)
    }
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*};

    use super::*;

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
        assert_eq!(found(3), nothing);
        // The first two are forgotten.
        assert_eq!(found(700), news);
        assert_eq!(found(800), nothing);
        assert_eq!(found(900).then, Some(Then::End));
        // It counts anew.
        assert_eq!(found(903), nothing);
        assert_eq!(found(906), nothing);
        assert_eq!(found(909).then, Some(Then::End));
        assert_eq!(conduct.findings, 8);
        assert!(conduct.is_recent(Micros::from_secs(1508)));
        assert!(!conduct.is_recent(Micros::from_secs(1509)));
        let never = TamperRule { times: 0, ..rule };
        assert!((0..100).all(|_| conduct.found(SECOND, &never).then.is_none()));
    }

    #[test]
    fn findings_of_many_processes_at_once_count_as_one() {
        let rule = TamperRule {
            times: 2,
            then: Then::Lower,
        };
        let mut conduct = Conduct::default();
        for rank in 0..64 {
            let now = SECOND + Micros::from_millis(rank * 40);
            assert_eq!(conduct.found(now, &rule).then, None, "{rank}");
        }
        assert_eq!(conduct.findings, 64);
        assert_eq!(conduct.found(APART + SECOND, &rule).then, Some(rule.then));
    }

    #[test]
    fn measurements_beyond_a_whole_device_are_no_evidence() {
        assert!(is_plausible([0.5, 0.5]));
        assert!(!is_plausible([1.0, 0.5]));
    }

    #[test]
    fn lease_that_was_renewed_in_time_cannot_have_expired() {
        let at = Micros::from_millis;
        let began = at(20_000);
        let mut renewals = Renewals::default();
        assert!(renewals.may_have_expired(began, began), "there is no lease");
        let renew = |renewals: &mut Renewals, from: u64, to: u64| {
            for ms in (from..to).step_by(100) {
                renewals.renewed(at(ms), at(ms));
            }
        };
        renew(&mut renewals, 0, 40_000);
        assert!(!renewals.may_have_expired(began, at(40_000)));
        assert!(
            renewals.may_have_expired(began, at(40_300)),
            "it stands still"
        );
        renew(&mut renewals, 40_500, 90_000);
        assert!(
            renewals.may_have_expired(began, at(90_000)),
            "a process may be late"
        );
        assert!(!renewals.may_have_expired(at(40_500), at(90_000)));
    }

    proptest! {
        /// However the thread stands still before and after a renewal: one that processes may have missed is known to be.
        #[test]
        fn pause_between_renewals_is_never_missed(
            steps in vec((0u64..250_000, 0u64..250_000, 0u64..250_000), 2..50),
        ) {
            let (mut now, mut renewals) = (0, Renewals::default());
            let mut renewed = None;
            for (before, within, after) in steps {
                now += before;
                let began = Micros(now);
                now += within;
                let last = renewed.replace(now);
                now += after;
                renewals.renewed(began, Micros(now));
                let began = Micros(last.unwrap_or(0));
                if last.is_some_and(|last| renewed.unwrap() - last >= 400_000) {
                    prop_assert!(renewals.may_have_expired(began, Micros(now)));
                }
            }
        }
    }

    /// A group as it really is, beside its course and NVML, in virtual time.
    struct World {
        now: u64,
        course: Course,
        /// When the group really ran, in order.
        ran: Vec<(u64, u64)>,
        /// Since when it really runs.
        runs: Option<u64>,
    }

    impl World {
        fn new() -> Self {
            Self {
                now: 0,
                course: Course::default(),
                ran: Vec::new(),
                runs: Some(0),
            }
        }

        /// The driver takes so long in all, and acts after this part of it.
        fn control(&mut self, freeze: bool, took: u64, part: f64) {
            if !freeze {
                self.course.may_run(Micros(self.now));
            }
            let acts = self.now + (took as f64 * part) as u64;
            match (freeze, self.runs) {
                (true, Some(since)) => {
                    self.ran.push((since, acts));
                    self.runs = None;
                }
                (false, None) => self.runs = Some(acts),
                _ => {}
            }
            self.now += took;
            if freeze {
                self.course.froze(Micros(self.now));
            }
        }

        /// The process freezes or thaws itself, without a control of the daemon.
        fn own(&mut self, runs: bool) {
            match (runs, self.runs) {
                (true, None) => self.runs = Some(self.now),
                (false, Some(since)) => {
                    self.ran.push((since, self.now));
                    self.runs = None;
                }
                _ => {}
            }
        }

        /// The part of a time in which it really ran.
        fn used(&self, from: u64, to: u64) -> f64 {
            let current = self.runs.map(|since| (since, self.now));
            let ran = self.ran.iter().copied().chain(current);
            let within = ran.map(|(a, b)| b.min(to).saturating_sub(a.max(from)));
            within.sum::<u64>() as f64 / (to - from) as f64
        }

        /// The last sample of a driver whose samples are of this length, as it was so long ago.
        fn nvml(&self, length: u64, ago: u64) -> Option<Sample> {
            let end = self.now.saturating_sub(ago) / length * length;
            let used = |end| (self.used(end - length, end) * 100.0).ceil() / 100.0;
            (end > 0).then(|| Sample {
                end: Micros(end),
                used: used(end),
            })
        }
    }

    /// Time until the next control, what it takes, when it acts; what the process does with its group beside it.
    type Turn = (u64, u64, f64);

    fn turns() -> impl Strategy<Value = Vec<Turn>> {
        let pause = prop_oneof![
            8 => 500u64..60_000,
            2 => 60_000u64..1_500_000,
            1 => 1_500_000u64..8_000_000,
        ];
        let took = prop_oneof![8 => 50u64..2_000, 1 => 2_000u64..2_000_000];
        vec((pause, took, 0.0f64..=1.0), 50..400)
    }

    proptest! {
        /// Whatever the daemon freezes, however long controls and looks take, and whichever samples NVML keeps.
        #[test]
        fn honest_process_is_never_found(
            turns in turns(),
            length in 166_667u64..=1_000_000,
            ago in 0u64..7_000_000,
            looks in vec(100_000u64..4_000_000, 1..50),
        ) {
            let mut world = World::new();
            let mut watch = Watch::default();
            let mut looks = looks.into_iter().cycle();
            let mut due = 1_000_000;
            for (n, (pause, took, part)) in turns.into_iter().enumerate() {
                let end = world.now + pause;
                while due < end {
                    world.now = world.now.max(due);
                    let sample = world.nvml(length, ago);
                    let courses = [(DomainId(1), &world.course)];
                    prop_assert!(!watch.look(Micros(world.now), courses, sample), "{sample:?}");
                    due = world.now + looks.next().unwrap();
                }
                world.now = world.now.max(end);
                world.control(n % 2 == 0, took, part);
            }
        }

        /// One that thaws itself soon after each freeze, alone on the device in its turns and half of it in those of others.
        #[test]
        fn process_that_thaws_itself_is_found_within_15_s(
            quantum in 10_000u64..=300_000,
            others in 2u64..5,
            length in 166_667u64..=1_000_000,
            ago in 0u64..100_000,
            looks in vec(900_000u64..1_100_000, 10..40),
        ) {
            let mut world = World::new();
            let mut watch = Watch::default();
            let mut looks = looks.into_iter().cycle();
            let (mut due, mut found) = (0, Vec::new());
            let mut look = |world: &World| {
                if world.now < due {
                    return;
                }
                due = world.now + looks.next().unwrap();
                let courses = [(DomainId(1), &world.course)];
                if watch.look(Micros(world.now), courses, world.nvml(length, ago)) {
                    found.push(world.now);
                }
            };
            while world.now < 30_000_000 {
                world.control(false, 500, 0.5);
                // NVML is read at any time.
                for _ in 0..10 {
                    world.now += quantum / 10;
                    look(&world);
                }
                world.control(true, 500, 0.5);
                world.now += 1_000;
                world.own(true);
                for _ in 0..10 {
                    world.now += quantum * others / 10;
                    look(&world);
                }
            }
            prop_assert!(found.first().is_some_and(|at| *at < 15_000_000), "{found:?}");
            // And again and again while it goes on.
            prop_assert!(found.len() >= 3, "{found:?}");
        }
    }

    #[test]
    fn time_that_is_not_known_to_be_frozen_may_have_been_used() {
        let ms = Micros::from_millis;
        let mut course = Course::default();
        let most = |course: &Course, at| course.most(ms(at), SECOND);
        assert_eq!(most(&course, 1000), 1.0);
        course.froze(ms(1000));
        course.froze(ms(1500));
        assert_eq!(most(&course, 3000), 0.0);
        // It may tell of a second that began 30 ms before, or of one of which a tenth is frozen.
        assert!(most(&course, 1990) < 0.05);
        assert!(most(&course, 1120) > 0.89 && most(&course, 1120) < 0.91);
        assert!(course.most(ms(1120), ms(150)) < 0.4);
        assert_eq!(most(&course, 1010), 1.0);
        course.may_run(ms(3000));
        assert_eq!(most(&course, 2900), 0.0);
        assert!(most(&course, 3010) < 0.21, "it may run again");
        assert_eq!(most(&course, 4000), 1.0);
        // Long ago.
        course.froze(ms(20_000));
        course.may_run(ms(21_000));
        assert_eq!(most(&course, 2500), 1.0);
    }

    #[test]
    fn sample_that_comes_twice_or_is_old_is_no_finding() {
        let mut course = Course::default();
        course.froze(SECOND);
        let mut watch = Watch::default();
        let mut look = |now, end| {
            let sample = Sample {
                end: Micros::from_secs(end),
                used: 1.0,
            };
            let now = Micros::from_secs(now);
            watch.look(now, [(DomainId(1), &course)], Some(sample))
        };
        for n in 10..30 {
            assert!(!look(n, n - 9), "older than what is remembered");
            assert!(!look(n, n + 1), "its clock is another");
        }
        // It was frozen all the time.
        assert!(look(34, 34));
        for n in 0..20 {
            assert!(!look(34 + n, 34));
        }
    }

    #[test]
    fn groups_that_come_and_go_are_no_finding() {
        let mut course = Course::default();
        course.froze(Micros::ZERO);
        let mut watch = Watch::default();
        for n in 10..50 {
            let end = Micros::from_secs(n);
            let group = DomainId(n / 2);
            let sample = Some(Sample { end, used: 1.0 });
            assert!(!watch.look(end, [(group, &course)], sample));
        }
    }
}
