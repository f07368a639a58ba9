//! Dividing a device among those who want it: the part in which policies differ.

use crate::{Class, Micros, TenantSpec};

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
        let sane = |value: f64, min: f64, max: f64, otherwise: f64| match value.is_nan() {
            true => otherwise,
            false => value.clamp(min, max),
        };
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

/// How a policy divides a device.
pub trait Division: Send + Sync {
    /// The policy's name in configuration files.
    fn name(&self) -> &'static str;

    /// One share per claim. All claimants want the device now. Shares that don't sum to 1 are scaled.
    fn divide(&self, claims: &[Claim]) -> Vec<f64>;

    /// Whether a class yields the device at once when a higher one wants it, and not just latency's.
    fn strict(&self) -> bool {
        false
    }
}

/// Guarantees first; the rest goes to the highest class that wants it, by weight.
///
/// A latency tenant without a guarantee takes all that is not guaranteed to others. One with a guarantee is, beyond
/// it, one among the highest class of the others.
#[derive(Clone, Copy, Debug, Default)]
pub struct Priority;

impl Division for Priority {
    fn name(&self) -> &'static str {
        "priority"
    }

    fn divide(&self, claims: &[Claim]) -> Vec<f64> {
        let others = claims
            .iter()
            .map(|claim| claim.class)
            .filter(|class| *class != Class::Latency)
            .min()
            .unwrap_or(Class::Standard);
        let rank = |claim: &Claim| match claim.class {
            Class::Latency if claim.guaranteed > 0.0 => others,
            class => class,
        };
        let mut shares = guarantees(claims);
        for class in Class::ALL {
            fill(&mut shares, claims, |claim| match rank(claim) == class {
                true => claim.weight,
                false => 0.0,
            });
        }
        shares
    }

    fn strict(&self) -> bool {
        true
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
    // Each round but the last brings at least one claim to its limit.
    for _ in 0..=claims.len() {
        let rest = 1.0 - shares.iter().sum::<f64>();
        let open = |share: f64, claim: &Claim| share < claim.limit && pull(claim) > 0.0;
        let pulls = shares
            .iter()
            .zip(claims)
            .filter(|(share, claim)| open(**share, claim))
            .map(|(_, claim)| pull(claim))
            .sum::<f64>();
        if rest <= 1e-12 || pulls <= 0.0 {
            return;
        }
        for (share, claim) in shares.iter_mut().zip(claims) {
            if open(*share, claim) {
                *share = (*share + rest * pull(claim) / pulls).min(claim.limit);
            }
        }
    }
}

/// What belongs to those whom the division leaves less, in equal parts, so that nobody starves. Small enough to keep
/// every guarantee within 1%.
const FLOOR: f64 = 0.005;

/// The division's shares, made sound: none below its part of [`FLOOR`], the sum 1.
pub(super) fn shares(division: &dyn Division, claims: &[Claim]) -> Vec<f64> {
    let floor = FLOOR / claims.len().max(1) as f64;
    let mut shares = division.divide(claims);
    shares.resize(claims.len(), 0.0);
    for share in &mut shares {
        *share = if share.is_finite() {
            share.max(0.0)
        } else {
            0.0
        };
    }
    let sum: f64 = shares.iter().sum();
    if sum <= 1e-9 {
        return vec![1.0 / claims.len() as f64; claims.len()];
    }
    let low = |share: f64| share / sum < floor;
    let lifted = shares.iter().filter(|share| low(**share)).count() as f64 * floor;
    let rest: f64 = shares.iter().filter(|share| !low(**share)).sum();
    let lift = |share: &f64| match low(*share) {
        true => floor,
        false => share / rest * (1.0 - lifted),
    };
    shares.iter().map(lift).collect()
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
    fn priority_serves_guarantees_then_classes() {
        use Class::{Batch, Latency, Standard};
        let plain = |class| claim(class, 0.0, 1.0, 1.0);
        check(
            &Priority,
            &[plain(Latency), plain(Standard), plain(Batch)],
            &[1.0, 0.0, 0.0],
        );
        check(
            &Priority,
            &[
                plain(Latency),
                claim(Standard, 0.2, 1.0, 1.0),
                claim(Batch, 0.1, 1.0, 1.0),
            ],
            &[0.7, 0.2, 0.1],
        );
        check(
            &Priority,
            &[
                claim(Latency, 0.2, 1.0, 1.0),
                claim(Standard, 0.0, 1.0, 3.0),
                plain(Batch),
            ],
            &[0.4, 0.6, 0.0],
        );
        check(
            &Priority,
            &[claim(Latency, 0.5, 1.0, 1.0), claim(Batch, 0.5, 1.0, 1.0)],
            &[0.5, 0.5],
        );
        check(
            &Priority,
            &[claim(Latency, 0.0, 0.3, 1.0), plain(Batch)],
            &[0.3, 0.7],
        );
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

    #[test]
    fn all_at_their_limit_share_the_rest_in_proportion() {
        let claims = [
            claim(Class::Standard, 0.0, 0.2, 1.0),
            claim(Class::Standard, 0.0, 0.4, 1.0),
        ];
        let shares = shares(&Weighted, &claims);
        assert!((shares[0] - 1.0 / 3.0).abs() < 0.01);
        assert!((shares.iter().sum::<f64>() - 1.0).abs() < 1e-9);
    }
}
