//! What is known of programs: scaling profiles and what neighbours cost them, by user and fingerprint. Measured on
//! purpose (`gpumux profile`), and learnt from every run.
//!
//! The measure of throughput is what a program reports as done per second (`gpumux_progress`: tokens, samples), else how much
//! work (kernels, graphs) it gives to its device. A process can run ahead of its device by a queue's length only, so over seconds
//! that is what the device does. It says nothing about different programs, but compares one with itself.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    path::PathBuf,
    sync::{Mutex, MutexGuard, PoisonError, Weak},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use gpumux_core::{
    TenantId,
    space::{Observation, Program},
};
use serde::{Deserialize, Serialize};

use crate::{
    api::types,
    scheduler::View,
    store::{self, Writer},
    tenants::{Tenant, Tenants},
};

/// Programs of one user that are remembered.
const MAX_PROGRAMS: usize = 256;
/// How long one look at running programs takes.
const WINDOW: Duration = Duration::from_secs(2);
/// How often what was learnt is written to the disk, at most.
const SAVE: Duration = Duration::from_secs(30);

/// All programs.
#[derive(Debug)]
pub(crate) struct Programs {
    table: Mutex<Table>,
    writer: Writer,
}

#[derive(Debug, Default)]
struct Table {
    known: BTreeMap<(u32, String), Known>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Known {
    program: Program,
    /// Its curve was measured on purpose: runs don't change it.
    profiled: bool,
    /// Rates are of progress that it reports.
    #[serde(default)]
    reported: bool,
    /// Seconds since 1970.
    learnt: u64,
}

/// A program in the file.
#[derive(Serialize, Deserialize)]
struct Saved {
    uid: u32,
    fingerprint: String,
    known: Known,
}

impl Programs {
    pub(crate) fn load(file: PathBuf) -> Self {
        let saved: Vec<Saved> = store::read(&file);
        let known = saved
            .into_iter()
            .map(|it| ((it.uid, it.fingerprint), it.known));
        let table = Table {
            known: known.collect(),
        };
        Self {
            table: Mutex::new(table),
            writer: Writer::new(file),
        }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is known of one.
    pub(crate) fn find(&self, uid: u32, fingerprint: &str) -> Option<Program> {
        let table = self.table();
        let known = table.known.get(&(uid, fingerprint.to_owned()))?;
        Some(known.program.clone())
    }

    /// All, for people.
    pub(crate) fn list(&self) -> Vec<types::Program> {
        let table = self.table();
        let show = |((uid, fingerprint), known): (&(u32, String), &Known)| types::Program {
            fingerprint: fingerprint.clone(),
            uid: *uid,
            curve: known.program.curve().points().collect(),
            beside: known.program.beside().collect(),
            profiled: known.profiled,
            reported: known.reported,
            learnt: known.learnt,
        };
        table.known.iter().map(show).collect()
    }

    /// A curve that was measured on purpose.
    pub(crate) fn teach(&self, uid: u32, fingerprint: &str, curve: &types::NewCurve) {
        let mut table = self.table();
        let known = table.entry(uid, fingerprint);
        // What neighbours cost it was measured against the old one.
        known.program = Program::default();
        known.program.set_curve(curve.curve.iter().copied());
        (known.profiled, known.reported) = (true, curve.reported);
        self.writer.changed();
    }

    /// Forgets a program of this user (root: of any user); whether there was one.
    pub(crate) fn forget(&self, uid: u32, fingerprint: &str) -> bool {
        let mut table = self.table();
        let before = table.known.len();
        let its = |(owner, name): &(u32, String)| name == fingerprint && [0, *owner].contains(&uid);
        table.known.retain(|key, _| !its(key));
        let forgotten = table.known.len() < before;
        if forgotten {
            self.writer.changed();
        }
        forgotten
    }

    /// Learns from a while of a run, whose work is progress that the program `reported` or pieces of work. Progress replaces what
    /// was learnt of pieces; later pieces, such as those of a start, are no measure then. A profile stays in its unit.
    fn learn(&self, uid: u32, fingerprint: &str, seen: &Observation, reported: bool) {
        let mut table = self.table();
        let known = table.known.get(&(uid, fingerprint.to_owned()));
        let mut known = known.cloned().unwrap_or_default();
        if known.reported != reported {
            if known.reported || known.profiled {
                return;
            }
            known = Known::default();
        }
        if known.program.learn(seen, known.profiled) {
            let entry = table.entry(uid, fingerprint);
            (entry.program, entry.profiled, entry.reported) =
                (known.program, known.profiled, reported);
            self.writer.changed();
        }
    }

    /// Writes what is not written yet.
    ///
    /// # Errors
    /// The disk.
    pub(crate) async fn save(&self) -> io::Result<()> {
        self.writer.write(async { self.saved() }).await
    }

    pub(crate) async fn save_or_warn(&self) {
        if let Err(error) = self.save().await {
            tracing::warn!(%error, "a restarted daemon will not know what was learnt of programs");
        }
    }

    fn saved(&self) -> Vec<Saved> {
        let save = |((uid, fingerprint), known): (&(u32, String), &Known)| Saved {
            uid: *uid,
            fingerprint: fingerprint.clone(),
            known: known.clone(),
        };
        self.table().known.iter().map(save).collect()
    }
}

impl Table {
    /// The entry of a program, as one that is learnt of now; in place of the user's oldest if there are too many; those
    /// that were measured on purpose go last.
    fn entry(&mut self, uid: u32, fingerprint: &str) -> &mut Known {
        let key = (uid, fingerprint.to_owned());
        if !self.known.contains_key(&key) {
            let own = || self.known.iter().filter(|((owner, _), _)| *owner == uid);
            let oldest = own().min_by_key(|(_, known)| (known.profiled, known.learnt));
            let oldest = oldest.map(|(key, _)| key.clone());
            if let Some(oldest) = oldest.filter(|_| own().count() >= MAX_PROGRAMS) {
                self.known.remove(&oldest);
            }
        }
        let known = self.known.entry(key).or_default();
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        known.learnt = now.map_or(0, |it| it.as_secs());
        known
    }
}

/// What a tenant had done at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
struct Sight {
    domains: Vec<u64>,
    places: BTreeSet<Place>,
    work: u64,
    progress: u64,
    waited_us: u64,
    /// In which it had work itself.
    busy_us: u64,
}

/// A device, and a group there.
type Place = (String, Option<u64>);

impl Sight {
    /// Where it is, if one of its domains is like the other: all in one group, where a process has several, or just one. What
    /// several in turns do together says little about any of them.
    fn place(&self) -> Option<&Place> {
        let mut places = self.places.iter();
        let place = places.next().filter(|_| places.next().is_none())?;
        (self.domains.len() == 1 || place.1.is_some()).then_some(place)
    }
}

/// Learns of running programs, until the daemon ends.
pub(crate) async fn watch(tenants: Weak<Tenants>) {
    let mut before = (Instant::now(), BTreeMap::new());
    let mut beside = BTreeMap::new();
    let mut saved = Instant::now();
    loop {
        tokio::time::sleep(WINDOW).await;
        let Some(tenants) = tenants.upgrade() else {
            return;
        };
        let list = tenants.list().await;
        if list.iter().all(|it| it.placement.fingerprint.is_none()) {
            before.1.clear();
        } else {
            let Ok(view) = tenants.view().await else {
                return;
            };
            let now = (Instant::now(), sights(&view));
            let seconds = now.0.duration_since(before.0).as_secs_f64();
            let seen = observations(&list, &before.1, &now.1, seconds);
            for (tenant, seen) in steady(&mut beside, seen) {
                let fingerprint = tenant.placement.fingerprint.as_deref().unwrap_or_default();
                let reported = now.1.get(&tenant.id).is_some_and(|it| it.progress > 0);
                (tenants.programs).learn(tenant.uid, fingerprint, &seen, reported);
            }
            before = now;
        }
        if saved.elapsed() > SAVE {
            saved = Instant::now();
            tenants.programs.save_or_warn().await;
        }
    }
}

/// What each tenant had done until now.
fn sights(view: &View) -> BTreeMap<TenantId, Sight> {
    let mut sights: BTreeMap<TenantId, Sight> = BTreeMap::new();
    for (tenant, domain) in &view.domains {
        let sight = sights.entry(*tenant).or_default();
        let busy_us = view.busy_us.get(&domain.id).copied().unwrap_or(0);
        sight.domains.push(domain.id);
        sight.places.insert((domain.device.clone(), domain.group));
        let counted = view.counted.get(tenant);
        sight.work = counted.map_or(0, |counted| counted.work);
        sight.progress = counted.map_or(0, |counted| counted.progress);
        sight.waited_us = sight.waited_us.max(domain.waited_us);
        sight.busy_us = sight.busy_us.max(busy_us);
    }
    sights
}

/// What the programs that have a fingerprint did between two moments.
fn observations<'a>(
    tenants: &'a [Tenant],
    before: &BTreeMap<TenantId, Sight>,
    now: &BTreeMap<TenantId, Sight>,
    seconds: f64,
) -> Vec<(&'a Tenant, Observation)> {
    let mut found = Vec::new();
    for tenant in tenants {
        let (Some(was), Some(is)) = (before.get(&tenant.id), now.get(&tenant.id)) else {
            continue;
        };
        let Some(place) = is.place() else {
            continue;
        };
        if tenant.placement.fingerprint.is_none() || was.domains != is.domains {
            continue;
        }
        let work = match (was.progress, is.progress) {
            (_, 0) => is.work.saturating_sub(was.work),
            // It began to report in between.
            (0, _) => continue,
            (was, is) => is.saturating_sub(was),
        };
        // Neighbours that came or went in between count as there, and so does one that began nothing because its last piece of work still ran.
        let beside = |id: &TenantId| {
            let sight = now.get(id).or_else(|| before.get(id));
            let near = sight.is_some_and(|it| place.1.is_some() && it.places.contains(place));
            let done =
                |sights: &BTreeMap<TenantId, Sight>| sights.get(id).map(|it| (it.work, it.busy_us));
            *id != tenant.id && near && done(now) != done(before)
        };
        let others = now
            .keys()
            .chain(before.keys().filter(|it| !now.contains_key(it)));
        let seconds_of = |now: u64, before: u64| now.saturating_sub(before) as f64 / 1e6;
        let seen = Observation {
            seconds,
            waited: seconds_of(is.waited_us, was.waited_us),
            busy: seconds_of(is.busy_us, was.busy_us),
            work,
            percent: match place.1 {
                Some(_) => tenant.placement.sm_percent.unwrap_or(100),
                None => 100,
            },
            beside: others.filter(|id| beside(id)).count() as u32,
        };
        found.push((tenant, seen));
    }
    found
}

/// Those that had as many working neighbours as in the while before, which `beside` says: where one began or ended to work in between,
/// it is not known for how much of the time it did. So the first while of a program, in which it gets ready, is left out too.
fn steady<'a>(
    beside: &mut BTreeMap<TenantId, u32>,
    seen: Vec<(&'a Tenant, Observation)>,
) -> Vec<(&'a Tenant, Observation)> {
    let now = seen.iter().map(|(tenant, seen)| (tenant.id, seen.beside));
    let before = std::mem::replace(beside, now.collect());
    let same =
        |(tenant, seen): &(&Tenant, Observation)| before.get(&tenant.id) == Some(&seen.beside);
    seen.into_iter().filter(same).collect()
}

/// For fuzzing, see [`store::read_again`].
pub(crate) fn read_state(bytes: &[u8], sealed: bool) {
    store::read_again::<Vec<Saved>>(bytes, sealed);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sight(domain: u64, group: Option<u64>, work: u64) -> Sight {
        Sight {
            domains: vec![domain],
            places: [("GPU-0".into(), group)].into(),
            work,
            progress: 0,
            waited_us: 10 * work,
            busy_us: 1000 * work,
        }
    }

    fn tenant(id: u64, fingerprint: &str, sm_percent: Option<u32>) -> Tenant {
        let placement = types::Placement {
            fingerprint: Some(fingerprint.into()),
            sm_percent,
            ..types::Placement::default()
        };
        Tenant::example(TenantId(id), placement)
    }

    /// The tenant that was seen, at what percentage, and beside how many others.
    type Seen = (u64, u32, u32);

    #[test]
    fn members_alone_and_beside_others_are_told_apart() {
        let tenants = [
            tenant(1, "half", Some(50)),
            tenant(2, "whole", None),
            tenant(3, "turns", Some(50)),
        ];
        let look = |sights: &[(u64, Sight)]| -> BTreeMap<TenantId, Sight> {
            let all = sights.iter().cloned();
            all.map(|(id, sight)| (TenantId(id), sight)).collect()
        };
        let seen = |before: &[(u64, Sight)], now: &[(u64, Sight)]| -> Vec<Seen> {
            let (before, now) = (look(before), look(now));
            let all = observations(&tenants, &before, &now, 2.0);
            all.iter()
                .map(|(tenant, seen)| (tenant.id.0, seen.percent, seen.beside))
                .collect()
        };
        let (group, other) = (Some(7), Some(8));
        let before = [
            (1, sight(1, group, 0)),
            (2, sight(2, group, 0)),
            (3, sight(3, None, 0)),
            (4, sight(4, other, 0)),
        ];
        let now = |second: u64| {
            [
                (1, sight(1, group, 100)),
                (2, sight(2, group, second)),
                (3, sight(3, None, 100)),
                (4, sight(4, other, 100)),
            ]
        };
        // A neighbour without work disturbs no tenant.
        let idle = [(1, 50, 0), (2, 100, 1), (3, 100, 0)];
        assert_eq!(seen(&before, &now(0)), idle);
        let busy = [(1, 50, 1), (2, 100, 1), (3, 100, 0)];
        assert_eq!(seen(&before, &now(50)), busy);
        // One that began nothing was still at work.
        let mut long = now(0);
        long[1].1.busy_us = 2_000_000;
        assert_eq!(seen(&before, &long), busy);
        // A tenant that works in other places too is a neighbour, and nothing is learnt of it.
        let elsewhere = ("GPU-1".to_owned(), None);
        let mut mixed = (before.clone(), now(50));
        for sights in [&mut mixed.0, &mut mixed.1] {
            sights[1].1.places.insert(elsewhere.clone());
            sights[1].1.domains.push(9);
        }
        assert_eq!(seen(&mixed.0, &mixed.1), [(1, 50, 1), (3, 100, 0)]);
        // A tenant that came or went meanwhile counts as there.
        assert_eq!(seen(&before[..1], &now(50)[..2]), [(1, 50, 1)]);
        assert_eq!(seen(&before[..2], &now(50)[..1]), [(1, 50, 1)]);
        // Another process is another matter.
        let again = [(1, sight(9, group, 200))];
        assert_eq!(seen(&before[..1], &again), []);
    }

    fn programs(dir: &tempfile::TempDir) -> Programs {
        Programs::load(dir.path().join("programs.json"))
    }

    fn curve(points: &[(u32, f64)]) -> types::NewCurve {
        types::NewCurve {
            curve: points.to_vec(),
            reported: false,
        }
    }

    fn seen(work: u64, beside: u32) -> Observation {
        Observation {
            seconds: 1.0,
            waited: 0.0,
            busy: 1.0,
            work,
            percent: 100,
            beside,
        }
    }

    #[test]
    fn a_while_in_which_a_neighbour_came_is_left_out() {
        let tenant = tenant(1, "train", None);
        let mut beside = BTreeMap::new();
        let mut counts = |others: u32| -> usize {
            let seen = vec![(&tenant, seen(100, others))];
            steady(&mut beside, seen).len()
        };
        assert_eq!(
            [0, 0, 1, 1, 2, 0, 0].map(&mut counts),
            [0, 1, 0, 1, 0, 0, 1]
        );
        assert_eq!(steady(&mut beside, Vec::new()).len(), 0);
        assert!(beside.is_empty(), "a tenant that is gone is forgotten");
    }

    #[test]
    fn idle_program_is_not_slowed_down_by_a_busy_neighbour() {
        let tenants = [tenant(1, "rests", None), tenant(2, "works", None)];
        let look = |works: u64, busy_us: u64| -> BTreeMap<TenantId, Sight> {
            let mut rests = sight(1, Some(7), works / 10);
            rests.busy_us = busy_us;
            [(1, rests), (2, sight(2, Some(7), works))]
                .map(|(id, sight)| (TenantId(id), sight))
                .into()
        };
        let learnt = |busy_us: u64| -> Vec<bool> {
            let (before, now) = (look(0, 0), look(2000, busy_us));
            let all = observations(&tenants, &before, &now, 2.0);
            all.iter()
                .map(|(_, seen)| Program::default().learn(seen, false))
                .collect()
        };
        assert_eq!(learnt(200_000), [false, true]);
        assert_eq!(learnt(1_900_000), [true, true]);
    }

    #[tokio::test]
    async fn what_the_disk_refused_is_written_later() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("late/programs.json");
        let programs = Programs::load(file.clone());
        programs.teach(1000, "train", &curve(&[(100, 1.0)]));
        assert!(programs.save().await.is_err());
        std::fs::create_dir(dir.path().join("late")).unwrap();
        programs.save().await.unwrap();
        assert_eq!(Programs::load(file.clone()).list(), programs.list());
        assert_eq!(programs.list().len(), 1);
        std::fs::remove_dir_all(dir.path().join("late")).unwrap();
        assert!(programs.forget(1000, "train"));
        assert!(programs.save().await.is_err());
        std::fs::create_dir(dir.path().join("late")).unwrap();
        programs.save().await.unwrap();
        assert!(file.exists(), "that nothing is known any more");
    }

    #[tokio::test]
    async fn what_was_taught_and_learnt_is_known_to_the_next_daemon() {
        let dir = tempfile::tempdir().unwrap();
        let first = programs(&dir);
        first.teach(1000, "train", &curve(&[(25, 500.0), (100, 1000.0)]));
        first.learn(1000, "train", &seen(400, 1), false);
        // What is seen of runs leaves a curve that was measured on purpose alone.
        first.learn(1000, "train", &seen(9000, 0), false);
        first.learn(1000, "serve", &seen(100, 0), false);
        first.learn(1000, "rests", &seen(1, 0), false);
        first.save().await.unwrap();
        let next = programs(&dir);
        let list = next.list();
        assert_eq!(list, first.list());
        let names: Vec<_> = list.iter().map(|it| &*it.fingerprint).collect();
        assert_eq!(names, ["serve", "train"]);
        assert_eq!(list[1].curve, [(25, 500.0), (100, 1000.0)]);
        assert_eq!(list[1].beside, [(1, 0.4)]);
        assert_eq!((list[0].profiled, list[1].profiled), (false, true));
        assert!(next.find(1000, "train").unwrap().utility().is_some());
        assert!(next.find(1001, "train").is_none(), "it is another user's");
    }

    #[test]
    fn reported_progress_replaces_pieces_of_work_for_good() {
        let dir = tempfile::tempdir().unwrap();
        let programs = programs(&dir);
        let rate = || programs.list()[0].curve[0].1;
        programs.learn(1000, "serve", &seen(9000, 0), false);
        assert_eq!((rate(), programs.list()[0].reported), (9000.0, false));
        programs.learn(1000, "serve", &seen(500, 0), true);
        // Its next start has work before it reports.
        programs.learn(1000, "serve", &seen(9000, 0), false);
        assert_eq!((rate(), programs.list()[0].reported), (500.0, true));
        // Neighbours are compared with a profile only in its unit.
        for unit in [false, true] {
            let profile = types::NewCurve {
                reported: unit,
                ..curve(&[(25, 100.0), (100, 1000.0)])
            };
            programs.teach(1000, "serve", &profile);
            programs.learn(1000, "serve", &seen(700, 1), !unit);
            assert_eq!(programs.list()[0].beside, []);
            programs.learn(1000, "serve", &seen(500, 1), unit);
            assert_eq!(programs.list()[0].beside, [(1, 0.5)]);
            assert_eq!(programs.list()[0].curve, profile.curve);
        }
    }

    #[test]
    fn progress_is_the_work_of_a_program_that_reports_it() {
        let tenants = [tenant(1, "serve", None)];
        let work = |was: u64, is: u64| -> Vec<u64> {
            let look = |progress: u64, work: u64| {
                let sight = Sight {
                    progress,
                    ..sight(1, None, work)
                };
                BTreeMap::from([(TenantId(1), sight)])
            };
            let seen = observations(&tenants, &look(was, 1000), &look(is, 3000), 2.0);
            seen.iter().map(|(_, seen)| seen.work).collect()
        };
        assert_eq!(work(0, 0), [2000]);
        assert_eq!(work(40, 100), [60]);
        assert_eq!(work(40, 40), [0]);
        assert!(work(0, 100).is_empty(), "the unit has changed in between");
    }

    #[tokio::test]
    async fn only_its_owner_and_root_make_one_forgotten() {
        let dir = tempfile::tempdir().unwrap();
        let programs = programs(&dir);
        for uid in [1000, 1001] {
            programs.teach(uid, "train", &curve(&[(100, 1.0)]));
        }
        assert!(!programs.forget(1002, "train"));
        assert!(programs.forget(1000, "train"));
        assert!(programs.find(1001, "train").is_some());
        assert!(programs.forget(0, "train"));
        programs.save().await.unwrap();
        assert_eq!(self::programs(&dir).list(), []);
    }

    #[test]
    fn a_users_programs_are_bounded_and_the_oldest_goes() {
        let mut table = Table::default();
        table.entry(1, "other");
        for n in 0..=MAX_PROGRAMS {
            table.entry(0, &format!("{n:04}")).learnt = n as u64;
        }
        assert_eq!(table.known.len(), MAX_PROGRAMS + 1);
        let knows = |uid, name: &str| table.known.contains_key(&(uid, name.to_owned()));
        assert!(knows(1, "other") && knows(0, "0001") && !knows(0, "0000"));
        // What was measured on purpose stays longest.
        table.entry(0, "0001").profiled = true;
        table.entry(0, "0001").learnt = 1;
        table.entry(0, "new");
        let knows = |uid, name: &str| table.known.contains_key(&(uid, name.to_owned()));
        assert!(knows(0, "0001") && !knows(0, "0002"));
    }
}
