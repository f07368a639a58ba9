//! How many connections may have a relay, and whose.

use std::{collections::BTreeMap, io};

/// A user that has fewer has few: for those, one place in [`KEPT_FOR_FEW`] is kept.
const FEW: usize = 16;
/// Parts of all places, as reciprocals: those that only root may take, and those that only root and users with few connections may take.
const KEPT_FOR_ROOT: usize = 16;
const KEPT_FOR_FEW: usize = 8;
/// The part of all places that one user may have, as a reciprocal.
const OF_ONE: usize = 2;

/// Why a connection gets no relay.
#[derive(Debug, thiserror::Error)]
pub(super) enum Refusal {
    #[error(
        "user {uid} has {own} connections to the daemon open, and may have no more: end programs of this user, and file systems of its \
         own that do not answer"
    )]
    OfUser { uid: u32, own: usize },
    #[error(
        "{0} connections to the daemon are open, and the rest is for root and users with few: end programs, or raise `max_sessions` in \
         the daemon's configuration"
    )]
    OfAll(usize),
    #[error(
        "the daemon cannot start a process for this connection ({0}): end programs, or raise the limit of processes where the daemon runs"
    )]
    NoProcess(#[from] io::Error),
}

/// The places of all relays, also of those that hang.
#[derive(Debug)]
pub(super) struct Places {
    limit: usize,
    users: BTreeMap<u32, usize>,
}

impl Places {
    pub(super) fn new(limit: usize) -> Self {
        Self {
            limit,
            users: BTreeMap::new(),
        }
    }

    /// Takes a place for a connection of this user.
    ///
    /// # Errors
    /// When the user, or all together, have as many as they may.
    pub(super) fn take(&mut self, uid: u32) -> Result<(), Refusal> {
        let all: usize = self.users.values().sum();
        let own = self.users.get(&uid).copied().unwrap_or(0);
        let kept = match own {
            _ if uid == 0 => 0,
            own if own < FEW => self.limit / KEPT_FOR_ROOT,
            _ => self.limit / KEPT_FOR_FEW,
        };
        if uid != 0 && own >= self.limit / OF_ONE {
            return Err(Refusal::OfUser { uid, own });
        }
        if all >= self.limit - kept {
            return Err(Refusal::OfAll(all));
        }
        self.users.insert(uid, own + 1);
        Ok(())
    }

    /// Gives a place back.
    pub(super) fn give_back(&mut self, uid: u32) {
        let own = self.users.get(&uid).copied().unwrap_or(0);
        match own {
            0 | 1 => self.users.remove(&uid),
            _ => self.users.insert(uid, own - 1),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fill(places: &mut Places, uid: u32) -> usize {
        std::iter::repeat_with(|| places.take(uid))
            .take_while(Result::is_ok)
            .count()
    }

    #[test]
    fn one_user_gets_half_and_root_the_rest() {
        let mut places = Places::new(160);
        assert_eq!(fill(&mut places, 1000), 80);
        let refusal = places.take(1000).unwrap_err().to_string();
        assert!(
            refusal.starts_with("user 1000 has 80 connections"),
            "{refusal}"
        );
        assert_eq!(fill(&mut places, 0), 80);
        places.give_back(1000);
        assert!(places.take(0).is_ok() && places.take(1000).is_err());
    }

    #[test]
    fn users_with_few_and_root_find_places_beside_full_ones() {
        let mut places = Places::new(1600);
        assert_eq!(fill(&mut places, 1000), 800);
        assert_eq!(fill(&mut places, 1001), 600, "an eighth is kept");
        let refusal = places.take(1001).unwrap_err().to_string();
        assert!(refusal.starts_with("1400 connections"), "{refusal}");
        let few: Vec<usize> = (2000..2008).map(|uid| fill(&mut places, uid)).collect();
        assert_eq!(few, [16, 16, 16, 16, 16, 16, 4, 0], "a sixteenth is root's");
        assert_eq!(fill(&mut places, 0), 100);
    }
}
