//! What is known of programs: scaling profiles and what they need of the memory's bandwidth, by user and fingerprint. Measured on
//! purpose (`gpumux profile`); profiles are learnt from every run, too.
//!
//! The measure of throughput is what a program reports as done per second (`gpumux_progress`: tokens, samples), else how much
//! work (kernels, graphs) it gives to its device. A process can run ahead of its device by a queue's length only, so over seconds
//! that is what the device does. It says nothing about different programs, but compares one with itself.

use std::{
    collections::BTreeMap,
    io,
    path::PathBuf,
    sync::{Mutex, MutexGuard, PoisonError},
};

use gpumux_core::space::{Observation, Program};
use serde::{Deserialize, Serialize};

use crate::{
    api::types,
    store::{self, Writer},
};

/// Programs of one user that are remembered.
const MAX_PROGRAMS: usize = 256;

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
            bandwidth: known.program.bandwidth(),
            profiled: known.profiled,
            reported: known.reported,
            learnt: known.learnt,
        };
        table.known.iter().map(show).collect()
    }

    /// A curve that was measured on purpose, `now` seconds after 1970.
    pub(crate) fn teach(&self, uid: u32, fingerprint: &str, curve: &types::NewCurve, now: u64) {
        let mut table = self.table();
        let known = table.entry(uid, fingerprint, now);
        known.program = Program::measured(curve.curve.iter().copied(), curve.bandwidth);
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
    pub(crate) fn learn(
        &self,
        uid: u32,
        fingerprint: &str,
        seen: &Observation,
        reported: bool,
        now: u64,
    ) {
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
            let entry = table.entry(uid, fingerprint, now);
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
    fn entry(&mut self, uid: u32, fingerprint: &str, now: u64) -> &mut Known {
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
        known.learnt = now;
        known
    }
}

/// For fuzzing, see [`store::read_again`].
pub(crate) fn read_state(bytes: &[u8], sealed: bool) {
    store::read_again::<Vec<Saved>>(bytes, sealed);
}

#[cfg(test)]
mod tests {
    use gpumux_core::space::Bandwidth;

    use super::*;

    fn programs(dir: &tempfile::TempDir) -> Programs {
        Programs::load(dir.path().join("programs.json"))
    }

    fn curve(points: &[(u32, f64)]) -> types::NewCurve {
        types::NewCurve {
            curve: points.to_vec(),
            reported: false,
            bandwidth: None,
        }
    }

    fn seen(work: u64) -> Observation {
        Observation {
            seconds: 1.0,
            waited: 0.0,
            busy: 1.0,
            work,
            percent: 100,
        }
    }

    #[tokio::test]
    async fn what_the_disk_refused_is_written_later() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("late/programs.json");
        let programs = Programs::load(file.clone());
        programs.teach(1000, "train", &curve(&[(100, 1.0)]), 7);
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
        let bandwidth = Some(Bandwidth {
            demand: 0.25,
            sensitivity: 0.5,
        });
        let profile = types::NewCurve {
            bandwidth,
            ..curve(&[(25, 500.0), (100, 1000.0)])
        };
        first.teach(1000, "train", &profile, 7);
        // What is seen of runs leaves a curve that was measured on purpose alone.
        first.learn(1000, "train", &seen(9000), false, 7);
        first.learn(1000, "serve", &seen(100), false, 7);
        first.learn(1000, "rests", &seen(1), false, 7);
        first.save().await.unwrap();
        let next = programs(&dir);
        let list = next.list();
        assert_eq!(list, first.list());
        let names: Vec<_> = list.iter().map(|it| &*it.fingerprint).collect();
        assert_eq!(names, ["serve", "train"]);
        assert_eq!(list[1].curve, [(25, 500.0), (100, 1000.0)]);
        assert_eq!(list[1].bandwidth, bandwidth);
        assert_eq!((list[0].profiled, list[1].profiled), (false, true));
        assert!(next.find(1000, "train").unwrap().utility().is_some());
        assert!(next.find(1001, "train").is_none(), "it is another user's");
    }

    #[test]
    fn reported_progress_replaces_pieces_of_work_for_good() {
        let dir = tempfile::tempdir().unwrap();
        let programs = programs(&dir);
        let rate = || programs.list()[0].curve[0].1;
        programs.learn(1000, "serve", &seen(9000), false, 7);
        assert_eq!((rate(), programs.list()[0].reported), (9000.0, false));
        programs.learn(1000, "serve", &seen(500), true, 7);
        // Its next start has work before it reports.
        programs.learn(1000, "serve", &seen(9000), false, 7);
        assert_eq!((rate(), programs.list()[0].reported), (500.0, true));
        // A profile stays in its unit.
        for unit in [false, true] {
            let profile = types::NewCurve {
                reported: unit,
                ..curve(&[(25, 100.0), (100, 1000.0)])
            };
            programs.teach(1000, "serve", &profile, 7);
            for reported in [false, true] {
                programs.learn(1000, "serve", &seen(700), reported, 7);
            }
            let kept = &programs.list()[0];
            assert_eq!((&kept.curve, kept.reported), (&profile.curve, unit));
        }
    }

    #[tokio::test]
    async fn only_its_owner_and_root_make_one_forgotten() {
        let dir = tempfile::tempdir().unwrap();
        let programs = programs(&dir);
        for uid in [1000, 1001] {
            programs.teach(uid, "train", &curve(&[(100, 1.0)]), 7);
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
        table.entry(1, "other", 0);
        for n in 0..=MAX_PROGRAMS {
            table.entry(0, &format!("{n:04}"), n as u64);
        }
        assert_eq!(table.known.len(), MAX_PROGRAMS + 1);
        let knows = |uid, name: &str| table.known.contains_key(&(uid, name.to_owned()));
        assert!(knows(1, "other") && knows(0, "0001") && !knows(0, "0000"));
        // What was measured on purpose stays longest.
        table.entry(0, "0001", 1).profiled = true;
        table.entry(0, "new", MAX_PROGRAMS as u64 + 1);
        let knows = |uid, name: &str| table.known.contains_key(&(uid, name.to_owned()));
        assert!(knows(0, "0001") && !knows(0, "0002"));
    }
}
