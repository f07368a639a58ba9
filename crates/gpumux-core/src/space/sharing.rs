//! Time or space: whether a tenant joins its trust domain's group or gets a context of its own, and why.

use serde::{Deserialize, Serialize};

use super::{Bandwidth, Claimant, Curve, Rule, divide, minimum, rates, total};
use crate::{Class, TenantSpec};

/// What a tenant wants.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Sharing {
    /// What serves it best; without a trust domain always time.
    #[default]
    Auto,
    /// A context of its own.
    Time,
    /// The group of its trust domain.
    Space,
}

names!(Sharing: Auto = "auto", Time = "time", Space = "space");

/// What was decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Way {
    /// A context of its own.
    Time,
    /// The group.
    Space,
}

/// A member of a group, or a tenant that may become one.
#[derive(Clone, Copy, Debug)]
pub struct Member<'a> {
    /// Its spec.
    pub spec: &'a TenantSpec,
    /// The scaling profile of its program; empty if unknown.
    pub curve: &'a Curve,
    /// What its program needs of the memory's bandwidth; 0 if unknown.
    pub bandwidth: Bandwidth,
    /// The part of the time for which its program needs the device ([`super::Program::duty`]).
    pub duty: f64,
}

/// What a group and one more tenant are expected to do: the sum of their rates, each relative to having the device alone.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Prediction {
    /// With the tenant in the group.
    pub in_group: f64,
    /// With the tenant in a context of its own, which shares the device in time with the group.
    // What an older daemon has stored of living tenants.
    #[serde(alias = "in_turns")]
    pub in_time: f64,
}

impl Prediction {
    /// Whether sharing in space is worth its risks.
    fn gains(self) -> bool {
        self.in_group >= self.in_time * BETTER
    }
}

/// All that the decision may know of a tenant that starts.
#[derive(Clone, Copy, Debug)]
pub struct Applicant<'a> {
    /// What it wants.
    pub sharing: Sharing,
    /// Its trust domain, if it named one.
    pub trust: Option<&'a str>,
    /// Its class.
    pub class: Class,
    /// The other members of the group of that trust domain *and of the same user*.
    pub members: usize,
    /// How many members a group can have.
    pub room: usize,
    /// Why there can be no groups here, if so.
    pub unavailable: Option<&'a str>,
    /// How often it took a group down.
    pub faults: u32,
    /// What is expected, if that is known.
    pub prediction: Option<Prediction>,
    /// Members keep more SMs until they end than its guarantee leaves them (see [`hinders`]).
    pub hindered: bool,
}

/// Time or space, and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Decision {
    /// Which.
    pub way: Way,
    /// In a few words, for people.
    pub reason: String,
}

/// A tenant that ended its group so often joins none any more.
const FAULTS: u32 = 2;
/// A group must be better than sharing in time by this factor: less may be noise, and members have their faults in common.
const BETTER: f64 = 1.05;

/// Decides for a tenant at its start. It cannot be moved while it runs. What forbids space comes
/// first, then what the tenant wants, then what is predicted.
pub fn decide(applicant: &Applicant) -> Decision {
    let Applicant {
        sharing,
        class,
        members,
        room,
        ..
    } = *applicant;
    let time = |reason: String| Decision {
        way: Way::Time,
        reason,
    };
    let space = |reason: String| Decision {
        way: Way::Space,
        reason,
    };
    if sharing == Sharing::Time {
        return time("asked for time".into());
    }
    let Some(trust) = applicant.trust else {
        return time("names no trust domain".into());
    };
    if let Some(why) = applicant.unavailable {
        return time(format!("no groups here: {why}"));
    }
    if applicant.faults >= FAULTS {
        return time(format!("took its group down {} times", applicant.faults));
    }
    if members >= room {
        return time(format!("the group of {trust} is full: {members} members"));
    }
    if sharing == Sharing::Space {
        return space(format!("asked for space in {trust}"));
    }
    if class == Class::Latency {
        return time("class latency takes the device from its own context".into());
    }
    if applicant.hindered {
        return time("members keep more SMs until they end than its guarantee leaves".into());
    }
    match applicant.prediction {
        Some(it) => {
            let way = if it.gains() { space } else { time };
            way(format!(
                "predicted {:.0}% of one program alone in the group, {:.0}% in time",
                it.in_group * 100.0,
                it.in_time * 100.0
            ))
        }
        None => match members {
            0 => space(format!("first of {trust}: others may join it")),
            1 => space(format!("with 1 other of {trust}")),
            more => space(format!("with {more} others of {trust}")),
        },
    }
}

/// The spec of a group to which these members belong: what they are guaranteed and weigh together. Its class is that
/// of the highest member, for the group runs and waits as a whole.
pub fn combine<'a>(members: impl IntoIterator<Item = &'a TenantSpec>) -> TenantSpec {
    let mut members = members.into_iter();
    let Some(mut all) = members.next().cloned() else {
        return TenantSpec::default();
    };
    all.latency_objective_us = all.objective_us();
    for member in members {
        all.class = all.class.min(member.class);
        all.guaranteed += member.guaranteed;
        all.limit += member.limit;
        all.weight += member.weight;
        all.latency_objective_us = match (all.latency_objective_us, member.objective_us()) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
    }
    let (lightest, heaviest) = TenantSpec::WEIGHTS.into_inner();
    all.weight = all.weight.clamp(lightest, heaviest);
    all.limit = all.limit.min(1.0);
    all.guaranteed = all.guaranteed.min(all.limit);
    all
}

/// Steps in which percentages of the SMs are divided: about what Hopper can separate (8 of 132). Where guarantees do not fit
/// in such, in single percents.
const PERCENT_STEP: u32 = 5;

/// Percentages of the SMs for all members of a group, by what they make of them; `None` where nothing was measured of any,
/// guarantees leave less than a percent for each of the others, or all would have about the same and none was guaranteed
/// anything: members that are alike make more without parts, as each uses what others leave idle for a moment (two training jobs on
/// an H100: 1.19 against 1.13, docs/space.md). The curves count in percent of the SMs.
pub fn percentages(members: &[Member]) -> Option<Vec<u32>> {
    if members.iter().all(|it| it.curve.is_empty()) {
        return None;
    }
    let claimants = claimants(members);
    let (shares, even) = parts(&claimants)?;
    let bound = |claim: &Claimant| claim.min > 0 || claim.max < 100;
    let (least, most) = (shares.iter().min()?, shares.iter().max()?);
    if even && most - least <= PERCENT_STEP && !claimants.iter().any(bound) {
        return None;
    }
    // A step may be more than a limit allows.
    let limited = shares.into_iter().zip(&claimants);
    Some(limited.map(|(share, claim)| share.min(claim.max)).collect())
}

fn claimants<'a>(members: &[Member<'a>]) -> Vec<Claimant<'a>> {
    let claimant = |it: &Member<'a>| Claimant {
        weight: it.spec.weight,
        min: guaranteed(it.spec),
        max: limit(it.spec),
        curve: it.curve,
        bandwidth: it.bandwidth,
    };
    members.iter().map(claimant).collect()
}

/// The best percentages that were found, and whether they are those by weight.
fn parts(claimants: &[Claimant]) -> Option<(Vec<u32>, bool)> {
    let guaranteed = claimants.iter().any(|claim| claim.min > 0);
    let steps = [Some(PERCENT_STEP), guaranteed.then_some(1)];
    let (best, even) = steps.into_iter().flatten().find_map(|step| {
        let by = |rule| divide(rule, claimants, 100, step);
        by(Rule::Utility).zip(by(Rule::Weighted))
    })?;
    // Where a curve has dents, its hull may show what is not there.
    let sum = |shares: &[u32]| total(claimants, shares, 100);
    match best != even && sum(&best) >= sum(&even) {
        true => Some((best, false)),
        false => Some((even, true)),
    }
}

/// What is to be expected of a group with the last of these in it, or beside it in time; `None` where of one no curve is known, or the
/// SMs cannot be divided. Members that were confined to other parts before are taken to start anew.
pub fn predict(members: &[Member]) -> Option<Prediction> {
    let (own, others) = members.split_last()?;
    if others.is_empty() || members.iter().any(|it| it.curve.is_empty()) {
        return None;
    }
    let rates = |members: &[Member]| {
        let claimants = claimants(members);
        let (shares, _) = parts(&claimants)?;
        Some(rates(&claimants, &shares, 100))
    };
    let apart = match others {
        [_] => vec![1.0],
        _ => rates(others)?,
    };
    let weight: f64 = members.iter().map(|it| it.spec.weight).sum();
    let share = own.spec.weight / weight;
    let alone = |it: &Member, share: f64| (share / it.duty).min(1.0);
    let others = others.iter().zip(apart);
    let others = others.map(|(it, rate)| rate * alone(it, 1.0 - share));
    Some(Prediction {
        in_group: rates(members)?.into_iter().sum(),
        in_time: others.sum::<f64>() + alone(own, share),
    })
}

/// Percentage of the SMs to which a new member of a group is confined for its life, if it is: its limit, and no more than
/// what the others' guarantees leave. Its own guarantee it has in any case.
pub fn percentage(
    spec: &TenantSpec,
    others_guaranteed: impl IntoIterator<Item = f64>,
) -> Option<u32> {
    let taken: f64 = others_guaranteed.into_iter().sum();
    let left = 100_u32.saturating_sub(minimum(taken, 1.0, 100)).max(1);
    let share = limit(spec).min(left).max(guaranteed(spec));
    (share < 100).then_some(share)
}

/// Whether a member that is confined to so many percent of the SMs, if it is, may take some that another one is guaranteed.
pub fn hinders(sm_percent: Option<u32>, guaranteed: f64) -> bool {
    guaranteed > 0.0 && sm_percent.unwrap_or(100) + minimum(guaranteed, 1.0, 100) > 100
}

/// The percentage of the SMs that is guaranteed, rounded up.
fn guaranteed(spec: &TenantSpec) -> u32 {
    minimum(spec.guaranteed, 1.0, 100)
}

/// The percentage of the SMs that is the limit.
fn limit(spec: &TenantSpec) -> u32 {
    let limit = (spec.limit * 100.0).round() as u32;
    limit.max(1).max(guaranteed(spec))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn applicant() -> Applicant<'static> {
        Applicant {
            sharing: Sharing::Auto,
            trust: Some("team-a"),
            class: Class::Batch,
            members: 1,
            room: 48,
            unavailable: None,
            faults: 0,
            prediction: None,
            hindered: false,
        }
    }

    fn predicted(in_group: f64, in_time: f64) -> Option<Prediction> {
        Some(Prediction { in_group, in_time })
    }

    fn member<'a>(spec: &'a TenantSpec, curve: &'a Curve) -> Member<'a> {
        Member {
            spec,
            curve,
            bandwidth: Bandwidth::default(),
            duty: 1.0,
        }
    }

    /// Every row: what is changed about a batch tenant of team-a, what is decided, and a part of the reason.
    #[test]
    fn the_decision_and_its_reason() {
        use Way::{Space, Time};
        type Change = fn(&mut Applicant);
        let rows: &[(Change, Way, &str)] = &[
            (|_| (), Space, "with 1 other of team-a"),
            (|it| it.members = 0, Space, "first of team-a"),
            (|it| it.class = Class::Standard, Space, "with 1 other"),
            (|it| it.trust = None, Time, "names no trust domain"),
            (
                |it| (it.trust, it.sharing) = (None, Sharing::Space),
                Time,
                "names no trust domain",
            ),
            (|it| it.sharing = Sharing::Time, Time, "asked for time"),
            (|it| it.sharing = Sharing::Space, Space, "asked for space"),
            (|it| it.class = Class::Latency, Time, "class latency"),
            (
                |it| (it.class, it.sharing) = (Class::Latency, Sharing::Space),
                Space,
                "asked for space",
            ),
            (
                |it| (it.unavailable, it.sharing) = (Some("no MPS"), Sharing::Space),
                Time,
                "no MPS",
            ),
            (|it| it.faults = 1, Space, "with 1 other"),
            (
                |it| (it.faults, it.sharing) = (2, Sharing::Space),
                Time,
                "took its group down 2 times",
            ),
            (|it| it.members = 48, Time, "is full: 48"),
            (|it| it.hindered = true, Time, "than its guarantee leaves"),
            (
                |it| (it.hindered, it.sharing) = (true, Sharing::Space),
                Space,
                "asked for space",
            ),
            (
                |it| it.prediction = predicted(1.06, 1.0),
                Space,
                "predicted 106% of one program alone in the group, 100% in time",
            ),
            (|it| it.prediction = predicted(1.04, 1.0), Time, "104%"),
            (
                |it| (it.prediction, it.sharing) = (predicted(0.9, 1.0), Sharing::Space),
                Space,
                "asked for space",
            ),
        ];
        for (change, way, reason) in rows {
            let mut applicant = applicant();
            change(&mut applicant);
            let decision = decide(&applicant);
            assert_eq!(decision.way, *way, "{applicant:?}: {decision:?}");
            assert!(decision.reason.contains(reason), "{decision:?}");
        }
    }

    #[test]
    fn group_has_the_guarantees_of_its_members() {
        let member = |class, guaranteed, weight| TenantSpec {
            class,
            guaranteed,
            weight,
            ..TenantSpec::default()
        };
        let group = combine(&[
            member(Class::Batch, 0.2, 1.0),
            member(Class::Standard, 0.3, 2.0),
        ]);
        assert_eq!(group.class, Class::Standard);
        assert_eq!(
            (group.guaranteed, group.weight, group.limit),
            (0.5, 3.0, 1.0)
        );
        assert_eq!(group.validate(), Ok(()));
        assert_eq!(combine(&[]), TenantSpec::default());
        let with_objective = |class, ms: u64| TenantSpec {
            class,
            latency_objective_us: Some(ms * 1000),
            ..TenantSpec::default()
        };
        let batch = with_objective(Class::Batch, 5);
        let latency = with_objective(Class::Latency, 20);
        for all in [[&batch, &latency], [&latency, &batch]] {
            assert_eq!(combine(all).latency_objective_us, Some(20_000));
        }
    }

    #[test]
    fn a_member_is_confined_to_what_the_others_are_not_guaranteed() {
        let member = |guaranteed, limit| TenantSpec {
            guaranteed,
            limit,
            ..TenantSpec::default()
        };
        for (spec, others, percent) in [
            (member(0.0, 1.0), vec![], None),
            (member(0.0, 1.0), vec![0.0, 0.0], None),
            (member(0.0, 0.5), vec![], Some(50)),
            (member(0.0, 1.0), vec![0.3, 0.3], Some(40)),
            (member(0.6, 1.0), vec![0.6], Some(60)),
            (member(0.0, 1.0), vec![1.0], Some(1)),
            // Rounding takes nothing from a guarantee, its own or another's.
            (member(0.0, 1.0), vec![0.334], Some(66)),
            (member(0.334, 0.334), vec![], Some(34)),
        ] {
            assert_eq!(
                percentage(&spec, others.clone()),
                percent,
                "{spec:?} {others:?}"
            );
        }
    }

    #[test]
    fn member_that_gains_little_from_sms_leaves_them_to_others() {
        let spec = TenantSpec::default();
        let small = Curve::measured([(20, 0.9), (50, 0.95), (100, 1.0)]);
        let large = Curve::measured([(25, 0.25), (50, 0.5), (75, 0.75), (100, 1.0)]);
        let shares = percentages(&[member(&spec, &small), member(&spec, &large)]);
        assert_eq!(shares, Some(vec![20, 80]));
        let half = TenantSpec {
            guaranteed: 0.5,
            ..TenantSpec::default()
        };
        let shares = percentages(&[member(&half, &small), member(&spec, &large)]);
        assert_eq!(shares, Some(vec![50, 50]));
        let nothing = Curve::default();
        assert_eq!(
            percentages(&[member(&spec, &nothing), member(&spec, &nothing)]),
            None
        );
    }

    #[test]
    fn equal_members_have_no_parts_without_a_guarantee() {
        let spec = TenantSpec::default();
        let curve = Curve::measured([(25, 0.4), (50, 0.75), (100, 1.0)]);
        assert_eq!(percentages(&[member(&spec, &curve); 2]), None);
        assert_eq!(
            percentages(&[member(&spec, &curve); 3]),
            None,
            "35, 35 and 30"
        );
        let limited = TenantSpec {
            limit: 0.9,
            ..TenantSpec::default()
        };
        let shares = percentages(&[member(&spec, &curve), member(&limited, &curve)]);
        assert_eq!(shares, Some(vec![50, 50]));
        let heavy = TenantSpec {
            weight: 3.0,
            ..TenantSpec::default()
        };
        assert!(percentages(&[member(&spec, &curve), member(&heavy, &curve)]).is_some());
    }

    #[test]
    fn a_guarantee_is_kept_among_many_and_whatever_the_steps() {
        let spec = |guaranteed| TenantSpec {
            guaranteed,
            ..TenantSpec::default()
        };
        let curve = Curve::measured([(25, 0.3), (50, 0.5), (100, 1.0)]);
        let unknown = Curve::default();
        let (big, none) = (spec(0.9), spec(0.0));
        let mut members = vec![member(&none, &unknown); 10];
        members.push(member(&big, &curve));
        let shares = percentages(&members).expect("it fits");
        assert_eq!((shares[10], &shares[..10]), (90, &[1; 10][..]));
        members.insert(0, member(&none, &unknown));
        assert_eq!(percentages(&members), None, "nothing is left for one");
        let thirds = [0.34, 0.33, 0.33].map(spec);
        let members: Vec<_> = thirds.iter().map(|spec| member(spec, &curve)).collect();
        assert_eq!(percentages(&members), Some(vec![34, 33, 33]));
        // No guarantee is given: no member is to live on a percent.
        assert_eq!(percentages(&[member(&none, &curve); 21]), None);
    }

    #[test]
    fn member_without_a_bound_hinders_one_with_a_guarantee() {
        assert!(hinders(None, 0.01) && hinders(Some(11), 0.9) && hinders(Some(67), 0.334));
        assert!(!hinders(None, 0.0) && !hinders(Some(10), 0.9) && !hinders(Some(66), 0.334));
    }

    #[test]
    fn by_utility_a_saturated_program_and_one_that_scales_gain_a_tenth_or_more() {
        let spec = TenantSpec::default();
        let small = Curve::measured([(25, 0.95), (50, 1.0), (100, 1.0)]);
        let large = Curve::measured([(25, 0.25), (50, 0.5), (75, 0.75), (100, 1.0)]);
        let shares = percentages(&[member(&spec, &small), member(&spec, &large)]).expect("two");
        let sum = |shares: &[u32]| small.utility(shares[0], 100) + large.utility(shares[1], 100);
        assert!(sum(&shares) >= 1.1 * sum(&[50, 50]), "{shares:?}");
    }

    fn curve() -> impl Strategy<Value = Curve> {
        let point = (1..=20_u32, 0.01..10.0_f64);
        prop::collection::vec(point, 0..8)
            .prop_map(|points| Curve::measured(points.into_iter().map(|(n, rate)| (n * 5, rate))))
    }

    fn bandwidth() -> impl Strategy<Value = Bandwidth> {
        (0.0..=1.0_f64, 0.0..=1.0_f64).prop_map(|(demand, sensitivity)| Bandwidth {
            demand,
            sensitivity,
        })
    }

    proptest! {
        #[test]
        fn each_gets_its_guarantee_however_many_there_are(
            members in prop::collection::vec((0.0..1.0_f64, 0.0..1.0_f64, curve()), 1..48),
            sum in 0.01..=1.0_f64,
        ) {
            let all: f64 = members.iter().map(|it| it.0).sum();
            let specs: Vec<TenantSpec> = members
                .iter()
                .map(|(part, above, _)| {
                    let guaranteed = part / all.max(1e-9) * sum;
                    let limit = (guaranteed + above).min(1.0);
                    TenantSpec { guaranteed, limit, ..TenantSpec::default() }
                })
                .collect();
            let curves = members.iter().map(|it| &it.2);
            let pairs: Vec<_> = specs.iter().zip(curves).map(|(spec, curve)| member(spec, curve)).collect();
            let kept = |spec: &TenantSpec, share: u32| {
                f64::from(share) >= spec.guaranteed * 100.0 - 1e-6
                    && f64::from(share) < (spec.limit * 100.0).max(1.0) + 1.0
            };
            if let Some(shares) = percentages(&pairs) {
                prop_assert!(shares.iter().sum::<u32>() <= 100, "{shares:?}");
                for (spec, share) in specs.iter().zip(&shares) {
                    prop_assert!(kept(spec, *share), "{shares:?} {spec:?}");
                }
            }
            for (at, spec) in specs.iter().enumerate() {
                let others = specs.iter().enumerate().filter(|(other, _)| *other != at);
                let share = percentage(spec, others.map(|(_, other)| other.guaranteed));
                prop_assert!(kept(spec, share.unwrap_or(100)), "{share:?} {spec:?}");
            }
        }

        #[test]
        fn by_utility_nothing_is_lost_against_a_division_by_weight(
            members in prop::collection::vec((0.1..10.0_f64, curve(), bandwidth()), 2..7),
        ) {
            let specs: Vec<TenantSpec> = members
                .iter()
                .map(|(weight, _, _)| TenantSpec { weight: *weight, ..TenantSpec::default() })
                .collect();
            let curves = members.iter().map(|(_, curve, _)| curve);
            let pairs: Vec<_> = (specs.iter().zip(curves).zip(&members))
                .map(|((spec, curve), (_, _, bandwidth))| Member { bandwidth: *bandwidth, ..member(spec, curve) })
                .collect();
            let claims = claimants(&pairs);
            if let Some(shares) = percentages(&pairs) {
                let even = divide(Rule::Weighted, &claims, 100, PERCENT_STEP).expect("some");
                let sum = |shares: &[u32]| total(&claims, shares, 100);
                prop_assert!(sum(&shares) >= sum(&even), "{shares:?} {even:?}");
                prop_assert_eq!(shares.iter().sum::<u32>(), 100);
            }
        }
    }
}
