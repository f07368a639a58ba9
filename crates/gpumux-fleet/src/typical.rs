//! Fragmentation: how much of what is free the next tenant probably cannot use.
//!
//! The measure is that of FGD (Weng et al., "Beware of Fragmentation", USENIX ATC 2023): a typical tenant is drawn
//! from the workload; the free shares of a node that it cannot use are fragments.

use std::collections::BTreeMap;

use crate::{
    fleet::Free,
    model::{Demand, ModelSet},
};

/// Typical demands cover this part of all tenants, in percent (FGD's default).
const COVERED_PERCENT: u64 = 95;

/// One kind of demand: what counts for the measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Kind {
    cpu_milli: u32,
    milli: u32,
    gpus: u8,
    models: ModelSet,
}

/// The demands that are typical of a workload, each with its weight: how often it occurs, say.
#[derive(Clone, Debug, Default)]
pub struct Typical {
    /// Kinds with GPUs: with the place of their share in `shares`, and their number.
    kinds: Vec<(Kind, usize, u64)>,
    /// Distinct shares of a GPU, rising.
    shares: Vec<u32>,
    /// Weight of all typical kinds, also of those without GPUs.
    tenants: u64,
}

impl Typical {
    /// The most frequent kinds that together are 95% of the demands.
    pub fn of<'a>(demands: impl IntoIterator<Item = &'a Demand>) -> Self {
        Self::weighted(demands.into_iter().map(|demand| (demand, 1)))
    }

    /// The heaviest kinds that together have 95% of the weight.
    pub(crate) fn weighted<'a>(demands: impl IntoIterator<Item = (&'a Demand, u64)>) -> Self {
        let mut count: BTreeMap<Kind, u64> = BTreeMap::new();
        let mut all = 0;
        for (demand, weight) in demands {
            let Demand {
                cpu_milli,
                milli,
                gpus,
                models,
                ..
            } = *demand;
            *count
                .entry(Kind {
                    cpu_milli,
                    milli,
                    gpus,
                    models,
                })
                .or_default() += weight;
            all += weight;
        }
        let mut kinds: Vec<(u64, Kind)> = count
            .into_iter()
            .map(|(kind, tenants)| (tenants, kind))
            .collect();
        kinds.sort_unstable_by(|a, b| b.cmp(a));
        let mut typical = Self::default();
        for (tenants, kind) in kinds {
            if typical.tenants * 100 >= all * COVERED_PERCENT {
                break;
            }
            typical.tenants += tenants;
            if kind.gpus > 0 {
                typical.kinds.push((kind, 0, tenants));
            }
        }
        typical.shares = typical.kinds.iter().map(|(kind, ..)| kind.milli).collect();
        typical.shares.sort_unstable();
        typical.shares.dedup();
        for (kind, share, _) in &mut typical.kinds {
            *share = typical.shares.partition_point(|other| *other < kind.milli);
        }
        typical
    }

    /// Number of tenants that the measures are multiplied by.
    pub fn tenants(&self) -> u64 {
        self.tenants
    }

    /// What a typical tenant can use of the node's free shares: thousandths of a GPU times [`Self::tenants`].
    pub fn usable(&self, free: &Free) -> u64 {
        self.usable_of(free, |open, _| open)
    }

    /// As [`Self::usable`], if of so many GPUs with room a tenant with so many GPUs can use `some`.
    fn usable_of(&self, free: &Free, some: impl Fn(u64, u64) -> u64) -> u64 {
        const MOST: usize = 64;
        // For each distinct share: how many GPUs have as much free, and how much they have free together.
        let mut open = [(0u8, 0u32); MOST];
        for left in free.shares() {
            let reached = self
                .shares
                .partition_point(|share| *share <= left)
                .min(MOST);
            for (gpus, milli) in &mut open[..reached] {
                *gpus += 1;
                *milli += left;
            }
        }
        let usable = self.kinds.iter().map(|(kind, share, tenants)| {
            let (gpus, milli) = open.get(*share).copied().unwrap_or_default();
            let hosts = gpus >= kind.gpus
                && free.cpu_milli >= kind.cpu_milli
                && kind.models.accepts(free.model);
            if !hosts {
                return 0;
            }
            let used = some(u64::from(gpus), u64::from(kind.gpus));
            tenants * u64::from(milli) * used / u64::from(gpus)
        });
        usable.sum()
    }

    /// What a typical tenant cannot use of the node's free shares: thousandths of a GPU times [`Self::tenants`].
    pub fn fragments(&self, free: &Free) -> u64 {
        u64::from(free.total_milli()) * self.tenants - self.usable(free)
    }

    /// As [`Self::fragments`], but GPUs can be used by as many as a tenant takes: of seven, one with four GPUs uses four.
    pub(crate) fn fragments_of_sets(&self, free: &Free) -> u64 {
        let usable = self.usable_of(free, |open, gpus| open - open % gpus);
        u64::from(free.total_milli()) * self.tenants - usable
    }
}
