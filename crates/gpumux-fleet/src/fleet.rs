//! The state of a fleet: what is free where.

use std::collections::{BTreeMap, BTreeSet};

use crate::model::{Class, Demand, MOST_GPUS, NodeSpec, WHOLE};

/// A node's place in the fleet.
pub type NodeId = u32;

/// GPUs of one node, one bit each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Gpus(pub u16);

impl Gpus {
    /// Numbers of the GPUs, rising.
    pub fn iter(self) -> impl Iterator<Item = usize> {
        (0..MOST_GPUS).filter(move |gpu| self.0 >> gpu & 1 == 1)
    }

    /// Adds one.
    #[must_use]
    pub fn with(self, gpu: usize) -> Self {
        Self(self.0 | 1 << gpu)
    }

    /// How many there are.
    pub fn count(self) -> u32 {
        self.0.count_ones()
    }
}

/// What is free on a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Free {
    /// Processor time, in thousandths of a CPU.
    pub cpu_milli: u32,
    /// Memory of the host, in MiB.
    pub memory_mib: u32,
    /// Number of GPUs that the node has.
    pub gpus: u8,
    /// The model of its GPUs.
    pub model: u8,
    /// Memory of each GPU, in MiB; 0: not known.
    pub gpu_memory_mib: u32,
    milli: [u16; MOST_GPUS],
    /// Memory of each GPU that is guaranteed to no tenant.
    memory: [u32; MOST_GPUS],
    /// What preemptible tenants ask of each GPU, in thousandths.
    preemptible: [u16; MOST_GPUS],
    /// Memory bandwidth that tenants want of each GPU, in thousandths.
    bandwidth: [u16; MOST_GPUS],
    kinds: [u16; MOST_GPUS + 1],
}

impl Free {
    fn whole(spec: &NodeSpec) -> Self {
        let mut milli = [0; MOST_GPUS];
        milli[..usize::from(spec.gpus)].fill(WHOLE as u16);
        let mut memory = [0; MOST_GPUS];
        memory[..usize::from(spec.gpus)].fill(spec.gpu_memory_mib);
        Self {
            cpu_milli: spec.cpu_milli,
            memory_mib: spec.memory_mib,
            gpus: spec.gpus,
            model: spec.model,
            gpu_memory_mib: spec.gpu_memory_mib,
            milli,
            memory,
            preemptible: [0; MOST_GPUS],
            bandwidth: [0; MOST_GPUS],
            kinds: [0; MOST_GPUS + 1],
        }
    }

    /// The free share of each GPU, in thousandths.
    pub fn shares(&self) -> impl ExactSizeIterator<Item = u32> + '_ {
        self.milli[..usize::from(self.gpus)]
            .iter()
            .map(|milli| u32::from(*milli))
    }

    /// The same state with as much free of each GPU as of its memory or its share is left, whichever is less; where the
    /// memory is not known, as it is.
    pub(crate) fn scarcer(&self) -> Self {
        let mut scarcer = *self;
        if self.gpu_memory_mib > 0 {
            for (milli, memory) in scarcer.milli.iter_mut().zip(self.memory) {
                *milli = (*milli).min(part_of(memory, self.gpu_memory_mib) as u16);
            }
        }
        scarcer
    }

    /// All free shares together, in thousandths of a GPU.
    pub fn total_milli(&self) -> u32 {
        self.shares().sum()
    }

    /// Shares of a GPU that tenants hold or ask for, guaranteed and preemptible, in thousandths.
    pub fn used_milli(&self, gpu: usize) -> u32 {
        WHOLE - u32::from(self.milli[gpu]) + u32::from(self.preemptible[gpu])
    }

    /// What preemptible tenants ask of a GPU, in thousandths.
    pub fn preemptible_milli(&self, gpu: usize) -> u32 {
        u32::from(self.preemptible[gpu])
    }

    /// Memory bandwidth that tenants want of a GPU, in thousandths of what it has.
    pub fn bandwidth_milli(&self, gpu: usize) -> u32 {
        u32::from(self.bandwidth[gpu])
    }

    /// Whether one of the demand's shares fits on this GPU. A guaranteed share needs as much free, also of memory; a
    /// preemptible one needs that the preemptible shares there do not exceed a whole GPU, and a card with as much
    /// memory, which is moved to the host when others need it.
    pub fn hosts(&self, gpu: usize, demand: &Demand) -> bool {
        let (memory, share) = match demand.class {
            Class::Guaranteed => (self.memory[gpu], u32::from(self.milli[gpu])),
            Class::Preemptible => (
                self.gpu_memory_mib,
                WHOLE - u32::from(self.preemptible[gpu]),
            ),
        };
        share >= demand.milli && (self.gpu_memory_mib == 0 || memory >= demand.gpu_memory_mib)
    }

    fn hosting<'a>(&'a self, demand: &'a Demand) -> impl Iterator<Item = usize> + 'a {
        (0..usize::from(self.gpus)).filter(move |gpu| self.hosts(*gpu, demand))
    }

    /// Whether the demand fits.
    pub fn fits(&self, demand: &Demand) -> bool {
        self.cpu_milli >= demand.cpu_milli
            && self.memory_mib >= demand.memory_mib
            && (demand.gpus == 0
                || demand.models.accepts(self.model)
                    && self.hosting(demand).count() >= usize::from(demand.gpus))
    }

    /// Kinds of tenants that are here: bit 0 for fractions of a GPU, bit k for k whole GPUs.
    pub fn kinds(&self) -> u32 {
        let here = self
            .kinds
            .iter()
            .enumerate()
            .filter(|(_, tenants)| **tenants > 0);
        here.fold(0, |kinds, (kind, _)| kinds | 1 << kind)
    }

    /// What is left when the demand has these GPUs. None if it does not fit there.
    pub fn without(&self, demand: &Demand, gpus: Gpus) -> Option<Self> {
        let mut left = *self;
        left.cpu_milli = left.cpu_milli.checked_sub(demand.cpu_milli)?;
        left.memory_mib = left.memory_mib.checked_sub(demand.memory_mib)?;
        for gpu in gpus.iter() {
            if gpu >= usize::from(self.gpus) || !self.hosts(gpu, demand) {
                return None;
            }
            left.bandwidth[gpu] = left.bandwidth[gpu].saturating_add(demand.bandwidth_milli);
            match demand.class {
                Class::Guaranteed => {
                    left.milli[gpu] -= demand.milli as u16;
                    left.memory[gpu] = left.memory[gpu].saturating_sub(demand.gpu_memory_mib);
                }
                Class::Preemptible => left.preemptible[gpu] += demand.milli as u16,
            }
        }
        if let Some(kind) = kind(demand) {
            left.kinds[kind] += 1;
        }
        Some(left)
    }

    /// What is free when a tenant that is here goes.
    fn with(&mut self, demand: &Demand, gpus: Gpus) {
        self.cpu_milli += demand.cpu_milli;
        self.memory_mib += demand.memory_mib;
        for gpu in gpus.iter() {
            self.bandwidth[gpu] -= demand.bandwidth_milli;
            match demand.class {
                Class::Guaranteed => {
                    self.milli[gpu] += demand.milli as u16;
                    if self.gpu_memory_mib > 0 {
                        self.memory[gpu] += demand.gpu_memory_mib;
                    }
                }
                Class::Preemptible => self.preemptible[gpu] -= demand.milli as u16,
            }
        }
        if let Some(kind) = kind(demand) {
            self.kinds[kind] -= 1;
        }
    }

    /// The first GPUs that have room. None if the demand does not fit.
    pub fn first(&self, demand: &Demand) -> Option<Gpus> {
        let first = self.hosting(demand).take(usize::from(demand.gpus));
        self.fits(demand)
            .then(|| first.fold(Gpus::default(), Gpus::with))
    }

    /// The GPUs with the least free share that suffices, lower numbers first.
    pub fn tightest(&self, demand: &Demand) -> Option<Gpus> {
        let mut chosen = Gpus::default();
        for _ in 0..demand.gpus {
            let open = self.hosting(demand).filter(|gpu| chosen.0 >> gpu & 1 == 0);
            chosen = chosen.with(open.min_by_key(|gpu| self.milli[*gpu])?);
        }
        Some(chosen)
    }
}

/// A part of a card's memory, in thousandths.
pub(crate) fn part_of(memory_mib: u32, card_mib: u32) -> u32 {
    let part = u64::from(memory_mib) * u64::from(WHOLE) / u64::from(card_mib.max(1));
    part.min(u64::from(WHOLE)) as u32
}

/// A tenant's place in [`Free::kinds`]; none without GPUs.
pub(crate) fn kind(demand: &Demand) -> Option<usize> {
    match demand.gpus {
        0 => None,
        _ if demand.is_fraction() => Some(0),
        gpus => Some(usize::from(gpus)),
    }
}

/// Where a tenant is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The node.
    pub node: NodeId,
    /// Which of its GPUs.
    pub gpus: Gpus,
}

/// A tenant in the fleet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tenant {
    /// What it holds.
    pub demand: Demand,
    /// Where.
    pub place: Place,
}

/// A tenant goes to other GPUs of its node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    /// Who.
    pub tenant: TenantId,
    /// Where to.
    pub to: Place,
}

/// A tenant's number, given by the caller.
pub type TenantId = u64;

/// Why a place cannot be taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// Another tenant has this number.
    #[error("tenant {0} is placed already: release it first")]
    Placed(TenantId),
    /// The node has not as much free.
    #[error("node {0} has not as much free as the tenant asks for")]
    Full(NodeId),
}

/// A fleet of nodes and the tenants on them.
#[derive(Clone, Debug, Default)]
pub struct Fleet {
    specs: Vec<NodeSpec>,
    free: Vec<Free>,
    tenants: BTreeMap<TenantId, Tenant>,
    on: Vec<BTreeSet<TenantId>>,
    /// When each node changed last, and the nodes in that order. Counts changes.
    changed: Vec<u64>,
    recent: BTreeSet<(u64, NodeId)>,
    changes: u64,
}

impl Fleet {
    /// An empty fleet of these nodes.
    pub fn new(specs: Vec<NodeSpec>) -> Self {
        let free: Vec<Free> = specs.iter().map(Free::whole).collect();
        Self {
            changed: vec![0; free.len()],
            on: vec![BTreeSet::new(); free.len()],
            free,
            specs,
            ..Self::default()
        }
    }

    /// The nodes.
    pub fn specs(&self) -> &[NodeSpec] {
        &self.specs
    }

    /// What is free on each node.
    pub fn free(&self) -> &[Free] {
        &self.free
    }

    /// The tenants by number.
    pub fn tenants(&self) -> &BTreeMap<TenantId, Tenant> {
        &self.tenants
    }

    /// All GPUs together, in thousandths.
    pub fn total_milli(&self) -> u64 {
        self.specs
            .iter()
            .map(|spec| u64::from(spec.gpus) * u64::from(WHOLE))
            .sum()
    }

    /// Places a tenant.
    ///
    /// # Errors
    /// The number is taken, or the demand does not fit there. Nothing changed then.
    pub fn place(&mut self, id: TenantId, demand: Demand, place: Place) -> Result<(), Refused> {
        if self.tenants.contains_key(&id) {
            return Err(Refused::Placed(id));
        }
        let full = Refused::Full(place.node);
        let free = self.free.get_mut(place.node as usize).ok_or(full)?;
        if place.gpus.count() != u32::from(demand.gpus)
            || !(demand.gpus == 0 || demand.models.accepts(free.model))
        {
            return Err(full);
        }
        *free = free.without(&demand, place.gpus).ok_or(full)?;
        self.tenants.insert(id, Tenant { demand, place });
        self.on[place.node as usize].insert(id);
        self.touch(place.node);
        Ok(())
    }

    /// Takes a tenant away and returns what it held.
    pub fn release(&mut self, id: TenantId) -> Option<Tenant> {
        let tenant = self.tenants.remove(&id)?;
        self.on[tenant.place.node as usize].remove(&id);
        self.free[tenant.place.node as usize].with(&tenant.demand, tenant.place.gpus);
        self.touch(tenant.place.node);
        Some(tenant)
    }

    /// Moves of fractional guaranteed tenants between GPUs of this node after which the demand fits there, with the
    /// GPU memory that they move in MiB. GPUs on which least would have to be moved are emptied, and each tenant goes
    /// to the tightest other GPU. None if that does not make room.
    pub(crate) fn emptied(
        &self,
        node: NodeId,
        demand: &Demand,
        card_mib: u32,
    ) -> Option<(u64, Vec<Move>)> {
        let movable = |tenant: &&(TenantId, Tenant)| {
            tenant.1.demand.is_fraction() && tenant.1.demand.class == Class::Guaranteed
        };
        let here: Vec<(TenantId, Tenant)> = self.on(node).collect();
        let mut free = self.free[node as usize];
        let mut moves = Vec::new();
        let mut cost = 0;
        let mut by_use: Vec<usize> = (0..usize::from(free.gpus)).collect();
        by_use.sort_by_key(|gpu| (free.used_milli(*gpu), *gpu));
        for gpu in by_use {
            if free.fits(demand) {
                break;
            }
            let alone = Gpus::default().with(gpu);
            let mut trial = (free, Vec::new(), 0);
            for (id, tenant) in here
                .iter()
                .filter(movable)
                .filter(|(_, tenant)| tenant.place.gpus == alone)
            {
                if trial.0.hosts(gpu, demand) {
                    break;
                }
                let mut rest = trial.0;
                rest.with(&tenant.demand, alone);
                let others = rest.hosting(&tenant.demand).filter(|other| *other != gpu);
                // A tenant placed on a GPU that was emptied would undo it.
                let others = others.filter(|other| rest.milli[*other] < WHOLE as u16);
                let Some(to) = others.min_by_key(|other| rest.milli[*other]) else {
                    continue;
                };
                let gpus = Gpus::default().with(to);
                let Some(left) = rest.without(&tenant.demand, gpus) else {
                    continue;
                };
                let stated = u64::from(tenant.demand.gpu_memory_mib);
                let share = u64::from(card_mib) * u64::from(tenant.demand.milli) / u64::from(WHOLE);
                trial.0 = left;
                trial.1.push(Move {
                    tenant: *id,
                    to: Place { node, gpus },
                });
                trial.2 += if stated > 0 { stated } else { share };
            }
            if trial.0.hosts(gpu, demand) {
                free = trial.0;
                cost += trial.2;
                moves.extend(trial.1);
            }
        }
        free.fits(demand).then_some((cost, moves))
    }

    /// The tenants of a node, by number.
    pub fn on(&self, node: NodeId) -> impl Iterator<Item = (TenantId, Tenant)> + '_ {
        self.on[node as usize]
            .iter()
            .map(|id| (*id, self.tenants[id]))
    }

    /// Number of changes so far: the time of the fleet.
    pub fn changes(&self) -> u64 {
        self.changes
    }

    /// Nodes that changed after that many changes.
    pub fn changed_since(&self, changes: u64) -> impl Iterator<Item = NodeId> + '_ {
        self.recent.range((changes + 1, 0)..).map(|(_, node)| *node)
    }

    fn touch(&mut self, node: NodeId) {
        let changed = &mut self.changed[node as usize];
        self.recent.remove(&(*changed, node));
        self.changes += 1;
        *changed = self.changes;
        self.recent.insert((self.changes, node));
    }
}
