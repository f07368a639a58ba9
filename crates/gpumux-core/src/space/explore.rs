//! Learning curves while programs run: small excursions from the shares in force. Only `gpumux-sim` can make them: on a real
//! device a share is set when a process starts (docs/space.md says why).

use super::{Claimant, STEP};

/// Shares to try for a moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trial {
    /// SMs per member, in the claimants' order.
    pub shares: Vec<u32>,
    /// The member with more than before.
    pub up: usize,
    /// The member with less.
    pub down: usize,
}

/// Proposes excursions. Every pair of members gets its turn, with steps that grow from one to a quarter of what the giver
/// has, so that curves become known near the shares first and farther out later.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Explorer {
    turn: usize,
}

/// The excursion is so many steps long in turn.
const REACHES: [u32; 3] = [1, 2, 4];

impl Explorer {
    /// The next excursion from `shares`; `None` if no member can give anything: all members are at their minimum or alone.
    pub fn next(&mut self, claimants: &[Claimant], shares: &[u32]) -> Option<Trial> {
        let members = claimants.len().min(shares.len());
        let pairs = members * members.saturating_sub(1);
        for _ in 0..pairs * REACHES.len() {
            let turn = self.turn;
            self.turn = (turn + 1) % (pairs * REACHES.len());
            let (pair, reach) = (turn % pairs, REACHES[turn / pairs % REACHES.len()]);
            // Pairs of different members: the second skips the first.
            let (up, other) = (pair / (members - 1), pair % (members - 1));
            let down = other + usize::from(other >= up);
            let moved = reach * STEP;
            let left = shares[down].saturating_sub(moved);
            let gentle = reach == 1 || moved * 4 <= shares[down];
            if gentle
                && left >= claimants[down].min.max(STEP)
                && shares[up] + moved <= claimants[up].max
            {
                let mut shares = shares.to_vec();
                shares[up] += moved;
                shares[down] = left;
                return Some(Trial { shares, up, down });
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::space::Curve;

    fn claims<'a>(curve: &'a Curve, minima: &[u32]) -> Vec<Claimant<'a>> {
        let of = |min: &u32| Claimant {
            weight: 1.0,
            min: *min,
            max: 128,
            curve,
        };
        minima.iter().map(of).collect()
    }

    #[test]
    fn every_member_goes_up_and_down_and_the_sum_stays() {
        let curve = Curve::default();
        let claims = claims(&curve, &[0; 3]);
        let shares = [48, 40, 40];
        let mut explorer = Explorer::default();
        let (mut up, mut down) = ([0; 3], [0; 3]);
        for _ in 0..18 {
            let trial = explorer.next(&claims, &shares).expect("room");
            assert_eq!(trial.shares.iter().sum::<u32>(), 128);
            assert!(trial.shares[trial.up] > shares[trial.up]);
            assert!(trial.shares[trial.down] >= shares[trial.down] * 3 / 4);
            up[trial.up] += 1;
            down[trial.down] += 1;
        }
        assert!(
            up.iter().chain(&down).all(|turns| *turns > 2),
            "{up:?} {down:?}"
        );
    }

    #[test]
    fn no_member_is_tried_below_its_minimum() {
        let curve = Curve::default();
        let claims = claims(&curve, &[64, 0]);
        let mut explorer = Explorer::default();
        for _ in 0..10 {
            let trial = explorer
                .next(&claims, &[64, 64])
                .expect("the second can give");
            assert_eq!((trial.up, trial.down), (0, 1));
        }
        assert_eq!(explorer.next(&claims[..1], &[128]), None);
        let both = [claims[0]; 2];
        assert_eq!(explorer.next(&both, &[64, 64]), None);
    }
}
