//! The fleet as the API server shows it, and the order of nodes for a pod. Pure: changes of objects go in, scores come out.

use std::collections::{BTreeMap, BTreeSet};

use gpumux_fleet::{
    engine::Engine,
    fleet::{Fleet, Gpus, NodeId, Place, TenantId},
    model::{Demand, MOST_GPUS, Models, NodeSpec},
};
use k8s_openapi::api::{
    core::v1::{Node, Pod},
    resource::v1::{DeviceClass, ResourceClaim, ResourceSlice},
};

use super::request::{Asked, Claim, Class, Name};
use crate::{DRIVER, model::Resource, quantity};

/// The score of the best node: what the scheduler takes from an extender at most.
pub const BEST: i64 = 10;
/// Pods that are known before the engine learns from them.
const LEAST_PODS: usize = 32;
const MIB: u64 = 1 << 20;

/// An object of a kind that is followed.
#[derive(Clone, Debug)]
pub enum Object {
    /// A node.
    Node(Box<Node>),
    /// A pod.
    Pod(Box<Pod>),
    /// Devices of a node.
    Slice(Box<ResourceSlice>),
    /// A claim.
    Claim(Box<ResourceClaim>),
    /// A class of devices.
    Class(Box<DeviceClass>),
}

/// The kinds that are followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Nodes.
    Node,
    /// Pods.
    Pod,
    /// ResourceSlices.
    Slice,
    /// ResourceClaims.
    Claim,
    /// DeviceClasses.
    Class,
}

impl Kind {
    const ALL: [Self; 5] = [Self::Node, Self::Pod, Self::Slice, Self::Claim, Self::Class];
}

impl Object {
    fn key(&self) -> (Kind, Name) {
        let (kind, metadata) = match self {
            Self::Node(it) => (Kind::Node, &it.metadata),
            Self::Pod(it) => (Kind::Pod, &it.metadata),
            Self::Slice(it) => (Kind::Slice, &it.metadata),
            Self::Claim(it) => (Kind::Claim, &it.metadata),
            Self::Class(it) => (Kind::Class, &it.metadata),
        };
        let text = |text: &Option<String>| text.clone().unwrap_or_default();
        (kind, (text(&metadata.namespace), text(&metadata.name)))
    }
}

/// What a watch reports.
#[derive(Clone, Debug)]
pub enum Change {
    /// All objects of a kind follow.
    Listing(Kind),
    /// These were all.
    Listed(Kind),
    /// An object is so.
    Is(Object),
    /// An object was deleted.
    Gone(Object),
}

/// A node as far as it counts here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Host {
    cpu_milli: u32,
    memory_mib: u32,
}

/// A ResourceSlice as far as it counts here.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Slice {
    node: String,
    generation: i64,
    /// Shared devices that can be allocated: name, product, memory in MiB.
    devices: Vec<(String, String, u32)>,
}

/// Follows the cluster and orders its nodes.
pub struct Cluster {
    hosts: BTreeMap<String, Host>,
    slices: BTreeMap<String, Slice>,
    classes: BTreeMap<String, Class>,
    claims: BTreeMap<Name, Claim>,
    pods: BTreeMap<Name, Asked>,
    /// Kinds that were listed at least once, and objects that a listing has not named yet.
    listed: BTreeSet<Kind>,
    unnamed: BTreeSet<(Kind, Name)>,
    fleet: Fleet,
    /// Number and device names of each node in the fleet.
    nodes: BTreeMap<String, (NodeId, Vec<String>)>,
    /// Tenants in the fleet: of claims, and of pods for their CPUs.
    tenants: BTreeMap<(Kind, Name), Vec<TenantId>>,
    next: TenantId,
    /// Nodes or devices changed: the fleet is built anew before it is used.
    stale: bool,
    engine: Engine,
    /// Pods with shares that came since the engine learned, and from how many it did.
    since: usize,
    learned: usize,
}

impl Default for Cluster {
    fn default() -> Self {
        Self {
            hosts: BTreeMap::new(),
            slices: BTreeMap::new(),
            classes: BTreeMap::new(),
            claims: BTreeMap::new(),
            pods: BTreeMap::new(),
            listed: BTreeSet::new(),
            unnamed: BTreeSet::new(),
            fleet: Fleet::default(),
            nodes: BTreeMap::new(),
            tenants: BTreeMap::new(),
            next: 0,
            stale: false,
            engine: Engine::new(&[], &[], Vec::new()),
            since: 0,
            learned: 0,
        }
    }
}

impl Cluster {
    /// Takes a change in.
    pub fn apply(&mut self, change: Change) {
        match change {
            Change::Listing(kind) => {
                let same = |key: &&(Kind, Name)| key.0 == kind;
                let keys: Vec<_> = self.keys().filter(|key| same(&key)).collect();
                self.unnamed.retain(|key| key.0 != kind);
                self.unnamed.extend(keys);
            }
            Change::Listed(kind) => {
                let (gone, left) = std::mem::take(&mut self.unnamed)
                    .into_iter()
                    .partition(|key| key.0 == kind);
                self.unnamed = left;
                let gone: BTreeSet<(Kind, Name)> = gone;
                gone.iter().for_each(|key| self.remove(key));
                self.listed.insert(kind);
            }
            Change::Is(object) => {
                let key = object.key();
                self.unnamed.remove(&key);
                self.put(&key, &object);
            }
            Change::Gone(object) => self.remove(&object.key()),
        }
    }

    /// Whether all kinds were listed, so that nothing is missing.
    pub fn is_complete(&self) -> bool {
        self.listed.len() == Kind::ALL.len()
    }

    fn keys(&self) -> impl Iterator<Item = (Kind, Name)> + '_ {
        let of = |kind: Kind| move |name: &String| (kind, (String::new(), name.clone()));
        let hosts = self.hosts.keys().map(of(Kind::Node));
        let slices = self.slices.keys().map(of(Kind::Slice));
        let classes = self.classes.keys().map(of(Kind::Class));
        let claims = self.claims.keys().map(|name| (Kind::Claim, name.clone()));
        let pods = self.pods.keys().map(|name| (Kind::Pod, name.clone()));
        hosts.chain(slices).chain(classes).chain(claims).chain(pods)
    }

    fn put(&mut self, key: &(Kind, Name), object: &Object) {
        let name = key.1.clone();
        match object {
            Object::Node(node) => {
                let host = host(node);
                self.stale |= self.hosts.insert(name.1, host) != Some(host);
            }
            Object::Slice(slice) => match self::slice(slice) {
                Some(slice) => {
                    let before = self.slices.insert(name.1, slice.clone());
                    self.stale |= before.as_ref() != Some(&slice);
                }
                None => self.remove(key),
            },
            Object::Class(class) => match Class::of(class) {
                Some(class) => drop(self.classes.insert(name.1, class)),
                None => self.remove(key),
            },
            Object::Claim(claim) => {
                let claim = Claim::of(claim);
                if self.claims.get(&name) != Some(&claim) {
                    self.release(key);
                    self.claims.insert(name, claim);
                    self.place(key);
                }
            }
            Object::Pod(pod) => match Asked::of(pod) {
                Some(asked) if self.pods.get(&name) != Some(&asked) => {
                    self.release(key);
                    let shares = asked.node.is_some() && asked.may_share();
                    let known = self.pods.insert(name, asked);
                    let new = known.is_none_or(|known| known.node.is_none());
                    self.since += usize::from(shares && new);
                    self.place(key);
                }
                Some(_) => {}
                None => self.remove(key),
            },
        }
    }

    fn remove(&mut self, key: &(Kind, Name)) {
        self.release(key);
        let (kind, name) = key;
        match kind {
            Kind::Node => self.stale |= self.hosts.remove(&name.1).is_some(),
            Kind::Slice => self.stale |= self.slices.remove(&name.1).is_some(),
            Kind::Class => drop(self.classes.remove(&name.1)),
            Kind::Claim => drop(self.claims.remove(name)),
            Kind::Pod => drop(self.pods.remove(name)),
        }
    }

    /// Takes what an object holds out of the fleet.
    fn release(&mut self, key: &(Kind, Name)) {
        for tenant in self.tenants.remove(key).into_iter().flatten() {
            self.fleet.release(tenant);
        }
    }

    /// Puts what an object holds into the fleet. What does not fit there is left out: the scheduler has the last word, and the order of
    /// nodes gets worse by it at most.
    fn place(&mut self, key: &(Kind, Name)) {
        let mut wanted: Vec<(Demand, Place)> = Vec::new();
        match key.0 {
            Kind::Claim => {
                let held = self
                    .claims
                    .get(&key.1)
                    .and_then(|claim| claim.held.as_ref());
                for held in held.into_iter().flatten() {
                    let Some((node, devices)) = self.nodes.get(&held.node) else {
                        continue;
                    };
                    let name = held.device.strip_suffix("-whole").unwrap_or(&held.device);
                    let gpu = devices.iter().position(|device| device == name);
                    let place = |gpu| (*node, Gpus::default().with(gpu));
                    let place = gpu.map(place).map(|(node, gpus)| Place { node, gpus });
                    wanted.extend(place.map(|place| (held.demand, place)));
                }
            }
            Kind::Pod => {
                let bound = self.pods.get(&key.1);
                let node = bound.and_then(|pod| self.nodes.get(pod.node.as_ref()?));
                if let (Some(pod), Some((node, _))) = (bound, node) {
                    let demand = Demand {
                        cpu_milli: pod.cpu_milli,
                        memory_mib: pod.memory_mib,
                        ..Demand::default()
                    };
                    let (node, gpus) = (*node, Gpus::default());
                    wanted.push((demand, Place { node, gpus }));
                }
            }
            Kind::Node | Kind::Slice | Kind::Class => {}
        }
        for (demand, place) in wanted {
            self.next += 1;
            if self.fleet.place(self.next, demand, place).is_ok() {
                self.tenants.entry(key.clone()).or_default().push(self.next);
            }
        }
    }

    /// Builds the fleet anew if nodes or devices changed.
    fn refresh(&mut self) {
        if !std::mem::take(&mut self.stale) {
            return;
        }
        let mut models = Models::default();
        let mut specs = Vec::new();
        self.nodes.clear();
        for (name, host) in &self.hosts {
            let own = || self.slices.values().filter(|slice| slice.node == *name);
            let newest = own().map(|slice| slice.generation).max();
            let devices: Vec<_> = own()
                .filter(|slice| Some(slice.generation) == newest)
                .flat_map(|slice| &slice.devices)
                .take(MOST_GPUS)
                .collect();
            let Some((_, product, _)) = devices.first() else {
                continue;
            };
            let number = NodeId::try_from(specs.len()).unwrap_or(NodeId::MAX);
            let names = devices.iter().map(|(name, ..)| name.clone()).collect();
            self.nodes.insert(name.clone(), (number, names));
            specs.push(NodeSpec {
                name: name.clone(),
                cpu_milli: host.cpu_milli,
                memory_mib: host.memory_mib,
                gpus: u8::try_from(devices.len()).unwrap_or(u8::MAX),
                // More models than the engine tells apart count as one.
                model: models.number(product).unwrap_or(0),
                gpu_memory_mib: devices.iter().map(|(.., mib)| *mib).min().unwrap_or(0),
                domain: 0,
            });
        }
        self.fleet = Fleet::new(specs);
        self.engine.forget_nodes();
        self.tenants.clear();
        let claims = self.claims.keys().map(|name| (Kind::Claim, name.clone()));
        let pods = self.pods.keys().map(|name| (Kind::Pod, name.clone()));
        let keys: Vec<_> = claims.chain(pods).collect();
        keys.iter().for_each(|key| self.place(key));
    }

    /// The score of each of these nodes for the pod: [`BEST`] for the best one, one less for the next best, and 0 from the eleventh on.
    /// All are 0 if the pod asks nothing of the driver that is still to be allocated.
    pub fn scores<'a>(&mut self, pod: &Pod, nodes: impl Iterator<Item = &'a str>) -> Vec<i64> {
        self.refresh();
        let asked = Asked::of(pod);
        let demands = asked.map(|asked| asked.demands(&self.claims, &self.classes, true));
        let demands = demands.unwrap_or_default();
        let numbers: Vec<Option<NodeId>> = nodes
            .map(|name| self.nodes.get(name).map(|(number, _)| *number))
            .collect();
        let mut scores = vec![0; numbers.len()];
        if demands.is_empty() {
            return scores;
        }
        let mut offered = vec![None; self.fleet.specs().len()];
        for (at, number) in numbers.iter().enumerate() {
            if let Some(slot) = number.and_then(|number| offered.get_mut(number as usize)) {
                *slot = Some(at);
            }
        }
        let order = self.engine.order(&self.fleet, &demands).into_iter();
        let places = order.filter_map(|node| offered.get(node as usize).copied().flatten());
        for (at, score) in places.zip((1..=BEST).rev()) {
            scores[at] = score;
        }
        scores
    }

    /// The nodes and the workload that the engine should learn from, once as many pods came as it learned from the last time.
    pub fn lesson(&mut self) -> Option<Lesson> {
        if self.since < self.learned.max(LEAST_PODS) || !self.is_complete() {
            return None;
        }
        self.refresh();
        let bound = self.pods.values().filter(|pod| pod.node.is_some());
        let asked = bound.map(|pod| pod.demands(&self.claims, &self.classes, false));
        let workload: Vec<Demand> = asked.flatten().collect();
        (self.since, self.learned) = (0, workload.len());
        let specs = self.fleet.specs().to_vec();
        (!workload.is_empty()).then_some(Lesson { specs, workload })
    }

    /// The engine learned.
    pub fn learned(&mut self, engine: Engine) {
        self.engine = engine;
    }

    /// GPUs that are known, and thousandths of them that are free.
    pub fn free(&mut self) -> (u64, u64) {
        self.refresh();
        let free = self.fleet.free().iter();
        let free = free.map(|free| u64::from(free.total_milli())).sum();
        (self.fleet.total_milli() / 1000, free)
    }
}

/// What an engine learns from: seconds of work for thousands of GPUs, so away from the state.
#[derive(Clone, Debug)]
pub struct Lesson {
    specs: Vec<NodeSpec>,
    workload: Vec<Demand>,
}

impl Lesson {
    /// The engine that learned it.
    pub fn learn(&self) -> Engine {
        Engine::new(&self.specs, &self.workload, Vec::new())
    }
}

fn host(node: &Node) -> Host {
    let status = node.status.as_ref();
    let allocatable = status.and_then(|status| status.allocatable.as_ref());
    let of = |name: &str| allocatable.and_then(|all| all.get(name));
    let small = |value: u64| u32::try_from(value).unwrap_or(u32::MAX);
    let cpu = of("cpu").and_then(|cpu| quantity::milli(cpu).ok());
    let memory = of("memory").and_then(|memory| quantity::parse(memory).ok());
    Host {
        cpu_milli: small(cpu.unwrap_or(0)),
        memory_mib: small(memory.unwrap_or(0) / MIB),
    }
}

/// None of another driver, or of a slice without a node.
fn slice(slice: &ResourceSlice) -> Option<Slice> {
    let spec = &slice.spec;
    if spec.driver != DRIVER {
        return None;
    }
    let devices = spec.devices.iter().flatten().filter(|device| {
        let tainted = device.taints.iter().flatten().any(|it| it.effect != "None");
        device.allow_multiple_allocations == Some(true) && !tainted
    });
    let devices = devices.map(|device| {
        let attributes = device.attributes.as_ref();
        let product = attributes.and_then(|all| all.get("productName")?.string.clone());
        let capacity = device.capacity.as_ref();
        let memory = capacity.and_then(|all| all.get(Resource::Memory.name()));
        let memory = memory.and_then(|memory| quantity::parse(&memory.value).ok());
        let mib = u32::try_from(memory.unwrap_or(0) / MIB).unwrap_or(u32::MAX);
        (device.name.clone(), product.unwrap_or_default(), mib)
    });
    Some(Slice {
        node: spec.node_name.clone()?,
        generation: spec.pool.generation,
        devices: devices.collect(),
    })
}
