//! The best node for a demand, without looking at all nodes each time.
//!
//! Equal demands see equal scores, and a placement changes one node. So the scores of a demand are kept in order, and
//! only nodes that changed since the demand came last are scored again.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
};

use crate::{
    fleet::{Fleet, Free, NodeId},
    model::Demand,
};

/// Demands whose order of nodes is kept. One takes about 64 bytes a node: 100 KiB for 10,000 GPUs.
const MOST_DEMANDS: usize = 512;

#[derive(Clone, Debug, Default)]
struct Queue {
    /// Changes of the fleet that are contained.
    seen: u64,
    /// When it was used last.
    used: u64,
    order: BTreeSet<(Reverse<i64>, u32, NodeId)>,
    scores: Vec<Option<i64>>,
}

/// Nodes in the order of their scores, for each demand that came lately: of one tenant, or of all parts of a pod.
#[derive(Clone, Debug, Default)]
pub struct Index<K = Demand> {
    /// Among equal scores the node with the lower rank wins. Nodes beyond its end have their number as rank.
    ranks: Vec<u32>,
    queues: BTreeMap<K, Queue>,
    uses: u64,
}

impl<K: Ord + Clone + Default> Index<K> {
    /// An index in which nodes of equal score are taken in this order.
    pub fn new(ranks: Vec<u32>) -> Self {
        Self {
            ranks,
            ..Self::default()
        }
    }

    /// The nodes that can host the demand, best first. `score` must depend on nothing but its arguments.
    pub fn order(
        &mut self,
        fleet: &Fleet,
        demand: &K,
        mut score: impl FnMut(NodeId, &Free) -> Option<i64>,
    ) -> impl ExactSizeIterator<Item = NodeId> + '_ {
        self.uses += 1;
        if self.queues.len() >= MOST_DEMANDS && !self.queues.contains_key(demand) {
            let oldest = self.queues.iter().min_by_key(|(_, queue)| queue.used);
            if let Some(oldest) = oldest.map(|(demand, _)| demand.clone()) {
                self.queues.remove(&oldest);
            }
        }
        let queue = self.queues.entry(demand.clone()).or_default();
        queue.used = self.uses;
        let nodes = fleet.free().len();
        let changed: Vec<NodeId> = match queue.scores.len() == nodes {
            true => fleet.changed_since(queue.seen).collect(),
            false => (0..nodes as NodeId).collect(),
        };
        queue.scores.resize(nodes, None);
        queue.seen = fleet.changes();
        for node in changed {
            let rank = self.ranks.get(node as usize).copied().unwrap_or(node);
            let kept = &mut queue.scores[node as usize];
            let now = score(node, &fleet.free()[node as usize]);
            if *kept == now {
                continue;
            }
            if let Some(score) = *kept {
                queue.order.remove(&(Reverse(score), rank, node));
            }
            if let Some(score) = now {
                queue.order.insert((Reverse(score), rank, node));
            }
            *kept = now;
        }
        queue.order.iter().map(|(.., node)| *node)
    }
}
