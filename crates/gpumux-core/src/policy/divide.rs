//! Dividing a device among the tenants with work: the part in which policies differ.

use std::collections::BTreeMap;

use crate::{Class, Micros, TenantSpec, UserId};

/// What one tenant that wants the device may claim. Its numbers always make sense.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Claim {
    /// Its class.
    pub class: Class,
    /// Guaranteed share, 0 to `limit`.
    pub guaranteed: f64,
    /// Largest share while others want more, 0 to 1.
    pub limit: f64,
    /// Weight, within [`TenantSpec::WEIGHTS`].
    pub weight: f64,
    /// Its latency objective, if it has one.
    pub objective: Option<Micros>,
}

impl From<&TenantSpec> for Claim {
    /// Nonsense numbers, which validation refuses, become harmless ones.
    fn from(spec: &TenantSpec) -> Self {
        let limit = sane(spec.limit, 0.0, 1.0, 1.0);
        let (lightest, heaviest) = TenantSpec::WEIGHTS.into_inner();
        Self {
            class: spec.class,
            guaranteed: sane(spec.guaranteed, 0.0, limit, 0.0),
            limit,
            weight: sane(spec.weight, lightest, heaviest, 1.0),
            objective: spec.latency_objective_us.map(Micros),
        }
    }
}

/// The value within these bounds; of what is no number, `otherwise`.
fn sane(value: f64, min: f64, max: f64, otherwise: f64) -> f64 {
    match value.is_nan() {
        true => otherwise,
        false => value.clamp(min, max),
    }
}

/// How a policy divides a device.
pub trait Division: Send + Sync {
    /// The policy's name in configuration files.
    fn name(&self) -> &'static str;

    /// One share per claim. All claimants want the device now. Shares that don't sum to 1 are scaled. Called for the users, each a
    /// `standard` claim of what its tenants are guaranteed together, and for the tenants of each user.
    fn divide(&self, claims: &[Claim]) -> Vec<f64>;
}

/// The part of the device that [`Priority`] leaves to tenants of lower classes together, by weight.
pub const FLOOR: f64 = 0.05;

/// Guarantees first; the rest goes to the highest class that wants it, by weight, and what its limits leave to the next. Those of lower classes
/// have at least their part, by weight, of [`FLOOR`], or what weights would give them if no class counted, if that is less. So no
/// guarantee makes a tenant's share smaller, nor does a higher class; beside one of that class at its limit, it may by some thousandths.
#[derive(Clone, Copy, Debug, Default)]
pub struct Priority;

impl Division for Priority {
    fn name(&self) -> &'static str {
        "priority"
    }

    fn divide(&self, claims: &[Claim]) -> Vec<f64> {
        let guaranteed = guarantees(claims);
        // Here already: what is given later is taken from a tenant that is at its limit, too.
        let least = EQUAL / claims.len() as f64;
        let mut shares: Vec<f64> = guaranteed.iter().map(|it| it.max(least)).collect();
        for class in Class::ALL {
            let pull = |claim: &Claim, counts: bool| if counts { claim.weight } else { 0.0 };
            let lower: f64 = claims.iter().map(|it| pull(it, it.class > class)).sum();
            let alone = level(&guaranteed, &shares, claims, |it| {
                pull(it, it.class >= class)
            });
            for ((share, claim), alone) in shares.iter_mut().zip(claims).zip(alone) {
                if claim.class > class {
                    *share = share.max(alone.min(FLOOR * claim.weight / lower));
                }
            }
            shares = level(&guaranteed, &shares, claims, |it| {
                pull(it, it.class == class)
            });
        }
        shares
    }
}

/// Guarantees first; the rest is divided by weight, whatever the class.
#[derive(Clone, Copy, Debug, Default)]
pub struct Weighted;

impl Division for Weighted {
    fn name(&self) -> &'static str {
        "weighted"
    }

    fn divide(&self, claims: &[Claim]) -> Vec<f64> {
        let mut shares = guarantees(claims);
        fill(&mut shares, claims, |claim| claim.weight);
        shares
    }
}

/// The smallest share is as large as guarantees and limits allow, then the next, and so on; weights don't count.
#[derive(Clone, Copy, Debug, Default)]
pub struct MaxMin;

impl Division for MaxMin {
    fn name(&self) -> &'static str {
        "max-min"
    }

    fn divide(&self, claims: &[Claim]) -> Vec<f64> {
        let guaranteed = guarantees(claims);
        let at = |level: f64| -> Vec<f64> {
            let share = |(claim, floor): (&Claim, &f64)| level.min(claim.limit).max(*floor);
            claims.iter().zip(&guaranteed).map(share).collect()
        };
        // The sum grows with the level: halve until the level is known beyond doubt.
        let (mut low, mut high) = (0.0, 1.0);
        for _ in 0..48 {
            let middle = (low + high) / 2.0;
            match at(middle).iter().sum::<f64>() <= 1.0 {
                true => low = middle,
                false => high = middle,
            }
        }
        at(low)
    }
}

/// The guaranteed shares, scaled down together if they exceed the device.
pub fn guarantees(claims: &[Claim]) -> Vec<f64> {
    let sum: f64 = claims.iter().map(|claim| claim.guaranteed).sum();
    let scale = 1.0 / sum.max(1.0);
    let scaled = |claim: &Claim| claim.guaranteed * scale;
    claims.iter().map(scaled).collect()
}

/// Divides what `shares` leave of the device among the claims in proportion to their `pull`, each up to its limit.
pub fn fill(shares: &mut [f64], claims: &[Claim], pull: impl Fn(&Claim) -> f64) {
    let all = level(shares, shares, claims, pull);
    shares.copy_from_slice(&all);
}

/// Divides the device: those that pull have what they are `given` and, in proportion to their pull, what remains; but no less than `least`, and no
/// more than their limits. Others have the least.
fn level(given: &[f64], least: &[f64], claims: &[Claim], pull: impl Fn(&Claim) -> f64) -> Vec<f64> {
    let mut shares = least.to_vec();
    let mut open: Vec<usize> = (0..claims.len())
        .filter(|at| pull(&claims[*at]) > 0.0)
        .collect();
    while !open.is_empty() {
        open.iter().for_each(|at| shares[*at] = given[*at]);
        let rest = 1.0 - shares.iter().sum::<f64>();
        let pulls: f64 = open.iter().map(|at| pull(&claims[*at])).sum();
        let wanted = |at: usize| given[at] + rest * pull(&claims[at]) / pulls;
        // Either those that have too little stay at their bounds, or those that have too much: whichever is more.
        let mut lifted = 0.0;
        for at in &open {
            shares[*at] = wanted(*at).min(claims[*at].limit).max(least[*at]);
            lifted += shares[*at] - wanted(*at);
        }
        open.retain(|at| match lifted > 0.0 {
            true => wanted(*at) >= least[*at],
            false => lifted < 0.0 && wanted(*at) <= claims[*at].limit,
        });
    }
    shares
}

/// What belongs to all in equal parts, whatever a division says, so that none starves. Guarantees that sum to the whole device
/// are kept within this part.
const EQUAL: f64 = 0.005;

/// A tenant that claims a part of a device, for [`shares`].
#[derive(Clone, Copy, Debug)]
pub(super) struct Claimant {
    pub(super) user: UserId,
    pub(super) claim: Claim,
}

/// The share of each claimant: first the device is divided among the users, then each user's part among its tenants. The
/// sum is 1.
pub(super) fn shares(
    division: &dyn Division,
    claimants: &[Claimant],
    weights: &BTreeMap<UserId, f64>,
) -> Vec<f64> {
    let mut users: BTreeMap<UserId, Vec<usize>> = BTreeMap::new();
    for (index, claimant) in claimants.iter().enumerate() {
        users.entry(claimant.user).or_default().push(index);
    }
    let sum = |members: &[usize], of: fn(&Claim) -> f64| -> f64 {
        members.iter().map(|at| of(&claimants[*at].claim)).sum()
    };
    // To the other users, neither the number of a user's tenants nor their classes matter.
    let whole = |(user, members): (&UserId, &Vec<usize>)| {
        let limit = sum(members, |claim| claim.limit).min(1.0);
        let (lightest, heaviest) = TenantSpec::WEIGHTS.into_inner();
        let weight = weights.get(user).copied().unwrap_or(1.0);
        Claim {
            class: Class::Standard,
            guaranteed: sum(members, |claim| claim.guaranteed).min(limit),
            limit,
            weight: sane(weight, lightest, heaviest, 1.0),
            objective: None,
        }
    };
    let parts = sound(division, &users.iter().map(whole).collect::<Vec<_>>());
    let mut shares = vec![0.0; claimants.len()];
    for (members, part) in users.values().zip(parts) {
        let inside = |at: &usize| {
            let claim = claimants[*at].claim;
            let limit = (claim.limit / part).min(1.0);
            Claim {
                guaranteed: (claim.guaranteed / part).min(limit),
                limit,
                ..claim
            }
        };
        let claims: Vec<Claim> = members.iter().map(inside).collect();
        for (at, share) in members.iter().zip(sound(division, &claims)) {
            shares[*at] = share * part;
        }
    }
    shares
}

/// The division's shares, made sound: none below its part of [`EQUAL`], the sum 1. What lifts a share is taken from what others have
/// beyond their guarantees, as far as that goes.
fn sound(division: &dyn Division, claims: &[Claim]) -> Vec<f64> {
    let mut shares = division.divide(claims);
    shares.resize(claims.len(), 0.0);
    let sane = |share: f64| if share.is_finite() { share } else { 0.0 };
    for share in &mut shares {
        *share = sane(*share).max(1e-12);
    }
    scale(&mut shares);
    let least = EQUAL / claims.len() as f64;
    let missing: f64 = shares.iter().map(|share| (least - share).max(0.0)).sum();
    let spare = |share: f64, claim: &Claim| (share - claim.guaranteed.max(least)).max(0.0);
    let pairs = shares.iter().zip(claims);
    let spares: f64 = pairs.map(|(share, claim)| spare(*share, claim)).sum();
    let part = (missing / spares.max(1e-12)).min(1.0);
    for (share, claim) in shares.iter_mut().zip(claims) {
        *share = share.max(least) - part * spare(*share, claim);
    }
    scale(&mut shares);
    shares
}

/// Scales shares so that they sum to 1.
fn scale(shares: &mut [f64]) {
    let sum: f64 = shares.iter().sum();
    shares.iter_mut().for_each(|share| *share /= sum);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(class: Class, guaranteed: f64, limit: f64, weight: f64) -> Claim {
        Claim {
            class,
            guaranteed,
            limit,
            weight,
            objective: None,
        }
    }

    fn check(division: &dyn Division, claims: &[Claim], expected: &[f64]) {
        let got = division.divide(claims);
        for (got, expected) in got.iter().zip(expected) {
            assert!(
                (got - expected).abs() < 1e-6,
                "{}: {got} instead of {expected}",
                division.name()
            );
        }
    }

    #[test]
    fn priority_serves_guarantees_then_classes_with_a_floor() {
        use Class::{Batch, Latency, Standard};
        let plain = |class| claim(class, 0.0, 1.0, 1.0);
        for (claims, expected) in [
            (
                [plain(Latency), plain(Standard), plain(Batch)],
                [0.95, 0.025, 0.025],
            ),
            (
                [
                    plain(Latency),
                    claim(Standard, 0.2, 1.0, 1.0),
                    claim(Batch, 0.1, 1.0, 1.0),
                ],
                [0.7, 0.2, 0.1],
            ),
            (
                [
                    claim(Latency, 0.2, 1.0, 1.0),
                    claim(Standard, 0.0, 1.0, 3.0),
                    plain(Batch),
                ],
                [0.95, 0.0375, 0.0125],
            ),
            (
                [claim(Latency, 0.0, 0.3, 1.0), plain(Standard), plain(Batch)],
                [0.3, 0.65, 0.05],
            ),
            (
                [
                    claim(Latency, 0.5, 1.0, 1.0),
                    claim(Batch, 0.5, 1.0, 1.0),
                    plain(Batch),
                ],
                [0.5, 0.5, EQUAL / 3.0],
            ),
        ] {
            check(&Priority, &claims, &expected);
        }
    }

    /// One of its class that is at its limit, and one whose guarantee is small beside its weight.
    #[test]
    fn higher_class_lowers_no_share_beside_limits_and_guarantees() {
        use Class::{Batch, Latency, Standard};
        for others in [
            [claim(Latency, 0.0, 0.05, 1.0), claim(Batch, 0.0, 1.0, 1.0)],
            [
                claim(Latency, 0.0, 0.001, 1.0),
                claim(Standard, 0.014, 1.0, 1.0),
            ],
        ] {
            let share = |class| {
                let own = claim(
                    class,
                    0.0,
                    1.0,
                    if others[1].class == Batch { 1.0 } else { 53.0 },
                );
                Priority.divide(&[&[own], &others[..]].concat())[0]
            };
            let (before, after) = (share(Standard), share(Latency));
            assert!(after >= before - 1e-9, "{before} became {after}");
        }
    }

    #[test]
    fn weighted_divides_the_rest_by_weight_up_to_the_limits() {
        use Class::Standard;
        check(
            &Weighted,
            &[
                claim(Standard, 0.4, 1.0, 1.0),
                claim(Standard, 0.0, 1.0, 2.0),
            ],
            &[0.6, 0.4],
        );
        check(
            &Weighted,
            &[
                claim(Standard, 0.0, 0.2, 8.0),
                claim(Standard, 0.0, 1.0, 1.0),
            ],
            &[0.2, 0.8],
        );
    }

    #[test]
    fn max_min_lifts_the_smallest() {
        use Class::Standard;
        check(
            &MaxMin,
            &[
                claim(Standard, 0.5, 1.0, 1.0),
                claim(Standard, 0.0, 1.0, 9.0),
                claim(Standard, 0.0, 0.1, 1.0),
            ],
            &[0.5, 0.4, 0.1],
        );
    }

    fn of(user: u32, claim: Claim) -> Claimant {
        let user = UserId(user);
        Claimant { user, claim }
    }

    fn divided(claimants: &[Claimant]) -> Vec<f64> {
        let shares = shares(&Priority, claimants, &BTreeMap::from([(UserId(3), 2.0)]));
        assert!((shares.iter().sum::<f64>() - 1.0).abs() < 1e-9);
        shares
    }

    #[track_caller]
    fn near(got: &[f64], expected: &[f64]) {
        let pairs = got.iter().zip(expected);
        assert!(
            got.len() == expected.len() && pairs.clone().all(|(a, b)| (a - b).abs() < 1e-6),
            "{got:?} instead of {expected:?}"
        );
    }

    #[test]
    fn all_at_their_limit_share_the_rest_in_proportion() {
        let at = |limit| of(0, claim(Class::Standard, 0.0, limit, 1.0));
        near(&divided(&[at(0.2), at(0.4)]), &[1.0 / 3.0, 2.0 / 3.0]);
    }

    /// The more it asks for, the less weights alone would leave to the batch tenant: that has its equal part then, but not of this one's share.
    #[test]
    fn share_at_its_limit_stays_when_weight_or_guarantee_rises() {
        use Class::{Batch, Latency, Standard};
        for (guaranteed, weight) in [(0.0, 10.0), (0.0, 30.0), (0.1, 10.0)] {
            let own = of(0, claim(Latency, guaranteed, 0.38, weight));
            let owner = of(0, claim(Standard, 0.6, 1.0, 0.95));
            let shares = divided(&[own, owner, of(0, claim(Batch, 0.0, 1.0, 0.05))]);
            assert!((shares[0] - 0.38).abs() < 1e-9, "{shares:?}");
        }
    }

    #[test]
    fn a_floor_remains_beside_a_higher_class_and_a_guarantee() {
        use Class::{Batch, Latency, Standard};
        let plain = |class| of(0, claim(class, 0.0, 1.0, 1.0));
        near(&divided(&[plain(Latency), plain(Batch)]), &[0.95, 0.05]);
        let many = [plain(Latency); 39];
        let one = divided(&[&many[..], &[plain(Batch)]].concat());
        near(&one, &[1.0 / 40.0; 40]);
        let owner = of(0, claim(Batch, 0.01, 1.0, 1.0));
        let one = divided(&[&many[..19], &[owner]].concat());
        assert!(
            one[19] > 0.05 - 1e-9,
            "without its guarantee it has 0.05: {one:?}"
        );
        let all = of(0, claim(Standard, 1.0, 1.0, 1.0));
        let shares = divided(&[all, plain(Batch), plain(Batch)]);
        assert!(shares[0] > 0.995 && shares[1] > 0.0016, "{shares:?}");
    }

    #[test]
    fn a_users_part_depends_on_its_guarantees_and_weight_alone() {
        use Class::{Batch, Latency, Standard};
        let part = |claimants: &[Claimant], user| -> f64 {
            let shares = divided(claimants);
            let pairs = shares.iter().zip(claimants);
            let own = pairs.filter(|(_, claimant)| claimant.user == UserId(user));
            own.map(|(share, _)| share).sum()
        };
        let other = of(2, claim(Standard, 0.0, 1.0, 1.0));
        let alone = [of(1, claim(Batch, 0.2, 1.0, 1.0)), other];
        let split = [
            of(1, claim(Latency, 0.1, 1.0, 9.0)),
            of(1, claim(Standard, 0.1, 1.0, 1.0)),
            of(1, claim(Batch, 0.0, 1.0, 1.0)),
            other,
        ];
        assert!((part(&alone, 1) - 0.6).abs() < 1e-9);
        assert!((part(&split, 1) - 0.6).abs() < 1e-9);
        let heavy = of(3, claim(Standard, 0.0, 1.0, 1.0));
        assert!((part(&[heavy, other], 3) - 2.0 / 3.0).abs() < 1e-9);
    }
}
