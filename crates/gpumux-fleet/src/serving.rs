//! Models that serve requests, and the GPUs that they need.
//!
//! A [`Profile`] holds measured step times of models by GPUs, share of them, and batch, in the form that MuxServe
//! published. From it follows the smallest [`Slot`] in which a service keeps its rate and its latency objective, and so
//! a list of tenants for any way of sharing. [`together`] computes MuxServe's own kind of placement by the same table.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{
    fleet::{Fleet, Place},
    model::{Class, Demand, MOST_GPUS, ModelSet, NodeSpec, Pod, WHOLE},
    sizing::{Chooser, Sharing},
};

/// Measured times in milliseconds; a negative one was not measured, or did not fit into memory.
#[derive(Clone, Copy, Debug, Deserialize)]
struct Step {
    prefill: f64,
    decoding: f64,
}

/// By batch and by tokens of a sequence.
type Steps = BTreeMap<u32, BTreeMap<u32, Step>>;

/// Step times of models: model, GPUs, percent of each, batch, tokens of a sequence.
#[derive(Clone, Debug, Deserialize)]
#[serde(transparent)]
pub struct Profile(BTreeMap<String, BTreeMap<u32, BTreeMap<u32, Steps>>>);

/// A model that serves requests.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Service {
    /// Its name.
    pub name: String,
    /// Its model's name in the profile.
    pub model: String,
    /// Requests per second.
    pub rate: f64,
    /// Tokens of a mean request.
    pub prompt_tokens: u32,
    /// Tokens of a mean answer.
    pub output_tokens: u32,
    /// Memory of the weights on all its GPUs together, in MiB.
    pub weights_mib: u32,
    /// Memory that a token of a sequence keeps, in bytes.
    pub kv_bytes: u32,
    /// The profile counts from so many GPUs on.
    pub fewest_gpus: u32,
}

/// What holds for all services.
#[derive(Clone, Copy, Debug)]
pub struct Terms {
    /// Memory of a GPU, in MiB.
    pub card_mib: u32,
    /// Memory that a model uses on each GPU besides weights and tokens, in MiB.
    pub working_mib: u32,
    /// A request may take so many times as long as alone on the fewest GPUs.
    pub slower: f64,
}

/// Equal copies of a service, each with a share of some GPUs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Slot {
    /// Copies.
    pub copies: u32,
    /// GPUs of a copy.
    pub gpus: u32,
    /// Share of each GPU, in percent.
    pub percent: u32,
    /// Requests at a time in a copy.
    pub batch: u32,
    /// Memory on each GPU, in MiB.
    pub memory_mib: u32,
}

/// Why a service has no slot.
#[derive(Debug, PartialEq, thiserror::Error)]
pub enum Error {
    /// Not measured.
    #[error("the profile has no model `{0}`: measure it, or name one that is there")]
    Model(String),
    /// Too large or too slow everywhere.
    #[error(
        "{name}: no GPUs of the profile hold `{model}` in {card_mib} MiB each at its latency objective"
    )]
    Room {
        /// The service.
        name: String,
        /// Its model.
        model: String,
        /// Memory of a GPU.
        card_mib: u32,
    },
}

/// One model on some GPUs with a share of each.
struct Speed<'a> {
    steps: &'a Steps,
    service: &'a Service,
}

impl Speed<'_> {
    /// Time of one prompt, in ms, in the best measured batch. Infinite if none was measured.
    fn prefill(&self) -> f64 {
        let each = |(batch, by_tokens): (&u32, &BTreeMap<u32, Step>)| {
            let times = by_tokens.range(self.service.prompt_tokens..);
            let mut times = times.map(|(_, step)| step.prefill);
            let last = || by_tokens.values().next_back().map(|step| step.prefill);
            let time = times.find(|time| *time > 0.0).or_else(last)?;
            (time > 0.0).then(|| time / f64::from(*batch))
        };
        let each = self.steps.iter().filter_map(each);
        each.fold(f64::INFINITY, f64::min)
    }

    /// Time of one step that yields a token for each of the batch, in ms: between measured batches a straight line.
    fn decode(&self, batch: u32) -> Option<f64> {
        let tokens = self.service.prompt_tokens + self.service.output_tokens / 2;
        let at = |by_tokens: &BTreeMap<u32, Step>| {
            let known = |step: &&Step| step.decoding > 0.0;
            let fits = by_tokens.range(tokens..).map(|(_, step)| step).find(known);
            let near = || by_tokens.values().rev().find(known);
            fits.or_else(near).map(|step| step.decoding)
        };
        let mut below = None;
        for (size, by_tokens) in self.steps {
            let Some(time) = at(by_tokens) else { continue };
            let here = (f64::from(*size), time);
            if *size == batch {
                return Some(time);
            }
            if *size > batch {
                let (size, time): (f64, f64) = below?;
                let part = (f64::from(batch) - size) / (here.0 - size);
                return Some(time + part * (here.1 - time));
            }
            below = Some(here);
        }
        None
    }

    /// Time in which a full batch is served, in ms.
    fn served_ms(&self, batch: u32) -> Option<f64> {
        let decoding = self.decode(batch)? * f64::from(self.service.output_tokens);
        Some(f64::from(batch) * self.prefill() + decoding)
    }

    /// Requests per second.
    fn rate(&self, batch: u32) -> Option<f64> {
        Some(f64::from(batch) * 1e3 / self.served_ms(batch)?)
    }
}

impl Profile {
    /// GPUs, percent of each, and how fast the service is there.
    fn speeds<'a>(
        &'a self,
        service: &'a Service,
    ) -> Result<impl Iterator<Item = (u32, u32, Speed<'a>)>, Error> {
        let by_gpus = self.0.get(&service.model);
        let by_gpus = by_gpus.ok_or_else(|| Error::Model(service.model.clone()))?;
        let measured = by_gpus.range(service.fewest_gpus..);
        Ok(measured.flat_map(move |(gpus, by_percent)| {
            by_percent
                .iter()
                .map(move |(percent, steps)| (*gpus, *percent, Speed { steps, service }))
        }))
    }

    fn speed<'a>(&'a self, service: &'a Service, gpus: u32, percent: u32) -> Option<Speed<'a>> {
        let steps = self.0.get(&service.model)?.get(&gpus)?.get(&percent)?;
        Some(Speed { steps, service })
    }

    /// Time in which a request may be served, in ms.
    fn objective_ms(&self, service: &Service, terms: &Terms) -> Result<f64, Error> {
        let whole = self
            .speeds(service)?
            .find(|(_, percent, _)| *percent == 100);
        let alone = whole.and_then(|(_, _, speed)| speed.served_ms(1));
        Ok(alone.map_or(0.0, |alone| alone * terms.slower))
    }

    /// Where a copy of the service keeps its latency objective, with the most requests at a time and the rate of each.
    fn options<'a>(
        &'a self,
        service: &'a Service,
        terms: &'a Terms,
        whole: bool,
    ) -> Result<impl Iterator<Item = (Slot, f64, Speed<'a>)>, Error> {
        let objective = self.objective_ms(service, terms)?;
        let option = move |(gpus, percent, speed): (u32, u32, Speed<'a>)| {
            if whole && percent < 100 || gpus as usize > MOST_GPUS {
                return None;
            }
            let in_time = |batch: &u32| {
                memory_mib(service, terms, gpus, *batch) <= terms.card_mib
                    && speed.served_ms(*batch).is_some_and(|ms| ms <= objective)
            };
            let most = speed.steps.keys().next_back().copied()?;
            let batch = (1..=most).rev().find(in_time)?;
            let slot = Slot {
                copies: 1,
                gpus,
                percent,
                batch,
                memory_mib: memory_mib(service, terms, gpus, batch),
            };
            Some((slot, speed.rate(batch)?, speed))
        };
        Ok(self.speeds(service)?.filter_map(option))
    }

    /// The slot that costs least of the larger of share and memory, at which the service keeps rate and latency
    /// objective; among equals the one of fewest copies and GPUs. `whole`: of whole GPUs only.
    ///
    /// # Errors
    /// The profile has no such model, or none of its measurements suffices.
    pub fn smallest(&self, service: &Service, terms: &Terms, whole: bool) -> Result<Slot, Error> {
        let fitted = |(most, fastest, speed): (Slot, f64, Speed<'_>)| {
            let copies = (service.rate / fastest).ceil().max(1.0);
            let enough = |batch: &u32| speed.rate(*batch) >= Some(service.rate / copies);
            let batch = (1..=most.batch).find(enough).unwrap_or(most.batch);
            let slot = Slot {
                copies: copies as u32,
                batch,
                memory_mib: memory_mib(service, terms, most.gpus, batch),
                ..most
            };
            let held = slot.memory_mib * 100 / terms.card_mib.max(1);
            let each = if whole { 100 } else { slot.percent.max(held) };
            let gpus = slot.copies * slot.gpus;
            ((gpus * each, gpus, slot.copies), slot)
        };
        let found = self.options(service, terms, whole)?.map(fitted);
        let best = found.min_by_key(|(cost, _)| *cost);
        best.map(|(_, slot)| slot)
            .ok_or_else(|| no_room(service, terms))
    }
}

impl Profile {
    /// Time of whole GPUs that a request of the service takes in the largest batch that keeps its latency objective, in
    /// ms times GPUs.
    ///
    /// # Errors
    /// As [`Self::smallest`].
    pub fn each_ms(&self, service: &Service, terms: &Terms) -> Result<f64, Error> {
        let first = self.options(service, terms, true)?.next();
        let each = first.map(|(slot, rate, _)| f64::from(slot.gpus) * 1e3 / rate);
        each.ok_or_else(|| no_room(service, terms))
    }
}

fn no_room(service: &Service, terms: &Terms) -> Error {
    Error::Room {
        name: service.name.clone(),
        model: service.model.clone(),
        card_mib: terms.card_mib,
    }
}

/// Memory on each GPU, in MiB.
fn memory_mib(service: &Service, terms: &Terms, gpus: u32, batch: u32) -> u32 {
    let tokens = u64::from(batch) * u64::from(service.prompt_tokens + service.output_tokens);
    let kept = (tokens * u64::from(service.kv_bytes)).div_ceil(1 << 20);
    let all = (u64::from(service.weights_mib) + kept).div_ceil(u64::from(gpus.max(1)));
    u32::try_from(all + u64::from(terms.working_mib)).unwrap_or(u32::MAX)
}

/// A copy of a service as a tenant.
fn tenant(service: &Service, slot: &Slot) -> Pod {
    Pod {
        name: service.name.clone(),
        demand: Demand {
            gpus: slot.gpus as u8,
            milli: slot.percent * WHOLE / 100,
            models: ModelSet::ANY,
            gpu_memory_mib: slot.memory_mib,
            class: Class::Guaranteed,
            ..Demand::default()
        },
        created_s: 0,
        deleted_s: u64::MAX,
        latency_sensitive: true,
    }
}

/// The copies as tenants, each with the number of its service; those with most requests per share of a GPU come first.
pub fn tenants(services: &[Service], slots: &[Slot]) -> Vec<(usize, Pod)> {
    let each = |nth: usize| {
        let slot = &slots[nth];
        services[nth].rate / f64::from(slot.copies * slot.gpus * slot.percent)
    };
    let mut order: Vec<usize> = (0..services.len()).collect();
    order.sort_by(|a, b| each(*b).total_cmp(&each(*a)));
    let copies = |nth: usize| (0..slots[nth].copies).map(move |_| nth);
    let copies = order.into_iter().flat_map(copies);
    copies
        .map(|nth| (nth, tenant(&services[nth], &slots[nth])))
        .collect()
}

/// The part of all requests that is served on a fleet of these nodes, in percent. A copy that finds no room takes the
/// place in which it serves most; one of several on a time-sliced GPU serves in proportion to its turn.
///
/// # Errors
/// The profile does not know a model.
pub fn served(
    specs: &[NodeSpec],
    services: &[Service],
    slots: &[Slot],
    sharing: Sharing,
    (profile, terms): (&Profile, &Terms),
) -> Result<f64, Error> {
    let copies = tenants(services, slots);
    let seen = |pod: &Pod| sharing.seen(pod);
    let workload: Vec<Demand> = copies.iter().map(|(_, pod)| seen(pod)).collect();
    let mut chooser = Chooser::new(specs, &workload, sharing);
    let mut fleet = Fleet::new(specs.to_vec());
    let mut here = vec![[0u32; MOST_GPUS]; specs.len()];
    let mut placed: Vec<(f64, u32, Place)> = Vec::new();
    let mut asked = 0.0;
    for (id, (nth, pod)) in (0..).zip(&copies) {
        let service = &services[*nth];
        let rate = service.rate / f64::from(slots[*nth].copies);
        asked += rate;
        let whole = sharing == Sharing::Exclusive;
        let mut choices = vec![(rate, pod.clone())];
        choices.extend(
            (profile.options(service, terms, whole)?)
                .map(|(slot, most, _)| (most.min(rate), tenant(service, &slot))),
        );
        // What serves as many with less comes first; the slot that was asked for is the first of all.
        choices[1..].sort_by(|(a, pod_a), (b, pod_b)| {
            let less = || pod_a.demand.total_milli().cmp(&pod_b.demand.total_milli());
            b.total_cmp(a).then_with(less)
        });
        for (rate, pod) in choices {
            let demand = seen(&pod);
            let Some(place) = chooser.place(&fleet, &demand) else {
                continue;
            };
            if fleet.place(id, demand, place).is_ok() {
                let node = &mut here[place.node as usize];
                place.gpus.iter().for_each(|gpu| node[gpu] += 1);
                placed.push((rate, pod.demand.milli, place));
                break;
            }
        }
    }
    let serves = |(rate, milli, place): &(f64, u32, Place)| {
        let turn = |gpu: usize| match sharing {
            Sharing::TimeSliced(_) => {
                let turn = f64::from(WHOLE) / f64::from(here[place.node as usize][gpu]);
                (turn / f64::from(*milli)).min(1.0)
            }
            _ => 1.0,
        };
        rate * place.gpus.iter().map(turn).fold(1.0, f64::min)
    };
    Ok(placed.iter().map(serves).sum::<f64>() * 100.0 / asked)
}

/// Services that share some GPUs as MuxServe lets them: a prompt has the GPUs for itself, the steps after it have
/// their percent of them, and memory for tokens is divided by rate.
#[derive(Clone, Debug)]
pub struct Mesh<'a> {
    /// GPUs.
    pub gpus: u32,
    /// Services, and the percent of each.
    pub services: Vec<(&'a Service, u32)>,
}

/// Requests per second of each service of a mesh, by the estimate that MuxServe's planner uses: the batch of the
/// service that is furthest behind grows until all keep up or memory is used up. None for a service that the profile
/// does not tell of there.
pub fn together(profile: &Profile, mesh: &Mesh<'_>, terms: &Terms) -> Vec<Option<f64>> {
    let kept = |service: &Service| {
        f64::from(service.kv_bytes) * f64::from(service.prompt_tokens + service.output_tokens)
            / f64::from(1 << 20)
    };
    let weights: f64 = (mesh.services.iter())
        .map(|(service, _)| {
            f64::from(service.weights_mib) + f64::from(terms.working_mib * mesh.gpus)
        })
        .sum();
    let memory = (f64::from(terms.card_mib) * f64::from(mesh.gpus) - weights).max(0.0);
    let wanted: f64 = (mesh.services.iter())
        .map(|(service, _)| service.rate * kept(service))
        .sum();
    let one = |&(service, percent): &(_, u32)| {
        let prompt_ms = profile.speed(service, mesh.gpus, 100)?.prefill();
        let part = profile.speed(service, mesh.gpus, percent)?;
        let largest = part.steps.keys().next_back().copied().unwrap_or(0);
        let room = (memory * service.rate / wanted) as u32;
        let known = |batch: &u32| part.decode(*batch).is_some();
        let most = (1..=room.min(largest)).rev().find(known)?;
        Some((part, prompt_ms, most))
    };
    let known: Vec<_> = mesh.services.iter().map(one).collect();
    let mut batches: Vec<u32> = vec![1; known.len()];
    loop {
        let prompts: f64 = (known.iter().zip(&batches))
            .filter_map(|(one, batch)| Some(one.as_ref()?.1 * f64::from(*batch)))
            .sum();
        let rate = |(one, batch): (&Option<(Speed<'_>, f64, u32)>, &u32)| {
            let (part, ..) = one.as_ref()?;
            let steps = part.decode(*batch)? * f64::from(part.service.output_tokens);
            Some(f64::from(*batch) * 1e3 / (steps + prompts))
        };
        let rates: Vec<Option<f64>> = known.iter().zip(&batches).map(rate).collect();
        let behind = (0..known.len()).filter_map(|nth| {
            let (part, _, most) = known[nth].as_ref()?;
            let kept_up = rates[nth]? / part.service.rate;
            (kept_up < 1.0 && batches[nth] < *most).then_some((kept_up, nth))
        });
        match behind.min_by(|a, b| a.0.total_cmp(&b.0)) {
            Some((_, nth)) => batches[nth] += 1,
            None => return rates,
        }
    }
}
