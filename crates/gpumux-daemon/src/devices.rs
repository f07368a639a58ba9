//! The devices as NVML knows them. Without NVML, devices are known once a tenant shows them.

use std::{
    path::PathBuf,
    sync::{Arc, PoisonError, RwLock},
    thread,
    time::Duration,
};

use nvml_wrapper::{Nvml, error::NvmlError};
use tokio::sync::watch;

/// How often NVML is asked whether the devices are well, and how much of their memory is used.
const EVERY: Duration = Duration::from_secs(1);

/// One device.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Known {
    pub(crate) uuid: String,
    pub(crate) name: String,
    pub(crate) memory_bytes: u64,
    /// Bytes in use, by whomever.
    pub(crate) memory_used: u64,
    pub(crate) driver: String,
    /// `ok`, or what is wrong.
    pub(crate) state: String,
}

/// What is known of all devices.
#[derive(Clone, Default)]
pub(crate) struct Devices(Arc<RwLock<Vec<Known>>>);

impl Devices {
    pub(crate) fn list(&self) -> Vec<Known> {
        self.0
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Watches the devices from a thread of its own: a driver in trouble may not answer for
    /// long. The receiver changes each time they were looked at.
    pub(crate) fn watch(library: Option<PathBuf>) -> (Self, watch::Receiver<bool>) {
        let devices = Self::default();
        let (looked, changes) = watch::channel(false);
        let own = devices.clone();
        let body = move || {
            let nvml = match init(library.as_deref()) {
                Ok(nvml) => nvml,
                Err(error) => {
                    tracing::info!(%error, "no NVML: devices are known once a tenant uses them");
                    let _ = looked.send(true);
                    return;
                }
            };
            while !looked.is_closed() {
                own.look(&nvml);
                let _ = looked.send(true);
                thread::park_timeout(EVERY);
            }
        };
        if let Err(error) = thread::Builder::new().name("nvml".into()).spawn(body) {
            tracing::warn!(%error, "cannot watch the devices");
        }
        (devices, changes)
    }

    fn look(&self, nvml: &Nvml) {
        let driver = nvml.sys_driver_version().unwrap_or_default();
        let old = self.list();
        let new: Vec<Known> = (0..nvml.device_count().unwrap_or(0))
            .filter_map(|index| match describe(nvml, index) {
                Ok((uuid, name, memory_bytes, memory_used)) => {
                    let state = "ok".into();
                    Some(Known {
                        uuid,
                        name,
                        memory_bytes,
                        memory_used,
                        driver: driver.clone(),
                        state,
                    })
                }
                Err(error) => {
                    let known = old.get(index as usize)?.clone();
                    tracing::error!(device = known.uuid, %error, "a device is in trouble");
                    Some(Known {
                        state: error.to_string(),
                        ..known
                    })
                }
            })
            .collect();
        // A driver that does not answer at all has not lost its devices.
        if new != old && !new.is_empty() {
            *self.0.write().unwrap_or_else(PoisonError::into_inner) = new;
        }
    }
}

fn init(library: Option<&std::path::Path>) -> Result<Nvml, NvmlError> {
    match library {
        Some(path) => Nvml::builder().lib_path(path.as_os_str()).init(),
        // Its plain name comes with the development files only.
        None => Nvml::builder()
            .lib_path("libnvidia-ml.so.1".as_ref())
            .init()
            .or_else(|_| Nvml::init()),
    }
}

fn describe(nvml: &Nvml, index: u32) -> Result<(String, String, u64, u64), NvmlError> {
    let device = nvml.device_by_index(index)?;
    let memory = device.memory_info()?;
    Ok((device.uuid()?, device.name()?, memory.total, memory.used))
}
