//! FGD's experiment: tenants arrive and none leaves; how much of the fleet is given out when so much was asked for.

use rand::{Rng, SeedableRng, rngs::StdRng, seq::SliceRandom};
use serde::Serialize;

use crate::{
    arrivals::arrivals,
    engine::{Engine, Moves},
    fleet::{Fleet, Free, Gpus, Place},
    index::Index,
    model::{Demand, NodeSpec},
    rules::Rule,
    typical::Typical,
};

/// The experiment ends when the workload asked for so much of the GPUs, in percent (FGD's "tune" of 1.3).
const ARRIVED_PERCENT: u64 = 130;

/// How the fleet was when so much had been asked for.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Point {
    /// Asked for so far, in percent of the fleet's GPUs.
    pub arrived: u32,
    /// Given out, in percent of the fleet's GPUs.
    pub allocated: f64,
    /// Fragments, in percent of the fleet's GPUs.
    pub fragments: f64,
}

impl Run {
    /// How the fleet was when so much had been asked for, in percent of its GPUs: as the last arrival until then had left it.
    pub fn at(&self, arrived: u32) -> Option<Point> {
        let points = self.points.iter().copied();
        points.take_while(|point| point.arrived <= arrived).last()
    }
}

/// The result of one replay.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Run {
    /// One point per percent asked for: the mean over the arrivals that are nearest to it, as FGD counts.
    pub points: Vec<Point>,
    /// Tenants that were placed.
    pub placed: usize,
    /// Tenants that fitted nowhere.
    pub refused: usize,
    /// Tenants that were moved to make room for others.
    pub moves: usize,
}

/// The planner that chooses places.
#[derive(Clone, Copy, Debug)]
pub enum Policy {
    /// A known rule.
    Rule(Rule),
    /// The [`Engine`]; before a tenant is refused it may move others.
    Gpumux(Moves),
}

/// Lets a workload arrive on an empty fleet until it asked for 130% of the GPUs. The same arguments give the same run.
pub fn run(specs: &[NodeSpec], workload: &[Demand], policy: Policy, seed: u64) -> Run {
    let mut replay = Replay::new(specs, workload, policy, seed);
    while replay.step().is_some() {}
    replay.result()
}

/// A replay that goes on by one arrival at a time.
pub struct Replay {
    fleet: Fleet,
    typical: Typical,
    demands: Vec<Demand>,
    arrived: usize,
    placer: Placer,
    rng: StdRng,
    meter: Meter,
    placed: usize,
    moves: usize,
}

enum Placer {
    Rule(Rule, Index),
    Engine(Box<Engine>, Moves),
}

impl Replay {
    /// Before the first arrival; a policy that learns has learned.
    pub fn new(specs: &[NodeSpec], workload: &[Demand], policy: Policy, seed: u64) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let fleet = Fleet::new(specs.to_vec());
        let typical = Typical::of(workload);
        let demands = arrivals(workload, fleet.total_milli(), ARRIVED_PERCENT, &mut rng);
        let mut ranks: Vec<u32> = (0..specs.len() as u32).collect();
        ranks.shuffle(&mut rng);
        let placer = match policy {
            Policy::Rule(rule) => Placer::Rule(rule, Index::new(ranks)),
            Policy::Gpumux(moves) => {
                Placer::Engine(Box::new(Engine::new(specs, workload, ranks)), moves)
            }
        };
        let meter = Meter::new(&fleet, &typical);
        Self {
            fleet,
            typical,
            demands,
            arrived: 0,
            placer,
            rng,
            meter,
            placed: 0,
            moves: 0,
        }
    }

    /// The next tenant arrives; whether it was placed. None after the last.
    pub fn step(&mut self) -> Option<bool> {
        let demand = self.demands.get(self.arrived)?;
        let id = self.arrived as u64;
        self.arrived += 1;
        self.meter.arrived += u64::from(demand.total_milli());
        let changes = self.fleet.changes();
        let placed = match &mut self.placer {
            Placer::Engine(engine, moves) => {
                let admitted = engine
                    .admit(&mut self.fleet, id, demand, *moves)
                    .ok()
                    .flatten();
                self.moves += admitted.as_ref().map_or(0, |admitted| admitted.moves.len());
                admitted.is_some()
            }
            Placer::Rule(rule, index) => by_rule(
                &self.fleet,
                index,
                &self.typical,
                demand,
                *rule,
                &mut self.rng,
            )
            .is_some_and(|place| self.fleet.place(id, *demand, place).is_ok()),
        };
        self.placed += usize::from(placed);
        self.meter.note(&self.fleet, &self.typical, changes);
        Some(placed)
    }

    /// The fleet as it is now.
    pub fn fleet(&self) -> &Fleet {
        &self.fleet
    }

    /// What happened so far.
    pub fn result(&self) -> Run {
        let refused = self.arrived - self.placed;
        Run {
            points: self.meter.points(),
            placed: self.placed,
            refused,
            moves: self.moves,
        }
    }
}

/// The place that the rule takes for the demand.
pub(crate) fn by_rule(
    fleet: &Fleet,
    index: &mut Index,
    typical: &Typical,
    demand: &Demand,
    rule: Rule,
    rng: &mut StdRng,
) -> Option<Place> {
    let score = |_, free: &_| rule.score(free, demand, typical).map(|(score, _)| score);
    let mut order = index.order(fleet, demand, score);
    let node = match rule {
        Rule::Random if order.len() > 0 => order.nth(rng.random_range(0..order.len()))?,
        _ => order.next()?,
    };
    let free = &fleet.free()[node as usize];
    let mut gpus = rule.score(free, demand, typical)?.1;
    if rule == Rule::Random && demand.is_fraction() {
        let open: Vec<usize> = (0..usize::from(free.gpus))
            .filter(|gpu| free.hosts(*gpu, demand))
            .collect();
        gpus = Gpus::default().with(open[rng.random_range(0..open.len())]);
    }
    Some(Place { node, gpus })
}

/// Sums over the fleet, and their means per percent asked for.
struct Meter {
    capacity: u64,
    tenants: u64,
    arrived: u64,
    /// Per node: free shares, and fragments times tenants.
    nodes: Vec<(u64, u64)>,
    free: u64,
    fragments: u64,
    /// Per percent: samples, allocated, fragments.
    sums: Vec<(u64, f64, f64)>,
}

impl Meter {
    fn new(fleet: &Fleet, typical: &Typical) -> Self {
        let node = |free: &Free| (u64::from(free.total_milli()), typical.fragments(free));
        let nodes: Vec<(u64, u64)> = fleet.free().iter().map(node).collect();
        Self {
            capacity: fleet.total_milli().max(1),
            tenants: typical.tenants().max(1),
            arrived: 0,
            free: nodes.iter().map(|(free, _)| free).sum(),
            fragments: nodes.iter().map(|(_, fragments)| fragments).sum(),
            nodes,
            sums: Vec::new(),
        }
    }

    fn percent(&self, milli: f64) -> f64 {
        milli * 100.0 / self.capacity as f64
    }

    /// Counts the state after an arrival; `changes` is the fleet's count before it.
    fn note(&mut self, fleet: &Fleet, typical: &Typical, changes: u64) {
        for node in fleet.changed_since(changes) {
            let free = &fleet.free()[node as usize];
            let known = &mut self.nodes[node as usize];
            let now = (u64::from(free.total_milli()), typical.fragments(free));
            self.free = self.free - known.0 + now.0;
            self.fragments = self.fragments - known.1 + now.1;
            *known = now;
        }
        let at = self.percent(self.arrived as f64).round() as usize;
        let allocated = self.percent((self.capacity - self.free) as f64);
        let fragments = self.percent(self.fragments as f64 / self.tenants as f64);
        self.sums.resize(self.sums.len().max(at + 1), (0, 0.0, 0.0));
        let sum = &mut self.sums[at];
        *sum = (sum.0 + 1, sum.1 + allocated, sum.2 + fragments);
    }

    fn points(&self) -> Vec<Point> {
        let sums = (0..).zip(&self.sums).filter(|(_, sum)| sum.0 > 0);
        let point = |(arrived, sum): (u32, &(u64, f64, f64))| {
            let samples = sum.0 as f64;
            Point {
                arrived,
                allocated: sum.1 / samples,
                fragments: sum.2 / samples,
            }
        };
        sums.map(point).collect()
    }
}
