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

/// The shortest time over which NVML is taken to measure a process's use, whichever that is: a second, less a tenth. On an H200 (driver
/// 580.159.04) tenants of class batch fit that; their samples were not measured. NVML's documentation has 1/6 s to 1 s by product
/// (`nvmlDeviceGetUtilizationRates`): with shorter samples a process whose turns are longer than these could be found falsely.
const SAMPLE: Micros = Micros::from_millis(900);

/// A measurement may begin so long before the reading before it: two samples of a second.
const STALE: Micros = Micros::from_secs(2);

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

    /// The largest part of any time of a [`SAMPLE`] or longer, between these moments, in which it may have run.
    #[must_use]
    pub fn most(&self, from: Micros, to: Micros) -> f64 {
        if to.saturating_sub(from) < SAMPLE {
            return 1.0;
        }
        let current = self.since.map(|since| (since, to));
        let frozen = self.frozen.iter().copied().chain(current);
        let clipped = frozen.map(|(since, until)| (since.max(from), until.min(to)));
        let frozen: Vec<(Micros, Micros)> = clipped.filter(|(a, b)| a < b).collect();
        let ran = |a: Micros, b: Micros| {
            let first = frozen.partition_point(|(_, until)| *until <= a);
            let within = frozen[first..].iter().take_while(|(since, _)| *since < b);
            let off = within.map(|(since, until)| until.min(&b).saturating_sub(*since.max(&a)));
            1.0 - off.map(Micros::as_secs_f64).sum::<f64>() / b.saturating_sub(a).as_secs_f64()
        };
        // The part is largest for a time that begins and ends where a freeze does, or is as short as can be. Of one that is twice
        // as long a half has as large a part.
        let mut ends = vec![from, to];
        ends.extend(frozen.iter().flat_map(|(since, until)| [*since, *until]));
        ends.sort_unstable();
        let mut most = 0.0_f64;
        for (at, a) in ends.iter().enumerate() {
            let short = [(*a, *a + SAMPLE), (a.saturating_sub(SAMPLE), *a)];
            let inside = |(a, b): &(Micros, Micros)| {
                *a >= from && *b <= to && b.saturating_sub(*a) == SAMPLE
            };
            let long = ends[at..].iter().map(|b| (*a, *b));
            let long = long
                .skip_while(|(a, b)| b.saturating_sub(*a) < SAMPLE)
                .take_while(|(a, b)| b.saturating_sub(*a) <= SAMPLE + SAMPLE);
            for (a, b) in short.into_iter().filter(inside).chain(long) {
                most = most.max(ran(a, b));
            }
        }
        most
    }
}

/// What the driver measured of processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reading {
    /// When it was read before.
    pub since: Micros,
    /// When it was read.
    pub at: Micros,
}

impl Reading {
    /// The time of which it may tell.
    fn covers(&self) -> (Micros, Micros) {
        (self.since.saturating_sub(STALE), self.at)
    }
}

/// Compares the device time that the driver measured for one process on one device with the time in which it was not frozen.
#[derive(Clone, Debug, Default)]
pub struct Watch {
    groups: BTreeSet<DomainId>,
    /// Since when it has just these groups.
    since: Option<Micros>,
    /// The last reading.
    read: Option<Micros>,
    /// Device time beyond what was permitted, in seconds.
    stolen: f64,
}

impl Watch {
    /// A reading: `courses` of all groups that it has now, and the part of the time in which its kernels ran; none: that was not
    /// measured, or is no evidence. Whether it ran while it was frozen.
    pub fn look<'a>(
        &mut self,
        reading: Reading,
        courses: impl IntoIterator<Item = (DomainId, &'a Course)>,
        used: Option<f64>,
    ) -> bool {
        // The same once more.
        if self.read.is_some_and(|read| read >= reading.at) {
            return false;
        }
        self.read = Some(reading.at);
        let courses: BTreeMap<DomainId, &Course> = courses.into_iter().collect();
        if !courses.keys().eq(&self.groups) || self.since.is_none() {
            self.groups = courses.keys().copied().collect();
            // Of one that ended meanwhile it is not known when.
            (self.since, self.stolen) = (Some(reading.at), 0.0);
        }
        let (from, to) = reading.covers();
        let Some(used) = used.filter(|_| self.since.is_some_and(|since| since <= from)) else {
            self.stolen = 0.0;
            return false;
        };
        // It may have used that in any case.
        if used <= TOLERANCE && self.stolen == 0.0 {
            return false;
        }
        let most: f64 = courses.values().map(|it| it.most(from, to)).sum();
        let time = to.saturating_sub(reading.since).min(SECOND);
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

        /// What a driver answers that keeps samples of this length, which end at `phase`, and only those with use.
        fn nvml(&self, since: u64, sample: u64, phase: u64) -> f64 {
            let mut sums = (0.0, 0.0);
            let mut end = (self.now - phase.min(self.now)) / sample * sample;
            loop {
                // Also one that began before, as the first that is new.
                let percent = (self.used(end.saturating_sub(sample), end.max(1)) * 100.0).ceil();
                if percent > 0.0 {
                    sums = (sums.0 + percent / 100.0, sums.1 + 1.0);
                }
                if end <= since + sample {
                    break;
                }
                end -= sample;
            }
            sums.0 / f64::max(sums.1, 1.0)
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
            sample in 900_000u64..=1_000_000,
            phase in 0u64..1_000_000,
            looks in vec(200_000u64..4_000_000, 1..50),
        ) {
            let mut world = World::new();
            let mut watch = Watch::default();
            let mut looks = looks.into_iter().cycle();
            let (mut read, mut due) = (0, 1_000_000);
            for (n, (pause, took, part)) in turns.into_iter().enumerate() {
                let end = world.now + pause;
                while due < end {
                    world.now = world.now.max(due);
                    let used = world.nvml(read, sample, phase);
                    let reading = Reading { since: Micros(read), at: Micros(world.now) };
                    let courses = [(DomainId(1), &world.course)];
                    prop_assert!(!watch.look(reading, courses, Some(used)), "{} {used}", world.now);
                    read = world.now;
                    due = world.now + looks.next().unwrap();
                }
                world.now = world.now.max(end);
                world.control(n % 2 == 0, took, part);
            }
        }

        /// One that thaws itself soon after each freeze, alone on the device in its turns and half of it in those of others.
        #[test]
        fn process_that_thaws_itself_is_found_within_8_s(
            quantum in 10_000u64..=300_000,
            others in 2u64..5,
            sample in 900_000u64..=1_000_000,
            phase in 0u64..1_000_000,
        ) {
            let mut world = World::new();
            let mut watch = Watch::default();
            let (mut read, mut found) = (0, Vec::new());
            while world.now < 30_000_000 {
                world.control(false, 500, 0.5);
                world.now += quantum;
                world.control(true, 500, 0.5);
                world.now += 1_000;
                world.own(true);
                world.now += quantum * others;
                if world.now >= read + 1_000_000 {
                    let used = world.nvml(read, sample, phase);
                    let reading = Reading { since: Micros(read), at: Micros(world.now) };
                    read = world.now;
                    if watch.look(reading, [(DomainId(1), &world.course)], Some(used)) {
                        found.push(world.now);
                    }
                }
            }
            prop_assert!(found.first().is_some_and(|at| *at < 8_000_000), "{found:?}");
            // And again and again while it goes on.
            prop_assert!(found.len() >= 5, "{found:?}");
        }
    }

    #[test]
    fn time_that_is_not_known_to_be_frozen_may_have_been_used() {
        let ms = Micros::from_millis;
        let mut course = Course::default();
        assert_eq!(course.most(ms(0), ms(1000)), 1.0);
        course.froze(ms(1000));
        course.froze(ms(1500));
        assert_eq!(course.most(ms(1000), ms(3000)), 0.0);
        assert!(course.most(ms(950), ms(3000)) < 0.31);
        course.may_run(ms(3000));
        assert_eq!(course.most(ms(1000), ms(3000)), 0.0);
        assert_eq!(course.most(ms(1000), ms(4000)), 1.0);
        // Too short to tell.
        assert_eq!(course.most(ms(2000), ms(2100)), 1.0);
        // Long ago.
        course.froze(ms(20_000));
        course.may_run(ms(21_000));
        assert_eq!(course.most(ms(1000), ms(3000)), 1.0);
    }

    #[test]
    fn reading_that_comes_twice_or_without_measurement_is_no_finding() {
        let mut course = Course::default();
        course.froze(SECOND);
        let mut watch = Watch::default();
        let mut look = |since, at, used| {
            let reading = Reading {
                since: Micros::from_secs(since),
                at: Micros::from_secs(at),
            };
            watch.look(reading, [(DomainId(1), &course)], used)
        };
        for n in 1..20 {
            assert!(!look(n, n + 1, None));
        }
        // It was frozen all the time.
        assert!(look(20, 21, Some(1.0)));
        for _ in 0..20 {
            assert!(!look(20, 21, Some(1.0)));
        }
    }

    #[test]
    fn groups_that_come_and_go_are_no_finding() {
        let mut course = Course::default();
        course.froze(Micros::ZERO);
        let mut watch = Watch::default();
        for n in 10..50 {
            let reading = Reading {
                since: Micros::from_secs(n),
                at: Micros::from_secs(n + 1),
            };
            let group = DomainId(n / 3);
            assert!(!watch.look(reading, [(group, &course)], Some(1.0)));
        }
    }
}
