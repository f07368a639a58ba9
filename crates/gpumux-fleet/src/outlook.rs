//! What will probably remain unused of a fleet, and which tenants find no room there, learned from rehearsals.
//!
//! FGD's measure ([`Typical`]) looks one tenant ahead. A gap of 530 thousandths is no fragment to a tenant that asks for
//! 470, yet 60 remain in the end; a gap of 60 is. So the fleet is filled some times in advance with tenants drawn
//! from the same workload, by FGD's rule, and each state that a GPU passed through is charged with what was free on it
//! in the end. Whether a gap is filled depends on the CPUs beside it, and on the demand for GPUs of that model.
//!
//! A tenant with all GPUs of a node comes rarely, so that FGD's measure gives little for an empty node. But if it finds
//! none, its whole demand is lost. So what is free also counts by what it is worth to the tenants that a rehearsal
//! refused: nodes are kept whole, and scarce models free, as far as tenants are missing them.

use rand::{SeedableRng, rngs::StdRng, seq::SliceRandom};

use crate::{
    arrivals::arrivals,
    fleet::{Fleet, Free, Place},
    index::Index,
    model::{Class, Demand, MOST_MODELS, NodeSpec, WHOLE},
    rules::Rule,
    typical::Typical,
};

/// The fleet is filled until so many tenants came and nodes were filled: small fleets more often, to see rare tenants.
const REHEARSED: usize = 16_000;
/// Tenants arrive until they asked for this part of the GPUs, in percent: as much as there is, so that those are refused
/// that miss what others could have left to them.
const FILLED_PERCENT: u64 = 100;
/// So much of all demand counts as refused beside what was, in percent: a tenant may be too rare for a rehearsal to miss it.
const PRIOR_PERCENT: u64 = 1;
/// Free shares are told apart by this much, in thousandths.
const LEVEL: u32 = 10;
const LEVELS: usize = (WHOLE / LEVEL) as usize + 1;
/// Free CPUs per free GPU, rising: the bounds between which states are told apart.
const CPUS: [u32; 18] = [
    1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 15, 18, 24, 40, 80,
];
const RATIOS: usize = CPUS.len() + 1;
/// What was seen of similar states counts as so many visits of a state.
const PRIOR_VISITS: u64 = 3;
/// Unit of what is learned: parts of a thousandth of a GPU.
pub(crate) const UNIT: u64 = 1000;

/// Visits, and thousandths of a GPU that were free in the end, summed over them.
#[derive(Clone, Copy, Default)]
struct Seen {
    visits: u64,
    free: u64,
}

impl Seen {
    fn add(&mut self, other: Self) {
        self.visits += other.visits;
        self.free += other.free;
    }

    /// The mean, in [`UNIT`]; few visits are drawn to `prior`.
    fn mean(self, prior: u64) -> u64 {
        (self.free * UNIT + prior * PRIOR_VISITS) / (self.visits + PRIOR_VISITS)
    }
}

/// What rehearsals showed.
#[derive(Clone, Debug)]
pub struct Outlook {
    /// Expected unused share by GPU model, free share, and free CPUs per free GPU.
    unused: Vec<u64>,
    /// The demands that found no room, and a little of all others, weighted by shares.
    missed: Typical,
    /// Weight of all demands, had all been refused.
    asked: u64,
}

/// Where a GPU's state is in the table, model by model.
fn state(model: usize, share: usize, ratio: usize) -> usize {
    (model * LEVELS + share / LEVEL as usize) * RATIOS + ratio
}

fn ratio(free: &Free) -> usize {
    let milli = free.total_milli();
    CPUS.partition_point(|cpus| u64::from(free.cpu_milli) >= u64::from(*cpus) * u64::from(milli))
}

impl Outlook {
    /// Rehearses the workload on an empty fleet of these nodes. The same arguments give the same outlook.
    pub fn learn(specs: &[NodeSpec], workload: &[Demand], seed: u64) -> Self {
        let models = specs
            .iter()
            .map(|spec| usize::from(spec.model) + 1)
            .max()
            .unwrap_or(0)
            .min(MOST_MODELS);
        let mut lessons = Lessons {
            seen: vec![Seen::default(); models * LEVELS * RATIOS],
            ..Lessons::default()
        };
        // Preemptible tenants take nothing of what is free.
        let kept = workload
            .iter()
            .filter(|demand| demand.class == Class::Guaranteed);
        let workload: Vec<Demand> = kept.copied().collect();
        let typical = Typical::of(&workload);
        let mut rng = StdRng::seed_from_u64(seed);
        let shares = |demand: &Demand| u64::from(demand.total_milli());
        let any =
            specs.iter().any(|spec| spec.gpus > 0) && workload.iter().any(|it| shares(it) > 0);
        while any && lessons.rehearsed < REHEARSED {
            rehearse(specs, &workload, &typical, &mut rng, &mut lessons);
        }
        // Where all find room, nodes still fill one after another.
        let prior = match lessons.came.iter().any(|(_, refused)| *refused) {
            true => PRIOR_PERCENT,
            false => 100,
        };
        let weighted = lessons.came.iter().map(|(demand, refused)| {
            let percent = prior + if *refused { 100 } else { 0 };
            (demand, shares(demand) * percent)
        });
        Self {
            unused: unused(&lessons.seen, models),
            missed: Typical::weighted(weighted),
            asked: lessons
                .came
                .iter()
                .map(|(demand, _)| shares(demand))
                .sum::<u64>()
                * 100,
        }
    }

    /// What will probably be lost on the node, in thousandths of a GPU times [`UNIT`]: the mean of what remains unused and of
    /// what tenants cannot use that would find no room.
    pub(crate) fn loss(&self, free: &Free) -> u64 {
        let missed = self.missed.fragments_of_sets(free) * UNIT / self.asked.max(1);
        (missed + self.unused(free)) / 2
    }

    /// What will probably remain unused on the node, in thousandths of a GPU times [`UNIT`].
    fn unused(&self, free: &Free) -> u64 {
        let ratio = ratio(free);
        let of = |share: u32| {
            self.unused
                .get(state(usize::from(free.model), share as usize, ratio))
                .copied()
        };
        free.shares()
            .map(|share| of(share).unwrap_or(u64::from(share) * UNIT))
            .sum()
    }
}

/// The mean free share of each state in the end. What is known of few visits is drawn to that of other models and ratios.
fn unused(seen: &[Seen], models: usize) -> Vec<u64> {
    let mut unused = vec![0; seen.len()];
    for share in (0..=WHOLE as usize).step_by(LEVEL as usize) {
        let sum = |states: &mut dyn Iterator<Item = usize>| {
            states.fold(Seen::default(), |mut sum, state| {
                sum.add(seen[state]);
                sum
            })
        };
        let all = sum(&mut (0..models * RATIOS).map(|at| state(at / RATIOS, share, at % RATIOS)));
        // Half of it, where nothing is known.
        let prior = all.mean(share as u64 * UNIT / 2);
        for ratio in 0..RATIOS {
            let any_model =
                sum(&mut (0..models).map(|model| state(model, share, ratio))).mean(prior);
            for model in 0..models {
                let at = state(model, share, ratio);
                unused[at] = seen[at].mean(any_model).min(share as u64 * UNIT);
            }
        }
    }
    unused
}

/// What rehearsals add up.
#[derive(Default)]
struct Lessons {
    seen: Vec<Seen>,
    /// All arrivals, and whether they found no room.
    came: Vec<(Demand, bool)>,
    /// Arrivals and nodes.
    rehearsed: usize,
}

/// Fills the fleet once and adds what was seen.
fn rehearse(
    specs: &[NodeSpec],
    workload: &[Demand],
    typical: &Typical,
    rng: &mut StdRng,
    lessons: &mut Lessons,
) {
    let mut fleet = Fleet::new(specs.to_vec());
    let demands = arrivals(workload, fleet.total_milli(), FILLED_PERCENT, rng);
    lessons.rehearsed += demands.len() + specs.len();
    let mut ranks: Vec<u32> = (0..specs.len() as u32).collect();
    ranks.shuffle(rng);
    let mut index = Index::new(ranks);
    // States that a GPU of the node passed through: which GPU, and where its state is in the table.
    let mut passed: Vec<Vec<(usize, usize)>> = vec![Vec::new(); specs.len()];
    let note = |passed: &mut Vec<(usize, usize)>, free: &Free| {
        let (model, ratio) = (usize::from(free.model), ratio(free));
        passed.extend(
            (0..)
                .zip(free.shares())
                .map(|(gpu, share)| (gpu, state(model, share as usize, ratio))),
        );
    };
    for (passed, free) in passed.iter_mut().zip(fleet.free()) {
        note(passed, free);
    }
    for (id, demand) in (0..).zip(&demands) {
        let score = |_, free: &Free| {
            Rule::Fgd
                .score(free, demand, typical)
                .map(|(score, _)| score)
        };
        let Some(node) = index.order(&fleet, demand, score).next() else {
            lessons.came.push((*demand, true));
            continue;
        };
        lessons.came.push((*demand, false));
        let found = Rule::Fgd.score(&fleet.free()[node as usize], demand, typical);
        let Some((_, gpus)) = found else { continue };
        if fleet.place(id, *demand, Place { node, gpus }).is_ok() {
            note(&mut passed[node as usize], &fleet.free()[node as usize]);
        }
    }
    for (passed, free) in passed.iter().zip(fleet.free()) {
        let end: Vec<u64> = free.shares().map(u64::from).collect();
        for (gpu, state) in passed {
            lessons.seen[*state].add(Seen {
                visits: 1,
                free: end[*gpu],
            });
        }
    }
}
