//! What users may take of something: places among connections, sessions, processes that look into theirs; and memory for their texts.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// A user that has fewer places has few.
const FEW: usize = 16;
/// Parts of all places, as reciprocals: those that only root may take, and those that only root and users with few may take.
const KEPT_FOR_ROOT: usize = 16;
const KEPT_FOR_FEW: usize = 8;

/// The user that all clients on TCP count as.
pub(crate) const ON_TCP: u32 = u32::MAX;

/// How many of all places stay free of this user, which has so many, so that others find some.
pub(crate) fn kept(all: usize, uid: u32, own: usize) -> usize {
    match own {
        _ if uid == 0 => 0,
        own if own < FEW => all / KEPT_FOR_ROOT,
        _ => all / KEPT_FOR_FEW,
    }
}

/// The beginning of a text that is kept for a client, in memory that is no larger: a request may be.
pub(crate) fn cut(text: String, most: usize) -> String {
    text[..text.floor_char_boundary(most)].into()
}

/// How many places each user has.
#[derive(Clone, Debug, Default)]
pub(crate) struct Quota(Arc<Mutex<BTreeMap<u32, usize>>>);

/// How many places are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Taken {
    /// By the user that wants one more.
    pub(crate) own: usize,
    pub(crate) all: usize,
}

/// A place; given back when dropped.
#[derive(Debug)]
pub(crate) struct Place {
    quota: Quota,
    uid: u32,
}

impl Quota {
    fn table(&self) -> MutexGuard<'_, BTreeMap<u32, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All places that are taken.
    pub(crate) fn all(&self) -> usize {
        self.table().values().sum()
    }

    /// Takes a place, unless what is taken is too much.
    ///
    /// # Errors
    /// What `check` says.
    pub(crate) fn take<E>(
        &self,
        uid: u32,
        check: impl FnOnce(Taken) -> Result<(), E>,
    ) -> Result<Place, E> {
        let mut table = self.table();
        let (own, all) = (table.get(&uid).copied().unwrap_or(0), table.values().sum());
        check(Taken { own, all })?;
        table.insert(uid, own + 1);
        let quota = self.clone();
        Ok(Place { quota, uid })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut table = self.quota.table();
        if let Some(own) = table.get_mut(&self.uid) {
            *own -= 1;
            if *own == 0 {
                table.remove(&self.uid);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_with_many_leave_places_to_root_and_others() {
        let free = |uid, own| 4096 - kept(4096, uid, own);
        assert_eq!(
            [free(0, 4000), free(7, 15), free(7, 16)],
            [4096, 3840, 3584]
        );
    }

    #[test]
    fn places_are_counted_by_user_until_they_are_dropped() {
        let quota = Quota::default();
        let take = |uid, most| quota.take(uid, |it| (it.own < most).then_some(()).ok_or(it));
        let held = [take(1, 2), take(1, 2), take(2, 2)];
        assert!(held.iter().all(Result::is_ok));
        assert_eq!(take(1, 2).unwrap_err(), Taken { own: 2, all: 3 });
        drop(held);
        assert_eq!((quota.all(), quota.table().len()), (0, 0));
    }
}
