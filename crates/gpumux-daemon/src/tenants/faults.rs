//! What is remembered of faults in groups, and which client is to blame for one.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use gpumux_core::{Ring, TenantId};

use crate::{api::types::Fault, failure::Crash, groups::Key};

/// Faults that are remembered.
const MAX_FAULTS: usize = 32;
/// Groups and faulting clients that are remembered.
const MAX_KNOWN: usize = 256;

/// What is remembered of faults.
#[derive(Default)]
pub(super) struct Faults {
    /// The last ones.
    pub(super) last: Ring<Fault, MAX_FAULTS>,
    /// How many there were.
    pub(super) number: u64,
    /// What became of groups, those that have ended too, by name.
    pub(super) counts: BTreeMap<String, GroupCounts>,
    /// Crash counts.
    pub(super) faulting_clients: BTreeMap<CrashCount, u32>,
}

/// A group in figures.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct GroupCounts {
    /// Tenants in it.
    pub(crate) members: usize,
    /// Faults that ended its members' processes.
    pub(crate) faults: u64,
    /// How often it was there again after one, and how long that took.
    pub(crate) restarts: u64,
    pub(crate) restarting: Duration,
}

/// What is to blame for faults in a group, from one start to the next: its tenants of a name that was chosen, else those that run a program. A name
/// that was given is no sign: another program may have it next.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum CrashCount {
    Name(Key, String),
    Fingerprint(Key, String),
}

impl CrashCount {
    pub(super) fn of(
        group: Option<&Key>,
        name: Option<&str>,
        fingerprint: Option<&str>,
    ) -> Option<Self> {
        let group = group?.clone();
        match (name, fingerprint) {
            (Some(name), _) => Some(Self::Name(group, name.to_owned())),
            (None, Some(fingerprint)) => Some(Self::Fingerprint(group, fingerprint.to_owned())),
            (None, None) => None,
        }
    }

    fn uid(&self) -> u32 {
        let (Self::Name(group, _) | Self::Fingerprint(group, _)) = self;
        group.uid
    }
}

/// Forgets one of a full map if this key is new: the first of the user with most.
fn make_room<K: Ord + Clone, V>(all: &mut BTreeMap<K, V>, new: &K, uid: impl Fn(&K) -> u32) {
    if all.len() < MAX_KNOWN || all.contains_key(new) {
        return;
    }
    let mut users: BTreeMap<u32, usize> = BTreeMap::new();
    for key in all.keys() {
        *users.entry(uid(key)).or_default() += 1;
    }
    let most = users.into_iter().max_by_key(|(_, count)| *count);
    let most = most.map(|(user, _)| user);
    let surplus = all.keys().find(|key| Some(uid(key)) == most).cloned();
    if let Some(surplus) = surplus {
        all.remove(&surplus);
    }
}

impl Faults {
    /// Remembers a fault, what is to blame for it, and after how long its group was there again, if it was.
    pub(super) fn remember(
        &mut self,
        fault: Fault,
        blamed: Option<CrashCount>,
        took: Option<Duration>,
    ) {
        if let Some(crash_count) = blamed {
            make_room(&mut self.faulting_clients, &crash_count, CrashCount::uid);
            *self.faulting_clients.entry(crash_count).or_default() += 1;
        }
        self.number = fault.number;
        self.count(&fault.group, took);
        self.last.push(fault);
    }

    /// How often its like took a group down.
    pub(super) fn of(&self, crash_count: Option<&CrashCount>) -> u32 {
        crash_count
            .and_then(|it| self.faulting_clients.get(it))
            .copied()
            .unwrap_or(0)
    }

    /// A group has failed, and was there again after so long, if it was.
    fn count(&mut self, group: &str, took: Option<Duration>) {
        let group = group.to_owned();
        make_room(&mut self.counts, &group, |name| {
            let uid = name.split('/').next();
            uid.and_then(|uid| uid.parse().ok()).unwrap_or_default()
        });
        let counts = self.counts.entry(group).or_default();
        counts.faults += 1;
        if let Some(took) = took {
            counts.restarts += 1;
            counts.restarting += took;
        }
    }
}

/// `CUDA_ERROR_MPS_RPC_FAILURE`: a process's MPS server has ended.
const SERVER_LOST: u32 = 806;
/// Errors by which a process learns that its MPS server gave it up, the other being `CUDA_ERROR_MPS_CLIENT_TERMINATED`.
const COLLATERAL: [u32; 2] = [SERVER_LOST, 810];
/// `CUDA_ERROR_ECC_UNCORRECTABLE`, `NVLINK_UNCORRECTABLE`, `CONTAINED`: errors of the hardware, whichever client gets them. The last may
/// also be that of an access to a peer's memory, but proves none.
const HARDWARE: [u32; 3] = [214, 220, 226];
/// No client's fault.
pub(super) const SERVER: &str = "the group's server ended, or hung";
/// A process that goes away while a kernel of it runs ends the others, as a fault does.
const ENDED: &str = "it ended while its work was under way";

/// Whether its error may be the one by which the others were lost.
fn is_origin(crash: &Crash) -> bool {
    Crash::ends_others(crash.error) && !COLLATERAL.contains(&crash.error)
}

/// Whether a group was lost because its server was: its control daemon says so, or a member, and no client got an error of its own.
pub(super) fn server_lost(crashes: &[Crash], told: bool) -> bool {
    let told = told || crashes.iter().any(|it| it.error == SERVER_LOST);
    told && !crashes.iter().any(is_origin)
}

/// Which client caused a fault, if there is evidence, and which: the log of the group's server comes first; an error of the hardware is
/// none's; then a client that had ended in the middle of its work, then, of all members, the only one that got an error of its own.
pub(super) fn faulting_client(
    crashes: &[Crash],
    said: &str,
    members: &[TenantId],
    whose: impl Fn(u32) -> Option<TenantId>,
) -> (Option<TenantId>, String) {
    let named = said.lines().find_map(|line| {
        let (before, _) = line.split_once(" caused")?;
        before.rsplit_once("lient ")?.1.parse::<u32>().ok()
    });
    if let Some(pid) = named {
        return (whose(pid), format!("the server named process {pid}"));
    }
    if let Some(Crash { error, .. }) = crashes.iter().find(|it| HARDWARE.contains(&it.error)) {
        return (None, format!("error {error} is one of the hardware"));
    }
    let of = |which: &dyn Fn(&Crash) -> bool| -> BTreeSet<TenantId> {
        let some = crashes.iter().filter(|crash| which(crash));
        some.map(|crash| crash.tenant).collect()
    };
    let has_origin = crashes.iter().any(is_origin);
    // By the end of a client the others get an error of their own, not that of a lost server.
    if server_lost(crashes, false) {
        return (None, SERVER.into());
    }
    let suspects = of(&Crash::ended_at_work);
    match (suspects.len(), suspects.first()) {
        (0, _) => {}
        (1, Some(tenant)) => return (Some(*tenant), ENDED.into()),
        (several, _) => {
            let evidence = format!("{several} members ended while their work was under way");
            return (None, evidence);
        }
    }
    if !has_origin && crashes.iter().any(|it| it.error != 0) {
        return (None, SERVER.into());
    }
    let living = of(&|it| it.ended_ms.is_none());
    // A client of which nothing is known may be the one.
    if members.iter().all(|tenant| living.contains(tenant)) {
        let found = of(&is_origin);
        if let (1, Some(tenant)) = (found.len(), found.first()) {
            return (Some(*tenant), "only it got an error of its own".into());
        }
    }
    (None, "neither the server nor the errors name one".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn user_cannot_have_faulting_clients_of_others_forgotten() {
        let of = |uid, n| {
            let group = Key {
                uid,
                trust: "team".into(),
            };
            CrashCount::Name(group, format!("{n:03}"))
        };
        let mut faulting_clients = BTreeMap::from([(of(1, 0), 1), (of(1, 1), 2)]);
        for n in 0..2 * MAX_KNOWN {
            make_room(&mut faulting_clients, &of(2, n), CrashCount::uid);
            faulting_clients.insert(of(2, n), 1);
        }
        assert_eq!(faulting_clients.len(), MAX_KNOWN);
        assert_eq!(
            (faulting_clients[&of(1, 0)], faulting_clients[&of(1, 1)]),
            (1, 2)
        );
        make_room(&mut faulting_clients, &of(1, 0), CrashCount::uid);
        assert_eq!(faulting_clients.len(), MAX_KNOWN, "it has its place");
    }

    #[test]
    fn faulting_client_is_the_one_that_evidence_names() {
        let crash = |tenant, error, busy| Crash {
            group: "0/team".into(),
            tenant: TenantId(tenant),
            pid: 100 + tenant as u32,
            error,
            busy,
            age_ms: None,
            ended_ms: None,
        };
        let ended = |tenant, busy| Crash {
            ended_ms: Some(60),
            ..crash(tenant, 0, busy)
        };
        let said = "[1 server 7] Client 101 connected\n[2 server 7] Client 102 caused a fatal fault: error 700";
        let unknown = "Client 77 caused a fatal fault";
        // What is reported, the server's log, up to which number they are in the group, and the client that this names.
        for (crashes, said, last, named) in [
            (
                vec![crash(1, 700, true), crash(2, 700, true)],
                said,
                2,
                Some(2),
            ),
            (vec![crash(1, 700, true)], unknown, 1, None),
            (vec![crash(1, 700, true), crash(2, 700, true)], "", 2, None),
            // The server has gone, whichever client had work.
            (vec![crash(1, 806, true)], "", 1, None),
            (vec![crash(1, 806, false), ended(3, true)], "", 1, None),
            (vec![crash(1, 810, false), ended(3, true)], "", 1, Some(3)),
            (
                vec![crash(1, 810, true), crash(2, 719, false)],
                "",
                2,
                Some(2),
            ),
            (
                // A client that had work need not be the faulting client.
                vec![crash(1, 700, false), crash(2, 700, true)],
                "",
                2,
                None,
            ),
            (
                vec![crash(1, 700, true), crash(1, 700, true)],
                "",
                1,
                Some(1),
            ),
            // There is one more, of whom nothing is known.
            (vec![crash(1, 700, true)], "", 2, None),
            (vec![], "", 1, None),
            // The hardware has failed, whichever client gets that error.
            (vec![crash(1, 214, true)], "", 1, None),
            (vec![crash(1, 700, true), crash(2, 220, true)], "", 2, None),
            (
                vec![crash(1, 226, true), crash(2, 226, true)],
                said,
                2,
                Some(2),
            ),
            // A third one ended in the middle of its work, and is the first suspect, but not if the server reports another.
            (vec![crash(1, 700, true), ended(3, true)], "", 1, Some(3)),
            (vec![crash(2, 700, true), ended(3, true)], said, 2, Some(2)),
            (
                vec![crash(1, 700, true), ended(3, true), ended(4, true)],
                "",
                1,
                None,
            ),
            // One without work, and one that is not in the group any more, say nothing.
            (vec![crash(1, 700, true), ended(3, false)], "", 1, Some(1)),
            (vec![crash(1, 700, true), ended(3, false)], "", 2, None),
            (vec![crash(1, 700, true), crash(3, 810, false)], "", 2, None),
        ] {
            let whose = |pid: u32| {
                (101..=102)
                    .contains(&pid)
                    .then(|| TenantId(u64::from(pid) - 100))
            };
            let members: Vec<TenantId> = (1..=last).map(TenantId).collect();
            let (found, evidence) = faulting_client(&crashes, said, &members, whose);
            assert_eq!(
                found,
                named.map(TenantId),
                "{crashes:?} {said} {last}: {evidence}"
            );
        }
    }

    #[test]
    fn faults_of_groups_are_counted_and_bounded() {
        let mut faults = Faults::default();
        faults.count("0/team", None);
        for n in 1..=MAX_KNOWN {
            faults.count(&format!("1000/{n:04}"), None);
        }
        let took = Duration::from_millis(5);
        faults.count("0/team", Some(took));
        assert_eq!(faults.counts.len(), MAX_KNOWN);
        assert!(!faults.counts.contains_key("1000/0001"));
        let counts = GroupCounts {
            members: 0,
            faults: 2,
            restarts: 1,
            restarting: took,
        };
        assert_eq!(faults.counts["0/team"], counts);
    }
}
