//! MIG instances that are made and removed on request. What is allowed is decided here, from a listing; [`driver`] carries it out by NVML.

mod driver;
mod error;

use std::{path::PathBuf, sync::Arc};

use tokio::sync::{Mutex, oneshot};

use crate::api::types::{MigGpu, MigInstance, MigProfile, NewMigInstance};
use driver::Driver;
pub(crate) use error::MigError;
use error::{LIMIT, join};

/// Makes and removes instances, one at a time.
#[derive(Clone, Debug)]
pub(crate) struct Partitioner {
    library: Option<PathBuf>,
    turn: Arc<Mutex<()>>,
}

impl Partitioner {
    pub(crate) fn new(library: Option<PathBuf>) -> Self {
        Self {
            library,
            turn: Arc::default(),
        }
    }

    /// The GPUs in MIG mode.
    pub(crate) async fn list(&self) -> Result<Vec<MigGpu>, MigError> {
        self.work(Driver::list).await
    }

    /// Makes an instance, and the compute instance that has all of it.
    pub(crate) async fn make(&self, new: NewMigInstance) -> Result<MigInstance, MigError> {
        self.work(move |driver| {
            let gpus = driver.list()?;
            let (gpu, profile) = check_new(&gpus, &new)?;
            let id = driver.make(&gpu.uuid, profile, new.start)?;
            let gpus = driver.list()?;
            let (_, made) = find(&gpus, &new.gpu, id)?;
            Ok(made.clone())
        })
        .await
    }

    /// Removes a GPU instance that has this compute instance and no other; none: that has no compute instance.
    pub(crate) async fn remove(
        &self,
        gpu: String,
        id: u32,
        device: Option<String>,
    ) -> Result<(), MigError> {
        self.work(move |driver| {
            let gpus = driver.list()?;
            let (gpu, instance) = check_removal(&gpus, &gpu, id, device.as_deref())?;
            driver.remove(&gpu.uuid, instance)
        })
        .await
    }

    /// Works with NVML on a thread of its own, which goes on when it takes too long: until it has ended, no other begins.
    async fn work<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Driver) -> Result<T, MigError> + Send + 'static,
    ) -> Result<T, MigError> {
        let turn = tokio::time::timeout(LIMIT, Arc::clone(&self.turn).lock_owned());
        let turn = turn.await.map_err(|_| MigError::Slow)?;
        let (sender, done) = oneshot::channel();
        let library = self.library.clone();
        let body = move || {
            let result = Driver::open(library.as_deref()).and_then(|driver| work(&driver));
            drop(turn);
            let _ = sender.send(result);
        };
        let thread = std::thread::Builder::new().name("mig".into());
        thread
            .spawn(body)
            .map_err(|error| MigError::Thread(error.to_string()))?;
        match tokio::time::timeout(LIMIT, done).await {
            Ok(Ok(result)) => result,
            Ok(Err(_)) => Err(MigError::Thread("it ended early".to_owned())),
            Err(_) => Err(MigError::Slow),
        }
    }
}

fn gpu<'a>(gpus: &'a [MigGpu], uuid: &str) -> Result<&'a MigGpu, MigError> {
    let found = gpus.iter().find(|gpu| gpu.uuid == uuid);
    found.ok_or_else(|| MigError::NoGpu(uuid.to_owned()))
}

fn find<'a>(
    gpus: &'a [MigGpu],
    uuid: &str,
    id: u32,
) -> Result<(&'a MigGpu, &'a MigInstance), MigError> {
    let gpu = gpu(gpus, uuid)?;
    let mut all = gpu.instances.iter();
    let found = all.find(|it| it.gpu_instance == id);
    let none = || MigError::NoInstance {
        gpu: uuid.to_owned(),
        id,
    };
    Ok((gpu, found.ok_or_else(none)?))
}

/// The GPU and the profile of an instance that may be made: it has room beside those that exist.
fn check_new<'a>(
    gpus: &'a [MigGpu],
    new: &NewMigInstance,
) -> Result<(&'a MigGpu, &'a MigProfile), MigError> {
    let gpu = gpu(gpus, &new.gpu)?;
    let profile = gpu.profiles.iter().find(|it| it.name == new.profile);
    let profile = profile.ok_or_else(|| MigError::NoProfile {
        gpu: gpu.uuid.clone(),
        profile: new.profile.clone(),
        known: join(gpu.profiles.iter().map(|it| it.name.clone())),
    })?;
    if !profile.starts.contains(&new.start) {
        return Err(MigError::NoPlace {
            gpu: gpu.uuid.clone(),
            profile: profile.name.clone(),
            start: new.start,
            starts: join(profile.starts.iter().map(u32::to_string)),
        });
    }
    let end = new.start.saturating_add(profile.memory_slices);
    let overlaps =
        |it: &&MigInstance| it.start < end && new.start < it.start.saturating_add(it.memory_slices);
    let of_profile = |it: &&MigInstance| it.profile == profile.name;
    let count = gpu.instances.iter().filter(of_profile).count();
    let mut holders: Vec<&MigInstance> = gpu.instances.iter().filter(overlaps).collect();
    if holders.is_empty() && count >= profile.most as usize {
        holders = gpu.instances.iter().filter(of_profile).collect();
    }
    let whole = gpu.profiles.iter().map(|it| it.slices).max();
    let taken = gpu.instances.iter().map(|it| it.slices).sum::<u32>();
    if holders.is_empty() && taken.saturating_add(profile.slices) > whole.unwrap_or(0) {
        holders = gpu.instances.iter().collect();
    }
    if holders.is_empty() {
        return Ok((gpu, profile));
    }
    Err(MigError::Held {
        gpu: gpu.uuid.clone(),
        profile: profile.name.clone(),
        start: new.start,
        holders: join(holders.into_iter().map(name)),
    })
}

/// An instance for people.
fn name(instance: &MigInstance) -> String {
    let MigInstance {
        gpu_instance,
        profile,
        start,
        ..
    } = instance;
    format!("GPU instance {gpu_instance} ({profile} at {start})")
}

/// The instance that may be removed as far as a listing shows it: it is the one that is meant.
fn check_removal<'a>(
    gpus: &'a [MigGpu],
    uuid: &str,
    id: u32,
    device: Option<&str>,
) -> Result<(&'a MigGpu, &'a MigInstance), MigError> {
    let (gpu, instance) = find(gpus, uuid, id)?;
    let found = instance.compute_instances.iter();
    let found: Vec<&str> = found.map(|it| it.device.as_str()).collect();
    let expected: Vec<&str> = device.into_iter().collect();
    if found == expected {
        return Ok((gpu, instance));
    }
    let named = |devices: Vec<&str>| match devices.is_empty() {
        true => "no compute instance".to_owned(),
        false => join(devices.into_iter().map(str::to_owned)),
    };
    Err(MigError::Other {
        gpu: uuid.to_owned(),
        id,
        found: named(found),
        expected: named(expected),
    })
}

#[cfg(test)]
mod tests;
