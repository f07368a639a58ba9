//! How many GPUs a workload needs under different ways of sharing them.

use rand::{SeedableRng, rngs::StdRng, seq::SliceRandom};
use serde::Serialize;

use crate::{
    engine::Engine,
    fleet::{Fleet, Place},
    index::Index,
    model::{Class, Demand, NodeSpec, Pod, WHOLE, scaled},
    replay,
    rules::Rule,
    typical::Typical,
};

/// A fleet suffices if tenants that fit nowhere ask for at most this part of all shares, in percent: otherwise the size
/// is that at which the last tenant with a whole node finds one, and tells about nothing else.
const REFUSED_PERCENT: u64 = 1;

/// A way of sharing GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// A tenant has its GPUs for itself, as with the plain device plugin, also where quotas are counted by it (Kueue).
    Exclusive,
    /// The driver's time slicing: a GPU is advertised so many times, and a tenant has one of these for each GPU that
    /// it asks for. Nothing holds it to its share.
    TimeSliced(u32),
    /// Each share is a hard cap, placed by a rule: best fit (as HAMi's bin packing), GPU packing (as KAI's), FGD.
    Fractions(Rule),
    /// As above, placed by the engine.
    Guaranteed,
    /// Latency-sensitive tenants are guaranteed, best-effort ones preemptible, placed by the engine.
    Elastic,
}

impl Sharing {
    /// All that are compared.
    pub const ALL: [Self; 9] = [
        Self::Exclusive,
        Self::TimeSliced(2),
        Self::TimeSliced(4),
        Self::Fractions(Rule::Random),
        Self::Fractions(Rule::BestFit),
        Self::Fractions(Rule::GpuPacking),
        Self::Fractions(Rule::Fgd),
        Self::Guaranteed,
        Self::Elastic,
    ];

    /// Its name.
    pub fn name(self) -> String {
        match self {
            Self::Exclusive => "exclusive".to_owned(),
            Self::TimeSliced(replicas) => format!("time-sliced-{replicas}"),
            Self::Fractions(rule) => rule.name().to_owned(),
            Self::Guaranteed => "gpumux".to_owned(),
            Self::Elastic => "gpumux-elastic".to_owned(),
        }
    }

    /// What the scheduler sees of a tenant.
    pub(crate) fn seen(self, pod: &Pod) -> Demand {
        let demand = pod.demand;
        match self {
            Self::Exclusive if demand.gpus > 0 => Demand {
                milli: WHOLE,
                ..demand
            },
            Self::TimeSliced(replicas) if demand.gpus > 0 => Demand {
                milli: WHOLE / replicas,
                ..demand
            },
            Self::Elastic if !pod.latency_sensitive && demand.gpus > 0 => Demand {
                class: Class::Preemptible,
                ..demand
            },
            _ => demand,
        }
    }
}

/// The smallest fleet on which 99% of the shares are placed, and what they have there.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Need {
    /// Number of GPUs.
    pub gpus: usize,
    /// Of the latency-sensitive tenants with GPUs: percent that have their share when all tenants are busy. None without such tenants.
    pub attained: Option<f64>,
    /// Of the best-effort tenants with GPUs: mean rate, in percent of what they asked for, when latency-sensitive
    /// tenants use so many percent of their shares: `(use, rate)`. None without such tenants.
    pub best_effort: Vec<(f64, Option<f64>)>,
}

/// What comes of the smallest fleet that suffices, to `step` GPUs, of up to four times the list of nodes; None if none does.
pub(crate) fn smallest<T>(
    specs: &[NodeSpec],
    step: usize,
    suffices: impl Fn(&[NodeSpec]) -> Option<T>,
) -> Option<T> {
    let all: usize = specs.iter().map(|spec| usize::from(spec.gpus)).sum();
    let step = step.max(1);
    let run = |steps: usize| suffices(&scaled(specs, steps * step));
    let (mut small, mut large) = (0, (all * 4).div_ceil(step));
    let mut best = run(large)?;
    while large - small > 1 {
        let middle = small + (large - small) / 2;
        match run(middle) {
            Some(found) => (large, best) = (middle, found),
            None => small = middle,
        }
    }
    Some(best)
}

/// Finds the smallest fleet, to `step` GPUs. Nodes and tenants come in an order drawn with the seed; a larger fleet is the
/// list of nodes with its beginning again. `uses` are the percents for which [`Need::best_effort`] is computed. None if
/// four times the list is too small.
pub fn needed(
    specs: &[NodeSpec],
    pods: &[Pod],
    sharing: Sharing,
    seed: u64,
    step: usize,
    uses: &[f64],
) -> Option<Need> {
    let mut rng = StdRng::seed_from_u64(seed);
    let (mut specs, mut pods) = (specs.to_vec(), pods.to_vec());
    specs.shuffle(&mut rng);
    pods.shuffle(&mut rng);
    let best = smallest(&specs, step, |specs| fill(specs, &pods, sharing))?;
    let gpus = best.specs().iter().map(|spec| usize::from(spec.gpus)).sum();
    let (attained, best_effort) = shares(&best, &pods, sharing, uses);
    Some(Need {
        gpus,
        attained,
        best_effort,
    })
}

/// Chooses places as a way of sharing does.
pub(crate) enum Chooser {
    /// By a rule of others.
    Rule(Rule, Box<(Typical, Index, StdRng)>),
    /// By the engine.
    Engine(Box<Engine>),
}

impl Chooser {
    /// For a fleet of these nodes and tenants like those of the workload.
    pub(crate) fn new(specs: &[NodeSpec], workload: &[Demand], sharing: Sharing) -> Self {
        let rule = match sharing {
            Sharing::Guaranteed | Sharing::Elastic => {
                return Self::Engine(Box::new(Engine::new(specs, workload, Vec::new())));
            }
            Sharing::Fractions(rule) => rule,
            Sharing::Exclusive | Sharing::TimeSliced(_) => Rule::GpuPacking,
        };
        let rng = StdRng::seed_from_u64(0);
        Self::Rule(
            rule,
            Box::new((Typical::of(workload), Index::default(), rng)),
        )
    }

    /// Where the demand goes. None if it fits nowhere.
    pub(crate) fn place(&mut self, fleet: &Fleet, demand: &Demand) -> Option<Place> {
        match self {
            Self::Engine(engine) => engine.choose(fleet, demand),
            Self::Rule(rule, known) => {
                let (typical, index, rng) = &mut **known;
                replay::by_rule(fleet, index, typical, demand, *rule, rng)
            }
        }
    }
}

/// Places the tenants. None as soon as too many fit nowhere.
fn fill(specs: &[NodeSpec], pods: &[Pod], sharing: Sharing) -> Option<Fleet> {
    let workload: Vec<Demand> = pods.iter().map(|pod| sharing.seen(pod)).collect();
    let asked = |demand: &Demand| u64::from(demand.total_milli());
    let mut spare = workload.iter().map(asked).sum::<u64>() * REFUSED_PERCENT / 100;
    let mut fleet = Fleet::new(specs.to_vec());
    let mut chooser = Chooser::new(specs, &workload, sharing);
    for (id, demand) in (0..).zip(&workload) {
        match chooser.place(&fleet, demand) {
            Some(place) => fleet.place(id, *demand, place).ok()?,
            None => spare = spare.checked_sub(asked(demand))?,
        }
    }
    Some(fleet)
}

/// What tenants have: latency-sensitive ones when all are busy, best-effort ones by how busy the others are.
pub(crate) fn shares(
    fleet: &Fleet,
    pods: &[Pod],
    sharing: Sharing,
    uses: &[f64],
) -> (Option<f64>, Vec<(f64, Option<f64>)>) {
    let key = |node: u32, gpu: usize| node as usize * crate::model::MOST_GPUS + gpu;
    let gpus = fleet.specs().len() * crate::model::MOST_GPUS;
    // Per GPU: tenants, shares of guaranteed ones, and what best-effort ones ask for.
    let (mut tenants, mut steady, mut asked) = (vec![0u32; gpus], vec![0.0; gpus], vec![0.0; gpus]);
    let placed = || {
        fleet
            .tenants()
            .iter()
            .filter_map(|(id, tenant)| Some((pods.get(*id as usize)?, tenant.place)))
    };
    for (pod, place) in placed() {
        for gpu in place.gpus.iter().map(|gpu| key(place.node, gpu)) {
            tenants[gpu] += 1;
            let kind = if pod.latency_sensitive {
                &mut steady
            } else {
                &mut asked
            };
            kind[gpu] += f64::from(pod.demand.milli);
        }
    }
    let whole = f64::from(WHOLE);
    // The part of its share that a tenant has on its worst GPU.
    let part = |pod: &Pod, place: Place, used: f64| {
        let on = |gpu: usize| match (sharing, pod.latency_sensitive) {
            // Equal slices for all that are there.
            (Sharing::TimeSliced(_), _) => {
                (whole / f64::from(tenants[gpu]) / f64::from(pod.demand.milli)).min(1.0)
            }
            (Sharing::Elastic, false) => {
                ((whole - steady[gpu] * used).max(0.0) / asked[gpu]).min(1.0)
            }
            _ => 1.0,
        };
        place
            .gpus
            .iter()
            .map(|gpu| on(key(place.node, gpu)))
            .fold(1.0, f64::min)
    };
    let mean = |parts: Vec<f64>| {
        let sum = || parts.iter().sum::<f64>();
        (!parts.is_empty()).then(|| sum() * 100.0 / parts.len() as f64)
    };
    let of = |sensitive: bool| {
        placed().filter(move |(pod, place)| {
            pod.latency_sensitive == sensitive && place.gpus.count() > 0
        })
    };
    let attained = of(true).map(|(pod, place)| {
        if part(pod, place, 1.0) >= 1.0 {
            1.0
        } else {
            0.0
        }
    });
    let rate = |used: &f64| {
        (
            *used,
            mean(
                of(false)
                    .map(|(pod, place)| part(pod, place, used / 100.0))
                    .collect(),
            ),
        )
    };
    (mean(attained.collect()), uses.iter().map(rate).collect())
}
