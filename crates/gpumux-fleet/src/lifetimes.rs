//! How many GPUs a workload needs while its tenants come and go at the times of the trace.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, VecDeque},
};

use rand::{SeedableRng, rngs::StdRng, seq::SliceRandom};
use serde::Serialize;

use crate::{
    fleet::Fleet,
    model::{Demand, NodeSpec, Pod},
    sizing::{Chooser, Sharing, shares, smallest},
};

/// A fleet suffices if at most this part of the tenants with GPUs finds no room on arrival, in percent.
const WAITED_PERCENT: f64 = 1.0;
/// Moments at which shares are looked at: every hundredth arrival or rarer.
const MOMENTS: usize = 100;

/// The smallest fleet on which 99% of the tenants never wait, and what happened there.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Lived {
    /// Number of GPUs.
    pub gpus: usize,
    /// Of the tenants with GPUs: percent that found no room on arrival.
    pub waited: f64,
    /// Longest wait, in seconds. None if a tenant never found room.
    pub longest_wait_s: Option<u64>,
    /// As in [`crate::sizing::Need`], mean over moments of arrival.
    pub attained: Option<f64>,
    /// As in [`crate::sizing::Need`], mean over moments of arrival.
    pub best_effort: Vec<(f64, Option<f64>)>,
}

/// Finds the smallest fleet, to `step` GPUs; the nodes come in an order drawn with the seed. None if four times the
/// list of nodes is too small.
pub fn needed(
    specs: &[NodeSpec],
    pods: &[Pod],
    sharing: Sharing,
    seed: u64,
    step: usize,
    uses: &[f64],
) -> Option<Lived> {
    let mut specs = specs.to_vec();
    specs.shuffle(&mut StdRng::seed_from_u64(seed));
    smallest(&specs, step, |specs| {
        let lived = live(specs, pods, sharing, uses);
        (lived.waited <= WAITED_PERCENT).then_some(lived)
    })
}

/// Lets the tenants come and go on a fleet of these nodes. A tenant that finds no room waits, and runs for its lifetime
/// once it is placed; when one goes, those that wait are tried again in the order of arrival.
pub fn live(specs: &[NodeSpec], pods: &[Pod], sharing: Sharing, uses: &[f64]) -> Lived {
    let workload: Vec<Demand> = pods.iter().map(|pod| sharing.seen(pod)).collect();
    let mut life = Life {
        fleet: Fleet::new(specs.to_vec()),
        chooser: Chooser::new(specs, &workload, sharing),
        workload,
        going: BinaryHeap::new(),
    };
    let mut order: Vec<usize> = (0..pods.len()).collect();
    order.sort_by_key(|id| pods[*id].created_s);
    let (mut queue, mut waited, mut longest) = (VecDeque::new(), 0, Some(0));
    let mut moments = Vec::new();
    let every = pods.len().div_ceil(MOMENTS).max(1);
    for (nth, id) in order.into_iter().enumerate() {
        life.until(pods[id].created_s, pods, &mut queue, &mut longest);
        if !life.arrive(id, pods, pods[id].created_s) {
            waited += usize::from(pods[id].demand.gpus > 0);
            queue.push_back(id);
        }
        if nth % every == 0 {
            moments.push(shares(&life.fleet, pods, sharing, uses));
        }
    }
    life.until(u64::MAX - 1, pods, &mut queue, &mut longest);
    if queue.iter().any(|id| pods[*id].demand.gpus > 0) {
        longest = None;
    }
    let tenants = pods.iter().filter(|pod| pod.demand.gpus > 0).count();
    let mean = |values: Vec<f64>| {
        (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
    };
    let rate = |(at, used): (usize, &f64)| {
        let rates = moments.iter().filter_map(|(_, rates)| rates[at].1);
        (*used, mean(rates.collect()))
    };
    Lived {
        gpus: specs.iter().map(|spec| usize::from(spec.gpus)).sum(),
        waited: waited as f64 * 100.0 / tenants.max(1) as f64,
        longest_wait_s: longest,
        attained: mean(
            moments
                .iter()
                .filter_map(|(attained, _)| *attained)
                .collect(),
        ),
        best_effort: uses.iter().enumerate().map(rate).collect(),
    }
}

struct Life {
    fleet: Fleet,
    chooser: Chooser,
    workload: Vec<Demand>,
    /// When tenants go, the first one first.
    going: BinaryHeap<Reverse<(u64, usize)>>,
}

impl Life {
    /// Places a tenant if there is room.
    fn arrive(&mut self, id: usize, pods: &[Pod], now: u64) -> bool {
        let demand = self.workload[id];
        let place = self.chooser.place(&self.fleet, &demand);
        let placed = place.is_some_and(|at| self.fleet.place(id as u64, demand, at).is_ok());
        if placed {
            let lives = pods[id].deleted_s.saturating_sub(pods[id].created_s);
            self.going.push(Reverse((now.saturating_add(lives), id)));
        }
        placed
    }

    /// Lets tenants go up to this time, and those that wait come in.
    fn until(
        &mut self,
        now: u64,
        pods: &[Pod],
        queue: &mut VecDeque<usize>,
        longest: &mut Option<u64>,
    ) {
        while let Some(Reverse((at, id))) = self.going.peek().copied() {
            if at > now {
                break;
            }
            self.going.pop();
            self.fleet.release(id as u64);
            // All that go at one moment go before others come in.
            if matches!(self.going.peek(), Some(Reverse((next, _))) if *next == at) {
                continue;
            }
            queue.retain(|id| {
                let placed = self.arrive(*id, pods, at);
                if placed && pods[*id].demand.gpus > 0 {
                    let wait = at - pods[*id].created_s;
                    *longest = longest.map(|longest| longest.max(wait));
                }
                !placed
            });
        }
    }
}
