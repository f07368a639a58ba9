//! Dividing a group's SMs among its members. The parent module tells why.

use serde::{Deserialize, Serialize};

use super::{
    Curve,
    bandwidth::{self, Bandwidth},
    curve::Line,
};

/// SMs that Hopper can separate (green contexts and MPS partitions alike).
pub const STEP: u32 = 8;

/// Whose claim to the next step of SMs is the best.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Rule {
    /// To the member by which the sum of weighted rates gains most.
    Utility,
    /// The one with the fewest SMs; weights don't count.
    MaxMin,
    /// The one with the fewest SMs for its weight.
    #[default]
    Weighted,
}

/// A member of a group that wants SMs.
#[derive(Clone, Copy, Debug)]
pub struct Claimant<'a> {
    /// Its weight; one that makes no sense counts as 1.
    pub weight: f64,
    /// SMs that it must have (see [`minimum`]).
    pub min: u32,
    /// SMs that it must not exceed while others want them.
    pub max: u32,
    /// Its scaling profile.
    pub curve: &'a Curve,
    /// What it needs of the memory's bandwidth.
    pub bandwidth: Bandwidth,
}

impl Claimant<'_> {
    fn weight(&self) -> f64 {
        match self.weight.is_finite() && self.weight > 0.0 {
            true => self.weight,
            false => 1.0,
        }
    }
}

/// The SMs that keep a member's guaranteed share of the device, when its group is entitled to `group_share` of the
/// device's time and the device has `sms`. Guarantees that together don't exceed the group's share fit together.
pub fn minimum(guaranteed: f64, group_share: f64, sms: u32) -> u32 {
    let part = (guaranteed / group_share.max(1e-6)).clamp(0.0, 1.0);
    // A hair above a whole number is that number.
    (part * f64::from(sms) - 1e-6).ceil().max(0.0) as u32
}

/// SMs per claimant, multiples of `step`: each one's minimum, and of the rest a step for each, at least. `None` where that does not
/// fit, or nothing is to be divided: none, or only one. Then all may use all.
pub fn divide(rule: Rule, claimants: &[Claimant], sms: u32, step: u32) -> Option<Vec<u32>> {
    let step = step.max(1);
    let steps = sms / step;
    if claimants.len() < 2 {
        return None;
    }
    let hulls: Vec<Line> = claimants
        .iter()
        .map(|claim| claim.curve.hull(sms))
        .collect();
    let mut shares = minima(claimants, steps, step)?;
    let open = |at: usize, share: u32| share < claimants[at].max / step * step;
    for _ in shares.iter().sum::<u32>() / step..steps {
        let alone: Vec<f64> = (hulls.iter().zip(&shares))
            .map(|(hull, share)| hull.relative(*share, sms))
            .collect();
        let now = worth(claimants, &alone);
        // Larger is better: the claim by the rule, then few SMs for the weight.
        let claim = |at: usize| {
            let (share, weight) = (shares[at], claimants[at].weight());
            let per_weight = -f64::from(share + step) / weight;
            match rule {
                Rule::MaxMin => (-f64::from(share), per_weight),
                Rule::Weighted => (per_weight, 0.0),
                Rule::Utility => {
                    let mut with = alone.clone();
                    with[at] = hulls[at].relative(share + step, sms);
                    let gain = worth(claimants, &with) - now;
                    // Straight lines are equal whatever the rounding of their differences.
                    ((gain * 1e9).round(), per_weight)
                }
            }
        };
        let best = (0..shares.len())
            .rev()
            .filter(|at| open(*at, shares[*at]))
            .max_by(|a, b| {
                let (a, b) = (claim(*a), claim(*b));
                a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1))
            });
        match best {
            Some(best) => shares[best] += step,
            // All are at their limits, which count only while others want more.
            None => break,
        }
    }
    Some(shares)
}

/// All minima in whole steps, at least one each; `None` where that is more than there is, because a minimum is
/// never rounded down.
fn minima(claimants: &[Claimant], steps: u32, step: u32) -> Option<Vec<u32>> {
    let least = |claim: &Claimant| u64::from(claim.min.div_ceil(step).max(1));
    let all: u64 = claimants.iter().map(least).sum();
    let shares = claimants.iter().map(|claim| least(claim) as u32 * step);
    (all <= u64::from(steps)).then(|| shares.collect())
}

/// The rate of each, where without the others it would have that of `alone`.
fn contended(claimants: &[Claimant], alone: &[f64]) -> Vec<f64> {
    let programs = alone.iter().zip(claimants);
    let programs = programs.map(|(alone, claim)| (*alone, claim.bandwidth));
    bandwidth::rates(&programs.collect::<Vec<_>>())
}

/// The sum of weighted rates.
fn worth(claimants: &[Claimant], alone: &[f64]) -> f64 {
    let weighted = claimants.iter().zip(contended(claimants, alone));
    weighted.map(|(claim, rate)| claim.weight() * rate).sum()
}

/// The rate of each relative to having the device alone, on the curves as measured.
pub fn rates(claimants: &[Claimant], shares: &[u32], sms: u32) -> Vec<f64> {
    contended(claimants, &on_curves(claimants, shares, sms))
}

/// The sum of weighted rates, on the curves as measured.
pub fn total(claimants: &[Claimant], shares: &[u32], sms: u32) -> f64 {
    worth(claimants, &on_curves(claimants, shares, sms))
}

fn on_curves(claimants: &[Claimant], shares: &[u32], sms: u32) -> Vec<f64> {
    let all = claimants.iter().zip(shares);
    all.map(|(claim, share)| claim.curve.utility(*share, sms))
        .collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SMS: u32 = 132;

    fn claim(weight: f64, min: u32, curve: &Curve) -> Claimant<'_> {
        Claimant {
            weight,
            min,
            max: SMS,
            curve,
            bandwidth: Bandwidth::default(),
        }
    }

    /// The best sum over all divisions, on the curves as measured: every state of a dynamic programme over members and steps.
    fn exact(claimants: &[Claimant], steps: u32, step: u32) -> f64 {
        let least = minima(claimants, steps, step).expect("they fit");
        let mut best: Vec<Option<f64>> = vec![None; steps as usize + 1];
        best[0] = Some(0.0);
        for (claim, least) in claimants.iter().zip(least) {
            let mut next = vec![None; steps as usize + 1];
            for (used, sum) in best.iter().enumerate() {
                let Some(sum) = sum else { continue };
                let most = (claim.max / step).max(least / step);
                for give in (least / step)..=most.min(steps - used as u32) {
                    let with = sum + claim.weight() * claim.curve.utility(give * step, SMS);
                    let slot: &mut Option<f64> = &mut next[used + give as usize];
                    *slot = Some(slot.map_or(with, |other| other.max(with)));
                }
            }
            best = next;
        }
        best.into_iter().flatten().fold(0.0, f64::max)
    }

    #[test]
    fn member_that_stops_scaling_leaves_the_rest_to_others() {
        let stops = Curve::measured([(32, 100.0), (132, 100.0)]);
        let scales = Curve::measured([(64, 50.0), (132, 103.0)]);
        let claims = [claim(1.0, 0, &stops), claim(1.0, 0, &scales)];
        let shares = divide(Rule::Utility, &claims, SMS, STEP).expect("two");
        assert_eq!(shares, [32, 96]);
        let even = divide(Rule::MaxMin, &claims, SMS, STEP).expect("two");
        assert_eq!(even, [64, 64]);
        let gain = total(&claims, &shares, SMS) / total(&claims, &even, SMS);
        assert!(gain > 1.1, "{gain}");
    }

    #[test]
    fn equals_share_evenly_and_weights_count_where_they_should() {
        let unknown = Curve::default();
        let claims = [claim(1.0, 0, &unknown), claim(3.0, 0, &unknown)];
        let by = |rule| divide(rule, &claims, SMS, STEP).expect("two");
        assert_eq!(by(Rule::Weighted), [32, 96]);
        assert_eq!(by(Rule::MaxMin), [64, 64]);
        let equal = [claim(1.0, 0, &unknown); 4];
        for rule in [Rule::Utility, Rule::MaxMin, Rule::Weighted] {
            assert_eq!(divide(rule, &equal, SMS, STEP), Some(vec![32; 4]));
        }
    }

    #[test]
    fn guarantees_are_minima_and_limits_maxima() {
        let (flat, steep) = (
            Curve::measured([(8, 1.0), (132, 1.0)]),
            Curve::measured([(132, 1.0)]),
        );
        let claims = [
            claim(1.0, minimum(0.5, 1.0, SMS), &flat),
            claim(9.0, 0, &steep),
        ];
        let shares = divide(Rule::Utility, &claims, SMS, STEP).expect("two");
        assert_eq!(shares, [72, 56]);
        let limited = Claimant {
            max: 40,
            ..claims[1]
        };
        let shares = divide(Rule::Utility, &[claims[0], limited], SMS, STEP).expect("two");
        assert_eq!(shares, [88, 40]);
    }

    #[test]
    fn guaranteed_sms_go_to_no_other_member() {
        let curve = Curve::measured([(64, 50.0), (132, 100.0)]);
        let unknown = Curve::default();
        let mut claims = vec![claim(1.0, minimum(0.9, 1.0, 100), &curve)];
        claims.extend([claim(1.0, 0, &unknown); 10]);
        assert_eq!(divide(Rule::Utility, &claims, 100, 5), None);
        let shares = divide(Rule::Utility, &claims, 100, 1).expect("it fits");
        assert_eq!((shares[0], &shares[1..]), (90, &[1; 10][..]));
    }

    #[test]
    fn thirds_fit_where_steps_are_fine_enough() {
        let unknown = Curve::default();
        let third = minimum(1.0 / 3.0, 1.0, SMS);
        assert_eq!(third, 44);
        let claims = [claim(1.0, third, &unknown); 3];
        assert_eq!(divide(Rule::Weighted, &claims, SMS, STEP), None);
        let shares = divide(Rule::Weighted, &claims, SMS, 4);
        assert_eq!(shares, Some(vec![44; 3]));
    }

    #[test]
    fn a_member_alone_or_too_many_are_not_divided() {
        let unknown = Curve::default();
        assert_eq!(
            divide(Rule::Utility, &[claim(1.0, 0, &unknown)], SMS, STEP),
            None
        );
        assert_eq!(
            divide(Rule::Utility, &vec![claim(1.0, 0, &unknown); 17], SMS, STEP),
            None
        );
    }

    #[test]
    fn of_two_that_scale_alike_the_one_bound_by_memory_has_less() {
        let points = (1..=16).map(|n| (8 * n, 1.0 / (0.5 + 0.5 * 16.0 / f64::from(n))));
        let curve = Curve::measured(points);
        let part = |part| Bandwidth {
            demand: part,
            sensitivity: part,
        };
        let mut claims = [claim(1.0, 0, &curve); 2];
        (claims[0].bandwidth, claims[1].bandwidth) = (part(1.0), part(0.2));
        let shares = divide(Rule::Utility, &claims, SMS, STEP).expect("two");
        assert!(shares[0] < shares[1], "{shares:?}");
        let even = divide(Rule::Weighted, &claims, SMS, STEP).expect("two");
        assert!(total(&claims, &shares, SMS) > total(&claims, &even, SMS));
    }

    fn rule() -> impl Strategy<Value = Rule> {
        prop::sample::select(vec![Rule::Utility, Rule::MaxMin, Rule::Weighted])
    }

    fn curve() -> impl Strategy<Value = Curve> {
        let point = (1..=17_u32, 0.01..10.0_f64);
        prop::collection::vec(point, 0..12)
            .prop_map(|points| Curve::measured(points.into_iter().map(|(n, rate)| (n * 8, rate))))
    }

    /// Rising SMs with gains that fall: what water-filling solves exactly.
    fn concave() -> impl Strategy<Value = Curve> {
        prop::collection::vec(0.001..1.0_f64, 17).prop_map(|mut gains| {
            gains.sort_by(|a, b| b.total_cmp(a));
            let mut rate = 0.0;
            Curve::measured((1..).zip(gains).map(|(n, gain)| {
                rate += gain;
                (n * 8, rate)
            }))
        })
    }

    type Member<C> = (f64, f64, C);

    fn members<C>(curve: impl Strategy<Value = C>) -> impl Strategy<Value = Vec<Member<C>>>
    where
        C: std::fmt::Debug,
    {
        prop::collection::vec((0.1..10.0_f64, 0.0..0.4_f64, curve), 2..7)
    }

    /// Their guarantees are scaled down so that they fit in whole steps, with one for each.
    fn claims(members: &[Member<Curve>]) -> Vec<Claimant<'_>> {
        let sum: f64 = members.iter().map(|member| member.1).sum();
        let room = 1.0 - members.len() as f64 / 16.0;
        let fits = |guaranteed: f64| minimum(guaranteed / sum.max(1.0) * room, 1.0, 128);
        members
            .iter()
            .map(|(weight, guaranteed, curve)| claim(*weight, fits(*guaranteed), curve))
            .collect()
    }

    proptest! {
        #[test]
        fn all_steps_are_given_and_minima_kept(
            members in members(curve()), rule in rule(),
        ) {
            let claims = claims(&members);
            let shares = divide(rule, &claims, SMS, STEP).expect("some");
            prop_assert_eq!(shares.iter().sum::<u32>(), 128);
            for (claim, share) in claims.iter().zip(&shares) {
                prop_assert!(share % STEP == 0 && *share >= STEP);
                prop_assert!(*share >= claim.min, "{shares:?} {claim:?}");
            }
        }

        #[test]
        fn minima_are_kept_or_nothing_is_divided(
            mins in prop::collection::vec(0..=SMS, 2..40), rule in rule(), step in 1..=STEP,
        ) {
            let unknown = Curve::default();
            let claims: Vec<_> = mins.iter().map(|min| claim(1.0, *min, &unknown)).collect();
            if let Some(shares) = divide(rule, &claims, SMS, step) {
                prop_assert!(shares.iter().sum::<u32>() <= SMS);
                prop_assert!(shares.iter().zip(&mins).all(|(share, min)| share >= min), "{shares:?}");
            }
        }

        #[test]
        fn on_concave_curves_water_filling_is_exact(members in members(concave())) {
            let claims = claims(&members);
            let shares = divide(Rule::Utility, &claims, SMS, STEP).expect("some");
            let (got, best) = (total(&claims, &shares, SMS), exact(&claims, 16, STEP));
            prop_assert!((got - best).abs() <= 1e-6 * best, "{got} of {best}");
        }

        #[test]
        fn on_any_curve_it_misses_the_best_by_at_most_the_dents_where_it_stops(members in members(curve())) {
            let claims = claims(&members);
            let shares = divide(Rule::Utility, &claims, SMS, STEP).expect("some");
            let (got, best) = (total(&claims, &shares, SMS), exact(&claims, 16, STEP));
            let dent = |(claim, share): (&Claimant, &u32)| {
                let hull = claim.curve.hull(SMS);
                claim.weight * (hull.relative(*share, SMS) - claim.curve.utility(*share, SMS))
            };
            let dents: f64 = claims.iter().zip(&shares).map(dent).sum();
            prop_assert!(got >= best - dents - 1e-6 * best, "{got} of {best}, dents {dents}");
            prop_assert!(got <= best + 1e-6 * best);
        }
    }
}
