//! MIG instances that are made for claims: which the node can offer, and what is to be made or removed for a claim, also after a
//! crash. Everything is decided from a listing of the daemon's. Only what a record names is ever removed.

use std::{collections::BTreeSet, fmt};

use gpumux_daemon::api::types::{MigCompute, MigGpu, MigInstance, MigProfile};
use serde::{Deserialize, Serialize};

/// Where in a GPU an instance is, or can be.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Place {
    /// UUID of the GPU.
    pub gpu: String,
    /// Such as `1g.10gb`.
    pub profile: String,
    /// The first memory slice.
    pub start: u32,
    /// How many memory slices.
    pub memory_slices: u32,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            gpu,
            profile,
            start,
            ..
        } = self;
        write!(f, "{profile} at memory slice {start} of {gpu}")
    }
}

impl Place {
    /// Whether both have a memory slice.
    pub fn overlaps(&self, other: &Self) -> bool {
        self.gpu == other.gpu
            && self.start < other.start.saturating_add(other.memory_slices)
            && other.start < self.start.saturating_add(self.memory_slices)
    }

    /// The place of an instance that exists.
    pub fn of(gpu: &MigGpu, instance: &MigInstance) -> Self {
        Self {
            gpu: gpu.uuid.clone(),
            profile: instance.profile.clone(),
            start: instance.start,
            memory_slices: instance.memory_slices,
        }
    }
}

/// An instance that can be made, as a device of a slice.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offer {
    /// Where.
    pub place: Place,
    /// Slices of processors that it has.
    pub slices: u32,
    /// Slices of processors of its GPU that other drivers' and people's instances leave.
    pub slices_free: u32,
    /// Instances of the profile that those leave.
    pub most: u32,
    /// For a claim: it was recorded before anything was made, so that an instance there is the claim's.
    #[serde(default)]
    pub recorded: bool,
}

/// What a GPU can offer, beside the instances of others. `own`: the places that records name.
pub fn offers<'a>(gpu: &'a MigGpu, own: &BTreeSet<Place>) -> Vec<(Offer, &'a MigProfile)> {
    let others = || {
        let all = gpu.instances.iter();
        all.filter(|it| !own.contains(&Place::of(gpu, it)))
    };
    let whole = gpu.profiles.iter().map(|it| it.slices).max();
    let taken = others().map(|it| it.slices).sum();
    let slices_free = whole.unwrap_or(0).saturating_sub(taken);
    let offer = |profile: &'a MigProfile, start: u32| {
        let alike = others().filter(|it| it.profile == profile.name).count();
        let place = Place {
            gpu: gpu.uuid.clone(),
            profile: profile.name.clone(),
            start,
            memory_slices: profile.memory_slices,
        };
        let most = profile.most.saturating_sub(alike as u32);
        let is_free = others().all(|it| !Place::of(gpu, it).overlaps(&place));
        let fits = is_free && profile.slices <= slices_free && most > 0;
        let offer = Offer {
            place,
            slices: profile.slices,
            slices_free,
            most,
            recorded: false,
        };
        fits.then_some((offer, profile))
    };
    let profiles = gpu.profiles.iter();
    let places = profiles.flat_map(|it| it.starts.iter().map(move |start| (it, *start)));
    places
        .filter_map(|(profile, start)| offer(profile, start))
        .collect()
}

/// The instance at a place.
pub fn at<'a>(place: &Place, gpus: &'a [MigGpu]) -> Option<&'a MigInstance> {
    let gpu = gpus.iter().find(|gpu| gpu.uuid == place.gpu)?;
    let mut all = gpu.instances.iter();
    all.find(|it| Place::of(gpu, it) == *place)
}

/// What is next on the way to an instance for a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// Nothing is there: make it.
    Make,
    /// A part of it is there, without a compute instance: remove it first.
    Remake(u32),
    /// It is there.
    Use(u32, MigCompute),
    /// It cannot be: why.
    Blocked(String),
}

/// What is next for a claim that was allocated a place. `recorded`: a record named it before, so that an instance there is the claim's.
pub fn next(place: &Place, recorded: bool, gpus: &[MigGpu]) -> Next {
    let Some(gpu) = gpus.iter().find(|gpu| gpu.uuid == place.gpu) else {
        return Next::Blocked(format!("{} is not in MIG mode (any more)", place.gpu));
    };
    if let Some(there) = at(place, gpus).filter(|_| recorded) {
        return match &there.compute_instances[..] {
            [] => Next::Remake(there.gpu_instance),
            [one] if one.device.is_empty() => Next::Blocked(format!(
                "NVML does not list the compute instance of {place} as a device: try again"
            )),
            [one] => Next::Use(there.gpu_instance, one.clone()),
            several => Next::Blocked(format!(
                "{place} has {} compute instances, which the driver did not make: remove them first",
                several.len()
            )),
        };
    }
    let overlaps = |it: &&MigInstance| Place::of(gpu, it).overlaps(place);
    match gpu.instances.iter().find(overlaps) {
        None => Next::Make,
        Some(other) => Next::Blocked(format!(
            "{place} is held by GPU instance {} ({} at {}), which this claim has not made: remove it, or wait until it is gone",
            other.gpu_instance, other.profile, other.start
        )),
    }
}

/// The instance to be removed for a claim that goes, and its device: the one that its record names, or if it names no device yet, the
/// one at its place. None: there is none, or it is another's.
pub fn removal(offer: &Offer, device: &str, gpus: &[MigGpu]) -> Option<(u32, Option<String>)> {
    let there = at(&offer.place, gpus).filter(|_| offer.recorded)?;
    match &there.compute_instances[..] {
        [] => Some((there.gpu_instance, None)),
        [one] if device.is_empty() || one.device.is_empty() || one.device == device => {
            Some((there.gpu_instance, Some(one.device.clone())))
        }
        _ => None,
    }
}

#[cfg(test)]
pub(crate) mod tests;
