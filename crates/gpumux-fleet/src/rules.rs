//! Known rules for choosing a node, as FGD's published simulator plays them.
//!
//! A rule gives each node that can host a demand a score; the highest wins, and among equals the lowest rank. The
//! scores are whole numbers of 0 to 100, as in the Kubernetes scheduler, because the rounding is part of the rule.

use crate::{
    fleet::{Free, Gpus, kind},
    model::{Demand, WHOLE},
    typical::Typical,
};

/// Largest score of a node.
const MOST: f64 = 100.0;
/// CPUs and GPUs of the largest node, in thousandths, by which the rules scale what is free.
const MOST_CPU: f64 = 128_000.0;
const MOST_GPU: u32 = 8_000;

/// A rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rule {
    /// Any node that can host the demand, and any such GPU.
    Random,
    /// The node where least is left (CPUs and GPUs weigh the same).
    BestFit,
    /// The node whose free resources, as a vector, are least along the demand (after Tetris, SIGCOMM 2014).
    DotProduct,
    /// GPUs in use before free GPUs, and nodes in use before free nodes.
    GpuPacking,
    /// Nodes that host demands of the same kind.
    GpuClustering,
    /// The node and the GPU where the measure of fragmentation grows least (FGD, ATC 2023).
    Fgd,
}

gpumux_core::names!(
    Rule: Random = "random", DotProduct = "dot-product", GpuClustering = "gpu-clustering", GpuPacking = "gpu-packing", BestFit = "best-fit",
    Fgd = "fgd"
);

impl Rule {
    /// The node's score and the GPUs that would be taken. None if the demand does not fit. `Random` chooses by
    /// itself: here all its scores are 0 and the GPUs are the tightest.
    pub fn score(self, free: &Free, demand: &Demand, typical: &Typical) -> Option<(i64, Gpus)> {
        if !free.fits(demand) {
            return None;
        }
        let tightest = free.tightest(demand)?;
        let score = match self {
            Self::Random => 0,
            Self::BestFit => best_fit(free, demand),
            Self::DotProduct => dot_product(free, demand),
            Self::GpuPacking => packing(free, demand, tightest),
            Self::GpuClustering => clustering(free, demand),
            Self::Fgd => return Some(fgd(free, demand, tightest, typical)),
        };
        Some((score, tightest))
    }
}

fn best_fit(free: &Free, demand: &Demand) -> i64 {
    let cpu = f64::from(free.cpu_milli - demand.cpu_milli) / MOST_CPU;
    let gpu = f64::from(free.total_milli() - demand.total_milli()) / f64::from(MOST_GPU);
    ((1.0 - (cpu * 0.5 + gpu * 0.5)) * MOST) as i64
}

fn dot_product(free: &Free, demand: &Demand) -> i64 {
    let cpu = f64::from(free.cpu_milli) / MOST_CPU * (f64::from(demand.cpu_milli) / MOST_CPU);
    let most = f64::from(MOST_GPU);
    let gpu = f64::from(free.total_milli()) / most * (f64::from(demand.total_milli()) / most);
    (MOST * (1.0 - (cpu + gpu) / 2.0)) as i64
}

fn packing(free: &Free, demand: &Demand, gpus: Gpus) -> i64 {
    if demand.gpus == 0 {
        return 0;
    }
    let all = i64::from(free.gpus);
    if free.shares().all(|left| left == WHOLE) {
        return (33 - all).max(all);
    }
    let taken = free
        .shares()
        .enumerate()
        .filter(|(gpu, _)| gpus.0 >> gpu & 1 == 1);
    let (whole, percent) = taken.fold((0, 0), |(whole, percent), (_, left)| {
        (
            whole + i64::from(left == WHOLE),
            percent + i64::from(left * 100 / WHOLE),
        )
    });
    match whole {
        0 => (100 - percent / 10).max(50),
        _ => (50 - whole).max(33),
    }
}

fn clustering(free: &Free, demand: &Demand) -> i64 {
    let Some(kind) = kind(demand) else { return 0 };
    let used = i64::from(MOST_GPU) - i64::from(free.total_milli());
    let score = 25 * used / i64::from(MOST_GPU);
    let here = free.kinds();
    match (here >> kind & 1 == 1, here.count_ones()) {
        (true, 1) => score + 75,
        (true, _) => score + 50,
        (false, 0) => score + 25,
        (false, _) => score,
    }
}

fn fgd(free: &Free, demand: &Demand, tightest: Gpus, typical: &Typical) -> (i64, Gpus) {
    let before = typical.fragments(free) as f64;
    let score = |gpus| {
        let Some(left) = free.without(demand, gpus) else {
            return 0;
        };
        let milli = (before - typical.fragments(&left) as f64) / typical.tenants() as f64;
        let gain = milli / f64::from(WHOLE);
        (MOST / (1.0 + (-gain).exp())) as i64
    };
    if !demand.is_fraction() {
        return (score(tightest), tightest);
    }
    let mut best = None;
    for gpu in (0..usize::from(free.gpus)).filter(|gpu| free.hosts(*gpu, demand)) {
        let gpus = Gpus::default().with(gpu);
        let found = score(gpus);
        if best.is_none_or(|(score, _)| found > score) {
            best = Some((found, gpus));
        }
    }
    best.unwrap_or((0, tightest))
}
