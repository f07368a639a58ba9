//! Learns of running programs: what each does while no other member of its group has work, by its fingerprint.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Weak,
    time::{Duration, Instant},
};

use gpumux_core::{TenantId, space::Observation};

use super::{model::Tenant, registry::Tenants};
use crate::{clock::since_1970, scheduler::View};

/// How long one look at running programs takes.
const WINDOW: Duration = Duration::from_secs(2);
/// How often what was learnt is written to the disk, at most.
const SAVE: Duration = Duration::from_secs(30);

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
    /// several that share in time do together says little about any of them.
    fn place(&self) -> Option<&Place> {
        let mut places = self.places.iter();
        let place = places.next().filter(|_| places.next().is_none())?;
        (self.domains.len() == 1 || place.1.is_some()).then_some(place)
    }
}

/// Learns of running programs, until the daemon ends.
pub(super) async fn watch(tenants: Weak<Tenants>) {
    let mut before = (Instant::now(), BTreeMap::new());
    let mut alone = BTreeSet::new();
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
            for (tenant, seen) in steady(&mut alone, seen) {
                let fingerprint = tenant.placement.fingerprint.as_deref().unwrap_or_default();
                let reported = now.1.get(&tenant.id).is_some_and(|it| it.progress > 0);
                let time = since_1970().as_secs();
                (tenants.programs).learn(tenant.uid, fingerprint, &seen, reported, time);
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

/// What the programs that have a fingerprint did between two moments, each without a neighbour that worked.
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
        if now.keys().chain(before.keys()).any(beside) {
            continue;
        }
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
        };
        found.push((tenant, seen));
    }
    found
}

/// Those that were `alone` in the while before, too: where a neighbour ended its work in between, it is not known when. So the
/// first while of a program, in which it gets ready, is left out too.
fn steady<'a>(
    alone: &mut BTreeSet<TenantId>,
    seen: Vec<(&'a Tenant, Observation)>,
) -> Vec<(&'a Tenant, Observation)> {
    let now = seen.iter().map(|(tenant, _)| tenant.id);
    let before = std::mem::replace(alone, now.collect());
    let same = |(tenant, _): &(&Tenant, Observation)| before.contains(&tenant.id);
    seen.into_iter().filter(same).collect()
}

#[cfg(test)]
mod tests {
    use gpumux_core::space::Program;

    use super::*;
    use crate::api::types;

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

    /// The tenant that was seen, and at what percentage.
    type Seen = (u64, u32);

    #[test]
    fn only_a_member_without_a_working_neighbour_is_seen() {
        let tenants = [
            tenant(1, "half", Some(50)),
            tenant(2, "whole", None),
            tenant(3, "in-time", Some(50)),
        ];
        let look = |sights: &[(u64, Sight)]| -> BTreeMap<TenantId, Sight> {
            let all = sights.iter().cloned();
            all.map(|(id, sight)| (TenantId(id), sight)).collect()
        };
        let seen = |before: &[(u64, Sight)], now: &[(u64, Sight)]| -> Vec<Seen> {
            let (before, now) = (look(before), look(now));
            let all = observations(&tenants, &before, &now, 2.0);
            all.iter()
                .map(|(tenant, seen)| (tenant.id.0, seen.percent))
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
        assert_eq!(seen(&before, &now(0)), [(1, 50), (3, 100)]);
        assert_eq!(seen(&before, &now(50)), [(3, 100)]);
        // One that began nothing was still at work.
        let mut long = now(0);
        long[1].1.busy_us = 2_000_000;
        assert_eq!(seen(&before, &long), [(3, 100)]);
        // A tenant that works in other places too is a neighbour, and nothing is learnt of it.
        let elsewhere = ("GPU-1".to_owned(), None);
        let mut mixed = (before.clone(), now(50));
        for sights in [&mut mixed.0, &mut mixed.1] {
            sights[1].1.places.insert(elsewhere.clone());
            sights[1].1.domains.push(9);
        }
        assert_eq!(seen(&mixed.0, &mixed.1), [(3, 100)]);
        // A tenant that came or went meanwhile counts as there.
        assert_eq!(seen(&before[..1], &now(50)[..1]), [(1, 50)]);
        assert_eq!(seen(&before[..1], &now(50)[..2]), []);
        assert_eq!(seen(&before[..2], &now(50)[..1]), []);
        // Another process is another matter.
        let again = [(1, sight(9, group, 200))];
        assert_eq!(seen(&before[..1], &again), []);
    }

    #[test]
    fn a_while_in_which_a_neighbour_ended_is_left_out() {
        let tenant = tenant(1, "train", None);
        let mut before = BTreeSet::new();
        let mut counts = |alone: bool| -> usize {
            let seen = Observation {
                seconds: 1.0,
                waited: 0.0,
                busy: 1.0,
                work: 100,
                percent: 100,
            };
            let seen = alone.then_some((&tenant, seen));
            steady(&mut before, seen.into_iter().collect()).len()
        };
        let seen = [true, true, false, true, true].map(&mut counts);
        assert_eq!(seen, [0, 1, 0, 0, 1]);
    }

    #[test]
    fn idle_program_teaches_nothing() {
        let tenants = [tenant(1, "rests", None)];
        let look = |work: u64, busy_us: u64| -> BTreeMap<TenantId, Sight> {
            let mut sight = sight(1, Some(7), work);
            sight.busy_us = busy_us;
            [(TenantId(1), sight)].into()
        };
        let learnt = |busy_us: u64| {
            let all = observations(&tenants, &look(0, 0), &look(200, busy_us), 2.0);
            Program::default().learn(&all[0].1, false)
        };
        assert!(!learnt(200_000) && learnt(1_900_000));
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
}
