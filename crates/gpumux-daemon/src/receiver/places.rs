//! How many connections may have a relay, and whose.

use std::io;

use crate::quota::{Place, Quota, kept};

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
    users: Quota,
}

impl Places {
    pub(super) fn new(limit: usize) -> Self {
        Self {
            limit,
            users: Quota::default(),
        }
    }

    /// Takes a place for a connection of this user.
    ///
    /// # Errors
    /// When the user, or all together, have as many as they may.
    pub(super) fn take(&self, uid: u32) -> Result<Place, Refusal> {
        self.users.take(uid, |taken| {
            let own = taken.own;
            let kept = kept(self.limit, uid, own);
            if uid != 0 && own >= self.limit / OF_ONE {
                return Err(Refusal::OfUser { uid, own });
            }
            match taken.all < self.limit - kept {
                true => Ok(()),
                false => Err(Refusal::OfAll(taken.all)),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fill(places: &Places, uid: u32) -> Vec<Place> {
        std::iter::from_fn(|| places.take(uid).ok()).collect()
    }

    #[test]
    fn one_user_gets_half_and_root_the_rest() {
        let places = Places::new(160);
        let mut users = fill(&places, 1000);
        assert_eq!(users.len(), 80);
        let refusal = places.take(1000).unwrap_err().to_string();
        assert!(
            refusal.starts_with("user 1000 has 80 connections"),
            "{refusal}"
        );
        let roots = fill(&places, 0);
        assert_eq!(roots.len(), 80);
        users.pop();
        assert!(places.take(1000).is_err());
        assert!(places.take(0).is_ok());
    }

    #[test]
    fn users_with_few_and_root_find_places_beside_full_ones() {
        let places = Places::new(1600);
        let first = fill(&places, 1000);
        assert_eq!(first.len(), 800);
        let second = fill(&places, 1001);
        assert_eq!(second.len(), 600, "an eighth is kept");
        let refusal = places.take(1001).unwrap_err().to_string();
        assert!(refusal.starts_with("1400 connections"), "{refusal}");
        let few: Vec<_> = (2000..2008).map(|uid| fill(&places, uid)).collect();
        let few = few.iter().map(Vec::len).collect::<Vec<_>>();
        assert_eq!(few, [16, 16, 16, 16, 16, 16, 4, 0], "a sixteenth is root's");
    }
}
