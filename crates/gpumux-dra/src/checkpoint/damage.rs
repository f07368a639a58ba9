//! A file that a disk gives back with any damage: it is read, what is read is what was written, and it takes new claims.

use std::{collections::BTreeSet, fs};

use proptest::prelude::*;

use super::{FILE, HEADER, Store, tests::record};

/// What happens to the file's bytes, at a place given as a part of its length.
#[derive(Clone, Debug)]
enum Damage {
    Cut(f64),
    Write(f64, Vec<u8>),
    Insert(f64, Vec<u8>),
    Remove(f64, usize),
}

fn damage() -> impl Strategy<Value = Damage> {
    let at = || 0.0..1.0f64;
    let bytes = || {
        let byte = prop_oneof![any::<u8>(), Just(b'\n'), Just(b'+'), Just(b'-'), Just(b'0')];
        proptest::collection::vec(byte, 1..40)
    };
    prop_oneof![
        at().prop_map(Damage::Cut),
        (at(), bytes()).prop_map(|(at, bytes)| Damage::Write(at, bytes)),
        (at(), bytes()).prop_map(|(at, bytes)| Damage::Insert(at, bytes)),
        (at(), 1..400usize).prop_map(|(at, count)| Damage::Remove(at, count)),
    ]
}

fn apply(file: &mut Vec<u8>, damage: &Damage) {
    let place = |at: f64| (at * file.len() as f64) as usize;
    match damage {
        Damage::Cut(at) => file.truncate(place(*at)),
        Damage::Write(at, bytes) => {
            let at = place(*at);
            let length = bytes.len().min(file.len() - at);
            file[at..at + length].copy_from_slice(&bytes[..length]);
        }
        Damage::Insert(at, bytes) => {
            let at = place(*at);
            file.splice(at..at, bytes.iter().copied());
        }
        Damage::Remove(at, count) => {
            let at = place(*at);
            let end = (at + count).min(file.len());
            file.drain(at..end);
        }
    }
}

proptest! {
    #[test]
    fn damaged_file_gives_back_only_what_was_written(
        claims in 1..6usize,
        gone in 0..6usize,
        damages in proptest::collection::vec(damage(), 1..4),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(FILE);
        let store = Store::open(dir.path()).unwrap();
        let uids: Vec<String> = (0..claims).map(|n| format!("claim{n}")).collect();
        for uid in &uids {
            store.admit(&record(uid, 100)).unwrap();
        }
        if let Some(uid) = uids.get(gone) {
            store.remove(uid).unwrap();
        }
        drop(store);
        let mut file = fs::read(&path).unwrap();
        let head = file[..HEADER as usize].to_vec();
        damages.iter().for_each(|damage| apply(&mut file, damage));
        let same_head = file.starts_with(&head);
        fs::write(&path, file).unwrap();

        let store = match Store::open(dir.path()) {
            Ok(store) => store,
            // What does not begin as a checkpoint is none: its owner is asked to move it away.
            Err(error) => {
                prop_assert!(!same_head, "{}", error);
                prop_assert!(std::error::Error::source(&error).is_some_and(|it| it.to_string().contains("move it away")), "{:?}", error);
                return Ok(());
            }
        };
        let mut seen = BTreeSet::new();
        for found in store.all().unwrap() {
            let uid = &found.claim.uid;
            prop_assert_eq!(&*found, &record(uid, 100));
            prop_assert!(uids.contains(uid) && seen.insert(uid.clone()));
        }
        // It goes on: a new claim is kept, also for the next instance.
        store.write(&record("new", 100)).unwrap();
        store.sync().unwrap();
        let again = Store::open(dir.path()).unwrap();
        prop_assert_eq!(&*again.get("new").unwrap().unwrap(), &record("new", 100));
    }
}
