//! The order in which tenants of a workload arrive.

use rand::{Rng, rngs::StdRng, seq::SliceRandom};

use crate::model::Demand;

/// The demands of a workload in random order, with random ones of it again, or without some, until together they ask
/// for `percent` of the fleet's GPUs.
pub fn arrivals(
    workload: &[Demand],
    capacity_milli: u64,
    percent: u64,
    rng: &mut StdRng,
) -> Vec<Demand> {
    let target = capacity_milli * percent / 100;
    let mut demands = workload.to_vec();
    demands.shuffle(rng);
    let mut asked: u64 = demands
        .iter()
        .map(|demand| u64::from(demand.total_milli()))
        .sum();
    while asked > target {
        let out = demands.remove(rng.random_range(0..demands.len()));
        asked -= u64::from(out.total_milli());
    }
    // Without GPUs in the workload nothing ever adds up.
    while workload.iter().any(|demand| demand.total_milli() > 0) {
        let more = workload[rng.random_range(0..workload.len())];
        // As FGD's simulator does, which looks at the share of one GPU only.
        if asked + u64::from(more.milli) > target {
            break;
        }
        asked += u64::from(more.total_milli());
        demands.push(more);
    }
    demands
}
