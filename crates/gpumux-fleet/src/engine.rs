//! gpumux's own placement.
//!
//! A guaranteed tenant goes where the fleet loses least by the learned [`Outlook`]. Losses that differ by little count as equal, and then the node of the lowest rank is taken, so that
//! nodes fill one after another. A preemptible tenant goes where most is idle. Both keep clear of neighbours that need
//! the same memory bandwidth.

use crate::{
    fleet::{Fleet, Free, Gpus, Move, NodeId, Place, Refused, TenantId, part_of},
    index::Index,
    model::{Class, Demand, NodeSpec, WHOLE},
    outlook::{Outlook, UNIT},
};

/// Losses within one step count as equal, in thousandths of a GPU. As coarse as FGD's own rounding near 0.
const STEP: u64 = 40;
/// A preemptible tenant's GPUs are compared in steps of this much use, in thousandths.
const SPREAD: u32 = 100;
/// Demands for memory bandwidth on one GPU disturb each other from this sum on, in thousandths of the card's.
const BANDWIDTH: u32 = 900;
/// Network domains that are tried for a gang as a whole.
const MOST_DOMAINS: usize = 64;
/// Score that outweighs every difference in loss on one node.
const GRAVE: i64 = 1_000_000;

/// Chooses places. Pure: equal calls give equal answers.
#[derive(Clone, Debug)]
pub struct Engine {
    outlook: Outlook,
    index: Index,
    pods: Index<Vec<Demand>>,
}

impl Engine {
    /// An engine for a fleet of these nodes, and for tenants like those of the workload. Learning takes a tenth of a
    /// second, and on large fleets a tenth of a millisecond per GPU. Nodes of equal score are taken by rank (see [`Index::new`]).
    pub fn new(specs: &[NodeSpec], workload: &[Demand], ranks: Vec<u32>) -> Self {
        let (specs, workload) = by_scarcer(specs, workload);
        Self {
            outlook: Outlook::learn(&specs, &workload, 0),
            pods: Index::new(ranks.clone()),
            index: Index::new(ranks),
        }
    }

    /// The fleet was built anew, from other nodes perhaps: what is known of its nodes' scores no longer holds. What was
    /// learned of the workload does.
    pub fn forget_nodes(&mut self) {
        (self.index, self.pods) = (Index::default(), Index::default());
    }

    /// The nodes on which these demands of one pod fit together, the best first, if another scheduler chooses the GPUs
    /// of a node: for each demand in turn the first ones that have room, as that of Kubernetes does.
    pub fn order(&mut self, fleet: &Fleet, demands: &[Demand]) -> Vec<NodeId> {
        let scorer = Scorer(&self.outlook);
        let score = |_, free: &Free| scorer.first_fit(free, demands);
        self.pods.order(fleet, &demands.to_vec(), score).collect()
    }

    /// Where the demand should go. None if it fits nowhere.
    pub fn choose(&mut self, fleet: &Fleet, demand: &Demand) -> Option<Place> {
        self.choose_in(fleet, demand, None)
    }

    /// Where so many equal parts of one tenant should go: in the network domain of the best node if all fit there,
    /// else in that of the next best, else each beside the one before it as far as that goes. None if they do not
    /// all fit. The fleet is as before in any case.
    pub fn choose_gang(
        &mut self,
        fleet: &mut Fleet,
        demand: &Demand,
        parts: u32,
    ) -> Option<Vec<Place>> {
        let scorer = Scorer(&self.outlook);
        let score = |_, free: &Free| scorer.score(free, demand).map(|(score, _)| score);
        let mut domains = Vec::new();
        for node in self.index.order(fleet, demand, score) {
            let domain = fleet.specs()[node as usize].domain;
            if domains.len() < MOST_DOMAINS && !domains.contains(&domain) {
                domains.push(domain);
            }
        }
        let within = domains
            .into_iter()
            .map(Some)
            .find_map(|only| self.try_gang(fleet, demand, parts, only));
        within.or_else(|| self.try_gang(fleet, demand, parts, None))
    }

    fn try_gang(
        &mut self,
        fleet: &mut Fleet,
        demand: &Demand,
        parts: u32,
        only: Option<u32>,
    ) -> Option<Vec<Place>> {
        // Numbers that no tenant has; they are free again when this returns.
        let unused = (0..TenantId::MAX)
            .rev()
            .filter(|id| !fleet.tenants().contains_key(id));
        let ids: Vec<TenantId> = unused.take(parts as usize).collect();
        let mut places: Vec<Place> = Vec::new();
        let mut near = only;
        for id in &ids {
            let beside = near.and_then(|domain| self.choose_in(fleet, demand, Some(domain)));
            let chosen = beside.or_else(|| {
                if only.is_none() {
                    self.choose_in(fleet, demand, None)
                } else {
                    None
                }
            });
            let Some(place) = chosen else { break };
            if fleet.place(*id, *demand, place).is_err() {
                break;
            }
            near = Some(fleet.specs()[place.node as usize].domain);
            places.push(place);
        }
        for id in &ids[..places.len()] {
            fleet.release(*id);
        }
        (places.len() == parts as usize).then_some(places)
    }

    /// The best place in the fleet, or in one network domain.
    fn choose_in(&mut self, fleet: &Fleet, demand: &Demand, domain: Option<u32>) -> Option<Place> {
        let scorer = Scorer(&self.outlook);
        let score = |_, free: &Free| scorer.score(free, demand).map(|(score, _)| score);
        let inside =
            |node: &u32| domain.is_none_or(|domain| fleet.specs()[*node as usize].domain == domain);
        let node = self.index.order(fleet, demand, score).find(inside)?;
        let (_, gpus) = scorer.score(&fleet.free()[node as usize], demand)?;
        Some(Place { node, gpus })
    }

    /// Places the demand, if need be after moving tenants between GPUs of one node ([`Self::room`]). Returns where
    /// it is and what was moved.
    ///
    /// # Errors
    /// The number is taken. `Ok(None)`: it fits nowhere.
    pub fn admit(
        &mut self,
        fleet: &mut Fleet,
        id: TenantId,
        demand: &Demand,
        moves: Moves,
    ) -> Result<Option<Admitted>, Refused> {
        if fleet.tenants().contains_key(&id) {
            return Err(Refused::Placed(id));
        }
        let mut made = Vec::new();
        if self.choose(fleet, demand).is_none() {
            made = self.room(fleet, demand, moves).unwrap_or_default();
            for Move { tenant, to } in &made {
                let Some(old) = fleet.release(*tenant) else {
                    continue;
                };
                fleet.place(*tenant, old.demand, *to)?;
            }
        }
        let Some(place) = self.choose(fleet, demand) else {
            return Ok(None);
        };
        fleet.place(id, *demand, place)?;
        Ok(Some(Admitted { place, moves: made }))
    }

    /// The cheapest moves of fractional tenants within one node that make room for the demand.
    pub fn room(&self, fleet: &Fleet, demand: &Demand, moves: Moves) -> Option<Vec<Move>> {
        if moves.most_mib == 0 || demand.gpus == 0 || demand.class == Class::Preemptible {
            return None;
        }
        let roomy = |free: &Free| {
            free.cpu_milli >= demand.cpu_milli
                && free.memory_mib >= demand.memory_mib
                && demand.models.accepts(free.model)
                && free.total_milli() >= demand.total_milli()
        };
        let nodes = (0..).zip(fleet.free()).filter(|(_, free)| roomy(free));
        let found = nodes.filter_map(|(node, _)| fleet.emptied(node, demand, moves.card_mib));
        let (cost, made) = found.min_by_key(|(cost, made)| (*cost, made.len()))?;
        (cost <= moves.most_mib).then_some(made)
    }
}

/// Nodes and tenants as the measures of loss see them: where memory is known, a guaranteed share of a GPU is the larger part
/// that the tenant takes, of its time or of its memory (of the smallest card).
fn by_scarcer(specs: &[NodeSpec], workload: &[Demand]) -> (Vec<NodeSpec>, Vec<Demand>) {
    let cards = specs.iter().map(|spec| spec.gpu_memory_mib);
    let card = cards.filter(|mib| *mib > 0).min().unwrap_or(0);
    let node = |spec: &NodeSpec| NodeSpec {
        gpu_memory_mib: 0,
        ..spec.clone()
    };
    let tenant = |demand: &Demand| match demand.class {
        Class::Guaranteed if card > 0 && demand.gpus > 0 => Demand {
            milli: demand.milli.max(part_of(demand.gpu_memory_mib, card)),
            gpu_memory_mib: 0,
            ..*demand
        },
        _ => *demand,
    };
    (
        specs.iter().map(node).collect(),
        workload.iter().map(tenant).collect(),
    )
}

/// What moving may cost.
#[derive(Clone, Copy, Debug, Default)]
pub struct Moves {
    /// GPU memory that may be moved for one tenant, in MiB. 0: nothing is moved.
    pub most_mib: u64,
    /// Memory of a card of which the trace does not tell, in MiB: a tenant that states no memory is taken to use its
    /// share of it.
    pub card_mib: u32,
}

/// A tenant was placed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Admitted {
    /// Where it is.
    pub place: Place,
    /// What was moved to make room.
    pub moves: Vec<Move>,
}

/// What a place is worth, from what is free and nothing else.
struct Scorer<'a>(&'a Outlook);

impl Scorer<'_> {
    /// The node's score, and the best GPUs there. None if the demand does not fit.
    fn score(&self, free: &Free, demand: &Demand) -> Option<(i64, Gpus)> {
        if !free.fits(demand) {
            return None;
        }
        match demand.class {
            Class::Preemptible => self.spread(free, demand),
            Class::Guaranteed if demand.is_fraction() => {
                let before = self.loss(free);
                let mut best: Option<(i64, Gpus)> = None;
                for gpus in (0..usize::from(free.gpus)).map(|gpu| Gpus::default().with(gpu)) {
                    let Some(score) = self.packed(free, before, demand, gpus) else {
                        continue;
                    };
                    if best.is_none_or(|(other, _)| score > other) {
                        best = Some((score, gpus));
                    }
                }
                best
            }
            Class::Guaranteed => {
                let gpus = free.tightest(demand)?;
                Some((self.packed(free, self.loss(free), demand, gpus)?, gpus))
            }
        }
    }

    /// The node's score if each demand takes the first GPUs that have room. None if they do not fit together.
    fn first_fit(&self, free: &Free, demands: &[Demand]) -> Option<i64> {
        let (mut left, mut cost, mut packs) = (*free, 0, false);
        for demand in demands {
            let gpus = left.first(demand)?;
            if demand.class == Class::Preemptible {
                let used = gpus.iter().map(|gpu| left.used_milli(gpu)).max();
                cost += i64::from(used.unwrap_or(0) / SPREAD);
            } else {
                packs = true;
            }
            left = left.without(demand, gpus)?;
            cost += crowded(&left, gpus);
        }
        let gain = match packs {
            true => self.loss(free) as i64 - self.loss(&left) as i64,
            false => 0,
        };
        Some(gain.div_euclid((STEP * UNIT) as i64) - cost)
    }

    /// What the fleet loses on this node, in thousandths of a GPU times [`UNIT`].
    fn loss(&self, free: &Free) -> u64 {
        self.0.loss(&free.scarcer())
    }

    fn packed(&self, free: &Free, before: u64, demand: &Demand, gpus: Gpus) -> Option<i64> {
        let left = free.without(demand, gpus)?;
        let gain = before as i64 - self.loss(&left) as i64;
        Some(gain.div_euclid((STEP * UNIT) as i64) - crowded(&left, gpus))
    }

    fn spread(&self, free: &Free, demand: &Demand) -> Option<(i64, Gpus)> {
        let mut gpus = Gpus::default();
        let mut used = 0;
        for _ in 0..demand.gpus {
            let open = (0..usize::from(free.gpus))
                .filter(|gpu| gpus.0 >> gpu & 1 == 0 && free.hosts(*gpu, demand));
            let (use_of, gpu) = open.map(|gpu| (free.used_milli(gpu), gpu)).min()?;
            used = used.max(use_of);
            gpus = gpus.with(gpu);
        }
        let left = free.without(demand, gpus)?;
        Some((-i64::from(used / SPREAD) - crowded(&left, gpus), gpus))
    }
}

/// What it costs that tenants of these GPUs want more memory bandwidth together than the card has.
fn crowded(left: &Free, gpus: Gpus) -> i64 {
    let over = |gpu| left.bandwidth_milli(gpu).saturating_sub(BANDWIDTH);
    let over: u32 = gpus.iter().map(over).sum();
    if over == 0 {
        0
    } else {
        GRAVE + i64::from(over / SPREAD)
    }
}

/// The smallest share of a GPU, in thousandths, at which a program reaches `target` of its throughput on the whole
/// one: where the tenant states an objective instead of a share. In steps of a hundredth; a whole GPU if nothing less
/// will do. An empty profile is linear.
pub fn share_for(profile: &gpumux_core::space::Curve, target: f64) -> u32 {
    let enough = |percent: &u32| profile.utility(*percent, 100) + 1e-9 >= target;
    (1..=100)
        .find(enough)
        .map_or(WHOLE, |percent| percent * WHOLE / 100)
}
