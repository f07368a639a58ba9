//! What a fleet consists of and what a tenant asks of it.

use serde::{Deserialize, Serialize};

/// A whole GPU, in the unit of shares: thousandths.
pub const WHOLE: u32 = 1000;

/// GPUs that a node may have. Arrays of this size hold a node's state, so that it is copied without allocation.
pub const MOST_GPUS: usize = 16;

/// GPU models that a fleet may name: one bit each in [`ModelSet`].
pub const MOST_MODELS: usize = 64;

/// A set of GPU models. The empty set means: any model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ModelSet(u64);

impl ModelSet {
    /// Any model.
    pub const ANY: Self = Self(0);

    /// Adds one model by its number in [`Models`].
    pub fn with(self, model: u8) -> Self {
        Self(self.0 | 1 << model)
    }

    /// Whether a GPU of this model is acceptable.
    pub fn accepts(self, model: u8) -> bool {
        self.0 == 0 || self.0 >> model & 1 == 1
    }
}

/// The names of GPU models, numbered by first use.
#[derive(Clone, Debug, Default)]
pub struct Models(Vec<String>);

impl Models {
    /// The model's number; a new name gets the next one. None if there are [`MOST_MODELS`] already.
    pub fn number(&mut self, name: &str) -> Option<u8> {
        let found = self.0.iter().position(|known| known == name);
        let number = found.or_else(|| {
            self.0.push(name.to_owned());
            (self.0.len() <= MOST_MODELS).then(|| self.0.len() - 1)
        })?;
        u8::try_from(number).ok()
    }

    /// The name of a model.
    pub fn name(&self, number: u8) -> &str {
        self.0.get(usize::from(number)).map_or("", String::as_str)
    }
}

/// What a node has. All its GPUs are of one model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeSpec {
    /// Its name in the cluster.
    pub name: String,
    /// Processor time, in thousandths of a CPU.
    pub cpu_milli: u32,
    /// Memory of the host, in MiB.
    pub memory_mib: u32,
    /// Number of GPUs, at most [`MOST_GPUS`].
    pub gpus: u8,
    /// Their model's number.
    pub model: u8,
    /// Memory of each GPU, in MiB. 0: not known; then demands for GPU memory are not checked.
    pub gpu_memory_mib: u32,
    /// Network domain (a rack or a pod of switches): nodes of one domain are near to each other.
    pub domain: u32,
}

/// What a tenant's share means to its neighbours.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Class {
    /// The share is reserved: the sum on one GPU never exceeds a whole one.
    #[default]
    Guaranteed,
    /// The tenant runs on what guaranteed tenants leave idle, and gives it back at once.
    Preemptible,
}

/// What a tenant asks of one node. Equal demands are placed alike, so this is also the key of the placement index.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Demand {
    /// Processor time, in thousandths of a CPU.
    pub cpu_milli: u32,
    /// Memory of the host, in MiB.
    pub memory_mib: u32,
    /// Number of GPUs.
    pub gpus: u8,
    /// Share of each GPU, in thousandths.
    pub milli: u32,
    /// GPU models that will do.
    pub models: ModelSet,
    /// Memory of each GPU, in MiB. 0: not stated.
    pub gpu_memory_mib: u32,
    /// Memory bandwidth of each GPU that it uses when it runs alone there, in thousandths of the card's. 0: not known.
    pub bandwidth_milli: u16,
    /// Whether the share is guaranteed.
    pub class: Class,
}

impl Demand {
    /// All its shares together, in thousandths of a GPU.
    pub fn total_milli(&self) -> u32 {
        self.milli * u32::from(self.gpus)
    }

    /// Whether it asks for a part of one GPU.
    pub fn is_fraction(&self) -> bool {
        self.gpus == 1 && self.milli < WHOLE
    }
}

/// A tenant in a workload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pod {
    /// Its name in the trace.
    pub name: String,
    /// What it asks for.
    pub demand: Demand,
    /// When it came, in seconds since the beginning of the trace.
    pub created_s: u64,
    /// When it ended, in seconds since the beginning of the trace.
    pub deleted_s: u64,
    /// Whether the trace calls it latency sensitive (the others are best effort).
    pub latency_sensitive: bool,
}

/// As many nodes as have at least so many GPUs together: the list again and again, or its beginning.
pub fn scaled(specs: &[NodeSpec], gpus: usize) -> Vec<NodeSpec> {
    let mut scaled: Vec<NodeSpec> = Vec::new();
    let mut have = 0;
    for (round, spec) in specs
        .iter()
        .cycle()
        .enumerate()
        .map(|(at, spec)| (at / specs.len(), spec))
    {
        if have >= gpus || specs.iter().all(|spec| spec.gpus == 0) {
            break;
        }
        have += usize::from(spec.gpus);
        let name = if round == 0 {
            spec.name.clone()
        } else {
            format!("{}-{round}", spec.name)
        };
        scaled.push(NodeSpec {
            name,
            ..spec.clone()
        });
    }
    scaled
}
